//! Messages that came before their protocol was registered.
//!
//! They are set aside, in order and up to a limit per peer, so that what must not wait for them gets past: collective
//! operations, without which a rank might never get as far as to register, and answers. Beyond the limit the device
//! keeps them, and everything behind them, in the lane.

use super::dispatch::Resolution;
use super::peer::Peer;
use super::send::owned_info;
use super::{Payload, Scope, State};
use crate::descriptor::Info;
use crate::device::{Body, Kept, Packet, Verdict};
use crate::ids::ProtocolId;
use crate::memory::Source;
use crate::protocol::ReplyTo;
use crate::wire;
use std::collections::VecDeque;

/// Most bytes that are set aside for one peer; what a packet counts for is said at [`cost`].
const LIMIT: usize = 1 << 20;

/// What waits of one peer. Never empty while the peer has it.
#[derive(Default)]
pub(crate) struct Aside {
    packets: VecDeque<Parked>,
    bytes: usize,
    /// The user was told that no more fits.
    full: bool,
}

struct Parked {
    protocol: ProtocolId,
    kind: u8,
    cookie: u64,
    info: Info,
    body: Kept,
}

impl Parked {
    fn bytes(&self) -> usize {
        size_of::<Parked>() + cost(&self.body.source())
    }
}

/// What a payload counts for: a page is the sender's memory, but there are not many of them; a long payload is here already,
/// and with one of those there is to be room for short ones.
fn cost(source: &Source<'_>) -> usize {
    match source {
        Source::Shared(page) => page.len().min(LIMIT / 16),
        Source::Private(bytes) => bytes.len().min(LIMIT / 2),
    }
}

impl Peer {
    #[inline]
    pub fn has_aside(&self) -> bool {
        self.aside.is_some()
    }

    /// Whether messages of a known protocol go straight to its handler.
    #[inline]
    pub fn takes_words(&self) -> bool {
        !self.has_aside() && self.fault.is_none() && !self.asks_too_much
    }
}

impl Scope<'_> {
    /// A packet of a peer that has packets set aside: it waits behind them unless it may overtake.
    #[cold]
    pub(super) fn behind_others(&mut self, index: usize, packet: &mut Packet<'_>) -> Verdict {
        match self.resolve(index, packet.protocol) {
            Resolution::Local(local, flow) if self.state.overtakes(local) => {
                let mut message = packet.take();
                message.life = self.state.peer(index).life;
                if self.holds_one_more(index, message.protocol, flow, message.body.len() as u64) {
                    self.dispatch_late(message, local, flow);
                }
                Verdict::Taken
            }
            Resolution::Corrupt => {
                self.cut_off(packet.source.rank);
                Verdict::Taken
            }
            _ => self.set_aside(index, packet),
        }
    }

    /// Sets a packet aside, or leaves it with the device if there is no room.
    #[cold]
    pub(super) fn set_aside(&mut self, index: usize, packet: &mut Packet<'_>) -> Verdict {
        let peer = self.state.peer(index);
        let bytes = size_of::<Parked>() + cost(&packet.body.source());
        // The first one always fits, and of a sender that has ended nothing more comes than what the device has already.
        let is_bounded = !peer.ends;
        if let Some(aside) = &mut peer.aside
            && is_bounded
            && aside.bytes + bytes > LIMIT
        {
            if !std::mem::replace(&mut aside.full, true) {
                let source = packet.source;
                tracing::warn!(
                    %source,
                    "more than {LIMIT} bytes came for names that are not registered here; everything behind them, \
                     collective operations too, waits until they are, or until this rank is ready"
                );
            }
            return Verdict::Hold;
        }
        let body = std::mem::replace(&mut packet.body, Body::Short(&[])).keep();
        let first = peer.aside.is_none();
        let aside = peer.aside.get_or_insert_default();
        aside.bytes += bytes;
        aside.packets.push_back(Parked {
            protocol: packet.protocol,
            kind: packet.kind,
            cookie: packet.cookie,
            info: owned_info(packet.info),
            body,
        });
        if first && !peer.has_unknown_controls() {
            self.state.aside.push(index);
        }
        self.state.interruptions += 1;
        Verdict::Taken
    }

    /// Dispatches what was set aside, as far as its protocols are known by now. Returns the number of packets.
    #[cold]
    pub(super) fn retry_aside(&mut self) -> usize {
        let now = (self.state.registry.version(), self.state.controls.version(), self.state.ready);
        if self.state.aside_seen == Some(now) {
            return 0;
        }
        self.state.aside_seen = Some(now);
        let mut taken = 0;
        for index in std::mem::take(&mut self.state.aside) {
            while let Some(parked) = self.next_aside(index) {
                taken += 1;
                let source = self.state.shape.endpoint(index);
                let Parked { protocol, kind, cookie, info, body } = parked;
                if protocol.0 == wire::FLUSH {
                    let life = self.state.peer(index).life;
                    self.reply(ReplyTo::new(source, life, cookie), Ok(Payload::Borrowed(&[])));
                    continue;
                }
                match self.resolve(index, protocol) {
                    Resolution::Local(local, flow) => body.lend(|body| {
                        let info = info.as_bytes();
                        let mut packet = Packet { source, protocol, kind, cookie, info, body };
                        let mut message = packet.take();
                        message.life = self.state.peer(index).life;
                        if self.holds_one_more(index, protocol, flow, message.body.len() as u64) {
                            self.dispatch_late(message, local, flow);
                        }
                    }),
                    Resolution::Refused(why) => self.refuse(index, protocol, cookie, why),
                    // `next_aside` has looked.
                    Resolution::Hold | Resolution::Corrupt => {}
                }
            }
            taken += self.retry_controls(index);
            let peer = self.state.peer(index);
            if peer.has_aside() || peer.has_unknown_controls() {
                self.state.aside.push(index);
            }
        }
        taken
    }

    /// The first packet of a peer that need not wait any longer.
    fn next_aside(&mut self, index: usize) -> Option<Parked> {
        let protocol = self.state.peer(index).aside.as_ref()?.packets.front()?.protocol;
        if protocol.0 >= wire::FIRST_USER && matches!(self.resolve(index, protocol), Resolution::Hold) {
            return None;
        }
        let peer = self.state.peer(index);
        let aside = peer.aside.as_mut()?;
        let parked = aside.packets.pop_front()?;
        aside.bytes -= parked.bytes();
        if aside.packets.is_empty() {
            peer.aside = None;
        }
        Some(parked)
    }
}

impl State {
    /// Whether messages of the protocol may overtake what was set aside.
    pub(super) fn overtakes(&self, local: ProtocolId) -> bool {
        self.registry.get(local).is_some_and(|protocol| protocol.overtakes_held())
    }

    /// A peer that died or broke the rules: what it sent to nobody yet is dropped with its lane.
    pub(super) fn drop_aside(&mut self, index: usize) {
        if let Some(peer) = self.peers[index].as_mut()
            && peer.aside.take().is_some()
        {
            self.aside.retain(|other| *other != index);
        }
    }
}
