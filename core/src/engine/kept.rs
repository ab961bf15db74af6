//! Messages that wait for credit or room. The engine has them with their payload, and lets them into the FIFO in the order in
//! which they were given to it: nobody has to come and take what was promised to it, and nothing passes who was. Until it is let
//! in, a message can be taken back by whoever gave it.

use super::peer::{Place, Waiter};
use super::send::{Given, SendArgs, Wait};
use super::{Payload, Scope, State};
use crate::descriptor::{Descriptor, Info, Op, SourceKind};
use crate::error::Fault;
use crate::ids::ProtocolId;
use crate::protocol::Flow;
use crate::row::Row;
use crate::slot::{Completer, Ticket, Value};
use crate::sync::{Arc, Mutex, lock};
use crate::wire;
use bytes::Bytes;

/// Where the payload is until the message is let in, or taken back.
#[derive(Debug)]
struct Cell(Mutex<Option<Payload<'static>>>);

/// A message that the engine keeps until there is credit and room for it. Dropped, the message is taken back, unless it was let
/// in before. Its operation, and that of the request which it is, then end some time or other, as if it had gone well: whoever
/// takes a message back does not wait for them.
#[derive(Debug)]
#[must_use = "the message is taken back when this is dropped"]
pub struct Deposit(Arc<Cell>);

impl Deposit {
    /// Takes the message back: nothing is sent. `None`: it was let in before, or taken back.
    pub fn withdraw(&self) -> Option<Payload<'static>> {
        lock(&self.0.0).take()
    }
}

impl Drop for Deposit {
    fn drop(&mut self) {
        drop(self.withdraw());
    }
}

/// The engine's half.
#[derive(Debug)]
pub(crate) struct Kept {
    cell: Arc<Cell>,
    /// On the wire.
    protocol: ProtocolId,
    cookie: u64,
    /// The operation that the answer ends, if one is asked for: it ends with the message if that is not sent.
    request: Option<Ticket>,
    info: Info,
    len: u64,
    /// Its credit was taken, and goes back if the message does.
    credited: bool,
}

impl Kept {
    fn is_withdrawn(&self) -> bool {
        lock(&self.cell.0).is_none()
    }

    /// By this client's number.
    fn number(&self) -> usize {
        usize::from(self.protocol.0.wrapping_sub(wire::FIRST_USER))
    }
}

/// Ends what waits in a row, with the request that it is, if so.
fn end(completer: &mut Completer, ticket: Ticket, kept: Option<&Kept>, outcome: Result<(), Fault>) {
    completer.complete(ticket, outcome.map(|()| Value::Unit));
    if let Some(request) = kept.and_then(|kept| kept.request) {
        completer.complete(request, outcome.map(|()| Value::Unit));
    }
}

/// Whether one in a row still waits; if not, its slot is free. One that has its credit goes by its turn only: that is given back then.
fn still_waits(completer: &mut Completer, ticket: Ticket, kept: Option<&Kept>) -> bool {
    match kept {
        None => completer.is_still_wanted(ticket),
        Some(kept) if kept.credited || !kept.is_withdrawn() => true,
        Some(_) => {
            end(completer, ticket, kept, Ok(()));
            false
        }
    }
}

impl crate::row::Waits for Place {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        still_waits(completer, self.ticket, self.kept.as_deref())
    }
}

impl crate::row::Waits for Waiter {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        still_waits(completer, self.ticket, self.kept.as_deref())
    }
}

impl Scope<'_> {
    /// Whoever was just put at the end of a row leaves its payload there.
    #[cold]
    pub(super) fn keep(
        &mut self,
        args: &SendArgs<'_>,
        ticket: Ticket,
        wait: Wait,
        payload: Payload<'_>,
    ) -> Given {
        let (id, index) = (args.protocol.index(), self.state.shape.index(args.target));
        let for_room = matches!(wait, Wait::Room(..));
        let asks = self.state.registry.get(args.protocol).is_some_and(|protocol| protocol.takes_requests());
        let len = payload.len() as u64;
        let payload = match payload {
            Payload::Borrowed(bytes) => Payload::Owned(Bytes::copy_from_slice(bytes)),
            Payload::Owned(bytes) => Payload::Owned(bytes),
            Payload::Loan(loan) => Payload::Loan(loan),
        };
        let cell = Arc::new(Cell(Mutex::new(Some(payload))));
        let peer = self.state.peer(index);
        let kept = Box::new(Kept {
            cell: cell.clone(),
            protocol: Self::wire_id(args.protocol),
            cookie: args.cookie,
            request: Ticket::from_word(args.cookie).filter(|_| asks),
            info: super::send::owned_info(args.info),
            len,
            credited: for_room && peer.outgoing[id].flow != Flow::Inline,
        });
        let place = match for_room {
            true => peer.room_waiters.back_mut().map(|place| (place.ticket, &mut place.kept)),
            false => peer.outgoing[id].waiters.back_mut().map(|waiter| (waiter.ticket, &mut waiter.kept)),
        };
        match place {
            Some((last, place)) if last == ticket => *place = Some(kept),
            _ => debug_assert!(false, "it was put at the end of the row"),
        }
        if for_room && self.state.peer(index).queue_is_empty() {
            // Before it are only those who wait for a promise, and nothing that is queued would keep others from going before it.
            self.state.hand_out_room(index);
        }
        Given::Kept(ticket, Deposit(cell))
    }
}

impl State {
    /// What waits in a row ends with this fault.
    pub(super) fn end_waiting(&mut self, ticket: Ticket, kept: Option<&Kept>, fault: Fault) {
        end(&mut self.completer, ticket, kept, Err(fault));
    }

    /// All that wait for credit or room towards a peer end; what was left with the engine can be taken back.
    pub(super) fn end_rows(&mut self, index: usize, fault: Fault) {
        let Some(peer) = self.peers[index].as_mut() else { return };
        let mut places = std::mem::take(&mut peer.room_waiters);
        let waiters: Vec<Row<Waiter>> =
            peer.outgoing.iter_mut().map(|out| std::mem::take(&mut out.waiters)).collect();
        for place in places.drain(..) {
            self.end_waiting(place.ticket, place.kept.as_deref(), fault);
        }
        for mut waiters in waiters {
            for waiter in waiters.drain(..) {
                self.end_waiting(waiter.ticket, waiter.kept.as_deref(), fault);
            }
        }
    }

    /// Lets those who wait for a place in the queue have one each, as far as there are: whoever left its message here has that
    /// queued, the others are woken. Whether anything was queued.
    pub(super) fn hand_out_room(&mut self, index: usize) -> bool {
        let (capacity, before) = (self.config.fifo_slots, self.stats.queued);
        while let Some(peer) = self.peers[index].as_mut() {
            // A place is given only when there is one even for the longest info. Nothing that is queued keeps others from going
            // before what is kept: that is queued, then, though it is behind somebody who was promised the last place.
            let next = match (peer.room(capacity) >= 3, peer.queue_is_empty()) {
                (true, _) => Some(0),
                (_, true) if peer.room_granted == 0 => Some(0),
                (_, true) => peer.room_waiters.iter().position(|place| place.kept.is_some()),
                _ => None,
            };
            let Some(place) = next.and_then(|next| peer.room_waiters.remove(next)) else { break };
            self.give_place(index, place);
        }
        self.stats.queued != before
    }

    /// Queues all messages that wait for room: what is queued next is not to pass them. Those who come for a promise get theirs, too,
    /// or they would wait for as long as what is let in again and again fills the queue.
    pub(super) fn let_in_all(&mut self, index: usize) {
        while let Some(place) = self.peers[index].as_mut().and_then(|peer| peer.room_waiters.pop_front()) {
            self.give_place(index, place);
        }
    }

    fn give_place(&mut self, index: usize, Place { ticket, kept }: Place) {
        match kept {
            None => {
                let wanted = self.completer.complete_if_wanted(ticket);
                self.peer(index).room_granted += usize::from(wanted);
            }
            Some(kept) => {
                if !self.let_in(index, ticket, &kept) && kept.credited {
                    self.give_credit(index, kept.number(), 1, kept.len);
                }
            }
        }
    }

    /// Lets those who wait for credit have theirs, as far as there is some: whoever left its message here has that queued, or
    /// wait for room, the others are woken. Who waits for several credits gets them at once: of two who had a part of them each,
    /// neither might ever get the rest.
    pub(super) fn hand_out_credit(&mut self, index: usize, number: usize) {
        loop {
            let State { peers, completer, .. } = self;
            let Some(out) = peers[index].as_mut().and_then(|peer| peer.outgoing.get_mut(number)) else {
                return;
            };
            let Some(front) = out.waiters.front() else { return };
            if out.a_run_is_next {
                return;
            }
            let gone = front.kept.as_ref().is_some_and(|kept| kept.is_withdrawn());
            if !gone && (out.credits < front.messages || out.bytes <= 0) {
                return;
            }
            let Some(Waiter { ticket, messages, bytes, kept, is_run }) = out.waiters.pop_front() else {
                return;
            };
            match kept {
                Some(kept) if gone => end(completer, ticket, Some(&kept), Ok(())),
                Some(mut kept) => {
                    out.credits -= messages;
                    out.bytes -= bytes as i64;
                    kept.credited = true;
                    self.admitted(index, Place { ticket, kept: Some(kept) });
                }
                None if completer.complete_if_wanted(ticket) => {
                    out.credits -= messages;
                    out.bytes -= bytes as i64;
                    out.granted += messages;
                    out.a_run_is_next = is_run;
                    // Nobody rings when it may go on.
                    self.restless |= is_run;
                }
                None => {}
            }
        }
    }

    /// Credit that was taken and not used is others' again.
    pub(super) fn give_credit(&mut self, index: usize, number: usize, messages: u32, bytes: u64) {
        let Some(out) = self.peers[index].as_mut().and_then(|peer| peer.outgoing.get_mut(number)) else {
            return;
        };
        if out.flow != Flow::Inline {
            out.credits += messages;
            out.bytes += bytes as i64;
            self.hand_out_credit(index, number);
        }
    }

    /// A message has its credit: it is queued if there is room and nobody waits for some, or if nothing is queued and nothing is
    /// kept before it.
    fn admitted(&mut self, index: usize, place: Place) {
        let State { peers, completer, .. } = self;
        if let Some(peer) = peers[index].as_mut() {
            // With nothing queued, the row has only those who wait for a promise; but for a moment in which room is handed out.
            if peer.queue_is_empty() && !peer.room_waiters.iter().any(|place| place.kept.is_some()) {
                self.give_place(index, place);
            } else {
                peer.room_waiters.push_back(place, completer);
                if peer.room_waiters.len() == 1 {
                    self.hand_out_room(index);
                }
            }
        }
        self.mark_busy(index);
    }

    /// Queues a message. False: it was taken back, or its protocol is refused meanwhile, and its operation has ended.
    fn let_in(&mut self, index: usize, ticket: Ticket, kept: &Kept) -> bool {
        if let Some(fault) = self.peer(index).outgoing.get(kept.number()).and_then(|out| out.refused) {
            self.end_waiting(ticket, Some(kept), fault);
            return false;
        }
        let Some(payload) = lock(&kept.cell.0).take() else {
            end(&mut self.completer, ticket, Some(kept), Ok(()));
            return false;
        };
        let target = self.shape.endpoint(index);
        let payload = self.as_it_goes(payload, target.rank);
        let mut descriptor = Descriptor {
            op: Op::Send,
            source_kind: SourceKind::Borrowed,
            info_len: kept.info.as_bytes().len() as u8,
            rank: target.rank,
            context: target.context,
            protocol: kept.protocol,
            cookie: kept.cookie,
            len: kept.len,
            ticket: ticket.to_word(),
            ..Descriptor::default()
        };
        if let Some(request) = kept.request {
            // From now on the answer gives the credit back.
            let protocol = ProtocolId(kept.number() as u16);
            self.completer.set_note(request, super::send::request_note(protocol, kept.len as usize));
        }
        // Nobody has tried whether the device takes it, and so nobody rings when it does.
        self.restless |= self.peer(index).queue_is_empty();
        self.stats.sent(kept.len);
        self.queue_message(index, &mut descriptor, kept.info.as_bytes(), payload);
        true
    }
}
