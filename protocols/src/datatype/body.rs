//! The normal form between a description and its program: blocks, and loops over bodies of blocks and loops.
//!
//! Adjacent blocks are one, loops whose iterations continue each other are one, and equal blocks at equal distances are
//! a loop; the order of bytes is that of the description always.

use super::error::DatatypeError;
use std::sync::Arc;

/// Most levels of loops.
pub const MAX_DEPTH: u32 = 32;
/// Furthest from the base, and longest, in bytes: sums of a few such numbers fit 64 bits.
pub(super) const MAX_SPAN: i64 = 1 << 52;
/// A nested body of so many items is repeated in place rather than called.
const INLINE_ITEMS: usize = 8;
/// Equal blocks at equal distances from which on they are a loop.
const LOOP_MIN: usize = 4;

/// Consecutive bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// From the base, in bytes.
    pub offset: i64,
    /// In bytes, at least 1.
    pub len: u64,
}

#[derive(Clone, Debug)]
pub(super) enum Item {
    Block(Block),
    Loop(Loop),
}

/// A body, `count` times (at least once), `stride` bytes apart.
#[derive(Clone, Debug)]
pub(super) struct Loop {
    pub offset: i64,
    pub count: u64,
    pub stride: i64,
    pub body: Arc<Body>,
}

/// What is known about a body without running it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// Bytes that it moves.
    pub size: u64,
    /// First byte that it touches, from its base; 0 if none.
    pub low: i64,
    /// Behind the last byte that it touches; 0 if none.
    pub high: i64,
    /// Blocks that it moves.
    pub chunks: u64,
    /// Levels of loops.
    pub depth: u32,
}

#[derive(Debug, Default)]
pub(super) struct Body {
    pub items: Vec<Item>,
    pub facts: Facts,
}

impl Facts {
    fn of_block(block: Block) -> Result<Facts, DatatypeError> {
        let facts = Facts { size: block.len, low: block.offset, high: 0, chunks: 1, depth: 0 };
        facts.spanning(i128::from(block.offset), i128::from(block.offset) + i128::from(block.len))
    }

    fn of_loop(repeated: &Loop) -> Result<Facts, DatatypeError> {
        let Facts { size, low, high, chunks, depth } = repeated.body.facts;
        let depth = depth + 1;
        if depth > MAX_DEPTH {
            return Err(DatatypeError::TooDeep { depth });
        }
        let last = i128::from(repeated.stride) * (i128::from(repeated.count) - 1);
        let offset = i128::from(repeated.offset);
        let (low, high) = (i128::from(low) + offset + last.min(0), i128::from(high) + offset + last.max(0));
        let facts = Facts {
            size: size.checked_mul(repeated.count).ok_or(DatatypeError::TooLarge)?,
            chunks: chunks.checked_mul(repeated.count).ok_or(DatatypeError::TooLarge)?,
            depth,
            low: 0,
            high: 0,
        };
        facts.spanning(low, high)
    }

    fn spanning(mut self, low: i128, high: i128) -> Result<Facts, DatatypeError> {
        let limit = i128::from(MAX_SPAN);
        if low < -limit || high > limit || self.size > MAX_SPAN as u64 {
            return Err(DatatypeError::TooLarge);
        }
        (self.low, self.high) = (low as i64, high as i64);
        Ok(self)
    }

    fn and(self, next: Facts) -> Result<Facts, DatatypeError> {
        if self.size == 0 || next.size == 0 {
            return Ok(if self.size == 0 { next } else { self });
        }
        let facts = Facts {
            size: self.size + next.size,
            chunks: self.chunks + next.chunks,
            depth: self.depth.max(next.depth),
            low: 0,
            high: 0,
        };
        facts.spanning(i128::from(self.low.min(next.low)), i128::from(self.high.max(next.high)))
    }
}

impl Item {
    fn facts(&self) -> Result<Facts, DatatypeError> {
        match self {
            Item::Block(block) => Facts::of_block(*block),
            Item::Loop(repeated) => Facts::of_loop(repeated),
        }
    }

    /// Moved by so many bytes. Checked with the facts of what it becomes a part of.
    fn shifted(&self, by: i64) -> Result<Item, DatatypeError> {
        let mut item = self.clone();
        let offset = match &mut item {
            Item::Block(block) => &mut block.offset,
            Item::Loop(repeated) => &mut repeated.offset,
        };
        *offset = offset.checked_add(by).ok_or(DatatypeError::TooLarge)?;
        Ok(item)
    }
}

impl Body {
    /// A body of these items as they are.
    pub fn new(items: Vec<Item>) -> Result<Body, DatatypeError> {
        let mut facts = Facts::default();
        for item in &items {
            facts = facts.and(item.facts()?)?;
        }
        Ok(Body { items, facts })
    }

    /// One block; an empty one is nothing.
    pub fn block(offset: i64, len: u64) -> Result<Body, DatatypeError> {
        Body::new(if len == 0 { Vec::new() } else { vec![Item::Block(Block { offset, len })] })
    }

    /// This body so many times.
    pub fn repeat(self: &Arc<Self>, count: u64, stride: i64) -> Result<Arc<Body>, DatatypeError> {
        if count == 1 || self.items.is_empty() {
            return Ok(self.clone());
        }
        if count == 0 {
            return Ok(Arc::default());
        }
        let item = match &self.items[..] {
            [Item::Block(block)] if i128::from(stride) == i128::from(block.len) => {
                let len = block.len.checked_mul(count).ok_or(DatatypeError::TooLarge)?;
                Item::Block(Block { offset: block.offset, len })
            }
            [Item::Loop(inner)]
                if i128::from(stride) == i128::from(inner.stride) * i128::from(inner.count) =>
            {
                let count = inner.count.checked_mul(count).ok_or(DatatypeError::TooLarge)?;
                Item::Loop(Loop { count, ..inner.clone() })
            }
            _ => Item::Loop(Loop { offset: 0, count, stride, body: self.clone() }),
        };
        Ok(Arc::new(Body::new(vec![item])?))
    }

    /// Bodies at offsets, one behind the other.
    pub fn concat(parts: impl IntoIterator<Item = (i64, Arc<Body>)>) -> Result<Arc<Body>, DatatypeError> {
        let mut items: Vec<Item> = Vec::new();
        for (offset, body) in parts {
            if body.items.len() > INLINE_ITEMS {
                // Called rather than repeated: one routine for all the places where it is used.
                items.push(Item::Loop(Loop { offset, count: 1, stride: 0, body }));
                continue;
            }
            for item in &body.items {
                let item = item.shifted(offset)?;
                match (items.last_mut(), &item) {
                    (Some(Item::Block(last)), Item::Block(next))
                        if i128::from(last.offset) + i128::from(last.len) == i128::from(next.offset) =>
                    {
                        last.len = last.len.checked_add(next.len).ok_or(DatatypeError::TooLarge)?;
                    }
                    _ => items.push(item),
                }
            }
        }
        let items = with_loops(items)?;
        // A body that is nothing but a call of another is that other one.
        if let [Item::Loop(only)] = &items[..]
            && only.count == 1
            && only.offset == 0
        {
            return Ok(only.body.clone());
        }
        Ok(Arc::new(Body::new(items)?))
    }
}

/// Equal blocks at equal distances become loops.
fn with_loops(items: Vec<Item>) -> Result<Vec<Item>, DatatypeError> {
    let mut out: Vec<Item> = Vec::new();
    let mut rest = &items[..];
    while let Some((first, behind)) = rest.split_first() {
        let (run, stride) = regular(rest);
        match first {
            Item::Block(block) if run >= LOOP_MIN => {
                let body = Arc::new(Body::block(0, block.len)?);
                out.push(Item::Loop(Loop { offset: block.offset, count: run as u64, stride, body }));
                rest = &rest[run..];
            }
            _ => {
                out.push(first.clone());
                rest = behind;
            }
        }
    }
    Ok(out)
}

/// How many equal blocks at equal distances these items begin with, and the distance.
fn regular(items: &[Item]) -> (usize, i64) {
    let [Item::Block(first), Item::Block(second), ..] = items else { return (1, 0) };
    let stride = second.offset.wrapping_sub(first.offset);
    let mut offset = first.offset;
    let mut run = 0;
    for item in items {
        match item {
            Item::Block(block) if block.len == first.len && block.offset == offset => run += 1,
            _ => break,
        }
        offset = offset.wrapping_add(stride);
    }
    (run, stride)
}
