//! Memory that peers write and read: windows of all ranks, and regions of one.

use crate::buffer::{Buffer, Kind};
use crate::exchange::Exchange;
use crate::operation::Pending;
use bytes::Bytes;
use posthaste_core::context::{Face, Posted};
use posthaste_core::device::{Allocation, RemoteMemory};
use posthaste_core::engine::{Gates, Payload, Rma};
use posthaste_core::memory::SharedSlice;
use posthaste_core::sync::lock;
use posthaste_core::{
    Client, Device, Endpoint, Fault, Handle, MemoryError, Messager, Rank, RmaError, Scope, SendError,
    WindowId,
};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use tokio::task::coop::poll_proceed;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a typed window holds: plain old data of any bit pattern.
pub trait Element: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static> Element for T {}

/// One rank's part of a window, or a region: where it is and how it is reached.
#[derive(Debug)]
pub(crate) struct Part {
    pub rank: Rank,
    pub mapped: Option<SharedSlice>,
    pub len: u64,
    /// Key in the context's table of remote memory.
    pub remote: usize,
}

/// What windows and regions have in common.
pub(crate) struct Memory {
    pub id: WindowId,
    pub handle: Handle,
    pub gates: posthaste_core::sync::Arc<Gates>,
    pub parts: Box<[Part]>,
    /// Cleared when it is freed.
    pub alive: AtomicBool,
    pub size: u32,
    device: Arc<dyn Device>,
    own: Mutex<Option<Allocation>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("id", &self.id)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}

impl Memory {
    /// The part of a rank, if the access lies within it.
    #[inline]
    fn check(&self, part: usize, rank: Rank, offset: u64, count: u64) -> Result<&Part, RmaError> {
        if !self.alive.load(Ordering::Relaxed) {
            return Err(RmaError::NoSuchWindow(self.id));
        }
        let Some(part) = self.parts.get(part) else {
            return Err(RmaError::UnknownRank { rank, size: self.size });
        };
        if offset <= part.len && count <= part.len - offset {
            Ok(part)
        } else {
            Err(RmaError::OutOfRange { rank, offset, count, len: part.len })
        }
    }

    /// The mapped bytes of an access, if it may go ahead inline: one load each for "alive" and "nothing precedes".
    #[inline]
    fn target(&self, rank: Rank, offset: u64, count: u64) -> Option<SharedSlice> {
        let part = self.parts.get(rank.index())?;
        if !self.alive.load(Ordering::Relaxed) || !self.gates.is_open(part.rank) {
            return None;
        }
        part.mapped?.slice(offset, count)
    }

    /// The mapped bytes of an access that may go ahead inline.
    #[inline]
    fn inline(&self, part: &Part, offset: u64, count: u64) -> Option<SharedSlice> {
        if self.gates.is_open(part.rank) { part.mapped?.slice(offset, count) } else { None }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let keys: Vec<usize> = self.parts.iter().map(|part| part.remote).collect();
        self.handle.post_run(move |scope| {
            for key in keys {
                scope.table().remote.try_remove(key);
            }
        });
    }
}

/// A window over all ranks of the job: each rank's part has a length of its own, 0 allowed (access only). Offsets are
/// in elements of `T`; [`byte`](Window::bytes) views count bytes. Cheap to clone.
///
/// Its atomicity (W02) is 8 bytes at multiples of 8: concurrent puts and gets keep such words whole.
pub struct Window<T = u8> {
    memory: Arc<Memory>,
    exchange: Exchange,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        Self { memory: self.memory.clone(), exchange: self.exchange.clone(), element: PhantomData }
    }
}

impl<T> std::fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("memory", &self.memory).finish_non_exhaustive()
    }
}

static NEXT_REGION: AtomicU64 = AtomicU64::new(0);

/// Adds remote memory to the context's table; returns the keys.
async fn add_remote(handle: &Handle, memory: Vec<RemoteMemory>) -> Vec<usize> {
    let posted = handle.post(move |scope: &mut Scope<'_>| {
        memory.into_iter().map(|memory| scope.table().remote.insert(memory)).collect()
    });
    std::future::poll_fn(|cx| posted.poll(cx)).await
}

impl<T: Element> Window<T> {
    /// Makes a window (W01): collective, every rank names its own length in elements. The memory is zero.
    ///
    /// # Errors
    /// If memory cannot be had here (the other ranks then get [`Fault::OutOfMemory`]), or a rank is lost.
    ///
    /// # Cancel safety
    /// Not cancel safe: the other ranks wait until this one leaves.
    pub async fn allocate(client: &Client, exchange: &Exchange, len: usize) -> Result<Window<T>, RmaError> {
        let handle = exchange_handle(client)?;
        let me = handle.me().rank;
        let device = client.device_for(me).ok_or(RmaError::Unreachable(me))?.clone();
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        let own = match bytes {
            Some(0) => Ok(Allocation { offset: 0, len: 0 }),
            Some(bytes) => device.allocate(bytes),
            None => Err(MemoryError::Segment { wanted: u64::MAX, segment: 0 }),
        };
        let mut blob = [0u8; 16];
        if let Ok(own) = &own {
            blob[..8].copy_from_slice(&own.offset.to_le_bytes());
            blob[8..].copy_from_slice(&bytes.unwrap_or(0).to_le_bytes());
        } else {
            blob = [0xff; 16];
        }
        let gathered = exchange.all_gather(&blob).await.map_err(send_to_rma);
        let own = own?;
        let gathered = match gathered {
            Ok(gathered) if gathered.iter().all(|blob| **blob != [0xff; 16]) => gathered,
            failed => {
                // No rank has a window, so none can reach the memory.
                if own.len > 0 {
                    device.free(own);
                }
                failed?;
                return Err(
                    Fault::OutOfMemory("another rank could not allocate its part of the window").into()
                );
            }
        };
        let word =
            |blob: &Bytes, at: usize| u64::from_le_bytes(blob[at..at + 8].try_into().unwrap_or_default());
        let remotes: Vec<RemoteMemory> = gathered
            .iter()
            .enumerate()
            .map(|(rank, blob)| {
                let (rank, offset, len) = (Rank(rank as u32), word(blob, 0), word(blob, 8));
                RemoteMemory { rank, offset, len, mapped: device.map(rank, offset, len) }
            })
            .collect();
        let keys = add_remote(&handle, remotes.clone()).await;
        let parts = remotes
            .iter()
            .zip(keys)
            .map(|(remote, key)| Part {
                rank: remote.rank,
                mapped: remote.mapped,
                len: remote.len,
                remote: key,
            })
            .collect();
        let memory = Memory {
            id: WindowId(NEXT_REGION.fetch_add(1, Ordering::Relaxed) as u32),
            gates: client.gates().clone(),
            parts,
            alive: AtomicBool::new(true),
            size: client.peers().ranks,
            device,
            own: Mutex::new((own.len > 0).then_some(own)),
            handle,
        };
        Ok(Window { memory: Arc::new(memory), exchange: exchange.clone(), element: PhantomData })
    }

    /// Elements in a rank's part; 0 for an unknown rank.
    #[must_use]
    pub fn len(&self, rank: Rank) -> usize {
        self.memory.parts.get(rank.index()).map_or(0, |part| (part.len / size_of::<T>() as u64) as usize)
    }

    /// Whether no rank has a part.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.parts.iter().all(|part| part.len == 0)
    }

    /// Smallest unit, in bytes, that concurrent puts and gets keep whole, at multiples of itself (W02).
    #[must_use]
    pub fn atomicity(&self) -> usize {
        self.memory.device.caps().atomicity
    }

    /// The same window with offsets in bytes.
    #[must_use]
    pub fn bytes(&self) -> Window<u8> {
        Window { memory: self.memory.clone(), exchange: self.exchange.clone(), element: PhantomData }
    }

    #[inline]
    fn offset(index: usize) -> u64 {
        // Saturates: an absurd index is out of range, not wrapped around into it.
        (index as u64).saturating_mul(size_of::<T>() as u64)
    }

    /// Puts one element. Awaiting it means that it is at the target; [`Put::local`] is the earlier stage.
    ///
    /// # Cancel safety
    /// See [`Put`].
    #[inline]
    pub fn put(&self, rank: Rank, index: usize, value: T) -> PutElement<'_, T> {
        PutElement { memory: &self.memory, rank, offset: Self::offset(index), value, slow: None }
    }

    /// Puts consecutive elements.
    ///
    /// # Cancel safety
    /// See [`Put`].
    pub fn put_slice(&self, rank: Rank, index: usize, values: &[T]) -> Put<'_> {
        Put::new(&self.memory, rank.index(), rank, Self::offset(index), Buffer::copy(values.as_bytes()))
    }

    /// Puts owned bytes at an element's place, without a copy of them on the way.
    ///
    /// # Cancel safety
    /// See [`Put`].
    pub fn put_bytes(&self, rank: Rank, index: usize, bytes: Bytes) -> Put<'_> {
        Put::new(&self.memory, rank.index(), rank, Self::offset(index), bytes.into())
    }

    /// Gets one element.
    ///
    /// # Cancel safety
    /// Cancel safe: a get changes nothing at the target.
    #[inline]
    pub fn get(&self, rank: Rank, index: usize) -> Get<'_, T> {
        Get { memory: &self.memory, rank, offset: Self::offset(index), slow: None, element: PhantomData }
    }

    /// Fills a buffer with consecutive elements and gives it back.
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
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

    fn own(&self) -> Option<SharedSlice> {
        self.memory.parts.get(self.memory.handle.me().rank.index())?.mapped
    }

    /// Reads an element of this rank's own part; `None` if there is none, or the window was freed.
    #[inline]
    #[must_use]
    pub fn load(&self, index: usize) -> Option<T> {
        if !self.memory.alive.load(Ordering::Relaxed) {
            return None;
        }
        let slice = self.own()?.slice(Self::offset(index), size_of::<T>() as u64)?;
        let mut value = T::new_zeroed();
        slice.read(value.as_mut_bytes());
        Some(value)
    }

    /// Writes an element of this rank's own part; false if there is none, or the window was freed.
    #[inline]
    pub fn store(&self, index: usize, value: T) -> bool {
        let alive = self.memory.alive.load(Ordering::Relaxed);
        let slice = self.own().and_then(|own| own.slice(Self::offset(index), size_of::<T>() as u64));
        match slice {
            Some(slice) if alive => {
                slice.write(value.as_bytes());
                true
            }
            _ => false,
        }
    }

    /// Copies this rank's own part.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let mut values = vec![T::new_zeroed(); self.len(self.memory.handle.me().rank)];
        if let Some(own) = self.own()
            && self.memory.alive.load(Ordering::Relaxed)
        {
            own.read(values.as_mut_bytes());
        }
        values
    }

    /// Waits until an element of this rank's own part satisfies a condition, advancing the context meanwhile.
    /// Whoever changes the element by a put does not wake this task: the wait polls, going through the scheduler.
    ///
    /// # Errors
    /// If there is no such element.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing.
    pub async fn wait_until(
        &self,
        index: usize,
        mut condition: impl FnMut(T) -> bool,
    ) -> Result<T, RmaError> {
        let me = self.memory.handle.me().rank;
        loop {
            for _ in 0..4096 {
                let Some(value) = self.load(index) else {
                    let len = self.memory.parts[me.index()].len;
                    let (offset, count) = (Self::offset(index), size_of::<T>() as u64);
                    return Err(RmaError::OutOfRange { rank: me, offset, count, len });
                };
                if condition(value) {
                    return Ok(value);
                }
                std::hint::spin_loop();
            }
            self.memory.handle.advance();
            tokio::task::yield_now().await;
        }
    }

    /// Records a put of a whole region to elements of a rank's part.
    ///
    /// # Errors
    /// If the access is out of range.
    pub fn record_put(
        &self,
        recorder: &mut crate::pattern::Recorder,
        rank: Rank,
        index: usize,
        source: &Region,
    ) -> Result<(), RmaError> {
        self.record_put_from(recorder, rank, index, source, 0, source.len())
    }

    /// Records a put of `len` bytes of a region, from `first` on, to elements of a rank's part.
    ///
    /// # Errors
    /// If the access is out of range.
    pub fn record_put_from(
        &self,
        recorder: &mut crate::pattern::Recorder,
        rank: Rank,
        index: usize,
        source: &Region,
        first: u64,
        len: u64,
    ) -> Result<(), RmaError> {
        let offset = Self::offset(index);
        let part = self.memory.check(rank.index(), rank, offset, len)?;
        source.check(first, len)?;
        recorder.put(&self.memory, part, offset, source, first, len);
        Ok(())
    }

    /// Frees the window: collective. Every rank ends its own operations first; the memory is reused only once every
    /// rank has come here or is proven dead (I10). From now on every operation on it is refused.
    ///
    /// # Errors
    /// If this rank is closed.
    ///
    /// # Cancel safety
    /// Not cancel safe: the other ranks wait until this one leaves; the memory stays taken.
    pub async fn free(self) -> Result<(), SendError> {
        self.memory.alive.store(false, Ordering::SeqCst);
        match crate::flush::fence(&self.memory.handle).await {
            Ok(()) => {}
            // A lost rank's operations have ended, too.
            Err(SendError::Fault(fault)) if fault.peer().is_some() => {}
            Err(error) => return Err(error),
        }
        self.exchange.released_by_all().await?;
        if let Some(own) = lock(&self.memory.own).take() {
            self.memory.device.free(own);
        }
        Ok(())
    }
}

fn exchange_handle(client: &Client) -> Result<Handle, RmaError> {
    client.contexts().first().cloned().ok_or(RmaError::Fault(Fault::Shutdown))
}

fn send_to_rma(error: SendError) -> RmaError {
    match error {
        SendError::Fault(fault) => RmaError::Fault(fault),
        SendError::UnknownRank { rank, size } => RmaError::UnknownRank { rank, size },
        _ => RmaError::Fault(Fault::Shutdown),
    }
}

enum Stage {
    Start,
    Posted(Posted<Result<Option<Pending>, RmaError>>),
    Pending(Pending),
    Done,
}

/// A put of one element. Ready when it is at the target.
///
/// # Cancel safety
/// As for [`Put`].
#[must_use = "a put does nothing until it is awaited"]
pub struct PutElement<'w, T> {
    memory: &'w Arc<Memory>,
    rank: Rank,
    offset: u64,
    value: T,
    /// Made when the put cannot be done at once.
    slow: Option<Box<Put<'w>>>,
}

impl<T> Unpin for PutElement<'_, T> {}

impl<T> std::fmt::Debug for PutElement<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutElement")
            .field("rank", &self.rank)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl<'w, T: Element> PutElement<'w, T> {
    /// The earlier stage: ready when the source is reusable, with the future of the later one.
    ///
    /// # Errors
    /// If the put is refused or fails.
    ///
    /// # Cancel safety
    /// As for the put itself.
    pub async fn local(self) -> Result<Put<'w>, RmaError> {
        match self.slow {
            Some(put) => put.local().await,
            None => self.general().local().await,
        }
    }

    #[cold]
    fn general(&self) -> Put<'w> {
        Put::new(self.memory, self.rank.index(), self.rank, self.offset, Buffer::copy(self.value.as_bytes()))
    }

    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if self.slow.is_none() {
            self.slow = Some(Box::new(self.general()));
        }
        match &mut self.slow {
            Some(put) => Pin::new(&mut **put).poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<T: Element> Future for PutElement<'_, T> {
    type Output = Result<(), RmaError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.slow.is_none() {
            let coop = ready!(poll_proceed(cx));
            if let Some(target) = self.memory.target(self.rank, self.offset, size_of::<T>() as u64) {
                target.write(self.value.as_bytes());
                coop.made_progress();
                return Poll::Ready(Ok(()));
            }
        }
        self.poll_slowly(cx)
    }
}

/// A put. Ready when the data is at the target.
///
/// # Cancel safety
/// Dropped before it was polled, nothing is put. Dropped later, the put goes on; its payload is kept until then.
#[must_use = "a put does nothing until it is awaited"]
pub struct Put<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
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
    fn new(memory: &'w Arc<Memory>, part: usize, rank: Rank, offset: u64, payload: Buffer) -> Self {
        Self { memory, part, rank, offset, payload: Some(payload), stage: Stage::Start }
    }

    /// The earlier stage: ready when the source is reusable, with the future of the later one.
    ///
    /// # Errors
    /// If the put is refused or fails.
    ///
    /// # Cancel safety
    /// As for the put itself.
    pub async fn local(mut self) -> Result<Put<'w>, RmaError> {
        std::future::poll_fn(|cx| {
            // Every device and the queue own the payload as soon as the put is started.
            ready!(self.start(cx)?);
            Poll::Ready(Ok::<(), RmaError>(()))
        })
        .await?;
        Ok(self)
    }

    /// Starts the put; ready once it is started.
    #[inline]
    fn start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RmaError>> {
        if let Stage::Start = self.stage {
            let coop = ready!(poll_proceed(cx));
            let len = self.payload.as_ref().map_or(0, Buffer::len) as u64;
            let part = self.memory.check(self.part, self.rank, self.offset, len)?;
            if let Some(target) = self.memory.inline(part, self.offset, len) {
                match self.payload.take().map(|buffer| buffer.0) {
                    Some(Kind::Inline { len, bytes }) => target.write(&bytes[..len as usize]),
                    Some(Kind::Bytes(bytes)) => target.write(&bytes),
                    Some(Kind::Loan(loan)) => target.copy_from(loan.memory),
                    None => {}
                }
                coop.made_progress();
                self.stage = Stage::Done;
                return Poll::Ready(Ok(()));
            }
            self.start_slowly(part.remote, part.rank);
        }
        if let Stage::Posted(posted) = &self.stage {
            self.stage = match ready!(posted.poll(cx))? {
                None => Stage::Done,
                Some(pending) => Stage::Pending(pending),
            };
        }
        Poll::Ready(Ok(()))
    }

    #[cold]
    fn start_slowly(&mut self, remote: usize, rank: Rank) {
        let handle = self.memory.handle.clone();
        let target = Endpoint::new(rank, handle.me().context);
        let payload = self.payload.take().map_or_else(Bytes::new, Buffer::into_bytes);
        let offset = self.offset;
        let owner = handle.clone();
        self.stage = Stage::Posted(handle.post(move |scope: &mut Scope<'_>| {
            let started = scope.rma(target, remote, offset, Rma::Put(Payload::Owned(payload)))?;
            Ok(started.map(|ticket| Pending::new(owner, ticket, None, None)))
        }));
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

/// The common part of gets: bytes from a part into a buffer.
struct Fetch<'w> {
    memory: &'w Arc<Memory>,
    part: usize,
    rank: Rank,
    offset: u64,
    count: u64,
    stage: Stage,
}

impl<'w> Fetch<'w> {
    #[inline]
    fn new(memory: &'w Arc<Memory>, part: usize, rank: Rank, offset: u64) -> Self {
        Self { memory, part, rank, offset, count: 0, stage: Stage::Start }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<(), RmaError>> {
        if let Stage::Start = self.stage {
            let coop = ready!(poll_proceed(cx));
            let count = into.len() as u64;
            let part = self.memory.check(self.part, self.rank, self.offset, count)?;
            if let Some(source) = self.memory.inline(part, self.offset, count) {
                source.read(into);
                coop.made_progress();
                return Poll::Ready(Ok(()));
            }
            self.start_slowly(part.remote, part.rank, count);
        }
        self.go_on(cx, into)
    }

    #[cold]
    fn start_slowly(&mut self, remote: usize, rank: Rank, count: u64) {
        let handle = self.memory.handle.clone();
        let target = Endpoint::new(rank, handle.me().context);
        let offset = self.offset;
        let owner = handle.clone();
        self.stage = Stage::Posted(handle.post(move |scope: &mut Scope<'_>| {
            let started = scope.rma(target, remote, offset, Rma::Get(count))?;
            Ok(started.map(|ticket| Pending::new(owner, ticket, None, None)))
        }));
    }

    #[cold]
    fn go_on(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<(), RmaError>> {
        if let Stage::Posted(posted) = &self.stage {
            match ready!(posted.poll(cx))? {
                None => return Poll::Ready(Err(Fault::Shutdown.into())),
                Some(pending) => self.stage = Stage::Pending(pending),
            }
        }
        let Stage::Pending(pending) = &mut self.stage else {
            return Poll::Ready(Err(Fault::Shutdown.into()));
        };
        let value = ready!(pending.poll(&self.memory.handle, cx))?;
        let bytes = value.as_bytes();
        if bytes.len() != into.len() {
            return Poll::Ready(Err(Fault::PeerCorrupt(self.rank).into()));
        }
        into.copy_from_slice(bytes);
        Poll::Ready(Ok(()))
    }
}

/// A get of one element.
///
/// # Cancel safety
/// Cancel safe: a get changes nothing at the target.
#[must_use = "a get does nothing until it is awaited"]
pub struct Get<'w, T> {
    memory: &'w Arc<Memory>,
    rank: Rank,
    offset: u64,
    /// Made when the get cannot be done at once.
    slow: Option<Box<Fetch<'w>>>,
    element: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Get<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Get").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl<T: Element> Get<'_, T> {
    #[cold]
    fn poll_slowly(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<(), RmaError>> {
        let (memory, rank, offset) = (self.memory, self.rank, self.offset);
        let fetch = self.slow.get_or_insert_with(|| Box::new(Fetch::new(memory, rank.index(), rank, offset)));
        fetch.poll(cx, into)
    }
}

impl<T: Element> Future for Get<'_, T> {
    type Output = Result<T, RmaError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut value = T::new_zeroed();
        if self.slow.is_none() {
            let coop = ready!(poll_proceed(cx));
            if let Some(source) = self.memory.target(self.rank, self.offset, size_of::<T>() as u64) {
                source.read(value.as_mut_bytes());
                coop.made_progress();
                return Poll::Ready(Ok(value));
            }
        }
        ready!(self.poll_slowly(cx, value.as_mut_bytes())?);
        Poll::Ready(Ok(value))
    }
}

/// A get of consecutive elements into a buffer.
///
/// # Cancel safety
/// Cancel safe; the buffer is dropped with the future.
#[must_use = "a get does nothing until it is awaited"]
pub struct GetInto<'w, T> {
    fetch: Fetch<'w>,
    buffer: Option<Vec<T>>,
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
        match this.fetch.poll(cx, buffer.as_mut_slice().as_mut_bytes()) {
            Poll::Ready(result) => Poll::Ready(result.map(|()| buffer)),
            Poll::Pending => {
                this.buffer = Some(buffer);
                Poll::Pending
            }
        }
    }
}

/// A region: memory of this rank that recorded operations read and that peers reach once they are told its
/// [`RegionKey`] (D12). Cheap to clone; freed with its last clone, which must not be before peers have ended their
/// operations on it.
#[derive(Clone, Debug)]
pub struct Region(Arc<RegionInner>);

struct RegionInner {
    id: u64,
    handle: Handle,
    slice: SharedSlice,
    len: u64,
    offset: u64,
    local: usize,
    device: Arc<dyn Device>,
    own: Mutex<Option<Allocation>>,
}

impl std::fmt::Debug for RegionInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        let local = self.local;
        let (device, own) = (self.device.clone(), lock(&self.own).take());
        // Behind everything that was started before on this context.
        self.handle.post_run(move |scope| {
            scope.table().local.try_remove(local);
            if let Some(own) = own {
                device.free(own);
            }
        });
    }
}

/// Names a region to peers; plain data, to be sent in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RegionKey {
    /// Whose memory.
    pub rank: u32,
    /// First byte within the rank's segment.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Region {
    /// Allocates a region of `len` bytes, zeroed.
    ///
    /// # Errors
    /// If memory cannot be had.
    pub async fn allocate(client: &Client, len: usize) -> Result<Region, RmaError> {
        let handle = exchange_handle(client)?;
        let me = handle.me().rank;
        let device = client.device_for(me).ok_or(RmaError::Unreachable(me))?.clone();
        let own = device.allocate(len as u64)?;
        let offset = own.offset;
        let Some(slice) = device.map(me, offset, len as u64) else {
            device.free(own);
            return Err(RmaError::Unreachable(me));
        };
        let posted = handle.post(move |scope: &mut Scope<'_>| scope.table().local.insert(slice));
        let local = std::future::poll_fn(|cx| posted.poll(cx)).await;
        let id = NEXT_REGION.fetch_add(1, Ordering::Relaxed);
        let own = Mutex::new(Some(own));
        Ok(Region(Arc::new(RegionInner { id, handle, slice, len: len as u64, offset, local, device, own })))
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What peers need to reach it.
    #[must_use]
    pub fn key(&self) -> RegionKey {
        RegionKey { rank: self.0.handle.me().rank.0, offset: self.0.offset, len: self.0.len }
    }

    pub(crate) fn local_key(&self) -> usize {
        self.0.local
    }

    pub(crate) fn check(&self, first: u64, len: u64) -> Result<(), RmaError> {
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
}

/// A region of a peer.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    memory: Arc<Memory>,
}

impl RemoteRegion {
    /// A peer's region by the key that the peer told.
    ///
    /// # Errors
    /// If the rank is unknown, or the range is outside what the rank shares.
    pub async fn open(client: &Client, key: RegionKey) -> Result<RemoteRegion, RmaError> {
        let (rank, size) = (Rank(key.rank), client.peers().ranks);
        if key.rank >= size {
            return Err(RmaError::UnknownRank { rank, size });
        }
        let handle = exchange_handle(client)?;
        let device = client.device_for(rank).ok_or(RmaError::Unreachable(rank))?.clone();
        let mapped = device.map(rank, key.offset, key.len);
        if device.caps().mappable && mapped.is_none() {
            return Err(RmaError::OutOfRange { rank, offset: key.offset, count: key.len, len: 0 });
        }
        let remote = RemoteMemory { rank, offset: key.offset, len: key.len, mapped };
        let keys = add_remote(&handle, vec![remote]).await;
        let parts = keys.into_iter().map(|remote| Part { rank, mapped, len: key.len, remote }).collect();
        Ok(RemoteRegion {
            memory: Arc::new(Memory {
                id: WindowId(NEXT_REGION.fetch_add(1, Ordering::Relaxed) as u32),
                gates: client.gates().clone(),
                parts,
                alive: AtomicBool::new(true),
                size,
                device,
                own: Mutex::new(None),
                handle,
            }),
        })
    }

    /// Puts bytes at an offset in bytes.
    ///
    /// # Cancel safety
    /// See [`Put`].
    pub fn put(&self, offset: usize, payload: impl Into<Buffer>) -> Put<'_> {
        let rank = self.memory.parts[0].rank;
        Put::new(&self.memory, 0, rank, offset as u64, payload.into())
    }

    /// Fills a buffer from an offset in bytes and gives it back.
    ///
    /// # Cancel safety
    /// Cancel safe; the buffer is dropped with the future.
    pub fn get_into(&self, offset: usize, buffer: Vec<u8>) -> GetInto<'_, u8> {
        let rank = self.memory.parts[0].rank;
        GetInto { fetch: Fetch::new(&self.memory, 0, rank, offset as u64), buffer: Some(buffer) }
    }
}
