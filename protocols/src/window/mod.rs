//! Memory that peers write and read: windows of all ranks, and regions of one.

mod allocation;
mod atomic;
mod each;
mod free;
mod get;
mod group;
mod memory;
mod own;
mod put;
mod region;
mod signal;
mod typed;
mod words;

pub use atomic::{AtomicFetch, AtomicUpdate, Word};
pub use each::{FetchEach, UpdateEach, WordIndex, WordUpdate};
pub use get::{Get, GetInto, GetTo};
pub(crate) use group::WindowHome;
pub(crate) use memory::Memory;
pub use put::{One, Put, PutCopy, PutElement, PutSlice};
pub use region::{OwnedRegion, Region, RegionKey, RegionSlice, RemoteRegion};
pub use signal::{PutSignal, Signal};
pub use typed::{GetTyped, PutTyped};
pub use words::Words;

use crate::datatype::LayoutAccess;
use crate::exchange::{Exchange, PART_BYTES};
use crate::operation::{Pending, Way};
use allocation::allocate_part;
use bytes::Bytes;
use get::Fetch;
use group::GroupOrigin;
use memory::{Made, Part};
use posthaste_core::context::Posted;
use posthaste_core::device::RemoteMemory;
use posthaste_core::engine::PatternError;
use posthaste_core::slot::Value;
use posthaste_core::{Client, Fault, Handle, Messager, Rank, RmaError, SendError, WindowId};
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a typed window holds: plain old data of any bit pattern.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use zerocopy::{FromBytes, Immutable, IntoBytes};
///
/// #[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// struct Particle {
///     place: [f32; 3],
///     mass: f32,
/// }
///
/// let particles = job.shmalloc::<Particle>(100).await?;
/// let heavy = Particle { place: [1.0, 2.0, 3.0], mass: 1e6 };
/// particles.put(job.rank(), 42, heavy).await?;
/// assert_eq!(particles.get(job.rank(), 42).await?, heavy);
/// # job.leave().await
/// # }
/// ```
pub trait Element: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static> Element for T {}

/// A window over all ranks of the job, or over the members of a group ([`Group::shmalloc`](crate::Group::shmalloc)): each
/// rank's part has a length of its own, 0 allowed (access only). Offsets are in elements of `T`; [`byte`](Window::bytes)
/// views count bytes. Cheap to clone; dropping it does *not* give its memory back, as that of a [`Region`] is: only
/// [`free`](Window::free), which all ranks call, does. In a window of a group, ranks are those of the group, and
/// [`rank_of`](Window::rank_of) tells which one a rank of the job is.
///
/// Its operations belong to the context [through](Window::through) which it is used. Whoever owns that context has to drive them
/// (`job.drive(&context, window.put(..))`), or poll it meanwhile: what could not be done at once waits for its owner. Over shared
/// memory most puts and gets can, so that a program which awaits them bare, as if nobody owned the context, waits for ever only
/// elsewhere.
///
/// Its atomicity is 8 bytes at multiples of 8: concurrent puts and gets keep such words whole, and 4 bytes at multiples
/// of 4, those of datatypes where each block begins and ends at a multiple of 8. Over TCP that holds for up to 4 KiB; of a
/// longer put a reader may see part of a word where a packet ended.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u32>(100).await?;
/// let right = job.rank().next(job.size());
/// let there = window.put_slice(right, 10, &[1, 2, 3]).local().await?; // the source is reusable
/// there.await?; // and the data is at the target
/// assert_eq!(window.get_slice(right, 9, 5).await?, [0, 1, 2, 3, 0]);
/// window.store_slice(50, &[7; 3])?; // this rank's own part
/// assert_eq!(window.load(52), Some(7));
/// assert!(window.put(right, 100, 0).await.is_err());
/// window.free().await?;
/// # job.leave().await
/// # }
/// ```
pub struct Window<T = u8> {
    memory: Arc<Memory>,
    origin: Origin,
    element: PhantomData<fn() -> T>,
}

/// How a window was made, and is freed.
#[derive(Clone)]
enum Origin {
    /// By all ranks; its number is the same on all of them.
    World(Exchange, u64),
    Group(Arc<GroupOrigin>),
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        Self { memory: self.memory.clone(), origin: self.origin.clone(), element: PhantomData }
    }
}

impl<T> std::fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl<T: Element> Window<T> {
    /// Makes a window: collective, every rank names its own length in elements. The memory is zero. A window does not grow:
    /// whoever needs more makes another one, copies, and frees the first.
    ///
    /// # Errors
    /// If memory cannot be had here (the other ranks then get [`Fault::OutOfMemory`]), or a rank is lost, has left, or
    /// called something else. Where a rank is lost meanwhile, some survivors may have the window and others not.
    ///
    /// # Cancel safety
    /// Not cancel safe: the other ranks wait until this one leaves.
    pub async fn allocate(
        client: &Client,
        exchange: &Exchange,
        layouts: &LayoutAccess,
        len: usize,
    ) -> Result<Window<T>, RmaError> {
        const { assert!(size_of::<T>() > 0, "a window has elements of at least one byte") };
        let handle = first_context(client)?;
        let me = handle.me().rank;
        let device = client.device_for(me).ok_or(RmaError::Unreachable(me))?.clone();
        // Of those that take part: whichever is started again meanwhile has no part.
        let incarnations: Vec<u32> =
            (0..client.peers().ranks).map(|rank| client.incarnation_of(Rank(rank))).collect();
        let making = exchange.begin_window()?;
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        let (blob, own, failed) = match allocate_part(&device, bytes) {
            Ok((own, start)) => {
                let blob = part_blob(start, bytes.unwrap_or(0));
                (blob, (own.len > 0).then(|| (device.clone(), own)), None)
            }
            Err(error) => (NO_PART, None, Some(error)),
        };
        let gathered = making.exchange(blob, own).await;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let gathered = gathered.map_err(send_to_rma)?;
        if gathered.iter().any(|blob| **blob == NO_PART) {
            // All see that, so no rank has a window and none can reach the memory.
            making.give_up();
            return Err(Fault::OutOfMemory("another rank could not allocate its part of the window").into());
        }
        let remotes: Vec<RemoteMemory> = gathered
            .iter()
            .enumerate()
            .zip(incarnations)
            .map(|((rank, blob), incarnation)| {
                let (rank, (offset, len)) = (Rank(rank as u32), blob_part(blob));
                check_part(rank, offset, len)?;
                Ok(RemoteMemory { rank, offset, len, mapped: client.map(rank, offset, len), incarnation })
            })
            .collect::<Result<_, RmaError>>()?;
        let made = Made {
            id: WindowId(making.number() as u32),
            handle,
            gates: client.gates().clone(),
            device,
            layouts: *layouts,
            size: remotes.len() as u32,
            own: me.index(),
        };
        let memory = made.with(remotes).await;
        let number = making.made();
        let origin = Origin::World(exchange.clone(), number);
        Ok(Window { memory, origin, element: PhantomData })
    }

    /// Elements in a rank's part; 0 for an unknown rank.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// // Each rank names a length of its own.
    /// let window = job.shmalloc::<u16>(10 + job.rank().index()).await?;
    /// assert_eq!(window.len(job.rank()), 10 + job.rank().index());
    /// assert_eq!(window.len(posthaste::Rank(1000)), 0, "there is no such rank");
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn len(&self, rank: Rank) -> usize {
        self.memory.parts.get(rank.index()).map_or(0, |part| (part.len / size_of::<T>() as u64) as usize)
    }

    /// This rank, as the window counts: in a window of a group, ranks are the group's.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.world().shmalloc::<u32>(4).await?;
    /// // The same program for a window of all ranks and for one of some.
    /// let right = window.rank().next(window.ranks().count());
    /// window.put(right, 0, 7).await?;
    /// assert_eq!(window.len(window.rank()), 4);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> Rank {
        Rank(self.memory.own as u32)
    }

    /// The ranks of the window: those of the job, or of the group that owns it, as that counts.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = Rank> + use<T> {
        (0..self.memory.parts.len()).map(|rank| Rank(rank as u32))
    }

    /// Whether no rank has a part.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.parts.iter().all(|part| part.len == 0)
    }

    /// Smallest unit, in bytes, that concurrent puts and gets keep whole, at multiples of itself. Where the memory is not
    /// mapped that is so of puts and gets of up to 4 KiB: longer ones are received by the system, straight into their place.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(4).await?;
    /// // Readers see words of so many bytes whole, whoever puts them meanwhile; over TCP, those of puts of up to 4 KiB.
    /// assert!(window.atomicity() >= size_of::<u64>());
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn atomicity(&self) -> usize {
        self.memory.device.caps().atomicity
    }

    /// The same window with offsets in bytes.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u32>(4).await?;
    /// window.put(job.rank(), 1, 0x0102_0304).await?;
    /// // The second element begins at byte 4.
    /// assert_eq!(window.bytes().get_slice(job.rank(), 4, 4).await?, 0x0102_0304_u32.to_ne_bytes());
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn bytes(&self) -> Window<u8> {
        Window { memory: self.memory.clone(), origin: self.origin.clone(), element: PhantomData }
    }

    /// The same window through another context of the client: what is done with the result goes that context's way, in
    /// its order and on its connections, beside what goes through others; of two operations through two contexts neither
    /// precedes the other. It is one window all the same: freed once, through whichever, for which the owners of all contexts that
    /// it was led through have to poll theirs, or to have dropped them.
    ///
    /// # Errors
    /// [`RmaError::OtherClient`] for a context of another client, and [`RmaError::NoSuchWindow`] if the window was freed.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is told to anybody.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::ContextId;
    ///
    /// let job = posthaste::solo_with(1, 2).await?; // one client of two contexts
    /// let window = job.shmalloc::<u64>(8).await?;
    /// let second = job.context_handle(ContextId(1)).expect("there are two");
    /// let beside = window.through(second).await?;
    /// beside.put(job.rank(), 3, 42).await?;
    /// assert_eq!(window.load(3), Some(42));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn through(&self, handle: &Handle) -> Result<Window<T>, RmaError> {
        let memory = self.memory.through(handle).await?;
        Ok(Window { memory, origin: self.origin.clone(), element: PhantomData })
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    #[inline]
    pub(crate) fn offset(index: usize) -> u64 {
        // Saturates: an absurd index is out of range, not wrapped around into it.
        (index as u64).saturating_mul(size_of::<T>() as u64)
    }

    /// Puts one element. Awaiting it means that it is at the target; [`Put::local`] is the earlier stage.
    ///
    /// # Cancel safety
    /// See [`Put`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<f64>(8).await?;
    /// let right = job.rank().next(job.size());
    /// window.put(right, 3, 2.5).await?; // it is there
    /// assert_eq!(window.get(right, 3).await?, 2.5);
    /// assert!(window.put(right, 8, 0.0).await.is_err(), "the part has eight elements");
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put(&self, rank: Rank, index: usize, value: T) -> PutElement<'_, T> {
        PutElement::element(&self.memory, rank, Self::offset(index), value)
    }

    /// Puts consecutive elements, which are borrowed as long as the future lives, or until [`local`](PutCopy::local) is ready.
    /// They are written to mapped memory, or copied for the device, which [`put_bytes`](Self::put_bytes) spares.
    ///
    /// # Cancel safety
    /// See [`Put`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u32>(8).await?;
    /// let row = [1, 2, 3];
    /// window.put_slice(job.rank(), 2, &row).await?;
    /// assert_eq!(window.to_vec(), [0, 0, 1, 2, 3, 0, 0, 0]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_slice<'w, 's>(&'w self, rank: Rank, index: usize, values: &'s [T]) -> PutSlice<'w, 's> {
        PutSlice::new(&self.memory, rank.0, rank, Self::offset(index), values.as_bytes())
    }

    /// Puts owned bytes at an element's place, without a copy of them on the way.
    ///
    /// # Cancel safety
    /// See [`Put`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Bytes;
    /// let window = job.shmalloc::<u8>(100_000).await?;
    /// // What owns its bytes is kept until it is there, so that the put can go on beside other work.
    /// let page = Bytes::from(vec![7; 50_000]);
    /// window.put_bytes(job.rank(), 1000, page.clone()).await?;
    /// assert_eq!(window.get_slice(job.rank(), 1000, page.len()).await?, page);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn put_bytes(&self, rank: Rank, index: usize, bytes: Bytes) -> Put<'_> {
        Put::new(&self.memory, rank.index(), rank, Self::offset(index), bytes.into())
    }

    /// Gets one element.
    ///
    /// # Cancel safety
    /// Cancel safe: a get changes nothing at the target.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(4).await?;
    /// assert!(window.store(2, 42)); // each rank writes its own part
    /// job.barrier().await?;
    /// let right = job.rank().next(job.size());
    /// assert_eq!(window.get(right, 2).await?, 42);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn get(&self, rank: Rank, index: usize) -> Get<'_, T> {
        Get { memory: &self.memory, rank, offset: Self::offset(index), slow: None, element: PhantomData }
    }

    /// Fills a slice with consecutive elements, which is borrowed for as long as the future lives.
    ///
    /// # Cancel safety
    /// Cancel safe: a get changes nothing at the target, and until it is ready nothing in the slice.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(100).await?;
    /// window.store_slice(10, &[1, 2, 3])?;
    /// // One buffer for all gets of a loop.
    /// let mut row = [0; 3];
    /// window.get_to(job.rank(), 10, &mut row).await?;
    /// assert_eq!(row, [1, 2, 3]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn get_to<'w, 's>(&'w self, rank: Rank, index: usize, into: &'s mut [T]) -> GetTo<'w, 's, T> {
        let offset = Self::offset(index);
        GetTo { memory: &self.memory, part: rank.0, rank, offset, into, way: Way::Fresh }
    }

    /// Fills a buffer with consecutive elements and gives it back. Where memory is not mapped, a long get
    /// of bytes gives the memory that came instead of copying it.
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(100).await?;
    /// window.store_slice(10, &[1, 2, 3])?;
    /// // The buffer goes with the get, and comes back full: nothing is borrowed meanwhile.
    /// let row = window.get_into(job.rank(), 10, vec![0; 3]).await?;
    /// assert_eq!(row, [1, 2, 3]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get_into(&self, rank: Rank, index: usize, buffer: Vec<T>) -> GetInto<'_, T> {
        GetInto {
            fetch: Fetch::new(&self.memory, rank.index(), rank, Self::offset(index)),
            buffer: Some(buffer),
        }
    }

    /// Gets consecutive elements as a new vector.
    ///
    /// # Cancel safety
    /// Cancel safe: a get changes nothing at the target.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(100).await?;
    /// window.store_slice(10, &[1, 2, 3])?;
    /// assert_eq!(window.get_slice(job.rank(), 9, 4).await?, [0, 1, 2, 3]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get_slice(&self, rank: Rank, index: usize, count: usize) -> GetInto<'_, T> {
        // Checked before the memory is taken.
        let buffer = match self.memory.check(rank.index(), rank, Self::offset(index), Self::offset(count)) {
            Ok(_) => Some(vec![T::new_zeroed(); count]),
            Err(_) => None,
        };
        let mut fetch = Fetch::new(&self.memory, rank.index(), rank, Self::offset(index));
        fetch.count = Self::offset(count);
        GetInto { fetch, buffer }
    }

    /// Records a put of a whole region to elements of a rank's part; see [`Recorder`](crate::Recorder::put).
    ///
    /// # Errors
    /// As for [`Recorder::put`](crate::Recorder::put).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u8>(64).await?;
    /// let source = job.region(16).await?;
    /// let pattern = job.record(|recorder| window.record_put(recorder, job.rank(), 32, &source)).await?;
    /// source.write(0, b"new at each time")?;
    /// pattern.replay().await?;
    /// assert_eq!(window.get_slice(job.rank(), 32, 16).await?, b"new at each time");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn record_put(
        &self,
        recorder: &mut crate::pattern::Recorder,
        rank: Rank,
        index: usize,
        source: &Region,
    ) -> Result<(), PatternError> {
        recorder.put(self, rank, index, source)
    }

    /// Records a put of `len` bytes of a region, from `first` on, to elements of a rank's part.
    ///
    /// # Errors
    /// As for [`Recorder::put`](crate::Recorder::put).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u8>(64).await?;
    /// let source = job.region(16).await?;
    /// // Four bytes of the region, from its byte 8 on.
    /// let pattern = job.record(|recorder| window.record_put_from(recorder, job.rank(), 0, &source, 8, 4)).await?;
    /// source.write(0, b"0123456789abcdef")?;
    /// pattern.replay().await?;
    /// assert_eq!(window.get_slice(job.rank(), 0, 5).await?, b"89ab\0");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn record_put_from(
        &self,
        recorder: &mut crate::pattern::Recorder,
        rank: Rank,
        index: usize,
        source: &Region,
        first: u64,
        len: u64,
    ) -> Result<(), PatternError> {
        let end = first.saturating_add(len);
        recorder.put(self, rank, index, source.slice(first as usize..end as usize))
    }
}

/// What a rank says that could not allocate its part.
const NO_PART: [u8; PART_BYTES] = [0xff; PART_BYTES];

fn part_blob(offset: u64, len: u64) -> [u8; PART_BYTES] {
    let mut blob = [0; PART_BYTES];
    blob[..8].copy_from_slice(&offset.to_le_bytes());
    blob[8..].copy_from_slice(&len.to_le_bytes());
    blob
}

fn blob_part(blob: &[u8]) -> (u64, u64) {
    let word = |at: usize| u64::from_le_bytes(blob[at..at + 8].try_into().unwrap_or_default());
    (word(0), word(8))
}

/// Refuses a part that ends beyond all memory, as no rank of a job has one: where none is mapped, nothing else looks at it.
fn check_part(rank: Rank, offset: u64, len: u64) -> Result<(), RmaError> {
    match offset.checked_add(len) {
        Some(_) => Ok(()),
        None => Err(Fault::PeerCorrupt(rank).into()),
    }
}

/// The client's first context, until it is left.
fn first_context(client: &Client) -> Result<Handle, RmaError> {
    let handle = client.contexts().first().filter(|handle| !handle.is_closed());
    handle.cloned().ok_or(RmaError::Fault(Fault::Shutdown))
}

fn send_to_rma(error: SendError) -> RmaError {
    match error {
        SendError::Fault(fault) => RmaError::Fault(fault),
        SendError::UnknownRank { rank, size } => RmaError::UnknownRank { rank, size },
        _ => RmaError::Fault(Fault::Shutdown),
    }
}

/// How far a put or a get is.
enum Stage {
    Start,
    Posted(Posted<Result<Option<Pending>, RmaError>>),
    Pending(Pending),
    Done,
}

impl Stage {
    /// Ready once it is started: it is `Pending` then or, as after an error, `Done`.
    #[inline]
    fn poll_start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Stage::Posted(posted) = self {
            let started = ready!(posted.poll(cx));
            *self = Stage::Done;
            if let Some(pending) = started? {
                *self = Stage::Pending(pending);
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Ready at its end, with its value if it has one.
    fn poll(&mut self, handle: &Handle, cx: &mut Context<'_>) -> Poll<Result<Option<Value>, RmaError>> {
        ready!(self.poll_start(cx))?;
        let Stage::Pending(pending) = self else { return Poll::Ready(Ok(None)) };
        let value = ready!(pending.poll(handle, cx));
        *self = Stage::Done;
        Poll::Ready(value.map(Some).map_err(RmaError::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::context::Face;

    #[test]
    fn whoever_polls_one_that_could_not_be_started_once_more_does_not_wait_for_ever() {
        let client = crate::fixture::first_of(1, 1);
        let handle = &posthaste_core::Messager::contexts(&client)[0];
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        let refused = || Stage::Posted(handle.post(|_| Err(RmaError::NoSuchWindow(WindowId(7)))));
        let mut stage = refused();
        assert!(matches!(stage.poll_start(cx), Poll::Ready(Err(RmaError::NoSuchWindow(_)))));
        assert!(matches!(stage.poll_start(cx), Poll::Ready(Ok(()))));
        let mut stage = refused();
        assert!(matches!(stage.poll(handle, cx), Poll::Ready(Err(RmaError::NoSuchWindow(_)))));
        assert!(matches!(stage.poll(handle, cx), Poll::Ready(Ok(None))));
    }

    #[test]
    fn a_part_that_ends_beyond_all_memory_is_no_honest_ranks() {
        for (offset, len) in [(0, 0), (0, u64::MAX), (u64::MAX, 0), (u64::MAX - 7, 7)] {
            assert_eq!(check_part(Rank(3), offset, len), Ok(()));
        }
        for (offset, len) in [(u64::MAX - 7, 8), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            assert_eq!(check_part(Rank(3), offset, len), Err(Fault::PeerCorrupt(Rank(3)).into()));
        }
    }
}
