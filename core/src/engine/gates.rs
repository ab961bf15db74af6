//! Whether an access to mapped memory may be done by its caller at once.

use crate::ids::Rank;
use crate::passage::{self, Sitting};
use crate::sync::LightFence;
use std::sync::atomic::{AtomicU32, Ordering};

/// A word per rank that lets a put or get of mapped memory go ahead inline: 0 means that the peer is alive and
/// that nothing queued precedes. Shared by the contexts of a client.
#[derive(Debug)]
pub struct Gates {
    words: Box<[AtomicU32]>,
    /// The latest incarnation of each rank that all contexts can reach.
    incarnations: Box<[AtomicU32]>,
    light: LightFence,
}

/// Keeps a gate closed.
#[derive(Debug)]
pub struct Held {
    gates: crate::sync::Arc<Gates>,
    rank: Rank,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gates.queued(self.rank, -1);
    }
}

impl Gates {
    const DOWN: u32 = 1 << 31;
    /// Nothing is ever done inline.
    const OVER_SEND: u32 = 1 << 30;

    /// All open. `light`: what whoever passes one does behind saying so.
    #[must_use]
    pub fn new(ranks: usize, light: LightFence) -> Self {
        let zeros = || (0..ranks).map(|_| AtomicU32::new(0)).collect();
        Self { words: zeros(), incarnations: zeros(), light }
    }

    /// Which incarnation of a rank it is that all contexts can reach, if they can: 0 for the first one.
    #[must_use]
    pub fn incarnation_of(&self, rank: Rank) -> u32 {
        // Acquire pairs with the release of `restarted`.
        self.incarnations.get(rank.index()).map_or(0, |incarnation| incarnation.load(Ordering::Acquire))
    }

    /// All contexts can reach that incarnation of the rank.
    pub(crate) fn restarted(&self, rank: Rank, incarnation: u32) {
        if let Some(known) = self.incarnations.get(rank.index()) {
            known.fetch_max(incarnation, Ordering::AcqRel);
        }
    }

    /// The calling thread is amid an inline access, or asks whether it may go ahead, until this is dropped: whoever closes
    /// gates, or forbids it otherwise, can wait for that.
    #[inline(always)]
    #[must_use]
    pub fn pass(&self) -> Sitting<'static> {
        passage::enter(self.light)
    }

    /// Whether an inline access to memory of the rank may go ahead. One relaxed load, amid a [`pass`](Self::pass).
    #[inline]
    #[must_use]
    pub fn is_open(&self, rank: Rank) -> bool {
        self.words.get(rank.index()).is_some_and(|gate| gate.load(Ordering::Relaxed) == 0)
    }

    /// Whether puts and gets of that rank's memory are messages.
    #[must_use]
    pub fn goes_over_send(&self, rank: Rank) -> bool {
        self.words.get(rank.index()).is_none_or(|gate| gate.load(Ordering::Relaxed) & Self::OVER_SEND != 0)
    }

    /// Nothing is done inline at that rank until this is dropped: something precedes that has yet to be begun.
    pub fn hold(gates: &crate::sync::Arc<Gates>, rank: Rank) -> Held {
        gates.queued(rank, 1);
        Held { gates: gates.clone(), rank }
    }

    /// This side leaves: nothing of it reaches the memory of others any more.
    pub(crate) fn close_all(&self) {
        for gate in &self.words {
            gate.fetch_or(Self::DOWN, Ordering::SeqCst);
        }
    }

    /// Puts and gets of that rank's memory are messages, which none done inline may overtake.
    pub(super) fn close_over_send(&self, rank: Rank) {
        if let Some(gate) = self.words.get(rank.index()) {
            gate.fetch_or(Self::OVER_SEND, Ordering::SeqCst);
        }
    }

    pub(super) fn close_for_good(&self, rank: Rank) {
        if let Some(gate) = self.words.get(rank.index()) {
            gate.fetch_or(Self::DOWN, Ordering::SeqCst);
        }
    }

    pub(super) fn queued(&self, rank: Rank, change: i32) {
        if let Some(gate) = self.words.get(rank.index()) {
            gate.fetch_add(change as u32, Ordering::SeqCst);
        }
    }
}
