//! One context's part of the device.

use super::locked;
use super::net::{Inbox, Life, Net, Transit};
use crate::descriptor::{Descriptor, Info, Op, SourceKind};
use crate::device::{Body, Inject, Injected, Loan, Packet, Port, Sink, Source, Sources, Stop, Verdict};
use crate::error::Fault;
use crate::ids::{ContextId, Endpoint, Rank};
use crate::memory::SharedSlice;
use crate::slot::{Outcome, Ticket, Value};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The port of one context.
pub(super) struct InProcessPort {
    pub(super) net: Arc<Net>,
    pub(super) me: Endpoint,
    pub(super) index: usize,
    /// Which one of its rank.
    pub(super) incarnation: u32,
    /// Which incarnation of each rank this one talks to.
    pub(super) known: Box<[u32]>,
    /// Ends of operations that are reported at the next advance.
    pub(super) ended: VecDeque<(Ticket, Outcome)>,
    /// Departures that this rank was told of.
    pub(super) departures_told: u64,
    /// The lane at which the next sweep begins, so that no sender is always first.
    pub(super) next_lane: usize,
}

impl InProcessPort {
    pub(super) fn inbox(&self) -> &Inbox {
        &self.net.inboxes[self.index]
    }

    /// Nothing that it does has any effect.
    pub(super) fn is_dead(&self) -> bool {
        self.net.life(self.me.rank) == Life::Dead || self.net.incarnation(self.me.rank) != self.incarnation
    }

    /// `Ok(None)`: done, and reported later. `Err`: stopped.
    pub(super) fn one(
        &mut self,
        descriptor: &Descriptor,
        sources: &Sources<'_>,
    ) -> Result<Option<Outcome>, Stop> {
        if descriptor.op == Op::Nop {
            return Ok(Some(Ok(Value::Unit)));
        }
        if self.is_dead() {
            return Err(Stop::Fault(Fault::Shutdown));
        }
        let rank = descriptor.rank;
        if rank != self.me.rank && self.net.incarnation(rank) != self.known[rank.index()] {
            return Err(Stop::Fault(Fault::PeerLost(rank)));
        }
        if let Some(fault) = self.net.life(rank).fault(rank) {
            return Err(Stop::Fault(fault));
        }
        match descriptor.op {
            Op::Send => self.send(descriptor, sources).map(|()| Some(Ok(Value::Unit))),
            Op::Put => self.put(descriptor, sources).map(|()| Some(Ok(Value::Unit))),
            Op::Get => self.get(descriptor, sources),
            Op::Atomic => self.atomic(descriptor, sources),
            Op::Nop | Op::Jump | Op::Local => Err(Stop::Fault(defect(descriptor))),
        }
    }

    pub(super) fn send(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let target = self.net.shape.index(descriptor.target());
        let inbox = self.net.inboxes.get(target).ok_or_else(|| Stop::Fault(defect(descriptor)))?;
        let info = Info::new(if descriptor.info_len == 0 { &[] } else { sources.info });
        let (Some(source), Some(info)) = (sources.resolve(descriptor), info) else {
            return Err(Stop::Fault(defect(descriptor)));
        };
        let mut lanes = locked(&inbox.lanes);
        let lane = lanes.entry(self.index).or_default();
        if lane.packets.len() >= self.net.limits.packets_per_pair {
            lane.wanted = true;
            return Err(Stop::Full);
        }
        let bytes = match source {
            Source::Private(bytes) => Bytes::copy_from_slice(bytes),
            Source::Shared(slice) => Bytes::from(slice.to_vec()),
            Source::Loan(..) => return Err(Stop::Fault(defect(descriptor))),
        };
        let Descriptor { protocol, kind, cookie, .. } = *descriptor;
        let incarnation = self.incarnation;
        lane.packets.push_back(Transit { incarnation, protocol, kind, cookie, info, bytes });
        drop(lanes);
        inbox.ring_if_armed();
        Ok(())
    }

    pub(super) fn remote(&self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<SharedSlice, Stop> {
        let memory = sources.table.remote.get(descriptor.region as usize);
        memory
            .filter(|memory| descriptor.len <= memory.len && descriptor.offset <= memory.len - descriptor.len)
            .and_then(|memory| {
                let offset = memory.offset.checked_add(descriptor.offset)?;
                self.net.arena.slice(memory.rank, offset, descriptor.len)
            })
            .ok_or_else(|| Stop::Fault(defect(descriptor)))
    }

    pub(super) fn put(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let remote = self.remote(descriptor, sources)?;
        match sources.resolve(descriptor) {
            Some(Source::Private(bytes)) => remote.write(bytes),
            Some(Source::Shared(slice)) => remote.copy_from(slice),
            Some(Source::Loan(..)) | None => return Err(Stop::Fault(defect(descriptor))),
        }
        self.rouse(descriptor);
        Ok(())
    }

    /// Tasks of the target may wait for what was written there, in whichever context.
    fn rouse(&self, descriptor: &Descriptor) {
        for context in 0..self.net.shape.contexts {
            let target = Endpoint::new(descriptor.rank, ContextId(context));
            if let Some(inbox) = self.net.inboxes.get(self.net.shape.index(target)) {
                inbox.rouse();
            }
        }
    }

    pub(super) fn get(
        &mut self,
        descriptor: &Descriptor,
        sources: &Sources<'_>,
    ) -> Result<Option<Outcome>, Stop> {
        let remote = self.remote(descriptor, sources)?;
        if descriptor.source_kind == SourceKind::Inline {
            // The bytes are the operation's value, which only a report can carry.
            if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
                self.ended.push_back((ticket, Ok(Value::copy(&remote.to_vec()))));
            }
            return Ok(None);
        }
        match sources.resolve(descriptor) {
            Some(Source::Shared(slice)) => {
                slice.copy_from(remote);
                Ok(Some(Ok(Value::Unit)))
            }
            _ => Err(Stop::Fault(defect(descriptor))),
        }
    }

    pub(super) fn atomic(
        &mut self,
        descriptor: &Descriptor,
        sources: &Sources<'_>,
    ) -> Result<Option<Outcome>, Stop> {
        let word = self.remote(descriptor, sources)?;
        let Some((op, fetch)) = descriptor.word_op() else { return Err(Stop::Fault(defect(descriptor))) };
        let Some(old) = word.apply(&op) else { return Err(Stop::Fault(defect(descriptor))) };
        self.rouse(descriptor);
        if !fetch {
            return Ok(Some(Ok(Value::Unit)));
        }
        if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
            self.ended.push_back((ticket, Ok(op.len.value(old))));
        }
        Ok(None)
    }

    /// Offers what lies in one lane. Returns the number of packets taken.
    pub(super) fn drain_lane(&mut self, source: usize, budget: usize, sink: &mut dyn Sink) -> usize {
        let mut taken = 0;
        while taken < budget {
            let known = self.talks_to(source);
            let front = {
                let mut lanes = locked(&self.inbox().lanes);
                let Some(lane) = lanes.get_mut(&source) else { return taken };
                lane.held = false;
                // What a later incarnation sends waits until its port knows of it.
                match lane.packets.front() {
                    Some(front) if front.incarnation <= known => lane.packets.pop_front(),
                    _ => None,
                }
            };
            let Some(front) = front else { return taken };
            if front.incarnation < known {
                continue;
            }
            if self.offer(source, &front, sink) == Verdict::Hold {
                let mut lanes = locked(&self.inbox().lanes);
                let lane = lanes.entry(source).or_default();
                lane.packets.push_front(front);
                lane.held = true;
                return taken;
            }
            taken += 1;
            self.made_room(source);
        }
        taken
    }

    /// The incarnation of an endpoint's rank.
    pub(super) fn talks_to(&self, source: usize) -> u32 {
        let rank = self.net.shape.endpoint(source).rank;
        if rank == self.me.rank { self.incarnation } else { self.known[rank.index()] }
    }

    pub(super) fn offer(&mut self, source: usize, transit: &Transit, sink: &mut dyn Sink) -> Verdict {
        let body = if transit.bytes.len() <= self.net.limits.max_inline {
            Body::Short(&transit.bytes)
        } else {
            Body::Owned(&transit.bytes)
        };
        let mut packet = Packet {
            source: self.net.shape.endpoint(source),
            protocol: transit.protocol,
            kind: transit.kind,
            cookie: transit.cookie,
            info: transit.info.as_bytes(),
            body,
        };
        sink.packet(self, &mut packet)
    }

    /// A packet has left a lane: its sender is told if it waits for that.
    pub(super) fn made_room(&self, source: usize) {
        let wanted =
            locked(&self.inbox().lanes).get_mut(&source).is_some_and(|lane| std::mem::take(&mut lane.wanted));
        if wanted {
            let sender = &self.net.inboxes[source];
            sender.room_made.store(true, Ordering::SeqCst);
            if sender.armed_for_room.load(Ordering::SeqCst) {
                sender.ring_if_armed();
            }
        }
    }

    pub(super) fn tell_departures(&mut self) -> usize {
        let seen = self.net.departures.load(Ordering::SeqCst);
        if seen == self.departures_told {
            return 0;
        }
        let (told, to_come) = self.net.tell(self.me.rank);
        if !to_come {
            self.departures_told = seen;
        }
        told
    }
}

/// A descriptor that no correct caller injects.
#[cold]
pub(super) fn defect(descriptor: &Descriptor) -> Fault {
    debug_assert!(false, "impossible descriptor: {descriptor:?}");
    Fault::PeerLost(descriptor.rank)
}

impl Inject for InProcessPort {
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        let reported = self.ended.len();
        let mut complete = true;
        let mut stop = Stop::Done;
        let mut taken = 0;
        for descriptor in run {
            match self.one(descriptor, sources) {
                Ok(outcome) => complete &= outcome.is_some(),
                Err(why) => {
                    stop = why;
                    break;
                }
            }
            taken += 1;
        }
        if !complete {
            // Nobody will take the others for complete now: each ticket has to be reported.
            for descriptor in &run[..taken] {
                if let Some(ticket) = Ticket::from_word(descriptor.ticket)
                    && !self.ended.iter().skip(reported).any(|(ended, _)| *ended == ticket)
                {
                    self.ended.push_back((ticket, Ok(Value::Unit)));
                }
            }
        }
        Injected { taken, stop, complete }
    }

    fn loan(&mut self, _len: usize) -> Option<Loan> {
        None
    }
}

impl Port for InProcessPort {
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        if self.is_dead() {
            return 0;
        }
        let mut events = 0;
        while let Some((ticket, outcome)) = self.ended.pop_front() {
            sink.complete(ticket, outcome);
            events += 1;
        }
        // Packets that arrive during the sweep wait for the next one, so that handlers which send to their own rank
        // cannot keep it going.
        let sources: Vec<(usize, usize)> =
            locked(&self.inbox().lanes).iter().map(|(&source, lane)| (source, lane.packets.len())).collect();
        let first = sources.partition_point(|&(source, _)| source < self.next_lane);
        for &(source, waiting) in sources[first..].iter().chain(&sources[..first]) {
            let room = budget.saturating_sub(events).min(waiting);
            events += self.drain_lane(source, room, sink);
            self.next_lane = source + 1;
            if events >= budget {
                break;
            }
        }
        events + self.tell_departures()
    }

    fn arm(&mut self, waiting_for_room: bool) -> bool {
        let net = self.net.clone();
        let inbox = &net.inboxes[self.index];
        // Each of these stores comes before the look at what it guards; senders do it the other way round.
        inbox.armed_for_room.store(waiting_for_room, Ordering::SeqCst);
        inbox.armed.store(true, Ordering::SeqCst);
        let room = inbox.room_made.swap(false, Ordering::SeqCst) && waiting_for_room;
        let departed = self.net.departures.load(Ordering::SeqCst) != self.departures_told;
        // A packet that is held waits for something that happens on this rank, which wakes the driver by itself.
        let arrived = locked(&inbox.lanes).values().any(|lane| !lane.held && !lane.packets.is_empty());
        if room || departed || arrived || !self.ended.is_empty() {
            self.disarm();
            return false;
        }
        true
    }

    fn disarm(&mut self) {
        self.inbox().armed.store(false, Ordering::SeqCst);
    }

    fn peer_down(&mut self, rank: Rank) {
        // Nobody waits for room in the lanes of a rank that is gone; what it sent is delivered still.
        for context in 0..self.net.shape.contexts {
            let source = self.net.shape.index(Endpoint::new(rank, ContextId(context)));
            if let Some(lane) = locked(&self.inbox().lanes).get_mut(&source) {
                lane.wanted = false;
            }
        }
    }

    fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        if let Some(known) = self.known.get_mut(rank.index()) {
            *known = incarnation;
        }
    }
}
