//! How a job ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// How one rank ended, as far as the launcher can know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RankEnd {
    /// It exited with this code.
    Exit(i32),
    /// It was killed by this signal.
    Signal(i32),
    /// It was never started: the job ended before its time, or starting it failed.
    NotStarted,
    /// It was left to the broker; whoever started it knows its end.
    External,
    /// It is another launcher's: this one was told to start a part of the job only.
    Elsewhere,
    /// Its host was lost; nobody knows.
    Lost,
}

impl RankEnd {
    pub(crate) fn of(status: ExitStatus) -> Self {
        match status.signal() {
            Some(signal) => Self::Signal(signal),
            None => Self::Exit(status.code().unwrap_or(-1)),
        }
    }

    /// Whether this end is a failure of the rank itself.
    pub const fn is_failure(self) -> bool {
        matches!(self, Self::Signal(_)) || matches!(self, Self::Exit(code) if code != 0)
    }
}

/// Why a rank failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// It exited with this code, which is not 0.
    Exit(i32),
    /// It was killed by this signal.
    Signal(i32),
    /// It had a later start, which failed for this reason.
    NotStarted(String),
    /// Its host was lost, for this reason.
    HostLost(String),
}

/// The failure of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The rank.
    pub rank: u32,
    /// Its process, if there was one.
    pub pid: Option<u32>,
    /// Why.
    pub cause: Cause,
    /// How long after the start of the job.
    pub after: Duration,
    /// A rank that was gone for the others shortly before, and has ended with code 0. If it has not left the job, it is lost to
    /// them, and this failure may be the consequence.
    pub quit_before: Option<u32>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if let Some(pid) = self.pid {
            write!(f, " (pid {pid})")?;
        }
        match &self.cause {
            Cause::Exit(code) => write!(f, " exited with code {code}")?,
            Cause::Signal(signal) => write!(f, " was killed by {}", named(*signal))?,
            Cause::NotStarted(why) => write!(f, " could not be started: {why}")?,
            Cause::HostLost(why) => write!(f, " is lost with its host: {why}")?,
        }
        write!(f, " after {:.3} s", self.after.as_secs_f64())?;
        match self.quit_before {
            Some(rank) => write!(
                f,
                " (rank {rank} had ended before, with code 0: is there a `leave` on all ways out of it?)"
            ),
            None => Ok(()),
        }
    }
}

/// How a whole job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobOutcome {
    /// How each rank ended.
    pub ranks: Vec<RankEnd>,
    /// The failure that came first; those that follow are often its consequences.
    ///
    /// What counts is which rank was the first to be gone for the others: a rank whose job ends by a panic may end later than
    /// those who were told that it is lost. Of several of which that is not known, as of those within a tenth of a second where
    /// ranks hear of each other by sockets, a death by signal counts as the earliest, then an exit with a code of the program's own,
    /// a panic, and an error that `main` returns.
    pub first_failure: Option<Failure>,
    /// Whether the launcher ended the other ranks.
    pub ended_early: bool,
    /// The signal by which the launcher itself was told to end before a rank had failed, if it was: what followed is its doing.
    pub told: Option<i32>,
}

impl JobOutcome {
    /// Whether every rank that the launcher started ended well.
    pub fn success(&self) -> bool {
        self.first_failure.is_none()
    }

    /// The code with which a launcher should exit: that of the first failure, 128 + n for signal n, 127 for a rank
    /// that could not be started, 255 for one whose host was lost; 0 if there was none.
    pub fn exit_code(&self) -> i32 {
        match self.first_failure.as_ref().map(|failure| &failure.cause) {
            None => 0,
            Some(Cause::Exit(code)) => *code,
            Some(Cause::Signal(signal)) => 128 + signal,
            Some(Cause::NotStarted(_)) => 127,
            Some(Cause::HostLost(_)) => 255,
        }
    }
}

impl fmt::Display for JobOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(failure) = &self.first_failure else {
            let started = self.ranks.iter().filter(|end| matches!(end, RankEnd::Exit(_))).count();
            write!(f, "{started} of {} ranks ended well", self.ranks.len())?;
            return if self.ended_early { f.write_str("; the job was ended early") } else { Ok(()) };
        };
        match self.told {
            Some(signal) => write!(f, "told to end by {}: {failure}", named(signal))?,
            None => write!(f, "{failure}")?,
        }
        if self.ended_early {
            return f.write_str("; the other ranks were ended");
        }
        match self.ranks.iter().filter(|end| end.is_failure()).count() {
            0 | 1 => f.write_str("; no other rank failed"),
            2 => f.write_str("; 1 other rank failed"),
            failed => write!(f, "; {} other ranks failed", failed - 1),
        }
    }
}

/// A signal by its number, and by its usual name if it has one.
fn named(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), |name| format!("signal {signal} ({name})"))
}

/// The usual name of a signal.
fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}
