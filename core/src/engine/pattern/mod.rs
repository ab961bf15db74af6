//! Recorded patterns: sections of one cumulative buffer of descriptors (D26), and their replay.
//!
//! ```text
//!   buffer   | put put send info put | put | send | free ..        one per context, allocated once
//!            `--- run for rank 1 ----'-- 2 -'-- 3 -'               a section, named by its persistent id
//! ```
//! A section holds one run of descriptors per target. To replay it is to give each run to the device as it lies
//! there; a run that cannot be taken whole becomes one `Jump` entry in its target's injection FIFO, whose head and
//! tail are the places in the run. What is under way is counted by its replay (`counter`), which ends once, when nothing
//! is left; runs with messages that take credit wait for it (`credit`) before they take their place in the FIFO.

mod counter;
mod credit;
mod replay;
mod store;

pub use counter::ReplayId;
pub use store::record_info;

pub(super) use counter::Replays;
pub(super) use credit::Line;
pub(crate) use store::PatternStore;

use super::{Scope, State};
use crate::descriptor::{Descriptor, Op};
use crate::error::{Fault, RmaError, SendError};
use crate::exposed::is_exposed;
use crate::ids::{ContextId, PatternId, ProtocolId, Rank};
use crate::slot::Ticket;
use std::any::Any;
use store::Keep;
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
    /// The context's buffer of recorded descriptors is full.
    #[error(
        "no room for {wanted} recorded descriptors: {free} of {capacity} are free; drop patterns that are not needed any more, or \
         raise POSTHASTE_PATTERN_SLOTS"
    )]
    Full {
        /// Slots that the pattern takes: one per operation, and up to three for message info.
        wanted: usize,
        /// Slots that are free.
        free: usize,
        /// Slots that there are.
        capacity: usize,
    },
    /// It belongs to another context than the one that records, sends or replays.
    #[error("{subject} belongs to {theirs}, and this is done on {ours}: do it there")]
    OtherContext {
        /// What it is.
        subject: &'static str,
        /// The context on which it is done.
        ours: ContextId,
        /// Its own.
        theirs: ContextId,
    },
    /// Messages that take credit, more of them for one rank than it ever grants.
    #[error(
        "{messages} messages of {bytes} bytes to rank {rank} take credit, of which it grants {credits} and {credit_bytes} bytes at most: record them as several patterns"
    )]
    TooMuchCredit {
        /// Their receiver.
        rank: Rank,
        /// How many.
        messages: u32,
        /// Their payload.
        bytes: u64,
        /// Credits that it grants.
        credits: u32,
        /// Payload bytes that it grants.
        credit_bytes: u64,
    },
    /// The FIFO that it is to go through takes nothing.
    #[error(transparent)]
    Fifo(#[from] super::FifoError),
    /// Message info was passed for a pattern without messages.
    #[error("the pattern has no message that could carry the info")]
    NoMessage,
    /// The replay was started and ended with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A recorded put or get is not possible.
    #[error(transparent)]
    Rma(RmaError),
    /// A recorded send is not possible.
    #[error(transparent)]
    Send(SendError),
}

/// A fault is one, whatever it ended.
impl From<SendError> for PatternError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Fault(fault) => PatternError::Fault(fault),
            other => PatternError::Send(other),
        }
    }
}

/// A fault is one, whatever it ended.
impl From<RmaError> for PatternError {
    fn from(error: RmaError) -> Self {
        match error {
            RmaError::Fault(fault) => PatternError::Fault(fault),
            other => PatternError::Rma(other),
        }
    }
}

/// How far a replay got.
#[derive(Clone, Copy, Debug)]
pub enum ReplayStart {
    /// Everything is at its targets.
    Done,
    /// The ticket ends when it is.
    Queued {
        /// The one completion of the replay.
        ticket: Ticket,
        /// Its name as long as it is under way.
        replay: ReplayId,
    },
}

impl PatternStore {
    /// A recorded descriptor of a section, by its place there.
    pub(super) fn recorded(&self, key: usize, at: u64) -> Option<(usize, Descriptor)> {
        let section = self.sections.get(key)?;
        let place = section.start + usize::try_from(at).ok().filter(|at| *at < section.len)?;
        Some((place, *self.buffer.get(place)?))
    }
}

impl Scope<'_> {
    /// Stores recorded descriptors as a section. Their order per target is kept. Sends with message info are made by
    /// [`record_info`]. `keep` is whatever the descriptors point into: it is dropped when the section is freed.
    ///
    /// # Errors
    /// If there are none, there is no room, or they need more credit than their receivers grant.
    pub fn store_pattern(
        &mut self,
        descriptors: Vec<Descriptor>,
        keep: Box<dyn Any + Send>,
    ) -> Result<PatternId, PatternError> {
        if descriptors.is_empty() {
            return Err(PatternError::Empty);
        }
        if self.state.closed {
            return Err(Fault::Shutdown.into());
        }
        for descriptor in &descriptors {
            self.state.index_of(descriptor.target())?;
            let max = self.state.config.max_message;
            if descriptor.op == Op::Send && descriptor.len > max {
                return Err(SendError::TooLong { len: descriptor.len, max }.into());
            }
            let accessed = matches!(descriptor.op, Op::Put | Op::Get | Op::Atomic)
                .then(|| self.state.table.remote.get(descriptor.region as usize))
                .flatten();
            // What was recorded may be of memory that a rank had before it was started again.
            if let Some(fault) = accessed.and_then(|memory| self.state.stale(memory.rank, memory.incarnation))
            {
                return Err(fault.into());
            }
            // It is reached by messages to its owner, which no replay makes.
            if accessed.is_some_and(|memory| is_exposed(memory.offset)) {
                return Err(RmaError::Unreachable(descriptor.rank).into());
            }
        }
        let State { patterns, shape, eager, config, .. } = &mut *self.state;
        let id =
            patterns.insert(descriptors, *shape, *eager as u64, config.pattern_slots, Keep::new(keep))?;
        if let Err(error) = self.check_credit(id) {
            self.unregister_pattern(id);
            return Err(error);
        }
        tracing::debug!(me = %self.state.me, %id, descriptors = self.recorded(id).len(), "pattern recorded");
        Ok(id)
    }

    /// Has the replays of a section wait for none of another that waits for credit: there is no order between them and others.
    pub fn stand_apart(&mut self, id: PatternId) {
        self.state.patterns.stand_apart(id);
    }

    /// Frees a section, once no replay points into it any more.
    pub fn unregister_pattern(&mut self, id: PatternId) {
        tracing::debug!(me = %self.state.me, %id, "pattern unregistered");
        self.state.patterns.unregister(id);
    }

    /// The recorded descriptors of a section, in the order of injection; message info lies in the slots behind its send.
    #[must_use]
    pub fn recorded(&self, id: PatternId) -> &[Descriptor] {
        match self.state.patterns.section(id) {
            Some(section) => &self.state.patterns.buffer[section.start..section.start + section.len],
            None => &[],
        }
    }

    /// Why a pattern is not there to be read, or replayed.
    #[must_use]
    pub fn why_unusable(&self, id: PatternId) -> PatternError {
        if self.state.closed { Fault::Shutdown.into() } else { self.state.patterns.unusable(id) }
    }

    /// The name of a registered protocol.
    #[must_use]
    pub fn protocol_name(&self, id: ProtocolId) -> Option<String> {
        self.state.registry.get(id).map(|protocol| protocol.name().to_owned())
    }

    /// Slots of the buffer of recorded descriptors that are in use, and how many there are.
    #[must_use]
    pub fn pattern_slots(&self) -> (usize, usize) {
        let (used, capacity) = self.state.patterns.usage();
        (used, capacity.max(self.state.config.pattern_slots))
    }
}
