//! The side that answers: in the handler's place, or in a task of its own.

use super::{Service, ServiceOptions};
use crate::buffer::Buffer;
use crate::codec::{decode, encode, encoded_schema};
use crate::message::{Message, OwnedMessage};
use bytes::Bytes;
use posthaste_core::engine::Payload;
use posthaste_core::protocol::{Flow, Incoming, Protocol, ReplyTo};
use posthaste_core::{Fault, Handle, Messager, Rank, RegisterError, Scope};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
        let Some(to) = message.reply() else { return unasked(&self.name, scope, &message) };
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
        let (handler, name) = (self.handler.clone(), self.name.clone());
        scope.started_task();
        self.runtime.spawn(async move {
            // Moved in whole: it answers when it is dropped, also by a panic.
            let mut replier = replier;
            let request = decode::<Q>(&message.into_bytes()).map_err(|error| {
                tracing::debug!(name, %source, %error, "a request could not be decoded");
                Fault::Undecodable(me.rank)
            });
            let answer = match request {
                Err(fault) => Err(fault),
                Ok(request) => {
                    let answer = handler(request, source).await;
                    encode(&answer).map(Bytes::from).map_err(|error| {
                        tracing::warn!(name, %source, %error, "an answer could not be encoded");
                        Fault::Unencodable(me.rank)
                    })
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
