//! What a rank knows about its groups and the operations under way in them.

use super::algorithm::Algorithm;
use super::flat::OnBoard;
use super::near::Near;
use super::plan::Plan;
use super::run::Run;
use super::schedule::{Kind, Place, Schedule};
use super::staged::Share;
use super::wire::Origin;
use bytes::Bytes;
use posthaste_core::engine::Wait;
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;
use posthaste_core::{Collective, Fault, Rank, Ticket};
use slab::Slab;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::task::Waker;

/// Operations that a rank may be ahead of a member of the group: beyond that its parts wait.
pub(super) const WINDOW: u64 = 64;
/// Bytes of parts, with what it takes to keep one, that a rank sends a member which is not known to have started their operations:
/// beyond that they wait.
const MOST_AHEAD: usize = 4 << 20;
/// Bytes of a member's parts of operations that are still to be started here, past which it has broken the rules. What it says
/// besides about long messages comes on top of what it may be ahead.
const MOST_EARLY: usize = 2 * MOST_AHEAD;
/// What keeping a part takes besides its bytes.
const KEPT: usize = 64;
/// Operations of a group that are under way on a rank. Parts of them name the low bits of their numbers.
pub(super) const MOST_UNDER_WAY: usize = 1 << 15;
/// By how many operations a part may be late that nobody has waited for.
const LATE: u64 = 1 << 14;
const _: () = assert!(LATE + MOST_UNDER_WAY as u64 + 2 * WINDOW <= 1 << 16);
/// Groups that members have dropped, or that are broken, and that are still to be made here.
const MOST_LEFT: usize = 1 << 12;
/// Groups that a peer may introduce before anybody here asks for them: others are refused.
pub(super) const MOST_OFFERED: usize = 1024;
/// Groups that were here, or were refused, of which is known that they are gone.
const MOST_GONE: usize = 1 << 14;
/// Plans that a group keeps.
const MOST_PLANS: usize = 64;
/// Groups of a rank: their numbers have 16 bits.
pub(super) const MOST_GROUPS: usize = 1 << 16;

/// The schedule of an operation.
#[derive(Clone, Debug)]
pub(crate) enum Choice {
    Known(Algorithm),
    Custom(Arc<dyn Schedule>),
}

impl Choice {
    fn is(&self, other: &Choice) -> bool {
        match (self, other) {
            (Choice::Known(one), Choice::Known(other)) => one == other,
            (Choice::Custom(one), Choice::Custom(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    pub fn schedule(&self) -> &dyn Schedule {
        match self {
            Choice::Known(algorithm) => algorithm,
            Choice::Custom(schedule) => &**schedule,
        }
    }
}

/// The members of a group; the same on all of them.
#[derive(Debug)]
pub(crate) struct Membership {
    pub id: u64,
    /// By their rank in the group.
    pub members: Box<[Rank]>,
    /// The host of each.
    pub nodes: Box<[u32]>,
    /// This rank's place.
    pub me: usize,
    /// The members by their rank in the job, unless that is the same.
    by_rank: Option<HashMap<Rank, usize>>,
}

impl Membership {
    /// `None`: this rank is no member, or a rank is named twice or does not exist.
    pub fn new(id: u64, members: Vec<Rank>, me: Rank, nodes: &[u32]) -> Option<Membership> {
        let size = nodes.len();
        let identity = members.iter().enumerate().all(|(at, rank)| rank.index() == at);
        let by_rank: HashMap<Rank, usize> =
            members.iter().enumerate().map(|(at, rank)| (*rank, at)).collect();
        if by_rank.len() != members.len() || members.iter().any(|rank| rank.index() >= size) {
            return None;
        }
        Some(Membership {
            id,
            nodes: members.iter().map(|rank| nodes[rank.index()]).collect(),
            me: *by_rank.get(&me)?,
            members: members.into(),
            by_rank: (!identity).then_some(by_rank),
        })
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The place of a rank of the job.
    #[inline]
    pub fn place_of(&self, rank: Rank) -> Option<usize> {
        match &self.by_rank {
            None => (rank.index() < self.members.len()).then_some(rank.index()),
            Some(places) => places.get(&rank).copied(),
        }
    }

    pub fn place(&self, root: usize) -> Place<'_> {
        Place { rank: self.me, size: self.size(), root, nodes: &self.nodes }
    }
}

/// An operation that was started.
#[derive(Debug)]
pub(super) struct Op {
    pub run: Run,
    pub mark: u32,
    pub call: Collective,
    /// What its caller waits for, once it does.
    pub ticket: Option<Ticket>,
    /// Its parts may come from the boards, too, and one of them twice.
    pub is_small: bool,
    /// What the boards say is where parts lie, and this is what is for this rank.
    pub share: Option<Share>,
}

/// The place of an operation.
#[derive(Debug)]
pub(super) enum Slot {
    /// It was called and is about to be started.
    Reserved,
    Running(Box<Op>),
    /// It is on the group's boards, and its caller looks there.
    OnBoard(OnBoard),
    /// Its caller reads what all have laid out for it.
    Reading,
    /// Somebody works on it and puts it back.
    Out,
    Ended,
}

/// What came before its operation was started.
#[derive(Debug)]
pub(super) enum Early {
    Part { place: usize, phase: u16, mark: u32, bytes: Bytes },
    Lent { place: usize, phase: u16, mark: u32, slice: u32, memory: SharedSlice },
    Notice { place: usize, notice: Notice },
}

impl Early {
    /// Whose it is.
    pub fn place(&self) -> usize {
        let (Early::Part { place, .. } | Early::Lent { place, .. } | Early::Notice { place, .. }) = self;
        *place
    }
}

/// What a member says about the long messages of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// It is ready for this one.
    Clear { phase: u16, colour: u32 },
    /// It has nowhere to lend its parts from, and waits to be told of each that the other is ready.
    Ask,
}

/// What is known of another member.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    /// Operations that it is known to have started.
    pub started: u64,
    /// It was told this rank's number for the group.
    pub introduced: bool,
    /// It has sent something since it was told how many operations were started here.
    pub heard: bool,
    /// It was asked to say when it has started more.
    pub asked: bool,
    /// It waits until so many operations were started here.
    pub wants: Option<u64>,
    /// Bytes of its early parts.
    pub early: usize,
    /// What it is to be told about long messages, and what waits for the window.
    pub notices: Vec<(u64, Notice)>,
    /// Bytes of parts that it was sent of operations that it is not known to have started, by operation, and of all of them.
    ahead: VecDeque<(u64, usize)>,
    ahead_bytes: usize,
    /// The first operation of which a part waits for it to have started what it was sent.
    pub parked: Option<u64>,
}

impl Member {
    /// Whether a part of an operation may be sent without waiting for the member to have started earlier ones; if not, how many it
    /// is to have started first.
    pub fn check_ahead(&mut self, operation: u64, len: usize) -> Result<(), u64> {
        if operation < self.started || self.ahead_bytes + len + KEPT <= MOST_AHEAD {
            return Ok(());
        }
        match self.ahead.front() {
            None => Ok(()),
            Some((first, _)) => {
                self.parked = Some(self.parked.map_or(operation, |parked| parked.min(operation)));
                Err(first + 1)
            }
        }
    }

    /// A part of an operation was sent.
    #[inline]
    pub fn sent_ahead(&mut self, operation: u64, len: usize) {
        if operation < self.started {
            return;
        }
        self.ahead_bytes += len + KEPT;
        match self.ahead.iter_mut().rev().find(|(of, _)| *of == operation) {
            Some((_, bytes)) => *bytes += len + KEPT,
            None => {
                let at = self.ahead.partition_point(|(of, _)| *of < operation);
                self.ahead.insert(at, (operation, len + KEPT));
            }
        }
    }

    /// It is known to have started more.
    pub fn settle_ahead(&mut self) {
        while let Some((operation, bytes)) = self.ahead.front().copied()
            && operation < self.started
        {
            self.ahead.pop_front();
            self.ahead_bytes -= bytes;
        }
    }
}

/// A group as its member sees it.
#[derive(Debug)]
pub(super) struct GroupState {
    pub membership: Arc<Membership>,
    pub others: Box<[Member]>,
    /// The number of the first slot.
    pub base: u64,
    pub slots: VecDeque<Slot>,
    /// Operations that were started.
    pub started: u64,
    pub early: HashMap<u64, Vec<Early>>,
    pub down: BTreeMap<usize, Fault>,
    pub broken: Option<(u64, Fault)>,
    /// From which operation on a member takes no part, because it has dropped the group.
    left: Option<(u64, Fault)>,
    /// The group, and its operation, from which this one was made.
    pub parent: Option<(u64, u64)>,
    plans: Vec<(Kind, usize, Choice, Arc<Plan>)>,
    /// A member waits for more operations to be started here.
    pub wanted: bool,
    /// Its handles are gone: it goes when its operations have ended.
    pub abandoned: bool,
    pub near: Near,
}

impl GroupState {
    pub fn new(membership: Arc<Membership>, parent: Option<(u64, u64)>) -> Self {
        Self {
            others: vec![Member::default(); membership.size()].into(),
            membership,
            base: 0,
            slots: VecDeque::new(),
            started: 0,
            early: HashMap::new(),
            down: BTreeMap::new(),
            broken: None,
            left: None,
            parent,
            plans: Vec::new(),
            wanted: false,
            abandoned: false,
            near: Near::default(),
        }
    }

    /// What is under way.
    pub fn describe(&self, to: &mut std::fmt::DebugStruct<'_, '_>) {
        let finished = self.near.boards.as_ref().and_then(|boards| boards.ledger.finished(self.base));
        let running = |(at, slot): (usize, &Slot)| match slot {
            // Its caller has it, and the books do not know yet.
            Slot::OnBoard(_) if finished == Some(self.base + at as u64) => None,
            Slot::Running(op) => Some((self.base + at as u64, op.call, op.run.awaited())),
            Slot::OnBoard(what) => {
                let operation = self.base + at as u64;
                let places = 0..self.membership.size();
                let awaited = places.filter(|place| !self.is_written(*place, operation)).collect();
                Some((operation, what.call, awaited))
            }
            _ => None,
        };
        let running: Vec<_> = self.slots.iter().enumerate().filter_map(running).collect();
        let state = (self.membership.id, self.next(), running, self.broken, &self.down);
        to.field("group, next operation, those under way and whom they await, broken from, down", &state);
    }

    /// The number of the next operation.
    #[inline]
    pub fn next(&self) -> u64 {
        self.base + self.slots.len() as u64
    }

    /// The whole number of an operation, from its low bits: of one that is under way here, or is to be called next, or was
    /// over a short while ago.
    #[inline]
    pub fn whole_number(&self, low: u16) -> u64 {
        let least = self.base.wrapping_sub(LATE);
        least.wrapping_add(u64::from(low.wrapping_sub(least as u16)))
    }

    /// Who takes no part in an operation that is called now, if anybody: it is gone, or has dropped the group. Only of one that left
    /// in order ([`Fault::PeerClosed`]) it may have done so before.
    #[inline]
    pub fn absence(&self, operation: u64) -> Option<Fault> {
        if self.down.is_empty() && self.left.is_none() {
            return None;
        }
        let lost = self.down.values().find(|fault| !matches!(fault, Fault::PeerClosed(_))).copied();
        let left = || self.left.filter(|(first, _)| *first <= operation).map(|(_, fault)| fault);
        lost.or_else(left).or_else(|| self.down.values().next().copied())
    }

    /// Of an operation that is called only now, when members have left in order: whether this rank has nothing to do with them any
    /// more, because their parts came before or are for others.
    pub fn needs_nobody_gone(&self, operation: u64) -> bool {
        let Some(Slot::Running(op)) = self.slot_of(operation) else { return false };
        self.down.keys().all(|place| !op.run.awaits(*place))
    }

    /// A member has dropped the group, and takes no part in operations from `first` on.
    pub fn note_left(&mut self, first: u64, fault: Fault) {
        if self.left.is_none_or(|(known, _)| first < known) {
            self.left = Some((first, fault));
        }
    }

    #[inline]
    pub fn slot(&mut self, operation: u64) -> Option<&mut Slot> {
        self.slots.get_mut(operation.checked_sub(self.base)? as usize)
    }

    /// The place of an operation, to be looked at.
    pub fn slot_of(&self, operation: u64) -> Option<&Slot> {
        self.slots.get(operation.checked_sub(self.base)? as usize)
    }

    /// Takes an operation to work on it.
    #[inline]
    pub fn take(&mut self, operation: u64) -> Option<Box<Op>> {
        let slot = self.slot(operation)?;
        match std::mem::replace(slot, Slot::Out) {
            Slot::Running(op) => Some(op),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Forgets the operations at the front that have ended.
    #[inline]
    pub fn sweep(&mut self) {
        while let Some(Slot::Ended) = self.slots.front() {
            self.slots.pop_front();
            self.base += 1;
        }
        if let Some(boards) = &self.near.boards {
            boards.board.end(self.base);
        }
    }

    /// Whether nobody can name it any more, and nothing of it is under way.
    pub fn is_over(&self) -> bool {
        self.abandoned && self.slots.is_empty()
    }

    /// Why an operation cannot end well, if so.
    pub fn failure(&self, operation: u64) -> Option<Fault> {
        self.broken.filter(|(first, _)| *first <= operation).map(|(_, cause)| cause)
    }

    /// Keeps what came early; false: that much no honest member sends.
    pub fn keep(&mut self, operation: u64, place: usize, early: Early) -> bool {
        let bytes = KEPT + if let Early::Part { bytes, .. } = &early { bytes.len() } else { 0 };
        let member = &mut self.others[place];
        if operation >= self.started.max(self.base) + 2 * WINDOW || member.early + bytes > MOST_EARLY {
            return false;
        }
        member.early += bytes;
        self.early.entry(operation).or_default().push(early);
        true
    }

    /// What came for an operation before it was started.
    pub fn take_early(&mut self, operation: u64) -> Vec<Early> {
        let list = match self.early.is_empty() {
            true => Vec::new(),
            false => self.early.remove(&operation).unwrap_or_default(),
        };
        for early in &list {
            let bytes = if let Early::Part { bytes, .. } = early { bytes.len() } else { 0 };
            let member = &mut self.others[early.place()];
            member.early = member.early.saturating_sub(64 + bytes);
        }
        list
    }

    /// The plan of a schedule, if it was made before.
    #[inline]
    pub fn plan(&self, kind: Kind, root: usize, choice: &Choice) -> Option<Arc<Plan>> {
        let is_it = |entry: &&(Kind, usize, Choice, Arc<Plan>)| {
            entry.0 == kind && entry.1 == root && entry.2.is(choice)
        };
        self.plans.iter().find(is_it).map(|(.., plan)| plan.clone())
    }

    /// Keeps a plan for the next time.
    pub fn keep_plan(&mut self, kind: Kind, root: usize, choice: &Choice, plan: Plan) {
        if self.plans.len() >= MOST_PLANS {
            self.plans.clear();
        }
        self.plans.push((kind, root, choice.clone(), Arc::new(plan)));
    }

    /// Whom to tell first that the group is broken: the members at distances that are powers of two, either way. They tell
    /// theirs, and so all hear of it. Where one of them is gone, that chain may be cut: all are told then.
    pub fn neighbours(&self) -> Vec<usize> {
        let (me, size) = (self.membership.me, self.membership.size());
        let mut places = Vec::new();
        let mut distance = 1;
        while distance < size {
            places.extend([(me + distance) % size, (me + size - distance) % size]);
            distance *= 2;
        }
        if places.iter().any(|place| self.down.contains_key(place)) {
            places = (0..size).filter(|place| *place != me).collect();
        }
        places.sort_unstable();
        places.dedup();
        places.retain(|place| !self.down.contains_key(place));
        places
    }
}

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

/// The result of an operation as a value.
pub(super) fn value_of(result: Option<Bytes>) -> Value {
    match result {
        None => Value::Unit,
        Some(bytes) if bytes.len() <= posthaste_core::slot::SMALL_VALUE => Value::copy(&bytes),
        Some(bytes) => Value::Bytes(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group() -> GroupState {
        let membership = Membership::new(7, vec![Rank(0), Rank(1)], Rank(0), &[0, 0]).expect("a group");
        GroupState::new(Arc::new(membership), None)
    }

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
    fn what_a_member_is_sent_before_it_starts_is_bounded() {
        let mut member = Member::default();
        let part = 16 << 10;
        let (mut sent, mut operation) = (0, 0);
        while member.check_ahead(operation, part).is_ok() {
            member.sent_ahead(operation, part);
            sent += part + KEPT;
            operation = (sent / (1 << 20)) as u64;
        }
        assert!(sent <= MOST_AHEAD && sent + part + KEPT > MOST_AHEAD);
        assert_eq!((member.check_ahead(operation, part), member.parked), (Err(1), Some(operation)));
        assert!(member.check_ahead(operation, 0).is_err() || sent + KEPT <= MOST_AHEAD);
        // When it has started the first, there is room for as much.
        member.started = 1;
        member.settle_ahead();
        assert_eq!(member.check_ahead(operation, part), Ok(()));
        member.started = u64::MAX;
        member.settle_ahead();
        assert_eq!((member.ahead_bytes, member.ahead.len()), (0, 0));
    }

    #[test]
    fn low_bits_name_every_operation_that_can_be_under_way() {
        let mut group = group();
        for base in [0, 1, 40_000, 65_535, 1 << 20, (1 << 40) + 77] {
            group.base = base;
            let most = base + MOST_UNDER_WAY as u64 + 2 * WINDOW;
            for operation in base.saturating_sub(LATE)..most {
                assert_eq!(group.whole_number(operation as u16), operation, "{base}");
            }
        }
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
