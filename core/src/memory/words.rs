//! Shared memory as words, which control pages and rings are made of.

use super::SharedSlice;
use super::copy::{copy_from_ring, copy_shared, copy_to_ring};
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of control and ring memory, generic so that loom runs the real ring code over its own atomics.
///
/// Indices are in 8-byte words. Implementations check bounds and panic on a violation: all indices come from
/// this side's own arithmetic, never from what a peer wrote. A clone is the same memory.
pub trait Words: Clone {
    /// Number of words.
    fn words(&self) -> usize;
    /// Reads a word.
    fn load(&self, index: usize, order: Ordering) -> u64;
    /// Writes a word.
    fn store(&self, index: usize, value: u64, order: Ordering);
    /// Replaces a word, sequentially consistent.
    fn swap(&self, index: usize, value: u64) -> u64;
    /// Replaces a word by another value if it has this one, sequentially consistent. Returns what it had.
    fn compare_exchange(&self, index: usize, current: u64, value: u64) -> u64;
    /// Sets bits of a word, sequentially consistent.
    fn fetch_or(&self, index: usize, bits: u64) -> u64;
    /// Copies private bytes to the words from `index` on, relaxed.
    fn write_bytes(&self, index: usize, bytes: &[u8]);
    /// Copies bytes out of the words from `index` on, relaxed.
    fn read_bytes(&self, index: usize, bytes: &mut [u8]);
    /// Copies shared memory to the words from `index` on, relaxed.
    fn write_shared(&self, index: usize, source: SharedSlice) {
        self.write_bytes(index, &source.to_vec());
    }
    /// Asks for the line of a word to be fetched into this processor's cache, to be written. A hint.
    fn prefetch_write(&self, index: usize) {
        let _ = index;
    }
    /// The same, to be read.
    fn prefetch(&self, index: usize) {
        let _ = index;
    }
}

/// Shared memory as aligned words: what rings are made of. One comparison per access.
#[derive(Clone, Copy, Debug)]
pub struct SharedWords {
    base: *mut u64,
    words: usize,
}

// SAFETY: as for `SharedSlice`.
unsafe impl Send for SharedWords {}
// SAFETY: as for `SharedSlice`.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// The whole words of a slice.
    ///
    /// # Panics
    /// If the slice does not start at a multiple of 8.
    #[must_use]
    pub fn new(slice: SharedSlice) -> Self {
        assert!((slice.base as usize).is_multiple_of(8), "words of an unaligned slice");
        Self { base: slice.base.cast(), words: slice.len / 8 }
    }

    #[inline(always)]
    fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word access out of range");
        // SAFETY: in range (checked), aligned (checked by `new`), mapped for the rest of the process, accessed
        // atomically only.
        unsafe { AtomicU64::from_ptr(self.base.add(index)) }
    }

    #[inline(always)]
    fn bytes_at(&self, index: usize, len: usize) -> *mut u8 {
        assert!(index <= self.words && len <= (self.words - index) * 8, "access out of range");
        // SAFETY: index <= words, so the result is inside the range or one past its end.
        unsafe { self.base.add(index).cast() }
    }
}

impl Words for SharedWords {
    #[inline(always)]
    fn words(&self) -> usize {
        self.words
    }
    #[inline(always)]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.at(index).load(order)
    }
    #[inline(always)]
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.at(index).store(value, order);
    }
    #[inline]
    fn swap(&self, index: usize, value: u64) -> u64 {
        self.at(index).swap(value, Ordering::SeqCst)
    }
    #[inline]
    fn compare_exchange(&self, index: usize, current: u64, value: u64) -> u64 {
        let result = self.at(index).compare_exchange(current, value, Ordering::SeqCst, Ordering::SeqCst);
        result.unwrap_or_else(|had| had)
    }
    #[inline]
    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.at(index).fetch_or(bits, Ordering::SeqCst)
    }
    #[inline]
    fn write_bytes(&self, index: usize, bytes: &[u8]) {
        let to = self.bytes_at(index, bytes.len());
        // SAFETY: both ranges are valid for bytes.len(); the source is private, so they cannot overlap.
        unsafe { copy_to_ring(to, bytes.as_ptr(), bytes.len()) }
    }
    #[inline]
    fn read_bytes(&self, index: usize, bytes: &mut [u8]) {
        let from = self.bytes_at(index, bytes.len());
        // SAFETY: both ranges are valid for bytes.len(); the target is private, so they cannot overlap.
        unsafe { copy_from_ring(bytes.as_mut_ptr(), from, bytes.len()) }
    }
    #[inline]
    fn write_shared(&self, index: usize, source: SharedSlice) {
        let to = self.bytes_at(index, source.len);
        // SAFETY: both ranges are valid for source.len bytes.
        unsafe { copy_shared(to, source.base, source.len) }
    }
    #[inline(always)]
    fn prefetch_write(&self, index: usize) {
        let word = self.bytes_at(index, 8);
        #[cfg(target_arch = "x86_64")]
        super::x86::prefetch_write(word);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = word;
    }
    #[inline(always)]
    fn prefetch(&self, index: usize) {
        let word = self.bytes_at(index, 8);
        #[cfg(target_arch = "x86_64")]
        super::x86::prefetch(word, 1);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = word;
    }
}

impl Words for SharedSlice {
    #[inline]
    fn words(&self) -> usize {
        self.len / 8
    }
    #[inline]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.word(index * 8).load(order)
    }
    #[inline]
    fn store(&self, index: usize, value: u64, order: Ordering) {
        self.word(index * 8).store(value, order);
    }
    #[inline]
    fn swap(&self, index: usize, value: u64) -> u64 {
        self.word(index * 8).swap(value, Ordering::SeqCst)
    }
    #[inline]
    fn compare_exchange(&self, index: usize, current: u64, value: u64) -> u64 {
        let word = self.word(index * 8);
        word.compare_exchange(current, value, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|had| had)
    }
    #[inline]
    fn fetch_or(&self, index: usize, bits: u64) -> u64 {
        self.word(index * 8).fetch_or(bits, Ordering::SeqCst)
    }
    #[inline]
    fn write_bytes(&self, index: usize, bytes: &[u8]) {
        match self.slice(index as u64 * 8, bytes.len() as u64) {
            Some(slice) => slice.write(bytes),
            None => panic!("write past the end of shared memory"),
        }
    }
    #[inline]
    fn read_bytes(&self, index: usize, bytes: &mut [u8]) {
        match self.slice(index as u64 * 8, bytes.len() as u64) {
            Some(slice) => slice.read(bytes),
            None => panic!("read past the end of shared memory"),
        }
    }
}
