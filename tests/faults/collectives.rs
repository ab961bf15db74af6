//! Collective operations that cannot end well: they end with an error on every rank, and nobody waits for ever.

use crate::support::{Random, barrier_before_death, case, options, run, soon, wait_for};
use posthaste::datatype::{Datatype, Layout, TypedError};
use posthaste::{
    Collective, CollectiveError, Counter, Error, Fault, Job, Message, Rank, RmaError, Scope, SendError,
    Window,
};
use std::time::{Duration, Instant};

fn fault_of(error: &Error) -> Fault {
    match error {
        Error::Send(SendError::Fault(fault)) | Error::Rma(RmaError::Fault(fault)) | Error::Fault(fault) => {
            *fault
        }
        other => panic!("{other:?}"),
    }
}

/// All collective operations, one after another, keeping every other window.
async fn round(job: &Job, kept: &mut Vec<Window<u64>>) -> Result<(), Error> {
    let window = job.shmalloc::<u64>(64).await?;
    kept.push(job.shmalloc::<u64>(1).await?);
    job.barrier().await?;
    let blobs = job.all_gather(&[job.rank().0 as u8; 5]).await?;
    assert!(blobs.iter().enumerate().all(|(rank, blob)| **blob == [rank as u8; 5]));
    window.free().await?;
    Ok(())
}

/// Every collective operation from now on ends with this, and soon.
async fn all_end_with(job: &Job, kept: Vec<Window<u64>>, wanted: Fault) {
    for _ in 0..2 {
        let barrier = soon("a barrier", job.barrier()).await.unwrap_err();
        assert_eq!(fault_of(&barrier), wanted);
        let gather = soon("a gathering", job.all_gather(b"x")).await.unwrap_err();
        assert_eq!(fault_of(&gather), wanted);
        let window = soon("a window", job.shmalloc::<u64>(8)).await.unwrap_err();
        assert_eq!(fault_of(&window), wanted);
    }
    for window in kept {
        match soon("a free", window.free()).await {
            Ok(()) => {}
            Err(error) => assert_eq!(fault_of(&error.into()), wanted),
        }
    }
}

/// A word that a rank says to another, and a count of those that came.
fn word(job: &Job) -> (posthaste::ActiveMessage, Counter) {
    let heard = job.counter();
    let count = heard.clone();
    let message = job.register("word", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
    (message, heard)
}

case!(fault_after_a_death_every_collective_of_every_survivor_ends_with_that_loss);
fn fault_after_a_death_every_collective_of_every_survivor_ends_with_that_loss() {
    const SIZE: u32 = 5;
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    for number in 0..if rank { 1 } else { 12 } {
        let number = std::env::var("POSTHASTE_TEST_SEED").unwrap_or_else(|_| format!("{number}"));
        let seeded = options().body_leaves().killed(2).env("POSTHASTE_TEST_SEED", &number);
        run(SIZE, seeded, async |job| {
            let seed: u64 = std::env::var("POSTHASTE_TEST_SEED").unwrap().parse().unwrap();
            let mut random = Random(seed * u64::from(SIZE) + u64::from(job.rank().0));
            let (message, heard) = word(&job);
            let mut kept = Vec::new();
            if job.rank() == Rank(2) {
                let delay = Duration::from_micros(random.below(8000));
                round(&job, &mut kept).await.unwrap();
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    crate::support::kill_self();
                });
            }
            let error = loop {
                match soon("a round", round(&job, &mut kept)).await {
                    Ok(()) => {}
                    Err(error) => break error,
                }
                if random.below(4) == 0 {
                    tokio::time::sleep(Duration::from_micros(random.below(500))).await;
                }
            };
            assert_eq!(fault_of(&error), Fault::PeerLost(Rank(2)));
            all_end_with(&job, kept, Fault::PeerLost(Rank(2))).await;
            // The survivors go on with everything else, and leave when all of them have got here.
            for to in job.ranks().filter(|to| *to != Rank(2)) {
                message.send(to, b"").await.unwrap();
            }
            soon("the other survivors", heard.reach(u64::from(SIZE) - 1)).await;
            job.leave().await.unwrap();
        });
    }
}

case!(fault_a_rank_that_leaves_ends_the_collectives_that_it_does_not_take_part_in);
fn fault_a_rank_that_leaves_ends_the_collectives_that_it_does_not_take_part_in() {
    for size in [3, 4, 7] {
        run(size, options().body_leaves(), async |job| {
            let window = job.shmalloc::<u64>(4).await.unwrap();
            let other = job.shmalloc::<u64>(4).await.unwrap();
            let (message, heard) = word(&job);
            if job.rank() == Rank(1) {
                return job.leave().await.unwrap();
            }
            // What is freed needs nobody who has left.
            soon("a free", window.free()).await.unwrap();
            let error = soon("a barrier", job.barrier()).await.unwrap_err();
            assert_eq!(fault_of(&error), Fault::PeerClosed(Rank(1)));
            all_end_with(&job, vec![other], Fault::PeerClosed(Rank(1))).await;
            // Nobody else leaves before all have got here: that would be another leave of which who still waits hears.
            for to in job.ranks().filter(|to| *to != Rank(1)) {
                message.send(to, b"").await.unwrap();
            }
            soon("the others", heard.reach(job.size() as u64 - 1)).await;
            job.leave().await.unwrap();
        });
    }
}

case!(fault_ranks_of_several_contexts_leave_right_after_a_barrier);
fn fault_ranks_of_several_contexts_leave_right_after_a_barrier() {
    let rank = std::env::var_os("POSTHASTE_JOB").is_some();
    for _ in 0..if rank { 1 } else { 8 } {
        run(4, options().contexts(2).workers(2), async |job| {
            for _ in 0..20 {
                job.barrier().await.unwrap();
            }
            // Another context may hear of the leave before this one has read the last part of the barrier.
        });
    }
}

/// The calls that the ranks of a mismatch named, sorted, and whether the ranks differ.
fn calls_of(error: &Error) -> Vec<String> {
    let fault = fault_of(error);
    let Fault::CollectiveMismatch { ranks, calls } = fault else { panic!("{fault}") };
    assert_ne!(ranks[0], ranks[1]);
    for (rank, call) in ranks.iter().zip(&calls) {
        let text = fault.to_string();
        assert!(text.contains(&format!("rank {rank} called {call}")), "{text}");
    }
    let mut calls: Vec<String> = calls.iter().map(Collective::to_string).collect();
    calls.sort();
    calls
}

case!(fault_collective_calls_that_do_not_match_are_told_to_all);
fn fault_collective_calls_that_do_not_match_are_told_to_all() {
    for case in ["shmalloc", "gather", "length", "free"] {
        for size in [2, 3, 6] {
            // One rank of the job calls something else; the others may be far ahead of it.
            run(size, options().body_leaves().env("POSTHASTE_TEST_CASE", case), async |job| {
                let case = std::env::var("POSTHASTE_TEST_CASE").unwrap();
                let (message, heard) = word(&job);
                let odd = job.rank() == Rank(1);
                let (one, other) =
                    (job.shmalloc::<u8>(9).await.unwrap(), job.shmalloc::<u8>(9).await.unwrap());
                job.barrier().await.unwrap();
                if odd {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                let end = match (case.as_str(), odd) {
                    ("shmalloc", true) => soon("shmalloc", job.shmalloc::<u8>(9)).await.map(drop),
                    ("gather", true) => soon("all_gather", job.all_gather(b"odd")).await.map(drop),
                    ("length", true) => soon("all_gather", job.all_gather(b"longer")).await.map(drop),
                    ("length", false) => soon("all_gather", job.all_gather(b"odd")).await.map(drop),
                    ("free", true) => soon("free", other.clone().free()).await.map_err(Error::from),
                    ("free", false) => soon("free", one.clone().free()).await.map_err(Error::from),
                    _ => soon("barrier", job.barrier()).await,
                };
                let error = end.unwrap_err();
                let expected = match case.as_str() {
                    "shmalloc" => ["barrier", "shmalloc"],
                    "gather" => ["all_gather of 3 bytes", "barrier"],
                    "length" => ["all_gather of 3 bytes", "all_gather of 6 bytes"],
                    _ => ["free of window 0", "free of window 1"],
                };
                assert_eq!(calls_of(&error), expected);
                let later = soon("a barrier", job.barrier()).await.unwrap_err();
                assert_eq!(calls_of(&later), expected);
                // Nobody is cut off for it.
                for to in job.ranks() {
                    message.send(to, b"").await.unwrap();
                }
                soon("the others", heard.reach(job.size() as u64)).await;
                job.leave().await.unwrap();
            });
        }
    }
}

/// A region with known bytes, if there is room in this rank's segment.
async fn region_of(job: &Job, len: usize) -> Option<posthaste::Region> {
    let region = job.region(len).await.ok()?;
    region.write(0, &vec![0xaa; len]).unwrap();
    Some(region)
}

async fn region_in_the_end(job: &Job) -> posthaste::Region {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match region_of(job, HALF).await {
            Some(region) => return region,
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
        assert!(Instant::now() < end, "the range does not come back");
    }
}

fn is_untouched(region: &posthaste::Region) -> bool {
    let mut bytes = vec![0; region.len() as usize];
    region.read(0, &mut bytes).unwrap();
    bytes.iter().all(|byte| *byte == 0xaa)
}

const HALF: usize = 1 << 20;

/// Rank 0 frees a window that rank 2 still puts into. `loss`: rank 3 dies first.
async fn reuse(job: Job, loss: bool) {
    let (message, heard) = word(&job);
    let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
    // Almost all of the segment.
    let window = job.shmalloc::<u8>(if job.rank() == Rank(0) { 2 * HALF - 8192 } else { 0 }).await.unwrap();
    barrier_before_death(&job, Rank(if loss { 3 } else { 2 })).await;
    match job.rank().0 {
        3 if loss => {
            println!("ready");
            std::future::pending::<()>().await;
        }
        2 => {
            if loss {
                soon("the loss", never.call(Rank(3), ())).await.unwrap_err();
            }
            // Puts all over the window until rank 0 has looked for long enough.
            while heard.value() == 0 {
                window.put_slice(Rank(0), 0, &vec![0x55; 2 * HALF - 8192]).await.unwrap();
                tokio::task::yield_now().await;
            }
            if std::env::var("POSTHASTE_TEST_CASE").unwrap() == "dies" {
                println!("all put");
                std::future::pending::<()>().await;
            }
            let _ = soon("the free", window.free()).await;
            soon("the end", heard.reach(2)).await;
        }
        0 => {
            let freed = tokio::spawn(window.free());
            let looked = Instant::now();
            let mut regions = Vec::new();
            while looked.elapsed() < Duration::from_millis(300) {
                if let Some(region) = region_of(&job, 4096).await {
                    regions.push(region);
                }
                assert!(region_of(&job, HALF).await.is_none(), "the window's range was reused");
                assert!(regions.iter().all(is_untouched), "rank 2 reaches memory that was taken anew");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(!regions.is_empty(), "what the window did not take can be had");
            if loss {
                let error = soon("the free", freed).await.unwrap().unwrap_err();
                assert_eq!(error, RmaError::Fault(Fault::PeerLost(Rank(3))));
                message.send(Rank(2), b"").await.unwrap();
            } else {
                assert!(!freed.is_finished(), "rank 2 has not released the window");
                message.send(Rank(2), b"").await.unwrap();
                match soon("the free", freed).await.unwrap() {
                    Ok(()) => {}
                    Err(error) => assert_eq!(error, RmaError::Fault(Fault::PeerLost(Rank(2)))),
                }
            }
            // Nobody can reach it any more: it comes back.
            let region = region_in_the_end(&job).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(is_untouched(&region));
            for to in [Rank(1), Rank(2)] {
                // One of them may be dead by now.
                let _ = message.send(to, b"").await;
            }
        }
        _ => {
            let _ = soon("the free", window.free()).await;
            soon("the end", heard.reach(1)).await;
        }
    }
    job.leave().await.unwrap();
}

case!(fault_i10_a_windows_range_is_reused_only_after_every_rank_released_it);
fn fault_i10_a_windows_range_is_reused_only_after_every_rank_released_it() {
    let limited = options().body_leaves().env("POSTHASTE_SEGMENT", "2M").env("POSTHASTE_TEST_CASE", "frees");
    run(3, limited, async |job| reuse(job, false).await);
}

case!(fault_i10_a_windows_range_is_reused_once_its_last_user_is_dead);
fn fault_i10_a_windows_range_is_reused_once_its_last_user_is_dead() {
    let limited = options().body_leaves().env("POSTHASTE_SEGMENT", "2M").env("POSTHASTE_TEST_CASE", "dies");
    let dying = limited.killed(2).during(|job| {
        wait_for(job, 2, "all put");
        job.kill(2).unwrap();
    });
    run(3, dying, async |job| reuse(job, false).await);
}

case!(fault_i10_a_windows_range_is_not_reused_while_a_survivor_of_a_death_uses_it);
fn fault_i10_a_windows_range_is_not_reused_while_a_survivor_of_a_death_uses_it() {
    let limited = options().body_leaves().env("POSTHASTE_SEGMENT", "2M").env("POSTHASTE_TEST_CASE", "frees");
    let dying = limited.killed(3).during(|job| {
        wait_for(job, 3, "ready");
        job.kill(3).unwrap();
    });
    run(4, dying, async |job| reuse(job, true).await);
}

case!(fault_i10_a_window_that_was_never_made_leaves_no_memory_taken);
fn fault_i10_a_window_that_was_never_made_leaves_no_memory_taken() {
    // Rank 1 never takes part: the others are told when it leaves, and what they had taken comes back.
    run(3, options().body_leaves().env("POSTHASTE_SEGMENT", "2M"), async |job| {
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            return job.leave().await.unwrap();
        }
        let error = soon("a window", job.shmalloc::<u8>(2 * HALF - 8192)).await.unwrap_err();
        assert_eq!(fault_of(&error), Fault::PeerClosed(Rank(1)));
        drop(region_in_the_end(&job).await);
        tokio::time::sleep(Duration::from_millis(200)).await;
        job.leave().await.unwrap();
    });
}

/// Rank 1 leaves, or frees the window, while a thread of it is amid a put that takes long. Rank 0 takes the memory anew as soon
/// as it may.
async fn amid_a_put_of_a_thread(job: Job, leaves: bool) {
    const WORDS: u64 = 12 << 20;
    let len = if job.rank() == Rank(0) { 2 * WORDS as usize } else { 0 };
    let window = job.shmalloc::<u64>(len).await.unwrap();
    job.barrier().await.unwrap();
    if job.rank() == Rank(1) {
        let (begun, begins) = tokio::sync::oneshot::channel();
        let putting = window.clone();
        let put = tokio::spawn(async move {
            let word = Datatype::of::<u64>();
            // One word all over, every other one, and those at the beginning last.
            let from = word.vector(WORDS, 1, 0).unwrap();
            let to = word.vector(WORDS, 1, -2).unwrap().hindexed(&[(16 * (WORDS as i64 - 1), 1)]).unwrap();
            let (from, to) = (Layout::new(&from, 1), Layout::new(&to, 1));
            let _ = begun.send(());
            loop {
                if let Err(error) = putting.put_typed(Rank(0), &to, &[0x55u64], &from).await {
                    return error;
                }
            }
        });
        begins.await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        if leaves {
            job.leave().await.unwrap();
            let error = soon("its end", put).await.unwrap();
            return assert!(matches!(error, TypedError::Rma(RmaError::Fault(Fault::Shutdown))), "{error}");
        }
        soon("the free", window.free()).await.unwrap();
        let error = soon("its end", put).await.unwrap();
        // A message may be refused where it comes to.
        let refused = RmaError::Fault(Fault::NoSuchMemory(Rank(0)));
        let ends = matches!(&error, TypedError::Rma(end) if matches!(end, RmaError::NoSuchWindow(_)) || *end == refused);
        assert!(ends, "{error}");
        return job.leave().await.unwrap();
    }
    // Who has left has released it.
    soon("the free", window.free()).await.unwrap();
    let mut regions = Vec::new();
    for _ in 0..20 {
        regions.extend(region_of(&job, 4096).await);
    }
    assert!(!regions.is_empty());
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(regions.iter().all(is_untouched), "rank 1 reaches memory that was taken anew");
    }
    job.leave().await.unwrap();
}

case!(fault_i10_nothing_of_a_rank_that_leaves_amid_a_put_of_a_thread_reaches_memory_that_is_taken_anew);
fn fault_i10_nothing_of_a_rank_that_leaves_amid_a_put_of_a_thread_reaches_memory_that_is_taken_anew() {
    let options = options().body_leaves().workers(2).env("POSTHASTE_SEGMENT", "200M");
    run(2, options, async |job| amid_a_put_of_a_thread(job, true).await);
}

case!(fault_i10_nothing_of_a_rank_that_frees_amid_a_put_of_a_thread_reaches_memory_that_is_taken_anew);
fn fault_i10_nothing_of_a_rank_that_frees_amid_a_put_of_a_thread_reaches_memory_that_is_taken_anew() {
    let options = options().body_leaves().workers(2).env("POSTHASTE_SEGMENT", "200M");
    run(2, options, async |job| amid_a_put_of_a_thread(job, false).await);
}

case!(fault_members_that_make_different_persistent_collectives_are_told_and_go_on);
fn fault_members_that_make_different_persistent_collectives_are_told_and_go_on() {
    use posthaste::persistent::{PersistentCall, PersistentError, PersistentKind};
    run(3, options(), async |job| {
        let (world, me) = (job.world(), job.rank().index());
        let sum = posthaste::Reduce::sum();
        let made = job.persistent().all_reduce::<u64>(&world, 3 + usize::from(me == 1), &sum).await;
        let Err(PersistentError::Mismatch { rank, theirs, ours }) = made else { panic!("{made:?}") };
        let call = |bytes| PersistentCall { kind: PersistentKind::AllReduce, root: 0, bytes };
        let (longer, usual) = (call(32), call(24));
        let expected = if me == 1 { (Rank(0), usual, longer) } else { (Rank(1), longer, usual) };
        assert_eq!((rank, theirs, ours), expected);
        let other = match me {
            0 => job.persistent().barrier(&world).await.map(drop),
            _ => job.persistent().all_to_all::<u8>(&world, 0).await.map(drop),
        };
        assert!(matches!(other, Err(PersistentError::Mismatch { .. })), "{other:?}");
        // What is combined by different operations, or is of different types, is different, too.
        let by = if me == 1 { posthaste::Reduce::max() } else { sum.clone() };
        let other = job.persistent().all_reduce::<u64>(&world, 2, &by).await.map(drop);
        assert!(matches!(other, Err(PersistentError::Mismatch { .. })), "{other:?}");
        let other = match me {
            1 => job.persistent().all_reduce::<f64>(&world, 2, &posthaste::Reduce::sum()).await.map(drop),
            _ => job.persistent().all_reduce::<u64>(&world, 2, &sum).await.map(drop),
        };
        assert!(matches!(other, Err(PersistentError::Mismatch { .. })), "{other:?}");
        // Nobody is cut off, and the next one is made.
        let mut sums = job.persistent().all_reduce::<u64>(&world, 2, &sum).await.unwrap();
        let mut values = [1, me as u64];
        sums.run(&mut values).await.unwrap();
        assert_eq!(values, [3, 3]);
        job.barrier().await.unwrap();
    });
}

fn limit_addresses(limit: rustix::process::Rlimit) {
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
}

case!(fault_a_member_that_cannot_make_a_persistent_collective_tells_the_others);
fn fault_a_member_that_cannot_make_a_persistent_collective_tells_the_others() {
    use posthaste::persistent::PersistentError;
    run(3, options().env("POSTHASTE_SEGMENT", "256M"), async |job| {
        let (world, me) = (job.world(), job.rank().index());
        let sum = posthaste::Reduce::sum();
        let lost = |error: &PersistentError| {
            matches!(error, PersistentError::Collective(CollectiveError::Fault(Fault::OutOfMemory(_))))
        };
        // A length that is none.
        let len = if me == 1 { usize::MAX } else { 4 };
        let made = soon("a word", job.persistent().all_reduce::<u64>(&world, len, &sum)).await;
        let error = made.map(drop).unwrap_err();
        assert!(me == 1 || lost(&error), "{error}");
        let made = soon("a word", job.persistent().all_to_all::<u64>(&world, len)).await;
        let error = made.map(drop).unwrap_err();
        assert!(me == 1 || lost(&error), "{error}");
        // And one for which one of them has no memory.
        let usual = rustix::process::getrlimit(rustix::process::Resource::As);
        if me == 1 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
            let kib: u64 = size.split_whitespace().next().unwrap().parse().unwrap();
            let current = Some((kib << 10) + (4 << 20));
            limit_addresses(rustix::process::Rlimit { current, maximum: usual.maximum });
        }
        // More than an allocator may have set aside.
        let made = soon("a word", job.persistent().all_reduce::<u64>(&world, 9 << 20, &sum)).await;
        let error = made.map(drop).unwrap_err();
        assert!(error.to_string().contains("memory"), "{error}");
        assert!(me == 1 || lost(&error), "{error}");
        if me == 1 {
            limit_addresses(usual);
        }
        if me == 1 {
            // As if nothing had been called.
            let made = soon("a word", job.persistent().broadcast::<u64>(&world, 3, 1)).await;
            assert!(matches!(made, Err(PersistentError::Collective(CollectiveError::UnknownRank { .. }))));
        }
        // The next ones are the same for all.
        let mut sums = job.persistent().all_reduce::<u64>(&world, 2, &sum).await.unwrap();
        let mut exchange = job.persistent().all_to_all::<u64>(&world, 1).await.unwrap();
        let (mut values, mut taken) = ([1, me as u64], [9; 3]);
        soon("the sums", sums.run(&mut values)).await.unwrap();
        soon("the exchange", exchange.run(&[me as u64; 3], &mut taken)).await.unwrap();
        assert_eq!((values, taken), ([3, 3], [0, 1, 2]));
        job.barrier().await.unwrap();
    });
}
