//! Copies of equally long blocks at regular distances, between private and shared memory.
//!
//! What a loop over single copies would check for each block is checked once for all of them, so that the loop itself
//! is as tight as one written for the two layouts.
#![allow(unsafe_code)]

use super::{LeasedPage, LoanedPage, SharedSlice};

/// Memory that is read.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Memory of this process alone.
    Private(&'a [u8]),
    /// Memory that other processes may write meanwhile, for as long as the right to read it lasts.
    Shared(LeasedPage<'a>),
}

/// Memory that is written.
///
/// # Examples
/// What was lent to be filled is not written behind that:
/// ```compile_fail,E0505
/// use posthaste_core::memory::Target;
///
/// fn write_behind(loan: posthaste_core::Loan, send: impl FnOnce(posthaste_core::Loan)) {
///     let Target::Shared(page) = Target::from(loan.memory()) else { return };
///     send(loan);
///     page.write(b"the receiver may be reading it");
/// }
/// ```
#[derive(Debug)]
pub enum Target<'a> {
    /// Memory of this process alone.
    Private(&'a mut [u8]),
    /// Memory that other processes may read and write meanwhile, for as long as the right to write it lasts.
    Shared(LoanedPage<'a>),
}

impl Source<'_> {
    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Source::Private(bytes) => bytes.len(),
            Source::Shared(page) => page.len(),
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it begins, and whether it is shared.
    #[inline]
    fn address(&self) -> (*const u8, bool) {
        match self {
            Source::Private(bytes) => (bytes.as_ptr(), false),
            Source::Shared(page) => (page.as_ptr().cast_const(), true),
        }
    }
}

impl Target<'_> {
    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Target::Private(bytes) => bytes.len(),
            Target::Shared(page) => page.len(),
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same memory for a shorter time.
    #[inline]
    #[must_use]
    pub fn reborrow(&mut self) -> Target<'_> {
        match self {
            Target::Private(bytes) => Target::Private(bytes),
            Target::Shared(page) => Target::Shared(*page),
        }
    }

    /// Copies blocks from `source`; false, and nothing is copied, if one of them is not inside on either side. Blocks
    /// that overlap in the target, and sources that overlap the target, give unspecified bytes.
    ///
    /// Shared memory: a block of 8 bytes at a multiple of 8 is written, and read, as a whole. Parts of longer blocks
    /// may be seen before others.
    #[inline]
    pub fn copy_blocks(&mut self, source: &Source<'_>, blocks: &Blocks) -> bool {
        if blocks.count == 0 || blocks.len == 0 {
            return true;
        }
        let Blocks { len, count, target, target_stride, source: first, source_stride } = *blocks;
        if !inside(target, target_stride, len, count, self.len())
            || !inside(first, source_stride, len, count, source.len())
        {
            return false;
        }
        let ((to, to_shared), (from, from_shared)) = (self.address(), source.address());
        // SAFETY: every block lies inside of both ranges (checked above), so that the offsets of the first ones are
        // inside, too; a private target is borrowed exclusively, so that it overlaps no source. Which of both is shared
        // is passed on.
        unsafe {
            let run = Run {
                to: to.offset(target as isize),
                from: from.offset(first as isize),
                to_stride: target_stride as isize,
                from_stride: source_stride as isize,
                len: len as usize,
                count: count as usize,
            };
            run.copy(to_shared, from_shared);
        }
        true
    }

    /// Copies rows of blocks from `source`; as [`copy_blocks`](Self::copy_blocks) of each row, but that nothing is copied if any
    /// block of any row is not inside.
    #[inline]
    pub fn copy_rows(&mut self, source: &Source<'_>, rows: &Rows) -> bool {
        let Rows { row, count, target_pitch, source_pitch } = *rows;
        if row.count == 0 || row.len == 0 || count == 0 {
            return true;
        }
        // The first and the last rows lie farthest out.
        let last = |first: i64, pitch: i64| {
            i64::try_from(count - 1).ok().and_then(|steps| pitch.checked_mul(steps)?.checked_add(first))
        };
        let (Some(last_target), Some(last_source)) =
            (last(row.target, target_pitch), last(row.source, source_pitch))
        else {
            return false;
        };
        let inside =
            [(row.target, row.source), (last_target, last_source)].into_iter().all(|(target, from)| {
                inside(target, row.target_stride, row.len, row.count, self.len())
                    && inside(from, row.source_stride, row.len, row.count, source.len())
            });
        if !inside {
            return false;
        }
        let ((to, to_shared), (from, from_shared)) = (self.address(), source.address());
        // SAFETY: as in `copy_blocks`, for every row: its blocks lie between those of the first and of the last row.
        unsafe {
            let first = Run {
                to: to.offset(row.target as isize),
                from: from.offset(row.source as isize),
                to_stride: row.target_stride as isize,
                from_stride: row.source_stride as isize,
                len: row.len as usize,
                count: row.count as usize,
            };
            first.copy_rows(
                (count as usize, target_pitch as isize, source_pitch as isize),
                (to_shared, from_shared),
            );
        }
        true
    }

    /// Copies single blocks from `source`, wherever each of them is; false if one of them is not inside on either side:
    /// then those before it have been copied.
    #[inline]
    pub fn copy_pieces(&mut self, source: &Source<'_>, pieces: &[Piece]) -> bool {
        let (to_len, from_len) = (self.len() as u64, source.len() as u64);
        let ((to, to_shared), (from, from_shared)) = (self.address(), source.address());
        for Piece { target, source, len } in pieces.iter().copied() {
            // Negative offsets are beyond any memory as well.
            let (target, source) = (target as u64, source as u64);
            if len > to_len || target > to_len - len || len > from_len || source > from_len - len {
                return false;
            }
            // SAFETY: the block lies inside of both ranges (just checked); a private target is borrowed exclusively, so
            // that it overlaps no source. Which of both is shared is passed on.
            unsafe {
                let (to, from) = (to.add(target as usize), from.add(source as usize));
                copy_block(to, from, len as usize, (to_shared, from_shared));
            }
        }
        true
    }

    /// Where it begins, and whether it is shared.
    #[inline]
    fn address(&mut self) -> (*mut u8, bool) {
        match self {
            Target::Private(bytes) => (bytes.as_mut_ptr(), false),
            Target::Shared(page) => (page.as_ptr(), true),
        }
    }
}

/// One block of bytes. All in bytes, from the beginning of either memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Where it goes to.
    pub target: i64,
    /// Where it comes from.
    pub source: i64,
    /// Length of it.
    pub len: u64,
}

/// Equally long blocks at regular distances on both sides. All in bytes, from the beginning of either memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Where the first block goes to.
    pub target: i64,
    /// From one block to the next in the target; may be negative or zero.
    pub target_stride: i64,
    /// Where the first block comes from.
    pub source: i64,
    /// From one block to the next in the source; may be negative or zero.
    pub source_stride: i64,
    /// Length of a block.
    pub len: u64,
    /// Number of blocks.
    pub count: u64,
}

/// Rows of blocks, at regular distances on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first one.
    pub row: Blocks,
    /// Number of rows.
    pub count: u64,
    /// From one row to the next in the target, in bytes; may be negative or zero.
    pub target_pitch: i64,
    /// From one row to the next in the source, in bytes; may be negative or zero.
    pub source_pitch: i64,
}

/// Whether all blocks (at least one) lie within `limit` bytes.
#[inline]
fn inside(first: i64, stride: i64, len: u64, count: u64, limit: usize) -> bool {
    let last = i64::try_from(count - 1)
        .ok()
        .and_then(|steps| stride.checked_mul(steps))
        .and_then(|span| first.checked_add(span));
    let Some(last) = last else { return false };
    first.min(last) >= 0 && (first.max(last) as u64).checked_add(len).is_some_and(|end| end <= limit as u64)
}

/// Blocks by address.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub to: *mut u8,
    pub from: *const u8,
    pub to_stride: isize,
    pub from_stride: isize,
    pub len: usize,
    pub count: usize,
}

impl Run {
    /// # Safety
    /// All blocks must be valid, to be written and to be read, and a private target must overlap no source.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    unsafe fn copy(&self, _: bool, _: bool) {
        // SAFETY: as promised by the caller. Assembly may access both kinds of memory.
        unsafe { super::x86::copy_blocks(*self) }
    }

    /// The same for so many rows, which are so far from each other in the target and in the source.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy), of all rows.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    unsafe fn copy_rows(&self, (rows, to_pitch, from_pitch): (usize, isize, isize), _: (bool, bool)) {
        // SAFETY: as in `copy`.
        unsafe { super::x86::copy_rows(*self, rows, to_pitch, from_pitch) }
    }

    /// The same for so many rows, which are so far from each other in the target and in the source.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy), of all rows.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn copy_rows(&self, (rows, to_pitch, from_pitch): (usize, isize, isize), shared: (bool, bool)) {
        for row in 0..rows as isize {
            let to = self.to.wrapping_offset(to_pitch * row);
            let from = self.from.wrapping_offset(from_pitch * row);
            // SAFETY: the row is one of those that the caller promised to be valid.
            unsafe { Run { to, from, ..*self }.copy(shared.0, shared.1) }
        }
    }

    /// # Safety
    /// All blocks must be valid, to be written and to be read, and a private target must overlap no source.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn copy(&self, to_shared: bool, from_shared: bool) {
        for index in 0..self.count as isize {
            let to = self.to.wrapping_offset(self.to_stride * index);
            let from = self.from.wrapping_offset(self.from_stride * index);
            // SAFETY: the block is one of those that the caller promised to be valid.
            unsafe { copy_block(to, from, self.len, (to_shared, from_shared)) }
        }
    }
}

/// Copies one block; which side is shared is told, target first.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, and must not overlap unless both are shared.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copy_block(to: *mut u8, from: *const u8, len: usize, _: (bool, bool)) {
    // SAFETY: as promised by the caller. Assembly may access both kinds of memory.
    unsafe { super::x86::copy_block(to, from, len) }
}

/// Copies one block; which side is shared is told, target first.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, and must not overlap unless both are shared.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_block(to: *mut u8, from: *const u8, len: usize, shared: (bool, bool)) {
    // SAFETY: as promised by the caller.
    unsafe {
        match shared {
            (true, true) => super::copy_shared(to, from, len),
            (true, false) => super::copy_to_shared(to, from, len),
            (false, true) => super::copy_from_shared(to, from, len),
            (false, false) => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Source::Private(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for Source<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Source::Private(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Source<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Source::Private(bytes)
    }
}

impl From<SharedSlice> for Source<'_> {
    fn from(slice: SharedSlice) -> Self {
        Source::Shared(LeasedPage::lasting(slice))
    }
}

impl<'a> From<&'a Target<'_>> for Source<'a> {
    fn from(memory: &'a Target<'_>) -> Self {
        match memory {
            Target::Private(bytes) => Source::Private(bytes),
            Target::Shared(page) => Source::Shared(**page),
        }
    }
}

impl<'a> From<&'a mut [u8]> for Target<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Target::Private(bytes)
    }
}

impl<'a> From<&'a mut Vec<u8>> for Target<'a> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        Target::Private(bytes)
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for Target<'a> {
    fn from(bytes: &'a mut [u8; N]) -> Self {
        Target::Private(bytes)
    }
}

impl From<SharedSlice> for Target<'_> {
    fn from(slice: SharedSlice) -> Self {
        Target::Shared(LoanedPage::lasting(slice))
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    fn leaked(bytes: &[u8]) -> SharedSlice {
        let words: &'static mut [u64] = vec![0u64; bytes.len().div_ceil(8)].leak();
        // SAFETY: leaked memory is valid until the process ends and is used through the slice only.
        let slice = unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), bytes.len()) };
        slice.write(bytes);
        slice
    }

    /// What the copy is to do, byte by byte.
    fn expected(target: &[u8], source: &[u8], blocks: &Blocks) -> Vec<u8> {
        let mut target = target.to_vec();
        for index in 0..blocks.count as i64 {
            for byte in 0..blocks.len as i64 {
                let to = (blocks.target + index * blocks.target_stride + byte) as usize;
                target[to] = source[(blocks.source + index * blocks.source_stride + byte) as usize];
            }
        }
        target
    }

    #[test]
    fn blocks_of_every_length_are_copied_between_all_kinds_of_memory() {
        let source: Vec<u8> = (0..40_000u32).map(|i| (i * 7 + i / 256 + 1) as u8).collect();
        let clean = vec![0xee; 40_000];
        for len in (1..=70).chain([96, 128, 200, 1024, 3000]) {
            for count in [1, 2, 3, 4, 5, 9] {
                for (gap, from_gap) in [(0, 0), (1, 0), (0, 3), (8, 16)] {
                    for back in [false, true] {
                        let mut blocks = Blocks {
                            target: 5,
                            target_stride: (len + gap) as i64,
                            source: 3,
                            source_stride: (len + from_gap) as i64,
                            len,
                            count,
                        };
                        if back {
                            blocks.target += blocks.target_stride * (count as i64 - 1);
                            blocks.target_stride = -blocks.target_stride;
                        }
                        let want = expected(&clean, &source, &blocks);
                        let mut private = clean.clone();
                        assert!(Target::from(&mut private).copy_blocks(&(&source).into(), &blocks));
                        assert!(private == want, "private to private: {blocks:?}");
                        let (shared, other) = (leaked(&clean), leaked(&source));
                        assert!(Target::from(shared).copy_blocks(&(&source).into(), &blocks));
                        assert!(shared.to_vec() == want, "private to shared: {blocks:?}");
                        let mut private = clean.clone();
                        assert!(Target::from(&mut private).copy_blocks(&other.into(), &blocks));
                        assert!(private == want, "shared to private: {blocks:?}");
                        shared.write(&clean);
                        assert!(Target::from(shared).copy_blocks(&other.into(), &blocks));
                        assert!(shared.to_vec() == want, "shared to shared: {blocks:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn pieces_are_copied_each_to_its_own_place_and_refused_outside() {
        let source: Vec<u8> = (0..4000u32).map(|i| (i * 7 + i / 256 + 1) as u8).collect();
        let mut pieces = Vec::new();
        let (mut to, mut from) = (3, 3900);
        for len in (1..70).chain([100]) {
            from -= len as i64 + 3;
            pieces.push(Piece { target: to, source: from, len });
            to += len as i64 + len as i64 % 3;
        }
        let mut want = vec![0xee; 4000];
        for Piece { target, source: from, len } in pieces.iter().copied() {
            let (target, from, len) = (target as usize, from as usize, len as usize);
            want[target..target + len].copy_from_slice(&source[from..from + len]);
        }
        let mut target = vec![0xee; 4000];
        assert!(Target::from(&mut target).copy_pieces(&(&source).into(), &pieces));
        assert!(target == want);
        let shared = leaked(&vec![0xee; 4000]);
        assert!(Target::from(shared).copy_pieces(&leaked(&source).into(), &pieces));
        assert!(shared.to_vec() == want);
        for (target, source_at, len) in
            [(-1, 0, 1), (0, -1, 1), (93, 0, 8), (0, 93, 8), (0, 0, 101), (0, 0, u64::MAX), (i64::MIN, 0, 8)]
        {
            let mut memory = [0xee; 100];
            let pieces = [Piece { target, source: source_at, len }];
            assert!(!Target::from(&mut memory).copy_pieces(&(&source[..100]).into(), &pieces));
            assert_eq!(memory, [0xee; 100]);
        }
    }

    #[test]
    fn rows_of_blocks_are_copied_to_their_places_and_refused_outside() {
        let source: Vec<u8> = (0..40_000u32).map(|i| (i * 7 + i / 256 + 1) as u8).collect();
        let clean = vec![0xee; 40_000];
        for len in [1, 7, 8, 16, 24, 64, 100] {
            for (count, rows) in [(1, 1), (1, 5), (3, 2), (4, 4), (10, 10), (7, 13)] {
                for (back, turned) in [(false, false), (true, false), (false, true), (true, true)] {
                    let (near, far) = (len as i64 + 3, (len as i64 + 3) * count as i64 + 5);
                    let (mut source_stride, mut source_pitch) = (near, far);
                    if turned {
                        // What is a row of the one is a column of the other.
                        (source_stride, source_pitch) = ((len as i64 + 1) * rows as i64, len as i64 + 1);
                    }
                    let (mut target, mut target_pitch) = (5, far);
                    if back {
                        (target, target_pitch) = (5 + far * (rows as i64 - 1), -far);
                    }
                    let row = Blocks { target, target_stride: near, source: 3, source_stride, len, count };
                    let grid = Rows { row, count: rows, target_pitch, source_pitch };
                    let mut want = clean.clone();
                    for at in 0..rows as i64 {
                        let (target, source_at) = (target + at * target_pitch, 3 + at * source_pitch);
                        want = expected(&want, &source, &Blocks { target, source: source_at, ..row });
                    }
                    let mut private = clean.clone();
                    assert!(Target::from(&mut private).copy_rows(&(&source).into(), &grid));
                    assert!(private == want, "{grid:?}");
                    let shared = leaked(&clean);
                    assert!(Target::from(shared).copy_rows(&leaked(&source).into(), &grid));
                    assert!(shared.to_vec() == want, "{grid:?}");
                    // A memory that is one byte too short on either side.
                    let high = |first: i64, stride: i64, pitch: i64| {
                        let (steps, turns) = (count as i64 - 1, rows as i64 - 1);
                        (first + stride * steps + (pitch * turns).max(0)) as usize + len as usize
                    };
                    let written = high(target, near, target_pitch);
                    let read = high(3, source_stride, source_pitch);
                    let mut short = vec![0xee; written];
                    assert!(Target::from(&mut short).copy_rows(&(&source[..read]).into(), &grid));
                    assert!(short == want[..written], "{grid:?}");
                    assert!(!Target::from(&mut short).copy_rows(&(&source[..read - 1]).into(), &grid));
                    assert!(short == want[..written], "{grid:?}");
                    assert!(!Target::from(&mut short[..written - 1]).copy_rows(&(&source).into(), &grid));
                }
            }
        }
        let row = Blocks { target: 0, target_stride: 8, source: 0, source_stride: 8, len: 8, count: 2 };
        for (count, target_pitch, source_pitch) in [
            (2, -1, 0),
            (2, 0, -1),
            (u64::MAX, 1, 0),
            (3, i64::MAX, 0),
            (3, 0, i64::MIN),
            (2, 85, 0),
            (2, 0, 85),
        ] {
            let mut memory = [0xee; 100];
            let grid = Rows { row, count, target_pitch, source_pitch };
            assert!(!Target::from(&mut memory).copy_rows(&(&source[..100]).into(), &grid), "{grid:?}");
            assert_eq!(memory, [0xee; 100]);
        }
    }

    #[test]
    fn blocks_that_are_not_inside_are_refused() {
        let fits = Blocks { target: 0, target_stride: 16, source: 4, source_stride: -2, len: 8, count: 3 };
        let refused = [
            Blocks { target: 57, ..fits },
            Blocks { target: -1, ..fits },
            Blocks { target: i64::MAX, ..fits },
            Blocks { target_stride: 29, ..fits },
            Blocks { target_stride: i64::MAX, ..fits },
            Blocks { target_stride: i64::MIN, ..fits },
            Blocks { source: 3, ..fits },
            Blocks { source: 93, ..fits },
            Blocks { source_stride: -3, ..fits },
            Blocks { len: 41, ..fits },
            Blocks { len: u64::MAX, ..fits },
            Blocks { count: 5, ..fits },
            Blocks { count: u64::MAX, ..fits },
        ];
        let (source, mut target) = ([7; 100], [0; 64]);
        for blocks in refused {
            assert!(!Target::from(&mut target).copy_blocks(&(&source).into(), &blocks), "{blocks:?}");
            assert_eq!(target, [0; 64], "{blocks:?}");
        }
        assert!(Target::from(&mut target).copy_blocks(&(&source).into(), &fits));
        let nothing = Blocks { count: 0, target: -5, ..fits };
        assert!(Target::from(&mut target).copy_blocks(&(&source).into(), &nothing));
    }
}
