//! Whether long copies go through the caches or past them: what was faster lately.
//!
//! Which it is depends on how much of the last cache other programs leave, which changes while a program runs; measured on
//! one kind of machine, copies of 16 MiB were once faster past the caches by a quarter, and once slower by as much.
//!
//! So it does for shorter copies to memory that others read, on where the lines of the target are. While a processor that shares
//! no cache with this one has them, as it has read them, each store waits for that processor: 64 KiB and more were written at
//! 2 GB/s (at 9 where the last cache is shared), past the caches at 30. Where the lines have been pushed out meanwhile, as in a long
//! row of messages, the caches are faster, and whoever reads finds it there.

use std::cell::Cell;
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

/// How it is chosen.
#[derive(Debug)]
struct Terms {
    /// What is better until something else is known.
    first: Way,
    /// Copies of one trial; the first finds the caches as the other way has left them, and does not count.
    trial: u32,
    /// Copies between two trials, at first and at most: each trial in vain doubles them.
    period: (u32, u32),
    /// What it costs whoever reads it next that it lies past the caches: nanoseconds for a MiB.
    behind: u64,
}

/// For copies that are too long for the caches.
const LONG: Terms = Terms { first: Way::Past, trial: 4, period: (8, 512), behind: 0 };
/// For copies to memory that another processor reads. A trial of the worse way may cost ten times what the better does.
const SHARED: Terms = Terms { first: Way::Through, trial: 3, period: (8, 2048), behind: 25_000 };
/// The same for shorter ones, which are read before the processor has asked for enough of them ahead.
const SHORT_SHARED: Terms = Terms { behind: 80_000, ..SHARED };
/// From this many bytes on it is not short.
const SHORT: usize = 64 << 10;

/// The choice for copies of about one length.
#[derive(Clone, Copy, Debug)]
struct Choice {
    best: Way,
    /// The copy's place among `period` of the best way and a trial of the other.
    turn: u32,
    period: u32,
    /// The least that one took for a MiB, in nanoseconds, of the last copies before the trial and of its own.
    least: [u64; 2],
}

impl Choice {
    const fn new(terms: &Terms) -> Choice {
        Choice { best: terms.first, turn: 0, period: terms.period.0, least: [u64::MAX; 2] }
    }

    fn next(&self) -> Way {
        if self.turn < self.period { self.best } else { self.best.other() }
    }

    /// Whether it matters how long the next copy takes.
    fn counts(&self, terms: &Terms) -> bool {
        self.turn + terms.trial > self.period && self.turn != self.period
    }

    /// The next copy is done, and a MiB of it has cost so much.
    fn took(&mut self, terms: &Terms, cost: u64) {
        let way = self.next();
        if self.counts(terms) {
            let behind = if way == Way::Past { terms.behind } else { 0 };
            let least = &mut self.least[usize::from(way != self.best)];
            *least = cost.saturating_add(behind).min(*least);
        }
        self.turn += 1;
        if self.turn < self.period + terms.trial {
            return;
        }
        let [best, other] = self.least;
        if other < best - best / 16 {
            self.best = self.best.other();
            self.period = terms.period.0;
        } else {
            self.period = (self.period * 2).min(terms.period.1);
        }
        (self.turn, self.least) = (0, [u64::MAX; 2]);
    }

    /// Goes on to the next copy that counts: how many are in between, all of the way that is next.
    fn skip(&mut self, terms: &Terms) -> u32 {
        let between = match self.turn {
            turn if turn < self.period => (self.period + 1).saturating_sub(terms.trial + turn),
            turn => u32::from(turn == self.period),
        };
        self.turn += between;
        between
    }
}

/// A choice for each power of two of MiB.
static LONG_CHOICES: [Mutex<Choice>; 8] = [const { Mutex::new(Choice::new(&LONG)) }; 8];

/// Has `copy` copy `len` bytes, at least 1 MiB, in the way that is best, and learns from how long it takes.
pub(super) fn choose(len: usize, copy: impl FnOnce(Way)) {
    let class = ((len >> 20).max(1).ilog2() as usize).min(LONG_CHOICES.len() - 1);
    let way = LONG_CHOICES[class].lock().unwrap_or_else(PoisonError::into_inner).next();
    let since = Instant::now();
    copy(way);
    let cost = per_mib(since.elapsed(), len);
    LONG_CHOICES[class].lock().unwrap_or_else(PoisonError::into_inner).took(&LONG, cost);
}

/// A thread's choice for copies of about one length to memory that others read.
struct Shared {
    /// How many copies go that way before it matters again how long one takes.
    left: Cell<u32>,
    way: Cell<Way>,
    choice: Cell<Choice>,
}

impl Shared {
    const fn new() -> Shared {
        Shared { left: Cell::new(0), way: Cell::new(SHARED.first), choice: Cell::new(Choice::new(&SHARED)) }
    }

    #[cold]
    #[inline(never)]
    fn timed(&self, len: usize, copy: impl FnOnce(Way)) {
        let since = Instant::now();
        copy(self.way.get());
        let terms = if len < SHORT { &SHORT_SHARED } else { &SHARED };
        self.learn(terms, per_mib(since.elapsed(), len));
    }

    /// A copy that counts has cost so much for a MiB.
    fn learn(&self, terms: &Terms, cost: u64) {
        let mut choice = self.choice.get();
        choice.took(terms, cost);
        self.way.set(choice.next());
        self.left.set(choice.skip(terms));
        self.choice.set(choice);
    }
}

thread_local! {
    /// One for each power of two of bytes from [`READER_CHOICE_MIN`](super::READER_CHOICE_MIN) on. A thread's own: whom it
    /// writes for, and from which processor, is not what another's copies tell.
    static SHARED_CHOICES: [Shared; 11] = const { [const { Shared::new() }; 11] };
}

/// As [`choose`] for copies to memory that others read.
#[inline]
pub(super) fn choose_shared(len: usize, copy: impl FnOnce(Way)) {
    SHARED_CHOICES.with(|choices| {
        let class = (len / super::READER_CHOICE_MIN).max(1).ilog2() as usize;
        let shared = &choices[class.min(choices.len() - 1)];
        match shared.left.get() {
            0 => shared.timed(len, copy),
            left => {
                shared.left.set(left - 1);
                copy(shared.way.get());
            }
        }
    });
}

fn per_mib(took: Duration, len: usize) -> u64 {
    ((took.as_nanos() << 20) / len.max(1) as u128) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies so often where the ways cost as much each; how many went past the caches, and which was best in the end.
    fn copies(choice: &mut Choice, terms: &Terms, count: u32, past: u64, through: u64) -> (u32, Way) {
        let mut went_past = 0;
        for _ in 0..count {
            let way = choice.next();
            went_past += u32::from(way == Way::Past);
            choice.took(terms, if way == Way::Past { past } else { through });
        }
        (went_past, choice.best)
    }

    #[test]
    fn the_faster_way_is_found_and_left_when_it_is_no_longer() {
        let mut choice = Choice::new(&LONG);
        let (past, best) = copies(&mut choice, &LONG, 1000, 20, 10);
        assert!(best == Way::Through && past < 50, "{past}");
        let (past, best) = copies(&mut choice, &LONG, 2000, 10, 20);
        assert!(best == Way::Past && past > 1300, "{past}");
        // Trials become rare where they are in vain.
        let (past, _) = copies(&mut choice, &LONG, 10_000, 10, 20);
        assert!(past > 9800, "{past}");
    }

    #[test]
    fn a_difference_that_is_noise_changes_nothing() {
        let mut choice = Choice::new(&LONG);
        assert_eq!(copies(&mut choice, &LONG, 1000, 100, 97).1, Way::Past);
    }

    #[test]
    fn what_the_first_of_a_trial_pays_for_the_other_way_does_not_count() {
        let mut choice = Choice::new(&LONG);
        let mut before = Way::Past;
        for _ in 0..200 {
            let way = choice.next();
            let cost = if way == Way::Past { 20 } else { 10 } + if way == before { 0 } else { 30 };
            before = way;
            choice.took(&LONG, cost);
        }
        assert_eq!(choice.best, Way::Through);
    }

    #[test]
    fn what_others_read_goes_past_the_caches_only_where_that_makes_up_for_reading_it_from_memory() {
        // As measured for 64 KiB: in a row of messages; alternately, with a cache in common; and without one.
        for (terms, past, through, best) in [
            (&SHARED, 32_000, 29_000, Way::Through),
            (&SHARED, 32_000, 120_000, Way::Past),
            (&SHARED, 32_000, 470_000, Way::Past),
            // 16 KiB with a cache in common, and without one.
            (&SHORT_SHARED, 15_000, 50_000, Way::Through),
            (&SHORT_SHARED, 15_000, 240_000, Way::Past),
            // 4 KiB in a row of messages.
            (&SHORT_SHARED, 20_000, 42_000, Way::Through),
            (&SHORT_SHARED, 20_000, 500_000, Way::Past),
        ] {
            let mut choice = Choice::new(terms);
            assert_eq!(copies(&mut choice, terms, 1000, past, through).1, best, "{terms:?}");
            let (went_past, _) = copies(&mut choice, terms, 20_000, past, through);
            let other = if best == Way::Past { 20_000 - went_past } else { went_past };
            assert!((3..100).contains(&other), "{other} trials");
        }
    }

    #[test]
    fn only_what_counts_is_timed() {
        let shared = Shared::new();
        let (mut timed, mut past) = (0, 0);
        for _ in 0..20_000 {
            let way = shared.way.get();
            past += u32::from(way == Way::Past);
            match shared.left.get() {
                0 => {
                    timed += 1;
                    shared.learn(&SHARED, if way == Way::Past { 2 } else { 1 });
                }
                left => shared.left.set(left - 1),
            }
        }
        assert!((10..200).contains(&timed) && (10..100).contains(&past), "{timed}, {past}");
        assert_eq!(shared.choice.get().best, Way::Through);
    }
}
