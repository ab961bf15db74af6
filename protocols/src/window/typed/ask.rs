//! What the owner of memory is asked, where layouts in it are not reached through a mapping.

use super::super::{Memory, Part, Stage, send_to_rma};
use crate::datatype::{Layout, MAX_PROGRAM, Request, TransferError};
use crate::operation::Pending;
use bytes::Bytes;
use posthaste_core::context::Face;
use posthaste_core::engine::{Payload, Rma, SendArgs, Sent, Wait};
use posthaste_core::exposed::is_exposed;
use posthaste_core::slot::Value;
use posthaste_core::{Endpoint, Fault, Rank, RmaError, Scope, Ticket};
use std::sync::Arc;

/// A request for some of the bytes.
pub(super) struct Asked {
    pub stage: Stage,
    pub first: u64,
    pub bytes: u64,
}

/// What a request carries.
pub(super) enum Carried<'b> {
    Lent(&'b [u8]),
    Owned(Bytes),
}

impl Memory {
    /// Whether the incarnation of the rank that has the part still lives, as far as that is known. Owners look, too.
    pub(super) fn is_current(&self, part: &Part) -> Result<(), RmaError> {
        let (rank, held, now) = (part.rank, part.incarnation, self.gates.incarnation_of(part.rank));
        if held < now { Err(Fault::StaleHandle { rank, held, now }.into()) } else { Ok(()) }
    }

    /// The key of a part that only its owner reaches while other memory of that rank's is mapped.
    fn beside_mapped(&self, part: &Part) -> Option<usize> {
        let beside =
            is_exposed(part.place) && self.device.caps().mappable && !self.gates.goes_over_send(part.rank);
        beside.then_some(part.remote)
    }

    /// Asks for bytes of a layout; the request takes its place among the puts.
    pub(super) fn ask_for(
        self: &Arc<Self>,
        part: &Part,
        (from, program): (&Layout<'_>, &Bytes),
        first: u64,
        bytes: u64,
    ) -> Result<Asked, RmaError> {
        let (info, within) = request(part, from, first, first + bytes).get_info(program);
        let payload = if within { Bytes::new() } else { program.clone() };
        Ok(Asked { stage: self.ask(part, info, Carried::Owned(payload))?, first, bytes })
    }

    /// Sends a request.
    pub(super) fn ask(
        self: &Arc<Self>,
        part: &Part,
        info: Vec<u8>,
        carried: Carried<'_>,
    ) -> Result<Stage, RmaError> {
        let (rank, beside) = (part.rank, self.beside_mapped(part));
        // Not copied if it can go at once.
        let now = self.handle.enter(|engine| {
            let payload = match &carried {
                Carried::Lent(lent) => Payload::Borrowed(lent),
                Carried::Owned(bytes) => Payload::Owned(bytes.clone()),
            };
            self.ask_in(&mut engine.scope(), (rank, beside), &info, payload)
        });
        if let Ok(asked) = now {
            return asked.map(Stage::Pending);
        }
        let (memory, held) = (self.clone(), self.hold(part));
        let bytes = match carried {
            Carried::Lent(lent) => Bytes::copy_from_slice(lent),
            Carried::Owned(bytes) => bytes,
        };
        Ok(Stage::Posted(self.handle.post(move |scope: &mut Scope<'_>| {
            let asked = memory.ask_in(scope, (rank, beside), &info, Payload::Owned(bytes));
            drop(held);
            asked.map(Some)
        })))
    }

    fn ask_in(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        (rank, beside): (Rank, Option<usize>),
        info: &[u8],
        payload: Payload<'_>,
    ) -> Result<Pending, RmaError> {
        self.still_there()?;
        let target = Endpoint::new(rank, self.handle.me().context);
        let ticket = scope.operation(Some(rank))?;
        // What comes behind the request must not fail for want of a slot once that is out.
        let spare = match beside.map(|_| scope.operation(Some(rank))).transpose() {
            Ok(spare) => spare,
            Err(fault) => {
                free(scope, ticket);
                return Err(fault.into());
            }
        };
        let protocol = self.layouts.id();
        let args = SendArgs { target, protocol, cookie: ticket.to_word(), info, relaxed: false };
        let sent = scope.send(&args, payload, Wait::InTurn);
        spare.into_iter().for_each(|spare| free(scope, spare));
        let error = match sent {
            Ok(Sent::Done) => {
                let asked = Pending::new(self.handle.clone(), ticket, None).overlapping();
                if let Some(key) = beside {
                    // A message keeps no gate closed. A put of nothing behind it does, until it was handled, and so the message.
                    if let Some(last) = scope.rma(target, key, 0, Rma::Put(Payload::Borrowed(&[])))? {
                        scope.detach(last);
                    }
                }
                return Ok(asked);
            }
            // It takes no credit.
            Ok(Sent::Full(_)) => Fault::Busy(rank).into(),
            Err((error, _)) => send_to_rma(error),
        };
        free(scope, ticket);
        Err(error)
    }
}

/// Nobody waits for that operation, which was not begun.
fn free(scope: &mut Scope<'_>, ticket: Ticket) {
    scope.complete(ticket, Ok(Value::Unit));
    scope.detach(ticket);
}

/// Refuses a layout that has more bytes than the memory, and so some of them more than once, by whatever way it would go there;
/// unless there is more wrong with it, which `check` tells.
#[inline]
pub(super) fn distinct(
    layout: &Layout<'_>,
    len: u64,
    check: impl FnOnce() -> Result<u64, TransferError>,
) -> Result<(), TransferError> {
    match layout.size() {
        Some(size) if size <= len => Ok(()),
        _ => Err(check().map_or_else(|error| error, |size| TransferError::Overlapping { size, len })),
    }
}

/// A program, if its owner reads one that is so long.
pub(super) fn readable(program: Vec<u8>) -> Result<Vec<u8>, TransferError> {
    let len = program.len();
    if len <= MAX_PROGRAM { Ok(program) } else { Err(TransferError::Program { len: len as u64 }) }
}

/// The request for bytes of a layout.
pub(super) fn request(part: &Part, layout: &Layout<'_>, first: u64, end: u64) -> Request {
    Request {
        place: part.place,
        len: part.len,
        base: layout.base,
        count: layout.count,
        first,
        bytes: end - first,
        incarnation: part.incarnation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_its_owner_would_refuse_is_not_sent() {
        assert_eq!(readable(vec![0; MAX_PROGRAM]).map(|program| program.len()), Ok(MAX_PROGRAM));
        let error = readable(vec![0; MAX_PROGRAM + 1]).expect_err("one byte too many");
        assert_eq!(error, TransferError::Program { len: MAX_PROGRAM as u64 + 1 });
        assert!(error.to_string().contains(&MAX_PROGRAM.to_string()), "{error}");
    }
}
