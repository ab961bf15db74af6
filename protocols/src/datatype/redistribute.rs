//! From one layout straight into another (DGS-RM, G03 and G05).

use super::cursor::{Cursor, Machine};
use super::error::{Side, TransferError};
use super::heuristic::{Method, Thresholds};
use super::pair::{self, Mover};
use super::plan::Regular;
use super::signature::Signature;
use super::{Datatype, Source, Target};
use posthaste_core::memory::{Blocks, Piece, Rows};
use std::ops::Range;

/// So many elements of a datatype in a memory, the first of which is at an offset.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, Side};
///
/// let word = Datatype::of::<u32>();
/// let tail = Layout::new(&word, 3).at(8); // three words from byte 8 on
/// assert_eq!((tail.size(), tail.span()), (Some(12), (8, 20)));
/// assert!(tail.check(Side::Target, 20).is_ok());
/// assert!(tail.check(Side::Target, 19).is_err(), "the last byte is outside");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Layout<'d> {
    /// Of an element.
    pub datatype: &'d Datatype,
    /// Number of elements.
    pub count: u64,
    /// Of the base of the first one, from the beginning of the memory, in bytes.
    pub base: u64,
}

impl<'d> Layout<'d> {
    /// `count` elements from the beginning of the memory on.
    #[must_use]
    pub fn new(datatype: &'d Datatype, count: u64) -> Self {
        Self { datatype, count, base: 0 }
    }

    /// The same elements at an offset in bytes.
    #[must_use]
    pub fn at(self, base: u64) -> Self {
        Self { base, ..self }
    }

    /// Bytes of all elements; `None` if 64 bits do not count them.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        self.datatype.size().checked_mul(self.count)
    }

    /// What all elements are; `None` if 64 bits do not count them.
    #[must_use]
    pub fn signature(&self) -> Option<Signature> {
        self.datatype.signature().repeat(self.count)
    }

    /// The bytes that all elements touch, from the beginning of the memory: the first one, and the one behind the last.
    #[must_use]
    pub fn span(&self) -> (i128, i128) {
        let (low, high) = self.datatype.span(self.count);
        (low + i128::from(self.base), high + i128::from(self.base))
    }

    /// Whether all elements lie within a memory of `len` bytes; looked at once, before anything is moved.
    ///
    /// # Errors
    /// If they do not, or cannot be counted.
    pub fn check(&self, side: Side, len: u64) -> Result<u64, TransferError> {
        let size = self.size().ok_or(TransferError::Count { side, count: self.count })?;
        let (low, high) = self.span();
        if size > 0 && (low < 0 || high > i128::from(len)) {
            return Err(TransferError::OutOfBounds { side, low, high, len });
        }
        Ok(size)
    }

    /// Whether two layouts have the same elements in the same order; `false` if 64 bits do not count them.
    #[must_use]
    pub fn matches(&self, other: &Layout<'_>) -> bool {
        let (one, two) = (self.datatype.signature(), other.datatype.signature());
        let same = match (one.kind, two.kind) {
            // Of one kind: the number of them says it all.
            (Some(kind), Some(same)) if kind == same => {
                one.elements.checked_mul(self.count) == two.elements.checked_mul(other.count)
            }
            _ if one == two && self.count == other.count => true,
            _ => self.signature() == other.signature(),
        };
        same && self.size().is_some()
    }

    /// Where all bytes are, if they are in one run. To be asked of what was checked.
    pub(crate) fn run(&self) -> Option<Range<usize>> {
        let element = self.datatype.plan().regular?.repeat(self.count, self.datatype.extent())?;
        let len = match element.count {
            1 => element.len,
            count if u64::try_from(element.stride) == Ok(element.len) => element.len.checked_mul(count)?,
            _ => return None,
        };
        let first = usize::try_from(element.first.checked_add(i64::try_from(self.base).ok()?)?).ok()?;
        Some(first..first.checked_add(usize::try_from(len).ok()?)?)
    }

    /// Brings a cursor to the first byte.
    pub(super) fn start(&self, cursor: &mut Cursor) {
        // Checked before: a base beyond that would be outside of any memory.
        cursor.start(self.datatype, self.base as i64, self.count);
    }
}

/// Copies between two memories that are there as a whole.
pub(super) struct Direct<'t, 's> {
    pub target: Target<'t>,
    pub source: Source<'s>,
}

/// A block is not in the bounds that were checked, which cannot be.
#[derive(Debug)]
pub(super) struct OutOfBounds;

impl Mover for Direct<'_, '_> {
    const IN_ORDER: bool = false;
    type Error = OutOfBounds;

    #[inline]
    fn copy(&mut self, blocks: &Blocks) -> Result<(), OutOfBounds> {
        if self.target.copy_blocks(&self.source, blocks) { Ok(()) } else { Err(OutOfBounds) }
    }

    #[inline]
    fn copy_rows(&mut self, rows: &Rows) -> Result<(), OutOfBounds> {
        if self.target.copy_rows(&self.source, rows) { Ok(()) } else { Err(OutOfBounds) }
    }

    #[inline]
    fn copy_pieces(&mut self, pieces: &[Piece]) -> Result<(), OutOfBounds> {
        if self.target.copy_pieces(&self.source, pieces) { Ok(()) } else { Err(OutOfBounds) }
    }
}

/// What is checked before the first byte moves: bounds and signatures. Returns the number of bytes.
pub(crate) fn checked(
    (target, target_len): (&Layout<'_>, u64),
    (source, source_len): (&Layout<'_>, u64),
) -> Result<u64, TransferError> {
    if !target.matches(source) {
        let signature = |layout: &Layout<'_>, side| {
            let count = layout.count;
            layout.signature().map(Box::new).ok_or(TransferError::Count { side, count })
        };
        return Err(TransferError::Signature {
            source_signature: signature(source, Side::Source)?,
            target_signature: signature(target, Side::Target)?,
        });
    }
    let (to_size, from_size) =
        (target.check(Side::Target, target_len)?, source.check(Side::Source, source_len)?);
    if to_size != from_size {
        // Equal signatures of different sizes: one of them is a peer's and a lie.
        return Err(TransferError::Length { len: from_size, size: to_size });
    }
    Ok(to_size)
}

/// Copies the elements of one layout straight to those of another: no byte is copied twice. Returns the number of bytes.
///
/// The order in which bytes are moved is not told. Where elements of the target overlap each other, which of them ends
/// there is not told either, and source and target must not overlap if both are shared memory.
///
/// # Errors
/// If the layouts have different elements, or are not inside of their memories. Nothing was copied then.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, redistribute};
///
/// // A matrix of 2 × 3 is transposed: its columns, one after the other, become rows.
/// let byte = Datatype::of::<u8>();
/// let columns = byte.vector(2, 1, 3)?.resized(0, 1)?;
/// let (matrix, mut transposed) = ([1, 2, 3, 4, 5, 6], [0; 6]);
/// let bytes = redistribute(&mut transposed, &Layout::new(&byte, 6), &matrix, &Layout::new(&columns, 3))?;
/// assert_eq!((bytes, transposed), (6, [1, 4, 2, 5, 3, 6]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn redistribute<'t, 's>(
    target: impl Into<Target<'t>>,
    to: &Layout<'_>,
    source: impl Into<Source<'s>>,
    from: &Layout<'_>,
) -> Result<u64, TransferError> {
    let (mut target, source) = (target.into(), source.into());
    if let Some(blocks) = at_once(to, from)
        && to.matches(from)
        && target.copy_blocks(&source, &blocks)
    {
        return Ok(blocks.len * blocks.count);
    }
    let bytes = checked((to, target.len() as u64), (from, source.len() as u64))?;
    direct(target, to, source, from, bytes)?;
    Ok(bytes)
}

/// All of a transfer as one loop over blocks, if it is that, and provided that both layouts have as many bytes.
#[inline]
fn at_once(to: &Layout<'_>, from: &Layout<'_>) -> Option<Blocks> {
    let regular = |layout: &Layout<'_>| {
        let element = layout.datatype.plan().regular?.repeat(layout.count, layout.datatype.extent())?;
        let first = element.first.checked_add(i64::try_from(layout.base).ok()?)?;
        Some(Regular { first, ..element })
    };
    let (to, from) = (regular(to)?, regular(from)?);
    // A single block is as good as several without a gap.
    let (len, count, target_stride, source_stride) = match (to.count, from.count) {
        _ if to.len == from.len => (to.len, to.count, to.stride, from.stride),
        (1, _) => (from.len, from.count, from.len as i64, from.stride),
        (_, 1) => (to.len, to.count, to.stride, to.len as i64),
        _ => return None,
    };
    // Blocks in one place may be more than can be counted.
    len.checked_mul(count)?;
    Some(Blocks { target: to.first, target_stride, source: from.first, source_stride, len, count })
}

fn direct(
    target: Target<'_>,
    to: &Layout<'_>,
    source: Source<'_>,
    from: &Layout<'_>,
    bytes: u64,
) -> Result<(), TransferError> {
    let (to_len, (low, high)) = (target.len() as u64, to.span());
    let mut mover = Direct { target, source };
    let (mut to_cursor, mut from_cursor) = (Cursor::of_bytes(0, 0), Cursor::of_bytes(0, 0));
    to.start(&mut to_cursor);
    from.start(&mut from_cursor);
    let mut master = Machine { plan: from.datatype.plan(), at: &mut from_cursor };
    let mut worker = Machine { plan: to.datatype.plan(), at: &mut to_cursor };
    // The bounds of both programs were checked, so that no copy is refused.
    pair::run(&mut worker, &mut master, bytes, &mut mover).map_err(|_| TransferError::OutOfBounds {
        side: Side::Target,
        low,
        high,
        len: to_len,
    })
}

/// The same over staging memory, filled and drained by two machines as often as it takes.
///
/// # Errors
/// As [`redistribute`]; also if there is no staging memory.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, redistribute_staged};
///
/// let every_other = Datatype::of::<u8>().vector(4, 1, 2)?;
/// let pairs = Datatype::of::<u8>().vector(2, 2, 3)?;
/// let (source, mut out, mut staging) = ([1, 0, 2, 0, 3, 0, 4], [0; 5], [0; 3]);
/// redistribute_staged(&mut out, &Layout::new(&pairs, 1), &source, &Layout::new(&every_other, 1), &mut staging)?;
/// assert_eq!(out, [1, 2, 0, 3, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn redistribute_staged<'t, 's>(
    target: impl Into<Target<'t>>,
    to: &Layout<'_>,
    source: impl Into<Source<'s>>,
    from: &Layout<'_>,
    staging: &mut [u8],
) -> Result<u64, TransferError> {
    let (target, source) = (target.into(), source.into());
    let bytes = checked((to, target.len() as u64), (from, source.len() as u64))?;
    if staging.is_empty() && bytes > 0 {
        return Err(TransferError::Length { len: 0, size: bytes });
    }
    staged(target, to, source, from, staging)?;
    Ok(bytes)
}

/// The same for layouts that were checked, over staging memory of a byte at least.
fn staged(
    mut target: Target<'_>,
    to: &Layout<'_>,
    source: Source<'_>,
    from: &Layout<'_>,
    staging: &mut [u8],
) -> Result<(), TransferError> {
    let (mut fill, mut drain) = (super::Machine::new(from)?, super::Machine::new(to)?);
    while fill.remaining() > 0 {
        let filled = fill.gather(source, &mut *staging)?;
        drain.scatter(target.reborrow(), &staging[..filled as usize])?;
    }
    Ok(())
}

/// The same by the method that the thresholds choose; tells which one it was.
///
/// # Errors
/// As [`redistribute`].
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, Method, Thresholds, redistribute_with};
///
/// let every_other = Datatype::of::<u8>().vector(4, 1, 2)?;
/// let layout = Layout::new(&every_other, 1);
/// let (source, mut out) = ([1, 9, 2, 9, 3, 9, 4], [0; 7]);
/// // Chunks of up to eight bytes go over staging memory.
/// let thresholds = Thresholds { granularity: 8, ..Thresholds::default() };
/// assert_eq!(redistribute_with(&thresholds, &mut out, &layout, &source, &layout)?, Method::Staged);
/// assert_eq!(out, [1, 0, 2, 0, 3, 0, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn redistribute_with<'t, 's>(
    thresholds: &Thresholds,
    target: impl Into<Target<'t>>,
    to: &Layout<'_>,
    source: impl Into<Source<'s>>,
    from: &Layout<'_>,
) -> Result<Method, TransferError> {
    let method = thresholds.method(to, from);
    if method == Method::Direct {
        redistribute(target, to, source, from)?;
        return Ok(method);
    }
    let (target, source) = (target.into(), source.into());
    let bytes = checked((to, target.len() as u64), (from, source.len() as u64))?;
    // Layouts that name bytes many times may have more than there is memory.
    let most = usize::try_from(bytes).unwrap_or(usize::MAX).min(target.len().max(source.len()));
    let mut staging = vec![0; thresholds.staging.clamp(1, most.max(1))];
    staged(target, to, source, from, &mut staging)?;
    Ok(method)
}
