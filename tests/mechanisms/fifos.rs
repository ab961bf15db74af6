//! Injection FIFOs of one's own.

use crate::support::{driven_by_thread, is_payload, options, payload, receives, run, soon};
use futures::future::join_all;
use posthaste::{FifoError, FifoOptions, Message, PatternError, Rank, Scope};
use std::sync::{Arc, Mutex};

#[test]
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
            let both = async { tokio::join!(say.send(Rank(1), long), say.send(Rank(1), [1; 20])) };
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

#[test]
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
            tokio::join!(many(&fifo, b"a", 40), many(&urgent, b"u", 10))
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
        let ((usual, urgents), ()) = soon("all", async { tokio::join!(sends, flags) }).await;
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

#[test]
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
            let (replayed, freed) = soon("freeing", async { tokio::join!(replay, free) }).await;
            assert_eq!((replayed, freed.is_ok()), (Ok(()), true));
            soon("the last message", arrived.reach(3 * (round + 1) + 1 + round)).await;
            job.barrier().await.unwrap();
        }
    });
}

#[test]
fn a_fifo_that_is_deactivated_keeps_no_credit() {
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
            let refused = soon("the refusal", waits).await;
            assert!(matches!(refused, Err(PatternError::Fifo(FifoError::Inactive))), "{refused:?}");
            soon("the credit", data.send(Rank(1), "third")).await.unwrap();
        } else {
            job.barrier().await.unwrap();
            receives(&mut datas, &["first", "third"]).await;
        }
        job.barrier().await.unwrap();
    });
}
