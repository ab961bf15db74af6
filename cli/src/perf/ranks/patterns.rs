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
            let mut batches = Vec::new();
            let start = Instant::now();
            let mut round = 0u64;
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..50 {
                    round += 1;
                    source.write(0, &round.to_ne_bytes())?;
                    pattern.replay_on(&self.face).await?;
                }
                batches.push(batch.elapsed().as_secs_f64() / 50.0 * 1e6);
            }
            figure(median(&mut batches));
            assert_eq!(window.get_slice(self.peer, 0, 8).await?, round.to_ne_bytes(), "a replay was stale");
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
}
