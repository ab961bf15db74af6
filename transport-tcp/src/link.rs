//! What goes to one peer: the bytes that wait, how they are written, and what was asked for.

use crate::frame::{ABSENT, DONE, GET, HEADER, Header, MAX_PUT};
use crate::ledger::Ledger;
use crate::outgoing::{GATHER, Outgoing};
use crate::record::{MAX_PLAIN, RecordKey};
use crate::tx::Answering;
use bytes::Bytes;
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Endpoint, Fault, Ticket};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::TcpStream;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Payloads up to this length are copied behind their header; longer ones are referred to, or written from where they
/// are.
const COPY: usize = 4 << 10;
/// The first length that is referred to.
pub(crate) const KEEPS: usize = COPY + 1;
/// What is read from shared memory at a time.
pub(crate) const PIECE: u64 = 256 << 10;
/// Frames with memory that are written at once.
pub(crate) const RUN: usize = 8;
#[cfg(all(unix, not(feature = "portable")))]
const _: () = assert!(RUN <= posthaste_core::memory::MOST_HEADED);
/// What an outstanding get counts for beyond its bytes.
pub(crate) const GET_COST: u64 = 64;
/// A get that is not answered.
pub(crate) struct Get {
    pub ticket: Option<Ticket>,
    /// What fails if it does.
    pub owner: Option<Ticket>,
    pub len: u64,
    pub received: u64,
    /// The target has not got some of the memory.
    pub absent: bool,
    pub into: Landing,
}

/// Where a get's bytes go.
pub(crate) enum Landing {
    Value(Vec<u8>),
    /// In memory that somebody may hold until the get is under way.
    Given(Bytes),
    Region(SharedSlice),
}

impl Landing {
    /// Takes up memory that was given, if nobody else holds it any more.
    pub fn settle(&mut self) {
        if let Landing::Given(memory) = self {
            let memory = std::mem::take(memory);
            *self = Landing::Value(if memory.is_unique() { memory.into() } else { Vec::new() });
        }
    }
}

/// Something too long for one go. Puts and gets behind it wait.
pub(crate) enum Job {
    Put {
        source: PutSource,
        sent: u64,
        len: u64,
        offset: u64,
        ticket: u64,
        owner: Option<Ticket>,
    },
    /// `waits`: the window was full, and nothing is asked for until half of it is free, so that what is asked for goes in
    /// few frames: to ask anew for each part that comes costs both sides much of what the part does.
    Get {
        offset: u64,
        left: u64,
        waits: bool,
    },
}

pub(crate) enum PutSource {
    Region(SharedSlice),
    Held(Bytes),
}

/// A part of it.
pub(crate) enum Piece {
    Memory(SharedSlice),
    Bytes(Bytes),
}

/// How far the end of a link has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    No,
    Said,
    Done,
}

/// What goes to one peer.
pub(crate) struct TxLink {
    pub peer: Endpoint,
    /// None: not settled yet.
    pub stream: Option<Arc<TcpStream>>,
    pub key: Option<RecordKey>,
    pub sealed: Vec<u8>,
    pub sealed_written: usize,
    pub out: Outgoing,
    /// Bytes that never were in it.
    pub direct: u64,
    /// The kernel has no room.
    pub blocked: bool,
    /// Writing failed; reading tells why.
    pub broken: bool,
    pub dead: Option<Fault>,
    pub touched: bool,
    /// Something was written since the last `advance`.
    pub written: bool,
    /// Something was refused for want of room.
    pub wanted: bool,
    /// This rank's puts and gets, and whose they are.
    pub ledger: Ledger,
    pub gets: VecDeque<Get>,
    /// Answers, in parts, that have come.
    pub parts: u64,
    /// What is asked for and not here.
    pub asked: u64,
    pub job: Option<Job>,
    /// Puts of the peer that were carried out, and of how many it was told.
    pub applied: u64,
    pub told: u64,
    /// Where in the stream the last word on them ends. There is one at most that waits: a peer that puts and does not
    /// listen is not told again and again.
    pub told_until: u64,
    /// Those of them that named memory which is not there, and the peer is to be told of: the first one, and how many.
    pub absent: Vec<(u64, u64)>,
    /// Of those that it has been told of, what is not with the kernel yet: how many, and where in the stream each word ends.
    pub telling: (usize, VecDeque<(u64, usize)>),
    /// Answers that were given to the peer's gets.
    pub answers: u64,
    /// Answers that are not written yet.
    pub answering: Answering,
    pub leave: Leave,
    /// Looks at it, in a row, between which nobody had anything for it.
    pub quiet: u8,
    /// Looks at it since this side closes.
    pub looks: u8,
    /// The last who had something for it was refused, and comes again.
    pub refused: bool,
}

impl TxLink {
    pub fn new(peer: Endpoint) -> Self {
        Self {
            peer,
            stream: None,
            key: None,
            sealed: Vec::new(),
            sealed_written: 0,
            out: Outgoing::default(),
            direct: 0,
            blocked: false,
            broken: false,
            dead: None,
            touched: false,
            written: false,
            wanted: false,
            ledger: Ledger::new(peer.rank),
            gets: VecDeque::new(),
            parts: 0,
            asked: 0,
            job: None,
            applied: 0,
            told: 0,
            told_until: 0,
            absent: Vec::new(),
            telling: (0, VecDeque::new()),
            answers: 0,
            answering: Answering::default(),
            leave: Leave::No,
            quiet: 0,
            looks: 0,
            refused: false,
        }
    }

    /// Whether everything that was taken is with the kernel.
    pub fn is_flushed(&self) -> bool {
        self.out.is_empty()
            && self.sealed_written == self.sealed.len()
            && (self.applied == self.told || self.leave != Leave::No)
    }

    pub fn can_write(&self) -> bool {
        self.stream.is_some() && !self.broken && self.dead.is_none()
    }

    /// Writes as much as the kernel takes of what waits, and of what the peer is to be told of its puts. What waits ends with a
    /// whole frame.
    pub fn flush(&mut self) {
        if !self.can_write() {
            return;
        }
        // After its last frame a rank confirms nothing: what the peer still puts ends with the connection.
        if self.leave == Leave::No && self.out.passed() >= self.told_until {
            self.confirm();
        }
        self.write(&[]);
    }

    /// What is to be said of the peer's puts joins what waits.
    pub fn confirm(&mut self) {
        if self.told == self.applied {
            return;
        }
        self.told = self.applied;
        let absent = self.absent.len();
        for (first, count) in std::mem::take(&mut self.absent) {
            self.out.small().extend_from_slice(Header::control(ABSENT, 8, first).as_bytes());
            self.out.small().extend_from_slice(&count.to_le_bytes());
        }
        self.out.small().extend_from_slice(Header::control(DONE, 0, self.applied).as_bytes());
        self.told_until = self.out.passed() + self.out.len() as u64;
        if absent > 0 {
            self.telling.0 += absent;
            self.telling.1.push_back((self.told_until, absent));
        }
        posthaste_core::failpoint!("tcp.done.due");
    }

    /// Puts of memory that is not there, in runs, of which the peer has yet to be told, or of which what it is told waits here.
    pub fn untold(&mut self) -> usize {
        let passed = self.out.passed();
        let (telling, words) = &mut self.telling;
        while let Some(&(until, absent)) = words.front()
            && until <= passed
        {
            words.pop_front();
            *telling -= absent;
        }
        self.absent.len() + *telling
    }

    /// Writes as much as the kernel takes of what waits, and of `last` after it, of which what waits may be the head: nothing
    /// gets in between. Returns how many bytes of `last` are with the kernel, or sealed.
    pub fn write(&mut self, last: &[u8]) -> usize {
        if !self.can_write() {
            return 0;
        }
        self.blocked = false;
        let Some(stream) = self.stream.clone() else { return 0 };
        let result = if self.key.is_some() {
            self.write_sealed(&stream, last)
        } else {
            self.write_plain(&stream, last)
        };
        match result {
            Ok(written) => written,
            Err(error) => {
                tracing::debug!(peer = %self.peer, %error, "writing failed");
                self.broken = true;
                let ended = [
                    ErrorKind::BrokenPipe,
                    ErrorKind::ConnectionReset,
                    ErrorKind::ConnectionAborted,
                    ErrorKind::NotConnected,
                ];
                if !ended.contains(&error.kind()) {
                    // What is no end of the connection would not be read as one: nothing more can be said over it.
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                }
                0
            }
        }
    }

    pub fn write_plain(&mut self, stream: &TcpStream, last: &[u8]) -> io::Result<usize> {
        let mut last_written = 0;
        loop {
            let waiting = self.out.len();
            if waiting == 0 && last_written == last.len() {
                return Ok(last_written);
            }
            let mut slices = [IoSlice::new(&[]); GATHER];
            let used = self.out.gather(&last[last_written..], &mut slices);
            let asked: usize = slices[..used].iter().map(|slice| slice.len()).sum();
            let mut stream = stream;
            let count = match stream.write_vectored(&slices[..used]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(last_written);
                }
                Err(error) => return Err(error),
            };
            self.out.consume(count.min(waiting));
            last_written += count.saturating_sub(waiting);
            posthaste_core::failpoint!("tcp.frames.written");
            if count < asked {
                // The kernel's buffer is full: asking once more would only be told so.
                posthaste_core::failpoint!("tcp.frames.part");
                self.blocked = true;
                return Ok(last_written);
            }
        }
    }

    pub fn write_sealed(&mut self, mut stream: &TcpStream, last: &[u8]) -> io::Result<usize> {
        let mut last_sealed = 0;
        loop {
            if self.sealed_written == self.sealed.len() {
                self.sealed.clear();
                self.sealed_written = 0;
                if self.out.is_empty() && last_sealed == last.len() {
                    return Ok(last_sealed);
                }
                // A few records per system call.
                while self.sealed.len() < 6 * MAX_PLAIN && !(self.out.is_empty() && last_sealed == last.len())
                {
                    let at = self.sealed.len();
                    self.sealed.extend_from_slice(&[0; 2]);
                    self.out.take(&mut self.sealed, MAX_PLAIN);
                    let room = MAX_PLAIN - (self.sealed.len() - at - 2);
                    let now = room.min(last.len() - last_sealed);
                    self.sealed.extend_from_slice(&last[last_sealed..last_sealed + now]);
                    last_sealed += now;
                    let sealed = self.key.as_mut().and_then(|key| key.seal(&mut self.sealed, at));
                    sealed.ok_or_else(|| io::Error::other("the cipher failed"))?;
                }
            }
            match stream.write(&self.sealed[self.sealed_written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sealed_written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(last_sealed);
                }
                Err(error) => return Err(error),
            }
        }
    }

    pub fn push_payload(&mut self, payload: Payload<'_>) {
        match payload {
            Payload::Private(bytes) if bytes.len() > COPY => {
                self.out.push_long(Bytes::copy_from_slice(bytes))
            }
            Payload::Private(bytes) => self.out.small().extend_from_slice(bytes),
            Payload::Held(bytes) if bytes.len() > COPY => self.out.push_long(bytes),
            Payload::Held(bytes) => self.out.small().extend_from_slice(&bytes),
            Payload::Shared(slice) => self.push_shared(slice),
        }
    }

    pub fn push_shared(&mut self, slice: SharedSlice) {
        if slice.len() > COPY {
            self.out.push_long(Bytes::from(slice.to_vec()));
        } else {
            slice.append_to(self.out.small());
        }
    }

    /// Appends headers, each with memory that peers may write meanwhile, up to [`RUN`] of them. What the kernel takes at once
    /// is not copied.
    pub fn push_memory(&mut self, frames: &[(Header, SharedSlice)]) {
        let long = frames.iter().any(|(_, memory)| memory.len() > COPY);
        if long && !self.is_flushed() && !self.blocked {
            self.flush();
        }
        let mut written = if long && self.is_flushed() && self.can_write() && self.key.is_none() {
            self.write_memory(frames)
        } else {
            0
        };
        self.direct += written as u64;
        for (header, memory) in frames {
            let head = written.min(HEADER);
            let body = (written - head).min(memory.len());
            written -= head + body;
            self.out.small().extend_from_slice(&header.as_bytes()[head..]);
            if let Some(rest) = memory.slice(body as u64, (memory.len() - body) as u64) {
                self.push_shared(rest);
            }
        }
    }

    /// Writes headers and memory straight from where they are; returns how much the kernel took.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn write_memory(&mut self, frames: &[(Header, SharedSlice)]) -> usize {
        let Some(stream) = &self.stream else { return 0 };
        let asked: usize = frames.iter().map(|(_, memory)| HEADER + memory.len()).sum();
        let parts = frames.iter().map(|(header, memory)| (header.as_bytes(), *memory));
        match posthaste_core::memory::write_headed(parts, &**stream) {
            Ok(count) => {
                posthaste_core::failpoint!("tcp.memory.written");
                self.blocked = count < asked;
                count
            }
            Err(error) => {
                // The next flush will meet it again.
                tracing::trace!(peer = %self.peer, %error, "not written at once");
                0
            }
        }
    }

    /// Memory that others may write is copied first.
    #[cfg(not(all(unix, not(feature = "portable"))))]
    pub fn write_memory(&mut self, _frames: &[(Header, SharedSlice)]) -> usize {
        0
    }

    /// Whether something of this side is not with the kernel yet that waits for nothing but room: the rest of a put that was too
    /// long for one go, too.
    pub fn owes(&self) -> bool {
        !self.is_flushed() || matches!(self.job, Some(Job::Put { .. }))
    }

    /// Goes on with what was too long for one go, as far as there is room; of memory by one piece only, however much the kernel
    /// takes. True if it went on.
    pub fn work(&mut self, limit: usize, chunk: u64, window: u64) -> bool {
        let mut moved = false;
        loop {
            match &mut self.job {
                None => return moved,
                Some(Job::Put { source, sent, len, offset, ticket, owner }) => {
                    if self.out.len() >= limit.max(1) {
                        return moved;
                    }
                    let now = match source {
                        PutSource::Region(_) => (*len - *sent).min(PIECE),
                        PutSource::Held(_) => (*len - *sent).min(u64::from(MAX_PUT)),
                    };
                    let header = Header::put(now as usize, *offset + *sent, self.ledger.puts_under_way());
                    let piece = match source {
                        PutSource::Region(slice) => slice.slice(*sent, now).map(Piece::Memory),
                        PutSource::Held(bytes) => {
                            Some(Piece::Bytes(bytes.slice(*sent as usize..(*sent + now) as usize)))
                        }
                    };
                    *sent += now;
                    let (last, owner) = ((sent == len).then_some(*ticket), *owner);
                    let is_memory = matches!(piece, Some(Piece::Memory(_)));
                    match piece {
                        Some(Piece::Memory(memory)) => self.push_memory(&[(header, memory)]),
                        Some(Piece::Bytes(bytes)) => {
                            self.out.small().extend_from_slice(header.as_bytes());
                            self.out.push_long(bytes);
                        }
                        // The source has the length of the put.
                        None => return moved,
                    }
                    self.ledger.put(owner);
                    if let Some(ticket) = last {
                        self.job = None;
                        self.ledger.mark(ticket);
                    }
                    if is_memory {
                        return true;
                    }
                }
                Some(Job::Get { offset, left, waits }) => {
                    let now = (*left).min(chunk);
                    *waits = self.asked + now + GET_COST > window || (*waits && self.asked > window / 2);
                    if *waits {
                        return moved;
                    }
                    let header = Header::control(GET, 8, *offset);
                    *offset += now;
                    *left -= now;
                    let end = *left == 0;
                    self.asked += now + GET_COST;
                    self.out.small().extend_from_slice(header.as_bytes());
                    self.out.small().extend_from_slice(&now.to_le_bytes());
                    if end {
                        self.job = None;
                    }
                }
            }
            moved = true;
        }
    }
}

/// A payload, and what may be done with it.
pub(crate) enum Payload<'a> {
    /// Lent for the call.
    Private(&'a [u8]),
    /// Shared: keeping it costs no copy.
    Held(Bytes),
    /// Memory that peers may write meanwhile.
    Shared(SharedSlice),
}

impl Payload<'_> {
    pub fn len(&self) -> usize {
        match self {
            Payload::Private(bytes) => bytes.len(),
            Payload::Held(bytes) => bytes.len(),
            Payload::Shared(slice) => slice.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use posthaste_core::{ContextId, Rank};
    use std::io::Read;
    use std::net::TcpListener;
    use zerocopy::FromBytes;

    /// A link, and the other end of its connection.
    fn linked() -> (TxLink, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let peer = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (stream, _) = listener.accept().expect("it has connected");
        stream.set_nonblocking(true).expect("a socket");
        let mut link = TxLink::new(Endpoint::new(Rank(1), ContextId(0)));
        link.stream = Some(Arc::new(stream));
        (link, peer)
    }

    #[test]
    fn parts_of_a_long_get_are_asked_for_by_the_half_window() {
        let mut link = TxLink::new(Endpoint::new(Rank(1), ContextId(0)));
        let (chunk, window) = (100, 8 * (100 + GET_COST));
        let asks = |link: &mut TxLink| {
            let before = link.out.len();
            link.work(usize::MAX, chunk, window);
            (link.out.len() - before) / (HEADER + 8)
        };
        link.job = Some(Job::Get { offset: 0, left: 1_950, waits: false });
        assert_eq!(asks(&mut link), 8);
        let mut rounds = Vec::new();
        // Twenty parts in all, the last one of 50 bytes; one after the other comes.
        for part in 0..20 {
            link.asked -= if part < 19 { chunk } else { 50 } + GET_COST;
            rounds.push(asks(&mut link));
        }
        assert_eq!(rounds, [0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(link.job.is_none() && link.asked == 0);
        // By default three parts have room in it; when two of them have come, two more are asked for together.
        let limits = Limits::default();
        let (chunk_of, window_of) = (limits.get_chunk as u64, limits.get_window as u64);
        link.job = Some(Job::Get { offset: 0, left: 7 * chunk_of, waits: false });
        let mut asked = Vec::new();
        for came in [0, 1, 1, 1, 1, 1, 1, 1] {
            link.asked -= came * (chunk_of + GET_COST);
            let before = link.out.len();
            link.work(usize::MAX, chunk_of, window_of);
            asked.push((link.out.len() - before) / (HEADER + 8));
        }
        assert_eq!((asked, link.asked), (vec![3, 0, 2, 0, 2, 0, 0, 0], 0));
        // A window of a single part is half free when it is free.
        link.job = Some(Job::Get { offset: 0, left: 300, waits: false });
        link.work(usize::MAX, chunk, chunk + GET_COST);
        let mut parts = 1;
        while link.asked > 0 {
            link.asked -= chunk + GET_COST;
            link.work(usize::MAX, chunk, chunk + GET_COST);
            parts += usize::from(link.asked > 0);
        }
        assert_eq!(parts, 3);
    }

    #[test]
    fn frames_with_memory_come_in_order_however_much_the_kernel_takes() {
        use posthaste_core::inprocess::Arena;
        let (mut link, mut peer) = linked();
        let arena = Arena::new(1, 32 << 20);
        let memory = arena.slice(Rank(0), 0, 32 << 20).expect("all of it");
        let bytes: Vec<u8> = (0..32 << 20).map(|at: usize| (at * 31 + at / 7919) as u8).collect();
        memory.write(&bytes);
        // Short and long ones, empty ones, more than the kernel has room for, and more when it has none.
        let runs = [&[100, 0, 5_000, 4_096][..], &[9 << 20; RUN], &[0, 70_000], &[1]];
        let (mut expected, mut at, mut number) = (Vec::new(), 0, 0);
        for lens in runs {
            let mut frames = Vec::new();
            for len in lens.iter().copied() {
                let header = Header::control(crate::frame::DATA, len, number);
                frames.push((header, memory.slice(at as u64, len as u64).expect("inside")));
                expected.extend_from_slice(header.as_bytes());
                expected.extend_from_slice(&bytes[at..at + len]);
                (at, number) = ((at + len / 3) % (20 << 20), number + 1);
            }
            link.push_memory(&frames);
        }
        assert!(link.blocked && !link.is_flushed());
        // What was not taken was copied.
        memory.write(&vec![0; 32 << 20]);
        let len = expected.len();
        peer.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("a socket");
        let reader = std::thread::spawn(move || {
            let mut all = vec![0; len];
            peer.read_exact(&mut all).map(|()| all).expect("nothing breaks")
        });
        while !link.is_flushed() {
            link.flush();
            std::thread::yield_now();
        }
        assert!(reader.join().expect("no panic") == expected, "a byte is at the wrong place");
    }

    #[test]
    fn a_long_put_goes_on_by_one_piece_at_a_time_however_much_the_kernel_takes() {
        use posthaste_core::inprocess::Arena;
        let (mut link, mut peer) = linked();
        let reader = std::thread::spawn(move || std::io::copy(&mut peer, &mut std::io::sink()));
        let (len, arena) = (3 * PIECE + 5, Arena::new(1, 1 << 20));
        let source = PutSource::Region(arena.slice(Rank(0), 0, len).expect("inside"));
        link.job = Some(Job::Put { source, sent: 0, len, offset: 0, ticket: 0, owner: None });
        for piece in 1..=4 {
            assert!(link.work(1 << 20, 0, 0) && link.ledger.puts_under_way() == piece, "piece {piece}");
            assert_eq!(link.job.is_some(), piece < 4);
            while !link.is_flushed() {
                link.flush();
                std::thread::yield_now();
            }
        }
        assert!(!link.work(1 << 20, 0, 0));
        drop(link);
        let read = reader.join().expect("no panic").expect("nothing breaks");
        assert_eq!(read, len + 4 * HEADER as u64);
    }

    #[test]
    fn a_confirmation_does_not_get_between_a_message_and_its_payload() {
        let (mut link, mut peer) = linked();
        link.applied = 7;
        let payload = [5; 100];
        let header = Header::control(crate::frame::DATA, payload.len(), 1);
        link.out.small().extend_from_slice(header.as_bytes());
        assert_eq!(link.write(&payload), payload.len());
        assert!(!link.is_flushed(), "the peer is still to be told");
        link.flush();
        assert!(link.is_flushed());
        let expected = [header.as_bytes(), &payload, Header::control(DONE, 0, 7).as_bytes()].concat();
        let mut all = vec![0; expected.len()];
        peer.read_exact(&mut all).expect("it is all there");
        assert_eq!(all, expected);
    }

    #[test]
    fn who_puts_and_does_not_listen_is_told_no_more_than_once_beyond_what_the_kernel_holds() {
        let (mut link, mut peer) = linked();
        // Something that the kernel has no room for, and then puts without end.
        link.out.push_long(Bytes::from(vec![0; 64 << 20]));
        link.flush();
        assert!(link.blocked);
        let waiting = link.out.len();
        for _ in 0..10_000 {
            link.absent.push((link.applied, 1));
            link.applied += 1;
            link.flush();
        }
        assert!(link.out.len() <= waiting + 2 * HEADER + 8, "{} bytes more", link.out.len() - waiting);
        // In the end it hears of all of them.
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            peer.read_to_end(&mut all).map(|_| all).expect("nothing breaks")
        });
        while !link.is_flushed() {
            link.flush();
            std::thread::yield_now();
        }
        let applied = link.applied;
        drop(link);
        let all = reader.join().expect("no panic");
        let mut news = &all[64 << 20..];
        let mut absent = 0;
        let mut done = 0;
        while let Ok((header, rest)) = Header::read_from_prefix(news) {
            news = match header.kind {
                ABSENT => {
                    assert_eq!(header.word.get(), absent);
                    absent += u64::from_le_bytes(*rest.first_chunk().expect("whole"));
                    &rest[8..]
                }
                _ => {
                    assert_eq!(header.kind, DONE);
                    done = header.word.get();
                    rest
                }
            };
        }
        assert_eq!((absent, done), (applied, applied));
    }
}
