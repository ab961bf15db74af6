//! Whom a rank that serves has stand by, in case it ends without a word.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::rendezvous::handover::stays;
use crate::rendezvous::member::{Member, State};
use crate::rendezvous::server::Server;
use crate::rendezvous::wire::STANDBYS;

/// How long one that was asked has to answer before another is asked in its place. It is heard all the same when it does: a rank
/// that computes answers late.
const PATIENCE: Duration = Duration::from_secs(2);

impl Member {
    /// Until when its answer is waited for.
    pub(crate) fn is_awaited(&self, now: Instant) -> Option<Instant> {
        let until = self.asked_to_stand_by? + PATIENCE;
        (until > now && stays(self)).then_some(until)
    }
}

impl Server {
    /// Asks ranks to stand by, as long as there are too few; the launcher, with whom the ranks end, asks nobody. Whoever leaves
    /// asks only if nobody is there any more who stands by, or nobody had come yet who could be asked.
    pub(crate) fn appoint(&mut self) {
        let may = self.ending.is_none() && self.standing.is_none() && self.is_without_successor();
        let Some(own) = self.served_by().filter(|_| may) else { return };
        let now = Instant::now();
        loop {
            let asked = |member: &&Member| member.is_awaited(now).is_some();
            let asked = self.members.iter().filter(asked).count();
            // Those who have moved to one that is gone by now do not come back.
            let standing_by = match self.handover {
                Some(_) => 0,
                None => self.standbys.len(),
            };
            if standing_by + asked >= STANDBYS {
                return;
            }
            let standing = |rank: u32| self.standbys.iter().any(|(other, _)| *other == rank);
            let able = |member: &&mut Member| {
                member.state == State::Watching
                    && stays(member)
                    && member.asked_to_stand_by.is_none()
                    && !member.unable
                    && member.rank.is_some_and(|rank| rank != own && !standing(rank))
            };
            let Some(next) = self.members.iter_mut().filter(able).min_by_key(|member| member.rank) else {
                return;
            };
            next.asked_to_stand_by = Some(now);
            next.ask_to_stand_by(self.gathering.gone(), self.gathering.roster());
        }
    }

    /// A rank says where it stands by, if it can.
    pub(crate) fn stands_by(&mut self, at: usize, place: Option<SocketAddr>) {
        let member = &mut self.members[at];
        let asked = std::mem::take(&mut member.asked_to_stand_by);
        let Some(rank) = member.rank.filter(|_| asked.is_some()) else { return };
        match place {
            Some(place) => {
                tracing::debug!(rank, %place, "stands by to serve the news");
                // Of those who have moved to one that is gone by now the first are the first to be forgotten.
                if self.standbys.len() >= STANDBYS {
                    self.standbys.remove(0);
                }
                self.standbys.push((rank, place));
                self.standbys_changed();
            }
            None => member.unable = true,
        }
    }

    /// A rank that may have stood by is gone.
    pub(crate) fn no_standby(&mut self, rank: u32) {
        let before = self.standbys.len();
        self.standbys.retain(|(other, _)| *other != rank);
        if self.standbys.len() < before {
            self.standbys_changed();
        }
    }

    /// Tells one who serves and who stands by.
    pub(crate) fn tell_who_serves(&mut self, at: usize) {
        if let Some(own) = self.served_by() {
            self.members[at].tell_standbys(own, self.generation, &self.standbys);
        }
    }

    /// Tells all who stands by.
    pub(crate) fn standbys_changed(&mut self) {
        let (Some(own), generation) = (self.served_by(), self.generation) else { return };
        let standbys = std::mem::take(&mut self.standbys);
        self.watching().for_each(|other| other.tell_standbys(own, generation, &standbys));
        self.standbys = standbys;
    }
}
