//! The end of a server whose ranks go on: another rank serves their news from then on.
//!
//! ```text
//!  waiting ─ somebody stays ─▶ asked a rank to serve ─ it says where ─▶ moving the others there ─ all have gone ─▶ over
//!                                 ▲    │ it cannot, or is gone                 │ it is gone
//!                                 └────┴───────────────────────────────────────┘
//! ```
//! Whoever moves has its seat there before it leaves this one, and the rank that serves there goes on listening here until
//! the end: so no news is lost.

use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::rendezvous::member::{Member, State};
use crate::rendezvous::server::Server;

/// How long the ranks that leave together have to do so before one of them is asked to serve the others.
const TOGETHER: Duration = Duration::from_millis(200);
/// How long all of it may take: somebody may be stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// How far it is.
#[derive(Debug)]
pub(crate) struct Handover {
    /// When the others are left to themselves.
    until: Instant,
    step: Step,
    /// Ranks that said that they cannot serve.
    unable: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Waiting { until: Instant },
    Asked { rank: u32 },
    Moving { rank: u32, place: SocketAddr },
}

impl Handover {
    pub(crate) fn new(now: Instant) -> Self {
        Self { until: now + PATIENCE, step: Step::Waiting { until: now + TOGETHER }, unable: Vec::new() }
    }

    /// When to look again even if nothing happens.
    pub(crate) fn deadline(&self) -> Instant {
        match self.step {
            Step::Waiting { until } => until,
            _ => self.until,
        }
    }
}

/// A rank that hears the news, or is about to.
fn stays(member: &Member) -> bool {
    let present = member.rank.is_some() && member.closing.is_none();
    present && !member.left && !member.moved && member.state != State::Returning
}

impl Server {
    /// Brings the handover forward; whether it is over, well or not.
    pub(crate) fn hand_over(&mut self, now: Instant) -> bool {
        let Some(handover) = &mut self.handover else { return false };
        let there = |rank: u32| self.members.iter().any(|member| member.rank == Some(rank) && stays(member));
        // Whoever is alone needs no news. Some may still be on their way here, if this is not where the ranks met.
        let alone = self.members.iter().filter(|member| stays(member)).count() < 2;
        if now >= handover.until || (alone && !self.gathering.is_expecting()) {
            return true;
        }
        match handover.step {
            Step::Waiting { until } if now < until => {}
            Step::Asked { rank } if there(rank) && !handover.unable.contains(&rank) => {}
            Step::Moving { rank, place } if there(rank) => {
                let others = self.members.iter_mut().filter(|member| {
                    stays(member) && member.state == State::Watching && member.rank != Some(rank)
                });
                others
                    .filter(|member| !member.told_to_move)
                    .for_each(|member| member.tell_to_move(rank, place));
            }
            Step::Waiting { .. } | Step::Asked { .. } | Step::Moving { .. } => {
                let able = |member: &&mut Member| {
                    stays(member)
                        && member.state == State::Watching
                        && member.rank.is_some_and(|rank| !handover.unable.contains(&rank))
                };
                // Those who were told of one that is gone are told anew.
                self.members.iter_mut().for_each(|member| member.told_to_move = false);
                let next = self.members.iter_mut().filter(able).min_by_key(|member| member.rank);
                let Some((next, rank)) = next.and_then(|next| next.rank.map(|rank| (next, rank))) else {
                    // Somebody may still be on its way to listening; nobody else is there to ask.
                    let coming = |member: &Member| stays(member) && member.state != State::Watching;
                    return !self.members.iter().any(coming) && !self.gathering.is_expecting();
                };
                next.ask_to_serve(self.gathering.gone());
                handover.step = Step::Asked { rank };
            }
        }
        false
    }

    /// A rank says where it serves, if it can.
    pub(crate) fn serving(&mut self, rank: u32, place: Option<SocketAddr>) {
        let Some(handover) = &mut self.handover else { return };
        match (handover.step, place) {
            (Step::Asked { rank: asked }, Some(place)) if asked == rank => {
                tracing::debug!(rank, %place, "serves the news from here on");
                handover.step = Step::Moving { rank, place };
            }
            (_, Some(_)) => {}
            (_, None) => handover.unable.push(rank),
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
