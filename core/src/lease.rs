//! The right to read a page of another rank, and how it ends.

use crate::memory::SharedSlice;
use bytes::Bytes;
use std::sync::Arc;

/// Gives pages back to their owner when a lease ends. From any thread.
pub trait LeaseOwner: Send + Sync {
    /// The lease with that number has ended. Idempotent.
    fn release(&self, grant: u64);
}

/// The right to read a page of another rank until it is dropped.
///
/// The sender promised not to write the page meanwhile, but it could: every access copies, or is a relaxed
/// atomic load, so that a lying peer can change the values seen and nothing else.
pub struct Lease {
    slice: SharedSlice,
    owner: Arc<dyn LeaseOwner>,
    grant: u64,
    kept: bool,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("len", &self.len()).field("grant", &self.grant).finish()
    }
}

impl Lease {
    /// A lease on `slice`, to be given back to `owner` under the number `grant`.
    #[must_use]
    pub fn new(slice: SharedSlice, owner: Arc<dyn LeaseOwner>, grant: u64) -> Self {
        Self { slice, owner, grant, kept: false }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether the page holds no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// The memory, for copying out of it and for folding over its words.
    #[must_use]
    pub fn memory(&self) -> SharedSlice {
        self.slice
    }

    /// Copies the bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(self.slice.to_vec())
    }

    /// Ends the lease without giving the page back: the packet stays with the device and is offered again.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.kept {
            self.owner.release(self.grant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Lease, LeaseOwner};
    use crate::memory::SharedSlice;
    use std::sync::{Arc, Mutex};

    #[derive(Default)]
    struct Owner(Mutex<Vec<u64>>);

    impl LeaseOwner for Owner {
        fn release(&self, grant: u64) {
            self.0.lock().unwrap().push(grant);
        }
    }

    #[test]
    fn a_lease_is_given_back_once_and_one_that_is_kept_is_not() {
        let owner = Arc::new(Owner::default());
        let lease = |grant| Lease::new(SharedSlice::EMPTY, owner.clone(), grant);
        let (first, kept, last) = (lease(1), lease(2), lease(3));
        drop(last);
        kept.keep();
        drop(first);
        assert_eq!(*owner.0.lock().unwrap(), [3, 1]);
        // Whoever gave it holds the owner alone again.
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
