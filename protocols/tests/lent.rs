//! Long collective operations of members that share memory: lent to each other where they lie, as messages where there is
//! no room for that, and both in one operation.

mod laid;
#[allow(dead_code, reason = "these tests need a part of it")]
mod near;
mod support;

use futures::FutureExt;
use laid::{late_readers, without_memory};
use near::{
    Call, Check, Outcome, Overlap, fault_of, mismatch, one_by_one, outcome, overlapping, soon, wait, warm,
    whoever_dies,
};
use posthaste_core::{Fault, Messager, Rank};
use posthaste_protocols::collective::{Algorithm, Kind, Place, Program, Route, Schedule};
use posthaste_protocols::{Group, Reduce};
use std::sync::Arc;
use support::{Member, Random, Setup, run, values};

/// Starts the operation with that number; what is given checks its result.
fn start(group: &Group, number: u64) -> Check {
    let (size, me) = (group.size(), group.rank());
    // Of one more than a multiple of the size, of fewer than pages have, of several chunks.
    let len = [8_191, 12_345, 40_000, 70_001, 160_003][(number / 6 % 5) as usize];
    let all = move |len: usize| (0..size).map(move |rank| values(number, rank, len));
    let total = move |len: usize| {
        all(len).reduce(|mut sum, one| {
            sum.iter_mut().zip(one).for_each(|(sum, one)| *sum = sum.wrapping_add(one));
            sum
        })
    };
    let each = len / size;
    match number % 6 {
        0 => {
            let sum = group.all_reduce(&values(number, me, len), &Reduce::sum());
            Box::pin(async move { assert!(Some(sum.await.unwrap()) == total(len), "{number} {me}/{size}") })
        }
        1 => {
            // Of code of the user's.
            let sum = Reduce::by(|a: u64, b: u64| a.wrapping_add(b));
            let sum = group.all_reduce(&values(number, me, len), &sum);
            Box::pin(async move { assert!(Some(sum.await.unwrap()) == total(len), "{number} {me}/{size}") })
        }
        2 => {
            let sum = group.reduce_scatter(&values(number, me, each * size), &Reduce::sum());
            Box::pin(async move {
                let expected = total(each * size).unwrap()[me * each..][..each].to_vec();
                assert!(sum.await.unwrap() == expected, "{number} {me}/{size}");
            })
        }
        3 => {
            let gathered = group.all_gather(&values(number, me, len));
            Box::pin(async move {
                let expected: Vec<u64> = all(len).flatten().collect();
                assert!(gathered.await.unwrap() == expected, "{number} {me}/{size}");
            })
        }
        4 => {
            let root = number as usize / 6 % size;
            let sent = group.broadcast(root, &values(number, me, len));
            Box::pin(async move {
                assert!(sent.await.unwrap() == values(number, root, len), "{number} {me}/{size}");
            })
        }
        _ => {
            let exchanged = group.all_to_all(&values(number, me, each * size));
            Box::pin(async move {
                let expected: Vec<u64> =
                    all(each * size).flat_map(|all| all[me * each..][..each].to_vec()).collect();
                assert!(exchanged.await.unwrap() == expected, "{number} {me}/{size}");
            })
        }
    }
}

#[test]
fn results_are_those_of_the_oracle() {
    one_by_one(&Setup::new(), &[2, 3, 5, 8], 60, 3, start);
    one_by_one(&Setup::new(), &[17], 18, 3, start);
}

#[test]
fn little_room_for_messages_changes_nothing() {
    one_by_one(&Setup::tiny(), &[2, 3, 5], 30, 3, start);
}

#[test]
fn without_room_for_all_some_are_sent_as_messages() {
    let mut setup = Setup::new();
    // Enough for boards, and for the stages of some lengths.
    setup.limits.segment = 700 << 10;
    one_by_one(&setup, &[2, 4], 60, 3, start);
}

#[test]
fn who_has_no_memory_sends_messages_and_reads_what_others_lend() {
    without_memory(&[1 << 20, 4096], 30, start);
}

const DOZENS: Overlap = Overlap { turns: 3, at_once: 40, pauses: 10 };

#[test]
fn dozens_overlap_and_some_are_dropped() {
    overlapping(Setup::new(), 2, &DOZENS, start);
    overlapping(Setup::new(), 5, &DOZENS, start);
    overlapping(Setup::tiny(), 3, &DOZENS, start);
}

#[test]
fn the_first_long_operations_of_a_group_are_enough() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        // Of the longest.
        for number in 24..27 {
            start(&world, number).await;
            wait(50).await;
        }
        something_was_lent(&member);
    });
}

/// The stage that a member lends from is part of its memory.
fn something_was_lent(member: &Member) {
    let device = member.client.device_for(member.rank).unwrap();
    assert!(device.allocate((16 << 20) - (1 << 20)).is_err(), "nothing was ever lent");
}

#[test]
fn what_is_lent_stays_until_all_have_read_it() {
    late_readers(40, |turn| vec![turn; 3], start, something_was_lent);
}

#[test]
fn calls_that_do_not_match_are_told_to_all() {
    let wrong: [Call; 7] = [
        |group| outcome(group.all_gather(&vec![0u64; 20_000])),
        |group| outcome(group.all_reduce(&vec![0u64; 20_001], &Reduce::sum())),
        |group| outcome(group.all_reduce(&vec![0u64; 20_000], &Reduce::max())),
        |group| outcome(group.all_reduce(&[0u64], &Reduce::sum())),
        |group| {
            let forced = group.schedule(Algorithm::Pairwise);
            outcome(forced.all_reduce(&vec![0u64; 20_000], &Reduce::sum()))
        },
        |group| outcome(group.barrier()),
        |group| outcome(group.broadcast(0, &vec![0u64; 20_000])),
    ];
    for wrong in wrong {
        // Who is wrong comes first, in the middle, or last; with a stage to lend from or without.
        let most = Some(15 << 20);
        for (late, no_room) in [(0, None), (1, None), (40, None), (0, most), (40, most)] {
            let right = |group: &Group| outcome(group.all_reduce(&vec![1u64; 20_000], &Reduce::sum()));
            mismatch(late, no_room, right, wrong, &|_| true);
        }
    }
}

#[test]
fn broadcasts_that_do_not_match_are_told_to_all_but_a_root_that_has_ended() {
    let wrong: [Call; 4] = [
        |group| outcome(group.all_gather(&vec![0u64; 20_000])),
        |group| outcome(group.all_reduce(&[0u64], &Reduce::sum())),
        |group| outcome(group.barrier()),
        |group| outcome(group.broadcast(0, &vec![0u64; 20_000])),
    ];
    for wrong in wrong {
        for late in [0, 40] {
            // Of which it would have been the root.
            mismatch(late, None, |group| outcome(group.broadcast(3, &vec![1u64; 20_000])), wrong, &|_| true);
        }
    }
}

#[test]
fn a_root_is_ahead_of_the_others_as_far_as_there_is_room() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let len = |number: u64| 10_000 + number as usize % 3;
        let start = |number: u64| world.broadcast(1, &values(number, 1, len(number)));
        if member.rank.0 == 1 {
            // Its stage has room for two: these end at once.
            for number in 0..2 {
                assert!(start(number).now_or_never().expect("nobody else is needed").is_ok());
            }
            let bytes = || member.client.contexts()[0].stats().bytes_sent;
            let before = bytes();
            let sent: Vec<_> = (2..40).map(start).collect();
            for (number, sent) in (2..).zip(sent) {
                assert!(sent.await.unwrap() == values(number, 1, len(number)));
            }
            // For the others there is room when all have done with those before.
            let bytes = bytes() - before;
            assert!(bytes < 2 * 38 * 80_000 / 4, "{bytes} bytes went as messages");
        } else {
            wait(50 * member.rank.index()).await;
            for number in 0..40 {
                wait(number as usize % 7).await;
                assert!(start(number).await.unwrap() == values(number, 1, len(number)), "{number}");
            }
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn who_has_come_is_not_kept_waiting_by_who_has_not_where_a_root_has_no_room() {
    let through = std::cell::Cell::new(false);
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        // The last comes when the other is through.
        while member.rank.0 == 2 && !through.get() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        // More than the root's stage has room for.
        let sent: Vec<_> = (0..6).map(|number| world.broadcast(0, &values(number, 0, 10_000))).collect();
        for (number, sent) in (0..).zip(sent) {
            assert!(soon("a broadcast", sent).await.unwrap() == values(number, 0, 10_000));
        }
        if member.rank.0 == 1 {
            through.set(true);
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn what_no_message_of_a_schedule_brings_is_zero() {
    /// Nobody sends anything.
    #[derive(Debug)]
    struct Silent;
    impl Schedule for Silent {
        fn name(&self) -> &str {
            "silent"
        }

        fn program(&self, _: Kind, place: &Place<'_>) -> Option<Program> {
            Some(Program::new(place.size, Route::default()))
        }
    }
    run(3, Setup::new(), async |member| {
        let silent = member.collectives.world().custom_schedule(Arc::new(Silent));
        let me = member.rank.index();
        let own = |given: &[u64]| {
            (0..3).flat_map(|rank| vec![if rank == me { given[0] } else { 0 }; 2]).collect::<Vec<_>>()
        };
        let given = if me == 0 { vec![7u64; 6] } else { Vec::new() };
        let part = silent.scatter(0, &given, 2).await.unwrap();
        assert_eq!(part, if me == 0 { [7; 2] } else { [0; 2] });
        assert_eq!(silent.all_gather(&[5u64; 2]).await.unwrap(), own(&[5]));
        assert_eq!(silent.all_to_all(&[9u64; 6]).await.unwrap(), own(&[9]));
    });
}

#[test]
fn what_a_root_has_lent_is_read_when_it_has_left() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let given = values(5, 0, 100_000);
        if member.rank.0 == 0 {
            world.broadcast(0, &given).await.unwrap();
            drop(world);
            member.client.close().await;
        } else {
            wait(100 * member.rank.index()).await;
            assert!(world.broadcast(0, &vec![0; 100_000]).await.unwrap() == given);
            let fault = fault_of(world.broadcast(0, &given).await);
            assert_eq!(fault, Fault::PeerClosed(Rank(0)));
        }
    });
}

#[test]
fn whoever_dies_every_long_broadcast_of_every_survivor_ends() {
    let several = |group: &Group, random: &mut Random, turn: u64| {
        let (root, len) = (random.below(4), 5_000 + random.below(30_000));
        let one = |number: u64| -> Outcome {
            let sent = group.broadcast(root, &values(number, group.rank(), len));
            Box::pin(async move {
                assert!(sent.await? == values(number, root, len), "a broadcast is wrong");
                Ok(())
            })
        };
        (0..3).map(|number| one(turn * 3 + number)).collect()
    };
    // Whoever only gives may hear of a loss later than at its next call.
    whoever_dies(30, 4, 30, several, |group| outcome(group.all_reduce(&vec![1u64; 10_000], &Reduce::sum())));
}

#[test]
fn a_panic_in_code_of_the_users_ends_it_for_all() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let is_it = member.rank.0 == 1;
        let sum = Reduce::by(move |a: u64, b: u64| if is_it { panic!("on purpose") } else { a + b });
        let fault = fault_of(world.all_reduce(&vec![1; 30_000], &sum).await);
        assert_eq!(fault, Fault::RemotePanicked(Rank(1)));
    });
}

#[test]
fn whoever_dies_every_long_one_of_every_survivor_ends() {
    let several = |group: &Group, random: &mut Random, _: u64| {
        let len = 10_000 + random.below(20_000);
        let one = |add: u64| -> Outcome {
            let sum = group.all_reduce(&vec![1 + add; len], &Reduce::sum());
            Box::pin(async move {
                let sum = sum.await?;
                assert!(sum == vec![4 * (1 + add); len], "a sum is wrong");
                Ok(())
            })
        };
        (0..2).map(one).collect()
    };
    whoever_dies(30, 4, 30, several, |group| outcome(group.all_reduce(&vec![1u64; 10_000], &Reduce::sum())));
}

#[test]
fn a_rank_that_leaves_in_order_has_lent_its_part() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let sum = world.all_reduce(&vec![1u64; 50_000], &Reduce::sum());
        if member.rank.0 == 0 {
            assert!(sum.await.unwrap() == vec![4; 50_000]);
            member.client.close().await;
        } else {
            wait(member.rank.index() * 10).await;
            assert!(sum.await.unwrap() == vec![4; 50_000]);
            let fault = fault_of(world.all_reduce(&vec![1u64; 50_000], &Reduce::sum()).await);
            assert_eq!(fault, Fault::PeerClosed(Rank(0)));
        }
    });
}

#[test]
fn stages_of_groups_that_are_gone_go_back() {
    let mut setup = Setup::new();
    setup.limits.segment = 2 << 20;
    run(3, setup, async |member| {
        let world = member.collectives.world();
        // What it has for good, it has from the start.
        warm(&world).await;
        world.all_gather(&[1u64]).await.unwrap();
        for turn in 0..30u32 {
            let group = world.split(Some(0), turn).await.unwrap().unwrap();
            warm(&group).await;
            // Of lengths that take several stages.
            for len in [5_000, 20_000, 5_000, 40_000] {
                let sum = group.all_reduce(&vec![1u64; len], &Reduce::sum()).await.unwrap();
                assert!(sum == vec![3; len], "{turn} {len}");
            }
        }
        world.barrier().await.unwrap();
        // What the others still hold is released soon.
        let device = member.client.device_for(member.rank).unwrap().clone();
        let most = loop {
            match device.allocate((2 << 20) - (64 << 10)) {
                Ok(allocation) => break allocation,
                Err(_) => wait(1).await,
            }
        };
        device.free(most);
        world.barrier().await.unwrap();
    });
}
