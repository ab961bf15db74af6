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

use super::call::{CollectiveError, InFlight, Stage, Started};
use super::executor::{Call, Guard, Hub};
use super::layout::{Layout, Lengths};
use super::near::GroupBoard;
use super::reduce::Combiner;
use super::run::Input;
use super::schedule::Kind;
use super::staged::Staged;
use super::state::{Choice, Slot};
use super::wire;
use super::{Algorithm, plan::Plan};
use crate::group::{Group, Inner};
use bytes::Bytes;
use posthaste_core::blackboard::{Entry, MOST_BYTES};
use posthaste_core::context::{Face, poll_look};
use posthaste_core::{Collective, Fault, Value};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// Tells these operations apart from those by a schedule.
const MARK: u64 = 0x666c_6174;
/// What messages of such an operation are.
pub(super) const EXCHANGE: (Kind, Choice) = (Kind::AllGather, Choice::Known(Algorithm::Pairwise));

/// An operation that is on the boards.
#[derive(Debug)]
pub(super) struct OnBoard {
    pub mark: u32,
    pub call: Collective,
    /// Bytes of each part, or that it lies elsewhere.
    pub len: usize,
    /// Members that are yet to be sent a message, by their bits.
    pub unsent: u64,
    /// What lies elsewhere.
    pub staged: Option<Box<Staged>>,
}

/// The same in the hands of its caller.
#[derive(Debug)]
pub(super) struct Looking {
    pub(super) boards: Arc<GroupBoard>,
    pub(super) operation: u64,
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
                    self.boards.board.prepare(self.operation + 1);
                    let value = match self.len {
                        Entry::ELSEWHERE if !self.put_together(inner) => None,
                        Entry::ELSEWHERE => Some(Value::Unit),
                        _ => Some(self.value(fold)),
                    };
                    // What was read counts if nobody has ended the operation meanwhile.
                    return Poll::Ready(match value {
                        Some(value) if inner.hub.end_on_board(inner, self.operation) => Ok(value),
                        _ => Err(leave(inner, self.operation)),
                    });
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
        if !inner.hub.end_on_board(inner, self.operation) {
            inner.hub.forget(inner, self.operation);
        }
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
        let what = OnBoard { mark, call, len: payload.len(), unsent: 0, staged: None };
        let stage = inner.hub.write_on_board(inner, what, payload);
        let stage = stage.unwrap_or_else(|| begin_by_messages(inner, mark, call, payload));
        InFlight::new(inner, stage, fold, None, convert)
    }
}

/// There are no boards, or no room there, or something else is about.
#[cold]
fn begin_by_messages(inner: &Arc<Inner>, mark: u32, name: Collective, payload: &[u8]) -> Stage {
    let Inner { hub, handle, at, .. } = &**inner;
    let (kind, choice) = EXCHANGE;
    let (operation, plan) = match hub.reserve(*at, kind, 0, &choice, None) {
        Ok((operation, plan, _)) => (operation, plan),
        Err(unfit) => return Stage::Refused(CollectiveError::unfit(unfit, &choice, kind)),
    };
    let layout = layout_of(payload.len(), &plan);
    let input = Input { bytes: Bytes::copy_from_slice(payload), outgoing: None, lent: None };
    let call =
        Call { plan, name, mark, layout, input, combiner: None, is_small: true, lends: false, share: None };
    Stage::start(hub, handle, *at, operation, call)
}

pub(super) fn layout_of(len: usize, plan: &Plan) -> Layout {
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
        group.slots.push_back(Slot::Reserved);
        Some(self.written(inner, state, (boards, upsets), operation, what))
    }

    /// This rank's part of an operation is on its board.
    #[inline]
    pub(super) fn written(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        mut state: Guard<'_>,
        (boards, upsets): (Arc<GroupBoard>, u64),
        operation: u64,
        what: OnBoard,
    ) -> Stage {
        let (board, mark, len) = (&boards.board, what.mark, what.len);
        let others = (0..board.members()).filter(|place| *place != board.me());
        let unsent = others.fold(0, |bits, place| bits | u64::from(board.wants_message(place)) << place);
        let Some(group) = state.groups.get_mut(inner.at) else {
            return Stage::Started(Started::Failed(Fault::Shutdown));
        };
        if let Some(slot) = group.slot(operation) {
            *slot = Slot::OnBoard(OnBoard { unsent, ..what });
        }
        group.started = group.started.max(operation + 1);
        let disturbed = group.wanted || group.has_early(operation);
        drop(state);
        if unsent != 0 || disturbed {
            let told = inner.handle.enter(|engine| self.tell(&mut engine.scope(), inner.at, operation));
            if told.is_err() {
                return leave(inner, operation);
            }
        }
        Stage::Looking(Looking { boards, operation, mark, len, next: 0, upsets, looked: false, since: None })
    }

    /// An operation on the boards is over for this rank. False: it was on them no more.
    #[inline]
    fn end_on_board(&self, inner: &Inner, operation: u64) -> bool {
        let mut state = self.lock();
        let Some(group) = state.groups.get_mut(inner.at) else { return false };
        let Some(slot @ (Slot::OnBoard(_) | Slot::Reading)) = group.slot(operation) else { return false };
        *slot = Slot::Ended;
        group.sweep();
        true
    }
}
