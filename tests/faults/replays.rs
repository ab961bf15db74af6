//! What becomes of replays when a rank that they touch is killed.

use crate::support::{barrier_before_death, options, run, soon};
use futures::future::join_all;
use posthaste::{Counter, Fault, Job, Message, PatternError, Rank, Scope};
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

#[test]
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
                let _ =
                    std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
                std::future::pending::<()>().await;
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

#[test]
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

#[test]
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
                let _ =
                    std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
                std::future::pending::<()>().await;
            }
            let mut values = [step as f64; 500];
            if let Err(error) = soon("a use", sum.run(&mut values)).await {
                assert_eq!(error, posthaste::persistent::PersistentError::Fault(Fault::PeerLost(Rank(3))));
                // Who had not got the result of the last one yet gets none any more.
                assert!((39..=40).contains(&step), "it ended in use {step}");
                break;
            }
            assert_eq!(values, [step as f64 * 6.0; 500]);
        }
        // It stays so, and nobody waits.
        let again = soon("a later use", sum.run(&mut [0.0; 500])).await.unwrap_err();
        assert_eq!(again, posthaste::persistent::PersistentError::Fault(Fault::PeerLost(Rank(3))));
        survivors.leave(job, Rank(3)).await;
    });
}

#[test]
fn fault_a_killed_rank_ends_a_persistent_exchange_on_all_members() {
    run(5, options().body_leaves().killed(2), async |job| {
        let survivors = Survivors::new(&job);
        let mut exchange = job.persistent().all_to_all::<u64>(&job.world(), 3_000).await.unwrap();
        let (give, start) = (vec![7; 15_000], Instant::now());
        let mut take = vec![0; 15_000];
        for step in 0.. {
            assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
            if job.rank() == Rank(2) && step == 30 {
                let _ =
                    std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
                std::future::pending::<()>().await;
            }
            if let Err(error) = soon("a use", exchange.run(&give, &mut take)).await {
                assert_eq!(error, posthaste::persistent::PersistentError::Fault(Fault::PeerLost(Rank(2))));
                assert!((29..=30).contains(&step), "it ended in use {step}");
                break;
            }
        }
        let again = soon("a later use", exchange.run(&give, &mut take)).await.unwrap_err();
        assert_eq!(again, posthaste::persistent::PersistentError::Fault(Fault::PeerLost(Rank(2))));
        survivors.leave(job, Rank(2)).await;
    });
}
