//! What a rank knows about the collective operations of its job: a state machine without I/O.
//!
//! Every rank counts its collective operations; equal numbers belong together. The board is *broken* from an operation
//! on once that one cannot end well on some rank: then neither it nor any later one ends well here. Whoever learns that
//! passes it on, so that nobody waits for a rank that has given up.

use super::custody::Custody;
use super::record::Record;
use crate::cause::{Lowered, names_ranks_of};
use crate::nearest::nearest_living;
use bytes::Bytes;
use posthaste_core::device::Allocation;
use posthaste_core::sync::replace_waker;
use posthaste_core::{Collective, ContextId, Device, Fault, JobShape, Rank, WindowId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;

/// Operations that a peer may be ahead of this rank.
const MAX_AHEAD: u64 = 1 << 16;
/// Bytes of a peer's blobs that may wait before it is told off.
pub(super) const MAX_STORED: usize = 256 << 20;

/// An operation that this rank takes part in at the moment.
struct Running {
    call: Collective,
    waker: Option<Waker>,
}

/// A window of which a part of this rank may be in use by others.
struct Tracked {
    /// This rank's part.
    own: Option<(Arc<dyn Device>, Allocation)>,
    /// This rank has released it.
    here: bool,
    /// A task of this rank waits for the others and takes the memory itself.
    awaited: bool,
    /// Who else has released it.
    by: Vec<bool>,
}

/// Memory that nobody can reach any more; dropping it without [`give_back`](Self::give_back) leaves it taken.
pub(super) struct Unused(Vec<(Arc<dyn Device>, Allocation)>);

impl Unused {
    pub fn of(own: impl IntoIterator<Item = (Arc<dyn Device>, Allocation)>) -> Unused {
        Unused(own.into_iter().collect())
    }

    /// Not under the board's lock: the kernel takes its time.
    pub fn give_back(self) {
        for (device, own) in self.0 {
            device.free(own);
        }
    }
}

/// What follows from a change of the board; to be done after its lock is released.
#[derive(Default)]
pub(super) struct Effects {
    pub wake: Vec<Waker>,
    /// Whom to tell that the board is broken.
    pub relay: Vec<Rank>,
    pub unused: Vec<Unused>,
    /// A member of this group has released a window that is still to be made here, if it ever is.
    pub early: Option<u64>,
    /// The sender of a record has broken the rules.
    pub corrupt: bool,
}

/// Whether a rank with that fault reaches nothing any more. One that was cut off may still write.
pub(crate) fn reaches_nothing(fault: Fault) -> bool {
    matches!(fault, Fault::PeerLost(_) | Fault::PeerClosed(_))
}

pub(super) struct Board {
    me: u32,
    size: u32,
    /// The number of this rank's next operation.
    next: u64,
    // Ordered maps, as their keys are a peer's choice and there are a few entries at a time: cheaper than hashes that withstand it.
    running: BTreeMap<u64, Running>,
    /// What others called that are ahead of this rank.
    ahead: BTreeMap<u64, (Rank, Collective)>,
    /// Blobs by operation, round and source.
    arrived: BTreeMap<(u64, u32, u32), Bytes>,
    /// Bytes of those, by source.
    stored: BTreeMap<u32, usize>,
    down: BTreeMap<u32, Fault>,
    broken: Option<(u64, Fault)>,
    lowered: Lowered,
    /// Some rank never enters this operation or a later one; so none of those can have ended well anywhere.
    unentered: u64,
    /// This rank was started again: what is broken for it is so for nobody else.
    outlived: bool,
    windows: BTreeMap<u64, Tracked>,
    /// Releases of windows that this rank has yet to hear of.
    early: BTreeMap<u64, Vec<u32>>,
    /// Windows of groups, and of whom contexts have taken in all that comes.
    pub custody: Custody,
    closed: bool,
}

impl Board {
    pub fn new(me: Rank, shape: JobShape) -> Self {
        Self {
            me: me.0,
            size: shape.ranks,
            next: 0,
            running: BTreeMap::new(),
            ahead: BTreeMap::new(),
            arrived: BTreeMap::new(),
            stored: BTreeMap::new(),
            down: BTreeMap::new(),
            broken: None,
            lowered: Lowered::default(),
            unentered: u64::MAX,
            outlived: false,
            windows: BTreeMap::new(),
            early: BTreeMap::new(),
            custody: Custody::new(shape.contexts),
            closed: false,
        }
    }

    /// The rank that is `distance` after another.
    fn after(&self, rank: u32, distance: u32) -> u32 {
        ((u64::from(rank) + u64::from(distance)) % u64::from(self.size)) as u32
    }

    /// Whom to tell that the board is broken; they tell theirs.
    fn neighbours(&self) -> Vec<Rank> {
        let is_gone = |place: usize| self.down.contains_key(&(place as u32));
        let places = nearest_living(self.me as usize, self.size as usize, is_gone);
        places.into_iter().map(|place| Rank(place as u32)).collect()
    }

    /// The record that tells neighbours how far the board is broken.
    pub fn broken_record(&self) -> Option<Bytes> {
        self.broken.map(|(first, cause)| Record::broken(first, self.unentered, cause).freeze())
    }

    /// Starts an operation of this rank.
    ///
    /// # Errors
    /// If it cannot end well.
    pub fn begin(&mut self, call: Collective, effects: &mut Effects) -> Result<u64, Fault> {
        if self.closed {
            return Err(Fault::Shutdown);
        }
        let operation = self.next;
        if let Some((first, cause)) = self.broken
            && first <= operation
        {
            return Err(cause);
        }
        let doomed = match self.ahead.get(&operation) {
            Some((rank, theirs)) if *theirs != call => Some(self.mismatch(*rank, *theirs, call)),
            // Whoever has left takes part in nothing that begins now; a window can be freed without it.
            _ if !matches!(call, Collective::Free(_)) => self.down.values().next().copied(),
            _ => None,
        };
        if let Some(cause) = doomed {
            self.break_from(operation, u64::MAX, cause, effects);
            return Err(cause);
        }
        self.next += 1;
        self.ahead.remove(&operation);
        if call != Collective::Shmalloc {
            self.early.remove(&operation);
        }
        self.running.insert(operation, Running { call, waker: None });
        Ok(operation)
    }

    /// Why an operation of this rank cannot end well, if so.
    pub fn failure(&self, operation: u64) -> Option<Fault> {
        if self.closed {
            return Some(Fault::Shutdown);
        }
        self.broken.filter(|(first, _)| *first <= operation).map(|(_, cause)| cause)
    }

    /// The operation's task waits; the waker that was there before, as of [`replace_waker`].
    pub fn wait(&mut self, operation: u64, waker: &Waker) -> Option<Waker> {
        self.running.get_mut(&operation).and_then(|running| replace_waker(&mut running.waker, waker))
    }

    /// The blob of a rank, or why there will be none.
    pub fn take(&mut self, operation: u64, round: u32, from: Rank) -> Option<Result<Bytes, Fault>> {
        if let Some(blob) = self.arrived.remove(&(operation, round, from.0)) {
            self.unstore(from.0, blob.len());
            return Some(Ok(blob));
        }
        // A rank that left in order has sent its part of everything that it took part in.
        self.failure(operation).or_else(|| self.down.get(&from.0).copied()).map(Err)
    }

    fn unstore(&mut self, source: u32, bytes: usize) {
        if bytes > 0
            && let Some(stored) = self.stored.get_mut(&source)
        {
            *stored = stored.saturating_sub(bytes);
        }
    }

    /// An operation is over, well or not. What is left of its task's waker is not to be dropped under the lock.
    #[must_use = "it is to be dropped where no lock is held"]
    pub fn end(&mut self, operation: u64) -> Option<Waker> {
        let left = self.running.remove(&operation).and_then(|running| running.waker);
        let of_it = (operation, 0, 0)..=(operation, u32::MAX, u32::MAX);
        while let Some((&key, _)) = self.arrived.range(of_it.clone()).next() {
            if let Some(blob) = self.arrived.remove(&key) {
                self.unstore(key.2, blob.len());
            }
        }
        left
    }

    fn mismatch(&self, rank: Rank, theirs: Collective, ours: Collective) -> Fault {
        Fault::CollectiveMismatch { ranks: [rank, Rank(self.me)], calls: [theirs, ours] }
    }

    /// No operation from `first` on can end well.
    pub fn break_from(&mut self, first: u64, unentered: u64, cause: Fault, effects: &mut Effects) {
        let (old, cause) = self.broken.unwrap_or((u64::MAX, cause));
        // This rank enters nothing new from there on.
        let unentered_from = |first: u64| unentered.min(first.max(self.next)).min(self.unentered);
        let lowest = first.min(old);
        if (lowest, unentered_from(lowest)) == (old, self.unentered) {
            return;
        }
        let is_told = !self.lowered.is_spent();
        let first = self.lowered.to(lowest);
        let unentered = unentered_from(first);
        (self.broken, self.unentered) = (Some((first, cause)), unentered);
        if is_told {
            effects.relay = self.neighbours();
        }
        self.wake_all(effects);
        self.settle_all(effects);
    }

    /// No operation of this rank ends well, and nobody need be told.
    pub fn outlive(&mut self, cause: Fault) {
        (self.broken, self.unentered) = (Some((0, cause)), 0);
        self.outlived = true;
    }

    fn wake_all(&mut self, effects: &mut Effects) {
        effects.wake.extend(self.running.values_mut().filter_map(|running| running.waker.take()));
    }

    /// A rank is gone, and everything that it sent is on the board.
    pub fn peer_down(&mut self, rank: Rank, fault: Fault, effects: &mut Effects) {
        // Each incarnation may have windows of groups.
        match reaches_nothing(fault) {
            true => self.custody.gone(rank, effects),
            false => self.custody.cut_off(rank, fault, effects),
        }
        if self.down.contains_key(&rank.0) {
            return;
        }
        let told = self.broken.map(|_| self.neighbours()).unwrap_or_default();
        self.down.insert(rank.0, fault);
        if !matches!(fault, Fault::PeerClosed(_)) {
            self.break_from(0, u64::MAX, fault, effects);
        }
        // It may have been gone before it was told, and have told nobody: who takes its place does.
        if self.broken.is_some() && !self.outlived && effects.relay.is_empty() {
            effects.relay = self.neighbours();
            effects.relay.retain(|neighbour| !told.contains(neighbour));
        }
        self.wake_all(effects);
        self.settle_all(effects);
    }

    /// A context takes nothing in any more of that incarnation of a rank, nor of one before it.
    pub fn drained(&mut self, context: ContextId, rank: Rank, incarnation: u32, effects: &mut Effects) {
        self.custody.drained(context, rank, incarnation, effects);
        self.settle_all(effects);
    }

    /// A rank was started again: groups to come may have it as a member. The operations of the job stay broken, as it knows
    /// nothing of those that the others count.
    pub fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        self.custody.back(rank, incarnation);
    }

    /// Whether a rank is gone from the windows of the job. One that was cut off before is when a context hears of its end.
    pub(super) fn is_gone(&self, rank: Rank) -> bool {
        let heard = |fault: &Fault| reaches_nothing(*fault) || self.custody.drained.latest(rank) > 0;
        self.down.get(&rank.0).is_some_and(heard)
    }

    /// Whether nothing of such a rank is on its way any more. The windows of the job were made with its first incarnation here.
    fn is_drained(&self, rank: Rank) -> bool {
        self.custody.drained.all_before(rank, 1)
    }

    pub fn close(&mut self, effects: &mut Effects) {
        self.closed = true;
        self.wake_all(effects);
        self.custody.wake_all(effects);
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// A record has arrived.
    pub fn on_record(&mut self, source: Rank, record: Record, effects: &mut Effects) {
        match record {
            Record::Part { call, operation, round, blob } => {
                let fits = self.part(source, call, operation, round, blob, effects);
                effects.corrupt |= !fits;
            }
            Record::Release { window } => self.released_by(source, window, effects),
            Record::GroupRelease { key, answers } => {
                self.custody.released_by(source, key, answers, effects);
            }
            Record::Broken { first, unentered, cause } => {
                if !names_ranks_of(self.size, cause) {
                    effects.corrupt = true;
                    return;
                }
                self.break_from(first, unentered, cause, effects);
            }
        }
    }

    /// Whether an honest rank sends that.
    fn part(
        &mut self,
        source: Rank,
        call: Collective,
        operation: u64,
        round: u32,
        blob: Bytes,
        effects: &mut Effects,
    ) -> bool {
        if !self.is_expected(source, call, round, blob.len()) || operation >= self.next + MAX_AHEAD {
            return false;
        }
        let ours = self.running.get(&operation).map(|running| running.call);
        if let Collective::Free(window) = call {
            let window = self.whole_number(window, operation);
            self.released_by(source, window, effects);
        }
        match ours {
            Some(ours) if ours != call => {
                let cause = self.mismatch(source, call, ours);
                self.break_from(operation, u64::MAX, cause, effects);
                return true;
            }
            // Over, here at least.
            None if operation < self.next => return true,
            None => match *self.ahead.entry(operation).or_insert((source, call)) {
                (other, theirs) if theirs != call => {
                    let cause = Fault::CollectiveMismatch { ranks: [other, source], calls: [theirs, call] };
                    self.break_from(operation, u64::MAX, cause, effects);
                    return true;
                }
                _ => {}
            },
            Some(_) => {}
        }
        if !matches!(call, Collective::Free(_)) {
            if !blob.is_empty() {
                let stored = self.stored.entry(source.0).or_default();
                if *stored > MAX_STORED {
                    return false;
                }
                *stored += blob.len();
            }
            if let Some(old) = self.arrived.insert((operation, round, source.0), blob) {
                self.unstore(source.0, old.len());
            }
        }
        effects.wake.extend(self.running.get_mut(&operation).and_then(|running| running.waker.take()));
        true
    }

    /// Whether a part belongs into the pattern of its operation; see [`Exchange`](super::Exchange).
    fn is_expected(&self, source: Rank, call: Collective, round: u32, bytes: usize) -> bool {
        let distance = 1u32.checked_shl(round).filter(|distance| *distance < self.size);
        let blob = match call {
            Collective::Free(_) => return round == 0 && bytes == 0,
            Collective::Barrier => {
                return bytes == 0
                    && distance.is_some_and(|distance| self.after(source.0, distance) == self.me);
            }
            Collective::AllGather(blob) => u64::from(blob),
            _ => super::PART_BYTES as u64,
        };
        distance.is_some_and(|distance| {
            let blobs = u64::from(distance.min(self.size - distance));
            self.after(self.me, distance) == source.0 && bytes as u64 == blobs * blob
        })
    }

    /// A window's number from its low half: a window is older than its free, by less than 2^32 operations.
    fn whole_number(&self, window: WindowId, operation: u64) -> u64 {
        let number = operation & !u64::from(u32::MAX) | u64::from(window.0);
        if number > operation { number.wrapping_sub(1 << 32) } else { number }
    }

    /// Keeps the memory of this rank's part until nobody can reach it any more.
    pub fn track(&mut self, window: u64, own: Option<(Arc<dyn Device>, Allocation)>) {
        let mut by = vec![false; self.size as usize];
        for source in self.early.remove(&window).unwrap_or_default() {
            by[source as usize] = true;
        }
        self.windows.insert(window, Tracked { own, here: false, awaited: false, by });
    }

    fn released_by(&mut self, source: Rank, window: u64, effects: &mut Effects) {
        match self.windows.get_mut(&window) {
            Some(tracked) => {
                if let Some(by) = tracked.by.get_mut(source.index()) {
                    *by = true;
                }
                self.wake_all(effects);
                self.settle(window, effects);
            }
            // A rank whose part in making the window failed may say so before this one begins to make it.
            None if window >= self.next && window - self.next < MAX_AHEAD => {
                let sources = self.early.entry(window).or_default();
                if !sources.contains(&source.0) {
                    sources.push(source.0);
                }
            }
            None => {}
        }
    }

    /// This rank releases a window. `awaited`: a task waits until all have.
    pub fn release(&mut self, window: u64, awaited: bool, effects: &mut Effects) {
        if let Some(tracked) = self.windows.get_mut(&window) {
            (tracked.here, tracked.awaited) = (true, awaited);
            self.settle(window, effects);
        }
    }

    /// Whether every rank released a window or is gone, or nobody ever had it.
    pub fn is_released(&self, window: u64) -> bool {
        self.is_past(window, |rank| self.is_gone(rank))
    }

    /// Whether nobody can reach this rank's part of a window any more: as [`is_released`](Self::is_released), and nothing
    /// of who is gone is on its way through any context.
    pub fn is_unused(&self, window: u64) -> bool {
        self.is_past(window, |rank| self.is_gone(rank) && self.is_drained(rank))
    }

    fn is_past(&self, window: u64, is_gone: impl Fn(Rank) -> bool) -> bool {
        let Some(tracked) = self.windows.get(&window) else { return true };
        let released = |rank: u32| rank == self.me || tracked.by[rank as usize] || is_gone(Rank(rank));
        tracked.here && (window >= self.unentered || (0..self.size).all(released))
    }

    /// Forgets a window; what it had here is unused.
    pub fn forget(&mut self, window: u64) -> Unused {
        Unused::of(self.windows.remove(&window).and_then(|tracked| tracked.own))
    }

    fn settle(&mut self, window: u64, effects: &mut Effects) {
        if self.windows.get(&window).is_some_and(|tracked| !tracked.awaited) && self.is_unused(window) {
            effects.unused.push(self.forget(window));
        }
    }

    fn settle_all(&mut self, effects: &mut Effects) {
        let windows: Vec<u64> = self.windows.keys().copied().collect();
        for window in windows {
            self.settle(window, effects);
        }
    }

    /// Windows of which memory may be in use.
    #[cfg(test)]
    pub fn tracked(&self) -> usize {
        self.windows.len()
    }

    /// Things that are kept for operations to come.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.arrived.len() + self.ahead.len() + self.early.len()
    }

    /// The others.
    pub fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        let (me, size) = (self.me, self.size);
        (0..size).filter(move |rank| *rank != me).map(Rank)
    }
}
