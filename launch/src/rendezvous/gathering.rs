//! Who is there, who gave what, and why it came to nothing: the state of a meeting, without any input or output.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::rendezvous::wire::{Failure, Hello};

/// What all ranks gave in one round.
pub(crate) type Round = Arc<Vec<Vec<u8>>>;

/// A rank's place at the table.
#[derive(Debug)]
enum Seat {
    Empty,
    Taken(String),
    /// It was here and its connection has ended; whether it had said so.
    Left(String, bool),
}

/// A meeting.
#[derive(Debug)]
pub(crate) struct Gathering {
    seats: Vec<Seat>,
    round: u32,
    blobs: Vec<Option<Vec<u8>>>,
    /// When the first of those that wait gives up.
    deadline: Option<Instant>,
    failure: Option<Failure>,
    /// What all gave in the last round; of ranks that came again, what they gave then.
    last: Option<Round>,
    /// A rank is part of the job: there is no further round, and whoever died may come again.
    over: bool,
    /// How often each rank has come again.
    incarnations: Vec<u32>,
    /// Of which incarnation each part of `last` is: a rank that comes again is counted before it gives its own.
    given: Vec<u32>,
}

impl Gathering {
    pub(crate) fn new(size: u32) -> Self {
        let seats = (0..size).map(|_| Seat::Empty).collect();
        Self {
            seats,
            round: 0,
            blobs: vec![None; size as usize],
            deadline: None,
            failure: None,
            last: None,
            over: false,
            incarnations: vec![0; size as usize],
            given: vec![0; size as usize],
        }
    }

    /// The state of a meeting that another has served, in which nobody is expected but those who are not gone.
    /// `roster`: what the ranks gave last, and as which incarnations, if they met where that is known.
    pub(crate) fn taken_over(
        size: u32,
        gone: &[(u32, bool)],
        roster: Option<(Vec<u32>, Vec<Vec<u8>>)>,
    ) -> Self {
        let mut gathering = Self::new(size);
        gathering.over = true;
        if let Some((incarnations, parts)) = roster {
            gathering.given.clone_from(&incarnations);
            gathering.incarnations = incarnations;
            gathering.last = Some(Arc::new(parts));
        }
        for (rank, said) in gone {
            gathering.told_gone(*rank, *said);
        }
        gathering
    }

    /// A rank is gone that may never have come here; whether that is news.
    pub(crate) fn told_gone(&mut self, rank: u32, said: bool) -> bool {
        match self.seats.get_mut(rank as usize) {
            Some(seat @ Seat::Empty) => {
                *seat = Seat::Left("a process that another rank knew".into(), said);
                true
            }
            _ => false,
        }
    }

    /// A rank that was gone is there again, though not here; whether that is news.
    pub(crate) fn told_arrived(&mut self, rank: u32, incarnation: u32, part: &[u8]) -> bool {
        let at = rank as usize;
        let Some(known) = self.incarnations.get_mut(at).filter(|known| **known < incarnation) else {
            return false;
        };
        *known = incarnation;
        self.seats[at] = Seat::Empty;
        self.give_again(rank, part.to_vec());
        true
    }

    pub(crate) fn size(&self) -> u32 {
        self.seats.len() as u32
    }

    /// The ranks that are here.
    pub(crate) fn taken(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.seats).filter(|(_, seat)| matches!(seat, Seat::Taken(_))).map(|(rank, _)| rank)
    }

    /// Whether a rank has still to come for the first time.
    pub(crate) fn is_expecting(&self) -> bool {
        self.expected().next().is_some()
    }

    /// The ranks that are not gone and have not come here.
    pub(crate) fn expected(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.seats).filter(|(_, seat)| matches!(seat, Seat::Empty)).map(|(rank, _)| rank)
    }

    /// Whether a rank is part of the job, so that there is no further round.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// A rank has proven the key; which incarnation of it that is, or why it cannot stay.
    pub(crate) fn join(&mut self, hello: Hello, who: &str) -> Result<u32, Failure> {
        let size = self.seats.len() as u32;
        if hello.size != size || hello.rank >= size {
            let failure = Failure::Size { rank: hello.rank, size, said: hello.size };
            // The others would wait for it in vain; once all are there it is a stranger's error.
            if !self.over && self.is_expecting() {
                self.fail(failure.clone());
            }
            return Err(failure);
        }
        match &self.failure {
            Some(elsewhere @ Failure::Elsewhere(_)) => return Err(elsewhere.clone()),
            Some(failure) => {
                return Err(Failure::Refused(format!("the meeting has failed before: {}", told(failure))));
            }
            None => {}
        }
        let again = self.over && self.last.is_some() && hello.moves.is_none();
        let seat = &mut self.seats[hello.rank as usize];
        match seat {
            // Whether its predecessor is gone, which another has served, is still to be found out.
            Seat::Empty if again => Err(Failure::Later { hears: false }),
            Seat::Empty
                if hello.moves.is_some_and(|moves| moves != self.incarnations[hello.rank as usize]) =>
            {
                Err(Failure::Refused(format!(
                    "rank {} has been started again since that process was it",
                    hello.rank
                )))
            }
            Seat::Empty => {
                *seat = Seat::Taken(who.to_owned());
                Ok(0)
            }
            Seat::Left(_, false) if again => {
                *seat = Seat::Taken(who.to_owned());
                let incarnation = &mut self.incarnations[hello.rank as usize];
                *incarnation = incarnation.saturating_add(1);
                Ok(*incarnation)
            }
            // The others may be at the end of it, and the job of the next program of the same ranks begins thereafter.
            Seat::Left(first, true) if again => {
                Err(Failure::LeftBefore { rank: hello.rank, first: first.clone() })
            }
            Seat::Taken(first) => {
                Err(Failure::ClaimedTwice { rank: hello.rank, first: first.clone(), second: who.to_owned() })
            }
            Seat::Left(first, _) => Err(Failure::Refused(format!(
                "rank {} was here as {first} and has ended; the others do not wait for another",
                hello.rank
            ))),
        }
    }

    /// A rank gives its part; all parts if it was the last one missing. Wrong order is the rank's error.
    pub(crate) fn give(
        &mut self,
        rank: u32,
        round: u32,
        blob: Vec<u8>,
        gives_up: Instant,
    ) -> Result<Option<Round>, Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let slot = &mut self.blobs[rank as usize];
        if round != self.round || slot.is_some() {
            return Err(Failure::Refused(format!("rank {rank} gave a part that was not its turn")));
        }
        *slot = Some(blob);
        if let Some(failure) = self.first_left() {
            self.fail(failure.clone());
            return Err(failure);
        }
        self.deadline = Some(self.deadline.map_or(gives_up, |other| other.min(gives_up)));
        if self.blobs.iter().any(Option::is_none) {
            return Ok(None);
        }
        self.round = self.round.wrapping_add(1);
        self.deadline = None;
        let all = Arc::new(self.blobs.iter_mut().filter_map(Option::take).collect());
        self.last = Some(Arc::clone(&all));
        Ok(Some(all))
    }

    /// A rank is part of the job.
    pub(crate) fn watch(&mut self) {
        self.over = true;
    }

    /// What the ranks gave last, and as which incarnations, once the meeting is over.
    pub(crate) fn roster(&self) -> Option<(Vec<u32>, Round)> {
        let parts = self.last.clone().filter(|_| self.over)?;
        Some((self.given.clone(), parts))
    }

    /// A rank that has come again gives its part; which incarnation it is.
    pub(crate) fn give_again(&mut self, rank: u32, blob: Vec<u8>) -> u32 {
        if let Some(part) = self.last.as_mut().and_then(|last| Arc::make_mut(last).get_mut(rank as usize)) {
            *part = blob;
        }
        let incarnation = self.incarnations[rank as usize];
        self.given[rank as usize] = incarnation;
        incarnation
    }

    /// The ranks that are there again, with their incarnations and parts.
    pub(crate) fn returned(&self) -> impl Iterator<Item = (u32, u32, &[u8])> {
        let parts = self.last.iter().flat_map(|last| last.iter());
        // Of those that have yet to give theirs there is only the part of the process before.
        let current = self.incarnations.iter().zip(&self.given);
        let current = current.map(|(incarnation, given)| (given == incarnation).then_some(*incarnation));
        let all = (0..).zip(&self.seats).zip(current).zip(parts);
        all.filter_map(|(((rank, seat), incarnation), part)| match (seat, incarnation) {
            (Seat::Taken(_) | Seat::Empty, Some(incarnation @ 1..)) => Some((rank, incarnation, &part[..])),
            _ => None,
        })
    }

    /// A rank's connection has ended, after it had said so or without a word.
    pub(crate) fn leave(&mut self, rank: u32, said: bool) {
        let seat = &mut self.seats[rank as usize];
        let Seat::Taken(who) = seat else { return };
        *seat = Seat::Left(std::mem::take(who), said);
        // Whoever does not wait yet hears of it when it does.
        if self.blobs.iter().any(Option::is_some)
            && let Some(failure) = self.first_left()
        {
            self.fail(failure);
        }
    }

    /// A rank that was about to move here has given that up, and lives.
    pub(crate) fn unseat(&mut self, rank: u32) {
        let seat = &mut self.seats[rank as usize];
        if matches!(seat, Seat::Taken(_)) {
            *seat = Seat::Empty;
        }
    }

    /// Ends the meeting; what came first counts.
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
        self.deadline = None;
    }

    /// Notices that somebody's time is over.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            let missing = (0..).zip(&self.blobs).filter(|(_, blob)| blob.is_none()).map(|(rank, _)| rank);
            self.fail(Failure::Missing(missing.collect()));
        }
    }

    /// When to call [`tick`](Self::tick).
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Why the meeting came to nothing, if it did.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Who is gone, and whether it had said so.
    pub(crate) fn gone(&self) -> impl Iterator<Item = (u32, bool)> {
        (0..).zip(&self.seats).filter_map(|(rank, seat)| match seat {
            Seat::Left(_, said) => Some((rank, *said)),
            _ => None,
        })
    }

    fn first_left(&self) -> Option<Failure> {
        (0..).zip(&self.seats).find_map(|(rank, seat)| match seat {
            Seat::Left(who, _) => Some(Failure::Ended { rank, who: who.clone() }),
            _ => None,
        })
    }
}

fn told(failure: &Failure) -> String {
    failure.clone().into_error("the meeting", 0, 0).to_string()
}

/// The end of a wait that a rank says is so many milliseconds away; a day at most.
pub(crate) fn gives_up(now: Instant, milliseconds: u32) -> Instant {
    now + Duration::from_millis(u64::from(milliseconds)).min(Duration::from_secs(86_400))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(size: u32) -> Gathering {
        let mut gathering = Gathering::new(size);
        for rank in 0..size {
            gathering.join(Hello { rank, size, pid: rank, moves: None }, &format!("p{rank}")).unwrap();
        }
        gathering
    }

    #[test]
    fn a_round_is_complete_when_all_have_given() {
        let later = Instant::now() + Duration::from_secs(60);
        let mut gathering = joined(3);
        for round in 0..3 {
            assert_eq!(gathering.give(2, round, vec![2], later).unwrap(), None);
            assert_eq!(gathering.give(0, round, vec![0], later).unwrap(), None);
            assert_eq!(gathering.deadline(), Some(later));
            let all = gathering.give(1, round, vec![1], later).unwrap().unwrap();
            assert_eq!(*all, [[0], [1], [2]]);
            assert_eq!(gathering.deadline(), None);
        }
        // What is not its turn is that rank's error alone.
        assert!(matches!(gathering.give(0, 2, vec![], later), Err(Failure::Refused(_))));
        assert_eq!(gathering.failure(), None);
    }

    #[test]
    fn the_first_deadline_counts_and_names_who_has_not_given() {
        let now = Instant::now();
        let mut gathering = joined(4);
        gathering.give(2, 0, vec![], now + Duration::from_secs(9)).unwrap();
        gathering.give(0, 0, vec![], now + Duration::from_secs(3)).unwrap();
        gathering.tick(now + Duration::from_secs(2));
        assert_eq!(gathering.failure(), None);
        gathering.tick(now + Duration::from_secs(3));
        assert_eq!(gathering.failure(), Some(&Failure::Missing(vec![1, 3])));
        assert_eq!(gathering.give(1, 0, vec![], now).unwrap_err(), Failure::Missing(vec![1, 3]));
    }

    #[test]
    fn a_death_matters_to_those_who_wait_and_to_those_who_will() {
        let later = Instant::now() + Duration::from_secs(60);
        let ended = Failure::Ended { rank: 1, who: "p1".into() };
        let mut gathering = joined(3);
        gathering.give(0, 0, vec![], later).unwrap();
        gathering.leave(1, false);
        assert_eq!(gathering.failure(), Some(&ended));
        // After a whole round nobody waits, and it may be the end of the meeting.
        let mut gathering = joined(2);
        gathering.give(0, 0, vec![], later).unwrap();
        gathering.give(1, 0, vec![], later).unwrap().unwrap();
        gathering.leave(1, false);
        assert_eq!(gathering.failure(), None);
        assert_eq!(gathering.give(0, 1, vec![], later).unwrap_err(), ended);
    }

    #[test]
    fn whoever_died_after_the_meeting_may_come_again_and_is_counted() {
        let later = Instant::now() + Duration::from_secs(60);
        let hello = |rank| Hello { rank, size: 2, pid: 9, moves: None };
        let mut gathering = joined(2);
        gathering.give(0, 0, vec![0], later).unwrap();
        gathering.give(1, 0, vec![1], later).unwrap().unwrap();
        gathering.leave(1, false);
        // There might be another round.
        assert!(matches!(gathering.join(hello(1), "again"), Err(Failure::Refused(_))));
        gathering.watch();
        for incarnation in 1..4 {
            assert_eq!(gathering.join(hello(1), "again"), Ok(incarnation));
            let twice = gathering.join(hello(1), "third");
            assert!(matches!(twice, Err(Failure::ClaimedTwice { rank: 1, .. })), "{twice:?}");
            assert_eq!(gathering.give_again(1, vec![7, incarnation as u8]), incarnation);
            let (incarnations, parts) = gathering.roster().unwrap();
            assert_eq!(
                (incarnations, &*parts),
                (vec![0, incarnation], &vec![vec![0], vec![7, incarnation as u8]])
            );
            let returned: Vec<_> = gathering.returned().collect();
            assert_eq!(returned, [(1, incarnation, &[7, incarnation as u8][..])]);
            gathering.leave(1, false);
            assert_eq!((gathering.returned().count(), gathering.gone().collect()), (0, vec![(1, false)]));
        }
        // Who has left in order has left.
        gathering.leave(0, true);
        let left = gathering.join(hello(0), "again").unwrap_err();
        assert!(matches!(&left, Failure::LeftBefore { rank: 0, .. }), "{left:?}");
        assert_eq!(gathering.failure(), None);
    }

    #[test]
    fn a_successor_knows_who_moves_and_who_comes_again() {
        let roster = (vec![0, 2, 0], vec![vec![0], vec![1], vec![2]]);
        let mut gathering = Gathering::taken_over(3, &[], Some(roster));
        let hello = |rank, moves| Hello { rank, size: 3, pid: 9, moves };
        // Its predecessor may be on its way.
        assert_eq!(gathering.join(hello(2, None), "new"), Err(Failure::Later { hears: false }));
        let stale = gathering.join(hello(1, Some(1)), "old");
        assert!(matches!(&stale, Err(Failure::Refused(why)) if why.contains("started again")), "{stale:?}");
        assert_eq!(gathering.join(hello(1, Some(2)), "p1"), Ok(0));
        assert_eq!(gathering.expected().collect::<Vec<_>>(), [0, 2]);
        assert!(gathering.told_gone(2, false) && !gathering.told_gone(2, false));
        assert!(gathering.join(hello(2, Some(0)), "p2").is_err(), "it was told to be gone");
        assert_eq!(gathering.join(hello(2, None), "new"), Ok(1));
        // What is heard of a rank that has come again elsewhere.
        assert!(gathering.told_gone(0, false));
        assert!(gathering.told_arrived(0, 1, &[7]) && !gathering.told_arrived(0, 1, &[8]));
        assert!(!gathering.told_arrived(3, 1, &[]), "there is no such rank");
        let (incarnations, parts) = gathering.roster().unwrap();
        assert_eq!((incarnations, &*parts), (vec![1, 2, 0], &vec![vec![7], vec![1], vec![2]]));
        assert_eq!(gathering.join(hello(0, Some(1)), "p0"), Ok(0));
        assert!(!gathering.is_expecting());
    }

    #[test]
    fn an_address_is_of_the_incarnation_that_gave_it() {
        let later = Instant::now() + Duration::from_secs(60);
        let mut gathering = joined(3);
        for rank in 0..3 {
            gathering.give(rank, 0, vec![rank as u8], later).unwrap();
        }
        gathering.watch();
        (1..3).for_each(|rank| gathering.leave(rank, false));
        // Both have their seats before either has given its part.
        for rank in [1, 2] {
            assert_eq!(gathering.join(Hello { rank, size: 3, pid: 9, moves: None }, "again"), Ok(1));
        }
        let roster = |gathering: &Gathering| {
            let (incarnations, parts) = gathering.roster().unwrap();
            incarnations.into_iter().zip(parts.iter().cloned()).collect::<Vec<_>>()
        };
        let returned = |gathering: &Gathering| {
            let all =
                gathering.returned().map(|(rank, incarnation, part)| (rank, incarnation, part.to_vec()));
            all.collect::<Vec<_>>()
        };
        assert_eq!(roster(&gathering), [(0, vec![0]), (0, vec![1]), (0, vec![2])]);
        assert_eq!(returned(&gathering), vec![]);
        gathering.give_again(2, vec![7]);
        assert_eq!(roster(&gathering), [(0, vec![0]), (0, vec![1]), (1, vec![7])]);
        assert_eq!(returned(&gathering), vec![(2, 1, vec![7])]);
        // Whoever goes on in this one's place hears of the other when that has given its own.
        let (incarnations, parts) = gathering.roster().unwrap();
        let mut next = Gathering::taken_over(3, &[], Some((incarnations, parts.to_vec())));
        assert_eq!(returned(&next), vec![(2, 1, vec![7])]);
        assert!(next.told_arrived(1, 1, &[8]) && !next.told_arrived(2, 1, &[9]));
        assert_eq!(roster(&next), [(0, vec![0]), (1, vec![8]), (1, vec![7])]);
    }

    #[test]
    fn a_number_has_one_owner_and_sizes_agree() {
        let mut gathering = joined(2);
        let second = gathering.join(Hello { rank: 1, size: 2, pid: 9, moves: None }, "other").unwrap_err();
        let twice = Failure::ClaimedTwice { rank: 1, first: "p1".into(), second: "other".into() };
        assert_eq!(second, twice);
        for (rank, said) in [(2, 2), (0, 3), (u32::MAX, u32::MAX)] {
            let failure =
                gathering.join(Hello { rank, size: said, pid: 9, moves: None }, "other").unwrap_err();
            assert_eq!(failure, Failure::Size { rank, size: 2, said });
            assert_eq!(gathering.failure(), None, "all are there already");
        }
        let mut gathering = Gathering::new(2);
        gathering.join(Hello { rank: 0, size: 3, pid: 9, moves: None }, "other").unwrap_err();
        let why = Failure::Size { rank: 0, size: 2, said: 3 };
        assert_eq!(gathering.failure(), Some(&why));
        assert!(matches!(
            gathering.join(Hello { rank: 0, size: 2, pid: 1, moves: None }, "p0"),
            Err(Failure::Refused(_))
        ));
    }
}
