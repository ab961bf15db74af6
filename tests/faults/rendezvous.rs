//! What becomes of a long message on its way to its place when one of its two ranks is killed.

use crate::support::{Options, barrier_before_death, case, is_payload, options, payload, run, soon};
use posthaste::{Bytes, Fault, Job, Message, Rank, Scope, SendError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LENGTH: usize = 64 << 20;

/// What happens only where a second place can be given ahead.
fn is_ahead(point: &str) -> bool {
    matches!(point, "rendezvous.ahead" | "rendezvous.given")
}

fn dies_at(point: &str, rank: u32) -> Options {
    options()
        .body_leaves()
        .killed(rank)
        .env("POSTHASTE_RENDEZVOUS_BYTES", "1M")
        // One place of that length fits and no second one, or two.
        .env("POSTHASTE_SEGMENT", if is_ahead(point) { "150M" } else { "100M" })
        .env("POSTHASTE_TEST_FAILPOINT", &format!("{point}@{rank}"))
}

case!(fault_a_receiver_killed_at_each_phase_of_a_rendezvous_gives_the_sender_its_buffer_back);
fn fault_a_receiver_killed_at_each_phase_of_a_rendezvous_gives_the_sender_its_buffer_back() {
    let points = ["requested", "granted", "landed", "given"].map(|point| format!("rendezvous.{point}"));
    for point in points.iter().map(String::as_str).chain(["test.during.the.put"]) {
        run(2, dies_at(point, 1), async |job| {
            let message = job.register("long", |_: Message, _: &mut Scope| {}).unwrap();
            barrier_before_death(&job, Rank(1)).await;
            if job.rank() == Rank(1) {
                if std::env::var("POSTHASTE_TEST_FAILPOINT").unwrap().starts_with("test.") {
                    // It has given a place by then, or will never.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    crate::support::kill_self();
                }
                std::future::pending::<()>().await;
            }
            let start = Instant::now();
            loop {
                let buffer = Bytes::from(vec![7; LENGTH]);
                match soon("the end of the send", message.send(Rank(1), buffer.clone())).await {
                    Ok(()) => assert!(start.elapsed() < Duration::from_secs(60), "nobody died"),
                    Err(error) => {
                        assert_eq!(error, SendError::Fault(Fault::PeerLost(Rank(1))));
                        assert!(buffer.is_unique(), "its buffer is the sender's again");
                        break;
                    }
                }
            }
            println!("told after {:?}", start.elapsed());
            job.leave().await.unwrap();
        });
    }
}

/// What rank 0 receives after a sender of its died: everything goes straight to the one place there is.
async fn receive_or_send(job: Job) {
    let log: Arc<Mutex<Vec<(u32, bool)>>> = Arc::default();
    let (seen, arrived) = (log.clone(), job.counter());
    let count = arrived.clone();
    let message = job
        .register("long", move |m: Message, _: &mut Scope| {
            seen.lock().unwrap().push((m.source().0, m.len() == LENGTH && is_payload(9, &m.to_bytes())));
            count.add(1);
        })
        .unwrap();
    let heard = job.counter();
    let hearing = heard.clone();
    let noticed = job.register("noticed", move |_: Message, _: &mut Scope| hearing.add(1)).unwrap();
    let lost = Arc::new(Mutex::new(false));
    let told = lost.clone();
    job.on_error(move |fault| *told.lock().unwrap() |= fault == Fault::PeerLost(Rank(1)));
    barrier_before_death(&job, Rank(1)).await;
    let ahead = is_ahead(&std::env::var("POSTHASTE_TEST_FAILPOINT").unwrap().replace("@1", ""));
    if job.rank() == Rank(1) {
        for _ in 0..if ahead { 3 } else { 1 } {
            message.send(Rank(0), payload(9, LENGTH)).await.unwrap();
        }
        std::future::pending::<()>().await;
    }
    let start = Instant::now();
    while !*lost.lock().unwrap() {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody died");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    if job.rank() == Rank(2) {
        // It may have heard of the loss before rank 0, which has to give the place back first.
        soon("that rank 0 notices it, too", heard.reach(1)).await;
        for _ in 0..3 {
            message.send(Rank(0), payload(9, LENGTH)).await.unwrap();
        }
        let stats = job.handle().stats();
        let seen = (stats.rendezvous, stats.rendezvous_ahead);
        assert_eq!(seen, (3, u64::from(ahead)), "the place was not given back");
    } else {
        noticed.send(Rank(2), Bytes::new()).await.unwrap();
        soon("the messages of rank 2", async {
            while log.lock().unwrap().iter().filter(|entry| entry.0 == 2).count() < 3 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        assert!(log.lock().unwrap().iter().all(|entry| entry.1), "torn: {:?}", log.lock().unwrap());
    }
    job.leave().await.unwrap();
}

case!(fault_a_sender_killed_at_each_phase_of_a_rendezvous_gives_the_receiver_its_memory_back);
fn fault_a_sender_killed_at_each_phase_of_a_rendezvous_gives_the_receiver_its_memory_back() {
    let points = ["asked", "cleared", "put.part:7", "put.done", "ahead"];
    for point in points.map(|point| format!("rendezvous.{point}")) {
        run(3, dies_at(&point, 1), async |job| receive_or_send(job).await);
    }
}
