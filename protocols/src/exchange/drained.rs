//! Of which ranks that are gone the contexts of this client have taken in all that comes.

use posthaste_core::{ContextId, Rank};
use std::collections::HashMap;

/// A rank that is gone may have put something that a context has yet to take in: it lies in a lane, or in what the kernel keeps of
/// a connection. Each context comes to the end of that by itself. The first one, which has the books of windows, knows nothing of
/// what lies with the others, and an owned one comes to it when its owner looks.
pub(super) struct Drained {
    contexts: usize,
    /// By rank and context: the first incarnation of which something may still be taken in.
    next: HashMap<Rank, Box<[u32]>>,
}

impl Drained {
    pub fn new(contexts: u16) -> Drained {
        Drained { contexts: usize::from(contexts), next: HashMap::new() }
    }

    /// That context takes nothing in any more of this incarnation of a rank, nor of one before it.
    pub fn note(&mut self, context: ContextId, rank: Rank, incarnation: u32) {
        let contexts = self.contexts;
        let next = self.next.entry(rank).or_insert_with(|| vec![0; contexts].into());
        if let Some(next) = next.get_mut(context.index()) {
            *next = incarnation.saturating_add(1).max(*next);
        }
    }

    /// The first incarnation of a rank that no context knows to be gone.
    pub fn latest(&self, rank: Rank) -> u32 {
        self.next.get(&rank).and_then(|next| next.iter().max()).copied().unwrap_or(0)
    }

    /// Whether no context takes anything in any more of what was sent by incarnations of a rank before that one.
    pub fn all_before(&self, rank: Rank, incarnation: u32) -> bool {
        self.next.get(&rank).map_or(incarnation == 0, |next| next.iter().all(|next| *next >= incarnation))
    }
}
