//! Active messages: a registered name, a handler for what arrives, and the way to send.

use crate::buffer::Buffer;
use crate::message::Message;
use crate::multisend::Multisend;
use crate::send::{Envelope, SendMessage, SendSlice};
use bytes::BytesMut;
use posthaste_core::context::Face;
use posthaste_core::engine::{SendArgs, Sent, Wait};
use posthaste_core::protocol::{Accept, ArrivedWords, FirstPacket, Flow, Incoming, Protocol};
use posthaste_core::{
    Context, Endpoint, Fault, Handle, Messager, ProtocolId, Rank, RegisterError, Scope, SendError,
    TrySendError,
};
use std::sync::Arc;

/// A registered active message (D07): sends go out through it. Cheap to clone.
///
/// The face decides what a send costs: a [`Handle`] works from anywhere, [`on`](Self::on) binds it to an owned
/// [`Context`].
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
    #[inline]
    pub fn try_send(&self, target: Rank, payload: impl Into<Buffer>) -> Result<(), TrySendError<Buffer>> {
        crate::send::try_now(&self.face, &self.envelope(target), payload.into())
    }

    /// Sends the same payload to all of these ranks in one call (D18): no group, nothing is forwarded, and all share the
    /// bytes. A rank that is named twice gets two messages.
    ///
    /// # Errors
    /// Of the future: the ranks that could not be sent to; all others were.
    ///
    /// # Cancel safety
    /// See [`Multisend`].
    #[inline]
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
    pub fn send_in(
        &self,
        scope: &mut Scope<'_>,
        target: Endpoint,
        payload: impl Into<Buffer>,
    ) -> Result<(), TrySendError<Buffer>> {
        let args = SendArgs { target, protocol: self.id, cookie: 0, info: &[], relaxed: false };
        let mut failed = None;
        let (full, back) = payload.into().lend(|payload| match scope.send(&args, payload, Wait::Never) {
            Ok(Sent::Done | Sent::Queued(_)) => (false, None),
            Ok(Sent::Later(_, _, payload) | Sent::Full(payload)) => {
                (true, Some(crate::buffer::Unsent::new(payload)))
            }
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

    /// Borrows page memory of the device to be filled and sent without any copy; `None` if there is none now.
    #[must_use]
    pub fn loan(&self, len: usize) -> Option<posthaste_core::Loan> {
        self.face.enter(|engine| engine.scope().loan(len)).ok().flatten()
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

    #[inline]
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

/// What a first-packet handler knows (D09).
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

/// Registers a message whose handler runs at the first packet and chooses the buffer (D09).
///
/// # Errors
/// If the name is taken or impossible.
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
