//! The sending half: lanes, page grants, puts and gets.

mod batch;

use super::COPY_FLAG;
use crate::grants::Grants;
use crate::lane::{Header, KIND_PAGE, KIND_SHORT, LightFence, Producer, max_short};
use crate::link::{ClientLink, LoanHome};
use crate::pages::{Page, PagePool, Taken};
use crate::ready::ReadySet;
use bytes::Bytes;
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::device::{Inject, Injected, LeaseOwner, Source as Payload, Sources, Stop};
use posthaste_core::memory::{SharedSlice, SharedWords, WordCopier, Words};
use posthaste_core::sync::lock;
use posthaste_core::{Descriptor, Fault, JobShape, Loan, ProtocolId, Rank, Ticket, Value};
use std::sync::Arc;

/// The sending half.
pub(super) struct Tx {
    pub home: Arc<ClientLink>,
    pub lanes: Vec<Option<Box<TxLane>>>,
    pool: PagePool,
    memory: SharedSlice,
    pool_at: u64,
    max_short: usize,
    shape: JobShape,
    fence: LightFence,
    loan_home: Arc<dyn LeaseOwner>,
    /// A multicast is under way; of what it has sent so far, the payload that is in a page.
    multicast: bool,
    shared: Option<SharedPage>,
    /// Ends to be reported at the next `advance`: values of gets.
    pub ended: Vec<(Ticket, Value)>,
    /// The lane that took no more last, until its reader was seen to move.
    full: Option<usize>,
}

/// A page that holds the payload of a multicast; its maker is one of its users until the multicast ends.
struct SharedPage {
    address: usize,
    len: usize,
    page: Page,
}

pub(super) struct TxLane {
    producer: Producer<SharedWords>,
    ready: ReadySet<SharedWords>,
    rank: Rank,
    dead: bool,
    /// The last inject found no room.
    blocked: bool,
    /// Pages that the reader may look at.
    grants: Grants,
}

impl TxLane {
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

/// Carries out the puts of single words at the front of a run that are like the first one but for their places; returns how
/// many.
#[inline]
fn replay_words(run: &[Descriptor], words: &WordCopier) -> usize {
    let Some(first) = run.first() else { return 0 };
    if first.len != 8 {
        return 0;
    }
    // Everything but the places is compared at once: as words, and in one branch.
    let &[kind, target, ..] = descriptor_words(first);
    let local = first.source[0];
    let differs = |put: &Descriptor| {
        let &[put_kind, put_target, len, _, _, _, put_local, _] = descriptor_words(put);
        (put_kind ^ kind) | (put_target ^ target) | (len ^ 8) | (put_local ^ local)
    };
    let done = |put: &&Descriptor| differs(put) == 0 && words.copy(put.offset, put.source[1]);
    run.iter().take_while(done).count()
}

/// A descriptor as words: op to rank; context to region; length; offset; ticket; cookie; source.
#[inline(always)]
fn descriptor_words(descriptor: &Descriptor) -> &[u64; 8] {
    zerocopy::transmute_ref!(descriptor)
}

/// Whether a send is of one word without a cookie, and like another one but for where its payload is.
#[inline]
fn is_word_like(send: &Descriptor, other: &Descriptor) -> bool {
    let &[kind, target, ..] = descriptor_words(other);
    let &[send_kind, send_target, len, _, _, cookie, local, _] = descriptor_words(send);
    ((send_kind ^ kind) | (send_target ^ target) | (len ^ 8) | cookie | (local ^ other.source[0])) == 0
}

/// Carries out the puts at the front of a run that have the same source and the same target; returns how many.
#[inline]
fn replay_puts(run: &[Descriptor], target: &SharedSlice, source: &SharedSlice) -> usize {
    let Some(first) = run.first() else { return 0 };
    let (region, local) = (first.region, first.source[0]);
    let same = |put: &Descriptor| {
        put.op == Op::Put
            && put.source_kind == SourceKind::Region
            && put.region == region
            && put.source[0] == local
    };
    let done = target.words_from(source).map_or(0, |words| replay_words(run, &words));
    let is_done =
        |put: &&Descriptor| same(put) && target.transfer(put.offset, source, put.source[1], put.len);
    done + run[done..].iter().take_while(is_done).count()
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
            shape: layout.shape,
            fence: home.link.fence,
            loan_home: Arc::new(LoanHome(home.clone())),
            multicast: false,
            shared: None,
            ended: Vec::new(),
            full: None,
            home,
        }
    }

    /// The reader of a lane is gone.
    pub fn kill(&mut self, index: usize) {
        let Tx { home, lanes, pool, .. } = self;
        let Some(lane) = &mut lanes[index] else { return };
        lane.dead = true;
        // Only a proven exit gives back what the peer could still be reading (I3).
        if home.link.is_gone(lane.rank) {
            lane.grants.void(|page| pool.give_back(page));
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
        if lane.dead { Err(Fault::PeerLost(lane.rank)) } else { Ok(lane) }
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
            arena.commit(offset, len).map_err(|error| {
                tracing::warn!(%to, %error, "no memory for a lane");
                Fault::OutOfMemory("for a lane; see the log")
            })?;
        }
        posthaste_core::failpoint!("lane.create.committed");
        let (control, ring) = home.lane(home.me, to);
        let producer = Producer::open(control, ring);
        posthaste_core::failpoint!("lane.create.open");
        tracing::debug!(me = %home.me, %to, "lane opened");
        home.link.watch(to.rank);
        self.lanes[index] = Some(Box::new(TxLane {
            producer,
            ready: home.ready_set(to),
            rank: to.rank,
            dead: home.link.is_gone(to.rank),
            blocked: false,
            grants: Grants::new(self.pool.size()),
        }));
        Ok(())
    }

    #[cold]
    fn announce_to(&self, index: usize) {
        if let Some(lane) = &self.lanes[index] {
            Self::announce(&self.home, lane);
        }
    }

    #[cold]
    fn announce(home: &ClientLink, lane: &TxLane) {
        let me = home.link.arena.layout().shape.index(home.me);
        if lane.ready.announce(me) {
            home.link.ring(lane.rank);
        }
        home.link.watch(lane.rank);
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
            _ => self.send_page(index, descriptor, sources, source),
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
        lane.blocked |= !sent;
        if sent && lane.producer.reader_wants_notice(fence) {
            self.announce_to(index);
        }
        Ok(sent)
    }

    /// Sends the messages at the front of a run that come out of the same region, are short, have no info and go to the
    /// same endpoint; returns how many, and whether the lane had room for all of them.
    fn replay_sends(&mut self, run: &[Descriptor], source: &SharedSlice) -> Result<(usize, bool), Fault> {
        let Some(first) = run.first() else { return Ok((0, true)) };
        let (target, local) = (first.target(), first.source[0]);
        let (fence, max_short, index) = (self.fence, self.max_short as u64, self.shape.index(target));
        let same = |send: &Descriptor| {
            send.op == Op::Send
                && send.source_kind == SourceKind::Region
                && send.info_len == 0
                && send.len <= max_short
                && send.target() == target
                && send.source[0] == local
        };
        self.lane(index)?;
        let (mut done, mut room, mut pages) = (0, true, true);
        while let Some(send) = run.get(done).filter(|send| same(send)) {
            if pages && let Some(batched) = self.send_batch(index, &run[done..], source)? {
                done += batched;
                // The rest goes through the ring, which tells when there is room.
                pages = batched > 0;
                continue;
            }
            let lane = self.lane(index)?;
            let words = run[done..].iter().map_while(|next| {
                is_word_like(next, send).then(|| source.try_read_u64(next.source[1])).flatten()
            });
            let pushed = lane.producer.push_words(send.protocol.0, words);
            if pushed > 0 {
                done += pushed;
                continue;
            }
            let Some(payload) = source.slice(send.source[1], send.len) else { break };
            room = lane.push_shared(send, &[], payload);
            if !room {
                lane.blocked = true;
                break;
            }
            done += 1;
        }
        let lane = self.lane(index)?;
        // One look for all: a reader that has said before this that it wants to be told has not seen the last one.
        if done > 0 && lane.producer.reader_wants_notice(fence) {
            self.announce_to(index);
        }
        Ok((done, room))
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
            lane.blocked = true;
            return Ok(false);
        }
        if lane.producer.reader_wants_notice(fence) {
            self.announce_to(index);
        }
        Ok(true)
    }

    /// A payload that goes into a page of this side's pool (or is there already, as a loan), named by a record.
    #[inline(never)]
    fn send_page(
        &mut self,
        index: usize,
        descriptor: &Descriptor,
        sources: &Sources<'_>,
        source: Payload<'_>,
    ) -> Result<bool, Fault> {
        self.lane(index)?;
        self.settle(index);
        if self.lanes[index].as_ref().is_none_or(|lane| lane.grants.is_far_ahead()) {
            self.block(index);
            return Ok(false);
        }
        let there = self.page_of(source);
        let (page, lent) = match (source, there) {
            (Payload::Loan(key, _), _) => (Page::from_word(key), true),
            (_, Some(page)) => {
                self.pool.share(page);
                (page, false)
            }
            _ => match self.take_page(descriptor.len)? {
                Some(page) => (page, false),
                None => {
                    self.block(index);
                    return Ok(false);
                }
            },
        };
        // After the page, which may have to be looked for: that frees numbers, too.
        let Some((number, life)) = self.next_grant(index) else {
            if !lent {
                self.pool.give_back(page);
            }
            self.block(index);
            return Ok(false);
        };
        let memory = self.memory.slice(page.offset, descriptor.len);
        match (source, memory) {
            _ if there.is_some() => {}
            (Payload::Private(bytes), Some(memory)) => {
                memory.write(bytes);
                if self.multicast {
                    self.keep_for_others(bytes, page);
                }
            }
            (Payload::Shared(slice), Some(memory)) => memory.copy_from(slice),
            _ => {}
        }
        posthaste_core::failpoint!("grant.written");
        let scarce = self.pool.is_scarce();
        let Some(lane) = &mut self.lanes[index] else { return Ok(false) };
        let copy = if scarce || lane.grants.are_kept() { COPY_FLAG } else { 0 };
        let header = Header {
            kind: KIND_PAGE,
            info_len: descriptor.info_len,
            protocol: descriptor.protocol.0,
            len: descriptor.len as u32,
            cookie: descriptor.cookie != 0,
        };
        let sent = lane.producer.push(header, descriptor.cookie, sources.info, |ring, at| {
            ring.store(at, page.offset, posthaste_core::sync::Ordering::Relaxed);
            let word = life | (number as u64) << 40 | copy;
            ring.store(at + 1, word, posthaste_core::sync::Ordering::Relaxed);
        });
        if sent {
            lane.grants.grant(number, life, page, lane.producer.tail());
            posthaste_core::failpoint!("grant.sent");
            if lane.producer.reader_wants_notice(self.fence) {
                self.announce_to(index);
            }
        } else {
            lane.blocked = true;
            if !lent {
                self.pool.give_back(page);
            }
        }
        Ok(sent)
    }

    /// The page that a multicast has put this payload into.
    #[inline]
    fn page_of(&self, source: Payload<'_>) -> Option<Page> {
        let (Some(shared), Payload::Private(bytes)) = (&self.shared, source) else { return None };
        let same = (shared.address, shared.len) == (bytes.as_ptr().addr(), bytes.len());
        same.then_some(shared.page)
    }

    /// The page serves the others of the multicast, too.
    fn keep_for_others(&mut self, bytes: &[u8], page: Page) {
        self.forget_shared();
        self.pool.share(page);
        self.shared = Some(SharedPage { address: bytes.as_ptr().addr(), len: bytes.len(), page });
    }

    fn forget_shared(&mut self) {
        if let Some(SharedPage { page, .. }) = self.shared.take() {
            self.pool.give_back(page);
        }
    }

    /// A multicast begins, or ends.
    pub fn multicast(&mut self, begins: bool) {
        self.forget_shared();
        self.multicast = begins;
    }

    /// A word found no room in that lane, or no lane.
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
            lane.blocked = true;
        }
    }

    /// A free number and life for a grant; `None` if all are in use.
    fn next_grant(&mut self, index: usize) -> Option<(usize, u64)> {
        let next = self.lanes[index].as_ref()?.grants.next();
        if next.is_none() {
            self.sweep(index);
            return self.lanes[index].as_ref()?.grants.next();
        }
        next
    }

    /// Looks how far a reader has got, if that is worth while.
    fn settle(&mut self, index: usize) {
        let Tx { lanes, pool, .. } = self;
        if let Some(lane) = &mut lanes[index]
            && lane.grants.worth_a_look()
        {
            let TxLane { producer, grants, .. } = &mut **lane;
            let head = producer.consumed();
            grants.settle(head, |number| producer.returned(number), |page| pool.give_back(page));
        }
    }

    /// A page for `len` bytes; `None`: all are in use.
    fn take_page(&mut self, len: u64) -> Result<Option<Page>, Fault> {
        // Rather than touch ever more memory, look what has come back.
        if self.pool.is_large() && !self.pool.has_warm(len) {
            self.sweep_all();
        }
        let mut taken = self.pool.take(len);
        if taken.is_none() {
            self.sweep_all();
            let returned = std::mem::take(&mut *lock(&self.home.returned_loans));
            for word in returned {
                self.pool.give_back(Page::from_word(word));
            }
            taken = self.pool.take(len);
        }
        match taken {
            None => Ok(None),
            Some(Taken::Warm(page)) => Ok(Some(page)),
            Some(Taken::Fresh(page)) => {
                match self.home.link.arena.commit(self.pool_at + page.offset, page.len()) {
                    Ok(()) => Ok(Some(page)),
                    Err(error) => {
                        self.pool.never_mind(page);
                        tracing::warn!(%error, "no memory for a page");
                        Err(Fault::OutOfMemory("for a page; see the log"))
                    }
                }
            }
        }
    }

    #[cold]
    fn sweep_all(&mut self) {
        for index in 0..self.lanes.len() {
            self.sweep(index);
        }
    }

    /// Takes back all the pages that the reader of a lane has returned.
    fn sweep(&mut self, index: usize) -> bool {
        let Tx { lanes, pool, .. } = self;
        let Some(lane) = &mut lanes[index] else { return false };
        if !lane.grants.any() {
            return false;
        }
        let TxLane { producer, grants, .. } = &mut **lane;
        let head = producer.consumed();
        let settled = grants.settle(head, |number| producer.returned(number), |page| pool.give_back(page));
        grants.sweep(|number| producer.returned(number), |page| pool.give_back(page)) || settled
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
                            return fault(taken, Fault::PeerLost(remote.rank));
                        }
                        known = (descriptor.region, mapped, remote.rank);
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
                Op::Nop | Op::Jump => {}
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
            return Err(Fault::PeerLost(remote.rank));
        }
        let word = remote.mapped.and_then(|mapped| mapped.slice(descriptor.offset, descriptor.len));
        let (op, fetch) = descriptor.word_op().ok_or(defect)?;
        let old = word.and_then(|word| word.apply(&op)).ok_or(defect)?;
        self.fence.issue();
        self.home.ring_for_memory(descriptor.target());
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
        let lane = self.full.and_then(|index| self.lanes[index].as_ref());
        let moved = lane.is_none_or(|lane| lane.dead || lane.producer.reader_moved());
        if moved {
            self.full = None;
        }
        moved
    }

    /// Whether a blocked lane could go on.
    pub fn has_room(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.lanes.len() {
            any |= self.sweep(index);
            any |=
                self.lanes[index].as_ref().is_some_and(|lane| lane.blocked && lane.producer.reader_moved());
        }
        any
    }

    pub fn set_waiting(&mut self, waiting: bool) {
        for lane in self.lanes.iter_mut().flatten() {
            // Any lane may bring back the page that a blocked one waits for.
            lane.producer.set_waiting(waiting);
            if !waiting {
                lane.blocked = false;
            }
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
        Some(Loan { memory, key: page.to_word(), owner: Some(self.loan_home.clone()) })
    }

    #[inline]
    fn word(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: u64) -> bool {
        let fence = self.fence;
        let Some(Some(lane)) = self.lanes.get_mut(target) else { return false };
        if lane.dead {
            return false;
        }
        if !lane.producer.push_word(protocol.0, cookie, payload) {
            lane.blocked = true;
            self.full = Some(target);
            return false;
        }
        if lane.producer.reader_wants_notice(fence) {
            self.announce_to(target);
        }
        true
    }

    fn word_to_each(&mut self, targets: &mut [usize], protocol: ProtocolId, payload: u64) -> usize {
        let fence = self.fence;
        let mut left = 0;
        for at in 0..targets.len() {
            let target = targets[at];
            if let Some(Some(lane)) = self.lanes.get_mut(target)
                && !lane.dead
                && lane.producer.push_word(protocol.0, 0, payload)
            {
                if lane.producer.reader_wants_notice(fence) {
                    self.announce_to(target);
                }
                continue;
            }
            self.refuse(target);
            targets[left] = target;
            left += 1;
        }
        left
    }
}
