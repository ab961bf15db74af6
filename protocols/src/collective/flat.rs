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
use super::group_state::{Choice, Slot};
use super::layout::{Layout, Lengths};
use super::near::GroupBoard;
use super::reduce::Combiner;
use super::run::Input;
use super::schedule::Kind;
use super::staged::Staged;
use super::wire;
use super::{Algorithm, plan::Plan};
use crate::group::{Group, Inner};
use bytes::Bytes;
use posthaste_core::blackboard::{Entry, MOST_BYTES};
use posthaste_core::context::{Face, poll_look};
use posthaste_core::{Collective, Value};
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
    pub(super) operation: u64,
    upsets: u32,
    mark: u32,
    len: u32,
    /// The members before this one have written.
    next: u32,
    /// It has looked at everything else since it was called.
    looked: bool,
}

enum Seen {
    All,
    Upset,
}

impl Looking {
    #[inline]
    pub(super) fn new(operation: u64, upsets: u32, mark: u32, len: usize) -> Looking {
        Looking { operation, upsets, mark, len: len as u32, next: 0, looked: false }
    }

    #[inline]
    fn look(&mut self, boards: &GroupBoard) -> Option<Seen> {
        let board = &boards.board;
        while (self.next as usize) < board.members() {
            match board.look(self.next as usize, self.operation) {
                None if boards.ledger.upsets() != self.upsets => return Some(Seen::Upset),
                None => return None,
                Some(entry) if (entry.mark, entry.len) == (self.mark, self.len as usize) => self.next += 1,
                // It called something else.
                Some(_) => return Some(Seen::Upset),
            }
        }
        Some(Seen::All)
    }

    /// What all have written, combined; there were looks until all was there.
    #[inline]
    pub(super) fn value(&self, inner: &Inner, fold: Option<&Combiner>) -> Value {
        let (Some(combiner), Some(boards)) = (fold, inner.boards.get()) else { return Value::Unit };
        let board = &boards.board;
        if self.len == 8 {
            let mut total = board.word(0, self.operation).to_ne_bytes();
            for member in 1..board.members() {
                combiner.run(&mut total, &board.word(member, self.operation).to_ne_bytes(), false);
            }
            return Value::copy(&total);
        }
        let (mut total, mut part) = ([0; MOST_BYTES], [0; MOST_BYTES]);
        let (total, part) = (&mut total[..self.len as usize], &mut part[..self.len as usize]);
        board.read(0, self.operation, total);
        for member in 1..board.members() {
            board.read(member, self.operation, part);
            combiner.run(total, part, false);
        }
        Value::copy(total)
    }

    /// Whether all parts lie elsewhere.
    #[inline]
    pub(super) fn lies_elsewhere(&self) -> bool {
        self.len as usize == Entry::ELSEWHERE
    }

    /// Looks until all is there, which is true, or the operation may have to go on otherwise. `since`: since when it looks in
    /// vain.
    #[inline]
    pub(super) fn poll(
        &mut self,
        inner: &Arc<Inner>,
        cx: &mut Context<'_>,
        since: &mut Option<Duration>,
    ) -> Poll<bool> {
        let Some(boards) = inner.boards.get() else { return Poll::Ready(false) };
        loop {
            let first = !std::mem::replace(&mut self.looked, true) && boards.is_turn();
            let looked = poll_look(&inner.handle, cx, first, since, || self.look(boards));
            match ready!(looked) {
                Some(Seen::All) => {
                    boards.board.prepare(self.operation + 1);
                    return Poll::Ready(true);
                }
                Some(Seen::Upset) if self.is_undisturbed(inner, boards) => {}
                Some(Seen::Upset) | None => return Poll::Ready(false),
            }
        }
    }

    /// Its result was had. That counts if nobody has ended the operation meanwhile, or taken it off the boards.
    #[inline]
    pub(super) fn finish(&self, inner: &Inner) -> bool {
        let told = |boards: &Arc<GroupBoard>| boards.ledger.finish(self.operation, self.upsets);
        let counts = !self.lies_elsewhere() && inner.boards.get().is_some_and(told);
        counts || inner.hub.end_on_board(inner, self.operation)
    }

    /// Whether what happened did not concern this operation.
    #[cold]
    fn is_undisturbed(&mut self, inner: &Inner, boards: &GroupBoard) -> bool {
        let upsets = std::mem::replace(&mut self.upsets, boards.ledger.upsets());
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
pub(super) fn leave(inner: &Arc<Inner>, operation: u64) -> Stage {
    let begun = inner.handle.enter(|engine| inner.hub.leave_board(&mut engine.scope(), inner.at, operation));
    match begun {
        Ok(begun) => Stage::Started(Box::new(Started::new(&inner.handle, begun))),
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
            && self.is_plain()
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
        let stage = match inner.hub.write_on_board(inner, mark, call, payload) {
            // Made where it stays: the others wait for this rank meanwhile.
            Some(Written::There(looking)) => {
                return InFlight::new(inner, Stage::Looking(looking), fold, None, convert);
            }
            Some(Written::Left(operation)) => leave(inner, operation),
            None => begin_by_messages(inner, mark, call, payload),
        };
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
        Err(unfit) => return Stage::Refused(Box::new(CollectiveError::unfit(unfit, &choice, kind))),
    };
    let layout = layout_of(payload.len(), &plan);
    let input = Input { bytes: Bytes::copy_from_slice(payload), outgoing: None, lent: None };
    let call = Call::small(plan, name, mark, layout, input);
    Stage::start(hub, handle, *at, operation, call)
}

pub(super) fn layout_of(len: usize, plan: &Plan) -> Layout {
    Layout::new(Lengths::Same(len), 1, plan.blocks)
}

/// What became of a part that was written on the board.
pub(super) enum Written {
    There(Looking),
    /// The operation goes on otherwise.
    Left(u64),
}

impl Hub {
    /// Writes this rank's part of its next operation on its board. `None`: not there; nothing was done.
    #[inline]
    fn write_on_board(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        mark: u32,
        call: Collective,
        payload: &[u8],
    ) -> Option<Written> {
        let mut state = self.lock();
        let closed = state.closed;
        let group = state.groups.get_mut(inner.at).filter(|_| !closed)?;
        let operation = group.next();
        let boards = inner.boards.get_or_init({
            let boards = group.writes(operation)?;
            move || boards.clone()
        });
        let upsets = boards.ledger.upsets();
        // All else can wait until the others see it.
        boards.board.write(operation, mark, payload);
        let len = payload.len();
        group.slots.push_back(Slot::OnBoard(OnBoard { mark, call, len, unsent: 0, staged: None }));
        Some(self.written(inner, state, boards, Looking::new(operation, upsets, mark, len)))
    }

    /// This rank's part of an operation is on its board.
    #[inline]
    pub(super) fn written(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        mut state: Guard<'_>,
        boards: &GroupBoard,
        looking: Looking,
    ) -> Written {
        let (board, operation) = (&boards.board, looking.operation);
        // It was there when the part was written.
        let Some(group) = state.groups.get_mut(inner.at) else { return Written::Left(operation) };
        group.started = group.started.max(operation + 1);
        group.settle();
        let disturbed = group.wanted || group.has_early(operation);
        let unsent = board.wanting();
        // What the others have written is on its way while this rank ends its books. Asked for before its own part is out, it
        // would be taken from those who are about to write it.
        board.expect(operation);
        if unsent != 0
            && let Some(Slot::OnBoard(what)) = group.slot(operation)
        {
            what.unsent = unsent;
        }
        drop(state);
        if unsent != 0 || disturbed {
            let told = inner.handle.enter(|engine| self.tell(&mut engine.scope(), inner.at, operation));
            if told.is_err() {
                return Written::Left(operation);
            }
        }
        Written::There(looking)
    }

    /// An operation on the boards is over for this rank. False: it was on them no more.
    #[inline]
    fn end_on_board(&self, inner: &Inner, operation: u64) -> bool {
        let mut state = self.lock();
        let Some(group) = state.groups.get_mut(inner.at) else { return false };
        let Some(slot @ (Slot::OnBoard(_) | Slot::Reading)) = group.slot(operation) else { return false };
        *slot = Slot::Ended;
        // Those before it that are known to their callers alone.
        group.settle();
        group.sweep();
        true
    }
}
