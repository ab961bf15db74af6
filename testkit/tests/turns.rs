//! Whoever spins lets the tasks run that handlers have started. The spins of these tests last for an hour.

use posthaste_core::context::drive;
use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::{Fabric, InProcessFabric};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Client, ClientId, Context, JobShape, LinuxSysdep, Messager, Rank};
use posthaste_protocols::{ActiveMessage, Counter, MessageStream, Service, ServiceOptions, service, stream};
use posthaste_testkit::watchdog::Watchdog;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };

/// Which kind of task the handler of a message starts.
#[derive(Clone, Copy, Debug)]
enum Starts {
    /// That of a service's call.
    Call,
    /// A spawned handler.
    Spawned,
    /// It wakes one that awaits messages of a stream.
    Consumer,
}

/// A rank, and what counts the tasks that have had their turn.
struct Rig {
    client: Client,
    turns: Counter,
    call: Service<u64, u64>,
    spawned: ActiveMessage,
    line: ActiveMessage,
    lines: MessageStream,
}

impl Rig {
    async fn new(fabric: &Arc<Fabric>, rank: Rank) -> Rig {
        let client = Client::new(ClientParts {
            id: ClientId(0),
            devices: vec![fabric.device(ClientId(0), rank)],
            sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, SHAPE), None)),
            config: EngineConfig::default(),
            spin: Some(Duration::from_secs(3600)),
            driver_thread: false,
        })
        .expect("the ports are made");
        let face = client.contexts()[0].clone();
        let turns = Counter::new(face.clone());
        let (in_call, in_spawned) = (turns.clone(), turns.clone());
        let options = ServiceOptions::default();
        let call = service::register_async(&client, face.clone(), "call", options, move |number: u64, _| {
            in_call.add(1);
            let end = Instant::now() + Duration::from_micros(number);
            async move {
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
                number
            }
        });
        let spawned = stream::register_spawned(&client, face.clone(), "spawned", 1, move |_| {
            in_spawned.add(1);
            async {}
        });
        let (line, lines) = stream::register_stream(&client, face, "line").expect("the name is free");
        let (call, spawned) = (call.expect("the name is free"), spawned.expect("the name is free"));
        client.open().await.expect("the device opens");
        Rig { client, turns, call, spawned, line, lines }
    }
}

/// One rank waits for what a task does that a message of the other one starts, and looks for an hour.
fn a_task_that_is_started_has_its_turn(starts: Starts, owned: bool) {
    let _watchdog = Watchdog::start("has its turn", Duration::from_secs(60), move || {
        format!(
            "{starts:?} of an {} context waits for the end of the spin",
            if owned { "owned" } else { "open" }
        )
    });
    let fabric = InProcessFabric::new(SHAPE);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let fabric = &fabric;
        scope.spawn(move || {
            runtime().block_on(async move {
                let Rig { client, turns, mut lines, .. } = Rig::new(fabric, Rank(1)).await;
                let context = owned.then(|| Context::new(&client.contexts()[0]).expect("nobody owns it"));
                if matches!(starts, Starts::Consumer) {
                    let turns = turns.clone();
                    tokio::spawn(async move {
                        while lines.recv().await.is_some() {
                            turns.add(1);
                        }
                    });
                    // It waits before there is anything.
                    tokio::task::yield_now().await;
                }
                ready.send(()).expect("somebody waits for it");
                // A call's task has answered before this one has its turn again.
                match &context {
                    Some(context) => drive(context, turns.reach(1)).await,
                    None => turns.reach(1).await,
                }
            });
        });
        is_ready.recv().expect("the rank gets ready");
        runtime().block_on(async {
            let rig = Rig::new(fabric, Rank(0)).await;
            match starts {
                Starts::Call => assert_eq!(rig.call.call(Rank(1), 7).await.expect("it answers"), 7),
                Starts::Spawned => rig.spawned.send(Rank(1), "").await.expect("it is sent"),
                Starts::Consumer => rig.line.send(Rank(1), "").await.expect("it is sent"),
            }
        });
    });
}

#[test]
fn a_future_that_spins_lets_a_call_that_it_has_found_be_answered() {
    a_task_that_is_started_has_its_turn(Starts::Call, false);
}

#[test]
fn a_future_that_spins_lets_a_handler_that_it_has_spawned_run() {
    a_task_that_is_started_has_its_turn(Starts::Spawned, false);
}

#[test]
fn an_owner_that_spins_lets_what_it_has_started_run() {
    for starts in [Starts::Call, Starts::Spawned, Starts::Consumer] {
        a_task_that_is_started_has_its_turn(starts, true);
    }
}

/// A driver that goes on behind the tasks which it has started keeps the runtime from asking the system for events, and from its
/// first future, which are looked at every 61 turns else.
#[test]
fn calls_that_keep_coming_let_all_others_have_their_turn() {
    const CALLS: u64 = 400;
    const CALLERS: u64 = 4;
    let _watchdog = Watchdog::start("calls", Duration::from_secs(60), || "they do not end".to_owned());
    let fabric = InProcessFabric::new(SHAPE);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let fabric = &fabric;
        let server = scope.spawn(move || {
            runtime().block_on(async move {
                let rig = Rig::new(fabric, Rank(1)).await;
                ready.send(()).expect("somebody waits for it");
                let (mut seen, mut most) = (0, 0);
                while seen < CALLS * CALLERS {
                    tokio::task::yield_now().await;
                    let turns = rig.turns.value();
                    (most, seen) = (most.max(turns - seen), turns);
                }
                // The last of them are answered.
                rig.client.contexts()[0].advance();
                tokio::time::sleep(Duration::from_millis(50)).await;
                most
            })
        });
        is_ready.recv().expect("the rank gets ready");
        runtime().block_on(async {
            let rig = Rig::new(fabric, Rank(0)).await;
            let calls = || async {
                for _ in 0..CALLS {
                    assert_eq!(rig.call.call(Rank(1), 100).await.expect("it answers"), 100);
                }
            };
            futures::future::join_all((0..CALLERS).map(|_| calls())).await;
        });
        let most = server.join().expect("the server ends well");
        assert!(most <= 10, "{most} calls were answered between two turns of others");
    });
}
