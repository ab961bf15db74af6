//! Gets: one element, or consecutive ones into a slice or a buffer.

use super::{Element, Memory, Part, Stage};
use crate::operation::Way;
use posthaste_core::budget;
use posthaste_core::engine::Rma;
use posthaste_core::slot::Value;
use posthaste_core::{Fault, Rank, RmaError};
use std::any::Any;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use zerocopy::IntoBytes;

/// From this many bytes on, what comes has the memory that was lent for it, and not memory of its own.
const WORTH_GIVING: u64 = 4 << 10;

/// The common part of gets: bytes from a part into a buffer.
pub(super) struct Fetch<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
    pub(super) count: u64,
    stage: Stage,
}

impl<'w> Fetch<'w> {
    #[inline]
    pub(super) fn new(memory: &'w Arc<Memory>, part: usize, rank: Rank, offset: u64) -> Self {
        Self { memory, part, rank, offset, count: 0, stage: Stage::Start }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<(), RmaError>> {
        Poll::Ready(match ready!(self.poll_value(cx, into)) {
            Ok(Some(value)) => {
                into.copy_from_slice(value.as_bytes());
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        })
    }

    /// The bytes are copied to `into`, or are a value of that length.
    #[inline]
    fn poll_value(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<Option<Value>, RmaError>> {
        if let Stage::Start = self.stage {
            match ready!(self.poll_now(cx, into))? {
                Some(part) => self.start_slowly(part, None),
                None => return Poll::Ready(Ok(None)),
            }
        }
        self.go_on(cx)
    }

    /// Copies memory that is mapped, if nothing precedes; otherwise what there is to be asked, and whom.
    #[inline]
    fn poll_now(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<Option<&'w Part>, RmaError>> {
        ready!(budget::proceed(cx));
        self.count = into.len() as u64;
        let part = self.memory.check(self.part, self.rank, self.offset, self.count)?;
        let aim = self.memory.aim_within(part, self.offset, self.count);
        if aim.and_then(|aim| aim.reach(|source| source.read(into))).is_some() {
            budget::spend_on(budget::ACCESS, into.len());
            return Poll::Ready(Ok(None));
        }
        Poll::Ready(Ok(Some(part)))
    }

    /// As [`poll_value`](Self::poll_value), into a buffer whose memory may go along with a long get.
    fn poll_into<T: Element>(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut Vec<T>,
    ) -> Poll<Result<Option<Value>, RmaError>> {
        if let Stage::Start = self.stage {
            match ready!(self.poll_now(cx, buffer.as_mut_slice().as_mut_bytes()))? {
                Some(part) => {
                    let long = self.count >= WORTH_GIVING;
                    let spare = if long { bytes_of(buffer).map(std::mem::take) } else { None };
                    self.start_slowly(part, spare);
                }
                None => return Poll::Ready(Ok(None)),
            }
        }
        self.go_on(cx)
    }

    #[cold]
    fn start_slowly(&mut self, part: &Part, spare: Option<Vec<u8>>) {
        let get = spare.map_or(Rma::Get(self.count), |memory| Rma::GetGiven(memory, self.count));
        self.stage = self.memory.start(part, self.offset, get, self.count);
    }

    #[cold]
    fn go_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Value>, RmaError>> {
        ready!(self.stage.poll_start(cx))?;
        let Stage::Pending(pending) = &mut self.stage else {
            return Poll::Ready(Err(Fault::Shutdown.into()));
        };
        let value = ready!(pending.poll(&self.memory.handle, cx))?;
        if value.as_bytes().len() as u64 != self.count {
            return Poll::Ready(Err(Fault::PeerCorrupt(self.memory.rank_of(self.part, self.rank)).into()));
        }
        Poll::Ready(Ok(Some(value)))
    }
}

/// A get of one element.
///
/// # Cancel safety
/// Cancel safe: a get changes nothing at the target.
#[must_use = "a get does nothing until it is awaited"]
pub struct Get<'w, T> {
    pub(super) memory: &'w Arc<Memory>,
    pub(super) rank: Rank,
    pub(super) offset: u64,
    /// Made when the get cannot be done at once.
    pub(super) slow: Option<Box<Fetch<'w>>>,
    pub(super) element: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Get<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Get").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl<T: Element> Get<'_, T> {
    /// Reads it, if nothing stands in the way of doing that at once.
    #[inline(always)]
    fn read_at_once(&self) -> Option<T> {
        let mut value = T::new_zeroed();
        let aim = self.memory.aim(self.rank.index(), self.offset, size_of::<T>() as u64)?;
        aim.reach(|source| source.read(value.as_mut_bytes()))?;
        budget::spend_on(budget::ACCESS, size_of::<T>());
        Some(value)
    }

    #[cold]
    #[inline(never)]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, RmaError>> {
        if self.slow.is_none() {
            ready!(budget::proceed(cx));
            if let Some(value) = self.read_at_once() {
                return Poll::Ready(Ok(value));
            }
        }
        let mut value = T::new_zeroed();
        let (memory, rank, offset) = (self.memory, self.rank, self.offset);
        let fetch = self.slow.get_or_insert_with(|| Box::new(Fetch::new(memory, rank.index(), rank, offset)));
        ready!(fetch.poll(cx, value.as_mut_bytes())?);
        Poll::Ready(Ok(value))
    }
}

impl<T: Element> Future for Get<'_, T> {
    type Output = Result<T, RmaError>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // What is inlined where it is awaited: nothing has to be paid for or asked.
        if self.slow.is_none()
            && budget::is_solvent()
            && let Some(value) = self.read_at_once()
        {
            return Poll::Ready(Ok(value));
        }
        self.poll_slowly(cx)
    }
}

/// A get of consecutive elements, or of bytes, into a slice that is borrowed as long as this lives. Ready when they are
/// there.
///
/// Where the target's memory is mapped and nothing precedes, they are read from their place, and there is no other copy
/// of them. Elsewhere they come in memory of their own and are copied, which [`GetInto`] spares if they are bytes.
///
/// # Cancel safety
/// Cancel safe: a get changes nothing at the target, and until it is ready nothing in the slice.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<f32>(8).await?;
/// window.store_slice(0, &[0.5, 1.5])?;
/// let (mut one, mut two) = ([0.0; 2], [0.0; 2]);
/// let gets = (window.get_to(job.rank(), 0, &mut one), window.get_to(job.rank(), 1, &mut two));
/// futures::try_join!(gets.0, gets.1)?; // both are under way at once
/// assert_eq!((one, two), ([0.5, 1.5], [1.5, 0.0]));
/// # job.leave().await
/// # }
/// ```
#[must_use = "a get does nothing until it is awaited"]
pub struct GetTo<'w, 's, T> {
    pub(super) memory: &'w Arc<Memory>,
    pub(super) part: u32,
    pub(super) rank: Rank,
    pub(super) offset: u64,
    pub(super) into: &'s mut [T],
    pub(super) way: Way<Fetch<'w>>,
}

impl<T> std::fmt::Debug for GetTo<'_, '_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GetTo")
            .field("rank", &self.rank)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl<T: Element> GetTo<'_, '_, T> {
    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Way::Fresh = self.way {
            let fetch = Fetch::new(self.memory, self.part as usize, self.rank, self.offset);
            self.way = Way::Slow(Box::new(fetch));
        }
        let Way::Slow(fetch) = &mut self.way else { return Poll::Ready(Ok(())) };
        let outcome = ready!(fetch.poll(cx, self.into.as_mut_bytes()));
        // Whoever polls one that has failed asks anew.
        self.way = if outcome.is_ok() { Way::Done } else { Way::Fresh };
        Poll::Ready(outcome)
    }
}

impl<T: Element> Future for GetTo<'_, '_, T> {
    type Output = Result<(), RmaError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Way::Fresh = this.way {
            ready!(budget::proceed(cx));
            let into = this.into.as_mut_bytes();
            let aim = this.memory.aim(this.part as usize, this.offset, into.len() as u64);
            if aim.and_then(|aim| aim.reach(|source| source.read(into))).is_some() {
                budget::spend_on(budget::ACCESS, into.len());
                this.way = Way::Done;
                return Poll::Ready(Ok(()));
            }
        }
        this.poll_slowly(cx)
    }
}

/// A get of consecutive elements into a buffer.
///
/// # Cancel safety
/// Cancel safe; the buffer is dropped with the future.
#[must_use = "a get does nothing until it is awaited"]
pub struct GetInto<'w, T> {
    pub(super) fetch: Fetch<'w>,
    pub(super) buffer: Option<Vec<T>>,
}

impl<T> Unpin for GetInto<'_, T> {}

impl<T> std::fmt::Debug for GetInto<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GetInto").field("rank", &self.fetch.rank).finish_non_exhaustive()
    }
}

impl<T: Element> Future for GetInto<'_, T> {
    type Output = Result<Vec<T>, RmaError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(mut buffer) = this.buffer.take() else {
            let Fetch { memory, part, rank, offset, count, .. } = &this.fetch;
            return Poll::Ready(match memory.check(*part, *rank, *offset, *count) {
                Err(error) => Err(error),
                Ok(_) => Err(Fault::Shutdown.into()),
            });
        };
        match this.fetch.poll_into(cx, &mut buffer) {
            Poll::Ready(Ok(Some(value))) => {
                // What came in memory of its own need not be copied where that can be a vector of the type.
                match bytes_of(&mut buffer) {
                    Some(bytes) => *bytes = Vec::from(value.into_bytes()),
                    None => buffer.as_mut_slice().as_mut_bytes().copy_from_slice(value.as_bytes()),
                }
                Poll::Ready(Ok(buffer))
            }
            Poll::Ready(Ok(None)) => Poll::Ready(Ok(buffer)),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                this.buffer = Some(buffer);
                Poll::Pending
            }
        }
    }
}

/// A vector that is one of bytes.
#[allow(clippy::ptr_arg, reason = "a slice is not a vector of bytes")]
fn bytes_of<T: Element>(buffer: &mut Vec<T>) -> Option<&mut Vec<u8>> {
    (buffer as &mut dyn Any).downcast_mut()
}
