//! Messages that go straight to their places (D11).
//!
//! ```text
//!   sender                                              receiver
//!   at the head of the FIFO --REQUEST_TO_SEND---------> takes memory of its own, a landing
//!   injects a put of the message <-----CLEAR_TO_SEND--- "there", past everything that is queued
//!   ========================= the device moves it ====> the landing
//!   the next descriptor ------SENT--------------------> the handler, with a lease on the landing
//! ```
//! The clearance is a remote get (D32): a small message that makes the far side inject a put. Nothing gets past a message
//! at the head of its FIFO, so that the receiver has at most one landing per peer that is asked for and not whole, and order is
//! that of streams. A receiver that has no place, or whose handler wants to choose one, says so: then the message goes as a stream.
//!
//! Who receives the second such message of a protocol in a row gives places for the next ones *ahead*, before it looks at this
//! one. The next message that asks goes to the first of them without waiting for an answer if it fits; whether it does, both
//! sides see from the request and the clearance, whichever was sent first. So the next message is put while the handler has
//! this one, also by a sender that awaits each.
//!
//! The clearance waits in no FIFO but has a place of its own with the peer, reserved when the request came: two ranks that
//! send to each other cannot wait for each other.

mod ahead;
mod landing;

pub(crate) use landing::{LANDINGS, Landing, Landings};

use super::dispatch::Resolution;
use super::peer::{Assembly, Peer};
use super::{Scope, State};
use crate::descriptor::{Descriptor, MAX_INFO, Op, SourceKind};
use crate::device::{Sources, Stop, Verdict};
use crate::error::Fault;
use crate::ids::ProtocolId;
use crate::protocol::Incoming;
use crate::slot::{Outcome, Value};
use crate::wire;
use ahead::{Given, Promised};
use std::collections::VecDeque;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes that are put before others have their turn.
const AT_A_TIME: u64 = 8 << 20;

/// Messages between this endpoint and one other that go straight to their places.
#[derive(Debug, Default)]
pub(crate) struct Rendezvous {
    /// How far the message at the head of the FIFO is.
    stage: Stage,
    /// What the peer is to be told: a place, or that there is none.
    clearance: Option<Option<u64>>,
    /// Parts were put since somebody counted.
    moved: usize,
    /// Where the next messages go if they fit, the next first.
    promised: VecDeque<Promised>,
    /// The same at the receiver's.
    given: VecDeque<Given>,
    /// The protocol of the last message that has landed.
    landed: Option<ProtocolId>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    /// Nothing was asked.
    #[default]
    Idle,
    /// The peer was asked for a place for so many bytes of a protocol. `used`: a place that was given before has been used
    /// up by that, into which the message does not fit.
    Asked { len: u64, protocol: ProtocolId, used: bool },
    /// The peer's memory under that key is the place, and so many bytes were put there.
    Cleared { key: usize, sent: u64 },
    /// There is none.
    Streamed,
}

impl Peer {
    /// Whether the peer waits for a place.
    pub fn owes_clearance(&self) -> bool {
        self.rendezvous.as_ref().is_some_and(|rendezvous| rendezvous.clearance.is_some())
    }

    /// Whether a message to the peer is, or is to be, written to a place of the peer's.
    pub fn is_amid_rendezvous(&self) -> bool {
        let stage = self.rendezvous.as_ref().map(|rendezvous| &rendezvous.stage);
        matches!(stage, Some(Stage::Asked { .. } | Stage::Cleared { .. }))
    }

    fn rendezvous(&mut self) -> &mut Rendezvous {
        self.rendezvous.get_or_insert_default()
    }
}

impl State {
    /// Finds out up to which length messages go in one packet.
    pub(super) fn choose_rendezvous(&mut self) {
        let shortest = self.shortest_rendezvous(&self.caps);
        self.eager = self.caps.max_eager.min(usize::try_from(shortest - 1).unwrap_or(usize::MAX));
    }

    fn shortest_rendezvous(&self, caps: &crate::caps::Caps) -> u64 {
        self.config.rendezvous_bytes.unwrap_or(caps.rendezvous as u64).max(64)
    }

    /// Nothing more is put to the peer's places. It may still put to those that it was given here.
    pub(super) fn drop_own_rendezvous(&mut self, index: usize) {
        let Some(rendezvous) = self.peers[index].as_mut().and_then(|peer| peer.rendezvous.as_mut()) else {
            return;
        };
        rendezvous.promised.clear();
        if let Stage::Cleared { key, .. } = std::mem::take(&mut rendezvous.stage) {
            self.table.remote.try_remove(key);
        }
    }

    /// The peer is gone.
    pub(super) fn drop_rendezvous(&mut self, index: usize, fault: Fault) {
        let Some(peer) = self.peers[index].as_mut() else { return };
        // Who was cut off may be alive, and writing; so may others after this side's own end.
        let gone = !matches!(fault, Fault::PeerCorrupt(_) | Fault::Shutdown);
        if let Some(landing) = peer.assembly.as_mut().and_then(|assembly| assembly.landing.as_mut())
            && gone
        {
            landing.settle();
        }
        let rendezvous = peer.rendezvous.as_mut();
        for given in rendezvous.into_iter().flat_map(|rendezvous| &mut rendezvous.given).filter(|_| gone) {
            given.landing.settle();
        }
        self.drop_own_rendezvous(index);
        if let Some(peer) = self.peers[index].as_mut() {
            peer.rendezvous = None;
        }
    }
}

impl Scope<'_> {
    /// Goes on with a message that is longer than one packet. `None`: no room, or the peer has not answered.
    pub(super) fn step_long(&mut self, index: usize, front: Descriptor) -> Option<Option<Outcome>> {
        let caps = self.state.routes.of(front.rank);
        let straight =
            front.protocol.0 >= wire::FIRST_USER && front.len >= self.state.shortest_rendezvous(caps);
        if !straight {
            return self.step_stream(index, front);
        }
        let departed = self.state.departed;
        let peer = self.state.peer(index);
        peer.stuck = false;
        if departed && matches!(peer.rendezvous().stage, Stage::Idle) {
            // It would be written into the peer's memory. Those that had asked for a place are gone: see `depart`.
            return Some(Some(Err(Fault::Shutdown)));
        }
        let done = match peer.rendezvous().stage {
            Stage::Idle => self.ask_to_send(index, &front),
            Stage::Asked { .. } => {
                peer.stuck = true;
                None
            }
            Stage::Cleared { key, sent } => self.put_message(index, &front, key, sent),
            Stage::Streamed => self.step_stream(index, front),
        };
        if done.is_some() {
            let rendezvous = self.state.peer(index).rendezvous();
            if let Stage::Cleared { key, .. } = std::mem::take(&mut rendezvous.stage) {
                self.state.table.remote.try_remove(key);
            }
        }
        done
    }

    fn ask_to_send(&mut self, index: usize, front: &Descriptor) -> Option<Option<Outcome>> {
        let mut info = [0; MAX_INFO];
        let len = self.state.peer(index).fifo.as_ref().map_or(0, |fifo| fifo.front_info(&mut info));
        let request = wire::StreamBegin {
            total: front.len.into(),
            cookie: front.cookie.into(),
            protocol: front.protocol.0.into(),
            reserved: [0; 6],
        };
        match self.aside_of_queue(index, wire::REQUEST_TO_SEND, 0, &info[..len], request.as_bytes()) {
            Stop::Done => {}
            Stop::Full => return None,
            Stop::Fault(fault) => return Some(Some(Err(fault))),
        }
        crate::failpoint!("rendezvous.asked");
        let promised = self.state.peer(index).rendezvous().promised.pop_front();
        let used = promised.is_some();
        if let Some(promised) = promised.filter(|promised| promised.fits(front.protocol, front.len)) {
            let key = self.start_ahead(index, promised);
            return self.put_message(index, front, key, 0);
        }
        let peer = self.state.peer(index);
        peer.stuck = true;
        peer.rendezvous().stage = Stage::Asked { len: front.len, protocol: front.protocol, used };
        None
    }

    /// Puts what is left of a message to its place, and says when it is all there.
    fn put_message(
        &mut self,
        index: usize,
        front: &Descriptor,
        key: usize,
        sent: u64,
    ) -> Option<Option<Outcome>> {
        let mut now = sent;
        let mut stop = Stop::Done;
        while now < front.len && stop == Stop::Done {
            if now - sent >= AT_A_TIME {
                self.state.peer(index).rendezvous().moved += 1;
                self.state.restless = true;
                stop = Stop::Full;
                break;
            }
            stop = self.put_part(index, front, key, &mut now);
        }
        self.state.peer(index).rendezvous().stage = Stage::Cleared { key, sent: now };
        if stop == Stop::Done {
            crate::failpoint!("rendezvous.put.done");
            stop = self.aside_of_queue(index, wire::SENT, 0, &[], &[]);
        }
        match stop {
            Stop::Done => {
                self.state.stats.rendezvous += 1;
                Some(Some(Ok(Value::Unit)))
            }
            Stop::Full => None,
            Stop::Fault(fault) => Some(Some(Err(fault))),
        }
    }

    fn put_part(&mut self, index: usize, front: &Descriptor, key: usize, sent: &mut u64) -> Stop {
        let put = Descriptor {
            op: Op::Put,
            source_kind: SourceKind::Held,
            rank: front.rank,
            context: front.context,
            region: key as u32,
            source: front.source,
            ..Descriptor::default()
        };
        if self.state.goes_over_send(index) {
            self.state.peer(index).over();
            return self.put_parts(index, &Descriptor { len: front.len, ..put }, sent);
        }
        // What is mapped is copied here and now, and long copies are the fastest.
        let mapped = self.state.table.remote.get(key).is_some_and(|memory| memory.mapped.is_some());
        let most =
            if mapped { AT_A_TIME } else { (self.state.routes.of(front.rank).max_eager as u64).max(1) };
        let len = most.min(front.len - *sent);
        let part =
            Descriptor { len, offset: *sent, source: [front.source[0], front.source[1] + *sent], ..put };
        let sources = Sources::of(&self.state.table);
        let stop = self.inject.inject(std::slice::from_ref(&part), &sources).stop;
        if stop == Stop::Done {
            crate::failpoint!("rendezvous.put.part");
            *sent += len;
        }
        stop
    }

    /// The peer has answered: a place, or none. `None`: it was not asked.
    pub(super) fn cleared_to_send(&mut self, index: usize, place: &[u8]) -> Option<Verdict> {
        if place.len() == size_of::<wire::ClearAhead>() {
            return self.promised(index, place);
        }
        let peer = self.state.peers[index].as_mut().filter(|peer| peer.fault.is_none());
        let Some(peer) = peer else { return Some(Verdict::Taken) };
        let Stage::Asked { len, .. } = peer.rendezvous.as_ref()?.stage else { return None };
        let stage = if place.is_empty() {
            Stage::Streamed
        } else {
            let memory = self.state.place_at(index, u64::from_le_bytes(place.try_into().ok()?), len)?;
            Stage::Cleared { key: self.state.table.remote.insert(memory), sent: 0 }
        };
        let peer = self.state.peer(index);
        peer.rendezvous().stage = stage;
        peer.stuck = false;
        crate::failpoint!("rendezvous.cleared");
        self.state.mark_busy(index);
        Some(Verdict::Taken)
    }

    /// The peer has a message that wants a place. `None`: it cannot have.
    pub(super) fn asked_to_send(&mut self, index: usize, info: &[u8], bytes: &[u8]) -> Option<Verdict> {
        let begin = wire::StreamBegin::read_from_bytes(bytes).ok()?;
        let (protocol, total) = (ProtocolId(begin.protocol.get()), begin.total.get());
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        let begun = peer.assembly.is_some() || peer.owes_clearance();
        if begun || total > self.state.config.max_message || protocol.0 < wire::FIRST_USER {
            return None;
        }
        crate::failpoint!("rendezvous.requested");
        if let Some(given) = self.state.peer(index).rendezvous().given.pop_front() {
            if given.fits(protocol, total) {
                return self.asked_ahead(index, given, &begin, info);
            }
            given.take_back();
        }
        let landing = match self.resolve(index, protocol) {
            Resolution::Corrupt => return None,
            Resolution::Local(local, _) => {
                let behind = self.state.peer(index).has_aside() && !self.state.overtakes(local);
                let chooses = self.state.registry.get(local).is_none_or(|handler| handler.chooses_buffer());
                if behind || chooses { None } else { self.state.take_landing(index, total) }
            }
            // Streams know what becomes of it.
            Resolution::Hold | Resolution::Refused(_) => None,
        };
        let place = landing.as_ref().map(|landing| landing.place);
        let peer = self.state.peer(index);
        if let Some(landing) = landing {
            peer.assembly = Some(Assembly::landing(&begin, info, landing));
        }
        peer.rendezvous().clearance = Some(place);
        if self.pump_clearance(index) == 0 {
            self.state.mark_busy(index);
        }
        Some(Verdict::Taken)
    }

    /// Tells the peer where its message goes, if it waits for that. Returns the number of records sent, and of parts that
    /// were put meanwhile.
    pub(super) fn pump_clearance(&mut self, index: usize) -> usize {
        let peer = self.state.peers[index].as_mut().filter(|peer| peer.fault.is_none());
        let Some(rendezvous) = peer.and_then(|peer| peer.rendezvous.as_mut()) else { return 0 };
        let moved = std::mem::take(&mut rendezvous.moved);
        let Some(place) = rendezvous.clearance else { return moved };
        let bytes = place.map(u64::to_le_bytes);
        let body: &[u8] = bytes.as_ref().map_or(&[], |bytes| bytes);
        if self.aside_of_queue(index, wire::CLEAR_TO_SEND, 0, &[], body) != Stop::Done {
            return moved;
        }
        crate::failpoint!("rendezvous.granted");
        self.state.peer(index).rendezvous().clearance = None;
        moved + 1
    }

    /// A message is at its place. `None`: it had none.
    pub(super) fn landed(&mut self, index: usize) -> Option<Verdict> {
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        if peer.owes_clearance() || peer.assembly.as_ref()?.landing.is_none() {
            return None;
        }
        crate::failpoint!("rendezvous.landed");
        let Assembly { protocol, cookie, info, landing, aside, .. } = peer.assembly.take()?;
        let mut landing = landing?;
        landing.settle();
        if self.state.peer(index).rendezvous().landed.replace(protocol) == Some(protocol) {
            self.give_ahead(index, protocol, landing.slice.len() as u64);
        }
        let source = self.state.shape.endpoint(index);
        if aside {
            self.set_aside_whole(index, protocol, cookie, &info, landing.into_lease().to_bytes());
            return Some(Verdict::Taken);
        }
        if let Resolution::Local(local, flow) = self.resolve(index, protocol)
            && self.holds_one_more(index, protocol, flow, landing.slice.len() as u64)
        {
            let life = self.state.peer(index).life;
            landing.into_lease().lend(|body| {
                let message = Incoming { source, info: info.as_bytes(), body, protocol, life, cookie };
                self.dispatch_late(message, local, flow);
            });
        }
        Some(Verdict::Taken)
    }
}
