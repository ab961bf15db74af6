//! The future of a replay.

use super::Pattern;
use crate::fifo::Fifo;
use crate::operation::Pending;
use crate::window::Memory;
use posthaste_core::budget;
use posthaste_core::context::{Face, Posted};
use posthaste_core::descriptor::Info;
use posthaste_core::engine::{FifoId, PatternError, ReplayId, ReplayStart, Scope};
use posthaste_core::slot::Ticket;
use posthaste_core::sync::Arc as SharedArc;
use posthaste_core::{Fault, Handle, PatternId, SendError};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

#[derive(Debug)]
pub(super) enum State {
    Start,
    Posted(Posted<Result<State, PatternError>>),
    Waiting(Pending, ReplayId),
    Done,
}

/// A replay. Ready when all puts are at their targets, all gets are here and all messages are on their way. It is ordered as
/// any operation of its context. But while it waits for credit, messages of other protocols and accesses to memory pass it; while it
/// waits behind a replay that does, messages of any protocol do. One through a FIFO is ordered with what goes through that.
///
/// # Errors
/// If the pattern cannot be replayed: a window of it was freed, or it was recorded on another context. If a rank that it
/// touches is lost, it ends with that after what goes to the other ranks is done. Where a rank has more operations under way than
/// there are completion slots (two million), what goes to some ranks may be done when the rest is refused.
///
/// # Cancel safety
/// Dropped before it has started, nothing is done. That is by the first poll, unless its task has used up its
/// turn ([`tokio::task::coop`]). Dropped later, the replay goes on to its end; but what still waits for the credit of a receiver
/// when this rank leaves the job is given up, as a send that waits for it is.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (window, source) = (job.shmalloc::<u64>(1).await?, job.region(8).await?);
/// let pattern = job.record(|recorder| recorder.put(&window, job.rank(), 0, &source)).await?;
/// source.write(0, &1_u64.to_ne_bytes())?;
/// let first = pattern.replay().local().await?;
/// source.write(0, &2_u64.to_ne_bytes())?; // the first replay has read the region
/// let second = pattern.replay();
/// first.remote().await?; // and now it is at its target
/// second.await?; // means the same
/// assert_eq!(window.load(0), Some(2));
/// # job.leave().await
/// # }
/// ```
#[must_use = "a replay does nothing until it is awaited"]
#[derive(Debug)]
pub struct Replay<'p, F: Face> {
    pattern: &'p Pattern,
    face: &'p F,
    info: Option<Box<Result<Info, SendError>>>,
    state: State,
}

impl<F: Face> Unpin for Replay<'_, F> {}

/// What became of a replay that was begun.
enum Begun {
    Done,
    Queued,
    Refused,
}

/// The rest of it, which as a rule nobody asks for. It is not part of [`Begun`]: to move what was just made piece by piece is to
/// wait for these stores, and for those before them, which are to lines that others have.
#[derive(Default)]
struct Particulars {
    queued: Option<(Ticket, ReplayId)>,
    error: Option<PatternError>,
}

impl Particulars {
    #[inline]
    fn begin(
        &mut self,
        scope: &mut Scope<'_>,
        windows: &[Arc<Memory>],
        (id, fifo): (PatternId, Option<FifoId>),
        info: Option<&Info>,
    ) -> Begun {
        let begun = super::still_there(windows).and_then(|()| scope.replay_with(id, info, fifo));
        match begun {
            Ok(ReplayStart::Done) => Begun::Done,
            Ok(ReplayStart::Queued { ticket, replay }) => {
                self.queued = Some((ticket, replay));
                Begun::Queued
            }
            Err(error) => {
                self.error = Some(error);
                Begun::Refused
            }
        }
    }

    /// How a replay goes on that was begun.
    #[cold]
    fn state(self, handle: &Handle) -> Result<State, PatternError> {
        match (self.queued, self.error) {
            (_, Some(error)) => Err(error),
            (Some((ticket, replay)), None) => {
                Ok(State::Waiting(Pending::new(handle.clone(), ticket, None), replay))
            }
            (None, None) => Ok(State::Done),
        }
    }
}

impl Pattern {
    /// Begins a replay where the engine is entered already.
    pub(super) fn begin(&self, scope: &mut Scope<'_>) -> Result<State, PatternError> {
        let mut particulars = Particulars::default();
        particulars.begin(scope, &self.windows, (self.id, self.fifo.as_ref().map(Fifo::id)), None);
        particulars.state(&self.handle)
    }
}

impl<'p, F: Face> Replay<'p, F> {
    /// What is left of a replay that was begun.
    pub(super) fn begun(pattern: &'p Pattern, face: &'p F, state: State) -> Self {
        Replay { pattern, face, info: None, state }
    }

    #[inline]
    pub(super) fn new(pattern: &'p Pattern, face: &'p F) -> Self {
        Replay { pattern, face, info: None, state: State::Start }
    }

    /// New message info, up to 112 bytes, for this replay: all its messages carry it instead of what was recorded, but
    /// those of many-to-many, whose info names their connection.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (step, mut steps) = job.stream("step")?;
    /// let source = job.region(8).await?;
    /// let pattern = job.record(|recorder| recorder.send_with_info(&step, job.rank(), b"none", &source)).await?;
    /// pattern.replay().info(b"step 7").await?; // instead of what was recorded
    /// let message = steps.recv().await.expect("the job goes on");
    /// assert_eq!(message.info(), b"step 7");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn info(mut self, info: &[u8]) -> Self {
        self.info = Some(Box::new(Info::new(info).ok_or(SendError::InfoTooLong { len: info.len() })));
        self
    }

    #[inline]
    fn start(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), PatternError>> {
        if let State::Start = self.state {
            ready!(budget::proceed(cx));
            if !SharedArc::ptr_eq(self.face.shared(), self.pattern.handle.shared_state()) {
                return Poll::Ready(Err(self.elsewhere()));
            }
            let (id, handle) =
                ((self.pattern.id, self.pattern.fifo.as_ref().map(Fifo::id)), &self.pattern.handle);
            if self.info.is_some() {
                self.check_info()?;
            }
            let info = self.info.as_ref().and_then(|info| info.as_ref().as_ref().ok());
            let windows = &self.pattern.windows;
            let mut particulars = Particulars::default();
            let entered =
                self.face.enter(|engine| particulars.begin(&mut engine.scope(), windows, id, info)).ok();
            match entered {
                Some(Begun::Done) => self.state = State::Done,
                Some(_) => self.state = particulars.state(handle)?,
                None => {
                    let (handle, info, windows) =
                        (handle.clone(), info.copied(), self.pattern.windows.clone());
                    // What is done at once meanwhile at the memory that it puts to, or gets from, would overtake it.
                    let held: Vec<_> = windows.iter().map(|window| window.hold_all()).collect();
                    let start = move |scope: &mut Scope<'_>| {
                        let mut particulars = Particulars::default();
                        particulars.begin(scope, &windows, id, info.as_ref());
                        drop(held);
                        particulars.state(&handle)
                    };
                    self.state = State::Posted(self.face.post(start));
                }
            }
            budget::spend(budget::UNIT);
        }
        if let State::Posted(posted) = &self.state {
            let started = ready!(posted.poll(cx));
            self.state = State::Done;
            self.state = started?;
        }
        Poll::Ready(Ok(()))
    }

    /// Another context has patterns of the same names.
    #[cold]
    fn elsewhere(&self) -> PatternError {
        let (ours, theirs) = (self.face.shared().me().context, self.pattern.handle.me().context);
        PatternError::OtherContext { subject: "the pattern", ours, theirs }
    }

    #[cold]
    fn check_info(&self) -> Result<(), PatternError> {
        if let Some(Err(error)) = self.info.as_deref() {
            return Err(error.clone().into());
        }
        if self.pattern.open_infos == 0 { Err(PatternError::NoMessage) } else { Ok(()) }
    }

    /// The earlier stage: ready when the replay holds its place in the order and its regions may be changed again, with
    /// the future of the later stage. Memory that gets fill is here only at the later one.
    ///
    /// # Errors
    /// If the pattern cannot be replayed, or something of it could not be sent.
    ///
    /// # Cancel safety
    /// As for the replay itself.
    pub async fn local(mut self) -> Result<Self, PatternError> {
        std::future::poll_fn(|cx| self.start(cx)).await?;
        let State::Waiting(_, replay) = self.state else { return Ok(self) };
        let handle = self.pattern.handle.clone();
        let read = move |scope: &mut Scope<'_>| {
            let ticket = scope.replay_read(replay)?;
            Ok::<_, Fault>(ticket.map(|ticket| Pending::new(handle.clone(), ticket, None)))
        };
        let reading = match self.face.enter(|engine| read(&mut engine.scope())) {
            Ok(reading) => reading?,
            Err(_) => {
                let posted = self.face.post(read);
                std::future::poll_fn(|cx| posted.poll(cx)).await?
            }
        };
        if let Some(mut reading) = reading {
            std::future::poll_fn(|cx| reading.poll(self.face, cx)).await?;
        }
        // It may have ended before that was asked, and not well.
        if let State::Waiting(pending, _) = &mut self.state
            && let Some(outcome) = pending.take_outcome()
        {
            self.state = State::Done;
            outcome?;
        }
        Ok(self)
    }

    /// The later stage, which awaiting the replay itself means, too.
    ///
    /// # Errors
    /// As for the replay.
    ///
    /// # Cancel safety
    /// As for the replay itself.
    pub async fn remote(self) -> Result<(), PatternError> {
        self.await
    }
}

impl<F: Face> Future for Replay<'_, F> {
    type Output = Result<(), PatternError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(self.start(cx)?);
        let this = &mut *self;
        if let State::Waiting(pending, _) = &mut this.state {
            let outcome = ready!(pending.poll(this.face, cx));
            this.state = State::Done;
            outcome?;
        }
        Poll::Ready(Ok(()))
    }
}
