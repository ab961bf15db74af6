//! Shared memory made of loom's atomics, and of cells for payload.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use posthaste_core::memory::Words;
use std::sync::Arc;

/// A range of shared words.
///
/// Bytes that are copied in and out (payload) live in cells: loom fails the model if a copy races with a write, which
/// an honest pair of ends must never do, and which a load of an atomic could not show. Only the words that a model
/// names exist, because each costs time in every execution.
#[derive(Clone, Debug)]
pub struct Memory {
    words: usize,
    in_order: bool,
    atomics: Arc<Vec<(usize, AtomicU64)>>,
    payload: Arc<Payload>,
}

#[derive(Debug, Default)]
struct Payload(Vec<UnsafeCell<u64>>);

// SAFETY: loom's cells are touched under loom's eyes only, which finds every race and fails the model.
unsafe impl Send for Payload {}
// SAFETY: as above.
unsafe impl Sync for Payload {}

impl Memory {
    /// A range of `words` zeroed words of which `atomics` are used one by one; no payload.
    pub fn sparse(words: usize, atomics: &[usize]) -> Self {
        let atomics = atomics.iter().map(|&index| (index, AtomicU64::new(0))).collect();
        Self { words, in_order: false, atomics: Arc::new(atomics), payload: Arc::default() }
    }

    /// A ring of `words` zeroed words.
    pub fn ring(words: usize) -> Self {
        let mut ring = Self::sparse(words, &(0..words).collect::<Vec<_>>());
        ring.payload = Arc::new(Payload((0..words).map(|_| UnsafeCell::new(0)).collect()));
        ring
    }

    /// Makes plain stores take their place behind all that came before.
    ///
    /// loom does not know that a read-modify-write comes right behind what it read: it lets a later blind store of the
    /// thread whose value was taken (`arm`, then `disarm`, with a sender's claim in between) come *before* the claim,
    /// which the language forbids. A model that arms twice would fail for that reason alone.
    pub fn in_order(mut self) -> Self {
        self.in_order = true;
        self
    }

    fn atomic(&self, index: usize) -> &AtomicU64 {
        let found = self.atomics.iter().find(|(at, _)| *at == index);
        &found.unwrap_or_else(|| panic!("word {index} is not in the model")).1
    }
}

impl Words for Memory {
    fn words(&self) -> usize {
        self.words
    }
    fn load(&self, index: usize, order: Ordering) -> u64 {
        if order == Ordering::SeqCst {
            // loom takes a sequentially consistent load for an acquiring one. After a sequentially consistent
            // read-modify-write of the same thread, which is where we use it, the fence says what is missing.
            fence(Ordering::SeqCst);
            return self.atomic(index).load(Ordering::Acquire);
        }
        self.atomic(index).load(order)
    }
    fn store(&self, index: usize, value: u64, order: Ordering) {
        if self.in_order {
            self.atomic(index).swap(value, order);
        } else {
            self.atomic(index).store(value, order);
        }
    }
    fn swap(&self, index: usize, value: u64) -> u64 {
        self.atomic(index).swap(value, Ordering::SeqCst)
    }
    fn compare_exchange(&self, index: usize, current: u64, value: u64) -> u64 {
        let word = self.atomic(index);
        word.compare_exchange(current, value, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|had| had)
    }
    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.atomic(index).fetch_or(bits, Ordering::SeqCst)
    }
    fn write_bytes(&self, index: usize, bytes: &[u8]) {
        for (cell, bytes) in self.payload.0[index..].iter().zip(bytes.chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            // SAFETY: loom fails the model if anybody else is at the cell.
            cell.with_mut(|cell| unsafe { *cell = u64::from_ne_bytes(word) });
        }
    }
    fn read_bytes(&self, index: usize, bytes: &mut [u8]) {
        for (cell, bytes) in self.payload.0[index..].iter().zip(bytes.chunks_mut(8)) {
            // SAFETY: loom fails the model if somebody writes the cell.
            let word = cell.with(|cell| unsafe { *cell });
            bytes.copy_from_slice(&word.to_ne_bytes()[..bytes.len()]);
        }
    }
}

/// Words of the control pages that the code uses, with one page grant.
pub const CONTROL: [usize; 5] = [0, 1, 16, 32, 64];
/// Words of an endpoint's block that the code uses, for up to 64 sources.
pub const BLOCK: [usize; 3] = [0, 1, 8];

/// Fresh control pages and a ring of `words`.
pub fn lane(words: usize) -> (Memory, Memory) {
    (Memory::sparse(128, &CONTROL), Memory::ring(words))
}

/// A fresh block of an endpoint.
pub fn block() -> Memory {
    Memory::sparse(16, &BLOCK)
}
