//! When a future that waits lets others begin first.
//!
//! Who awaits one operation after the other is served best by a future that looks until its own has ended. Of operations that are
//! joined, each would then begin when the one before it has ended, and nothing is gained by starting several. A future cannot
//! know by whom it is polled; so it is learned. Now and then one does not look at its first poll, but asks to be polled again. If
//! others have begun by then, so do the next ones, until several have found that nobody else did. Of those that have begun together
//! one asks to be polled again and looks; the others leave the looking to it.

use super::rest::Rest;
use super::wait::poll_ticket;
use super::{Face, Handle};
use crate::slot::{Outcome, Ticket};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context as TaskContext, Poll};

/// Quick waits, at most, until one lets others begin to see whether there are any: a turn of a runtime takes as long as several.
const QUICK: u32 = 256;
/// By so many fewer it may be: by another number each time, lest it be the last one of a row again and again.
const SPREAD: u32 = QUICK / 2;
/// As many of them is a slow one: it costs less, beside what the wait takes, to see it more often.
const SLOW: u32 = 32;
/// So often behind each other nobody else began, until that is what is expected.
const LONELY: u32 = 8;

/// Whether operations of a context begin together, and who looks for them. Several threads may write at once: what is lost so
/// costs time only.
#[derive(Debug, Default)]
pub(super) struct Overlap {
    /// Waits that have begun.
    begun: AtomicU32,
    /// How often more nobody else may begin until that is expected; 0: it is.
    trust: AtomicU32,
    /// Waits since one has let others begin, each by how long it took.
    waited: AtomicU32,
    /// Somebody will look who has let others begin.
    looks: AtomicBool,
}

impl Overlap {
    /// A wait begins. `alone`: it cannot leave the looking to others. `long`: it lasts long enough to let others begin in any case.
    #[inline]
    fn begin(&self, alone: bool, long: bool) -> Turn {
        let begun = self.begun.load(Ordering::Relaxed).wrapping_add(1);
        self.begun.store(begun, Ordering::Relaxed);
        if !alone && self.looks.load(Ordering::Relaxed) {
            return Turn(State::Leaves);
        }
        if !long && self.trust.load(Ordering::Relaxed) == 0 {
            let waited = self.waited.load(Ordering::Relaxed).wrapping_add(1);
            if waited < QUICK {
                self.waited.store(waited, Ordering::Relaxed);
                return Turn(State::Looks);
            }
            // The upper bits of a product with the golden ratio, as in Fibonacci hashing.
            let head_start = (begun.wrapping_mul(0x9e37_79b9) >> 16) % SPREAD;
            self.waited.store(head_start, Ordering::Relaxed);
        }
        if !alone {
            self.looks.store(true, Ordering::Relaxed);
        }
        Turn(State::Yields(begun))
    }

    /// Who has let others begin, when so many had, is polled again.
    #[cold]
    fn end_yield(&self, begun: u32) {
        self.looks.store(false, Ordering::Relaxed);
        let trust = self.trust.load(Ordering::Relaxed);
        let is_lonely = self.begun.load(Ordering::Relaxed) == begun;
        self.trust.store(if is_lonely { trust.saturating_sub(1) } else { LONELY }, Ordering::Relaxed);
    }

    /// A wait, of whatever kind, was slow.
    #[inline]
    pub fn was_slow(&self) {
        let waited = self.waited.load(Ordering::Relaxed).saturating_add(SLOW - 1);
        self.waited.store(waited, Ordering::Relaxed);
    }

    /// Whoever said that it would look may have been forgotten.
    #[inline]
    pub fn nobody_looks(&self) {
        if self.looks.load(Ordering::Relaxed) {
            self.looks.store(false, Ordering::Relaxed);
        }
    }
}

/// Whose turn it is while an operation is waited for: that of its future, which looks, or of others, which may have more to begin.
/// Kept from poll to poll by the future, which ends it with [`Handle::end_turn`] if it is dropped.
#[derive(Debug)]
pub struct Turn(State);

#[derive(Debug)]
enum State {
    First {
        long: bool,
    },
    /// It is to let others begin, of which so many had.
    Yields(u32),
    /// It has done so, and is polled again.
    Yielded(u32),
    /// Somebody else looks.
    Leaves,
    /// It looks for those, too, that have left it to it.
    Serves,
    /// It has looked, and others want their turn before it does so again.
    StepsAside,
    Looks,
}

impl Turn {
    /// Of an operation for which nobody has waited yet, and which may be one of several that begin together.
    #[must_use]
    pub const fn first() -> Turn {
        Turn(State::First { long: false })
    }

    /// The same of an operation that takes longer than the turns of others do.
    #[must_use]
    pub const fn first_of_long() -> Turn {
        Turn(State::First { long: true })
    }

    /// Of an operation whose future looks whenever it is polled.
    #[must_use]
    pub const fn looks() -> Turn {
        Turn(State::Looks)
    }

    /// Of an operation whose future has looked, and lets others have their turn before it does so again.
    pub(super) const fn steps_aside() -> Turn {
        Turn(State::StepsAside)
    }

    /// Whether it looks now. Decides that at the first time.
    #[inline]
    pub(super) fn is_to_look<F: Face>(&mut self, face: &F) -> bool {
        if let State::First { long } = self.0 {
            *self = face.shared().overlap.begin(face.owns(), long);
        }
        matches!(self.0, State::Looks)
    }

    /// Waits for a ticket's outcome as [`poll_ticket`] does, but that it may let others begin first.
    #[inline]
    pub fn poll<F: Face>(&mut self, face: &F, cx: &mut TaskContext<'_>, ticket: Ticket) -> Poll<Outcome> {
        if self.is_to_look(face) { poll_ticket(face, cx, ticket) } else { self.poll_among(face, cx, ticket) }
    }

    /// The same of one that may not be the only one.
    #[cold]
    fn poll_among<F: Face>(&mut self, face: &F, cx: &mut TaskContext<'_>, ticket: Ticket) -> Poll<Outcome> {
        if let State::Yielded(begun) = self.0 {
            face.shared().overlap.end_yield(begun);
            self.0 = State::Serves;
        }
        if !matches!(self.0, State::Serves) {
            return self.register(face, cx, ticket);
        }
        let polled = poll_ticket(face, cx, ticket);
        if polled.is_ready() {
            // Others may have left it to this one, and the driver rests as long as somebody looks.
            face.shared().hand_over(Rest::UntilIdle);
        }
        polled
    }

    /// Has the waker called when the operation ends, and is polled again before if that is its turn.
    #[cold]
    fn register<F: Face>(&mut self, face: &F, cx: &mut TaskContext<'_>, ticket: Ticket) -> Poll<Outcome> {
        let shared = face.shared();
        let polled = shared.slots.poll(ticket, cx);
        if let State::StepsAside = self.0
            && polled.is_pending()
        {
            cx.waker().wake_by_ref();
        }
        if let State::Yields(begun) = self.0 {
            if polled.is_pending() {
                self.0 = State::Yielded(begun);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            shared.overlap.nobody_looks();
            shared.hand_over(Rest::UntilIdle);
        }
        self.0 = State::Looks;
        polled
    }
}

impl Handle {
    /// The future of an operation is dropped, or waits no more: if others have left the looking to it, the driver does that.
    #[inline]
    pub fn end_turn(&self, turn: &Turn) {
        match turn.0 {
            State::Yields(_) | State::Yielded(_) => {
                self.shared.overlap.nobody_looks();
                self.shared.hand_over(Rest::UntilIdle);
            }
            State::Serves => self.shared.hand_over(Rest::UntilIdle),
            State::First { .. } | State::Leaves | State::StepsAside | State::Looks => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(turn: &Turn) -> bool {
        matches!(turn.0, State::Looks)
    }

    fn leaves(turn: &Turn) -> bool {
        matches!(turn.0, State::Leaves)
    }

    /// The next wait, which must let others begin.
    fn yields(overlap: &Overlap, long: bool) -> u32 {
        let Turn(State::Yields(begun)) = overlap.begin(false, long) else { panic!("it looks") };
        begun
    }

    /// As many waits as look until one lets others begin, and that one.
    fn until_one_yields(overlap: &Overlap) -> (u32, u32) {
        for waits in 0..=QUICK {
            if let Turn(State::Yields(begun)) = overlap.begin(false, false) {
                return (waits, begun);
            }
        }
        panic!("none of them does")
    }

    #[test]
    fn one_in_many_lets_others_begin_sooner_where_waits_are_slow() {
        let overlap = Overlap::default();
        let (mut quick, mut places) = (0, std::collections::BTreeSet::new());
        for _ in 0..100 {
            let (waits, begun) = until_one_yields(&overlap);
            assert!((QUICK - SPREAD..=QUICK).contains(&(waits + 1)), "{waits}");
            quick += waits + 1;
            // However many there are in a row, it is not always the same of them.
            places.insert(quick % 64);
            overlap.end_yield(begun);
        }
        assert!(places.len() > 30, "{places:?}");
        for slow in [1, 2, QUICK / SLOW - 1] {
            overlap.waited.store(0, Ordering::Relaxed);
            (0..slow).for_each(|_| overlap.was_slow());
            let (waits, begun) = until_one_yields(&overlap);
            assert_eq!(waits, QUICK - 1 - slow * (SLOW - 1));
            overlap.end_yield(begun);
        }
    }

    #[test]
    fn who_begins_meanwhile_leaves_the_looking_and_is_expected_from_then_on() {
        let overlap = Overlap::default();
        let (_, begun) = until_one_yields(&overlap);
        assert!((0..10).all(|_| leaves(&overlap.begin(false, false))));
        overlap.end_yield(begun);
        // Nobody else does any more: that is found out again.
        for _ in 0..LONELY {
            let begun = yields(&overlap, false);
            overlap.end_yield(begun);
        }
        assert!(looks(&overlap.begin(false, false)));
        // A single one that is not alone renews it.
        let (_, begun) = until_one_yields(&overlap);
        overlap.begin(false, false);
        overlap.end_yield(begun);
        for _ in 0..LONELY - 1 {
            let begun = yields(&overlap, false);
            overlap.end_yield(begun);
        }
        let begun = yields(&overlap, false);
        overlap.begin(false, false);
        overlap.end_yield(begun);
        assert_eq!(overlap.trust.load(Ordering::Relaxed), LONELY);
    }

    #[test]
    fn nobody_waits_for_one_that_does_not_look() {
        let overlap = Overlap::default();
        let _forgotten = yields(&overlap, true);
        assert!(leaves(&overlap.begin(false, false)) && leaves(&overlap.begin(false, true)));
        overlap.nobody_looks();
        assert!(looks(&overlap.begin(false, false)));
        // Who has nobody to leave it to is polled again in any case, and nobody leaves it to that one.
        yields(&overlap, true);
        assert!(matches!(overlap.begin(true, true), Turn(State::Yields(_))));
        overlap.nobody_looks();
        assert!(matches!(overlap.begin(true, true), Turn(State::Yields(_))));
        assert!(looks(&overlap.begin(false, false)));
    }
}
