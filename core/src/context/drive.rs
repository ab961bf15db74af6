//! Awaiting, by the owner of a context, what works through handles of it: nobody else drives the context meanwhile.

use super::wait::{BUSY_ROUNDS, Spun, spin};
use super::{Face, Shared};
use crate::engine::Engine;
use crate::sync::lock;
use atomic_waker::AtomicWaker;
use futures::task::{ArcWake, waker_ref};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context as TaskContext, Poll};
use tokio::task::coop::poll_proceed;

/// Awaits any future while driving the face's context. Whoever owns a context drives it: a future that works through a
/// handle of the same context, such as a barrier, gets on only if its owner does this. While the future is polled, handles
/// of the context reach its engine at once on this thread, as if they owned it.
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
/// use posthaste_core::context::{Face, drive};
/// use std::future::poll_fn;
///
/// let handle = &client.contexts()[0];
/// let context = Context::new(handle).expect("nobody else owns it");
/// // A future that works through a handle gets on while the owner drives it.
/// let through_handle = async {
///     let posted = handle.post(|scope| scope.shape().ranks);
///     poll_fn(|cx| posted.poll(cx)).await
/// };
/// assert_eq!(drive(&context, through_handle).await, 1);
/// # drop(context);
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[inline]
pub fn drive<F: Face, T: Future>(face: &F, future: T) -> Drive<'_, F, T> {
    Drive { face, driven: None, future }
}

/// Awaits a future while driving a context; see [`drive`].
///
/// # Cancel safety
/// That of the future.
#[must_use = "a future does nothing until it is awaited"]
#[pin_project::pin_project(PinnedDrop)]
#[derive(Debug)]
pub struct Drive<'f, F: Face, T> {
    face: &'f F,
    /// What the future is woken by, once it was not ready at its first poll.
    driven: Option<Arc<Driven>>,
    #[pin]
    future: T,
}

#[pin_project::pinned_drop]
impl<F: Face, T> PinnedDrop for Drive<'_, F, T> {
    fn drop(self: Pin<&mut Self>) {
        let this = self.project();
        if let Some(driven) = this.driven.take() {
            this.face.shared().leave_driven(driven);
        }
    }
}

/// Kept of those that nobody uses.
const SPARE: usize = 8;

/// What a driven future is woken by. Nothing tells a task amid a poll that it was woken; the owner looks at the engine amid one, and
/// sees here whether its future was woken since, be it by itself, by a handler or by another thread. The task is woken in any case.
#[derive(Debug, Default)]
pub(super) struct Driven {
    wakes: AtomicU32,
    task: AtomicWaker,
}

impl Driven {
    #[inline]
    fn wakes(&self) -> u32 {
        self.wakes.load(Ordering::Acquire)
    }
}

impl ArcWake for Driven {
    fn wake_by_ref(driven: &Arc<Self>) {
        // Release: whoever sees this sees, too, what the future was woken for.
        driven.wakes.fetch_add(1, Ordering::Release);
        driven.task.wake();
    }
}

impl Shared {
    /// Another future may still have what the one before was polled with, and wake whoever has it next for nothing.
    fn take_driven(&self) -> Arc<Driven> {
        lock(&self.spare).pop().unwrap_or_default()
    }

    fn leave_driven(&self, driven: Arc<Driven>) {
        let mut spare = lock(&self.spare);
        if spare.len() < SPARE {
            spare.push(driven);
        }
    }
}

impl<F: Face, T: Future> Future for Drive<'_, F, T> {
    type Output = T::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<T::Output> {
        let this = self.project();
        let (face, driven, mut future) = (*this.face, this.driven, this.future);
        if !face.owns() {
            return future.poll(cx);
        }
        let shared = face.shared();
        let before = Seen::by(shared, driven.as_deref());
        let polled = match driven {
            None => poll_lent(shared, future.as_mut(), cx),
            Some(driven) => {
                driven.task.register(cx.waker());
                let waker = waker_ref(driven);
                poll_lent(shared, future.as_mut(), &mut TaskContext::from_waker(&waker))
            }
        };
        let Poll::Ready(value) = polled else {
            return drive_on(face, driven, future, cx, before);
        };
        if shared.cell.has_work() {
            // Whoever awaits nothing but what is done at once never comes here otherwise.
            let _posted_is_run = face.enter(|_| ());
        }
        Poll::Ready(value)
    }
}

/// Polls what works through handles of a context whose owner this is.
#[inline(always)]
fn poll_lent<T: Future>(shared: &Shared, future: Pin<&mut T>, cx: &mut TaskContext<'_>) -> Poll<T::Output> {
    let lent = shared.cell.lend();
    let polled = future.poll(cx);
    drop(lent);
    polled
}

/// Drives the context of a future that was not ready, and polls it again whenever it was woken or anything has happened since that
/// was seen: apart from the rest, so that one which is ready at once pays for none of this.
#[inline(never)]
fn drive_on<F: Face, T: Future>(
    face: &F,
    driven: &mut Option<Arc<Driven>>,
    mut future: Pin<&mut T>,
    cx: &mut TaskContext<'_>,
    mut seen: Seen,
) -> Poll<T::Output> {
    let shared = face.shared();
    let woken = seen.woken;
    let driven: &Arc<Driven> = match driven {
        Some(driven) => driven,
        None => {
            let driven = driven.insert(shared.take_driven());
            driven.task.register(cx.waker());
            // It was polled with the waker of the task: once more, to be woken by the other.
            seen.wakes = driven.wakes().wrapping_sub(1);
            driven
        }
    };
    let waker = waker_ref(driven);
    for _ in 0..BUSY_ROUNDS {
        if poll_proceed(cx).is_pending() {
            // It may have been told to let others run, and then waits for nothing that happens here. Nobody else drives
            // the context meanwhile.
            let now = shared.now_ms();
            let _driven = face.enter(|engine| {
                engine.expire(now);
                shared.advance(engine)
            });
            return Poll::Pending;
        }
        // It has more to do, and others may wait for what it has done.
        let woke_itself = driven.wakes() != seen.wakes;
        // Until anything at all has happened: the future may be waiting for just that.
        let happened = face.enter(|engine| {
            // Tasks that were started get no turn before this one ends.
            let has_started = |engine: &Engine| engine.starts() != seen.starts;
            if has_started(engine) {
                return Spun::Busy;
            }
            let news = |engine: &mut Engine| {
                (engine.stats().events != seen.events || driven.wakes() != seen.wakes).then_some(())
            };
            match spin(shared, engine, &mut { news }) {
                Spun::Done(()) if has_started(engine) => Spun::Busy,
                spun => spun,
            }
        });
        match happened {
            Ok(Spun::Idle) if face.sleep(cx.waker()) && driven.wakes() == seen.wakes => {
                return Poll::Pending;
            }
            // Others want their turn.
            Ok(Spun::Busy) => break,
            _ => {}
        }
        // Of another thread's: perhaps for another task of this one.
        let woken_elsewhere = !woke_itself && driven.wakes() != seen.wakes;
        seen = Seen::by(shared, Some(driven));
        let polled = poll_lent(shared, future.as_mut(), &mut TaskContext::from_waker(&waker));
        if let Poll::Ready(value) = polled {
            return Poll::Ready(value);
        }
        if woken_elsewhere || shared.woken() != woken {
            // Perhaps that was not what waits here, but another task of this thread.
            break;
        }
    }
    cx.waker().wake_by_ref();
    Poll::Pending
}

/// How far things were when a future was polled.
#[derive(Clone, Copy)]
struct Seen {
    events: u64,
    /// Tasks that handlers have started.
    starts: u32,
    /// Tasks that what came in has woken.
    woken: u32,
    /// Wakes of what is driven.
    wakes: u32,
}

impl Seen {
    /// For the owner; nothing is done, not even what was posted.
    #[inline]
    fn by(shared: &Shared, driven: Option<&Driven>) -> Seen {
        let (events, starts) = shared.cell.adopt().map_or((0, 0), |mut guard| {
            let engine = guard.get();
            let counts = (engine.stats().events, engine.starts());
            guard.keep();
            counts
        });
        Seen { events, starts, woken: shared.woken(), wakes: driven.map_or(0, Driven::wakes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{Context, poll_ticket};
    use crate::inprocess::InProcessFabric;
    use crate::messager::ClientParts;
    use crate::sysdep::Personality;
    use crate::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank, Value};
    use futures::FutureExt;
    use std::cell::{Cell, RefCell};
    use std::future::poll_fn;
    use std::task::Waker;
    use std::time::Duration;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Runs that with an owned context, where who looks does so for an hour, and fails if it takes long.
    fn soon(run: impl AsyncFnOnce(&Context) + Send + 'static) {
        soon_spinning(HOUR, run);
    }

    /// The same where who looks does so for as long.
    fn soon_spinning(spin: Duration, run: impl AsyncFnOnce(&Context) + Send + 'static) {
        let (done, is_done) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
                let client = Client::new(ClientParts {
                    id: ClientId(0),
                    devices: vec![InProcessFabric::new(shape).device(ClientId(0), Rank(0))],
                    sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
                    config: Default::default(),
                    spin: Some(spin),
                    driver_thread: false,
                })
                .expect("it is made");
                client.open().await.expect("it opens");
                let context = Context::new(&client.contexts()[0]).expect("nobody else owns it");
                run(&context).await;
                drop(context);
                client.close().await;
            });
            // Whoever waited for it has given up, if it is gone.
            let _ = done.send(());
        });
        match is_done.recv_timeout(Duration::from_secs(60)) {
            Ok(()) => thread.join().expect("no panic"),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                std::panic::resume_unwind(thread.join().expect_err("it said nothing"))
            }
            Err(error) => panic!("it was not polled: {error}"),
        }
    }

    /// Ready at the poll after so many, each of which wakes it.
    async fn after_polls(count: u32) {
        let mut polls = 0;
        poll_fn(|cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls > count { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[test]
    fn a_future_that_wakes_itself_is_polled_at_once() {
        soon(async |context| {
            drive(context, after_polls(1)).await;
            drive(context, after_polls(10 * BUSY_ROUNDS)).await;
            // And so is one that another drives.
            drive(context, drive(context, after_polls(10 * BUSY_ROUNDS))).await;
        });
    }

    #[test]
    fn a_future_that_another_thread_wakes_is_polled_at_once() {
        // The owner looks by then, most likely, or sleeps; else this shows less.
        for spin in [HOUR, Duration::from_millis(1)] {
            soon_spinning(spin, async |context| {
                let (sender, receiver) = tokio::sync::oneshot::channel();
                let thread = std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(20));
                    sender.send(7).expect("somebody waits");
                });
                assert_eq!(drive(context, receiver).await.expect("it was sent"), 7);
                thread.join().expect("no panic");
            });
        }
    }

    /// What one driven future does wakes another, behind which it is polled and which is not driven by the same.
    #[test]
    fn a_wake_amid_another_drive_is_not_lost() {
        soon(async |context| {
            let (waker, is_woken) = (RefCell::new(None::<Waker>), Cell::new(false));
            let waits = poll_fn(|cx| {
                *waker.borrow_mut() = Some(cx.waker().clone());
                if is_woken.get() { Poll::Ready(()) } else { Poll::Pending }
            });
            let mut polls = 0;
            let wakes = poll_fn(|cx| {
                polls += 1;
                cx.waker().wake_by_ref();
                if polls == 3 {
                    is_woken.set(true);
                    waker.borrow_mut().take().expect("it was polled before").wake();
                }
                if polls > 3 { Poll::Ready(()) } else { Poll::Pending }
            });
            let never_mind = async {
                drive(context, wakes).await;
                std::future::pending::<()>().await;
            };
            let (waits, never_mind) = (std::pin::pin!(waits), std::pin::pin!(never_mind));
            drive(context, futures::future::select(waits, never_mind)).await;
        });
    }

    /// A waker between the two may have a lock under which it wakes what it was polled with, as that of a `Shared` does: nobody else
    /// who sleeps is woken there and then, for it may be the same.
    #[test]
    fn what_is_driven_is_woken_under_a_lock_that_a_sleeper_wants() {
        soon_spinning(Duration::from_millis(1), async |context| {
            let ticket = context.enter(|engine| engine.scope().operation(None).expect("it is open"));
            let ticket = ticket.unwrap_or_else(|_| unreachable!("it is owned here"));
            let ends = poll_fn(|cx| poll_ticket(context, cx, ticket)).map(|outcome| outcome.is_ok()).shared();
            let end = async {
                let ended = context.handle().enter(|engine| engine.scope().complete(ticket, Ok(Value::Unit)));
                assert!(matches!(ended, Ok(true)));
            };
            let both = futures::future::join(ends, end);
            assert_eq!(drive(context, both).await, (true, ()));
        });
    }
}
