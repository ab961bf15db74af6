//! Injection FIFOs besides those of the targets.

use super::world::at;
use super::{Harness, Log, Message, Outbox, World};
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::engine::{
    FifoError, FifoId, FifoOptions, Payload, ReplayStart, SendArgs, Sent, Wait, record_info,
};
use posthaste_core::{Descriptor, Fault, ProtocolId, Rank, SendError, Ticket};
use std::collections::VecDeque;

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
            let sent = scope.send_through(fifo, &args, Payload::Borrowed(&message.payload), Wait::Await);
            match sent.expect("it is active").expect("its target lives") {
                Sent::Queued(ticket) => Some(ticket),
                Sent::Later(ticket, ..) => {
                    scope.detach(ticket);
                    None
                }
                other => panic!("{other:?}"),
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
        let refused = scope.send_through(fifo, &args, Payload::Borrowed(b"no"), Wait::Await);
        assert!(matches!(refused, Err(FifoError::Inactive)));
        scope.activate_fifo(fifo, true).expect("it is open");
        let lost = SendArgs { target: at(Rank(1)), ..args };
        let refused = scope.send_through(fifo, &lost, Payload::Borrowed(b"no"), Wait::Await);
        let fault = SendError::Fault(Fault::PeerLost(Rank(1)));
        assert!(matches!(refused, Ok(Err((error, _))) if error == fault));
    });
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

/// What waits never comes back when a FIFO is full, and nothing of it stays there.
pub fn who_never_waits_is_told_that_a_fifo_has_no_room<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("never", &log);
    let from = at(Rank(0));
    let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    let enable =
        |world: &World<H>, on| world.enter(from, |scope| scope.enable_fifo(fifo, on)).expect("it is open");
    enable(&world, false);
    let message = |n| Message::new(Rank(1), protocol, [n; 8]);
    let all: Vec<Message> = (0..100).map(message).collect();
    let mut queue: VecDeque<Message> = all.iter().cloned().collect();
    let (mut tickets, mut sent) = (Vec::new(), 0);
    loop {
        let payload = queue.front().expect("a FIFO of 8 slots has no room for 100").payload.clone();
        let args = SendArgs { target: at(Rank(1)), protocol, cookie: 0, info: &[], relaxed: true };
        let back = world.enter(from, |scope| {
            let sent = scope.send_through(fifo, &args, Payload::Borrowed(&payload), Wait::Never);
            match sent.expect("it is active").expect("its target lives") {
                Sent::Queued(ticket) => {
                    tickets.push(ticket);
                    None
                }
                Sent::Full(payload) => Some(payload.bytes_of().to_vec()),
                other => panic!("{other:?}"),
            }
        });
        if let Some(back) = back {
            assert_eq!(back, payload);
            break;
        }
        queue.pop_front();
        sent += 1;
    }
    enable(&world, true);
    for ticket in tickets {
        world.outcome(from, ticket).expect("its target lives");
    }
    world.until("all that were taken arrive", |_| log.len() == sent);
    log.check(from, at(Rank(1)), &all[..sent]);
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
            while let Sent::Queued(ticket) = scope
                .send_through(fifo, &args, Payload::Borrowed(b"word"), Wait::Never)
                .expect("it is active")
                .expect("its target lives")
            {
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
