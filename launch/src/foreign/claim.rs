//! One process per rank: what a rank starts inherits the launcher's variables, and must not take the rank's place again.
//!
//! A process that takes a place listens, for as long as it has it, on an abstract socket named after the place. Nobody else
//! can listen there, whoever finds the name taken is told by the kernel whose it is, and the name vanishes with the process.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};
use rustix::process::geteuid;

use super::error::ForeignError;
use crate::meeting::MeetingError;

/// What is used of a job's name: its end, which has its number.
const MOST: usize = 60;
/// How often somebody may ask whose a place is: nobody takes those who ask out of the kernel's queue.
const QUEUE: i32 = 4096;
/// How long whoever has the name may take to say so.
const PATIENCE: Duration = Duration::from_secs(2);

/// This process's right to be a rank, until it is dropped. None: the name is another user's, who can have no part in this
/// job.
#[derive(Debug)]
pub(super) struct Claimed {
    _socket: Option<OwnedFd>,
}

/// Takes the place of a rank in a launcher's job of that name.
pub(super) fn claim(launcher: &'static str, job: &str, rank: u32) -> Result<Claimed, ForeignError> {
    let system =
        |errno: Errno| MeetingError::System { what: "see whether the rank is taken", source: errno.into() };
    let user = geteuid();
    let end = &job.as_bytes()[job.len().saturating_sub(MOST)..];
    let mut name = format!("posthaste-rank-{}-{rank}-", user.as_raw()).into_bytes();
    name.extend_from_slice(end);
    let address = SocketAddrUnix::new_abstract_name(&name).map_err(system)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(system);
    let until = Instant::now() + PATIENCE;
    // Whoever has the name may end at any moment.
    while Instant::now() < until {
        let own = socket()?;
        match bind(&own, &address) {
            Ok(()) => {
                listen(&own, QUEUE).map_err(system)?;
                return Ok(Claimed { _socket: Some(own) });
            }
            Err(Errno::ADDRINUSE) => {}
            Err(errno) => return Err(system(errno).into()),
        }
        let visit = socket()?;
        match connect(&visit, &address) {
            Ok(()) => {}
            Err(Errno::CONNREFUSED | Errno::INTR) => {
                // It is about to listen, or about to be gone.
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(errno) => return Err(system(errno).into()),
        }
        let holder = sockopt::socket_peercred(visit.as_fd()).map_err(system)?;
        if holder.uid != user {
            tracing::warn!(rank, "the name of this rank's place is taken by another user");
            return Ok(Claimed { _socket: None });
        }
        return Err(ForeignError::Claimed { launcher, rank, pid: holder.pid.as_raw_nonzero().get() });
    }
    // It is held by somebody whom nobody can ask: no process that has taken the place.
    tracing::warn!(rank, "the name of this rank's place is taken by a process that does not answer");
    Ok(Claimed { _socket: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_taken_once_at_a_time() {
        let job = format!("{}@{}", "long".repeat(80), std::process::id());
        let first = claim("a launcher", &job, 3).unwrap();
        let other = claim("a launcher", &job, 4).unwrap();
        for _ in 0..5 {
            // Nobody takes those who ask out of the queue.
            let error = claim("a launcher", &job, 3).unwrap_err();
            let own = std::process::id() as i32;
            assert!(matches!(error, ForeignError::Claimed { rank: 3, pid, .. } if pid == own), "{error}");
        }
        drop((first, other));
        drop(claim("a launcher", &job, 3).unwrap());
    }
}
