//! What the tests are made of: a world, protocols that record, and senders that do as futures will.

use super::{Harness, Setup};
use crate::random::Random;
use bytes::Bytes;
use posthaste_core::context::{Face, Handle};
use posthaste_core::device::{Body, RemoteMemory};
use posthaste_core::engine::{Payload, Rma, Scope, SendArgs, Sent, Wait};
use posthaste_core::memory::SharedSlice;
use posthaste_core::protocol::{Accept, FirstPacket, Flow, Incoming, Protocol};
use posthaste_core::slot::Outcome;
use posthaste_core::{
    Caps, Client, ContextId, Endpoint, Fault, Messager, ProtocolId, Rank, SendError, Ticket,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// A job in one process, moved step by step.
pub struct World<H> {
    harness: H,
    /// By rank.
    pub clients: Vec<Arc<Client>>,
    paused: BTreeSet<Rank>,
    dead: BTreeSet<Rank>,
    errors: Vec<Arc<Mutex<Vec<Fault>>>>,
    /// The settings ask for puts and gets over sends.
    forced: bool,
    rendezvous: Option<u64>,
    /// For the test's own choices.
    pub random: Random,
}

impl<H> std::fmt::Debug for World<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("paused", &self.paused).finish_non_exhaustive()
    }
}

impl<H: Harness> World<H> {
    /// A world of one context per rank with the harness's settings.
    pub fn new(harness: H, ranks: u32) -> Self {
        Self::with(harness, ranks, |_| {})
    }

    /// A world with changed settings.
    pub fn with(mut harness: H, ranks: u32, change: impl FnOnce(&mut Setup)) -> Self {
        let mut setup = Setup { ranks, contexts: 1, config: harness.config() };
        change(&mut setup);
        let clients = harness.start(&setup);
        assert_eq!(clients.len(), ranks as usize, "one client per rank");
        let errors = clients
            .iter()
            .map(|client| {
                let told = Arc::new(Mutex::new(Vec::new()));
                let errors = told.clone();
                client.on_error(move |fault| errors.lock().expect("no panic under this lock").push(fault));
                told
            })
            .collect();
        let random = Random::new(harness.seed() ^ 0x5bd1_e995);
        let (forced, rendezvous) = (setup.config.oversend, setup.config.rendezvous_bytes);
        Self {
            harness,
            clients,
            paused: BTreeSet::new(),
            dead: BTreeSet::new(),
            errors,
            forced,
            rendezvous,
            random,
        }
    }

    /// The ranks.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<H> {
        (0..self.clients.len() as u32).map(Rank)
    }

    /// The endpoints, of all contexts.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.clients.iter().flat_map(|client| client.contexts()).map(Handle::me).collect()
    }

    /// What the devices can do for all ranks.
    pub fn caps(&self) -> Caps {
        *self.clients[0].caps().common()
    }

    /// Whether puts and gets go over sends.
    pub fn goes_over_send(&self) -> bool {
        self.forced || !(self.caps().native_put && self.caps().native_get)
    }

    /// The length from which on messages go straight to their places, if the settings say so.
    pub fn rendezvous_from(&self) -> Option<usize> {
        self.rendezvous.map(|bytes| bytes as usize)
    }

    /// The handle of an endpoint.
    pub fn handle(&self, endpoint: Endpoint) -> &Handle {
        &self.clients[endpoint.rank.index()].contexts()[endpoint.context.index()]
    }

    /// Runs the closure on an endpoint's engine.
    pub fn enter<R>(&self, endpoint: Endpoint, run: impl FnOnce(&mut Scope<'_>) -> R) -> R {
        let result = self.handle(endpoint).enter(|engine| run(&mut engine.scope()));
        result.ok().expect("nobody else is at the engine: there is one thread")
    }

    /// Lets something happen.
    pub fn step(&mut self) {
        self.harness.step(&self.paused);
    }

    /// Lets time pass in which everything that can happen most likely happens.
    pub fn a_while(&mut self) {
        for _ in 0..self.harness.a_while() {
            self.step();
        }
    }

    /// Steps until the condition holds.
    ///
    /// # Panics
    /// If it does not within the harness's patience.
    pub fn until(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        for _ in 0..self.harness.patience() {
            if condition(self) {
                return;
            }
            self.step();
        }
        panic!("never: {what}\npaused: {:?}\n{}", self.paused, self.harness.describe());
    }

    /// Steps until the ticket has ended.
    pub fn outcome(&mut self, endpoint: Endpoint, ticket: Ticket) -> Outcome {
        let mut outcome = None;
        self.until("the operation ends", |world| {
            outcome = world.handle(endpoint).slots().take(ticket);
            outcome.is_some()
        });
        outcome.expect("just seen")
    }

    /// Steps until the future is ready.
    pub fn run<F: Future>(&mut self, what: &str, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut output = None;
        self.until(what, |_| match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => {
                output = Some(value);
                true
            }
            Poll::Pending => false,
        });
        output.expect("just seen")
    }

    /// The rank does not advance for now.
    pub fn pause(&mut self, rank: Rank) {
        self.paused.insert(rank);
    }

    /// The rank advances again.
    pub fn resume(&mut self, rank: Rank) {
        assert!(!self.dead.contains(&rank), "the dead do not advance");
        self.paused.remove(&rank);
    }

    /// Crashes a rank.
    pub fn kill(&mut self, rank: Rank) {
        self.harness.kill(rank);
        self.dead.insert(rank);
        self.paused.insert(rank);
    }

    /// Asynchronous errors that a rank was told of.
    pub fn errors(&self, rank: Rank) -> Vec<Fault> {
        self.errors[rank.index()].lock().expect("no panic under this lock").clone()
    }

    /// Registers a protocol on a rank.
    pub fn register(&self, rank: Rank, probe: Probe) -> ProtocolId {
        self.clients[rank.index()].register(Arc::new(probe)).expect("the name is free")
    }

    /// Registers a protocol that records, on every rank; it must get the same number everywhere.
    pub fn record(&self, name: &str, log: &Log) -> ProtocolId {
        let ids: Vec<_> = self.ranks().map(|rank| self.register(rank, Probe::recording(name, log))).collect();
        assert!(ids.iter().all(|id| *id == ids[0]), "ranks register in the same order");
        ids[0]
    }

    /// Payload lengths at which something might change.
    pub fn sizes(&self) -> Vec<usize> {
        let Caps { max_inline: inline, max_eager: eager, .. } = self.caps();
        let mut sizes = vec![0, 1, 7, 8, 9, 16, 17, 64, inline - 1, inline, inline + 1];
        sizes.extend([eager - 1, eager, eager + 1, 3 * eager + 5]);
        sizes
    }

    /// Sends everything and steps until it is on its way.
    ///
    /// # Panics
    /// If a send fails.
    pub fn send_all(&mut self, outboxes: &mut [Outbox]) {
        self.until("everything is sent", |world| {
            outboxes.iter_mut().for_each(|outbox| outbox.pump(world));
            outboxes.iter().all(Outbox::is_done)
        });
        for outbox in outboxes {
            assert!(outbox.failed.is_empty(), "{:?} of {}", outbox.failed, outbox.from);
        }
    }

    /// Memory of `len` bytes on every rank, known to everybody.
    pub fn memory(&self, len: u64) -> Memory {
        let devices: Vec<_> = self.clients.iter().map(|client| client.devices()[0].clone()).collect();
        let allocations: Vec<_> =
            devices.iter().map(|device| device.allocate(len).expect("the segment has room")).collect();
        let mappable = self.caps().mappable;
        let mut memory = Memory { remote: Vec::new(), local: Vec::new(), slices: Vec::new(), len };
        for rank in self.ranks() {
            let device = &devices[rank.index()];
            let own =
                device.map(rank, allocations[rank.index()].offset, len).expect("a rank sees its own memory");
            assert!(own.to_vec().iter().all(|byte| *byte == 0), "memory starts as zero");
            let (remote, local) = self.enter(Endpoint::new(rank, ContextId(0)), |scope| {
                let remote: Vec<usize> = self
                    .ranks()
                    .map(|of| {
                        let offset = allocations[of.index()].offset;
                        let mapped = if mappable { device.map(of, offset, len) } else { None };
                        scope.table().remote.insert(RemoteMemory {
                            rank: of,
                            offset,
                            len,
                            mapped,
                            incarnation: 0,
                        })
                    })
                    .collect();
                (remote, scope.table().local.insert(own))
            });
            memory.remote.push(remote);
            memory.local.push(local);
            memory.slices.push(own);
        }
        memory
    }

    /// Starts a put or get between context 0 of two ranks.
    ///
    /// # Panics
    /// If it is refused.
    pub fn access(&self, memory: &Memory, from: Rank, to: Rank, offset: u64, rma: Rma<'_>) -> Option<Ticket> {
        let key = memory.remote[from.index()][to.index()];
        let started = self.enter(at(from), |scope| scope.rma(at(to), key, offset, rma));
        started.expect("in range and reachable")
    }

    /// Steps until an access has ended well.
    pub fn access_ends(&mut self, from: Rank, ticket: Option<Ticket>) -> Bytes {
        match ticket {
            Some(ticket) => self.outcome(at(from), ticket).expect("it succeeds").into_bytes(),
            None => Bytes::new(),
        }
    }
}

/// Context 0 of a rank.
pub(super) fn at(rank: Rank) -> Endpoint {
    Endpoint::new(rank, ContextId(0))
}

/// Memory on every rank.
#[derive(Debug)]
pub struct Memory {
    /// Keys in the source table of the first rank of the memory of the second.
    pub remote: Vec<Vec<usize>>,
    /// Keys of a rank's own memory as a local region.
    pub local: Vec<usize>,
    /// A rank's own memory.
    pub slices: Vec<SharedSlice>,
    /// Length in bytes.
    pub len: u64,
}

impl Memory {
    /// Bytes of a rank's memory, as it sees them.
    pub fn bytes(&self, rank: Rank, offset: u64, len: usize) -> Vec<u8> {
        self.slices[rank.index()].slice(offset, len as u64).expect("inside").to_vec()
    }

    /// Changes a rank's own memory.
    pub fn write(&self, rank: Rank, offset: u64, bytes: &[u8]) {
        self.slices[rank.index()].slice(offset, bytes.len() as u64).expect("inside").write(bytes);
    }
}

/// A message as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Where.
    pub at: Endpoint,
    /// From whom.
    pub source: Endpoint,
    /// The protocol's name.
    pub protocol: String,
    /// Message info.
    pub info: Vec<u8>,
    /// The payload.
    pub bytes: Vec<u8>,
}

/// What arrived, in order, on all ranks.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<Received>>>);

impl Log {
    /// Adds an entry.
    pub fn push(&self, received: Received) {
        self.0.lock().expect("no panic under this lock").push(received);
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.lock().expect("no panic under this lock").len()
    }

    /// Whether nothing arrived.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All entries.
    #[must_use]
    pub fn all(&self) -> Vec<Received> {
        self.0.lock().expect("no panic under this lock").clone()
    }

    /// The entries of one ordered pair.
    #[must_use]
    pub fn of(&self, source: Endpoint, at: Endpoint) -> Vec<Received> {
        self.all().into_iter().filter(|received| received.source == source && received.at == at).collect()
    }

    /// Checks one ordered pair against what was to be sent: each message once, in order, byte by byte.
    ///
    /// # Panics
    /// If it differs.
    pub fn check(&self, source: Endpoint, at: Endpoint, expected: &[Message]) {
        let got = self.of(source, at);
        for (number, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert_eq!(got.info, expected.info, "info of message {number} from {source} to {at}");
            assert_eq!(
                got.bytes.len(),
                expected.payload.len(),
                "length of message {number} from {source} to {at}"
            );
            assert!(got.bytes == expected.payload, "bytes of message {number} from {source} to {at}");
        }
        assert_eq!(got.len(), expected.len(), "messages from {source} to {at}");
    }
}

/// Copies a body.
pub(super) fn bytes_of(body: &Body<'_>) -> Vec<u8> {
    match body {
        Body::Short(bytes) => bytes.to_vec(),
        Body::Owned(bytes) => bytes.to_vec(),
        Body::Lease(lease) => lease.to_bytes().to_vec(),
    }
}

type OnMessage = Box<dyn Fn(&mut Scope<'_>, Incoming<'_>) + Send + Sync>;
type OnFirst = Box<dyn Fn(&mut Scope<'_>, &FirstPacket<'_>) -> Accept + Send + Sync>;

/// A protocol of a test.
pub struct Probe {
    name: String,
    schema: u64,
    flow: Flow,
    on_message: OnMessage,
    on_first: Option<OnFirst>,
    closed: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Probe {
    /// A protocol with that handler.
    pub fn new(
        name: &str,
        on_message: impl Fn(&mut Scope<'_>, Incoming<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.to_owned(),
            schema: 0,
            flow: Flow::Inline,
            on_message: Box::new(on_message),
            on_first: None,
            closed: Arc::default(),
        }
    }

    /// A protocol whose handler records.
    pub fn recording(name: &str, log: &Log) -> Self {
        let (log, protocol) = (log.clone(), name.to_owned());
        Self::new(name, move |scope, message| {
            log.push(Received {
                at: scope.me(),
                source: message.source,
                protocol: protocol.clone(),
                info: message.info.to_vec(),
                bytes: bytes_of(&message.body),
            });
        })
    }

    /// With that flow control.
    #[must_use]
    pub fn flow(mut self, flow: Flow) -> Self {
        self.flow = flow;
        self
    }

    /// With that type hash.
    #[must_use]
    pub fn schema(mut self, schema: u64) -> Self {
        self.schema = schema;
        self
    }

    /// With a first-packet handler.
    #[must_use]
    pub fn accept(
        mut self,
        on_first: impl Fn(&mut Scope<'_>, &FirstPacket<'_>) -> Accept + Send + Sync + 'static,
    ) -> Self {
        self.on_first = Some(Box::new(on_first));
        self
    }

    /// Counts the calls of `on_close`.
    #[must_use]
    pub fn closed(&self) -> Arc<AtomicUsize> {
        self.closed.clone()
    }
}

impl Protocol for Probe {
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> u64 {
        self.schema
    }

    fn flow(&self) -> Flow {
        self.flow
    }

    fn chooses_buffer(&self) -> bool {
        self.on_first.is_some()
    }

    fn accept(&self, scope: &mut Scope<'_>, first: &FirstPacket<'_>) -> Accept {
        match &self.on_first {
            Some(on_first) => on_first(scope, first),
            None => Accept::Whole,
        }
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        (self.on_message)(scope, message);
    }

    fn on_close(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }
}

/// A message to be sent.
#[derive(Clone, Debug)]
pub struct Message {
    /// Where to.
    pub target: Endpoint,
    /// In which protocol.
    pub protocol: ProtocolId,
    /// Message info.
    pub info: Vec<u8>,
    /// The payload.
    pub payload: Vec<u8>,
    /// Hand the payload over instead of lending it.
    pub owned: bool,
    /// An answer is wanted.
    pub request: bool,
}

impl Message {
    /// A message without info.
    #[must_use]
    pub fn new(target: Rank, protocol: ProtocolId, payload: impl Into<Vec<u8>>) -> Self {
        let (target, payload) = (at(target), payload.into());
        Self { target, protocol, info: Vec::new(), payload, owned: false, request: false }
    }

    /// The same as a request.
    #[must_use]
    pub fn request(mut self) -> Self {
        self.request = true;
        self
    }

    /// With that info.
    #[must_use]
    pub fn info(mut self, info: impl Into<Vec<u8>>) -> Self {
        self.info = info.into();
        self
    }

    /// With bytes of its own: they follow from the sender, the number and the lengths.
    #[must_use]
    pub fn filled(
        from: Endpoint,
        target: Endpoint,
        protocol: ProtocolId,
        number: usize,
        info: usize,
        len: usize,
    ) -> Self {
        let name = (u64::from(from.rank.0) << 48)
            ^ (u64::from(from.context.0) << 40)
            ^ (u64::from(target.rank.0) << 32)
            ^ (u64::from(target.context.0) << 24)
            ^ number as u64;
        let mut random = Random::new(name);
        let (info, payload) = (random.bytes(info), random.bytes(len));
        Self { target, protocol, info, payload, owned: number.is_multiple_of(2), request: false }
    }
}

/// Sends messages one after the other, as one task does that awaits each.
#[derive(Debug)]
pub struct Outbox {
    /// Who sends.
    pub from: Endpoint,
    /// What is not on its way yet.
    pub queue: VecDeque<Message>,
    /// Sends and requests that failed.
    pub failed: Vec<SendError>,
    /// How the requests ended, by their number in this outbox.
    pub answers: BTreeMap<usize, Outcome>,
    waiting: Option<(Ticket, Wait)>,
    cookie: Option<Ticket>,
    queued: Vec<Ticket>,
    asked: Vec<(usize, Ticket)>,
    sent: usize,
}

impl Outbox {
    /// An outbox of messages.
    #[must_use]
    pub fn new(from: Endpoint, messages: impl IntoIterator<Item = Message>) -> Self {
        Self {
            from,
            queue: messages.into_iter().collect(),
            failed: Vec::new(),
            answers: BTreeMap::new(),
            waiting: None,
            cookie: None,
            queued: Vec::new(),
            asked: Vec::new(),
            sent: 0,
        }
    }

    /// Whether everything is on its way and every request has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.queue.is_empty() && self.queued.is_empty() && self.asked.is_empty()
    }

    /// Whether the sender has to wait at the moment.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Messages that are in the injection FIFO.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Goes on as far as possible.
    pub fn pump<H: Harness>(&mut self, world: &World<H>) {
        let slots = world.handle(self.from).slots();
        let failed = &mut self.failed;
        self.queued.retain(|ticket| match slots.take(*ticket) {
            Some(Err(fault)) => {
                failed.push(fault.into());
                false
            }
            outcome => outcome.is_none(),
        });
        let answers = &mut self.answers;
        self.asked.retain(|(number, ticket)| match slots.take(*ticket) {
            Some(outcome) => {
                answers.insert(*number, outcome);
                false
            }
            None => true,
        });
        while self.send_next(world) {}
    }

    fn send_next<H: Harness>(&mut self, world: &World<H>) -> bool {
        let slots = world.handle(self.from).slots();
        let mut wait = Wait::Await;
        if let Some((ticket, granted)) = self.waiting {
            match slots.take(ticket) {
                None => return false,
                Some(Ok(_)) => wait = granted,
                Some(Err(fault)) => {
                    self.waiting = None;
                    self.ended(world, fault.into());
                    return true;
                }
            }
            self.waiting = None;
        }
        let Some(message) = self.queue.front() else { return false };
        let cookie = &mut self.cookie;
        let sent = world.enter(self.from, |scope| {
            if message.request && cookie.is_none() {
                let ticket = scope.operation(Some(message.target.rank))?;
                scope.note_request(ticket, message.protocol, message.payload.len());
                *cookie = Some(ticket);
            }
            let args = SendArgs {
                target: message.target,
                protocol: message.protocol,
                cookie: cookie.map_or(0, Ticket::to_word),
                info: &message.info,
                relaxed: false,
            };
            let payload = if message.owned {
                Payload::Owned(Bytes::from(message.payload.clone()))
            } else {
                Payload::Borrowed(&message.payload)
            };
            match scope.send(&args, payload, wait) {
                Ok(Sent::Done) => Ok(None),
                Ok(Sent::Queued(ticket)) => Ok(Some((ticket, None))),
                Ok(Sent::Later(ticket, wait, payload)) => {
                    assert_eq!(payload.len(), message.payload.len(), "the payload comes back");
                    Ok(Some((ticket, Some(wait))))
                }
                Ok(Sent::Full(_)) => panic!("who awaits is not told Full"),
                Err((error, payload)) => {
                    assert_eq!(payload.bytes_of(), message.payload, "the payload comes back");
                    Err(error)
                }
            }
        });
        match sent {
            Ok(Some((ticket, Some(wait)))) => {
                self.waiting = Some((ticket, wait));
                return false;
            }
            Ok(Some((ticket, None))) => self.queued.push(ticket),
            Ok(None) => {}
            Err(error) => {
                self.ended(world, error);
                return true;
            }
        }
        self.queue.pop_front();
        if let Some(ticket) = self.cookie.take() {
            self.asked.push((self.sent, ticket));
        }
        self.sent += 1;
        true
    }

    /// The message at the front failed.
    fn ended<H: Harness>(&mut self, world: &World<H>, error: SendError) {
        self.queue.pop_front();
        if let Some(ticket) = self.cookie.take() {
            // It may have ended already, with its peer.
            world.enter(self.from, |scope| scope.complete(ticket, Err(Fault::Shutdown)));
            world.handle(self.from).slots().detach(ticket);
        }
        self.sent += 1;
        self.failed.push(error);
    }
}
