//! An endpoint's block: whether it sleeps, and a bitmap of the lanes that have something for it.
//!
//! Senders set a lane's bit only when the reader does not poll that lane; the bits are hints, and the lane itself
//! is always looked at. Falling asleep is one half of an asymmetric Dekker handshake (see `docs` of
//! [`ReadySet::announce`] for the other): set *armed*, fence heavily, look once more.

use posthaste_core::memory::{SharedSlice, Words};
use posthaste_core::sync::Ordering;

const ARMED: usize = 0;
const WATCHING: usize = 1;
const BITS: usize = 8;

/// The word of a block that is not 0 if writers of memory are to ring.
pub fn watching(block: SharedSlice) -> Option<SharedSlice> {
    block.slice(8 * WATCHING as u64, 8)
}

/// The block of one endpoint, seen by its owner and by everybody who sends to it.
#[derive(Clone, Debug)]
pub struct ReadySet<W> {
    block: W,
    words: usize,
}

impl<W: Words> ReadySet<W> {
    /// The block of an endpoint that can hear from `sources` endpoints.
    pub fn new(block: W, sources: usize) -> Self {
        Self { block, words: sources.div_ceil(64) }
    }

    /// A sender whose reader wants to be told: sets the lane's bit, and rings the reader if it sleeps.
    ///
    /// Both steps are sequentially consistent: either the reader that goes to sleep sees the bit, or this side sees it
    /// armed. A bit that this side has set before and the reader has not taken yet need not be set again: the record was
    /// published with a light fence behind it, so a reader that has taken the bit meanwhile and falls asleep either shows
    /// that here or finds the record when it looks once more behind its heavy fence.
    pub fn announce(&self, source: usize, ring: impl FnOnce()) {
        if self.is_announced(source) {
            return;
        }
        self.block.fetch_or(BITS + source / 64, 1 << (source % 64));
        self.ring_out_of(self.block.load(ARMED, Ordering::SeqCst), ring);
    }

    /// Whether the bit of that lane is set. Only its sender sets it: [`announce`](Self::announce) has nothing to do then.
    #[inline]
    pub fn is_announced(&self, source: usize) -> bool {
        self.block.load(BITS + source / 64, Ordering::Relaxed) & 1 << (source % 64) != 0
    }

    /// Rings the endpoint if it sleeps. What it would have to see has been published before, with a light fence behind it.
    pub fn ring_if_asleep(&self, ring: impl FnOnce()) {
        self.ring_out_of(self.block.load(ARMED, Ordering::Relaxed), ring);
    }

    /// The same of what was written to the endpoint's memory at once, which it wants to be told of only if tasks wait there.
    #[inline]
    pub fn ring_for_memory(&self, ring: impl FnOnce()) {
        if self.block.load(WATCHING, Ordering::Relaxed) != 0 {
            self.ring_if_asleep(ring);
        }
    }

    /// Rings first and says then that it did, of that sleep: whoever is stopped before it has rung has taken no promise that
    /// others rely on, and who is stopped behind it takes none of a later sleep.
    fn ring_out_of(&self, sleep: u64, ring: impl FnOnce()) {
        if sleep != 0 {
            ring();
            self.block.compare_exchange(ARMED, sleep, 0);
        }
    }

    /// From the next sleep on, whether writers of memory ring. Shown before that sleep is armed.
    pub fn watch(&self, watching: bool) {
        self.block.store(WATCHING, u64::from(watching), Ordering::Relaxed);
    }

    /// Takes all bits and hands out the sources they stand for. Returns whether there were any.
    #[inline]
    pub fn collect(&self, mut source: impl FnMut(usize)) -> bool {
        let mut any = false;
        for word in 0..self.words {
            if self.block.load(BITS + word, Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = self.block.swap(BITS + word, 0);
            any |= bits != 0;
            while bits != 0 {
                source(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        any
    }

    /// Whether a bit is set.
    #[inline]
    pub fn has_any(&self) -> bool {
        (0..self.words).any(|word| self.block.load(BITS + word, Ordering::Relaxed) != 0)
    }

    /// From now on senders ring; `sleep` is the number of this sleep, not 0. Must be followed by a heavy fence and a last look,
    /// be it later.
    pub fn arm(&self, sleep: u64) {
        self.block.store(ARMED, sleep, Ordering::Relaxed);
    }

    /// Whether nobody has said that it has rung since it was armed.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.block.load(ARMED, Ordering::Relaxed) != 0
    }

    /// Awake again.
    pub fn disarm(&self) {
        self.block.store(ARMED, 0, Ordering::Relaxed);
    }
}
