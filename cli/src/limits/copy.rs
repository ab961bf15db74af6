//! The ways to copy memory and to add up words that the limits choose from.

/// A way to copy bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) enum Copier {
    /// The C library's `memcpy`.
    Memcpy,
    /// The processor's own string move.
    RepMovsb,
    /// 64-byte loads and stores.
    Avx512,
    /// 32-byte loads and stores.
    Avx2,
    /// Loads, and stores that bypass the caches, of as many bytes as the processor has at once; by blocks of 256 bytes, with
    /// the source asked for a page ahead.
    Stream,
}

impl Copier {
    /// What this machine offers.
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![Self::Memcpy];
        #[cfg(target_arch = "x86_64")]
        {
            all.push(Self::RepMovsb);
            if is_x86_feature_detected!("avx2") {
                all.push(Self::Avx2);
                all.push(Self::Stream);
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Self::Avx512);
            }
        }
        all
    }

    /// Copies `len` bytes, a multiple of 64.
    ///
    /// # Safety
    ///
    /// `source` is readable and `target` writable for `len` bytes, they do not overlap, nobody writes
    /// the source meanwhile, `target` is aligned to 64 bytes, and `self` is from [`Self::all`].
    #[inline(always)]
    pub(super) unsafe fn copy(self, source: *const u8, target: *mut u8, len: usize) {
        match self {
            // SAFETY: the caller's promise.
            Self::Memcpy => unsafe { std::ptr::copy_nonoverlapping(source, target, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise; the instruction is in every x86-64 processor.
            Self::RepMovsb => unsafe {
                std::arch::asm!("rep movsb", inout("rcx") len => _, inout("rsi") source => _,
                    inout("rdi") target => _, options(nostack, preserves_flags));
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise; `all` offers it only where the processor has it.
            Self::Avx512 => unsafe { x86::copy512(source, target, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx2 => unsafe { x86::copy256(source, target, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Stream => unsafe {
                if is_x86_feature_detected!("avx512f") {
                    x86::stream512(source, target, len);
                } else {
                    x86::stream256(source, target, len);
                }
                x86::settle();
            },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!(),
        }
    }

    /// Copies `count` blocks of a multiple of 64 bytes, which lie side by side, to every second place.
    ///
    /// # Safety
    ///
    /// As for [`Self::copy`], of `count` blocks at `source` and twice as many at `target`.
    #[inline(always)]
    pub(super) unsafe fn spread(self, source: *const u8, target: *mut u8, block: usize, count: usize) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise; `all` offers it only where the processor has it.
            Self::Avx512 => unsafe { x86::spread512(source, target, block, count) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx2 => unsafe { x86::spread256(source, target, block, count) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Stream => unsafe {
                if is_x86_feature_detected!("avx512f") {
                    x86::spread_past512(source, target, block, count);
                } else {
                    x86::spread_past256(source, target, block, count);
                }
                x86::settle();
            },
            // SAFETY: the caller's promise.
            Self::Memcpy => unsafe {
                spread_by(source, target, (block, count), |from, to, len| {
                    std::ptr::copy_nonoverlapping(from, to, len);
                });
            },
            // SAFETY: as above.
            _ => unsafe {
                spread_by(source, target, (block, count), |from, to, len| self.copy(from, to, len));
            },
        }
    }
}

/// Calls `copy` with the source, the target and the length of each of `count` blocks, which go to every second place. What
/// lengths are measured as a rule the compiler knows: their copies are some moves and no loop.
///
/// # Safety
///
/// `count` blocks are readable at `source`, and twice as many writable at `target`.
#[inline(always)]
pub(super) unsafe fn spread_by(
    source: *const u8,
    target: *mut u8,
    (block, count): (usize, usize),
    copy: impl Fn(*const u8, *mut u8, usize),
) {
    // SAFETY: the caller's promise.
    unsafe {
        match block {
            8 => each(source, target, 8, count, copy),
            64 => each(source, target, 64, count, copy),
            1024 => each(source, target, 1024, count, copy),
            _ => each(source, target, block, count, copy),
        }
    }
}

/// # Safety
///
/// As for [`spread_by`].
#[inline(always)]
unsafe fn each(
    source: *const u8,
    target: *mut u8,
    block: usize,
    count: usize,
    copy: impl Fn(*const u8, *mut u8, usize),
) {
    for at in 0..count {
        // SAFETY: the caller's promise.
        unsafe { copy(source.add(at * block), target.add(2 * at * block), block) };
    }
}

/// Asks for a line that is about to be changed.
#[inline(always)]
pub(super) fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Asks for the line at `address` to be fetched; any address will do.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, without effect for addresses that are not mapped.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Copies `len` bytes from `source` to `message + at` and adds up the words of the message up to `lag`
/// bytes before its end then, without those that were added up when less of the message was there.
///
/// Called for one piece of a message after the other, it leaves the last `lag` bytes to be added up.
///
/// # Safety
///
/// `source` is readable for `len` bytes that nobody writes meanwhile, `message` is writable for `at + len`
/// bytes that nobody else uses, and written up to `at`; `at`, `len` and `lag` are multiples of 256.
#[inline]
pub(super) unsafe fn copy_and_sum(
    source: *const u8,
    message: *mut u8,
    at: usize,
    len: usize,
    lag: usize,
) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions; the rest is the caller's promise.
            return unsafe { x86::copy_and_sum512(source, message, at, len, lag) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::copy_and_sum256(source, message, at, len, lag) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { copy_and_sum_by_rows(source, message, at, len, lag) }
}

/// See [`copy_and_sum`].
///
/// # Safety
///
/// As there.
#[inline(always)]
unsafe fn copy_and_sum_by_rows(
    source: *const u8,
    message: *mut u8,
    at: usize,
    len: usize,
    lag: usize,
) -> u64 {
    type Row = [u64; 32];
    let mut lanes: Row = [0; 32];
    // What is copied before there is anything `lag` bytes behind.
    let lead = lag.saturating_sub(at).min(len);
    // SAFETY: all of it is inside the `len` bytes at `source` and the `at + len` bytes at `message`, and what is
    // read from the message was written before.
    unsafe {
        std::ptr::copy_nonoverlapping(source, message.add(at), lead);
        let mut done = lead;
        while done < len {
            let to = message.add(at + done);
            to.cast::<Row>().write_unaligned(source.add(done).cast::<Row>().read_unaligned());
            let row = to.sub(lag).cast::<Row>().read_unaligned();
            for (lane, word) in lanes.iter_mut().zip(row) {
                *lane = lane.wrapping_add(word);
            }
            done += size_of::<Row>();
        }
    }
    lanes.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Sum of the words, wrapping.
#[inline]
pub(super) fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions.
            return unsafe { x86::sum512(words) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the instructions.
            return unsafe { x86::sum256(words) };
        }
    }
    sum_with::<8>(words)
}

/// `N` accumulators, so that no addition waits for the one before.
#[inline(always)]
fn sum_with<const N: usize>(words: &[u64]) -> u64 {
    let mut lanes = [0u64; N];
    let (rows, rest) = words.as_chunks::<N>();
    for row in rows {
        for (lane, word) in lanes.iter_mut().zip(row) {
            *lane = lane.wrapping_add(*word);
        }
    }
    rest.iter().chain(&lanes).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Bytes that are loaded before any of them is stored past the caches.
    const BLOCK: usize = 256;
    /// How far ahead their source is asked for.
    const AHEAD: usize = 4096;

    #[target_feature(enable = "avx512f")]
    pub(super) fn sum512(words: &[u64]) -> u64 {
        super::sum_with::<32>(words)
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn sum256(words: &[u64]) -> u64 {
        super::sum_with::<16>(words)
    }

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy_and_sum512(
        source: *const u8,
        message: *mut u8,
        at: usize,
        len: usize,
        lag: usize,
    ) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { super::copy_and_sum_by_rows(source, message, at, len, lag) }
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_and_sum256(
        source: *const u8,
        message: *mut u8,
        at: usize,
        len: usize,
        lag: usize,
    ) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { super::copy_and_sum_by_rows(source, message, at, len, lag) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy512(source: *const u8, target: *mut u8, len: usize) {
        // All loads of a block before its stores, eight registers of them.
        let mut i = 0;
        while i + 512 <= len {
            // SAFETY: `i + 512 <= len`, and the caller's promise.
            unsafe {
                let block = source.add(i);
                let l0 = _mm512_loadu_si512(block.cast());
                let l1 = _mm512_loadu_si512(block.add(64).cast());
                let l2 = _mm512_loadu_si512(block.add(128).cast());
                let l3 = _mm512_loadu_si512(block.add(192).cast());
                let l4 = _mm512_loadu_si512(block.add(256).cast());
                let l5 = _mm512_loadu_si512(block.add(320).cast());
                let l6 = _mm512_loadu_si512(block.add(384).cast());
                let l7 = _mm512_loadu_si512(block.add(448).cast());
                let block = target.add(i);
                _mm512_store_si512(block.cast(), l0);
                _mm512_store_si512(block.add(64).cast(), l1);
                _mm512_store_si512(block.add(128).cast(), l2);
                _mm512_store_si512(block.add(192).cast(), l3);
                _mm512_store_si512(block.add(256).cast(), l4);
                _mm512_store_si512(block.add(320).cast(), l5);
                _mm512_store_si512(block.add(384).cast(), l6);
                _mm512_store_si512(block.add(448).cast(), l7);
            }
            i += 512;
        }
        while i < len {
            // SAFETY: `len` is a multiple of 64, and the caller's promise.
            unsafe { _mm512_store_si512(target.add(i).cast(), _mm512_loadu_si512(source.add(i).cast())) };
            i += 64;
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy256(source: *const u8, target: *mut u8, len: usize) {
        let mut i = 0;
        while i + 128 <= len {
            // SAFETY: `i + 128 <= len`, and the caller's promise.
            unsafe {
                let block = source.add(i);
                let l0 = _mm256_loadu_si256(block.cast());
                let l1 = _mm256_loadu_si256(block.add(32).cast());
                let l2 = _mm256_loadu_si256(block.add(64).cast());
                let l3 = _mm256_loadu_si256(block.add(96).cast());
                let block = target.add(i);
                _mm256_store_si256(block.cast(), l0);
                _mm256_store_si256(block.add(32).cast(), l1);
                _mm256_store_si256(block.add(64).cast(), l2);
                _mm256_store_si256(block.add(96).cast(), l3);
            }
            i += 128;
        }
        while i < len {
            // SAFETY: `len` is a multiple of 64, and the caller's promise.
            unsafe { _mm256_store_si256(target.add(i).cast(), _mm256_loadu_si256(source.add(i).cast())) };
            i += 32;
        }
    }

    /// The loop over registers of so many bytes.
    macro_rules! stream {
        ($name:ident, $feature:literal, $bytes:literal, $zero:ident, $load:ident, $store:ident) => {
            /// What is stored is there for others after [`settle`].
            #[inline]
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(source: *const u8, target: *mut u8, len: usize) {
                let mut i = 0;
                while i < len {
                    let now = if len - i >= BLOCK { BLOCK } else { 64 };
                    for line in (0..now).step_by(64) {
                        _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(i + line + AHEAD).cast());
                    }
                    // SAFETY: `len` is a multiple of 64, and the caller's promise. All of a block is loaded before any of
                    // it is stored.
                    unsafe {
                        if now == BLOCK {
                            let mut block = [$zero(); BLOCK / $bytes];
                            for (at, part) in block.iter_mut().enumerate() {
                                *part = $load(source.add(i + $bytes * at).cast());
                            }
                            for (at, part) in block.into_iter().enumerate() {
                                $store(target.add(i + $bytes * at).cast(), part);
                            }
                        } else {
                            for at in (i..i + now).step_by($bytes) {
                                $store(target.add(at).cast(), $load(source.add(at).cast()));
                            }
                        }
                    }
                    i += now;
                }
            }
        };
    }

    stream!(stream256, "avx2", 32, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_stream_si256);
    stream!(stream512, "avx512f", 64, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_stream_si512);

    /// Orders the stores that bypass the caches before those that follow.
    #[inline]
    pub(super) fn settle() {
        // SAFETY: an instruction of every x86-64 processor, which only waits.
        unsafe { _mm_sfence() };
    }

    /// The loop over blocks, with a copy that is part of it.
    macro_rules! spread {
        ($name:ident, $feature:literal, $copy:ident) => {
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(source: *const u8, target: *mut u8, block: usize, count: usize) {
                // SAFETY: the caller's promise.
                unsafe {
                    super::spread_by(source, target, (block, count), |from, to, len| $copy(from, to, len));
                }
            }
        };
    }

    spread!(spread256, "avx2", copy256);
    spread!(spread512, "avx512f", copy512);
    spread!(spread_past256, "avx2", stream256);
    spread!(spread_past512, "avx512f", stream512);
}
