//! A lock that costs the thread which takes it time and again no locked instruction.
//!
//! It is a [progress token](crate::token) that is waited for: for what one thread uses as a rule, and others now and then, in
//! sections that are short as a rule. Who waits spins, then gives its core away, then sleeps for a while between looks: there
//! is no queue, nobody is woken, and there is no fairness.

use crate::token::{BIAS_AFTER, Guard, HeavyFence, TokenCell};
use std::convert::Infallible;
use std::ops::{Deref, DerefMut};

/// A value guarded by such a lock.
#[derive(Debug)]
pub struct BiasedLock<T> {
    cell: TokenCell<T, Infallible>,
}

/// Exclusive access to the value until it is dropped. It stays on its thread.
#[must_use = "the lock is given back at once"]
#[derive(Debug)]
pub struct LockGuard<'a, T>(Option<Guard<'a, T, Infallible>>);

impl<T> BiasedLock<T> {
    /// A lock around a value. Without a barrier that a thread can make on behalf of all others it is never biased.
    #[must_use]
    pub fn new(value: T, heavy_fence: Option<HeavyFence>) -> Self {
        match heavy_fence {
            Some(heavy_fence) => Self::biased_after(value, BIAS_AFTER, heavy_fence),
            None => Self { cell: TokenCell::new(value) },
        }
    }

    /// One that a thread gets the bias of after it took it so often in a row.
    #[must_use]
    pub fn biased_after(value: T, takes: u32, heavy_fence: HeavyFence) -> Self {
        Self { cell: TokenCell::biased(value, takes, heavy_fence) }
    }

    /// Takes the lock, as soon as it is free. A thread that has it already waits for ever.
    #[inline]
    pub fn lock(&self) -> LockGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        self.cell.try_take().map(|guard| LockGuard(Some(guard)))
    }

    #[cold]
    fn wait(&self) -> LockGuard<'_, T> {
        debug_assert!(!self.cell.is_used_here(), "a thread waits for a lock that it has");
        let mut looks = 0;
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            pause(looks);
            looks = looks.saturating_add(1);
        }
    }
}

/// What is done between two looks, after so many of them.
#[cfg(not(posthaste_loom))]
fn pause(looks: u32) {
    /// Looks before the core is given away, and before the thread sleeps: then whoever has the lock has lost its core.
    const SPINS: u32 = 64;
    const YIELDS: u32 = 256;
    const NAP: std::time::Duration = std::time::Duration::from_micros(50);
    match looks {
        0..SPINS => std::hint::spin_loop(),
        SPINS..YIELDS => std::thread::yield_now(),
        YIELDS.. => std::thread::sleep(NAP),
    }
}

#[cfg(posthaste_loom)]
fn pause(_looks: u32) {
    crate::sync::spin_loop();
}

impl<T> LockGuard<'_, T> {
    const TAKEN: &'static str = "a guard is taken apart when it is dropped only";
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.0.as_ref().expect(Self::TAKEN).get_ref()
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect(Self::TAKEN).get()
    }
}

impl<T> Drop for LockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(guard) = self.0.take() {
            guard.finish(|_, never| match never {});
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::ids::{JobShape, Rank};
    use crate::sysdep::{LinuxSysdep, Personality, Sysdep};
    use std::sync::Arc;

    fn heavy_fence() -> Option<HeavyFence> {
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let sysdep = LinuxSysdep::new(Personality::one_node(Rank(0), shape), None);
        sysdep.fence_is_asymmetric().then(|| Box::new(move || sysdep.heavy_fence()) as HeavyFence)
    }

    fn count(lock: BiasedLock<u64>) {
        let lock = Arc::new(lock);
        let add = |times: u32| {
            let lock = lock.clone();
            move || (0..times).for_each(|_| *lock.lock() += 1)
        };
        add(1_000)();
        let threads: Vec<_> = (0..3).map(|_| std::thread::spawn(add(20_000))).collect();
        add(20_000)();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(*lock.lock(), 81_000);
        let held = lock.lock();
        assert!(lock.try_lock().is_none(), "it is not free");
        drop(held);
        assert!(lock.try_lock().is_some(), "it is");
    }

    #[test]
    fn threads_take_turns() {
        count(BiasedLock::new(0, None));
    }

    #[test]
    fn threads_take_turns_with_the_owner_of_the_bias() {
        count(BiasedLock::new(0, heavy_fence()));
    }

    #[test]
    fn who_panics_gives_it_back() {
        let lock = BiasedLock::new(1, None);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("on purpose");
        }));
        assert!(outcome.is_err() && lock.try_lock().is_some());
    }
}
