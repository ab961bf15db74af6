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
        unsafe { by_words(from, to, from, len, |to, from, len| x86::copy_to_fresh(to, from, len)) }
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

/// Copies so that the words of the shared range, one of the two, are moved as a whole: what is before the first of them and behind
/// the last goes apart, the others by `copy`, at least `WORD_COPY_MAX` bytes.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, more than `WORD_COPY_MAX`.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn by_words(
    shared: *const u8,
    to: *mut u8,
    from: *const u8,
    len: usize,
    copy: impl FnOnce(*mut u8, *const u8, usize),
) {
    if (shared as usize | len).is_multiple_of(8) {
        return copy(to, from, len);
    }
    let head = shared.align_offset(8);
    let words = (len - head) / 8 * 8;
    // SAFETY: all parts are inside, as `head` is shorter than a word and `len` longer.
    unsafe {
        x86::short(to, from, head);
        x86::short(to.add(head + words), from.add(head + words), len - head - words);
        let (to, from) = (to.add(head), from.add(head));
        if words < WORD_COPY_MAX { x86::short(to, from, words) } else { copy(to, from, words) }
    }
}

/// The bulk copy to memory that another process reads: whole words of it change as a whole.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, more than `WORD_COPY_MAX`.
#[inline]
unsafe fn bulk_to_shared(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        by_words(to, to, from, len, |to, from, len| x86::copy_to_shared(to, from, len));
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as promised by the caller.
    unsafe {
        bulk(to, from, len)
    }
}

/// The bulk copy from memory that another process writes: whole words of it are seen as a whole.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, more than `WORD_COPY_MAX`.
#[inline]
unsafe fn bulk_from_shared(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        by_words(from, to, from, len, |to, from, len| x86::copy(to, from, len));
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as promised by the caller.
    unsafe {
        bulk(to, from, len)
    }
}

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

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    const FIRST: u64 = 0x1111_1111_1111_1111;
    const SECOND: u64 = 0xeeee_eeee_eeee_eeee;
    const WORDS: usize = 5003;

    /// Ranges that begin and end within words: those between are whole, to readers of a target and to those who copy out of a
    /// source that changes.
    #[test]
    fn ranges_that_begin_within_a_word_divide_none_behind_it() {
        let shared: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(FIRST)).collect();
        let sources = [FIRST, SECOND].map(|word| vec![word as u8; WORDS * 8]);
        let is_torn = |word: u64| word != FIRST && word != SECOND;
        // Words that are looked at, or changed; 0: the end.
        let (current, looks) = (AtomicUsize::new(3), AtomicUsize::new(0));
        let ranges = || {
            let lens = [66, 71, 80, 100, 131, 207, 1001, 3001, 9_999, 40_001];
            (1..8).flat_map(move |start| lens.map(|len| (start, len))).chain([(0, 999), (0, 2_345), (5, 75)])
        };
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                loop {
                    match current.load(Ordering::Relaxed) {
                        0 => return None,
                        words => {
                            let torn = |word: &AtomicU64| is_torn(word.load(Ordering::Relaxed));
                            if let Some(at) = shared[1..words - 1].iter().position(torn) {
                                return Some((words, at));
                            }
                            looks.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
            for (start, len) in ranges() {
                let len = len.min(WORDS * 8 - 16);
                // The words at the ends of the last range are in parts. They are whole again before somebody looks there.
                current.store(3, Ordering::Relaxed);
                let before = looks.load(Ordering::Relaxed);
                while looks.load(Ordering::Relaxed) < before + 2 && !watcher.is_finished() {
                    std::thread::yield_now();
                }
                shared.iter().for_each(|word| word.store(FIRST, Ordering::Relaxed));
                current.store((start + len) / 8, Ordering::Relaxed);
                for round in 0..2_000_000 / len {
                    let to = shared.as_ptr().cast::<u8>().cast_mut();
                    let from = sources[round % 2][round % 8..].as_ptr();
                    // SAFETY: inside both; of the shared words others make atomic loads only.
                    unsafe { copy_to_shared(to.add(start), from, len) };
                }
            }
            current.store(0, Ordering::Relaxed);
            assert_eq!(watcher.join().expect("no panic"), None, "a part of a word of the target");
        });
        current.store(3, Ordering::Relaxed);
        shared.iter().for_each(|word| word.store(FIRST, Ordering::Relaxed));
        let mut torn = None;
        std::thread::scope(|scope| {
            let before = looks.load(Ordering::Relaxed);
            scope.spawn(|| {
                for word in [SECOND, FIRST].into_iter().cycle() {
                    let words = current.load(Ordering::Relaxed);
                    shared[..words].iter().for_each(|at| at.store(word, Ordering::Relaxed));
                    looks.fetch_add(1, Ordering::Relaxed);
                    if words == 0 {
                        return;
                    }
                }
            });
            while looks.load(Ordering::Relaxed) == before {
                std::thread::yield_now();
            }
            let mut target = vec![0u8; WORDS * 8];
            'all: for (start, len) in ranges() {
                let len = len.min(WORDS * 8 - 16);
                current.store((start + len) / 8, Ordering::Relaxed);
                for round in 0..2_000_000 / len {
                    let (to, copy) = (round % 8, [copy_from_shared, copy_to_fresh][round / 8 % 2]);
                    // SAFETY: inside both; of the shared words others make atomic stores only.
                    unsafe { copy(target[to..].as_mut_ptr(), shared.as_ptr().cast::<u8>().add(start), len) };
                    let whole = &target[to + (8 - start) % 8..to + len];
                    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight"));
                    if whole.chunks_exact(8).map(word).any(is_torn) {
                        torn = Some((start, len, round));
                        break 'all;
                    }
                }
            }
            current.store(0, Ordering::Relaxed);
        });
        assert_eq!(torn, None, "a part of a word of the source");
    }
}
