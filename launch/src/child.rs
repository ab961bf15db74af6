//! What a child does between fork and exec, and what a signal does to it there.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};
use signal_hook::low_level::{emulate_default_handler, register};

use crate::fds::SharedFds;
use crate::signals::moment;

/// What a child keeps of the launcher's descriptors.
#[derive(Default)]
pub(crate) struct Inherited {
    /// What its node shares, and the read end of its doorbell; a rank that is started again has neither.
    pub(crate) fds: Option<(Arc<SharedFds>, OwnedFd)>,
    pub(crate) lifeline: Option<OwnedFd>,
}

/// Makes the child die with its launcher, stay on its core, and keep exactly its own descriptors.
///
/// The command owns the doorbell's read end from here on: dropping it gives up the launcher's copy.
pub(crate) fn prepare(command: &mut Command, inherited: Inherited, cpu: Option<CpuSet>) {
    let launcher = getpid();
    let between = move || in_child(launcher, &inherited, cpu.as_ref());
    // SAFETY: `in_child` runs in the child of a process with many threads, so it may do only what is safe in a signal
    // handler: it makes system calls without going through libc's locks, and neither allocates, locks nor panics.
    unsafe { command.pre_exec(between) };
}

fn in_child(launcher: Pid, inherited: &Inherited, cpu: Option<&CpuSet>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A launcher that died before the line above sends nothing any more; then we have another parent by now.
    if getppid() != Some(launcher) {
        return Err(rustix::io::Errno::SRCH.into());
    }
    if let Some(cpu) = cpu {
        sched_setaffinity(None, cpu)?;
    }
    if let Some(lifeline) = &inherited.lifeline {
        fcntl_setfd(lifeline, FdFlags::empty())?;
    }
    let Some((shared, bell)) = &inherited.fds else { return Ok(()) };
    fcntl_setfd(&shared.arena, FdFlags::empty())?;
    fcntl_setfd(bell, FdFlags::empty())?;
    for write in &shared.ring {
        fcntl_setfd(write, FdFlags::empty())?;
    }
    Ok(())
}

/// Notes from now on when a signal comes to this process, in nanoseconds. A child has the handler until it is the program that
/// it is to be, and would lose the signal by it: that ends it as if there was none.
pub(crate) fn note(signal: i32, came: &'static AtomicU64) -> io::Result<()> {
    let launcher = getpid();
    let action = move || {
        if getpid() != launcher {
            // An error would be that there is no such signal.
            let _ = emulate_default_handler(signal);
        }
        // Relaxed: whoever looks at it was told of the signal behind this, through a pipe.
        came.store(moment().as_nanos() as u64, Ordering::Relaxed);
    };
    // SAFETY: it does only what is safe in a signal handler: it makes system calls, stores a word, and ends the process.
    unsafe { register(signal, action) }?;
    Ok(())
}
