//! `contended_add` and `bare_updates`: two processes that change the same words by atomic instructions.
//!
//! The first is the microseconds of an addition to one word that both add to all the time; the second the millions of
//! exclusive-ors of random words of a table a second, by both together, half of the table for each.

use super::contest::contest;
use super::copy::prefetch_write;
use super::process::{Mapping, Peer, now_ns};
use super::{LimitArgs, LimitError, Measurement, random_words};
use std::sync::atomic::{AtomicU64, Ordering};

const ADDS: u64 = 20_000;
const UPDATES: u64 = 500_000;
const LARGEST: usize = 1 << 30;
/// How many updates ahead a word may be asked for.
const AHEAD: usize = 16;
/// Lines of the control page: which batch is to be done, which is, the common word, and what the other one added.
const ASKED: usize = 0;
const DONE: usize = 2;
const WORD: usize = 4;
const ADDED: usize = 6;

/// `contended_add`.
pub(super) fn add(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let memory = Mapping::shared(4096)?;
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        // Adds until it is told to stop, whether or not a batch is measured: then there is always another one.
        let mut added = 0;
        while memory.line(ASKED).load(Ordering::Acquire) == 0 {
            for _ in 0..1000 {
                memory.line(WORD).fetch_add(1, Ordering::AcqRel);
            }
            added += 1000;
            if added % 1_000_000 == 0 {
                watch.check()?;
            }
            memory.line(DONE).store(added, Ordering::Relaxed);
        }
        memory.line(ADDED).store(added, Ordering::Release);
        Ok(())
    })?;
    peer.watch().spin(|| memory.line(DONE).load(Ordering::Acquire) > 0)?;
    let mut mine = 0;
    let winner = contest(&[()], args.seconds, |()| {
        peer.watch().check()?;
        let start = now_ns();
        for _ in 0..ADDS {
            memory.line(WORD).fetch_add(1, Ordering::AcqRel);
        }
        mine += ADDS;
        Ok(ADDS as f64 * 1e3 / (now_ns() - start) as f64)
    })?;
    memory.line(ASKED).store(1, Ordering::Release);
    peer.finish()?;
    if memory.line(WORD).load(Ordering::Acquire) != mine + memory.line(ADDED).load(Ordering::Acquire) {
        return Err(LimitError::WrongData);
    }
    Ok(Measurement { value: 1.0 / winner.median, unit: "us", detail: "lock xadd by both".to_owned() })
}

/// `bare_updates`: the size is that of each half of the table.
pub(super) fn updates(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let words = args.size / 8 * 2;
    if !args.size.is_power_of_two() || args.size < 8 || args.size > LARGEST {
        return Err(LimitError::Argument("bare_updates takes a power of two from 8 bytes to 1 GiB"));
    }
    let control = Mapping::shared(4096)?;
    let table = Mapping::shared(words * 8)?;
    // SAFETY: the table has so many words, a power of two, and both processes use them by atomics only.
    let place = |word: u64| unsafe { table.base().cast::<u64>().add(word as usize & (words - 1)) };
    let update = |stream: u64, ahead: bool| {
        let change = |word: u64| {
            // SAFETY: as above.
            unsafe { AtomicU64::from_ptr(place(word)) }.fetch_xor(word, Ordering::AcqRel);
        };
        let mut random = random_words(stream).take(UPDATES as usize);
        if ahead {
            for later in random_words(stream).skip(AHEAD).take(UPDATES as usize) {
                prefetch_write(place(later).cast());
                random.next().map(change);
            }
        } else {
            random.for_each(change);
        }
    };
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        table.fault_in();
        for batch in 1.. {
            let mut asked = 0;
            watch.spin(|| {
                asked = control.line(ASKED).load(Ordering::Acquire);
                asked >> 1 >= batch
            })?;
            if asked == u64::MAX {
                break;
            }
            update(1, asked & 1 == 1);
            control.line(DONE).store(batch, Ordering::Release);
        }
        Ok(())
    })?;
    let mut batch = 0;
    let winner = contest(&[false, true], args.seconds, |ahead| {
        batch += 1;
        let start = now_ns();
        control.line(ASKED).store(batch << 1 | u64::from(ahead), Ordering::Release);
        update(0, ahead);
        peer.watch().spin(|| control.line(DONE).load(Ordering::Acquire) == batch)?;
        Ok(2e3 * UPDATES as f64 / (now_ns() - start) as f64)
    })?;
    control.line(ASKED).store(u64::MAX, Ordering::Release);
    peer.finish()?;
    // Done an even number of times, every update is undone.
    let mut expected = vec![0u64; words];
    for stream in (0..2).filter(|_| batch % 2 == 1) {
        for word in random_words(stream).take(UPDATES as usize) {
            expected[word as usize & (words - 1)] ^= word;
        }
    }
    // SAFETY: the mapping has so many bytes, and nobody writes them any more.
    if unsafe { table.words(0, words * 8) } != expected {
        return Err(LimitError::WrongData);
    }
    let ahead = if winner.way { format!(", prefetching {AHEAD} ahead") } else { String::new() };
    let detail = format!("lock xor by both, {} KiB for each{ahead}", args.size >> 10);
    Ok(Measurement { value: winner.median, unit: "M/s", detail })
}
