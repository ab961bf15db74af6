//! `pingpong_two_lines`: half of a round trip of an 8-byte counter between two processes, in microseconds.
//!
//! Each side writes a cache line of its own, 128 bytes from the other's, and spins on the other's line. No
//! message can be faster: one store has to become visible to the other core, and the answer the same way back.
//! How long that takes depends on where in the chip the line has its home, so many pairs of lines are tried;
//! the figure is of the best pair, and the detail tells the median of all pairs, which is what a program
//! that takes its lines as they come may expect.

use super::contest::contest;
use super::process::{Mapping, Peer, Watch, now_ns};
use super::{LimitArgs, LimitError, Measurement, median};
use std::sync::atomic::{AtomicU64, Ordering};

/// Round trips per batch: long against the clock's resolution, short enough to have many batches.
const ROUNDS: u64 = 1000;
/// Pairs of lines to try, 512 bytes from one to the next, so that pairs do not disturb each other.
const PAIRS: usize = 64;
/// Where the word that hands out the batches lies: after all pairs.
const JOB: usize = PAIRS * 4;

/// How to wait for the other side and how to tell it.
#[derive(Clone, Copy, Debug)]
enum Manner {
    /// Nothing but loads and a store.
    Plain,
    /// `spin_loop` between the loads, which takes fewer of them off the line while it is written.
    Pause,
    /// As `Pause`, and the written line is pushed out of the own cache at once.
    PauseDemote,
    /// As `Pause`, and the answer waits for some nanoseconds. That is measured to be faster, within a cache most of all: as if a
    /// line that is asked for back while it is still on its way took longer than one that has arrived.
    PauseRest,
}

const MANNERS: [Manner; 4] = [Manner::Plain, Manner::Pause, Manner::PauseDemote, Manner::PauseRest];

/// Multiplications, each of which waits for the one before it, of a rest.
const REST: u32 = 20;

pub(super) fn run(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let memory = Mapping::shared((JOB + 4) * 128)?;
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        for batch in 1.. {
            let mut job = 0;
            watch.spin(|| {
                job = memory.line(JOB).load(Ordering::Acquire);
                job >> 32 == batch
            })?;
            let way = (job & 0xffff_ffff) as usize;
            if way == MANNERS.len() * PAIRS {
                break;
            }
            side(&memory, (way / MANNERS.len(), MANNERS[way % MANNERS.len()]), batch, false, watch)?;
        }
        Ok(())
    })?;

    let mut batch = 0;
    let ways: Vec<usize> = (0..MANNERS.len() * PAIRS).collect();
    let winner = contest(&ways, args.seconds, |way| {
        batch += 1;
        memory.line(JOB).store(batch << 32 | way as u64, Ordering::Release);
        let pair = (way / MANNERS.len(), MANNERS[way % MANNERS.len()]);
        let ns = side(&memory, pair, batch, true, peer.watch())?;
        Ok(2.0 * ROUNDS as f64 * 1e3 / ns as f64)
    })?;
    memory.line(JOB).store((batch + 1) << 32 | ways.len() as u64, Ordering::Release);
    let last = winner.way / MANNERS.len();
    peer.finish()?;
    // The last answer of the pair must be the last question of some batch played on it.
    let answer = memory.line(4 * last + 1).load(Ordering::Acquire);
    if answer != memory.line(4 * last).load(Ordering::Acquire) || answer & 0xffff_ffff != ROUNDS {
        return Err(LimitError::WrongData);
    }
    let manner = MANNERS[winner.way % MANNERS.len()];
    let mut pairs: Vec<f64> = winner.tried.chunks(MANNERS.len()).map(best).collect();
    Ok(Measurement {
        value: 1.0 / winner.median,
        unit: "us",
        detail: format!(
            "best of {PAIRS} pairs of lines, {manner:?}; median pair {:.3}",
            1.0 / median(&mut pairs)
        ),
    })
}

fn best(tried: &[(usize, f64)]) -> f64 {
    tried.iter().map(|t| t.1).fold(0.0, f64::max)
}

/// One batch of one side; how long it took, from the second round trip on.
fn side(
    memory: &Mapping,
    (pair, manner): (usize, Manner),
    batch: u64,
    first: bool,
    watch: &Watch,
) -> Result<u64, LimitError> {
    let (a, b) = (memory.line(4 * pair), memory.line(4 * pair + 1));
    let (mine, theirs) = if first { (a, b) } else { (b, a) };
    let play = |from, to| match (manner, first) {
        (Manner::Plain, true) => rounds::<0, true>(mine, theirs, from, to, watch),
        (Manner::Plain, false) => rounds::<0, false>(mine, theirs, from, to, watch),
        (Manner::Pause, true) => rounds::<1, true>(mine, theirs, from, to, watch),
        (Manner::Pause, false) => rounds::<1, false>(mine, theirs, from, to, watch),
        (Manner::PauseDemote, true) => rounds::<2, true>(mine, theirs, from, to, watch),
        (Manner::PauseDemote, false) => rounds::<2, false>(mine, theirs, from, to, watch),
        (Manner::PauseRest, true) => rounds::<3, true>(mine, theirs, from, to, watch),
        (Manner::PauseRest, false) => rounds::<3, false>(mine, theirs, from, to, watch),
    };
    let base = batch << 32;
    // A few rounds in which both sides arrive at the loop.
    const ARRIVAL: u64 = 20;
    play(base + 1, base + ARRIVAL)?;
    let start = now_ns();
    play(base + ARRIVAL + 1, base + ROUNDS)?;
    let ns = now_ns() - start;
    Ok(ns * ROUNDS / (ROUNDS - ARRIVAL))
}

#[inline(always)]
fn rounds<const MANNER: u8, const FIRST: bool>(
    mine: &AtomicU64,
    theirs: &AtomicU64,
    from: u64,
    to: u64,
    watch: &Watch,
) -> Result<(), LimitError> {
    for i in from..=to {
        if FIRST {
            tell::<MANNER>(mine, i);
        }
        watch.spin(|| {
            let there = theirs.load(Ordering::Acquire) == i;
            if MANNER > 0 && !there {
                std::hint::spin_loop();
            }
            there
        })?;
        if !FIRST {
            tell::<MANNER>(mine, i);
        }
    }
    Ok(())
}

#[inline(always)]
fn tell<const MANNER: u8>(line: &AtomicU64, value: u64) {
    if MANNER == 3 {
        let mut factor = value;
        for _ in 0..REST {
            factor = std::hint::black_box(factor.wrapping_mul(3));
        }
    }
    line.store(value, Ordering::Release);
    #[cfg(target_arch = "x86_64")]
    if MANNER == 2 {
        // SAFETY: a hint about a line that is mapped. Processors without it take it for a no-operation.
        unsafe {
            std::arch::asm!("cldemote [{}]", in(reg) line.as_ptr(), options(nostack, preserves_flags));
        }
    }
}
