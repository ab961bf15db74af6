//! Connection ids, and who hands them out (D20, D21).

use posthaste_core::ConnectionId;
use posthaste_core::sync::lock;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Hands out connection ids: of those that are free, the lowest. Ranks that open and close in the same order have the same
/// ids. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use posthaste_protocols::multisend::ConnectionManager;
///
/// let manager = ConnectionManager::new(2);
/// let (first, second) = (manager.open().await, manager.open().await);
/// assert!(manager.try_open().is_none());
/// assert_ne!(first.id(), second.id());
/// drop(first);
/// assert_eq!(manager.open().await.id().0, 0);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ConnectionManager {
    permits: Arc<Semaphore>,
    free: Arc<Mutex<BTreeSet<u32>>>,
}

impl ConnectionManager {
    /// One that has the ids 0 to `limit - 1`; at most 65,536 of them.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        let limit = limit.min(1 << 16);
        Self {
            permits: Arc::new(Semaphore::new(limit as usize)),
            free: Arc::new(Mutex::new((0..limit).collect())),
        }
    }

    /// An id that nobody here has; waits while all are in use.
    ///
    /// # Cancel safety
    /// Cancel safe: no id is taken.
    pub async fn open(&self) -> Connection {
        match self.permits.clone().acquire_owned().await {
            Ok(permit) => self.connection(permit),
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    /// The same, if there is one now.
    #[must_use]
    pub fn try_open(&self) -> Option<Connection> {
        Some(self.connection(self.permits.clone().try_acquire_owned().ok()?))
    }

    fn connection(&self, permit: OwnedSemaphorePermit) -> Connection {
        // As many permits as ids, and an id goes back before its permit does.
        let id = lock(&self.free).pop_first().unwrap_or(u32::MAX);
        Connection { id: ConnectionId(id), free: self.free.clone(), _permit: permit }
    }
}

/// A connection id in use; it is free again when this is dropped.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::ConnectionManager;
/// let manager = ConnectionManager::new(1);
/// let connection = manager.try_open().expect("the id is free");
/// assert!(manager.try_open().is_none(), "all ids are in use");
/// drop(connection);
/// assert!(manager.try_open().is_some());
/// # job.leave().await
/// # }
/// ```
#[derive(Debug)]
pub struct Connection {
    id: ConnectionId,
    free: Arc<Mutex<BTreeSet<u32>>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// The id.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.id
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.free).insert(self.id.0);
    }
}
