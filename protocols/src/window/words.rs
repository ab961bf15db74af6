//! The words of windows and regions, and what can be done to them.

use super::atomic::{Access, AtomicFetch, AtomicUpdate, Word};
use super::{Memory, RemoteRegion, Window, own};
use posthaste_core::context::Face;
use posthaste_core::memory::{AtomicOp, WordOp};
use posthaste_core::{Rank, RmaError};
use std::marker::PhantomData;
use std::sync::Arc;

/// Atomic operations on words of a window or a region, by their offset in bytes, which must be a multiple of their length.
///
/// Operations on one word by whatever rank, and in whatever way they get there, are atomic with respect to each other; so
/// are loads and stores of aligned words by puts, gets and the owner. A word is to be used with one length only. They take
/// effect in program order with this rank's puts and gets of the same target.
///
/// Each of them fails if the rank is unknown ([`UnknownRank`](posthaste_core::RmaError::UnknownRank)) or gone, the word is not in its part
/// ([`OutOfRange`](posthaste_core::RmaError::OutOfRange)) or not aligned ([`Misaligned`](posthaste_core::RmaError::Misaligned)), or the window was freed
/// ([`NoSuchWindow`](posthaste_core::RmaError::NoSuchWindow)). Of an operation whose target is lost meanwhile nobody knows whether it was done.
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

/// The part of a region that a rank has which does not own it.
pub(super) const NOT_THE_OWNERS: usize = usize::MAX;

/// Which part of some memory is a rank's: `only` has a region's only one.
#[inline(always)]
pub(super) fn part_of(only: Option<Rank>, rank: Rank) -> usize {
    match only {
        None => rank.index(),
        Some(only) if only == rank => 0,
        Some(_) => NOT_THE_OWNERS,
    }
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
        part_of(self.only, rank)
    }

    pub(super) fn only(&self) -> Option<Rank> {
        self.only
    }

    /// Asks for a word to be brought into this processor's cache, as it is about to be worked on: a hint, for loops that know
    /// their words some dozens of operations ahead. Without effect on memory that is not mapped, or not there.
    #[inline]
    pub fn prefetch(&self, rank: Rank, offset: u64) {
        self.memory.prefetch_write(self.part(rank), offset);
    }

    /// Waits until this rank's own word at that offset in bytes satisfies a condition, such as `|value| value >= 5`, advancing the
    /// context meanwhile, and gives the value that does: as [`Window::wait_until`] does with an element.
    ///
    /// # Errors
    /// If there is no such word, the memory is another rank's region, the window is freed, or the job is left.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// // Data and the count of its bytes in one window.
    /// let window = job.shmalloc::<u8>(64).await?;
    /// let words = window.words::<u64>();
    /// let put = window.put_signal(job.rank(), 8, b"seven b", words.signal_add(0, 7));
    /// let (come, put) = tokio::join!(words.wait_until(0, |bytes| bytes > 0), put);
    /// put?;
    /// assert_eq!((come?, &window.to_vec()[8..15]), (7, &b"seven b"[..]));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn wait_until(&self, offset: u64, condition: impl FnMut(W) -> bool) -> Result<W, RmaError> {
        self.wait_until_on(&self.memory.handle, offset, condition).await
    }

    /// As [`wait_until`](Self::wait_until), by a face of any context of the client, as [`Window::wait_until_on`] does.
    ///
    /// # Errors
    /// As for `wait_until`.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn wait_until_on<F: Face>(
        &self,
        face: &F,
        offset: u64,
        condition: impl FnMut(W) -> bool,
    ) -> Result<W, RmaError> {
        let memory = self.memory;
        let me = memory.handle.me().rank;
        let (part, rank) = match self.only {
            None => (memory.own, Rank(memory.own as u32)),
            Some(owner) if owner == me => (0, me),
            Some(owner) => return Err(RmaError::NotTheOwner { rank: me, owner }),
        };
        let len = W::LEN.bytes();
        let mapped = memory.check(part, rank, offset, len)?.mapped;
        let slice = mapped.and_then(|own| own.slice(offset, len)).ok_or(RmaError::Unreachable(rank))?;
        if !slice.is_word(W::LEN) {
            return Err(RmaError::Misaligned { rank, offset, len });
        }
        own::wait_until(face, &memory.handle, slice, || memory.freed(), condition).await
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
        AtomicFetch::new(self.access(rank, offset, op, operand, operand))
    }

    #[inline(always)]
    fn update(&self, rank: Rank, offset: u64, op: AtomicOp, operand: W) -> AtomicUpdate<'w, W> {
        // The word may be in another processor's cache: it is on its way while the caller makes ready more of them.
        self.prefetch(rank, offset);
        AtomicUpdate::new(self.access(rank, offset, op, operand, operand))
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
        AtomicFetch::new(self.access(rank, offset, AtomicOp::CompareSwap, value, expected))
    }

    /// Reads the word. What its writer wrote there before is seen by gets that follow.
    #[inline]
    pub fn load(&self, rank: Rank, offset: u64) -> AtomicFetch<'w, W> {
        self.fetch(rank, offset, AtomicOp::Load, W::from_bits(0))
    }

    /// Writes the word, and wakes those who wait on it, as a put does.
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

    /// Writes an element of any rank, and wakes those who wait on it, as a put does.
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
