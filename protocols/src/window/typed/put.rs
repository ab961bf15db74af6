//! Puts between layouts.

use super::super::{Element, Memory, Part, Stage};
use super::There;
use super::ask::{Carried, distinct, readable, request};
use crate::datatype::{Layout, Machine, Thresholds, TypedError, checked, pack, put_chunk, redistribute_with};
use bytes::Bytes;
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;
use posthaste_core::{Fault, RmaError, budget};
use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use zerocopy::IntoBytes;

/// Requests of a put that were sent, or have their place in the queue; in order.
type Asks = VecDeque<Stage>;

/// The memory that a put takes its bytes from.
enum Origin<'s> {
    Lent(&'s [u8]),
    /// Kept for as long as it takes: bytes in one run are copied for nobody.
    Owned(Bytes),
}

impl Origin<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Origin::Lent(bytes) => bytes,
            Origin::Owned(bytes) => bytes,
        }
    }

    /// A part of it that need not be packed, for a request.
    fn carried(&self, part: Range<usize>) -> Option<Carried<'_>> {
        match self {
            Origin::Lent(bytes) => bytes.get(part).map(Carried::Lent),
            Origin::Owned(bytes) => bytes.get(part.clone()).map(|_| Carried::Owned(bytes.slice(part))),
        }
    }
}

/// A put between layouts that was begun.
enum Putting {
    Done,
    /// By its owner.
    Asked(Asks),
    /// Here, behind what is queued.
    InTurn(Box<Stage>),
}

impl Memory {
    /// Copies to mapped memory now, or packs; returns what is still to be done.
    #[inline]
    fn put_typed(
        self: &Arc<Self>,
        thresholds: &Thresholds,
        (part, to): (&Part, &Layout<'_>),
        (origin, from): (&Origin<'_>, &Layout<'_>),
    ) -> Result<Putting, TypedError> {
        let source = origin.bytes();
        distinct(to, part.len, || checked((to, part.len), (from, source.len() as u64)))?;
        let aim = self.aim_within(part, 0, part.len);
        let copy = |target| redistribute_with(thresholds, target, to, source, from);
        match aim.and_then(|aim| aim.change(copy)) {
            Some(copied) => {
                copied?;
                Ok(Putting::Done)
            }
            None if self.waits_for_turn(part) => self.put_in_turn(part, to, source, from),
            None => Ok(Putting::Asked(self.pack(part, to, origin, from)?)),
        }
    }

    /// Packs, and unpacks to mapped memory in its turn.
    #[cold]
    fn put_in_turn(
        self: &Arc<Self>,
        part: &Part,
        to: &Layout<'_>,
        source: &[u8],
        from: &Layout<'_>,
    ) -> Result<Putting, TypedError> {
        let all = checked((to, part.len), (from, source.len() as u64))?;
        let packed = pack(&[], &mut Machine::new(from)?, source, all)?;
        let (mut machine, rank) = (Machine::new(to)?, part.rank);
        let unpack = move |target: SharedSlice| match machine.scatter(target, &packed[..]) {
            Ok(_) => Ok(Value::Unit),
            Err(_) => Err(Fault::NoSuchMemory(rank)),
        };
        Ok(Putting::InTurn(Box::new(self.in_turn(part, true, unpack))))
    }

    /// Packs for the owner of the memory, and asks it for everything: each request takes its place among the puts at once.
    #[cold]
    fn pack(
        self: &Arc<Self>,
        part: &Part,
        to: &Layout<'_>,
        origin: &Origin<'_>,
        from: &Layout<'_>,
    ) -> Result<Asks, TypedError> {
        let source = origin.bytes();
        let all = checked((to, part.len), (from, source.len() as u64))?;
        self.is_current(part)?;
        let program = readable(to.datatype.to_bytes())?;
        let mut machine = Machine::new(from)?;
        let mut asks = VecDeque::new();
        // Bytes in one run need not be packed.
        let run = from.run().filter(|run| run.end <= source.len() && run.len() as u64 == all);
        let mut first = 0;
        while first < all {
            let most = put_chunk(to, program.len());
            let request = request(part, to, first, all.min(first.saturating_add(most)));
            let end = first + request.bytes;
            let (info, within) = request.put_info(&program);
            let part_of = |run: &Range<usize>| run.start + first as usize..run.start + end as usize;
            let as_it_is = run.as_ref().filter(|_| within).and_then(|run| origin.carried(part_of(run)));
            let bytes = match as_it_is {
                Some(bytes) => {
                    machine.skip(request.bytes);
                    bytes
                }
                None => {
                    let head = if within { &[][..] } else { &program };
                    Carried::Owned(pack(head, &mut machine, source, request.bytes)?.into())
                }
            };
            asks.push_back(self.ask(part, info, bytes)?);
            first = end;
        }
        Ok(asks)
    }
}

/// A put between layouts. Ready when the data is at the target.
///
/// # Cancel safety
/// See [`Window::put_typed`](crate::Window::put_typed).
#[must_use = "a put does nothing until it is awaited"]
pub struct PutTyped<'w, 's> {
    there: There<'w>,
    step: PutStep<'s>,
}

/// What is to be done first.
struct Begin<'s> {
    thresholds: Thresholds,
    to: Layout<'s>,
    origin: Origin<'s>,
    from: Layout<'s>,
}

enum PutStep<'s> {
    Begin(Begin<'s>),
    Begun(Putting),
    /// Its result was given.
    Ended,
}

impl std::fmt::Debug for PutTyped<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutTyped").field("rank", &self.there.rank).finish_non_exhaustive()
    }
}

impl Future for PutTyped<'_, '_> {
    type Output = Result<(), TypedError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let PutStep::Begin(Begin { thresholds, to, origin, from }) = &this.step {
            ready!(budget::proceed(cx));
            let There { memory, .. } = this.there;
            let part = this.there.part().map_err(TypedError::from);
            let put = part.and_then(|part| memory.put_typed(thresholds, (part, to), (origin, from)));
            let bytes = origin.bytes().len();
            let begun = match put {
                Ok(begun) => begun,
                Err(error) => {
                    this.step = PutStep::Ended;
                    return Poll::Ready(Err(error));
                }
            };
            budget::spend_on(budget::MESSAGE, bytes);
            if matches!(begun, Putting::Done) {
                this.step = PutStep::Ended;
                return Poll::Ready(Ok(()));
            }
            this.step = PutStep::Begun(begun);
        }
        this.go_on(cx)
    }
}

impl<'w, 's> PutTyped<'w, 's> {
    #[inline]
    pub(super) fn new<S: Element>(
        there: There<'w>,
        thresholds: &Thresholds,
        to: &Layout<'s>,
        source: &'s [S],
        from: &Layout<'s>,
    ) -> Self {
        Self::of(there, thresholds, to, Origin::Lent(source.as_bytes()), from)
    }

    pub(super) fn owned(there: There<'w>, to: &Layout<'s>, source: Bytes, from: &Layout<'s>) -> Self {
        Self::of(there, &Thresholds::default(), to, Origin::Owned(source), from)
    }

    #[inline]
    fn of(
        there: There<'w>,
        thresholds: &Thresholds,
        to: &Layout<'s>,
        origin: Origin<'s>,
        from: &Layout<'s>,
    ) -> Self {
        let begin = Begin { thresholds: *thresholds, to: *to, origin, from: *from };
        PutTyped { there, step: PutStep::Begin(begin) }
    }

    #[cold]
    fn go_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TypedError>> {
        let handle = &self.there.memory.handle;
        let PutStep::Begun(begun) = &mut self.step else {
            // Polled again after its end.
            return Poll::Ready(Err(RmaError::from(Fault::Shutdown).into()));
        };
        let result = match begun {
            Putting::Done => Ok(()),
            Putting::InTurn(stage) => ready!(stage.poll(handle, cx)).map(drop).map_err(TypedError::from),
            Putting::Asked(asks) => loop {
                let Some(first) = asks.front_mut() else { break Ok(()) };
                match ready!(first.poll(handle, cx)) {
                    Ok(_) => drop(asks.pop_front()),
                    Err(error) => break Err(error.into()),
                }
            },
        };
        self.step = PutStep::Ended;
        Poll::Ready(result)
    }
}
