//! Back-pressure: a slow receiver slows its senders and nobody else.

use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, Setup, World};
use posthaste_core::engine::{ControlSent, Given, Payload, SendArgs, Sent, Wait, Work};
use posthaste_core::ids::ControlId;
use posthaste_core::protocol::{Credit, Flow};
use posthaste_core::{Endpoint, ProtocolId, Rank};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

pub(super) fn try_send<H: Harness>(world: &World<H>, to: Rank, protocol: ProtocolId, payload: &[u8]) -> bool {
    let args = SendArgs { target: at(to), protocol, cookie: 0, info: &[], relaxed: false };
    world.enter(at(Rank(0)), |scope| match scope.send(&args, Payload::Borrowed(payload), Wait::Never) {
        Ok(Sent::Done) => true,
        Ok(Sent::Full(back)) => {
            assert_eq!(back.bytes_of(), payload, "the payload comes back");
            false
        }
        other => panic!("{other:?}"),
    })
}

/// Sends to the slow rank until it has been refused many times in a row.
pub(super) fn fill<H: Harness>(world: &mut World<H>, protocol: ProtocolId, sent: &mut Vec<Message>) {
    let mut refused = 0;
    while refused < 200 {
        let message = Message::filled(at(Rank(0)), at(Rank(1)), protocol, sent.len(), 0, 40);
        if try_send(world, Rank(1), protocol, &message.payload) {
            sent.push(message);
            refused = 0;
        } else {
            refused += 1;
        }
        assert!(sent.len() < 200_000, "no end of room");
        if refused % 4 == 1 {
            world.step();
        }
    }
}

/// Three ranks, of which rank 1 does nothing, and rank 0 has sent that one as much of protocol 0 as there is room for; protocol 1
/// takes credit, of which there is one.
pub(super) fn with_a_full_lane<H: Harness>(harness: H, fifo_slots: usize) -> (World<H>, Log, Vec<Message>) {
    let mut world = World::with(harness, 3, |setup| {
        setup.config.credits = 1;
        setup.config.fifo_slots = fifo_slots;
    });
    let log = Log::default();
    for rank in world.ranks() {
        world.register(rank, Probe::recording("inline", &log));
        world.register(rank, Probe::recording("credited", &log).flow(Flow::Credited));
    }
    world.pause(Rank(1));
    let mut sent = Vec::new();
    fill(&mut world, ProtocolId(0), &mut sent);
    (world, log, sent)
}

/// Who waits for a peer that does nothing and gives that up, again and again, takes nothing along: neither of what others use
/// nor of what waits for the peer.
pub fn who_gives_up_waiting_takes_nothing_along<H: Harness>(harness: H) {
    let (mut world, log, _) = with_a_full_lane(harness, 8);
    let from = at(Rank(0));
    let begin = |world: &World<H>, number: u64| {
        let args = SendArgs {
            target: at(Rank(1)),
            protocol: ProtocolId((number % 2) as u16),
            cookie: 0,
            info: &[],
            relaxed: false,
        };
        world.enter(from, |scope| match scope.give(&args, Payload::Borrowed(&[5; 40])).expect("it lives") {
            Given::Queued(ticket) | Given::Kept(ticket, _) => scope.detach(ticket),
            Given::Done => {}
        });
        let control = world.enter(from, |scope| scope.control(at(Rank(1)), ControlId(7), [0; 16], true));
        if let Ok(ControlSent::Later(ticket)) = control {
            world.enter(from, |scope| scope.detach(ticket));
        }
        if let Ok(Some(ticket)) = world.enter(from, |scope| scope.flush(at(Rank(1)))) {
            world.enter(from, |scope| scope.detach(ticket));
        }
    };
    (0..2000).for_each(|number| begin(&world, number));
    (0..20_000).for_each(|number| begin(&world, number));
    let free = world.first_free_slot(from);
    assert!(free < 2000, "slot {free} is the first that is free");
    // It goes on where it was.
    world.resume(Rank(1));
    world.send_all(&mut [Outbox::new(from, [Message::new(Rank(1), ProtocolId(0), *b"the last")])]);
    world.until("the last arrives", |_| log.all().last().is_some_and(|last| last.bytes == b"the last"));
}

/// Who tries is told Full, who awaits is queued and then waits; other receivers go on; in the end all arrives in order.
pub fn a_slow_receiver_slows_its_sender_only<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| setup.config.fifo_slots = 8);
    let log = Log::default();
    let protocol = world.record("flood", &log);
    let (from, slow, quick) = (at(Rank(0)), at(Rank(1)), at(Rank(2)));
    world.pause(Rank(1));
    let (mut expected, mut others) = (Vec::new(), Vec::new());
    let mut outbox = Outbox::new(from, []);
    // Bounded memory: sooner or later there is no room, for good. What was full may have room once more a moment later, as
    // the system moves what it holds from one end of a connection to the other.
    loop {
        assert!(expected.len() < 200_000, "no end of room");
        if outbox.is_done() {
            fill(&mut world, protocol, &mut expected);
        }
        let more: Vec<_> = (outbox.queue.len()..60)
            .map(|n| Message::filled(from, slow, protocol, expected.len() + n - outbox.queue.len(), n, n * 3))
            .collect();
        expected.extend(more.clone());
        outbox.queue.extend(more);
        outbox.pump(&world);
        assert!(outbox.queued() <= 8, "{} are queued", outbox.queued());
        let waited = outbox.is_waiting();
        let next: Vec<_> =
            (0..50).map(|n| Message::filled(from, quick, protocol, others.len() + n, n, n)).collect();
        others.extend(next.clone());
        world.send_all(&mut [Outbox::new(from, next)]);
        world.until("the others go on", |_| log.of(from, quick).len() == others.len());
        outbox.pump(&world);
        if waited && outbox.is_waiting() && outbox.queued() > 0 {
            break;
        }
    }
    let long = vec![1; world.caps().max_eager * 2];
    assert!(!try_send(&world, Rank(1), protocol, &long), "a long message is not queued behind others");
    world.resume(Rank(1));
    world.send_all(std::slice::from_mut(&mut outbox));
    world.until("everything arrives", |_| log.of(from, slow).len() >= expected.len());
    world.a_while();
    log.check(from, slow, &expected);
    log.check(from, quick, &others);
}

/// A credited protocol whose messages are kept until the test consumes them.
#[derive(Clone, Debug, Default)]
pub(super) struct Keeper(Arc<Mutex<VecDeque<Credit>>>);

impl Keeper {
    pub(super) fn probe(&self, name: &str, log: &Log) -> Probe {
        let (kept, log, protocol) = (self.0.clone(), log.clone(), name.to_owned());
        let probe = Probe::new(name, move |scope, message| {
            kept.lock().expect("no panic").push_back(message.credit());
            log.arrived(scope.me(), &protocol, &message);
        });
        probe.flow(Flow::Credited)
    }

    fn len(&self, from: Rank) -> usize {
        self.0.lock().expect("no panic").iter().filter(|credit| credit.endpoint.rank == from).count()
    }

    fn take(&self, from: Rank) -> Credit {
        let mut kept = self.0.lock().expect("no panic");
        let at = kept.iter().position(|credit| credit.endpoint.rank == from).expect("one is kept");
        kept.remove(at).expect("just found")
    }

    fn bytes(&self) -> u64 {
        self.0.lock().expect("no panic").iter().map(|credit| credit.bytes).sum()
    }

    pub(super) fn consume_all<H: Harness>(&self, world: &mut World<H>, at: Endpoint) {
        while self.len(Rank(0)) > 0 {
            let credit = self.take(Rank(0));
            world.enter(at, |scope| scope.consumed(credit));
        }
    }
}

/// Ranks whose first protocol takes credit; what arrives in it, and who keeps that.
pub(super) fn with_keeper<H: Harness>(
    harness: H,
    ranks: u32,
    change: impl FnOnce(&mut Setup),
) -> (World<H>, Log, Keeper) {
    let world = World::with(harness, ranks, change);
    let (log, keeper) = (Log::default(), Keeper::default());
    for rank in world.ranks() {
        world.register(rank, keeper.probe("kept", &log));
    }
    (world, log, keeper)
}

/// With one credit no sender has more than one message outstanding; other protocols and senders are not affected.
pub fn one_credit_allows_one_outstanding_message<H: Harness>(harness: H) {
    let (mut world, log, keeper) = with_keeper(harness, 3, |setup| setup.config.credits = 1);
    let (kept, free_log) = (ProtocolId(0), Log::default());
    let free = world.record("free", &free_log);
    let (a, b, to) = (at(Rank(0)), at(Rank(2)), at(Rank(1)));
    let long = world.caps().max_eager + 100;
    let messages = |from, count: usize| -> Vec<Message> {
        (0..count).map(|n| Message::filled(from, to, kept, n, n, if n == 4 { long } else { n })).collect()
    };
    let (first, second) = (messages(a, 12), messages(b, 3));
    let others: Vec<_> = (0..30).map(|n| Message::filled(a, to, free, n, 0, n)).collect();
    let mut outboxes =
        [Outbox::new(a, first.clone()), Outbox::new(b, second.clone()), Outbox::new(a, others.clone())];
    for round in 0..first.len() {
        world.until("the next message arrives", |world| {
            outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
            assert!(keeper.len(Rank(0)) <= 1 && keeper.len(Rank(2)) <= 1, "one credit, one message");
            log.of(a, to).len() == round + 1
                && free_log.len() == others.len()
                && (round >= second.len() || log.of(b, to).len() == round + 1)
        });
        if round == 0 {
            // While nothing is consumed, nothing comes.
            for _ in 0..3 {
                world.a_while();
                outboxes.iter_mut().for_each(|outbox| outbox.pump(&world));
            }
            assert_eq!(log.of(a, to).len(), 1);
            assert!(!try_send(&world, Rank(1), kept, b"no credit"));
        }
        let credit = keeper.take(Rank(0));
        world.enter(to, |scope| scope.consumed(credit));
        if round < second.len() {
            world.handle(to).post_work(Work::Consumed(keeper.take(Rank(2))));
        }
    }
    world.send_all(&mut outboxes);
    world.a_while();
    log.check(a, to, &first);
    log.check(b, to, &second);
    free_log.check(a, to, &others);
}

/// Two ranks whose credit is more messages and 1000 bytes, and who keeps what arrives.
fn with_thousand_bytes<H: Harness>(harness: H) -> (World<H>, Log, Keeper) {
    with_keeper(harness, 2, |setup| {
        setup.config.credits = 100;
        setup.config.credit_bytes = 1000;
    })
}

/// A sender may have only so many payload bytes outstanding.
pub fn bytes_are_credited_too<H: Harness>(harness: H) {
    let (mut world, log, keeper) = with_thousand_bytes(harness);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let messages: Vec<_> = (0..40).map(|n| Message::filled(from, to, ProtocolId(0), n, 0, 60 + n)).collect();
    let mut outbox = Outbox::new(from, messages.clone());
    let most = 1000 + 100;
    let mut seen = 0;
    world.until("everything arrives", |world| {
        outbox.pump(world);
        let kept = keeper.bytes();
        assert!(kept <= most, "{kept} bytes are outstanding");
        // Consume late, so that the limit is met each time.
        if outbox.is_waiting() && kept >= 500 && world.random.chance(5) {
            seen += 1;
            keeper.consume_all(world, to);
        }
        log.len() == messages.len() && outbox.is_done()
    });
    assert!(seen >= 2, "the limit was met {seen} times");
    log.check(from, to, &messages);
}

/// Senders that have waited for credit have no more bytes outstanding together than one that has not.
pub fn waiting_senders_have_no_more_bytes_outstanding_than_there_are<H: Harness>(harness: H) {
    let (mut world, log, keeper) = with_thousand_bytes(harness);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let mut outboxes: Vec<Outbox> = (0..30u8)
        .map(|task| Outbox::new(from, [Message::new(Rank(1), ProtocolId(0), vec![task; 200])]))
        .collect();
    let mut most: u64 = 0;
    world.until("everything arrives", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        let kept = keeper.bytes();
        most = most.max(kept);
        // At first as much as there is; then what comes back in one grant.
        if kept >= if most < 1000 { 1000 } else { 500 } {
            world.a_while();
            keeper.consume_all(world, to);
        }
        log.len() == outboxes.len() && outboxes.iter().all(Outbox::is_done)
    });
    assert!((1000..1200).contains(&most), "{most} bytes were outstanding");
}

/// Several tasks that send to one peer in one protocol with one credit, over a full lane: none starves.
pub fn waiters_for_one_credit_all_get_their_turn<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| {
        setup.config.credits = 1;
        setup.config.fifo_slots = 1;
    });
    let log = Log::default();
    let count = log.clone();
    for rank in world.ranks() {
        let log = count.clone();
        let probe = Probe::new("credited", move |scope, message| {
            log.arrived(scope.me(), "credited", &message);
            scope.consumed(message.credit());
        });
        world.register(rank, probe.flow(Flow::Credited));
    }
    let noise_log = Log::default();
    let noise = world.record("noise", &noise_log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let long = world.caps().max_eager + 30;
    let mut outboxes: Vec<Outbox> = (0..5u8)
        .map(|task| {
            Outbox::new(
                from,
                (0..20u8).map(|n| Message::new(Rank(1), ProtocolId(0), vec![n; 10]).info([task, n])),
            )
        })
        .collect();
    outboxes
        .push(Outbox::new(from, (0..40).map(|n| Message::filled(from, to, noise, n, 112, n % 3 * long / 2))));
    world.send_all(&mut outboxes);
    world.until("everything arrives", |_| log.len() == 100 && noise_log.len() == 40);
    for task in 0..5u8 {
        let got: Vec<u8> = log
            .all()
            .iter()
            .filter(|received| received.info[0] == task)
            .map(|received| received.info[1])
            .collect();
        assert_eq!(got, (0..20).collect::<Vec<u8>>(), "task {task}");
    }
}

/// A flush ends when the peer has handled everything that was sent before it.
pub fn flush_ends_when_everything_was_handled<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let protocol = world.record("flushed", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let flush = |world: &World<H>| world.enter(from, |scope| scope.flush(to)).expect("the peer lives");
    assert!(flush(&world).is_none(), "nothing was sent");
    let long = world.caps().max_eager * 3;
    let mut sent = 0;
    for round in 0..6 {
        let count = 3 + round * 7;
        let mut outbox = Outbox::new(
            from,
            (0..count).map(|n| Message::filled(from, to, protocol, n, n, if n == 2 { long } else { n })),
        );
        world.until("everything is queued", |world| {
            outbox.pump(world);
            outbox.queue.is_empty()
        });
        sent += count;
        let ticket = flush(&world).expect("something was sent");
        assert!(world.outcome(from, ticket).is_ok());
        assert_eq!(log.len(), sent, "the flush came back too early");
        assert!(flush(&world).is_none(), "nothing was sent since");
        world.send_all(std::slice::from_mut(&mut outbox));
    }
    world.pause(Rank(1));
    world.send_all(&mut [Outbox::new(from, [Message::new(Rank(1), protocol, *b"x")])]);
    let ticket = flush(&world).expect("something was sent");
    world.a_while();
    assert!(!world.handle(from).slots().is_done(ticket), "nobody has handled it");
    world.resume(Rank(1));
    assert!(world.outcome(from, ticket).is_ok());
}
