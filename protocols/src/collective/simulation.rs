//! Every schedule for all ranks of a group at once: the programs fit together, and the executor's state machine gives
//! what a sequential oracle says, in whatever order messages arrive.

use super::algorithm::Algorithm;
use super::execution::{Execution, Executor, PhaseByPhase, Step, Turn};
use super::foreign::Retire;
use super::group_state::Notice;
use super::layout::{CHUNK, EAGER, Layout, Lengths};
use super::part::Part;
use super::plan::{Plan, Unfit};
use super::reduce::Reduce;
use super::run::{Input, Outgoing, Run, Sent};
use super::schedule::{Kind, Place, Program, Schedule};
use bytes::Bytes;
use posthaste_core::Rank;
use posthaste_core::device::Body;
use posthaste_core::inprocess::Arena;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn words(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.next() as u32).collect()
    }
}

/// Ways to lay ranks out on hosts.
fn hosts(size: usize, way: usize) -> Vec<u32> {
    (0..size as u32)
        .map(|rank| match way {
            0 => 0,
            1 => rank / 3,
            2 => rank % 3,
            _ => rank * 7919 % 5,
        })
        .collect()
}

fn places<'n>(size: usize, root: usize, nodes: &'n [u32]) -> impl Iterator<Item = Place<'n>> {
    (0..size).map(move |rank| Place { rank, size, root, nodes })
}

fn roots(kind: Kind, size: usize) -> Vec<usize> {
    if kind.has_root() { vec![0, size / 2, size - 1] } else { vec![0] }
}

/// What is sent in a phase to a rank is awaited there in that phase, the same blocks, and nothing else is awaited.
fn fit_together(programs: &[Program], separate: bool) {
    for route in 0..programs[0].routes.len() {
        let mut sent = HashMap::new();
        for (rank, program) in programs.iter().enumerate() {
            assert_eq!(program.routes.len(), programs[0].routes.len());
            for (number, phase) in program.routes[route].phases().iter().enumerate() {
                for send in &phase.sends {
                    assert!(sent.insert((number, rank, send.to), &send.blocks).is_none());
                }
            }
        }
        for (rank, program) in programs.iter().enumerate() {
            for (number, phase) in program.routes[route].phases().iter().enumerate() {
                for source in &phase.sources {
                    let blocks = sent.remove(&(number, source.from, rank)).expect("what is awaited is sent");
                    assert!(separate || *blocks == source.blocks);
                }
            }
        }
        assert!(sent.is_empty(), "sent and not awaited: {sent:?}");
    }
}

#[test]
fn the_programs_of_all_ranks_fit_together() {
    let mut offered = 0;
    for algorithm in Algorithm::ALL {
        for kind in Kind::ALL {
            for size in 1..=40 {
                for way in 0..4 {
                    let nodes = hosts(size, way);
                    for root in roots(kind, size) {
                        let programs: Option<Vec<Program>> =
                            places(size, root, &nodes).map(|place| algorithm.program(kind, &place)).collect();
                        let Some(programs) = programs else { continue };
                        fit_together(&programs, kind.is_separate());
                        offered += 1;
                    }
                }
            }
        }
    }
    assert!(offered > 10_000, "{offered}");
}

/// Inside a host anybody sends to anybody; between hosts, leaders do.
#[test]
fn in_two_levels_only_leaders_send_to_other_hosts() {
    let (mut within, mut between) = (0, 0);
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::AllToAll) {
        for (size, way) in (1..=40).flat_map(|size| (0..4).map(move |way| (size, way))) {
            let nodes = hosts(size, way);
            for place in roots(kind, size).into_iter().flat_map(|root| places(size, root, &nodes)) {
                let leader = |rank: usize| match nodes[rank] == nodes[place.root] {
                    true => Some(place.root),
                    false => nodes.iter().position(|node| *node == nodes[rank]),
                };
                let program = Algorithm::TwoLevel.program(kind, &place).expect("it is offered");
                let phases = program.routes.iter().flat_map(|route| route.phases());
                for to in phases.flat_map(|phase| phase.sends.iter().map(|send| send.to)) {
                    let crosses = nodes[to] != nodes[place.rank];
                    let led = [to, place.rank].iter().all(|rank| leader(*rank) == Some(*rank));
                    assert!(led || !crosses, "{kind:?}: {} sends to {to}; {nodes:?}", place.rank);
                    *(if crosses { &mut between } else { &mut within }) += 1;
                }
            }
        }
    }
    assert!(within > 10_000 && between > 10_000, "{within} inside, {between} between");
}

/// A group in which every rank has an operation under way.
struct World {
    runs: Vec<Run>,
    /// Messages on their way: from, to, phase, slice, payload.
    wires: Vec<(usize, usize, u16, u32, Bytes)>,
    random: Random,
    /// Long messages that went out.
    long: usize,
}

impl World {
    fn send_all(&mut self, rank: usize) {
        let World { runs, wires, random, long, .. } = self;
        let run = &mut runs[rank];
        run.resume();
        loop {
            if run.has_news() {
                run.consult();
            }
            let sent = run.advance(|out: Outgoing<'_>| {
                if random.below(8) == 0 {
                    return Ok(Sent::Later);
                }
                *long += usize::from(out.long);
                wires.push((rank, out.to, out.phase, out.slice, Bytes::copy_from_slice(out.payload)));
                Ok::<_, ()>(Sent::Done)
            });
            sent.expect("nothing fails here");
            if !run.has_due() && !run.has_news() {
                return;
            }
            run.take_due();
        }
    }

    /// Runs until all are done; messages arrive in any order.
    fn finish(mut self) -> (Vec<Option<Bytes>>, usize) {
        for rank in 0..self.runs.len() {
            let receipts: Vec<_> = self.runs[rank].long_receipts().collect();
            for (peer, notice) in receipts {
                let Notice::Clear { phase, colour, len } = notice else { panic!("{notice:?}") };
                self.runs[peer].cleared(rank, phase, colour, len).expect("the sender knows that message");
            }
        }
        let mut idle = 0;
        loop {
            for rank in 0..self.runs.len() {
                self.send_all(rank);
            }
            if self.runs.iter().all(Run::is_done) {
                break;
            }
            idle = if self.wires.is_empty() { idle + 1 } else { 0 };
            assert!(idle < 1000, "nobody gets any further");
            assert!(!self.runs.iter().any(Run::has_failed), "the executor is sound");
            for _ in 0..8 {
                if self.wires.is_empty() {
                    break;
                }
                let at = self.random.below(self.wires.len());
                let (from, to, phase, slice, payload) = self.wires.swap_remove(at);
                let other_lengths = [payload.len() + 1, payload.len() + 4, payload.len().saturating_sub(1)];
                for other in other_lengths.into_iter().filter(|other| *other != payload.len()) {
                    let lent = LENT.slice(Rank(0), 0, other as u64).expect("as long as any");
                    let misfit = self.runs[to].arrive(from, phase, slice, &Part::Lent(lent));
                    assert!(misfit.is_err(), "{other} bytes are lent where {} belong", payload.len());
                }
                self.runs[to]
                    .arrive(from, phase, slice, &Part::Body(&Body::Owned(&payload)))
                    .expect("it fits");
                let twice = self.runs[to].arrive(from, phase, slice, &Part::Body(&Body::Owned(&payload)));
                assert!(twice.is_err(), "a message counts once");
                self.send_all(to);
            }
        }
        assert!(self.wires.is_empty(), "nothing is left over");
        (self.runs.into_iter().map(Run::into_result).collect(), self.long)
    }
}

/// Memory of some rank.
static LENT: LazyLock<Arena> = LazyLock::new(|| Arena::new(1, 16 << 20));

/// A composition of two maps of a small set: associative and not commutative, so that the order of the ranks shows.
fn compose(first: u32, second: u32) -> u32 {
    let apply = |map: u32, point: u32| (map >> (4 * point)) & 3;
    (0..4).fold(0, |map, point| map | apply(second, apply(first, point)) << (4 * point))
}

struct Case {
    algorithm: Arc<dyn Schedule>,
    kind: Kind,
    size: usize,
    root: usize,
    nodes: Vec<u32>,
    /// Elements of the vector, or of each block.
    len: usize,
    seed: u64,
    executor: Option<Arc<dyn Executor>>,
}

fn bytes_of(words: &[u32]) -> Bytes {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>().into()
}

/// Runs the case in the simulator and compares with the oracle. `None`: the schedule does not do that.
fn check(case: &Case, operation: &Reduce<u32>, oracle: impl Fn(u32, u32) -> u32) -> Option<usize> {
    let Case { kind, size, root, len, .. } = *case;
    let mut random = Random(case.seed);
    let in_blocks = kind.has_block_per_rank();
    let own_only = matches!(kind, Kind::Gather | Kind::AllGather);
    let vector = if in_blocks && !own_only { size * len } else { len };
    let inputs: Vec<Vec<u32>> = (0..size).map(|_| random.words(vector)).collect();
    let runs = places(size, root, &case.nodes)
        .map(|place| {
            let plan = match Plan::new(&*case.algorithm, kind, &place) {
                Ok(plan) => plan,
                Err(Unfit::NotOffered) => return None,
                Err(unfit) => panic!("{:?} {kind:?}: {unfit:?}", case.algorithm),
            };
            let lengths = match kind {
                Kind::Barrier => Lengths::Same(0),
                _ if in_blocks => Lengths::Same(len * 4),
                _ => Lengths::Split { elements: len, element: 4 },
            };
            let layout = Layout::new(lengths, 4, plan.blocks);
            let executor = case.executor.clone();
            let layout = layout.cut(executor.as_ref().map_or(CHUNK, |executor| executor.chunk_bytes()));
            let gives = match kind {
                Kind::Barrier => false,
                Kind::Broadcast | Kind::Scatter => place.rank == root,
                _ => true,
            };
            let bytes = if gives { bytes_of(&inputs[place.rank]) } else { Bytes::new() };
            let run = Run::by(
                Arc::new(plan),
                layout,
                Input { bytes, outgoing: None, lent: None },
                (kind != Kind::Barrier).then(|| operation.combiner()),
                executor.map(|executor| (executor, Box::new(drop) as Retire)),
            );
            Some(run.expect("so little memory"))
        })
        .collect::<Option<Vec<Run>>>()?;
    let world = World { runs, wires: Vec::new(), random: Random(case.seed ^ 77), long: 0 };
    let (results, long) = world.finish();
    let combined: Vec<u32> =
        (0..vector).map(|at| inputs.iter().map(|input| input[at]).reduce(&oracle).expect("a rank")).collect();
    let all: Vec<u32> = inputs.concat();
    for (rank, result) in results.into_iter().enumerate() {
        let own = rank * len..(rank + 1) * len;
        let expected = match kind {
            Kind::Barrier => None,
            Kind::Broadcast => Some(inputs[root].clone()),
            Kind::Reduce => (rank == root).then(|| combined.clone()),
            Kind::AllReduce => Some(combined.clone()),
            Kind::Gather => (rank == root).then(|| all.clone()),
            Kind::AllGather => Some(all.clone()),
            Kind::Scatter => Some(inputs[root][own].to_vec()),
            Kind::ReduceScatter => Some(combined[own].to_vec()),
            Kind::AllToAll => {
                Some(inputs.iter().flat_map(|input| input[own.clone()].iter().copied()).collect())
            }
        };
        let expected = expected.map(|words| bytes_of(&words));
        assert!(
            result == expected,
            "{:?} {kind:?} of {len} words, rank {rank} of {size}, root {root}",
            case.algorithm
        );
    }
    Some(long)
}

/// Checks every schedule and kind for groups of these sizes, whose vectors or blocks have so many elements, by an executor;
/// how many cases of each there were.
fn check_all(
    sizes: impl Iterator<Item = usize> + Clone,
    lens: &[usize],
    len_of: impl Fn(Kind, usize, usize) -> usize,
    executor: Option<Arc<dyn Executor>>,
) -> HashMap<(Algorithm, Kind), u32> {
    let mut checked = HashMap::new();
    for algorithm in Algorithm::ALL {
        for kind in Kind::ALL {
            for size in sizes.clone() {
                for (number, len) in lens.iter().enumerate() {
                    for root in roots(kind, size) {
                        let case = Case {
                            algorithm: Arc::new(algorithm),
                            kind,
                            size,
                            root,
                            nodes: hosts(size, (size + number) % 4),
                            len: len_of(kind, size, *len),
                            seed: (size * 100 + len) as u64,
                            executor: executor.clone(),
                        };
                        if check(&case, &Reduce::sum(), u32::wrapping_add).is_some() {
                            *checked.entry((algorithm, kind)).or_insert(0) += 1;
                        }
                    }
                }
            }
        }
    }
    checked
}

#[test]
fn every_schedule_gives_what_the_oracle_says_in_any_order_of_arrival() {
    let checked = check_all(1..=33, &[0, 1, 3, 17, 1000], |_, _, len| len, None);
    assert_eq!(checked.len(), 8 + 3 + 6 + 4 + 8 + 2 + 8, "{checked:?}");
}

#[test]
fn long_vectors_go_in_chunks_and_over_all_colours() {
    for algorithm in Algorithm::ALL {
        for kind in Kind::ALL {
            for size in [1, 2, 3, 6] {
                for len in [33_000, 70_001] {
                    let case = Case {
                        algorithm: Arc::new(algorithm),
                        kind,
                        size,
                        root: size - 1,
                        nodes: hosts(size, 2),
                        len: if kind.has_block_per_rank() { len } else { len * size },
                        seed: (size + len) as u64,
                        executor: None,
                    };
                    let long = check(&case, &Reduce::sum(), u32::wrapping_add);
                    if size > 1 && kind != Kind::Barrier {
                        assert!(long != Some(0), "{algorithm:?} {kind:?}: all went out at once");
                    }
                }
            }
        }
    }
}

#[test]
fn schedules_that_keep_the_order_of_the_ranks_do_so() {
    let keeps = [
        (Algorithm::Binomial, Kind::Reduce),
        (Algorithm::Binomial, Kind::AllReduce),
        (Algorithm::Binomial, Kind::ReduceScatter),
        (Algorithm::RecursiveDoubling, Kind::AllReduce),
        (Algorithm::Ring, Kind::Reduce),
        (Algorithm::Pairwise, Kind::Reduce),
    ];
    for (algorithm, kind) in keeps {
        for size in 1..=33 {
            let nodes = hosts(size, 0);
            let seed = size as u64;
            let algorithm = Arc::new(algorithm);
            let case = Case { algorithm, kind, size, root: 0, nodes, len: 9, seed, executor: None };
            check(&case, &Reduce::by(compose), compose).expect("it is offered");
        }
    }
}

/// Every turn in the order of the program and of its slice, and the slices in any order that comes.
#[derive(Debug)]
struct SlicesAtRandom;

#[derive(Debug)]
struct AtRandom {
    /// By slice, what is not given yet, the first last.
    turns: Vec<Vec<Turn>>,
    open: HashSet<usize>,
    here: HashSet<Step>,
    random: u64,
}

impl Executor for SlicesAtRandom {
    fn name(&self) -> &str {
        "slices at random"
    }

    fn chunk_bytes(&self) -> usize {
        EAGER
    }

    fn begin(&self, _: &Program, turns: &[Turn]) -> Box<dyn Execution> {
        let mut slices = Vec::new();
        for turn in turns.iter().rev() {
            let slice = turn.step().slice;
            slices.resize_with(slices.len().max(slice + 1), Vec::new);
            slices[slice].push(*turn);
        }
        Box::new(AtRandom { turns: slices, open: HashSet::new(), here: HashSet::new(), random: 7 })
    }
}

impl Execution for AtRandom {
    fn arrived(&mut self, step: Step) {
        self.here.insert(step);
    }

    fn next(&mut self) -> Option<Turn> {
        self.random = Random(self.random).next();
        let slices = self.turns.len();
        let first = self.random as usize % slices.max(1);
        let possible = |slice: &usize| match self.turns[*slice].last() {
            _ if self.open.contains(slice) => false,
            Some(Turn::Take(step)) => self.here.contains(step),
            send => send.is_some(),
        };
        let slice = (0..slices).map(|slice| (slice + first) % slices).find(possible)?;
        self.open.insert(slice);
        self.turns[slice].pop()
    }

    fn done(&mut self, turn: Turn) {
        assert!(self.open.remove(&turn.step().slice), "it was not given");
    }
}

#[test]
fn whatever_executor_carries_a_schedule_out_the_result_is_the_same() {
    let executors: [Arc<dyn Executor>; 2] = [Arc::new(PhaseByPhase), Arc::new(SlicesAtRandom)];
    let len_of = |kind: Kind, size, len| {
        let len = if size > 5 { len / 20 } else { len };
        if kind.has_block_per_rank() { len } else { len * size }
    };
    let mut checked = 0;
    for executor in executors {
        let sizes = (1..=9).chain([16, 33]);
        checked += check_all(sizes, &[0, 1, 17, 10_001], len_of, Some(executor)).values().sum::<u32>();
    }
    assert!(checked > 5_000, "{checked}");
}

/// Does wrong what its number says.
#[derive(Debug)]
struct Unsound(u8, Vec<Turn>);

impl Executor for Unsound {
    fn name(&self) -> &str {
        "unsound"
    }

    fn begin(&self, _: &Program, turns: &[Turn]) -> Box<dyn Execution> {
        assert!(self.0 != 0, "it begins nothing");
        Box::new(Unsound(self.0, turns.to_vec()))
    }
}

impl Execution for Unsound {
    fn arrived(&mut self, _: Step) {
        assert!(self.0 != 1, "nothing is to arrive");
    }

    fn next(&mut self) -> Option<Turn> {
        let first = self.1[0];
        let Step { peer, route, phase, slice } = first.step();
        match self.0 {
            1 => None,
            2 => panic!("it gives nothing"),
            // Twice.
            3 => Some(first),
            4 => Some(Turn::Send(Step { peer: peer + 1, ..first.step() })),
            5 => Some(Turn::Send(Step { route: route + 1, ..first.step() })),
            6 => Some(Turn::Send(Step { phase: phase + 1, ..first.step() })),
            7 => Some(Turn::Send(Step { slice: slice + 1, ..first.step() })),
            8 => Some(Turn::Send(Step { peer: usize::MAX, phase: usize::MAX, route, slice: usize::MAX })),
            // Before it has come.
            9 => self.1.iter().find(|turn| matches!(turn, Turn::Take(_))).copied(),
            _ => Some(Turn::Take(first.step())),
        }
    }

    fn done(&mut self, _: Turn) {}
}

#[test]
fn an_executor_that_does_what_cannot_be_done_is_found_out() {
    for what in 0..=10 {
        let place = Place { rank: 0, size: 2, root: 0, nodes: &[0; 2] };
        let plan = Plan::new(&Algorithm::RecursiveDoubling, Kind::Barrier, &place).expect("a plan");
        let layout = Layout::new(Lengths::Same(0), 1, plan.blocks);
        let input = Input { bytes: Bytes::new(), outgoing: None, lent: None };
        let unsound: (Arc<dyn Executor>, Retire) = (Arc::new(Unsound(what, Vec::new())), Box::new(drop));
        let mut run = Run::by(Arc::new(plan), layout, input, None, Some(unsound)).expect("so little memory");
        if what == 1 {
            let empty = Part::Body(&Body::Short(&[]));
            assert!((0..8).any(|phase| run.arrive(1, phase, 0, &empty).is_ok()), "some phase has a message");
        }
        let mut sent = 0;
        run.consult();
        run.advance(|_| {
            sent += 1;
            Ok::<_, ()>(Sent::Done)
        })
        .expect("nothing fails here");
        assert_eq!((run.has_failed(), sent), (true, u32::from(what == 3)), "{what}");
        assert!(!run.is_done());
    }
}

#[test]
fn programs_that_cannot_be_carried_out_are_refused() {
    use super::schedule::{Action, Blocks, Route};

    #[derive(Debug)]
    struct Bad(Program);
    impl Schedule for Bad {
        fn name(&self) -> &str {
            "bad"
        }
        fn program(&self, _: Kind, _: &Place<'_>) -> Option<Program> {
            Some(self.0.clone())
        }
    }

    let send = |to, block| {
        let mut route = Route::default();
        route.send(0, to, Blocks::one(block));
        route
    };
    let mut twice = send(1, 0);
    twice.send(0, 1, Blocks::one(0));
    let mut late = Route::default();
    late.send(9000, 1, Blocks::one(0));
    let mut combining = Route::default();
    combining.receive(0, 1, Blocks::one(0), Action::Append);
    let bad = [
        Program { blocks: 1, routes: vec![] },
        Program::new(0, Route::default()),
        Program::new(1, send(0, 0)),
        Program::new(1, send(4, 0)),
        Program::new(1, send(1, 1)),
        Program::new(1, twice),
        Program::new(1, late),
        Program::new(1, combining),
    ];
    for program in bad {
        let place = Place { rank: 0, size: 4, root: 0, nodes: &[0; 4] };
        let unfit = Plan::new(&Bad(program.clone()), Kind::Broadcast, &place).err();
        assert!(matches!(unfit, Some(Unfit::Broken(_))), "{program:?}");
    }
    // What the rank does not have.
    let place = Place { rank: 2, size: 4, root: 0, nodes: &[0; 4] };
    let unfit = Plan::new(&Bad(Program::new(1, send(1, 0))), Kind::Broadcast, &place).err();
    assert!(matches!(unfit, Some(Unfit::Broken(_))));
    // What would be stored or combined twice.
    let mut blocks = Blocks::one(0);
    blocks.push(1, 1);
    blocks.push(0, 1);
    let mut twice = Route::default();
    twice.receive(0, 1, blocks, Action::Store);
    let unfit = Plan::new(&Bad(Program::new(2, twice)), Kind::Broadcast, &place).err();
    assert!(matches!(unfit, Some(Unfit::Broken(_))));
}
