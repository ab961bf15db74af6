//! The loops over the 32-byte registers of AVX2, for processors without AVX-512.
//!
//! They use registers that other code uses as well, and clear the upper halves behind themselves: that costs nothing where
//! a loop has been run, and spares code of the older kind its penalty on some processors. Hence every one of the sixteen is
//! named as changed.

use super::super::strided::Run;
use super::stream::{AHEAD, BLOCK};
use super::{LINE, alike, short};
use std::arch::asm;

/// `asm!` that may change every vector register.
macro_rules! vectors {
    ($($line:literal,)* ; $($operand:tt)*) => {
        asm!(
            $($line,)*
            "vzeroupper",
            $($operand)*
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack)
        )
    };
}

pub(super) fn is_there() -> bool {
    std::is_x86_feature_detected!("avx2")
}

/// Bytes that one round of the long loop moves.
const ROUND: usize = 128;

/// # Safety
/// Both ranges must be valid for `len` bytes, at least 64; the processor must have AVX2.
#[inline(never)]
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // A store that crosses a line costs two: a long loop begins at the target's next border of 32 bytes. Where words of the
    // source lie differently, that would divide them.
    let head = if len > 2 * ROUND && alike(to, from) { to.align_offset(32) } else { 0 };
    let rounds = (len - head) / ROUND;
    let done = head + rounds * ROUND;
    let line = (len - done) / LINE * LINE;
    // SAFETY: head, rounds, line and rest follow each other and make up the range; the rest is shorter than a line.
    unsafe {
        short(to, from, head);
        if rounds > 0 {
            copy_rounds(to.add(head), from.add(head), rounds);
        }
        if line > 0 {
            copy_line(to.add(done), from.add(done));
        }
        let done = done + line;
        short(to.add(done), from.add(done), len - done);
    }
}

/// # Safety
/// Both addresses must be valid for 64 bytes; the processor must have AVX2.
#[inline]
unsafe fn copy_line(to: *mut u8, from: *const u8) {
    // SAFETY: as promised by the caller.
    unsafe {
        vectors!(
            "vmovdqu ymm0, [{from}]",
            "vmovdqu ymm1, [{from} + 32]",
            "vmovdqu [{to}], ymm0",
            "vmovdqu [{to} + 32], ymm1",
            ;
            from = in(reg) from,
            to = in(reg) to,
        );
    }
}

/// # Safety
/// Both ranges must be valid for so many rounds, at least one; the processor must have AVX2.
unsafe fn copy_rounds(to: *mut u8, from: *const u8, rounds: usize) {
    // SAFETY: every access is at an offset below that of the end.
    unsafe {
        vectors!(
            "2:",
            "vmovdqu ymm0, [{from} + {at}]",
            "vmovdqu ymm1, [{from} + {at} + 32]",
            "vmovdqu ymm2, [{from} + {at} + 64]",
            "vmovdqu ymm3, [{from} + {at} + 96]",
            "vmovdqu [{to} + {at}], ymm0",
            "vmovdqu [{to} + {at} + 32], ymm1",
            "vmovdqu [{to} + {at} + 64], ymm2",
            "vmovdqu [{to} + {at} + 96], ymm3",
            "add {at}, 128",
            "cmp {at}, {end}",
            "jb 2b",
            ;
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0usize => _,
            end = in(reg) rounds * ROUND,
        );
    }
}

/// # Safety
/// Both ranges must be valid for `blocks` blocks, at least one, and the target be aligned to lines; the processor must have
/// AVX2.
pub(super) unsafe fn stream(to: *mut u8, from: *const u8, blocks: usize) {
    // SAFETY: every access is at an offset below that of the end, but for prefetches, which are hints without effect. The
    // fence orders the stores before all later ones, as others are.
    unsafe {
        vectors!(
            "2:",
            "prefetcht0 [{from} + {at} + {ahead}]",
            "prefetcht0 [{from} + {at} + {ahead} + 64]",
            "prefetcht0 [{from} + {at} + {ahead} + 128]",
            "prefetcht0 [{from} + {at} + {ahead} + 192]",
            "vmovdqu ymm0, [{from} + {at}]",
            "vmovdqu ymm1, [{from} + {at} + 32]",
            "vmovdqu ymm2, [{from} + {at} + 64]",
            "vmovdqu ymm3, [{from} + {at} + 96]",
            "vmovdqu ymm4, [{from} + {at} + 128]",
            "vmovdqu ymm5, [{from} + {at} + 160]",
            "vmovdqu ymm6, [{from} + {at} + 192]",
            "vmovdqu ymm7, [{from} + {at} + 224]",
            "vmovntdq [{to} + {at}], ymm0",
            "vmovntdq [{to} + {at} + 32], ymm1",
            "vmovntdq [{to} + {at} + 64], ymm2",
            "vmovntdq [{to} + {at} + 96], ymm3",
            "vmovntdq [{to} + {at} + 128], ymm4",
            "vmovntdq [{to} + {at} + 160], ymm5",
            "vmovntdq [{to} + {at} + 192], ymm6",
            "vmovntdq [{to} + {at} + 224], ymm7",
            "add {at}, 256",
            "cmp {at}, {end}",
            "jb 2b",
            "sfence",
            ;
            ahead = const AHEAD,
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0usize => _,
            end = in(reg) blocks * BLOCK,
        );
    }
}

/// # Safety
/// All blocks must be valid; they have 64 bytes. The processor must have AVX2.
pub(super) unsafe fn blocks_of_lines(run: Run) {
    let Run { to, from, to_stride, from_stride, count, .. } = run;
    if count == 0 {
        return;
    }
    // SAFETY: every access is inside one of the blocks; behind the last one the addresses are not used any more.
    unsafe {
        vectors!(
            "2:",
            "vmovdqu ymm0, [{from}]",
            "vmovdqu ymm1, [{from} + 32]",
            "add {from}, {from_stride}",
            "vmovdqu [{to}], ymm0",
            "vmovdqu [{to} + 32], ymm1",
            "add {to}, {to_stride}",
            "dec {left}",
            "jnz 2b",
            ;
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            from_stride = in(reg) from_stride,
            to_stride = in(reg) to_stride,
            left = inout(reg) count => _,
        );
    }
}

/// # Safety
/// `blocks` blocks of 256 bytes must be readable, at least one; the processor must have AVX2.
pub(super) unsafe fn sum(base: *const u64, blocks: usize) -> u64 {
    let mut lanes = [0u64; 4];
    // SAFETY: reads the blocks and writes the lanes; a prefetch past the end is a hint without effect. The lines come
    // from another processor's cache: they are asked for well ahead.
    unsafe {
        vectors!(
            "vpxor ymm0, ymm0, ymm0",
            "vpxor ymm1, ymm1, ymm1",
            "vpxor ymm2, ymm2, ymm2",
            "vpxor ymm3, ymm3, ymm3",
            "2:",
            "prefetcht0 [{at} + 2048]",
            "prefetcht0 [{at} + 2112]",
            "prefetcht0 [{at} + 2176]",
            "prefetcht0 [{at} + 2240]",
            "vpaddq ymm0, ymm0, [{at}]",
            "vpaddq ymm1, ymm1, [{at} + 32]",
            "vpaddq ymm2, ymm2, [{at} + 64]",
            "vpaddq ymm3, ymm3, [{at} + 96]",
            "vpaddq ymm0, ymm0, [{at} + 128]",
            "vpaddq ymm1, ymm1, [{at} + 160]",
            "vpaddq ymm2, ymm2, [{at} + 192]",
            "vpaddq ymm3, ymm3, [{at} + 224]",
            "add {at}, 256",
            "dec {left}",
            "jnz 2b",
            "vpaddq ymm0, ymm0, ymm1",
            "vpaddq ymm2, ymm2, ymm3",
            "vpaddq ymm0, ymm0, ymm2",
            "vmovdqu [{lanes}], ymm0",
            ;
            at = inout(reg) base => _,
            left = inout(reg) blocks => _,
            lanes = in(reg) lanes.as_mut_ptr(),
        );
    }
    lanes.iter().fold(0, |sum: u64, lane| sum.wrapping_add(*lane))
}
