//! The way out: from a message to descriptors, and from the FIFO to the device.

use super::kept::Lack;
use super::peer::Outgoing;
use super::{Deposit, Scope, State};
use crate::descriptor::{Descriptor, Info, MAX_DESCRIPTOR_INLINE, MAX_INFO, Op, SourceKind};
use crate::device::{Loan, Sources, Stop};
use crate::error::{Fault, SendError};
use crate::ids::{Endpoint, ProtocolId};
use crate::protocol::ReplyTo;
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

/// What becomes of a message that is not to be kept when there is no room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It is given back.
    Never,
    /// It is queued, however much waits: for an access to memory that is a message, so that it keeps its place among the puts, of
    /// which a queue takes any number, too. Of a protocol with credit it is given back if there is none.
    InTurn,
}

/// How far a send got whose message is not kept.
#[derive(Debug)]
pub enum Sent<'p> {
    /// The source is reusable and the message is on its way, or queued.
    Done,
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

impl Given {
    /// Leaves a message that waits where it is: nobody takes it back any more. The ticket of what is not on its way yet.
    pub fn leave(self) -> Option<Ticket> {
        match self {
            Given::Done => None,
            Given::Queued(ticket) => Some(ticket),
            Given::Kept(ticket, deposit) => {
                deposit.leave();
                Some(ticket)
            }
        }
    }
}

pub(super) enum Queue {
    Never,
    /// As far as there is room and nobody waits for some; its end is told.
    Await,
    /// The messager's own traffic: its amount is bounded by what this side has under way.
    Force,
    /// Accesses to memory by messages, of which the same holds; puts and gets lie before and behind them.
    Access,
    /// What a peer asked for: it is cut off if it asks for ever more and takes nothing.
    Answer,
}

/// How far an admitted message got.
pub(super) enum Posted<'p> {
    Done,
    Queued(Ticket),
    /// Nothing was done.
    NoRoom(Payload<'p>),
}

pub(super) type Refused<'p> = (SendError, Payload<'p>);

impl Scope<'_> {
    /// Sends a message of a registered protocol, now or in its turn.
    ///
    /// # Errors
    /// With the payload: if the send cannot succeed.
    #[inline]
    pub fn send<'p>(
        &mut self,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
        wait: Wait,
    ) -> Result<Sent<'p>, Refused<'p>> {
        let queue = match wait {
            Wait::Never => Queue::Never,
            Wait::InTurn => Queue::Access,
        };
        match self.admitted(args, payload.len()) {
            Ok(Some(index)) => match self.post_counted(index, args, payload, queue)? {
                Posted::Done => Ok(Sent::Done),
                Posted::Queued(ticket) => {
                    self.detach(ticket);
                    Ok(Sent::Done)
                }
                Posted::NoRoom(payload) => {
                    self.state.give_credit(index, args.protocol.index(), 1, payload.len() as u64);
                    Ok(Sent::Full(payload))
                }
            },
            Ok(None) => Ok(Sent::Full(payload)),
            Err(error) => Err((error, payload)),
        }
    }

    /// Sends a message of a registered protocol. One that has to wait for credit or room is kept here, with its payload, and keeps
    /// its place among those that are sent later.
    ///
    /// # Errors
    /// With the payload: if the send cannot succeed.
    #[inline]
    pub fn give<'p>(&mut self, args: &SendArgs<'p>, payload: Payload<'p>) -> Result<Given, Refused<'p>> {
        match self.admitted(args, payload.len()) {
            Ok(Some(index)) => match self.post_counted(index, args, payload, Queue::Await)? {
                Posted::Done => Ok(Given::Done),
                Posted::Queued(ticket) => Ok(Given::Queued(ticket)),
                Posted::NoRoom(payload) => self.keep(args, payload, None, Lack::Room),
            },
            Ok(None) => self.keep(args, payload, None, Lack::Credit),
            Err(error) => Err((error, payload)),
        }
    }

    /// Whether a message may go, and where to; its credit is taken. `None`: there is none.
    #[inline]
    pub(super) fn admitted(&mut self, args: &SendArgs<'_>, len: usize) -> Result<Option<usize>, SendError> {
        let index = self.check_living(args, len)?;
        let admitted =
            self.state.peer(index).is_open(args.protocol) || self.admit(index, args.protocol, len)?;
        Ok(admitted.then_some(index))
    }

    #[inline]
    pub(super) fn check_living(&mut self, args: &SendArgs<'_>, len: usize) -> Result<usize, SendError> {
        let index = self.check(args, len)?;
        self.state.peer(index).fault.map_or(Ok(index), |fault| Err(fault.into()))
    }

    /// Injects or queues an admitted message, and counts it. What cannot be sent gives its credit back.
    #[inline]
    fn post_counted<'p>(
        &mut self,
        index: usize,
        args: &SendArgs<'p>,
        payload: Payload<'p>,
        queue: Queue,
    ) -> Result<Posted<'p>, Refused<'p>> {
        // It may overtake anything but what tells the peer of its protocol.
        let relaxed = args.relaxed && self.state.peer(index).is_announced(args.protocol);
        let len = payload.len() as u64;
        self.state.stats.sent(len);
        let posted =
            self.post(index, Self::wire_id(args.protocol), args.cookie, args.info, payload, queue, relaxed);
        match &posted {
            Ok(Posted::Done | Posted::Queued(_)) => {}
            Ok(Posted::NoRoom(_)) => self.uncount(len),
            Err(_) => {
                self.uncount(len);
                self.state.give_credit(index, args.protocol.index(), 1, len);
            }
        }
        posted
    }

    #[inline]
    fn check(&mut self, args: &SendArgs<'_>, len: usize) -> Result<usize, SendError> {
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

    /// What was counted as sent is not, or not yet.
    pub(super) fn uncount(&mut self, len: u64) {
        self.state.stats.messages_sent -= 1;
        self.state.stats.bytes_sent -= len;
    }

    /// The slow part of admission: declares the protocol to the peer, and takes a credit if it needs one; false: there is none.
    #[cold]
    fn admit(&mut self, index: usize, protocol: ProtocolId, len: usize) -> Result<bool, SendError> {
        self.introduce_registered(index, protocol)?;
        Ok(self.state.take_credit(index, protocol.index(), len as u64))
    }

    pub(super) fn introduce_registered(&mut self, index: usize, id: ProtocolId) -> Result<(), SendError> {
        if self.state.registry.get(id).is_none() {
            return Err(SendError::Unregistered(id));
        }
        Ok(self.introduce(index, id)?)
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
                Ok(Posted::Done)
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
    ) -> Result<Posted<'p>, Refused<'p>> {
        let len = payload.len();
        let eager = self.state.eager;
        let target = self.state.shape.endpoint(index);
        let payload = self.state.as_it_goes(payload, target.rank);
        let State { peers, table, .. } = &mut *self.state;
        let mut descriptor = message_to(target, protocol, cookie, info, len as u64);
        if matches!(queue, Queue::Access) {
            descriptor.set_access();
        }
        let whole = len <= eager || matches!(payload, Payload::Loan(_));
        let empty = peers[index].as_ref().is_none_or(|peer| peer.queue_is_empty());
        if whole && (empty || relaxed) {
            if let Payload::Loan(loan) = &payload {
                descriptor.source_kind = SourceKind::Loan;
                descriptor.source[0] = loan.key();
            } else if len <= MAX_DESCRIPTOR_INLINE {
                descriptor.set_inline(payload.bytes_of());
            }
            let sources =
                Sources { info, borrowed: payload.bytes_of(), owned: payload.owned(), ..Sources::of(table) };
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
                    return Ok(Posted::Done);
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

/// A message without its payload.
#[inline(always)]
pub(super) fn message_to(
    target: Endpoint,
    protocol: ProtocolId,
    cookie: u64,
    info: &[u8],
    len: u64,
) -> Descriptor {
    Descriptor {
        op: Op::Send,
        source_kind: SourceKind::Borrowed,
        info_len: info.len() as u8,
        rank: target.rank,
        context: target.context,
        protocol,
        cookie,
        len,
        ..Descriptor::default()
    }
}

/// The info of a message as an owned value; longer info cannot arrive.
pub(super) fn owned_info(info: &[u8]) -> Info {
    Info::new(info).unwrap_or_default()
}
