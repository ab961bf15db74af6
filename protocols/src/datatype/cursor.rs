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
    /// Bytes of an iteration.
    width: u64,
    /// Where its block begins, if there is only one.
    only: Option<i64>,
}

/// A cursor together with its program.
pub(super) struct Machine<'p> {
    pub plan: &'p Plan,
    pub at: &'p mut Cursor,
}

impl Cursor {
    /// Goes to the first byte of `count` elements, the first of which is at `base`. In place, because a cursor is in
    /// use at once: to move it would be to wait for what was just written.
    pub fn start(&mut self, datatype: &Datatype, base: i64, count: u64) {
        self.frames.clear();
        // Of what has no bytes not even the plan is made: it may take long, and nothing bounds the size of such a program.
        if datatype.size() == 0 || count == 0 {
            self.left = 0;
            return;
        }
        let plan = datatype.plan();
        let extent = datatype.extent();
        let [Step::Leaf { leaf, offset }] = plan.routines[plan.main][..] else {
            self.enter(plan, base, count, extent);
            return;
        };
        let once = &plan.leaves[leaf];
        let continued = (once.count as i64).checked_mul(once.stride) == Some(extent);
        let total = once.count.checked_mul(count);
        match (plan.unrolled, total) {
            _ if once.count == 1 => self.set_leaf(plan, leaf, base + offset, count, extent),
            (_, Some(total)) if continued => self.set_leaf(plan, leaf, base + offset, total, once.stride),
            _ if count == 1 => self.set_leaf(plan, leaf, base + offset, once.count, once.stride),
            (Some(unrolled), _) if count >= UNROLL_MIN => self.set_leaf(plan, unrolled, base, count, extent),
            _ => self.enter(plan, base, count, extent),
        }
    }

    /// At the first of `len` consecutive bytes, which begin at `base`.
    pub fn of_bytes(base: i64, len: u64) -> Cursor {
        let frames = Vec::new();
        Cursor { frames, leaf: 0, base, left: len, stride: 1, block: 0, within: 0, width: 1, only: Some(0) }
    }

    fn enter(&mut self, plan: &Plan, base: i64, left: u64, stride: i64) {
        self.frames.push(Frame { routine: plan.main, step: 0, base, left, stride });
        self.next_leaf(plan);
    }

    #[inline]
    fn set_leaf(&mut self, plan: &Plan, leaf: usize, base: i64, left: u64, stride: i64) {
        (self.leaf, self.base, self.left, self.stride) = (leaf, base, left, stride);
        (self.block, self.within) = (0, 0);
        let once = &plan.leaves[leaf];
        self.width = once.width;
        self.only = match once.blocks[..] {
            [block] => Some(block.offset),
            _ => None,
        };
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
                    self.set_leaf(plan, leaf, base + offset, once.count, once.stride);
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

    /// From one block of an iteration to the next, if there are several which are equally long and equally far apart.
    #[inline]
    pub fn pitch(&self) -> Option<i64> {
        if self.at.only.is_some() { None } else { self.plan.leaves[self.at.leaf].pitch }
    }

    /// Bytes of an iteration.
    #[inline]
    pub fn width(&self) -> u64 {
        self.at.width
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
        let (first, len) = match self.at.only {
            Some(offset) => {
                (offset, if self.is_flat() { self.at.width * self.at.left } else { self.at.width })
            }
            None => {
                let block = self.blocks()[self.at.block];
                (block.offset, block.len)
            }
        };
        (self.at.base + first + self.at.within as i64, len - self.at.within)
    }

    /// Whether the iterations of the leaf are one run of bytes.
    #[inline]
    pub fn is_flat(&self) -> bool {
        self.at.only.is_some() && (self.at.stride == self.at.width as i64 || self.at.left == 1)
    }

    /// Passes over bytes, no more than [`chunk`](Self::chunk) tells.
    #[inline]
    pub fn pass(&mut self, bytes: u64) {
        self.at.within += bytes;
        let Cursor { within, width, left, .. } = *self.at;
        if self.at.only.is_some() {
            if within < width {
                return;
            }
            // Mostly all of it; a division takes its time.
            let iterations = if within == width * left { left } else { within / width };
            self.at.within = within - iterations * width;
            self.pass_iterations(iterations);
            return;
        }
        let blocks = self.blocks();
        if within == blocks[self.at.block].len {
            self.settle(self.at.block + 1, 0);
        }
    }

    /// Goes on to a place in the iteration, or to the next one if there is no such block.
    #[inline]
    pub fn settle(&mut self, block: usize, within: u64) {
        (self.at.block, self.at.within) = (block, within);
        if block == self.blocks().len() {
            (self.at.block, self.at.within) = (0, 0);
            self.pass_iterations(1);
        }
    }

    /// Which block of an iteration is next, if iterations have several.
    #[inline]
    pub fn block(&self) -> Option<usize> {
        if self.at.only.is_some() { None } else { Some(self.at.block) }
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
