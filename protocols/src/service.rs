//! Requests and replies.

use crate::buffer::Buffer;
use crate::codec::{decode, encode, encoded_schema};
use crate::message::{Message, OwnedMessage};
use crate::operation::Pending;
use crate::send::{Envelope, Started, start};
use bytes::Bytes;
use posthaste_core::budget;
use posthaste_core::context::{Begun, Face, Posted, begin};
use posthaste_core::engine::{Payload, SendArgs, Sent, Wait};
use posthaste_core::protocol::{Flow, Incoming, Protocol, ReplyTo};
use posthaste_core::slot::Value;
use posthaste_core::{
    CallError, Context, Endpoint, Fault, Handle, Messager, ProtocolId, Rank, RegisterError, Scope, SendError,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

/// How a service runs.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{CallError, Fault, Rank, ServiceOptions};
/// let options = ServiceOptions { limit: 1 };
/// let slow = job.service_with("slow", options, |_: (), _: Rank| async {
///     tokio::time::sleep(std::time::Duration::from_millis(20)).await;
/// })?;
/// let (one, other) = tokio::join!(slow.call(job.rank(), ()), slow.call(job.rank(), ()));
/// assert_eq!(one, Ok(()));
/// assert_eq!(other, Err(CallError::Fault(Fault::Busy(job.rank()))));
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ServiceOptions {
    /// Handlers that run at once; a request beyond is answered `Busy`.
    pub limit: usize,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        Self { limit: 1024 }
    }
}

/// A registered service: requests go out through it. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Service;
/// let upper: Service<String, String> = job.service("upper", |text: String| async move { text.to_uppercase() })?;
/// let again = upper.clone(); // for another task
/// let (one, other) = tokio::join!(upper.call(job.rank(), "one".into()), again.call(job.rank(), "two".into()));
/// assert_eq!((one?, other?), ("ONE".to_owned(), "TWO".to_owned()));
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct Service<Q, A, F = Handle> {
    face: F,
    id: ProtocolId,
    types: PhantomData<fn(Q) -> A>,
}

impl<Q, A, F: Clone> Clone for Service<Q, A, F> {
    fn clone(&self) -> Self {
        Self { face: self.face.clone(), id: self.id, types: PhantomData }
    }
}

impl<Q, A, F: Face> Service<Q, A, F> {
    /// The service that a protocol of that number answers.
    pub(crate) fn new(face: F, id: ProtocolId) -> Self {
        Self { face, id, types: PhantomData }
    }

    /// The same service called through an owned context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::ContextId;
    /// let echo = job.service_inline("echo", |request, _| Ok(request.to_bytes().into()))?;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// // The owner's calls take no lock.
    /// assert_eq!(echo.on(&context).call_bytes(job.rank(), "word").await?.as_bytes(), b"word");
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn on<'c>(&self, context: &'c Context) -> Service<Q, A, &'c Context> {
        Service::new(context, self.id)
    }

    /// The same service called through any face.
    #[must_use]
    pub fn with_face<G: Face>(&self, face: G) -> Service<Q, A, G> {
        Service::new(face, self.id)
    }

    /// The same service called through a context of one's choice.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo_with(1, 2).await?; // one client of two contexts
    /// use posthaste::ContextId;
    /// let square = job.service("square", |number: u64| async move { number * number })?;
    /// let second = job.context_handle(ContextId(1)).expect("there are two");
    /// // Calls that go that context's way, beside all others.
    /// assert_eq!(square.through(second).call(job.rank(), 12).await?, 144);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn through(&self, handle: &Handle) -> Service<Q, A> {
        Service::new(handle.clone(), self.id)
    }

    fn request(&self, target: Rank, payload: Buffer) -> Call<'_, F> {
        let context = self.face.shared().me().context;
        let envelope = Envelope {
            target: Endpoint::new(target, context),
            protocol: self.id,
            info: None,
            relaxed: false,
        };
        Call {
            face: &self.face,
            envelope,
            payload: Some(payload),
            deadline: None,
            state: State::Start(Wait::Await),
        }
    }
}

impl<F: Face> Service<Bytes, Bytes, F> {
    /// Sends bytes and awaits the bytes of the reply.
    ///
    /// # Cancel safety
    /// See [`Call`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let sum = job.service_inline("sum", |request, _| Ok(request.sum_words().to_ne_bytes().into()))?;
    /// let words: Vec<u8> = (1..=10_u64).flat_map(u64::to_ne_bytes).collect();
    /// let answer = sum.call_bytes(job.rank(), words).await?;
    /// assert_eq!(answer.as_bytes(), 55_u64.to_ne_bytes());
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn call_bytes(&self, target: Rank, payload: impl Into<Buffer>) -> Call<'_, F> {
        self.request(target, payload.into())
    }

    /// Sends a request whose payload is read where it is, provided that it can be sent now. `None`: it cannot, and nothing
    /// was done; what stands in the way is told to who sends it in another way.
    pub(crate) fn call_lent(
        &self,
        target: Rank,
        info: &[u8],
        payload: &[u8],
        may: impl FnOnce() -> bool,
    ) -> Option<Call<'_, F>> {
        let mut call = self.request(target, Buffer::copy(&[]));
        let (target, protocol) = (call.envelope.target, call.envelope.protocol);
        let asked = self.face.enter(|engine| {
            let scope = &mut engine.scope();
            if !may() {
                return None;
            }
            let ticket = scope.operation(Some(target.rank)).ok()?;
            let args = SendArgs { target, protocol, cookie: ticket.to_word(), info, relaxed: false };
            match scope.send(&args, Payload::Borrowed(payload), Wait::Never) {
                Ok(Sent::Done) => {}
                Ok(Sent::Queued(queued)) => scope.detach(queued),
                _ => {
                    scope.complete(ticket, Ok(Value::Unit));
                    scope.detach(ticket);
                    return None;
                }
            }
            scope.note_request(ticket, protocol, payload.len());
            Some(ticket)
        });
        let ticket = asked.ok()??;
        call.payload = None;
        call.state = State::Waiting(Pending::new(Handle::of(&self.face), ticket, None, None));
        Some(call)
    }
}

impl<Q: Serialize, A: DeserializeOwned, F: Face> Service<Q, A, F> {
    /// Sends a request and awaits its reply.
    ///
    /// # Errors
    /// If the request cannot be encoded or sent, the peer is lost, or it refuses: see [`CallError`].
    ///
    /// # Cancel safety
    /// Dropped before it was sent, nothing happens; later, the reply is dropped when it comes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let longest = job.service("longest", |words: Vec<String>| async move {
    ///     words.into_iter().max_by_key(String::len)
    /// })?;
    /// let words = ["a", "longer", "list"].map(String::from).to_vec();
    /// assert_eq!(longest.call(job.rank(), words).await?.as_deref(), Some("longer"));
    /// assert_eq!(longest.call(job.rank(), Vec::new()).await?, None);
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn call(&self, target: Rank, request: Q) -> Result<A, CallError> {
        let payload = encode(&request)?;
        decode(self.request(target, payload.into()).await?.as_bytes())
    }

    /// As [`call`](Self::call), but ends with [`Fault::DeadlineExceeded`] after this time.
    ///
    /// # Errors
    /// As for `call`, and the deadline.
    ///
    /// # Cancel safety
    /// As for `call`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{CallError, Fault};
    /// use std::time::Duration;
    /// let never = job.service("never", |_: ()| std::future::pending::<()>())?;
    /// let late = never.call_within(job.rank(), (), Duration::from_millis(5)).await;
    /// assert_eq!(late, Err(CallError::Fault(Fault::DeadlineExceeded)));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn call_within(&self, target: Rank, request: Q, time: Duration) -> Result<A, CallError> {
        let payload = encode(&request)?;
        decode(self.request(target, payload.into()).deadline(time).await?.as_bytes())
    }
}

#[derive(Debug)]
enum State {
    Start(Wait),
    Posted(Posted<(Asked, Option<Buffer>)>),
    Later(Pending),
    Waiting(Pending),
}

#[derive(Debug)]
enum Asked {
    Sent(Pending),
    Later(Pending),
    Failed(SendError),
}

/// A request. Ready with the reply's bytes.
///
/// # Cancel safety
/// Dropped before the request was sent, nothing happens. Dropped later, the request is handled and the reply is
/// dropped when it comes.
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

impl<F: Face> Call<'_, F> {
    /// Ends the wait with [`Fault::DeadlineExceeded`] after this time.
    pub fn deadline(mut self, after: Duration) -> Self {
        self.deadline = Some(Handle::of(self.face).deadline_after(after));
        self
    }

    /// Adds message info: up to 112 bytes that travel beside the request.
    pub fn info(mut self, info: &[u8]) -> Self {
        self.envelope.info = Some(info.into());
        self
    }
}

/// Sends the request under a ticket of its own.
#[inline]
fn ask(
    scope: &mut Scope<'_>,
    envelope: &Envelope,
    payload: &mut Option<Buffer>,
    wait: Wait,
    handle: impl FnOnce() -> Handle,
    deadline: Option<u64>,
) -> Asked {
    let bytes = payload.as_ref().map_or(0, Buffer::len);
    if envelope.target.rank.0 >= scope.shape().ranks {
        let size = scope.shape().ranks;
        return Asked::Failed(SendError::UnknownRank { rank: envelope.target.rank, size });
    }
    let ticket = match scope.operation(Some(envelope.target.rank)) {
        Ok(ticket) => ticket,
        Err(fault) => return Asked::Failed(fault.into()),
    };
    let started = start(scope, envelope, ticket.to_word(), payload, wait);
    if matches!(started, Started::Done | Started::Queued(_)) {
        scope.note_request(ticket, envelope.protocol, bytes);
        if let Started::Queued(queued) = started {
            // The reply says all: nobody waits for the sending alone.
            scope.detach(queued);
        }
        return Asked::Sent(Pending::new(handle(), ticket, None, deadline));
    }
    scope.complete(ticket, Ok(Value::Unit));
    scope.detach(ticket);
    match started {
        Started::Later(later, wait) => Asked::Later(Pending::new(handle(), later, Some(wait), deadline)),
        Started::Failed(error) => Asked::Failed(error),
        _ => Asked::Failed(Fault::Shutdown.into()),
    }
}

impl<F: Face> Call<'_, F> {
    /// The first poll of a short request with nothing in its way: asks and spins for the reply in one go. `None`: the
    /// slow way goes on from the state as it is now.
    #[inline]
    fn ask_now(&mut self, cx: &mut TaskContext<'_>) -> Option<Poll<Result<Value, CallError>>> {
        if !matches!(self.state, State::Start(Wait::Await))
            || self.deadline.is_some()
            || self.envelope.info.is_some()
        {
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
            Some(Begun::Pending(ticket)) => {
                budget::spend(budget::MESSAGE);
                self.payload = None;
                self.state = State::Waiting(Pending::new(Handle::of(self.face), ticket, None, None));
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
        ready!(self.poll_asked(cx)?);
        match &mut self.state {
            State::Waiting(pending) => pending.poll(self.face, cx).map_err(CallError::from),
            _ => Poll::Pending,
        }
    }

    /// Sends the request; ready once it is on its way, before the reply is there. For those who have several.
    pub(crate) fn poll_asked(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), CallError>> {
        self.poll_asked_if(cx, || true)
    }

    /// As [`poll_asked`](Self::poll_asked), unless something forbids it: asked in the context, whenever it is sent.
    pub(crate) fn poll_asked_if<C>(&mut self, cx: &mut TaskContext<'_>, may: C) -> Poll<Result<(), CallError>>
    where
        C: Fn() -> bool + Clone + Send + 'static,
    {
        let this = self;
        loop {
            let asked = match &mut this.state {
                State::Start(wait) => {
                    let wait = *wait;
                    // A promise is used at once: nobody would give it back if this were dropped here.
                    if matches!(wait, Wait::Await) {
                        ready!(budget::proceed(cx));
                    }
                    let (face, envelope, payload, deadline) =
                        (this.face, &this.envelope, &mut this.payload, this.deadline);
                    let asked = face.enter(|engine| {
                        if !may() {
                            return Asked::Failed(Fault::Shutdown.into());
                        }
                        ask(&mut engine.scope(), envelope, payload, wait, || Handle::of(face), deadline)
                    });
                    budget::spend(budget::MESSAGE);
                    match asked {
                        Ok(asked) => asked,
                        Err(_) => {
                            let (handle, envelope, mut payload) =
                                (Handle::of(face), envelope.clone(), payload.take());
                            let may = may.clone();
                            this.state = State::Posted(face.post(move |scope| {
                                let asked = if may() {
                                    ask(scope, &envelope, &mut payload, wait, || handle, deadline)
                                } else {
                                    Asked::Failed(Fault::Shutdown.into())
                                };
                                (asked, payload)
                            }));
                            continue;
                        }
                    }
                }
                State::Posted(posted) => {
                    let (asked, payload) = ready!(posted.poll(cx));
                    this.payload = payload;
                    asked
                }
                State::Later(pending) => match ready!(pending.poll(this.face, cx)) {
                    Ok(_) => {
                        this.state = State::Start(pending.wait.unwrap_or(Wait::Await));
                        continue;
                    }
                    Err(fault) => return Poll::Ready(Err(fault.into())),
                },
                State::Waiting(_) => return Poll::Ready(Ok(())),
            };
            match asked {
                Asked::Sent(pending) => this.state = State::Waiting(pending),
                Asked::Later(pending) => this.state = State::Later(pending),
                Asked::Failed(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

struct InlineService<H> {
    name: String,
    schema: u64,
    handler: H,
}

impl<H: Fn(Message<'_>, &mut Scope<'_>) -> Result<Buffer, Fault> + Send + Sync> Protocol
    for InlineService<H>
{
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> u64 {
        self.schema
    }

    fn flow(&self) -> Flow {
        Flow::Replied
    }

    #[inline]
    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let Some(to) = message.reply() else { return };
        match (self.handler)(Message::new(message), scope) {
            Ok(answer) => {
                answer.lend(|payload| {
                    scope.reply(to, Ok(payload));
                    ((), None)
                });
            }
            Err(fault) => scope.reply(to, Err(fault)),
        }
    }
}

/// Registers a service whose handler runs inside `advance` and answers at once: for answers that take less time than
/// starting a task does.
///
/// # Errors
/// If the name is taken or impossible.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Messager;
/// use posthaste_protocols::{Namespace, service};
/// // A library of one's own registers in its own namespace, over whatever messager it is given.
/// let mine = Namespace::new(&**job.messager(), "mine");
/// let face = mine.contexts()[0].clone();
/// let echo = service::register_inline(&mine, face, "echo", |request, _| Ok(request.to_bytes().into()))?;
/// assert_eq!(echo.call_bytes(job.rank(), "hello").await?.as_bytes(), b"hello");
/// # job.leave().await
/// # }
/// ```
pub fn register_inline<H>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    handler: H,
) -> Result<Service<Bytes, Bytes>, RegisterError>
where
    H: Fn(Message<'_>, &mut Scope<'_>) -> Result<Buffer, Fault> + Send + Sync + 'static,
{
    let id = messager.register(Arc::new(InlineService { name: name.to_owned(), schema: 0, handler }))?;
    Ok(Service::new(face, id))
}

struct AsyncService<H, Q, A> {
    name: String,
    schema: u64,
    handler: H,
    runtime: tokio::runtime::Handle,
    contexts: Vec<Handle>,
    running: Arc<AtomicUsize>,
    limit: usize,
    types: PhantomData<fn(Q) -> A>,
}

/// Answers exactly once, however the handler's task ends.
struct Replier {
    handle: Handle,
    to: ReplyTo,
    running: Arc<AtomicUsize>,
    /// `None` until the handler is through.
    answer: Option<Result<Bytes, Fault>>,
}

impl Drop for Replier {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::AcqRel);
        let (to, me) = (self.to, self.handle.me().rank);
        // A task that is dropped without a panic is dropped with its runtime; the caller sees this side close.
        let unfinished = if std::thread::panicking() { Fault::RemotePanicked(me) } else { Fault::Shutdown };
        let answer = self.answer.take().unwrap_or(Err(unfinished));
        self.handle.post_run(move |scope| scope.reply(to, answer.map(Payload::Owned)));
    }
}

impl<H, Q, A, T> Protocol for AsyncService<H, Q, A>
where
    H: Fn(Q, Rank) -> T + Clone + Send + Sync + 'static,
    T: Future<Output = A> + Send + 'static,
    Q: DeserializeOwned + Send + 'static,
    A: Serialize + Send + 'static,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> u64 {
        self.schema
    }

    fn flow(&self) -> Flow {
        Flow::Replied
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let Some(to) = message.reply() else { return };
        let me = scope.me();
        if self.running.fetch_add(1, Ordering::AcqRel) >= self.limit {
            self.running.fetch_sub(1, Ordering::AcqRel);
            scope.reply(to, Err(Fault::Busy(me.rank)));
            return;
        }
        let source = message.source.rank;
        let message: OwnedMessage = Message::new(message).into_owned();
        let replier = Replier {
            handle: self.contexts[me.context.index()].clone(),
            to,
            running: self.running.clone(),
            answer: None,
        };
        let handler = self.handler.clone();
        self.runtime.spawn(async move {
            // Moved in whole: it answers when it is dropped, also by a panic.
            let mut replier = replier;
            let request = decode::<Q>(&message.into_bytes()).map_err(|error| {
                tracing::debug!(%error, "request not understood");
                Fault::Undecodable(me.rank)
            });
            let answer = match request {
                Err(fault) => Err(fault),
                Ok(request) => {
                    let answer = handler(request, source).await;
                    encode(&answer).map(Bytes::from).map_err(|_| Fault::Undecodable(me.rank))
                }
            };
            replier.answer = Some(answer);
            drop(replier);
        });
    }
}

/// Registers a service whose async handler runs in a task of its own. Its types are looked at as
/// [`encoded_schema`] says.
///
/// # Errors
/// If the name is taken or impossible.
///
/// # Panics
/// Outside a Tokio runtime.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Messager, ServiceOptions};
/// use posthaste_protocols::service;
/// // A library that is given a messager registers so; `Job::service_with` does the same.
/// let messager = job.messager();
/// let face = messager.contexts()[0].clone();
/// let options = ServiceOptions { limit: 4 };
/// let who = service::register_async(&**messager, face, "who", options, |_: (), from| async move { from.0 })?;
/// assert_eq!(who.call(job.rank(), ()).await?, 0);
/// # job.leave().await
/// # }
/// ```
pub fn register_async<H, Q, A, T>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    options: ServiceOptions,
    handler: H,
) -> Result<Service<Q, A>, RegisterError>
where
    H: Fn(Q, Rank) -> T + Clone + Send + Sync + 'static,
    T: Future<Output = A> + Send + 'static,
    Q: Serialize + DeserializeOwned + Send + 'static,
    A: Serialize + DeserializeOwned + Send + 'static,
{
    let id = messager.register(Arc::new(AsyncService {
        name: name.to_owned(),
        schema: encoded_schema::<(Q, A)>(),
        handler,
        runtime: tokio::runtime::Handle::current(),
        contexts: messager.contexts().to_vec(),
        running: Arc::default(),
        limit: options.limit.max(1),
        types: PhantomData::<fn(Q) -> A>,
    }))?;
    Ok(Service::new(face, id))
}
