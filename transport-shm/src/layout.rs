//! Where everything lies in the arena: a function of the job's shape alone, so that a rank can write into the
//! lane of a peer that has not started yet (P01, P02).
//!
//! ```text
//!   header page | rank table | endpoint blocks | lanes | page pools | segments (windows, regions)
//!                 64 B each    1 page each       ctrl     one per     one per rank
//!                                                + ring   endpoint
//! ```
//! The arena is sparse: a part costs memory only once it is committed, which its first user does.

use posthaste_core::{ClientId, Endpoint, JobShape, Rank};

/// Granule in bytes of everything that is committed on its own.
pub const PAGE: u64 = 4096;
/// "posthas1", the first word of an arena.
pub const MAGIC: u64 = u64::from_le_bytes(*b"posthas1");

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

/// The map of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The job.
    pub shape: JobShape,
    /// The chosen sizes.
    pub sizes: Sizes,
}

impl Layout {
    /// The layout of a job.
    #[must_use]
    pub const fn new(shape: JobShape, sizes: Sizes) -> Self {
        Self { shape, sizes }
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

    const fn blocks(&self) -> u64 {
        let (at, len) = self.rank_table();
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
        PAGE + self.sizes.lane.next_multiple_of(PAGE)
    }

    /// The lane from one endpoint to another: a control page, then the ring.
    #[must_use]
    pub const fn lane(&self, client: ClientId, from: Endpoint, to: Endpoint) -> (u64, u64) {
        let index = self.global(client, to) * self.endpoints() + self.shape.index(from) as u64;
        (self.lanes() + index * self.lane_bytes(), self.lane_bytes())
    }

    const fn pools(&self) -> u64 {
        self.lanes() + self.all_endpoints() * self.endpoints() * self.lane_bytes()
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
            u64::from(posthaste_core::wire::WIRE_VERSION),
        ];
        // FNV-1a, by words.
        parts
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash, part| (hash ^ part).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use posthaste_core::ContextId;

    #[test]
    fn parts_do_not_overlap() {
        let shape = JobShape { ranks: 3, clients: 2, contexts: 2 };
        let layout = Layout::new(shape, Sizes { lane: 512, pool: 1 << 20, segment: 1 << 20 });
        let mut parts = vec![(0, PAGE), layout.rank_table()];
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
}
