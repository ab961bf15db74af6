//! A task that is woken by what comes in while another one spins on the same thread has its turn then, and not when that spin is
//! over.

use posthaste_core::context::{Face, poll_ticket};
use posthaste_core::engine::{EngineConfig, Given, Payload, SendArgs};
use posthaste_core::inprocess::{Fabric, InProcessFabric};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, ContextId, Endpoint, Handle, JobShape, LinuxSysdep, Messager, ProtocolId, Rank, Ticket,
    Value,
};
use posthaste_protocols::Counter;
use posthaste_testkit::conformance::Probe;
use posthaste_testkit::watchdog::Watchdog;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };
/// Longer than the watchdog waits.
const SPIN: Duration = Duration::from_secs(300);

fn client(fabric: &Arc<Fabric>, rank: Rank, spin: Duration) -> Client {
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: vec![fabric.device(ClientId(0), rank)],
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, SHAPE), None)),
        config: EngineConfig::default(),
        spin: Some(spin),
        driver_thread: false,
    });
    client.expect("the ports are made")
}

/// Polls a wait for the first time: it is registered, and does not spin, because somebody is at the engine.
async fn begin<R>(handle: &Handle, mut wait: Pin<&mut impl Future<Output = R>>) {
    poll_fn(|cx: &mut Context<'_>| {
        let polled = handle.enter(|_| wait.as_mut().poll(cx).is_pending());
        assert!(matches!(polled, Ok(true)), "nothing has come");
        Poll::Ready(())
    })
    .await;
}

/// Rank 1, on a thread of its own.
struct Sender {
    thread: std::thread::JoinHandle<()>,
    /// It says nothing more before this is dropped: a goodbye would end a spin as well.
    leaves: mpsc::Sender<()>,
}

impl Sender {
    fn end(self) {
        drop(self.leaves);
        self.thread.join().expect("it has sent");
    }
}

/// Has rank 1 send one message to rank 0 when that is likely to spin.
fn send_soon(fabric: &Arc<Fabric>) -> Sender {
    let client = client(fabric, Rank(1), Duration::ZERO);
    let (leaves, leave) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            client.register(Arc::new(Probe::new("note", |_, _| {}))).expect("the name is free");
            client.open().await.expect("the device opens");
            tokio::time::sleep(Duration::from_millis(100)).await;
            let target = Endpoint::new(Rank(0), ContextId(0));
            let args = SendArgs { target, protocol: ProtocolId(0), cookie: 0, info: &[], relaxed: false };
            let handle = &client.contexts()[0];
            let given = handle.enter(|engine| engine.scope().give(&args, Payload::Borrowed(&[7])));
            match given.ok().expect("nobody else is there").expect("rank 0 lives") {
                Given::Queued(ticket) | Given::Kept(ticket, _) => {
                    poll_fn(|cx| poll_ticket(handle, cx, ticket)).await.expect("rank 0 lives");
                }
                _ => {}
            }
            assert!(leave.recv().is_err(), "nothing is sent there");
            client.close().await;
        });
    });
    Sender { thread, leaves }
}

fn run(name: &str, test: impl AsyncFnOnce(Client, Arc<Fabric>)) {
    let _dog = Watchdog::start(name, Duration::from_secs(60), || "it waits for the end of a spin".to_owned());
    let fabric = InProcessFabric::new(SHAPE);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(test(client(&fabric, Rank(0), SPIN), fabric.clone()));
}

#[test]
fn who_waits_for_a_counter_does_not_wait_for_the_spin_of_another() {
    run("counter", async |client, fabric| {
        let handle = client.contexts()[0].clone();
        let (noted, released) = (Counter::new(handle.clone()), Counter::new(handle.clone()));
        let count = noted.clone();
        client.register(Arc::new(Probe::new("note", move |_, _| count.add(1)))).expect("the name is free");
        client.open().await.expect("the device opens");
        let mut first = pin!(noted.reach(1));
        begin(&handle, first.as_mut()).await;
        let sender = send_soon(&fabric);
        tokio::join!(
            // It spins from here on, until the other lets it go.
            released.reach(1),
            async {
                first.await;
                released.add(1);
            }
        );
        sender.end();
        client.close().await;
    });
}

#[test]
fn whose_operation_ends_does_not_wait_for_the_spin_of_another() {
    run("operation", async |client, fabric| {
        let handle = client.contexts()[0].clone();
        let released = Counter::new(handle.clone());
        let ticket: Arc<Mutex<Option<Ticket>>> = Arc::default();
        let ended = ticket.clone();
        let note = Probe::new("note", move |scope, _| {
            let ticket = ended.lock().expect("nobody panicked").take().expect("it was begun");
            scope.complete(ticket, Ok(Value::Unit));
        });
        client.register(Arc::new(note)).expect("the name is free");
        client.open().await.expect("the device opens");
        let operation = handle.enter(|engine| engine.scope().operation(None));
        let operation = operation.ok().expect("nobody else is there").expect("there is room");
        *ticket.lock().expect("nobody panicked") = Some(operation);
        let mut first = pin!(poll_fn(|cx| poll_ticket(&handle, cx, operation)));
        begin(&handle, first.as_mut()).await;
        let sender = send_soon(&fabric);
        tokio::join!(released.reach(1), async {
            first.await.expect("it has ended well");
            released.add(1);
        });
        sender.end();
        client.close().await;
    });
}
