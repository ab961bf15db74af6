//! Signals that the launcher gets and its jobs should know of.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpgid, getpgrp, getpid, getsid};
use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::emulate_default_handler;
use signal_hook::low_level::siginfo::Cause;

use crate::child;
use crate::job::lock;

/// Something that ends, and takes signals until then.
pub(crate) trait Target: Send + Sync {
    /// Takes a signal; false if it has ended.
    fn forward(&self, signal: Forwarded) -> bool;
}

/// The jobs to forward to.
static JOBS: Mutex<Vec<Weak<dyn Target>>> = Mutex::new(Vec::new());
/// Whether the handlers are set up. They stay for the life of the process, since they cannot be taken back safely.
static LISTENING: Mutex<bool> = Mutex::new(false);
/// When each signal came last, by number, in nanoseconds of [`moment`].
static CAME: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];

/// A signal that came to the launcher.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forwarded {
    pub(crate) signal: Signal,
    pub(crate) by: By,
}

/// Who has sent a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The terminal, at that [`moment`], to the whole process group as a rule: see [`Forwarded::has_it`].
    Terminal(Duration),
    /// Some process, to the launcher alone.
    Process,
    /// None: whoever holds the job ends it ([`RunningJob::end`](crate::RunningJob::end)).
    Holder,
}

impl Forwarded {
    /// Whether a process that is there since that [`moment`] has it already, as one of this process's group to which the terminal
    /// has sent it.
    pub(crate) fn has_it(self, process: Pid, since: Duration) -> bool {
        // Of the end of a terminal the kernel tells the session's leader alone.
        let alone = || self.signal == Signal::HUP && getsid(None).is_ok_and(|leader| leader == getpid());
        // Some have a group of their own, as `timeout` does.
        let in_group = || getpgid(Some(process)).is_ok_and(|group| group == getpgrp());
        // What was started behind it, as in the place of one that it ended, was not of the group then.
        matches!(self.by, By::Terminal(sent) if since < sent) && !alone() && in_group()
    }
}

/// The time of a clock that may be read where a signal is handled.
pub(crate) fn moment() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Sees to it that how a child ends can be asked: if whoever started this process has it ignore SIGCHLD, as some do, the kernel
/// forgets children as they end.
///
/// # Errors
/// The system refuses to have the signal handled.
pub fn remember_children() -> io::Result<()> {
    if ignored() & (1 << (SIGCHLD - 1)) != 0 {
        // A handler that does nothing; the children begin with the default again.
        signal_hook::flag::register(SIGCHLD, Arc::default())?;
    }
    Ok(())
}

/// Forwards from now on to this job while it runs.
///
/// While no such job runs, the signals do what they do without a handler.
pub(crate) fn forward_to(job: Weak<dyn Target>) -> io::Result<()> {
    let mut listening = lock(&LISTENING);
    if !*listening {
        let ignored = ignored();
        let wanted = [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2];
        let taken: Vec<i32> =
            wanted.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect();
        // First, so that this is noted when the thread is told of one.
        taken.iter().try_for_each(|signal| child::note(*signal, &CAME[*signal as usize]))?;
        let signals = SignalsInfo::<WithOrigin>::new(taken)?;
        std::thread::Builder::new().name("signals".into()).spawn(move || listen(signals))?;
        *listening = true;
    }
    let mut jobs = lock(&JOBS);
    // Not only at the next signal, which may never come.
    jobs.retain(|job| job.strong_count() > 0);
    jobs.push(job);
    Ok(())
}

/// Whether this process ignores a signal, as those that `nohup` starts ignore SIGHUP: who handles it would undo that.
pub fn is_ignored(signal: i32) -> bool {
    ignored() & (1 << (signal - 1)) != 0
}

/// The signals that whoever started this process had ignored, as `nohup` does: they stay so, here and in the ranks.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn listen(mut signals: SignalsInfo<WithOrigin>) {
    for origin in signals.forever() {
        let Some(signal) = Signal::from_named_raw(origin.signal) else { continue };
        let came = CAME.get(origin.signal as usize).map_or(0, |came| came.load(Ordering::Relaxed));
        let by = match origin.cause {
            Cause::Kernel => By::Terminal(Duration::from_nanos(came)),
            _ => By::Process,
        };
        let forwarded = Forwarded { signal, by };
        let mut taken = false;
        lock(&JOBS).retain(|job| match job.upgrade() {
            Some(job) => {
                taken |= job.forward(forwarded);
                true
            }
            None => false,
        });
        if !taken {
            let _ = emulate_default_handler(origin.signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn what_was_started_behind_a_signal_of_the_terminal_does_not_have_it() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let (process, sent) = (Pid::from_child(&child), moment());
        let second = Duration::from_secs(1);
        let told = Forwarded { signal: Signal::INT, by: By::Terminal(sent) };
        assert!(told.has_it(process, sent - second), "the terminal has told it");
        assert!(!told.has_it(process, sent) && !told.has_it(process, sent + second));
        // Somebody else tells the launcher alone.
        let told = Forwarded { signal: Signal::INT, by: By::Process };
        assert!(!told.has_it(process, sent - second));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
