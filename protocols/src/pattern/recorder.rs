//! What a pattern is made of: operations that are written down instead of carried out.

use crate::handler::ActiveMessage;
use crate::multisend::ManyToMany;
use crate::window::{Element, Memory, Region, RegionSlice, RemoteRegion, Signal, Window};
use posthaste_core::context::{Face, Shared};
use posthaste_core::descriptor::{Descriptor, MAX_INFO, Op, SourceKind};
use posthaste_core::engine::{PatternError, record_info};
use posthaste_core::sync::Arc as SharedArc;
use posthaste_core::{ConnectionId, Handle, ProtocolId, Rank, SendError, wire};
use std::sync::Arc;

/// Collects operations instead of carrying them out.
///
/// All payloads come from [`Region`]s: they are read afresh at each replay. Whatever cannot be recorded is refused at
/// once, with an error that says why.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u64>(8).await?;
/// let halo = job.register("halo", |_: posthaste::Message, _: &mut posthaste::Scope| {})?;
/// let (source, mirror) = (job.region(64).await?, job.region(8).await?);
/// let me = job.rank();
/// let pattern = job
///     .record(|r| {
///         r.put(&window, me, 0, source.slice(0..16))?;
///         r.get(&window, me, 7, &mirror)?;
///         r.send(&halo, me, source.slice(16..64))?;
///         r.multicast(&halo, job.ranks(), source.slice(0..8))
///     })
///     .await?;
/// assert_eq!((pattern.messages(), pattern.bytes()), (4, 80));
/// pattern.replay().await?;
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct Recorder {
    handle: Handle,
    pub(super) descriptors: Vec<Descriptor>,
    pub(super) keep: Keep,
    pub(super) messages: usize,
    /// Messages whose info a replay may replace.
    pub(super) open_infos: usize,
    pub(super) bytes: u64,
}

/// What recorded descriptors point into.
#[derive(Debug, Default)]
pub(super) struct Keep {
    pub windows: Vec<Arc<Memory>>,
    pub regions: Vec<Region>,
}

impl Recorder {
    pub(super) fn new(handle: &Handle) -> Self {
        Self {
            handle: handle.clone(),
            descriptors: Vec::new(),
            keep: Keep::default(),
            messages: 0,
            open_infos: 0,
            bytes: 0,
        }
    }

    /// Number of operations so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.messages
    }

    /// Whether nothing was recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages == 0
    }

    /// Records a put of (part of) a region to elements of a rank's part of a window.
    ///
    /// # Errors
    /// If the access is out of range, the window was freed, or it belongs to another context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (window, source) = (job.shmalloc::<u32>(8).await?, job.region(64).await?);
    /// // Every second word of the region to elements that lie apart.
    /// let pattern = job
    ///     .record(|recorder| {
    ///         recorder.put(&window, job.rank(), 1, source.slice(0..4))?;
    ///         recorder.put(&window, job.rank(), 6, source.slice(8..12))
    ///     })
    ///     .await?;
    /// source.write(8, &7_u32.to_ne_bytes())?;
    /// pattern.replay().await?;
    /// assert_eq!((window.load(1), window.load(6)), (Some(0), Some(7)));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn put<T: Element>(
        &mut self,
        window: &Window<T>,
        rank: Rank,
        index: usize,
        source: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.access(Op::Put, window.memory(), (rank.index(), rank), Window::<T>::offset(index), source.into())
    }

    /// Records a get of elements of a rank's part of a window into (part of) a region.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (window, mirror) = (job.shmalloc::<u32>(8).await?, job.region(8).await?);
    /// let pattern = job.record(|recorder| recorder.get(&window, job.rank(), 2, &mirror)).await?;
    /// window.store_slice(2, &[5, 6])?;
    /// pattern.replay().await?; // what is there now is in the region
    /// let mut words = [0; 8];
    /// mirror.read(0, &mut words)?;
    /// assert_eq!(words, [5_u32.to_ne_bytes(), 6_u32.to_ne_bytes()].concat()[..]);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn get<T: Element>(
        &mut self,
        window: &Window<T>,
        rank: Rank,
        index: usize,
        into: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.access(Op::Get, window.memory(), (rank.index(), rank), Window::<T>::offset(index), into.into())
    }

    /// Records a put of (part of) a region to a region of a peer, from an offset in bytes on.
    ///
    /// # Errors
    /// If the access is out of range, or one of them belongs to another context. The recording as a whole refuses memory that its
    /// owner [had already](Region::from_owned).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (region, source, mirror) = (job.region(64).await?, job.region(8).await?, job.region(8).await?);
    /// let remote = job.remote_region(region.key()).await?; // as a peer opens it
    /// let pattern = job
    ///     .record(|recorder| {
    ///         recorder.put_region(&remote, 40, &source)?;
    ///         recorder.get_region(&remote, 40, &mirror)
    ///     })
    ///     .await?;
    /// source.write(0, b"to and f")?;
    /// pattern.replay().await?;
    /// let mut back = [0; 8];
    /// mirror.read(0, &mut back)?;
    /// assert_eq!(&back, b"to and f");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn put_region(
        &mut self,
        remote: &RemoteRegion,
        offset: usize,
        source: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.access(Op::Put, remote.memory(), (0, remote.owner()), offset as u64, source.into())
    }

    /// Records a get from a region of a peer, from an offset in bytes on, into (part of) a region.
    ///
    /// # Errors
    /// As for [`put_region`](Self::put_region).
    pub fn get_region(
        &mut self,
        remote: &RemoteRegion,
        offset: usize,
        into: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.access(Op::Get, remote.memory(), (0, remote.owner()), offset as u64, into.into())
    }

    /// Records a put with a signal: when the data is there, the word that the signal names is changed. A signal that
    /// adds the bytes of the put makes the word a reception counter, which the target awaits with
    /// [`wait_until`](Window::wait_until).
    ///
    /// # Errors
    /// As for [`put`](Self::put), and if the word is not aligned.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (data, arrived) = (job.shmalloc::<u8>(64).await?, job.shmalloc::<u64>(1).await?);
    /// let (source, right) = (job.region(64).await?, job.rank().next(job.size()));
    /// let ring = job.record(|r| r.put_signal(&data, right, 0, &source, arrived.signal_add(0, 64))).await?;
    /// ring.replay().await?;
    /// arrived.wait_until(0, |bytes| bytes == 64).await?;
    /// # job.leave().await
    /// # }
    /// ```
    pub fn put_signal<T: Element>(
        &mut self,
        window: &Window<T>,
        rank: Rank,
        index: usize,
        source: impl Into<RegionSlice>,
        signal: Signal<'_>,
    ) -> Result<(), PatternError> {
        let (memory, op) = signal.parts();
        self.context_of("the signal", memory.handle.shared_state())?;
        signal.goes_with(window.memory(), rank)?;
        let (part, offset) = signal.place(rank)?;
        let mut word = Descriptor {
            rank: part.rank,
            context: self.handle.me().context,
            region: part.remote as u32,
            offset,
            ..Descriptor::default()
        };
        word.set_word_op(&op, false);
        self.put(window, rank, index, source)?;
        self.descriptors.push(word);
        self.messages += 1;
        self.keep_window(memory);
        Ok(())
    }

    /// Records a message. Whether its rank exists, the recording as a whole says.
    ///
    /// # Errors
    /// If the slice is not inside of its region, or one of them belongs to another context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (frame, mut frames) = job.stream("frame")?;
    /// let picture = job.region(1000).await?;
    /// let pattern = job.record(|recorder| recorder.send(&frame, job.rank(), &picture)).await?;
    /// for number in 0..3_u8 {
    ///     picture.write(999, &[number])?;
    ///     pattern.replay().await?;
    ///     let message = frames.recv().await.expect("the job goes on");
    ///     assert_eq!((message.len(), message.read::<u8>(999)), (1000, Some(number)));
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub fn send<F: Face>(
        &mut self,
        message: &ActiveMessage<F>,
        target: Rank,
        payload: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.send_with_info(message, target, &[], payload)
    }

    /// Records a message with message info: up to 112 bytes, which every replay sends unless it passes new info.
    ///
    /// # Errors
    /// As for [`send`](Self::send), and if the info is too long.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (frame, mut frames) = job.stream("frame")?;
    /// let picture = job.region(8).await?;
    /// let pattern = job.record(|r| r.send_with_info(&frame, job.rank(), b"camera 2", &picture)).await?;
    /// pattern.replay().await?;
    /// assert_eq!(frames.recv().await.expect("the job goes on").info(), b"camera 2");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn send_with_info<F: Face>(
        &mut self,
        message: &ActiveMessage<F>,
        target: Rank,
        info: &[u8],
        payload: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.context_of("the message", message.face().shared())?;
        self.message(message.id(), target, info, &payload.into(), false)
    }

    /// Records the same message to each of these ranks; all read the payload where it is.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (tick, mut ticks) = job.stream("tick")?;
    /// let clock = job.region(8).await?;
    /// let pattern = job.record(|recorder| recorder.multicast(&tick, job.ranks(), &clock)).await?;
    /// assert_eq!(pattern.messages(), job.size());
    /// pattern.replay().await?;
    /// assert_eq!(ticks.recv().await.map(|message| message.len()), Some(8));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn multicast<F: Face>(
        &mut self,
        message: &ActiveMessage<F>,
        targets: impl IntoIterator<Item = Rank>,
        payload: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.multicast_with_info(message, targets, &[], payload)
    }

    /// Records the same message with the same message info to each of these ranks: up to 112 bytes, which every replay sends unless
    /// it passes new info.
    ///
    /// # Errors
    /// As for [`send_with_info`](Self::send_with_info).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (tick, mut ticks) = job.stream("tick")?;
    /// let clock = job.region(8).await?;
    /// let pattern = job.record(|r| r.multicast_with_info(&tick, job.ranks(), b"tower", &clock)).await?;
    /// pattern.replay().await?;
    /// assert_eq!(ticks.recv().await.expect("the job goes on").info(), b"tower");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn multicast_with_info<F: Face>(
        &mut self,
        message: &ActiveMessage<F>,
        targets: impl IntoIterator<Item = Rank>,
        info: &[u8],
        payload: impl Into<RegionSlice>,
    ) -> Result<(), PatternError> {
        self.context_of("the message", message.face().shared())?;
        let payload = payload.into();
        let mut targets = targets.into_iter();
        targets.try_for_each(|target| self.message(message.id(), target, info, &payload, false))
    }

    /// Records a payload of its own for each of these ranks, over a connection.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ConnectionManager, Part};
    /// let many = job.many_to_many();
    /// let connection = ConnectionManager::new(1).open().await;
    /// let (source, rank) = (job.region(8).await?, job.rank());
    /// let pattern =
    ///     job.record(|recorder| recorder.many_to_many(many, connection.id(), [(rank, source.slice(2..5))])).await?;
    /// source.write(0, b"01234567")?;
    /// let receive = many.receive(connection.id(), 3, &[Part { source: rank, offset: 0, len: 3 }])?;
    /// pattern.replay().await?;
    /// assert_eq!(receive.await?.into_whole()?, b"234");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn many_to_many(
        &mut self,
        many: &ManyToMany,
        connection: ConnectionId,
        messages: impl IntoIterator<Item = (Rank, RegionSlice)>,
    ) -> Result<(), PatternError> {
        self.context_of("many-to-many", many.handle().shared_state())?;
        let info = connection.0.to_le_bytes();
        let mut messages = messages.into_iter();
        messages.try_for_each(|(target, payload)| self.message(many.id(), target, &info, &payload, true))
    }

    fn context_of(&self, subject: &'static str, theirs: &SharedArc<Shared>) -> Result<(), PatternError> {
        if SharedArc::ptr_eq(theirs, self.handle.shared_state()) {
            return Ok(());
        }
        let (ours, theirs) = (self.handle.me().context, theirs.me().context);
        Err(PatternError::OtherContext { subject, ours, theirs })
    }

    fn source(&mut self, slice: &RegionSlice) -> Result<[u64; 2], PatternError> {
        let region = slice.region();
        self.context_of("the region", region.handle().shared_state())?;
        slice.check()?;
        if !self.keep.regions.iter().any(|other| other.local_key() == region.local_key()) {
            self.keep.regions.push(region.clone());
        }
        Ok([region.local_key() as u64, slice.first()])
    }

    fn access(
        &mut self,
        op: Op,
        memory: &Arc<Memory>,
        (part, rank): (usize, Rank),
        offset: u64,
        slice: RegionSlice,
    ) -> Result<(), PatternError> {
        self.context_of("the memory", memory.handle.shared_state())?;
        let part = memory.check(part, rank, offset, slice.len())?;
        let source = self.source(&slice)?;
        self.descriptors.push(Descriptor {
            op,
            source_kind: SourceKind::Region,
            rank: part.rank,
            context: self.handle.me().context,
            region: part.remote as u32,
            len: slice.len(),
            offset,
            source,
            ..Descriptor::default()
        });
        self.messages += 1;
        self.bytes += slice.len();
        self.keep_window(memory);
        Ok(())
    }

    fn keep_window(&mut self, memory: &Arc<Memory>) {
        if !self.keep.windows.iter().any(|other| Arc::ptr_eq(other, memory)) {
            self.keep.windows.push(memory.clone());
        }
    }

    fn message(
        &mut self,
        protocol: ProtocolId,
        target: Rank,
        info: &[u8],
        payload: &RegionSlice,
        fixed: bool,
    ) -> Result<(), PatternError> {
        if info.len() > MAX_INFO {
            return Err(SendError::InfoTooLong { len: info.len() }.into());
        }
        let send = Descriptor {
            op: Op::Send,
            source_kind: SourceKind::Region,
            rank: target,
            context: self.handle.me().context,
            protocol: ProtocolId(wire::FIRST_USER + protocol.0),
            len: payload.len(),
            source: self.source(payload)?,
            ..Descriptor::default()
        };
        record_info(&mut self.descriptors, send, info, fixed);
        self.messages += 1;
        self.open_infos += usize::from(!fixed);
        self.bytes += payload.len();
        Ok(())
    }
}
