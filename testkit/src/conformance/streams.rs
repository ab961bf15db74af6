//! Long messages, and first-packet handlers.

use super::requests::quietly;
use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, Received, World};
use bytes::BytesMut;
use posthaste_core::descriptor::MAX_INFO;
use posthaste_core::engine::{Payload, SendArgs};
use posthaste_core::protocol::{Accept, Flow};
use posthaste_core::{Fault, Rank, SendError};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A protocol whose first-packet handler reads from the info what to do: the limit, or to discard the message; and counts how
/// often it is asked.
fn choosy(log: &Log, flow: Flow, asked: &Arc<AtomicUsize>) -> Probe {
    let (log, whole_log, asked) = (log.clone(), log.clone(), asked.clone());
    let whole = Probe::new("choosy", move |scope, message| {
        whole_log.arrived(scope.me(), "", &message);
        if flow == Flow::Credited {
            scope.consumed(message.credit());
        }
    });
    whole.flow(flow).accept(move |scope, first| {
        asked.fetch_add(1, Ordering::Relaxed);
        let (source, info, at, log) = (first.source, first.info.to_vec(), scope.me(), log.clone());
        let limit = u32::from_le_bytes(info[1..5].try_into().expect("a limit")) as usize;
        let total = first.total as usize;
        match info[0] {
            0 => Accept::Whole,
            1 => Accept::Discard,
            _ => Accept::Fill {
                buffer: BytesMut::from(&b"head"[..]),
                limit,
                done: Box::new(move |_, buffer| {
                    assert_eq!(&buffer[..4], b"head");
                    assert_eq!(buffer.len(), 4 + limit.min(total));
                    log.push(Received {
                        at,
                        source,
                        protocol: String::new(),
                        info,
                        bytes: buffer[4..].to_vec(),
                    });
                }),
            },
        }
    })
}

/// A receiver may take less than is sent (D09), or nothing; the sender does not see a difference.
pub fn a_first_packet_handler_may_take_less<H: Harness>(harness: H) {
    take_less(&mut World::new(harness, 2), Flow::Inline);
}

/// What went into a buffer or nowhere gives its credit back, as what was consumed does.
pub fn a_credited_first_packet_handler_may_take_less<H: Harness>(harness: H) {
    take_less(&mut World::with(harness, 2, |setup| setup.config.credits = 2), Flow::Credited);
}

fn take_less<H: Harness>(world: &mut World<H>, flow: Flow) {
    let (log, asked) = (Log::default(), Arc::default());
    for rank in world.ranks() {
        world.register(rank, choosy(&log, flow, &asked));
    }
    let eager = world.caps().max_eager;
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let mut messages = Vec::new();
    let mut expected = Vec::new();
    for len in [0, 5, 10, 11, eager, eager + 1, 3 * eager + 5] {
        for (what, limit) in [(2, 0), (2, 10), (0, 0), (2, eager), (1, 0), (2, 1 << 30)] {
            let mut message =
                Message::filled(from, to, posthaste_core::ProtocolId(0), messages.len(), 0, len);
            message.info = vec![what];
            message.info.extend_from_slice(&(limit as u32).to_le_bytes());
            message.info.resize(5 + messages.len() % (MAX_INFO - 4), 9);
            messages.push(message.clone());
            if what != 1 {
                message.payload.truncate(if what == 2 { limit } else { len });
                expected.push(message);
            }
        }
    }
    let count = messages.len();
    world.send_all(&mut [Outbox::new(from, messages)]);
    world.until("everything arrives", |_| {
        log.len() >= expected.len() && asked.load(Ordering::Relaxed) >= count
    });
    world.a_while();
    log.check(from, to, &expected);
    assert_eq!(asked.load(Ordering::Relaxed), count, "once for each");
}

/// The longest message arrives whole.
pub fn the_longest_message_arrives_and_a_longer_one_is_refused<H: Harness>(harness: H) {
    const LONGEST: usize = 50_000;
    let mut world = World::with(harness, 2, |setup| setup.config.max_message = LONGEST as u64);
    let log = Log::default();
    let protocol = world.record("long", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let longer = vec![3; LONGEST + 1];
    let args = SendArgs { target: to, protocol, cookie: 0, info: &[], relaxed: false };
    world.enter(from, |scope| match scope.give(&args, Payload::Borrowed(&longer)) {
        Err((SendError::TooLong { .. }, payload)) => assert_eq!(payload.len(), LONGEST + 1),
        other => panic!("{other:?}"),
    });
    let messages: Vec<_> = [LONGEST, 3, LONGEST - 1]
        .iter()
        .enumerate()
        .map(|(n, &len)| Message::filled(from, to, protocol, n, n, len))
        .collect();
    world.send_all(&mut [Outbox::new(from, messages.clone())]);
    world.until("everything arrives", |_| log.len() == messages.len());
    log.check(from, to, &messages);
}

/// A first-packet handler that panics, and a filled handler that panics, cost their message and nothing else.
pub fn a_panicking_first_packet_handler_is_contained<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    for rank in world.ranks() {
        let panics = || -> Accept { std::panic::panic_any("a handler of a test") };
        world.register(rank, Probe::recording("first", &log).accept(move |_, _| panics()));
        let fill = move || Accept::Fill {
            buffer: BytesMut::new(),
            limit: 10,
            done: Box::new(move |_, _| drop(panics())),
        };
        world.register(rank, Probe::recording("filled", &log).accept(move |_, _| fill()));
    }
    let good = world.record("good", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let long = world.caps().max_eager * 2 + 1;
    let bad =
        |protocol: u16, len: usize| Message::new(Rank(1), posthaste_core::ProtocolId(protocol), vec![1; len]);
    let expected: Vec<_> =
        (0..4).map(|n| Message::filled(from, to, good, n, n, if n == 2 { long } else { n })).collect();
    let [a, b, c, d] = [0, 1, 2, 3].map(|n| expected[n].clone());
    let messages =
        [bad(0, 5).request(), a, bad(0, long).request(), b, bad(1, 5), c, bad(1, long).request(), d];
    let mut outboxes = [Outbox::new(from, messages)];
    quietly(|| {
        world.send_all(&mut outboxes);
        world.until("the good ones arrive", |_| log.len() == 4);
    });
    log.check(from, to, &expected);
    for n in [0, 2, 6] {
        assert_eq!(
            outboxes[0].answers[&n].as_ref().expect_err("it panicked"),
            &Fault::RemotePanicked(Rank(1))
        );
    }
    assert_eq!(world.handle(to).stats().panics, 4);
    assert!(world.errors(Rank(0)).is_empty() && world.errors(Rank(1)).is_empty());
}
