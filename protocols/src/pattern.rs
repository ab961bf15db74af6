//! Recorded patterns: what is done again and again is worked out once (D26, D28).

use crate::operation::Pending;
use crate::window::{Memory, Part, Region};
use posthaste_core::context::{Face, Posted};
use posthaste_core::descriptor::{Descriptor, Op, SourceKind};
use posthaste_core::engine::{PatternError, ReplayStart, Scope};
use posthaste_core::{Fault, Handle, PatternId};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use tokio::task::coop::poll_proceed;

/// Collects operations instead of carrying them out.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u64>(8).await?;
/// let source = job.region(64).await?;
/// let pattern = job
///     .record(|recorder| {
///         window.record_put(recorder, job.rank(), 0, &source)?;
///         window.record_put_from(recorder, job.rank(), 7, &source, 8, 8)?;
///         assert_eq!(recorder.len(), 2);
///         Ok::<_, posthaste::RmaError>(())
///     })
///     .await?;
/// assert_eq!((pattern.messages(), pattern.bytes()), (2, 72));
/// # job.leave().await
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Recorder {
    descriptors: Vec<Descriptor>,
    windows: Vec<Arc<Memory>>,
    regions: Vec<Region>,
    bytes: u64,
}

impl Recorder {
    /// Records a put of part of a region.
    pub(crate) fn put(
        &mut self,
        memory: &Arc<Memory>,
        part: &Part,
        offset: u64,
        source: &Region,
        first: u64,
        len: u64,
    ) {
        self.descriptors.push(Descriptor {
            op: Op::Put,
            source_kind: SourceKind::Region,
            rank: part.rank,
            context: memory.handle.me().context,
            region: part.remote as u32,
            len,
            offset,
            source: [source.local_key() as u64, first],
            ..Descriptor::default()
        });
        self.bytes += len;
        if !self.windows.iter().any(|other| Arc::ptr_eq(other, memory)) {
            self.windows.push(memory.clone());
        }
        if !self.regions.iter().any(|other| other.local_key() == source.local_key()) {
            self.regions.push(source.clone());
        }
    }

    /// Number of operations so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.descriptors.len()
    }

    /// Whether nothing was recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.descriptors.is_empty()
    }
}

/// A recorded pattern of puts. Peers, sizes and places are fixed by the recording; the payload is read afresh from its
/// regions at each replay. Dropping it unregisters it.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u64>(4).await?;
/// let source = job.region(8).await?;
/// let right = job.rank().next(job.size());
/// let ring = job.record(|recorder| window.record_put(recorder, right, 2, &source)).await?;
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
    windows: Vec<Arc<Memory>>,
    /// Kept alive for the recorded descriptors.
    _regions: Vec<Region>,
    messages: usize,
    bytes: u64,
}

/// Records what the closure does with the recorder; nothing is carried out.
///
/// # Errors
/// If the closure fails, or records nothing.
pub async fn record<E>(
    handle: &Handle,
    recording: impl FnOnce(&mut Recorder) -> Result<(), E>,
) -> Result<Pattern, PatternError>
where
    PatternError: From<E>,
{
    let mut recorder = Recorder::default();
    recording(&mut recorder)?;
    let Recorder { descriptors, windows, regions, bytes } = recorder;
    let messages = descriptors.len();
    let posted = handle.post(move |scope: &mut Scope<'_>| scope.store_pattern(descriptors));
    let id = std::future::poll_fn(|cx| posted.poll(cx)).await?;
    Ok(Pattern { handle: handle.clone(), id, windows, _regions: regions, messages, bytes })
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

    /// Carries the pattern out once more. Ready when everything is at its targets; [`Replay::local`] is the earlier
    /// stage.
    ///
    /// # Cancel safety
    /// See [`Replay`].
    #[inline]
    pub fn replay(&self) -> Replay<'_, Handle> {
        Replay { pattern: self, face: &self.handle, state: State::Start }
    }

    /// The same through an owned context, which must be the one that recorded it.
    pub fn replay_on<'p, F: Face>(&'p self, face: &'p F) -> Replay<'p, F> {
        Replay { pattern: self, face, state: State::Start }
    }
}

impl Drop for Pattern {
    fn drop(&mut self) {
        let id = self.id;
        self.handle.post_run(move |scope| scope.unregister_pattern(id));
    }
}

#[derive(Debug)]
enum State {
    Start,
    Posted(Posted<Result<Vec<Pending>, PatternError>>),
    Waiting(Vec<Pending>),
    Done,
}

/// A replay.
///
/// # Cancel safety
/// Dropped before it was polled, nothing is done. Dropped later, the replay goes on to its end.
#[must_use = "a replay does nothing until it is awaited"]
#[derive(Debug)]
pub struct Replay<'p, F: Face> {
    pattern: &'p Pattern,
    face: &'p F,
    state: State,
}

impl<F: Face> Unpin for Replay<'_, F> {}

fn start(scope: &mut Scope<'_>, id: PatternId, handle: &Handle) -> Result<Vec<Pending>, PatternError> {
    match scope.replay(id)? {
        ReplayStart::Done => Ok(Vec::new()),
        ReplayStart::Queued(tickets) => {
            Ok(tickets.into_iter().map(|ticket| Pending::new(handle.clone(), ticket, None, None)).collect())
        }
    }
}

impl<F: Face> Replay<'_, F> {
    fn start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), PatternError>> {
        if let State::Start = self.state {
            let coop = ready!(poll_proceed(cx));
            // Once per replay, not once per operation.
            for window in &self.pattern.windows {
                if !window.alive.load(Ordering::Relaxed) {
                    return Poll::Ready(Err(posthaste_core::RmaError::NoSuchWindow(window.id).into()));
                }
            }
            let (id, handle) = (self.pattern.id, &self.pattern.handle);
            self.state = match self.face.enter(|engine| start(&mut engine.scope(), id, handle)) {
                Ok(started) => State::waiting(started?),
                Err(_) => {
                    let handle = handle.clone();
                    State::Posted(self.face.post(move |scope: &mut Scope<'_>| start(scope, id, &handle)))
                }
            };
            coop.made_progress();
        }
        if let State::Posted(posted) = &self.state {
            self.state = State::waiting(ready!(posted.poll(cx))?);
        }
        Poll::Ready(Ok(()))
    }

    /// The earlier stage: ready when the replay is started and holds its place in the order, with the future of the
    /// later one. The regions are reusable only after that.
    ///
    /// # Errors
    /// If the pattern cannot be replayed.
    ///
    /// # Cancel safety
    /// As for the replay itself.
    pub async fn local(mut self) -> Result<Self, PatternError> {
        std::future::poll_fn(|cx| self.start(cx)).await?;
        Ok(self)
    }
}

impl State {
    fn waiting(pending: Vec<Pending>) -> State {
        if pending.is_empty() { State::Done } else { State::Waiting(pending) }
    }
}

impl<F: Face> Future for Replay<'_, F> {
    type Output = Result<(), PatternError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(self.start(cx)?);
        let this = &mut *self;
        if let State::Waiting(pending) = &mut this.state {
            while let Some(last) = pending.last_mut() {
                let outcome: Result<_, Fault> = ready!(last.poll(this.face, cx));
                pending.pop();
                if let Err(fault) = outcome {
                    return Poll::Ready(Err(fault.into()));
                }
            }
        }
        this.state = State::Done;
        Poll::Ready(Ok(()))
    }
}
