//! Contexts of one client: a task of one waits on memory that is written by what comes in through another.

use posthaste_core::context::{Face, poll_memory, poll_until};
use posthaste_core::engine::{EngineConfig, Payload, SendArgs, Wait, Watched};
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::memory::SharedSlice;
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, Context, ContextId, Endpoint, Handle, JobShape, LinuxSysdep, Messager, ProtocolId, Rank,
};
use posthaste_testkit::conformance::Probe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

const ME: Rank = Rank(0);

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wakes {
    fn take(&self) -> usize {
        self.0.swap(0, Ordering::SeqCst)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn send_to_itself(handle: &Handle) {
    let target = Endpoint::new(ME, handle.me().context);
    let args = SendArgs { target, protocol: ProtocolId(0), cookie: 0, info: &[], relaxed: false };
    let sent =
        handle.enter(|engine| engine.scope().send(&args, Payload::Borrowed(b"x"), Wait::Never).is_ok());
    assert!(matches!(sent, Ok(true)), "nobody else is at it");
}

/// A client of one rank and two contexts with that protocol, and a word of its memory.
fn client(protocol: Probe) -> (Client, SharedSlice) {
    let shape = JobShape { ranks: 1, clients: 1, contexts: 2 };
    let device = InProcessFabric::new(shape).device(ClientId(0), ME);
    let own = device.allocate(8).expect("so little");
    let memory = device.map(ME, own.offset, 8).expect("its own");
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: vec![device],
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(ME, shape), None)),
        config: EngineConfig::default(),
        spin: Some(Duration::ZERO),
        driver_thread: false,
    })
    .expect("the ports are made");
    client.register(Arc::new(protocol)).expect("the name is free");
    (client, memory)
}

/// Waits until a word is no longer 0.
struct Written<'c> {
    owner: &'c Context,
    memory: SharedSlice,
    watched: Option<Arc<Watched>>,
}

impl<'c> Written<'c> {
    fn new(owner: &'c Context, memory: SharedSlice) -> Self {
        Self { owner, memory, watched: None }
    }

    fn poll(&mut self, cx: &mut TaskContext<'_>) -> Poll<()> {
        let memory = self.memory;
        let mut done = || {
            let mut word = [0; 8];
            memory.read(&mut word);
            (word != [0; 8]).then_some(())
        };
        poll_memory(self.owner, cx, memory, &mut self.watched, &mut done)
    }
}

/// Polls until nothing but somebody else will have it polled again.
fn asleep(wakes: &Arc<Wakes>, mut poll: impl FnMut(&mut TaskContext<'_>) -> Poll<()>) {
    let waker = Waker::from(wakes.clone());
    loop {
        assert_eq!(poll(&mut TaskContext::from_waker(&waker)), Poll::Pending);
        if wakes.take() == 0 {
            return;
        }
    }
}

#[test]
fn who_waits_on_memory_in_one_context_is_woken_by_what_comes_in_through_another() {
    let place = Arc::new(OnceLock::new());
    let theirs = place.clone();
    // What comes in writes the memory, and tells nobody.
    let write = Probe::new("write", move |_, _| {
        let memory: &SharedSlice = theirs.get().expect("said before");
        memory.write(&[1; 8]);
    });
    let (client, memory) = client(write);
    place.set(memory).expect("said once");
    let [first, second] = client.contexts() else { panic!("two contexts") };
    assert!(first.is_kin_of(second) && first.kin_count() == 2 && second.me().context == ContextId(1));
    let owner = Context::new(first).expect("nobody owns it");
    let wakes = Arc::new(Wakes::default());
    let mut wait = Written::new(&owner, memory);
    asleep(&wakes, |cx| wait.poll(cx));
    // What is no event of the other context tells nobody anything.
    second.advance();
    assert_eq!(wakes.take(), 0);
    send_to_itself(second);
    assert!(second.advance() > 0);
    assert!(wakes.take() > 0, "it sleeps on");
    assert_eq!(wait.poll(&mut TaskContext::from_waker(&Waker::from(wakes))), Poll::Ready(()));
}

#[test]
fn an_owner_that_goes_to_sleep_again_looks_at_memory_that_another_of_its_tasks_waits_on() {
    let (client, memory) = client(Probe::new("write", |_, _| {}));
    let owner = Context::new(&client.contexts()[0]).expect("nobody owns it");
    let (writes, other) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
    let mut wait = Written::new(&owner, memory);
    asleep(&writes, |cx| wait.poll(cx));
    // As the rank itself stores to its own part of a window.
    memory.write(&[1; 8]);
    let mut never = || None::<()>;
    asleep(&other, |cx| poll_until(&owner, cx, &mut never, |_| {}));
    assert!(writes.take() > 0, "it is left to time");
}

#[test]
fn a_task_of_an_owner_is_woken_when_another_has_taken_back_the_promise_on_which_it_sleeps() {
    let (client, _) = client(Probe::new("ignored", |_, _| {}));
    let owner = Context::new(&client.contexts()[0]).expect("nobody owns it");
    let wakes = Arc::new(Wakes::default());
    let mut never = || None::<()>;
    asleep(&wakes, |cx| poll_until(&owner, cx, &mut never, |_| {}));
    // An event that the owner's other task finds by itself: nobody has to ring for that.
    let target = Endpoint::new(ME, ContextId(0));
    let args = SendArgs { target, protocol: ProtocolId(0), cookie: 0, info: &[], relaxed: false };
    let sent = owner.enter(|engine| engine.scope().send(&args, Payload::Borrowed(b"x"), Wait::Never).is_ok());
    assert!(matches!(sent, Ok(true)));
    assert!(owner.advance() > 0);
    assert!(wakes.take() > 0, "it sleeps on, and nobody rings");
}
