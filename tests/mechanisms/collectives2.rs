//! Collective operations on groups, between processes.

use crate::support::{
    Random, Transport, case, driven_by_thread, here, options, run, run_as, soak, soon, transport,
};
use posthaste::collective::{Action, Blocks, Executor, Kind, PhaseByPhase, Place, Program, Route, Schedule};
use posthaste::{Algorithm, CollectiveError, Group, Job, Rank, Reduce};
use std::future::Future;
use std::ops::{Range, RangeInclusive};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

const FACTOR: u64 = 6_364_136_223_846_793_005;
const STEP: u64 = 1_442_695_040_888_963_407;

/// Where the values of a rank begin.
fn start(seed: u64, rank: usize) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64) << 32
}

/// Each word follows from the one before: a linear congruential generator (Knuth, MMIX).
fn words_from(start: u64, step: u64, len: usize) -> Vec<u64> {
    let next = |word: &u64| Some(word.wrapping_mul(FACTOR).wrapping_add(step));
    std::iter::successors(Some(start), next).skip(1).take(len).collect()
}

/// Values that follow from a rank and a seed.
fn values(seed: u64, rank: usize, len: usize) -> Vec<u64> {
    words_from(start(seed, rank), STEP, len)
}

/// The same from some place on.
fn values_in(seed: u64, rank: usize, range: Range<usize>) -> Vec<u64> {
    // So many steps at once: twice as many for each bit of the number.
    let (mut factor, mut step) = (1u64, 0u64);
    let (mut power, mut term, mut left) = (FACTOR, STEP, range.start);
    while left > 0 {
        if left % 2 == 1 {
            (factor, step) = (factor.wrapping_mul(power), step.wrapping_mul(power).wrapping_add(term));
        }
        term = term.wrapping_mul(power).wrapping_add(term);
        power = power.wrapping_mul(power);
        left /= 2;
    }
    let word = start(seed, rank).wrapping_mul(factor).wrapping_add(step);
    words_from(word, STEP, range.len())
}

/// The sums of what all ranks have: words of the same kind, as each is linear in the one before.
fn sums(seed: u64, size: usize, len: usize) -> Vec<u64> {
    let starts = (0..size).map(|rank| start(seed, rank)).fold(0, u64::wrapping_add);
    words_from(starts, STEP.wrapping_mul(size as u64), len)
}

case!(what_is_computed_at_once_is_what_is_computed_one_by_one);
fn what_is_computed_at_once_is_what_is_computed_one_by_one() {
    for (size, len) in [(1, 5), (4, 0), (7, 100), (33, 31)] {
        let of = |rank| values(9, rank, len);
        assert_eq!(sums(9, size, len), sum_of(size, of));
        for range in [0..len, len / 2..len, len / 3..len / 2] {
            assert_eq!(values_in(9, 3, range.clone()), of(3)[range]);
        }
    }
}

fn sum_of(size: usize, of: impl Fn(usize) -> Vec<u64>) -> Vec<u64> {
    (0..size).map(of).reduce(|a, b| a.iter().zip(b).map(|(a, b)| a.wrapping_add(b)).collect()).unwrap()
}

/// All kinds once, compared with what one rank computes alone; what the schedule does not offer is left out.
async fn all_kinds(group: &Group, len: usize, seed: u64) -> usize {
    all_kinds_of(group, len, len, seed).await
}

/// The same with vectors of `len` words, and, where each rank has a block of its own, blocks of `block`.
async fn all_kinds_of(group: &Group, len: usize, block: usize, seed: u64) -> usize {
    let (me, size) = (group.rank(), group.size());
    let root = seed as usize % size;
    let (narrow, blocks) = (|rank| values(seed, rank, len), |rank| values(seed, rank, block));
    let wide = |rank| values(seed, rank, block * size);
    let own = me * block..(me + 1) * block;
    let sum = Reduce::sum();
    let mut done = 0;
    let mut is = |what: &str, same: Result<bool, CollectiveError>| match same {
        Ok(same) => {
            assert!(same, "{what} of {len}, in blocks {block}, rank {me} of {size}");
            done += 1;
        }
        Err(CollectiveError::NotOffered { .. }) => {}
        Err(error) => panic!("{what}: {error}"),
    };
    is("barrier", group.barrier().await.map(|()| true));
    is("broadcast", group.broadcast(root, &narrow(me)).await.map(|got| got == narrow(root)));
    let total = || sums(seed, size, len);
    let at_root = |full: Vec<u64>| (me == root).then_some(full);
    is("reduce", group.reduce(root, &narrow(me), &sum).await.map(|got| got == at_root(total())));
    is("allreduce", group.all_reduce(&narrow(me), &sum).await.map(|got| got == total()));
    let all = || (0..size).flat_map(blocks).collect::<Vec<u64>>();
    is("gather", group.gather(root, &blocks(me)).await.map(|got| got == at_root(all())));
    is("allgather", group.all_gather(&blocks(me)).await.map(|got| got == all()));
    let given = if me == root { wide(root) } else { Vec::new() };
    is("scatter", group.scatter(root, &given, block).await.map(|got| got == wide(root)[own.clone()]));
    let mine = || (0..size).flat_map(|rank| values_in(seed, rank, own.clone())).collect::<Vec<u64>>();
    is("alltoall", group.all_to_all(&wide(me)).await.map(|got| got == mine()));
    let reduced = group.reduce_scatter(&wide(me), &sum).await;
    is("reduce-scatter", reduced.map(|got| got == sums(seed, size, block * size)[own.clone()]));
    done
}

case!(m_d23_every_operation_by_every_schedule_gives_what_one_rank_computes_alone);
fn m_d23_every_operation_by_every_schedule_gives_what_one_rank_computes_alone() {
    for size in [1, 2, 3, 5, 8] {
        // In a rank, the first of these calls does not return: the size is that of the job.
        run(size, options(), async |job| {
            let world = job.world();
            let mut seed = 0;
            for len in [0, 1, 7, 1000, 30_000] {
                for algorithm in Algorithm::ALL {
                    seed += 1;
                    let group = world.schedule(algorithm);
                    assert!(soon("all kinds", all_kinds(&group, len, seed)).await > 1);
                }
                seed += 1;
                assert_eq!(soon("all kinds", all_kinds(&world, len, seed)).await, 9);
            }
        });
    }
}

case!(m_d23_eight_megabytes);
fn m_d23_eight_megabytes() {
    run(3, options(), async |job| {
        let world = job.world();
        for (seed, algorithm) in Algorithm::ALL.into_iter().enumerate() {
            let chosen = world.schedule(algorithm);
            let done = all_kinds_of(&chosen, 1 << 20, (1 << 20) / 3, seed as u64);
            assert!(soon("8 MiB", done).await > 1);
        }
        assert_eq!(soon("8 MiB", all_kinds(&world, 1 << 20, 99)).await, 9);
    });
}

/// Long vectors, and blocks of as many words in all: of some lengths on groups of some sizes, or, as a soak, of all.
fn long_vectors(test: &str, sizes: &[usize], lens: &[usize], all: RangeInclusive<usize>) {
    let (sizes, lens, time) = match soak() {
        true => (all.collect(), vec![1 << 13, 1 << 17, 1 << 20], Duration::from_secs(3000)),
        false => (sizes.to_vec(), lens.to_vec(), Duration::from_secs(100)),
    };
    let ranks = *sizes.iter().max().unwrap();
    run_as(test, ranks as u32, options().watchdog(time), async move |job| {
        for size in sizes {
            let members: Vec<Rank> = (0..size).map(|at| Rank(((at * 5 + size) % ranks) as u32)).collect();
            if members.contains(&job.rank()) {
                let group = soon("a group", job.collectives().subset(&members)).await.unwrap();
                for (at, len) in lens.iter().enumerate() {
                    let (block, seed) = ((len / size).max(1), (size * 100 + at * 10) as u64);
                    for algorithm in Algorithm::ALL {
                        let chosen = group.schedule(algorithm);
                        assert!(all_kinds_of(&chosen, *len, block, seed + algorithm as u64).await > 1);
                    }
                    assert_eq!(all_kinds_of(&group, *len, block, seed + 9).await, 9);
                }
            }
            // Those who are no members would look for work while the others have some.
            job.barrier().await.unwrap();
        }
    });
}

case!(m_d23_long_vectors_by_every_schedule_on_groups_of_a_few);
/// 64 KiB and 1 MiB, as a soak 8 MiB, too.
fn m_d23_long_vectors_by_every_schedule_on_groups_of_a_few() {
    long_vectors(here!(), &[2, 4, 5, 7, 8, 9, 13, 16], &[1 << 13, 1 << 17], 1..=16);
}

case!(m_d23_long_vectors_by_every_schedule_on_groups_of_many);
/// As above.
fn m_d23_long_vectors_by_every_schedule_on_groups_of_many() {
    long_vectors(here!(), &[17, 32, 33], &[1 << 13, 1 << 17], 17..=33);
}

case!(m_d23_eight_megabytes_by_every_schedule_on_groups_of_a_few);
/// 8 MiB.
fn m_d23_eight_megabytes_by_every_schedule_on_groups_of_a_few() {
    long_vectors(here!(), &[2, 5, 8], &[1 << 20], 2..=8);
}

case!(m_d23_every_schedule_on_groups_of_1_to_33_ranks);
fn m_d23_every_schedule_on_groups_of_1_to_33_ranks() {
    const RANKS: usize = 33;
    // Over sockets, and where each rank has a thread more, some of the sizes.
    let all = transport() == Transport::Shm && !driven_by_thread();
    let sizes: Vec<usize> = if all { (1..=RANKS).collect() } else { vec![1, 6, 9, 17] };
    let ranks = *sizes.last().unwrap();
    run(ranks as u32, options(), async |job| {
        for size in sizes {
            // Not in their order, and not all of them.
            let members: Vec<Rank> = (0..size).map(|at| Rank(((at * 5 + size) % ranks) as u32)).collect();
            if !members.contains(&job.rank()) {
                continue;
            }
            let group = soon("a group", job.collectives().subset(&members)).await.unwrap();
            for (at, len) in [0, 1, 7, 300].into_iter().enumerate() {
                for algorithm in Algorithm::ALL {
                    let seed = (size * 100 + at * 10) as u64 + algorithm as u64;
                    let chosen = group.schedule(algorithm);
                    assert!(soon("all kinds", all_kinds(&chosen, len, seed)).await > 1);
                }
                assert_eq!(soon("all kinds", all_kinds(&group, len, size as u64)).await, 9);
            }
        }
    });
}

case!(m_d23_a_mebibyte_of_each_of_eight_ranks);
fn m_d23_a_mebibyte_of_each_of_eight_ranks() {
    run(8, options(), async |job| {
        assert_eq!(soon("1 MiB", all_kinds(&job.world(), 1 << 17, 7)).await, 9);
    });
}

case!(m_d23_groups_are_made_beforehand_and_on_the_fly);
fn m_d23_groups_are_made_beforehand_and_on_the_fly() {
    run(5, options(), async |job| {
        let me = job.rank().0;
        let world = job.world();
        let odd = soon("a split", world.split(Some(me % 2), 9 - me)).await.unwrap().unwrap();
        let expected: Vec<Rank> = (0..5).rev().filter(|rank| rank % 2 == me % 2).map(Rank).collect();
        assert_eq!(odd.members(), expected);
        soon("all kinds", all_kinds(&odd, 100, 5)).await;
        // On the fly: only rank 3 knows of the group; what arrives is enough to build it.
        let members = [Rank(3), Rank(0), Rank(2)];
        if me == 3 {
            let group = job.collectives().on_the_fly(&members).unwrap();
            let sent = group.broadcast(0, &[7u64; 3000]);
            assert_eq!(soon("a sum", group.all_reduce_one(me, &Reduce::sum())).await.unwrap(), 5);
            soon("a broadcast", sent).await.unwrap();
        } else if members.contains(&job.rank()) {
            let group = soon("a group", job.collectives().arrival()).await.unwrap();
            assert_eq!(group.members(), members);
            assert_eq!(soon("a broadcast", group.broadcast(0, &[0u64; 3000])).await.unwrap(), [7; 3000]);
            assert_eq!(soon("a sum", group.all_reduce_one(me, &Reduce::sum())).await.unwrap(), 5);
        }
        job.barrier().await.unwrap();
    });
}

/// A schedule of the user's own: everybody tells the first rank, which tells everybody.
#[derive(Debug)]
struct RollCall;

impl Schedule for RollCall {
    fn name(&self) -> &str {
        "roll call"
    }

    fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
        let mut route = Route::default();
        match (kind, place.rank) {
            (Kind::AllReduce, 0) => {
                for other in 1..place.size {
                    route.receive(0, other, Blocks::one(0), Action::Append);
                    route.send(1, other, Blocks::one(0));
                }
            }
            (Kind::AllReduce, _) => {
                route.send(0, 0, Blocks::one(0));
                route.receive(1, 0, Blocks::one(0), Action::Store);
            }
            _ => return None,
        }
        Some(Program::new(1, route))
    }
}

case!(m_d22_the_executor_runs_a_schedule_of_the_users_own_and_pipelines_it);
fn m_d22_the_executor_runs_a_schedule_of_the_users_own_and_pipelines_it() {
    run(4, options(), async |job| {
        let group = job.world().custom_schedule(Arc::new(RollCall));
        for len in [1, 500, 200_000] {
            let mine = values(1, group.rank(), len);
            let got = soon("a sum", group.all_reduce(&mine, &Reduce::sum())).await.unwrap();
            assert!(got == sum_of(4, |rank| values(1, rank, len)), "{len}");
        }
        let refused = soon("a barrier", group.barrier()).await.unwrap_err();
        let schedule = "roll call".to_owned();
        assert_eq!(refused, CollectiveError::NotOffered { schedule, kind: Kind::Barrier });
        job.barrier().await.unwrap();
    });
}

case!(m_d22_an_executor_of_the_users_own_carries_every_schedule_out);
fn m_d22_an_executor_of_the_users_own_carries_every_schedule_out() {
    run(5, options(), async |job| {
        let world = job.world();
        let phases: Arc<dyn Executor> = Arc::new(PhaseByPhase);
        let mut seed = 500;
        // The last is cut into several slices.
        for len in [0, 1, 7, 1000, 30_000] {
            for algorithm in Algorithm::ALL {
                seed += 1;
                let group = world.schedule(algorithm).custom_executor(phases.clone());
                assert!(soon("all kinds", all_kinds(&group, len, seed)).await > 1);
                // Who decides on what a rank does when is no concern of the others.
                let mixed = if job.rank().0.is_multiple_of(2) { group } else { world.schedule(algorithm) };
                assert!(soon("all kinds", all_kinds(&mixed, len, seed)).await > 1);
            }
            seed += 1;
            let group = world.custom_executor(phases.clone());
            assert_eq!(soon("all kinds", all_kinds(&group, len, seed)).await, 9);
        }
        let rolled = world.custom_executor(phases).custom_schedule(Arc::new(RollCall));
        let mine = values(1, rolled.rank(), 200_000);
        let got = soon("a sum", rolled.all_reduce(&mine, &Reduce::sum())).await.unwrap();
        assert!(got == sum_of(5, |rank| values(1, rank, 200_000)));
        let teams = soon("a split", rolled.split(Some(0), 0)).await;
        assert!(matches!(teams, Err(CollectiveError::NotOffered { .. })), "it gathers by the same schedule");
        job.barrier().await.unwrap();
    });
}

async fn overlap(job: &Job, operations: u64) {
    let (me, world) = (job.rank().0, job.world());
    let pairs = world.split(Some(me / 2), 0).await.unwrap().unwrap();
    let turned = world.split(Some(0), 9 - me).await.unwrap().unwrap();
    let mut under_way = Vec::new();
    for number in 0..operations {
        let group = [&world, &pairs, &turned][(number % 3) as usize].clone();
        let len = [1, 3, 5000][(number / 3 % 3) as usize];
        let mine = values(number, group.rank(), len);
        // The call starts it.
        let sum = group.all_reduce(&mine, &Reduce::sum());
        let root = number as usize % group.size();
        let news = group.broadcast(root, &values(number + 1, group.rank(), len));
        under_way.push(async move {
            let news = news.await.unwrap();
            assert!(news == values(number + 1, root, len), "broadcast {number}");
            let expected = sum_of(group.size(), |rank| values(number, rank, len));
            assert!(sum.await.unwrap() == expected, "sum {number}");
        });
    }
    // Every rank awaits them in an order of its own.
    let start = under_way.len() * me as usize / 4;
    under_way.rotate_left(start);
    for one in under_way {
        one.await;
    }
}

case!(m_d24_a_thousand_operations_are_under_way_at_once_and_end_in_any_order);
fn m_d24_a_thousand_operations_are_under_way_at_once_and_end_in_any_order() {
    run(4, options(), async |job| {
        soon("the operations", overlap(&job, 500)).await;
        job.barrier().await.unwrap();
    });
}

case!(m_d22_small_operations_of_ranks_that_share_memory_need_no_messages);
fn m_d22_small_operations_of_ranks_that_share_memory_need_no_messages() {
    run(3, options(), async |job| {
        let world = job.world();
        let (me, size) = (u64::from(job.rank().0), job.size() as u64);
        let shares_memory = job.ranks().all(|rank| job.caps_of(rank).mappable);
        // How long it takes until all ranks have a core at the same time, nobody knows.
        for turn in 0u64.. {
            let before = job.handle().stats().messages_sent;
            let sum = world.all_reduce_one(me + turn, &Reduce::sum()).await.unwrap();
            assert_eq!(sum, size * turn + size * (size - 1) / 2);
            let silent = job.handle().stats().messages_sent == before;
            let all_silent = world.all_reduce_one(u8::from(silent), &Reduce::and()).await.unwrap() == 1;
            assert!(shares_memory || !all_silent, "a sum went from rank to rank, and no message");
            if all_silent || (!shares_memory && turn == 200) {
                break;
            }
        }
    });
}

/// Many of several kinds under way at once, awaited in another order by each rank, some dropped.
async fn mixture(group: &Group, operations: u64) {
    let (me, size) = (group.rank(), group.size());
    let sum = Reduce::sum();
    let mut under_way: Vec<Pin<Box<dyn Future<Output = ()>>>> = Vec::new();
    for number in 0..operations {
        let of = move |rank, len| values(number, rank, len);
        let root = number as usize % size;
        under_way.push(match number % 10 {
            0 => {
                let exchanged = group.all_to_all(&of(me, 128 * size));
                Box::pin(async move {
                    let expected: Vec<u64> =
                        (0..size).flat_map(|rank| of(rank, 128 * size)[me * 128..][..128].to_vec()).collect();
                    assert!(exchanged.await.unwrap() == expected, "exchange {number}");
                })
            }
            1 => {
                let barrier = group.barrier();
                Box::pin(async move { barrier.await.unwrap() })
            }
            2 => {
                let total = group.all_reduce(&of(me, 1), &sum);
                Box::pin(async move { assert_eq!(total.await.unwrap(), sum_of(size, |rank| of(rank, 1))) })
            }
            3 => {
                let total = group.reduce_scatter(&of(me, 9 * size), &sum);
                Box::pin(async move {
                    let expected = sum_of(size, |rank| of(rank, 9 * size))[me * 9..][..9].to_vec();
                    assert_eq!(total.await.unwrap(), expected, "reduce-scatter {number}");
                })
            }
            4 => {
                let news = group.broadcast(root, &of(me, 20));
                Box::pin(async move { assert_eq!(news.await.unwrap(), of(root, 20), "broadcast {number}") })
            }
            5 => {
                let total = group.reduce(root, &of(me, 30), &sum);
                Box::pin(async move {
                    let expected = (me == root).then(|| sum_of(size, |rank| of(rank, 30)));
                    assert_eq!(total.await.unwrap(), expected, "reduction {number}");
                })
            }
            6 => {
                let gathered = group.gather(root, &of(me, 7));
                Box::pin(async move {
                    let expected = (me == root).then(|| (0..size).flat_map(|rank| of(rank, 7)).collect());
                    assert_eq!(gathered.await.unwrap(), expected, "gather {number}");
                })
            }
            7 => {
                let given = if me == root { of(root, 11 * size) } else { Vec::new() };
                let part = group.scatter(root, &given, 11);
                Box::pin(async move {
                    assert_eq!(part.await.unwrap(), of(root, 11 * size)[me * 11..][..11], "scatter {number}");
                })
            }
            8 => {
                let gathered = group.all_gather(&of(me, 13));
                Box::pin(async move {
                    let expected: Vec<u64> = (0..size).flat_map(|rank| of(rank, 13)).collect();
                    assert_eq!(gathered.await.unwrap(), expected, "allgather {number}");
                })
            }
            _ => {
                let total = group.all_reduce(&of(me, 100), &sum);
                Box::pin(async move { assert_eq!(total.await.unwrap(), sum_of(size, |rank| of(rank, 100))) })
            }
        });
    }
    let mut random = Random(me as u64);
    while !under_way.is_empty() {
        let next = under_way.swap_remove(random.below(under_way.len() as u64) as usize);
        if random.below(10) != 0 {
            soon("an operation", next).await;
        }
    }
}

case!(m_d24_a_thousand_short_operations_of_all_kinds_overlap);
fn m_d24_a_thousand_short_operations_of_all_kinds_overlap() {
    run(4, options(), async |job| {
        let world = job.world();
        mixture(&world, 20).await;
        mixture(&world, 1000).await;
        soon("a barrier", world.barrier()).await.unwrap();
    });
}

case!(m_d23_without_memory_for_stages_messages_do);
fn m_d23_without_memory_for_stages_messages_do() {
    for most in ["never", "4K", "100K"] {
        run(3, options().env("POSTHASTE_STAGE_BYTES", most), async |job| {
            let world = job.world();
            for seed in 0..4 {
                for len in [1, 200, 5000, 40_000] {
                    assert_eq!(all_kinds(&world, len, seed).await, 9);
                }
            }
        });
    }
}

case!(m_d23_nobody_leaves_a_barrier_of_a_group_before_the_last_has_come);
fn m_d23_nobody_leaves_a_barrier_of_a_group_before_the_last_has_come() {
    run(4, options(), async |job| {
        let window = job.shmalloc::<u64>(3).await.unwrap();
        let me = job.rank();
        let pair = job.world().split(Some(me.0 % 2), 0).await.unwrap().unwrap();
        let mut random = Random(u64::from(me.0) + 1);
        for (word, group) in [job.world(), pair, job.world()].into_iter().enumerate() {
            // All count in a word of the first of them.
            let (home, size) = (group.members()[0], group.size() as u64);
            for round in 1..=30 {
                if random.below(3) == 0 {
                    tokio::time::sleep(std::time::Duration::from_micros(random.below(2000))).await;
                }
                window.fetch_add(home, word, 1).await.unwrap();
                soon("the barrier", group.barrier()).await.unwrap();
                let come = window.fetch_add(home, word, 0).await.unwrap();
                assert!(come >= round * size, "round {round}: {come} have come");
            }
        }
        job.barrier().await.unwrap();
    });
}
