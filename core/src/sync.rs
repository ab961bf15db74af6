//! The one place that chooses between the real atomics and loom's.
//!
//! Every lock-free protocol of this crate and of the transports is written against these names, so that
//! `RUSTFLAGS="--cfg posthaste_loom"` model-checks the code that runs, not a copy of it.

#[cfg(not(posthaste_loom))]
mod real {
    pub use atomic_waker::AtomicWaker;
    pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    pub use std::sync::{Arc, Mutex, MutexGuard};

    /// A cell whose accesses loom can watch; here it is a plain [`std::cell::UnsafeCell`].
    #[derive(Debug, Default)]
    pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// Wraps a value.
        pub const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Hands a shared raw pointer to the closure.
        #[inline(always)]
        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        /// Hands an exclusive raw pointer to the closure.
        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// Tells the processor that this is a spin loop.
    #[inline(always)]
    pub fn spin_loop() {
        std::hint::spin_loop();
    }

    thread_local! {
        static THREAD: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    /// A number of this thread that no other thread of the process ever has; not 0.
    #[inline(always)]
    pub fn thread_id() -> u64 {
        match THREAD.get() {
            0 => first_thread_id(),
            id => id,
        }
    }

    #[cold]
    fn first_thread_id() -> u64 {
        let id = super::next_thread_id();
        THREAD.set(id);
        id
    }
}

#[cfg(posthaste_loom)]
mod real {
    pub use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::sync::{Mutex, MutexGuard};
    // Counting references is not what the models are about, and loom's own cannot be unsized.
    pub use std::sync::Arc;

    /// loom's model of an atomic waker, under the names of the real one.
    #[derive(Debug)]
    pub struct AtomicWaker(loom::future::AtomicWaker);

    impl AtomicWaker {
        /// Nobody is registered.
        pub fn new() -> Self {
            Self(loom::future::AtomicWaker::new())
        }

        /// Registers who is to be woken.
        pub fn register(&self, waker: &std::task::Waker) {
            self.0.register_by_ref(waker);
        }

        /// Wakes whoever is registered.
        pub fn wake(&self) {
            self.0.wake();
        }
    }

    impl Default for AtomicWaker {
        fn default() -> Self {
            Self::new()
        }
    }

    loom::thread_local! {
        static THREAD: u64 = super::next_thread_id();
    }

    /// A number of this modelled thread that no other one has; not 0.
    pub fn thread_id() -> u64 {
        THREAD.with(|id| *id)
    }

    /// Lets another modelled thread run.
    pub fn spin_loop() {
        loom::thread::yield_now();
    }
}

pub use real::*;

use std::task::Waker;

/// How one side of a Dekker handshake, in which both store a word of their own and then look at the other's, orders the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LightFence {
    /// The other side makes a barrier on all processors, so that keeping the compiler from reordering will do.
    Compiler,
    /// Both sides fence.
    Full,
}

impl LightFence {
    /// The one whose partner is that system's heavy fence.
    #[must_use]
    pub fn beside(sysdep: &dyn crate::sysdep::Sysdep) -> LightFence {
        if sysdep.fence_is_asymmetric() { LightFence::Compiler } else { LightFence::Full }
    }

    /// Keeps what follows from being done before what precedes.
    #[inline(always)]
    pub fn issue(self) {
        match self {
            #[cfg(not(posthaste_loom))]
            LightFence::Compiler => std::sync::atomic::compiler_fence(Ordering::SeqCst),
            // loom knows no barrier on another thread's behalf: it models both sides with fences.
            #[cfg(posthaste_loom)]
            LightFence::Compiler => fence(Ordering::SeqCst),
            LightFence::Full => fence(Ordering::SeqCst),
        }
    }
}

fn next_thread_id() -> u64 {
    // Out of loom's sight: the models only compare the numbers.
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Has a task's waker take the place of the one that was there, which is for the caller to drop when no lock is held: the last waker
/// of a task takes that along, and what waits in it.
#[must_use = "it is to be dropped where no lock is held"]
pub fn replace_waker(place: &mut Option<Waker>, waker: &Waker) -> Option<Waker> {
    match place {
        Some(known) if known.will_wake(waker) => None,
        _ => place.replace(waker.clone()),
    }
}

/// Locks a mutex whose holders never panic while they hold it, so that poisoning carries no meaning.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
