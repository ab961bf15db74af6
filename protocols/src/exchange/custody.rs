//! Windows of groups: what keeps a rank's part taken until no other member can reach it any more (I10).
//!
//! A window of a group is named by the group in which it was made and by the number of the operation that made it, which
//! every member knows before it tells of its part. A member that has freed it, or that failed to make it, releases it
//! towards the others. A part goes back when all of them have released it or are gone.

use super::board::{Effects, Unused};
use super::{Exchange, Record};
use posthaste_core::context::poll_until;
use posthaste_core::device::Allocation;
use posthaste_core::{Device, Fault, Rank};
use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;

/// Releases of one peer that may wait for this rank to begin what it was a part of.
const MOST_EARLY: usize = 4096;

/// The group in which a window was made, and the number of the operation.
pub(crate) type Key = (u64, u64);

struct Held {
    own: Vec<(Arc<dyn Device>, Allocation)>,
    /// This rank has released it.
    here: bool,
    /// A task of this rank waits for the others.
    awaited: bool,
    /// Members that may still reach it.
    others: Vec<Rank>,
    waker: Option<Waker>,
}

/// The windows of groups of which a part of this rank may be in use.
#[derive(Default)]
pub(super) struct Custody {
    held: HashMap<Key, Held>,
    /// Who has released windows that this rank has yet to hear of.
    early: HashMap<Key, Vec<Rank>>,
    /// How many of those, by who it was.
    early_of: HashMap<Rank, usize>,
}

impl Custody {
    /// Keeps this rank's part until none of the others can reach it.
    pub fn track(&mut self, key: Key, mut others: Vec<Rank>, own: Option<(Arc<dyn Device>, Allocation)>) {
        for source in self.early.remove(&key).unwrap_or_default() {
            others.retain(|other| *other != source);
            if let Some(count) = self.early_of.get_mut(&source) {
                *count = count.saturating_sub(1);
            }
        }
        let own = own.into_iter().collect();
        self.held.insert(key, Held { own, here: false, awaited: false, others, waker: None });
    }

    /// More memory goes the way of what is kept under that key. What is not kept is given back: nobody has heard of it.
    pub fn add(&mut self, key: Key, own: (Arc<dyn Device>, Allocation), effects: &mut Effects) {
        match self.held.get_mut(&key) {
            Some(held) => held.own.push(own),
            None => effects.unused.push(Unused::of([own])),
        }
    }

    /// Another member has released a window.
    pub fn released_by(&mut self, source: Rank, key: Key, effects: &mut Effects) {
        if self.held.contains_key(&key) {
            return self.strike(source, key, effects);
        }
        let count = self.early_of.entry(source).or_default();
        let sources = self.early.entry(key).or_default();
        if sources.contains(&source) {
            return;
        }
        effects.corrupt |= *count >= MOST_EARLY;
        if *count < MOST_EARLY {
            *count += 1;
            sources.push(source);
        }
    }

    /// A rank is gone, and reaches nothing any more.
    pub fn gone(&mut self, rank: Rank, effects: &mut Effects) {
        let keys: Vec<Key> = self.held.keys().copied().collect();
        keys.into_iter().for_each(|key| self.strike(rank, key, effects));
    }

    fn strike(&mut self, rank: Rank, key: Key, effects: &mut Effects) {
        let Some(held) = self.held.get_mut(&key) else { return };
        held.others.retain(|other| *other != rank);
        effects.wake.extend(held.waker.take());
        self.settle(key, effects);
    }

    /// This rank releases a window. `awaited`: a task waits until all have.
    pub fn release(&mut self, key: Key, awaited: bool, effects: &mut Effects) {
        if let Some(held) = self.held.get_mut(&key) {
            (held.here, held.awaited) = (true, awaited);
            self.settle(key, effects);
        }
    }

    /// Whether no member can reach this rank's part any more.
    pub fn is_unused(&self, key: Key) -> bool {
        self.held.get(&key).is_none_or(|held| held.here && held.others.is_empty())
    }

    fn settle(&mut self, key: Key, effects: &mut Effects) {
        if self.held.get(&key).is_some_and(|held| !held.awaited) && self.is_unused(key) {
            let own = self.held.remove(&key).map(|held| held.own);
            effects.unused.push(Unused::of(own.unwrap_or_default()));
        }
    }

    fn wait(&mut self, key: Key, waker: &Waker) {
        if let Some(held) = self.held.get_mut(&key) {
            held.waker = Some(waker.clone());
        }
    }

    /// The client closes.
    pub fn wake_all(&mut self, effects: &mut Effects) {
        effects.wake.extend(self.held.values_mut().filter_map(|held| held.waker.take()));
    }
}

impl Exchange {
    /// From now on this rank's part of a window is in use; `others` may reach it, unless they are gone.
    pub(crate) fn hold(&self, key: Key, others: Vec<Rank>, own: Option<(Arc<dyn Device>, Allocation)>) {
        self.with_board(|board, effects| {
            let gone: Vec<Rank> = others.iter().copied().filter(|rank| board.is_gone(*rank)).collect();
            board.custody.track(key, others, own);
            gone.into_iter().for_each(|rank| board.custody.gone(rank, effects));
        });
    }

    /// More of this rank's memory is in use for as long as what is held under that key.
    pub(crate) fn hold_more(&self, key: Key, own: (Arc<dyn Device>, Allocation)) {
        self.with_board(|board, effects| board.custody.add(key, own, effects));
    }

    /// This rank reaches nothing of a window any more, and tells the others so. Its own part goes back when they have done
    /// the same.
    pub(crate) fn let_go(&self, key: Key, others: &[Rank]) {
        self.protocol.notify_these(others.to_vec(), Record::group_release(key).freeze());
        self.with_board(|board, effects| board.custody.release(key, false, effects));
    }

    /// As [`let_go`](Self::let_go), and waits for the others.
    ///
    /// # Errors
    /// If the job is left meanwhile.
    pub(crate) async fn let_go_together(&self, key: Key, others: &[Rank]) -> Result<(), Fault> {
        self.protocol.notify_these(others.to_vec(), Record::group_release(key).freeze());
        // Its end, by whatever cause, gives the part back or leaves that to the last of the others.
        let leaving = LettingGo { exchange: self, key };
        self.with_board(|board, effects| board.custody.release(key, true, effects));
        let Exchange { protocol, handle, .. } = self;
        let waited = std::future::poll_fn(|cx| {
            let done = || {
                let board = protocol.board();
                match board.custody.is_unused(key) {
                    true => Some(Ok(())),
                    false => board.is_closed().then_some(Err(Fault::Shutdown)),
                }
            };
            poll_until(handle, cx, done, |waker| protocol.board().custody.wait(key, waker))
        });
        let waited = waited.await;
        drop(leaving);
        waited
    }
}

struct LettingGo<'e> {
    exchange: &'e Exchange,
    key: Key,
}

impl Drop for LettingGo<'_> {
    fn drop(&mut self) {
        self.exchange.with_board(|board, effects| board.custody.release(self.key, false, effects));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = (7, 3);

    fn unused(effects: &mut Effects) -> usize {
        effects.unused.drain(..).count()
    }

    #[test]
    fn a_part_goes_back_when_all_have_released_it_or_are_gone() {
        let (mut custody, mut effects) = (Custody::default(), Effects::default());
        custody.released_by(Rank(1), KEY, &mut effects);
        custody.released_by(Rank(1), KEY, &mut effects);
        custody.track(KEY, vec![Rank(1), Rank(2), Rank(3)], None);
        custody.release(KEY, false, &mut effects);
        custody.released_by(Rank(2), (7, 4), &mut effects);
        custody.released_by(Rank(3), KEY, &mut effects);
        assert!(unused(&mut effects) == 0 && !custody.is_unused(KEY), "rank 2 may still reach it");
        custody.gone(Rank(2), &mut effects);
        assert!(unused(&mut effects) == 1 && custody.held.is_empty() && !effects.corrupt);
    }

    #[test]
    fn whoever_waits_takes_it_and_this_rank_counts_too() {
        let (mut custody, mut effects) = (Custody::default(), Effects::default());
        custody.track(KEY, vec![Rank(1)], None);
        custody.released_by(Rank(1), KEY, &mut effects);
        assert!(!custody.is_unused(KEY), "it is in use here");
        custody.release(KEY, true, &mut effects);
        assert!(custody.is_unused(KEY) && unused(&mut effects) == 0, "who waits for it has not seen that");
        custody.release(KEY, false, &mut effects);
        assert_eq!(unused(&mut effects), 1);
    }

    #[test]
    fn a_peer_that_releases_what_nobody_knows_is_bounded() {
        let (mut custody, mut effects) = (Custody::default(), Effects::default());
        for number in 0..MOST_EARLY as u64 {
            custody.released_by(Rank(1), (1, number), &mut effects);
        }
        assert!(!effects.corrupt);
        custody.released_by(Rank(1), (1, u64::MAX), &mut effects);
        assert!(effects.corrupt);
        let mut effects = Effects::default();
        custody.track((1, 5), vec![Rank(1)], None);
        custody.released_by(Rank(1), (2, 0), &mut effects);
        custody.released_by(Rank(2), (2, 0), &mut effects);
        assert!(!effects.corrupt, "there is room again, and everybody has their own");
    }
}
