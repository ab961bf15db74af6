//! The memory that the ranks of a client share.
#![allow(unsafe_code)]

use super::locked;
use crate::device::Allocation;
use crate::error::MemoryError;
use crate::heap::Heap;
use crate::ids::Rank;
use crate::memory::SharedSlice;
use std::sync::{Mutex, OnceLock};

/// Zeroed memory of all ranks of one client, mapped until the process ends.
///
/// Nothing is allocated before the first use; untouched pages cost no memory.
#[derive(Debug)]
pub struct Arena {
    memory: OnceLock<SharedSlice>,
    heaps: Box<[Mutex<Heap>]>,
    segment: u64,
}

impl Arena {
    /// For `ranks` ranks of `segment` bytes each, rounded down to pages.
    #[must_use]
    pub fn new(ranks: u32, segment: u64) -> Self {
        let heaps: Box<[_]> = (0..ranks).map(|_| Mutex::new(Heap::new(0, segment))).collect();
        let segment = heaps.first().map_or(0, |heap| locked(heap).size());
        Self { memory: OnceLock::new(), heaps, segment }
    }

    fn memory(&self) -> SharedSlice {
        *self.memory.get_or_init(|| {
            let len = self.segment as usize * self.heaps.len();
            let words: &'static mut [u64] = vec![0u64; len / 8].leak();
            // SAFETY: the memory is leaked, so it is valid until the process ends; `words` is not used again, so it is
            // reached through shared slices only.
            unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), len) }
        })
    }

    /// A range of a rank's memory; `None` if the rank has no such range.
    #[must_use]
    pub fn slice(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        if rank.index() >= self.heaps.len() {
            return None;
        }
        self.memory().slice(rank.index() as u64 * self.segment, self.segment)?.slice(offset, len)
    }

    /// Takes zeroed memory of a rank.
    ///
    /// # Errors
    /// If the rank's segment is used up.
    pub fn allocate(&self, rank: Rank, len: u64) -> Result<Allocation, MemoryError> {
        let full = MemoryError::Segment { wanted: len, segment: self.segment };
        let heap = self.heaps.get(rank.index()).ok_or_else(|| full.clone())?;
        let (offset, taken) = locked(heap).take(len).ok_or_else(|| full.clone())?;
        let memory = self.slice(rank, offset, taken).ok_or(full)?;
        // It may have been in use before.
        let zeros = [0; 4096];
        for at in (0..taken).step_by(zeros.len()) {
            if let Some(page) = memory.slice(at, (zeros.len() as u64).min(taken - at)) {
                page.write(&zeros[..page.len()]);
            }
        }
        Ok(Allocation { offset, len: taken })
    }

    /// Gives memory of a rank back. Its pages go back to the system, where that can be told so.
    pub fn free(&self, rank: Rank, allocation: &Allocation) {
        #[cfg(target_os = "linux")]
        if let Some(memory) = self.slice(rank, allocation.offset, allocation.len) {
            forget_pages(memory);
        }
        if let Some(heap) = self.heaps.get(rank.index()) {
            locked(heap).give_back(allocation.offset, allocation.len);
        }
    }
}

/// Gives the pages that lie within the memory back to the system: they are zero from then on.
#[cfg(target_os = "linux")]
fn forget_pages(memory: SharedSlice) {
    let (start, page) = (memory.as_ptr() as usize, rustix::param::page_size());
    let (first, end) = (start.next_multiple_of(page), (start + memory.len()) / page * page);
    if first < end {
        let at = memory.as_ptr().wrapping_add(first - start);
        let advice = rustix::mm::Advice::LinuxDontNeed;
        // SAFETY: the pages belong to an arena for the life of the process and are reached through shared slices only, whose
        // bytes may become others, as these become zero, at any moment.
        let told = unsafe { rustix::mm::madvise(at.cast(), end - first, advice) };
        if let Err(error) = told {
            tracing::debug!(%error, "memory stays with the process");
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_go_back_to_the_system() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").expect("it is there");
            let pages: usize = statm.split(' ').nth(1).expect("the second").parse().expect("a number");
            pages * rustix::param::page_size()
        };
        const LEN: u64 = 256 << 20;
        let arena = Arena::new(1, LEN);
        let all = arena.allocate(Rank(0), LEN).expect("room");
        let before = resident();
        arena.free(Rank(0), &all);
        // Other tests may take some at the same time.
        let freed = before.saturating_sub(resident());
        assert!(freed > LEN as usize / 2, "{freed} bytes went back");
        let again = arena.allocate(Rank(0), LEN).expect("room");
        assert_eq!(arena.slice(Rank(0), again.offset, again.len).expect("inside").sum_words(), 0);
    }

    #[test]
    fn memory_comes_as_zero_and_ranks_do_not_share_it() {
        let arena = Arena::new(2, 16 << 10);
        let first = arena.allocate(Rank(0), 5000).expect("room");
        assert_eq!(first.len, 8192);
        let memory = arena.slice(Rank(0), first.offset, first.len).expect("inside");
        memory.write(&[7; 8192]);
        let other = arena.slice(Rank(1), 0, 16 << 10).expect("inside");
        assert_eq!(other.sum_words(), 0);
        arena.free(Rank(0), &first);
        let again = arena.allocate(Rank(0), 100).expect("room");
        assert_eq!(again.offset, first.offset);
        assert_eq!(arena.slice(Rank(0), again.offset, again.len).expect("inside").sum_words(), 0);
        let error = arena.allocate(Rank(0), 1 << 20).expect_err("too much");
        assert_eq!(error, MemoryError::Segment { wanted: 1 << 20, segment: 16 << 10 });
        assert!(arena.slice(Rank(0), 16 << 10, 1).is_none() && arena.slice(Rank(2), 0, 1).is_none());
    }
}
