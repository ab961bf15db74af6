//! The sending half: lanes, page grants, puts and gets.

mod batch;
mod near;
mod pages;
mod replay;
#[cfg(all(test, not(posthaste_loom)))]
mod tests;

use pages::{PageHead, SharedPage};
use replay::{in_order, replay_puts};

use crate::grants::{Grants, Slot};
use crate::lane::{Header, KIND_SHORT, LightFence, Producer, max_short, most_words};
use crate::link::{ClientLink, LoanHome};
use crate::pages::PagePool;
use crate::ready::ReadySet;
use crate::room::Room;
use bytes::Bytes;
use near::Nearness;
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::device::{Inject, Injected, LeaseOwner, Source as Payload, Sources, Stop};
use posthaste_core::memory::{SharedSlice, SharedWords, Words};
use posthaste_core::{Descriptor, Endpoint, Fault, JobShape, Loan, ProtocolId, Rank, Ticket, Value};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The sending half.
pub(super) struct Tx {
    pub home: Arc<ClientLink>,
    pub lanes: Vec<Option<Box<TxLane>>>,
    pool: PagePool,
    memory: SharedSlice,
    pool_at: u64,
    max_short: usize,
    most_words: usize,
    shape: JobShape,
    fence: LightFence,
    loan_home: Arc<dyn LeaseOwner>,
    /// A multicast is under way; of what it has sent so far, the payload that is in a page.
    multicast: bool,
    shared: Option<SharedPage>,
    /// How often pages have come back, of whatever lane.
    returns: u64,
    /// Not before so much of the pool was in use is it worth while to look at all pages that are out.
    sweep_at: u64,
    /// Ends to be reported at the next `advance`: values of gets.
    pub ended: Vec<(Ticket, Value)>,
    /// The lane that took no more last, until its reader was seen to move.
    full: Option<usize>,
    /// Whose memory the run under way has written; a run has one target.
    wrote: Option<Endpoint>,
    /// Bytes of the last loan.
    lent: u64,
    /// This endpoint's index in the job.
    me: usize,
}

pub(super) struct TxLane {
    producer: Producer<SharedWords>,
    ready: ReadySet<SharedWords>,
    rank: Rank,
    dead: bool,
    /// The reader's process is watched, or need not be.
    watched: bool,
    room: Room,
    /// Pages that the reader may look at.
    grants: Grants,
    nearness: Nearness,
}

impl TxLane {
    /// Whether the reader was told already of this side's records, and has not looked for them since.
    #[inline]
    fn is_announced(&self, me: usize) -> bool {
        self.watched && self.ready.is_announced(me)
    }

    #[cold]
    #[inline(never)]
    fn announce(&mut self, me: usize, home: &ClientLink) {
        self.ready.announce(me, || home.link.ring(self.rank));
        self.watched = home.link.watch(self.rank);
    }

    /// Writes a short record with a payload out of shared memory; false: no room.
    #[inline]
    fn push_shared(&mut self, send: &Descriptor, info: &[u8], payload: SharedSlice) -> bool {
        if payload.len() == 8 && info.is_empty() {
            let mut word = [0; 8];
            payload.read(&mut word);
            return self.producer.push_word(send.protocol.0, send.cookie, u64::from_ne_bytes(word));
        }
        let header = Header {
            kind: KIND_SHORT,
            info_len: info.len() as u8,
            protocol: send.protocol.0,
            len: payload.len() as u32,
            cookie: send.cookie != 0,
        };
        self.producer.push(header, send.cookie, info, |ring, at| ring.write_shared(at, payload))
    }
}

fn full(taken: usize) -> Injected {
    Injected { taken, stop: Stop::Full, complete: true }
}

fn fault(taken: usize, fault: Fault) -> Injected {
    Injected { taken, stop: Stop::Fault(fault), complete: true }
}

impl Tx {
    pub fn new(home: Arc<ClientLink>) -> Tx {
        let layout = *home.link.arena.layout();
        let (pool_at, pool_len) = layout.pool(home.client, home.me);
        Tx {
            lanes: (0..home.endpoints()).map(|_| None).collect(),
            pool: PagePool::new(pool_len),
            memory: home.link.arena.part((pool_at, pool_len)),
            pool_at,
            max_short: max_short(layout.sizes.lane),
            most_words: most_words(layout.sizes.lane),
            shape: layout.shape,
            fence: home.link.fence,
            loan_home: Arc::new(LoanHome(home.clone())),
            multicast: false,
            shared: None,
            returns: 0,
            sweep_at: 0,
            ended: Vec::new(),
            full: None,
            wrote: None,
            lent: 0,
            me: layout.shape.index(home.me),
            home,
        }
    }

    /// The reader of a lane is gone.
    pub fn kill(&mut self, index: usize) {
        let Tx { home, lanes, pool, returns, .. } = self;
        let Some(lane) = &mut lanes[index] else { return };
        lane.dead = true;
        // Only a proven exit gives back what the peer could still be reading (I3).
        if home.link.is_gone(lane.rank) {
            lane.grants.void(pool);
            *returns += 1;
        }
    }

    /// An endpoint is likely to be sent to in a moment. A hint.
    #[inline(always)]
    pub fn expect(&self, index: usize) {
        if let Some(Some(lane)) = self.lanes.get(index) {
            lane.producer.prefetch();
        }
    }

    /// As [`expect`](Self::expect), where a page has come from: a loan may go back. Its first line and its last are asked for, which
    /// the other side has read, and what tells that it is here again.
    #[cold]
    pub fn expect_loan(&self, index: usize) {
        let Some(Some(lane)) = self.lanes.get(index).filter(|_| self.lent > 0) else { return };
        let oldest = lane.grants.oldest().filter(|_| lane.grants.worth_a_look());
        if let Some(oldest) = oldest {
            lane.producer.prefetch_news(oldest.number.into());
        }
        let page = self.pool.next_warm(self.lent).or_else(|| oldest.map(Slot::page));
        if let Some(memory) = page.and_then(|page| self.memory.slice(page.offset, self.lent)) {
            memory.prefetch_write(self.lent - 1);
            memory.prefetch_write(0);
        }
    }

    #[inline]
    fn lane(&mut self, index: usize) -> Result<&mut TxLane, Fault> {
        if self.lanes[index].is_none() {
            self.open_lane(index)?;
        }
        let Some(lane) = &mut self.lanes[index] else {
            return Err(Fault::OutOfMemory("the lane could not be opened"));
        };
        if lane.dead { Err(self.home.end_of(lane.rank)) } else { Ok(lane) }
    }

    /// The first message to an endpoint: commits the lane's memory and that of the reader's block. The reader need
    /// not have started (P02).
    #[cold]
    fn open_lane(&mut self, index: usize) -> Result<(), Fault> {
        let home = &self.home;
        let to = home.endpoint(index);
        let arena = &home.link.arena;
        let (lane, block) =
            (arena.layout().lane(home.client, home.me, to), arena.layout().block(home.client, to));
        posthaste_core::failpoint!("lane.create.before");
        for (offset, len) in [lane, block] {
            // Other senders commit the reader's block as well, and so does the reader.
            arena.commit_common(offset, len).map_err(|error| {
                tracing::warn!(%to, %error, "no memory for a lane");
                Fault::OutOfMemory(error.limit())
            })?;
        }
        posthaste_core::failpoint!("lane.create.committed");
        let (control, ring) = home.lane(home.me, to);
        let producer = Producer::open(control, ring);
        // Before anything is in it: who reads that knows whether to ring, though this side may sleep already.
        producer.set_waiting(home.waits_for_room.load(Ordering::Relaxed));
        posthaste_core::failpoint!("lane.create.open");
        tracing::debug!(me = %home.me, %to, "lane opened");
        let watched = home.link.watch(to.rank);
        self.lanes[index] = Some(Box::new(TxLane {
            producer,
            ready: home.ready_set(to),
            rank: to.rank,
            dead: home.link.is_gone(to.rank),
            watched,
            room: Room::default(),
            grants: Grants::new(self.pool.size()),
            nearness: Nearness::default(),
        }));
        Ok(())
    }

    #[inline]
    fn announce_to(&mut self, index: usize) {
        if let Some(lane) = &mut self.lanes[index]
            && !lane.is_announced(self.me)
        {
            lane.announce(self.me, &self.home);
        }
    }

    #[inline]
    fn send(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Fault> {
        let index = self.shape.index(descriptor.target());
        let Some(source) = sources.resolve(descriptor) else {
            return Err(Fault::OutOfMemory("a descriptor without a source"));
        };
        let max_short = self.max_short;
        let len = descriptor.len as usize;
        match source {
            Payload::Private(bytes) if len <= max_short => {
                self.send_short(index, descriptor.protocol, descriptor.cookie, sources.info, bytes)
            }
            Payload::Shared(slice) if len <= max_short => {
                self.send_recorded(index, descriptor, sources.info, slice)
            }
            _ => {
                let Descriptor { protocol, cookie, len, .. } = *descriptor;
                self.send_page(index, PageHead { protocol, cookie, len, info: sources.info }, source)
            }
        }
    }

    /// A payload out of a region, which goes into the record: straight from where it is.
    fn send_recorded(
        &mut self,
        index: usize,
        descriptor: &Descriptor,
        info: &[u8],
        source: SharedSlice,
    ) -> Result<bool, Fault> {
        let fence = self.fence;
        let lane = self.lane(index)?;
        let sent = lane.push_shared(descriptor, info, source);
        if !sent {
            self.block(index);
        } else if lane.producer.reader_wants_notice(fence) {
            self.announce_to(index);
        }
        Ok(sent)
    }

    /// A payload that goes into the record.
    #[inline]
    fn send_short(
        &mut self,
        index: usize,
        protocol: ProtocolId,
        cookie: u64,
        info: &[u8],
        bytes: &[u8],
    ) -> Result<bool, Fault> {
        let fence = self.fence;
        let lane = self.lane(index)?;
        let header = Header {
            kind: KIND_SHORT,
            info_len: info.len() as u8,
            protocol: protocol.0,
            len: bytes.len() as u32,
            cookie: cookie != 0,
        };
        let sent = lane.producer.push(header, cookie, info, |ring, at| {
            if let Ok(word) = <[u8; 8]>::try_from(bytes) {
                ring.store(at, u64::from_ne_bytes(word), posthaste_core::sync::Ordering::Relaxed);
            } else {
                ring.write_bytes(at, bytes);
            }
        });
        if !sent {
            self.block(index);
            return Ok(false);
        }
        if lane.producer.reader_wants_notice(fence) {
            self.announce_to(index);
        }
        Ok(true)
    }

    /// Writes a record to a lane that is there, by the given way; false: there is no such lane, or no room.
    #[inline(always)]
    fn push_at_once(&mut self, target: usize, push: impl FnOnce(&mut Producer<SharedWords>) -> bool) -> bool {
        let fence = self.fence;
        if let Some(Some(lane)) = self.lanes.get_mut(target)
            && !lane.dead
            && push(&mut lane.producer)
        {
            if lane.producer.reader_wants_notice(fence) {
                self.announce_to(target);
            }
            return true;
        }
        self.refuse(target);
        false
    }

    /// A multicast begins, or ends.
    pub fn multicast(&mut self, begins: bool) {
        self.forget_shared();
        self.multicast = begins;
    }

    /// A record found no room in that lane, or no lane.
    #[cold]
    fn refuse(&mut self, index: usize) {
        if self.lanes.get(index).is_some_and(|lane| lane.as_ref().is_some_and(|lane| !lane.dead)) {
            self.block(index);
            self.full = Some(index);
        }
    }

    /// The last inject found no room in that lane.
    fn block(&mut self, index: usize) {
        if let Some(lane) = &mut self.lanes[index] {
            lane.room.miss(&lane.producer, self.returns);
        }
    }

    /// Puts and gets of mapped memory: one copy each, done when this returns.
    #[inline]
    fn run(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        let mut taken = 0;
        let mut complete = true;
        let mut known = (u32::MAX, SharedSlice::EMPTY, Rank(0));
        while let Some(descriptor) = run.get(taken) {
            match descriptor.op {
                Op::Put | Op::Get => {
                    if known.0 != descriptor.region {
                        let Some(remote) = sources.table.remote.get(descriptor.region as usize) else {
                            return fault(taken, Fault::OutOfMemory("a descriptor without a target"));
                        };
                        let Some(mapped) = remote.mapped else {
                            return fault(taken, Fault::OutOfMemory("the target is not mapped"));
                        };
                        if self.home.link.is_gone(remote.rank) {
                            return fault(taken, self.home.end_of(remote.rank));
                        }
                        known = (descriptor.region, mapped, remote.rank);
                    }
                    if descriptor.op == Op::Put {
                        self.wrote = Some(descriptor.target());
                    }
                    if descriptor.op == Op::Put && descriptor.source_kind == SourceKind::Region {
                        let Some(local) = sources.table.local.get(descriptor.source[0] as usize) else {
                            return fault(taken, Fault::OutOfMemory("a put without a source"));
                        };
                        let moved = replay_puts(&run[taken..], &known.1, local);
                        if moved == 0 {
                            return fault(taken, Fault::OutOfMemory("a descriptor out of range"));
                        }
                        taken += moved;
                        continue;
                    }
                    let Some(target) = known.1.slice(descriptor.offset, descriptor.len) else {
                        return fault(taken, Fault::OutOfMemory("a descriptor out of range"));
                    };
                    in_order();
                    if descriptor.op == Op::Put {
                        match sources.resolve(descriptor) {
                            Some(Payload::Private(bytes)) => target.write(bytes),
                            Some(Payload::Shared(slice)) => target.copy_from(slice),
                            _ => return fault(taken, Fault::OutOfMemory("a put without a source")),
                        }
                    } else if let Some(Payload::Shared(slice)) = sources.resolve(descriptor) {
                        slice.copy_from(target);
                    } else if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
                        self.ended.push((ticket, Value::Bytes(Bytes::from(target.to_vec()))));
                        complete = false;
                    }
                }
                Op::Send if descriptor.source_kind == SourceKind::Region && run.len() > 1 => {
                    let Some(local) = sources.table.local.get(descriptor.source[0] as usize) else {
                        return fault(taken, Fault::OutOfMemory("a send without a source"));
                    };
                    match self.replay_sends(&run[taken..], local) {
                        Ok((0, true)) => match self.send(descriptor, sources) {
                            Ok(true) => {}
                            Ok(false) => return full(taken),
                            Err(why) => return fault(taken, why),
                        },
                        Ok((sent, true)) => {
                            taken += sent;
                            continue;
                        }
                        Ok((sent, false)) => return full(taken + sent),
                        Err(why) => return fault(taken, why),
                    }
                }
                Op::Send => match self.send(descriptor, sources) {
                    Ok(true) => {}
                    Ok(false) => return full(taken),
                    Err(why) => return fault(taken, why),
                },
                Op::Atomic => match self.atomic(descriptor, sources) {
                    Ok(ended) => complete &= ended,
                    Err(why) => return fault(taken, why),
                },
                Op::Nop | Op::Jump | Op::Local => {}
            }
            taken += 1;
        }
        Injected { taken, stop: Stop::Done, complete }
    }

    /// An atomic operation on mapped memory: done when this returns. False: its old value is reported at the next
    /// `advance`.
    #[inline(never)]
    fn atomic(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Fault> {
        let defect = Fault::OutOfMemory("an atomic operation on what is no word");
        let remote = sources.table.remote.get(descriptor.region as usize).ok_or(defect)?;
        if self.home.link.is_gone(remote.rank) {
            return Err(self.home.end_of(remote.rank));
        }
        let word = remote.mapped.and_then(|mapped| mapped.slice(descriptor.offset, descriptor.len));
        let (op, fetch) = descriptor.word_op().ok_or(defect)?;
        let old = word.and_then(|word| word.apply(&op)).ok_or(defect)?;
        self.fence.issue();
        self.home.ring_for_memory(descriptor.rank);
        match Ticket::from_word(descriptor.ticket) {
            Some(ticket) if fetch => {
                self.ended.push((ticket, op.len.value(old)));
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// Whether a lane took no more when it was last asked.
    #[inline]
    pub fn is_blocked(&self) -> bool {
        self.full.is_some()
    }

    /// Whether the reader of that lane has moved since.
    #[inline]
    pub fn reader_moved(&mut self) -> bool {
        let lane = self.full.and_then(|index| self.lanes[index].as_mut());
        let moved = lane.is_none_or(|lane| lane.dead || lane.room.reader_moved(&mut lane.producer));
        if moved {
            self.full = None;
        }
        moved
    }

    /// Whether a blocked lane could go on.
    pub fn has_room(&mut self) -> bool {
        let mut any = self.take_back_all_loans();
        for index in 0..self.lanes.len() {
            any |= self.sweep(index);
        }
        // After all of that, which counts: what it is said for once is to be tried once.
        for lane in self.lanes.iter_mut().flatten() {
            any |= lane.room.may_go_on(&mut lane.producer, self.returns);
        }
        any
    }

    /// Whether there is something that a sleep would not be ended for.
    pub fn ends_a_sleep(&mut self, waiting_for_room: bool) -> bool {
        !self.ended.is_empty() || (waiting_for_room && self.has_room())
    }

    pub fn set_waiting(&mut self, waiting: bool) {
        self.home.waits_for_room.store(waiting, Ordering::Relaxed);
        for lane in self.lanes.iter_mut().flatten() {
            // Any lane may bring back the page that a blocked one waits for.
            lane.producer.set_waiting(waiting);
        }
    }
}

impl Inject for Tx {
    #[inline]
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        if let [descriptor] = run
            && descriptor.op == Op::Send
        {
            return match self.send(descriptor, sources) {
                Ok(true) => Injected { taken: 1, stop: Stop::Done, complete: true },
                Ok(false) => {
                    self.full = Some(self.shape.index(descriptor.target()));
                    full(0)
                }
                Err(why) => fault(0, why),
            };
        }
        let injected = self.run(run, sources);
        if let Some(target) = self.wrote.take() {
            // Tasks may wait for what was written.
            self.fence.issue();
            self.home.ring_for_memory(target.rank);
        }
        if injected.stop == Stop::Full
            && let Some(descriptor) = run.get(injected.taken)
        {
            self.full = Some(self.shape.index(descriptor.target()));
        }
        injected
    }

    fn loan(&mut self, len: usize) -> Option<Loan> {
        // The page that came back last is the one to lend: it is still in the cache.
        for index in 0..self.lanes.len() {
            self.settle(index);
        }
        let page = self.take_page(len as u64).ok()??;
        let memory = self.memory.slice(page.offset, len as u64)?;
        self.lent = len as u64;
        Some(Loan::new(memory, page.to_word(), self.loan_home.clone()))
    }

    #[inline]
    fn word(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: u64) -> bool {
        // As `push_at_once`, written out: the most frequent record is to cost no call.
        if let Some(Some(lane)) = self.lanes.get_mut(target)
            && !lane.dead
            && lane.producer.push_word(protocol.0, cookie, payload)
        {
            if lane.producer.reader_wants_notice(self.fence) {
                self.announce_to(target);
            }
            return true;
        }
        self.refuse(target);
        false
    }

    /// Where the fence is not free, all are written before any reader is looked at for whether it wants to be told.
    fn word_to_each(&mut self, targets: &mut [usize], protocol: ProtocolId, payload: u64) -> usize {
        let mut refused = 0;
        let is_free = self.fence == LightFence::Compiler;
        for at in 0..targets.len() {
            let target = targets[at];
            if let Some(Some(lane)) = self.lanes.get_mut(target)
                && !lane.dead
                && lane.producer.push_word(protocol.0, 0, payload)
            {
                if is_free && lane.producer.reader_wants_notice(LightFence::Compiler) {
                    self.announce_to(target);
                }
            } else {
                self.refuse(target);
                targets.swap(refused, at);
                refused += 1;
            }
        }
        if !is_free {
            self.fence.issue();
            for &target in &targets[refused..] {
                let lane = self.lanes.get(target).and_then(Option::as_ref);
                if lane.is_some_and(|lane| lane.producer.is_notice_wanted()) {
                    self.announce_to(target);
                }
            }
        }
        refused
    }

    #[inline]
    fn plain(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: &[u8]) -> bool {
        if payload.len() <= self.max_short {
            return self.push_at_once(target, |lane| lane.push_short(protocol.0, cookie, payload));
        }
        if self.page_at_once(target, protocol, cookie, payload) {
            return true;
        }
        let head = PageHead { protocol, cookie, len: payload.len() as u64, info: &[] };
        matches!(self.send_page(target, head, Payload::Private(payload)), Ok(true))
    }

    // Handlers send through this half alone.
    fn multicast(&mut self, begins: bool) {
        Tx::multicast(self, begins);
    }
}
