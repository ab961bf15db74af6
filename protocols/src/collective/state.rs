//! What a rank knows: its groups, those that are still to be made here or are gone, and its peers.

use super::group_state::{GroupState, KEPT, Membership};
use super::wire::Origin;
use crate::cause::Lowered;
use crate::nearest::nearest_living;
use bytes::Bytes;
use posthaste_core::{Fault, Rank};
use slab::Slab;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;

/// Groups that members have dropped, or that are broken, and that are still to be made here.
const MOST_LEFT: usize = 1 << 12;
/// Groups that a peer may introduce before anybody here asks for them: others are refused.
pub(super) const MOST_OFFERED: usize = 1024;
/// Groups that were here, or were refused, of which is known that they are gone.
const MOST_GONE: usize = 1 << 14;
/// Members of groups that are gone, of which is known who they were, so that they hear from each other.
const MOST_GONE_MEMBERS: usize = 1 << 16;
/// What a rank calls a group of which it founded no more than the name: the last of the numbers, which have 16 bits.
pub(super) const NO_NUMBER: u16 = u16::MAX;
/// Groups of a rank: one for each other number.
pub(super) const MOST_GROUPS: usize = NO_NUMBER as usize;

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
    /// Records that wait for room, in order, and whose records they follow from.
    pub records: VecDeque<(Bytes, Option<Rank>)>,
    /// How many wait, for whatever rank, that follow from its own.
    pub caused: usize,
    /// Operations that wait for room: group and number.
    pub waiting: VecDeque<(usize, u64)>,
    /// Bytes of its messages for groups that are still to be made here.
    pub unclaimed: usize,
    /// Groups that it introduced and nobody has asked for.
    pub offered: usize,
    /// Groups that it introduced and that were refused, of which nobody who asks for them has been told.
    pub refused: usize,
}

/// A record that followed from one of that rank waits no more.
pub(super) fn settle(peers: &mut [Peer], cause: Option<Rank>) {
    if let Some(cause) = cause {
        // One that was started again has caused none of those before.
        let caused = &mut peers[cause.index()].caused;
        *caused = caused.saturating_sub(1);
    }
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
    ids: HashMap<u64, Option<Past>>,
    order: VecDeque<u64>,
    /// Those of which is known who was in them, and how many that are.
    known: VecDeque<u64>,
    members: usize,
}

/// A group that was here.
#[derive(Debug)]
struct Past {
    membership: Arc<Membership>,
    /// From which operation on it is known to be broken.
    broken: u64,
    lowered: Lowered,
}

impl Gone {
    fn note(&mut self, id: u64, past: Option<Past>) {
        if self.ids.contains_key(&id) {
            return;
        }
        if let Some(past) = &past {
            self.known.push_back(id);
            self.members += past.membership.size();
        }
        self.ids.insert(id, past);
        self.order.push_back(id);
        while self.members > MOST_GONE_MEMBERS
            && let Some(oldest) = self.known.pop_front()
        {
            self.forget_members(oldest);
        }
        if self.order.len() > MOST_GONE
            && let Some(oldest) = self.order.pop_front()
        {
            if self.known.front() == Some(&oldest) {
                self.known.pop_front();
                self.forget_members(oldest);
            }
            self.ids.remove(&oldest);
        }
    }

    fn forget_members(&mut self, id: u64) {
        if let Some(past) = self.ids.get_mut(&id).and_then(Option::take) {
            self.members -= past.membership.size();
        }
    }

    /// Whether a rank was of that membership, if that is known still.
    fn has_member(&self, id: u64, rank: Rank) -> Option<bool> {
        let past = self.ids.get(&id)?.as_ref()?;
        Some(past.membership.place_of(rank).is_some())
    }

    /// That a member says that the group is broken is news: then it is for those of this membership, from that operation on.
    fn break_from(&mut self, id: u64, source: Rank, first: u64) -> Option<(u64, Arc<Membership>)> {
        let past = self.ids.get_mut(&id)?.as_mut()?;
        if first >= past.broken || past.membership.place_of(source).is_none() {
            return None;
        }
        past.broken = past.lowered.to(first);
        Some((past.broken, past.membership.clone()))
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

/// What a rank says of a group that is still to be made here: that it is broken from an operation on.
#[derive(Clone, Copy, Debug)]
struct EarlyBreak {
    id: u64,
    first: u64,
    cause: Fault,
    source: Rank,
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
    broken: VecDeque<EarlyBreak>,
    /// Who has dropped which groups that are still to be made here, from which operation on, the latest last.
    left: VecDeque<(u64, u64, Fault)>,
    gone: Gone,
    pub offers: VecDeque<Offer>,
    pub waiters: BTreeMap<u64, Waker>,
    /// How many have waited so far, which names each.
    pub waited: u64,
    pub down: BTreeMap<Rank, Fault>,
    /// How many had [waited](Self::waited) for offers when a rank was last lost, and why it was: it may be up again before those who
    /// wait have looked.
    pub losses: BTreeMap<Rank, (u64, Fault)>,
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
            waiters: BTreeMap::new(),
            waited: 0,
            down: BTreeMap::new(),
            losses: BTreeMap::new(),
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
        let told = self.broken.iter().filter(|broken| broken.id == id);
        // Others have no say in it.
        let told = told.filter(|broken| group.membership.place_of(broken.source).is_some());
        let told = told.min_by_key(|broken| broken.first).map(|broken| (broken.first, broken.cause));
        self.broken.retain(|broken| broken.id != id);
        group.untold = group.broken.is_none() && told.is_some();
        group.broken = group.broken.or(told);
        self.left.retain(|(left, first, fault)| {
            let is_member =
                |fault: Fault| fault.peer().is_some_and(|rank| group.membership.place_of(rank).is_some());
            if *left == id && is_member(*fault) {
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
            // Whoever has said most of it loses the first of that.
            let own = |(_, _, other): &(u64, u64, Fault)| *other == fault;
            let said = self.left.iter().filter(|left| own(left)).count();
            let oldest = if said > MOST_LEFT / 4 { self.left.iter().position(own) } else { None };
            self.left.remove(oldest.unwrap_or(0));
        }
        self.left.push_back((id, first, fault));
    }

    /// A group that is not here is broken: it is still to be made, or is gone.
    pub fn note_broken(&mut self, id: u64, source: Rank, first: u64, cause: Fault) {
        if self.is_gone(id) {
            return;
        }
        let told = EarlyBreak { id, first, cause, source };
        if let Some(known) = self.broken.iter_mut().find(|known| (known.id, known.source) == (id, source)) {
            if first < known.first {
                *known = told;
            }
            return;
        }
        if self.broken.len() >= MOST_LEFT {
            // As in `note_left`.
            let own = |known: &EarlyBreak| known.source == source;
            let said = self.broken.iter().filter(|known| own(known)).count();
            let oldest = if said > MOST_LEFT / 4 { self.broken.iter().position(own) } else { None };
            self.broken.remove(oldest.unwrap_or(0));
        }
        self.broken.push_back(told);
    }

    /// Whether a group that is not here is known to be broken from an operation on.
    pub fn is_broken_from(&self, id: u64, operation: u64) -> bool {
        self.broken.iter().any(|broken| broken.id == id && broken.first <= operation)
    }

    /// Whether a group was here, or was refused, and no longer is.
    pub fn is_gone(&self, id: u64) -> bool {
        self.gone.ids.contains_key(&id)
    }

    /// A member says that a group which was here is broken. Who is to hear of that from this rank, and from which operation on
    /// it is: others may be in it still.
    pub fn hears_of_past(&mut self, id: u64, source: Rank, first: u64) -> (u64, Vec<Rank>) {
        let Some((first, membership)) = self.gone.break_from(id, source, first) else {
            return (first, Vec::new());
        };
        let is_gone = |place: usize| self.down.contains_key(&membership.members[place]);
        let places = nearest_living(membership.me, membership.size(), is_gone);
        (first, places.into_iter().map(|place| membership.members[place]).collect())
    }

    /// Whether what a rank says of a group that was here counts for one that was made of it: members of that have a say, and of
    /// the other if nothing is known of the former any more.
    pub fn has_a_say(&self, id: u64, source: Rank, made_of_it: &Membership) -> bool {
        self.gone.has_member(id, source).unwrap_or_else(|| made_of_it.place_of(source).is_some())
    }

    /// A group never will be here: nothing is kept for it.
    pub fn note_gone(&mut self, id: u64) {
        self.forget(id, None);
    }

    /// A group that was offered here will not be: the others may hear of its break from this rank nevertheless.
    pub fn note_refused(&mut self, id: u64, membership: Arc<Membership>) {
        self.forget(id, Some(Past { membership, broken: u64::MAX, lowered: Lowered::default() }));
    }

    fn forget(&mut self, id: u64, past: Option<Past>) {
        self.gone.note(id, past);
        for message in self.unclaimed.remove(&id).unwrap_or_default() {
            let peer = &mut self.peers[message.from.index()];
            peer.unclaimed = peer.unclaimed.saturating_sub(message.weight());
        }
        self.broken.retain(|broken| broken.id != id);
        self.left.retain(|(left, ..)| *left != id);
    }

    /// The group that was there, if it still is: whoever gave the lock up meanwhile may find another in its place.
    pub fn group_of(&self, at: usize, id: u64) -> Option<&GroupState> {
        self.groups.get(at).filter(|group| group.membership.id == id)
    }

    /// Removes a group that nobody here can name any more.
    pub fn remove(&mut self, at: usize) -> Option<GroupState> {
        let group = self.groups.try_remove(at)?;
        let (id, membership) = (group.membership.id, group.membership.clone());
        self.ids.remove(&id);
        // Nobody stands between two.
        let broken = group.broken.map_or(u64::MAX, |(first, _)| first);
        let past = Past { membership, broken, lowered: group.lowered };
        self.forget(id, Some(past).filter(|past| past.membership.size() > 2));
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
        state.note_broken(7, Rank(1), 3, Fault::PeerLost(Rank(1)));
        let at = state.add(group()).expect("so few groups");
        assert_eq!((state.groups[at].failure(2), state.groups[at].failure(3).is_some()), (None, true));
        assert!(state.broken.is_empty());
    }

    #[test]
    fn who_is_no_member_has_no_say_in_a_group() {
        let mut state = State::new(Rank(0), 8);
        state.note_left(7, 0, Fault::GroupLeft(Rank(5)));
        let at = state.add(group()).expect("so few groups");
        assert_eq!(state.groups[at].absence(0), None);
        assert!(state.left.is_empty());
        // Nor in what was made of one that was here.
        let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect();
        let of = |id, members: &[u32]| {
            let membership = Membership::new(id, ranks(members), Rank(0), &[0; 8]);
            Arc::new(membership.expect("a group"))
        };
        let (parent, child) = (of(8, &[0, 1, 2, 3]), of(9, &[0, 1]));
        let at = state.add(GroupState::new(parent, None)).expect("so few groups");
        state.remove(at);
        assert_eq!([1, 3, 5].map(|rank| state.has_a_say(8, Rank(rank), &child)), [true, true, false]);
        assert_eq!([1, 3, 5].map(|rank| state.has_a_say(10, Rank(rank), &child)), [true, false, false]);
        // Nor can one rank have what others have said forgotten.
        state.note_left(20, 0, Fault::GroupLeft(Rank(2)));
        for id in 0..2 * MOST_LEFT as u64 {
            state.note_left(100 + id, 0, Fault::GroupLeft(Rank(5)));
        }
        assert_eq!(state.left.front().map(|left| left.0), Some(20));
        assert_eq!(state.left.len(), MOST_LEFT);
    }

    #[test]
    fn nothing_is_kept_for_groups_that_are_gone() {
        let mut state = State::new(Rank(0), 2);
        let at = state.add(group()).expect("so few groups");
        state.remove(at);
        state.note_broken(7, Rank(1), 3, Fault::PeerLost(Rank(1)));
        state.note_left(7, 3, Fault::GroupLeft(Rank(1)));
        assert!(state.is_gone(7) && state.broken.is_empty() && state.left.is_empty());
        // What was kept for one that is refused after all is let go of.
        let message = Unclaimed { from: Rank(1), cookie: 1, bytes: Bytes::from_static(b"part") };
        state.peers[1].unclaimed += message.weight();
        state.unclaimed.entry(8).or_default().push(message);
        state.note_broken(8, Rank(1), 3, Fault::PeerLost(Rank(1)));
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
            state.note_broken(id << 32, Rank(1), 0, Fault::PeerLost(Rank(1)));
        }
        assert_eq!(state.broken.len(), MOST_LEFT);
    }

    #[test]
    fn members_of_a_group_that_is_gone_hear_from_each_other() {
        let group_of = |id, size: u32| {
            let ranks = (0..size).map(Rank).collect();
            let membership = Membership::new(id, ranks, Rank(0), &vec![0; size as usize]);
            GroupState::new(Arc::new(membership.expect("a group")), None)
        };
        let mut state = State::new(Rank(0), 8);
        let at = state.add(group_of(7, 5)).expect("room");
        state.down.insert(Rank(1), Fault::PeerLost(Rank(1)));
        assert_eq!(state.hears_of_past(7, Rank(2), 4).1, [], "it is here still");
        state.remove(at);
        assert_eq!(state.hears_of_past(7, Rank(6), 4).1, [], "it is no member");
        assert_eq!(state.hears_of_past(7, Rank(2), 400), (400, vec![Rank(2), Rank(3), Rank(4)]));
        assert_eq!(state.hears_of_past(7, Rank(3), 400).1, [], "they were told");
        assert_eq!(state.hears_of_past(7, Rank(3), 300), (300, vec![Rank(2), Rank(3), Rank(4)]));
        // Whoever has ever less to say is believed the worst, and has nothing to say after that.
        let told: Vec<u64> = (0..300)
            .map(|less| state.hears_of_past(7, Rank(3), 299 - less))
            .filter_map(|(first, told)| (!told.is_empty()).then_some(first))
            .collect();
        assert_eq!((told.len(), told.first(), told.last()), (63, Some(&299), Some(&0)));
        // What a group was broken from when it went, its members have heard.
        let mut broken = group_of(8, 5);
        broken.broken = Some((2, Fault::PeerLost(Rank(1))));
        let at = state.add(broken).expect("room");
        state.remove(at);
        assert_eq!(state.hears_of_past(8, Rank(2), 2).1, []);
        // As many as there may be are known, whatever goes besides.
        for id in 0..MOST_GONE as u64 + 5 {
            if id % 3 == 0 {
                let at = state.add(group_of(1000 + id, 8)).expect("room");
                state.remove(at);
            } else {
                state.note_gone(1000 + id);
            }
            let counted = |past: &Past| past.membership.size();
            assert_eq!(state.gone.members, state.gone.ids.values().flatten().map(counted).sum::<usize>());
        }
        assert!(state.gone.members <= MOST_GONE_MEMBERS && state.gone.known.len() > MOST_GONE / 3 - 5);
        for id in 0..2 * MOST_GONE_MEMBERS as u64 / 64 {
            let nodes = vec![0; 64];
            let mut large = State::new(Rank(0), 64);
            std::mem::swap(&mut large.gone, &mut state.gone);
            let ranks = (0..64).map(Rank).collect();
            let membership = Membership::new(1 << 40 | id, ranks, Rank(0), &nodes).expect("a group");
            let at = large.add(GroupState::new(Arc::new(membership), None)).expect("room");
            large.remove(at);
            std::mem::swap(&mut large.gone, &mut state.gone);
        }
        assert_eq!(state.gone.members, MOST_GONE_MEMBERS);
        assert!(state.is_gone(1000 + MOST_GONE as u64), "its number is known for longer");
    }

    #[test]
    fn the_earliest_operation_from_which_a_group_to_come_is_broken_counts() {
        let mut state = State::new(Rank(0), 2);
        for first in [5, 3, 4] {
            state.note_broken(7, Rank(1), first, Fault::PeerLost(Rank(1)));
        }
        assert!(state.is_broken_from(7, 3) && !state.is_broken_from(7, 2));
        let at = state.add(group()).expect("room");
        assert_eq!((state.groups[at].failure(2), state.groups[at].failure(3).is_some()), (None, true));
        assert!(state.groups[at].untold, "nobody has heard of it from this rank");
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

    /// Nor can one that says of thousands of groups that they are broken have others forgotten that are.
    #[test]
    fn who_tells_of_many_breaks_has_none_of_others_forgotten() {
        let mut state = State::new(Rank(0), 8);
        let cause = Fault::PeerLost(Rank(1));
        state.note_broken(7, Rank(1), 0, cause);
        for id in 0..2 * MOST_LEFT as u64 {
            state.note_broken(100 + id, Rank(5), 0, Fault::PeerLost(Rank(5)));
        }
        let at = state.add(group()).expect("room");
        assert_eq!(state.groups[at].failure(0), Some(cause));
    }
}
