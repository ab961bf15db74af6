//! When an operation cannot end well: it ends so for every member of the group, and nobody waits for one that has given
//! up.

use super::executor::{Guard, Hub};
use super::group_state::Slot;
use super::outlet::Way;
use super::state::{Peer, State, settle};
use super::wire::{self, Record};
use posthaste_core::{Fault, Rank, Scope};
use std::sync::Arc;

impl Hub {
    /// A member called something else.
    #[cold]
    pub(super) fn mismatch<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        operation: u64,
        from: Rank,
        theirs: Option<(u32, usize)>,
    ) -> Guard<'g> {
        let ours = match state.groups.get_mut(at).and_then(|group| group.slot(operation)) {
            Some(Slot::Running(op)) => op.call,
            _ => return state,
        };
        let theirs = theirs.and_then(|(mark, len)| {
            wire::call_of(wire::kind_in(mark).into(), u32::try_from(len).unwrap_or(u32::MAX))
        });
        let calls = [theirs.unwrap_or(ours), ours];
        let cause = Fault::CollectiveMismatch { ranks: [from, self.me], calls };
        self.break_from(scope, state, at, operation, cause)
    }

    /// No operation of a group from `first` on can end well.
    #[cold]
    pub(super) fn break_from<'g>(
        self: &'g Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: Guard<'g>,
        at: usize,
        first: u64,
        cause: Fault,
    ) -> Guard<'g> {
        let (mut to_do, mut over, mut ended) = (vec![(at, first)], Vec::new(), Vec::new());
        while let Some((at, first)) = to_do.pop() {
            let Some(group) = state.groups.get_mut(at) else { continue };
            let (old, cause) = group.broken.unwrap_or((u64::MAX, cause));
            if first >= old {
                continue;
            }
            let first = group.lowered.to(first);
            group.broken = Some((first, cause));
            group.upset();
            group.settle();
            for operation in first.max(group.base)..group.next() {
                group.take_early(operation);
                let Some(slot) = group.slot(operation) else { continue };
                match std::mem::replace(slot, Slot::Ended) {
                    Slot::Running(mut op) => {
                        self.let_go(op.run.take_combiner());
                        ended.push((op, cause));
                    }
                    Slot::Reserved => *slot = Slot::Reserved,
                    // Whoever looks at the boards looks here, too.
                    Slot::OnBoard(_) | Slot::Reading | Slot::Out | Slot::Ended => {}
                }
            }
            group.sweep();
            if group.is_over() {
                over.push(at);
            }
            let id = group.membership.id;
            let neighbours = group.neighbours();
            self.tell_of_break(scope, &mut state, at, neighbours);
            self.ended(id);
            let State { groups, .. } = &mut *state;
            to_do.extend(groups.iter().filter_map(|(child, group)| {
                group.parent.is_some_and(|(parent, made)| parent == id && made >= first).then_some((child, 0))
            }));
        }
        over.into_iter().for_each(|at| self.remove(&mut state, at));
        self.end(scope, state, ended)
    }

    /// Tells these members from which operation on a group is broken.
    fn tell_of_break(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        state: &mut State,
        at: usize,
        places: Vec<usize>,
    ) {
        let State { groups, peers, .. } = state;
        let Some((group, (first, cause))) = groups.get(at).and_then(|group| Some((group, group.broken?)))
        else {
            return;
        };
        let record = Record::Broken { id: group.membership.id, first, cause }.encode();
        let mut way = Way { hub: self, scope, peers };
        for place in places {
            way.own_record(group.membership.members[place], &record);
        }
    }

    /// Tells those who are to hear it from this rank that a group was broken before it was made here, if it was.
    pub(super) fn tell_of_early_break(self: &Arc<Self>, scope: &mut Scope<'_>, state: &mut State, id: u64) {
        let Some(at) = state.ids.get(&id).copied() else { return };
        if let Some(group) = state.groups.get_mut(at)
            && std::mem::take(&mut group.untold)
        {
            let neighbours = group.neighbours();
            self.tell_of_break(scope, state, at, neighbours);
        }
    }

    /// A rank is gone, and everything that it sent was taken in.
    pub(super) fn peer_down(self: &Arc<Self>, scope: &mut Scope<'_>, rank: Rank, fault: Fault) {
        let mut state = self.lock();
        if state.down.insert(rank, fault).is_some() {
            return;
        }
        let waited = state.waited;
        state.losses.insert(rank, (waited, fault));
        let groups: Vec<usize> = state.groups.iter().map(|(at, _)| at).collect();
        for at in groups {
            let Some(group) = state.groups.get_mut(at) else { continue };
            let Some(place) = group.membership.place_of(rank) else { continue };
            let untold = group.lose(place, fault);
            let first = (group.base..group.next()).find(|operation| match group.slot_of(*operation) {
                Some(Slot::Running(op)) => op.run.awaits(place),
                Some(Slot::OnBoard(_)) => !group.is_written(place, *operation),
                _ => false,
            });
            // A rank that left in order has sent its part of everything that it took part in.
            let first = match fault {
                Fault::PeerClosed(_) => first,
                _ => Some(first.unwrap_or(group.next())),
            };
            if !untold.is_empty() {
                self.tell_of_break(scope, &mut state, at, untold);
            }
            if let Some(first) = first {
                state = self.break_from(scope, state, at, first, fault);
            }
        }
        let peer = &mut state.peers[rank.index()];
        peer.waiting.clear();
        for (_, cause) in std::mem::take(&mut peer.records) {
            settle(&mut state.peers, cause);
        }
        let wakers = std::mem::take(&mut state.waiters);
        drop(state);
        wakers.into_values().for_each(std::task::Waker::wake);
    }

    /// A rank was started again: groups to come may have it as a member. Those that it was a member of stay broken.
    pub(super) fn peer_up(&self, rank: Rank) {
        let mut state = self.lock();
        let State { peers, offers, unclaimed, down, reborn, groups, .. } = &mut *state;
        down.remove(&rank);
        reborn.insert(rank);
        // Groups that the rank was a member of broke when it died, but for those that it had left in order, which have operations
        // without it. Where it was down before they were made here, somebody has made them who had heard of the restart before.
        for (_, group) in groups.iter_mut().filter(|(_, group)| group.broken.is_none()) {
            if let Some(place) = group.membership.place_of(rank)
                && !group.lost.contains(&place)
            {
                group.down.remove(&place);
            }
        }
        peers[rank.index()] = Peer::default();
        unclaimed.retain(|_, messages| {
            messages.retain(|message| message.from != rank);
            !messages.is_empty()
        });
        // Nobody is to get the groups that it has offered, which broke with it; nor those of others that broke because it was lost:
        // who asked for them was told of that, and who asks from now on is offered another one.
        let (mut old, mut offered) = (Vec::new(), std::mem::take(offers));
        offered.retain(|offer| {
            let is_broken =
                offer.at.is_some_and(|at| groups.get(at).is_none_or(|group| group.broken.is_some()));
            let is_over = offer.from == rank || (is_broken && offer.members.contains(&rank));
            if is_over && let Some(at) = offer.at {
                let peer = &mut peers[offer.from.index()];
                peer.offered = peer.offered.saturating_sub(1);
                old.push(at);
            }
            !is_over
        });
        *offers = offered;
        for at in old {
            self.remove(&mut state, at);
        }
    }

    /// This rank was started again: the operations of the world are not for it, and end with that error. Groups that it
    /// names have numbers that it has not given before.
    pub(crate) fn outlive(&self, incarnation: u32, cause: Fault) {
        let mut state = self.lock();
        state.incarnation = incarnation;
        state.reborn.insert(self.me);
        if let Some(world) = state.groups.get_mut(0) {
            (world.broken, world.outlived) = (Some((0, cause)), true);
        }
    }
}
