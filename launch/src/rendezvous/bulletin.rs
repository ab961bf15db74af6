//! What a rank hears of the others once the meeting is over: who is gone, and who is there again.

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::rendezvous::client::Connection;
use crate::rendezvous::noise::record_length;
use crate::rendezvous::wire::{HEADER, Header, Kind, MAX_RECORD, message};

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
    /// Nobody's end will be told any more: whoever served the meeting ends in order.
    Closed,
}

/// Tells, without waiting, who of the ranks that met is gone.
#[derive(Debug)]
pub struct Bulletin {
    connection: Connection,
    input: Vec<u8>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Bulletin {
    /// None if the connection is gone, so that nothing would be heard.
    pub(crate) fn new(mut connection: Connection, watching: bool) -> Option<Bulletin> {
        if !watching {
            let until = Instant::now() + PATIENCE;
            connection.send(&message(Kind::Watch, 0, 0, &[]), until).ok()?;
        }
        connection.stream.set_nonblocking(true).ok()?;
        connection.forget_taken();
        Some(Bulletin { connection, input: Vec::new() })
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
        self.connection.stream.set_nonblocking(false)?;
        self.connection.send(&message(Kind::Leave, 0, 0, &[]), Instant::now() + PATIENCE)
    }
}
