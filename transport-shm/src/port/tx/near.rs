//! Whether a reader shares the first caches with its writer.
//!
//! Virtual processors are often the two threads of one core, and ranks may take turns on one. There a plain loop of stores is the
//! fastest way to write a message of some KiB; between cores it is the slowest, as it waits for each line to come over. The
//! system does not say which it is, and it changes as the processors of the host are given away anew. So it is measured, by
//! a look that has to be taken anyway: at a line that the reader has just written.

use std::time::{Duration, Instant};

/// A line that comes over from another core takes longer by some times as much; one that is in a first or second cache was seen to
/// take 10 to 20 ns, by a clock of 10 ns.
const NEAR: Duration = Duration::from_nanos(20);
/// Up to so many bytes the loop of stores is the faster way: 4 KiB at 55 GB/s and not 40, 8 KiB at 68 and not 72.
const BY_LOOP: usize = 6 << 10;
/// So many looks in a row have to say so. One that says otherwise is enough: the way that suits both is the default.
const ENOUGH: u8 = 3;

/// One look of so many is timed: to ask the clock four times takes longer than a line that comes over.
const TIMED: u8 = 16;

#[derive(Debug, Default)]
pub(super) struct Nearness {
    near: u8,
    /// Looks since the last that was timed.
    looks: u8,
}

impl Nearness {
    #[inline]
    fn is_near(&self) -> bool {
        self.near >= ENOUGH
    }

    /// Whether so many bytes are best written in a loop of stores.
    #[inline]
    pub fn wants_loop(&self, len: usize) -> bool {
        self.is_near() && len <= BY_LOOP
    }

    /// Takes a look, and learns now and then from how long it takes if it shows something new: then the line came from whoever
    /// wrote it. A second look finds it here, and takes as long as the clock does.
    pub fn look(&mut self, known: u64, mut look: impl FnMut() -> u64) -> u64 {
        self.looks += 1;
        if self.looks < TIMED {
            return look();
        }
        self.looks = 0;
        self.look_by_the_clock(known, &mut look)
    }

    #[inline(never)]
    fn look_by_the_clock(&mut self, known: u64, mut look: &mut dyn FnMut() -> u64) -> u64 {
        let timed = |look: &mut dyn FnMut() -> u64| {
            let since = Instant::now();
            (look(), since.elapsed())
        };
        let (seen, first) = timed(&mut look);
        if seen != known {
            let (_, again) = timed(&mut look);
            self.took(first.saturating_sub(again));
        }
        seen
    }

    fn took(&mut self, time: Duration) {
        self.near = if time <= NEAR { (self.near + 1).min(ENOUGH) } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_looks_make_a_reader_near_and_one_makes_it_far() {
        let mut nearness = Nearness::default();
        for round in 0..10 {
            assert_eq!(nearness.is_near(), round >= ENOUGH);
            nearness.took(NEAR);
        }
        nearness.took(NEAR * 2);
        assert!(!nearness.is_near());
    }

    #[test]
    fn one_look_of_some_is_timed() {
        let mut nearness = Nearness::default();
        for round in 1..=3 * u32::from(TIMED) {
            let mut looks = 0;
            let look = || {
                looks += 1;
                7
            };
            assert_eq!(nearness.look(5, look), 7);
            // What is timed and shows something new is looked at once more.
            assert_eq!(looks, if round.is_multiple_of(u32::from(TIMED)) { 2 } else { 1 });
        }
    }

    #[test]
    fn a_look_that_shows_nothing_new_says_nothing() {
        let mut nearness = Nearness::default();
        for _ in 0..100 {
            assert_eq!(nearness.look(5, || 5), 5);
        }
        assert!(!nearness.is_near());
    }
}
