//! Runs of recorded descriptors, carried out together.

use super::Tx;
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::memory::{SharedSlice, WordCopier};
use posthaste_core::{Descriptor, Fault};

/// Carries out the puts of single words at the front of a run that are like the first one but for their places; returns how
/// many.
#[inline]
pub(super) fn replay_words(run: &[Descriptor], words: &WordCopier) -> usize {
    let Some(first) = run.first() else { return 0 };
    if first.len != 8 {
        return 0;
    }
    // Everything but the places is compared at once: as words, and in one branch.
    let &[kind, target, ..] = descriptor_words(first);
    let local = first.source[0];
    let differs = |put: &Descriptor| {
        let &[put_kind, put_target, len, _, _, _, put_local, _] = descriptor_words(put);
        (put_kind ^ kind) | (put_target ^ target) | (len ^ 8) | (put_local ^ local)
    };
    let done = |put: &&Descriptor| differs(put) == 0 && words.copy(put.offset, put.source[1]);
    run.iter().take_while(done).count()
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
    let is_done =
        |put: &&Descriptor| same(put) && target.transfer(put.offset, source, put.source[1], put.len);
    done + run[done..].iter().take_while(is_done).count()
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
            let words = run[done..].iter().map_while(|next| {
                is_word_like(next, send).then(|| source.try_read_u64(next.source[1])).flatten()
            });
            let pushed = lane.producer.push_words(send.protocol.0, words);
            if pushed > 0 {
                done += pushed;
                continue;
            }
            let Some(payload) = source.slice(send.source[1], send.len) else { break };
            room = lane.push_shared(send, &[], payload);
            if !room {
                lane.blocked = true;
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
