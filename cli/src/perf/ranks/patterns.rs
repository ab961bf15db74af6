//! Batches of operations: recorded and replayed, or not.

use super::*;

impl<F: ContextFace> Bench<F> {
    /// A recorded pattern of puts, per replay.
    pub(super) async fn replay(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u8>(self.size * self.count)).await?;
        let source = self.drive(self.job.region(self.size * self.count)).await?;
        let size = self.size as u64;
        let recording = self.job.record(|r| {
            for index in 0..self.count {
                let first = index * self.size;
                window.record_put_from(r, self.peer, first, &source, first as u64, size)?;
            }
            Ok(())
        });
        let pattern = self.drive(recording).await?;
        self.barrier().await?;
        if self.leads() {
            let (mut batches, mut round) = (self.batches(50), 0u64);
            while batches.go_on() {
                for _ in 0..50 {
                    round += 1;
                    source.write(0, &round.to_ne_bytes())?;
                    pattern.replay_on(&self.face).await?;
                }
            }
            figure(batches.microseconds());
            let seen = self.drive(window.get_slice(self.peer, 0, 8)).await?;
            assert_eq!(seen, round.to_ne_bytes(), "a replay was stale");
        }
        self.barrier().await
    }

    /// The same puts, unrecorded, per batch: one awaited after the other, or all started before the first is awaited.
    pub(super) async fn puts(&self, joined: bool) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u8>(self.size * self.count)).await?;
        self.barrier().await?;
        if self.leads() {
            let mut data = vec![0; self.size * self.count];
            let mut batches = Vec::new();
            let start = Instant::now();
            let mut round = 0u64;
            while start.elapsed() < self.time {
                round += 1;
                let batch = Instant::now();
                data[..8].copy_from_slice(&round.to_ne_bytes());
                let starts = (0..data.len()).step_by(self.size);
                let puts =
                    starts.map(|first| window.put_slice(self.peer, first, &data[first..first + self.size]));
                if joined {
                    self.drive(futures::future::try_join_all(puts)).await?;
                } else {
                    for put in puts {
                        self.drive(put).await?;
                    }
                }
                batches.push(batch.elapsed().as_secs_f64() * 1e6);
            }
            figure(median(&mut batches));
            let seen = self.drive(window.get_slice(self.peer, 0, 8)).await?;
            assert_eq!(seen, round.to_ne_bytes(), "a put is missing");
        }
        self.barrier().await
    }

    /// Messages, per batch, until the other side has told that it has them all: those of each batch, or of so many.
    pub(super) async fn sends(&self, how: Sends, batches_told: u64) -> Result<()> {
        let (message, arrived, _) = self.counting("message")?;
        let (told, all_arrived, word) = self.counting("told")?;
        let bytes = self.size * self.count;
        let each = self.count as u64 * batches_told;
        let source = self.drive(self.job.region(bytes)).await?;
        let firsts = || (0..bytes).step_by(self.size);
        let recording = self.job.record(|r| {
            for first in firsts() {
                r.send(&message, self.peer, source.slice(first..first + self.size))?;
            }
            Ok(())
        });
        let pattern = self.drive(recording).await?;
        let mut data = vec![0; bytes];
        self.barrier().await?;
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            let (mut round, mut sent) = (0u64, 0u64);
            while start.elapsed() < self.time {
                round += 1;
                let batch = Instant::now();
                for _ in 0..batches_told {
                    sent += 1;
                    match how {
                        Sends::Replayed => {
                            source.write(0, &sent.to_ne_bytes())?;
                            pattern.replay_on(&self.face).await?;
                        }
                        Sends::Awaited => {
                            data[..8].copy_from_slice(&sent.to_ne_bytes());
                            for first in firsts() {
                                message.send(self.peer, &data[first..first + self.size]).await?;
                            }
                        }
                        Sends::Joined => {
                            data[..8].copy_from_slice(&sent.to_ne_bytes());
                            let send = |first| message.send(self.peer, &data[first..first + self.size]);
                            futures::future::try_join_all(firsts().map(send)).await?;
                        }
                    }
                }
                all_arrived.reach_on(&self.face, round).await;
                batches.push(batch.elapsed().as_secs_f64() / batches_told as f64 * 1e6);
            }
            told.send(self.peer, STOP.to_ne_bytes()).await?;
            figure(median(&mut batches));
        } else {
            let mut round = 0u64;
            loop {
                // What is told ends the last batch, too, which nobody sends.
                let next = (round + 1) * each;
                let batch = std::pin::pin!(arrived.reach_on(&self.face, next));
                let end = std::pin::pin!(all_arrived.reach_on(&self.face, 1));
                if let futures::future::Either::Right(_) = futures::future::select(batch, end).await {
                    break;
                }
                round += 1;
                told.send(self.peer, round.to_ne_bytes()).await?;
            }
            assert_eq!(word.load(std::sync::atomic::Ordering::Relaxed), STOP, "the end is not the end");
            assert_eq!(arrived.value(), round * each, "messages were lost");
        }
        self.barrier().await
    }
}

/// How messages of a batch are sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sends {
    /// Recorded once.
    Replayed,
    /// One awaited after the other.
    Awaited,
    /// All started before the first is awaited.
    Joined,
}
