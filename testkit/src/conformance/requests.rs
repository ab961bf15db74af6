//! Requests and their answers.

use super::probe::bytes_of;
use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::engine::{Given, Payload, SendArgs};
use posthaste_core::protocol::{Flow, ReplyTo};
use posthaste_core::{Face, Fault, ProtocolId, Rank};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// The answer to a request: its bytes backwards, with one more.
fn answer(request: &[u8]) -> Vec<u8> {
    request.iter().rev().copied().chain([request.len() as u8]).collect()
}

fn echo(name: &str) -> Probe {
    Probe::new(name, |scope, message| {
        let bytes = answer(&bytes_of(&message.body));
        if let Some(to) = message.reply() {
            scope.reply(to, Ok(Payload::Borrowed(&bytes)));
        }
    })
}

/// Inline and replied requests of every length, between all pairs at once, to oneself too.
pub fn every_request_is_answered_with_its_own_answer<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    for rank in world.ranks() {
        world.register(rank, echo("inline"));
        world.register(rank, echo("replied").flow(Flow::Replied));
    }
    let sizes = world.sizes();
    let mut outboxes = Vec::new();
    let mut expected = Vec::new();
    for from in world.endpoints() {
        for to in world.endpoints() {
            let messages: Vec<_> = sizes
                .iter()
                .enumerate()
                .map(|(n, &len)| Message::filled(from, to, ProtocolId(n as u16 % 2), n, 0, len).request())
                .collect();
            outboxes.push(Outbox::new(from, messages.clone()));
            expected.push(messages);
        }
    }
    world.send_all(&mut outboxes);
    for (outbox, messages) in outboxes.iter().zip(&expected) {
        for (n, message) in messages.iter().enumerate() {
            let outcome = outbox.answers[&n].as_ref().expect("it is answered");
            assert!(outcome.as_bytes() == answer(&message.payload), "answer {n} to {}", outbox.from);
        }
    }
}

/// Requests that were not answered yet.
type OpenRequests = Arc<Mutex<VecDeque<(ReplyTo, Vec<u8>)>>>;

/// A replied protocol with one credit: a second request leaves when the first is answered, however late that is.
pub fn one_credit_allows_one_outstanding_request<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.credits = 1);
    let open = OpenRequests::default();
    for rank in world.ranks() {
        let open = open.clone();
        let probe = Probe::new("later", move |_, message| {
            let to = message.reply().expect("it is a request");
            open.lock().expect("no panic").push_back((to, bytes_of(&message.body)));
        });
        world.register(rank, probe.flow(Flow::Replied));
        world.register(rank, echo("inline"));
    }
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let task = |n: usize| {
        Outbox::new(
            from,
            (0..6).map(|m| Message::filled(from, to, ProtocolId(0), n * 10 + m, 0, n + m).request()),
        )
    };
    let mut outboxes: Vec<_> = (0..3).map(task).collect();
    let expected: Vec<Vec<Message>> =
        outboxes.iter().map(|outbox| outbox.queue.iter().cloned().collect()).collect();
    outboxes.push(Outbox::new(from, [Message::new(Rank(1), ProtocolId(1), *b"free").request()]));
    world.until("others are answered meanwhile", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        outboxes[3].is_done() && open.lock().expect("no panic").len() == 1
    });
    world.a_while();
    world.until("everything is answered", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        assert!(open.lock().expect("no panic").len() <= 1, "one credit, one request");
        let next = if world.random.chance(20) { open.lock().expect("no panic").pop_front() } else { None };
        if let Some((to, bytes)) = next {
            world.handle(at(Rank(1))).post(move |scope| {
                scope.reply(to, Ok(Payload::Borrowed(&answer(&bytes))));
            });
        }
        outboxes.iter().all(Outbox::is_done)
    });
    for (outbox, messages) in outboxes.iter().zip(&expected) {
        assert!(outbox.failed.is_empty(), "{:?}", outbox.failed);
        for (n, message) in messages.iter().enumerate() {
            assert_eq!(outbox.answers[&n].as_ref().expect("answered").as_bytes(), answer(&message.payload));
        }
    }
}

/// A handler that panics ends its request with a fault; the rank goes on.
pub fn a_panicking_handler_is_reported_and_the_rank_goes_on<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.credits = 2);
    for rank in world.ranks() {
        let probe = |name| Probe::new(name, |_, _| std::panic::panic_any("a handler of a test"));
        world.register(rank, probe("panics"));
        world.register(rank, probe("panics, replied").flow(Flow::Replied));
        world.register(rank, echo("works"));
    }
    let from = at(Rank(0));
    let long = world.caps().max_eager * 2;
    // More replied requests than there is credit: a fault gives it back as an answer does.
    let protocols = [0, 2, 1, 1, 1, 1, 1, 2, 0, 2];
    let messages = protocols.iter().enumerate().map(|(n, &protocol)| {
        let len = if n % 3 == 1 { long } else { n };
        Message::filled(from, at(Rank(1)), ProtocolId(protocol), n, 0, len).request()
    });
    let mut outboxes = [Outbox::new(from, messages)];
    quietly(|| world.send_all(&mut outboxes));
    for (n, protocol) in protocols.iter().enumerate() {
        let answer = &outboxes[0].answers[&n];
        if *protocol == 2 {
            assert!(answer.is_ok(), "request {n}: {answer:?}");
        } else {
            assert_eq!(answer.as_ref().expect_err("it panicked"), &Fault::RemotePanicked(Rank(1)));
        }
    }
    assert_eq!(world.handle(at(Rank(1))).stats().panics, 7);
}

/// Whether a panic is told to whoever has sent the message is its protocol's to say, not that of another with the number under
/// which it travels.
pub fn a_panic_is_told_by_the_protocol_that_it_was_in<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    for rank in world.ranks() {
        let panics = |name: &str| Probe::new(name, |_, _| std::panic::panic_any("a handler of a test"));
        world.register(rank, panics("asked"));
        world.register(rank, panics("tagged").without_requests());
        for number in 2..40u16 {
            let filler = panics(&format!("filler {number}"));
            world.register(rank, if number % 2 == 0 { filler.without_requests() } else { filler });
        }
    }
    let from = at(Rank(0));
    let long = world.caps().max_eager * 2;
    let lengths = [0, 8, 100, long];
    // A tag that is answered would end an operation that has its number: all that wait here are asked last, and end so.
    quietly(|| {
        let tags = lengths.map(|len| Message::new(Rank(1), ProtocolId(1), vec![1; len]));
        for message in tags {
            let args = SendArgs {
                target: at(Rank(1)),
                protocol: ProtocolId(1),
                cookie: 1 << 32 | 1,
                info: &[],
                relaxed: false,
            };
            world.enter(from, |scope| {
                assert!(matches!(
                    scope.give(&args, Payload::Borrowed(&message.payload)),
                    Ok(Given::Done | Given::Queued(_))
                ));
            });
        }
        let asked = lengths.iter().enumerate();
        let asked =
            asked.map(|(n, &len)| Message::filled(from, at(Rank(1)), ProtocolId(0), n, 0, len).request());
        let mut outboxes = [Outbox::new(from, asked)];
        world.send_all(&mut outboxes);
        for answer in outboxes[0].answers.values() {
            assert_eq!(answer.as_ref().expect_err("it panicked"), &Fault::RemotePanicked(Rank(1)));
        }
    });
    assert_eq!(world.handle(at(Rank(1))).stats().panics, 8);
}

/// An answer that no message may have the length of ends its request, and nothing else.
pub fn an_answer_that_is_too_long_is_told_as_that<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.max_message = 5000);
    for rank in world.ranks() {
        let probe = |name, len: usize| {
            Probe::new(name, move |scope, message| {
                if let Some(to) = message.reply() {
                    scope.reply(to, Ok(Payload::Owned(vec![7; len].into())));
                }
            })
        };
        world.register(rank, probe("too long", 5001));
        world.register(rank, probe("long", 5000).flow(Flow::Replied));
        world.register(rank, probe("much too long", 1 << 20).flow(Flow::Replied));
    }
    let from = at(Rank(0));
    let asked = [0, 1, 2, 0, 2, 1];
    let messages = asked
        .iter()
        .enumerate()
        .map(|(n, &protocol)| Message::filled(from, at(Rank(1)), ProtocolId(protocol), n, 0, 10).request());
    let mut outboxes = [Outbox::new(from, messages)];
    world.send_all(&mut outboxes);
    for (n, protocol) in asked.iter().enumerate() {
        match &outboxes[0].answers[&n] {
            Ok(value) => assert_eq!((*protocol, value.as_bytes().len()), (1, 5000)),
            Err(fault) => {
                assert_ne!(*protocol, 1);
                assert_eq!(*fault, Fault::AnswerTooLong(Rank(1)));
            }
        }
    }
}

/// A credited message whose handler panicked counts as consumed.
pub fn a_panicking_credited_handler_gives_its_credit_back<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.credits = 1);
    for rank in world.ranks() {
        let probe = Probe::new("panics", |_, _| std::panic::panic_any("a handler of a test"));
        world.register(rank, probe.flow(Flow::Credited));
    }
    let log = Log::default();
    let last = world.record("last", &log);
    let messages = (0..5).map(|n| Message::new(Rank(1), ProtocolId(0), vec![n])).chain([Message::new(
        Rank(1),
        last,
        *b"end",
    )]);
    quietly(|| {
        world.send_all(&mut [Outbox::new(at(Rank(0)), messages)]);
        world.until("the last arrives", |_| log.len() == 1);
    });
    assert_eq!(world.handle(at(Rank(1))).stats().panics, 5);
}

/// Runs the closure without the reports of panics that are meant to happen.
pub(super) fn quietly<R>(run: impl FnOnce() -> R) -> R {
    use std::sync::Once;
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&"a handler of a test") {
                usual(info);
            }
        }));
    });
    run()
}
