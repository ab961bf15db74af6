//! Where the tasks of an owned context's owner sleep.

use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;

/// Sleeping tasks that are remembered.
const PARKED: usize = 1024;
/// And once more of them have turned out to wait.
const MOST_PARKED: usize = 1 << 16;

/// The tasks that sleep, all of which are woken at once: each looks whether it was meant.
pub(super) struct Parking {
    parked: Mutex<Vec<Waker>>,
    /// How many of them are kept. Changed with `parked` locked.
    most: AtomicUsize,
}

impl Parking {
    pub fn new() -> Parking {
        Parking { parked: Mutex::new(Vec::new()), most: AtomicUsize::new(PARKED) }
    }

    /// A task sleeps: the waker is called when there is something to do.
    pub fn park(&self, waker: &Waker) {
        let mut parked = lock(&self.parked);
        if parked.last().is_some_and(|last| last.will_wake(waker)) {
            return;
        }
        // Wakers of one task need not compare equal, so the list is bounded by waking all of them too early. If they come back,
        // so many wait, and there is room for all of them the next time.
        let most = self.most.load(Ordering::Relaxed);
        let early = if parked.len() >= most {
            self.most.store((2 * most).min(MOST_PARKED), Ordering::Relaxed);
            std::mem::take(&mut *parked)
        } else {
            Vec::new()
        };
        parked.push(waker.clone());
        drop(parked);
        early.into_iter().for_each(Waker::wake);
    }

    /// Wakes all that sleep.
    pub fn wake_all(&self) {
        let parked = std::mem::take(&mut *lock(&self.parked));
        for waker in parked {
            waker.wake();
        }
    }
}
