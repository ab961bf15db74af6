//! Messages that go straight to their places. The rest of the suite says what they have in common with others.

use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::device::{Body, Kept};
use posthaste_core::{Messager, ProtocolId, Rank};
use std::sync::{Arc, Mutex};

fn went_straight<H: Harness>(world: &World<H>, from: Rank) -> u64 {
    world.clients[from.index()].contexts()[0].stats().rendezvous
}

fn went_ahead<H: Harness>(world: &World<H>, from: Rank) -> u64 {
    world.clients[from.index()].contexts()[0].stats().rendezvous_ahead
}

/// Long messages from both sides at once, among short ones: each arrives once and in order, and goes straight to its place.
pub fn long_messages_go_straight_to_their_places<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.fifo_slots = 8);
    let Some(threshold) = world.rendezvous_from() else { return };
    let log = Log::default();
    let protocol = world.record("straight", &log);
    let lens = [30_000, threshold, threshold - 1, 3, 12_345, 0, 30_000, 7_001];
    let pairs = [(Rank(0), Rank(1)), (Rank(1), Rank(0)), (Rank(0), Rank(0))];
    let messages = pairs.map(|(from, to)| {
        let filled = |n| Message::filled(at(from), at(to), protocol, n, n % 113, lens[n % lens.len()]);
        (0..3 * lens.len()).map(filled).collect::<Vec<_>>()
    });
    let mut outboxes: Vec<_> = pairs
        .iter()
        .zip(&messages)
        .map(|(pair, messages)| Outbox::new(at(pair.0), messages.clone()))
        .collect();
    world.send_all(&mut outboxes);
    world.until("all arrive", |_| log.len() >= 9 * lens.len());
    world.a_while();
    for ((from, to), messages) in pairs.iter().zip(&messages) {
        log.check(at(*from), at(*to), messages);
    }
    let long = 3 * lens.iter().filter(|len| **len >= threshold).count() as u64;
    assert_eq!((went_straight(&world, Rank(0)), went_straight(&world, Rank(1))), (2 * long, long));
}

/// What was said, and the message that was kept.
type Keeping = (Vec<u8>, Kept);

/// Where there is no room for another message that is kept, messages go as streams, and straight again once there is.
pub fn messages_that_are_kept_use_up_the_places<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.landing_bytes = 128 << 10);
    if world.rendezvous_from().is_none() {
        return;
    }
    let log = Log::default();
    let kept: Arc<Mutex<Vec<Keeping>>> = Arc::default();
    for rank in world.ranks() {
        let (log, kept) = (log.clone(), kept.clone());
        world.register(
            rank,
            Probe::new("kept", move |scope, message| {
                let bytes = log.arrived(scope.me(), "", &message);
                if let Body::Lease(_) = message.body {
                    let kept_body = message.body.keep();
                    kept.lock().expect("no panic under this lock").push((bytes, kept_body));
                }
            }),
        );
    }
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let protocol = ProtocolId(0);
    let mut sent = Vec::new();
    for round in 1..=3 {
        let messages: Vec<_> =
            (0..8).map(|n| Message::filled(from, to, protocol, round * 8 + n, n, 20_000 + n)).collect();
        sent.extend(messages.clone());
        world.send_all(&mut [Outbox::new(from, messages)]);
        world.until("they arrive", |_| log.len() == 8 * round);
        let kept = std::mem::take(&mut *kept.lock().expect("no panic under this lock"));
        // Devices may lend pages of their own as well.
        for (bytes, body) in &kept {
            let Kept::Lease(lease) = body else { panic!("only leases were kept") };
            assert!(lease.to_bytes() == *bytes, "what is kept stays as it came");
        }
        assert_eq!(went_straight(&world, Rank(0)), 2 * round as u64, "two places, each kept");
    }
    log.check(from, to, &sent);
}

/// From the second long message of a protocol in a row on the next one has its place before it asks; others take it back.
pub fn places_are_given_before_they_are_asked_for<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let Some(threshold) = world.rendezvous_from() else { return };
    let log = Log::default();
    let protocols = ["one", "other"].map(|name| world.record(name, &log));
    let pairs = [(Rank(0), Rank(1)), (Rank(1), Rank(0)), (Rank(0), Rank(0))];
    let mut all: Vec<Vec<Message>> = vec![Vec::new(); pairs.len()];
    // Equal ones, then of any protocol and length.
    for round in 0..2 {
        for (pair, (from, to)) in pairs.iter().enumerate() {
            let messages: Vec<_> = (0..10)
                .map(|n| {
                    let other = round == 1 && world.random.below(4) == 0;
                    let len = if round == 0 { 0 } else { world.random.below(20_000) };
                    let protocol = protocols[usize::from(other)];
                    Message::filled(at(*from), at(*to), protocol, n, n % 113, threshold + 20_000 - len)
                })
                .collect();
            all[pair].extend(messages.clone());
            world.send_all(&mut [Outbox::new(at(*from), messages)]);
        }
        let so_far = pairs.len() * 10 * (round + 1);
        world.until("all arrive", |_| log.len() >= so_far);
        for rank in [Rank(0), Rank(1)].into_iter().filter(|_| round == 0) {
            let pairs = 2 - u64::from(rank.0);
            let (straight, ahead) = (went_straight(&world, rank), went_ahead(&world, rank));
            assert_eq!(straight, 10 * pairs);
            // A receiver without room for a record gives nothing then.
            assert!((1..=8 * pairs).contains(&ahead), "{ahead} of {straight}");
        }
    }
    world.a_while();
    for ((from, to), messages) in pairs.iter().zip(&all) {
        log.check(at(*from), at(*to), messages);
    }
    assert_eq!((went_straight(&world, Rank(0)), went_straight(&world, Rank(1))), (40, 20));
}

/// A sender that dies with a place that it had not asked for, or had begun to use: others have it then.
pub fn a_place_that_was_given_to_a_lost_sender_is_free_again<H: Harness>(harness: H) {
    // Room for four, of which one may be given ahead.
    places_of_a_lost_sender_are_free_again(harness, 4);
}

/// The same with as many as one peer is given.
pub fn two_places_that_were_given_to_a_lost_sender_are_free_again<H: Harness>(harness: H) {
    places_of_a_lost_sender_are_free_again(harness, 8);
}

fn places_of_a_lost_sender_are_free_again<H: Harness>(harness: H, places: usize) {
    let mut world =
        World::with(harness, 3, |setup| setup.config.landing_bytes = (places as u64) * (64 << 10));
    if world.rendezvous_from().is_none() {
        return;
    }
    let log = Log::default();
    let kept: Arc<Mutex<Vec<Kept>>> = Arc::default();
    let other = Rank(2);
    for rank in world.ranks() {
        let (log, kept) = (log.clone(), kept.clone());
        world.register(
            rank,
            Probe::new("kept", move |scope, message| {
                log.arrived(scope.me(), "", &message);
                if let (Body::Lease(_), true) = (&message.body, message.source.rank == other) {
                    kept.lock().expect("no panic under this lock").push(message.body.keep());
                }
            }),
        );
    }
    // All are free.
    others_have_the_places_of_a_lost_one(&mut world, ProtocolId(0), &log, places);
}

/// Whoever leaves amid a long message of its own still takes what goes to the places that it has given: the peer does not take it
/// for corrupt.
pub fn who_leaves_amid_a_long_message_takes_what_goes_to_its_places<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    if world.rendezvous_from().is_none() {
        return;
    }
    let log = Log::default();
    let protocol = world.record("places", &log);
    let (leaves, stays) = (at(Rank(0)), at(Rank(1)));
    let filled = |from, to, n| Message::filled(from, to, protocol, n, 0, 40_000);
    let messages: Vec<_> = (0..4).map(|n| filled(stays, leaves, n)).collect();
    world.send_all(&mut [Outbox::new(stays, messages)]);
    world.until("they arrive", |_| log.len() == 4);
    world.a_while();
    world.pause(stays.rank);
    let own = filled(leaves, stays, 9).payload;
    let args =
        posthaste_core::engine::SendArgs { target: stays, protocol, cookie: 0, info: &[], relaxed: false };
    let given = world.enter(leaves, |scope| {
        let given = scope.give(&args, posthaste_core::Payload::Owned(own.into())).map_err(|(error, _)| error);
        scope.depart();
        given.map(drop)
    });
    assert_eq!(given, Ok(()));
    world.resume(stays.rank);
    let mut outbox = Outbox::new(stays, (4..6).map(|n| filled(stays, leaves, n)));
    for _ in 0..500 {
        outbox.pump(&world);
        world.step();
    }
    for rank in [leaves.rank, stays.rank] {
        assert_eq!(world.errors(rank), [], "{rank} takes an honest peer for another");
    }
}

/// Rank 1 dies while it sends long messages to rank 0, then rank 2 sends so many, and each goes straight to its place.
fn others_have_the_places_of_a_lost_one<H: Harness>(
    world: &mut World<H>,
    protocol: ProtocolId,
    log: &Log,
    messages: usize,
) {
    let (lost, to, other) = (Rank(1), Rank(0), Rank(2));
    let mut outbox = Outbox::new(at(lost), (0..50).map(|_| Message::new(to, protocol, vec![1; 40_000])));
    for _ in 0..world.random.below(300) {
        outbox.pump(world);
        world.step();
    }
    world.kill(lost);
    world.until("it is told", |world| !world.errors(to).is_empty());
    let had = log.len();
    for n in 1..=messages {
        let message = Message::filled(at(other), at(to), protocol, n, 0, 40_000);
        world.send_all(&mut [Outbox::new(at(other), [message.clone()])]);
        world.until("it arrives", |_| log.len() == had + n);
        assert!(log.of(at(other), at(to))[n - 1].bytes == message.payload);
    }
    assert_eq!(went_straight(world, other), messages as u64, "all places were free again");
}

/// A receiver that dies at any moment of a long message: the send ends with its loss, and its buffer is free.
pub fn a_receiver_lost_at_any_moment_ends_the_send<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    if world.rendezvous_from().is_none() {
        return;
    }
    let log = Log::default();
    let protocol = world.record("lost", &log);
    let steps = world.random.below(200);
    let buffer = bytes::Bytes::from(vec![7; 40_000]);
    let fault = posthaste_core::Fault::PeerLost(Rank(1));
    let args = posthaste_core::engine::SendArgs {
        target: at(Rank(1)),
        protocol,
        cookie: 0,
        info: &[],
        relaxed: false,
    };
    let sent = world.enter(at(Rank(0)), |scope| {
        let payload = posthaste_core::Payload::Owned(buffer.clone());
        scope.give(&args, payload).map_err(|(error, _)| error)
    });
    let Ok(posthaste_core::engine::Given::Queued(ticket)) = sent else {
        panic!("it waits for its place: {sent:?}")
    };
    for _ in 0..steps {
        world.step();
    }
    world.kill(Rank(1));
    match world.outcome(at(Rank(0)), ticket) {
        Ok(_) => {}
        Err(other) => assert_eq!(other, fault),
    }
    world.until("it is told", |world| !world.errors(Rank(0)).is_empty());
    world.a_while();
    assert!(buffer.is_unique(), "the sender's buffer is its own again");
}

/// A sender that dies at any moment of a long message: the place it had is free for others.
pub fn a_sender_lost_at_any_moment_gives_the_place_back<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| setup.config.landing_bytes = 64 << 10);
    if world.rendezvous_from().is_none() {
        return;
    }
    let log = Log::default();
    let protocol = world.record("again", &log);
    // There is one place, and it is free.
    others_have_the_places_of_a_lost_one(&mut world, protocol, &log, 3);
}
