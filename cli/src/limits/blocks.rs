//! Copies of blocks, by loops written for where they lie, in GB/s of what is copied.
//!
//! `strided_copy` spreads `count` blocks from private memory over shared memory, to every second place, and
//! `layout_strided` does so within the process. `layout_irregular` spreads words over blocks of a few of them, and
//! `layout_transpose` turns a matrix of 10 × 10 words around. Loops over words and, for blocks that are long enough, the
//! ways to copy are tried out.

use super::contest::contest;
use super::copy::{Copier, spread_by};
use super::process::{Mapping, Peer, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::Duration;

const LARGEST: usize = 1 << 30;
const DONE: usize = 0;
/// Bytes of a batch.
const BATCH: usize = 4 << 20;
const SIDE: usize = 10;

/// How a block is copied.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Word after word.
    Words,
    /// All of it.
    Whole(Copier),
}

/// So many blocks of 1 to 8 words each at irregular places: offset and length of each in words, in order.
#[must_use]
pub fn irregular(count: usize) -> Vec<(usize, usize)> {
    let (mut at, mut state) = (0, 1u64);
    let mut next = |most: u64| {
        // Knuth's generator; its upper bits are the good ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % most) as usize
    };
    let mut block = || {
        let (gap, len) = (next(4) + 1, next(8) + 1);
        let begin = at + gap;
        at = begin + len;
        (begin, len)
    };
    (0..count).map(|_| block()).collect()
}

/// Times a loop over memory; speeds in GB/s.
fn timed(bytes: usize, mut copy: impl FnMut()) -> f64 {
    let times = (BATCH / bytes).clamp(4, 10_000);
    let start = now_ns();
    for _ in 0..times {
        copy();
    }
    (times * bytes) as f64 / (now_ns() - start) as f64
}

/// `strided_copy`, to memory that another process has mapped, or `layout_strided`.
pub(super) fn strided(args: &LimitArgs, shared: bool) -> Result<Measurement, LimitError> {
    let (block, count) = (args.size, args.count);
    let fits = block > 0 && block.is_multiple_of(8) && count > 0;
    let Some(bytes) = block.checked_mul(count).filter(|bytes| fits && *bytes <= LARGEST) else {
        return Err(LimitError::Argument(
            "a strided copy takes blocks of a multiple of 8 bytes, up to 1 GiB",
        ));
    };
    let control = Mapping::shared(4096)?;
    let target = if shared { Mapping::shared(2 * bytes)? } else { Mapping::private(2 * bytes)? };
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        target.fault_in();
        while control.line(DONE).load(Ordering::Acquire) == 0 {
            watch.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    })?;
    let source = Mapping::private(bytes)?;
    source.fill(bytes);
    let mut ways = vec![Way::Words];
    if block.is_multiple_of(64) {
        ways.extend(Copier::all().into_iter().map(Way::Whole));
    }
    let winner = contest(&ways, args.seconds, |way| {
        peer.watch().check()?;
        Ok(timed(bytes, || {
            let (from, to) = (black_box(source.base()), black_box(target.base()));
            // SAFETY: the source has `count` blocks and the target twice as many; only this process uses them now. Blocks
            // that are copied as a whole are multiples of 64 bytes, and so are their places; `way` has one of `all`.
            unsafe { spread(from, to, block, count, way) };
        }))
    })?;
    control.line(DONE).store(1, Ordering::Release);
    peer.finish()?;
    for at in 0..count {
        // SAFETY: inside of both mappings, which nobody writes any more.
        let same = unsafe { source.words(at * block, block) == target.words(2 * at * block, block) };
        if !same {
            return Err(LimitError::WrongData);
        }
    }
    Ok(told(winner.median, format!("{:?}; {}", winner.way, tried(&winner.tried))))
}

/// # Safety
/// `count` blocks of a multiple of 8 bytes are readable at `from`, and twice as many writable at `to`; as
/// [`Copier::spread`] where that is the way.
#[inline(never)]
unsafe fn spread(from: *const u8, to: *mut u8, block: usize, count: usize, way: Way) {
    // SAFETY: the caller's promise.
    unsafe {
        match way {
            Way::Words => spread_by(from, to, (block, count), |from, to, len| {
                words(from.cast(), to.cast(), len / 8);
            }),
            Way::Whole(copier) => copier.spread(from, to, block, count),
        }
    }
}

/// # Safety
/// `count` words are readable at `from` and writable at `to`, aligned and apart.
#[inline(always)]
unsafe fn words(from: *const u64, to: *mut u64, count: usize) {
    for at in 0..count {
        // SAFETY: the caller's promise.
        unsafe { to.add(at).write(from.add(at).read()) };
    }
}

/// `layout_irregular`.
pub(super) fn scattered(args: &LimitArgs) -> Result<Measurement, LimitError> {
    if args.count == 0 || args.count > 1 << 20 {
        return Err(LimitError::Argument("layout_irregular takes 1 to 2^20 blocks"));
    }
    super::process::pin(args.cores[0])?;
    let blocks = irregular(args.count);
    let all: usize = blocks.iter().map(|(_, len)| len).sum();
    let end = blocks.last().map_or(0, |(at, len)| at + len);
    let source: Vec<u64> = (0..all as u64).collect();
    let mut target = vec![0u64; end];
    let winner = contest(&[Way::Words, Way::Whole(Copier::Memcpy)], args.seconds, |way| {
        Ok(timed(all * 8, || {
            let mut rest = black_box(&source[..]);
            let into = black_box(&mut target[..]);
            for &(at, len) in black_box(&blocks) {
                let (block, behind) = rest.split_at(len);
                match way {
                    Way::Words => {
                        for (to, from) in into[at..at + len].iter_mut().zip(block) {
                            *to = *from;
                        }
                    }
                    Way::Whole(_) => into[at..at + len].copy_from_slice(block),
                }
                rest = behind;
            }
        }))
    })?;
    let mut rest = &source[..];
    for &(at, len) in &blocks {
        let (block, behind) = rest.split_at(len);
        if target[at..at + len] != *block {
            return Err(LimitError::WrongData);
        }
        rest = behind;
    }
    Ok(told(winner.median, format!("{:?}; {}", winner.way, tried(&winner.tried))))
}

/// `layout_transpose`.
pub(super) fn transpose(args: &LimitArgs) -> Result<Measurement, LimitError> {
    super::process::pin(args.cores[0])?;
    let source: Vec<u64> = (0..(SIDE * SIDE) as u64).collect();
    let mut target = vec![0u64; SIDE * SIDE];
    let winner = contest(&[false, true], args.seconds, |by_rows| {
        Ok(timed(SIDE * SIDE * 8, || {
            let (from, to) = (black_box(&source[..SIDE * SIDE]), black_box(&mut target[..SIDE * SIDE]));
            for outer in 0..SIDE {
                for inner in 0..SIDE {
                    let (row, column) = if by_rows { (outer, inner) } else { (inner, outer) };
                    to[column * SIDE + row] = from[row * SIDE + column];
                }
            }
        }))
    })?;
    if (0..SIDE * SIDE).any(|at| target[at] != source[at % SIDE * SIDE + at / SIDE]) {
        return Err(LimitError::WrongData);
    }
    let order = if winner.way { "in order of the source" } else { "in order of the target" };
    Ok(told(winner.median, format!("{order}; {}", tried(&winner.tried))))
}

/// `vector_add`: a vector of floats is added to another one, of which the sum takes the place. GB/s of one vector.
pub(super) fn add(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let size = args.size;
    if size == 0 || !size.is_multiple_of(64) || size > LARGEST {
        return Err(LimitError::Argument("vector_add takes a multiple of 64 bytes up to 1 GiB"));
    }
    super::process::pin(args.cores[0])?;
    let other = vec![1.0f64; size / 8];
    let mut sum = vec![0.0f64; size / 8];
    let mut times = 0u64;
    let winner = contest(&[false, true], args.seconds, |wide| {
        Ok(timed(size, || {
            times += 1;
            add_all(black_box(&mut sum), black_box(&other), wide);
        }))
    })?;
    if sum.iter().any(|value| *value != times as f64) {
        return Err(LimitError::WrongData);
    }
    let way = if winner.way { "the widest instructions" } else { "the base instructions" };
    Ok(told(winner.median, format!("{way}; {}", tried(&winner.tried))))
}

#[inline(never)]
fn add_all(sum: &mut [f64], other: &[f64], wide: bool) {
    #[cfg(target_arch = "x86_64")]
    if wide && is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        return unsafe { add512(sum, other) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = wide;
    add_plain(sum, other);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add512(sum: &mut [f64], other: &[f64]) {
    add_plain(sum, other);
}

#[inline(always)]
fn add_plain(sum: &mut [f64], other: &[f64]) {
    for (sum, other) in sum.iter_mut().zip(other) {
        *sum += other;
    }
}

fn tried<W: std::fmt::Debug>(tried: &[(W, f64)]) -> String {
    let each: Vec<String> = tried.iter().map(|(way, speed)| format!("{way:?} {speed:.1}")).collect();
    format!("best batches: {}", each.join(", "))
}

fn told(value: f64, detail: String) -> Measurement {
    Measurement { value, unit: "GB/s", detail }
}
