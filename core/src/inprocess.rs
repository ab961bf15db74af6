//! The in-process device: all ranks of a job inside one process, for tests, solo jobs and documentation.
//!
//! It is made to be right and simple, not fast: one mutex per receiving endpoint guards its lanes.
//!
//! ```text
//!   rank 0, context 0 --lane--+
//!   rank 1, context 0 --lane--+--> Inbox of rank 2, context 0 --advance--> Sink
//!   rank 2, context 0 --lane--+        |
//!                                      +-- armed: senders ring the Bell
//! ```
//! Puts and gets act at once on one arena per client, whose memory is handed out by [`Heap`] and is never unmapped.
#![allow(unsafe_code)]

use crate::caps::Caps;
use crate::descriptor::{Descriptor, Info, Op, SourceKind};
use crate::device::{
    Allocation, Body, Device, Doorbell, Inject, Injected, Loan, Packet, PeerEvent, PeerNews, Port, Rouse,
    Sink, Source, Sources, Stop, Verdict,
};
use crate::error::{DeviceError, Fault, MemoryError};
use crate::heap::Heap;
use crate::ids::{ClientId, ContextId, Endpoint, JobShape, ProtocolId, Rank};
use crate::memory::SharedSlice;
use crate::slot::{Outcome, Ticket, Value};
use async_trait::async_trait;
use atomic_waker::AtomicWaker;
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};

/// The least that [`Limits::max_inline`] may be, in bytes: the messager's own records must fit into one packet.
pub const MIN_INLINE: usize = 80;

/// Sizes of an in-process device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Packets that one endpoint may have on their way to another.
    pub packets_per_pair: usize,
    /// Longest payload in bytes that is delivered as a short body; at least [`MIN_INLINE`].
    pub max_inline: usize,
    /// Longest payload in bytes of one packet; at least `max_inline`.
    pub max_eager: usize,
    /// Fragment length in bytes of streamed messages; 1 to `max_eager`.
    pub fragment: usize,
    /// Memory of each rank that peers can reach, in bytes.
    pub segment: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            packets_per_pair: 256,
            max_inline: 256,
            max_eager: 64 << 10,
            fragment: 64 << 10,
            segment: 16 << 20,
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks panics, so that poisoning carries no meaning.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Zeroed memory of all ranks of one client, mapped until the process ends.
///
/// Nothing is allocated before the first use; untouched pages cost no memory.
#[derive(Debug)]
pub struct Arena {
    memory: OnceLock<SharedSlice>,
    heaps: Box<[Mutex<Heap>]>,
    segment: u64,
}

impl Arena {
    /// For `ranks` ranks of `segment` bytes each, rounded down to pages.
    #[must_use]
    pub fn new(ranks: u32, segment: u64) -> Self {
        let heaps: Box<[_]> = (0..ranks).map(|_| Mutex::new(Heap::new(segment))).collect();
        let segment = heaps.first().map_or(0, |heap| locked(heap).size());
        Self { memory: OnceLock::new(), heaps, segment }
    }

    fn memory(&self) -> SharedSlice {
        *self.memory.get_or_init(|| {
            let len = self.segment as usize * self.heaps.len();
            let words: &'static mut [u64] = vec![0u64; len / 8].leak();
            // SAFETY: the memory is leaked, so it is valid until the process ends; `words` is not used again, so it is
            // reached through shared slices only.
            unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), len) }
        })
    }

    /// A range of a rank's memory; `None` if the rank has no such range.
    #[must_use]
    pub fn slice(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        if rank.index() >= self.heaps.len() {
            return None;
        }
        self.memory().slice(rank.index() as u64 * self.segment, self.segment)?.slice(offset, len)
    }

    /// Takes zeroed memory of a rank.
    ///
    /// # Errors
    /// If the rank's segment is used up.
    pub fn allocate(&self, rank: Rank, len: u64) -> Result<Allocation, MemoryError> {
        let full = MemoryError::Segment { wanted: len, segment: self.segment };
        let heap = self.heaps.get(rank.index()).ok_or_else(|| full.clone())?;
        let (offset, taken) = locked(heap).take(len).ok_or_else(|| full.clone())?;
        let memory = self.slice(rank, offset, taken).ok_or(full)?;
        // It may have been in use before.
        let zeros = [0; 4096];
        for at in (0..taken).step_by(zeros.len()) {
            if let Some(page) = memory.slice(at, (zeros.len() as u64).min(taken - at)) {
                page.write(&zeros[..page.len()]);
            }
        }
        Ok(Allocation { offset, len: taken })
    }

    /// Gives memory of a rank back.
    pub fn free(&self, rank: Rank, allocation: &Allocation) {
        if let Some(heap) = self.heaps.get(rank.index()) {
            locked(heap).give_back(allocation.offset, allocation.len);
        }
    }
}

/// What became of a rank, as the others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Alive,
    Left,
    Dead,
}

impl Life {
    fn from_word(word: u32) -> Life {
        match word {
            0 => Life::Alive,
            1 => Life::Left,
            _ => Life::Dead,
        }
    }

    fn fault(self, rank: Rank) -> Option<Fault> {
        match self {
            Life::Alive => None,
            Life::Left => Some(Fault::PeerClosed(rank)),
            Life::Dead => Some(Fault::PeerLost(rank)),
        }
    }
}

/// A packet on its way.
#[derive(Debug)]
struct Transit {
    /// The sender's.
    incarnation: u32,
    protocol: ProtocolId,
    kind: u8,
    cookie: u64,
    info: Info,
    bytes: Bytes,
}

/// What one endpoint has on its way to another.
#[derive(Debug, Default)]
struct Lane {
    packets: VecDeque<Transit>,
    /// The sender found the lane full and wants to know of room.
    wanted: bool,
    /// The front was offered and is held by the receiver.
    held: bool,
}

/// Where the packets for one endpoint arrive.
#[derive(Debug, Default)]
struct Inbox {
    lanes: Mutex<BTreeMap<usize, Lane>>,
    armed: AtomicBool,
    armed_for_room: AtomicBool,
    /// A receiver made room in a lane that this endpoint had found full.
    room_made: AtomicBool,
    bell: Arc<Bell>,
}

impl Inbox {
    fn ring_if_armed(&self) {
        // SeqCst pairs with the store in `arm`: either the sleeper sees what was done before, or it is seen armed. It
        // stays armed until it is disarmed, because a ring may be in vain.
        if self.armed.load(Ordering::SeqCst) {
            self.bell.ring();
        }
    }
}

/// A flag and the waker of the driver that sleeps on it.
#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
    sleeper: AtomicWaker,
}

impl Bell {
    fn ring(&self) {
        // Release pairs with the acquire of `poll_ring`.
        self.rung.store(true, Ordering::Release);
        self.sleeper.wake();
    }
}

impl Doorbell for Bell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.sleeper.register(cx.waker());
        if self.rung.swap(false, Ordering::Acquire) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

/// What all ranks of one client share.
struct Net {
    shape: JobShape,
    limits: Limits,
    arena: Arena,
    inboxes: Box<[Inbox]>,
    /// [`Life`] by rank.
    lives: Box<[AtomicU32]>,
    /// How often each rank was started again.
    incarnations: Box<[AtomicU32]>,
    /// Counts the ranks that died or left.
    departures: AtomicU64,
    /// By rank: whom to tell, and who was told of already.
    watchers: Box<[Mutex<Watcher>]>,
}

#[derive(Default)]
struct Watcher {
    news: Option<PeerNews>,
    told: Vec<Rank>,
}

impl Net {
    fn life(&self, rank: Rank) -> Life {
        self.lives.get(rank.index()).map_or(Life::Dead, |life| Life::from_word(life.load(Ordering::SeqCst)))
    }

    fn incarnation(&self, rank: Rank) -> u32 {
        self.incarnations.get(rank.index()).map_or(0, |incarnation| incarnation.load(Ordering::SeqCst))
    }

    fn restart(&self, rank: Rank) {
        for inbox in self.inboxes_of(rank) {
            locked(&inbox.lanes).clear();
            inbox.armed.store(false, Ordering::SeqCst);
        }
        let incarnation = self.incarnations[rank.index()].fetch_add(1, Ordering::SeqCst) + 1;
        self.lives[rank.index()].store(0, Ordering::SeqCst);
        *locked(&self.watchers[rank.index()]) = Watcher::default();
        for (to, watcher) in self.watchers.iter().enumerate().filter(|(to, _)| *to != rank.index()) {
            let news = {
                let mut watcher = locked(watcher);
                watcher.told.retain(|told| *told != rank);
                watcher.news.clone()
            };
            if let Some(news) = news {
                tracing::trace!(to, %rank, incarnation, "told of a restart");
                news(rank, PeerEvent::Up { incarnation });
            }
        }
    }

    fn depart(&self, rank: Rank, life: Life) {
        if let Some(word) = self.lives.get(rank.index()) {
            // What ended stays ended: a rank that left cannot crash any more.
            if word.compare_exchange(0, life as u32, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                self.departures.fetch_add(1, Ordering::SeqCst);
                for inbox in &self.inboxes {
                    inbox.ring_if_armed();
                }
            }
        }
    }

    fn inboxes_of(&self, rank: Rank) -> &[Inbox] {
        let contexts = usize::from(self.shape.contexts);
        &self.inboxes[rank.index() * contexts..(rank.index() + 1) * contexts]
    }

    /// Whether everything that `from` sent to `to` was delivered, but for what its receiver holds.
    fn is_drained(&self, from: Rank, to: Rank) -> bool {
        let contexts = usize::from(self.shape.contexts);
        let sources = from.index() * contexts..(from.index() + 1) * contexts;
        self.inboxes_of(to).iter().all(|inbox| {
            locked(&inbox.lanes).range(sources.clone()).all(|(_, lane)| lane.held || lane.packets.is_empty())
        })
    }

    /// Tells `to` of the ranks that are gone, once everything they sent was delivered. Returns how many were told of,
    /// and whether some are still to come.
    fn tell(&self, to: Rank) -> (usize, bool) {
        let mut told = 0;
        let mut to_come = false;
        for number in 0..self.shape.ranks {
            let rank = Rank(number);
            let incarnation = self.incarnation(rank);
            let Some(fault) = self.life(rank).fault(rank) else { continue };
            if rank == to {
                continue;
            }
            let drained = self.is_drained(rank, to);
            let news = {
                let mut watcher = locked(&self.watchers[to.index()]);
                if watcher.told.contains(&rank) {
                    continue;
                }
                match watcher.news.clone() {
                    Some(news) if drained => {
                        watcher.told.push(rank);
                        news
                    }
                    _ => {
                        to_come = true;
                        continue;
                    }
                }
            };
            news(rank, PeerEvent::Down { fault, incarnation });
            told += 1;
        }
        (told, to_come)
    }
}

/// All ranks of a job inside this process; makes their devices.
pub struct Fabric {
    nets: Vec<Arc<Net>>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric").field("clients", &self.nets.len()).finish_non_exhaustive()
    }
}

/// Makes fabrics.
///
/// ```
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::{ClientId, JobShape, Rank};
///
/// let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
/// let device = fabric.device(ClientId(0), Rank(1));
/// assert!(device.reaches(Rank(0)));
/// ```
#[derive(Debug)]
pub struct InProcessFabric;

impl InProcessFabric {
    /// A fabric of the usual sizes.
    #[allow(clippy::new_ret_no_self, reason = "a fabric is shared by the devices it makes")]
    #[must_use]
    pub fn new(shape: JobShape) -> Arc<Fabric> {
        Self::with_limits(shape, Limits::default())
    }

    /// A fabric of these sizes; what is out of range is brought into range.
    #[must_use]
    pub fn with_limits(shape: JobShape, limits: Limits) -> Arc<Fabric> {
        let max_inline = limits.max_inline.max(MIN_INLINE);
        let max_eager = limits.max_eager.max(max_inline);
        let limits = Limits {
            packets_per_pair: limits.packets_per_pair.max(1),
            max_inline,
            max_eager,
            fragment: limits.fragment.clamp(1, max_eager),
            ..limits
        };
        let net = || {
            Arc::new(Net {
                shape,
                limits,
                arena: Arena::new(shape.ranks, limits.segment),
                inboxes: (0..shape.endpoints()).map(|_| Inbox::default()).collect(),
                lives: (0..shape.ranks).map(|_| AtomicU32::new(0)).collect(),
                incarnations: (0..shape.ranks).map(|_| AtomicU32::new(0)).collect(),
                departures: AtomicU64::new(0),
                watchers: (0..shape.ranks).map(|_| Mutex::default()).collect(),
            })
        };
        Arc::new(Fabric { nets: (0..shape.clients).map(|_| net()).collect() })
    }
}

impl Fabric {
    /// The device of one client of one rank.
    ///
    /// # Panics
    /// If the job has no such client or rank.
    #[must_use]
    pub fn device(&self, client: ClientId, rank: Rank) -> Arc<dyn Device> {
        let net = self.nets[client.index()].clone();
        assert!(
            rank.0 < net.shape.ranks,
            "rank {rank} does not exist: the job has {} ranks",
            net.shape.ranks
        );
        let limits = net.limits;
        let caps = Caps {
            max_eager: limits.max_eager,
            fragment: limits.fragment,
            native_put: true,
            native_get: true,
            native_atomics: true,
            mappable: true,
            cost: 1,
            ..Caps::send_only("in-process", limits.max_inline)
        };
        let incarnation = net.incarnation(rank);
        Arc::new(InProcessDevice { net, rank, incarnation, caps })
    }

    /// Simulates a crash of the rank, all clients of it: what it sent before is still delivered, then the others are
    /// told that it is lost. Nothing that the rank does from now on has any effect.
    pub fn kill(&self, rank: Rank) {
        for net in &self.nets {
            net.depart(rank, Life::Dead);
        }
    }

    /// Simulates that a rank which was killed is started again: the others are told, and devices made from now on are those
    /// of its next incarnation. What is still on its way to or from the old one goes nowhere.
    pub fn restart(&self, rank: Rank) {
        for net in &self.nets {
            net.restart(rank);
        }
    }
}

/// The device of one client of one rank; see [`Fabric::device`].
pub struct InProcessDevice {
    net: Arc<Net>,
    rank: Rank,
    incarnation: u32,
    caps: Caps,
}

impl std::fmt::Debug for InProcessDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcessDevice").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[async_trait]
impl Device for InProcessDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reaches(&self, rank: Rank) -> bool {
        rank.0 < self.net.shape.ranks
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        if context.0 >= self.net.shape.contexts {
            let problem = format!("{context} does not exist: the job has {}", self.net.shape.contexts);
            return Err(DeviceError::Mismatch { subject: "in-process device", problem });
        }
        Ok(Box::new(InProcessPort {
            net: self.net.clone(),
            me: Endpoint::new(self.rank, context),
            index: self.net.shape.index(Endpoint::new(self.rank, context)),
            incarnation: self.incarnation,
            known: vec![0; self.net.shape.ranks as usize].into(),
            ended: VecDeque::new(),
            departures_told: 0,
            next_lane: 0,
        }))
    }

    fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
        self.net.inboxes[self.net.shape.index(Endpoint::new(self.rank, context))].bell.clone()
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        self.net.arena.allocate(self.rank, len)
    }

    fn free(&self, allocation: Allocation) {
        self.net.arena.free(self.rank, &allocation);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        self.net.arena.slice(rank, offset, len)
    }

    fn rouser(&self, target: Endpoint) -> Option<Arc<dyn Rouse>> {
        let index = self.net.shape.index(target);
        (index < self.net.inboxes.len())
            .then(|| Arc::new(InProcessRouser { net: self.net.clone(), index }) as _)
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        locked(&self.net.watchers[self.rank.index()]).news = Some(news.clone());
        for rank in (0..self.net.shape.ranks).map(Rank).filter(|rank| *rank != self.rank) {
            let incarnation = self.net.incarnation(rank);
            if incarnation > 0 {
                news(rank, PeerEvent::Up { incarnation });
            }
        }
        Ok(())
    }

    async fn close(&self) {
        if self.net.incarnation(self.rank) == self.incarnation {
            self.net.depart(self.rank, Life::Left);
        }
    }
}

/// Rouses one endpoint.
struct InProcessRouser {
    net: Arc<Net>,
    index: usize,
}

impl Rouse for InProcessRouser {
    fn rouse(&self) {
        self.net.inboxes[self.index].ring_if_armed();
    }
}

/// The port of one context.
struct InProcessPort {
    net: Arc<Net>,
    me: Endpoint,
    index: usize,
    /// Which one of its rank.
    incarnation: u32,
    /// Which incarnation of each rank this one talks to.
    known: Box<[u32]>,
    /// Ends of operations that are reported at the next advance.
    ended: VecDeque<(Ticket, Outcome)>,
    /// Departures that this rank was told of.
    departures_told: u64,
    /// The lane at which the next sweep begins, so that no sender is always first.
    next_lane: usize,
}

impl InProcessPort {
    fn inbox(&self) -> &Inbox {
        &self.net.inboxes[self.index]
    }

    /// Nothing that it does has any effect.
    fn is_dead(&self) -> bool {
        self.net.life(self.me.rank) == Life::Dead || self.net.incarnation(self.me.rank) != self.incarnation
    }

    /// `Ok(None)`: done, and reported later. `Err`: stopped.
    fn one(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<Option<Outcome>, Stop> {
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
            Op::Nop | Op::Jump => Err(Stop::Fault(defect(descriptor))),
        }
    }

    fn send(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
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

    fn remote(&self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<SharedSlice, Stop> {
        let memory = sources.table.remote.get(descriptor.region as usize);
        memory
            .filter(|memory| descriptor.len <= memory.len && descriptor.offset <= memory.len - descriptor.len)
            .and_then(|memory| {
                let offset = memory.offset.checked_add(descriptor.offset)?;
                self.net.arena.slice(memory.rank, offset, descriptor.len)
            })
            .ok_or_else(|| Stop::Fault(defect(descriptor)))
    }

    fn put(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let remote = self.remote(descriptor, sources)?;
        match sources.resolve(descriptor) {
            Some(Source::Private(bytes)) => remote.write(bytes),
            Some(Source::Shared(slice)) => remote.copy_from(slice),
            Some(Source::Loan(..)) | None => return Err(Stop::Fault(defect(descriptor))),
        }
        Ok(())
    }

    fn get(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<Option<Outcome>, Stop> {
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

    fn atomic(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<Option<Outcome>, Stop> {
        let word = self.remote(descriptor, sources)?;
        let Some((op, fetch)) = descriptor.word_op() else { return Err(Stop::Fault(defect(descriptor))) };
        let Some(old) = word.apply(&op) else { return Err(Stop::Fault(defect(descriptor))) };
        if let Some(inbox) = self.net.inboxes.get(self.net.shape.index(descriptor.target())) {
            inbox.ring_if_armed();
        }
        if !fetch {
            return Ok(Some(Ok(Value::Unit)));
        }
        if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
            self.ended.push_back((ticket, Ok(op.len.value(old))));
        }
        Ok(None)
    }

    /// Offers what lies in one lane. Returns the number of packets taken.
    fn drain_lane(&mut self, source: usize, budget: usize, sink: &mut dyn Sink) -> usize {
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
    fn talks_to(&self, source: usize) -> u32 {
        let rank = self.net.shape.endpoint(source).rank;
        if rank == self.me.rank { self.incarnation } else { self.known[rank.index()] }
    }

    fn offer(&mut self, source: usize, transit: &Transit, sink: &mut dyn Sink) -> Verdict {
        let body = if transit.bytes.len() <= self.net.limits.max_inline {
            Body::Short(&transit.bytes)
        } else {
            Body::Owned(transit.bytes.clone())
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
    fn made_room(&self, source: usize) {
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

    fn tell_departures(&mut self) -> usize {
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
fn defect(descriptor: &Descriptor) -> Fault {
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

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_as_zero_and_ranks_do_not_share_it() {
        let arena = Arena::new(2, 16 << 10);
        let first = arena.allocate(Rank(0), 5000).expect("room");
        assert_eq!(first.len, 8192);
        let memory = arena.slice(Rank(0), first.offset, first.len).expect("inside");
        memory.write(&[7; 8192]);
        let other = arena.slice(Rank(1), 0, 16 << 10).expect("inside");
        assert_eq!(other.sum_words(), 0);
        arena.free(Rank(0), &first);
        let again = arena.allocate(Rank(0), 100).expect("room");
        assert_eq!(again.offset, first.offset);
        assert_eq!(arena.slice(Rank(0), again.offset, again.len).expect("inside").sum_words(), 0);
        let error = arena.allocate(Rank(0), 1 << 20).expect_err("too much");
        assert_eq!(error, MemoryError::Segment { wanted: 1 << 20, segment: 16 << 10 });
        assert!(arena.slice(Rank(0), 16 << 10, 1).is_none() && arena.slice(Rank(2), 0, 1).is_none());
    }

    #[test]
    fn a_port_rings_only_while_it_is_armed_and_stays_awake_for_what_came_before() {
        let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
        let devices = [0, 1].map(|rank| fabric.device(ClientId(0), Rank(rank)));
        let mut ports = devices.each_ref().map(|device| device.port(ContextId(0)).expect("a port"));
        let bell = devices[1].doorbell(ContextId(0));
        let rung = || bell.poll_ring(&mut Context::from_waker(std::task::Waker::noop())).is_ready();
        let send = Descriptor { op: Op::Send, rank: Rank(1), ..Descriptor::default() };
        let table = crate::device::SourceTable::default();
        let sources = Sources { info: &[], borrowed: &[], table: &table };
        let [sender, receiver] = &mut ports;
        assert_eq!(sender.inject(&[send], &sources).stop, Stop::Done);
        assert!(!rung(), "nobody sleeps");
        assert!(!receiver.arm(false), "something has come in");
        let mut seen = Seen { packets: 0, verdict: Verdict::Hold };
        assert_eq!(receiver.advance(10, &mut seen), 0);
        assert_eq!(seen.packets, 1);
        assert!(receiver.arm(false), "what is held does not keep it awake");
        seen.verdict = Verdict::Taken;
        assert_eq!(receiver.advance(10, &mut seen), 1);
        assert_eq!(sender.inject(&[send, send], &sources).taken, 2);
        assert!(rung() && !rung(), "once is enough");
        assert_eq!(sender.inject(&[send], &sources).taken, 1);
        assert!(rung(), "a ring in vain does not disarm");
        receiver.disarm();
        assert_eq!(receiver.advance(10, &mut seen), 3);
        fabric.kill(Rank(0));
        assert!(!receiver.arm(false), "a death keeps it awake until it is told");
        assert_eq!(
            sender.inject(&[send], &sources).stop,
            Stop::Fault(Fault::Shutdown),
            "the dead do not send"
        );
    }

    #[test]
    fn a_death_is_told_after_what_the_dead_had_sent() {
        use futures::FutureExt;
        let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
        let devices = [0, 1].map(|rank| fabric.device(ClientId(0), Rank(rank)));
        let mut ports = devices.each_ref().map(|device| device.port(ContextId(0)).expect("a port"));
        let told = Arc::new(Mutex::new(Vec::new()));
        let errors = told.clone();
        let opened = devices[1].open(Arc::new(move |rank, fault| locked(&errors).push((rank, fault))));
        opened.now_or_never().expect("at once").expect("it opens");
        let send = Descriptor { op: Op::Send, rank: Rank(1), ..Descriptor::default() };
        let table = crate::device::SourceTable::default();
        let sources = Sources { info: &[], borrowed: &[], table: &table };
        assert_eq!(ports[0].inject(&[send, send], &sources).taken, 2);
        fabric.kill(Rank(0));
        let mut seen = Seen { packets: 0, verdict: Verdict::Taken };
        assert_eq!(ports[1].advance(1, &mut seen), 1);
        assert!(locked(&told).is_empty(), "a packet is still to come");
        assert_eq!(ports[1].advance(10, &mut seen), 2);
        assert_eq!(
            (seen.packets, locked(&told).clone()),
            (2, vec![(Rank(0), PeerEvent::down(Fault::PeerLost(Rank(0))))])
        );
        assert_eq!(ports[1].advance(10, &mut seen), 0);
        assert!(ports[1].arm(true));
    }

    struct Seen {
        packets: usize,
        verdict: Verdict,
    }

    impl Sink for Seen {
        fn packet(&mut self, _inject: &mut dyn Inject, _packet: &mut Packet<'_>) -> Verdict {
            self.packets += 1;
            self.verdict
        }

        fn complete(&mut self, _ticket: Ticket, _outcome: Outcome) {}

        fn corrupt(&mut self, _rank: Rank) {}
    }
}
