//! Sums of words.

use super::{half, has_wide};
use std::arch::asm;

/// Bytes that the wide sum takes at once.
const SUM_BLOCK: usize = 256;

/// Sums words, wrapping, as far as whole blocks go: the sum, and the number of words that were summed.
///
/// # Safety
/// `words` words from `base` must be readable.
pub(in super::super) unsafe fn sum(base: *const u64, words: usize) -> (u64, usize) {
    let blocks = words * 8 / SUM_BLOCK;
    if blocks == 0 {
        return (0, 0);
    }
    // SAFETY: blocks of SUM_BLOCK bytes are inside; a loop runs only where its instructions exist.
    let sum = unsafe {
        if has_wide() {
            sum_wide(base, blocks)
        } else if half::is_there() {
            half::sum(base, blocks)
        } else {
            sum_narrow(base, blocks)
        }
    };
    (sum, blocks * SUM_BLOCK / 8)
}

/// # Safety
/// `blocks` blocks of 256 bytes must be readable, at least one; the processor must have AVX-512.
unsafe fn sum_wide(base: *const u64, blocks: usize) -> u64 {
    let mut lanes = [0u64; 8];
    // SAFETY: reads the blocks and writes the lanes; a prefetch past the end is a hint without effect. The lines come
    // from another processor's cache: they are asked for well ahead.
    unsafe {
        asm!(
            "vpxorq zmm16, zmm16, zmm16",
            "vpxorq zmm17, zmm17, zmm17",
            "vpxorq zmm18, zmm18, zmm18",
            "vpxorq zmm19, zmm19, zmm19",
            "2:",
            "prefetcht0 [{at} + 2048]",
            "prefetcht0 [{at} + 2112]",
            "prefetcht0 [{at} + 2176]",
            "prefetcht0 [{at} + 2240]",
            "vpaddq zmm16, zmm16, [{at}]",
            "vpaddq zmm17, zmm17, [{at} + 64]",
            "vpaddq zmm18, zmm18, [{at} + 128]",
            "vpaddq zmm19, zmm19, [{at} + 192]",
            "add {at}, 256",
            "dec {left}",
            "jnz 2b",
            "vpaddq zmm16, zmm16, zmm17",
            "vpaddq zmm18, zmm18, zmm19",
            "vpaddq zmm16, zmm16, zmm18",
            "vmovdqu64 [{lanes}], zmm16",
            at = inout(reg) base => _,
            left = inout(reg) blocks => _,
            lanes = in(reg) lanes.as_mut_ptr(),
            out("zmm16") _,
            out("zmm17") _,
            out("zmm18") _,
            out("zmm19") _,
            options(nostack)
        );
    }
    lanes.iter().fold(0, |sum: u64, lane| sum.wrapping_add(*lane))
}

/// # Safety
/// `blocks` blocks of 256 bytes must be readable, at least one.
pub(super) unsafe fn sum_narrow(base: *const u64, blocks: usize) -> u64 {
    let mut lanes = [0u64; 2];
    // SAFETY: as in `sum_wide`.
    unsafe {
        asm!(
            "pxor {a}, {a}",
            "pxor {b}, {b}",
            "2:",
            "prefetcht0 [{at} + 2048]",
            "movdqu {c}, [{at}]",
            "movdqu {d}, [{at} + 16]",
            "paddq {a}, {c}",
            "paddq {b}, {d}",
            "movdqu {c}, [{at} + 32]",
            "movdqu {d}, [{at} + 48]",
            "paddq {a}, {c}",
            "paddq {b}, {d}",
            "add {at}, 64",
            "dec {left}",
            "jnz 2b",
            "paddq {a}, {b}",
            "movdqu [{lanes}], {a}",
            at = inout(reg) base => _,
            left = inout(reg) blocks * (SUM_BLOCK / 64) => _,
            lanes = in(reg) lanes.as_mut_ptr(),
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack)
        );
    }
    lanes[0].wrapping_add(lanes[1])
}
