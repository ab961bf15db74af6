//! Everything of a context that is not the device's.

use super::{
    EngineConfig, ErrorHandler, Gates, Payload, Turn, dispatch, fifos, pattern, peer, queue, rendezvous,
    watch,
};
use crate::caps::Caps;
use crate::control::Controls;
use crate::device::{Loan, Memory, SourceTable};
use crate::error::{Fault, SendError};
use crate::exposed::Exposed;
use crate::ids::{Endpoint, JobShape, Rank};
use crate::protocol::Registry;
use crate::route::RouteCaps;
use crate::slot::{Completer, SlotPool};
use crate::stats::Stats;
use crate::sync::Arc;
use crate::timer::TimerWheel;
use peer::Peer;
use slab::Slab;

/// Everything of a context that is not the device's.
pub struct State {
    pub(crate) me: Endpoint,
    pub(crate) shape: JobShape,
    /// What the devices of all ranks can do.
    pub(crate) caps: Caps,
    pub(crate) routes: RouteCaps,
    pub(crate) config: EngineConfig,
    /// By endpoint index: puts and gets go over sends.
    pub(crate) over_send: Box<[bool]>,
    pub(crate) peers: Vec<Option<Box<Peer>>>,
    /// By rank: the latest incarnation that this context was told of.
    pub(crate) incarnations: Box<[u32]>,
    /// Endpoint indices with something queued or owed.
    pub(crate) busy: Vec<usize>,
    /// Ranks that have said goodbye: [`LEAVING`](queue::LEAVING) is in `busy` then.
    pub(super) leaving: Vec<Rank>,
    /// Ranks that were cut off here, which their device has yet to hear.
    pub(super) cut_off: Vec<Rank>,
    pub(crate) registry: Arc<Registry>,
    /// Protocols that are known to be registered.
    pub(crate) known_protocols: u64,
    /// The client has declared that all its protocols are registered.
    pub(crate) ready: bool,
    /// Endpoint indices of those who wait for credit here.
    pub(crate) wanting: Vec<usize>,
    /// Endpoint indices with packets that were set aside, or with controls that are not registered.
    pub(crate) aside: Vec<usize>,
    /// The registry's version, that of the controls, and whether the client was ready, when those were last looked at.
    pub(crate) aside_seen: Option<(u64, u64, bool)>,
    pub(crate) controls: std::sync::Arc<Controls>,
    pub(crate) table: SourceTable,
    /// What this context's own loans are known by; 0 as long as it has lent nothing.
    pub(super) lender: usize,
    pub(crate) patterns: pattern::PatternStore,
    pub(crate) replaying: pattern::Replays,
    pub(super) fifos: fifos::Fifos,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) completer: Completer,
    pub(crate) timers: TimerWheel,
    /// How many of them were waited for when somebody looked last.
    pub(super) timers_wanted: usize,
    pub(crate) stats: Stats,
    pub(crate) gates: Arc<Gates>,
    pub(crate) memory: std::sync::Arc<dyn Memory>,
    /// Memory of this rank that no device has.
    pub(crate) exposed: std::sync::Arc<Exposed>,
    /// What waits in a queue for its turn.
    pub(super) turns: Slab<Turn>,
    pub(crate) landings: std::sync::Arc<rendezvous::Landings>,
    /// Until when landings were last seen in use, while a timer is set for that.
    pub(super) landings_seen: Option<u64>,
    /// A timer is set for what waits for memory.
    pub(super) waits_for_memory: bool,
    /// Entries of the table of remote memory that are given up once nothing that waits names them.
    pub(super) retired: Vec<(Rank, usize)>,
    /// Messages up to this length in bytes go in one packet.
    pub(crate) eager: usize,
    /// Room for what is read out of shared memory to go into a packet.
    pub(crate) scratch: Vec<u8>,
    /// Memory that tasks wait on.
    pub(super) watches: watch::Watches,
    pub(crate) closed: bool,
    /// It has said goodbye.
    pub(super) departed: bool,
    /// Something was left to be done before this side sleeps, or sleeps on, for which nobody rings.
    pub(super) restless: bool,
    /// How often handlers have started tasks, which may wait for the thread of whoever advances.
    pub(super) starts: u32,
    /// How often messages that went straight to their handler ceased to: a peer went down, one has messages set aside or too
    /// many answers waiting, or this side left. Who hands out several looks at this alone between them.
    pub(super) interruptions: u64,
    pub(super) straight: dispatch::Straight,
    pub(crate) errors: Option<ErrorHandler>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("me", &self.me).field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl State {
    /// Whether the page of a loan is this context's to send to that rank. One of another context, or of another device, is only
    /// a copy's source.
    #[inline]
    pub(super) fn lends(&self, loan: &Loan, to: Rank) -> bool {
        loan.lender() == self.lender && self.routes.of(to).loans
    }

    /// The payload, but for a loan that is not this context's to send to that rank: its bytes are copied.
    #[inline]
    pub(super) fn as_it_goes<'p>(&self, payload: Payload<'p>, to: Rank) -> Payload<'p> {
        match payload {
            Payload::Loan(loan) if !self.lends(&loan, to) => Payload::Owned(loan.memory().to_vec().into()),
            payload => payload,
        }
    }

    #[inline]
    pub(crate) fn index_of(&self, target: Endpoint) -> Result<usize, SendError> {
        if target.rank.0 >= self.shape.ranks || target.context.0 >= self.shape.contexts {
            return Err(self.unknown(target));
        }
        Ok(self.shape.index(target))
    }

    /// What there is not of an endpoint.
    #[cold]
    pub(crate) fn unknown(&self, target: Endpoint) -> SendError {
        let JobShape { ranks: size, contexts, .. } = self.shape;
        match target.rank.0 < size {
            true => SendError::UnknownContext { context: target.context, contexts },
            false => SendError::UnknownRank { rank: target.rank, size },
        }
    }

    #[inline]
    pub(crate) fn peer(&mut self, index: usize) -> &mut Peer {
        let (shape, incarnations) = (self.shape, &self.incarnations);
        self.peers[index].get_or_insert_with(|| {
            let endpoint = shape.endpoint(index);
            Box::new(Peer::new(endpoint, incarnations.get(endpoint.rank.index()).copied().unwrap_or(0)))
        })
    }

    /// Whether the peer broke the rules: nothing that it sends counts any more.
    pub(crate) fn is_cut_off(&self, index: usize) -> bool {
        let fault = self.peers.get(index).and_then(|peer| peer.as_ref()?.fault);
        matches!(fault, Some(Fault::PeerCorrupt(_)))
    }

    /// A context of the rank has said goodbye. The others may have sent something before they do, which lies in lanes of
    /// their own: that counts, too.
    pub(crate) fn leaves(&mut self, rank: Rank) {
        // It may say so for each context. What it says once it is gone, or over and over, counts for nothing.
        let gone = |peer: &peer::Peer| peer.endpoint.rank == rank && peer.fault.is_some();
        if self.leaving.contains(&rank) || self.peers.iter().flatten().any(|peer| gone(peer)) {
            return;
        }
        self.leaving.push(rank);
        self.busy.push(queue::LEAVING);
    }

    pub(crate) fn mark_busy(&mut self, index: usize) {
        let peer = self.peer(index);
        if !peer.busy {
            peer.busy = true;
            self.busy.push(index);
        }
    }
}
