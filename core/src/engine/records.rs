//! Packets of the engine itself: which of its parts each goes to, and what peers say of protocols and credit.

use super::Scope;
use super::peer::Incoming as IncomingState;
use crate::device::{Body, Packet, Verdict};
use crate::ids::{ProtocolId, Rank};
use crate::protocol::ReplyTo;
use crate::slot::Ticket;
use crate::wire;
use zerocopy::FromBytes;

impl Scope<'_> {
    #[cold]
    pub(super) fn system_packet(&mut self, index: usize, packet: &mut Packet<'_>) -> Verdict {
        let rank = packet.source.rank;
        let body = std::mem::replace(&mut packet.body, Body::Short(&[]));
        let understood = match packet.protocol.0 {
            wire::REPLY => {
                self.answered(index, rank, packet.cookie, body);
                Some(Verdict::Taken)
            }
            wire::STREAM_DATA => self.stream_data(index, &body),
            wire::PUT if packet.info.is_empty() => self.put_arrived(index, packet.cookie, &body),
            wire::GET_DATA => self.get_data(index, packet.info, body),
            what => {
                let Body::Short(bytes) = body else {
                    self.cut_off(rank);
                    return Verdict::Taken;
                };
                match what {
                    wire::DECLARE => self.declared(index, bytes),
                    wire::GRANT => self.granted(index, bytes),
                    wire::REFUSE => self.refused(index, rank, packet.cookie, bytes),
                    wire::REQUEST_TO_SEND => self.asked_to_send(index, packet.info, bytes),
                    wire::CLEAR_TO_SEND => self.cleared_to_send(index, bytes),
                    wire::SENT => self.landed(index),
                    wire::CONTROL => {
                        packet.body = Body::Short(bytes);
                        self.control_arrived(index, packet.cookie, bytes)
                    }
                    wire::PUT_DONE => self.put_done(index, packet.cookie, bytes),
                    wire::GET if packet.info.is_empty() => self.get_asked(index, packet.cookie, bytes),
                    wire::PUT | wire::GET => {
                        let fetch = packet.protocol.0 == wire::GET;
                        self.atomic_asked(index, packet.cookie, packet.info, bytes, fetch)
                    }
                    wire::STREAM_BEGIN => self.stream_begin(index, packet, bytes),
                    wire::FLUSH if self.state.peer(index).has_aside() => {
                        packet.body = Body::Short(bytes);
                        Some(self.set_aside(index, packet))
                    }
                    wire::FLUSH => {
                        let to = ReplyTo::new(packet.source, self.state.peer(index).life, packet.cookie);
                        self.reply(to, Ok(super::Payload::Borrowed(&[])));
                        Some(Verdict::Taken)
                    }
                    wire::GOODBYE => {
                        self.state.leaves(rank);
                        Some(Verdict::Taken)
                    }
                    _ => None,
                }
            }
        };
        understood.unwrap_or_else(|| {
            // Who has departed has forgotten what its peers still answer to.
            if !self.state.departed {
                self.cut_off(rank);
            }
            Verdict::Taken
        })
    }

    fn declared(&mut self, index: usize, bytes: &[u8]) -> Option<Verdict> {
        let (declare, name) = wire::Declare::read_from_prefix(bytes).ok()?;
        let name = std::str::from_utf8(name).ok()?;
        let number = usize::from(declare.index.get());
        if number >= crate::protocol::MAX_PROTOCOLS
            || name.is_empty()
            || name.len() > crate::protocol::MAX_NAME
        {
            return None;
        }
        let incoming = &mut self.state.peer(index).incoming;
        while incoming.len() <= number {
            incoming.push(IncomingState::Unknown);
        }
        if !matches!(incoming[number], IncomingState::Unknown) {
            return None;
        }
        incoming[number] = IncomingState::Declared {
            name: name.to_owned(),
            schema: declare.schema.get(),
            flow: declare.flow,
        };
        Some(Verdict::Taken)
    }

    fn granted(&mut self, index: usize, bytes: &[u8]) -> Option<Verdict> {
        let grant = wire::Grant::read_from_bytes(bytes).ok()?;
        let number = usize::from(grant.index.get());
        let config = self.state.config;
        if grant.asks.get() != 0 {
            return self.credit_is_wanted(index, grant.index.get());
        }
        let out = self.state.peer(index).outgoing.get_mut(number)?;
        // A peer cannot give more than there is: that keeps the memory of *other* receivers out of its reach and the
        // arithmetic in range.
        out.credits = out.credits.saturating_add(grant.messages.get()).min(config.credits);
        let given = i64::try_from(grant.bytes.get()).unwrap_or(i64::MAX);
        out.bytes = out.bytes.saturating_add(given).min(config.credit_bytes as i64);
        self.state.hand_out_credit(index, number);
        if !self.state.peer(index).outgoing[number].waiters.is_empty() {
            self.state.ask_for_credit(index, number);
        }
        Some(Verdict::Taken)
    }

    /// The peer waits for credit in one of its protocols.
    fn credit_is_wanted(&mut self, index: usize, number: u16) -> Option<Verdict> {
        let peer = self.state.peer(index);
        if usize::from(number) >= peer.incoming.len() {
            // It was not declared.
            return None;
        }
        if !peer.wanted.contains(&number) {
            peer.wanted.push(number);
            if !self.state.wanting.contains(&index) {
                self.state.wanting.push(index);
            }
        }
        if self.pay_credit(index) == 0 && self.owes_credit(index) {
            self.state.mark_busy(index);
        }
        Some(Verdict::Taken)
    }

    fn refused(&mut self, index: usize, rank: Rank, cookie: u64, bytes: &[u8]) -> Option<Verdict> {
        let refuse = wire::Refuse::read_from_bytes(bytes).ok()?;
        let fault = wire::fault_of(refuse.code.get(), rank);
        let request = Ticket::from_word(cookie);
        if let Some(ticket) = request {
            self.state.end_request(index, rank, ticket, Err(fault));
        }
        if cookie == 0 && refuse.index.get() == u16::MAX {
            // It was a control.
            self.state.report(fault);
        }
        let number = usize::from(refuse.index.get());
        let peer = self.state.peer(index);
        peer.close(number);
        if let Some(out) = peer.outgoing.get_mut(number)
            && out.refused.replace(fault).is_none()
        {
            for waiter in std::mem::take(&mut out.waiters).drain(..) {
                self.state.end_waiting(waiter.ticket, waiter.kept.as_deref(), fault);
            }
            if request.is_none() {
                // What was sent before is gone, and nobody waits for it.
                let protocol = self.state.registry.get(ProtocolId(refuse.index.get()));
                let name = protocol.as_ref().map(|protocol| protocol.name());
                tracing::warn!(peer = %rank, name, %fault, "messages of this name are refused there");
                self.state.report(fault);
            }
        }
        Some(Verdict::Taken)
    }
}
