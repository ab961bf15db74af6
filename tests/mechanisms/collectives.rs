//! Collective operations and what they leave alone: protocols that are yet to be registered.

use crate::support::{case, options, others, payload, run, soon};
use posthaste::{CallError, Fault, Message, Rank, RmaError, Scope, SendError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

case!(m_p03_a_handler_made_after_shmalloc_captures_the_window_and_gets_what_was_sent_before);
fn m_p03_a_handler_made_after_shmalloc_captures_the_window_and_gets_what_was_sent_before() {
    run(3, options(), async |job| {
        const EARLY: u64 = 300;
        let me = job.rank();
        let arrived = job.counter();
        let seen = Arc::new(Mutex::new(vec![Vec::new(); 3]));
        let (log, count) = (seen.clone(), arrived.clone());
        let add = move |window: posthaste::Window<u64>| {
            move |m: Message<'_>, _: &mut Scope<'_>| {
                let number = m.read::<u64>(0).unwrap();
                let sum = window.load(m.source().index()).unwrap();
                assert!(window.store(m.source().index(), sum + number));
                log.lock().unwrap()[m.source().index()].push(number);
                count.add(1);
            }
        };
        if me == Rank(0) {
            // Rank 0 makes the window while the messages of the others wait for its handler.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let window = soon("the window", job.shmalloc::<u64>(3)).await.unwrap();
            let gathered = soon("the gathering", job.all_gather(&[7])).await.unwrap();
            assert_eq!(gathered.len(), 3);
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(arrived.value(), 0);
            job.register("add", add(window.clone())).unwrap();
            soon("the messages", arrived.reach(2 * (EARLY + 1))).await;
            let expected: Vec<u64> = (1..=EARLY + 1).collect();
            assert_eq!(*seen.lock().unwrap(), [vec![], expected.clone(), expected]);
            let sum = (EARLY + 1) * (EARLY + 2) / 2;
            assert_eq!(window.to_vec(), [0, sum, sum]);
        } else {
            let message = job.register("add", |_: Message, _: &mut Scope| {}).unwrap();
            for number in 1..=EARLY {
                // A long one first, then short ones and pages.
                let mut bytes = number.to_ne_bytes().to_vec();
                bytes.resize(
                    if number == 1 {
                        3 << 20
                    } else if number % 100 == 0 {
                        5000
                    } else {
                        8
                    },
                    0,
                );
                message.send(Rank(0), bytes).await.unwrap();
            }
            soon("the window", job.shmalloc::<u64>(0)).await.unwrap();
            soon("the gathering", job.all_gather(&[7])).await.unwrap();
            message.send(Rank(0), (EARLY + 1).to_ne_bytes()).await.unwrap();
            // What was sent has taken effect, so this waits for the handler, too.
            soon("the flush", job.flush(Rank(0))).await.unwrap();
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(m_p03_only_a_barrier_or_ready_ends_the_wait_for_registrations);
fn m_p03_only_a_barrier_or_ready_ends_the_wait_for_registrations() {
    run(2, options(), async |job| {
        if job.rank() == Rank(0) {
            let service = job.service("late", |number: u32| async move { number + 1 }).unwrap();
            let never = job.service("never", |number: u32| async move { number + 1 }).unwrap();
            job.shmalloc::<u8>(1).await.unwrap();
            // Answered once it is registered, not refused.
            assert_eq!(soon("the reply", service.call(Rank(1), 1)).await.unwrap(), 2);
            job.barrier().await.unwrap();
            let refused = CallError::Fault(Fault::NoSuchProtocol(Rank(1)));
            assert_eq!(soon("the refusal", never.call(Rank(1), 1)).await, Err(refused));
        } else {
            job.shmalloc::<u8>(1).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            job.service("late", |number: u32| async move { number + 1 }).unwrap();
            job.barrier().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(m_p03_more_than_can_be_set_aside_waits_in_the_lane_and_nothing_is_lost);
fn m_p03_more_than_can_be_set_aside_waits_in_the_lane_and_nothing_is_lost() {
    run(2, options(), async |job| {
        const BYTES: usize = 40_000;
        if job.rank() == Rank(0) {
            let late = job.register("late", |_: Message, _: &mut Scope| {}).unwrap();
            for number in 0..100u64 {
                late.send(Rank(1), payload(number, BYTES)).await.unwrap();
            }
        } else {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let arrived = job.counter();
            let (log, count) = (Arc::new(Mutex::new(0u64)), arrived.clone());
            job.register("late", move |m: Message, _: &mut Scope| {
                let mut number = log.lock().unwrap();
                assert!(*m.bytes() == payload(*number, BYTES), "message {number}");
                *number += 1;
                count.add(1);
            })
            .unwrap();
            soon("the messages", arrived.reach(100)).await;
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

case!(m_p03_what_a_rank_sent_before_it_left_still_finds_its_handler);
fn m_p03_what_a_rank_sent_before_it_left_still_finds_its_handler() {
    run(2, options().body_leaves(), async |job| {
        if job.rank() == Rank(0) {
            let late = job.register("late", |_: Message, _: &mut Scope| {}).unwrap();
            for number in 0..50u64 {
                late.send(Rank(1), number.to_ne_bytes()).await.unwrap();
            }
            job.leave().await.unwrap();
        } else {
            // The leave is told at once: nobody waits for a rank that is gone.
            let gone = SendError::Fault(Fault::PeerClosed(Rank(0)));
            let own = job.register("own", |_: Message, _: &mut Scope| {}).unwrap();
            soon("the leave", async {
                while own.send(Rank(0), b"").await != Err(gone.clone()) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
            .await;
            let arrived = job.counter();
            let count = arrived.clone();
            job.register("late", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
            soon("the messages", arrived.reach(50)).await;
            job.leave().await.unwrap();
        }
    });
}

case!(m_w01_windows_are_freed_in_any_order_that_all_keep_and_once);
fn m_w01_windows_are_freed_in_any_order_that_all_keep_and_once() {
    run(3, options(), async |job| {
        let mut windows = Vec::new();
        for _ in 0..20 {
            windows.push(job.shmalloc::<u32>(10).await.unwrap());
        }
        let twice = windows[7].clone();
        while !windows.is_empty() {
            let window = windows.swap_remove(windows.len() * 5 % 7 % windows.len());
            for to in others(&job) {
                window.put(to, job.rank().index(), 5).await.unwrap();
            }
            window.free().await.unwrap();
        }
        assert!(matches!(twice.free().await, Err(RmaError::NoSuchWindow(_))));
        job.barrier().await.unwrap();
        // Several at once.
        let windows = [job.shmalloc::<u8>(5).await.unwrap(), job.shmalloc::<u8>(6).await.unwrap()];
        let ends = ::futures::future::join_all(windows.map(|window| window.free())).await;
        assert!(ends.iter().all(Result::is_ok), "{ends:?}");
        job.barrier().await.unwrap();
    });
}
