//! What the tests of operations of members that share memory have in common.

use super::support::{Random, Setup, run, values};
use futures::future::join_all;
use posthaste_core::{Collective, Fault, Rank};
use posthaste_protocols::{CollectiveError, Group};
use std::future::Future;
use std::pin::Pin;

/// Operations after which a group has its boards, in whatever order things come.
const WARM: usize = 12;

/// The fault with which an operation has ended.
pub fn fault_of<T: std::fmt::Debug>(result: Result<T, CollectiveError>) -> Fault {
    match result {
        Err(CollectiveError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// Gives the other ranks a turn, so often.
pub async fn wait(turns: usize) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}

/// Lets a group make its boards.
pub async fn warm(group: &Group) {
    for _ in 0..WARM {
        group.barrier().await.unwrap();
    }
}

/// What is there soon, or never.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let late = std::time::Duration::from_secs(60);
    tokio::time::timeout(late, future).await.unwrap_or_else(|_| panic!("{what} does not end"))
}

/// An operation under way, and the check of its result.
pub type Check = Pin<Box<dyn Future<Output = ()>>>;

/// Starts the operation with that number.
pub type Start = fn(&Group, u64) -> Check;

/// So many operations of the world, each awaited before the next, and every so manieth of a group with the ranks the other way
/// round.
pub fn one_by_one(setup: &Setup, sizes: &[u32], operations: u64, backwards_every: u64, start: Start) {
    for size in sizes {
        run(*size, setup.clone(), async |member| {
            let world = member.collectives.world();
            let backwards = world.split(Some(0), u32::MAX - member.rank.0).await.unwrap().unwrap();
            let mut random = Random(u64::from(member.rank.0));
            for number in 0..operations {
                if random.below(4) == 0 {
                    wait(random.below(20)).await;
                }
                start(&world, number).await;
                if number % backwards_every == 0 {
                    start(&backwards, number).await;
                }
            }
        });
    }
}

/// How many operations are under way together, and how often.
pub struct Overlap {
    pub turns: u64,
    pub at_once: u64,
    /// One in so many is followed by a pause.
    pub pauses: usize,
}

/// Many under way before the first is awaited, some dropped, in an order that differs by rank.
pub fn overlapping(setup: Setup, size: u32, overlap: &Overlap, start: Start) {
    run(size, setup, async |member| {
        let world = member.collectives.world();
        let backwards = world.split(Some(0), u32::MAX - member.rank.0).await.unwrap().unwrap();
        let mut random = Random(member.rank.0.into());
        for turn in 0..overlap.turns {
            let mut under_way = Vec::new();
            for number in 0..overlap.at_once {
                let group = if number % 2 == 0 { &world } else { &backwards };
                under_way.push(start(group, turn * 1000 + number));
                if random.below(overlap.pauses) == 0 {
                    wait(3).await;
                }
            }
            while !under_way.is_empty() {
                let next = under_way.swap_remove(random.below(under_way.len()));
                match random.below(8) {
                    0 => drop(next),
                    _ => next.await,
                }
            }
        }
        world.barrier().await.unwrap();
    });
}

/// Floats whose sum depends on the order in which they are added.
pub fn uneven(seed: u64, rank: usize, len: usize) -> Vec<f64> {
    values(seed, rank, len)
        .into_iter()
        .map(|value| value as f64 * 2f64.powi((value % 61) as i32 - 30))
        .collect()
}

/// An operation under way, which checks its result if it has one.
pub type Outcome = Pin<Box<dyn Future<Output = Result<(), CollectiveError>>>>;

/// Calls an operation.
pub type Call = fn(&Group) -> Outcome;

/// The operation, of whose result nobody wants to know more.
pub fn outcome<T: 'static>(operation: impl Future<Output = Result<T, CollectiveError>> + 'static) -> Outcome {
    Box::pin(async { operation.await.map(drop) })
}

/// A call of all members but rank 3, which calls something else: it comes so late, and every other member can have no memory in
/// pieces of that length. All of them hear of it, a later call of the group ends so, too, and another group goes on.
pub fn mismatch(
    late: usize,
    no_room: Option<u64>,
    right: Call,
    wrong: Call,
    is_told: &(dyn Fn([Collective; 2]) -> bool + Sync),
) {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        let child = world.split(Some(0), 0).await.unwrap().unwrap();
        warm(&child).await;
        let device = member.client.device_for(member.rank).unwrap().clone();
        let mut taken = Vec::new();
        if let Some(len) = no_room.filter(|_| member.rank.0.is_multiple_of(2)) {
            taken.extend(std::iter::from_fn(|| device.allocate(len).ok()));
            assert!(!taken.is_empty(), "there was no room from the start");
        }
        let is_wrong = member.rank.0 == 3;
        wait(if is_wrong { late } else { 20 }).await;
        let fault = fault_of(if is_wrong { wrong(&child).await } else { right(&child).await });
        let Fault::CollectiveMismatch { ranks, calls } = fault else { panic!("{fault:?}") };
        assert!(ranks.contains(&Rank(3)) && is_told(calls), "{ranks:?} {calls:?}");
        assert!(matches!(fault_of(child.barrier().await), Fault::CollectiveMismatch { .. }));
        world.barrier().await.unwrap();
        taken.into_iter().for_each(|taken| device.free(taken));
    });
}

/// Operations of two groups of all ranks, among which one of these is killed: every one of every survivor ends, if not well then
/// with the name of who died.
pub fn whoever_dies(
    seeds: u64,
    size: u32,
    turns: usize,
    several: fn(&Group, &mut Random, turn: u64) -> Vec<Outcome>,
    another: Call,
) {
    for seed in 0..seeds {
        run(size, Setup::new(), async |member| {
            let world = member.collectives.world();
            let turned = world.split(Some(0), 9 - member.rank.0).await.unwrap().unwrap();
            let mut random = Random(seed);
            let (victim, at) = (random.below(size as usize) as u32, random.below(turns) as u64);
            let mut own = Random(seed * 5 + u64::from(member.rank.0));
            for turn in 0.. {
                let group = if random.below(3) == 0 { &turned } else { &world };
                let several = several(group, &mut random, turn);
                if member.rank.0 == victim && turn == at {
                    // What is written, or laid out, stays so.
                    member.fabric.kill(member.rank);
                    return;
                }
                wait(own.below(6)).await;
                let mut results = Vec::new();
                if own.below(2) == 0 {
                    results = join_all(several).await;
                } else {
                    for one in several {
                        results.push(one.await);
                    }
                }
                if let Some(error) = results.into_iter().find_map(Result::err) {
                    assert_eq!(error, CollectiveError::Fault(Fault::PeerLost(Rank(victim))));
                    break;
                }
                assert!(turn < 100_000, "nobody notices");
            }
            for group in [&world, &turned] {
                assert_eq!(fault_of(another(group).await), Fault::PeerLost(Rank(victim)));
            }
        });
    }
}
