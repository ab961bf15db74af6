//! The layer between the operations of a group and their messages: in which order a rank does what its program says.
//!
//! A [`Schedule`](super::Schedule) says what is sent and received, and an [`Executor`] when. What moves the bytes, combines
//! them and deals with members that are gone is the same for all executors.

use super::layout::CHUNK;
use super::schedule::Program;
use std::collections::HashSet;
use std::fmt::Debug;

/// A message of a program: one phase of one of its routes names it, and one slice of the values is in it.
///
/// # Examples
/// ```
/// use posthaste_protocols::collective::Step;
///
/// let step = Step { peer: 3, route: 0, phase: 1, slice: 0 };
/// assert_ne!(step, Step { slice: 1, ..step }); // another part of the same blocks
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step {
    /// The other rank, as the group counts.
    pub peer: usize,
    /// The route, by its place in the program.
    pub route: usize,
    /// The phase, by its place in the route.
    pub phase: usize,
    /// The part of each of its blocks, by number. Slice *s* goes over route *s* modulo the number of routes.
    pub slice: usize,
}

/// What a rank does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Turn {
    /// It goes out, with what is in its blocks then.
    Send(Step),
    /// It came, and is stored or combined as the program says.
    Take(Step),
}

impl Turn {
    /// The message.
    #[must_use]
    pub fn step(self) -> Step {
        match self {
            Turn::Send(step) | Turn::Take(step) => step,
        }
    }
}

/// Decides in which order a rank does the turns of a collective operation: how far slices and phases overlap, and in which
/// order routes take turns.
///
/// The library's own does each turn as soon as those are done that it depends on, by the blocks that both name. A group
/// takes any other through [`Group::custom_executor`](crate::Group::custom_executor). It is asked while the context advances,
/// as its [`Execution`] is, and has to be as quick as a handler.
///
/// # Examples
/// One that does a single turn at a time, in the order of the program:
/// ```
/// use posthaste_protocols::collective::{Execution, Executor, Program, Step, Turn};
/// use std::collections::HashSet;
///
/// #[derive(Debug)]
/// struct OneByOne;
///
/// #[derive(Debug)]
/// struct Operation {
///     turns: Vec<Turn>, // the last first
///     here: HashSet<Step>,
///     busy: bool,
/// }
///
/// impl Executor for OneByOne {
///     fn name(&self) -> &str {
///         "one by one"
///     }
///
///     fn begin(&self, _: &Program, turns: &[Turn]) -> Box<dyn Execution> {
///         let turns = turns.iter().rev().copied().collect();
///         Box::new(Operation { turns, here: HashSet::new(), busy: false })
///     }
/// }
///
/// impl Execution for Operation {
///     fn arrived(&mut self, step: Step) {
///         self.here.insert(step);
///     }
///
///     fn next(&mut self) -> Option<Turn> {
///         let is_possible = |turn: &Turn| match turn {
///             Turn::Send(_) => true,
///             Turn::Take(step) => self.here.contains(step),
///         };
///         let turn = self.turns.last().copied().filter(|turn| !self.busy && is_possible(turn))?;
///         self.busy = true;
///         self.turns.pop()
///     }
///
///     fn done(&mut self, _: Turn) {
///         self.busy = false;
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// # let job = posthaste::solo().await?;
/// use posthaste::Reduce;
/// let group = job.world().custom_executor(std::sync::Arc::new(OneByOne));
/// assert_eq!(group.all_reduce(&[1, 2], &Reduce::sum()).await?, [1, 2]);
/// # job.leave().await
/// # }
/// ```
pub trait Executor: Send + Sync + Debug {
    /// Its name, for the log.
    fn name(&self) -> &str;

    /// Bytes of a block that go into one message, which are a slice: at least 16 KiB, and the same on all members. Those of
    /// the library's own unless it says otherwise: 128 KiB.
    fn chunk_bytes(&self) -> usize {
        CHUNK
    }

    /// An operation begins. `turns`: all that this rank has to do, by slice and in the order of the program, which has
    /// the blocks of each.
    fn begin(&self, program: &Program, turns: &[Turn]) -> Box<dyn Execution>;
}

/// One operation under way on one rank.
///
/// Each turn is given once. Who gives one twice, or takes what has not come, or panics, ends the operation and all later ones
/// of the group with [`Fault::ExecutorFailed`](posthaste_core::Fault::ExecutorFailed), on all members; who never gives one
/// that is possible hangs it. A result is right if no turn is given before those are [done](Self::done) that stand before it in
/// the program of its slice and name one of its blocks (for an all-to-all, whose sends and receipts are of different memory:
/// receipts only).
pub trait Execution: Send + Debug {
    /// A message has come. It is kept until its turn.
    fn arrived(&mut self, step: Step);

    /// What is to be done now, if anything: asked when the operation begins and after the other two, until there is nothing.
    fn next(&mut self) -> Option<Turn>;

    /// A turn that was given is over: the blocks of a message that goes out may change, and those of one that was taken have.
    /// A long message may have to wait for its receiver.
    fn done(&mut self, turn: Turn);
}

/// Ends each phase before the next one begins, and each slice before the next: the bulk-synchronous way (Valiant 1990). What
/// pipelining brings is what this one lacks; it shows a schedule as it is written, and is what others are compared with.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::collective::PhaseByPhase;
/// let group = job.world().custom_executor(std::sync::Arc::new(PhaseByPhase));
/// assert_eq!(group.all_gather(&[job.rank().0]).await?.len(), group.size());
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseByPhase;

#[derive(Debug)]
struct InPhases {
    turns: Box<[Turn]>,
    /// How many were given, and how many of these are not done.
    given: usize,
    open: usize,
    here: HashSet<Step>,
}

impl Executor for PhaseByPhase {
    fn name(&self) -> &str {
        "phase by phase"
    }

    fn begin(&self, _: &Program, turns: &[Turn]) -> Box<dyn Execution> {
        Box::new(InPhases { turns: turns.into(), given: 0, open: 0, here: HashSet::new() })
    }
}

impl Execution for InPhases {
    fn arrived(&mut self, step: Step) {
        self.here.insert(step);
    }

    fn next(&mut self) -> Option<Turn> {
        let turn = *self.turns.get(self.given)?;
        let before = self.given.checked_sub(1).map(|before| self.turns[before]);
        let phase = |turn: Turn| (turn.step().slice, turn.step().phase);
        let possible = match turn {
            // What a phase sends is what was there before it.
            Turn::Send(_) => self.open == 0 || before.is_some_and(|before| phase(before) == phase(turn)),
            Turn::Take(step) => self.open == 0 && self.here.remove(&step),
        };
        (self.given, self.open) = (self.given + usize::from(possible), self.open + usize::from(possible));
        possible.then_some(turn)
    }

    fn done(&mut self, _: Turn) {
        self.open -= 1;
    }
}
