//! What comes besides the parts of operations: who is how far, who is ready, what is broken.

use super::executor::{Guard, Hub};
use super::group_state::{Early, Notice, Slot, WINDOW};
use super::outlet::Way;
use super::state::State;
use super::wire::Record;
use crate::cause::names_ranks_of;
use posthaste_core::device::Body;
use posthaste_core::{Fault, Rank, Scope};
use std::sync::Arc;

/// Records that follow from those of a peer and wait for room, past which it has broken the rules: nobody asks twice for the same
/// before the answer has come, or breaks a group again and again.
pub(super) const MOST_RECORDS: usize = 1 << 18;

impl Hub {
    /// A record has arrived.
    pub(super) fn on_record(self: &Arc<Self>, scope: &mut Scope<'_>, source: Rank, record: Option<Record>) {
        let state = self.lock();
        let Some(record) = record else { return self.corrupt(scope, state, source) };
        if state.peers[source.index()].caused > MOST_RECORDS {
            return self.corrupt(scope, state, source);
        }
        match record {
            Record::Introduce { group, id, origin, members } => {
                self.introduced(scope, state, source, (group, id, origin), members);
            }
            Record::Broken { id, first, cause } => self.broken(scope, state, source, (id, first), cause),
            Record::Left { id, first } => self.left(scope, state, source, id, first),
            Record::Clear { group, .. }
            | Record::Ask { group, .. }
            | Record::Called { group, .. }
            | Record::Started { group, .. }
            | Record::Want { group, .. }
            | Record::Board { group, .. }
            | Record::Looking { group } => {
                self.named(scope, state, source, group, &record);
            }
        }
    }

    /// A record about the group that a peer calls by that number.
    fn named<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        source: Rank,
        number: u16,
        record: &Record,
    ) {
        match state.group_at(source, number) {
            Some(Ok(at)) => self.about_group(scope, state, source, at, record),
            Some(Err(id))
                if matches!(record, Record::Board { .. })
                    && (state.is_gone(id) || state.is_broken_from(id, 0)) =>
            {
                self.on_board_too_late(source, id);
            }
            // A group that gets so far has been made here, and is gone by now.
            Some(Err(_)) if matches!(record, Record::Looking { .. }) => {}
            Some(Err(id)) => {
                let record = record.encode();
                self.unclaimed(scope, state, source, id, 0, &Body::Owned(&record));
            }
            None => self.corrupt(scope, state, source),
        }
    }

    pub(super) fn about_group<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        source: Rank,
        at: usize,
        record: &Record,
    ) {
        let Some(group) = state.groups.get_mut(at) else { return };
        let Some(place) = group.membership.place_of(source) else {
            return self.corrupt(scope, state, source);
        };
        match *record {
            Record::Clear { operation, phase, colour, len, .. } => {
                let notice = Notice::Clear { phase, colour, len };
                self.noticed(scope, state, at, operation, (place, source), notice);
            }
            Record::Called { operation, mark, bytes, .. } => {
                let notice = Notice::Called { mark, bytes };
                self.noticed(scope, state, at, operation, (place, source), notice);
            }
            Record::Ask { operation, .. } => {
                self.noticed(scope, state, at, operation, (place, source), Notice::Ask);
            }
            Record::Board { offset, .. } => self.on_board(scope, state, at, (place, source), offset),
            Record::Looking { .. } => self.on_looking(&mut state, at, place),
            Record::Started { operations, .. } => self.started(scope, state, at, place, operations),
            Record::Want { operations, .. } => {
                let started = group.started;
                if operations <= started {
                    let State { groups, peers, .. } = &mut *state;
                    let mut way = Way { hub: self, scope, peers };
                    let answer = Record::Started { group: at as u16, operations: started };
                    way.member_record(&mut groups[at], at, place, &answer);
                } else {
                    group.others[place].wants = Some(operations);
                    group.wanted = true;
                }
            }
            Record::Introduce { .. } | Record::Left { .. } | Record::Broken { .. } => {}
        }
    }

    /// A member says something about an operation.
    fn noticed<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
        (place, source): (usize, Rank),
        notice: Notice,
    ) {
        let early = Early::Notice { place, notice };
        if let Some(Slot::OnBoard(what)) = state.groups[at].slot(operation) {
            if matches!(notice, Notice::Called { mark, .. } if mark == what.mark) {
                return;
            }
            state = self.go_by_messages(scope, state, at, operation);
        }
        let Some(group) = state.groups.get_mut(at) else { return };
        let base = group.base;
        match group.slot(operation) {
            Some(Slot::Running(_)) => {
                state = self.take_in(scope, state, at, operation, early);
                drop(self.go_on(scope, state, at, operation));
            }
            Some(Slot::Reading | Slot::Out | Slot::Ended) => {}
            None if operation < base => {}
            _ => {
                if group.failure(operation).is_none() && !group.keep(operation, place, early) {
                    self.corrupt(scope, state, source);
                }
            }
        }
    }

    /// A member has started more operations: what waited for that goes out.
    fn started<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        place: usize,
        operations: u64,
    ) {
        let group = &mut state.groups[at];
        let member = &mut group.others[place];
        let before = member.started;
        // No number is so high that a window behind it could not be told.
        member.started = before.max(operations.min(u64::MAX - WINDOW));
        member.settle_ahead();
        if !std::mem::take(&mut member.asked) {
            return;
        }
        let parked = member.parked.take().unwrap_or(u64::MAX);
        let notices = std::mem::take(&mut member.notices);
        let State { groups, peers, .. } = &mut *state;
        let mut way = Way { hub: self, scope, peers };
        for (operation, notice) in notices {
            way.notice(&mut groups[at], at, operation, place, notice);
        }
        let group = &state.groups[at];
        let id = group.membership.id;
        // The first that has to wait again asks again, if nobody has; those behind it need not.
        for operation in parked.min(before + WINDOW)..group.next() {
            state = self.resume(scope, state, at, operation);
            let Some(member) = state.group_of(at, id).map(|group| &group.others[place]) else { return };
            if member.asked && operation >= member.started + WINDOW {
                break;
            }
        }
    }

    /// A member has dropped a group.
    fn left(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'_>,
        source: Rank,
        id: u64,
        first: u64,
    ) {
        let fault = Fault::GroupLeft(source);
        let Some(at) = state.ids.get(&id).copied() else { return state.note_left(id, first, fault) };
        let group = &mut state.groups[at];
        if group.membership.place_of(source).is_none() {
            return self.corrupt(scope, state, source);
        }
        group.note_left(first, fault);
        // As a rule nobody calls another.
        if (first.max(group.base)..group.next())
            .any(|operation| !matches!(group.slot_of(operation), None | Some(Slot::Ended)))
        {
            drop(self.break_from(scope, state, at, first, fault));
        }
    }

    /// A member says that a group is broken.
    fn broken<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        source: Rank,
        (id, first): (u64, u64),
        cause: Fault,
    ) {
        if !names_ranks_of(scope.shape().ranks, cause) {
            return self.corrupt(scope, state, source);
        }
        let cause = match cause {
            Fault::OutOfMemory(_) => Fault::OutOfMemory("on another rank, in a collective operation"),
            cause => cause,
        };
        match state.ids.get(&id).copied() {
            Some(at) if state.groups[at].membership.place_of(source).is_some() => {
                drop(self.break_from(scope, state, at, first, cause));
            }
            Some(_) => self.corrupt(scope, state, source),
            None => {
                // Those who have left the group stand between those who have not.
                let (first, to_tell) = state.hears_of_past(id, source, first);
                let record = Record::Broken { id, first, cause }.encode();
                let mut way = Way { hub: self, scope: &mut *scope, peers: &mut state.peers };
                to_tell.into_iter().for_each(|member| way.record(member, &record));
                state.note_broken(id, source, first, cause);
                // Members may have released windows of it, and lent boards, that are never made here.
                self.ended(id);
                if first == 0 {
                    self.return_early_boards(&mut state, id);
                }
                // Made of it here, and its own handle dropped since.
                let made_of_it = |parent: Option<(u64, u64)>| {
                    parent.is_some_and(|(parent, made)| parent == id && made >= first)
                };
                let groups = state.groups.iter().filter(|(_, group)| {
                    made_of_it(group.parent) && state.has_a_say(id, source, &group.membership)
                });
                let children: Vec<_> = groups.map(|(at, group)| (at, group.membership.id)).collect();
                for (at, child) in children {
                    if state.group_of(at, child).is_some() {
                        state = self.break_from(scope, state, at, 0, cause);
                    }
                }
            }
        }
    }
}
