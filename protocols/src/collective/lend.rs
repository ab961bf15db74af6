//! An operation whose parts are read where they lie: what this rank shows, and what it makes of what others do.

use super::layout::input_is_own_block;
use super::part::Kept;
use super::plan::{Plan, Step};
use super::run::Run;
use super::schedule::Kind;
use super::stage::{Area, Exchanged, Lent, Reference};
use posthaste_core::sync::lock;

impl Run {
    /// Whether what this rank sends is read where it lies.
    #[inline]
    pub fn lends(&self) -> bool {
        self.input.lent.is_some()
    }

    /// There was no room to lend what goes to all: they are asked, and it is looked for again when all have answered.
    pub fn await_room(&mut self) {
        self.awaits_room = self.plan.kind == Kind::Broadcast && self.plan.rank == self.plan.root;
    }

    /// Somebody does not answer for long: the others wait for it no more, but get messages. Whether it had them wait.
    pub fn give_up_room(&mut self) -> bool {
        let gives_up = self.awaits_room;
        if gives_up {
            self.lend(None);
        }
        gives_up
    }

    /// Bytes of what this rank gives.
    pub fn input_len(&self) -> usize {
        self.input.bytes.len()
    }

    /// Whether all have answered, so that there may be room now: [`Self::lend`] is next.
    pub fn may_have_room(&self) -> bool {
        self.awaits_room && self.ready.is_empty() && self.unclear.keys().all(|key| self.clear.contains(key))
    }

    /// Lends what goes to all, or sends it where there is no room.
    pub fn lend(&mut self, area: Option<Area>) {
        self.awaits_room = false;
        self.input.lent = area.map(|area| Lent { area, exchange: None });
        self.ready.extend(std::mem::take(&mut self.unclear).into_values().flatten());
        self.shown.resize(if self.lends() { self.slices() } else { 0 }, false);
    }

    /// Where what a step sends lies in the area, which has all blocks in their places, or the own one alone.
    pub(super) fn show(&mut self, plan: &Plan, step: &Step, slice: u32) -> Option<Reference> {
        let own = self.own_start();
        let Run { layout, input, work, shown, .. } = self;
        let lent = input.lent.as_ref()?;
        let mut piece = 0..0;
        let outgoing = input.outgoing.as_ref().unwrap_or(layout);
        outgoing.pieces(plan, &step.blocks, slice as usize, true, |only| piece = only);
        // Its own block is what it has combined, and goes into the area when it is ready; what goes to all goes there chunk
        // by chunk, which they copy meanwhile.
        let late = match plan.kind {
            Kind::AllReduce if step.blocks.iter().any(|block| block == plan.rank) => {
                Some(work.get(piece.start - own..piece.end - own)?)
            }
            Kind::Broadcast => Some(input.bytes.get(piece.clone())?),
            _ => None,
        };
        if let Some(bytes) = late
            && !std::mem::replace(&mut shown[slice as usize], true)
        {
            lent.area.memory.slice(piece.start as u64, piece.len() as u64)?.write(bytes);
        }
        let start = if input_is_own_block(plan.kind) { piece.start - own } else { piece.start };
        Some(Reference { offset: lent.area.offset + start as u64, len: piece.len() as u32 })
    }

    /// Where this rank's own block begins among all.
    pub(super) fn own_start(&self) -> usize {
        self.layout.place(&self.plan, self.plan.rank, true).map_or(0, |own| own.start)
    }

    /// The result of an operation that lends, put together where its caller finds it.
    pub(super) fn put_together(&mut self) {
        let Run { plan, input, work, parts, .. } = self;
        let Some(Lent { area, exchange: Some(exchanged) }) = input.lent.take() else { return };
        let Exchanged { mut sink, outcome, .. } = exchanged;
        let blocks = match plan.kind {
            Kind::ReduceScatter => plan.rank..plan.rank + 1,
            _ => 0..plan.blocks,
        };
        for block in blocks {
            match block == plan.rank {
                true if input_is_own_block(plan.kind) => sink.shared(area.memory),
                true => sink.private(work),
                false => {
                    for slice in parts.chunks_mut(plan.blocks) {
                        match slice[block].take() {
                            Some(Kept::Lent(memory)) => sink.shared(memory),
                            Some(Kept::Bytes(bytes)) => sink.private(&bytes),
                            None => {}
                        }
                    }
                }
            }
        }
        *lock(&outcome) = Some(sink.finish());
    }
}
