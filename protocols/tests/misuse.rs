//! Mistakes of callers that the others cannot see: each is told to whoever made it, and to the others with its name.

#[allow(dead_code, reason = "these tests need a part of it")]
mod near;
#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use futures::future::join_all;
use near::{fault_of, wait, warm};
use posthaste_core::{Collective, Fault, Rank};
use posthaste_protocols::collective::Algorithm;
use posthaste_protocols::{CollectiveError, Group, InFlight, Reduce};
use std::sync::atomic::{AtomicBool, Ordering};
use support::{Setup, run};

type Call = fn(&Group) -> InFlight<Vec<u64>>;

/// Of each way in which operations are done. In all of them every member waits for every other.
const CALLS: [Call; 4] = [
    |group| group.all_reduce(&[1], &Reduce::sum()),
    |group| group.all_to_all(&vec![1; 24 * group.size()]),
    |group| group.all_reduce(&vec![1; 60_000], &Reduce::sum()),
    |group| group.schedule(Algorithm::Dissemination).all_gather(&[1; 9]),
];

#[test]
fn a_group_that_one_drops_early_ends_for_the_others_with_its_name() {
    for (number, call) in CALLS.into_iter().enumerate() {
        for size in [2, 3, 5, 9] {
            for (victim, late, is_warm) in [(0, 0, true), (1, 60, true), (1, 0, false), (0, 60, false)] {
                run(size, Setup::new(), async |member| {
                    let world = member.collectives.world();
                    let group = world.split(Some(0), member.rank.0).await.unwrap().unwrap();
                    if is_warm {
                        warm(&group).await;
                    }
                    if member.rank.0 == victim {
                        wait(late).await;
                        drop(group);
                    } else {
                        let left = Fault::GroupLeft(Rank(victim));
                        assert_eq!(fault_of(call(&group).await), left, "operation {number}, {size} ranks");
                        assert_eq!(fault_of(group.barrier().await), left);
                    }
                    world.barrier().await.unwrap();
                });
            }
        }
    }
}

#[test]
fn what_a_member_called_before_it_dropped_the_group_ends_well() {
    for call in CALLS {
        run(5, Setup::new(), async |member| {
            let world = member.collectives.world();
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            if member.rank.0 == 3 {
                let several: Vec<_> = (0..5).map(|_| call(&group)).collect();
                drop(group);
                join_all(several).await.into_iter().for_each(|one| drop(one.unwrap()));
            } else {
                wait(30 * member.rank.index()).await;
                for _ in 0..5 {
                    call(&group).await.unwrap();
                }
                assert_eq!(fault_of(call(&group).await), Fault::GroupLeft(Rank(3)));
            }
            world.barrier().await.unwrap();
        });
    }
}

#[test]
fn a_group_on_the_fly_may_be_dropped_by_whoever_made_it() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        if member.rank.0 == 0 {
            let group = member.collectives.on_the_fly(&[Rank(0), Rank(1), Rank(2)]).unwrap();
            drop(group.broadcast(0, &[5u64]));
        } else {
            wait(20 * member.rank.index()).await;
            let group = member.collectives.arrival().await.unwrap();
            assert_eq!(group.broadcast(0, &[0u64]).await.unwrap(), [5]);
            assert_eq!(fault_of(group.barrier().await), Fault::GroupLeft(Rank(0)));
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn values_of_a_wrong_length_are_told_to_the_others_as_who_gave_them() {
    type Wrong = fn(&Group) -> InFlight<Vec<u64>>;
    let wrong: [(Wrong, Wrong, Collective); 3] = [
        (|group| group.all_to_all(&[0; 7]), |group| group.all_to_all(&[0; 8]), Collective::AllToAll(14)),
        (
            |group| group.reduce_scatter(&[0; 9], &Reduce::sum()),
            |group| group.reduce_scatter(&[0; 8], &Reduce::sum()),
            Collective::ReduceScatter(18),
        ),
        (|group| group.scatter(2, &[0; 9], 2), |group| group.scatter(2, &[0; 8], 2), Collective::Scatter(16)),
    ];
    for (wrong, right, call) in wrong {
        for (late, is_warm) in [(0, true), (60, true), (0, false), (60, false)] {
            run(4, Setup::new(), async |member| {
                let world = member.collectives.world();
                let group = world.split(Some(0), 0).await.unwrap().unwrap();
                if is_warm {
                    warm(&group).await;
                }
                if member.rank.0 == 2 {
                    wait(late).await;
                    // Before anything is awaited.
                    let refused = wrong(&group);
                    assert!(format!("{refused:?}").contains("Refused(Length"), "{refused:?}");
                    assert!(matches!(refused.await, Err(CollectiveError::Length { .. })));
                } else {
                    let told = Fault::CollectiveRefused { rank: Rank(2), call };
                    // Who is sent its block by nobody else waits for it.
                    assert_eq!(fault_of(right(&group).await), told);
                }
                let told = Fault::CollectiveRefused { rank: Rank(2), call };
                wait(100).await;
                assert_eq!(fault_of(group.barrier().await), told);
                world.barrier().await.unwrap();
            });
        }
    }
}

/// Operations of a group that may be under way on a rank.
const MOST: usize = 32_768;

#[test]
fn as_many_operations_as_can_be_told_apart_may_be_under_way() {
    let all_are_called = AtomicBool::new(false);
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let forced = world.schedule(Algorithm::Binomial);
        let sum = |value: u64| forced.all_reduce(&[value], &Reduce::sum());
        if member.rank.0 == 0 {
            let all: Vec<_> = (0..MOST as u64).map(sum).collect();
            let too_many = CollectiveError::TooManyUnderWay { most: MOST };
            assert_eq!(sum(0).await.unwrap_err(), too_many);
            assert_eq!(world.barrier().await.unwrap_err(), too_many);
            assert_eq!(world.all_to_all(&[0u64; 10]).await.unwrap_err(), too_many);
            all_are_called.store(true, Ordering::Relaxed);
            for (number, one) in all.into_iter().enumerate() {
                assert_eq!(one.await.unwrap(), [2 * number as u64]);
            }
        } else {
            while !all_are_called.load(Ordering::Relaxed) {
                wait(1).await;
            }
            for number in 0..MOST as u64 {
                assert_eq!(sum(number).await.unwrap(), [2 * number]);
            }
        }
        // Nothing was told to the other, and there is room again.
        assert_eq!(sum(3).await.unwrap(), [6]);
    });
}
