//! A rank that was started again: what was known of its earlier incarnations is forgotten, and what belongs to them stays
//! refused.
//!
//! ```text
//!   peer ── dies ──▶ fault: every operation ends ── started again ──▶ a new peer, of which nothing is known
//!                                                    │
//!                                                    └ memory, patterns, answers and credit of the old one: `StaleHandle`,
//!                                                      or dropped
//! ```
//! The gate of inline puts and gets stays closed: what was mapped was the old incarnation's.

use super::{Engine, Scope, State};
use crate::error::Fault;
use crate::ids::{ContextId, Endpoint, Rank};
use std::cmp::Ordering;

impl Engine {
    /// A device has said that the rank was started again.
    pub(super) fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        if self.state.closed || rank == self.state.me.rank || incarnation <= self.state.incarnation_of(rank) {
            return;
        }
        // The death itself may not have been seen yet; of a rank that this context never had to do with, nothing is lost.
        if self.state.knows_alive(rank) {
            self.peer_down(rank, Fault::PeerLost(rank));
        }
        self.port.peer_down(rank);
        self.port.peer_up(rank, incarnation);
        self.state.peer_up(rank, incarnation);
        // Of whichever incarnations there were since that this context was not told of, too.
        self.state.drained(rank, incarnation - 1);
        let registry = self.state.registry.clone();
        let mut scope = self.scope();
        for protocol in registry.snapshot() {
            let told = || protocol.on_peer_up(&mut scope, rank, incarnation);
            super::caught("what a protocol does when a rank is started again", told);
        }
    }
}

impl State {
    /// The latest incarnation of the rank that this context was told of; 0 of one that does not exist.
    pub(crate) fn incarnation_of(&self, rank: Rank) -> u32 {
        self.incarnations.get(rank.index()).copied().unwrap_or(0)
    }

    fn endpoints_of(&self, rank: Rank) -> std::ops::Range<usize> {
        let first = self.shape.index(Endpoint::new(rank, ContextId(0)));
        first..first + usize::from(self.shape.contexts)
    }

    fn knows_alive(&self, rank: Rank) -> bool {
        self.endpoints_of(rank)
            .any(|index| self.peers[index].as_ref().is_some_and(|peer| peer.fault.is_none()))
    }

    fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        let Some(known) = self.incarnations.get_mut(rank.index()) else { return };
        let held = std::mem::replace(known, incarnation);
        tracing::debug!(me = %self.me, %rank, incarnation, "a rank was started again");
        // Nobody may go on to write to, or read from, memory that was mapped.
        self.gates.close_for_good(rank);
        // Operations that wait for the rank without having to do with its endpoints.
        self.completer.fail(Some(rank), Fault::PeerLost(rank));
        let endpoints = self.endpoints_of(rank);
        self.busy.retain(|index| !endpoints.contains(index));
        self.aside.retain(|index| !endpoints.contains(index));
        // A goodbye is the earlier one's.
        self.leaving.retain(|leaving| *leaving != rank);
        self.cut_off.retain(|other| *other != rank);
        let over_send = self.needs_over_send(rank);
        for index in endpoints {
            // Its queue is empty: everything in it ended with the death.
            self.peers[index] = None;
            self.over_send[index] = over_send;
        }
        self.patterns.outlive(self.shape, rank, Fault::StaleHandle { rank, held, now: incarnation });
    }

    /// Why memory of an incarnation cannot be reached, if so.
    #[inline]
    pub(crate) fn stale(&self, rank: Rank, held: u32) -> Option<Fault> {
        let now = self.incarnation_of(rank);
        match held.cmp(&now) {
            Ordering::Equal => None,
            Ordering::Less => Some(Fault::StaleHandle { rank, held, now }),
            // Somebody was told of it earlier than this context.
            Ordering::Greater => Some(Fault::PeerLost(rank)),
        }
    }
}

impl Scope<'_> {
    /// Which incarnation of a rank this context talks to; 0 for the first one.
    #[must_use]
    pub fn incarnation_of(&self, rank: Rank) -> u32 {
        self.state.incarnation_of(rank)
    }
}
