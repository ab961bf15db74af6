//! `lanes`: microseconds to tell `count` readers of one message, each in a lane of its own.
//!
//! Up to 2 KiB the message itself is written to each lane, behind a header that is its publication flag; longer ones are
//! copied once, to shared memory, and each lane gets a header that names the place. The readers are one process on the
//! other core that reads all lanes, and the long messages word by word, when a round is over, so that the lines have to come
//! back each time, and nobody takes them away while they are written. Through how much memory the long ones go is tried out.

use super::contest::contest;
use super::copy::{Copier, sum};
use super::process::{Mapping, Peer, Watch, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use std::sync::atomic::{AtomicU64, Ordering};

/// Messages per round.
const ROUND: u64 = 64;
/// Long messages per round.
const LONG_ROUND: u64 = 8;
/// Places that the long messages go through in turn: as few as a round has, or so many that each has left the caches of
/// the processors when it is used again.
const SLOTS: [u64; 2] = [LONG_ROUND, 64];
/// Memory beyond which there are no more places than a round has.
const MOST_MEMORY: u64 = 16 << 20;
/// Longest message that is written to the lanes.
const SHORT: usize = 2048;
const LARGEST: usize = 16 << 20;
const MOST: usize = 64;
/// Words of the control page.
const ROUNDS: usize = 0;
const READ: usize = 2;

/// How the messages are written.
#[derive(Clone, Copy, Debug)]
struct Way {
    copier: Copier,
    slots: u64,
}

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
    let rotations =
        SLOTS.into_iter().filter(|slots| *slots == LONG_ROUND || slots * size as u64 <= MOST_MEMORY);
    let slots = rotations.clone().max().unwrap_or(LONG_ROUND);
    let pages = Mapping::shared(if long { slots as usize * size } else { 4096 })?;
    let control = Mapping::shared(4096)?;
    let per_round = if long { LONG_ROUND } else { ROUND };
    let source = Mapping::private(size)?;
    source.fill(size);
    // SAFETY: its words, which nobody writes any more.
    let expected = sum(unsafe { source.words(0, size) });
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
            read(&lanes, &pages, (round - 1) * per_round..round * per_round, size, slots, expected)?;
            control.line(READ).store(round, Ordering::Release);
        }
        Ok(())
    })?;
    let copiers = if long { Copier::all() } else { vec![Copier::Memcpy] };
    let rotations: Vec<u64> = if long { rotations.collect() } else { vec![LONG_ROUND] };
    let ways: Vec<Way> = copiers
        .into_iter()
        .flat_map(|copier| rotations.iter().map(move |&slots| Way { copier, slots }))
        .collect();
    let mut round = 0;
    let winner = contest(&ways, args.seconds, |way| {
        let mut spent = 0;
        const BATCH: u64 = 32;
        for _ in 0..BATCH {
            let first = round * per_round;
            let start = now_ns();
            for message in first..first + per_round {
                // SAFETY: the source has `size` bytes, and so has each slot of the pages, at multiples of 64; the reader
                // does not look at them before the round is told; `way.copier` is from `all`.
                unsafe { write(&lanes, &source, &pages, message, size, way) };
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
    let Way { copier, slots } = winner.way;
    let way = if long {
        format!("one copy by {copier:?} to one of {slots} places")
    } else {
        "a copy for each lane".to_owned()
    };
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
/// The source has `size` bytes that nobody writes; where that is long, it is a multiple of 64 and the pages have
/// `way.slots` times as many, which nobody uses now; `way.copier` is from [`Copier::all`].
#[inline(always)]
unsafe fn write(lanes: &Lanes, source: &Mapping, pages: &Mapping, message: u64, size: usize, way: Way) {
    let header = message + 1;
    if size > SHORT {
        let slot = (message % way.slots) as usize;
        // SAFETY: the caller's promise.
        unsafe { way.copier.copy(source.base(), pages.base().add(slot * size), size) };
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

/// Reads what has been written, and whether it is that: messages whose words add up to `expected`.
fn read(
    lanes: &Lanes,
    pages: &Mapping,
    messages: std::ops::Range<u64>,
    size: usize,
    slots: u64,
    expected: u64,
) -> Result<(), LimitError> {
    for message in messages {
        let mut place = None;
        for lane in 0..lanes.count {
            let header = lanes.word(lane, message, 0).load(Ordering::Acquire);
            let word = lanes.word(lane, message, 1).load(Ordering::Relaxed);
            let right = if size > SHORT {
                word < slots && *place.get_or_insert(word) == word
            } else {
                let words = (1..=size / 8).map(|at| lanes.word(lane, message, at).load(Ordering::Relaxed));
                words.fold(0, u64::wrapping_add) == expected
            };
            if header != message + 1 || !right {
                return Err(LimitError::WrongData);
            }
        }
        if let Some(slot) = place {
            // SAFETY: inside of the pages; the writer waits for the end of this round.
            if sum(unsafe { pages.words(slot as usize * size, size) }) != expected {
                return Err(LimitError::WrongData);
            }
        }
    }
    Ok(())
}
