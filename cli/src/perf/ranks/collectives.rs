//! One message to many, and the collective operations of a group.

use super::*;
use posthaste::{ConnectionManager, Group, Part, Reduce};

impl<F: ContextFace> Bench<F> {
    /// A call that sends to all others, as far as its future; they have what came before when a round begins.
    pub(super) async fn multicast(&self) -> Result<()> {
        let (sample, round_len) = if self.size <= 2048 { (16, 64) } else { (4, 8) };
        let (message, arrived, last) =
            if self.size == 8 { self.counting("multicast")? } else { self.reading("multicast")? };
        let (done, all_done, _) = self.counting("done")?;
        let others: Vec<Rank> = self.job.ranks().filter(|rank| *rank != self.me).collect();
        self.barrier().await?;
        let mut round = 0u64;
        if self.leads() {
            let payload = |word: u64| {
                let mut payload = Lines::filled(self.size, |_| 3);
                payload[..8].copy_from_slice(&word.to_ne_bytes());
                payload.into_bytes()
            };
            let data = payload(0);
            let mut samples = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                round += 1;
                for _ in 0..round_len / sample {
                    let sampled = Instant::now();
                    for _ in 0..sample {
                        let to = others.iter().copied();
                        if self.size == 8 {
                            message.multicast(to, round.to_ne_bytes()).await?;
                        } else {
                            message.multicast(to, data.clone()).await?;
                        }
                    }
                    samples.push(sampled.elapsed().as_secs_f64() / sample as f64 * 1e6);
                }
                all_done.reach_on(&self.face, round * others.len() as u64).await;
            }
            message.multicast(others.iter().copied(), payload(STOP)).await?;
            figure(median(&mut samples));
        } else {
            loop {
                arrived.reach_on(&self.face, round * round_len + 1).await;
                if last.load(std::sync::atomic::Ordering::Relaxed) == STOP {
                    break;
                }
                round += 1;
                arrived.reach_on(&self.face, round * round_len).await;
                done.send(Rank(0), round.to_ne_bytes()).await?;
            }
        }
        self.barrier().await
    }

    /// The same of a call that sends each of them a buffer of its own, which they receive one by one.
    pub(super) async fn many_to_many(&self) -> Result<()> {
        let (sample, round_len) = (16u32, 64u32);
        let (done, all_done, _) = self.counting("done")?;
        let connection = ConnectionManager::new(1).open().await;
        let (many, id) = (self.job.many_to_many(), connection.id());
        let others: Vec<Rank> = self.job.ranks().filter(|rank| *rank != self.me).collect();
        self.barrier().await?;
        if self.leads() {
            let messages = |word: u64| {
                let payload = |to: &Rank| {
                    let mut payload = vec![to.0 as u8; self.size];
                    payload[..8].copy_from_slice(&word.to_ne_bytes());
                    (*to, Bytes::from(payload))
                };
                others.iter().map(payload).collect::<Vec<_>>()
            };
            let data = messages(0);
            let mut samples = Vec::new();
            let (start, mut round) = (Instant::now(), 0u64);
            while start.elapsed() < self.time {
                round += 1;
                for _ in 0..round_len / sample {
                    let sampled = Instant::now();
                    for _ in 0..sample {
                        many.send(id, data.iter().cloned()).await?;
                    }
                    samples.push(sampled.elapsed().as_secs_f64() / f64::from(sample) * 1e6);
                }
                all_done.reach(round * others.len() as u64).await;
            }
            many.send(id, messages(STOP)).await?;
            figure(median(&mut samples));
        } else {
            let parts = [Part { source: Rank(0), offset: 0, len: self.size }];
            let mut received = 0u64;
            loop {
                let buffer = many.receive(id, self.size, &parts)?.await?.into_whole()?;
                if buffer.starts_with(&STOP.to_ne_bytes()) {
                    break;
                }
                received += 1;
                if received.is_multiple_of(u64::from(round_len)) {
                    done.send(Rank(0), received.to_ne_bytes()).await?;
                }
            }
        }
        self.barrier().await
    }

    /// Microseconds of an operation that all ranks carry out one after the other, at rank 0, which tells the others how
    /// many it wants.
    pub(super) async fn repeated<O>(&self, world: &Group, operation: impl Fn() -> O) -> Result<f64>
    where
        O: Future<Output = Result<()>>,
    {
        let mut samples = Vec::new();
        let (start, mut first, mut count) = (Instant::now(), true, 3u64);
        loop {
            let batch = Instant::now();
            for _ in 0..count {
                operation().await?;
            }
            let each = batch.elapsed().as_secs_f64() / count as f64;
            if !std::mem::replace(&mut first, false) {
                samples.push(each * 1e6);
            }
            let more = start.elapsed() < self.time || samples.is_empty();
            let next = if more { (0.01 / each).clamp(1.0, 1000.0) as u64 } else { 0 };
            count = self.drive(world.broadcast(0, &[next])).await?[0];
            if count == 0 {
                return Ok(median(&mut samples));
            }
        }
    }

    fn tell(&self, value: f64) {
        if self.leads() {
            figure(value);
        }
    }

    pub(super) async fn group_barrier(&self) -> Result<()> {
        let world = self.job.world();
        let time = self.repeated(&world, || async { Ok(self.drive(world.barrier()).await?) }).await?;
        self.tell(time);
        self.barrier().await
    }

    /// The sum of vectors of floats, or of one.
    pub(super) async fn all_reduce(&self, bandwidth: bool) -> Result<()> {
        let world = self.job.world();
        let sum = Reduce::sum();
        let (ranks, mine) = (self.job.size() as f64, self.me.0 as f64);
        let expected = ranks * (ranks - 1.0) / 2.0;
        let time = if self.size == 8 {
            let operation = || async {
                let total = self.drive(world.all_reduce_one(mine, &sum)).await?;
                assert_eq!(total, expected, "a sum is wrong");
                Ok(())
            };
            self.repeated(&world, operation).await?
        } else {
            let values = vec![mine; self.size / 8];
            let operation = || async {
                let total = self.drive(world.all_reduce(&values, &sum)).await?;
                assert_eq!((total[0], total.last()), (expected, Some(&expected)), "a sum is wrong");
                Ok(())
            };
            self.repeated(&world, operation).await?
        };
        self.tell(if bandwidth { self.size as f64 / time / 1e3 } else { time });
        self.barrier().await
    }

    /// As many bytes for each rank.
    pub(super) async fn all_to_all(&self) -> Result<()> {
        let world = self.job.world();
        let values = vec![self.me.0; self.size / 4 * self.job.size()];
        let operation = || async {
            let got = self.drive(world.all_to_all(&values)).await?;
            assert_eq!(got.last().copied(), Some(self.job.size() as u32 - 1), "a block is not its sender's");
            Ok(())
        };
        let time = self.repeated(&world, operation).await?;
        self.tell(time);
        self.barrier().await
    }

    /// Bytes from rank 0 to all, eight times and then a barrier, so that the root is not ahead at the end.
    pub(super) async fn broadcast(&self) -> Result<()> {
        const TIMES: usize = 8;
        let world = self.job.world();
        let data = self.leads().then(|| Bytes::from(vec![5; self.size]));
        let operation = || async {
            for _ in 0..TIMES {
                let got = self.drive(world.broadcast_bytes(0, self.size, data.clone()));
                assert_eq!(got.await?.last(), Some(&5), "a broadcast was damaged");
            }
            Ok(self.drive(world.barrier()).await?)
        };
        let time = self.repeated(&world, operation).await?;
        self.tell((TIMES * self.size) as f64 / time / 1e3);
        self.barrier().await
    }
}
