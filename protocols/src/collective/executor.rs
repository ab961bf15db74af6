//! The executor: starts operations, and has their parts taken in.
//!
//! Everything happens under the progress token of one context, most of it in the handler of a part. The state has a lock
//! besides, which is never waited for but by callers on other threads; it is not held while code of the user's runs.

use super::buffers::Buffers;
use super::execution::Executor;
use super::foreign::Retire;
use super::group_state::{Choice, GroupState, MOST_UNDER_WAY, Membership, Notice, Op, Slot, WINDOW};
use super::layout::Layout;
use super::outlet::{Outlet, Way};
use super::part::Part;
use super::plan::{Plan, Unfit};
use super::reduce::Combiner;
use super::run::{Input, Run};
use super::schedule::Kind;
use super::stage::{Area, LEAST_LENT, MOST_STAGED};
use super::staged::Share;
use super::state::State;
use super::wire::{Record, parse_part_info};
use crate::ends::on_end;
use crate::window::WindowHome;
use posthaste_core::protocol::{Incoming, Protocol};
use posthaste_core::slot::Value;
use posthaste_core::sync::lock;
use posthaste_core::{Collective, Endpoint, Fault, Handle, Messager, Rank, RegisterError, Scope, Ticket};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

const NAME: &str = "posthaste.collective";
/// By how many operations the caller of one on the boards may be late to look. Then it goes on by messages, so that it holds up
/// none behind it: nobody may ever look.
const MOST_UNSEEN: u64 = 1 << 10;

/// The collective operations of one client on one rank.
pub(crate) struct Hub {
    state: Mutex<State>,
    pub(super) outlet: OnceLock<Outlet>,
    pub(super) me: Rank,
    pub(super) nodes: Box<[u32]>,
    /// What boards are made of. Weak, because it has a handle of the context.
    pub(super) home: OnceLock<Weak<WindowHome>>,
    pub(super) buffers: Buffers,
    /// Bytes of a group's stages, at most.
    stage_bytes: AtomicU64,
    /// Whose record is being taken in, under the token; nobody's if it is no rank of the job.
    pub(super) handling: AtomicU32,
}

/// For as long as a record is being taken in.
struct Handling<'h>(&'h AtomicU32);

impl<'h> Handling<'h> {
    fn of(whose: &'h AtomicU32, source: Rank) -> Self {
        whose.store(source.0, Ordering::Relaxed);
        Self(whose)
    }
}

impl Drop for Handling<'_> {
    fn drop(&mut self) {
        self.0.store(u32::MAX, Ordering::Relaxed);
    }
}

/// What is under way, for whoever looks why a job hangs.
impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut hub = f.debug_struct("Hub");
        hub.field("me", &self.me);
        if let Ok(state) = self.state.try_lock() {
            state.groups.iter().for_each(|(_, group)| group.describe(&mut hub));
        }
        hub.finish_non_exhaustive()
    }
}

/// A call, as all members have to make it.
#[derive(Debug)]
pub(crate) struct Call {
    pub plan: Arc<Plan>,
    /// For errors.
    pub name: Collective,
    /// What was called, with all that must agree.
    pub mark: u32,
    pub layout: Layout,
    pub input: Input,
    pub combiner: Option<Combiner>,
    /// It is one that is done on boards where there are any.
    pub is_small: bool,
    /// It is one whose members lend each other their parts, as far as they can.
    pub lends: bool,
    /// Which part of what others have laid out is for this rank, where boards tell of that.
    pub share: Option<Share>,
    /// The group's own way to carry out programs.
    pub executor: Option<Arc<dyn Executor>>,
}

impl Call {
    /// One that is done on boards where there are any.
    pub fn small(plan: Arc<Plan>, name: Collective, mark: u32, layout: Layout, input: Input) -> Call {
        let (combiner, share, executor) = (None, None, None);
        Call { plan, name, mark, layout, input, combiner, is_small: true, lends: false, share, executor }
    }
}

/// How an operation started.
#[derive(Debug)]
pub(crate) enum Begun {
    Ended(Value),
    Pending(Ticket),
    Failed(Fault),
}

pub(super) type Guard<'g> = MutexGuard<'g, State>;

/// The protocol as it is registered.
struct Registered(Arc<Hub>);

impl Protocol for Registered {
    fn name(&self) -> &str {
        NAME
    }

    fn overtakes_held(&self) -> bool {
        true
    }

    // Tags of parts.
    fn takes_requests(&self) -> bool {
        false
    }

    #[inline]
    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let source = message.source.rank;
        // All of them go from first context to first context, whose tickets they name.
        let is_at_the_wrong_place = |me: Endpoint| (scope.me(), message.source.context) != (me, me.context);
        if self.0.handle().is_some_and(|handle| is_at_the_wrong_place(handle.me())) {
            return self.0.corrupt(scope, self.0.lock(), source);
        }
        if message.cookie == 0 {
            let record = Record::parse(message.body.to_bytes());
            let handling = Handling::of(&self.0.handling, source);
            self.0.on_record(scope, source, record);
            return drop(handling);
        }
        let info = parse_part_info(message.info);
        let part = match info {
            Some((_, Some(place))) if message.body.is_empty() => self.0.lent(source, place).map(Part::Lent),
            Some((_, None)) => Some(Part::Body(&message.body)),
            _ => None,
        };
        let state = self.0.lock();
        match (info, part) {
            (Some((slice, _)), Some(part)) => {
                self.0.on_part(scope, state, source, message.cookie, slice, &part);
            }
            _ => self.0.corrupt(scope, state, source),
        }
    }

    fn on_peer_down(&self, rank: Rank, fault: Fault) {
        let hub = self.0.clone();
        let Some(handle) = self.0.handle() else { return };
        on_end(handle, rank, fault, move |scope, fault| hub.peer_down(scope, rank, fault));
    }

    fn on_peer_up(&self, scope: &mut Scope<'_>, rank: Rank, _incarnation: u32) {
        // What tells of the death may still be on its way.
        if self.0.handle().is_some_and(|handle| handle.me() == scope.me()) {
            self.0.peer_down(scope, rank, Fault::PeerLost(rank));
            self.0.peer_up(rank);
        }
    }

    fn on_close(&self) {
        let wakers = {
            let mut state = self.0.lock();
            state.closed = true;
            state.groups.iter().for_each(|(_, group)| group.upset());
            std::mem::take(&mut state.waiters)
        };
        wakers.into_values().for_each(std::task::Waker::wake);
    }
}

impl Hub {
    /// Registers the collective operations of a client, whose ranks are on these hosts; the world is its first group.
    pub fn new(messager: &dyn Messager, nodes: &[u32]) -> Result<Arc<Hub>, RegisterError> {
        let handle = messager.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        let (me, size) = (handle.me().rank, messager.peers().ranks);
        let mut all = nodes.to_vec();
        all.resize(size as usize, 0);
        let mut state = State::new(me, all.len());
        let world = Membership::new(0, (0..size).map(Rank).collect(), me, &all);
        let world = Arc::new(world.ok_or(RegisterError::Closed)?);
        // The first group of every rank.
        state.add(GroupState::new(world, None));
        let hub = Arc::new(Hub {
            state: Mutex::new(state),
            outlet: OnceLock::new(),
            me,
            nodes: all.into(),
            home: OnceLock::new(),
            buffers: Buffers::default(),
            stage_bytes: AtomicU64::new(MOST_STAGED),
            handling: AtomicU32::new(u32::MAX),
        });
        let id = messager.register(Arc::new(Registered(hub.clone())))?;
        let context = Arc::downgrade(handle.shared_state());
        // Set once: this hub was made here.
        let _set = hub.outlet.set(Outlet { context, id });
        Ok(hub)
    }

    /// From now on stages have so many bytes at most.
    pub fn set_stage_bytes(&self, bytes: u64) {
        self.stage_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn most_staged(&self) -> u64 {
        self.stage_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn lock(&self) -> Guard<'_> {
        lock(&self.state)
    }

    /// Takes the number of the next operation of a group, in the order of the calls, and finds its plan; and a place in
    /// this rank's stage for so many bytes, if they are to be lent and there is one.
    ///
    /// # Errors
    /// If the schedule has no plan for it, or too many are under way; no number is taken then.
    pub fn reserve(
        &self,
        at: usize,
        kind: Kind,
        root: usize,
        choice: &Choice,
        lends: Option<usize>,
    ) -> Result<(u64, Arc<Plan>, Option<Area>), Unfit> {
        let mut state = self.lock();
        loop {
            let Some(group) = state.groups.get_mut(at) else { return Err(Unfit::NotOffered) };
            if group.slots.len() >= MOST_UNDER_WAY {
                return Err(Unfit::TooMany);
            }
            if let Some(plan) = group.plan(kind, root, choice) {
                let operation = group.next();
                group.slots.push_back(Slot::Reserved);
                let area =
                    lends.and_then(|len| group.stage(&*self.home()?, operation, len, self.most_staged()));
                return Ok((operation, plan, area));
            }
            // A schedule may be code of the user's.
            let membership = group.membership.clone();
            drop(state);
            let plan = Plan::new(choice.schedule(), kind, &membership.place(root))?;
            state = self.lock();
            if let Some(group) = state.groups.get_mut(at)
                && let Some(oldest) = group.keep_plan(kind, root, choice, plan)
            {
                drop(state);
                drop(oldest);
                state = self.lock();
            }
        }
    }

    /// Starts an operation whose number was reserved.
    pub fn start(self: &Arc<Self>, scope: &mut Scope<'_>, at: usize, operation: u64, call: Call) -> Begun {
        let mut state = self.lock();
        if state.closed {
            return Begun::Failed(Fault::Shutdown);
        }
        let Some(group) = state.groups.get_mut(at) else { return Begun::Failed(Fault::Shutdown) };
        let oldest = group.base;
        if operation >= oldest + MOST_UNSEEN && matches!(group.slots.front(), Some(Slot::OnBoard(_))) {
            state = self.go_by_messages(scope, state, at, oldest);
        }
        let Some(group) = state.groups.get_mut(at) else { return Begun::Failed(Fault::Shutdown) };
        if let Some(fault) = group.failure(operation) {
            self.give_up(&mut state, at, operation);
            return Begun::Failed(fault);
        }
        let absent = group.absence(operation);
        let closed = absent.filter(|fault| matches!(fault, Fault::PeerClosed(_)));
        if let Some(fault) = absent.filter(|_| closed.is_none()) {
            self.give_up(&mut state, at, operation);
            drop(self.break_from(scope, state, at, operation, fault));
            return Begun::Failed(fault);
        }
        let is_long = call.lends && call.layout.total(&call.plan) >= LEAST_LENT;
        let executor = call.executor.map(|executor| (executor, self.retire()));
        let Some(mut run) = Run::by(call.plan, call.layout, call.input, call.combiner, executor) else {
            self.give_up(&mut state, at, operation);
            let fault = Fault::OutOfMemory("no memory for what a collective operation gives");
            drop(self.break_from(scope, state, at, operation, fault));
            return Begun::Failed(fault);
        };
        let notices: Vec<_> = match (call.lends, run.lends()) {
            (true, true) => Vec::new(),
            // Whoever cannot lend asks.
            (true, false) => {
                run.await_room();
                run.long_sends().into_iter().map(|peer| (peer, Notice::Ask)).collect()
            }
            (false, _) => run.long_receipts().collect(),
        };
        let Call { is_small, lends, share, .. } = call;
        let op = Op { run, mark: call.mark, call: call.name, ticket: None, is_small, share, looks: 0 };
        group.started = group.started.max(operation + 1);
        if let Some(slot) = group.slot(operation) {
            *slot = Slot::Running(Box::new(op));
        }
        let early = group.take_early(operation);
        // Before anything that others say when they hear of this call.
        if (is_small || lends) && group.near.boards.is_none() {
            self.count_call(scope, &mut state, at, !is_long);
        }
        if !notices.is_empty() {
            let State { groups, peers, .. } = &mut *state;
            let mut way = Way { hub: self, scope, peers };
            for (peer, notice) in notices {
                way.notice(&mut groups[at], at, operation, peer, notice);
            }
        }
        for early in early {
            state = self.take_in(scope, state, at, operation, early);
        }
        state = self.take_from_boards(scope, state, at, operation);
        if let Some(fault) = closed
            && !state.groups.get(at).is_some_and(|group| group.needs_nobody_gone(operation))
        {
            // Unless it does not fit what has come.
            let fault = state.groups.get(at).and_then(|group| group.failure(operation)).unwrap_or(fault);
            drop(self.break_from(scope, state, at, operation, fault));
            return Begun::Failed(fault);
        }
        let (mut state, ended) = self.progress(scope, state, at, operation);
        self.announce(scope, &mut state, at);
        if let Some(value) = ended {
            return Begun::Ended(value);
        }
        let Some(group) = state.groups.get_mut(at) else { return Begun::Failed(Fault::Shutdown) };
        let failure = group.failure(operation);
        match group.slot(operation) {
            Some(Slot::Running(op)) => match scope.operation(None) {
                Ok(ticket) => {
                    op.ticket = Some(ticket);
                    self.watch(scope, &mut state);
                    Begun::Pending(ticket)
                }
                Err(fault) => Begun::Failed(fault),
            },
            _ => Begun::Failed(failure.unwrap_or(Fault::Shutdown)),
        }
    }

    /// What drops executions once this context has a turn: an operation ends with the lock held.
    fn retire(self: &Arc<Self>) -> Retire {
        let hub = Arc::downgrade(self);
        Box::new(move |users| {
            if let Some(handle) = hub.upgrade().and_then(|hub| hub.handle()) {
                handle.post_run(move |_| drop(users));
            }
        })
    }

    /// The hosts of the job's ranks.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// This rank takes no part in its next operation.
    pub fn refuse(self: &Arc<Self>, handle: &Handle, at: usize, name: Collective) {
        let operation = {
            let mut state = self.lock();
            let Some(group) = state.groups.get_mut(at) else { return };
            let operation = group.next();
            if group.failure(operation).is_some() {
                return;
            }
            group.slots.push_back(Slot::Ended);
            group.sweep();
            operation
        };
        let hub = self.clone();
        handle.post_run(move |scope| {
            let cause = Fault::CollectiveRefused { rank: hub.me, call: name };
            drop(hub.break_from(scope, hub.lock(), at, operation, cause));
        });
    }

    /// An operation that was called is not started.
    pub(super) fn give_up(&self, state: &mut State, at: usize, operation: u64) {
        if let Some(group) = state.groups.get_mut(at) {
            if let Some(slot) = group.slot(operation) {
                *slot = Slot::Ended;
            }
            group.take_early(operation);
            group.sweep();
            if group.is_over() {
                self.remove(state, at);
            }
        }
    }

    /// Tells members how many operations were started here: those that wait for it, and now and then those that send.
    #[inline]
    pub(super) fn announce(self: &Arc<Self>, scope: &mut Scope<'_>, state: &mut State, at: usize) {
        let Some(group) = state.groups.get_mut(at) else { return };
        if !group.started.is_multiple_of(WINDOW / 2) && !group.wanted {
            return;
        }
        let now_and_then = group.started.is_multiple_of(WINDOW / 2);
        group.wanted = false;
        let State { groups, peers, .. } = state;
        let mut way = Way { hub: self, scope, peers };
        for place in 0..groups[at].others.len() {
            let group = &mut groups[at];
            let operations = group.started;
            let member = &mut group.others[place];
            let wanted = member.wants.is_some_and(|wanted| wanted <= operations);
            if wanted || (member.heard && now_and_then) {
                (member.heard, member.wants) = (false, None);
                way.member_record(group, at, place, &Record::Started { group: at as u16, operations });
            }
            let group = &mut groups[at];
            group.wanted |= group.others[place].wants.is_some();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::group_state::LATE;
    use super::super::records::MOST_RECORDS;
    use super::super::wire::{Origin, Tag};
    use super::*;
    use crate::fixture::{first_of, hears};
    use posthaste_core::ContextId;
    use posthaste_core::context::Face;
    use posthaste_core::device::{Body, PeerEvent};
    use posthaste_core::engine::{Engine, Work};

    #[test]
    fn what_is_said_to_another_context_than_the_first_is_no_members() {
        let client = first_of(2, 2);
        let hub = Hub::new(&client, &[0, 0]).expect("the name is free");
        let record = Record::Want { group: 0, operations: 0 }.encode();
        let said = |at: usize, from: u16| {
            let source = Endpoint::new(Rank(1), ContextId(from));
            hears(&client, at, source, &Registered(hub.clone()), &record)
        };
        assert_eq!(said(0, 0), None);
        assert_eq!(said(1, 0), Some(Fault::PeerCorrupt(Rank(1))));
        assert_eq!(said(0, 1), Some(Fault::PeerCorrupt(Rank(1))));
    }

    #[test]
    fn a_loss_ends_a_wait_for_an_offer_though_the_rank_is_up_again_at_once() {
        let client = first_of(2, 1);
        let hub = Hub::new(&client, &[0, 0]).expect("the name is free");
        let members = [Rank(1), Rank(0)];
        let look = |waits: &_| hub.take_offer(Some((Rank(1), &members)), waits).map(Result::err);
        let waits = hub.waits_for_offers();
        assert_eq!(look(&waits), None);
        let up = |engine: &mut Engine| Registered(hub.clone()).on_peer_up(&mut engine.scope(), Rank(1), 1);
        assert!(client.contexts()[0].enter(up).is_ok());
        assert_eq!(look(&waits), Some(Some(Fault::PeerLost(Rank(1)))));
        // Whoever begins to wait now waits for the incarnation that is there.
        assert_eq!(look(&hub.waits_for_offers()), None);
    }

    /// A part that nobody waited for may come when thousands of operations have gone by the boards since.
    #[test]
    fn a_part_of_an_operation_that_is_long_over_is_nobodys_fault() {
        for base in [LATE, LATE + 1, 20_000, 50_000] {
            let client = first_of(2, 1);
            let hub = Hub::new(&client, &[0; 2]).expect("the name is free");
            {
                let group = &mut hub.lock().groups[0];
                (group.base, group.started) = (base, base);
            }
            let tag = Tag { group: 0, operation: 0, phase: 0, mark: 1 << 15 };
            let fault = client.contexts()[0].enter(|engine| {
                let mut scope = engine.scope();
                let part = Part::Body(&Body::Short(&[]));
                hub.on_part(&mut scope, hub.lock(), Rank(1), tag.to_word(), 0, &part);
                scope.fault_of(Rank(1))
            });
            assert_eq!(fault.ok(), Some(None), "after {base} operations");
            assert!(hub.lock().groups[0].early.is_empty());
        }
    }

    /// Who has left a group in order is none of its members any more, whoever comes under its number.
    #[test]
    fn who_left_a_group_does_not_come_back_to_it() {
        for fault in [Fault::PeerLost(Rank(1)), Fault::PeerClosed(Rank(1))] {
            let client = first_of(3, 1);
            let hub = Hub::new(&client, &[0; 3]).expect("the name is free");
            let handle = &client.contexts()[0];
            for event in [PeerEvent::down(fault), PeerEvent::Up { incarnation: 1 }] {
                handle.post_work(Work::Peer(Rank(1), event));
                assert!(handle.enter(|_| ()).is_ok());
            }
            let state = hub.lock();
            let told = state.groups[0].failure(0).or(state.groups[0].absence(0));
            assert_eq!(told, Some(fault));
        }
    }

    #[test]
    fn what_was_offered_with_a_lost_member_is_not_for_who_asks_behind_its_restart() {
        let client = first_of(3, 1);
        let hub = Hub::new(&client, &[0; 3]).expect("the name is free");
        let members = [1, 0, 2].map(Rank);
        let (group, id, origin) = (1, 1 << 32 | 7, Origin::Called);
        let record = Record::Introduce { group, id, origin, members: members.to_vec() }.encode();
        let source = Endpoint::new(Rank(1), ContextId(0));
        let heard = hears(&client, 0, source, &Registered(hub.clone()), &record);
        assert_eq!(heard, None);
        let again = |engine: &mut Engine| Registered(hub.clone()).on_peer_up(&mut engine.scope(), Rank(2), 1);
        assert!(client.contexts()[0].enter(again).is_ok());
        assert!(hub.take_offer(Some((Rank(1), &members)), &hub.waits_for_offers()).is_none());
    }

    #[test]
    fn who_reads_no_refusals_is_not_refused_for_ever() {
        let client = first_of(2, 1);
        let hub = Hub::new(&client, &[0, 0]).expect("the name is free");
        let offer = |number: u32| {
            let id = (1 << 32) | u64::from(number);
            let members = vec![Rank(0), Rank(1)];
            let record = Record::Introduce { group: 1, id, origin: Origin::OnTheFly, members }.encode();
            let source = Endpoint::new(Rank(1), ContextId(0));
            hears(&client, 0, source, &Registered(hub.clone()), &record)
        };
        let mut refused = 1;
        let fault = loop {
            match offer(refused) {
                None => refused += 1,
                Some(fault) => break fault,
            }
            assert!(refused < 1 << 20, "so many refusals are kept for one that reads none");
        };
        assert_eq!(fault, Fault::PeerCorrupt(Rank(1)));
        assert!(refused > MOST_RECORDS as u32, "after {refused}");
    }
}
