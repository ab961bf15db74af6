//! What a rank registers: messages, streams, services.

use super::Job;
use bytes::Bytes;
use posthaste_core::{Fault, Rank, RegisterError, Scope};
use posthaste_protocols::{
    ActiveMessage, Buffer, Control, EncodedMessage, Fill, First, Message, MessageStream, OwnedMessage,
    Service, ServiceOptions, TypedMessage, handler, service, stream, typed,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use zerocopy::{FromBytes, Immutable, IntoBytes};

impl Job {
    /// Registers a message whose handler runs inside `advance`, for each message, in order. It must be short.
    ///
    /// It runs on whichever thread is at the context: do not block, do not count on a Tokio runtime, and send by
    /// [`send_in`](ActiveMessage::send_in). A panic is caught, logged, and counted in [`Stats::panics`](crate::Stats); the sender
    /// is not told.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let words = job.counter();
    /// let count = words.clone();
    /// let text = job.register("text", move |message: Message, _: &mut Scope| {
    ///     count.add(message.text().split(' ').count() as u64);
    /// })?;
    /// text.send(job.rank(), "three short words").await?;
    /// text.send(job.rank(), "and info").info(b"up to 112 bytes").await?;
    /// words.reach(5).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register<H>(&self, name: &str, handler: H) -> Result<ActiveMessage, RegisterError>
    where
        H: Fn(Message<'_>, &mut Scope<'_>) + Send + Sync + 'static,
    {
        handler::register(&*self.client, self.handle.clone(), name, 0, handler)
    }

    /// Registers a control: sixteen bytes that get past messages, puts and gets, and are ordered only among
    /// themselves. The handler runs inside `advance`, with the rank that sent it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let stops = job.counter();
    /// let count = stops.clone();
    /// let stop = job.register_control("stop", move |_from, payload: [u8; 16], _| count.add(u64::from(payload[0])))?;
    /// stop.send(job.rank(), [1; 16]).await?;
    /// stops.reach(1).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible.
    pub fn register_control<H>(&self, name: &str, handler: H) -> Result<Control, RegisterError>
    where
        H: Fn(Rank, [u8; 16], &mut Scope<'_>) + Send + Sync + 'static,
    {
        posthaste_protocols::control::register(&*self.client, self.handle.clone(), name, handler)
    }

    /// Registers a message of one plain-old-data type; ranks that registered another type under the name refuse it.
    /// Send it with [`TypedMessage::send`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let sum = job.counter();
    /// let total = sum.clone();
    /// let add = job.register_typed("add", move |pair: [u32; 2], _source, _scope: &mut posthaste::Scope| {
    ///     total.add(u64::from(pair[0]) + u64::from(pair[1]));
    /// })?;
    /// add.send(job.rank(), &[40, 2]).await?;
    /// sum.reach(42).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register_typed<T, H>(&self, name: &str, handler: H) -> Result<TypedMessage<T>, RegisterError>
    where
        T: FromBytes + IntoBytes + Immutable + 'static,
        H: Fn(T, Rank, &mut Scope<'_>) + Send + Sync + 'static,
    {
        typed::register_plain(&*self.client, self.handle.clone(), name, handler)
    }

    /// Registers a message of one type that serde encodes; ranks that registered another type under the name refuse it. Send it
    /// with [`EncodedMessage::send`].
    ///
    /// To tell, a few values are deserialized from nothing as it is registered, and forgotten.
    ///
    /// The encoding is postcard's, which has no names: a value that leaves out a field (`#[serde(skip_serializing_if = "..")]`) is
    /// refused where it is sent, and types that their bytes have to describe (`#[serde(untagged)]`, `#[serde(tag = "..")]`,
    /// `#[serde(flatten)]`) do not go through it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Rank, Scope};
    /// let letters = job.counter();
    /// let count = letters.clone();
    /// let names = job.register_encoded("names", move |names: Vec<String>, _: Rank, _: &mut Scope| {
    ///     count.add(names.iter().map(|name| name.len() as u64).sum());
    /// })?;
    /// names.send(job.rank(), &vec!["Ada".into(), "Grace".into()])?.await?;
    /// letters.reach(8).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register_encoded<T, H>(&self, name: &str, handler: H) -> Result<EncodedMessage<T>, RegisterError>
    where
        T: Serialize + DeserializeOwned + 'static,
        H: Fn(T, Rank, &mut Scope<'_>) + Send + Sync + 'static,
    {
        typed::register_encoded(&*self.client, self.handle.clone(), name, handler)
    }

    /// Registers a message whose handler runs at the first packet and chooses the buffer.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Fill, First};
    /// let heads = job.counter();
    /// let count = heads.clone();
    /// let head = job.register_first_packet("head", move |first: First<'_>, _: &mut posthaste::Scope| {
    ///     let count = count.clone();
    ///     // The first four bytes are enough; the rest goes nowhere.
    ///     let buffer = bytes::BytesMut::with_capacity(first.total.min(4) as usize);
    ///     Fill::Into { buffer, limit: 4, done: Box::new(move |_, head| count.add(head.len() as u64)) }
    /// })?;
    /// head.send(job.rank(), vec![7; 100_000]).await?;
    /// heads.reach(4).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register_first_packet<H>(&self, name: &str, handler: H) -> Result<ActiveMessage, RegisterError>
    where
        H: Fn(First<'_>, &mut Scope<'_>) -> Fill + Send + Sync + 'static,
    {
        handler::register_first_packet(&*self.client, self.handle.clone(), name, handler)
    }

    /// Registers a message that is delivered to a stream; a slow consumer slows its senders.
    ///
    /// What waits in the stream takes credit: 1,024 messages and 16 MiB of payload of each sender (`POSTHASTE_CREDITS`,
    /// `POSTHASTE_CREDIT_BYTES`). Ranks that all send more than that before any of them receives wait for ever: send and
    /// receive at once, by `tokio::join!` or in tasks.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (number, mut numbers) = job.stream("number")?;
    /// for n in 1..=3u64 {
    ///     number.send(job.rank(), n.to_le_bytes()).await?;
    /// }
    /// for n in 1..=3u64 {
    ///     let message = numbers.recv().await.expect("the job goes on");
    ///     assert_eq!(message.read::<u64>(0), Some(n));
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn stream(&self, name: &str) -> Result<(ActiveMessage, MessageStream), RegisterError> {
        stream::register_stream(&*self.client, self.handle.clone(), name)
    }

    /// Registers a message whose async handler runs in a task of its own, at most `limit` at once, and at least one.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let done = job.counter();
    /// let count = done.clone();
    /// let work = job.register_spawned("work", 2, move |message: posthaste::OwnedMessage| {
    ///     let count = count.clone();
    ///     async move {
    ///         tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    ///         count.add(message.len() as u64);
    ///     }
    /// })?;
    /// work.send(job.rank(), "twelve bytes").await?;
    /// done.reach(12).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn register_spawned<H, T>(
        &self,
        name: &str,
        limit: usize,
        handler: H,
    ) -> Result<ActiveMessage, RegisterError>
    where
        H: Fn(OwnedMessage) -> T + Clone + Send + Sync + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        stream::register_spawned(&*self.client, self.handle.clone(), name, limit, handler)
    }

    /// Registers a service: an async handler from request to reply, each in a task of its own, or one that is through with another.
    ///
    /// At most 1,024 handlers run at once, whoever asks: beyond that a call fails with [`Fault::Busy`](crate::Fault::Busy)
    /// ([`service_with`](Job::service_with) sets another [limit](ServiceOptions)). If a handler panics, its caller gets
    /// [`Fault::RemotePanicked`](crate::Fault::RemotePanicked).
    ///
    /// Ranks that mean other types by the same name refuse each other's requests. To tell, a few requests and replies are
    /// deserialized from nothing as it is registered, and forgotten. They are encoded as [`register_encoded`](Job::register_encoded)
    /// does it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use std::time::Duration;
    /// let sum = job.service("sum", |numbers: Vec<u64>| async move { numbers.iter().sum::<u64>() })?;
    /// job.barrier().await?;
    /// assert_eq!(sum.call(job.rank(), vec![1, 2, 3]).await?, 6);
    /// assert_eq!(sum.call_within(job.rank(), vec![], Duration::from_secs(5)).await?, 0);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn service<H, Q, A, T>(&self, name: &str, handler: H) -> Result<Service<Q, A>, RegisterError>
    where
        H: Fn(Q) -> T + Clone + Send + Sync + 'static,
        T: Future<Output = A> + Send + 'static,
        Q: Serialize + DeserializeOwned + Send + 'static,
        A: Serialize + DeserializeOwned + Send + 'static,
    {
        self.service_with(name, ServiceOptions::default(), move |request, _| handler(request))
    }

    /// As [`service`](Job::service), with options, and told who asks.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Rank, ServiceOptions};
    /// let who = job.service_with("who", ServiceOptions::default(), |_: (), from: Rank| async move { from.0 })?;
    /// assert_eq!(who.call(job.rank(), ()).await?, 0);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn service_with<H, Q, A, T>(
        &self,
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
        service::register_async(&*self.client, self.handle.clone(), name, options, handler)
    }

    /// Registers a service of bytes whose handler answers at once, inside `advance`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let echo = job.service_inline("echo", |request, _| Ok(request.to_bytes().into()))?;
    /// let reply = echo.call_bytes(job.rank(), "hello").await?;
    /// assert_eq!(reply.as_bytes(), b"hello");
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn service_inline<H>(&self, name: &str, handler: H) -> Result<Service<Bytes, Bytes>, RegisterError>
    where
        H: Fn(Message<'_>, &mut Scope<'_>) -> Result<Buffer, Fault> + Send + Sync + 'static,
    {
        service::register_inline(&*self.client, self.handle.clone(), name, handler)
    }
}
