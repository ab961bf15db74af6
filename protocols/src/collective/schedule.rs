//! What a rank has to do in a collective operation, as data: phases of sources and sends, without any I/O.
//!
//! A [`Schedule`] is asked once per group, kind and root for the [`Program`] of one rank. What the ranks move are
//! *blocks*; how long these are the schedule does not know:
//!
//! | kind | blocks |
//! |---|---|
//! | broadcast, reduce, allreduce | the vector in as many nearly equal parts as the program says |
//! | gather, scatter, allgather, reduce-scatter | block *i* comes from, or goes to, rank *i* |
//! | all-to-all | a send names the block *for* a rank, a receive the block *from* a rank |
//! | barrier | one, of no bytes |

use std::fmt::Debug;
use std::ops::Range;

/// What a collective operation does.
///
/// # Examples
/// ```
/// use posthaste_protocols::collective::Kind;
///
/// let rooted = Kind::ALL.into_iter().filter(|kind| kind.has_root());
/// assert!(rooted.eq([Kind::Broadcast, Kind::Reduce, Kind::Gather, Kind::Scatter]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Nobody goes on before everybody has come.
    Barrier = 1,
    /// The root's vector goes to all.
    Broadcast = 2,
    /// The vectors of all are combined at the root.
    Reduce = 3,
    /// The vectors of all are combined everywhere.
    AllReduce = 4,
    /// A block of each comes to the root.
    Gather = 5,
    /// A block of the root's goes to each.
    Scatter = 6,
    /// A block of each comes to all.
    AllGather = 7,
    /// A block of each goes to each.
    AllToAll = 8,
    /// The vectors of all are combined, and a block of the result goes to each.
    ReduceScatter = 9,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 9] = [
        Kind::Barrier,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllReduce,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllGather,
        Kind::AllToAll,
        Kind::ReduceScatter,
    ];

    /// Whether one rank of the group has a part of its own.
    #[must_use]
    pub const fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    /// Whether what is sent and what is received are blocks of different memory.
    #[must_use]
    pub const fn is_separate(self) -> bool {
        matches!(self, Kind::AllToAll)
    }

    /// Whether there is a block per rank.
    #[must_use]
    pub const fn has_block_per_rank(self) -> bool {
        matches!(self, Kind::Gather | Kind::Scatter | Kind::AllGather | Kind::AllToAll | Kind::ReduceScatter)
    }
}

/// Where a rank is in its group.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// This rank, as the group counts.
    pub rank: usize,
    /// Ranks of the group; at least 1.
    pub size: usize,
    /// The root, as the group counts; 0 for operations without one.
    pub root: usize,
    /// The host of each rank of the group, by any numbers.
    pub nodes: &'a [u32],
}

/// A list of blocks, as runs of consecutive ones.
///
/// # Examples
/// ```
/// use posthaste_protocols::collective::Blocks;
///
/// let mut blocks = Blocks::wrapped(3, 3, 5); // from block 3 on, around a ring of five
/// assert!(blocks.iter().eq([3, 4, 0]));
/// blocks.push(1, 1);
/// assert_eq!(blocks.runs(), [3..5, 0..2]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks(Vec<Range<u32>>);

impl Blocks {
    /// One block.
    #[must_use]
    pub fn one(block: usize) -> Self {
        Self::run(block, 1)
    }

    /// `count` blocks from `first` on.
    #[must_use]
    pub fn run(first: usize, count: usize) -> Self {
        let mut blocks = Self::default();
        blocks.push(first, count);
        blocks
    }

    /// `count` blocks from `first` on of a ring of `size`; at most all.
    #[must_use]
    pub fn wrapped(first: usize, count: usize, size: usize) -> Self {
        let first = first % size;
        let before_end = count.min(size - first);
        let mut blocks = Self::run(first, before_end);
        blocks.push(0, (count - before_end).min(first));
        blocks
    }

    /// Adds `count` blocks from `first` on.
    pub fn push(&mut self, first: usize, count: usize) {
        let run = first as u32..(first + count) as u32;
        match self.0.last_mut() {
            _ if run.is_empty() => {}
            Some(last) if last.end == run.start => last.end = run.end,
            _ => self.0.push(run),
        }
    }

    /// The runs, in order.
    #[must_use]
    pub fn runs(&self) -> &[Range<u32>] {
        &self.0
    }

    /// Whether any block is in two runs.
    pub(super) fn names_any_twice(&self) -> bool {
        let mut runs: Vec<&Range<u32>> = self.0.iter().collect();
        runs.sort_unstable_by_key(|run| run.start);
        runs.windows(2).any(|pair| pair[1].start < pair[0].end)
    }

    /// Every block, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flat_map(|run| run.start as usize..run.end as usize)
    }
}

impl FromIterator<usize> for Blocks {
    fn from_iter<I: IntoIterator<Item = usize>>(blocks: I) -> Self {
        let mut list = Self::default();
        for block in blocks {
            list.push(block, 1);
        }
        list
    }
}

/// What is done with blocks that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They replace what is there.
    Store,
    /// They are combined with what is there, which is the left operand.
    Append,
    /// They are combined with what is there, and are the left operand.
    Prepend,
}

/// Blocks that come from a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Whose, as the group counts.
    pub from: usize,
    /// Which.
    pub blocks: Blocks,
    /// What is done with them.
    pub action: Action,
}

/// Blocks that go to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Where to, as the group counts.
    pub to: usize,
    /// Which.
    pub blocks: Blocks,
}

/// A phase: what is sent in it is what was there before it, and what comes in it is taken in the order of the list.
///
/// What is sent to a rank in a phase comes there in the phase of the same number, at most one message per phase and
/// direction of a pair. A phase need not wait for the one before it: what really depends on what follows from the
/// blocks, and the executor keeps to that only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// What goes out.
    pub sends: Vec<Transfer>,
    /// What comes in.
    pub sources: Vec<Source>,
}

/// A sequence of phases: one *colour*. The chunks of a long operation go over the routes of a program in turns.
///
/// # Examples
/// ```
/// use posthaste_protocols::collective::{Action, Blocks, Program, Route};
///
/// // The middle one of a chain of three adds its vector to what comes, and hands the sum on.
/// let mut route = Route::default();
/// route.receive(0, 0, Blocks::one(0), Action::Prepend);
/// route.send(1, 2, Blocks::one(0));
/// assert_eq!(route.phases().len(), 2);
/// assert_eq!(Program::new(1, route).routes.len(), 1);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    phases: Vec<Phase>,
}

impl Route {
    /// The phases, by number.
    #[must_use]
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    fn phase(&mut self, phase: usize) -> &mut Phase {
        if self.phases.len() <= phase {
            self.phases.resize_with(phase + 1, Phase::default);
        }
        &mut self.phases[phase]
    }

    /// Has blocks sent in that phase.
    pub fn send(&mut self, phase: usize, to: usize, blocks: Blocks) {
        self.phase(phase).sends.push(Transfer { to, blocks });
    }

    /// Awaits blocks in that phase.
    pub fn receive(&mut self, phase: usize, from: usize, blocks: Blocks, action: Action) {
        self.phase(phase).sources.push(Source { from, blocks, action });
    }
}

/// What one rank does in a collective operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Number of blocks; the same on all ranks.
    pub blocks: usize,
    /// The colours; as many on all ranks, at least one.
    pub routes: Vec<Route>,
}

impl Program {
    /// A program of one colour.
    #[must_use]
    pub fn new(blocks: usize, route: Route) -> Self {
        Self { blocks, routes: vec![route] }
    }
}

/// A way to carry out collective operations. Pure: the same place always gives the same program, and the programs of all
/// ranks of a group fit together.
///
/// [`Algorithm`](super::Algorithm) has those of the library; a group takes any other through
/// [`Group::custom_schedule`](crate::Group::custom_schedule).
///
/// # Examples
/// A barrier in which everybody reports to the first rank:
/// ```
/// use posthaste_protocols::collective::{Action, Blocks, Kind, Place, Program, Route, Schedule};
///
/// #[derive(Debug)]
/// struct RollCall;
///
/// impl Schedule for RollCall {
///     fn name(&self) -> &str {
///         "roll call"
///     }
///
///     fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
///         let mut route = Route::default();
///         match (kind, place.rank) {
///             (Kind::Barrier, 0) => {
///                 for other in 1..place.size {
///                     route.receive(0, other, Blocks::one(0), Action::Append);
///                     route.send(1, other, Blocks::one(0));
///                 }
///             }
///             (Kind::Barrier, _) => {
///                 route.send(0, 0, Blocks::one(0));
///                 route.receive(1, 0, Blocks::one(0), Action::Append);
///             }
///             _ => return None,
///         }
///         Some(Program::new(1, route))
///     }
/// }
///
/// let place = Place { rank: 0, size: 3, root: 0, nodes: &[0; 3] };
/// let program = RollCall.program(Kind::Barrier, &place).expect("it has a barrier");
/// assert_eq!(program.routes[0].phases()[1].sends.len(), 2);
/// ```
pub trait Schedule: Send + Sync + Debug {
    /// Its name; ranks that use schedules of different names for one operation are told that they differ.
    fn name(&self) -> &str;

    /// What the rank at that place does; `None`: this schedule does not do that kind of operation. A group keeps the
    /// last 64 answers, by schedule, kind and root, and asks again for those that it has let go.
    fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program>;
}
