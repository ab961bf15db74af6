//! What waits: the injection FIFOs of the targets, and how they are emptied into the device.

use super::fifos::FIFOS;
use super::send::{Posted, Queue, Refused};
use super::{Payload, Scope, State};
use crate::descriptor::{Descriptor, MAX_DESCRIPTOR_INLINE, MAX_INFO, Op, SourceKind};
use crate::device::{Sources, Stop};
use crate::error::Fault;
use crate::ids::ProtocolId;
use crate::slot::{Outcome, Ticket, Value};
use crate::wire;
use bytes::Bytes;
use zerocopy::IntoBytes;

/// In `State::busy`: somebody has said goodbye.
pub(super) const LEAVING: usize = usize::MAX - 1;
/// Milliseconds after which what waits for memory tries again: nobody rings when others give some back.
const SOON: u64 = 50;
/// The timer for that: no operation has this ticket.
pub(super) const MEMORY: Ticket = match Ticket::from_word(u64::MAX - 1) {
    Some(ticket) => ticket,
    None => unreachable!(),
};

impl Scope<'_> {
    #[cold]
    #[allow(clippy::too_many_arguments, reason = "the second half of `post`")]
    pub(super) fn enqueue<'p>(
        &mut self,
        index: usize,
        mut descriptor: Descriptor,
        info: &[u8],
        payload: Payload<'p>,
        queue: Queue,
        whole: bool,
        empty: bool,
    ) -> Result<Posted<'p>, Refused<'p>> {
        let rank = descriptor.rank;
        let capacity = self.state.config.fifo_slots;
        let peer = self.state.peer(index);
        if !whole && peer.torn {
            return Err((Fault::Shutdown.into(), payload));
        }
        // A long message may begin although nobody wants to wait: its payload is owned by the queue then.
        let may_start = !whole && empty;
        let mut ticket = None;
        match queue {
            Queue::Never if !may_start => return Ok(Posted::NoRoom(payload)),
            // Who waits has somebody before it: where nothing is queued, nothing would keep others from going first.
            Queue::Await
                if !peer.room_waiters.is_empty() || (!empty && peer.room(capacity) < descriptor.slots()) =>
            {
                return Ok(Posted::NoRoom(payload));
            }
            Queue::Never | Queue::Force | Queue::Access => {}
            Queue::Answer if !self.owes_one_more(index, payload.len()) => {
                return Err((Fault::PeerCorrupt(rank).into(), payload));
            }
            Queue::Answer => {}
            Queue::Await => match self.operation(Some(rank)) {
                Ok(operation) => ticket = Some(operation),
                Err(fault) => return Err((fault.into(), payload)),
            },
        }
        descriptor.ticket = ticket.map_or(0, Ticket::to_word);
        self.state.queue_message(index, &mut descriptor, info, payload);
        if may_start {
            self.pump_peer(index);
        }
        Ok(match ticket {
            Some(ticket) => Posted::Queued(ticket),
            None => Posted::Done,
        })
    }

    /// Moves what waits for the busy peers. Returns the number of descriptors and grants that moved.
    pub(super) fn pump(&mut self) -> usize {
        let mut moved = 0;
        let mut busy = std::mem::take(&mut self.state.busy);
        busy.retain(|&index| {
            if index == FIFOS {
                moved += self.pump_fifos();
                self.state.fifos.listed = self.state.fifos.are_busy();
                return self.state.fifos.listed;
            }
            if index == LEAVING {
                return false;
            }
            moved += self.pump_controls(index);
            moved += self.pump_over(index);
            moved += self.pump_clearance(index);
            moved += self.pay_credit(index);
            moved += self.pump_asks(index);
            moved += self.pump_peer(index);
            if !self.state.peer(index).parked.is_empty() {
                moved += self.pump_parked(index);
            }
            let owes = self.owes_credit(index);
            let peer = self.state.peer(index);
            let waits = !peer.stuck && (!peer.queue_is_empty() || !peer.room_waiters.is_empty());
            peer.busy = waits
                || owes
                || !peer.asks.is_empty()
                || !peer.parked.is_empty()
                || peer.owes_over()
                || peer.has_controls()
                || peer.owes_clearance();
            peer.busy
        });
        busy.append(&mut self.state.busy);
        self.state.busy = busy;
        moved
    }

    /// Injects what waits for the peer until the device has no more room: what is queued, and then what waits for room behind it.
    /// Where nothing is queued, nothing waits for room any more.
    pub(super) fn pump_peer(&mut self, index: usize) -> usize {
        let mut moved = self.pump_queue(index);
        while self.state.hand_out_room(index) {
            match self.pump_queue(index) {
                0 => break,
                more => moved += more,
            }
        }
        moved
    }

    /// Injects from the head of the peer's FIFO until the device has no more room.
    fn pump_queue(&mut self, index: usize) -> usize {
        let mut moved = 0;
        loop {
            let Some(peer) = self.state.peers[index].as_mut() else { return moved };
            let Some(front) = peer.fifo.as_ref().and_then(|fifo| fifo.front()) else { return moved };
            let in_parts = self.state.cannot_be_mixed(index, &front);
            if in_parts && self.state.peer(index).turn.is_some() {
                return moved;
            }
            if self.state.peer(index).holds_gate() && self.state.passes_lane(index, &front) {
                // It goes on when what precedes has been acknowledged.
                self.state.peer(index).stuck = true;
                return moved;
            }
            let done = match front.op {
                Op::Jump => {
                    self.state.peer(index).unflushed = true;
                    self.step_replay(index, front)
                }
                Op::Local => Some(Some(self.state.take_turn_of(&front))),
                Op::Put if self.state.accesses_over_send(index, &front) => self.step_put(index, front),
                Op::Get if self.state.accesses_over_send(index, &front) => self.step_get(index, front),
                Op::Atomic if self.state.accesses_over_send(index, &front) => self.step_atomic(index, front),
                Op::Send if front.len > self.state.eager as u64 && front.source_kind == SourceKind::Held => {
                    self.step_long(index, front)
                }
                _ => self.step_one(index, front),
            };
            match done {
                None => {
                    let peer = self.state.peer(index);
                    peer.is_in_the_middle = in_parts;
                    // Part of a long one or of a replay is with the device: whoever waits for it need not go to sleep.
                    let left = peer.fifo.as_ref().and_then(|fifo| fifo.front());
                    return moved + usize::from(left.is_some_and(|left| left.as_bytes() != front.as_bytes()));
                }
                Some(result) => {
                    self.state.peer(index).is_in_the_middle = false;
                    moved += 1;
                    if let Some(fifo) = self.state.peer(index).fifo.as_mut() {
                        let _ = fifo.pop();
                    }
                    if front.op == Op::Send {
                        self.state.answer_left_queue(index, &front);
                    }
                    if matches!(front.op, Op::Put | Op::Get | Op::Atomic | Op::Jump | Op::Local) {
                        self.state.hold_gate(index);
                        self.state.rma_left_queue(index);
                    }
                    if let Some(outcome) = result {
                        if let Err(fault) = outcome {
                            self.not_sent(index, &front, fault);
                        }
                        self.state.finish_descriptor(&front, outcome);
                    }
                }
            }
        }
    }

    /// What waited has failed. If it is a message, and the peer lives, whoever waits for it is told, and what it took is given
    /// back: with a peer, or with this side, all of that ends by itself.
    #[cold]
    pub(super) fn not_sent(&mut self, index: usize, front: &Descriptor, fault: Fault) {
        let ended = fault.peer().is_some() || fault == Fault::Shutdown;
        if front.op != Op::Send || ended || self.state.peer(index).fault.is_some() {
            return;
        }
        let Some(number) = front.protocol.0.checked_sub(wire::FIRST_USER) else {
            if front.protocol.0 == wire::REPLY {
                self.refuse_instead(index, front.cookie, fault);
            }
            return;
        };
        let protocol = ProtocolId(number);
        self.uncount(front.len);
        self.state.give_credit(index, protocol.index(), 1, front.len);
        let asks = self.state.registry.get(protocol).is_some_and(|protocol| protocol.takes_requests());
        match Ticket::from_word(front.cookie).filter(|_| asks) {
            // Not as an answer ends it, which gives the credit back, too.
            Some(request) => drop(self.state.completer.complete_from(front.rank, request, Err(fault))),
            None if front.ticket == 0 => self.state.report(fault),
            None => {}
        }
    }

    /// Whether what was refused for want of memory waits until there is some: an answer that needs no page, and so only its lane.
    pub(super) fn waits_for_lane(&self, descriptor: &Descriptor, stop: Stop) -> bool {
        matches!(descriptor.protocol.0, wire::REPLY | wire::REFUSE) && self.lacks_lane(descriptor, stop)
    }

    /// Whether what was refused needs no page, and so only its lane, for which there is no memory.
    fn lacks_lane(&self, descriptor: &Descriptor, stop: Stop) -> bool {
        matches!(stop, Stop::Fault(Fault::OutOfMemory(_)))
            && descriptor.len <= self.state.routes.of(descriptor.rank).max_inline as u64
    }

    /// `None`: no room. `Some(None)`: taken, the device reports the end. `Some(outcome)`: ended.
    fn step_one(&mut self, index: usize, front: Descriptor) -> Option<Option<Outcome>> {
        let mut info = [0; MAX_INFO];
        let State { peers, table, .. } = &mut *self.state;
        let len =
            peers[index].as_ref().and_then(|p| p.fifo.as_ref()).map_or(0, |fifo| fifo.front_info(&mut info));
        let sources = Sources { info: &info[..len], ..Sources::of(table) };
        let injected = self.inject.inject(std::slice::from_ref(&front), &sources);
        match injected.stop {
            Stop::Full => None,
            stop @ Stop::Fault(fault) => {
                // What the messager says of itself is said once, and what is behind it goes by it.
                let is_own = front.protocol.0 < wire::FIRST_USER && front.op == Op::Send;
                if is_own && self.lacks_lane(&front, stop) {
                    self.state.wait_for_memory();
                    return None;
                }
                Some(Some(Err(fault)))
            }
            Stop::Done if injected.complete || front.op == Op::Send => {
                if front.source_kind == SourceKind::Loan
                    && let Some(mut loan) = table.loans.try_remove(front.source[1] as usize)
                {
                    loan.sent();
                }
                Some(Some(Ok(Value::Unit)))
            }
            Stop::Done => {
                self.state.drop_source(&front);
                Some(None)
            }
        }
    }

    /// A message longer than one packet, with the cursor kept in the descriptor.
    pub(super) fn step_stream(&mut self, index: usize, mut front: Descriptor) -> Option<Option<Outcome>> {
        let mut info = [0; MAX_INFO];
        let fifo = self.state.peers[index].as_ref()?.fifo.as_ref()?;
        let len = fifo.front_info(&mut info);
        let message = Descriptor { offset: 0, ticket: 0, ..front };
        match self.stream_parts(&message, &info[..len], &mut front.offset, &mut { u64::MAX }).0 {
            Stop::Done => Some(Some(Ok(Value::Unit))),
            Stop::Full => {
                if let Some(fifo) = self.state.peer(index).fifo.as_mut() {
                    fifo.set_front(&front);
                }
                None
            }
            Stop::Fault(fault) => Some(Some(Err(fault))),
        }
    }

    /// Sends what is left of a message longer than one packet: a head and then fragments. The cursor is 0 before the head,
    /// then the bytes sent plus 1. With the last fragment goes the message's ticket; whether that is complete, too. When
    /// nothing is left of the budget, in bytes, it ends as if there were no room.
    pub(super) fn stream_parts(
        &mut self,
        message: &Descriptor,
        info: &[u8],
        cursor: &mut u64,
        budget: &mut u64,
    ) -> (Stop, bool) {
        let State { table, caps, routes, .. } = &mut *self.state;
        let mut fragment = caps.fragment as u64;
        let short = routes.of(message.rank).max_inline as u64;
        if *cursor == 0 {
            let begin = wire::StreamBegin {
                total: message.len.into(),
                cookie: message.cookie.into(),
                protocol: message.protocol.0.into(),
                reserved: [0; 6],
            };
            let head = Descriptor {
                protocol: ProtocolId(wire::STREAM_BEGIN),
                source_kind: SourceKind::Borrowed,
                info_len: info.len() as u8,
                len: size_of::<wire::StreamBegin>() as u64,
                ticket: 0,
                ..*message
            };
            let sources = Sources { info, borrowed: begin.as_bytes(), ..Sources::of(table) };
            match self.inject.inject(std::slice::from_ref(&head), &sources).stop {
                Stop::Done => *cursor = 1,
                stop => return (stop, false),
            }
        }
        let mut complete = true;
        while *cursor - 1 < message.len {
            if *budget == 0 {
                return (Stop::Full, false);
            }
            let sent = *cursor - 1;
            let len = fragment.min(message.len - sent);
            let part = Descriptor {
                protocol: ProtocolId(wire::STREAM_DATA),
                cookie: 0,
                info_len: 0,
                len,
                ticket: if sent + len == message.len { message.ticket } else { 0 },
                source: [message.source[0], message.source[1] + sent],
                ..*message
            };
            let sources = Sources::of(table);
            let injected = self.inject.inject(std::slice::from_ref(&part), &sources);
            match injected.stop {
                Stop::Done => *cursor += len,
                // The peer waits for the rest, and would take the next message for a breach: what needs no page of its own
                // can be sent without memory.
                Stop::Fault(Fault::OutOfMemory(_)) if len > short && short > 0 => {
                    fragment = short;
                    continue;
                }
                stop => return (stop, false),
            }
            *budget = budget.saturating_sub(len);
            complete = injected.complete;
        }
        (Stop::Done, complete)
    }
}

impl State {
    /// Puts a message at the end of the peer's FIFO, with its payload.
    pub(super) fn queue_message(
        &mut self,
        index: usize,
        descriptor: &mut Descriptor,
        info: &[u8],
        payload: Payload<'_>,
    ) {
        match payload {
            Payload::Loan(loan) => {
                descriptor.source_kind = SourceKind::Loan;
                descriptor.source = [loan.key(), 0];
                descriptor.source[1] = self.table.loans.insert(loan) as u64;
            }
            payload => self.hold(descriptor, payload),
        }
        self.stats.queued += 1;
        let peer = self.peer(index);
        peer.push(descriptor, info);
        peer.unflushed = true;
        self.mark_busy(index);
    }

    /// Has a descriptor carry its bytes, or keeps them here for it.
    pub(super) fn hold(&mut self, descriptor: &mut Descriptor, payload: Payload<'_>) {
        descriptor.len = payload.len() as u64;
        let bytes = match payload {
            Payload::Loan(loan) => Bytes::from(loan.memory().to_vec()),
            payload if payload.len() <= MAX_DESCRIPTOR_INLINE => {
                return descriptor.set_inline(payload.bytes_of());
            }
            Payload::Owned(bytes) => bytes,
            Payload::Borrowed(bytes) => Bytes::copy_from_slice(bytes),
        };
        descriptor.source_kind = SourceKind::Held;
        descriptor.source = [self.table.held.insert(bytes) as u64, 0];
    }

    /// Something waits until there is memory.
    #[cold]
    pub(super) fn wait_for_memory(&mut self) {
        if !std::mem::replace(&mut self.waits_for_memory, true) {
            self.timers.set_in(SOON, MEMORY);
            // Whoever sleeps is to see when to wake up for that.
            self.restless = true;
        }
    }

    pub(super) fn drop_source(&mut self, descriptor: &Descriptor) {
        if descriptor.op == Op::Local {
            drop(self.turns.try_remove(descriptor.source[0] as usize));
        }
        match descriptor.source_kind {
            SourceKind::Held => drop(self.table.held.try_remove(descriptor.source[0] as usize)),
            SourceKind::Loan => drop(self.table.loans.try_remove(descriptor.source[1] as usize)),
            _ => {}
        }
    }

    /// A queued descriptor has ended.
    pub(super) fn finish_descriptor(&mut self, descriptor: &Descriptor, outcome: Outcome) {
        self.drop_source(descriptor);
        if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
            self.end(ticket, outcome);
        }
    }
}
