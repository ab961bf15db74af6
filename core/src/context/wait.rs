//! How futures wait: they advance the engine, spin for a short bounded time, and go to sleep.

use super::rest::Rest;
use super::{Face, Handle, Shared, Spin, Turn, patience};
use crate::budget::{self, ACCESS, QUICK_WAIT, WAIT};
use crate::engine::{Engine, Scope, Watched, Work};
use crate::memory::{SharedSlice, fetch_recent};
use crate::slot::{Outcome, Ticket};
use crate::sync::spin_loop;
use std::sync::atomic::Ordering;
use std::task::{Context as TaskContext, Poll, Waker, ready};
use std::time::Duration;

/// Rounds with something to do after which a waiting future lets other tasks of its runtime run.
pub(super) const BUSY_ROUNDS: u32 = 16;
/// `sched_yield`s of a waiting future where ranks share cores.
const YIELDS: u32 = 4;
/// For how long a task that waits on memory gives its core away where ranks share cores.
const YIELDED: Duration = Duration::from_micros(5);
/// The same of a task that waits for other ranks that are about to run on the same cores, and how often it lets other tasks
/// of its own rank run meanwhile.
const MOST_YIELDED: Duration = Duration::from_millis(1);
const SLICE: Duration = Duration::from_micros(100);
/// Looks at what is about to be written, before anything else is looked at.
const AT_ONCE: u32 = 64;
/// The same with a pause before each, which lasts as long as a few looks.
const AT_ONCE_PAUSED: u32 = 32;
/// One in so many waits on memory looks at what comes in first: there may be many short ones behind each other.
const ADVANCING_WAITS: u32 = 8;
/// Rounds of one wait with something to do after which more of the kind is expected, what is too little to be worth a look,
/// and for how many pauses to wait for more of it.
const STREAM: u32 = 4;
const FEW: usize = 4;
const BREATH: u32 = 4;
/// Rows of looks in vain from which on a spin was slow: a few microseconds.
const SLOW: u32 = 5;
/// Looks for something new between two looks at everything else and at the clock.
pub(super) const LOOKS: u32 = 32;

/// Waits until `done` gives something, advancing the engine meanwhile: the way every future of this crate waits.
///
/// `register` is called before the task goes to sleep; whoever makes `done` true must wake that waker afterwards.
#[inline]
pub fn poll_until<F: Face, R>(
    face: &F,
    cx: &mut TaskContext<'_>,
    mut done: impl FnMut() -> Option<R>,
    register: impl FnOnce(&Waker),
) -> Poll<R> {
    ready!(budget::proceed(cx));
    let shared = face.shared();
    match face.enter(|engine| spin(shared, engine, &mut |_: &mut Engine| done())) {
        Ok(Spun::Done(value)) => return Poll::Ready(value),
        // There is more to do, but others want their turn.
        Ok(Spun::Busy) => cx.waker().wake_by_ref(),
        Ok(Spun::Idle) | Err(_) => {}
    }
    register(cx.waker());
    go_to_sleep(face, cx);
    match done() {
        Some(value) => {
            budget::spend(WAIT);
            Poll::Ready(value)
        }
        None => Poll::Pending,
    }
}

/// Waits until `done` gives something, which depends on memory of this rank that others write past the engine. `watched`
/// is kept for the next poll; whether the memory is still there is the caller's business.
///
/// Whoever writes with a look at the doorbell wakes the task, as everybody does but the rank itself; what is written without
/// one is seen within milliseconds.
#[inline]
pub fn poll_memory<F: Face, R>(
    face: &F,
    cx: &mut TaskContext<'_>,
    memory: SharedSlice,
    watched: &mut Option<std::sync::Arc<Watched>>,
    mut done: impl FnMut() -> Option<R>,
) -> Poll<R> {
    ready!(budget::proceed(cx));
    let shared = face.shared();
    let spun = match done() {
        Some(value) => {
            budget::spend(ACCESS);
            Ok(Spun::Done(value))
        }
        None => {
            // Who waited for a put answers with one.
            let mut done = || done().inspect(|_| fetch_recent());
            let advances = shared.memory_wait_begins();
            let found = if advances { None } else { look_before_all_else(shared, &mut done) };
            match found {
                Some(value) => {
                    shared.attend();
                    budget::spend(QUICK_WAIT);
                    Ok(Spun::Done(value))
                }
                None => {
                    match face.enter(|engine| spin_on_memory(shared, engine, advances, YIELDED, &mut done)) {
                        Ok(spun) => Ok(spun),
                        Err(_) => look_for_a_while(shared, &mut done).map(Spun::Done).ok_or(()),
                    }
                }
            }
        }
    };
    match spun {
        Ok(Spun::Done(value)) => {
            // Something has come in, though it was no event.
            if shared.spun.load(Ordering::Relaxed) {
                shared.spun.store(false, Ordering::Relaxed);
            }
            shared.hand_over(Rest::UntilAttended);
            return Poll::Ready(value);
        }
        // There is more to do, but others want their turn.
        Ok(Spun::Busy) => cx.waker().wake_by_ref(),
        // Whoever owns the context may never run what is posted to it, and goes to sleep through its own face only.
        Err(()) if shared.owned.load(Ordering::Acquire) && !face.owns() => {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Ok(Spun::Idle) | Err(()) => {}
    }
    watch(face, cx, memory, watched);
    go_to_sleep(face, cx);
    match done() {
        Some(value) => {
            budget::spend(WAIT);
            Poll::Ready(value)
        }
        None => Poll::Pending,
    }
}

/// Looks for a bounded time, advancing the engine now and then, whether `done` gives something that depends on what others
/// write past the engine. `Ready(None)`: that was in vain, and whoever waits goes on by another way, because nobody wakes
/// it for this. `first`: look at the engine first. `since` is kept for the next poll.
#[inline]
pub fn poll_look<F: Face, R>(
    face: &F,
    cx: &mut TaskContext<'_>,
    first: bool,
    since: &mut Option<Duration>,
    mut done: impl FnMut() -> Option<R>,
) -> Poll<Option<R>> {
    ready!(budget::proceed(cx));
    let shared = face.shared();
    // The last spin was in vain, and nothing has come in since.
    let tired = shared.spun.load(Ordering::Relaxed);
    let mut found = done();
    if found.is_none() && !first && shared.spin != Spin::Yield {
        found = (0..AT_ONCE).find_map(|_| done());
    }
    let spun = match found {
        Some(value) if !first => {
            budget::spend(QUICK_WAIT);
            Ok(Spun::Done(value))
        }
        Some(value) => {
            budget::spend(QUICK_WAIT);
            // Where somebody else is at the engine, that one does it.
            let _looked = face.enter(|engine| {
                shared.advance(engine);
                engine.found_memory_changed();
            });
            Ok(Spun::Done(value))
        }
        None => match face.enter(|engine| {
            let advances = shared.memory_wait_begins();
            spin_on_memory(shared, engine, advances, SLICE, &mut done)
        }) {
            Ok(spun) => Ok(spun),
            // Somebody else is at the engine, or owns it and has to get back to it.
            Err(_) => look_a_little(shared, &mut done).map(Spun::Done).ok_or(()),
        },
    };
    match spun {
        Ok(Spun::Done(value)) => {
            if shared.spun.load(Ordering::Relaxed) {
                shared.spun.store(false, Ordering::Relaxed);
            }
            shared.hand_over(Rest::UntilAttended);
            Poll::Ready(Some(value))
        }
        Ok(Spun::Busy) => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
        Ok(Spun::Idle) if shared.spin == Spin::Yield && !tired => {
            // Those who are waited for may have got no core yet. They go on as long as this rank goes on giving its own away.
            let now = shared.sysdep.now();
            if now - *since.get_or_insert(now) >= MOST_YIELDED {
                budget::spend(WAIT);
                return Poll::Ready(None);
            }
            shared.spun.store(false, Ordering::Relaxed);
            // It looks again at once: for the driver to arm meanwhile, which costs a membarrier, would be in vain.
            let _looked = face.enter(Engine::found_memory_changed);
            cx.waker().wake_by_ref();
            Poll::Pending
        }
        Ok(Spun::Idle) | Err(()) => {
            budget::spend(WAIT);
            shared.hand_over(Rest::UntilIdle);
            Poll::Ready(None)
        }
    }
}

/// The task is about to sleep, and has registered where it is woken. Nobody looks on its behalf any more: the driver does.
fn go_to_sleep<F: Face>(face: &F, cx: &mut TaskContext<'_>) {
    if !face.sleep(cx.waker()) {
        cx.waker().wake_by_ref();
    }
    face.shared().hand_over(Rest::UntilIdle);
}

#[cold]
fn watch<F: Face>(
    face: &F,
    cx: &mut TaskContext<'_>,
    memory: SharedSlice,
    watched: &mut Option<std::sync::Arc<Watched>>,
) {
    let watched = match watched {
        Some(watched) => {
            watched.renew(cx.waker());
            watched
        }
        None => watched.insert(Watched::new(memory, cx.waker())),
    };
    if watched.list() {
        return;
    }
    let shared = face.shared();
    let now = shared.now_ms();
    let (list, owner) = (watched.clone(), shared.clone());
    let list = move |engine: &mut Engine| {
        owner.set_watching(true);
        engine.watch(list, now);
        // It arms anew, and may have to look sooner than it meant to.
        owner.driver.wake();
    };
    if let Err(list) = face.enter(list) {
        Handle::of(face).post_work(Work::Enter(Box::new(list)));
    }
}

/// Looks at memory for some microseconds.
fn look_a_little<R>(shared: &Shared, done: &mut impl FnMut() -> Option<R>) -> Option<R> {
    let looks = if shared.spin == Spin::Yield { 2 * YIELDS } else { LOOKS };
    let found = (0..looks).find_map(|_| {
        match shared.spin {
            Spin::Yield => shared.sysdep.yield_now(),
            Spin::For(_) => spin_loop(),
        }
        done()
    });
    if found.is_some() {
        budget::spend(WAIT);
    }
    found
}

/// Looks at memory as long as a spin lasts, though somebody else is at the engine.
fn look_for_a_while<R>(shared: &Shared, done: &mut impl FnMut() -> Option<R>) -> Option<R> {
    let until = shared.sysdep.now() + shared.spin.limit();
    loop {
        for _ in 0..LOOKS {
            if let Some(value) = done() {
                budget::spend(WAIT);
                return Some(value);
            }
            spin_loop();
        }
        if shared.sysdep.now() >= until {
            return None;
        }
    }
}

impl Shared {
    /// A wait on memory begins: whether it is to look at what comes in before it looks at the memory. Most look there only
    /// when the memory does not change soon. What two threads count at once may be counted once.
    #[inline]
    fn memory_wait_begins(&self) -> bool {
        let waits = self.waits.load(Ordering::Relaxed).wrapping_add(1);
        self.waits.store(waits, Ordering::Relaxed);
        waits.is_multiple_of(ADVANCING_WAITS)
    }
}

/// The first looks at memory of a wait, past the engine: what is being written now is found without entering and leaving it.
#[inline]
fn look_before_all_else<R>(shared: &Shared, done: &mut impl FnMut() -> Option<R>) -> Option<R> {
    let looks = if shared.spin == Spin::Yield { 0 } else { AT_ONCE_PAUSED };
    (0..looks).find_map(|_| {
        spin_loop();
        done()
    })
}

/// As [`spin`], with the eyes on memory, and now and then on what comes in. `advances`: on what comes in first.
fn spin_on_memory<R>(
    shared: &Shared,
    engine: &mut Engine,
    mut advances: bool,
    yielded: Duration,
    done: &mut impl FnMut() -> Option<R>,
) -> Spun<R> {
    let (mut until, mut busy) = (None, Busy::default());
    let woken = shared.woken();
    loop {
        let mut moved = std::mem::replace(&mut advances, true) && shared.advance(engine) > 0;
        for _ in 0..LOOKS {
            if let Some(value) = done() {
                // The driver is not to fall asleep between two of a row of these.
                engine.found_memory_changed();
                spent(shared, until.is_some() || busy.rounds > 0);
                return Spun::Done(value);
            }
            if moved || shared.spin == Spin::Yield {
                break;
            }
            // Messages are not to wait for the end of these looks: it has a pause of its own.
            if engine.glance(1) {
                moved = shared.advance(engine) > 0;
                break;
            }
        }
        if shared.cell.has_work() {
            return Spun::Busy;
        }
        if moved {
            if engine.take_started() || shared.woken() != woken {
                return Spun::Busy;
            }
            // A rank that is asked for something goes on looking.
            until = None;
            if busy.is_enough(shared) {
                return Spun::Busy;
            }
            continue;
        }
        let limit = match shared.spin {
            Spin::For(limit) => limit,
            Spin::Yield => yielded,
        };
        if shared.spun.load(Ordering::Relaxed) {
            return Spun::Idle;
        }
        if shared.spin == Spin::Yield {
            shared.sysdep.yield_now();
        }
        let now = shared.sysdep.now();
        if now >= *until.get_or_insert(now + limit) {
            shared.spun.store(true, Ordering::Relaxed);
            return Spun::Idle;
        }
    }
}

/// Waits for a ticket's outcome.
///
/// # Examples
/// ```
/// # use posthaste_core::inprocess::InProcessFabric;
/// # use posthaste_core::messager::ClientParts;
/// # use posthaste_core::sysdep::Personality;
/// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
/// # let client = Client::new(ClientParts {
/// #     id: ClientId(0),
/// #     devices: vec![InProcessFabric::new(shape).device(ClientId(0), Rank(0))],
/// #     sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
/// #     config: Default::default(),
/// #     spin: None,
/// #     driver_thread: false,
/// # })?;
/// # client.open().await?;
/// use posthaste_core::context::{Face, poll_ticket};
/// use posthaste_core::Value;
/// use std::future::poll_fn;
///
/// let handle = &client.contexts()[0];
/// // An operation of one's own: begun here, ended by whoever is told its ticket.
/// let ticket = handle.enter(|engine| engine.scope().operation(None)).ok().expect("it is free")?;
/// handle.post_run(move |scope| {
///     scope.complete(ticket, Ok(Value::copy(b"ended")));
/// });
/// let value = poll_fn(|cx| poll_ticket(handle, cx, ticket)).await?;
/// assert_eq!(value.as_bytes(), b"ended");
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[inline]
pub fn poll_ticket<F: Face>(face: &F, cx: &mut TaskContext<'_>, ticket: Ticket) -> Poll<Outcome> {
    ready!(budget::proceed(cx));
    let shared = face.shared();
    let spun = face.enter(|engine| spin(shared, engine, &mut |engine: &mut Engine| engine.take(ticket)));
    wait_on(face, cx, ticket, spun.unwrap_or(Spun::Idle))
}

/// How an operation that was started under the token got on.
#[derive(Debug)]
pub enum Begun<E> {
    /// It was not started.
    Not(E),
    /// It has ended.
    Ended(Outcome),
    /// It goes on under this ticket, and whoever waits for it goes on from there.
    Pending(Ticket, Turn),
}

/// Starts an operation and spins for its end, all under one take of the token, unless others are to begin first. `None`: it is
/// in use, and nothing was done.
#[inline]
pub fn begin<F: Face, E>(
    face: &F,
    start: impl FnOnce(&mut Scope<'_>) -> Result<Ticket, E>,
) -> Option<Begun<E>> {
    let shared = face.shared();
    face.enter(|engine| match start(&mut engine.scope()) {
        Err(not) => Begun::Not(not),
        Ok(ticket) => {
            let mut turn = Turn::first();
            if !turn.is_to_look(face) {
                return Begun::Pending(ticket, turn);
            }
            match spin(shared, engine, &mut |engine: &mut Engine| engine.take(ticket)) {
                Spun::Done(outcome) => Begun::Ended(outcome),
                Spun::Idle => Begun::Pending(ticket, turn),
                Spun::Busy => Begun::Pending(ticket, Turn::steps_aside()),
            }
        }
    })
    .ok()
}

#[inline]
fn wait_on<F: Face>(
    face: &F,
    cx: &mut TaskContext<'_>,
    ticket: Ticket,
    spun: Spun<Outcome>,
) -> Poll<Outcome> {
    match spun {
        Spun::Done(outcome) => return Poll::Ready(outcome),
        // There is more to do, but others want their turn.
        Spun::Busy => cx.waker().wake_by_ref(),
        Spun::Idle => {}
    }
    let waited = face.shared().slots.poll(ticket, cx);
    if waited.is_ready() {
        budget::spend(WAIT);
    } else {
        go_to_sleep(face, cx);
    }
    waited
}

/// How long things have kept coming in that are not what a spin waits for.
#[derive(Default)]
struct Busy {
    rounds: u32,
    until: Option<Duration>,
}

impl Busy {
    /// Counts a round with something to do; whether it is time for other tasks of the runtime.
    #[inline]
    fn is_enough(&mut self, shared: &Shared) -> bool {
        self.rounds += 1;
        if !self.rounds.is_multiple_of(BUSY_ROUNDS) {
            return false;
        }
        shared.attend();
        let now = shared.sysdep.now();
        now >= *self.until.get_or_insert(now + shared.spin.limit())
    }
}

/// A spin has ended well: whether that took long, by the clock that it looked at or by what else came in.
#[inline]
fn spent(shared: &Shared, long: bool) {
    shared.attend();
    shared.hand_over(Rest::UntilAttended);
    budget::spend(if long || shared.spin == Spin::Yield { WAIT } else { QUICK_WAIT });
}

/// How a spin ended.
pub(super) enum Spun<R> {
    /// The budget is spent.
    Done(R),
    /// Nothing came for as long as a spin may last.
    Idle,
    /// Things keep coming in that are not what is waited for.
    Busy,
}

/// Advances until `done` gives something, for a bounded time. What is there already is found at the first go.
#[inline(always)]
pub(super) fn spin<R>(
    shared: &Shared,
    engine: &mut Engine,
    done: &mut impl FnMut(&mut Engine) -> Option<R>,
) -> Spun<R> {
    let (received, woken) = (engine.stats().bytes_received, shared.woken());
    let events = shared.advance(engine);
    match done(engine) {
        Some(value) => {
            spent(shared, false);
            Spun::Done(value)
        }
        None => spin_on(shared, engine, done, events, (received, woken)),
    }
}

/// Goes on behind the first go, which found so many events; so many bytes had been received before it, and so many tasks woken.
#[inline(never)]
fn spin_on<R>(
    shared: &Shared,
    engine: &mut Engine,
    done: &mut impl FnMut(&mut Engine) -> Option<R>,
    mut events: usize,
    (mut received, woken): (u64, u32),
) -> Spun<R> {
    let (mut rounds, mut vain) = (0u32, 0u32);
    let (mut until, mut busy) = (None, Busy::default());
    let mut patience = Duration::ZERO;
    loop {
        // Posted work is run by the caller when it gives the token back.
        if shared.cell.has_work() {
            return Spun::Busy;
        }
        if events > 0 {
            // What has come in concerns others, who may wait for this thread.
            if engine.take_started() || shared.woken() != woken {
                return Spun::Busy;
            }
            rounds = 0;
            until = None;
            let bytes = engine.stats().bytes_received.wrapping_sub(received);
            received = received.wrapping_add(bytes);
            patience = self::patience(bytes);
            if busy.rounds >= STREAM && events < FEW {
                // Who sends one after the other gets on with a line while nobody looks at it.
                for _ in 0..BREATH {
                    spin_loop();
                }
            }
            if busy.is_enough(shared) {
                return Spun::Busy;
            }
            events = shared.advance(engine);
        } else {
            if shared.spun.load(Ordering::Relaxed) {
                return Spun::Idle;
            }
            match shared.spin {
                Spin::Yield => {
                    rounds += 1;
                    if rounds > YIELDS {
                        shared.spun.store(true, Ordering::Relaxed);
                        return Spun::Idle;
                    }
                    shared.sysdep.yield_now();
                    events = shared.advance(engine);
                }
                Spin::For(limit) => {
                    let come = shared.linger(engine, LOOKS);
                    events = come.unwrap_or(0);
                    vain += u32::from(events == 0);
                    rounds += if come.is_some() { 1 } else { LOOKS };
                    if events == 0 && rounds >= LOOKS {
                        rounds = 0;
                        let now = shared.sysdep.now();
                        if now >= *until.get_or_insert(now + limit + patience) {
                            shared.spun.store(true, Ordering::Relaxed);
                            return Spun::Idle;
                        }
                        // Those looks were at what came last; there may be something else.
                        events = shared.advance(engine);
                    }
                }
            }
        }
        if let Some(value) = done(engine) {
            spent(shared, until.is_some() || busy.rounds > 0);
            if vain >= SLOW {
                shared.overlap.was_slow();
            }
            return Spun::Done(value);
        }
    }
}
