//! Memory that other processes may write at any time, and the only routines that touch its bytes.
//!
//! No `&[u8]` or `&mut [u8]` to such memory is ever made. Up to 64 bytes are copied as relaxed atomic words (so
//! that aligned 8-byte accesses are never torn); longer runs go through inline assembly on x86-64, which the compiler
//! cannot reason about: a wide loop, `rep movsb` from where that is faster (2 KiB to memory that others read, and 2 to
//! 32 KiB elsewhere), and from 8 MiB on stores past the caches; elsewhere, and under loom, a loop of words does all. On x86-64
//! every aligned word of shared memory that a copy covers is moved as a whole, but for blocks that are strided.
#![allow(unsafe_code)]

mod atomic;
mod copy;
mod huge;
#[cfg(unix)]
mod io;
mod recent;
mod strided;
mod view;
mod words;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use atomic::{AtomicOp, WordLen, WordOp};
pub use huge::HUGE_PAGE;
pub(crate) use huge::expect_all_of;
#[cfg(unix)]
pub use io::{MOST_HEADED, MOST_PARTS, read_behind, read_scattered, write_headed};
pub use recent::fetch_recent;
pub use strided::{Blocks, Piece, Rows, Source, Target};
pub use view::{LeasedPage, LoanedPage};
pub use words::{SharedWords, Words};

use copy::{copy_from_shared, copy_shared, copy_to_fresh, copy_to_near, copy_to_reader, copy_to_shared};

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zerocopy::{FromBytes, IntoBytes};

/// A range of shared memory that stays mapped for the rest of the process (mappings are kept once made, V05).
///
/// Other processes may read and write it at any time; every access is made of relaxed atomic accesses or of
/// assembly, so that a concurrent writer can change the *values* seen here and nothing else.
///
/// # Examples
/// ```
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::{ClientId, JobShape, Rank};
///
/// // Memory of a device: of another process as a rule, here of this one.
/// let fabric = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
/// let device = fabric.device(ClientId(0), Rank(0));
/// let own = device.allocate(4096)?;
/// let memory = device.map(Rank(0), own.offset, own.len).expect("this device maps it");
/// memory.write(b"copied in");
/// memory.write_u64(64, 42);
/// let part = memory.slice(7, 2).expect("it is inside");
/// assert_eq!((part.to_vec(), memory.read_u64(64)), (b"in".to_vec(), 42));
/// assert!(memory.slice(4096, 1).is_none());
/// # device.free(own);
/// # Ok::<(), posthaste_core::MemoryError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SharedSlice {
    base: *mut u8,
    len: usize,
}

// SAFETY: the range is plain memory that is valid for the rest of the process and is accessed atomically only.
unsafe impl Send for SharedSlice {}
// SAFETY: as above.
unsafe impl Sync for SharedSlice {}

impl SharedSlice {
    /// An empty slice.
    pub const EMPTY: SharedSlice = SharedSlice { base: std::ptr::null_mut(), len: 0 };

    /// Names a range of shared memory.
    ///
    /// # Safety
    /// `base..base + len` must be mapped readable and writable until the process ends, and must never be
    /// accessed through references to non-atomic types.
    #[must_use]
    pub const unsafe fn from_raw(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the slice has no bytes.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of the slice; `None` if it is not inside.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        if offset <= self.len as u64 && len <= self.len as u64 - offset {
            // SAFETY: offset <= self.len, so the result is inside the range or one past its end.
            Some(SharedSlice { base: unsafe { self.base.add(offset as usize) }, len: len as usize })
        } else {
            None
        }
    }

    /// How many bytes the slice begins behind the beginning of another one of the same memory.
    #[must_use]
    pub fn distance_behind(&self, whole: &SharedSlice) -> u64 {
        (self.base as u64).wrapping_sub(whole.base as u64)
    }

    #[inline]
    fn word(&self, offset: usize) -> &AtomicU64 {
        // As sums, offsets close to the end of all numbers would pass for small ones.
        let inside = self.len >= 8 && offset <= self.len - 8;
        assert!(
            inside && (self.base as usize).wrapping_add(offset).is_multiple_of(8),
            "word access out of range"
        );
        // SAFETY: in range and aligned (checked above), mapped for the rest of the process, accessed atomically only.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// The slice as one word, if it is an aligned one.
    #[inline(always)]
    fn whole_word(&self) -> Option<&AtomicU64> {
        let is_word = self.len == 8 && (self.base as usize).is_multiple_of(8);
        // SAFETY: eight bytes, aligned (checked above), mapped for the rest of the process, accessed atomically only.
        is_word.then(|| unsafe { AtomicU64::from_ptr(self.base.cast()) })
    }

    /// The slice as one word of 32 bits, if it is an aligned one.
    #[inline(always)]
    fn whole_half(&self) -> Option<&AtomicU32> {
        let is_half = self.len == 4 && (self.base as usize).is_multiple_of(4);
        // SAFETY: four bytes, aligned (checked above), mapped for the rest of the process. Accesses to the same bytes as
        // parts of longer words are atomic, too: other processes make them in any case.
        is_half.then(|| unsafe { AtomicU32::from_ptr(self.base.cast()) })
    }

    /// Reads an aligned 64-bit word, relaxed. The offset is in bytes.
    ///
    /// # Panics
    /// If the word is not inside or not aligned to 8.
    #[inline]
    #[must_use]
    pub fn read_u64(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Relaxed)
    }

    /// The same; `None` if the word is not inside or not aligned.
    #[inline]
    #[must_use]
    pub fn try_read_u64(&self, offset: u64) -> Option<u64> {
        let inside = self.len >= 8 && offset <= self.len as u64 - 8;
        if !inside || !(self.base as usize).wrapping_add(offset as usize).is_multiple_of(8) {
            return None;
        }
        Some(self.word(offset as usize).load(Ordering::Relaxed))
    }

    /// Writes an aligned 64-bit word, relaxed. The offset is in bytes.
    ///
    /// # Panics
    /// If the word is not inside or not aligned to 8.
    #[inline]
    pub fn write_u64(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    /// An aligned word as an atomic, for protocols that order their accesses themselves.
    ///
    /// # Panics
    /// If the word is not inside or not aligned to 8.
    #[inline]
    #[must_use]
    pub fn atomic(&self, offset: usize) -> &AtomicU64 {
        self.word(offset)
    }

    /// As [`write`](Self::write), where the caches that this processor has for itself are the reader's, too.
    ///
    /// # Panics
    /// If the slice is shorter than the bytes.
    #[inline]
    pub fn write_near(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "write past the end of shared memory");
        // SAFETY: both ranges are valid for bytes.len(); the source is private, so they cannot overlap.
        unsafe { copy_to_near(self.base, bytes.as_ptr(), bytes.len()) }
    }

    /// As [`write`](Self::write), where another processor has read what lay here before, and reads this next.
    ///
    /// # Panics
    /// If the slice is shorter than the bytes.
    #[inline]
    pub fn write_to_reader(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "write past the end of shared memory");
        // SAFETY: both ranges are valid for bytes.len(); the source is private, so they cannot overlap.
        unsafe { copy_to_reader(self.base, bytes.as_ptr(), bytes.len()) }
    }

    /// Copies private bytes to the start of the slice.
    ///
    /// # Panics
    /// If the slice is shorter than the bytes.
    #[inline]
    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "write past the end of shared memory");
        let target = SharedSlice { base: self.base, len: bytes.len() };
        // Where the length is known and that of a word, nothing else is left of this.
        if let (Ok(word), Some(at)) = (bytes.try_into(), target.whole_word()) {
            return at.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        if let (Ok(half), Some(at)) = (bytes.try_into(), target.whole_half()) {
            return at.store(u32::from_ne_bytes(half), Ordering::Relaxed);
        }
        if matches!(bytes.len(), 4 | 8) {
            return target.write_divided(bytes);
        }
        // SAFETY: both ranges are valid for bytes.len(); the source is private, so they cannot overlap.
        unsafe { copy_to_shared(self.base, bytes.as_ptr(), bytes.len()) }
    }

    /// Copies the start of the slice to private bytes.
    ///
    /// # Panics
    /// If the slice is shorter than the buffer.
    #[inline]
    pub fn read(&self, into: &mut [u8]) {
        assert!(into.len() <= self.len, "read past the end of shared memory");
        let source = SharedSlice { base: self.base, len: into.len() };
        // As for `write`.
        if let (Ok(word), Some(at)) = (<&mut [u8; 8]>::try_from(&mut *into), source.whole_word()) {
            *word = at.load(Ordering::Relaxed).to_ne_bytes();
            return;
        }
        if let (Ok(half), Some(at)) = (<&mut [u8; 4]>::try_from(&mut *into), source.whole_half()) {
            *half = at.load(Ordering::Relaxed).to_ne_bytes();
            return;
        }
        if matches!(into.len(), 4 | 8) {
            return source.read_divided(into);
        }
        // SAFETY: both ranges are valid for into.len(); the target is private, so they cannot overlap.
        unsafe { copy_from_shared(into.as_mut_ptr(), self.base, into.len()) }
    }

    /// As [`write`](Self::write) to a place within a word.
    #[cold]
    #[inline(never)]
    fn write_divided(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "write past the end of shared memory");
        // SAFETY: both ranges are valid for bytes.len(); the source is private, so they cannot overlap.
        unsafe { copy_to_shared(self.base, bytes.as_ptr(), bytes.len()) }
    }

    /// As [`read`](Self::read) from a place within a word.
    #[cold]
    #[inline(never)]
    fn read_divided(&self, into: &mut [u8]) {
        assert!(into.len() <= self.len, "read past the end of shared memory");
        // SAFETY: both ranges are valid for into.len(); the target is private, so they cannot overlap.
        unsafe { copy_from_shared(into.as_mut_ptr(), self.base, into.len()) }
    }

    /// Copies the whole slice into a new vector.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.append_to(&mut bytes);
        bytes
    }

    /// Appends the whole slice to a vector.
    pub fn append_to(&self, bytes: &mut Vec<u8>) {
        if bytes.capacity() - bytes.len() < self.len {
            bytes.reserve(self.len);
            expect_all_of(bytes);
        }
        let had = bytes.len();
        // SAFETY: there is room for self.len bytes behind the vector's, all of which the copy initialises before set_len.
        unsafe {
            copy_to_fresh(bytes.as_mut_ptr().add(had), self.base, self.len);
            bytes.set_len(had + self.len);
        }
    }

    /// Appends the slice to a vector of plain values; bytes at its end that are less than a value are left out.
    pub fn append_values<T: FromBytes>(&self, values: &mut Vec<T>) {
        let count = self.len / size_of::<T>().max(1);
        values.reserve(count);
        let had = values.len();
        // SAFETY: there is room for that many values behind the vector's, any bytes are such values, and the copy initialises
        // all of them before set_len.
        unsafe {
            copy_from_shared(values.as_mut_ptr().add(had).cast(), self.base, count * size_of::<T>());
            values.set_len(had + count);
        }
    }

    /// Copies from another slice of shared memory of the same length. Overlapping ranges give unspecified bytes.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_from(&self, source: SharedSlice) {
        assert_eq!(self.len, source.len, "shared copy of different lengths");
        if self.len == 8 && (self.base as usize | source.base as usize).is_multiple_of(8) {
            self.word(0).store(source.word(0).load(Ordering::Relaxed), Ordering::Relaxed);
            return;
        }
        // SAFETY: both ranges are valid for self.len bytes.
        unsafe { copy_shared(self.base, source.base, self.len) }
    }

    /// Copies `len` bytes from `source` at `from` to this slice at `at`; false, and nothing is copied, if that is not
    /// inside both.
    #[inline(always)]
    pub fn transfer(&self, at: u64, source: &SharedSlice, from: u64, len: u64) -> bool {
        let inside =
            |offset: u64, slice: &SharedSlice| offset <= slice.len as u64 && len <= slice.len as u64 - offset;
        if !inside(at, self) || !inside(from, source) {
            return false;
        }
        // SAFETY: both offsets are inside their slices, with len bytes behind them (checked above); words are accessed
        // only where both are aligned, and atomically.
        unsafe {
            let (to, from) = (self.base.add(at as usize), source.base.add(from as usize));
            if len == 8 && (to as usize | from as usize).is_multiple_of(8) {
                let word = AtomicU64::from_ptr(from.cast()).load(Ordering::Relaxed);
                AtomicU64::from_ptr(to.cast()).store(word, Ordering::Relaxed);
            } else {
                copy_shared(to, from, len as usize);
            }
        }
        true
    }

    /// Copies single words from `source`, for those who copy many: the ranges are looked at once. `None` if one of the
    /// slices has no aligned word at its start.
    #[inline]
    #[must_use]
    pub fn words_from(&self, source: &SharedSlice) -> Option<WordCopier> {
        let aligned = (self.base as usize | source.base as usize).is_multiple_of(8);
        let (last, source_last) = (self.len.checked_sub(8)?, source.len.checked_sub(8)?);
        aligned.then_some(WordCopier {
            to: self.base,
            from: source.base,
            last: last as u64,
            source_last: source_last as u64,
        })
    }

    /// Folds all whole 64-bit words of the slice (relaxed loads), then the last 0 to 7 bytes as one word filled
    /// up with zeros. The slice must start at a multiple of 8, which pages, windows and regions do.
    ///
    /// # Panics
    /// If the slice does not start at a multiple of 8.
    pub fn fold_words<A>(&self, init: A, mut f: impl FnMut(A, u64) -> A) -> A {
        assert!((self.base as usize).is_multiple_of(8), "folding words of an unaligned slice");
        let mut acc = init;
        let words = self.len / 8;
        for index in 0..words {
            // SAFETY: index < words, so the word is inside; alignment was checked; accessed atomically only.
            let word = unsafe { AtomicU64::from_ptr(self.base.cast::<u64>().add(index)) };
            acc = f(acc, word.load(Ordering::Relaxed));
        }
        let rest = self.len % 8;
        if rest > 0 {
            let mut last = [0u8; 8];
            if let Some(tail) = self.slice((words * 8) as u64, rest as u64) {
                tail.read(&mut last[..rest]);
            }
            acc = f(acc, u64::from_ne_bytes(last));
        }
        acc
    }

    /// Sums all whole 64-bit words, wrapping; the fast form of [`fold_words`](Self::fold_words) for checksums.
    ///
    /// # Panics
    /// If the slice does not start at a multiple of 8.
    #[must_use]
    pub fn sum_words(&self) -> u64 {
        assert!((self.base as usize).is_multiple_of(8), "summing words of an unaligned slice");
        let words = self.len / 8;
        let base = self.base.cast::<u64>();
        // SAFETY: `words` words from the base are inside, and are read in assembly.
        #[cfg(target_arch = "x86_64")]
        let (mut sum, mut index) = unsafe { x86::sum(base, words) };
        #[cfg(not(target_arch = "x86_64"))]
        let (mut sum, mut index) = (0u64, 0);
        while index < words {
            // SAFETY: index < words, so the word is inside; aligned; accessed atomically only.
            let word = unsafe { AtomicU64::from_ptr(base.add(index)).load(Ordering::Relaxed) };
            sum = sum.wrapping_add(word);
            index += 1;
        }
        sum
    }

    /// Asks for the first bytes, up to `len` of them, to be fetched into this processor's cache. A hint.
    #[inline]
    pub fn prefetch(&self, len: usize) {
        #[cfg(target_arch = "x86_64")]
        x86::prefetch(self.base, len.min(self.len));
        #[cfg(not(target_arch = "x86_64"))]
        let _ = len;
    }

    /// Asks for the line of the byte at `offset` to be fetched into this processor's cache, to be written. A hint.
    #[inline(always)]
    pub fn prefetch_write(&self, offset: u64) {
        #[cfg(target_arch = "x86_64")]
        if offset < self.len as u64 {
            x86::prefetch_write(self.base.wrapping_add(offset as usize));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// The memory as a slice of elements, to be read and written in place; elements that do not fit whole are left out.
    /// `None` if it is not aligned for them.
    ///
    /// # Safety
    /// As long as the slice lives, nobody else writes or reads any of the memory, by whatever way: no peer puts to it, gets it
    /// or works on it atomically, no other slice or view of it is used here, and the window that it belongs to is not freed.
    /// That is between the ranks of a job, as by a barrier before and one behind; a hostile peer can break it, and then the
    /// behaviour of this process is undefined.
    #[must_use]
    pub unsafe fn as_slice<'m, T: FromBytes + IntoBytes>(&self) -> Option<&'m mut [T]> {
        if !(self.base as usize).is_multiple_of(align_of::<T>()) || size_of::<T>() == 0 {
            return None;
        }
        if self.is_empty() {
            // It may be nowhere.
            return Some(&mut []);
        }
        // SAFETY: aligned for T (checked above), mapped for the rest of the process, of any bit pattern, and nobody else's as the
        // caller promises.
        Some(unsafe { std::slice::from_raw_parts_mut(self.base.cast(), self.len / size_of::<T>()) })
    }

    /// The address, for unsafe access on the caller's own account.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.base
    }
}

/// See [`SharedSlice::words_from`].
#[derive(Clone, Copy, Debug)]
pub struct WordCopier {
    to: *mut u8,
    from: *mut u8,
    /// Where the last whole word begins.
    last: u64,
    source_last: u64,
}

impl WordCopier {
    /// Copies the word at `from` to `at`; false, and nothing is copied, if one of them is not inside or not aligned.
    #[inline(always)]
    pub fn copy(&self, at: u64, from: u64) -> bool {
        if at > self.last || from > self.source_last || (at | from) & 7 != 0 {
            return false;
        }
        // SAFETY: both words are inside their slices and aligned, as are the bases (checked when this was made); the
        // slices stay mapped for the rest of the process; the accesses are atomic.
        unsafe {
            let word = AtomicU64::from_ptr(self.from.add(from as usize).cast()).load(Ordering::Relaxed);
            AtomicU64::from_ptr(self.to.add(at as usize).cast()).store(word, Ordering::Relaxed);
        }
        true
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::huge::HUGE_MIN;
    use super::*;

    fn leaked(len: usize) -> SharedSlice {
        let words: &'static mut [u64] = vec![0u64; len.div_ceil(8)].leak();
        // SAFETY: leaked memory is valid until the process ends and is used through the slice only.
        unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), len) }
    }

    #[test]
    fn copies_every_length_at_every_alignment() {
        let shared = leaked(1200);
        let other = leaked(1200);
        let data: Vec<u8> = (0..1100u32).map(|i| (i * 7 + 3) as u8).collect();
        for offset in 0..9u64 {
            for len in (0..140).chain([255, 256, 257, 1000]) {
                let target = shared.slice(offset, len).expect("inside");
                target.write(&data[..len as usize]);
                assert_eq!(target.to_vec(), &data[..len as usize], "write {offset} {len}");
                let mut back = vec![0; len as usize];
                target.read(&mut back);
                assert_eq!(back, &data[..len as usize]);
                let copy = other.slice(9 - offset, len).expect("inside");
                copy.copy_from(target);
                assert_eq!(copy.to_vec(), back);
            }
        }
    }

    #[test]
    fn long_copies_are_whole_and_vectors_that_grow_keep_what_they_have() {
        let len = 2 * HUGE_MIN + 4321;
        let data: Vec<u8> = (0..len).map(|i| (i * 7 + i / 255) as u8).collect();
        let shared = leaked(len);
        shared.write(&data);
        let mut bytes = vec![1, 2, 3];
        for times in 1..=2 {
            shared.append_to(&mut bytes);
            assert!(bytes.len() == 3 + times * len && bytes[..3] == [1, 2, 3]);
            assert!(bytes[3..].chunks(len).all(|part| part == data), "{times}");
        }
        let mut back = vec![0; len];
        shared.read(&mut back);
        assert!(back == data);
    }

    #[test]
    fn descriptors_are_read_to_and_written_from_in_place() {
        use std::io::{Read, Write};
        let (near, mut far) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let shared = leaked(64);
        let mut behind = [0; 3];
        far.write_all(b"0123456789").expect("room");
        assert_eq!(shared.slice(3, 7).expect("inside").read_from(&mut [], &near).expect("it is there"), 7);
        assert_eq!(shared.slice(0, 12).expect("inside").to_vec(), b"\0\0\x000123456\0\0");
        assert_eq!(shared.read_from(&mut behind, &near).expect("the rest"), 3);
        let first = (&b"ab"[..], shared.slice(0, 7).expect("inside"));
        assert_eq!(write_headed([first].into_iter(), &near).expect("room"), 9);
        let mut back = [0; 9];
        far.read_exact(&mut back).expect("it is there");
        assert_eq!(&back, b"ab7890123");
        far.write_all(b"0123456789").expect("room");
        assert_eq!(shared.slice(60, 4).expect("inside").read_from(&mut behind, &near).expect("both"), 7);
        assert_eq!((shared.slice(60, 4).expect("inside").to_vec(), &behind), (b"0123".to_vec(), b"456"));
        assert_eq!(shared.slice(0, 9).expect("inside").read_from(&mut behind, &near).expect("the rest"), 3);
        let parts = [(30, 2), (40, 0), (20, 3), (50, 9)]
            .map(|(offset, len)| shared.slice(offset, len).expect("inside"));
        for (sent, whole) in [("abcdefgh", "fgh\0\0\0\0\0\0"), ("ABCDEFGHIJKLMNOP", "FGHIJKLMN")] {
            far.write_all(sent.as_bytes()).expect("room");
            assert_eq!(read_scattered(&parts, &mut behind, &near).expect("it is there"), sent.len());
            let got = parts.each_ref().map(|part| part.to_vec());
            assert_eq!(got, [&sent.as_bytes()[..2], b"", &sent.as_bytes()[2..5], whole.as_bytes()]);
        }
        assert_eq!(&behind, b"OP6");
        near.set_nonblocking(true).expect("it can be");
        let nothing = shared.read_from(&mut behind, &near).expect_err("nothing");
        assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn more_slices_than_the_system_takes_are_read_in_order() {
        use std::io::Write;
        let (near, mut far) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let shared = leaked(MOST_PARTS + 1);
        let sent: Vec<u8> = (0..MOST_PARTS + 4).map(|at| (at * 7) as u8).collect();
        far.write_all(&sent).expect("room");
        let parts: Vec<_> = (0..=MOST_PARTS).map(|at| shared.slice(at as u64, 1).expect("inside")).collect();
        let mut behind = [0; 3];
        assert_eq!(read_scattered(&parts, &mut behind, &near).expect("it is there"), MOST_PARTS);
        assert_eq!(read_scattered(&parts[MOST_PARTS..], &mut behind, &near).expect("the rest"), 4);
        assert!(shared.to_vec() == sent[..=MOST_PARTS] && behind == sent[MOST_PARTS + 1..]);
    }

    #[test]
    fn a_vector_takes_what_it_has_room_for() {
        use std::io::Write;
        let (near, mut far) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        far.write_all(b"0123456789").expect("room");
        let mut bytes = Vec::with_capacity(64);
        let room = bytes.capacity();
        bytes.extend_from_slice(&vec![b'.'; room - 4]);
        let mut behind = *b"---";
        // No room for the limit: what follows belongs to the vector's bytes and must not go elsewhere.
        assert_eq!(read_behind(&mut bytes, 5, &mut behind, &near).expect("it is there"), 4);
        assert_eq!((&bytes[room - 4..], &behind), (&b"0123"[..], b"---"));
        bytes.truncate(1);
        assert_eq!(read_behind(&mut bytes, 4, &mut behind, &near).expect("the rest"), 6);
        assert_eq!((bytes.as_slice(), &behind), (&b".4567"[..], b"89-"));
    }

    #[test]
    #[should_panic(expected = "word access out of range")]
    fn words_in_front_of_a_slice_are_out_of_range() {
        let words = leaked(64).slice(8, 56).expect("inside");
        let index = std::hint::black_box(0_usize);
        words.write_u64((8 * index).wrapping_sub(8), 1);
    }

    #[test]
    fn an_empty_slice_has_no_elements() {
        // SAFETY: nobody has any of its bytes.
        assert_eq!(unsafe { SharedSlice::EMPTY.as_slice::<u64>() }.map(|slice| slice.len()), Some(0));
    }

    #[test]
    fn slices_stay_inside() {
        let shared = leaked(64);
        assert!(shared.slice(0, 64).is_some());
        assert!(shared.slice(64, 0).is_some());
        assert!(shared.slice(65, 0).is_none());
        assert!(shared.slice(1, 64).is_none());
        assert!(shared.slice(u64::MAX, 1).is_none());
        assert!(shared.slice(8, u64::MAX).is_none());
    }

    #[test]
    fn sums_and_folds_agree() {
        let shared = leaked(83);
        let data: Vec<u8> = (0..83u8).collect();
        shared.write(&data);
        let whole = shared.slice(0, 80).expect("inside");
        let folded = whole.fold_words(0u64, |a, w| a.wrapping_add(w));
        assert_eq!(folded, whole.sum_words());
        let mut last = [0; 8];
        last[..3].copy_from_slice(&data[80..]);
        assert_eq!(
            shared.fold_words(0u64, |a, w| a.wrapping_add(w)),
            folded.wrapping_add(u64::from_ne_bytes(last))
        );
    }
}
