//! The side that answers: in the handler's place, or in a task.

use super::{Service, ServiceOptions};
use crate::buffer::Buffer;
use crate::codec::{decode, encode, encoded_schema};
use crate::message::{Message, OwnedMessage};
use bytes::Bytes;
use posthaste_core::budget;
use posthaste_core::engine::Payload;
use posthaste_core::protocol::{ArrivedWord, Flow, Incoming, Protocol, ReplyTo};
use posthaste_core::sync::lock;
use posthaste_core::{ContextId, Endpoint, Fault, Handle, Messager, Rank, RegisterError, Scope};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// A message for a service that asks for no answer, as no [`Service`] sends it. Its sender has taken credit for it.
#[cold]
fn unasked(name: &str, scope: &mut Scope<'_>, message: &Incoming<'_>) {
    tracing::warn!(name, source = %message.source, "a message for a service that asks for no answer: it is dropped");
    scope.consumed(message.credit());
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

    #[inline(always)]
    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let Some(to) = message.reply() else { return unasked(&self.name, scope, &message) };
        self.answer(scope, to, message);
    }

    #[inline]
    fn on_word(&self, scope: &mut Scope<'_>, word: &ArrivedWord) {
        let Some(to) = word.reply() else { return unasked(&self.name, scope, &word.message()) };
        // Made where its handler looks at it: see `ArrivedWord::message`.
        self.answer(scope, to, word.message());
    }
}

impl<H: Fn(Message<'_>, &mut Scope<'_>) -> Result<Buffer, Fault>> InlineService<H> {
    #[inline(always)]
    fn answer(&self, scope: &mut Scope<'_>, to: ReplyTo, message: Incoming<'_>) {
        let answer = (self.handler)(Message::new(message), scope);
        // Looked at where it is: an answer that is moved has to wait for its own stores.
        if let Ok(answer) = &answer
            && answer.inline_word().is_some_and(|word| scope.reply_word(to, word))
        {
            return;
        }
        match answer {
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

/// What all requests to a service share.
struct Served<H, Q, A> {
    name: String,
    handler: H,
    contexts: Vec<Handle>,
    running: AtomicUsize,
    limit: usize,
    resting: Resting,
    /// Where its tasks run.
    runtime: tokio::runtime::Handle,
    types: PhantomData<fn(Q) -> A>,
}

struct AsyncService<H, Q, A> {
    served: Arc<Served<H, Q, A>>,
    schema: u64,
}

/// A request that was taken in, and who is to hear of its end.
struct Request {
    source: Rank,
    message: OwnedMessage,
    replier: Replier,
}

/// Answers exactly once, however the handler's task ends.
struct Replier {
    /// Counts what runs.
    count: Arc<dyn Running>,
    to: ReplyTo,
    me: Endpoint,
    /// `None` until the handler is through.
    answer: Option<Result<Bytes, Fault>>,
}

/// The service whose request has come to its end.
trait Running: Send + Sync {
    fn ended(&self);
    fn handle(&self, context: ContextId) -> Option<&Handle>;
    fn runtime(&self) -> &tokio::runtime::Handle;
}

impl<H: Send + Sync, Q, A> Running for Served<H, Q, A> {
    fn ended(&self) {
        self.running.fetch_sub(1, Ordering::AcqRel);
    }

    fn handle(&self, context: ContextId) -> Option<&Handle> {
        self.contexts.get(context.index())
    }

    fn runtime(&self) -> &tokio::runtime::Handle {
        &self.runtime
    }
}

impl Drop for Replier {
    fn drop(&mut self) {
        self.count.ended();
        let Some(handle) = self.count.handle(self.me.context) else { return };
        let to = self.to;
        let answer = match self.answer.take() {
            Some(answer) => answer,
            None if std::thread::panicking() => Err(Fault::RemotePanicked(self.me.rank)),
            // It was dropped with its runtime. If this side ends with that, the caller sees its end.
            None if handle.runtime_ends(self.count.runtime()) => return,
            None => Err(Fault::Shutdown),
        };
        handle.post_run(move |scope| scope.reply(to, answer.map(Payload::Owned)));
    }
}

impl<H, Q, A, T> Served<H, Q, A>
where
    H: Fn(Q, Rank) -> T + Clone + Send + Sync + 'static,
    T: Future<Output = A> + Send + 'static,
    Q: DeserializeOwned + Send + 'static,
    A: Serialize + Send + 'static,
{
    /// Answers a request, and then others for as long as there are any. A panic of the handler ends the task with it.
    async fn work(served: Arc<Self>, first: Request) {
        let (seat, mut served) = (Occupied(Arc::default()), served);
        let mut next = first;
        loop {
            served.answer(next).await;
            if !served.resting.rest(&seat.0) {
                return;
            }
            // A task that rests keeps nothing of a service that is gone.
            let resting = Arc::downgrade(&served);
            drop(served);
            let Some(request) = std::future::poll_fn(|cx| seat.0.poll(cx)).await else { return };
            let Some(again) = resting.upgrade() else { return };
            (next, served) = (request, again);
            // Where another thread always has one more, others have their turn all the same.
            budget::spend(budget::MESSAGE);
            std::future::poll_fn(budget::proceed).await;
        }
    }

    async fn answer(&self, request: Request) {
        // Moved in whole: it answers when it is dropped, also by a panic.
        let Request { source, message, mut replier } = request;
        let me = replier.me.rank;
        let name = &self.name;
        let request = decode::<Q>(&message.into_bytes()).map_err(|error| {
            tracing::warn!(name, %source, %error, "a request could not be decoded");
            Fault::Undecodable(me)
        });
        let answer = match request {
            Err(fault) => Err(fault),
            Ok(request) => {
                let answer = (self.handler.clone())(request, source).await;
                encode(&answer).map(Bytes::from).map_err(|error| {
                    tracing::warn!(name, %source, %error, "an answer could not be encoded");
                    Fault::Unencodable(me)
                })
            }
        };
        replier.answer = Some(answer);
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
        &self.served.name
    }

    fn schema(&self) -> u64 {
        self.schema
    }

    fn flow(&self) -> Flow {
        Flow::Replied
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let served = &self.served;
        let Some(to) = message.reply() else { return unasked(&served.name, scope, &message) };
        let me = scope.me();
        if served.running.fetch_add(1, Ordering::AcqRel) >= served.limit {
            served.running.fetch_sub(1, Ordering::AcqRel);
            scope.reply(to, Err(Fault::Busy(me.rank)));
            return;
        }
        let source = message.source.rank;
        let replier = Replier { count: served.clone(), to, me, answer: None };
        let request = Request { source, message: Message::new(message).into_owned(), replier };
        scope.started_task();
        if let Some(request) = served.resting.give(request) {
            served.runtime.spawn(Served::work(served.clone(), request));
        }
    }

    fn on_close(&self) {
        self.served.resting.close();
    }
}

/// Tasks that have answered, and wait for the next request: to start one takes as long as a short call.
struct Resting(Mutex<Option<Vec<Arc<Seat>>>>);

impl Resting {
    /// So many tasks rest at most.
    const MOST: usize = 16;

    fn new() -> Self {
        Self(Mutex::new(Some(Vec::new())))
    }

    /// The task of this seat is to rest; false: it is to end.
    fn rest(&self, seat: &Arc<Seat>) -> bool {
        match &mut *lock(&self.0) {
            Some(seats) if seats.len() < Self::MOST => {
                seats.push(seat.clone());
                true
            }
            _ => false,
        }
    }

    /// Has the task answer that began to rest last; the request comes back if there is none.
    fn give(&self, mut request: Request) -> Option<Request> {
        loop {
            let Some(seat) = lock(&self.0).as_mut().and_then(Vec::pop) else { return Some(request) };
            // It comes back from a task whose runtime has ended.
            request = seat.give(request)?;
        }
    }

    /// No task rests any more.
    fn close(&self) {
        let seats = lock(&self.0).take();
        seats.into_iter().flatten().for_each(|seat| drop(seat.close()));
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.close();
    }
}

/// Where a task that rests is given its next request.
#[derive(Default)]
struct Seat(Mutex<Sitting>);

#[derive(Default)]
struct Sitting {
    closed: bool,
    request: Option<Request>,
    waker: Option<Waker>,
}

impl Seat {
    fn give(&self, request: Request) -> Option<Request> {
        let mut sitting = lock(&self.0);
        if sitting.closed {
            return Some(request);
        }
        sitting.request = Some(request);
        let waker = sitting.waker.take();
        drop(sitting);
        waker.into_iter().for_each(Waker::wake);
        None
    }

    /// The next request; `None`: there will be none.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<Request>> {
        let mut sitting = lock(&self.0);
        match sitting.request.take() {
            Some(request) => Poll::Ready(Some(request)),
            None if sitting.closed => Poll::Ready(None),
            None => {
                let before = sitting.waker.replace(cx.waker().clone());
                drop(sitting);
                drop(before);
                Poll::Pending
            }
        }
    }

    /// What was given and not begun is answered as what is dropped is.
    fn close(&self) -> Option<Request> {
        let mut sitting = lock(&self.0);
        sitting.closed = true;
        let (request, waker) = (sitting.request.take(), sitting.waker.take());
        drop(sitting);
        waker.into_iter().for_each(Waker::wake);
        request
    }
}

/// A task that may rest, until it ends in whatever way.
struct Occupied(Arc<Seat>);

impl Drop for Occupied {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}

/// Registers a service whose async handler runs in a task that has nothing else to do meanwhile; one that has answered may go on
/// with a later request. Its types are looked at as [`encoded_schema`] says.
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
    let served = Served {
        name: name.to_owned(),
        handler,
        contexts: messager.contexts().to_vec(),
        running: AtomicUsize::new(0),
        limit: options.limit.max(1),
        resting: Resting::new(),
        runtime: tokio::runtime::Handle::current(),
        types: PhantomData::<fn(Q) -> A>,
    };
    let id = messager
        .register(Arc::new(AsyncService { served: Arc::new(served), schema: encoded_schema::<(Q, A)>() }))?;
    Ok(Service::new(face, id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::first_of;
    use crate::service::{ServiceOptions, register_async};
    use futures::future::join_all;
    use posthaste_core::CallError;
    use std::collections::HashSet;

    #[tokio::test]
    async fn a_task_that_has_answered_answers_on_and_few_of_them_rest() {
        let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        let client = first_of(1, 1);
        let ids = Arc::new(Mutex::new(HashSet::new()));
        let seen = ids.clone();
        let handler = move |number: u32, _| {
            let seen = seen.clone();
            async move {
                lock(&seen).insert(tokio::task::id());
                tokio::task::yield_now().await;
                assert!(number < 1000, "what was asked for");
                number + 1
            }
        };
        let face = client.contexts()[0].clone();
        let next = register_async(&client, face, "next", ServiceOptions::default(), handler);
        let next = next.expect("the name is free");
        client.open().await.expect("the device opens");
        let (open, me) = (tasks(), Rank(0));
        for number in 0..100 {
            assert_eq!(next.call(me, number).await, Ok(number + 1));
        }
        assert_eq!((lock(&ids).len(), tasks()), (1, open + 1), "one after the other");
        let together = join_all((0..100).map(|number| next.call(me, number))).await;
        assert!(together.into_iter().zip(1..).all(|(answer, expected)| answer == Ok(expected)));
        while tasks() > open + Resting::MOST {
            tokio::task::yield_now().await;
        }
        // A panic takes its task with it, and no other.
        for _ in 0..3 {
            let panicked = next.call(me, 1000).await;
            assert_eq!(panicked, Err(CallError::Fault(Fault::RemotePanicked(me))));
            assert_eq!(next.call(me, 1).await, Ok(2));
        }
        client.close().await;
        drop((client, next));
        while tasks() > before {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_to_a_task_whose_runtime_has_ended_is_answered() {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let other = builder.worker_threads(1).build().expect("a runtime");
        let client = first_of(1, 1);
        let face = client.contexts()[0].clone();
        let entered = other.enter();
        let echo =
            register_async(&client, face, "echo", ServiceOptions::default(), |number: u32, _| async move {
                number
            });
        drop(entered);
        let echo = echo.expect("the name is free");
        client.open().await.expect("the device opens");
        assert_eq!(echo.call(Rank(0), 5).await, Ok(5));
        std::thread::spawn(|| drop(other)).join().expect("it ends");
        for _ in 0..2 {
            let closed = CallError::Fault(Fault::PeerClosed(Rank(0)));
            assert_eq!(echo.call(Rank(0), 6).await, Err(closed));
        }
        client.close().await;
    }
}
