//! Whether long copies go through the caches or past them: what was faster lately.
//!
//! Which it is depends on how much of the last cache other programs leave, which changes while a program runs; measured on
//! one kind of machine, copies of 16 MiB were once faster past the caches by a quarter, and once slower by as much.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The way of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Past the caches.
    Past,
    /// Through them.
    Through,
}

impl Way {
    fn other(self) -> Way {
        match self {
            Way::Past => Way::Through,
            Way::Through => Way::Past,
        }
    }
}

/// Copies of one trial; the first finds the caches as the other way has left them, and does not count.
const TRIAL: u32 = 4;
/// Copies between two trials, at first and at most: each trial in vain doubles them.
const PERIOD: (u32, u32) = (8, 512);

/// The choice for copies of about one length.
#[derive(Debug)]
struct Choice {
    best: Way,
    /// The copy's place among `period` of the best way and a trial of the other.
    turn: u32,
    period: u32,
    /// The least that one took for a MiB, in nanoseconds, of the last copies before the trial and of its own.
    least: [u64; 2],
}

impl Choice {
    const fn new() -> Choice {
        Choice { best: Way::Past, turn: 0, period: PERIOD.0, least: [u64::MAX; 2] }
    }

    fn next(&self) -> Way {
        if self.turn < self.period { self.best } else { self.best.other() }
    }

    fn took(&mut self, way: Way, cost: u64) {
        let trial = usize::from(way != self.best);
        let counts = match trial {
            0 => self.turn + TRIAL > self.period,
            _ => self.turn > self.period,
        };
        if counts {
            self.least[trial] = self.least[trial].min(cost);
        }
        self.turn += 1;
        if self.turn < self.period + TRIAL {
            return;
        }
        let [best, other] = self.least;
        if other < best - best / 16 {
            self.best = self.best.other();
            self.period = PERIOD.0;
        } else {
            self.period = (self.period * 2).min(PERIOD.1);
        }
        (self.turn, self.least) = (0, [u64::MAX; 2]);
    }
}

/// A choice for each power of two of MiB.
static CHOICES: [Mutex<Choice>; 8] = [const { Mutex::new(Choice::new()) }; 8];

/// Has `copy` copy `len` bytes, at least 1 MiB, in the way that is best, and learns from how long it takes.
pub(super) fn choose(len: usize, copy: impl FnOnce(Way)) {
    let class = ((len >> 20).max(1).ilog2() as usize).min(CHOICES.len() - 1);
    let way = CHOICES[class].lock().unwrap_or_else(PoisonError::into_inner).next();
    let since = Instant::now();
    copy(way);
    let cost = per_mib(since.elapsed(), len);
    CHOICES[class].lock().unwrap_or_else(PoisonError::into_inner).took(way, cost);
}

fn per_mib(took: Duration, len: usize) -> u64 {
    ((took.as_nanos() << 20) / len.max(1) as u128) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies so often where the ways cost as much each; how many went past the caches, and which was best in the end.
    fn copies(choice: &mut Choice, count: u32, past: u64, through: u64) -> (u32, Way) {
        let mut went_past = 0;
        for _ in 0..count {
            let way = choice.next();
            went_past += u32::from(way == Way::Past);
            choice.took(way, if way == Way::Past { past } else { through });
        }
        (went_past, choice.best)
    }

    #[test]
    fn the_faster_way_is_found_and_left_when_it_is_no_longer() {
        let mut choice = Choice::new();
        let (past, best) = copies(&mut choice, 1000, 20, 10);
        assert!(best == Way::Through && past < 50, "{past}");
        let (past, best) = copies(&mut choice, 2000, 10, 20);
        assert!(best == Way::Past && past > 1300, "{past}");
        // Trials become rare where they are in vain.
        let (past, _) = copies(&mut choice, 10_000, 10, 20);
        assert!(past > 9800, "{past}");
    }

    #[test]
    fn a_difference_that_is_noise_changes_nothing() {
        let mut choice = Choice::new();
        assert_eq!(copies(&mut choice, 1000, 100, 97).1, Way::Past);
    }

    #[test]
    fn what_the_first_of_a_trial_pays_for_the_other_way_does_not_count() {
        let mut choice = Choice::new();
        let mut before = Way::Past;
        for _ in 0..200 {
            let way = choice.next();
            let cost = if way == Way::Past { 20 } else { 10 } + if way == before { 0 } else { 30 };
            before = way;
            choice.took(way, cost);
        }
        assert_eq!(choice.best, Way::Through);
    }
}
