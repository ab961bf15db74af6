//! A connection that has proven nothing.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use crate::key::JobKey;
use crate::rendezvous::noise::{Channel, answer};
use crate::rendezvous::wire::{ANSWER, CLEAR, FINISH, HELLO, Hello, Status};

/// It costs its entry in a table, and a channel once its first message was good.
pub(crate) struct Stranger {
    stream: TcpStream,
    address: SocketAddr,
    pub(crate) deadline: Instant,
    got: [u8; HELLO],
    count: usize,
    /// What it claims; it has yet to show that it is no recording.
    claim: Option<Box<(Hello, Channel)>>,
}

/// With what the ciphers of a channel allocate.
const COST: usize = size_of::<Stranger>() + size_of::<(Hello, Channel)>() + 2 * 48;
const _: () = assert!(COST < 512, "what has proven nothing costs nearly nothing");
const _: () = assert!(FINISH <= HELLO, "both of its messages are collected in one place");

/// What became of it.
pub(crate) enum Step {
    /// More has to come.
    Wait,
    /// It has proven the key, and is to be made a [`Proven`].
    Proven(Box<(Hello, Channel)>),
    /// It has to go.
    Away(&'static str),
}

/// A connection that has proven the key.
pub(crate) struct Proven {
    pub(crate) stream: TcpStream,
    pub(crate) address: SocketAddr,
    pub(crate) hello: Hello,
    pub(crate) channel: Channel,
}

impl Stranger {
    pub(crate) fn new(stream: TcpStream, address: SocketAddr, deadline: Instant) -> Self {
        Self { stream, address, deadline, got: [0; HELLO], count: 0, claim: None }
    }

    /// The socket, to be polled.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Looks at what has come.
    pub(crate) fn step(&mut self, key: &JobKey) -> Step {
        loop {
            let wanted = if self.claim.is_none() { HELLO } else { FINISH };
            match (&self.stream).read(&mut self.got[self.count..wanted]) {
                Ok(0) => return Step::Away("it ended before it had proven anything"),
                Ok(count) => self.count += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Wait,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Step::Away("its connection broke"),
            }
            if self.count < wanted {
                continue;
            }
            self.count = 0;
            match self.claim.take() {
                None => match self.greet(key) {
                    Ok(claim) => self.claim = Some(claim),
                    Err(reason) => return Step::Away(reason),
                },
                Some(mut claim) => {
                    let mut record = [0; FINISH];
                    record.copy_from_slice(&self.got[..FINISH]);
                    return if claim.1.finished(&record) {
                        Step::Proven(claim)
                    } else {
                        Step::Away("it repeated what another had sent")
                    };
                }
            }
        }
    }

    /// Reads the first message and answers it.
    fn greet(&mut self, key: &JobKey) -> Result<Box<(Hello, Channel)>, &'static str> {
        let mut clear = [0; CLEAR];
        clear.copy_from_slice(&self.got[..CLEAR]);
        let refuse = |status: Status, reason| {
            let mut refusal = [0; ANSWER];
            refusal[0] = status as u8;
            // Whoever does not get it finds the connection closed.
            let _ = (&self.stream).write(&refusal);
            Err(reason)
        };
        let hello = match Hello::decode(&clear) {
            None => return Err("it sent something else than a rank does"),
            Some(Err(status)) => return refuse(status, "it speaks another version"),
            Some(Ok(hello)) => hello,
        };
        match answer(key, &self.got) {
            Err(status) => refuse(status, "it does not have the job's key"),
            // An empty buffer has room for so little.
            Ok((_, bytes)) if (&self.stream).write(&bytes).ok() != Some(ANSWER) => {
                Err("its connection broke")
            }
            Ok((channel, _)) => Ok(Box::new((hello, channel))),
        }
    }

    /// What it has become.
    pub(crate) fn into_proven(self, claim: (Hello, Channel)) -> Proven {
        Proven { stream: self.stream, address: self.address, hello: claim.0, channel: claim.1 }
    }
}
