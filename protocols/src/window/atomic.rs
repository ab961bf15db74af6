//! Atomic operations on words of windows and regions.

use super::memory::Aim;
use super::{Element, Memory, Part, RemoteRegion, Stage, Window};
use crate::operation::Pending;
use posthaste_core::budget;
use posthaste_core::context::Face;
use posthaste_core::engine::Rma;
use posthaste_core::memory::{AtomicOp, SharedSlice, WordLen, WordOp};
use posthaste_core::{Endpoint, Fault, Rank, RmaError, Scope, Value};
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
    fn prefetch_write(&self, part: usize, offset: u64) {
        if let Some(mapped) = self.parts.get(part).and_then(|part| part.mapped) {
            mapped.prefetch_write(offset);
        }
    }

    /// Carries an atomic operation out, if it may go ahead at once: the old value, or 0 if it is not wanted.
    #[inline(always)]
    pub(super) fn atomic(&self, part: usize, offset: u64, op: &WordOp, fetch: bool) -> Option<u64> {
        let aim = self.aim_at_word(part, offset, op.len)?;
        let apply =
            |word: SharedSlice| if fetch { word.apply(op) } else { word.apply_unread(op).map(|()| 0) };
        if op.op == AtomicOp::Load { aim.reach(apply)? } else { aim.change(apply)? }
    }

    /// Where an atomic operation on a mapped word goes.
    #[inline(always)]
    pub(super) fn aim_at_word(&self, part: usize, offset: u64, len: WordLen) -> Option<Aim<'_>> {
        self.aim(part, offset, len.bytes()).filter(|aim| aim.is_word(len))
    }
}

/// An atomic operation under way.
struct Slow {
    stage: Stage,
}

/// Which word, and what is done to it.
pub(super) struct Access<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
    op: WordOp,
    /// Made when it cannot be done at once.
    slow: Option<Box<Slow>>,
}

impl<'w> Access<'w> {
    #[inline(always)]
    pub fn new(memory: &'w Arc<Memory>, part: usize, rank: Rank, offset: u64, op: WordOp) -> Self {
        // The word may be in another processor's cache: it is on its way while the caller makes ready more of them.
        memory.prefetch_write(part, offset);
        Self { memory, part, rank, offset, op, slow: None }
    }

    /// The old value, or 0 if it is not wanted.
    #[inline(always)]
    pub fn poll(&mut self, cx: &mut Context<'_>, fetch: bool) -> Poll<Result<u64, RmaError>> {
        if self.slow.is_none() {
            ready!(budget::proceed(cx));
            if let Some(old) = self.memory.atomic(self.part, self.offset, &self.op, fetch) {
                budget::spend(budget::ACCESS);
                return Poll::Ready(Ok(old));
            }
        }
        self.poll_slowly(cx, fetch)
    }

    /// Starts an update; ready once it is started, with whether it is done already.
    #[inline]
    pub fn poll_start(&mut self, cx: &mut Context<'_>) -> Poll<Result<bool, RmaError>> {
        if self.slow.is_none() {
            if self.memory.atomic(self.part, self.offset, &self.op, false).is_some() {
                return Poll::Ready(Ok(true));
            }
            self.start(false)?;
        }
        match &mut self.slow {
            Some(slow) => slow.poll_start(cx).map_ok(|()| false),
            None => Poll::Pending,
        }
    }

    #[cold]
    pub fn start(&mut self, fetch: bool) -> Result<(), RmaError> {
        let Access { memory, part, rank, offset, op, .. } = *self;
        let len = op.len.bytes();
        let part = memory.check_word(part, rank, offset, len)?;
        let (handle, remote) = (memory.handle.clone(), part.remote);
        let target = Endpoint::new(part.rank, handle.me().context);
        let (owner, memory) = (handle.clone(), memory.clone());
        let rma = if fetch { Rma::Fetch(op) } else { Rma::Update(op) };
        let posted = handle.post(move |scope: &mut Scope<'_>| {
            memory.still_there()?;
            let started = scope.rma(target, remote, offset, rma)?;
            Ok(started.map(|ticket| Pending::new(owner, ticket, None, None)))
        });
        self.slow = Some(Box::new(Slow { stage: Stage::Posted(posted) }));
        Ok(())
    }

    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>, fetch: bool) -> Poll<Result<u64, RmaError>> {
        if self.slow.is_none() {
            self.start(fetch)?;
        }
        let Some(slow) = self.slow.as_mut() else { return Poll::Pending };
        ready!(slow.poll_start(cx)?);
        let Stage::Pending(pending) = &mut slow.stage else { return Poll::Ready(Ok(0)) };
        let value = ready!(pending.poll(&self.memory.handle, cx));
        slow.stage = Stage::Done;
        match value? {
            Value::Unit if !fetch => Poll::Ready(Ok(0)),
            value if value.as_bytes().len() as u64 == self.op.len.bytes() => {
                let mut bits = [0; 8];
                bits[..value.as_bytes().len()].copy_from_slice(value.as_bytes());
                Poll::Ready(Ok(u64::from_le_bytes(bits)))
            }
            _ => Poll::Ready(Err(Fault::PeerCorrupt(self.rank).into())),
        }
    }
}

impl Slow {
    fn poll_start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Stage::Posted(posted) = &self.stage {
            self.stage = match ready!(posted.poll(cx))? {
                None => Stage::Done,
                Some(pending) => Stage::Pending(pending),
            };
        }
        Poll::Ready(Ok(()))
    }
}

/// An atomic operation whose old value is wanted. Ready with it.
///
/// # Cancel safety
/// Dropped before it was polled, nothing is done. Dropped later, it is done all the same, once.
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
/// Dropped before it was polled, nothing is done. Dropped later, it is done all the same, once.
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

/// Atomic operations on words of a window or a region, by their offset in bytes, which must be a multiple of their length.
///
/// Operations on one word by whatever rank, and in whatever way they get there, are atomic with respect to each other; so
/// are loads and stores of aligned words by puts, gets and the owner. A word is to be used with one length only. They take
/// effect in program order with this rank's puts and gets of the same target.
///
/// Each of them fails if the rank is unknown ([`RmaError::UnknownRank`]) or gone, the word is not in its part
/// ([`RmaError::OutOfRange`]) or not aligned ([`RmaError::Misaligned`]), or the window was freed
/// ([`RmaError::NoSuchWindow`]). Of an operation whose target is lost meanwhile nobody knows whether it was done.
///
/// In mapped memory an operation is done when its future is polled, but its word is asked for when the future is made: who
/// makes a few dozen and then awaits one after the other does not wait for each word to come from another processor.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use futures::future::try_join_all;
/// let window = job.shmalloc::<u8>(4096).await?;
/// let words = window.words::<i32>();
/// // All words are asked for first, and then changed one after the other.
/// let updates: Vec<_> = (0..64).map(|line| words.add(job.rank(), 64 * line, -1)).collect();
/// try_join_all(updates).await?;
/// assert_eq!(words.load(job.rank(), 64 * 63).await?, -1);
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct Words<'w, W> {
    memory: &'w Arc<Memory>,
    /// The only part of a region.
    only: Option<Rank>,
    word: PhantomData<fn() -> W>,
}

impl<W> Clone for Words<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Words<'_, W> {}

impl Window<u8> {
    /// The words of the window: atomic operations by offset in bytes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u8>(64).await?;
    /// let words = window.words::<u32>();
    /// assert_eq!(words.swap(job.rank(), 12, 7).await?, 0);
    /// assert_eq!(words.compare_swap(job.rank(), 12, 7, 9).await?, 7);
    /// assert!(words.add(job.rank(), 13, 1).await.is_err(), "no multiple of four");
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn words<W: Word>(&self) -> Words<'_, W> {
        Words { memory: &self.memory, only: None, word: PhantomData }
    }
}

impl RemoteRegion {
    /// The words of the region: atomic operations by offset in bytes. The rank is that of the region's owner.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(64).await?;
    /// let remote = job.remote_region(region.key()).await?; // as a peer opens it
    /// let words = remote.words::<u64>();
    /// assert_eq!(words.fetch_add(job.rank(), 16, 5).await?, 0);
    /// let mut word = [0; 8];
    /// region.read(16, &mut word)?;
    /// assert_eq!(u64::from_ne_bytes(word), 5);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn words<W: Word>(&self) -> Words<'_, W> {
        Words { memory: &self.memory, only: Some(self.memory.parts[0].rank), word: PhantomData }
    }
}

impl<'w, W: Word> Words<'w, W> {
    /// Which part of the memory is the rank's.
    #[inline(always)]
    pub(super) fn part(&self, rank: Rank) -> usize {
        match self.only {
            None => rank.index(),
            Some(only) if only == rank => 0,
            Some(_) => usize::MAX,
        }
    }

    /// Asks for a word to be brought into this processor's cache, as it is about to be worked on: a hint, for loops that know
    /// their words some dozens of operations ahead. Without effect on memory that is not mapped, or not there.
    #[inline]
    pub fn prefetch(&self, rank: Rank, offset: u64) {
        self.memory.prefetch_write(self.part(rank), offset);
    }

    #[inline(always)]
    fn access(&self, rank: Rank, offset: u64, op: AtomicOp, operand: W, expected: W) -> Access<'w> {
        let part = self.part(rank);
        let (operand, expected) = (operand.to_bits(), expected.to_bits());
        Access::new(self.memory, part, rank, offset, WordOp { op, len: W::LEN, operand, expected })
    }

    pub(super) fn memory(&self) -> &'w Arc<Memory> {
        self.memory
    }

    #[inline(always)]
    fn fetch(&self, rank: Rank, offset: u64, op: AtomicOp, operand: W) -> AtomicFetch<'w, W> {
        AtomicFetch { access: self.access(rank, offset, op, operand, operand), word: PhantomData }
    }

    #[inline(always)]
    fn update(&self, rank: Rank, offset: u64, op: AtomicOp, operand: W) -> AtomicUpdate<'w, W> {
        AtomicUpdate { access: self.access(rank, offset, op, operand, operand), word: PhantomData }
    }

    /// Adds, wrapping around; gives the old value.
    #[inline]
    pub fn fetch_add(&self, rank: Rank, offset: u64, value: W) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::Add, value)
    }

    /// Adds, wrapping around.
    #[inline]
    pub fn add(&self, rank: Rank, offset: u64, value: W) -> AtomicUpdate<'w, W> {
        self.update(rank, offset, AtomicOp::Add, value)
    }

    /// Bitwise and; gives the old value.
    #[inline]
    pub fn fetch_and(&self, rank: Rank, offset: u64, value: W) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::And, value)
    }

    /// Bitwise and.
    #[inline]
    pub fn and(&self, rank: Rank, offset: u64, value: W) -> AtomicUpdate<'w, W> {
        self.update(rank, offset, AtomicOp::And, value)
    }

    /// Bitwise or; gives the old value.
    #[inline]
    pub fn fetch_or(&self, rank: Rank, offset: u64, value: W) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::Or, value)
    }

    /// Bitwise or.
    #[inline]
    pub fn or(&self, rank: Rank, offset: u64, value: W) -> AtomicUpdate<'w, W> {
        self.update(rank, offset, AtomicOp::Or, value)
    }

    /// Bitwise exclusive or; gives the old value.
    #[inline]
    pub fn fetch_xor(&self, rank: Rank, offset: u64, value: W) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::Xor, value)
    }

    /// Bitwise exclusive or.
    #[inline]
    pub fn xor(&self, rank: Rank, offset: u64, value: W) -> AtomicUpdate<'w, W> {
        self.update(rank, offset, AtomicOp::Xor, value)
    }

    /// Puts a value in the word's place; gives the old one.
    #[inline]
    pub fn swap(&self, rank: Rank, offset: u64, value: W) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::Swap, value)
    }

    /// Puts a value in the word's place if that is `expected`; gives the old one, which tells whether it was.
    #[inline]
    pub fn compare_swap(&self, rank: Rank, offset: u64, expected: W, value: W) -> AtomicFetch<'w, W> {
        let access = self.access(rank, offset, AtomicOp::CompareSwap, value, expected);
        AtomicFetch { access, word: PhantomData }
    }

    /// Reads the word. What its writer wrote there before is seen by gets that follow.
    #[inline]
    pub fn load(&self, rank: Rank, offset: u64) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::Load, W::from_bits(0))
    }

    /// Writes the word; unlike a put it wakes those who wait on it.
    #[inline]
    pub fn store(&self, rank: Rank, offset: u64, value: W) -> AtomicUpdate<'w, W> {
        self.update(rank, offset, AtomicOp::Store, value)
    }
}

/// Atomic operations on elements, by index; all about them is said at [`Words`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let counts = job.shmalloc::<u64>(8).await?;
/// assert_eq!(counts.fetch_add(job.rank(), 3, 5).await?, 0);
/// counts.or(job.rank(), 3, 8).await?;
/// assert_eq!(counts.atomic_load(job.rank(), 3).await?, 13);
/// # job.leave().await
/// # }
/// ```
impl<T: Word> Window<T> {
    #[inline(always)]
    pub(super) fn elements(&self) -> Words<'_, T> {
        Words { memory: &self.memory, only: None, word: PhantomData }
    }

    /// Asks for an element to be brought into this processor's cache, as it is about to be worked on: a hint, for loops that
    /// know their elements some dozens of operations ahead. Without effect on memory that is not mapped, or not there.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let counts = job.shmalloc::<u64>(1 << 16).await?;
    /// let at = |number: usize| number * 40_503 % (1 << 16);
    /// for number in 0..1000 {
    ///     counts.prefetch(job.rank(), at(number + 16));
    ///     counts.add(job.rank(), at(number), 1).await?;
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn prefetch(&self, rank: Rank, index: usize) {
        self.elements().prefetch(rank, Self::offset(index));
    }

    /// Adds to an element, wrapping around; gives the old value.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let counts = job.shmalloc::<u32>(8).await?;
    /// assert_eq!(counts.fetch_add(job.rank(), 3, 5).await?, 0);
    /// assert_eq!(counts.fetch_add(job.rank(), 3, u32::MAX).await?, 5); // takes one away
    /// assert_eq!(counts.load(3), Some(4));
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn fetch_add(&self, rank: Rank, index: usize, value: T) -> AtomicFetch<'_, T> {
        self.elements().fetch_add(rank, Self::offset(index), value)
    }

    /// Adds to an element, wrapping around.
    #[inline]
    pub fn add(&self, rank: Rank, index: usize, value: T) -> AtomicUpdate<'_, T> {
        self.elements().add(rank, Self::offset(index), value)
    }

    /// Bitwise and; gives the old value.
    #[inline]
    pub fn fetch_and(&self, rank: Rank, index: usize, value: T) -> AtomicFetch<'_, T> {
        self.elements().fetch_and(rank, Self::offset(index), value)
    }

    /// Bitwise and.
    #[inline]
    pub fn and(&self, rank: Rank, index: usize, value: T) -> AtomicUpdate<'_, T> {
        self.elements().and(rank, Self::offset(index), value)
    }

    /// Bitwise or; gives the old value.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let taken = job.shmalloc::<u64>(1).await?;
    /// // The first to set a bit has what it stands for.
    /// let bit = 1 << 5;
    /// let was_free = taken.fetch_or(job.rank(), 0, bit).await? & bit == 0;
    /// assert!(was_free);
    /// assert_eq!(taken.fetch_and(job.rank(), 0, !bit).await?, bit); // and gives it back
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn fetch_or(&self, rank: Rank, index: usize, value: T) -> AtomicFetch<'_, T> {
        self.elements().fetch_or(rank, Self::offset(index), value)
    }

    /// Bitwise or.
    #[inline]
    pub fn or(&self, rank: Rank, index: usize, value: T) -> AtomicUpdate<'_, T> {
        self.elements().or(rank, Self::offset(index), value)
    }

    /// Bitwise exclusive or; gives the old value.
    #[inline]
    pub fn fetch_xor(&self, rank: Rank, index: usize, value: T) -> AtomicFetch<'_, T> {
        self.elements().fetch_xor(rank, Self::offset(index), value)
    }

    /// Bitwise exclusive or.
    #[inline]
    pub fn xor(&self, rank: Rank, index: usize, value: T) -> AtomicUpdate<'_, T> {
        self.elements().xor(rank, Self::offset(index), value)
    }

    /// Puts a value in an element's place; gives the old one.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let heads = job.shmalloc::<u64>(1).await?;
    /// // Each rank that swaps its own number in learns who was there before: a queue.
    /// assert_eq!(heads.swap(job.rank(), 0, 7).await?, 0);
    /// assert_eq!(heads.swap(job.rank(), 0, 9).await?, 7);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn swap(&self, rank: Rank, index: usize, value: T) -> AtomicFetch<'_, T> {
        self.elements().swap(rank, Self::offset(index), value)
    }

    /// Puts a value in an element's place if that is `expected`; gives the old one, which tells whether it was.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let locks = job.shmalloc::<u32>(1).await?;
    /// let (free, mine) = (0, 1 + job.rank().0);
    /// // Who finds the lock free has it.
    /// assert_eq!(locks.compare_swap(job.rank(), 0, free, mine).await?, free);
    /// assert_eq!(locks.compare_swap(job.rank(), 0, free, mine).await?, mine, "it is taken");
    /// locks.atomic_store(job.rank(), 0, free).await?;
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn compare_swap(&self, rank: Rank, index: usize, expected: T, value: T) -> AtomicFetch<'_, T> {
        self.elements().compare_swap(rank, Self::offset(index), expected, value)
    }

    /// Reads an element of any rank. What its writer wrote there before is seen by gets that follow.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (data, ready) = (job.shmalloc::<f64>(100).await?, job.shmalloc::<u32>(1).await?);
    /// data.put(job.rank(), 40, 1.5).await?;
    /// ready.atomic_store(job.rank(), 0, 1).await?;
    /// // Whoever reads the word gets what was written before it.
    /// if ready.atomic_load(job.rank(), 0).await? == 1 {
    ///     assert_eq!(data.get(job.rank(), 40).await?, 1.5);
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn atomic_load(&self, rank: Rank, index: usize) -> AtomicFetch<'_, T> {
        self.elements().load(rank, Self::offset(index))
    }

    /// Writes an element of any rank; unlike a put it wakes those who wait on it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let word = job.shmalloc::<i64>(1).await?;
    /// let wait = word.wait_until(0, |value| value < 0);
    /// let (waited, stored) = tokio::join!(wait, word.atomic_store(job.rank(), 0, -3));
    /// stored?;
    /// assert_eq!(waited?, -3);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn atomic_store(&self, rank: Rank, index: usize, value: T) -> AtomicUpdate<'_, T> {
        self.elements().store(rank, Self::offset(index), value)
    }
}
