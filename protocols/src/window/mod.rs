//! Memory that peers write and read: windows of all ranks, and regions of one.

mod atomic;
mod each;
mod get;
mod group;
mod own;
mod put;
mod region;
mod signal;
mod typed;

pub use atomic::{AtomicFetch, AtomicUpdate, Word, Words};
pub use each::{FetchEach, UpdateEach, WordIndex, WordUpdate};
pub use get::{Get, GetInto, GetTo};
pub(crate) use group::WindowHome;
pub use put::{One, Put, PutCopy, PutElement, PutSlice};
pub use region::{Region, RegionKey, RegionSlice, RemoteRegion};
pub use signal::{PutSignal, Signal};
pub use typed::{GetTyped, PutTyped};

use crate::datatype::LayoutAccess;
use crate::exchange::{Exchange, PART_BYTES};
use crate::operation::{Pending, Way};
use bytes::Bytes;
use get::Fetch;
use group::GroupOrigin;
use posthaste_core::context::{Face, Posted};
use posthaste_core::device::{Allocation, RemoteMemory, Rouse};
use posthaste_core::engine::{Gates, PatternError};
use posthaste_core::memory::{SharedSlice, SharedWords, Words as _};
use posthaste_core::sync::lock;
use posthaste_core::{
    Client, ContextId, Device, Endpoint, Fault, Handle, MemoryError, Messager, Rank, RmaError, Scope,
    SendError, WindowId,
};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, Weak};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a typed window holds: plain old data of any bit pattern.
pub trait Element: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static> Element for T {}

/// One rank's part of a window, or a region: where it is and how it is reached.
pub(crate) struct Part {
    pub rank: Rank,
    pub mapped: Option<SharedSlice>,
    pub len: u64,
    /// Where it is, as its owner names it.
    pub place: u64,
    /// Key in the context's table of remote memory.
    pub remote: usize,
    /// Rouses those who wait for what is written there, in whatever context; as long as it is mapped.
    rouser: Option<Rouser>,
    /// Which incarnation of the rank has it.
    pub incarnation: u32,
}

impl Part {
    fn new(memory: &RemoteMemory, remote: usize, device: &Arc<dyn Device>, handle: &Handle) -> Part {
        let RemoteMemory { rank, offset: place, len, mapped, incarnation } = *memory;
        // What cannot be roused is not written at once.
        let rouser = mapped.and_then(|_| Rouser::of(rank, device, handle));
        Part { rank, mapped, len, place, remote, rouser, incarnation }
    }

    /// The same part by another key.
    fn at(&self, remote: usize) -> Part {
        Part { remote, rouser: self.rouser.clone(), ..*self }
    }

    fn memory(&self) -> RemoteMemory {
        let Part { rank, mapped, len, place: offset, incarnation, .. } = *self;
        RemoteMemory { rank, offset, len, mapped, incarnation }
    }

    /// Rouses those who wait for what was just written.
    #[inline(always)]
    fn rouse(&self) {
        if let Some(rouser) = &self.rouser {
            rouser.rouse();
        }
    }
}

/// Rouses those who wait on a rank's memory.
#[derive(Clone)]
struct Rouser {
    rouse: Arc<dyn Rouse>,
    /// What says whether there are any, if it is one word.
    sign: Option<SharedWords>,
}

impl Rouser {
    fn new(rouse: Arc<dyn Rouse>) -> Rouser {
        let sign = rouse.sign().map(SharedWords::new);
        Rouser { rouse, sign }
    }

    fn of(rank: Rank, device: &Arc<dyn Device>, handle: &Handle) -> Option<Rouser> {
        let of = |context| device.rouser(Endpoint::new(rank, ContextId(context))).map(Rouser::new);
        let own = || (rank == handle.me().rank).then(|| Rouser::new(Arc::new(OwnRouser(handle.clone()))));
        match handle.kin() {
            1 => of(0).or_else(own),
            contexts => {
                let all: Option<Box<[Rouser]>> = (0..contexts).map(of).collect();
                all.map(|all| Rouser::new(Arc::new(All(all)))).or_else(own)
            }
        }
    }

    #[inline(always)]
    fn rouse(&self) {
        if let Some(sign) = self.sign {
            compiler_fence(Ordering::SeqCst);
            if sign.load(0, Ordering::Relaxed) == 0 {
                return;
            }
        }
        self.rouse.rouse();
    }
}

/// Rouses all contexts of a rank.
struct All(Box<[Rouser]>);

impl Rouse for All {
    fn rouse(&self) {
        self.0.iter().for_each(Rouser::rouse);
    }
}

/// Rouses those who wait on this rank's own memory, in whatever context, where no device does.
struct OwnRouser(Handle);

impl Rouse for OwnRouser {
    fn rouse(&self) {
        self.0.rouse();
    }
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
    /// Which part is this rank's own; of a region none counts as that.
    own: usize,
    device: Arc<dyn Device>,
    /// How layouts are reached where memory is not mapped; windows have it.
    layouts: Option<LayoutAccess>,
    /// Those of the parts; of a view they are with its home.
    _keys: Option<Keys>,
    /// What this is a view of.
    home: Option<Arc<Memory>>,
    /// Views of this through other contexts, which end with it.
    views: Mutex<Vec<View>>,
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
    pub(crate) fn check(&self, part: usize, rank: Rank, offset: u64, count: u64) -> Result<&Part, RmaError> {
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

    /// The part and the mapped bytes of an access, if it may go ahead inline: one load each for "alive" and "nothing
    /// precedes".
    #[inline]
    fn target(&self, part: usize, offset: u64, count: u64) -> Option<(&Part, SharedSlice)> {
        let part = self.parts.get(part)?;
        if !self.alive.load(Ordering::Relaxed) || !self.gates.is_open(part.rank) {
            return None;
        }
        Some((part, part.mapped?.slice(offset, count)?))
    }

    /// The mapped bytes of an access that may go ahead inline.
    #[inline]
    fn inline(&self, part: &Part, offset: u64, count: u64) -> Option<SharedSlice> {
        if self.gates.is_open(part.rank) { part.mapped?.slice(offset, count) } else { None }
    }
}

impl Memory {
    fn shares_context_with(&self, other: &Memory) -> bool {
        posthaste_core::sync::Arc::ptr_eq(self.handle.shared_state(), other.handle.shared_state())
    }

    /// The same memory through another context of the client.
    async fn through(self: &Arc<Memory>, handle: &Handle) -> Result<Arc<Memory>, RmaError> {
        if !handle.is_kin_of(&self.handle) {
            return Err(RmaError::OtherClient);
        }
        let home = self.home.as_ref().unwrap_or(self);
        if !home.alive.load(Ordering::SeqCst) {
            return Err(RmaError::NoSuchWindow(home.id));
        }
        if handle.me().context == home.handle.me().context {
            return Ok(home.clone());
        }
        let view = |keys: &[usize]| {
            Arc::new(Memory {
                id: home.id,
                handle: handle.clone(),
                gates: home.gates.clone(),
                parts: home.parts.iter().zip(keys).map(|(part, key)| part.at(*key)).collect(),
                alive: AtomicBool::new(true),
                size: home.size,
                own: home.own,
                device: home.device.clone(),
                layouts: home.layouts.as_ref().map(|layouts| layouts.through(handle)),
                _keys: None,
                home: Some(home.clone()),
                views: Mutex::default(),
            })
        };
        if let Some(known) = home.known_view(handle, None, view)? {
            return Ok(known);
        }
        let keys = Keys::add(handle, home.parts.iter().map(Part::memory).collect()).await;
        let made = home.known_view(handle, Some(keys), view)?;
        made.ok_or(RmaError::NoSuchWindow(home.id))
    }

    /// The view through a context, made anew if nobody has it any more. None: there never was one, and there are no keys.
    fn known_view(
        &self,
        handle: &Handle,
        keys: Option<Keys>,
        make: impl Fn(&[usize]) -> Arc<Memory>,
    ) -> Result<Option<Arc<Memory>>, RmaError> {
        let context = handle.me().context;
        let mut views = lock(&self.views);
        let known = views.iter_mut().find(|view| view.keys.handle.me().context == context);
        let found = match (known, keys) {
            (None, None) => return Ok(None),
            (None, Some(keys)) => {
                let live = make(&keys.keys);
                views.push(View { keys, live: Arc::downgrade(&live) });
                live
            }
            // Somebody else may have been quicker, whose keys serve as well.
            (Some(known), _) => known.live.upgrade().unwrap_or_else(|| {
                let live = make(&known.keys.keys);
                known.live = Arc::downgrade(&live);
                live
            }),
        };
        // Under the lock: whoever frees it ends the views that are listed.
        if self.alive.load(Ordering::SeqCst) { Ok(Some(found)) } else { Err(RmaError::NoSuchWindow(self.id)) }
    }

    /// Nothing is started on it any more. Returns the contexts through which it was used, or none if it was ended before.
    fn end(&self) -> Option<Vec<Handle>> {
        if !self.alive.swap(false, Ordering::SeqCst) {
            return None;
        }
        let mut contexts = vec![self.handle.clone()];
        for view in lock(&self.views).iter() {
            if let Some(live) = view.live.upgrade() {
                live.alive.store(false, Ordering::SeqCst);
            }
            contexts.push(view.keys.handle.clone());
        }
        // Who still waits on a word of it, through whichever context, waits in vain.
        for context in self.handle.all_kin() {
            context.post_run(|scope| scope.wake_watchers());
        }
        Some(contexts)
    }
}

/// What was made of some memory for another context. Its keys stay as long as the memory: an operation may go on when nobody
/// has the view any more.
struct View {
    keys: Keys,
    live: Weak<Memory>,
}

/// A window over all ranks of the job, or over the members of a group ([`Group::shmalloc`](crate::Group::shmalloc)): each
/// rank's part has a length of its own, 0 allowed (access only). Offsets are in elements of `T`; [`byte`](Window::bytes)
/// views count bytes. Cheap to clone. In a window of a group, ranks are those of the group.
///
/// Its atomicity (W02) is 8 bytes at multiples of 8: concurrent puts and gets keep such words whole.
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

/// What a window is made of besides its parts.
struct Made {
    handle: Handle,
    device: Arc<dyn Device>,
    gates: posthaste_core::sync::Arc<Gates>,
    layouts: LayoutAccess,
    id: WindowId,
    own: usize,
}

impl Made {
    async fn with(self, remotes: Vec<RemoteMemory>) -> Memory {
        let Made { handle, device, gates, layouts, id, own } = self;
        let keys = Keys::add(&handle, remotes.clone()).await;
        let parts = remotes.iter().zip(&keys.keys);
        let parts: Box<[Part]> =
            parts.map(|(remote, key)| Part::new(remote, *key, &device, &handle)).collect();
        let (size, alive) = (parts.len() as u32, AtomicBool::new(true));
        let (home, views, _keys) = (None, Mutex::default(), Some(keys));
        Memory {
            id,
            gates,
            parts,
            alive,
            size,
            own,
            device,
            layouts: Some(layouts),
            _keys,
            home,
            views,
            handle,
        }
    }
}

/// Entries of a context's table of remote memory, given up with this.
struct Keys {
    handle: Handle,
    keys: Box<[usize]>,
}

impl Keys {
    async fn add(handle: &Handle, memory: Vec<RemoteMemory>) -> Keys {
        let owner = handle.clone();
        let posted = handle.post(move |scope: &mut Scope<'_>| {
            let keys = memory.into_iter().map(|memory| scope.table().remote.insert(memory)).collect();
            // An owner, so that they are given up if nobody waits for them any more.
            Keys { handle: owner, keys }
        });
        std::future::poll_fn(|cx| posted.poll(cx)).await
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let keys = std::mem::take(&mut self.keys);
        self.handle.post_run(move |scope| scope.retire_remote(keys));
    }
}

impl<T: Element> Window<T> {
    /// Makes a window (W01): collective, every rank names its own length in elements. The memory is zero.
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
        let handle = first_context(client)?;
        let me = handle.me().rank;
        let device = client.device_for(me).ok_or(RmaError::Unreachable(me))?.clone();
        // Of those that take part: whichever is started again meanwhile has no part.
        let incarnations: Vec<u32> =
            (0..client.peers().ranks).map(|rank| client.incarnation_of(Rank(rank))).collect();
        let making = exchange.begin_window()?;
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        let own = match bytes {
            Some(0) => Ok(Allocation { offset: 0, len: 0 }),
            Some(bytes) => device.allocate(bytes),
            None => Err(MemoryError::Segment { wanted: u64::MAX, segment: 0 }),
        };
        let (blob, own, failed) = match own {
            Ok(own) => {
                let blob = part_blob(own.offset, bytes.unwrap_or(0));
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
                RemoteMemory { rank, offset, len, mapped: client.map(rank, offset, len), incarnation }
            })
            .collect();
        let made = Made {
            handle,
            device,
            gates: client.gates().clone(),
            layouts: layouts.clone(),
            id: WindowId(making.number() as u32),
            own: me.index(),
        };
        let memory = made.with(remotes).await;
        let number = making.made();
        let origin = Origin::World(exchange.clone(), number);
        Ok(Window { memory: Arc::new(memory), origin, element: PhantomData })
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
    #[inline]
    pub fn put(&self, rank: Rank, index: usize, value: T) -> PutElement<'_, T> {
        PutElement::element(&self.memory, rank, Self::offset(index), value)
    }

    /// Puts consecutive elements, which are borrowed as long as the future lives, or until [`local`](PutCopy::local) is ready.
    /// They are written to mapped memory, or copied for the device, which [`put_bytes`](Self::put_bytes) spares.
    ///
    /// # Cancel safety
    /// See [`Put`].
    #[inline]
    pub fn put_slice<'w, 's>(&'w self, rank: Rank, index: usize, values: &'s [T]) -> PutSlice<'w, 's> {
        PutSlice::new(&self.memory, rank.0, rank, Self::offset(index), values.as_bytes())
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

    /// Fills a slice with consecutive elements, which is borrowed for as long as the future lives.
    ///
    /// # Cancel safety
    /// Cancel safe: a get changes nothing at the target, and until it is ready nothing in the slice.
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

    /// Records a put of a whole region to elements of a rank's part; see [`Recorder`](crate::Recorder::put).
    ///
    /// # Errors
    /// As for [`Recorder::put`](crate::Recorder::put).
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

    /// Frees the window: collective. Every rank ends its own operations first; the memory is reused only once every
    /// rank has come here or is proven dead (I10). From now on every operation on it is refused. It waits for the operations of
    /// all contexts [through](Self::through) which the window was used; whoever owns one of these has to poll meanwhile.
    ///
    /// # Errors
    /// If it was freed before, a rank is lost or called something else, or this rank is closed. The window is freed
    /// here all the same, and the memory goes back once the others have released it, too.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up before it was polled leaves the others waiting.
    pub async fn free(self) -> Result<(), RmaError> {
        let home = self.memory.home.as_ref().unwrap_or(&self.memory);
        let contexts = home.end().ok_or(RmaError::NoSuchWindow(home.id))?;
        // Before the first wait: several windows may be freed at once, in the same order on all ranks.
        let freeing = match &self.origin {
            Origin::World(exchange, number) => Some(exchange.begin_free(*number)),
            Origin::Group(_) => None,
        };
        for handle in &contexts {
            let flushed = match &self.origin {
                Origin::World(..) => crate::flush::fence(handle).await,
                Origin::Group(origin) => origin.flush(handle).await,
            };
            match flushed {
                Ok(()) => {}
                // A lost rank's operations have ended, too.
                Err(SendError::Fault(fault)) if fault.peer().is_some() => {}
                Err(error) => return Err(send_to_rma(error)),
            }
        }
        match (freeing, &self.origin) {
            (Some(freeing), _) => freeing.release().await.map_err(send_to_rma),
            (None, Origin::Group(origin)) => origin.release().await,
            (None, Origin::World(..)) => Ok(()),
        }
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

fn first_context(client: &Client) -> Result<Handle, RmaError> {
    client.contexts().first().cloned().ok_or(RmaError::Fault(Fault::Shutdown))
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
