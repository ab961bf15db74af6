//! The lane: a single-producer single-consumer ring of variable-size records, one per ordered pair of endpoints.
//!
//! ```text
//!  control page                                         ring
//!   word  0  state: 1 once the lane is open (writer)     +--------+--------+------+---------+---+--------+
//!   word  1  waiting: the writer wants to be rung        | header | cookie | info | payload | 0 | stale  |
//!   word 16  head: bytes consumed (reader)               +--------+--------+------+---------+---+--------+
//!   word 17  notify: the reader wants to be told          ^ written last, with release        ^ the writer
//!   word 64  return words of the page grants (reader)                                            zeroed it first
//! ```
//! A record's header is its publication flag. Before a header is published the writer zeroes the word *behind* the
//! record, so the reader never meets a stale header and never has to clear what it consumed: a lap of the ring
//! costs each line one transfer to the reader and one back. The reader returns credit (head) in quarters of the ring.
//!
//! ```text
//!  header   63        62..32     31..16     15..8      7..0
//!          +--------+----------+----------+----------+------+
//!          | cookie | length   | protocol | info len | kind |     kinds: 1 short, 2 page, 3 wrap, 4 batch
//!          +--------+----------+----------+----------+------+
//! ```

use crate::batch::MOST_BYTES;
use posthaste_core::MAX_INFO;
use posthaste_core::memory::Words;
use posthaste_core::sync::{Ordering, fence};

const STATE: usize = 0;
const WAITING: usize = 1;
const HEAD: usize = 16;
const NOTIFY: usize = 17;
const GRANTS: usize = 64;

/// Page grants that a lane can have outstanding: their return words fill the control page.
#[cfg(not(posthaste_loom))]
pub const GRANT_COUNT: usize = 448;
/// loom has to look at every word.
#[cfg(posthaste_loom)]
pub const GRANT_COUNT: usize = 64;
/// Words of the control page that are used.
pub const CONTROL_WORDS: usize = GRANTS + GRANT_COUNT;

/// The payload is in the record.
pub const KIND_SHORT: u8 = 1;
/// The record names a page of the sender's pool.
pub const KIND_PAGE: u8 = 2;
const KIND_WRAP: u64 = 3;
/// The record names a page with several messages; its length is that of each.
pub const KIND_BATCH: u8 = 4;

/// The header of a record with a payload of one word and without info; the protocol and the cookie's bit are to be
/// added.
const WORD_HEADER: u64 = 8 << 32 | KIND_SHORT as u64;
/// The bits that are to be added.
const WORD_FREE_BITS: u64 = COOKIE_BIT | 0xffff << 16;
/// A cookie word follows the header.
const COOKIE_BIT: u64 = 1 << 63;

/// How the publishing side orders "record stored" before "does the reader want to be told?".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LightFence {
    /// The sleeper makes a barrier on all processors, so a compiler fence will do.
    Compiler,
    /// Both sides fence.
    Full,
}

impl LightFence {
    /// Keeps what follows from being done before what precedes.
    #[inline(always)]
    pub fn issue(self) {
        match self {
            #[cfg(not(posthaste_loom))]
            LightFence::Compiler => std::sync::atomic::compiler_fence(Ordering::SeqCst),
            // loom knows no barrier on another thread's behalf: it models both sides with fences.
            #[cfg(posthaste_loom)]
            LightFence::Compiler => fence(Ordering::SeqCst),
            LightFence::Full => fence(Ordering::SeqCst),
        }
    }
}

/// A record's header in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`KIND_SHORT`], [`KIND_PAGE`] or [`KIND_BATCH`].
    pub kind: u8,
    /// Bytes of message info, 0 to 112.
    pub info_len: u8,
    /// The sender's number of the protocol.
    pub protocol: u16,
    /// Payload bytes.
    pub len: u32,
    /// A cookie word follows.
    pub cookie: bool,
}

impl Header {
    #[inline]
    fn pack(self) -> u64 {
        u64::from(self.kind)
            | u64::from(self.info_len) << 8
            | u64::from(self.protocol) << 16
            | u64::from(self.len) << 32
            | u64::from(self.cookie) << 63
    }

    #[inline]
    fn unpack(word: u64) -> Header {
        Header {
            kind: word as u8,
            info_len: (word >> 8) as u8,
            protocol: (word >> 16) as u16,
            len: (word >> 32) as u32 & 0x7fff_ffff,
            cookie: word >> 63 != 0,
        }
    }

    /// Bytes of the whole record.
    #[inline]
    fn record_bytes(self) -> u64 {
        let body = match self.kind {
            KIND_SHORT => u64::from(self.len).next_multiple_of(8),
            KIND_BATCH => 24,
            _ => 16,
        };
        8 + 8 * u64::from(self.cookie) + u64::from(self.info_len).next_multiple_of(8) + body
    }
}

/// The longest payload that a record of a ring of `ring` bytes can carry, whatever its info and cookie: a record
/// takes at most a quarter of the ring, so that an empty ring always has room for one.
#[must_use]
pub const fn max_short(ring: u64) -> usize {
    let room = (ring as usize / 4).saturating_sub(16 + MAX_INFO);
    if room > 2048 { 2048 } else { room }
}

/// Bytes in pages after which the reader tells how far it is, however short their records are.
const PAGE_STRIDE: u64 = 64 << 10;

/// Words of a cache line.
const LINE_WORDS: usize = 8;

/// Records of one word that are published together, or taken together.
pub const WORD_GROUP: usize = 32;

/// The shortest ring that works, in bytes.
pub const MIN_RING: u64 = 1024;

/// The writing end.
#[derive(Debug)]
pub struct Producer<W> {
    control: W,
    ring: W,
    size: u64,
    /// Bytes ever written.
    tail: u64,
    /// The reader's head when it was last looked at.
    head: u64,
}

impl<W: Words> Producer<W> {
    /// The writing end of a fresh (zeroed) lane; nobody else may write to it. Opens the lane.
    pub fn open(control: W, ring: W) -> Self {
        let size = ring.words() as u64 * 8;
        debug_assert!(size.is_power_of_two() && size >= MIN_RING.min(size));
        // The reader does not poll a lane it has not heard of: it wants to be told.
        control.store(NOTIFY, 1, Ordering::Relaxed);
        // Release: whoever sees the lane open sees its words zero.
        control.store(STATE, 1, Ordering::Release);
        Self { control, ring, size, tail: 0, head: 0 }
    }

    /// Room for a record of `bytes` at the tail: where it starts. The reader's head is looked at only if the last
    /// known one is not enough.
    fn reserve(&mut self, bytes: u64) -> Option<u64> {
        let offset = self.tail & (self.size - 1);
        let skip = if offset + bytes > self.size { self.size - offset } else { 0 };
        // One word more for the zero behind the record.
        let needed = skip + bytes + 8;
        if self.tail + needed - self.head > self.size {
            // Acquire pairs with the release of `Consumer::publish`: the consumed bytes may be overwritten. A head that
            // makes no sense (a lying reader) is not taken over.
            let head = self.control.load(HEAD, Ordering::Acquire);
            if head > self.head && head <= self.tail {
                self.head = head;
            }
            if self.tail + needed - self.head > self.size {
                return None;
            }
        }
        Some(self.tail + skip)
    }

    #[inline]
    fn word(&self, position: u64) -> usize {
        ((position & (self.size - 1)) / 8) as usize
    }

    /// Writes a record and publishes it; false: no room. `body` gets the ring and the word at which to write.
    #[inline]
    pub fn push(&mut self, header: Header, cookie: u64, info: &[u8], body: impl FnOnce(&W, usize)) -> bool {
        let bytes = header.record_bytes();
        let Some(start) = self.reserve(bytes) else { return false };
        // Behind the record: the word where the next header will be looked for.
        self.ring.store(self.word(start + bytes), 0, Ordering::Relaxed);
        let mut at = self.word(start) + 1;
        if header.cookie {
            self.ring.store(at, cookie, Ordering::Relaxed);
            at += 1;
        }
        if !info.is_empty() {
            self.ring.write_bytes(at, info);
            at += info.len().div_ceil(8);
        }
        body(&self.ring, at);
        posthaste_core::failpoint!("lane.push.written");
        // Release pairs with the acquire of `Consumer::peek`: the record is whole once its header is seen.
        self.ring.store(self.word(start), header.pack(), Ordering::Release);
        if start != self.tail {
            posthaste_core::failpoint!("lane.push.wrap");
            self.ring.store(self.word(self.tail), KIND_WRAP, Ordering::Release);
        }
        self.tail = start + bytes;
        posthaste_core::failpoint!("lane.push.published");
        true
    }

    /// [`push`](Self::push) for the most frequent record: a payload of one word, without info.
    #[inline(always)]
    pub fn push_word(&mut self, protocol: u16, cookie: u64, payload: u64) -> bool {
        let offset = self.tail & (self.size - 1);
        let bytes = if cookie == 0 { 16 } else { 24 };
        // As a rule the record and the zero behind it are contiguous, and fit by the last known head.
        if offset + bytes >= self.size || self.tail + bytes + 8 - self.head > self.size {
            return self.push_word_slowly(protocol, cookie, payload);
        }
        let at = (offset / 8) as usize;
        let header = WORD_HEADER | u64::from(protocol) << 16;
        if cookie == 0 {
            self.ring.store(at + 2, 0, Ordering::Relaxed);
            self.ring.store(at + 1, payload, Ordering::Relaxed);
            posthaste_core::failpoint!("lane.push.written");
            // As in `push`.
            self.ring.store(at, header, Ordering::Release);
        } else {
            self.ring.store(at + 3, 0, Ordering::Relaxed);
            self.ring.store(at + 1, cookie, Ordering::Relaxed);
            self.ring.store(at + 2, payload, Ordering::Relaxed);
            posthaste_core::failpoint!("lane.push.written");
            self.ring.store(at, header | COOKIE_BIT, Ordering::Release);
        }
        self.tail += bytes;
        posthaste_core::failpoint!("lane.push.published");
        true
    }

    /// Writes records of one word each, without cookies, and publishes them together: the header of the first one is stored
    /// last, so that the reader does not fetch lines which are still being written. Takes no more of the words than there
    /// is room for in one piece, and at most [`WORD_GROUP`]; returns how many, perhaps none.
    #[inline]
    pub fn push_words(&mut self, protocol: u16, words: impl Iterator<Item = u64>) -> usize {
        let offset = self.tail & (self.size - 1);
        if self.tail + WORD_GROUP as u64 * 16 + 8 - self.head > self.size {
            self.consumed();
        }
        // One word more for the zero behind the records.
        let in_piece = (self.size - offset - 8) / 16;
        let credit = (self.size - (self.tail - self.head)).saturating_sub(8) / 16;
        let room = in_piece.min(credit).min(WORD_GROUP as u64) as usize;
        let first = (offset / 8) as usize;
        let header = WORD_HEADER | u64::from(protocol) << 16;
        let mut count = 0;
        for payload in words.take(room) {
            let at = first + 2 * count;
            self.ring.store(at + 1, payload, Ordering::Relaxed);
            if count > 0 {
                // Nobody looks at it before the first one is published.
                self.ring.store(at, header, Ordering::Relaxed);
            }
            count += 1;
        }
        if count == 0 {
            return 0;
        }
        self.ring.store(first + 2 * count, 0, Ordering::Relaxed);
        posthaste_core::failpoint!("lane.push.written");
        // As in `push`, for all of them.
        self.ring.store(first, header, Ordering::Release);
        self.tail += 16 * count as u64;
        posthaste_core::failpoint!("lane.push.published");
        count
    }

    #[cold]
    #[inline(never)]
    fn push_word_slowly(&mut self, protocol: u16, cookie: u64, payload: u64) -> bool {
        let header = Header { kind: KIND_SHORT, info_len: 0, protocol, len: 8, cookie: cookie != 0 };
        self.push(header, cookie, &[], |ring, at| ring.store(at, payload, Ordering::Relaxed))
    }

    /// Bytes ever written.
    #[inline]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// How far the reader says it has read.
    #[inline]
    pub fn consumed(&mut self) -> u64 {
        // As in `reserve`.
        let head = self.control.load(HEAD, Ordering::Acquire);
        if head > self.head && head <= self.tail {
            self.head = head;
        }
        self.head
    }

    /// After publishing: whether the reader wants to be told.
    #[inline]
    pub fn reader_wants_notice(&self, fence: LightFence) -> bool {
        // Between the header's store and this load; partner: the heavy fence of the reader that goes to sleep.
        fence.issue();
        self.control.load(NOTIFY, Ordering::Relaxed) != 0
    }

    /// The writer goes to sleep and wants to be rung when there is room or a page comes back.
    pub fn set_waiting(&self, waiting: bool) {
        self.control.store(WAITING, u64::from(waiting), Ordering::Relaxed);
    }

    /// Whether an empty-handed writer could go on: the reader has moved since the writer last looked.
    pub fn reader_moved(&self) -> bool {
        // As in `reserve`: a head that makes no sense must not keep the writer awake.
        let head = self.control.load(HEAD, Ordering::Acquire);
        head > self.head && head <= self.tail
    }

    /// The return word of a page grant. Acquire pairs with the release of [`return_grant`]: the page may be reused.
    #[inline]
    pub fn returned(&self, grant: usize) -> u64 {
        self.control.load(GRANTS + grant, Ordering::Acquire)
    }
}

/// Gives a page grant back, from any thread: one idempotent store. Returns whether the writer wants to be rung.
#[inline]
pub fn return_grant<W: Words>(control: &W, grant: usize, life: u64, fence: LightFence) -> bool {
    // Release: this side's reads of the page are done.
    control.store(GRANTS + grant, life, Ordering::Release);
    fence.issue();
    control.load(WAITING, Ordering::Relaxed) != 0
}

/// Whether a lane has been opened by its writer.
pub fn is_open<W: Words>(control: &W) -> bool {
    control.load(STATE, Ordering::Acquire) == 1
}

/// What the reader found at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peek {
    /// Nothing yet.
    Empty,
    /// A record, in [`Consumer::record`].
    Record(Header),
    /// Something that no writer writes.
    Corrupt,
}

/// What a quick look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing yet.
    Empty,
    /// A payload of one word, without info; the cookie is 0 if the record has none.
    Word {
        /// The sender's number of the protocol.
        protocol: u16,
        /// Not 0 where there is one.
        cookie: u64,
        /// The payload.
        payload: u64,
    },
    /// Something for [`Consumer::peek`].
    Other,
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer<W> {
    control: W,
    ring: W,
    size: u64,
    max_len: u32,
    /// Bytes ever consumed.
    position: u64,
    /// What the writer was told of that.
    published: u64,
    /// Bytes of the pages that were named since.
    page_bytes: u64,
}

impl<W: Words> Consumer<W> {
    /// The reading end of a lane from its beginning; nobody else may read it.
    pub fn new(control: W, ring: W) -> Self {
        let size = ring.words() as u64 * 8;
        Self {
            control,
            ring,
            size,
            max_len: max_short(size) as u32,
            position: 0,
            published: 0,
            page_bytes: 0,
        }
    }

    #[inline]
    fn word(&self) -> usize {
        ((self.position & (self.size - 1)) / 8) as usize
    }

    /// Looks at the next record. Every control word is read once, into a local, and only the checked local is used.
    #[inline]
    pub fn peek(&mut self) -> Peek {
        // Acquire pairs with the release of `Producer::push`.
        let mut word = self.ring.load(self.word(), Ordering::Acquire);
        if word == 0 {
            return Peek::Empty;
        }
        if word == KIND_WRAP {
            let rest = self.size - (self.position & (self.size - 1));
            self.position += rest;
            word = self.ring.load(0, Ordering::Acquire);
            if word == 0 || word == KIND_WRAP || rest == self.size {
                return Peek::Corrupt;
            }
        }
        let header = Header::unpack(word);
        let fits = (self.position & (self.size - 1)) + header.record_bytes() <= self.size;
        let known = match header.kind {
            KIND_SHORT => header.len <= self.max_len,
            KIND_PAGE => true,
            KIND_BATCH => header.len <= self.max_len && header.info_len == 0 && !header.cookie,
            _ => false,
        };
        if known && fits && header.info_len as usize <= MAX_INFO {
            Peek::Record(header)
        } else {
            Peek::Corrupt
        }
    }

    /// Whether there is anything at all at the reader's place. One load.
    #[inline]
    pub fn has_any(&self) -> bool {
        self.ring.load(self.word(), Ordering::Relaxed) != 0
    }

    /// A quick look at the next record: [`push_word`](Producer::push_word)'s are read at once, anything else is for
    /// [`peek`](Self::peek).
    #[inline]
    pub fn look(&self) -> Look {
        let at = self.word();
        // Acquire pairs with the release of `Producer::push_word` and `push`.
        let header = self.ring.load(at, Ordering::Acquire);
        if header == 0 {
            return Look::Empty;
        }
        let has_cookie = (header >> 63) as usize;
        if header & !WORD_FREE_BITS != WORD_HEADER || at + 2 + has_cookie > (self.size / 8) as usize {
            return Look::Other;
        }
        let first = self.ring.load(at + 1, Ordering::Relaxed);
        let protocol = (header >> 16) as u16;
        if has_cookie == 0 {
            return Look::Word { protocol, cookie: 0, payload: first };
        }
        Look::Word { protocol, cookie: first, payload: self.ring.load(at + 2, Ordering::Relaxed) }
    }

    /// The payloads of records like the one that [`look`](Self::look) found, which had no cookie, from that one on: as many
    /// as lie there in one piece, up to what there is room for. Nothing is consumed.
    #[inline]
    pub fn words(&self, protocol: u16, payloads: &mut [u64; WORD_GROUP]) -> usize {
        let first = self.word();
        let header = WORD_HEADER | u64::from(protocol) << 16;
        let in_piece = ((self.size / 8) as usize - first) / 2;
        let mut count = 0;
        // Acquire as in `look`.
        while count < WORD_GROUP.min(in_piece)
            && self.ring.load(first + 2 * count, Ordering::Acquire) == header
        {
            payloads[count] = self.ring.load(first + 2 * count + 1, Ordering::Relaxed);
            count += 1;
        }
        count
    }

    /// So many of the records that [`words`](Self::words) found are done with; as [`consume`](Self::consume).
    #[inline]
    pub fn consume_words(&mut self, count: usize, fence: LightFence) -> bool {
        self.position += 16 * count as u64;
        self.position - self.published >= self.size / 4 && self.publish(fence)
    }

    /// Whether the next record begins a cache line: one that nothing has been read of yet.
    #[inline]
    pub fn begins_line(&self) -> bool {
        self.position.is_multiple_of(8 * LINE_WORDS as u64)
    }

    /// The record that [`look`](Self::look) found is done with; as [`consume`](Self::consume). `has_cookie`: as the look
    /// said.
    #[inline]
    pub fn consume_word(&mut self, has_cookie: bool, fence: LightFence) -> bool {
        self.position += 16 + 8 * u64::from(has_cookie);
        self.position - self.published >= self.size / 4 && self.publish(fence)
    }

    /// Reads the parts of the record that [`peek`](Self::peek) found: returns the cookie, copies the info, and hands
    /// the ring and the first word of the body to the closure.
    #[inline]
    pub fn record<R>(
        &self,
        header: Header,
        info: &mut [u8; MAX_INFO],
        body: impl FnOnce(&W, usize) -> R,
    ) -> (u64, R) {
        let mut at = self.word() + 1;
        let mut cookie = 0;
        if header.cookie {
            cookie = self.ring.load(at, Ordering::Relaxed);
            at += 1;
        }
        let info_len = header.info_len as usize;
        if info_len > 0 {
            self.ring.read_bytes(at, &mut info[..info_len]);
            at += info_len.div_ceil(8);
        }
        (cookie, body(&self.ring, at))
    }

    /// The record is done with. Returns whether the writer was told of room and wants to be rung.
    #[inline]
    pub fn consume(&mut self, header: Header, fence: LightFence) -> bool {
        self.position += header.record_bytes();
        match header.kind {
            KIND_PAGE => self.page_bytes += u64::from(header.len),
            KIND_BATCH => self.page_bytes += MOST_BYTES,
            _ => {}
        }
        let due = self.position - self.published >= self.size / 4 || self.page_bytes >= PAGE_STRIDE;
        due && self.publish(fence)
    }

    #[cold]
    fn publish(&mut self, fence: LightFence) -> bool {
        posthaste_core::failpoint!("lane.credit.before");
        self.published = self.position;
        self.page_bytes = 0;
        // Release pairs with the acquire in `Producer::reserve`: the bytes were read before they are overwritten.
        self.control.store(HEAD, self.position, Ordering::Release);
        posthaste_core::failpoint!("lane.credit.after");
        fence.issue();
        self.control.load(WAITING, Ordering::Relaxed) != 0
    }

    /// Whether the reader wants to be told of new records (it does not poll this lane).
    pub fn set_notify(&self, wanted: bool) {
        self.control.store(NOTIFY, u64::from(wanted), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(posthaste_loom)))]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use posthaste_core::memory::SharedSlice;

    fn memory(len: usize) -> SharedSlice {
        let words: &'static mut [u64] = vec![0u64; len / 8].leak();
        // SAFETY: leaked memory stays valid and is used through the slice only.
        unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), len) }
    }

    #[test]
    fn random_records_arrive_as_an_oracle_says() {
        for (seed, ring) in [(1u64, 1024u64), (2, 4096), (3, 16384)] {
            let (control, ring_memory) = (memory(4096), memory(ring as usize));
            let mut producer = Producer::open(control, ring_memory);
            let mut consumer = Consumer::new(control, ring_memory);
            let mut oracle = std::collections::VecDeque::new();
            let mut state = seed;
            let mut random = move |n: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % n
            };
            let mut received = 0;
            for step in 0..200_000u64 {
                if random(2) == 0 {
                    let len = random(max_short(ring) as u64 + 1) as u32 / (1 + random(40) as u32);
                    let info: Vec<u8> = (0..random(113)).map(|i| (i + step) as u8).collect();
                    let payload: Vec<u8> = (0..len).map(|i| (u64::from(i) * 3 + step) as u8).collect();
                    let mut cookie = random(3);
                    let mut header = Header {
                        kind: KIND_SHORT,
                        info_len: info.len() as u8,
                        protocol: step as u16,
                        len,
                        cookie: cookie != 0,
                    };
                    let (mut info, mut payload) = (info, payload);
                    if random(8) == 0 {
                        // Three words, whatever the length of each message.
                        header = Header { kind: KIND_BATCH, info_len: 0, cookie: false, ..header };
                        payload = (0..24).map(|i| (i * 5 + step) as u8).collect();
                        (cookie, info) = (0, Vec::new());
                    }
                    if producer.push(header, cookie, &info, |ring, at| ring.write_bytes(at, &payload)) {
                        oracle.push_back((header, cookie, info, payload));
                    } else {
                        assert!(!oracle.is_empty(), "an empty ring has room for any record");
                    }
                } else {
                    match consumer.peek() {
                        Peek::Empty => assert!(oracle.is_empty()),
                        Peek::Corrupt => panic!("corrupt at step {step}"),
                        Peek::Record(header) => {
                            let expected = oracle.pop_front().expect("sent");
                            let mut info = [0; MAX_INFO];
                            let len = if header.kind == KIND_BATCH { 24 } else { header.len as usize };
                            let mut payload = vec![0; len];
                            let (cookie, ()) = consumer
                                .record(header, &mut info, |ring, at| ring.read_bytes(at, &mut payload));
                            let info = info[..header.info_len as usize].to_vec();
                            assert_eq!((header, cookie, info, payload), expected);
                            consumer.consume(header, LightFence::Full);
                            received += 1;
                        }
                    }
                }
            }
            assert!(received > 50_000);
        }
    }

    #[test]
    fn groups_of_words_arrive_as_an_oracle_says() {
        for ring in [1024u64, 2048, 16384] {
            let mut producer = Producer::open(memory(4096), memory(ring as usize));
            let mut consumer = Consumer::new(producer.control, producer.ring);
            let (mut sent, mut seen, mut state) = (0u64, 0u64, ring);
            let mut random = move |n: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % n
            };
            while seen < 300_000 {
                match random(4) {
                    0 => sent += u64::from(producer.push_word(9, 0, sent)),
                    1 => {
                        let pushed = producer.push_words(9, sent..sent + random(40)) as u64;
                        assert!(pushed <= WORD_GROUP as u64);
                        sent += pushed;
                    }
                    _ => match consumer.look() {
                        Look::Empty => assert_eq!(seen, sent),
                        Look::Word { protocol, .. } if random(2) == 0 => {
                            let mut payloads = [0; WORD_GROUP];
                            let found = consumer.words(protocol, &mut payloads);
                            let taken = 1 + random(found as u64) as usize;
                            for payload in &payloads[..taken] {
                                assert_eq!(*payload, seen);
                                seen += 1;
                            }
                            consumer.consume_words(taken, LightFence::Full);
                        }
                        Look::Word { payload, .. } => {
                            assert_eq!(payload, seen);
                            seen += 1;
                            consumer.consume_word(false, LightFence::Full);
                        }
                        Look::Other => {
                            let Peek::Record(header) = consumer.peek() else { panic!("no record at {seen}") };
                            let read = |ring: &SharedSlice, at| Words::load(ring, at, Ordering::Relaxed);
                            let (_, payload) = consumer.record(header, &mut [0; MAX_INFO], read);
                            assert_eq!(payload, seen);
                            seen += 1;
                            consumer.consume(header, LightFence::Full);
                        }
                    },
                }
            }
        }
    }

    #[test]
    fn garbage_is_told_and_never_read_out_of_bounds() {
        let mut state = 99u64;
        for _ in 0..200_000 {
            let (control, ring) = (memory_pool(0), memory_pool(1));
            for word in 0..128 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ring.write_u64(word * 8, if state & 3 == 0 { state >> 20 & 0xffff } else { state });
            }
            let mut consumer = Consumer::new(control, ring);
            for _ in 0..8 {
                let Peek::Record(header) = consumer.peek() else { break };
                let mut info = [0; MAX_INFO];
                consumer.record(header, &mut info, |ring, at| {
                    if header.kind == KIND_SHORT {
                        ring.read_bytes(at, &mut vec![0; header.len as usize]);
                    }
                });
                consumer.consume(header, LightFence::Full);
            }
        }
    }

    fn memory_pool(which: usize) -> SharedSlice {
        use std::sync::OnceLock;
        static POOL: OnceLock<[SharedSlice; 2]> = OnceLock::new();
        POOL.get_or_init(|| [memory(4096), memory(1024)])[which]
    }
}
