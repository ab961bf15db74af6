//! A program made ready for the executor: its steps, and which of them really wait for which.
//!
//! Phases say what a schedule means; dependencies follow from the blocks. A send waits for the last step that wrote one
//! of its blocks, a receipt for the last that wrote and all that have read since. So phases that do not depend on each
//! other do not wait for each other, and the chunks of a long vector run through a plan independently.

use super::schedule::{Action, Blocks, Kind, Place, Program, Route, Schedule};

/// Most phases of a program.
pub(crate) const MAX_PHASES: usize = 1 << 13;
/// Most steps of a program.
const MAX_STEPS: usize = u16::MAX as usize;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Send,
    Receive(Action),
}

/// One message of a program.
#[derive(Debug)]
pub(crate) struct Step {
    pub task: Task,
    /// The other rank, as the group counts.
    pub peer: u32,
    pub phase: u16,
    pub blocks: Blocks,
    /// How many steps have to be done before this one.
    pub waits: u16,
    /// The steps that wait for this one.
    pub followers: Box<[u16]>,
}

/// The steps of one colour, in the order of the phases.
#[derive(Debug, Default)]
pub(crate) struct Colour {
    pub steps: Box<[Step]>,
    /// Phase, peer and number of each receipt, sorted.
    receipts: Box<[(u16, u32, u16)]>,
}

impl Colour {
    /// The send to that peer in that phase.
    pub fn send(&self, phase: u16, peer: u32) -> Option<u16> {
        let is_it = |step: &Step| step.task == Task::Send && (step.phase, step.peer) == (phase, peer);
        self.steps.iter().position(is_it).map(|step| step as u16)
    }

    /// The receipt of what that peer sends in that phase.
    #[inline]
    pub fn receipt(&self, phase: u16, peer: u32) -> Option<u16> {
        if let [(one, from, step)] = *self.receipts {
            return ((one, from) == (phase, peer)).then_some(step);
        }
        let at = self.receipts.binary_search_by_key(&(phase, peer), |entry| (entry.0, entry.1)).ok()?;
        Some(self.receipts[at].2)
    }
}

/// A program made ready.
#[derive(Debug)]
pub(crate) struct Plan {
    pub kind: Kind,
    /// This rank and the root, as the group counts.
    pub rank: usize,
    pub root: usize,
    pub blocks: usize,
    pub colours: Box<[Colour]>,
    /// The blocks that this rank has to keep, in order; `None`: all.
    pub kept: Option<Box<[u32]>>,
    /// What is sent is never written to: it is the input.
    pub sends_input: bool,
    /// Tells programs of different schedules apart.
    pub mark: u32,
    /// As the schedule gave it, for executors.
    pub program: Program,
}

/// Why a program is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// The schedule does not do that kind of operation.
    NotOffered,
    /// The schedule's program is not one that could be carried out.
    Broken(&'static str),
    /// As many operations are under way as can be told apart.
    TooMany,
}

/// FNV-1a.
pub(crate) fn hash(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

impl Plan {
    /// Asks a schedule, and checks and prepares what it says.
    pub fn new(schedule: &dyn Schedule, kind: Kind, place: &Place<'_>) -> Result<Plan, Unfit> {
        let program = schedule.program(kind, place).ok_or(Unfit::NotOffered)?;
        check(&program, kind, place)?;
        let colours = program.routes.iter().map(|route| colour(route, program.blocks, kind, place));
        let colours = colours.collect::<Result<Box<[_]>, _>>()?;
        let steps = || colours.iter().flat_map(|colour| colour.steps.iter());
        let written = |block: usize| {
            let hits =
                |step: &Step| step.task != Task::Send && step.blocks.iter().any(|other| other == block);
            steps().any(hits)
        };
        let sends_input = kind.is_separate()
            || !steps().any(|step| step.task == Task::Send && step.blocks.iter().any(written));
        Ok(Plan {
            kind,
            rank: place.rank,
            root: place.root,
            blocks: program.blocks,
            kept: kept(kind, place, program.blocks, steps()),
            colours,
            sends_input,
            mark: hash(schedule.name().bytes()),
            program,
        })
    }

    /// The place of a block among those that are kept.
    #[inline]
    pub fn slot(&self, block: usize) -> Option<usize> {
        match &self.kept {
            None => Some(block),
            Some(kept) => kept.binary_search(&(block as u32)).ok(),
        }
    }

    /// Number of blocks that are kept.
    pub fn slots(&self) -> usize {
        self.kept.as_ref().map_or(self.blocks, |kept| kept.len())
    }
}

fn check(program: &Program, kind: Kind, place: &Place<'_>) -> Result<(), Unfit> {
    let fail = |why| Err(Unfit::Broken(why));
    if program.routes.is_empty() || program.blocks == 0 {
        return fail("a program has at least one route and one block");
    }
    if kind.has_block_per_rank() && program.blocks != place.size {
        return fail("an operation of that kind has a block per rank");
    }
    if kind == Kind::Barrier && program.blocks != 1 {
        return fail("a barrier has one block");
    }
    for route in &program.routes {
        if route.phases().len() > MAX_PHASES {
            return fail("a program has at most 8192 phases");
        }
        for phase in route.phases() {
            let peers = |ranks: &mut dyn Iterator<Item = usize>| {
                let mut seen: Vec<usize> = ranks.collect();
                let count = seen.len();
                seen.sort_unstable();
                seen.dedup();
                seen.len() == count && seen.iter().all(|rank| *rank < place.size && *rank != place.rank)
            };
            let sound = peers(&mut phase.sends.iter().map(|send| send.to))
                && peers(&mut phase.sources.iter().map(|source| source.from));
            if !sound {
                return fail("a phase names each other rank of the group at most once in each direction");
            }
            let rooted = matches!(kind, Kind::Broadcast | Kind::Scatter) && place.rank == place.root;
            if rooted && !phase.sources.is_empty() {
                return fail("a root that has everything receives nothing");
            }
            let mut blocks = phase
                .sends
                .iter()
                .map(|send| &send.blocks)
                .chain(phase.sources.iter().map(|source| &source.blocks));
            let beyond = |blocks: &Blocks| blocks.runs().iter().any(|run| run.end as usize > program.blocks);
            if blocks.clone().any(beyond) {
                return fail("a program names blocks that it does not have");
            }
            if blocks.any(Blocks::names_any_twice) {
                return fail("a message has each block at most once");
            }
            let combines = phase.sources.iter().any(|source| source.action != Action::Store);
            let reduces =
                matches!(kind, Kind::Barrier | Kind::Reduce | Kind::AllReduce | Kind::ReduceScatter);
            if combines && !reduces {
                return fail("an operation of that kind combines nothing");
            }
        }
    }
    Ok(())
}

/// The blocks that a rank has to keep: those of its result, and those that pass through it.
fn kept<'s>(
    kind: Kind,
    place: &Place<'_>,
    blocks: usize,
    steps: impl Iterator<Item = &'s Step>,
) -> Option<Box<[u32]>> {
    let whole = match kind {
        Kind::Gather => place.rank == place.root,
        Kind::Scatter => false,
        _ => true,
    };
    if whole {
        return None;
    }
    let mut kept = vec![false; blocks];
    kept[place.rank] = true;
    steps.flat_map(|step| step.blocks.iter()).for_each(|block| kept[block] = true);
    Some((0..blocks as u32).filter(|block| kept[*block as usize]).collect())
}

/// Whether a rank has that block from the start.
fn is_input(kind: Kind, place: &Place<'_>, block: usize) -> bool {
    match kind {
        Kind::Broadcast | Kind::Scatter => place.rank == place.root,
        Kind::Gather | Kind::AllGather => block == place.rank,
        Kind::Barrier | Kind::Reduce | Kind::AllReduce | Kind::AllToAll | Kind::ReduceScatter => true,
    }
}

fn colour(route: &Route, blocks: usize, kind: Kind, place: &Place<'_>) -> Result<Colour, Unfit> {
    let separate = kind.is_separate();
    // By block: who wrote it last, and who has read it since.
    let mut written: Vec<Option<u16>> = vec![None; blocks];
    let mut read: Vec<Vec<u16>> = vec![Vec::new(); blocks];
    let mut steps: Vec<Step> = Vec::new();
    let mut followers: Vec<Vec<u16>> = Vec::new();
    let mut receipts = Vec::new();
    for (number, phase) in route.phases().iter().enumerate() {
        let sends = phase.sends.iter().map(|send| (Task::Send, send.to, &send.blocks));
        let sources =
            phase.sources.iter().map(|source| (Task::Receive(source.action), source.from, &source.blocks));
        for (task, peer, list) in sends.chain(sources) {
            if steps.len() >= MAX_STEPS {
                return Err(Unfit::Broken("a program has at most 65535 messages of a rank"));
            }
            let step = steps.len() as u16;
            let mut before: Vec<u16> = Vec::new();
            for block in list.iter() {
                let combines = matches!(task, Task::Receive(Action::Append | Action::Prepend));
                let reads = task == Task::Send || combines;
                if reads && written[block].is_none() && !is_input(kind, place, block) {
                    return Err(Unfit::Broken("a program sends or combines what the rank does not have"));
                }
                match task {
                    Task::Send if separate => {}
                    Task::Send => {
                        before.extend(written[block]);
                        read[block].push(step);
                    }
                    Task::Receive(_) => {
                        before.append(&mut read[block]);
                        before.extend(written[block].replace(step));
                    }
                }
            }
            before.sort_unstable();
            before.dedup();
            before.iter().for_each(|other| followers[usize::from(*other)].push(step));
            if task != Task::Send {
                receipts.push((number as u16, peer as u32, step));
            }
            let waits = before.len() as u16;
            let (peer, blocks) = (peer as u32, list.clone());
            steps.push(Step { task, peer, phase: number as u16, blocks, waits, followers: Box::default() });
            followers.push(Vec::new());
        }
    }
    for (step, followers) in steps.iter_mut().zip(followers) {
        step.followers = followers.into();
    }
    receipts.sort_unstable();
    Ok(Colour { steps: steps.into(), receipts: receipts.into() })
}
