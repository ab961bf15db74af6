//! A rank that leaves, and has several contexts.

use posthaste_core::engine::{Payload, SendArgs, Sent, Wait};
use posthaste_core::inprocess::Limits;
use posthaste_core::protocol::Flow;
use posthaste_core::{ContextId, Endpoint, Fault, Messager, Rank};
use posthaste_testkit::conformance::harnesses::InProcessHarness;
use posthaste_testkit::conformance::{Log, Message, Outbox, Probe, World};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn at(rank: u32, context: u16) -> Endpoint {
    Endpoint::new(Rank(rank), ContextId(context))
}

#[test]
fn an_answer_of_one_context_counts_though_another_has_said_goodbye() {
    let harness = InProcessHarness::new(Limits::default());
    let mut world = World::with(harness, 2, |setup| setup.contexts = 3);
    let log = Log::default();
    let note = world.record("note", &log);
    let answers = Arc::new(AtomicUsize::new(0));
    let mut echo = note;
    for rank in world.ranks() {
        let count = answers.clone();
        let probe = Probe::new("echo", move |scope, message| {
            let to = message.reply().expect("it is a request");
            scope.reply(to, Ok(Payload::Borrowed(&[7])));
            count.fetch_add(1, Ordering::Relaxed);
        });
        echo = world.register(rank, probe.flow(Flow::Replied));
    }
    // All contexts of the one know the other, and will say goodbye.
    for context in 0..3 {
        world.send_all(&mut [Outbox::new(at(1, context), [Message::new(Rank(0), note, [1])])]);
    }
    world.until("they know each other", |_| log.len() == 3);
    let asked = [1, 2].map(|context| {
        world.enter(at(0, 0), |scope| {
            let ticket = scope.operation(Some(Rank(1))).expect("it lives");
            scope.note_request(ticket, echo, 1);
            let (target, cookie) = (at(1, context), ticket.to_word());
            let args = SendArgs { target, protocol: echo, cookie, info: &[], relaxed: false };
            let sent = scope.send(&args, Payload::Borrowed(&[1]), Wait::Never);
            assert!(matches!(sent, Ok(Sent::Done)), "{sent:?}");
            ticket
        })
    });
    // Both are answered, and then the rank leaves, before anybody looks at that.
    world.pause(Rank(0));
    world.until("both are answered", |_| answers.load(Ordering::Relaxed) == 2);
    let client = world.clients[1].clone();
    world.run("it leaves", client.close());
    world.resume(Rank(0));
    for ticket in asked {
        let answer = world.outcome(at(0, 0), ticket);
        assert!(answer.as_ref().is_ok_and(|answer| answer.as_bytes() == [7]), "{answer:?}");
    }
    world.until("it has left", |world| !world.errors(Rank(0)).is_empty());
    assert_eq!(world.errors(Rank(0))[0], Fault::PeerClosed(Rank(1)));
}
