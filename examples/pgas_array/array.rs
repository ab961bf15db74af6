//! A small PGAS library: an array that is spread over all ranks and indexed as one.
//!
//! It stands on windows and groups alone, as anybody's library could.

use crate::common::Result;
use futures::future::try_join_all;
use posthaste::collective::Arithmetic;
use posthaste::{Element, Group, Job, Rank, Reduce, Window, Word};
use std::ops::Range;

/// An array of `len` elements in blocks of equal length, one on each rank; the last ones may be shorter or empty. Cheap to
/// clone; the memory goes back with [`free`](Self::free).
#[derive(Clone)]
pub struct GlobalArray<T> {
    window: Window<T>,
    world: Group,
    len: usize,
    block: usize,
}

/// Some consecutive elements of an array, which any ranks may have.
#[derive(Clone)]
pub struct Slice<'a, T> {
    array: &'a GlobalArray<T>,
    range: Range<usize>,
}

impl<T: Element> GlobalArray<T> {
    /// Makes an array of zeros. Collective: all ranks give the same length.
    pub async fn new(job: &Job, len: usize) -> Result<GlobalArray<T>> {
        let block = len.div_ceil(job.size()).max(1);
        let own = block_range(len, block, job.rank().index());
        let window = job.shmalloc(own.len()).await?;
        Ok(GlobalArray { window, world: job.world(), len, block })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The rank that has an element, and the element's place there.
    pub fn owner(&self, index: usize) -> (Rank, usize) {
        assert!(index < self.len, "index {index} of an array of {} elements", self.len);
        (Rank((index / self.block) as u32), index % self.block)
    }

    /// The indices that this rank has.
    pub fn local_range(&self) -> Range<usize> {
        block_range(self.len, self.block, self.world.rank())
    }

    /// Reads an element, wherever it is.
    pub async fn get(&self, index: usize) -> Result<T> {
        let (rank, at) = self.owner(index);
        Ok(self.window.get(rank, at).await?)
    }

    /// Writes an element, wherever it is. Awaiting it means that it is there.
    pub async fn put(&self, index: usize, value: T) -> Result<()> {
        let (rank, at) = self.owner(index);
        Ok(self.window.put(rank, at, value).await?)
    }

    /// A part of the array.
    pub fn slice(&self, range: Range<usize>) -> Slice<'_, T> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of an array of {} elements",
            self.len
        );
        Slice { array: self, range }
    }

    /// The elements that this rank has, with their indices: a copy.
    pub fn local(&self) -> impl Iterator<Item = (usize, T)> {
        self.local_range().zip(self.window.to_vec())
    }

    /// Writes each element that this rank has as a function of its index and its value.
    pub fn update_local(&self, mut update: impl FnMut(usize, T) -> T) -> Result<()> {
        let values: Vec<T> = self.local().map(|(index, value)| update(index, value)).collect();
        Ok(self.window.store_slice(0, &values)?)
    }

    /// Waits until all ranks have got here. What was awaited before is visible to all afterwards.
    pub async fn barrier(&self) -> Result<()> {
        Ok(self.world.barrier().await?)
    }

    /// Combines all elements; `first` changes nothing when combined with another one. Collective.
    pub async fn reduce(&self, first: T, combine: impl Fn(T, T) -> T + Send + Sync + 'static) -> Result<T> {
        let own = self.local().map(|(_, value)| value).fold(first, &combine);
        Ok(self.world.all_reduce_one(own, &Reduce::by(combine)).await?)
    }

    /// The sum of all elements. Collective.
    pub async fn sum(&self) -> Result<T>
    where
        T: Arithmetic,
    {
        let own = self.local().map(|(_, value)| value).fold(T::new_zeroed(), Arithmetic::add);
        Ok(self.world.all_reduce_one(own, &Reduce::sum()).await?)
    }

    /// Gives the memory back. Collective.
    pub async fn free(self) -> Result<()> {
        Ok(self.window.free().await?)
    }
}

impl<T: Word> GlobalArray<T> {
    /// Adds to an element, wherever it is, and gives the old value. No other rank's addition comes in between.
    pub async fn fetch_add(&self, index: usize, value: T) -> Result<T> {
        let (rank, at) = self.owner(index);
        Ok(self.window.fetch_add(rank, at, value).await?)
    }
}

impl<T: Element> Slice<'_, T> {
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// A part of this part.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.len(), "{range:?} of a slice of {} elements", self.len());
        self.array.slice(self.range.start + range.start..self.range.start + range.end)
    }

    /// Reads all elements: one get from each rank that has some, all at once.
    pub async fn get(&self) -> Result<Vec<T>> {
        let pieces =
            self.pieces().map(|(rank, at, piece)| self.array.window.get_slice(rank, at, piece.len()));
        Ok(try_join_all(pieces).await?.concat())
    }

    /// Writes all elements, likewise.
    pub async fn put(&self, values: &[T]) -> Result<()> {
        assert_eq!(values.len(), self.len(), "as many values as the slice has elements");
        let first = self.range.start;
        let pieces = self.pieces().map(|(rank, at, piece)| {
            self.array.window.put_slice(rank, at, &values[piece.start - first..piece.end - first])
        });
        try_join_all(pieces).await?;
        Ok(())
    }

    /// The rank of each piece, its place there, and its indices.
    fn pieces(&self) -> impl Iterator<Item = (Rank, usize, Range<usize>)> {
        let (block, range) = (self.array.block, self.range.clone());
        (range.start / block..range.end.div_ceil(block)).map(move |rank| {
            let piece = range.start.max(rank * block)..range.end.min((rank + 1) * block);
            (Rank(rank as u32), piece.start - rank * block, piece)
        })
    }
}

fn block_range(len: usize, block: usize, rank: usize) -> Range<usize> {
    (rank * block).min(len)..((rank + 1) * block).min(len)
}
