//! The copy routines between private and shared memory.

#[cfg(target_arch = "x86_64")]
use super::x86;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Below this many bytes a copy is a loop of relaxed words.
const WORD_COPY_MAX: usize = 64;
/// Copies `len` bytes of private memory to shared memory.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline]
pub(super) unsafe fn copy_to_shared(to: *mut u8, from: *const u8, len: usize) {
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { bulk_to_shared(to, from, len) }
        return;
    }
    let mut at = 0;
    // SAFETY: at stays below len, within both ranges; shared words are aligned before they are written.
    unsafe {
        while at < len && !(to as usize + at).is_multiple_of(8) {
            AtomicU8::from_ptr(to.add(at)).store(*from.add(at), Ordering::Relaxed);
            at += 1;
        }
        while at + 8 <= len {
            let word = from.add(at).cast::<u64>().read_unaligned();
            AtomicU64::from_ptr(to.add(at).cast()).store(word, Ordering::Relaxed);
            at += 8;
        }
        while at < len {
            AtomicU8::from_ptr(to.add(at)).store(*from.add(at), Ordering::Relaxed);
            at += 1;
        }
    }
}

/// Copies `len` bytes of shared memory to private memory.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline]
pub(super) unsafe fn copy_from_shared(to: *mut u8, from: *const u8, len: usize) {
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { bulk_from_shared(to, from, len) }
        return;
    }
    let mut at = 0;
    // SAFETY: at stays below len, within both ranges; shared words are aligned before they are read. The cast to
    // *mut is what `from_ptr` asks for; the memory is writable as shared memory is mapped so.
    unsafe {
        while at < len && !(from as usize + at).is_multiple_of(8) {
            *to.add(at) = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            at += 1;
        }
        while at + 8 <= len {
            let word = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            to.add(at).cast::<u64>().write_unaligned(word);
            at += 8;
        }
        while at < len {
            *to.add(at) = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            at += 1;
        }
    }
}

/// As [`copy_from_shared`], to private memory that was most likely never touched before.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline]
pub(super) unsafe fn copy_to_fresh(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { by_words(x86::copy_to_fresh, from, to, from, len) }
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { copy_from_shared(to, from, len) }
}

/// Copies between private memory and a ring, where nobody reads a payload before it is whole: the pieces may be of any size.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap; that in the ring must be aligned to words.
#[inline]
pub(super) unsafe fn copy_to_or_from_ring(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        if len <= WORD_COPY_MAX { x86::short(to, from, len) } else { bulk(to, from, len) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as promised by the caller. Which of the two is aligned is found out again, byte by byte.
    unsafe {
        bulk(to, from, len)
    }
}

/// Copies between two shared ranges.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
pub(super) unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller; overlap changes values only, as the copy is opaque to the compiler.
        unsafe { bulk_to_shared(to, from, len) }
        return;
    }
    let mut staging = [0u8; WORD_COPY_MAX];
    // SAFETY: staging has room for len <= WORD_COPY_MAX bytes and is private.
    unsafe {
        copy_from_shared(staging.as_mut_ptr(), from, len);
        copy_to_shared(to, staging.as_ptr(), len);
    }
}

/// The bulk copy: one of the two ranges (or both) is shared; more than `WORD_COPY_MAX` bytes.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn bulk(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { x86::copy(to, from, len) }
}

/// A bulk copy that moves the words of the shared range, one of the two, as a whole: what is before the first of them and behind
/// the last goes apart, the others by `copy`, at least `WORD_COPY_MAX` bytes.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, more than `WORD_COPY_MAX`; `copy` must ask for no more of those it is given.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn by_words(
    copy: unsafe fn(*mut u8, *const u8, usize),
    shared: *const u8,
    to: *mut u8,
    from: *const u8,
    len: usize,
) {
    // SAFETY: all parts are inside, as `head` is shorter than a word and `len` longer.
    unsafe {
        if (shared as usize | len).is_multiple_of(8) {
            return copy(to, from, len);
        }
        let head = shared.align_offset(8);
        let words = (len - head) / 8 * 8;
        x86::short(to, from, head);
        x86::short(to.add(head + words), from.add(head + words), len - head - words);
        let (to, from) = (to.add(head), from.add(head));
        if words < WORD_COPY_MAX { x86::short(to, from, words) } else { copy(to, from, words) }
    }
}

/// The bulk copy to memory that another process reads.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, more than `WORD_COPY_MAX`.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn bulk_to_shared(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { by_words(x86::copy_to_shared, to, to, from, len) }
}

/// The bulk copy from memory that another process writes.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, more than `WORD_COPY_MAX`.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn bulk_from_shared(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { by_words(x86::copy, from, to, from, len) }
}

#[cfg(not(target_arch = "x86_64"))]
use {bulk as bulk_from_shared, bulk as bulk_to_shared};

/// The portable bulk copy: relaxed bytes up to the alignment of the target, then relaxed words.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn bulk(to: *mut u8, from: *const u8, len: usize) {
    let mut at = 0;
    // SAFETY: at stays below len, within both ranges; word accesses are made only where both sides are aligned.
    unsafe {
        let byte = |at: usize| {
            let value = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            AtomicU8::from_ptr(to.add(at)).store(value, Ordering::Relaxed);
        };
        while at < len && !(to as usize + at).is_multiple_of(8) {
            byte(at);
            at += 1;
        }
        if (from as usize + at).is_multiple_of(8) {
            while at + 8 <= len {
                let value = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
                AtomicU64::from_ptr(to.add(at).cast()).store(value, Ordering::Relaxed);
                at += 8;
            }
        }
        while at < len {
            byte(at);
            at += 1;
        }
    }
}
