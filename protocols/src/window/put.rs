//! Puts: one element, consecutive ones, owned bytes.

use super::{Element, Memory, Part, Stage};
use crate::buffer::{Buffer, Kind};
use crate::operation::Way;
use posthaste_core::budget;
use posthaste_core::engine::{Payload, Rma};
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Rank, RmaError};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A put whose source is copied when it starts, by the first poll as a rule (not if its task has used up its turn). Ready when
/// it is at the target.
///
/// Where the target's memory is mapped and nothing precedes, it is written to its place, and there is no other copy of it.
///
/// # Cancel safety
/// As for [`Put`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u32>(8).await?;
/// let mut row = [1, 2, 3];
/// let put = window.put_slice(job.rank(), 0, &row).local().await?;
/// row = [4, 5, 6]; // the source may be written again
/// put.await?; // and what it was has arrived
/// assert_eq!(window.get_slice(job.rank(), 0, 3).await?, [1, 2, 3]);
/// # assert_eq!(row, [4, 5, 6]);
/// # job.leave().await
/// # }
/// ```
#[must_use = "a put does nothing until it is awaited"]
pub struct PutCopy<'w, S> {
    memory: &'w Arc<Memory>,
    part: u32,
    rank: Rank,
    offset: u64,
    source: S,
    way: Way<Put<'w>>,
}

/// A put of one element. Ready when it is at the target.
///
/// # Cancel safety
/// As for [`Put`].
pub type PutElement<'w, T> = PutCopy<'w, One<T>>;

/// A put of consecutive elements or of bytes, which are borrowed as long as this lives, or until [`local`](PutCopy::local) is
/// ready. Ready when they are at the target.
///
/// # Cancel safety
/// As for [`Put`].
pub type PutSlice<'w, 's> = PutCopy<'w, &'s [u8]>;

/// One element, as the source of a put.
#[derive(Clone, Copy, Debug)]
pub struct One<T>(T);

impl<T: Element> AsRef<[u8]> for One<T> {
    #[inline(always)]
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl<S> Unpin for PutCopy<'_, S> {}

impl<S> std::fmt::Debug for PutCopy<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutCopy")
            .field("rank", &self.rank)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl<'w, T: Element> PutElement<'w, T> {
    #[inline(always)]
    pub(super) fn element(memory: &'w Arc<Memory>, rank: Rank, offset: u64, value: T) -> Self {
        Self::new(memory, rank.0, rank, offset, One(value))
    }
}

impl<'w, S: AsRef<[u8]>> PutCopy<'w, S> {
    #[inline(always)]
    pub(super) fn new(memory: &'w Arc<Memory>, part: u32, rank: Rank, offset: u64, source: S) -> Self {
        Self { memory, part, rank, offset, source, way: Way::Fresh }
    }

    /// The earlier stage: ready when the source is reusable, with the future of the later one.
    ///
    /// # Errors
    /// If the put is refused or fails.
    ///
    /// # Cancel safety
    /// As for the put itself.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use futures::future::try_join_all;
    /// let window = job.shmalloc::<u64>(100).await?;
    /// let mut puts = Vec::new();
    /// for index in 0..100 {
    ///     let value = [index as u64]; // need not live until the put has arrived
    ///     puts.push(window.put_slice(job.rank(), index, &value).local().await?);
    /// }
    /// try_join_all(puts).await?;
    /// assert_eq!(window.load(99), Some(99));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn local(self) -> Result<Put<'w>, RmaError> {
        if let Way::Slow(put) = self.way {
            return put.local().await;
        }
        let done = std::future::poll_fn(|cx| {
            ready!(budget::proceed(cx));
            let done = matches!(self.way, Way::Done) || self.try_at_once();
            budget::spend_on(budget::ACCESS, self.len());
            Poll::Ready(done)
        });
        if done.await { Ok(Put::done(self.memory, self.rank)) } else { self.general().local().await }
    }

    /// Where it goes.
    #[inline(always)]
    pub(super) fn memory(&self) -> &Arc<Memory> {
        self.memory
    }

    /// Whether what is done with that memory goes through the same context.
    pub(super) fn goes_with(&self, other: &Memory) -> bool {
        self.memory.shares_context_with(other)
    }

    /// Bytes that it puts.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.source.as_ref().len()
    }

    /// Does a put that was not started, if nothing stands in the way of doing it at once.
    #[inline(always)]
    pub(super) fn try_at_once(&self) -> bool {
        self.write_at_once(|_| ())
    }

    /// As [`try_at_once`](Self::try_at_once); `then` is told where it went.
    #[inline(always)]
    fn write_at_once(&self, then: impl FnOnce(SharedSlice)) -> bool {
        let source = self.source.as_ref();
        let aim = self.memory.aim(self.part as usize, self.offset, source.len() as u64);
        let write = |target: SharedSlice| {
            target.write(source);
            then(target);
        };
        aim.is_some_and(|aim| aim.change(write).is_some())
    }

    /// As [`try_at_once`](Self::try_at_once), by its task, which pays for it.
    #[inline(always)]
    fn is_done_at_once(&mut self) -> bool {
        // Not so a put with a signal: it takes longer, and who waits there has fetched the line back by then.
        let done = self.write_at_once(SharedSlice::note_written);
        if done {
            self.way = Way::Done;
            budget::spend_on(budget::ACCESS, self.len());
        }
        done
    }

    /// The same put, with a copy of the source of its own.
    #[cold]
    pub(super) fn general(&self) -> Put<'w> {
        Put::new(self.memory, self.part as usize, self.rank, self.offset, self.copied())
    }

    /// What it puts, copied.
    pub(super) fn copied(&self) -> Buffer {
        Buffer::copy(self.source.as_ref())
    }

    /// Where it goes.
    ///
    /// # Errors
    /// If that is not there.
    pub(super) fn place(&self) -> Result<(&'w Part, u64), RmaError> {
        let part = self.memory.check(self.part as usize, self.rank, self.offset, self.len() as u64)?;
        Ok((part, self.offset))
    }

    #[cold]
    #[inline(never)]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Way::Fresh = self.way {
            ready!(budget::proceed(cx));
            if self.is_done_at_once() {
                return Poll::Ready(Ok(()));
            }
            self.way = Way::Slow(Box::new(self.general()));
        }
        let Way::Slow(put) = &mut self.way else { return Poll::Ready(Ok(())) };
        let outcome = ready!(Pin::new(&mut **put).poll(cx));
        self.way = Way::Done;
        Poll::Ready(outcome)
    }
}

impl<S: AsRef<[u8]>> Future for PutCopy<'_, S> {
    type Output = Result<(), RmaError>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // What is inlined where it is awaited: nothing has to be paid for or sent.
        if let Way::Fresh = self.way
            && budget::is_solvent()
            && self.is_done_at_once()
        {
            return Poll::Ready(Ok(()));
        }
        self.poll_slowly(cx)
    }
}

/// A put. Ready when the data is at the target.
///
/// # Cancel safety
/// Dropped before it has started, nothing is put. That is by the first poll, unless its task has used up its turn
/// ([`tokio::task::coop`]). Dropped later, the put goes on; its payload is kept until then.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u8>(100_000).await?;
/// let put = window.put_bytes(job.rank(), 0, vec![1; 100_000].into());
/// let started = put.local().await?; // in its place among this rank's operations
/// started.await?; // at the target
/// assert_eq!(window.load(99_999), Some(1));
/// # job.leave().await
/// # }
/// ```
#[must_use = "a put does nothing until it is awaited"]
pub struct Put<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
    /// Until it is handed over.
    payload: Option<Buffer>,
    stage: Stage,
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
        Self { memory, part, rank, offset, payload: Some(payload), stage: Stage::Start }
    }

    /// One that has been done already.
    fn done(memory: &'w Arc<Memory>, rank: Rank) -> Self {
        Self { memory, part: 0, rank, offset: 0, payload: None, stage: Stage::Done }
    }

    /// The earlier stage: ready when the source is reusable, with the future of the later one.
    ///
    /// # Errors
    /// If the put is refused or fails.
    ///
    /// # Cancel safety
    /// As for the put itself.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u8>(8).await?;
    /// let put = window.put_bytes(job.rank(), 0, "ordered".into()).local().await?;
    /// // It has its place in the order; whatever is put now comes behind it.
    /// window.put(job.rank(), 0, b'O').await?;
    /// put.await?;
    /// assert_eq!(window.get_slice(job.rank(), 0, 7).await?, b"Ordered");
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn local(mut self) -> Result<Put<'w>, RmaError> {
        std::future::poll_fn(|cx| {
            // Every device and the queue own the payload as soon as the put is started.
            ready!(self.start(cx)?);
            Poll::Ready(Ok::<(), RmaError>(()))
        })
        .await?;
        Ok(self)
    }

    /// Does a put that was not started, if nothing stands in the way of doing it at once.
    #[inline(always)]
    fn try_at_once(&mut self) -> bool {
        let Some(payload) = &self.payload else { return false };
        let aim = self.memory.aim(self.part, self.offset, payload.len() as u64);
        let written = aim.and_then(|aim| {
            aim.change(|target| match &payload.0 {
                Kind::Inline(short) => target.write(short.as_slice()),
                Kind::Bytes(bytes) => target.write(bytes),
                Kind::Loan(loan) => loan.memory().copy_to(target),
            })
        });
        if written.is_none() {
            return false;
        }
        self.payload = None;
        self.stage = Stage::Done;
        true
    }

    /// Starts the put; ready once it is started.
    #[inline]
    fn start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Stage::Start = self.stage {
            ready!(budget::proceed(cx));
            let len = self.payload.as_ref().map_or(0, Buffer::len);
            if self.try_at_once() {
                budget::spend_on(budget::ACCESS, len);
                return Poll::Ready(Ok(()));
            }
            self.start_slowly()?;
            budget::spend_on(budget::MESSAGE, len);
        }
        self.stage.poll_start(cx)
    }

    #[cold]
    fn start_slowly(&mut self) -> Result<(), RmaError> {
        let len = self.payload.as_ref().map_or(0, Buffer::len) as u64;
        let part = self.memory.check(self.part, self.rank, self.offset, len)?;
        let payload = self.payload.take().map(Buffer::into_bytes).unwrap_or_default();
        self.stage = self.memory.start(part, self.offset, Rma::Put(Payload::Owned(payload)), len);
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
