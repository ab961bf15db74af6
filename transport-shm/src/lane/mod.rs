//! The lane: a single-producer single-consumer ring of variable-size records, one per ordered pair of endpoints.
//!
//! ```text
//!  control pages                                        ring
//!   word  0  state: 1 once the lane is open (writer)     +--------+--------+------+---------+---+--------+
//!   word  1  waiting: the writer wants to be rung        | header | cookie | info | payload | 0 | stale  |
//!   word 16  head: bytes consumed (reader)               +--------+--------+------+---------+---+--------+
//!   word 32  notify: the reader wants to be told          ^ written last, with release        ^ the writer
//!   word 64  return words of the page grants (reader)                                            zeroed it first
//! ```
//! A record's header is its publication flag. Before a header is published the writer zeroes the word *behind* the
//! record, so the reader never meets a stale header and never has to clear what it consumed: a lap of the ring
//! costs each line one transfer to the reader and one back. The reader returns credit (head) in quarters of the ring.
//!
//! ```text
//!  header   63        62..32     31..16     15..8      7..0
//!          +--------+----------+----------+----------+------+
//!          | cookie | length   | protocol | info len | kind |     kinds: 1 short, 2 page, 3 wrap, 4 batch, 5 words
//!          +--------+----------+----------+----------+------+
//! ```

mod reader;
mod writer;

pub use reader::{Consumer, Look, Peek};
pub use writer::Producer;

use posthaste_core::MAX_INFO;
use posthaste_core::memory::Words;
pub use posthaste_core::sync::LightFence;
use posthaste_core::sync::Ordering;

const STATE: usize = 0;
const WAITING: usize = 1;
const HEAD: usize = 16;
// Not in the line of the head: the writer looks at it after each record.
const NOTIFY: usize = 32;
const GRANTS: usize = 64;

/// Page grants that a lane can have outstanding: their return words fill the two control pages.
#[cfg(not(posthaste_loom))]
pub const GRANT_COUNT: usize = 960;
/// loom has to look at every word.
#[cfg(posthaste_loom)]
pub const GRANT_COUNT: usize = 64;
/// Words of the control pages that are used.
pub const CONTROL_WORDS: usize = GRANTS + GRANT_COUNT;
/// Bytes of the control pages.
pub const CONTROL_BYTES: u64 = 8192;
const _: () = assert!(CONTROL_WORDS as u64 * 8 <= CONTROL_BYTES);

/// The payload is in the record.
pub const KIND_SHORT: u8 = 1;
/// The record names a page of the sender's pool.
pub const KIND_PAGE: u8 = 2;
const KIND_WRAP: u64 = 3;
/// The record names a page with several messages; its length is that of each.
pub const KIND_BATCH: u8 = 4;
/// The record has several payloads of one word each, one behind the other; its length is that of all.
pub const KIND_WORDS: u8 = 5;

/// The header of a record with a payload of one word and without info; the protocol and the cookie's bit are to be
/// added.
const WORD_HEADER: u64 = 8 << 32 | KIND_SHORT as u64;
/// The bits that are to be added.
const WORD_FREE_BITS: u64 = COOKIE_BIT | 0xffff << 16;
/// A cookie word follows the header.
const COOKIE_BIT: u64 = 1 << 63;

/// A record's header in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`KIND_SHORT`], [`KIND_PAGE`], [`KIND_BATCH`] or [`KIND_WORDS`].
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
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.kind)
            | u64::from(self.info_len) << 8
            | u64::from(self.protocol) << 16
            | u64::from(self.len) << 32
            | u64::from(self.cookie) << 63
    }

    #[inline]
    pub(crate) fn unpack(word: u64) -> Header {
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
            KIND_SHORT | KIND_WORDS => u64::from(self.len),
            KIND_BATCH => 24,
            _ => 16,
        };
        let info = u64::from(self.info_len).next_multiple_of(8);
        (8 + 8 * u64::from(self.cookie) + info + body).next_multiple_of(ALIGN)
    }
}

/// What the length of a record is a multiple of: a header and the word behind it are in one line, and so are as a rule all words
/// of a request where one comes after the other. Who finds the header does not wait for another line.
#[cfg(not(posthaste_loom))]
const ALIGN: u64 = 16;
/// loom has to look at every word.
#[cfg(posthaste_loom)]
const ALIGN: u64 = 8;

/// Bytes of the record of one word, and of one with a cookie.
const WORD_BYTES: [u64; 2] = [16, 24_u64.next_multiple_of(ALIGN)];

/// The longest payload that a record of a ring of `ring` bytes can carry, whatever its info and cookie: a record
/// takes at most a quarter of the ring, so that an empty ring always has room for one.
#[must_use]
pub const fn max_short(ring: u64) -> usize {
    let room = (ring as usize / 4).saturating_sub(16 + MAX_INFO);
    if room > 2048 { 2048 } else { room }
}

/// Bytes in pages after which the reader tells how far it is, however short their records are.
pub(crate) const PAGE_STRIDE: u64 = 64 << 10;

/// Words of a cache line.
const LINE_WORDS: usize = 8;

/// Records of one word that are taken together.
pub const WORD_GROUP: usize = 32;

/// Messages of one word that one record has at most: so few that the reader starts soon, and so many that it rarely waits at the
/// line which the writer is to write next, and takes it from it. A thousand took 2.4 µs by records of 128, 1.8 by 255, 1.4 by 280
/// to 400, and 1.9 by 510, which leave room for three in the ring.
pub const MOST_WORDS: usize = 340;

/// Messages of one word that a record of a ring of `ring` bytes has at most; it takes no more than a quarter of the ring.
#[must_use]
pub const fn most_words(ring: u64) -> usize {
    let room = (ring as usize / 4).saturating_sub(8) / 8;
    if room > MOST_WORDS { MOST_WORDS } else { room }
}

/// The shortest ring that works, in bytes.
pub const MIN_RING: u64 = 1024;

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

#[cfg(all(test, not(posthaste_loom)))]
#[allow(unsafe_code)]
mod tests;
