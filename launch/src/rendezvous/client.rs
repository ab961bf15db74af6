//! A rank's way to a meeting, and its seat there.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::key::{JobId, JobKey};
use crate::meeting::{Meeting, MeetingError};
use crate::rendezvous::bulletin::{Bulletin, Seat, Served};
use crate::rendezvous::noise::{Channel, Initiator, hello, record_length};
use crate::rendezvous::place::MetAt;
use crate::rendezvous::silence::{borne, notice_silence};
use crate::rendezvous::wire::{
    ANSWER, Failure, HEADER, Header, Hello, Kind, MAX_BLOB, Status, message, put_elsewhere, take_welcome,
};

/// The first and the longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(200));
/// How long one connection may take to come about, as others may be tried.
const CONNECT: Duration = Duration::from_secs(2);
/// How long the server may take for a step of the handshake.
const STEP: Duration = Duration::from_secs(5);
/// How long the news of a process's end may be on its way to the server, when its successor is there already; longer where more
/// silence is borne.
const NEWS: Duration = Duration::from_secs(5);
/// How much longer than the others' time to wait for the server's word about them.
const GRACE: Duration = Duration::from_secs(2);

/// A rank's seat at a meeting.
pub struct RendezvousClient {
    /// None once it is a bulletin.
    connection: Option<Connection>,
    rank: u32,
    size: u32,
    job: JobId,
    key: JobKey,
    place: String,
    /// Where that is, as this rank reached it.
    address: SocketAddr,
    /// Where the ranks of its job met, if that is another place.
    met_at: Option<MetAt>,
    incarnation: u32,
    /// Of whoever serves.
    generation: u32,
    /// Which rank that is, if it is one.
    server: Option<u32>,
    /// After how much of it a host is lost.
    silence: Duration,
    round: u32,
    began: Instant,
    /// The server has been told that this rank listens to its news.
    watching: bool,
}

impl RendezvousClient {
    /// Where the meeting is served, as this rank reached it.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn address(&self) -> io::Result<SocketAddr> {
        let connection = self.connection.as_ref().ok_or(ErrorKind::NotConnected)?;
        connection.stream.peer_addr()
    }
}

impl fmt::Debug for RendezvousClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RendezvousClient");
        shown.field("rank", &self.rank).field("size", &self.size).field("place", &self.place);
        shown.finish_non_exhaustive()
    }
}

/// As whom a rank comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comes {
    /// As the first process of that rank that whoever started it knows of.
    First,
    /// Whoever started it has seen its predecessor end, which may be news to the server.
    Again,
    /// From another server, as this incarnation.
    Moving(u32),
}

/// See [`Rendezvous::meet`](crate::Rendezvous::meet).
pub(crate) fn meet(
    places: &[String],
    rank: u32,
    size: u32,
    key: &JobKey,
    deadline: Instant,
    silence: Duration,
    comes: Comes,
) -> Result<RendezvousClient, MeetingError> {
    if rank >= size {
        return Err(MeetingError::Size { rank, size, said: size });
    }
    let moves = if let Comes::Moving(incarnation) = comes { Some(incarnation) } else { None };
    let silence = borne(silence);
    let visit = Visit { began: Instant::now(), rank, size, key, deadline, silence, moves };
    let news_by = visit.began + if comes == Comes::Again { NEWS.max(silence) } else { Duration::ZERO };
    let mut pause = PAUSES.0;
    let mut last = String::from("no address is given");
    let mut left_before = None;
    loop {
        let mut closed = false;
        for place in places {
            for address in visit.resolve(place).unwrap_or_else(|problem| {
                last = problem;
                Vec::new()
            }) {
                match visit.attempt(place, address) {
                    Ok(client) => return Ok(client),
                    Err(Attempt::Over(error @ MeetingError::ClaimedTwice { .. }))
                        if Instant::now() < news_by =>
                    {
                        last = error.to_string();
                    }
                    // The job that it has left may be over soon, and the next one of these ranks begin.
                    Err(Attempt::Over(error @ MeetingError::LeftBefore { .. })) if comes == Comes::First => {
                        (left_before, closed) = (Some(error), false);
                        continue;
                    }
                    Err(Attempt::Over(error)) => return Err(error),
                    Err(Attempt::Again(problem)) => last = format!("{address}: {problem}"),
                    Err(Attempt::Closed) => {
                        closed = true;
                        last = format!("{address}: connection refused");
                    }
                    Err(Attempt::Later { .. }) => last = format!("{address}: nobody serves it yet"),
                }
            }
        }
        if closed {
            // That job is over.
            left_before = None;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || places.is_empty() {
            if let Some(error) = left_before {
                return Err(error);
            }
            let problem = format!(
                "{last}, tried for {:.1} s; start whoever serves it, see that this host reaches it, or raise \
                 POSTHASTE_JOIN_TIMEOUT",
                visit.began.elapsed().as_secs_f64()
            );
            return Err(MeetingError::Refused { place: places.join(", "), problem });
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Why an attempt came to nothing.
pub(crate) enum Attempt {
    /// It may be otherwise soon.
    Again(String),
    /// Nobody listens there now.
    Closed,
    /// Whoever listens there serves nobody yet; whether it hears the server.
    Later { hears: bool },
    /// It will never be otherwise.
    Over(MeetingError),
}

/// A rank that goes to a place.
pub(crate) struct Visit<'a> {
    pub(crate) began: Instant,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) key: &'a JobKey,
    pub(crate) deadline: Instant,
    pub(crate) silence: Duration,
    /// It moves its seat, as this incarnation.
    pub(crate) moves: Option<u32>,
}

impl Visit<'_> {
    /// The addresses of a place, within the time that is left: the system's resolver knows no deadline.
    fn resolve(&self, place: &str) -> Result<Vec<SocketAddr>, String> {
        if let Ok(address) = place.parse() {
            return Ok(vec![address]);
        }
        let (sender, receiver) = mpsc::channel();
        let name = place.to_owned();
        let resolver = std::thread::Builder::new().name("resolver".into());
        let started = resolver.spawn(move || {
            // Nobody may be waiting any more.
            let _ = sender.send(name.to_socket_addrs().map(Vec::from_iter));
        });
        started.map_err(|error| format!("{place}: {error}"))?;
        let left = self.deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(error)) => Err(format!("{place}: {error}")),
            Err(_) => Err(format!("{place}: the name was not resolved in time")),
        }
    }

    /// Goes there once.
    pub(crate) fn attempt(&self, place: &str, address: SocketAddr) -> Result<RendezvousClient, Attempt> {
        let again = |problem: &str| Attempt::Again(problem.to_owned());
        let left = self.deadline.saturating_duration_since(Instant::now());
        let stream = TcpStream::connect_timeout(&address, left.clamp(Duration::from_millis(1), CONNECT))
            .map_err(|error| match error.kind() {
                ErrorKind::ConnectionRefused => Attempt::Closed,
                _ => Attempt::Again(error.to_string()),
            })?;
        // Where nobody listens, a connection may by chance find itself.
        if stream.local_addr().is_ok_and(|local| local == address) {
            return Err(Attempt::Closed);
        }
        let prepared = stream.set_nodelay(true).and_then(|()| notice_silence(&stream, self.silence));
        prepared.map_err(|error| Attempt::Again(error.to_string()))?;
        let (rank, size) = (self.rank, self.size);
        let hello_of = Hello { rank, size, pid: std::process::id(), moves: self.moves };
        let (initiator, first) =
            hello(self.key, hello_of).ok_or_else(|| again("the system has no random numbers"))?;
        let until = self.deadline.min(Instant::now() + STEP);
        let mut answer = [0; ANSWER];
        write_all(&stream, &first, until)
            .and_then(|()| read_exact(&stream, &mut answer, until))
            .map_err(|error| Attempt::Again(format!("it does not go on with the handshake ({error})")))?;
        let channel = self.judge(place, initiator, &answer)?;
        let mut connection = Connection { stream, channel, content: Vec::new(), taken: 0 };
        let finish = connection.channel.finish().ok_or_else(|| again("the cipher failed"))?;
        // The server has shown that it has the key. One that is stopped, or has many to let in, takes its time, and whoever goes
        // away meanwhile is taken for ended; but one that moves has others to go to.
        let until = match self.moves {
            None => self.deadline,
            Some(_) => self.deadline.min(Instant::now() + STEP),
        };
        let (header, body) = write_all(&connection.stream, &finish, until)
            .and_then(|()| connection.receive(until))
            .map_err(|error| Attempt::Again(format!("it gives this rank no seat ({error})")))?;
        match header.kind {
            Kind::Welcome => {
                let (job, server) =
                    take_welcome(&body).ok_or_else(|| Attempt::Over(garbled("a job without identity")))?;
                Ok(RendezvousClient {
                    connection: Some(connection),
                    rank: self.rank,
                    size: self.size,
                    job,
                    key: self.key.clone(),
                    place: place.to_owned(),
                    address,
                    met_at: None,
                    incarnation: self.moves.unwrap_or(header.first),
                    generation: header.second,
                    server,
                    silence: self.silence,
                    round: 0,
                    began: self.began,
                    watching: false,
                })
            }
            Kind::Failed => {
                let failure = Failure::decode(header.first, &body)
                    .ok_or_else(|| Attempt::Over(garbled("a failure of no known kind")))?;
                Err(match failure {
                    Failure::Later { hears } => Attempt::Later { hears },
                    failure => Attempt::Over(failure.into_error(place, self.size, waited(self.began))),
                })
            }
            _ => Err(Attempt::Over(garbled("a message that is not the server's to send"))),
        }
    }

    /// Reads the answer to the first message.
    fn judge(&self, place: &str, initiator: Initiator, answer: &[u8; ANSWER]) -> Result<Channel, Attempt> {
        let refused = |problem: &str| {
            Attempt::Over(MeetingError::Refused { place: place.to_owned(), problem: problem.to_owned() })
        };
        let wrong_key = || MeetingError::WrongKey { place: place.to_owned(), rank: self.rank };
        match Status::from_byte(answer[0]) {
            Some(Status::Proceed) => initiator.answered(answer).ok_or_else(|| Attempt::Over(wrong_key())),
            Some(Status::Key) => Err(Attempt::Over(wrong_key())),
            Some(Status::Version) => {
                Err(refused("it speaks another version: all ranks and the launcher need one"))
            }
            None => Err(refused("something else listens there; give the job another port")),
        }
    }
}

impl Meeting for RendezvousClient {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn identity(&self) -> Option<(JobId, JobKey)> {
        Some((self.job, self.key.clone()))
    }

    fn all_gather(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, MeetingError> {
        if blob.len() > MAX_BLOB {
            return Err(MeetingError::TooLong { bytes: blob.len() });
        }
        let Some(connection) = self.connection.take() else {
            return Err(self.gone("an earlier round has failed, or the meeting is over"));
        };
        // Given up unless all goes well.
        let (connection, gathered) = self.gather(connection, blob, deadline)?;
        self.connection = Some(connection);
        Ok(gathered)
    }

    fn incarnation(&self) -> u32 {
        self.incarnation
    }

    fn roster(&mut self, deadline: Instant) -> Result<Vec<(u32, Vec<u8>)>, MeetingError> {
        let Some(mut connection) = self.connection.take() else {
            return Err(self.gone("the meeting is over"));
        };
        let parts = self.receive_parts(&mut connection, None, deadline, None)?;
        self.connection = Some(connection);
        Ok(parts)
    }

    fn come_again(&mut self, blob: &[u8], deadline: Instant) -> Result<(), MeetingError> {
        if blob.len() > MAX_BLOB {
            return Err(MeetingError::TooLong { bytes: blob.len() });
        }
        let Some(mut connection) = self.connection.take() else {
            return Err(self.gone("the meeting is over"));
        };
        let sent = connection.send(&message(Kind::Return, 0, 0, blob), deadline);
        sent.map_err(|error| self.gone(&error.to_string()))?;
        self.is_taken_in(&mut connection, deadline)?;
        self.connection = Some(connection);
        self.watching = true;
        Ok(())
    }

    fn bulletin(&mut self) -> Option<Bulletin> {
        let met_at = self.met_at.take().unwrap_or_else(|| MetAt::new(&self.place, self.address));
        let seat = self.seat(met_at);
        Bulletin::of_met(self.connection.take()?, self.watching, seat, self.served())
    }
}

impl RendezvousClient {
    /// The bulletin, of a job whose ranks met there in the first place.
    pub(crate) fn bulletin_of_job_met_at(&mut self, met_at: MetAt) -> Option<Bulletin> {
        let seat = self.seat(met_at);
        Bulletin::new(self.connection.take()?, self.watching, seat, self.served())
    }

    fn seat(&self, met_at: MetAt) -> Seat {
        let Self { rank, size, job, incarnation, .. } = *self;
        Seat { rank, size, job, key: self.key.clone(), incarnation, silence: self.silence, met_at }
    }

    /// Of a job that has met: tells whoever serves a new meeting of its ranks where the news of that job are served.
    pub(crate) fn say_elsewhere(mut self, place: SocketAddr, died: &[u32]) -> io::Result<()> {
        let mut connection = self.connection.take().ok_or(ErrorKind::NotConnected)?;
        let said = message(Kind::Elsewhere, 0, 0, &put_elsewhere(place, died));
        connection.send(&said, Instant::now() + STEP)
    }

    /// The job of whoever serves there.
    pub(crate) fn job(&self) -> JobId {
        self.job
    }

    /// The ranks of its job met there in the first place, and not where this one has come to.
    pub fn met_before_at(&mut self, place: &str, address: SocketAddr) {
        self.met_at = Some(MetAt::new(place, address));
    }

    /// Whoever serves.
    pub(crate) fn served(&self) -> Served {
        Served { generation: self.generation, server: self.server }
    }

    fn gather(
        &mut self,
        mut connection: Connection,
        blob: &[u8],
        deadline: Instant,
    ) -> Result<(Connection, Vec<Vec<u8>>), MeetingError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let milliseconds = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        let until = deadline.max(Instant::now()) + GRACE;
        let given = connection.send(&message(Kind::Blob, self.round, milliseconds, blob), until);
        let parts = self.receive_parts(&mut connection, Some(self.round), until, given.err())?;
        let parts = parts.into_iter().map(|(_, part)| part).collect();
        // The server may have gone on; all is here.
        let _ = connection.send(&message(Kind::Taken, self.round, 0, &[]), until);
        self.round = self.round.wrapping_add(1);
        Ok((connection, parts))
    }

    /// The parts of all ranks, of that round or of the roster; with their rounds, or incarnations. `broken`: what this
    /// rank had to say could not be said.
    fn receive_parts(
        &self,
        connection: &mut Connection,
        round: Option<u32>,
        until: Instant,
        broken: Option<io::Error>,
    ) -> Result<Vec<(u32, Vec<u8>)>, MeetingError> {
        // Whoever was told why before it could give everything finds that out by reading.
        let mut parts = Vec::new();
        while parts.len() < self.size as usize {
            let (header, body) = connection.receive(until).map_err(|error| match &broken {
                Some(problem) => self.gone(&problem.to_string()),
                None => self.gone(&error.to_string()),
            })?;
            match header.kind {
                Kind::Part
                    if round.is_none_or(|round| round == header.first)
                        && header.second as usize == parts.len() =>
                {
                    parts.push((header.first, body));
                }
                Kind::Failed => {
                    let failure = Failure::decode(header.first, &body)
                        .ok_or_else(|| garbled("a failure of no known kind"))?;
                    return Err(failure.into_error(&self.place, self.size, waited(self.began)));
                }
                // The meeting is long over, of which this rank, which comes again, asks.
                Kind::Closed if round.is_none() => return Err(self.gone("it ends")),
                // It ended before it had this rank's part, and so before it knew that this rank waits.
                Kind::Closed => {
                    let failure = Failure::called_off();
                    return Err(failure.into_error(&self.place, self.size, waited(self.began)));
                }
                _ => return Err(garbled("a message out of order")),
            }
        }
        Ok(parts)
    }

    /// Waits until the server has told the others that this rank is there again.
    fn is_taken_in(&self, connection: &mut Connection, deadline: Instant) -> Result<(), MeetingError> {
        loop {
            let (header, _) = connection.receive(deadline).map_err(|error| self.gone(&error.to_string()))?;
            match header.kind {
                Kind::Arrived if (header.first, header.second) == (self.rank, self.incarnation) => {
                    return Ok(());
                }
                // Who would follow it, in front of its end.
                Kind::Standbys => {}
                Kind::Closed => return Err(self.gone("it ends")),
                _ => return Err(garbled("a message out of order")),
            }
        }
    }

    fn gone(&self, problem: &str) -> MeetingError {
        MeetingError::ServerGone { place: self.place.clone(), problem: problem.to_owned() }
    }
}

fn garbled(said: &str) -> MeetingError {
    MeetingError::Garbled { service: "the rendezvous", said: said.to_owned() }
}

/// Seconds since then, begun ones included.
fn waited(began: Instant) -> u64 {
    began.elapsed().as_secs() + 1
}

/// A connection whose both sides have proven the key.
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    pub(crate) channel: Channel,
    /// What has come of messages, and how much of it has been taken.
    pub(crate) content: Vec<u8>,
    taken: usize,
}

impl Connection {
    pub(crate) fn send(&mut self, message: &[u8], until: Instant) -> io::Result<()> {
        let mut records = Vec::with_capacity(message.len() + 128);
        if !self.channel.seal(message, &mut records) {
            return Err(io::Error::other("the cipher failed"));
        }
        write_all(&self.stream, &records, until)
    }

    /// Keeps of what has come only what has not been taken.
    pub(crate) fn forget_taken(&mut self) {
        self.content.drain(..std::mem::take(&mut self.taken));
    }

    /// The next message.
    fn receive(&mut self, until: Instant) -> io::Result<(Header, Vec<u8>)> {
        let invalid = |what| io::Error::new(ErrorKind::InvalidData, what);
        loop {
            if let Some((bytes, behind)) = self.content[self.taken..].split_first_chunk::<HEADER>() {
                let header = Header::decode(bytes).ok_or_else(|| invalid("a message of no known kind"))?;
                if let Some(body) = behind.get(..header.length as usize) {
                    let body = body.to_vec();
                    self.taken += HEADER + body.len();
                    return Ok((header, body));
                }
            }
            self.forget_taken();
            let mut length = [0; 2];
            read_exact(&self.stream, &mut length, until)?;
            let length = record_length(length).ok_or_else(|| invalid("a record of an impossible length"))?;
            let mut record = vec![0; length];
            read_exact(&self.stream, &mut record, until)?;
            if !self.channel.open(&record, &mut self.content) {
                return Err(invalid("a record that is not genuine"));
            }
        }
    }
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "it does not answer")
}

fn read_exact(mut stream: &TcpStream, mut buffer: &mut [u8], until: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it has closed the connection")),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if is_wait(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn write_all(mut stream: &TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if is_wait(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether a wait was cut short or its time is over, which the caller looks at.
fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
