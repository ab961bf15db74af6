//! The way out: parts and records of collective operations, and what waits when a peer has no room.

use super::executor::Hub;
use super::group_state::{GroupState, Notice, WINDOW};
use super::run::{Outgoing, Sent};
use super::state::{Peer, settle};
use super::wire::{Origin, PART_INFO, Record, Tag, put_part_info};
use crate::exchange::Again;
use bytes::Bytes;
use posthaste_core::context::Shared;
use posthaste_core::engine::{Given, Payload, SendArgs};
use posthaste_core::{Endpoint, Fault, Handle, ProtocolId, Rank, Scope, SendError, Ticket};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Wake, Waker};

/// The way out of the hub. Weak, because the context owns the protocol.
#[derive(Debug)]
pub(super) struct Outlet {
    pub context: Weak<Shared>,
    pub id: ProtocolId,
}

/// Waits until what is queued for a peer, or waits for room there, is on its way, or for memory.
struct Room {
    hub: Arc<Hub>,
    to: Rank,
    ticket: Ticket,
    /// There was no memory, either.
    again: Option<Again>,
}

impl Wake for Room {
    fn wake(self: Arc<Self>) {
        if let Some(handle) = self.hub.handle() {
            handle.post_run(move |scope| self.look(scope));
        }
    }
}

impl Room {
    /// Whether there is room now; if not, this is called again when there is.
    fn poll(self: &Arc<Self>) -> bool {
        let Some(handle) = self.hub.handle() else { return false };
        let waker = Waker::from(self.clone());
        handle.slots().poll(self.ticket, &mut Context::from_waker(&waker)).is_ready()
    }

    fn look(self: Arc<Self>, scope: &mut Scope<'_>) {
        let time_has_come = |scope: &mut Scope<'_>| {
            let handle = self.hub.handle();
            self.again.zip(handle).is_some_and(|(again, handle)| again.has_come(&handle, scope))
        };
        if self.poll() || time_has_come(scope) {
            self.hub.room_made(scope, self.to);
        }
    }
}

/// What a send needs of the state besides the operation itself.
pub(super) struct Way<'w, 's> {
    pub hub: &'w Arc<Hub>,
    pub scope: &'w mut Scope<'s>,
    pub peers: &'w mut [Peer],
}

impl Way<'_, '_> {
    fn args<'i>(&self, to: Rank, cookie: u64, info: &'i [u8]) -> SendArgs<'i> {
        let target = Endpoint::new(to, self.scope.me().context);
        SendArgs { target, protocol: self.hub.protocol(), cookie, info, relaxed: false }
    }

    /// From now on everything to that peer waits for the ticket, unless it has ended already.
    fn congest(&mut self, to: Rank, ticket: Ticket) {
        self.wait_for(Room { hub: self.hub.clone(), to, ticket, again: None });
    }

    fn wait_for(&mut self, room: Room) {
        let room = Arc::new(room);
        if !room.poll() {
            self.peers[room.to.index()].congested = true;
        }
    }

    /// Has a record wait until there is room.
    fn keep(&mut self, to: Rank, record: Bytes, cause: Option<Rank>) {
        self.peers[to.index()].records.push_back((record, cause));
        if let Some(cause) = cause {
            self.peers[cause.index()].caused += 1;
        }
    }

    /// Sends a record, now or in its turn, or when there is memory. One that cannot be sent any more is for a peer that is gone.
    pub fn record(&mut self, to: Rank, record: &Bytes) {
        let handled = self.hub.handling.load(Ordering::Relaxed);
        self.record_of(to, record, (handled != u32::MAX).then_some(Rank(handled)));
    }

    /// The same of what follows from no single record of a peer's: a group tells of its break a few times at most.
    pub fn own_record(&mut self, to: Rank, record: &Bytes) {
        self.record_of(to, record, None);
    }

    fn record_of(&mut self, to: Rank, record: &Bytes, cause: Option<Rank>) {
        if self.peers[to.index()].congested {
            return self.keep(to, record.clone(), cause);
        }
        let args = self.args(to, 0, &[]);
        match self.scope.give(&args, Payload::Borrowed(record)) {
            Ok(Given::Done) => {}
            Ok(Given::Queued(ticket)) => self.scope.detach(ticket),
            // It has its place; what follows it waits here, where it is known what that follows from.
            Ok(Given::Kept(ticket, deposit)) => {
                deposit.leave();
                self.congest(to, ticket);
            }
            Err((SendError::Fault(Fault::OutOfMemory(what)), _)) => {
                tracing::debug!(%to, what, "collective record put off");
                let again = self.hub.handle().map(|handle| Again::towards(to, &handle, self.scope));
                match again.transpose() {
                    Ok(None) => {}
                    // It keeps its place, and is the first to go when the time has come.
                    Ok(Some(again)) => {
                        let hub = self.hub.clone();
                        let (ticket, again) = (again.ticket, Some(again));
                        self.wait_for(Room { hub, to, ticket, again });
                        self.keep(to, record.clone(), cause);
                    }
                    Err(fault) => tracing::warn!(%to, %fault, "collective record not sent"),
                }
            }
            Err((error, _)) => tracing::debug!(%to, %error, "collective record not sent"),
        }
    }

    /// Sends the records that waited, for as long as there is room.
    fn records(&mut self, to: Rank) {
        while !self.peers[to.index()].congested
            && let Some((record, cause)) = self.peers[to.index()].records.pop_front()
        {
            settle(self.peers, cause);
            // One for which there is no room after all goes back to its place.
            let mut behind = std::mem::take(&mut self.peers[to.index()].records);
            self.record_of(to, &record, cause);
            let records = &mut self.peers[to.index()].records;
            if records.is_empty() {
                // As a rule: those behind it are not moved.
                std::mem::swap(records, &mut behind);
            }
            records.extend(behind);
        }
    }

    /// Tells a member this rank's number for a group, before it is used for the first time.
    #[cold]
    fn introduce(&mut self, group: &mut GroupState, at: usize, place: usize) {
        group.others[place].introduced = true;
        let record = Record::Introduce {
            group: at as u16,
            id: group.membership.id,
            origin: Origin::Agreed,
            members: Vec::new(),
        };
        self.record(group.membership.members[place], &record.encode());
    }

    /// A record about a group, for one of its members.
    pub fn member_record(&mut self, group: &mut GroupState, at: usize, place: usize, record: &Record) {
        if at != 0 && !group.others[place].introduced {
            self.introduce(group, at, place);
        }
        self.record(group.membership.members[place], &record.encode());
    }

    /// Whether the part of an operation may go to a member; if not, the member is asked to say when.
    #[inline]
    pub fn is_within_window(
        &mut self,
        group: &mut GroupState,
        at: usize,
        place: usize,
        operation: u64,
    ) -> bool {
        if operation < group.others[place].started + WINDOW {
            return true;
        }
        self.ask(group, at, place, operation + 1 - WINDOW);
        false
    }

    #[cold]
    fn ask(&mut self, group: &mut GroupState, at: usize, place: usize, operations: u64) {
        let member = &mut group.others[place];
        if !member.asked {
            member.asked = true;
            self.member_record(group, at, place, &Record::Want { group: at as u16, operations });
        }
    }

    /// Says something about an operation.
    pub fn notice(
        &mut self,
        group: &mut GroupState,
        at: usize,
        operation: u64,
        place: usize,
        notice: Notice,
    ) {
        if !self.is_within_window(group, at, place, operation) {
            group.others[place].notices.push((operation, notice));
            return;
        }
        let number = at as u16;
        let record = match notice {
            Notice::Clear { phase, colour, len } => {
                Record::Clear { group: number, operation, phase, colour, len }
            }
            Notice::Ask => Record::Ask { group: number, operation },
            Notice::Called { mark, bytes } => Record::Called { group: number, operation, mark, bytes },
        };
        self.member_record(group, at, place, &record);
    }

    /// Sends a part of an operation.
    #[inline]
    pub fn part(
        &mut self,
        group: &mut GroupState,
        at: usize,
        operation: u64,
        mark: u32,
        out: &Outgoing<'_>,
    ) -> Result<Sent, Fault> {
        let to = group.membership.members[out.to];
        if !self.is_within_window(group, at, out.to, operation) {
            return Ok(Sent::Later);
        }
        // Who starts late is not to keep more than it would expect of an honest member. Whoever waits for a long one has started.
        if !out.long
            && let Err(operations) = group.others[out.to].check_ahead(operation, out.payload.len())
        {
            self.ask(group, at, out.to, operations);
            return Ok(Sent::Later);
        }
        if at != 0 && !group.others[out.to].introduced {
            self.introduce(group, at, out.to);
        }
        let peer = &mut self.peers[to.index()];
        if peer.congested {
            if peer.waiting.back() != Some(&(at, operation)) {
                peer.waiting.push_back((at, operation));
            }
            return Ok(Sent::Later);
        }
        let tag = Tag { group: at as u16, operation: operation as u16, phase: out.phase, mark };
        let mut info = [0; PART_INFO];
        let info = if out.long { put_part_info(&mut info, out.slice, out.lent) } else { &[] };
        let args = self.args(to, tag.to_word(), info);
        match self.scope.give(&args, Payload::Borrowed(out.payload)) {
            Ok(given) => {
                if !out.long {
                    group.others[out.to].sent_ahead(operation, out.payload.len());
                }
                // What the engine keeps is followed by nothing else, so that it is little.
                if let Some(ticket) = given.leave() {
                    self.congest(to, ticket);
                }
                Ok(Sent::Done)
            }
            Err((SendError::Fault(fault), _)) => Err(fault),
            Err((error, _)) => {
                tracing::warn!(%error, "part of a collective operation not sent");
                Err(Fault::OutOfMemory("a part of a collective operation is too long"))
            }
        }
    }
}

impl Hub {
    pub(super) fn handle(&self) -> Option<Handle> {
        Some(Handle::new(self.outlet.get()?.context.upgrade()?))
    }

    fn protocol(&self) -> ProtocolId {
        self.outlet.get().map_or(ProtocolId(u16::MAX), |outlet| outlet.id)
    }

    /// There is room towards a peer again.
    fn room_made(self: &Arc<Self>, scope: &mut Scope<'_>, to: Rank) {
        let mut state = self.lock();
        let peer = &mut state.peers[to.index()];
        peer.congested = false;
        let mut way = Way { hub: self, scope, peers: &mut state.peers };
        way.records(to);
        // As many as there is room for: those behind them keep their place.
        while !state.peers[to.index()].congested
            && let Some((at, operation)) = state.peers[to.index()].waiting.pop_front()
        {
            state = self.resume(scope, state, at, operation);
        }
    }
}
