//! Puts and gets between layouts, in windows and in regions.

mod ask;
mod get;
mod put;

pub use get::GetTyped;
pub use put::PutTyped;

use super::{Element, Memory, Part, RemoteRegion, Window};
use crate::datatype::{Layout, SlicedMemory, Thresholds};
use bytes::Bytes;
use posthaste_core::{Rank, RmaError};
use std::sync::Arc;

/// Where the far layout of a put or a get lies: in a rank's part of a window, or in a region.
#[derive(Clone, Copy)]
struct There<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
}

impl<'w> There<'w> {
    fn part(&self) -> Result<&'w Part, RmaError> {
        self.memory.check(self.part, self.rank, 0, 0)
    }
}

impl<T: Element> Window<T> {
    /// Puts the elements of a layout to those of another one in a rank's part; both have the same elements, and shapes
    /// of their own. Bases of layouts are in bytes, from the beginning of the part and of `source`.
    ///
    /// What the elements are the layouts say alone: the types of the window and of `source` count for nothing, as memory of bytes
    /// may hold anything. A layout of `f64` over a slice of `f32` moves pairs of these.
    ///
    /// Memory that is mapped is written straight from the source, other memory by its owner. It takes effect behind this rank's
    /// puts that were polled before it, and before those polled later. Concurrent accesses to words of 8 bytes see them whole
    /// where the blocks of both layouts are such words.
    ///
    /// # Cancel safety
    /// Dropped before it was polled, or while its task's budget was spent, nothing is done. Dropped later, the put is done all
    /// the same.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::datatype::{Datatype, Layout};
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<f64>(100).await?; // a matrix of 10 × 10, row by row
    /// let column = Datatype::of::<f64>().vector(10, 1, 10)?;
    /// let values: Vec<f64> = (0..10).map(f64::from).collect();
    /// let packed = Datatype::of::<f64>();
    /// // Ten numbers become column 3.
    /// let to = Layout::new(&column, 1).at(3 * 8);
    /// window.put_typed(job.rank(), &to, &values, &Layout::new(&packed, 10)).await?;
    /// assert_eq!((window.load(43), window.load(44)), (Some(4.0), Some(0.0)));
    /// let back = window.get_typed(job.rank(), &to, vec![0.0; 10], &Layout::new(&packed, 10)).await?;
    /// assert_eq!(back, values);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_typed<'w, 's, S: Element>(
        &'w self,
        rank: Rank,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        self.put_typed_with(&Thresholds::default(), rank, to, source, from)
    }

    /// As [`put_typed`](Self::put_typed), straight or staged as these thresholds say where memory is mapped.
    ///
    /// # Cancel safety
    /// As for `put_typed`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout, Thresholds};
    /// let window = job.shmalloc::<u8>(16).await?;
    /// let every_fourth = Datatype::of::<u8>().vector(4, 1, 4)?;
    /// let every_other = Datatype::of::<u8>().vector(4, 1, 2)?;
    /// // Packed and unpacked again instead of byte by byte.
    /// let staged = Thresholds { granularity: 64, ..Thresholds::default() };
    /// let (to, from) = (Layout::new(&every_fourth, 1), Layout::new(&every_other, 1));
    /// window.put_typed_with(&staged, job.rank(), &to, &[1_u8, 0, 2, 0, 3, 0, 4], &from).await?;
    /// assert_eq!(window.to_vec(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_typed_with<'w, 's, S: Element>(
        &'w self,
        thresholds: &Thresholds,
        rank: Rank,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        PutTyped::new(self.there(rank), thresholds, to, source, from)
    }

    /// As [`put_typed`](Self::put_typed), from memory that the put owns and keeps for as long as it takes: where the target is not
    /// mapped, bytes that are one run of the source are neither packed nor copied on the way, unless it takes more than a message's
    /// info to describe where they go.
    ///
    /// # Cancel safety
    /// As for `put_typed`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Bytes;
    /// use posthaste::datatype::{Datatype, Layout};
    /// let picture = job.shmalloc::<u8>(100 * 100).await?; // row by row
    /// let byte = Datatype::of::<u8>();
    /// let tile = byte.vector(16, 16, 100)?; // 16 rows of 16
    /// let pixels = Bytes::from(vec![7; 256]);
    /// let to = Layout::new(&tile, 1).at(20 * 100 + 30);
    /// picture.put_typed_bytes(job.rank(), &to, pixels, &Layout::new(&byte, 256)).await?;
    /// assert_eq!((picture.load(20 * 100 + 30), picture.load(36 * 100 + 30)), (Some(7), Some(0)));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn put_typed_bytes<'w, 's>(
        &'w self,
        rank: Rank,
        to: &Layout<'s>,
        source: Bytes,
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        PutTyped::owned(self.there(rank), to, source, from)
    }

    /// Gets the elements of a layout in a rank's part into those of another one, in a buffer that is given back; see
    /// [`put_typed`](Self::put_typed).
    ///
    /// It reads what this rank's puts that were polled before it have written, and nothing of those polled later. Of memory that
    /// is not mapped that holds for the first 16 MiB: what follows is asked for as answers come, and again where its owner has
    /// too many of them (`POSTHASTE_ANSWER_BYTES`).
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// let matrix = job.shmalloc::<f32>(16).await?; // 4 × 4, row by row
    /// matrix.store_slice(0, &(0..16).map(|n| n as f32).collect::<Vec<_>>())?;
    /// let element = Datatype::of::<f32>();
    /// let column = element.vector(4, 1, 4)?;
    /// // Column 2 becomes a row.
    /// let from = Layout::new(&column, 1).at(2 * 4);
    /// let row = matrix.get_typed(job.rank(), &from, vec![0.0_f32; 4], &Layout::new(&element, 4)).await?;
    /// assert_eq!(row, [2.0, 6.0, 10.0, 14.0]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get_typed<S: Element>(
        &self,
        rank: Rank,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> GetTyped<'_, S> {
        self.get_typed_with(&Thresholds::default(), rank, from, into, to)
    }

    /// As [`get_typed`](Self::get_typed), straight or staged as these thresholds say where memory is mapped.
    ///
    /// # Cancel safety
    /// As for `get_typed`.
    pub fn get_typed_with<S: Element>(
        &self,
        thresholds: &Thresholds,
        rank: Rank,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> GetTyped<'_, S> {
        GetTyped::new(self.there(rank), thresholds, from, into, to)
    }

    fn there(&self, rank: Rank) -> There<'_> {
        There { memory: &self.memory, part: rank.index(), rank }
    }
}

impl RemoteRegion {
    /// Puts the elements of a layout to those of another one in the region, as [`Window::put_typed`] does. Bases of layouts are
    /// in bytes, from the beginning of the region and of `source`.
    ///
    /// # Cancel safety
    /// As for [`Window::put_typed`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// let region = job.region(32).await?;
    /// let remote = job.remote_region(region.key()).await?; // as a peer opens it
    /// let packed = Datatype::of::<u16>();
    /// let every_other = packed.vector(4, 1, 2)?;
    /// // Behind a header of 16 bytes.
    /// let to = Layout::new(&every_other, 1).at(16);
    /// remote.put_typed(&to, &[1_u16, 2, 3, 4], &Layout::new(&packed, 4)).await?;
    /// let mut last = [0; 6];
    /// region.read(24, &mut last)?;
    /// assert_eq!(last, [[3_u16, 0, 4].map(u16::to_ne_bytes)].concat().concat()[..]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_typed<'w, 's, S: Element>(
        &'w self,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        self.put_typed_with(&Thresholds::default(), to, source, from)
    }

    /// As [`put_typed`](Self::put_typed), straight or staged as these thresholds say where memory is mapped; see
    /// [`Window::put_typed_with`].
    ///
    /// # Cancel safety
    /// As for [`Window::put_typed`].
    #[inline]
    pub fn put_typed_with<'w, 's, S: Element>(
        &'w self,
        thresholds: &Thresholds,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        PutTyped::new(self.there(), thresholds, to, source, from)
    }

    /// As [`put_typed`](Self::put_typed), from memory that the put owns; see [`Window::put_typed_bytes`].
    ///
    /// # Cancel safety
    /// As for [`Window::put_typed`].
    pub fn put_typed_bytes<'w, 's>(
        &'w self,
        to: &Layout<'s>,
        source: Bytes,
        from: &Layout<'s>,
    ) -> PutTyped<'w, 's> {
        PutTyped::owned(self.there(), to, source, from)
    }

    /// Gets the elements of a layout in the region into those of another one, in a buffer that is given back, as
    /// [`Window::get_typed`] does.
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// // A matrix of 4 × 4, row by row, that its owner has already.
    /// let matrix = job.region_from((0..16).collect::<Vec<u8>>())?;
    /// let remote = job.remote_region(matrix.key()).await?; // as a peer opens it
    /// let element = Datatype::of::<u8>();
    /// let column = element.vector(4, 1, 4)?;
    /// let from = Layout::new(&column, 1).at(2);
    /// let row = remote.get_typed(&from, vec![0_u8; 4], &Layout::new(&element, 4)).await?;
    /// assert_eq!(row, [2, 6, 10, 14]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get_typed<S: Element>(&self, from: &Layout<'_>, into: Vec<S>, to: &Layout<'_>) -> GetTyped<'_, S> {
        self.get_typed_with(&Thresholds::default(), from, into, to)
    }

    /// As [`get_typed`](Self::get_typed), straight or staged as these thresholds say where memory is mapped.
    ///
    /// # Cancel safety
    /// As for `get_typed`.
    pub fn get_typed_with<S: Element>(
        &self,
        thresholds: &Thresholds,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> GetTyped<'_, S> {
        GetTyped::new(self.there(), thresholds, from, into, to)
    }

    fn there(&self) -> There<'_> {
        There { memory: &self.memory, part: 0, rank: self.owner() }
    }

    /// The region in segments of so many bytes, to be attached one at a time; `None` if it is not mapped here.
    ///
    /// This is the bare memory: what is copied through it is copied at once, in no order with this rank's own operations that are
    /// under way ([`flush`](crate::flush::flush) its owner before), and rouses nobody who waits for that memory. When its owner has freed
    /// the region, the bytes are anyone's.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::Segments;
    /// let region = job.region(100).await?;
    /// region.write(64, b"second")?;
    /// let remote = job.remote_region(region.key()).await?;
    /// let mut segments = remote.segments(64).expect("this rank's own memory is mapped");
    /// let second = segments.attach(1).expect("100 bytes are two segments");
    /// assert_eq!((second.len(), second.to_vec().starts_with(b"second")), (36, true));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn segments(&self, size: u64) -> Option<SlicedMemory> {
        self.memory.parts.first()?.mapped.map(|mapped| SlicedMemory::new(mapped, size))
    }
}
