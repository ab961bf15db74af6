//! Hands out ranges of a rank's segment: first fit over a sorted list of free ranges, page by page. Long ranges begin where huge
//! pages do, if there is such a place.

use crate::memory::HUGE_PAGE;

/// Granule in bytes: ranges start and end on pages, so that they can be committed and given back.
pub const GRANULE: u64 = 4096;

/// A first-fit allocator of byte ranges. It keeps offsets only and never touches the memory.
///
/// # Examples
/// ```
/// use posthaste_core::heap::{GRANULE, Heap};
///
/// let mut heap = Heap::new(0, 4 * GRANULE);
/// let (first, len) = heap.take(100).expect("there is room");
/// assert_eq!(len, GRANULE); // whole pages
/// assert!(heap.take(4 * GRANULE).is_none(), "three pages are left");
/// heap.give_back(first, len);
/// assert!(heap.take(4 * GRANULE).is_some());
/// ```
#[derive(Debug)]
pub struct Heap {
    free: Vec<(u64, u64)>,
    size: u64,
    /// Where the segment lies, as far as huge pages are concerned.
    base: u64,
}

impl Heap {
    /// All of `0..size` is free; `size` is rounded down to pages. A huge page begins where `base` and the offset together are a
    /// multiple of [`HUGE_PAGE`].
    #[must_use]
    pub fn new(base: u64, size: u64) -> Self {
        let size = size / GRANULE * GRANULE;
        let free = if size > 0 { vec![(0, size)] } else { Vec::new() };
        Self { free, size, base: base % HUGE_PAGE }
    }

    /// Length of the segment in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Takes at least `len` bytes (at least one page); returns the offset and the length taken.
    pub fn take(&mut self, len: u64) -> Option<(u64, u64)> {
        let len = len.max(1).checked_next_multiple_of(GRANULE)?;
        let aligned = if len >= HUGE_PAGE { self.find(len, HUGE_PAGE) } else { None };
        let (at, start) = aligned.or_else(|| self.find(len, GRANULE))?;
        let (offset, room) = self.free[at];
        let (end, free_end) = (start + len, offset + room);
        match (start > offset, end < free_end) {
            (false, false) => {
                self.free.remove(at);
            }
            (false, true) => self.free[at] = (end, free_end - end),
            (true, before_end) => {
                self.free[at].1 = start - offset;
                if before_end {
                    self.free.insert(at + 1, (end, free_end - end));
                }
            }
        }
        Some((start, len))
    }

    /// The first free range with room for `len` bytes from a multiple of `granule` on, and where that is.
    fn find(&self, len: u64, granule: u64) -> Option<(usize, u64)> {
        self.free.iter().enumerate().find_map(|(at, &(offset, room))| {
            let start = (self.base + offset).next_multiple_of(granule) - self.base;
            (start - offset <= room && room - (start - offset) >= len).then_some((at, start))
        })
    }

    /// Whether all of the range is taken.
    #[must_use]
    pub fn holds(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len).filter(|end| *end <= self.size) else { return false };
        let at = self.free.partition_point(|&(start, room)| start + room <= offset);
        len == 0 || self.free.get(at).is_none_or(|&(start, _)| start >= end)
    }

    /// Gives a range back that [`take`](Self::take) returned.
    pub fn give_back(&mut self, offset: u64, len: u64) {
        let at = self.free.partition_point(|&(other, _)| other < offset);
        self.free.insert(at, (offset, len));
        if at + 1 < self.free.len() && self.free[at].0 + self.free[at].1 == self.free[at + 1].0 {
            self.free[at].1 += self.free.remove(at + 1).1;
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == self.free[at].0 {
            self.free[at - 1].1 += self.free.remove(at).1;
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_all_come_back() {
        let mut heap = Heap::new(0, 64 * GRANULE);
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut seed = 7u64;
        for _ in 0..5000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if seed >> 63 == 0 || taken.is_empty() {
                if let Some(range) = heap.take((seed >> 40) % (9 * GRANULE)) {
                    assert!(taken.iter().all(|t| range.0 + range.1 <= t.0 || t.0 + t.1 <= range.0));
                    taken.push(range);
                    assert!(heap.holds(range.0, range.1) && heap.holds(range.0 + 1, range.1 - 1));
                }
            } else {
                let range = taken.swap_remove((seed >> 33) as usize % taken.len());
                heap.give_back(range.0, range.1);
                assert!(!heap.holds(range.0, range.1) && !heap.holds(range.0 + range.1 - 1, 1));
                assert!(!heap.holds(range.0.saturating_sub(1), 2) && heap.holds(range.0, 0));
            }
        }
        assert!(!heap.holds(64 * GRANULE, 1) && !heap.holds(u64::MAX, 2));
        for range in taken {
            heap.give_back(range.0, range.1);
        }
        assert_eq!(heap.take(64 * GRANULE), Some((0, 64 * GRANULE)));
    }

    #[test]
    fn long_ranges_begin_where_huge_pages_do() {
        let base = HUGE_PAGE - 3 * GRANULE;
        let mut heap = Heap::new(base, 3 * HUGE_PAGE);
        let long = heap.take(HUGE_PAGE + 1).expect("there is room");
        assert_eq!(long, (3 * GRANULE, HUGE_PAGE + GRANULE));
        // What lies before it is not lost.
        assert_eq!(heap.take(3 * GRANULE), Some((0, 3 * GRANULE)));
        // No such place is left for as much, but there is room.
        assert_eq!(heap.take(HUGE_PAGE), Some((long.0 + long.1, HUGE_PAGE)));
        let rest = 3 * HUGE_PAGE - (long.0 + long.1 + HUGE_PAGE);
        assert_eq!(heap.take(rest), Some((3 * HUGE_PAGE - rest, rest)));
        assert_eq!(heap.take(1), None);
    }
}
