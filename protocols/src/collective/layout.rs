//! How long the blocks of an operation are, where they lie, and how they are cut into chunks.

use super::plan::{Plan, Step};
use super::schedule::{Blocks, Kind};
use std::ops::Range;

/// Messages up to this many bytes go out at once; longer ones when their receiver takes part in the operation.
pub(crate) const EAGER: usize = 16 << 10;
/// Bytes of a block that go into one message. While one chunk is on its way, the one before it is worked on.
pub(crate) const CHUNK: usize = 128 << 10;

/// The lengths of the blocks of one side.
#[derive(Clone, Debug)]
pub(crate) enum Lengths {
    /// All have as many bytes.
    Same(usize),
    /// A vector of so many elements of so many bytes, in nearly equal parts.
    Split { elements: usize, element: usize },
    /// The place of each, and behind the last.
    Table(Box<[usize]>),
}

/// The lengths of the blocks, and the chunks.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    lengths: Lengths,
    /// Bytes of a value.
    element: usize,
    chunk: usize,
    /// Bytes of the longest block.
    longest: usize,
}

impl Layout {
    /// For blocks of elements of `element` bytes; a chunk holds whole elements.
    pub fn new(lengths: Lengths, element: usize, blocks: usize) -> Self {
        let element = element.max(1);
        let longest = match &lengths {
            Lengths::Same(len) => *len,
            Lengths::Split { elements, element } => elements.div_ceil(blocks.max(1)) * element,
            Lengths::Table(places) => places.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0),
        };
        Self { lengths, element, chunk: 0, longest }.cut(CHUNK)
    }

    /// The same in chunks of so many bytes.
    pub fn cut(self, bytes: usize) -> Self {
        Self { chunk: (bytes / self.element).max(1) * self.element, ..self }
    }

    /// Where a block lies among `plan`'s, in bytes; `None` if this rank does not keep it. `all`: among all, not among those
    /// that are kept.
    #[inline]
    pub fn place(&self, plan: &Plan, block: usize, all: bool) -> Option<Range<usize>> {
        let slot = if all { block } else { plan.slot(block)? };
        Some(match &self.lengths {
            Lengths::Same(len) => slot * len..(slot + 1) * len,
            Lengths::Split { elements, element } => {
                let start = |part: usize| (part as u128 * *elements as u128 / plan.blocks as u128) as usize;
                start(block) * element..start(block + 1) * element
            }
            Lengths::Table(places) => *places.get(block)?..*places.get(block + 1)?,
        })
    }

    /// Bytes of a block.
    #[inline]
    pub fn len(&self, plan: &Plan, block: usize) -> usize {
        match &self.lengths {
            Lengths::Same(len) => *len,
            _ => self.place(plan, block, true).map_or(0, |place| place.len()),
        }
    }

    /// Bytes of all blocks that a rank keeps.
    pub fn total(&self, plan: &Plan) -> usize {
        match &self.lengths {
            Lengths::Same(len) => plan.slots().saturating_mul(*len),
            Lengths::Split { elements, element } => elements * element,
            Lengths::Table(places) => places.last().copied().unwrap_or(0),
        }
    }

    /// Whether any block is longer than a chunk.
    #[inline]
    pub fn is_cut(&self) -> bool {
        self.longest > self.chunk
    }

    /// Chunks of the longest block.
    #[inline]
    pub fn slices(&self) -> usize {
        self.longest.div_ceil(self.chunk).max(1)
    }

    /// Number of messages of a step: chunks of its longest block.
    #[inline]
    pub fn slices_of(&self, plan: &Plan, blocks: &Blocks) -> usize {
        if !self.is_cut() {
            return 1;
        }
        let longest = blocks.iter().map(|block| self.len(plan, block)).max().unwrap_or(0);
        longest.div_ceil(self.chunk).max(1)
    }

    /// Bytes of all messages of a step together.
    pub fn bytes_of(&self, plan: &Plan, blocks: &Blocks) -> usize {
        match &self.lengths {
            Lengths::Same(len) => blocks.runs().iter().map(|run| run.len() * len).sum(),
            _ => blocks.iter().map(|block| self.len(plan, block)).sum(),
        }
    }

    /// Whether the messages of a step wait until their receiver is there.
    #[inline]
    pub fn is_long(&self, plan: &Plan, step: &Step) -> bool {
        self.longest * plan.blocks > EAGER && self.bytes_of(plan, &step.blocks) > EAGER
    }

    /// The part of a block that is in a chunk, relative to the block.
    fn piece(&self, len: usize, slice: usize) -> Range<usize> {
        (slice * self.chunk).min(len)..((slice + 1) * self.chunk).min(len)
    }

    /// Where the bytes of a message lie, piece by piece, in order.
    pub fn pieces(
        &self,
        plan: &Plan,
        blocks: &Blocks,
        slice: usize,
        all: bool,
        mut each: impl FnMut(Range<usize>),
    ) {
        for run in blocks.runs() {
            let mut open: Option<Range<usize>> = None;
            for block in run.start as usize..run.end as usize {
                let Some(place) = self.place(plan, block, all) else { continue };
                let piece = self.piece(place.len(), slice);
                let piece = place.start + piece.start..place.start + piece.end;
                // Neighbouring pieces are one.
                open = Some(match open {
                    Some(before) if before.end == piece.start => before.start..piece.end,
                    Some(before) => {
                        each(before);
                        piece
                    }
                    None => piece,
                });
            }
            if let Some(piece) = open {
                each(piece);
            }
        }
    }

    /// Bytes of a message.
    pub fn message_len(&self, plan: &Plan, blocks: &Blocks, slice: usize) -> usize {
        let mut bytes = 0;
        self.pieces(plan, blocks, slice, true, |piece| bytes += piece.len());
        bytes
    }
}

/// How the input of a rank lies: whole, or its own block alone.
#[inline]
pub(crate) fn input_is_own_block(kind: Kind) -> bool {
    matches!(kind, Kind::Gather | Kind::AllGather)
}
