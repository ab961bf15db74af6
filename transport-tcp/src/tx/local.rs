//! What this rank sends to itself, and its own memory: without a socket.

use super::{Tx, defect, payload};
use crate::frame::HEADER;
use crate::link::Payload;
use bytes::Bytes;
use posthaste_core::descriptor::{Info, SourceKind};
use posthaste_core::device::{Sources, Stop};
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;
use posthaste_core::{Descriptor, Fault, ProtocolId, Ticket};

/// Packets that a rank may have on their way to itself.
const LOCAL_PACKETS: usize = 1024;

/// A packet on its way to its own sender.
pub(crate) struct Transit {
    pub protocol: ProtocolId,
    pub kind: u8,
    pub cookie: u64,
    pub info: Info,
    pub bytes: Bytes,
}

impl Tx {
    pub(super) fn send_here(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let info = Info::new(if descriptor.info_len == 0 { &[] } else { sources.info });
        let Some(info) = info else { return Err(defect(descriptor)) };
        let limit = self.hub.limits.outgoing;
        let cost = HEADER + descriptor.len as usize;
        let full = self.local.len() >= LOCAL_PACKETS || self.local_bytes + cost > limit;
        if full && !self.local.is_empty() {
            return Err(Stop::Full);
        }
        let bytes = match payload(descriptor, sources)? {
            Payload::Private(bytes) => Bytes::copy_from_slice(bytes),
            Payload::Held(bytes) => bytes,
            Payload::Shared(slice) => Bytes::from(slice.to_vec()),
        };
        self.local_bytes += cost;
        let Descriptor { protocol, kind, cookie, .. } = *descriptor;
        self.local.push_back(Transit { protocol, kind, cookie, info, bytes });
        Ok(())
    }

    /// A packet to this endpoint itself was taken.
    pub fn left_local(&mut self, transit: &Transit) {
        self.local_bytes -= HEADER + transit.bytes.len();
    }

    fn here(&self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<SharedSlice, Stop> {
        let offset = self.remote(descriptor, sources)?;
        let absent = Stop::Fault(Fault::NoSuchMemory(descriptor.rank));
        self.hub.home.slice(offset, descriptor.len).ok_or(absent)
    }

    pub(super) fn put_here(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        let memory = self.here(descriptor, sources)?;
        match payload(descriptor, sources)? {
            Payload::Private(bytes) => memory.write(bytes),
            Payload::Held(bytes) => memory.write(&bytes),
            Payload::Shared(slice) => memory.copy_from(slice),
        }
        Ok(true)
    }

    pub(super) fn get_here(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<bool, Stop> {
        let memory = self.here(descriptor, sources)?;
        if matches!(descriptor.source_kind, SourceKind::Inline | SourceKind::Held) {
            if let Some(ticket) = Ticket::from_word(descriptor.ticket) {
                self.ended.push((ticket, Ok(Value::copy(&memory.to_vec()))));
            }
            return Ok(false);
        }
        match payload(descriptor, sources)? {
            Payload::Shared(slice) => slice.copy_from(memory),
            _ => return Err(defect(descriptor)),
        }
        Ok(true)
    }
}
