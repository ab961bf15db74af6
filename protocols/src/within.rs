//! Deadlines of any operation: the same timer wheel for all of them, and no timer for what ends at once.

use pin_project::pin_project;
use posthaste_core::context::{Face, Posted};
use posthaste_core::{Fault, Handle, Scope, Ticket, Value};
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// Awaits an operation for so long at most, counted from this call: see [`Within`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{ContextId, Fault, RmaError};
/// use std::time::Duration;
/// let window = job.shmalloc::<u64>(1).await?;
/// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
/// // The owner of a context waits by it, and so does its deadline.
/// let never = window.wait_until_on(&context, 0, |word| word == 1);
/// let late = posthaste::within(&context, Duration::from_millis(5), never).await;
/// assert_eq!(late, Err(RmaError::Fault(Fault::DeadlineExceeded)));
/// drop(context);
/// # job.leave().await
/// # }
/// ```
pub fn within<F: Face, T: IntoFuture>(
    face: &F,
    time: Duration,
    operation: T,
) -> Within<'_, F, T::IntoFuture> {
    let alarm = Alarm::new(Handle::of(face).deadline_after(time));
    Within { face, operation: operation.into_future(), alarm }
}

/// An operation with a deadline. Ends as the operation does, or with [`Fault::DeadlineExceeded`] once the time has passed.
///
/// The operation is given up then, by dropping it with this, and what that means is said under its *Cancel safety*: as a rule
/// it goes on and may still take effect, and nothing is lost but its outcome.
///
/// Through a handle of a context that somebody owns, the time passes for it while the owner drives that.
///
/// # Cancel safety
/// That of the operation.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use std::time::Duration;
/// let window = job.shmalloc::<u64>(1).await?;
/// let put = job.within(Duration::from_secs(1), window.put(job.rank(), 0, 42));
/// put.await?; // it took no second
/// assert_eq!(window.load(0), Some(42));
/// # job.leave().await
/// # }
/// ```
#[must_use = "an operation does nothing until it is awaited"]
#[derive(Debug)]
#[pin_project]
pub struct Within<'f, F, T> {
    face: &'f F,
    #[pin]
    operation: T,
    alarm: Alarm,
}

impl<F: Face, T, V, E> Future for Within<'_, F, T>
where
    T: Future<Output = Result<V, E>>,
    E: From<Fault>,
{
    type Output = Result<V, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(ended) = this.operation.poll(cx) {
            return Poll::Ready(ended);
        }
        this.alarm.poll(*this.face, cx).map(|fault| Err(fault.into()))
    }
}

/// Tells that a time has come.
#[derive(Debug)]
pub(crate) struct Alarm {
    /// In milliseconds of the context's clock.
    at: u64,
    timer: Timer,
}

#[derive(Debug)]
enum Timer {
    /// Nobody has waited yet.
    Unset,
    /// Whoever is at the context makes it.
    Posted(Posted<Result<Bell, Fault>>),
    Set(Bell),
}

/// A ticket that no operation ends: the wheel wakes whoever waits for it.
#[derive(Debug)]
struct Bell {
    handle: Handle,
    /// None: it has ended with the context.
    ticket: Option<Ticket>,
}

impl Bell {
    /// Ready only when there are no timers any more.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let Some(ticket) = self.ticket else { return Poll::Ready(Fault::Shutdown) };
        self.handle.slots().poll(ticket, cx).map(|outcome| {
            self.ticket = None;
            outcome.err().unwrap_or(Fault::Shutdown)
        })
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        if self.handle.slots().detach(ticket) {
            return;
        }
        // Its slot goes back when it ends, and nobody else ends it.
        let end = move |scope: &mut Scope<'_>| {
            scope.complete(ticket, Ok(Value::Unit));
        };
        if self.handle.enter(|engine| end(&mut engine.scope())).is_err() {
            self.handle.post_run(end);
        }
    }
}

impl Alarm {
    pub fn new(at: u64) -> Alarm {
        Alarm { at, timer: Timer::Unset }
    }

    /// Ready at its time, with [`Fault::DeadlineExceeded`], or if there are no timers (any more), with the reason.
    pub fn poll<F: Face>(&mut self, face: &F, cx: &mut Context<'_>) -> Poll<Fault> {
        let has_come = |at| face.shared().now_ms() >= at;
        if has_come(self.at) {
            return Poll::Ready(Fault::DeadlineExceeded);
        }
        let bell = loop {
            let made = match &mut self.timer {
                Timer::Unset => match self.make(face) {
                    Some(made) => made,
                    None => continue,
                },
                Timer::Posted(posted) => ready!(posted.poll(cx)),
                Timer::Set(bell) => break bell,
            };
            match made {
                Ok(bell) => self.set(face, bell),
                Err(fault) => return Poll::Ready(fault),
            }
        };
        if let Poll::Ready(fault) = bell.poll(cx) {
            return Poll::Ready(fault);
        }
        // What is waited for may not drive the context, or have gone to sleep before it knew of the deadline.
        if face.owns() && !face.sleep(cx.waker()) {
            cx.waker().wake_by_ref();
        }
        // It may have come before there was anybody to wake.
        if has_come(self.at) { Poll::Ready(Fault::DeadlineExceeded) } else { Poll::Pending }
    }

    /// As [`poll`](Self::poll), awaited.
    pub async fn ended<F: Face>(mut self, face: &F) -> Fault {
        std::future::poll_fn(|cx| self.poll(face, cx)).await
    }

    fn set<F: Face>(&mut self, face: &F, bell: Bell) {
        if let Some(ticket) = bell.ticket {
            // Nobody gets to an owned context but by its own face, unless that drives whoever asks.
            let set = |face: &F| face.enter(|engine| engine.scope().deadline(self.at, ticket)).is_ok();
            if !(face.owns() && set(face)) {
                bell.handle.set_deadline(self.at, ticket);
            }
        }
        self.timer = Timer::Set(bell);
    }

    /// Makes the timer, or (none) has whoever is at the context make it.
    fn make<F: Face>(&mut self, face: &F) -> Option<Result<Bell, Fault>> {
        let handle = Handle::of(face);
        let make = move |scope: &mut Scope<'_>| {
            // It waits for nobody else.
            let me = scope.me().rank;
            scope.operation(Some(me)).map(|ticket| Bell { handle, ticket: Some(ticket) })
        };
        match face.enter(|engine| make.clone()(&mut engine.scope())) {
            Ok(made) => Some(made),
            Err(_) => {
                self.timer = Timer::Posted(face.post(make));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Wakes, first_of};
    use posthaste_core::{Messager, SendError};
    use std::future::{pending, ready};
    use std::sync::Arc;
    use std::task::Waker;

    fn waits(handle: &Handle) -> usize {
        let mut waits = 0;
        let counted = handle.enter(|engine| engine.scope().each_awaited(|_| waits += 1));
        assert!(counted.is_ok());
        waits
    }

    /// What ends at once sets no timer; what does not is woken at its time, and no slot stays behind, whoever makes the timer.
    #[test]
    fn a_deadline_takes_a_slot_only_while_something_waits() {
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let cx = &mut Context::from_waker(&waker);
        let timers = || handle.enter(|engine| engine.scope().timers()).unwrap_or(usize::MAX);
        let done = std::pin::pin!(within(handle, Duration::from_secs(1), ready(Ok::<u8, SendError>(7))));
        assert_eq!(done.poll(cx), Poll::Ready(Ok(7)));
        assert_eq!((timers(), waits(handle)), (0, 0));

        let ended = Poll::Ready(Err(SendError::Fault(Fault::DeadlineExceeded)));
        {
            let never = pending::<Result<u8, SendError>>();
            let mut late = std::pin::pin!(within(handle, Duration::from_secs(2), never));
            assert!(late.as_mut().poll(cx).is_pending());
            assert_eq!((timers(), waits(handle)), (1, 1));
            let before = wakes.count();
            std::thread::sleep(Duration::from_millis(2050));
            let _ = handle.enter(|engine| engine.expire(handle.now_ms()));
            assert_eq!(wakes.count(), before + 1);
            assert_eq!(late.as_mut().poll(cx), ended);
        }
        assert_eq!(waits(handle), 0);

        // Somebody else is at the context when it is polled, and when it is dropped: before the timer is made, and after.
        for is_made in [false, true].repeat(200) {
            let never = pending::<Result<u8, SendError>>();
            let mut waiting = Box::pin(within(handle, Duration::from_secs(3600), never));
            if is_made {
                let _ = handle.enter(|_| assert!(waiting.as_mut().poll(cx).is_pending()));
                assert!(waiting.as_mut().poll(cx).is_pending());
                assert_eq!(waits(handle), 1);
                let _ = handle.enter(|_| drop(waiting));
            } else {
                let _ = handle.enter(|_| {
                    assert!(waiting.as_mut().poll(cx).is_pending());
                    drop(waiting);
                });
            }
            assert_eq!(waits(handle), 0);
        }
        let next = handle.enter(|engine| engine.scope().operation(None)).unwrap_or(Err(Fault::Shutdown));
        let slot = next.expect("it is open").to_word() as u32;
        assert!(slot <= 64, "slot {slot} is the first free one: the others were not given back");

        let never = pending::<Result<u8, SendError>>();
        let mut shut = std::pin::pin!(within(handle, Duration::from_secs(3600), never));
        assert!(shut.as_mut().poll(cx).is_pending());
        handle.shut_down();
        assert_eq!(shut.as_mut().poll(cx), Poll::Ready(Err(SendError::Fault(Fault::Shutdown))));
    }
}
