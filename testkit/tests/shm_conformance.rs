//! The conformance suite over shared memory: several ranks of one arena in one process, advanced in turn. And what holds of its
//! pages alone.

use posthaste_core::engine::{EngineConfig, Payload, SendArgs, Sent, Wait};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, ContextId, Endpoint, JobShape, LinuxSysdep, Messager, ProtocolId, Rank, Sysdep,
};
use posthaste_launch::HostFds;
use posthaste_shm::{Host, HostResources, Layout, Sizes};
use posthaste_testkit::conformance::{Harness, Log, Probe, Setup, World, describe, tell};
use posthaste_testkit::conformance_suite;
use posthaste_testkit::sim::open_without_driver;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

struct ShmHarness {
    sizes: Sizes,
    config: EngineConfig,
    clients: Vec<Arc<Client>>,
    dead: BTreeSet<Rank>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl ShmHarness {
    fn new(lane: u64, config: EngineConfig) -> Self {
        // The longest message follows from the pool: a quarter of it goes in one piece.
        let sizes = Sizes { lane, pool: 1 << 20, segment: 16 << 20 };
        Self { sizes, config, clients: Vec::new(), dead: BTreeSet::new(), runtime: None }
    }
}

impl Harness for ShmHarness {
    fn start(&mut self, setup: &Setup) -> Vec<Arc<Client>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let inside = runtime.enter();
        let shape = JobShape { ranks: setup.ranks, clients: 1, contexts: setup.contexts };
        let bytes = Layout::new(shape, self.sizes).expect("a layout").total();
        let mut fds = HostFds::new(setup.ranks, bytes).expect("an arena and pipes");
        for rank in (0..setup.ranks).map(Rank) {
            let own = fds.local(rank.0).expect("the rank's descriptors");
            let sysdep: Arc<dyn Sysdep> =
                Arc::new(LinuxSysdep::new(Personality::one_node(rank, shape), None));
            let resources =
                HostResources { arena: own.arena, bell: own.bell, ring: own.ring, memory_limit: None };
            let host = Host::new(resources, self.sizes, sysdep.clone()).expect("the arena is mapped");
            let client = Client::new(ClientParts {
                id: ClientId(0),
                devices: vec![host.device(ClientId(0))],
                sysdep,
                config: setup.config,
                spin: Some(Duration::ZERO),
                driver_thread: false,
            })
            .expect("the device makes its ports");
            open_without_driver(&client);
            self.clients.push(Arc::new(client));
        }
        drop(inside);
        self.runtime = Some(runtime);
        self.clients.clone()
    }

    fn step(&mut self, paused: &BTreeSet<Rank>) {
        for (rank, client) in self.clients.iter().enumerate() {
            let rank = Rank(rank as u32);
            if !paused.contains(&rank) && !self.dead.contains(&rank) {
                client.advance();
            }
        }
    }

    fn kill(&mut self, rank: Rank) {
        // Real deaths, of processes, are the business of the fault tests; here the others are only told.
        if !self.dead.insert(rank) {
            return;
        }
        self.clients.iter().for_each(|client| tell(client, rank));
    }

    fn describe(&self) -> String {
        describe(&self.clients)
    }

    fn config(&self) -> EngineConfig {
        self.config
    }

    fn patience(&self) -> u64 {
        50_000
    }

    fn a_while(&self) -> u64 {
        50
    }
}

conformance_suite!(mod shared_memory, seeds 0..1, |_| ShmHarness::new(16 << 10, EngineConfig::default()));
// The smallest ring holds one record of the longest kind, or a few of the shortest.
conformance_suite!(mod shared_memory_tiny, seeds 0..1, |_| ShmHarness::new(
    1024,
    EngineConfig { credits: 1, ..EngineConfig::default() }
));
conformance_suite!(mod shared_memory_over_send, seeds 0..1, |_| ShmHarness::new(
    16 << 10,
    EngineConfig { oversend: true, ..EngineConfig::default() }
));
conformance_suite!(mod shared_memory_over_send_tiny, seeds 0..1, |_| ShmHarness::new(
    1024,
    EngineConfig { credits: 1, oversend: true, get_window: 1000, ..EngineConfig::default() }
));
conformance_suite!(mod shared_memory_rendezvous, seeds 0..1, |_| ShmHarness::new(
    16 << 10,
    EngineConfig { rendezvous_bytes: Some(5000), ..EngineConfig::default() }
));
conformance_suite!(mod shared_memory_rendezvous_over_send_tiny, seeds 0..1, |_| ShmHarness::new(
    1024,
    EngineConfig { credits: 1, oversend: true, rendezvous_bytes: Some(100), ..EngineConfig::default() }
));

fn to(rank: Rank, protocol: ProtocolId) -> SendArgs<'static> {
    let target = Endpoint::new(rank, ContextId(0));
    SendArgs { target, protocol, cookie: 0, info: &[], relaxed: false }
}

/// More of them than the pool has pages for, were each as far behind as one alone may be.
#[test]
fn those_who_are_slow_leave_pages_for_others() {
    const SLOW: u32 = 40;
    let mut harness = ShmHarness::new(16 << 10, EngineConfig::default());
    harness.sizes.pool = 64 << 20;
    let mut world = World::new(harness, SLOW + 2);
    let log = Log::default();
    let protocol = world.record("message", &log);
    let (from, fast) = (Endpoint::new(Rank(0), ContextId(0)), Rank(SLOW + 1));
    let slow = (1..=SLOW).map(Rank);
    slow.clone().for_each(|rank| world.pause(rank));
    let large = vec![1; 256 << 10];
    let mut sent = 0;
    for rank in slow.clone() {
        let at_once = || {
            let payload = Payload::Borrowed(&large);
            let tried = world.enter(from, |scope| scope.send(&to(rank, protocol), payload, Wait::Never));
            matches!(tried, Ok(Sent::Done))
        };
        while at_once() {
            sent += 1;
        }
    }
    assert!(sent > 2 * SLOW, "each has its share: {sent}");
    let small = Payload::Borrowed(&[7; 4096]);
    let given = world.enter(from, |scope| scope.give(&to(fast, protocol), small)).expect("all are there");
    // It goes in its time.
    let _ticket = given.leave();
    world.until("the message arrives", |_| log.len() == 1);
    slow.for_each(|rank| world.resume(rank));
    world.until("all arrive", |_| log.len() == 1 + sent as usize);
}

/// Of pages that hold a few bytes their numbers are what runs out.
#[test]
fn short_loans_that_are_kept_stop_no_lane() {
    const LOANS: usize = 3000;
    for lane in [16 << 10, 256 << 10] {
        let mut harness = ShmHarness::new(lane, EngineConfig::default());
        harness.sizes.pool = 256 << 20;
        let mut world = World::new(harness, 2);
        let kept = Arc::new(Mutex::new(Vec::new()));
        let protocol = [0, 1].map(|rank| {
            let kept = kept.clone();
            let keep = Probe::new("keep", move |_, message| kept.lock().unwrap().push(message.body.keep()));
            world.register(Rank(rank), keep)
        })[0];
        let from = Endpoint::new(Rank(0), ContextId(0));
        for _ in 0..LOANS {
            let given = world.enter(from, |scope| {
                let loan = scope.loan(8).expect("a page");
                scope.give(&to(Rank(1), protocol), Payload::Loan(loan)).expect("the peer is there")
            });
            // It goes in its time.
            let _ticket = given.leave();
            world.step();
        }
        world.until("all loans arrive", |_| kept.lock().unwrap().len() == LOANS);
    }
}
