//! Recorded patterns and their replay.

use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::engine::{PatternError, ReplayStart};
use posthaste_core::{Descriptor, Fault, PatternId, ProtocolId, Rank};

/// A recorded put from rank 0's own memory.
fn store<H: Harness>(world: &World<H>, descriptors: Vec<Descriptor>) -> PatternId {
    world
        .enter(at(Rank(0)), |scope| scope.store_pattern(descriptors, Box::new(())))
        .expect("something was recorded")
}

fn replay<H: Harness>(world: &World<H>, id: PatternId) -> ReplayStart {
    world.enter(at(Rank(0)), |scope| scope.replay(id)).expect("it exists and its targets live")
}

fn replay_ends<H: Harness>(world: &mut World<H>, start: ReplayStart) {
    if let ReplayStart::Queued { ticket, .. } = start {
        let outcome = world.outcome(at(Rank(0)), ticket);
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}

/// A replay sends the bytes that are in the source when it is replayed.
pub fn replays_read_the_payload_afresh<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let memory = world.memory(16 << 10);
    for runs in [1u64, 2, 7, 40] {
        let descriptors =
            (0..runs).map(|n| memory.recorded_put(Rank(1), n * 100, 4096 + n * 100, 90)).collect();
        let id = store(&world, descriptors);
        for _ in 0..6 {
            let bytes = world.random.bytes(runs as usize * 100);
            memory.write(Rank(0), 0, &bytes);
            let start = replay(&world, id);
            replay_ends(&mut world, start);
            for n in 0..runs {
                let got = memory.bytes(Rank(1), 4096 + n * 100, 90);
                assert_eq!(got, bytes[n as usize * 100..][..90], "operation {n} of {runs}");
            }
        }
        world.enter(at(Rank(0)), |scope| scope.unregister_pattern(id));
    }
}

/// One pattern may go to several ranks, itself among them; many replays may be under way.
pub fn a_pattern_reaches_several_targets<H: Harness>(harness: H) {
    let mut world = World::new(harness, 4);
    let memory = world.memory(16 << 10);
    let targets = [Rank(2), Rank(0), Rank(3), Rank(1), Rank(2)];
    // The last put to a target goes to the same place as the first: their order per target is kept.
    let mut descriptors: Vec<_> = (0..targets.len() as u64)
        .map(|n| memory.recorded_put(targets[n as usize], n * 64, 8192, 64))
        .collect();
    descriptors.push(memory.recorded_put(Rank(3), 1024, 9000, 8));
    let id = store(&world, descriptors);
    assert_eq!(world.enter(at(Rank(0)), |scope| scope.recorded(id).len()), 6);
    let bytes = world.random.bytes(2048);
    memory.write(Rank(0), 0, &bytes);
    let starts: Vec<_> = (0..10).map(|_| replay(&world, id)).collect();
    for start in starts {
        replay_ends(&mut world, start);
    }
    for (rank, n) in [(0, 1), (1, 3), (2, 4), (3, 2)] {
        assert_eq!(memory.bytes(Rank(rank), 8192, 64), bytes[n * 64..][..64], "rank {rank}");
    }
    assert_eq!(memory.bytes(Rank(3), 9000, 8), bytes[1024..1032]);
    assert_eq!(world.handle(at(Rank(0))).stats().replays, 10);
}

/// Sends until some wait in the injection FIFO, because the receiver does not advance.
fn fill<H: Harness>(world: &mut World<H>, protocol: ProtocolId) -> (Outbox, usize) {
    world.pause(Rank(1));
    let mut outbox = Outbox::new(at(Rank(0)), []);
    let mut sent = 0;
    while outbox.queued() == 0 {
        assert!(sent < 200_000, "room without end");
        outbox.queue.push_back(Message::new(Rank(1), protocol, vec![7; 40]));
        sent += 1;
        outbox.pump(world);
        if outbox.queued() > 0 {
            // It may have met a moment without room only.
            world.a_while();
            outbox.pump(world);
        }
    }
    (outbox, sent)
}

/// A replay waits behind what waits already, keeps its place, and ends; a section lives as long as it is needed.
pub fn replays_queue_behind_what_waits<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("fill", &log);
    let memory = world.memory(8192);
    let id = store(&world, (0..5).map(|n| memory.recorded_put(Rank(1), n * 8, 4096 + n * 8, 8)).collect());
    memory.write(Rank(0), 0, &[9; 40]);
    let (mut outbox, sent) = fill(&mut world, protocol);
    let first = replay(&world, id);
    let second = replay(&world, id);
    assert!(matches!(first, ReplayStart::Queued { .. }), "something waits already");
    world.enter(at(Rank(0)), |scope| scope.unregister_pattern(id));
    let refused = world.enter(at(Rank(0)), |scope| scope.replay(id));
    assert!(matches!(refused, Err(PatternError::NoSuchPattern(_))), "{refused:?}");
    // What is recorded now must not take the place of what is still to be replayed.
    store(&world, (0..5).map(|n| memory.recorded_put(Rank(1), n * 8, 6000 + n * 8, 8)).collect());
    world.a_while();
    assert_eq!(memory.bytes(Rank(1), 4096, 40), [0; 40], "it overtook what was sent before");
    world.resume(Rank(1));
    for started in [first, second] {
        replay_ends(&mut world, started);
    }
    assert_eq!(memory.bytes(Rank(1), 4096, 40), [9; 40]);
    assert_eq!(memory.bytes(Rank(1), 6000, 40), [0; 40]);
    world.send_all(std::slice::from_mut(&mut outbox));
    world.until("everything arrives", |_| log.len() == sent);
}

/// Sections come and go; a freed one is not replayed, and its place is used again.
pub fn sections_are_freed_and_reused<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let memory = world.memory(8192);
    let empty = world.enter(at(Rank(0)), |scope| scope.store_pattern(Vec::new(), Box::new(())));
    assert!(matches!(empty, Err(PatternError::Empty)));
    let mut live: Vec<(PatternId, u64)> = Vec::new();
    for round in 0..200u64 {
        if live.len() > 5 {
            let at_random = world.random.below(live.len());
            let (gone, _) = live.swap_remove(at_random);
            world.enter(at(Rank(0)), |scope| scope.unregister_pattern(gone));
            let refused = world.enter(at(Rank(0)), |scope| scope.replay(gone));
            assert!(matches!(refused, Err(PatternError::NoSuchPattern(_))));
        }
        let len = 1 + world.random.below(6) as u64;
        let id =
            store(&world, (0..len).map(|n| memory.recorded_put(Rank(1), n * 8, 4096 + n * 8, 8)).collect());
        live.push((id, len));
        let at_random = world.random.below(live.len());
        let (id, len) = live[at_random];
        memory.write(Rank(0), 0, &round.to_ne_bytes().repeat(len as usize));
        let start = replay(&world, id);
        replay_ends(&mut world, start);
        assert_eq!(memory.bytes(Rank(1), 4096, 8 * len as usize), round.to_ne_bytes().repeat(len as usize));
    }
}

/// A pattern may hold sends; when it ends, its puts are there, and they are there before the handlers run.
pub fn recorded_sends_are_replayed<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("signal", &log);
    let memory = world.memory(8192);
    // The first message of a protocol tells the peer its name; a recorded one does not.
    world.send_all(&mut [Outbox::new(at(Rank(0)), [Message::new(Rank(1), protocol, *b"first")])]);
    let send = memory.recorded_send(Rank(1), protocol, 0, 32);
    let id = store(&world, vec![memory.recorded_put(Rank(1), 0, 4096, 32), send]);
    let mut expected = vec![b"first".to_vec()];
    for _ in 0..20 {
        let bytes = world.random.bytes(32);
        memory.write(Rank(0), 0, &bytes);
        let start = replay(&world, id);
        replay_ends(&mut world, start);
        assert_eq!(memory.bytes(Rank(1), 4096, 32), bytes, "the replay had ended");
        expected.push(bytes);
    }
    world.until("everything arrives", |_| log.len() >= expected.len());
    world.a_while();
    let got: Vec<_> = log.all().into_iter().map(|received| received.bytes).collect();
    assert_eq!(got, expected);
}

/// Many recorded sends of one length, which a device may hand over together, among others: all arrive whole and in order.
pub fn alike_sends_are_replayed_whole_and_in_order<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocols = [world.record("one", &log), world.record("two", &log)];
    let memory = world.memory(128 << 10);
    let targets = [Rank(1), Rank(2)];
    let mut sends: Vec<(Rank, ProtocolId, u64, u64)> = Vec::new();
    for (turn, len) in [8, 9, 200, 1000, 1024, 2000, 2041, 8, 3000].into_iter().enumerate() {
        // So many words that they take several records.
        for number in 0..if len == 8 { 300 } else { 25 } {
            // One behind the other, or anywhere.
            let first = if turn % 2 == 0 { number * len } else { (number * 7919) % 40_000 };
            sends.push((targets[turn % 2], protocols[usize::from(number == 17)], first, len));
            sends.push((targets[1 - turn % 2], protocols[turn % 2], first, len));
        }
    }
    let descriptors =
        sends.iter().map(|&(to, protocol, first, len)| memory.recorded_send(to, protocol, first, len));
    let id = store(&world, descriptors.collect());
    for _ in 0..12 {
        let bytes = world.random.bytes(128 << 10);
        memory.write(Rank(0), 0, &bytes);
        let start = replay(&world, id);
        replay_ends(&mut world, start);
        world.until("everything arrives", |_| log.len() >= sends.len());
        world.a_while();
        let got = log.take();
        for to in targets {
            let got: Vec<_> = got.iter().filter(|received| received.at.rank == to).collect();
            let sent: Vec<_> = sends.iter().filter(|send| send.0 == to).collect();
            assert_eq!(got.len(), sent.len());
            for (received, (_, protocol, first, len)) in got.into_iter().zip(sent) {
                let name = ["one", "two"][usize::from(*protocol == protocols[1])];
                assert_eq!(received.protocol, name);
                assert!(received.bytes == bytes[*first as usize..][..*len as usize], "{len} bytes to {to}");
            }
        }
    }
}

/// More of them than are set aside for a protocol that is not registered: they wait where they are, in the middle of
/// whatever carries them, and go on from there.
pub fn alike_sends_wait_until_their_protocol_is_registered<H: Harness>(harness: H) {
    const COUNT: u64 = 40;
    const REPLAYS: usize = 60;
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let late = world.register(Rank(0), Probe::recording("late", &log));
    let memory = world.memory(64 << 10);
    let bytes = world.random.bytes(64 << 10);
    memory.write(Rank(0), 0, &bytes);
    let id = store(&world, (0..COUNT).map(|n| memory.recorded_send(Rank(1), late, n * 1000, 1000)).collect());
    let starts: Vec<_> = (0..REPLAYS)
        .map(|_| {
            world.a_while();
            replay(&world, id)
        })
        .collect();
    world.a_while();
    assert_eq!(log.len(), 0);
    world.register(Rank(1), Probe::recording("late", &log));
    for start in starts {
        replay_ends(&mut world, start);
    }
    world.until("everything arrives", |_| log.len() >= REPLAYS * COUNT as usize);
    world.a_while();
    let got = log.take();
    assert_eq!(got.len(), REPLAYS * COUNT as usize);
    for (number, received) in got.into_iter().enumerate() {
        let first = number % COUNT as usize * 1000;
        assert!(received.bytes == bytes[first..][..1000], "message {number}");
    }
}

/// Messages that lie behind each other are handed over one after the other as far as their sender is trusted: what a handler
/// finds wrong with one of them is the end of all behind it.
pub fn alike_sends_end_where_a_handler_cuts_their_sender_off<H: Harness>(harness: H) {
    const COUNT: u64 = 100;
    const LAST: usize = 130;
    let mut world = World::new(harness, 3);
    // Words, and what may go in batches; each kind from a rank of its own.
    for (from, len) in [(Rank(0), 8), (Rank(2), 1000)] {
        let name = format!("{len} bytes");
        let log = Log::default();
        let received = log.clone();
        let kind = name.clone();
        world.register(Rank(0), Probe::new(&name, |_, _| {}));
        world.register(Rank(2), Probe::new(&name, |_, _| {}));
        let probe = Probe::new(&name, move |scope, message| {
            let source = message.source.rank;
            received.arrived(scope.me(), &kind, &message);
            if received.len() == LAST {
                scope.cut_off(source);
            }
        });
        let protocol = world.register(Rank(1), probe);
        let memory = world.memory(128 << 10);
        let send = |n| Descriptor {
            source: [memory.local[from.index()] as u64, n * len],
            ..memory.recorded_send(Rank(1), protocol, 0, len)
        };
        let sends = (0..COUNT).map(send).collect();
        let id = world.enter(at(from), |scope| scope.store_pattern(sends, Box::new(())));
        let id = id.expect("something was recorded");
        let start = |world: &World<H>| world.enter(at(from), |scope| scope.replay(id)).expect("rank 1 lives");
        // The first time through, everything is known to be as it should.
        start(&world);
        world.until("the first replay arrives", |_| log.len() as u64 == COUNT);
        start(&world);
        world.until("the sender is cut off", |world| {
            world.errors(Rank(1)).contains(&Fault::PeerCorrupt(from))
        });
        world.a_while();
        assert_eq!(log.len(), LAST, "messages of {len} bytes of rank {from}");
    }
}
