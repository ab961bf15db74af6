//! What the tests of operations of members that share memory have in common.

use super::support::{Random, Setup, run};
use posthaste_core::Fault;
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
