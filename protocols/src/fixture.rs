//! What the unit tests here stand on: a client without others, and a waker that counts.

use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Rank};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;
use std::time::Duration;

#[derive(Default)]
pub(crate) struct Wakes(AtomicUsize);

impl Wakes {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Rank 0 of a job of which nobody else has come.
pub(crate) fn first_of(ranks: u32, contexts: u16) -> Client {
    let shape = JobShape { ranks, clients: 1, contexts };
    let fabric = InProcessFabric::new(shape);
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: vec![fabric.device(ClientId(0), Rank(0))],
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
        config: EngineConfig::default(),
        spin: Some(Duration::ZERO),
        driver_thread: false,
    });
    client.expect("the ports are made")
}
