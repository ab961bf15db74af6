//! Those who wait in a row for what there is none of: credit, or room.

use crate::slot::{Completer, Ticket};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

/// As many may be in a row before anybody looks who of them still waits.
const FEW: usize = 64;

/// One who waits.
pub(crate) trait Waits {
    /// Whether it has not given up; if it has, the slot of its operation is free.
    fn still_waits(&self, completer: &mut Completer) -> bool;
}

impl Waits for Ticket {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        completer.is_still_wanted(*self)
    }
}

impl<T, W: Waits> Waits for (T, W) {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        self.1.still_waits(completer)
    }
}

/// A row. Who gives up, as a future that is dropped or whose time is over, says so to its slot alone, and stays in the row until
/// that moves. Where it does not, as with a peer that is stopped, each further attempt would take a slot for good: so those who
/// have given up are taken out whenever the row has become twice as long as it was without them.
#[derive(Debug)]
pub(crate) struct Row<T> {
    row: VecDeque<T>,
    /// So many in it are looked through.
    most: usize,
}

impl<T> Default for Row<T> {
    fn default() -> Self {
        Self { row: VecDeque::new(), most: FEW }
    }
}

impl<T: Waits> Row<T> {
    pub fn push_back(&mut self, one: T, completer: &mut Completer) {
        self.tidy(completer);
        self.row.push_back(one);
    }

    #[inline]
    fn tidy(&mut self, completer: &mut Completer) {
        if self.row.len() >= self.most {
            self.row.retain(|one| one.still_waits(completer));
            self.most = FEW.max(2 * self.row.len());
        }
    }
}

impl<T> Deref for Row<T> {
    type Target = VecDeque<T>;

    fn deref(&self) -> &VecDeque<T> {
        &self.row
    }
}

impl<T> DerefMut for Row<T> {
    fn deref_mut(&mut self) -> &mut VecDeque<T> {
        &mut self.row
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::slot::SlotPool;

    #[test]
    fn who_has_given_up_takes_no_slot_for_good() {
        let (pool, mut completer) = SlotPool::new();
        let mut row = Row::default();
        let still: Vec<Ticket> = (0..100).map(|_| completer.alloc(None).expect("free")).collect();
        still.iter().for_each(|ticket| row.push_back(*ticket, &mut completer));
        for _ in 0..100_000 {
            let ticket = completer.alloc(None).expect("free");
            row.push_back(ticket, &mut completer);
            assert!(!pool.detach(ticket));
        }
        assert!(row.len() <= 2 * 100 + FEW, "{} are in the row", row.len());
        // Those who wait do so in their order.
        assert!(row.iter().filter(|ticket| still.contains(ticket)).eq(&still));
        let next = completer.alloc(None).expect("free");
        assert!((next.to_word() as u32) < 1000, "slots are used again");
    }
}
