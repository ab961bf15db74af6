//! Atomic operations on words of windows and regions.

use super::memory::Aim;
use super::{Element, Memory, Part, Stage};
use crate::operation::Way;
use posthaste_core::budget;
use posthaste_core::engine::Rma;
use posthaste_core::memory::{AtomicOp, SharedSlice, WordLen, WordOp};
use posthaste_core::{Fault, Rank, RmaError, Value};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

mod sealed {
    pub trait Sealed {}
}
pub(super) use sealed::Sealed;

/// What atomic operations work on: integers of 32 and 64 bits.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Job, Word};
/// async fn bump<W: Word>(job: &Job, one: W) -> posthaste::Result<W> {
///     let window = job.shmalloc::<W>(2).await?;
///     window.add(job.rank(), 1, one).await?;
///     Ok(window.atomic_load(job.rank(), 1).await?)
/// }
/// assert_eq!(bump(&job, -7_i32).await?, -7);
/// assert_eq!(bump(&job, 7_u64).await?, 7);
/// # job.leave().await
/// # }
/// ```
pub trait Word: Element + Sealed {
    #[doc(hidden)]
    const LEN: WordLen;
    #[doc(hidden)]
    fn to_bits(self) -> u64;
    #[doc(hidden)]
    fn from_bits(bits: u64) -> Self;
}

macro_rules! word {
    ($($word:ty, $bits:ty, $len:ident;)*) => {$(
        impl Sealed for $word {}

        impl Word for $word {
            const LEN: WordLen = WordLen::$len;

            #[inline(always)]
            fn to_bits(self) -> u64 {
                u64::from(self as $bits)
            }

            #[inline(always)]
            fn from_bits(bits: u64) -> Self {
                bits as $bits as $word
            }
        }
    )*};
}

word! {
    u32, u32, Four;
    i32, u32, Four;
    u64, u64, Eight;
    i64, u64, Eight;
}

impl Memory {
    /// The part of a rank, if the word lies within it and is aligned.
    #[inline]
    pub(super) fn check_word(
        &self,
        part: usize,
        rank: Rank,
        offset: u64,
        len: u64,
    ) -> Result<&Part, RmaError> {
        let part = self.check(part, rank, offset, len)?;
        if !part.place.wrapping_add(offset).is_multiple_of(len) {
            return Err(RmaError::Misaligned { rank, offset, len });
        }
        Ok(part)
    }

    /// Asks for the line of a word that is about to be changed.
    #[inline(always)]
    pub(super) fn prefetch_write(&self, part: usize, offset: u64) {
        if let Some(mapped) = self.parts.get(part).and_then(|part| part.mapped) {
            mapped.prefetch_write(offset);
        }
    }

    /// Carries an atomic operation out, if it may go ahead at once: the old value, or 0 if it is not wanted.
    #[inline(always)]
    pub(super) fn atomic(&self, part: usize, offset: u64, op: &WordOp, fetch: bool) -> Option<u64> {
        self.aim_at_word(part, offset, op.len)?.atomic(op, fetch)
    }

    /// A mapped word.
    #[inline(always)]
    pub(super) fn word_at(&self, part: usize, offset: u64, len: WordLen) -> Option<SharedSlice> {
        let word = self.parts.get(part)?.mapped?.slice(offset, len.bytes())?;
        word.is_word(len).then_some(word)
    }

    /// Where an atomic operation on a mapped word goes.
    #[inline(always)]
    pub(super) fn aim_at_word(&self, part: usize, offset: u64, len: WordLen) -> Option<Aim<'_>> {
        self.aim(part, offset, len.bytes()).filter(|aim| aim.is_word(len))
    }
}

impl Aim<'_> {
    /// Carries an atomic operation out on the word, if it may go ahead at once.
    #[inline(always)]
    pub(super) fn atomic(&self, op: &WordOp, fetch: bool) -> Option<u64> {
        let apply =
            |word: SharedSlice| if fetch { word.apply(op) } else { word.apply_unread(op).map(|()| 0) };
        if op.op == AtomicOp::Load { self.reach(apply)? } else { self.change(apply)? }
    }

    /// Gives a signal on the word, if that may be done at once.
    #[inline(always)]
    pub(super) fn signal(&self, op: &WordOp) -> Option<()> {
        self.change(|word| word.apply_unread(op).inspect(|()| word.push_answer_out()))?
    }
}

/// Which word, and what is done to it.
pub(super) struct Access<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
    op: WordOp,
    way: Way<Stage>,
}

impl<'w> Access<'w> {
    #[inline(always)]
    pub fn new(memory: &'w Arc<Memory>, part: usize, rank: Rank, offset: u64, op: WordOp) -> Self {
        Self { memory, part, rank, offset, op, way: Way::Fresh }
    }

    /// The old value, or 0 if it is not wanted.
    #[inline(always)]
    pub fn poll(&mut self, cx: &mut Context<'_>, fetch: bool) -> Poll<Result<u64, RmaError>> {
        if let Way::Fresh = self.way {
            ready!(budget::proceed(cx));
            if let Some(old) = self.memory.atomic(self.part, self.offset, &self.op, fetch) {
                self.way = Way::Done;
                budget::spend(budget::ACCESS);
                return Poll::Ready(Ok(old));
            }
        }
        self.poll_slowly(cx, fetch)
    }

    #[cold]
    pub fn start(&mut self, fetch: bool) -> Result<(), RmaError> {
        let Access { memory, part, rank, offset, op, .. } = *self;
        let len = op.len.bytes();
        let part = memory.check_word(part, rank, offset, len)?;
        let rma = if fetch { Rma::Fetch(op) } else { Rma::Update(op) };
        self.way = Way::Slow(Box::new(memory.start(part, offset, rma, 0)));
        Ok(())
    }

    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>, fetch: bool) -> Poll<Result<u64, RmaError>> {
        if let Way::Fresh = self.way {
            self.start(fetch)?;
        }
        let Way::Slow(stage) = &mut self.way else {
            // Polled again after its end: it is done once, and the old value was given.
            return Poll::Ready(if fetch { Err(Fault::Shutdown.into()) } else { Ok(0) });
        };
        let outcome = ready!(stage.poll(&self.memory.handle, cx));
        self.way = Way::Done;
        let Some(value) = outcome? else { return Poll::Ready(Ok(0)) };
        match value {
            Value::Unit if !fetch => Poll::Ready(Ok(0)),
            value if value.as_bytes().len() as u64 == self.op.len.bytes() => {
                let mut bits = [0; 8];
                bits[..value.as_bytes().len()].copy_from_slice(value.as_bytes());
                Poll::Ready(Ok(u64::from_le_bytes(bits)))
            }
            _ => Poll::Ready(Err(Fault::PeerCorrupt(self.memory.rank_of(self.part, self.rank)).into())),
        }
    }
}

/// An atomic operation whose old value is wanted. Ready with it.
///
/// # Cancel safety
/// Dropped before it has started, nothing is done. That is by the first poll, unless its task has used up its
/// turn ([`tokio::task::coop`]). Dropped later, it is done all the same,
/// once.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let tickets = job.shmalloc::<u64>(1).await?;
/// let first = posthaste::Rank(0); // keeps the count
/// let mine = tickets.fetch_add(first, 0, 1).await?;
/// let next = tickets.fetch_add(first, 0, 1).await?;
/// assert!(next > mine, "nobody else has that number");
/// # job.leave().await
/// # }
/// ```
#[must_use = "an atomic operation does nothing until it is awaited"]
pub struct AtomicFetch<'w, W> {
    access: Access<'w>,
    word: PhantomData<fn() -> W>,
}

impl<'w, W> AtomicFetch<'w, W> {
    #[inline(always)]
    pub(super) fn new(access: Access<'w>) -> Self {
        Self { access, word: PhantomData }
    }
}

impl<W> std::fmt::Debug for AtomicFetch<'_, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Access { rank, offset, op, .. } = &self.access;
        f.debug_struct("AtomicFetch").field("rank", rank).field("offset", offset).field("op", op).finish()
    }
}

impl<W: Word> Future for AtomicFetch<'_, W> {
    type Output = Result<W, RmaError>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.access.poll(cx, true).map_ok(W::from_bits)
    }
}

/// An atomic operation whose old value is not wanted. Ready when it is done at the target.
///
/// # Cancel safety
/// Dropped before it has started, nothing is done. That is by the first poll, unless its task has used up its
/// turn ([`tokio::task::coop`]). Dropped later, it is done all the same,
/// once.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let flags = job.shmalloc::<u32>(1).await?;
/// flags.or(job.rank(), 0, 1 << job.rank().index()).await?; // done at the target
/// assert_eq!(flags.load(0), Some(1));
/// # job.leave().await
/// # }
/// ```
#[must_use = "an atomic operation does nothing until it is awaited"]
pub struct AtomicUpdate<'w, W> {
    access: Access<'w>,
    word: PhantomData<fn() -> W>,
}

impl<'w, W> AtomicUpdate<'w, W> {
    #[inline(always)]
    pub(super) fn new(access: Access<'w>) -> Self {
        Self { access, word: PhantomData }
    }
}

impl<W> std::fmt::Debug for AtomicUpdate<'_, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Access { rank, offset, op, .. } = &self.access;
        f.debug_struct("AtomicUpdate").field("rank", rank).field("offset", offset).field("op", op).finish()
    }
}

impl<W: Word> Future for AtomicUpdate<'_, W> {
    type Output = Result<(), RmaError>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.access.poll(cx, false).map_ok(|_| ())
    }
}
