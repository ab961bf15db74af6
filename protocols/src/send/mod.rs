//! The future of a send.

mod handed;
mod slice;
mod start;

pub(crate) use handed::Handed;
pub use slice::{SendSlice, SendSliceWith};
use start::send_at_once;
pub(crate) use start::{Envelope, Step, at_once_in, attempt_once, own, send_or_not, start, try_now};

use crate::buffer::Buffer;
use crate::operation::Pending;
use crate::within::Alarm;
use posthaste_core::budget;
use posthaste_core::context::{Face, Posted};
use posthaste_core::engine::{Deposit, Engine, Given, Payload};
use posthaste_core::{Fault, Handle, SendError, TrySendError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, TryAcquireError};

/// A send that cannot be done at once, or has to wait for its turn.
#[derive(Debug)]
struct Slow {
    state: State,
    /// It is this sequential send's turn.
    turn: Option<OwnedSemaphorePermit>,
}

impl From<State> for Box<Slow> {
    fn from(state: State) -> Self {
        Box::new(Slow { state, turn: None })
    }
}

/// A sequential send in the line to its target.
struct InLine {
    turn: Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>,
    deadline: Option<Alarm>,
}

impl InLine {
    /// Ready when it is its turn, or its time is up.
    fn poll<F: Face>(&mut self, face: &F, cx: &mut Context<'_>) -> Poll<Result<OwnedSemaphorePermit, Fault>> {
        if let Poll::Ready(turn) = self.turn.as_mut().poll(cx) {
            // A line is closed with its context.
            return Poll::Ready(turn.map_err(|_| Fault::Shutdown));
        }
        match &mut self.deadline {
            Some(alarm) => alarm.poll(face, cx).map(Err),
            None => Poll::Pending,
        }
    }
}

enum State {
    /// Sequential: it has to wait for those before it.
    Line(Option<InLine>),
    Start,
    Posted(Posted<(Step, Option<Buffer>)>, Handed<Buffer>),
    Queued(Pending),
    /// The engine has it until there is credit and room. It is taken back before its operation is given up.
    Kept(Deposit, Pending),
    /// It has ended well.
    Sent,
    /// It has failed.
    Ended,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            State::Line(_) => f.write_str("Line"),
            State::Sent => f.write_str("Sent"),
            State::Ended => f.write_str("Ended"),
            State::Start => f.write_str("Start"),
            State::Posted(posted, _) => f.debug_tuple("Posted").field(posted).finish(),
            State::Queued(pending) => f.debug_tuple("Queued").field(pending).finish(),
            State::Kept(_, pending) => f.debug_tuple("Kept").field(pending).finish(),
        }
    }
}

/// A send. Ready when the source is reusable and the message is on its way, in order.
///
/// # Order
/// Messages to a target are handled in the order in which their sends were begun, whether they are awaited one after the other
/// or are under way at once: that is when they are polled first, unless Tokio's budget of the task is used up then. One for
/// which there is no room waits with its payload in the order of all, and one for which there is no credit in that of its
/// protocol, so that a receiver that is slow in one protocol holds up no others.
/// [`sequential`](Self::sequential) ones are not passed by each other, either. Options that are given once it was polled change
/// nothing.
///
/// # Cancel safety
/// Dropped before it has started, or while it waits for credit or room, nothing is sent. It starts when it is first polled, or, if
/// another thread used the context then, or owns it, when that one comes to it. Dropped later, the message goes on; its payload
/// is kept until it is on its way. One that is [forgotten](std::mem::forget) while it waits is sent when its turn comes.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::ContextId;
/// use std::time::Duration;
/// let (note, mut notes) = job.stream("note")?;
/// note.send(job.rank(), "urgent")
///     .info(b"up to 112 bytes")
///     .deadline(Duration::from_secs(1)) // while there is no room or credit
///     .relaxed() // may overtake what waits
///     .to_context(ContextId(0))
///     .await?;
/// let message = notes.recv().await.expect("the job goes on");
/// assert_eq!((message.text().as_str(), message.info()), ("urgent", &b"up to 112 bytes"[..]));
/// # job.leave().await
/// # }
/// ```
#[must_use = "a send does nothing until it is awaited"]
#[derive(Debug)]
pub struct SendMessage<'f, F: Face> {
    face: &'f F,
    envelope: Envelope,
    deadline: Option<u64>,
    buffer: Option<Buffer>,
    /// Made when the send cannot be done at once.
    slow: Option<Box<Slow>>,
}

// Nothing in it is ever pinned.
impl<F: Face> Unpin for SendMessage<'_, F> {}

impl<'f, F: Face> SendMessage<'f, F> {
    #[inline]
    pub(crate) fn new(face: &'f F, envelope: Envelope, buffer: Buffer) -> Self {
        Self { face, envelope, deadline: None, buffer: Some(buffer), slow: None }
    }

    /// Whether it was taken, or waits to be.
    fn has_begun(&self) -> bool {
        self.slow.as_ref().is_some_and(|slow| !matches!(slow.state, State::Line(None)))
    }

    /// What has begun goes on as it is.
    fn change(mut self, change: impl FnOnce(&mut Self)) -> Self {
        if !self.has_begun() {
            change(&mut self);
        }
        self
    }

    /// Adds message info: up to 112 bytes that travel beside the payload.
    pub fn info(self, info: &[u8]) -> Self {
        self.change(|send| send.envelope.info = Some(info.into()))
    }

    /// Ends the wait with [`Fault::DeadlineExceeded`] after this time, counted from this call, in whole milliseconds and rounded
    /// up. The message may still arrive if it was queued already.
    pub fn deadline(self, after: Duration) -> Self {
        self.change(|send| send.deadline = Some(Handle::of(send.face).deadline_after(after)))
    }

    /// May overtake messages that wait.
    pub fn relaxed(self) -> Self {
        self.change(|send| {
            send.envelope.relaxed = true;
            send.slow = None;
        })
    }

    /// Is taken, and ends, behind every sequential send of this context to the target that was polled before it, of whatever
    /// protocol, and is passed by none that is polled later: also while one of them waits for credit, where those of other
    /// protocols may pass. One is under way at a time: none is begun before the one before it has ended or was dropped, so
    /// that one which is kept and not polled any more, or forgotten, holds up those behind it until the context is closed.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (page, mut pages) = job.stream("page")?; // its sends wait for credit
    /// let (end, mut ends) = job.stream("end")?;
    /// let (first, last) = tokio::join!(
    ///     page.send(job.rank(), "the only page").sequential(),
    ///     end.send(job.rank(), "").sequential(), // not before the page is on its way
    /// );
    /// first.and(last)?;
    /// assert!(ends.recv().await.is_some() && pages.recv().await.is_some());
    /// # job.leave().await
    /// # }
    /// ```
    pub fn sequential(self) -> Self {
        self.change(|send| {
            send.envelope.relaxed = false;
            send.slow = Some(State::Line(None).into());
        })
    }

    /// The payload of a send that has failed, that was never begun, or that waits for credit or room and is taken back so:
    /// whoever holds it may send it elsewhere. `None` once the message was queued or is on its way.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::Rank;
    /// let job = posthaste::solo().await?;
    /// let (line, mut lines) = job.stream("line")?;
    /// let mut send = line.send(Rank(7), vec![1; 100_000]);
    /// if (&mut send).await.is_err() {
    ///     // There is no rank 7. The bytes are still here, and were not copied.
    ///     let payload = send.into_payload().expect("nothing was sent");
    ///     line.send(job.rank(), payload).await?;
    /// }
    /// assert_eq!(lines.recv().await.map(|line| line.len()), Some(100_000));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn into_payload(mut self) -> Option<Buffer> {
        self.take_back();
        self.buffer
    }

    /// What the engine still has is the caller's again.
    fn take_back(&mut self) {
        let Some(slow) = self.slow.as_deref_mut() else { return };
        if matches!(slow.state, State::Posted(..))
            && let State::Posted(posted, handed) = std::mem::replace(&mut slow.state, State::Sent)
        {
            self.buffer = handed.withdraw();
            if self.buffer.is_none()
                && let Some((step, unsent)) = handed.end_of(posted)
            {
                self.buffer = unsent;
                slow.state = match step {
                    Step::Done => State::Sent,
                    // With its payload it is begun anew, and fails as it did.
                    Step::Failed(_) => State::Ended,
                    Step::Queued(pending) => State::Queued(pending),
                    Step::Kept(deposit, pending) => State::Kept(deposit, pending),
                };
            }
        }
        if let State::Kept(deposit, _) = &slow.state {
            self.buffer = deposit.withdraw().map(Buffer::from);
        }
    }

    /// To another context of the same rank than the sender's own number.
    pub fn to_context(self, context: posthaste_core::ContextId) -> Self {
        self.change(|send| send.envelope.target.context = context)
    }

    /// Sends now or not at all; never waits. A send that waits already for credit or room is taken back and tried; of one that is
    /// on its way, or queued, that is told as of any other.
    ///
    /// # Errors
    /// With the payload: there is no room now (or another thread is at the context), or the send cannot succeed. Without it: one that
    /// was queued has failed since.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::TrySendError;
    /// let (note, mut notes) = job.stream("note")?;
    /// match note.send(job.rank(), "now or not at all").info(b"7").try_send() {
    ///     Ok(()) => assert!(notes.recv().await.is_some()),
    ///     Err(TrySendError::Full(payload)) => panic!("no room for {} bytes", payload.len()),
    ///     Err(TrySendError::Failed { error, .. }) => return Err(error.into()),
    ///     Err(_) => unreachable!("there is no third reason yet"),
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub fn try_send(mut self) -> Result<(), TrySendError<Buffer>> {
        let line = self.is_sequential().then(|| self.face.shared().line_to(self.envelope.target));
        if let Some(Slow { state: State::Line(waiting), .. }) = self.slow.as_deref_mut() {
            // Its place in the line, which it may have come to be the first of.
            *waiting = None;
        }
        // One that waits does so no longer.
        self.take_back();
        let Some(buffer) = self.buffer.take() else {
            let gone = |error| TrySendError::Failed { error, payload: Buffer::copy(&[]) };
            return self.has_gone().map_err(gone);
        };
        let _turn = match line.as_ref().map(|line| line.try_acquire()).transpose() {
            Ok(turn) => turn,
            // One before it is under way.
            Err(TryAcquireError::NoPermits) => return Err(TrySendError::Full(buffer)),
            Err(TryAcquireError::Closed) => {
                return Err(TrySendError::Failed { error: Fault::Shutdown.into(), payload: buffer });
            }
        };
        try_now(self.face, &self.envelope, buffer)
    }

    /// What became of a send that nobody can take back: as far as anybody here knows it is on its way.
    #[cold]
    fn has_gone(&mut self) -> Result<(), SendError> {
        match self.slow.as_deref_mut().map(|slow| &mut slow.state) {
            Some(State::Queued(pending) | State::Kept(_, pending)) => {
                pending.take_outcome().map_or(Ok(()), |outcome| outcome.map(drop).map_err(SendError::from))
            }
            Some(State::Ended) => Err(Fault::Shutdown.into()),
            _ => Ok(()),
        }
    }

    /// Whether it waits for its place in the line to its target.
    fn is_sequential(&self) -> bool {
        self.slow.as_ref().is_some_and(|slow| matches!(slow.state, State::Line(_)))
    }

    /// Starts one that has no payload yet with borrowed bytes, which are copied only if they have to wait here. True: it is on
    /// its way.
    #[cold]
    fn begin(&mut self, bytes: &[u8]) -> Result<bool, SendError> {
        let args = self.envelope.args(0);
        let send = |engine: &mut Engine| {
            engine.scope().give(&args, Payload::Borrowed(bytes)).map_err(|(error, _)| error)
        };
        let state = match self.face.enter(send) {
            Ok(started) => match own(started, || Handle::of(self.face), self.deadline) {
                Step::Done => return Ok(true),
                Step::Failed(error) => return Err(error),
                Step::Queued(pending) => State::Queued(pending),
                Step::Kept(deposit, pending) => State::Kept(deposit, pending),
            },
            // Somebody else is at the engine.
            Err(_) => {
                self.buffer = Some(Buffer::copy(bytes));
                State::Start
            }
        };
        self.slow = Some(state.into());
        Ok(false)
    }

    #[cold]
    fn post(&mut self) -> State {
        let handle = Handle::of(self.face);
        let (envelope, deadline) = (self.envelope.clone(), self.deadline);
        let (handed, theirs) = Handed::over(self.buffer.take());
        let posted = self.face.post(move |scope| {
            // If it was taken back, nobody asks what became of it.
            let mut buffer = theirs.take();
            let started = start(scope, &envelope, 0, &mut buffer);
            (own(started, || handle, deadline), buffer)
        });
        State::Posted(posted, handed)
    }

    #[inline]
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        if self.slow.is_none() {
            ready!(budget::proceed(cx));
            if self.envelope.info.is_none()
                && let Some(word) = self.buffer.as_ref().and_then(Buffer::inline_word)
            {
                let (target, protocol) = (self.envelope.target, self.envelope.protocol);
                // What it needs goes with it: what is borrowed has to lie in memory.
                let send = move |engine: &mut Engine| engine.scope().send_word(target, protocol, word);
                if self.face.enter(send).unwrap_or(false) {
                    // Whoever polls once more sends nothing twice. One word in place has nothing to be dropped.
                    std::mem::forget(self.buffer.take());
                    budget::spend(budget::MESSAGE);
                    return Poll::Ready(Ok(()));
                }
            }
            return self.step_at_once(cx);
        }
        self.step_slowly(cx)
    }

    /// The first step of a send that is not one word, or has something in its way.
    #[inline(never)]
    fn step_at_once(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let (len, is_loan) =
            self.buffer.as_ref().map_or((0, false), |buffer| (buffer.len(), buffer.is_loan()));
        if self.buffer.as_mut().is_some_and(|buffer| send_at_once(self.face, &self.envelope, buffer)) {
            // Whoever polls once more, or tries to send, sends nothing twice: a loan is the device's again.
            self.buffer = None;
            // A loan was handed over as it is.
            budget::spend_on(budget::MESSAGE, if is_loan { 0 } else { len });
            return Poll::Ready(Ok(()));
        }
        let first = self.first_step(cx);
        if first.is_ready() {
            budget::spend_on(budget::MESSAGE, if is_loan { 0 } else { len });
        }
        first
    }

    #[cold]
    fn first_step(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let (envelope, buffer) = (&self.envelope, &mut self.buffer);
        let started = self.face.enter(|engine| start(&mut engine.scope(), envelope, 0, buffer));
        let state = match started {
            Ok(Ok(Given::Done)) => return Poll::Ready(Ok(())),
            Ok(Err(error)) => return Poll::Ready(Err(error)),
            Ok(started) => match own(started, || Handle::of(self.face), self.deadline) {
                Step::Done => return Poll::Ready(Ok(())),
                Step::Failed(error) => return Poll::Ready(Err(error)),
                Step::Queued(pending) => State::Queued(pending),
                Step::Kept(deposit, pending) => State::Kept(deposit, pending),
            },
            Err(_) => self.post(),
        };
        self.slow = Some(state.into());
        self.step_slowly(cx)
    }

    #[cold]
    fn step_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let Some(mut slow) = self.slow.take() else { return Poll::Ready(Err(Fault::Shutdown.into())) };
        let result = self.go_on(&mut slow, cx);
        if let Poll::Ready(result) = &result {
            // Who keeps a send that has ended keeps nothing that others wait for.
            slow.turn = None;
            if let (Err(_), State::Kept(deposit, _)) = (result, &slow.state) {
                self.buffer = deposit.withdraw().map(Buffer::from);
            }
            slow.state = if result.is_ok() { State::Sent } else { State::Ended };
        }
        self.slow = Some(slow);
        result
    }

    fn go_on(
        &mut self,
        Slow { state, turn }: &mut Slow,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), SendError>> {
        loop {
            let step = match state {
                State::Line(waiting) => {
                    let (face, target) = (self.face, self.envelope.target);
                    let waiting = waiting.get_or_insert_with(|| InLine {
                        turn: Box::pin(face.shared().line_to(target).acquire_owned()),
                        deadline: self.deadline.map(Alarm::new),
                    });
                    match ready!(waiting.poll(face, cx)) {
                        Ok(its) => *turn = Some(its),
                        Err(fault) => return Poll::Ready(Err(fault.into())),
                    }
                    *state = State::Start;
                    continue;
                }
                State::Start => {
                    ready!(budget::proceed(cx));
                    let (envelope, buffer) = (&self.envelope, &mut self.buffer);
                    match self.face.enter(|engine| start(&mut engine.scope(), envelope, 0, buffer)) {
                        Ok(Ok(Given::Done)) => {
                            budget::spend(budget::MESSAGE);
                            return Poll::Ready(Ok(()));
                        }
                        Ok(started) => own(started, || Handle::of(self.face), self.deadline),
                        Err(_) => {
                            *state = self.post();
                            continue;
                        }
                    }
                }
                State::Posted(posted, _) => {
                    let (step, buffer) = ready!(posted.poll(cx));
                    self.buffer = buffer;
                    step
                }
                State::Sent | State::Ended => return Poll::Ready(Err(Fault::Shutdown.into())),
                State::Queued(pending) | State::Kept(_, pending) => {
                    return ready!(pending.poll(self.face, cx)).map(|_| ()).map_err(SendError::from).into();
                }
            };
            match step {
                Step::Done => return Poll::Ready(Ok(())),
                Step::Failed(error) => return Poll::Ready(Err(error)),
                Step::Queued(pending) => *state = State::Queued(pending),
                Step::Kept(deposit, pending) => *state = State::Kept(deposit, pending),
            }
        }
    }
}

impl<F: Face> Future for SendMessage<'_, F> {
    type Output = Result<(), SendError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.step(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{first_of, operation, without_a_turn};
    use posthaste_core::slot::Outcome;
    use posthaste_core::{Messager, ProtocolId, Rank, Value};

    /// Of a send that was queued it is told how it has ended, also by a task that has used up its turn.
    #[test]
    fn what_became_of_a_queued_send_is_told_without_a_turn() {
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let queued = |outcome: Option<Outcome>| {
            let pending = Pending::new(handle.clone(), operation(handle, outcome), None);
            let envelope =
                Envelope { target: handle.me(), protocol: ProtocolId(16), info: None, relaxed: false };
            let slow = Some(State::Queued(pending).into());
            SendMessage { face: handle, envelope, deadline: None, buffer: None, slow }
        };
        let (well, badly, still) =
            (queued(Some(Ok(Value::Unit))), queued(Some(Err(Fault::PeerLost(Rank(0))))), queued(None));
        without_a_turn(|_| {
            assert!(well.try_send().is_ok() && still.try_send().is_ok());
            let failed = badly.try_send();
            let lost = SendError::Fault(Fault::PeerLost(Rank(0)));
            assert!(
                matches!(&failed, Err(TrySendError::Failed { error, .. }) if error == &lost),
                "{failed:?}"
            );
        });
    }
}
