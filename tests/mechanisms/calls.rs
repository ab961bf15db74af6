//! Requests and replies.

use crate::support::{case, is_payload, options, payload, run, soon, until};
use posthaste::{Buffer, CallError, Fault, Rank, ServiceOptions};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
enum Request {
    Concat(Vec<String>),
    Bytes { seed: u64, bytes: Vec<u8> },
}

case!(an_answer_that_cannot_be_encoded_is_told_apart_from_such_a_request);
fn an_answer_that_cannot_be_encoded_is_told_apart_from_such_a_request() {
    run(2, options(), async |job| {
        /// Is nothing that can be written down.
        struct Unsayable;
        impl serde::Serialize for Unsayable {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("not today"))
            }
        }
        impl<'de> serde::Deserialize<'de> for Unsayable {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <()>::deserialize(deserializer).map(|()| Unsayable)
            }
        }
        let service = job.service("mute", |(): ()| async { Unsayable }).unwrap();
        let peer = Rank(1 - job.rank().0);
        let error = service.call(peer, ()).await.map(drop).unwrap_err();
        assert_eq!(error, CallError::Fault(Fault::Unencodable(peer)));
        assert!(error.to_string().contains("could not encode its answer"), "{error}");
        job.barrier().await.unwrap();
    });
}

case!(a_call_that_has_failed_and_is_kept_keeps_no_credit);
fn a_call_that_has_failed_and_is_kept_keeps_no_credit() {
    run(2, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let slow = job
            .service_inline("slow", |request, _| {
                if request.len() == 4 {
                    std::thread::sleep(Duration::from_millis(500));
                }
                Ok(request.to_bytes().into())
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            loop {
                let mut first = slow.call_bytes(Rank(1), "slow");
                let mut failed = slow.call_bytes(Rank(1), "other").deadline(Duration::from_millis(20));
                let is_late = futures::poll!(&mut first).is_pending() && (&mut failed).await.is_err();
                soon("the first answer", first).await.unwrap();
                soon("the credit", slow.call_bytes(Rank(1), "third")).await.unwrap();
                drop(failed);
                // On a busy machine the answer may come before the deadline is looked at.
                if is_late {
                    break;
                }
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(messages_for_a_service_that_ask_for_no_answer_keep_no_credit);
fn messages_for_a_service_that_ask_for_no_answer_keep_no_credit() {
    run(2, options().env("POSTHASTE_CREDITS", "4"), async |job| {
        use posthaste::components::protocols::{handler, service};
        let (messager, face) =
            (&**job.messager(), job.context_handle(posthaste::ContextId(0)).unwrap().clone());
        if job.rank() == Rank(0) {
            let flow = posthaste::components::core::protocol::Flow::Replied;
            let odd = handler::register_outgoing(messager, face, "odd", 0, flow).unwrap();
            job.barrier().await.unwrap();
            for number in 0..40u64 {
                soon("credit", odd.send(Rank(1), number.to_ne_bytes())).await.unwrap();
            }
        } else {
            let _odd =
                service::register_inline(messager, face, "odd", |request, _| Ok(request.to_bytes().into()));
            job.barrier().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(calls_are_typed_and_their_replies_find_their_callers);
fn calls_are_typed_and_their_replies_find_their_callers() {
    run(3, options(), async |job| {
        let service = job
            .service("typed", |request: Request| async move {
                match request {
                    Request::Concat(parts) => (parts.concat(), Vec::new()),
                    Request::Bytes { seed, bytes } => {
                        assert!(is_payload(seed, &bytes));
                        // Replies overtake one another.
                        tokio::time::sleep(Duration::from_millis(seed % 5)).await;
                        (String::new(), payload(seed + 1, bytes.len()))
                    }
                }
            })
            .unwrap();
        for to in job.ranks() {
            let parts = vec!["post".to_owned(), String::new(), "haste".to_owned()];
            assert_eq!(service.call(to, Request::Concat(parts)).await.unwrap().0, "posthaste");
        }
        // Small, in pages, streamed; many at once.
        let calls = (0..60u64).map(|seed| {
            let (service, size) = (&service, job.size() as u64);
            async move {
                let len = [10, 3000, 100_000, 5 << 20][if seed % 20 == 0 { 3 } else { seed as usize % 3 }];
                let request = Request::Bytes { seed, bytes: payload(seed, len) };
                let (_, reply) = service.call(Rank((seed % size) as u32), request).await.unwrap();
                assert_eq!(reply.len(), len);
                assert!(is_payload(seed + 1, &reply), "the reply of call {seed}");
            }
        });
        soon("the calls", futures::future::join_all(calls)).await;
        job.barrier().await.unwrap();
    });
}

case!(error_a_service_with_a_limit_is_busy_and_later_is_not);
fn error_a_service_with_a_limit_is_busy_and_later_is_not() {
    run(2, options(), async |job| {
        let gate = Arc::new(tokio::sync::Semaphore::new(0));
        let (running, inside) = (Arc::new(AtomicUsize::new(0)), gate.clone());
        let count = running.clone();
        let handler = move |number: u32, from: Rank| {
            let (inside, count) = (inside.clone(), count.clone());
            async move {
                count.fetch_add(1, Ordering::SeqCst);
                let _permit = inside.acquire().await.unwrap();
                count.fetch_sub(1, Ordering::SeqCst);
                number + from.0
            }
        };
        let service = job.service_with("busy", ServiceOptions { limit: 3 }, handler).unwrap();
        let open = job.service("open", move |()| {
            gate.add_permits(1000);
            async {}
        });
        let open = open.unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let first = futures::future::join_all((0..3).map(|number| service.call(Rank(1), number)));
            let (replies, ()) = tokio::join!(first, async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                for _ in 0..5 {
                    let refused = service.call(Rank(1), 9).await;
                    assert_eq!(refused, Err(CallError::Fault(Fault::Busy(Rank(1)))));
                }
                open.call(Rank(1), ()).await.unwrap();
            });
            assert_eq!(replies, [Ok(0), Ok(1), Ok(2)]);
            assert_eq!(service.call(Rank(1), 5).await, Ok(5), "no longer busy");
        }
        job.barrier().await.unwrap();
        assert_eq!(running.load(Ordering::SeqCst), 0);
    });
}

case!(fault_a_panicking_handler_is_told_to_the_caller_and_the_rank_goes_on);
fn fault_a_panicking_handler_is_told_to_the_caller_and_the_rank_goes_on() {
    run(2, options(), async |job| {
        let asynchronous = job
            .service("async", |number: u64| async move {
                assert_ne!(number % 3, 0, "as the test wants it");
                number
            })
            .unwrap();
        let inline = job
            .service_inline("inline", |m, _| {
                let number = m.read::<u64>(0).unwrap();
                assert_ne!(number % 3, 0, "as the test wants it");
                Ok(number.to_ne_bytes().into())
            })
            .unwrap();
        let plain = job
            .register("plain", |_: posthaste::Message, _: &mut posthaste::Scope| panic!("as wanted"))
            .unwrap();
        let peer = Rank(1 - job.rank().0);
        let panicked = CallError::Fault(Fault::RemotePanicked(peer));
        for number in 0..30u64 {
            plain.send(peer, b"").await.unwrap();
            let reply = asynchronous.call(peer, number).await;
            let answer = inline.call_bytes(peer, number.to_ne_bytes()).await;
            if number % 3 == 0 {
                assert_eq!(reply, Err(panicked.clone()));
                assert_eq!(answer.unwrap_err(), panicked);
            } else {
                assert_eq!(reply, Ok(number));
                assert_eq!(answer.unwrap().as_bytes(), number.to_ne_bytes());
            }
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 40, "30 plain and 10 inline");
    });
}

case!(error_a_call_ends_at_its_deadline_and_its_late_reply_harms_nobody);
fn error_a_call_ends_at_its_deadline_and_its_late_reply_harms_nobody() {
    run(2, options(), async |job| {
        let slow = job
            .service("slow", |millis: u64| async move {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                millis
            })
            .unwrap();
        let never = job
            .service("never", |()| async {
                std::future::pending::<()>().await;
            })
            .unwrap();
        let peer = Rank(1 - job.rank().0);
        let late = CallError::Fault(Fault::DeadlineExceeded);
        let mut expired = 0;
        while expired < 20 {
            match slow.call_within(peer, 60, Duration::from_millis(20)).await {
                // On a busy machine the answer may come before the deadline is looked at.
                Ok(60) => {}
                ended => {
                    assert_eq!(ended, Err(late.clone()));
                    expired += 1;
                }
            }
        }
        // The late replies arrive among those of other calls.
        for millis in 0..40 {
            assert_eq!(slow.call_within(peer, millis % 4, Duration::from_secs(30)).await, Ok(millis % 4));
        }
        let forever = (0..100).map(|_| never.call_within(peer, (), Duration::from_millis(50)));
        let ends = soon("the deadlines", futures::future::join_all(forever)).await;
        assert_eq!(ends, vec![Err(late); 100]);
        job.barrier().await.unwrap();
    });
}

case!(error_a_request_that_cannot_be_decoded_is_refused);
fn error_a_request_that_cannot_be_decoded_is_refused() {
    run(2, options(), async |job| {
        // An ill-behaved type: what it writes is not what it reads.
        #[derive(Debug, PartialEq)]
        struct Liar;
        impl serde::Serialize for Liar {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(&[0xff; 20])
            }
        }
        impl<'de> serde::Deserialize<'de> for Liar {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <(String, bool)>::deserialize(deserializer).map(|_| Liar)
            }
        }
        let service = job.service("liar", |_: Liar| async { 1u8 }).unwrap();
        let honest = job.service("honest", |text: String| async move { text }).unwrap();
        let peer = Rank(1 - job.rank().0);
        for _ in 0..10 {
            let refused = service.call(peer, Liar).await;
            assert_eq!(refused, Err(CallError::Fault(Fault::Undecodable(peer))));
            assert_eq!(honest.call(peer, "fine".into()).await.unwrap(), "fine");
        }
        job.barrier().await.unwrap();
    });
}

case!(calls_wait_for_credit_when_there_is_one);
fn calls_wait_for_credit_when_there_is_one() {
    let narrow = options().env("POSTHASTE_CREDITS", "1").env("POSTHASTE_LANE_BYTES", "1024");
    run(3, narrow, async |job| {
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (now, peak) = (running.clone(), most.clone());
        let service = job
            .service("one", move |number: u64| {
                let (now, peak) = (now.clone(), peak.clone());
                async move {
                    peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    now.fetch_sub(1, Ordering::SeqCst);
                    number * 2
                }
            })
            .unwrap();
        for to in job.ranks() {
            let calls = (0..200).map(|number| service.call(to, number));
            let replies = soon("the calls", futures::future::join_all(calls)).await;
            assert_eq!(replies, (0..200).map(|number| Ok(number * 2)).collect::<Vec<_>>());
        }
        job.barrier().await.unwrap();
        // One from each of three ranks.
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)), "{most:?} ran at once");
        until("the end of all handlers", || running.load(Ordering::SeqCst) == 0).await;
    });
}

case!(deadlines_are_never_met_too_early);
/// A deadline counts whole milliseconds, and the one in which it is set may be nearly over.
fn deadlines_are_never_met_too_early() {
    run(2, options(), async |job| {
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        for micros in (1000..3000).step_by(37) {
            let (began, wait) = (Instant::now(), Duration::from_micros(micros));
            let end = soon("a deadline", never.call_within(peer, (), wait)).await;
            assert_eq!(end, Err(CallError::Fault(Fault::DeadlineExceeded)));
            assert!(began.elapsed() >= wait, "{wait:?} were over after {:?}", began.elapsed());
        }
        job.barrier().await.unwrap();
    });
}

/// Polls it, and counts it as under way from its first poll to its end.
async fn counted<T>(under_way: &Cell<usize>, most: &Cell<usize>, operation: impl Future<Output = T>) -> T {
    let mut operation = std::pin::pin!(operation);
    let mut begins = true;
    std::future::poll_fn(|cx| {
        if std::mem::take(&mut begins) {
            under_way.set(under_way.get() + 1);
            most.set(most.get().max(under_way.get()));
        }
        let polled = operation.as_mut().poll(cx);
        if polled.is_ready() {
            under_way.set(under_way.get() - 1);
        }
        polled
    })
    .await
}

case!(operations_that_are_joined_are_under_way_together);
/// A future that looks until its operation has ended, as is best for one awaited alone, keeps those it is joined with from
/// beginning. That they do is learned within some hundred of them.
fn operations_that_are_joined_are_under_way_together() {
    const JOINED: usize = 40;
    const ROUNDS: usize = 100;
    run(2, options(), async |job| {
        let echo = job.service_inline("echo", |m, _| Ok(Buffer::copy(&m.bytes()))).unwrap();
        let twice = job.service("twice", async |number: u64| number * 2).unwrap();
        let window = job.shmalloc::<u64>(JOINED).await.unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let at_once = job.caps_of(peer).mappable;
        for kind in 0..4 {
            if kind >= 2 && at_once {
                // Puts and gets have ended when they have begun.
                continue;
            }
            let (under_way, most) = (Cell::new(0), Cell::new(0));
            // One side alone: what the other asks for would have waits end early.
            for round in 0..if job.rank() == Rank(0) { ROUNDS } else { 0 } {
                let (echo, twice, window) = (&echo, &twice, &window);
                let joined = (0..JOINED).map(|number| async move {
                    let word = (round * JOINED + number) as u64;
                    match kind {
                        0 => {
                            let answer = echo.call_bytes(peer, word.to_ne_bytes()).await.unwrap();
                            assert_eq!(answer.as_bytes(), word.to_ne_bytes());
                        }
                        1 => assert_eq!(twice.call(peer, word).await, Ok(word * 2)),
                        2 => window.put(peer, number, word).await.unwrap(),
                        _ => assert_eq!(
                            window.get(peer, number).await,
                            Ok(((ROUNDS - 1) * JOINED + number) as u64)
                        ),
                    }
                });
                let joined = joined.map(|operation| counted(&under_way, &most, operation));
                // Else whoever has no budget left begins to be polled, and no more.
                let joined = tokio::task::unconstrained(futures::future::join_all(joined));
                soon("what is joined", joined).await;
                assert_eq!(under_way.get(), 0);
                // One awaited alone before and behind them.
                assert_eq!(twice.call(peer, 1).await, Ok(2));
            }
            assert!(
                job.rank() != Rank(0) || most.get() > JOINED / 2,
                "{} of kind {kind} at once",
                most.get()
            );
            job.barrier().await.unwrap();
        }
    });
}
