//! Operations that were on the boards and go on by messages: somebody stopped looking, or something else came.

use super::executor::{Begun, Guard, Hub};
use super::flat::{EXCHANGE, OnBoard, layout_of};
use super::group_state::{GroupState, Op, Slot};
use super::outlet::Way;
use super::part::Part;
use super::plan::{Plan, Unfit};
use super::run::{Input, Outgoing, Run, Sent};
use super::state::State;
use crate::group::Inner;
use crate::operation::Pending;
use posthaste_core::blackboard::{Entry, MOST_BYTES};
use posthaste_core::device::Body;
use posthaste_core::{Fault, Scope};
use std::sync::Arc;

impl Hub {
    /// An operation that was on the boards goes on by messages, for nobody.
    #[cold]
    pub(super) fn forget(&self, inner: &Inner, operation: u64) {
        let mut state = self.lock();
        let group = state.groups.get_mut(inner.at);
        let ticket = group.and_then(|group| group.near.left.remove(&operation));
        drop(state);
        drop(ticket.map(|ticket| Pending::new(inner.handle.clone(), ticket, None)));
    }

    /// Sends messages of what was just written to those who want them, and looks after what else there is.
    #[cold]
    pub(super) fn tell(self: &Arc<Self>, scope: &mut Scope<'_>, at: usize, operation: u64) {
        let mut state = self.lock();
        self.announce(scope, &mut state, at);
        let State { groups, peers, .. } = &mut *state;
        let Some(group) = groups.get_mut(at) else { return };
        let has_early = group.has_early(operation);
        let Some(boards) = group.near.boards.clone() else { return };
        let Some(Slot::OnBoard(what)) = group.slot(operation) else { return };
        let (mark, mut unsent) = (what.mark, what.unsent);
        let len = if what.staged.is_some() { 0 } else { what.len };
        let places = 0..boards.board.members();
        let lent: Option<Vec<_>> =
            what.staged.as_ref().map(|staged| places.map(|to| staged.part_for(to)).collect());
        group.learn_from_boards();
        let mut own = [0; MOST_BYTES];
        let own = &mut own[..len];
        boards.board.read(boards.board.me(), operation, own);
        let mut way = Way { hub: self, scope: &mut *scope, peers };
        let mut fault = None;
        for to in 0..boards.board.members() {
            if unsent & 1 << to != 0 && fault.is_none() {
                let lent = lent.as_ref().and_then(|lent| lent[to]);
                let out = Outgoing { to, phase: 0, slice: 0, long: lent.is_some(), payload: own, lent };
                match way.part(group, at, operation, mark, &out) {
                    Ok(Sent::Done) => unsent &= !(1 << to),
                    Ok(Sent::Later) => {}
                    Err(failed) => fault = Some(failed),
                }
            }
        }
        if let Some(Slot::OnBoard(what)) = group.slot(operation) {
            what.unsent = unsent;
        }
        if let Some(fault) = fault {
            drop(self.break_from(scope, state, at, operation, fault));
        } else if unsent != 0 || has_early {
            drop(self.go_by_messages(scope, state, at, operation));
        }
    }

    /// An operation that is on the boards goes on by messages.
    #[cold]
    pub(super) fn go_by_messages<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
    ) -> Guard<'g> {
        let Some(group) = state.groups.get_mut(at) else { return state };
        let Some(boards) = group.near.boards.clone() else { return state };
        // First that it moves, then who has finished: a caller looks the other way round.
        boards.ledger.upset();
        group.settle();
        let Some(slot @ Slot::OnBoard(_)) = group.slot(operation) else { return state };
        let Slot::OnBoard(what) = std::mem::replace(slot, Slot::Out) else { return state };
        let OnBoard { mark, call, len, unsent, staged } = what;
        let board = &boards.board;
        let share = staged.as_ref().map(|staged| staged.share());
        let input = match staged {
            Some(staged) => Ok(staged.into_input()),
            None => group.exchange_plan().map(|plan| {
                let mut own = vec![0; len];
                board.read(board.me(), operation, &mut own);
                let layout = layout_of(len, &plan);
                (plan, layout, Input { bytes: own.into(), outgoing: None, lent: None })
            }),
        };
        let run = input.ok().and_then(|(plan, layout, input)| Run::new(plan, layout, input, None));
        // The ticket last: nobody would give it back.
        let Some((mut run, ticket)) = run.and_then(|run| Some((run, scope.operation(None).ok()?))) else {
            let fault =
                Fault::OutOfMemory("a collective operation has no memory, or no place among those under way");
            return self.break_from(scope, state, at, operation, fault);
        };
        let written = (0..board.members()).filter(|place| *place != board.me() && unsent & 1 << place == 0);
        written.for_each(|place| run.was_sent(place));
        let op = Op { run, mark, call, ticket: Some(ticket), is_small: true, share, looks: 0 };
        if let Some(slot) = group.slot(operation) {
            *slot = Slot::Running(Box::new(op));
        }
        group.near.left.insert(operation, ticket);
        self.watch(scope, &mut state);
        let Some(group) = state.groups.get_mut(at) else { return state };
        for early in group.take_early(operation) {
            state = self.take_in(scope, state, at, operation, early);
        }
        let state = self.take_from_boards(scope, state, at, operation);
        self.go_on(scope, state, at, operation)
    }

    /// An operation goes by messages: they are asked for, and what others have written already is taken. Whoever has
    /// written something else is found out.
    pub(super) fn take_from_boards<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
    ) -> Guard<'g> {
        let Some(group) = state.groups.get_mut(at) else { return state };
        let Some(boards) = group.near.boards.clone() else { return state };
        let id = group.membership.id;
        group.learn_from_boards();
        let board = &boards.board;
        board.ask();
        for place in (0..board.members()).filter(|place| *place != board.me()) {
            if state.group_of(at, id).is_none() {
                break;
            }
            let Some(entry) = board.look(place, operation) else { continue };
            if entry.len == Entry::ELSEWHERE {
                state = self.take_laid_out(
                    scope,
                    state,
                    at,
                    operation,
                    (place, entry.mark),
                    board.reference(place, operation),
                );
                continue;
            }
            let mut part = [0; MOST_BYTES];
            let part = &mut part[..entry.len.min(MOST_BYTES)];
            board.read(place, operation, part);
            let what = (place, 0, entry.mark, 0);
            state = self.give(scope, state, at, operation, what, &Part::Body(&Body::Short(part)));
        }
        state
    }

    /// A member has laid its part of an operation out, and this rank's goes by messages.
    fn take_laid_out<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
        (place, mark): (usize, u32),
        (offset, len): (u64, u64),
    ) -> Guard<'g> {
        let Some(group) = state.groups.get_mut(at) else { return state };
        let rank = group.membership.members[place];
        let gone = group.down.get(&place).copied();
        let Some(Slot::Running(op)) = group.slot(operation) else { return state };
        let Some(share) = op.share.filter(|share| (mark, len) == (op.mark, share.len)) else {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            return self.mismatch(scope, state, at, operation, rank, Some((mark, len)));
        };
        match share.at(offset).and_then(|reference| self.lent(rank, reference)) {
            Some(memory) => self.give(scope, state, at, operation, (place, 0, mark, 0), &Part::Lent(memory)),
            // Its memory is not reached by its name any more: it has left or ended, and may have been started again since.
            None => match gone {
                Some(fault) => self.break_from(scope, state, at, operation, fault),
                None => {
                    self.corrupt(scope, state, rank);
                    let state = self.lock();
                    // As this operation was done on its side, nothing else would end it here.
                    self.break_from(scope, state, at, operation, Fault::PeerCorrupt(rank))
                }
            },
        }
    }

    /// What the caller of an operation that was on the boards waits for now.
    pub(super) fn leave_board(self: &Arc<Self>, scope: &mut Scope<'_>, at: usize, operation: u64) -> Begun {
        let state = self.lock();
        if state.closed {
            return Begun::Failed(Fault::Shutdown);
        }
        let mut state = self.go_by_messages(scope, state, at, operation);
        let Some(group) = state.groups.get_mut(at) else { return Begun::Failed(Fault::Shutdown) };
        match group.near.left.remove(&operation) {
            Some(ticket) => Begun::Pending(ticket),
            None => Begun::Failed(group.failure(operation).unwrap_or(Fault::Shutdown)),
        }
    }
}

impl GroupState {
    fn exchange_plan(&mut self) -> Result<Arc<Plan>, Unfit> {
        if let Some(plan) = &self.exchange {
            return Ok(plan.clone());
        }
        let (kind, choice) = EXCHANGE;
        let plan = Plan::new(choice.schedule(), kind, &self.membership.place(0))?;
        Ok(self.exchange.insert(Arc::new(plan)).clone())
    }

    /// Whether the part of a member of an operation on the boards is there.
    pub fn is_written(&self, place: usize, operation: u64) -> bool {
        self.near.boards.as_ref().is_some_and(|boards| boards.board.look(place, operation).is_some())
    }
}
