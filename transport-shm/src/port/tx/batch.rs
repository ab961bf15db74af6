//! Runs of recorded sends of middle length: copied to a page and published by one record.

use super::Tx;
use super::replay::descriptor_words;
use crate::batch::Batch;
use crate::lane::{Header, KIND_BATCH};
use crate::link::grant_word;
use posthaste_core::memory::{SharedSlice, SharedWords, Words};
use posthaste_core::{Descriptor, Fault};

/// Messages and bytes that are worth a page of their own.
const FEWEST: u64 = 4;
const FEWEST_BYTES: u64 = 2048;

/// Whether a send is without a cookie and like another one but for where in the same region its payload is.
#[inline]
fn is_alike(send: &Descriptor, other: &Descriptor) -> bool {
    let &[kind, target, len, ..] = descriptor_words(other);
    let &[send_kind, send_target, send_len, _, _, cookie, local, _] = descriptor_words(send);
    ((send_kind ^ kind) | (send_target ^ target) | (send_len ^ len) | cookie | (local ^ other.source[0])) == 0
}

/// Copies the payloads of a batch to its page; `None` if one of them is not in the source.
#[inline]
fn fill(batch: Batch, run: &[Descriptor], source: &SharedSlice, memory: SharedSlice) -> Option<()> {
    let first = run.first()?;
    let stride = batch.stride();
    if first.followers() + 1 >= run.len() && stride == first.len {
        memory.copy_from(source.slice(first.source[1], batch.bytes())?);
        return Some(());
    }
    for (number, send) in run.iter().enumerate() {
        batch.payload(&memory, number as u64)?.copy_from(source.slice(send.source[1], send.len)?);
    }
    Some(())
}

impl Tx {
    /// Sends the messages at the front of a run as a batch; returns how many, 0 for want of room. `None`: there are not so
    /// many alike that it is worth a page.
    #[inline]
    pub(super) fn send_batch(
        &mut self,
        index: usize,
        run: &[Descriptor],
        source: &SharedSlice,
    ) -> Result<Option<usize>, Fault> {
        // Single words are as fast in groups.
        let Some(first) = run.first().filter(|first| first.len > 8) else { return Ok(None) };
        let most = Batch::most(first.len).min(run.len() as u64) as usize;
        let row = most.min(first.followers() + 1);
        let alike = row + run[row..most].iter().take_while(|send| is_alike(send, first)).count();
        match Batch::new(alike as u64, first.len) {
            Some(batch) if batch.count() >= FEWEST && batch.bytes() >= FEWEST_BYTES => {
                self.send_alike(index, batch, &run[..alike], source).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Sends these messages as a batch; returns how many: all, or none for want of a page, a grant or room.
    #[inline(never)]
    fn send_alike(
        &mut self,
        index: usize,
        batch: Batch,
        run: &[Descriptor],
        source: &SharedSlice,
    ) -> Result<usize, Fault> {
        let Some(first) = run.first() else { return Ok(0) };
        self.settle(index);
        if self.lane(index)?.grants.is_far_ahead() {
            return Ok(0);
        }
        // Without memory for a page, which was told, they go through the ring.
        let Ok(Some(slot)) = self.slot(index, batch.bytes()) else { return Ok(0) };
        let memory = self.memory.slice(slot.page().offset, batch.bytes());
        let filled = memory.and_then(|memory| fill(batch, run, source, memory));
        posthaste_core::failpoint!("grant.batch.written");
        let header = Header {
            kind: KIND_BATCH,
            info_len: 0,
            protocol: first.protocol.0,
            len: first.len as u32,
            cookie: false,
        };
        let Tx { lanes, pool, .. } = self;
        let Some(lane) = &mut lanes[index] else { return Ok(0) };
        let word = grant_word(usize::from(slot.number), lane.grants.next_life());
        let named = |ring: &SharedWords, at| {
            for (word, value) in [slot.page().offset, word, batch.count()].into_iter().enumerate() {
                ring.store(at + word, value, posthaste_core::sync::Ordering::Relaxed);
            }
        };
        if filled.is_none() || !lane.producer.push(header, 0, &[], named) {
            lane.grants.put_back(slot, pool);
            return Ok(0);
        }
        lane.grants.grant(slot, lane.producer.tail());
        posthaste_core::failpoint!("grant.batch.sent");
        Ok(run.len())
    }
}
