//! Harnesses over the in-process device and over the simulated world.

use super::{Harness, Setup};
use crate::sim::{Ration, SimOptions, SimWorld, open_without_driver};
use posthaste_core::device::PeerEvent;
use posthaste_core::engine::{EngineConfig, Work};
use posthaste_core::inprocess::{Fabric, InProcessFabric, Limits};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Client, ClientId, Fault, JobShape, LinuxSysdep, Messager, Rank};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Ranks over the in-process device, advanced in turn.
#[derive(Debug)]
pub struct InProcessHarness {
    limits: Limits,
    config: EngineConfig,
    fabric: Option<Arc<Fabric>>,
    clients: Vec<Arc<Client>>,
}

impl InProcessHarness {
    /// With these sizes.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let limits = Limits { segment: 1 << 20, ..limits };
        Self { limits, config: EngineConfig::default(), fabric: None, clients: Vec::new() }
    }

    /// With these settings for tests that need no others.
    #[must_use]
    pub fn with_config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self
    }
}

impl Harness for InProcessHarness {
    fn start(&mut self, setup: &Setup) -> Vec<Arc<Client>> {
        let shape = JobShape { ranks: setup.ranks, clients: 1, contexts: setup.contexts };
        let fabric = InProcessFabric::with_limits(shape, self.limits);
        for rank in (0..setup.ranks).map(Rank) {
            let client = Client::new(ClientParts {
                id: ClientId(0),
                devices: vec![fabric.device(ClientId(0), rank)],
                sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, shape), None)),
                config: setup.config,
                spin: Some(Duration::ZERO),
                driver_thread: false,
            })
            .expect("an in-process device makes its ports");
            open_without_driver(&client);
            self.clients.push(Arc::new(client));
        }
        self.fabric = Some(fabric);
        self.clients.clone()
    }

    fn step(&mut self, paused: &BTreeSet<Rank>) {
        for (rank, client) in self.clients.iter().enumerate() {
            if !paused.contains(&Rank(rank as u32)) {
                client.advance();
            }
        }
    }

    fn kill(&mut self, rank: Rank) {
        if let Some(fabric) = &self.fabric {
            fabric.kill(rank);
        }
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

/// What the contexts of all clients have done, for [`Harness::describe`].
#[must_use]
pub fn describe(clients: &[Arc<Client>]) -> String {
    let contexts = clients.iter().flat_map(|client| client.contexts());
    contexts.map(|context| format!("  {}: {:?}\n", context.me(), context.stats())).collect()
}

/// Tells a client of a death, as a device does that has seen it.
pub fn tell(client: &Client, dead: Rank) {
    for context in client.contexts().iter().filter(|context| context.me().rank != dead) {
        context.post_work(Work::Peer(dead, PeerEvent::down(Fault::PeerLost(dead))));
    }
}

/// Ranks in a simulated world.
#[derive(Debug)]
pub struct SimHarness {
    seed: u64,
    options: SimOptions,
    config: EngineConfig,
    world: Option<SimWorld>,
}

impl SimHarness {
    /// The world of that seed.
    #[must_use]
    pub fn new(seed: u64, options: SimOptions) -> Self {
        Self { seed, options, config: EngineConfig::default(), world: None }
    }

    /// With these settings for tests that need no others.
    #[must_use]
    pub fn with_config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self
    }

    /// How much memory the rank has for what it sends from now on.
    ///
    /// # Panics
    /// If no world was started.
    pub fn ration(&self, rank: Rank, ration: Ration) {
        let world = self.world.as_ref().expect("a world was started");
        world.fabric().ration(rank, ration);
    }
}

impl Harness for SimHarness {
    fn start(&mut self, setup: &Setup) -> Vec<Arc<Client>> {
        let shape = JobShape { ranks: setup.ranks, clients: 1, contexts: setup.contexts };
        let world = SimWorld::new(shape, self.seed, self.options, setup.config);
        let clients = world.clients().to_vec();
        self.world = Some(world);
        clients
    }

    fn step(&mut self, paused: &BTreeSet<Rank>) {
        let Some(world) = &mut self.world else { return };
        for rank in (0..world.clients().len() as u32).map(Rank) {
            if paused.contains(&rank) {
                world.pause(rank);
            } else {
                world.resume(rank);
            }
        }
        world.step();
    }

    fn kill(&mut self, rank: Rank) {
        if let Some(world) = &mut self.world {
            world.kill(rank);
        }
    }

    fn describe(&self) -> String {
        self.world.as_ref().map_or_else(String::new, SimWorld::describe)
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn config(&self) -> EngineConfig {
        self.config
    }
}
