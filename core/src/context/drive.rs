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
        let before = shared.counts();
        let Poll::Ready(value) = poll_lent(shared, future.as_mut(), cx) else {
            return drive_on(face, future, cx, before);
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

/// Drives the context of a future that was not ready, and polls it again whenever anything has happened since the events and the
/// started tasks were so many: apart from the rest, so that one which is ready at once pays for none of this.
#[inline(never)]
fn drive_on<F: Face, T: Future>(
    face: &F,
    mut future: Pin<&mut T>,
    cx: &mut TaskContext<'_>,
    (mut events, mut starts): (u64, u32),
) -> Poll<T::Output> {
    let shared = face.shared();
    let woken = shared.woken();
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
        // Until anything at all has happened: the future may be waiting for just that.
        let happened = face.enter(|engine| {
            // Tasks that were started get no turn before this one ends.
            let has_started = |engine: &Engine| engine.starts() != starts;
            if has_started(engine) {
                return Spun::Busy;
            }
            let mut done = |engine: &mut Engine| (engine.stats().events != events).then_some(());
            match spin(shared, engine, &mut done) {
                Spun::Done(()) if has_started(engine) => Spun::Busy,
                spun => spun,
            }
        });
        match happened {
            Ok(Spun::Idle) if face.sleep(cx.waker()) => return Poll::Pending,
            // Others want their turn.
            Ok(Spun::Busy) => break,
            _ => {}
        }
        (events, starts) = shared.counts();
        if let Poll::Ready(value) = poll_lent(shared, future.as_mut(), cx) {
            return Poll::Ready(value);
        }
        if shared.woken() != woken {
            // Perhaps that was not what waits here, but another task of this thread.
            break;
        }
    }
    cx.waker().wake_by_ref();
    Poll::Pending
}

impl Shared {
    /// Events so far, and tasks that were started. For the owner; nothing is done, not even what was posted.
    #[inline]
    fn counts(&self) -> (u64, u32) {
        self.cell.adopt().map_or((0, 0), |mut guard| {
            let engine = guard.get();
            let counts = (engine.stats().events, engine.starts());
            guard.keep();
            counts
        })
    }
}
