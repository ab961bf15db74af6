//! Who serves the news after their server has ended without a word.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::rendezvous::bulletin::{Bulletin, Seat};
use crate::rendezvous::client::{Attempt, Visit};

/// How long one of those asked may take: its thread does nothing else than answer.
const STEP: Duration = Duration::from_secs(2);
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

/// Asks one rank whether it serves a later generation than that.
pub(crate) fn ask(seat: &Seat, (rank, place): (u32, SocketAddr), generation: u32) -> Answer {
    let began = Instant::now();
    let visit = Visit {
        began,
        rank: seat.rank,
        size: seat.size,
        key: &seat.key,
        deadline: began + STEP,
        moves: Some(seat.incarnation),
    };
    match visit.attempt(&place.to_string(), place) {
        // One that was only cut off serves those who stayed with it, and nobody else.
        Ok(mut client) if client.generation() <= generation => {
            // There it has a seat now, and leaves it without having ended.
            if let Some(bulletin) = client.bulletin_of_job_met_at(seat.met_at) {
                bulletin.give_up();
            }
            Answer::Dead
        }
        Ok(mut client) => match client.bulletin_of_job_met_at(seat.met_at) {
            Some(mut bulletin) => {
                bulletin.is_served_by(rank);
                Answer::Serves(Box::new(bulletin))
            }
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

/// What a rank that stands by has found.
pub(crate) enum Sought {
    /// Another one serves.
    Serves(Box<Bulletin>),
    /// It is this rank's turn.
    OwnTurn,
    /// The others go on hearing the server, which this rank does not.
    CutOff,
}

/// For a rank that stands by itself: asks the others, in the order in which they are to serve.
pub(crate) fn seek(
    seat: &Seat,
    standbys: &[(u32, SocketAddr)],
    generation: u32,
    patience: Duration,
) -> Sought {
    let until = Instant::now() + patience;
    let mut pause = PAUSES.0;
    loop {
        let (mut before, mut wait) = (true, false);
        for (rank, place) in standbys {
            if *rank == seat.rank {
                before = false;
                continue;
            }
            match ask(seat, (*rank, *place), generation) {
                Answer::Serves(bulletin) => return Sought::Serves(bulletin),
                // One behind this rank waits for it, unless it hears the server: then nobody may serve.
                Answer::Later { hears } => wait |= before || hears,
                Answer::Dead | Answer::Silent => {}
            }
        }
        if !wait {
            return Sought::OwnTurn;
        }
        if Instant::now() >= until {
            return Sought::CutOff;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}
