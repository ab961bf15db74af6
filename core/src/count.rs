//! A count that handlers add to and tasks wait for.
//!
//! Anybody may add to it, with a locked instruction. Whoever has the progress token of its context adds to a part of its own,
//! which nobody else writes: a load and a store, because a handler that does no more than count would take twice as long
//! otherwise. What keeps such an adder and one who begins to wait from missing each other is the token itself:
//!
//! ```text
//!   adder, with the token            who waits
//!      inside += n                      least = what is waited for
//!      inside >= least?                 takes the token, or has its holder look at the value later
//!      gives the token back             looks at the value
//! ```
//! If the adder came first, the value is seen behind the token; if not, the adder sees what is waited for, and as a rule that it
//! is not there yet, so that nobody has to look who is to be woken.
//!
//! That cannot be told from a part of the value. Whoever is the first to add from outside says that the count is
//! [mixed](Count::mix), whereupon `least` is 0 as long as anybody waits, and then comes behind the token as well.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// See the [module](self). It is 0 at first.
///
/// # Examples
/// ```
/// use posthaste_core::count::Count;
///
/// let count = Count::default();
/// assert!(!count.add_inside(3), "nobody waits");
/// count.set_least(Some(7));
/// assert!(!count.add_inside(3), "it is not there yet");
/// assert!(count.add_inside(1), "whoever waits is to be woken");
/// assert_eq!(count.value(), 7);
/// assert!(count.add(1) && !count.is_mixed(), "the first to add from outside, while somebody waits");
/// ```
#[derive(Debug)]
pub struct Count {
    /// Added by anybody.
    outside: AtomicU64,
    /// Added under the token.
    inside: AtomicU64,
    /// The least value that somebody waits for.
    least: AtomicU64,
    mixed: AtomicU32,
}

/// The least value that is waited for when nobody waits.
const NOBODY: u64 = u64::MAX;

impl Default for Count {
    fn default() -> Self {
        Count {
            outside: AtomicU64::new(0),
            inside: AtomicU64::new(0),
            least: AtomicU64::new(NOBODY),
            mixed: AtomicU32::new(0),
        }
    }
}

impl Count {
    /// The value. Acquire pairs with the release of whoever added last.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u64 {
        let outside = self.outside.load(Ordering::Acquire);
        outside.wrapping_add(self.inside.load(Ordering::Acquire))
    }

    /// Adds, from anywhere; true: somebody waits, and is to be woken if the value will do. Unless the count
    /// [is mixed](Self::is_mixed) it must be made so then.
    #[inline]
    pub fn add(&self, count: u64) -> bool {
        self.outside.fetch_add(count, Ordering::SeqCst);
        // Partner: the fence of `set_least`. Either the adder sees who waits, or who waits sees the value.
        fence(Ordering::SeqCst);
        self.least.load(Ordering::Relaxed) != NOBODY
    }

    /// The same for whoever has the token of the count's context, and nobody else; true: what somebody waits for may be there.
    #[inline]
    pub fn add_inside(&self, count: u64) -> bool {
        let inside = self.inside.load(Ordering::Relaxed).wrapping_add(count);
        self.inside.store(inside, Ordering::Release);
        inside >= self.least.load(Ordering::Relaxed)
    }

    /// Whether anything was added from outside, for all that who waits has been told.
    #[inline]
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.mixed.load(Ordering::Relaxed) != 0
    }

    /// From now on the part that is added under the token says nothing of the value. Under the lock of those who wait; if
    /// there are any, [`set_least`](Self::set_least) is called under it, and whoever calls this comes behind what the context's
    /// token holder does now, and looks at the value after that.
    pub fn mix(&self) {
        self.mixed.store(1, Ordering::Relaxed);
    }

    /// The least value that is waited for, or that nobody waits; under the lock of those who wait. Whoever begins to must
    /// then come behind what the context's token holder does now, and look at the value after that.
    pub fn set_least(&self, least: Option<u64>) {
        let least = match least {
            None => NOBODY,
            Some(_) if self.is_mixed() => 0,
            Some(least) => least.min(NOBODY - 1),
        };
        self.least.store(least, Ordering::SeqCst);
        // Partner: the fence of `add`.
        fence(Ordering::SeqCst);
    }
}
