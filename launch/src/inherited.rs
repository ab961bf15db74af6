//! The descriptors of one rank, as it owns them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::adopt::{self, Role};
use crate::broker_client::fetch_from_broker;
use crate::env::JobEnv;
use crate::error::{AdoptError, BrokerError};

/// What a rank holds of its job: the arena, its own doorbell, and the means to ring everyone's.
///
/// All are close-on-exec. While `bell` is open, the peers take this rank to be alive: a poll of their write end
/// reports `POLLERR` as soon as it is closed, be it by the end of the process.
#[derive(Debug)]
pub struct InheritedFds {
    /// The arena's file.
    pub arena: OwnedFd,
    /// The read end of this rank's doorbell, non-blocking.
    pub bell: OwnedFd,
    /// The write ends of the doorbells of the node's ranks, in ascending order of ranks, non-blocking.
    pub ring: Vec<OwnedFd>,
}

impl InheritedFds {
    /// Takes over what the launcher passed on; once per process.
    ///
    /// Each descriptor is checked to be of the right kind, and made close-on-exec, before any is taken over.
    ///
    /// # Errors
    /// They were adopted before, the environment names none, or what is open under the numbers is not what the
    /// launcher made, as in a process that a rank has started. The numbers are left alone then.
    pub fn adopt(env: &JobEnv) -> Result<Self, AdoptError> {
        let numbers = env.fds.as_ref().filter(|fds| fds.of_process).ok_or(AdoptError::NotInherited)?;
        adopt::adopt(numbers, env.place_on_node())
    }

    /// Gets this rank's descriptors whichever way the environment names: inherited, or from the broker.
    ///
    /// Waits up to ten seconds for a broker.
    ///
    /// # Errors
    /// As [`adopt`](Self::adopt) and [`fetch_from_broker`].
    pub fn obtain(env: &JobEnv) -> Result<Self, BrokerError> {
        if env.fds.is_some() { Ok(Self::adopt(env)?) } else { fetch_from_broker(env) }
    }

    /// Keeps the doorbells of those that share this memory, of the ranks to whom they belong, in that order.
    pub fn keep_of(&mut self, ranks: &[u32], shares: &[bool]) {
        let ring = std::mem::take(&mut self.ring);
        let of_sharers = |(_, rank): &(OwnedFd, &u32)| shares.get(**rank as usize) == Some(&true);
        self.ring = ring.into_iter().zip(ranks).filter(of_sharers).map(|(bell, _)| bell).collect();
    }

    /// Checks descriptors that came from elsewhere than from the numbers in the environment.
    pub(crate) fn verify(&self, place: u32) -> Result<(), AdoptError> {
        let ring = self.ring.iter().map(|fd| (fd, Role::Ring));
        for (fd, role) in [(&self.arena, Role::Arena), (&self.bell, Role::Bell)].into_iter().chain(ring) {
            adopt::check(fd.as_fd(), fd.as_raw_fd(), role)?;
        }
        let own = self.ring.get(place as usize).ok_or(AdoptError::NotInherited)?;
        adopt::same_pipe(self.bell.as_fd(), own.as_fd(), self.bell.as_raw_fd())
    }
}
