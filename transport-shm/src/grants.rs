//! The page grants of one lane, as their sender keeps them: which pages the reader may look at, and which of these it
//! has returned.
//!
//! ```text
//!   free --grant--> ahead --(the reader's head is behind the record)--> kept --returned--> free
//!                     |                                                  a lease that outlives its handler
//!                     +--(returned, as a rule before the head moves)--> free
//! ```
//! The reader returns a grant by a store to a word of its own, and tells how far it has read in strides. Both are
//! looked at oldest first and no oftener than worth while: every look at a line that the reader has just written costs
//! a transfer between the processors.

use crate::lane::GRANT_COUNT;
use crate::link::LIFE_MASK;
use crate::pages::Page;
use std::collections::VecDeque;

/// Grants that are not known to be consumed after which it is worth while to look.
const LOOK_AFTER: usize = GRANT_COUNT / 4;
/// Bytes likewise. Pages that rest until the processor has moved them to the cache that all share are faster to read
/// from there, and faster to write again, than from the cache of the other processor: on the machine this was measured
/// on, a stream through 256 KiB of pages does 16 GB/s, one through 4 MiB does 21.
const LOOK_AFTER_BYTES: u64 = 4 << 20;
/// Bytes that a sender may be ahead of its reader: beyond that nothing gets faster.
const MOST_AHEAD: u64 = 8 << 20;
/// Leases that outlive their handlers past which the reader is asked to copy at once.
const MOST_KEPT: usize = GRANT_COUNT / 2;

/// The grants of one lane.
#[derive(Debug)]
pub struct Grants {
    entries: Vec<Entry>,
    /// Numbers that can be used again.
    free: Vec<u16>,
    /// Numbers whose record was consumed and that are not returned.
    kept: Vec<u16>,
    /// The other numbers in use, oldest first.
    ahead: VecDeque<u16>,
    bytes_ahead: u64,
    most_ahead: u64,
    lives: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    page: Page,
    life: u64,
    /// The lane's position behind the record that names the grant.
    end: u64,
}

impl Grants {
    /// None yet, of pages from a pool of so many bytes.
    #[must_use]
    pub fn new(pool: u64) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            kept: Vec::new(),
            ahead: VecDeque::new(),
            bytes_ahead: 0,
            most_ahead: MOST_AHEAD.min(pool / 4),
            lives: 0,
        }
    }

    /// A number that is free, and the life it is going to have; `None` if all are in use. It stands until grants come
    /// back.
    #[must_use]
    pub fn next(&self) -> Option<(usize, u64)> {
        let number = match self.free.last() {
            Some(number) => usize::from(*number),
            None if self.entries.len() < GRANT_COUNT => self.entries.len(),
            None => return None,
        };
        Some((number, ((self.lives + 1) & LIFE_MASK).max(1)))
    }

    /// The record that names this grant, which [`next`](Self::next) told, was written; it ends at the lane's position
    /// `end`.
    pub fn grant(&mut self, number: usize, life: u64, page: Page, end: u64) {
        self.lives = life;
        let entry = Entry { page, life, end };
        if number == self.entries.len() {
            self.entries.push(entry);
        } else {
            let next = self.free.pop();
            debug_assert_eq!(next, Some(number as u16), "grants came back between the number and the grant");
            self.entries[number] = entry;
        }
        self.ahead.push_back(number as u16);
        self.bytes_ahead += page.len();
    }

    /// Whether it is worth while to look how far the reader is.
    #[inline]
    #[must_use]
    pub fn worth_a_look(&self) -> bool {
        self.ahead.len() >= LOOK_AFTER
            || self.bytes_ahead >= LOOK_AFTER_BYTES
            || self.bytes_ahead >= self.most_ahead
    }

    /// Whether the reader is so far behind that nothing is won by sending more. Two grants it may always have: one to
    /// look at and one to come.
    #[inline]
    #[must_use]
    pub fn is_far_ahead(&self) -> bool {
        self.ahead.len() >= 2 && self.bytes_ahead >= self.most_ahead
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

    /// Takes account of how far the reader has read (`head`), and takes back what it returned on the way. `returned`
    /// reads a return word. True if there was anything.
    pub fn settle(&mut self, head: u64, returned: impl Fn(usize) -> u64, mut back: impl FnMut(Page)) -> bool {
        let mut any = false;
        while let Some(&number) = self.ahead.front() {
            let Entry { page, life, end } = self.entries[usize::from(number)];
            // A grant that came back was consumed, whatever the head says.
            let came_back = returned(usize::from(number)) == life;
            if !came_back && head < end {
                break;
            }
            self.ahead.pop_front();
            self.bytes_ahead -= page.len();
            if came_back {
                self.free.push(number);
                back(page);
            } else {
                self.kept.push(number);
            }
            any = true;
        }
        any
    }

    /// Looks at every grant. True if any came back.
    pub fn sweep(&mut self, returned: impl Fn(usize) -> u64, mut back: impl FnMut(Page)) -> bool {
        let Grants { entries, free, kept, ahead, bytes_ahead, .. } = self;
        let had = free.len();
        let mut still_out = |number: &u16, bytes: &mut u64| {
            let Entry { page, life, .. } = entries[usize::from(*number)];
            let came_back = returned(usize::from(*number)) == life;
            if came_back {
                *bytes -= page.len();
                free.push(*number);
                back(page);
            }
            !came_back
        };
        ahead.retain(|number| still_out(number, bytes_ahead));
        kept.retain(|number| still_out(number, &mut u64::MAX.clone()));
        free.len() > had
    }

    /// The reader is dead: all of its grants are void.
    pub fn void(&mut self, mut back: impl FnMut(Page)) {
        for number in self.ahead.drain(..).chain(self.kept.drain(..)) {
            back(self.entries[usize::from(number)].page);
            self.free.push(number);
        }
        self.bytes_ahead = 0;
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Random grants, returns in any order, heads that lag: every page comes back exactly once, and never before it was
    /// returned.
    #[test]
    fn m_v03_every_grant_comes_back_once() {
        for seed in 1..20u64 {
            let mut state = seed;
            let mut random = move |n: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % n
            };
            let mut grants = Grants::new(1 << 40);
            let mut words = [0u64; GRANT_COUNT];
            // By page: number and life, and whether it was returned.
            let mut out: HashMap<u64, (usize, u64, bool)> = HashMap::new();
            let (mut tail, mut fresh, mut head) = (0, 0, 0);
            for _ in 0..20_000 {
                let mut back = Vec::new();
                match random(6) {
                    0..3 => {
                        if let Some((number, life)) = grants.next() {
                            tail += 32;
                            fresh += 4096;
                            let page = Page { offset: fresh, class: 12 + random(3) as u32 };
                            assert_ne!(words[number], life, "a return word of an earlier life");
                            grants.grant(number, life, page, tail);
                            assert!(out.insert(fresh, (number, life, false)).is_none());
                        }
                    }
                    3 => {
                        let at = random(out.len().max(1) as u64) as usize;
                        if let Some((number, life, returned)) = out.values_mut().nth(at) {
                            words[*number] = *life;
                            *returned = true;
                        }
                    }
                    4 => {
                        head += random(tail - head + 1);
                        grants.settle(head, |n| words[n], |page| back.push(page));
                    }
                    _ => {
                        grants.sweep(|n| words[n], |page| back.push(page));
                        assert!(back.len() <= out.len());
                    }
                }
                for page in back {
                    let (_, _, returned) = out.remove(&page.offset).expect("given back twice");
                    assert!(returned, "given back before it was returned");
                }
                assert_eq!(grants.ahead.len() + grants.kept.len(), out.len());
                assert_eq!(grants.free.len() + out.len(), grants.entries.len());
            }
            let mut back = Vec::new();
            grants.void(|page| back.push(page));
            assert_eq!(back.len(), out.len());
            assert!(!grants.any() && !grants.is_far_ahead());
        }
    }
}
