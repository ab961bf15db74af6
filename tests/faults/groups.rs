//! Collective operations on groups that cannot end well.

use crate::support::{Random, Transport, barrier_before_death, case, options, run, soon, transport};
use posthaste::collective::{Execution, Executor, PhaseByPhase, Program, Step, Turn};
use posthaste::{Algorithm, Collective, CollectiveError, Fault, Group, Rank, Reduce};
use std::sync::Arc;
use std::time::Duration;

async fn one(group: &Group, random: &mut Random) -> Result<(), CollectiveError> {
    let mine = vec![1u64; [1, 700, 30_000][random.below(3) as usize]];
    let sum = Reduce::sum();
    // By any schedule, if it is offered for that.
    let any = Algorithm::ALL[random.below(Algorithm::ALL.len() as u64) as usize];
    let forced = group.schedule(any);
    let group = if random.below(2) == 0 { group } else { &forced };
    let (size, me) = (group.size(), group.rank());
    let result = match random.below(10) {
        0 => group.barrier().await,
        1 => group.broadcast(0, &mine).await.map(drop),
        2 => group.reduce(0, &mine, &sum).await.map(drop),
        3 => group.all_reduce(&mine, &sum).await.map(drop),
        4 => group.gather(0, &mine).await.map(drop),
        5 => group.all_gather(&mine).await.map(drop),
        6 => {
            let all = if me == 1 { vec![1u64; 700 * size] } else { Vec::new() };
            group.scatter(1, &all, 700).await.map(drop)
        }
        7 => group.reduce_scatter(&vec![1u64; 90 * size], &sum).await.map(drop),
        8 => {
            let counts: Vec<usize> = (0..size).map(|to| 100 * (me + to)).collect();
            let values = vec![0u64; counts.iter().sum()];
            group.all_to_all_v(&values, &counts, &counts).await.map(drop)
        }
        _ => group.all_to_all(&vec![0u64; 90 * size]).await.map(drop),
    };
    match result {
        // So it is for all.
        Err(CollectiveError::NotOffered { .. }) => Ok(()),
        result => result,
    }
}

case!(fault_whoever_dies_every_members_operation_ends_with_that_loss);
fn fault_whoever_dies_every_members_operation_ends_with_that_loss() {
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    for number in 0..if rank { 1 } else { 8 } {
        let number = std::env::var("POSTHASTE_TEST_SEED").unwrap_or_else(|_| format!("{number}"));
        let seeded = options().body_leaves().killed(2).env("POSTHASTE_TEST_SEED", &number);
        run(5, seeded, async |job| {
            let seed: u64 = std::env::var("POSTHASTE_TEST_SEED").unwrap().parse().unwrap();
            let world = match seed % 2 {
                0 => job.world(),
                _ => job.world().custom_executor(Arc::new(PhaseByPhase)),
            };
            let mut random = Random(seed);
            let last = random.below(30);
            // Whoever leaves for that reason has said why before, and that comes first on every way.
            let lost = CollectiveError::Fault(Fault::PeerLost(Rank(2)));
            let turned = match soon("a group", world.split(Some(0), 9 - job.rank().0)).await {
                Ok(group) => group.unwrap(),
                // Over sockets the others may be that far already: what a rank has sent may die with it.
                Err(error) => {
                    assert!(transport() != Transport::Shm && error == lost, "{error}");
                    assert_eq!(soon("a barrier", world.barrier()).await, Err(lost));
                    return job.leave().await.unwrap();
                }
            };
            for turn in 0u64.. {
                let group = if random.below(2) == 0 { &world } else { &turned };
                if job.rank() == Rank(2) && turn == last {
                    // In the middle of what the others call, too.
                    let mut under_way = Box::pin(one(group, &mut random));
                    let _pending_or_done = ::futures::poll!(&mut under_way);
                    crate::support::kill_self();
                }
                let result = soon("an operation", one(group, &mut random)).await;
                if turn < last && transport() == Transport::Shm {
                    assert_eq!(result, Ok(()), "turn {turn}");
                }
                if let Err(error) = result {
                    assert_eq!(error, lost, "turn {turn}");
                    break;
                }
            }
            for group in [&world, &turned] {
                assert_eq!(soon("a barrier", group.barrier()).await, Err(lost.clone()));
            }
            // Without it, the others might hear first that this one is lost.
            job.leave().await.unwrap();
        });
    }
}

case!(fault_calls_that_differ_end_with_both_names_on_all_ranks);
fn fault_calls_that_differ_end_with_both_names_on_all_ranks() {
    run(4, options(), async |job| {
        let group = job.world().split(Some(0), 0).await.unwrap().unwrap();
        let result = match job.rank().0 {
            1 => soon("a gathering", group.all_gather(&[1u64])).await.map(drop),
            _ => soon("a sum", group.all_reduce(&[1u64], &Reduce::sum())).await.map(drop),
        };
        let Err(CollectiveError::Fault(Fault::CollectiveMismatch { ranks, calls })) = result else {
            panic!("{result:?}");
        };
        assert!(ranks.contains(&Rank(1)), "{ranks:?}");
        assert!(calls.contains(&Collective::AllGather(8)) && calls.contains(&Collective::AllReduce(8)));
        assert!(soon("a barrier", group.barrier()).await.is_err());
        // The group is broken, and the job is not.
        soon("a barrier", job.world().barrier()).await.unwrap();
    });
}

case!(fault_whoever_dies_every_short_exchange_ends_with_that_loss);
fn fault_whoever_dies_every_short_exchange_ends_with_that_loss() {
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    for number in 0..if rank { 1 } else { 8 } {
        let number = std::env::var("POSTHASTE_TEST_SEED").unwrap_or_else(|_| format!("{number}"));
        let seeded = options().body_leaves().killed(1).env("POSTHASTE_TEST_SEED", &number);
        run(4, seeded, async |job| {
            let seed: u64 = std::env::var("POSTHASTE_TEST_SEED").unwrap().parse().unwrap();
            let (world, me) = (job.world(), u64::from(job.rank().0));
            let last = 5 + Random(seed).below(200);
            for turn in 0u64.. {
                let values: Vec<u64> = (0..4 * 128).map(|at| turn << 32 | me << 16 | (at / 128)).collect();
                let exchange = world.all_to_all(&values);
                if me == 1 && turn == last {
                    // Its part is there for the others to read, or is on its way.
                    crate::support::kill_self();
                }
                match soon("an exchange", exchange).await {
                    Ok(got) => {
                        let right =
                            |(at, value): (usize, &u64)| *value == turn << 32 | (at as u64 / 128) << 16 | me;
                        assert!(got.len() == 512 && got.iter().enumerate().all(right), "turn {turn}");
                    }
                    Err(error) => {
                        assert!(turn >= last, "turn {turn}: {error}");
                        assert_eq!(error, CollectiveError::Fault(Fault::PeerLost(Rank(1))));
                        break;
                    }
                }
            }
            let gathered = soon("a gathering", world.all_gather(&[me])).await;
            assert_eq!(gathered, Err(CollectiveError::Fault(Fault::PeerLost(Rank(1)))));
            job.leave().await.unwrap();
        });
    }
}

case!(fault_a_group_that_one_rank_drops_ends_for_the_others_with_its_name);
fn fault_a_group_that_one_rank_drops_ends_for_the_others_with_its_name() {
    run(4, options(), async |job| {
        let world = job.world();
        for turn in 0..20u64 {
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            for _ in 0..turn % 7 {
                soon("a barrier", group.barrier()).await.unwrap();
            }
            let leaver = Rank(turn as u32 % 4);
            if job.rank() == leaver {
                drop(group);
            } else {
                let left = Err(CollectiveError::Fault(Fault::GroupLeft(leaver)));
                assert_eq!(soon("an exchange", group.all_to_all(&[0u64; 400])).await.map(drop), left);
                assert_eq!(soon("a barrier", group.barrier()).await, left);
            }
        }
        soon("a barrier", world.barrier()).await.unwrap();
    });
}

case!(fault_a_multicast_tells_whom_it_did_not_reach);
fn fault_a_multicast_tells_whom_it_did_not_reach() {
    run(4, options().body_leaves().killed(3), async |job| {
        let heard = job.counter();
        let count = heard.clone();
        let news = job
            .register("news", move |_: posthaste::Message<'_>, _: &mut posthaste::Scope<'_>| count.add(1))
            .unwrap();
        barrier_before_death(&job, Rank(3)).await;
        match job.rank().0 {
            0 => {
                // Until the loss is known.
                while soon("a word", news.send(Rank(3), b"")).await.is_ok() {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                let targets = [Rank(1), Rank(3), Rank(2)];
                let error = soon("a multicast", news.multicast(targets, vec![1; 9000])).await.unwrap_err();
                let lost = posthaste::SendError::Fault(Fault::PeerLost(Rank(3)));
                assert_eq!(error.failed, [(Rank(3), lost)]);
                assert_eq!(error.total, 3);
            }
            3 => {
                crate::support::kill_self();
            }
            _ => {
                soon("the news", heard.reach(1)).await;
            }
        }
        job.leave().await.unwrap();
    });
}

case!(fault_no_group_is_made_with_a_rank_that_is_gone_and_what_is_freed_then_ends_alike_everywhere);
fn fault_no_group_is_made_with_a_rank_that_is_gone_and_what_is_freed_then_ends_alike_everywhere() {
    run(3, options().body_leaves().killed(2), async |job| {
        let window = job.shmalloc::<u64>(4).await.unwrap();
        barrier_before_death(&job, Rank(2)).await;
        if job.rank() == Rank(2) {
            crate::support::kill_self();
        }
        let end = soon("a barrier", job.barrier()).await;
        assert!(matches!(&end, Err(error) if error.fault() == Some(Fault::PeerLost(Rank(2)))), "{end:?}");
        soon("its loss", async {
            while job.loss_of(Rank(2)).is_none() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        })
        .await;
        let lost = CollectiveError::Fault(Fault::PeerLost(Rank(2)));
        let all: Vec<Rank> = job.ranks().collect();
        let group = soon("no group", job.collectives().subset(&all)).await;
        assert_eq!(group.map(|group| group.size()), Err(lost.clone()));
        let group = job.collectives().on_the_fly(&[job.rank(), Rank(2)]);
        assert_eq!(group.map(|group| group.size()), Err(lost));
        let freed = soon("the window", window.free()).await;
        assert_eq!(posthaste::Error::from(freed.unwrap_err()).fault(), Some(Fault::PeerLost(Rank(2))));
        // The others are one.
        let two = soon("a group", job.collectives().subset(&all[..2])).await.unwrap();
        soon("a barrier", two.barrier()).await.unwrap();
        job.leave().await.unwrap();
    });
}

case!(fault_a_member_that_starts_late_is_no_reason_to_cut_anybody_off);
fn fault_a_member_that_starts_late_is_no_reason_to_cut_anybody_off() {
    run(9, options(), async |job| {
        // Blocks of 16 KiB, eight of which come to a member from its neighbour whether it has started or not.
        let ring = job.world().schedule(posthaste::Algorithm::Ring);
        let mine = vec![1u64; 9 * 2048];
        if job.rank() == Rank(8) {
            tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        }
        let sum = Reduce::sum();
        let under_way: Vec<_> = (0..64).map(|_| ring.all_reduce(&mine, &sum)).collect();
        for operation in under_way {
            let sums = soon("a sum", operation).await.unwrap();
            assert!(sums.iter().all(|sum| *sum == 9));
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_what_was_sent_before_an_orderly_leave_counts);
fn fault_what_was_sent_before_an_orderly_leave_counts() {
    run(3, options().body_leaves(), async |job| {
        let (world, me) = (job.world(), job.rank().index());
        job.barrier().await.unwrap();
        if me > 0 {
            assert_eq!(soon("its part", world.gather(0, &[me as u64])).await, Ok(None));
            return job.leave().await.unwrap();
        }
        // The leaves are told before the operation is called here.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let gathered = soon("the parts", world.gather(0, &[0u64])).await.unwrap();
        assert_eq!(gathered, Some(vec![0, 1, 2]));
        let next = soon("no more parts", world.gather(0, &[0u64])).await.unwrap_err();
        assert!(matches!(next, CollectiveError::Fault(Fault::PeerClosed(_))), "{next}");
        job.leave().await.unwrap();
    });
}

/// Offers nothing.
#[derive(Debug)]
struct Nothing;

impl posthaste::collective::Schedule for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }

    fn program(
        &self,
        _: posthaste::collective::Kind,
        _: &posthaste::collective::Place<'_>,
    ) -> Option<posthaste::collective::Program> {
        None
    }
}

case!(fault_a_window_that_cannot_be_agreed_upon_takes_nothing_from_others);
fn fault_a_window_that_cannot_be_agreed_upon_takes_nothing_from_others() {
    run(2, options(), async |job| {
        let world = job.world();
        // Until the group works in memory that all of them share.
        for round in 0..3_000u64 {
            let sums = soon("a sum", world.all_reduce(&[round], &Reduce::sum())).await.unwrap();
            assert_eq!(sums, [2 * round]);
        }
        let refusing = world.custom_schedule(std::sync::Arc::new(Nothing));
        for _ in 0..3 {
            let refused = soon("no window", refusing.shmalloc::<u64>(1000)).await.unwrap_err();
            assert!(refused.to_string().contains("\"nothing\" does not offer AllGather"), "{refused}");
        }
        let mut regions = Vec::new();
        for round in 0..20u64 {
            let gathered = soon("all", world.all_gather(&vec![round; 1 << 10])).await.unwrap();
            assert!(gathered.len() == 2 << 10 && gathered.iter().all(|value| *value == round));
            let region = job.region(32 << 10).await.unwrap();
            region.write(0, &vec![round as u8 + 1; 32 << 10]).unwrap();
            regions.push(region);
        }
        for (round, region) in regions.iter().enumerate() {
            let mut bytes = vec![0; 32 << 10];
            region.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == round as u8 + 1), "region {round} is somebody else's");
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_a_closure_that_panics_in_a_persistent_reduction_ends_it_on_all_members);
fn fault_a_closure_that_panics_in_a_persistent_reduction_ends_it_on_all_members() {
    use posthaste::persistent::PersistentError;
    run(3, options(), async |job| {
        let world = job.world();
        let bad = Reduce::by(|_: u64, _: u64| -> u64 { panic!("on purpose") });
        let mut sum = job.persistent().all_reduce::<u64>(&world, 1, &bad).await.unwrap();
        let ended = soon("the reduction", sum.run(&mut [1])).await;
        assert!(matches!(ended, Err(PersistentError::Fault(Fault::RemotePanicked(_)))), "{ended:?}");
        job.barrier().await.unwrap();
    });
}

case!(fault_a_persistent_collective_that_one_gives_up_amid_ends_on_all_members);
fn fault_a_persistent_collective_that_one_gives_up_amid_ends_on_all_members() {
    use posthaste::persistent::PersistentError;
    run(3, options(), async |job| {
        let world = job.world();
        let mut sum = job.persistent().all_reduce::<u64>(&world, 1, &Reduce::sum()).await.unwrap();
        let mut all = job.persistent().all_to_all::<u64>(&world, 1).await.unwrap();
        let mut one = [1];
        soon("the sum", sum.run(&mut one)).await.unwrap();
        assert_eq!(one, [3]);
        job.barrier().await.unwrap();
        let left = Err(PersistentError::Fault(Fault::GroupLeft(Rank(1))));
        if job.rank() == Rank(1) {
            let (short, mut taken) = (Duration::from_millis(50), [0; 3]);
            // Nobody else takes part yet.
            assert!(tokio::time::timeout(short, sum.run(&mut [5])).await.is_err());
            assert!(tokio::time::timeout(short, all.run(&[1, 2, 3], &mut taken)).await.is_err());
            assert_eq!(sum.run(&mut [7]).await, left);
            // Whoever has all parts before the news comes is through well.
            tokio::time::sleep(short).await;
            job.barrier().await.unwrap();
        } else {
            job.barrier().await.unwrap();
            assert_eq!(soon("the sum", sum.run(&mut [5])).await, left);
            assert_eq!(soon("all to all", all.run(&[1, 2, 3], &mut [0; 3])).await, left);
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_a_persistent_collective_that_one_drops_ends_for_those_who_use_it_on);
fn fault_a_persistent_collective_that_one_drops_ends_for_those_who_use_it_on() {
    use posthaste::persistent::PersistentError;
    run(4, options(), async |job| {
        let (world, me) = (job.world(), job.rank());
        let make = job.persistent();
        let mut sum = make.all_reduce::<u64>(&world, 1, &Reduce::sum()).await.unwrap();
        let mut exchange = make.all_to_all::<u64>(&world, 1).await.unwrap();
        let mut news = make.broadcast::<u64>(&world, 0, 1).await.unwrap();
        // Who is slow gets what was sent by those who have used it, and dropped it, long ago.
        if me == Rank(2) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let (mut one, mut told, mut parts) = ([1], [7], [0; 4]);
        soon("the news", news.run(&mut told)).await.unwrap();
        soon("the exchange", exchange.run(&[me.0.into(); 4], &mut parts)).await.unwrap();
        soon("the sum", sum.run(&mut one)).await.unwrap();
        assert_eq!((told, parts, one), ([7], [0, 1, 2, 3], [4]));
        if me == Rank(1) {
            drop((sum, exchange, news));
        } else {
            let left = Err(PersistentError::Fault(Fault::GroupLeft(Rank(1))));
            assert_eq!(soon("the sum", sum.run(&mut one)).await, left);
            assert_eq!(soon("the exchange", exchange.run(&[9; 4], &mut parts)).await, left);
            // What is sent to it goes nowhere, and the next one waits until it has been taken there.
            let mut used = 0;
            let ended = loop {
                match soon("the news", news.run(&mut told)).await {
                    Ok(()) => used += 1,
                    Err(ended) => break ended,
                }
            };
            assert_eq!((Err(ended), used <= 1), (left, true));
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_persistent_collectives_that_are_dropped_after_their_last_use_end_well_for_the_slow);
fn fault_persistent_collectives_that_are_dropped_after_their_last_use_end_well_for_the_slow() {
    run(4, options(), async |job| {
        let (world, me) = (job.world(), job.rank());
        let make = job.persistent();
        for slow in job.ranks().chain(job.ranks()) {
            let mut sum = make.all_reduce::<u64>(&world, 1000, &Reduce::sum()).await.unwrap();
            let mut exchange = make.all_to_all::<u64>(&world, 1000).await.unwrap();
            let mut news = make.broadcast::<u64>(&world, 1, 1000).await.unwrap();
            if me == slow {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            for use_of in 0..3 {
                let (mut one, mut told, mut parts) = (vec![1; 1000], vec![use_of; 1000], vec![0; 4000]);
                soon("the news", news.run(&mut told)).await.unwrap();
                soon("the exchange", exchange.run(&vec![me.0.into(); 4000], &mut parts)).await.unwrap();
                soon("the sum", sum.run(&mut one)).await.unwrap();
                assert_eq!((told, one), (vec![use_of; 1000], vec![4; 1000]));
                assert!(parts.iter().enumerate().all(|(at, part)| at as u64 / 1000 == *part));
            }
            // Of those who need nothing of the slow one, all have dropped it before that begins.
            let root = slow.next(job.size()).index();
            let mut last = make.broadcast::<u64>(&world, root, 10).await.unwrap();
            if me == slow {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            for use_of in 0..3 {
                let mut told = vec![use_of; 10];
                soon("the last news", last.run(&mut told)).await.unwrap();
                assert_eq!(told, vec![use_of; 10]);
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_persistent_collectives_that_are_made_at_once_are_told_apart);
fn fault_persistent_collectives_that_are_made_at_once_are_told_apart() {
    run(3, options(), async |job| {
        let (world, me) = (job.world(), job.rank());
        let (make, sums) = (job.persistent(), Reduce::sum());
        for _ in 0..10 {
            // They are called in one order everywhere.
            let made = async {
                tokio::join!(
                    biased;
                    make.all_reduce::<u64>(&world, 30_000, &sums),
                    make.barrier(&world),
                    make.all_to_all::<u64>(&world, 1),
                    make.broadcast::<u64>(&world, 2, 5_000),
                )
            };
            let (sum, barrier, exchange, news) = soon("they are made", made).await;
            let (mut sum, mut barrier, mut exchange, mut news) =
                (sum.unwrap(), barrier.unwrap(), exchange.unwrap(), news.unwrap());
            let given = [me.0.into(); 3];
            let (mut ones, mut parts, mut told) = (vec![1; 30_000], [0; 3], vec![u64::from(me.0); 5_000]);
            let used = async {
                tokio::join!(
                    sum.run(&mut ones),
                    barrier.run(),
                    exchange.run(&given, &mut parts),
                    news.run(&mut told)
                )
            };
            assert_eq!(soon("they are used", used).await, (Ok(()), Ok(()), Ok(()), Ok(())));
            assert_eq!((ones, parts, told), (vec![3; 30_000], [0, 1, 2], vec![2; 5_000]));
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_lengths_that_no_memory_has_are_refused_before_anything_is_sent);
fn fault_lengths_that_no_memory_has_are_refused_before_anything_is_sent() {
    run(2, options(), async |job| {
        // A call that is refused breaks its group.
        let mut groups = Vec::new();
        for _ in 0..4 {
            groups.push(job.world().split(Some(0), 0).await.unwrap().unwrap());
        }
        let absurd = |error: CollectiveError| {
            assert!(matches!(error, CollectiveError::Length { .. }), "{error}");
        };
        absurd(groups[0].scatter::<u64>(0, &[], usize::MAX / 4).await.unwrap_err());
        absurd(groups[1].scatter::<u64>(1, &[1], usize::MAX).await.unwrap_err());
        absurd(groups[2].all_to_all_v::<u64>(&[1], &[usize::MAX, 2], &[1, 1]).await.unwrap_err());
        absurd(groups[3].all_to_all_v::<u64>(&[1, 2], &[1, 1], &[1, usize::MAX / 8]).await.unwrap_err());
        let long = job.all_gather(&vec![0; 65 << 20]).await.unwrap_err();
        assert!(long.to_string().contains("at most 67108864 bytes"), "{long}");
        assert_eq!(soon("a sum", job.world().all_reduce(&[1u64], &Reduce::sum())).await.unwrap(), [2]);
        job.barrier().await.unwrap();
    });
}

case!(fault_groups_for_which_nobody_asks_are_refused_and_their_founder_is_told);
fn fault_groups_for_which_nobody_asks_are_refused_and_their_founder_is_told() {
    run(2, options(), async |job| {
        let groups = job.collectives();
        let both = [Rank(0), Rank(1)];
        let told = |what: &CollectiveError| matches!(what, CollectiveError::Fault(Fault::OutOfMemory(_)));
        if job.rank() == Rank(0) {
            let made: Vec<_> = (0..1100).map(|_| groups.on_the_fly(&both).unwrap()).collect();
            let subset = soon("one more", groups.subset(&both)).await.unwrap();
            for group in &made[1024..] {
                assert!(told(&soon("a refusal", group.barrier()).await.unwrap_err()));
            }
            assert!(told(&soon("a refusal", subset.barrier()).await.unwrap_err()));
            job.barrier().await.unwrap();
            for (number, group) in made[..1024].iter().enumerate() {
                let sent = soon("a broadcast", group.broadcast(0, &[number as u64])).await;
                assert_eq!(sent, Ok(vec![number as u64]));
            }
        } else {
            job.barrier().await.unwrap();
            for number in 0..1024u64 {
                let group = soon("a group", groups.arrival()).await.unwrap();
                assert_eq!(soon("a broadcast", group.broadcast(0, &[7])).await, Ok(vec![number]));
            }
            let subset = soon("a refusal", groups.subset(&both)).await;
            assert!(told(&subset.map(|group| group.size()).unwrap_err()));
        }
        // Now there is room again.
        let subset = soon("a group", groups.subset(&both)).await.unwrap();
        soon("a barrier", subset.barrier()).await.unwrap();
        job.barrier().await.unwrap();
    });
}

/// Its operations end the first phase, and then panic or give the same turn once more.
#[derive(Debug)]
struct Flawed {
    panics: bool,
}

#[derive(Debug)]
struct FlawedOperation {
    panics: bool,
    execution: Box<dyn Execution>,
    given: Option<Turn>,
}

impl Executor for Flawed {
    fn name(&self) -> &str {
        "flawed"
    }

    fn begin(&self, program: &Program, turns: &[Turn]) -> Box<dyn Execution> {
        let execution = PhaseByPhase.begin(program, turns);
        Box::new(FlawedOperation { panics: self.panics, execution, given: None })
    }
}

impl Execution for FlawedOperation {
    fn arrived(&mut self, step: Step) {
        self.execution.arrived(step);
    }

    fn next(&mut self) -> Option<Turn> {
        let turn = self.execution.next()?;
        match self.given.filter(|_| turn.step().phase > 0) {
            Some(_) if self.panics => panic!("of the user's"),
            Some(given) => Some(given),
            None => {
                self.given = Some(turn);
                self.given
            }
        }
    }

    fn done(&mut self, turn: Turn) {
        self.execution.done(turn);
    }
}

case!(fault_an_executor_that_fails_ends_the_operation_on_all_members);
fn fault_an_executor_that_fails_ends_the_operation_on_all_members() {
    run(4, options(), async |job| {
        let world = job.world();
        for panics in [false, true] {
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            let ring = group.schedule(posthaste::Algorithm::Ring);
            let ring = match job.rank() {
                Rank(1) => ring.custom_executor(Arc::new(Flawed { panics })),
                _ => ring,
            };
            let ended = soon("a sum", ring.all_reduce(&[1u64; 9], &Reduce::sum())).await;
            let cause = Fault::ExecutorFailed { rank: Rank(1), call: Collective::AllReduce(72) };
            assert_eq!(ended, Err(cause.into()));
            assert_eq!(soon("a barrier", group.barrier()).await, Err(cause.into()));
            // Others go on.
            assert_eq!(soon("a sum", world.all_reduce_one(1, &Reduce::sum())).await, Ok(4));
        }
    });
}
