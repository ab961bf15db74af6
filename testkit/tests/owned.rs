//! Owned contexts: what is driven by one reaches its engine through handles, and lets others run.

use posthaste_core::context::{Face, drive};
use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{Client, ClientId, Context, Handle, JobShape, LinuxSysdep, Messager, Rank};
use posthaste_testkit::watchdog::Watchdog;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

fn alone(spin: Duration) -> Client {
    let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
    let fabric = InProcessFabric::new(shape);
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: vec![fabric.device(ClientId(0), Rank(0))],
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
        config: EngineConfig::default(),
        spin: Some(spin),
        driver_thread: false,
    });
    client.expect("the ports are made")
}

fn enters(handle: &Handle) -> bool {
    handle.enter(|_| ()).is_ok()
}

#[test]
fn an_owner_lends_its_engine_to_what_it_drives_and_to_nobody_else() {
    let client = alone(Duration::ZERO);
    let handle = &client.contexts()[0];
    let context = Context::new(handle).expect("nobody owns it");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        assert!(!enters(handle), "it is owned");
        let driven = drive(&context, async {
            assert!(enters(handle), "it is lent");
            let elsewhere = std::thread::scope(|scope| scope.spawn(|| enters(handle)).join());
            assert!(matches!(elsewhere, Ok(false)), "to this thread only");
            let nested = handle.enter(|_| (enters(handle), context.enter(|_| ()).is_ok()));
            assert!(matches!(nested, Ok((false, false))), "to one at a time");
            drive(&context, async { assert!(enters(handle)) }).await;
            assert!(enters(handle), "still");
            // What was posted before is done before, by whichever face.
            let order = Arc::new(AtomicU32::new(0));
            for number in 1..=2 {
                let posted = order.clone();
                handle.post_run(move |_| posted.store(number, Ordering::Relaxed));
                let seen = || order.load(Ordering::Relaxed);
                let seen =
                    if number == 1 { handle.enter(|_| seen()).ok() } else { context.enter(|_| seen()).ok() };
                assert_eq!(seen, Some(number));
            }
        });
        driven.await;
        assert!(!enters(handle), "no longer");
        let panics = drive(&context, async { panic!("as a test has it") });
        let mut panics = std::pin::pin!(panics);
        let caught = poll_fn(|cx| {
            let poll = std::panic::AssertUnwindSafe(|| panics.as_mut().poll(cx).is_ready());
            Poll::Ready(std::panic::catch_unwind(poll))
        });
        assert!(caught.await.is_err());
        assert!(!enters(handle), "no longer, however it ended");
        assert!(context.enter(|_| ()).is_ok(), "it is the owner's");
        // A panic at the engine does not give away what is kept.
        let panics = std::panic::AssertUnwindSafe(|| context.enter(|_| panic!("as a test has it")).is_ok());
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(!enters(handle), "it is still owned");
        assert!(context.enter(|_| ()).is_ok(), "by the same");
    });
}

/// A task that has used up its turn waits for nothing that happens in the context, and its driver is not to look for that.
#[test]
fn a_driven_future_that_lets_others_run_is_polled_again_at_once() {
    let watchdog =
        Watchdog::start("lets others run", Duration::from_secs(60), || "it waits for an event".into());
    // As long as a driver looks for something to happen, if it has to.
    let client = alone(Duration::from_secs(20));
    let context = Context::new(&client.contexts()[0]).expect("nobody owns it");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let turns = async {
            for _ in 0..2000 {
                tokio::task::consume_budget().await;
            }
        };
        drive(&context, turns).await;
        // Nor does it forget the task if it was somebody else who used the turn up.
        let mut left = 1000;
        let used_up = poll_fn(|cx| {
            while tokio::task::coop::has_budget_remaining() {
                let mut unit = std::pin::pin!(tokio::task::consume_budget());
                let _ready = unit.as_mut().poll(cx).is_ready();
            }
            left -= 1;
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        drive(&context, used_up).await;
        // Nobody else drives the context: what is posted is done though the driven future uses every turn up.
        let posted = Arc::new(AtomicU32::new(0));
        let (done, handle) = (posted.clone(), client.contexts()[0].clone());
        std::thread::spawn(move || handle.post_run(move |_| done.store(1, Ordering::Relaxed)));
        let busy = async {
            while posted.load(Ordering::Relaxed) == 0 {
                tokio::task::consume_budget().await;
            }
        };
        drive(&context, busy).await;
    });
    drop(watchdog);
}
