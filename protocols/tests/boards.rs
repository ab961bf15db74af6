//! Small collective operations of members that share memory: by boards, by messages, and by both at once.

#[allow(dead_code, reason = "these tests need a part of it")]
mod near;
mod support;

use near::{
    Call, Check, Overlap, fault_of, mismatch, one_by_one, outcome, overlapping, uneven, wait, warm,
    whoever_dies,
};
use posthaste_core::{Collective, Fault, Messager, Rank};
use posthaste_protocols::collective::Algorithm;
use posthaste_protocols::{CollectiveError, Group, Reduce};
use support::{Random, Setup, run, values};

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
    let wrong: [(Call, Collective); 6] = [
        (|group| outcome(group.all_gather(&[0u64])), Collective::AllGather(8)),
        (|group| outcome(group.all_reduce(&[0u64; 2], &Reduce::sum())), Collective::AllReduce(16)),
        (|group| outcome(group.all_reduce(&[0u64; 200], &Reduce::sum())), Collective::AllReduce(1600)),
        (|group| outcome(group.all_reduce(&[0u64], &Reduce::max())), Collective::AllReduce(8)),
        (
            |group| outcome(group.schedule(Algorithm::Binomial).all_reduce(&[0u64], &Reduce::sum())),
            Collective::AllReduce(8),
        ),
        // It waits for a message of one that sends none.
        (|group| outcome(group.broadcast(0, &[0u64])), Collective::Broadcast(8)),
    ];
    for (wrong, name) in wrong {
        // Its length is not told by who awaits it.
        let is_told = |calls: [Collective; 2]| {
            let kinds = calls.map(|call| std::mem::discriminant(&call));
            kinds.contains(&std::mem::discriminant(&name)) || kinds[0] == kinds[1]
        };
        // Who is wrong comes first, in the middle, or last.
        for late in [0, 1, 40] {
            let right = |group: &Group| outcome(group.all_reduce(&[1u64], &Reduce::sum()));
            mismatch(late, None, right, wrong, &is_told);
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
    let several = |group: &Group, random: &mut Random, _: u64| {
        let one = |_| outcome(group.all_reduce_one(1u64, &Reduce::sum()));
        (0..1 + random.below(3)).map(one).collect()
    };
    whoever_dies(40, 5, 60, several, |group| outcome(group.barrier()));
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
