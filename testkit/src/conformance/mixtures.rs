//! Patterns of sends, puts and gets, against what they are to do.

use super::requests::quietly;
use super::world::at;
use super::{Harness, Log, Memory, Message, Outbox, Probe, World};
use bytes::Bytes;
use posthaste_core::descriptor::{Info, Op, SourceKind};
use posthaste_core::engine::{Payload, ReplayStart, Rma, SendArgs, record_info};
use posthaste_core::protocol::{Credit, Flow};
use posthaste_core::wire::FIRST_USER;
use posthaste_core::{Descriptor, Fault, PatternId, ProtocolId, Rank, Ticket};
use std::sync::{Arc, Mutex};

/// Bytes of memory, by thirds: sources, targets of puts, and places that gets read and fill.
const THIRD: u64 = 64 << 10;

/// A recorded operation.
#[derive(Clone, Debug)]
struct Recorded {
    op: Op,
    target: Rank,
    info: Vec<u8>,
    fixed: bool,
    /// Where its bytes come from and go to.
    from: u64,
    to: u64,
    len: u64,
}

/// Operations at random; each has memory of its own.
fn mixture<H: Harness>(world: &mut World<H>, count: usize) -> Vec<Recorded> {
    let ranks = world.clients.len();
    let sizes = world.sizes();
    let mut place = 0;
    let mut one = || {
        let random = &mut world.random;
        let op = [Op::Put, Op::Get, Op::Send, Op::Send][random.below(4)];
        let left = THIRD - place;
        let len = match random.below(4) {
            0 => 8,
            1 => random.below(200) as u64,
            _ => sizes[random.below(sizes.len())] as u64,
        };
        let len = len.min(left / 4);
        let from = place + if random.chance(50) { (8 - place % 8) % 8 } else { 0 };
        place = from + len;
        let info = if op == Op::Send && random.chance(40) { random.below(113) } else { 0 };
        let info = random.bytes(info);
        let target = Rank(random.below(ranks) as u32);
        let fixed = random.chance(30);
        Recorded { op, target, info, fixed, from, to: from, len }
    };
    (0..count).map(|_| one()).collect()
}

fn descriptors(memory: &Memory, protocol: ProtocolId, recorded: &[Recorded]) -> Vec<Descriptor> {
    let mut all = Vec::new();
    for one in recorded {
        let mut descriptor = Descriptor {
            op: one.op,
            source_kind: SourceKind::Region,
            rank: one.target,
            len: one.len,
            source: [memory.local[0] as u64, one.from],
            ..Descriptor::default()
        };
        match one.op {
            Op::Send => {
                descriptor.protocol = ProtocolId(FIRST_USER + protocol.0);
                record_info(&mut all, descriptor, &one.info, one.fixed);
                continue;
            }
            Op::Put => descriptor.offset = THIRD + one.to,
            _ => {
                descriptor.offset = 2 * THIRD + one.to;
                // Filled where it is read: each rank's is its own.
                descriptor.source[1] = 3 * THIRD + one.from;
            }
        }
        descriptor.region = memory.remote[0][one.target.index()] as u32;
        all.push(descriptor);
    }
    all
}

fn store<H: Harness>(world: &World<H>, descriptors: Vec<Descriptor>) -> PatternId {
    let stored = world.enter(at(Rank(0)), |scope| scope.store_pattern(descriptors, Box::new(())));
    stored.expect("there is room")
}

fn started<H: Harness>(world: &World<H>, id: PatternId, info: Option<&Info>) -> Option<Ticket> {
    match world.enter(at(Rank(0)), |scope| scope.replay_with(id, info, None)).expect("its targets live") {
        ReplayStart::Done => None,
        ReplayStart::Queued { ticket, .. } => Some(ticket),
    }
}

/// Replays of random mixtures move what is in their sources when they are replayed: all of it, once, in order.
pub fn random_mixtures_do_what_they_say<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("mixture", &log);
    let memory = world.memory(4 * THIRD);
    let mut expected: Vec<Vec<Message>> = vec![Vec::new(); 3];
    for count in [1, 3, 12, 40] {
        let recorded = mixture(&mut world, count);
        let id = store(&world, descriptors(&memory, protocol, &recorded));
        for _ in 0..3 {
            let sources = world.random.bytes(THIRD as usize);
            memory.write(Rank(0), 0, &sources);
            for rank in [Rank(0), Rank(1), Rank(2)] {
                let bytes = world.random.bytes(THIRD as usize);
                memory.write(rank, 2 * THIRD, &bytes);
            }
            let info = world.random.chance(30).then(|| world.random.below(113));
            let info = info.map(|len| world.random.bytes(len));
            let new = info.as_ref().map(|info| Info::new(info).expect("not too long"));
            // Several at once, of the same bytes.
            let turns = 1 + world.random.below(3);
            let tickets: Vec<_> = (0..turns).filter_map(|_| started(&world, id, new.as_ref())).collect();
            for ticket in tickets {
                assert!(world.outcome(at(Rank(0)), ticket).is_ok());
            }
            for one in (0..turns).flat_map(|_| &recorded) {
                let bytes = &sources[one.from as usize..][..one.len as usize];
                match one.op {
                    Op::Put => {
                        assert_eq!(memory.bytes(one.target, THIRD + one.to, bytes.len()), bytes, "{one:?}");
                    }
                    Op::Get => {
                        let there = memory.bytes(one.target, 2 * THIRD + one.to, bytes.len());
                        let here = memory.bytes(Rank(0), 3 * THIRD + one.from, bytes.len());
                        assert_eq!(here, there, "{one:?}");
                    }
                    _ => {
                        let carried = info.as_ref().filter(|_| !one.fixed).unwrap_or(&one.info);
                        let message = Message::new(one.target, protocol, bytes.to_vec());
                        expected[one.target.index()].push(Message { info: carried.clone(), ..message });
                    }
                }
            }
        }
        world.enter(at(Rank(0)), |scope| scope.unregister_pattern(id));
    }
    let sent: usize = expected.iter().map(Vec::len).sum();
    world.until("all messages arrive", |_| log.len() >= sent);
    world.a_while();
    for rank in [Rank(0), Rank(1), Rank(2)] {
        log.check(at(Rank(0)), at(rank), &expected[rank.index()]);
    }
    let used = world.enter(at(Rank(0)), |scope| scope.pattern_slots()).0;
    assert_eq!(used, 0, "all sections are free again");
}

/// Recorded puts of words next to each other go where each says: from and to whichever memory, aligned or not, of whichever
/// length, however many are alike but for their places.
pub fn rows_of_recorded_words_go_where_each_says<H: Harness>(harness: H) {
    const WORDS: u64 = 1000;
    let mut world = World::new(harness, 2);
    let memories = [world.memory(3 * 8 * WORDS), world.memory(3 * 8 * WORDS)];
    for _ in 0..6 {
        let mut put = Descriptor { op: Op::Put, source_kind: SourceKind::Region, ..Descriptor::default() };
        let (mut puts, mut from, mut to) = (Vec::new(), &memories[0], 0);
        for word in 0..WORDS {
            let random = &mut world.random;
            if word == 0 || random.chance(3) {
                (from, to) = (&memories[random.below(2)], random.below(2));
                put.rank = Rank(random.below(2) as u32);
            }
            // Some lie across two words, of which the next one belongs to nobody else.
            let aslant = u64::from(random.chance(3));
            (put.len, put.offset) = (8, 8 * (WORDS + 2 * word) + 3 * aslant);
            put.source = [from.local[0] as u64, 8 * random.below(WORDS as usize) as u64];
            if random.chance(3) {
                put.len = random.below(9) as u64;
            }
            if random.chance(3) {
                put.source[1] = random.below(8 * WORDS as usize - 8) as u64;
            }
            put.region = memories[to].remote[0][put.rank.index()] as u32;
            puts.push((from, to, put));
        }
        let id = store(&world, puts.iter().map(|(_, _, put)| *put).collect());
        for _ in 0..2 {
            for memory in &memories {
                for rank in [Rank(0), Rank(1)] {
                    let bytes = world.random.bytes(3 * 8 * WORDS as usize);
                    memory.write(rank, 0, &bytes);
                }
            }
            let whole = |memory: &Memory, rank| memory.bytes(rank, 0, 3 * 8 * WORDS as usize);
            let mut expected =
                memories.each_ref().map(|memory| [Rank(0), Rank(1)].map(|at| whole(memory, at)));
            for (from, to, put) in &puts {
                let bytes = from.bytes(Rank(0), put.source[1], put.len as usize);
                expected[*to][put.rank.index()][put.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            if let Some(ticket) = started(&world, id, None) {
                assert!(world.outcome(at(Rank(0)), ticket).is_ok());
            }
            for (memory, expected) in memories.iter().zip(&expected) {
                for rank in [Rank(0), Rank(1)] {
                    assert!(whole(memory, rank) == expected[rank.index()], "what was put to {rank}");
                }
            }
        }
        world.enter(at(Rank(0)), |scope| scope.unregister_pattern(id));
    }
}

/// Recorded messages that take credit wait for it, one replay after the other; nothing else waits with them.
pub fn recorded_messages_wait_for_credit<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.credits = 4);
    let (log, kept) = (Log::default(), Arc::new(Mutex::new(Vec::<Credit>::new())));
    let credits = kept.clone();
    let received = log.clone();
    let probe = Probe::new("kept", move |scope, message| {
        received.arrived(scope.me(), "", &message);
        credits.lock().expect("no panic under this lock").push(message.credit());
    });
    world.register(Rank(0), Probe::new("kept", |_, _| {}).flow(Flow::Credited));
    let protocol = world.register(Rank(1), probe.flow(Flow::Credited));
    let memory = world.memory(4 * THIRD);
    let send = |at: u64| Recorded {
        op: Op::Send,
        target: Rank(1),
        info: Vec::new(),
        fixed: false,
        from: at * 8,
        to: 0,
        len: 8,
    };
    let three: Vec<_> = (0..3).map(send).collect();
    let five: Vec<_> = (0..5).map(send).collect();
    let refused = world
        .enter(at(Rank(0)), |scope| scope.store_pattern(descriptors(&memory, protocol, &five), Box::new(())));
    assert!(refused.is_err(), "five need more than is ever granted");
    let id = store(&world, descriptors(&memory, protocol, &three));
    let put = Recorded { op: Op::Put, to: 8, ..send(9) };
    let other = store(&world, descriptors(&memory, protocol, &[put]));
    memory.write(Rank(0), 0, &(0..80).collect::<Vec<u8>>());
    let tickets: Vec<_> = (0..6).filter_map(|_| started(&world, id, None)).collect();
    let behind = started(&world, other, None).expect("it is behind replays that wait");
    world.a_while();
    assert!(log.len() <= 4, "{} messages for 4 credits", log.len());
    assert_eq!(memory.bytes(Rank(1), THIRD + 8, 8), [0; 8], "a later replay overtook");
    // An access that is no replay does not wait for credit.
    let direct = world.access(&memory, Rank(0), Rank(1), THIRD, posthaste_core::engine::Rma::Get(8));
    world.access_ends(Rank(0), direct);
    world.until("all arrive", |world| {
        let consumed: Vec<Credit> = kept.lock().expect("no panic under this lock").drain(..).collect();
        world.enter(at(Rank(1)), |scope| consumed.into_iter().for_each(|credit| scope.consumed(credit)));
        log.len() == 18
    });
    for ticket in tickets.into_iter().chain([behind]) {
        assert!(world.outcome(at(Rank(0)), ticket).is_ok());
    }
    assert_eq!(memory.bytes(Rank(1), THIRD + 8, 8), (72..80).collect::<Vec<u8>>());
    for (number, message) in log.all().iter().enumerate() {
        let first = (number % 3 * 8) as u8;
        assert_eq!(message.bytes, (first..first + 8).collect::<Vec<u8>>(), "message {number}");
    }
}

/// Credit that is owed and not worth a record of itself is paid to a replay that waits for it: one that needs all there is, of
/// messages or of bytes, goes on again and again.
pub fn a_replay_gets_all_the_credit_that_there_is<H: Harness>(harness: H) {
    const LEN: u64 = 512;
    let mut world = World::with(harness, 2, |setup| {
        setup.config.credits = 4;
        setup.config.credit_bytes = 4 * LEN;
    });
    let log = Log::default();
    let received = log.clone();
    let probe = Probe::new("all", move |scope, message| {
        received.arrived(scope.me(), "all", &message);
        scope.consumed(message.credit());
    });
    world.register(Rank(0), Probe::new("all", |_, _| {}).flow(Flow::Credited));
    let protocol = world.register(Rank(1), probe.flow(Flow::Credited));
    let memory = world.memory(4 * THIRD.max(LEN));
    let send =
        |len| Recorded { op: Op::Send, target: Rank(1), info: Vec::new(), fixed: false, from: 0, to: 0, len };
    let mut expected = 0;
    for len in [8, LEN] {
        let [one, all] =
            [1, 4].map(|count| store(&world, descriptors(&memory, protocol, &vec![send(len); count])));
        for (id, messages) in [(one, 1), (all, 4), (all, 4), (one, 1), (one, 1), (all, 4)] {
            let ticket = started(&world, id, None);
            expected += messages;
            world.until("all arrive", |_| log.len() == expected);
            if let Some(ticket) = ticket {
                assert!(world.outcome(at(Rank(0)), ticket).is_ok());
            }
        }
    }
}

/// Words that were recorded behind each other, and may arrive together: each is handled once and in order, whatever the
/// handlers of others do.
pub fn recorded_words_pass_those_whose_handler_panics<H: Harness>(harness: H) {
    const WORDS: u64 = 150;
    let mut world = World::new(harness, 2);
    let (log, answers) = (Log::default(), Log::default());
    let answer = world.record("answer", &answers);
    let received = log.clone();
    let probe = Probe::new("words", move |scope, message| {
        let (number, source) = (received.arrived(scope.me(), "words", &message)[0], message.source);
        match number % 10 {
            // It may take the sending half meanwhile.
            3 => {
                let args =
                    SendArgs { target: source, protocol: answer, cookie: 0, info: &[], relaxed: false };
                let given = scope.give(&args, Payload::Owned(Bytes::from(vec![number])));
                given.expect("it lives").leave();
            }
            7 => std::panic::panic_any("a handler of a test"),
            _ => {}
        }
    });
    world.register(Rank(0), Probe::new("words", |_, _| {}));
    let protocol = world.register(Rank(1), probe);
    let memory = world.memory(4 * THIRD);
    let word = |at: u64| Recorded {
        op: Op::Send,
        target: Rank(1),
        info: Vec::new(),
        fixed: false,
        from: at * 8,
        to: 0,
        // One among them is no word, and one is not aligned.
        len: if at == 40 { 9 } else { 8 },
    };
    let words: Vec<_> = (0..WORDS).map(word).collect();
    let id = store(&world, descriptors(&memory, protocol, &words));
    let bytes: Vec<u8> = (0..WORDS).flat_map(|at| [at as u8; 8]).chain([0; 8]).collect();
    memory.write(Rank(0), 0, &bytes);
    for round in 1..=3 {
        quietly(|| {
            let ticket = started(&world, id, None);
            if let Some(ticket) = ticket {
                assert!(world.outcome(at(Rank(0)), ticket).is_ok());
            }
            world.until("all arrive", |_| {
                log.len() as u64 == round * WORDS && answers.len() as u64 == round * WORDS / 10
            });
        });
    }
    for (index, message) in log.all().iter().enumerate() {
        let number = index as u64 % WORDS;
        assert_eq!(message.bytes[..8], [number as u8; 8], "message {index}");
        assert_eq!(message.bytes.len(), words[number as usize].len as usize);
    }
    assert_eq!(world.handle(at(Rank(1))).stats().panics, 3 * WORDS / 10);
}

/// Replays that touch a dead rank end, with its loss or before it; what goes to others is done.
pub fn a_replay_to_a_lost_peer_ends_and_the_others_part_is_done<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("mixture", &log);
    let memory = world.memory(4 * THIRD);
    let mut recorded = Vec::new();
    for number in 0..10u64 {
        for target in [Rank(1), Rank(2)] {
            let place = number * 512 + u64::from(target.0) * 5120;
            let op = [Op::Put, Op::Send, Op::Get][number as usize % 3];
            recorded.push(Recorded {
                op,
                target,
                info: vec![7],
                fixed: false,
                from: place,
                to: place,
                len: 300,
            });
        }
    }
    recorded.iter_mut().for_each(|one| {
        if one.op != Op::Send {
            one.info.clear();
        }
    });
    let id = store(&world, descriptors(&memory, protocol, &recorded));
    let bytes = world.random.bytes(THIRD as usize);
    memory.write(Rank(0), 0, &bytes);
    let mut tickets = Vec::new();
    let dies = world.random.below(8);
    for turn in 0..12 {
        if turn == dies {
            world.kill(Rank(1));
        }
        match world.enter(at(Rank(0)), |scope| scope.replay(id)) {
            Ok(ReplayStart::Queued { ticket, .. }) => tickets.push(ticket),
            Ok(ReplayStart::Done) => {}
            Err(error) => assert_eq!(error, Fault::PeerLost(Rank(1)).into()),
        }
        for _ in 0..world.random.below(50) {
            world.step();
        }
    }
    for ticket in tickets {
        if let Err(fault) = world.outcome(at(Rank(0)), ticket) {
            assert_eq!(fault, Fault::PeerLost(Rank(1)));
        }
    }
    world.until("the loss is known", |world| world.enter(at(Rank(0)), |s| s.fault_of(Rank(1))).is_some());
    let lost = world.enter(at(Rank(0)), |scope| scope.replay(id));
    let fault = match lost {
        Ok(ReplayStart::Queued { ticket, .. }) => world.outcome(at(Rank(0)), ticket).err(),
        Ok(ReplayStart::Done) => None,
        Err(posthaste_core::engine::PatternError::Fault(fault)) => Some(fault),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(fault, Some(Fault::PeerLost(Rank(1))));
    for one in recorded.iter().filter(|one| one.target == Rank(2) && one.op == Op::Put) {
        let there = memory.bytes(Rank(2), THIRD + one.to, 300);
        assert_eq!(there, bytes[one.from as usize..][..300], "{one:?}");
    }
    let messages = recorded.iter().filter(|one| one.target == Rank(2) && one.op == Op::Send).count() * 13;
    world.until("the messages to the living arrive", |_| log.of(at(Rank(0)), at(Rank(2))).len() == messages);
    world.enter(at(Rank(0)), |scope| scope.unregister_pattern(id));
    assert_eq!(world.enter(at(Rank(0)), |scope| scope.pattern_slots()).0, 0, "nothing is under way");
}

/// Puts one way and messages the other, long ones among them, while now and then one of both does not take what comes: what is
/// said of the puts does not get in among the bytes of a message.
pub fn long_messages_cross_with_puts<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("crossing", &log);
    let memory = world.memory(16 << 10);
    let (putter, sender) = (at(Rank(0)), at(Rank(1)));
    let long = world.caps().max_eager;
    let bytes = world.random.bytes(6000);
    let (mut puts, mut messages) = (Vec::new(), Vec::new());
    for _ in 0..300 {
        // A few, so that there are long ones behind which nothing is queued.
        let burst: Vec<_> = (0..1 + world.random.below(12))
            .map(|n| {
                let len = if world.random.chance(40) { long } else { world.random.below(long / 3) };
                Message::filled(sender, putter, protocol, messages.len() + n, n, len)
            })
            .collect();
        messages.extend(burst.iter().cloned());
        let mut outbox = Outbox::new(sender, burst);
        let stalled = [putter.rank, sender.rank][world.random.below(2)];
        world.pause(stalled);
        let (mut first, mut left) = (true, if long > 4096 { 1000 } else { 30 });
        world.until("all are sent", |world| {
            // So many at most: where there is room for one packet, what is said of puts without end keeps messages waiting.
            for _ in 0..world.random.below(4).min(left).min(12 - puts.len().min(12)) {
                left -= 1;
                let len = world.random.below(bytes.len());
                let put = Rma::Put(Payload::Borrowed(&bytes[..len]));
                puts.extend(world.access(&memory, putter.rank, sender.rank, 0, put));
            }
            // Before it looks at what comes in, and so outside of that.
            outbox.pump(world);
            if std::mem::take(&mut first) {
                (0..world.random.below(3)).for_each(|_| world.step());
                world.resume(stalled);
            }
            let ended = |ticket| world.handle(putter).slots().take(ticket);
            puts.retain(|ticket| match ended(*ticket) {
                Some(Err(fault)) => panic!("a put failed: {fault}"),
                outcome => outcome.is_none(),
            });
            outbox.is_done()
        });
        assert!(outbox.failed.is_empty(), "{:?}", outbox.failed);
        (0..world.random.below(3)).for_each(|_| world.step());
    }
    for ticket in puts {
        assert!(world.outcome(putter, ticket).is_ok());
    }
    world.until("all have arrived", |_| log.len() == messages.len());
    log.check(sender, putter, &messages);
}
