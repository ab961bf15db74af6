//! Without any help of the system: look at all sockets, every millisecond while asleep.

use super::Readiness;
use posthaste_core::sync::{Mutex, lock};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Sleep, sleep};

const PERIOD: Duration = Duration::from_millis(1);

/// A look tells nothing: only who tries to read or write a socket knows whether it is ready.
pub(crate) const TELLS: bool = false;

/// The sockets of one port, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    keys: Mutex<Vec<u64>>,
}

impl Watch {
    pub fn new() -> io::Result<Watch> {
        Ok(Watch::default())
    }

    pub fn add<S>(&self, _socket: S, key: u64) -> io::Result<()> {
        let mut keys = lock(&self.keys);
        if !keys.contains(&key) {
            keys.push(key);
        }
        Ok(())
    }

    pub fn add_listener<S>(&self, socket: S, key: u64) -> io::Result<()> {
        self.add(socket, key)
    }

    pub fn remove<S>(&self, _socket: S, key: u64) -> io::Result<()> {
        lock(&self.keys).retain(|known| *known != key);
        Ok(())
    }

    pub fn look(&self, mut report: impl FnMut(Readiness)) -> bool {
        for &key in lock(&self.keys).iter() {
            report(Readiness { key, readable: true, writable: true, ended: false });
        }
        false
    }
}

/// Goes off every millisecond while it is set.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    set: AtomicBool,
    sleep: Mutex<Option<Pin<Box<Sleep>>>>,
}

impl Alarm {
    pub fn new(_watch: &Watch) -> io::Result<Alarm> {
        Ok(Alarm::default())
    }

    pub fn start(&self) -> io::Result<()> {
        Ok(())
    }

    pub fn set(&self) -> io::Result<()> {
        self.set.store(true, Ordering::Release);
        Ok(())
    }

    pub fn clear(&self) {
        self.set.store(false, Ordering::Release);
    }

    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut cell = lock(&self.sleep);
        let timer = cell.get_or_insert_with(|| Box::pin(sleep(PERIOD)));
        if timer.as_mut().poll(cx).is_ready() {
            *cell = None;
            if self.set.load(Ordering::Acquire) {
                return Poll::Ready(Ok(()));
            }
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
