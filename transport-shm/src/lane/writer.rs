//! The writing end of a lane.

use super::{
    COOKIE_BIT, GRANTS, HEAD, Header, KIND_SHORT, KIND_WORDS, KIND_WRAP, LINE_WORDS, LightFence, MIN_RING,
    NOTIFY, STATE, WAITING, WORD_BYTES, WORD_HEADER,
};
use posthaste_core::memory::Words;
use posthaste_core::sync::Ordering;

/// Lines behind the tail that are fetched at most once a record is written.
const MOST_AHEAD: u64 = 12;

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
    /// Records that end before this, with a word behind them, lie in one piece and overwrite nothing unread, by that head.
    clear: u64,
    /// What the reader has said last was seen, but not taken over.
    glanced: bool,
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
        Self { control, ring, size, tail: 0, head: 0, clear: size, glanced: false }
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

    /// Whether there is room for a record like this.
    #[inline]
    pub fn has_room(&mut self, header: Header) -> bool {
        self.reserve(header.record_bytes()).is_some()
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
        let lap_ends = (self.tail | (self.size - 1)) + 1;
        self.clear = lap_ends.min(self.head + self.size);
        posthaste_core::failpoint!("lane.push.published");
        self.fetch_ahead(bytes);
        true
    }

    /// [`push`](Self::push) for the most frequent record: a payload of one word, without info.
    #[inline(always)]
    pub fn push_word(&mut self, protocol: u16, cookie: u64, payload: u64) -> bool {
        let bytes = WORD_BYTES[usize::from(cookie != 0)];
        let tail = self.tail;
        // As a rule the record and the zero behind it are contiguous, and fit by the last known head.
        if tail + bytes + 8 > self.clear {
            return self.push_word_slowly(protocol, cookie, payload);
        }
        // To the compiler, each store could be one to where this is kept: not so a copy.
        let ring = self.ring.clone();
        let at = self.word(tail);
        let header = WORD_HEADER | u64::from(protocol) << 16;
        if cookie == 0 {
            ring.store(at + 2, 0, Ordering::Relaxed);
            ring.store(at + 1, payload, Ordering::Relaxed);
            posthaste_core::failpoint!("lane.word.written");
            // As in `push`.
            ring.store(at, header, Ordering::Release);
        } else {
            ring.store(at + WORD_BYTES[1] as usize / 8, 0, Ordering::Relaxed);
            ring.store(at + 1, cookie, Ordering::Relaxed);
            ring.store(at + 2, payload, Ordering::Relaxed);
            posthaste_core::failpoint!("lane.word.written.cookie");
            ring.store(at, header | COOKIE_BIT, Ordering::Release);
        }
        self.tail = tail + bytes;
        posthaste_core::failpoint!("lane.word.published");
        self.fetch_ahead(bytes);
        true
    }

    /// Has the lines fetched that the next records are written to, if the one of so many bytes that was just written reached
    /// another line: the reader has no use for those behind the tail yet, but they were its own for the last lap. A writer
    /// that waits for them publishes late, because the word behind a record is written before its header.
    #[inline(always)]
    fn fetch_ahead(&self, bytes: u64) {
        const LINE: u64 = 8 * LINE_WORDS as u64;
        if self.tail % LINE < bytes {
            for line in 1..=(bytes / LINE + 1).min(MOST_AHEAD) {
                self.ring.prefetch_write(self.word(self.tail + line * LINE));
            }
        }
    }

    /// Asks for the line that the next record is written to. A hint.
    #[inline(always)]
    pub fn prefetch(&self) {
        self.ring.prefetch_write(self.word(self.tail));
    }

    /// [`push`](Self::push) for any other short payload without info; a cookie that is not 0 goes with it.
    #[inline]
    pub fn push_short(&mut self, protocol: u16, cookie: u64, payload: &[u8]) -> bool {
        let len = payload.len() as u32;
        let header = Header { kind: KIND_SHORT, info_len: 0, protocol, len, cookie: cookie != 0 };
        self.push(header, cookie, &[], |ring, at| ring.write_bytes(at, payload))
    }

    /// Writes `count` messages of one word each, without cookies, as one record: from 1 to
    /// [`most_words`](super::most_words). False: no room. `fill` gets the ring and the word from which on the payloads lie.
    #[inline]
    pub fn push_words(&mut self, protocol: u16, count: usize, fill: impl FnOnce(&W, usize)) -> bool {
        let len = 8 * count as u32;
        let header = Header { kind: KIND_WORDS, info_len: 0, protocol, len, cookie: false };
        self.push(header, 0, &[], fill)
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

    /// How far the reader had read when it was last looked at.
    #[inline]
    pub fn known(&self) -> u64 {
        self.head
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
        self.is_notice_wanted()
    }

    /// The same behind a fence of the caller's.
    #[inline]
    pub fn is_notice_wanted(&self) -> bool {
        self.control.load(NOTIFY, Ordering::Relaxed) != 0
    }

    /// The writer goes to sleep and wants to be rung when there is room or a page comes back.
    pub fn set_waiting(&self, waiting: bool) {
        self.control.store(WAITING, u64::from(waiting), Ordering::Relaxed);
    }

    /// Whether an empty-handed writer could go on: the reader has moved since the writer last looked.
    pub fn reader_moved(&mut self) -> bool {
        // As in `reserve`: a head that makes no sense must not keep the writer awake.
        let head = self.control.load(HEAD, Ordering::Acquire);
        let moved = head > self.head && head <= self.tail;
        self.glanced |= moved;
        moved
    }

    /// Whether the head's line may be here already, with what [`consumed`](Self::consumed) is going to show.
    pub fn take_glanced(&mut self) -> bool {
        std::mem::take(&mut self.glanced)
    }

    /// Asks for the lines in which the reader says how far it has read, and that a page is returned. A hint.
    #[inline]
    pub fn prefetch_news(&self, grant: usize) {
        self.control.prefetch(HEAD);
        self.control.prefetch(GRANTS + grant);
    }

    /// The return word of a page grant. Acquire pairs with the release of [`return_grant`](super::return_grant): the page may be reused.
    #[inline]
    pub fn returned(&self, grant: usize) -> u64 {
        self.control.load(GRANTS + grant, Ordering::Acquire)
    }
}
