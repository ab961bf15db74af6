//! The right to use the engine.

use super::{State, queue, rendezvous, send};
use crate::caps::Caps;
use crate::device::{Inject, SourceTable};
use crate::error::{Fault, SendError};
use crate::ids::{Endpoint, JobShape, ProtocolId, Rank};
use crate::slot::{Outcome, Ticket};
use crate::stats::Stats;
use crate::wire;

/// Timers that nobody waits for may be so many, however few are waited for.
const FEW_TIMERS: usize = 64;

/// The right to use the engine, for as long as one call: to send, to answer, to complete. Handlers get one.
pub struct Scope<'a> {
    pub(crate) inject: &'a mut dyn Inject,
    pub(crate) state: &'a mut State,
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Scope<'_> {
    /// This endpoint.
    #[must_use]
    pub fn me(&self) -> Endpoint {
        self.state.me
    }

    /// The job.
    #[must_use]
    pub fn shape(&self) -> JobShape {
        self.state.shape
    }

    /// What can be done with every rank.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.state.caps
    }

    /// What can be done with that rank.
    #[must_use]
    pub fn caps_of(&self, rank: Rank) -> &Caps {
        self.state.routes.of(rank)
    }

    /// Counters of this context.
    pub fn stats(&mut self) -> &mut Stats {
        &mut self.state.stats
    }

    /// The tables that descriptors point into.
    pub fn table(&mut self) -> &mut SourceTable {
        &mut self.state.table
    }

    /// Why a rank cannot be reached any more, if so.
    #[must_use]
    pub fn fault_of(&self, rank: Rank) -> Option<Fault> {
        if self.state.closed {
            return Some(Fault::Shutdown);
        }
        let index = self.state.index_of(Endpoint::new(rank, self.state.me.context)).ok()?;
        self.state.peers[index].as_ref().and_then(|peer| peer.fault)
    }

    /// All protocols that this client will have are registered: from now on unknown ones are refused.
    pub fn declare_ready(&mut self) {
        self.state.ready = true;
    }

    /// Borrows page memory of the device to be filled and sent without a copy.
    pub fn loan(&mut self, len: usize) -> Option<crate::device::Loan> {
        let loan = self.inject.loan(len)?;
        self.state.lender = loan.lender();
        Some(loan)
    }

    /// A slot for an operation of the caller's own; `peer`: whose loss ends it.
    ///
    /// # Errors
    /// If the context is closed or has said goodbye, the peer is gone, or all slots are in use.
    pub fn operation(&mut self, peer: Option<Rank>) -> Result<Ticket, Fault> {
        if let Some(fault) = peer.and_then(|rank| self.fault_of(rank)) {
            return Err(fault);
        }
        if self.state.closed || self.state.departed {
            return Err(Fault::Shutdown);
        }
        self.state.completer.alloc(peer).ok_or(Fault::OutOfMemory("all completion slots are in use"))
    }

    /// Ends an operation.
    pub fn complete(&mut self, ticket: Ticket, outcome: Outcome) -> bool {
        self.state.completer.complete(ticket, outcome)
    }

    /// Nobody waits for the ticket.
    pub fn detach(&mut self, ticket: Ticket) {
        self.state.slots.detach(ticket);
    }

    /// Notes that the ticket is that of a request in a protocol, so that its answer gives the credit back.
    pub fn note_request(&mut self, ticket: Ticket, protocol: ProtocolId, bytes: usize) {
        self.state.completer.set_note(ticket, send::request_note(protocol, bytes));
    }

    /// Sets a deadline, in milliseconds of the context's clock.
    ///
    /// Nobody tells of an operation that ends before its deadline: its timer stays for a while. When there are twice as many as
    /// operations waited for them the last time somebody looked, those that nobody waits for are taken out.
    pub fn deadline(&mut self, at: u64, ticket: Ticket) {
        let State { timers, timers_wanted, completer, .. } = &mut *self.state;
        timers.set(at, ticket);
        if timers.len() > 2 * (*timers_wanted).max(FEW_TIMERS) {
            let own = |ticket| matches!(ticket, rendezvous::LANDINGS | queue::MEMORY);
            timers.retain(|ticket| own(ticket) || completer.is_pending(ticket));
            *timers_wanted = timers.len();
        }
    }

    /// Timers that are set.
    #[doc(hidden)]
    #[must_use]
    pub fn timers(&self) -> usize {
        self.state.timers.len()
    }

    /// A protocol that was registered after the last look at the table.
    #[cold]
    pub(crate) fn outgoing_protocol(&mut self, id: ProtocolId) -> Result<(), SendError> {
        self.state.known_protocols = self.state.registry.version();
        if id.index() as u64 >= self.state.known_protocols {
            Err(SendError::Unregistered(id))
        } else {
            Ok(())
        }
    }

    /// A handler has spawned a task or woken one. A future that spins, and a driver that looks for more, lets the other tasks of
    /// its runtime have a turn soon: this one may be among them, and would else wait until the spin is over.
    pub fn started_task(&mut self) {
        self.state.starts = self.state.starts.wrapping_add(1);
    }

    /// A peer that breaks the rules is cut off. Its device hears that when it is not at work.
    #[cold]
    pub fn cut_off(&mut self, rank: Rank) {
        self.state.peer_down(rank, Fault::PeerCorrupt(rank));
        if !self.state.cut_off.contains(&rank) {
            self.state.cut_off.push(rank);
            self.state.busy.push(queue::LEAVING);
        }
    }

    #[inline(always)]
    pub(crate) fn wire_id(id: ProtocolId) -> ProtocolId {
        ProtocolId(wire::FIRST_USER + id.0)
    }
}
