//! What a rank does with others: memory, patterns, and operations of all ranks.

use super::Job;
use crate::error::Error;
use bytes::Bytes;
use posthaste_core::context::Drive;
use posthaste_core::engine::{FifoOptions, PatternError};
use posthaste_core::{Context, Handle, Messager, Rank, RmaError};
use posthaste_protocols::{
    Collectives, Element, Fifo, Group, ManyToMany, OwnedRegion, Pattern, Persistent, Recorder, Region,
    RegionKey, RemoteRegion, Window, Within, flush, pattern,
};
use std::future::{Future, IntoFuture};
use std::time::Duration;

impl Job {
    /// Makes a window over all ranks: collective, `len` elements on this rank, 0 allowed. The memory is zero. It
    /// is made through the client's first context, and so are its operations; [`Window::through`] leads them through another.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(job.size()).await?;
    /// let (me, right) = (job.rank(), job.rank().next(job.size()));
    /// window.put(right, me.index(), 42).await?;
    /// job.barrier().await?;
    /// assert_eq!(window.load(0), Some(42));
    /// window.free().await?;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If memory cannot be had here or on another rank, or as for [`barrier`](Job::barrier). Where a rank is lost
    /// meanwhile, some survivors may have the window and others not.
    ///
    /// # Cancel safety
    /// Not cancel safe: the other ranks wait until this one leaves.
    pub async fn shmalloc<T: Element>(&self, len: usize) -> Result<Window<T>, Error> {
        Ok(Window::allocate(&self.client, &self.exchange, &self.layouts, len).await?)
    }

    /// Allocates a region of `len` bytes on this rank, zeroed. It belongs to the client's first context, and so does
    /// what is recorded of it; others have [`Region::through`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(16).await?;
    /// region.write(4, b"four")?;
    /// let mut all = [1; 16];
    /// region.read(0, &mut all)?;
    /// assert_eq!(&all[..9], b"\0\0\0\0four\0"); // zero at first
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If memory cannot be had.
    ///
    /// # Cancel safety
    /// Cancel safe: the memory goes back. See [`Region::allocate`].
    pub async fn region(&self, len: usize) -> Result<Region, Error> {
        Ok(Region::allocate(&self.client, len).await?)
    }

    /// Makes memory that the caller owns a region: peers reach it by its key, through this rank, and it is the caller's again
    /// at once.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let table = job.region_from(b"whatever has bytes".to_vec())?;
    /// let remote = job.remote_region(table.key()).await?; // as a peer opens it
    /// assert_eq!(remote.get_into(9, vec![0; 3]).await?, b"has");
    /// let bytes: Vec<u8> = table.into_inner();
    /// # assert_eq!(bytes.len(), 18);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Region::from_owned`].
    pub fn region_from<T>(&self, memory: T) -> Result<OwnedRegion<T>, Error>
    where
        T: AsMut<[u8]> + Send + 'static,
    {
        Ok(Region::from_owned(&self.client, memory)?)
    }

    /// A region of a peer, by the key that the peer told. What is done with it goes through the client's first context, or
    /// [another](RemoteRegion::through).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let region = job.region(64).await?;
    /// // The key is plain data; here it goes to all peers by a collective operation.
    /// let keys = job.world().all_gather(&[region.key()]).await?;
    /// let right = job.rank().next(job.size());
    /// let remote = job.remote_region(keys[right.index()]).await?;
    /// remote.put_slice(0, b"hello, neighbour").await?;
    /// job.barrier().await?;
    /// let mut greeting = [0; 5];
    /// region.read(0, &mut greeting)?;
    /// assert_eq!(&greeting, b"hello");
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If there is no such rank or it was started again since the key was told, or, where its memory is mapped here,
    /// the key names nothing that the peer shares; elsewhere the operations on the region tell that. See
    /// [`RemoteRegion::open`].
    ///
    /// # Cancel safety
    /// Cancel safe: nobody is told anything. See [`RemoteRegion::open`].
    pub async fn remote_region(&self, key: RegionKey) -> Result<RemoteRegion, Error> {
        Ok(RemoteRegion::open(&self.client, &self.layouts, key).await?)
    }

    /// Records operations, to be replayed at almost no cost; nothing is carried out. See [`Pattern`]. The pattern
    /// belongs to the client's first context; others have [`record_through`](Self::record_through).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (window, source) = (job.shmalloc::<u64>(2).await?, job.region(8).await?);
    /// let (left, right) = (job.rank().previous(job.size()), job.rank().next(job.size()));
    /// let halo = job
    ///     .record(|recorder| {
    ///         recorder.put(&window, left, 1, &source)?;
    ///         recorder.put(&window, right, 0, &source)
    ///     })
    ///     .await?;
    /// for step in 0..100_u64 {
    ///     source.write(0, &step.to_ne_bytes())?;
    ///     halo.replay().await?;
    /// }
    /// assert_eq!(window.to_vec(), [99, 99]);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the closure fails or records nothing, the context has no room for it, what it names cannot be reached, or the
    /// job was left.
    ///
    /// # Cancel safety
    /// Cancel safe: what was recorded is freed again.
    pub async fn record(
        &self,
        recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
    ) -> Result<Pattern, Error> {
        Ok(pattern::record(&self.handle, recording).await?)
    }

    /// The same for another context: it replays the pattern, and what is recorded of windows and regions is recorded of
    /// their [views](Window::through) there, of messages of those [sent through](crate::ActiveMessage::through) it.
    ///
    /// # Errors
    /// As for [`record`](Self::record), and [`RmaError::OtherClient`] for a context of another client.
    ///
    /// # Cancel safety
    /// As for [`record`](Self::record).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::ContextId;
    ///
    /// let job = posthaste::solo_with(1, 2).await?; // one client of two contexts
    /// let second = job.context_handle(ContextId(1)).expect("there are two");
    /// let window = job.shmalloc::<u8>(64).await?.through(second).await?;
    /// let source = job.region(64).await?.through(second).await?;
    /// let pattern = job.record_through(second, |r| r.put(&window, job.rank(), 0, &source)).await?;
    /// source.write(7, &[1])?;
    /// pattern.replay().await?;
    /// assert_eq!(window.load(7), Some(1));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn record_through(
        &self,
        handle: &Handle,
        recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
    ) -> Result<Pattern, Error> {
        if !handle.is_kin_of(&self.handle) {
            return Err(RmaError::OtherClient.into());
        }
        Ok(pattern::record(handle, recording).await?)
    }

    /// Makes an injection FIFO: messages and patterns that go through it wait for, and delay, nothing that goes another way.
    /// See [`Fifo`]. It belongs to the client's first context, and takes messages of that one only; other contexts have
    /// [`Fifo::open`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let (log, mut lines) = job.stream("log")?;
    /// // What is urgent is served before all that waits elsewhere.
    /// let urgent = job.fifo(FifoOptions { priority: true, ..FifoOptions::default() }).await?;
    /// urgent.send(&log, job.rank(), "at once").await?;
    /// assert_eq!(lines.recv().await.map(|line| line.text()).as_deref(), Some("at once"));
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the job was left, or the FIFO is to have more slots than it may.
    ///
    /// # Cancel safety
    /// Cancel safe: a FIFO that nobody waits for any more is closed again.
    pub async fn fifo(&self, options: FifoOptions) -> Result<Fifo, Error> {
        Ok(Fifo::open(&self.handle, options).await?)
    }

    /// Awaits any operation that may end with a fault for so long at most, counted from this call: a put, a get, a send, a call, an
    /// operation of a group, a replay, a flush; not one that is not cancel safe, as the job's `barrier`. Sends, calls and multicasts
    /// have a deadline of their own as well. What ends otherwise, as [`Counter::reach`](crate::Counter::reach) does, takes
    /// `tokio::time::timeout`. An owned context has [`within`](crate::within()).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Fault, RmaError};
    /// use std::time::Duration;
    /// let window = job.shmalloc::<u64>(1).await?;
    /// job.within(Duration::from_secs(1), window.put(job.rank(), 0, 42)).await?;
    /// // Nobody ever writes 43.
    /// let never = window.wait_until(0, |word| word == 43);
    /// let late = job.within(Duration::from_millis(5), never).await;
    /// assert_eq!(late, Err(RmaError::Fault(Fault::DeadlineExceeded)));
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// The operation's own, or [`Fault::DeadlineExceeded`](crate::Fault::DeadlineExceeded): it is dropped then, and may
    /// still take effect.
    ///
    /// # Cancel safety
    /// That of the operation.
    pub fn within<T, V, E>(&self, time: Duration, operation: T) -> Within<'_, Handle, T::IntoFuture>
    where
        T: IntoFuture<Output = Result<V, E>>,
        E: From<posthaste_core::Fault>,
    {
        posthaste_protocols::within(&self.handle, time, operation)
    }

    /// Declares that all protocols of this client are registered: messages for unknown ones, held until now, are
    /// refused from now on. The first [`barrier`](Job::barrier) implies it; other collective calls do not, so that a
    /// handler can capture a window that was made before.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let seen = job.counter();
    /// let count = seen.clone();
    /// let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1))?;
    /// job.ready(); // nothing is registered later: what has another name is refused and not held
    /// note.send(job.rank(), "known").await?;
    /// seen.reach(1).await;
    /// assert_eq!(seen.value(), 1);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn ready(&self) {
        for context in self.client.contexts() {
            context.post_run(|scope| scope.declare_ready());
        }
    }

    /// Waits until everything that the client's first context did towards a rank has taken effect there: what was put can be seen,
    /// handlers that run inline have run, and messages for streams and spawned handlers were handed over, though not consumed.
    /// Before that, until what is in its FIFOs of one's own is out, for whichever rank. Other contexts have
    /// [`flush::flush`](crate::flush::flush).
    ///
    /// It is no call for order, which needs none here: it completes, as `shmem_quiet` and `ucp_ep_flush` do.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let seen = job.counter();
    /// let count = seen.clone();
    /// let note = job.register("note", move |message: Message, _: &mut Scope| count.add(message.len() as u64))?;
    /// note.send(job.rank(), "on its way").await?; // means no more than that
    /// job.flush(job.rank()).await?; // the handler has run
    /// assert_eq!(seen.value(), 10);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the rank is unknown, lost or has left.
    ///
    /// # Cancel safety
    /// Cancel safe: waiting changes nothing, and a later flush waits for what this one waited for.
    pub async fn flush(&self, rank: Rank) -> Result<(), Error> {
        Ok(flush::flush(&self.handle, rank).await?)
    }

    /// The same towards all ranks, by the client's first context, too: what MPI calls `MPI_Win_flush_all`, and UCX
    /// `ucp_worker_flush`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let seen = job.counter();
    /// let count = seen.clone();
    /// let note = job.register("note", move |_: Message, _: &mut Scope| count.add(1))?;
    /// for rank in job.ranks() {
    ///     note.send(rank, "one each").await?;
    /// }
    /// job.fence().await?; // all ranks have handled theirs
    /// job.barrier().await?; // and so have all that send to this one
    /// assert_eq!(seen.value(), job.size() as u64);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank is lost or leaves while this waits for it: the first failure, after the others have ended. Ranks that
    /// were known to be gone are left out.
    ///
    /// # Cancel safety
    /// As for [`flush`](Job::flush).
    pub async fn fence(&self) -> Result<(), Error> {
        Ok(flush::fence(&self.handle).await?)
    }

    /// Waits until every rank has got here, and implies [`ready`](Job::ready). It goes through the client's first
    /// context, as all collective operations do.
    /// It is a barrier of messages, in one row with windows that are made and freed. `job.world().barrier()` takes a fraction of
    /// its time where ranks share memory; it does not imply [`ready`](Job::ready), which is called once then.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u32>(job.size()).await?;
    /// for rank in job.ranks() {
    ///     window.put(rank, job.rank().index(), job.rank().0 + 1).await?;
    /// }
    /// job.barrier().await?; // everybody has put
    /// assert!(window.to_vec().into_iter().eq(1..=job.size() as u32));
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank is lost or has left, or calls another collective operation
    /// ([`Fault::CollectiveMismatch`](crate::Fault::CollectiveMismatch)). From then on every collective operation ends so, on all ranks.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up leaves the others waiting until it leaves the job.
    pub async fn barrier(&self) -> Result<(), Error> {
        self.ready();
        Ok(self.exchange.barrier().await?)
    }

    /// Awaits any future of this job while driving an owned context, which nobody else can.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::ContextId;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// // A collective goes through the context's handle, which gets on while the owner drives.
    /// let ranks = job.drive(&context, job.world().all_gather(&[job.rank().0])).await?;
    /// assert_eq!(ranks.len(), job.size());
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// That of the future.
    #[inline]
    pub fn drive<'c, F: Future>(&self, context: &'c Context, future: F) -> Drive<'c, Context, F> {
        posthaste_core::context::drive(context, future)
    }

    /// Gathers a blob of the same length from every rank, by rank. Collective, through the client's first context.
    /// Typed values go through [`Group::all_gather`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let blobs = job.all_gather(&job.rank().0.to_le_bytes()).await?;
    /// assert_eq!(blobs.len(), job.size());
    /// assert_eq!(*blobs[0], [0; 4]);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`barrier`](Job::barrier); a blob of another length is another operation. If all blobs together have more than 128
    /// MiB: [`Group::all_gather`] has no such limit.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up leaves the others waiting until it leaves the job.
    pub async fn all_gather(&self, blob: &[u8]) -> Result<Vec<Bytes>, Error> {
        Ok(self.exchange.all_gather(blob).await?)
    }

    /// The group of all ranks; its operations are those of [`Group`], and go through the client's first context, as
    /// those of all groups do.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::Reduce;
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// let total = world.all_reduce(&[1.5, 2.5], &Reduce::sum()).await?;
    /// assert_eq!(total, [1.5, 2.5]);
    /// let half = world.split(Some(job.rank().0 % 2), 0).await?.expect("every rank has a colour");
    /// half.barrier().await?;
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn world(&self) -> Group {
        self.collectives.world()
    }

    /// Makes collectives that are recorded once and replayed each time, by the client's first context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let job = posthaste::solo().await?;
    /// let mut barrier = job.persistent().barrier(&job.world()).await?;
    /// let mut largest = job.persistent().all_reduce::<f64>(&job.world(), 1, &posthaste::Reduce::max()).await?;
    /// for step in 0..3 {
    ///     let mut residual = [1.0 / f64::from(step + 1)];
    ///     largest.run(&mut residual).await?;
    ///     barrier.run().await?;
    ///     assert_eq!(residual, [1.0 / f64::from(step + 1)]);
    /// }
    /// # job.leave().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn persistent(&self) -> &Persistent {
        &self.persistent
    }

    /// Makes groups of listed ranks, also such as the other members do not know of yet. What they do goes through the
    /// client's first context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let even: Vec<_> = job.ranks().filter(|rank| rank.0 % 2 == 0).collect();
    /// if even.contains(&job.rank()) {
    ///     let group = job.collectives().subset(&even).await?;
    ///     group.barrier().await?;
    ///     assert_eq!(group.to_job(group.rank()), Some(job.rank()));
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn collectives(&self) -> &Collectives {
        &self.collectives
    }

    /// Sends many ranks a buffer each in one call, and receives from many into one buffer, through the client's
    /// first context.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::{ConnectionManager, Part};
    /// let job = posthaste::solo().await?;
    /// let manager = ConnectionManager::new(8);
    /// let connection = manager.open().await;
    /// let parts = [Part { source: job.rank(), offset: 2, len: 3 }];
    /// let receive = job.many_to_many().receive(connection.id(), 8, &parts)?;
    /// job.many_to_many().send(connection.id(), [(job.rank(), "abc".into())]).await?;
    /// assert_eq!(receive.await?.into_whole()?, *b"\0\0abc\0\0\0");
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn many_to_many(&self) -> &ManyToMany {
        &self.many
    }
}
