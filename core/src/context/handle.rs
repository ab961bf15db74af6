//! The face of a context that works from anywhere.

use super::{ADVANCING, Face, Posted, Shared};
use crate::engine::{Engine, Scope, Work};
use crate::ids::Endpoint;
use crate::passage;
use crate::slot::{SlotPool, Ticket};
use crate::stats::Stats;
use crate::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

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
    pub(super) shared: Arc<Shared>,
}

impl Face for Handle {
    #[inline]
    fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    #[inline]
    fn enter<R, F: FnOnce(&mut Engine) -> R>(&self, f: F) -> Result<R, F> {
        let Some(guard) = self.shared.cell.try_take() else { return self.shared.enter_borrowed(f) };
        Ok(self.shared.inside(guard, f))
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
        match self.shared.cell.try_take() {
            Some(guard) => self.shared.run_now(guard, run),
            None => self.post_work(Work::Run(Box::new(run))),
        }
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
    ///
    /// # Cancel safety
    /// Cancel safe: it only waits.
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

    /// Whether an owned [`Context`](super::Context) has the token for good.
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.shared.owned.load(Ordering::Acquire)
    }

    /// What the context has done so far.
    ///
    /// Where another thread is at the context, it is asked, and waited for up to a second: an owned context answers when its
    /// owner polls. The owner itself asks [`Context::stats`](super::Context::stats), a handler its [`Scope`]: from there this would wait in vain, and
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

    /// A handler of this context has woken a task. A future that spins lets the other tasks of its runtime have their turn: this
    /// one may be among them, and would else wait until the spin is over. From elsewhere than within `advance` it does nothing.
    #[inline]
    pub fn woke_task(&self) {
        if !self.is_advanced_here() {
            return;
        }
        let woken = &self.shared.woken;
        woken.store(woken.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
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
        // A driver that rests looks at this time alone.
        let timer = &self.shared.timer_at;
        if at < timer.load(Ordering::Relaxed) && at < timer.fetch_min(at, Ordering::Relaxed) {
            self.shared.driver.wake();
        }
    }

    /// Whether the context is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// The client is opened in that runtime, with which it ends.
    pub(crate) fn opened_in(&self, runtime: &tokio::runtime::Handle) {
        self.shared.kin.opened_in(runtime);
    }

    /// A task of that runtime was dropped amid its work, and peers are about to hear of that. If it is the runtime in which the client
    /// was opened, all that is pending ends first, in all contexts, as it would when the runtime drops their drivers: it must
    /// not end with what peers do because of this. Whether it is.
    pub fn runtime_ends(&self, runtime: &tokio::runtime::Handle) -> bool {
        let is_own = self.shared.kin.is_opened_in(runtime);
        if is_own {
            self.shared.kin.all().for_each(|shared| Handle::new(shared).shut_down());
        }
        is_own
    }

    /// Once the context is closed, and unless somebody is at it: drops what may lead back to it.
    pub(crate) fn retire(&self) {
        if self.is_closed()
            && let Ok(retired) = self.enter(Engine::retire)
        {
            drop(retired);
        }
    }

    /// Ends everything that is pending with [`Fault::Shutdown`](crate::Fault::Shutdown); nothing can be started any more.
    pub fn shut_down(&self) {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.close_lines();
        self.shared.kin.news().notify_waiters();
        self.post_work(Work::Shutdown);
        self.shared.driver.wake();
    }
}
