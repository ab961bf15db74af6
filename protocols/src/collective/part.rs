//! A message of a collective operation, wherever it lies.

use super::reduce::Combiner;
use bytes::Bytes;
use posthaste_core::device::Body;
use posthaste_core::memory::{LeasedPage, SharedSlice, Source};
use std::ops::Range;

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

    pub fn source(&self) -> Source<'_> {
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

/// Copies some of a message to its place in a row of bytes, which grows up to there: what comes in order goes where nothing was
/// written before.
pub(super) fn store(source: Source<'_>, from: usize, place: Range<usize>, into: &mut Vec<u8>) {
    let is_next = place.start == into.len();
    if !is_next && into.len() < place.end {
        into.resize(place.end, 0);
    }
    match source {
        Source::Private(bytes) => {
            let Some(part) = bytes.get(from..from + place.len()) else { return };
            match is_next {
                true => into.extend_from_slice(part),
                false => into[place].copy_from_slice(part),
            }
        }
        Source::Shared(memory) => {
            let Some(part) = memory.slice(from as u64, place.len() as u64) else { return };
            match is_next {
                true => part.append_to(into),
                false => part.read(&mut into[place]),
            }
        }
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
    let mut scratch = vec![0; piece(combiner.element()).min(target.len())];
    for piece in pieces(target.len(), combiner.element()) {
        let (scratch, at) = (&mut scratch[..piece.len()], (from + piece.start) as u64);
        if let Some(memory) = memory.slice(at, piece.len() as u64) {
            memory.read(scratch);
            combiner.run(&mut target[piece], scratch, prepend);
        }
    }
}

/// Bytes that stay in the first cache, of whole values of so many.
fn piece(element: usize) -> usize {
    (SCRATCH / element).max(1) * element
}

/// So many bytes, in pieces of that length.
pub(super) fn pieces(len: usize, element: usize) -> impl Iterator<Item = Range<usize>> {
    let step = piece(element.max(1));
    (0..len).step_by(step).map(move |start| start..len.min(start + step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_to_their_places_in_whatever_order() {
        let source: Vec<u8> = (0..200).collect();
        let whole = |order: &[Range<usize>]| {
            let mut row = Vec::with_capacity(200);
            for place in order {
                store(Source::Private(&source), place.start, place.clone(), &mut row);
            }
            row
        };
        assert_eq!(whole(&[0..64, 64..130, 130..200]), source);
        assert_eq!(whole(&[130..200, 0..64, 64..130]), source);
        assert_eq!(whole(&[0..64, 130..200, 64..130]), source);
        assert_eq!(whole(&[0..64, 130..130, 64..70]), [&source[..70], &[0; 60]].concat());
    }
}
