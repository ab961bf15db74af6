//! Delivery to streams and to spawned handlers; back-pressure.

use crate::support::{
    Transport, case, options, payload, receives, run, sealed, soon, transport, unseal, until,
};
use posthaste::{ActiveMessage, ContextId, Message, OwnedMessage, Rank, Scope, SendError, TrySendError};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Sends so many messages of that length to rank 1, one awaited after the other, and counts those that are sent.
fn send_counted(
    message: ActiveMessage,
    count: u64,
    len: usize,
) -> (tokio::task::JoinHandle<()>, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = sent.clone();
    let task = tokio::spawn(async move {
        for number in 0..count {
            message.send(Rank(1), sealed(number, len)).await.unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    (task, sent)
}

case!(a_slow_consumer_slows_its_own_senders_and_nobody_else);
fn a_slow_consumer_slows_its_own_senders_and_nobody_else() {
    run(2, options().env("POSTHASTE_CREDITS", "8"), async |job| {
        let (slow, mut slow_stream) = job.stream("slow").unwrap();
        let (fast, mut fast_stream) = job.stream("fast").unwrap();
        let arrived = job.counter();
        let count = arrived.clone();
        let plain = job.register("plain", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let (task, sent) = send_counted(slow, 200, 100);
            until("the credit of the slow stream is used up", || sent.load(Ordering::SeqCst) == 8).await;
            // Nobody takes a message of the slow stream meanwhile.
            for number in 0..500u64 {
                fast.send(Rank(1), sealed(number, 2000)).await.unwrap();
                plain.send(Rank(1), number.to_ne_bytes()).await.unwrap();
            }
            job.barrier().await.unwrap();
            assert_eq!(sent.load(Ordering::SeqCst), 8, "no more than there is credit");
            job.barrier().await.unwrap();
            soon("the slow sends", task).await.unwrap();
        } else {
            for number in 0..500 {
                let message = soon("the fast stream", fast_stream.recv()).await.unwrap();
                assert_eq!(unseal(&message.into_bytes()), Some(number));
            }
            soon("the plain messages", arrived.reach(500)).await;
            job.barrier().await.unwrap();
            job.barrier().await.unwrap();
            for number in 0..200 {
                let message = soon("the slow stream", slow_stream.recv()).await.unwrap();
                assert_eq!((message.source(), unseal(&message.into_bytes())), (Rank(0), Some(number)));
            }
            assert!(slow_stream.try_recv().is_none());
        }
        job.barrier().await.unwrap();
    });
}

case!(bytes_are_credited_as_the_job_was_told);
fn bytes_are_credited_as_the_job_was_told() {
    run(2, options().env("POSTHASTE_CREDIT_BYTES", "64K"), async |job| {
        let (slow, mut slow_stream) = job.stream("slow").unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let (task, sent) = send_counted(slow, 50, 20_000);
            // The fourth one takes the last of it, and more.
            until("the credit is used up", || sent.load(Ordering::SeqCst) == 4).await;
            job.barrier().await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(sent.load(Ordering::SeqCst), 4, "no more than there is credit");
            job.barrier().await.unwrap();
            soon("the slow sends", task).await.unwrap();
        } else {
            job.barrier().await.unwrap();
            job.barrier().await.unwrap();
            for number in 0..50 {
                let message = soon("the slow stream", slow_stream.recv()).await.unwrap();
                assert_eq!(unseal(&message.into_bytes()), Some(number));
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(back_pressure_with_one_credit_loses_and_doubles_nothing);
fn back_pressure_with_one_credit_loses_and_doubles_nothing() {
    let narrow = options().env("POSTHASTE_CREDITS", "1").env("POSTHASTE_LANE_BYTES", "1024");
    run(4, narrow, async |job| {
        let (message, mut stream) = job.stream("narrow").unwrap();
        let me = job.rank();
        let sender = tokio::spawn({
            let ranks: Vec<Rank> = job.ranks().collect();
            async move {
                for number in 0..60u64 {
                    for to in &ranks {
                        let len = [8, 200, 3000, 70_000][number as usize % 4];
                        message.send(*to, sealed(u64::from(me.0) << 32 | number, len)).await.unwrap();
                    }
                }
            }
        });
        let mut next = [0u64; 4];
        for _ in 0..240 {
            let message = soon("the stream", stream.recv()).await.unwrap();
            let source = message.source();
            let seal = unseal(&message.into_bytes()).expect("whole");
            assert_eq!(seal, u64::from(source.0) << 32 | next[source.index()], "from rank {source}");
            next[source.index()] += 1;
        }
        soon("the sends", sender).await.unwrap();
        job.barrier().await.unwrap();
        assert!(stream.try_recv().is_none());
    });
}

case!(spawned_handlers_run_as_many_at_once_as_allowed);
fn spawned_handlers_run_as_many_at_once_as_allowed() {
    run(2, options().env("POSTHASTE_CREDITS", "16"), async |job| {
        let (running, most, done) =
            (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counts = (running.clone(), most.clone(), done.clone());
        let message = job
            .register_spawned("spawned", 5, move |message: OwnedMessage| {
                let (running, most, done) = counts.clone();
                async move {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    running.fetch_sub(1, Ordering::SeqCst);
                    let number = unseal(&message.into_bytes()).expect("whole");
                    done.fetch_add(1, Ordering::SeqCst);
                    // The limit survives handlers that panic.
                    assert_ne!(number % 10, 3, "as the test wants it");
                }
            })
            .unwrap();
        let peer = Rank(1 - job.rank().0);
        for number in 0..300 {
            message.send(peer, sealed(number, 50)).await.unwrap();
        }
        until("the handlers", || done.load(Ordering::SeqCst) == 300).await;
        assert_eq!(most.load(Ordering::SeqCst), 5);
        job.barrier().await.unwrap();
    });
}

case!(try_send_says_full_and_gives_the_payload_back);
fn try_send_says_full_and_gives_the_payload_back() {
    run(2, options().env("POSTHASTE_LANE_BYTES", "4096").delay(1, Duration::from_millis(500)), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("try", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some());
                count.add(1);
            })
            .unwrap();
        let told = job.register("told", |_: Message, _: &mut Scope| {}).unwrap();
        if job.rank() == Rank(0) {
            let mut sent = 0u64;
            let returned = loop {
                match message.try_send(Rank(1), sealed(sent, 500)) {
                    Ok(()) => sent += 1,
                    Err(error) => break error,
                }
                // A lane of 4 KiB, or what a connection and the kernel keep.
                let room = if transport() == Transport::Shm { 100 } else { 100_000 };
                assert!(sent < room, "there is always room");
            };
            assert!(matches!(returned, TrySendError::Full(_)), "{returned}");
            assert_eq!(unseal(&returned.into_payload().into_bytes()), Some(sent), "the payload comes back");
            let unknown = message.try_send(Rank(7), sealed(1, 500)).unwrap_err();
            let TrySendError::Failed { error, payload } = unknown else { panic!("{unknown}") };
            assert_eq!(error, SendError::UnknownRank { rank: Rank(7), size: 2 });
            assert_eq!(unseal(&payload.into_bytes()), Some(1));
            // Both ways on: waiting, and trying until there is room.
            message.send(Rank(1), sealed(sent, 500)).await.unwrap();
            let mut next = payload_of(sent + 1);
            while let Err(error) = message.try_send(Rank(1), next) {
                next = error.into_payload();
                tokio::task::yield_now().await;
            }
            told.send(Rank(1), (sent + 2).to_ne_bytes()).await.unwrap();
            job.all_gather(&(sent + 2).to_ne_bytes()).await.unwrap();
        } else {
            let all = job.all_gather(&0u64.to_ne_bytes()).await.unwrap();
            let sent = u64::from_ne_bytes(all[0][..].try_into().unwrap());
            soon("the messages", arrived.reach(sent)).await;
            assert_eq!((arrived.value(), job.stats().panics), (sent, 0));
        }
        job.barrier().await.unwrap();
    });

    fn payload_of(seed: u64) -> posthaste::components::protocols::Buffer {
        sealed(seed, 500).into()
    }
}

case!(every_flush_waits_until_handlers_have_run);
/// Not only the first that asks: one beside it and one behind one that was given up find the handler through as well.
fn every_flush_waits_until_handlers_have_run() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let own = window.clone();
        let slow = job
            .register("slow", move |m: Message, _: &mut Scope| {
                std::thread::sleep(Duration::from_millis(100));
                assert!(own.store(0, m.read(0).unwrap()));
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for (number, given_up, all) in
                [(1u64, false, false), (2, true, false), (3, false, true), (4, true, true)]
            {
                let first = loop {
                    slow.send(Rank(1), number.to_ne_bytes()).await.unwrap();
                    let mut first = Box::pin(job.flush(Rank(1)));
                    // On a busy machine the handler may be through by then.
                    if futures::poll!(&mut first).is_pending() {
                        break first;
                    }
                };
                let first = if given_up { None } else { Some(first) };
                if all {
                    soon("the fence", job.fence()).await.unwrap();
                } else {
                    soon("the second", job.flush(Rank(1))).await.unwrap();
                }
                assert_eq!(window.get(Rank(1), 0).await, Ok(number), "the handler has not run");
                if let Some(first) = first {
                    soon("the first", first).await.unwrap();
                }
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(flush_and_fence_wait_until_handlers_have_run);
fn flush_and_fence_wait_until_handlers_have_run() {
    run(3, options(), async |job| {
        let arrived = Arc::new(AtomicUsize::new(0));
        let count = arrived.clone();
        let message = job
            .register("flushed", move |m: Message, _: &mut Scope| {
                count.fetch_add(m.len(), Ordering::SeqCst);
            })
            .unwrap();
        let seen = job
            .service_inline("seen", move |_, _| {
                Ok((arrived.load(Ordering::SeqCst) as u64).to_ne_bytes().into())
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let mut sent = 0;
            for round in 0..30usize {
                let len = [1, 5000, 5 << 20][if round % 10 == 0 { 2 } else { round % 2 }];
                for to in [Rank(1), Rank(2)] {
                    message.send(to, payload(1, len)).await.unwrap();
                }
                sent += len;
                match round % 2 {
                    0 => job.fence().await.unwrap(),
                    _ => {
                        job.flush(Rank(1)).await.unwrap();
                        job.flush(Rank(2)).await.unwrap();
                    }
                }
                for to in [Rank(1), Rank(2)] {
                    let value = seen.call_bytes(to, []).await.unwrap();
                    assert_eq!(value.as_bytes(), (sent as u64).to_ne_bytes(), "round {round}, rank {to}");
                }
            }
            assert!(matches!(
                job.flush(Rank(3)).await,
                Err(posthaste::Error::Send(SendError::UnknownRank { .. }))
            ));
            // Nothing to wait for.
            job.fence().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(a_flush_waits_for_every_context_of_a_rank);
/// What goes to another context of a rank is handled when that is driven, and a flush waits for it, too.
fn a_flush_waits_for_every_context_of_a_rank() {
    run(2, options().contexts(2), async |job| {
        let window = job.shmalloc::<u64>(2).await.unwrap();
        let own = window.clone();
        let note = job
            .register("note", move |m: Message, scope: &mut Scope| {
                assert!(own.store(scope.me().context.index(), m.read(0).unwrap()));
            })
            .unwrap();
        let context = (job.rank() == Rank(1)).then(|| job.own_context(ContextId(1)).expect("free"));
        job.barrier().await.unwrap();
        for round in 1..=6u64 {
            if let Some(context) = &context {
                tokio::time::sleep(Duration::from_millis(30)).await;
                let mut moved = 0;
                while window.load(1) < Some(round) || moved < 100 {
                    moved += 1;
                    context.advance();
                    tokio::task::yield_now().await;
                }
            } else {
                note.send(Rank(1), round.to_ne_bytes()).to_context(ContextId(1)).await.unwrap();
                match round % 2 {
                    0 => soon("the fence", job.fence()).await.unwrap(),
                    _ => soon("the flush", job.flush(Rank(1))).await.unwrap(),
                }
                assert_eq!(window.get(Rank(1), 1).await, Ok(round), "the handler has not run");
            }
            job.barrier().await.unwrap();
        }
    });
}

case!(fault_what_a_task_takes_while_its_driver_sleeps_is_paid_for);
fn fault_what_a_task_takes_while_its_driver_sleeps_is_paid_for() {
    const CREDITS: u64 = 16;
    run(2, options().env("POSTHASTE_CREDITS", "16"), async |job| {
        let (data, mut datas) = job.stream("data").unwrap();
        let (go, mut goes) = job.stream("go").unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for number in 0..=CREDITS {
                soon("credit", data.send(Rank(1), number.to_ne_bytes())).await.unwrap();
            }
            go.send(Rank(1), "").await.unwrap();
        } else {
            // Nothing comes any more, and the driver sleeps.
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert!(datas.recv().await.is_some());
            // Which comes behind what waits for the credit of that one.
            assert!(soon("the next step", goes.recv()).await.is_some());
        }
        job.barrier().await.unwrap();
    });
}

case!(a_send_that_has_failed_and_is_kept_keeps_no_credit);
fn a_send_that_has_failed_and_is_kept_keeps_no_credit() {
    run(2, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let (data, mut datas) = job.stream("data").unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            data.send(Rank(1), "first").await.unwrap();
            let mut failed = data.send(Rank(1), "second").deadline(Duration::from_millis(20));
            assert!((&mut failed).await.is_err());
            job.barrier().await.unwrap();
            soon("the credit", data.send(Rank(1), "third")).await.unwrap();
            drop(failed);
        } else {
            job.barrier().await.unwrap();
            receives(&mut datas, &["first", "third"]).await;
        }
        job.barrier().await.unwrap();
    });
}

case!(messages_for_handlers_whose_runtime_has_ended_keep_no_credit);
fn messages_for_handlers_whose_runtime_has_ended_keep_no_credit() {
    run(2, options().env("POSTHASTE_CREDITS", "4"), async |job| {
        let other = std::thread::scope(|scope| {
            let job = &job;
            scope
                .spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    runtime.block_on(async {
                        job.register_spawned("work", 2, |_: OwnedMessage| async {}).unwrap()
                    })
                })
                .join()
                .unwrap()
        });
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for number in 0..40u64 {
                soon("credit", other.send(Rank(1), number.to_ne_bytes())).await.unwrap();
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(messages_that_wait_for_a_handler_keep_no_credit_when_its_runtime_ends);
fn messages_that_wait_for_a_handler_keep_no_credit_when_its_runtime_ends() {
    run(3, options().env("POSTHASTE_CREDITS", "4"), async |job| {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (made, work) = tokio::sync::oneshot::channel();
        let its = job.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let work = its.register_spawned("work", 1, |_: OwnedMessage| std::future::pending::<()>());
                assert!(made.send(work.unwrap()).is_ok());
                let _end = stopped.await;
            });
        });
        let work = work.await.unwrap();
        job.barrier().await.unwrap();
        // The first has the only place, and its sender sends nothing more; those of another wait behind it.
        for (sender, count) in [(Rank(0), 1u64), (Rank(2), 4)] {
            if job.rank() == sender {
                for number in 0..count {
                    soon("credit", work.send(Rank(1), number.to_ne_bytes())).await.unwrap();
                }
                job.flush(Rank(1)).await.unwrap();
            }
            job.barrier().await.unwrap();
        }
        stop.send(()).unwrap();
        soon("the runtime", tokio::task::spawn_blocking(move || thread.join())).await.unwrap().unwrap();
        if job.rank() == Rank(2) {
            for number in 0..8u64 {
                soon("credit", work.send(Rank(1), number.to_ne_bytes())).await.unwrap();
            }
        }
        job.barrier().await.unwrap();
    });
}
