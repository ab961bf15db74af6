//! Where everything lies in the arena: a function of the job's shape alone, so that a rank can write into the
//! lane of a peer that has not started yet (P01, P02).
//!
//! ```text
//!   header page | rank table | clients left | endpoint blocks | lanes | page pools | segments (windows, regions)
//!                 64 B each    1 bit each     1 page each       ctrl     one per     one per rank
//!                                                               + ring   endpoint
//! ```
//! The arena is sparse: a part costs memory only once it is committed, which its first user does.

use crate::lane::{CONTROL_BYTES, GRANT_COUNT};
use posthaste_core::memory::HUGE_PAGE;
use posthaste_core::{ClientId, DeviceError, Endpoint, JobShape, Rank};
use thiserror::Error;

/// Granule in bytes of everything that is committed on its own.
pub const PAGE: u64 = 4096;
/// "posthas3", the first word of an arena.
pub const MAGIC: u64 = u64::from_le_bytes(*b"posthas3");

/// Bytes of a rank's entry in the rank table.
pub const RANK_BYTES: u64 = 64;

/// The sizes that a job can choose; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of a lane's ring; a power of two.
    pub lane: u64,
    /// Virtual bytes of an endpoint's page pool.
    pub pool: u64,
    /// Virtual bytes of a rank's segment for windows and regions.
    pub segment: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { lane: 16 << 10, pool: 256 << 20, segment: 16 << 30 }
    }
}

/// Most bytes of an arena: it has to fit into the address space of a process, beside everything else.
pub const MAX_ARENA: u64 = 1 << 46;

/// Why there is no layout for a job.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A job without ranks, clients or contexts.
    #[error(
        "a job has at least 1 rank, 1 client and 1 context, not {} rank(s), {} client(s) and {} context(s)",
        .0.ranks, .0.clients, .0.contexts
    )]
    Empty(JobShape),
    /// The arena would not fit into the address space.
    #[error(
        "{} rank(s) with {} client(s) of {} context(s) each need an arena of {bytes} bytes, and at most {MAX_ARENA} fit \
         into the address space: start fewer, or lower POSTHASTE_SEGMENT or POSTHASTE_LANE_BYTES",
        .shape.ranks, .shape.clients, .shape.contexts
    )]
    TooLarge {
        /// The job.
        shape: JobShape,
        /// Bytes of the arena; those that cannot be counted are `u128::MAX`.
        bytes: u128,
    },
}

impl From<LayoutError> for DeviceError {
    fn from(error: LayoutError) -> Self {
        DeviceError::Mismatch { subject: "the job's shape", problem: error.to_string() }
    }
}

/// The map of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The job.
    pub shape: JobShape,
    /// The chosen sizes.
    pub sizes: Sizes,
}

impl Layout {
    /// The layout of a job. All its parts lie within [`MAX_ARENA`], so that no offset overflows.
    ///
    /// # Errors
    /// If the job is empty, or its arena would be too large.
    pub fn new(shape: JobShape, sizes: Sizes) -> Result<Self, LayoutError> {
        if shape.ranks == 0 || shape.clients == 0 || shape.contexts == 0 {
            return Err(LayoutError::Empty(shape));
        }
        match wide_total(shape, sizes) {
            bytes if bytes <= u128::from(MAX_ARENA) => Ok(Self { shape, sizes }),
            bytes => Err(LayoutError::TooLarge { shape, bytes }),
        }
    }

    const fn endpoints(&self) -> u64 {
        self.shape.endpoints() as u64
    }

    const fn all_endpoints(&self) -> u64 {
        self.endpoints() * self.shape.clients as u64
    }

    /// The rank table.
    #[must_use]
    pub const fn rank_table(&self) -> (u64, u64) {
        (PAGE, (self.shape.ranks as u64 * RANK_BYTES).next_multiple_of(PAGE))
    }

    /// A rank's entry in the rank table.
    #[must_use]
    pub const fn rank(&self, rank: Rank) -> (u64, u64) {
        (self.rank_table().0 + rank.0 as u64 * RANK_BYTES, RANK_BYTES)
    }

    /// Which clients of each rank have left.
    #[must_use]
    pub const fn clients_left(&self) -> (u64, u64) {
        let (at, len) = self.rank_table();
        (at + len, (self.shape.ranks as u64 * self.clients_left_bytes()).next_multiple_of(PAGE))
    }

    /// Bytes of each rank's part of that: whole words.
    const fn clients_left_bytes(&self) -> u64 {
        (self.shape.clients as u64).div_ceil(64) * 8
    }

    /// The word of that which tells of a client, and the client's bit there.
    #[must_use]
    pub const fn client_left(&self, rank: Rank, client: ClientId) -> (u64, u64) {
        let of_rank = self.clients_left().0 + rank.0 as u64 * self.clients_left_bytes();
        (of_rank + client.0 as u64 / 64 * 8, 1 << (client.0 % 64))
    }

    const fn blocks(&self) -> u64 {
        let (at, len) = self.clients_left();
        at + len
    }

    const fn global(&self, client: ClientId, endpoint: Endpoint) -> u64 {
        client.0 as u64 * self.endpoints() + self.shape.index(endpoint) as u64
    }

    /// Bytes of an endpoint's block: one line, then the ready bitmap.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        (64 + self.endpoints().div_ceil(64) * 8).next_multiple_of(PAGE)
    }

    /// The block of an endpoint.
    #[must_use]
    pub const fn block(&self, client: ClientId, endpoint: Endpoint) -> (u64, u64) {
        (self.blocks() + self.global(client, endpoint) * self.block_bytes(), self.block_bytes())
    }

    const fn lanes(&self) -> u64 {
        self.blocks() + self.all_endpoints() * self.block_bytes()
    }

    const fn lane_bytes(&self) -> u64 {
        CONTROL_BYTES + self.sizes.lane.next_multiple_of(PAGE)
    }

    /// The lane from one endpoint to another: the control pages, then the ring.
    #[must_use]
    pub const fn lane(&self, client: ClientId, from: Endpoint, to: Endpoint) -> (u64, u64) {
        let index = self.global(client, to) * self.endpoints() + self.shape.index(from) as u64;
        (self.lanes() + index * self.lane_bytes(), self.lane_bytes())
    }

    /// Where a huge page may begin, so that pages of the pools, which lie at multiples of their size, are made of whole ones.
    const fn pools(&self) -> u64 {
        let lanes = self.all_endpoints() * self.endpoints() * self.lane_bytes();
        (self.lanes() + lanes).next_multiple_of(HUGE_PAGE)
    }

    /// The page pool of an endpoint.
    #[must_use]
    pub const fn pool(&self, client: ClientId, endpoint: Endpoint) -> (u64, u64) {
        (self.pools() + self.global(client, endpoint) * self.sizes.pool, self.sizes.pool)
    }

    const fn segments(&self) -> u64 {
        self.pools() + self.all_endpoints() * self.sizes.pool
    }

    /// The segment of a rank for one client: windows and regions.
    #[must_use]
    pub const fn segment(&self, client: ClientId, rank: Rank) -> (u64, u64) {
        let len = self.sizes.segment / self.shape.clients as u64 / PAGE * PAGE;
        let index = client.0 as u64 * self.shape.ranks as u64 + rank.0 as u64;
        (self.segments() + index * len, len)
    }

    /// Length of the whole arena in bytes (virtual).
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.segments() + self.sizes.segment * self.shape.ranks as u64
    }

    /// A hash of everything above, to be compared between ranks.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let parts = [
            u64::from(self.shape.ranks),
            u64::from(self.shape.clients),
            u64::from(self.shape.contexts),
            self.sizes.lane,
            self.sizes.pool,
            self.sizes.segment,
            self.blocks(),
            CONTROL_BYTES,
            GRANT_COUNT as u64,
            u64::from(posthaste_core::wire::WIRE_VERSION),
        ];
        // FNV-1a, by words.
        parts
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash, part| (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

/// [`Layout::total`] of any job at all.
fn wide_total(shape: JobShape, sizes: Sizes) -> u128 {
    let pages = |bytes: u128| bytes.div_ceil(PAGE.into()).saturating_mul(PAGE.into());
    let ranks = u128::from(shape.ranks);
    let endpoints = ranks * u128::from(shape.contexts);
    let all = endpoints * u128::from(shape.clients);
    let lane = u128::from(CONTROL_BYTES) + pages(sizes.lane.into());
    let sum = |parts: &[u128]| parts.iter().copied().fold(0, u128::saturating_add);
    let huge = u128::from(HUGE_PAGE);
    let before_pools = sum(&[
        PAGE.into(),
        pages(ranks * u128::from(RANK_BYTES)),
        pages(ranks * u128::from(shape.clients.div_ceil(64)) * 8),
        all.saturating_mul(pages(64 + endpoints.div_ceil(64) * 8)),
        all.saturating_mul(endpoints).saturating_mul(lane),
    ]);
    sum(&[
        before_pools.div_ceil(huge).saturating_mul(huge),
        all.saturating_mul(sizes.pool.into()),
        ranks.saturating_mul(sizes.segment.into()),
    ])
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use posthaste_core::ContextId;

    #[test]
    fn parts_do_not_overlap() {
        let shape = JobShape { ranks: 3, clients: 2, contexts: 2 };
        let layout =
            Layout::new(shape, Sizes { lane: 512, pool: 1 << 20, segment: 1 << 20 }).expect("a layout");
        let mut parts = vec![(0, PAGE), layout.rank_table(), layout.clients_left()];
        for client in (0..2).map(ClientId) {
            for rank in (0..3).map(Rank) {
                parts.push(layout.segment(client, rank));
                for context in (0..2).map(ContextId) {
                    let to = Endpoint::new(rank, context);
                    parts.push(layout.block(client, to));
                    parts.push(layout.pool(client, to));
                    for index in 0..shape.endpoints() {
                        parts.push(layout.lane(client, shape.endpoint(index), to));
                    }
                }
            }
        }
        parts.sort_unstable();
        for pair in parts.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
        }
        let last = parts.last().expect("parts");
        assert!(last.0 + last.1 <= layout.total());
        assert!(parts.iter().all(|part| part.0 % 64 == 0));
    }

    #[test]
    fn each_client_of_each_rank_has_a_bit_of_its_own() {
        let shape = JobShape { ranks: 40, clients: 130, contexts: 1 };
        let sizes = Sizes { lane: 512, pool: 4096, segment: 0 };
        let layout = Layout::new(shape, sizes).expect("a layout");
        let (at, len) = layout.clients_left();
        let mut seen = std::collections::HashSet::new();
        for (rank, client) in
            (0..40).flat_map(|rank| (0..130).map(move |client| (Rank(rank), ClientId(client))))
        {
            let (word, bit) = layout.client_left(rank, client);
            assert!(at <= word && word + 8 <= at + len && word % 8 == 0);
            assert!(bit.is_power_of_two() && seen.insert((word, bit)), "{rank} {client:?}");
        }
    }

    #[test]
    fn what_is_counted_is_what_is_laid_out() {
        for (ranks, clients, contexts) in
            [(1, 1, 1), (3, 2, 2), (64, 1, 1), (2, 5, 7), (4096, 1, 1), (9, 4000, 1)]
        {
            let shape = JobShape { ranks, clients, contexts };
            for sizes in
                [Sizes { segment: 1 << 30, ..Sizes::default() }, Sizes { lane: 512, pool: 4096, segment: 0 }]
            {
                let layout = Layout::new(shape, sizes).expect("a layout");
                assert_eq!(u128::from(layout.total()), wide_total(shape, sizes), "{shape:?}");
            }
        }
    }

    #[test]
    fn no_size_wraps_around() {
        let refused = |ranks, clients, contexts, sizes| {
            Layout::new(JobShape { ranks, clients, contexts }, sizes).expect_err("refused")
        };
        let usual = Sizes::default();
        for (ranks, clients, contexts) in [(0, 1, 1), (1, 0, 1), (1, 1, 0)] {
            assert!(matches!(refused(ranks, clients, contexts, usual), LayoutError::Empty(_)));
        }
        for (ranks, clients, contexts) in
            [(1, u16::MAX, u16::MAX), (u32::MAX, u16::MAX, u16::MAX), (4096, 64, 64)]
        {
            let error = refused(ranks, clients, contexts, usual);
            assert!(matches!(error, LayoutError::TooLarge { bytes, .. } if bytes > 1 << 46), "{error}");
            assert!(error.to_string().contains("POSTHASTE_SEGMENT"));
        }
        for sizes in [
            Sizes { segment: u64::MAX, ..usual },
            Sizes { pool: u64::MAX, ..usual },
            Sizes { lane: u64::MAX, ..usual },
            // In 64 bits, the segments of two ranks would be none.
            Sizes { segment: 1 << 63, ..usual },
        ] {
            assert!(matches!(refused(2, 1, 1, sizes), LayoutError::TooLarge { .. }), "{sizes:?}");
        }
    }
}
