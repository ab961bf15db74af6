//! Messages that wait for credit or room. The engine has them with their payload, and lets them into the FIFO in the order in
//! which they were given to it: nobody has to come again, and nothing goes before who is slow to. Until it is let in, a message can
//! be taken back by whoever gave it.

use super::fifos::{FifoId, Fifos, LONGEST};
use super::peer::{Place, Waiter};
use super::send::{Given, Refused, SendArgs};
use super::{Payload, Scope, State};
use crate::descriptor::{Descriptor, Info};
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
pub struct Deposit(Option<Arc<Cell>>);

impl Deposit {
    /// Takes the message back: nothing is sent. `None`: it was let in before, or taken back.
    pub fn withdraw(&self) -> Option<Payload<'static>> {
        lock(&self.0.as_ref()?.0).take()
    }

    /// Leaves the message where it is: nobody takes it back any more.
    pub fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for Deposit {
    fn drop(&mut self) {
        drop(self.withdraw());
    }
}

/// What a message lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    Credit,
    /// In its FIFO. If that is its target's, it has its credit.
    Room,
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
    /// The FIFO that it goes through, if not its target's.
    fifo: Option<FifoId>,
    /// The incarnation that it is for.
    life: u16,
}

impl Kept {
    /// Whether it goes nowhere any more, and how it ends then.
    fn over(&self, fifos: &Fifos) -> Option<Result<(), Fault>> {
        match self.fifo {
            _ if self.is_withdrawn() => Some(Ok(())),
            Some(id) if !fifos.is_open(id) => Some(Err(Fault::Shutdown)),
            _ => None,
        }
    }

    fn is_withdrawn(&self) -> bool {
        lock(&self.cell.0).is_none()
    }

    pub fn info(&self) -> &[u8] {
        self.info.as_bytes()
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

/// Whether a message in a row still waits; if not, its slot is free. One that has its credit goes by its turn only: that is given
/// back then.
fn still_waits(completer: &mut Completer, ticket: Ticket, kept: &Kept) -> bool {
    if kept.credited || !kept.is_withdrawn() {
        return true;
    }
    end(completer, ticket, Some(kept), Ok(()));
    false
}

impl crate::row::Waits for Place {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        still_waits(completer, self.ticket, &self.kept)
    }
}

impl crate::row::Waits for Waiter {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        match &self.kept {
            Some(kept) => still_waits(completer, self.ticket, kept),
            None => completer.is_still_wanted(self.ticket),
        }
    }
}

impl Scope<'_> {
    /// Puts a message at the end of the row of those who lack the same.
    #[cold]
    pub(super) fn keep<'p>(
        &mut self,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
        fifo: Option<FifoId>,
        lack: Lack,
    ) -> Result<Given, Refused<'p>> {
        let (number, index) = (args.protocol.index(), self.state.shape.index(args.target));
        let (len, credited) = (payload.len() as u64, lack == Lack::Room && fifo.is_none());
        let ticket = match self.operation(Some(args.target.rank)) {
            Ok(ticket) => ticket,
            Err(fault) => {
                if credited {
                    self.state.give_credit(index, number, 1, len);
                }
                return Err((fault.into(), payload));
            }
        };
        let asks = self.state.registry.get(args.protocol).is_some_and(|protocol| protocol.takes_requests());
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
            credited: credited && peer.outgoing[number].flow != Flow::Inline,
            fifo,
            life: peer.life,
        });
        match lack {
            Lack::Credit => self.state.wait_for_its_credit(index, Place { ticket, kept }),
            Lack::Room => match fifo {
                Some(id) => self.state.wait_in_fifo(id, index, Place { ticket, kept }),
                None => self.state.wait_for_room(index, Place { ticket, kept }),
            },
        }
        Ok(Given::Kept(ticket, Deposit(Some(cell))))
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
        let in_fifos = self.leave_fifo_rows(index);
        for place in places.drain(..).chain(in_fifos) {
            self.end_waiting(place.ticket, Some(&place.kept), fault);
        }
        for mut waiters in waiters {
            for waiter in waiters.drain(..) {
                self.end_waiting(waiter.ticket, waiter.kept.as_deref(), fault);
            }
        }
    }

    /// Lets messages that wait for room into the queue, as far as there is some. Whether anything was queued.
    pub(super) fn hand_out_room(&mut self, index: usize) -> bool {
        let (capacity, before) = (self.config.fifo_slots, self.stats.queued);
        while let Some(peer) = self.peers[index].as_mut() {
            // There is a place only if it is one even for the longest info; but where nothing is queued, nothing would keep others
            // from going before what is kept.
            if peer.room(capacity) < LONGEST && !peer.queue_is_empty() {
                break;
            }
            let Some(place) = peer.room_waiters.pop_front() else { break };
            self.give_place(index, place);
        }
        self.stats.queued != before
    }

    /// Queues all messages that wait for room: what is queued next is not to pass them.
    pub(super) fn let_in_all(&mut self, index: usize) {
        while let Some(place) = self.peers[index].as_mut().and_then(|peer| peer.room_waiters.pop_front()) {
            self.give_place(index, place);
        }
    }

    fn give_place(&mut self, index: usize, Place { ticket, kept }: Place) {
        if let Some((mut descriptor, payload)) = self.take_out(index, ticket, &kept) {
            // Nobody has tried whether the device takes it, and so nobody rings when it does.
            self.restless |= self.peer(index).queue_is_empty();
            self.queue_message(index, &mut descriptor, kept.info(), payload);
        }
    }

    /// Lets those who wait for credit have theirs, as far as there is some: a message is queued, or waits for room, and a run of a
    /// replay is looked at again. Who waits for several credits gets them at once: of two who had a part of them each,
    /// neither might ever get the rest.
    pub(super) fn hand_out_credit(&mut self, index: usize, number: usize) {
        loop {
            let State { peers, completer, fifos, .. } = self;
            let Some(out) = peers[index].as_mut().and_then(|peer| peer.outgoing.get_mut(number)) else {
                return;
            };
            let Some(front) = out.waiters.front() else { return };
            if out.a_run_is_next {
                return;
            }
            let over = front.kept.as_ref().and_then(|kept| kept.over(fifos));
            if over.is_none() && (out.credits < front.messages || out.bytes <= 0) {
                return;
            }
            let Some(Waiter { ticket, messages, bytes, kept }) = out.waiters.pop_front() else { return };
            match (kept, over) {
                (kept, Some(how)) => end(completer, ticket, kept.as_deref(), how),
                (Some(kept), None) => {
                    out.credits -= messages;
                    out.bytes -= bytes as i64;
                    self.has_credit(index, Place { ticket, kept });
                }
                (None, None) if completer.complete_if_wanted(ticket) => {
                    out.credits -= messages;
                    out.bytes -= bytes as i64;
                    out.a_run_is_next = true;
                    // Nobody rings when it may go on.
                    self.restless = true;
                }
                (None, None) => {}
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

    fn wait_for_its_credit(&mut self, index: usize, Place { ticket, kept }: Place) {
        let (number, bytes) = (kept.number(), kept.len);
        self.wait_for_credit(index, number, Waiter { ticket, messages: 1, bytes, kept: Some(kept) });
    }

    /// A message that was waiting has its credit. There was room for it in the FIFO that it goes through, and those which wait there
    /// for room by now were given later.
    fn has_credit(&mut self, index: usize, mut place: Place) {
        place.kept.credited = true;
        match place.kept.fifo {
            Some(id) => self.put_kept(id, index, place),
            None => self.wait_for_room(index, place),
        }
    }

    /// A message for which there is room in the FIFO that it goes through takes its credit, or waits for that.
    pub(super) fn claim_credit(&mut self, index: usize, mut place: Place) -> Option<Place> {
        let kept = &place.kept;
        let (number, len, peer) = (kept.number(), kept.len, self.peer(index));
        let is_refused = peer.outgoing.get(number).is_some_and(|out| out.refused.is_some());
        // Otherwise it goes nowhere.
        let is_due = peer.fault.is_none() && peer.life == kept.life && !is_refused && !kept.is_withdrawn();
        if is_due && !self.take_credit(index, number, len) {
            self.wait_for_its_credit(index, place);
            return None;
        }
        place.kept.credited = is_due;
        Some(place)
    }

    /// A message that has its credit goes into its target's FIFO if there is room and nobody waits for some.
    fn wait_for_room(&mut self, index: usize, place: Place) {
        let State { peers, completer, .. } = self;
        if let Some(peer) = peers[index].as_mut() {
            peer.room_waiters.push_back(place, completer);
            if peer.room_waiters.len() == 1 {
                self.hand_out_room(index);
            }
        }
        self.mark_busy(index);
    }

    /// A message leaves the row that it was in, to be queued. `None`: it was taken back, or meanwhile its protocol was refused, its FIFO
    /// closed or its peer lost; its operation has ended.
    pub(super) fn take_out(
        &mut self,
        index: usize,
        ticket: Ticket,
        kept: &Kept,
    ) -> Option<(Descriptor, Payload<'static>)> {
        let State { peers, fifos, .. } = &*self;
        let peer = peers[index].as_deref()?;
        let target = peer.endpoint;
        let refused = || peer.outgoing.get(kept.number()).and_then(|out| out.refused);
        let lost = (peer.life != kept.life).then_some(Fault::PeerLost(target.rank));
        let ended = match peer.fault.or(lost).or_else(refused) {
            Some(fault) => Err(Err(fault)),
            None => kept.over(fifos).map_or_else(|| lock(&kept.cell.0).take().ok_or(Ok(())), Err),
        };
        let payload = match ended {
            Ok(payload) => payload,
            Err(why) => {
                end(&mut self.completer, ticket, Some(kept), why);
                // Another incarnation has credit of its own.
                if kept.credited && lost.is_none() {
                    self.give_credit(index, kept.number(), 1, kept.len);
                }
                return None;
            }
        };
        if let Some(request) = kept.request {
            // From now on the answer gives the credit back.
            let protocol = ProtocolId(kept.number() as u16);
            self.completer.set_note(request, super::send::request_note(protocol, kept.len as usize));
        }
        self.stats.sent(kept.len);
        let mut descriptor =
            super::send::message_to(target, kept.protocol, kept.cookie, kept.info(), kept.len);
        descriptor.ticket = ticket.to_word();
        Some((descriptor, self.as_it_goes(payload, target.rank)))
    }
}
