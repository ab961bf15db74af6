//! What ranks tell each other about collective operations.
//!
//! A *part* of an operation carries its tag in the cookie, so that a part of one word is the message that devices carry
//! fastest. Everything else is a *record*, with a cookie of 0.
//!
//! ```text
//!   tag     63..48 group | 47..32 operation | 31..19 phase | 18..0 mark of the call: 4 bits kind, 15 bits the rest
//!   info    chunk 4                                  of a long part only
//!           chunk 4 | length 4 | offset 8            of one that lies in the sender's memory; nothing else
//!   record  kind 4 | group 4 | a 8 | b 8 | more      little-endian
//! ```
//! The group is a number of the sender's, which it introduces to a peer before its first use.

use super::stage::Reference;
use crate::cause::{parse_cause, put_cause};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use posthaste_core::{Collective, Fault, Rank, WindowId};

/// Bits of a tag's phase.
const PHASE_BITS: u32 = 13;
/// Bits of a call's mark.
const MARK_BITS: u32 = 19;

const INTRODUCE: u32 = 1;
const CLEAR: u32 = 2;
const STARTED: u32 = 3;
const WANT: u32 = 4;
const BROKEN: u32 = 5;
const BOARD: u32 = 6;
const LOOKING: u32 = 7;
const ASK: u32 = 8;
const LEFT: u32 = 9;
const CALLED: u32 = 10;

const HEADER: usize = 24;

/// What names a part of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// The group, as the sender counts.
    pub group: u16,
    /// The low bits of the operation's number.
    pub operation: u16,
    pub phase: u16,
    /// What the sender called.
    pub mark: u32,
}

impl Tag {
    /// Never 0, because no kind is.
    #[inline]
    pub fn to_word(self) -> u64 {
        u64::from(self.group) << 48
            | u64::from(self.operation) << 32
            | u64::from(self.phase) << MARK_BITS
            | u64::from(self.mark)
    }

    #[inline]
    pub fn from_word(word: u64) -> Tag {
        Tag {
            group: (word >> 48) as u16,
            operation: (word >> 32) as u16,
            phase: (word >> MARK_BITS) as u16 & ((1 << PHASE_BITS) - 1),
            mark: word as u32 & ((1 << MARK_BITS) - 1),
        }
    }
}

/// Bytes of the longest message info of a part.
pub(crate) const PART_INFO: usize = 16;

/// The message info of a part that is one of several, or lies in its sender's memory.
pub(crate) fn put_part_info(into: &mut [u8; PART_INFO], slice: u32, lent: Option<Reference>) -> &[u8] {
    into[..4].copy_from_slice(&slice.to_le_bytes());
    let Some(Reference { offset, len }) = lent else { return &into[..4] };
    into[4..8].copy_from_slice(&len.to_le_bytes());
    into[8..].copy_from_slice(&offset.to_le_bytes());
    into
}

/// Number and place of a part, from its message info. `None`: no honest rank sends that.
#[inline]
pub(crate) fn parse_part_info(info: &[u8]) -> Option<(u32, Option<Reference>)> {
    if info.is_empty() {
        return Some((0, None));
    }
    let (slice, rest) = info.split_first_chunk()?;
    let slice = u32::from_le_bytes(*slice);
    if rest.is_empty() {
        return Some((slice, None));
    }
    let (len, offset) = rest.split_first_chunk()?;
    let offset = u64::from_le_bytes(offset.try_into().ok()?);
    Some((slice, Some(Reference { offset, len: u32::from_le_bytes(*len) })))
}

/// The mark of a call: its kind, and a hash of the rest of what all ranks must agree on.
#[inline]
pub(crate) fn mark(kind: u8, rest: [u64; 2]) -> u32 {
    let mixed = (rest[0] ^ rest[1].rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    u32::from(kind) << 15 | (mixed >> 49) as u32
}

/// The kind in a mark.
pub(crate) fn kind_in(mark: u32) -> u8 {
    (mark >> 15) as u8
}

/// How a group that a record introduces came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Origin {
    /// All its members make it by themselves.
    Agreed = 0,
    /// Its members called for it and wait to hear its number.
    Called = 1,
    /// Nobody but the sender knows of it yet.
    OnTheFly = 2,
}

/// One message that is no part of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// From now on the sender calls the group `id` by the number `group`. The members, unless they are agreed.
    Introduce { group: u16, id: u64, origin: Origin, members: Vec<Rank> },
    /// The sender takes part in the operation and is ready for a long message of so many bytes.
    Clear { group: u16, operation: u64, phase: u16, colour: u32, len: u64 },
    /// The sender has no memory to lend its parts of the operation from: it waits to be told of each long one that the
    /// receiver is ready.
    Ask { group: u16, operation: u64 },
    /// The sender has waited in the operation for long, and this is what it has called: the receiver may have called something
    /// else, of which no message tells.
    Called { group: u16, operation: u64, mark: u32, bytes: u32 },
    /// The sender has started the operations before this one.
    Started { group: u16, operations: u64 },
    /// The sender waits until the receiver has started so many operations.
    Want { group: u16, operations: u64 },
    /// The sender's board is there in its memory; it can be looked at until the receiver leaves the group.
    Board { group: u16, offset: u64 },
    /// The sender knows the boards of all and looks there.
    Looking { group: u16 },
    /// The sender has dropped the group, and takes no part in its operations from `first` on.
    Left { id: u64, first: u64 },
    /// No operation of the group from `first` on can end well.
    Broken { id: u64, first: u64, cause: Fault },
}

pub(crate) fn call_words(call: Collective) -> (u32, u32) {
    match call {
        Collective::Barrier => (1, 0),
        Collective::Broadcast(bytes) => (2, bytes),
        Collective::Reduce(bytes) => (3, bytes),
        Collective::AllReduce(bytes) => (4, bytes),
        Collective::Gather(bytes) => (5, bytes),
        Collective::Scatter(bytes) => (6, bytes),
        Collective::AllGather(bytes) => (7, bytes),
        Collective::AllToAll(bytes) => (8, bytes),
        Collective::ReduceScatter(bytes) => (9, bytes),
        Collective::Free(window) => (10, window.0),
        _ => (11, 0),
    }
}

pub(crate) fn call_of(kind: u32, detail: u32) -> Option<Collective> {
    Some(match kind {
        1 => Collective::Barrier,
        2 => Collective::Broadcast(detail),
        3 => Collective::Reduce(detail),
        4 => Collective::AllReduce(detail),
        5 => Collective::Gather(detail),
        6 => Collective::Scatter(detail),
        7 => Collective::AllGather(detail),
        8 => Collective::AllToAll(detail),
        9 => Collective::ReduceScatter(detail),
        10 => Collective::Free(WindowId(detail)),
        11 => Collective::Shmalloc,
        _ => return None,
    })
}

impl Record {
    pub fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(HEADER + 32);
        let mut header = |kind: u32, group: u16, a: u64, b: u64| {
            bytes.put_u32_le(kind);
            bytes.put_u32_le(group.into());
            bytes.put_u64_le(a);
            bytes.put_u64_le(b);
        };
        match self {
            Record::Introduce { group, id, origin, members } => {
                header(INTRODUCE, *group, *id, *origin as u64);
                members.iter().for_each(|member| bytes.put_u32_le(member.0));
            }
            Record::Clear { group, operation, phase, colour, len } => {
                header(CLEAR, *group, *operation, u64::from(*phase) << 32 | u64::from(*colour));
                bytes.put_u64_le(*len);
            }
            Record::Called { group, operation, mark, bytes } => {
                header(CALLED, *group, *operation, u64::from(*mark) << 32 | u64::from(*bytes));
            }
            Record::Ask { group, operation } => header(ASK, *group, *operation, 0),
            Record::Started { group, operations } => header(STARTED, *group, *operations, 0),
            Record::Want { group, operations } => header(WANT, *group, *operations, 0),
            Record::Board { group, offset } => header(BOARD, *group, *offset, 0),
            Record::Looking { group } => header(LOOKING, *group, 0, 0),
            Record::Left { id, first } => header(LEFT, 0, *id, *first),
            Record::Broken { id, first, cause } => {
                header(BROKEN, 0, *id, *first);
                put_cause(&mut bytes, *cause);
            }
        }
        bytes.freeze()
    }

    /// `None`: no honest rank sends that.
    pub fn parse(mut bytes: Bytes) -> Option<Record> {
        if bytes.len() < HEADER {
            return None;
        }
        let (kind, group) = (bytes.get_u32_le(), bytes.get_u32_le());
        let (a, b) = (bytes.get_u64_le(), bytes.get_u64_le());
        let group = u16::try_from(group).ok()?;
        if ![INTRODUCE, BROKEN, CLEAR].contains(&kind) && !bytes.is_empty() {
            return None;
        }
        Some(match kind {
            INTRODUCE => {
                let origin = [Origin::Agreed, Origin::Called, Origin::OnTheFly];
                let origin = origin.into_iter().find(|origin| *origin as u64 == b)?;
                if !bytes.len().is_multiple_of(4) || (origin == Origin::Agreed) != bytes.is_empty() {
                    return None;
                }
                let members = (0..bytes.len() / 4).map(|_| Rank(bytes.get_u32_le())).collect();
                Record::Introduce { group, id: a, origin, members }
            }
            CLEAR => {
                let len = u64::from_le_bytes(bytes.as_ref().try_into().ok()?);
                let phase = u16::try_from(b >> 32).ok()?;
                Record::Clear { group, operation: a, phase, colour: b as u32, len }
            }
            CALLED => Record::Called { group, operation: a, mark: (b >> 32) as u32, bytes: b as u32 },
            ASK => Record::Ask { group, operation: a },
            STARTED => Record::Started { group, operations: a },
            WANT => Record::Want { group, operations: a },
            BOARD => Record::Board { group, offset: a },
            LOOKING => Record::Looking { group },
            LEFT => Record::Left { id: a, first: b },
            BROKEN => Record::Broken { id: a, first: b, cause: parse_cause(bytes)? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_come_back_as_they_were() {
        for tag in [
            Tag { group: 0, operation: 0, phase: 0, mark: mark(1, [0, 0]) },
            Tag { group: 65535, operation: 65535, phase: 8191, mark: mark(9, [77, u64::MAX]) },
            Tag { group: 1, operation: 256, phase: 4096, mark: mark(4, [8, 3]) },
        ] {
            assert_eq!(Tag::from_word(tag.to_word()), tag);
            assert_ne!(tag.to_word(), 0);
        }
        assert_eq!(kind_in(mark(7, [1, 2])), 7);
        assert_ne!(mark(4, [8, 3]), mark(4, [16, 3]));
    }

    #[test]
    fn part_info_comes_back_as_it_was() {
        let lent = Some(Reference { offset: u64::MAX - 7, len: 1 << 31 });
        for (slice, lent) in [(0, None), (u32::MAX, None), (0, lent), (9, lent)] {
            let mut info = [0; PART_INFO];
            assert_eq!(parse_part_info(put_part_info(&mut info, slice, lent)), Some((slice, lent)));
        }
        assert_eq!(parse_part_info(&[]), Some((0, None)));
        for len in (1..40).filter(|len| ![4, PART_INFO].contains(len)) {
            assert_eq!(parse_part_info(&vec![1; len]), None);
        }
    }

    #[test]
    fn records_come_back_as_they_were() {
        let calls = [Collective::AllReduce(8), Collective::Free(WindowId(8))];
        let mismatch = Fault::CollectiveMismatch { ranks: [Rank(1), Rank(2)], calls };
        let mut records = vec![
            Record::Introduce { group: 3, id: 1 << 33, origin: Origin::Agreed, members: vec![] },
            Record::Introduce { group: 4, id: 9, origin: Origin::OnTheFly, members: vec![Rank(7), Rank(1)] },
            Record::Clear { group: 5, operation: 1 << 40, phase: 8000, colour: 1, len: 1 << 50 },
            Record::Called { group: 5, operation: 1 << 40, mark: 1 << 18, bytes: u32::MAX },
            Record::Ask { group: 5, operation: 1 << 50 },
            Record::Started { group: 6, operations: 64 },
            Record::Want { group: 7, operations: 65 },
            Record::Board { group: 8, offset: 1 << 40 },
            Record::Looking { group: 9 },
            Record::Left { id: 1 << 45, first: 1 << 40 },
        ];
        for cause in [
            Fault::PeerLost(Rank(4)),
            Fault::PeerClosed(Rank(5)),
            Fault::PeerCorrupt(Rank(6)),
            Fault::RemotePanicked(Rank(7)),
            mismatch,
            Fault::GroupLeft(Rank(3)),
            Fault::CollectiveRefused { rank: Rank(8), call: Collective::AllToAll(12) },
            Fault::ExecutorFailed { rank: Rank(9), call: Collective::Barrier },
        ] {
            records.push(Record::Broken { id: 1, first: 2, cause });
        }
        for record in records {
            assert_eq!(Record::parse(record.encode()), Some(record));
        }
    }

    #[test]
    fn what_no_rank_sends_is_refused() {
        for len in 0..60 {
            for byte in [0, 7, 0xff] {
                assert_eq!(Record::parse(Bytes::from(vec![byte; len])), None);
            }
        }
    }
}
