//! Injection FIFOs of one's own.

use crate::support::{case, driven_by_thread, is_payload, options, payload, receives, run, soon};
use futures::future::join_all;
use futures::poll;
use posthaste::{
    ActiveMessage, Counter, Fifo, FifoError, FifoOptions, Job, Message, PatternError, Rank, Scope,
};
use std::sync::{Arc, Mutex};

case!(m_d30_a_long_message_of_one_fifo_does_not_delay_the_short_ones_of_another);
fn m_d30_a_long_message_of_one_fifo_does_not_delay_the_short_ones_of_another() {
    run(2, options(), async |job| {
        const LONG: usize = 64 << 20;
        let order = Arc::new(Mutex::new(Vec::new()));
        let (log, arrived) = (order.clone(), job.counter());
        let count = arrived.clone();
        let say = job
            .register("say", move |m: Message<'_>, _: &mut Scope<'_>| {
                if m.len() == LONG {
                    assert!(is_payload(5, &m.bytes()));
                }
                log.lock().unwrap().push(m.len());
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let long = posthaste::Bytes::from(payload(5, LONG));
            let bulk = job.fifo(FifoOptions { quantum: 64 << 10, ..FifoOptions::default() }).await.unwrap();
            let urgent = FifoOptions { priority: true, ..FifoOptions::default() };
            let urgent = job.fifo(urgent).await.unwrap();
            // A short one through each of two other ways, behind a long one.
            let both = async {
                tokio::join!(
                    biased;
                    bulk.send(&say, Rank(1), long.clone()),
                    urgent.send(&say, Rank(1), [1; 10]),
                    say.send(Rank(1), [1; 20]),
                )
            };
            let (first, second, third) = soon("the messages", both).await;
            assert!(first.is_ok() && second.is_ok() && third.is_ok());
            soon("the drain", bulk.drain()).await.unwrap();
            job.barrier().await.unwrap();
            // In one order, it does.
            let both = async { tokio::join!(biased; say.send(Rank(1), long), say.send(Rank(1), [1; 20])) };
            let (first, second) = soon("the messages", both).await;
            assert!(first.is_ok() && second.is_ok());
        } else {
            soon("three messages", arrived.reach(3)).await;
            let mut first = std::mem::take(&mut *order.lock().unwrap());
            assert_eq!(first.pop(), Some(LONG), "the long one is last");
            first.sort_unstable();
            assert_eq!(first, [10, 20]);
            job.barrier().await.unwrap();
            soon("two messages", arrived.reach(5)).await;
            assert_eq!(*order.lock().unwrap(), [LONG, 20]);
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d30_priority_is_served_first_and_the_flags_say_what_they_are_to);
fn m_d30_priority_is_served_first_and_the_flags_say_what_they_are_to() {
    run(1, options(), async |job| {
        let order = Arc::new(Mutex::new(Vec::new()));
        let (log, arrived) = (order.clone(), job.counter());
        let count = arrived.clone();
        let say = job
            .register("say", move |m: Message<'_>, _: &mut Scope<'_>| {
                log.lock().unwrap().push(m.info()[0]);
                count.add(1);
            })
            .unwrap();
        let usual = FifoOptions { slots: 64, priority: false, quantum: 4096 };
        let fifo = job.fifo(usual).await.unwrap();
        let urgent = job.fifo(FifoOptions { priority: true, ..usual }).await.unwrap();
        fifo.set_enabled(false).await.unwrap();
        urgent.set_enabled(false).await.unwrap();
        fifo.set_threshold(60).await.unwrap();
        let me = job.rank();
        let sends = async {
            let many = |fifo, info: &'static [u8], count| {
                let one = |_| posthaste::Fifo::send_with_info(fifo, &say, me, info, vec![0; 2_000]);
                join_all((0..count).map(one).collect::<Vec<_>>())
            };
            tokio::join!(biased; many(&fifo, b"a", 40), many(&urgent, b"u", 10))
        };
        let flags = async {
            // The sends were polled before this: 2 slots each; what has no place waits for one.
            let status = fifo.status().await.unwrap();
            assert_eq!((status.capacity, status.len, status.head, status.tail), (64, 62, 0, 62));
            assert!(!status.is_empty() && !status.is_full() && !status.crossed);
            assert!(status.active && !status.enabled);
            let refused = fifo.deactivate().await.unwrap_err();
            assert_eq!(refused, PatternError::Fifo(FifoError::NotEmpty { slots: 62 }));
            assert_eq!((job.counter().value(), arrived.value()), (0, 0), "nothing is served");
            fifo.set_enabled(true).await.unwrap();
            urgent.set_enabled(true).await.unwrap();
            soon("the threshold", fifo.crossed()).await.unwrap();
        };
        let ((usual, urgents), ()) = soon("all", async { tokio::join!(biased; sends, flags) }).await;
        assert!(usual.into_iter().chain(urgents).all(|sent| sent.is_ok()));
        soon("the messages", arrived.reach(50)).await;
        let order = order.lock().unwrap().clone();
        let last = order.iter().rposition(|one| *one == b'u').unwrap();
        // A thread of its own may serve the one before the other is enabled.
        assert!(driven_by_thread() || last < 10 + 8, "priority goes first: {order:?}");
        let status = fifo.status().await.unwrap();
        assert!(status.is_empty() && status.crossed, "{status:?}");
        fifo.clear_crossed().await.unwrap();
        assert!(!fifo.status().await.unwrap().crossed);
        fifo.deactivate().await.unwrap();
        let refused = fifo.send(&say, me, "no").await.unwrap_err();
        assert_eq!(refused, PatternError::Fifo(FifoError::Inactive));
        fifo.activate().await.unwrap();
        soon("a send", fifo.send_with_info(&say, me, b"z", "yes")).await.unwrap();
        soon("it", arrived.reach(51)).await;
    });
}

case!(m_d30_patterns_go_through_a_fifo_and_a_window_is_freed_behind_them);
fn m_d30_patterns_go_through_a_fifo_and_a_window_is_freed_behind_them() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let source = job.region(3 << 20).await.unwrap();
        let fifo = job.fifo(FifoOptions { quantum: 4096, ..FifoOptions::default() }).await.unwrap();
        let arrived = job.counter();
        let count = arrived.clone();
        let say = job.register("say", move |_: Message<'_>, _: &mut Scope<'_>| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        for round in 0..5u64 {
            let window = job.shmalloc::<u8>(3 << 20).await.unwrap();
            let recording = fifo.record(|r| {
                r.put(&window, peer, 0, &source)?;
                r.send_with_info(&say, peer, b"there", source.slice(0..0))
            });
            let pattern = recording.await.unwrap();
            assert!(pattern.describe().await.unwrap().contains("FIFO of its own"));
            source.write(0, &payload(round, 3 << 20)).unwrap();
            let replays = join_all((0..3).map(|_| pattern.replay()));
            assert!(soon("the replays", replays).await.into_iter().all(|ended| ended.is_ok()));
            soon("the messages", arrived.reach(3 * (round + 1) + round)).await;
            assert!(is_payload(round, &window.to_vec()), "round {round}");
            job.barrier().await.unwrap();
            // What waits in the FIFO when the window is freed is waited for.
            fifo.set_enabled(false).await.unwrap();
            let replay = pattern.replay();
            let free = async {
                let freeing = window.free();
                let enable = async {
                    tokio::task::yield_now().await;
                    fifo.set_enabled(true).await.unwrap();
                };
                tokio::join!(freeing, enable).0
            };
            let (replayed, freed) = soon("freeing", async { tokio::join!(biased; replay, free) }).await;
            assert_eq!((replayed, freed.is_ok()), (Ok(()), true));
            soon("the last message", arrived.reach(3 * (round + 1) + 1 + round)).await;
            job.barrier().await.unwrap();
        }
    });
}

case!(a_fifo_that_is_deactivated_takes_what_has_waited_for_credit_and_no_more);
fn a_fifo_that_is_deactivated_takes_what_has_waited_for_credit_and_no_more() {
    run(2, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let (data, mut datas) = job.stream("data").unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let fifo = job.fifo(FifoOptions::default()).await.unwrap();
            soon("the first", fifo.send(&data, Rank(1), "first")).await.unwrap();
            soon("the drain", fifo.drain()).await.unwrap();
            let mut waits = Box::pin(fifo.send(&data, Rank(1), "second"));
            let early = tokio::time::timeout(std::time::Duration::from_millis(50), &mut waits).await;
            assert!(early.is_err(), "{early:?}");
            fifo.deactivate().await.unwrap();
            job.barrier().await.unwrap();
            soon("the second", waits).await.unwrap();
            let refused = soon("the refusal", fifo.send(&data, Rank(1), "no")).await;
            assert!(matches!(refused, Err(PatternError::Fifo(FifoError::Inactive))), "{refused:?}");
            soon("the credit", data.send(Rank(1), "third")).await.unwrap();
        } else {
            job.barrier().await.unwrap();
            receives(&mut datas, &["first", "second", "third"]).await;
        }
        job.barrier().await.unwrap();
    });
}

/// How often each value comes in a row.
fn runs(values: &[u8]) -> Vec<(u8, usize)> {
    values.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect()
}

/// A message, the first bytes of those that have come, and their number.
fn sayings(job: &Job) -> (ActiveMessage, Arc<Mutex<Vec<u8>>>, Counter) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (log, arrived) = (heard.clone(), job.counter());
    let count = arrived.clone();
    let say = job.register("say", move |m: Message<'_>, _: &mut Scope<'_>| {
        log.lock().unwrap().push(m.read::<u8>(0).unwrap());
        count.add(1);
    });
    (say.unwrap(), heard, arrived)
}

case!(m_d30_a_fifo_is_full_empty_switched_and_crossed_and_its_receiver_sees_it);
fn m_d30_a_fifo_is_full_empty_switched_and_crossed_and_its_receiver_sees_it() {
    run(2, options(), async |job| {
        const THERE: Rank = Rank(1);
        let (say, heard, arrived) = sayings(&job);
        job.barrier().await.unwrap();
        if job.rank() == THERE {
            // While the FIFO is full and not served, another way's message is the only one.
            soon("one past the FIFO", arrived.reach(1)).await;
            assert_eq!(heard.lock().unwrap().drain(..).collect::<Vec<_>>(), [255]);
            job.barrier().await.unwrap();
            soon("those in the FIFO", arrived.reach(1 + 15)).await;
            let all: Vec<u8> = (0..15).collect();
            assert_eq!(heard.lock().unwrap().drain(..).collect::<Vec<_>>(), all);
            job.barrier().await.unwrap();
            soon("one", arrived.reach(16 + 1)).await;
            job.barrier().await.unwrap();
            soon("another", arrived.reach(16 + 2)).await;
            job.barrier().await.unwrap();
            // Ten laps of the buffer, in order; the one that was refused did not come.
            soon("the laps", arrived.reach(18 + 140)).await;
            let laps: Vec<u8> = (0..10).flat_map(|_| 0..14).collect();
            assert_eq!(heard.lock().unwrap()[2..], laps);
            job.barrier().await.unwrap();
            return;
        }
        let fifo = job.fifo(FifoOptions { slots: 16, ..FifoOptions::default() }).await.unwrap();
        let one = |number: u8| Fifo::send(&fifo, &say, THERE, vec![number; 100]);
        let status = async || fifo.status().await.unwrap();
        assert!(status().await.is_empty() && !status().await.is_full());
        fifo.set_enabled(false).await.unwrap();
        // Thirteen slots, and three of one with as much info as there may be.
        let mut sends: Vec<_> = (0..13).map(|number| Box::pin(one(number))).collect();
        for send in &mut sends {
            assert!(poll!(send).is_pending());
        }
        let mut last = Box::pin(fifo.send_with_info(&say, THERE, &[0; 112], vec![13; 100]));
        assert!(poll!(&mut last).is_pending());
        let full = status().await;
        assert!(full.is_full() && !full.is_empty() && !full.enabled, "{full:?}");
        assert_eq!((full.capacity, full.len, full.head, full.tail), (16, 16, 0, 16));
        let mut behind = Box::pin(one(14));
        assert!(poll!(&mut behind).is_pending());
        assert_eq!(status().await, full, "what has no place is not in it");
        let refused = fifo.deactivate().await.unwrap_err();
        assert_eq!(refused, PatternError::Fifo(FifoError::NotEmpty { slots: 16 }));
        say.send(THERE, [255]).await.unwrap();
        job.barrier().await.unwrap();

        // The flag is set when all is free, stays, and wakes who waits for it.
        fifo.set_threshold(16).await.unwrap();
        {
            let mut crossed = Box::pin(fifo.crossed());
            assert!(poll!(&mut crossed).is_pending() && !status().await.crossed);
            fifo.set_enabled(true).await.unwrap();
            let all = async { tokio::join!(join_all(sends), last, behind, crossed) };
            let (sent, last, behind, crossed) = soon("what was in it", all).await;
            assert!(sent.into_iter().chain([last, behind, crossed]).all(|ended| ended.is_ok()));
        }
        let empty = status().await;
        assert!(empty.is_empty() && !empty.is_full() && empty.enabled && empty.crossed, "{empty:?}");
        assert_eq!((empty.head, empty.tail), (17, 17));
        soon("it was crossed already", fifo.crossed()).await.unwrap();
        job.barrier().await.unwrap();
        // Cleared, it is set again by the next crossing only: that of another threshold is none.
        for (threshold, crossed) in [(15, false), (16, true)] {
            fifo.clear_crossed().await.unwrap();
            fifo.set_threshold(threshold).await.unwrap();
            soon("a send", one(0)).await.unwrap();
            soon("the drain", fifo.drain()).await.unwrap();
            assert_eq!(status().await.crossed, crossed, "a threshold of {threshold}");
            job.barrier().await.unwrap();
        }

        fifo.deactivate().await.unwrap();
        assert!(!status().await.active);
        let refused = soon("a refusal", one(77)).await;
        assert_eq!(refused, Err(PatternError::Fifo(FifoError::Inactive)));
        fifo.activate().await.unwrap();
        for lap in 0..10 {
            let sent = soon("a lap", join_all((0..14).map(one))).await;
            assert!(sent.into_iter().all(|sent| sent.is_ok()), "lap {lap}");
        }
        soon("the drain", fifo.drain()).await.unwrap();
        assert_eq!((status().await.head, status().await.tail), (19 + 140, 19 + 140));
        job.barrier().await.unwrap();
    });
}

case!(m_d30_a_receiver_gets_what_has_priority_first_and_of_others_a_quantum_at_a_time);
fn m_d30_a_receiver_gets_what_has_priority_first_and_of_others_a_quantum_at_a_time() {
    run(2, options(), async |job| {
        const EACH: usize = 30;
        let (say, heard, arrived) = sayings(&job);
        job.barrier().await.unwrap();
        // Two messages are more than the short quantum, and all of them less than the long one.
        for (round, quantum) in [4096, 1 << 20].into_iter().enumerate() {
            let total = 3 * EACH * (round + 1);
            if job.rank() == Rank(1) {
                soon("the messages", arrived.reach(total as u64)).await;
                let heard = std::mem::take(&mut *heard.lock().unwrap());
                let urgent = heard.iter().rposition(|way| *way == b'u').unwrap();
                // A thread of its own may serve some before the others are enabled.
                assert!(driven_by_thread() || urgent < EACH + 8 || quantum > 4096, "{:?}", runs(&heard));
                let others: Vec<u8> = heard.into_iter().filter(|way| *way != b'u').collect();
                let runs = runs(&others);
                match quantum {
                    4096 => {
                        let mixed = driven_by_thread() || runs.len() > EACH / 2;
                        assert!(mixed, "each a quantum at a time: {runs:?}");
                    }
                    _ => assert_eq!(runs, [(b'a', EACH), (b'b', EACH)]),
                }
                job.barrier().await.unwrap();
                continue;
            }
            let mut fifos = Vec::new();
            for priority in [false, false, true] {
                let fifo = job.fifo(FifoOptions { slots: 64, priority, quantum }).await.unwrap();
                fifo.set_enabled(false).await.unwrap();
                fifos.push(fifo);
            }
            let ways = fifos.iter().zip([b'a', b'b', b'u']);
            let sends = ways.flat_map(|(fifo, way)| {
                (0..EACH).map(|_| Fifo::send(fifo, &say, Rank(1), vec![way; 3_000])).collect::<Vec<_>>()
            });
            let sends = join_all(sends.collect::<Vec<_>>());
            let enable = async {
                for fifo in &fifos {
                    assert_eq!(fifo.status().await.unwrap().len, EACH, "all are in");
                }
                for fifo in &fifos {
                    fifo.set_enabled(true).await.unwrap();
                }
            };
            let (sent, ()) = soon("all", async { tokio::join!(biased; sends, enable) }).await;
            assert!(sent.into_iter().all(|sent| sent.is_ok()));
            job.barrier().await.unwrap();
        }
    });
}
