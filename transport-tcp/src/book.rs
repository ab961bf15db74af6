//! Where the ranks of a job listen.

use posthaste_core::Rank;
use posthaste_core::sync::{Mutex, lock};
use std::net::SocketAddr;
use tokio::sync::Notify;

/// Where a rank listens, and which life of it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// Where to connect to.
    pub address: SocketAddr,
    /// The incarnation that listens there.
    pub incarnation: u64,
}

/// The addresses of a job's ranks. Whoever starts the job fills it in, before or after the devices are opened; who
/// needs an entry that is not there yet waits for it.
#[derive(Debug)]
pub struct AddressBook {
    entries: Mutex<Vec<Option<PeerAddress>>>,
    changed: Notify,
}

impl AddressBook {
    /// An empty book for so many ranks.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        Self { entries: Mutex::new(vec![None; ranks as usize]), changed: Notify::new() }
    }

    /// Enters, or replaces, where a rank listens. A rank that the job does not have is ignored.
    pub fn set(&self, rank: Rank, address: PeerAddress) {
        self.enter(rank, address);
        self.tell();
    }

    /// The same for whoever holds a lock, and [tells](Self::tell) those who wait once it does not.
    pub(crate) fn enter(&self, rank: Rank, address: PeerAddress) {
        if let Some(entry) = lock(&self.entries).get_mut(rank.index()) {
            *entry = Some(address);
        }
    }

    /// Whoever waits for an address looks once more.
    pub(crate) fn tell(&self) {
        self.changed.notify_waiters();
    }

    /// Where a rank listens, if that is known.
    #[must_use]
    pub fn get(&self, rank: Rank) -> Option<PeerAddress> {
        lock(&self.entries).get(rank.index()).copied().flatten()
    }

    /// Waits until it is known where a rank listens; for ever if the job has no such rank.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn wait(&self, rank: Rank) -> PeerAddress {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            if let Some(entry) = self.get(rank) {
                return entry;
            }
            changed.await;
        }
    }
}
