//! Futures that are dropped at any poll or forgotten, leases that are forgotten, runtimes that end too early.

use crate::support::{Random, case, options, payload, run, run_unjoined, sealed, soon, unseal, until};
use posthaste::{
    CallError, CollectiveError, Fault, Message, OwnedMessage, Rank, RmaError, Scope, ServiceOptions,
};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

/// Polls a future at most so often, then drops it.
async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Sends that are given up after 0 to 5 polls, to a receiver that takes its time.
async fn give_up_sends(job: posthaste::Job) {
    let (message, mut stream) = job.stream("given up").unwrap();
    let stop = job.register("stop", |_: Message, _: &mut Scope| {}).unwrap();
    job.barrier().await.unwrap();
    const LENGTHS: [usize; 5] = [8, 200, 5000, 100_000, 5 << 20];
    const SENDS: u64 = 360;
    if job.rank() == Rank(0) {
        let mut random = Random(7);
        let mut completed = Vec::new();
        for number in 0..SENDS {
            let len = LENGTHS[if number % 40 == 4 { 4 } else { random.below(4) as usize }];
            let send = message.send(Rank(1), sealed(number, len));
            let send = if random.below(3) == 0 { send.info(&number.to_le_bytes()) } else { send };
            match polled(send, random.below(6) as usize).await {
                Some(result) => {
                    result.unwrap();
                    completed.push(number);
                }
                None if random.below(4) == 0 => tokio::task::yield_now().await,
                None => {}
            }
        }
        assert!(completed.len() > 20, "{} sends went through", completed.len());
        assert!(completed.len() < SENDS as usize - 20, "{} sends went through", completed.len());
        // All credit and all room is back: as many as there may be go through at once.
        let last = (SENDS..SENDS + 20).map(|number| message.send(Rank(1), sealed(number, 100)));
        for result in soon("the last sends", futures_join(last)).await {
            result.unwrap();
        }
        let _ = stop;
        let mut list = vec![0u8; SENDS as usize];
        completed.iter().for_each(|number| list[*number as usize] = 1);
        job.all_gather(&list).await.unwrap();
    } else {
        let mut seen = Vec::new();
        let mut random = Random(8);
        loop {
            let message = soon("the stream", stream.recv()).await.unwrap();
            let number = unseal(&message.into_bytes()).expect("whole");
            seen.push(number);
            if number == SENDS + 19 {
                break;
            }
            if random.below(4) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        assert!(seen.is_sorted_by(|one, next| one < next), "twice or out of order: {seen:?}");
        let lists = job.all_gather(&vec![0; SENDS as usize]).await.unwrap();
        for number in 0..SENDS {
            let completed = lists[0][number as usize] == 1;
            assert!(!completed || seen.contains(&number), "send {number} was completed and lost");
        }
        assert_eq!(seen.iter().filter(|number| **number >= SENDS).count(), 20);
    }
    job.barrier().await.unwrap();
}

fn futures_join<F: Future>(list: impl Iterator<Item = F>) -> impl Future<Output = Vec<F::Output>> {
    ::futures::future::join_all(list.collect::<Vec<_>>())
}

case!(fault_a_send_dropped_at_any_poll_is_sent_whole_or_not_at_all);
fn fault_a_send_dropped_at_any_poll_is_sent_whole_or_not_at_all() {
    run(2, options().env("POSTHASTE_LANE_BYTES", "4096").env("POSTHASTE_CREDITS", "4"), async |job| {
        give_up_sends(job).await;
    });
}

case!(fault_a_send_dropped_at_any_poll_gives_back_its_only_credit);
fn fault_a_send_dropped_at_any_poll_gives_back_its_only_credit() {
    run(2, options().env("POSTHASTE_LANE_BYTES", "1024").env("POSTHASTE_CREDITS", "1"), async |job| {
        give_up_sends(job).await;
    });
}

case!(fault_calls_dropped_at_any_poll_leave_nothing_behind);
fn fault_calls_dropped_at_any_poll_leave_nothing_behind() {
    run(2, options().env("POSTHASTE_CREDITS", "3").env("POSTHASTE_LANE_BYTES", "4096"), async |job| {
        let handled = Arc::new(AtomicUsize::new(0));
        let count = handled.clone();
        let service = job
            .service("echo", move |bytes: Vec<u8>| {
                let count = count.clone();
                async move {
                    tokio::task::yield_now().await;
                    count.fetch_add(1, Ordering::SeqCst);
                    bytes
                }
            })
            .unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let mut random = Random(11);
        for round in 0..600 {
            let bytes = payload(round, [10, 1000, 20_000, 300_000][random.below(4) as usize]);
            let call = service.call(peer, bytes.clone());
            if let Some(reply) = polled(call, random.below(8) as usize).await {
                assert_eq!(reply.unwrap(), bytes);
            }
        }
        // The credit of the dropped calls is back.
        let calls = (0..30u64).map(|number| service.call(peer, payload(number, 100)));
        for (number, reply) in soon("the last calls", futures_join(calls)).await.into_iter().enumerate() {
            assert_eq!(reply.unwrap(), payload(number as u64, 100));
        }
        job.barrier().await.unwrap();
        assert!(handled.load(Ordering::SeqCst) >= 30);
    });
}

case!(fault_puts_gets_replays_and_receives_dropped_at_any_poll_harm_nobody);
fn fault_puts_gets_replays_and_receives_dropped_at_any_poll_harm_nobody() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(1 << 18).await.unwrap();
        let source = job.region(1 << 20).await.unwrap();
        let (message, mut stream) = job.stream("received").unwrap();
        let peer = Rank(1 - job.rank().0);
        let pattern = job.record(|r| window.record_put(r, peer, 0, &source)).await.unwrap();
        job.barrier().await.unwrap();
        let mut next = 0;
        for round in 0..200u64 {
            let times = round as usize % 4;
            let values = vec![round; 1 << (round % 17)];
            let _ = polled(window.put_slice(peer, 1 << 17, &values), times).await;
            let _ = polled(window.get_slice(peer, 1 << 17, values.len()), times).await;
            source.write(0, &round.to_ne_bytes()).unwrap();
            let _ = polled(pattern.replay(), times).await;
            message.send(peer, round.to_ne_bytes()).await.unwrap();
            // Cancel safe: what a dropped receive did not return, the next one does.
            if let Some(message) = polled(stream.recv(), times).await {
                assert_eq!(message.unwrap().read::<u64>(0), Some(next));
                next += 1;
            }
            let _ = polled(job.flush(peer), times).await;
        }
        while next < 200 {
            let message = soon("the stream", stream.recv()).await.unwrap();
            assert_eq!(message.read::<u64>(0), Some(next), "a message was lost with a dropped receive");
            next += 1;
        }
        pattern.replay().await.unwrap();
        assert_eq!(window.get(peer, 0).await.unwrap(), 199);
        job.barrier().await.unwrap();
    });
}

case!(fault_forgotten_futures_and_leases_cost_what_was_forgotten);
fn fault_forgotten_futures_and_leases_cost_what_was_forgotten() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let page = job
            .register("page", move |m: Message, _: &mut Scope| {
                assert!(unseal(&m.bytes()).is_some());
                let number = count.value();
                count.add(1);
                let kept: OwnedMessage = m.into_owned();
                if number < 30
                    && let Ok(lease) = kept.into_lease()
                {
                    // Thirty pages are never given back.
                    std::mem::forget(lease);
                }
            })
            .unwrap();
        let service = job.service("echo", |bytes: Vec<u8>| async move { bytes }).unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        // Pages that can be had at once.
        let pages = || std::iter::from_fn(|| page.loan(40_000)).collect::<Vec<_>>().len();
        let before = pages();
        job.barrier().await.unwrap();
        for number in 0..300 {
            page.send(peer, sealed(number, 40_000)).await.unwrap();
        }
        for number in 0..100u64 {
            // Forgotten after a few polls.
            let mut call = Box::pin(service.call(peer, payload(number, 5000)));
            let _ = polled(call.as_mut(), number as usize % 4).await;
            std::mem::forget(call);
            let mut send = Box::pin(page.send(peer, sealed(number, 50_000)));
            let _ = polled(send.as_mut(), number as usize % 3).await;
            std::mem::forget(send);
        }
        for number in 0..50 {
            let bytes = payload(number, 9000);
            assert_eq!(soon("a call", service.call(peer, bytes.clone())).await.unwrap(), bytes);
            soon("a send", page.send(peer, sealed(number, 40_000))).await.unwrap();
        }
        until("the messages", || arrived.value() >= 350).await;
        job.barrier().await.unwrap();
        // All but those of the leases that the other side forgot.
        until("the pages", || pages() + 30 >= before).await;
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

/// What takes its time as it is dropped.
struct Slow;

impl Drop for Slow {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Ten thousand operations that nobody answers, eight in ten of them calls, polled by a runtime that is not the job's; then the
/// job ends in one of two ways.
fn ten_thousand_pending(end: fn(tokio::runtime::Runtime, posthaste::Job)) {
    const OPERATIONS: usize = 10_000;
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (jobs, callers) = (runtime(), runtime());
    let (job, never, word) = jobs.block_on(async {
        let job = posthaste::join().await.unwrap();
        let all = ServiceOptions { limit: OPERATIONS };
        let never = job.service_with("never", all, |(), _| std::future::pending::<()>()).unwrap();
        let word = Arc::new(job.shmalloc::<u64>(1).await.unwrap());
        // A runtime drops its tasks one after the other. What the others hear of that, and do, is not to come in between.
        for _ in 0..64 {
            tokio::spawn(async {
                let _slow = Slow;
                std::future::pending::<()>().await;
            });
        }
        job.barrier().await.unwrap();
        (job, never, word)
    });
    if job.rank() == Rank(1) {
        let ended = jobs.block_on(soon("the end of rank 0", never.call(Rank(0), ())));
        assert!(
            matches!(ended, Err(CallError::Fault(Fault::PeerLost(_) | Fault::PeerClosed(_)))),
            "{ended:?}"
        );
        return;
    }
    // This one is no operation.
    let (waiting, waits) = (job.clone(), job.incarnation_of(Rank(1)));
    let waiting = callers.spawn(async move { waiting.peer_restarted(Rank(1), waits).await });
    let pending = Arc::new(AtomicUsize::new(0));
    let ends: Arc<Mutex<Vec<Fault>>> = Arc::default();
    for number in 0..OPERATIONS {
        let (never, world, word) = (never.clone(), job.world(), word.clone());
        let (pending, ends) = (pending.clone(), ends.clone());
        callers.spawn(async move {
            let mut operation = pin!(async {
                match number % 10 {
                    0 => match world.broadcast(1, &[0u64; 4]).await {
                        Err(CollectiveError::Fault(fault)) => Err(fault),
                        other => panic!("a broadcast of a rank that makes none: {other:?}"),
                    },
                    1 => match word.wait_until(0, |word| word == 1).await {
                        Err(RmaError::Fault(fault)) => Err(fault),
                        other => panic!("a wait for a word that nobody writes: {other:?}"),
                    },
                    _ => match never.call(Rank(1), ()).await {
                        Err(CallError::Fault(fault)) => Err::<(), _>(fault),
                        other => panic!("a call that nobody answers: {other:?}"),
                    },
                }
            });
            let mut first = true;
            let end = std::future::poll_fn(|cx| {
                let poll = operation.as_mut().poll(cx);
                if std::mem::take(&mut first) {
                    pending.fetch_add(1, Ordering::SeqCst);
                }
                poll
            })
            .await;
            ends.lock().unwrap().push(end.unwrap_err());
        });
    }
    callers.block_on(until("the operations", || pending.load(Ordering::SeqCst) == OPERATIONS));
    assert_eq!(ends.lock().unwrap().len(), 0, "all are pending");
    end(jobs, job);
    callers.block_on(until("the end of the operations", || ends.lock().unwrap().len() == OPERATIONS));
    for end in ends.lock().unwrap().iter() {
        assert_eq!(*end, Fault::Shutdown);
    }
    let waited = callers.block_on(soon("the end of the wait for a restart", waiting)).unwrap();
    assert!(matches!(waited, Err(posthaste::Error::Fault(Fault::Shutdown))), "{waited:?}");
}

case!(fault_a_runtime_that_shuts_down_ends_ten_thousand_pending_operations);
fn fault_a_runtime_that_shuts_down_ends_ten_thousand_pending_operations() {
    // Whoever drives the contexts: the runtime itself, or a thread of the library.
    for driver in ["task", "thread"] {
        let many = options().env("POSTHASTE_CREDITS", "65536").env("POSTHASTE_DRIVER", driver);
        run_unjoined(2, many, || {
            ten_thousand_pending(|runtime, _job| runtime.shutdown_timeout(Duration::from_secs(20)))
        });
    }
}

case!(fault_leaving_a_job_ends_ten_thousand_pending_operations);
fn fault_leaving_a_job_ends_ten_thousand_pending_operations() {
    // Nine tenths of them wait for credit.
    let few = options().env("POSTHASTE_CREDITS", "1000");
    run_unjoined(2, few, || {
        ten_thousand_pending(|runtime, job| {
            runtime.block_on(async { soon("the leave", job.leave()).await.unwrap() })
        });
    });
}

case!(fault_a_send_whose_options_change_amid_it_loses_no_credit);
fn fault_a_send_whose_options_change_amid_it_loses_no_credit() {
    run(2, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let (note, mut notes) = job.stream("note").unwrap();
        job.barrier().await.unwrap();
        for round in 0..5u64 {
            if job.rank() == Rank(1) {
                job.barrier().await.unwrap();
                for number in [2 * round, 2 * round + 1] {
                    let got = soon("a message", notes.recv()).await.unwrap();
                    assert_eq!((&got.bytes()[..], got.info()), (&number.to_ne_bytes()[..], &[][..]));
                }
                continue;
            }
            note.send(Rank(1), (2 * round).to_ne_bytes()).await.unwrap();
            if round == 4 {
                let mut second = note.multicast([Rank(1)], (2 * round + 1).to_ne_bytes());
                assert!(futures::poll!(&mut second).is_pending());
                job.barrier().await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
                soon("the second", second.info(&[0; 113])).await.unwrap();
                continue;
            }
            let mut second = note.send(Rank(1), (2 * round + 1).to_ne_bytes());
            assert!(futures::poll!(&mut second).is_pending());
            job.barrier().await.unwrap();
            // It gets the credit of the first, as what it was when it began to wait.
            tokio::time::sleep(Duration::from_millis(20)).await;
            // If they were heard, each of the first two would cost a credit, and the others would begin anew.
            let second = match round {
                0 => second.info(&[0; 113]),
                1 => second.to_context(posthaste::ContextId(7)),
                2 => second.relaxed(),
                _ => second.sequential(),
            };
            soon("the second", second).await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}
