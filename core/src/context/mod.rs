//! A context: one progress engine, its two faces, and the driver that keeps it moving.
//!
//! * A [`Handle`] works from anywhere and pays for the progress token.
//! * An owned [`Context`] keeps the token for as long as it lives and pays nothing.
//!
//! A future that waits advances the engine itself and spins for a short bounded time before it goes to sleep. The
//! [`Driver`] of the context is always in one of two states, so that no wake-up is lost: *active*, when the runtime
//! will poll it again in any case, or *armed*, when peers ring the doorbell it sleeps on.

mod drive;
mod driver;
mod handle;
mod kin;
mod overlap;
mod owned;
mod parking;
mod reliance;
mod rest;
mod wait;

pub use drive::{Drive, drive};
pub use driver::Driver;
pub use handle::Handle;
pub use kin::{Kin, Watchers};
pub use overlap::Turn;
pub use owned::Context;
pub use wait::{Begun, begin, poll_look, poll_memory, poll_ticket, poll_until};

use crate::device::Doorbell;
use crate::engine::{Engine, Scope, Work};
use crate::ids::Endpoint;
use crate::passage::Seat;
use crate::slot::SlotPool;
use crate::sync::{Arc, LightFence, Mutex, lock};
use crate::sysdep::Sysdep;
use crate::token::{BIAS_AFTER, Guard, TokenCell};
use atomic_waker::AtomicWaker;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Packets drained per call of `advance`.
const BUDGET: usize = 256;
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
    /// The owner has posted something while it was there, and its tasks that sleep were not told.
    untold: AtomicBool,
    light: LightFence,
    slots: Arc<SlotPool>,
    doorbell: std::sync::Arc<dyn Doorbell>,
    sysdep: std::sync::Arc<dyn Sysdep>,
    me: Endpoint,
    spin: Spin,
    /// A spin was in vain and nothing has come in since.
    spun: AtomicBool,
    /// How often handlers have woken tasks past the completion slots. Written under the token.
    woken: AtomicU32,
    driver: AtomicWaker,
    /// The millisecond at which the driver's timer goes off.
    timer_at: AtomicU64,
    closed: AtomicBool,
    /// An owned context has the token for good; its futures do the driver's work.
    owned: AtomicBool,
    /// Tasks of the owner that sleep; the driver wakes them when the bell rings.
    parking: parking::Parking,
    /// What drives of the owner were woken by, for the next.
    spare: Mutex<Vec<std::sync::Arc<drive::Driven>>>,
    /// The bell rang: whoever rang has disarmed it, and the engine has yet to be told.
    rung: AtomicBool,
    /// Tasks wait on memory, or did a moment ago.
    watching: AtomicBool,
    /// Waits on memory that have begun, roughly.
    waits: AtomicU32,
    /// Waits, of any kind, that have looked until they ended, roughly: as long as there are more, the driver stays awake.
    attended: AtomicU32,
    reliance: reliance::Reliance,
    overlap: overlap::Overlap,
    resting: rest::Resting,
    kin: std::sync::Arc<Kin>,
    /// There are others.
    has_kin: bool,
    /// By target: in which order sequential sends to it are taken, one at a time. Made where they are asked for.
    lines: Mutex<HashMap<Endpoint, std::sync::Arc<Semaphore>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("me", &self.me).field("closed", &self.closed).finish_non_exhaustive()
    }
}

/// Behind a panic with the token, which is free again: what others have posted meanwhile is done.
struct Unwound<'s>(&'s Shared);

impl Drop for Unwound<'_> {
    #[cold]
    fn drop(&mut self) {
        if self.0.cell.has_work() {
            match self.0.cell.try_take() {
                Some(guard) => self.0.leave(guard),
                // Whoever has it looks, but for one who keeps it and may sleep.
                None => self.0.work_posted(),
            }
        }
    }
}

impl Shared {
    /// Ranks of the job.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.sysdep.personality().shape.ranks
    }

    /// Contexts of each of their clients.
    #[must_use]
    pub fn contexts(&self) -> u16 {
        self.sysdep.personality().shape.contexts
    }

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
            untold: AtomicBool::new(false),
            light: LightFence::beside(&*sysdep),
            slots,
            doorbell,
            sysdep,
            me,
            spin,
            spun: AtomicBool::new(false),
            woken: AtomicU32::new(0),
            driver: AtomicWaker::new(),
            timer_at: AtomicU64::new(u64::MAX),
            closed: AtomicBool::new(false),
            owned: AtomicBool::new(false),
            parking: parking::Parking::new(),
            spare: Mutex::default(),
            rung: AtomicBool::new(false),
            watching: AtomicBool::new(false),
            waits: AtomicU32::new(0),
            attended: AtomicU32::new(0),
            reliance: reliance::Reliance::default(),
            overlap: overlap::Overlap::default(),
            resting: rest::Resting::default(),
            has_kin: kin.count() > 1,
            lines: Mutex::default(),
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

    /// The line in which sequential sends to that target wait for their turn: a fair semaphore of one permit, which is closed
    /// with the context.
    #[must_use]
    pub fn line_to(&self, target: Endpoint) -> std::sync::Arc<Semaphore> {
        let new = || std::sync::Arc::new(Semaphore::new(1));
        let line = lock(&self.lines).entry(target).or_insert_with(new).clone();
        if self.is_closed() {
            line.close();
        }
        line
    }

    /// Who waits in a line of a context that is closed is told so, even if the one whose turn it is was forgotten.
    fn close_lines(&self) {
        let lines: Vec<_> = lock(&self.lines).values().cloned().collect();
        // Not under the lock: whoever waits is woken, and may go on there and then.
        lines.iter().for_each(|line| line.close());
    }

    /// Whether the context is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Posted work has to be seen by whoever has the token. An owner that is inside, and posts there, may hold a lock that whoever is
    /// woken wants: all are [told](Self::tell_owner) when it has come out.
    fn work_posted(&self) {
        if !self.owned.load(Ordering::Acquire) {
            return;
        }
        if self.cell.is_adopted_here() {
            self.untold.store(true, Ordering::Relaxed);
        } else {
            self.parking.wake_all();
        }
    }

    /// Something was posted by the owner, which was inside then and is not any more.
    #[inline]
    fn tell_owner(&self) {
        // Who is inside writes this, and nobody else.
        if self.untold.load(Ordering::Relaxed) {
            self.untold.store(false, Ordering::Relaxed);
            self.parking.wake_all();
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
            // It has to be armed once more, now for room, too.
            self.arm_again();
        }
    }

    /// The token of an owner that lends it. Nothing is done before what was posted earlier.
    #[cold]
    fn enter_borrowed<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F> {
        let Some(mut guard) = self.cell.borrow() else { return Err(f) };
        let sitting = self.seat.take(self.light);
        self.run_posted(&mut guard);
        let result = self.inside(guard, f);
        drop(sitting);
        self.tell_owner();
        Ok(result)
    }

    /// Does something with the token and gives that back.
    #[inline(always)]
    fn inside<R>(&self, guard: Guard<'_, Engine, Work>, f: impl FnOnce(&mut Engine) -> R) -> R {
        // Dropped behind the guard, and only if it panics.
        let unwound = Unwound(self);
        let mut guard = guard;
        let result = f(guard.get());
        std::mem::forget(unwound);
        self.leave(guard);
        result
    }

    #[cold]
    fn run_posted(&self, guard: &mut Guard<'_, Engine, Work>) {
        for work in guard.take_work() {
            self.run(guard.get(), work);
        }
    }

    /// Does with the token what would else be posted, and gives that back.
    fn run_now(&self, mut guard: Guard<'_, Engine, Work>, run: impl FnOnce(&mut Scope<'_>)) {
        let engine = guard.get();
        engine.run_once(run);
        self.after_events(engine);
        self.tell_kin();
        self.leave(guard);
    }

    fn run(&self, engine: &mut Engine, work: Work) {
        engine.run(work);
        self.after_events(engine);
        self.tell_kin();
    }

    /// How often what came in has woken tasks, which may wait for this thread.
    #[inline]
    fn woken(&self) -> u32 {
        self.slots.wakes().wrapping_add(self.woken.load(Ordering::Relaxed))
    }

    /// Something happened: whoever sleeps has to look after what follows from it.
    #[inline]
    fn after_events(&self, engine: &mut Engine) {
        if self.spun.load(Ordering::Relaxed) {
            self.spun.store(false, Ordering::Relaxed);
        }
        if engine.disarm() {
            self.arm_again();
        }
    }

    /// The promise to ring is taken back: whoever sleeps on it has to look, and to ask for another. Of an owner that is all tasks
    /// that sleep: the one that took it back may be done, and sleep no more.
    #[cold]
    #[inline(never)]
    fn arm_again(&self) {
        self.driver.wake();
        if self.owned.load(Ordering::Acquire) {
            self.parking.wake_all();
        }
    }

    /// Whether this thread is amid moving the context, as a handler of it is.
    fn is_advanced_here(&self) -> bool {
        std::ptr::eq(ADVANCING.get(), self)
    }

    fn advance(&self, engine: &mut Engine) -> usize {
        let advancing = Advancing::begin(self);
        let events = engine.advance(BUDGET);
        drop(advancing);
        self.advanced(engine, events)
    }

    /// As [`advance`](Self::advance) as soon as there is something to drain; `None` if there was nothing for so many looks.
    #[inline(always)]
    fn linger(&self, engine: &mut Engine, looks: u32) -> Option<usize> {
        let advancing = Advancing::begin(self);
        let events = engine.linger(looks, BUDGET);
        drop(advancing);
        Some(self.advanced(engine, events?))
    }

    #[inline(always)]
    fn advanced(&self, engine: &mut Engine, events: usize) -> usize {
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
        // `LocalKey::set` is not inlined, and this is in the way of every message.
        ADVANCING.with(|advancing| advancing.set(self.before));
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

/// How much longer to look for more after so many bytes have come in.
fn patience(bytes: u64) -> Duration {
    MOST_PATIENCE.min(Duration::from_nanos(bytes / BYTES_PER_NS))
}
