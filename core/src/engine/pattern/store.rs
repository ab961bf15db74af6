//! The cumulative buffer of recorded descriptors, and its sections (D26).

use super::PatternError;
use crate::descriptor::{Descriptor, MAX_INFO, Op};
use crate::error::Fault;
use crate::ids::{JobShape, PatternId, ProtocolId, Rank};
use crate::wire;
use slab::Slab;
use std::any::Any;
use zerocopy::IntoBytes;

/// Bytes of message info that a slot behind a recorded send holds.
const INFO_PER_SLOT: usize = 48;
/// In the offset of a recorded send, which a device does not look at: its info is never replaced.
pub(super) const FIXED_INFO: u64 = 1;

/// Messages of one protocol in a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub protocol: ProtocolId,
    pub messages: u32,
    pub bytes: u64,
}

/// The descriptors for one target. Places count from the start of the section, so that it can be moved.
#[derive(Debug)]
pub(super) struct Run {
    pub index: usize,
    pub start: u32,
    pub end: u32,
    /// Its last operation; only message info follows.
    pub last: u32,
    /// Every slot is an operation that is one packet without info: the device takes them in one go.
    pub plain: bool,
    /// There are puts, gets or atomic operations.
    pub accesses: bool,
    /// There are atomic operations.
    pub atomics: bool,
    /// There are messages longer than one packet.
    pub long: bool,
    /// The protocols of its sends.
    pub needs: Box<[Need]>,
    /// Operations.
    pub messages: u64,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct Section {
    pub start: usize,
    pub len: usize,
    pub runs: Box<[Run]>,
    pub generation: u32,
    /// Replays that have not ended.
    pub active: usize,
    /// They are in no order with those of other sections.
    pub apart: bool,
    pub unregistered: bool,
    /// Why it cannot be replayed any more: a target of it was started again.
    stale: Option<Fault>,
    /// Neither unregistered nor stale.
    usable: bool,
    /// What its descriptors point into.
    _keep: Keep,
}

/// Anything that has to live as long as a section.
pub(super) struct Keep {
    _value: Box<dyn Any + Send>,
}

impl Keep {
    pub fn new(value: Box<dyn Any + Send>) -> Self {
        Self { _value: value }
    }
}

impl std::fmt::Debug for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keep")
    }
}

/// All recorded descriptors of a context: one buffer, allocated with the first pattern and never again.
#[derive(Debug, Default)]
pub(crate) struct PatternStore {
    pub(super) buffer: Vec<Descriptor>,
    capacity: usize,
    /// Free ranges of the buffer: start and length, sorted, none touching another.
    free: Vec<(usize, usize)>,
    pub(super) sections: Slab<Section>,
    /// Lives of sections.
    generation: u32,
}

impl PatternStore {
    /// Makes room for `len` slots, moving sections together if there is enough but not in one piece.
    fn place(&mut self, len: usize, capacity: usize) -> Result<usize, PatternError> {
        if self.capacity == 0 {
            self.capacity = capacity;
            // Memory that is not touched costs nothing.
            self.buffer.reserve_exact(capacity);
        }
        if let Some(start) = self.take_free(len) {
            return Ok(start);
        }
        let free = self.capacity - self.buffer.len() + self.free.iter().map(|range| range.1).sum::<usize>();
        if free >= len {
            self.compact();
            if let Some(start) = self.take_free(len) {
                return Ok(start);
            }
        }
        Err(PatternError::Full { wanted: len, free, capacity: self.capacity })
    }

    fn take_free(&mut self, len: usize) -> Option<usize> {
        if let Some(at) = self.free.iter().position(|&(_, room)| room >= len) {
            let (start, room) = self.free[at];
            if room == len {
                self.free.remove(at);
            } else {
                self.free[at] = (start + len, room - len);
            }
            return Some(start);
        }
        let start = self.buffer.len();
        if self.capacity - start < len {
            return None;
        }
        self.buffer.resize(start + len, Descriptor::default());
        Some(start)
    }

    fn give_back(&mut self, start: usize, len: usize) {
        let at = self.free.partition_point(|&(other, _)| other < start);
        self.free.insert(at, (start, len));
        if at + 1 < self.free.len() && start + len == self.free[at + 1].0 {
            self.free[at].1 += self.free.remove(at + 1).1;
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == start {
            self.free[at - 1].1 += self.free.remove(at).1;
        }
        // The end of the buffer is free, too.
        if let Some(&(start, len)) = self.free.last()
            && start + len == self.buffer.len()
        {
            self.free.pop();
            self.buffer.truncate(start);
        }
    }

    /// Moves all sections to the front. Who replays one names places by section, so that it may be moved meanwhile.
    fn compact(&mut self) {
        let mut order: Vec<usize> = self.sections.iter().map(|(key, _)| key).collect();
        order.sort_unstable_by_key(|&key| self.sections[key].start);
        let mut end = 0;
        for key in order {
            let section = &mut self.sections[key];
            self.buffer.copy_within(section.start..section.start + section.len, end);
            section.start = end;
            end += section.len;
        }
        self.buffer.truncate(end);
        self.free.clear();
    }

    /// Stores descriptors whose infos follow them, as [`record_info`] leaves them.
    pub(super) fn insert(
        &mut self,
        mut descriptors: Vec<Descriptor>,
        shape: JobShape,
        eager: u64,
        capacity: usize,
        keep: Keep,
    ) -> Result<PatternId, PatternError> {
        descriptors.sort_by_key(|descriptor| shape.index(descriptor.target()));
        Descriptor::tell_followers(&mut descriptors);
        let runs = runs_of(&descriptors, shape, eager);
        let (start, len) = (self.place(descriptors.len(), capacity)?, descriptors.len());
        self.buffer[start..start + len].copy_from_slice(&descriptors);
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let section = Section {
            start,
            len,
            runs,
            generation,
            active: 0,
            apart: false,
            unregistered: false,
            stale: None,
            usable: true,
            _keep: keep,
        };
        Ok(PatternId::new(self.sections.insert(section) as u32, generation))
    }

    /// The section of an id that can be replayed: neither unregistered nor stale.
    #[inline]
    pub(super) fn section(&self, id: PatternId) -> Option<&Section> {
        let section = self.sections.get(id.index())?;
        (section.generation == id.generation() && section.usable).then_some(section)
    }

    /// Why there is no section of an id that can be replayed.
    #[cold]
    pub(super) fn unusable(&self, id: PatternId) -> PatternError {
        match self.sections.get(id.index()) {
            Some(Section { generation, unregistered: false, stale: Some(why), .. })
                if *generation == id.generation() =>
            {
                PatternError::Fault(*why)
            }
            _ => PatternError::NoSuchPattern(id),
        }
    }

    /// A rank was started again: what was recorded for an earlier incarnation stays refused.
    pub(in super::super) fn outlive(&mut self, shape: JobShape, rank: Rank, why: Fault) {
        for (_, section) in &mut self.sections {
            if section.runs.iter().any(|run| shape.endpoint(run.index).rank == rank) {
                section.stale.get_or_insert(why);
                section.usable = false;
            }
        }
    }

    pub(super) fn stand_apart(&mut self, id: PatternId) {
        let section = self.sections.get_mut(id.index());
        if let Some(section) = section.filter(|section| section.generation == id.generation()) {
            section.apart = true;
        }
    }

    pub(super) fn unregister(&mut self, id: PatternId) {
        let section = self.sections.get_mut(id.index());
        if let Some(section) = section.filter(|section| section.generation == id.generation()) {
            (section.unregistered, section.usable) = (true, false);
            self.release_if_idle(id.index());
        }
    }

    pub(super) fn release_if_idle(&mut self, key: usize) {
        let idle = self.sections.get(key).is_some_and(|section| section.unregistered && section.active == 0);
        if idle {
            let section = self.sections.remove(key);
            self.give_back(section.start, section.len);
        }
    }

    /// Nothing is replayed any more.
    pub(super) fn clear(&mut self) {
        self.sections.clear();
        self.free.clear();
        self.buffer.clear();
    }

    /// Slots in use, and slots that there are.
    pub(super) fn usage(&self) -> (usize, usize) {
        let free: usize = self.free.iter().map(|range| range.1).sum();
        (self.buffer.len() - free, self.capacity)
    }
}

fn runs_of(descriptors: &[Descriptor], shape: JobShape, eager: u64) -> Box<[Run]> {
    let mut runs: Vec<(Run, Vec<Need>)> = Vec::new();
    for (at, descriptor) in descriptors.iter().enumerate() {
        let (index, at) = (shape.index(descriptor.target()), at as u32);
        if runs.last().is_none_or(|(run, _)| run.index != index) {
            let run = Run {
                index,
                start: at,
                end: at,
                last: at,
                plain: true,
                accesses: false,
                atomics: false,
                long: false,
                needs: Box::default(),
                messages: 0,
                bytes: 0,
            };
            runs.push((run, Vec::new()));
        }
        let Some((run, needs)) = runs.last_mut() else { continue };
        run.end = at + 1;
        if descriptor.op == Op::Nop {
            continue;
        }
        run.last = at;
        run.messages += 1;
        run.bytes += descriptor.len;
        if descriptor.op != Op::Send {
            run.accesses = true;
            run.atomics |= descriptor.op == Op::Atomic;
            continue;
        }
        run.plain &= descriptor.info_len == 0 && descriptor.len <= eager;
        run.long |= descriptor.len > eager;
        let protocol = ProtocolId(descriptor.protocol.0.saturating_sub(wire::FIRST_USER));
        match needs.iter_mut().find(|need| need.protocol == protocol) {
            Some(need) => {
                need.messages += 1;
                need.bytes += descriptor.len;
            }
            None => needs.push(Need { protocol, messages: 1, bytes: descriptor.len }),
        }
    }
    let sorted = |(run, mut needs): (Run, Vec<Need>)| {
        // All runs wait for credit in one order of the protocols: so of those that wait none waits for what another has that waits
        // for it.
        needs.sort_unstable_by_key(|need| need.protocol);
        Run { needs: needs.into(), ..run }
    };
    runs.into_iter().map(sorted).collect()
}

/// Slots that message info of that length takes behind a recorded send.
#[must_use]
pub(super) const fn info_slots(len: usize) -> usize {
    len.div_ceil(INFO_PER_SLOT)
}

/// Appends a recorded send and its message info, which fills the slots behind it: operations of kind "nothing", with 48
/// bytes of info in their last six words. Longer info than 112 bytes is cut off; `fixed`: a replay never replaces it.
pub fn record_info(into: &mut Vec<Descriptor>, mut send: Descriptor, info: &[u8], fixed: bool) {
    let info = &info[..info.len().min(MAX_INFO)];
    send.info_len = info.len() as u8;
    send.offset = if fixed { FIXED_INFO } else { 0 };
    into.push(send);
    for part in info.chunks(INFO_PER_SLOT) {
        let mut words = [0u64; 6];
        words.as_mut_bytes()[..part.len()].copy_from_slice(part);
        into.push(Descriptor {
            op: Op::Nop,
            rank: send.rank,
            context: send.context,
            len: words[0],
            offset: words[1],
            ticket: words[2],
            cookie: words[3],
            source: [words[4], words[5]],
            ..Descriptor::default()
        });
    }
}

/// Reads message info back from the slots behind a send; returns its length.
pub(super) fn read_info(slots: &[Descriptor], len: usize, into: &mut [u8; MAX_INFO]) -> usize {
    let len = len.min(MAX_INFO);
    for (part, slot) in into[..len].chunks_mut(INFO_PER_SLOT).zip(slots) {
        let words = [slot.len, slot.offset, slot.ticket, slot.cookie, slot.source[0], slot.source[1]];
        part.copy_from_slice(&words.as_bytes()[..part.len()]);
    }
    len
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::ids::Rank;

    const SHAPE: JobShape = JobShape { ranks: 4, clients: 1, contexts: 1 };

    fn puts(count: usize, mark: u64) -> Vec<Descriptor> {
        let put = |at| Descriptor {
            op: Op::Put,
            rank: Rank(at as u32 % 4),
            offset: mark,
            len: at as u64,
            ..Descriptor::default()
        };
        (0..count).map(put).collect()
    }

    fn insert(store: &mut PatternStore, count: usize, mark: u64) -> Result<PatternId, PatternError> {
        store.insert(puts(count, mark), SHAPE, 100, 64, Keep::new(Box::new(())))
    }

    fn holds(store: &PatternStore, id: PatternId, mark: u64) -> bool {
        let Some(section) = store.section(id) else { return false };
        store.buffer[section.start..][..section.len].iter().all(|descriptor| descriptor.offset == mark)
    }

    #[test]
    fn m_d26_a_fragmented_buffer_is_moved_together_and_never_grows() {
        let mut store = PatternStore::default();
        let ids: Vec<PatternId> =
            (0..16).map(|mark| insert(&mut store, 4, mark).expect("room for 64 slots")).collect();
        let at = store.buffer.as_ptr();
        assert_eq!(
            insert(&mut store, 1, 99).unwrap_err(),
            PatternError::Full { wanted: 1, free: 0, capacity: 64 }
        );
        for id in ids.iter().step_by(2) {
            store.unregister(*id);
        }
        assert_eq!(store.usage(), (32, 64));
        let long = insert(&mut store, 30, 100).expect("8 holes of 4 slots are enough for 30");
        assert!(holds(&store, long, 100));
        for (mark, id) in ids.iter().enumerate().skip(1).step_by(2) {
            assert!(holds(&store, *id, mark as u64), "pattern {mark} was moved, not damaged");
        }
        assert_eq!(store.buffer.as_ptr(), at, "the buffer is allocated once");
        assert!(store.section(ids[0]).is_none(), "an id of a former life names nothing");
    }

    #[test]
    fn info_of_every_length_is_kept_behind_its_send() {
        for len in 0..=MAX_INFO {
            let info: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
            let mut slots = Vec::new();
            record_info(&mut slots, Descriptor { op: Op::Send, ..Descriptor::default() }, &info, false);
            assert_eq!(slots.len(), 1 + info_slots(len));
            let mut back = [0; MAX_INFO];
            assert_eq!(read_info(&slots[1..], len, &mut back), len);
            assert_eq!(back[..len], info[..]);
        }
    }
}
