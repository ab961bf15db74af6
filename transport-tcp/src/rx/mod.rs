//! The receiving half of a port: from bytes to frames, and from frames to the sink and to memory.

mod buffer;
mod fill;
mod flow;

use crate::config::Limits;
use crate::frame::{ABSENT, CONTROL, DATA, DONE, GET, HEADER, Header, LEAVE, Malformed, NONE, PUT};
use crate::link::RUN;
use crate::record::{MAX_PLAIN, OVERHEAD, RecordKey};
use crate::tx::{AnswerPart, Destination, Tx};
use buffer::Buffer;
use bytes::Bytes;
use fill::Fill;
use flow::{Flow, Pace};
use posthaste_core::descriptor::Info;
use posthaste_core::device::{Body, Packet, PacketHead, Sink, Verdict};
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Endpoint, Fault, ProtocolId};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Reads of one connection before another one gets its turn, and what is written is.
const READS: usize = 8;
/// Bytes of long payloads after which it is enough, too.
const SHARE: usize = 256 << 10;
/// What is asked for when long payloads come one after the other: the next header, so that its payload can be read
/// straight to where it belongs.
const PEEK: usize = 256;
/// What is read at a time if it goes to short slices: the kernel is slower with these than a copy out of a near cache is.
const HOT: usize = 64 << 10;
/// Payloads from this length on are worth a system call each.
const LONG: usize = 16 << 10;
/// How long a connection is left alone that has brought a part of a long payload and no more: each look costs both sides a good part
/// of what a segment does.
const REST_AMID: Duration = Duration::from_micros(20);
/// So much of a payload has to be missing for a rest in the midst of it: more than comes meanwhile.
const AMID: usize = 256 << 10;
/// Payloads of a row that have to be on their way then, so that nobody waits for word on them meanwhile.
const ROW: usize = 4;
/// Most bytes that are kept of a peer that has ended while a packet of it was held.
const LAST_WORDS: usize = 64 << 20;

/// A long message that is all there and was not taken.
struct Parked {
    header: Header,
    info: Info,
    bytes: Bytes,
}

/// What comes from one peer.
pub(crate) struct RxLink {
    pub stream: Arc<TcpStream>,
    source: Endpoint,
    /// Which incarnation of its rank the source is.
    pub incarnation: u64,
    key: Option<RecordKey>,
    /// Records that are not opened yet.
    cipher: Buffer,
    plain: Buffer,
    fill: Option<Fill>,
    parked: Option<Parked>,
    /// There may be something to read, or to parse.
    pub ready: bool,
    /// The sink does not want the next packet yet.
    pub held: bool,
    /// The other side has ended its stream, or the connection is broken.
    pub ended: bool,
    /// The sink was told so.
    ends: bool,
    /// The error with which the connection broke, if it did.
    pub broken: Option<ErrorKind>,
    /// It has said that nothing follows.
    left: bool,
    /// The last payload was a long one.
    long: bool,
    /// So many puts or answers preceded the last one of which nobody had heard when it was sent, or are to follow it; of
    /// messages, so many as are worth a rest if they come as a stream.
    row: usize,
    /// Long messages one behind the other.
    flow: Flow,
    pace: Pace,
    /// It is left alone until then.
    rests_until: Option<Instant>,
}

/// How far parsing got.
enum Parsed {
    /// More bytes are needed.
    More,
    /// The sink wants to see the packet again later.
    Held,
    /// It was enough for now.
    Enough,
}

enum Pulled {
    /// So many bytes came; `true`: there is no more now.
    Some(usize, bool),
    Nothing,
    /// The end of the stream, or a broken connection.
    End,
}

impl RxLink {
    pub fn new(stream: Arc<TcpStream>, source: Endpoint, incarnation: u64, key: Option<RecordKey>) -> RxLink {
        RxLink {
            stream,
            source,
            incarnation,
            key,
            cipher: Buffer::default(),
            plain: Buffer::default(),
            fill: None,
            parked: None,
            ready: true,
            held: false,
            ended: false,
            ends: false,
            broken: None,
            left: false,
            long: false,
            row: 0,
            flow: Flow::default(),
            pace: Pace::default(),
            rests_until: None,
        }
    }

    /// Takes what has come, up to `budget` packets. `Err`: the connection is over.
    pub fn drain(
        &mut self,
        index: usize,
        budget: usize,
        patient: bool,
        tx: &mut Tx,
        sink: &mut dyn Sink,
        spare: &mut Vec<Vec<u8>>,
    ) -> (usize, Option<End>) {
        let mut events = 0;
        let (mut reads, mut bytes) = (0, 0);
        let mut rested = false;
        if let Some(until) = self.rests_until {
            if patient && !self.ended && Instant::now() < until {
                // Nobody goes to sleep meanwhile.
                self.ready = true;
                return (0, None);
            }
            self.rests_until = None;
            rested = true;
        }
        let (mut moved, mut dry) = (false, false);
        if self.plain.bytes.is_empty()
            && let Some(bytes) = spare.pop()
        {
            self.plain.bytes = bytes;
        }
        if self.key.is_some()
            && self.cipher.bytes.is_empty()
            && let Some(bytes) = spare.pop()
        {
            self.cipher.bytes = bytes;
        }
        let end = loop {
            match self.parse(index, budget, &mut events, tx, sink) {
                Err(malformed) => break Some(End::Malformed(malformed)),
                Ok(Parsed::Enough) => {
                    self.ready = true;
                    break None;
                }
                Ok(Parsed::Held) if self.ended && !self.ends => {
                    // It has ended in order, perhaps, and what it has said counts.
                    self.ends = true;
                    sink.ends(self.source);
                    continue;
                }
                Ok(Parsed::Held) => {
                    self.held = true;
                    self.ready = false;
                    // What is behind it stays where it is, unless this was all.
                    break if self.ended { self.last_words(&tx.hub.limits) } else { None };
                }
                // What came meanwhile was not looked at, and is not told of again.
                Ok(Parsed::More) => self.ready |= std::mem::take(&mut self.held),
            }
            if reads == READS {
                // What was fetched and not opened yet, nobody tells of again.
                self.ready |= !dry;
                break None;
            }
            reads += 1;
            match self.pull(&tx.hub.limits) {
                Ok(Pulled::Some(count, last)) => {
                    moved = true;
                    bytes += count;
                    if last && !self.ended {
                        dry = true;
                        reads = READS;
                        self.ready = false;
                    } else if bytes >= SHARE {
                        reads = READS;
                    }
                }
                Ok(Pulled::Nothing) => {
                    dry = true;
                    self.ready = false;
                    break None;
                }
                Ok(Pulled::End) => break Some(self.end()),
                Err(malformed) => break Some(End::Malformed(malformed)),
            }
        };
        if rested && !moved {
            self.flow.dries();
            self.pace.pause();
            self.row = 0;
        }
        if self.long {
            self.pace.come(events);
        }
        let in_row = !self.ready && self.is_in_row(events);
        if patient && !self.held {
            if in_row {
                self.rests_until = Some(self.pace.rest(Instant::now()));
            } else if dry && moved && self.is_amid(index, tx) {
                self.rests_until = Some(Instant::now() + REST_AMID);
            }
        }
        for buffer in [&mut self.plain, &mut self.cipher] {
            if buffer.len() == 0 && buffer.bytes.len() > PEEK && spare.len() < 4 {
                spare.push(std::mem::take(buffer).bytes);
            }
        }
        // A piece of a long payload is an event: who waits for the whole of it must not give up looking meanwhile.
        (events.max(usize::from(moved)), end)
    }

    /// The last payload was one of many on their way.
    fn is_in_row(&self, events: usize) -> bool {
        self.long && events > 0 && self.row >= ROW
    }

    /// Much is missing of a payload, or of the get that it is a part of, and what comes during a rest has room in the kernel.
    /// Of one that goes to many short places this side is the one that is waited for.
    fn is_amid(&self, index: usize, tx: &Tx) -> bool {
        let Some(fill) = self.fill.as_ref().filter(|fill| !fill.is_scattered()) else { return false };
        let behind = if fill.is_answer() { tx.behind_part(index) } else { 0 };
        fill.missing() + behind >= AMID && tx.hub.limits.socket_buffers.is_none_or(|bytes| bytes >= AMID)
    }

    fn end(&self) -> End {
        let whole = self.plain.len() == 0 && self.cipher.len() == 0 && self.fill.is_none();
        let left = self.left && whole;
        End::Fault(if left { Fault::PeerClosed(self.source.rank) } else { Fault::PeerLost(self.source.rank) })
    }

    /// The peer has ended while a packet is held: whether it has left in order is said by its last frame.
    fn last_words(&mut self, limits: &Limits) -> Option<End> {
        // All of it is read now, whatever the packets are: not a header at a time.
        self.long = false;
        loop {
            let before = self.plain.len();
            if before > LAST_WORDS {
                return Some(End::Fault(Fault::PeerLost(self.source.rank)));
            }
            let mut behind = std::mem::take(&mut self.plain);
            let pulled = self.pull(limits);
            behind.append(self.plain.data());
            self.plain = behind;
            match pulled {
                Ok(Pulled::Some(..)) => {}
                Ok(Pulled::Nothing) => return None,
                Ok(Pulled::End) => {
                    self.left |= self.plain.data().ends_with(Header::control(LEAVE, 0, 0).as_bytes());
                    return Some(End::Fault(if self.left {
                        Fault::PeerClosed(self.source.rank)
                    } else {
                        Fault::PeerLost(self.source.rank)
                    }));
                }
                Err(malformed) => return Some(End::Malformed(malformed)),
            }
        }
    }

    /// Reads what the kernel has, once.
    fn pull(&mut self, limits: &Limits) -> Result<Pulled, Malformed> {
        if self.key.is_some() {
            return self.pull_records(limits);
        }
        if self.plain.len() == 0
            && let Some(fill) = &mut self.fill
            && let Some((asked, behind)) = fill.direct()
        {
            let read = fill.read(&mut self.plain.room(limits.read_buffer)[..behind], &self.stream);
            if let Ok(count) = read {
                self.plain.end = count.saturating_sub(asked);
            }
            return Ok(pulled(read, asked + behind, &mut self.broken));
        }
        let room = self.plain.room(limits.read_buffer);
        let most = match &self.fill {
            None if self.long => PEEK,
            Some(Fill::Placed { missing, .. }) => HOT.min(missing + PEEK),
            _ => usize::MAX,
        };
        let asked = most.min(room.len());
        let read = (&*self.stream).read(&mut room[..asked]);
        if let Ok(count) = read {
            self.plain.end += count;
        }
        Ok(pulled(read, asked, &mut self.broken))
    }

    /// Reads records, and opens one of them.
    fn pull_records(&mut self, limits: &Limits) -> Result<Pulled, Malformed> {
        let Some(key) = &mut self.key else { return Ok(Pulled::Nothing) };
        let mut pulled_now = Pulled::Some(0, false);
        loop {
            let (start, end) = (self.cipher.start, self.cipher.end);
            if let Some((range, total)) = key.open(&mut self.cipher.bytes[start..end])? {
                let record = &self.cipher.bytes[start + range.start..start + range.end];
                let mut taken = 0;
                if self.plain.len() == 0
                    && let Some(fill) = &mut self.fill
                {
                    taken = fill.take(record);
                }
                self.plain.append(&record[taken..]);
                self.cipher.consume(total);
                // There may be more records, so that it is not dry in any case.
                return Ok(Pulled::Some(0, false));
            }
            match pulled_now {
                Pulled::Some(_, false) => {}
                other => return Ok(other),
            }
            let room = self.cipher.room(limits.read_buffer.max(4 * (MAX_PLAIN + OVERHEAD)));
            let asked = room.len();
            let read = (&*self.stream).read(room);
            if let Ok(count) = read {
                self.cipher.end += count;
            }
            pulled_now = pulled(read, asked, &mut self.broken);
            if !matches!(pulled_now, Pulled::Some(..)) {
                return Ok(pulled_now);
            }
        }
    }

    fn parse(
        &mut self,
        index: usize,
        budget: usize,
        events: &mut usize,
        tx: &mut Tx,
        sink: &mut dyn Sink,
    ) -> Result<Parsed, Malformed> {
        loop {
            if let Some(parked) = &self.parked {
                if offer(self.source, parked, tx, sink) == Verdict::Hold {
                    return Ok(Parsed::Held);
                }
                *events += 1;
                self.parked = None;
            }
            if *events >= budget {
                return Ok(Parsed::Enough);
            }
            if let Some(fill) = &mut self.fill {
                let count = fill.take(self.plain.data());
                self.plain.consume(count);
                if fill.missing() > 0 {
                    posthaste_core::failpoint!("tcp.payload.part");
                    return Ok(Parsed::More);
                }
                if let Some(fill) = self.fill.take() {
                    *events += self.filled(fill, index, tx, sink);
                }
                continue;
            }
            let data = &self.plain.bytes[self.plain.start..self.plain.end];
            let Ok((header, rest)) = Header::read_from_prefix(data) else { return Ok(Parsed::More) };
            header.check(&tx.hub.limits)?;
            if self.left {
                return Err(Malformed::AfterEnd);
            }
            let len = header.len.get() as usize;
            if header.kind < CONTROL {
                let info = usize::from(header.info);
                let short = len <= tx.hub.limits.max_inline;
                if rest.len() < info + if short { len } else { 0 } {
                    // Of a long one it is the info that is missing.
                    self.long = len >= LONG;
                    return Ok(Parsed::More);
                }
                if short {
                    let mut packet = Packet {
                        source: self.source,
                        protocol: ProtocolId(header.protocol.get()),
                        kind: header.kind,
                        cookie: header.word.get(),
                        info: &rest[..info],
                        body: Body::Short(&rest[info..info + len]),
                    };
                    if sink.packet(tx, &mut packet) == Verdict::Hold {
                        return Ok(Parsed::Held);
                    }
                    *events += 1;
                    self.long = false;
                    self.plain.consume(HEADER + info + len);
                    continue;
                }
                let info = Info::new(&rest[..info]).ok_or(Malformed::Info(header.info))?;
                self.plain.consume(HEADER + usize::from(header.info));
                self.long = len >= LONG;
                self.row = if self.long && self.flow.goes_on(tx.said(index)) { ROW } else { 0 };
                let named = if self.long { sink.place(&head(self.source, &header, &info)) } else { None };
                self.fill = Some(match named {
                    Some(slices) if slices.iter().map(SharedSlice::len).sum::<usize>() == len => {
                        Fill::Placed { header, info, slices, full: 0, missing: len }
                    }
                    _ => Fill::Message { header, info, bytes: Vec::with_capacity(len), len },
                });
                continue;
            }
            if !matches!(header.kind, PUT | DATA) {
                // What came of a row before it is no reason to expect more.
                self.row = 0;
            }
            match header.kind {
                PUT => {
                    let fill = match tx.hub.home.slice(header.word.get(), len as u64) {
                        Some(memory) => Fill::Memory { memory, at: 0, put: true },
                        None if tx.bears_absent(index) => Fill::Absent { left: len },
                        None => return Err(Malformed::Memory),
                    };
                    self.long = len >= LONG;
                    self.row = usize::from(header.protocol.get());
                    self.plain.consume(HEADER);
                    self.fill = Some(fill);
                }
                DATA => {
                    let destination = tx.expect(index, header.word.get(), len as u64)?;
                    self.long = len >= LONG;
                    self.row = tx.outstanding(index);
                    match destination {
                        Destination::Short if len <= rest.len() => {
                            self.traced("answer received", tx, len);
                            tx.answered(index, AnswerPart::Short(&rest[..len]), sink);
                            *events += 1;
                            self.plain.consume(HEADER + len);
                        }
                        // It is short: soon it will be all there.
                        Destination::Short => return Ok(Parsed::More),
                        Destination::Bytes(bytes) => {
                            self.plain.consume(HEADER);
                            let len = bytes.len() + len;
                            self.fill = Some(Fill::Answer { bytes, len });
                        }
                        Destination::Region(memory) => {
                            self.plain.consume(HEADER);
                            self.fill = Some(Fill::Memory { memory, at: 0, put: false });
                        }
                    }
                }
                GET => {
                    let mut places = [(0, 0); RUN];
                    let count = asked_for(data, &tx.hub.limits, &mut places[..RUN.min(budget - *events)]);
                    if count == 0 {
                        self.long = false;
                        return Ok(Parsed::More);
                    }
                    tx.answer(index, &places[..count])?;
                    for (_, len) in &places[..count] {
                        self.traced("get received", tx, *len as usize);
                    }
                    self.plain.consume(count * (HEADER + 8));
                    *events += count;
                }
                DONE => {
                    tx.done(index, header.word.get())?;
                    self.plain.consume(HEADER);
                    *events += 1;
                }
                ABSENT => {
                    let Some(count) = rest.first_chunk::<8>() else {
                        self.long = false;
                        return Ok(Parsed::More);
                    };
                    tx.absent_puts(index, header.word.get(), u64::from_le_bytes(*count))?;
                    self.plain.consume(HEADER + 8);
                    *events += 1;
                }
                NONE => {
                    tx.unanswered(index, header.word.get(), sink)?;
                    self.plain.consume(HEADER);
                    *events += 1;
                }
                LEAVE => {
                    self.left = true;
                    self.plain.consume(HEADER);
                }
                kind => return Err(Malformed::Kind(kind)),
            }
        }
    }

    /// An event for a frame of the device's own that has come, as there is one for each packet; nothing unless tracing is at that
    /// level. Bytes: what is moved, or asked for.
    #[inline]
    fn traced(&self, what: &str, tx: &Tx, bytes: usize) {
        if tracing::enabled!(tracing::Level::TRACE) {
            tracing::trace!(rank = %tx.me, peer = %self.source, bytes, "{what}");
        }
    }

    /// A payload is all there. Returns the number of events.
    fn filled(&mut self, fill: Fill, index: usize, tx: &mut Tx, sink: &mut dyn Sink) -> usize {
        posthaste_core::failpoint!("tcp.payload.whole");
        match fill {
            Fill::Message { header, info, bytes, .. } => {
                // It is offered at the next turn of the loop.
                self.parked = Some(Parked { header, info, bytes: Bytes::from(bytes) });
                0
            }
            Fill::Memory { memory, put: true, .. } => {
                self.traced("put received", tx, memory.len());
                tx.applied(index);
                1
            }
            Fill::Absent { .. } => {
                tx.absent(index);
                1
            }
            Fill::Placed { header, info, .. } => {
                sink.placed(tx, &head(self.source, &header, &info));
                1
            }
            Fill::Memory { memory, put: false, .. } => {
                self.traced("answer received", tx, memory.len());
                tx.answered(index, AnswerPart::InPlace(memory.len()), sink);
                1
            }
            Fill::Answer { bytes, .. } => {
                self.traced("answer received", tx, bytes.len());
                tx.answered(index, AnswerPart::Long(bytes), sink);
                1
            }
        }
    }
}

/// The gets at the start of what has come, one behind the other: places and lengths. Returns how many there are.
fn asked_for(mut data: &[u8], limits: &Limits, places: &mut [(u64, u64)]) -> usize {
    let mut count = 0;
    for place in places {
        let Ok((header, rest)) = Header::read_from_prefix(data) else { break };
        let Some((len, behind)) = rest.split_first_chunk::<8>() else { break };
        if header.kind != GET || header.check(limits).is_err() {
            break;
        }
        *place = (header.word.get(), u64::from_le_bytes(*len));
        data = behind;
        count += 1;
    }
    count
}

fn head<'a>(source: Endpoint, header: &Header, info: &'a Info) -> PacketHead<'a> {
    PacketHead {
        source,
        protocol: ProtocolId(header.protocol.get()),
        cookie: header.word.get(),
        info: info.as_bytes(),
        len: header.len.get() as usize,
    }
}

fn offer(source: Endpoint, parked: &Parked, tx: &mut Tx, sink: &mut dyn Sink) -> Verdict {
    let mut packet = Packet {
        source,
        protocol: ProtocolId(parked.header.protocol.get()),
        kind: parked.header.kind,
        cookie: parked.header.word.get(),
        info: parked.info.as_bytes(),
        body: Body::Owned(&parked.bytes),
    };
    sink.packet(tx, &mut packet)
}

/// How a connection ended.
pub(crate) enum End {
    Fault(Fault),
    Malformed(Malformed),
}

/// What a read came to; an error that ends the connection is left in `broken`.
fn pulled(read: std::io::Result<usize>, asked: usize, broken: &mut Option<ErrorKind>) -> Pulled {
    match read {
        Ok(0) => Pulled::End,
        Ok(count) => Pulled::Some(count, count < asked),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Pulled::Nothing,
        Err(error) if error.kind() == ErrorKind::Interrupted => Pulled::Some(0, false),
        Err(error) => {
            tracing::debug!(%error, "reading failed");
            *broken = Some(error.kind());
            Pulled::End
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::MAX_PUT;

    #[test]
    fn gets_that_lie_behind_each_other_are_answered_together() {
        let limits = Limits::default();
        let mut data = Vec::new();
        for (offset, len) in [(16u64, 100u64), (0, 0), (1 << 40, u64::MAX)] {
            data.extend_from_slice(Header::control(GET, 8, offset).as_bytes());
            data.extend_from_slice(&len.to_le_bytes());
        }
        let (three, get) = (data.len(), data.clone());
        data.extend_from_slice(Header::put(MAX_PUT as usize, 0, 0).as_bytes());
        data.extend_from_slice(&get);
        let mut places = [(9, 9); RUN];
        assert_eq!(asked_for(&data, &limits, &mut places), 3);
        assert_eq!(places[..4], [(16, 100), (0, 0), (1 << 40, u64::MAX), (9, 9)]);
        // No more than there is room for, and none that is not all there.
        assert_eq!(asked_for(&data, &limits, &mut places[..2]), 2);
        assert_eq!(asked_for(&data[..three - 1], &limits, &mut places), 2);
        assert_eq!(asked_for(&data[..HEADER + 7], &limits, &mut places), 0);
        assert_eq!(asked_for(&data[three..], &limits, &mut places), 0);
        assert_eq!(asked_for(&get.repeat(RUN), &limits, &mut places), RUN);
    }
}
