//! Awaiting, by the owner of a context, what works through handles of it: nobody else drives the context meanwhile.

use super::wait::{BUSY_ROUNDS, Spun, spin};
use super::{Face, Shared};
use crate::engine::Engine;
use std::future::Future;
use std::pin::Pin;
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
    Drive { face, future }
}

/// Awaits a future while driving a context; see [`drive`].
///
/// # Cancel safety
/// That of the future.
#[must_use = "a future does nothing until it is awaited"]
#[pin_project::pin_project]
#[derive(Debug)]
pub struct Drive<'f, F, T> {
    face: &'f F,
    #[pin]
    future: T,
}

impl<F: Face, T: Future> Future for Drive<'_, F, T> {
    type Output = T::Output;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<T::Output> {
        let this = self.project();
        let (face, mut future) = (*this.face, this.future);
        if !face.owns() {
            return future.poll(cx);
        }
        let shared = face.shared();
        let before = Seen::by(shared);
        let Poll::Ready(value) = poll_lent(shared, future.as_mut()) else {
            return drive_on(face, future, cx, before);
        };
        if shared.cell.has_work() {
            // Whoever awaits nothing but what is done at once never comes here otherwise.
            let _posted_is_run = face.enter(|_| ());
        }
        Poll::Ready(value)
    }
}

/// Polls what works through handles of a context whose owner this is. Its waker is the [`Parking`](super::parking::Parking)'s.
#[inline(always)]
fn poll_lent<T: Future>(shared: &Shared, future: Pin<&mut T>) -> Poll<T::Output> {
    let waker = shared.parking.waker();
    let lent = shared.cell.lend();
    let polled = future.poll(&mut TaskContext::from_waker(&waker));
    drop(lent);
    polled
}

/// Drives the context of a future that was not ready, and polls it again whenever it was woken or anything has happened since that
/// was seen: apart from the rest, so that one which is ready at once pays for none of this.
#[inline(never)]
fn drive_on<F: Face, T: Future>(
    face: &F,
    mut future: Pin<&mut T>,
    cx: &mut TaskContext<'_>,
    mut seen: Seen,
) -> Poll<T::Output> {
    let shared = face.shared();
    let woken = seen.woken;
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
        let woke_itself = shared.parking.wakes() != seen.wakes;
        // Until anything at all has happened: the future may be waiting for just that.
        let happened = face.enter(|engine| {
            // Tasks that were started get no turn before this one ends.
            let has_started = |engine: &Engine| engine.starts() != seen.starts;
            if has_started(engine) {
                return Spun::Busy;
            }
            let news = |engine: &mut Engine| {
                (engine.stats().events != seen.events || shared.parking.wakes() != seen.wakes).then_some(())
            };
            match spin(shared, engine, &mut { news }) {
                Spun::Done(()) if has_started(engine) => Spun::Busy,
                spun => spun,
            }
        });
        match happened {
            // Behind the promise to be woken: who was woken before that was not parked.
            Ok(Spun::Idle) if face.sleep(cx.waker()) && shared.parking.wakes() == seen.wakes => {
                return Poll::Pending;
            }
            // Others want their turn.
            Ok(Spun::Busy) => break,
            _ => {}
        }
        // Of another thread's: perhaps for another task of this one.
        let woken_elsewhere = !woke_itself && shared.parking.wakes() != seen.wakes;
        seen = Seen::by(shared);
        if let Poll::Ready(value) = poll_lent(shared, future.as_mut()) {
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
    fn by(shared: &Shared) -> Seen {
        let (events, starts) = shared.cell.adopt().map_or((0, 0), |mut guard| {
            let engine = guard.get();
            let counts = (engine.stats().events, engine.starts());
            guard.keep();
            counts
        });
        Seen { events, starts, woken: shared.woken(), wakes: shared.parking.wakes() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Context;
    use crate::inprocess::InProcessFabric;
    use crate::messager::ClientParts;
    use crate::sysdep::Personality;
    use crate::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
    use std::cell::{Cell, RefCell};
    use std::future::poll_fn;
    use std::sync::Arc;
    use std::task::Waker;
    use std::time::Duration;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Runs that with an owned context, where who looks does so for an hour, and fails if it takes long.
    fn soon(run: impl AsyncFnOnce(&Context) + Send + 'static) {
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
                    spin: Some(HOUR),
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
        soon(async |context| {
            let (sender, receiver) = tokio::sync::oneshot::channel();
            let thread = std::thread::spawn(move || {
                // The owner looks by then, most likely; else this shows less.
                std::thread::sleep(Duration::from_millis(20));
                sender.send(7).expect("somebody waits");
            });
            assert_eq!(drive(context, receiver).await.expect("it was sent"), 7);
            thread.join().expect("no panic");
        });
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
}
