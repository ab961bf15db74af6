//! Puts: one element, consecutive ones, owned bytes.

use super::{Element, Memory, Stage};
use crate::buffer::{Buffer, INLINE, Kind};
use crate::operation::Pending;
use bytes::Bytes;
use posthaste_core::context::Face;
use posthaste_core::engine::{Payload, Rma};
use posthaste_core::{Endpoint, Rank, RmaError, Scope};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::task::coop::poll_proceed;

/// A put of one element. Ready when it is at the target.
///
/// # Cancel safety
/// As for [`Put`].
#[must_use = "a put does nothing until it is awaited"]
pub struct PutElement<'w, T> {
    pub(super) memory: &'w Arc<Memory>,
    pub(super) rank: Rank,
    pub(super) offset: u64,
    pub(super) value: T,
    /// Made when the put cannot be done at once.
    pub(super) slow: Option<Box<Put<'w>>>,
}

impl<T> Unpin for PutElement<'_, T> {}

impl<T> std::fmt::Debug for PutElement<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutElement")
            .field("rank", &self.rank)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl<'w, T: Element> PutElement<'w, T> {
    /// The earlier stage: ready when the source is reusable, with the future of the later one.
    ///
    /// # Errors
    /// If the put is refused or fails.
    ///
    /// # Cancel safety
    /// As for the put itself.
    pub async fn local(self) -> Result<Put<'w>, RmaError> {
        match self.slow {
            Some(put) => put.local().await,
            None => self.general().local().await,
        }
    }

    #[cold]
    fn general(&self) -> Put<'w> {
        Put::copying(self.memory, self.rank, self.offset, self.value.as_bytes())
    }

    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if self.slow.is_none() {
            self.slow = Some(Box::new(self.general()));
        }
        match &mut self.slow {
            Some(put) => Pin::new(&mut **put).poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<T: Element> Future for PutElement<'_, T> {
    type Output = Result<(), RmaError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.slow.is_none() {
            let coop = ready!(poll_proceed(cx));
            if let Some((part, target)) = self.memory.target(self.rank, self.offset, size_of::<T>() as u64) {
                target.write(self.value.as_bytes());
                part.rouse();
                coop.made_progress();
                return Poll::Ready(Ok(()));
            }
        }
        self.poll_slowly(cx)
    }
}

/// A put. Ready when the data is at the target.
///
/// # Cancel safety
/// Dropped before it was polled, nothing is put. Dropped later, the put goes on; its payload is kept until then.
#[must_use = "a put does nothing until it is awaited"]
pub struct Put<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
    payload: Source,
    stage: Stage,
}

/// Longest copied payload in bytes that is kept in the future of its put: up to there a copy costs less than an allocation.
const SHORT: usize = 192;

/// What is put.
enum Source {
    Short {
        len: u8,
        bytes: [u8; SHORT],
    },
    Buffer(Buffer),
    /// It was handed over.
    Gone,
}

impl Source {
    #[inline]
    fn len(&self) -> usize {
        match self {
            Source::Short { len, .. } => usize::from(*len),
            Source::Buffer(buffer) => buffer.len(),
            Source::Gone => 0,
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Source::Short { len, bytes } => Bytes::copy_from_slice(&bytes[..usize::from(len)]),
            Source::Buffer(buffer) => buffer.into_bytes(),
            Source::Gone => Bytes::new(),
        }
    }
}

impl std::fmt::Debug for Put<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Put").field("rank", &self.rank).field("offset", &self.offset).finish_non_exhaustive()
    }
}

impl<'w> Put<'w> {
    #[inline]
    pub(super) fn new(
        memory: &'w Arc<Memory>,
        part: usize,
        rank: Rank,
        offset: u64,
        payload: Buffer,
    ) -> Self {
        Self { memory, part, rank, offset, payload: Source::Buffer(payload), stage: Stage::Start }
    }

    /// A put of bytes that are copied first.
    #[inline]
    pub(super) fn copying(memory: &'w Arc<Memory>, rank: Rank, offset: u64, source: &[u8]) -> Self {
        let payload = if (INLINE + 1..=SHORT).contains(&source.len()) {
            let mut bytes = [0; SHORT];
            bytes[..source.len()].copy_from_slice(source);
            Source::Short { len: source.len() as u8, bytes }
        } else {
            Source::Buffer(Buffer::copy(source))
        };
        Self { memory, part: rank.index(), rank, offset, payload, stage: Stage::Start }
    }

    /// The earlier stage: ready when the source is reusable, with the future of the later one.
    ///
    /// # Errors
    /// If the put is refused or fails.
    ///
    /// # Cancel safety
    /// As for the put itself.
    pub async fn local(mut self) -> Result<Put<'w>, RmaError> {
        std::future::poll_fn(|cx| {
            // Every device and the queue own the payload as soon as the put is started.
            ready!(self.start(cx)?);
            Poll::Ready(Ok::<(), RmaError>(()))
        })
        .await?;
        Ok(self)
    }

    pub(super) fn is_fresh(&self) -> bool {
        matches!(self.stage, Stage::Start)
    }

    /// Does a put that was not started, if nothing stands in the way of doing it at once.
    #[inline(always)]
    pub(super) fn try_at_once(&mut self) -> Result<bool, RmaError> {
        let len = self.payload.len() as u64;
        let part = self.memory.check(self.part, self.rank, self.offset, len)?;
        let Some(target) = self.memory.inline(part, self.offset, len) else { return Ok(false) };
        match &self.payload {
            Source::Short { len, bytes } => target.write(&bytes[..usize::from(*len)]),
            Source::Buffer(Buffer(Kind::Inline { len, bytes })) => target.write(&bytes[..usize::from(*len)]),
            Source::Buffer(Buffer(Kind::Bytes(bytes))) => target.write(bytes),
            Source::Buffer(Buffer(Kind::Loan(loan))) => target.copy_from(loan.memory),
            Source::Gone => {}
        }
        part.rouse();
        if let Source::Buffer(_) = self.payload {
            self.payload = Source::Gone;
        }
        self.stage = Stage::Done;
        Ok(true)
    }

    /// Starts the put; ready once it is started.
    #[inline]
    pub(super) fn start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Stage::Start = self.stage {
            let coop = ready!(poll_proceed(cx));
            if self.try_at_once()? {
                coop.made_progress();
                return Poll::Ready(Ok(()));
            }
            self.start_slowly()?;
        }
        if let Stage::Posted(posted) = &self.stage {
            self.stage = match ready!(posted.poll(cx))? {
                None => Stage::Done,
                Some(pending) => Stage::Pending(pending),
            };
        }
        Poll::Ready(Ok(()))
    }

    #[cold]
    fn start_slowly(&mut self) -> Result<(), RmaError> {
        let len = self.payload.len() as u64;
        let part = self.memory.check(self.part, self.rank, self.offset, len)?;
        let (remote, rank) = (part.remote, part.rank);
        let handle = self.memory.handle.clone();
        let target = Endpoint::new(rank, handle.me().context);
        let payload = std::mem::replace(&mut self.payload, Source::Gone).into_bytes();
        let (offset, len) = (self.offset, payload.len() as u64);
        let owner = handle.clone();
        self.stage = Stage::Posted(handle.post(move |scope: &mut Scope<'_>| {
            let started = scope.rma(target, remote, offset, Rma::Put(Payload::Owned(payload)))?;
            Ok(started.map(|ticket| Pending::new(owner, ticket, None, None).moving(len)))
        }));
        Ok(())
    }
}

impl Future for Put<'_> {
    type Output = Result<(), RmaError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(self.start(cx)?);
        let this = &mut *self;
        match &mut this.stage {
            Stage::Pending(pending) => {
                let outcome = ready!(pending.poll(&this.memory.handle, cx));
                this.stage = Stage::Done;
                Poll::Ready(outcome.map(|_| ()).map_err(RmaError::from))
            }
            _ => Poll::Ready(Ok(())),
        }
    }
}
