//! Requests and replies.

mod call;
mod serve;

pub use call::Call;
pub use serve::{register_async, register_inline};

use crate::buffer::Buffer;
use crate::codec::{decode, encode};
use crate::send::Envelope;
use bytes::Bytes;
use posthaste_core::context::Face;
use posthaste_core::{CallError, Context, Endpoint, Handle, ProtocolId, Rank, TrySendError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
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
    /// Handlers that run at once, at least one; a request beyond is answered `Busy`. A sender that has no more credit waits
    /// before: by default its 1,024 requests are as many as that.
    pub limit: usize,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        Self { limit: 1024 }
    }
}

/// A registered service: requests go out through it. Cheap to clone.
///
/// Each request holds a credit until it is answered. Handlers that call services themselves can so come to wait for each other in
/// a ring, deeper than the job has credits (1,024 by default); a deadline ends that ([`Call::deadline`]).
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

    fn envelope(&self, target: Rank) -> Envelope {
        let context = self.face.shared().me().context;
        Envelope { target: Endpoint::new(target, context), protocol: self.id, info: None, relaxed: false }
    }

    fn request(&self, target: Rank, payload: Buffer) -> Call<'_, F> {
        Call::new(&self.face, self.envelope(target), payload)
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

    /// As [`call`](Self::call), but ends with [`DeadlineExceeded`](posthaste_core::Fault::DeadlineExceeded) after this time.
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

    /// Sends a request now or not at all; the reply is awaited by the future. `None`: there is no credit or room now, or the context is
    /// in use (as of [`Call::try_send`]), and nothing was sent.
    ///
    /// # Errors
    /// If the request cannot be encoded or sent; the future's as for [`call`](Self::call).
    ///
    /// # Cancel safety
    /// Dropped, the request is handled all the same, and the reply is dropped when it comes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let square = job.service("square", |number: u64| async move { number * number })?;
    /// let answer = match square.try_call(job.rank(), &12)? {
    ///     Some(reply) => reply.await?,
    ///     None => 12 * 12, // rather than wait
    /// };
    /// assert_eq!(answer, 144);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn try_call<'s>(
        &'s self,
        target: Rank,
        request: &Q,
    ) -> Result<Option<impl Future<Output = Result<A, CallError>> + use<'s, Q, A, F>>, CallError> {
        let payload = encode(request)?;
        match self.request(target, payload.into()).try_send().map_err(TrySendError::into_error) {
            Ok(call) => Ok(Some(async move { decode(call.await?.as_bytes()) })),
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error.into()),
        }
    }
}
