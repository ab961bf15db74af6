//! Small operations of members that share memory: each writes its part on its board and reads those of all others.
//!
//! ```text
//!   call -> written -> looked at until all are there -> ended           no token, no message, no completion slot
//!              |               | in vain, or something else came
//!              +---------------+-> by messages: a Run of an exchange between all, as any other operation
//! ```
//! To be asleep is to go by messages: whoever stops looking asks for them (`Blackboard::ask`), and who writes for it later
//! sends its part besides. So deaths, calls that do not match, full queues and dropped futures have one way each to be
//! dealt with, which is that of messages. What was combined is combined in the order of the ranks, either way.

use super::call::{InFlight, Stage, Started};
use super::executor::{Begun, Call, Guard, Hub};
use super::layout::{Layout, Lengths};
use super::near::GroupBoard;
use super::outlet::Way;
use super::part::Part;
use super::reduce::Combiner;
use super::run::{Input, Outgoing, Run, Sent};
use super::schedule::Kind;
use super::state::{Choice, GroupState, Op, Slot, State};
use super::wire;
use super::{Algorithm, plan::Plan};
use crate::group::{Group, Inner};
use crate::operation::Pending;
use bytes::Bytes;
use posthaste_core::blackboard::MOST_BYTES;
use posthaste_core::context::{Face, poll_look};
use posthaste_core::device::Body;
use posthaste_core::{Collective, Fault, Scope, Value};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// Tells these operations apart from those by a schedule.
const MARK: u64 = 0x666c_6174;
/// What messages of such an operation are.
const EXCHANGE: (Kind, Choice) = (Kind::AllGather, Choice::Known(Algorithm::Pairwise));

/// An operation that is on the boards.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnBoard {
    pub mark: u32,
    pub call: Collective,
    /// Bytes of each part.
    pub len: usize,
    /// Members that are yet to be sent a message, by their bits.
    pub unsent: u64,
}

/// The same in the hands of its caller.
#[derive(Debug)]
pub(super) struct Looking {
    boards: Arc<GroupBoard>,
    operation: u64,
    mark: u32,
    len: usize,
    /// The members before this one have written.
    next: usize,
    upsets: u64,
    /// It has looked at everything else since it was called.
    looked: bool,
    /// Since when it looks in vain.
    since: Option<Duration>,
}

enum Seen {
    All,
    Upset,
}

impl Looking {
    #[inline]
    fn look(&mut self) -> Option<Seen> {
        let board = &self.boards.board;
        while self.next < board.members() {
            match board.look(self.next, self.operation) {
                None if self.boards.upsets() != self.upsets => return Some(Seen::Upset),
                None => return None,
                Some(entry) if (entry.mark, entry.len) == (self.mark, self.len) => self.next += 1,
                // It called something else.
                Some(_) => return Some(Seen::Upset),
            }
        }
        Some(Seen::All)
    }

    fn value(&self, fold: Option<&Combiner>) -> Value {
        let Some(combiner) = fold else { return Value::Unit };
        let board = &self.boards.board;
        let (mut total, mut part) = ([0; MOST_BYTES], [0; MOST_BYTES]);
        let (total, part) = (&mut total[..self.len], &mut part[..self.len]);
        board.read(0, self.operation, total);
        for member in 1..board.members() {
            board.read(member, self.operation, part);
            combiner.run(total, part, false);
        }
        Value::copy(total)
    }

    /// `Err`: it goes on otherwise.
    #[inline]
    pub(super) fn poll(
        &mut self,
        inner: &Arc<Inner>,
        fold: Option<&Combiner>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Value, Stage>> {
        loop {
            let first = !std::mem::replace(&mut self.looked, true) && self.boards.is_turn();
            let mut since = self.since;
            let looked = poll_look(&inner.handle, cx, first, &mut since, || self.look());
            self.since = since;
            match ready!(looked) {
                Some(Seen::All) => {
                    let value = self.value(fold);
                    inner.hub.end_on_board(inner, self.operation);
                    return Poll::Ready(Ok(value));
                }
                Some(Seen::Upset) if self.is_undisturbed(inner) => {}
                Some(Seen::Upset) | None => return Poll::Ready(Err(leave(inner, self.operation))),
            }
        }
    }

    /// Whether what happened did not concern this operation.
    #[cold]
    fn is_undisturbed(&mut self, inner: &Inner) -> bool {
        let upsets = std::mem::replace(&mut self.upsets, self.boards.upsets());
        let mut state = inner.hub.lock();
        let closed = state.closed;
        let slot = state.groups.get_mut(inner.at).and_then(|group| group.slot(self.operation));
        upsets != self.upsets && !closed && matches!(slot, Some(Slot::OnBoard(_)))
    }

    /// Its caller has lost interest. This rank's part is written, and nobody waits for more of it.
    #[cold]
    pub(super) fn abandon(&self, inner: &Arc<Inner>) {
        inner.hub.end_on_board(inner, self.operation);
    }
}

/// Goes on by messages.
#[cold]
fn leave(inner: &Arc<Inner>, operation: u64) -> Stage {
    let begun = inner.handle.enter(|engine| inner.hub.leave_board(&mut engine.scope(), inner.at, operation));
    match begun {
        Ok(begun) => Stage::Started(Started::new(&inner.handle, begun)),
        Err(_) => {
            let (hub, owner, at) = (inner.hub.clone(), inner.handle.clone(), inner.at);
            Stage::Posted(inner.handle.post(move |scope| {
                let begun = hub.leave_board(scope, at, operation);
                Started::new(&owner, begun)
            }))
        }
    }
}

/// The parts of all members, one behind the other, combined.
pub(super) fn fold_parts(parts: &Value, members: usize, combiner: &Combiner) -> Value {
    let bytes = parts.as_bytes();
    let len = bytes.len() / members.max(1);
    let mut total = bytes[..len].to_vec();
    bytes[len..].chunks_exact(len.max(1)).for_each(|part| combiner.run(&mut total, part, false));
    Value::copy(&total)
}

impl Group {
    /// Whether an operation of so many bytes is done on boards, or like it; the same on all members.
    #[inline]
    pub(super) fn is_flat(&self, bytes: usize, combiner: Option<&Combiner>) -> bool {
        self.inner().near
            && self.choice().is_none()
            && bytes <= MOST_BYTES
            && !combiner.is_some_and(Combiner::is_users)
    }

    /// Starts such an operation.
    pub(super) fn begin_flat<T>(
        &self,
        kind: Kind,
        name: fn(u32) -> Collective,
        payload: &[u8],
        fold: Option<Combiner>,
        convert: fn(Value) -> T,
    ) -> InFlight<T> {
        let inner = self.inner();
        let operand = fold.as_ref().map_or(0, |combiner| u64::from(combiner.mark()));
        let mark = wire::mark(kind as u8, [payload.len() as u64 ^ operand << 40, MARK]);
        let call = name(payload.len() as u32);
        let stage =
            inner.hub.write_on_board(inner, OnBoard { mark, call, len: payload.len(), unsent: 0 }, payload);
        let stage = stage.unwrap_or_else(|| begin_by_messages(inner, mark, call, payload));
        InFlight::new(inner, stage, fold, None, convert)
    }
}

/// There are no boards, or no room there, or something else is about.
#[cold]
fn begin_by_messages(inner: &Arc<Inner>, mark: u32, name: Collective, payload: &[u8]) -> Stage {
    let Inner { hub, handle, at, .. } = &**inner;
    let (kind, choice) = EXCHANGE;
    let Ok((operation, plan, _)) = hub.reserve(*at, kind, 0, &choice, None) else {
        return Stage::Started(Started::Failed(Fault::Shutdown));
    };
    let layout = layout_of(payload.len(), &plan);
    let input = Input { bytes: Bytes::copy_from_slice(payload), outgoing: None, lent: None };
    let call = Call { plan, name, mark, layout, input, combiner: None, is_small: true, lends: false };
    Stage::start(hub, handle, *at, operation, call)
}

fn layout_of(len: usize, plan: &Plan) -> Layout {
    Layout::new(Lengths::Same(len), 1, plan.blocks)
}

impl Hub {
    /// Writes this rank's part of its next operation on its board. `None`: not there; nothing was done.
    #[inline]
    fn write_on_board(self: &Arc<Self>, inner: &Arc<Inner>, what: OnBoard, payload: &[u8]) -> Option<Stage> {
        let mut state = self.lock();
        let closed = state.closed;
        let group = state.groups.get_mut(inner.at).filter(|_| !closed)?;
        let operation = group.next();
        let boards = group.writes(operation)?.clone();
        let board = &boards.board;
        let upsets = boards.upsets();
        board.write(operation, what.mark, payload);
        let others = (0..board.members()).filter(|place| *place != board.me());
        let unsent = others.fold(0, |bits, place| bits | u64::from(board.wants_message(place)) << place);
        group.slots.push_back(Slot::OnBoard(OnBoard { unsent, ..what }));
        group.started = group.started.max(operation + 1);
        let disturbed = group.wanted || group.has_early(operation);
        drop(state);
        let (mark, len) = (what.mark, what.len);
        if unsent != 0 || disturbed {
            let told = inner.handle.enter(|engine| self.tell(&mut engine.scope(), inner.at, operation));
            if told.is_err() {
                return Some(leave(inner, operation));
            }
        }
        Some(Stage::Looking(Looking {
            boards,
            operation,
            mark,
            len,
            next: 0,
            upsets,
            looked: false,
            since: None,
        }))
    }

    /// An operation on the boards is over for this rank.
    #[inline]
    fn end_on_board(self: &Arc<Self>, inner: &Arc<Inner>, operation: u64) {
        let mut state = self.lock();
        let Some(group) = state.groups.get_mut(inner.at) else { return };
        match group.slot(operation) {
            Some(slot @ Slot::OnBoard(_)) => {
                *slot = Slot::Ended;
                group.sweep();
            }
            _ => {
                // It goes on by messages, for nobody.
                let ticket = group.near.left.remove(&operation);
                drop(state);
                drop(ticket.map(|ticket| Pending::new(inner.handle.clone(), ticket, None, None)));
            }
        }
    }

    /// Sends messages of what was just written to those who want them, and looks after what else there is.
    #[cold]
    fn tell(self: &Arc<Self>, scope: &mut Scope<'_>, at: usize, operation: u64) {
        let mut state = self.lock();
        self.announce(scope, &mut state, at);
        let State { groups, peers, .. } = &mut *state;
        let Some(group) = groups.get_mut(at) else { return };
        let has_early = group.has_early(operation);
        let Some(Slot::OnBoard(what)) = group.slot(operation) else { return };
        let OnBoard { mark, len, mut unsent, .. } = *what;
        let Some(boards) = group.near.boards.clone() else { return };
        group.learn_from_boards();
        let mut own = [0; MOST_BYTES];
        let own = &mut own[..len];
        boards.board.read(boards.board.me(), operation, own);
        let mut way = Way { hub: self, scope: &mut *scope, peers };
        let mut fault = None;
        for to in 0..boards.board.members() {
            if unsent & 1 << to != 0 && fault.is_none() {
                let out = Outgoing { to, phase: 0, slice: 0, long: false, payload: own, lent: None };
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
        let Some(Slot::OnBoard(what)) = group.slot(operation) else { return state };
        let OnBoard { mark, call, len, unsent } = *what;
        let Some(boards) = group.near.boards.clone() else { return state };
        let board = &boards.board;
        let (Ok(plan), Ok(ticket)) = (group.exchange_plan(), scope.operation(None)) else {
            let fault = Fault::OutOfMemory("a collective operation has no place among those under way");
            return self.break_from(scope, state, at, operation, fault);
        };
        let mut own = vec![0; len];
        board.read(board.me(), operation, &mut own);
        let layout = layout_of(len, &plan);
        let mut run = Run::new(plan, layout, Input { bytes: own.into(), outgoing: None, lent: None }, None);
        let written = (0..board.members()).filter(|place| *place != board.me() && unsent & 1 << place == 0);
        written.for_each(|place| run.was_sent(place));
        let op = Op { run, mark, call, ticket: Some(ticket), is_small: true };
        if let Some(slot) = group.slot(operation) {
            *slot = Slot::Running(Box::new(op));
        }
        group.near.left.insert(operation, ticket);
        boards.upset();
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
        group.learn_from_boards();
        let board = &boards.board;
        board.ask();
        for place in (0..board.members()).filter(|place| *place != board.me()) {
            let Some(entry) = board.look(place, operation) else { continue };
            let mut part = [0; MOST_BYTES];
            let part = &mut part[..entry.len.min(MOST_BYTES)];
            board.read(place, operation, part);
            let what = (place, 0, entry.mark, 0);
            state = self.give(scope, state, at, operation, what, &Part::Body(&Body::Short(part)));
        }
        state
    }

    /// What the caller of an operation that was on the boards waits for now.
    fn leave_board(self: &Arc<Self>, scope: &mut Scope<'_>, at: usize, operation: u64) -> Begun {
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
    fn exchange_plan(&mut self) -> Result<Arc<Plan>, super::plan::Unfit> {
        let (kind, choice) = EXCHANGE;
        if let Some(plan) = self.plan(kind, 0, &choice) {
            return Ok(plan);
        }
        let plan = Plan::new(choice.schedule(), kind, &self.membership.clone().place(0))?;
        self.keep_plan(kind, 0, &choice, plan);
        self.plan(kind, 0, &choice).ok_or(super::plan::Unfit::NotOffered)
    }

    /// Whether the part of a member of an operation on the boards is there.
    pub fn is_written(&self, place: usize, operation: u64) -> bool {
        self.near.boards.as_ref().is_some_and(|boards| boards.board.look(place, operation).is_some())
    }
}
