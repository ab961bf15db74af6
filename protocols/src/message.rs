//! A message in the hands of its handler.

use bytes::Bytes;
use posthaste_core::device::{Body, Kept};
use posthaste_core::memory::{LeasedPage, Source};
use posthaste_core::protocol::{Credit, Incoming};
use posthaste_core::{Endpoint, Lease, Rank};
use std::borrow::Cow;
use zerocopy::{FromBytes, IntoBytes};

/// A message during the call of its handler. Short payloads are a private copy, longer ones a lease on the sender's
/// page or owned bytes; all accessors work for all of them.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Message, Scope};
/// let total = job.counter();
/// let count = total.clone();
/// let entry = job.register("entry", move |message: Message, _: &mut Scope| {
///     // A number, and then a name.
///     let number: u32 = message.read(0).unwrap_or(0);
///     let name = &message.bytes()[4..];
///     if name == b"apples" && message.info() == b"add" {
///         count.add(number.into());
///     }
/// })?;
/// let payload = [&7_u32.to_ne_bytes()[..], b"apples"].concat();
/// entry.send(job.rank(), payload).info(b"add").await?;
/// total.reach(7).await;
/// assert_eq!(total.value(), 7);
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct Message<'a>(Incoming<'a>);

impl<'a> Message<'a> {
    #[inline]
    pub(crate) fn new(incoming: Incoming<'a>) -> Self {
        Self(incoming)
    }

    /// What to give back when a credited message has been consumed.
    pub(crate) fn credit(&self) -> Credit {
        self.0.credit()
    }

    /// The rank that sent it.
    #[inline]
    #[must_use]
    pub fn source(&self) -> Rank {
        self.0.source.rank
    }

    /// The endpoint that sent it.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.0.source
    }

    /// Message info, 0 to 112 bytes.
    #[must_use]
    pub fn info(&self) -> &[u8] {
        self.0.info
    }

    /// Payload length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.body.len()
    }

    /// Whether there is no payload.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload, if it is private memory already; `None` for a lease.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let (here, leased) = (job.counter(), job.counter());
    /// let (count, leases) = (here.clone(), leased.clone());
    /// let page = job.register("page", move |message: Message, _: &mut Scope| match message.as_slice() {
    ///     Some(bytes) => count.add(bytes.len() as u64),
    ///     None => leases.add(message.len() as u64), // in the sender's page
    /// })?;
    /// page.send(job.rank(), "short").await?;
    /// page.send(job.rank(), vec![0; 100_000]).await?;
    /// leased.reach(100_000).await;
    /// assert_eq!((here.value(), leased.value()), (5, 100_000));
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> Option<&[u8]> {
        body_slice(&self.0.body)
    }

    /// The payload as a slice, copied if it is a lease.
    #[must_use]
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        bytes_of(self.source_bytes())
    }

    /// The payload as owned bytes; copies unless they are owned already.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        self.0.body.to_bytes()
    }

    /// The payload as text; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// Copies as many bytes as fit from the start of the payload; returns how many.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let bytes = job.counter();
    /// let count = bytes.clone();
    /// let head = job.register("head", move |message: Message, _: &mut Scope| {
    ///     let mut header = [0; 4];
    ///     count.add(message.copy_to(&mut header) as u64);
    ///     assert_eq!(&header, b"HEAD");
    /// })?;
    /// head.send(job.rank(), "HEAD and a long tail").await?;
    /// bytes.reach(4).await;
    /// assert_eq!(bytes.value(), 4);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn copy_to(&self, target: &mut [u8]) -> usize {
        copy_of(self.source_bytes(), target)
    }

    /// The payload where it is.
    pub(crate) fn source_bytes(&self) -> Source<'_> {
        self.0.body.source()
    }

    /// Reads a plain value at a byte offset; `None` if it is not inside.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let sum = job.counter();
    /// let count = sum.clone();
    /// let pair = job.register("pair", move |message: Message, _: &mut Scope| {
    ///     let [a, b]: [u32; 2] = message.read(0).unwrap_or_default();
    ///     assert_eq!(message.read::<u32>(4), Some(b));
    ///     assert_eq!(message.read::<u32>(8), None, "there are eight bytes");
    ///     count.add(u64::from(a + b));
    /// })?;
    /// pair.send(job.rank(), [40_u32.to_ne_bytes(), 2_u32.to_ne_bytes()].concat()).await?;
    /// sum.reach(42).await;
    /// assert_eq!(sum.value(), 42);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    #[must_use]
    pub fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> Option<T> {
        body_read(&self.0.body, offset)
    }

    /// Folds all 64-bit words of the payload in native byte order, the last one filled up with zeros, without
    /// copying a leased page.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let most = job.counter();
    /// let count = most.clone();
    /// let words = job.register("words", move |message: Message, _: &mut Scope| {
    ///     // The page of the sender is read where it is.
    ///     count.add(message.fold_words(0, |most: u64, word| most.max(word)));
    /// })?;
    /// let payload: Vec<u8> = (0..10_000_u64).flat_map(u64::to_ne_bytes).collect();
    /// words.send(job.rank(), payload).await?;
    /// most.reach(9_999).await;
    /// assert_eq!(most.value(), 9_999);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn fold_words<A>(&self, init: A, f: impl FnMut(A, u64) -> A) -> A {
        fold(self.source_bytes(), init, f)
    }

    /// Sums all whole 64-bit words of the payload, wrapping: the fast form of a checksum over a leased page.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let sum = job.counter();
    /// let count = sum.clone();
    /// let words = job.register("words", move |message: Message, _: &mut Scope| count.add(message.sum_words()))?;
    /// let payload: Vec<u8> = (1..=1_000_u64).flat_map(u64::to_ne_bytes).collect();
    /// words.send(job.rank(), payload).await?;
    /// sum.reach(500_500).await;
    /// assert_eq!(sum.value(), 500_500);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn sum_words(&self) -> u64 {
        sum(self.source_bytes())
    }

    /// Keeps the message beyond the call: a lease is kept, a short payload is copied.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, OwnedMessage, Scope};
    /// use std::sync::mpsc;
    /// let (sender, receiver) = mpsc::channel::<OwnedMessage>();
    /// let keep = job.register("keep", move |message: Message, _: &mut Scope| {
    ///     let _ = sender.send(message.into_owned()); // for another thread, without a copy of a long payload
    /// })?;
    /// keep.send(job.rank(), vec![5; 100_000]).await?;
    /// job.flush(job.rank()).await?; // its handler has run
    /// let message = receiver.try_recv().expect("it was kept");
    /// assert_eq!((message.len(), message.read::<u8>(99_999)), (100_000, Some(5)));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn into_owned(self) -> OwnedMessage {
        let Incoming { source, info, body, .. } = self.0;
        OwnedMessage { source, info: Bytes::copy_from_slice(info), body: body.keep() }
    }
}

/// A message that was kept.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (text, mut texts) = job.stream("text")?;
/// text.send(job.rank(), "plain text").info(b"utf-8").await?;
/// let message = texts.recv().await.expect("the job goes on");
/// assert_eq!((message.source(), message.info()), (job.rank(), &b"utf-8"[..]));
/// assert_eq!(message.into_bytes(), "plain text");
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct OwnedMessage {
    source: Endpoint,
    info: Bytes,
    body: Kept,
}

impl OwnedMessage {
    /// The rank that sent it.
    #[must_use]
    pub fn source(&self) -> Rank {
        self.source.rank
    }

    /// The endpoint that sent it.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.source
    }

    /// Message info, 0 to 112 bytes.
    #[must_use]
    pub fn info(&self) -> &[u8] {
        &self.info
    }

    /// Payload length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.body.len()
    }

    /// Whether there is no payload.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload; copied if it is a lease, which ends.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self.body {
            Kept::Bytes(bytes) => bytes,
            Kept::Lease(lease) => lease.to_bytes(),
        }
    }

    /// A copy of the payload (for free if it is owned already).
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match &self.body {
            Kept::Bytes(bytes) => bytes.clone(),
            Kept::Lease(lease) => lease.to_bytes(),
        }
    }

    /// The payload as text; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// The payload, if it is private memory; `None` for a lease.
    #[must_use]
    pub fn as_slice(&self) -> Option<&[u8]> {
        match self.body.source() {
            Source::Private(bytes) => Some(bytes),
            Source::Shared(_) => None,
        }
    }

    /// The payload as a slice, copied if it is a lease.
    #[must_use]
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        bytes_of(self.body.source())
    }

    /// Copies as many bytes as fit from the start of the payload; returns how many.
    pub fn copy_to(&self, target: &mut [u8]) -> usize {
        copy_of(self.body.source(), target)
    }

    /// Folds all 64-bit words of the payload in native byte order, the last one filled up with zeros, without copying a leased
    /// page.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (values, mut arriving) = job.stream("values")?;
    /// let numbers: Vec<u8> = (1..=1000u64).flat_map(u64::to_ne_bytes).collect();
    /// values.send(job.rank(), numbers).await?;
    /// let message = arriving.recv().await.expect("the job goes on");
    /// assert_eq!(message.fold_words(0, u64::max), 1000);
    /// assert_eq!(message.sum_words(), 500_500);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn fold_words<A>(&self, init: A, f: impl FnMut(A, u64) -> A) -> A {
        fold(self.body.source(), init, f)
    }

    /// Sums all whole 64-bit words of the payload, wrapping: the fast form of a checksum over a leased page.
    #[must_use]
    pub fn sum_words(&self) -> u64 {
        sum(self.body.source())
    }

    /// The lease on the sender's page, if the payload is one.
    ///
    /// # Errors
    /// With the message, if its payload is owned already.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (page, mut pages) = job.stream("page")?;
    /// page.send(job.rank(), vec![1; 100_000]).await?;
    /// let long = pages.recv().await.expect("the job goes on");
    /// // What lies in a page of the sender can be read there, for as long as the lease is held.
    /// let lease = long.into_lease().expect("it is long");
    /// assert_eq!(lease.memory().read_u64(8), u64::from_ne_bytes([1; 8]));
    /// page.send(job.rank(), "short").await?;
    /// let short = pages.recv().await.expect("the job goes on");
    /// assert!(short.into_lease().is_err(), "it was copied");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn into_lease(self) -> Result<Lease, OwnedMessage> {
        match self.body {
            Kept::Lease(lease) => Ok(lease),
            body => Err(OwnedMessage { body, ..self }),
        }
    }

    /// Reads a plain value at a byte offset; `None` if it is not inside.
    #[must_use]
    pub fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> Option<T> {
        match self.body.source() {
            Source::Private(bytes) => bytes_read(bytes, offset),
            Source::Shared(page) => page_read(page, offset),
        }
    }
}

#[inline]
fn body_slice<'b>(body: &'b Body<'_>) -> Option<&'b [u8]> {
    match body {
        Body::Short(bytes) => Some(bytes),
        Body::Owned(bytes) => Some(bytes),
        Body::Lease(_) => None,
    }
}

fn bytes_of(source: Source<'_>) -> Cow<'_, [u8]> {
    match source {
        Source::Shared(page) => Cow::Owned(page.to_vec()),
        Source::Private(bytes) => Cow::Borrowed(bytes),
    }
}

fn copy_of(source: Source<'_>, target: &mut [u8]) -> usize {
    let len = source.len().min(target.len());
    match source {
        Source::Shared(page) => page.read(&mut target[..len]),
        Source::Private(bytes) => target[..len].copy_from_slice(&bytes[..len]),
    }
    len
}

fn sum(source: Source<'_>) -> u64 {
    match source {
        Source::Shared(page) => page.sum_words(),
        Source::Private(bytes) => bytes
            .chunks_exact(8)
            .fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(word.try_into().unwrap_or_default()))),
    }
}

#[inline]
fn body_read<T: FromBytes + IntoBytes>(body: &Body<'_>, offset: usize) -> Option<T> {
    match body {
        Body::Short(bytes) => bytes_read(bytes, offset),
        other => long_read(other, offset),
    }
}

/// Apart from what a short message takes: a handler that reads of a message is small enough then to become part of the loop
/// that is handed many.
#[inline(never)]
fn long_read<T: FromBytes + IntoBytes>(body: &Body<'_>, offset: usize) -> Option<T> {
    match body.source() {
        Source::Shared(page) => page_read(page, offset),
        Source::Private(bytes) => bytes_read(bytes, offset),
    }
}

#[inline]
fn bytes_read<T: FromBytes>(bytes: &[u8], offset: usize) -> Option<T> {
    T::read_from_prefix(bytes.get(offset..)?).ok().map(|(value, _)| value)
}

/// Reads through a private copy: the peer could write to the page meanwhile.
fn page_read<T: FromBytes + IntoBytes>(page: LeasedPage<'_>, offset: usize) -> Option<T> {
    let slice = page.slice(offset as u64, size_of::<T>() as u64)?;
    let mut value = T::new_zeroed();
    slice.read(value.as_mut_bytes());
    Some(value)
}

fn fold<A>(source: Source<'_>, init: A, mut f: impl FnMut(A, u64) -> A) -> A {
    match source {
        Source::Shared(page) => page.fold_words(init, f),
        Source::Private(bytes) => {
            let mut acc = init;
            for part in bytes.chunks(8) {
                let mut word = [0; 8];
                word[..part.len()].copy_from_slice(part);
                acc = f(acc, u64::from_ne_bytes(word));
            }
            acc
        }
    }
}
