//! The in-process device under real drivers: everybody sleeps on the doorbell, so a lost ring would hang.

use posthaste_core::context::{Face, poll_ticket};
use posthaste_core::engine::{EngineConfig, Given, Payload, SendArgs};
use posthaste_core::inprocess::{Fabric, InProcessFabric, Limits};
use posthaste_core::messager::ClientParts;
use posthaste_core::protocol::Flow;
use posthaste_core::slot::Outcome;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, ContextId, Endpoint, Fault, JobShape, LinuxSysdep, Messager, ProtocolId, Rank, Ticket,
};
use posthaste_testkit::conformance::{Log, Probe};
use posthaste_testkit::watchdog::Watchdog;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

const SHAPE: JobShape = JobShape { ranks: 3, clients: 1, contexts: 1 };

fn at(rank: u32) -> Endpoint {
    Endpoint::new(Rank(rank), ContextId(0))
}

async fn job(limits: Limits) -> (Arc<Fabric>, Vec<Client>, Log) {
    job_with(limits, EngineConfig { fifo_slots: 4, ..EngineConfig::default() }).await
}

async fn job_with(limits: Limits, config: EngineConfig) -> (Arc<Fabric>, Vec<Client>, Log) {
    let fabric = InProcessFabric::with_limits(SHAPE, limits);
    let mut clients = Vec::new();
    let log = Log::default();
    for rank in (0..3).map(Rank) {
        let client = Client::new(ClientParts {
            id: ClientId(0),
            devices: vec![fabric.device(ClientId(0), rank)],
            sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, SHAPE), None)),
            config,
            spin: Some(Duration::ZERO),
            driver_thread: false,
        })
        .expect("the ports are made");
        let echo = Probe::new("echo", |scope, message| {
            let to = message.reply().expect("it is a request");
            scope.reply(to, Ok(Payload::Borrowed(message.info)));
        });
        client.register(Arc::new(echo.flow(Flow::Replied))).expect("the name is free");
        client.register(Arc::new(Probe::recording("log", &log))).expect("the name is free");
        client.register(Arc::new(Probe::new("silent", |_, _| {}))).expect("the name is free");
        client.open().await.expect("the device opens");
        clients.push(client);
    }
    (fabric, clients, log)
}

async fn ends(client: &Client, ticket: Ticket) -> Outcome {
    let handle = &client.contexts()[0];
    poll_fn(|cx| poll_ticket(handle, cx, ticket)).await
}

/// Runs the closure on the engine as soon as nobody else is at it.
async fn enter<R>(client: &Client, mut run: impl FnMut(&mut posthaste_core::Scope<'_>) -> R) -> R {
    loop {
        if let Ok(result) = client.contexts()[0].enter(|engine| run(&mut engine.scope())) {
            return result;
        }
        tokio::task::yield_now().await;
    }
}

async fn send(
    client: &Client,
    to: u32,
    protocol: u16,
    info: &[u8],
    payload: &[u8],
    request: bool,
) -> Option<Ticket> {
    let cookie = if request {
        let ticket = enter(client, |scope| {
            let ticket = scope.operation(Some(Rank(to))).expect("it lives");
            scope.note_request(ticket, ProtocolId(protocol), payload.len());
            ticket
        });
        Some(ticket.await)
    } else {
        None
    };
    let word = cookie.map_or(0, Ticket::to_word);
    let args =
        SendArgs { target: at(to), protocol: ProtocolId(protocol), cookie: word, info, relaxed: false };
    let given =
        enter(client, |scope| scope.give(&args, Payload::Borrowed(payload)).expect("nobody is lost")).await;
    // It is not taken back before it has ended.
    if let Given::Queued(ticket) | Given::Kept(ticket, _) = given {
        ends(client, ticket).await.expect("nobody is lost");
    }
    cookie
}

async fn calls_and_floods() {
    let limits =
        Limits { packets_per_pair: 1, max_eager: 200, max_inline: 100, fragment: 50, ..Limits::default() };
    let (_fabric, clients, log) = job(limits).await;
    for round in 0..300u32 {
        // Long pauses let everybody fall asleep; then a call has to wake the other side, and its answer this one.
        if round % 30 == 0 {
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let ticket =
            send(&clients[0], 1 + round % 2, 0, &round.to_le_bytes(), &[], true).await.expect("a request");
        let answer = ends(&clients[0], ticket).await.expect("it is answered");
        assert_eq!(answer.as_bytes(), round.to_le_bytes());
    }
    // A flood through one-packet lanes: each packet waits for a ring that says "room".
    for number in 0..200u32 {
        send(
            &clients[0],
            1,
            1,
            &number.to_le_bytes(),
            &vec![number as u8; (number as usize * 3) % 400],
            false,
        )
        .await;
        send(&clients[2], 1, 1, &number.to_le_bytes(), &[], false).await;
    }
    while log.len() < 400 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for source in [0, 2] {
        let got: Vec<_> = log.of(at(source), at(1)).into_iter().map(|received| received.info).collect();
        assert_eq!(got, (0..200u32).map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>());
    }
    let first = log.of(at(0), at(1));
    for (number, received) in first.iter().enumerate() {
        assert_eq!(received.bytes, vec![number as u8; number * 3 % 400]);
    }
}

async fn a_crash_wakes_who_waits() {
    let (fabric, clients, _log) = job(Limits::default()).await;
    let ticket = send(&clients[0], 1, 2, &[], &[], true).await.expect("a request");
    tokio::time::sleep(Duration::from_millis(20)).await;
    fabric.kill(Rank(1));
    assert_eq!(ends(&clients[0], ticket).await.expect_err("it is lost"), Fault::PeerLost(Rank(1)));
    let ticket = send(&clients[0], 2, 2, &[], &[], true).await.expect("a request");
    tokio::time::sleep(Duration::from_millis(20)).await;
    clients[2].close().await;
    assert_eq!(ends(&clients[0], ticket).await.expect_err("it left"), Fault::PeerClosed(Rank(2)));
}

fn watched(name: &str) -> Watchdog {
    Watchdog::start(name, Duration::from_secs(40), || "a wake-up was lost".to_owned())
}

#[tokio::test(flavor = "current_thread")]
async fn nothing_is_lost_in_one_thread() {
    let _dog = watched("one thread");
    calls_and_floods().await;
    a_crash_wakes_who_waits().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_threads() {
    let _dog = watched("two threads");
    calls_and_floods().await;
    a_crash_wakes_who_waits().await;
}

#[tokio::test(flavor = "current_thread")]
async fn places_that_are_not_used_go_back_while_everybody_sleeps() {
    let _dog = watched("idle places");
    let limits = Limits { segment: 256 << 10, ..Limits::default() };
    let config = EngineConfig { rendezvous_bytes: Some(1000), ..EngineConfig::default() };
    let (_fabric, clients, log) = job_with(limits, config).await;
    send(&clients[0], 1, 1, &[], &[7; 100_000], false).await;
    while log.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(clients[0].contexts()[0].stats().rendezvous, 1);
    // All of the memory can be had once nothing of it is kept for the next message.
    let device = &clients[1].devices()[0];
    loop {
        match device.allocate(256 << 10) {
            Ok(all) => return device.free(all),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Whoever is at the engine may run a user's closure there, such as the condition of a wait.
#[test]
fn what_is_posted_while_a_closure_panics_at_the_engine_is_done() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (_fabric, clients, _log) = job(Limits::default()).await;
        let handle = clients[0].contexts()[0].clone();
        // At first and when the token is biased to this thread.
        for round in 0..200 {
            let mut posted = None;
            let entered = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let entered = handle.enter(|_| {
                    let other = || handle.post(|scope| scope.me());
                    posted = std::thread::scope(|scope| scope.spawn(other).join().ok());
                    std::panic::panic_any("the condition's own");
                });
                entered.is_ok()
            }));
            assert!(entered.is_err());
            let posted = posted.expect("it does not wait for the engine");
            let done = poll_fn(|cx| std::task::Poll::Ready(posted.poll(cx).is_ready())).await;
            assert!(done, "round {round}: nobody would do it");
            (0..100).for_each(|_| assert!(handle.enter(|_| ()).is_ok()));
        }
    });
}
