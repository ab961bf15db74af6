//! What a user's closures do wrong that are no handlers of messages, and leaving while work is left.

use crate::support::{case, options, run, soon, until};
use posthaste::{ContextId, Fault, Message, Rank, Scope};
use rustix::process::Signal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

case!(fault_a_panic_of_posted_work_or_of_an_error_handler_ends_nothing_else);
fn fault_a_panic_of_posted_work_or_of_an_error_handler_ends_nothing_else() {
    run(3, options().body_leaves(), async |job| {
        let me = job.rank();
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| {
            faults.lock().unwrap().push(fault);
            panic!("a defect of the error handler");
        });
        let heard = job.counter();
        let count = heard.clone();
        let word = job.register("word", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        if me == Rank(1) {
            job.leave().await.unwrap();
            return;
        }
        until("the report", || !told.lock().unwrap().is_empty()).await;
        // Of several at once each is done, whichever of them panics.
        let done = Arc::new(AtomicU64::new(0));
        for number in 0..30 {
            let done = done.clone();
            job.handle().post_run(move |_| {
                done.fetch_add(1, Ordering::Relaxed);
                assert!(number % 3 > 0, "a defect of posted work");
            });
        }
        until("posted work", || done.load(Ordering::Relaxed) == 30).await;
        // The context goes on.
        let other = Rank(2 - me.0);
        word.send(other, b"").await.unwrap();
        soon("the other's word", heard.reach(1)).await;
        job.flush(other).await.unwrap();
        word.send(other, b"").await.unwrap();
        soon("the other's flush", heard.reach(2)).await;
        job.leave().await.unwrap();
    });
}

case!(fault_leaving_beside_an_owned_context_that_nobody_polls_does_not_hang);
fn fault_leaving_beside_an_owned_context_that_nobody_polls_does_not_hang() {
    run(2, options().body_leaves(), async |job| {
        job.barrier().await.unwrap();
        let context = job.own_context(ContextId(0)).expect("nobody else owns it");
        assert!(context.handle().is_owned());
        assert!(context.stats().messages_sent > 0, "the owner is told at once");
        soon("leaving", job.leave()).await.unwrap();
        drop(context);
    });
}

case!(fault_what_waits_in_a_fifo_is_sent_before_its_rank_leaves);
fn fault_what_waits_in_a_fifo_is_sent_before_its_rank_leaves() {
    run(2, options().body_leaves(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let bulk = job
            .register("bulk", move |m: Message, _: &mut Scope| {
                assert_eq!(m.len(), 100_000);
                count.add(1);
            })
            .unwrap();
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let fifo = job.fifo(posthaste::FifoOptions::default()).await.unwrap();
        if job.rank() == Rank(1) {
            window.put(Rank(0), 0, u64::from(std::process::id())).await.unwrap();
        }
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let other = window.load(0).unwrap() as u32;
            crate::support::stop(other).await;
            // More than goes out before the other looks: of each that has begun, the place in the FIFO is kept.
            for _ in 0..400 {
                let mut send = Box::pin(fifo.send(&bulk, Rank(1), vec![1u8; 100_000]));
                let _begun = futures::poll!(&mut send);
            }
            let status = fifo.status().await.unwrap();
            crate::support::signal(other, Signal::CONT).unwrap();
            assert!(!status.is_empty(), "all went out at once: {status:?}");
            window.put(Rank(1), 0, status.tail).await.unwrap();
            job.leave().await.unwrap();
        } else {
            until("the number", || window.load(0) != Some(0)).await;
            soon("all that were in the FIFO", arrived.reach(window.load(0).unwrap())).await;
            job.leave().await.unwrap();
        }
    });
}
