//! Data that is not contiguous: puts between layouts, and copies between layouts in one process.

use super::*;
use crate::limits;
use posthaste::datatype::{Datatype, Layout, redistribute};

/// Bytes of a block where the size is that of all blocks.
const BLOCK: usize = 1024;

/// Every second block of `block` bytes.
fn strided(count: usize, block: usize) -> Result<Datatype> {
    Ok(Datatype::of::<u8>().vector(count as u64, block as u64, 2 * block as i64)?)
}

fn contiguous(bytes: usize) -> Result<Datatype> {
    Ok(Datatype::of::<u8>().contiguous(bytes as u64)?)
}

fn pattern(bytes: usize) -> Lines {
    Lines::filled(bytes, |at| (at * 5 + (at >> 8)) as u8)
}

/// Whether the blocks of the second are those of the first, every second one.
fn is_spread(spread: &[u8], data: &[u8], block: usize) -> bool {
    data.chunks(block).zip(spread.chunks(2 * block)).all(|(block, there)| there.starts_with(block))
}

/// The clock of operations that move so many bytes each: GB/s, the median of batches.
struct Pace {
    bytes: usize,
    /// Operations of a batch, and how many of them are still to be begun.
    count: usize,
    left: usize,
    time: Duration,
    start: Instant,
    batch: Instant,
    samples: Vec<f64>,
}

impl Pace {
    fn new(bytes: usize, time: Duration) -> Self {
        let (count, now) = (((4 << 20) / bytes).clamp(4, 1000), Instant::now());
        Self { bytes, count, left: count, time, start: now, batch: now, samples: Vec::new() }
    }

    /// Whether there is to be another operation.
    fn goes_on(&mut self) -> bool {
        if self.left == 0 {
            let seconds = self.batch.elapsed().as_secs_f64();
            self.samples.push((self.count * self.bytes) as f64 / seconds / 1e9);
            if self.start.elapsed() >= self.time {
                return false;
            }
            self.left = self.count;
            self.batch = Instant::now();
        }
        self.left -= 1;
        true
    }

    fn figure(&mut self) -> f64 {
        median(&mut self.samples)
    }
}

impl<F: ContextFace> Bench<F> {
    /// GB/s of an operation that moves so many bytes.
    async fn paced<O>(&self, bytes: usize, mut operation: impl FnMut() -> O) -> Result<f64>
    where
        O: Future<Output = Result<()>>,
    {
        let mut pace = Pace::new(bytes, self.time);
        while pace.goes_on() {
            operation().await?;
        }
        Ok(pace.figure())
    }

    /// A put to blocks of the peer's memory, awaited: of contiguous bytes, or of blocks as well.
    pub(super) async fn strided_put(&self, from_blocks: bool) -> Result<()> {
        let (block, bytes) = (self.size, self.size * self.count);
        let window = self.job.shmalloc::<u8>(2 * bytes).await?;
        let (packed, spread) = (contiguous(bytes)?, strided(self.count, block)?);
        let (packed, spread) = (Layout::new(&packed, 1), Layout::new(&spread, 1));
        let data = pattern(bytes);
        self.barrier().await?;
        if self.leads() {
            let mut blocks = Lines::zeroed(2 * bytes);
            redistribute(&mut blocks[..], &spread, &data[..], &packed)?;
            let (source, from) = if from_blocks { (&blocks, &spread) } else { (&data, &packed) };
            let put =
                || async { Ok(self.drive(window.put_typed(self.peer, &spread, &source[..], from)).await?) };
            figure(self.paced(bytes, put).await?);
            let there = window.get_slice(self.peer, 0, 2 * bytes).await?;
            assert!(is_spread(&there, &data, block), "a put was damaged");
        }
        self.barrier().await
    }

    /// The same without layouts at the peer: put to staging memory with a signal, and unpacked by the peer, which signals back.
    /// Bytes that are contiguous already are not packed before.
    pub(super) async fn strided_packed(&self, from_blocks: bool) -> Result<()> {
        // The words that count what has come, and that mean "stop".
        let (count, end) = (0, 1);
        let (block, bytes) = (self.size, self.size * self.count);
        let staging = self.job.shmalloc::<u8>(bytes).await?;
        let window = self.job.shmalloc::<u8>(2 * bytes).await?;
        let signals = self.job.shmalloc::<u64>(2).await?;
        let (packed, spread) = (contiguous(bytes)?, strided(self.count, block)?);
        let (packed, spread) = (Layout::new(&packed, 1), Layout::new(&spread, 1));
        let data = pattern(bytes);
        self.barrier().await?;
        let mut round = 0;
        if self.leads() {
            let (mut blocks, mut buffer) = (Lines::zeroed(2 * bytes), Lines::zeroed(bytes));
            redistribute(&mut blocks[..], &spread, &data[..], &packed)?;
            let mut pace = Pace::new(bytes, self.time);
            while pace.goes_on() {
                round += 1;
                let source = if from_blocks {
                    redistribute(&mut buffer[..], &packed, &blocks[..], &spread)?;
                    &buffer[..]
                } else {
                    &data[..]
                };
                staging.put_signal(self.peer, 0, source, signals.signal_add(count, 1)).await?;
                signals.wait_until_on(&self.face, count, |unpacked| unpacked >= round).await?;
            }
            figure(pace.figure());
            signals.put(self.peer, end, STOP).await?;
            signals.add(self.peer, count, 1).await?;
            let there = window.get_slice(self.peer, 0, 2 * bytes).await?;
            assert!(is_spread(&there, &data, block), "what was unpacked is damaged");
        } else {
            let gone = || failed("the window is gone");
            let staged = staging.own_memory().ok_or_else(gone)?;
            let target = window.own_memory().ok_or_else(gone)?;
            loop {
                round += 1;
                signals.wait_until_on(&self.face, count, |arrived| arrived >= round).await?;
                if signals.load(end) == Some(STOP) {
                    break;
                }
                redistribute(target, &spread, staged, &packed)?;
                signals.add(self.peer, count, 1).await?;
            }
        }
        self.barrier().await
    }

    /// Puts of contiguous bytes to blocks of 1 KiB, several under way.
    pub(super) async fn typed_put_bandwidth(&self) -> Result<()> {
        let (block, bytes) = (BLOCK, self.size);
        let window = self.job.shmalloc::<u8>(2 * bytes).await?;
        let (from, to) = (contiguous(bytes)?, strided(bytes / block, block)?);
        let data = pattern(bytes).into_bytes();
        self.barrier().await?;
        if self.leads() {
            let (from, to) = (Layout::new(&from, 1), Layout::new(&to, 1));
            let start = Instant::now();
            let mut count = 0u64;
            // Owned, as those of the contiguous put are.
            let more = std::iter::from_fn(|| (start.elapsed() < self.time).then(|| data.clone()));
            let puts = more.map(|data| window.put_typed_bytes(self.peer, &to, data, &from));
            let mut puts = futures::stream::iter(puts).buffered(in_flight(self.size));
            while let Some(put) = puts.next().await {
                put?;
                count += 1;
            }
            figure(count as f64 * bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
            let there = window.get_slice(self.peer, 0, 2 * bytes).await?;
            assert!(is_spread(&there, &data, block), "a put was damaged");
        }
        self.barrier().await
    }

    /// A put of 256 KiB from blocks to blocks of half the length, straight or staged.
    pub(super) async fn typed_between(&self, thresholds: Thresholds) -> Result<()> {
        const ALL: usize = 256 << 10;
        let block = self.size;
        let (from, to) = (strided(ALL / block, block)?, strided(2 * ALL / block, block / 2)?);
        let window = self.job.shmalloc::<u8>(2 * ALL).await?;
        let data = pattern(2 * ALL);
        self.barrier().await?;
        if self.leads() {
            let (from, to) = (Layout::new(&from, 1), Layout::new(&to, 1));
            let put = || async {
                let put = window.put_typed_with(&thresholds, self.peer, &to, &data[..], &from);
                Ok(self.drive(put).await?)
            };
            figure(self.paced(ALL, put).await?);
            let there = window.get_slice(self.peer, 0, 2 * ALL).await?;
            let sent: Vec<u8> = data.chunks(2 * block).flat_map(|pair| &pair[..block]).copied().collect();
            assert!(is_spread(&there, &sent, block / 2), "a put was damaged");
        }
        self.barrier().await
    }

    /// A copy from one layout to another within the process.
    async fn copied(
        &self,
        (to, target): (&Layout<'_>, &mut [u8]),
        (from, source): (&Layout<'_>, &mut [u8]),
        verify: impl Fn(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        source.copy_from_slice(&pattern(source.len()));
        let bytes = from.size().unwrap_or_default() as usize;
        let mut copy = || {
            let (into, out_of) = (std::hint::black_box(&mut *target), std::hint::black_box(&*source));
            redistribute(into, to, out_of, from).map(|_| ())
        };
        figure(self.paced(bytes, || std::future::ready(copy().map_err(Into::into))).await?);
        assert!(verify(target, source), "a copy is wrong");
        self.barrier().await
    }

    pub(super) async fn layout_strided(&self) -> Result<()> {
        let (block, bytes) = (self.size, self.size * self.count);
        let (from, to) = (contiguous(bytes)?, strided(self.count, block)?);
        let (from, to) = (Layout::new(&from, 1), Layout::new(&to, 1));
        let (mut target, mut source) = (Lines::zeroed(2 * bytes), Lines::zeroed(bytes));
        let verify = |there: &[u8], data: &[u8]| is_spread(there, data, block);
        self.copied((&to, &mut target), (&from, &mut source), verify).await
    }

    /// Contiguous words to blocks of a few of them at irregular places.
    pub(super) async fn layout_irregular(&self) -> Result<()> {
        let blocks = limits::irregular(self.count);
        let words: usize = blocks.iter().map(|(_, len)| len).sum();
        let end = blocks.last().map_or(0, |(at, len)| at + len);
        let listed: Vec<(i64, u64)> = blocks.iter().map(|(at, len)| (*at as i64, *len as u64)).collect();
        let to = Datatype::of::<u64>().indexed(&listed)?;
        let from = Datatype::of::<u64>().contiguous(words as u64)?;
        let (from, to) = (Layout::new(&from, 1), Layout::new(&to, 1));
        let verify = |there: &[u8], data: &[u8]| {
            let mut done = 0;
            blocks.iter().all(|&(at, len)| {
                let block = &data[done * 8..(done + len) * 8];
                done += len;
                there[at * 8..].starts_with(block)
            })
        };
        let (mut target, mut source) = (vec![0; end * 8], vec![0; words * 8]);
        self.copied((&to, &mut target), (&from, &mut source), verify).await
    }

    /// The columns of a matrix of 10 × 10 numbers become rows.
    pub(super) async fn layout_transpose(&self) -> Result<()> {
        const SIDE: usize = 10;
        let side = SIDE as u64;
        let column = Datatype::of::<f64>().vector(side, 1, SIDE as i64)?;
        let columns = column.resized(0, 8)?;
        let row = Datatype::of::<f64>().contiguous(side)?;
        let (from, to) = (Layout::new(&columns, side), Layout::new(&row, side));
        let bytes = SIDE * SIDE * 8;
        let element = |matrix: &[u8], row: usize, column: usize| {
            let at = (row * SIDE + column) * 8;
            matrix[at..at + 8].to_vec()
        };
        let verify = |there: &[u8], data: &[u8]| {
            (0..SIDE * SIDE).all(|at| {
                let (row, column) = (at / SIDE, at % SIDE);
                element(there, row, column) == element(data, column, row)
            })
        };
        let (mut target, mut source) = (vec![0; bytes], vec![0; bytes]);
        self.copied((&to, &mut target), (&from, &mut source), verify).await
    }
}
