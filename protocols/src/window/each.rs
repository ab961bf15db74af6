//! Many atomic operations by one call.

use super::atomic::{Access, Word};
use super::memory::{Memory, Part};
use super::words::Words;
use posthaste_core::budget;
use posthaste_core::memory::{AtomicOp, SharedSlice, WordOp};
use posthaste_core::{Rank, RmaError};
use std::collections::VecDeque;
use std::future::Future;
use std::iter::Fuse;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// How many updates ahead a word is asked for at least, in mapped memory: by then it has come from another processor's cache.
const AHEAD: usize = 32;
/// Updates of mapped memory that count as one step of a task's budget.
const STEP: usize = 256;
/// Updates under way at once where they take messages.
const UNDER_WAY: usize = 256;

/// What [`update_each`](super::Window::update_each) does to a word.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::WordUpdate;
/// let bits = job.shmalloc::<u64>(4).await?;
/// let me = job.rank();
/// bits.update_each(WordUpdate::Or, [(me, 0, 1 << 3), (me, 0, 1 << 5), (me, 3, 1)]).await?;
/// bits.update_each(WordUpdate::Xor, [(me, 0, 1 << 3)]).await?;
/// assert_eq!(bits.to_vec(), [1 << 5, 0, 0, 1]);
/// # job.leave().await
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WordUpdate {
    /// Adds, wrapping around.
    Add,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Puts the value in the word's place.
    Replace,
}

/// How a word is named: by its offset in bytes, or by its index among elements.
pub trait WordIndex: Copy + super::atomic::Sealed {
    /// The part of the rank's.
    #[doc(hidden)]
    fn part<W: Word>(words: &Words<'_, W>, rank: Rank) -> usize;
    /// The offset in bytes among words of that length. Saturates: an absurd index is out of range, not wrapped around into it.
    #[doc(hidden)]
    fn offset(self, len: u64) -> u64;
}

impl super::atomic::Sealed for usize {}

impl WordIndex for usize {
    #[inline(always)]
    fn part<W: Word>(_: &Words<'_, W>, rank: Rank) -> usize {
        // Elements are those of windows.
        rank.index()
    }

    #[inline(always)]
    fn offset(self, len: u64) -> u64 {
        (self as u64).saturating_mul(len)
    }
}

impl WordIndex for u64 {
    #[inline(always)]
    fn part<W: Word>(words: &Words<'_, W>, rank: Rank) -> usize {
        words.part(rank)
    }

    #[inline(always)]
    fn offset(self, _: u64) -> u64 {
        self
    }
}

/// Parts of a window that bits stand for.
const MOST_MARKED: usize = u64::BITS as usize;

/// An update of a mapped word, which has been asked for.
#[derive(Clone, Copy)]
struct Ready {
    word: SharedSlice,
    operand: u64,
    part: u32,
    /// How many of the batch were taken before it.
    at: u32,
}

/// Updates whose words have been asked for together.
struct Batch {
    updates: [Ready; AHEAD],
    count: usize,
    /// The number of the first that was taken.
    first: usize,
    /// The parts that they go to, if there are no more than bits.
    marked: u64,
}

impl Batch {
    fn new() -> Self {
        let none = Ready { word: SharedSlice::EMPTY, operand: 0, part: 0, at: 0 };
        Batch { updates: [none; AHEAD], count: 0, first: 0, marked: 0 }
    }

    fn updates(&self) -> &[Ready] {
        &self.updates[..self.count]
    }

    /// The parts that they go to, of so many: each once where there are few, and else for each of them.
    #[inline(always)]
    fn numbers(&self, parts: usize) -> impl Iterator<Item = u32> + Clone {
        let few = parts <= MOST_MARKED;
        let rest = |bits: &u64| Some(bits & bits.wrapping_sub(1)).filter(|rest| *rest != 0);
        let marks = std::iter::successors(Some(self.marked).filter(|marked| few && *marked != 0), rest);
        let each = if few { &[] } else { self.updates() };
        marks.map(|bits| bits.trailing_zeros()).chain(each.iter().map(|ready| ready.part))
    }

    /// The same in that memory: what holds for a part need not be asked for every word.
    #[inline(always)]
    fn parts<'m>(&self, memory: &'m Memory) -> impl Iterator<Item = &'m Part> + Clone {
        self.numbers(memory.parts.len()).filter_map(|part| memory.parts.get(part as usize))
    }
}

/// What is done to a word of that kind.
#[inline(always)]
fn op_of<W: Word>(op: AtomicOp, operand: u64) -> WordOp {
    WordOp { op, len: W::LEN, operand, expected: operand }
}

/// Updates, and how far they are done.
struct Each<'w, I, W> {
    words: Words<'w, W>,
    update: WordUpdate,
    updates: Fuse<I>,
    /// How many were taken.
    taken: usize,
    /// Those that take messages, with their numbers.
    under_way: VecDeque<(usize, Access<'w>)>,
    /// No more will come.
    ended: bool,
}

impl<'w, X: WordIndex, W: Word, I: Iterator<Item = (Rank, X, W)>> Each<'w, I, W> {
    fn new(words: Words<'w, W>, update: WordUpdate, updates: I) -> Self {
        let (updates, under_way) = (updates.fuse(), VecDeque::new());
        Self { words, update, updates, taken: 0, under_way, ended: false }
    }

    fn poll<const FETCH: bool>(
        &mut self,
        cx: &mut Context<'_>,
        mut found: impl FnMut(usize, W),
    ) -> Poll<Result<(), RmaError>> {
        loop {
            while !self.ended && self.under_way.len() < UNDER_WAY {
                ready!(budget::proceed(cx));
                self.step::<FETCH>(&mut found)?;
                budget::spend(budget::UNIT);
            }
            let Some((number, access)) = self.under_way.front_mut() else { return Poll::Ready(Ok(())) };
            let old = ready!(access.poll(cx, FETCH)?);
            found(*number, W::from_bits(old));
            self.under_way.pop_front();
        }
    }

    /// Does or starts some of them. All that were made ready are done when it returns.
    fn step<const FETCH: bool>(&mut self, found: &mut impl FnMut(usize, W)) -> Result<(), RmaError> {
        // One loop for each: what is done to the words is not looked up for every word.
        match self.update {
            WordUpdate::Add => self.step_of::<FETCH, { AtomicOp::Add as u8 }>(found),
            WordUpdate::And => self.step_of::<FETCH, { AtomicOp::And as u8 }>(found),
            WordUpdate::Or => self.step_of::<FETCH, { AtomicOp::Or as u8 }>(found),
            WordUpdate::Xor => self.step_of::<FETCH, { AtomicOp::Xor as u8 }>(found),
            WordUpdate::Replace if FETCH => self.step_of::<FETCH, { AtomicOp::Swap as u8 }>(found),
            WordUpdate::Replace => self.step_of::<FETCH, { AtomicOp::Store as u8 }>(found),
        }
    }

    #[inline(always)]
    fn step_of<const FETCH: bool, const OP: u8>(
        &mut self,
        found: &mut impl FnMut(usize, W),
    ) -> Result<(), RmaError> {
        let Some(op) = (const { AtomicOp::from_number(OP) }) else { return Ok(()) };
        // While the words of one are on their way, those of the other are changed. To ask for one as another is changed took a
        // fifth longer.
        let (mut asked, mut changed) = (&mut Batch::new(), &mut Batch::new());
        let mut outcome = Ok(());
        let mut turn = 0;
        while turn < STEP / AHEAD && !self.ended && outcome.is_ok() {
            std::mem::swap(&mut asked, &mut changed);
            outcome = self.ask::<FETCH>(op, asked);
            self.apply::<FETCH>(op, changed, found)?;
            turn += 1;
        }
        self.apply::<FETCH>(op, asked, found)?;
        outcome
    }

    /// Takes some updates and asks for their words; those that take messages are started.
    #[inline(always)]
    fn ask<const FETCH: bool>(&mut self, op: AtomicOp, batch: &mut Batch) -> Result<(), RmaError> {
        batch.first = self.taken;
        let (mut count, mut marked) = (0, 0);
        let mut outcome = Ok(());
        for at in 0..AHEAD {
            // Nobody is amid an access here: the updates come from the user's iterator, which may take its time.
            let Some((rank, index, value)) = self.updates.next() else {
                (self.ended, self.taken) = (true, batch.first + at);
                break;
            };
            let (part, offset) = (X::part(&self.words, rank), index.offset(W::LEN.bytes()));
            let operand = value.to_bits();
            if let Some(word) = self.words.memory().word_at(part, offset, W::LEN) {
                word.prefetch_write(0);
                batch.updates[count] = Ready { word, operand, part: part as u32, at: at as u32 };
                count += 1;
                marked |= 1 << (part % MOST_MARKED);
            } else {
                outcome = self.start::<FETCH>(batch.first + at, op, (part, rank, offset), operand);
                if outcome.is_err() {
                    break;
                }
            }
        }
        if !self.ended {
            self.taken = batch.first + AHEAD;
        }
        (batch.count, batch.marked) = (count, marked);
        outcome
    }

    /// Applies updates, and starts those that may not be done at once.
    #[inline(always)]
    fn apply<const FETCH: bool>(
        &mut self,
        op: AtomicOp,
        batch: &Batch,
        found: &mut impl FnMut(usize, W),
    ) -> Result<(), RmaError> {
        let memory = self.words.memory();
        let mut old = [0; AHEAD];
        let applied = memory.change_all(batch.parts(memory), || {
            for (Ready { word, operand, .. }, old) in batch.updates().iter().zip(&mut old) {
                // They were seen to be words.
                match FETCH {
                    true => *old = word.apply(&op_of::<W>(op, *operand)).unwrap_or_default(),
                    false => _ = word.apply_unread(&op_of::<W>(op, *operand)),
                }
            }
        });
        if !applied {
            return self.apply_apart::<FETCH>(op, batch, found);
        }
        if FETCH {
            for (Ready { at, .. }, old) in batch.updates().iter().zip(old) {
                found(batch.first + *at as usize, W::from_bits(old));
            }
        }
        Ok(())
    }

    /// Where some part may not be changed at once.
    #[cold]
    fn apply_apart<const FETCH: bool>(
        &mut self,
        op: AtomicOp,
        batch: &Batch,
        found: &mut impl FnMut(usize, W),
    ) -> Result<(), RmaError> {
        for Ready { word, operand, part, at } in batch.updates() {
            let (number, index) = (batch.first + *at as usize, *part as usize);
            let memory = self.words.memory();
            let Some(part) = memory.parts.get(index) else { continue };
            let offset = part.mapped.map_or(0, |mapped| word.distance_behind(&mapped));
            let aim = memory.aim_at_word(index, offset, W::LEN);
            match aim.and_then(|aim| aim.atomic(&op_of::<W>(op, *operand), FETCH)) {
                Some(old) if FETCH => found(number, W::from_bits(old)),
                Some(_) => {}
                None => self.start::<FETCH>(number, op, (index, part.rank, offset), *operand)?,
            }
        }
        Ok(())
    }

    #[cold]
    fn start<const FETCH: bool>(
        &mut self,
        number: usize,
        op: AtomicOp,
        (part, rank, offset): (usize, Rank, u64),
        operand: u64,
    ) -> Result<(), RmaError> {
        let op = op_of::<W>(op, operand);
        let mut access = Access::new(self.words.memory(), part, rank, offset, op);
        access.start(FETCH)?;
        self.under_way.push_back((number, access));
        Ok(())
    }
}

impl<I, W> std::fmt::Debug for Each<'_, I, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Each")
            .field("update", &self.update)
            .field("taken", &self.taken)
            .field("under_way", &self.under_way.len())
            .finish_non_exhaustive()
    }
}

/// Many atomic updates whose old values are not wanted. Ready when all are done at their targets.
///
/// # Cancel safety
/// Dropped before it was polled, or while its task's turn was used up, nothing is done. Dropped later, some are done, each at most once: which ones is not known.
#[must_use = "atomic operations do nothing until they are awaited"]
#[derive(Debug)]
pub struct UpdateEach<'w, I, W> {
    each: Each<'w, I, W>,
}

// The iterator is never pinned.
impl<I, W> Unpin for UpdateEach<'_, I, W> {}

impl<X: WordIndex, W: Word, I: Iterator<Item = (Rank, X, W)>> Future for UpdateEach<'_, I, W> {
    type Output = Result<(), RmaError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().each.poll::<false>(cx, |_, _| {})
    }
}

/// Many atomic updates whose old values are wanted. Ready with them, in the updates' order.
///
/// # Cancel safety
/// As for [`UpdateEach`].
#[must_use = "atomic operations do nothing until they are awaited"]
#[derive(Debug)]
pub struct FetchEach<'w, I, W> {
    each: Each<'w, I, W>,
    old: Vec<W>,
}

// The iterator is never pinned.
impl<I, W> Unpin for FetchEach<'_, I, W> {}

impl<X: WordIndex, W: Word, I: Iterator<Item = (Rank, X, W)>> Future for FetchEach<'_, I, W> {
    type Output = Result<Vec<W>, RmaError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { each, old } = self.get_mut();
        ready!(each.poll::<true>(cx, |number, value| {
            if old.len() <= number {
                old.resize(number + 1, W::from_bits(0));
            }
            old[number] = value;
        })?);
        Poll::Ready(Ok(std::mem::take(old)))
    }
}

impl<'w, W: Word> Words<'w, W> {
    /// Updates many words, each given by rank, offset in bytes and operand, as [`Window::update_each`] does.
    ///
    /// # Errors
    /// As for [`Window::update_each`].
    ///
    /// [`Window::update_each`]: super::Window::update_each
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::WordUpdate;
    /// let window = job.shmalloc::<u8>(64).await?;
    /// let words = window.words::<u32>(); // by offsets in bytes
    /// words.update_each(WordUpdate::Add, [(job.rank(), 8, 5), (job.rank(), 12, 6)]).await?;
    /// assert_eq!(words.load(job.rank(), 12).await?, 6);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn update_each<U>(&self, update: WordUpdate, updates: U) -> UpdateEach<'w, U::IntoIter, W>
    where
        U: IntoIterator<Item = (Rank, u64, W)>,
    {
        UpdateEach { each: Each::new(*self, update, updates.into_iter()) }
    }

    /// Updates many words, and gives their old values in the updates' order.
    ///
    /// # Errors
    /// As for [`Window::update_each`](super::Window::update_each).
    pub fn fetch_each<U>(&self, update: WordUpdate, updates: U) -> FetchEach<'w, U::IntoIter, W>
    where
        U: IntoIterator<Item = (Rank, u64, W)>,
    {
        FetchEach { each: Each::new(*self, update, updates.into_iter()), old: Vec::new() }
    }
}

impl<T: Word> super::Window<T> {
    /// Updates many elements of many ranks, each given by rank, index and operand: one future for all of them.
    ///
    /// It is the quickest way to do thousands of small updates: in mapped memory a word is asked for while those before it
    /// change, and elsewhere hundreds are under way at once. They are done in any order, after the puts and atomic operations
    /// of this rank that precede, and before those that are begun when it has ended. The iterator is asked a few updates ahead.
    ///
    /// # Errors
    /// That of the first update that fails; all about them is said at [`Words`]. Those before it are done, or on their way
    /// to it; of those behind it none is begun but where a target is lost meanwhile.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::WordUpdate;
    /// let job = posthaste::solo().await?;
    /// let counts = job.shmalloc::<u64>(8).await?;
    /// let me = job.rank();
    /// counts.update_each(WordUpdate::Add, (0..1000).map(|number| (me, number % 7, 1))).await?;
    /// assert_eq!(counts.fetch_each(WordUpdate::Or, [(me, 3, 1), (me, 4, 1)]).await?, [143, 143]);
    /// assert!(counts.update_each(WordUpdate::Add, [(me, 8, 1), (me, 7, 1)]).await.is_err());
    /// assert_eq!(counts.load(7), Some(0));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn update_each<U>(&self, update: WordUpdate, updates: U) -> UpdateEach<'_, U::IntoIter, T>
    where
        U: IntoIterator<Item = (Rank, usize, T)>,
    {
        UpdateEach { each: Each::new(self.elements(), update, updates.into_iter()) }
    }

    /// Updates many elements, and gives their old values in the updates' order; with [`WordUpdate::Replace`] it swaps.
    ///
    /// # Errors
    /// As for [`update_each`](Self::update_each).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::WordUpdate;
    /// let window = job.shmalloc::<u64>(4).await?;
    /// let updates = [7, 8, 9].map(|value| (job.rank(), 2, value));
    /// // All three to one word: each replaces what the one before it has left.
    /// let old = window.fetch_each(WordUpdate::Replace, updates).await?;
    /// assert_eq!((old.len(), old.iter().sum::<u64>() + window.load(2).unwrap_or(0)), (3, 7 + 8 + 9));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn fetch_each<U>(&self, update: WordUpdate, updates: U) -> FetchEach<'_, U::IntoIter, T>
    where
        U: IntoIterator<Item = (Rank, usize, T)>,
    {
        FetchEach { each: Each::new(self.elements(), update, updates.into_iter()), old: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_names_each_part_once_where_bits_can_tell_them_apart() {
        let batch_of = |parts: &[u32]| {
            let mut batch = Batch::new();
            for (slot, part) in batch.updates.iter_mut().zip(parts) {
                slot.part = *part;
                batch.marked |= 1 << (*part as usize % MOST_MARKED);
            }
            batch.count = parts.len();
            batch
        };
        let numbers = |parts: &[u32], of| batch_of(parts).numbers(of).collect::<Vec<_>>();
        assert_eq!(numbers(&[5, 63, 5, 0, 63], 64), [0, 5, 63]);
        assert_eq!(numbers(&[5, 64, 5, 0], 65), [5, 64, 5, 0]);
        assert_eq!(numbers(&[], 64), [0; 0]);
        assert_eq!(numbers(&[], 100), [0; 0]);
    }
}
