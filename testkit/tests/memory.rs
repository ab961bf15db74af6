//! A device that has no memory for what is sent, while all ranks live: what was begun is finished, and whoever waits is told.

use posthaste_core::engine::{
    EngineConfig, FifoOptions, Given, Payload, ReplayStart, Rma, SendArgs, Sent, Wait,
};
use posthaste_core::memory::{AtomicOp, WordLen, WordOp};
use posthaste_core::protocol::Flow;
use posthaste_core::{
    Client, ContextId, Endpoint, Fault, JobShape, PatternId, ProtocolId, Rank, Scope, SendError, Ticket,
    Value,
};
use posthaste_protocols::{CollectiveError, Collectives, Exchange};
use posthaste_testkit::conformance::harnesses::SimHarness;
use posthaste_testkit::conformance::{Log, Message, Outbox, Probe, World, run_seeds};
use posthaste_testkit::sim::{Ration, SimOptions, SimWorld};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

const ZERO: Rank = Rank(0);
const ONE: Rank = Rank(1);
/// More than goes into a packet.
const LONG: usize = 5000;
/// More than goes without a page.
const PAGE: usize = 500;

fn at(rank: Rank) -> Endpoint {
    Endpoint::new(rank, ContextId(0))
}

fn seeds(name: &str, config: EngineConfig, test: impl Fn(World<SimHarness>)) {
    let harness = |seed| SimHarness::new(seed, SimOptions::default()).with_config(config);
    run_seeds(name, 0..10, harness, |harness| test(World::new(harness, 2)));
}

fn nobody_is_blamed(world: &World<SimHarness>) {
    assert_eq!((world.errors(ZERO), world.errors(ONE)), (vec![], vec![]));
}

fn lacks_memory(fault: &Fault) -> bool {
    matches!(fault, Fault::OutOfMemory(_))
}

/// A service that answers with as many bytes as the info says, little endian.
fn serve(world: &World<SimHarness>) -> ProtocolId {
    let ids = [ZERO, ONE].map(|rank| {
        let probe = Probe::new("serve", |scope, message| {
            let len = u32::from_le_bytes(message.info.try_into().expect("a length"));
            let to = message.reply().expect("it is a request");
            scope.reply(to, Ok(Payload::Borrowed(&vec![3; len as usize])));
        });
        world.register(rank, probe.flow(Flow::Replied))
    });
    ids[1]
}

/// Rank 0 asks rank 1, with so many bytes, for so many bytes; `None`: it would have to wait for credit.
fn ask(world: &World<SimHarness>, protocol: ProtocolId, bytes: usize, answer: usize) -> Option<Ticket> {
    ask_so(world, protocol, bytes, answer, |scope, args, payload| {
        match scope.give(args, payload).expect("it lives") {
            Given::Done => true,
            Given::Queued(queued) => {
                scope.detach(queued);
                true
            }
            // It is taken back.
            Given::Kept(kept, _) => {
                scope.detach(kept);
                false
            }
        }
    })
}

/// The same in its turn.
fn ask_in_turn(
    world: &World<SimHarness>,
    protocol: ProtocolId,
    bytes: usize,
    answer: usize,
) -> Option<Ticket> {
    ask_so(world, protocol, bytes, answer, |scope, args, payload| {
        matches!(scope.send(args, payload, Wait::InTurn).expect("it lives"), Sent::Done)
    })
}

fn ask_so(
    world: &World<SimHarness>,
    protocol: ProtocolId,
    bytes: usize,
    answer: usize,
    goes: impl FnOnce(&mut Scope<'_>, &SendArgs<'_>, Payload<'static>) -> bool,
) -> Option<Ticket> {
    world.enter(at(ZERO), |scope| {
        let ticket = scope.operation(Some(ONE)).expect("it lives");
        let info = (answer as u32).to_le_bytes();
        let args =
            SendArgs { target: at(ONE), protocol, cookie: ticket.to_word(), info: &info, relaxed: false };
        if goes(scope, &args, Payload::Owned(vec![1; bytes].into())) {
            scope.note_request(ticket, protocol, bytes);
            return Some(ticket);
        }
        scope.complete(ticket, Ok(Value::Unit));
        scope.detach(ticket);
        None
    })
}

/// Rank 1 stands still, and something waits for it.
fn stop_up(world: &mut World<SimHarness>, protocol: ProtocolId) {
    world.pause(ONE);
    let queued = |world: &World<SimHarness>| {
        let args = SendArgs { target: at(ONE), protocol, cookie: 0, info: &[], relaxed: false };
        world.enter(at(ZERO), |scope| match scope.give(&args, Payload::Borrowed(&[0; 40])) {
            Ok(Given::Queued(ticket)) => {
                scope.detach(ticket);
                true
            }
            Ok(Given::Done) => false,
            other => panic!("{other:?}"),
        })
    };
    for _ in 0..50 {
        queued(world);
    }
    assert!(queued(world), "there is room without end");
    // What the device refused for no reason fills the lane.
    world.a_while();
}

/// Whether a message would have to wait for credit; if not, it goes.
fn waits_for_credit(world: &World<SimHarness>, args: &SendArgs<'_>) -> bool {
    world.enter(at(ZERO), |scope| match scope.give(args, Payload::Borrowed(&[7])).expect("it lives") {
        // It is taken back.
        Given::Kept(ticket, _) => {
            scope.detach(ticket);
            true
        }
        Given::Queued(ticket) => {
            scope.detach(ticket);
            false
        }
        Given::Done => false,
    })
}

/// Messages that were begun in one way or another come to their end, and so do those behind them.
fn come_to_their_end(mut world: World<SimHarness>) {
    let log = Log::default();
    let protocol = world.record("long", &log);
    world.harness().ration(ZERO, Ration::NoPages);
    let messages: Vec<_> =
        (0..4).map(|n| Message::filled(at(ZERO), at(ONE), protocol, n, n, LONG + 1111 * n)).collect();
    world.send_all(&mut [Outbox::new(at(ZERO), messages.clone())]);
    world.until("they arrive", |_| log.len() == messages.len());
    log.check(at(ZERO), at(ONE), &messages);
    nobody_is_blamed(&world);
}

#[test]
fn a_stream_that_was_begun_is_finished_without_memory() {
    seeds("streams", EngineConfig::default(), come_to_their_end);
    let nowhere_to_land =
        EngineConfig { rendezvous_bytes: Some(2000), landing_bytes: 0, ..EngineConfig::default() };
    seeds("streams instead of places", nowhere_to_land, come_to_their_end);
}

#[test]
fn a_message_that_goes_to_its_place_in_packets_is_finished_without_memory() {
    let config = EngineConfig { rendezvous_bytes: Some(2000), oversend: true, ..EngineConfig::default() };
    seeds("places", config, come_to_their_end);
}

#[test]
fn a_recorded_stream_and_one_of_a_fifo_are_finished_without_memory() {
    seeds("recorded", EngineConfig::default(), |mut world| {
        let log = Log::default();
        let protocol = world.record("long", &log);
        let memory = world.memory(LONG as u64);
        let bytes = world.random.bytes(LONG);
        memory.write(ZERO, 0, &bytes);
        world.send_all(&mut [Outbox::new(at(ZERO), [Message::new(ONE, protocol, *b"first")])]);
        let send = memory.recorded_send(ONE, protocol, 0, LONG as u64);
        let id = world.enter(at(ZERO), |scope| scope.store_pattern(vec![send], Box::new(())));
        let id = id.expect("there is room for it");
        world.harness().ration(ZERO, Ration::NoPages);
        let tickets: Vec<_> = (0..2)
            .filter_map(|_| match world.enter(at(ZERO), |scope| scope.replay(id)) {
                Ok(ReplayStart::Queued { ticket, .. }) => Some(ticket),
                Ok(ReplayStart::Done) => None,
                Err(error) => panic!("{error:?}"),
            })
            .collect();
        let args = SendArgs { target: at(ONE), protocol, cookie: 0, info: &[], relaxed: false };
        let through = world.enter(at(ZERO), |scope| {
            let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
            let fifo = scope.open_fifo(options).expect("so few slots");
            let given = scope.give_through(fifo, &args, Payload::Borrowed(&bytes));
            match given.expect("it is active") {
                Ok(Given::Queued(ticket)) => ticket,
                other => panic!("{other:?}"),
            }
        });
        for ticket in tickets.into_iter().chain([through]) {
            let outcome = world.outcome(at(ZERO), ticket);
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        world.until("all arrive", |_| log.len() == 4);
        assert!(log.all()[1..].iter().all(|message| message.bytes == bytes));
        nobody_is_blamed(&world);
    });
}

#[test]
fn whoever_asks_is_told_that_there_is_no_memory_for_the_answer() {
    seeds("answers", EngineConfig { credits: 4, ..EngineConfig::default() }, |mut world| {
        let protocol = serve(&world);
        world.harness().ration(ONE, Ration::NoPages);
        // More of them than there is credit for, so that each has to be given back.
        for _ in 0..10 {
            let ticket = ask(&world, protocol, 8, PAGE).expect("there is credit");
            let outcome = world.outcome(at(ZERO), ticket);
            assert!(outcome.as_ref().is_err_and(lacks_memory), "{outcome:?}");
        }
        // In parts it needs no page.
        let ticket = ask(&world, protocol, 8, LONG).expect("there is credit");
        assert_eq!(world.outcome(at(ZERO), ticket).expect("it is answered").into_bytes().len(), LONG);
        nobody_is_blamed(&world);
    });
}

#[test]
fn an_answer_that_waits_and_then_has_no_memory_is_told() {
    seeds("answers that wait", EngineConfig::default(), |mut world| {
        let protocol = serve(&world);
        let first = ask(&world, protocol, 8, 8).expect("there is credit");
        assert!(world.outcome(at(ZERO), first).is_ok());
        // Who asks does not look, so that most of the answers wait, among them such as would go without a page.
        let ask_on = |world: &World<SimHarness>, n: usize| ask(world, protocol, 8, [PAGE, 8][n % 2]);
        let tickets: Vec<_> = (0..30).map(|n| ask_on(&world, n).expect("there is credit")).collect();
        world.harness().ration(ONE, Ration::Enough);
        world.until("answers wait", |world| {
            world.pause(ZERO);
            // Requests that wait themselves are to go out.
            world.handle(at(ZERO)).advance();
            world.handle(at(ONE)).stats().queued > 2
        });
        world.harness().ration(ONE, Ration::NoPages);
        world.resume(ZERO);
        let mut told = 0;
        for (n, ticket) in tickets.into_iter().enumerate() {
            match world.outcome(at(ZERO), ticket) {
                Ok(answer) => assert_eq!(answer.as_bytes().len(), [PAGE, 8][n % 2]),
                Err(fault) => {
                    assert!(lacks_memory(&fault) && n % 2 == 0, "{fault:?}");
                    told += 1;
                }
            }
        }
        assert!(told > 0, "there was memory for all");
        nobody_is_blamed(&world);
    });
}

#[test]
fn answers_wait_for_a_lane() {
    seeds("lanes", EngineConfig::default(), |mut world| {
        let protocol = serve(&world);
        world.harness().ration(ONE, Ration::NoLanes);
        let asked = [8, PAGE].map(|len| ask(&world, protocol, 8, len).expect("there is credit"));
        let flush = world.enter(at(ZERO), |scope| scope.flush(at(ONE)));
        let flush = flush.expect("it lives").expect("something was sent");
        world.a_while();
        for ticket in asked.iter().chain([&flush]) {
            assert!(!world.handle(at(ZERO)).slots().is_done(*ticket), "there is no way back");
        }
        world.harness().ration(ONE, Ration::Enough);
        let [short, long] = asked.map(|ticket| world.outcome(at(ZERO), ticket));
        assert_eq!(short.expect("it waited").as_bytes(), [3; 8]);
        assert_eq!(long.expect("it waited, too").into_bytes().len(), PAGE);
        assert!(world.outcome(at(ZERO), flush).is_ok());
        nobody_is_blamed(&world);
    });
}

#[test]
fn a_request_that_waits_and_then_has_no_memory_ends() {
    seeds("requests", EngineConfig { credits: 1, ..EngineConfig::default() }, |mut world| {
        let log = Log::default();
        let plug = world.record("plug", &log);
        let protocol = serve(&world);
        for ask_first in [ask, ask_in_turn] {
            stop_up(&mut world, plug);
            let ticket = ask_first(&world, protocol, PAGE, 8).expect("there is credit");
            assert!(ask(&world, protocol, 8, 8).is_none(), "it took the only credit");
            world.harness().ration(ZERO, Ration::NoPages);
            world.resume(ONE);
            let outcome = world.outcome(at(ZERO), ticket);
            assert!(outcome.as_ref().is_err_and(lacks_memory), "{outcome:?}");
            // Its credit is the next one's.
            let next = ask(&world, protocol, 8, 8).expect("there is credit again");
            assert!(world.outcome(at(ZERO), next).is_ok());
            world.harness().ration(ZERO, Ration::Enough);
        }
        nobody_is_blamed(&world);
    });
}

#[test]
fn a_message_that_waits_and_then_has_no_memory_gives_its_credit_back() {
    seeds("credit", EngineConfig { credits: 1, ..EngineConfig::default() }, |mut world| {
        let log = Log::default();
        let plug = world.record("plug", &log);
        let ids = [ZERO, ONE].map(|rank| {
            let probe = Probe::new("kept", |scope, message| scope.consumed(message.credit()));
            world.register(rank, probe.flow(Flow::Credited))
        });
        let args = SendArgs { target: at(ONE), protocol: ids[0], cookie: 0, info: &[], relaxed: false };
        let options = FifoOptions { slots: 8, priority: false, quantum: 0 };
        let fifo = world.enter(at(ZERO), |scope| scope.open_fifo(options)).expect("so few slots");
        let long = || Payload::Owned(vec![7; PAGE].into());
        for way in 0..3 {
            stop_up(&mut world, plug);
            // It waits already when memory runs out, in a queue.
            let sent = world.enter(at(ZERO), |scope| {
                let given = match way {
                    0 => scope.give(&args, long()),
                    1 => scope.give_through(fifo, &args, long()).expect("it is active"),
                    _ => {
                        let sent = scope.send(&args, long(), Wait::InTurn);
                        assert!(matches!(sent, Ok(Sent::Done)), "{sent:?}");
                        return None;
                    }
                };
                match given {
                    Ok(Given::Queued(ticket)) => Some(ticket),
                    other => panic!("{other:?}"),
                }
            });
            world.harness().ration(ZERO, Ration::NoPages);
            world.resume(ONE);
            match sent {
                Some(ticket) => {
                    let outcome = world.outcome(at(ZERO), ticket);
                    assert!(outcome.as_ref().is_err_and(lacks_memory), "{outcome:?}");
                }
                // Nobody waits for it: whoever wants to hear of errors is told.
                None => world.until("somebody is told", |world| world.errors(ZERO).iter().any(lacks_memory)),
            }
            let next = world.enter(at(ZERO), |scope| {
                match scope.send(&args, Payload::Borrowed(&[7]), Wait::Never) {
                    Ok(Sent::Done) => true,
                    Ok(Sent::Full(_)) => false,
                    other => panic!("{other:?}"),
                }
            });
            // A lane may be full, or the device refuse, and the credit be there.
            assert!(next || !waits_for_credit(&world, &args), "the credit is gone");
            world.harness().ration(ZERO, Ration::Enough);
            world.a_while();
        }
        assert_eq!(world.errors(ZERO).len(), 1);
    });
}

/// A pattern of one send that takes credit, to a rank that stands still; and the memory that it sends.
fn to_one_who_reads_nothing(world: &mut World<SimHarness>) -> (PatternId, impl Sized + use<>) {
    let ids = [ZERO, ONE].map(|rank| {
        let probe = Probe::new("kept", |scope, message| scope.consumed(message.credit()));
        world.register(rank, probe.flow(Flow::Credited))
    });
    let memory = world.memory(8);
    let send = memory.recorded_send(ONE, ids[0], 0, 8);
    let id = world.enter(at(ZERO), |scope| scope.store_pattern(vec![send], Box::new(())));
    world.pause(ONE);
    (id.expect("there is room for it"), memory)
}

#[test]
fn who_waits_for_replays_towards_one_rank_waits_for_no_other() {
    seeds("settled", EngineConfig { credits: 1, ..EngineConfig::default() }, |mut world| {
        let (id, _memory) = to_one_who_reads_nothing(&mut world);
        let replays: Vec<_> = (0..3)
            .filter_map(|_| match world.enter(at(ZERO), |scope| scope.replay(id)) {
                Ok(ReplayStart::Queued { ticket, .. }) => Some(ticket),
                Ok(ReplayStart::Done) => None,
                Err(error) => panic!("{error:?}"),
            })
            .collect();
        let settled = [None, Some(ZERO), Some(ONE)]
            .map(|rank| world.enter(at(ZERO), |scope| scope.settle_replays(rank)).expect("it goes on"));
        assert_eq!(settled.map(|ticket| ticket.is_some()), [true, false, true]);
        world.resume(ONE);
        for ticket in replays.into_iter().chain(settled.into_iter().flatten()) {
            assert!(world.outcome(at(ZERO), ticket).is_ok());
        }
        let still = world.enter(at(ZERO), |scope| scope.settle_replays(None));
        assert!(matches!(still, Ok(None)), "{still:?}");
    });
}

#[test]
fn a_replay_that_has_no_memory_gives_its_credit_back() {
    seeds("credit of a replay", EngineConfig { credits: 2, ..EngineConfig::default() }, |mut world| {
        let log = Log::default();
        let plug = world.record("plug", &log);
        let ids = [ZERO, ONE].map(|rank| {
            let probe = Probe::new("kept", |scope, message| scope.consumed(message.credit()));
            world.register(rank, probe.flow(Flow::Credited))
        });
        let memory = world.memory(2 * PAGE as u64);
        let sends = [0, PAGE].map(|at| memory.recorded_send(ONE, ids[0], at as u64, PAGE as u64));
        let id = world.enter(at(ZERO), |scope| scope.store_pattern(sends.to_vec(), Box::new(())));
        let id = id.expect("there is room for it");
        let args = SendArgs { target: at(ONE), protocol: ids[0], cookie: 0, info: &[], relaxed: false };
        for round in 0..6 {
            let queued = round % 2 == 1;
            if queued {
                stop_up(&mut world, plug);
            }
            if !queued {
                world.harness().ration(ZERO, Ration::NoPages);
            }
            let start = world.enter(at(ZERO), |scope| scope.replay(id));
            world.harness().ration(ZERO, Ration::NoPages);
            world.resume(ONE);
            match start {
                Ok(ReplayStart::Queued { ticket, .. }) => {
                    let outcome = world.outcome(at(ZERO), ticket);
                    assert!(outcome.as_ref().is_err_and(lacks_memory), "{outcome:?}");
                }
                Err(error) => assert!(error.to_string().contains("memory"), "{error}"),
                Ok(ReplayStart::Done) => panic!("it needs pages"),
            }
            world.harness().ration(ZERO, Ration::Enough);
            world.a_while();
        }
        // Both of the credits are there.
        for _ in 0..2 {
            assert!(!waits_for_credit(&world, &args), "the credit is gone");
            world.a_while();
        }
    });
}

#[test]
fn puts_and_gets_in_packets_need_no_memory() {
    seeds("accesses", EngineConfig { oversend: true, ..EngineConfig::default() }, |mut world| {
        let memory = world.memory(2 * LONG as u64);
        let bytes = world.random.bytes(LONG);
        memory.write(ONE, 0, &bytes);
        for len in [PAGE, LONG] {
            world.harness().ration(ONE, Ration::NoPages);
            let get = world.access(&memory, ZERO, ONE, 0, Rma::Get(len as u64));
            let behind = world.access(&memory, ZERO, ONE, 8, Rma::Get(8));
            assert!(world.access_ends(ZERO, get) == bytes[..len]);
            assert!(world.access_ends(ZERO, behind) == bytes[8..16]);
            world.harness().ration(ZERO, Ration::NoPages);
            let put =
                world.access(&memory, ZERO, ONE, LONG as u64, Rma::Put(Payload::Borrowed(&bytes[..len])));
            world.access_ends(ZERO, put);
            assert!(memory.bytes(ONE, LONG as u64, len) == bytes[..len]);
        }
        nobody_is_blamed(&world);
    });
}

/// The slots of so many operations, the ones first that were free last.
fn free_slots(world: &World<SimHarness>, count: usize) -> Vec<u32> {
    world.enter(at(ZERO), |scope| {
        let tickets: Vec<_> = (0..count).map(|_| scope.operation(None).expect("there are slots")).collect();
        for ticket in tickets.iter().rev() {
            // In this order they are at once those that are taken next.
            scope.detach(*ticket);
            scope.complete(*ticket, Ok(Value::Unit));
        }
        tickets.iter().map(|ticket| ticket.to_word() as u32).collect()
    })
}

#[test]
fn a_run_whose_protocol_is_refused_while_it_waits_for_credit_keeps_no_slot() {
    seeds("refused", EngineConfig { credits: 1, ..EngineConfig::default() }, |mut world| {
        let protocol = world.register(ZERO, Probe::new("unknown", |_, _| {}).flow(Flow::Credited));
        let memory = world.memory(8);
        world.send_all(&mut [Outbox::new(at(ZERO), [Message::new(ONE, protocol, *b"the only credit")])]);
        let send = memory.recorded_send(ONE, protocol, 0, 8);
        let id = world.enter(at(ZERO), |scope| scope.store_pattern(vec![send], Box::new(())));
        let id = id.expect("there is room for it");
        // Of the replay and of its wait.
        let next = free_slots(&world, 2);
        let ticket = match world.enter(at(ZERO), |scope| scope.replay(id)) {
            Ok(ReplayStart::Queued { ticket, .. }) => ticket,
            other => panic!("{other:?}"),
        };
        world.a_while();
        world.enter(at(ONE), |scope| scope.declare_ready());
        let outcome = world.outcome(at(ZERO), ticket);
        assert!(matches!(outcome, Err(Fault::NoSuchProtocol(ONE))), "{outcome:?}");
        // More than there are without another chunk, so that all that came back are among them.
        let free = free_slots(&world, 5000);
        assert!(next.iter().all(|slot| free.contains(slot)), "one of {next:?} is kept");
    });
}

#[test]
fn an_access_that_could_not_be_asked_for_leaves_nothing_behind() {
    seeds("unasked", EngineConfig { oversend: true, ..EngineConfig::default() }, |mut world| {
        let memory = world.memory(64);
        memory.write(ONE, 0, &[7; 64]);
        let key = memory.remote[ZERO.index()][ONE.index()];
        let add = WordOp { op: AtomicOp::Add, len: WordLen::Eight, operand: 1, expected: 0 };
        for rma in [Rma::Get(16), Rma::Fetch(add), Rma::Get(64)] {
            world.harness().ration(ZERO, Ration::NoLanes);
            let started = world.enter(at(ZERO), |scope| scope.rma(at(ONE), key, 0, rma));
            let ticket = started.expect("in range").expect("it takes its time");
            let outcome = world.outcome(at(ZERO), ticket);
            assert!(matches!(&outcome, Err(fault) if lacks_memory(fault)), "{outcome:?}");
            world.harness().ration(ZERO, Ration::Enough);
        }
        // Answers go to those who have asked.
        let get = world.access(&memory, ZERO, ONE, 8, Rma::Get(8));
        assert_eq!(world.access_ends(ZERO, get), [7; 8][..]);
        let put = world.access(&memory, ZERO, ONE, 0, Rma::Put(Payload::Borrowed(&[9; 16])));
        world.access_ends(ZERO, put);
        let get = world.access(&memory, ZERO, ONE, 0, Rma::Get(24));
        assert_eq!(world.access_ends(ZERO, get)[8..], [[9; 8], [7; 8]].concat());
        nobody_is_blamed(&world);
    });
}

/// Who never sleeps pays small debts, too: the sender may wait for just these.
#[test]
fn a_receiver_that_only_advances_pays_whoever_waits_for_credit() {
    seeds("small debts", EngineConfig { credits: 40, ..EngineConfig::default() }, |mut world| {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let ids = [ZERO, ONE].map(|rank| {
            let kept = kept.clone();
            let probe = Probe::new("kept", move |_, message| kept.lock().unwrap().push(message.credit()));
            world.register(rank, probe.flow(Flow::Credited))
        });
        let all: Vec<_> = (0..40).map(|n| Message::new(ONE, ids[0], [n; 8])).collect();
        world.send_all(&mut [Outbox::new(at(ZERO), all)]);
        world.until("they arrive", |_| kept.lock().unwrap().len() == 40);
        let args = SendArgs { target: at(ONE), protocol: ids[0], cookie: 0, info: &[], relaxed: false };
        let ticket = world.enter(at(ZERO), |scope| match scope.give(&args, Payload::Borrowed(b"one more")) {
            Ok(Given::Kept(ticket, deposit)) => {
                deposit.leave();
                ticket
            }
            other => panic!("{other:?}"),
        });
        world.a_while();
        // Far less than is told at once.
        let few: Vec<_> = kept.lock().unwrap().drain(..2).collect();
        world.enter(at(ONE), |scope| few.into_iter().for_each(|credit| scope.consumed(credit)));
        assert!(world.outcome(at(ZERO), ticket).is_ok());
    });
}

/// A job whose ranks can call collective operations, and rank 0 of which has no memory for another lane.
fn without_lanes(seed: u64) -> (SimWorld, Vec<(Exchange, Collectives)>) {
    let shape = JobShape { ranks: 3, clients: 1, contexts: 1 };
    let world = SimWorld::new(shape, seed, SimOptions::default(), EngineConfig::default());
    let member = |client: &Arc<Client>| {
        let exchange = Exchange::new(&**client).expect("the name is free");
        (exchange, Collectives::new(&**client, &[]).expect("the name is free"))
    };
    let members = world.clients().iter().map(member).collect();
    world.fabric().ration(ZERO, Ration::NoLanes);
    (world, members)
}

/// Runs calls of all ranks, the others' for a while without rank 0's being able to tell them anything.
fn end_in_spite_of_it<R: std::fmt::Debug>(
    world: &mut SimWorld,
    calls: impl IntoIterator<Item: Future<Output = R>>,
) -> Vec<R> {
    let mut calls = std::pin::pin!(futures::future::join_all(calls));
    let until = world.fabric().now() + Duration::from_millis(130);
    let mut cx = Context::from_waker(Waker::noop());
    while world.fabric().now() < until {
        let early = calls.as_mut().poll(&mut cx);
        assert!(early.is_pending(), "the others know without having been told: {early:?}");
        world.step();
    }
    world.fabric().ration(ZERO, Ration::Enough);
    world.run(calls, 2_000_000)
}

#[test]
fn a_collective_call_that_lacked_memory_ends_on_all_ranks_when_there_is_some() {
    for seed in 0..10 {
        let (mut world, members) = without_lanes(seed);
        let ends = end_in_spite_of_it(&mut world, members.iter().map(|(exchange, _)| exchange.barrier()));
        for (rank, end) in ends.iter().enumerate() {
            let fault = end.as_ref().expect_err("rank 0 had no memory for its part");
            let fault = match fault {
                SendError::Fault(fault) => fault,
                other => panic!("seed {seed}, rank {rank}: {other}"),
            };
            assert!(lacks_memory(fault), "seed {seed}, rank {rank}: {fault}");
        }
        drop((members, world));

        let (mut world, members) = without_lanes(seed);
        let groups: Vec<_> = members.iter().map(|(_, collectives)| collectives.world()).collect();
        let barriers = groups.iter().map(|group| group.barrier());
        for (rank, end) in end_in_spite_of_it(&mut world, barriers).into_iter().enumerate() {
            let error = end.expect_err("rank 0 had no memory for its part");
            let lacks = matches!(&error, CollectiveError::Fault(fault) if lacks_memory(fault));
            assert!(lacks, "seed {seed}, rank {rank}: {error}");
        }
    }
}

/// Who gives up a flush while a replay waits for credit, and tries again and again, takes no slot for good.
#[test]
fn a_flush_behind_a_replay_that_waits_can_be_given_up_for_ever() {
    let config = EngineConfig { credits: 1, ..EngineConfig::default() };
    seeds("given up", config, |mut world| {
        let (pattern, _memory) = to_one_who_reads_nothing(&mut world);
        for _ in 0..3 {
            world.enter(at(ZERO), |scope| scope.replay(pattern)).expect("it is queued");
        }
        for _ in 0..10_000 {
            let slot = world.enter(at(ZERO), |scope| {
                let ticket = scope.settle_replays(None).expect("the context goes on").expect("it waits");
                scope.detach(ticket);
                ticket.to_word() as u32
            });
            assert!(slot < 1000, "slots are used again");
        }
        world.resume(ONE);
        world.a_while();
    });
}
