//! Copies past the caches: stores that say so spare reading the target before, and push nothing out.

use super::{LINE, copy_through, half, has_wide, short};
use std::arch::asm;

/// # Safety
/// Both ranges must be valid for `len` bytes, at least two cache lines.
#[cold]
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    let stream = if has_wide() {
        wide
    } else if half::is_there() {
        half::stream
    } else {
        narrow
    };
    // SAFETY: a loop runs only where its instructions exist.
    unsafe { copy_by(stream, to, from, len) }
}

/// Bytes that are loaded before any of them is stored. Where the source lies a little before the target within its page, a
/// load behind a store looks like one of what is on its way to memory, and waits; so each block has one such load, not each
/// pair of registers.
pub(super) const BLOCK: usize = 256;
/// How far ahead the source is asked for: the processor itself does not look beyond a page of 4 KiB as a rule.
pub(super) const AHEAD: usize = 4096;

/// # Safety
/// Both ranges must be valid for `len` bytes, at least two cache lines; the processor must have what the loop over the blocks
/// needs.
pub(super) unsafe fn copy_by(
    stream: unsafe fn(*mut u8, *const u8, usize),
    to: *mut u8,
    from: *const u8,
    len: usize,
) {
    // SAFETY: the head is shorter than a line, and the range longer; the blocks behind it are aligned to lines in the target,
    // and whole; the rest is what is left, of which more than a line goes through the caches.
    unsafe {
        let head = to.align_offset(LINE);
        short(to, from, head);
        let blocks = (len - head) / BLOCK;
        let (to, from) = (to.add(head), from.add(head));
        if blocks > 0 {
            stream(to, from, blocks);
        }
        let done = blocks * BLOCK;
        let (to, from, left) = (to.add(done), from.add(done), len - head - done);
        if left > LINE { copy_through(to, from, left) } else { short(to, from, left) }
    }
}

/// # Safety
/// Both ranges must be valid for `blocks` blocks, at least one, and the target be aligned to lines; the processor must have
/// AVX-512.
pub(super) unsafe fn wide(to: *mut u8, from: *const u8, blocks: usize) {
    // SAFETY: every access is at an offset below that of the end, but for prefetches, which are hints without effect. The
    // fence orders the stores before all later ones, as others are.
    unsafe {
        asm!(
            "2:",
            "prefetcht0 [{from} + {at} + {ahead}]",
            "prefetcht0 [{from} + {at} + {ahead} + 64]",
            "prefetcht0 [{from} + {at} + {ahead} + 128]",
            "prefetcht0 [{from} + {at} + {ahead} + 192]",
            "vmovdqu64 zmm16, [{from} + {at}]",
            "vmovdqu64 zmm17, [{from} + {at} + 64]",
            "vmovdqu64 zmm18, [{from} + {at} + 128]",
            "vmovdqu64 zmm19, [{from} + {at} + 192]",
            "vmovntdq [{to} + {at}], zmm16",
            "vmovntdq [{to} + {at} + 64], zmm17",
            "vmovntdq [{to} + {at} + 128], zmm18",
            "vmovntdq [{to} + {at} + 192], zmm19",
            "add {at}, 256",
            "cmp {at}, {end}",
            "jb 2b",
            "sfence",
            ahead = const AHEAD,
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0usize => _,
            end = in(reg) blocks * BLOCK,
            out("zmm16") _,
            out("zmm17") _,
            out("zmm18") _,
            out("zmm19") _,
            options(nostack)
        );
    }
}

/// # Safety
/// Both ranges must be valid for `blocks` blocks, at least one, and the target be aligned to lines.
pub(super) unsafe fn narrow(to: *mut u8, from: *const u8, blocks: usize) {
    // SAFETY: as in `wide`. Half a block at a time: a whole one would take all sixteen registers.
    unsafe {
        asm!(
            "2:",
            "prefetcht0 [{from} + {at} + {ahead}]",
            "prefetcht0 [{from} + {at} + {ahead} + 64]",
            "movdqu {a}, [{from} + {at}]",
            "movdqu {b}, [{from} + {at} + 16]",
            "movdqu {c}, [{from} + {at} + 32]",
            "movdqu {d}, [{from} + {at} + 48]",
            "movdqu {e}, [{from} + {at} + 64]",
            "movdqu {f}, [{from} + {at} + 80]",
            "movdqu {g}, [{from} + {at} + 96]",
            "movdqu {h}, [{from} + {at} + 112]",
            "movntdq [{to} + {at}], {a}",
            "movntdq [{to} + {at} + 16], {b}",
            "movntdq [{to} + {at} + 32], {c}",
            "movntdq [{to} + {at} + 48], {d}",
            "movntdq [{to} + {at} + 64], {e}",
            "movntdq [{to} + {at} + 80], {f}",
            "movntdq [{to} + {at} + 96], {g}",
            "movntdq [{to} + {at} + 112], {h}",
            "add {at}, 128",
            "cmp {at}, {end}",
            "jb 2b",
            "sfence",
            ahead = const AHEAD,
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0usize => _,
            end = in(reg) blocks * BLOCK,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            e = out(xmm_reg) _,
            f = out(xmm_reg) _,
            g = out(xmm_reg) _,
            h = out(xmm_reg) _,
            options(nostack)
        );
    }
}
