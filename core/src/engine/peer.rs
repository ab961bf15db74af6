//! What a context knows about one endpoint it talks to. Made at the first contact.

use super::kept::Kept;
use crate::descriptor::Info;
use crate::error::Fault;
use crate::fifo::InjectionFifo;
use crate::ids::{Endpoint, ProtocolId};
use crate::protocol::{Accept, Flow};
use crate::row::Row;
use crate::slot::{Completer, Ticket};

/// State towards and from one endpoint.
pub(crate) struct Peer {
    pub endpoint: Endpoint,
    /// Protocols by their numbers, as bits: in these a packet that needs no admission was seen to have a clear way, and nothing
    /// has come into it since ([`has_way`](Self::has_way)).
    ways: u64,
    /// Set once, by [`end`](Self::end); another incarnation of the rank gets a state of its own.
    pub fault: Option<Fault>,
    /// The low bits of the rank's incarnation.
    pub life: u16,
    /// In `State::busy`.
    pub busy: bool,
    pub fifo: Option<Box<InjectionFifo>>,
    /// Puts and gets in the FIFO, which hold the gate.
    pub queued_rma: u32,
    /// Answers in the FIFO, and the bytes of those that are kept outside it.
    pub answers: u32,
    pub answer_bytes: u64,
    /// So many of them that further requests are not carried out.
    pub asks_too_much: bool,
    /// Messages that wait for room in the FIFO, in order. Where that is empty, so is this.
    pub room_waiters: Row<Place>,
    /// By this side's protocol numbers.
    pub outgoing: Vec<Outgoing>,
    /// This side's protocols of which the peer is to be told that somebody waits for credit.
    pub asks: Vec<u16>,
    /// The peer's protocols in which it waits for credit.
    pub wanted: Vec<u16>,
    /// Its connection has ended: what it has sent is set aside whatever its length.
    pub ends: bool,
    /// By the peer's protocol numbers.
    pub incoming: Vec<Incoming>,
    /// The message that is arriving in fragments.
    pub assembly: Option<Assembly>,
    /// Something was sent since the last flush was asked for.
    pub unflushed: bool,
    /// The last flush that was asked for.
    pub flush: Option<Ticket>,
    /// What came for protocols that are not registered yet.
    pub aside: Option<Box<super::aside::Aside>>,
    /// Puts and gets that go over sends, both ways.
    pub over: Option<Box<super::oversend::OverSend>>,
    /// Messages that go straight to their places, both ways.
    pub rendezvous: Option<Box<super::rendezvous::Rendezvous>>,
    /// Controls that wait, both ways.
    pub controls: Option<Box<super::control::PeerControls>>,
    /// What is at the head of the FIFO waits for the peer, and not for room.
    pub stuck: bool,
    /// Runs of replays that wait for credit before they take their place in the FIFO, by the way that they go.
    pub parked: Vec<super::pattern::Line>,
    /// The extra FIFO that is in the middle of what cannot be mixed.
    pub turn: Option<usize>,
    /// The peer's own FIFO is.
    pub is_in_the_middle: bool,
    /// What was amid that is given up, as this side leaves: the peer waits for the rest of it, and would take another long message
    /// for a breach. What is short goes out as ever.
    pub torn: bool,
}

/// A protocol in which this side sends to the peer.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub declared: bool,
    /// What the peer's FIFO has let out, in slots, once the declaration is out.
    pub announced: u64,
    /// Declared, not refused and without credits: the fast path may go ahead.
    pub open: bool,
    pub flow: Flow,
    pub credits: u32,
    pub bytes: i64,
    pub refused: Option<Fault>,
    pub waiters: Row<Waiter>,
    /// A run of a replay was given this credit, and is about to be looked at: those behind it are let in afterwards. If it waits
    /// for the credit of another protocol still, they go before it.
    pub a_run_is_next: bool,
}

/// Somebody who waits for the credit of a message, or of all that a run of a replay has.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub ticket: Ticket,
    pub messages: u32,
    pub bytes: u64,
    /// The message; a run of a replay has none here.
    pub kept: Option<Box<Kept>>,
}

/// A message that waits for room in a queue.
#[derive(Debug)]
pub(crate) struct Place {
    pub ticket: Ticket,
    pub kept: Box<Kept>,
}

impl Outgoing {
    /// Whether a message of a protocol that takes credit in this way could go out now without further ado.
    #[inline]
    pub fn admits(&self, flow: Flow) -> bool {
        self.declared
            && self.flow == flow
            && self.credits > 0
            && self.bytes > 0
            && self.refused.is_none()
            && self.waiters.is_empty()
            && !self.a_run_is_next
    }
}

/// A protocol in which the peer sends.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// The peer uses numbers without gaps in any order; this one was not declared.
    Unknown,
    /// Declared; not looked up yet.
    Declared { name: String, schema: u64, flow: u8 },
    /// This side's number, whether its handler takes messages whole, and the credit that is owed.
    Resolved { local: ProtocolId, flow: Flow, whole: bool, messages: u32, bytes: u64, held: Held },
    /// Refused for good, for this reason, and whether the peer was told.
    Refused(Fault, bool),
}

/// Messages of a credited protocol that were handed to its handler and are not consumed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub messages: u32,
    pub bytes: u64,
}

/// A message that arrives in fragments.
pub(crate) struct Assembly {
    pub protocol: ProtocolId,
    pub cookie: u64,
    pub info: Info,
    pub total: u64,
    pub received: u64,
    pub into: Accept,
    pub whole: Vec<u8>,
    /// Where the message goes that comes in no fragments.
    pub landing: Option<super::rendezvous::Landing>,
    pub refuse: Option<Fault>,
    /// Its handler panicked at the first packet: it was answered and its credit given back.
    pub settled: bool,
    /// Its protocol is not for now: it is set aside when it is whole.
    pub aside: bool,
}

impl Peer {
    pub fn new(endpoint: Endpoint, incarnation: u32) -> Self {
        Self {
            endpoint,
            ways: 0,
            fault: None,
            life: incarnation as u16,
            busy: false,
            fifo: None,
            queued_rma: 0,
            answers: 0,
            answer_bytes: 0,
            asks_too_much: false,
            room_waiters: Row::default(),
            outgoing: Vec::new(),
            asks: Vec::new(),
            wanted: Vec::new(),
            ends: false,
            incoming: Vec::new(),
            assembly: None,
            unflushed: false,
            flush: None,
            aside: None,
            over: None,
            rendezvous: None,
            controls: None,
            stuck: false,
            parked: Vec::new(),
            turn: None,
            is_in_the_middle: false,
            torn: false,
        }
    }

    /// Whether messages of the protocol need no admission: it is declared, not refused and without credits.
    #[inline]
    pub fn is_open(&self, protocol: ProtocolId) -> bool {
        self.outgoing.get(protocol.index()).is_some_and(|out| out.open)
    }

    /// Whether nothing stands in the way of a packet: the peer is alive, and nothing waits for it.
    #[inline]
    pub fn is_clear(&self) -> bool {
        self.fault.is_none() && self.queue_is_empty()
    }

    /// Whether a packet of the protocol can be handed to the device now: nothing stands in its way, and it needs no admission.
    #[inline(always)]
    pub fn has_way(&mut self, protocol: ProtocolId) -> bool {
        let bit = 1u64.checked_shl(u32::from(protocol.0)).unwrap_or(0);
        if self.ways & bit != 0 {
            debug_assert!(
                self.is_clear() && self.is_open(protocol),
                "the way to {} is not clear",
                self.endpoint
            );
            return true;
        }
        self.look_for_way(protocol, bit)
    }

    #[inline(never)]
    fn look_for_way(&mut self, protocol: ProtocolId, bit: u64) -> bool {
        let has = self.is_clear() && self.is_open(protocol);
        if has {
            self.ways |= bit;
        }
        has
    }

    /// Something may have come into the way of packets.
    #[inline]
    pub fn forget_ways(&mut self) {
        self.ways = 0;
    }

    /// No message of that protocol goes there without admission any more.
    pub fn close(&mut self, protocol: usize) {
        self.forget_ways();
        if let Some(out) = self.outgoing.get_mut(protocol) {
            out.open = false;
        }
    }

    /// Nothing is sent there any more, for this reason or an earlier one.
    pub fn end(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
        self.forget_ways();
    }

    /// Whether the peer hears of the protocol before whatever is injected now.
    pub fn is_announced(&self, protocol: ProtocolId) -> bool {
        let out = self.fifo.as_ref().map_or(u64::MAX, |fifo| fifo.head());
        self.outgoing
            .get(protocol.index())
            .is_some_and(|outgoing| outgoing.declared && outgoing.announced <= out)
    }

    #[inline]
    pub fn queue_is_empty(&self) -> bool {
        match &self.fifo {
            None => true,
            Some(fifo) => fifo.is_empty(),
        }
    }

    /// Whether the peer may have yet to handle something that was sent.
    pub fn wants_flush(&self, completer: &Completer) -> bool {
        let asked = self.flush.is_some_and(|flush| completer.is_under_way(flush));
        asked || self.unflushed || !self.queue_is_empty()
    }

    /// Slots that awaited sends may still take.
    pub fn room(&self, capacity: usize) -> usize {
        capacity.saturating_sub(self.fifo.as_ref().map_or(0, |fifo| fifo.len()))
    }

    /// Puts a descriptor at the end; the FIFO grows where it must.
    pub fn push(&mut self, descriptor: &crate::descriptor::Descriptor, info: &[u8]) {
        self.forget_ways();
        let fifo = self.fifo.get_or_insert_with(|| Box::new(InjectionFifo::new(16)));
        if !fifo.push(descriptor, info) {
            fifo.grow();
            let fits = fifo.push(descriptor, info);
            debug_assert!(fits, "a FIFO of twice the size has room");
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::descriptor::Descriptor;
    use crate::ids::{ContextId, Rank};

    const PROTOCOL: ProtocolId = ProtocolId(1);

    /// A peer to whom the way is clear in two protocols, one of which has a number that is not remembered.
    fn peer() -> Peer {
        let mut peer = Peer::new(Endpoint::new(Rank(1), ContextId(0)), 0);
        let open = |open| Outgoing {
            declared: true,
            announced: 0,
            open,
            flow: Flow::Inline,
            credits: 0,
            bytes: 0,
            refused: None,
            waiters: Row::default(),
            a_run_is_next: false,
        };
        peer.outgoing.extend([false, true, false].map(open));
        peer.outgoing.resize_with(65, || open(true));
        assert!(peer.has_way(PROTOCOL) && peer.has_way(PROTOCOL) && peer.has_way(ProtocolId(64)));
        assert!(
            !peer.has_way(ProtocolId(0)) && !peer.has_way(ProtocolId(2)) && !peer.has_way(ProtocolId(65))
        );
        peer
    }

    #[test]
    fn a_way_is_clear_until_something_waits_and_again_once_that_is_gone() {
        let mut peer = peer();
        peer.push(&Descriptor::default(), &[]);
        assert!(!peer.has_way(PROTOCOL) && !peer.has_way(ProtocolId(64)));
        assert!(peer.fifo.as_mut().and_then(|fifo| fifo.pop()).is_some());
        assert!(peer.has_way(PROTOCOL) && peer.has_way(ProtocolId(64)));
    }

    #[test]
    fn no_way_leads_to_a_peer_that_is_gone_and_none_is_open_that_was_closed() {
        let mut gone = peer();
        gone.end(Fault::PeerClosed(Rank(1)));
        gone.end(Fault::Shutdown);
        assert!(!gone.has_way(PROTOCOL) && gone.fault == Some(Fault::PeerClosed(Rank(1))));
        let mut closed = peer();
        closed.close(PROTOCOL.index());
        assert!(!closed.has_way(PROTOCOL) && closed.has_way(ProtocolId(64)));
    }
}
