//! A started operation in the hands of its future: detached when dropped, so that nothing leaks and nothing stops.

use posthaste_core::context::{Face, Turn};
use posthaste_core::slot::Outcome;
use posthaste_core::{Fault, Handle, Ticket};
use std::task::{Context, Poll};

/// What moves so many bytes takes longer than the turns of other tasks do.
const LONG: u64 = 16 << 10;

/// How far an operation is that can be done at once as a rule, without anything that it takes otherwise.
#[derive(Debug)]
pub(crate) enum Way<S> {
    /// Nothing was done.
    Fresh,
    /// It could not be done at once.
    Slow(Box<S>),
    Done,
}

/// The ticket of a started operation. Dropping it detaches that: it goes on.
#[derive(Debug)]
pub(crate) struct Pending {
    handle: Handle,
    ticket: Option<Ticket>,
    deadline: Option<u64>,
    /// It is left to the driver to look for its end, if that one can.
    moves: bool,
    /// Others may have their turn before it spins for the first time: they may have more to start.
    turn: Turn,
}

impl Pending {
    pub fn new(handle: Handle, ticket: Ticket, deadline: Option<u64>) -> Self {
        if let Some(at) = deadline {
            handle.set_deadline(at, ticket);
        }
        Self { handle, ticket: Some(ticket), deadline, moves: false, turn: Turn::looks() }
    }

    /// It may be one of several that begin together.
    pub fn overlapping(self) -> Self {
        self.in_turn(Turn::first())
    }

    /// It goes on from there.
    pub fn in_turn(mut self, turn: Turn) -> Self {
        self.turn = turn;
        self
    }

    /// The operation moves so many bytes: whoever started it may have as much to start behind it, which would wait as long
    /// as this one spins.
    pub fn moving(mut self, bytes: u64) -> Self {
        let long = bytes >= LONG;
        self.moves = long;
        self.in_turn(if long { Turn::first_of_long() } else { Turn::first() })
    }

    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.ticket.is_none_or(|ticket| self.handle.slots().is_done(ticket))
    }

    /// Waits for the end, or for the deadline. After `Ready` the operation is spent.
    pub fn poll<F: Face>(&mut self, face: &F, cx: &mut Context<'_>) -> Poll<Outcome> {
        let Some(ticket) = self.ticket else { return Poll::Ready(Err(Fault::Shutdown)) };
        let polled = if self.moves && !face.owns() && self.handle.relies_on_driver() {
            let polled = self.handle.slots().poll(ticket, cx);
            if polled.is_ready() {
                // It may have begun its turn elsewhere.
                self.handle.end_turn(&self.turn);
            }
            polled
        } else {
            self.turn.poll(face, cx, ticket)
        };
        if let Poll::Ready(outcome) = polled {
            self.ticket = None;
            return Poll::Ready(outcome);
        }
        let is_late = self.deadline.is_some_and(|at| self.handle.now_ms() >= at);
        // The engine ends everything when it closes; the latter covers what was started while it did.
        if is_late || self.handle.is_closed() {
            let never = if is_late { Fault::DeadlineExceeded } else { Fault::Shutdown };
            // It may have ended, and nobody has looked because the task has used up its turn.
            return Poll::Ready(self.take_outcome().unwrap_or(Err(never)));
        }
        Poll::Pending
    }

    /// Its outcome, if it has ended; it is spent then. Whoever asks need not have its turn.
    pub fn take_outcome(&mut self) -> Option<Outcome> {
        let outcome = self.handle.slots().take(self.ticket?)?;
        self.ticket = None;
        self.handle.end_turn(&self.turn);
        Some(outcome)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.handle.slots().detach(ticket);
            self.handle.end_turn(&self.turn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Wakes, first_of, operation, without_a_turn};
    use posthaste_core::{Messager, Value};
    use std::sync::Arc;
    use std::task::Waker;
    use std::time::Duration;

    fn begin(handle: &Handle) -> Ticket {
        operation(handle, None)
    }

    fn timers(handle: &Handle) -> usize {
        handle.enter(|engine| engine.scope().timers()).unwrap_or(usize::MAX)
    }

    /// Deadlines in the far future of operations that end at once, or that nobody waits for any more, do not pile up, and those
    /// that are waited for stay.
    #[test]
    fn deadlines_of_what_has_ended_do_not_pile_up() {
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let far = handle.deadline_after(Duration::from_secs(3600));
        let still: Vec<Pending> =
            (0..100).map(|_| Pending::new(handle.clone(), begin(handle), Some(far))).collect();
        let soon = handle.deadline_after(Duration::from_millis(500));
        let mut last = Pending::new(handle.clone(), begin(handle), Some(soon));
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let cx = &mut Context::from_waker(&waker);
        assert!(last.poll(handle, cx).is_pending());
        for number in 0..10_000 {
            let ticket = begin(handle);
            let mut pending = Pending::new(handle.clone(), ticket, Some(far));
            if number % 2 == 0 {
                let ended = handle.enter(|engine| engine.scope().complete(ticket, Ok(Value::Unit)));
                assert!(matches!(ended, Ok(true)));
                assert!(pending.poll(handle, cx).is_ready());
            }
            drop(pending);
            assert!(timers(handle) <= 400, "{} after {number} operations", timers(handle));
        }
        assert!(timers(handle) > 100);
        drop(still);
        // The one that is due soon is told, which is still there.
        let before = wakes.count();
        let _ = handle.enter(|engine| engine.expire(soon + 1));
        assert_eq!(wakes.count(), before + 1);
    }

    fn complete(handle: &Handle, ticket: Ticket) {
        let ended = handle.enter(|engine| engine.scope().complete(ticket, Ok(Value::Unit)));
        assert!(matches!(ended, Ok(true)));
    }

    /// Whoever looks late, and has used up its turn with what it found before, is told how it has ended all the same.
    #[test]
    fn what_has_ended_is_not_told_to_be_late() {
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let at = handle.deadline_after(Duration::from_millis(5));
        let well = || Some(Ok(Value::Unit));
        let [mut ended, mut given_up, mut late] = [well(), well(), None]
            .map(|outcome| Pending::new(handle.clone(), operation(handle, outcome), Some(at)));
        std::thread::sleep(Duration::from_millis(20));
        without_a_turn(|cx| {
            assert!(matches!(ended.poll(handle, cx), Poll::Ready(Ok(Value::Unit))));
            assert!(
                matches!(given_up.take_outcome(), Some(Ok(Value::Unit))),
                "whether or not there is a turn"
            );
            assert!(given_up.take_outcome().is_none() && late.take_outcome().is_none());
            assert!(matches!(late.poll(handle, cx), Poll::Ready(Err(Fault::DeadlineExceeded))));
        });
    }

    /// Who has looked, and was told that others want their turn, does not look again before they had it.
    #[test]
    fn whoever_has_looked_steps_aside_for_what_has_come_in() {
        use posthaste_core::context::{Begun, begin as begin_and_look};
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let begun = begin_and_look(handle, |scope| {
            // Work for whoever is at the context, which nobody does during a look.
            handle.post_run(|_| {});
            scope.operation(None)
        });
        let Some(Begun::Pending(ticket, turn)) = begun else { panic!("{begun:?}") };
        let mut pending = Pending::new(handle.clone(), ticket, None).in_turn(turn);
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let cx = &mut Context::from_waker(&waker);
        assert!(pending.poll(handle, cx).is_pending());
        assert_eq!(wakes.count(), 1, "it asks to be polled again");
        assert!(pending.poll(handle, cx).is_pending());
        assert_eq!(wakes.count(), 1, "it has looked, and in vain");
        complete(handle, ticket);
        assert!(pending.poll(handle, cx).is_ready());
    }

    #[test]
    fn what_moves_much_lets_others_begin_before_it_looks_for_its_end() {
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let cx = &mut Context::from_waker(&waker);
        let long = |ticket| Pending::new(handle.clone(), ticket, None).moving(LONG);
        let end = |ticket| {
            let ended = handle.enter(|engine| engine.scope().complete(ticket, Ok(Value::Unit)));
            assert!(matches!(ended, Ok(true)));
        };
        // Of several that begin together one asks to be polled again, be there one that never was.
        let tickets = [(); 3].map(|()| begin(handle));
        let mut pending = tickets.map(long);
        for (number, pending) in pending.iter_mut().enumerate() {
            assert!(pending.poll(handle, cx).is_pending());
            assert_eq!(wakes.count(), 1, "{number}");
        }
        for (ticket, pending) in tickets.into_iter().zip(&mut pending).rev() {
            end(ticket);
            assert!(matches!(pending.poll(handle, cx), Poll::Ready(Ok(Value::Unit))));
        }
        // Nor does one that is dropped before it has looked keep the next from it.
        for round in 0..3 {
            let before = wakes.count();
            let mut dropped = long(begin(handle));
            assert!(dropped.poll(handle, cx).is_pending());
            assert_eq!(wakes.count(), before + 1, "{round}");
        }
    }

    #[test]
    fn what_moves_little_looks_at_once_until_it_is_seen_that_others_begin() {
        for (bytes, wakes_of_first) in [(LONG - 1, 0), (LONG, 1)] {
            let client = first_of(1, 1);
            let handle = &client.contexts()[0];
            let wakes = Arc::new(Wakes::default());
            let waker = Waker::from(wakes.clone());
            let cx = &mut Context::from_waker(&waker);
            let mut pending = Pending::new(handle.clone(), begin(handle), None).moving(bytes);
            assert!(pending.poll(handle, cx).is_pending());
            assert_eq!(wakes.count(), wakes_of_first, "{bytes}");
        }
    }
}
