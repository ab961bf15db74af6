//! Runs of recorded descriptors, carried out together.

use super::Tx;
use crate::lane::{MOST_WORDS, Producer};
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::memory::{SharedSlice, SharedWords, WordCopier, Words};
use posthaste_core::{Descriptor, Fault};
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Words that are worth a record of their own: fewer are read faster one by one.
const FEWEST_WORDS: usize = 4;

/// What was put is seen before what is put next, and what was got is no later than what is got next. A processor that loads and
/// stores in order is told nothing.
#[inline(always)]
pub(super) fn in_order() {
    std::sync::atomic::fence(Ordering::AcqRel);
}

/// Carries out the puts of single words at the front of a run that are like the first one but for their places, as that one
/// tells; returns how many.
#[inline]
fn replay_words(run: &[Descriptor], words: &WordCopier) -> usize {
    let Some(first) = run.first().filter(|first| first.len == 8) else { return 0 };
    let row = &run[..run.len().min(first.followers() + 1)];
    let is_copied = |put: &&Descriptor| {
        in_order();
        words.copy(put.offset, put.source[1])
    };
    row.iter().take_while(is_copied).count()
}

/// A descriptor as words: op to rank; context to region; length; offset; ticket; cookie; source.
#[inline(always)]
pub(super) fn descriptor_words(descriptor: &Descriptor) -> &[u64; 8] {
    zerocopy::transmute_ref!(descriptor)
}

/// Whether a send is of one word without a cookie, and like another one but for where its payload is.
#[inline]
pub(super) fn is_word_like(send: &Descriptor, other: &Descriptor) -> bool {
    let &[kind, target, ..] = descriptor_words(other);
    let &[send_kind, send_target, len, _, _, cookie, local, _] = descriptor_words(send);
    ((send_kind ^ kind) | (send_target ^ target) | (len ^ 8) | cookie | (local ^ other.source[0])) == 0
}

/// Carries out the puts at the front of a run that have the same source and the same target; returns how many.
#[inline]
pub(super) fn replay_puts(run: &[Descriptor], target: &SharedSlice, source: &SharedSlice) -> usize {
    let Some(first) = run.first() else { return 0 };
    let (region, local) = (first.region, first.source[0]);
    let same = |put: &Descriptor| {
        put.op == Op::Put
            && put.source_kind == SourceKind::Region
            && put.region == region
            && put.source[0] == local
    };
    let done = target.words_from(source).map_or(0, |words| replay_words(run, &words));
    if done >= FEWEST_WORDS {
        // What follows may be another row of words.
        return done;
    }
    let is_done = |put: &&Descriptor| {
        in_order();
        same(put) && target.transfer(put.offset, source, put.source[1], put.len)
    };
    done + run[done..].iter().take_while(is_done).count()
}

/// Sends words at the front of a run as one record; returns how many, 0 for want of room. `None`: there are not so many that
/// are alike.
#[inline]
fn push_words(
    producer: &mut Producer<SharedWords>,
    most: usize,
    run: &[Descriptor],
    source: &SharedSlice,
) -> Option<usize> {
    let first = run.first().filter(|first| first.len == 8 && first.cookie == 0)?;
    let protocol = first.protocol.0;
    let row = (first.followers() + 1).min(run.len()).min(most);
    if row >= FEWEST_WORDS
        && let Some(payloads) = source.slice(first.source[1], 8 * row as u64)
    {
        let sent = producer.push_words(protocol, row, |ring, at| ring.write_shared(at, payloads));
        return Some(if sent { row } else { 0 });
    }
    let mut words = [0; MOST_WORDS];
    let alike = run
        .iter()
        .take(most)
        .map_while(|send| is_word_like(send, first).then(|| source.try_read_u64(send.source[1])).flatten());
    let count = alike.zip(&mut words).map(|(word, place)| *place = word).count();
    if count < FEWEST_WORDS {
        return None;
    }
    let sent =
        producer.push_words(protocol, count, |ring, at| ring.write_bytes(at, words[..count].as_bytes()));
    Some(if sent { count } else { 0 })
}

impl Tx {
    /// Sends the messages at the front of a run that come out of the same region, are short, have no info and go to the
    /// same endpoint; returns how many, and whether the lane had room for all of them.
    pub(super) fn replay_sends(
        &mut self,
        run: &[Descriptor],
        source: &SharedSlice,
    ) -> Result<(usize, bool), Fault> {
        let Some(first) = run.first() else { return Ok((0, true)) };
        let (target, local) = (first.target(), first.source[0]);
        let (fence, max_short, index) = (self.fence, self.max_short as u64, self.shape.index(target));
        let most_words = self.most_words;
        let same = |send: &Descriptor| {
            send.op == Op::Send
                && send.source_kind == SourceKind::Region
                && send.info_len == 0
                && send.len <= max_short
                && send.target() == target
                && send.source[0] == local
        };
        self.lane(index)?;
        let (mut done, mut room, mut pages) = (0, true, true);
        while let Some(send) = run.get(done).filter(|send| same(send)) {
            if pages && let Some(batched) = self.send_batch(index, &run[done..], source)? {
                done += batched;
                // The rest goes through the ring, which tells when there is room.
                pages = batched > 0;
                continue;
            }
            let lane = self.lane(index)?;
            match push_words(&mut lane.producer, most_words, &run[done..], source) {
                None => {}
                Some(0) => {
                    self.block(index);
                    room = false;
                    break;
                }
                Some(pushed) => {
                    done += pushed;
                    continue;
                }
            }
            let Some(payload) = source.slice(send.source[1], send.len) else { break };
            room = lane.push_shared(send, &[], payload);
            if !room {
                self.block(index);
                break;
            }
            done += 1;
        }
        let lane = self.lane(index)?;
        // One look for all: a reader that has said before this that it wants to be told has not seen the last one.
        if done > 0 && lane.producer.reader_wants_notice(fence) {
            self.announce_to(index);
        }
        Ok((done, room))
    }
}
