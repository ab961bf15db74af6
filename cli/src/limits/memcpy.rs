//! `memcpy_to_shared` and `memcpy_from_shared`: the speed of one copy between a private buffer and memory
//! that another process has mapped too, in GB/s.
//!
//! A put of this size has to do at least this copy. Source and target are the same each time, so they are as
//! hot as the size allows. The other process only has the memory in its page table, filled it at the beginning
//! (from) or checks it at the end (to), and sleeps in between. The C library's `memcpy`, `rep movsb`, vector
//! loops, and stores that bypass the caches, which win beyond the second-level cache, are tried out.

use super::contest::contest;
use super::copy::{Copier, sum};
use super::process::{Mapping, Peer, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// From a private buffer to shared memory.
    ToShared,
    /// From shared memory to a private buffer.
    FromShared,
}

/// Bytes of one batch, about 1 ms.
const BATCH: usize = 32 << 20;
const LARGEST: usize = 1 << 30;

const READY: usize = 0;
const DONE: usize = 2;
const SUM: usize = 4;

pub(super) fn run(args: &LimitArgs, direction: Direction) -> Result<Measurement, LimitError> {
    let size = args.size;
    if size == 0 || !size.is_multiple_of(64) || size > LARGEST {
        return Err(LimitError::Argument("a memcpy limit takes a multiple of 64 bytes up to 1 GiB"));
    }
    let control = Mapping::shared(4096)?;
    let shared = Mapping::shared(size)?;
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        match direction {
            Direction::ToShared => shared.fault_in(),
            Direction::FromShared => shared.fill(size),
        }
        control.line(READY).store(1, Ordering::Release);
        while control.line(DONE).load(Ordering::Acquire) == 0 {
            watch.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: `size` bytes of the mapping; the other process has stopped writing them.
        control.line(SUM).store(sum(unsafe { shared.words(0, size) }), Ordering::Release);
        Ok(())
    })?;
    let private = Mapping::private(size)?;
    peer.watch().spin(|| {
        std::hint::spin_loop();
        control.line(READY).load(Ordering::Acquire) == 1
    })?;
    let (source, target) = match direction {
        Direction::ToShared => (&private, &shared),
        Direction::FromShared => (&shared, &private),
    };
    if direction == Direction::ToShared {
        private.fill(size);
    }
    // SAFETY: `size` bytes of the mapping that nobody writes any more.
    let expected = sum(unsafe { source.words(0, size) });

    let copies = (BATCH / size).max(1);
    let winner = contest(&Copier::all(), args.seconds, |copier| {
        peer.watch().check()?;
        let start = now_ns();
        for _ in 0..copies {
            // SAFETY: both mappings have `size` bytes, a multiple of 64, and are page aligned; only this
            // process uses them now; `copier` is from `all`.
            unsafe { copier.copy(source.base(), target.base(), size) };
        }
        Ok((copies * size) as f64 / (now_ns() - start) as f64)
    })?;

    control.line(DONE).store(1, Ordering::Release);
    peer.finish()?;
    // SAFETY: `size` bytes of this process' own mapping that nobody writes any more.
    let arrived = sum(unsafe { private.words(0, size) });
    if arrived != expected || control.line(SUM).load(Ordering::Acquire) != expected {
        return Err(LimitError::WrongData);
    }
    let others: Vec<String> =
        winner.tried.iter().map(|(copier, speed)| format!("{copier:?} {speed:.1}")).collect();
    Ok(Measurement {
        value: winner.median,
        unit: "GB/s",
        detail: format!("{:?}; best batches: {}", winner.way, others.join(", ")),
    })
}
