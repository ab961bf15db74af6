//! The simulated device and its ports.

use super::SimFabric;
use super::net::{Access, Flying, Life, PairKey, Ration, Transit};
use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::descriptor::{Info, Op, SourceKind};
use posthaste_core::device::{
    Allocation, Body, Doorbell, Inject, Injected, Packet, PeerNews, Port, Sink, Source, Sources, Stop,
    Verdict,
};
use posthaste_core::memory::SharedSlice;
use posthaste_core::{
    Caps, ClientId, ContextId, Descriptor, Device, DeviceError, Endpoint, Fault, Loan, MemoryError, Rank,
    Ticket,
};
use std::sync::Arc;
use std::task::{Context, Poll};

/// The device of one client of one rank in a simulated world.
#[derive(Debug)]
pub struct SimDevice {
    fabric: Arc<SimFabric>,
    client: usize,
    rank: Rank,
    incarnation: u32,
    caps: Caps,
}

impl SimDevice {
    pub(super) fn new(fabric: Arc<SimFabric>, client: ClientId, rank: Rank) -> Self {
        let options = fabric.options;
        let mut caps = Caps::send_only("simulated", options.max_inline);
        caps.max_eager = options.max_eager;
        caps.fragment = options.fragment;
        caps.native_put = options.native;
        caps.native_get = options.native;
        caps.native_atomics = options.native;
        caps.cost = 1;
        let incarnation = fabric.net().incarnations[rank.index()];
        Self { fabric, client: client.index(), rank, incarnation, caps }
    }
}

/// Nobody sleeps in a simulated world.
#[derive(Debug)]
struct NoBell;

impl Doorbell for NoBell {
    fn poll_ring(&self, _cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }
}

#[async_trait]
impl Device for SimDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reaches(&self, rank: Rank) -> bool {
        rank.0 < self.fabric.shape.ranks
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        let me = Endpoint::new(self.rank, context);
        let index = self.fabric.index(self.rank, context);
        let known = vec![0; self.fabric.shape.ranks as usize];
        let (fabric, client, incarnation) = (self.fabric.clone(), self.client, self.incarnation);
        Ok(Box::new(SimPort { fabric, client, me, index, incarnation, known }))
    }

    fn doorbell(&self, _context: ContextId) -> Arc<dyn Doorbell> {
        Arc::new(NoBell)
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        self.fabric.arenas[self.client].allocate(self.rank, len)
    }

    fn free(&self, allocation: Allocation) {
        self.fabric.arenas[self.client].free(self.rank, &allocation);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        // A rank sees its own memory and nobody else's.
        if rank == self.rank { self.fabric.arenas[self.client].slice(rank, offset, len) } else { None }
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        self.fabric.net().watchers.insert((self.client, self.rank), news);
        Ok(())
    }

    async fn close(&self) {
        self.fabric.depart(self.client, self.rank, self.incarnation);
    }
}

struct SimPort {
    fabric: Arc<SimFabric>,
    client: usize,
    me: Endpoint,
    index: usize,
    incarnation: u32,
    /// Which incarnation of each rank this port talks to.
    known: Vec<u32>,
}

impl SimPort {
    fn key(&self, descriptor: &Descriptor) -> PairKey {
        (self.client, self.index, self.fabric.shape.index(descriptor.target()))
    }

    fn life(&self, rank: Rank) -> Life {
        self.fabric.net().lives[self.client][rank.index()]
    }

    /// Nothing that it does has any effect.
    fn is_dead(&self) -> bool {
        let net = self.fabric.net();
        let rank = self.me.rank.index();
        net.lives[self.client][rank] == Life::Dead || net.incarnations[rank] != self.incarnation
    }

    /// Whether a rank is still, or already, the one that this port talks to.
    fn knows(&self, rank: Rank) -> bool {
        rank == self.me.rank || self.fabric.net().incarnations[rank.index()] == self.known[rank.index()]
    }

    /// Whether the descriptor is complete; or why it was not taken.
    fn one(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        if descriptor.op == Op::Nop {
            return Ok(true);
        }
        if self.is_dead() {
            return Err(Stop::Fault(Fault::Shutdown));
        }
        if !self.knows(descriptor.rank) {
            return Err(Stop::Fault(Fault::PeerLost(descriptor.rank)));
        }
        if let Some(fault) = self.life(descriptor.rank).fault(descriptor.rank) {
            return Err(Stop::Fault(fault));
        }
        if self.fabric.net().random.chance(self.fabric.options.refuse) {
            return Err(Stop::Full);
        }
        match descriptor.op {
            Op::Send => self.send(descriptor, sources),
            Op::Put | Op::Get | Op::Atomic => self.access(descriptor, sources),
            Op::Nop | Op::Jump | Op::Local => panic!("a device never sees {descriptor:?}"),
        }
    }

    fn send(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        let options = self.fabric.options;
        assert!(descriptor.len <= options.max_eager as u64, "longer than max_eager: {descriptor:?}");
        let info = if descriptor.info_len == 0 { &[] } else { sources.info };
        assert_eq!(info.len(), usize::from(descriptor.info_len), "another info than the descriptor names");
        let mut net = self.fabric.net();
        let net = &mut *net;
        let due = net.due(options.delay);
        let ration = net.rations.get(&self.me.rank).copied().unwrap_or_default();
        let pair = net.pairs.entry(self.key(descriptor)).or_default();
        let lacks = match ration {
            Ration::Enough => false,
            Ration::NoPages => descriptor.len > options.max_inline as u64,
            Ration::NoLanes => descriptor.len > options.max_inline as u64 || !pair.open,
        };
        if lacks {
            return Err(Stop::Fault(Fault::OutOfMemory("the simulated rank has none")));
        }
        if pair.sends.len() + pair.arrived.len() >= options.lane_slots {
            return Err(Stop::Full);
        }
        let bytes = match sources.resolve(descriptor) {
            Some(Source::Private(bytes)) => Bytes::copy_from_slice(bytes),
            Some(Source::Shared(slice)) => Bytes::from(slice.to_vec()),
            other => panic!("no such source: {other:?} of {descriptor:?}"),
        };
        let Descriptor { protocol, kind, cookie, .. } = *descriptor;
        let packet = Transit { protocol, kind, cookie, info: Info::new(info).unwrap_or_default(), bytes };
        let Some(packet) = net.tampered(self.me.rank, packet) else { return Ok(true) };
        let pair = net.pairs.entry(self.key(descriptor)).or_default();
        pair.open = true;
        // The end of a send with a ticket says that the puts before it are done, too.
        let waits = descriptor.ticket != 0 && pair.open_accesses() > 0;
        let ticket = if waits { descriptor.ticket } else { 0 };
        pair.sends.push_back(Flying { packet, due, after: pair.injected, ticket });
        Ok(!waits)
    }

    fn access(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        let options = self.fabric.options;
        assert!(options.native, "a put or get for a device that offers none: {descriptor:?}");
        let memory =
            sources.table.remote.get(descriptor.region as usize).expect("the target memory is known");
        assert_eq!(memory.rank, descriptor.rank, "the memory of another rank: {descriptor:?}");
        let remote = self.fabric.arenas[self.client]
            .slice(memory.rank, memory.offset, memory.len)
            .and_then(|memory| memory.slice(descriptor.offset, descriptor.len));
        // The engine has checked it against what its owner said of that memory, who may have lied.
        let remote = remote.ok_or(Stop::Fault(Fault::NoSuchMemory(memory.rank)))?;
        let mut net = self.fabric.net();
        let due = net.due(options.delay);
        let pair = net.pairs.entry(self.key(descriptor)).or_default();
        if pair.open_accesses() >= options.lane_slots {
            return Err(Stop::Full);
        }
        let access = match (descriptor.op, descriptor.source_kind, sources.resolve(descriptor)) {
            (Op::Put, _, Some(Source::Private(bytes))) => Access::Put(Bytes::copy_from_slice(bytes), remote),
            (Op::Put, _, Some(Source::Shared(source))) => Access::PutFrom(source, remote),
            (Op::Get, _, Some(Source::Shared(local))) => Access::GetInto(local, remote),
            (Op::Get, SourceKind::Inline, _) => Access::Get(remote),
            (Op::Atomic, _, _) => {
                let (op, fetch) = descriptor.word_op().expect("it is an atomic operation");
                Access::Atomic(op, fetch, remote)
            }
            (_, _, source) => panic!("no such source: {source:?} of {descriptor:?}"),
        };
        pair.injected += 1;
        pair.accesses.push_back((due, descriptor.ticket, access));
        Ok(false)
    }

    fn offer(&mut self, source: usize, packet: &Transit, sink: &mut dyn Sink) -> Verdict {
        let body = if packet.bytes.len() <= self.fabric.options.max_inline {
            Body::Short(&packet.bytes)
        } else {
            Body::Owned(&packet.bytes)
        };
        let mut offered = Packet {
            source: self.fabric.shape.endpoint(source),
            protocol: packet.protocol,
            kind: packet.kind,
            cookie: packet.cookie,
            info: packet.info.as_bytes(),
            body,
        };
        sink.packet(self, &mut offered)
    }
}

impl Inject for SimPort {
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        let mut incomplete = vec![false; run.len()];
        let mut stop = Stop::Done;
        let mut taken = 0;
        for descriptor in run {
            match self.one(descriptor, sources) {
                Ok(complete) => incomplete[taken] = !complete,
                Err(why) => {
                    stop = why;
                    break;
                }
            }
            taken += 1;
        }
        let complete = !incomplete.contains(&true);
        if !complete {
            let mut net = self.fabric.net();
            for at in (0..taken).filter(|&at| !incomplete[at]) {
                if let Some(ticket) = Ticket::from_word(run[at].ticket) {
                    let ended = net.ended.entry((self.client, self.index)).or_default();
                    ended.push_back((ticket, Ok(posthaste_core::Value::Unit)));
                }
            }
        }
        Injected { taken, stop, complete }
    }

    fn loan(&mut self, _len: usize) -> Option<Loan> {
        None
    }
}

impl Port for SimPort {
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        if self.is_dead() {
            return 0;
        }
        let ended = self.fabric.net().ended.remove(&(self.client, self.index)).unwrap_or_default();
        let mut events = ended.len();
        for (ticket, outcome) in ended {
            sink.complete(ticket, outcome);
        }
        let (mut waiting, mut budget) = {
            let mut net = self.fabric.net();
            let here = |key: &PairKey| key.0 == self.client && key.2 == self.index;
            let waiting: Vec<(PairKey, usize)> = net
                .pairs
                .iter()
                .filter(|(key, _)| here(key))
                .map(|(key, pair)| (*key, pair.arrived.len()))
                .collect();
            // Seldom all that has arrived, so that what arrives meanwhile is mixed with it.
            (waiting, budget.min(1 + net.random.below(4)))
        };
        while budget > 0 && !waiting.is_empty() {
            let chosen = self.fabric.net().random.below(waiting.len());
            let (key, left) = waiting[chosen];
            let front = if left == 0 || !self.knows(self.fabric.rank_of(key.1)) {
                None
            } else {
                self.fabric.net().pairs.get_mut(&key).and_then(|pair| pair.arrived.front().cloned())
            };
            let Some(packet) = front else {
                waiting.swap_remove(chosen);
                continue;
            };
            waiting[chosen].1 -= 1;
            let verdict = self.offer(key.1, &packet, sink);
            let mut net = self.fabric.net();
            net.note(5 << 56 | (key.1 as u64) << 16 | key.2 as u64);
            let Some(pair) = net.pairs.get_mut(&key) else { continue };
            pair.held = verdict == Verdict::Hold;
            if pair.held {
                waiting.swap_remove(chosen);
            } else {
                pair.arrived.pop_front();
                events += 1;
                budget -= 1;
            }
        }
        events
    }

    fn arm(&mut self, _waiting_for_room: bool) -> bool {
        // Whoever sleeps in a simulated world is woken by the next step.
        false
    }

    fn disarm(&mut self) {}

    fn peer_down(&mut self, _rank: Rank) {}

    fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        self.known[rank.index()] = incarnation;
    }
}
