//! The reading end of a lane.

use super::{
    ALIGN, GRANTS, HEAD, Header, KIND_BATCH, KIND_PAGE, KIND_SHORT, KIND_WORDS, KIND_WRAP, LINE_WORDS,
    LightFence, MOST_WORDS, NOTIFY, PAGE_STRIDE, WAITING, WORD_BYTES, WORD_FREE_BITS, WORD_GROUP,
    WORD_HEADER, max_short, most_words,
};
use crate::batch::MOST_BYTES;
use crate::layout::PAGE;
use posthaste_core::MAX_INFO;
use posthaste_core::memory::Words;
use posthaste_core::sync::Ordering;

/// Bytes of the next record that are asked for at most: a processor waits for so many lines at a time.
const MOST_AHEAD: u64 = 8 * MOST_WORDS as u64;

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
    /// Another payload in the record, without info, to be read by [`Consumer::payload`].
    Short {
        /// The sender's number of the protocol.
        protocol: u16,
        /// The cookie word, if there is one.
        cookie: Option<u64>,
        /// Bytes of the payload.
        len: usize,
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
        self.word_at(self.position)
    }

    #[inline]
    fn word_at(&self, position: u64) -> usize {
        ((position & (self.size - 1)) / 8) as usize
    }

    /// Looks at the next record. Every control word is read once, into a local, and only the checked local is used.
    #[inline]
    pub fn peek(&mut self) -> Peek {
        // Acquire pairs with the release of `Producer::push`.
        let mut word = self.ring.load(self.word(), Ordering::Acquire);
        if word == 0 {
            return Peek::Empty;
        }
        let mut position = self.position;
        if word == KIND_WRAP {
            let rest = self.size - (position & (self.size - 1));
            position += rest;
            word = self.ring.load(0, Ordering::Acquire);
            if word == 0 || word == KIND_WRAP || rest == self.size {
                return Peek::Corrupt;
            }
        }
        let header = Header::unpack(word);
        let fits = (position & (self.size - 1)) + header.record_bytes() <= self.size;
        let known = match header.kind {
            KIND_SHORT => header.len <= self.max_len,
            KIND_PAGE => true,
            KIND_BATCH => header.len <= self.max_len && header.info_len == 0 && !header.cookie,
            KIND_WORDS => {
                let count = header.len as usize / 8;
                let whole = header.len.is_multiple_of(8) && header.info_len == 0 && !header.cookie;
                whole && (1..=most_words(self.size)).contains(&count)
            }
            _ => false,
        };
        if known && fits && header.info_len as usize <= MAX_INFO {
            // Only then: whoever looks once more at what is corrupt finds it so again.
            self.position = position;
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

    /// A quick look at the next record: those of [`push_word`](super::Producer::push_word) are read at once, those of
    /// [`push_short`](super::Producer::push_short) nearly so, anything else is for [`peek`](Self::peek).
    #[inline(always)]
    pub fn look(&self) -> Look {
        let at = self.word();
        // To the compiler, what is behind the acquire may have changed with it: not so a copy.
        let (ring, size) = (self.ring.clone(), self.size);
        // Acquire pairs with the release of `Producer::push_word`, `push_short` and `push`.
        let header = ring.load(at, Ordering::Acquire);
        if header == 0 {
            return Look::Empty;
        }
        let has_cookie = (header >> 63) as usize;
        let protocol = (header >> 16) as u16;
        let (body, end) = (at + 1 + has_cookie, (size / 8) as usize);
        if header & !WORD_FREE_BITS != WORD_HEADER {
            let len = (header >> 32) as u32 & 0x7fff_ffff;
            let plain = header & 0xffff == u64::from(KIND_SHORT) && len <= self.max_len;
            if !plain || body + (len as usize).div_ceil(8) > end {
                return Look::Other;
            }
            let cookie = (has_cookie != 0).then(|| ring.load(at + 1, Ordering::Relaxed));
            return Look::Short { protocol, cookie, len: len as usize };
        }
        if body + 1 > end {
            return Look::Other;
        }
        let first = ring.load(at + 1, Ordering::Relaxed);
        if has_cookie == 0 {
            return Look::Word { protocol, cookie: 0, payload: first };
        }
        if first == 0 {
            // No writer says that there is one and writes none. As a word it would be taken for shorter than it is.
            return Look::Other;
        }
        Look::Word { protocol, cookie: first, payload: ring.load(at + 2, Ordering::Relaxed) }
    }

    /// Reads the payload that [`look`](Self::look) found; its length and whether there is a cookie are as the look said.
    #[inline]
    pub fn payload(&self, has_cookie: bool, payload: &mut [u8]) {
        self.ring.read_bytes(self.word() + 1 + usize::from(has_cookie), payload);
    }

    /// The record whose payload that was is done with; as [`consume`](Self::consume).
    #[inline]
    pub fn consume_short(&mut self, has_cookie: bool, len: usize, fence: LightFence) -> bool {
        self.position += (8 + 8 * u64::from(has_cookie) + len as u64).next_multiple_of(ALIGN);
        self.position - self.published >= self.size / 4 && self.publish(fence)
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
        self.position += WORD_BYTES[0] * count as u64;
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
        self.position += WORD_BYTES[usize::from(has_cookie)];
        self.position - self.published >= self.size / 4 && self.publish(fence)
    }

    /// Asks for the line in which a page is given back, which its sender has looked at: a record that is written behind the return
    /// would not be seen before that. A hint.
    #[inline]
    pub fn expect_return(&self, grant: usize) {
        self.control.prefetch_write(GRANTS + grant);
    }

    /// Asks for the head of the record behind the one that [`peek`](Self::peek) found. A hint.
    #[inline]
    pub fn prefetch_next_head(&self, header: Header) {
        self.ring.prefetch(self.word_at(self.position + header.record_bytes()));
    }

    /// Asks for the lines of the record behind the one that [`peek`](Self::peek) found, if it is there: but for that of its head,
    /// what is still to be written is left to the writer. A hint.
    #[inline]
    pub fn prefetch_next(&self, header: Header) {
        const LINE: u64 = 8 * LINE_WORDS as u64;
        let next = self.position + header.record_bytes();
        // Only its length is used, and only so far as a record can be long.
        let word = self.ring.load(self.word_at(next), Ordering::Relaxed);
        if word == KIND_WRAP {
            self.ring.prefetch(0);
        } else if word != 0 {
            let end = next + Header::unpack(word).record_bytes().min(MOST_AHEAD);
            let first = (next | (LINE - 1)) + 1;
            (first..end).step_by(LINE as usize).for_each(|at| self.ring.prefetch(self.word_at(at)));
        }
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
            // A loan of a few bytes has a page and a number, too, which the writer wants back.
            KIND_PAGE => self.page_bytes += u64::from(header.len).max(PAGE),
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
