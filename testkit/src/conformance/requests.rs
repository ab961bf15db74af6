//! Requests and their answers.

use super::probe::bytes_of;
use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::engine::Payload;
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
