//! The way in: from a device's packet to a protocol's handler.

use super::peer::{Held, Incoming as IncomingState};
use super::streamed::append;
use super::{Scope, State};
use crate::device::{Body, Inject, Packet, PacketHead, Payloads, Sink, Verdict};
use crate::error::Fault;
use crate::ids::{ContextId, Endpoint, ProtocolId, Rank};
use crate::memory::SharedSlice;
use crate::protocol::{
    Accept, ArrivedWord, ArrivedWords, Credit, FirstPacket, Flow, Incoming, Protocol, ReplyTo,
};
use crate::slot::{Outcome, Ticket, Value};
use crate::sync::Arc;
use crate::wire;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zerocopy::IntoBytes;

/// What has to be known of a message whose handler panicked.
pub(super) struct Arrived {
    pub source: Endpoint,
    pub protocol: ProtocolId,
    pub life: u16,
    pub cookie: u64,
    pub flow: Flow,
    pub bytes: u64,
}

/// What the last message went straight to.
pub(super) struct Straight {
    source: Endpoint,
    protocol: ProtocolId,
    life: u16,
    flow: Flow,
    /// The handler's place.
    local: usize,
    /// It holds as long as there was no other ([`State::interruptions`]).
    interruptions: u64,
}

impl Straight {
    /// Nothing has come yet.
    pub const NONE: Straight = Straight {
        source: Endpoint::new(Rank(u32::MAX), ContextId(u16::MAX)),
        protocol: ProtocolId(u16::MAX),
        life: 0,
        flow: Flow::Inline,
        local: usize::MAX,
        interruptions: u64::MAX,
    };
}

/// Where packets go: to the handlers, with the state.
pub(super) struct Dispatcher<'a> {
    pub state: &'a mut State,
    /// By local number; what was registered a moment ago is not in it yet.
    pub handlers: &'a [Arc<dyn Protocol>],
}

impl Sink for Dispatcher<'_> {
    #[cold]
    fn ends(&mut self, source: Endpoint) {
        let index = self.state.shape.index(source);
        self.state.peer(index).ends = true;
    }

    #[inline]
    fn word(&mut self, inject: &mut dyn Inject, word: &mut ArrivedWord) -> Verdict {
        if word.protocol.0 == wire::REPLY {
            return self.word_reply(word);
        }
        if let Some((handler, flow, life)) = self.straight(word.source, word.protocol) {
            self.state.stats.received(8);
            word.life = life;
            let mut scope = Scope { inject, state: self.state };
            let outcome = catch_unwind(AssertUnwindSafe(|| handler.on_word(&mut scope, word)));
            if outcome.is_err() {
                let ArrivedWord { source, protocol, life, cookie, .. } = *word;
                scope.panicked(&Arrived { source, protocol, life, cookie, flow, bytes: 8 });
            }
            return Verdict::Taken;
        }
        // Not simply the next message of a protocol which is known.
        self.packet(inject, &mut word.packet())
    }

    #[inline]
    fn plain(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        cookie: u64,
        body: Body<'_>,
    ) -> Verdict {
        if let Some((handler, flow, life)) = self.straight(source, protocol) {
            let bytes = body.len() as u64;
            self.state.stats.received(bytes);
            let mut scope = Scope { inject, state: self.state };
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                handler.on_message(&mut scope, Incoming { source, info: &[], body, protocol, life, cookie });
            }));
            if outcome.is_err() {
                scope.panicked(&Arrived { source, protocol, life, cookie, flow, bytes });
            }
            return Verdict::Taken;
        }
        // Not simply the next message of a protocol which is known.
        self.packet(inject, &mut Packet::plain(source, protocol, cookie, body))
    }

    fn words(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        payloads: &[u64],
    ) -> usize {
        let mut taken = 0;
        while let Some(&payload) = payloads.get(taken) {
            if let Some((handler, flow, life)) = self.straight(source, protocol) {
                let mut scope = Scope { inject: &mut *inject, state: self.state };
                let interruptions = scope.interruptions();
                let rest = payloads[taken..].iter();
                let mut words = ArrivedWords { payloads: rest, source, protocol, life, interruptions };
                let outcome = catch_unwind(AssertUnwindSafe(|| handler.on_words(&mut scope, &mut words)));
                let before = std::mem::replace(&mut taken, payloads.len() - words.payloads.len());
                scope.state.stats.received_many((taken - before) as u64, 8);
                if outcome.is_err() {
                    scope.panicked(&Arrived { source, protocol, life, cookie: 0, flow, bytes: 8 });
                }
                if taken > before {
                    continue;
                }
            }
            let word = ArrivedWord::new(source, protocol, 0, payload);
            if self.packet(inject, &mut word.packet()) == Verdict::Taken {
                taken += 1;
            } else {
                break;
            }
        }
        taken
    }

    fn batch(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        payloads: &mut dyn Payloads,
    ) {
        loop {
            if let Some((handler, flow, life)) = self.straight(source, protocol) {
                let mut scope = Scope { inject: &mut *inject, state: self.state };
                let mut bytes = 0;
                let interruptions = scope.interruptions();
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    // What a handler does may be the end of it.
                    while scope.interruptions() == interruptions {
                        let Some(payload) = payloads.next() else { return true };
                        bytes = payload.len() as u64;
                        scope.state.stats.received(bytes);
                        let body = Body::Short(payload);
                        let message = Incoming { source, info: &[], body, protocol, life, cookie: 0 };
                        handler.on_message(&mut scope, message);
                    }
                    false
                }));
                match outcome {
                    Ok(true) => return,
                    Ok(false) => {}
                    Err(_) => scope.panicked(&Arrived { source, protocol, life, cookie: 0, flow, bytes }),
                }
            }
            let Some(payload) = payloads.next() else { return };
            let mut packet = Packet::plain(source, protocol, 0, Body::Short(payload));
            if self.packet(inject, &mut packet) == Verdict::Hold {
                return payloads.put_back();
            }
        }
    }

    #[inline]
    fn packet(&mut self, inject: &mut dyn Inject, packet: &mut Packet<'_>) -> Verdict {
        let index = self.state.shape.index(packet.source);
        if self.state.closed {
            return Verdict::Taken;
        }
        if self.state.is_cut_off(index) {
            return Verdict::Taken;
        }
        let mut scope = Scope { inject, state: self.state };
        if packet.protocol.0 < wire::FIRST_USER {
            return scope.system_packet(index, packet);
        }
        if scope.state.peer(index).has_aside() {
            return scope.behind_others(index, packet);
        }
        let (local, flow) = match scope.resolve(index, packet.protocol) {
            Resolution::Local(local, flow) => (local, flow),
            Resolution::Hold => return scope.set_aside(index, packet),
            Resolution::Refused(why) => {
                scope.refuse(index, packet.protocol, packet.cookie, why);
                return Verdict::Taken;
            }
            Resolution::Corrupt => {
                scope.cut_off(packet.source.rank);
                return Verdict::Taken;
            }
        };
        let mut message = packet.take();
        message.life = scope.state.peer(index).life;
        if !scope.holds_one_more(index, message.protocol, flow, message.body.len() as u64) {
            return Verdict::Taken;
        }
        match self.handlers.get(local.index()) {
            Some(handler) => scope.dispatch(&**handler, message, flow, true),
            None => scope.dispatch_late(message, local, flow),
        }
        Verdict::Taken
    }

    fn place(&mut self, first: &PacketHead<'_>) -> Option<Vec<SharedSlice>> {
        let peer = self.state.peers.get(self.state.shape.index(first.source))?.as_ref()?;
        if self.state.closed || !peer.takes_words() {
            return None;
        }
        let number = usize::from(first.protocol.0.checked_sub(wire::FIRST_USER)?);
        let IncomingState::Resolved { local, .. } = peer.incoming.get(number)? else { return None };
        let handler = self.handlers.get(local.index())?;
        let first = FirstPacket { source: first.source, info: first.info, total: first.len as u64 };
        // One that panics is told so by what handles the whole message.
        catch_unwind(AssertUnwindSafe(|| handler.place(&first))).ok().flatten()
    }

    #[cold]
    fn placed(&mut self, inject: &mut dyn Inject, head: &PacketHead<'_>) {
        let PacketHead { source, protocol, cookie, info, len } = *head;
        let index = self.state.shape.index(source);
        if self.state.closed || self.state.is_cut_off(index) {
            return;
        }
        let mut scope = Scope { inject, state: self.state };
        let Resolution::Local(local, flow) = scope.resolve(index, protocol) else { return };
        let Some(handler) = self.handlers.get(local.index()) else { return };
        if !scope.holds_one_more(index, protocol, flow, len as u64) {
            return;
        }
        let life = scope.state.peer(index).life;
        scope.state.stats.received(len as u64);
        let message = Incoming { source, info, body: Body::Short(&[]), protocol, life, cookie };
        if catch_unwind(AssertUnwindSafe(|| handler.on_placed(&mut scope, message))).is_err() {
            scope.panicked(&Arrived { source, protocol, life, cookie, flow, bytes: len as u64 });
        }
    }

    fn complete(&mut self, ticket: Ticket, outcome: Outcome) {
        self.state.end(ticket, outcome);
    }

    fn corrupt(&mut self, rank: Rank) {
        self.state.peer_down(rank, Fault::PeerCorrupt(rank));
    }

    #[cold]
    fn left(&mut self, rank: Rank, incarnation: u32) {
        // Of an earlier incarnation it comes too late.
        if !self.state.closed && incarnation == self.state.incarnation_of(rank) {
            self.state.leaves(rank);
        }
    }
}

impl<'a> Dispatcher<'a> {
    /// The handler of words of a protocol, if they go straight to it, with the protocol's flow and the peer's life.
    #[inline(always)]
    fn straight(&mut self, source: Endpoint, protocol: ProtocolId) -> Option<(&'a dyn Protocol, Flow, u16)> {
        if tracing::enabled!(tracing::Level::TRACE) {
            return None;
        }
        let last = &self.state.straight;
        // One comes behind the other as a rule, and what one of them went straight to goes on until the next interruption.
        if last.source == source
            && last.protocol == protocol
            && last.interruptions == self.state.interruptions
            && let Some(handler) = self.handlers.get(last.local)
        {
            return Some((&**handler, last.flow, last.life));
        }
        self.look_straight(source, protocol)
    }

    #[inline(never)]
    fn look_straight(
        &mut self,
        source: Endpoint,
        protocol: ProtocolId,
    ) -> Option<(&'a dyn Protocol, Flow, u16)> {
        let number = usize::from(protocol.0).wrapping_sub(usize::from(wire::FIRST_USER));
        let peer = self.state.peers.get(self.state.shape.index(source))?.as_ref()?;
        let IncomingState::Resolved { local, flow, whole: true, .. } = peer.incoming.get(number)? else {
            return None;
        };
        let handler = self.handlers.get(local.index())?;
        // What takes credit is counted on the way of packets.
        if *flow == Flow::Credited || !peer.takes_words() || self.state.closed {
            return None;
        }
        let (local, flow, life) = (local.index(), *flow, peer.life);
        let interruptions = self.state.interruptions;
        self.state.straight = Straight { source, protocol, life, flow, local, interruptions };
        Some((&**handler, flow, life))
    }

    /// The answer to a request, which is one word.
    #[inline(never)]
    fn word_reply(&mut self, word: &ArrivedWord) -> Verdict {
        let source = word.source;
        let index = self.state.shape.index(source);
        if let Some(ticket) = Ticket::from_word(word.cookie)
            && !self.state.closed
            && !self.state.is_cut_off(index)
        {
            if tracing::enabled!(tracing::Level::TRACE) {
                tracing::trace!(rank = %self.state.me, peer = %source, bytes = 8, "reply received");
            }
            let value = Value::word(u64::from_ne_bytes(word.payload));
            self.state.end_request(index, source.rank, ticket, Ok(value));
        }
        Verdict::Taken
    }
}

/// What is known about the protocol of a packet.
pub(super) enum Resolution {
    Local(ProtocolId, Flow),
    Hold,
    Refused(Fault),
    Corrupt,
}

impl Scope<'_> {
    /// See [`State::interruptions`].
    #[inline]
    pub(crate) fn interruptions(&self) -> u64 {
        self.state.interruptions
    }

    #[inline]
    pub(super) fn resolve(&mut self, index: usize, protocol: ProtocolId) -> Resolution {
        let number = usize::from(protocol.0 - wire::FIRST_USER);
        match self.state.peer(index).incoming.get(number) {
            Some(IncomingState::Resolved { local, flow, .. }) => Resolution::Local(*local, *flow),
            Some(IncomingState::Refused(why, _)) => Resolution::Refused(*why),
            Some(IncomingState::Declared { .. }) => self.look_up(index, number),
            Some(IncomingState::Unknown) | None => Resolution::Corrupt,
        }
    }

    /// A declared protocol is looked up by its name when its first message arrives.
    #[cold]
    fn look_up(&mut self, index: usize, number: usize) -> Resolution {
        let IncomingState::Declared { name, schema, flow } = &self.state.peer(index).incoming[number] else {
            return Resolution::Corrupt;
        };
        let (name, schema, flow) = (name.clone(), *schema, *flow);
        let mut whole = false;
        let resolution = match self.state.registry.find(&name) {
            None if self.state.ready => {
                tracing::warn!(name, "a peer sends to a name that is not registered here");
                Resolution::Refused(Fault::NoSuchProtocol(self.state.me.rank))
            }
            None => return Resolution::Hold,
            Some((local, protocol)) => {
                if protocol.schema() != schema || Flow::from_byte(flow) != Some(protocol.flow()) {
                    tracing::warn!(name, "a peer sends this protocol with another message type");
                    Resolution::Refused(Fault::SchemaMismatch(self.state.me.rank))
                } else {
                    whole = !protocol.chooses_buffer();
                    Resolution::Local(local, protocol.flow())
                }
            }
        };
        self.state.peer(index).incoming[number] = match resolution {
            Resolution::Local(local, flow) => {
                IncomingState::Resolved { local, flow, whole, messages: 0, bytes: 0, held: Held::default() }
            }
            Resolution::Refused(why) => IncomingState::Refused(why, false),
            Resolution::Hold | Resolution::Corrupt => return resolution,
        };
        resolution
    }

    pub(super) fn refuse(&mut self, index: usize, protocol: ProtocolId, cookie: u64, why: Fault) {
        let number = protocol.0.saturating_sub(wire::FIRST_USER);
        if let Some(IncomingState::Refused(_, told)) =
            self.state.peer(index).incoming.get_mut(usize::from(number))
            && std::mem::replace(told, true)
            && Ticket::from_word(cookie).is_none()
        {
            // It knows, or will: once is enough for what waits for no answer.
            return;
        }
        let body = wire::Refuse { index: number.into(), code: wire::code_of(why).into() };
        if let Err(fault) = self.system(index, wire::REFUSE, cookie, body.as_bytes()) {
            tracing::debug!(%fault, "refusal not sent");
        }
    }

    /// The span in which a message is handled, with an event for the packet; nothing unless tracing is at that level.
    #[inline]
    fn traced(&self, message: &Incoming<'_>) -> Option<tracing::span::EnteredSpan> {
        if !tracing::enabled!(tracing::Level::TRACE) {
            return None;
        }
        let (rank, peer, protocol) = (self.state.me, message.source, message.protocol);
        let span = tracing::trace_span!("message", %rank, %peer, %protocol).entered();
        tracing::trace!(bytes = message.body.len(), info = message.info.len(), "packet received");
        Some(span)
    }

    fn dispatch(&mut self, protocol: &dyn Protocol, message: Incoming<'_>, flow: Flow, asks_where: bool) {
        let asks = message.cookie != 0 && protocol.takes_requests();
        if asks && self.is_asked_too_much(protocol, &message, flow) {
            return;
        }
        let _span = self.traced(&message);
        let arrived = Arrived {
            source: message.source,
            protocol: message.protocol,
            life: message.life,
            cookie: message.cookie,
            flow,
            bytes: message.body.len() as u64,
        };
        self.state.stats.received(arrived.bytes);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            if asks_where && protocol.chooses_buffer() {
                self.first_packet(protocol, message);
            } else {
                protocol.on_message(self, message);
            }
        }));
        if outcome.is_err() {
            self.panicked(&arrived);
        }
    }

    /// Too many answers wait for who asks: it is told so instead of one more.
    fn is_asked_too_much(&mut self, protocol: &dyn Protocol, message: &Incoming<'_>, flow: Flow) -> bool {
        let index = self.state.shape.index(message.source);
        let busy = self.state.peer(index).asks_too_much && protocol.may_be_refused(message);
        if busy {
            let to = ReplyTo::new(message.source, message.life, message.cookie);
            self.reply(to, Err(Fault::Busy(self.state.me.rank)));
            if flow == Flow::Credited {
                self.consumed(message.credit());
            }
        }
        busy
    }

    /// The handler of a protocol that was registered a moment ago, or of a message that has landed.
    #[cold]
    pub(super) fn dispatch_late(&mut self, message: Incoming<'_>, local: ProtocolId, flow: Flow) {
        // Protocols are never taken out of the registry.
        if let Some(protocol) = self.state.registry.get(local) {
            self.dispatch(&*protocol, message, flow, true);
        }
    }

    /// The handler of a streamed message that is whole: it was asked before where that goes, and said nowhere else.
    pub(super) fn dispatch_whole(&mut self, message: Incoming<'_>, local: ProtocolId, flow: Flow) {
        if let Some(protocol) = self.state.registry.get(local) {
            self.dispatch(&*protocol, message, flow, false);
        }
    }

    #[cold]
    pub(super) fn panicked(&mut self, arrived: &Arrived) {
        self.state.stats.panics += 1;
        let me = self.state.me.rank;
        let handler = self.handler_of(arrived.source, arrived.protocol);
        let name = handler.as_ref().map(|handler| handler.name());
        tracing::error!(name, source = %arrived.source, "a message handler panicked");
        if arrived.cookie != 0 && handler.is_none_or(|handler| handler.takes_requests()) {
            let to = ReplyTo::new(arrived.source, arrived.life, arrived.cookie);
            self.reply(to, Err(Fault::RemotePanicked(me)));
        }
        if arrived.flow == Flow::Credited {
            let Arrived { source: endpoint, protocol, life, bytes, .. } = *arrived;
            self.consumed(Credit { endpoint, protocol, life, bytes });
        }
    }

    /// What a peer's protocol means here.
    fn handler_of(&self, source: Endpoint, protocol: ProtocolId) -> Option<Arc<dyn Protocol>> {
        let number = usize::from(protocol.0.wrapping_sub(wire::FIRST_USER));
        let peer = self.state.peers[self.state.shape.index(source)].as_ref();
        match peer.and_then(|peer| peer.incoming.get(number)) {
            Some(IncomingState::Resolved { local, .. }) => self.state.registry.get(*local),
            _ => None,
        }
    }

    /// A message that is whole already goes through the first-packet handler, too.
    fn first_packet(&mut self, protocol: &dyn Protocol, message: Incoming<'_>) {
        let total = message.body.len() as u64;
        let first = FirstPacket { source: message.source, info: message.info, total };
        let credit = message.credit();
        match protocol.accept(self, &first) {
            Accept::Whole => return protocol.on_message(self, message),
            Accept::Discard => {}
            Accept::Fill { mut buffer, limit, done } => {
                append(&mut buffer, &message.body, limit);
                done(self, buffer);
            }
        }
        if protocol.flow() == Flow::Credited {
            self.consumed(credit);
        }
    }

    /// The answer to a request. A cookie that names nothing is an answer that came too late.
    #[inline]
    pub(super) fn answered(&mut self, index: usize, rank: Rank, cookie: u64, body: Body<'_>) {
        let Some(ticket) = Ticket::from_word(cookie) else { return };
        if tracing::enabled!(tracing::Level::TRACE) {
            let peer = self.state.shape.endpoint(index);
            tracing::trace!(rank = %self.state.me, %peer, bytes = body.len(), "reply received");
        }
        let value = match body {
            Body::Short(bytes) => Value::copy(bytes),
            long => Value::Bytes(long.to_bytes()),
        };
        self.state.end_request(index, rank, ticket, Ok(value));
    }
}

impl State {
    /// A request to the peer has ended; the credit that it took comes back.
    #[inline]
    pub(super) fn end_request(&mut self, index: usize, rank: Rank, ticket: Ticket, outcome: Outcome) {
        if let Some(note) = self.completer.complete_from(rank, ticket, outcome)
            && let Some(number) = (note >> 40).checked_sub(1)
        {
            self.request_answered(index, number as usize, note & ((1 << 40) - 1));
        }
    }
}
