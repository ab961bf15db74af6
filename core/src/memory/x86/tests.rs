//! Every loop does what it says, whatever the processor would choose.

use super::sum::sum_narrow;
use super::*;

unsafe fn copy_past_the_caches(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller; every x86-64 has the narrow loop.
    unsafe { stream::copy_by(stream::narrow, to, from, len) }
}

unsafe fn copy_half_past_the_caches(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller, who has looked at the processor.
    unsafe { stream::copy_by(half::stream, to, from, len) }
}

unsafe fn copy_wide_past_the_caches(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller, who has looked at the processor.
    unsafe { stream::copy_by(stream::wide, to, from, len) }
}

#[test]
fn the_longest_copies_take_every_byte_and_no_other() {
    let len = STREAMED_COPY_MIN + 1000;
    let source: Vec<u8> = (0..len + 7).map(|i| (i * 7 + i / 251) as u8).collect();
    for (shift, less) in [(0, 0), (1, 63), (63, 1), (32, 1000), (8, 1001)] {
        // Words that lie differently, and alike.
        for from in [(shift + 3) % 8, shift % 8] {
            for copy in [copy, copy_to_fresh, copy_to_shared, copy_to_reader] {
                let (len, mut target) = (len - less, vec![0xeeu8; len + 128]);
                // SAFETY: both ranges are inside their vectors.
                unsafe { copy(target.as_mut_ptr().add(shift), source.as_ptr().add(from), len) };
                assert!(target[shift..shift + len] == source[from..from + len], "shift {shift} from {from}");
                assert!(target[..shift].iter().chain(&target[shift + len..]).all(|byte| *byte == 0xee));
            }
        }
    }
}

/// All loops, whatever the processor would choose.
#[test]
fn every_loop_copies_and_sums_alike() {
    let source: Vec<u8> = (0..9000u32).map(|i| (i * 7 + i / 256) as u8).collect();
    let lengths = (64..400).chain([511, 512, 513, 1023, 1024, 1025, 1087, 1343, 2047, 2048, 2049, 8192]);
    // Words that lie differently, and alike.
    let shifts = [(0, 3), (1, 3), (8, 3), (13, 3), (0, 0), (8, 0), (24, 8), (1, 1), (13, 5), (57, 9)];
    for len in lengths {
        for (shift, from) in shifts {
            let mut loops: Vec<unsafe fn(*mut u8, *const u8, usize)> =
                vec![copy_narrow, copy_string, copy, copy_to_shared, copy_to_reader];
            if has_wide() {
                loops.push(copy_wide);
            }
            if half::is_there() {
                loops.push(half::copy);
            }
            if len >= 2 * LINE {
                loops.push(copy_past_the_caches);
                if half::is_there() {
                    loops.push(copy_half_past_the_caches);
                }
                if has_wide() {
                    loops.push(copy_wide_past_the_caches);
                }
            }
            for copy in loops {
                let mut target = vec![0xeeu8; len + 64];
                // SAFETY: both ranges are inside their vectors.
                unsafe { copy(target.as_mut_ptr().add(shift), source.as_ptr().add(from), len) };
                assert_eq!(&target[shift..shift + len], &source[from..from + len]);
                assert!(target[..shift].iter().chain(&target[shift + len..]).all(|byte| *byte == 0xee));
            }
        }
    }
    let words: Vec<u64> = (0..1000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    for count in [0, 1, 31, 32, 33, 64, 100, 511, 512, 1000] {
        // SAFETY: `count` words are inside.
        let (got, took) = unsafe { sum(words.as_ptr(), count) };
        assert!(count - took < 32);
        assert_eq!(got, words[..took].iter().fold(0, |sum: u64, word| sum.wrapping_add(*word)));
        if took > 0 {
            // SAFETY: as above.
            assert_eq!(unsafe { sum_narrow(words.as_ptr(), took / 32) }, got);
            if half::is_there() {
                // SAFETY: as above.
                assert_eq!(unsafe { half::sum(words.as_ptr(), took / 32) }, got);
            }
        }
    }
}
