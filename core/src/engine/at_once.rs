//! What goes out at once: single packets without info, to whom nothing at all stands in the way. Whatever does sends them
//! the general way ([`send`](super::send)), which knows why.

use super::peer::Peer;
use super::send::request_note;
use super::{Scope, State};
use crate::descriptor::{Descriptor, Op, SourceKind};
use crate::device::{Loan, Sources, Stop};
use crate::ids::{ContextId, Endpoint, JobShape, ProtocolId, Rank};
use crate::protocol::{Flow, ReplyTo};
use crate::slot::Ticket;
use crate::wire;
use bytes::Bytes;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Longer payloads are looked at for whether they had better be kept: that takes longer than a copy of a shorter one.
const KEPT: usize = 4096;
/// Targets of a multicast that are handed to the device together.
const AT_ONCE: usize = 16;

/// The payload of a message that is one packet.
#[derive(Clone, Copy, Debug)]
pub enum Whole<'p> {
    /// These bytes; they are copied.
    Bytes(&'p [u8]),
    /// These; a device may keep them instead ([`Caps::keeps`](crate::Caps)).
    Owned(&'p Bytes),
    /// A loan, which is nobody's but the receiver's once it is sent.
    Loan(&'p Loan),
}

impl Scope<'_> {
    /// Sends a message of one word without info if nothing at all stands in the way: the peer is known and alive, it has
    /// heard of the protocol, nothing waits, and the device has room. Otherwise nothing was done, and
    /// [`send`](Self::send) knows why.
    #[inline]
    pub fn send_word(&mut self, target: Endpoint, protocol: ProtocolId, payload: u64) -> bool {
        let State { peers, shape, stats, .. } = &mut *self.state;
        if let Some((index, peer)) = reach(peers, *shape, target)
            && peer.has_way(protocol)
            && self.inject.word(index, Self::wire_id(protocol), 0, payload)
        {
            peer.unflushed = true;
            stats.sent(8);
            self.trace_sent(target, 8);
            return true;
        }
        false
    }

    /// An event for a packet that went out; nothing unless tracing is at that level.
    #[inline(always)]
    pub(super) fn trace_sent(&self, peer: Endpoint, bytes: u64) {
        if tracing::enabled!(tracing::Level::TRACE) {
            tracing::trace!(rank = %self.state.me, %peer, bytes, "packet sent");
        }
    }

    /// Sends any one packet without info if nothing at all stands in the way, as [`send_word`](Self::send_word) does. The
    /// payload is where `source` says: these bytes, or a loan that is the device's again if this returns true.
    #[inline]
    pub fn send_packet(&mut self, target: Endpoint, protocol: ProtocolId, source: Whole<'_>) -> bool {
        self.single_packet::<false>(target, protocol, 0, source)
    }

    /// Sends any one packet without info of a [`Flow::Credited`] protocol, and takes its credit, if there is any and nothing
    /// else stands in the way, as [`send_word`](Self::send_word) does. The cookie is the protocol's own.
    #[inline]
    pub fn send_on_credit(
        &mut self,
        target: Endpoint,
        protocol: ProtocolId,
        cookie: u64,
        source: Whole<'_>,
    ) -> bool {
        !self.state.closed && self.single_packet::<true>(target, protocol, cookie, source)
    }

    #[inline(always)]
    fn single_packet<const CREDITED: bool>(
        &mut self,
        target: Endpoint,
        protocol: ProtocolId,
        cookie: u64,
        source: Whole<'_>,
    ) -> bool {
        if let Whole::Loan(loan) = source
            && !self.state.lends(loan, target.rank)
        {
            return false;
        }
        let State { peers, shape, stats, table, eager, config, routes, .. } = &mut *self.state;
        let Some((index, peer)) = clear_way(peers, *shape, target) else { return false };
        let Some(out) = peer.outgoing.get_mut(protocol.index()) else { return false };
        if !(if CREDITED { out.admits(Flow::Credited) } else { out.open }) {
            return false;
        }
        let wire_id = Self::wire_id(protocol);
        let (source_kind, key, len, borrowed) = match source {
            Whole::Bytes(bytes) if bytes.len() <= *eager => {
                (SourceKind::Borrowed, 0, bytes.len() as u64, bytes)
            }
            Whole::Owned(bytes) if bytes.len() <= *eager => {
                (SourceKind::Borrowed, 0, bytes.len() as u64, &bytes[..])
            }
            Whole::Bytes(_) | Whole::Owned(_) => return false,
            Whole::Loan(loan) => (SourceKind::Loan, loan.key(), loan.len() as u64, &[][..]),
        };
        if len > config.max_message {
            return false;
        }
        let owned = match source {
            Whole::Owned(bytes) if bytes.len() > KEPT => {
                Some(bytes).filter(|bytes| routes.of(target.rank).keeps <= bytes.len())
            }
            _ => None,
        };
        let plain = source_kind == SourceKind::Borrowed
            && owned.is_none()
            && match <[u8; 8]>::try_from(borrowed) {
                // Those of other protocols have been looked at for that.
                Ok(word) if CREDITED => self.inject.word(index, wire_id, cookie, u64::from_ne_bytes(word)),
                _ => self.inject.plain(index, wire_id, cookie, borrowed),
            };
        if !plain {
            let descriptor = Descriptor {
                op: Op::Send,
                source_kind,
                rank: target.rank,
                context: target.context,
                protocol: wire_id,
                cookie,
                len,
                source: [key, 0],
                ..Descriptor::default()
            };
            let sources = Sources { borrowed, owned, ..Sources::of(table) };
            if self.inject.inject(std::slice::from_ref(&descriptor), &sources).stop != Stop::Done {
                return false;
            }
        }
        if CREDITED {
            out.credits -= 1;
            out.bytes -= len as i64;
        }
        peer.unflushed = true;
        stats.sent(len);
        self.trace_sent(target, len);
        true
    }

    /// Sends a message of one word without info to those of these ranks to whom nothing at all stands in the way, as
    /// [`send_word`](Self::send_word) does. The others are the first of `ranks` afterwards; returns how many.
    pub fn multicast_word(
        &mut self,
        ranks: &mut [Rank],
        context: ContextId,
        protocol: ProtocolId,
        payload: u64,
    ) -> usize {
        let shape = self.state.shape;
        let peers = self.state.peers.as_mut_slice();
        let (mut left, mut sent, mut from) = (0, 0, 0);
        let mut targets = [0; AT_ONCE];
        while from < ranks.len() {
            let until = ranks.len().min(from + AT_ONCE);
            let mut clear = 0;
            for at in from..until {
                let rank = ranks[at];
                if let Some((index, peer)) = reach(peers, shape, Endpoint::new(rank, context))
                    && peer.has_way(protocol)
                {
                    peer.unflushed = true;
                    targets[clear % AT_ONCE] = index;
                    clear += 1;
                } else {
                    ranks[left] = rank;
                    left += 1;
                }
            }
            from = until;
            let targets = &mut targets[..clear];
            let refused = self.inject.word_to_each(targets, Self::wire_id(protocol), payload);
            // As many as were clear have been looked at and are not left: there is room for those of them that are.
            for &index in &targets[..refused] {
                ranks[left] = shape.endpoint(index).rank;
                left += 1;
            }
            sent += (clear - refused) as u64;
        }
        self.state.stats.messages_sent += sent;
        self.state.stats.bytes_sent += 8 * sent;
        if tracing::enabled!(tracing::Level::TRACE) {
            tracing::trace!(rank = %self.state.me, to = ranks.len() - left, bytes = 8, "packets sent");
        }
        left
    }

    /// Sends any one packet without info to several ranks, as [`multicast_word`](Self::multicast_word) does one word; devices
    /// may make one copy of the payload for all (V03).
    pub fn multicast_packet(
        &mut self,
        ranks: &mut [Rank],
        context: ContextId,
        protocol: ProtocolId,
        source: Whole<'_>,
    ) -> usize {
        self.multicast(|scope| {
            let mut left = 0;
            for at in 0..ranks.len() {
                let rank = ranks[at];
                if !scope.send_packet(Endpoint::new(rank, context), protocol, source) {
                    ranks[left] = rank;
                    left += 1;
                }
            }
            left
        })
    }

    /// Sends, in `f`, one payload to several targets: devices may make one copy of it for all (V03). Whatever `f` sends
    /// must not change before it returns.
    pub fn multicast<R>(&mut self, f: impl FnOnce(&mut Scope<'_>) -> R) -> R {
        self.inject.multicast(true);
        // The panic goes on, and the rank as a rule, too: what is sent from then on may change.
        let result = catch_unwind(AssertUnwindSafe(|| f(self)));
        self.inject.multicast(false);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Answers a request with one word if nothing at all stands in the way. Otherwise nothing was done, and
    /// [`reply`](Self::reply) knows why.
    #[inline]
    pub fn reply_word(&mut self, to: ReplyTo, payload: u64) -> bool {
        let target = to.endpoint();
        let State { peers, shape, closed, .. } = &mut *self.state;
        if let Some((index, peer)) = clear_way(peers, *shape, target)
            && peer.life == to.life
            && !*closed
            && self.inject.word(index, ProtocolId(wire::REPLY), to.cookie, payload)
        {
            peer.unflushed = true;
            self.trace_sent(target, 8);
            return true;
        }
        false
    }

    /// Sends a request of one word without info if nothing at all stands in the way, as [`send_word`](Self::send_word)
    /// does; the ticket ends with the reply.
    #[inline]
    pub fn request_word(&mut self, target: Endpoint, protocol: ProtocolId, payload: u64) -> Option<Ticket> {
        let State { peers, shape, stats, completer, closed, .. } = &mut *self.state;
        let (index, peer) = clear_way(peers, *shape, target)?;
        if *closed {
            return None;
        }
        let out = peer.outgoing.get_mut(protocol.index())?;
        if !out.admits(Flow::Replied) {
            return None;
        }
        let ticket = completer.alloc_noted(Some(target.rank), request_note(protocol, 8))?;
        if !self.inject.word(index, Self::wire_id(protocol), ticket.to_word(), payload) {
            completer.give_up(ticket);
            return None;
        }
        out.credits -= 1;
        out.bytes -= 8;
        peer.unflushed = true;
        stats.sent(8);
        self.trace_sent(target, 8);
        Some(ticket)
    }
}

/// The peer, and its index, if it is known and alive and nothing waits for it.
#[inline(always)]
fn clear_way(
    peers: &mut [Option<Box<Peer>>],
    shape: JobShape,
    target: Endpoint,
) -> Option<(usize, &mut Peer)> {
    reach(peers, shape, target).filter(|(_, peer)| peer.is_clear())
}

/// The peer, and its index, if it is known.
#[inline(always)]
fn reach(peers: &mut [Option<Box<Peer>>], shape: JobShape, target: Endpoint) -> Option<(usize, &mut Peer)> {
    let index = shape.index(target);
    let peer = peers.get_mut(index)?.as_deref_mut()?;
    (target.context.0 < shape.contexts).then_some((index, peer))
}
