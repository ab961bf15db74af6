//! Credit: what a receiver can keep is promised to its senders, and given back as it is consumed.

use super::config::MOST_CREDITS;
use super::peer::{Held, Incoming, Waiter};
use super::{Scope, State};
use crate::descriptor::{Descriptor, MAX_DESCRIPTOR_INLINE};
use crate::device::Stop;
use crate::ids::ProtocolId;
use crate::protocol::{Credit, Flow};
use crate::wire;
use zerocopy::IntoBytes;

impl Scope<'_> {
    /// A credited message was consumed: its credit is owed to the sender and paid when it is worth a record.
    pub fn consumed(&mut self, credit: Credit) {
        let Ok(index) = self.state.index_of(credit.endpoint) else { return };
        let Some(number) = credit.protocol.0.checked_sub(wire::FIRST_USER) else { return };
        let peer = self.state.peer(index);
        if peer.life != credit.life {
            // It went with the incarnation that had sent the message.
            return;
        }
        if let Some(Incoming::Resolved { messages, bytes, held, .. }) = peer.incoming.get_mut(number as usize)
        {
            *messages += 1;
            *bytes += credit.bytes;
            held.messages = held.messages.saturating_sub(1);
            held.bytes = held.bytes.saturating_sub(credit.bytes);
            if self.pay_credit(index) == 0 {
                if self.owes_credit(index) {
                    self.state.mark_busy(index);
                } else if self.state.peer(index).wanted.contains(&number) {
                    // The sender waits for what is not worth a record yet: that is paid before this side sleeps.
                    self.state.restless = true;
                }
            }
        }
    }

    /// A message is about to be handed to its handler. If it is credited, it is held from now on until it is consumed. False
    /// if the peer had no credit for it: it is cut off then, and the message is not handed to anybody.
    pub(super) fn holds_one_more(
        &mut self,
        index: usize,
        protocol: ProtocolId,
        flow: Flow,
        bytes: u64,
    ) -> bool {
        if flow != Flow::Credited {
            return true;
        }
        let config = self.state.config;
        let number = usize::from(protocol.0.wrapping_sub(wire::FIRST_USER));
        let peer = self.state.peer(index);
        let rank = peer.endpoint.rank;
        let Some(Incoming::Resolved { held, .. }) = peer.incoming.get_mut(number) else { return true };
        // Who sends has bytes left when it takes the credit of a message, however long, or of a pattern, which has no more
        // bytes than there are altogether: with so many here it cannot have had any.
        if held.messages >= config.credits.max(MOST_CREDITS)
            || held.bytes >= config.credit_bytes.saturating_mul(2)
        {
            tracing::warn!(%rank, ?held, "a peer sends more than it has credit for");
            self.cut_off(rank);
            return false;
        }
        held.messages += 1;
        held.bytes = held.bytes.saturating_add(bytes);
        true
    }

    /// An answer goes into the FIFO. False if the peer can have asked for no more: it is cut off then.
    pub(super) fn owes_one_more(&mut self, index: usize, len: usize) -> bool {
        let limit = self.state.config.answer_bytes;
        let peer = self.state.peer(index);
        // Each answer ends an operation of the peer's.
        if peer.answers as usize >= crate::slot::MOST_SLOTS {
            let rank = peer.endpoint.rank;
            tracing::warn!(%rank, "a peer asks for more than it can have under way and takes no answer");
            self.cut_off(rank);
            return false;
        }
        peer.answers += 1;
        peer.answer_bytes += outside(len);
        let asks_too_much = peer.answer_bytes > limit;
        if asks_too_much != std::mem::replace(&mut peer.asks_too_much, asks_too_much) {
            self.state.interruptions += 1;
        }
        true
    }

    /// Whether what is owed in a protocol of the peer's is worth a record. If the peer waits, there may be no more to come: a
    /// quarter of what is still to be consumed is enough then, lest a stream in which it always waits takes a record a message;
    /// [`pay_who_waits`](Self::pay_who_waits) pays the rest.
    fn due(&self, wanted: &[u16], number: usize, messages: u32, bytes: u64, held: Held) -> bool {
        let config = self.state.config;
        messages >= (config.credits / 2).max(1)
            || messages > 0
                && (bytes >= config.credit_bytes / 2
                    || messages >= held.messages / 4 && wanted.contains(&(number as u16)))
    }

    pub(super) fn owes_credit(&self, index: usize) -> bool {
        let Some(peer) = &self.state.peers[index] else { return false };
        peer.fault.is_none()
            && peer.incoming.iter().enumerate().any(|(number, incoming)| {
                matches!(incoming, Incoming::Resolved { messages, bytes, held, .. }
                    if self.due(&peer.wanted, number, *messages, *bytes, *held))
            })
    }

    /// Pays senders who wait all that they are owed, before this side sleeps: what else they have sent may be kept for ever.
    /// Returns how many records that took.
    pub(super) fn pay_who_waits(&mut self) -> usize {
        let mut paid = 0;
        let mut wanting = std::mem::take(&mut self.state.wanting);
        wanting.retain(|&index| {
            let (now, room) = self.pay(index, true);
            paid += now;
            if !room {
                // It is tried again when there is some.
                self.state.mark_busy(index);
            }
            !self.state.peer(index).wanted.is_empty()
        });
        self.state.wanting.append(&mut wanting);
        paid
    }

    /// Sends what is said of credit, past all that is queued: of a FIFO that is never empty nothing would be paid.
    fn sends_grant(&mut self, index: usize, grant: &wire::Grant) -> bool {
        self.state.peer(index).fault.is_some()
            || self.aside_of_queue(index, wire::GRANT, 0, &[], grant.as_bytes()) == Stop::Done
    }

    /// The peer is told of the protocols in which somebody waits for credit. Returns how many it was told of.
    pub(super) fn pump_asks(&mut self, index: usize) -> usize {
        let mut told = 0;
        while let Some(number) = self.state.peer(index).asks.last().copied() {
            let ask =
                wire::Grant { bytes: 0.into(), messages: 0.into(), index: number.into(), asks: 1.into() };
            // The peer has to hear of the protocol first.
            if !self.state.peer(index).is_announced(ProtocolId(number)) || !self.sends_grant(index, &ask) {
                break;
            }
            self.state.peer(index).asks.pop();
            told += 1;
        }
        told
    }

    pub(super) fn pay_credit(&mut self, index: usize) -> usize {
        self.pay(index, false).0
    }

    /// Pays what is due, or also whatever is owed in protocols in which the peer waits. Returns how many records that took, and
    /// whether there was room for all of them.
    fn pay(&mut self, index: usize, to_who_waits: bool) -> (usize, bool) {
        let mut paid = 0;
        let count = self.state.peer(index).incoming.len();
        for number in 0..count {
            let Some(peer) = &self.state.peers[index] else { break };
            let Incoming::Resolved { messages, bytes, held, .. } = peer.incoming[number] else { continue };
            let waits = || to_who_waits && messages > 0 && peer.wanted.contains(&(number as u16));
            if !self.due(&peer.wanted, number, messages, bytes, held) && !waits() {
                continue;
            }
            crate::failpoint!("credit.return.before");
            let grant = wire::Grant {
                bytes: bytes.into(),
                messages: messages.into(),
                index: (number as u16).into(),
                asks: 0.into(),
            };
            if !self.sends_grant(index, &grant) {
                return (paid, false);
            }
            crate::failpoint!("credit.return.after");
            let peer = self.state.peer(index);
            peer.wanted.retain(|wanted| usize::from(*wanted) != number);
            if let Incoming::Resolved { messages: owed, bytes: owed_bytes, .. } = &mut peer.incoming[number] {
                *owed -= messages;
                *owed_bytes -= bytes;
            }
            paid += 1;
        }
        (paid, true)
    }
}

/// Bytes that an answer takes outside the FIFO.
fn outside(len: usize) -> u64 {
    if len > MAX_DESCRIPTOR_INLINE { len as u64 } else { 0 }
}

impl State {
    /// A descriptor has left the FIFO: it may have been an answer.
    pub(super) fn answer_left_queue(&mut self, index: usize, front: &Descriptor) {
        let limit = self.config.answer_bytes;
        if matches!(front.protocol.0, wire::REPLY | wire::REFUSE)
            && let Some(peer) = self.peers[index].as_mut()
        {
            peer.answers = peer.answers.saturating_sub(1);
            peer.answer_bytes = peer.answer_bytes.saturating_sub(outside(front.len as usize));
            peer.asks_too_much = peer.answer_bytes > limit;
        }
    }

    /// Takes the credit of a message to a peer that knows its protocol, unless there is none or others wait for some.
    pub(super) fn take_credit(&mut self, index: usize, number: usize, len: u64) -> bool {
        let Some(out) = self.peers[index].as_mut().and_then(|peer| peer.outgoing.get_mut(number)) else {
            return false;
        };
        if out.flow == Flow::Inline {
            out.open = true;
            return true;
        }
        let has_some = out.credits > 0 && out.bytes > 0 && out.waiters.is_empty() && !out.a_run_is_next;
        if has_some {
            out.credits -= 1;
            out.bytes -= len as i64;
        }
        has_some
    }

    /// Puts somebody behind those who wait for credit. The first of them has the peer told that what it owes is waited for: of
    /// itself it pays when that is worth a record, and no more may come.
    pub(super) fn wait_for_credit(&mut self, index: usize, number: usize, waiter: Waiter) {
        let State { peers, completer, .. } = self;
        let Some(out) = peers[index].as_mut().and_then(|peer| peer.outgoing.get_mut(number)) else { return };
        out.waiters.push_back(waiter, completer);
        if out.waiters.len() == 1 {
            self.ask_for_credit(index, number);
        }
    }

    pub(super) fn ask_for_credit(&mut self, index: usize, number: usize) {
        let peer = self.peer(index);
        // Of what is answered nothing is owed: the answers bring it.
        if peer.outgoing[number].flow == Flow::Credited && !peer.asks.contains(&(number as u16)) {
            peer.asks.push(number as u16);
            self.mark_busy(index);
            // Nobody rings for what was not said yet.
            self.restless = true;
        }
    }

    /// Credit for a request comes back with its answer.
    pub(super) fn request_answered(&mut self, index: usize, number: usize, bytes: u64) {
        let Some(out) = self.peers[index].as_mut().and_then(|peer| peer.outgoing.get_mut(number)) else {
            return;
        };
        if out.flow == Flow::Replied {
            out.credits += 1;
            out.bytes += bytes as i64;
            if !out.waiters.is_empty() {
                self.hand_out_credit(index, number);
            }
        }
    }
}
