//! Sends of borrowed bytes.

use super::{Envelope, SendMessage};
use crate::buffer::Buffer;
use crate::operation::Way;
use posthaste_core::budget;
use posthaste_core::context::Face;
use posthaste_core::engine::{Scope, Whole};
use posthaste_core::{ContextId, Endpoint, ProtocolId, Rank, SendError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// A send of borrowed bytes. Ready when they are reusable and the message is on its way, in order.
///
/// They are copied when it starts, by the first poll as a rule: to where the receiver finds them, or to a queue. Order and
/// cancel safety are those of [`SendMessage`], which has options as well.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (line, mut lines) = job.stream("line")?;
/// let text = String::from("one\ntwo");
/// for part in text.split('\n') {
///     line.send_slice(job.rank(), part.as_bytes()).await?; // borrowed until it is ready
/// }
/// let lens = [lines.recv().await, lines.recv().await].map(|line| line.map_or(0, |line| line.len()));
/// assert_eq!(lens, [3, 3]);
/// # job.leave().await
/// # }
/// ```
#[must_use = "a send does nothing until it is awaited"]
#[derive(Debug)]
pub struct SendSlice<'f, 's, F: Face> {
    face: &'f F,
    // In words as they are loaded, which may be wider than what was stored of the types themselves: such a load waits for all
    // stores that are under way.
    rank: Rank,
    context: u32,
    protocol: u32,
    bytes: &'s [u8],
    way: Way<SendMessage<'f, F>>,
}

impl<F: Face> Unpin for SendSlice<'_, '_, F> {}

impl<'f, 's, F: Face> SendSlice<'f, 's, F> {
    #[inline]
    pub(crate) fn new(face: &'f F, target: Endpoint, protocol: ProtocolId, bytes: &'s [u8]) -> Self {
        let (rank, context, protocol) = (target.rank, target.context.0.into(), protocol.0.into());
        Self { face, rank, context, protocol, bytes, way: Way::Fresh }
    }

    #[inline(always)]
    fn target(&self) -> (Endpoint, ProtocolId) {
        (Endpoint::new(self.rank, ContextId(self.context as u16)), ProtocolId(self.protocol as u16))
    }

    /// As the free [`send_at_once`]; what enters the engine is not shared with that one, which is to be inlined where it is.
    #[inline]
    fn send_at_once(&self) -> bool {
        // By reference: what is moved is loaded by more than a field at a time, which waits for all stores that are under way.
        let send = |scope: &mut Scope<'_>| {
            let (target, protocol) = self.target();
            match <[u8; 8]>::try_from(self.bytes) {
                Ok(word) => scope.send_word(target, protocol, u64::from_ne_bytes(word)),
                Err(_) => scope.send_packet(target, protocol, Whole::Bytes(self.bytes)),
            }
        };
        self.face.enter(|engine| send(&mut engine.scope())).unwrap_or(false)
    }

    /// The general way, of which nothing is done yet.
    #[cold]
    fn message(&self) -> SendMessage<'f, F> {
        let (target, protocol) = self.target();
        let envelope = Envelope { target, protocol, info: None, relaxed: false };
        SendMessage { face: self.face, envelope, deadline: None, buffer: None, slow: None }
    }

    /// Starts it the general way. `None`: it is on its way.
    #[cold]
    fn start_slowly(&self) -> Result<Option<SendMessage<'f, F>>, SendError> {
        let mut send = self.message();
        Ok(if send.begin(self.bytes)? { None } else { Some(send) })
    }

    /// With options that few sends have. They are for one that has not begun.
    fn with(self) -> SendSliceWith<'f, 's, F> {
        let (send, begun) = match self.way {
            Way::Fresh => (self.message(), false),
            Way::Slow(send) => (*send, true),
            Way::Done => (self.message(), true),
        };
        SendSliceWith { bytes: self.bytes, send, begun }
    }

    /// Message info, up to 112 bytes, which is copied.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (block, mut blocks) = job.stream("block")?;
    /// // A header of one's own, and data that stays where it is.
    /// let data = vec![7_u8; 1000];
    /// block.send_slice(job.rank(), &data).info(&42_u32.to_le_bytes()).await?;
    /// let received = blocks.recv().await.expect("the job goes on");
    /// assert_eq!((received.info(), received.len()), (&42_u32.to_le_bytes()[..], 1000));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn info(self, info: &[u8]) -> SendSliceWith<'f, 's, F> {
        self.with().info(info)
    }

    /// As [`SendMessage::deadline`].
    pub fn deadline(self, after: Duration) -> SendSliceWith<'f, 's, F> {
        self.with().deadline(after)
    }

    /// As [`SendMessage::relaxed`].
    pub fn relaxed(self) -> SendSliceWith<'f, 's, F> {
        self.with().relaxed()
    }

    /// As [`SendMessage::sequential`].
    pub fn sequential(self) -> SendSliceWith<'f, 's, F> {
        self.with().sequential()
    }

    /// As [`SendMessage::to_context`].
    pub fn to_context(self, context: ContextId) -> SendSliceWith<'f, 's, F> {
        self.with().to_context(context)
    }

    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let Way::Slow(send) = &mut self.way else { return Poll::Ready(Ok(())) };
        let outcome = ready!(send.step_slowly(cx));
        self.way = Way::Done;
        Poll::Ready(outcome)
    }
}

impl<F: Face> Future for SendSlice<'_, '_, F> {
    type Output = Result<(), SendError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Way::Fresh = self.way {
            ready!(budget::proceed(cx));
            let slow = if self.send_at_once() { Ok(None) } else { self.start_slowly() };
            self.way = Way::Done;
            budget::spend_on(budget::MESSAGE, self.bytes.len());
            match slow {
                Ok(None) => return Poll::Ready(Ok(())),
                Ok(Some(send)) => self.way = Way::Slow(Box::new(send)),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        self.poll_slowly(cx)
    }
}

/// A [`SendSlice`] with options. Ready when the bytes are reusable and the message is on its way.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// use std::time::Duration;
/// let job = posthaste::solo().await?;
/// let (line, mut lines) = job.stream("line")?;
/// let text = String::from("borrowed");
/// line.send_slice(job.rank(), text.as_bytes()).info(b"with a header").deadline(Duration::from_secs(1)).await?;
/// assert_eq!(lines.recv().await.expect("the job goes on").info(), b"with a header");
/// # job.leave().await
/// # }
/// ```
#[must_use = "a send does nothing until it is awaited"]
#[derive(Debug)]
pub struct SendSliceWith<'f, 's, F: Face> {
    bytes: &'s [u8],
    /// Without its payload until it has begun, and has to wait.
    send: SendMessage<'f, F>,
    begun: bool,
}

impl<F: Face> Unpin for SendSliceWith<'_, '_, F> {}

impl<'f, F: Face> SendSliceWith<'f, '_, F> {
    /// What has begun goes on as it is.
    fn change(mut self, change: impl FnOnce(SendMessage<'f, F>) -> SendMessage<'f, F>) -> Self {
        if !self.begun {
            self.send = change(self.send);
        }
        self
    }

    /// As [`SendMessage::info`].
    pub fn info(self, info: &[u8]) -> Self {
        self.change(|send| send.info(info))
    }

    /// As [`SendMessage::deadline`].
    pub fn deadline(self, after: Duration) -> Self {
        self.change(|send| send.deadline(after))
    }

    /// As [`SendMessage::relaxed`].
    pub fn relaxed(self) -> Self {
        self.change(SendMessage::relaxed)
    }

    /// As [`SendMessage::sequential`].
    pub fn sequential(self) -> Self {
        self.change(SendMessage::sequential)
    }

    /// As [`SendMessage::to_context`].
    pub fn to_context(self, context: ContextId) -> Self {
        self.change(|send| send.to_context(context))
    }
}

impl<F: Face> Future for SendSliceWith<'_, '_, F> {
    type Output = Result<(), SendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let SendSliceWith { bytes, send, begun } = &mut *self;
        if !*begun {
            if send.is_sequential() {
                // It waits for those before it.
                send.buffer = Some(Buffer::copy(bytes));
                *begun = true;
                return send.step(cx);
            }
            ready!(budget::proceed(cx));
            *begun = true;
            budget::spend_on(budget::MESSAGE, bytes.len());
            if send.begin(bytes)? {
                return Poll::Ready(Ok(()));
            }
        }
        send.step(cx)
    }
}
