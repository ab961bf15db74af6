//! How things end: a lost peer, a clean leave, shutdown.

use super::world::{Memory, at};
use super::{Harness, Log, Message, Outbox, Probe, World};

use posthaste_core::engine::{FifoOptions, Given, PatternError, Payload, ReplayStart, Rma, SendArgs, Wait};
use posthaste_core::protocol::{Flow, ReplyTo};
use posthaste_core::{Fault, Messager, ProtocolId, Rank, RegisterError, RmaError, SendError, Ticket};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Operations of rank 0 towards rank 1, which does not advance; none of them can end well, but for a few sends.
struct Pending {
    outboxes: Vec<Outbox>,
    flush: Ticket,
    accesses: Vec<Ticket>,
    own: Ticket,
    sent: usize,
    memory: Memory,
}

/// Protocols 0 to 3: inline, credited, replied; and the one the others talk in.
fn prepare<H: Harness>(world: &World<H>, log: &Log) -> ProtocolId {
    for rank in world.ranks() {
        world.register(rank, Probe::recording("inline", log));
        world.register(rank, Probe::recording("credited", log).flow(Flow::Credited));
        world.register(rank, Probe::recording("replied", log).flow(Flow::Replied));
    }
    world.record("others", log)
}

fn start<H: Harness>(world: &mut World<H>) -> Pending {
    world.pause(Rank(1));
    let from = at(Rank(0));
    let message = |protocol, len: usize| Message::new(Rank(1), ProtocolId(protocol), vec![3; len]);
    let long = world.caps().max_eager + 1;
    let mut outboxes: Vec<Outbox> = vec![
        Outbox::new(from, (0..2).map(|n| message(0, n).request())),
        Outbox::new(from, (0..4).map(|n| message(1, n))),
        Outbox::new(from, (0..4).map(|n| message(2, n).request())),
        Outbox::new(from, (0..2).map(|n| message(0, long + n).request())),
    ];
    // As many as it takes to fill every place there is.
    outboxes.extend((0..4).map(|_| Outbox::new(from, (0..2000).map(|_| message(0, long / 2)))));
    let sent = outboxes.iter().map(|outbox| outbox.queue.len()).sum();
    for _ in 0..5 {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        world.a_while();
    }
    assert!(outboxes.last().is_some_and(Outbox::is_waiting), "there is room without end");
    let (flush, own) = world.enter(from, |scope| {
        let flush = scope.flush(at(Rank(1))).expect("it lives").expect("something was sent");
        (flush, scope.operation(Some(Rank(1))).expect("it lives"))
    });
    let mut accesses = Vec::new();
    let memory = world.memory(4096);
    accesses.extend(world.access(&memory, Rank(0), Rank(1), 0, Rma::Put(Payload::Borrowed(&[1; 40]))));
    accesses.extend(world.access(&memory, Rank(0), Rank(1), 0, Rma::Get(40)));
    let put = memory.recorded_put(Rank(1), 0, 0, 8);
    let replay = world.enter(from, |scope| {
        let id = scope.store_pattern(vec![put, put], Box::new(())).expect("not empty");
        scope.replay(id).expect("it lives")
    });
    if let ReplayStart::Queued { ticket, .. } = replay {
        accesses.push(ticket);
    }
    assert!(!accesses.is_empty());
    Pending { outboxes, flush, accesses, own, sent, memory }
}

/// Checks that everything ends, and that it ends with that fault if not well.
fn all_end<H: Harness>(
    world: &mut World<H>,
    mut pending: Pending,
    fault: Fault,
    accesses_may_end_well: bool,
) {
    let from = at(Rank(0));
    for ticket in [pending.flush, pending.own] {
        assert_eq!(world.outcome(from, ticket).expect_err("nobody was there"), fault);
    }
    for ticket in pending.accesses {
        match world.outcome(from, ticket) {
            Ok(_) => assert!(accesses_may_end_well, "it waited behind what could not be sent"),
            Err(other) => assert_eq!(other, fault),
        }
    }
    world.until("everything has ended", |world| {
        pending.outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        pending.outboxes.iter().all(Outbox::is_done)
    });
    let mut ended = 0;
    for (n, outbox) in pending.outboxes.iter().enumerate() {
        assert!(
            outbox.failed.iter().all(|error| *error == SendError::Fault(fault)),
            "outbox {n}: {:?}",
            outbox.failed
        );
        for answer in outbox.answers.values() {
            assert_eq!(answer.as_ref().expect_err("nobody answers"), &fault, "outbox {n}");
        }
        ended += outbox.failed.len() + outbox.answers.len();
    }
    assert!(ended >= 2 + 4 + 2, "requests end with the fault, {ended} of {} did", pending.sent);
    for outbox in &pending.outboxes[4..] {
        assert!(!outbox.failed.is_empty());
    }
}

fn cannot_be_reached<H: Harness>(world: &World<H>, fault: Fault) {
    let args =
        SendArgs { target: at(Rank(1)), protocol: ProtocolId(0), cookie: 0, info: &[], relaxed: false };
    world.enter(at(Rank(0)), |scope| {
        assert_eq!(scope.fault_of(Rank(1)), Some(fault));
        match scope.give(&args, Payload::Borrowed(b"hello?")) {
            Err((error, _)) => assert_eq!(error, SendError::Fault(fault)),
            other => panic!("{other:?}"),
        }
        assert_eq!(scope.flush(at(Rank(1))).expect_err("it is gone"), SendError::Fault(fault));
        assert_eq!(scope.operation(Some(Rank(1))).expect_err("it is gone"), fault);
        let key = scope.table().remote.iter().find(|(_, memory)| memory.rank == Rank(1)).map(|(key, _)| key);
        if let Some(key) = key {
            let refused = scope.rma(at(Rank(1)), key, 0, Rma::Get(8));
            assert_eq!(refused.expect_err("it is gone"), RmaError::Fault(fault));
        }
    });
}

fn others_go_on<H: Harness>(world: &mut World<H>, log: &Log, others: ProtocolId) {
    let had = log.len();
    let mut outboxes = [
        Outbox::new(at(Rank(0)), (0..20).map(|n| Message::new(Rank(2), others, vec![n; 50]))),
        Outbox::new(at(Rank(2)), (0..20).map(|n| Message::new(Rank(0), others, vec![n; 50]))),
    ];
    world.send_all(&mut outboxes);
    world.until("the others' messages arrive", |_| log.len() == had + 40);
}

/// Everything that depends on a lost peer ends with that fault; the other pairs go on.
pub fn a_lost_peer_ends_what_depends_on_it<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| {
        setup.config.credits = 2;
        setup.config.fifo_slots = 16;
    });
    let log = Log::default();
    let others = prepare(&world, &log);
    let pending = start(&mut world);
    world.kill(Rank(1));
    let fault = Fault::PeerLost(Rank(1));
    all_end(&mut world, pending, fault, false);
    cannot_be_reached(&world, fault);
    others_go_on(&mut world, &log, others);
    world.until("both are told", |world| {
        [0, 2].iter().all(|rank| world.enter(at(Rank(*rank)), |scope| scope.fault_of(Rank(1))) == Some(fault))
    });
    world.a_while();
    for rank in [0, 2] {
        assert_eq!(world.errors(Rank(rank)), [fault], "told once");
        assert_eq!(world.handle(at(Rank(rank))).stats().peers_lost, 1);
    }
}

/// What arrives of a lost peer is a prefix of what it sent, without gaps, and nothing is torn.
pub fn what_a_lost_peer_sent_is_a_prefix<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("prefix", &log);
    let (from, to) = (at(Rank(1)), at(Rank(0)));
    let sizes = world.sizes();
    let messages: Vec<_> =
        (0..3000).map(|n| Message::filled(from, to, protocol, n, n % 100, sizes[n % sizes.len()])).collect();
    let mut outbox = Outbox::new(from, messages.clone());
    let enough = 20 + world.random.below(60);
    world.until("some arrive", |world| {
        outbox.pump(world);
        log.len() >= enough
    });
    world.kill(Rank(1));
    let fault = Fault::PeerLost(Rank(1));
    world.until("it is told", |world| !world.errors(Rank(0)).is_empty());
    world.a_while();
    let got = log.len();
    log.check(from, to, &messages[..got]);
    assert_eq!(world.errors(Rank(0)), [fault]);
}

/// A message whose sender dies in the middle of it is not delivered, and the sender is not called corrupt.
pub fn a_stream_that_breaks_off_is_dropped<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("broken", &log);
    let (from, to) = (at(Rank(1)), at(Rank(0)));
    let long = Message::filled(from, to, protocol, 0, 7, world.caps().max_eager * 200);
    let mut outbox = Outbox::new(from, [Message::filled(from, to, protocol, 1, 0, 3), long.clone()]);
    world.until("the first arrives", |world| {
        outbox.pump(world);
        !log.is_empty()
    });
    for _ in 0..world.random.below(40) {
        world.step();
    }
    world.kill(Rank(1));
    world.until("it is told", |world| !world.errors(Rank(0)).is_empty());
    world.a_while();
    assert_eq!(world.errors(Rank(0)), [Fault::PeerLost(Rank(1))]);
    match log.len() {
        1 => {}
        _ => log.check(from, to, &[Message::filled(from, to, protocol, 1, 0, 3), long]),
    }
}

/// Puts and gets that are under way when their target dies each end once: well, or with its loss.
pub fn long_accesses_to_a_lost_peer_end_once<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let memory = world.memory(32 << 10);
    let (from, lost) = (Rank(0), Rank(1));
    let mut open = Vec::new();
    let mut others = Vec::new();
    for round in 0..6u8 {
        let bytes = vec![round; 20_000];
        for to in [lost, Rank(2)] {
            let put = Rma::Put(Payload::Owned(bytes::Bytes::from(bytes.clone())));
            let accesses = [put, Rma::Get(10_000), Rma::PutFrom(memory.local[0], 0, 12_000)];
            let tickets = accesses.map(|rma| world.access(&memory, from, to, 100, rma));
            if to == lost { open.extend(tickets) } else { others.extend(tickets) }
        }
        for _ in 0..world.random.below(40) {
            world.step();
        }
    }
    world.kill(lost);
    let mut ended_badly = 0;
    for ticket in open.into_iter().flatten() {
        match world.outcome(at(from), ticket) {
            Ok(_) => {}
            Err(fault) => {
                assert_eq!(fault, Fault::PeerLost(lost));
                ended_badly += 1;
            }
        }
    }
    for ticket in others.into_iter().flatten() {
        assert!(world.outcome(at(from), ticket).is_ok(), "rank 2 lives");
    }
    world.until("it is told", |world| !world.errors(from).is_empty());
    let put = Rma::Put(Payload::Borrowed(&[1; 8]));
    let key = memory.remote[0][1];
    let refused = world.enter(at(from), |scope| scope.rma(at(lost), key, 0, put));
    assert_eq!(refused.expect_err("it is gone"), RmaError::Fault(Fault::PeerLost(lost)), "{ended_badly}");
    assert_eq!(world.errors(from), [Fault::PeerLost(lost)]);
}

/// A peer that leaves in order is not lost: what it sent arrives, and then it is closed.
pub fn a_clean_leave_is_told_apart<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| {
        setup.config.credits = 2;
        setup.config.fifo_slots = 16;
    });
    let log = Log::default();
    let others = prepare(&world, &log);
    let (from, to) = (at(Rank(1)), at(Rank(0)));
    let last: Vec<_> = (0..3).map(|n| Message::filled(from, to, others, n, n, n * 10)).collect();
    world.send_all(&mut [Outbox::new(from, last.clone())]);
    let own = world.enter(to, |scope| scope.operation(Some(Rank(1)))).expect("it lives");
    let client = world.clients[1].clone();
    world.run("it leaves", client.close());
    world.pause(Rank(1));
    let fault = Fault::PeerClosed(Rank(1));
    assert_eq!(world.outcome(to, own).expect_err("it left"), fault);
    log.check(from, to, &last);
    cannot_be_reached(&world, fault);
    others_go_on(&mut world, &log, others);
    world.a_while();
    for rank in [0, 2] {
        let errors = world.errors(Rank(rank));
        assert!(errors.len() <= 1 && errors.iter().all(|error| *error == fault), "{errors:?}");
        assert!(world.handle(at(Rank(rank))).stats().peers_lost <= 1);
    }
    assert_eq!(world.errors(Rank(0)).len(), 1);
}

/// Once a context has departed nothing of it is written into the memory of others: what waited for its turn ends there, also
/// where the peer makes room for it later. Its peers take the memory back when they hear of the leave (I10).
pub fn what_would_write_ends_with_the_departure<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| {
        setup.config.credits = 2;
        setup.config.fifo_slots = 16;
    });
    let log = Log::default();
    prepare(&world, &log);
    let (from, to) = (at(Rank(0)), Rank(1));
    let pending = start(&mut world);
    // Where memory is not mapped it is the peer itself that writes, and what was sent goes on to be sent.
    let others_write = !world.goes_over_send() && world.caps().mappable;
    let before = pending.memory.bytes(to, 0, 64);
    assert!(!others_write || before.iter().all(|byte| *byte == 0), "it waits behind what has no room");
    let put = pending.memory.recorded_put(to, 0, 0, 8);
    let pattern = world.enter(from, |scope| scope.store_pattern(vec![put], Box::new(()))).expect("not empty");
    world.enter(from, |scope| scope.depart());
    let replayed = world.enter(from, |scope| scope.replay(pattern));
    let refused = matches!(&replayed, Err(PatternError::Fault(Fault::Shutdown)));
    assert!(refused, "a replay begins after the departure: {replayed:?}");
    let ended = |ticket| world.handle(from).slots().take(ticket);
    for ticket in pending.accesses {
        let outcome = ended(ticket);
        assert!(matches!(outcome, Some(Err(Fault::Shutdown))), "an access goes on: {outcome:?}");
    }
    world.resume(to);
    world.a_while();
    if others_write {
        assert_eq!(pending.memory.bytes(to, 0, 64), before, "a put was written after the departure");
    }
}

/// Who departs amid a long message has nothing to say at length any more: its peers, who wait for the rest, would take it for another
/// than it is. What it answers is short, or not told before its leave is.
pub fn who_leaves_amid_a_long_message_begins_no_other<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.fifo_slots = 16);
    let (leaves, stays) = (at(Rank(0)), at(Rank(1)));
    let log = Log::default();
    let long = world.record("long", &log);
    let asked: Arc<Mutex<Vec<ReplyTo>>> = Arc::default();
    let mut service = ProtocolId(0);
    for rank in world.ranks() {
        let asked = asked.clone();
        let probe = Probe::new("asked", move |_, message| {
            asked.lock().expect("no panic").extend(message.reply());
        });
        service = world.register(rank, probe);
    }
    let memory = world.memory(1 << 14);
    let questions: Vec<_> = (0..2).map(|_| Message::new(leaves.rank, service, *b"?").request()).collect();
    let mut outbox = Outbox::new(stays, questions);
    world.until("it is asked", |world| {
        outbox.pump(world);
        asked.lock().expect("no panic").len() == 2
    });
    world.pause(stays.rank);
    // More than there is room for, and a put behind it that ends all of it.
    let len = 64 * world.caps().max_eager.max(2000);
    let args = SendArgs { target: stays, protocol: long, cookie: 0, info: &[], relaxed: false };
    let given = world.enter(leaves, |scope| {
        let payload = Payload::Owned(vec![3; len].into());
        scope.give(&args, payload).map(Given::leave).map_err(|(error, _)| error)
    });
    assert!(given.is_ok(), "{given:?}");
    let put = Rma::Put(Payload::Owned(bytes::Bytes::from(vec![5; 3000])));
    let _put = world.access(&memory, leaves.rank, stays.rank, 0, put);
    world.enter(leaves, |scope| {
        scope.depart();
        let answers = std::mem::take(&mut *asked.lock().expect("no panic"));
        for (to, len) in answers.into_iter().zip([len, 5]) {
            scope.reply(to, Ok(Payload::Owned(vec![8; len].into())));
        }
        let payload = Payload::Owned(vec![4; len].into());
        let _refused_or_sent = scope.send(&args, payload, Wait::Never).map(drop).map_err(|(error, _)| error);
    });
    world.resume(stays.rank);
    world.until("the short answer comes", |world| {
        outbox.pump(world);
        outbox.answers.contains_key(&1)
    });
    world.a_while();
    for rank in [leaves.rank, stays.rank] {
        assert_eq!(world.errors(rank), [], "{rank} takes an honest peer for another");
    }
    // What came is whole: the one that was begun before, or the one that was tried behind it.
    for message in log.of(leaves, stays) {
        let alike = message.bytes.iter().all(|byte| *byte == message.bytes[0]);
        assert!(message.bytes.len() == len && alike, "parts of a message");
    }
}

/// Who departs ends what it has begun itself, and not what others have asked of it: they are told of what they put there, and
/// get what they ask for, until they hear of the leave.
pub fn who_departs_goes_on_to_answer<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.fifo_slots = 16);
    let memory = world.memory(1 << 14);
    let (departing, other) = (Rank(0), Rank(1));
    memory.write(departing, 0, &[7; 5000]);
    let ask = |world: &mut World<H>| {
        let put = Rma::Put(Payload::Owned(bytes::Bytes::from(vec![5; 3000])));
        [(8000, put), (0, Rma::Get(5000))]
            .map(|(offset, rma)| world.access(&memory, other, departing, offset, rma))
    };
    let check = |world: &mut World<H>, asked: [Option<Ticket>; 2]| {
        let ended = asked.map(|ticket| ticket.map(|ticket| world.outcome(at(other), ticket)));
        assert!(ended[0].as_ref().is_none_or(Result::is_ok), "{:?}", ended[0]);
        let got = ended[1].as_ref().and_then(|got| got.as_ref().ok()).map(|value| value.as_bytes().to_vec());
        assert!(got == Some(vec![7; 5000]), "{:?}", ended[1]);
        assert_eq!(memory.bytes(departing, 8000, 3000), [5; 3000]);
    };
    // Some of it before, so that neither side begins to count.
    for _ in 0..3 {
        let asked = ask(&mut world);
        check(&mut world, asked);
    }
    world.pause(other);
    for number in 0..300 {
        let put = Rma::Put(Payload::Owned(bytes::Bytes::from(vec![1; 2000])));
        let rma = if number % 3 == 0 { Rma::Get(3000) } else { put };
        let _waiting = world.access(&memory, departing, other, 0, rma);
    }
    world.enter(at(departing), |scope| scope.depart());
    world.resume(other);
    for _ in 0..3 {
        let asked = ask(&mut world);
        check(&mut world, asked);
    }
    assert_eq!((world.errors(other), world.errors(departing)), (vec![], vec![]));
}

/// The same of a recorded put that a FIFO of one's own carries out in parts, each in its turn.
pub fn a_replay_of_a_fifo_ends_with_the_departure<H: Harness>(harness: H) {
    const LEN: u64 = 64 << 10;
    let mut world = World::new(harness, 2);
    let (from, to) = (at(Rank(0)), Rank(1));
    let memory = world.memory(LEN);
    memory.write(Rank(0), 0, &[1; LEN as usize]);
    let put = memory.recorded_put(to, 0, 0, LEN);
    let options = FifoOptions { slots: 8, priority: false, quantum: 4096 };
    let fifo = world.enter(from, |scope| scope.open_fifo(options)).expect("so few slots");
    let pattern = world.enter(from, |scope| scope.store_pattern(vec![put], Box::new(()))).expect("not empty");
    // Nobody has a turn in between.
    world.enter(from, |scope| {
        scope.replay_with(pattern, None, Some(fifo)).expect("its target lives");
        scope.depart();
    });
    if world.goes_over_send() || !world.caps().mappable {
        return;
    }
    let before = memory.bytes(to, 0, LEN as usize);
    assert!(before.contains(&0), "all of it was written in one turn");
    world.a_while();
    assert!(memory.bytes(to, 0, LEN as usize) == before, "a part was written after the departure");
}

/// The same of a long message that waits for its place: it is written nowhere, though the peer gives it one.
pub fn a_long_message_ends_with_the_departure<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    if world.rendezvous_from().is_none() {
        return;
    }
    let log = Log::default();
    let protocol = world.record("long", &log);
    world.pause(Rank(1));
    let from = at(Rank(0));
    let buffer = bytes::Bytes::from(vec![7; 40_000]);
    let args = SendArgs { target: at(Rank(1)), protocol, cookie: 0, info: &[], relaxed: false };
    let sent = world
        .enter(from, |scope| scope.give(&args, Payload::Owned(buffer.clone())).map_err(|(error, _)| error));
    let Ok(Given::Queued(ticket)) = sent else { panic!("it waits for its place: {sent:?}") };
    world.a_while();
    world.enter(from, |scope| scope.depart());
    assert_eq!(world.outcome(from, ticket).expect_err("it has no place yet"), Fault::Shutdown);
    world.resume(Rank(1));
    world.a_while();
    assert!(log.all().is_empty(), "it was written after the departure");
    assert!(buffer.is_unique(), "the sender's buffer is its own again");
}

/// Shutting a context down ends everything that is pending there, tells the protocols, and refuses what comes.
pub fn shutdown_ends_everything<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| {
        setup.config.credits = 2;
        setup.config.fifo_slots = 16;
    });
    let log = Log::default();
    prepare(&world, &log);
    let probe = Probe::recording("closing", &log);
    let closed = probe.closed();
    world.register(Rank(0), probe);
    let pending = start(&mut world);
    let unrelated = world.enter(at(Rank(0)), |scope| scope.operation(None)).expect("it is open");
    world.handle(at(Rank(0))).shut_down();
    assert!(world.handle(at(Rank(0))).is_closed());
    assert_eq!(world.outcome(at(Rank(0)), unrelated).expect_err("closed"), Fault::Shutdown);
    all_end(&mut world, pending, Fault::Shutdown, false);
    cannot_be_reached(&world, Fault::Shutdown);
    assert_eq!(closed.load(Ordering::Relaxed), 1);
    let refused = world.clients[0].register(std::sync::Arc::new(Probe::recording("late", &log)));
    assert_eq!(refused, Err(RegisterError::Closed));
    // What still arrives there is dropped.
    world.resume(Rank(1));
    let had = log.all().iter().filter(|received| received.at == at(Rank(0))).count();
    let mut outbox = Outbox::new(at(Rank(2)), [Message::new(Rank(0), ProtocolId(0), *b"late")]);
    outbox.pump(&world);
    world.a_while();
    assert_eq!(log.all().iter().filter(|received| received.at == at(Rank(0))).count(), had);
}
