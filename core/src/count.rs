//! A count that handlers add to and tasks wait for.
//!
//! Anybody may add to it, with a locked instruction. Whoever has the progress token of its context adds to a part of its own,
//! which nobody else writes: a load and a store, because a handler that does no more than count would take twice as long
//! otherwise. What keeps such an adder and one who begins to wait from missing each other is the token itself:
//!
//! ```text
//!   adder, with the token            who waits
//!      inside += n                      waiting = 1
//!      is anybody waiting?              takes the token, or has its holder look at the value later
//!      gives the token back             looks at the value
//! ```
//! If the adder came first, the value is seen behind the token; if not, the adder sees that somebody waits.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// See the [module](self). It is 0 at first.
///
/// # Examples
/// ```
/// use posthaste_core::count::Count;
///
/// let count = Count::default();
/// assert!(!count.add(3), "nobody waits");
/// count.set_waiting(1);
/// assert!(count.add_inside(4), "whoever waits is to be woken");
/// assert_eq!(count.value(), 7);
/// ```
#[derive(Debug, Default)]
pub struct Count {
    /// Added by anybody.
    outside: AtomicU64,
    /// Added under the token.
    inside: AtomicU64,
    waiting: AtomicU32,
}

impl Count {
    /// The value. Acquire pairs with the release of whoever added last.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u64 {
        let outside = self.outside.load(Ordering::Acquire);
        outside.wrapping_add(self.inside.load(Ordering::Acquire))
    }

    /// Adds, from anywhere; true: somebody waits, and is to be woken if the value will do.
    #[inline]
    pub fn add(&self, count: u64) -> bool {
        self.outside.fetch_add(count, Ordering::SeqCst);
        // Partner: the fence of `set_waiting`. Either the adder sees who waits, or who waits sees the value.
        fence(Ordering::SeqCst);
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The same for whoever has the token of the count's context, and nobody else.
    #[inline]
    pub fn add_inside(&self, count: u64) -> bool {
        let inside = self.inside.load(Ordering::Relaxed);
        self.inside.store(inside.wrapping_add(count), Ordering::Release);
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// How many wait. Whoever begins to must then come behind what the context's token holder does now, and look at the
    /// value after that.
    pub fn set_waiting(&self, waiting: u32) {
        self.waiting.store(waiting, Ordering::SeqCst);
        // Partner: the fence of `add`.
        fence(Ordering::SeqCst);
    }
}
