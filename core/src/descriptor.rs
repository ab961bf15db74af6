//! The descriptor: the one currency between protocols, messager and devices.
//!
//! ```text
//!  byte  0        1        2        3        4              8          10         12
//!       +--------+--------+--------+--------+--------------+----------+----------+-----------+
//!       | op     | flags  | info   | inline | target rank  | context  | protocol | region /  |
//!       |        |        | bytes  | bytes  |              |          |          | window    |
//!       +--------+--------+--------+--------+--------------+----------+----------+-----------+
//!   16  | length                            | target offset                                  |
//!   32  | ticket (completion)               | cookie (travels with a send)                   |
//!   48  | source: 16 inline bytes, or kind-dependent key and offset                          |
//!       +------------------------------------------------------------------------------------+
//! ```
//! Message info longer than nothing is kept in up to two further slots that follow the descriptor.

use crate::ids::{ContextId, Endpoint, ProtocolId, Rank};
use crate::memory::{AtomicOp, WordLen, WordOp};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// Length of one slot in bytes.
pub const SLOT_BYTES: usize = 64;
/// Longest payload in bytes that fits into the descriptor itself.
pub const MAX_DESCRIPTOR_INLINE: usize = 16;
/// Longest message info in bytes: 7 quads of 16.
pub const MAX_INFO: usize = 112;

/// In the kind of an atomic operation: its old value is wanted.
const FETCH: u8 = 0x80;

/// What a descriptor asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Op {
    /// Nothing; skipped.
    #[default]
    Nop = 0,
    /// Deliver a message to the target's dispatch.
    Send = 1,
    /// Copy source bytes to target memory.
    Put = 2,
    /// Copy target memory to the source region.
    Get = 3,
    /// Replay a recorded section: go on with another run of descriptors, then come back.
    Jump = 4,
    /// Carry out an atomic operation on a word of target memory.
    Atomic = 5,
    /// Do, in its turn, what this side keeps under a key: an access to mapped memory that is no copy of one piece.
    Local = 6,
}

/// Where the payload of a descriptor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum SourceKind {
    /// In the descriptor itself.
    #[default]
    Inline = 0,
    /// In the slice that is lent for the duration of one `inject` call.
    Borrowed = 1,
    /// Held by the context under a key, until the operation ends.
    Held = 2,
    /// In a region of shared memory that the context knows under a key.
    Region = 3,
    /// In page memory that the device lent before; the key is the device's.
    Loan = 4,
}

/// One operation, in one cache line. `Copy`, so that recording one is copying it.
///
/// # Examples
/// ```
/// use posthaste_core::descriptor::{Op, SourceKind};
/// use posthaste_core::{Descriptor, ProtocolId, Rank};
///
/// let mut send = Descriptor { op: Op::Send, rank: Rank(1), protocol: ProtocolId(7), ..Descriptor::default() };
/// send.set_inline(b"up to 16 bytes");
/// assert_eq!(send.source_kind, SourceKind::Inline);
/// assert_eq!(send.inline_bytes(), b"up to 16 bytes");
/// // With info it takes more slots of a queue.
/// assert_eq!([0, 64, 112].map(|info_len| Descriptor { info_len, ..send }.slots()), [1, 2, 3]);
/// ```
#[derive(Clone, Copy, Debug, Default, IntoBytes, TryFromBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Descriptor {
    /// What to do.
    pub op: Op,
    /// Where the payload is.
    pub source_kind: SourceKind,
    /// Length of the message info in bytes, 0 to [`MAX_INFO`]; the info lies in the slots that follow.
    pub info_len: u8,
    /// Tells fragments and system messages apart; meaning belongs to the messager. Travels with a send. Of an atomic
    /// operation, which one it is.
    pub kind: u8,
    /// The rank that is meant.
    pub rank: Rank,
    /// The context that is meant.
    pub context: ContextId,
    /// The protocol, as the sender counts it. Travels with a send. Of a recorded put, how many [followers](Self::followers) it
    /// has.
    pub protocol: ProtocolId,
    /// Key of the target region (put, get and atomic operation). Of a send, whether it is an [access](Self::is_access).
    pub region: u32,
    /// Payload length in bytes.
    pub len: u64,
    /// First byte in the target region (put, get and atomic operation); recorded section (jump). Of a recorded send, how
    /// many [followers](Self::followers) it has.
    pub offset: u64,
    /// Completion slot to be told, or 0.
    pub ticket: u64,
    /// A word that travels with a send, 0 for none.
    pub cookie: u64,
    /// Inline payload, or key and offset of the payload.
    pub source: [u64; 2],
}

const _: () = assert!(size_of::<Descriptor>() == SLOT_BYTES);

/// In the region of a send: it is an access to memory.
const ACCESS: u32 = 1 << 31;

impl Descriptor {
    /// Whether a send is an access to memory, which changes or reads that of its target: a device on which what precedes it is not
    /// all under way, such as a long get, lets it take its turn as it does puts and gets of its own.
    #[inline]
    #[must_use]
    pub const fn is_access(&self) -> bool {
        self.region & ACCESS != 0
    }

    /// A send is such an access.
    #[inline]
    pub fn set_access(&mut self) {
        debug_assert!(self.op == Op::Send, "others say what they do");
        self.region |= ACCESS;
    }

    /// The endpoint that is meant.
    #[inline]
    #[must_use]
    pub const fn target(&self) -> Endpoint {
        Endpoint { rank: self.rank, context: self.context }
    }

    /// Slots that the descriptor takes together with its info.
    #[inline]
    #[must_use]
    pub const fn slots(&self) -> usize {
        1 + (self.info_len as usize).div_ceil(SLOT_BYTES)
    }

    /// At least so many descriptors behind this recorded one differ from the one before them in nothing but their places, so
    /// that a device need look at nothing else of them: behind a send those whose payload lies right behind that one's, behind
    /// a put of 8 bytes other such puts.
    #[inline]
    #[must_use]
    pub const fn followers(&self) -> usize {
        match self.op {
            Op::Send => (self.offset >> 32) as usize,
            Op::Put => self.protocol.0 as usize,
            _ => 0,
        }
    }

    /// Looks which operations of a run of recorded ones follow each other, and has each tell how many
    /// [`followers`](Self::followers) it has.
    pub(crate) fn tell_followers(run: &mut [Descriptor]) {
        for put in run.iter_mut().filter(|one| one.op == Op::Put) {
            put.protocol = ProtocolId(0);
        }
        for at in (1..run.len()).rev() {
            let (this, next) = (run[at - 1], run[at]);
            if this.is_followed_by(&next) {
                let followers = next.followers() + 1;
                match this.op {
                    Op::Send => run[at - 1].offset = (followers as u64) << 32,
                    _ => run[at - 1].protocol = ProtocolId(u16::try_from(followers).unwrap_or(u16::MAX)),
                }
            }
        }
    }

    /// Whether the next one of a recorded run is a [follower](Self::followers) of this one, which tells of none yet.
    fn is_followed_by(&self, next: &Descriptor) -> bool {
        let told = |one: &Descriptor| match one.op {
            // Only what has no info leaves the offset alone.
            Op::Send if (one.info_len, one.offset as u32) == (0, 0) => Descriptor { offset: 0, ..*one },
            Op::Put if one.len == 8 => Descriptor { offset: 0, protocol: ProtocolId(0), ..*one },
            _ => Descriptor::default(),
        };
        let alike = |one: &Descriptor| Descriptor { source: [one.source[0], 0], ..told(one) };
        let behind = self.source[1].checked_add(self.len) == Some(next.source[1]);
        self.source_kind == SourceKind::Region
            && (self.op == Op::Put || behind)
            && told(self).op != Op::Nop
            && alike(self).as_bytes() == alike(next).as_bytes()
    }

    /// Writes up to 16 bytes of payload into the descriptor.
    ///
    /// # Panics
    /// If the payload is longer than [`MAX_DESCRIPTOR_INLINE`].
    #[inline]
    pub fn set_inline(&mut self, payload: &[u8]) {
        self.source_kind = SourceKind::Inline;
        self.len = payload.len() as u64;
        if let Ok(word) = <[u8; 8]>::try_from(payload) {
            self.source[0] = u64::from_ne_bytes(word);
        } else {
            let mut bytes = [0u8; MAX_DESCRIPTOR_INLINE];
            bytes[..payload.len()].copy_from_slice(payload);
            self.source[0] = u64::from_ne_bytes(bytes[..8].try_into().unwrap_or_default());
            self.source[1] = u64::from_ne_bytes(bytes[8..].try_into().unwrap_or_default());
        }
    }

    /// Makes it an atomic operation, with the old value as its own if that is wanted: number and wish in `kind`, operand
    /// and expected value where the payload of others is.
    ///
    /// # Examples
    /// ```
    /// use posthaste_core::Descriptor;
    /// use posthaste_core::memory::{AtomicOp, WordLen, WordOp};
    ///
    /// let add = WordOp { op: AtomicOp::Add, len: WordLen::Eight, operand: 5, expected: 0 };
    /// let mut descriptor = Descriptor::default();
    /// assert!(descriptor.word_op().is_none());
    /// descriptor.set_word_op(&add, true); // with its old value
    /// let (op, fetch) = descriptor.word_op().expect("it is one now");
    /// assert_eq!((op.op, op.operand, fetch), (AtomicOp::Add, 5, true));
    /// ```
    #[inline]
    pub fn set_word_op(&mut self, op: &WordOp, fetch: bool) {
        self.op = Op::Atomic;
        self.source_kind = SourceKind::Inline;
        self.kind = op.op as u8 | if fetch { FETCH } else { 0 };
        self.len = op.len.bytes();
        self.source = [op.operand, op.expected];
    }

    /// The atomic operation, and whether its old value is wanted; `None` if it is not one.
    #[inline]
    #[must_use]
    pub fn word_op(&self) -> Option<(WordOp, bool)> {
        let op = AtomicOp::from_number(self.kind & !FETCH).filter(|_| self.op == Op::Atomic)?;
        let len = WordLen::from_bytes(self.len)?;
        let [operand, expected] = self.source;
        Some((WordOp { op, len, operand, expected }, self.kind & FETCH != 0))
    }

    /// The inline payload as two words.
    #[inline]
    #[must_use]
    pub fn inline_bytes(&self) -> &[u8] {
        let len = (self.len as usize).min(MAX_DESCRIPTOR_INLINE);
        &self.source.as_bytes()[..len]
    }
}

/// Up to 112 bytes of message info, copied when an operation starts.
///
/// # Examples
/// ```
/// use posthaste_core::descriptor::Info;
///
/// assert_eq!(Info::new(b"beside the payload").map(|info| info.as_bytes().len()), Some(18));
/// assert!(Info::new(&[0; 113]).is_none(), "112 bytes are the most");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Info {
    len: u8,
    bytes: [u8; MAX_INFO],
}

impl Info {
    /// No info.
    pub const EMPTY: Info = Info { len: 0, bytes: [0; MAX_INFO] };

    /// Copies the bytes; `None` if there are more than [`MAX_INFO`].
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Info> {
        let mut info = Info::EMPTY;
        info.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        info.len = bytes.len() as u8;
        Some(info)
    }

    /// The bytes.
    #[inline]
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }
}

impl Default for Info {
    fn default() -> Self {
        Info::EMPTY
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    /// All that a device may take for granted of the one behind a descriptor that it has looked at.
    fn follows(this: &Descriptor, next: &Descriptor) -> bool {
        let same = (this.op, this.source_kind, this.info_len, this.kind, this.rank, this.context)
            == (next.op, next.source_kind, next.info_len, next.kind, next.rank, next.context)
            && (this.region, this.len, this.ticket) == (next.region, next.len, next.ticket)
            && (this.cookie, this.source[0]) == (next.cookie, next.source[0]);
        same && this.source_kind == SourceKind::Region
            && match this.op {
                Op::Send => {
                    (this.protocol, this.info_len, next.source[1])
                        == (next.protocol, 0, this.source[1] + this.len)
                        && (this.offset, next.offset) == (0, 0)
                }
                Op::Put => this.len == 8,
                _ => false,
            }
    }

    #[test]
    fn followers_are_as_many_as_an_oracle_says() {
        let mut state = 1u64;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        for _ in 0..2000 {
            let mut run = vec![Descriptor { source_kind: SourceKind::Region, ..Descriptor::default() }];
            for _ in 0..below(40) {
                let mut next = run[run.len() - 1];
                next.source[1] += next.len;
                match below(24) {
                    0..4 => next.op = [Op::Send, Op::Put, Op::Get, Op::Atomic][below(4) as usize],
                    4..8 => next.len = [8, 8, 16, 0][below(4) as usize],
                    8 => next.rank = Rank(below(2) as u32),
                    9 => next.region = below(2) as u32,
                    10 => next.source[0] = below(2),
                    11 => next.source[1] = 8 * below(100),
                    12 => next.source_kind = [SourceKind::Region, SourceKind::Inline][below(2) as usize],
                    13 => next.info_len = below(2) as u8,
                    14 => next.ticket = below(2),
                    15 if next.op == Op::Send => next.protocol = ProtocolId(below(2) as u16),
                    _ => {}
                }
                next.offset = if next.op == Op::Send { below(20) / 19 } else { 8 * below(100) };
                run.push(next);
            }
            let mut told = run.clone();
            Descriptor::tell_followers(&mut told);
            for at in 0..run.len() {
                let pairs = run[at..].windows(2);
                let expected = pairs.take_while(|pair| follows(&pair[0], &pair[1])).count();
                assert_eq!(told[at].followers(), expected, "{at} of {run:#?}");
                if expected == 0 && run[at].op != Op::Put {
                    assert_eq!(told[at].as_bytes(), run[at].as_bytes(), "it tells of none");
                }
            }
        }
    }

    #[test]
    fn more_followers_than_can_be_told_are_told_as_the_most() {
        let put =
            Descriptor { op: Op::Put, source_kind: SourceKind::Region, len: 8, ..Descriptor::default() };
        let mut run = vec![put; 70_000];
        Descriptor::tell_followers(&mut run);
        let told = [0, 4464, 4465, 69_998, 69_999].map(|at: usize| run[at].followers());
        assert_eq!(told, [65_535, 65_535, 65_534, 1, 0]);
    }
}
