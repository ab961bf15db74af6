//! Collective operations of members that share memory whose parts have no room on a board: laid out in stages, as messages,
//! and both in one operation.

mod laid;
#[allow(dead_code, reason = "these tests need a part of it")]
mod near;
mod support;

use laid::{late_readers, without_memory};
use near::{
    Call, Check, Outcome, Overlap, fault_of, mismatch, one_by_one, outcome, overlapping, uneven, wait, warm,
    whoever_dies,
};
use posthaste_core::{Collective, Fault, Messager, Rank};
use posthaste_protocols::collective::Algorithm;
use posthaste_protocols::{Group, Reduce};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use support::{Member, Random, Setup, run, values};

/// Their sum in the order of the ranks, bit by bit.
fn total(seed: u64, size: usize, len: usize) -> Vec<u64> {
    let all: Vec<_> = (0..size).map(|rank| uneven(seed, rank, len)).collect();
    (0..len).map(|at| all.iter().skip(1).fold(all[0][at], |sum, one| sum + one[at]).to_bits()).collect()
}

fn bits(values: Vec<f64>) -> Vec<u64> {
    values.into_iter().map(f64::to_bits).collect()
}

/// Whether so many values of each, or for each, are combined in the order of the ranks. Others are combined in an order that
/// does not depend on timing either.
fn in_order(size: usize, len: usize) -> bool {
    size <= 32 && size * len <= 8192
}

/// Starts the operation with that number; what is given checks its result.
fn start(group: &Group, number: u64) -> Check {
    let (size, me) = (group.size(), group.rank());
    let len = [1, 128, 7, 1000, 33][(number / 5 % 5) as usize];
    let all = move |len: usize| (0..size).map(move |rank| values(number, rank, len));
    match number % 5 {
        0 => {
            let exchanged = group.all_to_all(&values(number, me, len * size));
            Box::pin(async move {
                let expected: Vec<u64> =
                    all(len * size).flat_map(|all| all[me * len..][..len].to_vec()).collect();
                assert!(exchanged.await.unwrap() == expected, "{number} {me}/{size}");
            })
        }
        1 => {
            let gathered = group.all_gather(&values(number, me, len));
            Box::pin(async move {
                let expected: Vec<u64> = all(len).flatten().collect();
                assert!(gathered.await.unwrap() == expected, "{number} {me}/{size}");
            })
        }
        2 => {
            let sum = group.reduce_scatter(&uneven(number, me, len * size), &Reduce::sum());
            Box::pin(async move {
                let expected = total(number, size, len * size)[me * len..][..len].to_vec();
                let got = bits(sum.await.unwrap());
                assert!(
                    got.len() == len && (!in_order(size, len) || got == expected),
                    "{number} {me}/{size}"
                );
            })
        }
        3 => {
            let sum = group.all_reduce(&uneven(number, me, len), &Reduce::sum());
            Box::pin(async move {
                let expected = total(number, size, len);
                let got = bits(sum.await.unwrap());
                assert!(
                    got.len() == len && (!in_order(size, len) || got == expected),
                    "{number} {me}/{size}"
                );
            })
        }
        _ => {
            // Of bytes, at any alignment.
            let cut = |seed: u64, rank, len: usize| -> Vec<u8> {
                values(seed, rank, len).into_iter().map(|value| value as u8).collect()
            };
            let exchanged = group.all_to_all(&cut(number, me, len * size));
            Box::pin(async move {
                let of = |rank| cut(number, rank, len * size)[me * len..][..len].to_vec();
                let expected: Vec<u8> = (0..size).flat_map(of).collect();
                assert!(exchanged.await.unwrap() == expected, "{number} {me}/{size}");
            })
        }
    }
}

#[test]
fn results_are_those_of_the_oracle() {
    one_by_one(&Setup::new(), &[2, 3, 5, 8], 75, 3, start);
    one_by_one(&Setup::new(), &[16, 32, 33], 25, 3, start);
}

#[test]
fn little_room_for_messages_changes_nothing() {
    one_by_one(&Setup::tiny(), &[2, 3, 5], 50, 3, start);
}

#[test]
fn without_room_for_all_some_are_sent_as_messages() {
    for room in [8 << 10, 40 << 10, 150 << 10] {
        let mut setup = Setup::new();
        setup.limits.segment = room;
        one_by_one(&setup, &[2, 4], 50, 3, start);
    }
}

#[test]
fn who_has_no_memory_sends_messages_and_reads_what_others_have_laid_out() {
    without_memory(&[1 << 20, 4096, 64], 50, start);
}

const THOUSAND: Overlap = Overlap { turns: 1, at_once: 1000, pauses: 60 };
const HUNDREDS: Overlap = Overlap { turns: 4, at_once: 150, pauses: 30 };

#[test]
fn a_thousand_overlap_and_some_are_dropped() {
    overlapping(Setup::new(), 3, &THOUSAND, start);
}

#[test]
fn hundreds_overlap_and_some_are_dropped() {
    overlapping(Setup::new(), 2, &HUNDREDS, start);
    overlapping(Setup::new(), 5, &HUNDREDS, start);
    overlapping(Setup::tiny(), 3, &HUNDREDS, start);
}

/// Messages that a rank sends meanwhile.
async fn messages(member: &Member, meanwhile: impl Future<Output = ()>) -> u64 {
    let sent = || member.client.contexts()[0].stats().messages_sent;
    let before = sent();
    meanwhile.await;
    sent() - before
}

#[test]
fn where_all_have_called_it_there_is_no_message() {
    let called = AtomicU64::new(0);
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        // The others call it before anybody looks.
        let together = async |group: &Group, number: u64, round: u64| {
            let check = start(group, number);
            called.fetch_add(1, Ordering::Relaxed);
            while called.load(Ordering::Relaxed) < 4 * round {
                wait(1).await;
            }
            check.await;
        };
        // With the first there is a stage.
        together(&world, 0, 1).await;
        let mut sent = 0;
        for number in 1..50 {
            sent += messages(&member, together(&world, number, 1 + number)).await;
        }
        // But for those that tell now and then how far this rank is.
        assert!(sent <= 9, "{sent} messages");
        let forced = world.schedule(Algorithm::Pairwise);
        let operation = together(&forced, 0, 51);
        assert!(messages(&member, operation).await > 0, "they are not counted");
    });
}

#[test]
fn what_is_laid_out_stays_until_all_have_read_it() {
    late_readers(100, |turn| (turn..turn + 5).collect(), start, |_| {});
}

#[test]
fn one_that_is_dropped_is_over_when_all_have_written() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        for _ in 0..5 {
            drop(world.all_to_all(&[1u64; 300]));
            drop(world.all_gather(&[1u64; 300]));
            assert_eq!(world.all_to_all(&[7u64; 300]).await.unwrap(), [7; 300]);
        }
        let hub = format!("{:?}", member.collectives);
        assert!(hub.contains(", [], None, {})"), "{hub}");
    });
}

#[test]
fn calls_that_do_not_match_are_told_to_all() {
    let wrong: [(Call, Option<Collective>); 8] = [
        (|group| outcome(group.all_gather(&[0u64; 100])), Some(Collective::AllGather(800))),
        (|group| outcome(group.all_to_all(&[0u64; 404])), Some(Collective::AllToAll(808))),
        (
            |group| outcome(group.reduce_scatter(&[0u64; 400], &Reduce::max())),
            Some(Collective::ReduceScatter(800)),
        ),
        (|group| outcome(group.all_to_all(&vec![0u64; 400_000])), Some(Collective::AllToAll(800_000))),
        (|group| outcome(group.all_reduce(&[0u64], &Reduce::sum())), Some(Collective::AllReduce(8))),
        (|group| outcome(group.schedule(Algorithm::Pairwise).all_to_all(&[0u64; 400])), None),
        (|group| outcome(group.barrier()), None),
        (|group| outcome(group.broadcast(0, &[0u64; 400])), None),
    ];
    for (wrong, name) in wrong {
        let is_told = |calls: [Collective; 2]| {
            name.filter(|_| calls[0] != calls[1]).is_none_or(|name| calls.contains(&name))
        };
        // Who is wrong comes first, in the middle, or last; with room for stages or without.
        for (late, no_room) in [(0, None), (1, None), (40, None), (0, Some(4096)), (40, Some(4096))] {
            let right = |group: &Group| outcome(group.all_to_all(&[1u64; 400]));
            mismatch(late, no_room, right, wrong, &is_told);
        }
    }
}

/// As long, and by the same name: only what they combine with tells them apart.
#[test]
fn operators_that_do_not_match_are_told_to_all() {
    let right = |group: &Group| outcome(group.reduce_scatter(&[1u64; 400], &Reduce::sum()));
    let wrong: [Call; 2] = [
        |group| outcome(group.reduce_scatter(&[1u64; 400], &Reduce::max())),
        |group| outcome(group.reduce_scatter(&[1i64; 400], &Reduce::sum())),
    ];
    for wrong in wrong {
        for (late, no_room) in [(0, None), (40, None), (0, Some(4096))] {
            mismatch(late, no_room, right, wrong, &|calls| {
                matches!(calls, [Collective::ReduceScatter(_), Collective::ReduceScatter(_)])
            });
        }
    }
}

#[test]
fn whoever_dies_every_one_of_every_survivor_ends() {
    let several = |group: &Group, random: &mut Random, turn: u64| {
        let len = 1 + random.below(300);
        let one = |_| -> Outcome {
            let exchanged = group.all_to_all(&vec![turn; len * 5]);
            Box::pin(async move {
                let all = exchanged.await?;
                assert!(all == vec![turn; len * 5], "a block is not its sender's");
                Ok(())
            })
        };
        (0..1 + random.below(3)).map(one).collect()
    };
    whoever_dies(40, 5, 60, several, |group| outcome(group.all_gather(&[1u64; 9])));
}

#[test]
fn a_rank_that_leaves_in_order_has_laid_out_its_part() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let exchanged = world.all_to_all(&[1u64; 400]);
        if member.rank.0 == 0 {
            assert_eq!(exchanged.await.unwrap(), [1; 400]);
            member.client.close().await;
        } else {
            wait(member.rank.index() * 10).await;
            assert_eq!(exchanged.await.unwrap(), [1; 400]);
            assert_eq!(fault_of(world.all_to_all(&[1u64; 400]).await), Fault::PeerClosed(Rank(0)));
        }
    });
}
