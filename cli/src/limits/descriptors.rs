//! `descriptor_loop`: microseconds for one pattern of 64-byte descriptors, each a copy of a few bytes from
//! private to shared memory.
//!
//! This is what the body of a batch of puts comes down to when nothing but the batch itself is left:
//! read a descriptor, resolve its offsets against two base pointers, copy, count the bytes and the message. The
//! counters live in registers and are written once per pattern. The descriptors cover both areas densely
//! and in order. A length of 8 is one load and one store; other lengths are copied by the best of the ways to
//! copy. Prefetching some descriptors ahead is tried out.

use super::contest::contest;
use super::copy::{Copier, prefetch, sum};
use super::process::{Mapping, Peer, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::Duration;

const COPY: u8 = 1;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Descriptor {
    op: u8,
    flags: [u8; 7],
    source: u64,
    target: u64,
    length: u64,
    rest: [u64; 4],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    bytes: u64,
    messages: u64,
}

/// How the pattern is executed.
#[derive(Clone, Copy, Debug)]
struct Way {
    copier: Copier,
    /// How many descriptors ahead to prefetch: the descriptor where 8 bytes are copied, else the bytes.
    ahead: usize,
    /// Descriptors per turn of the loop, which costs about as much as a descriptor of 8 bytes.
    turn: usize,
}

/// Time of one batch, in nanoseconds.
const BATCH_NS: u64 = 400_000;
const LARGEST: usize = 1 << 30;
const DONE: usize = 0;
const SUM: usize = 2;

pub(super) fn run(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let (size, count) = (args.size, args.count);
    if !(size == 8 || (size > 0 && size.is_multiple_of(64))) || count == 0 {
        return Err(LimitError::Argument("descriptor_loop takes 8 bytes or a multiple of 64, and a count"));
    }
    let Some(area) = size.checked_mul(count).filter(|area| *area <= LARGEST) else {
        return Err(LimitError::Argument("descriptor_loop takes up to 1 GiB in all"));
    };
    let descriptors: Vec<Descriptor> = (0..count as u64)
        .map(|i| i * size as u64)
        .map(|at| Descriptor {
            op: COPY,
            flags: [0; 7],
            source: at,
            target: at,
            length: size as u64,
            rest: [0; 4],
        })
        .collect();
    let control = Mapping::shared(4096)?;
    let target = Mapping::shared(area)?;
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        target.fault_in();
        while control.line(DONE).load(Ordering::Acquire) == 0 {
            watch.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: `area` bytes of the mapping; the other process has stopped writing them.
        control.line(SUM).store(sum(unsafe { target.words(0, area) }), Ordering::Release);
        Ok(())
    })?;
    let source = Mapping::private(area)?;
    source.fill(area);

    let ways: Vec<Way> = if size == 8 {
        [(0, 1), (0, 4), (8, 1), (8, 4)]
            .map(|(ahead, turn)| Way { copier: Copier::Memcpy, ahead, turn })
            .to_vec()
    } else {
        let all = Copier::all().into_iter().filter(|c| *c != Copier::Stream || area > 1 << 20);
        all.flat_map(|copier| [0, 1, 2, 4].map(|ahead| Way { copier, ahead, turn: 1 })).collect()
    };
    let mut executed = Counters::default();
    let mut patterns = 0;
    let winner = contest(&ways, args.seconds, |way| {
        peer.watch().check()?;
        let (start, before) = (now_ns(), patterns);
        loop {
            for _ in 0..8 {
                // SAFETY: every descriptor's range is inside both areas, which are this process' alone now;
                // lengths other than 8 and offsets are multiples of 64; `way.copier` is from `all`.
                let counted = unsafe { pattern(black_box(&descriptors), source.base(), target.base(), way) };
                executed.bytes += counted.bytes;
                executed.messages += counted.messages;
            }
            patterns += 8;
            let ns = now_ns() - start;
            if ns > BATCH_NS {
                return Ok((patterns - before) as f64 * 1e3 / ns as f64);
            }
        }
    })?;
    control.line(DONE).store(1, Ordering::Release);
    peer.finish()?;
    // SAFETY: `area` bytes of this process' own mapping that nobody writes any more.
    let expected = sum(unsafe { source.words(0, area) });
    let counted = Counters { bytes: patterns * area as u64, messages: patterns * count as u64 };
    if control.line(SUM).load(Ordering::Acquire) != expected || executed != counted {
        return Err(LimitError::WrongData);
    }
    let name = |way: &Way| {
        let Way { copier, ahead, turn } = way;
        let copy = if size == 8 { "load and store".to_owned() } else { format!("{copier:?}") };
        format!("{copy}, {turn} a turn, prefetching {ahead} ahead")
    };
    let others: Vec<String> =
        winner.tried.iter().map(|(way, speed)| format!("{} {:.2}", name(way), 1.0 / speed)).collect();
    Ok(Measurement {
        value: 1.0 / winner.median,
        unit: "us",
        detail: format!("{}; best batches: {}", name(&winner.way), others.join("; ")),
    })
}

/// Executes the descriptors once.
///
/// # Safety
///
/// Every descriptor's range is inside the memory at `source` and `target`, which nobody else uses; lengths
/// other than 8 are multiples of 64, as are the targets of those; `way.copier` is from [`Copier::all`].
#[inline(never)]
unsafe fn pattern(descriptors: &[Descriptor], source: *const u8, target: *mut u8, way: Way) -> Counters {
    let Way { copier, ahead, turn } = way;
    // SAFETY: the caller's promise.
    unsafe {
        match (ahead, turn) {
            (0, 1) => execute::<0, 1>(descriptors, source, target, copier),
            (0, _) => execute::<0, 4>(descriptors, source, target, copier),
            (1, _) => execute::<1, 1>(descriptors, source, target, copier),
            (2, _) => execute::<2, 1>(descriptors, source, target, copier),
            (4, _) => execute::<4, 1>(descriptors, source, target, copier),
            (_, 1) => execute::<8, 1>(descriptors, source, target, copier),
            _ => execute::<8, 4>(descriptors, source, target, copier),
        }
    }
}

/// See [`pattern`].
///
/// # Safety
///
/// As there.
#[inline(never)]
unsafe fn execute<const AHEAD: usize, const TURN: usize>(
    descriptors: &[Descriptor],
    source: *const u8,
    target: *mut u8,
    copier: Copier,
) -> Counters {
    // Returns what there is to count, so that the counters stay in registers.
    let one = |descriptor: &Descriptor| {
        if descriptor.op != COPY {
            return (0, 0);
        }
        let length = descriptor.length;
        // SAFETY: the caller's promise.
        unsafe {
            let from = source.add(descriptor.source as usize);
            let to = target.add(descriptor.target as usize);
            if length == 8 {
                if AHEAD > 0 {
                    prefetch((descriptor as *const Descriptor).wrapping_add(AHEAD).cast());
                }
                to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned());
            } else {
                copy_many::<AHEAD>(from, to, length as usize, copier);
            }
        }
        (length, 1)
    };
    let (mut bytes, mut messages) = (0, 0);
    let (turns, rest) = descriptors.as_chunks::<TURN>();
    for turn in turns {
        for descriptor in turn {
            let (length, count) = one(descriptor);
            bytes += length;
            messages += count;
        }
    }
    for descriptor in rest {
        let (length, count) = one(descriptor);
        bytes += length;
        messages += count;
    }
    Counters { bytes, messages }
}

/// The copy of a length other than 8; a function of its own so that it takes no registers from the loop.
///
/// # Safety
///
/// As [`Copier::copy`].
#[inline(never)]
unsafe fn copy_many<const AHEAD: usize>(from: *const u8, to: *mut u8, length: usize, copier: Copier) {
    if AHEAD > 0 {
        // Descriptors are in order, so the bytes of a later one are those many further on.
        for line in (0..length).step_by(64) {
            prefetch(from.wrapping_add(AHEAD * length + line));
            prefetch(to.wrapping_add(AHEAD * length + line));
        }
    }
    // SAFETY: the caller's promise.
    unsafe { copier.copy(from, to, length) }
}
