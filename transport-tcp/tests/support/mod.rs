//! Ranks over TCP in one process, advanced in turn.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod job;
pub mod near;

use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::{Fabric, InProcessFabric, Limits as FabricLimits};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Client, ClientId, Device, JobShape, LinuxSysdep, Messager, Rank};
use posthaste_tcp::{AddressBook, JobKey, Limits, Memory, Mode, TcpConfig, TcpDevice};
use posthaste_testkit::conformance::{Harness, Setup, describe, tell};
use posthaste_testkit::sim::open_without_driver;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The configuration of a rank in tests.
pub fn config(rank: Rank, shape: JobShape, mode: Mode, limits: Limits) -> TcpConfig {
    let mut config = TcpConfig::new(rank, shape, *b"a job of a test.", JobKey::new([42; 32])).mode(mode);
    config.limits = limits;
    config.memory = Memory::Own(1 << 20);
    config
}

pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A client over a device.
pub fn client(device: Arc<TcpDevice>, rank: Rank, shape: JobShape, config: EngineConfig) -> Arc<Client> {
    client_of(vec![device], rank, shape, config)
}

/// A client over several devices.
fn client_of(
    devices: Vec<Arc<dyn Device>>,
    rank: Rank,
    shape: JobShape,
    config: EngineConfig,
) -> Arc<Client> {
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices,
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, shape), None)),
        config,
        spin: Some(Duration::ZERO),
        driver_thread: false,
    });
    Arc::new(client.expect("the device makes its ports"))
}

pub struct TcpHarness {
    mode: Mode,
    limits: Limits,
    config: EngineConfig,
    clients: Vec<Arc<Client>>,
    devices: Vec<Arc<TcpDevice>>,
    dead: BTreeSet<Rank>,
    runtime: Option<Runtime>,
    /// Ranks of one parity are near each other, and reach each other in another way.
    mixed: bool,
    fabric: Option<Arc<Fabric>>,
}

impl TcpHarness {
    pub fn new(mode: Mode, limits: Limits, config: EngineConfig) -> Self {
        Self {
            mode,
            limits,
            config,
            clients: Vec::new(),
            devices: Vec::new(),
            dead: BTreeSet::new(),
            runtime: None,
            mixed: false,
            fabric: None,
        }
    }

    /// Ranks of one parity reach each other, and themselves, through the in-process device.
    pub fn mixed(mut self) -> Self {
        self.mixed = true;
        self
    }
}

impl Harness for TcpHarness {
    fn start(&mut self, setup: &Setup) -> Vec<Arc<Client>> {
        let runtime = runtime();
        let inside = runtime.enter();
        let shape = JobShape { ranks: setup.ranks, clients: 1, contexts: setup.contexts };
        let book = Arc::new(AddressBook::new(setup.ranks));
        if self.mixed {
            let limits = FabricLimits {
                packets_per_pair: 4,
                max_inline: 100,
                max_eager: 1000,
                fragment: 300,
                segment: 1 << 20,
            };
            self.fabric = Some(InProcessFabric::with_limits(shape, limits));
        }
        for rank in (0..setup.ranks).map(Rank) {
            let mut config = config(rank, shape, self.mode, self.limits);
            let near = self.fabric.as_ref().map(|fabric| near::near(fabric.device(ClientId(0), rank), rank));
            if let Some(near) = &near {
                config.memory = Memory::Of(near.clone());
            }
            let device = Arc::new(TcpDevice::new(config, book.clone()).expect("a free port"));
            let devices = near.into_iter().chain([device.clone() as Arc<dyn Device>]).collect();
            let client = client_of(devices, rank, shape, setup.config);
            open_without_driver(&client);
            self.clients.push(client);
            self.devices.push(device);
        }
        drop(inside);
        self.runtime = Some(runtime);
        self.clients.clone()
    }

    fn step(&mut self, paused: &BTreeSet<Rank>) {
        let mut events = 0;
        for (rank, client) in self.clients.iter().enumerate() {
            let rank = Rank(rank as u32);
            if !paused.contains(&rank) && !self.dead.contains(&rank) {
                events += client.advance();
            }
        }
        if let Some(runtime) = &self.runtime {
            runtime.block_on(tokio::task::yield_now());
        }
        if events == 0 {
            // Packets and tasks need a moment.
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn kill(&mut self, rank: Rank) {
        if !self.dead.insert(rank) {
            return;
        }
        self.devices[rank.index()].abort();
        if let Some(fabric) = &self.fabric {
            fabric.kill(rank);
        }
        for (client, device) in self.clients.iter().zip(&self.devices) {
            // Who has never had a connection with the rank is told by the launcher.
            if !device.has_met(rank) {
                tell(client, rank);
            }
        }
    }

    fn describe(&self) -> String {
        describe(&self.clients)
    }

    fn config(&self) -> EngineConfig {
        self.config
    }

    fn patience(&self) -> u64 {
        200_000
    }

    fn a_while(&self) -> u64 {
        60
    }
}
