//! Windows of groups: what keeps a rank's part taken until no other member can reach it any more (I10).
//!
//! A window of a group is named by the group in which it was made and by the number of the operation that made it, which
//! every member knows before it tells of its part. A member that has freed it, or that failed to make it, releases it
//! towards the others. A part goes back when all of them have released it or are gone. A member that never makes it, because
//! its group is gone or broken, answers such a release with its own.
//!
//! A member is gone for this when every context of the client has [taken in](Drained) all that comes of it: what it has put may
//! lie in the lane or the connection of any of them. Whoever waits for the others' release is not kept waiting for that, as nobody
//! knows when the owner of a context looks.

use super::board::{Effects, Unused};
use super::drained::Drained;
use super::{Exchange, ExchangeProtocol, Record};
use posthaste_core::context::poll_until;
use posthaste_core::device::Allocation;
use posthaste_core::sync::replace_waker;
use posthaste_core::{ContextId, Device, Fault, Rank};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::task::Waker;

/// Releases of one peer that may wait for this rank to begin what it was a part of.
const MOST_EARLY: usize = 4096;

/// Says of a window of a group whether it is never made here any more.
pub(super) type Never = Box<dyn Fn(Key) -> bool + Send + Sync>;

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
    /// Members that are gone and of which something may still come: what was sent by incarnations before these.
    late: Vec<(Rank, u32)>,
    /// Those who are to hear that this rank releases it. Whoever came in place of one that died knows nothing of it.
    tell: Vec<Rank>,
    waker: Option<Waker>,
}

/// The windows of groups of which a part of this rank may be in use.
pub(super) struct Custody {
    /// Of whom contexts have taken in all that comes.
    pub drained: Drained,
    held: HashMap<Key, Held>,
    /// Who has released windows that this rank has yet to hear of.
    early: HashMap<Key, Vec<Rank>>,
    /// How many of those, by who it was.
    early_of: HashMap<Rank, usize>,
    /// Windows that are being made here and have no number yet, by group.
    unnamed: HashMap<u64, usize>,
    /// Ranks that reach nothing any more.
    gone: HashSet<Rank>,
    /// Ranks that were cut off, and may reach memory here for as long as they live.
    cut: HashMap<Rank, Fault>,
    /// Of ranks that were started again, the incarnation that is there now.
    now: HashMap<Rank, u32>,
}

impl Custody {
    pub fn new(contexts: u16) -> Custody {
        Custody {
            drained: Drained::new(contexts),
            held: HashMap::new(),
            early: HashMap::new(),
            early_of: HashMap::new(),
            unnamed: HashMap::new(),
            gone: HashSet::new(),
            cut: HashMap::new(),
            now: HashMap::new(),
        }
    }

    /// Keeps this rank's part until none of the others can reach it.
    pub fn track(&mut self, key: Key, mut others: Vec<Rank>, own: Option<(Arc<dyn Device>, Allocation)>) {
        others.retain(|other| !self.gone.contains(other));
        let tell = others.clone();
        for source in self.take_early(key) {
            others.retain(|other| *other != source);
        }
        let own = own.into_iter().collect();
        // Whoever was gone before has not heard of it.
        let late = Vec::new();
        self.held.insert(key, Held { own, here: false, awaited: false, others, late, tell, waker: None });
    }

    fn take_early(&mut self, key: Key) -> Vec<Rank> {
        let sources = self.early.remove(&key).unwrap_or_default();
        sources.iter().for_each(|source| self.settled(*source));
        sources
    }

    /// One more answer to a rank is on its way; false: it reads none of so many.
    fn owe(&mut self, to: Rank) -> bool {
        let count = self.early_of.entry(to).or_default();
        let is_so = *count < MOST_EARLY;
        *count += usize::from(is_so);
        is_so
    }

    /// One release that came early is no longer kept, nor an answer to it.
    fn settled(&mut self, source: Rank) {
        if let Some(count) = self.early_of.get_mut(&source) {
            *count = count.saturating_sub(1);
        }
    }

    /// The windows of a group that others have released and that have no place here, unless one that is being made may be one
    /// of them.
    fn unmade(&self, group: u64) -> Vec<Key> {
        if self.unnamed.contains_key(&group) {
            return Vec::new();
        }
        self.early.keys().filter(|key| key.0 == group).copied().collect()
    }

    /// Whom to tell of a release, of those.
    fn to_tell(&self, key: Key, others: &[Rank]) -> Vec<Rank> {
        let held = self.held.get(&key);
        let is_told = |rank: &&Rank| held.is_none_or(|held| held.tell.contains(*rank));
        others.iter().filter(is_told).copied().collect()
    }

    /// More memory goes the way of what is kept under that key. What is not kept is given back: nobody has heard of it.
    pub fn add(&mut self, key: Key, own: (Arc<dyn Device>, Allocation), effects: &mut Effects) {
        match self.held.get_mut(&key) {
            Some(held) => held.own.push(own),
            None => effects.unused.push(Unused::of([own])),
        }
    }

    /// Another member has released a window.
    pub fn released_by(&mut self, source: Rank, key: Key, answers: bool, effects: &mut Effects) {
        if answers || self.held.contains_key(&key) {
            return self.strike(source, key, effects);
        }
        effects.early = Some(key.0);
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

    /// A rank is gone, and reaches nothing any more but by what it has sent before.
    pub fn gone(&mut self, rank: Rank, effects: &mut Effects) {
        self.gone.insert(rank);
        self.cut.remove(&rank);
        self.early_of.remove(&rank);
        self.early.retain(|_, sources| {
            sources.retain(|source| *source != rank);
            !sources.is_empty()
        });
        let keys: Vec<Key> = self.held.keys().copied().collect();
        keys.into_iter().for_each(|key| self.lose(rank, key, effects));
    }

    /// Nobody listens to a rank any more, which may live on. It is not waited for: what it may reach stays in use until it is
    /// gone.
    pub fn cut_off(&mut self, rank: Rank, fault: Fault, effects: &mut Effects) {
        if self.is_past(rank) {
            return self.gone(rank, effects);
        }
        self.cut.insert(rank, fault);
        self.wake_all(effects);
    }

    /// Whether a context knows that rank to be gone, as it is there now.
    fn is_past(&self, rank: Rank) -> bool {
        self.drained.latest(rank) > self.now.get(&rank).copied().unwrap_or(0)
    }

    /// Who was cut off of those that may still reach a window, and why.
    fn cut_off_of(&self, key: Key) -> Option<Fault> {
        self.held.get(&key)?.others.iter().find_map(|other| self.cut.get(other).copied())
    }

    /// A rank was started again, and windows to come are within its reach.
    pub fn back(&mut self, rank: Rank, incarnation: u32) {
        self.gone.remove(&rank);
        self.cut.remove(&rank);
        self.now.insert(rank, incarnation);
    }

    /// A member of a window's group is gone.
    fn lose(&mut self, rank: Rank, key: Key, effects: &mut Effects) {
        let next = self.drained.latest(rank);
        if let Some(held) = self.held.get_mut(&key) {
            held.tell.retain(|other| *other != rank);
            if held.others.contains(&rank) && !self.drained.all_before(rank, next) {
                held.late.push((rank, next));
            }
        }
        self.strike(rank, key, effects);
    }

    /// A context takes nothing in any more of that incarnation of a rank: what nobody else reaches goes back.
    pub fn drained(&mut self, context: ContextId, rank: Rank, incarnation: u32, effects: &mut Effects) {
        self.drained.note(context, rank, incarnation);
        if self.cut.contains_key(&rank) && self.is_past(rank) {
            self.gone(rank, effects);
        }
        let drained = &self.drained;
        let mut keys = Vec::new();
        for (key, held) in &mut self.held {
            let before = held.late.len();
            held.late.retain(|(late, next)| *late != rank || !drained.all_before(rank, *next));
            keys.extend((held.late.len() < before).then_some(*key));
        }
        keys.into_iter().for_each(|key| self.settle(key, effects));
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

    /// Whether every member has released a window or is gone.
    pub fn is_released(&self, key: Key) -> bool {
        self.held.get(&key).is_none_or(|held| held.here && held.others.is_empty())
    }

    /// Whether nothing of any member can reach this rank's part any more.
    fn is_unused(&self, key: Key) -> bool {
        self.is_released(key) && self.held.get(&key).is_none_or(|held| held.late.is_empty())
    }

    fn settle(&mut self, key: Key, effects: &mut Effects) {
        if self.held.get(&key).is_some_and(|held| !held.awaited) && self.is_unused(key) {
            let held = self.held.remove(&key);
            let (own, left) = held.map(|held| (held.own, held.waker)).unwrap_or_default();
            effects.unused.push(Unused::of(own));
            // Whoever waited does so no more; it is not to be dropped here, under the lock.
            effects.wake.extend(left);
        }
    }

    /// The waker that was there before, as of [`replace_waker`].
    fn wait(&mut self, key: Key, waker: &Waker) -> Option<Waker> {
        self.held.get_mut(&key).and_then(|held| replace_waker(&mut held.waker, waker))
    }

    /// The client closes.
    pub fn wake_all(&mut self, effects: &mut Effects) {
        effects.wake.extend(self.held.values_mut().filter_map(|held| held.waker.take()));
    }
}

impl Exchange {
    /// From now on this rank's part of a window is in use; `others` may reach it, unless they are gone.
    pub(crate) fn hold(&self, key: Key, others: Vec<Rank>, own: Option<(Arc<dyn Device>, Allocation)>) {
        self.protocol.board().custody.track(key, others, own);
    }

    /// Has it asked, by and by, whether a window of a group is never made here any more.
    pub(crate) fn set_never(&self, never: impl Fn(Key) -> bool + Send + Sync + 'static) {
        // Set once, by whoever registered this exchange.
        let _set = self.protocol.never.set(Box::new(never));
    }

    /// A window of a group is about to be made. Until this is dropped nobody is told that one that has a number by then is not.
    pub(crate) fn name_window(&self, group: u64) -> Naming<'_> {
        *self.protocol.board().custody.unnamed.entry(group).or_default() += 1;
        Naming { exchange: self, group }
    }

    /// A group is gone or broken: members that have released windows which are never made here are told so.
    pub(crate) fn group_ended(&self, group: u64) {
        if self.protocol.board().custody.unmade(group).is_empty() {
            return;
        }
        let protocol = self.protocol.clone();
        self.handle.post_run(move |_| protocol.answer(group));
    }

    /// These members of a window's group are gone.
    pub(crate) fn lose(&self, key: Key, gone: &[Rank]) {
        self.with_board(|board, effects| {
            gone.iter().for_each(|rank| board.custody.lose(*rank, key, effects))
        });
    }

    /// Tells others that this rank reaches nothing of a window any more.
    fn tell_of_release(&self, key: Key, others: &[Rank]) {
        let others = self.protocol.board().custody.to_tell(key, others);
        self.protocol.notify_these(others, Record::group_release(key, false).freeze());
    }

    /// More of this rank's memory is in use for as long as what is held under that key.
    pub(crate) fn hold_more(&self, key: Key, own: (Arc<dyn Device>, Allocation)) {
        self.with_board(|board, effects| board.custody.add(key, own, effects));
    }

    /// This rank reaches nothing of a window any more, and tells the others so. Its own part goes back when they have done
    /// the same.
    pub(crate) fn let_go(&self, key: Key, others: &[Rank]) {
        self.tell_of_release(key, others);
        self.with_board(|board, effects| board.custody.release(key, false, effects));
    }

    /// A member has lent its part of what this rank never reaches: it is told so. One that reads no answers gets no more of them.
    pub(crate) fn return_board(&self, key: Key, to: Rank) {
        let mut board = self.protocol.board();
        let is_told = !board.custody.to_tell(key, &[to]).is_empty() && board.custody.owe(to);
        drop(board);
        if is_told {
            let answer = Answer { protocol: self.protocol.clone(), to };
            self.protocol.notify_answers(vec![answer], Record::group_release(key, false).freeze());
        }
        self.with_board(|board, effects| board.custody.release(key, false, effects));
    }

    /// As [`let_go`](Self::let_go), and waits for the others. Of who is gone something may be on its way still: the part goes
    /// back behind that.
    ///
    /// # Errors
    /// If the job is left meanwhile, or a member was cut off and may yet reach the part.
    pub(crate) async fn let_go_together(&self, key: Key, others: &[Rank]) -> Result<(), Fault> {
        self.tell_of_release(key, others);
        // Its end, by whatever cause, gives the part back or leaves that to the last of the others.
        let leaving = LettingGo { exchange: self, key };
        self.with_board(|board, effects| board.custody.release(key, true, effects));
        let Exchange { protocol, handle, .. } = self;
        let waited = std::future::poll_fn(|cx| {
            let done = || {
                let board = protocol.board();
                match board.custody.is_released(key) {
                    true => Some(Ok(())),
                    false if board.is_closed() => Some(Err(Fault::Shutdown)),
                    false => board.custody.cut_off_of(key).map(Err),
                }
            };
            poll_until(handle, cx, done, |waker| {
                let before = protocol.board().custody.wait(key, waker);
                drop(before);
            })
        });
        let waited = waited.await;
        drop(leaving);
        waited
    }
}

impl ExchangeProtocol {
    /// Tells those who have released windows of a group that are never made here. Not under any lock: the board's is taken after
    /// that of whoever knows.
    pub(super) fn answer(self: &Arc<Self>, group: u64) {
        let Some(never) = self.never.get() else { return };
        let keys = self.board().custody.unmade(group);
        for key in keys.into_iter().filter(|key| never(*key)) {
            let mut board = self.board();
            // Unless one is being made since.
            let sources = match board.custody.unnamed.contains_key(&group) {
                true => Vec::new(),
                // They count until the answer is on its way: who reads none of those is not answered for ever.
                false => board.custody.early.remove(&key).unwrap_or_default(),
            };
            drop(board);
            let answers: Vec<Answer> =
                sources.into_iter().map(|to| Answer { protocol: self.clone(), to }).collect();
            self.notify_answers(answers, Record::group_release(key, true).freeze());
        }
    }
}

/// An answer to a release that came early, until it is sent, or cannot be.
pub(super) struct Answer {
    protocol: Arc<ExchangeProtocol>,
    pub to: Rank,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.protocol.board().custody.settled(self.to);
    }
}

/// A window of a group that has no number yet.
pub(crate) struct Naming<'e> {
    exchange: &'e Exchange,
    group: u64,
}

impl Drop for Naming<'_> {
    fn drop(&mut self) {
        let protocol = &self.exchange.protocol;
        if let Entry::Occupied(mut count) = protocol.board().custody.unnamed.entry(self.group) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        protocol.answer(self.group);
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
    use super::super::Registered;
    use super::super::board::Board;
    use super::*;
    use crate::fixture::{first_of, hears};
    use posthaste_core::Endpoint;

    const KEY: Key = (7, 3);

    fn unused(effects: &mut Effects) -> usize {
        effects.unused.drain(..).count()
    }

    #[test]
    fn a_part_goes_back_when_all_have_released_it_or_are_gone() {
        let (mut custody, mut effects) = (Custody::new(1), Effects::default());
        custody.released_by(Rank(1), KEY, false, &mut effects);
        custody.released_by(Rank(1), KEY, false, &mut effects);
        custody.track(KEY, vec![Rank(1), Rank(2), Rank(3)], None);
        custody.release(KEY, false, &mut effects);
        custody.released_by(Rank(2), (7, 4), false, &mut effects);
        custody.released_by(Rank(3), KEY, false, &mut effects);
        assert!(unused(&mut effects) == 0 && !custody.is_unused(KEY), "rank 2 may still reach it");
        custody.drained(ContextId(0), Rank(2), 0, &mut effects);
        custody.gone(Rank(2), &mut effects);
        assert!(unused(&mut effects) == 1 && custody.held.is_empty() && !effects.corrupt);
    }

    #[test]
    fn whoever_waits_takes_it_and_this_rank_counts_too() {
        let (mut custody, mut effects) = (Custody::new(1), Effects::default());
        custody.track(KEY, vec![Rank(1)], None);
        custody.released_by(Rank(1), KEY, false, &mut effects);
        assert!(!custody.is_unused(KEY), "it is in use here");
        custody.release(KEY, true, &mut effects);
        assert!(custody.is_unused(KEY) && unused(&mut effects) == 0, "who waits for it has not seen that");
        custody.release(KEY, false, &mut effects);
        assert_eq!(unused(&mut effects), 1);
    }

    #[test]
    fn a_peer_that_releases_what_nobody_knows_is_bounded() {
        let (mut custody, mut effects) = (Custody::new(1), Effects::default());
        for number in 0..MOST_EARLY as u64 {
            custody.released_by(Rank(1), (1, number), false, &mut effects);
        }
        assert!(!effects.corrupt);
        custody.released_by(Rank(1), (1, u64::MAX), false, &mut effects);
        assert!(effects.corrupt);
        let mut effects = Effects::default();
        custody.track((1, 5), vec![Rank(1)], None);
        custody.released_by(Rank(1), (2, 0), false, &mut effects);
        custody.released_by(Rank(2), (2, 0), false, &mut effects);
        assert!(!effects.corrupt, "there is room again, and everybody has their own");
    }

    #[test]
    fn who_reads_no_answers_is_not_answered_for_ever() {
        let client = first_of(2, 1);
        let exchange = Exchange::new(&client).expect("the name is free");
        exchange.set_never(|_| true);
        let (mut sent, source) = (0, Endpoint::new(Rank(1), ContextId(0)));
        let say = |number: u64| {
            let record = Record::group_release((9, number), false).freeze();
            hears(&client, 0, source, &Registered(exchange.protocol.clone()), &record)
        };
        let fault = loop {
            match say(sent) {
                None => sent += 1,
                Some(fault) => break fault,
            }
            assert!(sent < 1 << 17, "so many answers are kept for one that reads none");
        };
        assert_eq!(fault, Fault::PeerCorrupt(Rank(1)));
        assert!(sent >= MOST_EARLY as u64, "after {sent}");
    }

    #[test]
    fn a_part_is_taken_until_all_contexts_are_done_with_what_a_member_that_is_gone_has_sent() {
        let shape = posthaste_core::JobShape { ranks: 2, clients: 1, contexts: 3 };
        let (mut board, mut effects) = (Board::new(Rank(0), shape), Effects::default());
        let first =
            board.begin(posthaste_core::Collective::Shmalloc, &mut effects).expect("nothing is broken");
        board.track(first, None);
        board.custody.track(KEY, vec![Rank(1)], None);
        board.release(first, false, &mut effects);
        board.custody.release(KEY, true, &mut effects);
        // One context is ahead of the first one.
        board.drained(ContextId(2), Rank(1), 0, &mut effects);
        assert!(!board.custody.is_released(KEY) && !board.is_released(first));
        board.drained(ContextId(0), Rank(1), 0, &mut effects);
        board.peer_down(Rank(1), Fault::PeerLost(Rank(1)), &mut effects);
        assert!(board.custody.is_released(KEY) && board.is_released(first), "nobody waits for a context");
        board.custody.release(KEY, false, &mut effects);
        assert!(unused(&mut effects) == 0 && !board.is_unused(first), "one has yet to look");
        // The next incarnation takes part in what comes then, and dies as well: the first context is ahead.
        board.drained(ContextId(0), Rank(1), 0, &mut effects);
        board.peer_up(Rank(1), 1);
        board.custody.track((7, 4), vec![Rank(1)], None);
        board.custody.release((7, 4), false, &mut effects);
        board.drained(ContextId(0), Rank(1), 1, &mut effects);
        board.peer_down(Rank(1), Fault::PeerLost(Rank(1)), &mut effects);
        board.drained(ContextId(2), Rank(1), 1, &mut effects);
        assert_eq!(unused(&mut effects), 0);
        board.drained(ContextId(1), Rank(1), 0, &mut effects);
        assert_eq!(unused(&mut effects), 2, "what the first incarnation could reach");
        assert!(!board.custody.is_unused((7, 4)));
        board.drained(ContextId(1), Rank(1), 1, &mut effects);
        assert_eq!(unused(&mut effects), 1);
        // Whoever is gone for all contexts is not waited for at all.
        board.custody.track((7, 5), vec![Rank(1)], None);
        board.custody.release((7, 5), false, &mut effects);
        assert_eq!(unused(&mut effects), 1);
    }

    #[test]
    fn a_rank_that_came_again_is_waited_for_and_may_die_again() {
        let shape = posthaste_core::JobShape { ranks: 2, clients: 1, contexts: 1 };
        let (mut board, mut effects) = (Board::new(Rank(0), shape), Effects::default());
        board.custody.track((1, 0), vec![Rank(1)], None);
        for operation in 1..4 {
            board.drained(ContextId(0), Rank(1), operation as u32, &mut effects);
            board.peer_down(Rank(1), Fault::PeerLost(Rank(1)), &mut effects);
            board.custody.track((6, operation), vec![Rank(1)], None);
            board.custody.release((6, operation), false, &mut effects);
            assert_eq!(unused(&mut effects), 1, "nobody else reaches it");
            board.peer_up(Rank(1), operation as u32 + 1);
            let key = (7, operation);
            board.custody.track(key, vec![Rank(1)], None);
            board.custody.release(key, false, &mut effects);
            assert!(unused(&mut effects) == 0 && !board.custody.is_unused(key));
            assert_eq!(board.custody.to_tell(key, &[Rank(1)]), [Rank(1)]);
            assert!(board.custody.to_tell((1, 0), &[Rank(1)]).is_empty(), "another made that");
            if operation == 1 {
                board.custody.released_by(Rank(1), key, false, &mut effects);
            } else {
                board.drained(ContextId(0), Rank(1), operation as u32 + 1, &mut effects);
                board.peer_down(Rank(1), Fault::PeerLost(Rank(1)), &mut effects);
            }
            assert_eq!(unused(&mut effects), 1);
        }
    }

    #[test]
    fn whoever_was_cut_off_keeps_what_it_may_reach_and_nobody_waits_for_that() {
        let shape = posthaste_core::JobShape { ranks: 3, clients: 1, contexts: 2 };
        let corrupt = Fault::PeerCorrupt(Rank(1));
        // It is found out while it lives, or in the last that it has sent.
        for lives in [true, false] {
            let (mut board, mut effects) = (Board::new(Rank(0), shape), Effects::default());
            for incarnation in 0..3 {
                let key = (7, u64::from(incarnation));
                board.custody.track(key, vec![Rank(1), Rank(2)], None);
                board.custody.release(key, true, &mut effects);
                assert!(board.custody.wait(key, Waker::noop()).is_none());
                assert_eq!(board.custody.cut_off_of(key), None);
                if lives {
                    board.peer_down(Rank(1), corrupt, &mut effects);
                    assert_eq!(board.custody.cut_off_of(key), Some(corrupt));
                    assert_eq!(effects.wake.drain(..).count(), 1, "whoever waits is to hear of it");
                    board.custody.released_by(Rank(2), key, false, &mut effects);
                    board.custody.release(key, false, &mut effects);
                    assert!(
                        unused(&mut effects) == 0 && !board.custody.is_released(key),
                        "it may yet write there"
                    );
                    board.drained(ContextId(0), Rank(1), incarnation, &mut effects);
                } else {
                    board.drained(ContextId(0), Rank(1), incarnation, &mut effects);
                    board.peer_down(Rank(1), corrupt, &mut effects);
                    board.custody.released_by(Rank(2), key, false, &mut effects);
                    board.custody.release(key, false, &mut effects);
                }
                assert_eq!((board.custody.cut_off_of(key), board.custody.is_released(key)), (None, true));
                assert_eq!(
                    unused(&mut effects),
                    0,
                    "something of it may be on its way through the other context"
                );
                board.drained(ContextId(1), Rank(1), incarnation, &mut effects);
                assert_eq!(unused(&mut effects), 1);
                assert!(board.is_gone(Rank(1)));
                board.peer_up(Rank(1), incarnation + 1);
            }
        }
    }
}
