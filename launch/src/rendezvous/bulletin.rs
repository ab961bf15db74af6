//! What a rank hears of the others once the meeting is over: who is gone, and who is there again.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::key::{JobId, JobKey};
use crate::meeting::Meeting;
use crate::rendezvous::Rendezvous;
use crate::rendezvous::client::Connection;
use crate::rendezvous::gathering::Gathering;
use crate::rendezvous::handover::listen;
use crate::rendezvous::noise::record_length;
use crate::rendezvous::wire::{HEADER, Header, Kind, MAX_RECORD, message, take_address, take_gone};

/// How long the server may take to take a message of a few bytes.
const PATIENCE: Duration = Duration::from_secs(2);

/// News of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Its connection has ended without a word: its process has ended, or its host cannot be reached.
    Ended(u32),
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
    /// This rank is asked to serve the news from here on: whoever serves them ends. See
    /// [`Bulletin::serve`].
    Serve {
        /// Who is gone, and whether it had said so.
        gone: Vec<(u32, bool)>,
    },
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

/// Tells, without waiting, who of the ranks that met is gone.
#[derive(Debug)]
pub struct Bulletin {
    connection: Connection,
    input: Vec<u8>,
    seat: Seat,
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
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Bulletin {
    /// None if the connection is gone, so that nothing would be heard.
    pub(crate) fn new(mut connection: Connection, watching: bool, seat: Seat) -> Option<Bulletin> {
        if !watching {
            let until = Instant::now() + PATIENCE;
            connection.send(&message(Kind::Watch, 0, 0, &[]), until).ok()?;
        }
        connection.stream.set_nonblocking(true).ok()?;
        connection.forget_taken();
        Some(Bulletin { connection, input: Vec::new(), seat })
    }

    /// The socket, to be waited for; to be read by [`read`](Self::read) alone.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn socket(&self) -> io::Result<TcpStream> {
        self.connection.stream.try_clone()
    }

    /// Reads all that has come; nothing is left in the socket then. The list may be empty. Asked for once before the
    /// socket is waited for: something may have come already.
    ///
    /// # Errors
    /// The connection has ended, or brought something that is not from the server: there will be nothing more.
    pub fn read(&mut self) -> io::Result<Vec<Notice>> {
        let mut buffer = [0; MAX_RECORD];
        // What came with the last answer is here already.
        let mut notices = self.take_notices()?;
        loop {
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
        let garbage = || io::Error::new(ErrorKind::InvalidData, "a message that is no news");
        let content = &mut self.connection.content;
        let mut notices = Vec::new();
        while let Some(header) = content.first_chunk::<HEADER>() {
            let header = Header::decode(header).ok_or_else(garbage)?;
            let Some(body) = content[HEADER..].get(..header.length as usize) else { break };
            notices.push(match (header.kind, header.second) {
                (Kind::Gone, 0) => Notice::Ended(header.first),
                (Kind::Gone, _) => Notice::Left(header.first),
                (Kind::Arrived, incarnation) if incarnation > 0 => {
                    Notice::Arrived { rank: header.first, incarnation, part: body.to_vec() }
                }
                (Kind::Serve, _) => Notice::Serve { gone: take_gone(body).ok_or_else(garbage)? },
                (Kind::Move, _) => {
                    Notice::Move { rank: header.first, place: take_address(body).ok_or_else(garbage)? }
                }
                (Kind::Closed, _) => Notice::Closed,
                _ => return Err(garbage()),
            });
            content.drain(..HEADER + header.length as usize);
        }
        Ok(notices)
    }

    /// Says that this rank leaves in order. Without it the others hear that it has ended.
    ///
    /// # Errors
    /// The server does not hear it any more.
    pub fn leave(mut self) -> io::Result<()> {
        self.say(Kind::Leave, &[])
    }

    /// Serves the news to the other ranks in the place of whoever asked for it, on a port of that address, one of those
    /// given if any are. What is left to be told there, the new server hears and tells.
    ///
    /// Returns the server, which [passes the news on](Rendezvous::pass_on) in its turn, and where this rank hears them from
    /// here on. Blocks for a moment.
    ///
    /// # Errors
    /// There is no port, descriptor or thread to be had. The bulletin as it was comes with the error unless it is lost; whoever
    /// asked is told to ask another.
    pub fn serve(
        mut self,
        gone: &[(u32, bool)],
        address: IpAddr,
        ports: Option<RangeInclusive<u16>>,
    ) -> Result<(Rendezvous, Bulletin), NotServed> {
        let Seat { rank, size, job, key } = self.seat.clone();
        let prepared = listen(address, ports).and_then(|listener| {
            Rendezvous::check_room(size).map_err(io::Error::other)?;
            Ok((listener.local_addr()?, listener))
        });
        let (place, listener) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                let told = self.say(Kind::Serving, &[]);
                return Err((error, told.is_ok().then(|| Box::new(self))));
            }
        };
        // The others may come as soon as they are told; until the server accepts them the kernel keeps them.
        if let Err(error) = self.say(Kind::Serving, place.to_string().as_bytes()) {
            return Err((error, None));
        }
        let server =
            Rendezvous::start(listener, key.clone(), job, Gathering::taken_over(size, gone), Some(self))
                .map_err(|error| (error, None))?;
        server.pass_on();
        let own = hear_at(place, rank, size, &key).map_err(|error| (error, None))?;
        Ok((server, own))
    }

    /// Hears the news from whoever serves them from here on. Blocks for a moment.
    ///
    /// # Errors
    /// It cannot be reached; the bulletin as it was comes with the error.
    pub fn follow(mut self, place: SocketAddr) -> Result<Bulletin, (io::Error, Box<Bulletin>)> {
        let Seat { rank, size, key, .. } = &self.seat;
        match hear_at(place, *rank, *size, key) {
            Ok(next) => {
                // Whoever served before may have ended: then it is no news either.
                let _ = self.say(Kind::Moved, &[]);
                Ok(next)
            }
            Err(error) => Err((error, Box::new(self))),
        }
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
fn hear_at(place: SocketAddr, rank: u32, size: u32, key: &JobKey) -> io::Result<Bulletin> {
    let until = Instant::now() + PATIENCE;
    let mut seat =
        Rendezvous::meet(&[place.to_string()], rank, size, key, until).map_err(io::Error::other)?;
    seat.bulletin().ok_or_else(|| ErrorKind::NotConnected.into())
}
