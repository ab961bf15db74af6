//! Ranks agree on protocols by name.

use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::engine::{Payload, SendArgs, Sent, Wait};
use posthaste_core::protocol::Flow;
use posthaste_core::{Fault, ProtocolId, Rank, SendError};

fn ready<H: Harness>(world: &World<H>, rank: Rank) {
    world.enter(at(rank), |scope| scope.declare_ready());
}

/// What a send to rank 1 fails with, once it fails.
fn refusal<H: Harness>(world: &mut World<H>, protocol: ProtocolId) -> SendError {
    let args = SendArgs { target: at(Rank(1)), protocol, cookie: 0, info: &[], relaxed: false };
    let mut refused = None;
    world.until("it is refused", |world| {
        world.enter(at(Rank(0)), |scope| {
            if let Err((error, _)) = scope.send(&args, Payload::Borrowed(b"more"), Wait::Never) {
                refused = Some(error);
            }
        });
        refused.is_some()
    });
    refused.expect("just seen")
}

/// Messages of a protocol that the receiver does not have yet wait, and what follows them; other senders go on.
pub fn unknown_protocols_are_held_until_they_are_registered<H: Harness>(harness: H) {
    let mut world = World::new(harness, 4);
    let log = Log::default();
    let (from, to, other) = (at(Rank(0)), at(Rank(1)), at(Rank(2)));
    let early = world.record("early", &log);
    let late = world.register(Rank(0), Probe::recording("late", &log));
    assert_eq!(world.register(Rank(3), Probe::recording("late", &log)), late);
    let long = world.caps().max_eager + 77;
    // One begins with a long message, one with a short one.
    let senders = [(from, 0), (at(Rank(3)), 2)];
    let messages = senders.map(|(from, which)| {
        let late_one = |n| Message::filled(from, to, late, n, n, if n == which { long } else { n });
        let early_one = |n| Message::filled(from, to, early, n + 100, n, if n == 3 { long } else { n });
        (0..6).flat_map(|n| [late_one(n), early_one(n)]).collect::<Vec<_>>()
    });
    let mut outboxes = [0, 1].map(|n| Outbox::new(senders[n].0, messages[n].clone()));
    let others: Vec<_> = (0..20).map(|n| Message::filled(other, to, early, n, 0, n)).collect();
    let mut other_outbox = Outbox::new(other, others.clone());
    world.until("the others arrive", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        other_outbox.pump(world);
        log.of(other, to).len() == others.len()
    });
    for _ in 0..2 {
        world.a_while();
        outboxes.iter_mut().for_each(|outbox| outbox.pump(&world));
    }
    assert_eq!(log.len(), others.len(), "what is behind a held message is held");
    world.register(Rank(1), Probe::recording("late", &log));
    world.send_all(&mut outboxes);
    world.until("everything arrives", |_| log.len() == 24 + others.len());
    for ((from, _), messages) in senders.iter().zip(&messages) {
        log.check(*from, to, messages);
    }
    log.check(other, to, &others);
}

/// The first message of a protocol may overtake others, but not the record that tells the peer of the protocol, though that
/// has to wait.
pub fn a_relaxed_message_does_not_overtake_what_tells_of_its_protocol<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let blocker = world.record("blocker", &log);
    let protocols: Vec<ProtocolId> = (0..20).map(|n| world.record(&format!("protocol {n}"), &log)).collect();
    let long = world.caps().max_eager * 3 + 1;
    for (n, protocol) in protocols.iter().enumerate() {
        // What cannot go at once has everything behind it wait.
        for (protocol, len, relaxed) in [(blocker, long, false), (*protocol, n, true)] {
            let args = SendArgs { target: at(Rank(1)), protocol, cookie: 0, info: &[], relaxed };
            let payload = vec![n as u8; len];
            world.until("there is room", |world| {
                world.enter(at(Rank(0)), |scope| {
                    match scope.send(&args, Payload::Borrowed(&payload), Wait::Never).expect("it lives") {
                        Sent::Full(_) => false,
                        Sent::Done => true,
                    }
                })
            });
        }
    }
    world.until("all arrives", |_| log.len() == 2 * protocols.len());
    for n in 0..protocols.len() {
        let name = format!("protocol {n}");
        assert!(log.all().iter().any(|one| one.protocol == name && one.bytes == vec![n as u8; n]), "{name}");
    }
}

fn sends_to_unknown<H: Harness>(world: &mut World<H>, ready_first: bool) {
    let log = Log::default();
    let early = world.record("early", &log);
    let never =
        |name: &str, flow| world.register(Rank(0), Probe::recording(name, &Log::default()).flow(flow));
    let protocols =
        [never("short", Flow::Inline), never("long", Flow::Inline), never("credited", Flow::Credited)];
    let replied = never("replied", Flow::Replied);
    if ready_first {
        ready(world, Rank(1));
    }
    let long = world.caps().max_eager + 1;
    let message = |protocol, len: usize| Message::new(Rank(1), protocol, vec![1; len]);
    let mut outboxes: Vec<Outbox> = vec![
        Outbox::new(at(Rank(0)), (0..3).map(|n| message(protocols[0], n).request())),
        Outbox::new(at(Rank(0)), (0..3).map(|n| message(protocols[1], long + n).request())),
        Outbox::new(at(Rank(0)), (0..5).map(|n| message(protocols[2], n))),
        Outbox::new(at(Rank(0)), (0..5).map(|n| message(replied, n).request())),
        Outbox::new(at(Rank(0)), (0..5).map(|n| message(early, n))),
    ];
    if !ready_first {
        for _ in 0..3 {
            outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
            world.a_while();
        }
        assert!(outboxes[0].answers.is_empty());
        ready(world, Rank(1));
    }
    world.until("everything has ended", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        outboxes.iter().all(Outbox::is_done)
    });
    let fault = Fault::NoSuchProtocol(Rank(1));
    for outbox in &outboxes[..4] {
        assert!(outbox.failed.iter().all(|error| *error == SendError::Fault(fault)), "{:?}", outbox.failed);
        assert!(outbox.answers.values().all(|outcome| matches!(outcome, Err(other) if *other == fault)));
    }
    for at in [0, 1, 3] {
        assert_eq!(outboxes[at].failed.len() + outboxes[at].answers.len(), if at == 3 { 5 } else { 3 });
    }
    for protocol in [protocols[0], protocols[1], protocols[2], replied] {
        assert_eq!(refusal(world, protocol), SendError::Fault(fault));
    }
    world.until("the known protocol goes on", |_| log.len() == 5);
    assert!(outboxes[4].failed.is_empty());
    // The credited messages were no requests: their refusal is told to the error handler.
    assert!(world.errors(Rank(0)).contains(&fault), "{:?}", world.errors(Rank(0)));
    assert!(world.errors(Rank(1)).is_empty(), "{:?}", world.errors(Rank(1)));
}

/// Once the receiver has declared itself ready, unknown protocols are refused.
pub fn unknown_protocols_are_refused_once_ready<H: Harness>(harness: H) {
    sends_to_unknown(&mut World::with(harness, 2, |setup| setup.config.credits = 2), true);
}

/// Messages that were held are refused when the receiver declares itself ready.
pub fn held_messages_are_refused_when_ready_is_declared<H: Harness>(harness: H) {
    sends_to_unknown(&mut World::with(harness, 2, |setup| setup.config.credits = 2), false);
}

/// A protocol of the same name and another type or flow is refused as such, and stays so.
pub fn a_mismatched_type_is_refused_as_such<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let probe = |name: &str| Probe::recording(name, &log);
    let typed = world.register(Rank(0), probe("typed").schema(1));
    let flowing = world.register(Rank(0), probe("flowing").flow(Flow::Credited));
    let long = world.register(Rank(0), probe("long").schema(7));
    world.register(Rank(1), probe("typed").schema(2));
    world.register(Rank(1), probe("flowing"));
    world.register(Rank(1), probe("long").schema(8));
    let good = world.register(Rank(0), probe("good").schema(3));
    world.register(Rank(1), probe("good").schema(3));
    let fault = Fault::SchemaMismatch(Rank(1));
    let len = world.caps().max_eager + 5;
    let mut outboxes: Vec<_> = [(typed, 3), (flowing, 3), (long, len)]
        .into_iter()
        .map(|(protocol, len)| {
            let message = Message::new(Rank(1), protocol, vec![5; len]).request();
            Outbox::new(at(Rank(0)), [message.clone(), message])
        })
        .collect();
    world.until("they end", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        outboxes.iter().all(Outbox::is_done)
    });
    for outbox in &outboxes {
        assert_eq!(outbox.failed.len() + outbox.answers.len(), 2);
        for answer in outbox.answers.values() {
            assert_eq!(answer.as_ref().expect_err("refused"), &fault);
        }
        assert!(outbox.failed.iter().all(|error| *error == SendError::Fault(fault)), "{:?}", outbox.failed);
    }
    for protocol in [typed, flowing, long] {
        assert_eq!(refusal(&mut world, protocol), SendError::Fault(fault));
    }
    world.send_all(&mut [Outbox::new(at(Rank(0)), [Message::new(Rank(1), good, *b"fine")])]);
    world.until("the good one arrives", |_| log.len() == 1);
}

/// Ranks that register in another order understand each other.
pub fn numbers_may_differ_between_ranks<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let names = ["red", "green", "blue", "grey"];
    let numbers: Vec<Vec<ProtocolId>> = world
        .ranks()
        .map(|rank| {
            let mut ids = vec![ProtocolId(0); names.len()];
            for n in 0..names.len() {
                let n = if rank == Rank(0) { n } else { names.len() - 1 - n };
                ids[n] = world.register(rank, Probe::recording(names[n], &log));
            }
            ids
        })
        .collect();
    assert_ne!(numbers[0], numbers[1]);
    let mut outboxes: Vec<_> = world
        .ranks()
        .map(|rank| {
            let message = |n: usize| Message::new(Rank(1 - rank.0), numbers[rank.index()][n], names[n]);
            Outbox::new(at(rank), [3, 1, 0, 2, 0, 3].map(message))
        })
        .collect();
    world.send_all(&mut outboxes);
    world.until("everything arrives", |_| log.len() == 12);
    for received in log.all() {
        assert_eq!(
            received.bytes,
            received.protocol.as_bytes(),
            "{} got another's message",
            received.protocol
        );
    }
}
