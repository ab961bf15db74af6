//! Copies past the caches: stores that say so spare reading the target before, and push nothing out.

use super::{LINE, half, has_wide, short};
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

/// # Safety
/// Both ranges must be valid for `len` bytes, at least two cache lines; the processor must have what the loop over the lines
/// needs.
pub(super) unsafe fn copy_by(
    stream: unsafe fn(*mut u8, *const u8, usize),
    to: *mut u8,
    from: *const u8,
    len: usize,
) {
    // SAFETY: the head is shorter than a line, and the range longer; the lines behind it are aligned in the target, and whole;
    // the rest is shorter than a line.
    unsafe {
        let head = to.align_offset(LINE);
        short(to, from, head);
        let lines = (len - head) / LINE;
        let (to, from) = (to.add(head), from.add(head));
        stream(to, from, lines);
        let done = lines * LINE;
        short(to.add(done), from.add(done), len - head - done);
    }
}

/// # Safety
/// Both ranges must be valid for `lines` lines, at least one, and the target be aligned to them; the processor must have
/// AVX-512.
pub(super) unsafe fn wide(to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: every access is at an offset below that of the end. The fence orders the stores before all later ones, as
    // others are.
    unsafe {
        asm!(
            "2:",
            "vmovdqu64 zmm16, [{from} + {at}]",
            "vmovntdq [{to} + {at}], zmm16",
            "add {at}, 64",
            "cmp {at}, {end}",
            "jb 2b",
            "sfence",
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0usize => _,
            end = in(reg) lines * LINE,
            out("zmm16") _,
            options(nostack)
        );
    }
}

/// # Safety
/// Both ranges must be valid for `lines` lines, at least one, and the target be aligned to them.
pub(super) unsafe fn narrow(to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: as in `wide`.
    unsafe {
        asm!(
            "2:",
            "movdqu {a}, [{from} + {at}]",
            "movdqu {b}, [{from} + {at} + 16]",
            "movdqu {c}, [{from} + {at} + 32]",
            "movdqu {d}, [{from} + {at} + 48]",
            "movntdq [{to} + {at}], {a}",
            "movntdq [{to} + {at} + 16], {b}",
            "movntdq [{to} + {at} + 32], {c}",
            "movntdq [{to} + {at} + 48], {d}",
            "add {at}, 64",
            "cmp {at}, {end}",
            "jb 2b",
            "sfence",
            from = in(reg) from,
            to = in(reg) to,
            at = inout(reg) 0usize => _,
            end = in(reg) lines * LINE,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack)
        );
    }
}
