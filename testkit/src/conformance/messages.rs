//! Each message arrives once, whole and in order.

use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::descriptor::MAX_INFO;
use posthaste_core::engine::{Payload, SendArgs, Whole};
use posthaste_core::{ContextId, Endpoint, Fault, ProtocolId, Rank, SendError, Ticket};
use std::sync::{Arc, Mutex};

/// Messages of every length at which something might change, between all pairs.
fn all_pairs<H: Harness>(
    world: &mut World<H>,
    log: &Log,
    message: impl Fn(Endpoint, Endpoint) -> Vec<Message>,
) {
    let endpoints = world.endpoints();
    let mut outboxes = Vec::new();
    let mut expected = Vec::new();
    for &from in &endpoints {
        for &to in &endpoints {
            let messages = message(from, to);
            outboxes.push(Outbox::new(from, messages.clone()));
            expected.push((from, to, messages));
        }
    }
    world.send_all(&mut outboxes);
    let total: usize = expected.iter().map(|(_, _, messages)| messages.len()).sum();
    world.until("everything arrives", |_| log.len() >= total);
    world.a_while();
    for (from, to, messages) in &expected {
        log.check(*from, *to, messages);
    }
    assert_eq!(log.len(), total);
}

/// Every length, between all pairs of three ranks, also to oneself.
pub fn every_size_arrives_once_and_in_order<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("sizes", &log);
    let sizes = world.sizes();
    all_pairs(&mut world, &log, |from, to| {
        let message = |(number, &len): (usize, &usize)| {
            Message::filled(from, to, protocol, number, number * 37 % (MAX_INFO + 1), len)
        };
        sizes.iter().chain(sizes.iter().rev()).enumerate().map(message).collect()
    });
}

/// Every length of message info, with a short and with a streamed payload.
pub fn every_length_of_info_arrives<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("info", &log);
    let lens = [0, 8, 17, world.caps().max_eager + 1];
    all_pairs(&mut world, &log, |from, to| {
        (0..=MAX_INFO).map(|info| Message::filled(from, to, protocol, info, info, lens[info % 4])).collect()
    });
}

/// Messages of several protocols from one sender arrive in the order in which they were sent.
pub fn protocols_keep_their_common_order<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocols: Vec<_> = ["one", "two", "three"].iter().map(|name| world.record(name, &log)).collect();
    let long = world.caps().max_eager * 2;
    all_pairs(&mut world, &log, |from, to| {
        let message = |number: usize| {
            let len = if number % 7 == 3 { long } else { number % 40 };
            Message::filled(from, to, protocols[number * 5 % 3], number, number % 20, len)
        };
        (0..60).map(message).collect()
    });
    let names: Vec<String> =
        log.of(at(Rank(0)), at(Rank(1))).into_iter().map(|received| received.protocol).collect();
    let expected: Vec<&str> = (0..60).map(|number| ["one", "two", "three"][number * 5 % 3]).collect();
    assert_eq!(names, expected);
}

/// Two contexts per rank: each endpoint gets what was sent to it.
pub fn contexts_do_not_mix<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.contexts = 2);
    let log = Log::default();
    let protocol = world.record("contexts", &log);
    let long = world.caps().max_eager + 9;
    all_pairs(&mut world, &log, |from, to| {
        let message = |number: usize| {
            let len = if number == 5 { long } else { number };
            Message::filled(from, to, protocol, number, number, len)
        };
        (0..12).map(message).collect()
    });
}

/// What a handler could not send at once.
type Leftovers = Arc<Mutex<Vec<(Endpoint, Ticket)>>>;

/// A token goes round the ranks, sent on by each handler from inside.
fn relay<H: Harness>(world: &mut World<H>, step: u32, hops: u32) {
    let size = world.clients.len() as u32;
    let log = Log::default();
    let leftovers = Leftovers::default();
    let id = ProtocolId(0);
    for rank in world.ranks() {
        let (log, leftovers) = (log.clone(), leftovers.clone());
        let registered = world.register(
            rank,
            Probe::new("relay", move |scope, message| {
                let mut bytes = log.arrived(scope.me(), "", &message);
                let left = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
                if left == 0 {
                    return;
                }
                bytes[..4].copy_from_slice(&(left - 1).to_le_bytes());
                let target = at(Rank((scope.me().rank.0 + step) % size));
                let info = message.info.to_vec();
                let args = SendArgs { target, protocol: id, cookie: 0, info: &info, relaxed: false };
                let here = scope.me();
                let given = scope.give(&args, Payload::Borrowed(&bytes)).expect("all live");
                leftovers.lock().expect("no panic").extend(given.leave().map(|ticket| (here, ticket)));
            }),
        );
        assert_eq!(registered, id);
    }
    let lens = [4, 20, world.caps().max_eager, world.caps().max_eager + 50];
    let mut outboxes: Vec<Outbox> = world
        .ranks()
        .map(|rank| {
            let message = |&len: &usize| {
                let mut bytes = vec![7u8; len];
                bytes[..4].copy_from_slice(&hops.to_le_bytes());
                Message::new(rank, id, bytes).info([len as u8, rank.0 as u8])
            };
            Outbox::new(at(rank), lens.iter().map(message))
        })
        .collect();
    world.send_all(&mut outboxes);
    let total = lens.len() * world.clients.len() * (hops as usize + 1);
    world.until("all tokens went round", |world| {
        leftovers.lock().expect("no panic").retain(|&(here, ticket)| {
            let ended = world.handle(here).slots().take(ticket);
            assert!(ended.as_ref().is_none_or(Result::is_ok), "{ended:?}");
            ended.is_none()
        });
        log.len() >= total
    });
    world.a_while();
    assert_eq!(log.len(), total);
    for rank in world.ranks() {
        for len in lens {
            let mut left: Vec<u32> = log
                .all()
                .iter()
                .filter(|received| received.info == [len as u8, rank.0 as u8] && received.bytes.len() == len)
                .map(|received| u32::from_le_bytes(received.bytes[..4].try_into().expect("four bytes")))
                .collect();
            left.dedup();
            assert_eq!(left, (0..=hops).rev().collect::<Vec<_>>(), "token {len} of rank {rank}");
        }
    }
}

/// Handlers send on to the next rank.
pub fn handlers_send_from_inside<H: Harness>(harness: H) {
    relay(&mut World::new(harness, 3), 1, 30);
}

/// Handlers send to their own rank.
pub fn handlers_send_to_their_own_rank<H: Harness>(harness: H) {
    relay(&mut World::new(harness, 1), 0, 30);
}

/// A send that cannot succeed says why and gives the payload back.
pub fn refused_sends_give_the_payload_back<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.max_message = 5000);
    let log = Log::default();
    let protocol = world.record("known", &log);
    world.send_all(&mut [Outbox::new(at(Rank(0)), vec![Message::new(Rank(1), protocol, vec![3; 8])])]);
    world.until("it arrives", |_| log.len() == 1);
    // The short way is open now, but not for what is too long.
    let long = Whole::Bytes(&[1; 5001]);
    assert!(!world.enter(at(Rank(0)), |scope| scope.send_packet(at(Rank(1)), protocol, long)));
    let fails = |target: Rank, protocol: ProtocolId, info: &[u8], payload: &[u8]| {
        let args = SendArgs { target: at(target), protocol, cookie: 0, info, relaxed: false };
        world.enter(at(Rank(0)), |scope| match scope.give(&args, Payload::Borrowed(payload)) {
            Err((error, back)) => {
                assert_eq!(back.bytes_of(), payload);
                error
            }
            other => panic!("not refused: {other:?}"),
        })
    };
    assert_eq!(fails(Rank(2), protocol, &[], b"x"), SendError::UnknownRank { rank: Rank(2), size: 2 });
    assert_eq!(fails(Rank(1), protocol, &[0; 113], b"x"), SendError::InfoTooLong { len: 113 });
    assert_eq!(fails(Rank(1), protocol, &[], &[1; 5001]), SendError::TooLong { len: 5001, max: 5000 });
    assert_eq!(fails(Rank(1), ProtocolId(9), &[], b"x"), SendError::Unregistered(ProtocolId(9)));
    world.handle(at(Rank(0))).shut_down();
    assert_eq!(fails(Rank(1), protocol, &[], b"x"), SendError::Fault(Fault::Shutdown));
}

/// A word for several ranks goes at once to those only for whom nothing waits, also when there is room for it by now.
pub fn a_multicast_overtakes_nothing_that_waits<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| setup.config.fifo_slots = 8);
    let log = Log::default();
    let protocol = world.record("news", &log);
    let (from, slow, quick) = (at(Rank(0)), Rank(1), Rank(2));
    let word = |number: u64| number.to_ne_bytes().to_vec();
    let known: Vec<_> = [slow, quick].map(|to| Message::new(to, protocol, word(0))).into();
    world.send_all(&mut [Outbox::new(from, known)]);
    world.until("both know the protocol", |_| log.len() == 2);
    // The way is clear, and that may be remembered.
    let mut ranks = [slow, quick];
    let left = world.enter(from, |scope| scope.multicast_word(&mut ranks, ContextId(0), protocol, 1));
    let others = ranks[..left].iter().map(|to| Message::new(*to, protocol, word(1)));
    world.send_all(&mut [Outbox::new(from, others)]);
    world.until("both have got the second", |_| log.len() == 4);
    world.pause(slow);
    let mut number = 2;
    let mut outbox = Outbox::new(from, []);
    while outbox.queued() == 0 {
        assert!(number < 1 << 22, "no end of room");
        outbox.queue.extend((0..64).map(|n| Message::new(slow, protocol, word(number + n))));
        number += 64;
        outbox.pump(&world);
    }
    // The receiver makes room, and the sender does not look.
    world.pause(Rank(0));
    world.resume(slow);
    world.a_while();
    let mut ranks = [slow, quick];
    let left = world.enter(from, |scope| scope.multicast_word(&mut ranks, ContextId(0), protocol, number));
    assert!(ranks[..left].contains(&slow), "it went before what waits");
    world.resume(Rank(0));
    world.send_all(&mut [outbox]);
    world.until("all that was sent arrives", |_| log.of(from, at(slow)).len() == number as usize);
    let numbers = log.of(from, at(slow)).into_iter().map(|received| received.bytes);
    assert!(numbers.eq((0..number).map(word)), "out of order");
}
