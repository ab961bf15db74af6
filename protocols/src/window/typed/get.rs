//! Gets between layouts.

use super::super::{Element, Stage};
use super::There;
use super::ask::{Asked, distinct, readable};
use crate::datatype::{
    Datatype, Layout, Machine, Thresholds, TypedError, checked, chunk, pack, redistribute_with,
};
use bytes::Bytes;
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;
use posthaste_core::{Fault, RmaError, budget};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use zerocopy::IntoBytes;

/// Bytes of one get that are asked for before answers come. As many keep their place in program order; the owner gathers them as
/// the requests come in.
const ASKED_AT_ONCE: u64 = 16 << 20;

/// A layout that owns its datatype.
struct Place {
    datatype: Datatype,
    count: u64,
    base: u64,
}

impl Place {
    fn of(layout: &Layout<'_>) -> Place {
        let Layout { datatype, count, base } = *layout;
        Place { datatype: datatype.clone(), count, base }
    }

    fn layout(&self) -> Layout<'_> {
        Layout::new(&self.datatype, self.count).at(self.base)
    }
}

/// A get that asks its target.
struct Remote {
    /// Unpacks what comes.
    machine: Machine,
    program: Bytes,
    /// Requests that have not ended, in order.
    requests: VecDeque<Asked>,
    /// Bytes that were asked for.
    asked: u64,
    /// And have come.
    come: u64,
    all: u64,
}

impl Remote {
    /// Asks for more, if no more than may be is under way.
    fn ask(&mut self, there: There<'_>, from: &Layout<'_>) -> Result<(), RmaError> {
        while self.asked < self.all && (self.requests.is_empty() || self.asked - self.come < ASKED_AT_ONCE) {
            let (memory, part) = (there.memory, there.part()?);
            memory.is_current(part)?;
            let bytes = chunk(self.program.len()).min(self.all - self.asked);
            self.requests.push_back(memory.ask_for(part, (from, &self.program), self.asked, bytes)?);
            self.asked += bytes;
        }
        Ok(())
    }
}

/// A get between layouts. Ready with the buffer.
///
/// # Cancel safety
/// Cancel safe; the buffer is dropped with the future.
#[must_use = "a get does nothing until it is awaited"]
pub struct GetTyped<'w, S> {
    there: There<'w>,
    thresholds: Thresholds,
    from: Place,
    to: Place,
    buffer: Option<Vec<S>>,
    /// Made when the memory is not mapped, or something precedes.
    remote: Option<Box<Fetching>>,
}

/// How a get goes on that could not be done at once.
enum Fetching {
    /// Its target is asked.
    Remote(Remote),
    /// Packed here, behind what is queued, and unpacked by this.
    InTurn(Stage, Machine),
}

impl<S> Unpin for GetTyped<'_, S> {}

impl<S> std::fmt::Debug for GetTyped<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GetTyped").field("rank", &self.there.rank).finish_non_exhaustive()
    }
}

impl<'w, S: Element> GetTyped<'w, S> {
    pub(super) fn new(
        there: There<'w>,
        thresholds: &Thresholds,
        from: &Layout<'_>,
        into: Vec<S>,
        to: &Layout<'_>,
    ) -> Self {
        let (from, to) = (Place::of(from), Place::of(to));
        GetTyped { there, thresholds: *thresholds, from, to, buffer: Some(into), remote: None }
    }

    /// Copies from mapped memory, or prepares to ask; true if all is done.
    fn start(&mut self, into: &mut [u8]) -> Result<bool, TypedError> {
        let (from, to) = (self.from.layout(), self.to.layout());
        let (memory, part) = (self.there.memory, self.there.part()?);
        distinct(&from, part.len, || checked((&to, into.len() as u64), (&from, part.len)))?;
        let aim = memory.aim_within(part, 0, part.len);
        let copy = |source| redistribute_with(&self.thresholds, &mut *into, &to, source, &from);
        if let Some(copied) = aim.and_then(|aim| aim.reach(copy)) {
            copied?;
            return Ok(true);
        }
        let all = checked((&to, into.len() as u64), (&from, part.len))?;
        if memory.waits_for_turn(part) {
            let (mut machine, rank) = (Machine::new(&from)?, part.rank);
            let packed = move |source: SharedSlice| {
                let packed = pack(&[], &mut machine, source, all).map_err(|_| Fault::NoSuchMemory(rank))?;
                Ok(Value::Bytes(packed.into()))
            };
            let stage = memory.in_turn(part, false, packed);
            self.remote = Some(Box::new(Fetching::InTurn(stage, Machine::new(&to)?)));
            return Ok(false);
        }
        let program = readable(self.from.datatype.to_bytes())?.into();
        let (machine, requests) = (Machine::new(&to)?, VecDeque::new());
        let mut remote = Remote { machine, program, requests, asked: 0, come: 0, all };
        remote.ask(self.there, &from)?;
        self.remote = Some(Box::new(Fetching::Remote(remote)));
        Ok(all == 0)
    }

    fn go_on(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<Result<(), TypedError>> {
        let memory = self.there.memory;
        let remote = match self.remote.as_deref_mut() {
            None => return Poll::Ready(Ok(())),
            Some(Fetching::InTurn(stage, machine)) => {
                if let Some(packed) = ready!(stage.poll(&memory.handle, cx))? {
                    machine.scatter(&mut *into, packed.as_bytes())?;
                }
                return Poll::Ready(Ok(()));
            }
            Some(Fetching::Remote(remote)) => remote,
        };
        loop {
            let Some(first) = remote.requests.front_mut() else { return Poll::Ready(Ok(())) };
            let value = match ready!(first.stage.poll(&memory.handle, cx)) {
                Ok(value) => value,
                // Too many answers wait there for this rank as it is.
                Err(RmaError::Fault(Fault::Busy(_))) => {
                    let (first, bytes) = (first.first, first.bytes);
                    let part = self.there.part()?;
                    let again = memory.ask_for(part, (&self.from.layout(), &remote.program), first, bytes)?;
                    remote.requests[0] = again;
                    continue;
                }
                Err(error) => return Poll::Ready(Err(error.into())),
            };
            let bytes = value.as_ref().map_or(&[][..], Value::as_bytes);
            if bytes.len() as u64 != first.bytes {
                let There { part, rank, .. } = self.there;
                return Poll::Ready(Err(
                    RmaError::from(Fault::PeerCorrupt(memory.rank_of(part, rank))).into()
                ));
            }
            remote.machine.scatter(&mut *into, bytes)?;
            remote.come += first.bytes;
            remote.requests.pop_front();
            remote.ask(self.there, &self.from.layout())?;
        }
    }
}

impl<S: Element> Future for GetTyped<'_, S> {
    type Output = Result<Vec<S>, TypedError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(mut buffer) = this.buffer.take() else {
            // Polled again after its end.
            return Poll::Ready(Err(RmaError::from(Fault::Shutdown).into()));
        };
        let into = buffer.as_mut_slice().as_mut_bytes();
        if this.remote.is_none() {
            if budget::proceed(cx).is_pending() {
                this.buffer = Some(buffer);
                return Poll::Pending;
            }
            budget::spend_on(budget::MESSAGE, into.len());
            if this.start(into)? {
                return Poll::Ready(Ok(buffer));
            }
        }
        match this.go_on(cx, into) {
            Poll::Ready(result) => Poll::Ready(result.map(|()| buffer)),
            Poll::Pending => {
                this.buffer = Some(buffer);
                Poll::Pending
            }
        }
    }
}
