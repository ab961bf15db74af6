//! The order of messages, and what becomes of those that wait.

use crate::support::{Random, case, options, payload, run, soon};
use futures::{FutureExt, StreamExt};
use posthaste::components::core::Face;
use posthaste::{Fault, Message, Rank, Scope, SendError, TrySendError};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

case!(m_d15_matched_messages_keep_their_order_and_relaxed_ones_arrive_once);
fn m_d15_matched_messages_keep_their_order_and_relaxed_ones_arrive_once() {
    const COUNT: u64 = 2000;
    // A narrow lane: most sends wait in the queue, where relaxed ones may overtake.
    let narrow = options().env("POSTHASTE_LANE_BYTES", "1024");
    run(2, narrow, async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let seen: Arc<Mutex<Vec<(bool, u64)>>> = Arc::default();
        let log = seen.clone();
        let message = job
            .register("ordered", move |m: Message, _: &mut Scope| {
                log.lock().unwrap().push((m.info() == b"relaxed", m.read::<u64>(0).unwrap()));
                count.add(1);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            let mut random = Random(15);
            // Many more are under way at once than the queue has room for: matched sends are dispatched in the order in which
            // they were started.
            let mut sends = Vec::new();
            for number in 0..COUNT {
                let len = [8, 40, 3000, 9000][random.below(4) as usize];
                let mut bytes = payload(number, len);
                bytes[..8].copy_from_slice(&number.to_ne_bytes());
                let send = message.send(Rank(1), bytes);
                sends.push(if number % 3 == 0 { send.info(b"relaxed").relaxed() } else { send });
            }
            // Without a budget: a send that has to yield first has not been started.
            for result in tokio::task::unconstrained(futures::future::join_all(sends)).await {
                result.unwrap();
            }
        } else {
            soon("all messages", arrived.reach(COUNT)).await;
            let seen = seen.lock().unwrap().clone();
            let matched: Vec<u64> = seen.iter().filter(|entry| !entry.0).map(|entry| entry.1).collect();
            assert_eq!(matched, (0..COUNT).filter(|number| number % 3 != 0).collect::<Vec<u64>>());
            let mut relaxed: Vec<u64> = seen.iter().filter(|entry| entry.0).map(|entry| entry.1).collect();
            relaxed.sort_unstable();
            assert_eq!(relaxed, (0..COUNT).filter(|number| number % 3 == 0).collect::<Vec<u64>>());
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d15_sends_that_wait_for_credit_keep_their_order);
/// Far more under way at once than there is credit for, in several tasks and protocols: those of each protocol arrive in the
/// order in which they were begun, requests among them, and those that are taken back meanwhile never.
fn m_d15_sends_that_wait_for_credit_keep_their_order() {
    const COUNT: u64 = 500;
    let is_dropped = |number: u64| number % 7 == 3;
    run(2, options().env("POSTHASTE_CREDITS", "3"), async |job| {
        let (one, mut ones) = job.stream("one").unwrap();
        let (two, mut twos) = job.stream("two").unwrap();
        let asked: Arc<Mutex<Vec<u64>>> = Arc::default();
        let log = asked.clone();
        let ask = job
            .service_inline("ask", move |m, _| {
                log.lock().unwrap().push(m.read::<u64>(0).unwrap());
                Ok(m.to_bytes().into())
            })
            .unwrap();
        if job.rank() == Rank(0) {
            let ways = (0..COUNT).map(|number| {
                let (one, two, ask) = (&one, &two, &ask);
                async move {
                    let bytes = number.to_ne_bytes();
                    match number % 3 {
                        0 => one.send(Rank(1), bytes).await.unwrap(),
                        1 => two.send_slice(Rank(1), &bytes).await.unwrap(),
                        _ => assert_eq!(ask.call_bytes(Rank(1), bytes).await.unwrap().as_bytes(), bytes),
                    }
                }
            });
            let mut ways: Vec<_> = ways.map(|way| Some(Box::pin(way))).collect();
            let waits = tokio::task::unconstrained(async {
                let mut waits = 0_u64;
                for way in &mut ways {
                    match futures::poll!(way.as_mut().unwrap().as_mut()) {
                        std::task::Poll::Pending => waits += 1,
                        std::task::Poll::Ready(()) => *way = None,
                    }
                }
                waits
            });
            assert!(waits.await > COUNT / 2, "there is credit without end");
            // The first ones may have been sent.
            for (number, way) in (0..COUNT).zip(&mut ways) {
                if is_dropped(number) && number > 100 {
                    *way = None;
                }
            }
            job.barrier().await.unwrap();
            soon("all", futures::future::join_all(ways.into_iter().flatten())).await;
        } else {
            // Nothing of the streams is read before some are taken back. Requests are answered all the while.
            job.barrier().await.unwrap();
            let arrive = |way: u64| (0..COUNT).filter(move |n| n % 3 == way && !(is_dropped(*n) && *n > 100));
            let reads = [(&mut ones, 0), (&mut twos, 1)].map(|(stream, way)| async move {
                for number in arrive(way) {
                    let message = soon("the next of a stream", stream.next()).await.unwrap();
                    assert_eq!(message.read::<u64>(0), Some(number));
                }
            });
            futures::future::join_all(reads).await;
            job.barrier().await.unwrap();
            let asked = asked.lock().unwrap().clone();
            assert!(asked.is_sorted(), "{asked:?}");
            let kept: Vec<u64> = asked.into_iter().filter(|n| !(is_dropped(*n) && *n > 100)).collect();
            assert_eq!(kept, arrive(2).collect::<Vec<_>>());
            return;
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d15_sends_complete_in_the_order_in_which_they_were_started);
fn m_d15_sends_complete_in_the_order_in_which_they_were_started() {
    let narrow =
        options().env("POSTHASTE_LANE_BYTES", "1024").delay(1, std::time::Duration::from_millis(300));
    run(2, narrow, async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("ordered", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        if job.rank() == Rank(0) {
            let ended: Mutex<Vec<usize>> = Mutex::default();
            let sends = (0..100).map(|number| {
                let (message, ended) = (&message, &ended);
                async move {
                    message
                        .send(Rank(1), payload(1, if number % 2 == 0 { 20_000 } else { 64 }))
                        // Matched ones arrive in this order, but one that finds room may be seen to end before an earlier one.
                        .sequential()
                        .await
                        .unwrap();
                    ended.lock().unwrap().push(number);
                }
            });
            futures::future::join_all(sends).await;
            assert_eq!(*ended.lock().unwrap(), (0..100).collect::<Vec<_>>());
        } else {
            soon("all messages", arrived.reach(100)).await;
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d15_sequential_sends_end_in_order_and_none_passes_another);
/// Sends of several protocols, of which some wait for credit: sequential ones end in the order in which they were begun,
/// where matched ones of another protocol would pass those that wait.
fn m_d15_sequential_sends_end_in_order_and_none_passes_another() {
    const COUNT: u64 = 60;
    run(2, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let (credited, mut stream) = job.stream("credited").unwrap();
        let arrived = job.counter();
        let (count, seen) = (arrived.clone(), Arc::<Mutex<Vec<u64>>>::default());
        let log = seen.clone();
        let inline = job
            .register("inline", move |m: Message, _: &mut Scope| {
                log.lock().unwrap().push(m.read::<u64>(0).unwrap());
                count.add(1);
            })
            .unwrap();
        let way = |number: u64| if number.is_multiple_of(3) { &inline } else { &credited };
        if job.rank() == Rank(0) {
            let ended: Mutex<Vec<u64>> = Mutex::default();
            let sends = (0..COUNT).map(|number| {
                let (ended, way) = (&ended, way(number));
                async move {
                    let mut bytes = payload(number, [8, 40, 3000, 300_000][number as usize % 4]);
                    bytes[..8].copy_from_slice(&number.to_ne_bytes());
                    way.send(Rank(1), bytes).sequential().await.unwrap();
                    ended.lock().unwrap().push(number);
                }
            });
            soon("all of them", futures::future::join_all(sends)).await;
            assert_eq!(*ended.lock().unwrap(), (0..COUNT).collect::<Vec<_>>());
            // One that is dropped in the line, or amid its turn, keeps nobody behind it.
            let mut first = credited.send(Rank(1), b"no credit").sequential();
            let mut second = inline.send(Rank(1), b"in the line").sequential();
            while futures::poll!(&mut first).is_ready() {
                first = credited.send(Rank(1), b"no credit").sequential();
            }
            assert!(futures::poll!(&mut second).is_pending(), "it passed the first one");
            let late = inline.send(Rank(1), b"late").sequential().deadline(Duration::from_millis(20)).await;
            assert_eq!(late, Err(SendError::Fault(Fault::DeadlineExceeded)));
            assert!(inline.send(Rank(1), b"not now").sequential().try_send().is_err());
            drop((second, first));
            soon("the line", inline.send(Rank(1), COUNT.to_ne_bytes()).sequential()).await.unwrap();
        } else {
            // By now all of them wait behind the first that wants credit.
            tokio::time::sleep(Duration::from_millis(300)).await;
            for number in (0..COUNT).filter(|number| number % 3 != 0) {
                let message = soon("the next of the stream", stream.next()).await.unwrap();
                assert_eq!(message.read::<u64>(0), Some(number));
            }
            soon("all messages", arrived.reach(COUNT / 3 + 1)).await;
            let expected: Vec<u64> = (0..COUNT).filter(|number| number % 3 == 0).chain([COUNT]).collect();
            assert_eq!(*seen.lock().unwrap(), expected);
        }
        job.barrier().await.unwrap();
    });
}

case!(m_d15_who_waits_behind_a_forgotten_sequential_send_is_told_of_the_end);
/// One that is forgotten amid its turn holds up those behind it, but not for longer than the context lives.
fn m_d15_who_waits_behind_a_forgotten_sequential_send_is_told_of_the_end() {
    run(1, options().env("POSTHASTE_CREDITS", "1").body_leaves(), async |job| {
        let (credited, stream) = job.stream("credited").unwrap();
        credited.send(job.rank(), b"takes the credit").await.unwrap();
        let mut first = credited.send(job.rank(), b"no credit").sequential();
        assert!(futures::poll!(&mut first).is_pending());
        std::mem::forget(first);
        let behind = credited.clone();
        let me = job.rank();
        let waits = tokio::spawn(async move { behind.send(me, b"behind it").sequential().await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waits.is_finished());
        job.leave().await.unwrap();
        let end = soon("the end of who waits", waits).await.unwrap();
        assert_eq!(end, Err(SendError::Fault(Fault::Shutdown)));
        assert!(credited.send(me, b"too late").sequential().await.is_err());
        drop(stream);
    });
}

case!(m_d15_borrowed_sends_keep_their_order_and_are_taken_once);
fn m_d15_borrowed_sends_keep_their_order_and_are_taken_once() {
    const COUNT: u64 = 300;
    let length = |number: u64| {
        let lengths = [8, 16, 31, 64, 3000, 9000, if number.is_multiple_of(25) { 5 << 20 } else { 2048 }];
        lengths[Random(number).below(7) as usize]
    };
    let numbered = move |number: u64| {
        let mut bytes = payload(number, length(number));
        bytes[..8].copy_from_slice(&number.to_ne_bytes());
        bytes
    };
    // A narrow lane: many of them find no room, and wait in the queue.
    run(2, options().env("POSTHASTE_LANE_BYTES", "1024").env("POSTHASTE_CREDITS", "16"), async |job| {
        let arrived = job.counter();
        let (count, seen) = (arrived.clone(), Arc::<Mutex<Vec<u64>>>::default());
        let log = seen.clone();
        let message = job
            .register("borrowed", move |m: Message, _: &mut Scope| {
                let number = m.read::<u64>(0).unwrap();
                log.lock().unwrap().push(if m.bytes() == numbered(number) { number } else { u64::MAX });
                count.add(1);
            })
            .unwrap();
        // Nothing of a stream goes out at once, and much of it waits for credit.
        let (credited, mut stream) = job.stream("credited").unwrap();
        if job.rank() == Rank(0) {
            for number in 0..COUNT {
                let mut bytes = numbered(number);
                drop(message.send_slice(Rank(1), &bytes));
                for way in [&message, &credited] {
                    let mut send = way.send_slice(Rank(1), &bytes);
                    (&mut send).await.unwrap();
                    // Whoever polls once more sends nothing twice.
                    assert_eq!(futures::poll!(&mut send), std::task::Poll::Ready(Ok(())));
                }
                // The source is reusable.
                bytes.fill(0xee);
            }
        } else {
            // By the time it takes the first one, the sender's credit is used up.
            tokio::time::sleep(Duration::from_millis(300)).await;
            for number in 0..COUNT {
                let message = soon("the next of the stream", stream.next()).await.unwrap();
                assert!(message.to_bytes() == numbered(number), "{number} of the stream");
            }
            soon("all messages", arrived.reach(COUNT)).await;
        }
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            assert_eq!(*seen.lock().unwrap(), (0..COUNT).collect::<Vec<_>>());
        }
    });
}

case!(a_send_that_waits_gives_its_payload_back);
/// What waits for credit with the engine is taken back by whoever tries to send it, or asks for its payload.
fn a_send_that_waits_gives_its_payload_back() {
    run(1, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let (credited, mut stream) = job.stream("credited").unwrap();
        let me = job.rank();
        credited.send(me, b"takes the credit").await.unwrap();
        let long = payload(3, 5000);
        let mut nobody = Context::from_waker(Waker::noop());
        for bytes in [b"short".to_vec(), long.clone()] {
            // Also where another thread was at the context when it was begun, and whether that one has it still.
            for pause in [Duration::ZERO, Duration::from_millis(1)] {
                let mut tried = credited.send(me, bytes.clone());
                assert!(futures::poll!(&mut tried).is_pending());
                tokio::time::sleep(pause).await;
                match tried.try_send() {
                    Err(TrySendError::Full(back)) => assert_eq!(back.into_bytes(), bytes),
                    other => panic!("{other:?}"),
                }
                let mut asked = credited.send(me, bytes.clone());
                assert!(futures::poll!(&mut asked).is_pending());
                tokio::time::sleep(pause).await;
                assert_eq!(asked.into_payload().map(|back| back.into_bytes()), Some(bytes.clone().into()));
            }
            // Whoever is at the context begins what is tried meanwhile when it leaves.
            let mut left = credited.send(me, bytes.clone());
            while job.handle().enter(|_| assert!(left.poll_unpin(&mut nobody).is_pending())).is_err() {
                tokio::task::yield_now().await;
            }
            assert_eq!(left.into_payload().map(|back| back.into_bytes()), Some(bytes.clone().into()));
            let late = credited.send(me, bytes.clone()).deadline(Duration::from_millis(20));
            let mut late = std::pin::pin!(late);
            assert_eq!(late.as_mut().await, Err(SendError::Fault(Fault::DeadlineExceeded)));
        }
        let last = credited.send(me, long.clone());
        let (sent, _) = tokio::join!(last, async {
            let first = stream.next().await.unwrap();
            assert_eq!(first.text(), "takes the credit");
        });
        sent.unwrap();
        assert_eq!(soon("the last", stream.next()).await.unwrap().bytes(), long);
    });
}
