//! The schedules of the library.

mod direct;
mod doubling;
mod levels;
mod ring;
mod tree;

use super::schedule::{Kind, Place, Program, Schedule};

/// Ranks past which rings are not chosen, and not possible: a ring has two phases per rank.
const MOST_IN_RING: usize = 4096;

/// Ranks of one host past which a long allreduce is a ring there, too.
const MOST_DIRECT: usize = 32;

/// A well-known way to carry out collective operations.
///
/// # Examples
/// ```
/// use posthaste_protocols::collective::{Algorithm, Kind, Place, Schedule};
///
/// // What rank 2 of four does in a ring: a schedule is plain data and can be looked at.
/// let place = Place { rank: 2, size: 4, root: 0, nodes: &[0; 4] };
/// let program = Algorithm::Ring.program(Kind::AllGather, &place).expect("rings gather");
/// let first = &program.routes[0].phases()[0];
/// assert_eq!(first.sends[0].to, 3);
/// assert!(Algorithm::Ring.program(Kind::Barrier, &place).is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Binomial trees: few messages, as many phases as the size has bits. Everything but all-to-all.
    Binomial,
    /// Ranks exchange with partners at doubling distances: barrier, allreduce, allgather. Sizes that are no power of two
    /// fold the surplus ranks onto others first.
    RecursiveDoubling,
    /// Everybody talks to neighbours only, and long vectors go round in parts: broadcast, reduce, allreduce, allgather,
    /// reduce-scatter.
    Ring,
    /// A ring in each direction, two colours for the chunks of a long vector: broadcast, allreduce, allgather,
    /// reduce-scatter.
    TwoRings,
    /// Everybody talks to everybody (or to the root) directly.
    Pairwise,
    /// Messages to ranks at doubling distances, for any size: barrier (Hensgen, Finkel and Manber 1988), allgather (Bruck
    /// et al. 1997).
    Dissemination,
    /// Inside each host first, then between one leader per host. Everything but all-to-all.
    TwoLevel,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 7] = [
        Algorithm::Binomial,
        Algorithm::RecursiveDoubling,
        Algorithm::Ring,
        Algorithm::TwoRings,
        Algorithm::Pairwise,
        Algorithm::Dissemination,
        Algorithm::TwoLevel,
    ];

    /// The algorithm that suits an operation of `bytes` in the longest vector or block of each rank best. All ranks of a
    /// group come to the same choice: it depends on nothing else.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::collective::{Algorithm, Kind};
    ///
    /// let nodes = [0; 16]; // all on one host
    /// let small = Algorithm::choose(Kind::AllReduce, 8, 16, &nodes);
    /// let large = Algorithm::choose(Kind::AllReduce, 64 << 20, 16, &nodes);
    /// assert_ne!(small, large);
    /// ```
    #[must_use]
    pub fn choose(kind: Kind, bytes: usize, size: usize, nodes: &[u32]) -> Algorithm {
        let mut sorted = nodes.to_vec();
        sorted.sort_unstable();
        let one_host = sorted.first() == sorted.last();
        let hosts_are_shared = !one_host && sorted.windows(2).any(|pair| pair[0] == pair[1]);
        Self::best(kind, bytes, size, one_host, hosts_are_shared)
    }

    /// The same, where it is known whether there is one host, or several with several members.
    pub(crate) fn best(
        kind: Kind,
        bytes: usize,
        size: usize,
        one_host: bool,
        hosts_are_shared: bool,
    ) -> Algorithm {
        let long = bytes >= 256 << 10 && size > 2 && size <= MOST_IN_RING;
        match kind {
            Kind::AllToAll => Algorithm::Pairwise,
            _ if hosts_are_shared && !long => Algorithm::TwoLevel,
            Kind::Barrier => Algorithm::Dissemination,
            Kind::Broadcast | Kind::Reduce if long => Algorithm::Ring,
            Kind::Broadcast | Kind::Reduce | Kind::Scatter | Kind::Gather => Algorithm::Binomial,
            // Where memory is shared, two steps of everybody cost no more than one of each of many, and nobody has to wait
            // for a core so often.
            Kind::AllReduce if long && one_host && size <= MOST_DIRECT => Algorithm::Pairwise,
            Kind::AllReduce if long => Algorithm::Ring,
            Kind::AllReduce => Algorithm::RecursiveDoubling,
            Kind::AllGather if long => Algorithm::Ring,
            Kind::AllGather => Algorithm::Dissemination,
            Kind::ReduceScatter if long => Algorithm::Ring,
            Kind::ReduceScatter => Algorithm::Pairwise,
        }
    }
}

impl Schedule for Algorithm {
    fn name(&self) -> &str {
        match self {
            Algorithm::Binomial => "binomial tree",
            Algorithm::RecursiveDoubling => "recursive doubling",
            Algorithm::Ring => "ring",
            Algorithm::TwoRings => "two rings",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Dissemination => "dissemination",
            Algorithm::TwoLevel => "two-level",
        }
    }

    fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
        match self {
            Algorithm::Binomial => tree::program(kind, place),
            Algorithm::RecursiveDoubling => doubling::recursive(kind, place),
            Algorithm::Ring => ring::program(kind, place, false),
            Algorithm::TwoRings => ring::program(kind, place, true),
            Algorithm::Pairwise => direct::program(kind, place),
            Algorithm::Dissemination => doubling::dissemination(kind, place),
            Algorithm::TwoLevel => levels::program(kind, place),
        }
    }
}

/// Number of blocks of a kind for schedules that do not split vectors.
fn blocks_of(kind: Kind, size: usize) -> usize {
    if kind.has_block_per_rank() { size } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_chosen_follows_from_the_kind_the_length_and_the_hosts() {
        use Algorithm::{
            Binomial as Tree, Dissemination as Spread, Pairwise as Pairs, RecursiveDoubling as Doubling,
            Ring, TwoLevel as Levels,
        };
        // One host, a host for each rank, and hosts of four ranks; short and long on each.
        let one = [0; 16];
        let each: Vec<u32> = (0..16).collect();
        let shared: Vec<u32> = (0..16).map(|rank| rank * 5 % 4).collect();
        let (short, long) = ((256 << 10) - 1, 256 << 10);
        let table = [
            (Kind::Barrier, [Spread, Spread, Spread, Spread, Levels, Spread]),
            (Kind::Broadcast, [Tree, Ring, Tree, Ring, Levels, Ring]),
            (Kind::Reduce, [Tree, Ring, Tree, Ring, Levels, Ring]),
            (Kind::AllReduce, [Doubling, Pairs, Doubling, Ring, Levels, Ring]),
            (Kind::Gather, [Tree, Tree, Tree, Tree, Levels, Tree]),
            (Kind::Scatter, [Tree, Tree, Tree, Tree, Levels, Tree]),
            (Kind::AllGather, [Spread, Ring, Spread, Ring, Levels, Ring]),
            (Kind::ReduceScatter, [Pairs, Ring, Pairs, Ring, Levels, Ring]),
            (Kind::AllToAll, [Pairs; 6]),
        ];
        assert_eq!(table.len(), Kind::ALL.len());
        for (kind, expected) in table {
            let cases =
                [&one[..], &each, &shared].into_iter().flat_map(|nodes| [(short, nodes), (long, nodes)]);
            let chosen: Vec<Algorithm> =
                cases.clone().map(|(bytes, nodes)| Algorithm::choose(kind, bytes, 16, nodes)).collect();
            assert_eq!(chosen, expected, "{kind:?}");
            for (algorithm, (_, nodes)) in chosen.into_iter().zip(cases) {
                for rank in 0..16 {
                    let place = Place { rank, size: 16, root: 3, nodes };
                    assert!(algorithm.program(kind, &place).is_some(), "{algorithm:?} offers no {kind:?}");
                }
            }
            // Two ranks are no ring, nor are too many; and where hosts are shared these do it in two levels.
            let pair = Algorithm::choose(kind, long, 2, &[0, 1]);
            assert_eq!(pair, expected[2], "{kind:?} of two");
            let many: Vec<u32> = (0..MOST_IN_RING as u32 + 1).collect();
            assert_eq!(Algorithm::choose(kind, long, many.len(), &many), expected[2], "{kind:?} of many");
            let halves: Vec<u32> = many.iter().map(|rank| rank / 2).collect();
            assert_eq!(Algorithm::choose(kind, long, many.len(), &halves), expected[4], "{kind:?} of many");
        }
        let crowd = |size| Algorithm::choose(Kind::AllReduce, long, size, &vec![0; size]);
        assert_eq!((crowd(MOST_DIRECT), crowd(MOST_DIRECT + 1)), (Pairs, Ring));
    }
}
