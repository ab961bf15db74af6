//! A message of a collective operation, wherever it lies.

use super::reduce::Combiner;
use bytes::Bytes;
use posthaste_core::device::Body;
use posthaste_core::memory::{LeasedPage, SharedSlice, Source};

/// Bytes that are copied out of a page before they are combined: they stay in the first cache.
const SCRATCH: usize = 16 << 10;

/// A message that has arrived.
#[derive(Debug)]
pub(crate) enum Part<'b> {
    Body(&'b Body<'b>),
    /// It lies in the memory of its sender.
    Lent(SharedSlice),
}

impl Part<'_> {
    /// Bytes of the message.
    pub fn len(&self) -> usize {
        match self {
            Part::Body(body) => body.len(),
            Part::Lent(memory) => memory.len(),
        }
    }

    fn source(&self) -> Source<'_> {
        match self {
            Part::Body(body) => body.source(),
            Part::Lent(memory) => (*memory).into(),
        }
    }

    /// The same for later.
    pub fn keep(&self) -> Kept {
        match self {
            Part::Body(body) => Kept::Bytes(body.to_bytes()),
            Part::Lent(memory) => Kept::Lent(*memory),
        }
    }
}

/// A message that is kept for later.
#[derive(Clone, Debug)]
pub(crate) enum Kept {
    Bytes(Bytes),
    Lent(SharedSlice),
}

/// Copies some of a message.
pub(super) fn read(part: &Part<'_>, from: usize, target: &mut [u8]) {
    match part.source() {
        Source::Private(bytes) => copy(bytes, from, target),
        Source::Shared(memory) => read_shared(memory, from, target),
    }
}

fn copy(bytes: &[u8], from: usize, target: &mut [u8]) {
    if let Some(part) = bytes.get(from..from + target.len()) {
        target.copy_from_slice(part);
    }
}

fn read_shared(memory: LeasedPage<'_>, from: usize, target: &mut [u8]) {
    if let Some(part) = memory.slice(from as u64, target.len() as u64) {
        part.read(target);
    }
}

/// Combines some of a message into what is there.
pub(super) fn combine(combiner: &Combiner, prepend: bool, part: &Part<'_>, from: usize, target: &mut [u8]) {
    let len = target.len();
    match part.source() {
        Source::Private(bytes) => {
            combiner.run(target, bytes.get(from..from + len).unwrap_or_default(), prepend);
        }
        Source::Shared(memory) => combine_shared(combiner, prepend, memory, from, target),
    }
}

fn combine_shared(
    combiner: &Combiner,
    prepend: bool,
    memory: LeasedPage<'_>,
    from: usize,
    target: &mut [u8],
) {
    let step = (SCRATCH / combiner.element()).max(1) * combiner.element();
    let mut scratch = vec![0; step.min(target.len())];
    for (number, part) in target.chunks_mut(step).enumerate() {
        let scratch = &mut scratch[..part.len()];
        let at = (from + number * step) as u64;
        if let Some(memory) = memory.slice(at, part.len() as u64) {
            memory.read(scratch);
            combiner.run(part, scratch, prepend);
        }
    }
}
