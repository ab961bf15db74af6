//! A part of an operation arrives: the operation may be under way, on the boards, still to be called, or over.

use super::executor::{Guard, Hub};
use super::state::{Early, Slot};
use super::wire::Tag;
use posthaste_core::device::Body;
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
        body: &Body<'_>,
    ) {
        let tag = Tag::from_word(cookie);
        let at = match state.group_at(source, tag.group) {
            Some(Ok(at)) => at,
            Some(Err(id)) => return self.unclaimed(scope, state, source, id, cookie, body),
            None => return self.corrupt(scope, state, source),
        };
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
                self.instead_of_board(scope, state, at, operation, what, body);
            }
            return;
        }
        match group.slot(operation) {
            Some(Slot::Running(_)) => {}
            Some(Slot::Reserved) => return self.early(scope, state, at, operation, place, tag, slice, body),
            None if operation >= base => {
                return self.early(scope, state, at, operation, place, tag, slice, body);
            }
            // Over, here at least.
            _ => return,
        }
        let what = (place, tag.phase, tag.mark, slice);
        let state = self.give(scope, state, at, operation, what, body);
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
        body: &Body<'_>,
    ) {
        let state = self.go_by_messages(scope, state, at, operation);
        let state = self.give(scope, state, at, operation, what, body);
        drop(self.go_on(scope, state, at, operation));
    }

    #[cold]
    #[allow(clippy::too_many_arguments, reason = "the second half of `on_part`")]
    fn early(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'_>,
        at: usize,
        operation: u64,
        place: usize,
        tag: Tag,
        slice: u32,
        body: &Body<'_>,
    ) {
        let group = &mut state.groups[at];
        if group.failure(operation).is_some() {
            return;
        }
        let bytes = crate::message::body_bytes(body);
        let early = Early::Part { place, phase: tag.phase, mark: tag.mark, bytes };
        // Long messages are sent only when they were cleared.
        if slice != 0 || !group.keep(operation, place, early) {
            let rank = group.membership.members[place];
            self.corrupt(scope, state, rank);
        }
    }

    pub(super) fn corrupt(&self, scope: &mut Scope<'_>, state: Guard<'_>, rank: Rank) {
        drop(state);
        tracing::warn!(%rank, "impossible collective message; the peer is cut off");
        scope.cut_off(rank);
    }
}
