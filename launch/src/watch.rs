//! A descriptor that becomes readable when a child has exited.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};

/// Tells the exit of one child, without reaping it.
#[derive(Debug)]
pub(crate) struct Watch(OwnedFd);

impl Watch {
    /// Watches a child that nobody but the caller reaps.
    pub(crate) fn new(pid: Pid) -> io::Result<Self> {
        if std::env::var_os("POSTHASTE_TEST_NO_PIDFD").is_none_or(|value| value != "1")
            && let Ok(fd) = pidfd_open(pid, PidfdFlags::empty())
        {
            return Ok(Self(fd));
        }
        Self::with_thread(pid)
    }

    /// Where there are no pidfds: a thread waits, and closes its end of a pipe.
    fn with_thread(pid: Pid) -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        std::thread::Builder::new().name(format!("watch of {pid}")).stack_size(64 << 10).spawn(
            move || {
                // NOWAIT leaves the zombie, so the number stays taken until the supervisor has seen it.
                let exit = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while matches!(waitid(WaitId::Pid(pid), exit), Err(Errno::INTR)) {}
                drop(write);
            },
        )?;
        Ok(Self(read))
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
