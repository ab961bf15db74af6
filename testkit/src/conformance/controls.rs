//! Controls: sixteen bytes past everything else.

use super::world::at;
use super::{Harness, Log, Message, Outbox, World};
use posthaste_core::engine::ControlSent;
use posthaste_core::{ControlId, Endpoint, Fault, Messager, Rank, SendError};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};

/// Controls as they arrived: where, from whom, what.
type Arrived = Arc<Mutex<Vec<(Endpoint, Endpoint, [u8; 16])>>>;

fn payload(number: u64) -> [u8; 16] {
    let mut bytes = [0x5a; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn number_of(payload: [u8; 16]) -> u64 {
    let (number, rest) = payload.split_at(8);
    assert_eq!(rest, [0x5a; 8]);
    u64::from_le_bytes(number.try_into().expect("eight bytes"))
}

/// Registers a control that records, on one rank.
fn register<H: Harness>(world: &World<H>, rank: Rank, name: &str, arrived: &Arrived) -> ControlId {
    let arrived = arrived.clone();
    let handler = Arc::new(move |scope: &mut posthaste_core::Scope<'_>, source, payload| {
        arrived.lock().expect("no panic under this lock").push((scope.me(), source, payload));
    });
    world.clients[rank.index()].register_control(name, handler).expect("a free name")
}

fn numbers(arrived: &Arrived, at: Endpoint, source: Endpoint) -> Vec<u64> {
    let arrived = arrived.lock().expect("no panic under this lock");
    arrived.iter().filter(|it| (it.0, it.1) == (at, source)).map(|it| number_of(it.2)).collect()
}

/// Sends controls one after the other, as one task does that awaits each.
struct Sender {
    from: Endpoint,
    to: Endpoint,
    control: ControlId,
    queue: VecDeque<u64>,
    waiting: Option<posthaste_core::Ticket>,
}

impl Sender {
    fn pump<H: Harness>(&mut self, world: &World<H>) -> Result<(), SendError> {
        if let Some(ticket) = self.waiting {
            match world.handle(self.from).slots().take(ticket) {
                None => return Ok(()),
                Some(outcome) => {
                    self.waiting = None;
                    outcome?;
                    self.queue.pop_front();
                }
            }
        }
        while let Some(number) = self.queue.front() {
            let (to, control, bytes) = (self.to, self.control, payload(*number));
            match world.enter(self.from, |scope| scope.control(to, control, bytes, true))? {
                ControlSent::Done => self.queue.pop_front(),
                ControlSent::Later(ticket) => {
                    self.waiting = Some(ticket);
                    return Ok(());
                }
                ControlSent::Full => panic!("who awaits is not told Full"),
            };
        }
        Ok(())
    }
}

/// Sends until nothing moves any more: devices may have buffers that grow for a while.
fn fill<H: Harness>(world: &mut World<H>, outbox: &mut Outbox) {
    let mut still = 0;
    while still < 3 {
        let before = (outbox.queue.len(), outbox.queued());
        world.a_while();
        outbox.pump(world);
        still = if (outbox.queue.len(), outbox.queued()) == before { still + 1 } else { 0 };
    }
}

/// Every control arrives once, in order, among messages.
pub fn controls_arrive_once_and_in_order<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let (log, arrived) = (Log::default(), Arrived::default());
    let protocol = world.record("among", &log);
    let ids: Vec<_> = world.ranks().map(|rank| register(&world, rank, "tick", &arrived)).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "the name says which");
    let ranks: Vec<_> = world.ranks().collect();
    let mut senders = Vec::new();
    let mut outboxes = Vec::new();
    for from in &ranks {
        for to in &ranks {
            let (from, to) = (at(*from), at(*to));
            senders.push(Sender { from, to, control: ids[0], queue: (0..300).collect(), waiting: None });
            let messages = (0..20).map(|n| Message::filled(from, to, protocol, n, 0, n * 100));
            outboxes.push(Outbox::new(from, messages));
        }
    }
    world.until("all controls are sent", |world| {
        outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
        senders.iter_mut().for_each(|sender| sender.pump(world).expect("nobody is lost"));
        senders.iter().all(|sender| sender.queue.is_empty()) && outboxes.iter().all(Outbox::is_done)
    });
    world.until("all arrive", |_| arrived.lock().expect("no panic").len() >= 2700 && log.len() >= 180);
    world.a_while();
    for sender in &senders {
        assert_eq!(numbers(&arrived, sender.to, sender.from), (0..300).collect::<Vec<_>>());
    }
}

/// More controls than there are places for keep their order, whoever begins one meanwhile and however late those who wait look.
pub fn controls_that_wait_for_a_place_keep_their_order<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let (log, arrived) = (Log::default(), Arrived::default());
    let (protocol, control) = (world.record("queued", &log), register(&world, Rank(1), "ordered", &arrived));
    world.pause(Rank(1));
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let long = world.caps().max_eager;
    let mut outbox = Outbox::new(from, (0..2000).map(|_| Message::new(Rank(1), protocol, vec![3; long])));
    fill(&mut world, &mut outbox);
    let begin = |world: &World<H>, number: u64, wait: bool| {
        world.enter(from, |scope| scope.control(to, control, payload(number), wait)).expect("it lives")
    };
    let (mut begun, mut later) = (Vec::new(), 0);
    while later < 40 {
        let number = begun.len() as u64;
        assert!(number < 10_000, "controls that wait are bounded");
        later += u64::from(matches!(begin(&world, number, true), ControlSent::Later(_)));
        begun.push(number);
    }
    world.resume(Rank(1));
    // A newcomer that has no place at once is not sent, and comes again.
    let (mut next, end) = (begun.len() as u64, begun.len() as u64 + 200);
    world.until("all arrive", |world| {
        if next < end && begin(world, next, false) == ControlSent::Done {
            begun.push(next);
            next += 1;
        }
        next == end && arrived.lock().expect("no panic").len() == begun.len()
    });
    assert_eq!(numbers(&arrived, to, from), begun);
    world.send_all(&mut [outbox]);
    world.until("the messages arrive", |_| log.len() == 2000);
}

/// A control gets past messages that wait at its sender, and a full queue of controls is told.
pub fn a_control_gets_past_what_is_queued<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.fifo_slots = 16);
    let (log, arrived) = (Log::default(), Arrived::default());
    let protocol = world.record("queued", &log);
    let before_the_first = Arc::new(OnceLock::new());
    let control = {
        let (arrived, log, before) = (arrived.clone(), log.clone(), before_the_first.clone());
        let handler = Arc::new(move |scope: &mut posthaste_core::Scope<'_>, source, payload| {
            before.get_or_init(|| log.len());
            arrived.lock().expect("no panic under this lock").push((scope.me(), source, payload));
        });
        world.clients[1].register_control("urgent", handler).expect("a free name")
    };
    world.pause(Rank(1));
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let long = world.caps().max_eager;
    let mut outbox = Outbox::new(from, (0..2000).map(|_| Message::new(Rank(1), protocol, vec![3; long])));
    fill(&mut world, &mut outbox);
    assert!(outbox.is_waiting(), "there is room without end");
    let mut sent = 0;
    while sent < 10_000 {
        let result = world.enter(from, |scope| scope.control(to, control, payload(sent), false));
        match result.expect("it lives") {
            ControlSent::Done => sent += 1,
            ControlSent::Full => break,
            ControlSent::Later(_) => panic!("nobody waits"),
        }
    }
    assert!((1..10_000).contains(&sent), "controls that wait are bounded");
    let mut waiting = Sender { from, to, control, queue: [sent].into(), waiting: None };
    waiting.pump(&world).expect("it lives");
    assert!(waiting.waiting.is_some(), "there is no place");
    // Where the kernel took all of these after all, the engine has one message yet.
    let queued = outbox.queued().max(1);
    let gone = 2000 - outbox.queue.len() - outbox.queued();
    world.resume(Rank(1));
    world.until("the controls arrive", |world| {
        waiting.pump(world).expect("it lives");
        arrived.lock().expect("no panic").len() as u64 == sent + 1
    });
    assert_eq!(numbers(&arrived, to, from), (0..=sent).collect::<Vec<_>>());
    let before = *before_the_first.get().expect("it has come");
    assert!(before < gone + queued, "all {queued} messages that waited were before the first control");
    world.send_all(&mut [outbox]);
    world.until("the messages arrive", |_| log.len() == 2000);
}

/// What is not registered yet waits for it, in order; once the target is ready, or its handler panics, the sender is told.
pub fn unknown_controls_wait_and_are_refused_once_ready<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let arrived = Arrived::default();
    let other = Arrived::default();
    let late = register(&world, Rank(0), "late", &other);
    let never = register(&world, Rank(0), "never", &other);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    // More than are kept, so that the device has to keep some.
    let mut sender = Sender { from, to, control: late, queue: (0..600).collect(), waiting: None };
    for _ in 0..5 {
        sender.pump(&world).expect("it lives");
        world.a_while();
    }
    assert!(arrived.lock().expect("no panic").is_empty());
    assert_eq!(register(&world, Rank(1), "late", &arrived), late);
    world.until("they arrive", |world| {
        sender.pump(world).expect("it lives");
        arrived.lock().expect("no panic").len() == 600
    });
    assert_eq!(numbers(&arrived, to, from), (0..600).collect::<Vec<_>>());
    let panics = Arc::new(|_: &mut posthaste_core::Scope<'_>, _, _: [u8; 16]| panic!("as the test wants"));
    let bad = world.clients[1].register_control("bad", panics).expect("a free name");
    world.enter(from, |scope| scope.control(to, bad, payload(0), false)).expect("it lives");
    world.until("it is told", |world| world.errors(Rank(0)) == [Fault::RemotePanicked(Rank(1))]);
    world.enter(from, |scope| scope.control(to, never, payload(1), false)).expect("it lives");
    world.a_while();
    world.enter(to, |scope| scope.declare_ready());
    world.until("it is refused", |world| {
        world.errors(Rank(0)) == [Fault::RemotePanicked(Rank(1)), Fault::NoSuchProtocol(Rank(1))]
    });
    world.enter(from, |scope| scope.control(to, late, payload(600), false)).expect("it lives");
    world.until("others go on", |_| arrived.lock().expect("no panic").len() == 601);
}

/// What a peer that died has sent to a name that is registered later is nobody's, as its messages are.
pub fn unknown_controls_of_a_lost_peer_are_dropped<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let arrived = Arrived::default();
    let late = register(&world, Rank(0), "late", &Arrived::default());
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    world.enter(from, |scope| scope.control(to, late, payload(0), false)).expect("it lives");
    world.a_while();
    world.kill(Rank(0));
    world.until("the loss", |world| world.errors(Rank(1)) == [Fault::PeerLost(Rank(0))]);
    assert_eq!(register(&world, Rank(1), "late", &arrived), late);
    world.a_while();
    assert!(arrived.lock().expect("no panic").is_empty());
}

/// Who waits to send a control to a peer that dies is told.
pub fn a_control_to_a_lost_peer_is_told<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let arrived = Arrived::default();
    let log = Log::default();
    let protocol = world.record("full", &log);
    let control = register(&world, Rank(0), "gone", &arrived);
    world.pause(Rank(1));
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let long = world.caps().max_eager;
    let mut outbox = Outbox::new(from, (0..2000).map(|_| Message::new(Rank(1), protocol, vec![3; long])));
    fill(&mut world, &mut outbox);
    let mut sender = Sender { from, to, control, queue: (0..100_000).collect(), waiting: None };
    sender.pump(&world).expect("it lives");
    assert!(sender.waiting.is_some());
    world.kill(Rank(1));
    let fault = SendError::Fault(Fault::PeerLost(Rank(1)));
    world.until("it is told", |world| match sender.pump(world) {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error, fault);
            true
        }
    });
    let again = world.enter(from, |scope| scope.control(to, control, payload(0), true));
    assert_eq!(again.expect_err("it is gone"), fault);
    let nobody = Endpoint::new(Rank(7), to.context);
    let unknown = world.enter(from, |scope| scope.control(nobody, control, payload(0), true));
    assert_eq!(unknown.expect_err("there is none"), SendError::UnknownRank { rank: Rank(7), size: 2 });
}
