//! The right to read a page of another rank, and how it ends.

use crate::body::{Body, LentPage};
use crate::memory::{LeasedPage, SharedSlice};
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
    /// Another lease has the page.
    taken: bool,
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
        Self { slice, owner, grant, taken: false }
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
    pub fn memory(&self) -> LeasedPage<'_> {
        LeasedPage::of(self.slice, self)
    }

    /// Copies the bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(self.slice.to_vec())
    }

    /// Lends the page to a call, behind which the lease ends unless it was taken.
    pub(crate) fn lend<R>(mut self, call: impl FnOnce(Body<'_>) -> R) -> R {
        // Should the call not return, it counts as taken: better a page that is never given back than one that is, and read.
        self.taken = true;
        let page = LentPage::new(&self.owner, self.grant);
        let result = call(page.lend(self.slice));
        self.taken = page.is_taken();
        result
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.taken {
            self.owner.release(self.grant);
        }
    }
}
