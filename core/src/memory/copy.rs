//! The copy routines between private and shared memory.

#[cfg(target_arch = "x86_64")]
use super::x86;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Up to this many bytes a copy is a loop of relaxed words, with aligned halves of words at its ends as a whole; and longer ones,
/// too, but on x86-64.
const WORD_COPY_MAX: usize = 64;

/// Copies `len` bytes of private memory to shared memory.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline]
pub(super) unsafe fn copy_to_shared(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { bulk_to_shared(to, from, len) }
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { words_to_shared(to, from, len) }
}

/// The loop of [`copy_to_shared`], which is all there is to it where nothing in assembly is.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline(always)]
unsafe fn words_to_shared(to: *mut u8, from: *const u8, len: usize) {
    let mut at = 0;
    // SAFETY: at stays below len, within both ranges; shared words and halves are aligned before they are written.
    unsafe {
        while at < len && !(to as usize + at).is_multiple_of(4) {
            AtomicU8::from_ptr(to.add(at)).store(*from.add(at), Ordering::Relaxed);
            at += 1;
        }
        if at + 4 <= len && !(to as usize + at).is_multiple_of(8) {
            let half = from.add(at).cast::<u32>().read_unaligned();
            AtomicU32::from_ptr(to.add(at).cast()).store(half, Ordering::Relaxed);
            at += 4;
        }
        while at + 8 <= len {
            let word = from.add(at).cast::<u64>().read_unaligned();
            AtomicU64::from_ptr(to.add(at).cast()).store(word, Ordering::Relaxed);
            at += 8;
        }
        if at + 4 <= len {
            let half = from.add(at).cast::<u32>().read_unaligned();
            AtomicU32::from_ptr(to.add(at).cast()).store(half, Ordering::Relaxed);
            at += 4;
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
    #[cfg(target_arch = "x86_64")]
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { bulk_from_shared(to, from, len) }
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { words_from_shared(to, from, len) }
}

/// The loop of [`copy_from_shared`].
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline(always)]
unsafe fn words_from_shared(to: *mut u8, from: *const u8, len: usize) {
    let mut at = 0;
    // SAFETY: at stays below len, within both ranges; shared words and halves are aligned before they are read. The casts
    // to *mut are what `from_ptr` asks for; the memory is writable as shared memory is mapped so.
    unsafe {
        while at < len && !(from as usize + at).is_multiple_of(4) {
            *to.add(at) = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            at += 1;
        }
        if at + 4 <= len && !(from as usize + at).is_multiple_of(8) {
            let half = AtomicU32::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            to.add(at).cast::<u32>().write_unaligned(half);
            at += 4;
        }
        while at + 8 <= len {
            let word = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            to.add(at).cast::<u64>().write_unaligned(word);
            at += 8;
        }
        if at + 4 <= len {
            let half = AtomicU32::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            to.add(at).cast::<u32>().write_unaligned(half);
            at += 4;
        }
        while at < len {
            *to.add(at) = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            at += 1;
        }
    }
}

/// As [`copy_to_shared`], where the reader has the same first caches: no line has to be fetched from elsewhere.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline]
pub(super) unsafe fn copy_to_near(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { by_words(x86::copy, to, to, from, len) }
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { copy_to_shared(to, from, len) }
}

/// As [`copy_to_shared`], where another processor has read what is overwritten, and reads what is written.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap.
#[inline]
pub(super) unsafe fn copy_to_reader(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller.
        unsafe { by_words(x86::copy_to_reader, to, to, from, len) }
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { copy_to_shared(to, from, len) }
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

/// Copies private memory to a ring, where nobody reads a payload before it is whole: the pieces may be of any size.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap; that in the ring must be aligned to words.
#[inline]
pub(super) unsafe fn copy_to_ring(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        if len <= WORD_COPY_MAX { x86::short(to, from, len) } else { bulk(to, from, len) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as promised by the caller.
    unsafe {
        words_to_shared(to, from, len)
    }
}

/// As [`copy_to_ring`], the other way.
///
/// # Safety
/// As for [`copy_to_ring`].
#[inline]
pub(super) unsafe fn copy_from_ring(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as promised by the caller.
    unsafe {
        if len <= WORD_COPY_MAX { x86::short(to, from, len) } else { bulk(to, from, len) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as promised by the caller.
    unsafe {
        words_from_shared(to, from, len)
    }
}

/// Copies between two shared ranges: words, and halves of them at the ends, of both are moved as a whole.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
pub(super) unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    if len > WORD_COPY_MAX {
        // SAFETY: as promised by the caller; overlap changes values only, as the copy is opaque to the compiler, or one of atomic
        // accesses.
        unsafe {
            if !(to as usize ^ from as usize).is_multiple_of(8) {
                return copy_askew(to, from, len);
            }
            #[cfg(target_arch = "x86_64")]
            bulk_to_shared(to, from, len);
            #[cfg(not(target_arch = "x86_64"))]
            words_of_both(to, from, len);
        }
        return;
    }
    let mut staging = [0u8; WORD_COPY_MAX];
    // SAFETY: staging has room for len <= WORD_COPY_MAX bytes and is private.
    unsafe {
        copy_from_shared(staging.as_mut_ptr(), from, len);
        copy_to_shared(to, staging.as_ptr(), len);
    }
}

/// Copies between two shared ranges whose words do not lie alike: what is read up to the end of a word of the source is written
/// up to the end of one of the target, and the rest of it with what is read next.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[cold]
unsafe fn copy_askew(to: *mut u8, from: *const u8, len: usize) {
    // Well within the first cache.
    const BLOCK: usize = 2048;
    let mut staging = [0u8; BLOCK + 8];
    let (mut read, mut written) = (0, 0);
    // The end of the last word that ends no later, unless that is the end of all.
    let end_of_word = |base: usize, upto: usize| if upto == len { len } else { upto - (base + upto) % 8 };
    while written < len {
        let kept = read - written;
        let upto = end_of_word(from as usize, len.min(read + BLOCK));
        // SAFETY: both are inside of their ranges; fewer than 8 bytes are kept, so that the staging, which is private, has room.
        unsafe {
            copy_from_shared(staging.as_mut_ptr().add(kept), from.add(read), upto - read);
            let ready = end_of_word(to as usize, upto);
            copy_to_shared(to.add(written), staging.as_ptr(), ready - written);
            staging.copy_within(ready - written..upto - written, 0);
            (read, written) = (upto, ready);
        }
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

/// A bulk copy that moves the words of the shared range, one of the two, and halves of them at its ends, as a whole: what is
/// before the first word and behind the last goes apart, the others by `copy`, at least `WORD_COPY_MAX` bytes.
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
        // A half of a word comes last in front of the words, and first behind them: it is moved as a whole.
        let odd = head % 4;
        x86::short(to, from, odd);
        x86::short(to.add(odd), from.add(odd), head - odd);
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

/// The loop between two ranges whose words lie alike, both of which others may write meanwhile.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, and begin at the same place within a word.
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline]
unsafe fn words_of_both(to: *mut u8, from: *const u8, len: usize) {
    let mut at = 0;
    // SAFETY: at stays below len, within both ranges; words and halves are accessed where they are aligned, which both are at
    // once.
    unsafe {
        let byte = |at: usize| {
            let value = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            AtomicU8::from_ptr(to.add(at)).store(value, Ordering::Relaxed);
        };
        let half = |at: usize| {
            let value = AtomicU32::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            AtomicU32::from_ptr(to.add(at).cast()).store(value, Ordering::Relaxed);
        };
        while at < len && !(to as usize + at).is_multiple_of(4) {
            byte(at);
            at += 1;
        }
        if at + 4 <= len && !(to as usize + at).is_multiple_of(8) {
            half(at);
            at += 4;
        }
        while at + 8 <= len {
            let value = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            AtomicU64::from_ptr(to.add(at).cast()).store(value, Ordering::Relaxed);
            at += 8;
        }
        if at + 4 <= len {
            half(at);
            at += 4;
        }
        while at < len {
            byte(at);
            at += 1;
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    const FIRST: u32 = 0x1111_1111;
    const SECOND: u32 = 0xeeee_eeee;

    fn is_whole(half: u32) -> bool {
        half == FIRST || half == SECOND
    }

    /// Ranges by beginning and length: one half of a word, and longer ones that begin and end within words.
    fn ranges() -> impl Iterator<Item = (usize, usize)> {
        let lens = [4, 8, 12, 13, 20, 63, 68, 71, 100, 207];
        (0..8).flat_map(move |start| lens.map(|len| (start, len)))
    }

    /// Which halves lie within a range.
    fn halves((start, len): (usize, usize)) -> std::ops::Range<usize> {
        start.div_ceil(4)..(start + len) / 4
    }

    /// What a peer does that writes them.
    fn store_one_after_the_other(halves: &[AtomicU32]) -> bool {
        for value in [SECOND, FIRST] {
            halves.iter().for_each(|half| half.store(value, Ordering::Relaxed));
        }
        true
    }

    /// Copies each range while another thread does something to its halves; whether that was in order.
    fn beside(
        other: impl Fn(&[AtomicU32]) -> bool + Sync,
        mut copy: impl FnMut((usize, usize), &[AtomicU32], usize) -> bool,
    ) {
        for range in ranges() {
            let shared: Vec<AtomicU64> =
                (0..32).map(|_| AtomicU64::new(u64::from(FIRST) << 32 | u64::from(FIRST))).collect();
            // SAFETY: a word has two halves; all accesses are atomic.
            let all = unsafe { std::slice::from_raw_parts(shared.as_ptr().cast::<AtomicU32>(), 64) };
            let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let mut good = true;
                    while good && !ended.load(Ordering::Relaxed) {
                        good = other(&all[halves(range)]);
                        begun.store(true, Ordering::Relaxed);
                    }
                    good
                });
                while !begun.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                let good = (0..4000).all(|round| copy(range, all, round));
                ended.store(true, Ordering::Relaxed);
                let other_good = thread.join().expect("no panic");
                assert!(good && other_good, "a part of a half of a word: {range:?}");
            });
        }
    }

    #[test]
    fn aligned_halves_of_words_are_written_as_a_whole() {
        let sources = [FIRST, SECOND].map(|half| [half as u8; 256]);
        beside(
            |halves| halves.iter().all(|half| is_whole(half.load(Ordering::Relaxed))),
            |(start, len), all, round| {
                let to = all.as_ptr().cast::<u8>().cast_mut();
                // SAFETY: inside both; others make atomic loads only.
                unsafe { copy_to_shared(to.add(start), sources[round % 2].as_ptr(), len) };
                true
            },
        );
    }

    #[test]
    fn aligned_halves_of_words_are_read_as_a_whole() {
        beside(store_one_after_the_other, |(start, len), all, _| {
            let mut target = [0u8; 256];
            // SAFETY: inside both; others make atomic stores only.
            unsafe { copy_from_shared(target.as_mut_ptr(), all.as_ptr().cast::<u8>().add(start), len) };
            halves((start, len)).all(|half| {
                let bytes = &target[half * 4 - start..][..4];
                is_whole(u32::from_ne_bytes(bytes.try_into().expect("four")))
            })
        });
    }

    /// Where nothing is in assembly, long copies are loops, too.
    #[test]
    fn loops_move_halves_of_words_as_a_whole_at_any_length() {
        let sources = [FIRST, SECOND].map(|half| [half as u8; 256]);
        beside(
            |halves| halves.iter().all(|half| is_whole(half.load(Ordering::Relaxed))),
            |(start, len), all, round| {
                let to = all.as_ptr().cast::<u8>().cast_mut();
                // SAFETY: inside both; others make atomic loads only.
                unsafe { words_to_shared(to.add(start), sources[round % 2].as_ptr().add(round % 9), len) };
                true
            },
        );
        let are_whole = |(start, len), begin: usize, target: &[u8]| {
            halves((start, len)).all(|half| {
                let bytes = &target[begin + half * 4 - start..][..4];
                is_whole(u32::from_ne_bytes(bytes.try_into().expect("four")))
            })
        };
        beside(store_one_after_the_other, |(start, len), all, round| {
            let (mut target, begin) = ([0u8; 256], round % 9);
            let from = all.as_ptr().cast::<u8>();
            // SAFETY: inside both; others make atomic stores only.
            unsafe { words_from_shared(target.as_mut_ptr().add(begin), from.add(start), len) };
            are_whole((start, len), begin, &target)
        });
        let mut target = [0u64; 32];
        beside(store_one_after_the_other, |(start, len), all, _| {
            let (from, to) = (all.as_ptr().cast::<u8>(), target.as_mut_ptr().cast::<u8>());
            // SAFETY: inside both, at the same place of a word; others make atomic stores to the source only.
            unsafe { words_of_both(to.add(start), from.add(start), len) };
            let copied: Vec<u8> = target.iter().flat_map(|word| word.to_ne_bytes()).collect();
            are_whole((start, len), start, &copied)
        });
    }

    /// The promise is of words.
    #[test]
    fn loops_move_words_as_a_whole() {
        const WORDS: [u64; 2] = [u64::MAX / 15, u64::MAX / 15 * 14];
        let is_whole = |word: u64| WORDS.contains(&word);
        let shared: Vec<AtomicU64> = (0..20).map(|_| AtomicU64::new(WORDS[0])).collect();
        let sources = WORDS.map(|word| [word; 20]);
        let (base, ended) = (shared.as_ptr().cast::<u8>().cast_mut(), AtomicBool::new(false));
        // Words 1 to 16 are whole in all ranges.
        let place = |round: usize| (round % 8, 137 + round % 16);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let mut good = true;
                while good && !ended.load(Ordering::Relaxed) {
                    good = shared[1..17].iter().all(|word| is_whole(word.load(Ordering::Relaxed)));
                }
                good
            });
            for round in 0..60_000 {
                let (start, len) = place(round);
                let from = sources[round / 7 % 2].as_ptr().cast::<u8>();
                // SAFETY: inside both; others make atomic loads only.
                unsafe {
                    match round % 2 {
                        0 => words_to_shared(base.add(start), from.add(round % 5), len),
                        _ => words_of_both(base.add(start), from.add(start), len),
                    }
                }
            }
            ended.store(true, Ordering::Relaxed);
            assert!(looks.join().expect("no panic"), "a part of a word was written");
        });
        ended.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    for value in WORDS {
                        shared.iter().for_each(|word| word.store(value, Ordering::Relaxed));
                    }
                }
            });
            let mut good = true;
            for round in 0..60_000 {
                let ((start, len), mut target) = (place(round), [0u64; 20]);
                let to = target.as_mut_ptr().cast::<u8>();
                // SAFETY: inside both; others make atomic stores only.
                unsafe {
                    match round % 2 {
                        0 => words_from_shared(to.add(start), base.add(start), len),
                        _ => words_of_both(to.add(start), base.add(start), len),
                    }
                }
                good &= target[1..17].iter().all(|word| is_whole(*word));
            }
            ended.store(true, Ordering::Relaxed);
            assert!(good, "a part of a word was read");
        });
    }

    #[test]
    fn loops_copy_what_they_are_asked_to() {
        let source: Vec<u64> = (0..40_u64).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let bytes: Vec<u8> = source.iter().flat_map(|word| word.to_ne_bytes()).collect();
        type Loop = unsafe fn(*mut u8, *const u8, usize);
        let loops: [(Loop, bool); 3] =
            [(words_to_shared, false), (words_from_shared, false), (words_of_both, true)];
        for (copy, alike) in loops {
            for (len, start, begin) in (0..150)
                .flat_map(|len| (0..8).flat_map(move |start| (0..8).map(move |begin| (len, start, begin))))
            {
                if alike && start != begin {
                    continue;
                }
                let mut target = [0_u64; 40];
                let (from, to) = (source.as_ptr().cast::<u8>(), target.as_mut_ptr().cast::<u8>());
                // SAFETY: inside both, which are this test's own.
                unsafe { copy(to.add(begin), from.add(start), len) };
                let copied: Vec<u8> = target.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert_eq!(copied[begin..begin + len], bytes[start..start + len], "{start} {begin} {len}");
                assert!(copied[..begin].iter().chain(&copied[begin + len..]).all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn halves_of_both_are_moved_as_a_whole_where_they_lie_differently() {
        let mut target: Vec<AtomicU64> = (0..34).map(|_| AtomicU64::new(0)).collect();
        for shift in 1..8 {
            beside(store_one_after_the_other, |(start, len), all, _| {
                let (from, to) = (all.as_ptr().cast::<u8>(), target.as_mut_ptr().cast::<u8>());
                let begin = (start + shift) % 8;
                // SAFETY: inside both; others make atomic stores to the source only, and nobody else has the target.
                unsafe { copy_shared(to.add(begin), from.add(start), len) };
                halves((start, len)).all(|half| {
                    // SAFETY: inside of the target.
                    let half: [u8; 4] =
                        std::array::from_fn(|byte| unsafe { *to.add(begin + half * 4 - start + byte) });
                    is_whole(u32::from_ne_bytes(half))
                })
            });
        }
    }

    #[test]
    fn words_that_lie_differently_are_copied_whatever_their_number() {
        let source: Vec<u64> = (0..1300_u64).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let bytes: Vec<u8> = source.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let lens = (65..90).chain(2030..2075).chain(4080..4130).chain([10_000]);
        for len in lens {
            for (start, begin) in (0..8).flat_map(|start| (0..8).map(move |begin| (start, begin))) {
                let mut target = vec![0_u64; 1300];
                let (from, to) = (source.as_ptr().cast::<u8>(), target.as_mut_ptr().cast::<u8>());
                // SAFETY: inside both, which are this test's own.
                unsafe { copy_shared(to.add(begin), from.add(start), len) };
                let copied: Vec<u8> = target.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert_eq!(copied[begin..begin + len], bytes[start..start + len], "{start} {begin} {len}");
                assert!(copied[..begin].iter().chain(&copied[begin + len..]).all(|byte| *byte == 0));
            }
        }
    }
}
