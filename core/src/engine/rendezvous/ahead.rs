//! Places for messages that have not asked yet.
//!
//! The receiver keeps at most [`MOST`] per peer, all of them together within a bound. Each request uses up the oldest that was
//! given before it came, as its place or, if it does not fit, nobody's: both sides see which one that is, because neither what
//! one says nor what the other does overtakes.

use super::{Landing, Stage};
use crate::device::{RemoteMemory, Stop, Verdict};
use crate::engine::dispatch::Resolution;
use crate::engine::peer::{Assembly, Peer};
use crate::engine::send::owned_info;
use crate::engine::{Scope, State};
use crate::ids::ProtocolId;
use crate::protocol::Accept;
use crate::wire;
use zerocopy::{FromBytes, IntoBytes};

/// Places that a peer has at a time for messages that have not asked. With the second, neither side waits for the other where
/// one is slower this time and the other the next.
const MOST: usize = 2;
/// Up to this many bytes; of longer ones one place is ahead.
const SHORT: u64 = 2 << 20;

/// A place of the peer's, for one of the next messages to it.
#[derive(Debug)]
pub(super) struct Promised {
    memory: RemoteMemory,
    /// By this side's number, as it travels.
    protocol: ProtocolId,
}

impl Promised {
    /// Whether a message goes there. The peer decides the same by [`Given::fits`].
    pub fn fits(&self, protocol: ProtocolId, len: u64) -> bool {
        protocol == self.protocol && len <= self.memory.len
    }
}

/// A place of this rank's, for one of the next messages of the peer.
#[derive(Debug)]
pub(super) struct Given {
    pub landing: Landing,
    /// By the peer's number.
    protocol: ProtocolId,
}

impl Given {
    /// Whether the peer puts such a message there.
    pub fn fits(&self, protocol: ProtocolId, len: u64) -> bool {
        protocol == self.protocol && len <= self.landing.slice.len() as u64
    }

    /// The peer puts nothing there any more: it has asked for something else.
    pub fn take_back(mut self) {
        self.landing.settle();
    }
}

impl Assembly {
    /// A message that comes in one piece.
    pub(super) fn landing(begin: &wire::StreamBegin, info: &[u8], landing: Landing) -> Assembly {
        Assembly {
            protocol: ProtocolId(begin.protocol.get()),
            cookie: begin.cookie.get(),
            info: owned_info(info),
            total: begin.total.get(),
            received: 0,
            into: Accept::Whole,
            whole: Vec::new(),
            landing: Some(landing),
            refuse: None,
            settled: false,
            aside: false,
        }
    }
}

impl State {
    /// A place of the peer's. `None`: it cannot have it.
    pub(super) fn place_at(&self, index: usize, offset: u64, len: u64) -> Option<RemoteMemory> {
        let rank = self.shape.endpoint(index).rank;
        offset.checked_add(len)?;
        let mappable = self.routes.of(rank).mappable;
        let mapped = if mappable { Some(self.memory.map(rank, offset, len)?) } else { None };
        let incarnation = self.incarnation_of(rank);
        Some(RemoteMemory { rank, offset, len, mapped, incarnation })
    }
}

impl Scope<'_> {
    /// The message at the head of the FIFO, which has asked, goes to the promised place.
    pub(super) fn start_ahead(&mut self, index: usize, promised: Promised) -> usize {
        let key = self.state.table.remote.insert(promised.memory);
        self.state.stats.rendezvous_ahead += 1;
        self.state.peer(index).rendezvous().stage = Stage::Cleared { key, sent: 0 };
        crate::failpoint!("rendezvous.ahead");
        key
    }

    /// The peer has a place for one of the next messages. `None`: it cannot have it, or has given as many as it may.
    pub(super) fn promised(&mut self, index: usize, bytes: &[u8]) -> Option<Verdict> {
        let clear = wire::ClearAhead::read_from_bytes(bytes).ok()?;
        let peer = self.state.peers[index].as_ref().filter(|peer| peer.fault.is_none());
        let Some(Peer { rendezvous, .. }) = peer.map(|peer| &**peer) else { return Some(Verdict::Taken) };
        let rendezvous = rendezvous.as_ref()?;
        if rendezvous.promised.len() >= MOST {
            return None;
        }
        let stage = rendezvous.stage;
        let memory = self.state.place_at(index, clear.place.get(), clear.len.get())?;
        let promised = Promised { memory, protocol: ProtocolId(clear.protocol.get()) };
        let rendezvous = self.state.peer(index).rendezvous();
        match stage {
            Stage::Asked { used: false, len, protocol } if promised.fits(protocol, len) => {
                self.start_ahead(index, promised);
                self.state.peer(index).stuck = false;
                self.state.mark_busy(index);
            }
            // The request will be answered, and has told the peer that nothing goes there.
            Stage::Asked { used: false, len, protocol } => {
                rendezvous.stage = Stage::Asked { used: true, len, protocol };
            }
            _ => rendezvous.promised.push_back(promised),
        }
        Some(Verdict::Taken)
    }

    /// Gives the peer places for the next messages, as far as there are any.
    pub(super) fn give_ahead(&mut self, index: usize, protocol: ProtocolId, len: u64) {
        let most = if len <= SHORT { MOST } else { 1 };
        while self.state.peer(index).rendezvous().given.len() < most {
            let Some(mut landing) = self.state.take_landing_ahead(index, len) else { return };
            let clear = wire::ClearAhead {
                place: landing.place.into(),
                len: len.into(),
                protocol: protocol.0.into(),
                reserved: [0; 6],
            };
            if self.aside_of_queue(index, wire::CLEAR_TO_SEND, 0, &[], clear.as_bytes()) != Stop::Done {
                // The peer has not heard of it, and will ask.
                return landing.settle();
            }
            self.state.peer(index).rendezvous().given.push_back(Given { landing, protocol });
            crate::failpoint!("rendezvous.given");
        }
    }

    /// The peer puts a message to the place that it was given. `None`: it cannot have it.
    pub(super) fn asked_ahead(
        &mut self,
        index: usize,
        given: Given,
        begin: &wire::StreamBegin,
        info: &[u8],
    ) -> Option<Verdict> {
        // Its last message was of the same protocol.
        let Resolution::Local(local, _) = self.resolve(index, given.protocol) else { return None };
        let aside = self.state.peer(index).has_aside() && !self.state.overtakes(local);
        // Of a sender that has ended nothing more comes: it is set aside when it is there.
        if aside && !self.state.peer(index).ends {
            self.state.peer(index).rendezvous().given.push_front(given);
            return Some(Verdict::Hold);
        }
        let landing = given.landing.claim(begin.total.get())?;
        self.state.peer(index).assembly = Some(Assembly { aside, ..Assembly::landing(begin, info, landing) });
        Some(Verdict::Taken)
    }
}
