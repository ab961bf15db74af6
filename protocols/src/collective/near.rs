//! Groups whose members share memory: the boards on which they write small operations, how these come to be and how they
//! go.
//!
//! A group makes boards once it has called a few such operations. Each member tells the others where its own is, and, when
//! it knows theirs, that it looks there: a member writes when all others do. Until then, and whenever somebody does not
//! look, the parts go as messages.

use super::executor::{Guard, Hub};
use super::group_state::{Early, GroupState, Slot, WINDOW};
use super::outlet::Way;
use super::stage::Stages;
use super::state::State;
use super::wire::Record;
use crate::exchange::Key;
use crate::window::WindowHome;
use posthaste_core::blackboard::{Blackboard, Ledger, board_bytes};
use posthaste_core::memory::SharedWords;
use posthaste_core::{Rank, Scope, Ticket};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

/// Members of a group that has boards, at most: each reads those of all others.
pub(crate) const MOST_NEAR: usize = 32;
/// Operations of a member that are on its board at once.
const SLOTS: usize = 32;
const BOARD_BYTES: u64 = board_bytes(SLOTS);
/// Small operations of a group before it makes boards: those that call fewer need none. A long one, which as messages costs
/// so much more, counts as many.
const CALLS: u32 = 4;
/// The same at most, after it got no memory: twice as many each time.
const MOST_CALLS: u32 = 1 << 10;

/// How the custody of memory that others reach names a group's boards.
pub(super) fn key_of(group: u64) -> Key {
    (group, u64::MAX)
}

/// What the futures of a group look at without a lock.
#[derive(Debug)]
pub(crate) struct GroupBoard {
    pub board: Blackboard<SharedWords>,
    /// What happened elsewhere, and what ended here.
    pub ledger: Ledger,
    /// Operations that ended here, for whoever looks at other things now and then.
    turn: AtomicU32,
}

impl GroupBoard {
    /// Whether it is time to look at other things. A count that is lost to another thread does not matter.
    #[inline]
    pub fn is_turn(&self) -> bool {
        let turn = self.turn.load(Ordering::Relaxed);
        self.turn.store(turn.wrapping_add(1), Ordering::Relaxed);
        turn.is_multiple_of(16)
    }
}

/// What a member knows of its group's boards.
#[derive(Debug, Default)]
pub(super) struct Near {
    /// Small operations that were called while there were no boards.
    calls: u32,
    /// How often there was no memory for a board.
    refused: u32,
    /// This member has told of its own, or cannot have one.
    begun: bool,
    parts: Vec<Option<SharedWords>>,
    /// Members that look at all boards.
    looking: Vec<bool>,
    /// Members whose memory this one may reach.
    lenders: Vec<Rank>,
    /// This member looks at all boards.
    pub boards: Option<Arc<GroupBoard>>,
    /// All others look at this one's, too.
    pub open: bool,
    /// Before which operation this member's slots are known to be free.
    limit: u64,
    /// Operations that were started on the boards and went on by messages, before their callers knew.
    pub left: HashMap<u64, Ticket>,
    /// Where inputs of long operations lie.
    pub stages: Stages,
}

impl GroupState {
    /// The boards, if this member's part of an operation that it calls now can be written there.
    #[inline]
    pub fn writes(&mut self, operation: u64) -> Option<&Arc<GroupBoard>> {
        if !self.near.open || self.broken.is_some() || self.absence(operation).is_some() {
            return None;
        }
        let near = &mut self.near;
        let boards = near.boards.as_ref()?;
        if operation >= near.limit {
            near.limit = boards.board.room();
        }
        (operation < near.limit).then_some(boards)
    }

    /// Whether parts of an operation that is on the boards have come as messages, and are not there as well.
    #[inline]
    pub fn has_early(&mut self, operation: u64) -> bool {
        if self.early.is_empty() {
            return false;
        }
        for early in self.take_early(operation) {
            let place = early.place();
            if matches!(early, Early::Notice { .. }) || !self.is_written(place, operation) {
                // There was room for it before.
                self.keep(operation, place, early);
            }
        }
        self.early.contains_key(&operation)
    }

    /// Operations may have ended at the boards whose callers have not told so.
    #[inline]
    pub fn settle(&mut self) {
        if self.take_finished() {
            self.sweep();
        }
    }

    /// Forgets those of these that nothing else is in front of. False: there are none.
    #[inline]
    pub(super) fn take_finished(&mut self) -> bool {
        let (Some(boards), Some(Slot::OnBoard(_) | Slot::Ended)) = (&self.near.boards, self.slots.front())
        else {
            return false;
        };
        let ended = boards.ledger.ended(self.base);
        if ended == self.base {
            return false;
        }
        while self.base < ended
            && let Some(Slot::OnBoard(_) | Slot::Ended) = self.slots.front()
        {
            self.slots.pop_front();
            self.base += 1;
        }
        debug_assert_eq!(self.base, ended, "what its caller has finished went elsewhere");
        true
    }

    /// Something happened that is not on the boards.
    pub fn upset(&self) {
        if let Some(boards) = &self.near.boards {
            boards.ledger.upset();
        }
    }

    /// Messages are wanted for as long as an operation goes by them.
    #[inline]
    pub fn unask(&self) {
        if let Some(boards) = &self.near.boards
            && !self.goes_by_messages()
        {
            boards.board.unask();
        }
    }

    fn goes_by_messages(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot, Slot::Running(_) | Slot::Out))
    }

    /// What boards tell of how far the others are.
    pub fn learn_from_boards(&mut self) {
        if let Some(boards) = &self.near.boards {
            for (place, member) in self.others.iter_mut().enumerate() {
                // What waits for an answer goes on from where it was when it asked.
                if !member.asked {
                    let ended = boards.board.ended(place).min(u64::MAX - WINDOW);
                    member.started = member.started.max(ended);
                    member.settle_ahead();
                }
            }
        }
    }
}

impl Hub {
    /// Boards are made of what windows are made of.
    pub(crate) fn set_home(&self, home: &Arc<WindowHome>) {
        // Set once, by whoever made this hub.
        let _set = self.home.set(Arc::downgrade(home));
    }

    pub(super) fn home(&self) -> Option<Arc<WindowHome>> {
        self.home.get().and_then(Weak::upgrade)
    }

    /// An operation for which there are boards as a rule, a small one or one that is lent, was called while there are none.
    pub(super) fn count_call(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        state: &mut State,
        at: usize,
        is_small: bool,
    ) {
        let near = &mut state.groups[at].near;
        near.calls = near.calls.saturating_add(if is_small { 1 } else { CALLS });
        let least = CALLS.checked_shl(near.refused).unwrap_or(MOST_CALLS).min(MOST_CALLS);
        if near.calls >= least && !near.begun {
            self.make_board(scope, state, at);
        }
    }

    /// Makes this member's board and tells the others where it is.
    #[cold]
    fn make_board(self: &Arc<Self>, scope: &mut Scope<'_>, state: &mut State, at: usize) {
        let group = &mut state.groups[at];
        group.near.begun = true;
        let membership = group.membership.clone();
        let Some(home) = self.home().filter(|_| membership.size() <= MOST_NEAR) else { return };
        let Some((own, memory)) = home.lend(BOARD_BYTES) else {
            // Some may be given back. Until then the others have no use for theirs, either.
            let near = &mut group.near;
            (near.begun, near.calls, near.refused) = (false, 0, near.refused.saturating_add(1).min(16));
            return;
        };
        let offset = own.1.offset;
        let others = membership.members.iter().copied().filter(|rank| *rank != self.me).collect();
        home.exchange().hold(key_of(membership.id), others, Some(own));
        group.near.put(membership.size(), membership.me, Some(SharedWords::new(memory)));
        let State { groups, peers, .. } = state;
        let mut way = Way { hub: self, scope, peers };
        let record = Record::Board { group: at as u16, offset };
        for place in (0..membership.size()).filter(|place| *place != membership.me) {
            way.member_record(&mut groups[at], at, place, &record);
        }
        self.look_at_boards(scope, state, at);
    }

    /// A member has told where its board is.
    pub(super) fn on_board(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'_>,
        at: usize,
        (place, source): (usize, Rank),
        offset: u64,
    ) {
        let group = &mut state.groups[at];
        let size = group.membership.size();
        if size > MOST_NEAR || !offset.is_multiple_of(64) || group.near.lenders.contains(&source) {
            return self.corrupt(scope, state, source);
        }
        group.near.lenders.push(source);
        let memory = self.home().and_then(|home| home.map(source, offset, BOARD_BYTES));
        group.near.put(size, place, memory.map(SharedWords::new));
        if !group.near.begun {
            self.make_board(scope, &mut state, at);
        }
        self.look_at_boards(scope, &mut state, at);
    }

    /// Begins to look at the boards if all are known, and says so.
    fn look_at_boards(self: &Arc<Self>, scope: &mut Scope<'_>, state: &mut State, at: usize) {
        let group = &mut state.groups[at];
        let (size, me) = (group.membership.size(), group.membership.me);
        let parts: Option<Box<[SharedWords]>> = group.near.parts.iter().copied().collect();
        let Some(parts) = parts.filter(|parts| parts.len() == size && group.near.boards.is_none()) else {
            return;
        };
        let Some(board) = Blackboard::new(parts, me) else { return };
        board.end(group.base);
        if group.goes_by_messages() {
            board.ask();
        }
        let (ledger, turn) = (Ledger::new(group.base), AtomicU32::new(0));
        group.near.boards = Some(Arc::new(GroupBoard { board, ledger, turn }));
        group.near.open_if_all_look();
        let State { groups, peers, .. } = state;
        let mut way = Way { hub: self, scope, peers };
        for place in (0..size).filter(|place| *place != me) {
            way.member_record(&mut groups[at], at, place, &Record::Looking { group: at as u16 });
        }
    }

    /// A member looks at all boards.
    pub(super) fn on_looking(&self, state: &mut State, at: usize, place: usize) {
        let group = &mut state.groups[at];
        let size = group.membership.size();
        group.near.looking.resize(size, false);
        group.near.looking[place] = true;
        // This member looks at its own, as it were.
        group.near.looking[group.membership.me] = true;
        group.near.open_if_all_look();
    }

    /// A member has told where its board is, and this one has left the group.
    pub(super) fn on_board_too_late(&self, source: Rank, group: u64) {
        if let Some(home) = self.home() {
            home.exchange().return_board(key_of(group), source);
        }
    }

    /// Removes a group that nobody here can name any more.
    pub(super) fn remove(&self, state: &mut State, at: usize) {
        let Some(mut group) = state.remove(at) else { return };
        self.ended(group.membership.id);
        let users: Vec<_> =
            group.take_plans().into_iter().filter(|(_, _, choice, _)| choice.is_users()).collect();
        if !users.is_empty() {
            self.drop_later(users);
        }
        let Near { begun, lenders, .. } = &mut group.near;
        // Whoever came in place of one that died knows nothing of it.
        lenders.retain(|lender| {
            group.membership.place_of(*lender).is_some_and(|place| !group.down.contains_key(&place))
        });
        if (*begun || !lenders.is_empty())
            && let Some(home) = self.home()
        {
            home.exchange().let_go(key_of(group.membership.id), lenders);
        }
    }

    /// A group is gone or broken: members may wait to hear that windows of it are not made here.
    pub(super) fn ended(&self, group: u64) {
        if let Some(home) = self.home() {
            home.exchange().group_ended(group);
        }
    }
}

impl Near {
    fn put(&mut self, size: usize, place: usize, part: Option<SharedWords>) {
        self.parts.resize(size, None);
        self.parts[place] = part;
    }

    fn open_if_all_look(&mut self) {
        self.open =
            self.boards.is_some() && !self.looking.is_empty() && self.looking.iter().all(|looks| *looks);
    }
}

#[cfg(test)]
mod tests {
    use super::super::group_state::tests::group;
    use super::*;
    use posthaste_core::Collective;
    use posthaste_core::inprocess::Arena;

    #[test]
    fn what_callers_have_finished_is_known_to_the_books_and_what_these_know_to_the_callers() {
        let arena = Arena::new(2, 1 << 16);
        let words =
            |rank: u32| SharedWords::new(arena.slice(Rank(rank), 0, BOARD_BYTES).expect("it has as much"));
        let parts = || Box::new([words(0), words(1)]);
        let other = Blackboard::new(parts(), 1).expect("boards");
        let mut group = group();
        let on_board = || {
            let call = Collective::Barrier;
            Slot::OnBoard(super::super::flat::OnBoard { mark: 1, call, len: 0, unsent: 0, staged: None })
        };
        let boards = Arc::new(GroupBoard {
            board: Blackboard::new(parts(), 0).expect("boards"),
            ledger: Ledger::new(group.base),
            turn: AtomicU32::new(0),
        });
        group.near.boards = Some(boards.clone());
        let ledger = &boards.ledger;

        // Three that were finished at the boards, one that ended otherwise, and one that goes on.
        group.slots.extend([on_board(), on_board(), on_board(), Slot::Ended, on_board()]);
        assert!((0..3).all(|operation| ledger.finish(operation, 0)) && !ledger.finish(4, 0));
        group.settle();
        assert_eq!((group.base, group.slots.len(), other.ended(0)), (4, 1, 4));
        assert!(ledger.finish(4, 0), "the ledger has heard of the one that ended otherwise");
        group.settle();
        assert_eq!((group.base, group.slots.len(), other.ended(0), ledger.ended(0)), (5, 0, 5, 5));

        // One that moves is not finished by a caller who does not know.
        group.slots.extend([on_board(), on_board()]);
        group.upset();
        assert!(!ledger.finish(5, 0) && ledger.finish(5, ledger.upsets()));
        group.settle();
        assert_eq!((group.base, group.slots.len()), (6, 1));
    }
}
