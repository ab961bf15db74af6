//! Injection FIFOs that a context owns besides those of its targets (D30), for those who ask for one.
//!
//! Each is a circular buffer of descriptors for any target. What is in it goes out in its order and in no order with
//! anything else. How they are served stands in `serve`.

mod serve;

use super::send::{SendResult, Sent};
use super::{Payload, Scope, SendArgs, State, Wait};
use crate::descriptor::{Descriptor, MAX_DESCRIPTOR_INLINE, Op, SourceKind};
use crate::error::Fault;
use crate::fifo::InjectionFifo;
use crate::ids::Rank;
use crate::row::Row;
use crate::slot::Ticket;
use bytes::Bytes;
use slab::Slab;
use thiserror::Error;

/// In `State::busy`: the extra FIFOs.
pub(super) const FIFOS: usize = usize::MAX;
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
    /// Slots that messages may still fill.
    fn room(&self) -> usize {
        self.slots.saturating_sub(self.messages)
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
            Ok(extra) if extra.active => Ok(extra.room() >= LONGEST),
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
                self.state.give_credit(index, args.protocol.index(), 1, len as u64);
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
            extra.put(&descriptor, args.info);
            extra.messages += descriptor.slots();
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
        extra.put(jump, &[]);
        self.state.stats.queued += 1;
        self.state.mark_fifos_busy();
        true
    }

    /// Whether replays may go through it.
    pub(super) fn check_fifo(&mut self, id: FifoId) -> Result<(), FifoError> {
        if self.state.fifos.of(id)?.active { Ok(()) } else { Err(FifoError::Inactive) }
    }
}
