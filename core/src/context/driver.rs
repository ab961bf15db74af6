//! The driver: keeps a context moving when nobody waits for it, and sleeps on its doorbell.

use super::rest::Attendance;
use super::wait::LOOKS;
use super::{Face, Handle, Shared, Spin, patience};
use crate::engine::Engine;
use crate::sync::Arc;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;
use tracing::Instrument;

/// For how long a round of the driver goes on at most while more and more comes in.
const STAY: Duration = Duration::from_micros(50);

/// For how long a round looks on that follows one in which tasks were started: whoever they have answered is likely to ask
/// again, sooner than a turn of the runtime takes that asks the system for events.
const ASKED_AGAIN: Duration = Duration::from_micros(2);

/// Keeps a context moving when nobody else does. Spawn it on the runtime, or block a thread of its own on it.
pub struct Driver {
    shared: Arc<Shared>,
    events: u64,
    received: u64,
    /// Until when it keeps looking for more before it arms.
    until: Duration,
    multi_thread: bool,
    /// Tasks were started in the last round.
    started: bool,
    /// Since when the runtime has been kept from asking the system for events.
    unasked_since: Option<Duration>,
    attendance: Attendance,
    sleep: Pin<Box<tokio::time::Sleep>>,
    sleeping_until: Option<u64>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("me", &self.shared.me).finish_non_exhaustive()
    }
}

impl Driver {
    /// The driver of a context. Must be made inside a Tokio runtime with time enabled.
    #[must_use]
    pub fn new(handle: &Handle) -> Self {
        let multi_thread = tokio::runtime::Handle::try_current()
            .is_ok_and(|handle| handle.runtime_flavor() == tokio::runtime::RuntimeFlavor::MultiThread);
        Self {
            shared: handle.shared.clone(),
            events: 0,
            received: 0,
            until: Duration::ZERO,
            multi_thread,
            started: false,
            unasked_since: None,
            attendance: Attendance::new(),
            sleep: Box::pin(tokio::time::sleep(Duration::from_secs(3600))),
            sleeping_until: None,
        }
    }

    /// Sleeps until the next deadline at the latest.
    fn poll_timer(&mut self, cx: &mut TaskContext<'_>, now: u64, at: Option<u64>) -> bool {
        let Some(at) = at else {
            self.sleeping_until = None;
            return false;
        };
        if self.sleeping_until != Some(at) {
            let wait = Duration::from_millis(at.saturating_sub(now).max(1));
            self.sleep.as_mut().reset(tokio::time::Instant::now() + wait);
            self.sleeping_until = Some(at);
        }
        if self.sleep.as_mut().poll(cx).is_ready() {
            self.sleeping_until = None;
            return true;
        }
        false
    }

    /// Drives the context until it is closed.
    ///
    /// # Cancel safety
    /// Dropping the future closes the context: nobody would end what is pending.
    pub async fn run(self) {
        let span = tracing::debug_span!("driver", rank = %self.shared.me);
        self.drive().instrument(span).await;
    }

    async fn drive(mut self) {
        loop {
            match std::future::poll_fn(|cx| Poll::Ready(self.round(cx))).await {
                Round::Closed => return,
                // Polled again after everything else in the runtime had its turn: progress by others in between shows
                // that the doorbell need not be armed yet.
                Round::Moved => tokio::task::yield_now().await,
                Round::Started => yield_to_ready().await,
                // On a multi-thread runtime, being polled again at once would take a core from the tasks that look.
                Round::OthersMoved if self.multi_thread => {
                    let soon = self.shared.now_ms() + 1;
                    self.sleeping_until = None;
                    self.attendance.rest(&self.shared.resting);
                    self.sleep_until(Some(soon)).await;
                }
                Round::OthersMoved => tokio::task::yield_now().await,
                Round::Armed(at) => {
                    self.sleep_until(at).await;
                }
                Round::Owned => {
                    let at = self.shared.timer_at.load(Ordering::Relaxed);
                    if self.sleep_until((at != u64::MAX).then_some(at)).await {
                        // The owner may have set another meanwhile.
                        let timer = &self.shared.timer_at;
                        let _set = timer.compare_exchange(at, u64::MAX, Ordering::Relaxed, Ordering::Relaxed);
                        self.shared.parking.wake_all();
                    }
                }
            }
        }
    }

    /// Waits for a ring, for being woken, or for the time; true if it was the time.
    async fn sleep_until(&mut self, at: Option<u64>) -> bool {
        let mut first = true;
        std::future::poll_fn(|cx| {
            let now = self.shared.now_ms();
            if self.poll_timer(cx, now, at) {
                return Poll::Ready(true);
            }
            // The second poll means that somebody woke the driver; `round` has registered it for that.
            if !std::mem::replace(&mut first, false) || self.poll_bell(cx) {
                return Poll::Ready(false);
            }
            Poll::Pending
        })
        .await
    }

    /// Takes up rings; true if there was one.
    fn poll_bell(&self, cx: &mut TaskContext<'_>) -> bool {
        let mut rung = false;
        // A ring only says "look"; looking is what follows in any case.
        while let Poll::Ready(ring) = self.shared.doorbell.poll_ring(cx) {
            rung = true;
            if let Err(error) = ring {
                tracing::warn!(me = %self.shared.me, %error, "doorbell broken; polling");
                break;
            }
        }
        if rung {
            self.shared.rung.store(true, Ordering::Release);
        }
        rung
    }

    fn round(&mut self, cx: &mut TaskContext<'_>) -> Round {
        let shared = self.shared.clone();
        shared.driver.register(cx.waker());
        if shared.closed.load(Ordering::Acquire) {
            return Round::Closed;
        }
        let rung = self.poll_bell(cx) | shared.rung.load(Ordering::Acquire);
        if shared.owned.load(Ordering::Acquire) {
            if rung {
                shared.parking.wake_all();
            }
            return Round::Owned;
        }
        let time = shared.sysdep.now();
        let now = time.as_millis() as u64;
        if shared.reliance.take(self.multi_thread) {
            self.until = self.until.max(time + shared.spin.limit());
        }
        if self.attendance.awake(&shared.resting, shared.attended())
            && !rung
            && now < shared.timer_at.load(Ordering::Relaxed)
        {
            // To look whether they do would take their thread's privilege away.
            return Round::OthersMoved;
        }
        shared.overlap.nobody_looks();
        let seen = self.events;
        let handle = Handle { shared: shared.clone() };
        let round = handle.enter(|engine| {
            // A ring takes the promise of another one with it, also when it turns out to have been for nothing.
            if shared.rung.swap(false, Ordering::AcqRel) {
                engine.disarm();
            }
            engine.expire(now);
            let (mut moved, mut started) = advance_while_it_comes(&shared, engine, time);
            if std::mem::take(&mut self.started) && moved == 0 {
                (moved, started) = look_on(&shared, engine, time);
            }
            // On a runtime of several threads whoever wakes itself wakes another thread as well, which takes it away.
            let is_behind_it = !self.multi_thread && started;
            let is_soon = is_behind_it && time - *self.unasked_since.get_or_insert(time) < STAY;
            if !is_soon {
                self.unasked_since = None;
            }
            self.started = started;
            engine.look_at_memory();
            let attended = shared.attended();
            let events = engine.stats().events.wrapping_add(u64::from(attended));
            self.events = events;
            let others_look = self.attendance.others_look(attended, Some(moved > 0));
            if events != seen {
                let bytes = engine.stats().bytes_received.wrapping_sub(self.received);
                self.received = self.received.wrapping_add(bytes);
                self.until = time + shared.spin.limit() + patience(bytes);
            }
            let round = if is_soon {
                Round::Started
            } else if moved > 0 {
                Round::Moved
            } else if events != seen && (others_look || !self.multi_thread) {
                let at = engine.next_expiry();
                shared.timer_at.store(at.unwrap_or(u64::MAX), Ordering::Relaxed);
                Round::OthersMoved
            } else if time < self.until {
                // Nobody waits, or those who do have given up spinning: more is likely to come all the same. Other
                // tasks have their turn after every few looks.
                engine.glance(LOOKS);
                Round::Moved
            } else if engine.is_armed() || engine.arm(now) {
                let at = engine.next_expiry();
                // Before the context is given back: whoever sets a deadline after this sees until when the driver sleeps.
                shared.timer_at.store(at.unwrap_or(u64::MAX), Ordering::Relaxed);
                Round::Armed(at)
            } else {
                Round::Moved
            };
            // Whoever waited may have been told meanwhile in many ways.
            shared.set_watching(engine.is_watching());
            round
        });
        if let Ok(round) = round {
            return round;
        }
        let others_look = self.attendance.others_look(shared.attended(), None);
        if others_look || !self.multi_thread { Round::OthersMoved } else { Round::Moved }
    }
}

/// Moves what can be moved, and looks on for a little where that was something: whoever got an answer is likely to ask again
/// at once, and would else wait for a turn of the runtime, which asks the system for events. Tasks that were woken meanwhile
/// wait for [`STAY`] at most, and for [`LOOKS`] if nothing more comes. How much has moved, and whether tasks were started.
fn advance_while_it_comes(shared: &Shared, engine: &mut Engine, since: Duration) -> (usize, bool) {
    let mut moved = shared.advance(engine);
    // Tasks that handlers have started may wait for this thread.
    let mut started = moved > 0 && engine.take_started();
    let mut goes_on = moved > 0 && !started;
    while goes_on && shared.spin != Spin::Yield && !shared.cell.has_work() {
        let more = shared.linger(engine, LOOKS).unwrap_or(0);
        moved += more;
        // The clock comes behind what was moved: it takes as long as a short answer does.
        started = more > 0 && engine.take_started();
        goes_on = more > 0 && !started && shared.sysdep.now() - since <= STAY;
    }
    (moved, started)
}

/// Looks for a moment whether something comes that starts tasks again.
fn look_on(shared: &Shared, engine: &mut Engine, since: Duration) -> (usize, bool) {
    let (mut moved, mut started) = (0, false);
    while shared.spin != Spin::Yield
        && !started
        && !shared.cell.has_work()
        && shared.sysdep.now() - since <= ASKED_AGAIN
    {
        // Whoever is not looked at by itself is looked at with all others.
        moved += shared.linger(engine, LOOKS).unwrap_or_else(|| shared.advance(engine));
        started = moved > 0 && engine.take_started();
    }
    (moved, started)
}

/// Lets the tasks have their turn that are ready, but does not wait until the runtime has asked the system for events, as
/// [`tokio::task::yield_now`] does: it asks now and then in any case.
async fn yield_to_ready() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// How a round of the driver ended.
enum Round {
    /// There was something to do.
    Moved,
    /// So there was, and tasks were started that have to have their turn.
    Started,
    /// Others made progress since the driver last looked, or are at it now.
    OthersMoved,
    /// The doorbell is armed.
    Armed(Option<u64>),
    /// Somebody owns the context and drives it; the driver passes rings and deadlines on.
    Owned,
    /// The context is closed.
    Closed,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The runtime shuts down, or the job was left: nobody would end what is pending.
        let handle = Handle { shared: self.shared.clone() };
        handle.shut_down();
        handle.retire();
    }
}
