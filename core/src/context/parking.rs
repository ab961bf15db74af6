//! Where the tasks of an owned context's owner sleep, and how what they drive is woken.

use crate::sync::{Mutex, lock};
use futures::task::{ArcWake, WakerRef, waker_ref};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::task::Waker;

/// Sleeping tasks that are remembered.
const PARKED: usize = 1024;
/// And once more of them have turned out to wait.
const MOST_PARKED: usize = 1 << 16;

/// The tasks that sleep, all of which are woken at once: each looks whether it was meant.
///
/// It is also the waker of what an owner [`drive`](super::drive())s. A future that wakes itself, or is woken by another thread, while
/// the owner looks at the engine in the same poll of its task, would be polled only when that look is over if its waker were the
/// task's: nothing tells a task amid a poll that it was woken.
pub(super) struct Parking {
    parked: Mutex<Vec<Waker>>,
    /// How many of them are kept. Changed with `parked` locked.
    most: AtomicUsize,
    /// How often a driven future was woken. Each drive compares it with what it was before it polled its own: one inside another
    /// must not take away what the other has to see.
    wakes: AtomicU32,
}

impl Parking {
    pub fn new() -> Arc<Parking> {
        Arc::new(Parking {
            parked: Mutex::new(Vec::new()),
            most: AtomicUsize::new(PARKED),
            wakes: AtomicU32::new(0),
        })
    }

    /// A task sleeps: the waker is called when there is something to do.
    pub fn park(self: &Arc<Self>, waker: &Waker) {
        if waker.will_wake(&self.waker()) {
            // It is driven, and whoever drives it sleeps here.
            return;
        }
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

    /// What a driven future is polled with.
    #[inline]
    pub fn waker(self: &Arc<Self>) -> WakerRef<'_> {
        waker_ref(self)
    }

    /// How often driven futures were woken so far. Whoever has parked and finds it unchanged behind that is woken by the next.
    #[inline]
    pub fn wakes(&self) -> u32 {
        self.wakes.load(Ordering::Relaxed)
    }
}

impl ArcWake for Parking {
    fn wake_by_ref(parking: &Arc<Self>) {
        // Before the lock: who parks behind it sees this, and who has parked before is found under it.
        parking.wakes.fetch_add(1, Ordering::Relaxed);
        parking.wake_all();
    }
}
