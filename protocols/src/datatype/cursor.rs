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
    #[inline]
    fn next_leaf(&mut self, plan: &Plan) {
        self.go_on(plan, 0);
    }

    /// Goes on from the end of a leaf to the leaf that has the byte so many bytes on. What is known to be passed over as a
    /// whole is not looked into: only the rests of what is under way and the steps to that byte are looked at. Returns
    /// how many bytes of the leaf are passed over as well, and how many steps were looked at.
    #[inline(always)]
    fn go_on(&mut self, plan: &Plan, mut bytes: u64) -> (u64, usize) {
        let mut looked = 0;
        while let Some(frame) = self.frames.last_mut() {
            looked += 1;
            let Some(step) = plan.routines[frame.routine].get(frame.step) else {
                let passed = whole_runs(plan, frame.routine, frame.left - 1, &mut bytes);
                frame.left -= 1 + passed;
                if frame.left == 0 {
                    self.frames.pop();
                } else {
                    frame.base += (1 + passed) as i64 * frame.stride;
                    frame.step = 0;
                }
                continue;
            };
            frame.step += 1;
            if bytes > 0 && plan.size(step) <= bytes {
                bytes -= plan.size(step);
                continue;
            }
            let base = frame.base;
            match *step {
                Step::Leaf { leaf, offset } => {
                    let once = &plan.leaves[leaf];
                    self.set_leaf(plan, leaf, base + offset, once.count, once.stride);
                    return (bytes, looked);
                }
                Step::Call { routine, offset, count, stride } => {
                    let passed = whole_runs(plan, routine, count, &mut bytes);
                    let (base, left) = (base + offset + passed as i64 * stride, count - passed);
                    self.frames.push(Frame { routine, step: 0, base, left, stride });
                }
            }
        }
        self.left = 0;
        (0, looked)
    }
}

/// How many of so many runs of a routine are passed over as a whole; takes their bytes off.
#[inline(always)]
fn whole_runs(plan: &Plan, routine: usize, most: u64, bytes: &mut u64) -> u64 {
    if *bytes == 0 {
        return 0;
    }
    let runs = most.min(*bytes / plan.sizes[routine]);
    *bytes -= runs * plan.sizes[routine];
    runs
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

    /// Passes over bytes without moving them, no more than are left. Returns how many steps of the program were looked at:
    /// none of those that are passed over as a whole within another.
    pub fn skip(&mut self, bytes: u64) -> usize {
        if self.at.left == 0 {
            return 0;
        }
        let begun: u64 = self.blocks()[..self.at.block].iter().map(|block| block.len).sum();
        let passed = begun + self.at.within + bytes;
        let all = self.at.width * self.at.left;
        if passed < all {
            self.enter_leaf(passed);
            return 0;
        }
        let (within, looked) = self.at.go_on(self.plan, passed - all);
        self.enter_leaf(within);
        looked
    }

    /// Goes to the byte so many bytes behind the beginning of the iteration that is under way.
    fn enter_leaf(&mut self, bytes: u64) {
        if bytes < self.at.width {
            self.enter_iteration(bytes);
            return;
        }
        let iterations = bytes / self.at.width;
        self.pass_iterations(iterations);
        self.enter_iteration(bytes - iterations * self.at.width);
    }

    fn enter_iteration(&mut self, bytes: u64) {
        (self.at.block, self.at.within) = (0, bytes);
        if self.at.only.is_some() {
            return;
        }
        for block in self.blocks() {
            if self.at.within < block.len {
                return;
            }
            self.at.block += 1;
            self.at.within -= block.len;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datatype::Layout;
    use crate::datatype::machine;

    /// Steps that are looked at on the way to each of some bytes, from the beginning, at most; what is there is as expected.
    fn most_looked_at(datatype: &Datatype, count: u64, places: &[(u64, i64)]) -> usize {
        let looked = |(bytes, place): &(u64, i64)| {
            let mut cursor = Cursor::of_bytes(0, 0);
            cursor.start(datatype, 0, count);
            let mut running = Machine { plan: datatype.plan(), at: &mut cursor };
            let looked = running.skip(*bytes);
            assert_eq!((running.is_done(), running.chunk().0), (false, *place), "byte {bytes}");
            looked
        };
        places.iter().map(looked).max().unwrap_or(0)
    }

    /// Ten bytes, every other one; then nine, every third one: two leaves.
    fn two_leaves() -> Datatype {
        let byte = Datatype::of::<u8>();
        let (ten, nine) = (byte.hvector(10, 1, 2), byte.hvector(9, 1, 3));
        let fields = [(0, 1, ten.expect("small")), (20, 1, nine.expect("small"))];
        Datatype::structure(&fields).and_then(|both| both.resized(0, 50)).expect("small")
    }

    #[test]
    fn elements_and_loops_that_are_skipped_are_not_walked_through() {
        let element = two_leaves();
        let count = 10_000_000;
        let at = |number: i64| (19 * number as u64 + 12, 50 * number + 26);
        let near_the_end = [at(1), at(count - 2), at(count - 1), (19 * count as u64 - 1, 50 * count - 6)];
        assert!(most_looked_at(&element, count as u64, &near_the_end) <= 4);
        // The same as loops within loops of one element.
        let rows = element.contiguous(1000).and_then(|row| row.hvector(100, 1, 60_000)).expect("small");
        let planes = rows.hvector(100, 1, 6_000_000).expect("small");
        let in_planes = |plane: i64, row: i64, number: i64| {
            let (bytes, place) = at(number);
            (bytes + 19_000 * (100 * plane as u64 + row as u64), place + 6_000_000 * plane + 60_000 * row)
        };
        let far = [in_planes(0, 1, 2), in_planes(99, 99, 999), in_planes(50, 50, 500), in_planes(99, 0, 0)];
        assert!(most_looked_at(&planes, 1, &far) <= 12);
    }

    #[test]
    fn what_is_left_is_skipped_from_anywhere_at_once() {
        let element = two_leaves();
        let layout = Layout::new(&element, 10_000_000);
        let mut machine = machine::Machine::new(&layout).expect("countable");
        let memory = vec![0; 500_000_000];
        assert_eq!(machine.gather(&memory, &mut [1; 7]), Ok(7));
        let all = 19 * 10_000_000 - 7;
        assert_eq!((machine.skip(all - 3), machine.remaining()), (all - 3, 3));
        assert_eq!(machine.gather(&memory, &mut [1; 7]), Ok(3));
        assert_eq!(machine.skip(1), 0);
    }
}
