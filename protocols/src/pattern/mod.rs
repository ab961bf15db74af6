//! Recorded patterns: what is done again and again is worked out once (D25 to D31).

mod describe;
mod recorder;
mod replay;

pub use recorder::Recorder;
pub use replay::Replay;

use crate::fifo::Fifo;
use crate::window::Memory;
use posthaste_core::context::Face;
use posthaste_core::engine::{PatternError, Scope};
use posthaste_core::{Handle, PatternId};
use recorder::Keep;
use std::sync::Arc;

/// A recorded pattern. Peers, sizes and places are fixed by the recording; the payload is read afresh from its
/// regions at each replay. Dropping it unregisters it; replays that were started go on to their ends.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u64>(4).await?;
/// let source = job.region(8).await?;
/// let right = job.rank().next(job.size());
/// let ring = job.record(|r| r.put(&window, right, 2, &source)).await?;
/// for number in 0..1000u64 {
///     source.write(0, &number.to_ne_bytes())?;
///     ring.replay().await?;
/// }
/// assert_eq!(window.load(2), Some(999));
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct Pattern {
    handle: Handle,
    id: PatternId,
    windows: Box<[Arc<Memory>]>,
    /// It does not go through the FIFOs of its targets.
    fifo: Option<Fifo>,
    messages: usize,
    /// Messages whose info a replay may replace.
    open_infos: usize,
    bytes: u64,
}

/// Records what the closure does with the recorder; nothing is carried out.
///
/// # Errors
/// If the closure fails, or records nothing, or the context has no room for it.
///
/// # Cancel safety
/// Cancel safe: what was recorded is freed again.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste_protocols::pattern::record;
/// let (window, source) = (job.shmalloc::<u8>(64).await?, job.region(16).await?);
/// let pattern = record(job.handle(), |recorder| {
///     recorder.put(&window, job.rank(), 0, &source)?;
///     recorder.put(&window, job.rank(), 32, source.slice(0..8))
/// })
/// .await?;
/// assert_eq!((pattern.messages(), pattern.bytes()), (2, 24));
/// // Nothing recorded is nothing to replay.
/// assert!(record(job.handle(), |_| Ok(())).await.is_err());
/// # job.leave().await
/// # }
/// ```
pub async fn record(
    handle: &Handle,
    recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
) -> Result<Pattern, PatternError> {
    record_on(handle, None, recording, |_, _| ()).await.map(|(pattern, ())| pattern)
}

/// For what the library has under way of its own: its messages take no credit, and wait for no replay that waits for some.
pub(crate) async fn record_apart(
    handle: &Handle,
    recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
) -> Result<Pattern, PatternError> {
    let apart = |scope: &mut Scope<'_>, pattern: &Pattern| scope.stand_apart(pattern.id);
    record_on(handle, None, recording, apart).await.map(|(pattern, ())| pattern)
}

/// Records messages and sends them, ordered as one operation: behind all that was begun before, ahead of all that is begun later.
pub(crate) async fn record_and_replay(
    handle: &Handle,
    recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
) -> Result<Pattern, PatternError> {
    let (pattern, begun) = record_on(handle, None, recording, |scope, pattern| pattern.begin(scope)).await?;
    Replay::begun(&pattern, &pattern.handle, begun?).await?;
    Ok(pattern)
}

/// Stores what the closure records, and does that with it in the same step.
pub(crate) async fn record_on<T: Send + 'static>(
    handle: &Handle,
    fifo: Option<Fifo>,
    recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
    and: impl FnOnce(&mut Scope<'_>, &Pattern) -> T + Send + 'static,
) -> Result<(Pattern, T), PatternError> {
    let mut recorder = Recorder::new(handle);
    recording(&mut recorder)?;
    let Recorder { descriptors, keep, messages, open_infos, bytes, .. } = recorder;
    let Keep { windows, regions } = keep;
    let kept: Box<[Arc<Memory>]> = windows.clone().into();
    let theirs = handle.clone();
    let posted = handle.post(move |scope: &mut Scope<'_>| {
        let id = scope.store_pattern(descriptors, Box::new((kept, regions)))?;
        // An owner, so that it is freed if nobody waits for it any more.
        let windows = windows.into();
        let pattern = Pattern { handle: theirs, id, windows, fifo, messages, open_infos, bytes };
        let done = and(scope, &pattern);
        Ok((pattern, done))
    });
    std::future::poll_fn(|cx| posted.poll(cx)).await
}

impl Pattern {
    /// Its persistent id.
    #[must_use]
    pub fn id(&self) -> PatternId {
        self.id
    }

    /// Operations that one replay carries out.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// Bytes that one replay moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Carries the pattern out once more. Ready when all puts are at their targets, all gets are here and all messages are
    /// on their way; [`Replay::local`] is the earlier stage. Any number of replays may be under way.
    ///
    /// # Cancel safety
    /// See [`Replay`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (counts, source) = (job.shmalloc::<u64>(2).await?, job.region(8).await?);
    /// let step = job.record(|r| r.put_signal(&counts, job.rank(), 1, &source, counts.signal_add(0, 1))).await?;
    /// for number in [10_u64, 20, 30] {
    ///     source.write(0, &number.to_ne_bytes())?;
    ///     step.replay().await?; // the put and the signal have been done
    /// }
    /// assert_eq!(counts.to_vec(), [3, 30]);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn replay(&self) -> Replay<'_, Handle> {
        Replay::new(self, &self.handle)
    }

    /// The same through an owned context, which must be the one that recorded it.
    ///
    /// # Cancel safety
    /// As for [`replay`](Self::replay).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::ContextId;
    /// let (window, source) = (job.shmalloc::<u8>(8).await?, job.region(8).await?);
    /// let pattern = job.record(|recorder| recorder.put(&window, job.rank(), 0, &source)).await?;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// source.write(0, b"by owner")?;
    /// pattern.replay_on(&context).await?; // takes no lock
    /// assert_eq!(window.to_vec(), b"by owner");
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    #[inline]
    pub fn replay_on<'p, F: Face>(&'p self, face: &'p F) -> Replay<'p, F> {
        Replay::new(self, face)
    }
}

/// Whether a replay may still be started, as [`Memory::still_there`] says: once per replay, not once per operation.
fn still_there(windows: &[Arc<Memory>]) -> Result<(), PatternError> {
    windows.iter().try_for_each(|window| Ok(window.still_there()?))
}

impl Drop for Pattern {
    fn drop(&mut self) {
        let id = self.id;
        self.handle.post_run(move |scope| scope.unregister_pattern(id));
    }
}
