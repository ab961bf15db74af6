//! Puts, gets and atomic operations that go through descriptors: memory that is not mapped, or something queued precedes.

use super::{Payload, Scope, State};
use crate::descriptor::{Descriptor, MAX_DESCRIPTOR_INLINE, Op, SourceKind};
use crate::device::{Sources, Stop};
use crate::error::{Fault, RmaError};
use crate::exposed::is_exposed;
use crate::ids::{Endpoint, Rank};
use crate::memory::WordOp;
use crate::slot::{Outcome, Ticket, Value};
use bytes::Bytes;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A put, a get or an atomic operation.
#[derive(Debug)]
pub enum Rma<'p> {
    /// Put these bytes.
    Put(Payload<'p>),
    /// Put from local shared memory: its key, the first byte and the number of bytes.
    PutFrom(usize, u64, u64),
    /// Get into local shared memory: its key, the first byte and the number of bytes.
    GetInto(usize, u64, u64),
    /// Get this many bytes as the operation's value.
    Get(u64),
    /// The same, in this memory if the device can and its capacity is enough; what it holds is of no account.
    GetGiven(Vec<u8>, u64),
    /// An atomic operation on the word at the offset, whose old value is not wanted.
    Update(WordOp),
    /// An atomic operation, with the word's old value as its own.
    Fetch(WordOp),
}

impl Scope<'_> {
    /// Starts a put, a get or an atomic operation at `offset` of the remote memory `remote` (a key of the source table).
    /// `None`: it is complete already, which is never said of [`Rma::Get`], [`Rma::GetGiven`] and [`Rma::Fetch`].
    ///
    /// # Errors
    /// If the target is unknown or gone, the access is out of range, or a word is not aligned; nothing was started then.
    pub fn rma(
        &mut self,
        target: Endpoint,
        remote: usize,
        offset: u64,
        operation: Rma<'_>,
    ) -> Result<Option<Ticket>, RmaError> {
        let size = self.state.shape.ranks;
        let index =
            self.state.index_of(target).map_err(|_| RmaError::UnknownRank { rank: target.rank, size })?;
        let len = match &operation {
            Rma::Put(payload) => payload.len() as u64,
            Rma::PutFrom(_, _, len) | Rma::GetInto(_, _, len) | Rma::Get(len) | Rma::GetGiven(_, len) => *len,
            Rma::Update(op) | Rma::Fetch(op) => op.len.bytes(),
        };
        let Some(memory) = self.state.table.remote.get(remote) else {
            return Err(RmaError::Unreachable(target.rank));
        };
        if offset.checked_add(len).is_none_or(|end| end > memory.len) {
            return Err(RmaError::OutOfRange { rank: target.rank, offset, count: len, len: memory.len });
        }
        if matches!(operation, Rma::Update(_) | Rma::Fetch(_))
            && !memory.offset.wrapping_add(offset).is_multiple_of(len)
        {
            return Err(RmaError::Misaligned { rank: target.rank, offset, len });
        }
        if let Some(fault) = self.state.stale(memory.rank, memory.incarnation) {
            return Err(fault.into());
        }
        let ticket = self.operation(Some(target.rank))?;
        let mut descriptor = Descriptor {
            op: Op::Put,
            rank: target.rank,
            context: target.context,
            region: remote as u32,
            offset,
            len,
            ticket: ticket.to_word(),
            ..Descriptor::default()
        };
        match operation {
            Rma::Put(payload) if len as usize <= MAX_DESCRIPTOR_INLINE => {
                descriptor.set_inline(payload.bytes_of())
            }
            Rma::Put(payload) => {
                let bytes = match payload {
                    Payload::Owned(bytes) => bytes,
                    other => Bytes::copy_from_slice(other.bytes_of()),
                };
                descriptor.source_kind = SourceKind::Held;
                descriptor.source = [self.state.table.held.insert(bytes) as u64, 0];
            }
            Rma::PutFrom(key, at, _) => {
                descriptor.source_kind = SourceKind::Region;
                descriptor.source = [key as u64, at];
            }
            Rma::GetInto(key, at, _) => {
                descriptor.op = Op::Get;
                descriptor.source_kind = SourceKind::Region;
                descriptor.source = [key as u64, at];
            }
            Rma::Get(_) => descriptor.op = Op::Get,
            Rma::GetGiven(mut memory, _) => {
                descriptor.op = Op::Get;
                let over_send = self.state.accesses_over_send(index, &descriptor);
                if self.state.routes.of(target.rank).held_gets && !over_send {
                    memory.clear();
                    descriptor.source_kind = SourceKind::Held;
                    descriptor.source = [self.state.table.held.insert(memory.into()) as u64, 0];
                }
            }
            Rma::Update(op) => descriptor.set_word_op(&op, false),
            Rma::Fetch(op) => descriptor.set_word_op(&op, true),
        }
        self.state.stats.one_sided += 1;
        if tracing::enabled!(tracing::Level::TRACE) {
            let (rank, op) = (self.state.me, descriptor.op);
            tracing::trace!(%rank, peer = %target, ?op, bytes = len, "access begun");
        }
        self.start(index, descriptor, ticket)
    }

    fn start(
        &mut self,
        index: usize,
        descriptor: Descriptor,
        ticket: Ticket,
    ) -> Result<Option<Ticket>, RmaError> {
        let over_send = self.state.accesses_over_send(index, &descriptor);
        self.state.peer(index).unflushed = true;
        if !over_send && self.state.peer(index).lets_past() {
            let sources = Sources::of(&self.state.table);
            let injected = self.inject.inject(std::slice::from_ref(&descriptor), &sources);
            match injected.stop {
                Stop::Done => {
                    self.state.drop_source(&descriptor);
                    if injected.complete {
                        self.state.completer.complete(ticket, Ok(Value::Unit));
                        self.state.slots.detach(ticket);
                        return Ok(None);
                    }
                    return Ok(Some(ticket));
                }
                Stop::Fault(fault) => {
                    self.state.drop_source(&descriptor);
                    self.state.completer.complete(ticket, Err(fault));
                    self.state.slots.detach(ticket);
                    return Err(fault.into());
                }
                Stop::Full => {}
            }
        }
        self.enqueue_access(index, &descriptor);
        if over_send {
            self.pump_peer(index);
        }
        Ok(Some(ticket))
    }
}

/// What is done in its turn; it ends with what this returns.
pub type Turn = Box<dyn FnOnce() -> Outcome + Send>;

impl Scope<'_> {
    /// Has an access to mapped memory of the target made behind everything that is queued for it, and before all that is begun
    /// later: for accesses that no one descriptor can tell of. The ticket ends with what it returns.
    ///
    /// # Errors
    /// If the target is unknown or gone; nothing was done then.
    pub fn in_turn(&mut self, target: Endpoint, turn: Turn) -> Result<Ticket, RmaError> {
        let size = self.state.shape.ranks;
        let unknown = |_| RmaError::UnknownRank { rank: target.rank, size };
        let index = self.state.index_of(target).map_err(unknown)?;
        let ticket = self.operation(Some(target.rank))?;
        self.state.stats.one_sided += 1;
        self.state.peer(index).unflushed = true;
        let key = self.state.turns.insert(turn);
        let descriptor = Descriptor {
            op: Op::Local,
            rank: target.rank,
            context: target.context,
            source: [key as u64, 0],
            ticket: ticket.to_word(),
            ..Descriptor::default()
        };
        if self.state.peer(index).lets_past() {
            let outcome = self.state.take_turn_of(&descriptor);
            self.state.completer.complete(ticket, outcome);
        } else {
            self.enqueue_access(index, &descriptor);
        }
        Ok(ticket)
    }

    /// Behind what waits for the peer; nothing inline overtakes it.
    fn enqueue_access(&mut self, index: usize, descriptor: &Descriptor) {
        self.state.stats.queued += 1;
        self.state.gates.queued(descriptor.rank, 1);
        let peer = self.state.peer(index);
        peer.queued_rma += 1;
        peer.push(descriptor, &[]);
        self.state.mark_busy(index);
    }
}

impl State {
    /// Does what was to wait for its turn.
    pub(super) fn take_turn_of(&mut self, descriptor: &Descriptor) -> Outcome {
        let missing = Err(Fault::NoSuchMemory(descriptor.rank));
        let Some(turn) = self.turns.try_remove(descriptor.source[0] as usize) else { return missing };
        catch_unwind(AssertUnwindSafe(turn)).unwrap_or_else(|_| {
            tracing::error!("an access that waited for its turn panicked");
            missing
        })
    }
}

impl Scope<'_> {
    /// Nothing is started any more on memory with these keys: they are given up, as soon as what of it waits in a queue is
    /// with the device.
    pub fn retire_remote(&mut self, keys: impl IntoIterator<Item = usize>) {
        for key in keys {
            if let Some(rank) = self.state.table.remote.get(key).map(|memory| memory.rank) {
                self.state.retired.push((rank, key));
                self.state.sweep_retired(rank);
            }
        }
    }
}

impl State {
    /// Gives up what was retired of a rank's memory, if nothing waits that may name it.
    pub(super) fn sweep_retired(&mut self, rank: Rank) {
        let index = self.shape.index(Endpoint::new(rank, self.me.context));
        if self.peers[index].as_ref().is_some_and(|peer| peer.queued_rma > 0) {
            return;
        }
        let State { retired, table, .. } = self;
        retired.retain(|(of, key)| {
            if *of == rank {
                table.remote.try_remove(*key);
            }
            *of != rank
        });
    }

    /// Whether a put, a get or an atomic operation is packets to that endpoint.
    pub(super) fn accesses_over_send(&self, index: usize, descriptor: &Descriptor) -> bool {
        let over_send = match descriptor.op {
            Op::Put | Op::Get => self.goes_over_send(index),
            Op::Atomic => self.has_no_atomics(index),
            Op::Send | Op::Jump | Op::Nop | Op::Local => return false,
        };
        over_send || self.aims_at_exposed(descriptor)
    }

    /// Whether what a descriptor says reaches the peer's memory past its lane, or may do so.
    pub(super) fn passes_lane(&self, index: usize, descriptor: &Descriptor) -> bool {
        match descriptor.op {
            Op::Put | Op::Get | Op::Atomic => !self.accesses_over_send(index, descriptor),
            Op::Jump => !self.jump_goes_over_send(descriptor),
            Op::Local => true,
            Op::Send | Op::Nop => false,
        }
    }

    /// Whether a put, a get or an atomic operation aims at memory that no device has.
    pub(super) fn aims_at_exposed(&self, descriptor: &Descriptor) -> bool {
        let memory = self.table.remote.get(descriptor.region as usize);
        memory.is_some_and(|memory| is_exposed(memory.offset))
    }

    /// Whether atomic operations on that endpoint's memory are carried out by the endpoint itself.
    pub(super) fn has_no_atomics(&self, index: usize) -> bool {
        self.goes_over_send(index) || !self.routes.of(self.shape.endpoint(index).rank).native_atomics
    }

    /// A put, a get, an atomic operation or a replay has left the peer's queue.
    pub(super) fn rma_left_queue(&mut self, index: usize) {
        let peer = self.peer(index);
        peer.queued_rma = peer.queued_rma.saturating_sub(1);
        let (rank, left) = (peer.endpoint.rank, peer.queued_rma);
        self.gates.queued(rank, -1);
        if left == 0 && !self.retired.is_empty() {
            self.sweep_retired(rank);
        }
    }
}
