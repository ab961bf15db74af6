//! What becomes of replays when a rank that they touch is killed.

use crate::support::{barrier_before_death, case, is_payload, options, payload, run, soon};
use futures::future::{join_all, poll_immediate};
use posthaste::persistent::PersistentError;
use posthaste::{ConnectionManager, Counter, Fault, Job, Message, Part, Pattern, PatternError, Rank, Scope};
use std::time::{Duration, Instant};

/// Survivors tell each other that they have seen the death before one of them leaves: who had not heard of it would be told
/// of the leave.
struct Survivors {
    word: posthaste::ActiveMessage,
    told: Counter,
}

impl Survivors {
    fn new(job: &Job) -> Self {
        let told = job.counter();
        let count = told.clone();
        let word = job.register("seen", move |_: Message<'_>, _: &mut Scope<'_>| count.add(1)).unwrap();
        Self { word, told }
    }

    async fn leave(self, job: Job, dead: Rank) {
        for rank in job.ranks().filter(|rank| *rank != dead) {
            self.word.send(rank, b"").await.unwrap();
        }
        soon("the survivors' words", self.told.reach(job.size() as u64 - 1)).await;
        job.leave().await.unwrap();
    }
}

/// Ends this process as an operator would.
fn kill() {
    crate::support::kill_self();
}

async fn die() {
    kill();
    std::future::pending::<()>().await;
}

case!(fault_replays_to_a_killed_rank_end_with_its_loss_and_the_others_part_is_done);
fn fault_replays_to_a_killed_rank_end_with_its_loss_and_the_others_part_is_done() {
    run(3, options().body_leaves().killed(1), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let say = job.register("say", move |_: Message<'_>, _: &mut Scope<'_>| count.add(1)).unwrap();
        let window = job.shmalloc::<u64>(64).await.unwrap();
        let source = job.region(100_000).await.unwrap();
        barrier_before_death(&job, Rank(1)).await;
        match job.rank() {
            Rank(0) => {
                let pattern = job
                    .record(|r| {
                        for target in [Rank(1), Rank(2)] {
                            for place in 0..32 {
                                r.put(&window, target, place, source.slice(0..8))?;
                                r.send_with_info(&say, target, b"info", source.slice(0..3_000))?;
                            }
                            r.send(&say, target, &source)?;
                        }
                        Ok(())
                    })
                    .await
                    .unwrap();
                let start = Instant::now();
                let mut started = 0u64;
                let lost = 'lost: loop {
                    assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
                    let ended = soon("ten replays", join_all((0..10).map(|_| pattern.replay()))).await;
                    started += 10;
                    for ended in ended {
                        if let Err(error) = ended {
                            break 'lost error;
                        }
                    }
                };
                assert_eq!(lost, PatternError::Fault(Fault::PeerLost(Rank(1))));
                // What goes to others is done each time.
                source.write(0, &u64::MAX.to_ne_bytes()).unwrap();
                for _ in 0..5 {
                    let ended = soon("a replay", pattern.replay()).await;
                    assert_eq!(ended, Err(PatternError::Fault(Fault::PeerLost(Rank(1)))));
                    started += 1;
                }
                assert_eq!(window.get_slice(Rank(2), 0, 32).await.unwrap(), [u64::MAX; 32]);
                window.put(Rank(2), 63, started * 33).await.unwrap();
            }
            Rank(1) => {
                soon("some messages", arrived.reach(200)).await;
                die().await;
            }
            _ => {
                let expected = soon("the number", async {
                    loop {
                        match window.load(63) {
                            Some(0) => tokio::time::sleep(Duration::from_millis(1)).await,
                            number => break number.unwrap(),
                        }
                    }
                });
                let expected = expected.await;
                soon("all messages", arrived.reach(expected)).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
                assert_eq!(arrived.value(), expected, "no message came twice");
            }
        }
        job.leave().await.unwrap();
    });
}

case!(fault_a_pattern_of_a_freed_window_is_refused_and_replays_before_it_are_done);
fn fault_a_pattern_of_a_freed_window_is_refused_and_replays_before_it_are_done() {
    run(2, options(), async |job| {
        let source = job.region(64).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        for round in 0..20u64 {
            let window = job.shmalloc::<u64>(8).await.unwrap();
            let pattern = job.record(|r| r.put(&window, peer, 0, &source)).await.unwrap();
            source.write(0, &round.to_ne_bytes()).unwrap();
            let replays = soon("ten replays", join_all((0..10).map(|_| pattern.replay()))).await;
            assert!(replays.into_iter().all(|ended| ended.is_ok()));
            soon("freeing", window.free()).await.unwrap();
            assert!(matches!(pattern.replay().await, Err(PatternError::Rma(_))), "the window is gone");
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_what_a_fifo_that_is_not_served_has_for_a_killed_rank_holds_up_no_fence);
fn fault_what_a_fifo_that_is_not_served_has_for_a_killed_rank_holds_up_no_fence() {
    run(3, options().body_leaves().killed(1), async |job| {
        let window = job.shmalloc::<u64>(8).await.unwrap();
        let source = job.region(8).await.unwrap();
        let seen = Survivors::new(&job);
        let survivors = match job.rank() {
            Rank(1) => None,
            _ => Some(job.collectives().subset(&[Rank(0), Rank(2)]).await.unwrap()),
        };
        let fifo = job.fifo(posthaste::FifoOptions::default()).await.unwrap();
        let pattern = fifo.record(|r| r.put(&window, Rank(1), 0, source.slice(0..8))).await.unwrap();
        fifo.set_enabled(false).await.unwrap();
        let mut replay = Box::pin(pattern.replay());
        if job.rank() == Rank(0) {
            assert!(poll_immediate(replay.as_mut()).await.is_none(), "it waits in the FIFO");
            assert_eq!(fifo.status().await.unwrap().len, 1);
        }
        barrier_before_death(&job, Rank(1)).await;
        let Some(survivors) = survivors else {
            return die().await;
        };
        let other = survivors.shmalloc::<u64>(8).await.unwrap();
        if job.rank() == Rank(0) {
            let ended = soon("the end of the replay", replay).await;
            assert_eq!(ended, Err(PatternError::Fault(Fault::PeerLost(Rank(1)))));
            let lost = soon("the flush", job.flush(Rank(1))).await.unwrap_err();
            assert_eq!(lost.fault(), Some(Fault::PeerLost(Rank(1))));
            let _lost = soon("the fence", job.fence()).await;
            assert_eq!(fifo.status().await.unwrap().len, 0, "nothing waits for nobody");
            assert!(!fifo.status().await.unwrap().enabled);
        }
        soon("the end of a window", other.free()).await.unwrap();
        seen.leave(job, Rank(1)).await;
    });
}

case!(fault_a_killed_rank_ends_a_persistent_collective_on_all_members);
fn fault_a_killed_rank_ends_a_persistent_collective_on_all_members() {
    run(6, options().body_leaves().killed(3), async |job| {
        use posthaste::Reduce;
        let survivors = Survivors::new(&job);
        let world = job.world();
        let mut sum = job.persistent().all_reduce::<f64>(&world, 500, &Reduce::sum()).await.unwrap();
        let start = Instant::now();
        for step in 0.. {
            assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
            if job.rank() == Rank(3) && step == 40 {
                die().await;
            }
            let mut values = [step as f64; 500];
            if let Err(error) = soon("a use", sum.run(&mut values)).await {
                assert_eq!(error, PersistentError::Fault(Fault::PeerLost(Rank(3))));
                // Who had not got the result of the last one yet gets none any more.
                assert!((39..=40).contains(&step), "it ended in use {step}");
                break;
            }
            assert_eq!(values, [step as f64 * 6.0; 500]);
        }
        // It stays so, and nobody waits.
        let again = soon("a later use", sum.run(&mut [0.0; 500])).await.unwrap_err();
        assert_eq!(again, PersistentError::Fault(Fault::PeerLost(Rank(3))));
        survivors.leave(job, Rank(3)).await;
    });
}

case!(fault_a_killed_rank_ends_a_persistent_exchange_on_all_members);
fn fault_a_killed_rank_ends_a_persistent_exchange_on_all_members() {
    run(5, options().body_leaves().killed(2), async |job| {
        let survivors = Survivors::new(&job);
        let mut exchange = job.persistent().all_to_all::<u64>(&job.world(), 3_000).await.unwrap();
        let (give, start) = (vec![7; 15_000], Instant::now());
        let mut take = vec![0; 15_000];
        for step in 0.. {
            assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
            if job.rank() == Rank(2) && step == 30 {
                die().await;
            }
            if let Err(error) = soon("a use", exchange.run(&give, &mut take)).await {
                assert_eq!(error, PersistentError::Fault(Fault::PeerLost(Rank(2))));
                assert!((29..=30).contains(&step), "it ended in use {step}");
                break;
            }
        }
        let again = soon("a later use", exchange.run(&give, &mut take)).await.unwrap_err();
        assert_eq!(again, PersistentError::Fault(Fault::PeerLost(Rank(2))));
        survivors.leave(job, Rank(2)).await;
    });
}

/// Replays of all patterns at once, until one of them meets the end of rank 1; how many there were of each.
async fn until_lost(patterns: &[Pattern]) -> u64 {
    let start = Instant::now();
    for round in 1.. {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
        let replays = patterns.iter().flat_map(|pattern| (0..10).map(|_| pattern.replay()));
        let ended = soon("ten replays of each", join_all(replays)).await;
        let failed: Vec<_> = ended.into_iter().filter_map(Result::err).collect();
        for error in &failed {
            assert_eq!(*error, PatternError::Fault(Fault::PeerLost(Rank(1))));
        }
        if !failed.is_empty() {
            return 10 * round;
        }
    }
    0
}

case!(fault_replays_of_gets_signals_and_multisends_end_with_the_loss_of_a_rank_that_they_touch);
fn fault_replays_of_gets_signals_and_multisends_end_with_the_loss_of_a_rank_that_they_touch() {
    run(3, options().body_leaves().killed(1), async |job| {
        const LEN: usize = 3_000;
        let (old, new) = (payload(1, LEN), payload(2, LEN));
        let arrived = job.counter();
        let count = arrived.clone();
        let say = job.register("say", move |_: Message<'_>, _: &mut Scope<'_>| count.add(1)).unwrap();
        let connection = ConnectionManager::new(1).open().await.id();
        // What is read, and behind it what is put.
        let window = job.shmalloc::<u8>(2 * LEN).await.unwrap();
        // Signals that have come, and how many replays there were.
        let words = job.shmalloc::<u64>(2).await.unwrap();
        let (source, mirror) = (job.region(LEN).await.unwrap(), job.region(2 * LEN).await.unwrap());
        window.store_slice(0, &old).unwrap();
        source.write(0, &old).unwrap();
        barrier_before_death(&job, Rank(1)).await;
        match job.rank() {
            Rank(0) => {
                let both = [Rank(1), Rank(2)];
                let gets = job.record(|r| {
                    let mut places = both.into_iter().zip([0, LEN]);
                    places.try_for_each(|(from, at)| r.get(&window, from, 0, mirror.slice(at..at + LEN)))
                });
                let signals = job.record(|r| {
                    let signal = || words.signal_add(0, 1);
                    both.into_iter().try_for_each(|to| r.put_signal(&window, to, LEN, &source, signal()))
                });
                let casts = job.record(|r| r.multicast(&say, both, &source));
                let many = job.record(|r| {
                    let parts = both.map(|to| (to, source.slice(0..LEN)));
                    r.many_to_many(job.many_to_many(), connection, parts)
                });
                let patterns =
                    [gets.await.unwrap(), signals.await.unwrap(), casts.await.unwrap(), many.await.unwrap()];
                let before = until_lost(&patterns).await;
                // What has to do with others is done each time.
                window.put_slice(Rank(2), 0, &new).await.unwrap();
                source.write(0, &new).unwrap();
                for pattern in &patterns {
                    let ended = soon("a replay", pattern.replay()).await;
                    assert_eq!(ended, Err(PatternError::Fault(Fault::PeerLost(Rank(1)))));
                }
                let mut got = vec![0; LEN];
                mirror.read(LEN, &mut got).unwrap();
                assert!(got == new, "the get from rank 2");
                words.put(Rank(2), 1, before + 1).await.unwrap();
            }
            Rank(1) => {
                soon("some messages", arrived.reach(50)).await;
                die().await;
            }
            _ => {
                let mut received = 0;
                loop {
                    let part = Part { source: Rank(0), offset: 0, len: LEN };
                    let receive = job.many_to_many().receive(connection, LEN, &[part]).unwrap();
                    let bytes = soon("many-to-many", receive).await.unwrap().into_whole().unwrap();
                    received += 1;
                    if bytes == new {
                        break;
                    }
                    assert!(bytes == old);
                }
                let replays = soon("the number", words.wait_until(1, |number| number > 0)).await.unwrap();
                assert_eq!(received, replays);
                soon("the signals", words.wait_until(0, |signals| signals == replays)).await.unwrap();
                assert!(is_payload(2, &window.to_vec()[LEN..]), "the put");
                soon("the multicasts", arrived.reach(replays)).await;
                // What was to come from the dead one does not.
                let part = Part { source: Rank(1), offset: 0, len: LEN };
                let receive = job.many_to_many().receive(connection, LEN, &[part]).unwrap();
                let received = soon("many-to-many", receive).await.unwrap();
                assert_eq!(received.parts, [Err(Fault::PeerLost(Rank(1)))]);
            }
        }
        job.leave().await.unwrap();
    });
}

case!(fault_replays_that_wait_for_credit_of_a_killed_rank_end_and_the_others_part_is_done);
fn fault_replays_that_wait_for_credit_of_a_killed_rank_end_and_the_others_part_is_done() {
    const REPLAYS: usize = 20;
    run(3, options().body_leaves().killed(1).env("POSTHASTE_CREDITS", "4"), async |job| {
        let die = job.register("die", |_: Message<'_>, _: &mut Scope<'_>| kill()).unwrap();
        let connection = ConnectionManager::new(1).open().await.id();
        let source = job.region(8).await.unwrap();
        barrier_before_death(&job, Rank(1)).await;
        match job.rank() {
            Rank(0) => {
                let parts = [Rank(1), Rank(2)].map(|to| (to, source.slice(0..8)));
                let record = job.record(|r| r.many_to_many(job.many_to_many(), connection, parts));
                let pattern = record.await.unwrap();
                // Rank 1 receives nothing, and gives none of its credit back.
                let mut replays = Box::pin(join_all((0..REPLAYS).map(|_| pattern.replay())));
                let early = tokio::time::timeout(Duration::from_millis(50), &mut replays).await;
                assert!(early.is_err(), "{early:?}");
                die.send(Rank(1), b"").await.unwrap();
                let ended = soon("the replays", replays).await;
                for (number, ended) in ended.into_iter().enumerate() {
                    let lost = ended == Err(PatternError::Fault(Fault::PeerLost(Rank(1))));
                    assert!(lost || (number < 4 && ended == Ok(())), "replay {number}: {ended:?}");
                }
            }
            Rank(1) => std::future::pending().await,
            _ => {
                for _ in 0..REPLAYS {
                    let part = Part { source: Rank(0), offset: 0, len: 8 };
                    let receive = job.many_to_many().receive(connection, 8, &[part]).unwrap();
                    soon("many-to-many", receive).await.unwrap().into_whole().unwrap();
                }
            }
        }
        job.leave().await.unwrap();
    });
}

case!(fault_a_killed_rank_ends_a_persistent_broadcast_and_a_barrier_on_all_members);
fn fault_a_killed_rank_ends_a_persistent_broadcast_and_a_barrier_on_all_members() {
    // The root of both, one that hands on, and one that does not.
    for (kind, dying) in
        ["broadcast", "barrier"].into_iter().flat_map(|kind| [0, 2, 5].map(|rank| (kind, rank)))
    {
        // In a rank, the first of these calls does not return: the case is that of the job.
        let case = format!("{kind} {dying}");
        run(6, options().body_leaves().killed(dying).env("POSTHASTE_TEST_CASE", &case), async |job| {
            let case = std::env::var("POSTHASTE_TEST_CASE").unwrap();
            let (kind, dying) = case.split_once(' ').unwrap();
            let dying = Rank(dying.parse().unwrap());
            let (survivors, world) = (Survivors::new(&job), job.world());
            let mut news = job.persistent().broadcast::<u64>(&world, 0, 500).await.unwrap();
            let mut barrier = job.persistent().barrier(&world).await.unwrap();
            let lost = PersistentError::Fault(Fault::PeerLost(dying));
            let start = Instant::now();
            let mut values = vec![0; 500];
            for step in 0u64.. {
                assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
                if job.rank() == dying && step == 40 {
                    die().await;
                }
                values.fill(if job.rank() == Rank(0) { step } else { u64::MAX });
                let ended = match kind {
                    "broadcast" => soon("a broadcast", news.run(&mut values)).await,
                    _ => soon("a barrier", barrier.run()).await,
                };
                if let Err(error) = ended {
                    assert_eq!(error, lost);
                    // Whoever hands a broadcast on may be two uses ahead of the next, or of who is told of it.
                    let last = if kind == "broadcast" { 37..=43 } else { 39..=40 };
                    assert!(last.contains(&step), "it ended in use {step}");
                    break;
                }
                assert!(kind == "barrier" || values == [step; 500], "use {step}");
            }
            let again = match kind {
                "broadcast" => soon("a later broadcast", news.run(&mut values)).await,
                _ => soon("a later barrier", barrier.run()).await,
            };
            assert_eq!(again, Err(lost));
            survivors.leave(job, dying).await;
        });
    }
}
