//! Who serves the news after their server has ended without a word.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use crate::rendezvous::bulletin::{Bulletin, Seat, Served};
use crate::rendezvous::client::{Attempt, Visit};

/// How long one of those asked may take: its thread does nothing else than answer.
const STEP: Duration = Duration::from_secs(2);
/// How long whoever knows of nobody else waits for another to serve where the ranks met, if it cannot serve there itself.
const ALONE: Duration = Duration::from_secs(3);
/// The first and the longest pause between two rounds.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// What a rank that stands by says to one that asks whether it serves.
pub(crate) enum Answer {
    /// It serves, and this rank has its seat there.
    Serves(Box<Bulletin>),
    /// It does not serve yet; whether it hears the server itself.
    Later { hears: bool },
    /// Nobody listens there, or not for this rank.
    Dead,
    /// Its host takes connections, or does not even answer; nothing is said.
    Silent,
}

impl Served {
    /// Whether that server may be the successor of this one. Two may follow the same one, if the first ends before the second has
    /// heard of it: those who were with the first go to the second.
    fn is_succeeded_by(self, other: Self) -> bool {
        other.generation > self.generation
            || (other.generation == self.generation && other.server.is_some() && other.server != self.server)
    }
}

/// Of a rank that moves.
fn visit(seat: &Seat) -> Visit<'_> {
    let began = Instant::now();
    let (deadline, moves) = (began + STEP, Some(seat.incarnation));
    Visit { began, rank: seat.rank, size: seat.size, key: &seat.key, deadline, silence: seat.silence, moves }
}

/// Asks whoever is there whether it serves after that server, which is not heard any more.
pub(crate) fn ask(seat: &Seat, place: SocketAddr, lost: Served) -> Answer {
    match visit(seat).attempt(&place.to_string(), place) {
        // One that was only cut off serves those who stayed with it, and nobody else.
        Ok(mut client) if !lost.is_succeeded_by(client.served()) => {
            // There it has a seat now, and leaves it without having ended.
            if let Some(bulletin) = client.bulletin_of_job_met_at(seat.met_at.clone()) {
                bulletin.give_up();
            }
            Answer::Dead
        }
        Ok(mut client) => match client.bulletin_of_job_met_at(seat.met_at.clone()) {
            Some(bulletin) => Answer::Serves(Box::new(bulletin)),
            None => Answer::Silent,
        },
        Err(Attempt::Later { hears }) => Answer::Later { hears },
        Err(Attempt::Closed) => Answer::Dead,
        Err(Attempt::Over(error)) => {
            tracing::debug!(%error, %place, "a rank that stood by refuses this one");
            Answer::Dead
        }
        Err(Attempt::Again(problem)) => {
            tracing::debug!(problem, %place, "a rank that stood by does not answer");
            Answer::Silent
        }
    }
}

/// Looks whether one of those that have died has come again to where the ranks met, and serves a new meeting there: it is told that
/// the news of the old one are served at that place. May block for some seconds.
pub(crate) fn redirect(seat: &Seat, died: &[u32], to: SocketAddr) {
    for there in seat.met_at.addresses() {
        let Ok(client) = visit(seat).attempt(&there.to_string(), there) else { continue };
        let served = client.served();
        // Who was cut off from this one may think the same of it. And one that has left in order may be at the next job of these ranks.
        if client.job() == seat.job
            || served.generation != 0
            || served.server.is_none_or(|server| !died.contains(&server))
        {
            continue;
        }
        match client.say_elsewhere(to, died) {
            Ok(()) => tracing::debug!(%there, %to, "a rank that came again was told where the others are"),
            Err(error) => tracing::debug!(%there, %error, "a rank that came again heard nothing"),
        }
    }
}

/// What a rank that stands by has found.
pub(crate) enum Sought {
    /// Another one serves.
    Serves(Box<Bulletin>),
    /// It is this rank's turn, and where the ranks met if nobody else listens there.
    OwnTurn(Option<TcpListener>),
    /// The others go on hearing the server, which this rank does not.
    CutOff,
}

/// For a rank that stands by itself: asks the others, in the order in which they are to serve.
pub(crate) fn seek(seat: &Seat, standbys: &[(u32, SocketAddr)], lost: Served, patience: Duration) -> Sought {
    let until = Instant::now() + patience;
    let mut pause = PAUSES.0;
    loop {
        let (mut before, mut wait) = (true, false);
        for (rank, place) in standbys {
            if *rank == seat.rank {
                before = false;
                continue;
            }
            match ask(seat, *place, lost) {
                Answer::Serves(bulletin) => return Sought::Serves(bulletin),
                // One behind this rank waits for it, unless it hears the server: then nobody may serve.
                Answer::Later { hears } => wait |= before || hears,
                Answer::Dead | Answer::Silent => {}
            }
        }
        if !wait {
            return claim(seat, standbys.iter().any(|(rank, _)| *rank == seat.rank), lost);
        }
        if Instant::now() >= until {
            return Sought::CutOff;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Takes the place where the ranks met, which one process has at a time, or finds another there that serves. So of those who
/// could not tell the others that they stand by one serves, and of those who did not hear each other when each took its turn.
/// On other hosts than that of the place whoever is `known` to the others serves.
fn claim(seat: &Seat, known: bool, lost: Served) -> Sought {
    let until = Instant::now() + if known { Duration::ZERO } else { ALONE };
    loop {
        let refused = match seat.met_at.take() {
            Ok(listener) => return Sought::OwnTurn(Some(listener)),
            Err(refused) => refused,
        };
        if let Answer::Serves(bulletin) = ask(seat, seat.met_at.address, lost) {
            return Sought::Serves(bulletin);
        }
        if Instant::now() >= until {
            tracing::debug!(%refused, place = %seat.met_at.address, "nobody serves where the ranks met");
            return Sought::OwnTurn(None);
        }
        std::thread::sleep(PAUSES.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_successors_of_its_own_generation_but_not_itself() {
        let served = |server, generation| Served { generation, server };
        let lost = served(Some(1), 2);
        assert!(lost.is_succeeded_by(served(Some(3), 3)) && lost.is_succeeded_by(served(None, 3)));
        // Both have followed the same one: the first had ended before the second heard of it.
        assert!(lost.is_succeeded_by(served(Some(3), 2)));
        assert!(!lost.is_succeeded_by(served(Some(1), 2)) && !lost.is_succeeded_by(served(None, 2)));
        assert!(!lost.is_succeeded_by(served(Some(3), 1)));
    }
}
