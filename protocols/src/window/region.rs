//! Regions: memory of one rank, reached by a key that its owner tells.

use super::get::Fetch;
use super::memory::{Made, NO_OWN_PART};
use super::{GetInto, GetTo, Memory, Put, PutSignal, PutSlice, Signal, Word, first_context, own};
use crate::buffer::Buffer;
use crate::datatype::LayoutAccess;
use crate::operation::Way;
use posthaste_core::context::Face;
use posthaste_core::device::{Allocation, RemoteMemory};
use posthaste_core::exposed::{ExposedMemory, is_exposed};
use posthaste_core::memory::SharedSlice;
use posthaste_core::sync::lock;
use posthaste_core::{Client, Device, Fault, Handle, Messager, Rank, RmaError, Scope, WindowId};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

static NEXT: AtomicU64 = AtomicU64::new(0);

/// A region: memory of this rank that recorded operations read and that peers reach once they are told its
/// [`RegionKey`]. Cheap to clone; freed with its last clone, which must not be before peers have ended their
/// operations on it.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let region = job.region(4096).await?;
/// region.write(100, b"plain bytes")?;
/// let mut back = [0; 5];
/// region.read(106, &mut back)?;
/// assert_eq!(&back, b"bytes");
/// assert_eq!(region.key().len, 4096); // what a peer needs to reach it
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Region(Arc<RegionInner>);

struct RegionInner {
    id: u64,
    handle: Handle,
    slice: SharedSlice,
    len: u64,
    offset: u64,
    incarnation: u32,
    local: usize,
    own: Mutex<Option<Arc<OwnMemory>>>,
}

/// Memory of this rank that nobody else can reach yet, or any more.
struct OwnMemory {
    device: Arc<dyn Device>,
    own: Option<Allocation>,
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            self.device.free(own);
        }
    }
}

impl std::fmt::Debug for RegionInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("len", &self.len).finish_non_exhaustive()
    }
}

/// No entry in any table.
const NOT_LISTED: usize = usize::MAX;

impl RegionInner {
    /// With an entry in its context's table.
    async fn listed(mut self) -> Region {
        let handle = self.handle.clone();
        let posted = handle.post(move |scope: &mut Scope<'_>| {
            self.local = scope.table().local.insert(self.slice);
            tracing::debug!(me = %scope.me(), region = self.local, bytes = self.len, "region made");
            // An owner, so that it is given up if nobody waits for it any more.
            Region(Arc::new(self))
        });
        std::future::poll_fn(|cx| posted.poll(cx)).await
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        let local = self.local;
        let own = lock(&self.own).take();
        // Behind everything that was started before on this context.
        self.handle.post_run(move |scope| {
            if scope.table().local.try_remove(local).is_some() {
                tracing::debug!(me = %scope.me(), region = local, "region released");
            }
            drop(own);
        });
    }
}

/// Names a region to peers; plain data, to be sent in a message.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::RegionKey;
/// let region = job.region(64).await?;
/// // A key is plain data: all tell all, and a service can answer with it.
/// let keys: Vec<RegionKey> = job.world().all_gather(&[region.key()]).await?;
/// let next = job.rank().next(job.size());
/// let remote = job.remote_region(keys[next.index()]).await?;
/// remote.put_slice(0, b"reached").await?;
/// assert_eq!(remote.get_into(0, vec![0; 7]).await?, b"reached");
/// # job.leave().await
/// # }
/// ```
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RegionKey {
    /// First byte, as the rank names it: within its segment, or of memory that it had already.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whose memory.
    pub rank: Rank,
    /// Which incarnation of the rank has the memory.
    pub incarnation: u32,
}

impl Region {
    /// Allocates a region of `len` bytes, zeroed. It belongs to the client's first context, and so does what is
    /// recorded of it.
    ///
    /// # Errors
    /// If memory cannot be had, or no device reaches this rank itself.
    ///
    /// # Cancel safety
    /// Cancel safe: the memory goes back.
    pub async fn allocate(client: &Client, len: usize) -> Result<Region, RmaError> {
        let handle = first_context(client)?;
        let me = handle.me().rank;
        let device = client.device_for(me).ok_or(RmaError::Unreachable(me))?.clone();
        let own = device.allocate(len as u64)?;
        let offset = own.offset;
        let Some(slice) = device.map(me, offset, len as u64) else {
            device.free(own);
            return Err(RmaError::Unreachable(me));
        };
        let own = Mutex::new(Some(Arc::new(OwnMemory { device, own: Some(own) })));
        let (id, local) = (NEXT.fetch_add(1, Ordering::Relaxed), NOT_LISTED);
        let (len, incarnation) = (len as u64, client.incarnation_of(me));
        Ok(RegionInner { id, handle, slice, len, offset, incarnation, local, own }.listed().await)
    }

    /// Makes memory that the caller owns a region of its peers', as it is: a vector, a mapped file, whatever has bytes. It
    /// stays where it is and is the caller's again at once, with [`into_inner`](OwnedRegion::into_inner).
    ///
    /// Peers cannot reach it directly: their operations on it are messages, which this rank carries out,
    /// on every device. Memory to be reached at its full speed is [allocated](Self::allocate).
    ///
    /// # Errors
    /// If the client has no context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region_from(vec![0_u8; 1000])?;
    /// // A peer that was told the key:
    /// let remote = job.remote_region(region.key()).await?;
    /// remote.put_slice(500, "put into the owner's vector").await?;
    /// assert_eq!(remote.words::<u64>().fetch_add(job.rank(), 8, 7).await?, 0);
    /// // The owner has it back.
    /// let vector: Vec<u8> = region.into_inner();
    /// assert_eq!((&vector[500..503], vector[8]), (&b"put"[..], 7));
    /// assert!(remote.get_to(0, &mut [0]).await.is_err(), "it is no region any more");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn from_owned<T>(client: &Client, memory: T) -> Result<OwnedRegion<T>, RmaError>
    where
        T: AsMut<[u8]> + Send + 'static,
    {
        let me = first_context(client)?.me().rank;
        let (exposed, incarnation) = (client.expose(memory), client.incarnation_of(me));
        tracing::debug!(%me, bytes = exposed.len(), "region made of owned memory");
        Ok(OwnedRegion { exposed, rank: me, incarnation })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// The same memory for what another context of the client records of it. It is freed with the last of both.
    ///
    /// # Errors
    /// [`RmaError::OtherClient`] for a context of another client.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn through(&self, handle: &Handle) -> Result<Region, RmaError> {
        let RegionInner { id, slice, len, offset, incarnation, .. } = *self.0;
        if !handle.is_kin_of(&self.0.handle) {
            return Err(RmaError::OtherClient);
        }
        let own = Mutex::new(lock(&self.0.own).clone());
        let (handle, local) = (handle.clone(), NOT_LISTED);
        Ok(RegionInner { id, handle, slice, len, offset, incarnation, local, own }.listed().await)
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What peers need to reach it.
    #[must_use]
    pub fn key(&self) -> RegionKey {
        let RegionInner { offset, len, incarnation, .. } = *self.0;
        RegionKey { rank: self.0.handle.me().rank, offset, len, incarnation }
    }

    /// A part of it, by its bytes, for recorded operations. Whether it is one, and inside, they check.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (source, window) = (job.region(100).await?, job.shmalloc::<u8>(8).await?);
    /// source.write(90, b"the tail")?;
    /// let tail = source.slice(90..98);
    /// let pattern = job.record(|recorder| recorder.put(&window, job.rank(), 0, tail)).await?;
    /// pattern.replay().await?;
    /// assert_eq!(window.to_vec(), b"the tail");
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn slice(&self, bytes: Range<usize>) -> RegionSlice {
        RegionSlice { region: self.clone(), first: bytes.start as u64, end: bytes.end as u64 }
    }

    pub(crate) fn local_key(&self) -> usize {
        self.0.local
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0.handle
    }

    fn check(&self, first: u64, len: u64) -> Result<(), RmaError> {
        if first <= self.0.len && len <= self.0.len - first {
            return Ok(());
        }
        let rank = self.0.handle.me().rank;
        Err(RmaError::OutOfRange { rank, offset: first, count: len, len: self.0.len })
    }

    /// Copies bytes in, at an offset in bytes.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), RmaError> {
        self.check(offset as u64, bytes.len() as u64)?;
        if let Some(slice) = self.0.slice.slice(offset as u64, bytes.len() as u64) {
            slice.write(bytes);
        }
        Ok(())
    }

    /// Copies bytes out, from an offset in bytes.
    ///
    /// # Errors
    /// If it is out of range.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), RmaError> {
        self.check(offset as u64, into.len() as u64)?;
        if let Some(slice) = self.0.slice.slice(offset as u64, into.len() as u64) {
            slice.read(into);
        }
        Ok(())
    }

    /// Waits until the word at that offset in bytes satisfies a condition, such as `|value| value >= 5`, advancing the context
    /// meanwhile, and gives the value that does. What its writer wrote before is seen then. Puts, signals and atomic operations of
    /// peers wake it; what this rank [writes](Self::write) itself is seen some milliseconds later at most.
    ///
    /// # Errors
    /// If there is no such word, or the job is left.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(64).await?;
    /// let remote = job.remote_region(region.key()).await?; // as a peer opens it
    /// let words = remote.words::<u32>();
    /// let (waited, added) = tokio::join!(region.wait_until(8, |value: u32| value != 0), words.add(job.rank(), 8, 7));
    /// added?;
    /// assert_eq!(waited?, 7);
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn wait_until<W: Word>(
        &self,
        offset: usize,
        condition: impl FnMut(W) -> bool,
    ) -> Result<W, RmaError> {
        self.wait_until_on(&self.0.handle, offset, condition).await
    }

    /// As [`wait_until`](Self::wait_until), by a face of any context of the client: whoever owns one waits so.
    ///
    /// # Errors
    /// As for `wait_until`.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn wait_until_on<W: Word, F: Face>(
        &self,
        face: &F,
        offset: usize,
        condition: impl FnMut(W) -> bool,
    ) -> Result<W, RmaError> {
        let (offset, len, rank) = (offset as u64, W::LEN.bytes(), self.0.handle.me().rank);
        self.check(offset, len)?;
        match self.0.slice.slice(offset, len).filter(|slice| slice.is_word(W::LEN)) {
            Some(slice) => own::wait_until(face, &self.0.handle, slice, || None, condition).await,
            None => Err(RmaError::Misaligned { rank, offset, len }),
        }
    }
}

/// A region that is memory of its owner's: see [`Region::from_owned`]. Dropped, it is no region any more, and the memory is
/// dropped with it.
///
/// # Order
/// What a rank does with such a region takes effect in program order, and so do its sends to the region's owner and what it
/// does to that one's windows and other regions through the same context, but for replays through a [FIFO](crate::Fifo) of their
/// own. As the owner itself carries it out, what is done to mapped memory behind it waits until it has: meanwhile no put, get or
/// atomic operation there is done at once.
///
/// No pattern is recorded of such a region ([`RmaError::Unreachable`]): a replay sends no messages for it.
#[derive(Debug)]
pub struct OwnedRegion<T> {
    exposed: ExposedMemory<T>,
    rank: Rank,
    incarnation: u32,
}

impl<T> OwnedRegion<T> {
    /// What peers need to reach it.
    #[must_use]
    pub fn key(&self) -> RegionKey {
        let OwnedRegion { exposed, rank, incarnation } = self;
        RegionKey { rank: *rank, offset: exposed.place(), len: exposed.len(), incarnation: *incarnation }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.exposed.len()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.exposed.is_empty()
    }

    /// Works on the memory: between two operations of peers, never amid one. They wait meanwhile, and whoever is at the
    /// context with them, so this is not the place for long work, nor for anything that advances a context of the client, or
    /// for a `with` within a `with`, which would wait for itself.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region_from([1_u8; 4])?;
    /// region.with(|bytes| bytes[3] = 9);
    /// let remote = job.remote_region(region.key()).await?;
    /// assert_eq!(remote.get_into(0, vec![0; 4]).await?, [1, 1, 1, 9]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        self.exposed.with(work)
    }

    /// Gives the memory back at once. Operations of peers that come later fail with
    /// [`NoSuchMemory`](posthaste_core::Fault::NoSuchMemory), whatever has the memory by then.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.exposed.into_inner()
    }
}

/// A part of a region: what a recorded operation reads or fills at each replay. All of a region converts into it.
#[derive(Clone, Debug)]
pub struct RegionSlice {
    region: Region,
    first: u64,
    /// As it was given: it may lie before the first byte.
    end: u64,
}

impl RegionSlice {
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Of a slice that was checked.
    pub(crate) fn len(&self) -> u64 {
        self.end.saturating_sub(self.first)
    }

    pub(crate) fn check(&self) -> Result<(), RmaError> {
        let RegionSlice { first, end, .. } = *self;
        let len = end.checked_sub(first).ok_or(RmaError::Backwards { first, end })?;
        self.region.check(first, len)
    }
}

impl From<&Region> for RegionSlice {
    fn from(region: &Region) -> Self {
        Self { region: region.clone(), first: 0, end: region.len() }
    }
}

/// A region of a peer.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let region = job.region(64).await?;
/// let key = region.key(); // plain data, told to a peer in a message
/// let remote = job.remote_region(key).await?;
/// remote.put_slice(8, "written by a peer").await?;
/// assert_eq!(remote.get_into(8, vec![0; 7]).await?, b"written");
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(super) memory: Arc<Memory>,
}

impl RemoteRegion {
    /// A peer's region by the key that the peer told. The peer is asked nothing. What is done with the region goes
    /// through the client's first context.
    ///
    /// # Errors
    /// If the rank is unknown; where its memory is mapped here, [`Fault::NoSuchMemory`] if the range is outside what it shares,
    /// which is told by the operations on the region elsewhere; [`Fault::StaleHandle`] if the rank was started again since, and
    /// [`Fault::PeerLost`] if this rank has yet to hear of the incarnation that told the key; [`RmaError::OtherClient`] for
    /// the layout access of another client.
    ///
    /// # Cancel safety
    /// Cancel safe: nobody is told anything.
    pub async fn open(
        client: &Client,
        layouts: &LayoutAccess,
        key: RegionKey,
    ) -> Result<RemoteRegion, RmaError> {
        let (rank, size) = (key.rank, client.peers().ranks);
        if rank.0 >= size {
            return Err(RmaError::UnknownRank { rank, size });
        }
        if layouts.client() != client.id() {
            return Err(RmaError::OtherClient);
        }
        let handle = first_context(client)?;
        let device = client.device_for(rank).ok_or(RmaError::Unreachable(rank))?.clone();
        let (held, now) = (key.incarnation, client.incarnation_of(rank));
        if held != now {
            let stale = Fault::StaleHandle { rank, held, now };
            return Err(if held < now { stale } else { Fault::PeerLost(rank) }.into());
        }
        let nowhere = RmaError::Fault(Fault::NoSuchMemory(rank));
        if key.offset.checked_add(key.len).is_none() {
            return Err(nowhere);
        }
        // Nobody but its owner reaches exposed memory, or knows what of it is there.
        let exposed = is_exposed(key.offset);
        let mapped = if exposed { None } else { device.map(rank, key.offset, key.len) };
        if device.caps().mappable && mapped.is_none() && !exposed {
            return Err(nowhere);
        }
        let remote = RemoteMemory { rank, offset: key.offset, len: key.len, mapped, incarnation: held };
        let made = Made {
            id: WindowId(NEXT.fetch_add(1, Ordering::Relaxed) as u32),
            handle,
            gates: client.gates().clone(),
            device,
            layouts: *layouts,
            size,
            own: NO_OWN_PART,
        };
        Ok(RemoteRegion { memory: made.with(vec![remote]).await })
    }

    /// The same region through another context of the client, as [`Window::through`](crate::Window::through) has it.
    ///
    /// # Errors
    /// [`RmaError::OtherClient`] for a context of another client.
    ///
    /// # Cancel safety
    /// As for [`open`](Self::open).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo_with(1, 2).await?; // one client of two contexts
    /// use posthaste::ContextId;
    /// let region = job.region(64).await?;
    /// let second = job.context_handle(ContextId(1)).expect("there are two");
    /// let beside = job.remote_region(region.key()).await?.through(second).await?;
    /// beside.put_slice(0, b"by another way").await?;
    /// let mut word = [0; 2];
    /// region.read(0, &mut word)?;
    /// assert_eq!(&word, b"by");
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn through(&self, handle: &Handle) -> Result<RemoteRegion, RmaError> {
        Ok(RemoteRegion { memory: self.memory.through(handle).await? })
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Whose memory it is.
    #[must_use]
    pub fn owner(&self) -> Rank {
        self.memory.parts[0].rank
    }

    /// Puts bytes at an offset in bytes and then shows on a word of the same rank, of this region, another one of its or a window of
    /// the job, that they are there, as [`Window::put_signal`](crate::Window::put_signal) does.
    ///
    /// # Cancel safety
    /// See [`Window::put_signal`](crate::Window::put_signal).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(64).await?;
    /// let remote = job.remote_region(region.key()).await?; // as a peer opens it
    /// let signal = remote.words::<u64>().signal_add(0, 5);
    /// let put = remote.put_signal(8, b"bytes", signal);
    /// let (come, put) = tokio::join!(region.wait_until(0, |bytes: u64| bytes > 0), put);
    /// put?;
    /// assert_eq!(come?, 5);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn put_signal<'w, 's>(
        &'w self,
        offset: usize,
        bytes: &'s (impl AsRef<[u8]> + ?Sized),
        signal: Signal<'w>,
    ) -> PutSignal<'w, 's> {
        PutSignal::new(self.owner(), self.put_slice(offset, bytes), signal)
    }

    /// Puts bytes at an offset in bytes, as [`Window::put_slice`](crate::Window::put_slice) does.
    ///
    /// # Cancel safety
    /// See [`Put`].
    #[inline]
    pub fn put_slice<'w, 's>(
        &'w self,
        offset: usize,
        bytes: &'s (impl AsRef<[u8]> + ?Sized),
    ) -> PutSlice<'w, 's> {
        PutSlice::new(&self.memory, 0, self.memory.parts[0].rank, offset as u64, bytes.as_ref())
    }

    /// Puts an owned payload at an offset in bytes, without a copy of it on the way, but of a loan where the memory is not
    /// mapped.
    ///
    /// # Cancel safety
    /// See [`Put`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(100_000).await?;
    /// let remote = job.remote_region(region.key()).await?;
    /// remote.put_bytes(0, vec![3; 100_000]).await?;
    /// let mut last = [0];
    /// region.read(99_999, &mut last)?;
    /// assert_eq!(last, [3]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn put_bytes(&self, offset: usize, payload: impl Into<Buffer>) -> Put<'_> {
        let rank = self.memory.parts[0].rank;
        Put::new(&self.memory, 0, rank, offset as u64, payload.into())
    }

    /// Fills a slice from an offset in bytes, as [`Window::get_to`](crate::Window::get_to) does.
    ///
    /// # Cancel safety
    /// Cancel safe: a get changes nothing at the target, and until it is ready nothing in the slice.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(64).await?;
    /// region.write(10, b"ten")?;
    /// let remote = job.remote_region(region.key()).await?;
    /// let mut word = [0; 3];
    /// remote.get_to(10, &mut word).await?;
    /// assert_eq!(&word, b"ten");
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn get_to<'w, 's>(&'w self, offset: usize, into: &'s mut [u8]) -> GetTo<'w, 's, u8> {
        let rank = self.memory.parts[0].rank;
        GetTo { memory: &self.memory, part: 0, rank, offset: offset as u64, into, way: Way::Fresh }
    }

    /// Fills a buffer from an offset in bytes and gives it back. Where the memory is not mapped, a long get gives the
    /// memory that came instead of copying it.
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    pub fn get_into(&self, offset: usize, buffer: Vec<u8>) -> GetInto<'_, u8> {
        let rank = self.memory.parts[0].rank;
        GetInto { fetch: Fetch::new(&self.memory, 0, rank, offset as u64), buffer: Some(buffer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::client_of;
    use futures::executor::block_on;
    use posthaste_core::{ClientId, JobShape};

    #[test]
    fn error_the_layout_access_of_another_client_is_refused() {
        let shape = JobShape { ranks: 1, clients: 2, contexts: 1 };
        let (first, second) = (client_of(shape, ClientId(0)), client_of(shape, ClientId(1)));
        let layouts = LayoutAccess::new(&first).expect("the first");
        let incarnation = second.incarnation_of(Rank(0));
        let key = RegionKey { rank: Rank(0), offset: 0, len: 8, incarnation };
        let opened = block_on(RemoteRegion::open(&second, &layouts, key));
        assert!(matches!(opened, Err(RmaError::OtherClient)), "{opened:?}");
    }
}
