//! In which order ranks fell, as their peers have seen it.
//!
//! What ends a rank's life for its peers is that the read end of its doorbell is closed; its process may go on for a while, and
//! those who are told of the loss may have ended by then. So the order in which processes end does not tell whose failure was
//! the first: that of the doorbells does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use crate::fds::SharedFds;
use crate::outcome::{Cause, Failure};

/// Ends of doorbells that are taken up at once.
const AT_ONCE: usize = 64;
/// Falls within that time may have been seen in another order where ranks hear of each other by sockets: of those of a process
/// some are closed before its doorbell is, and when that is, is up to the scheduler.
pub(crate) const TOGETHER: Duration = Duration::from_millis(100);
/// Who fell so long before another did so shortly before.
const SHORTLY: Duration = Duration::from_secs(1);

/// The doorbells of the ranks that were started, and those of them that have been closed.
#[derive(Debug)]
pub(crate) struct Falls {
    /// None where it could not be made: then no order is known.
    epoll: Option<OwnedFd>,
    /// The doorbells' write ends, of each node.
    kept: Vec<Arc<SharedFds>>,
    /// Who fell, and when that was seen.
    order: Vec<(u32, Instant)>,
}

impl Falls {
    pub(crate) fn new() -> Falls {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .inspect_err(|error| tracing::debug!(%error, "in which order ranks fall is not known"))
            .ok();
        Falls { epoll, kept: Vec::new(), order: Vec::new() }
    }

    /// Watches the doorbell of a rank, which is to be started, at this place of its node.
    pub(crate) fn watch(&mut self, rank: u32, shared: &Arc<SharedFds>, place: u32) {
        let (Some(epoll), Some(bell)) = (&self.epoll, shared.ring.get(place as usize)) else { return };
        // The error of a pipe that has lost its reader is told unasked. Once each: the next in the list is the next that fell.
        let data = epoll::EventData::new_u64(u64::from(rank));
        if let Err(error) = epoll::add(epoll, bell, data, epoll::EventFlags::ET) {
            tracing::debug!(rank, %error, "when the rank falls is not known");
            return;
        }
        if !self.kept.iter().any(|kept| Arc::ptr_eq(kept, shared)) {
            self.kept.push(Arc::clone(shared));
        }
    }

    /// Takes up what has been closed since the last look.
    pub(crate) fn look(&mut self) {
        let Some(epoll) = &self.epoll else { return };
        loop {
            let mut events = Vec::with_capacity(AT_ONCE);
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let found =
                epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), Some(&at_once)).unwrap_or(0);
            let closed = events.iter().filter(|event| {
                let flags = event.flags;
                flags.contains(epoll::EventFlags::ERR)
            });
            let now = Instant::now();
            self.order.extend(closed.map(|event| (event.data.u64() as u32, now)));
            if found < AT_ONCE {
                return;
            }
        }
    }

    /// Those who fell before this rank, or where they hear of each other by sockets may have; all who did if it is not known to have
    /// fallen.
    pub(crate) fn may_precede(&self, rank: u32, by_sockets: bool) -> impl Iterator<Item = u32> {
        let at = self.place(rank);
        let until = self.order.get(at).map_or_else(Instant::now, |(_, fell)| *fell + TOGETHER);
        let with = self.order.iter().skip(at + 1).take_while(move |(_, fell)| by_sockets && *fell <= until);
        self.order.iter().take(at).chain(with).map(|(fallen, _)| *fallen)
    }

    /// Which of these failures was the first: that of the rank that fell first. Of several that may have, that which is least
    /// likely to be the consequence of another one: a death by signal, an exit with a code of the program's own, a panic, and
    /// an error that `main` returns.
    pub(crate) fn first_of(&self, failures: &[Failure], by_sockets: bool) -> Option<usize> {
        let kind = |failure: &Failure| match failure.cause {
            Cause::Exit(1) => 3,
            Cause::Exit(101) => 2,
            Cause::Exit(_) => 1,
            _ => 0,
        };
        let first = failures.iter().map(|failure| failure.rank).min_by_key(|rank| self.place(*rank))?;
        let may_be: Vec<u32> = self.may_precede(first, by_sockets).chain([first]).collect();
        let known = self.place(first) < self.order.len();
        let rivals = (0..failures.len()).filter(|at| !known || may_be.contains(&failures[*at].rank));
        rivals.min_by_key(|at| (kind(&failures[*at]), self.place(failures[*at].rank), failures[*at].rank))
    }

    /// The rank's place in the order in which they fell; behind all if it is not known to have fallen.
    fn place(&self, rank: u32) -> usize {
        self.order.iter().position(|(fallen, _)| *fallen == rank).unwrap_or(self.order.len())
    }

    /// Those of them whose fall may have been the reason of the rank's.
    pub(crate) fn shortly_before(&self, rank: u32, by_sockets: bool) -> impl Iterator<Item = u32> {
        let at = self.order.get(self.place(rank)).map_or_else(Instant::now, |(_, fell)| *fell);
        self.may_precede(rank, by_sockets).filter(move |other| {
            let fell = self.order.get(self.place(*other)).map(|(_, fell)| *fell);
            fell.is_some_and(|fell| at.saturating_duration_since(fell) < SHORTLY)
        })
    }

    /// The rank is started again: nobody falls for it any more.
    pub(crate) fn forget(&mut self, rank: u32) {
        self.order.retain(|(fallen, _)| *fallen != rank);
    }

    /// Readable when there is something to be taken up.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.epoll.as_ref().map(AsFd::as_fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fds::HostFds;

    #[test]
    fn whose_doorbell_is_closed_first_fell_first() {
        let mut fds = HostFds::new(100, 1 << 16).expect("there are descriptors");
        let mut falls = Falls::new();
        let bells: Vec<_> = (0..100).map(|rank| fds.take_bell(rank).expect("it is there")).collect();
        for rank in 0..100 {
            falls.watch(rank, fds.shared(), rank);
        }
        falls.look();
        assert_eq!(falls.may_precede(0, false).count(), 0);
        // In steps of 37, which is prime to their number.
        let mut bells: Vec<_> = bells.into_iter().map(Some).collect();
        let order: Vec<u32> = (0..99).map(|at| (at * 37 + 11) % 100).collect();
        for rank in &order {
            bells[*rank as usize] = None;
        }
        falls.look();
        assert!(falls.may_precede(order[80], false).eq(order[..80].iter().copied()));
        assert!(falls.shortly_before(order[80], false).eq(order[..80].iter().copied()));
        let last = (99 * 37 + 11) % 100;
        assert!(falls.may_precede(last, false).eq(order.iter().copied()), "it has not fallen");
        falls.forget(order[0]);
        assert!(falls.may_precede(order[80], false).eq(order[1..80].iter().copied()));
    }

    #[test]
    fn of_failures_that_may_have_been_the_first_the_least_likely_consequence_is() {
        let now = Instant::now();
        let at = |rank, ms| (rank, now + Duration::from_millis(ms));
        let falls = Falls { order: vec![at(3, 0), at(1, 2), at(2, 15), at(0, 400)], ..Falls::new() };
        let failure =
            |rank, cause| Failure { rank, pid: None, cause, after: Duration::ZERO, quit_before: None };
        let failures = [
            failure(0, Cause::Signal(9)),
            failure(1, Cause::Exit(1)),
            failure(2, Cause::Exit(101)),
            failure(3, Cause::Exit(1)),
        ];
        let first = |failures: &[Failure], by_sockets| {
            falls.first_of(failures, by_sockets).map(|first| failures[first].rank)
        };
        assert_eq!((first(&failures, false), first(&failures, true)), (Some(3), Some(2)));
        assert_eq!((first(&failures[..2], false), first(&failures[..2], true)), (Some(1), Some(1)));
        assert_eq!(first(&[], true), None);
        // Of two that are not known to have fallen, as they were started again.
        let again = [failure(4, Cause::Exit(1)), failure(5, Cause::Signal(11))];
        assert_eq!(first(&again, false), Some(5));
        assert!(falls.may_precede(1, false).eq([3]) && falls.may_precede(1, true).eq([3, 2]));
    }
}
