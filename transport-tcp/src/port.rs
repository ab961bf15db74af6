//! One context's part of the device: its connections, both ways.

use crate::hub::{Hub, Progress, Settled};
use crate::rx::{End, RxLink};
use crate::tx::{Transit, Tx};
use crate::watch::{TELLS, Watch};
use posthaste_core::device::{Body, Inject, Injected, Packet, Sink, Sources, Verdict};
use posthaste_core::{ContextId, Descriptor, Endpoint, Fault, Loan, LossCause, Port, Rank};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

/// So many connections are read without asking first which of them has something.
const DIRECT_LINKS: usize = 2;

pub(crate) struct TcpPort {
    hub: Arc<Hub>,
    context: ContextId,
    watch: Watch,
    tx: Tx,
    links: Vec<Option<Box<RxLink>>>,
    /// Indices of the links that are open.
    open: Vec<usize>,
    /// Where the next round begins, so that nobody is always first.
    first: usize,
    spare: Vec<Vec<u8>>,
    local_held: bool,
    armed: bool,
}

impl TcpPort {
    pub fn new(hub: Arc<Hub>, context: ContextId, watch: Watch) -> TcpPort {
        let me = Endpoint::new(hub.me, context);
        let tx = Tx::new(hub.clone(), me);
        TcpPort {
            links: (0..hub.shape.endpoints()).map(|_| None).collect(),
            hub,
            context,
            watch,
            tx,
            open: Vec::new(),
            first: 0,
            spare: Vec::new(),
            local_held: false,
            armed: false,
        }
    }

    /// A connection is not used any more. That it is dropped ends it, and has it out of the watch, only where no process that was
    /// forked off holds it, too.
    fn end_link(&mut self, index: usize, link: RxLink) {
        if let Err(error) = self.watch.remove(&*link.stream, index as u64) {
            tracing::debug!(me = %self.hub.me, %error, "a connection was not watched");
        }
        end_stream(&link.stream);
    }

    /// Connections that were settled, and whether the device closes.
    #[cold]
    fn answer_door(&mut self) -> usize {
        let hub = self.hub.clone();
        let settled = hub.door(self.context).take();
        let count = settled.len();
        for Settled { peer, incarnation, stream, channel } in settled {
            let index = self.hub.shape.index(peer);
            if !self.hub.is_current(self.context, peer.rank, incarnation) {
                // It was settled with an incarnation that has died since.
                end_stream(&stream);
                continue;
            }
            if self.tx.is_dead(index) {
                // The engine has given the rank up since. The peer is to see that.
                let (fault, cause) = (Fault::PeerLost(peer.rank), LossCause::Unreachable);
                end_stream(&stream);
                self.hub.ended(self.context, peer, incarnation, fault, cause);
                continue;
            }
            if let Err(error) = self.watch.add(&*stream, index as u64) {
                tracing::warn!(%peer, %error, "a connection cannot be watched");
                end_stream(&stream);
                let (fault, cause) = (Fault::PeerLost(peer.rank), LossCause::Broken(error.kind()));
                self.hub.ended(self.context, peer, incarnation, fault, cause);
                continue;
            }
            tracing::debug!(me = %hub.me, %peer, "connected");
            self.links[index] = Some(Box::new(RxLink::new(stream.clone(), peer, incarnation, channel.rx)));
            self.open.push(index);
            self.tx.settle(index, stream, channel.tx);
        }
        count
    }

    /// Ranks that have left and of which nothing is on its way here, though it is to other contexts.
    #[cold]
    fn hear_of_departures(&mut self, sink: &mut dyn Sink) -> usize {
        let departed = self.hub.departed(self.context);
        for &(rank, incarnation) in &departed {
            for index in (0..self.links.len()).filter(|index| self.hub.shape.endpoint(*index).rank == rank) {
                // What waits for a connection that does not come to be.
                self.tx.kill(index, Fault::PeerClosed(rank));
            }
            sink.left(rank, incarnation);
        }
        departed.len()
    }

    /// Goes on with the end of its connections, and tells how far it is.
    #[cold]
    fn close(&mut self) {
        let mut progress = self.tx.close();
        // Whoever is on its way through the door is to hear that this rank leaves.
        if progress == Progress::Closed && self.hub.has_open(self.context) {
            progress = Progress::Out;
        }
        self.hub.port_is(self.context, progress);
    }

    /// Asks which connections have something.
    fn look(&mut self) {
        let TcpPort { watch, links, tx, .. } = self;
        loop {
            let more = watch.look(|found| {
                let index = found.key as usize;
                let Some(Some(link)) = links.get_mut(index) else { return };
                link.ended |= found.ended;
                // What is held is looked at again in any case, and not read on.
                link.ready |= found.readable && (!link.held || found.ended);
                if found.writable || found.ended {
                    tx.unblocked(index);
                }
            });
            if !more {
                return;
            }
        }
    }

    fn drain_local(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let mut taken = 0;
        // What arrives meanwhile waits, so that handlers which send to their own rank cannot keep it going.
        let waiting = self.tx.local.len().min(budget);
        self.local_held = false;
        while taken < waiting {
            let Some(transit) = self.tx.local.pop_front() else { break };
            let body = if transit.bytes.len() <= self.hub.limits.max_inline {
                Body::Short(&transit.bytes)
            } else {
                Body::Owned(&transit.bytes)
            };
            let Transit { protocol, kind, cookie, ref info, .. } = transit;
            let source = self.tx.me;
            let mut packet = Packet { source, protocol, kind, cookie, info: info.as_bytes(), body };
            if sink.packet(&mut self.tx, &mut packet) == Verdict::Hold {
                self.tx.local.push_front(transit);
                self.local_held = true;
                break;
            }
            self.tx.left_local(&transit);
            taken += 1;
        }
        taken
    }

    fn drain_link(&mut self, index: usize, budget: usize, sink: &mut dyn Sink) -> usize {
        let Some(mut link) = self.links[index].take() else { return 0 };
        // Nobody else is kept waiting.
        let patient = self.open.len() == 1;
        let (events, end) = link.drain(index, budget, patient, &mut self.tx, sink, &mut self.spare);
        let Some(end) = end else {
            // That there is more to read is an event, too: it was reported once and will not be again, so that nobody
            // may go, or stay, asleep.
            let more = usize::from(link.ready && events == 0);
            self.links[index] = Some(link);
            return events + more;
        };
        let incarnation = link.incarnation;
        let cause = link.broken.map_or(LossCause::Disconnected, LossCause::Broken);
        self.end_link(index, *link);
        self.open.retain(|&open| open != index);
        let peer = self.hub.shape.endpoint(index);
        let fault = match end {
            End::Fault(fault) => fault,
            End::Malformed(why) => {
                tracing::warn!(me = %self.hub.me, %peer, %why, "a peer broke the rules and is cut off");
                sink.corrupt(peer.rank);
                Fault::PeerCorrupt(peer.rank)
            }
        };
        tracing::debug!(me = %self.hub.me, %peer, %fault, "connection closed");
        self.tx.kill(index, fault);
        self.hub.ended(self.context, peer, incarnation, fault, cause);
        events + 1
    }

    fn drain_links(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let direct = self.open.len() <= DIRECT_LINKS
            && self.open.iter().all(|&index| self.links[index].as_ref().is_some_and(|link| !link.held));
        if !direct {
            self.look();
        }
        let mut events = 0;
        let links = self.open.len();
        let share = (budget / links.max(1)).max(8);
        self.first = if self.first + 1 < links { self.first + 1 } else { 0 };
        for at in 0..links {
            // The list may become shorter meanwhile; who is missed has its turn next time.
            let Some(&index) = self.open.get((self.first + at) % links) else { continue };
            let Some(link) = &self.links[index] else { continue };
            if direct || link.ready || link.held {
                if direct && self.tx.is_blocked(index) {
                    self.tx.unblocked(index);
                }
                events += self.drain_link(index, share, sink);
            }
        }
        events
    }
}

impl Inject for TcpPort {
    #[inline]
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        self.tx.inject(run, sources)
    }

    fn loan(&mut self, _len: usize) -> Option<Loan> {
        None
    }
}

impl Port for TcpPort {
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let mut events = 0;
        self.tx.advancing = true;
        self.tx.rung = false;
        if self.hub.door(self.context).is_knocked() {
            events += self.answer_door();
            events += self.hear_of_departures(sink);
        }
        if !self.tx.local.is_empty() {
            events += self.drain_local(budget, sink);
        }
        if !self.open.is_empty() {
            events += self.drain_links(budget, sink);
        }
        if self.hub.is_leaving() {
            self.close();
        }
        events += self.tx.flush_touched();
        if !self.tx.ended.is_empty() {
            for (ticket, outcome) in std::mem::take(&mut self.tx.ended) {
                sink.complete(ticket, outcome);
                events += 1;
            }
        }
        self.tx.advancing = false;
        events
    }

    fn arm(&mut self, waiting_for_room: bool) -> bool {
        let moved = self.tx.flush_touched();
        let local = !self.tx.local.is_empty() && !self.local_held;
        let room = waiting_for_room && (moved > 0 || self.tx.takes_again());
        if local || !self.tx.ended.is_empty() || room {
            return false;
        }
        if TELLS {
            self.look();
        }
        // Else what the last round has not come to the end of is ready; whatever has come since, the alarm is in time for.
        let ready = self.open.iter().any(|&index| self.links[index].as_ref().is_some_and(|link| link.ready));
        if ready || self.tx.could_write() {
            return false;
        }
        // A device that closes ends its connections step by step.
        let closing = self.hub.is_leaving() && self.tx.can_close_more();
        let bell = self.hub.door(self.context).bell.clone();
        if closing || bell.alarm().set().is_err() {
            return false;
        }
        self.armed = true;
        if self.hub.door(self.context).is_knocked() {
            self.disarm();
            return false;
        }
        true
    }

    fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.hub.door(self.context).bell.alarm().clear();
        }
    }

    fn has_packets_of(&self, rank: Rank) -> bool {
        let of_it = |link: &RxLink| link.ready && !link.held;
        self.open.iter().any(|&index| {
            self.hub.shape.endpoint(index).rank == rank && self.links[index].as_deref().is_some_and(of_it)
        })
    }

    fn peer_down(&mut self, rank: Rank) {
        if rank == self.hub.me {
            return;
        }
        self.hub.fence(self.context, rank);
        for index in 0..self.links.len() {
            if self.hub.shape.endpoint(index).rank == rank {
                let was_open = self.links[index].take();
                self.open.retain(|&open| open != index);
                self.tx.kill(index, Fault::PeerLost(rank));
                if let Some(link) = was_open {
                    let (peer, incarnation) = (self.hub.shape.endpoint(index), link.incarnation);
                    self.end_link(index, *link);
                    let (fault, cause) = (Fault::PeerLost(rank), LossCause::Disconnected);
                    self.hub.ended(self.context, peer, incarnation, fault, cause);
                }
            }
        }
    }

    fn cut_off(&mut self, rank: Rank) {
        for index in 0..self.links.len() {
            let peer = self.hub.shape.endpoint(index);
            if peer.rank == rank
                && let Some(link) = self.links[index].take()
            {
                let (fault, incarnation) = (Fault::PeerCorrupt(rank), link.incarnation);
                tracing::debug!(me = %self.hub.me, %peer, %fault, "connection closed");
                self.end_link(index, *link);
                self.open.retain(|&open| open != index);
                self.tx.kill(index, fault);
                self.hub.ended(self.context, peer, incarnation, fault, LossCause::Disconnected);
            }
        }
    }

    fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        for index in 0..self.links.len() {
            if self.hub.shape.endpoint(index).rank == rank {
                self.tx.forget(index);
            }
        }
        self.hub.admit(self.context, rank, incarnation);
    }
}

/// Ends a connection in both directions, whoever else holds it.
fn end_stream(stream: &TcpStream) {
    // One that is broken already needs no ending.
    let _ = stream.shutdown(Shutdown::Both);
}
