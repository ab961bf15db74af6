//! Memory of the process's own that peers reach through its messager.
//!
//! No device maps such memory or lands anything in it: puts, gets and atomic operations on it are packets to its owner, over
//! sends (D13) whatever the device can, and the owner's engine carries them out under the memory's lock. So the memory is the
//! caller's again as soon as it asks for it, whoever still writes.

use crate::memory::{AtomicOp, Source, WordLen, WordOp};
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The first place of such memory: beyond every device's.
const FIRST: u64 = 1 << 62;
/// Between two of them, at least, so that an access beyond the end of one is none to another; and what a place is a
/// multiple of, so that words in it are aligned as their offsets are.
const APART: u64 = 4096;

/// Whether what a rank names so is exposed memory of that rank, rather than its device's.
#[inline]
#[must_use]
pub const fn is_exposed(place: u64) -> bool {
    place >= FIRST
}

/// Memory behind a lock.
trait Reach: Send + Sync {
    /// Hands out that many bytes from an offset on; false if they are not there, or not any more.
    fn reach(&self, offset: u64, len: usize, access: &mut dyn FnMut(&mut [u8])) -> bool;
}

/// `None` once it was taken back.
struct Slot<T>(Mutex<Option<T>>);

impl<T: AsMut<[u8]> + Send> Reach for Slot<T> {
    fn reach(&self, offset: u64, len: usize, access: &mut dyn FnMut(&mut [u8])) -> bool {
        let mut slot = lock(&self.0);
        let Some(memory) = slot.as_mut() else { return false };
        let Ok(first) = usize::try_from(offset) else { return false };
        // It is the caller's type: what it does must not be the end of the engine.
        let reached = catch_unwind(AssertUnwindSafe(|| {
            let bytes = first.checked_add(len).and_then(|end| memory.as_mut().get_mut(first..end));
            bytes.map(access).is_some()
        }));
        reached.unwrap_or(false)
    }
}

#[derive(Default)]
struct Ranges {
    /// By their first places.
    by_place: BTreeMap<u64, Arc<dyn Reach>>,
    /// What was given away ever, in bytes. Places are not used again: who has an old one names nothing.
    given: u64,
}

/// The exposed memory of one client.
#[derive(Default)]
pub struct Exposed(Mutex<Ranges>);

impl std::fmt::Debug for Exposed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exposed").field("ranges", &lock(&self.0).by_place.len()).finish()
    }
}

impl Exposed {
    /// Exposes memory until what is returned is dropped.
    pub fn add<T: AsMut<[u8]> + Send + 'static>(self: &Arc<Self>, mut memory: T) -> ExposedMemory<T> {
        let len = memory.as_mut().len() as u64;
        let slot = Arc::new(Slot(Mutex::new(Some(memory))));
        let mut ranges = lock(&self.0);
        let place = FIRST + ranges.given;
        ranges.given += (len / APART + 2) * APART;
        ranges.by_place.insert(place, slot.clone());
        drop(ranges);
        ExposedMemory { all: self.clone(), place, len, slot }
    }

    /// Hands out bytes by their place, under the memory's lock; false if they are not there.
    pub fn reach(&self, place: u64, len: usize, access: &mut dyn FnMut(&mut [u8])) -> bool {
        let found = {
            let ranges = lock(&self.0);
            ranges.by_place.range(..=place).next_back().map(|(first, memory)| (place - first, memory.clone()))
        };
        found.is_some_and(|(offset, memory)| memory.reach(offset, len, access))
    }

    /// Copies bytes to a place; false if it is not there.
    pub(crate) fn write(&self, place: u64, source: &Source<'_>) -> bool {
        let len = match source {
            Source::Private(bytes) => bytes.len(),
            Source::Shared(slice) => slice.len(),
        };
        self.reach(place, len, &mut |memory| match source {
            Source::Private(bytes) => memory.copy_from_slice(bytes),
            Source::Shared(slice) => slice.read(memory),
        })
    }

    /// Copies that many bytes from a place.
    pub(crate) fn read(&self, place: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        self.reach(place, len, &mut |memory| bytes.extend_from_slice(memory)).then_some(bytes)
    }

    /// Carries an atomic operation out on the word at a place, and returns the old value; `None` if there is no such word. No
    /// other access comes between, because each is made under the lock.
    pub(crate) fn apply(&self, place: u64, op: &WordOp) -> Option<u64> {
        let mut old = None;
        let there = self.reach(place, op.len.bytes() as usize, &mut |memory| {
            let before = match <[u8; 8]>::try_from(&*memory) {
                Ok(word) => u64::from_ne_bytes(word),
                Err(_) => memory.try_into().map_or(0, |half| u64::from(u32::from_ne_bytes(half))),
            };
            let after = after(before, op);
            match op.len {
                WordLen::Eight => memory.copy_from_slice(&after.to_ne_bytes()),
                WordLen::Four => memory.copy_from_slice(&(after as u32).to_ne_bytes()),
            }
            old = Some(if op.op == AtomicOp::Store { 0 } else { before });
        });
        old.filter(|_| there)
    }
}

/// What an operation makes of a word; the low half counts of one of 32 bits. As [`SharedSlice::apply`] does it.
///
/// [`SharedSlice::apply`]: crate::memory::SharedSlice::apply
fn after(before: u64, op: &WordOp) -> u64 {
    let expected = match op.len {
        WordLen::Four => u64::from(op.expected as u32),
        WordLen::Eight => op.expected,
    };
    match op.op {
        AtomicOp::Load => before,
        AtomicOp::Store | AtomicOp::Swap => op.operand,
        AtomicOp::Add => before.wrapping_add(op.operand),
        AtomicOp::And => before & op.operand,
        AtomicOp::Or => before | op.operand,
        AtomicOp::Xor => before ^ op.operand,
        AtomicOp::CompareSwap if before == expected => op.operand,
        AtomicOp::CompareSwap => before,
    }
}

/// Memory that peers reach through the messager for as long as this lives; see [`Client::expose`](crate::Client::expose).
pub struct ExposedMemory<T> {
    all: Arc<Exposed>,
    place: u64,
    len: u64,
    slot: Arc<Slot<T>>,
}

impl<T> std::fmt::Debug for ExposedMemory<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExposedMemory").field("place", &self.place).field("len", &self.len).finish()
    }
}

impl<T> ExposedMemory<T> {
    /// Its first byte, as this rank names it to its peers.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.place
    }

    /// Length in bytes, when it was exposed.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Works on the memory, while peers' operations on it wait; with them waits whoever is at the context that carries them
    /// out.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        match lock(&self.slot.0).as_mut() {
            Some(memory) => work(memory),
            None => unreachable!("only the end of this takes it back"),
        }
    }

    /// Takes the memory back. What peers do from here on is told them to have failed.
    #[must_use]
    pub fn into_inner(self) -> T {
        match lock(&self.slot.0).take() {
            Some(memory) => memory,
            None => unreachable!("only the end of this takes it back"),
        }
    }
}

impl<T> Drop for ExposedMemory<T> {
    fn drop(&mut self) {
        lock(&self.all.0).by_place.remove(&self.place);
        // Whoever is at it now has the slot, but not the memory.
        let memory = lock(&self.slot.0).take();
        drop(memory);
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::inprocess::InProcessFabric;
    use crate::{ClientId, JobShape, Rank};

    #[test]
    fn what_is_beyond_the_end_or_taken_back_is_not_there() {
        let all = Arc::new(Exposed::default());
        let (first, second) = (all.add(vec![1_u8; 10_000]), all.add([2_u8; 16]));
        assert!(is_exposed(first.place()) && !first.is_empty());
        assert_eq!(all.read(first.place() + 9_990, 10), Some(vec![1; 10]));
        assert_eq!(all.read(first.place() + 9_990, 11), None);
        assert_eq!(all.read(first.place() + 10_001, 0), None, "behind the end");
        assert_eq!(all.read(u64::MAX, 1), None);
        assert_eq!(all.read(FIRST - 1, 1), None);
        assert!(!all.write(second.place(), &Source::Private(&[0; 17])));
        assert!(all.write(second.place() + 15, &Source::Private(&[7])));
        let place = second.place();
        assert_eq!(second.into_inner(), std::array::from_fn(|at| if at == 15 { 7 } else { 2 }));
        assert_eq!(all.read(place, 0), None);
        let third = all.add([3_u8; 16]);
        assert_ne!(third.place(), place, "an old name names nothing new");
    }

    #[test]
    fn a_type_that_panics_or_shrinks_has_no_bytes() {
        struct Moody(Vec<u8>, bool);
        impl AsMut<[u8]> for Moody {
            fn as_mut(&mut self) -> &mut [u8] {
                assert!(!self.1, "in a mood");
                &mut self.0
            }
        }
        let all = Arc::new(Exposed::default());
        let memory = all.add(Moody(vec![5; 8], false));
        assert_eq!(all.read(memory.place(), 8), Some(vec![5; 8]));
        memory.with(|moody| moody.0.truncate(4));
        assert_eq!(all.read(memory.place(), 8), None);
        memory.with(|moody| moody.1 = true);
        assert_eq!(all.read(memory.place(), 4), None);
        memory.with(|moody| moody.1 = false);
        assert_eq!(all.read(memory.place(), 4), Some(vec![5; 4]));
    }

    #[test]
    fn atomic_operations_are_those_of_shared_memory() {
        let all = Arc::new(Exposed::default());
        let memory = all.add(vec![0_u8; 8]);
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let device = InProcessFabric::new(shape).device(ClientId(0), Rank(0));
        let own = device.allocate(8).expect("there is memory");
        let shared = device.map(Rank(0), own.offset, 8).expect("it is mapped");
        let values = [0, 1, 0x1_0000_0001, u64::MAX, 0x8000_0000, 0xffff_ffff];
        for number in 0..8 {
            let kind = AtomicOp::from_number(number).expect("there are eight");
            for len in [WordLen::Four, WordLen::Eight] {
                for (before, operand, expected) in triples(&values) {
                    let op = WordOp { op: kind, len, operand, expected };
                    shared.write_u64(0, before);
                    memory.with(|bytes| bytes.copy_from_slice(&before.to_ne_bytes()));
                    let part = shared.slice(0, len.bytes()).expect("inside");
                    assert_eq!(all.apply(memory.place(), &op), part.apply(&op), "{op:?} of {before:#x}");
                    assert_eq!(memory.with(|bytes| bytes.clone()), shared.to_vec(), "{op:?} of {before:#x}");
                }
            }
        }
        assert_eq!(
            all.apply(
                memory.place() + 4,
                &WordOp { op: AtomicOp::Load, len: WordLen::Eight, operand: 0, expected: 0 }
            ),
            None
        );
    }

    /// All triples.
    fn triples(values: &[u64]) -> Vec<(u64, u64, u64)> {
        let pairs = |a| values.iter().flat_map(move |b| values.iter().map(move |c| (a, *b, *c)));
        values.iter().flat_map(|a| pairs(*a)).collect()
    }
}
