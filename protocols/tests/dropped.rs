//! What is given up half-way leaves nothing in the tables of its context.

#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use futures::poll;
use posthaste_core::context::Face;
use posthaste_core::{Context, Handle, Messager, Rank};
use posthaste_protocols::stream::register_stream;
use posthaste_protocols::window::{Region, RemoteRegion};
use posthaste_protocols::{ConnectionManager, Counter, ManyToMany, Part, Reduce};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;
use support::{Member, Setup, run};

#[test]
fn memory_that_nobody_waits_for_any_more_has_no_entry() {
    run(1, Setup::new(), async |member| {
        let client = &*member.client;
        let region = Region::allocate(client, 64).await.unwrap();
        // Whoever owns the context does what others post when it comes there next.
        let context = Context::new(&client.contexts()[0]).unwrap();
        let entries = || {
            let count = |engine: &mut posthaste_core::engine::Engine| {
                let mut scope = engine.scope();
                let table = scope.table();
                (table.remote.len(), table.local.len())
            };
            context.enter(count).ok().unwrap()
        };
        let before = entries();
        {
            let mut opened = pin!(RemoteRegion::open(client, &member.layouts, region.key()));
            let mut allocated = pin!(Region::allocate(client, 64));
            assert!(poll!(&mut opened).is_pending() && poll!(&mut allocated).is_pending());
        }
        context.advance();
        context.advance();
        assert_eq!(entries(), before);
        // And with what was there all along, nothing is left of it either.
        let opened = posthaste_core::context::drive(
            &context,
            RemoteRegion::open(client, &member.layouts, region.key()),
        )
        .await;
        assert_eq!(entries(), (before.0 + 1, before.1));
        drop(opened);
        drop(region);
        context.advance();
        assert_eq!(entries(), (before.0, before.1 - 1));
    });
}

/// What goes along with the last waker of a task, and does something as it goes.
struct Last {
    again: Arc<dyn Fn() + Send + Sync>,
    gone: Arc<AtomicUsize>,
}

impl Wake for Last {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Last {
    fn drop(&mut self) {
        (self.again)();
        self.gone.fetch_add(1, Ordering::Relaxed);
    }
}

/// Polls what does not get ready by one task after the other, and drops it. Each of these tasks is gone by then but for the waker
/// that it was polled with, and does `again` when that goes. How many went before what waited did, and how many in all.
fn is_left_by_many<W: Future>(wait: W, again: impl Fn() + Send + Sync + 'static) -> (usize, usize) {
    const TASKS: usize = 8;
    let (again, gone): (Arc<dyn Fn() + Send + Sync>, _) = (Arc::new(again), Arc::new(AtomicUsize::new(0)));
    let mut wait = Box::pin(wait);
    for _ in 0..TASKS {
        let waker = Waker::from(Arc::new(Last { again: again.clone(), gone: gone.clone() }));
        assert!(wait.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    }
    let replaced = gone.load(Ordering::Relaxed);
    drop(wait);
    (replaced, gone.load(Ordering::Relaxed))
}

/// Fails if the body, of one rank, takes absurdly long: it may wait for itself.
fn watched(body: impl AsyncFn(Member) + Send + 'static) {
    watched_of(1, Setup::new(), body);
}

/// The same of several ranks.
fn watched_of(ranks: u32, setup: Setup, body: impl AsyncFn(Member) + Send + 'static) {
    let (ended, has_ended) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        run(ranks, setup, body);
        let _nobody_waits_any_more = ended.send(());
    });
    if has_ended.recv_timeout(Duration::from_secs(100)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("it waits for itself");
    }
    thread.join().unwrap();
}

fn handle(member: &Member) -> Handle {
    member.client.contexts()[0].clone()
}

#[test]
fn a_task_that_goes_with_the_waker_that_a_counter_kept_may_use_the_counter() {
    watched(async |member| {
        let counter = Counter::new(handle(&member));
        let same = counter.clone();
        let (replaced, gone) = is_left_by_many(counter.reach(1), move || {
            assert!(futures::FutureExt::now_or_never(same.reach(2)).is_none());
        });
        assert!(0 < replaced && replaced < gone, "{replaced} of {gone}");
    });
}

#[test]
fn a_task_that_goes_with_the_waker_that_a_receive_kept_may_receive() {
    watched(async |member| {
        let many = ManyToMany::new(&*member.client).unwrap();
        let connection = ConnectionManager::new(1).open().await;
        let (id, same) = (connection.id(), many.clone());
        let receive =
            move |many: &ManyToMany| many.receive(id, 8, &[Part { source: Rank(0), offset: 0, len: 8 }]);
        let (replaced, gone) = is_left_by_many(receive(&many).unwrap(), move || drop(receive(&same)));
        assert!(0 < replaced && replaced < gone, "{replaced} of {gone}");
    });
}

#[test]
fn a_task_that_goes_with_the_waker_that_a_stream_kept_may_let_its_messages_in() {
    watched(async |member| {
        let handle = handle(&member);
        let (note, mut notes) = register_stream(&*member.client, handle.clone(), "note").unwrap();
        // The first one ends the wait.
        let begun = AtomicUsize::new(0);
        let again = move || {
            if begun.fetch_add(1, Ordering::Relaxed) == 0 {
                note.try_send(Rank(0), "as it goes").unwrap();
                handle.advance();
            }
        };
        let gone = Arc::new(AtomicUsize::new(0));
        let again: Arc<dyn Fn() + Send + Sync> = Arc::new(again);
        let note = loop {
            let waker = Waker::from(Arc::new(Last { again: again.clone(), gone: gone.clone() }));
            let mut context = std::task::Context::from_waker(&waker);
            if let std::task::Poll::Ready(note) = notes.poll_recv(&mut context) {
                break note;
            }
        };
        assert_eq!(note.map(|note| note.text()).as_deref(), Some("as it goes"));
        assert!(gone.load(Ordering::Relaxed) > 0);
    });
}

#[test]
fn a_task_that_goes_with_the_waker_that_watched_memory_kept_may_let_it_be_looked_at() {
    watched(async |member| {
        let region = Region::allocate(&member.client, 64).await.unwrap();
        let handle = handle(&member);
        let wait = region.wait_until(0, |value: u64| value == 1);
        let (replaced, _) = is_left_by_many(wait, move || {
            // The engine looks itself, as it lets go of the last one.
            let _is_there = handle.enter(|engine| engine.look_at_memory()).is_ok();
        });
        assert!(replaced > 0);
    });
}

#[test]
fn a_task_that_goes_with_the_waker_of_a_collective_operation_may_call_another() {
    let mut setup = Setup::new();
    // Of other nodes: they do not meet on boards.
    setup.nodes = vec![0, 1];
    watched_of(2, setup, async |member| {
        let world = member.collectives.world();
        let (same, gone) = (world.clone(), Arc::new(AtomicUsize::new(0)));
        let again: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            // It ends for want of the others, or with them.
            drop(futures::FutureExt::now_or_never(same.barrier()));
        });
        if member.rank == Rank(0) {
            let mut barrier = Box::pin(world.barrier());
            let waker = Waker::from(Arc::new(Last { again, gone: gone.clone() }));
            assert!(barrier.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
            drop(waker);
            // The part of the other one comes while nobody polls: who waits is woken, and goes.
            while gone.load(Ordering::Relaxed) == 0 {
                handle(&member).advance();
                tokio::task::yield_now().await;
            }
            barrier.await.unwrap();
        } else {
            tokio::task::yield_now().await;
            world.barrier().await.unwrap();
        }
    });
}

#[test]
fn a_handler_that_is_replaced_may_set_another_as_it_goes() {
    struct Sets(Arc<posthaste_core::Client>);
    impl Drop for Sets {
        fn drop(&mut self) {
            self.0.on_error(|_| ());
            self.0.on_restart(|_, _| ());
        }
    }
    watched(async |member| {
        let sets = || Sets(member.client.clone());
        let (one, other) = (sets(), sets());
        member.client.on_error(move |_| drop(std::hint::black_box(&one).0.clone()));
        member.client.on_restart(move |_, _| drop(std::hint::black_box(&other).0.clone()));
        member.client.on_error(|_| ());
        member.client.on_restart(|_, _| ());
    });
}

/// A task of an executor that goes on there and then when it is woken.
struct AtOnce(Arc<dyn Fn() + Send + Sync>);

impl Wake for AtOnce {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

#[test]
fn an_owner_that_goes_on_as_it_is_woken_may_use_the_collectives() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let other = world.split(Some(0), 0).await.unwrap().unwrap();
        let context = Context::new(&member.client.contexts()[0]).unwrap();
        let woken = Arc::new(AtomicUsize::new(0));
        let (asked, count) = (other.clone(), woken.clone());
        let waker = Waker::from(Arc::new(AtOnce(Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
            drop(asked.barrier());
        }))));
        // What combines is a user's, and let go of by work that is posted as the operation ends.
        let sum = Reduce::by(|a: u64, b: u64| a + b);
        let mut cx = std::task::Context::from_waker(&waker);
        for _ in 0..50 {
            let values = vec![1; 300];
            let mut total = pin!(posthaste_core::context::drive(&context, world.all_reduce(&values, &sum)));
            // It sleeps with that waker until the other's part is there, and takes that in with its next turn.
            let total = loop {
                match total.as_mut().poll(&mut cx) {
                    std::task::Poll::Ready(total) => break total,
                    std::task::Poll::Pending => tokio::task::yield_now().await,
                }
            };
            assert_eq!(total.unwrap(), vec![2; 300]);
        }
        assert!(woken.load(Ordering::Relaxed) > 0, "it was not woken");
    });
}
