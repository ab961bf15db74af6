//! Multisend: many messages in one call (D18, D19), the backbone of collective operations.
//!
//! All messages of a call are handed to the devices in one go, under one take of the progress token; what has no room then
//! waits by itself, and one future stands for all.

mod connection;
mod many;
mod recording;

pub use connection::{Connection, ConnectionManager};
pub use many::{ManyToMany, Part, ReceiveMany, Received, SendMany};
pub use recording::RestartableSend;

use crate::buffer::Buffer;
use crate::operation::Pending;
use crate::send::{Envelope, Handed, Step, own, start};
use crate::within::Alarm;
use bytes::Bytes;
use posthaste_core::budget;
use posthaste_core::context::{Face, Posted};
use posthaste_core::engine::{Deposit, Scope, Whole};
use posthaste_core::{Endpoint, Fault, Handle, ProtocolId, Rank, SendError};
use smallvec::SmallVec;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thiserror::Error;

/// What one more target costs, in nanoseconds.
const TARGET: u32 = 16;
/// Targets of a multicast that need no allocation.
const FEW: usize = 8;

/// Some messages of a multisend could not be sent; all others were.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::Rank;
/// let (news, mut all) = job.stream("news")?;
/// // The second rank does not exist; the first gets its message all the same.
/// let error = news.multicast([job.rank(), Rank(1000)], "news").await.unwrap_err();
/// assert_eq!((error.failed.len(), error.failed[0].0, error.total), (1, Rank(1000), 2));
/// assert!(all.recv().await.is_some());
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{} of {total} messages could not be sent{}", .failed.len(), first_of(.failed))]
pub struct MultisendError {
    /// Whose could not, and why; at least one.
    pub failed: Vec<(Rank, SendError)>,
    /// Messages of the call.
    pub total: usize,
}

/// The first of those that failed, unless the caller has taken all of them out.
fn first_of(failed: &[(Rank, SendError)]) -> String {
    failed.first().map_or_else(String::new, |(rank, error)| format!(": that to rank {rank} because {error}"))
}

/// One message of the call.
#[derive(Debug)]
struct Leg {
    target: Rank,
    payload: Bytes,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// Taken back when it is given up; none of what was.
    Posted {
        posted: Posted<Option<Step>>,
        _handed: Handed<Bytes>,
    },
    Queued(Pending),
    /// The engine has it until there is credit and room. It is taken back before its operation is given up.
    Kept {
        _deposit: Deposit,
        pending: Pending,
    },
    Over,
}

impl Stage {
    fn of(step: Step) -> Result<Stage, SendError> {
        match step {
            Step::Done => Ok(Stage::Over),
            Step::Queued(pending) => Ok(Stage::Queued(pending)),
            Step::Kept(deposit, pending) => Ok(Stage::Kept { _deposit: deposit, pending }),
            Step::Failed(error) => Err(error),
        }
    }
}

/// Many messages under way. Ready when every source is reusable and every message is on its way, or failed.
///
/// # Cancel safety
/// Dropped before it was polled, nothing is sent. Dropped later, what is on its way or queued goes on, and messages that
/// still waited for credit or room are not sent.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use std::time::Duration;
/// let (news, mut all) = job.stream("news")?;
/// news.multicast(job.ranks(), "for all").info(b"v2").deadline(Duration::from_secs(5)).await?;
/// let message = all.recv().await.expect("the job goes on");
/// assert_eq!((message.text().as_str(), message.info()), ("for all", &b"v2"[..]));
/// # job.leave().await
/// # }
/// ```
#[must_use = "a multisend does nothing until it is awaited"]
#[derive(Debug)]
pub struct Multisend<'f, F: Face> {
    face: &'f F,
    protocol: ProtocolId,
    /// The protocol's own, with all of them.
    cookie: u64,
    info: Option<Box<[u8]>>,
    /// The payload of a multicast that was not begun yet: one word, or
    word: Option<u64>,
    /// anything else.
    payload: Option<Buffer>,
    /// To whom it goes: as a rule few enough to need no allocation.
    targets: SmallVec<[Rank; FEW]>,
    total: usize,
    legs: Option<Box<Legs>>,
}

/// What could not be sent at once.
#[derive(Debug, Default)]
struct Legs {
    legs: Vec<Leg>,
    deadline: Option<Alarm>,
    failed: Vec<(Rank, SendError)>,
}

impl Legs {
    /// Starts a message the general way.
    fn start(
        &mut self,
        scope: &mut Scope<'_>,
        envelope: &mut Envelope,
        cookie: u64,
        target: Rank,
        payload: &Bytes,
        handle: impl FnOnce() -> Handle,
    ) {
        match Stage::of(begin(scope, envelope, cookie, target, payload.clone(), handle)) {
            Ok(Stage::Over) => {}
            Ok(stage) => self.legs.push(Leg { target, payload: payload.clone(), stage }),
            Err(error) => self.failed.push((target, error)),
        }
    }

    /// Another thread is at the engine: a message is to be started later.
    fn put_off(&mut self, target: Rank, payload: Bytes) {
        self.legs.push(Leg { target, payload, stage: Stage::Start });
    }
}

// Nothing in it is ever pinned.
impl<F: Face> Unpin for Multisend<'_, F> {}

/// As `collect`, for few: a vector that may have to grow at each step takes twice as long.
#[inline(always)]
fn collected(mut targets: impl Iterator<Item = Rank>) -> SmallVec<[Rank; FEW]> {
    let mut few = [Rank(0); FEW];
    let mut count = 0;
    while count < FEW {
        let Some(target) = targets.next() else { return SmallVec::from_buf_and_len(few, count) };
        few[count] = target;
        count += 1;
    }
    let mut all = SmallVec::from_buf(few);
    all.extend(targets);
    all
}

fn begin(
    scope: &mut Scope<'_>,
    envelope: &mut Envelope,
    cookie: u64,
    target: Rank,
    payload: Bytes,
    handle: impl FnOnce() -> Handle,
) -> Step {
    envelope.target.rank = target;
    let mut buffer = Some(Buffer::from(payload));
    own(start(scope, envelope, cookie, &mut buffer), handle, None)
}

impl<'f, F: Face> Multisend<'f, F> {
    /// So many messages that are still to be [sent](Self::send_each).
    #[inline]
    pub(crate) fn new(face: &'f F, protocol: ProtocolId, cookie: u64, total: usize) -> Self {
        let (info, word, payload, targets) = (None, None, None, SmallVec::new());
        Self { face, protocol, cookie, info, word, payload, targets, total, legs: None }
    }

    /// Sends, under one take of the token, each of these ranks a message of its own: in the shortest way where nothing stands
    /// in that of a single packet, else as far as it gets. True: nobody is left.
    #[inline]
    pub(crate) fn send_each(&mut self, messages: Vec<(Rank, Bytes)>) -> bool {
        let (face, protocol, cookie) = (self.face, self.protocol, self.cookie);
        let mut envelope = self.envelope();
        let Endpoint { context, .. } = envelope.target;
        let legs = &mut self.legs;
        let entered = face.enter(|engine| {
            let mut scope = engine.scope();
            for (target, payload) in &messages {
                let to = Endpoint::new(*target, context);
                // What is queued, or waits for room, has what comes behind it for the same rank wait, too.
                if !scope.send_on_credit(to, protocol, cookie, Whole::Owned(payload)) {
                    let (legs, handle) = (legs.get_or_insert_default(), || Handle::of(face));
                    legs.start(&mut scope, &mut envelope, cookie, *target, payload, handle);
                }
            }
        });
        if entered.is_err() {
            let legs = self.legs.get_or_insert_default();
            messages.into_iter().for_each(|(target, payload)| legs.put_off(target, payload));
            return false;
        }
        let len = messages.iter().map(|(_, payload)| payload.len()).sum();
        budget::spend_on(budget::MESSAGE + TARGET.saturating_mul(messages.len() as u32), len);
        !self.legs.as_ref().is_some_and(|legs| !legs.legs.is_empty() || !legs.failed.is_empty())
    }

    /// The same message to each of these ranks. Always made in place: to be moved, it would wait for its own stores.
    #[inline(always)]
    pub(crate) fn multicast(
        face: &'f F,
        protocol: ProtocolId,
        targets: impl IntoIterator<Item = Rank>,
        payload: Buffer,
    ) -> Self {
        let targets = collected(targets.into_iter());
        let total = targets.len();
        let word = payload.word();
        let payload = if word.is_none() { Some(payload) } else { None };
        Self { face, protocol, cookie: 0, info: None, word, payload, targets, total, legs: None }
    }

    /// Adds message info to all of them: up to 112 bytes that travel beside the payload. Once it was polled, this changes
    /// nothing.
    pub fn info(mut self, info: &[u8]) -> Self {
        // What has begun goes on as it is.
        if self.word.is_some() || self.payload.is_some() {
            self.info = Some(info.into());
        }
        self
    }

    /// Ends the wait after this time, counted from this call: what is not on its way by then has failed with [`Fault::DeadlineExceeded`], and may
    /// still arrive if it was queued already.
    pub fn deadline(mut self, after: Duration) -> Self {
        let at = Handle::of(self.face).deadline_after(after);
        self.legs.get_or_insert_default().deadline = Some(Alarm::new(at));
        self
    }

    fn envelope(&self) -> Envelope {
        let me = self.face.shared().me();
        Envelope { target: me, protocol: self.protocol, info: self.info.clone(), relaxed: false }
    }

    /// Sends a multicast to all to whom nothing stands in the way, which as a rule is to all. True: nobody is left.
    #[inline]
    fn multicast_at_once(&mut self) -> bool {
        let Multisend { face, protocol, info, word, payload, targets, .. } = self;
        let (context, protocol) = (face.shared().me().context, *protocol);
        let left = match (word, payload) {
            _ if info.is_some() => return false,
            (Some(word), _) => {
                face.enter(|engine| engine.scope().multicast_word(targets, context, protocol, *word)).ok()
            }
            (None, Some(payload)) if !payload.is_loan() => {
                let whole = payload.whole();
                face.enter(|engine| engine.scope().multicast_packet(targets, context, protocol, whole)).ok()
            }
            _ => return false,
        };
        // None: another thread is at the engine, and nobody was sent anything.
        let Some(left) = left else { return false };
        targets.truncate(left);
        if left > 0 {
            return false;
        }
        (self.word, self.payload) = (None, None);
        true
    }

    /// Those whom a multicast did not reach at once become legs.
    #[cold]
    fn make_legs(&mut self) {
        let word = self.word.take().map(|word| Bytes::copy_from_slice(&word.to_ne_bytes()));
        // A loan belongs to one message: its bytes are copied.
        let Some(bytes) = word.or_else(|| self.payload.take().map(Buffer::into_bytes)) else { return };
        let mut envelope = self.envelope();
        let (face, targets) = (self.face, std::mem::take(&mut self.targets));
        let (cookie, legs) = (self.cookie, self.legs.get_or_insert_default());
        let entered = face.enter(|engine| {
            engine.scope().multicast(|scope| {
                for &target in &targets {
                    legs.start(scope, &mut envelope, cookie, target, &bytes, || Handle::of(face));
                }
            });
        });
        if entered.is_err() {
            targets.into_iter().for_each(|target| legs.put_off(target, bytes.clone()));
        }
    }

    /// Hands what can start to the engine, all under one take of the token.
    fn begin(&mut self) {
        self.make_legs();
        let starts = |leg: &Leg| matches!(leg.stage, Stage::Start);
        if !self.legs.as_ref().is_some_and(|legs| legs.legs.iter().any(starts)) {
            return;
        }
        let mut envelope = self.envelope();
        let (face, cookie) = (self.face, self.cookie);
        let Legs { legs, failed, .. } = &mut **self.legs.get_or_insert_default();
        let entered = face.enter(|engine| {
            let mut scope = engine.scope();
            for leg in legs.iter_mut().filter(|leg| starts(leg)) {
                let (target, payload, handle) = (leg.target, leg.payload.clone(), || Handle::of(face));
                let step = begin(&mut scope, &mut envelope, cookie, target, payload, handle);
                leg.stage = Stage::of(step).unwrap_or_else(|error| {
                    failed.push((leg.target, error));
                    Stage::Over
                });
            }
        });
        if entered.is_ok() {
            return;
        }
        for leg in legs.iter_mut().filter(|leg| starts(leg)) {
            let (mut envelope, handle) = (envelope.clone(), Handle::of(face));
            let target = leg.target;
            let (handed, theirs) = Handed::over(Some(leg.payload.clone()));
            let posted = move |scope: &mut Scope<'_>| {
                let payload = theirs.take()?;
                Some(begin(scope, &mut envelope, cookie, target, payload, || handle))
            };
            leg.stage = Stage::Posted { posted: face.post(posted), _handed: handed };
        }
    }
}

/// Looks after a message; what it comes to.
fn look<F: Face>(face: &F, leg: &mut Leg, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
    match &mut leg.stage {
        Stage::Start => Poll::Ready(Ok(())),
        Stage::Over => Poll::Ready(Ok(())),
        Stage::Posted { posted, .. } => posted.poll(cx).map(|step| {
            leg.stage = step.map_or(Ok(Stage::Over), Stage::of)?;
            Ok(())
        }),
        Stage::Queued(pending) | Stage::Kept { pending, .. } => pending.poll(face, cx).map(|outcome| {
            leg.stage = Stage::Over;
            outcome.map(|_| ()).map_err(SendError::from)
        }),
    }
}

impl<F: Face> Future for Multisend<'_, F> {
    type Output = Result<(), MultisendError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Whoever only sends lets other tasks of the runtime have their turn now and then.
        ready!(budget::proceed(cx));
        let (len, targets) = (self.payload.as_ref().map_or(0, Buffer::len), self.targets.len());
        if self.multicast_at_once() {
            budget::spend_on(budget::MESSAGE + TARGET.saturating_mul(targets as u32), len);
            return Poll::Ready(Ok(()));
        }
        let polled = self.go_on(cx);
        if polled.is_ready() {
            budget::spend(budget::WAIT);
        }
        polled
    }
}

impl<F: Face> Multisend<'_, F> {
    #[inline(never)]
    fn go_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), MultisendError>> {
        loop {
            self.begin();
            let face = self.face;
            let Some(parts) = self.legs.as_deref_mut() else { return Poll::Ready(Ok(())) };
            let Legs { legs, failed, deadline } = parts;
            let mut again = false;
            legs.retain_mut(|leg| match look(face, leg, cx) {
                Poll::Pending => true,
                Poll::Ready(Ok(())) => {
                    let goes_on = !matches!(leg.stage, Stage::Over);
                    again |= goes_on;
                    goes_on
                }
                Poll::Ready(Err(error)) => {
                    failed.push((leg.target, error));
                    false
                }
            });
            if again {
                continue;
            }
            if !legs.is_empty() {
                let Some(deadline) = deadline else { return Poll::Pending };
                let fault = ready!(deadline.poll(face, cx));
                // Of those for which the task's turn was too short nobody has looked yet.
                let late = legs.drain(..).filter_map(|mut leg| match &mut leg.stage {
                    Stage::Queued(pending) | Stage::Kept { pending, .. } => {
                        let ended = pending.take_outcome().unwrap_or(Err(fault));
                        ended.err().map(|fault| (leg.target, fault.into()))
                    }
                    Stage::Start | Stage::Posted { .. } => Some((leg.target, fault.into())),
                    Stage::Over => None,
                });
                failed.extend(late);
            }
            return Poll::Ready(match std::mem::take(failed) {
                failed if failed.is_empty() => Ok(()),
                failed => Err(MultisendError { failed, total: self.total }),
            });
        }
    }
}

/// Why many-to-many was refused.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{ConnectionManager, ManyError, Part};
/// let connection = ConnectionManager::new(1).open().await;
/// let beyond = Part { source: job.rank(), offset: 6, len: 4 };
/// let refused = job.many_to_many().receive(connection.id(), 8, &[beyond]).unwrap_err();
/// assert_eq!(refused, ManyError::BadPart { part: 0, len: 8 });
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ManyError {
    /// The part of a source does not lie within the buffer, or overlaps that of another.
    #[error("part {part} is outside of the buffer of {len} bytes, or overlaps another")]
    BadPart {
        /// Which, as they were listed.
        part: usize,
        /// Length of the buffer in bytes.
        len: usize,
    },
    /// A source is named twice, or the job does not have it.
    #[error("rank {0} is named twice, or does not exist")]
    BadSource(Rank),
    /// Nothing came from a source.
    #[error("nothing came from rank {rank}: {fault}")]
    Missing {
        /// The source.
        rank: Rank,
        /// Why.
        fault: Fault,
    },
    /// What a source has sent is longer or shorter than its part.
    #[error("rank {rank} sent {len} bytes where its part has {expected}")]
    OtherLength {
        /// The source.
        rank: Rank,
        /// Bytes that it sent.
        len: usize,
        /// Bytes of its part.
        expected: usize,
    },
    /// The job was left, or there is no memory for the buffer.
    #[error(transparent)]
    Fault(#[from] Fault),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{first_of, operation, without_a_turn};
    use posthaste_core::{Messager, Value};

    /// Of messages that were queued it is told how they have ended, also if their time is up and the task has used up its turn.
    #[test]
    fn a_multisend_that_is_late_names_those_alone_that_are() {
        let client = first_of(1, 1);
        let handle = &client.contexts()[0];
        let leg = |target: u32, outcome: Option<Result<Value, Fault>>| {
            let pending = Pending::new(handle.clone(), operation(handle, outcome), None);
            Leg { target: Rank(target), payload: Bytes::new(), stage: Stage::Queued(pending) }
        };
        let lost = Fault::PeerLost(Rank(2));
        let legs = vec![leg(1, Some(Ok(Value::Unit))), leg(2, Some(Err(lost))), leg(3, None)];
        let deadline = Some(Alarm::new(handle.deadline_after(Duration::from_millis(1))));
        let mut sends = Multisend::new(handle, ProtocolId(16), 0, legs.len());
        sends.legs = Some(Box::new(Legs { legs, deadline, failed: Vec::new() }));
        std::thread::sleep(Duration::from_millis(20));
        without_a_turn(|cx| {
            let Poll::Ready(Err(error)) = sends.go_on(cx) else { panic!("its time is up") };
            let late = (Rank(3), SendError::Fault(Fault::DeadlineExceeded));
            assert_eq!(error.failed, [(Rank(2), SendError::Fault(lost)), late]);
        });
    }
}
