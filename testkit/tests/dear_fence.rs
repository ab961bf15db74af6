//! Where a heavy fence is dear, a sleep begins without one and is settled when it has lasted.

use posthaste_core::context::{Face, drive, poll_ticket};
use posthaste_core::engine::{EngineConfig, Payload, SendArgs, Sent, Wait};
use posthaste_core::messager::ClientParts;
use posthaste_core::protocol::Flow;
use posthaste_core::sysdep::{Headroom, Personality, ThreadMain};
use posthaste_core::{
    Client, ClientId, Context, ContextId, Endpoint, JobShape, LinuxSysdep, Messager, ProtocolId, Rank, Sysdep,
};
use posthaste_launch::HostFds;
use posthaste_shm::{Host, HostResources, Layout, Sizes};
use posthaste_testkit::conformance::Probe;
use posthaste_testkit::watchdog::Watchdog;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };

/// The kernel's services, with heavy fences that are counted and said to cost so much.
struct Counting {
    kernel: LinuxSysdep,
    cost: Duration,
    fences: Arc<AtomicU32>,
}

impl Sysdep for Counting {
    fn now(&self) -> Duration {
        self.kernel.now()
    }
    fn personality(&self) -> &Personality {
        self.kernel.personality()
    }
    fn cores(&self) -> usize {
        self.kernel.cores()
    }
    fn spawn(&self, name: &str, core: Option<usize>, main: ThreadMain) -> std::io::Result<()> {
        self.kernel.spawn(name, core, main)
    }
    fn yield_now(&self) {
        self.kernel.yield_now();
    }
    fn heavy_fence(&self) {
        self.fences.fetch_add(1, Ordering::Relaxed);
        self.kernel.heavy_fence();
    }
    fn heavy_fence_cost(&self) -> Duration {
        self.cost
    }
    fn fence_is_asymmetric(&self) -> bool {
        self.kernel.fence_is_asymmetric()
    }
    fn headroom(&self) -> Headroom {
        self.kernel.headroom()
    }
    fn random(&self, bytes: &mut [u8]) {
        self.kernel.random(bytes);
    }
}

/// Two ranks of one arena, with drivers; the number of their fences.
async fn pair(cost: Duration) -> (Vec<Client>, Arc<AtomicU32>) {
    let sizes = Sizes { lane: 16 << 10, pool: 1 << 20, segment: 16 << 20 };
    let bytes = Layout::new(SHAPE, sizes).expect("a layout").total();
    let mut fds = HostFds::new(2, bytes).expect("an arena and pipes");
    let fences = Arc::new(AtomicU32::new(0));
    let mut clients = Vec::new();
    for rank in (0..2).map(Rank) {
        let own = fds.local(rank.0).expect("the rank's descriptors");
        let kernel = LinuxSysdep::new(Personality::one_node(rank, SHAPE), None);
        let sysdep: Arc<dyn Sysdep> = Arc::new(Counting { kernel, cost, fences: fences.clone() });
        let resources =
            HostResources { arena: own.arena, bell: own.bell, ring: own.ring, memory_limit: None };
        let host = Host::new(resources, sizes, sysdep.clone()).expect("the arena is mapped");
        let client = Client::new(ClientParts {
            id: ClientId(0),
            devices: vec![host.device(ClientId(0))],
            sysdep,
            config: EngineConfig::default(),
            spin: Some(Duration::ZERO),
            driver_thread: false,
        });
        let client = client.expect("the device makes its ports");
        let echo = Probe::new("echo", |scope, message| {
            let to = message.reply().expect("it is a request");
            scope.reply(to, Ok(Payload::Borrowed(message.info)));
        });
        client.register(Arc::new(echo.flow(Flow::Replied))).expect("the name is free");
        client.open().await.expect("the device opens");
        clients.push(client);
    }
    (clients, fences)
}

/// A request of rank 0, through whichever face, and its answer.
async fn ask<F: Face>(face: &F) {
    let ticket = loop {
        let sent = face.enter(|engine| {
            let mut scope = engine.scope();
            let ticket = scope.operation(Some(Rank(1))).expect("it lives");
            scope.note_request(ticket, ProtocolId(0), 0);
            let target = Endpoint::new(Rank(1), ContextId(0));
            let args = SendArgs {
                target,
                protocol: ProtocolId(0),
                cookie: ticket.to_word(),
                info: b"asked",
                relaxed: false,
            };
            let sent = scope.send(&args, Payload::Borrowed(b""), Wait::Never).expect("it lives");
            assert!(matches!(sent, Sent::Done), "there is room");
            ticket
        });
        match sent {
            Ok(ticket) => break ticket,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    poll_fn(|cx| poll_ticket(face, cx, ticket)).await.expect("it is answered");
}

const ROUNDS: u32 = 40;

/// Rounds of a request and a short sleep, then a long sleep, then one more request. Returns the fences of the rounds, and
/// those of the long sleep.
async fn rounds<F: Face>(face: &F, fences: &AtomicU32) -> (u32, u32) {
    let count = || fences.load(Ordering::Relaxed);
    // The first message opens a lane and makes whatever is made once.
    ask(face).await;
    let before = count();
    for _ in 0..ROUNDS {
        ask(face).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let short = count() - before;
    let before = count();
    // An owner drives its context, or nobody does; a handle's has its driver.
    // Who is held up until its end may find that it is over before it has settled it.
    for _ in 0..20 {
        drive(face, tokio::time::sleep(Duration::from_millis(400))).await;
        if count() - before >= 2 {
            break;
        }
    }
    let long = count() - before;
    ask(face).await;
    (short, long)
}

fn run(cost: Duration, owned: bool) -> (u32, u32) {
    let _watchdog = Watchdog::start("dear fence", Duration::from_secs(60), String::new);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (clients, fences) = pair(cost).await;
        let handle = &clients[0].contexts()[0];
        let counted = if owned {
            let context = Context::new(handle).expect("nobody else owns it");
            rounds(&context, &fences).await
        } else {
            rounds(handle, &fences).await
        };
        for client in &clients {
            client.close().await;
        }
        counted
    })
}

#[test]
fn a_cheap_fence_is_made_for_every_sleep() {
    let (short, _) = run(Duration::ZERO, false);
    assert!(short >= ROUNDS, "{short} fences");
}

#[test]
fn a_dear_fence_is_made_once_for_a_sleep_that_lasts() {
    let (short, long) = run(Duration::from_millis(10), false);
    // Rounds of which one is held up for a tenth of a second are rare on any machine.
    assert!(short < ROUNDS, "{short} fences");
    // One of each rank, and rarely one more: who is held up amid the sleep begins it anew.
    assert!((2..=4).contains(&long), "{long} fences");
}

#[test]
fn an_owner_settles_its_sleep() {
    let (short, long) = run(Duration::from_millis(10), true);
    assert!(short < ROUNDS, "{short} fences");
    // One of the owner, one of the rank that is driven, and rarely one more.
    assert!((2..=4).contains(&long), "{long} fences");
}
