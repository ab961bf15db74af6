//! A group as its member sees it: who is in it, the operations under way, what is known of the others.

use super::algorithm::Algorithm;
use super::flat::OnBoard;
use super::near::Near;
use super::plan::Plan;
use super::run::Run;
use super::schedule::{Kind, Place, Schedule};
use super::staged::Share;
use crate::cause::Lowered;
use crate::nearest::nearest_living;
use crate::persistent::Making;
use bytes::Bytes;
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;
use posthaste_core::{Collective, Fault, Rank, Ticket};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Operations that a rank may be ahead of a member of the group: beyond that its parts wait.
pub(super) const WINDOW: u64 = 64;
/// Bytes of parts, with what it takes to keep one, that a rank sends a member which is not known to have started their operations:
/// beyond that they wait.
const MOST_AHEAD: usize = 4 << 20;
/// Bytes of a member's parts of operations that are still to be started here, past which it has broken the rules. What it says
/// besides about long messages comes on top of what it may be ahead, and of this, too: a ring has as many phases as twice its
/// members, and a long message in each.
const MOST_EARLY: usize = 2 * MOST_AHEAD;
/// What it may say of those, for each member that there is.
const MOST_SAID: usize = 2 * 2 * WINDOW as usize * KEPT;
/// What keeping a part takes besides its bytes.
pub(super) const KEPT: usize = 64;
/// Operations of a group that are under way on a rank. Parts of them name the low bits of their numbers.
pub(super) const MOST_UNDER_WAY: usize = 1 << 15;
/// By how many operations a part may be late that nobody has waited for.
pub(super) const LATE: u64 = 1 << 14;
const _: () = assert!(LATE + MOST_UNDER_WAY as u64 + 2 * WINDOW <= 1 << 16);
/// Plans that a group keeps.
const MOST_PLANS: usize = 64;
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

    pub fn is_users(&self) -> bool {
        matches!(self, Choice::Custom(_))
    }

    pub fn schedule(&self) -> &dyn Schedule {
        match self {
            Choice::Known(algorithm) => algorithm,
            Choice::Custom(schedule) => &**schedule,
        }
    }
}

/// A plan that was made before, and of what.
pub(super) type Kept = (Kind, usize, Choice, Arc<Plan>);

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
    /// How often it was found waiting.
    pub looks: u8,
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

/// What a member says about an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// It is ready for this one, of so many bytes.
    Clear { phase: u16, colour: u32, len: u64 },
    /// It has nowhere to lend its parts from, and waits to be told of each that the other is ready.
    Ask,
    /// It has waited for long, and this is what it has called.
    Called { mark: u32, bytes: u32 },
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
    /// What it is to be told about operations, and what waits for the window.
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
    /// Those of them whom it lost: who was down before it was made here takes part once started again, and these do not.
    pub lost: BTreeSet<usize>,
    pub broken: Option<(u64, Fault)>,
    pub lowered: Lowered,
    /// It was broken before it was made here, and the others have not heard of that from this rank.
    pub untold: bool,
    /// This rank was started again: what is broken for it is so for no other member.
    pub outlived: bool,
    /// From which operation on a member takes no part, because it has dropped the group.
    left: Option<(u64, Fault)>,
    /// The group, and its operation, from which this one was made.
    pub parent: Option<(u64, u64)>,
    plans: VecDeque<Kept>,
    /// What operations go on by that were on the boards.
    pub exchange: Option<Arc<Plan>>,
    /// A member waits for more operations to be started here.
    pub wanted: bool,
    /// Its handles are gone: it goes when its operations have ended.
    pub abandoned: bool,
    pub near: Near,
    /// What makes persistent collectives of it.
    pub making: Arc<Making>,
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
            lost: BTreeSet::new(),
            broken: None,
            lowered: Lowered::default(),
            untold: false,
            outlived: false,
            left: None,
            parent,
            plans: VecDeque::new(),
            exchange: None,
            wanted: false,
            abandoned: false,
            near: Near::default(),
            making: Arc::default(),
        }
    }

    /// What is under way.
    pub fn describe(&self, to: &mut std::fmt::DebugStruct<'_, '_>) {
        let ended = self.near.boards.as_ref().map_or(self.base, |boards| boards.ledger.ended(self.base));
        let running = |(at, slot): (usize, &Slot)| match slot {
            // Its caller has it, and the books do not know yet.
            Slot::OnBoard(_) if self.base + (at as u64) < ended => None,
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
        loop {
            while let Some(Slot::Ended) = self.slots.front() {
                self.slots.pop_front();
                self.base += 1;
            }
            if !self.take_finished() {
                break;
            }
        }
        if let Some(boards) = &self.near.boards {
            boards.board.end(self.base);
            boards.ledger.advance(self.base);
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

    /// Whether no honest member sends a part of that operation yet.
    fn is_too_early(&self, operation: u64) -> bool {
        operation >= self.started.max(self.base) + 2 * WINDOW
    }

    /// Whether what seems to be a part of that operation, which nobody has begun, is one of an operation that is over for so long
    /// that the low bits of its number are taken for those of a later one. It came late to a rank that went on by the boards.
    pub fn is_long_over(&self, operation: u64) -> bool {
        self.is_too_early(operation) && operation.checked_sub(1 << 16).is_some_and(|other| other < self.base)
    }

    /// Keeps what came early; false: that much no honest member sends.
    pub fn keep(&mut self, operation: u64, place: usize, early: Early) -> bool {
        let bytes = KEPT + if let Early::Part { bytes, .. } = &early { bytes.len() } else { 0 };
        let most = MOST_EARLY + MOST_SAID * self.membership.size();
        let too_early = self.is_too_early(operation);
        let member = &mut self.others[place];
        if too_early || member.early + bytes > most {
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
            member.early = member.early.saturating_sub(KEPT + bytes);
        }
        list
    }

    /// The plan of a schedule, if it was made before.
    #[inline]
    pub fn plan(&self, kind: Kind, root: usize, choice: &Choice) -> Option<Arc<Plan>> {
        let is_it = |entry: &&Kept| entry.0 == kind && entry.1 == root && entry.2.is(choice);
        self.plans.iter().find(is_it).map(|(.., plan)| plan.clone())
    }

    /// Keeps a plan for the next time, in the place of the oldest if there are many. That one's schedule may be a user's, which
    /// is to be dropped where no lock is held.
    #[must_use]
    pub fn keep_plan(&mut self, kind: Kind, root: usize, choice: &Choice, plan: Plan) -> Option<Kept> {
        let oldest = (self.plans.len() >= MOST_PLANS).then(|| self.plans.pop_front()).flatten();
        self.plans.push_back((kind, root, choice.clone(), Arc::new(plan)));
        oldest
    }

    /// The plans of a group that goes, of which the same holds.
    #[must_use]
    pub fn take_plans(&mut self) -> VecDeque<Kept> {
        std::mem::take(&mut self.plans)
    }

    /// The members to tell what all are to hear; they tell theirs.
    pub fn neighbours(&self) -> Vec<usize> {
        let Membership { me, .. } = &*self.membership;
        nearest_living(*me, self.membership.size(), |place| self.down.contains_key(&place))
    }

    /// A member is gone; who is to hear now that the group is broken, if it is: the one that was told before may have been gone
    /// then, and have told nobody.
    pub fn lose(&mut self, place: usize, fault: Fault) -> Vec<usize> {
        let told = self.broken.filter(|_| !self.outlived).map(|_| self.neighbours());
        self.down.insert(place, fault);
        self.lost.insert(place);
        let Some(told) = told else { return Vec::new() };
        let mut new = self.neighbours();
        new.retain(|neighbour| !told.contains(neighbour));
        new
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
pub(super) mod tests {
    use super::*;

    /// Of two ranks, this one the first.
    pub fn group() -> GroupState {
        group_of(2)
    }

    fn group_of(size: u32) -> GroupState {
        let ranks = (0..size).map(Rank).collect();
        let membership = Membership::new(7, ranks, Rank(0), &vec![0; size as usize]).expect("a group");
        GroupState::new(Arc::new(membership), None)
    }

    #[test]
    fn who_takes_the_place_of_one_that_was_to_tell_others_and_turns_out_to_be_gone_is_told() {
        let mut group = group_of(8);
        assert_eq!(group.neighbours(), [1, 2, 4, 6, 7]);
        assert_eq!(group.lose(5, Fault::PeerClosed(Rank(5))), [0; 0], "nothing is to be told");
        group.broken = Some((0, Fault::PeerClosed(Rank(5))));
        assert_eq!(group.lose(4, Fault::PeerClosed(Rank(4))), [3], "the next living, either way");
        assert_eq!(group.lose(3, Fault::PeerClosed(Rank(3))), [0; 0], "all others were told");
        assert_eq!(group.neighbours(), [1, 2, 6, 7]);
        // What the others do is not broken by what a rank that was started again has missed.
        let mut group = group_of(8);
        (group.broken, group.outlived) = (Some((0, Fault::PeerLost(Rank(0)))), true);
        assert_eq!(group.lose(4, Fault::PeerClosed(Rank(4))), [0; 0]);
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
    fn a_member_of_a_large_ring_may_be_as_far_ahead_as_any() {
        for size in [3, 1100, 4096] {
            let mut group = group_of(size);
            // As many bytes of parts as it may send, and for each operation that it may have begun a long message in each phase.
            let part = Early::Part { place: 1, phase: 0, mark: 0, bytes: vec![0; MOST_AHEAD - KEPT].into() };
            assert!(group.keep(0, 1, part));
            for operation in 0..WINDOW {
                for phase in 0..2 * (size - 1) {
                    let notice = Notice::Clear { phase: phase as u16, colour: 0, len: 1 };
                    let kept = group.keep(operation, 1, Early::Notice { place: 1, notice });
                    assert!(kept, "{size} members, operation {operation}, phase {phase}");
                }
            }
            // Not without end.
            let notice = || Early::Notice { place: 1, notice: Notice::Clear { phase: 0, colour: 0, len: 1 } };
            let more = (0..1 << 20).take_while(|_| group.keep(0, 1, notice())).count();
            assert!(more < 1 << 20);
        }
    }
}
