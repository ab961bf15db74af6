//! A counter that handlers add to and tasks wait for.

use posthaste_core::Handle;
use posthaste_core::context::poll_until;
use posthaste_core::sync::lock;
use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

#[derive(Debug, Default)]
struct Inner {
    value: AtomicU64,
    waiting: AtomicUsize,
    waiters: Mutex<Vec<(u64, Waker)>>,
}

/// Counts events, from handlers or anywhere, and lets tasks wait until it reaches a value. Waiting advances the
/// context, so that a wait which is about to end does not go through the scheduler. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Counter {
    handle: Handle,
    inner: Arc<Inner>,
}

impl Counter {
    /// A counter at 0, whose waits advance the given context.
    #[must_use]
    pub fn new(handle: Handle) -> Self {
        Self { handle, inner: Arc::default() }
    }

    /// The value.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u64 {
        self.inner.value.load(Ordering::Acquire)
    }

    /// Adds to the counter and wakes whom that concerns.
    #[inline]
    pub fn add(&self, count: u64) {
        // SeqCst twice, here and in `register`: either the adder sees the waiter or the waiter sees the value.
        let value = self.inner.value.fetch_add(count, Ordering::SeqCst) + count;
        if self.inner.waiting.load(Ordering::SeqCst) > 0 {
            self.wake(value);
        }
    }

    #[cold]
    fn wake(&self, value: u64) {
        let mut waiters = lock(&self.inner.waiters);
        let mut ready = Vec::new();
        waiters.retain(|(wanted, waker)| {
            let wait = *wanted > value;
            if !wait {
                ready.push(waker.clone());
            }
            wait
        });
        self.inner.waiting.store(waiters.len(), Ordering::SeqCst);
        drop(waiters);
        for waker in ready {
            waker.wake();
        }
    }

    /// Waits until the counter is at least `value`.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    pub fn reach(&self, value: u64) -> impl Future<Output = ()> + Send + '_ {
        std::future::poll_fn(move |cx| {
            poll_until(
                &self.handle,
                cx,
                || (self.value() >= value).then_some(()),
                |waker| {
                    let mut waiters = lock(&self.inner.waiters);
                    if !waiters.iter().any(|(wanted, other)| *wanted == value && other.will_wake(waker)) {
                        waiters.push((value, waker.clone()));
                    }
                    self.inner.waiting.store(waiters.len(), Ordering::SeqCst);
                },
            )
        })
    }

    /// The same counter, whose waits advance another face's context.
    pub async fn reach_on<F: posthaste_core::Face>(&self, face: &F, value: u64) {
        std::future::poll_fn(move |cx| {
            poll_until(
                face,
                cx,
                || (self.value() >= value).then_some(()),
                |waker| {
                    let mut waiters = lock(&self.inner.waiters);
                    waiters.push((value, waker.clone()));
                    self.inner.waiting.store(waiters.len(), Ordering::SeqCst);
                },
            )
        })
        .await;
    }
}
