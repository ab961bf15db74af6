//! Several devices as one: which of them reaches which peer (D03), and their ports side by side.
//!
//! A job on one host has one device, and its engines hold that device's ports as they are. Where ranks are reached in
//! different ways, an engine's port holds all of their ports: it hands each run of descriptors to the port of its target's device,
//! and moves them all in turn. A handler that runs inside one of them sends through all of them.

use crate::caps::Caps;
use crate::descriptor::Descriptor;
use crate::device::{
    Allocation, Body, Device, Doorbell, Inject, Injected, Loan, Memory, Packet, PacketHead, Payloads, Port,
    Sink, Sources, Stop, Verdict,
};
use crate::error::{DeviceError, Fault, MemoryError};
use crate::ids::{ContextId, Endpoint, JobShape, ProtocolId, Rank};
use crate::memory::SharedSlice;
use crate::protocol::ArrivedWord;
use crate::slot::{Outcome, Ticket};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

/// Polls of the first device for one of each other, as long as those find nothing: a look at sockets costs a system
/// call, a look at memory does not.
const LOOKS_PER_TURN: u32 = 32;

/// The number of the device that leads to a rank.
#[inline]
fn way(by_rank: &[AtomicU8], rank: Rank) -> Option<usize> {
    by_rank.get(rank.index()).map(|way| usize::from(way.load(Ordering::Relaxed)))
}

/// Which device reaches each rank.
///
/// # Examples
/// ```
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::route::Routes;
/// use posthaste_core::{ClientId, JobShape, Rank};
///
/// let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
/// let routes = Routes::new(vec![fabric.device(ClientId(0), Rank(0))], 2)?;
/// assert_eq!(routes.device_for(Rank(1)).map(|device| device.caps().name), Some("in-process"));
/// assert!(routes.device_for(Rank(2)).is_none());
/// // A job with a rank that nothing reaches is refused.
/// assert!(Routes::new(Vec::new(), 2).is_err());
/// # Ok::<(), posthaste_core::DeviceError>(())
/// ```
#[derive(Clone)]
pub struct Routes {
    devices: Arc<[Arc<dyn Device>]>,
    by_rank: Arc<[AtomicU8]>,
}

/// Which device leads to each rank, by the devices' numbers.
pub(crate) struct Ways(Arc<[AtomicU8]>);

impl Ways {
    /// Whether the rank is reached through the device with that number.
    pub fn lead_through(&self, rank: Rank, device: usize) -> bool {
        way(&self.0, rank) == Some(device)
    }

    /// From now on the rank is reached through that device: it was started again, and the device has said so.
    pub fn turn(&self, rank: Rank, device: usize) {
        if let (Some(way), Ok(device)) = (self.0.get(rank.index()), u8::try_from(device)) {
            // What a port still has for the rank it refuses; nothing else depends on who sees this when.
            way.store(device, Ordering::Relaxed);
        }
    }
}

impl std::fmt::Debug for Routes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.devices.iter().map(|device| device.caps().name).collect();
        f.debug_struct("Routes").field("devices", &names).field("by_rank", &self.by_rank).finish()
    }
}

impl Routes {
    /// For each rank the device that reaches it at the lowest cost.
    ///
    /// # Errors
    /// If no device reaches a rank.
    pub fn new(devices: Vec<Arc<dyn Device>>, ranks: u32) -> Result<Routes, DeviceError> {
        let pick = |rank: u32| {
            let reaching = devices.iter().enumerate().filter(|(_, device)| device.reaches(Rank(rank)));
            let best = reaching.min_by_key(|(_, device)| device.caps().cost);
            let best = best.and_then(|(at, _)| u8::try_from(at).ok()).map(AtomicU8::new);
            best.ok_or_else(|| DeviceError::Mismatch {
                subject: "the devices",
                problem: format!("none of {} reaches rank {rank}", devices.len()),
            })
        };
        let by_rank = (0..ranks).map(pick).collect::<Result<_, _>>()?;
        Ok(Routes { devices: devices.into(), by_rank })
    }

    /// All devices.
    #[must_use]
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// The device that reaches the rank.
    #[must_use]
    pub fn device_for(&self, rank: Rank) -> Option<&Arc<dyn Device>> {
        self.devices.get(way(&self.by_rank, rank)?)
    }

    /// The ways alone, which keep no device alive.
    pub(crate) fn ways(&self) -> Ways {
        Ways(self.by_rank.clone())
    }

    /// What each rank can be reached with.
    #[must_use]
    pub fn caps(&self) -> RouteCaps {
        let each: Box<[Caps]> = self.devices.iter().map(|device| *device.caps()).collect();
        RouteCaps { common: common(&each), each, by_rank: self.by_rank.clone() }
    }

    /// The memory of all ranks, seen from `me`. It keeps no device alive: devices know whom to tell of their peers, and so
    /// the contexts.
    #[must_use]
    pub fn memory(&self, me: Rank) -> RouteMemory {
        let devices = self.devices.iter().map(Arc::downgrade).collect();
        RouteMemory { devices, by_rank: self.by_rank.clone(), me }
    }

    /// The port of one context: the device's own where there is one device.
    ///
    /// # Errors
    /// If a device cannot make its port.
    pub fn port(&self, context: ContextId, shape: JobShape) -> Result<Box<dyn Port>, DeviceError> {
        if let [device] = &self.devices[..] {
            return device.port(context);
        }
        let ports = self.devices.iter().map(|device| device.port(context)).collect::<Result<_, _>>()?;
        let lender = self.devices.iter().position(|device| device.caps().loans);
        let contexts = usize::from(shape.contexts);
        Ok(Box::new(RoutePort { ports, by_rank: self.by_rank.clone(), contexts, lender, turn: 0 }))
    }

    /// What the driver of that context sleeps on.
    #[must_use]
    pub fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
        if let [device] = &self.devices[..] {
            return device.doorbell(context);
        }
        Arc::new(RouteBell(self.devices.iter().map(|device| device.doorbell(context)).collect()))
    }
}

/// The memory that a client's devices reach.
pub struct RouteMemory {
    devices: Box<[Weak<dyn Device>]>,
    by_rank: Arc<[AtomicU8]>,
    me: Rank,
}

impl std::fmt::Debug for RouteMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RouteMemory").field("me", &self.me).finish_non_exhaustive()
    }
}

impl RouteMemory {
    fn of(&self, rank: Rank) -> Option<Arc<dyn Device>> {
        self.devices.get(way(&self.by_rank, rank)?)?.upgrade()
    }
}

impl Memory for RouteMemory {
    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        self.of(rank)?.map(rank, offset, len)
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        let gone = MemoryError::Segment { wanted: len, segment: 0 };
        self.of(self.me).ok_or(gone)?.allocate(len)
    }

    fn free(&self, allocation: Allocation) {
        // With its device, the memory is gone, too.
        if let Some(device) = self.of(self.me) {
            device.free(allocation);
        }
    }
}

/// What a client's devices can do, for each rank.
#[derive(Clone, Debug)]
pub struct RouteCaps {
    common: Caps,
    each: Box<[Caps]>,
    by_rank: Arc<[AtomicU8]>,
}

impl From<Caps> for RouteCaps {
    /// One device for all ranks.
    fn from(caps: Caps) -> Self {
        Self { common: caps, each: Box::new([caps]), by_rank: Arc::new([]) }
    }
}

impl RouteCaps {
    /// What can be done with every rank.
    #[inline]
    #[must_use]
    pub fn common(&self) -> &Caps {
        &self.common
    }

    /// What can be done with that rank.
    #[inline]
    #[must_use]
    pub fn of(&self, rank: Rank) -> &Caps {
        let at = way(&self.by_rank, rank).unwrap_or(0);
        self.each.get(at).unwrap_or(&self.common)
    }
}

fn common(each: &[Caps]) -> Caps {
    let Some((first, rest)) = each.split_first() else { return Caps::send_only("none", 0) };
    rest.iter().fold(*first, |all, caps| Caps {
        name: "several",
        max_inline: all.max_inline.min(caps.max_inline),
        max_eager: all.max_eager.min(caps.max_eager),
        fragment: all.fragment.min(caps.fragment),
        native_put: all.native_put && caps.native_put,
        native_get: all.native_get && caps.native_get,
        held_gets: all.held_gets && caps.held_gets,
        keeps: all.keeps.max(caps.keeps),
        native_atomics: all.native_atomics && caps.native_atomics,
        mappable: all.mappable && caps.mappable,
        loans: all.loans || caps.loans,
        ordered: all.ordered && caps.ordered,
        atomicity: all.atomicity.min(caps.atomicity),
        rendezvous: all.rendezvous.max(caps.rendezvous),
        tells_leave: all.tells_leave && caps.tells_leave,
        cost: all.cost.max(caps.cost),
    })
}

/// The ports of several devices as one.
struct RoutePort {
    ports: Vec<Box<dyn Port>>,
    by_rank: Arc<[AtomicU8]>,
    contexts: usize,
    /// Whose page memory is lent.
    lender: Option<usize>,
    turn: u32,
}

impl RoutePort {
    fn of(&mut self, rank: Rank) -> Option<&mut Box<dyn Port>> {
        let at = way(&self.by_rank, rank)?;
        self.ports.get_mut(at)
    }
}

/// What a run is told whose target no device reaches; a defect of the caller, which checks ranks.
fn unreachable(run: &[Descriptor]) -> Injected {
    let stop = run.first().map_or(Stop::Done, |first| Stop::Fault(Fault::PeerLost(first.rank)));
    Injected { taken: 0, stop, complete: false }
}

impl Inject for RoutePort {
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        // A run has one target.
        match run.first().and_then(|first| self.of(first.rank)) {
            Some(port) => port.inject(run, sources),
            None => unreachable(run),
        }
    }

    fn loan(&mut self, len: usize) -> Option<Loan> {
        let lender = self.lender?;
        self.ports.get_mut(lender)?.loan(len)
    }

    fn word(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: u64) -> bool {
        let rank = Rank((target / self.contexts) as u32);
        self.of(rank).is_some_and(|port| port.word(target, protocol, cookie, payload))
    }

    fn plain(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: &[u8]) -> bool {
        let rank = Rank((target / self.contexts) as u32);
        self.of(rank).is_some_and(|port| port.plain(target, protocol, cookie, payload))
    }

    fn multicast(&mut self, begins: bool) {
        for port in &mut self.ports {
            port.multicast(begins);
        }
    }
}

impl Port for RoutePort {
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let RoutePort { ports, by_rank, contexts, lender, .. } = self;
        let mut events = 0;
        for at in 0..ports.len() {
            let (before, rest) = ports.split_at_mut(at);
            let Some((port, after)) = rest.split_first_mut() else { break };
            let others = Others { before, after, at, by_rank, contexts: *contexts, lender: *lender };
            events += port.advance(budget, &mut RouteSink { sink, others });
        }
        events
    }

    fn glance(&mut self, looks: u32) -> bool {
        let turn = self.turn;
        self.turn = turn.wrapping_add(looks);
        let whole_turn = turn / LOOKS_PER_TURN != self.turn / LOOKS_PER_TURN;
        match self.ports.split_first_mut() {
            Some((first, rest)) => {
                first.glance(looks) || (whole_turn && rest.iter_mut().any(|port| port.glance(1)))
            }
            None => false,
        }
    }

    fn arm(&mut self, waiting_for_room: bool) -> bool {
        for at in 0..self.ports.len() {
            if !self.ports[at].arm(waiting_for_room) {
                for armed in &mut self.ports[..at] {
                    armed.disarm();
                }
                return false;
            }
        }
        true
    }

    fn settles_within(&self) -> Option<Duration> {
        self.ports.iter().filter_map(|port| port.settles_within()).min()
    }

    fn settle(&mut self) -> bool {
        let asleep = self.ports.iter_mut().all(|port| port.settle());
        if !asleep {
            self.disarm();
        }
        asleep
    }

    fn watch(&mut self, watching: bool) {
        for port in &mut self.ports {
            port.watch(watching);
        }
    }

    fn disarm(&mut self) {
        for port in &mut self.ports {
            port.disarm();
        }
    }

    fn has_packets_of(&self, rank: Rank) -> bool {
        self.ports.iter().any(|port| port.has_packets_of(rank))
    }

    fn peer_down(&mut self, rank: Rank) {
        for port in &mut self.ports {
            port.peer_down(rank);
        }
    }

    fn cut_off(&mut self, rank: Rank) {
        for port in &mut self.ports {
            port.cut_off(rank);
        }
    }

    fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        // Only the device that leads there now has said so.
        if let Some(port) = self.of(rank) {
            port.peer_up(rank, incarnation);
        }
    }

    fn leave(&mut self) {
        for port in &mut self.ports {
            port.leave();
        }
    }
}

/// The ports besides the one that is being moved.
struct Others<'a> {
    before: &'a mut [Box<dyn Port>],
    after: &'a mut [Box<dyn Port>],
    at: usize,
    by_rank: &'a [AtomicU8],
    contexts: usize,
    lender: Option<usize>,
}

impl Others<'_> {
    /// The port with that number; `None` for the one that is being moved.
    fn get(&mut self, at: usize) -> Option<&mut Box<dyn Port>> {
        if at < self.at { self.before.get_mut(at) } else { self.after.get_mut(at.checked_sub(self.at + 1)?) }
    }

    fn index_of(&self, rank: Rank) -> Option<usize> {
        way(self.by_rank, rank)
    }
}

/// Offers packets with a sending half that reaches all ranks.
struct RouteSink<'a> {
    sink: &'a mut dyn Sink,
    others: Others<'a>,
}

impl Sink for RouteSink<'_> {
    fn ends(&mut self, source: Endpoint) {
        self.sink.ends(source);
    }

    fn packet(&mut self, inject: &mut dyn Inject, packet: &mut Packet<'_>) -> Verdict {
        self.sink.packet(&mut RouteInject { inject, others: &mut self.others }, packet)
    }

    fn word(&mut self, inject: &mut dyn Inject, word: &mut ArrivedWord) -> Verdict {
        self.sink.word(&mut RouteInject { inject, others: &mut self.others }, word)
    }

    fn plain(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        cookie: u64,
        body: Body<'_>,
    ) -> Verdict {
        let mut inject = RouteInject { inject, others: &mut self.others };
        self.sink.plain(&mut inject, source, protocol, cookie, body)
    }

    fn words(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        payloads: &[u64],
    ) -> usize {
        let mut inject = RouteInject { inject, others: &mut self.others };
        self.sink.words(&mut inject, source, protocol, payloads)
    }

    fn batch(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        payloads: &mut dyn Payloads,
    ) {
        let mut inject = RouteInject { inject, others: &mut self.others };
        self.sink.batch(&mut inject, source, protocol, payloads);
    }

    fn place(&mut self, first: &PacketHead<'_>) -> Option<Vec<SharedSlice>> {
        self.sink.place(first)
    }

    fn placed(&mut self, inject: &mut dyn Inject, head: &PacketHead<'_>) {
        self.sink.placed(&mut RouteInject { inject, others: &mut self.others }, head);
    }

    fn complete(&mut self, ticket: Ticket, outcome: Outcome) {
        self.sink.complete(ticket, outcome);
    }

    fn corrupt(&mut self, rank: Rank) {
        self.sink.corrupt(rank);
    }

    fn left(&mut self, rank: Rank, incarnation: u32) {
        // What the others know of the rank says nothing about what is still on its way through the one that leads there.
        if self.others.index_of(rank) == Some(self.others.at) {
            self.sink.left(rank, incarnation);
        }
    }
}

/// The sending half of the port that is being moved, and the other ports.
struct RouteInject<'a, 'b> {
    inject: &'a mut dyn Inject,
    others: &'a mut Others<'b>,
}

impl RouteInject<'_, '_> {
    fn with<R>(&mut self, at: Option<usize>, run: impl FnOnce(&mut dyn Inject) -> R) -> Option<R> {
        let at = at?;
        if at == self.others.at {
            return Some(run(self.inject));
        }
        self.others.get(at).map(|port| run(&mut **port))
    }
}

impl Inject for RouteInject<'_, '_> {
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        let at = run.first().and_then(|first| self.others.index_of(first.rank));
        self.with(at, |inject| inject.inject(run, sources)).unwrap_or_else(|| unreachable(run))
    }

    fn loan(&mut self, len: usize) -> Option<Loan> {
        self.with(self.others.lender, |inject| inject.loan(len)).flatten()
    }

    fn word(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: u64) -> bool {
        let at = self.others.index_of(Rank((target / self.others.contexts) as u32));
        self.with(at, |inject| inject.word(target, protocol, cookie, payload)).unwrap_or(false)
    }

    fn plain(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: &[u8]) -> bool {
        let at = self.others.index_of(Rank((target / self.others.contexts) as u32));
        self.with(at, |inject| inject.plain(target, protocol, cookie, payload)).unwrap_or(false)
    }

    fn multicast(&mut self, begins: bool) {
        // Who lends pages is who can share them.
        self.with(self.others.lender, |inject| inject.multicast(begins));
    }
}

/// Ready when any of several bells was rung.
struct RouteBell(Vec<Arc<dyn Doorbell>>);

impl Doorbell for RouteBell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        // All are asked, so that each knows whom to wake.
        let mut ready = Poll::Pending;
        for bell in &self.0 {
            if let Poll::Ready(rung) = bell.poll_ring(cx) {
                ready = match ready {
                    Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                    _ => Poll::Ready(rung),
                };
            }
        }
        ready
    }
}
