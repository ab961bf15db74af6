//! Where a machine is in its program: a stack of frames, and the leaf on top of it.

use super::Datatype;
use super::body::Block;
use super::plan::{BYTES, Plan, Step};

/// So many elements are rather unrolled than run one by one.
const UNROLL_MIN: u64 = 4;

/// A routine that is being run.
#[derive(Clone, Copy, Debug)]
struct Frame {
    routine: usize,
    /// The next one.
    step: usize,
    base: i64,
    /// Runs left, with this one.
    left: u64,
    stride: i64,
}

/// A position in so many elements of a datatype. Holds until the next byte; nothing of it depends on the memory.
#[derive(Clone, Debug)]
pub(super) struct Cursor {
    frames: Vec<Frame>,
    leaf: usize,
    /// Of the iteration that is under way.
    base: i64,
    /// Iterations left, with this one; 0 is the end.
    left: u64,
    stride: i64,
    /// Which block of the iteration.
    block: usize,
    /// Bytes of that block that are done.
    within: u64,
}

/// A cursor together with its program.
pub(super) struct Machine<'p> {
    pub plan: &'p Plan,
    pub at: &'p mut Cursor,
}

impl Cursor {
    /// At the first byte of `count` elements, the first of which is at `base`.
    pub fn new(datatype: &Datatype, base: i64, count: u64) -> Cursor {
        let plan = datatype.plan();
        let extent = datatype.extent();
        let mut cursor =
            Cursor { frames: Vec::new(), leaf: 0, base, left: count, stride: extent, block: 0, within: 0 };
        if datatype.size() == 0 || count == 0 {
            cursor.left = 0;
            return cursor;
        }
        if let [Step::Leaf { leaf, offset }] = plan.routines[plan.main][..] {
            let once = &plan.leaves[leaf];
            let continued = (once.count as i64).checked_mul(once.stride) == Some(extent);
            let total = once.count.checked_mul(count);
            match (plan.unrolled, total) {
                _ if once.count == 1 => cursor.set_leaf(leaf, base + offset, count, extent),
                (_, Some(total)) if continued => cursor.set_leaf(leaf, base + offset, total, once.stride),
                _ if count == 1 => cursor.set_leaf(leaf, base + offset, once.count, once.stride),
                (Some(unrolled), _) if count >= UNROLL_MIN => cursor.set_leaf(unrolled, base, count, extent),
                _ => cursor.enter(plan, base, count, extent),
            }
        } else {
            cursor.enter(plan, base, count, extent);
        }
        cursor
    }

    /// At the first of `len` consecutive bytes, which begin at `base`.
    pub fn of_bytes(base: i64, len: u64) -> Cursor {
        Cursor { frames: Vec::new(), leaf: 0, base, left: len, stride: 1, block: 0, within: 0 }
    }

    fn enter(&mut self, plan: &Plan, base: i64, left: u64, stride: i64) {
        self.frames.push(Frame { routine: plan.main, step: 0, base, left, stride });
        self.next_leaf(plan);
    }

    fn set_leaf(&mut self, leaf: usize, base: i64, left: u64, stride: i64) {
        (self.leaf, self.base, self.left, self.stride) = (leaf, base, left, stride);
        (self.block, self.within) = (0, 0);
    }

    /// Goes on to the leaf that comes next; no iterations are left at the end.
    fn next_leaf(&mut self, plan: &Plan) {
        while let Some(frame) = self.frames.last_mut() {
            let Some(step) = plan.routines[frame.routine].get(frame.step) else {
                frame.left -= 1;
                if frame.left == 0 {
                    self.frames.pop();
                } else {
                    frame.base += frame.stride;
                    frame.step = 0;
                }
                continue;
            };
            frame.step += 1;
            let base = frame.base;
            match *step {
                Step::Leaf { leaf, offset } => {
                    let once = &plan.leaves[leaf];
                    self.set_leaf(leaf, base + offset, once.count, once.stride);
                    return;
                }
                Step::Call { routine, offset, count, stride } => {
                    let base = base + offset;
                    self.frames.push(Frame { routine, step: 0, base, left: count, stride });
                }
            }
        }
        self.left = 0;
    }
}

impl<'p> Machine<'p> {
    pub fn of_bytes(at: &'p mut Cursor) -> Machine<'p> {
        Machine { plan: &BYTES, at }
    }

    /// Whether all is done.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.at.left == 0
    }

    /// Blocks of an iteration.
    #[inline]
    pub fn blocks(&self) -> &'p [Block] {
        &self.plan.leaves[self.at.leaf].blocks
    }

    /// Bytes of an iteration.
    #[inline]
    pub fn width(&self) -> u64 {
        self.plan.leaves[self.at.leaf].width
    }

    /// Iterations left, with this one.
    #[inline]
    pub fn left(&self) -> u64 {
        self.at.left
    }

    #[inline]
    pub fn base(&self) -> i64 {
        self.at.base
    }

    #[inline]
    pub fn stride(&self) -> i64 {
        self.at.stride
    }

    /// Whether an iteration begins here.
    #[inline]
    pub fn at_start(&self) -> bool {
        self.at.block == 0 && self.at.within == 0
    }

    /// The next byte, and how many bytes from it on are consecutive.
    #[inline]
    pub fn chunk(&self) -> (i64, u64) {
        let blocks = self.blocks();
        let block = blocks[self.at.block];
        let first = self.at.base + block.offset + self.at.within as i64;
        let iterations = if self.is_flat() { self.at.left } else { 1 };
        (first, block.len * iterations - self.at.within)
    }

    /// Whether the iterations of the leaf are one run of bytes.
    #[inline]
    pub fn is_flat(&self) -> bool {
        let blocks = self.blocks();
        blocks.len() == 1 && (self.at.stride == blocks[0].len as i64 || self.at.left == 1)
    }

    /// Passes over bytes, no more than [`chunk`](Self::chunk) tells.
    #[inline]
    pub fn pass(&mut self, bytes: u64) {
        let blocks = self.blocks();
        let at = &mut *self.at;
        at.within += bytes;
        let len = blocks[at.block].len;
        if at.within < len {
            return;
        }
        if blocks.len() == 1 {
            let iterations = at.within / len;
            at.within -= iterations * len;
            self.pass_iterations(iterations);
        } else {
            at.within = 0;
            at.block += 1;
            if at.block == blocks.len() {
                at.block = 0;
                self.pass_iterations(1);
            }
        }
    }

    /// Passes over iterations, no more than are left.
    #[inline]
    pub fn pass_iterations(&mut self, iterations: u64) {
        self.at.left -= iterations;
        if self.at.left == 0 {
            self.at.next_leaf(self.plan);
        } else {
            self.at.base += iterations as i64 * self.at.stride;
        }
    }
}
