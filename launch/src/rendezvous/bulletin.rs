//! What a rank hears of the others once the meeting is over: who is gone, and who is there again.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::key::{JobId, JobKey};
use crate::rendezvous::Rendezvous;
use crate::rendezvous::absent::Whereabouts;
use crate::rendezvous::client::{Comes, Connection, meet};
use crate::rendezvous::gathering::Gathering;
use crate::rendezvous::handover::listen;
use crate::rendezvous::noise::record_length;
use crate::rendezvous::place::MetAt;
use crate::rendezvous::seek::{Answer, ask};
use crate::rendezvous::standing::Standing;
use crate::rendezvous::wire::{
    HEADER, Header, Kind, MAX_RECORD, message, take_address, take_gone, take_standbys,
};

/// How long the server may take to take a message of a few bytes.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often a rank that stands by asks its own server for its seat.
const OWN_TRIES: usize = 5;

/// News of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Its connection has ended without a word: its process has ended, or its host cannot be reached.
    Ended(u32),
    /// Whoever started its process has seen that end: whatever connections of it there still are belong to processes that it
    /// has forked.
    Died(u32),
    /// It has left in order.
    Left(u32),
    /// It had ended, was started again, and is part of the job.
    Arrived {
        /// Which rank.
        rank: u32,
        /// Which incarnation of it; never 0.
        incarnation: u32,
        /// What it gave in place of its predecessor's part of the last round.
        part: Vec<u8>,
    },
    /// This rank is asked to stand by, to serve the news when whoever serves them ends. See [`Bulletin::stand_by`].
    StandBy(Duty),
    /// The news are served by another rank from here on. See [`Bulletin::follow`].
    Move {
        /// Which rank.
        rank: u32,
        /// Where it serves them.
        place: SocketAddr,
    },
    /// Nobody's end will be told any more: whoever served the meeting ends in order.
    Closed,
}

/// What a rank that stands by has to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duty {
    gone: Vec<(u32, bool)>,
    /// The ranks' incarnations and what they gave last, unless they met elsewhere.
    roster: Option<(Vec<u32>, Vec<Vec<u8>>)>,
}

/// What a look for a successor has found.
#[derive(Debug)]
pub enum Succession {
    /// Another rank serves the news, and this is where they are heard.
    Found(Box<Bulletin>),
    /// Nobody does yet; to be asked again soon.
    Later,
    /// There is nobody left who could.
    Nobody,
}

/// Tells, without waiting, who of the ranks that met is gone.
#[derive(Debug)]
pub struct Bulletin {
    connection: Connection,
    input: Vec<u8>,
    seat: Seat,
    served: Served,
    /// Who is to serve them next, in this order.
    standbys: Vec<(u32, SocketAddr)>,
    /// A duty whose parts are still coming.
    duty: Option<Duty>,
}

/// Whoever serves the news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Served {
    /// How often they had changed hands before.
    pub(crate) generation: u32,
    /// The rank, if one does and has said so.
    pub(crate) server: Option<u32>,
}

/// Why a rank does not serve the news, and what it goes on listening with unless that is lost.
pub type NotServed = (io::Error, Option<Box<Bulletin>>);

/// Whose bulletin it is.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) job: JobId,
    pub(crate) key: JobKey,
    pub(crate) incarnation: u32,
    /// After how much of it a host is lost.
    pub(crate) silence: Duration,
    /// Where the job's ranks met in the first place, and those look that are started again.
    pub(crate) met_at: MetAt,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Bulletin {
    /// None if the connection is gone, so that nothing would be heard.
    pub(crate) fn new(
        mut connection: Connection,
        watching: bool,
        seat: Seat,
        served: Served,
    ) -> Option<Bulletin> {
        if !watching {
            let until = Instant::now() + PATIENCE;
            connection.send(&message(Kind::Watch, 0, 0, &[]), until).ok()?;
        }
        Self::of_watching(connection, seat, served)
    }

    /// As [`new`](Self::new), of a rank that has just met the others: if whoever served that has ended since, it hears so, and may
    /// find a successor.
    pub(crate) fn of_met(
        mut connection: Connection,
        watching: bool,
        seat: Seat,
        served: Served,
    ) -> Option<Bulletin> {
        let until = Instant::now() + PATIENCE;
        let lost = !watching && connection.send(&message(Kind::Watch, 0, 0, &[]), until).is_err();
        let mut bulletin = Self::of_watching(connection, seat, served)?;
        if lost {
            bulletin.say_no_more();
        }
        Some(bulletin)
    }

    fn of_watching(mut connection: Connection, seat: Seat, served: Served) -> Option<Bulletin> {
        connection.stream.set_nonblocking(true).ok()?;
        connection.forget_taken();
        let (standbys, duty) = (Vec::new(), None);
        Some(Bulletin { connection, input: Vec::new(), seat, served, standbys, duty })
    }

    /// The rank that serves the news, if one does and has said so: its end is theirs.
    pub fn server(&self) -> Option<u32> {
        self.served.server
    }

    /// Whoever serves.
    pub(crate) fn served(&self) -> Served {
        self.served
    }

    /// Who is to serve next.
    pub(crate) fn standbys(&self) -> &[(u32, SocketAddr)] {
        &self.standbys
    }

    /// After how much silence a host is lost: others may notice so much later than this rank that whoever serves is gone.
    pub fn silence(&self) -> Duration {
        self.seat.silence
    }

    /// Whose bulletin it is.
    pub(crate) fn seat(&self) -> &Seat {
        &self.seat
    }

    /// The socket, to be waited for; to be read by [`read`](Self::read) alone.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn socket(&self) -> io::Result<TcpStream> {
        self.connection.stream.try_clone()
    }

    /// Reads all that has come; nothing is left in the socket then, unless the last notice is [`Notice::StandBy`]: what
    /// comes behind that is for whoever stands by. The list may be empty. Asked for once before the socket is waited for, and
    /// behind a duty that was not taken on: something may have come already.
    ///
    /// # Errors
    /// The connection has ended, or brought something that is not from the server: there will be nothing more.
    pub fn read(&mut self) -> io::Result<Vec<Notice>> {
        let mut buffer = [0; MAX_RECORD];
        // What came with the last answer is here already.
        let mut notices = self.take_notices()?;
        loop {
            if matches!(notices.last(), Some(Notice::StandBy(_))) {
                return Ok(notices);
            }
            match self.connection.stream.read(&mut buffer) {
                // What came before the end is told first.
                Ok(0) if notices.is_empty() => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(0) => return Ok(notices),
                Ok(count) => {
                    self.input.extend_from_slice(&buffer[..count]);
                    self.open_records()?;
                    notices.extend(self.take_notices()?);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(notices),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if notices.is_empty() => return Err(error),
                Err(_) => return Ok(notices),
            }
        }
    }

    fn open_records(&mut self) -> io::Result<()> {
        let garbage = || io::Error::new(ErrorKind::InvalidData, "a record that is not the server's");
        let mut rest = &self.input[..];
        while let Some((length, behind)) = rest.split_first_chunk() {
            let length = record_length(*length).ok_or_else(garbage)?;
            let Some((record, behind)) = behind.split_at_checked(length) else { break };
            if !self.connection.channel.open(record, &mut self.connection.content) {
                return Err(garbage());
            }
            rest = behind;
        }
        let done = self.input.len() - rest.len();
        self.input.drain(..done);
        Ok(())
    }

    fn take_notices(&mut self) -> io::Result<Vec<Notice>> {
        let mut notices = Vec::new();
        while !matches!(notices.last(), Some(Notice::StandBy(_)))
            && let Some(bytes) = self.connection.content.first_chunk::<HEADER>()
        {
            let header = Header::decode(bytes).ok_or_else(garbage)?;
            let whole = HEADER + header.length as usize;
            let Some(body) = self.connection.content.get(HEADER..whole).map(<[u8]>::to_vec) else { break };
            self.connection.content.drain(..whole);
            notices.extend(self.take_notice(header, body)?);
        }
        Ok(notices)
    }

    /// What a message tells, if that is for others than this bulletin.
    fn take_notice(&mut self, header: Header, body: Vec<u8>) -> io::Result<Option<Notice>> {
        let whole = self.duty.as_ref().is_none_or(|duty| duty.roster.is_none());
        Ok(Some(match (header.kind, header.second) {
            (Kind::Part, _) => return self.take_part(header, body),
            // Between the parts there is nothing else.
            _ if !whole => return Err(garbage()),
            (Kind::Gone, 0) => Notice::Ended(header.first),
            (Kind::Gone, 1) => Notice::Left(header.first),
            (Kind::Gone, _) => Notice::Died(header.first),
            (Kind::Arrived, incarnation) if incarnation > 0 => {
                Notice::Arrived { rank: header.first, incarnation, part: body }
            }
            (Kind::StandBy, _) => {
                let gone = take_gone(&body).ok_or_else(garbage)?;
                let follow = header.first != 0;
                let duty = Duty { gone, roster: follow.then(Default::default) };
                if !follow {
                    return Ok(Some(Notice::StandBy(duty)));
                }
                self.duty = Some(duty);
                return Ok(None);
            }
            (Kind::Standbys, generation) => {
                self.standbys = take_standbys(&body).ok_or_else(garbage)?;
                self.served = Served { generation, server: Some(header.first) };
                return Ok(None);
            }
            (Kind::Move, _) => {
                Notice::Move { rank: header.first, place: take_address(&body).ok_or_else(garbage)? }
            }
            (Kind::Closed, _) => Notice::Closed,
            _ => return Err(garbage()),
        }))
    }

    /// A part of the roster for this rank's duty, which is complete with the last.
    fn take_part(&mut self, header: Header, body: Vec<u8>) -> io::Result<Option<Notice>> {
        let roster = self.duty.as_mut().and_then(|duty| duty.roster.as_mut());
        let (incarnations, parts) = roster.ok_or_else(garbage)?;
        if header.second as usize != parts.len() {
            return Err(garbage());
        }
        incarnations.push(header.first);
        parts.push(body);
        let whole = parts.len() == self.seat.size as usize;
        Ok(if whole { self.duty.take().map(Notice::StandBy) } else { None })
    }

    /// Says that this rank leaves in order. Without it the others hear that it has ended.
    ///
    /// # Errors
    /// The server does not hear it any more.
    pub fn leave(mut self) -> io::Result<()> {
        self.say_leave()
    }

    /// Stands by to serve the news to the other ranks when whoever asked for it ends: on a port of that address, one of those
    /// given if any are. `whereabouts` says where the ranks listen that might have ended meanwhile.
    ///
    /// Returns the server in waiting, which serves when it is its turn and [passes the news on](Rendezvous::pass_on) in its
    /// turn, and where this rank hears them from here on. Blocks for a moment.
    ///
    /// # Errors
    /// There is no port, descriptor or thread to be had. The bulletin as it was comes with the error unless it is lost; whoever
    /// asked is told to ask another.
    pub fn stand_by(
        mut self,
        duty: Duty,
        address: IpAddr,
        ports: Option<RangeInclusive<u16>>,
        whereabouts: Whereabouts,
    ) -> Result<(Rendezvous, Bulletin), NotServed> {
        let seat = self.seat.clone();
        let prepared = listen(address, ports).and_then(|listener| {
            Rendezvous::check_room(seat.size).map_err(io::Error::other)?;
            Ok((listener.local_addr()?, listener))
        });
        let (place, listener) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                let told = self.say(Kind::Serving, &[]);
                return Err((error, told.is_ok().then(|| Box::new(self))));
            }
        };
        let gathering = Gathering::taken_over(seat.size, &duty.gone, duty.roster);
        let (key, job) = (seat.key.clone(), seat.job);
        let standing = Box::new(Standing::new(self, place, whereabouts));
        let server = match Rendezvous::start(listener, key, job, gathering, seat.silence, Some(standing)) {
            Ok(server) => server,
            Err((error, standing)) => {
                let mut bulletin = standing.map(|standing| Box::new(standing.into_bulletin()));
                if bulletin.as_mut().is_some_and(|bulletin| bulletin.say(Kind::Serving, &[]).is_err()) {
                    bulletin = None;
                }
                return Err((error, bulletin));
            }
        };
        // A thread of this process answers, which was stopped if it takes long.
        let mut own = hear_at(place, &seat);
        for _ in 1..OWN_TRIES {
            if own.is_ok() {
                break;
            }
            own = hear_at(place, &seat);
        }
        Ok((server, own.map_err(|error| (error, None))?))
    }

    /// Nothing is heard through it any more, and that is not the end of its rank.
    pub fn give_up(mut self) {
        self.moved();
    }

    /// Hears the news from whoever serves them from here on. Blocks for a moment.
    ///
    /// # Errors
    /// It cannot be reached; the bulletin as it was comes with the error.
    pub fn follow(mut self, place: SocketAddr) -> Result<Bulletin, (io::Error, Box<Bulletin>)> {
        match hear_at(place, &self.seat) {
            Ok(mut next) => {
                self.moved();
                next.inherit(&self);
                Ok(next)
            }
            Err(error) => Err((error, Box::new(self))),
        }
    }

    /// After the connection has ended without a word: asks, once, those who stand by whether one of them serves. Blocks for
    /// a moment, or for two seconds with each that does not answer.
    ///
    /// Where the ranks met is asked last: whoever serves there may not have become known to this rank before that was too late.
    pub fn find_successor(&self) -> Succession {
        let known = self.standbys.iter().filter(|(rank, _)| *rank != self.seat.rank);
        let known = known.map(|(rank, place)| (Some(*rank), *place));
        let mut later = false;
        for (rank, place) in known.chain([(None, self.seat.met_at.address)]) {
            if rank.is_none() && later {
                break;
            }
            match ask(&self.seat, place, self.served) {
                Answer::Serves(mut bulletin) => {
                    tracing::debug!(rank, %place, "hears the news from a successor");
                    bulletin.inherit(self);
                    return Succession::Found(bulletin);
                }
                Answer::Later { .. } => later = true,
                // Something else may listen where the ranks met.
                Answer::Silent => later |= rank.is_some(),
                Answer::Dead => {}
            }
        }
        if later { Succession::Later } else { Succession::Nobody }
    }

    /// Knows what another knew, until it hears otherwise: whoever serves may end before it has told.
    pub(crate) fn inherit(&mut self, before: &Bulletin) {
        if self.standbys.is_empty() {
            self.standbys.clone_from(&before.standbys);
        }
    }

    /// Says where this rank stands by.
    pub(crate) fn serving(&mut self, place: SocketAddr) -> io::Result<()> {
        self.say(Kind::Serving, place.to_string().as_bytes())
    }

    /// Whether another rank is known that stands by.
    #[must_use]
    pub fn has_successors(&self) -> bool {
        self.standbys.iter().any(|(rank, _)| *rank != self.seat.rank)
    }

    /// Says that this rank hears the news elsewhere.
    pub(crate) fn moved(&mut self) {
        // Whoever served before may have ended: then it is no news either.
        let _ = self.say(Kind::Moved, &[]);
    }

    /// Half of a message may have been said: there can be no more. What has come already can be read, and then the end.
    pub(crate) fn say_no_more(&mut self) {
        // It fails if the other side has ended the connection, which is the same.
        let _ = self.connection.stream.shutdown(Shutdown::Both);
    }

    /// Says that the rank whose bulletin this is leaves in order.
    pub(crate) fn say_leave(&mut self) -> io::Result<()> {
        self.say(Kind::Leave, &[])
    }

    fn say(&mut self, kind: Kind, body: &[u8]) -> io::Result<()> {
        self.connection.stream.set_nonblocking(false)?;
        let said = self.connection.send(&message(kind, 0, 0, body), Instant::now() + PATIENCE);
        self.connection.stream.set_nonblocking(true)?;
        said
    }

    /// The socket, to be polled.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.connection.stream
    }
}

/// A rank's seat at the place where the news are served from here on.
fn hear_at(place: SocketAddr, seat: &Seat) -> io::Result<Bulletin> {
    let until = Instant::now() + PATIENCE;
    let places = [place.to_string()];
    let moves = Comes::Moving(seat.incarnation);
    let client = meet(&places, seat.rank, seat.size, &seat.key, until, seat.silence, moves);
    let mut client = client.map_err(io::Error::other)?;
    client.bulletin_of_job_met_at(seat.met_at.clone()).ok_or_else(|| ErrorKind::NotConnected.into())
}

fn garbage() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "a message that is no news")
}
