//! A part of an operation arrives: the operation may be under way, on the boards, still to be called, or over.

use super::executor::{Guard, Hub};
use super::group_state::{Early, GroupState, Notice, Slot};
use super::outlet::Way;
use super::part::Part;
use super::stage::Reference;
use super::state::State;
use super::wire::Tag;
use posthaste_core::device::Body;
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Rank, Scope};
use std::sync::Arc;

impl Hub {
    /// A part of an operation has arrived.
    #[inline]
    pub(super) fn on_part<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        source: Rank,
        cookie: u64,
        slice: u32,
        part: &Part<'_>,
    ) {
        let tag = Tag::from_word(cookie);
        let at = match state.group_at(source, tag.group) {
            Some(Ok(at)) => at,
            Some(Err(id)) => match part {
                Part::Body(body) => return self.unclaimed(scope, state, source, id, cookie, body),
                // Who is lent something has made the group, and it is gone by now.
                Part::Lent(_) => return,
            },
            None => return self.corrupt(scope, state, source),
        };
        self.part_for(scope, state, source, at, tag, slice, part);
    }

    /// The same, for a group of which is known which one it is.
    #[inline]
    #[allow(clippy::too_many_arguments, reason = "the second half of `on_part`")]
    pub(super) fn part_for<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        source: Rank,
        at: usize,
        tag: Tag,
        slice: u32,
        part: &Part<'_>,
    ) {
        let Some(group) = state.groups.get_mut(at) else { return };
        let Some(place) = group.membership.place_of(source) else {
            return self.corrupt(scope, state, source);
        };
        let operation = group.whole_number(tag.operation);
        group.others[place].heard = true;
        let base = group.base;
        if let Some(Slot::OnBoard(_)) = group.slot(operation) {
            // A message of what is written there is one too many.
            if !group.is_written(place, operation) {
                let what = (place, tag.phase, tag.mark, slice);
                self.instead_of_board(scope, state, at, operation, what, part);
            }
            return;
        }
        match group.slot(operation) {
            Some(Slot::Running(_)) => {}
            Some(Slot::Reserved) => return self.early(scope, state, at, operation, place, tag, slice, part),
            None if operation >= base => {
                return self.early(scope, state, at, operation, place, tag, slice, part);
            }
            // Over, here at least.
            _ => return,
        }
        let what = (place, tag.phase, tag.mark, slice);
        let state = self.give(scope, state, at, operation, what, part);
        drop(self.go_on(scope, state, at, operation));
    }

    /// A part of an operation that is on the boards has come as a message.
    #[cold]
    fn instead_of_board<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        state: Guard<'g>,
        at: usize,
        operation: u64,
        what: (usize, u16, u32, u32),
        part: &Part<'_>,
    ) {
        let state = self.go_by_messages(scope, state, at, operation);
        let state = self.give(scope, state, at, operation, what, part);
        drop(self.go_on(scope, state, at, operation));
    }

    #[cold]
    #[allow(clippy::too_many_arguments, reason = "the rest of `part_for`")]
    fn early(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'_>,
        at: usize,
        operation: u64,
        place: usize,
        tag: Tag,
        slice: u32,
        part: &Part<'_>,
    ) {
        let group = &mut state.groups[at];
        if group.failure(operation).is_some() || group.is_long_over(operation) {
            return;
        }
        let Tag { phase, mark, .. } = tag;
        let early = match part {
            Part::Body(body) => Early::Part { place, phase, mark, bytes: body.to_bytes() },
            Part::Lent(memory) => Early::Lent { place, phase, mark, slice, memory: *memory },
        };
        // Long messages are sent only when they were cleared.
        let is_long = slice != 0 && matches!(part, Part::Body(_));
        if is_long || !group.keep(operation, place, early) {
            let rank = group.membership.members[place];
            self.corrupt(scope, state, rank);
        }
    }

    /// What a rank has lent to this one, where that is in its memory.
    pub(super) fn lent(&self, source: Rank, Reference { offset, len }: Reference) -> Option<SharedSlice> {
        self.home()?.map(source, offset, len.into())
    }

    /// What came for an operation before it was started, now that it is.
    pub(super) fn take_in<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
        early: Early,
    ) -> Guard<'g> {
        match early {
            Early::Part { place, phase, mark, bytes } => {
                let body = Body::Owned(&bytes);
                self.give(scope, state, at, operation, (place, phase, mark, 0), &Part::Body(&body))
            }
            Early::Lent { place, phase, mark, slice, memory } => {
                self.give(scope, state, at, operation, (place, phase, mark, slice), &Part::Lent(memory))
            }
            Early::Notice { place, notice } => {
                let State { groups, peers, .. } = &mut *state;
                let Some(group) = groups.get_mut(at) else { return state };
                let Some(Slot::Running(op)) = group.slot(operation) else { return state };
                let mut theirs = None;
                let fits = match notice {
                    Notice::Clear { phase, colour, len } => {
                        let fits = op.run.cleared(place, phase, colour, len).is_ok();
                        if fits && op.run.may_have_room() {
                            self.lend_late(group, operation);
                        }
                        fits
                    }
                    Notice::Called { mark, bytes } => {
                        theirs = Some((mark, bytes as usize));
                        mark == op.mark
                    }
                    Notice::Ask => {
                        let from_it = op.run.long_receipts().filter(|(peer, _)| *peer == place);
                        let clears: Vec<_> = from_it.map(|(_, clear)| clear).collect();
                        let mut way = Way { hub: self, scope: &mut *scope, peers };
                        for clear in &clears {
                            // Who asks again is told again, but not more often than it can hear it.
                            if group.others[place].notices.contains(&(operation, *clear)) {
                                continue;
                            }
                            way.notice(group, at, operation, place, *clear);
                        }
                        !clears.is_empty()
                    }
                };
                if fits {
                    return state;
                }
                let from = group.membership.members[place];
                self.mismatch(scope, state, at, operation, from, theirs)
            }
        }
    }

    /// All have come to an operation whose root had no room to lend from.
    fn lend_late(&self, group: &mut GroupState, operation: u64) {
        let Some(mut op) = group.take(operation) else { return };
        let len = op.run.input_len();
        op.run.lend(self.home().and_then(|home| group.stage(&home, operation, len, self.most_staged())));
        if let Some(slot) = group.slot(operation) {
            *slot = Slot::Running(op);
        }
    }

    pub(super) fn corrupt(&self, scope: &mut Scope<'_>, state: Guard<'_>, rank: Rank) {
        drop(state);
        tracing::warn!(%rank, "impossible collective message; the peer is cut off");
        scope.cut_off(rank);
    }
}
