//! The page pool: memory of the sender in which payloads lie while receivers look at them (V01-V03).
//!
//! Pages are power-of-two ranges of the endpoint's pool. Which of them are in use is the sender's private
//! knowledge; receivers never write to the pool. No fresh page is touched while one is there that was in use before
//! (V02), and of these the one that has rested longest is the first handed out: its lines have left the reader's cache,
//! which makes them faster to write.

use crate::layout::PAGE;
use std::collections::VecDeque;

/// Smallest and largest page, as powers of two.
const MIN_CLASS: u32 = 12;
const MAX_CLASS: u32 = 24;
/// Bytes of a pool that are touched before anybody looks for more pages than come back by themselves.
const LARGE: u64 = 8 << 20;

/// A page of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// First byte within the pool.
    pub offset: u64,
    /// Length as a power of two.
    pub class: u32,
}

impl Page {
    /// Length in bytes; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "no page is empty")]
    pub const fn len(&self) -> u64 {
        1 << self.class
    }

    /// The class of pages for `len` bytes.
    #[inline]
    #[must_use]
    pub fn class_for(len: u64) -> u32 {
        len.max(1).next_power_of_two().trailing_zeros().clamp(MIN_CLASS, MAX_CLASS)
    }

    /// The page as one word.
    #[must_use]
    pub const fn to_word(self) -> u64 {
        self.offset | self.class as u64
    }

    /// The page that [`to_word`](Self::to_word) made the word from.
    #[must_use]
    pub const fn from_word(word: u64) -> Page {
        Page { offset: word & !(PAGE - 1), class: (word & (PAGE - 1)) as u32 }
    }
}

/// Says which bytes of the pool are used. Touches no memory itself.
#[derive(Debug)]
pub struct PagePool {
    size: u64,
    /// Bytes ever handed out from the front.
    fresh: u64,
    used: u64,
    /// Bytes of free pages that rest with the grants of lanes.
    resting: u64,
    free: Vec<VecDeque<u64>>,
    /// Pages have become free since pages were merged.
    unmerged: bool,
    /// Users of each page beyond the first, by the number of its first 4 KiB.
    more_users: Vec<u32>,
    /// Pages that have several.
    shared: usize,
}

/// What has to be done with a page before it is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It was in use before.
    Warm(Page),
    /// It has to be committed.
    Fresh(Page),
}

/// The longest page of a pool of so many bytes.
pub(crate) fn longest_page(size: u64) -> u64 {
    (1u64 << MAX_CLASS).min(size / 4)
}

impl PagePool {
    /// A pool of `size` bytes, none of them committed.
    #[must_use]
    pub fn new(size: u64) -> Self {
        let classes = (MAX_CLASS - MIN_CLASS + 1) as usize;
        let free = vec![VecDeque::new(); classes];
        Self { size, fresh: 0, used: 0, resting: 0, free, unmerged: false, more_users: Vec::new(), shared: 0 }
    }

    /// The longest page.
    #[must_use]
    pub fn max_page(&self) -> u64 {
        longest_page(self.size)
    }

    /// Whether more than half of the pool is in use.
    #[must_use]
    pub fn is_scarce(&self) -> bool {
        self.used > self.size / 2
    }

    /// Bytes of the pages that are in use.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        self.used
    }

    /// Bytes of the pool.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether so much memory was touched that a page which was in use before is to be preferred.
    #[inline]
    #[must_use]
    pub fn is_large(&self) -> bool {
        self.fresh >= LARGE
    }

    /// Bytes that were ever in use.
    #[must_use]
    pub fn touched(&self) -> u64 {
        self.fresh
    }

    /// Whether a page for `len` bytes is there that was in use before.
    #[inline]
    #[must_use]
    pub fn has_warm(&self, len: u64) -> bool {
        let class = Page::class_for(len);
        self.free.get((class - MIN_CLASS) as usize).is_some_and(|free| !free.is_empty())
    }

    /// The page that [`take`](Self::take) takes for `len` bytes, if one for so many was in use before and is free.
    #[must_use]
    pub fn next_warm(&self, len: u64) -> Option<Page> {
        let class = Page::class_for(len);
        let offset = *self.free.get((class - MIN_CLASS) as usize)?.front()?;
        Some(Page { offset, class })
    }

    /// Whether pages rest with the grants of lanes.
    #[inline]
    #[must_use]
    pub fn any_rest(&self) -> bool {
        self.resting > 0
    }

    /// A page that one alone used is free, and stays with the grant that it had.
    #[inline]
    pub fn rest(&mut self, page: Page) {
        self.used -= page.len();
        self.resting += page.len();
    }

    /// A page that rested is in use again.
    #[inline]
    pub fn wake(&mut self, page: Page) {
        self.used += page.len();
        self.resting -= page.len();
    }

    /// A page that rested is here again.
    #[inline]
    pub fn end_rest(&mut self, page: Page) {
        self.resting -= page.len();
        self.put(page);
    }

    fn put(&mut self, page: Page) {
        self.free[(page.class - MIN_CLASS) as usize].push_back(page.offset);
        self.unmerged = true;
    }

    /// Takes a page of at least `len` bytes; `None` if there is none.
    pub fn take(&mut self, len: u64) -> Option<Taken> {
        if len > self.max_page() {
            return None;
        }
        let class = Page::class_for(len);
        let index = (class - MIN_CLASS) as usize;
        if let Some(offset) = self.free[index].pop_front() {
            self.used += 1 << class;
            return Some(Taken::Warm(Page { offset, class }));
        }
        if self.fresh + (1 << class) <= self.size {
            let page = Page { offset: self.fresh, class };
            self.fresh += page.len();
            self.used += page.len();
            return Some(Taken::Fresh(page));
        }
        self.take_other(class).map(Taken::Warm)
    }

    /// The same, of pages that were in use before.
    pub fn take_warm(&mut self, len: u64) -> Option<Page> {
        if len > self.max_page() {
            return None;
        }
        let class = Page::class_for(len);
        if let Some(offset) = self.free[(class - MIN_CLASS) as usize].pop_front() {
            self.used += 1 << class;
            return Some(Page { offset, class });
        }
        self.take_other(class)
    }

    /// A page made of others that are free.
    fn take_other(&mut self, class: u32) -> Option<Page> {
        self.split(class).or_else(|| if self.merge(1 << class) { self.split(class) } else { None })
    }

    /// A page of the class, or the first part of the smallest larger one.
    fn split(&mut self, class: u32) -> Option<Page> {
        let index = (class - MIN_CLASS) as usize;
        let from = (index..self.free.len()).find(|&at| !self.free[at].is_empty())?;
        let offset = self.free[from].pop_front()?;
        for at in index..from {
            self.free[at].push_back(offset + (1 << (at as u32 + MIN_CLASS)));
        }
        self.used += 1 << class;
        Some(Page { offset, class })
    }

    /// Free pages that lie side by side become as large ones as fit there: else what was small once would be small for the rest
    /// of the job. False: so many bytes are not free, or nothing has become so since.
    #[cold]
    fn merge(&mut self, wanted: u64) -> bool {
        if self.fresh - self.used - self.resting < wanted || !std::mem::take(&mut self.unmerged) {
            return false;
        }
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (class, free) in (MIN_CLASS..).zip(&mut self.free) {
            runs.extend(free.drain(..).map(|offset| (offset, offset + (1 << class))));
        }
        runs.sort_unstable();
        runs.dedup_by(|(start, end), (_, last)| {
            let joined = *start == *last;
            if joined {
                *last = *end;
            }
            joined
        });
        for (mut start, end) in runs {
            while start < end {
                let class = (end - start).ilog2().min(MAX_CLASS);
                self.free[(class - MIN_CLASS) as usize].push_back(start);
                start += 1 << class;
            }
        }
        true
    }

    /// A page that is in use gets one more user: it is free when all have given it back (V03).
    pub fn share(&mut self, page: Page) {
        let number = (page.offset >> MIN_CLASS) as usize;
        if self.more_users.len() <= number {
            self.more_users.resize(number + 1, 0);
        }
        self.shared += usize::from(self.more_users[number] == 0);
        self.more_users[number] += 1;
    }

    /// A user gives a page back.
    pub fn give_back(&mut self, page: Page) {
        if self.shared > 0
            && let Some(more) = self.more_users.get_mut((page.offset >> MIN_CLASS) as usize)
            && *more > 0
        {
            *more -= 1;
            self.shared -= usize::from(*more == 0);
            return;
        }
        self.used -= page.len();
        self.put(page);
    }

    /// A page that could not be committed goes back to the fresh ones.
    pub fn never_mind(&mut self, page: Page) {
        self.used -= page.len();
        if self.fresh == page.offset + page.len() {
            self.fresh = page.offset;
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn m_v03_a_shared_page_is_free_when_its_last_user_gave_it_back() {
        let mut pool = PagePool::new(4 << 20);
        let Some(Taken::Fresh(page)) = pool.take(64 << 10) else { panic!("a pool without room") };
        pool.share(page);
        pool.share(page);
        pool.give_back(page);
        pool.give_back(page);
        let Some(Taken::Fresh(other)) = pool.take(64 << 10) else { panic!("the page is still in use") };
        assert_ne!(other, page);
        pool.give_back(page);
        assert_eq!(pool.take(64 << 10), Some(Taken::Warm(page)));
        assert_eq!(pool.shared, 0);
    }

    #[test]
    fn small_pages_that_are_free_become_large_ones() {
        let mut pool = PagePool::new(1 << 20);
        let small = |pool: &mut PagePool| match pool.take(4096) {
            Some(Taken::Warm(page) | Taken::Fresh(page)) => page,
            None => panic!("a pool without room"),
        };
        let mut pages: Vec<Page> = (0..256).map(|_| small(&mut pool)).collect();
        assert_eq!(pool.take(4096), None);
        assert_eq!(pool.take(128 << 10), None);
        // One that stays divides what is free; the rest of it is as large as can be.
        let kept = pages.remove(100);
        pages.into_iter().for_each(|page| pool.give_back(page));
        for len in [256 << 10, 256 << 10, 128 << 10, 64 << 10, 16 << 10] {
            let Some(Taken::Warm(page)) = pool.take(len) else { panic!("none of {len} bytes") };
            assert!(page.offset + page.len() <= kept.offset || page.offset > kept.offset);
        }
        assert_eq!(pool.in_use(), (256 + 256 + 128 + 64 + 16 + 4) << 10);
        pool.give_back(kept);
        assert!(pool.take_warm(4096).is_some());
    }

    #[test]
    fn whatever_was_taken_before_the_longest_page_is_there_when_all_are_back() {
        let mut pool = PagePool::new(1 << 20);
        let mut seed = 7u64;
        for _ in 0..200 {
            let mut taken = Vec::new();
            for _ in 0..300 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let len = 1 << (12 + (seed >> 33) % 7);
                if let Some(Taken::Warm(page) | Taken::Fresh(page)) = pool.take(len) {
                    assert!(page.offset + page.len() <= 1 << 20);
                    taken.push(page);
                }
            }
            taken.sort_unstable_by_key(|page| page.offset);
            assert!(taken.windows(2).all(|two| two[0].offset + two[0].len() <= two[1].offset));
            taken.into_iter().for_each(|page| pool.give_back(page));
            assert_eq!(pool.in_use(), 0);
            let Some(Taken::Warm(page) | Taken::Fresh(page)) = pool.take(pool.max_page()) else {
                panic!("the longest page is not there")
            };
            pool.give_back(page);
        }
    }

    #[test]
    fn m_v01_pages_never_overlap_and_are_recycled() {
        let mut pool = PagePool::new(1 << 20);
        let mut taken: Vec<Page> = Vec::new();
        let mut seed = 5u64;
        let mut refused = 0;
        for _ in 0..50_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if seed >> 63 == 0 || taken.is_empty() {
                let len = 1 + (seed >> 30) % (40 << 10);
                let next = pool.next_warm(len);
                let got = pool.take(len);
                assert!(next.is_none() || got == next.map(Taken::Warm), "another one was told of before");
                match got {
                    Some(Taken::Warm(page) | Taken::Fresh(page)) => {
                        assert_eq!(Page::from_word(page.to_word()), page);
                        for other in &taken {
                            assert!(
                                page.offset + page.len() <= other.offset
                                    || other.offset + other.len() <= page.offset
                            );
                        }
                        taken.push(page);
                    }
                    None => refused += 1,
                }
            } else {
                let page = taken.swap_remove((seed >> 33) as usize % taken.len());
                pool.give_back(page);
            }
        }
        assert!(pool.fresh <= 1 << 20);
        assert!(refused > 0 || pool.fresh > 0);
    }
}
