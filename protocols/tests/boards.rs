//! Small collective operations of members that share memory: by boards, by messages, and by both at once.

mod near;
mod support;

use futures::future::join_all;
use near::{Check, Overlap, fault_of, one_by_one, overlapping, wait, warm};
use posthaste_core::{Collective, Fault, Messager, Rank};
use posthaste_protocols::collective::Algorithm;
use posthaste_protocols::{CollectiveError, Group, InFlight, Reduce};
use support::{Random, Setup, run, values};

/// Floats whose sum depends on the order in which they are added.
fn uneven(seed: u64, rank: usize, len: usize) -> Vec<f64> {
    values(seed, rank, len)
        .into_iter()
        .map(|value| value as f64 * 2f64.powi((value % 61) as i32 - 30))
        .collect()
}

/// Starts the operation with that number; what is given checks its result.
fn start(group: &Group, number: u64) -> Check {
    let (size, me) = (group.size(), group.rank());
    // As many as no board has room for, too.
    let len = [0, 1, 2, 6, 7][(number / 3 % 5) as usize];
    match number % 3 {
        0 => {
            let barrier = group.barrier();
            Box::pin(async move { barrier.await.unwrap() })
        }
        1 => {
            let sum = group.all_reduce(&uneven(number, me, len), &Reduce::sum());
            Box::pin(async move {
                let all: Vec<_> = (0..size).map(|rank| uneven(number, rank, len)).collect();
                let got = sum.await.unwrap();
                assert_eq!(got.len(), len);
                for (at, got) in got.into_iter().enumerate() {
                    let expected = all.iter().skip(1).fold(all[0][at], |sum, one| sum + one[at]);
                    if len * 8 <= 48 && size <= 32 {
                        assert_eq!(
                            got.to_bits(),
                            expected.to_bits(),
                            "operation {number}, member {me} of {size}"
                        );
                    }
                }
            })
        }
        _ => {
            let most = group.all_reduce_one(values(number, me, 1)[0], &Reduce::max());
            Box::pin(async move {
                let expected = (0..size).map(|rank| values(number, rank, 1)[0]).max();
                assert_eq!(Some(most.await.unwrap()), expected, "operation {number}, member {me} of {size}");
            })
        }
    }
}

#[test]
fn every_member_gets_the_sum_in_the_order_of_the_ranks() {
    one_by_one(&Setup::new(), &[2, 3, 5, 8, 16, 32, 33], 60, 1, start);
}

#[test]
fn little_room_changes_nothing() {
    one_by_one(&Setup::tiny(), &[2, 3, 5, 9], 120, 1, start);
}

const HUNDREDS: Overlap = Overlap { turns: 6, at_once: 150, pauses: 30 };

#[test]
fn hundreds_overlap_and_some_are_dropped() {
    overlapping(Setup::new(), 2, &HUNDREDS, start);
    overlapping(Setup::new(), 5, &HUNDREDS, start);
}

#[test]
fn hundreds_overlap_with_little_room() {
    overlapping(Setup::tiny(), 4, &HUNDREDS, start);
}

#[test]
fn others_go_between_them() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        let me = member.rank.index();
        for turn in 0..60u64 {
            let long = world.broadcast(turn as usize % 4, &vec![turn; 4000]);
            let sum = world.all_reduce_one(turn + me as u64, &Reduce::sum());
            let forced = world.schedule(Algorithm::Binomial).all_reduce_one(1u64, &Reduce::sum());
            let users = world.all_reduce_one(me as u32, &Reduce::by(|a: u32, b: u32| a.max(b)));
            let barrier = world.barrier();
            if turn % 4 == me as u64 {
                barrier.await.unwrap();
                assert_eq!(sum.await.unwrap(), turn * 4 + 6);
            } else {
                assert_eq!(sum.await.unwrap(), turn * 4 + 6);
                barrier.await.unwrap();
            }
            assert_eq!((forced.await.unwrap(), users.await.unwrap()), (4, 3));
            assert_eq!(long.await.unwrap(), vec![turn; 4000]);
        }
    });
}

#[test]
fn calls_that_do_not_match_are_told_to_all_wherever_they_go() {
    type Wrong = fn(&Group) -> InFlight<Vec<u64>>;
    let wrong: [(Wrong, Collective); 6] = [
        (|group| group.all_gather(&[0u64]), Collective::AllGather(8)),
        (|group| group.all_reduce(&[0u64; 2], &Reduce::sum()), Collective::AllReduce(16)),
        (|group| group.all_reduce(&[0u64; 200], &Reduce::sum()), Collective::AllReduce(1600)),
        (|group| group.all_reduce(&[0u64], &Reduce::max()), Collective::AllReduce(8)),
        (
            |group| group.schedule(Algorithm::Binomial).all_reduce(&[0u64], &Reduce::sum()),
            Collective::AllReduce(8),
        ),
        // It waits for a message of one that sends none.
        (|group| group.broadcast(0, &[0u64]), Collective::Broadcast(8)),
    ];
    for (number, (wrong, name)) in wrong.into_iter().enumerate() {
        // Who is wrong comes first, in the middle, or last.
        for late in [0, 1, 40] {
            run(4, Setup::new(), async |member| {
                let world = member.collectives.world();
                let child = world.split(Some(0), 0).await.unwrap().unwrap();
                warm(&child).await;
                let is_wrong = member.rank.0 == 3;
                wait(if is_wrong { late } else { 20 }).await;
                let first = match is_wrong {
                    true => wrong(&child).await.map(drop),
                    false => child.all_reduce(&[1u64], &Reduce::sum()).await.map(drop),
                };
                let fault = fault_of(first);
                let Fault::CollectiveMismatch { ranks, calls } = fault else { panic!("{number}: {fault:?}") };
                assert!(ranks.contains(&Rank(3)), "{number}: {ranks:?}");
                // Its length is not told by who awaits it.
                let kinds = calls.map(|call| std::mem::discriminant(&call));
                assert!(
                    kinds.contains(&std::mem::discriminant(&name)) || kinds[0] == kinds[1],
                    "{number}: {calls:?}"
                );
                // All later ones end so, too, and another group does not.
                assert!(matches!(fault_of(child.barrier().await), Fault::CollectiveMismatch { .. }));
                world.barrier().await.unwrap();
            });
        }
    }
}

#[test]
fn an_unpolled_one_tells_of_a_mismatch_as_well() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let child = world.split(Some(0), 0).await.unwrap().unwrap();
        warm(&child).await;
        if member.rank.0 == 0 {
            let held = child.barrier();
            // Rank 1 hears of it though this is not awaited.
            assert_eq!(world.broadcast(1, &[0u64]).await.unwrap(), [7]);
            assert!(matches!(fault_of(held.await), Fault::CollectiveMismatch { .. }));
        } else {
            let fault = fault_of(child.broadcast(0, &[0u64]).await);
            assert!(matches!(fault, Fault::CollectiveMismatch { .. }), "{fault:?}");
            world.broadcast(1, &[7u64]).await.unwrap();
        }
    });
}

#[test]
fn whoever_dies_every_small_one_of_every_survivor_ends() {
    for seed in 0..40u64 {
        run(5, Setup::new(), async |member| {
            let world = member.collectives.world();
            let turned = world.split(Some(0), 9 - member.rank.0).await.unwrap().unwrap();
            let mut random = Random(seed);
            let (victim, at) = (random.below(5) as u32, random.below(60));
            let mut own = Random(seed * 5 + u64::from(member.rank.0));
            for turn in 0.. {
                let group = if random.below(3) == 0 { &turned } else { &world };
                let several: Vec<_> =
                    (0..1 + random.below(3)).map(|_| group.all_reduce_one(1u64, &Reduce::sum())).collect();
                if member.rank.0 == victim && turn == at {
                    // What is written is written.
                    member.fabric.kill(member.rank);
                    return;
                }
                wait(own.below(6)).await;
                let results = join_all(several).await;
                if let Some(error) = results.into_iter().find_map(Result::err) {
                    assert_eq!(error, CollectiveError::Fault(Fault::PeerLost(Rank(victim))));
                    break;
                }
                assert!(turn < 100_000, "nobody notices");
            }
            for group in [&world, &turned] {
                assert_eq!(fault_of(group.barrier().await), Fault::PeerLost(Rank(victim)));
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_in_order_has_written_its_part() {
    run(5, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        if member.rank.0 == 0 {
            let sum = world.all_reduce_one(1u64, &Reduce::sum());
            assert_eq!(sum.await.unwrap(), 5);
            member.client.close().await;
            assert_eq!(fault_of(world.barrier().await), Fault::Shutdown);
        } else {
            wait(member.rank.index() * 10).await;
            assert_eq!(world.all_reduce_one(1u64, &Reduce::sum()).await.unwrap(), 5);
            assert_eq!(fault_of(world.barrier().await), Fault::PeerClosed(Rank(0)));
        }
    });
}

#[test]
fn what_is_on_the_boards_ends_when_a_rank_dies_that_has_written_nothing() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        if member.rank.0 == 2 {
            wait(10).await;
            member.fabric.kill(member.rank);
            return;
        }
        let sum = world.all_reduce_one(1u64, &Reduce::sum());
        // They hear of it while nobody looks.
        wait(200).await;
        assert_eq!(fault_of(sum.await), Fault::PeerLost(Rank(2)));
    });
}

#[test]
fn what_is_pending_ends_with_the_client() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let pending = world.barrier();
        // The other one has not called it, or has and waits for nothing.
        if member.rank.0 == 0 {
            wait(30).await;
            member.client.close().await;
            assert!(matches!(pending.await, Ok(()) | Err(CollectiveError::Fault(Fault::Shutdown))));
            assert_eq!(fault_of(world.barrier().await), Fault::Shutdown);
        } else {
            pending.await.unwrap();
        }
    });
}

#[test]
fn boards_of_groups_that_are_gone_go_back() {
    let mut setup = Setup::new();
    // Room for a few dozen boards.
    setup.limits.segment = 256 << 10;
    run(3, setup, async |member| {
        let world = member.collectives.world();
        // What it has for good, it has from the start.
        warm(&world).await;
        world.all_gather(&[1u64]).await.unwrap();
        for turn in 0..200u32 {
            let group = world.split(Some(0), turn).await.unwrap().unwrap();
            warm(&group).await;
            drop(group);
        }
        world.barrier().await.unwrap();
        // What the others still hold is released soon.
        let device = member.client.device_for(member.rank).unwrap().clone();
        let most = loop {
            match device.allocate(200 << 10) {
                Ok(allocation) => break allocation,
                Err(_) => wait(1).await,
            }
        };
        device.free(most);
        world.barrier().await.unwrap();
    });
}

#[test]
fn without_memory_for_boards_messages_do() {
    let mut setup = Setup::new();
    setup.limits.segment = 4096;
    run(4, setup, async |member| {
        let world = member.collectives.world();
        let device = member.client.device_for(member.rank).unwrap().clone();
        // One rank has no room for its board.
        let taken = (member.rank.0 == 2).then(|| device.allocate(4096).unwrap());
        for number in 0..60 {
            start(&world, number).await;
        }
        taken.into_iter().for_each(|taken| device.free(taken));
        // It has one as soon as there is room, and the others use theirs.
        for number in 60.. {
            start(&world, number).await;
            let has_room = match device.allocate(4096) {
                Ok(room) => {
                    device.free(room);
                    true
                }
                Err(_) => false,
            };
            if world.all_reduce_one(u32::from(has_room), &Reduce::sum()).await.unwrap() == 0 {
                break;
            }
            assert!(number < 10_000, "messages for ever");
        }
    });
}

#[test]
fn one_that_is_dropped_is_over_when_all_have_written() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        for _ in 0..5 {
            drop(world.all_reduce_one(1u64, &Reduce::sum()));
            drop(world.barrier());
            assert_eq!(world.all_reduce_one(1u64, &Reduce::sum()).await.unwrap(), 3);
        }
        // Nothing is under way, nothing is broken, and nobody is down.
        let hub = format!("{:?}", member.collectives);
        assert!(hub.contains(", [], None, {})"), "{hub}");
    });
}
