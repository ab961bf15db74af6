//! A payload in the hands of whoever is at the context.

use posthaste_core::context::Posted;
use posthaste_core::sync::lock;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;

#[derive(Debug)]
enum Cell<T> {
    Waits(Option<T>),
    TakenBack,
    BegunBy(ThreadId),
}

/// A payload that waits for whoever is at the context to begin with it. Dropped before that, it is taken back: nothing is sent.
#[derive(Debug)]
pub(crate) struct Handed<T>(Arc<Mutex<Cell<T>>>);

/// What that one has of it.
pub(crate) struct Theirs<T>(Arc<Mutex<Cell<T>>>);

impl<T> Handed<T> {
    pub fn over(payload: Option<T>) -> (Handed<T>, Theirs<T>) {
        let cell = Arc::new(Mutex::new(Cell::Waits(payload)));
        (Handed(cell.clone()), Theirs(cell))
    }

    /// Takes it back. `None`: it was begun with.
    pub fn withdraw(&self) -> Option<T> {
        let mut cell = lock(&self.0);
        match &mut *cell {
            Cell::Waits(payload) => {
                let payload = payload.take();
                *cell = Cell::TakenBack;
                payload
            }
            Cell::TakenBack | Cell::BegunBy(_) => None,
        }
    }

    /// What has become of what was begun with, of which that was not asked before. Another thread that is amid it waits for nothing,
    /// and is waited for; this one, which asks from within what it is about there, hears nothing of it.
    pub fn end_of<R>(self, posted: Posted<R>) -> Option<R> {
        let look = &mut Context::from_waker(Waker::noop());
        let me = std::thread::current().id();
        let by_another = matches!(*lock(&self.0), Cell::BegunBy(thread) if thread != me);
        loop {
            match posted.poll(look) {
                Poll::Ready(end) => return Some(end),
                Poll::Pending if by_another => std::thread::yield_now(),
                Poll::Pending => return None,
            }
        }
    }
}

impl<T> Drop for Handed<T> {
    fn drop(&mut self) {
        drop(self.withdraw());
    }
}

impl<T> Theirs<T> {
    /// Begins with it. `None`: it was taken back.
    pub fn take(self) -> Option<T> {
        let mut cell = lock(&self.0);
        match std::mem::replace(&mut *cell, Cell::BegunBy(std::thread::current().id())) {
            Cell::Waits(payload) => payload,
            Cell::TakenBack | Cell::BegunBy(_) => None,
        }
    }
}
