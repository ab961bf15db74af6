//! The world of a test: the ranks of a job in one process, their memory, and time that passes step by step.

use super::{Harness, Log, Outbox, Probe, Setup};
use crate::random::Random;
use bytes::Bytes;
use posthaste_core::context::{Face, Handle};
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::device::RemoteMemory;
use posthaste_core::engine::{Rma, Scope};
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Outcome;
use posthaste_core::wire::FIRST_USER;
use posthaste_core::{
    Caps, Client, ContextId, Descriptor, Endpoint, Fault, Messager, ProtocolId, Rank, Ticket,
};
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
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

    /// What the world is made of.
    pub fn harness(&self) -> &H {
        &self.harness
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

    /// The number of the completion slot that the next operation of an endpoint takes.
    pub fn first_free_slot(&self, endpoint: Endpoint) -> u32 {
        self.enter(endpoint, |scope| {
            let ticket = scope.operation(None).expect("it is open");
            scope.complete(ticket, Ok(posthaste_core::Value::Unit));
            scope.detach(ticket);
            ticket.to_word() as u32
        })
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

    /// A put of the first rank's memory to be recorded.
    pub fn recorded_put(&self, to: Rank, from_offset: u64, to_offset: u64, len: u64) -> Descriptor {
        Descriptor {
            op: Op::Put,
            source_kind: SourceKind::Region,
            rank: to,
            region: self.remote[0][to.index()] as u32,
            offset: to_offset,
            len,
            source: [self.local[0] as u64, from_offset],
            ..Descriptor::default()
        }
    }

    /// A send of the first rank's memory to be recorded.
    pub fn recorded_send(&self, to: Rank, protocol: ProtocolId, from_offset: u64, len: u64) -> Descriptor {
        Descriptor {
            op: Op::Send,
            source_kind: SourceKind::Region,
            rank: to,
            protocol: ProtocolId(FIRST_USER + protocol.0),
            len,
            source: [self.local[0] as u64, from_offset],
            ..Descriptor::default()
        }
    }

    /// Changes a rank's own memory.
    pub fn write(&self, rank: Rank, offset: u64, bytes: &[u8]) {
        self.slices[rank.index()].slice(offset, bytes.len() as u64).expect("inside").write(bytes);
    }
}
