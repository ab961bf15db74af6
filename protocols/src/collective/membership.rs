//! How groups come to be, as the hub sees it.

use super::executor::Hub;
use super::group_state::{GroupState, Membership};
use super::outlet::Way;
use super::part::Part;
use super::state::{Known, MOST_OFFERED, NO_NUMBER, Offer, State, Unclaimed};
use super::wire::{Origin, Record, Tag};
use crate::exchange::{Key, reaches_nothing};
use crate::persistent::Making;
use bytes::Bytes;
use posthaste_core::device::Body;
use posthaste_core::{Fault, Handle, Rank, Scope};
use std::sync::{Arc, MutexGuard};
use std::task::Waker;

/// Bytes of a peer's messages for groups that are still to be made here.
const MOST_UNCLAIMED: usize = 64 << 20;
const TOO_MANY_OFFERS: &str = "a rank has founded too many groups for which this one has not asked";

/// Somebody who waits for offers. Who gives up is not kept.
pub(crate) struct Waits<'h> {
    hub: &'h Hub,
    name: u64,
}

impl Waits<'_> {
    /// Wakes this task when there are some.
    pub fn with(&self, waker: &Waker) {
        let before = self.hub.lock().waiters.insert(self.name, waker.clone());
        // Not under the lock: the last waker of a task takes that along, and what waits in it.
        drop(before);
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let last = self.hub.lock().waiters.remove(&self.name);
        // Nor here.
        drop(last);
    }
}

impl Hub {
    /// The world.
    pub fn world(&self) -> (usize, Arc<Membership>) {
        (0, self.lock().groups[0].membership.clone())
    }

    /// The number that the next group has if this rank leads it.
    pub fn new_id(&self) -> u64 {
        self.lock().new_id()
    }

    /// Adds a group that its members make each by themselves. `None`: there are too many groups, or this rank is no
    /// member.
    pub fn add(
        self: &Arc<Self>,
        id: u64,
        members: Vec<Rank>,
        parent: Option<(u64, u64)>,
    ) -> Option<(usize, Arc<Membership>)> {
        let membership = Arc::new(Membership::new(id, members, self.me, &self.nodes)?);
        let mut state = self.lock();
        let mut group = GroupState::new(membership.clone(), parent);
        // What broke the parent before it made this one breaks this one.
        if let Some((parent, made)) = parent
            && let Some(at) = state.ids.get(&parent)
            && let Some(fault) = state.groups[*at].failure(made)
        {
            group.broken = Some((0, fault));
        }
        let added = state.add(group);
        let waiting = state.unclaimed.remove(&id).unwrap_or_default();
        let untold = added.is_some_and(|at| state.groups[at].untold);
        // Those who make it by themselves wait for this rank.
        let missed = added.is_none() && parent.is_some();
        if missed {
            state.note_gone(id);
        }
        drop(state);
        if (missed || untold || !waiting.is_empty())
            && let Some(handle) = self.handle()
        {
            let (hub, group) = (self.clone(), membership.clone());
            handle.post_run(move |scope| {
                if missed {
                    hub.tell_of_no_room(scope, &group);
                }
                hub.tell_of_early_break(scope, &mut hub.lock(), id);
                for message in waiting {
                    hub.claimed(scope, id, message);
                }
            });
        }
        Some((added?, membership))
    }

    /// There are too many groups for one that the others have: it is broken for them.
    #[cold]
    fn tell_of_no_room(self: &Arc<Self>, scope: &mut Scope<'_>, group: &Membership) {
        let cause = Fault::OutOfMemory("this rank has as many groups as it may have");
        let record = Record::Broken { id: group.id, first: 0, cause }.encode();
        self.tell_others(scope, &mut self.lock(), group, &record);
    }

    /// Sends a record to all members of a group but this one.
    fn tell_others(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        state: &mut State,
        group: &Membership,
        record: &Bytes,
    ) {
        let mut way = Way { hub: self, scope, peers: &mut state.peers };
        for member in group.members.iter().filter(|member| **member != self.me) {
            way.record(*member, record);
        }
    }

    /// A message for a group that was made meanwhile, or will not be. Its sender may call another group by that number by now.
    fn claimed(self: &Arc<Self>, scope: &mut Scope<'_>, id: u64, message: Unclaimed) {
        let weight = message.weight();
        let Unclaimed { from, cookie, bytes } = message;
        let mut state = self.lock();
        let peer = &mut state.peers[from.index()];
        peer.unclaimed = peer.unclaimed.saturating_sub(weight);
        match (state.ids.get(&id).copied(), cookie) {
            (Some(at), 0) => match Record::parse(bytes) {
                Some(record) => self.about_group(scope, state, from, at, &record),
                None => self.corrupt(scope, state, from),
            },
            (Some(at), cookie) => {
                let tag = Tag::from_word(cookie);
                self.part_for(scope, state, from, at, tag, 0, &Part::Body(&Body::Owned(&bytes)));
            }
            (None, 0) => {
                if let Some(Record::Board { .. }) = Record::parse(bytes) {
                    self.on_board_too_late(from, id);
                }
            }
            (None, _) => {}
        }
    }

    /// Whether none of these ranks was ever started again. All that makes groups hears of that here first.
    pub fn are_first_incarnations(&self, ranks: &[Rank]) -> bool {
        let state = self.lock();
        ranks.iter().all(|rank| !state.reborn.contains(rank))
    }

    /// What makes the persistent collectives of a group; for as long as it is here.
    pub fn making(&self, at: usize) -> Arc<Making> {
        self.lock().groups.get(at).map(|group| group.making.clone()).unwrap_or_default()
    }

    /// The members of a group that reach nothing any more.
    pub fn gone_from(&self, at: usize) -> Vec<Rank> {
        let state = self.lock();
        let Some(group) = state.groups.get(at) else { return Vec::new() };
        let gone = group.down.iter().filter(|(_, fault)| reaches_nothing(**fault));
        gone.map(|(place, _)| group.membership.members[*place]).collect()
    }

    /// Why the next operation of a group cannot end well, if that is known.
    pub fn failure_of_next(&self, at: usize) -> Option<Fault> {
        let state = self.lock();
        let group = state.groups.get(at)?;
        group.failure(group.next())
    }

    /// Whether a window of a group is never made here any more: the group is gone, or no operation of that number ends well.
    pub fn never_makes(&self, (id, operation): Key) -> bool {
        let state = self.lock();
        match state.ids.get(&id) {
            Some(at) => state.groups[*at].failure(operation).is_some(),
            None => state.is_gone(id) || state.is_broken_from(id, operation),
        }
    }

    /// Boards that were told of for a group which is broken before it is made here, if it ever is: they are of no use.
    #[cold]
    pub(super) fn return_early_boards(&self, state: &mut State, id: u64) {
        let State { unclaimed, peers, .. } = state;
        let Some(waiting) = unclaimed.get_mut(&id) else { return };
        let is_board = |message: &mut Unclaimed| {
            message.cookie == 0 && matches!(Record::parse(message.bytes.clone()), Some(Record::Board { .. }))
        };
        for message in waiting.extract_if(.., is_board) {
            let peer = &mut peers[message.from.index()];
            peer.unclaimed = peer.unclaimed.saturating_sub(message.weight());
            self.on_board_too_late(message.from, id);
        }
    }

    /// Why no group of these ranks can work from here on, if one cannot.
    pub fn obstacle(&self, members: &[Rank]) -> Option<Fault> {
        let state = self.lock();
        let lost = || members.iter().find_map(|member| state.down.get(member).copied());
        if state.closed { Some(Fault::Shutdown) } else { lost() }
    }

    /// Makes a group of which the others hear from this rank: they wait for it, or do not know of it yet.
    pub fn found(self: &Arc<Self>, members: Vec<Rank>, origin: Origin) -> Option<(usize, Arc<Membership>)> {
        let id = self.new_id();
        let hub = self.clone();
        let Some((at, membership)) = self.add(id, members.clone(), None) else {
            let membership = Membership::new(id, members, self.me, &self.nodes)?;
            if origin == Origin::Called {
                self.lock().note_gone(id);
                self.handle()?.post_run(move |scope| hub.refuse_to_found(scope, &membership));
            }
            return None;
        };
        let group = membership.clone();
        self.handle()?.post_run(move |scope| {
            let members = group.members.to_vec();
            let record = Record::Introduce { group: at as u16, id, origin, members }.encode();
            let mut state = hub.lock();
            if let Some(group) = state.groups.get_mut(at) {
                group.others.iter_mut().for_each(|member| member.introduced = true);
            }
            hub.tell_others(scope, &mut state, &group, &record);
        });
        Some((at, membership))
    }

    /// There are too many groups for one that the others wait to be offered: they are, and it is broken.
    #[cold]
    fn refuse_to_found(self: &Arc<Self>, scope: &mut Scope<'_>, group: &Membership) {
        let (id, members) = (group.id, group.members.to_vec());
        let record = Record::Introduce { group: NO_NUMBER, id, origin: Origin::Called, members }.encode();
        self.tell_others(scope, &mut self.lock(), group, &record);
        self.tell_of_no_room(scope, group);
    }

    /// A group that a peer has founded: the one whose founder and members these are, or any that was made on the fly.
    pub fn take_offer(
        &self,
        wanted: Option<(Rank, &[Rank])>,
        waits: &Waits<'_>,
    ) -> Option<Result<(usize, Arc<Membership>), Fault>> {
        let mut state = self.lock();
        if state.closed {
            return Some(Err(Fault::Shutdown));
        }
        let State { offers, groups, peers, down, losses, .. } = &mut *state;
        let found = offers.iter().position(|offer| match wanted {
            None => offer.origin == Origin::OnTheFly,
            Some((from, members)) => {
                offer.from == from && offer.origin == Origin::Called && *offer.members == *members
            }
        });
        if let Some(offer) = found.and_then(|found| offers.remove(found)) {
            let peer = &mut peers[offer.from.index()];
            let Some(at) = offer.at else {
                peer.refused = peer.refused.saturating_sub(1);
                return Some(Err(Fault::OutOfMemory(TOO_MANY_OFFERS)));
            };
            peer.offered = peer.offered.saturating_sub(1);
            return Some(Ok((at, groups.get(at)?.membership.clone())));
        }
        let (_, members) = wanted?;
        let since = |member: &Rank| losses.get(member).filter(|(waited, _)| *waited >= waits.name);
        let lost = |member| down.get(member).or_else(|| since(member).map(|(_, fault)| fault));
        members.iter().find_map(lost).map(|fault| Err(*fault))
    }

    /// Somebody who waits for offers, until that is dropped.
    pub fn waits_for_offers(&self) -> Waits<'_> {
        let mut state = self.lock();
        state.waited += 1;
        Waits { hub: self, name: state.waited }
    }

    /// The last handle of a group is gone. As a rule all members drop it after the same operation. Those who do not, hear of
    /// it: they may call another one, and where something went wrong they hear of that.
    pub fn abandon(self: &Arc<Self>, handle: &Handle, at: usize) {
        let hub = self.clone();
        handle.post_run(move |scope| {
            let mut state = hub.lock();
            if let Some(group) = state.groups.get_mut(at) {
                group.settle();
            }
            let Some(group) = state.groups.get(at) else { return };
            let next = group.next();
            let parent = group.parent.and_then(|(parent, _)| state.ids.get(&parent));
            let parents = parent.and_then(|parent| state.groups.get(*parent)?.broken);
            let cause = group.broken.or(parents).map(|(_, cause)| cause);
            let lost = || {
                let members = group.membership.members.iter();
                members.filter_map(|member| state.down.get(member)).next().copied()
            };
            if let Some(cause) = cause.or_else(lost) {
                state = hub.break_from(scope, state, at, next, cause);
            } else {
                // Whoever calls another tells all.
                let record = Record::Left { id: group.membership.id, first: next }.encode();
                let to: Vec<Rank> =
                    group.neighbours().into_iter().map(|place| group.membership.members[place]).collect();
                let mut way = Way { hub: &hub, scope, peers: &mut state.peers };
                to.into_iter().for_each(|member| way.record(member, &record));
            }
            if let Some(group) = state.groups.get_mut(at) {
                group.abandoned = true;
                if group.slots.is_empty() {
                    hub.remove(&mut state, at);
                }
            }
        });
    }

    /// A peer names a group.
    pub(super) fn introduced(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: MutexGuard<'_, State>,
        source: Rank,
        (number, id, origin): (u16, u64, Origin),
        members: Vec<Rank>,
    ) {
        if number != NO_NUMBER {
            let numbers = &mut state.peers[source.index()].numbers;
            let number = usize::from(number);
            if numbers.len() <= number {
                numbers.resize(number + 1, None);
            }
            numbers[number] = Some(Known { id, at: usize::MAX });
        }
        if origin == Origin::Agreed {
            return;
        }
        let sound = State::founder(id) == source && !state.ids.contains_key(&id) && !state.is_gone(id);
        let membership = Membership::new(id, members.clone(), self.me, &self.nodes);
        let (Some(membership), true) = (membership, sound) else {
            return self.corrupt(scope, state, source);
        };
        let members = members.into_boxed_slice();
        let membership = Arc::new(membership);
        let added = if state.peers[source.index()].offered < MOST_OFFERED {
            state.add(GroupState::new(membership.clone(), None))
        } else {
            None
        };
        let Some(at) = added else {
            return self.refuse_offer(scope, state, source, membership, (origin, members));
        };
        state.peers[source.index()].offered += 1;
        state.offers.push_back(Offer { from: source, origin, at: Some(at), members });
        let wakers = std::mem::take(&mut state.waiters);
        let waiting = state.unclaimed.remove(&id).unwrap_or_default();
        self.tell_of_early_break(scope, &mut state, id);
        drop(state);
        for message in waiting {
            self.claimed(scope, id, message);
        }
        wakers.into_values().for_each(Waker::wake);
    }

    /// There is no room for a group that a peer has founded: it breaks, for all of its members.
    #[cold]
    fn refuse_offer(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: MutexGuard<'_, State>,
        founder: Rank,
        membership: Arc<Membership>,
        (origin, members): (Origin, Box<[Rank]>),
    ) {
        let id = membership.id;
        tracing::warn!(%founder, "too many groups that nobody has asked for: one that a peer founded is refused");
        let waiting = state.unclaimed.remove(&id).unwrap_or_default();
        state.note_refused(id, membership);
        if origin == Origin::Called {
            let refused = &mut state.peers[founder.index()].refused;
            *refused += 1;
            if *refused > MOST_OFFERED {
                return self.corrupt(scope, state, founder);
            }
            state.offers.push_back(Offer { from: founder, origin, at: None, members });
        }
        let record = Record::Broken { id, first: 0, cause: Fault::OutOfMemory(TOO_MANY_OFFERS) }.encode();
        Way { hub: self, scope, peers: &mut state.peers }.record(founder, &record);
        let wakers = std::mem::take(&mut state.waiters);
        drop(state);
        for message in waiting {
            self.claimed(scope, id, message);
        }
        wakers.into_values().for_each(Waker::wake);
    }

    /// A message for a group that is still to be made here is kept until it is; one for a group that is gone is for nobody.
    #[cold]
    pub(super) fn unclaimed(
        self: &Arc<Self>,
        scope: &mut Scope<'_>,
        mut state: MutexGuard<'_, State>,
        from: Rank,
        id: u64,
        cookie: u64,
        body: &Body<'_>,
    ) {
        if state.is_gone(id) {
            return;
        }
        let message = Unclaimed { from, cookie, bytes: body.to_bytes() };
        let peer = &mut state.peers[from.index()];
        if peer.unclaimed + message.weight() > MOST_UNCLAIMED {
            return self.corrupt(scope, state, from);
        }
        peer.unclaimed += message.weight();
        state.unclaimed.entry(id).or_default().push(message);
    }
}
