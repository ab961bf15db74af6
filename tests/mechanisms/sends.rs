//! Active messages: registration, info, handlers, order.

use crate::support::{Random, is_payload, options, others, payload, run, soon};
use futures::StreamExt;
use posthaste::{Bytes, CallError, Fault, Fill, First, Message, Rank, Scope, SendError, TrySendError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Lengths in bytes around every way that a message may take: in the record, in a page, in fragments.
pub const LENGTHS: [usize; 16] = [
    0,
    1,
    7,
    8,
    16,
    17,
    31,
    32,
    4096,
    8192,
    65_536,
    1 << 20,
    (4 << 20) - 1,
    4 << 20,
    (4 << 20) + 1,
    20 << 20,
];

#[test]
fn m_d07_several_protocols_coexist() {
    run(3, options(), async |job| {
        let arrived = job.counter();
        let log: Arc<Mutex<Vec<(usize, u32, u64)>>> = Arc::default();
        let messages: Vec<_> = (0..20)
            .map(|protocol| {
                // Ranks register in different orders: what they agree on is the name.
                let protocol = (protocol + job.rank().index() * 7) % 20;
                let (arrived, log) = (arrived.clone(), log.clone());
                let handler = move |m: Message, _: &mut Scope| {
                    log.lock().unwrap().push((protocol, m.source().0, m.read::<u64>(0).unwrap()));
                    arrived.add(1);
                };
                (protocol, job.register(&format!("protocol {protocol}"), handler).unwrap())
            })
            .collect();
        for number in 0..10u64 {
            for (protocol, message) in &messages {
                for to in others(&job) {
                    message.send(to, (number << 8 | *protocol as u64).to_ne_bytes()).await.unwrap();
                }
            }
        }
        soon("all messages", arrived.reach(400)).await;
        let log = log.lock().unwrap().clone();
        for source in others(&job) {
            for protocol in 0..20 {
                let numbers: Vec<u64> =
                    log.iter().filter(|e| e.0 == protocol && e.1 == source.0).map(|e| e.2).collect();
                let expected: Vec<u64> = (0..10).map(|number| number << 8 | protocol as u64).collect();
                assert_eq!(numbers, expected, "protocol {protocol} from rank {source}");
            }
        }
        job.barrier().await.unwrap();
    });
}

#[test]
fn m_d08_info_of_0_to_112_bytes_travels_with_every_kind_of_message() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("info", move |m: Message, _: &mut Scope| {
                let len = m.info().len();
                assert!(is_payload(len as u64, m.info()), "info of {len} bytes");
                assert!(is_payload(m.len() as u64, &m.bytes()), "payload of {} bytes", m.len());
                count.add(1 + 1000 * len as u64);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            for len in 0..=112usize {
                // In the record, in a page, in fragments.
                let size = [16, 100_000, 5 << 20][if len % 16 == 0 { len / 16 % 3 } else { len % 2 }];
                let mut info = payload(len as u64, len);
                let send = message.send(Rank(1), payload(size as u64, size)).info(&info);
                // Copied before the call returns.
                info.fill(0);
                send.await.unwrap();
            }
        } else {
            let all: u64 = (0..=112).sum();
            soon("all messages", arrived.reach(113 + 1000 * all)).await;
            assert_eq!(arrived.value(), 113 + 1000 * all);
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

#[test]
fn m_d09_a_first_packet_handler_chooses_the_buffer_and_may_accept_less() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let wrong: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = wrong.clone();
        let message = job
            .register_first_packet("fill", move |first: First<'_>, _: &mut Scope| {
                let limit = usize::from_ne_bytes(first.info[..8].try_into().unwrap());
                let total = first.total as usize;
                let (count, log) = (count.clone(), log.clone());
                Fill::Into {
                    buffer: bytes::BytesMut::from(&b"own:"[..]),
                    limit,
                    done: Box::new(move |_, buffer| {
                        let expected = &payload(total as u64, total)[..limit.min(total)];
                        if &buffer[..4] != b"own:" || &buffer[4..] != expected {
                            log.lock().unwrap().push(format!("{} of {total}, limit {limit}", buffer.len()));
                        }
                        count.add(1);
                    }),
                }
            })
            .unwrap();
        let after = job.register("after", |_: Message, _: &mut Scope| {}).unwrap();
        let limits = [0, 1, 100, 70_000, usize::MAX >> 1];
        if job.rank() == Rank(0) {
            for len in LENGTHS {
                for limit in limits {
                    let send = message.send(Rank(1), payload(len as u64, len)).info(&limit.to_ne_bytes());
                    // What is dropped is no error here.
                    send.await.unwrap();
                }
            }
            after.send(Rank(1), b"").await.unwrap();
        } else {
            soon("all messages", arrived.reach((LENGTHS.len() * limits.len()) as u64)).await;
            assert_eq!(*wrong.lock().unwrap(), Vec::<String>::new());
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

#[test]
fn m_d10_a_short_message_is_lent_for_the_call() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("short", move |m: Message, _: &mut Scope| {
                // Lent: a plain slice, no lease. A message of no bytes is one, too.
                let bytes = m.as_slice().expect("a short message is in private memory");
                assert!(is_payload(bytes.len() as u64, bytes));
                assert_eq!(m.is_empty(), bytes.is_empty());
                count.add(1);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            for len in (0..256).chain([0, 0, 0]) {
                message.send(Rank(1), payload(len as u64, len)).await.unwrap();
            }
        } else {
            soon("all messages", arrived.reach(259)).await;
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

#[test]
fn m_d11_every_length_arrives_whole_and_in_order() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let seen: Arc<Mutex<Vec<(usize, bool)>>> = Arc::default();
        let log = seen.clone();
        let message = job
            .register("any", move |m: Message, _: &mut Scope| {
                log.lock().unwrap().push((m.len(), is_payload(m.len() as u64, &m.bytes())));
                count.add(1);
            })
            .unwrap();
        // Both directions at once; owned and borrowed sources take turns.
        let peer = Rank(1 - job.rank().0);
        for (number, len) in LENGTHS.into_iter().enumerate() {
            let bytes = payload(len as u64, len);
            match number % 2 {
                0 => message.send(peer, &bytes[..]).await.unwrap(),
                _ => message.send(peer, Bytes::from(bytes)).await.unwrap(),
            }
        }
        soon("all messages", arrived.reach(LENGTHS.len() as u64)).await;
        let expected: Vec<_> = LENGTHS.into_iter().map(|len| (len, true)).collect();
        assert_eq!(*seen.lock().unwrap(), expected);
        job.barrier().await.unwrap();
    });
}

#[test]
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

/// Far more under way at once than there is credit for, in several tasks and protocols: those of each protocol arrive in the
/// order in which they were begun, requests among them, and those that are taken back meanwhile never.
#[test]
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

#[test]
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

/// Sends of several protocols, of which some wait for credit: sequential ones end in the order in which they were begun,
/// where matched ones of another protocol would pass those that wait.
#[test]
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

/// One that is forgotten amid its turn holds up those behind it, but not for longer than the context lives.
#[test]
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

#[test]
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

/// What waits for credit with the engine is taken back by whoever tries to send it, or asks for its payload.
#[test]
fn a_send_that_waits_gives_its_payload_back() {
    run(1, options().env("POSTHASTE_CREDITS", "1"), async |job| {
        let (credited, mut stream) = job.stream("credited").unwrap();
        let me = job.rank();
        credited.send(me, b"takes the credit").await.unwrap();
        let long = payload(3, 5000);
        for bytes in [b"short".to_vec(), long.clone()] {
            let mut tried = credited.send(me, bytes.clone());
            let mut asked = credited.send(me, bytes.clone());
            assert!(futures::poll!(&mut tried).is_pending() && futures::poll!(&mut asked).is_pending());
            match tried.try_send() {
                Err(TrySendError::Full(back)) => assert_eq!(back.into_bytes(), bytes),
                other => panic!("{other:?}"),
            }
            assert_eq!(asked.into_payload().map(|back| back.into_bytes()), Some(bytes.clone().into()));
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

#[test]
fn sends_to_oneself_arrive() {
    run(1, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("self", move |m: Message, _: &mut Scope| {
                assert!(is_payload(m.len() as u64, &m.bytes()));
                count.add(1);
            })
            .unwrap();
        for len in LENGTHS {
            message.send(Rank(0), payload(len as u64, len)).await.unwrap();
        }
        soon("all messages", arrived.reach(LENGTHS.len() as u64)).await;
        assert_eq!(job.stats().panics, 0);
    });
}

#[test]
fn m_d07_typed_messages_arrive_as_they_were_sent_and_another_type_is_refused() {
    #[derive(
        Clone, Copy, Debug, PartialEq, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
    )]
    #[repr(C)]
    struct Reading {
        at: [f64; 3],
        sensor: u32,
        flags: u32,
    }
    fn reading(from: Rank, number: u32) -> Reading {
        let place = f64::from(number);
        Reading { at: [place, -0.0, f64::MIN_POSITIVE * place], sensor: from.0, flags: !number }
    }
    run(3, options(), async |job| {
        let (values, arrived) = (Arc::new(Mutex::new(Vec::new())), job.counter());
        let (kept, count) = (values.clone(), arrived.clone());
        let message = job
            .register_typed("reading", move |value: Reading, from, _: &mut Scope| {
                kept.lock().unwrap().push((from, value));
                count.add(1);
            })
            .unwrap();
        // Rank 2 means something else by this name.
        let nobody = "nobody sends that here";
        let other = if job.rank() == Rank(2) {
            job.register_typed("other", move |_: [u16; 2], _, _: &mut Scope| panic!("{nobody}")).map(|_| None)
        } else {
            job.register_typed("other", move |_: u32, _, _: &mut Scope| panic!("{nobody}")).map(Some)
        };
        let (other, refused) = (other.unwrap(), job.counter());
        let count = refused.clone();
        job.on_error(move |fault| count.add(u64::from(fault == Fault::SchemaMismatch(Rank(2)))));
        job.barrier().await.unwrap();
        for number in 0..200 {
            for to in job.ranks() {
                message.send(to, &reading(job.rank(), number)).await.unwrap();
            }
        }
        soon("the readings", arrived.reach(600)).await;
        for from in job.ranks() {
            let values = values.lock().unwrap();
            let of_it = values.iter().filter(|(source, _)| *source == from).map(|(_, value)| *value);
            assert!(of_it.eq((0..200).map(|number| reading(from, number))), "of rank {from}, in order");
        }
        if let Some(other) = other {
            other.send(Rank(2), &7).await.unwrap();
            soon("the refusal", refused.reach(1)).await;
            let again = other.send(Rank(2), &7).await;
            assert_eq!(again, Err(SendError::Fault(Fault::SchemaMismatch(Rank(2)))));
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

#[test]
fn m_d07_messages_of_a_type_that_serde_encodes_arrive_as_they_were_and_other_types_are_refused() {
    use std::collections::BTreeMap;

    #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    enum Event {
        Joined { name: String, at: u64 },
        Said(Vec<Option<String>>),
        Counts(BTreeMap<u32, i64>),
        Left,
    }
    fn event(from: Rank, number: u64) -> Event {
        let text = "ab".repeat(number as usize % 700);
        match number % 4 {
            0 => Event::Joined { name: text, at: u64::MAX - number },
            1 => Event::Said(vec![None, Some(text), Some(format!("of {from}"))]),
            2 => Event::Counts(
                (0..number as u32 % 50).map(|at| (at, i64::from(from.0) - i64::from(at))).collect(),
            ),
            _ => Event::Left,
        }
    }
    /// Serde has no way to encode it.
    #[derive(serde::Deserialize)]
    struct Stubborn;
    impl serde::Serialize for Stubborn {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("it will not"))
        }
    }
    run(3, options(), async |job| {
        let (events, arrived) = (Arc::new(Mutex::new(Vec::new())), job.counter());
        let (kept, count) = (events.clone(), arrived.clone());
        let message = job
            .register_encoded("event", move |event: Event, from, _: &mut Scope| {
                kept.lock().unwrap().push((from, event));
                count.add(1);
            })
            .unwrap();
        // Who is told it tells it to rank 0, from inside the handler.
        let onward = message.clone();
        let relay = job.register_encoded("relay", move |event: Event, _, scope: &mut Scope| {
            let sent = onward.send_in(scope, posthaste::Endpoint::new(Rank(0), scope.me().context), &event);
            assert_eq!(sent, Ok(true));
        });
        let relay = relay.unwrap();
        let stubborn = job.register_encoded("stubborn", |_: Stubborn, _, _: &mut Scope| {}).unwrap();
        // Rank 2 means something else by this name.
        let other = if job.rank() == Rank(2) {
            job.register_encoded("other", |_: String, _, _: &mut Scope| panic!("dispatched")).map(|_| None)
        } else {
            job.register_encoded("other", |_: Event, _, _: &mut Scope| panic!("dispatched")).map(Some)
        };
        let (other, refused) = (other.unwrap(), job.counter());
        let count = refused.clone();
        job.on_error(move |fault| count.add(u64::from(fault == Fault::SchemaMismatch(Rank(2)))));
        job.barrier().await.unwrap();

        const EACH: u64 = 1500;
        let mine = |number| event(job.rank(), number);
        for number in 0..EACH {
            // One after the other, in all of the ways.
            if number % 3 == 0 {
                message.multicast(job.ranks(), &mine(number)).unwrap().await.unwrap();
            } else {
                for to in job.ranks() {
                    if number % 3 == 1 || !message.try_send(to, &mine(number)).unwrap() {
                        message.send(to, &mine(number)).unwrap().info(b"what").await.unwrap();
                    }
                }
            }
        }
        soon("the events", arrived.reach(3 * EACH)).await;
        for from in job.ranks() {
            let events = events.lock().unwrap();
            let of_it = events.iter().filter(|(source, _)| *source == from).map(|(_, event)| event.clone());
            assert!(of_it.eq((0..EACH).map(|number| event(from, number))), "of rank {from}, in order");
        }
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            relay.send(Rank(1), &Event::Left).unwrap().await.unwrap();
            soon("what was passed on", arrived.reach(3 * EACH + 1)).await;
            assert_eq!(events.lock().unwrap().last(), Some(&(Rank(1), Event::Left)));
            // Bytes that are no event are dropped where they arrive, and nothing else is.
            message.untyped().send(Rank(1), [0xff; 9]).await.unwrap();
            message.send(Rank(1), &Event::Left).unwrap().await.unwrap();
        } else if job.rank() == Rank(1) {
            soon("what follows them", arrived.reach(3 * EACH + 1)).await;
        }
        let unencodable = stubborn.send(Rank(0), &Stubborn).map(drop);
        assert!(matches!(unencodable, Err(CallError::Codec { what: "encode", .. })), "{unencodable:?}");
        assert!(matches!(stubborn.try_send(Rank(9), &Stubborn), Err(CallError::Codec { .. })));
        let nobody = message.try_send(Rank(9), &Event::Left);
        assert!(matches!(nobody, Err(CallError::Send(SendError::UnknownRank { .. }))), "{nobody:?}");
        if let Some(other) = other {
            other.send(Rank(2), &Event::Left).unwrap().await.unwrap();
            soon("the refusal", refused.reach(1)).await;
            let again = other.try_send(Rank(2), &Event::Left);
            assert_eq!(again, Err(CallError::Fault(Fault::SchemaMismatch(Rank(2)))));
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

/// What is borrowed has the options that what is owned has.
#[test]
fn borrowed_payloads_are_sent_with_info_in_line_and_in_time() {
    run(2, options().env("POSTHASTE_CREDITS", "4"), async |job| {
        const LENS: [usize; 6] = [0, 8, 100, 5_000, 70_000, 3 << 20];
        let (block, mut blocks) = job.stream("block").unwrap();
        job.barrier().await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let payloads: Vec<Vec<u8>> = LENS.iter().map(|len| payload(*len as u64, *len)).collect();
        let send = async {
            for round in 0..10_u32 {
                let sends = payloads.iter().enumerate().map(|(at, payload)| {
                    let header = [round, at as u32].map(u32::to_le_bytes).concat();
                    let send = block.send_slice(peer, payload).info(&header);
                    // Together they are more than there is credit for.
                    send.deadline(Duration::from_secs(60)).sequential()
                });
                for sent in futures::future::join_all(sends).await {
                    sent.unwrap();
                }
            }
        };
        let receive = async {
            for number in 0..10 * LENS.len() {
                let received = blocks.recv().await.unwrap();
                let header = [number / LENS.len(), number % LENS.len()];
                assert_eq!(received.info(), header.map(|word| (word as u32).to_le_bytes()).concat());
                assert!(received.into_bytes() == payloads[number % LENS.len()], "block {number}");
            }
        };
        soon("the blocks", async { tokio::join!(send, receive) }).await;
        // Nobody takes what comes now, and the wait for credit has its end.
        let late = loop {
            if let Err(error) = block.send_slice(peer, &payloads[2]).deadline(Duration::from_millis(50)).await
            {
                break error;
            }
        };
        assert_eq!(late, SendError::Fault(Fault::DeadlineExceeded));
        job.barrier().await.unwrap();
    });
}
