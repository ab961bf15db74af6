//! Messages that come as a stream of fragments, and where their bytes go.

use super::Scope;
use super::dispatch::{Arrived, Resolution};
use super::peer::Assembly;
use super::send::owned_info;
use crate::descriptor::Info;
use crate::device::{Body, Packet, Verdict};
use crate::ids::ProtocolId;
use crate::memory::{Source, expect_all_of};
use crate::protocol::{Accept, Credit, FirstPacket, Flow, Incoming};
use crate::wire;
use bytes::{Bytes, BytesMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use zerocopy::FromBytes;

impl Scope<'_> {
    pub(super) fn stream_begin(
        &mut self,
        index: usize,
        packet: &Packet<'_>,
        bytes: &[u8],
    ) -> Option<Verdict> {
        let begin = wire::StreamBegin::read_from_bytes(bytes).ok()?;
        let (protocol, total) = (ProtocolId(begin.protocol.get()), begin.total.get());
        if self.state.peer(index).assembly.is_some() || total > self.state.config.max_message {
            return None;
        }
        let mut assembly = Assembly {
            protocol,
            cookie: begin.cookie.get(),
            info: owned_info(packet.info),
            total,
            received: 0,
            into: Accept::Whole,
            whole: Vec::new(),
            landing: None,
            refuse: None,
            settled: false,
            aside: false,
        };
        if protocol.0 >= wire::FIRST_USER {
            // Of a sender that has ended nothing more comes: what is not for now is taken in, and set aside as a whole.
            let (behind, ends) = (self.state.peer(index).has_aside(), self.state.peer(index).ends);
            match self.resolve(index, protocol) {
                Resolution::Local(local, _) if behind && !self.state.overtakes(local) => {
                    if !ends {
                        return Some(Verdict::Hold);
                    }
                    assembly.aside = true;
                }
                Resolution::Local(local, flow) => {
                    if !self.holds_one_more(index, protocol, flow, total) {
                        return Some(Verdict::Taken);
                    }
                    if let Some(handler) = self.state.registry.get(local)
                        && handler.chooses_buffer()
                    {
                        let source = packet.source;
                        let first = FirstPacket { source, info: packet.info, total };
                        let accept = catch_unwind(AssertUnwindSafe(|| handler.accept(self, &first)));
                        assembly.into = accept.unwrap_or_else(|_| {
                            let cookie = begin.cookie.get();
                            let life = self.state.peer(index).life;
                            self.panicked(&Arrived { source, protocol, life, cookie, flow, bytes: total });
                            // It has been answered, and its credit is back.
                            assembly.settled = true;
                            Accept::Discard
                        });
                    }
                }
                Resolution::Hold if ends => assembly.aside = true,
                Resolution::Hold => return Some(Verdict::Hold),
                Resolution::Refused(why) => {
                    assembly.into = Accept::Discard;
                    assembly.refuse = Some(why);
                }
                Resolution::Corrupt => return None,
            }
        } else if protocol.0 != wire::REPLY {
            return None;
        }
        self.state.peer(index).assembly = Some(assembly);
        Some(Verdict::Taken)
    }

    pub(super) fn stream_data(&mut self, index: usize, body: &Body<'_>) -> Option<Verdict> {
        let assembly = self.state.peer(index).assembly.as_mut()?;
        let len = body.len() as u64;
        if len == 0 || len > assembly.total - assembly.received || assembly.landing.is_some() {
            return None;
        }
        match &mut assembly.into {
            Accept::Whole => {
                // The room grows with what has arrived, not with what was announced.
                if assembly.whole.capacity() < assembly.whole.len() + body.len() {
                    let more = (assembly.whole.len() as u64).max(4 << 20).max(len);
                    assembly.whole.reserve_exact(more.min(assembly.total - assembly.received) as usize);
                    expect_all_of(&mut assembly.whole);
                }
                append_vec(&mut assembly.whole, body);
            }
            Accept::Fill { buffer, limit, .. } => {
                let had = assembly.received.min(*limit as u64) as usize;
                append(buffer, body, *limit - had);
            }
            Accept::Discard => {}
        }
        assembly.received += len;
        if assembly.received == assembly.total {
            self.stream_end(index);
        }
        Some(Verdict::Taken)
    }

    fn stream_end(&mut self, index: usize) {
        let Some(assembly) = self.state.peer(index).assembly.take() else { return };
        let source = self.state.shape.endpoint(index);
        let life = self.state.peer(index).life;
        let Assembly { protocol, cookie, info, total, into, whole, refuse, settled, aside, .. } = assembly;
        if let Some(fault) = refuse {
            self.refuse(index, protocol, cookie, fault);
            return;
        }
        if protocol.0 == wire::REPLY {
            self.answered(index, source.rank, cookie, Body::Owned(&Bytes::from(whole)));
            return;
        }
        match into {
            Accept::Whole if aside => {
                self.set_aside_whole(index, protocol, cookie, &info, Bytes::from(whole));
            }
            Accept::Whole => {
                if let Resolution::Local(local, flow) = self.resolve(index, protocol) {
                    let whole = Bytes::from(whole);
                    let body = Body::Owned(&whole);
                    let message = Incoming { source, info: info.as_bytes(), body, protocol, life, cookie };
                    // Its protocol was asked where it goes when it began.
                    self.dispatch_whole(message, local, flow);
                }
            }
            Accept::Fill { buffer, done, .. } => {
                self.state.stats.received(buffer.len() as u64);
                if catch_unwind(AssertUnwindSafe(|| done(self, buffer))).is_err() {
                    // Its credit goes back below in any case.
                    let flow = Flow::Inline;
                    self.panicked(&Arrived { source, protocol, life, cookie, flow, bytes: 0 });
                }
                self.used_up(index, Credit { endpoint: source, protocol, life, bytes: total });
            }
            Accept::Discard if settled => {}
            Accept::Discard => self.used_up(index, Credit { endpoint: source, protocol, life, bytes: total }),
        }
    }

    /// Sets a message aside that came in parts, now that it is whole.
    #[cold]
    pub(super) fn set_aside_whole(
        &mut self,
        index: usize,
        protocol: ProtocolId,
        cookie: u64,
        info: &Info,
        whole: Bytes,
    ) {
        let source = self.state.shape.endpoint(index);
        let mut packet = Packet::plain(source, protocol, cookie, Body::Owned(&whole));
        packet.info = info.as_bytes();
        self.set_aside(index, &mut packet);
        // Its name may have been registered since it began, when nothing of it was here.
        self.state.aside_seen = None;
    }

    /// A streamed message that went into a buffer or nowhere is consumed, if it was credited.
    fn used_up(&mut self, index: usize, credit: Credit) {
        if let Resolution::Local(_, Flow::Credited) = self.resolve(index, credit.protocol) {
            self.consumed(credit);
        }
    }
}

/// Appends at most `limit` bytes of the body.
pub(super) fn append(buffer: &mut BytesMut, body: &Body<'_>, limit: usize) {
    let len = body.len().min(limit);
    match body.source() {
        Source::Private(bytes) => buffer.extend_from_slice(&bytes[..len]),
        Source::Shared(page) => {
            let start = buffer.len();
            buffer.resize(start + len, 0);
            page.read(&mut buffer[start..]);
        }
    }
}

fn append_vec(whole: &mut Vec<u8>, body: &Body<'_>) {
    match body.source() {
        Source::Private(bytes) => whole.extend_from_slice(bytes),
        Source::Shared(page) => page.append_to(whole),
    }
}
