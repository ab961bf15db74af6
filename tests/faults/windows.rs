//! Members of a window that are killed while others work on it.

use crate::support::{Options, barrier_before_death, case, options, own_file, run, soon, wait_for};
use posthaste::datatype::{Datatype, Layout, TypedError};
use posthaste::{
    Bytes, ConnectionId, ContextId, Error, Fault, Job, Message, Rank, Region, RegionKey, RmaError, Scope,
    Window, WordUpdate,
};
use std::time::{Duration, Instant};

const SEGMENT: usize = 2 << 20;

case!(fault_a_member_killed_among_atomic_operations_ends_its_own_and_no_others);
fn fault_a_member_killed_among_atomic_operations_ends_its_own_and_no_others() {
    let dying = options().killed(2).during(|job| {
        wait_for(job, 2, "adding");
        std::thread::sleep(Duration::from_millis(20));
        job.kill(2).unwrap();
    });
    run(3, dying, async |job| {
        let group = job.world();
        let window = group.shmalloc::<u64>(4).await.unwrap();
        let (me, other) = (job.rank(), Rank(1 - job.rank().0.min(1)));
        barrier_before_death(&job, Rank(2)).await;
        if me == Rank(2) {
            println!("adding");
            loop {
                window.fetch_add(Rank(0), 0, 1).await.unwrap();
                window.add(Rank(1), 0, 1).await.unwrap();
            }
        }
        let lost = Fault::PeerLost(Rank(2));
        let mut added = 0u64;
        // Until the loss is told by an operation of its own kind, those on a living rank go on and are all done.
        let told = async {
            loop {
                window.fetch_add(other, 1, 1).await.unwrap();
                added += 1;
                if let Err(error) = window.fetch_add(Rank(2), 2, 1).await {
                    return error;
                }
                // Where memory is shared, the dead one's is still there until its end is noticed.
                tokio::task::yield_now().await;
            }
        };
        assert_eq!(soon("the loss", told).await, RmaError::Fault(lost));
        for _ in 0..1000 {
            window.add(other, 1, 1).await.unwrap();
        }
        added += 1000;
        assert_eq!(window.swap(other, 1, 0).await.unwrap(), added, "none was lost and none done twice");
        assert_eq!(window.atomic_store(Rank(2), 0, 1).await, Err(RmaError::Fault(lost)));
        // A call of many updates ends with the loss, too; those of a living rank that are before it are done.
        let many = (0..500).map(|number| (if number == 400 { Rank(2) } else { other }, 1, 1));
        let told = soon("the loss", window.update_each(WordUpdate::Add, many)).await;
        assert_eq!(told, Err(RmaError::Fault(lost)));
        let added =
            soon("the others", window.fetch_each(WordUpdate::Replace, [(other, 1, 0)])).await.unwrap();
        assert!((400..500).contains(&added[0]), "{added:?}");
        // What waits on a word of its own can still be woken.
        let (woken, stored) =
            tokio::join!(window.wait_until(3, |value| value == 9), window.atomic_store(me, 3, 9));
        stored.unwrap();
        assert_eq!(woken.unwrap(), 9);
        soon("the free", window.free()).await.unwrap();
    });
}

case!(fault_a_member_killed_among_accesses_between_layouts_and_puts_with_signals_ends_them);
fn fault_a_member_killed_among_accesses_between_layouts_and_puts_with_signals_ends_them() {
    let dying = options().killed(2).during(|job| {
        // Both are past the barrier that needs the one that is killed.
        for rank in [0, 1] {
            wait_for(job, rank, "accessing");
        }
        std::thread::sleep(Duration::from_millis(20));
        job.kill(2).unwrap();
    });
    run(3, dying, async |job| {
        let window = job.world().shmalloc::<u64>(100_000).await.unwrap();
        barrier_before_death(&job, Rank(2)).await;
        if job.rank() == Rank(2) {
            return std::future::pending().await;
        }
        println!("accessing");
        let (dead, lost) = (Rank(2), RmaError::Fault(Fault::PeerLost(Rank(2))));
        let element = Datatype::of::<u64>();
        let strided = element.vector(30_000, 1, 2).unwrap();
        let (there, here) = (Layout::new(&strided, 1), Layout::new(&element, 30_000));
        let values = vec![7u64; 30_000];
        // Where memory is shared, the dead one's is still there until its end is noticed.
        let turn = tokio::task::yield_now;
        let puts = async {
            loop {
                if let Err(error) = window.put_typed(dead, &there, &values, &here).await {
                    return error;
                }
                turn().await;
            }
        };
        let gets = async {
            loop {
                if let Err(error) = window.get_typed(dead, &there, vec![0u64; 30_000], &here).await {
                    return error;
                }
                turn().await;
            }
        };
        let signals = async {
            loop {
                let signal = window.signal_add(99_999, 1);
                if let Err(error) = window.put_signal(dead, 70_000, &values[..5000], signal).await {
                    return error;
                }
                turn().await;
            }
        };
        let (put, get, signal) = soon("the loss", async { tokio::join!(puts, gets, signals) }).await;
        for error in [put, get] {
            assert!(matches!(&error, TypedError::Rma(error) if *error == lost), "{error}");
        }
        assert_eq!(signal, lost);
        let one = [(dead, Bytes::from_static(b"nobody"))];
        let error = soon("the loss", job.many_to_many().send(ConnectionId(7), one)).await.unwrap_err();
        assert_eq!(error.failed, [(dead, Fault::PeerLost(dead).into())]);
        soon("the free", window.free()).await.unwrap();
    });
}

case!(fault_a_free_that_is_given_up_goes_on_and_keeps_nobody_waiting);
fn fault_a_free_that_is_given_up_goes_on_and_keeps_nobody_waiting() {
    // Names files, by which rank 2 hears from rank 0 that it has given up.
    const TOLD: &str = "POSTHASTE_TEST_TOLD";
    let options = options().env(TOLD, own_file("given-up").to_str().unwrap());
    run(3, options, async |job| {
        let word = job.register("word", |_, _| {}).unwrap();
        let windows = [job.shmalloc::<u64>(1).await.unwrap(), job.world().shmalloc(1).await.unwrap()];
        for (number, window) in windows.into_iter().enumerate() {
            let told = std::path::PathBuf::from(format!("{}-{number}", std::env::var(TOLD).unwrap()));
            soon("the barrier", job.barrier()).await.unwrap();
            match job.rank() {
                Rank(0) => {
                    // Rank 2 takes nothing in, and what was sent to it has to be answered before the window is freed here.
                    word.send(Rank(2), "unanswered").await.unwrap();
                    let given_up = tokio::time::timeout(Duration::from_millis(100), window.free()).await;
                    std::fs::write(&told, "").unwrap();
                    assert!(given_up.is_err(), "rank 2 has answered");
                }
                Rank(1) => soon("the free", window.free()).await.unwrap(),
                _ => {
                    let start = Instant::now();
                    while !told.exists() {
                        assert!(start.elapsed() < Duration::from_secs(60), "rank 0 has not given up");
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    std::fs::remove_file(&told).unwrap();
                    soon("the free", window.free()).await.unwrap();
                }
            }
        }
        soon("the end", job.barrier()).await.unwrap();
    });
}

async fn region_of(job: &Job, len: usize) -> Option<Region> {
    match job.region(len).await {
        Ok(region) => Some(region),
        Err(Error::Rma(RmaError::Memory(_))) => None,
        Err(error) => panic!("{error}"),
    }
}

fn is_untouched(region: &Region) -> bool {
    let mut bytes = vec![0; region.len() as usize];
    region.read(0, &mut bytes).unwrap();
    bytes.iter().all(|byte| *byte == 0)
}

/// Rank 0 frees a window of almost all its memory while rank 2 goes on putting and adding to it, until it is told to free
/// it, too, or is killed. Meanwhile none of the memory may be taken anew.
async fn reuse(job: Job, dies: bool) {
    let (stop, told) = (job.counter(), job.counter());
    let (count, also) = (stop.clone(), told.clone());
    let word = job
        .register("word", move |message: posthaste::Message, _: &mut posthaste::Scope| match message.len() {
            0 => count.add(1),
            _ => also.add(1),
        })
        .unwrap();
    let group = job.collectives().subset(&[Rank(2), Rank(1), Rank(0)]).await.unwrap();
    let len = if job.rank() == Rank(0) { SEGMENT - 8192 } else { 0 };
    let window: Window<u8> = group.shmalloc(len).await.unwrap();
    let owner = window.rank_of(Rank(0)).unwrap();
    barrier_before_death(&job, Rank(2)).await;
    match job.rank().0 {
        2 => {
            let bytes = vec![0x55; SEGMENT - 8192];
            while stop.value() == 0 {
                window.put_slice(owner, 0, &bytes).await.unwrap();
                window.words::<u64>().fetch_add(owner, 4096, 1).await.unwrap();
                tokio::task::yield_now().await;
            }
            if dies {
                println!("all put");
                std::future::pending::<()>().await;
            }
            soon("the free", window.free()).await.unwrap();
        }
        0 => {
            let freed = tokio::spawn(window.free());
            let looked = Instant::now();
            let mut regions = Vec::new();
            while looked.elapsed() < Duration::from_millis(300) {
                regions.extend(region_of(&job, 4096).await);
                assert!(region_of(&job, SEGMENT / 2).await.is_none(), "the window's range was reused");
                assert!(regions.iter().all(is_untouched), "rank 2 reaches memory that was taken anew");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(!regions.is_empty(), "what the window did not take can be had");
            assert!(!freed.is_finished(), "rank 2 has not released the window");
            word.send(Rank(2), b"").await.unwrap();
            soon("the free", freed).await.unwrap().unwrap();
            drop(regions);
            // Nobody can reach it any more: it comes back.
            let back = async {
                loop {
                    match region_of(&job, SEGMENT / 2).await {
                        Some(region) => return region,
                        None => tokio::time::sleep(Duration::from_millis(1)).await,
                    }
                }
            };
            let region = soon("the memory", back).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(is_untouched(&region));
        }
        _ => soon("the free", window.free()).await.unwrap(),
    }
    // The living leave together.
    for to in job.ranks().filter(|to| *to != job.rank() && !(dies && *to == Rank(2))) {
        word.send(to, b"done").await.unwrap();
    }
    soon("the others", told.reach(if dies { 1 } else { 2 })).await;
    job.leave().await.unwrap();
}

case!(fault_i10_a_group_windows_part_is_reused_only_after_every_member_released_it);
fn fault_i10_a_group_windows_part_is_reused_only_after_every_member_released_it() {
    let limited = options().body_leaves().env("POSTHASTE_SEGMENT", "2M");
    run(3, limited, async |job| reuse(job, false).await);
}

case!(fault_i10_a_group_windows_part_is_reused_once_its_last_user_is_dead);
fn fault_i10_a_group_windows_part_is_reused_once_its_last_user_is_dead() {
    let limited = options().body_leaves().env("POSTHASTE_SEGMENT", "2M");
    let dying = limited.killed(2).during(|job| {
        wait_for(job, 2, "all put");
        job.kill(2).unwrap();
    });
    run(3, dying, async |job| reuse(job, true).await);
}

case!(fault_a_window_is_freed_while_atomic_operations_on_it_are_under_way);
fn fault_a_window_is_freed_while_atomic_operations_on_it_are_under_way() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        for round in 0..30u64 {
            let window = job.world().shmalloc::<u64>(64).await.unwrap();
            let mut under_way = Vec::new();
            for n in 0..200usize {
                let mut add = Box::pin(window.fetch_add(peer, n % 64, 1));
                // Started, or done; some are dropped so, and are done all the same.
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                let ended = std::future::Future::poll(add.as_mut(), &mut cx);
                if ended.is_pending() && n % 3 != 0 {
                    under_way.push(add);
                }
            }
            let (freed, ended) = tokio::join!(window.clone().free(), futures::future::join_all(under_way));
            freed.unwrap();
            assert!(ended.iter().all(|ended| match ended {
                Ok(_) | Err(RmaError::NoSuchWindow(_)) => true,
                Err(error) => panic!("round {round}: {error}"),
            }));
            assert!(matches!(window.fetch_add(peer, 0, 1).await, Err(RmaError::NoSuchWindow(_))));
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_i10_a_put_between_layouts_writes_nothing_behind_the_free_of_its_window);
/// What a long put has not sent when its window is freed is not sent: the range is another window's.
fn fault_i10_a_put_between_layouts_writes_nothing_behind_the_free_of_its_window() {
    const WORDS: usize = 2 << 20;
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let word = Datatype::of::<u64>();
        let every_other = word.vector(WORDS as u64 / 2, 1, 2).unwrap();
        for round in 1..=3u64 {
            let window = job.shmalloc::<u64>(WORDS).await.unwrap();
            let source = vec![round; WORDS / 2];
            let from = Layout::new(&word, WORDS as u64 / 2);
            let put = window.put_typed(peer, &Layout::new(&every_other, 1), &source, &from);
            let mut put = std::pin::pin!(put);
            // Begun; over TCP most of it has yet to be sent.
            let begun = futures::poll!(put.as_mut());
            let get = window.get_typed(peer, &from, vec![0; WORDS / 2], &from);
            soon("the free", window.clone().free()).await.unwrap();
            let next = job.shmalloc::<u64>(WORDS).await.unwrap();
            job.barrier().await.unwrap();
            let ended = match begun {
                std::task::Poll::Ready(ended) => ended,
                std::task::Poll::Pending => soon("the put", put).await,
            };
            match ended {
                Ok(()) | Err(TypedError::Rma(RmaError::NoSuchWindow(_))) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
            assert!(matches!(soon("a get", get).await, Err(TypedError::Rma(RmaError::NoSuchWindow(_)))));
            job.barrier().await.unwrap();
            assert!(next.to_vec().iter().all(|word| *word == 0), "round {round}: somebody has written here");
            soon("the free", next.free()).await.unwrap();
        }
    });
}

case!(fault_i10_a_group_window_waits_for_what_a_member_has_queued_for_itself);
/// What a rank has queued for itself is done before its range in a group's window is another's.
fn fault_i10_a_group_window_waits_for_what_a_member_has_queued_for_itself() {
    use futures::poll;
    const MESSAGES: usize = 200_000;
    run(2, options(), async |job| {
        let me = job.rank();
        let alone = job.collectives().subset(&[me]).await.unwrap();
        let arrived = job.counter();
        let count = arrived.clone();
        let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let word = job.region(8).await.unwrap();
        let pattern = job.record(|r| (0..MESSAGES).try_for_each(|_| r.send(&note, me, &word))).await.unwrap();
        let element = Datatype::of::<u64>();
        let strided = element.vector(500, 1, 2).unwrap();
        let (there, packed) = (Layout::new(&strided, 1), Layout::new(&element, 500));
        for round in 1..=3 {
            let window = alone.shmalloc::<u64>(1000).await.unwrap();
            let mut replay = std::pin::pin!(pattern.replay());
            let replayed = poll!(&mut replay).is_ready();
            {
                let values = [round; 500];
                let put = std::pin::pin!(window.put_typed(Rank(0), &there, &values, &packed));
                // Begun, and dropped while it is under way.
                let _begun = poll!(put);
            }
            soon("the free", window.free()).await.unwrap();
            let next = alone.shmalloc::<u64>(1000).await.unwrap();
            if !replayed {
                soon("the replay", replay).await.unwrap();
            }
            soon("the notes", arrived.reach(round * MESSAGES as u64)).await;
            assert!(next.to_vec().iter().all(|word| *word == 0), "round {round}: somebody has written here");
            soon("the free", next.free()).await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_i10_what_was_started_through_a_view_ends_before_the_windows_range_is_reused);
/// Puts that nobody awaits, through a view that nobody has any more: none of them writes what comes after the window.
fn fault_i10_what_was_started_through_a_view_ends_before_the_windows_range_is_reused() {
    const LEN: usize = 4 << 20;
    run(2, options().contexts(2), async |job| {
        let peer = Rank(1 - job.rank().0);
        let beside = job.context_handle(ContextId(1)).unwrap();
        for round in 1..=5u8 {
            let window = job.shmalloc::<u8>(LEN).await.unwrap();
            let view = window.through(beside).await.unwrap();
            job.barrier().await.unwrap();
            for _ in 0..8 {
                let put = view.put_bytes(peer, 0, vec![round; LEN].into()).local();
                drop(soon("the earlier stage", put).await.unwrap());
            }
            drop(view);
            soon("the free", window.free()).await.unwrap();
            let next = job.shmalloc::<u8>(LEN).await.unwrap();
            job.barrier().await.unwrap();
            tokio::time::sleep(Duration::from_millis(30)).await;
            assert!(next.to_vec().iter().all(|byte| *byte == 0), "round {round}: somebody has written here");
            job.barrier().await.unwrap();
            soon("the free", next.free()).await.unwrap();
        }
    });
}

/// Rank 1 puts into rank 0's window through a second context and is killed. Rank 0's owner of that context looks at nothing: what
/// was put is still on its way there when the first context knows of the death, and must reach no memory that was taken anew.
async fn unseen_puts_of_who_died(job: Job, by_group: bool) {
    let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
    let told = job.counter();
    let count = told.clone();
    let word = job.register("word", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
    let len = if job.rank() == Rank(0) { SEGMENT - 8192 } else { 0 };
    let window: Window<u8> = match by_group {
        true => job.world().shmalloc(len).await.unwrap(),
        false => job.shmalloc(len).await.unwrap(),
    };
    if job.rank() == Rank(1) {
        let beside = window.through(job.context_handle(ContextId(1)).unwrap()).await.unwrap();
        // There is a connection.
        soon("a put", beside.put(Rank(0), 0, 0x55)).await.unwrap();
        barrier_before_death(&job, Rank(1)).await;
        soon("the word", told.reach(1)).await;
        for at in (0..SEGMENT - 8192).step_by(64 << 10) {
            let put = beside.put_bytes(Rank(0), at, vec![0x55; 1024].into());
            drop(soon("the earlier stage", put.local()).await.unwrap());
        }
        // Nothing tells when the last of them has come to a rank that looks at nothing.
        tokio::time::sleep(Duration::from_millis(100)).await;
        println!("all put");
        return std::future::pending().await;
    }
    barrier_before_death(&job, Rank(1)).await;
    let owner = job.own_context(ContextId(1)).unwrap();
    word.send(Rank(1), b"").await.unwrap();
    let lost = Fault::PeerLost(Rank(1));
    let error = soon("the loss", never.call(Rank(1), ())).await.unwrap_err();
    assert_eq!(Error::from(error).fault(), Some(lost));
    // No owner is waited for.
    let freed = soon("the free", window.free()).await;
    // One of the job says that the loss has broken it, unless it hears of the loss only now, as that which it has waited for.
    assert!(freed == Ok(()) || !by_group && freed == Err(RmaError::Fault(lost)), "{freed:?}");
    let mut region = None;
    let looked = Instant::now();
    while looked.elapsed() < Duration::from_millis(300) && region.is_none() {
        region = region_of(&job, SEGMENT / 2).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Once the owner has looked, the range comes back.
    let back = async {
        loop {
            owner.advance();
            match region.take() {
                Some(region) => return region,
                None => region = region_of(&job, SEGMENT / 2).await,
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let region = soon("the memory", back).await;
    for _ in 0..50 {
        owner.advance();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(is_untouched(&region), "puts of a rank that is gone reach memory that was taken anew");
    drop(owner);
    job.leave().await.unwrap();
}

/// Rank 1 is killed when it has put all.
fn killed_with_unseen_puts() -> Options {
    let limited = options().contexts(2).body_leaves().env("POSTHASTE_SEGMENT", "2M");
    limited.killed(1).during(|job| {
        wait_for(job, 1, "all put");
        job.kill(1).unwrap();
    })
}

case!(fault_i10_a_windows_range_is_not_reused_while_a_context_has_yet_to_see_the_end_of_who_reached_it);
fn fault_i10_a_windows_range_is_not_reused_while_a_context_has_yet_to_see_the_end_of_who_reached_it() {
    run(2, killed_with_unseen_puts(), async |job| unseen_puts_of_who_died(job, false).await);
}

case!(fault_i10_a_group_windows_range_is_not_reused_while_a_context_has_yet_to_see_the_end_of_a_member);
fn fault_i10_a_group_windows_range_is_not_reused_while_a_context_has_yet_to_see_the_end_of_a_member() {
    run(2, killed_with_unseen_puts(), async |job| unseen_puts_of_who_died(job, true).await);
}

case!(fault_i10_a_windows_range_is_not_reused_while_puts_of_who_died_lie_in_a_lane_as_messages);
fn fault_i10_a_windows_range_is_not_reused_while_puts_of_who_died_lie_in_a_lane_as_messages() {
    let over_send = killed_with_unseen_puts().env("POSTHASTE_OVERSEND", "always");
    run(2, over_send, async |job| unseen_puts_of_who_died(job, false).await);
}

case!(fault_what_waits_behind_puts_to_memory_that_is_not_mapped_ends_with_their_target);
fn fault_what_waits_behind_puts_to_memory_that_is_not_mapped_ends_with_their_target() {
    let dying = options().killed(1).during(|job| {
        wait_for(job, 0, "waiting");
        std::thread::sleep(Duration::from_millis(50));
        job.kill(1).unwrap();
    });
    run(2, dying, async |job| {
        let window = job.shmalloc::<u64>(4).await.unwrap();
        let table = job.region_from(vec![0_u8; 8]).unwrap();
        let mine = [table.key().offset, std::process::id().into()].map(u64::to_le_bytes).concat();
        let blob = job.all_gather(&mine).await.unwrap();
        let theirs = |at: usize| u64::from_le_bytes(blob[1][at..at + 8].try_into().unwrap());
        barrier_before_death(&job, Rank(1)).await;
        if job.rank() == Rank(1) {
            return std::future::pending().await;
        }
        let remote = RegionKey { rank: Rank(1), offset: theirs(0), ..table.key() };
        let remote = job.remote_region(remote).await.unwrap();
        // From here on it takes nothing in.
        crate::support::stop(theirs(8) as u32).await;
        let (words, lost) = (remote.words::<u64>(), Fault::PeerLost(Rank(1)));
        println!("waiting");
        let waiting = async {
            ::futures::join!(
                remote.put_slice(0, &[1; 8]),
                window.put(Rank(1), 0, 1),
                window.fetch_add(Rank(1), 1, 1),
                words.fetch_add(Rank(1), 0, 1),
                window.get(Rank(1), 2),
                window.put_slice(Rank(1), 3, &[2])
            )
        };
        let (first, put, fetched, word, got, last) = soon("the loss", waiting).await;
        let ends = [first.err(), put.err(), fetched.err(), word.err(), got.err(), last.err()];
        assert_eq!(ends, [(); 6].map(|()| Some(RmaError::Fault(lost))));
        // Itself it reaches as ever.
        window.put(Rank(0), 0, 5).await.unwrap();
        assert_eq!(window.load(0), Some(5));
    });
}
