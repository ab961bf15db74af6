//! The end of a server whose ranks go on: another rank serves their news from then on.
//!
//! ```text
//!  waiting ─ somebody stays ─▶ choosing who serves ─ one stands by ─▶ moving the others there ─ all have gone ─▶ over
//!                                    ▲                                  │ it is gone
//!                                    └──────────────────────────────────┘
//! ```
//! If nobody stands by when the choice is to be made, ranks are asked then: whoever serves may leave before any other listens.
//! Whoever moves has its seat there before it leaves this one, and the rank that serves there, which stood by, goes on
//! listening here until the end: so no news is lost.

use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::rendezvous::member::{Member, State};
use crate::rendezvous::server::Server;

/// How long the ranks that leave together have to do so before one of them is to serve the others.
const TOGETHER: Duration = Duration::from_millis(200);
/// How long those have to come that have not come to a server which took over: they may leave as well, and find nobody.
const COMING: Duration = Duration::from_secs(1);
/// How long all of it may take: somebody may be stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// How far it is.
#[derive(Debug)]
pub(crate) struct Handover {
    /// When the others are left to themselves.
    until: Instant,
    /// Until when others may still come to a server that took over.
    coming: Instant,
    step: Step,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Waiting { until: Instant },
    Choosing,
    Moving { rank: u32, place: SocketAddr },
}

impl Handover {
    pub(crate) fn new(now: Instant) -> Self {
        Self { until: now + PATIENCE, coming: now + COMING, step: Step::Waiting { until: now + TOGETHER } }
    }

    /// When to look again even if nothing happens.
    pub(crate) fn deadline(&self, now: Instant) -> Instant {
        let waiting = match self.step {
            Step::Waiting { until } => Some(until),
            _ => None,
        };
        let next = [waiting, Some(self.coming).filter(|coming| now < *coming), Some(self.until)];
        next.into_iter().flatten().min().unwrap_or(self.until)
    }
}

/// A rank that hears the news, or is about to.
pub(crate) fn stays(member: &Member) -> bool {
    let present = member.rank.is_some() && member.closing.is_none();
    present && !member.left && !member.moved && member.state != State::Returning
}

impl Server {
    /// Whether it does not leave, or has nobody yet who would serve then.
    pub(crate) fn is_without_successor(&self) -> bool {
        self.handover.as_ref().is_none_or(|handover| matches!(handover.step, Step::Choosing))
    }

    /// Brings the handover forward; whether it is over, well or not.
    pub(crate) fn hand_over(&mut self, now: Instant) -> bool {
        let Some(handover) = &mut self.handover else { return false };
        let there = |members: &[Member], rank: u32| {
            members.iter().any(|member| member.rank == Some(rank) && stays(member))
        };
        // Whoever is alone needs no news. Some may still be on their way here, if this is not where the ranks met.
        let alone = self.members.iter().filter(|member| stays(member)).count() < 2;
        let expecting = self.gathering.is_expecting() && (self.absent.is_none() || now < handover.coming);
        if now >= handover.until || (alone && !expecting) {
            return true;
        }
        let mut step = handover.step;
        if let Step::Waiting { until } = step {
            if now < until {
                return false;
            }
            step = Step::Choosing;
        }
        if let Step::Moving { rank, .. } = step
            && !there(&self.members, rank)
        {
            step = Step::Choosing;
            // Those who were told of one that is gone are told anew.
            self.members.iter_mut().for_each(|member| member.told_to_move = false);
        }
        if let Step::Choosing = step
            && let Some((rank, place)) = self.standbys.iter().find(|(rank, _)| there(&self.members, *rank))
        {
            tracing::debug!(rank, %place, "serves the news from here on");
            step = Step::Moving { rank: *rank, place: *place };
        }
        handover.step = step;
        match step {
            Step::Moving { rank, place } => {
                let others = self.members.iter_mut().filter(|member| {
                    stays(member) && member.state == State::Watching && !member.told_to_move
                });
                others.for_each(|member| member.tell_to_move(rank, place));
                false
            }
            // Somebody may still be on its way to listening, or be asked; nobody else is there.
            _ => {
                self.appoint();
                let coming = |member: &Member| {
                    stays(member) && (member.state != State::Watching || member.asked_to_stand_by.is_some())
                };
                !self.members.iter().any(coming) && !expecting
            }
        }
    }
}

/// A listener on a free port of that address, or one of those ports.
pub(crate) fn listen(
    address: std::net::IpAddr,
    ports: Option<RangeInclusive<u16>>,
) -> std::io::Result<TcpListener> {
    let mut refused = None;
    for port in ports.unwrap_or(0..=0) {
        match TcpListener::bind((address, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into()))
}
