//! `two_copy_pipeline`: the speed of a stream of messages through shared memory with one copy in and one copy
//! out, in GB/s. Bytes are counted once.
//!
//! The sender copies from a private buffer, the same for every message and so as hot as its size allows, into
//! a ring of chunks; the receiver copies the chunks to a private buffer and adds up all 64-bit words of the
//! message there. Two copies are what a transport needs that neither shares the users' buffers nor
//! lets the receiver work in the ring, and both processes work at the same time, so the slower of the two sides
//! is the limit. Every chunk is announced on its own, a message of up to 128 KiB may be one chunk.
//!
//! The number and the size of the chunks, the way of copying and the way of adding up are tried out. Adding
//! up has two ways: a few cache lines *behind* the copy, in the same loop, so that the misses of the copy
//! hide the additions, and *after* the copy of each 8 KiB, as a receiver does whose copy and sum
//! are separate routines. The former is faster; the detail tells the figure of the latter too.

use super::contest::contest;
use super::copy::{Copier, copy_and_sum, sum};
use super::process::{Mapping, Peer, Watch, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use std::sync::atomic::Ordering;

/// Bytes of one batch, about 3 ms.
const BATCH: usize = 48 << 20;
/// How much is copied before it is added up, where the two are separate.
const PIECE: usize = 8192;
const LARGEST: usize = 64 << 20;

/// The words of the control block, each a line of its own.
const JOB: usize = 0;
const MESSAGES: usize = 2;
const HEAD: usize = 4;
const TAIL: usize = 6;
const SUM: usize = 8;
const CONTROL: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Plan {
    chunk: usize,
    slots: usize,
    sender: Copier,
    behind: bool,
}

impl Plan {
    fn all(size: usize) -> Vec<Self> {
        let mut chunks: Vec<usize> = [16 << 10, 32 << 10, 64 << 10, 128 << 10]
            .into_iter()
            .filter(|c| size.is_multiple_of(*c))
            .collect();
        if size <= 128 << 10 && !chunks.contains(&size) {
            chunks.push(size);
        }
        if chunks.is_empty() {
            chunks.push(4096);
        }
        let senders = Copier::all().into_iter().filter(|c| matches!(c, Copier::Memcpy | Copier::RepMovsb));
        let mut all = Vec::new();
        for sender in senders {
            for &chunk in &chunks {
                for ring in [256 << 10, 512 << 10, 1 << 20, 2 << 20] {
                    let slots = ring / chunk;
                    all.push(Self { chunk, slots, sender, behind: true });
                    if ring == 512 << 10 {
                        all.push(Self { chunk, slots, sender, behind: false });
                    }
                }
            }
        }
        all
    }

    /// The receiver tells only of every so many chunks that they are free again.
    fn stride(&self) -> u64 {
        (self.slots as u64 / 8).max(1)
    }
}

pub(super) fn run(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let size = args.size;
    if size == 0 || !size.is_multiple_of(4096) || size > LARGEST {
        return Err(LimitError::Argument("two_copy_pipeline takes a multiple of 4096 bytes up to 64 MiB"));
    }
    let plans = Plan::all(size);
    let ring_len = plans.iter().map(|p| p.chunk * p.slots).max().unwrap_or(0);
    let control = Mapping::shared(CONTROL)?;
    let ring = Mapping::shared(ring_len)?;
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        ring.fault_in();
        let target = Mapping::private(size)?;
        for batch in 1.. {
            let mut job = 0;
            watch.spin(|| {
                std::hint::spin_loop();
                job = control.line(JOB).load(Ordering::Acquire);
                job >> 32 == batch
            })?;
            match plans.get((job & 0xffff_ffff) as usize) {
                Some(plan) => receive(plan, size, &control, &ring, &target, watch)?,
                None => break,
            }
        }
        Ok(())
    })?;

    let source = Mapping::private(size)?;
    source.fill(size);
    // SAFETY: `size` bytes of the mapping, a multiple of 8; nobody writes them any more.
    let once = sum(unsafe { source.words(0, size) });
    let messages = (BATCH / size).max(8) as u64;
    let ways: Vec<usize> = (0..plans.len()).collect();
    let mut batch = 0;
    let mut order = |way: usize| {
        batch += 1;
        control.line(MESSAGES).store(messages, Ordering::Relaxed);
        control.line(HEAD).store(0, Ordering::Relaxed);
        control.line(TAIL).store(0, Ordering::Relaxed);
        control.line(JOB).store(batch << 32 | way as u64, Ordering::Release);
    };
    let winner = contest(&ways, args.seconds, |way| {
        order(way);
        let speed = send(&plans[way], size, messages, &control, &ring, &source, peer.watch())?;
        if control.line(SUM).load(Ordering::Relaxed) != once.wrapping_mul(messages) {
            return Err(LimitError::WrongData);
        }
        Ok(speed)
    })?;
    order(ways.len());
    peer.finish()?;
    let plan = plans[winner.way];
    let after = winner.tried.iter().filter(|(way, _)| !plans[*way].behind).map(|t| t.1).fold(0.0, f64::max);
    Ok(Measurement {
        value: winner.median,
        unit: "GB/s",
        detail: format!(
            "{} chunks of {} KiB, sent by {:?}, added up {} the copy; {after:.1} at best when added up after the copy of each {} KiB",
            plan.slots,
            plan.chunk >> 10,
            plan.sender,
            if plan.behind { "behind" } else { "after" },
            PIECE >> 10,
        ),
    })
}

/// Sends the messages of a batch and returns GB/s, from a quarter of the way on.
fn send(
    plan: &Plan,
    size: usize,
    messages: u64,
    control: &Mapping,
    ring: &Mapping,
    source: &Mapping,
    watch: &Watch,
) -> Result<f64, LimitError> {
    let (head, tail) = (control.line(HEAD), control.line(TAIL));
    let slots = plan.slots as u64;
    let chunks = messages * (size / plan.chunk) as u64;
    let (mut free, mut slot, mut at) = (slots, 0, 0);
    // When the receiver had how many chunks: where the measured part begins.
    let mut start = (0, now_ns());
    let warm = chunks / 4;
    for i in 0..chunks {
        if i == free {
            watch.spin(|| {
                free = tail.load(Ordering::Acquire) + slots;
                if i == free {
                    std::hint::spin_loop();
                }
                i != free
            })?;
            if start.0 == 0 && free - slots >= warm {
                start = (free - slots, now_ns());
            }
        }
        // SAFETY: `at + chunk <= size` and `(slot + 1) * chunk` is inside the ring, both multiples of 64 of
        // page-aligned mappings. The receiver has released this slot and does not look at it before `head`.
        unsafe { plan.sender.copy(source.base().add(at), ring.base().add(slot * plan.chunk), plan.chunk) };
        head.store(i + 1, Ordering::Release);
        slot = if slot + 1 == plan.slots { 0 } else { slot + 1 };
        at = if at + plan.chunk == size { 0 } else { at + plan.chunk };
    }
    watch.spin(|| tail.load(Ordering::Acquire) == chunks)?;
    Ok(((chunks - start.0) * plan.chunk as u64) as f64 / (now_ns() - start.1) as f64)
}

/// Receives the messages of a batch and leaves the sum of all their words.
fn receive(
    plan: &Plan,
    size: usize,
    control: &Mapping,
    ring: &Mapping,
    target: &Mapping,
    watch: &Watch,
) -> Result<(), LimitError> {
    let (head, tail) = (control.line(HEAD), control.line(TAIL));
    let messages = control.line(MESSAGES).load(Ordering::Relaxed);
    let chunks = messages * (size / plan.chunk) as u64;
    let stride = plan.stride();
    let lag = (size / 16).clamp(256, 2048);
    let piece = if plan.chunk.is_multiple_of(PIECE) { PIECE } else { plan.chunk };
    let (mut seen, mut slot, mut at) = (0, 0, 0);
    let (mut total, mut told) = (0u64, 0);
    for i in 0..chunks {
        if i == seen {
            watch.spin(|| {
                seen = head.load(Ordering::Acquire);
                if i == seen {
                    std::hint::spin_loop();
                }
                i != seen
            })?;
        }
        // SAFETY: inside the ring, as in `send`.
        let source = unsafe { ring.base().add(slot * plan.chunk) };
        if plan.behind {
            // SAFETY: the slot is full and the sender leaves it alone until `tail`; `at + chunk <= size`, the
            // target is this process' own, and all are multiples of 256.
            total = total.wrapping_add(unsafe { copy_and_sum(source, target.base(), at, plan.chunk, lag) });
        } else {
            for done in (0..plan.chunk).step_by(piece) {
                // SAFETY: as above; `piece` divides the chunk.
                let words = unsafe {
                    Copier::Memcpy.copy(source.add(done), target.base().add(at + done), piece);
                    target.words(at + done, piece)
                };
                total = total.wrapping_add(sum(words));
            }
        }
        slot = if slot + 1 == plan.slots { 0 } else { slot + 1 };
        at += plan.chunk;
        if at == size {
            at = 0;
            if plan.behind {
                // SAFETY: the last `lag` bytes of the message, which are written; `lag <= size`.
                total = total.wrapping_add(sum(unsafe { target.words(size - lag, lag) }));
            }
        }
        if i + 1 - told == stride || i + 1 == chunks {
            told = i + 1;
            if told == chunks {
                control.line(SUM).store(total, Ordering::Relaxed);
            }
            tail.store(told, Ordering::Release);
        }
    }
    Ok(())
}
