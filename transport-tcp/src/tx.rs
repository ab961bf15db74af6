//! The sending half of a port: what waits for each peer, and what was asked of it.

use crate::frame::{CONTROL, DATA, HEADER, Header, LEAVE, Malformed, NONE, PUT};
use crate::hub::Hub;
use crate::link::{GET_COST, Get, Job, Landing, Leave, PIECE, Payload, PutSource, TxLink};
use crate::record::RecordKey;
use bytes::Bytes;
use posthaste_core::descriptor::{Info, Op, SourceKind};
use posthaste_core::device::{Inject, Injected, Sink, Source, Sources, Stop};
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::{Outcome, Value};
use posthaste_core::wire;
use posthaste_core::{Descriptor, Endpoint, Fault, JobShape, Loan, ProtocolId, Ticket};
use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Waiting bytes that are worth a system call.
const WORTH_WRITING: usize = 32 << 10;
/// A lent payload from this length on is taken only if it can be written at once: the caller has a way of keeping it
/// that needs no copy.
const LONG: usize = 16 << 10;
/// Packets that a rank may have on their way to itself.
const LOCAL_PACKETS: usize = 1024;
/// Runs of puts of memory that is not there, of which a peer is still to be told.
const MOST_ABSENT: usize = 1024;

/// A packet on its way to its own sender.
pub(crate) struct Transit {
    pub protocol: ProtocolId,
    pub kind: u8,
    pub cookie: u64,
    pub info: Info,
    pub bytes: Bytes,
}

/// The sending half.
pub(crate) struct Tx {
    pub hub: Arc<Hub>,
    pub me: Endpoint,
    index: usize,
    pub shape: JobShape,
    pub links: Vec<Option<Box<TxLink>>>,
    /// Packets to this endpoint itself.
    pub local: VecDeque<Transit>,
    local_bytes: usize,
    /// Ends that are reported at the next `advance`.
    pub ended: Vec<(Ticket, Outcome)>,
    /// Links with something to do at the next `advance`.
    touched: Vec<usize>,
    /// Inside `advance`, which writes at its end.
    pub advancing: bool,
    /// The driver was woken since the last `advance` to write what was left.
    pub rung: bool,
}

/// Where the bytes of an answer go.
pub(crate) enum Destination {
    /// All of the answer, and short: it is handed to [`Tx::answered`] where it is.
    Short,
    /// To be appended to these, which hold what has come before, and handed to [`Tx::answered`].
    Bytes(Vec<u8>),
    /// There.
    Region(SharedSlice),
}

/// A descriptor that no correct caller injects.
#[cold]
fn defect(descriptor: &Descriptor) -> Stop {
    debug_assert!(false, "impossible descriptor: {descriptor:?}");
    Stop::Fault(Fault::PeerLost(descriptor.rank))
}

fn payload<'a>(descriptor: &'a Descriptor, sources: &'a Sources<'_>) -> Result<Payload<'a>, Stop> {
    if descriptor.source_kind == SourceKind::Held {
        let held = sources.table.held.get(descriptor.source[0] as usize);
        let first = descriptor.source[1] as usize;
        let end = first.checked_add(descriptor.len as usize);
        return match (held, end) {
            (Some(bytes), Some(end)) if end <= bytes.len() => Ok(Payload::Held(bytes.slice(first..end))),
            _ => Err(defect(descriptor)),
        };
    }
    match sources.resolve(descriptor) {
        Some(Source::Private(bytes)) => Ok(Payload::Private(bytes)),
        Some(Source::Shared(slice)) => Ok(Payload::Shared(slice)),
        Some(Source::Loan(..)) | None => Err(defect(descriptor)),
    }
}

impl Tx {
    pub fn new(hub: Arc<Hub>, me: Endpoint) -> Tx {
        let shape = hub.shape;
        Tx {
            index: shape.index(me),
            links: (0..shape.endpoints()).map(|_| None).collect(),
            shape,
            me,
            hub,
            local: VecDeque::new(),
            local_bytes: 0,
            ended: Vec::new(),
            touched: Vec::new(),
            advancing: false,
            rung: false,
        }
    }

    /// A connection was settled.
    pub fn settle(&mut self, index: usize, stream: Arc<TcpStream>, key: Option<RecordKey>) {
        let peer = self.shape.endpoint(index);
        let link = self.links[index].get_or_insert_with(|| Box::new(TxLink::new(peer)));
        if link.dead.is_some() {
            return;
        }
        link.stream = Some(stream);
        link.key = key;
        self.touch(index);
    }

    /// A peer's connection has ended, or its rank is gone: nothing is sent to it any more.
    pub fn kill(&mut self, index: usize, fault: Fault) {
        let peer = self.shape.endpoint(index);
        let link = self.links[index].get_or_insert_with(|| Box::new(TxLink::new(peer)));
        let fault = link.dead.unwrap_or(fault);
        // The engine ends the operations.
        **link = TxLink { dead: Some(fault), touched: link.touched, ..TxLink::new(peer) };
    }

    /// The peer was started again: nothing is known of it.
    pub fn forget(&mut self, index: usize) {
        self.links[index] = None;
        self.touched.retain(|&touched| touched != index);
    }

    pub fn touch(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index]
            && !link.touched
        {
            link.touched = true;
            self.touched.push(index);
        }
    }

    /// The link to a peer, asking for a connection at the first time.
    #[inline]
    fn link(&mut self, index: usize, descriptor: &Descriptor) -> Result<&mut TxLink, Stop> {
        if self.links.get(index).is_none_or(Option::is_none) {
            self.open_link(index, descriptor)?;
        }
        match &mut self.links[index] {
            Some(link) => match link.dead {
                None if link.leave == Leave::No => {
                    link.quiet = 0;
                    Ok(link)
                }
                // Nothing follows the last frame.
                None => Err(Stop::Fault(Fault::Shutdown)),
                Some(fault) => Err(Stop::Fault(fault)),
            },
            None => Err(Stop::Full),
        }
    }

    #[cold]
    fn open_link(&mut self, index: usize, descriptor: &Descriptor) -> Result<(), Stop> {
        if index >= self.links.len() {
            return Err(defect(descriptor));
        }
        let peer = self.shape.endpoint(index);
        self.hub.want(self.me.context, peer).map_err(Stop::Fault)?;
        tracing::debug!(me = %self.me, %peer, "connecting");
        self.links[index] = Some(Box::new(TxLink::new(peer)));
        Ok(())
    }

    /// `Ok(true)`: complete. `Ok(false)`: its end will be reported, if it has a ticket.
    #[inline]
    fn one(&mut self, descriptor: &Descriptor, sources: &Sources<'_>, alone: bool) -> Result<bool, Stop> {
        match descriptor.op {
            Op::Send => self.send(descriptor, sources, alone),
            Op::Nop => Ok(true),
            Op::Put if descriptor.rank == self.me.rank => self.put_here(descriptor, sources),
            Op::Get if descriptor.rank == self.me.rank => self.get_here(descriptor, sources),
            Op::Put => self.put(descriptor, sources).map(|()| false),
            Op::Get => self.get(descriptor, sources).map(|()| false),
            Op::Atomic | Op::Jump => Err(defect(descriptor)),
        }
    }

    #[inline]
    fn send(&mut self, descriptor: &Descriptor, sources: &Sources<'_>, alone: bool) -> Result<bool, Stop> {
        let index = self.shape.index(descriptor.target());
        if index == self.index {
            return self.send_here(descriptor, sources).map(|()| true);
        }
        let info: &[u8] = if descriptor.info_len == 0 { &[] } else { sources.info };
        let (limit, max_eager) = (self.hub.limits.outgoing, self.hub.limits.max_eager);
        let len = descriptor.len as usize;
        if descriptor.kind >= CONTROL || len > max_eager || info.len() != usize::from(descriptor.info_len) {
            return Err(defect(descriptor));
        }
        let advancing = self.advancing;
        let link = self.link(index, descriptor)?;
        let waiting = link.out.len();
        let tight = waiting > 0 && waiting + HEADER + info.len() + len > limit;
        // A put that is not all under way precedes it; a get precedes what changes memory.
        let blocked = match link.job {
            None => false,
            Some(Job::Put { .. }) => true,
            Some(Job::Get { .. }) => matches!(descriptor.protocol.0, wire::PUT | wire::GET),
        };
        let lent = len >= LONG && descriptor.source_kind == SourceKind::Borrowed;
        if tight || blocked || lent {
            if !blocked && waiting > 0 && !link.blocked {
                link.flush(&[]);
            }
            let waiting = link.out.len();
            let tight = waiting > 0 && waiting + HEADER + info.len() + len > limit;
            if tight || blocked || (lent && (waiting > 0 || advancing)) {
                link.wanted = true;
                self.touch(index);
                return Err(Stop::Full);
            }
        }
        let header = Header {
            len: (len as u32).into(),
            kind: descriptor.kind,
            info: descriptor.info_len,
            protocol: descriptor.protocol.0.into(),
            word: descriptor.cookie.into(),
        };
        if descriptor.source_kind == SourceKind::Inline {
            let small = link.out.small();
            small.extend_from_slice(header.as_bytes());
            small.extend_from_slice(info);
            small.extend_from_slice(descriptor.inline_bytes());
        } else {
            let payload = payload(descriptor, sources)?;
            let small = link.out.small();
            small.extend_from_slice(header.as_bytes());
            small.extend_from_slice(info);
            match payload {
                Payload::Private(bytes) if lent && link.can_write() => {
                    let written = link.flush(bytes);
                    // What the kernel had no room for is all that is copied.
                    link.push_payload(Payload::Private(&bytes[written..]));
                }
                payload => link.push_payload(payload),
            }
        }
        if descriptor.ticket != 0 && (!alone || link.puts > link.puts_done || !link.gets.is_empty()) {
            // The last of a recorded run ends when what precedes it has ended, too.
            link.mark(descriptor.ticket);
            self.settle_markers(index);
            return Ok(false);
        }
        Ok(true)
    }

    /// Reports what has ended already; the port is not in `advance`, or would do it there.
    fn settle_markers(&mut self, index: usize) {
        let Some(link) = &mut self.links[index] else { return };
        while let Some(marker) = link.markers.front() {
            if marker.puts > link.puts_done || marker.gets > link.gets_answered {
                return;
            }
            let Some(marker) = link.markers.pop_front() else { return };
            let rank = link.peer.rank;
            self.ended.push((marker.ticket, link.outcome(&marker, rank)));
        }
    }

    fn send_here(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let info = Info::new(if descriptor.info_len == 0 { &[] } else { sources.info });
        let Some(info) = info else { return Err(defect(descriptor)) };
        let limit = self.hub.limits.outgoing;
        let cost = HEADER + descriptor.len as usize;
        let full = self.local.len() >= LOCAL_PACKETS || self.local_bytes + cost > limit;
        if full && !self.local.is_empty() {
            return Err(Stop::Full);
        }
        let bytes = match payload(descriptor, sources)? {
            Payload::Private(bytes) => Bytes::copy_from_slice(bytes),
            Payload::Held(bytes) => bytes,
            Payload::Shared(slice) => Bytes::from(slice.to_vec()),
        };
        self.local_bytes += cost;
        let Descriptor { protocol, kind, cookie, .. } = *descriptor;
        self.local.push_back(Transit { protocol, kind, cookie, info, bytes });
        Ok(())
    }

    /// A packet to this endpoint itself was taken.
    pub fn left_local(&mut self, transit: &Transit) {
        self.local_bytes -= HEADER + transit.bytes.len();
    }

    /// The target memory: its first byte as its owner names it.
    fn remote(&self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<u64, Stop> {
        let memory = sources.table.remote.get(descriptor.region as usize);
        memory
            .filter(|memory| memory.rank == descriptor.rank)
            .filter(|memory| descriptor.len <= memory.len && descriptor.offset <= memory.len - descriptor.len)
            .and_then(|memory| memory.offset.checked_add(descriptor.offset))
            .ok_or_else(|| defect(descriptor))
    }

    fn here(&self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<SharedSlice, Stop> {
        let offset = self.remote(descriptor, sources)?;
        let absent = Stop::Fault(Fault::NoSuchMemory(descriptor.rank));
        self.hub.home.slice(offset, descriptor.len).ok_or(absent)
    }

    fn put_here(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        let memory = self.here(descriptor, sources)?;
        match payload(descriptor, sources)? {
            Payload::Private(bytes) => memory.write(bytes),
            Payload::Held(bytes) => memory.write(&bytes),
            Payload::Shared(slice) => memory.copy_from(slice),
        }
        Ok(true)
    }

    fn get_here(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        let memory = self.here(descriptor, sources)?;
        if descriptor.source_kind == SourceKind::Inline {
            if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
                self.ended.push((ticket, Ok(Value::copy(&memory.to_vec()))));
            }
            return Ok(false);
        }
        match payload(descriptor, sources)? {
            Payload::Shared(slice) => slice.copy_from(memory),
            _ => return Err(defect(descriptor)),
        }
        Ok(true)
    }

    /// Whether there is room for one more put or get; what is too long for one go lets none pass.
    fn has_room(link: &mut TxLink, limit: usize, bytes: usize) -> bool {
        let fits = |link: &TxLink| link.out.is_empty() || link.out.len() + bytes <= limit;
        if link.job.is_none() && !fits(link) && !link.blocked {
            link.flush(&[]);
        }
        let room = link.job.is_none() && fits(link);
        link.wanted |= !room;
        room
    }

    fn put(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let offset = self.remote(descriptor, sources)?;
        let index = self.shape.index(descriptor.target());
        let limit = self.hub.limits.outgoing;
        let len = descriptor.len;
        let link = self.link(index, descriptor)?;
        if !Self::has_room(link, limit, HEADER + (len as usize).min(limit)) {
            self.touch(index);
            return Err(Stop::Full);
        }
        let payload = payload(descriptor, sources)?;
        let source = match payload {
            Payload::Shared(slice) if len > PIECE => Some(PutSource::Region(slice)),
            Payload::Held(ref bytes) if len > 1 << 30 => Some(PutSource::Held(bytes.clone())),
            _ => None,
        };
        match source {
            Some(source) => {
                link.job = Some(Job::Put { source, sent: 0, len, offset, ticket: descriptor.ticket });
                link.work(limit, 0, 0);
            }
            None => {
                let header = Header::control(PUT, payload.len(), offset);
                match payload {
                    Payload::Shared(memory) => link.push_memory(header, memory),
                    payload => {
                        link.out.small().extend_from_slice(header.as_bytes());
                        link.push_payload(payload);
                    }
                }
                link.puts += 1;
                link.mark(descriptor.ticket);
            }
        }
        Ok(())
    }

    fn get(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let offset = self.remote(descriptor, sources)?;
        let index = self.shape.index(descriptor.target());
        let limits = self.hub.limits;
        let into = if descriptor.source_kind == SourceKind::Inline {
            Landing::Value(Vec::new())
        } else {
            match payload(descriptor, sources)? {
                Payload::Shared(slice) => Landing::Region(slice),
                _ => return Err(defect(descriptor)),
            }
        };
        let link = self.link(index, descriptor)?;
        if !Self::has_room(link, limits.outgoing, HEADER + 8) {
            self.touch(index);
            return Err(Stop::Full);
        }
        let ticket = Ticket::from_word(descriptor.ticket);
        link.gets.push_back(Get { ticket, len: descriptor.len, received: 0, absent: false, into });
        link.gets_asked += 1;
        // A get of nothing is asked for, too: its answer says that what precedes it is done.
        link.job = Some(Job::Get { offset, left: descriptor.len });
        link.work(limits.outgoing, limits.get_chunk as u64, limits.get_window as u64);
        self.touch(index);
        Ok(())
    }

    /// The peer says that so many puts are done.
    pub fn done(&mut self, index: usize, count: u64) -> Result<(), Malformed> {
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        if count > link.puts || count < link.puts_done {
            return Err(Malformed::Unasked);
        }
        link.puts_done = count;
        self.settle_markers(index);
        Ok(())
    }

    /// The peer asks for memory: it is copied now, so that a put behind it cannot change the answer.
    pub fn answer(&mut self, index: usize, offset: u64, len: u64) -> Result<(), Malformed> {
        let limits = self.hub.limits;
        if len > limits.get_chunk as u64 {
            return Err(Malformed::Window);
        }
        let memory = self.hub.home.slice(offset, len);
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        if link.leave != Leave::No {
            // The peer is on the point of reading that this rank leaves, which ends its get.
            return Ok(());
        }
        while let Some(&(_, cost)) = link.answering.front().filter(|(end, _)| *end <= link.out.passed()) {
            link.answering_bytes -= cost;
            link.answering.pop_front();
        }
        // A correct peer asks for no more than it has room for, so that what is not even sent is less.
        let cost = len + GET_COST;
        if link.answering_bytes + cost > limits.get_window as u64 {
            return Err(Malformed::Window);
        }
        match memory {
            Some(memory) => {
                let header = Header::control(DATA, memory.len(), link.answers);
                link.push_memory(header, memory);
            }
            None => {
                let header = Header::control(NONE, 0, link.answers);
                link.out.small().extend_from_slice(header.as_bytes());
            }
        }
        link.answers += 1;
        link.answering_bytes += cost;
        link.answering.push_back((link.out.passed() + link.out.len() as u64, cost));
        self.touch(index);
        Ok(())
    }

    /// The next part of an answer is coming: where it goes.
    pub fn expect(&mut self, index: usize, part: u64, len: u64) -> Result<Destination, Malformed> {
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        let Some(get) = link.gets.front_mut() else { return Err(Malformed::Unasked) };
        let expected = (get.len - get.received).min(self.hub.limits.get_chunk as u64);
        if part != link.parts || len != expected || link.asked < len + GET_COST {
            return Err(Malformed::Unasked);
        }
        Ok(match &mut get.into {
            Landing::Value(_) if len == get.len && len <= self.hub.limits.max_inline as u64 => {
                Destination::Short
            }
            Landing::Value(so_far) => {
                if so_far.capacity() == 0 {
                    so_far.reserve_exact(get.len as usize);
                }
                Destination::Bytes(std::mem::take(so_far))
            }
            Landing::Region(slice) => match slice.slice(get.received, len) {
                Some(slice) => Destination::Region(slice),
                None => return Err(Malformed::Unasked),
            },
        })
    }

    /// That part has come. Returns what has ended with it.
    pub fn answered(&mut self, index: usize, part: AnswerPart<'_>, sink: &mut dyn Sink) {
        let Some(link) = &mut self.links[index] else { return };
        let Some(get) = link.gets.front_mut() else { return };
        let len = match &part {
            AnswerPart::Short(bytes) => bytes.len() as u64,
            AnswerPart::Long(bytes) => bytes.len() as u64 - get.received,
            AnswerPart::InPlace(len) => *len as u64,
        };
        link.parts += 1;
        link.asked -= len + GET_COST;
        get.received += len;
        let whole = get.received == get.len;
        let value = match part {
            AnswerPart::Short(bytes) => Value::copy(bytes),
            AnswerPart::Long(bytes) if whole => Value::Bytes(Bytes::from(bytes)),
            AnswerPart::Long(bytes) => {
                get.into = Landing::Value(bytes);
                Value::Unit
            }
            AnswerPart::InPlace(_) => Value::Unit,
        };
        if whole {
            self.got(index, value, sink);
        }
        // There is room in the window.
        self.touch(index);
    }

    /// The oldest get is answered in full.
    fn got(&mut self, index: usize, value: Value, sink: &mut dyn Sink) {
        let Some(link) = &mut self.links[index] else { return };
        let Some(Get { ticket, absent, .. }) = link.gets.pop_front() else { return };
        link.gets_answered += 1;
        let absent = absent.then_some(Fault::NoSuchMemory(link.peer.rank));
        if let Some(ticket) = ticket {
            sink.complete(ticket, absent.map_or(Ok(value), Err));
        }
        self.settle_markers(index);
    }

    /// The peer has not got the memory of the next part of an answer.
    pub fn unanswered(&mut self, index: usize, part: u64, sink: &mut dyn Sink) -> Result<(), Malformed> {
        let chunk = self.hub.limits.get_chunk as u64;
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        let Some(get) = link.gets.front_mut() else { return Err(Malformed::Unasked) };
        let len = (get.len - get.received).min(chunk);
        if part != link.parts || link.asked < len + GET_COST {
            return Err(Malformed::Unasked);
        }
        link.parts += 1;
        link.asked -= len + GET_COST;
        get.received += len;
        get.absent = true;
        if let Landing::Value(so_far) = &mut get.into {
            // What follows goes behind it.
            so_far.resize(get.received as usize, 0);
        }
        if get.received == get.len {
            self.got(index, Value::Unit, sink);
        }
        self.touch(index);
        Ok(())
    }

    /// The peer has not got the memory of some puts.
    pub fn absent_puts(&mut self, index: usize, first: u64, count: u64) -> Result<(), Malformed> {
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        let end = first.checked_add(count).filter(|end| count > 0 && *end <= link.puts);
        let least = link.lost.back().map_or(0, |(_, end)| *end).max(link.puts_done);
        match end {
            Some(end) if first >= least => link.lost.push_back((first, end)),
            _ => return Err(Malformed::Unasked),
        }
        Ok(())
    }

    /// Whether one more put of memory that is not there can be borne: a peer that does not listen is not told for ever.
    pub fn bears_absent(&self, index: usize) -> bool {
        self.links[index].as_ref().is_some_and(|link| link.absent.len() < MOST_ABSENT)
    }

    /// A put of memory that is not there is over.
    pub fn absent(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index] {
            match link.absent.last_mut() {
                Some((first, count)) if *first + *count == link.applied => *count += 1,
                _ => link.absent.push((link.applied, 1)),
            }
            link.applied += 1;
        }
        self.touch(index);
    }

    /// The peer's memory has taken one more put.
    pub fn applied(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index] {
            link.applied += 1;
        }
        self.touch(index);
    }

    /// Writes what waits, and goes on with what is too long for one go. Returns whether anything moved.
    pub fn flush_touched(&mut self) -> usize {
        let mut moved = 0;
        let limits = self.hub.limits;
        let mut at = 0;
        while at < self.touched.len() {
            let index = self.touched[at];
            let Some(link) = &mut self.links[index] else {
                self.touched.swap_remove(at);
                continue;
            };
            let before = link.out.len();
            let worked = link.work(limits.outgoing, limits.get_chunk as u64, limits.get_window as u64);
            if !link.is_flushed() {
                link.flush(&[]);
            }
            // A long put goes on as soon as there is room for its next piece.
            let mut again = worked;
            while again && !link.blocked && link.can_write() {
                again = link.work(limits.outgoing, limits.get_chunk as u64, limits.get_window as u64);
                if !link.is_flushed() {
                    link.flush(&[]);
                }
            }
            let room = link.out.len() < before || worked;
            if room && std::mem::take(&mut link.wanted) {
                moved += 1;
            }
            link.written = false;
            let stuck = matches!(link.job, Some(Job::Put { .. })) || !link.is_flushed();
            if stuck && link.dead.is_none() {
                at += 1;
            } else {
                link.touched = false;
                self.touched.swap_remove(at);
            }
        }
        moved
    }

    /// Whether something waits that could be written if it were tried.
    pub fn could_write(&self) -> bool {
        self.touched.iter().any(|&index| {
            self.links[index]
                .as_ref()
                .is_some_and(|link| link.can_write() && !link.blocked && !link.is_flushed())
        })
    }

    /// The kernel has room again.
    pub fn unblocked(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index]
            && link.blocked
        {
            link.blocked = false;
            self.touch(index);
        }
    }

    /// Whether the kernel has no room for what waits for a peer.
    pub fn is_blocked(&self, index: usize) -> bool {
        self.links[index].as_ref().is_some_and(|link| link.blocked)
    }

    /// The device closes: what is quiet and flushed is ended in order. Returns true when no link is left that has
    /// something to send.
    pub fn close(&mut self) -> bool {
        let mut closed = self.local.is_empty();
        for index in 0..self.links.len() {
            let Some(link) = &mut self.links[index] else { continue };
            if link.dead.is_some() {
                continue;
            }
            if link.stream.is_none() {
                // It is of use only if something waits for it.
                closed &= link.out.is_empty() && link.job.is_none();
                continue;
            }
            match link.leave {
                Leave::No => {
                    closed = false;
                    link.quiet = link.quiet.saturating_add(1);
                    let rank = self.hub.shape.endpoint(index).rank;
                    // What another context has sent there must not find the door closed.
                    let all_there = !self.hub.is_connecting_to(rank);
                    if link.quiet > 2 && link.is_flushed() && link.job.is_none() && all_there {
                        link.out.small().extend_from_slice(Header::control(LEAVE, 0, 0).as_bytes());
                        link.leave = Leave::Said;
                        self.touch(index);
                    }
                }
                Leave::Said if link.is_flushed() || link.broken => {
                    closed = false;
                    if let Some(stream) = &link.stream {
                        // A broken one needs no ending.
                        let _ = stream.shutdown(Shutdown::Write);
                    }
                    link.leave = Leave::Done;
                }
                // The peer ends its side when it has read that.
                Leave::Said | Leave::Done => closed = false,
            }
        }
        closed
    }

    /// Whether a link has come to its end as far as it can without its peer, or without room.
    pub fn can_close_more(&self) -> bool {
        self.links.iter().flatten().filter(|link| link.stream.is_some() && link.dead.is_none()).any(|link| {
            match link.leave {
                Leave::No => link.job.is_none() && (link.is_flushed() || !link.blocked),
                Leave::Said => link.is_flushed() || link.broken,
                Leave::Done => false,
            }
        })
    }

    /// Whether somebody who was refused would not be refused now. Said once.
    pub fn takes_again(&mut self) -> bool {
        let limit = self.hub.limits.outgoing;
        let mut takes = false;
        for link in self.links.iter_mut().flatten() {
            if link.wanted
                && link.job.is_none()
                && (link.out.is_empty() || link.out.len() < limit)
                && !link.blocked
            {
                link.wanted = false;
                takes = true;
            }
        }
        takes
    }

    /// Writes at once if the socket has nothing to do; a burst is left to the next `advance`, for which the driver is
    /// woken.
    #[inline]
    fn after(&mut self, index: usize) {
        let advancing = self.advancing;
        let own = !self.local.is_empty() || !self.ended.is_empty();
        if own && !advancing && !self.rung {
            self.rung = true;
            self.hub.door(self.me.context).bell.ring();
        }
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        if link.is_flushed() || !link.can_write() {
            return;
        }
        let worth = link.out.len() >= WORTH_WRITING;
        if !link.blocked && (worth || (!advancing && !link.written)) {
            link.written = true;
            link.flush(&[]);
        }
        self.touch(index);
        if !advancing && !self.rung {
            let idle = self.links[index].as_ref().is_none_or(|link| link.is_flushed() || link.blocked);
            if !idle {
                self.rung = true;
                self.hub.door(self.me.context).bell.ring();
            }
        }
    }
}

/// A part of an answer.
pub(crate) enum AnswerPart<'a> {
    /// All of it, in the read buffer.
    Short(&'a [u8]),
    /// What has come so far, this part at its end.
    Long(Vec<u8>),
    /// So many bytes, already where they belong.
    InPlace(usize),
}

impl Inject for Tx {
    #[inline]
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        let mut complete = true;
        let mut stop = Stop::Done;
        let mut taken = 0;
        let reported = self.ended.len();
        for descriptor in run {
            match self.one(descriptor, sources, run.len() == 1) {
                Ok(ended) => complete &= ended,
                Err(why) => {
                    stop = why;
                    break;
                }
            }
            taken += 1;
        }
        if let Some(first) = run.first() {
            let index = self.shape.index(first.target());
            self.after(index);
            if !complete && first.rank == self.me.rank {
                // Nobody will take the others for complete now: each ticket has to be reported.
                for descriptor in &run[..taken] {
                    if let Some(ticket) = Ticket::from_word(descriptor.ticket)
                        && !self.ended.iter().skip(reported).any(|(ended, _)| *ended == ticket)
                    {
                        self.ended.push((ticket, Ok(Value::Unit)));
                    }
                }
            }
        }
        Injected { taken, stop, complete }
    }

    fn loan(&mut self, _len: usize) -> Option<Loan> {
        None
    }
}
