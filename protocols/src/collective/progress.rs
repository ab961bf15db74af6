//! Operations under way: parts come to them, they go on, and end.

use super::executor::{Guard, Hub};
use super::group_state::{Op, Slot, value_of};
use super::outlet::Way;
use super::part::Part;
use super::reduce::Combiner;
use super::run::Misfit;
use super::state::State;
use posthaste_core::slot::Value;
use posthaste_core::{Fault, Scope};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

impl Hub {
    /// Gives a part to an operation that was started. Returns with the lock held, whatever ran meanwhile.
    #[inline]
    pub(super) fn give<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
        (place, phase, mark, slice): (usize, u16, u32, u32),
        part: &Part<'_>,
    ) -> Guard<'g> {
        let Some(mut op) = state.groups.get_mut(at).and_then(|group| group.take(operation)) else {
            return state;
        };
        let mut panicked = false;
        let arrived = if op.mark != mark {
            Err(Misfit)
        } else if op.is_small && op.run.has(place) {
            // It was on the board, too.
            Ok(())
        } else if op.run.calls_user() {
            drop(state);
            let outcome = catch_unwind(AssertUnwindSafe(|| op.run.arrive(place, phase, slice, part)));
            state = self.lock();
            panicked = outcome.is_err();
            outcome.unwrap_or(Ok(()))
        } else {
            op.run.arrive(place, phase, slice, part)
        };
        let ended = self.put_back(&mut state, at, operation, op);
        let state = if panicked {
            self.break_from(scope, state, at, operation, Fault::RemotePanicked(self.me))
        } else if let Err(Misfit) = arrived {
            let from = state.groups[at].membership.members[place];
            self.mismatch(scope, state, at, operation, from, Some((mark, part.len())))
        } else {
            state
        };
        self.end(scope, state, ended)
    }

    /// Operations are over, with these faults. Nobody holds the lock meanwhile: whoever waits for one may be polled there and then,
    /// and what goes along with a task or a payload may use the collectives as it is dropped.
    pub(super) fn end<'g>(
        &'g self,
        scope: &mut Scope<'_>,
        state: Guard<'g>,
        ended: impl IntoIterator<Item = (Box<Op>, Fault)>,
    ) -> Guard<'g> {
        let mut ended = ended.into_iter().peekable();
        if ended.peek().is_none() {
            return state;
        }
        drop(state);
        for (op, fault) in ended {
            if let Some(ticket) = op.ticket {
                scope.complete(ticket, Err(fault));
            }
        }
        self.lock()
    }

    /// Puts an operation back. One that was ended meanwhile is to [end](Self::end) now.
    #[inline]
    #[must_use = "what was ended has to be told so"]
    fn put_back(
        &self,
        state: &mut State,
        at: usize,
        operation: u64,
        op: Box<Op>,
    ) -> Option<(Box<Op>, Fault)> {
        let group = state.groups.get_mut(at)?;
        let failure = group.failure(operation);
        match group.slot(operation) {
            Some(slot @ Slot::Out) => {
                *slot = Slot::Running(op);
                None
            }
            _ => Some((op, failure.unwrap_or(Fault::Shutdown))),
        }
    }

    /// Lets an operation that was given something go on, and completes it if it has ended.
    #[inline]
    pub(super) fn go_on<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        state: Guard<'g>,
        at: usize,
        operation: u64,
    ) -> Guard<'g> {
        let ticket = match state
            .groups
            .get(at)
            .and_then(|group| group.slots.get(operation.checked_sub(group.base)? as usize))
        {
            Some(Slot::Running(op)) => op.ticket,
            _ => return state,
        };
        let (state, ended) = self.progress(scope, state, at, operation);
        if let (Some(ticket), Some(value)) = (ticket, ended) {
            // As of `end`.
            drop(state);
            scope.complete(ticket, Ok(value));
            return self.lock();
        }
        state
    }

    /// Tries again what had to wait.
    pub(super) fn resume<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
    ) -> Guard<'g> {
        if let Some(Slot::Running(op)) = state.groups.get_mut(at).and_then(|group| group.slot(operation)) {
            op.run.resume();
            return self.go_on(scope, state, at, operation);
        }
        state
    }

    /// Sends what can be sent and takes what has its turn. `Some`: the operation has ended, with this value.
    #[inline]
    pub(super) fn progress<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
    ) -> (Guard<'g>, Option<Value>) {
        let Some(mut op) = state.groups.get_mut(at).and_then(|group| group.take(operation)) else {
            return (state, None);
        };
        let mut fault = None;
        loop {
            if op.run.has_news() {
                drop(state);
                op.run.consult();
                state = self.lock();
            }
            let State { groups, peers, .. } = &mut *state;
            let Some(group) = groups.get_mut(at) else { break };
            let mut way = Way { hub: self, scope: &mut *scope, peers };
            let mark = op.mark;
            if let Err(failed) = op.run.advance(|out| way.part(group, at, operation, mark, &out)) {
                fault = Some(failed);
                break;
            }
            if op.run.has_failed() {
                fault = Some(Fault::ExecutorFailed { rank: self.me, call: op.call });
                break;
            }
            if !op.run.has_due() && !op.run.has_news() {
                break;
            }
            if op.run.calls_user() {
                drop(state);
                let outcome = catch_unwind(AssertUnwindSafe(|| op.run.take_due()));
                state = self.lock();
                if outcome.is_err() {
                    fault = Some(Fault::RemotePanicked(self.me));
                    break;
                }
            } else {
                op.run.take_due();
            }
        }
        if let Some(fault) = fault {
            let ended = self.put_back(&mut state, at, operation, op);
            let state = self.break_from(scope, state, at, operation, fault);
            return (self.end(scope, state, ended), None);
        }
        if !op.run.is_done() {
            let ended = self.put_back(&mut state, at, operation, op);
            return (self.end(scope, state, ended), None);
        }
        let Some(group) = state.groups.get_mut(at) else { return (state, None) };
        let Some(slot @ Slot::Out) = group.slot(operation) else {
            let ended = self.put_back(&mut state, at, operation, op);
            return (self.end(scope, state, ended), None);
        };
        *slot = Slot::Ended;
        self.let_go(op.run.take_combiner());
        // Before the others hear that nothing of theirs is read here any more.
        let value = value_of(op.run.into_result());
        group.sweep();
        group.unask();
        if group.is_over() {
            self.remove(&mut state, at);
        }
        (state, Some(value))
    }

    /// What combines an operation's vectors is a user's, as a rule not for the last time here.
    pub(super) fn let_go(&self, combiner: Option<Combiner>) {
        if let Some(combiner) = combiner.filter(Combiner::is_users) {
            self.drop_later(combiner);
        }
    }

    /// What is a user's goes where no lock is held.
    pub(super) fn drop_later(&self, users: impl Send + 'static) {
        if let Some(handle) = self.handle() {
            handle.post_run(move |_| drop(users));
        }
    }
}
