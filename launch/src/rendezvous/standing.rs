//! A server in waiting: it follows the one that serves, with all that it would need, and becomes the next when it is its turn.
//!
//! ```text
//!            ┌─ told to move there ── asks there ─┐
//!            ▼                                    │
//!  ───▶ following ── the server is gone ──▶ seeking ── another serves ──▶ following
//!            │                                 ├─ its own turn ─────────▶ serving
//!            └─ told to serve ──▶ serving      └─ the others hear it ───▶ cut off
//! ```
//! Its own rank hears the news through it. Whoever else comes is told that nobody serves here yet, and whether the server is
//! heard here: so nobody takes over as long as another of those that stand by hears it, and a rank that was cut off alone
//! serves nobody.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::rendezvous::absent::{Absent, Whereabouts};
use crate::rendezvous::bulletin::{Bulletin, Notice, Seat, Served};
use crate::rendezvous::handover::Handover;
use crate::rendezvous::seek::{Answer, Sought, ask, redirect, seek};
use crate::rendezvous::server::Server;

/// How long others may go on hearing a server that this rank does not hear any more, besides the time after which a silent host
/// is lost.
const PATIENCE: Duration = Duration::from_secs(40);
/// How long a server that was named may take to serve.
const NAMED: Duration = Duration::from_secs(2);
/// How long the end of its rank waits for a successor that could tell the others.
const FAREWELL: Duration = Duration::from_secs(3);
/// How often to look what a search has found.
const LOOK: Duration = Duration::from_millis(10);
/// The first and the longest pause between two looks whether the meeting's place is free, or a rank 0 that died has come again there.
const RECLAIM: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));
/// The rank that serves the place, where a rank does.
const HOST: u32 = 0;

/// What it has of its rank's duty.
pub(crate) struct Standing {
    /// Where it would serve.
    place: SocketAddr,
    /// The server that it follows, or followed.
    before: Bulletin,
    /// The connection to that has ended without a word.
    lost: bool,
    search: Option<Receiver<Sought>>,
    /// The search is for a server that was named.
    named: bool,
    /// Another was named meanwhile.
    named_since: Option<SocketAddr>,
    cut_off: bool,
    /// Its own rank has said that it leaves.
    leaves: bool,
    /// When it ends though it has found nobody whom that could be told.
    ends: Option<Instant>,
    whereabouts: Whereabouts,
}

impl Standing {
    pub(crate) fn new(before: Bulletin, place: SocketAddr, whereabouts: Whereabouts) -> Self {
        Self {
            place,
            before,
            lost: false,
            search: None,
            named: false,
            named_since: None,
            cut_off: false,
            leaves: false,
            ends: None,
            whereabouts,
        }
    }

    /// Says where it stands by.
    pub(crate) fn announce(&mut self) {
        // The others may come as soon as they are told; until the server accepts them the kernel keeps them.
        if self.before.serving(self.place).is_err() {
            // What it has said before its end is still to be read: who else stands by, and who serves the news by now.
            self.before.say_no_more();
        }
    }

    /// The server that it follows, or followed.
    fn served(&self) -> Served {
        self.before.served()
    }

    /// What it would have followed, of one that has not begun.
    pub(crate) fn into_bulletin(self) -> Bulletin {
        self.before
    }

    /// The connection to the server, to be polled.
    pub(crate) fn before(&self) -> Option<&Bulletin> {
        (!self.lost).then_some(&self.before)
    }

    pub(crate) fn rank(&self) -> u32 {
        self.before.seat().rank
    }

    /// Whether it hears the server.
    pub(crate) fn hears(&self) -> bool {
        !self.lost
    }

    pub(crate) fn is_cut_off(&self) -> bool {
        self.cut_off
    }

    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        self.search.is_some().then_some(now + LOOK)
    }

    /// Its own rank leaves: so the server is told.
    pub(crate) fn leave(&mut self) {
        self.leaves = true;
        if !self.lost
            && let Err(error) = self.before.say_leave()
        {
            tracing::debug!(%error, "the others could not be told that this rank leaves");
        }
    }

    /// Hears the news from that server from here on.
    fn follow(&mut self, mut next: Bulletin) {
        self.before.moved();
        next.inherit(&self.before);
        self.before = next;
        self.lost = false;
        if self.leaves {
            self.leave();
        }
    }

    /// Moves to a server that was named, as soon as that serves.
    fn move_to(&mut self, place: SocketAddr) {
        let (seat, lost) = (self.before.seat().clone(), self.served());
        let until = Instant::now() + NAMED;
        self.named = true;
        self.search(move || {
            loop {
                match ask(&seat, place, lost) {
                    Answer::Serves(bulletin) => return Sought::Serves(bulletin),
                    Answer::Later { .. } if Instant::now() < until => std::thread::sleep(LOOK),
                    _ => return Sought::CutOff,
                }
            }
        });
    }

    /// Looks for whoever serves, in a thread of its own: this one goes on telling others that it does not.
    fn search(&mut self, run: impl FnOnce() -> Sought + Send + 'static) {
        let (sender, receiver) = channel();
        let run = move || {
            // If nobody waits any more, this rank's seat there was for nothing, and has not ended.
            if let Err(unsent) = sender.send(run())
                && let Sought::Serves(bulletin) = unsent.0
            {
                bulletin.give_up();
            }
        };
        match std::thread::Builder::new().name("successor".into()).spawn(run) {
            Ok(_) => self.search = Some(receiver),
            Err(error) => tracing::warn!(%error, "nobody looks for who serves the news"),
        }
    }
}

/// The place where the ranks met in the first place, for those that are started again.
pub(crate) struct Reclaim {
    seat: Seat,
    /// Where the news are served.
    serving: SocketAddr,
    listener: Option<TcpListener>,
    next: Option<Instant>,
    pause: Duration,
    /// A visit there that is under way.
    visit: Option<JoinHandle<()>>,
}

impl Reclaim {
    /// With a listener there, if that is had already.
    fn new(seat: Seat, serving: SocketAddr, met: Option<TcpListener>, now: Instant) -> Self {
        let mut reclaim =
            Self { seat, serving, listener: None, next: Some(now), pause: RECLAIM.0, visit: None };
        match met {
            Some(listener) => reclaim.listen(listener, now),
            None => reclaim.tick(std::iter::empty(), now),
        }
        reclaim
    }

    pub(crate) fn listener(&self) -> Option<&TcpListener> {
        self.listener.as_ref()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.next
    }

    /// Tries again: whoever has it may go away. If it is a rank 0 that had died and has come again, before this rank could have the
    /// place or on another host, it is told where the others are.
    pub(crate) fn tick(&mut self, died: impl Iterator<Item = u32>, now: Instant) {
        if self.next.is_none_or(|next| now < next) {
            return;
        }
        match self.seat.met_at.take() {
            Ok(listener) => self.listen(listener, now),
            Err(_) => {
                self.try_later(now);
                self.visit(died.collect());
            }
        }
    }

    fn try_later(&mut self, now: Instant) {
        self.next = Some(now + self.pause);
        self.pause = (self.pause * 2).min(RECLAIM.1);
    }

    fn visit(&mut self, died: Vec<u32>) {
        if !died.contains(&HOST) || self.visit.as_ref().is_some_and(|visit| !visit.is_finished()) {
            return;
        }
        let (seat, serving) = (self.seat.clone(), self.serving);
        let visit = std::thread::Builder::new().name("redirect".into());
        match visit.spawn(move || redirect(&seat, &died, serving)) {
            Ok(visit) => self.visit = Some(visit),
            Err(error) => tracing::warn!(%error, "nobody looks who has come to where the ranks met"),
        }
    }

    fn listen(&mut self, listener: TcpListener, now: Instant) {
        if listener.set_nonblocking(true).is_err() {
            return self.try_later(now);
        }
        let place = self.seat.met_at.address;
        tracing::debug!(%place, "serves the news where the ranks met, too");
        (self.listener, self.next) = (Some(listener), None);
    }
}

impl Server {
    /// Goes on with standing by; whether it is over.
    pub(crate) fn stand(&mut self, heard: bool, now: Instant) -> bool {
        let found = self.standing.as_mut().and_then(|standing| match standing.search.as_ref()?.try_recv() {
            Ok(sought) => Some(sought),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Sought::CutOff),
        });
        if let (Some(sought), Some(standing)) = (found, &mut self.standing) {
            standing.search = None;
            let named = std::mem::take(&mut standing.named);
            match sought {
                Sought::Serves(bulletin) => {
                    let ended =
                        std::mem::take(&mut standing.lost).then(|| standing.before.server()).flatten();
                    standing.follow(*bulletin);
                    self.ended_unheard(ended);
                    self.hear_server(now);
                }
                Sought::OwnTurn(met) => self.take_over(met, now),
                // Where it was told to move to, nobody serves; it goes on listening here, or looks for another.
                Sought::CutOff if named => {
                    if let Some(next) = standing.named_since.take() {
                        standing.move_to(next);
                    }
                }
                Sought::CutOff => {
                    tracing::warn!("this rank does not hear the news of the others any more");
                    standing.cut_off = true;
                }
            }
        }
        if heard {
            self.hear_server(now);
        }
        let Some(standing) = &mut self.standing else { return false };
        if standing.lost && standing.search.is_none() && !standing.cut_off {
            let (seat, lost) = (standing.before.seat().clone(), standing.served());
            let standbys = standing.before.standbys().to_vec();
            standing.search(move || seek(&seat, &standbys, lost, PATIENCE.saturating_add(seat.silence)));
        }
        let ends = self.stopping.then(|| *standing.ends.get_or_insert(now + FAREWELL));
        ends.is_some_and(|ends| standing.hears() || standing.search.is_none() || ends <= now)
    }

    /// Passes on to its own rank, and keeps, what the server tells.
    fn hear_server(&mut self, now: Instant) {
        loop {
            let Some(standing) = self.standing.as_mut().filter(|standing| !standing.lost) else { return };
            let Ok(news) = standing.before.read() else {
                standing.lost = true;
                return;
            };
            let again = matches!(news.last(), Some(Notice::StandBy(_)));
            // It was to serve, and did not for so long that the server has ended: another may do so by now.
            let too_late = news.contains(&Notice::Closed);
            for notice in news {
                if !too_late || !matches!(notice, Notice::Move { .. }) {
                    self.hear_notice(notice, now);
                }
            }
            if !again {
                return;
            }
        }
    }

    fn hear_notice(&mut self, notice: Notice, now: Instant) {
        // This rank serves since what stood before that: those who come to it are to hear of this as well.
        let Some(standing) = &mut self.standing else { return self.heard(notice) };
        match notice {
            Notice::Ended(_) | Notice::Died(_) | Notice::Left(_) | Notice::Arrived { .. } => {
                self.heard(notice)
            }
            // It has all that it needs already.
            Notice::StandBy(_) => {
                standing.announce();
            }
            Notice::Move { rank, .. } if rank == standing.rank() => self.take_over(None, now),
            Notice::Move { place, .. } if standing.search.is_none() => standing.move_to(place),
            // The one named before is gone, and the search for it not over.
            Notice::Move { place, .. } => standing.named_since = Some(place),
            // As a rule nobody is left who would serve, and whoever comes again finds this rank. But somebody else may be asked to
            // serve, and be stopped, and others may stand by as well: not all of them are to serve.
            Notice::Closed => {
                standing.lost = true;
                if let Some(server) = standing.before.server() {
                    self.heard(Notice::Left(server));
                }
            }
        }
    }

    /// What is told of a rank elsewhere.
    pub(crate) fn heard(&mut self, notice: Notice) {
        let (rank, said) = match notice {
            Notice::Ended(rank) | Notice::Died(rank) => (rank, false),
            Notice::Left(rank) => (rank, true),
            Notice::Arrived { rank, incarnation, part } => {
                if self.gathering.told_arrived(rank, incarnation, &part) {
                    self.watching().for_each(|other| other.tell_arrived(rank, incarnation, &part));
                }
                return;
            }
            _ => return,
        };
        if self.gathering.told_gone(rank, said) {
            self.watching().for_each(|other| other.tell_gone(rank, said));
        }
        self.no_standby(rank);
    }

    /// A rank has ended when nobody served who could have told.
    pub(crate) fn ended_unheard(&mut self, rank: Option<u32>) {
        if let Some(rank) = rank {
            self.heard(Notice::Ended(rank));
        }
    }

    /// Serves from here on, also where the ranks met if it has the place already.
    fn take_over(&mut self, met: Option<TcpListener>, now: Instant) {
        let Some(standing) = self.standing.take() else { return };
        let rank = standing.rank();
        self.generation = standing.before.served().generation.saturating_add(1);
        let (place, generation) = (standing.place, self.generation);
        tracing::debug!(rank, %place, generation, "serves the news of the other ranks from here on"
        );
        // Relaxed: nobody but this thread reads it behind this.
        self.stop.served_by.store(rank, Ordering::Relaxed);
        let there = |other: &&(u32, SocketAddr)| other.0 != rank && Some(other.0) != standing.before.server();
        self.standbys = standing.before.standbys().iter().filter(there).copied().collect();
        // Those look there that are started again, if ranks can be, and those to whom nobody is known who stands by.
        self.reclaim = Some(Reclaim::new(standing.before.seat().clone(), place, met, now));
        self.absent = Some(Absent::new(standing.whereabouts, self.silence, now));
        if standing.lost {
            self.ended_unheard(standing.before.server());
        } else {
            // It may still have something to tell of those who have not come here.
            self.predecessor = Some(standing.before);
        }
        self.standbys_changed();
        if self.stopping {
            self.handover = Some(Handover::new(now));
        }
    }
}
