//! Active messages: a registered name, a handler for what arrives, and the way to send.

use crate::buffer::Buffer;
use crate::message::Message;
use crate::multisend::Multisend;
use crate::send::{Envelope, SendMessage, SendSlice, at_once_in};
use bytes::BytesMut;
use posthaste_core::context::Face;
use posthaste_core::engine::{SendArgs, Sent, Wait};
use posthaste_core::protocol::{Accept, ArrivedWords, FirstPacket, Flow, Incoming, Protocol};
use posthaste_core::{
    Context, Endpoint, Fault, Handle, Messager, ProtocolId, Rank, RegisterError, Scope, SendError,
    TrySendError,
};
use std::sync::Arc;

/// A registered active message: sends go out through it. Cheap to clone.
///
/// The face decides what a send costs: a [`Handle`] works from anywhere, [`on`](Self::on) binds it to an owned
/// [`Context`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{ActiveMessage, Message, Scope};
/// let arrived = job.counter();
/// let count = arrived.clone();
/// let add: ActiveMessage = job.register("add", move |message: Message, _: &mut Scope| {
///     count.add(message.read(0).unwrap_or(0));
/// })?;
/// job.barrier().await?; // all ranks have registered it
/// add.send(job.rank().next(job.size()), 42_u64.to_ne_bytes()).await?;
/// arrived.reach(42).await;
/// assert_eq!(arrived.value(), 42);
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ActiveMessage<F = Handle> {
    face: F,
    id: ProtocolId,
}

impl<F: Face> ActiveMessage<F> {
    pub(crate) fn new(face: F, id: ProtocolId) -> Self {
        Self { face, id }
    }

    pub(crate) fn face(&self) -> &F {
        &self.face
    }

    /// This client's number for it.
    #[must_use]
    pub fn id(&self) -> ProtocolId {
        self.id
    }

    /// The same message sent through an owned context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ContextId, Message, Scope};
    /// let arrived = job.counter();
    /// let count = arrived.clone();
    /// let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1))?;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// let mine = note.on(&context); // its sends take no lock
    /// for _ in 0..100 {
    ///     mine.send(job.rank(), 7_u64.to_ne_bytes()).await?;
    /// }
    /// arrived.reach_on(&context, 100).await;
    /// assert_eq!(arrived.value(), 100);
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn on<'c>(&self, context: &'c Context) -> ActiveMessage<&'c Context> {
        ActiveMessage { face: context, id: self.id }
    }

    /// The same message sent through any face.
    #[must_use]
    pub fn with_face<G: Face>(&self, face: G) -> ActiveMessage<G> {
        ActiveMessage { face, id: self.id }
    }

    /// The same message sent through a context of one's choice.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo_with(1, 2).await?; // one client of two contexts
    /// use posthaste::ContextId;
    /// let (note, mut notes) = job.stream("note")?;
    /// let second = job.context_handle(ContextId(1)).expect("there are two");
    /// // It goes that context's way, to the same context of its target.
    /// note.through(second).send(job.rank(), "beside").await?;
    /// let message = notes.recv().await.expect("the job goes on");
    /// assert_eq!(message.endpoint().context, ContextId(1));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn through(&self, handle: &Handle) -> ActiveMessage {
        ActiveMessage { face: handle.clone(), id: self.id }
    }

    #[inline]
    fn envelope(&self, target: Rank) -> Envelope {
        let context = self.face.shared().me().context;
        Envelope { target: Endpoint::new(target, context), protocol: self.id, info: None, relaxed: false }
    }

    /// Sends a message. Awaiting it means that the source is reusable and the message is on its way, in order.
    ///
    /// # Cancel safety
    /// See [`SendMessage`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (page, mut pages) = job.stream("page")?;
    /// // What owns its bytes is not copied by the caller; short payloads are kept in place.
    /// page.send(job.rank(), vec![1; 5000]).await?;
    /// page.send(job.rank(), "a short one").await?;
    /// // They come in the order in which they were sent.
    /// let lens = [pages.recv().await, pages.recv().await].map(|page| page.map_or(0, |page| page.len()));
    /// assert_eq!(lens, [5000, 11]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn send(&self, target: Rank, payload: impl Into<Buffer>) -> SendMessage<'_, F> {
        SendMessage::new(&self.face, self.envelope(target), payload.into())
    }

    /// Sends borrowed bytes, which are copied when the send starts; what owns more than 31 bytes is not copied by
    /// [`send`](Self::send) if it has to wait. Awaiting it means the same.
    ///
    /// # Cancel safety
    /// See [`SendSlice`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let arrived = job.counter();
    /// let count = arrived.clone();
    /// let lines = job.register("line", move |m: posthaste::Message, _: &mut posthaste::Scope| count.add(m.len() as u64))?;
    /// let text = String::from("a line that the caller keeps");
    /// lines.send_slice(job.rank(), text.as_bytes()).await?;
    /// arrived.reach(text.len() as u64).await;
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn send_slice<'f, 's>(&'f self, target: Rank, bytes: &'s [u8]) -> SendSlice<'f, 's, F> {
        SendSlice::new(&self.face, Endpoint::new(target, self.face.shared().me().context), self.id, bytes)
    }

    /// Sends a message now or not at all; never waits.
    ///
    /// # Errors
    /// With the payload: there is no room now, or the send cannot succeed.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Rank, TrySendError};
    /// let (note, mut notes) = job.stream("note")?;
    /// note.try_send(job.rank(), "at once").expect("nothing stands in the way");
    /// assert!(notes.recv().await.is_some());
    /// // What cannot be sent comes back.
    /// let error = note.try_send(Rank(1000), "nobody").unwrap_err();
    /// assert!(matches!(error, TrySendError::Failed { .. }));
    /// assert_eq!(error.into_payload().into_bytes(), "nobody");
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn try_send(&self, target: Rank, payload: impl Into<Buffer>) -> Result<(), TrySendError<Buffer>> {
        crate::send::try_now(&self.face, &self.envelope(target), payload.into())
    }

    /// Sends the same payload to all of these ranks in one call: no group, nothing is forwarded, and all share the
    /// bytes. A rank that is named twice gets two messages.
    ///
    /// # Errors
    /// Of the future: the ranks that could not be sent to; all others were.
    ///
    /// # Cancel safety
    /// See [`Multisend`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (news, mut all) = job.stream("news")?;
    /// // One payload for all ranks; nobody copies it for each.
    /// news.multicast(job.ranks(), "the same for all").await?;
    /// let message = all.recv().await.expect("the job goes on");
    /// assert_eq!(message.text(), "the same for all");
    /// # job.leave().await
    /// # }
    /// ```
    #[inline(always)]
    pub fn multicast(
        &self,
        targets: impl IntoIterator<Item = Rank>,
        payload: impl Into<Buffer>,
    ) -> Multisend<'_, F> {
        Multisend::multicast(&self.face, self.id, targets, payload.into())
    }

    /// Sends from inside a handler; never waits.
    ///
    /// # Errors
    /// With the payload: there is no room now, or the send cannot succeed.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let pongs = job.counter();
    /// let count = pongs.clone();
    /// let pong = job.register("pong", move |_: Message, _: &mut Scope| count.add(1))?;
    /// let answer = pong.clone();
    /// let ping = job.register("ping", move |message: Message, scope: &mut Scope| {
    ///     // A handler cannot wait: what has no room now comes back.
    ///     answer.send_in(scope, message.endpoint(), "pong").expect("there is room");
    /// })?;
    /// ping.send(job.rank(), "ping").await?;
    /// pongs.reach(1).await;
    /// assert_eq!(pongs.value(), 1);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn send_in(
        &self,
        scope: &mut Scope<'_>,
        target: Endpoint,
        payload: impl Into<Buffer>,
    ) -> Result<(), TrySendError<Buffer>> {
        let mut payload = payload.into();
        if at_once_in(scope, target, self.id, &mut payload) {
            return Ok(());
        }
        let args = SendArgs { target, protocol: self.id, cookie: 0, info: &[], relaxed: false };
        let mut failed = None;
        let (full, back) = payload.lend(|payload| match scope.send(&args, payload, Wait::Never) {
            Ok(Sent::Done) => (false, None),
            Ok(Sent::Full(payload)) => (true, Some(crate::buffer::Unsent::new(payload))),
            Err((error, payload)) => {
                failed = Some(error);
                (false, Some(crate::buffer::Unsent::new(payload)))
            }
        });
        let payload = || back.unwrap_or_else(|| Buffer::copy(&[]));
        match failed {
            Some(error) => Err(TrySendError::Failed { error, payload: payload() }),
            None if full => Err(TrySendError::Full(payload())),
            None => Ok(()),
        }
    }

    /// Borrows page memory of the device to be filled and sent without any copy; `None` if there is none now, or another thread
    /// is at the context all the time that this looks. Handlers have `Scope::loan`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (sums, mut all) = job.stream("sums")?;
    /// let loan = sums.loan(8 * 1000).expect("pages are free");
    /// for index in 0..1000 {
    ///     loan.memory().write_u64(8 * index, index as u64); // straight to where the receiver reads it
    /// }
    /// sums.send(job.rank(), loan).await?;
    /// let message = all.recv().await.expect("the job goes on");
    /// assert_eq!(message.read::<u64>(8 * 999), Some(999));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn loan(&self, len: usize) -> Option<posthaste_core::Loan> {
        // Another thread holds the engine for well under a microsecond as a rule.
        for _ in 0..64 {
            match self.face.enter(|engine| engine.scope().loan(len)) {
                Ok(loan) => return loan,
                Err(_) => std::hint::spin_loop(),
            }
        }
        None
    }
}

struct Inline<H> {
    name: String,
    schema: u64,
    handler: H,
}

impl<H: Fn(Message<'_>, &mut Scope<'_>) + Send + Sync> Protocol for Inline<H> {
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> u64 {
        self.schema
    }

    #[inline(always)]
    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        (self.handler)(Message::new(message), scope);
    }

    fn on_words(&self, scope: &mut Scope<'_>, words: &mut ArrivedWords<'_>) {
        while let Some(word) = words.next(scope) {
            // Made where the handler looks at it: a message that is moved has to wait for its own stores.
            (self.handler)(Message::new(words.message(&word)), scope);
        }
    }
}

/// Registers a message whose handler runs inside `advance`, for each message, in order.
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
/// use posthaste_protocols::handler;
/// let arrived = job.counter();
/// let count = arrived.clone();
/// // A library that is given a messager registers so; `Job::register` does the same.
/// let messager = job.messager();
/// let face = messager.contexts()[0].clone();
/// let note = handler::register(&**messager, face, "note", 0, move |message, _| count.add(message.len() as u64))?;
/// note.send(job.rank(), "four").await?;
/// arrived.reach(4).await;
/// assert_eq!(arrived.value(), 4);
/// # job.leave().await
/// # }
/// ```
pub fn register<H>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    schema: u64,
    handler: H,
) -> Result<ActiveMessage, RegisterError>
where
    H: Fn(Message<'_>, &mut Scope<'_>) + Send + Sync + 'static,
{
    let id = messager.register(Arc::new(Inline { name: name.to_owned(), schema, handler }))?;
    Ok(ActiveMessage::new(face, id))
}

/// What a first-packet handler knows.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Fill, First, Scope};
/// let (bytes, refused) = (job.counter(), job.counter());
/// let (count, drops) = (bytes.clone(), refused.clone());
/// let upload = job.register_first_packet("upload", move |first: First<'_>, _: &mut Scope| {
///     // The first packet tells how long the message is and what its info says.
///     if first.info != b"image" || first.total > 1 << 20 {
///         drops.add(1);
///         return Fill::Discard;
///     }
///     let count = count.clone();
///     let buffer = bytes::BytesMut::with_capacity(first.total as usize);
///     Fill::Into { buffer, limit: 1 << 20, done: Box::new(move |_, image| count.add(image.len() as u64)) }
/// })?;
/// upload.send(job.rank(), vec![0; 50_000]).info(b"image").await?;
/// upload.send(job.rank(), "nobody asked for it").await?;
/// bytes.reach(50_000).await;
/// refused.reach(1).await;
/// assert_eq!((bytes.value(), refused.value()), (50_000, 1));
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct First<'a> {
    /// The rank that sends.
    pub source: Rank,
    /// Message info, 0 to 112 bytes.
    pub info: &'a [u8],
    /// Length of the whole message in bytes.
    pub total: u64,
}

/// What a first-packet handler answers.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Fill, First, Scope};
/// use std::sync::mpsc;
/// let (sender, images) = mpsc::channel();
/// let image = job.register_first_packet("image", move |first: First<'_>, _: &mut Scope| {
///     let sender = sender.clone();
///     // The buffer has a header already; what comes is appended to it.
///     let mut buffer = bytes::BytesMut::from(&b"IMG"[..]);
///     buffer.reserve(first.total as usize);
///     let done = Box::new(move |_: &mut Scope, image| _ = sender.send(image));
///     Fill::Into { buffer, limit: first.total as usize, done }
/// })?;
/// image.send(job.rank(), "pixels").await?;
/// job.flush(job.rank()).await?;
/// assert_eq!(images.try_recv().expect("it has come"), "IMGpixels");
/// # job.leave().await
/// # }
/// ```
pub enum Fill {
    /// Put the message into this buffer, up to `limit` bytes; what is longer is dropped without an error at the
    /// sender. Then run `done` inside `advance`.
    Into {
        /// Bytes are appended to it.
        buffer: BytesMut,
        /// Most bytes to append.
        limit: usize,
        /// Runs once.
        done: posthaste_core::protocol::FilledFn,
    },
    /// Drop the message.
    Discard,
}

impl std::fmt::Debug for Fill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fill::Into { .. } => "Into",
            Fill::Discard => "Discard",
        })
    }
}

struct FirstPacketHandler<H> {
    name: String,
    handler: H,
}

impl<H: Fn(First<'_>, &mut Scope<'_>) -> Fill + Send + Sync> Protocol for FirstPacketHandler<H> {
    fn name(&self) -> &str {
        &self.name
    }

    fn chooses_buffer(&self) -> bool {
        true
    }

    fn accept(&self, scope: &mut Scope<'_>, first: &FirstPacket<'_>) -> Accept {
        let first = First { source: first.source.rank, info: first.info, total: first.total };
        match (self.handler)(first, scope) {
            Fill::Into { buffer, limit, done } => Accept::Fill { buffer, limit, done },
            Fill::Discard => Accept::Discard,
        }
    }

    fn on_message(&self, _scope: &mut Scope<'_>, _message: Incoming<'_>) {
        // `accept` never answers "whole".
    }
}

/// Registers a message whose handler runs at the first packet and chooses the buffer.
///
/// # Errors
/// If the name is taken or impossible.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Fill, Messager};
/// use posthaste_protocols::handler;
/// let dropped = job.counter();
/// let count = dropped.clone();
/// let face = job.messager().contexts()[0].clone();
/// // A name that is known, and whose messages are not wanted.
/// let void = handler::register_first_packet(&**job.messager(), face, "void", move |first, _| {
///     count.add(first.total);
///     Fill::Discard
/// })?;
/// void.send(job.rank(), vec![0; 1 << 20]).await?;
/// dropped.reach(1 << 20).await;
/// assert_eq!(dropped.value(), 1 << 20);
/// # job.leave().await
/// # }
/// ```
pub fn register_first_packet<H>(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    handler: H,
) -> Result<ActiveMessage, RegisterError>
where
    H: Fn(First<'_>, &mut Scope<'_>) -> Fill + Send + Sync + 'static,
{
    let id = messager.register(Arc::new(FirstPacketHandler { name: name.to_owned(), handler }))?;
    Ok(ActiveMessage::new(face, id))
}

/// A send-only registration: this rank sends what others handle. A message that arrives is dropped.
///
/// # Errors
/// If the name is taken or impossible.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste_core::protocol::Flow;
/// use posthaste_protocols::handler;
/// // This rank sends what others handle; nothing that comes to it under the name is kept.
/// let face = job.handle().clone();
/// let log = handler::register_outgoing(&**job.messager(), face, "log", 0, Flow::Credited)?;
/// assert!(job.register("log", |_: posthaste::Message, _: &mut posthaste::Scope| {}).is_err(), "the name is taken");
/// # drop(log);
/// # job.leave().await
/// # }
/// ```
pub fn register_outgoing(
    messager: &dyn Messager,
    face: Handle,
    name: &str,
    schema: u64,
    flow: Flow,
) -> Result<ActiveMessage, RegisterError> {
    struct Outgoing(String, u64, Flow);
    impl Protocol for Outgoing {
        fn name(&self) -> &str {
            &self.0
        }
        fn schema(&self) -> u64 {
            self.1
        }
        fn flow(&self) -> Flow {
            self.2
        }
        fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
            tracing::warn!(name = self.0, source = %message.source, "message for a name that this rank only sends");
            match message.reply() {
                Some(to) => scope.reply(to, Err(Fault::NoSuchProtocol(scope.me().rank))),
                None => scope.consumed(message.credit()),
            }
        }
    }
    let id = messager.register(Arc::new(Outgoing(name.to_owned(), schema, flow)))?;
    Ok(ActiveMessage::new(face, id))
}

/// The error of a send as a result type for `?` in handlers.
pub type SendResult = Result<(), SendError>;
