//! What a rank knows: its groups, those that are still to be made here or are gone, and its peers.

use super::group_state::{GroupState, KEPT};
use super::wire::Origin;
use bytes::Bytes;
use posthaste_core::engine::Wait;
use posthaste_core::{Fault, Rank};
use slab::Slab;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::task::Waker;

/// Groups that members have dropped, or that are broken, and that are still to be made here.
const MOST_LEFT: usize = 1 << 12;
/// Groups that a peer may introduce before anybody here asks for them: others are refused.
pub(super) const MOST_OFFERED: usize = 1024;
/// Groups that were here, or were refused, of which is known that they are gone.
const MOST_GONE: usize = 1 << 14;
/// Groups of a rank: their numbers have 16 bits.
pub(super) const MOST_GROUPS: usize = 1 << 16;

/// What a peer calls a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub id: u64,
    /// Where it was here when last looked for.
    pub at: usize,
}

/// What concerns a rank of the job and no group of its own.
#[derive(Debug, Default)]
pub(super) struct Peer {
    /// Its groups, by its numbers.
    pub numbers: Vec<Option<Known>>,
    /// It has no room: what goes to it waits.
    pub congested: bool,
    /// A place in the queue was promised.
    pub promise: Option<Wait>,
    /// Records that wait for room, in order.
    pub records: VecDeque<Bytes>,
    /// Operations that wait for room: group and number.
    pub waiting: VecDeque<(usize, u64)>,
    /// Bytes of its messages for groups that are still to be made here.
    pub unclaimed: usize,
    /// Groups that it introduced and nobody has asked for.
    pub offered: usize,
    /// Groups that it introduced and that were refused, of which nobody who asks for them has been told.
    pub refused: usize,
}

/// A message for a group that is still to be made here.
#[derive(Debug)]
pub(super) struct Unclaimed {
    pub from: Rank,
    pub cookie: u64,
    pub bytes: Bytes,
}

impl Unclaimed {
    /// The bytes that it counts for.
    pub fn weight(&self) -> usize {
        KEPT + self.bytes.len()
    }
}

/// Groups that were here, or were refused: what still comes for them, from members who do not know yet, is for nobody. The
/// latest are known; no number is given twice.
#[derive(Debug, Default)]
struct Gone {
    ids: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Gone {
    fn note(&mut self, id: u64) {
        if !self.ids.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > MOST_GONE
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }
}

/// A group that a peer introduced and that nobody here has asked for.
#[derive(Debug)]
pub(super) struct Offer {
    pub from: Rank,
    pub origin: Origin,
    /// `None`: it was refused, and whoever asks for it is told so.
    pub at: Option<usize>,
    pub members: Box<[Rank]>,
}

/// Everything.
#[derive(Debug)]
pub(super) struct State {
    pub me: Rank,
    pub closed: bool,
    pub groups: Slab<GroupState>,
    pub ids: HashMap<u64, usize>,
    pub peers: Vec<Peer>,
    pub unclaimed: HashMap<u64, Vec<Unclaimed>>,
    /// Groups that are broken and are still to be made here, and from which operation on, the latest last.
    broken: VecDeque<(u64, u64, Fault)>,
    /// Who has dropped which groups that are still to be made here, from which operation on, the latest last.
    left: VecDeque<(u64, u64, Fault)>,
    gone: Gone,
    pub offers: VecDeque<Offer>,
    pub waiters: Vec<Waker>,
    pub down: BTreeMap<Rank, Fault>,
    /// Ranks that were ever started again.
    pub reborn: HashSet<Rank>,
    /// Operations that wait are looked at after a while.
    pub watched: bool,
    /// Groups that this incarnation of the rank has named so far.
    pub named: u32,
    /// How often this rank was started before.
    pub incarnation: u32,
}

impl State {
    pub fn new(me: Rank, ranks: usize) -> State {
        let mut peers = Vec::new();
        peers.resize_with(ranks, Peer::default);
        State {
            me,
            closed: false,
            groups: Slab::new(),
            ids: HashMap::new(),
            peers,
            unclaimed: HashMap::new(),
            broken: VecDeque::new(),
            left: VecDeque::new(),
            gone: Gone::default(),
            offers: VecDeque::new(),
            waiters: Vec::new(),
            down: BTreeMap::new(),
            reborn: HashSet::new(),
            watched: false,
            named: 0,
            incarnation: 0,
        }
    }

    /// A number that no other group of the job has or had: incarnation and number of the rank that names it (20 and 12
    /// bits, as a job has at most 4096 ranks), and its count.
    pub fn new_id(&mut self) -> u64 {
        self.named += 1;
        u64::from(self.incarnation) << 44 | u64::from(self.me.0) << 32 | u64::from(self.named)
    }

    /// The rank that has named a group.
    pub fn founder(id: u64) -> Rank {
        Rank((id >> 32) as u32 & 0xfff)
    }

    /// The group that a peer calls by that number.
    #[inline]
    pub fn group_at(&mut self, from: Rank, number: u16) -> Option<Result<usize, u64>> {
        if number == 0 {
            // The world is the first group on every rank.
            return Some(Ok(0));
        }
        let State { peers, groups, ids, .. } = self;
        let known = peers.get_mut(from.index())?.numbers.get_mut(usize::from(number))?.as_mut()?;
        if groups.get(known.at).is_none_or(|group| group.membership.id != known.id) {
            match ids.get(&known.id) {
                Some(at) => known.at = *at,
                None => return Some(Err(known.id)),
            }
        }
        Some(Ok(known.at))
    }

    /// Adds a group; `None`: there are too many.
    pub fn add(&mut self, mut group: GroupState) -> Option<usize> {
        if self.groups.len() >= MOST_GROUPS {
            return None;
        }
        let id = group.membership.id;
        for (rank, fault) in &self.down {
            if let Some(place) = group.membership.place_of(*rank) {
                group.down.insert(place, *fault);
            }
        }
        // What its parent's break has done to it counts as well.
        let told = self.broken.iter().position(|(broken, ..)| *broken == id);
        let told = told.and_then(|at| self.broken.remove(at)).map(|(_, first, fault)| (first, fault));
        group.broken = group.broken.or(told);
        self.left.retain(|(left, first, fault)| {
            if *left == id {
                group.note_left(*first, *fault);
            }
            *left != id
        });
        let at = self.groups.insert(group);
        self.ids.insert(id, at);
        Some(at)
    }

    /// A member has dropped a group that is not here: it is still to be made, or is gone.
    pub fn note_left(&mut self, id: u64, first: u64, fault: Fault) {
        if self.is_gone(id) {
            return;
        }
        if self.left.len() >= MOST_LEFT {
            self.left.pop_front();
        }
        self.left.push_back((id, first, fault));
    }

    /// A group that is not here is broken: it is still to be made, or is gone.
    pub fn note_broken(&mut self, id: u64, first: u64, cause: Fault) {
        if self.is_gone(id) || self.broken.iter().any(|(broken, ..)| *broken == id) {
            return;
        }
        if self.broken.len() >= MOST_LEFT {
            self.broken.pop_front();
        }
        self.broken.push_back((id, first, cause));
    }

    /// Whether a group that is not here is known to be broken from an operation on.
    pub fn is_broken_from(&self, id: u64, operation: u64) -> bool {
        self.broken.iter().any(|(broken, first, _)| *broken == id && *first <= operation)
    }

    /// Whether a group was here, or was refused, and no longer is.
    pub fn is_gone(&self, id: u64) -> bool {
        self.gone.ids.contains(&id)
    }

    /// A group is not here any more, or never will be: nothing is kept for it.
    pub fn note_gone(&mut self, id: u64) {
        self.gone.note(id);
        for message in self.unclaimed.remove(&id).unwrap_or_default() {
            let peer = &mut self.peers[message.from.index()];
            peer.unclaimed = peer.unclaimed.saturating_sub(message.weight());
        }
        self.broken.retain(|(broken, ..)| *broken != id);
        self.left.retain(|(left, ..)| *left != id);
    }

    /// Removes a group that nobody here can name any more.
    pub fn remove(&mut self, at: usize) -> Option<GroupState> {
        let group = self.groups.try_remove(at)?;
        self.ids.remove(&group.membership.id);
        self.note_gone(group.membership.id);
        Some(group)
    }
}

#[cfg(test)]
mod tests {
    use super::super::group_state::{Membership, tests::group};
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_group_is_broken_by_what_broke_its_parent_and_by_what_is_told_of_it() {
        let mut state = State::new(Rank(0), 2);
        let mut broken = group();
        broken.broken = Some((0, Fault::PeerLost(Rank(1))));
        let at = state.add(broken).expect("so few groups");
        assert_eq!(state.groups[at].failure(0), Some(Fault::PeerLost(Rank(1))));
        let mut state = State::new(Rank(0), 2);
        state.note_broken(7, 3, Fault::PeerLost(Rank(1)));
        let at = state.add(group()).expect("so few groups");
        assert_eq!((state.groups[at].failure(2), state.groups[at].failure(3).is_some()), (None, true));
        assert!(state.broken.is_empty());
    }

    #[test]
    fn nothing_is_kept_for_groups_that_are_gone() {
        let mut state = State::new(Rank(0), 2);
        let at = state.add(group()).expect("so few groups");
        state.remove(at);
        state.note_broken(7, 3, Fault::PeerLost(Rank(1)));
        state.note_left(7, 3, Fault::GroupLeft(Rank(1)));
        assert!(state.is_gone(7) && state.broken.is_empty() && state.left.is_empty());
        // What was kept for one that is refused after all is let go of.
        let message = Unclaimed { from: Rank(1), cookie: 1, bytes: Bytes::from_static(b"part") };
        state.peers[1].unclaimed += message.weight();
        state.unclaimed.entry(8).or_default().push(message);
        state.note_broken(8, 3, Fault::PeerLost(Rank(1)));
        state.note_left(8, 3, Fault::GroupLeft(Rank(1)));
        state.note_gone(8);
        assert!(state.broken.is_empty() && state.left.is_empty() && state.unclaimed.is_empty());
        assert_eq!(state.peers[1].unclaimed, 0);
        for id in 0..2 * MOST_GONE as u64 {
            state.note_gone(1000 + id);
        }
        assert_eq!((state.gone.ids.len(), state.gone.order.len()), (MOST_GONE, MOST_GONE));
        assert!(!state.is_gone(7) && state.is_gone(1000 + 2 * MOST_GONE as u64 - 1));
        // Of those that may still be made the latest are known.
        for id in 0..2 * MOST_LEFT as u64 {
            state.note_broken(id << 32, 0, Fault::PeerLost(Rank(1)));
        }
        assert_eq!(state.broken.len(), MOST_LEFT);
    }

    #[test]
    fn who_has_dropped_a_group_is_known_when_it_is_made() {
        let mut state = State::new(Rank(0), 2);
        let world = Membership::new(0, vec![Rank(0), Rank(1)], Rank(0), &[0, 0]).expect("a group");
        state.add(GroupState::new(Arc::new(world), None));
        for id in 0..2 * MOST_LEFT as u64 {
            state.note_left(1000 + id, 3, Fault::GroupLeft(Rank(1)));
        }
        assert_eq!(state.left.len(), MOST_LEFT);
        state.note_left(7, 5, Fault::GroupLeft(Rank(1)));
        state.note_left(7, 4, Fault::GroupLeft(Rank(1)));
        let at = state.add(group()).expect("room");
        assert_eq!(state.groups[at].absence(3), None);
        assert_eq!(state.groups[at].absence(4), Some(Fault::GroupLeft(Rank(1))));
        assert_eq!(state.left.len(), MOST_LEFT - 2);
    }
}
