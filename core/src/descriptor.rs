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
    /// The protocol, as the sender counts it. Travels with a send.
    pub protocol: ProtocolId,
    /// Key of the target region (put, get and atomic operation).
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

impl Descriptor {
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

    /// Of a recorded send: at least so many descriptors behind it in its run differ from the one before them in nothing but
    /// that their payload lies right behind that one's. So a device needs to look at none of them.
    #[inline]
    #[must_use]
    pub const fn followers(&self) -> usize {
        (self.offset >> 32) as usize
    }

    /// Looks which sends of a run of recorded ones follow each other, and has each tell how many [`followers`](Self::followers)
    /// it has.
    pub(crate) fn tell_followers(run: &mut [Descriptor]) {
        for at in (1..run.len()).rev() {
            let (send, next) = (run[at - 1], run[at]);
            let behind = Some(next.source[1]) == send.source[1].checked_add(send.len);
            let place = |send: Descriptor| Descriptor { offset: 0, source: [send.source[0], 0], ..send };
            // Only what has no info leaves the offset alone.
            let plain = |send: &Descriptor| {
                send.op == Op::Send
                    && send.source_kind == SourceKind::Region
                    && (send.info_len, send.offset as u32) == (0, 0)
            };
            let alike = place(send).as_bytes() == place(next).as_bytes();
            if plain(&send) && plain(&next) && alike && behind {
                run[at - 1].offset = (next.followers() as u64 + 1) << 32;
            }
        }
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
