//! The ranks of a job as tasks of one process, over the in-process device.

use futures::future::join_all;
use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::{Fabric, InProcessFabric, Limits};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
use posthaste_protocols::{Collectives, Exchange, LayoutAccess};
use std::sync::Arc;
use std::time::Duration;

/// A rank of a job.
pub struct Member {
    pub rank: Rank,
    pub client: Arc<Client>,
    pub collectives: Collectives,
    #[allow(dead_code, reason = "only some open regions")]
    pub layouts: LayoutAccess,
    pub fabric: Arc<Fabric>,
}

/// How a job is made.
#[derive(Clone)]
pub struct Setup {
    pub limits: Limits,
    pub config: EngineConfig,
    pub nodes: Vec<u32>,
}

impl Setup {
    pub fn new() -> Self {
        Self { limits: Limits::default(), config: EngineConfig::default(), nodes: Vec::new() }
    }

    /// Little room everywhere.
    pub fn tiny() -> Self {
        let limits = Limits {
            packets_per_pair: 2,
            max_inline: 80,
            max_eager: 256,
            fragment: 200,
            ..Limits::default()
        };
        let config = EngineConfig { fifo_slots: 4, ..EngineConfig::default() };
        Self { limits, config, nodes: Vec::new() }
    }
}

/// Runs the body for every rank of a job, all on one thread, and fails if it takes absurdly long.
pub fn run<B: AsyncFn(Member)>(ranks: u32, setup: Setup, body: B) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let shape = JobShape { ranks, clients: 1, contexts: 1 };
        let fabric = InProcessFabric::with_limits(shape, setup.limits);
        let mut members = Vec::new();
        for rank in (0..ranks).map(Rank) {
            let client = Client::new(ClientParts {
                id: ClientId(0),
                devices: vec![fabric.device(ClientId(0), rank)],
                sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, shape), None)),
                config: setup.config,
                spin: Some(Duration::ZERO),
                driver_thread: false,
            })
            .expect("the ports are made");
            let (exchange, layouts) = (Exchange::new(&client), LayoutAccess::new(&client));
            let (exchange, layouts) =
                (exchange.expect("the name is free"), layouts.expect("the name is free"));
            let collectives = Collectives::new(&client, &setup.nodes).expect("the name is free");
            let collectives = collectives.with_windows(&client, &exchange, &layouts).expect("a device");
            client.open().await.expect("the device opens");
            let (client, fabric) = (Arc::new(client), fabric.clone());
            members.push(Member { rank, client, collectives, layouts, fabric });
        }
        let hubs: Vec<_> = members.iter().map(|member| member.collectives.clone()).collect();
        let clients: Vec<_> = members.iter().map(|member| member.client.clone()).collect();
        let all = join_all(members.into_iter().map(|member| body(member)));
        if tokio::time::timeout(Duration::from_secs(220), all).await.is_err() {
            hubs.iter().for_each(|hub| eprintln!("{hub:?}"));
            panic!("some rank does not end");
        }
        for client in clients {
            client.close().await;
        }
    });
}

/// A repeatable sequence of numbers (SplitMix64, Steele et al. 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Values that follow from their seed and the rank that has them.
pub fn values(seed: u64, rank: usize, len: usize) -> Vec<u64> {
    let mut random = Random(seed.wrapping_mul(1000).wrapping_add(rank as u64));
    (0..len).map(|_| random.next()).collect()
}
