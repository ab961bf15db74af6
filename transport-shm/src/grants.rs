//! The page grants of one lane, as their sender keeps them: which pages the reader may look at, and which of these it
//! has returned.
//!
//! ```text
//!   free --grant--> ahead --(the reader's head is behind the record)--> kept --returned--> free
//!    |  ^             |                                                  a lease that outlives its handler
//!    |  |             +--(returned, as a rule before the head moves)--> resting, or free
//!    |  +--(the page is wanted elsewhere)-- resting
//!    +<----grant, with the page it had------ resting
//! ```
//! The reader returns a grant by a store to a word of its own, and tells how far it has read in strides. Both are
//! looked at oldest first and no oftener than worth while: every look at a line that the reader has just written costs
//! a transfer between the processors. A number that came back in its turn rests together with its page: the next
//! message of that length takes both at once, and nobody else is asked.

use crate::lane::{GRANT_COUNT, PAGE_STRIDE};
use crate::link::LIFE_MASK;
use crate::pages::{Page, PagePool};
use crate::ring::Ring;

/// Grants that are not known to be consumed after which it is worth while to look. Together with the next, so many that the
/// pages a stream goes through do not fit the caches that writer and reader have for themselves: where they nearly do (112 of
/// 4 KiB and 512 KiB of cache each, or 336 and 1 MiB) it is chance whether a stream does 17 or 27 GB/s, or 24 or 41; where
/// they do not, it does 30, or 48.
const LOOK_AFTER: usize = GRANT_COUNT / 4 * 3;
/// Bytes likewise. Pages that rest until the processor has moved them to the cache that all share are faster to read
/// from there, and faster to write again, than from the cache of the other processor: on one machine a stream of 64 KiB messages
/// through 512 KiB of pages does 30 GB/s, one through 1 to 4 MiB does 42; on another, whose processors have 2 MiB each, 18.5
/// through 2 MiB, 19.7 through 4 and 17.1 through 6.
const LOOK_AFTER_BYTES: u64 = 4 << 20;
/// Bytes that a sender may be ahead of its reader: beyond that nothing gets faster.
const MOST_AHEAD: u64 = 8 << 20;
/// Leases that outlive their handlers past which the reader is asked to copy at once.
const MOST_KEPT: usize = GRANT_COUNT / 2;
/// As many as these are looked at for the first time, to see whether they came back.
const LOOK_AT_KEPT: usize = GRANT_COUNT / 16;

/// The grants of one lane.
#[derive(Debug)]
pub struct Grants {
    /// Numbers that were ever used.
    numbers: u16,
    /// Numbers that can be used again, without a page.
    free: Vec<u16>,
    /// Numbers that can be used again, each with the page it named last, which is nobody's else; the one that has rested
    /// longest first.
    resting: Ring<Slot>,
    /// Grants whose record was consumed and that are not returned.
    kept: Vec<Granted>,
    /// As many of these are looked at: twice as many as had not come back the last time, so that each costs a few looks
    /// however long it is kept, and never more than may be kept.
    look_at_kept: usize,
    /// Grants that were consumed since then.
    consumed: usize,
    /// The other grants, oldest first.
    ahead: Ring<Granted>,
    bytes_ahead: u64,
    most_ahead: u64,
    /// Bytes ahead that are worth a look.
    look_bytes: u64,
    lives: u64,
}

/// A number that no grant has, and a page for the grant that is to have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    // A page in parts, so that a grant takes half a line.
    page_offset: u64,
    page_class: u8,
    /// Nobody else uses the page, nor will, until the grant is returned.
    pub sole: bool,
    /// Which return word is the grant's.
    pub number: u16,
}

impl Slot {
    /// A number for a page, and whether nobody else uses that.
    #[must_use]
    pub fn new(number: u16, page: Page, sole: bool) -> Slot {
        Slot { page_offset: page.offset, page_class: page.class as u8, sole, number }
    }

    /// What the reader may look at.
    #[inline]
    #[must_use]
    pub fn page(&self) -> Page {
        Page { offset: self.page_offset, class: self.page_class.into() }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Granted {
    slot: Slot,
    life: u64,
    /// The lane's position behind the record that names the grant.
    end: u64,
}

impl Granted {
    fn came_back(&self, returned: &impl Fn(usize) -> u64) -> bool {
        returned(usize::from(self.slot.number)) == self.life
    }

    /// The number and the page are free.
    fn end(&self, free: &mut Vec<u16>, pool: &mut PagePool) {
        free.push(self.slot.number);
        pool.give_back(self.slot.page());
    }
}

impl Grants {
    /// None yet, of pages from a pool of so many bytes.
    #[must_use]
    pub fn new(pool: u64) -> Self {
        let most_ahead = MOST_AHEAD.min(pool / 4);
        Self {
            numbers: 0,
            free: Vec::new(),
            resting: Ring::new(),
            kept: Vec::new(),
            look_at_kept: LOOK_AT_KEPT,
            consumed: 0,
            ahead: Ring::new(),
            bytes_ahead: 0,
            most_ahead,
            look_bytes: LOOK_AFTER_BYTES.min(most_ahead),
            lives: 0,
        }
    }

    /// A number with a page for `len` bytes, if the one that has rested longest is such a page.
    #[inline]
    pub fn take(&mut self, len: u64, pool: &mut PagePool) -> Option<Slot> {
        let slot = *self.resting.front()?;
        if slot.page().class != Page::class_for(len) {
            return None;
        }
        self.resting.pop_front();
        pool.wake(slot.page());
        Some(slot)
    }

    /// A slot that was taken and is not granted after all.
    pub fn put_back(&mut self, slot: Slot, pool: &mut PagePool) {
        self.free.push(slot.number);
        pool.give_back(slot.page());
    }

    /// A number for a page from elsewhere; `None` if all are in use. If need be one that rests parts with its page.
    pub fn number(&mut self, pool: &mut PagePool) -> Option<u16> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        if usize::from(self.numbers) < GRANT_COUNT {
            self.numbers += 1;
            return Some(self.numbers - 1);
        }
        let slot = self.resting.pop_front()?;
        pool.end_rest(slot.page());
        Some(slot.number)
    }

    /// A number that was taken for a page from elsewhere and names nothing after all.
    pub fn number_unused(&mut self, number: u16) {
        self.free.push(number);
    }

    /// All pages that rest go back to their pool.
    #[cold]
    pub fn end_rest(&mut self, pool: &mut PagePool) {
        for slot in self.resting.drain() {
            pool.end_rest(slot.page());
            self.free.push(slot.number);
        }
    }

    /// The life that the next grant is going to have.
    #[inline]
    #[must_use]
    pub fn next_life(&self) -> u64 {
        ((self.lives + 1) & LIFE_MASK).max(1)
    }

    /// The record that names this grant with the [next life](Self::next_life) was written; it ends at the lane's position
    /// `end`.
    #[inline]
    pub fn grant(&mut self, slot: Slot, end: u64) {
        let life = self.next_life();
        self.lives = life;
        self.bytes_ahead += slot.page().len();
        self.ahead.push_back(Granted { slot, life, end });
    }

    /// Whether it is worth while to look how far the reader is.
    #[inline]
    #[must_use]
    pub fn worth_a_look(&self) -> bool {
        self.ahead.len() >= LOOK_AFTER || self.bytes_ahead >= self.look_bytes
    }

    /// The oldest grant whose record is not known to be consumed.
    #[must_use]
    pub fn oldest(&self) -> Option<&Slot> {
        self.ahead.front().map(|granted| &granted.slot)
    }

    /// Whether the reader is so far behind that nothing is won by sending more. Two grants it may always have: one to
    /// look at and one to come.
    #[inline]
    #[must_use]
    pub fn is_far_ahead(&self) -> bool {
        self.bytes_ahead >= self.most_ahead && self.ahead.len() >= 2
    }

    /// Whether the reader has more than so many bytes with a page for these. What it has to read before it tells how far it is, and
    /// pages are up to twice as long as their messages, it always may have.
    #[must_use]
    pub fn is_beyond(&self, share: u64, len: u64) -> bool {
        self.bytes_ahead >= 2 * PAGE_STRIDE && self.bytes_ahead + (1 << Page::class_for(len)) > share
    }

    /// Whether the reader keeps so many pages that it should copy.
    #[inline]
    #[must_use]
    pub fn are_kept(&self) -> bool {
        self.kept.len() >= MOST_KEPT
    }

    /// Whether any page is with the reader.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.ahead.is_empty() || !self.kept.is_empty()
    }

    /// Takes account of how far the reader has read (`head`), and of what it returned on the way: pages that are
    /// nobody's else rest here, with their numbers. `returned` reads a return word. True if there was anything.
    pub fn settle(&mut self, head: u64, returned: impl Fn(usize) -> u64, pool: &mut PagePool) -> bool {
        let mut any = false;
        while let Some(&granted) = self.ahead.front() {
            let slot = granted.slot;
            // A grant that came back was consumed, whatever the head says.
            let came_back = granted.came_back(&returned);
            if !came_back && head < granted.end {
                break;
            }
            self.ahead.pop_front();
            self.bytes_ahead -= slot.page().len();
            if !came_back {
                self.kept.push(granted);
            } else if slot.sole {
                pool.rest(slot.page());
                self.resting.push_back(slot);
            } else {
                self.put_back(slot, pool);
            }
            self.consumed += 1;
            any = true;
        }
        // Nobody runs out of pages of a length whose messages are copied: that those which were kept have come back, so that
        // messages need not be copied any more, is seen here alone. A few looks for each message at most.
        let are_many = self.kept.len() >= self.look_at_kept || pool.is_scarce();
        if are_many && any && 4 * self.consumed >= self.kept.len() && !self.kept.is_empty() {
            self.sweep_kept(&returned, pool);
        }
        any
    }

    /// Looks at every grant, and has no page rest. True if any came back.
    pub fn sweep(&mut self, returned: impl Fn(usize) -> u64, pool: &mut PagePool) -> bool {
        self.end_rest(pool);
        let had = self.free.len();
        let Grants { free, ahead, bytes_ahead, .. } = self;
        ahead.retain(|granted| {
            let came_back = granted.came_back(&returned);
            if came_back {
                *bytes_ahead -= granted.slot.page().len();
                granted.end(free, pool);
            }
            !came_back
        });
        self.sweep_kept(&returned, pool);
        self.free.len() > had
    }

    /// Looks at the grants that are kept.
    #[cold]
    fn sweep_kept(&mut self, returned: &impl Fn(usize) -> u64, pool: &mut PagePool) {
        let Grants { free, kept, .. } = self;
        kept.retain(|granted| {
            let came_back = granted.came_back(returned);
            if came_back {
                granted.end(free, pool);
            }
            !came_back
        });
        self.look_at_kept = (2 * kept.len()).clamp(LOOK_AT_KEPT, MOST_KEPT);
        self.consumed = 0;
    }

    /// The reader is dead: all of its grants are void.
    pub fn void(&mut self, pool: &mut PagePool) {
        self.end_rest(pool);
        let Grants { free, kept, ahead, .. } = self;
        ahead.drain().chain(kept.drain(..)).for_each(|granted| granted.end(free, pool));
        self.bytes_ahead = 0;
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::pages::Taken;
    use std::collections::{HashMap, HashSet};

    /// A page of this length goes out; its record ends at `end`.
    fn grant(grants: &mut Grants, pool: &mut PagePool, end: u64) -> (u16, u64) {
        let slot = grants.take(4096, pool).unwrap_or_else(|| {
            let Some(Taken::Warm(page) | Taken::Fresh(page)) = pool.take(4096) else { panic!("no page") };
            Slot::new(grants.number(pool).expect("a number"), page, true)
        });
        let life = grants.next_life();
        grants.grant(slot, end);
        (slot.number, life)
    }

    /// A reader that keeps some messages for a while gets them without a copy for ever.
    #[test]
    fn leases_that_come_back_in_a_stream_are_noticed() {
        let (mut pool, mut words) = (PagePool::new(1 << 40), [0u64; GRANT_COUNT]);
        let mut grants = Grants::new(pool.size());
        let mut held = std::collections::VecDeque::new();
        for end in 1..20 * GRANT_COUNT as u64 {
            held.push_back(grant(&mut grants, &mut pool, end));
            if held.len() > MOST_KEPT / 3 {
                let (number, life) = held.pop_front().expect("some");
                words[usize::from(number)] = life;
            }
            grants.settle(end, |n| words[n], &mut pool);
            assert!(!grants.are_kept(), "after {end} messages");
        }
    }

    /// One that has kept too many, and has given them back, is not asked to copy any longer.
    #[test]
    fn who_has_given_back_what_it_kept_need_not_copy() {
        let (mut pool, mut words) = (PagePool::new(1 << 40), [0u64; GRANT_COUNT]);
        let mut grants = Grants::new(pool.size());
        let held: Vec<_> = (0..MOST_KEPT).map(|_| grant(&mut grants, &mut pool, 0)).collect();
        grants.settle(0, |n| words[n], &mut pool);
        let copied = |grants: &mut Grants, pool: &mut PagePool, words: &mut [u64], end| {
            let (number, life) = grant(grants, pool, end);
            words[usize::from(number)] = life;
            grants.settle(end, |n| words[n], pool);
        };
        copied(&mut grants, &mut pool, &mut words, 1);
        assert!(grants.are_kept());
        held.into_iter().for_each(|(number, life)| words[usize::from(number)] = life);
        for end in 2..2 + MOST_KEPT as u64 {
            copied(&mut grants, &mut pool, &mut words, end);
        }
        assert!(!grants.are_kept());
    }

    /// The same of a few that were most of the pool.
    #[test]
    fn who_has_given_back_most_of_the_pool_need_not_copy() {
        let (mut pool, mut words) = (PagePool::new(16 << 12), [0u64; GRANT_COUNT]);
        let mut grants = Grants::new(pool.size());
        let held: Vec<_> = (0..10).map(|_| grant(&mut grants, &mut pool, 0)).collect();
        grants.settle(0, |n| words[n], &mut pool);
        assert!(pool.is_scarce());
        held.into_iter().for_each(|(number, life)| words[usize::from(number)] = life);
        for end in 1..5 {
            let (number, life) = grant(&mut grants, &mut pool, end);
            words[usize::from(number)] = life;
            grants.settle(end, |n| words[n], &mut pool);
        }
        assert!(!pool.is_scarce());
    }

    /// Random grants, returns in any order, heads that lag, pages that rest, numbers and pages that are taken apart: every
    /// page comes back exactly once, and never before it was returned; none is lost.
    #[test]
    fn m_v03_every_grant_comes_back_once() {
        for seed in 1..8u64 {
            let mut state = seed;
            let mut random = move |n: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % n
            };
            let mut pool = PagePool::new(1 << 40);
            let mut grants = Grants::new(pool.size());
            let mut words = [0u64; GRANT_COUNT];
            // By page: number and life, and whether it was returned.
            let mut out: HashMap<u64, (u16, u64, bool)> = HashMap::new();
            // Pages that somebody else uses, too.
            let mut others: Vec<Page> = Vec::new();
            let (mut tail, mut head, mut rested, mut parted) = (0, 0, 0, 0);
            for _ in 0..8_000 {
                match random(7) {
                    0..3 => {
                        let len = 4096 << random(2);
                        let slot = match grants.take(len, &mut pool) {
                            Some(slot) => {
                                rested += 1;
                                Some(slot)
                            }
                            None => grants.number(&mut pool).map(|number| {
                                let Some(Taken::Warm(page) | Taken::Fresh(page)) = pool.take(len) else {
                                    panic!("a pool without end has none")
                                };
                                let sole = random(4) > 0;
                                if !sole {
                                    pool.share(page);
                                    others.push(page);
                                }
                                Slot::new(number, page, sole)
                            }),
                        };
                        if let Some(slot) = slot {
                            assert!(!slot.sole || !others.contains(&slot.page()), "somebody else's page");
                            assert!(slot.page().len() >= len);
                            assert!(out.values().all(|other| other.0 != slot.number), "a number in use");
                            if random(10) == 0 {
                                grants.put_back(slot, &mut pool);
                                continue;
                            }
                            tail += 32;
                            let life = grants.next_life();
                            let word = words[usize::from(slot.number)];
                            assert_ne!(word, life, "a return word of an earlier life");
                            grants.grant(slot, tail);
                            let before = out.insert(slot.page().offset, (slot.number, life, false));
                            assert!(before.is_none(), "a page in use");
                        }
                    }
                    3 => {
                        // As a rule they come back in their order.
                        let at = random(out.len().max(1) as u64) as usize;
                        let oldest = grants.ahead.iter().map(|granted| granted.slot.page().offset);
                        let any = out.keys().nth(at).copied().filter(|_| random(4) == 0);
                        for page in any.into_iter().chain(oldest.take(random(4) as usize)) {
                            if let Some((number, life, returned)) = out.get_mut(&page) {
                                words[usize::from(*number)] = *life;
                                *returned = true;
                            }
                        }
                    }
                    4 => {
                        head += random(tail - head + 1);
                        grants.settle(head, |n| words[n], &mut pool);
                    }
                    5 if random(4) == 0 => {
                        parted += grants.resting.len();
                        grants.end_rest(&mut pool);
                    }
                    5 => {}
                    _ if random(4) > 0 => {}
                    _ => {
                        grants.sweep(|n| words[n], &mut pool);
                    }
                }
                let still: Vec<&Granted> = grants.ahead.iter().chain(&grants.kept).collect();
                for granted in &still {
                    assert!(out.contains_key(&granted.slot.page().offset), "a page from nowhere");
                }
                let pages: HashSet<u64> = still.iter().map(|granted| granted.slot.page().offset).collect();
                out.retain(|page, (.., returned)| {
                    assert!(pages.contains(page) || *returned, "given back before it was returned");
                    pages.contains(page)
                });
                let numbers = still.len() + grants.free.len() + grants.resting.len();
                assert_eq!(numbers, usize::from(grants.numbers), "a number was lost");
                if random(6) == 0 && !others.is_empty() {
                    pool.give_back(others.swap_remove(random(others.len() as u64) as usize));
                }
                let in_use: HashMap<u64, u64> = still
                    .iter()
                    .map(|granted| granted.slot.page())
                    .chain(others.iter().copied())
                    .map(|page| (page.offset, page.len()))
                    .collect();
                let bytes: u64 = in_use.values().sum();
                assert_eq!(pool.in_use(), bytes, "a page was lost");
            }
            assert!(rested > 50 && parted > 10, "{rested} {parted}");
            grants.void(&mut pool);
            others.drain(..).for_each(|page| pool.give_back(page));
            assert_eq!(pool.in_use(), 0);
            assert!(!pool.any_rest() && !grants.any() && !grants.is_far_ahead());
        }
    }
}
