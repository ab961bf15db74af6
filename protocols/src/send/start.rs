//! How a send is started: at once, or handed to the engine, with whom it belongs to from then on.

use crate::buffer::{Buffer, Unsent};
use crate::operation::Pending;
use posthaste_core::context::Face;
use posthaste_core::engine::{Deposit, Given, Payload, Scope, SendArgs, Sent, Wait};
use posthaste_core::{Endpoint, Fault, Handle, ProtocolId, Rank, SendError, TrySendError};

/// Everything of a send but its payload.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub target: Endpoint,
    pub protocol: ProtocolId,
    pub info: Option<Box<[u8]>>,
    pub relaxed: bool,
}

impl Envelope {
    #[inline]
    pub fn args(&self, cookie: u64) -> SendArgs<'_> {
        SendArgs {
            target: self.target,
            protocol: self.protocol,
            cookie,
            info: self.info.as_deref().unwrap_or_default(),
            relaxed: self.relaxed,
        }
    }
}

/// Starts a send; the buffer is taken unless it failed.
#[inline]
pub(crate) fn start(
    scope: &mut Scope<'_>,
    envelope: &Envelope,
    cookie: u64,
    buffer: &mut Option<Buffer>,
) -> Result<Given, SendError> {
    let args = envelope.args(cookie);
    let payload = buffer.take().ok_or(Fault::Shutdown)?;
    let (started, back) = payload.lend(|payload| match scope.give(&args, payload) {
        Ok(given) => (Ok(given), None),
        Err((error, payload)) => (Err(error), Some(Unsent::new(payload))),
    });
    *buffer = back;
    started
}

/// Sends at once or not at all.
#[inline]
pub(crate) fn try_now<F: Face>(
    face: &F,
    envelope: &Envelope,
    mut buffer: Buffer,
) -> Result<(), TrySendError<Buffer>> {
    if send_at_once(face, envelope, &mut buffer) {
        return Ok(());
    }
    try_slowly(face, envelope, buffer)
}

/// A message of one packet with nothing in its way. The buffer must not be sent again then.
#[inline]
pub(super) fn send_at_once<F: Face>(face: &F, envelope: &Envelope, buffer: &mut Buffer) -> bool {
    if envelope.info.is_some() {
        return false;
    }
    let (target, protocol) = (envelope.target, envelope.protocol);
    face.enter(|engine| at_once_in(&mut engine.scope(), target, protocol, buffer)).unwrap_or(false)
}

/// Sends if nothing at all stands in the way; if not, nothing was done.
#[inline]
pub(crate) fn at_once_in(
    scope: &mut Scope<'_>,
    target: Endpoint,
    protocol: ProtocolId,
    buffer: &mut Buffer,
) -> bool {
    if let Some(word) = buffer.word() {
        return scope.send_word(target, protocol, word);
    }
    let sent = scope.send_packet(target, protocol, buffer.whole());
    if sent {
        buffer.sent();
    }
    sent
}

#[cold]
fn try_slowly<F: Face>(face: &F, envelope: &Envelope, buffer: Buffer) -> Result<(), TrySendError<Buffer>> {
    let attempt =
        |scope: &mut Scope<'_>, buffer: &mut _| Ok(send_or_not(scope, envelope, 0, buffer)?.then_some(()));
    attempt_once(face, envelope.target.rank, buffer, attempt)
}

/// Has a buffer sent at once or not at all: `attempt` is made when the engine is free. It leaves the buffer where it is unless that
/// was sent; `None`: there is no room.
#[cold]
pub(crate) fn attempt_once<F: Face, R>(
    face: &F,
    rank: Rank,
    buffer: Buffer,
    mut attempt: impl FnMut(&mut Scope<'_>, &mut Option<Buffer>) -> Result<Option<R>, SendError>,
) -> Result<R, TrySendError<Buffer>> {
    let mut buffer = Some(buffer);
    // Another thread holds the engine for well under a microsecond as a rule.
    for _ in 0..64 {
        match face.enter(|engine| attempt(&mut engine.scope(), &mut buffer)) {
            Ok(Ok(Some(sent))) => return Ok(sent),
            Ok(Ok(None)) => break,
            Ok(Err(error)) => {
                let payload = buffer.unwrap_or_else(|| Buffer::copy(&[]));
                return Err(TrySendError::Failed { error, payload });
            }
            Err(_) => std::hint::spin_loop(),
        }
    }
    let payload = buffer.unwrap_or_else(|| Buffer::copy(&[]));
    // Whoever could not look, because the engine was in use for longer, is not to try for ever.
    let size = face.shared().ranks();
    if rank.0 >= size {
        return Err(TrySendError::Failed { error: SendError::UnknownRank { rank, size }, payload });
    }
    Err(TrySendError::Full(payload))
}

/// Sends a buffer under a cookie now or not at all; it is taken if it was sent. False: there is no room.
pub(crate) fn send_or_not(
    scope: &mut Scope<'_>,
    envelope: &Envelope,
    cookie: u64,
    buffer: &mut Option<Buffer>,
) -> Result<bool, SendError> {
    let Some(payload) = buffer.take() else { return Ok(false) };
    let (sent, back) = payload.lend(|payload| try_in(scope, &envelope.args(cookie), payload));
    *buffer = back;
    sent
}

/// Sends now or not at all. False: there is no room.
fn try_in<'p>(
    scope: &mut Scope<'_>,
    args: &SendArgs<'p>,
    payload: Payload<'p>,
) -> (Result<bool, SendError>, Option<Unsent>) {
    match scope.send(args, payload, Wait::Never) {
        Ok(Sent::Done) => (Ok(true), None),
        Ok(Sent::Full(payload)) => (Ok(false), Some(Unsent::new(payload))),
        Err((error, payload)) => (Err(error), Some(Unsent::new(payload))),
    }
}

/// A started send whose tickets are already in the hands of a [`Pending`], so that a dropped future leaks nothing.
#[derive(Debug)]
pub(crate) enum Step {
    Done,
    Queued(Pending),
    Kept(Deposit, Pending),
    Failed(SendError),
}

/// Gives the tickets of a started send an owner.
#[inline]
pub(crate) fn own(
    started: Result<Given, SendError>,
    handle: impl FnOnce() -> Handle,
    deadline: Option<u64>,
) -> Step {
    let pending = |ticket| Pending::new(handle(), ticket, deadline);
    match started {
        Ok(Given::Done) => Step::Done,
        Ok(Given::Queued(ticket)) => Step::Queued(pending(ticket)),
        Ok(Given::Kept(ticket, deposit)) => Step::Kept(deposit, pending(ticket)),
        Err(error) => Step::Failed(error),
    }
}
