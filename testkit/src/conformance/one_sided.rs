//! Puts and gets, and their order.

use super::world::at;
use super::{Harness, Log, Memory, Message, Outbox, Probe, World};
use bytes::Bytes;
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::device::RemoteMemory;
use posthaste_core::engine::{Payload, ReplayStart, Rma};
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Descriptor, Fault, Rank, RmaError};
use std::sync::{Arc, OnceLock};

fn ends<H: Harness>(world: &mut World<H>, from: Rank, ticket: Option<posthaste_core::Ticket>) -> Bytes {
    world.access_ends(from, ticket)
}

/// A get sees what was put before it, though nobody waited for the put; bytes around it are left alone.
pub fn put_then_get<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let memory = world.memory(64 << 10);
    let mut model = vec![0u8; 64 << 10];
    let lens: Vec<usize> = world.sizes().into_iter().filter(|len| *len < 20_000).collect();
    for (n, len) in lens.into_iter().enumerate() {
        for (to, from) in [(Rank(1), Rank(0)), (Rank(0), Rank(0))] {
            let offset = (n * 13) as u64;
            let bytes = world.random.bytes(len);
            let payload = if n % 2 == 0 {
                Payload::Borrowed(&bytes)
            } else {
                Payload::Owned(Bytes::from(bytes.clone()))
            };
            let put = world.access(&memory, from, to, offset, Rma::Put(payload));
            let get = world.access(&memory, from, to, offset, Rma::Get(len as u64));
            assert!(get.is_some(), "a get always has a value to wait for");
            assert!(ends(&mut world, from, get) == bytes, "{len} bytes");
            ends(&mut world, from, put);
            if to == Rank(1) {
                model[offset as usize..][..len].copy_from_slice(&bytes);
                assert!(memory.bytes(to, 0, 64 << 10) == model, "{len} bytes, and nothing else");
            }
        }
    }
}

/// The last of several puts to one place wins.
pub fn put_then_put_in_program_order<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let memory = world.memory(8192);
    for round in 0..8u64 {
        let mut tickets = Vec::new();
        for value in 0..25u64 {
            for (from, place) in [(Rank(0), 0), (Rank(2), 512)] {
                let bytes = (round << 32 | value).to_ne_bytes().repeat(1 + (value % 5) as usize);
                tickets.push((
                    from,
                    world.access(&memory, from, Rank(1), place, Rma::Put(Payload::Borrowed(&bytes))),
                ));
            }
        }
        for (from, ticket) in tickets {
            ends(&mut world, from, ticket);
        }
        for place in [0, 512] {
            assert_eq!(memory.bytes(Rank(1), place, 8), (round << 32 | 24).to_ne_bytes());
        }
    }
}

/// A get is not overtaken by a later put.
pub fn get_then_put_sees_the_old_bytes<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let memory = world.memory(4096);
    let mut open = Vec::new();
    for value in 0..100u64 {
        let get = world.access(&memory, Rank(0), Rank(1), 8, Rma::Get(24));
        let bytes = (value + 1).to_ne_bytes().repeat(3);
        let put = world.access(&memory, Rank(0), Rank(1), 8, Rma::Put(Payload::Borrowed(&bytes)));
        open.push((value, get, put));
        if world.random.chance(20) {
            for (value, get, put) in open.drain(..) {
                assert_eq!(ends(&mut world, Rank(0), get), value.to_ne_bytes().repeat(3));
                ends(&mut world, Rank(0), put);
            }
        }
    }
    for (value, get, _put) in open {
        assert_eq!(ends(&mut world, Rank(0), get), value.to_ne_bytes().repeat(3));
    }
}

/// When a handler runs, the puts that precede its message are there.
pub fn put_then_send_has_the_data_there<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let here: Arc<OnceLock<SharedSlice>> = Arc::default();
    for rank in world.ranks() {
        let (here, log) = (here.clone(), log.clone());
        world.register(
            rank,
            Probe::new("look", move |scope, message| {
                let number = u64::from_le_bytes(message.info.try_into().expect("eight bytes"));
                let memory = here.get().expect("set before anything is sent");
                let bytes = memory.slice(number * 8, 8).expect("inside").to_vec();
                let (at, source) = (scope.me(), message.source);
                log.push(super::Received {
                    at,
                    source,
                    protocol: String::new(),
                    info: message.info.to_vec(),
                    bytes,
                });
            }),
        );
    }
    let memory = world.memory(8192);
    here.set(memory.slices[1]).expect("set once");
    let long = world.caps().max_eager + 1;
    let mut tickets = Vec::new();
    let mut outbox = Outbox::new(at(Rank(0)), []);
    for number in 0..200u64 {
        let bytes = (number * 7 + 1).to_ne_bytes();
        tickets.push(world.access(
            &memory,
            Rank(0),
            Rank(1),
            number * 8,
            Rma::Put(Payload::Borrowed(&bytes)),
        ));
        let len = if number % 50 == 9 { long } else { 0 };
        let message = Message::new(Rank(1), posthaste_core::ProtocolId(0), vec![0; len]);
        outbox.queue.push_back(message.info(number.to_le_bytes()));
        outbox.pump(&world);
        if world.random.chance(30) {
            world.step();
        }
    }
    world.send_all(&mut [outbox]);
    world.until("everything arrives", |_| log.len() == 200);
    for (number, received) in log.all().iter().enumerate() {
        let number = number as u64;
        assert_eq!(received.info, number.to_le_bytes());
        assert_eq!(
            received.bytes,
            (number * 7 + 1).to_ne_bytes(),
            "the put before message {number} was not there"
        );
    }
    for ticket in tickets {
        ends(&mut world, Rank(0), ticket);
    }
}

/// Regions as source and as destination.
pub fn regions_are_put_and_got<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let memory: Memory = world.memory(8192);
    for len in [1usize, 8, 24, 64, 65, 1000] {
        let bytes = world.random.bytes(len);
        memory.write(Rank(0), 16, &bytes);
        let put = Rma::PutFrom(memory.local[0], 16, len as u64);
        let put = world.access(&memory, Rank(0), Rank(1), 3, put);
        let get = Rma::GetInto(memory.local[0], 4096, len as u64);
        let get = world.access(&memory, Rank(0), Rank(1), 3, get);
        ends(&mut world, Rank(0), put);
        ends(&mut world, Rank(0), get);
        assert_eq!(memory.bytes(Rank(1), 3, len), bytes);
        assert_eq!(memory.bytes(Rank(0), 4096, len), bytes);
    }
}

/// Accesses of many packets, from both sides at once and mixed with long messages: all end, in program order.
pub fn long_accesses_in_both_directions_keep_their_order<H: Harness>(harness: H) {
    const LEN: usize = 30_000;
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("between", &log);
    let memory = world.memory(48 << 10);
    let pairs = [(Rank(0), Rank(1)), (Rank(1), Rank(0))];
    let mut expected: Vec<(Rank, Option<posthaste_core::Ticket>, Vec<u8>)> = Vec::new();
    let mut puts = Vec::new();
    let mut now = [vec![0u8; LEN], vec![0u8; LEN]];
    let mut outboxes = pairs.map(|(from, _)| Outbox::new(at(from), []));
    let long = world.caps().max_eager * 3 + 7;
    for round in 0..5 {
        for (n, (from, to)) in pairs.into_iter().enumerate() {
            // The whole, then a part of it, then all is overwritten: each get sees what was put last before it.
            let place = 5 + round;
            let whole = world.access(&memory, from, to, 3, Rma::Get(LEN as u64));
            expected.push((from, whole, now[n].clone()));
            let bytes = world.random.bytes(LEN - 100);
            now[n][place as usize - 3..][..bytes.len()].copy_from_slice(&bytes);
            let put = Rma::Put(Payload::Owned(Bytes::from(bytes)));
            puts.push((from, world.access(&memory, from, to, place, put)));
            outboxes[n].queue.push_back(Message::filled(at(from), at(to), protocol, round as usize, 3, long));
            outboxes[n].pump(&world);
            let none = world.access(&memory, from, to, place, Rma::Get(0));
            expected.push((from, none, Vec::new()));
            puts.push((from, world.access(&memory, from, to, 7, Rma::Put(Payload::Borrowed(&[])))));
            let part = world.access(&memory, from, to, 1000, Rma::Get(9_001));
            expected.push((from, part, now[n][997..][..9_001].to_vec()));
        }
        for _ in 0..world.random.below(60) {
            world.step();
        }
    }
    for (n, (from, ticket, bytes)) in expected.into_iter().enumerate() {
        let got = ends(&mut world, from, ticket);
        assert!(got == bytes, "get {n} of rank {from}: {} bytes", got.len());
    }
    for (from, ticket) in puts {
        ends(&mut world, from, ticket);
    }
    world.send_all(&mut outboxes);
    world.until("the messages arrive", |_| log.len() == 10);
    for (n, (from, to)) in pairs.into_iter().enumerate() {
        assert!(memory.bytes(to, 3, LEN) == now[n], "what rank {from} put");
        let sent: Vec<_> =
            (0..5).map(|round| Message::filled(at(from), at(to), protocol, round, 3, long)).collect();
        log.check(at(from), at(to), &sent);
    }
}

/// A put, a get or a replay of memory that its owner has not got ends with just that, and what else goes on is well. Where
/// a device carries accesses out itself, it is the device that says what such a key leads to.
pub fn memory_that_does_not_exist_is_told<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    if !world.goes_over_send() && world.caps().name != "tcp" {
        return;
    }
    let memory = world.memory(16 << 10);
    let (from, to) = (Rank(0), Rank(1));
    let absent = RemoteMemory { rank: to, offset: 1 << 40, len: 1 << 20, mapped: None, incarnation: 0 };
    let key = world.enter(at(from), |scope| scope.table().remote.insert(absent));
    let access = |op: Op, key: usize, len: u64| Descriptor {
        op,
        source_kind: SourceKind::Region,
        rank: to,
        region: key as u32,
        len,
        source: [memory.local[0] as u64, 0],
        ..Descriptor::default()
    };
    let there = memory.remote[0][1];
    let put = |key: usize, len: u64| access(Op::Put, key, len);
    let get = |key: usize, len: u64| access(Op::Get, key, len);
    // Whichever part of one is of such memory, and whichever is the last: it is the replay that fails, and not what follows.
    let bad = [
        vec![put(there, 900), put(key, 900), put(there, 8)],
        vec![get(key, 900), put(there, 8)],
        vec![put(key, 900), get(there, 8)],
        vec![put(key, 900), get(key, 8), put(key, 8), get(there, 5_000)],
        vec![get(there, 8), get(key, 8), get(there, 900)],
        vec![get(key, 8)],
        vec![put(key, 8)],
    ];
    let good = [vec![put(there, 900)], vec![get(there, 900)], vec![get(there, 8), put(there, 8)]];
    let mut patterns = Vec::new();
    for (at_bad, run) in bad.into_iter().enumerate() {
        patterns.push((run, true));
        patterns.push((good[at_bad % good.len()].clone(), false));
    }
    let stored = |(run, bad)| {
        let id = world.enter(at(from), |scope| scope.store_pattern(run, Box::new(())));
        (id.expect("not empty"), bad)
    };
    let patterns: Vec<_> = patterns.into_iter().map(stored).collect();
    let none = Fault::NoSuchMemory(to);
    for round in 0..4u8 {
        let mut tickets = Vec::new();
        for len in [1, 5_000] {
            let bytes = vec![round + 1; len];
            let put = || Rma::Put(Payload::Owned(Bytes::from(bytes.clone())));
            let start = |key: usize, offset: u64, rma: Rma<'_>| {
                world.enter(at(from), |scope| scope.rma(at(to), key, offset, rma)).expect("it is in range")
            };
            tickets.push((start(key, 10, put()), true));
            tickets.push((start(memory.remote[0][1], 10, put()), false));
            tickets.push((start(key, 10, Rma::Get(len as u64)), true));
            tickets.push((start(memory.remote[0][1], 10, Rma::Get(len as u64)), false));
            tickets.push((start(key, 0, Rma::Put(Payload::Borrowed(&[]))), true));
            for &(id, bad) in &patterns {
                let replay = world.enter(at(from), |scope| scope.replay(id)).expect("it exists");
                let ReplayStart::Queued { ticket, .. } = replay else {
                    panic!("nobody has acknowledged it yet")
                };
                tickets.push((Some(ticket), bad));
            }
        }
        for (n, (ticket, bad)) in tickets.into_iter().enumerate() {
            let outcome = world.outcome(at(from), ticket.expect("over sends nothing is done at once"));
            match outcome {
                Ok(value) => assert!(
                    !bad && (value.as_bytes().len() != 5_000 || value.as_bytes()[4_999] == round + 1),
                    "{n}"
                ),
                Err(fault) => assert!(bad && fault == none, "{n}: {fault}"),
            }
        }
    }
    assert!(world.errors(from).is_empty() && world.errors(to).is_empty(), "nobody was cut off");
}

/// An access outside of the target memory, or of an unknown rank, is refused at once.
pub fn out_of_range_is_refused<H: Harness>(harness: H) {
    let world = World::new(harness, 2);
    let memory = world.memory(4096);
    let key = memory.remote[0][1];
    let refused = |rank: Rank, key: usize, offset: u64, rma: Rma<'_>| {
        world.enter(at(Rank(0)), |scope| scope.rma(at(rank), key, offset, rma)).expect_err("it is impossible")
    };
    let outside = |offset, count| RmaError::OutOfRange { rank: Rank(1), offset, count, len: 4096 };
    assert_eq!(refused(Rank(1), key, 4090, Rma::Put(Payload::Borrowed(b"1234567"))), outside(4090, 7));
    assert_eq!(refused(Rank(1), key, u64::MAX, Rma::Get(2)), outside(u64::MAX, 2));
    assert_eq!(refused(Rank(2), key, 0, Rma::Get(1)), RmaError::UnknownRank { rank: Rank(2), size: 2 });
    assert_eq!(refused(Rank(1), 999, 0, Rma::Get(1)), RmaError::Unreachable(Rank(1)));
    world.handle(at(Rank(0))).shut_down();
    assert_eq!(refused(Rank(1), key, 0, Rma::Get(1)), RmaError::Fault(Fault::Shutdown));
}
