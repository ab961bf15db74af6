//! What the unit tests here stand on: a client without others, and a waker that counts.

use bytes::Bytes;
use posthaste_core::budget;
use posthaste_core::context::Face;
use posthaste_core::device::Body;
use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::messager::ClientParts;
use posthaste_core::protocol::{Incoming, Protocol};
use posthaste_core::slot::Outcome;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, Endpoint, Fault, Handle, JobShape, LinuxSysdep, Messager, ProtocolId, Rank, Ticket,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake};
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
    client_of(JobShape { ranks, clients: 1, contexts }, ClientId(0))
}

/// The same of any client.
pub(crate) fn client_of(shape: JobShape, id: ClientId) -> Client {
    let fabric = InProcessFabric::new(shape);
    let client = Client::new(ClientParts {
        id,
        devices: vec![fabric.device(id, Rank(0))],
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
        config: EngineConfig::default(),
        spin: Some(Duration::ZERO),
        driver_thread: false,
    });
    client.expect("the ports are made")
}

/// Has a protocol hear some bytes at a context, as if that endpoint had sent them; what the client thinks of the sender then.
pub(crate) fn hears(
    client: &Client,
    at: usize,
    source: Endpoint,
    protocol: &dyn Protocol,
    bytes: &Bytes,
) -> Option<Fault> {
    let heard = client.contexts()[at].enter(|engine| {
        let mut scope = engine.scope();
        let (body, id) = (Body::Owned(bytes), ProtocolId(16));
        let message = Incoming { source, info: &[], body, protocol: id, life: 0, cookie: 0 };
        protocol.on_message(&mut scope, message);
        scope.fault_of(source.rank)
    });
    heard.unwrap_or_else(|_| unreachable!("nobody else is there"))
}

/// An operation that was begun, and has ended if it has an outcome.
pub(crate) fn operation(handle: &Handle, outcome: Option<Outcome>) -> Ticket {
    let begun = handle.enter(|engine| {
        let ticket = engine.scope().operation(None).expect("it is open");
        if let Some(outcome) = outcome {
            assert!(engine.scope().complete(ticket, outcome));
        }
        ticket
    });
    begun.unwrap_or_else(|_| unreachable!("nobody else is there"))
}

/// In a task that has used up its turn.
pub(crate) fn without_a_turn(f: impl FnOnce(&mut Context<'_>)) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let mut f = Some(f);
    runtime.block_on(std::future::poll_fn(|cx| {
        while budget::proceed(cx).is_ready() {
            budget::spend(budget::UNIT);
        }
        f.take().expect("polled once")(cx);
        Poll::Ready(())
    }));
}
