//! Copies and sums in assembly, which the compiler cannot reason about: what a concurrent writer changes is a value.
//!
//! The wide loops use the registers 16 to 31 of AVX-512, which cost other code nothing; processors without it get those
//! over the registers of AVX2, or else over the 16-byte registers that every x86-64 has.
#![allow(unsafe_code)]

mod choice;
mod half;
mod stream;
mod sum;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod whole;

pub(super) use sum::sum;

use super::strided::Run;
use std::arch::asm;

/// From this many bytes on `rep movsb` is as fast as any loop over registers that the processor has for itself, where it says
/// that it is fast at all. (One that does not say so was seen to copy 1 MiB that lies differently in its cache lines at a
/// tenth of its speed.)
const STRING_COPY_MIN: usize = 32 << 10;
/// The same where the ranges lie alike in their cache lines and the loop has the registers of AVX2, or of every x86-64.
const ALIKE_STRING_COPY_MIN: [usize; 2] = [4096, 2048];
/// The same where the ranges lie otherwise in their cache lines and are too long for the second cache: from this many bytes on a
/// loop over the lines of the target is a sixth faster.
const UNLIKE_LOOP_MIN: usize = 512 << 10;
/// The same where another processor has the lines of the target, because it has read them. A loop of stores waits for each
/// line to be fetched before it is overwritten; a string copy says that all of it will be. Measured between two processors
/// that share a cache: 8 KiB at 65 GB/s and not 28; between two that share none, messages of 16 KiB at 24 GB/s and not 6.
const SHARED_STRING_COPY_MIN: usize = 2048;
/// From this many bytes on a copy to memory that another processor reads may go past the caches, where that is found to be much
/// faster.
const READER_CHOICE_MIN: usize = 4 << 10;
/// The same where it is not known whether another processor reads it: to choose takes an eighth of the time of 4 KiB.
const SHARED_CHOICE_MIN: usize = 16 << 10;
/// From this many bytes on a copy may go past the caches: it may push out of them what it wrote first, and then whoever reads it
/// finds it in memory in either case. Stores that say so spare reading the target before.
const STREAMED_COPY_MIN: usize = 8 << 20;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes that one round of the loop over the registers of AVX-512 moves: of one line at a time, 1 KiB took half as long again.
const WIDE_ROUND: usize = 256;
/// From this many bytes on that loop begins with a line of the target: for less, what comes before would take longer.
const WIDE_HEAD_MIN: usize = 2048;

fn has_wide() -> bool {
    std::is_x86_feature_detected!("avx512f")
}

/// Whether a register can be moved in part, by the byte.
#[inline(always)]
fn has_masks() -> bool {
    std::is_x86_feature_detected!("avx512bw") && std::is_x86_feature_detected!("bmi2")
}

fn has_fast_strings() -> bool {
    std::is_x86_feature_detected!("ermsb")
}

/// Whether words of source and target lie alike. Where they do not, pieces that are aligned to the one end within a word of
/// the other, and divide it.
#[inline]
fn alike(to: *const u8, from: *const u8) -> bool {
    (to as usize ^ from as usize).is_multiple_of(8)
}

/// Whether a string copy is fast, and moves words as a whole.
#[inline]
fn may_be_string(to: *const u8, from: *const u8) -> bool {
    alike(to, from) && has_fast_strings()
}

/// Copies `len` bytes, at least 64. Words of a range that begins at a word, and has whole ones only, are moved as a whole, and
/// once: an atomic operation between two stores of one word would be undone.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller; a loop runs only where its instructions exist.
    unsafe {
        if len >= STREAMED_COPY_MIN && alike(to, from) {
            copy_long(to, from, len);
        } else {
            copy_through(to, from, len);
        }
    }
}

/// # Safety
/// Both ranges must be valid for `len` bytes.
#[cold]
unsafe fn copy_long(to: *mut u8, from: *const u8, len: usize) {
    choice::choose(len, |way| match way {
        // SAFETY: as promised by the caller.
        choice::Way::Past => unsafe { stream::copy(to, from, len) },
        // SAFETY: as promised by the caller.
        choice::Way::Through => unsafe { copy_through(to, from, len) },
    });
}

/// The same to memory that another process reads.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
pub(super) unsafe fn copy_to_shared(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        if (SHARED_CHOICE_MIN..STREAMED_COPY_MIN).contains(&len) && alike(to, from) {
            copy_long_to_shared(to, from, len);
        } else if (SHARED_STRING_COPY_MIN..STREAMED_COPY_MIN).contains(&len) && may_be_string(to, from) {
            copy_string(to, from, len);
        } else {
            copy(to, from, len);
        }
    }
}

/// The same to memory that another process has read, and reads next.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
pub(super) unsafe fn copy_to_reader(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        if (READER_CHOICE_MIN..SHARED_CHOICE_MIN).contains(&len) && alike(to, from) {
            copy_long_to_shared(to, from, len);
        } else {
            copy_to_shared(to, from, len);
        }
    }
}

/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline(never)]
unsafe fn copy_long_to_shared(to: *mut u8, from: *const u8, len: usize) {
    choice::choose_shared(len, |way| match way {
        // SAFETY: as promised by the caller.
        choice::Way::Past => unsafe { stream::copy(to, from, len) },
        // SAFETY: as promised by the caller.
        choice::Way::Through if has_fast_strings() => unsafe { copy_string(to, from, len) },
        // SAFETY: as promised by the caller.
        choice::Way::Through => unsafe { copy_through(to, from, len) },
    });
}

/// The same through the caches.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
unsafe fn copy_through(to: *mut u8, from: *const u8, len: usize) {
    let lines_alike = (to as usize ^ from as usize).is_multiple_of(LINE);
    let by_string =
        |least: usize| len >= if lines_alike { least } else { STRING_COPY_MIN } && may_be_string(to, from);
    let by_loop = !lines_alike && len >= UNLIKE_LOOP_MIN;
    // SAFETY: as promised by the caller; a loop runs only where its instructions exist.
    unsafe {
        if has_wide() {
            if !by_loop && by_string(STRING_COPY_MIN) {
                copy_string(to, from, len);
            } else {
                copy_wide(to, from, len);
            }
        } else if half::is_there() {
            if !by_loop && by_string(ALIKE_STRING_COPY_MIN[0]) {
                copy_string(to, from, len)
            } else {
                half::copy(to, from, len)
            }
        } else if by_string(ALIKE_STRING_COPY_MIN[1]) {
            copy_string(to, from, len);
        } else {
            copy_narrow(to, from, len);
        }
    }
}

/// Copies `len` bytes to a target that is not in the caches yet, and may not be wanted there: memory that was just mapped is,
/// since the kernel has cleared it. At least 64 bytes.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
pub(super) unsafe fn copy_to_fresh(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { copy_through(to, from, len) }
}

/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
unsafe fn copy_string(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: copies exactly len bytes between the two valid ranges; the direction flag is clear by the ABI.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
}

/// # Safety
/// Both ranges must be valid for `len` bytes, at least 64; the processor must have AVX-512.
#[inline(always)]
unsafe fn copy_wide(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe { if len < WIDE_ROUND { copy_wide_lines(to, from, len) } else { copy_wide_rounds(to, from, len) } }
}

/// A line at a time.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, at least 64; the processor must have AVX-512.
// The loops are calls: what copies a single word was a third slower where they were built into it.
#[inline(never)]
unsafe fn copy_wide_lines(to: *mut u8, from: *const u8, len: usize) {
    let end = len - len % LINE;
    // SAFETY: every access is of 64 bytes from an offset below `end` on, and behind it of what is left.
    unsafe {
        asm!(
            "xor {at:e}, {at:e}",
            "2:",
            "vmovdqu64 zmm16, [{from} + {at}]",
            "vmovdqu64 [{to} + {at}], zmm16",
            "add {at}, 64",
            "cmp {at}, {end}",
            "jb 2b",
            from = in(reg) from,
            to = in(reg) to,
            end = in(reg) end,
            at = out(reg) _,
            out("zmm16") _,
            options(nostack)
        );
        short(to.add(end), from.add(end), len - end);
    }
}

/// Four lines at a time.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, at least a round; the processor must have AVX-512.
#[inline(never)]
unsafe fn copy_wide_rounds(to: *mut u8, from: *const u8, len: usize) {
    // A store that crosses a line takes as long as two, and more: twice as long in all where each does. Where words of the source
    // lie differently, its pieces would divide them.
    let head = if len >= WIDE_HEAD_MIN && alike(to, from) { to.align_offset(LINE) } else { 0 };
    // SAFETY: the head is shorter than a line, and a round is left behind it; every access of that is of 64 bytes, four from an
    // offset below the end of the rounds on.
    unsafe {
        short(to, from, head);
        let (to, from, len) = (to.add(head), from.add(head), len - head);
        let end = len - len % WIDE_ROUND;
        asm!(
            "xor {at:e}, {at:e}",
            ".p2align 6",
            "2:",
            "vmovdqu64 zmm16, [{from} + {at}]",
            "vmovdqu64 zmm17, [{from} + {at} + 64]",
            "vmovdqu64 zmm18, [{from} + {at} + 128]",
            "vmovdqu64 zmm19, [{from} + {at} + 192]",
            "vmovdqu64 [{to} + {at}], zmm16",
            "vmovdqu64 [{to} + {at} + 64], zmm17",
            "vmovdqu64 [{to} + {at} + 128], zmm18",
            "vmovdqu64 [{to} + {at} + 192], zmm19",
            "add {at}, 256",
            "cmp {at}, {end}",
            "jb 2b",
            from = in(reg) from,
            to = in(reg) to,
            end = in(reg) end,
            at = out(reg) _,
            out("zmm16") _,
            out("zmm17") _,
            out("zmm18") _,
            out("zmm19") _,
            options(nostack)
        );
        let (to, from, len) = (to.add(end), from.add(end), len - end);
        if len < LINE { short(to, from, len) } else { copy_wide_lines(to, from, len) }
    }
}

/// # Safety
/// Both ranges must be valid for `len` bytes, at least 64.
#[inline(never)]
unsafe fn copy_narrow(to: *mut u8, from: *const u8, len: usize) {
    let end = len - len % LINE;
    // SAFETY: every access is within 64 bytes from an offset below `end` on, and behind it of what is left.
    unsafe {
        asm!(
            "xor {at:e}, {at:e}",
            "2:",
            "movdqu {a}, [{from} + {at}]",
            "movdqu {b}, [{from} + {at} + 16]",
            "movdqu {c}, [{from} + {at} + 32]",
            "movdqu {d}, [{from} + {at} + 48]",
            "movdqu [{to} + {at}], {a}",
            "movdqu [{to} + {at} + 16], {b}",
            "movdqu [{to} + {at} + 32], {c}",
            "movdqu [{to} + {at} + 48], {d}",
            "add {at}, 64",
            "cmp {at}, {end}",
            "jb 2b",
            from = in(reg) from,
            to = in(reg) to,
            end = in(reg) end,
            at = out(reg) _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack)
        );
        short(to.add(end), from.add(end), len - end);
    }
}

/// Copies equally long blocks.
///
/// # Safety
/// All blocks must be valid, to be written and to be read.
#[inline]
pub(super) unsafe fn copy_blocks(run: Run) {
    macro_rules! of_length {
        ($($len:literal)*) => {
            match run.len {
                8 => blocks_of_words(run),
                64 if has_wide() => blocks_of_lines(run),
                64 if half::is_there() => half::blocks_of_lines(run),
                $($len => each_block(run, |to, from| short(to, from, $len)),)*
                ..=64 => blocks_of_any_length(run),
                len => each_block(run, |to, from| copy(to, from, len)),
            }
        };
    }
    // SAFETY: as promised by the caller; a loop runs only where its instructions exist.
    unsafe { of_length!(1 2 4 12 16 20 24 28 32 40 48 56) }
}

/// Copies rows of equally long blocks.
///
/// # Safety
/// All blocks must be valid, to be written and to be read.
pub(super) unsafe fn copy_rows(first: Run, rows: usize, to_pitch: isize, from_pitch: isize) {
    let mut row = first;
    // SAFETY: as promised by the caller; behind the last row the addresses are not used any more.
    unsafe {
        if first.len == 8 {
            for _ in 0..rows {
                blocks_of_words(row);
                (row.to, row.from) = (row.to.wrapping_offset(to_pitch), row.from.wrapping_offset(from_pitch));
            }
            return;
        }
        for _ in 0..rows {
            copy_blocks(row);
            (row.to, row.from) = (row.to.wrapping_offset(to_pitch), row.from.wrapping_offset(from_pitch));
        }
    }
}

/// Calls `block` with the addresses of all blocks.
#[inline(always)]
fn each_block(run: Run, mut block: impl FnMut(*mut u8, *const u8)) {
    // Behind the last block the addresses are not used any more.
    let Run { mut to, mut from, to_stride, from_stride, count, .. } = run;
    for _ in 0..count / 4 {
        for _ in 0..4 {
            block(to, from);
            to = to.wrapping_offset(to_stride);
            from = from.wrapping_offset(from_stride);
        }
    }
    for _ in 0..count % 4 {
        block(to, from);
        to = to.wrapping_offset(to_stride);
        from = from.wrapping_offset(from_stride);
    }
}

/// Loads and stores once. Both addresses must be valid for as many bytes as the register has.
macro_rules! piece {
    ($to:expr, $from:expr, $register:ident, $modifier:literal, $mov:literal) => {
        asm!(
            concat!($mov, " {piece", $modifier, "}, [{from}]"),
            concat!($mov, " [{to}], {piece", $modifier, "}"),
            from = in(reg) $from,
            to = in(reg) $to,
            piece = out($register) _,
            options(nostack, preserves_flags)
        )
    };
}

/// Copies up to 64 bytes in pieces of 16, 8, 4, 2 and 1 that do not overlap.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline(always)]
pub(super) unsafe fn short(to: *mut u8, from: *const u8, len: usize) {
    let mut at = 0;
    // SAFETY: `at` is what has been copied, and each piece is not longer than what is left.
    unsafe {
        while at + 16 <= len {
            piece!(to.add(at), from.add(at), xmm_reg, "", "movdqu");
            at += 16;
        }
        if len & 8 != 0 {
            piece!(to.add(at), from.add(at), reg, "", "mov");
            at += 8;
        }
        if len & 4 != 0 {
            piece!(to.add(at), from.add(at), reg, ":e", "mov");
            at += 4;
        }
        if len & 2 != 0 {
            piece!(to.add(at), from.add(at), reg, ":x", "mov");
            at += 2;
        }
        if len & 1 != 0 {
            piece!(to.add(at), from.add(at), reg_byte, "", "mov");
        }
    }
}

/// # Safety
/// All blocks must be valid; they have 8 bytes.
#[inline]
unsafe fn blocks_of_words(run: Run) {
    let (mut to, mut from) = (run.to, run.from);
    let fours = run.count / 4;
    // SAFETY: four blocks at a time, then the rest; each of them is valid as promised by the caller.
    unsafe {
        if fours > 0 {
            asm!(
                // Within one line, wherever the compiler has put it: else it is by chance up to 5 % slower.
                ".p2align 6",
                "2:",
                "mov {a}, [{from}]",
                "mov {b}, [{from} + {from1}]",
                "mov {c}, [{from} + 2 * {from1}]",
                "mov {d}, [{from} + {from3}]",
                "lea {from}, [{from} + 4 * {from1}]",
                "mov [{to}], {a}",
                "mov [{to} + {to1}], {b}",
                "mov [{to} + 2 * {to1}], {c}",
                "mov [{to} + {to3}], {d}",
                "lea {to}, [{to} + 4 * {to1}]",
                "dec {left}",
                "jnz 2b",
                a = out(reg) _,
                b = out(reg) _,
                c = out(reg) _,
                d = out(reg) _,
                from = inout(reg) from,
                to = inout(reg) to,
                from1 = in(reg) run.from_stride,
                to1 = in(reg) run.to_stride,
                from3 = in(reg) run.from_stride.wrapping_mul(3),
                to3 = in(reg) run.to_stride.wrapping_mul(3),
                left = inout(reg) fours => _,
                options(nostack)
            );
        }
        let rest = Run { to, from, count: run.count % 4, ..run };
        each_block(rest, |to, from| piece!(to, from, reg, "", "mov"));
    }
}

/// # Safety
/// All blocks must be valid; they have 64 bytes. The processor must have AVX-512.
unsafe fn blocks_of_lines(run: Run) {
    each_block(run, |to, from| {
        // SAFETY: the block is one of those that the caller promised to be valid.
        unsafe {
            asm!(
                "vmovdqu64 zmm16, [{from}]",
                "vmovdqu64 [{to}], zmm16",
                from = in(reg) from,
                to = in(reg) to,
                out("zmm16") _,
                options(nostack, preserves_flags)
            );
        }
    });
}

/// # Safety
/// All blocks must be valid, and have at most 64 bytes.
unsafe fn blocks_of_any_length(run: Run) {
    let len = run.len;
    // SAFETY: the block is one of those that the caller promised to be valid.
    each_block(run, |to, from| unsafe { short(to, from, len) });
}

/// Copies one block. Each byte of it is stored once: an atomic operation between two stores of one word would be undone.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline(always)]
pub(super) unsafe fn copy_block(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        match len {
            8 => piece!(to, from, reg, "", "mov"),
            // Lengths change from one block to the next, and a branch that is guessed wrongly takes longer than the copy.
            16..=64 if has_masks() => {
                asm!(
                    "bzhi {mask}, {mask}, {len}",
                    "kmovq k1, {mask}",
                    "vmovdqu8 zmm16{{k1}}{{z}}, [{from}]",
                    "vmovdqu8 [{to}]{{k1}}, zmm16",
                    from = in(reg) from,
                    to = in(reg) to,
                    len = in(reg) len as u64,
                    mask = inout(reg) u64::MAX => _,
                    out("k1") _,
                    out("zmm16") _,
                    options(nostack)
                );
            }
            ..=64 => short(to, from, len),
            _ => copy(to, from, len),
        }
    }
}

/// Pushes a line that was written out of this processor's own caches, into the one that it shares with others.
#[inline(always)]
pub(super) fn demote(at: *const u8) {
    // SAFETY: a hint, whatever the address; processors without it do nothing.
    unsafe { asm!("cldemote [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly)) };
}

/// Asks for a line, to be written.
#[inline(always)]
pub(super) fn prefetch_write(at: *const u8) {
    // SAFETY: a hint, whatever the address; processors without it do nothing.
    unsafe { asm!("prefetchw [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly)) };
}

/// Asks for the lines of the first `len` bytes from an address on, and where there are many for up to three more; any address will
/// do.
#[inline]
pub(super) fn prefetch(base: *const u8, len: usize) {
    let lines = len.div_ceil(LINE);
    // SAFETY: hints, without effect for addresses that are not mapped. Four lines at a time: to count them takes longer than
    // to ask for them.
    unsafe {
        if lines < 4 {
            for line in 0..lines {
                let at = base.wrapping_add(line * LINE);
                asm!("prefetcht0 [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly));
            }
        } else {
            asm!(
                "2:",
                "prefetcht0 [{at}]",
                "prefetcht0 [{at} + 64]",
                "prefetcht0 [{at} + 128]",
                "prefetcht0 [{at} + 192]",
                "add {at}, 256",
                "dec {fours}",
                "jnz 2b",
                at = inout(reg) base => _,
                fours = inout(reg) lines.div_ceil(4) => _,
                options(nostack, readonly)
            );
        }
    }
}
