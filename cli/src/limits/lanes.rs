//! `lanes`: microseconds to tell `count` readers of one message, each in a lane of its own.
//!
//! Up to 2 KiB the message itself is written to each lane, behind a header that is its publication flag; longer ones are
//! copied once, to shared memory, and each lane gets a header that names the place. The readers are one process on the
//! other core that reads all lanes when a round is over, so that the lines have to come back each time, and nobody takes
//! them away while they are written.

use super::contest::contest;
use super::copy::Copier;
use super::process::{Mapping, Peer, Watch, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use std::sync::atomic::{AtomicU64, Ordering};

/// Messages per round.
const ROUND: u64 = 64;
/// Rounds of the long messages' memory.
const SLOTS: u64 = 8;
/// Longest message that is written to the lanes.
const SHORT: usize = 2048;
const LARGEST: usize = 16 << 20;
const MOST: usize = 64;
/// Words of the control page.
const ROUNDS: usize = 0;
const READ: usize = 2;

struct Lanes {
    memory: Mapping,
    /// Bytes of a record.
    record: usize,
    count: usize,
}

impl Lanes {
    /// The words of a record: its header and what follows.
    #[inline(always)]
    fn word(&self, lane: usize, message: u64, word: usize) -> &AtomicU64 {
        let at = (lane * ROUND as usize + (message % ROUND) as usize) * self.record + word * 8;
        debug_assert!(at < self.count * ROUND as usize * self.record);
        // SAFETY: inside of the mapping, which has `count` lanes of `ROUND` records, and aligned; both processes use these
        // words by atomics only.
        unsafe { AtomicU64::from_ptr(self.memory.base().add(at).cast()) }
    }
}

pub(super) fn run(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let (size, count) = (args.size, args.count);
    if size == 0 || !size.is_multiple_of(8) || size > LARGEST || count == 0 || count > MOST {
        return Err(LimitError::Argument(
            "lanes takes a multiple of 8 bytes up to 16 MiB, and up to 64 lanes",
        ));
    }
    let long = size > SHORT;
    if long && !size.is_multiple_of(64) {
        return Err(LimitError::Argument("lanes takes a multiple of 64 bytes beyond 2 KiB"));
    }
    let record = if long { 16 } else { 8 + size };
    let lanes = Lanes { memory: Mapping::shared(count * ROUND as usize * record)?, record, count };
    let pages = Mapping::shared(if long { SLOTS as usize * size } else { 4096 })?;
    let control = Mapping::shared(4096)?;
    let per_round = if long { SLOTS } else { ROUND };
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        for round in 1.. {
            let mut asked = 0;
            watch.spin(|| {
                std::hint::spin_loop();
                asked = control.line(ROUNDS).load(Ordering::Acquire);
                asked >= round
            })?;
            if asked == u64::MAX {
                break;
            }
            read(&lanes, &pages, (round - 1) * per_round..round * per_round, size)?;
            control.line(READ).store(round, Ordering::Release);
        }
        Ok(())
    })?;
    let source = Mapping::private(size)?;
    source.fill(size);
    let ways = if long { Copier::all() } else { vec![Copier::Memcpy] };
    let mut round = 0;
    let winner = contest(&ways, args.seconds, |copier| {
        let mut spent = 0;
        const BATCH: u64 = 32;
        for _ in 0..BATCH {
            let first = round * per_round;
            let start = now_ns();
            for message in first..first + per_round {
                // SAFETY: the source has `size` bytes, and so has each slot of the pages, at multiples of 64; the reader
                // does not look at them before the round is told; `copier` is from `all`.
                unsafe { write(&lanes, &source, &pages, message, size, copier) };
            }
            spent += now_ns() - start;
            round += 1;
            control.line(ROUNDS).store(round, Ordering::Release);
            all_read(&control, round, peer.watch())?;
        }
        Ok((BATCH * per_round) as f64 * 1e3 / spent as f64)
    })?;
    control.line(ROUNDS).store(u64::MAX, Ordering::Release);
    peer.finish()?;
    let way = if long { format!("one copy by {:?}", winner.way) } else { "a copy for each lane".to_owned() };
    Ok(Measurement {
        value: 1.0 / winner.median,
        unit: "us",
        detail: format!("{count} lanes, {way}, {per_round} messages a round"),
    })
}

fn all_read(control: &Mapping, round: u64, watch: &Watch) -> Result<(), LimitError> {
    watch.spin(|| {
        std::hint::spin_loop();
        control.line(READ).load(Ordering::Acquire) == round
    })
}

/// Writes a message to all lanes.
///
/// # Safety
/// The source has `size` bytes that nobody writes; where that is long, it is a multiple of 64 and the pages have `SLOTS`
/// times as many, which nobody uses now; `copier` is from [`Copier::all`].
#[inline(always)]
unsafe fn write(lanes: &Lanes, source: &Mapping, pages: &Mapping, message: u64, size: usize, copier: Copier) {
    let header = message + 1;
    if size > SHORT {
        let slot = (message % SLOTS) as usize;
        // SAFETY: the caller's promise.
        unsafe { copier.copy(source.base(), pages.base().add(slot * size), size) };
        for lane in 0..lanes.count {
            lanes.word(lane, message, 1).store(slot as u64, Ordering::Relaxed);
            lanes.word(lane, message, 0).store(header, Ordering::Release);
        }
        return;
    }
    // SAFETY: the caller's promise.
    let words = unsafe { source.words(0, size) };
    for lane in 0..lanes.count {
        for (at, word) in words.iter().enumerate() {
            lanes.word(lane, message, at + 1).store(*word, Ordering::Relaxed);
        }
        lanes.word(lane, message, 0).store(header, Ordering::Release);
    }
}

/// Reads what has been written, and whether it is that.
fn read(
    lanes: &Lanes,
    pages: &Mapping,
    messages: std::ops::Range<u64>,
    size: usize,
) -> Result<(), LimitError> {
    for message in messages {
        for lane in 0..lanes.count {
            let header = lanes.word(lane, message, 0).load(Ordering::Acquire);
            let word = lanes.word(lane, message, 1).load(Ordering::Relaxed);
            let first = if size > SHORT {
                let slot = (message % SLOTS) as usize;
                if word != slot as u64 {
                    return Err(LimitError::WrongData);
                }
                // SAFETY: inside of the pages; the writer waits for the end of this round.
                unsafe { pages.words(slot * size, size)[size / 8 - 1] }
            } else {
                lanes.word(lane, message, size / 8).load(Ordering::Relaxed)
            };
            if header != message + 1 || first != (size as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) {
                return Err(LimitError::WrongData);
            }
        }
    }
    Ok(())
}
