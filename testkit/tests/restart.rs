//! A rank that dies and is started again, as the engines of the others see it: over the in-process device and in the
//! simulated world.

use posthaste_core::context::Face;
use posthaste_core::descriptor::{Descriptor, Op, SourceKind};
use posthaste_core::device::RemoteMemory;
use posthaste_core::engine::{
    Deposit, EngineConfig, FifoOptions, Given, PatternError, Payload, Rma, SendArgs,
};
use posthaste_core::inprocess::{Fabric, InProcessFabric, Limits};
use posthaste_core::messager::ClientParts;
use posthaste_core::protocol::{Credit, Flow, ReplyTo};
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, ContextId, Endpoint, Fault, JobShape, LinuxSysdep, Messager, ProtocolId, Rank,
    RmaError, Scope, SendError, Ticket,
};
use posthaste_testkit::conformance::{Log, Probe};
use posthaste_testkit::sim::{SimOptions, SimWorld, open_without_driver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SHAPE: JobShape = JobShape { ranks: 3, clients: 1, contexts: 1 };
const ONE: Rank = Rank(1);
const KEPT: ProtocolId = ProtocolId(0);
const ASK: ProtocolId = ProtocolId(1);
const LOG: ProtocolId = ProtocolId(2);

fn config() -> EngineConfig {
    EngineConfig { credits: 1, fifo_slots: 4, ..EngineConfig::default() }
}

/// Ranks that can be killed and started again.
trait Ranks {
    fn clients(&self) -> &[Arc<Client>];
    fn step(&mut self);
    fn kill(&mut self, rank: Rank);
    fn restart(&mut self, rank: Rank);
}

struct InProcess {
    fabric: Arc<Fabric>,
    clients: Vec<Arc<Client>>,
}

impl InProcess {
    fn new() -> Self {
        let limits = Limits { packets_per_pair: 4, segment: 1 << 20, ..Limits::default() };
        let fabric = InProcessFabric::with_limits(SHAPE, limits);
        let clients = (0..3).map(|rank| Self::client(&fabric, Rank(rank))).collect();
        Self { fabric, clients }
    }

    fn client(fabric: &Arc<Fabric>, rank: Rank) -> Arc<Client> {
        let client = Client::new(ClientParts {
            id: ClientId(0),
            devices: vec![fabric.device(ClientId(0), rank)],
            sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, SHAPE), None)),
            config: config(),
            spin: Some(Duration::ZERO),
            driver_thread: false,
        });
        let client = client.expect("the ports are made");
        open_without_driver(&client);
        Arc::new(client)
    }
}

impl Ranks for InProcess {
    fn clients(&self) -> &[Arc<Client>] {
        &self.clients
    }

    fn step(&mut self) {
        for client in &self.clients {
            client.advance();
        }
    }

    fn kill(&mut self, rank: Rank) {
        self.fabric.kill(rank);
    }

    fn restart(&mut self, rank: Rank) {
        self.fabric.restart(rank);
        self.clients[rank.index()] = Self::client(&self.fabric, rank);
    }
}

impl Ranks for SimWorld {
    fn clients(&self) -> &[Arc<Client>] {
        SimWorld::clients(self)
    }

    fn step(&mut self) {
        SimWorld::step(self);
    }

    fn kill(&mut self, rank: Rank) {
        SimWorld::kill(self, rank);
    }

    fn restart(&mut self, rank: Rank) {
        SimWorld::restart(self, rank, config());
    }
}

/// What the handlers of one rank have taken.
#[derive(Clone, Default)]
struct Taken {
    credits: Arc<Mutex<Vec<Credit>>>,
    asked: Arc<Mutex<Vec<ReplyTo>>>,
    log: Log,
}

fn register(client: &Client) -> Taken {
    let taken = Taken::default();
    let (credits, asked) = (taken.credits.clone(), taken.asked.clone());
    let kept = Probe::new("kept", move |_, message| credits.lock().unwrap().push(message.credit()));
    let ask = Probe::new("ask", move |_, message| {
        asked.lock().unwrap().push(message.reply().expect("it is a request"));
    });
    client.register(Arc::new(kept.flow(Flow::Credited))).expect("the name is free");
    client.register(Arc::new(ask.flow(Flow::Replied))).expect("the name is free");
    client.register(Arc::new(Probe::recording("log", &taken.log))).expect("the name is free");
    taken
}

fn at(rank: Rank) -> Endpoint {
    Endpoint::new(rank, ContextId(0))
}

fn enter<R>(ranks: &impl Ranks, rank: Rank, run: impl FnOnce(&mut Scope<'_>) -> R) -> R {
    let entered = ranks.clients()[rank.index()].contexts()[0].enter(|engine| run(&mut engine.scope()));
    entered.ok().expect("there is one thread")
}

fn until<R: Ranks>(ranks: &mut R, what: &str, mut so: impl FnMut(&R) -> bool) {
    for _ in 0..200_000 {
        if so(ranks) {
            return;
        }
        ranks.step();
    }
    panic!("{what}: does not come");
}

/// `Ok(None)`: on its way. `Ok(Some)`: it has to wait.
fn send(
    ranks: &impl Ranks,
    from: Rank,
    to: Rank,
    protocol: ProtocolId,
) -> Result<Option<(Ticket, Deposit)>, SendError> {
    enter(ranks, from, |scope| {
        let args = SendArgs { target: at(to), protocol, cookie: 0, info: &[], relaxed: false };
        match scope.give(&args, Payload::Borrowed(&[7; 20])) {
            Ok(Given::Kept(ticket, deposit)) => Ok(Some((ticket, deposit))),
            Ok(_) => Ok(None),
            Err((error, _)) => Err(error),
        }
    })
}

/// Asks, and gives the ticket of the answer.
fn ask(ranks: &impl Ranks, from: Rank, to: Rank) -> Ticket {
    enter(ranks, from, |scope| {
        let ticket = scope.operation(Some(to)).expect("it lives");
        scope.note_request(ticket, ASK, 0);
        let cookie = ticket.to_word();
        let args = SendArgs { target: at(to), protocol: ASK, cookie, info: &[], relaxed: false };
        assert!(matches!(scope.give(&args, Payload::Borrowed(&[])), Ok(Given::Done | Given::Queued(_))));
        ticket
    })
}

fn ended(ranks: &impl Ranks, of: Rank, ticket: Ticket) -> Option<Result<Vec<u8>, Fault>> {
    let entered = ranks.clients()[of.index()].contexts()[0].enter(|engine| engine.take(ticket));
    Some(entered.ok().expect("there is one thread")?.map(|value| value.as_bytes().to_vec()))
}

/// Everything that can be held of an incarnation, held over its death and the next one's start.
fn story(ranks: &mut impl Ranks) {
    let zero = Rank(0);
    let mut taken: Vec<Taken> = ranks.clients().iter().map(|client| register(client)).collect();
    // Rank 1 asks, and sends one message that is kept; both stay unanswered.
    let old_ticket = ask(ranks, ONE, zero);
    assert!(send(ranks, ONE, zero, KEPT).unwrap().is_none());
    let here = taken[0].clone();
    until(ranks, "the first messages", |_| {
        here.credits.lock().unwrap().len() == 1 && here.asked.lock().unwrap().len() == 1
    });
    let (credit, question) = (here.credits.lock().unwrap()[0], here.asked.lock().unwrap()[0]);
    // Rank 0 knows memory of rank 1, has recorded a put to it, and asks.
    let memory = RemoteMemory { rank: ONE, offset: 0, len: 64, mapped: None, incarnation: 0 };
    let memory = enter(ranks, zero, |scope| scope.table().remote.insert(memory));
    let put = Descriptor {
        op: Op::Put,
        source_kind: SourceKind::Inline,
        rank: ONE,
        region: memory as u32,
        len: 8,
        ..Descriptor::default()
    };
    let pattern =
        enter(ranks, zero, |scope| scope.store_pattern(vec![put], Box::new(()))).expect("a pattern");
    let mine = ask(ranks, zero, ONE);
    // A message to it waits in a FIFO that is not served, and another one for room.
    let fifo = enter(ranks, zero, |scope| scope.open_fifo(FifoOptions::default())).expect("so few slots");
    let queued = enter(ranks, zero, |scope| {
        scope.enable_fifo(fifo, false).expect("it is open");
        let args = SendArgs { target: at(ONE), protocol: LOG, cookie: 0, info: &[], relaxed: false };
        match scope.give_through(fifo, &args, Payload::Borrowed(&[9; 30])) {
            Ok(Ok(Given::Queued(ticket))) => ticket,
            other => panic!("it is to be queued: {other:?}"),
        }
    });
    let waiting = (0..200).find_map(|_| send(ranks, zero, ONE, LOG).unwrap());
    let (waits, deposit) = waiting.expect("the queue is bounded");

    ranks.kill(ONE);
    until(ranks, "the loss", |ranks| matches!(ended(ranks, zero, mine), Some(Err(Fault::PeerLost(ONE)))));
    for rank in [zero, Rank(2)] {
        until(ranks, "the loss", |ranks| {
            let lost = Some(SendError::Fault(Fault::PeerLost(ONE)));
            send(ranks, rank, ONE, LOG).err() == lost
        });
    }
    ranks.restart(ONE);
    taken[1] = register(&ranks.clients()[1]);
    for rank in [zero, Rank(2)] {
        until(ranks, "the restart", |ranks| enter(ranks, rank, |scope| scope.incarnation_of(ONE)) == 1);
        assert_eq!(ranks.clients()[rank.index()].incarnation_of(ONE), 1);
    }

    // What waits was for the old one.
    assert_eq!(ended(ranks, zero, queued), Some(Err(Fault::PeerLost(ONE))));
    enter(ranks, zero, |scope| scope.enable_fifo(fifo, true)).expect("it is open");
    assert_eq!(enter(ranks, zero, |scope| scope.fifo_status(fifo)).map(|status| status.len), Ok(0));
    assert_eq!(ended(ranks, zero, waits), Some(Err(Fault::PeerLost(ONE))));
    // It may have had a place before the loss was known.
    assert!(deposit.withdraw().is_none_or(|back| back.bytes_of() == [7; 20]));
    // The memory and the pattern were of the old one.
    let stale = Fault::StaleHandle { rank: ONE, held: 0, now: 1 };
    let refused = enter(ranks, zero, |scope| scope.rma(at(ONE), memory, 0, Rma::Get(8)));
    assert_eq!(refused.unwrap_err(), RmaError::Fault(stale));
    let refused = enter(ranks, zero, |scope| scope.rma(at(ONE), memory, 0, Rma::Put(Payload::Borrowed(&[]))));
    assert_eq!(refused.unwrap_err(), RmaError::Fault(stale), "of no bytes, too");
    let refused = enter(ranks, zero, |scope| scope.replay(pattern));
    assert!(matches!(refused, Err(PatternError::Fault(fault)) if fault == stale), "{refused:?}");
    let refused = enter(ranks, zero, |scope| scope.store_pattern(vec![put], Box::new(())));
    assert!(matches!(refused, Err(PatternError::Rma(_) | PatternError::Fault(_))), "{refused:?}");

    // The new one has the same names for its requests. The answer to the old one must not end them.
    let new_ticket = ask(ranks, ONE, zero);
    assert_eq!(new_ticket.to_word(), old_ticket.to_word(), "or this shows nothing");
    until(ranks, "the question", |_| here.asked.lock().unwrap().len() == 2);
    let again = here.asked.lock().unwrap()[1];
    assert_ne!(question, again);
    enter(ranks, zero, |scope| {
        scope.reply(question, Ok(Payload::Borrowed(b"to the dead")));
        scope.reply(again, Ok(Payload::Borrowed(b"to the living")));
    });
    let mut answer = None;
    until(ranks, "the answer", |ranks| {
        answer = ended(ranks, ONE, new_ticket);
        answer.is_some()
    });
    assert_eq!(answer, Some(Ok(b"to the living".to_vec())));

    // Credit of the old one is not the new one's: it has one message outstanding, and none more.
    assert!(send(ranks, ONE, zero, KEPT).unwrap().is_none());
    until(ranks, "its message", |_| here.credits.lock().unwrap().len() == 2);
    enter(ranks, zero, |scope| scope.consumed(credit));
    for _ in 0..500 {
        ranks.step();
    }
    let (ticket, _deposit) = send(ranks, ONE, zero, KEPT).unwrap().expect("it has no credit");
    let credit = here.credits.lock().unwrap()[1];
    enter(ranks, zero, |scope| scope.consumed(credit));
    until(ranks, "its credit", |ranks| ended(ranks, ONE, ticket).is_some());
    until(ranks, "its second message", |_| here.credits.lock().unwrap().len() == 3);

    // And nothing that was sent to the old one comes to the new one.
    assert!(taken[1].log.is_empty());
    for rank in [zero, Rank(2)] {
        assert!(send(ranks, rank, ONE, LOG).unwrap().is_none());
    }
    let there = taken[1].log.clone();
    until(ranks, "messages of both", |_| there.len() == 2);
}

#[test]
fn nothing_of_a_dead_incarnation_touches_the_next_in_process() {
    story(&mut InProcess::new());
}

#[test]
fn nothing_of_a_dead_incarnation_touches_the_next_in_a_simulated_world() {
    for seed in 0..40 {
        let options = if seed % 4 == 0 { SimOptions::tiny() } else { SimOptions::default() };
        println!("seed {seed}");
        story(&mut SimWorld::new(SHAPE, seed, options, config()));
    }
}

#[test]
fn a_hundred_restarts_in_process_leave_no_operation_behind() {
    let mut ranks = InProcess::new();
    ranks.clients().iter().for_each(|client| drop(register(client)));
    for incarnation in 1..=100 {
        let pending = ask(&ranks, Rank(0), ONE);
        ranks.kill(ONE);
        ranks.restart(ONE);
        register(&ranks.clients()[1]);
        // The death was told of in passing, with the restart.
        let mut end = None;
        until(&mut ranks, "the end of the question", |ranks| {
            end = ended(ranks, Rank(0), pending);
            end.is_some()
        });
        assert_eq!(end, Some(Err(Fault::PeerLost(ONE))));
        until(&mut ranks, "the restart", |ranks| ranks.clients()[0].incarnation_of(ONE) == incarnation);
        assert!(send(&ranks, Rank(0), ONE, LOG).unwrap().is_none());
    }
}
