//! Completion slots: where the end of an operation is written once and read by its future.
//!
//! ```text
//!             alloc              complete (value written, then released)
//!   FREE ---------------> PENDING ----------------------------------> DONE
//!    ^                      |  | a task sleeps: WAITED, and complete   |
//!    |                      |  | wakes it                              | future takes the value
//!    |                      v  v future dropped                        | or is dropped
//!    +------------------ DETACHED <- complete: value dropped           |
//!    +-----------------------------------------------------------------+
//! ```
//! Slots live in chunks that never move, so a future reaches its slot without the progress token. One
//! [`Completer`] exists per pool; it is owned by the progress engine, which makes "completed at most once" a
//! matter of `&mut`. It alone takes slots, from a list of its own that needs no atomics; futures that end outside the
//! token return theirs over a stack that is only ever taken whole, so that it has no ABA problem.
#![allow(unsafe_code)]

use crate::error::Fault;
use crate::ids::Rank;
use crate::sync::{Arc, AtomicU32, AtomicU64, AtomicWaker, Ordering, UnsafeCell};
use bytes::Bytes;
use std::sync::OnceLock;
use std::task::{Context, Poll};

const FREE: u32 = 0;
const PENDING: u32 = 1;
const DONE: u32 = 2;
const DETACHED: u32 = 3;
/// Pending, and a waker is registered.
const WAITED: u32 = 4;

/// Chunks double in size: 64, 128, ... slots.
const FIRST_CHUNK: usize = 64;
const CHUNKS: usize = 15;
/// Operations that a context can have under way.
pub(crate) const MOST_SLOTS: usize = FIRST_CHUNK * ((1 << CHUNKS) - 1);
/// In a ticket's lower half: no slot has so high an index.
const COUNTED: u32 = 1 << 31;
/// Longest value that is kept in the slot itself, in bytes.
pub const SMALL_VALUE: usize = 64;

/// What an operation ended with.
///
/// # Examples
/// ```
/// use posthaste_core::Value;
///
/// let short = Value::copy(b"in place");
/// assert!(matches!(short, Value::Small { len: 8, .. }));
/// assert!(matches!(Value::copy(&[0; 65]), Value::Bytes(_)));
/// assert_eq!(short.as_bytes(), b"in place");
/// assert!(Value::Unit.into_bytes().is_empty());
/// ```
// Values are moved often, as whole words: what is moved in odd pieces, one of which lies across two of the last move's, waits
// for these to be stored each time.
#[derive(Clone, Debug)]
#[repr(u64)]
pub enum Value {
    /// Nothing but the fact that it ended.
    Unit,
    /// Up to [`SMALL_VALUE`] bytes, kept in place.
    Small {
        /// The bytes; those past `len` are zero.
        bytes: [u8; SMALL_VALUE],
        /// Number of bytes.
        len: u8,
    },
    /// Any number of bytes.
    Bytes(Bytes),
}

impl Value {
    /// Copies short bytes in place, longer ones into a `Bytes`.
    #[must_use]
    #[inline]
    pub fn copy(source: &[u8]) -> Value {
        if source.len() <= SMALL_VALUE {
            let mut bytes = [0; SMALL_VALUE];
            bytes[..source.len()].copy_from_slice(source);
            Value::Small { len: source.len() as u8, bytes }
        } else {
            Value::Bytes(Bytes::copy_from_slice(source))
        }
    }

    /// One word in place, in native byte order.
    #[must_use]
    #[inline]
    pub fn word(word: u64) -> Value {
        let bytes = zerocopy::transmute!([word, 0, 0, 0, 0, 0, 0, 0]);
        Value::Small { bytes, len: 8 }
    }

    /// The bytes of the value.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Value::Unit => &[],
            Value::Small { len, bytes } => &bytes[..(*len as usize).min(SMALL_VALUE)],
            Value::Bytes(bytes) => bytes,
        }
    }

    /// The value as owned bytes.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self {
            Value::Bytes(bytes) => bytes,
            other => Bytes::copy_from_slice(other.as_bytes()),
        }
    }
}

/// How an operation ended.
pub type Outcome = Result<Value, Fault>;

#[derive(Debug)]
struct Slot {
    state: AtomicU32,
    /// Counts lives; a ticket of an earlier life names nothing.
    generation: AtomicU32,
    /// The peer on which the operation depends.
    peer: AtomicU32,
    next_free: AtomicU32,
    /// What the engine wants to remember about the operation.
    note: AtomicU64,
    waker: AtomicWaker,
    outcome: UnsafeCell<Option<Outcome>>,
}

impl Slot {
    fn new(next_free: u32) -> Self {
        Self {
            state: AtomicU32::new(FREE),
            generation: AtomicU32::new(1),
            peer: AtomicU32::new(u32::MAX),
            next_free: AtomicU32::new(next_free),
            note: AtomicU64::new(0),
            waker: AtomicWaker::new(),
            outcome: UnsafeCell::new(None),
        }
    }

    /// The slot's life ends.
    #[inline]
    fn retire(&self) {
        let generation = self.generation.load(Ordering::Relaxed).wrapping_add(1);
        self.generation.store(generation, Ordering::Relaxed);
        self.state.store(FREE, Ordering::Release);
    }

    /// The outcome, if it is there.
    #[inline]
    fn finished(&self, ticket: Ticket) -> Option<Outcome> {
        // Acquire pairs with the AcqRel swap of `complete`.
        if self.state.load(Ordering::Acquire) != DONE {
            return None;
        }
        debug_assert_eq!(self.generation.load(Ordering::Relaxed), ticket.generation());
        // SAFETY: DONE was seen with acquire, so the completer is through; the ticket's owner is the only reader.
        self.outcome.with_mut(|cell| unsafe { (*cell).take() })
    }
}

/// Names one life of one slot; travels through descriptors and over the wire as a word. 0 is no ticket.
///
/// # Examples
/// ```
/// use posthaste_core::slot::SlotPool;
/// use posthaste_core::{Ticket, Value};
///
/// let (pool, mut completer) = SlotPool::new();
/// let ticket = completer.alloc(None).expect("slots are free");
/// // It goes to a peer and comes back as a word.
/// let back = Ticket::from_word(ticket.to_word()).expect("0 alone is none");
/// assert!(completer.complete(back, Ok(Value::Unit)));
/// assert!(pool.take(ticket).is_some());
/// assert!(!completer.complete(back, Ok(Value::Unit)), "the operation has ended");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

impl Ticket {
    /// The ticket as a word.
    #[must_use]
    pub const fn to_word(self) -> u64 {
        self.0
    }

    /// A ticket from a word; whether it names a living operation is checked when it is used.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Ticket> {
        if word as u32 == 0 { None } else { Some(Ticket(word)) }
    }

    /// A ticket that names no slot but a part of something that is counted; its end moves a counter.
    pub(crate) const fn counted(key: u32, generation: u32) -> Ticket {
        Ticket((generation as u64) << 32 | (COUNTED | key) as u64)
    }

    /// The key and the generation of what is counted.
    #[inline]
    pub(crate) const fn as_counted(self) -> Option<(u32, u32)> {
        let low = self.0 as u32;
        if low & COUNTED == 0 { None } else { Some((low & !COUNTED, (self.0 >> 32) as u32)) }
    }

    const fn index(self) -> usize {
        self.0 as u32 as usize - 1
    }

    const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The slots of one context.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use posthaste_core::{Value, slot::SlotPool};
/// use std::future::poll_fn;
///
/// let (pool, mut completer) = SlotPool::new();
/// let ticket = completer.alloc(None).expect("slots are free");
/// // A future waits by the pool; the engine ends the operation by the completer.
/// let wait = poll_fn(|cx| pool.poll(ticket, cx));
/// let end = async { assert!(completer.complete(ticket, Ok(Value::copy(b"done")))) };
/// let (outcome, ()) = tokio::join!(wait, end);
/// assert_eq!(outcome.expect("it ended well").as_bytes(), b"done");
/// # }
/// ```
#[derive(Debug)]
pub struct SlotPool {
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    /// Index + 1 of the first slot on the stack of returned ones, 0 for none.
    returned: AtomicU32,
    /// How often a task was woken because its operation has ended. Written by the completer alone.
    wakes: AtomicU32,
}

// SAFETY: `outcome` is written by the only Completer while the slot is PENDING or DETACHED and is read by the one
// future that owns the ticket after it has seen DONE (acquire, paired with the release of `complete`).
unsafe impl Sync for SlotPool {}
// SAFETY: outcomes are Send.
unsafe impl Send for SlotPool {}

#[inline]
fn locate(index: usize) -> (usize, usize) {
    let chunk = ((index / FIRST_CHUNK) + 1).ilog2() as usize;
    (chunk, index - FIRST_CHUNK * ((1 << chunk) - 1))
}

impl SlotPool {
    /// An empty pool and its only completer.
    #[must_use]
    pub fn new() -> (Arc<SlotPool>, Completer) {
        let pool = Arc::new(SlotPool {
            chunks: std::array::from_fn(|_| OnceLock::new()),
            returned: AtomicU32::new(0),
            wakes: AtomicU32::new(0),
        });
        (pool.clone(), Completer { pool, free: 0, grown: 0 })
    }

    /// How often a task was woken because its operation has ended.
    #[inline]
    pub(crate) fn wakes(&self) -> u32 {
        self.wakes.load(Ordering::Relaxed)
    }

    #[inline]
    fn slot(&self, index: usize) -> Option<&Slot> {
        let (chunk, offset) = locate(index);
        self.chunks.get(chunk)?.get()?.get(offset)
    }

    /// Returns a slot from outside the token.
    fn release(&self, index: usize) {
        let Some(slot) = self.slot(index) else { return };
        slot.retire();
        let mut head = self.returned.load(Ordering::Relaxed);
        loop {
            slot.next_free.store(head, Ordering::Relaxed);
            // Release pairs with the acquire of `Completer::restock`.
            match self.returned.compare_exchange_weak(
                head,
                index as u32 + 1,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(seen) => head = seen,
            }
        }
    }

    /// Whether the operation has ended. Cheap: one load.
    #[inline]
    #[must_use]
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.slot(ticket.index()).is_some_and(|slot| slot.state.load(Ordering::Relaxed) == DONE)
    }

    /// Takes the outcome if there is one; the ticket is spent then. Only the owner of the ticket calls this.
    #[must_use]
    pub fn take(&self, ticket: Ticket) -> Option<Outcome> {
        let outcome = self.slot(ticket.index())?.finished(ticket)?;
        self.release(ticket.index());
        Some(outcome)
    }

    /// Registers for a wake-up and takes the outcome if it is there. After `Ready` the ticket is spent.
    pub fn poll(&self, ticket: Ticket, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Some(outcome) = self.take(ticket) {
            return Poll::Ready(outcome);
        }
        if let Some(slot) = self.slot(ticket.index()) {
            slot.waker.register(cx.waker());
            // Release shows the waker to `complete`; a slot that is DONE is taken below.
            let _ = slot.state.compare_exchange(PENDING, WAITED, Ordering::Release, Ordering::Relaxed);
        }
        match self.take(ticket) {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }

    /// The owner of the ticket is no longer interested. Returns whether the operation had already ended.
    pub fn detach(&self, ticket: Ticket) -> bool {
        let Some(slot) = self.slot(ticket.index()) else { return false };
        // Pairs with the swap of `complete`: exactly one of the two sees the other and frees the slot. A slot that is
        // DONE stays so until it is free, or a second completion (by `fail`, or by a peer that sends two) would take
        // it for pending.
        let mut state = slot.state.load(Ordering::Acquire);
        while state == PENDING || state == WAITED {
            match slot.state.compare_exchange(state, DETACHED, Ordering::Release, Ordering::Acquire) {
                Ok(_) => return false,
                Err(seen) => state = seen,
            }
        }
        if state != DONE {
            return false;
        }
        // SAFETY: the completer is through (DONE was seen) and the owner is this caller.
        slot.outcome.with_mut(|cell| unsafe { drop((*cell).take()) });
        self.release(ticket.index());
        true
    }
}

/// The right to take and to complete slots of one pool; owned by the progress engine.
///
/// # Examples
/// ```
/// use posthaste_core::slot::SlotPool;
/// use posthaste_core::{Fault, Rank, Value};
///
/// let (pool, mut completer) = SlotPool::new();
/// let [one, two] = [1, 2].map(|rank| completer.alloc(Some(Rank(rank))).expect("slots are free"));
/// // Rank 1 is lost, and with it what depends on it.
/// assert_eq!(completer.fail(Some(Rank(1)), Fault::PeerLost(Rank(1))), 1);
/// assert_eq!(pool.take(one).and_then(Result::err), Some(Fault::PeerLost(Rank(1))));
/// assert!(completer.is_pending(two));
/// # completer.complete(two, Ok(Value::Unit));
/// ```
#[derive(Debug)]
pub struct Completer {
    pool: Arc<SlotPool>,
    /// Index + 1 of the first free slot of the engine's own list, 0 for none.
    free: u32,
    /// Chunks that exist.
    grown: usize,
}

impl Completer {
    /// Takes a free slot for an operation that depends on `peer` (or on none). `None` if all are in use, which
    /// takes two million operations at once.
    #[inline]
    #[must_use]
    pub fn alloc(&mut self, peer: Option<Rank>) -> Option<Ticket> {
        self.alloc_noted(peer, 0)
    }

    /// As [`alloc`](Self::alloc), and remembers a word with the operation.
    #[inline]
    #[must_use]
    pub fn alloc_noted(&mut self, peer: Option<Rank>, note: u64) -> Option<Ticket> {
        if self.free == 0 {
            self.restock()?;
        }
        let index = self.free - 1;
        let slot = self.pool.slot(index as usize)?;
        self.free = slot.next_free.load(Ordering::Relaxed);
        slot.peer.store(peer.map_or(u32::MAX, |rank| rank.0), Ordering::Relaxed);
        slot.note.store(note, Ordering::Relaxed);
        let generation = slot.generation.load(Ordering::Relaxed);
        // Release: the slot's last life is over for whoever sees it PENDING.
        slot.state.store(PENDING, Ordering::Release);
        Some(Ticket(u64::from(generation) << 32 | u64::from(index + 1)))
    }

    /// Whether the operation has not ended, and somebody waits for it.
    #[must_use]
    pub fn is_pending(&self, ticket: Ticket) -> bool {
        matches!(self.state_of(ticket), Some(PENDING | WAITED))
    }

    /// Whether the operation has not ended, be it that nobody waits for it any more.
    #[must_use]
    pub fn is_under_way(&self, ticket: Ticket) -> bool {
        matches!(self.state_of(ticket), Some(PENDING | WAITED | DETACHED))
    }

    /// The state of the ticket's slot, if that is still in the life that the ticket names.
    fn state_of(&self, ticket: Ticket) -> Option<u32> {
        let slot = self.pool.slot(ticket.index())?;
        let state = slot.state.load(Ordering::Acquire);
        (slot.generation.load(Ordering::Relaxed) == ticket.generation()).then_some(state)
    }

    /// Takes over what futures have returned, or makes new slots.
    #[cold]
    fn restock(&mut self) -> Option<()> {
        // Acquire pairs with the release of `SlotPool::release`: the last lives of the slots are over.
        if self.pool.returned.load(Ordering::Relaxed) != 0 {
            self.free = self.pool.returned.swap(0, Ordering::Acquire);
            return Some(());
        }
        let chunk = self.grown;
        let cell = self.pool.chunks.get(chunk)?;
        let first = FIRST_CHUNK * ((1 << chunk) - 1);
        let len = if cfg!(posthaste_loom) { 2 } else { FIRST_CHUNK << chunk };
        let next = |at: usize| if at + 1 < len { (first + at) as u32 + 2 } else { 0 };
        let slots: Box<[Slot]> = (0..len).map(|at| Slot::new(next(at))).collect();
        cell.set(slots).ok()?;
        self.grown += 1;
        self.free = first as u32 + 1;
        Some(())
    }

    #[inline]
    fn free(&mut self, index: usize) {
        if let Some(slot) = self.pool.slot(index) {
            slot.retire();
            slot.next_free.store(self.free, Ordering::Relaxed);
            self.free = index as u32 + 1;
        }
    }

    /// As [`SlotPool::take`], for an owner that has the progress token.
    #[inline]
    #[must_use]
    pub fn take(&mut self, ticket: Ticket) -> Option<Outcome> {
        let outcome = self.pool.slot(ticket.index())?.finished(ticket)?;
        self.free(ticket.index());
        Some(outcome)
    }

    /// Frees the slot of an operation that was never started: nobody else has its ticket.
    #[cold]
    pub fn give_up(&mut self, ticket: Ticket) {
        if self.pending(ticket).is_some() {
            self.free(ticket.index());
        }
    }

    #[inline]
    fn pending(&self, ticket: Ticket) -> Option<&Slot> {
        let slot = self.pool.slot(ticket.index())?;
        // Acquire pairs with the release of `alloc`.
        let state = slot.state.load(Ordering::Acquire);
        let alive = matches!(state, PENDING | WAITED | DETACHED)
            && slot.generation.load(Ordering::Relaxed) == ticket.generation();
        alive.then_some(slot)
    }

    /// Ends the operation. Returns false if the ticket names none that is pending.
    pub fn complete(&mut self, ticket: Ticket, outcome: Outcome) -> bool {
        self.end(ticket, outcome).is_some()
    }

    /// Whether somebody still waits for the end of an operation that only this side can end. If nobody does, its slot is free.
    #[cold]
    pub(crate) fn is_still_wanted(&mut self, ticket: Ticket) -> bool {
        match self.state_of(ticket) {
            Some(PENDING | WAITED) => true,
            Some(DETACHED) => {
                // Acquired: its owner is through, and nobody else looks at it.
                self.free(ticket.index());
                false
            }
            _ => false,
        }
    }

    /// Takes over an operation that has not ended and that nobody waits for any more, for somebody who wants its outcome; false
    /// if there is none.
    #[cold]
    pub(crate) fn adopt(&mut self, ticket: Ticket) -> bool {
        if self.state_of(ticket) != Some(DETACHED) {
            return false;
        }
        let Some(slot) = self.pool.slot(ticket.index()) else { return false };
        // Its former owner is through (acquired), and nobody but the completer goes on from DETACHED.
        slot.state.store(PENDING, Ordering::Release);
        true
    }

    /// Ends the operation with a unit. Returns true only if its owner will see that.
    pub fn complete_if_wanted(&mut self, ticket: Ticket) -> bool {
        self.end(ticket, Ok(Value::Unit)) == Some(true)
    }

    /// `None`: no such operation. Otherwise whether its owner still waits for it.
    #[inline]
    fn end(&mut self, ticket: Ticket, outcome: Outcome) -> Option<bool> {
        let slot = self.pending(ticket)?;
        let wanted = Self::finish(&self.pool, slot, outcome);
        if !wanted {
            self.free(ticket.index());
        }
        Some(wanted)
    }

    /// Ends the operation of a slot that is pending; false if nobody wants its outcome, which is gone then.
    #[inline]
    fn finish(pool: &SlotPool, slot: &Slot, outcome: Outcome) -> bool {
        // SAFETY: the slot is pending in the ticket's life; only the completer (held by &mut) writes then.
        slot.outcome.with_mut(|cell| unsafe { *cell = Some(outcome) });
        // AcqRel: releases the outcome to `take`, and acquires the owner's last access if it detached, and its waker.
        match slot.state.swap(DONE, Ordering::AcqRel) {
            DETACHED => {
                // SAFETY: the owner gave the slot up; nobody else reads it.
                slot.outcome.with_mut(|cell| unsafe { drop((*cell).take()) });
                return false;
            }
            WAITED => {
                pool.wakes.store(pool.wakes().wrapping_add(1), Ordering::Relaxed);
                slot.waker.wake();
            }
            _ => {}
        }
        true
    }

    /// Wakes the owner of a pending operation without ending it. Returns false if there is none.
    pub fn nudge(&mut self, ticket: Ticket) -> bool {
        self.pending(ticket).map(|slot| slot.waker.wake()).is_some()
    }

    /// Remembers a word with a pending operation.
    pub fn set_note(&mut self, ticket: Ticket, note: u64) {
        if let Some(slot) = self.pending(ticket) {
            slot.note.store(note, Ordering::Relaxed);
        }
    }

    /// Ends the operation only if it depends on that peer: a peer cannot end what was asked of another. Returns the
    /// remembered word.
    #[inline]
    pub fn complete_from(&mut self, peer: Rank, ticket: Ticket, outcome: Outcome) -> Option<u64> {
        // `pending` first: it acquires what `alloc` wrote, so that the peer is that of this life.
        let slot = self.pending(ticket)?;
        if slot.peer.load(Ordering::Relaxed) != peer.0 {
            return None;
        }
        let note = slot.note.load(Ordering::Relaxed);
        if !Self::finish(&self.pool, slot, outcome) {
            self.free(ticket.index());
        }
        Some(note)
    }

    /// Tells of each operation that has not ended and that somebody waits for, whose loss would end it.
    pub fn awaited(&self, mut tell: impl FnMut(Option<Rank>)) {
        let slots = (0..).map_while(|index| self.pool.slot(index));
        for slot in slots {
            if matches!(slot.state.load(Ordering::Acquire), PENDING | WAITED) {
                let peer = slot.peer.load(Ordering::Relaxed);
                tell((peer != u32::MAX).then_some(Rank(peer)));
            }
        }
    }

    /// Ends all pending operations that depend on the peer (or all, for `None`). Returns their number.
    pub fn fail(&mut self, peer: Option<Rank>, fault: Fault) -> usize {
        let mut ended = 0;
        let mut index = 0;
        loop {
            let Some(slot) = self.pool.slot(index) else { return ended };
            let state = slot.state.load(Ordering::Acquire);
            let meant = peer.is_none_or(|rank| slot.peer.load(Ordering::Relaxed) == rank.0);
            if matches!(state, PENDING | WAITED | DETACHED) && meant {
                let generation = slot.generation.load(Ordering::Relaxed);
                let ticket = Ticket(u64::from(generation) << 32 | (index as u64 + 1));
                ended += usize::from(self.complete(ticket, Err(fault)));
            }
            index += 1;
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_located() {
        assert_eq!(locate(0), (0, 0));
        assert_eq!(locate(63), (0, 63));
        assert_eq!(locate(64), (1, 0));
        assert_eq!(locate(191), (1, 127));
        assert_eq!(locate(192), (2, 0));
    }

    #[test]
    fn a_slot_is_completed_once_and_reused_under_a_new_ticket() {
        let (pool, mut completer) = SlotPool::new();
        let first = completer.alloc(Some(Rank(3))).expect("free");
        completer.set_note(first, 7);
        assert_eq!(completer.complete_from(Rank(2), first, Ok(Value::Unit)), None, "another peer");
        assert_eq!(completer.complete_from(Rank(3), first, Ok(Value::copy(b"abc"))), Some(7));
        assert!(!completer.complete(first, Ok(Value::Unit)), "twice");
        assert_eq!(pool.take(first).expect("done").expect("value").as_bytes(), b"abc");
        let second = completer.alloc(None).expect("free");
        assert_ne!(first, second);
        assert!(!completer.complete(first, Ok(Value::Unit)), "stale");
        assert!(!pool.detach(second));
        assert!(completer.complete(second, Ok(Value::Unit)));
    }

    #[test]
    fn a_lost_peer_ends_its_operations_only() {
        let (pool, mut completer) = SlotPool::new();
        let tickets: Vec<_> = (0..1000).map(|i| completer.alloc(Some(Rank(i % 3))).expect("free")).collect();
        assert_eq!(completer.fail(Some(Rank(1)), Fault::PeerLost(Rank(1))), 333);
        for (i, ticket) in tickets.iter().enumerate() {
            assert_eq!(pool.take(*ticket).is_some(), i % 3 == 1);
        }
        assert_eq!(completer.fail(None, Fault::Shutdown), 667);
    }
}
