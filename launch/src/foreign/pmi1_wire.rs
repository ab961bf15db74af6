//! The lines of PMI-1: `cmd=get_result rc=0 value=abc`, over a stream socket, each answered by one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use zeroize::{Zeroize, Zeroizing};

use super::values::shortened;
use crate::meeting::MeetingError;

/// No line is longer. The longest value that is asked for has 8 KiB.
const MAX_LINE: usize = 16 << 10;
/// Who speaks, for errors.
pub(super) const SERVICE: &str = "the launcher's PMI service";

/// Bytes taken at once.
const GULP: usize = 4096;

/// A connection to the process manager, on which nothing waits past a deadline.
///
/// Values carry the job's key: buffers are wiped, and errors do not show them.
pub(super) struct Wire {
    socket: Arc<OwnedFd>,
    /// Whether the process manager heard that this rank has ended.
    ended: bool,
    /// What came and is no line yet.
    received: Zeroizing<Vec<u8>>,
}

/// One line from the process manager.
pub(super) struct Line(Zeroizing<String>);

impl Wire {
    pub(super) fn new(socket: OwnedFd) -> Self {
        // In full, so that no unwiped copy is left behind by growth.
        Self {
            socket: Arc::new(socket),
            ended: false,
            received: Zeroizing::new(Vec::with_capacity(MAX_LINE + 2 * GULP)),
        }
    }

    /// Sends a line and waits for its answer, which must be `answer` and tell of no failure.
    pub(super) fn ask(&mut self, line: &str, answer: &str, until: Instant) -> Result<Line, MeetingError> {
        self.tell(line, until)?;
        let line = self.hear(line, until)?;
        line.expect(answer)?;
        Ok(line)
    }

    /// Says that this rank ends as it should.
    pub(super) fn farewell(&mut self, until: Instant) -> Result<(), MeetingError> {
        self.ask("cmd=finalize", "finalize_ack", until)?;
        self.ended = true;
        Ok(())
    }

    fn tell(&mut self, line: &str, until: Instant) -> Result<(), MeetingError> {
        let mut text = Zeroizing::new(String::with_capacity(line.len() + 1));
        text.push_str(line);
        text.push('\n');
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            match send(&*self.socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, line, until)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(gone(line)),
                Err(errno) => return Err(system("write to the process manager", errno)),
            }
        }
        Ok(())
    }

    /// Waits for a line; `asked` is what it answers.
    pub(super) fn hear(&mut self, asked: &str, until: Instant) -> Result<Line, MeetingError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.received[searched..].iter().position(|byte| *byte == b'\n') {
                let line = Line::parse(&self.received[..searched + end]);
                let rest = self.received.len() - (searched + end + 1);
                self.received.copy_within(searched + end + 1.., 0);
                self.received[rest..].zeroize();
                self.received.truncate(rest);
                return line;
            }
            searched = self.received.len();
            if searched > MAX_LINE {
                return Err(garbled(&String::from_utf8_lossy(&self.received)));
            }
            let mut bytes = Zeroizing::new([0; GULP]);
            match recv(&*self.socket, bytes.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(gone(asked)),
                Ok((count, _)) => self.received.extend_from_slice(&bytes[..count]),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, asked, until)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(gone(asked)),
                Err(errno) => return Err(system("read from the process manager", errno)),
            }
        }
    }

    fn wait(&self, what: PollFlags, asked: &str, until: Instant) -> Result<(), MeetingError> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(silent(asked));
        }
        // A poll of a whole deadline at most: a far one is looked at again.
        let left = left.min(Duration::from_secs(3600));
        let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) as _ };
        match poll(&mut [PollFd::new(&*self.socket, what)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(system("wait for the process manager", errno)),
        }
    }
}

impl Drop for Wire {
    /// To a process manager, a connection that ends without a farewell is a crash, upon which it kills all ranks, this
    /// one included, before anybody can read why. So it stays open until the process ends.
    fn drop(&mut self) {
        if !self.ended {
            std::mem::forget(self.socket.clone());
        }
    }
}

impl Line {
    /// Text of printable characters only: what is shown of it cannot harm a terminal.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, MeetingError> {
        match std::str::from_utf8(bytes) {
            Ok(text) if text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) => {
                Ok(Self(Zeroizing::new(text.to_owned())))
            }
            _ => Err(garbled(&String::from_utf8_lossy(bytes))),
        }
    }

    /// The value of a key. Words without one, as in a message for humans, are skipped.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let mut pairs = self.0.split(' ').filter_map(|word| word.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    pub(super) fn need(&self, key: &str) -> Result<&str, MeetingError> {
        self.get(key).filter(|value| !value.is_empty()).ok_or_else(|| self.garbled())
    }

    pub(super) fn number(&self, key: &str) -> Result<u64, MeetingError> {
        super::values::decimal(self.need(key)?).ok_or_else(|| self.garbled())
    }

    pub(super) fn garbled(&self) -> MeetingError {
        garbled(&self.0)
    }

    /// Checks that this is the answer that was waited for; one without a return code is good.
    fn expect(&self, command: &str) -> Result<(), MeetingError> {
        if self.get("cmd") != Some(command) {
            return Err(self.garbled());
        }
        match self.get("rc") {
            None | Some("0") => Ok(()),
            Some(_) => Err(refused(format!("it answered `{}`", shown(&self.0)))),
        }
    }
}

pub(super) fn refused(problem: String) -> MeetingError {
    MeetingError::Refused { place: SERVICE.into(), problem }
}

fn garbled(said: &str) -> MeetingError {
    MeetingError::Garbled { service: SERVICE, said: shown(said) }
}

/// A line without the value in it, which is not ours to show.
fn shown(line: &str) -> String {
    match line.split_once("value=") {
        Some((start, value)) => format!("{}value=({} bytes)", shortened(start), value.len()),
        None => shortened(line),
    }
}

fn gone(asked: &str) -> MeetingError {
    refused(format!(
        "it closed the connection instead of answering {}; the job is being ended",
        command(asked)
    ))
}

fn silent(asked: &str) -> MeetingError {
    let why = match command(asked) {
        "barrier_in" => "not all ranks have come; start them, or raise POSTHASTE_JOIN_TIMEOUT",
        _ => "the launcher is stopped or overloaded",
    };
    refused(format!("no answer to {} at the deadline: {why}", command(asked)))
}

/// The command of a line that we sent.
fn command(line: &str) -> &str {
    line.split(' ').next().and_then(|word| word.strip_prefix("cmd=")).unwrap_or(line)
}

fn system(what: &'static str, errno: Errno) -> MeetingError {
    MeetingError::System { what, source: io::Error::from(errno) }
}
