//! Where messages land whose data goes straight to its place: memory of this rank that peers can put to, taken when a peer
//! asks and given back when the message has been read.

use crate::device::{Allocation, Lease, LeaseOwner, Memory};
use crate::engine::State;
use crate::ids::Rank;
use crate::memory::SharedSlice;
use crate::slot::Ticket;
use crate::sync::{Mutex, lock};
use slab::Slab;
use std::sync::Arc;

/// Milliseconds after which what is kept for the next message is given back if there was none; twice that at most.
const IDLE: u64 = 1000;
/// The timer that looks for it: no operation has this ticket.
pub(crate) const LANDINGS: Ticket = match Ticket::from_word(u64::MAX) {
    Some(ticket) => ticket,
    None => unreachable!(),
};
/// What is kept for the next message rather than given back to the device, which would have to make it anew.
const KEPT: u64 = 64 << 20;
/// Bytes of the places that are used in turn, at least, the one that has rested longest first, where the sender's core writes
/// to them: by then their lines have left the reader's own cache for one that both may share, and are written in half the time.
const TURN: u64 = 4 << 20;
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
    /// Places taken so far.
    taken: u64,
    /// Nothing was taken for a while: nothing is kept until something is.
    idle: bool,
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

    /// A place for `len` bytes; `None` if there is no room. `in_turn`: another core writes there, and not this one.
    pub fn take(self: &Arc<Self>, len: u64, in_turn: bool) -> Option<Landing> {
        let wanted = len.max(1).checked_next_multiple_of(STEP)?;
        let mut inner = lock(&self.inner);
        let left = self.limit.saturating_sub(inner.used_bytes);
        let most = wanted.saturating_mul(2).min(left);
        let fits = |free: &Allocation| (wanted..=most).contains(&free.len);
        let fresh = || if wanted <= left { self.memory.allocate(wanted).ok() } else { None };
        let more = in_turn && inner.used_bytes + inner.free_bytes < TURN.min(self.limit);
        // The one that was used last stays in the cache of who writes and reads it.
        let kept = |inner: &mut Inner| {
            let mut free = inner.free.iter();
            let at = if in_turn { free.position(fits) } else { free.rposition(fits) }?;
            let allocation = inner.free.remove(at);
            inner.free_bytes -= allocation.len;
            Some(allocation)
        };
        let allocation = match more {
            true => fresh().or_else(|| kept(&mut inner)),
            false => kept(&mut inner).or_else(fresh),
        }?;
        let place = allocation.offset;
        let Some(slice) = self.memory.map(self.me, place, len) else {
            self.memory.free(allocation);
            return None;
        };
        inner.used_bytes += allocation.len;
        inner.taken += 1;
        inner.idle = false;
        let key = inner.used.insert(allocation);
        Some(Landing { owner: self.clone(), key, place, slice, exposed: true, leased: false, ahead: false })
    }

    /// A place for a message of that length that has not asked yet: of these there are as many as fit into a quarter of
    /// all. `None` if there is no room.
    pub fn take_ahead(self: &Arc<Self>, len: u64, in_turn: bool) -> Option<Landing> {
        if lock(&self.inner).ahead_bytes.checked_add(len).is_none_or(|bytes| bytes > self.limit / 4) {
            return None;
        }
        let mut landing = self.take(len, in_turn)?;
        landing.ahead = true;
        lock(&self.inner).ahead_bytes += len;
        Some(landing)
    }

    /// Gives back what is kept, unless a place was taken since so many had been. `Err`: how many have been by now.
    fn end_keeping(&self, taken: u64) -> Result<(), u64> {
        let mut inner = lock(&self.inner);
        if inner.taken != taken {
            return Err(inner.taken);
        }
        inner.idle = true;
        inner.free_bytes = 0;
        let kept = std::mem::take(&mut inner.free);
        drop(inner);
        kept.into_iter().for_each(|allocation| self.memory.free(allocation));
        Ok(())
    }

    fn give_back(&self, key: usize, exposed: bool) {
        if exposed {
            // Whoever was to write there broke the rules and may go on writing: it is never used again (I3), and counts.
            return;
        }
        let mut inner = lock(&self.inner);
        let Some(allocation) = inner.used.try_remove(key) else { return };
        inner.used_bytes -= allocation.len;
        if !inner.idle && inner.free_bytes + allocation.len <= KEPT {
            inner.free_bytes += allocation.len;
            inner.free.push(allocation);
        } else {
            drop(inner);
            self.memory.free(allocation);
        }
    }
}

impl State {
    /// A place for `len` bytes of that peer's; `None` if there is no room.
    pub(super) fn take_landing(&mut self, index: usize, len: u64) -> Option<Landing> {
        self.time_landings();
        self.landings.take(len, self.lands_itself(index))
    }

    /// A place for a message that has not asked yet; `None` if there is no room.
    pub(super) fn take_landing_ahead(&mut self, index: usize, len: u64) -> Option<Landing> {
        self.time_landings();
        self.landings.take_ahead(len, self.lands_itself(index))
    }

    /// Whether the peer writes to its places here itself.
    fn lands_itself(&self, index: usize) -> bool {
        self.routes.of(self.shape.endpoint(index).rank).mappable
    }

    /// Sees to it that somebody looks whether places are still used.
    fn time_landings(&mut self) {
        if self.landings_seen.is_none() {
            self.landings_seen = Some(0);
            self.timers.set_in(IDLE, LANDINGS);
        }
    }

    /// The time has come to look whether places are still used.
    pub(in crate::engine) fn landings_in_time(&mut self, now: u64) {
        let Some(seen) = self.landings_seen else { return };
        self.landings_seen = self.landings.end_keeping(seen).err();
        if self.landings_seen.is_some() {
            self.timers.set(now + IDLE, LANDINGS);
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

    /// Memory that counts what is taken of it.
    struct Counted(Box<dyn Memory>, Arc<std::sync::atomic::AtomicU64>);

    impl Memory for Counted {
        fn allocate(&self, len: u64) -> Result<Allocation, crate::error::MemoryError> {
            let allocation = self.0.allocate(len)?;
            self.1.fetch_add(allocation.len, std::sync::atomic::Ordering::Relaxed);
            Ok(allocation)
        }

        fn free(&self, allocation: Allocation) {
            self.1.fetch_sub(allocation.len, std::sync::atomic::Ordering::Relaxed);
            self.0.free(allocation);
        }

        fn map(&self, owner: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
            self.0.map(owner, offset, len)
        }
    }

    #[test]
    fn what_is_kept_goes_back_when_nothing_was_taken_for_a_while() {
        let fabric = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
        let routes = Routes::new(vec![fabric.device(ClientId(0), Rank(0))], 1).expect("it reaches itself");
        let taken = Arc::default();
        let memory = Counted(Box::new(routes.memory(Rank(0))), Arc::clone(&taken));
        let landings = Arc::new(Landings::new(Rank(0), Arc::new(memory), 8 * STEP));
        let bytes = || taken.load(std::sync::atomic::Ordering::Relaxed);
        let take = || {
            let mut landing = landings.take(STEP, false).expect("there is room");
            landing.settle();
            landing
        };
        drop((take(), take()));
        assert_eq!(bytes(), 2 * STEP, "both are kept");
        assert_eq!(landings.end_keeping(0), Err(2), "they were used meanwhile");
        assert_eq!(bytes(), 2 * STEP);
        let held = take();
        assert_eq!(landings.end_keeping(2), Err(3));
        assert_eq!(landings.end_keeping(3), Ok(()));
        assert_eq!(bytes(), STEP, "but for the one that is in use");
        drop(held);
        assert_eq!(bytes(), 0, "nobody would look again for this one");
        drop(take());
        assert_eq!(bytes(), STEP, "it is kept again");
        drop(landings);
        assert_eq!(bytes(), 0);
    }

    #[test]
    fn what_was_kept_counts_when_it_is_used_again() {
        let fabric = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
        let routes = Routes::new(vec![fabric.device(ClientId(0), Rank(0))], 1).expect("it reaches itself");
        let limit = 3 * STEP;
        let landings = Arc::new(Landings::new(Rank(0), Arc::new(routes.memory(Rank(0))), limit));
        let take = |len| {
            let mut landing = landings.take(len, true)?;
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

    #[test]
    fn places_are_used_in_turn() {
        let fabric = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
        let routes = Routes::new(vec![fabric.device(ClientId(0), Rank(0))], 1).expect("it reaches itself");
        let memory = || Arc::new(routes.memory(Rank(0)));
        let places = |limit, in_turn| {
            let landings = Arc::new(Landings::new(Rank(0), memory(), limit));
            let take = || {
                let mut landing = landings.take(TURN / 4, in_turn).expect("there is room");
                landing.settle();
                landing.place
            };
            (0..9).map(|_| take()).collect::<Vec<u64>>()
        };
        let used = places(2 * TURN, true);
        let first: std::collections::HashSet<u64> = used[..4].iter().copied().collect();
        assert_eq!((first.len(), &used[4..]), (4, &[&used[..4], &used[..1]].concat()[..]));
        // No more than there is room for.
        let used = places(TURN / 2, true);
        assert_eq!((&used[2..4], &used[8..]), (&used[..2], &used[..1]));
        assert_ne!(used[0], used[1]);
        // What this core writes itself stays in its cache.
        assert_eq!(places(2 * TURN, false), [used[0]; 9]);
    }
}
