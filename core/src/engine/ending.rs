//! How a peer ends, and how the engine itself does: whatever depends on them ends with an error.

use super::{Engine, State};
use crate::descriptor::Op;
use crate::error::Fault;
use crate::ids::{ContextId, Endpoint, Rank};
use crate::protocol::Protocol;
use std::sync::Arc;

impl Engine {
    /// Behind the end of the context: the protocols, which may lead back to it, for the caller to drop where nothing is held.
    #[must_use]
    pub(crate) fn retire(&mut self) -> Vec<Arc<dyn Protocol>> {
        if !self.state.closed || std::mem::replace(&mut self.retired, true) {
            return Vec::new();
        }
        let mut retired = std::mem::take(&mut self.handlers);
        retired.extend(self.state.registry.leave());
        retired
    }
}

impl State {
    /// All endpoints of a rank are gone: end what depends on them.
    pub(crate) fn peer_down(&mut self, rank: Rank, fault: Fault) {
        self.gates.close_for_good(rank);
        let mut news = false;
        let first = self.shape.index(Endpoint::new(rank, ContextId(0)));
        for index in first..first + self.shape.contexts as usize {
            if self.peer(index).fault.is_some() {
                continue;
            }
            news = true;
            self.peer(index).end(fault);
            self.interruptions += 1;
            tracing::debug!(me = %self.me, %rank, %fault, "peer down");
            self.drop_queue(index, fault);
            self.fail_parts(index, fault);
            if !matches!(fault, Fault::PeerClosed(_)) {
                self.drop_aside(index);
            }
        }
        // A peer that said goodbye is reported again by its device; it is counted and told once.
        if !news {
            return;
        }
        // What waits there for it is dropped.
        self.mark_fifos_busy();
        self.completer.fail(Some(rank), fault);
        self.stats.peers_lost += 1;
        for protocol in self.registry.snapshot() {
            super::caught("what a protocol does when a peer is gone", || protocol.on_peer_down(rank, fault));
        }
        self.report(fault);
    }

    /// Nothing that this incarnation of a rank, or an earlier one, has sent is taken in any more.
    pub(super) fn drained(&self, rank: Rank, incarnation: u32) {
        let context = self.me.context;
        for protocol in self.registry.snapshot() {
            let told = || protocol.on_peer_drained(context, rank, incarnation);
            super::caught("what a protocol does when all of a peer is taken in", told);
        }
    }

    /// Nothing more is sent by that rank than what the devices have; whether anything ever was.
    pub(super) fn ends(&mut self, rank: Rank) -> bool {
        let mut any = false;
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.endpoint.rank == rank) {
            any |= !std::mem::replace(&mut peer.ends, true);
        }
        any
    }

    pub(super) fn drop_queue(&mut self, index: usize, fault: Fault) {
        self.drop_over(index);
        self.drop_rendezvous(index, fault);
        if let Some(peer) = self.peers[index].as_mut() {
            peer.assembly = None;
        }
        self.drop_what_waits(index, fault);
    }

    /// What this side was to send. What the peer has asked for stays, and what it sends.
    pub(super) fn drop_what_waits(&mut self, index: usize, fault: Fault) {
        self.drop_parked(index, fault);
        self.drop_controls(index, fault);
        if let Some(peer) = self.peers[index].as_mut() {
            let front = peer.fifo.as_ref().and_then(|fifo| fifo.front());
            // Of a message the first packet is out.
            let streams =
                front.is_some_and(|front| front.op == Op::Jump || (front.op == Op::Send && front.offset > 0));
            peer.torn |= (peer.is_in_the_middle && streams) || peer.is_amid_rendezvous();
            (peer.is_in_the_middle, peer.stuck) = (false, false);
        }
        self.drop_own_rendezvous(index);
        let Some(peer) = self.peers[index].as_mut() else { return };
        let mut fifo = peer.fifo.take();
        if let Some(fifo) = &fifo {
            // The peer does not hear of these, and nothing of theirs is to go out as if it had.
            for out in peer.outgoing.iter_mut().filter(|out| out.announced > fifo.head()) {
                (out.declared, out.open, out.announced) = (false, false, 0);
            }
            peer.forget_ways();
        }
        let rank = peer.endpoint.rank;
        let queued = std::mem::take(&mut peer.queued_rma);
        self.gates.queued(rank, -(queued as i32));
        self.sweep_retired(rank);
        self.end_rows(index, fault);
        while let Some(descriptor) = fifo.as_mut().and_then(|fifo| fifo.pop()) {
            if descriptor.op == Op::Send {
                self.answer_left_queue(index, &descriptor);
            }
            self.finish_descriptor(&descriptor, Err(fault));
        }
    }

    pub(crate) fn shut_down(&mut self) {
        // The driver says it, too, as it ends.
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        self.interruptions += 1;
        for index in 0..self.peers.len() {
            if let Some(peer) = self.peers[index].as_mut() {
                peer.end(Fault::Shutdown);
                self.drop_queue(index, Fault::Shutdown);
            }
        }
        self.busy.clear();
        self.leaving.clear();
        self.cut_off.clear();
        self.drop_replays();
        self.fifos.clear();
        self.watches.look(true);
        self.completer.fail(None, Fault::Shutdown);
        for protocol in self.registry.snapshot() {
            super::caught("what a protocol does at the end", || protocol.on_close());
        }
    }

    pub(crate) fn report(&mut self, fault: Fault) {
        tracing::debug!(me = %self.me, %fault, "asynchronous error");
        if let Some(handler) = &self.errors {
            super::caught("the handler of errors", || handler(fault));
        }
    }
}
