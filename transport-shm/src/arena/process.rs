//! The processes of ranks, as their entries in the arena name them.
#![forbid(unsafe_code)]

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

/// A process as its rank's entry names it. A number alone names one process in one namespace and at one time only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(super) id: u32,
    /// In clock ticks since boot, as the process itself sees it; 0 if unknown, as are the namespaces.
    pub(super) started: u64,
    pub(super) pid_namespace: u64,
    pub(super) time_namespace: u64,
}

/// What can be known of another process.
#[derive(Debug)]
pub(crate) enum Life {
    /// It has not ended; the descriptor becomes readable when it does.
    Watched(OwnedFd),
    /// It has ended.
    Ended,
    /// It cannot be told here.
    Unknown,
    /// It cannot be told now, for want of descriptors or memory.
    Later,
}

impl Process {
    pub(super) fn this() -> Process {
        let (pid_namespace, time_namespace) = namespaces();
        let started = start_time(std::process::id()).unwrap_or(0);
        Process { id: std::process::id(), started, pid_namespace, time_namespace }
    }

    /// Looks at the process, from another one. A process that nobody has waited for has ended all the same.
    pub(crate) fn look(&self) -> Life {
        // In another namespace the number belongs to somebody else or to nobody.
        let (pid_namespace, time_namespace) = namespaces();
        if self.pid_namespace == 0 || self.pid_namespace != pid_namespace {
            return Life::Unknown;
        }
        let Some(pid) = i32::try_from(self.id).ok().and_then(Pid::from_raw) else {
            return Life::Unknown;
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Life::Ended,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => return Life::Later,
            Err(error) => {
                tracing::debug!(%pid, %error, "no pidfd");
                return Life::Unknown;
            }
        };
        // Clocks since boot can be compared within one time namespace only.
        let comparable = self.started != 0 && self.time_namespace == time_namespace;
        match start_time(self.id) {
            Some(seen) if comparable && seen != self.started => Life::Ended,
            _ => Life::Watched(pidfd),
        }
    }
}

/// When a process started, in clock ticks since boot; `None` if there is no such process.
fn start_time(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program stands in parentheses and may hold anything; fields are counted behind it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The namespaces of this process for process numbers and for clocks; 0 where one cannot be had.
fn namespaces() -> (u64, u64) {
    static OWN: OnceLock<(u64, u64)> = OnceLock::new();
    let inode = |path: &str| rustix::fs::stat(path).map_or(0, |stat| stat.st_ino);
    *OWN.get_or_init(|| (inode("/proc/self/ns/pid"), inode("/proc/self/ns/time")))
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_number_is_a_process_only_at_its_time_and_in_its_namespace() {
        let mut child = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().expect("sleep");
        let this = Process::this();
        let started = start_time(child.id()).expect("a running process");
        let process = Process { id: child.id(), started, ..this };
        assert!(matches!(process.look(), Life::Watched(_)));
        // A later process has taken over the number.
        let other = Process { started: started - 1, ..process };
        assert!(matches!(other.look(), Life::Ended));
        let elsewhere = Process { pid_namespace: this.pid_namespace + 1, ..other };
        assert!(matches!(elsewhere.look(), Life::Unknown));
        // Its clock runs apart, so the start says nothing.
        let apart = Process { time_namespace: this.time_namespace + 1, ..other };
        assert!(matches!(apart.look(), Life::Watched(_)));
        child.kill().expect("kill");
        let zombie = process.look();
        assert!(matches!(zombie, Life::Watched(_)), "its descriptor is readable: {zombie:?}");
        child.wait().expect("wait");
        assert!(matches!(process.look(), Life::Ended));
    }
}
