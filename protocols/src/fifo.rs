//! Injection FIFOs of one's own (D30).

use crate::buffer::Buffer;
use crate::handler::ActiveMessage;
use crate::operation::Pending;
use crate::pattern::{Pattern, Recorder, record_on};
use posthaste_core::context::Face;
use posthaste_core::engine::{FifoId, FifoOptions, FifoStatus, Given, PatternError, Scope, SendArgs};
use posthaste_core::sync::Arc as SharedArc;
use posthaste_core::{Endpoint, Fault, Handle, Rank, SendError};
use std::sync::Arc;

/// An injection FIFO: a circular buffer of descriptors that is served beside all others. What goes through it goes out in
/// its order, and in no order with anything that goes another way: it is relaxed. FIFOs with priority are served first, until they
/// are empty or have no room at their targets, and then each of the others as far as its quantum goes, so that a long message
/// delays nobody else for longer.
///
/// Cheap to clone; closed with its last clone, when what is in it is out.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// use posthaste::{FifoOptions, Message, Scope};
///
/// let job = posthaste::solo().await?;
/// let count = job.counter();
/// let counted = count.clone();
/// let bulk = job.register("bulk", move |m: Message, _: &mut Scope| counted.add(m.len() as u64))?;
/// let fifo = job.fifo(FifoOptions { quantum: 64 << 10, ..FifoOptions::default() }).await?;
/// let sent = fifo.send(&bulk, job.rank(), vec![1; 10 << 20]); // others get past it
/// sent.await?;
/// count.reach(10 << 20).await;
/// assert!(fifo.status().await?.is_empty());
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Fifo(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    handle: Handle,
    id: FifoId,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let id = self.id;
        self.handle.post_run(move |scope| scope.close_fifo(id));
    }
}

impl Fifo {
    /// Makes a FIFO of a context.
    ///
    /// # Errors
    /// If the context is closed, or the FIFO is to have more slots than it may.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo_with(1, 2).await?; // one client of two contexts
    /// use posthaste::{ContextId, Fifo, FifoOptions};
    /// let (note, mut notes) = job.stream("note")?;
    /// let second = job.context_handle(ContextId(1)).expect("there are two");
    /// let urgent = Fifo::open(second, FifoOptions { priority: true, ..FifoOptions::default() }).await?;
    /// // It takes messages of its own context only.
    /// urgent.send(&note.through(second), job.rank(), "first").await?;
    /// assert!(urgent.send(&note, job.rank(), "of another one").await.is_err());
    /// assert_eq!(notes.recv().await.map(|message| message.text()).as_deref(), Some("first"));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn open(handle: &Handle, options: FifoOptions) -> Result<Fifo, PatternError> {
        if handle.is_closed() {
            return Err(Fault::Shutdown.into());
        }
        let owner = handle.clone();
        let posted = handle.post(move |scope: &mut Scope<'_>| {
            Ok(Fifo(Arc::new(Inner { handle: owner, id: scope.open_fifo(options)? })))
        });
        std::future::poll_fn(|cx| posted.poll(cx)).await
    }

    pub(crate) fn id(&self) -> FifoId {
        self.0.id
    }

    async fn ask<R: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Scope<'_>, FifoId) -> R + Send + 'static,
    ) -> R {
        let id = self.0.id;
        let posted = self.0.handle.post(move |scope: &mut Scope<'_>| ask(scope, id));
        std::future::poll_fn(|cx| posted.poll(cx)).await
    }

    async fn wait(&self, pending: impl IntoIterator<Item = Pending>) -> Result<(), Fault> {
        for mut pending in pending {
            std::future::poll_fn(|cx| pending.poll(&self.0.handle, cx)).await?;
        }
        Ok(())
    }

    /// Sends a message through it. Ready when the message is on its way; before that the engine keeps its payload. Sends that are under
    /// way at once go in the order in which they were first polled, but for one that waits for credit: those of other protocols, and to
    /// other ranks, pass it.
    ///
    /// # Errors
    /// If the message belongs to another context, the FIFO takes nothing, or the send fails.
    ///
    /// # Cancel safety
    /// Dropped before it was polled, or while it waits for credit or a place, nothing is sent, unless another thread used the
    /// context when it was polled first, or owns it: then it may have been handed over. Dropped later, the message goes on.
    pub async fn send<F: Face>(
        &self,
        message: &ActiveMessage<F>,
        target: Rank,
        payload: impl Into<Buffer>,
    ) -> Result<(), PatternError> {
        self.send_with_info(message, target, &[], payload).await
    }

    /// The same with message info: up to 112 bytes that travel beside the payload.
    ///
    /// # Errors
    /// As for [`send`](Self::send), and if the info is too long.
    ///
    /// # Cancel safety
    /// As for [`send`](Self::send).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let (part, mut parts) = job.stream("part")?;
    /// let fifo = job.fifo(FifoOptions::default()).await?;
    /// for number in 0..3_u8 {
    ///     fifo.send_with_info(&part, job.rank(), &[number], vec![number; 10_000]).await?;
    /// }
    /// // What goes through one FIFO stays in its order.
    /// for number in 0..3_u8 {
    ///     let message = parts.recv().await.expect("the job goes on");
    ///     assert_eq!((message.info(), message.read(9_999)), (&[number][..], Some(number)));
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn send_with_info<F: Face>(
        &self,
        message: &ActiveMessage<F>,
        target: Rank,
        info: &[u8],
        payload: impl Into<Buffer>,
    ) -> Result<(), PatternError> {
        let (theirs, ours) = (message.face().shared(), &self.0.handle);
        if !SharedArc::ptr_eq(theirs, ours.shared_state()) {
            let (ours, theirs) = (ours.me().context, theirs.me().context);
            return Err(PatternError::OtherContext { subject: "the message", ours, theirs });
        }
        let target = Endpoint::new(target, self.0.handle.me().context);
        let (protocol, id) = (message.id(), self.0.id);
        let (info, payload): (Box<[u8]>, _) = (info.into(), payload.into().into_bytes());
        let owner = self.0.handle.clone();
        let posted = self.0.handle.post(move |scope: &mut Scope<'_>| {
            let args = SendArgs { target, protocol, cookie: 0, info: &info, relaxed: true };
            let pending = |ticket| Pending::new(owner, ticket, None);
            match scope.give_through(id, &args, posthaste_core::Payload::Owned(payload))? {
                Ok(Given::Done) => Ok(None),
                Ok(Given::Queued(ticket)) => Ok(Some((pending(ticket), None))),
                Ok(Given::Kept(ticket, deposit)) => Ok(Some((pending(ticket), Some(deposit)))),
                Err((error, _)) => Err(PatternError::from(error)),
            }
        });
        // Dropped from the last to the first: a message is taken back before its operation is given up.
        let Some((mut pending, _deposit)) = std::future::poll_fn(|cx| posted.poll(cx)).await? else {
            return Ok(());
        };
        let ended = std::future::poll_fn(|cx| pending.poll(&self.0.handle, cx)).await;
        ended.map_err(SendError::from)?;
        Ok(())
    }

    /// Records a pattern whose replays go through this FIFO: all of them in its order.
    ///
    /// # Errors
    /// As for [`record`](crate::pattern::record).
    ///
    /// # Cancel safety
    /// Cancel safe: what was recorded is freed again.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let (window, source) = (job.shmalloc::<u8>(1 << 16).await?, job.region(1 << 16).await?);
    /// let fifo = job.fifo(FifoOptions { quantum: 8 << 10, ..FifoOptions::default() }).await?;
    /// // A large put that lets others pass after every 8 KiB.
    /// let pattern = fifo.record(|recorder| recorder.put(&window, job.rank(), 0, &source)).await?;
    /// source.write(65_535, &[9])?;
    /// pattern.replay().await?;
    /// assert_eq!(window.load(65_535), Some(9));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn record(
        &self,
        recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
    ) -> Result<Pattern, PatternError> {
        record_on(&self.0.handle, Some(self.clone()), recording, |_, _| ()).await.map(|(pattern, ())| pattern)
    }

    /// What it is like now: slots, head and tail, and its flags.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let fifo = job.fifo(FifoOptions { slots: 100, ..FifoOptions::default() }).await?;
    /// let status = fifo.status().await?;
    /// assert_eq!((status.capacity, status.len), (128, 0)); // a power of two
    /// assert!(status.active && status.enabled && !status.is_full());
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn status(&self) -> Result<FifoStatus, PatternError> {
        Ok(self.ask(|scope, id| scope.fifo_status(id)).await?)
    }

    /// Waits until all is out that is in it now.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let (note, mut notes) = job.stream("note")?;
    /// let fifo = job.fifo(FifoOptions::default()).await?;
    /// let (sent, drained) = tokio::join!(fifo.send(&note, job.rank(), vec![1; 100_000]), fifo.drain());
    /// sent?;
    /// drained?;
    /// assert_eq!(fifo.status().await?.len, 0);
    /// assert_eq!(notes.recv().await.map(|message| message.len()), Some(100_000));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn drain(&self) -> Result<(), PatternError> {
        let owner = self.0.handle.clone();
        let pending = self.ask(move |scope, id| {
            let pending = |ticket| Pending::new(owner.clone(), ticket, None);
            Ok::<Vec<Pending>, Fault>(scope.drain_fifos(Some(id), None)?.into_iter().map(pending).collect())
        });
        let pending = pending.await?;
        Ok(self.wait(pending).await?)
    }

    /// Sets how many free slots count as "room again", and clears the flag that says so.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn set_threshold(&self, free_slots: usize) -> Result<(), PatternError> {
        let set = move |scope: &mut Scope<'_>, id| {
            scope.set_fifo_threshold(id, free_slots)?;
            scope.clear_fifo_crossed(id)
        };
        Ok(self.ask(set).await?)
    }

    /// Clears the sticky flag that the free space has grown to the threshold.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn clear_crossed(&self) -> Result<(), PatternError> {
        Ok(self.ask(|scope, id| scope.clear_fifo_crossed(id)).await?)
    }

    /// Waits until the free space has grown to the threshold since the flag was cleared. A FIFO without one, as
    /// [`FifoOptions`] have it, or with one of 0, never does: there is always as much.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let (note, _notes) = job.stream("note")?;
    /// let fifo = job.fifo(FifoOptions { slots: 16, ..FifoOptions::default() }).await?;
    /// fifo.set_enabled(false).await?; // so that what is put in stays there
    /// fifo.set_threshold(16).await?;
    /// let sent = fifo.send(&note, job.rank(), "waits");
    /// let room = async {
    ///     fifo.set_enabled(true).await?;
    ///     fifo.crossed().await // all sixteen slots are free again
    /// };
    /// let (sent, room) = tokio::join!(sent, room);
    /// sent?;
    /// room?;
    /// assert!(fifo.status().await?.crossed);
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn crossed(&self) -> Result<(), PatternError> {
        let owner = self.0.handle.clone();
        let crossing = self.ask(move |scope, id| {
            let ticket = scope.fifo_crossing(id)??;
            Ok::<_, PatternError>(ticket.map(|ticket| Pending::new(owner, ticket, None)))
        });
        let crossing = crossing.await?;
        Ok(self.wait(crossing).await?)
    }

    /// Has it served, or not for now: what is put in waits then, but for a long message that has begun, which goes on to its end.
    /// A [`fence`](crate::flush::fence) waits for what is in it, too.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn set_enabled(&self, enabled: bool) -> Result<(), PatternError> {
        Ok(self.ask(move |scope, id| scope.enable_fifo(id, enabled)).await?)
    }

    /// Lets it take messages and replays again.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn activate(&self) -> Result<(), PatternError> {
        Ok(self.ask(|scope, id| scope.activate_fifo(id, true)).await?)
    }

    /// Lets it take nothing any more; only when it is empty. A send that is under way and waits for credit goes through it still.
    ///
    /// # Errors
    /// If it is not, or its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::FifoOptions;
    /// let (note, mut notes) = job.stream("note")?;
    /// let fifo = job.fifo(FifoOptions::default()).await?;
    /// fifo.deactivate().await?;
    /// assert!(fifo.send(&note, job.rank(), "refused").await.is_err());
    /// fifo.activate().await?;
    /// fifo.send(&note, job.rank(), "taken").await?;
    /// assert_eq!(notes.recv().await.map(|message| message.text()).as_deref(), Some("taken"));
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn deactivate(&self) -> Result<(), PatternError> {
        Ok(self.ask(|scope, id| scope.activate_fifo(id, false)).await?)
    }
}
