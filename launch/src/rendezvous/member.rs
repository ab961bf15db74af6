//! A connection that has proven the key.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use crate::rendezvous::gathering::Round;
use crate::rendezvous::noise::{Channel, record_length};
use crate::rendezvous::wire::{Failure, HEADER, Header, Kind, MAX_RECORD, message};

/// Sealed bytes that may wait for the socket before more are sealed.
const OUTPUT: usize = 64 << 10;
/// Reads in a row before others get their turn.
const READS: usize = 16;

/// A rank, or somebody who is told why it is none.
pub(crate) struct Member {
    stream: TcpStream,
    /// Its number, as long as it takes part.
    pub(crate) rank: Option<u32>,
    channel: Channel,
    /// What has come of a record.
    input: Vec<u8>,
    /// What has come of a message.
    content: Vec<u8>,
    /// Sealed, and sent up to `sent`.
    output: Vec<u8>,
    sent: usize,
    queue: VecDeque<Outgoing>,
    pub(crate) state: State,
    /// When to close the connection of one that has been told to go, though it has not gone.
    pub(crate) closing: Option<Instant>,
    shut: bool,
}

/// Where a rank is in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It has given nothing yet.
    Idle,
    /// It has given its part.
    Waiting,
    /// It is being given all parts.
    Taking(u32),
}

enum Outgoing {
    Message(Vec<u8>),
    Round { round: u32, parts: Round, next: usize },
}

/// What a rank says.
pub(crate) enum Said {
    Blob { round: u32, milliseconds: u32, blob: Vec<u8> },
    Taken { round: u32 },
}

/// Why there is no more to read.
pub(crate) enum Over {
    Ended,
    Garbage(&'static str),
}

impl Member {
    pub(crate) fn new(stream: TcpStream, channel: Channel, rank: Option<u32>) -> Self {
        Self {
            stream,
            rank,
            channel,
            input: Vec::new(),
            content: Vec::new(),
            output: Vec::new(),
            sent: 0,
            queue: VecDeque::new(),
            state: State::Idle,
            closing: None,
            shut: false,
        }
    }

    /// The socket, to be polled.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Whether something waits to be sent.
    pub(crate) fn has_output(&self) -> bool {
        self.sent < self.output.len() || !self.queue.is_empty()
    }

    /// Whether it may be left alone: it has all that it was due, and need not be told to go.
    pub(crate) fn is_settled(&self) -> bool {
        self.state == State::Idle && !self.has_output() && self.closing.is_none()
    }

    /// Tells it the job.
    pub(crate) fn welcome(&mut self, job: &[u8; 16]) {
        self.queue.push_back(Outgoing::Message(message(Kind::Welcome, 0, 0, job)));
    }

    /// Gives it what all have given.
    pub(crate) fn give(&mut self, round: u32, parts: Round) {
        self.state = State::Taking(round);
        self.queue.push_back(Outgoing::Round { round, parts, next: 0 });
    }

    /// Tells it why there is nothing more for it, and lets it go at the latest then.
    pub(crate) fn dismiss(&mut self, why: &Failure, until: Instant) {
        self.state = State::Idle;
        self.queue.push_back(Outgoing::Message(why.encode()));
        self.closing = Some(until);
    }

    /// Reads what there is, a bounded amount.
    pub(crate) fn read(&mut self, said: &mut Vec<Said>) -> Result<(), Over> {
        let mut buffer = [0; MAX_RECORD];
        for _ in 0..READS {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Over::Ended),
                // It has been told to go; what it still says is of no interest.
                Ok(_) if self.closing.is_some() => {}
                Ok(count) => {
                    self.input.extend_from_slice(&buffer[..count]);
                    self.take_records(said)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Over::Ended),
            }
        }
        Ok(())
    }

    fn take_records(&mut self, said: &mut Vec<Said>) -> Result<(), Over> {
        let mut rest = &self.input[..];
        while let Some((length, behind)) = rest.split_first_chunk() {
            let length = record_length(*length).ok_or(Over::Garbage("a record of an impossible length"))?;
            let Some((record, behind)) = behind.split_at_checked(length) else { break };
            if !self.channel.open(record, &mut self.content) {
                return Err(Over::Garbage("a record that is not genuine"));
            }
            rest = behind;
            // At once, so that never more than one message is kept.
            take_messages(&mut self.content, said)?;
        }
        let done = self.input.len() - rest.len();
        self.input.drain(..done);
        Ok(())
    }

    /// Sends what the socket takes.
    pub(crate) fn write(&mut self) -> Result<(), Over> {
        loop {
            if !self.refill() {
                return Err(Over::Garbage("so much that its cipher is used up"));
            }
            if self.sent == self.output.len() {
                break;
            }
            match self.stream.write(&self.output[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Over::Ended),
            }
        }
        if self.closing.is_some() && !self.shut {
            self.shut = true;
            match self.stream.shutdown(Shutdown::Write) {
                Err(error) if error.kind() != io::ErrorKind::NotConnected => return Err(Over::Ended),
                _ => {}
            }
        }
        Ok(())
    }

    /// Seals more if all that was sealed is sent.
    fn refill(&mut self) -> bool {
        if self.sent < self.output.len() {
            return true;
        }
        self.output.clear();
        self.sent = 0;
        while self.output.len() < OUTPUT {
            let sealed = match self.queue.front_mut() {
                None => {
                    // A member that has been given everything keeps no buffer.
                    if self.output.is_empty() {
                        self.output = Vec::new();
                    }
                    return true;
                }
                Some(Outgoing::Message(bytes)) => self.channel.seal(bytes, &mut self.output),
                Some(Outgoing::Round { round, parts, next }) => {
                    let part = message(Kind::Part, *round, *next as u32, &parts[*next]);
                    *next += 1;
                    if *next < parts.len() {
                        if self.channel.seal(&part, &mut self.output) {
                            continue;
                        }
                        return false;
                    }
                    self.channel.seal(&part, &mut self.output)
                }
            };
            self.queue.pop_front();
            if !sealed {
                return false;
            }
        }
        true
    }
}

/// Takes whole messages off the front.
fn take_messages(content: &mut Vec<u8>, said: &mut Vec<Said>) -> Result<(), Over> {
    while let Some((header, behind)) = content.split_first_chunk::<HEADER>() {
        let header = Header::decode(header).ok_or(Over::Garbage("a message of no known kind or length"))?;
        let Some(body) = behind.get(..header.length as usize) else { return Ok(()) };
        said.push(match header.kind {
            Kind::Blob => {
                Said::Blob { round: header.first, milliseconds: header.second, blob: body.to_vec() }
            }
            Kind::Taken => Said::Taken { round: header.first },
            _ => return Err(Over::Garbage("a message that is not a rank's to send")),
        });
        content.drain(..HEADER + header.length as usize);
    }
    Ok(())
}
