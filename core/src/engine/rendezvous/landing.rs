//! Where messages land whose data goes straight to its place: memory of this rank that peers can put to, taken when a peer
//! asks and given back when the message has been read.

use crate::device::{Allocation, Lease, LeaseOwner, Memory};
use crate::ids::Rank;
use crate::memory::SharedSlice;
use crate::sync::{Mutex, lock};
use slab::Slab;
use std::sync::Arc;

/// What is kept for the next message rather than given back to the device, which would have to make it anew.
const KEPT: u64 = 64 << 20;
/// Landings are multiples of this, so that they fit the next message of about the same length.
const STEP: u64 = 64 << 10;

/// All landings of one context.
pub(crate) struct Landings {
    me: Rank,
    memory: Arc<dyn Memory>,
    /// Most bytes that messages may have taken at a time.
    limit: u64,
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for Landings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Landings").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Inner {
    used: Slab<Allocation>,
    used_bytes: u64,
    free: Vec<Allocation>,
    free_bytes: u64,
    ahead_bytes: u64,
}

/// A place for one message. Dropped, it is given back.
pub(crate) struct Landing {
    owner: Arc<Landings>,
    key: usize,
    /// First byte, as peers name it.
    pub place: u64,
    /// As long as the message.
    pub slice: SharedSlice,
    /// A peer may still write to it.
    exposed: bool,
    /// A lease gives it back.
    leased: bool,
    /// No message has asked for it yet.
    ahead: bool,
}

impl std::fmt::Debug for Landing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Landing").field("place", &self.place).field("len", &self.slice.len()).finish()
    }
}

impl Landings {
    pub fn new(me: Rank, memory: Arc<dyn Memory>, limit: u64) -> Self {
        Self { me, memory, limit, inner: Mutex::new(Inner::default()) }
    }

    /// A place for `len` bytes; `None` if there is no room.
    pub fn take(self: &Arc<Self>, len: u64) -> Option<Landing> {
        let wanted = len.max(1).checked_next_multiple_of(STEP)?;
        let mut inner = lock(&self.inner);
        let left = self.limit.saturating_sub(inner.used_bytes);
        let most = wanted.saturating_mul(2).min(left);
        let fits = |free: &Allocation| (wanted..=most).contains(&free.len);
        // The one that was used last: the fewer are used in turn, the more of them stays in the caches.
        let kept = inner.free.iter().rposition(fits);
        let allocation = match kept {
            Some(at) => {
                let allocation = inner.free.remove(at);
                inner.free_bytes -= allocation.len;
                allocation
            }
            None if wanted > left => return None,
            None => self.memory.allocate(wanted).ok()?,
        };
        let place = allocation.offset;
        let Some(slice) = self.memory.map(self.me, place, len) else {
            self.memory.free(allocation);
            return None;
        };
        inner.used_bytes += allocation.len;
        let key = inner.used.insert(allocation);
        Some(Landing { owner: self.clone(), key, place, slice, exposed: true, leased: false, ahead: false })
    }

    /// A place for a message of that length that has not asked yet: of these there are as many as fit into a quarter of
    /// all. `None` if there is no room.
    pub fn take_ahead(self: &Arc<Self>, len: u64) -> Option<Landing> {
        if lock(&self.inner).ahead_bytes.checked_add(len).is_none_or(|bytes| bytes > self.limit / 4) {
            return None;
        }
        let mut landing = self.take(len)?;
        landing.ahead = true;
        lock(&self.inner).ahead_bytes += len;
        Some(landing)
    }

    fn give_back(&self, key: usize, exposed: bool) {
        if exposed {
            // Whoever was to write there broke the rules and may go on writing: it is never used again (I3), and counts.
            return;
        }
        let mut inner = lock(&self.inner);
        let Some(allocation) = inner.used.try_remove(key) else { return };
        inner.used_bytes -= allocation.len;
        if inner.free_bytes + allocation.len <= KEPT {
            inner.free_bytes += allocation.len;
            inner.free.push(allocation);
        } else {
            drop(inner);
            self.memory.free(allocation);
        }
    }
}

impl Drop for Landings {
    fn drop(&mut self) {
        for allocation in std::mem::take(&mut lock(&self.inner).free) {
            self.memory.free(allocation);
        }
    }
}

impl LeaseOwner for Landings {
    fn release(&self, grant: u64) {
        self.give_back(grant as usize, false);
    }
}

impl Landing {
    /// A message of that length has asked for the place, which was taken ahead of it; `None` if it does not fit.
    pub fn claim(mut self, len: u64) -> Option<Landing> {
        self.no_longer_ahead();
        self.slice = self.slice.slice(0, len)?;
        Some(self)
    }

    fn no_longer_ahead(&mut self) {
        if std::mem::take(&mut self.ahead) {
            lock(&self.owner.inner).ahead_bytes -= self.slice.len() as u64;
        }
    }

    /// No peer writes to it any more: all is there, or its process is gone.
    pub fn settle(&mut self) {
        self.exposed = false;
    }

    /// The message, all of which is there, until the lease is dropped.
    pub fn into_lease(mut self) -> Lease {
        self.leased = true;
        Lease::new(self.slice, self.owner.clone(), self.key as u64)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.no_longer_ahead();
        if !self.leased {
            self.owner.give_back(self.key, self.exposed);
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::ids::{ClientId, JobShape};
    use crate::inprocess::InProcessFabric;
    use crate::route::Routes;

    #[test]
    fn what_was_kept_counts_when_it_is_used_again() {
        let fabric = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
        let routes = Routes::new(vec![fabric.device(ClientId(0), Rank(0))], 1).expect("it reaches itself");
        let limit = 3 * STEP;
        let landings = Arc::new(Landings::new(Rank(0), Arc::new(routes.memory(Rank(0))), limit));
        let take = |len| {
            let mut landing = landings.take(len)?;
            landing.settle();
            Some(landing)
        };
        drop(take(limit).expect("there is room for one"));
        let first = take(1).expect("there is room");
        // The longer one that was kept would do, but is more than there is room for.
        let second = take(2 * STEP).expect("there is room");
        assert_eq!(lock(&landings.inner).used_bytes, limit);
        assert!(take(1).is_none(), "all of it is used");
        drop(first);
        drop(second);
        assert_eq!(lock(&landings.inner).used_bytes, 0);
        assert!(take(limit).is_some());
    }
}
