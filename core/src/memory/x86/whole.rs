//! Aligned words of shared memory are moved as a whole (W02): to those who look at a target meanwhile, and out of a source that
//! changes.

use super::super::copy::{copy_from_shared, copy_to_fresh, copy_to_shared};
use super::*;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

type Loop = unsafe fn(*mut u8, *const u8, usize);

/// All of them that may have to do with words which others look at.
fn loops() -> Vec<(&'static str, Loop)> {
    let mut loops: Vec<(&'static str, Loop)> = vec![
        ("copy", copy),
        ("copy_to_shared", super::copy_to_shared),
        ("copy_to_reader", super::copy_to_reader),
        ("copy_to_fresh", super::copy_to_fresh),
        ("copy_narrow", copy_narrow),
    ];
    if has_wide() {
        loops.push(("copy_wide", copy_wide));
    }
    if half::is_there() {
        loops.push(("half::copy", half::copy));
    }
    loops
}

/// Words all of whose bytes are equal, and change meanwhile.
const FIRST: u64 = 0x1111_1111_1111_1111;
const SECOND: u64 = 0xeeee_eeee_eeee_eeee;
const WORDS: usize = 5003;

fn is_whole(word: u64) -> bool {
    word == FIRST || word == SECOND
}

/// Calls `copy` with each loop, each way in which the words of one side may lie differently, and numbers of words, until it
/// finds a word of which a part was moved; as often as makes some megabytes.
fn find_torn(
    begin: &AtomicUsize,
    mut copy: impl FnMut(Loop, usize, usize, usize) -> bool,
) -> Option<(&'static str, usize, usize)> {
    for (name, by) in loops() {
        for shift in 0..8 {
            for words in [8, 9, 20, 37, 256, 300, 520, WORDS] {
                begin.store(words, Ordering::Relaxed);
                if (0..600_000 / words).any(|round| copy(by, shift, words, round)) {
                    return Some((name, shift, words));
                }
            }
        }
    }
    None
}

#[test]
fn words_of_a_target_are_never_seen_in_parts() {
    let target: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(FIRST)).collect();
    let sources = [FIRST, SECOND].map(|word| vec![word as u8; WORDS * 8 + 8]);
    let (current, looks) = (AtomicUsize::new(1), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            loop {
                let words = current.load(Ordering::Relaxed);
                let is_torn = |word: &AtomicU64| !is_whole(word.load(Ordering::Relaxed));
                if words == 0 || target[..words].iter().any(is_torn) {
                    return words > 0;
                }
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
        while looks.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let torn = find_torn(&current, |copy, shift, words, round| {
            let to = target.as_ptr().cast::<u8>().cast_mut();
            // SAFETY: inside both; of the target's words others make atomic loads only.
            unsafe { copy(to, sources[round % 2].as_ptr().add(shift), words * 8) };
            round % 16 == 0 && watcher.is_finished()
        });
        current.store(0, Ordering::Relaxed);
        let seen = watcher.join().expect("no panic");
        assert!(torn.is_none() && !seen, "a part of a word: {torn:?}");
    });
}

#[test]
fn words_of_a_source_are_never_taken_in_parts() {
    let source: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(FIRST)).collect();
    let (current, rounds) = (AtomicUsize::new(1), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for word in [SECOND, FIRST].into_iter().cycle() {
                let words = current.load(Ordering::Relaxed);
                source[..words].iter().for_each(|at| at.store(word, Ordering::Relaxed));
                if words == 0 {
                    break;
                }
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        while rounds.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let mut target = vec![0u8; WORDS * 8 + 8];
        let torn = find_torn(&current, |copy, shift, words, _| {
            // SAFETY: inside both; of the source's words others make atomic stores only.
            unsafe { copy(target.as_mut_ptr().add(shift), source.as_ptr().cast(), words * 8) };
            let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight"));
            target[shift..].chunks_exact(8).take(words).any(|bytes| !is_whole(word(bytes)))
        });
        current.store(0, Ordering::Relaxed);
        assert!(torn.is_none(), "a part of a word: {torn:?}");
    });
}

/// The words that [`look_at_words`] looks at, how many they are, and how often it found one that was just stored.
static LOOKED_AT: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
static LOOKED_AT_WORDS: AtomicUsize = AtomicUsize::new(0);
static FOUND: AtomicUsize = AtomicUsize::new(0);

/// Comes behind each instruction, and changes each word that was stored, as another processor's atomic operation might.
extern "C" fn look_at_words(_: libc::c_int) {
    let words = LOOKED_AT.load(Ordering::Relaxed);
    for at in 0..LOOKED_AT_WORDS.load(Ordering::Relaxed) {
        // SAFETY: the words are there as long as this is called, and others make atomic accesses to them only, but for the copy
        // of this very thread, which stands still.
        let word = unsafe { &*words.add(at) };
        if word.compare_exchange(SECOND, FIRST, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            FOUND.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// An atomic operation between two stores of one word would be undone: each word of a target is stored once. Seen by going
/// through the loops instruction by instruction.
#[test]
fn words_of_a_target_are_stored_once() {
    /// Changes the trap flag: while it is set, each instruction is followed by a signal.
    macro_rules! trap {
        ($change:literal) => {
            // SAFETY: pushes and pops the flags; the red zone is spared, as this does not say `nostack`.
            unsafe { asm!("pushfq", $change, "popfq") }
        };
    }
    // SAFETY: a handler that touches atomics only; the old one comes back at the end.
    let before = unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = look_at_words as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGTRAP, &action, &mut before), 0);
        before
    };
    let target: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
    let source = [SECOND as u8; 64 * 8];
    let (mut copies, mut wrong) = (0, Vec::new());
    let blocks: [(&str, Loop); 2] = [("copy_block", copy_block), ("short", short)];
    for (name, by) in loops().into_iter().chain(blocks) {
        let words = match name {
            "copy_block" => 1..45,
            "short" => 1..9,
            _ => 8..45,
        };
        for words in words {
            for (place, shift) in [(0, 0), (1, 1), (3, 5), (4, 0), (7, 3)] {
                target.iter().for_each(|word| word.store(0, Ordering::Relaxed));
                FOUND.store(0, Ordering::Relaxed);
                LOOKED_AT.store(target[place..].as_ptr().cast_mut(), Ordering::Relaxed);
                LOOKED_AT_WORDS.store(words, Ordering::Relaxed);
                let (to, from) = (target[place..].as_ptr().cast::<u8>().cast_mut(), source[shift..].as_ptr());
                trap!("or qword ptr [rsp], 0x100");
                // SAFETY: inside both; nobody else looks at the words but the handler.
                unsafe { by(to, from, words * 8) };
                trap!("and qword ptr [rsp], -0x101");
                LOOKED_AT_WORDS.store(0, Ordering::Relaxed);
                copies += 1;
                let found = FOUND.load(Ordering::Relaxed);
                if found != words {
                    wrong.push((name, words, place, shift, found));
                }
            }
        }
    }
    // SAFETY: what was there before.
    assert_eq!(unsafe { libc::sigaction(libc::SIGTRAP, &before, std::ptr::null_mut()) }, 0);
    assert!(wrong.is_empty(), "stored otherwise than once in {} of {copies}: {wrong:?}", wrong.len());
}

/// Ranges that begin and end within words: those between are whole, to readers of a target and to those who copy out of a
/// source that changes.
#[test]
fn ranges_that_begin_within_a_word_divide_none_behind_it() {
    let shared: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(FIRST)).collect();
    let sources = [FIRST, SECOND].map(|word| vec![word as u8; WORDS * 8]);
    let is_torn = |word: u64| !is_whole(word);
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
