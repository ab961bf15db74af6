//! A request under way: sent, then awaited.

use crate::buffer::Buffer;
use crate::operation::Pending;
use crate::send::{Envelope, Handed, attempt_once, send_or_not, start};
use posthaste_core::budget;
use posthaste_core::context::{Begun, Face, Posted, begin};
use posthaste_core::engine::{Deposit, Given};
use posthaste_core::slot::{Ticket, Value};
use posthaste_core::{CallError, Fault, Handle, Scope, SendError, TrySendError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

#[derive(Debug)]
enum State {
    Start,
    Posted(Posted<(Asked, Option<Buffer>)>, Handed<Buffer>),
    /// For the answer. As long as there is no credit or room for the request, the engine has that.
    Waiting(Option<Deposit>, Pending),
    /// It failed, and holds nothing that others wait for.
    Ended,
}

#[derive(Debug)]
enum Asked {
    Sent(Option<Deposit>, Pending),
    Failed(SendError),
}

/// A request. Ready with the reply's bytes. Options that are given once it was polled change nothing.
///
/// # Cancel safety
/// Dropped before the request was sent, nothing happens. Where another thread used the context when this was polled first, or owns
/// it, that one sends it when it comes to it. Dropped later, the request is handled and the reply is dropped when it comes.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use std::time::Duration;
/// let shout = job.service_inline("shout", |request, _| {
///     let mark = String::from_utf8_lossy(request.info()).into_owned();
///     Ok((request.text() + &mark).into())
/// })?;
/// let call = shout.call_bytes(job.rank(), "hello").info(b"!").deadline(Duration::from_secs(5));
/// assert_eq!(call.await?.as_bytes(), b"hello!");
/// # job.leave().await
/// # }
/// ```
#[must_use = "a call does nothing until it is awaited"]
#[derive(Debug)]
pub struct Call<'f, F: Face> {
    face: &'f F,
    envelope: Envelope,
    payload: Option<Buffer>,
    deadline: Option<u64>,
    state: State,
}

impl<F: Face> Unpin for Call<'_, F> {}

impl<'f, F: Face> Call<'f, F> {
    /// A request that goes out when it is first polled.
    pub(super) fn new(face: &'f F, envelope: Envelope, payload: Buffer) -> Self {
        Self { face, envelope, payload: Some(payload), deadline: None, state: State::Start }
    }

    /// The payload of a call that has failed before its request was sent, that was never begun, or whose request waits for
    /// credit or room and is taken back so: whoever holds it may ask elsewhere. `None` once the request was queued or is on its
    /// way.
    #[must_use]
    pub fn into_payload(mut self) -> Option<Buffer> {
        self.take_back();
        self.payload
    }

    /// What the engine still has is the caller's again.
    fn take_back(&mut self) {
        if matches!(self.state, State::Posted(..))
            && let State::Posted(posted, handed) = std::mem::replace(&mut self.state, State::Ended)
        {
            self.payload = handed.withdraw();
            // Without its payload it ends there.
            match self.payload.is_some() {
                true => self.state = State::Start,
                false => match handed.end_of(posted) {
                    Some((Asked::Sent(deposit, pending), _)) => self.state = State::Waiting(deposit, pending),
                    Some((Asked::Failed(_), unsent @ Some(_))) => {
                        // Begun anew it fails as it did.
                        (self.payload, self.state) = (unsent, State::Start);
                    }
                    Some((Asked::Failed(_), None)) | None => {}
                },
            }
        }
        if let State::Waiting(Some(deposit), _) = &self.state {
            self.payload = deposit.withdraw().map(Buffer::from);
        }
    }

    /// Ends the wait with [`Fault::DeadlineExceeded`] after this time, counted from this call, in whole milliseconds and rounded
    /// up. The request may still be carried out.
    pub fn deadline(self, after: Duration) -> Self {
        self.change(|call| call.deadline = Some(Handle::of(call.face).deadline_after(after)))
    }

    /// Adds message info: up to 112 bytes that travel beside the request.
    pub fn info(self, info: &[u8]) -> Self {
        self.change(|call| call.envelope.info = Some(info.into()))
    }

    /// Sends the request now or not at all: a service that must not wait for a slow peer tries another, or sheds load. What is given
    /// back waits for the reply, with the options of this. A request that waits already for credit or room is taken back and tried; one
    /// that is on its way, or failed, is given back as it is.
    ///
    /// # Errors
    /// With the payload: there is no credit or room now, or the context is in use (by another thread, by its owner, or by the handler
    /// that calls this), or the request cannot be sent.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::TrySendError;
    /// let echo = job.service_inline("echo", |request, _| Ok(request.to_bytes().into()))?;
    /// match echo.call_bytes(job.rank(), "now").try_send() {
    ///     Ok(call) => assert_eq!(call.await?.as_bytes(), b"now"), // it is on its way already
    ///     Err(TrySendError::Full(payload)) => panic!("no room for {} bytes", payload.len()),
    ///     Err(error) => panic!("{error}"),
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub fn try_send(mut self) -> Result<Self, TrySendError<Buffer>> {
        self.take_back();
        let may_begin = !matches!(self.state, State::Posted(..) | State::Ended);
        if let Some(payload) = self.payload.take_if(|_| may_begin) {
            let pending = ask_or_not(self.face, &self.envelope, payload, self.deadline)?;
            self.state = State::Waiting(None, pending);
        }
        Ok(self)
    }

    /// What has begun goes on as it is.
    fn change(mut self, change: impl FnOnce(&mut Self)) -> Self {
        if matches!(self.state, State::Start) {
            change(&mut self);
        }
        self
    }
}

/// Has a request sent under a ticket of its own, which is given up if it is not.
#[inline]
fn ticketed<R>(
    scope: &mut Scope<'_>,
    envelope: &Envelope,
    send: impl FnOnce(&mut Scope<'_>, u64) -> Result<Option<R>, SendError>,
) -> Result<Option<(Ticket, R)>, SendError> {
    if envelope.target.rank.0 >= scope.shape().ranks {
        let size = scope.shape().ranks;
        return Err(SendError::UnknownRank { rank: envelope.target.rank, size });
    }
    let ticket = scope.operation(Some(envelope.target.rank))?;
    match send(scope, ticket.to_word()) {
        Ok(Some(sent)) => Ok(Some((ticket, sent))),
        not => {
            scope.complete(ticket, Ok(Value::Unit));
            scope.detach(ticket);
            not.map(|_| None)
        }
    }
}

/// Sends the request, or has the engine keep it until there is credit and room.
#[inline]
fn ask(
    scope: &mut Scope<'_>,
    envelope: &Envelope,
    payload: &mut Option<Buffer>,
    handle: impl FnOnce() -> Handle,
    deadline: Option<u64>,
) -> Asked {
    let bytes = payload.as_ref().map_or(0, Buffer::len);
    let sent = ticketed(scope, envelope, |scope, cookie| {
        // The reply says all: nobody waits for the sending alone.
        Ok(Some(match start(scope, envelope, cookie, payload)? {
            Given::Done => None,
            Given::Queued(queued) => {
                scope.detach(queued);
                None
            }
            Given::Kept(queued, deposit) => {
                scope.detach(queued);
                Some(deposit)
            }
        }))
    });
    match sent {
        Ok(Some((ticket, deposit))) => {
            if deposit.is_none() {
                scope.note_request(ticket, envelope.protocol, bytes);
            }
            Asked::Sent(deposit, Pending::new(handle(), ticket, deadline).overlapping())
        }
        Ok(None) => Asked::Failed(Fault::Shutdown.into()),
        Err(error) => Asked::Failed(error),
    }
}

/// Sends the request now or not at all.
fn ask_or_not<F: Face>(
    face: &F,
    envelope: &Envelope,
    payload: Buffer,
    deadline: Option<u64>,
) -> Result<Pending, TrySendError<Buffer>> {
    let bytes = payload.len();
    attempt_once(face, envelope.target.rank, payload, |scope, payload| {
        let send =
            |scope: &mut Scope<'_>, cookie| Ok(send_or_not(scope, envelope, cookie, payload)?.then_some(()));
        let Some((ticket, ())) = ticketed(scope, envelope, send)? else { return Ok(None) };
        scope.note_request(ticket, envelope.protocol, bytes);
        Ok(Some(Pending::new(Handle::of(face), ticket, deadline).overlapping()))
    })
}

impl<F: Face> Call<'_, F> {
    /// The first poll of a short request with nothing in its way: asks and spins for the reply in one go. `None`: the
    /// slow way goes on from the state as it is now.
    #[inline]
    fn ask_now(&mut self, cx: &mut TaskContext<'_>) -> Option<Poll<Result<Value, CallError>>> {
        if !matches!(self.state, State::Start) || self.deadline.is_some() || self.envelope.info.is_some() {
            return None;
        }
        let payload = self.payload.as_ref()?.word()?;
        if budget::proceed(cx).is_pending() {
            return Some(Poll::Pending);
        }
        let (target, protocol) = (self.envelope.target, self.envelope.protocol);
        let begun = begin(self.face, |scope| scope.request_word(target, protocol, payload).ok_or(()));
        match begun {
            Some(Begun::Ended(outcome)) => {
                budget::spend(budget::MESSAGE);
                self.payload = None;
                Some(Poll::Ready(outcome.map_err(CallError::from)))
            }
            Some(Begun::Pending(ticket, turn)) => {
                budget::spend(budget::MESSAGE);
                self.payload = None;
                let pending = Pending::new(Handle::of(self.face), ticket, None).in_turn(turn);
                self.state = State::Waiting(None, pending);
                None
            }
            Some(Begun::Not(())) | None => None,
        }
    }
}

impl<F: Face> Future for Call<'_, F> {
    type Output = Result<Value, CallError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        match self.ask_now(cx) {
            Some(done) => done,
            None => self.poll_slowly(cx),
        }
    }
}

impl<F: Face> Call<'_, F> {
    #[cold]
    fn poll_slowly(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<Value, CallError>> {
        let outcome = self.go_on(cx);
        if let Poll::Ready(Err(_)) = outcome {
            self.take_back();
            self.state = State::Ended;
        }
        outcome
    }

    fn go_on(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<Value, CallError>> {
        ready!(self.poll_asked(cx)?);
        match &mut self.state {
            State::Waiting(_, pending) => pending.poll(self.face, cx).map_err(CallError::from),
            _ => Poll::Pending,
        }
    }

    /// Sends the request; ready once it is on its way, or the engine has it, before the reply is there.
    fn poll_asked(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), CallError>> {
        let this = self;
        loop {
            let asked = match &mut this.state {
                State::Start => {
                    ready!(budget::proceed(cx));
                    let (face, envelope, payload, deadline) =
                        (this.face, &this.envelope, &mut this.payload, this.deadline);
                    let asked = face.enter(|engine| {
                        ask(&mut engine.scope(), envelope, payload, || Handle::of(face), deadline)
                    });
                    budget::spend(budget::MESSAGE);
                    match asked {
                        Ok(asked) => asked,
                        Err(_) => {
                            let (handle, envelope) = (Handle::of(face), envelope.clone());
                            let (handed, theirs) = Handed::over(payload.take());
                            let posted = face.post(move |scope| {
                                // If it was taken back, nobody asks what became of it.
                                let mut payload = theirs.take();
                                let asked = ask(scope, &envelope, &mut payload, || handle, deadline);
                                (asked, payload)
                            });
                            this.state = State::Posted(posted, handed);
                            continue;
                        }
                    }
                }
                State::Posted(..) => {
                    // What was asked how it has ended, or has panicked, is not asked again.
                    let State::Posted(posted, handed) = std::mem::replace(&mut this.state, State::Ended)
                    else {
                        continue;
                    };
                    match posted.poll(cx) {
                        Poll::Ready((asked, payload)) => {
                            this.payload = payload;
                            asked
                        }
                        Poll::Pending => {
                            this.state = State::Posted(posted, handed);
                            return Poll::Pending;
                        }
                    }
                }
                State::Waiting(..) => return Poll::Ready(Ok(())),
                State::Ended => return Poll::Ready(Err(Fault::Shutdown.into())),
            };
            match asked {
                Asked::Sent(deposit, pending) => this.state = State::Waiting(deposit, pending),
                Asked::Failed(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}
