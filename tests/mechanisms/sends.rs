//! Active messages: registration, info, handlers.

use crate::support::{case, is_payload, options, others, payload, run, soon};
use posthaste::{Bytes, CallError, Fault, Fill, First, Message, Rank, Scope, SendError};
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

case!(m_d07_several_protocols_coexist);
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

case!(m_d08_info_of_0_to_112_bytes_travels_with_every_kind_of_message);
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

case!(m_d09_a_first_packet_handler_chooses_the_buffer_and_may_accept_less);
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

case!(m_d10_a_short_message_is_lent_for_the_call);
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

case!(m_d11_every_length_arrives_whole_and_in_order);
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

case!(sends_to_oneself_arrive);
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

case!(m_d07_typed_messages_arrive_as_they_were_sent_and_another_type_is_refused);
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

case!(m_d07_messages_of_a_type_that_serde_encodes_arrive_as_they_were_and_other_types_are_refused);
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
            // While a thread drives the context, what is tried is given back.
            let tries = async {
                loop {
                    match other.try_send(Rank(2), &Event::Left) {
                        Ok(false) => tokio::task::yield_now().await,
                        end => break end,
                    }
                }
            };
            let again = soon("an end of trying", tries).await;
            assert_eq!(again, Err(CallError::Fault(Fault::SchemaMismatch(Rank(2)))));
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(borrowed_payloads_are_sent_with_info_in_line_and_in_time);
/// What is borrowed has the options that what is owned has.
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
