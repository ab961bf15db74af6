//! A context: one progress engine, its two faces, and the driver that keeps it moving.
//!
//! * A [`Handle`] works from anywhere and pays for the progress token.
//! * An owned [`Context`] keeps the token for as long as it lives and pays nothing.
//!
//! A future that waits advances the engine itself and spins for a short bounded time before it goes to sleep. The
//! [`Driver`] of the context is always in one of two states, so that no wake-up is lost: *active*, when the runtime
//! will poll it again in any case, or *armed*, when peers ring the doorbell it sleeps on.

mod driver;
mod kin;
mod reliance;
mod wait;

pub use driver::Driver;
pub use kin::{Kin, Watchers};
pub use wait::{Begun, Drive, begin, drive, poll_look, poll_memory, poll_ticket, poll_until};

use crate::device::Doorbell;
use crate::engine::{Engine, Scope, Work};
use crate::ids::Endpoint;
use crate::passage::{self, Seat};
use crate::slot::{SlotPool, Ticket};
use crate::stats::Stats;
use crate::sync::{Arc, LightFence, Mutex, lock};
use crate::sysdep::Sysdep;
use crate::token::{BIAS_AFTER, Guard, TokenCell};
use atomic_waker::AtomicWaker;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

/// Packets drained per call of `advance`.
const BUDGET: usize = 256;
/// Sleeping tasks of an owned context that are remembered.
const PARKED: usize = 1024;
/// Who has sent much takes as long to write as much again: a spin that began with a long message lasts longer, by the
/// time in which a slow sender writes so many bytes.
const BYTES_PER_NS: u64 = 4;
/// By at most this.
const MOST_PATIENCE: Duration = Duration::from_millis(1);

/// How a waiting future passes the time before it goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// Every rank has a core: poll for this long.
    For(Duration),
    /// Ranks share cores: give the core away a few times.
    Yield,
}

impl Spin {
    /// For how long to keep looking; 0 where ranks share cores.
    fn limit(self) -> Duration {
        match self {
            Spin::For(limit) => limit,
            Spin::Yield => Duration::ZERO,
        }
    }
}

/// What the two faces and the driver of a context share.
pub struct Shared {
    cell: TokenCell<Engine, Work>,
    /// The owner is at the engine, if there is one.
    seat: Seat,
    light: LightFence,
    slots: Arc<SlotPool>,
    doorbell: std::sync::Arc<dyn Doorbell>,
    sysdep: std::sync::Arc<dyn Sysdep>,
    me: Endpoint,
    spin: Spin,
    /// A spin was in vain and nothing has come in since.
    spun: AtomicBool,
    driver: AtomicWaker,
    /// The millisecond at which the driver's timer goes off.
    timer_at: AtomicU64,
    closed: AtomicBool,
    /// An owned context has the token for good; its futures do the driver's work.
    owned: AtomicBool,
    /// Tasks of the owner that sleep; the driver wakes them when the bell rings.
    parked: Mutex<Vec<Waker>>,
    /// The bell rang: whoever rang has disarmed it, and the engine has yet to be told.
    rung: AtomicBool,
    /// Tasks wait on memory, or did a moment ago.
    watching: AtomicBool,
    /// Waits on memory that have begun, roughly.
    waits: AtomicU32,
    /// The last of them that ended past the engine: as long as there are more, the driver stays awake.
    found: AtomicU32,
    reliance: reliance::Reliance,
    kin: std::sync::Arc<Kin>,
    /// There are others.
    has_kin: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("me", &self.me).field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Shared {
    /// Around an engine and the pool that was made with it.
    #[must_use]
    pub fn new(
        engine: Engine,
        slots: Arc<SlotPool>,
        me: Endpoint,
        doorbell: std::sync::Arc<dyn Doorbell>,
        sysdep: std::sync::Arc<dyn Sysdep>,
        spin: Spin,
        kin: std::sync::Arc<Kin>,
    ) -> Arc<Shared> {
        // Without a barrier on another thread's behalf, every take would need a fence of its own: no bias then.
        let cell = if sysdep.fence_is_asymmetric() {
            let fences = sysdep.clone();
            TokenCell::biased(engine, BIAS_AFTER, Box::new(move || fences.heavy_fence()))
        } else {
            TokenCell::new(engine)
        };
        Arc::new(Shared {
            cell,
            seat: Seat::new(),
            light: LightFence::beside(&*sysdep),
            slots,
            doorbell,
            sysdep,
            me,
            spin,
            spun: AtomicBool::new(false),
            driver: AtomicWaker::new(),
            timer_at: AtomicU64::new(u64::MAX),
            closed: AtomicBool::new(false),
            owned: AtomicBool::new(false),
            parked: Mutex::new(Vec::new()),
            rung: AtomicBool::new(false),
            watching: AtomicBool::new(false),
            waits: AtomicU32::new(0),
            found: AtomicU32::new(0),
            reliance: reliance::Reliance::default(),
            has_kin: kin.count() > 1,
            kin,
        })
    }

    /// Milliseconds of the context's clock.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.sysdep.now().as_millis() as u64
    }

    /// This endpoint.
    #[inline]
    #[must_use]
    pub fn me(&self) -> Endpoint {
        self.me
    }

    /// The completion slots of the context.
    #[must_use]
    pub fn slots(&self) -> &SlotPool {
        &self.slots
    }

    /// Whether the context is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The owner of the context sleeps: the waker is called when there is something to do.
    fn park(&self, waker: &Waker) {
        let mut parked = lock(&self.parked);
        if parked.last().is_some_and(|last| last.will_wake(waker)) {
            return;
        }
        // Wakers of one task need not compare equal, so the list is bounded by waking all of them too early.
        let early = if parked.len() >= PARKED { std::mem::take(&mut *parked) } else { Vec::new() };
        parked.push(waker.clone());
        drop(parked);
        early.into_iter().for_each(Waker::wake);
    }

    fn wake_owner(&self) {
        let parked = std::mem::take(&mut *lock(&self.parked));
        for waker in parked {
            waker.wake();
        }
    }

    /// Posted work has to be seen by whoever has the token.
    fn work_posted(&self) {
        if self.owned.load(Ordering::Acquire) {
            self.wake_owner();
        }
    }

    #[inline(always)]
    fn leave(&self, mut guard: Guard<'_, Engine, Work>) {
        if guard.get().sleeps_too_deep() {
            self.wake_deep_sleeper(guard.get());
        }
        guard.finish(|engine, work| self.run(engine, work));
    }

    #[cold]
    fn wake_deep_sleeper(&self, engine: &mut Engine) {
        if engine.disarm() {
            // The driver has to arm once more, now for room, too.
            self.driver.wake();
        }
    }

    /// The token of an owner that lends it. Nothing is done before what was posted earlier.
    #[cold]
    fn enter_borrowed<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F> {
        let Some(mut guard) = self.cell.borrow() else { return Err(f) };
        let sitting = self.seat.take(self.light);
        self.run_posted(&mut guard);
        let result = f(guard.get());
        self.leave(guard);
        drop(sitting);
        Ok(result)
    }

    #[cold]
    fn run_posted(&self, guard: &mut Guard<'_, Engine, Work>) {
        for work in guard.take_work() {
            self.run(guard.get(), work);
        }
    }

    fn run(&self, engine: &mut Engine, work: Work) {
        engine.run(work);
        self.after_events(engine);
        self.tell_kin();
    }

    /// Something happened: a sleeping driver has to look after what follows from it.
    #[inline]
    fn after_events(&self, engine: &mut Engine) {
        if self.spun.load(Ordering::Relaxed) {
            self.spun.store(false, Ordering::Relaxed);
        }
        if engine.disarm() {
            self.driver.wake();
        }
    }

    fn advance(&self, engine: &mut Engine) -> usize {
        let advancing = Advancing::begin(self);
        let events = engine.advance(BUDGET);
        drop(advancing);
        if events > 0 {
            self.after_events(engine);
            self.tell_kin();
        }
        events
    }
}

thread_local! {
    /// The context that this thread advances now, by its address.
    static ADVANCING: Cell<*const Shared> = const { Cell::new(std::ptr::null()) };
}

/// For as long as a thread advances a context.
struct Advancing {
    /// A handler may advance another one.
    before: *const Shared,
}

impl Advancing {
    #[inline(always)]
    fn begin(shared: &Shared) -> Advancing {
        Advancing { before: ADVANCING.replace(shared) }
    }
}

impl Drop for Advancing {
    #[inline(always)]
    fn drop(&mut self) {
        ADVANCING.set(self.before);
    }
}

mod sealed {
    /// Whose `owns` is true really has the token.
    pub trait Sealed {}

    impl<F: Sealed> Sealed for &F {}
    impl Sealed for super::Handle {}
    impl Sealed for super::Context {}
}

/// One of the two faces of a context: a way to its engine. There are no others.
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
/// use posthaste_core::Context;
/// use posthaste_core::context::Face;
///
/// let handle = &client.contexts()[0];
/// // Whoever finds the engine free uses it at once, without waiting.
/// let rank = handle.enter(|engine| engine.scope().me().rank).ok();
/// assert_eq!(rank, Some(Rank(0)));
/// let owner = Context::new(handle).expect("nobody else owns it");
/// assert!(owner.owns() && !handle.owns());
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
pub trait Face: sealed::Sealed {
    /// What the faces share.
    fn shared(&self) -> &Arc<Shared>;

    /// Runs the closure on the engine, unless another thread is at it: then the closure comes back.
    ///
    /// # Errors
    /// With the closure, if the engine is in use.
    fn enter<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F>;

    /// Has the closure run on the engine by whoever is at it now; its result comes through the [`Posted`]. What
    /// [`enter`](Self::enter) refused is done this way.
    fn post<R: Send + 'static>(&self, f: impl FnOnce(&mut Scope<'_>) -> R + Send + 'static) -> Posted<R> {
        post(self.shared(), move |engine| f(&mut engine.scope()))
    }

    /// Whether this face has the token for good, so that nobody else drives the context.
    fn owns(&self) -> bool {
        false
    }

    /// Called before a waiting future goes to sleep; false: it has to look once more.
    fn sleep(&self, waker: &Waker) -> bool {
        let _ = waker;
        true
    }
}

/// The result of work that was posted to a context in use.
///
/// # Panics
/// Where the work did, so does whoever waits for its result.
pub struct Posted<R>(std::sync::Arc<PostedCell<R>>);

struct PostedCell<R> {
    result: std::sync::Mutex<Option<std::thread::Result<R>>>,
    waker: AtomicWaker,
}

impl<R> std::fmt::Debug for Posted<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Posted")
    }
}

impl<R> Posted<R> {
    /// Ready once the work was done. After that it is never ready again.
    pub fn poll(&self, cx: &mut TaskContext<'_>) -> Poll<R> {
        self.0.waker.register(cx.waker());
        let result = match self.0.result.lock() {
            Ok(mut cell) => cell.take(),
            Err(poisoned) => poisoned.into_inner().take(),
        };
        match result {
            None => Poll::Pending,
            Some(Ok(result)) => Poll::Ready(result),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

#[cold]
fn post<R: Send + 'static>(shared: &Shared, f: impl FnOnce(&mut Engine) -> R + Send + 'static) -> Posted<R> {
    let cell =
        std::sync::Arc::new(PostedCell { result: std::sync::Mutex::new(None), waker: AtomicWaker::new() });
    let theirs = cell.clone();
    let work = Work::Enter(Box::new(move |engine| {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(engine)));
        match theirs.result.lock() {
            Ok(mut cell) => *cell = Some(result),
            Err(poisoned) => *poisoned.into_inner() = Some(result),
        }
        theirs.waker.wake();
    }));
    match shared.cell.post(work) {
        Some(guard) => shared.leave(guard),
        None => shared.work_posted(),
    }
    Posted(cell)
}

impl<F: Face> Face for &F {
    #[inline]
    fn shared(&self) -> &Arc<Shared> {
        (**self).shared()
    }

    #[inline]
    fn enter<R, G: FnOnce(&mut Engine) -> R>(&self, f: G) -> Result<R, G> {
        (**self).enter(f)
    }

    fn owns(&self) -> bool {
        (**self).owns()
    }

    fn sleep(&self, waker: &Waker) -> bool {
        (**self).sleep(waker)
    }
}

/// The face that works from anywhere: `Send + Sync + Clone`. Every operation takes the progress token, or posts
/// its work to whoever has it.
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
/// use posthaste_core::context::Face;
/// use std::future::poll_fn;
///
/// let handle = client.contexts()[0].clone();
/// // From any thread: whoever is at the engine does what is posted.
/// let elsewhere = std::thread::spawn(move || handle.post(|scope| scope.me()));
/// let posted = elsewhere.join().expect("it does not panic");
/// let me = poll_fn(|cx| posted.poll(cx)).await;
/// assert_eq!(me, client.contexts()[0].me());
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Face for Handle {
    #[inline]
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    #[inline]
    fn enter<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F> {
        let Some(mut guard) = self.shared.cell.try_take() else { return self.shared.enter_borrowed(f) };
        let result = f(guard.get());
        self.shared.leave(guard);
        Ok(result)
    }
}

/// The face that is owned by one task or thread: `Send`, not `Sync`. It holds the progress token for as long as it
/// lives, so that no operation of it needs a locked instruction. Handles of the same context go on to work: what
/// they want done is posted to this one's owner, who must keep polling futures of the context (or
/// [`Context::advance`]); what the owner [`drive`]s gets to the engine through handles itself.
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
/// use posthaste_core::Context;
///
/// let handle = &client.contexts()[0];
/// let context = Context::new(handle).expect("nobody else owns it");
/// assert!(handle.is_owned() && Context::new(handle).is_none());
/// // What others post is done when the owner looks.
/// let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
/// let tell = done.clone();
/// std::thread::spawn({
///     let handle = handle.clone();
///     move || handle.post_run(move |_| tell.store(true, std::sync::atomic::Ordering::Relaxed))
/// });
/// while !done.load(std::sync::atomic::Ordering::Relaxed) {
///     context.advance();
/// }
/// drop(context); // the driver moves the context again
/// assert!(!handle.is_owned());
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Context {
    handle: Handle,
    /// `Send`, not `Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl Context {
    /// Takes the token for good; `None` if another owned context has it.
    ///
    /// The driver of the context stops driving: the owner's futures do that now.
    #[must_use]
    pub fn new(handle: &Handle) -> Option<Context> {
        // A handle's operation or the driver may hold the token for a moment; an owned context holds it for good.
        for _ in 0..10_000 {
            if let Some(guard) = handle.shared.cell.try_take() {
                guard.keep();
                handle.shared.owned.store(true, Ordering::Release);
                return Some(Context { handle: handle.clone(), one_thread: PhantomData });
            }
            handle.shared.sysdep.yield_now();
        }
        None
    }

    /// Moves everything that can move. Returns the number of events.
    pub fn advance(&self) -> usize {
        self.enter(|engine| self.handle.shared.advance(engine)).unwrap_or(0)
    }

    /// What the context has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.enter(|engine| *engine.stats()).unwrap_or_default()
    }

    /// A face of the same context that works from anywhere.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.handle.shared.owned.store(false, Ordering::Release);
        if let Some(guard) = self.handle.shared.cell.adopt() {
            self.handle.shared.leave(guard.give_up());
        }
        self.handle.shared.driver.wake();
    }
}

impl Face for Context {
    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    #[inline]
    fn enter<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F> {
        let Some(mut guard) = self.handle.shared.cell.adopt() else { return Err(f) };
        // Partner: whoever has posted something that forbids what is to be done here, in `done_or_idle`.
        let _sitting = self.handle.shared.seat.take(self.handle.shared.light);
        // Nothing is done before what was posted earlier, and nothing that was posted meanwhile waits for the next time.
        if self.handle.shared.cell.has_work() {
            self.handle.shared.run_posted(&mut guard);
        }
        let result = f(guard.get());
        if self.handle.shared.cell.has_work() {
            self.handle.shared.run_posted(&mut guard);
        }
        guard.keep();
        Ok(result)
    }

    fn owns(&self) -> bool {
        true
    }

    fn sleep(&self, waker: &Waker) -> bool {
        let shared = &self.handle.shared;
        // First where to be woken, then the promise to be: a ring in between finds the waker.
        shared.park(waker);
        let now = shared.now_ms();
        self.enter(|engine| {
            if engine.next_expiry().is_some() {
                engine.expire(now);
            }
            // A ring takes the promise of another one with it.
            if shared.rung.swap(false, Ordering::AcqRel) {
                engine.disarm();
            }
            // Who is armed already may have been told of nothing since.
            let armed = if engine.is_armed() { !engine.look_at_memory() } else { engine.arm() };
            shared.set_watching(engine.is_watching());
            let at = engine.next_expiry().unwrap_or(u64::MAX);
            if shared.timer_at.swap(at, Ordering::Relaxed) > at {
                shared.driver.wake();
            }
            armed
        })
        .unwrap_or(true)
    }
}

impl Handle {
    /// The face of a context that works from anywhere.
    #[must_use]
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// This endpoint.
    #[must_use]
    pub fn me(&self) -> Endpoint {
        self.shared.me
    }

    /// The completion slots of the context.
    #[must_use]
    pub fn slots(&self) -> &SlotPool {
        &self.shared.slots
    }

    /// Moves everything that can move, if nobody else is at it. Returns the number of events.
    pub fn advance(&self) -> usize {
        self.enter(|engine| self.shared.advance(engine)).unwrap_or(0)
    }

    /// Has the closure run on the engine: at once if it is free, else by whoever is at it.
    pub fn post_run(&self, run: impl FnOnce(&mut Scope<'_>) + Send + 'static) {
        self.post_work(Work::Run(Box::new(run)));
    }

    /// Posts work for the context, from any thread.
    pub fn post_work(&self, work: Work) {
        match self.shared.cell.post(work) {
            Some(guard) => self.shared.leave(guard),
            None => self.shared.work_posted(),
        }
    }

    /// Waits until every thread is past what it does now at memory of others. Whoever calls this has forbidden to begin more of
    /// what he waits for.
    pub async fn vacate_gates(&self) {
        self.shared.sysdep.heavy_fence();
        passage::vacated().await;
    }

    /// Waits until posted work is done, or an owned context's owner, who does not look, is certain to find it before he does
    /// anything else.
    pub(crate) async fn done_or_idle<R>(&self, posted: Posted<R>) {
        loop {
            let done = std::future::poll_fn(|cx| Poll::Ready(posted.poll(cx).is_ready())).await;
            if done {
                return;
            }
            if self.is_owned() {
                self.shared.sysdep.heavy_fence();
                if self.shared.seat.turn().is_none() {
                    return;
                }
            }
            tokio::task::yield_now().await;
        }
    }

    /// Whether an owned [`Context`] has the token for good.
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.shared.owned.load(Ordering::Acquire)
    }

    /// What the context has done so far.
    ///
    /// Where another thread is at the context, it is asked, and waited for up to a second: an owned context answers when its
    /// owner polls. The owner itself asks [`Context::stats`], a handler its [`Scope`]: from there this would wait in vain, and
    /// tell nothing but zeros.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        match self.enter(|engine| *engine.stats()) {
            Ok(stats) => stats,
            Err(_) => {
                self.post_run(move |scope| {
                    // The receiver is gone if it gave up waiting.
                    let _ = sender.send(*scope.stats());
                });
                receiver.recv_timeout(Duration::from_secs(1)).unwrap_or_default()
            }
        }
    }

    /// The handle of the face's context.
    #[must_use]
    pub fn of<F: Face>(face: &F) -> Handle {
        Handle { shared: face.shared().clone() }
    }

    /// What the faces of the context share.
    #[must_use]
    pub fn shared_state(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Has the drivers of this client's contexts look at memory that tasks wait on: this rank has written some itself.
    pub fn rouse(&self) {
        // Partner: the store of `watching` and the last look behind it, of a task that goes to sleep.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.shared.rouse_watchers();
        if self.shared.has_kin {
            self.shared.rouse_kin();
        }
    }

    /// Whether the caller runs inside `advance` of this context, as its handlers do: the token is its thread's meanwhile.
    #[inline]
    #[must_use]
    pub fn is_advanced_here(&self) -> bool {
        std::ptr::eq(ADVANCING.get(), Arc::as_ptr(&self.shared))
    }

    /// How many contexts its client has.
    #[must_use]
    pub fn kin_count(&self) -> u16 {
        self.shared.kin.count()
    }

    /// All contexts of its client, this one among them.
    pub fn all_kin(&self) -> impl Iterator<Item = Handle> {
        self.shared.kin.all().map(Handle::new)
    }

    /// Whether that is a context of the same client.
    #[must_use]
    pub fn is_kin_of(&self, other: &Handle) -> bool {
        Arc::ptr_eq(&self.shared.kin, &other.shared.kin)
    }

    /// Milliseconds of the context's clock.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.shared.now_ms()
    }

    /// The millisecond of the context's clock at which `after` has passed for certain: whole milliseconds are counted, and
    /// the present one may be nearly over.
    #[must_use]
    pub fn deadline_after(&self, after: Duration) -> u64 {
        let wait = u64::try_from(after.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        self.now_ms().saturating_add(wait).saturating_add(1)
    }

    /// Sets a deadline for an operation: at that time its future is woken.
    pub fn set_deadline(&self, at: u64, ticket: Ticket) {
        if self.enter(|engine| engine.scope().deadline(at, ticket)).is_err() {
            self.post_run(move |scope| scope.deadline(at, ticket));
        }
        if at < self.shared.timer_at.load(Ordering::Relaxed) {
            self.shared.driver.wake();
        }
    }

    /// Whether the context is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Ends everything that is pending with [`Fault::Shutdown`](crate::Fault::Shutdown); nothing can be started any more.
    pub fn shut_down(&self) {
        self.shared.closed.store(true, Ordering::Release);
        self.post_work(Work::Shutdown);
        self.shared.driver.wake();
    }
}

/// How much longer to look for more after so many bytes have come in.
fn patience(bytes: u64) -> Duration {
    MOST_PATIENCE.min(Duration::from_nanos(bytes / BYTES_PER_NS))
}
