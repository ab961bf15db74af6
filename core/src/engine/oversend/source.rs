//! This side's puts, gets and replays, packet by packet, and how they end.

use super::super::{Scope, State};
use super::{Landing, OpenGet, PART_COST, SCRATCH, cut};
use crate::descriptor::{Descriptor, Op, SourceKind};
use crate::device::{Body, SourceTable, Sources, Stop, Verdict};
use crate::error::Fault;
use crate::ids::{ProtocolId, Rank};
use crate::memory::Source;
use crate::slot::{Outcome, Ticket, Value};
use crate::wire;
use bytes::Bytes;

/// A descriptor that no correct caller records or injects.
#[cold]
pub(super) fn defect(descriptor: &Descriptor) -> Stop {
    debug_assert!(false, "impossible descriptor: {descriptor:?}");
    Stop::Fault(Fault::NoSuchMemory(descriptor.rank))
}

/// Where the target memory of a put or a get begins, as its owner names it.
pub(super) fn place_of(descriptor: &Descriptor, table: &SourceTable) -> Option<u64> {
    let memory = table.remote.get(descriptor.region as usize)?;
    let inside = descriptor.len <= memory.len && descriptor.offset <= memory.len - descriptor.len;
    let place = memory.offset.checked_add(descriptor.offset)?;
    place.checked_add(descriptor.len)?;
    (inside && memory.rank == descriptor.rank).then_some(place)
}

/// A packet that is a part of a put or a get.
pub(super) fn part_of(descriptor: &Descriptor, protocol: u16, place: u64, len: u64) -> Descriptor {
    Descriptor {
        op: Op::Send,
        rank: descriptor.rank,
        context: descriptor.context,
        protocol: ProtocolId(protocol),
        cookie: place,
        len,
        ..Descriptor::default()
    }
}

/// Why a peer did not do what it was asked, from the number under which it says so.
fn fault_from(code: &[u8], peer: Rank) -> Option<Fault> {
    Some(wire::fault_of(u16::from_le_bytes(code.try_into().ok()?), peer))
}

impl Scope<'_> {
    /// Goes on with the put at the head of a FIFO, which keeps its cursor in the cookie. `None`: no room. `Some(None)`: all
    /// is sent, and its end will be told by the peer.
    pub(in super::super) fn step_put(
        &mut self,
        index: usize,
        mut front: Descriptor,
    ) -> Option<Option<Outcome>> {
        let (put, ticket) = (front, front.ticket);
        self.state.peer(index).over().begin(ticket);
        match self.put_parts(index, &put, &mut front.cookie) {
            Stop::Done => {
                self.state.drop_source(&front);
                self.state.peer(index).over().sent();
                self.state.settle_over(index);
                Some(None)
            }
            stop => self.interrupted(index, &front, stop),
        }
    }

    /// As [`step_put`](Self::step_put), for a get: all of it has been asked for.
    pub(in super::super) fn step_get(
        &mut self,
        index: usize,
        mut front: Descriptor,
    ) -> Option<Option<Outcome>> {
        let (get, ticket) = (front, Ticket::from_word(front.ticket));
        match self.get_parts(index, &get, &mut front.cookie, ticket) {
            Stop::Done => Some(None),
            stop => self.interrupted(index, &front, stop),
        }
    }

    /// As [`step_put`](Self::step_put), for the rest of a replay's run, which ends at `end` in its section: descriptor by
    /// descriptor, the cursor of the one it is at in the cookie.
    pub(in super::super) fn step_run(
        &mut self,
        index: usize,
        front: &mut Descriptor,
        section: usize,
        end: u64,
    ) -> Option<Option<Outcome>> {
        let ticket = front.ticket;
        self.state.peer(index).over().begin(ticket);
        while front.offset < end {
            let Some((_, recorded)) = self.state.patterns.recorded(section, front.offset) else {
                self.state.give_up_begun(index);
                return Some(Some(Err(Fault::NoSuchMemory(front.rank))));
            };
            let stop = match recorded.op {
                Op::Nop => Stop::Done,
                Op::Put => self.put_parts(index, &recorded, &mut front.cookie),
                Op::Get => self.get_parts(index, &recorded, &mut front.cookie, None),
                Op::Atomic => self.atomic_part(index, &recorded, &mut front.cookie, None),
                Op::Send => {
                    let at = *front;
                    self.step_send(&at, &mut front.cookie)
                }
                Op::Jump | Op::Local => defect(&recorded),
            };
            match stop {
                Stop::Done => (front.offset, front.cookie) = (front.offset + 1, 0),
                Stop::Full => return None,
                Stop::Fault(fault) => {
                    self.state.give_up_begun(index);
                    return Some(Some(Err(fault)));
                }
            }
        }
        self.state.part_injected(ticket, true);
        self.state.peer(index).over().sent();
        self.state.settle_over(index);
        Some(None)
    }

    /// The head of the FIFO could not be finished: it is gone on with later, or has failed.
    pub(super) fn interrupted(
        &mut self,
        index: usize,
        front: &Descriptor,
        stop: Stop,
    ) -> Option<Option<Outcome>> {
        if let Stop::Fault(fault) = stop {
            self.state.give_up_begun(index);
            return Some(Some(Err(fault)));
        }
        let peer = self.state.peer(index);
        if let Some(fifo) = peer.fifo.as_mut() {
            fifo.set_front(front);
        }
        None
    }

    /// Sends what is left of a put; `cursor` counts the bytes that were sent.
    pub(in super::super) fn put_parts(&mut self, index: usize, put: &Descriptor, cursor: &mut u64) -> Stop {
        let State { peers, table, scratch, routes, .. } = &mut *self.state;
        let caps = routes.of(put.rank);
        let (mut fragment, mut eager) = (caps.fragment as u64, caps.max_eager as u64);
        let short = caps.max_inline.min(SCRATCH) as u64;
        let over = peers[index].as_mut().and_then(|peer| peer.over.as_mut());
        let (Some(place), Some(over)) = (place_of(put, table), over) else { return defect(put) };
        loop {
            let (place, left) = (place + *cursor, put.len - *cursor);
            let len = if left <= eager { left } else { cut(place, left, fragment) };
            let mut part = part_of(put, wire::PUT, place, len);
            (part.source_kind, part.source) = (put.source_kind, put.source);
            if put.source_kind != SourceKind::Inline {
                part.source[1] += *cursor;
            }
            let mut borrowed: &[u8] = &[];
            if put.source_kind == SourceKind::Region && len <= short {
                let region = table.local.get(put.source[0] as usize);
                let Some(bytes) = region.and_then(|region| region.slice(part.source[1], len)) else {
                    return defect(put);
                };
                scratch.resize(len as usize, 0);
                bytes.read(scratch);
                part.source_kind = SourceKind::Borrowed;
                borrowed = scratch;
            }
            let sources = Sources { borrowed, ..Sources::of(table) };
            match self.inject.inject(std::slice::from_ref(&part), &sources).stop {
                Stop::Done => {}
                // As in `stream_parts`: of a message that goes to its place, nothing else would end it there.
                Stop::Fault(Fault::OutOfMemory(_)) if len > short && short > 0 => {
                    (fragment, eager) = (short, short);
                    continue;
                }
                stop => return stop,
            }
            over.puts += 1;
            *cursor += len;
            if *cursor >= put.len {
                return Stop::Done;
            }
        }
    }

    /// Asks for what is left of a get; `cursor` is 0 before it has begun, then the bytes that were asked for plus 1.
    fn get_parts(
        &mut self,
        index: usize,
        get: &Descriptor,
        cursor: &mut u64,
        ticket: Option<Ticket>,
    ) -> Stop {
        let (longest, window) = self.state.get_limits();
        let peer = self.state.peer(index);
        peer.stuck = false;
        peer.over();
        let State { peers, table, .. } = &mut *self.state;
        let Some(peer) = peers[index].as_mut() else { return defect(get) };
        let (Some(place), Some(over)) = (place_of(get, table), peer.over.as_mut()) else {
            return defect(get);
        };
        if *cursor == 0 {
            let into = match get.source_kind {
                SourceKind::Inline => Landing::Value(Vec::new()),
                SourceKind::Region => {
                    let region = table.local.get(get.source[0] as usize);
                    match region.and_then(|region| region.slice(get.source[1], get.len)) {
                        Some(slice) => Landing::Region(slice),
                        None => return defect(get),
                    }
                }
                _ => return defect(get),
            };
            over.gets.push_back(OpenGet { ticket, len: get.len, asked: 0, received: 0, fault: None, into });
            over.gets_begun += 1;
            *cursor = 1;
        }
        loop {
            let asked = *cursor - 1;
            let len = cut(place + asked, get.len - asked, longest);
            if over.asked + len + PART_COST > window {
                peer.stuck = true;
                return Stop::Full;
            }
            let mut part = part_of(get, wire::GET, place + asked, 8);
            part.set_inline(&len.to_le_bytes());
            let sources = Sources::of(table);
            match self.inject.inject(std::slice::from_ref(&part), &sources).stop {
                Stop::Done => {}
                stop => {
                    over.never_asked(stop);
                    return stop;
                }
            }
            over.asked += len + PART_COST;
            over.parts.push_back((len, len));
            // Of the gets that were begun, the last one is not asked for yet, so that it is still there.
            if let Some(open) = over.gets.back_mut() {
                open.asked += len;
            }
            *cursor += len;
            if *cursor > get.len {
                return Stop::Done;
            }
        }
    }

    /// The peer has handled so many packets of puts. `None`: it has not got so many.
    pub(in super::super) fn put_done(&mut self, index: usize, count: u64, code: &[u8]) -> Option<Verdict> {
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        let rank = peer.endpoint.rank;
        let over = peer.over.as_mut()?;
        if count <= over.puts_done || count > over.puts {
            return None;
        }
        if !code.is_empty() {
            let (fault, first) = (fault_from(code, rank)?, over.puts_done);
            // Those without any puts are between others' and have nothing to do with it.
            let has_one = |(from, to): (u64, u64)| from < to && from < count && to > first;
            over.blame(fault, |end| has_one(end.puts));
        }
        over.puts_done = count;
        self.state.settle_over(index);
        Some(Verdict::Taken)
    }

    /// The next bytes of an answer. `None`: nothing was asked for.
    pub(in super::super) fn get_data(
        &mut self,
        index: usize,
        code: &[u8],
        body: Body<'_>,
    ) -> Option<Verdict> {
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        let rank = peer.endpoint.rank;
        let over = peer.over.as_mut()?;
        let (whole, missing) = over.parts.front_mut()?;
        let get = over.gets.front_mut()?;
        let got = if code.is_empty() {
            let got = body.len() as u64;
            if got > *missing || (got == 0 && *missing > 0) {
                return None;
            }
            land(get, body)?;
            got
        } else {
            get.fault = Some(fault_from(code, rank).filter(|_| body.is_empty())?);
            *missing
        };
        get.received += got;
        *missing -= got;
        if *missing == 0 {
            over.asked -= *whole + PART_COST;
            over.parts.pop_front();
        }
        if get.received == get.len && get.asked == get.len {
            self.get_ended(index);
        }
        let peer = self.state.peer(index);
        if std::mem::take(&mut peer.stuck) {
            self.state.mark_busy(index);
        }
        Some(Verdict::Taken)
    }

    fn get_ended(&mut self, index: usize) {
        let State { peers, completer, .. } = &mut *self.state;
        let Some(over) = peers[index].as_mut().and_then(|peer| peer.over.as_mut()) else { return };
        let Some(get) = over.gets.pop_front() else { return };
        let number = over.gets_ended;
        over.gets_ended += 1;
        let value = match get.into {
            Landing::Value(bytes) => Value::Bytes(Bytes::from(bytes)),
            Landing::Whole(value) => value,
            Landing::Region(_) | Landing::Nowhere => Value::Unit,
        };
        match (get.ticket, get.fault) {
            (Some(ticket), fault) => {
                completer.complete(ticket, fault.map_or(Ok(value), Err));
            }
            (None, Some(fault)) => over.blame(fault, |end| end.gets.0 <= number && number < end.gets.1),
            (None, None) => {}
        }
        self.state.settle_over(index);
    }
}

/// Puts the next bytes of an answer where they go.
fn land(get: &mut OpenGet, body: Body<'_>) -> Option<()> {
    match &mut get.into {
        Landing::Region(region) => {
            let place = region.slice(get.received, body.len() as u64)?;
            match body.source() {
                Source::Private(bytes) => place.write(bytes),
                Source::Shared(page) => page.copy_to(place),
            }
        }
        Landing::Value(_) if body.len() as u64 == get.len => {
            get.into = Landing::Whole(match body {
                Body::Short(bytes) => Value::copy(bytes),
                long => Value::Bytes(long.to_bytes()),
            });
        }
        Landing::Value(so_far) => {
            if so_far.capacity() == 0 {
                so_far.reserve_exact(get.len as usize);
            }
            match body.source() {
                Source::Private(bytes) => so_far.extend_from_slice(bytes),
                Source::Shared(page) => page.append_to(so_far),
            }
        }
        Landing::Nowhere => {}
        // It was whole before this.
        Landing::Whole(_) => return None,
    }
    Some(())
}
