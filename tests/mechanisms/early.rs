//! Sending to a rank that has not started yet.

use crate::support::{case, here, options, run, run_as, soon};
use posthaste::{Message, Rank, Scope};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// By how much the receiver starts later.
const LATER: Duration = Duration::from_secs(5);

/// A thousand messages sent before their receiver starts are dispatched there, once each and in order.
fn a_thousand_wait(lane_bytes: &'static str) -> crate::support::Options {
    options().env("POSTHASTE_LANE_BYTES", lane_bytes).delay(1, LATER)
}

/// The job of the test with that path in which they are sent; how long the sender took is handed to `sent`.
fn a_thousand_are_sent(test: &str, lane_bytes: &'static str, sent: fn(Duration)) {
    run_as(test, 2, a_thousand_wait(lane_bytes), async move |job| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let arrived = job.counter();
        let (log, count) = (seen.clone(), arrived.clone());
        let early = job
            .register("early", move |m: Message, _: &mut Scope| {
                log.lock().unwrap().push(m.read::<u64>(0).unwrap());
                count.add(1);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            let began = std::time::Instant::now();
            for number in 0..1000u64 {
                early.send(Rank(1), number.to_ne_bytes()).await.unwrap();
            }
            sent(began.elapsed());
        } else {
            soon("the messages", arrived.reach(1000)).await;
            assert_eq!(*seen.lock().unwrap(), (0..1000).collect::<Vec<u64>>());
        }
        job.barrier().await.unwrap();
    });
}

case!(m_p01_memory_for_a_rank_is_there_before_it_starts);
fn m_p01_memory_for_a_rank_is_there_before_it_starts() {
    // The lane holds all of them: every send ends at once, although nobody reads.
    let test = here!();
    a_thousand_are_sent(test, "262144", |took| {
        assert!(took < Duration::from_millis(4500), "the sends waited for the receiver");
    });
}

case!(m_p02_a_message_waits_for_its_receiver_to_start);
fn m_p02_a_message_waits_for_its_receiver_to_start() {
    // The lane holds few of them: the sends beyond wait, none fails, and none overtakes another.
    a_thousand_are_sent(here!(), "1024", |_| {});
}

case!(m_p03_what_came_before_a_registration_is_held_for_it);
fn m_p03_what_came_before_a_registration_is_held_for_it() {
    run(2, options(), async |job| {
        if job.rank() == Rank(0) {
            let late = job.register("late", |_: Message, _: &mut Scope| {}).unwrap();
            let direct = job.register("direct", |_: Message, _: &mut Scope| {}).unwrap();
            for number in 0..500u64 {
                late.send(Rank(1), number.to_ne_bytes()).await.unwrap();
            }
            direct.send(Rank(1), b"").await.unwrap();
        } else {
            // Initialised and driving for a while, with the messages at the door.
            tokio::time::sleep(Duration::from_millis(300)).await;
            let order = Arc::new(Mutex::new(Vec::new()));
            let arrived = job.counter();
            let (log, count) = (order.clone(), arrived.clone());
            job.register("direct", move |_: Message, _: &mut Scope| {
                log.lock().unwrap().push(u64::MAX);
                count.add(1);
            })
            .unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(arrived.value(), 0, "a message overtook those that are held");
            let (log, count) = (order.clone(), arrived.clone());
            job.register("late", move |m: Message, _: &mut Scope| {
                log.lock().unwrap().push(m.read::<u64>(0).unwrap());
                count.add(1);
            })
            .unwrap();
            soon("the held messages", arrived.reach(501)).await;
            let expected: Vec<u64> = (0..500).chain([u64::MAX]).collect();
            assert_eq!(*order.lock().unwrap(), expected);
        }
        job.barrier().await.unwrap();
    });
}
