//! Injection FIFOs besides those of the targets.

use super::flow::{try_send, with_keeper};
use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::engine::{
    Deposit, FifoError, FifoId, FifoOptions, Given, Payload, ReplayStart, SendArgs, record_info,
};
use posthaste_core::protocol::Flow;
use posthaste_core::{Descriptor, Fault, ProtocolId, Rank, Scope, SendError, Ticket};
use std::collections::VecDeque;

fn give(scope: &mut Scope<'_>, fifo: FifoId, args: &SendArgs<'_>, payload: &[u8]) -> Given {
    let given = scope.give_through(fifo, args, Payload::Borrowed(payload));
    given.expect("it is active").expect("its target lives")
}

/// Puts messages into a FIFO as far as there is room; the tickets of those that are in.
fn fill<H: Harness>(world: &World<H>, fifo: FifoId, queue: &mut VecDeque<Message>) -> Vec<Ticket> {
    let mut tickets = Vec::new();
    while let Some(message) = queue.front() {
        let args = SendArgs {
            target: message.target,
            protocol: message.protocol,
            cookie: 0,
            info: &message.info,
            relaxed: true,
        };
        let sent = world.enter(at(Rank(0)), |scope| {
            match give(scope, fifo, &args, &message.payload) {
                Given::Queued(ticket) => Some(ticket),
                // It is taken back.
                Given::Kept(ticket, _) => {
                    scope.detach(ticket);
                    None
                }
                Given::Done => panic!("whoever is in a FIFO is told that it is out"),
            }
        });
        match sent {
            Some(ticket) => tickets.push(ticket),
            None => break,
        }
        queue.pop_front();
    }
    tickets
}

/// Messages of all lengths through several FIFOs, the ordinary way and in replays at once: all arrive whole, and in the
/// order of whichever way they take.
pub fn fifos_keep_their_own_order_and_mix_with_all_others<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let logs: Vec<Log> = (0..4).map(|_| Log::default()).collect();
    let names = ["first", "second", "urgent", "ordinary"];
    let protocols: Vec<ProtocolId> =
        names.iter().zip(&logs).map(|(name, log)| world.record(name, log)).collect();
    let memory = world.memory(32 << 10);
    let bytes = world.random.bytes(32 << 10);
    memory.write(Rank(0), 0, &bytes[..8 << 10]);
    let open = |priority, quantum| FifoOptions { slots: 8, priority, quantum };
    let fifos: Vec<FifoId> = [open(false, 0), open(false, 100_000), open(true, 0)]
        .into_iter()
        .map(|options| world.enter(at(Rank(0)), |scope| scope.open_fifo(options)).expect("so few slots"))
        .collect();
    let sizes = world.sizes();
    let mut queues: Vec<VecDeque<Message>> = Vec::new();
    for (way, protocol) in protocols.iter().enumerate() {
        let message = |n: usize| {
            let (to, len) = (at(Rank((n % 3) as u32)), sizes[(n * 7 + way) % sizes.len()]);
            Message::filled(at(Rank(0)), to, *protocol, n, n % 113, len)
        };
        queues.push((0..30).map(message).collect());
    }
    let all = queues.clone();
    // A pattern of puts, gets and sends, through the second FIFO; its messages are of a protocol of its own.
    let log = Log::default();
    let recorded = world.record("recorded", &log);
    let mut descriptors = Vec::new();
    for to in [Rank(1), Rank(2)] {
        let access = |op, offset: u64, source: u64| Descriptor {
            op,
            source_kind: SourceKind::Region,
            rank: to,
            region: memory.remote[0][to.index()] as u32,
            offset,
            len: 6_000,
            source: [memory.local[0] as u64, source],
            ..Descriptor::default()
        };
        descriptors.push(access(Op::Put, 8 << 10, 0));
        record_info(&mut descriptors, memory.recorded_send(to, recorded, 1_000, 5_000), b"info", false);
        descriptors.push(access(Op::Get, 8 << 10, (8 << 10) + u64::from(to.0) * 6_000));
    }
    let stored = world.enter(at(Rank(0)), |scope| scope.store_pattern(descriptors, Box::new(())));
    let pattern = stored.expect("there is room");
    let ordinary: Vec<Message> = queues.pop().expect("four ways").into();
    let mut outbox = super::Outbox::new(at(Rank(0)), ordinary);
    let mut tickets = Vec::new();
    let mut replays = 0;
    world.until("all is in", |world| {
        for (fifo, queue) in fifos.iter().zip(&mut queues) {
            tickets.extend(fill(world, *fifo, queue));
        }
        outbox.pump(world);
        if replays < 5 && world.random.chance(10) {
            replays += 1;
            let replay = |scope: &mut posthaste_core::Scope<'_>| {
                scope.replay_with(pattern, None, Some(fifos[1])).expect("it exists")
            };
            if let ReplayStart::Queued { ticket, .. } = world.enter(at(Rank(0)), replay) {
                tickets.push(ticket);
            }
        }
        outbox.is_done() && queues.iter().all(VecDeque::is_empty) && replays == 5
    });
    let drains = world.enter(at(Rank(0)), |scope| scope.drain_fifos(None, None)).expect("it goes on");
    for ticket in tickets.into_iter().chain(drains) {
        assert!(world.outcome(at(Rank(0)), ticket).is_ok());
    }
    world.until("all arrives", |_| logs.iter().all(|log| log.len() == 30) && log.len() == 10);
    for (way, log) in all.iter().zip(&logs) {
        for to in [Rank(0), Rank(1), Rank(2)] {
            let expected: Vec<Message> = way.iter().filter(|m| m.target == at(to)).cloned().collect();
            log.check(at(Rank(0)), at(to), &expected);
        }
    }
    assert!(log.all().iter().all(|one| one.bytes == bytes[1_000..6_000] && one.info == b"info"));
    for to in [Rank(1), Rank(2)] {
        assert_eq!(memory.bytes(to, 8 << 10, 6_000), bytes[..6_000]);
        assert_eq!(memory.bytes(Rank(0), (8 << 10) + u64::from(to.0) * 6_000, 6_000), bytes[..6_000]);
    }
    world.enter(at(Rank(0)), |scope| {
        for fifo in &fifos {
            assert!(scope.fifo_status(*fifo).expect("it is open").is_empty());
            scope.close_fifo(*fifo);
            assert_eq!(scope.fifo_status(*fifo), Err(FifoError::Closed));
        }
    });
}

/// What waits in a FIFO for a rank that is lost ends with its loss; what waits for others behind it goes on.
pub fn what_waits_in_a_fifo_for_a_lost_peer_ends<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("message", &log);
    let many = FifoOptions { slots: usize::MAX, ..FifoOptions::default() };
    let refused = world.enter(at(Rank(0)), |scope| scope.open_fifo(many));
    assert!(matches!(refused, Err(FifoError::TooManySlots { slots: usize::MAX, .. })), "{refused:?}");
    let fifo =
        world.enter(at(Rank(0)), |scope| scope.open_fifo(FifoOptions::default())).expect("so few slots");
    world.enter(at(Rank(0)), |scope| scope.enable_fifo(fifo, false)).expect("it is open");
    let len = world.caps().max_eager * 2;
    let message = |n: usize| {
        Message::filled(at(Rank(0)), at(Rank(1 + n as u32 % 2)), protocol, n, 3, [10, len][n / 2 % 2])
    };
    let all: Vec<Message> = (0..20).map(message).collect();
    let tickets = fill(&world, fifo, &mut all.iter().cloned().collect());
    assert_eq!(tickets.len(), 20);
    let crossing = world.enter(at(Rank(0)), |scope| {
        scope.set_fifo_threshold(fifo, 250).expect("it is open");
        assert!(matches!(scope.activate_fifo(fifo, false), Err(FifoError::NotEmpty { .. })));
        scope.fifo_crossing(fifo).expect("it is open").expect("it goes on").expect("it is not crossed")
    });
    world.a_while();
    assert!(log.is_empty(), "a FIFO that is not enabled is not served");
    world.kill(Rank(1));
    world.until("the loss is known", |world| world.enter(at(Rank(0)), |s| s.fault_of(Rank(1))).is_some());
    world.enter(at(Rank(0)), |scope| scope.enable_fifo(fifo, true)).expect("it is open");
    for (n, ticket) in tickets.into_iter().enumerate() {
        let outcome = world.outcome(at(Rank(0)), ticket);
        match n % 2 {
            0 => assert_eq!(outcome.expect_err("nobody is there"), Fault::PeerLost(Rank(1))),
            _ => assert!(outcome.is_ok(), "{n}"),
        }
    }
    assert!(world.outcome(at(Rank(0)), crossing).is_ok());
    world.until("the others arrive", |_| log.len() == 10);
    let expected: Vec<Message> = all.into_iter().filter(|m| m.target == at(Rank(2))).collect();
    log.check(at(Rank(0)), at(Rank(2)), &expected);
    world.enter(at(Rank(0)), |scope| {
        let status = scope.fifo_status(fifo).expect("it is open");
        assert!(status.is_empty() && status.crossed && status.head == status.tail);
        scope.clear_fifo_crossed(fifo).expect("it is open");
        assert!(!scope.fifo_status(fifo).expect("it is open").crossed);
        scope.activate_fifo(fifo, false).expect("it is empty");
        let args = SendArgs { target: at(Rank(2)), protocol, cookie: 0, info: &[], relaxed: true };
        let refused = scope.give_through(fifo, &args, Payload::Borrowed(b"no"));
        assert!(matches!(refused, Err(FifoError::Inactive)));
        scope.activate_fifo(fifo, true).expect("it is open");
        let lost = SendArgs { target: at(Rank(1)), ..args };
        let refused = scope.give_through(fifo, &lost, Payload::Borrowed(b"no"));
        let fault = SendError::Fault(Fault::PeerLost(Rank(1)));
        assert!(matches!(refused, Ok(Err((error, _))) if error == fault));
    });
}

/// A FIFO that is not served keeps nobody waiting by what is in it for a rank that is gone.
pub fn what_waits_for_a_lost_peer_in_a_fifo_that_is_not_served_keeps_nobody_waiting<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("message", &log);
    let from = at(Rank(0));
    // Of so few bytes in a turn that what goes with the rank takes more than one.
    let options = FifoOptions { quantum: 4096, ..FifoOptions::default() };
    let [ahead, behind] =
        [(); 2].map(|()| world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots"));
    for fifo in [ahead, behind] {
        world.enter(from, |scope| scope.enable_fifo(fifo, false)).expect("it is open");
    }
    let message = |number, to| Message::filled(from, at(Rank(to)), protocol, number, 3, 10);
    // In the one it is behind what is for another, which stays.
    let living = fill(&world, ahead, &mut VecDeque::from([message(3, 2)]));
    let mut tickets = fill(&world, ahead, &mut VecDeque::from([message(0, 1), message(1, 1)]));
    let mut those_behind = (4..104).map(|number| message(number, 1)).collect();
    tickets.extend(fill(&world, behind, &mut those_behind));
    assert!(those_behind.is_empty(), "there is room");
    let drain =
        |fifo, towards| world.enter(from, |scope| scope.drain_fifos(fifo, towards)).expect("it goes on");
    let (all, lost) = (drain(Some(behind), None), drain(None, Some(Rank(1))));
    assert_eq!([all.len(), lost.len()], [1, 2]);
    world.kill(Rank(1));
    for ticket in tickets {
        assert_eq!(world.outcome(from, ticket).expect_err("nobody is there"), Fault::PeerLost(Rank(1)));
    }
    for ticket in all.into_iter().chain(lost) {
        // Either it had left its place before the loss was told to those who wait for that rank, or the loss is what they hear.
        let ended = world.outcome(from, ticket);
        assert!(matches!(ended, Ok(_) | Err(Fault::PeerLost(Rank(1)))), "{ended:?}");
    }
    // What is for another is where it was, and whoever waits for that waits on.
    world.enter(from, |scope| {
        let len = |scope: &mut Scope<'_>, fifo| scope.fifo_status(fifo).expect("it is open").len;
        assert!(len(scope, ahead) > 0 && len(scope, behind) == 0);
        assert_eq!(scope.drain_fifos(None, None).expect("it goes on").len(), 1);
        assert_eq!(scope.drain_fifos(None, Some(Rank(1))).expect_err("gone"), Fault::PeerLost(Rank(1)));
        scope.enable_fifo(ahead, true).expect("it is open");
    });
    for ticket in living {
        assert!(world.outcome(from, ticket).is_ok());
    }
    world.until("the last arrives", |_| log.len() == 1);
}

/// Who waits for what is in FIFOs for one rank waits for nothing that is there for others alone.
pub fn who_waits_for_one_rank_waits_for_no_other<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("message", &log);
    let fifo =
        world.enter(at(Rank(0)), |scope| scope.open_fifo(FifoOptions::default())).expect("so few slots");
    world.enter(at(Rank(0)), |scope| scope.enable_fifo(fifo, false)).expect("it is open");
    let message = |number: usize, to| Message::filled(at(Rank(0)), at(Rank(to)), protocol, number, 3, 10);
    let drains = |world: &World<H>| {
        let towards = |rank| world.enter(at(Rank(0)), |scope| scope.drain_fifos(None, rank));
        [None, Some(Rank(1)), Some(Rank(2))].map(|rank| towards(rank).expect("it goes on"))
    };
    let mut tickets = fill(&world, fifo, &mut VecDeque::from([message(0, 2)]));
    let first = drains(&world);
    assert_eq!([1, 0, 1], [first[0].len(), first[1].len(), first[2].len()]);
    tickets.extend(fill(&world, fifo, &mut VecDeque::from([message(1, 1)])));
    let second = drains(&world);
    assert_eq!([1, 1, 1], [second[0].len(), second[1].len(), second[2].len()]);
    world.enter(at(Rank(0)), |scope| scope.enable_fifo(fifo, true)).expect("it is open");
    for ticket in tickets.into_iter().chain(first.into_iter().chain(second).flatten()) {
        assert!(world.outcome(at(Rank(0)), ticket).is_ok());
    }
    world.until("both arrive", |_| log.len() == 2);
}

/// What finds no room is no progress: nobody goes on looking for that alone, whoever waits.
pub fn a_fifo_whose_target_has_no_room_lets_its_context_sleep<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("message", &log);
    let options = FifoOptions { slots: 1 << 16, ..FifoOptions::default() };
    let fifo = world.enter(at(Rank(0)), |scope| scope.open_fifo(options)).expect("not so many slots");
    world.pause(Rank(1));
    let len = world.caps().max_eager.min(5_000);
    // More than lanes, pages, sockets and kernels hold on the way.
    let all: Vec<Message> =
        (0..4_000).map(|n| Message::filled(at(Rank(0)), at(Rank(1)), protocol, n, 0, len)).collect();
    let tickets = fill(&world, fifo, &mut all.iter().cloned().collect());
    let context = world.handle(at(Rank(0))).clone();
    let mut idle = 0;
    for _ in 0..10_000 {
        idle = if context.advance() == 0 { idle + 1 } else { 0 };
        if idle == 100 {
            break;
        }
    }
    let waits = world.enter(at(Rank(0)), |scope| scope.fifo_status(fifo)).expect("it is open").len;
    assert!(waits > 0, "there was room for all");
    assert_eq!(idle, 100, "{waits} slots wait, and that counts as progress");
    world.resume(Rank(1));
    for ticket in tickets {
        assert!(world.outcome(at(Rank(0)), ticket).is_ok());
    }
    world.until("all arrive", |_| log.len() == all.len());
}

/// Messages that find no room in a FIFO go into it in their order, though nobody looks after them; of those that are taken back, or
/// that a lost rank was to get, nothing goes anywhere.
pub fn what_finds_no_room_in_a_fifo_keeps_its_order_or_is_taken_back<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let log = Log::default();
    let protocol = world.record("row", &log);
    let from = at(Rank(0));
    let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    world.enter(from, |scope| scope.enable_fifo(fifo, false)).expect("it is open");
    let lengths = [8, 0, 100, world.caps().max_eager * 2 + 3];
    let (mut expected, mut waiting, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..100 {
        let to = if number % 4 == 3 { Rank(2) } else { Rank(1) };
        let message =
            Message::filled(from, at(to), protocol, number, number % 113, lengths[number % 3 + number / 96]);
        let (protocol, info) = (message.protocol, &message.info[..]);
        let args = SendArgs { target: message.target, protocol, cookie: 0, info, relaxed: true };
        match world.enter(from, |scope| give(scope, fifo, &args, &message.payload)) {
            Given::Done => panic!("whoever is in a FIFO is told that it is out"),
            Given::Kept(ticket, deposit) if number % 5 < 2 => {
                if number % 2 == 0 {
                    let back = deposit.withdraw().expect("nothing was sent");
                    assert_eq!(back.bytes_of(), message.payload);
                }
                drop(deposit);
                world.enter(from, |scope| scope.detach(ticket));
            }
            Given::Kept(ticket, deposit) if to == Rank(2) => lost.push((ticket, Some(deposit))),
            Given::Queued(ticket) if to == Rank(2) => lost.push((ticket, None)),
            Given::Kept(ticket, deposit) => {
                waiting.push((ticket, Some(deposit)));
                expected.push(message);
            }
            Given::Queued(ticket) => {
                waiting.push((ticket, None));
                expected.push(message);
            }
        }
    }
    let kept =
        |all: &[(Ticket, Option<Deposit>)]| all.iter().filter(|(_, deposit)| deposit.is_some()).count();
    assert!(kept(&waiting) > 30 && kept(&lost) > 10, "{} and {} wait", kept(&waiting), kept(&lost));
    world.kill(Rank(2));
    world.until("the loss is known", |world| world.enter(from, |s| s.fault_of(Rank(2))).is_some());
    world.enter(from, |scope| scope.enable_fifo(fifo, true)).expect("it is open");
    for (ticket, deposit) in waiting {
        world.outcome(from, ticket).expect("its target lives");
        assert!(deposit.is_none_or(|deposit| deposit.withdraw().is_none()), "it was sent");
    }
    for (ticket, _deposit) in lost {
        assert_eq!(world.outcome(from, ticket).expect_err("nobody is there"), Fault::PeerLost(Rank(2)));
    }
    world.until("all arrive", |_| log.len() >= expected.len());
    world.a_while();
    log.check(from, at(Rank(1)), &expected);
    let status = world.enter(from, |scope| scope.fifo_status(fifo)).expect("it is open");
    assert!(status.is_empty(), "{status:?}");
}

/// With one credit messages through a FIFO and past it go one after the other, as they were given, also those that waited when the
/// FIFO was deactivated; those that waited when it was closed end.
pub fn what_waits_for_credit_goes_through_its_fifo_in_its_turn<H: Harness>(harness: H) {
    let (mut world, log, keeper) = with_keeper(harness, 2, |setup| setup.config.credits = 1);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    for end in ["open", "inactive", "closed"] {
        let fifo = world.enter(from, |scope| scope.open_fifo(FifoOptions::default())).expect("so few slots");
        let had = log.len() + 1;
        world.until("there is credit", |world| try_send(world, Rank(1), ProtocolId(0), b"the credit"));
        let give_one = |world: &World<H>, number: usize, message: &Message| {
            let (target, protocol, info) = (message.target, message.protocol, &message.info[..]);
            let args = SendArgs { target, protocol, cookie: 0, info, relaxed: false };
            let given = world.enter(from, |scope| match number % 3 {
                2 => scope.give(&args, Payload::Borrowed(&message.payload)).expect("it lives"),
                _ => give(scope, fifo, &args, &message.payload),
            });
            let Given::Kept(ticket, deposit) = given else { panic!("there is no credit: {given:?}") };
            (ticket, deposit)
        };
        let message = |number: usize| Message::filled(from, to, ProtocolId(0), number, number, 40 * number);
        let all: Vec<Message> = (0..20).map(message).collect();
        let waiting: Vec<_> =
            all.iter().enumerate().map(|(number, message)| give_one(&world, number, message)).collect();
        match end {
            "inactive" => world.enter(from, |scope| scope.activate_fifo(fifo, false)).expect("it is empty"),
            "closed" => world.enter(from, |scope| scope.close_fifo(fifo)),
            _ => {}
        }
        let goes = |number: usize| end != "closed" || number % 3 == 2;
        let expected = (0..20).filter(|&number| goes(number)).map(|number| &all[number].payload);
        for arrived in had..=had + expected.clone().count() {
            world.until("the next arrives", |_| log.len() == arrived);
            keeper.consume_all(&mut world, to);
        }
        for (number, (ticket, _deposit)) in waiting.into_iter().enumerate() {
            let outcome = world.outcome(from, ticket).map(|_| ());
            assert_eq!(outcome, if goes(number) { Ok(()) } else { Err(Fault::Shutdown) }, "{end} {number}");
        }
        world.a_while();
        let arrived: Vec<_> = log.all().split_off(had).into_iter().map(|got| got.bytes).collect();
        assert!(arrived.iter().eq(expected), "{end}");
    }
}

/// A FIFO that is full, and a protocol that lacks credit: what waits for the one, and then for the other, goes in the order of its
/// way, and no credit is lost, though some are taken back.
pub fn what_waits_for_room_in_a_fifo_and_then_for_credit_keeps_its_order<H: Harness>(harness: H) {
    const CREDITS: usize = 6;
    let (mut world, log, keeper) = with_keeper(harness, 2, |setup| setup.config.credits = CREDITS as u32);
    let (from, to, protocol) = (at(Rank(0)), at(Rank(1)), ProtocolId(0));
    let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    for round in 0..10 {
        world.enter(from, |scope| scope.enable_fifo(fifo, false)).expect("it is open");
        let had = log.len();
        let (mut past, mut through, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..60 {
            let message = Message::filled(from, to, protocol, 60 * round + number, 30, 8 + number);
            let args = SendArgs { target: to, protocol, cookie: 0, info: &message.info, relaxed: false };
            let given = world.enter(from, |scope| match number % 2 {
                0 => scope.give(&args, Payload::Borrowed(&message.payload)).expect("it lives"),
                _ => give(scope, fifo, &args, &message.payload),
            });
            match given {
                Given::Kept(ticket, deposit) if number % 7 == round % 7 => {
                    drop(deposit);
                    world.enter(from, |scope| scope.detach(ticket));
                    continue;
                }
                Given::Kept(ticket, deposit) => waiting.push((ticket, Some(deposit))),
                Given::Queued(ticket) => waiting.push((ticket, None)),
                Given::Done => {}
            }
            if number % 2 == 0 { &mut past } else { &mut through }.push(message.payload);
        }
        world.enter(from, |scope| scope.enable_fifo(fifo, true)).expect("it is open");
        world.until("all arrive", |world| {
            if world.random.chance(5) {
                keeper.consume_all(world, to);
            }
            log.len() == had + past.len() + through.len()
        });
        for (ticket, _deposit) in waiting {
            world.outcome(from, ticket).expect("both live");
        }
        let arrived: Vec<_> = log.all().split_off(had).into_iter().map(|got| got.bytes).collect();
        for way in [past, through] {
            assert!(arrived.iter().filter(|bytes| way.contains(bytes)).eq(&way), "round {round}");
        }
        keeper.consume_all(&mut world, to);
    }
    // All of the credit is there: so many arrive, though nothing is consumed.
    let had = log.len();
    for _ in 0..CREDITS {
        let args = SendArgs { target: to, protocol, cookie: 0, info: &[], relaxed: false };
        world.enter(from, |scope| {
            let given = scope.give(&args, Payload::Borrowed(b"credit")).expect("it lives");
            given.leave().into_iter().for_each(|ticket| scope.detach(ticket));
        });
    }
    world.until("as many arrive as there is credit", |_| log.len() == had + CREDITS);
}

/// Messages that wait for room in a FIFO of names which turn out to be unknown end, and those behind them go on.
pub fn what_waits_in_a_fifo_for_an_unknown_name_holds_up_nobody<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.credits = 1);
    let (log, from) = (Log::default(), at(Rank(0)));
    let unknown = [Flow::Inline, Flow::Credited]
        .map(|flow| world.register(Rank(0), Probe::recording(&format!("unknown {flow:?}"), &log).flow(flow)));
    // Its number is one of this side's alone.
    let known = world.register(Rank(0), Probe::recording("known", &log));
    world.register(Rank(1), Probe::recording("known", &log));
    world.enter(at(Rank(1)), |scope| scope.declare_ready());
    let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    let mut ends = Vec::new();
    for number in 0..30 {
        let protocol = if number % 3 == 2 { known } else { unknown[number % 3] };
        let args = SendArgs { target: at(Rank(1)), protocol, cookie: 0, info: &[], relaxed: false };
        match world.enter(from, |scope| give(scope, fifo, &args, &[number as u8; 40])) {
            Given::Kept(ticket, deposit) => ends.push((protocol == known, ticket, Some(deposit))),
            Given::Queued(ticket) => ends.push((protocol == known, ticket, None)),
            Given::Done => panic!("whoever is in a FIFO is told that it is out"),
        }
    }
    for (is_known, ticket, deposit) in ends {
        match (world.outcome(from, ticket), deposit) {
            (outcome, _) if is_known => drop(outcome.expect("it is known")),
            // It went out before the refusal came.
            (Ok(_), _) => {}
            (Err(fault), Some(_)) => assert_eq!(fault, Fault::NoSuchProtocol(Rank(1))),
            (Err(fault), None) => panic!("it was queued: {fault}"),
        }
    }
    world.until("what is known arrives", |_| log.len() == 10);
    // They stay refused.
    for protocol in unknown {
        let args = SendArgs { target: at(Rank(1)), protocol, cookie: 0, info: &[], relaxed: false };
        world.until("it is refused", |world| {
            world.enter(from, |scope| match scope.give(&args, Payload::Borrowed(b"no")) {
                Err((error, _)) => error == SendError::Fault(Fault::NoSuchProtocol(Rank(1))),
                Ok(Given::Queued(ticket) | Given::Kept(ticket, _)) => {
                    scope.detach(ticket);
                    false
                }
                Ok(Given::Done) => false,
            })
        });
    }
}

/// Any number of replays may wait in a FIFO, which grows for them. Messages have as much room as it was made with, beside them.
pub fn a_fifo_that_replays_have_made_longer_has_as_much_room_for_messages_as_ever<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("room", &log);
    let memory = world.memory(8 << 10);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let put = vec![memory.recorded_put(Rank(1), 0, 4096, 64)];
    let pattern = world.enter(from, |scope| scope.store_pattern(put, Box::new(()))).expect("there is room");
    let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    let enable =
        |world: &World<H>, on| world.enter(from, |scope| scope.enable_fifo(fifo, on)).expect("it is open");
    enable(&world, false);
    let mut tickets = Vec::new();
    for _ in 0..50 {
        let replay = |scope: &mut posthaste_core::Scope<'_>| scope.replay_with(pattern, None, Some(fifo));
        if let ReplayStart::Queued { ticket, .. } = world.enter(from, replay).expect("its target lives") {
            tickets.push(ticket);
        }
    }
    let args = SendArgs { target: to, protocol, cookie: 0, info: &[], relaxed: true };
    let mut sent = 0;
    for round in 1..=3 {
        let before = sent;
        world.enter(from, |scope| {
            while let Given::Queued(ticket) = give(scope, fifo, &args, b"word") {
                tickets.push(ticket);
                sent += 1;
            }
            let waiting = scope.fifo_status(fifo).expect("it is open").len;
            assert_eq!(waiting, sent - before + if round == 1 { 50 } else { 0 });
        });
        // A message takes one slot, and the longest has to have room.
        assert!((1..=8).contains(&(sent - before)), "{} messages", sent - before);
        enable(&world, true);
        for ticket in tickets.drain(..) {
            world.outcome(from, ticket).expect("its target lives");
        }
        world.until("the messages arrive", |_| log.len() == sent);
        enable(&world, false);
    }
}

/// A long message of which a part is out goes on when its FIFO is served no more, so that others for its target need not wait.
pub fn a_long_message_goes_on_though_its_fifo_is_disabled<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("long", &log);
    let from = at(Rank(0));
    world.send_all(&mut [Outbox::new(from, [Message::new(Rank(1), protocol, *b"early")])]);
    world.until("it is known", |_| log.len() == 1);
    // Each round is much shorter than the message.
    let options = FifoOptions { slots: 8, priority: false, quantum: 4096 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    let enable =
        |world: &World<H>, on| world.enter(from, |scope| scope.enable_fifo(fifo, on)).expect("it is open");
    let len = (8 * 4096).max(4 * world.caps().max_eager);
    let long = Message::new(Rank(1), protocol, world.random.bytes(len));
    let mut queue = VecDeque::from([long, Message::new(Rank(1), protocol, *b"behind")]);
    let tickets = fill(&world, fifo, &mut queue);
    assert!(queue.is_empty(), "there is room for two");
    enable(&world, false);
    let mut outbox = Outbox::new(from, [Message::new(Rank(1), protocol, world.random.bytes(len))]);
    world.until("two long ones arrive", |world| {
        outbox.pump(world);
        log.len() == 3
    });
    assert!(world.outcome(from, tickets[0]).is_ok());
    let status = world.enter(from, |scope| scope.fifo_status(fifo)).expect("it is open");
    assert!(!status.is_empty() && !status.enabled, "what has not begun waits: {status:?}");
    enable(&world, true);
    assert!(world.outcome(from, tickets[1]).is_ok());
    world.until("the last one arrives", |_| log.len() == 4);
}

/// What lay in a FIFO when a flush was asked for goes out behind that, and has to be asked for anew: also by who asks when the
/// first has given up.
pub fn a_flush_is_not_ahead_of_what_leaves_a_fifo<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("late", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    world.send_all(&mut [Outbox::new(from, [Message::new(Rank(1), protocol, *b"early")])]);
    world.until("it is known", |_| log.len() == 1);
    let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
    for given_up in [true, false] {
        let before = log.len();
        let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
        world.enter(from, |scope| scope.enable_fifo(fifo, false)).expect("it is open");
        let mut queue = VecDeque::from([Message::new(Rank(1), protocol, *b"late")]);
        let tickets = fill(&world, fifo, &mut queue);
        let flush = |world: &World<H>| {
            world.enter(from, |scope| scope.flush(to)).expect("it is there").expect("something was sent")
        };
        let first = flush(&world);
        if given_up {
            world.enter(from, |scope| scope.detach(first));
        } else {
            world.until("it is answered", |world| world.handle(from).slots().is_done(first));
            let _answer = world.handle(from).slots().take(first);
        }
        world.enter(from, |scope| scope.enable_fifo(fifo, true)).expect("it is open");
        world.until("the message is out", |world| world.handle(from).slots().is_done(tickets[0]));
        let second = flush(&world);
        assert_ne!(second, first, "the question was asked before the message was out");
        world.until("it is answered", |world| world.handle(from).slots().is_done(second));
        assert_eq!(log.len(), before + 1);
        world.enter(from, |scope| {
            let _ends = (scope.detach(second), scope.detach(tickets[0]));
            scope.close_fifo(fifo);
        });
    }
}
