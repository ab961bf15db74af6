//! What ranks tell each other about their collective operations.
//!
//! ```text
//!   kind 4 | round 4 | operation 8 | detail 8 | blob        little-endian
//! ```

use super::custody::Key;
use crate::cause::{CAUSE_BYTES, parse_cause, put_cause};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use posthaste_core::{Collective, Fault, WindowId};

const BARRIER: u32 = 1;
const ALL_GATHER: u32 = 2;
const SHMALLOC: u32 = 3;
const FREE: u32 = 4;
const RELEASE: u32 = 5;
const BROKEN: u32 = 6;
const GROUP_RELEASE: u32 = 7;

const HEADER: usize = 24;

/// A part of an operation without a blob, as most are, on its way without an allocation.
pub(super) fn bare_part(call: Collective, operation: u64, round: u32) -> [u8; HEADER] {
    let (kind, detail) = call_words(call);
    let mut bytes = [0; HEADER];
    let mut rest = &mut bytes[..];
    rest.put_u32_le(kind);
    rest.put_u32_le(round);
    rest.put_u64_le(operation);
    rest.put_u64_le(detail.into());
    bytes
}

/// One message of the exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// A rank's part in a round of an operation.
    Part { call: Collective, operation: u64, round: u32, blob: Bytes },
    /// The sender has no operation on the window any more, and never will.
    Release { window: u64 },
    /// The same of a window of a group. One that answers another says that the sender never makes it.
    GroupRelease { key: Key, answers: bool },
    /// No operation from `first` on can end well, and some rank never enters any from `unentered` on.
    Broken { first: u64, unentered: u64, cause: Fault },
}

fn call_words(call: Collective) -> (u32, u32) {
    match call {
        Collective::Barrier => (BARRIER, 0),
        Collective::AllGather(bytes) => (ALL_GATHER, bytes),
        Collective::Free(window) => (FREE, window.0),
        // The enum may grow; what is not known here is never encoded here.
        _ => (SHMALLOC, 0),
    }
}

fn call_of(kind: u32, detail: u32) -> Option<Collective> {
    Some(match kind {
        BARRIER => Collective::Barrier,
        ALL_GATHER => Collective::AllGather(detail),
        SHMALLOC => Collective::Shmalloc,
        FREE => Collective::Free(WindowId(detail)),
        _ => return None,
    })
}

fn header(kind: u32, round: u32, operation: u64, detail: u64, room: usize) -> BytesMut {
    let mut bytes = BytesMut::with_capacity(HEADER + room);
    bytes.put_u32_le(kind);
    bytes.put_u32_le(round);
    bytes.put_u64_le(operation);
    bytes.put_u64_le(detail);
    bytes
}

impl Record {
    pub fn part(call: Collective, operation: u64, round: u32, blob: &[u8]) -> BytesMut {
        let (kind, detail) = call_words(call);
        let mut bytes = header(kind, round, operation, detail.into(), blob.len());
        bytes.put_slice(blob);
        bytes
    }

    pub fn release(window: u64) -> BytesMut {
        header(RELEASE, 0, 0, window, 0)
    }

    pub fn group_release((group, operation): Key, answers: bool) -> BytesMut {
        header(GROUP_RELEASE, answers.into(), operation, group, 0)
    }

    pub fn broken(first: u64, unentered: u64, cause: Fault) -> BytesMut {
        let mut bytes = header(BROKEN, 0, first, unentered, CAUSE_BYTES);
        put_cause(&mut bytes, cause);
        bytes
    }

    /// `None`: no honest rank sends that. `rest` gives what lies behind the header, if there is anything.
    pub fn parse(bytes: &[u8], rest: impl FnOnce() -> Bytes) -> Option<Record> {
        let (mut header, blob) = bytes.split_at_checked(HEADER)?;
        let (kind, round) = (header.get_u32_le(), header.get_u32_le());
        let (operation, detail) = (header.get_u64_le(), header.get_u64_le());
        let bytes = if blob.is_empty() { Bytes::new() } else { rest().slice(HEADER..) };
        match kind {
            RELEASE => Some(Record::Release { window: detail }),
            GROUP_RELEASE if round <= 1 => {
                Some(Record::GroupRelease { key: (detail, operation), answers: round == 1 })
            }
            GROUP_RELEASE => None,
            BROKEN => {
                let cause = parse_cause(bytes)?;
                Some(Record::Broken { first: operation, unentered: detail, cause })
            }
            kind => {
                let call = call_of(kind, u32::try_from(detail).ok()?)?;
                Some(Record::Part { call, operation, round, blob: bytes })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::Rank;

    #[test]
    fn records_come_back_as_they_were() {
        let blob = Bytes::from_static(b"blob");
        for call in [
            Collective::Barrier,
            Collective::AllGather(9),
            Collective::Shmalloc,
            Collective::Free(WindowId(3)),
        ] {
            assert_eq!(bare_part(call, 1 << 40, 5)[..], Record::part(call, 1 << 40, 5, &[])[..]);
            let part = Record::part(call, 1 << 40, 5, &blob).freeze();
            assert_eq!(
                Record::parse(&part, || part.clone()),
                Some(Record::Part { call, operation: 1 << 40, round: 5, blob: blob.clone() })
            );
        }
        let release = Record::release(77).freeze();
        assert_eq!(Record::parse(&release, || release.clone()), Some(Record::Release { window: 77 }));
        let key = (1 << 50, 1 << 40);
        for answers in [false, true] {
            let release = Record::group_release(key, answers).freeze();
            assert_eq!(
                Record::parse(&release, || release.clone()),
                Some(Record::GroupRelease { key, answers })
            );
        }
        let mismatch = Fault::CollectiveMismatch {
            ranks: [Rank(1), Rank(2)],
            calls: [Collective::AllGather(4), Collective::Free(WindowId(8))],
        };
        for cause in
            [Fault::PeerLost(Rank(4)), Fault::PeerClosed(Rank(5)), Fault::PeerCorrupt(Rank(6)), mismatch]
        {
            let broken = Record::broken(7, u64::MAX, cause).freeze();
            assert_eq!(
                Record::parse(&broken, || broken.clone()),
                Some(Record::Broken { first: 7, unentered: u64::MAX, cause })
            );
        }
    }

    #[test]
    fn what_no_rank_sends_is_refused() {
        for len in 0..60 {
            for byte in [0, 7, 0xff] {
                let bytes = Bytes::from(vec![byte; len]);
                assert_eq!(Record::parse(&bytes, || bytes.clone()), None);
            }
        }
    }
}
