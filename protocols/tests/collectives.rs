//! Collective operations over real messages, compared with what one process computes alone.

mod support;

use futures::future::join_all;
use posthaste_core::{Collective, Fault, Messager, Rank};
use posthaste_protocols::collective::{Algorithm, Kind, Located, Place, Program, Schedule};
use posthaste_protocols::{BadMembers, CollectiveError, Group, Reduce};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{Random, Setup, run, values};

/// Calls an operation and compares it with the oracle; false: the schedule does not offer it.
async fn check(group: &Group, kind: Kind, root: usize, len: usize, seed: u64) -> bool {
    let (me, size) = (group.rank(), group.size());
    let is_root = me == root;
    let sum = Reduce::<u64>::sum();
    let own = me * len..(me + 1) * len;
    let wide = |rank: usize| values(seed, rank, len * size);
    let narrow = |rank: usize| values(seed, rank, len);
    let total = |all: Vec<Vec<u64>>| -> Vec<u64> {
        (0..all[0].len()).map(|at| all.iter().fold(0u64, |sum, one| sum.wrapping_add(one[at]))).collect()
    };
    let gathered = || (0..size).flat_map(narrow).collect::<Vec<u64>>();
    let outcome = match kind {
        Kind::Barrier => group.barrier().await.map(|()| true),
        Kind::Broadcast => group.broadcast(root, &narrow(me)).await.map(|got| got == narrow(root)),
        Kind::Reduce => group
            .reduce(root, &narrow(me), &sum)
            .await
            .map(|got| got == is_root.then(|| total((0..size).map(narrow).collect()))),
        Kind::AllReduce => {
            let got = group.all_reduce(&narrow(me), &sum).await;
            got.map(|got| got == total((0..size).map(narrow).collect()))
        }
        Kind::Gather => group.gather(root, &narrow(me)).await.map(|got| got == is_root.then(gathered)),
        Kind::AllGather => group.all_gather(&narrow(me)).await.map(|got| got == gathered()),
        Kind::Scatter => {
            let given = if is_root { wide(root) } else { Vec::new() };
            group.scatter(root, &given, len).await.map(|got| got == wide(root)[own])
        }
        Kind::AllToAll => group.all_to_all(&wide(me)).await.map(|got| {
            let expected: Vec<u64> = (0..size).flat_map(|rank| wide(rank)[own.clone()].to_vec()).collect();
            got == expected
        }),
        Kind::ReduceScatter => group
            .reduce_scatter(&wide(me), &sum)
            .await
            .map(|got| got == total((0..size).map(wide).collect())[own.clone()]),
    };
    match outcome {
        Ok(same) => {
            assert!(same, "{kind:?} of {len}, rank {me} of {size}, root {root}");
            true
        }
        Err(CollectiveError::NotOffered { .. }) => false,
        Err(error) => panic!("{kind:?} of {len}, rank {me} of {size}: {error}"),
    }
}

/// Whether a schedule does that kind of operation, as its description says.
fn offers(algorithm: Algorithm, kind: Kind) -> bool {
    use Kind::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, Reduce, ReduceScatter};
    match algorithm {
        Algorithm::Binomial | Algorithm::TwoLevel => kind != AllToAll,
        Algorithm::RecursiveDoubling => [Barrier, AllReduce, AllGather].contains(&kind),
        Algorithm::Ring => [Broadcast, Reduce, AllReduce, AllGather, ReduceScatter].contains(&kind),
        Algorithm::TwoRings => [Broadcast, AllReduce, AllGather, ReduceScatter].contains(&kind),
        Algorithm::Pairwise => true,
        Algorithm::Dissemination => [Barrier, AllGather].contains(&kind),
        other => panic!("{other:?} is new here"),
    }
}

fn every_operation(sizes: &[u32], lens: &[usize], setup: &Setup) {
    for size in sizes {
        let mut setup = setup.clone();
        setup.nodes = (0..*size).map(|rank| rank * 7919 % 4).collect();
        run(*size, setup, async |member| {
            let world = member.collectives.world();
            let mut seed = 1;
            for kind in Kind::ALL {
                for len in lens {
                    let roots = if kind.has_root() { vec![0, *size as usize - 1] } else { vec![0] };
                    for root in roots {
                        for algorithm in Algorithm::ALL {
                            seed += 1;
                            let done = check(&world.schedule(algorithm), kind, root, *len, seed).await;
                            assert_eq!(done, offers(algorithm, kind), "{algorithm:?}, {kind:?} of {size}");
                        }
                        seed += 1;
                        assert!(check(&world, kind, root, *len, seed).await, "the world offers all");
                    }
                }
            }
        });
    }
}

#[test]
fn every_operation_by_every_schedule_gives_what_the_oracle_says() {
    every_operation(&[1, 2, 3, 4, 5, 7, 8, 13, 16, 33], &[0, 1, 9, 300], &Setup::new());
}

/// With more than one chunk for each rank, and on both sides of the size from which on the library chooses other schedules.
#[test]
fn long_operations_of_some_ranks_by_every_schedule_give_what_the_oracle_says() {
    every_operation(&[9], &[20_000], &Setup::new());
}

/// As above, of as many as two to the power of something.
#[test]
fn long_operations_of_32_ranks_by_every_schedule_give_what_the_oracle_says() {
    every_operation(&[32], &[20_000], &Setup::new());
}

/// As above, of one more.
#[test]
fn long_operations_of_33_ranks_by_every_schedule_give_what_the_oracle_says() {
    every_operation(&[33], &[20_000], &Setup::new());
}

/// Nobody leaves a barrier before the last has come to it, by whatever schedule, also when several are under way.
#[test]
fn nobody_leaves_a_barrier_before_the_last_has_come() {
    for size in [2u32, 3, 4, 5, 7, 8, 13] {
        let entered = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counts = entered.clone();
        let mut setup = Setup::new();
        setup.nodes = (0..size).map(|rank| rank * 7919 % 4).collect();
        run(size, setup, async move |member| {
            let world = member.collectives.world();
            let mut random = Random(u64::from(member.rank.0) * 77 + 5);
            let chosen = Algorithm::ALL.into_iter().map(|algorithm| world.schedule(algorithm));
            let mut round = 0;
            for group in chosen.chain([world.clone()]) {
                for _ in 0..8 {
                    let most = if random.below(4) == 0 { 200 } else { 3 };
                    for _ in 0..random.below(most) {
                        tokio::task::yield_now().await;
                    }
                    let so_far = counts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    match group.barrier().await {
                        Ok(()) => round += 1,
                        Err(CollectiveError::NotOffered { .. }) => {
                            // All find it so; nobody has waited.
                            counts.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                            break;
                        }
                        Err(error) => panic!("{error}"),
                    }
                    let now = counts.load(std::sync::atomic::Ordering::SeqCst);
                    assert!(
                        so_far < round * size as usize,
                        "round {round}: the last barrier let somebody go early"
                    );
                    assert!(now >= round * size as usize, "round {round}: {now} of {size} have come");
                }
            }
        });
    }
}

#[test]
fn long_ones_go_in_chunks() {
    every_operation(&[2, 3, 5], &[2500, 40_000], &Setup::new());
}

#[test]
fn megabytes_arrive() {
    every_operation(&[3], &[1 << 20], &Setup::new());
}

#[test]
fn little_room_delays_and_changes_nothing() {
    every_operation(&[2, 3, 5], &[0, 1, 9, 300, 5000], &Setup::tiny());
}

/// 1,000 operations of all kinds on four overlapping groups, all under way before the first is awaited, awaited in an
/// order that differs by rank.
fn overlapping(setup: Setup, size: u32, operations: usize) {
    run(size, setup, async |member| {
        let world = member.collectives.world();
        let half = world.split(Some(member.rank.0 % 2), 0).await.unwrap().unwrap();
        let reversed = world.split(Some(0), u32::MAX - member.rank.0).await.unwrap().unwrap();
        let third = world.split((member.rank.0 % 3 == 0).then_some(1), 0).await.unwrap();
        let mut random = Random(99);
        let mut under_way = Vec::new();
        for seed in 0..operations {
            let which = random.below(4);
            let kind = Kind::ALL[random.below(Kind::ALL.len())];
            let len = [0, 1, 5, 40, 3000][random.below(5)];
            let root = random.next() as usize;
            let group = match which {
                0 => Some(world.clone()),
                1 => Some(half.clone()),
                2 => Some(reversed.clone()),
                _ => third.clone(),
            };
            if let Some(group) = group {
                let root = if kind.has_root() { root % group.size() } else { 0 };
                let mut one = Box::pin(async move {
                    check(&group, kind, root, len, seed as u64).await;
                });
                // The call starts it.
                if futures::poll!(&mut one).is_pending() {
                    under_way.push(one);
                }
            }
        }
        let mut random = Random(member.rank.0.into());
        while !under_way.is_empty() {
            let next = under_way.swap_remove(random.below(under_way.len()));
            next.await;
        }
    });
}

#[test]
fn a_thousand_operations_overlap() {
    overlapping(Setup::new(), 6, 1000);
}

#[test]
fn a_thousand_operations_overlap_with_little_room() {
    overlapping(Setup::tiny(), 5, 1000);
}

#[test]
fn a_rank_that_is_far_ahead_waits_and_nothing_is_lost() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        let pairs = world.split(Some(member.rank.0 / 2), 0).await.unwrap().unwrap();
        if member.rank.0 == 0 {
            // Rank 1 has started none of these, and waits for what comes last first.
            let ahead: Vec<_> = (0..500u64).map(|n| world.broadcast(0, &[n, n + 1])).collect();
            let long: Vec<_> = (0..3u64).map(|n| world.broadcast(0, &vec![n; 100_000])).collect();
            let last = pairs.broadcast(0, &[77u64]);
            join_all(ahead).await.into_iter().for_each(|done| drop(done.unwrap()));
            join_all(long).await.into_iter().for_each(|done| drop(done.unwrap()));
            last.await.unwrap();
        } else {
            if member.rank.0 == 1 {
                assert_eq!(pairs.broadcast(0, &[0u64]).await.unwrap(), [77]);
            }
            for n in 0..500 {
                assert_eq!(world.broadcast(0, &[0u64; 2]).await.unwrap(), [n, n + 1]);
            }
            for n in 0..3 {
                assert_eq!(world.broadcast(0, &vec![0u64; 100_000]).await.unwrap(), vec![n; 100_000]);
            }
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn reductions_of_all_types() {
    run(5, Setup::new(), async |member| {
        let world = member.collectives.world();
        let me = member.rank.0;
        let f = f64::from(me) + 0.5;
        assert_eq!(world.all_reduce_one(f, &Reduce::sum()).await.unwrap(), 12.5);
        assert_eq!(world.all_reduce_one(f, &Reduce::product()).await.unwrap(), 0.5 * 1.5 * 2.5 * 3.5 * 4.5);
        assert_eq!(world.all_reduce_one(-f, &Reduce::min()).await.unwrap(), -4.5);
        assert_eq!(world.all_reduce_one(me as i8 - 3, &Reduce::max()).await.unwrap(), 1);
        assert_eq!(world.all_reduce_one(!(1u16 << me), &Reduce::and()).await.unwrap(), !31);
        assert_eq!(world.all_reduce_one(1u128 << me, &Reduce::or()).await.unwrap(), 31);
        assert_eq!(world.all_reduce_one(me, &Reduce::xor()).await.unwrap(), 4);
        let located = Located { value: (f - 2.0).abs(), place: me.into() };
        let nearest = world.all_reduce_one(located, &Reduce::min_location()).await.unwrap();
        assert_eq!(nearest, Located { value: 0.5, place: 1 });
        let farthest = world.all_reduce_one(located, &Reduce::max_location()).await.unwrap();
        assert_eq!(farthest, Located { value: 2.5, place: 4 });
        // A closure that itself starts an operation: no lock is held under it.
        let pairs = world.split(Some(0), 0).await.unwrap().unwrap();
        let inner = pairs.clone();
        let longest = Reduce::by(move |a: [u8; 3], b: [u8; 3]| {
            let _ = inner.size();
            if a[0] >= b[0] { a } else { b }
        });
        assert_eq!(world.all_reduce_one([me as u8; 3], &longest).await.unwrap(), [4; 3]);
        let rows = world.all_reduce(&vec![[me as u8; 3]; 30_000], &longest).await.unwrap();
        assert_eq!(rows, vec![[4; 3]; 30_000]);
    });
}

#[test]
fn floats_add_up_to_the_same_bits_on_all_ranks_and_every_time() {
    run(7, Setup::tiny(), async |member| {
        let world = member.collectives.world();
        let mut random = Random(member.rank.0.into());
        let mine: Vec<f64> = (0..100).map(|_| (random.next() as f64).sqrt()).collect();
        for algorithm in Algorithm::ALL {
            let group = world.schedule(algorithm);
            let first = match group.all_reduce(&mine, &Reduce::sum()).await {
                Ok(first) => first,
                Err(CollectiveError::NotOffered { .. }) => continue,
                Err(error) => panic!("{error}"),
            };
            for turn in 0..5u32 {
                if turn % 7 == member.rank.0 {
                    tokio::time::sleep(std::time::Duration::from_millis(3)).await;
                }
                assert_eq!(group.all_reduce(&mine, &Reduce::sum()).await.unwrap(), first);
            }
            let all = world.all_gather(&first).await.unwrap();
            assert!(all.chunks(100).all(|other| *other == first), "{algorithm:?}");
        }
    });
}

#[test]
fn blocks_of_different_lengths_change_places() {
    run(6, Setup::new(), async |member| {
        let world = member.collectives.world();
        let (me, size) = (world.rank(), world.size());
        let count = |from: usize, to: usize| (from * 7 + to * 3) % 5 * [1, 2000][(from + to) % 2];
        let block = |from: usize, to: usize| values((from * 10 + to) as u64, 0, count(from, to));
        let mine: Vec<u64> = (0..size).flat_map(|to| block(me, to)).collect();
        let counts: Vec<usize> = (0..size).map(|to| count(me, to)).collect();
        let awaited: Vec<usize> = (0..size).map(|from| count(from, me)).collect();
        let expected: Vec<u64> = (0..size).flat_map(|from| block(from, me)).collect();
        assert_eq!(world.all_to_all_v(&mine, &counts, &awaited).await.unwrap(), expected);
    });
}

#[test]
fn groups_are_made_and_translated() {
    run(7, Setup::new(), async |member| {
        let (me, collectives) = (member.rank.index(), &member.collectives);
        let world = collectives.world();
        // By colour, in the opposite order.
        let split = world.split(Some(me as u32 % 3), 10 - me as u32).await.unwrap().unwrap();
        let expected: Vec<Rank> = (0..7).rev().map(Rank).filter(|rank| rank.index() % 3 == me % 3).collect();
        assert_eq!(split.members(), expected);
        assert_eq!(split.to_job(split.rank()), Some(member.rank));
        assert_eq!(world.translate(me, &split), Some(split.rank()));
        assert_eq!(split.from_job(Rank((me as u32 + 1) % 3)), None);
        let ids = world.all_gather(&[split.id()]).await.unwrap();
        for (other, id) in ids.iter().enumerate() {
            assert_eq!(*id == split.id(), other % 3 == me % 3);
        }
        // Twice the same list: two groups.
        if [2, 5, 0].contains(&me) {
            let list = [Rank(5), Rank(0), Rank(2)];
            let one = collectives.subset(&list).await.unwrap();
            let two = world.subset(&[5, 0, 2]).await.unwrap();
            assert_ne!(one.id(), two.id());
            let (a, b) = (one.all_gather(&[me as u32]), two.all_gather(&[me as u32 * 2]));
            assert_eq!(b.await.unwrap(), [10, 0, 4]);
            assert_eq!(a.await.unwrap(), [5, 0, 2]);
            // All three, and two more.
            let more = one.union(&[Rank(0), Rank(6), Rank(1)]).await.unwrap();
            assert_eq!(more.all_gather(&[me as u32]).await.unwrap(), [5, 0, 2, 6, 1]);
        } else if [6, 1].contains(&me) {
            let list = [Rank(5), Rank(0), Rank(2), Rank(6), Rank(1)];
            let more = collectives.subset(&list).await.unwrap();
            assert_eq!(more.all_gather(&[me as u32]).await.unwrap(), [5, 0, 2, 6, 1]);
        }
        assert_eq!(world.split(None, 0).await.unwrap().map(|group| group.id()), None);
        let (own, other) = (member.rank, Rank(u32::from(member.rank == Rank(0))));
        for (list, bad, told) in [
            (vec![], BadMembers::Nobody, "is empty".to_owned()),
            (vec![own, own], BadMembers::Twice(own), format!("names rank {own} twice")),
            (
                vec![Rank(9), own],
                BadMembers::Unknown { rank: Rank(9), size: 7 },
                "names rank 9: the job has ranks 0 to 6".to_owned(),
            ),
            (vec![other], BadMembers::Without(own), format!("does not name rank {own}")),
        ] {
            let error = collectives.on_the_fly(&list).map(drop).unwrap_err();
            assert_eq!(error, bad.into());
            assert!(error.to_string().contains(&told), "{error}");
            assert_eq!(collectives.subset(&list).await.map(drop), Err(error));
        }
        let last = world.split(Some(0), 0).await.unwrap().unwrap();
        let error = last.broadcast(7, &[0u8]).await.unwrap_err();
        assert_eq!(error, CollectiveError::UnknownRank { rank: 7, size: 7 });
        world.barrier().await.unwrap();
    });
}

#[test]
fn a_group_is_built_from_the_message_that_arrives() {
    run(6, Setup::new(), async |member| {
        let collectives = &member.collectives;
        let list = [Rank(4), Rank(1), Rank(3), Rank(0)];
        if member.rank == Rank(4) {
            let group = collectives.on_the_fly(&list).unwrap();
            let sent = group.broadcast(0, &[5u64, 6]);
            assert_eq!(group.all_reduce_one(1u32, &Reduce::sum()).await.unwrap(), 4);
            sent.await.unwrap();
        } else if list.contains(&member.rank) {
            let group = collectives.arrival().await.unwrap();
            assert_eq!(group.members(), list);
            assert_eq!(group.broadcast(0, &[0u64; 2]).await.unwrap(), [5, 6]);
            assert_eq!(group.all_reduce_one(1u32, &Reduce::sum()).await.unwrap(), 4);
        }
        collectives.world().barrier().await.unwrap();
    });
}

#[test]
fn groups_come_and_go() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        for turn in 0..300u32 {
            let group = world.split(Some(member.rank.0 / 2), turn).await.unwrap().unwrap();
            let sum = group.all_reduce_one(member.rank.0, &Reduce::sum());
            // The handle goes, the operation goes on.
            drop(group);
            assert_eq!(sum.await.unwrap(), [1, 5][member.rank.index() / 2]);
        }
    });
}

#[test]
fn a_dropped_future_leaves_nobody_waiting() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        for turn in 0..50u32 {
            let sum = world.all_reduce(&vec![1u32; 20_000], &Reduce::sum());
            if turn % 4 == member.rank.0 {
                drop(sum);
            } else {
                assert_eq!(sum.await.unwrap(), vec![4; 20_000]);
            }
        }
        world.barrier().await.unwrap();
    });
}

fn fault_of<T: std::fmt::Debug>(result: Result<T, CollectiveError>) -> Fault {
    match result {
        Err(CollectiveError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_that_do_not_match_are_told_to_all() {
    type Wrong = fn(&Group) -> posthaste_protocols::InFlight<Vec<u64>>;
    let wrong: [(Wrong, Collective); 4] = [
        (|group| group.all_gather(&[0u64]), Collective::AllGather(8)),
        (|group| group.all_reduce(&[0u64; 2], &Reduce::sum()), Collective::AllReduce(16)),
        (|group| group.all_reduce(&[0u64], &Reduce::max()), Collective::AllReduce(8)),
        (
            |group| group.schedule(Algorithm::Binomial).all_reduce(&[0u64], &Reduce::sum()),
            Collective::AllReduce(8),
        ),
    ];
    for (wrong, name) in wrong {
        run(5, Setup::new(), async |member| {
            let world = member.collectives.world();
            let child = world.split(Some(0), 0).await.unwrap().unwrap();
            world.barrier().await.unwrap();
            let first = match member.rank.0 {
                3 => wrong(&child).await,
                _ => child.all_reduce(&[1u64], &Reduce::sum()).await,
            };
            let Fault::CollectiveMismatch { ranks, calls } = fault_of(first) else {
                panic!("not a mismatch")
            };
            assert!(ranks.contains(&Rank(3)), "{ranks:?}");
            assert!(calls.contains(&Collective::AllReduce(8)) && calls.contains(&name), "{calls:?}");
            // All later ones end so, too, and another group does not.
            assert!(matches!(fault_of(child.barrier().await), Fault::CollectiveMismatch { .. }));
            world.barrier().await.unwrap();
        });
    }
}

#[test]
fn a_rank_that_cannot_do_its_part_tells_the_others() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        let given = if member.rank.0 == 1 { vec![0u64; 7] } else { Vec::new() };
        let result = world.scatter(1, &given, 2).await;
        match member.rank.0 {
            1 => assert!(matches!(result, Err(CollectiveError::Length { len: 7, expected: 6, .. }))),
            _ => assert_eq!(
                fault_of(result),
                Fault::CollectiveRefused { rank: Rank(1), call: Collective::Scatter(16) }
            ),
        }
    });
}

#[test]
fn a_panic_in_a_closure_is_told_to_all() {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        let careless = Reduce::by(|a: u32, b: u32| if a + b > 2 { panic!("careless") } else { a + b });
        let fault = fault_of(world.all_reduce_one(member.rank.0, &careless).await);
        assert!(matches!(fault, Fault::RemotePanicked(_)), "{fault:?}");
    });
}

#[test]
fn whoever_dies_at_any_moment_every_operation_of_every_survivor_ends() {
    for seed in 0..30u64 {
        run(7, Setup::new(), async |member| {
            let world = member.collectives.world();
            let turned = world.split(Some(0), 9 - member.rank.0).await.unwrap().unwrap();
            let mut random = Random(seed);
            let (victim, at) = (random.below(7) as u32, random.below(20) as u64);
            for turn in 0.. {
                let kind = Kind::ALL[random.below(Kind::ALL.len())];
                let algorithm = Algorithm::ALL[random.below(Algorithm::ALL.len())];
                let group = if random.below(3) == 0 { &turned } else { &world };
                let group = group.schedule(algorithm);
                let mine = vec![1u64; 7 * [1, 3000][random.below(2)]];
                let sum = Reduce::sum();
                if member.rank.0 == victim && turn == at {
                    // Some of it goes out, and no more.
                    let _started = (kind == Kind::AllReduce).then(|| group.all_reduce(&mine, &sum));
                    member.fabric.kill(member.rank);
                    return;
                }
                let result = match kind {
                    Kind::Barrier => group.barrier().await,
                    Kind::Broadcast => group.broadcast(0, &mine).await.map(drop),
                    Kind::Reduce => group.reduce(0, &mine, &sum).await.map(drop),
                    Kind::AllReduce => group.all_reduce(&mine, &sum).await.map(drop),
                    Kind::Gather => group.gather(0, &mine).await.map(drop),
                    Kind::Scatter => group.scatter(0, &vec![0u64; 5 * group.size()], 5).await.map(drop),
                    Kind::AllGather => group.all_gather(&mine).await.map(drop),
                    Kind::AllToAll => group.all_to_all(&vec![0u64; 9 * group.size()]).await.map(drop),
                    Kind::ReduceScatter => {
                        group.reduce_scatter(&vec![0u64; 9 * group.size()], &sum).await.map(drop)
                    }
                };
                match result {
                    Ok(()) | Err(CollectiveError::NotOffered { .. }) => {}
                    Err(CollectiveError::Fault(fault)) => {
                        assert_eq!(fault, Fault::PeerLost(Rank(victim)));
                        break;
                    }
                    Err(other) => panic!("{other}"),
                }
                assert!(turn < 100_000, "nobody notices");
            }
            assert_eq!(fault_of(world.barrier().await), Fault::PeerLost(Rank(victim)));
        });
    }
}

#[test]
fn a_rank_that_leaves_in_order_spoils_nothing_that_it_took_part_in() {
    run(5, Setup::new(), async |member| {
        let world = member.collectives.world();
        for turn in 0..20u64 {
            let sum = world.all_reduce(&vec![turn; 5000], &Reduce::sum());
            let block = world.gather(4, &[turn]);
            assert_eq!(sum.await.unwrap(), vec![turn * 5; 5000]);
            block.await.unwrap();
        }
        if member.rank.0 == 0 {
            member.client.close().await;
            assert_eq!(fault_of(world.barrier().await), Fault::Shutdown);
        } else {
            assert_eq!(fault_of(world.barrier().await), Fault::PeerClosed(Rank(0)));
        }
    });
}

/// What a user's closure has captured, whose end asks the library for something.
struct Asks(Group, Arc<AtomicUsize>);

impl Drop for Asks {
    fn drop(&mut self) {
        drop(self.0.barrier());
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn what_combines_goes_where_its_end_may_ask_the_library() {
    for dies in [false, true] {
        run(3, Setup::new(), async |member| {
            let world = member.collectives.world();
            // Of another group than the one that it combines for.
            let other = world.split(Some(0), member.rank.0).await.unwrap().unwrap();
            let gone = Arc::new(AtomicUsize::new(0));
            let asks = Asks(other, gone.clone());
            let sum = Reduce::by(move |a: u64, b: u64| if asks.0.size() > 0 { a + b } else { 0 });
            let values = vec![1; 100];
            let summed = world.schedule(Algorithm::RecursiveDoubling).all_reduce(&values, &sum);
            drop(sum);
            if dies && member.rank == Rank(0) {
                // The others wait for it, and hear that it has dropped the group.
                drop(summed);
            } else if !dies {
                assert_eq!(summed.await.unwrap(), vec![3; 100]);
            } else {
                let _either = summed.await;
            }
            while gone.load(Ordering::Relaxed) == 0 {
                member.client.advance();
                tokio::task::yield_now().await;
            }
        });
    }
}

/// A schedule whose end asks the library for something.
struct Asking(#[allow(dead_code, reason = "it is dropped")] Asks);

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

impl Schedule for Asking {
    fn name(&self) -> &str {
        "asking"
    }

    fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
        Algorithm::ALL.iter().find_map(|algorithm| algorithm.program(kind, place))
    }
}

#[test]
fn a_schedule_goes_where_its_end_may_ask_the_library() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        let other = world.split(Some(0), member.rank.0).await.unwrap().unwrap();
        let gone = Arc::new(AtomicUsize::new(0));
        let asking = || Arc::new(Asking(Asks(other.clone(), gone.clone())));
        let go = async |count: usize| {
            while gone.load(Ordering::Relaxed) < count {
                member.client.advance();
                tokio::task::yield_now().await;
            }
        };
        // More than a group keeps the plans of.
        for _ in 0..100 {
            world.custom_schedule(asking()).barrier().await.unwrap();
        }
        let some = gone.load(Ordering::Relaxed);
        assert!((30..100).contains(&some), "{some} schedules were let go");
        // And a group that goes.
        let last = world.split(Some(0), member.rank.0).await.unwrap().unwrap();
        last.custom_schedule(asking()).barrier().await.unwrap();
        drop(last);
        go(some + 1).await;
        world.barrier().await.unwrap();
    });
}
