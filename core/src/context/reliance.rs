//! Waiting without looking: a task leaves it to the driver that it shares its thread with.
//!
//! A future that spins keeps the other tasks of its thread from starting more, and one that asks to be polled again at
//! once takes them a turn of the runtime each. Where the driver runs on the same thread, it looks for all of them.

use super::{Handle, Spin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

thread_local! {
    static MARK: u8 = const { 0 };
}

/// A number that no other living thread has; never 0.
fn this_thread() -> usize {
    MARK.with(|mark| std::ptr::from_ref(mark) as usize)
}

/// Whether the driver looks for others.
#[derive(Debug, Default)]
pub(super) struct Reliance {
    /// The thread that the driver shares with all tasks of its runtime; 0: there is none.
    thread: AtomicUsize,
    /// Somebody relies on it since it looked last.
    wanted: AtomicBool,
}

impl Reliance {
    /// The driver is about to look. Returns whether somebody relies on it anew.
    pub fn take(&self, multi_thread: bool) -> bool {
        // Wrong for a moment, it costs time only: who relies on a driver is woken by it, wherever it runs.
        let thread = if multi_thread { 0 } else { this_thread() };
        if self.thread.load(Ordering::Relaxed) != thread {
            self.thread.store(thread, Ordering::Relaxed);
        }
        self.wanted.load(Ordering::Relaxed) && self.wanted.swap(false, Ordering::Relaxed)
    }
}

impl Handle {
    /// Has the driver look for as long as a future would spin, if it shares its thread with the caller, who then needs not
    /// look itself and is woken by what it has registered for. False: nobody looks on the caller's behalf.
    #[must_use]
    pub fn relies_on_driver(&self) -> bool {
        let shared = &self.shared;
        let reliance = &shared.reliance;
        if shared.spin == Spin::Yield
            || reliance.thread.load(Ordering::Relaxed) != this_thread()
            || shared.owned.load(Ordering::Relaxed)
        {
            return false;
        }
        if !reliance.wanted.swap(true, Ordering::Relaxed) {
            shared.driver.wake();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_runs_elsewhere_is_not_relied_on() {
        let reliance = Reliance::default();
        assert!(!reliance.take(false) && reliance.thread.load(Ordering::Relaxed) == this_thread());
        reliance.wanted.store(true, Ordering::Relaxed);
        assert!(reliance.take(false), "somebody does");
        assert!(!reliance.take(false), "told once");
        let there = std::thread::spawn(this_thread).join().expect("no panic");
        // That thread is gone; while it lived its number was its own.
        assert_ne!(there, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_ne!(reliance.thread.load(Ordering::Relaxed), this_thread()));
        });
        assert!(!reliance.take(true) && reliance.thread.load(Ordering::Relaxed) == 0);
    }
}
