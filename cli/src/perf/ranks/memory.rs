//! Puts and gets of windows.

use super::*;

/// Awaits a put or a get as [`Bench::drive`] does, but without a future around it where nothing has to be driven: that costs as
/// much as what is measured.
macro_rules! driven {
    ($self:ident, $access:expr) => {
        if $self.face.owns() { $self.drive($access).await } else { $access.await }
    };
}

impl<F: ContextFace> Bench<F> {
    /// Half the round trip of puts, each side watching its own window.
    pub(super) async fn put_latency(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u64>(64)).await?;
        self.barrier().await?;
        let mut round = 0u64;
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..1000 {
                    round += 1;
                    driven!(self, window.put(self.peer, 0, round))?;
                    window.wait_until_on(&self.face, 0, |value| value == round).await?;
                }
                batches.push(batch.elapsed().as_secs_f64() / 1000.0 / 2.0 * 1e6);
            }
            self.drive(window.put(self.peer, 0, STOP)).await?;
            figure(median(&mut batches));
        } else {
            loop {
                round += 1;
                let seen = window.wait_until_on(&self.face, 0, |value| value >= round).await?;
                if seen == STOP {
                    break;
                }
                driven!(self, window.put(self.peer, 0, round))?;
            }
        }
        self.barrier().await?;
        Ok(self.drive(window.free()).await?)
    }

    pub(super) async fn put_rate(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u64>(1024)).await?;
        self.barrier().await?;
        if self.leads() {
            let start = Instant::now();
            let mut count = 0u64;
            while start.elapsed() < self.time {
                for index in 0..10_000usize {
                    count += 1;
                    driven!(self, window.put(self.peer, index % 1024, count))?;
                }
            }
            figure(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
        self.barrier().await
    }

    pub(super) async fn get_rate(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u64>(1024)).await?;
        for index in 0..1024 {
            assert!(window.store(index, index as u64), "an element of this rank's part");
        }
        self.barrier().await?;
        if self.leads() {
            let start = Instant::now();
            let (mut count, mut sum) = (0u64, 0u64);
            while start.elapsed() < self.time {
                for index in 0..10_240usize {
                    count += 1;
                    sum = sum.wrapping_add(driven!(self, window.get(self.peer, index % 1024))?);
                }
            }
            assert_eq!(sum, count / 1024 * (1023 * 1024 / 2), "gets brought wrong values");
            figure(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
        self.barrier().await
    }

    pub(super) async fn put_bandwidth(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u8>(self.size)).await?;
        self.barrier().await?;
        if self.leads() {
            let data = Lines::filled(self.size, |at| (at * 5) as u8).into_bytes();
            let start = Instant::now();
            let mut count = 0u64;
            if self.maps() {
                while start.elapsed() < self.time {
                    for _ in 0..16 {
                        count += 1;
                        driven!(self, window.put_slice(self.peer, 0, &data))?;
                    }
                }
            } else {
                let more = std::iter::from_fn(|| (start.elapsed() < self.time).then(|| data.clone()));
                let puts = more.map(|data| window.put_bytes(self.peer, 0, data));
                let mut puts = futures::stream::iter(puts).buffered(in_flight(self.size));
                while let Some(put) = self.drive(puts.next()).await {
                    put?;
                    count += 1;
                }
            }
            figure(count as f64 * self.size as f64 / start.elapsed().as_secs_f64() / 1e9);
            let there = self.drive(window.get_slice(self.peer, 0, self.size)).await?;
            assert_eq!(there, data, "puts were damaged");
        }
        self.barrier().await
    }

    pub(super) async fn get_bandwidth(&self) -> Result<()> {
        let window = self.drive(self.job.shmalloc::<u8>(self.size)).await?;
        for at in 0..self.size {
            assert!(window.store(at, (at * 5) as u8), "an element of this rank's part");
        }
        self.barrier().await?;
        if self.leads() {
            let (mut buffer, mut last) = (Lines::zeroed(self.size), Vec::new());
            let start = Instant::now();
            let mut count = 0u64;
            if self.maps() {
                while start.elapsed() < self.time {
                    for _ in 0..16 {
                        count += 1;
                        driven!(self, window.get_to(self.peer, 0, &mut buffer))?;
                    }
                }
            } else {
                let mut gets = FuturesOrdered::new();
                for _ in 0..in_flight(self.size) {
                    gets.push_back(window.get_into(self.peer, 0, vec![0u8; self.size]));
                }
                while let Some(got) = self.drive(gets.next()).await {
                    last = got?;
                    count += 1;
                    if start.elapsed() < self.time {
                        gets.push_back(window.get_into(self.peer, 0, std::mem::take(&mut last)));
                    }
                }
            }
            figure(count as f64 * self.size as f64 / start.elapsed().as_secs_f64() / 1e9);
            let got = if self.maps() { &buffer[..] } else { &last[..] };
            assert!(got.iter().enumerate().all(|(at, byte)| *byte == (at * 5) as u8), "gets were damaged");
        }
        self.barrier().await
    }
}
