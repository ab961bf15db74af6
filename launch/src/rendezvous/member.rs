//! A connection that has proven the key.

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Instant;

use crate::rendezvous::gathering::Round;
use crate::rendezvous::noise::{Channel, record_length};
use crate::rendezvous::wire::{
    Failure, HEADER, Header, Hello, Kind, MAX_RECORD, Way, message, put_gone, put_standbys, put_welcome,
    take_address, take_elsewhere,
};

/// How much is sealed at a time, and then waits for the socket, up to the last message's length.
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
    /// The number of its process, as that knows it.
    pid: u32,
    /// It has come from another server.
    pub(crate) moving: bool,
    /// It is a rank of a job that has met elsewhere, and has come to say so.
    pub(crate) visits: bool,
    /// It has said that it leaves.
    pub(crate) left: bool,
    /// Its process was seen to end.
    pub(crate) died: bool,
    /// It has been told who serves the news from here on.
    pub(crate) told_to_move: bool,
    /// It may say that it hears them elsewhere: it has been told so once, or has come from another server and may find that
    /// this is none to stay at.
    pub(crate) may_move: bool,
    /// When it was asked to stand by, if it has not answered.
    pub(crate) asked_to_stand_by: Option<Instant>,
    /// It has answered that it cannot.
    pub(crate) unable: bool,
    /// It hears them there: its end here is no news.
    pub(crate) moved: bool,
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
    /// It is part of the job and hears who is gone.
    Watching,
    /// It has come again and is still to give its part.
    Returning,
}

enum Outgoing {
    Message(Vec<u8>),
    Round { round: u32, parts: Round, next: usize },
    Roster { incarnations: Vec<u32>, parts: Round, next: usize },
}

/// What a rank says.
pub(crate) enum Said {
    Blob {
        round: u32,
        milliseconds: u32,
        blob: Vec<u8>,
    },
    Taken {
        round: u32,
    },
    Watch,
    Leave,
    Return {
        part: Vec<u8>,
    },
    /// It stands by to serve the news, there; none if it cannot.
    Serving {
        place: Option<SocketAddr>,
    },
    Moved,
    /// Its ranks have met before, and their news are served there; these have died.
    Elsewhere {
        place: SocketAddr,
        died: BTreeSet<u32>,
    },
}

/// Why there is no more to read.
pub(crate) enum Over {
    Ended,
    Garbage(&'static str),
}

impl Member {
    pub(crate) fn new(stream: TcpStream, channel: Channel, rank: Option<u32>, hello: Hello) -> Self {
        Self {
            stream,
            rank,
            pid: hello.pid,
            moving: hello.moves.is_some(),
            visits: false,
            channel,
            input: Vec::new(),
            content: Vec::new(),
            output: Vec::new(),
            sent: 0,
            queue: VecDeque::new(),
            state: State::Idle,
            closing: None,
            shut: false,
            left: false,
            died: false,
            told_to_move: false,
            may_move: hello.moves.is_some(),
            asked_to_stand_by: None,
            unable: false,
            moved: false,
        }
    }

    /// A rank of a job that has met elsewhere, which has no seat here.
    pub(crate) fn visitor(stream: TcpStream, channel: Channel, hello: Hello) -> Self {
        Self { visits: true, ..Self::new(stream, channel, None, hello) }
    }

    /// The socket, to be polled.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Whether that process is the rank's, and its connection the one through which that hears the news.
    pub(crate) fn is(&self, rank: u32, pid: u32) -> bool {
        self.rank == Some(rank) && self.pid == pid && !self.moved
    }

    /// Whether it is a rank that has come to this meeting.
    pub(crate) fn has_seat(&self) -> bool {
        self.rank.is_some()
    }

    /// How it has gone, if it has.
    pub(crate) fn way(&self) -> Way {
        match self.left {
            true => Way::Left,
            false if self.died => Way::Died,
            false => Way::Ended,
        }
    }

    /// Whether it has given its connection up before it has said that it listens: it may not even know that it was answered,
    /// and comes again, or listens elsewhere.
    pub(crate) fn has_not_moved(&self) -> bool {
        self.moving && self.state == State::Idle
    }

    /// Whether something waits to be sent.
    pub(crate) fn has_output(&self) -> bool {
        self.sent < self.output.len() || !self.queue.is_empty()
    }

    /// Whether it may be left alone: it has all that it was due, and need not be told to go.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.state, State::Idle | State::Watching) && !self.has_output() && self.closing.is_none()
    }

    /// Tells it the job, which incarnation of its rank it is, which generation of server this is, and of which rank.
    pub(crate) fn welcome(&mut self, job: &[u8; 16], incarnation: u32, generation: u32, server: Option<u32>) {
        let body = put_welcome(job, server);
        self.queue.push_back(Outgoing::Message(message(Kind::Welcome, incarnation, generation, &body)));
    }

    /// It has come again: tells it what all gave last.
    pub(crate) fn welcome_back(&mut self, incarnations: Vec<u32>, parts: Round) {
        self.state = State::Returning;
        self.queue.push_back(Outgoing::Roster { incarnations, parts, next: 0 });
    }

    /// Tells it that a rank was started again.
    pub(crate) fn tell_arrived(&mut self, rank: u32, incarnation: u32, part: &[u8]) {
        self.queue.push_back(Outgoing::Message(message(Kind::Arrived, rank, incarnation, part)));
    }

    /// Gives it what all have given.
    pub(crate) fn give(&mut self, round: u32, parts: Round) {
        self.state = State::Taking(round);
        self.queue.push_back(Outgoing::Round { round, parts, next: 0 });
    }

    /// Tells it that a rank is gone, and whether that rank has said so itself.
    pub(crate) fn tell_gone(&mut self, rank: u32, left: bool) {
        self.tell_way(rank, if left { Way::Left } else { Way::Ended });
    }

    /// Tells it that a rank is gone, and how.
    pub(crate) fn tell_way(&mut self, rank: u32, way: Way) {
        self.queue.push_back(Outgoing::Message(message(Kind::Gone, rank, way as u32, &[])));
    }

    /// Tells it that it will hear nothing more.
    pub(crate) fn tell_closed(&mut self) {
        self.queue.push_back(Outgoing::Message(message(Kind::Closed, 0, 0, &[])));
    }

    /// Asks it to stand by, and tells it who is gone, and what all gave last where that is known.
    pub(crate) fn ask_to_stand_by(
        &mut self,
        gone: impl Iterator<Item = (u32, bool)>,
        roster: Option<(Vec<u32>, Round)>,
    ) {
        let follow = u32::from(roster.is_some());
        self.queue.push_back(Outgoing::Message(message(Kind::StandBy, follow, 0, &put_gone(gone))));
        if let Some((incarnations, parts)) = roster {
            self.queue.push_back(Outgoing::Roster { incarnations, parts, next: 0 });
        }
    }

    /// Tells it who serves, and who stands by.
    pub(crate) fn tell_standbys(&mut self, server: u32, generation: u32, standbys: &[(u32, SocketAddr)]) {
        let body = put_standbys(standbys);
        self.queue.push_back(Outgoing::Message(message(Kind::Standbys, server, generation, &body)));
    }

    /// Tells it that this rank serves the news from here on, and where.
    pub(crate) fn tell_to_move(&mut self, to: u32, place: SocketAddr) {
        (self.told_to_move, self.may_move) = (true, true);
        let place = place.to_string();
        self.queue.push_back(Outgoing::Message(message(Kind::Move, to, 0, place.as_bytes())));
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

    /// Seals more if all that was sealed is sent. Messages share records: sealing costs by the record.
    fn refill(&mut self) -> bool {
        if self.sent < self.output.len() {
            return true;
        }
        self.output.clear();
        self.sent = 0;
        let mut content = Vec::new();
        while content.len() < OUTPUT {
            let Some(outgoing) = self.queue.front_mut() else { break };
            let done = match outgoing {
                Outgoing::Message(bytes) => {
                    content.extend_from_slice(bytes);
                    true
                }
                Outgoing::Round { round, parts, next } => put_part(&mut content, *round, parts, next),
                Outgoing::Roster { incarnations, parts, next } => {
                    put_part(&mut content, incarnations[*next], parts, next)
                }
            };
            if done {
                self.queue.pop_front();
            }
        }
        if content.is_empty() {
            // A member that has been given everything keeps no buffer.
            self.output = Vec::new();
        }
        self.channel.seal(&content, &mut self.output)
    }
}

/// Adds the next part; whether it was the last one.
fn put_part(content: &mut Vec<u8>, first: u32, parts: &Round, next: &mut usize) -> bool {
    let part = &parts[*next];
    content.extend_from_slice(&Header::new(Kind::Part, first, *next as u32, part.len()).encode());
    content.extend_from_slice(part);
    *next += 1;
    *next == parts.len()
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
            Kind::Watch => Said::Watch,
            Kind::Leave => Said::Leave,
            Kind::Return => Said::Return { part: body.to_vec() },
            Kind::Serving if body.is_empty() => Said::Serving { place: None },
            Kind::Serving => {
                let place = take_address(body).ok_or(Over::Garbage("a place that is none"))?;
                Said::Serving { place: Some(place) }
            }
            Kind::Moved => Said::Moved,
            Kind::Elsewhere => {
                let (place, died) = take_elsewhere(body).ok_or(Over::Garbage("a place that is none"))?;
                Said::Elsewhere { place, died }
            }
            _ => return Err(Over::Garbage("a message that is not a rank's to send")),
        });
        content.drain(..HEADER + header.length as usize);
    }
    Ok(())
}
