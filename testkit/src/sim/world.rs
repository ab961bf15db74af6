//! The stepper: one thread that lets a simulated world happen.

use super::{SimFabric, SimOptions};
use futures::FutureExt;
use posthaste_core::Face;
use posthaste_core::engine::EngineConfig;
use posthaste_core::messager::ClientParts;
use posthaste_core::{Client, ClientId, JobShape, Messager, Rank};
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Opens a client's device so that its contexts are told of lost peers, but starts no driver: the caller advances.
///
/// # Panics
/// If the device cannot be opened, or has to wait for that.
pub fn open_without_driver(client: &Client) {
    let opened = client.open_devices().now_or_never();
    opened.expect("opening takes no time").expect("the devices open");
}

/// A simulated job with one client per rank.
pub struct SimWorld {
    fabric: Arc<SimFabric>,
    clients: Vec<Arc<Client>>,
    paused: BTreeSet<Rank>,
    stalled: Vec<u64>,
    crashes: Vec<(Rank, u64)>,
    steps: u64,
}

impl std::fmt::Debug for SimWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl SimWorld {
    /// A world in which nothing has happened yet.
    ///
    /// # Panics
    /// If the job has more than one client per rank.
    #[must_use]
    pub fn new(shape: JobShape, seed: u64, options: SimOptions, config: EngineConfig) -> Self {
        assert_eq!(shape.clients, 1, "a simulated world has one client per rank");
        let fabric = SimFabric::new(shape, seed, options);
        let clients = (0..shape.ranks).map(|rank| client_of(&fabric, Rank(rank), config)).collect();
        let stalled = vec![0; shape.ranks as usize];
        Self { fabric, clients, paused: BTreeSet::new(), stalled, crashes: Vec::new(), steps: 0 }
    }

    /// Starts a rank again that was killed; its client is another one from now on.
    pub fn restart(&mut self, rank: Rank, config: EngineConfig) {
        self.fabric.restart(rank);
        self.clients[rank.index()] = client_of(&self.fabric, rank, config);
        self.paused.remove(&rank);
    }

    /// The ranks' clients, by rank.
    #[must_use]
    pub fn clients(&self) -> &[Arc<Client>] {
        &self.clients
    }

    /// The network.
    #[must_use]
    pub fn fabric(&self) -> &Arc<SimFabric> {
        &self.fabric
    }

    /// The rank does not advance until it is resumed.
    pub fn pause(&mut self, rank: Rank) {
        self.paused.insert(rank);
    }

    /// The rank advances again.
    pub fn resume(&mut self, rank: Rank) {
        self.paused.remove(&rank);
    }

    /// Crashes the rank now.
    pub fn kill(&mut self, rank: Rank) {
        self.fabric.kill(rank);
        self.paused.insert(rank);
    }

    /// Crashes the rank at that step.
    pub fn kill_at(&mut self, rank: Rank, step: u64) {
        self.crashes.push((rank, step));
    }

    /// Steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Lets one thing happen, chosen by the seed.
    pub fn step(&mut self) {
        self.steps += 1;
        while let Some(at) = self.crashes.iter().position(|&(_, step)| step <= self.steps) {
            let (rank, _) = self.crashes.swap_remove(at);
            self.kill(rank);
        }
        match self.fabric.random_below(100) {
            0..=49 => self.advance_one(),
            50..=95 => {
                if !self.fabric.move_one() {
                    self.advance_one();
                }
            }
            _ => {
                let time = self.fabric.random_below(2000);
                self.fabric.pass_time(Duration::from_micros(time as u64));
            }
        }
    }

    fn advance_one(&mut self) {
        let ranks: Vec<usize> = (0..self.clients.len())
            .filter(|&rank| !self.paused.contains(&Rank(rank as u32)) && self.stalled[rank] <= self.steps)
            .collect();
        if ranks.is_empty() {
            return;
        }
        let rank = ranks[self.fabric.random_below(ranks.len())];
        let stalls = self.fabric.net().random.chance(self.fabric.options.stall);
        if stalls {
            self.stalled[rank] = self.steps + self.fabric.random_below(200) as u64;
            return;
        }
        let client = &self.clients[rank];
        client.advance();
        // As drivers do, which nobody started here.
        for context in client.contexts() {
            let now = context.now_ms();
            let _others_turn = context.enter(|engine| engine.expire(now));
        }
    }

    /// Steps until the condition holds.
    ///
    /// # Panics
    /// If it does not hold after `max_steps` steps; the message has the seed and everybody's state.
    pub fn run_until(&mut self, mut condition: impl FnMut(&mut SimWorld) -> bool, max_steps: u64) {
        for _ in 0..max_steps {
            if condition(self) {
                return;
            }
            self.step();
        }
        assert!(condition(self), "not finished after {max_steps} steps\n{}", self.describe());
    }

    /// Steps until the future is ready. It is polled after every step.
    ///
    /// # Panics
    /// If it is not ready after `max_steps` steps.
    pub fn run<F: Future>(&mut self, future: F, max_steps: u64) -> F::Output {
        let mut future = pin!(future);
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..max_steps {
            if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                return output;
            }
            self.step();
        }
        panic!("the future is not ready after {max_steps} steps\n{}", self.describe());
    }

    /// The seed, what is in flight, and what each rank has done.
    #[must_use]
    pub fn describe(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("step {}, paused {:?}, {}", self.steps, self.paused, self.fabric.describe());
        for client in &self.clients {
            for context in client.contexts() {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "  {}: {:?}", context.me(), context.stats());
            }
        }
        text
    }
}

impl Drop for SimWorld {
    fn drop(&mut self) {
        // Whom the network tells of peers has a device of that network.
        let told = std::mem::take(&mut self.fabric.net().watchers);
        drop(told);
    }
}

/// A rank as it is started.
fn client_of(fabric: &Arc<SimFabric>, rank: Rank, config: EngineConfig) -> Arc<Client> {
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: vec![fabric.device(ClientId(0), rank)],
        sysdep: fabric.sysdep(rank),
        config,
        spin: Some(Duration::ZERO),
        driver_thread: false,
    })
    .expect("a simulated device makes its ports");
    open_without_driver(&client);
    Arc::new(client)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Log, Probe};
    use posthaste_core::context::{Face, poll_ticket};
    use posthaste_core::engine::{Given, Payload, SendArgs, Sent, Wait};
    use posthaste_core::protocol::Flow;
    use posthaste_core::{ContextId, Endpoint, ProtocolId};

    const SHAPE: JobShape = JobShape { ranks: 3, clients: 1, contexts: 1 };

    fn at(rank: u32) -> Endpoint {
        Endpoint::new(Rank(rank), ContextId(0))
    }

    /// A little traffic; returns the trace and what arrived.
    fn story(seed: u64) -> (u64, u64, usize) {
        let mut world = SimWorld::new(SHAPE, seed, SimOptions::default(), EngineConfig::default());
        let log = Log::default();
        for client in world.clients() {
            client.register(Arc::new(Probe::recording("story", &log))).expect("the name is free");
        }
        world.kill_at(Rank(2), 300);
        for step in 0..600u32 {
            let (from, to) = (step % 3, step * 7 % 3);
            let args =
                SendArgs { target: at(to), protocol: ProtocolId(0), cookie: 0, info: &[], relaxed: false };
            let bytes = vec![step as u8; (step % 200) as usize];
            let sent = world.clients()[from as usize].contexts()[0].enter(|engine| {
                matches!(engine.scope().send(&args, Payload::Borrowed(&bytes), Wait::Never), Ok(Sent::Done))
            });
            assert!(sent.is_ok());
            world.step();
        }
        (world.fabric().trace(), world.steps(), log.len())
    }

    #[test]
    fn everything_follows_from_the_seed() {
        let traces: Vec<_> = (0..20).map(story).collect();
        assert_eq!(traces, (0..20).map(story).collect::<Vec<_>>());
        let mut different: Vec<u64> = traces.iter().map(|(trace, ..)| *trace).collect();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), 20, "seeds make a difference");
    }

    #[test]
    fn futures_are_run_without_a_runtime() {
        let mut world = SimWorld::new(SHAPE, 5, SimOptions::default(), EngineConfig::default());
        for client in world.clients() {
            let echo = Probe::new("echo", |scope, message| {
                let to = message.reply().expect("it is a request");
                scope.reply(to, Ok(Payload::Borrowed(message.info)));
            });
            client.register(Arc::new(echo.flow(Flow::Replied))).expect("the name is free");
        }
        let handle = world.clients()[0].contexts()[0].clone();
        let call = |target: u32| {
            let handle = handle.clone();
            async move {
                let started = handle.enter(|engine| {
                    let mut scope = engine.scope();
                    let ticket = scope.operation(Some(Rank(target))).expect("it lives");
                    scope.note_request(ticket, ProtocolId(0), 0);
                    let (protocol, cookie) = (ProtocolId(0), ticket.to_word());
                    let info = [target as u8; 3];
                    let args = SendArgs { target: at(target), protocol, cookie, info: &info, relaxed: false };
                    let given = scope.give(&args, Payload::Borrowed(&[]));
                    assert!(matches!(given, Ok(Given::Done | Given::Queued(_))));
                    ticket
                });
                let ticket = started.ok().expect("there is one thread");
                std::future::poll_fn(|cx| poll_ticket(&handle, cx, ticket)).await
            }
        };
        let answers = world.run(futures::future::join_all((0..3).map(call)), 100_000);
        for (rank, answer) in answers.iter().enumerate() {
            assert_eq!(answer.as_ref().expect("answered").as_bytes(), [rank as u8; 3]);
        }
    }

    #[test]
    #[should_panic(expected = "seed 77")]
    fn a_world_that_does_not_finish_tells_its_seed() {
        let mut world = SimWorld::new(SHAPE, 77, SimOptions::default(), EngineConfig::default());
        world.run_until(|_| false, 100);
    }
}
