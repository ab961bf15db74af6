//! Signals that the launcher gets and its jobs should know of.

use std::io;
use std::sync::{Arc, Mutex, Weak};

use rustix::process::{Pid, Signal, getpgid, getpgrp, getpid, getsid};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::emulate_default_handler;
use signal_hook::low_level::siginfo::Cause;

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

/// A signal that came to the launcher.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forwarded {
    pub(crate) signal: Signal,
    /// The terminal sent it, to the whole process group as a rule: see [`has_it`](Self::has_it).
    pub(crate) by_terminal: bool,
}

impl Forwarded {
    /// Whether a process has it already, as one of this process's group to which the terminal has sent it.
    pub(crate) fn has_it(self, process: Pid) -> bool {
        // Of the end of a terminal the kernel tells the session's leader alone.
        let alone = || self.signal == Signal::HUP && getsid(None).is_ok_and(|leader| leader == getpid());
        // Some have a group of their own, as `timeout` does.
        self.by_terminal && !alone() && getpgid(Some(process)).is_ok_and(|group| group == getpgrp())
    }
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
        let taken = wanted.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
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
        let forwarded = Forwarded { signal, by_terminal: matches!(origin.cause, Cause::Kernel) };
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
