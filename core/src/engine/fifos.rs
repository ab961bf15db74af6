//! Injection FIFOs that a context owns besides those of its targets (D30), for those who ask for one.
//!
//! Each is a circular buffer of descriptors for any target. What is in it goes out in its order and in no order with
//! anything else. In each round those with priority are served first, until they are empty or blocked, and then each of
//! the others in turn, as far as its service quantum goes: a long message is cut into parts, so that it delays nobody for
//! longer than that.
//!
//! Two long messages for the same target cannot be mixed, nor two runs of packets that have one end: who is in the middle
//! of one has the peer's *turn*, and the other waits.

use super::send::{SendResult, Sent};
use super::{Payload, Scope, SendArgs, State, Wait};
use crate::descriptor::{Descriptor, MAX_DESCRIPTOR_INLINE, MAX_INFO, Op, SourceKind};
use crate::device::{Sources, Stop};
use crate::error::Fault;
use crate::fifo::InjectionFifo;
use crate::ids::{ProtocolId, Rank};
use crate::row::Row;
use crate::slot::{Outcome, Ticket, Value};
use crate::wire;
use bytes::Bytes;
use slab::Slab;
use thiserror::Error;

/// In `State::busy`: the extra FIFOs.
pub(super) const FIFOS: usize = usize::MAX;
/// What a descriptor counts for in a service quantum besides its bytes.
const COST: u64 = 64;
/// Slots that the longest message takes.
const LONGEST: usize = 3;

/// How an extra FIFO is made.
///
/// # Examples
/// ```
/// use posthaste_core::engine::FifoOptions;
///
/// // One for bulk data that lets others pass every 64 KiB, and one that is served first.
/// let bulk = FifoOptions { quantum: 64 << 10, ..FifoOptions::default() };
/// let urgent = FifoOptions { priority: true, slots: 32, ..FifoOptions::default() };
/// assert_eq!((bulk.slots, bulk.priority, urgent.quantum), (256, false, 256 << 10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FifoOptions {
    /// Slots that sends may fill, 64 bytes each; rounded up to a power of two.
    pub slots: usize,
    /// It is served before those without priority.
    pub priority: bool,
    /// Payload bytes that are injected at a time, before others have their turn; at least 4096 are.
    pub quantum: u64,
}

impl Default for FifoOptions {
    /// 256 slots, no priority, and a quantum of 256 KiB.
    fn default() -> Self {
        Self { slots: 256, priority: false, quantum: 256 << 10 }
    }
}

/// Names an extra FIFO of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FifoId {
    key: u32,
    generation: u32,
}

/// Why something could not be done with a FIFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FifoError {
    /// It was closed.
    #[error("the FIFO was closed")]
    Closed,
    /// It takes nothing until it is activated.
    #[error("the FIFO is not active: activate it before anything is put in")]
    Inactive,
    /// More slots were asked for than a FIFO may have.
    #[error("a FIFO of {slots} slots: it has at most {most}; what does not fit waits for room")]
    TooManySlots {
        /// What was asked for.
        slots: usize,
        /// What there may be.
        most: usize,
    },
    /// It is deactivated only when it is empty.
    #[error("{slots} slots of the FIFO are in use: drain it before it is deactivated")]
    NotEmpty {
        /// Slots in use.
        slots: usize,
    },
}

/// Slots that a FIFO may have: 64 MiB of them.
const MOST_SLOTS: usize = 1 << 20;

/// What a FIFO is like at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FifoStatus {
    /// Slots that there are.
    pub capacity: usize,
    /// Slots in use.
    pub len: usize,
    /// Slots ever taken out.
    pub head: u64,
    /// Slots ever put in.
    pub tail: u64,
    /// Whether the free space has grown to the threshold since the flag was cleared.
    pub crossed: bool,
    /// Whether it is served.
    pub enabled: bool,
    /// Whether it takes anything.
    pub active: bool,
}

impl FifoStatus {
    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no slot is free.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len >= self.capacity
    }
}

#[derive(Debug)]
struct Extra {
    generation: u32,
    fifo: InjectionFifo,
    options: FifoOptions,
    enabled: bool,
    /// Its head is what nothing else for its target may come between, and goes on to its end.
    begun: bool,
    active: bool,
    /// It goes when it is empty.
    closing: bool,
    /// Senders that wait for room.
    room: Row<Ticket>,
    /// Who waits for the threshold.
    crossing: Row<Ticket>,
    /// Who waits until all is out that was in before.
    drains: Row<(u64, Ticket)>,
}

/// The extra FIFOs of a context.
#[derive(Debug, Default)]
pub(super) struct Fifos {
    all: Slab<Extra>,
    generation: u32,
    /// Keys of those with priority, and of the others.
    urgent: Vec<usize>,
    others: Vec<usize>,
    /// Who of the others is first in the next round.
    next: usize,
    /// The last round ended somewhere for its quantum and not for want of room.
    pub more: bool,
    /// [`FIFOS`] is in `State::busy`.
    pub listed: bool,
}

impl Extra {
    fn is_served(&self) -> bool {
        self.enabled || self.begun
    }
}

impl Fifos {
    fn of(&mut self, id: FifoId) -> Result<&mut Extra, FifoError> {
        let found = self.all.get_mut(id.key as usize);
        found.filter(|extra| extra.generation == id.generation && !extra.closing).ok_or(FifoError::Closed)
    }

    fn remove(&mut self, key: usize) -> Extra {
        self.urgent.retain(|&other| other != key);
        self.others.retain(|&other| other != key);
        self.all.remove(key)
    }

    /// Whether anything waits that is to be served.
    pub fn are_busy(&self) -> bool {
        self.all.iter().any(|(_, extra)| extra.is_served() && !extra.fifo.is_empty())
    }

    pub fn clear(&mut self) {
        *self = Fifos { generation: self.generation, ..Fifos::default() };
    }
}

/// Why the service of a FIFO ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Served {
    Empty,
    Blocked,
    Quantum,
}

impl Scope<'_> {
    /// Makes a FIFO. It is active and enabled.
    ///
    /// # Errors
    /// If it is to have more slots than a FIFO may.
    pub fn open_fifo(&mut self, options: FifoOptions) -> Result<FifoId, FifoError> {
        if options.slots > MOST_SLOTS {
            return Err(FifoError::TooManySlots { slots: options.slots, most: MOST_SLOTS });
        }
        tracing::debug!(me = %self.state.me, ?options, "fifo opened");
        let fifos = &mut self.state.fifos;
        fifos.generation = fifos.generation.wrapping_add(1);
        let generation = fifos.generation;
        let key = fifos.all.insert(Extra {
            generation,
            fifo: InjectionFifo::new(options.slots.max(LONGEST)),
            options: FifoOptions { quantum: options.quantum.max(4096), ..options },
            enabled: true,
            begun: false,
            active: true,
            closing: false,
            room: Row::default(),
            crossing: Row::default(),
            drains: Row::default(),
        });
        if options.priority {
            fifos.urgent.push(key)
        } else {
            fifos.others.push(key)
        }
        Ok(FifoId { key: key as u32, generation })
    }

    /// Lets a FIFO go as soon as it is empty; it is enabled, so that it becomes so.
    pub fn close_fifo(&mut self, id: FifoId) {
        let Ok(extra) = self.state.fifos.of(id) else { return };
        tracing::debug!(me = %self.state.me, ?id, waiting = !extra.fifo.is_empty(), "fifo closed");
        (extra.closing, extra.enabled) = (true, true);
        if extra.fifo.is_empty() {
            self.state.remove_fifo(id.key as usize);
        } else {
            self.state.mark_fifos_busy();
        }
    }

    /// What the FIFO is like now.
    ///
    /// # Errors
    /// If it was closed.
    pub fn fifo_status(&mut self, id: FifoId) -> Result<FifoStatus, FifoError> {
        let Extra { fifo, enabled, active, .. } = self.state.fifos.of(id)?;
        Ok(FifoStatus {
            capacity: fifo.capacity(),
            len: fifo.len(),
            head: fifo.head(),
            tail: fifo.tail(),
            crossed: fifo.was_crossed(),
            enabled: *enabled,
            active: *active,
        })
    }

    /// Sets how many free slots count as "room again".
    ///
    /// # Errors
    /// If the FIFO was closed.
    pub fn set_fifo_threshold(&mut self, id: FifoId, free_slots: usize) -> Result<(), FifoError> {
        self.state.fifos.of(id)?.fifo.set_threshold(free_slots);
        Ok(())
    }

    /// Clears the sticky flag of the threshold.
    ///
    /// # Errors
    /// If the FIFO was closed.
    pub fn clear_fifo_crossed(&mut self, id: FifoId) -> Result<(), FifoError> {
        self.state.fifos.of(id)?.fifo.clear_crossed();
        Ok(())
    }

    /// Serves the FIFO, or does so no longer. What is under way to a target is not taken back, and a long message that has begun
    /// goes on to its end.
    ///
    /// # Errors
    /// If it was closed.
    pub fn enable_fifo(&mut self, id: FifoId, enabled: bool) -> Result<(), FifoError> {
        self.state.fifos.of(id)?.enabled = enabled;
        if enabled {
            self.state.mark_fifos_busy();
            self.pump_fifos();
        }
        Ok(())
    }

    /// Lets a FIFO take something, or no longer, which it does only when it is empty.
    ///
    /// # Errors
    /// If it was closed, or is to be deactivated and is not empty.
    pub fn activate_fifo(&mut self, id: FifoId, active: bool) -> Result<(), FifoError> {
        let extra = self.state.fifos.of(id)?;
        if !active && !extra.fifo.is_empty() {
            return Err(FifoError::NotEmpty { slots: extra.fifo.len() });
        }
        extra.active = active;
        Ok(())
    }

    /// A ticket that ends when the sticky flag is set; `None` if it is.
    ///
    /// # Errors
    /// If the FIFO was closed, or all completion slots are in use.
    pub fn fifo_crossing(&mut self, id: FifoId) -> Result<Result<Option<Ticket>, Fault>, FifoError> {
        if self.state.fifos.of(id)?.fifo.was_crossed() {
            return Ok(Ok(None));
        }
        let ticket = match self.operation(None) {
            Ok(ticket) => ticket,
            Err(fault) => return Ok(Err(fault)),
        };
        let State { fifos, completer, .. } = &mut *self.state;
        fifos.of(id)?.crossing.push_back(ticket, completer);
        Ok(Ok(Some(ticket)))
    }

    /// Tickets that end when all is out that is now in that FIFO, or in each of all FIFOs, or all of that for one rank; none for
    /// those that have nothing of the kind.
    ///
    /// # Errors
    /// If all completion slots are in use, or the context is closed.
    pub fn drain_fifos(
        &mut self,
        which: Option<FifoId>,
        towards: Option<Rank>,
    ) -> Result<Vec<Ticket>, Fault> {
        if self.state.closed && which.is_some() {
            // What was in it has gone nowhere.
            return Err(Fault::Shutdown);
        }
        let meant = |key: usize, extra: &Extra| match which {
            Some(id) => id.key as usize == key && id.generation == extra.generation,
            None => true,
        };
        let all = self.state.fifos.all.iter();
        let until = |extra: &Extra| match towards {
            Some(rank) => extra.fifo.end_of_last(rank),
            None => Some(extra.fifo.tail()).filter(|_| !extra.fifo.is_empty()),
        };
        let waiting = all.filter(|&(key, extra)| meant(key, extra));
        let waiting: Vec<_> = waiting.filter_map(|(key, extra)| Some((key, until(extra)?))).collect();
        let mut tickets = Vec::new();
        for (key, until) in waiting {
            let ticket = self.operation(None)?;
            let State { fifos, completer, .. } = &mut *self.state;
            let drains = &mut fifos.all[key].drains;
            drains.push_back((until, ticket), completer);
            // The one that ends first is in front.
            for at in (1..drains.len()).rev() {
                if drains[at - 1].0 <= drains[at].0 {
                    break;
                }
                drains.swap(at - 1, at);
            }
            tickets.push(ticket);
        }
        Ok(tickets)
    }

    /// As [`send`](Self::send), through a FIFO: ordered with what goes through that one only.
    ///
    /// # Errors
    /// With the payload: if the send cannot succeed. Before that, if the FIFO takes nothing.
    pub fn send_through<'p>(
        &mut self,
        id: FifoId,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
        wait: Wait,
    ) -> Result<SendResult<'p>, FifoError> {
        let takes = match self.state.fifos.of(id) {
            Ok(extra) if extra.active => Ok(extra.fifo.free() >= LONGEST),
            Ok(_) => Err(FifoError::Inactive),
            Err(error) => Err(error),
        };
        if takes != Ok(true) {
            // What was promised goes to others meanwhile.
            self.state.ungrant(wait);
            takes?;
            if matches!(wait, Wait::Never | Wait::InTurn) {
                return Ok(Ok(Sent::Full(payload)));
            }
            return Ok(match self.operation(Some(args.target.rank)) {
                Ok(ticket) => {
                    let State { fifos, completer, .. } = &mut *self.state;
                    fifos.of(id)?.room.push_back(ticket, completer);
                    Ok(Sent::Later(ticket, Wait::Await, payload))
                }
                Err(fault) => Err((fault.into(), payload)),
            });
        }
        Ok(self.send_into(id, args, payload, wait))
    }

    fn send_into<'p>(
        &mut self,
        id: FifoId,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
        wait: Wait,
    ) -> SendResult<'p> {
        let len = payload.len();
        let index = match self.check(args, len) {
            Ok(index) => index,
            Err(error) => return Err((error, payload)),
        };
        if let Some(fault) = self.state.peer(index).fault {
            return Err((fault.into(), payload));
        }
        match self.admit(index, args, len, wait) {
            Ok(None) => {}
            Ok(Some((ticket, wait))) => return Ok(Sent::Later(ticket, wait, payload)),
            Err(None) => return Ok(Sent::Full(payload)),
            Err(Some(error)) => return Err((error, payload)),
        }
        let ticket = match self.operation(Some(args.target.rank)) {
            Ok(ticket) => ticket,
            Err(fault) => {
                self.return_credit(index, args.protocol, len as u64);
                return Err((fault.into(), payload));
            }
        };
        let mut descriptor = Descriptor {
            op: Op::Send,
            info_len: args.info.len() as u8,
            rank: args.target.rank,
            context: args.target.context,
            protocol: Self::wire_id(args.protocol),
            cookie: args.cookie,
            ticket: ticket.to_word(),
            // Of no use to a send: which incarnation of the rank it is for.
            region: u32::from(self.state.peer(index).life),
            ..Descriptor::default()
        };
        match payload {
            Payload::Loan(loan) => self.hold(&mut descriptor, Bytes::from(loan.memory().to_vec())),
            payload if len <= MAX_DESCRIPTOR_INLINE => descriptor.set_inline(payload.bytes_of()),
            Payload::Owned(bytes) => self.hold(&mut descriptor, bytes),
            Payload::Borrowed(bytes) => self.hold(&mut descriptor, Bytes::copy_from_slice(bytes)),
        }
        self.state.stats.sent(len as u64);
        self.state.stats.queued += 1;
        self.state.peer(index).unflushed = true;
        if let Ok(extra) = self.state.fifos.of(id) {
            let fits = extra.fifo.push(&descriptor, args.info);
            debug_assert!(fits, "there was room for the longest message");
        }
        self.state.mark_fifos_busy();
        self.pump_fifos();
        Ok(Sent::Queued(ticket))
    }

    fn hold(&mut self, descriptor: &mut Descriptor, bytes: Bytes) {
        descriptor.len = bytes.len() as u64;
        descriptor.source_kind = SourceKind::Held;
        descriptor.source = [self.state.table.held.insert(bytes) as u64, 0];
    }

    /// A run of a replay takes its place in a FIFO, which grows if it must: any number may wait. False: it was closed.
    pub(super) fn queue_in_fifo(&mut self, id: FifoId, jump: &Descriptor) -> bool {
        let Ok(extra) = self.state.fifos.of(id) else { return false };
        if !extra.fifo.push(jump, &[]) {
            extra.fifo.grow();
            let fits = extra.fifo.push(jump, &[]);
            debug_assert!(fits, "a FIFO of twice the size has room");
        }
        self.state.stats.queued += 1;
        self.state.mark_fifos_busy();
        true
    }

    /// Whether replays may go through it.
    pub(super) fn check_fifo(&mut self, id: FifoId) -> Result<(), FifoError> {
        if self.state.fifos.of(id)?.active { Ok(()) } else { Err(FifoError::Inactive) }
    }

    /// A round: those with priority, and when these have nothing that can go, everybody else once, those with priority in
    /// between again.
    pub(super) fn pump_fifos(&mut self) -> usize {
        self.state.fifos.more = false;
        let (mut moved, mut urgent) = self.pump_urgent();
        let count = self.state.fifos.others.len();
        let (first, mut turns) = (self.state.fifos.next, 0);
        while turns < count && !urgent {
            // One that was closed and empty is not in the list any more.
            let others = &self.state.fifos.others;
            let key = others.get((first + turns) % count).copied();
            turns += 1;
            let Some(key) = key else { continue };
            let quantum = self.state.fifos.all[key].options.quantum;
            let (some, served) = self.serve(key, quantum);
            moved += some;
            self.state.fifos.more |= served == Served::Quantum;
            let (some, waits) = self.pump_urgent();
            moved += some;
            urgent = waits;
        }
        // Who has had no turn is the first in the next round; if all have, another one than in this.
        let ahead = if turns == count { 1 } else { turns };
        self.state.fifos.next = (first + ahead).checked_rem(count).unwrap_or(0);
        moved
    }

    /// Serves each of those with priority once; whether one of them could go on.
    fn pump_urgent(&mut self) -> (usize, bool) {
        let (mut moved, mut waits) = (0, false);
        for at in 0..self.state.fifos.urgent.len() {
            let Some(&key) = self.state.fifos.urgent.get(at) else { continue };
            let quantum = self.state.fifos.all[key].options.quantum;
            let (some, served) = self.serve(key, quantum);
            moved += some;
            waits |= served == Served::Quantum;
        }
        self.state.fifos.more |= waits;
        (moved, waits)
    }

    /// Injects from a FIFO, so many bytes at most.
    fn serve(&mut self, key: usize, quantum: u64) -> (usize, Served) {
        let (mut moved, mut budget) = (0, quantum);
        loop {
            let extra = &self.state.fifos.all[key];
            let front = if extra.is_served() { extra.fifo.front() } else { None };
            let Some(mut front) = front else {
                if extra.closing && extra.fifo.is_empty() {
                    self.state.remove_fifo(key);
                }
                return (moved, Served::Empty);
            };
            if budget == 0 {
                return (moved.max(1), Served::Quantum);
            }
            let before = budget;
            match self.step_extra(key, &mut front, &mut budget) {
                None => {
                    self.state.fifos.all[key].fifo.set_front(&front);
                    if budget == 0 {
                        return (moved.max(1), Served::Quantum);
                    }
                    return (moved + usize::from(budget < before), Served::Blocked);
                }
                Some(outcome) => {
                    moved += 1;
                    budget = budget.saturating_sub(COST);
                    self.left_fifo(key);
                    if let Some(outcome) = outcome {
                        if let Err(fault) = outcome {
                            let index = self.state.shape.index(front.target());
                            self.not_sent(index, &front, fault);
                        }
                        self.state.finish_descriptor(&front, outcome);
                    }
                }
            }
        }
    }

    /// Goes on with the head of a FIFO. `None`: no room, or nothing is left of the budget.
    fn step_extra(
        &mut self,
        key: usize,
        front: &mut Descriptor,
        budget: &mut u64,
    ) -> Option<Option<Outcome>> {
        let index = self.state.shape.index(front.target());
        if let Some(fault) = self.state.peer(index).fault {
            self.state.give_turn(index, key);
            return Some(Some(Err(fault)));
        }
        if front.op == Op::Send && front.region != u32::from(self.state.peer(index).life) {
            // The rank was started again while it waited here.
            return Some(Some(Err(Fault::PeerLost(front.rank))));
        }
        if front.op == Op::Jump && self.state.departed {
            // What was recorded may write into memory that others take back when they hear of this side's leave.
            self.state.give_turn(index, key);
            return Some(Some(Err(Fault::Shutdown)));
        }
        if !self.state.is_announced(index, front) {
            return None;
        }
        // It goes out now: a flush that was asked for meanwhile, as what lay before it in the FIFO was out, is ahead of it.
        self.state.peer(index).unflushed = true;
        if front.op == Op::Jump {
            if self.state.cannot_be_mixed(index, front) && !self.state.take_turn(index, key) {
                return None;
            }
            let done = self.step_jump(index, front, budget)?;
            self.state.give_turn(index, key);
            return Some(done);
        }
        let mut info = [0; MAX_INFO];
        let len = self.state.fifos.all[key].fifo.front_info(&mut info);
        let message = Descriptor { ticket: 0, offset: 0, region: 0, ..*front };
        let stop = if message.len > self.state.eager as u64 {
            if !self.state.take_turn(index, key) {
                return None;
            }
            self.stream_parts(&message, &info[..len], &mut front.offset, budget).0
        } else {
            let sources =
                Sources { info: &info[..len], borrowed: &[], owned: None, table: &self.state.table };
            let stop = self.inject.inject(std::slice::from_ref(&message), &sources).stop;
            // What finds no room is no progress.
            if stop != Stop::Full {
                *budget = budget.saturating_sub(message.len);
            }
            stop
        };
        let outcome = match stop {
            Stop::Full => return None,
            Stop::Done => Ok(Value::Unit),
            Stop::Fault(fault) => Err(fault),
        };
        self.state.give_turn(index, key);
        Some(Some(outcome))
    }

    /// The head of a FIFO is out: whoever waits for that is told.
    fn left_fifo(&mut self, key: usize) {
        let State { fifos, completer, .. } = &mut *self.state;
        let Extra { fifo, room, crossing, drains, begun, .. } = &mut fifos.all[key];
        let _ = fifo.pop();
        *begun = false;
        if fifo.was_crossed() {
            for ticket in crossing.drain(..) {
                completer.complete(ticket, Ok(Value::Unit));
            }
        }
        while drains.front().is_some_and(|&(until, _)| until <= fifo.head()) {
            if let Some((_, ticket)) = drains.pop_front() {
                completer.complete(ticket, Ok(Value::Unit));
            }
        }
        // Who does not come back, as a future that is dropped, must not keep the others waiting: all are woken at the end.
        let mut places = if fifo.is_empty() { room.len() } else { fifo.free() / LONGEST };
        while places > 0
            && let Some(ticket) = room.pop_front()
        {
            places -= usize::from(completer.complete_if_wanted(ticket));
        }
    }
}

impl State {
    /// A FIFO is closed and empty. Nobody is left who would wait for something of it, but for its slot.
    fn remove_fifo(&mut self, key: usize) {
        let mut gone = self.fifos.remove(key);
        let drains = gone.drains.drain(..).map(|(_, ticket)| ticket);
        for ticket in gone.crossing.drain(..).chain(gone.room.drain(..)).chain(drains) {
            self.completer.complete(ticket, Err(Fault::Shutdown));
        }
    }

    pub(super) fn mark_fifos_busy(&mut self) {
        if !std::mem::replace(&mut self.fifos.listed, true) {
            self.busy.push(FIFOS);
        }
    }

    /// Whether a descriptor takes packets that cannot be mixed with others of their kind.
    pub(super) fn cannot_be_mixed(&self, index: usize, descriptor: &Descriptor) -> bool {
        match descriptor.op {
            Op::Jump => self.run_is_long(descriptor),
            Op::Put | Op::Get | Op::Atomic => self.accesses_over_send(index, descriptor),
            Op::Send => descriptor.len > self.eager as u64,
            Op::Nop | Op::Local => false,
        }
    }

    /// Whether the peer hears of a descriptor's protocols before it: what tells of them may still wait in the peer's FIFO.
    fn is_announced(&mut self, index: usize, front: &Descriptor) -> bool {
        if front.op == Op::Jump {
            return self.run_is_announced(index, front);
        }
        let protocol = ProtocolId(front.protocol.0.saturating_sub(wire::FIRST_USER));
        self.peer(index).is_announced(protocol)
    }

    /// Whether a FIFO may begin, or go on with, what cannot be mixed with others of its kind for that peer.
    fn take_turn(&mut self, index: usize, key: usize) -> bool {
        let peer = self.peer(index);
        match peer.turn {
            Some(other) => other == key,
            None if peer.is_in_the_middle => false,
            None => {
                peer.turn = Some(key);
                self.fifos.all[key].begun = true;
                true
            }
        }
    }

    fn give_turn(&mut self, index: usize, key: usize) {
        let peer = self.peer(index);
        if peer.turn == Some(key) {
            peer.turn = None;
            // The peer's own FIFO may have waited for it.
            self.mark_busy(index);
        }
    }
}
