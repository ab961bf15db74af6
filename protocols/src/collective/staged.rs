//! Operations whose parts are longer than a slot of a board: each member lays all that it gives into its stage, writes on its
//! board where that is, and reads what is for it out of the stages of all others.
//!
//! ```text
//!   call -> input laid into the own stage -> where, written on the own board      one copy, one line
//!        -> boards looked at until all have written -> own block read out of each stage, in the order of the ranks
//! ```
//! There is no message. Deaths, calls that do not match, and whoever stops looking are dealt with as for the operations
//! whose parts are on the boards themselves (`flat`): it goes on by messages, which then say where a part lies. Who has no room
//! in its stage sends its parts as messages from the start.
//!
//! Values are combined by each member for itself, in the order of the ranks, by whichever way they came.

use super::Algorithm;
use super::call::{CollectiveError, InFlight, Stage};
use super::executor::{Call, Hub};
use super::flat::{Looking, OnBoard, Written, leave};
use super::group_state::{Choice, Slot};
use super::layout::{Layout, Lengths, input_is_own_block};
use super::plan::Plan;
use super::run::Input;
use super::schedule::Kind;
use super::spec::Spec;
use super::stage::{Area, Exchanged, LENT_CHUNK, Lent, Outcome, Reference, Sink};
use super::wire;
use crate::group::{Group, Inner};
use posthaste_core::memory::SharedSlice;
use posthaste_core::sync::lock;
use posthaste_core::{Fault, Value};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Tells these operations apart from others.
const MARK: u64 = 0x7374_6167;
/// How the parts go if they go as messages.
const CHOICE: Choice = Choice::Known(Algorithm::Pairwise);

/// What members give to each other in such an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    /// All-to-all: a block for each; all-gather: one for all.
    pub kind: Kind,
    /// Bytes of a block.
    pub block: usize,
    /// Bytes of all that a member gives.
    pub bytes: usize,
}

/// Which part of what a member has laid out is for this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    start: u64,
    pub(super) len: u64,
}

impl Share {
    /// The same as it lies in the memory of a member whose input begins there.
    pub(super) fn at(self, offset: u64) -> Option<Reference> {
        Some(Reference { offset: offset.checked_add(self.start)?, len: u32::try_from(self.len).ok()? })
    }
}

/// What this rank has laid out for an operation, and what it makes of the parts of all.
pub(super) struct Staged {
    plan: Arc<Plan>,
    layout: Layout,
    area: Area,
    block: usize,
    sink: Box<dyn Sink>,
    outcome: Outcome,
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").field("area", &self.area).finish_non_exhaustive()
    }
}

impl Staged {
    /// Where the part for a member lies.
    pub fn part_for(&self, place: usize) -> Option<Reference> {
        share(self.plan.kind, place, self.block).at(self.area.offset)
    }

    pub fn share(&self) -> Share {
        share(self.plan.kind, self.plan.rank, self.block)
    }

    /// What goes into it as an operation that lends.
    pub fn into_input(self) -> (Arc<Plan>, Layout, Input) {
        let Staged { plan, layout, area, sink, outcome, .. } = self;
        let own = layout.place(&plan, plan.rank, true).filter(|_| !input_is_own_block(plan.kind));
        let own = own.and_then(|own| area.memory.slice(own.start as u64, own.len() as u64));
        let own = own.map_or_else(Vec::new, |own| own.to_vec());
        let lent = Some(Lent { area, exchange: Some(Exchanged { own, sink, outcome }) });
        (plan, layout, Input { bytes: bytes::Bytes::new(), outgoing: None, lent })
    }
}

fn share(kind: Kind, place: usize, block: usize) -> Share {
    let start = if input_is_own_block(kind) { 0 } else { place * block };
    Share { start: start as u64, len: block as u64 }
}

impl Looking {
    /// What a member has laid out for this rank; `None`: no honest member says what it says.
    fn part(&self, inner: &Inner, share: Share, place: usize) -> Option<SharedSlice> {
        let (offset, len) = inner.boards.get()?.board.reference(place, self.operation);
        let Reference { offset, len } = share.at(offset).filter(|_| len == share.len)?;
        inner.windows.as_ref()?.map(inner.rank_of(place)?, offset, len.into())
    }

    /// Puts the result together out of what all have laid out. False: it goes on otherwise.
    pub(super) fn put_together(&self, inner: &Arc<Inner>) -> bool {
        let Some(mut what) = inner.hub.begin_reading(inner, self.operation) else { return false };
        let parts = what.staged.as_ref().and_then(|staged| {
            let parts = (0..inner.size()).map(|place| self.part(inner, staged.share(), place));
            parts.collect::<Option<Vec<_>>>()
        });
        let Some(parts) = parts else {
            inner.hub.read_in_vain(inner, self.operation, what);
            return false;
        };
        if let Some(staged) = what.staged.take() {
            let Staged { mut sink, outcome, .. } = *staged;
            parts.into_iter().for_each(|part| sink.shared(part));
            *lock(&outcome) = Some(sink.finish());
        }
        true
    }
}

impl Hub {
    /// All parts of an operation are there, and its caller begins to read them. `None`: it is not on the boards any more.
    fn begin_reading(&self, inner: &Inner, operation: u64) -> Option<OnBoard> {
        let mut state = self.lock();
        let slot = state.groups.get_mut(inner.at)?.slot(operation)?;
        match std::mem::replace(slot, Slot::Reading) {
            Slot::OnBoard(what) => Some(what),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// They are not what they should be: the operation is as it was before.
    #[cold]
    fn read_in_vain(&self, inner: &Inner, operation: u64, what: OnBoard) {
        let mut state = self.lock();
        if let Some(slot @ Slot::Reading) =
            state.groups.get_mut(inner.at).and_then(|group| group.slot(operation))
        {
            *slot = Slot::OnBoard(what);
        }
    }

    /// Writes on this rank's board where its part of an operation that was reserved lies. `Err`: it goes by messages.
    fn refer_on_board(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        operation: u64,
        what: OnBoard,
    ) -> Result<Stage, OnBoard> {
        let mut state = self.lock();
        let closed = state.closed;
        let Some(group) = state.groups.get_mut(inner.at).filter(|_| !closed) else { return Err(what) };
        let Some(boards) = group.writes(operation) else { return Err(what) };
        let boards = inner.boards.get_or_init(|| boards.clone());
        let upsets = boards.ledger.upsets();
        if let Some(staged) = &what.staged {
            boards.board.refer(operation, what.mark, staged.area.offset, staged.block as u64);
        }
        let looking = Looking::new(operation, upsets, what.mark, what.len);
        if let Some(slot) = group.slot(operation) {
            *slot = Slot::OnBoard(what);
        }
        Ok(match self.written(inner, state, boards, looking) {
            Written::There(looking) => Stage::Looking(looking),
            Written::Left(operation) => leave(inner, operation),
        })
    }
}

impl Group {
    /// Starts such an operation.
    pub(super) fn begin_staged<T>(
        &self,
        spec: Spec<'_>,
        exchange: Exchange,
        sink: Box<dyn Sink>,
        convert: fn(Value) -> T,
        typed: fn(Box<dyn Any + Send>) -> T,
    ) -> (u64, InFlight<T>) {
        let inner = self.inner();
        let Exchange { kind, block, bytes } = exchange;
        let (operation, plan, area) = match inner.hub.reserve(inner.at, kind, 0, &CHOICE, Some(bytes)) {
            Ok(reserved) => reserved,
            Err(unfit) => {
                let error = CollectiveError::unfit(unfit, &CHOICE, kind);
                return (u64::MAX, InFlight::refused(inner, error, convert));
            }
        };
        let layout = Layout::new(Lengths::Same(block), spec.element, plan.blocks).cut(LENT_CHUNK);
        let operand = spec.combiner.as_ref().map_or(0, |combiner| u64::from(combiner.mark()));
        let mark = wire::mark(spec.kind as u8, [spec.bytes as u64 ^ operand << 40, MARK]);
        let name = (spec.name)(u32::try_from(spec.bytes).unwrap_or(u32::MAX));
        let call = |plan: Arc<Plan>, layout, input| {
            let share = Some(share(kind, plan.rank, block));
            Call { lends: true, share, ..Call::small(plan, name, mark, layout, input) }
        };
        let start = |call| Stage::start(&inner.hub, &inner.handle, inner.at, operation, call);
        let outcome = Outcome::default();
        let stage = match area {
            Some(area) => {
                area.memory.write(spec.input.as_bytes());
                let staged = Staged { plan, layout, area, block, sink, outcome: outcome.clone() };
                let len = posthaste_core::blackboard::Entry::ELSEWHERE;
                let what = OnBoard { mark, call: name, len, unsent: 0, staged: Some(Box::new(staged)) };
                inner.hub.refer_on_board(inner, operation, what).unwrap_or_else(|what| {
                    let (plan, layout, input) = match what.staged {
                        Some(staged) => staged.into_input(),
                        None => return Stage::Refused(Box::new(Fault::Shutdown.into())),
                    };
                    start(call(plan, layout, input))
                })
            }
            None => {
                let bytes = spec.input.into_bytes(&inner.hub.buffers);
                start(call(plan, layout, Input { bytes, outgoing: None, lent: None }))
            }
        };
        (operation, InFlight::new(inner, stage, spec.combiner, Some((outcome, typed)), convert))
    }
}
