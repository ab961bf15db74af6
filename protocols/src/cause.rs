//! Why collective operations broke, as ranks tell each other: those of the job, and those of groups.

use crate::collective::wire::{call_of, call_words};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use posthaste_core::{Collective, Fault, Rank};

/// Bytes of a cause.
pub(crate) const CAUSE_BYTES: usize = 28;

/// Adds a cause: a code, and two ranks with their calls, little-endian.
pub(crate) fn put_cause(bytes: &mut BytesMut, cause: Fault) {
    let (code, ranks, calls) = match cause {
        Fault::PeerLost(rank) => (1, [rank; 2], [Collective::Barrier; 2]),
        Fault::PeerClosed(rank) => (2, [rank; 2], [Collective::Barrier; 2]),
        Fault::PeerCorrupt(rank) => (3, [rank; 2], [Collective::Barrier; 2]),
        Fault::CollectiveMismatch { ranks, calls } => (4, ranks, calls),
        Fault::RemotePanicked(rank) => (5, [rank; 2], [Collective::Barrier; 2]),
        Fault::GroupLeft(rank) => (7, [rank; 2], [Collective::Barrier; 2]),
        Fault::CollectiveRefused { rank, call } => (8, [rank; 2], [call; 2]),
        Fault::ExecutorFailed { rank, call } => (9, [rank; 2], [call; 2]),
        _ => (6, [Rank(0); 2], [Collective::Barrier; 2]),
    };
    bytes.put_u32_le(code);
    for (rank, call) in ranks.into_iter().zip(calls) {
        let (kind, detail) = call_words(call);
        bytes.put_u32_le(rank.0);
        bytes.put_u32_le(kind);
        bytes.put_u32_le(detail);
    }
}

/// How often operations were found to be broken from an earlier one on than was known. The others are told each time, so that it
/// is believed so often only: then all are, from the first on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lowered(u32);

impl Lowered {
    /// More than members that die one after the other lower it in any run of operations.
    const MOST: u32 = 64;

    /// Whether nothing more is believed.
    pub fn is_spent(self) -> bool {
        self.0 > Self::MOST
    }

    /// Once more; from where on they are broken.
    pub fn to(&mut self, first: u64) -> u64 {
        self.0 = self.0.saturating_add(1);
        if self.is_spent() { 0 } else { first }
    }
}

/// Whether the ranks that it names are some of a job of that size: what a peer says of others is shown to users.
pub(crate) fn names_ranks_of(size: u32, cause: Fault) -> bool {
    let ranks = match cause {
        Fault::CollectiveMismatch { ranks, .. } => ranks,
        cause => [cause.peer().unwrap_or(Rank(0)); 2],
    };
    ranks.iter().all(|rank| rank.0 < size)
}

/// `None`: no honest rank sends that.
pub(crate) fn parse_cause(mut bytes: Bytes) -> Option<Fault> {
    if bytes.len() != CAUSE_BYTES {
        return None;
    }
    let code = bytes.get_u32_le();
    let mut side = || {
        let rank = Rank(bytes.get_u32_le());
        let call = call_of(bytes.get_u32_le(), bytes.get_u32_le())?;
        Some((rank, call))
    };
    let (one, other) = (side()?, side()?);
    Some(match code {
        1 => Fault::PeerLost(one.0),
        2 => Fault::PeerClosed(one.0),
        3 => Fault::PeerCorrupt(one.0),
        4 => Fault::CollectiveMismatch { ranks: [one.0, other.0], calls: [one.1, other.1] },
        5 => Fault::RemotePanicked(one.0),
        6 => Fault::OutOfMemory("on another rank, in a collective operation"),
        7 => Fault::GroupLeft(one.0),
        8 => Fault::CollectiveRefused { rank: one.0, call: one.1 },
        9 => Fault::ExecutorFailed { rank: one.0, call: one.1 },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_go_round_and_whom_they_name_is_checked() {
        let call = Collective::Barrier;
        let of = |rank: Rank| {
            [
                Fault::PeerLost(rank),
                Fault::PeerClosed(rank),
                Fault::PeerCorrupt(rank),
                Fault::RemotePanicked(rank),
                Fault::GroupLeft(rank),
                Fault::CollectiveRefused { rank, call },
                Fault::ExecutorFailed { rank, call },
                Fault::CollectiveMismatch { ranks: [Rank(0), rank], calls: [call; 2] },
                Fault::CollectiveMismatch { ranks: [rank, Rank(0)], calls: [call; 2] },
            ]
        };
        for (rank, is_known) in [(3, true), (4, false), (u32::MAX, false)] {
            for cause in of(Rank(rank)) {
                let mut bytes = BytesMut::new();
                put_cause(&mut bytes, cause);
                assert_eq!(parse_cause(bytes.freeze()), Some(cause));
                assert_eq!(names_ranks_of(4, cause), is_known, "{cause:?}");
            }
        }
        assert!(names_ranks_of(1, Fault::OutOfMemory("there")), "it names nobody");
    }
}
