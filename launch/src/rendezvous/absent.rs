//! Those who do not come to a rank that took the news over: they may have ended when nobody could hear of it.
//!
//! A closed port is a proof: the kernel answers for a process that is stopped or busy, and not for one that has ended.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with, sockopt};

/// What is known of a rank in the process that asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whereabout {
    /// Where it listens, as far as that is known: at one place at least as long as it lives.
    Listens(Vec<SocketAddr>),
    /// It has said that it leaves.
    Left,
}

/// Tells what is known of a rank.
pub type Whereabouts = Arc<dyn Fn(u32) -> Whereabout + Send + Sync>;

/// How long those who live have to come before they are looked for, and then the pause between two looks.
const FIRST: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_secs(1);
/// How long one look may take.
const LOOK: Duration = Duration::from_secs(1);
/// Those looked for at a time.
const MOST: usize = 64;

/// What a look at a rank's port has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sign {
    Alive,
    Ended,
    Silent,
}

/// The search for them.
pub(crate) struct Absent {
    whereabouts: Whereabouts,
    /// A host that has not answered for so long is gone, as it is for the connections between ranks.
    silence: Duration,
    next: Instant,
    /// A look that is under way.
    look: Option<Receiver<Vec<(u32, Sign)>>>,
    /// The last rank that was looked for: those behind it are next.
    last: u32,
    /// Since when whose hosts do not answer.
    silent: Vec<(u32, Instant)>,
}

impl Absent {
    pub(crate) fn new(whereabouts: Whereabouts, silence: Duration, now: Instant) -> Self {
        Self { whereabouts, silence, next: now + FIRST, look: None, last: u32::MAX, silent: Vec::new() }
    }

    /// When to call [`look`](Self::look) again.
    pub(crate) fn deadline(&self, now: Instant) -> Instant {
        if self.look.is_some() { now + Duration::from_millis(20) } else { self.next }
    }

    /// Those of the ranks expected that have ended, and whether they had said so.
    pub(crate) fn look(&mut self, expected: impl Iterator<Item = u32>, now: Instant) -> Vec<(u32, bool)> {
        if let Some(look) = &self.look {
            match look.try_recv() {
                Ok(signs) => {
                    self.look = None;
                    self.next = now + PAUSE;
                    return self.judge(&signs, now).into_iter().map(|rank| (rank, false)).collect();
                }
                Err(std::sync::mpsc::TryRecvError::Empty) => return Vec::new(),
                Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                    (self.look, self.next) = (None, now + PAUSE);
                }
            }
        }
        if now < self.next {
            return Vec::new();
        }
        self.next = now + PAUSE;
        let (places, left) = self.places(expected);
        if !places.is_empty() {
            let (sender, receiver) = channel();
            let thread = std::thread::Builder::new().name("absent".into());
            // Nobody may be waiting any more.
            match thread.spawn(move || drop(sender.send(signs_of(&places)))) {
                Ok(_) => self.look = Some(receiver),
                Err(error) => tracing::warn!(%error, "nobody looks for ranks that may have ended"),
            }
        }
        left.into_iter().map(|rank| (rank, true)).collect()
    }

    /// Where those listen that are to be looked for next, and who has left.
    fn places(&mut self, expected: impl Iterator<Item = u32>) -> (Vec<(u32, SocketAddr)>, Vec<u32>) {
        let mut ranks: Vec<u32> = expected.collect();
        ranks.sort_unstable();
        // As many that live and do not come are no reason not to look for others.
        let first = ranks.partition_point(|rank| *rank <= self.last);
        ranks.rotate_left(first);
        let (mut places, mut left, mut known) = (Vec::new(), Vec::new(), 0);
        for rank in ranks {
            match (self.whereabouts)(rank) {
                Whereabout::Left => left.push(rank),
                Whereabout::Listens(listens) if !listens.is_empty() && known < MOST => {
                    places.extend(listens.into_iter().map(|place| (rank, place)));
                    self.last = rank;
                    known += 1;
                }
                Whereabout::Listens(_) => {}
            }
        }
        (places, left)
    }

    fn judge(&mut self, signs: &[(u32, Sign)], now: Instant) -> Vec<u32> {
        let before = std::mem::take(&mut self.silent);
        // One that has closed some of its places has not ended.
        let mut ranks: BTreeMap<u32, Sign> = BTreeMap::new();
        for (rank, sign) in signs {
            let known = ranks.entry(*rank).or_insert(*sign);
            *known = match (*known, *sign) {
                (Sign::Alive, _) | (_, Sign::Alive) => Sign::Alive,
                (Sign::Silent, _) | (_, Sign::Silent) => Sign::Silent,
                (Sign::Ended, Sign::Ended) => Sign::Ended,
            };
        }
        // Those that were not looked at this time are as silent as they were.
        self.silent.extend(before.iter().filter(|(rank, _)| !ranks.contains_key(rank)));
        let mut ended = Vec::new();
        for (rank, sign) in &ranks {
            let since = before.iter().find(|(other, _)| other == rank).map_or(now, |(_, since)| *since);
            match sign {
                Sign::Alive => {}
                Sign::Silent if now.saturating_duration_since(since) < self.silence => {
                    self.silent.push((*rank, since));
                }
                Sign::Ended | Sign::Silent => ended.push(*rank),
            }
        }
        ended
    }
}

/// Looks at all of these at once.
fn signs_of(places: &[(u32, SocketAddr)]) -> Vec<(u32, Sign)> {
    let mut signs = Vec::new();
    let mut waiting: Vec<(u32, OwnedFd)> = Vec::new();
    for (rank, place) in places {
        match begin(place) {
            Ok(Some(socket)) => waiting.push((*rank, socket)),
            Ok(None) => signs.push((*rank, Sign::Alive)),
            Err(errno) => signs.push((*rank, sign_of(errno))),
        }
    }
    let until = Instant::now() + LOOK;
    while !waiting.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut fds: Vec<_> = waiting.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::OUT)).collect();
        let polled = poll(&mut fds, Some(&timeout));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        match polled {
            Ok(0) => break,
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => break,
        }
        let mut ready = ready.into_iter();
        waiting.retain(|(rank, socket)| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            signs.push((
                *rank,
                match sockopt::socket_error(socket) {
                    Ok(Ok(())) => Sign::Alive,
                    Ok(Err(errno)) | Err(errno) => sign_of(errno),
                },
            ));
            false
        });
    }
    signs.extend(waiting.into_iter().map(|(rank, _)| (rank, Sign::Silent)));
    signs
}

/// Begins to connect; none if it has succeeded at once.
fn begin(place: &SocketAddr) -> Result<Option<OwnedFd>, Errno> {
    let family = if place.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    match connect(&socket, place) {
        Ok(()) => Ok(None),
        Err(Errno::INPROGRESS | Errno::INTR) => Ok(Some(socket)),
        Err(errno) => Err(errno),
    }
}

fn sign_of(errno: Errno) -> Sign {
    match errno {
        Errno::CONNREFUSED => Sign::Ended,
        // This side's own trouble is no sign of the other's.
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::ADDRNOTAVAIL | Errno::AGAIN => {
            Sign::Alive
        }
        _ => Sign::Silent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn absent(silence: u64, now: Instant) -> Absent {
        Absent::new(Arc::new(|_| Whereabout::Listens(Vec::new())), Duration::from_secs(silence), now)
    }

    #[test]
    fn a_closed_port_is_an_end_and_an_open_one_is_none_whoever_listens() {
        let open = TcpListener::bind("127.0.0.1:0").unwrap();
        let closed = TcpListener::bind("[::1]:0").unwrap().local_addr().unwrap();
        let mut signs = signs_of(&[(3, open.local_addr().unwrap()), (5, closed)]);
        signs.sort_by_key(|(rank, _)| *rank);
        assert_eq!(signs, [(3, Sign::Alive), (5, Sign::Ended)]);
    }

    #[test]
    fn silence_is_an_end_only_when_it_lasts() {
        let now = Instant::now();
        let mut absent = absent(5, now);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(absent.judge(&[(1, Sign::Silent), (2, Sign::Silent)], now).is_empty());
        assert!(absent.judge(&[(1, Sign::Alive), (2, Sign::Silent)], after(3)).is_empty());
        assert_eq!(absent.judge(&[(1, Sign::Silent), (2, Sign::Silent)], after(6)), [2]);
        assert_eq!(absent.judge(&[(1, Sign::Silent), (4, Sign::Ended)], after(7)), [4]);
        assert_eq!(absent.judge(&[(1, Sign::Silent)], after(11)), [1]);
    }

    #[test]
    fn how_long_silence_may_last_is_as_it_was_set() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let (mut long, mut never) = (absent(60, now), absent(u64::MAX, now));
        for seconds in [0, 6, 59] {
            assert!(long.judge(&[(1, Sign::Silent)], after(seconds)).is_empty());
        }
        assert_eq!(long.judge(&[(1, Sign::Silent)], after(60)), [1]);
        for seconds in [0, 3600, 1_000_000] {
            assert!(never.judge(&[(1, Sign::Silent)], after(seconds)).is_empty());
        }
        assert_eq!(never.judge(&[(1, Sign::Ended)], after(1_000_001)), [1]);
    }

    #[test]
    fn a_rank_has_not_ended_as_long_as_one_of_its_places_is_open() {
        let now = Instant::now();
        let mut absent = absent(5, now);
        let signs =
            [(1, Sign::Ended), (1, Sign::Alive), (2, Sign::Ended), (2, Sign::Ended), (3, Sign::Alive)];
        assert_eq!(absent.judge(&signs, now), [2]);
        assert!(absent.judge(&[(4, Sign::Ended), (4, Sign::Silent)], now).is_empty());
        // What was not looked at meanwhile stays silent.
        assert!(absent.judge(&[(1, Sign::Alive)], now + Duration::from_secs(1)).is_empty());
        assert_eq!(absent.judge(&[(4, Sign::Silent)], now + Duration::from_secs(6)), [4]);
    }

    #[test]
    fn all_are_looked_for_in_turn_however_many_do_not_come() {
        let place = SocketAddr::from(([127, 0, 0, 1], 9));
        // Of every third nobody knows where it listens.
        let known = move |rank: u32| match rank {
            300.. => Whereabout::Left,
            _ if rank.is_multiple_of(3) => Whereabout::Listens(Vec::new()),
            _ => Whereabout::Listens(vec![place]),
        };
        let mut absent = Absent::new(Arc::new(known), Duration::ZERO, Instant::now());
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..4 {
            let (places, left) = absent.places(1..302);
            assert_eq!(left, [300, 301], "nobody looks for those");
            let ranks: Vec<u32> = places.into_iter().map(|(rank, _)| rank).collect();
            assert_eq!(ranks.len(), MOST);
            seen.extend(ranks);
        }
        assert!((1..300).filter(|rank| rank % 3 != 0).all(|rank| seen.contains(&rank)));
        assert!(absent.places(std::iter::empty()).0.is_empty());
        assert_eq!(absent.places(7..9).0, [(7, place), (8, place)]);
    }
}
