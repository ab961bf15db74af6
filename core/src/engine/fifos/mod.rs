//! Injection FIFOs that a context owns besides those of its targets (D30), for those who ask for one.
//!
//! Each is a circular buffer of descriptors for any target. What is in it goes out in its order and in no order with
//! anything else. How they are served stands in `serve`.

mod serve;

use super::kept::Lack;
use super::peer::Place;
use super::send::{Refused, message_to};
use super::{Given, Payload, Scope, SendArgs, State};
use crate::descriptor::Descriptor;
use crate::error::Fault;
use crate::fifo::InjectionFifo;
use crate::ids::Rank;
use crate::row::Row;
use crate::slot::Ticket;
use slab::Slab;
use std::collections::VecDeque;
use thiserror::Error;

/// In `State::busy`: the extra FIFOs.
pub(super) const FIFOS: usize = usize::MAX;
/// Slots that the longest message takes.
pub(super) const LONGEST: usize = 3;

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
    /// Slots that sends may fill before the next wait for room, 64 bytes each; rounded up to a power of two. What waits for credit has
    /// found room, and counts from when it has that.
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
    /// Slots that there are: as many as messages may fill, or more if replays have found no room.
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
    /// Slots that messages may fill, and how many they do. It grows beyond that for replays, of which any number may wait.
    slots: usize,
    messages: usize,
    options: FifoOptions,
    enabled: bool,
    /// Its head is what nothing else for its target may come between, and goes on to its end.
    begun: bool,
    active: bool,
    /// It goes when it is empty.
    closing: bool,
    /// Messages that wait for room, and their peers.
    room: Row<(usize, Place)>,
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
    /// Slots that messages may still fill.
    fn room(&self) -> usize {
        self.slots.saturating_sub(self.messages)
    }

    /// Whether a message, however long its info, may go in at once.
    fn takes_one_more(&self) -> bool {
        self.room() >= LONGEST && self.room.is_empty()
    }

    /// Any number of replays may wait, in what messages do not fill: it grows if it must.
    fn put(&mut self, descriptor: &Descriptor, info: &[u8]) {
        if !self.fifo.push(descriptor, info) {
            self.fifo.grow();
            let fits = self.fifo.push(descriptor, info);
            debug_assert!(fits, "a FIFO of twice the size has room");
        }
    }

    fn is_served(&self) -> bool {
        self.enabled || self.begun
    }
}

impl Fifos {
    fn of(&mut self, id: FifoId) -> Result<&mut Extra, FifoError> {
        let found = self.all.get_mut(id.key as usize);
        found.filter(|extra| extra.generation == id.generation && !extra.closing).ok_or(FifoError::Closed)
    }

    pub fn is_open(&self, id: FifoId) -> bool {
        let extra = self.all.get(id.key as usize);
        extra.is_some_and(|extra| extra.generation == id.generation && !extra.closing)
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
        let fifo = InjectionFifo::new(options.slots.max(LONGEST));
        let key = fifos.all.insert(Extra {
            generation,
            slots: fifo.capacity(),
            messages: 0,
            fifo,
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

    /// Lets a FIFO go as soon as it is empty; it is enabled, so that it becomes so. What waits for room ends.
    pub fn close_fifo(&mut self, id: FifoId) {
        let Ok(extra) = self.state.fifos.of(id) else { return };
        tracing::debug!(me = %self.state.me, ?id, waiting = !extra.fifo.is_empty(), "fifo closed");
        (extra.closing, extra.enabled) = (true, true);
        let (waiting, is_empty) = (std::mem::take(&mut extra.room), extra.fifo.is_empty());
        for (_, Place { ticket, kept }) in waiting.iter() {
            self.state.end_waiting(*ticket, Some(kept), Fault::Shutdown);
        }
        if is_empty {
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

    /// Lets a FIFO take something, or no longer, which it does only when it is empty. What was given to it and waits for credit goes
    /// into it still.
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
    /// If all completion slots are in use, the context is closed, or there is something for that rank and it is gone.
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
        for _ in &waiting {
            // Of one rank it ends with that, too.
            match self.operation(towards) {
                Ok(ticket) => tickets.push(ticket),
                Err(fault) => {
                    // None of them is begun, or all are.
                    tickets.into_iter().for_each(|ticket| self.state.completer.give_up(ticket));
                    return Err(fault);
                }
            }
        }
        for ((key, until), ticket) in waiting.into_iter().zip(tickets.iter().copied()) {
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
        }
        Ok(tickets)
    }

    /// As [`give`](Self::give), through a FIFO: ordered with what goes through that one only. There room comes first, and only then
    /// credit. What has to wait for them goes into the FIFO though that is deactivated meanwhile, and nowhere if it is closed.
    ///
    /// # Errors
    /// With the payload: if the send cannot succeed. Before that, if the FIFO takes nothing.
    pub fn give_through<'p>(
        &mut self,
        id: FifoId,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
    ) -> Result<Result<Given, Refused<'p>>, FifoError> {
        self.check_fifo(id)?;
        Ok(self.give_into(id, args, payload))
    }

    fn give_into<'p>(
        &mut self,
        id: FifoId,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
    ) -> Result<Given, Refused<'p>> {
        let number = args.protocol.index();
        let known = self.check_living(args, payload.len());
        let index =
            match known.and_then(|index| self.introduce_registered(index, args.protocol).map(|()| index)) {
                Ok(index) => index,
                Err(error) => return Err((error, payload)),
            };
        if !self.state.fifos.of(id).is_ok_and(|extra| extra.takes_one_more()) {
            return self.keep(args, payload, Some(id), Lack::Room);
        }
        let len = payload.len() as u64;
        if !self.state.take_credit(index, number, len) {
            return self.keep(args, payload, Some(id), Lack::Credit);
        }
        let ticket = match self.operation(Some(args.target.rank)) {
            Ok(ticket) => ticket,
            Err(fault) => {
                self.state.give_credit(index, number, 1, len);
                return Err((fault.into(), payload));
            }
        };
        let protocol = Self::wire_id(args.protocol);
        let mut descriptor = message_to(args.target, protocol, args.cookie, args.info, len);
        descriptor.ticket = ticket.to_word();
        self.state.stats.sent(len);
        self.state.put_message(id.key as usize, index, &mut descriptor, args.info, payload);
        self.pump_fifos();
        Ok(Given::Queued(ticket))
    }

    /// A run of a replay takes its place in a FIFO, which grows if it must: any number may wait. False: it was closed.
    pub(super) fn queue_in_fifo(&mut self, id: FifoId, jump: &Descriptor) -> bool {
        if self.state.fifos.of(id).is_err() {
            return false;
        }
        // It has no longer a row than it ends: what waits for room goes before it.
        self.state.fill_fifo(id.key as usize, true);
        self.state.fifos.all[id.key as usize].put(jump, &[]);
        self.state.stats.queued += 1;
        self.state.mark_fifos_busy();
        true
    }

    /// Whether messages and replays may go through it.
    pub(super) fn check_fifo(&mut self, id: FifoId) -> Result<(), FifoError> {
        if self.state.fifos.of(id)?.active { Ok(()) } else { Err(FifoError::Inactive) }
    }
}

impl State {
    /// Puts a message behind those that wait for room in a FIFO. It has no credit yet.
    pub(super) fn wait_in_fifo(&mut self, id: FifoId, index: usize, place: Place) {
        let State { fifos, completer, .. } = self;
        match fifos.of(id) {
            Ok(extra) => extra.room.push_back((index, place), completer),
            Err(_) => self.end_waiting(place.ticket, Some(&place.kept), Fault::Shutdown),
        }
    }

    /// Lets messages that wait for room into a FIFO, as far as there is some, or all.
    fn fill_fifo(&mut self, key: usize, all: bool) {
        loop {
            let extra = &mut self.fifos.all[key];
            if extra.room() < LONGEST && !all {
                return;
            }
            let id = FifoId { key: key as u32, generation: extra.generation };
            let Some((index, place)) = extra.room.pop_front() else { return };
            if let Some(place) = self.claim_credit(index, place) {
                self.put_kept(id, index, place);
            }
        }
    }

    /// A message that waited goes into its FIFO.
    pub(super) fn put_kept(&mut self, id: FifoId, index: usize, Place { ticket, kept }: Place) {
        if let Some((mut descriptor, payload)) = self.take_out(index, ticket, &kept) {
            self.put_message(id.key as usize, index, &mut descriptor, kept.info(), payload);
            // Nobody has tried whether the device takes it.
            self.restless = true;
        }
    }

    /// What waits for room in FIFOs on its way to that peer.
    pub(super) fn leave_fifo_rows(&mut self, index: usize) -> Vec<Place> {
        let rows = self.fifos.all.iter_mut().map(|(_, extra)| &mut extra.room);
        let leave = |row: &mut Row<(usize, Place)>| {
            let (gone, others): (VecDeque<_>, VecDeque<_>) =
                row.drain(..).partition(|(other, _)| *other == index);
            **row = others;
            gone.into_iter().map(|(_, place)| place)
        };
        rows.filter(|row| !row.is_empty()).flat_map(leave).collect()
    }

    fn put_message(
        &mut self,
        key: usize,
        index: usize,
        descriptor: &mut Descriptor,
        info: &[u8],
        payload: Payload<'_>,
    ) {
        self.hold(descriptor, payload);
        let peer = self.peer(index);
        peer.unflushed = true;
        // Of no use to a send: which incarnation of the rank it is for.
        descriptor.region = u32::from(peer.life);
        let extra = &mut self.fifos.all[key];
        extra.put(descriptor, info);
        extra.messages += descriptor.slots();
        self.stats.queued += 1;
        self.mark_fifos_busy();
    }
}
