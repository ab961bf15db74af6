//! A program as the machines run it: its loops around blocks become *leaves*, which are copied as a whole.

use super::body::{Block, Body, Item, Loop};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// A loop of so many blocks in all is unrolled into the iterations of the loop around it.
const UNROLL_MAX: u64 = 16;
/// Likewise beside other blocks of a body.
const UNROLL_BESIDE_MAX: u64 = 8;
/// Blocks that may come of unrolling in all, and beyond that one for so many items of the program: who calls the same loop ever again
/// in a few bytes does not get memory for each call.
const UNROLL_FREE: u64 = 1024;
const ITEMS_PER_UNROLLED: u64 = 4;

/// Blocks that are repeated at a regular distance: what a copy loop can do in one go.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    /// Of one iteration, in order.
    pub blocks: Arc<[Block]>,
    /// Bytes of one iteration.
    pub width: u64,
    /// Iterations.
    pub count: u64,
    /// From one iteration to the next, in bytes.
    pub stride: i64,
    /// From one block of an iteration to the next, if there are several which are equally long and equally far apart.
    pub pitch: Option<i64>,
}

impl Leaf {
    fn blocks_in_all(&self) -> u64 {
        self.count.saturating_mul(self.blocks.len() as u64)
    }

    /// The same as blocks of a single iteration. For few of them.
    fn unrolled(&self, offset: i64) -> impl Iterator<Item = Block> + '_ {
        (0..self.count as i64).flat_map(move |iteration| {
            let base = offset + iteration * self.stride;
            self.blocks.iter().map(move |block| Block { offset: base + block.offset, len: block.len })
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A leaf by number, at an offset.
    Leaf { leaf: usize, offset: i64 },
    /// A routine by number, run so many times.
    Call { routine: usize, offset: i64, count: u64, stride: i64 },
}

#[derive(Debug)]
pub(super) struct Plan {
    pub leaves: Vec<Leaf>,
    pub routines: Vec<Box<[Step]>>,
    /// Bytes of one run of each routine.
    pub sizes: Vec<u64>,
    /// Number of the routine that is one element.
    pub main: usize,
    /// An element as a leaf of one iteration, if it is a small one of several.
    pub unrolled: Option<usize>,
    /// An element as equal blocks at equal distances, if it is that.
    pub regular: Option<Regular>,
}

/// What is known while a plan is made: a program may name the same things again and again.
struct Known {
    /// The routines that bodies became.
    routines: HashMap<usize, usize>,
    /// The leaves that are routines so many times, at that stride.
    loops: HashMap<(usize, u64, i64), usize>,
    /// Blocks that may still come of unrolling.
    spare: u64,
}

impl Known {
    /// Takes so many blocks of those that may come of unrolling.
    fn affords(&mut self, blocks: u64) -> bool {
        let left = self.spare.checked_sub(blocks);
        self.spare = left.unwrap_or(self.spare);
        left.is_some()
    }
}

/// Equal blocks at equal distances.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regular {
    /// Where the first one begins.
    pub first: i64,
    /// Of a block.
    pub len: u64,
    pub count: u64,
    pub stride: i64,
}

impl Regular {
    /// So many of them, one extent apart, if that is regular as well.
    #[inline]
    pub fn repeat(self, count: u64, extent: i64) -> Option<Regular> {
        let all = match self.count {
            _ if count == 1 => self,
            1 => Regular { count, stride: extent, ..self },
            own if (own as i64).checked_mul(self.stride) == Some(extent) => {
                Regular { count: own.checked_mul(count)?, ..self }
            }
            _ => return None,
        };
        if all.stride == all.len as i64 {
            return Some(Regular { len: all.len.checked_mul(all.count)?, count: 1, ..all });
        }
        Some(all)
    }
}

/// The plan of single bytes: a contiguous buffer is so many of them, one behind the other.
pub(super) static BYTES: LazyLock<Plan> = LazyLock::new(|| Plan {
    leaves: vec![Leaf {
        blocks: Arc::new([Block { offset: 0, len: 1 }]),
        width: 1,
        count: 1,
        stride: 1,
        pitch: None,
    }],
    routines: vec![Box::new([Step::Leaf { leaf: 0, offset: 0 }])],
    sizes: vec![1],
    main: 0,
    unrolled: None,
    regular: None,
});

/// How many blocks these items begin with.
fn blocks_ahead(items: &[Item]) -> usize {
    items.iter().take_while(|item| matches!(item, Item::Block(_))).count()
}

fn pitch(blocks: &[Block]) -> Option<i64> {
    let [first, second, ..] = blocks else { return None };
    let pitch = second.offset.checked_sub(first.offset)?;
    let alike = |pair: &[Block]| {
        pair[1].len == first.len && pair[1].offset.checked_sub(pair[0].offset) == Some(pitch)
    };
    blocks.windows(2).all(alike).then_some(pitch)
}

impl Plan {
    pub fn new(body: &Arc<Body>) -> Plan {
        let (leaves, routines, sizes) = (Vec::new(), Vec::new(), Vec::new());
        let mut plan = Plan { leaves, routines, sizes, main: 0, unrolled: None, regular: None };
        let (routines, loops) = (HashMap::new(), HashMap::new());
        plan.main = plan.lower(body, &mut Known { routines, loops, spare: UNROLL_FREE });
        if let [Step::Leaf { leaf, offset }] = plan.routines[plan.main][..]
            && let Leaf { blocks, count, stride, .. } = &plan.leaves[leaf]
            && let [block] = blocks[..]
        {
            let first = offset + block.offset;
            plan.regular = Some(Regular { first, len: block.len, count: *count, stride: *stride });
        }
        if let [Step::Leaf { leaf, offset }] = plan.routines[plan.main][..]
            && plan.leaves[leaf].count > 1
            && plan.leaves[leaf].blocks_in_all() <= UNROLL_MAX
        {
            let blocks = plan.leaves[leaf].unrolled(offset).collect();
            plan.unrolled = Some(plan.leaf(blocks, 1, 0));
        }
        plan
    }

    /// Bytes of a step.
    pub fn size(&self, step: &Step) -> u64 {
        match *step {
            Step::Leaf { leaf, .. } => self.leaves[leaf].width * self.leaves[leaf].count,
            Step::Call { routine, count, .. } => self.sizes[routine] * count,
        }
    }

    fn leaf(&mut self, blocks: Arc<[Block]>, count: u64, stride: i64) -> usize {
        let width = blocks.iter().map(|block| block.len).sum();
        let pitch = pitch(&blocks);
        self.leaves.push(Leaf { blocks, width, count, stride, pitch });
        self.leaves.len() - 1
    }

    /// Makes a routine of one run of a body; returns its number.
    fn lower(&mut self, body: &Arc<Body>, known: &mut Known) -> usize {
        let key = Arc::as_ptr(body) as usize;
        if let Some(number) = known.routines.get(&key) {
            return *number;
        }
        known.spare += body.items.len() as u64 / ITEMS_PER_UNROLLED;
        let mut steps = Vec::new();
        let mut blocks: Vec<Block> = Vec::new();
        for (index, item) in body.items.iter().enumerate() {
            let repeated = match item {
                Item::Block(block) => {
                    if blocks.len() == blocks.capacity() {
                        blocks.reserve_exact(blocks_ahead(&body.items[index..]));
                    }
                    blocks.push(*block);
                    continue;
                }
                Item::Loop(repeated) => repeated,
            };
            let routine = self.lower(&repeated.body, known);
            let step = self.repeated(routine, repeated, known);
            match step {
                Step::Leaf { leaf, offset }
                    if body.items.len() > 1
                        && self.leaves[leaf].blocks_in_all() <= UNROLL_BESIDE_MAX
                        && known.affords(self.leaves[leaf].blocks_in_all()) =>
                {
                    blocks.extend(self.leaves[leaf].unrolled(offset));
                }
                step => {
                    self.flush(&mut blocks, &mut steps);
                    if steps.len() == steps.capacity() {
                        // For all that follow, unless blocks lie between them.
                        steps.reserve_exact(body.items.len() - index);
                    }
                    steps.push(step);
                }
            }
        }
        self.flush(&mut blocks, &mut steps);
        self.routines.push(steps.into());
        self.sizes.push(body.facts.size);
        // What only one item names is not come by again.
        if Arc::strong_count(body) > 1 {
            known.routines.insert(key, self.routines.len() - 1);
        }
        self.routines.len() - 1
    }

    /// A routine so many times: a leaf, if it is one.
    fn repeated(&mut self, routine: usize, repeated: &Loop, known: &mut Known) -> Step {
        let Loop { offset, count, stride, .. } = *repeated;
        let [Step::Leaf { leaf, offset: inner }] = self.routines[routine][..] else {
            return Step::Call { routine, offset, count, stride };
        };
        if count == 1 {
            return Step::Leaf { leaf, offset: offset + inner };
        }
        let once = &self.leaves[leaf];
        if once.count == 1 {
            // What is known of the blocks stays known: a program may name the same ones any number of times.
            let again = Leaf { blocks: once.blocks.clone(), count, stride, ..*once };
            let leaf = *known.loops.entry((routine, count, stride)).or_insert_with(|| {
                self.leaves.push(again);
                self.leaves.len() - 1
            });
            return Step::Leaf { leaf, offset: offset + inner };
        }
        let (in_all, own) = (once.blocks_in_all(), once.count);
        if in_all <= UNROLL_MAX && count > own && known.affords(in_all) {
            let blocks = self.leaves[leaf].unrolled(inner).collect();
            return Step::Leaf { leaf: self.leaf(blocks, count, stride), offset };
        }
        Step::Call { routine, offset, count, stride }
    }

    fn flush(&mut self, blocks: &mut Vec<Block>, steps: &mut Vec<Step>) {
        if !blocks.is_empty() {
            let leaf = self.leaf(std::mem::take(blocks).into(), 1, 0);
            steps.push(Step::Leaf { leaf, offset: 0 });
        }
    }
}
