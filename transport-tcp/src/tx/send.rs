//! Messages to peers: into the out-buffer, or straight to the kernel.

use super::{Tx, defect, payload};
use crate::frame::{CONTROL, HEADER, Header};
use crate::link::{Job, KEEPS, Payload};
use posthaste_core::Descriptor;
use posthaste_core::descriptor::SourceKind;
use posthaste_core::device::{Sources, Stop};
use posthaste_core::wire;
use zerocopy::IntoBytes;

/// A lent payload from this length on is taken only if it can be written at once: the caller has a way of keeping it
/// that needs no copy.
const LONG: usize = 16 << 10;

impl Tx {
    #[inline]
    pub(super) fn send(
        &mut self,
        descriptor: &Descriptor,
        sources: &Sources<'_>,
        alone: bool,
    ) -> Result<bool, Stop> {
        let index = self.shape.index(descriptor.target());
        if index == self.index {
            return self.send_here(descriptor, sources).map(|()| true);
        }
        let info: &[u8] = if descriptor.info_len == 0 { &[] } else { sources.info };
        let (limit, max_eager) = (self.hub.limits.outgoing, self.hub.limits.max_eager);
        let len = descriptor.len as usize;
        if descriptor.kind >= CONTROL || len > max_eager || info.len() != usize::from(descriptor.info_len) {
            return Err(defect(descriptor));
        }
        let advancing = self.advancing;
        let link = self.link(index, descriptor)?;
        let waiting = link.out.len();
        let tight = waiting > 0 && waiting + HEADER + info.len() + len > limit;
        // A put that is not all under way precedes it; a get precedes what changes memory.
        let blocked = match link.job {
            None => false,
            Some(Job::Put { .. }) => true,
            Some(Job::Get { .. }) => {
                descriptor.is_access() || matches!(descriptor.protocol.0, wire::PUT | wire::GET)
            }
        };
        let lent = len >= LONG && descriptor.source_kind == SourceKind::Borrowed;
        if tight || blocked || lent {
            if !blocked && waiting > 0 && !link.blocked {
                link.flush();
            }
            let waiting = link.out.len();
            let tight = waiting > 0 && waiting + HEADER + info.len() + len > limit;
            if tight || blocked || (lent && (waiting > 0 || advancing)) {
                link.wanted = true;
                self.touch(index);
                return Err(Stop::Full);
            }
        }
        let header = Header {
            len: (len as u32).into(),
            kind: descriptor.kind,
            info: descriptor.info_len,
            protocol: descriptor.protocol.0.into(),
            word: descriptor.cookie.into(),
        };
        if descriptor.source_kind == SourceKind::Inline {
            let small = link.out.small();
            small.extend_from_slice(header.as_bytes());
            small.extend_from_slice(info);
            small.extend_from_slice(descriptor.inline_bytes());
        } else {
            let payload = payload(descriptor, sources)?;
            // What may be kept is copied for nobody, to however many it goes.
            let kept = sources.owned.filter(|owned| {
                descriptor.source_kind == SourceKind::Borrowed && len >= KEEPS && owned.len() == len
            });
            let small = link.out.small();
            small.extend_from_slice(header.as_bytes());
            small.extend_from_slice(info);
            match payload {
                Payload::Private(bytes) if lent && link.can_write() => {
                    let written = link.write(bytes);
                    // What the kernel had no room for is all that is copied, if it has to be.
                    link.push_payload(match kept {
                        Some(owned) => Payload::Held(owned.slice(written..)),
                        None => Payload::Private(&bytes[written..]),
                    });
                }
                payload => link.push_payload(match kept {
                    Some(owned) => Payload::Held(owned.clone()),
                    None => payload,
                }),
            }
        }
        let is_behind = !alone || link.ledger.puts_under_way() > 0 || !link.gets.is_empty();
        if descriptor.ticket != 0 && (is_behind || link.ledger.has_failed(descriptor.ticket)) {
            // The last of a recorded run ends when what precedes it has ended, too.
            link.ledger.mark(descriptor.ticket);
            self.settle_markers(index);
            return Ok(false);
        }
        Ok(true)
    }
}
