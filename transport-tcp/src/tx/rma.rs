//! Puts and gets of a peer's memory, and the peer's word on them.

use super::{Tx, defect, payload};
use crate::frame::{HEADER, Header, Malformed};
use crate::link::{Get, Job, Landing, PIECE, Payload, PutSource, TxLink};
use posthaste_core::descriptor::SourceKind;
use posthaste_core::device::{Sources, Stop};
use posthaste_core::{Descriptor, Ticket};
use zerocopy::IntoBytes;

/// What fails if a put or a get does.
fn owner(descriptor: &Descriptor, sources: &Sources<'_>) -> Option<Ticket> {
    Ticket::from_word(descriptor.ticket).or_else(|| Ticket::from_word(sources.part_of))
}

impl Tx {
    /// The target memory: its first byte as its owner names it.
    pub(super) fn remote(&self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<u64, Stop> {
        let memory = sources.table.remote.get(descriptor.region as usize);
        memory
            .filter(|memory| memory.rank == descriptor.rank)
            .filter(|memory| descriptor.len <= memory.len && descriptor.offset <= memory.len - descriptor.len)
            .and_then(|memory| memory.offset.checked_add(descriptor.offset))
            .ok_or_else(|| defect(descriptor))
    }

    /// Whether there is room for one more put or get; what is too long for one go lets none pass.
    fn has_room(link: &mut TxLink, limit: usize, bytes: usize) -> bool {
        let fits = |link: &TxLink| link.out.is_empty() || link.out.len() + bytes <= limit;
        if link.job.is_none() && !fits(link) && !link.blocked {
            link.flush();
        }
        let room = link.job.is_none() && fits(link);
        link.wanted |= !room;
        room
    }

    pub(super) fn put(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let offset = self.remote(descriptor, sources)?;
        let owner = owner(descriptor, sources);
        let index = self.shape.index(descriptor.target());
        let limit = self.hub.limits.outgoing;
        let len = descriptor.len;
        let link = self.link(index, descriptor)?;
        if !Self::has_room(link, limit, HEADER + (len as usize).min(limit)) {
            self.touch(index);
            return Err(Stop::Full);
        }
        let payload = payload(descriptor, sources)?;
        let source = match payload {
            Payload::Shared(slice) if len > PIECE => Some(PutSource::Region(slice)),
            Payload::Held(ref bytes) if len > 1 << 30 => Some(PutSource::Held(bytes.clone())),
            _ => None,
        };
        match source {
            Some(source) => {
                link.job = Some(Job::Put { source, sent: 0, len, offset, ticket: descriptor.ticket, owner });
                link.work(limit, 0, 0);
            }
            None => {
                let header = Header::put(payload.len(), offset, link.ledger.puts_under_way());
                match payload {
                    Payload::Shared(memory) => link.push_memory(&[(header, memory)]),
                    payload => {
                        link.out.small().extend_from_slice(header.as_bytes());
                        link.push_payload(payload);
                    }
                }
                link.ledger.put(owner);
                link.ledger.mark(descriptor.ticket);
            }
        }
        Ok(())
    }

    pub(super) fn get(&mut self, descriptor: &Descriptor, sources: &Sources<'_>) -> Result<(), Stop> {
        let offset = self.remote(descriptor, sources)?;
        let index = self.shape.index(descriptor.target());
        let limits = self.hub.limits;
        let into = match descriptor.source_kind {
            SourceKind::Inline => Landing::Value(Vec::new()),
            SourceKind::Held => match sources.table.held.get(descriptor.source[0] as usize) {
                Some(memory) => Landing::Given(memory.clone()),
                None => return Err(defect(descriptor)),
            },
            _ => match payload(descriptor, sources)? {
                Payload::Shared(slice) => Landing::Region(slice),
                _ => return Err(defect(descriptor)),
            },
        };
        let link = self.link(index, descriptor)?;
        if !Self::has_room(link, limits.outgoing, HEADER + 8) {
            self.touch(index);
            return Err(Stop::Full);
        }
        let ticket = Ticket::from_word(descriptor.ticket);
        let owner = owner(descriptor, sources);
        link.gets.push_back(Get { ticket, owner, len: descriptor.len, received: 0, absent: false, into });
        link.ledger.get();
        // A get of nothing is asked for, too: its answer says that what precedes it is done.
        link.job = Some(Job::Get { offset, left: descriptor.len, waits: false });
        link.work(limits.outgoing, limits.get_chunk as u64, limits.get_window as u64);
        self.touch(index);
        Ok(())
    }

    /// The peer says that so many puts are done.
    pub fn done(&mut self, index: usize, count: u64) -> Result<(), Malformed> {
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        link.ledger.puts_are_done(count)?;
        self.settle_markers(index);
        Ok(())
    }

    /// Reports what has ended already; the port is not in `advance`, or would do it there.
    pub(super) fn settle_markers(&mut self, index: usize) {
        let Some(link) = &mut self.links[index] else { return };
        self.ended.extend(std::iter::from_fn(|| link.ledger.next_end()));
    }

    /// The peer has not got the memory of some puts.
    pub fn absent_puts(&mut self, index: usize, first: u64, count: u64) -> Result<(), Malformed> {
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        link.ledger.puts_failed(first, count)
    }
}
