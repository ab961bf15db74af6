//! Multisend: many messages in one call (D18, D19), the backbone of collective operations.
//!
//! All messages of a call are handed to the devices in one go, under one take of the progress token; what has no room then
//! waits by itself, and one future stands for all.

mod connection;
mod many;

pub use connection::{Connection, ConnectionManager};
pub use many::{ManyToMany, Part, ReceiveMany, Received};

use crate::buffer::Buffer;
use crate::operation::Pending;
use crate::send::{Envelope, Step, own, start};
use bytes::Bytes;
use posthaste_core::context::{Face, Posted};
use posthaste_core::engine::{Scope, Wait};
use posthaste_core::{Endpoint, Fault, Handle, ProtocolId, Rank, SendError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use thiserror::Error;

/// Some messages of a multisend could not be sent; all others were.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{} of {total} messages could not be sent: that to rank {} because {}", .failed.len(), .failed[0].0, .failed[0].1)]
pub struct MultisendError {
    /// Whose could not, and why; at least one.
    pub failed: Vec<(Rank, SendError)>,
    /// Messages of the call.
    pub total: usize,
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
    Start(Wait),
    Posted(Posted<Step>),
    Queued(Pending),
    Later(Pending),
    Over,
}

impl Stage {
    fn of(step: Step) -> Result<Stage, SendError> {
        match step {
            Step::Done => Ok(Stage::Over),
            Step::Queued(pending) => Ok(Stage::Queued(pending)),
            Step::Later(pending) => Ok(Stage::Later(pending)),
            Step::Failed(error) => Err(error),
        }
    }
}

/// Many messages under way. Ready when every source is reusable and every message is on its way, or failed.
///
/// # Cancel safety
/// Dropped before it was polled, nothing is sent. Dropped later, what is on its way or queued goes on, and messages that
/// still waited for credit or room are not sent.
#[must_use = "a multisend does nothing until it is awaited"]
#[derive(Debug)]
pub struct Multisend<'f, F: Face> {
    face: &'f F,
    envelope: Envelope,
    /// One payload for these ranks, to none of which it was sent yet.
    multicast: Option<(Vec<Rank>, Buffer)>,
    legs: Vec<Leg>,
    failed: Vec<(Rank, SendError)>,
    total: usize,
}

// Nothing in it is ever pinned.
impl<F: Face> Unpin for Multisend<'_, F> {}

fn begin(
    scope: &mut Scope<'_>,
    envelope: &Envelope,
    target: Rank,
    payload: Bytes,
    wait: Wait,
    handle: impl FnOnce() -> Handle,
) -> Step {
    let envelope = Envelope { target: Endpoint::new(target, envelope.target.context), ..envelope.clone() };
    let mut buffer = Some(Buffer::from(payload));
    own(start(scope, &envelope, 0, &mut buffer, wait), handle, None)
}

impl<'f, F: Face> Multisend<'f, F> {
    /// A message to each of these ranks.
    pub(crate) fn new(
        face: &'f F,
        protocol: ProtocolId,
        messages: impl IntoIterator<Item = (Rank, Bytes)>,
    ) -> Self {
        let leg = |(target, payload)| Leg { target, payload, stage: Stage::Start(Wait::Await) };
        let legs: Vec<Leg> = messages.into_iter().map(leg).collect();
        let target = Endpoint::new(face.shared().me().rank, face.shared().me().context);
        let envelope = Envelope { target, protocol, info: None, relaxed: false };
        Self { face, envelope, multicast: None, total: legs.len(), legs, failed: Vec::new() }
    }

    /// The same message to each of these ranks.
    pub(crate) fn multicast(face: &'f F, protocol: ProtocolId, targets: Vec<Rank>, payload: Buffer) -> Self {
        // A loan belongs to one message.
        let payload = if payload.is_loan() { Buffer::from(payload.into_bytes()) } else { payload };
        let total = targets.len();
        Self { multicast: Some((targets, payload)), total, ..Self::new(face, protocol, []) }
    }

    /// Adds message info to all of them: up to 112 bytes that travel beside the payload.
    pub fn info(mut self, info: &[u8]) -> Self {
        self.envelope.info = Some(info.into());
        self
    }

    /// Sends a multicast to all to whom nothing stands in the way; the others become legs.
    fn begin_multicast(&mut self) {
        let Multisend { face, envelope, multicast, legs, failed, .. } = self;
        let Some((targets, payload)) = multicast else { return };
        let leg = |target, stage| Leg { target, payload: payload.to_bytes(), stage };
        let entered = face.enter(|engine| {
            engine.scope().multicast(|scope| {
                let (context, protocol) = (envelope.target.context, envelope.protocol);
                if envelope.info.is_none() {
                    let word = payload.word();
                    targets.retain(|&target| {
                        let target = Endpoint::new(target, context);
                        !match word {
                            Some(word) => scope.send_word(target, protocol, word),
                            None => scope.send_packet(target, protocol, payload.whole()),
                        }
                    });
                }
                if targets.is_empty() {
                    return;
                }
                let bytes = payload.to_bytes();
                for target in targets.drain(..) {
                    let handle = || Handle::of(*face);
                    match Stage::of(begin(scope, envelope, target, bytes.clone(), Wait::Await, handle)) {
                        Ok(Stage::Over) => {}
                        Ok(stage) => legs.push(leg(target, stage)),
                        Err(error) => failed.push((target, error)),
                    }
                }
            });
        });
        if entered.is_err() {
            legs.extend(targets.drain(..).map(|target| leg(target, Stage::Start(Wait::Await))));
        }
        *multicast = None;
    }

    /// Hands what can start to the engine, all under one take of the token.
    fn begin(&mut self) {
        if self.multicast.is_some() {
            self.begin_multicast();
        }
        let Multisend { face, envelope, legs, failed, .. } = self;
        if !legs.iter().any(|leg| matches!(leg.stage, Stage::Start(_))) {
            return;
        }
        let entered = face.enter(|engine| {
            let mut scope = engine.scope();
            for leg in legs.iter_mut() {
                let Stage::Start(wait) = leg.stage else { continue };
                let payload = leg.payload.clone();
                let step = begin(&mut scope, envelope, leg.target, payload, wait, || Handle::of(*face));
                leg.stage = Stage::of(step).unwrap_or_else(|error| {
                    failed.push((leg.target, error));
                    Stage::Over
                });
            }
        });
        if entered.is_ok() {
            return;
        }
        for leg in legs {
            let Stage::Start(wait) = leg.stage else { continue };
            let (envelope, handle) = (envelope.clone(), Handle::of(*face));
            let (target, payload) = (leg.target, leg.payload.clone());
            let posted =
                move |scope: &mut Scope<'_>| begin(scope, &envelope, target, payload, wait, || handle);
            leg.stage = Stage::Posted(face.post(posted));
        }
    }
}

/// Looks after a message; what it comes to.
fn look<F: Face>(face: &F, leg: &mut Leg, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
    match &mut leg.stage {
        Stage::Start(_) => Poll::Ready(Ok(())),
        Stage::Over => Poll::Ready(Ok(())),
        Stage::Posted(posted) => posted.poll(cx).map(|step| Stage::of(step).map(|stage| leg.stage = stage)),
        Stage::Queued(pending) => pending.poll(face, cx).map(|outcome| {
            leg.stage = Stage::Over;
            outcome.map(|_| ()).map_err(SendError::from)
        }),
        Stage::Later(pending) => {
            let outcome = std::task::ready!(pending.poll(face, cx));
            let wait = pending.wait.unwrap_or(Wait::Await);
            leg.stage = Stage::Over;
            Poll::Ready(match outcome {
                Ok(_) => {
                    leg.stage = Stage::Start(wait);
                    Ok(())
                }
                Err(fault) => Err(fault.into()),
            })
        }
    }
}

impl<F: Face> Future for Multisend<'_, F> {
    type Output = Result<(), MultisendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            this.begin();
            let Multisend { face, legs, failed, .. } = this;
            let mut again = false;
            legs.retain_mut(|leg| match look(*face, leg, cx) {
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
            if !again {
                break;
            }
        }
        if !this.legs.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(match std::mem::take(&mut this.failed) {
            failed if failed.is_empty() => Ok(()),
            failed => Err(MultisendError { failed, total: this.total }),
        })
    }
}

/// Why many-to-many was refused.
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
    /// The job was left.
    #[error(transparent)]
    Fault(#[from] Fault),
}
