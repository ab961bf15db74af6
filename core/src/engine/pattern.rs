//! Recorded patterns: sections of one cumulative buffer of descriptors (D26), and their replay.
//!
//! A section holds one run of descriptors per target. To replay it is to give each run to the device as it lies
//! there; a run that cannot be taken whole becomes one `Jump` entry in its target's injection FIFO, whose head and
//! tail are the places in the run.

use super::{Scope, State};
use crate::descriptor::{Descriptor, Op};
use crate::device::{Sources, Stop};
use crate::error::Fault;
use crate::ids::PatternId;
use crate::slot::{Outcome, Ticket, Value};
use slab::Slab;
use thiserror::Error;

/// Why a pattern could not be recorded or replayed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PatternError {
    /// It was unregistered or never recorded.
    #[error("{0} does not exist (any more)")]
    NoSuchPattern(PatternId),
    /// Nothing was recorded.
    #[error("nothing was recorded")]
    Empty,
    /// The replay was started and ended with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A recorded operation is not possible.
    #[error(transparent)]
    Rma(#[from] crate::error::RmaError),
}

/// How far a replay got.
#[derive(Debug)]
pub enum ReplayStart {
    /// Everything is at its targets.
    Done,
    /// Each of these ends when the part of one target is there.
    Queued(Vec<Ticket>),
}

#[derive(Debug)]
struct Run {
    index: usize,
    start: usize,
    end: usize,
}

#[derive(Debug)]
struct Section {
    start: usize,
    len: usize,
    runs: Vec<Run>,
    /// Replays that still point into the section.
    active: usize,
    unregistered: bool,
}

/// All recorded descriptors of a context.
#[derive(Debug, Default)]
pub(crate) struct PatternStore {
    buffer: Vec<Descriptor>,
    /// Free ranges of the buffer: start and length, sorted.
    free: Vec<(usize, usize)>,
    sections: Slab<Section>,
}

impl PatternStore {
    fn place(&mut self, descriptors: &[Descriptor]) -> usize {
        let len = descriptors.len();
        if let Some(at) = self.free.iter().position(|&(_, room)| room >= len) {
            let (start, room) = self.free[at];
            if room == len {
                self.free.remove(at);
            } else {
                self.free[at] = (start + len, room - len);
            }
            self.buffer[start..start + len].copy_from_slice(descriptors);
            return start;
        }
        let start = self.buffer.len();
        self.buffer.extend_from_slice(descriptors);
        start
    }

    fn give_back(&mut self, start: usize, len: usize) {
        let at = self.free.partition_point(|&(other, _)| other < start);
        self.free.insert(at, (start, len));
        if at + 1 < self.free.len() && self.free[at].0 + self.free[at].1 == self.free[at + 1].0 {
            self.free[at].1 += self.free.remove(at + 1).1;
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == self.free[at].0 {
            self.free[at - 1].1 += self.free.remove(at).1;
        }
    }

    fn release_if_idle(&mut self, key: usize) {
        let idle = self.sections.get(key).is_some_and(|section| section.unregistered && section.active == 0);
        if idle {
            let section = self.sections.remove(key);
            self.give_back(section.start, section.len);
        }
    }
}

impl PatternStore {
    /// A recorded descriptor, by its place in the buffer.
    pub(super) fn recorded(&self, at: usize) -> Option<Descriptor> {
        self.buffer.get(at).copied()
    }
}

impl Scope<'_> {
    /// Stores recorded descriptors as a section. Their order per target is kept.
    ///
    /// # Errors
    /// If there are none.
    pub fn store_pattern(&mut self, mut descriptors: Vec<Descriptor>) -> Result<PatternId, PatternError> {
        if descriptors.is_empty() {
            return Err(PatternError::Empty);
        }
        let shape = self.state.shape;
        descriptors.sort_by_key(|descriptor| shape.index(descriptor.target()));
        let start = self.state.patterns.place(&descriptors);
        let mut runs: Vec<Run> = Vec::new();
        for (at, descriptor) in descriptors.iter().enumerate() {
            let index = shape.index(descriptor.target());
            match runs.last_mut() {
                Some(run) if run.index == index => run.end = start + at + 1,
                _ => runs.push(Run { index, start: start + at, end: start + at + 1 }),
            }
        }
        let len = descriptors.len();
        let section = Section { start, len, runs, active: 0, unregistered: false };
        Ok(PatternId(self.state.patterns.sections.insert(section) as u32))
    }

    /// Frees a section, once no replay points into it any more.
    pub fn unregister_pattern(&mut self, id: PatternId) {
        if let Some(section) = self.state.patterns.sections.get_mut(id.index()) {
            section.unregistered = true;
            self.state.patterns.release_if_idle(id.index());
        }
    }

    /// The recorded descriptors of a section, in the order of injection.
    #[must_use]
    pub fn recorded(&self, id: PatternId) -> &[Descriptor] {
        match self.state.patterns.sections.get(id.index()) {
            Some(section) => &self.state.patterns.buffer[section.start..section.start + section.len],
            None => &[],
        }
    }

    /// Carries a recorded pattern out once more: no protocol work, no allocation, no completion per operation
    /// as long as the device takes it whole.
    ///
    /// # Errors
    /// If the pattern does not exist or a target of it is gone; the parts of the other targets are done then.
    pub fn replay(&mut self, id: PatternId) -> Result<ReplayStart, PatternError> {
        let key = id.index();
        let count = match self.state.patterns.sections.get(key) {
            Some(section) if !section.unregistered => section.runs.len(),
            _ => return Err(PatternError::NoSuchPattern(id)),
        };
        self.state.stats.replays += 1;
        let mut tickets = Vec::new();
        let mut failed = None;
        for at in 0..count {
            let Run { index, start, end } = self.state.patterns.sections[key].runs[at];
            if let Some(fault) = self.state.peer(index).fault {
                failed = Some(fault);
                continue;
            }
            let mut cursor = start;
            if self.state.peer(index).queue_is_empty() && !self.state.goes_over_send(index) {
                match self.inject_run(&mut cursor, end, 0) {
                    Some(Ok(true)) => continue,
                    Some(Ok(false)) => {}
                    Some(Err(fault)) => {
                        failed = Some(fault);
                        continue;
                    }
                    None => {}
                }
            }
            match self.queue_run(key, index, cursor, end) {
                Ok(ticket) => tickets.push(ticket),
                Err(fault) => failed = Some(fault),
            }
        }
        match failed {
            Some(fault) => {
                for ticket in tickets {
                    self.state.slots.detach(ticket);
                }
                Err(fault.into())
            }
            None if tickets.is_empty() => Ok(ReplayStart::Done),
            None => Ok(ReplayStart::Queued(tickets)),
        }
    }

    /// Injects `cursor..end`. `Some(Ok(true))`: all taken and complete. `Some(Ok(false))`: all but the last taken,
    /// which needs a ticket because the device reports completions. `None`: no room.
    #[inline]
    fn inject_run(&mut self, cursor: &mut usize, end: usize, ticket: u64) -> Option<Result<bool, Fault>> {
        let State { patterns, table, routes, .. } = &mut *self.state;
        let sources = Sources { info: &[], borrowed: &[], table };
        let mappable = routes.of(patterns.buffer[*cursor].rank).mappable;
        let stop_at = if mappable || ticket != 0 { end } else { end - 1 };
        if ticket != 0 && !mappable && *cursor + 1 == end {
            let last = Descriptor { ticket, ..patterns.buffer[*cursor] };
            let injected = self.inject.inject(std::slice::from_ref(&last), &sources);
            *cursor += injected.taken;
            return match injected.stop {
                Stop::Done => Some(Ok(injected.complete)),
                Stop::Full => None,
                Stop::Fault(fault) => Some(Err(fault)),
            };
        }
        let injected = self.inject.inject(&patterns.buffer[*cursor..stop_at], &sources);
        *cursor += injected.taken;
        match injected.stop {
            Stop::Done => Some(Ok(*cursor == end)),
            Stop::Full => None,
            Stop::Fault(fault) => Some(Err(fault)),
        }
    }

    #[cold]
    fn queue_run(&mut self, key: usize, index: usize, cursor: usize, end: usize) -> Result<Ticket, Fault> {
        let target = self.state.shape.endpoint(index);
        let ticket = self.operation(Some(target.rank))?;
        let jump = Descriptor {
            op: Op::Jump,
            rank: target.rank,
            context: target.context,
            region: key as u32,
            offset: cursor as u64,
            len: end as u64,
            ticket: ticket.to_word(),
            ..Descriptor::default()
        };
        self.state.patterns.sections[key].active += 1;
        self.state.gates.queued(target.rank, 1);
        self.state.stats.queued += 1;
        let peer = self.state.peer(index);
        peer.unflushed = true;
        peer.queued_rma += 1;
        peer.push(&jump, &[]);
        self.state.mark_busy(index);
        self.pump_peer(index);
        Ok(ticket)
    }

    /// Goes on with a replay at the head of a FIFO. `None`: no room. `Some(None)`: injected, the device reports.
    pub(super) fn step_replay(&mut self, index: usize, mut front: Descriptor) -> Option<Option<Outcome>> {
        if self.state.goes_over_send(index) {
            return self.step_run(index, front);
        }
        let end = front.len as usize;
        loop {
            let mut cursor = front.offset as usize;
            // All but the last go without a ticket where the device reports completions.
            let ticket = if cursor + 1 == end { front.ticket } else { 0 };
            let result = self.inject_run(&mut cursor, end, ticket);
            front.offset = cursor as u64;
            if let Some(fifo) = self.state.peer(index).fifo.as_mut() {
                fifo.set_front(&front);
            }
            let done = match result? {
                Err(fault) => Some(Some(Err(fault))),
                Ok(true) => Some(Some(Ok(Value::Unit))),
                Ok(false) if cursor == end => Some(None),
                Ok(false) => None,
            };
            if let Some(done) = done {
                self.state.rma_left_queue(index);
                if done.is_none() {
                    self.state.replay_left(&front);
                }
                return Some(done);
            }
        }
    }
}

impl State {
    pub(super) fn replay_left(&mut self, jump: &Descriptor) {
        let key = jump.region as usize;
        if let Some(section) = self.patterns.sections.get_mut(key) {
            section.active = section.active.saturating_sub(1);
        }
        self.patterns.release_if_idle(key);
    }

    /// A queued run of a replay has ended.
    pub(super) fn end_run(&mut self, jump: &Descriptor, fault: Option<Fault>) {
        self.replay_left(jump);
        if let Some(ticket) = Ticket::from_word(jump.ticket) {
            self.completer.complete(ticket, fault.map_or(Ok(Value::Unit), Err));
        }
    }
}
