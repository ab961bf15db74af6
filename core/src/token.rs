//! The progress token: who may touch a context's engine.
//!
//! The token is taken if it is free and never waited for. Whoever does not get it posts its work and is sure
//! that the work is done: either the holder sees the `WORK` bit when it releases, or the poster finds the token
//! free and does the work itself. One word holds both bits, so no fence and no second look is needed; the price
//! is one locked read-modify-write to take and one to release.
//!
//! ```text
//!                    try_take                      release (no WORK)
//!      0 ------------------------------> HELD ------------------------> 0
//!                                          |  ^
//!                     post: fetch_or(WORK) v  | release: clears WORK, runs the queue, tries again
//!                                     HELD|WORK
//! ```
#![allow(unsafe_code)]

use crate::sync::{AtomicU32, Mutex, Ordering, UnsafeCell, lock};
use std::collections::VecDeque;

const HELD: u32 = 1;
const WORK: u32 = 2;

/// A value guarded by a progress token, with the queue of work that others posted for its holder.
#[derive(Debug)]
pub struct TokenCell<T, W> {
    state: AtomicU32,
    queue: Mutex<VecDeque<W>>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a Guard only, and at most one Guard exists at a time (the HELD bit, taken
// with acquire and given back with release).
unsafe impl<T: Send, W: Send> Sync for TokenCell<T, W> {}
// SAFETY: it owns what it holds.
unsafe impl<T: Send, W: Send> Send for TokenCell<T, W> {}

/// The token: exclusive access to the value until it is released.
///
/// Dropping the guard does *not* run posted work; [`Guard::finish`] does. A guard that is dropped while work is
/// queued (a panic unwinds) hands the work on to the next holder.
#[derive(Debug)]
pub struct Guard<'a, T, W> {
    cell: &'a TokenCell<T, W>,
}

impl<T, W> TokenCell<T, W> {
    /// A free token.
    pub fn new(value: T) -> Self {
        Self { state: AtomicU32::new(0), queue: Mutex::new(VecDeque::new()), value: UnsafeCell::new(value) }
    }

    /// Takes the token if it is free.
    #[inline]
    pub fn try_take(&self) -> Option<Guard<'_, T, W>> {
        let state = self.state.load(Ordering::Relaxed);
        if state & HELD != 0 {
            return None;
        }
        // Acquire pairs with the release of `try_release`: the last holder's changes are seen.
        self.state
            .compare_exchange(state, state | HELD, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Guard { cell: self })
    }

    /// Posts work. If the token was free it is now the caller's, who must [`Guard::finish`] to get the work done.
    #[must_use = "a guard that comes back has to be finished, or the work waits for the next holder"]
    pub fn post(&self, work: W) -> Option<Guard<'_, T, W>> {
        lock(&self.queue).push_back(work);
        // Release publishes the queue entry to the holder that sees WORK; acquire in case the token is ours now.
        let before = self.state.fetch_or(WORK | HELD, Ordering::AcqRel);
        (before & HELD == 0).then(|| Guard { cell: self })
    }

    /// The guard of a token that its holder keeps between calls (its last guard was forgotten). `None` if the token
    /// is free. Only the holder may call this.
    #[inline]
    pub(crate) fn adopt(&self) -> Option<Guard<'_, T, W>> {
        (self.state.load(Ordering::Relaxed) & HELD != 0).then(|| Guard { cell: self })
    }

    /// Whether somebody posted work that has not been taken up yet. Cheap: one relaxed load.
    #[inline]
    pub fn has_work(&self) -> bool {
        self.state.load(Ordering::Relaxed) & WORK != 0
    }
}

impl<T, W> Guard<'_, T, W> {
    /// The guarded value.
    #[inline]
    pub fn get(&mut self) -> &mut T {
        // SAFETY: HELD is set and this guard is its only owner.
        self.cell.value.with_mut(|value| unsafe { &mut *value })
    }

    /// Takes up all posted work.
    #[inline]
    pub fn take_work(&mut self) -> VecDeque<W> {
        if !self.cell.has_work() {
            return VecDeque::new();
        }
        // The bit is cleared before the queue is read: work posted after that sets it again.
        self.cell.state.fetch_and(!WORK, Ordering::AcqRel);
        std::mem::take(&mut lock(&self.cell.queue))
    }

    /// Gives the token back unless work is queued; then the guard is returned.
    #[inline]
    fn try_release(self) -> Option<Self> {
        // Release pairs with the acquire of the next `try_take`.
        match self.cell.state.compare_exchange(HELD, 0, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => {
                std::mem::forget(self);
                None
            }
            Err(_) => Some(self),
        }
    }

    /// Runs posted work until there is none and gives the token back.
    #[inline]
    pub fn finish(self, mut run: impl FnMut(&mut T, W)) {
        let mut guard = self;
        while let Some(mut held) = guard.try_release() {
            for work in held.take_work() {
                run(held.get(), work);
            }
            guard = held;
        }
    }
}

impl<T, W> Drop for Guard<'_, T, W> {
    fn drop(&mut self) {
        self.cell.state.fetch_and(!HELD, Ordering::Release);
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_loser_s_work_is_done_by_the_holder() {
        let cell: TokenCell<Vec<u32>, u32> = TokenCell::new(Vec::new());
        let guard = cell.try_take().expect("free");
        assert!(cell.try_take().is_none());
        assert!(cell.post(7).is_none());
        assert!(cell.has_work());
        guard.finish(|value, work| value.push(work));
        let mut guard = cell.post(8).expect("free again");
        assert_eq!(guard.get(), &[7]);
        guard.finish(|value, work| value.push(work));
        assert_eq!(cell.try_take().expect("free").get(), &[7, 8]);
    }

    #[test]
    fn many_threads_lose_nothing() {
        let cell = std::sync::Arc::new(TokenCell::<u64, u64>::new(0));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let cell = cell.clone();
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        if let Some(mut guard) = cell.try_take() {
                            *guard.get() += 1;
                            guard.finish(|sum, work| *sum += work);
                        } else if let Some(guard) = cell.post(1) {
                            guard.finish(|sum, work| *sum += work);
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(*cell.try_take().expect("free").get(), 80_000);
    }
}
