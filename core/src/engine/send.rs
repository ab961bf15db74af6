//! The way out: from a message to descriptors, and from the FIFO to the device.

use super::peer::{Outgoing, Waiter};
use super::{Deposit, Scope, State};
use crate::descriptor::{Descriptor, Info, MAX_DESCRIPTOR_INLINE, MAX_INFO, Op, SourceKind};
use crate::device::{Loan, Sources, Stop};
use crate::error::{Fault, SendError};
use crate::ids::{Endpoint, ProtocolId};
use crate::protocol::{Flow, ReplyTo};
use crate::row::Row;
use crate::slot::Ticket;
use crate::wire;
use bytes::Bytes;
use zerocopy::IntoBytes;

/// What is to be sent.
pub enum Payload<'p> {
    /// Bytes that are copied before the call returns.
    Borrowed(&'p [u8]),
    /// Bytes that are kept alive as long as they are needed.
    Owned(Bytes),
    /// Page memory of the device; not copied at all.
    Loan(Loan),
}

impl std::fmt::Debug for Payload<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self {
            Payload::Borrowed(_) => "Borrowed",
            Payload::Owned(_) => "Owned",
            Payload::Loan(_) => "Loan",
        };
        write!(f, "{kind}({} bytes)", self.len())
    }
}

impl Payload<'_> {
    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Payload::Borrowed(bytes) => bytes.len(),
            Payload::Owned(bytes) => bytes.len(),
            Payload::Loan(loan) => loan.len(),
        }
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes; none for a loan, which only its device can read.
    #[inline]
    #[must_use]
    pub fn bytes_of(&self) -> &[u8] {
        match self {
            Payload::Borrowed(bytes) => bytes,
            Payload::Owned(bytes) => bytes,
            Payload::Loan(_) => &[],
        }
    }

    /// The bytes as memory that may be kept, if they are such.
    #[inline]
    pub(super) fn owned(&self) -> Option<&Bytes> {
        match self {
            Payload::Owned(bytes) => Some(bytes),
            Payload::Borrowed(_) | Payload::Loan(_) => None,
        }
    }
}

/// A send, but for its payload.
#[derive(Clone, Copy, Debug)]
pub struct SendArgs<'p> {
    /// Where to.
    pub target: Endpoint,
    /// The protocol, by this client's number.
    pub protocol: ProtocolId,
    /// The caller's name for the request if an answer is wanted, else 0.
    pub cookie: u64,
    /// Message info, at most 112 bytes.
    pub info: &'p [u8],
    /// May overtake what waits.
    pub relaxed: bool,
}

/// What to do when there is no room.
#[derive(Clone, Copy, Debug)]
pub enum Wait {
    /// Give the payload back.
    Never,
    /// Queue it, or wait for credit or for a place in the queue, and come again with the payload: something else may have gone
    /// before it then.
    Await,
    /// Queue it, however much waits: for an access to memory that is a message, so that it keeps its place among the puts, of
    /// which a queue takes any number, too. Of a protocol with credit it is given back if there is none.
    InTurn,
    /// The caller waited; this credit was promised to it, by the incarnation of the rank with these low bits and for so
    /// many bytes.
    Credited(Endpoint, ProtocolId, u16, u64),
    /// The caller waited; a place in the queue to that incarnation was promised to it.
    Room(Endpoint, u16),
}

/// How far a send got.
#[derive(Debug)]
pub enum Sent<'p> {
    /// The source is reusable and the message is on its way.
    Done,
    /// The message is queued; the ticket ends when it is on its way.
    Queued(Ticket),
    /// Nothing was sent. When the ticket ends well, send again with this `Wait`.
    Later(Ticket, Wait, Payload<'p>),
    /// Nothing was sent and nothing will be.
    Full(Payload<'p>),
}

/// How far a send got that leaves its message with the engine.
#[derive(Debug)]
pub enum Given {
    /// The source is reusable and the message is on its way.
    Done,
    /// The message is queued; the ticket ends when it is on its way.
    Queued(Ticket),
    /// The message waits for credit or room, and is queued by itself, unless it is taken back; the ticket ends when it is on its
    /// way.
    Kept(Ticket, Deposit),
}

pub(super) enum Queue {
    Never,
    Await,
    Granted,
    /// The messager's own traffic, and accesses to memory: their amount is bounded by what this side has under way.
    Force,
    /// What a peer asked for: it is cut off if it asks for ever more and takes nothing.
    Answer,
}

pub(super) type SendResult<'p> = Result<Sent<'p>, (SendError, Payload<'p>)>;

impl Scope<'_> {
    /// Sends a message of a registered protocol.
    ///
    /// # Errors
    /// With the payload: if the send cannot succeed.
    #[inline]
    pub fn send<'p>(&mut self, args: &SendArgs<'p>, payload: Payload<'p>, wait: Wait) -> SendResult<'p> {
        let sent = self.send_now(args, payload, wait, false);
        if let Wait::Room(target, life) = wait
            && let Ok(index) = self.state.index_of(target)
            && self.state.peer(index).life == life
        {
            // It may not have taken the place that it had been promised.
            self.state.hand_out_room(index);
        }
        sent
    }

    /// As [`send`](Self::send), for who does not come again: a message that has to wait for credit or room is kept here, with its
    /// payload, and keeps its place among those that are sent later.
    ///
    /// # Errors
    /// With the payload: if the send cannot succeed.
    #[inline]
    pub fn give<'p>(
        &mut self,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
    ) -> Result<Given, (SendError, Payload<'p>)> {
        match self.send_now(args, payload, Wait::Await, true)? {
            Sent::Done => Ok(Given::Done),
            Sent::Queued(ticket) => Ok(Given::Queued(ticket)),
            Sent::Later(ticket, wait, payload) => Ok(self.keep(args, ticket, wait, payload)),
            // Only who waits never is told so.
            Sent::Full(payload) => Err((Fault::Shutdown.into(), payload)),
        }
    }

    /// `keeps`: what has to wait for room keeps its credit.
    #[inline]
    fn send_now<'p>(
        &mut self,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
        wait: Wait,
        keeps: bool,
    ) -> SendResult<'p> {
        let index = match self.check(args, payload.len()) {
            Ok(index) => index,
            Err(error) => {
                self.state.ungrant(wait);
                return Err((error, payload));
            }
        };
        let peer = self.state.peer(index);
        if let Some(fault) = peer.fault {
            return Err((fault.into(), payload));
        }
        if let Wait::Room(endpoint, life) = wait {
            if peer.life != life {
                // It waited for an incarnation that has died since.
                return Err((Fault::PeerLost(endpoint.rank).into(), payload));
            }
            peer.room_granted = peer.room_granted.saturating_sub(1);
        }
        if !peer.is_open(args.protocol) {
            match self.admit(index, args, payload.len(), wait) {
                Ok(None) => {}
                Ok(Some((ticket, wait))) => return Ok(Sent::Later(ticket, wait, payload)),
                Err(None) => return Ok(Sent::Full(payload)),
                Err(Some(error)) => return Err((error, payload)),
            }
        }
        let queue = match wait {
            Wait::Never => Queue::Never,
            Wait::InTurn => Queue::Force,
            Wait::Room(..) => Queue::Granted,
            Wait::Await | Wait::Credited(..) => Queue::Await,
        };
        // It may overtake anything but what tells the peer of its protocol.
        let relaxed = args.relaxed && self.state.peer(index).is_announced(args.protocol);
        self.state.stats.sent(payload.len() as u64);
        let sent =
            self.post(index, Self::wire_id(args.protocol), args.cookie, args.info, payload, queue, relaxed);
        if !matches!(sent, Ok(Sent::Done | Sent::Queued(_))) {
            self.unsent(index, args.protocol, &sent, keeps);
        }
        sent
    }

    #[inline]
    pub(super) fn check(&mut self, args: &SendArgs<'_>, len: usize) -> Result<usize, SendError> {
        if self.state.closed {
            return Err(Fault::Shutdown.into());
        }
        let index = self.state.index_of(args.target)?;
        if args.info.len() > MAX_INFO {
            return Err(SendError::InfoTooLong { len: args.info.len() });
        }
        let max = self.state.config.max_message;
        if len as u64 > max {
            return Err(SendError::TooLong { len: len as u64, max });
        }
        if args.protocol.index() as u64 >= self.state.known_protocols {
            self.outgoing_protocol(args.protocol)?;
        }
        Ok(index)
    }

    /// A send that was admitted did not happen: its count goes back, and its credit, unless that is kept while it waits.
    #[cold]
    fn unsent(&mut self, index: usize, protocol: ProtocolId, sent: &SendResult<'_>, keeps: bool) {
        let (len, waits) = match sent {
            Ok(Sent::Later(_, _, payload)) => (payload.len() as u64, true),
            Ok(Sent::Full(payload)) | Err((_, payload)) => (payload.len() as u64, false),
            Ok(_) => (0, false),
        };
        self.uncount(len);
        if !(keeps && waits) {
            self.state.give_credit(index, protocol.index(), 1, len);
        }
    }

    /// What was counted as sent is not, or not yet.
    pub(super) fn uncount(&mut self, len: u64) {
        self.state.stats.messages_sent -= 1;
        self.state.stats.bytes_sent -= len;
    }

    /// The slow part of admission: declares the protocol to the peer, and takes a credit if it needs one.
    /// `Err(None)` means "no credit now".
    #[cold]
    pub(super) fn admit(
        &mut self,
        index: usize,
        args: &SendArgs<'_>,
        len: usize,
        wait: Wait,
    ) -> Result<Option<(Ticket, Wait)>, Option<SendError>> {
        let id = args.protocol.index();
        if self.state.registry.get(args.protocol).is_none() {
            return Err(Some(SendError::Unregistered(args.protocol)));
        }
        self.introduce(index, args.protocol).map_err(|fault| Some(fault.into()))?;
        let held_by = self.state.peer(index).life;
        let out = &mut self.state.peer(index).outgoing[id];
        if out.flow == Flow::Inline {
            out.open = true;
            return Ok(None);
        }
        if let Wait::Credited(endpoint, _, life, _) = wait
            && life != held_by
        {
            // It waited for an incarnation that has died since.
            return Err(Some(Fault::PeerLost(endpoint.rank).into()));
        }
        if matches!(wait, Wait::Credited(..)) && out.granted > 0 {
            // The credit was taken when the waiter was woken.
            out.granted -= 1;
            return Ok(None);
        }
        if out.credits > 0 && out.bytes > 0 && out.waiters.is_empty() && !out.a_run_is_next {
            out.credits -= 1;
            out.bytes -= len as i64;
            return Ok(None);
        }
        if matches!(wait, Wait::Never | Wait::InTurn) {
            return Err(None);
        }
        let endpoint = args.target;
        let ticket = self.operation(Some(endpoint.rank)).map_err(|fault| Some(fault.into()))?;
        self.state.wait_for_credit(
            index,
            id,
            Waiter { ticket, messages: 1, bytes: len as u64, kept: None, is_run: false },
        );
        Ok(Some((ticket, Wait::Credited(endpoint, args.protocol, held_by, len as u64))))
    }

    /// Has the peer hear of a registered protocol, if it has not yet.
    pub(super) fn introduce(&mut self, index: usize, id: ProtocolId) -> Result<(), Fault> {
        let config = self.state.config;
        while self.state.peer(index).outgoing.len() <= id.index() {
            let next = self.state.peer(index).outgoing.len();
            let Some(protocol) = self.state.registry.get(ProtocolId(next as u16)) else {
                return Err(Fault::NoSuchProtocol(self.state.me.rank));
            };
            let flow = protocol.flow();
            self.state.peer(index).outgoing.push(Outgoing {
                declared: false,
                announced: 0,
                open: false,
                flow,
                credits: config.credits,
                bytes: config.credit_bytes as i64,
                refused: None,
                waiters: Row::default(),
                a_run_is_next: false,
                granted: 0,
            });
        }
        if !self.state.peer(index).outgoing[id.index()].declared {
            self.declare(index, id)?;
        }
        self.state.peer(index).outgoing[id.index()].refused.map_or(Ok(()), Err)
    }

    fn declare(&mut self, index: usize, id: ProtocolId) -> Result<(), Fault> {
        let Some(protocol) = self.state.registry.get(id) else { return Err(Fault::Shutdown) };
        let mut body = Vec::with_capacity(size_of::<wire::Declare>() + protocol.name().len());
        body.extend_from_slice(
            wire::Declare {
                schema: protocol.schema().into(),
                index: id.0.into(),
                flow: protocol.flow() as u8,
                reserved: 0,
            }
            .as_bytes(),
        );
        body.extend_from_slice(protocol.name().as_bytes());
        self.system(index, wire::DECLARE, 0, &body)?;
        let peer = self.state.peer(index);
        let announced = peer.fifo.as_ref().filter(|fifo| !fifo.is_empty()).map_or(0, |fifo| fifo.tail());
        let outgoing = &mut peer.outgoing[id.index()];
        (outgoing.declared, outgoing.announced) = (true, announced);
        Ok(())
    }

    /// Sends a record of the messager's own.
    pub(crate) fn system(&mut self, index: usize, what: u16, cookie: u64, body: &[u8]) -> Result<(), Fault> {
        if let Some(fault) = self.state.peer(index).fault {
            return Err(fault);
        }
        let queue = if what == wire::REFUSE { Queue::Answer } else { Queue::Force };
        match self.post(index, ProtocolId(what), cookie, &[], Payload::Borrowed(body), queue, false) {
            Ok(_) => Ok(()),
            Err((SendError::Fault(fault), _)) => Err(fault),
            Err(_) => Err(Fault::Shutdown),
        }
    }

    /// Sends a record of the messager's own if there is room now.
    pub(crate) fn try_system(&mut self, index: usize, what: u16, body: &[u8]) -> bool {
        self.state.peer(index).fault.is_some()
            || matches!(
                self.post(index, ProtocolId(what), 0, &[], Payload::Borrowed(body), Queue::Never, false),
                Ok(Sent::Done)
            )
    }

    /// Answers a request, with a value or with a fault. An answer needs no credit: the caller reserved its room.
    pub fn reply(&mut self, to: ReplyTo, answer: Result<Payload<'_>, Fault>) {
        if let Ok(Payload::Borrowed(bytes)) = &answer
            && let Ok(word) = <[u8; 8]>::try_from(*bytes)
            && self.reply_word(to, u64::from_ne_bytes(word))
        {
            return;
        }
        let Ok(index) = self.state.index_of(to.endpoint()) else { return };
        let closed = self.state.closed;
        let peer = self.state.peer(index);
        if peer.fault.is_some() || closed || peer.life != to.life {
            return;
        }
        // The other side would take a longer one for a peer's that is corrupt.
        let fits = |payload: &Payload<'_>| payload.len() as u64 <= self.state.config.max_message;
        let answer = match answer {
            Ok(payload) if !fits(&payload) => Err(Fault::AnswerTooLong(self.state.me.rank)),
            answer => answer,
        };
        let result = match answer {
            Ok(payload) => self
                .post(index, ProtocolId(wire::REPLY), to.cookie, &[], payload, Queue::Answer, false)
                .map(|_| ())
                .map_err(|(error, _)| error),
            Err(fault) => {
                let body = wire::Refuse { index: u16::MAX.into(), code: wire::code_of(fault).into() };
                self.system(index, wire::REFUSE, to.cookie, body.as_bytes()).map_err(Into::into)
            }
        };
        if let Err(error) = result {
            tracing::debug!(me = %self.state.me, to = %to.endpoint(), %error, "reply not sent");
            if let SendError::Fault(fault) = error {
                self.refuse_instead(index, to.cookie, fault);
            }
        }
    }

    /// An answer could not be sent. Unless that is because the peer has ended, it hears why: it would wait for ever.
    #[cold]
    pub(super) fn refuse_instead(&mut self, index: usize, cookie: u64, fault: Fault) {
        if fault.peer().is_some() || fault == Fault::Shutdown {
            return;
        }
        let body = wire::Refuse { index: u16::MAX.into(), code: wire::code_of(fault).into() };
        if let Err(fault) = self.system(index, wire::REFUSE, cookie, body.as_bytes()) {
            tracing::debug!(me = %self.state.me, %fault, "refusal not sent");
        }
    }

    /// Injects a message, or queues it as `queue` allows.
    #[inline]
    #[allow(clippy::too_many_arguments, reason = "the one narrow waist that all sends go through")]
    fn post<'p>(
        &mut self,
        index: usize,
        protocol: ProtocolId,
        cookie: u64,
        info: &[u8],
        payload: Payload<'p>,
        queue: Queue,
        relaxed: bool,
    ) -> SendResult<'p> {
        let len = payload.len();
        let eager = self.state.eager;
        let target = self.state.shape.endpoint(index);
        let payload = self.state.as_it_goes(payload, target.rank);
        let State { peers, table, .. } = &mut *self.state;
        let mut descriptor = Descriptor {
            op: Op::Send,
            source_kind: SourceKind::Borrowed,
            info_len: info.len() as u8,
            rank: target.rank,
            context: target.context,
            protocol,
            cookie,
            len: len as u64,
            ..Descriptor::default()
        };
        let whole = len <= eager || matches!(payload, Payload::Loan(_));
        let empty = peers[index].as_ref().is_none_or(|peer| peer.queue_is_empty());
        if whole && (empty || relaxed) {
            if let Payload::Loan(loan) = &payload {
                descriptor.source_kind = SourceKind::Loan;
                descriptor.source[0] = loan.key();
            } else if len <= MAX_DESCRIPTOR_INLINE {
                descriptor.set_inline(payload.bytes_of());
            }
            let sources = Sources { info, borrowed: payload.bytes_of(), owned: payload.owned(), table };
            let injected = self.inject.inject(std::slice::from_ref(&descriptor), &sources);
            match injected.stop {
                Stop::Done => {
                    if let Payload::Loan(mut loan) = payload {
                        loan.sent();
                    }
                    if let Some(peer) = &mut peers[index] {
                        peer.unflushed = true;
                    }
                    self.trace_sent(target, len as u64);
                    return Ok(Sent::Done);
                }
                Stop::Full => {}
                stop if self.waits_for_lane(&descriptor, stop) => self.state.wait_for_memory(),
                Stop::Fault(fault) => return Err((fault.into(), payload)),
            }
        }
        self.enqueue(index, descriptor, info, payload, queue, whole, empty)
    }

    /// Asks the peer to answer once it has handled everything sent before; the ticket ends then.
    /// `None`: nothing was sent since the last question that was answered.
    ///
    /// # Errors
    /// If the peer is gone.
    pub fn flush(&mut self, target: Endpoint) -> Result<Option<Ticket>, SendError> {
        let index = self.state.index_of(target)?;
        let Some(peer) = self.state.peers[index].as_mut() else { return Ok(None) };
        if let Some(fault) = peer.fault {
            return Err(fault.into());
        }
        if !peer.wants_flush(&self.state.completer) {
            return Ok(None);
        }
        // The last question may have been given up by whoever asked it: if nothing was sent since, its answer is the one.
        if let (false, Some(flush)) = (peer.unflushed, peer.flush)
            && self.state.completer.adopt(flush)
        {
            return Ok(Some(flush));
        }
        let ticket = self.operation(Some(target.rank))?;
        if let Err(fault) = self.system(index, wire::FLUSH, ticket.to_word(), &[]) {
            self.complete(ticket, Err(fault));
            self.detach(ticket);
            return Err(fault.into());
        }
        let peer = self.state.peer(index);
        // As long as this one is not answered, whoever asks next has to wait, too, and so if nobody waits for this one any more.
        (peer.unflushed, peer.flush) = (false, Some(ticket));
        Ok(Some(ticket))
    }

    /// Every endpoint that something was sent to since its last flush.
    #[must_use]
    pub fn unflushed(&self) -> Vec<Endpoint> {
        let peers = self.state.peers.iter().flatten();
        peers
            .filter(|p| p.fault.is_none() && p.wants_flush(&self.state.completer))
            .map(|p| p.endpoint)
            .collect()
    }

    /// Nothing is begun any more, and nothing of this context reaches the memory of others: what was to ends here. What was
    /// sent goes on to be sent.
    pub fn depart(&mut self) {
        self.state.gates.close_all();
        self.state.departed = true;
        // What is pending ends with this side's leave, not with what the others do when they hear of it.
        self.state.completer.fail(None, Fault::Shutdown);
        for index in 0..self.state.peers.len() {
            self.state.drop_parked(index, Fault::Shutdown);
            self.state.end_rows(index, Fault::Shutdown);
            // What was asked for comes nevertheless.
            self.state.end_own_over(index);
            let writes = |peer: &super::peer::Peer| peer.queued_rma > 0 || peer.is_amid_rendezvous();
            if self.state.peers[index].as_deref().is_some_and(writes) {
                self.state.drop_what_waits(index, Fault::Shutdown);
            }
        }
    }

    /// Tells every peer that it knows that this side leaves, once all of its contexts have [departed](Self::depart). The others
    /// are told as far as the devices can once this side has shut down.
    pub fn goodbye(&mut self) {
        for index in 0..self.state.peers.len() {
            let known = self.state.peers[index].as_ref().is_some_and(|p| p.fault.is_none());
            if known && self.state.shape.endpoint(index).rank != self.state.me.rank {
                self.pump_controls(index);
                self.pump_over(index);
                let rank = self.state.shape.endpoint(index).rank;
                if !self.caps_of(rank).tells_leave {
                    // A peer that is gone meanwhile needs no goodbye.
                    let _gone = self.system(index, wire::GOODBYE, 0, &[]);
                }
            }
        }
    }

    /// Whether anything still waits in an injection FIFO, of a living peer or one of the user's that is served, or is owed to a
    /// peer.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        if self.state.fifos.are_busy() {
            return true;
        }
        let mut living = self.state.peers.iter().flatten().filter(|peer| peer.fault.is_none());
        living.any(|peer| {
            !peer.queue_is_empty() || peer.owes_over() || peer.has_controls() || peer.owes_clearance()
        })
    }
}

/// What is remembered with the ticket of a request: its protocol and its length, so that the answer gives the credit
/// back. A request is shorter than 2^40 bytes.
#[inline]
pub(super) fn request_note(protocol: ProtocolId, bytes: usize) -> u64 {
    (u64::from(protocol.0) + 1) << 40 | bytes as u64
}

/// The info of a message as an owned value; longer info cannot arrive.
pub(super) fn owned_info(info: &[u8]) -> Info {
    Info::new(info).unwrap_or_default()
}
