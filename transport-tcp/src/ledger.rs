//! What a peer has yet to say of this rank's puts and gets, and which operations they are part of.
//!
//! Puts and gets are counted in each direction. A peer tells how many puts it has done, and of which it had no memory; gets are
//! answered one by one. Either is told in order, so that an operation has ended once as many are done, and answered, as there were
//! when its last part went out.

use crate::frame::Malformed;
use posthaste_core::slot::Outcome;
use posthaste_core::{Fault, Rank, Ticket, Value};
use std::collections::{HashSet, VecDeque};

/// Ends when so many puts are done and so many gets answered.
struct Marker {
    ticket: Ticket,
    puts: u64,
    gets: u64,
}

/// See the module's documentation.
pub(crate) struct Ledger {
    peer: Rank,
    puts: u64,
    puts_done: u64,
    gets: u64,
    gets_answered: u64,
    markers: VecDeque<Marker>,
    /// Whose puts are not done: the first of them, and the one behind the last. Ascending.
    owners: VecDeque<(u64, u64, Ticket)>,
    /// The one behind the last put that the peer had no memory for.
    lost: u64,
    /// Operations of which a part has failed, by their tickets as words; they are told when all of it has ended.
    failed: HashSet<u64>,
}

impl Ledger {
    pub fn new(peer: Rank) -> Ledger {
        Ledger {
            peer,
            puts: 0,
            puts_done: 0,
            gets: 0,
            gets_answered: 0,
            markers: VecDeque::new(),
            owners: VecDeque::new(),
            lost: 0,
            failed: HashSet::new(),
        }
    }

    /// Puts that are not done.
    pub fn puts_under_way(&self) -> u64 {
        self.puts - self.puts_done
    }

    /// One more put, which is a part of its owner's operation.
    pub fn put(&mut self, owner: Option<Ticket>) {
        let put = self.puts;
        self.puts += 1;
        let Some(owner) = owner else { return };
        match self.owners.back_mut() {
            Some((_, end, last)) if *last == owner && *end == put => *end += 1,
            _ => self.owners.push_back((put, put + 1, owner)),
        }
    }

    /// One more get.
    pub fn get(&mut self) {
        self.gets += 1;
    }

    /// An operation ends, by [`next_end`](Self::next_end), when all that has gone out so far has. One without a ticket tells nobody.
    pub fn mark(&mut self, ticket: u64) {
        if let Some(ticket) = Ticket::from_word(ticket) {
            self.markers.push_back(Marker { ticket, puts: self.puts, gets: self.gets });
        }
    }

    /// The peer says that so many puts are done.
    pub fn puts_are_done(&mut self, count: u64) -> Result<(), Malformed> {
        if !(self.puts_done..=self.puts).contains(&count) {
            return Err(Malformed::Unasked);
        }
        self.puts_done = count;
        while self.owners.front().is_some_and(|(_, end, _)| *end <= count) {
            self.owners.pop_front();
        }
        Ok(())
    }

    /// The peer says that it had no memory for so many puts: whatever they are a part of fails.
    pub fn puts_failed(&mut self, first: u64, count: u64) -> Result<(), Malformed> {
        let end = first.checked_add(count).filter(|end| count > 0 && *end <= self.puts);
        let Some(end) = end.filter(|_| first >= self.lost.max(self.puts_done)) else {
            return Err(Malformed::Unasked);
        };
        let from = self.owners.partition_point(|(_, owned, _)| *owned <= first);
        let concerned = self.owners.range(from..).take_while(|(owned, _, _)| *owned < end);
        self.failed.extend(concerned.map(|(_, _, owner)| owner.to_word()));
        self.lost = end;
        Ok(())
    }

    /// The oldest get is answered in full, or the peer had no memory for all of it.
    pub fn got(&mut self, owner: Option<Ticket>, absent: bool) {
        self.gets_answered += 1;
        if absent && let Some(owner) = owner {
            self.failed.insert(owner.to_word());
        }
    }

    /// Whether a part of the operation has failed that is not told yet.
    pub fn has_failed(&self, ticket: u64) -> bool {
        self.failed.contains(&ticket)
    }

    /// What has become of an operation all of which has ended: told once.
    pub fn outcome(&mut self, ticket: Ticket, value: Value) -> Outcome {
        if !self.failed.is_empty() && self.failed.remove(&ticket.to_word()) {
            return Err(Fault::NoSuchMemory(self.peer));
        }
        Ok(value)
    }

    /// The next operation that was marked and has ended.
    pub fn next_end(&mut self) -> Option<(Ticket, Outcome)> {
        let Marker { ticket, puts, gets } = *self.markers.front()?;
        if puts > self.puts_done || gets > self.gets_answered {
            return None;
        }
        self.markers.pop_front();
        Some((ticket, self.outcome(ticket, Value::Unit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(number: u64) -> Option<Ticket> {
        Ticket::from_word(number << 32 | u64::from(number > 0))
    }

    #[test]
    fn what_has_failed_is_told_by_its_own_operation_and_by_no_other() {
        let mut ledger = Ledger::new(Rank(1));
        // Puts 0 to 2 are parts of the first, 3 is of nobody, 4 the second's, 5 the first's again, 6 the third's, which is told
        // behind a get.
        for owner in [1, 1, 1, 0, 2, 1, 3] {
            ledger.put(ticket(owner));
        }
        assert_eq!(ledger.owners.len(), 4, "those of one that follow each other are one entry");
        for number in [2, 1] {
            ledger.mark(ticket(number).map_or(0, Ticket::to_word));
        }
        ledger.get();
        ledger.mark(ticket(3).map_or(0, Ticket::to_word));
        ledger.puts_are_done(1).expect("it is under way");
        ledger.puts_failed(1, 1).expect("it is under way");
        ledger.puts_failed(3, 1).expect("it is under way");
        ledger.puts_are_done(4).expect("they are under way");
        ledger.puts_failed(6, 1).expect("it is under way");
        assert!(ledger.next_end().is_none(), "the last are not done");
        ledger.puts_are_done(7).expect("they are under way");
        assert!(ledger.owners.is_empty() && ledger.puts_under_way() == 0);
        let mut told = || ledger.next_end().map(|(ticket, outcome)| (Some(ticket), outcome.is_err()));
        assert_eq!([told(), told(), told()], [Some((ticket(2), false)), Some((ticket(1), true)), None]);
        ledger.got(None, false);
        let told = ledger.next_end().map(|(ticket, outcome)| (Some(ticket), outcome.is_err()));
        assert_eq!(told, Some((ticket(3), true)));
        assert!(ledger.failed.is_empty(), "each is told once");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut ledger = Ledger::new(Rank(1));
        (0..5).for_each(|_| ledger.put(None));
        ledger.puts_are_done(2).expect("they are under way");
        for count in [0, 1, 6, u64::MAX] {
            assert!(ledger.puts_are_done(count).is_err(), "{count} are done");
        }
        ledger.puts_failed(2, 1).expect("it is under way");
        // Done already, told already, none, more than there are, and no number.
        for (first, count) in [(1, 1), (2, 1), (3, 0), (3, 3), (u64::MAX, 2)] {
            assert!(ledger.puts_failed(first, count).is_err(), "{count} from {first} on");
        }
        ledger.puts_failed(3, 2).expect("they are under way");
    }
}
