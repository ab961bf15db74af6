//! Messages, requests, loans, and who else wants to run.

use super::*;

/// Messages between two looks at the clock, and before it starts.
const BATCH: u64 = 16;
/// Longest message in bytes that is one packet over shared memory, and copied once.
const BORROWED: usize = 4 << 20;

impl<F: ContextFace> Bench<F> {
    /// Half the round trip of an awaited message from task to task.
    pub(super) async fn am_latency(&self) -> Result<()> {
        let (ping, arrived, last) = self.counting("ping")?;
        self.barrier().await?;
        let mut round = 0u64;
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..1000 {
                    round += 1;
                    ping.send(self.peer, round.to_ne_bytes()).await?;
                    arrived.reach_on(&self.face, round).await;
                }
                batches.push(batch.elapsed().as_secs_f64() / 1000.0 / 2.0 * 1e6);
            }
            ping.send(self.peer, STOP.to_ne_bytes()).await?;
            figure(median(&mut batches));
        } else {
            loop {
                round += 1;
                arrived.reach_on(&self.face, round).await;
                if last.load(std::sync::atomic::Ordering::Relaxed) == STOP {
                    break;
                }
                ping.send(self.peer, round.to_ne_bytes()).await?;
            }
        }
        self.barrier().await
    }

    /// The same with longer messages: the handler reads every word.
    pub(super) async fn am_latency_of_bytes(&self) -> Result<()> {
        let counter = self.job.counter();
        let sum = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let (count, into) = (counter.clone(), sum.clone());
        let ping = self.job.register("ping", move |m: Message, _: &mut Scope| {
            into.fetch_add(m.sum_words(), std::sync::atomic::Ordering::Relaxed);
            count.add(1);
        })?;
        let (ping, stop) = (ping.with_face(&self.face), self.counting("stop")?);
        let data = Lines::filled(self.size, |at| (at * 7) as u8).into_bytes();
        let batch_len = ((8 << 20) / self.size.max(1)).clamp(8, 1000) as u64;
        self.barrier().await?;
        let mut round = 0u64;
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..batch_len {
                    round += 1;
                    ping.send(self.peer, data.clone()).await?;
                    counter.reach_on(&self.face, round).await;
                }
                batches.push(batch.elapsed().as_secs_f64() / batch_len as f64 / 2.0 * 1e6);
            }
            stop.0.send(self.peer, STOP.to_ne_bytes()).await?;
            ping.send(self.peer, data).await?;
            figure(median(&mut batches));
        } else {
            loop {
                round += 1;
                counter.reach_on(&self.face, round).await;
                if stop.1.value() > 0 {
                    break;
                }
                ping.send(self.peer, data.clone()).await?;
            }
            let seen = sum.load(std::sync::atomic::Ordering::Relaxed);
            let words =
                data.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()));
            let one = words.fold(0u64, u64::wrapping_add);
            assert!(!self.size.is_multiple_of(8) || seen == one.wrapping_mul(round), "payloads were damaged");
        }
        self.barrier().await
    }

    /// A service that answers the bytes it is asked with, once all ranks have it.
    async fn echo(&self) -> Result<Service<Bytes, Bytes, &F>> {
        let echo =
            self.job.service_inline("echo", |m: Message, _: &mut Scope| Ok(Buffer::copy(&m.bytes())))?;
        self.barrier().await?;
        Ok(echo.with_face(&self.face))
    }

    /// The full round trip of a request and its reply.
    pub(super) async fn call_latency(&self) -> Result<()> {
        let echo = self.echo().await?;
        if self.leads() {
            let (mut batches, mut round) = (self.batches(1000), 0u64);
            while batches.go_on() {
                for _ in 0..1000 {
                    round += 1;
                    let answer = echo.call_bytes(self.peer, round.to_ne_bytes()).await?;
                    assert_eq!(answer.as_bytes(), round.to_ne_bytes(), "the echo is not what was sent");
                }
            }
            figure(batches.microseconds());
        }
        self.barrier().await
    }

    /// A call of so many that are joined.
    pub(super) async fn calls_joined(&self) -> Result<()> {
        let echo = self.echo().await?;
        if self.leads() {
            let (mut batches, mut round) = (self.batches(self.count as u32), 0u64);
            while batches.go_on() {
                round += 1;
                let calls = (0..self.count).map(|_| echo.call_bytes(self.peer, round.to_ne_bytes()));
                for answer in futures::future::try_join_all(calls).await? {
                    assert_eq!(answer.as_bytes(), round.to_ne_bytes(), "the echo is not what was sent");
                }
            }
            figure(batches.microseconds());
        }
        self.barrier().await
    }

    /// The same as most programs would have it: values instead of bytes, and a task that answers.
    pub(super) async fn call_typed_latency(&self) -> Result<()> {
        let echo = self.job.service("echo", |number: u64| async move { number })?;
        let echo = echo.with_face(&self.face);
        self.barrier().await?;
        if self.leads() {
            let (mut batches, mut round) = (self.batches(1000), 0u64);
            while batches.go_on() {
                for _ in 0..1000 {
                    round += 1;
                    assert_eq!(echo.call(self.peer, round).await?, round, "the echo is not what was sent");
                }
            }
            figure(batches.microseconds());
        }
        self.barrier().await
    }

    /// One-way messages per second, from the first send to the last handler's end.
    pub(super) async fn am_rate(&self, awaited: bool) -> Result<()> {
        let (message, arrived, _) = self.counting("count")?;
        let (total, told, sent) = self.counting("total")?;
        self.barrier().await?;
        if self.leads() {
            let start = Instant::now();
            let mut count = 0u64;
            while start.elapsed() < self.time {
                for _ in 0..10_000 {
                    count += 1;
                    if awaited {
                        message.send(self.peer, count.to_ne_bytes()).await?;
                    } else {
                        match message.try_send(self.peer, count.to_ne_bytes()) {
                            Ok(()) => {}
                            Err(TrySendError::Full(payload)) => message.send(self.peer, payload).await?,
                            Err(TrySendError::Failed { error, .. }) => return Err(error.into()),
                            Err(_) => return Err(std::io::Error::other("send refused").into()),
                        }
                    }
                }
            }
            total.send(self.peer, count.to_ne_bytes()).await?;
            told.reach_on(&self.face, 1).await;
            figure(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        } else {
            told.reach_on(&self.face, 1).await;
            let count = sent.load(std::sync::atomic::Ordering::Relaxed);
            assert_eq!(arrived.value(), count, "messages were lost");
            total.send(self.peer, count.to_ne_bytes()).await?;
        }
        self.barrier().await
    }

    /// Payload bytes per second, every word summed by the handler. Those that go by rendezvous are `owned`, however short.
    pub(super) async fn am_bandwidth(&self, owned: bool) -> Result<()> {
        let sums = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let into = sums.clone();
        let message = self.job.register("bulk", move |m: Message, _: &mut Scope| {
            into.fetch_add(m.sum_words(), std::sync::atomic::Ordering::Relaxed);
        })?;
        let message = message.with_face(&self.face);
        let (total, told, sent) = self.counting("total")?;
        self.barrier().await?;
        let data = Lines::filled(self.size, |at| (at * 7) as u8).into_bytes();
        let one: u64 = data.chunks_exact(8).fold(0, |sum, word| {
            u64::wrapping_add(sum, u64::from_ne_bytes(word.try_into().unwrap_or_default()))
        });
        if self.leads() {
            // As a program would: borrowed where it is copied at once, owned where it may have to wait.
            let borrows = !owned && self.maps() && self.size <= BORROWED;
            let owned = data.clone();
            let mut count = 0u64;
            // The limit's clock starts when all memory has been used once, too.
            let mut start = Instant::now();
            while count < BATCH || start.elapsed() < self.time {
                if borrows {
                    for _ in 0..BATCH {
                        message.send_slice(self.peer, &data).await?;
                    }
                } else {
                    for _ in 0..BATCH {
                        message.send(self.peer, owned.clone()).await?;
                    }
                }
                count += BATCH;
                if count == BATCH {
                    start = Instant::now();
                }
            }
            let timed = (count - BATCH) as f64;
            total.send(self.peer, count.to_ne_bytes()).await?;
            told.reach_on(&self.face, 1).await;
            figure(timed * self.size as f64 / start.elapsed().as_secs_f64() / 1e9);
        } else {
            told.reach_on(&self.face, 1).await;
            let count = sent.load(std::sync::atomic::Ordering::Relaxed);
            let sum = sums.load(std::sync::atomic::Ordering::Relaxed);
            assert_eq!(sum, one.wrapping_mul(count), "payloads were damaged");
            total.send(self.peer, count.to_ne_bytes()).await?;
        }
        self.barrier().await
    }

    /// Half the round trip of lent pages: nothing is copied, the first and the last word are checked.
    pub(super) async fn loan_latency(&self) -> Result<()> {
        let counter = self.job.counter();
        let seen = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let (count, last, size) = (counter.clone(), seen.clone(), self.size);
        let message = self.job.register("loan", move |m: Message, _: &mut Scope| {
            let (head, tail) = (m.read::<u64>(0), m.read::<u64>(size - 8));
            last.store(
                if head == tail { head.unwrap_or(0) } else { 0 },
                std::sync::atomic::Ordering::Relaxed,
            );
            count.add(1);
        })?;
        let message = message.with_face(&self.face);
        self.barrier().await?;
        let send = async |word: u64| -> Result<()> {
            let mut loan = message.loan(self.size);
            while loan.is_none() {
                tokio::task::yield_now().await;
                loan = message.loan(self.size);
            }
            if let Some(loan) = loan {
                loan.memory().write_u64(0, word);
                loan.memory().write_u64(self.size - 8, word);
                message.send(self.peer, loan).await?;
            }
            Ok(())
        };
        let mut round = 0;
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..200 {
                    round += 1;
                    send(round).await?;
                    counter.reach_on(&self.face, round).await;
                    assert_eq!(seen.load(std::sync::atomic::Ordering::Relaxed), round, "a loan was damaged");
                }
                batches.push(batch.elapsed().as_secs_f64() / 200.0 / 2.0 * 1e6);
            }
            send(STOP).await?;
            figure(median(&mut batches));
        } else {
            loop {
                round += 1;
                counter.reach_on(&self.face, round).await;
                let word = seen.load(std::sync::atomic::Ordering::Relaxed);
                if word == STOP {
                    break;
                }
                send(word).await?;
            }
        }
        self.barrier().await
    }

    /// From the send to the waking of a task that had slept for 200 µs.
    pub(super) async fn wakeup_latency(&self) -> Result<()> {
        let (stamp, arrived, sent) = self.counting("stamp")?;
        let rounds = ((self.time.as_secs_f64() / 0.001) as u64).clamp(50, 5000);
        self.barrier().await?;
        let mut samples = Vec::new();
        for round in 1..=rounds {
            if self.leads() {
                arrived.reach_on(&self.face, round).await;
                let slept = Instant::now();
                while slept.elapsed() < Duration::from_micros(300) {
                    std::hint::spin_loop();
                }
                stamp.send(self.peer, now_ns().to_ne_bytes()).await?;
            } else {
                stamp.send(self.peer, 0u64.to_ne_bytes()).await?;
                arrived.reach_on(&self.face, round).await;
                samples.push((now_ns() - sent.load(std::sync::atomic::Ordering::Relaxed)) as f64 / 1e3);
            }
        }
        if !self.leads() {
            figure(median(&mut samples));
        }
        self.barrier().await
    }

    /// How late a ticker is beside tasks that await calls, nearly all of the time: each is answered after 3 to 7 ms, so
    /// that they are not all answered at once.
    pub(super) async fn neighbour_delay(&self) -> Result<()> {
        let all = ServiceOptions { limit: self.size.max(1) };
        let later = self.job.service_with("later", all, |milliseconds: u64, _| async move {
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
            milliseconds
        })?;
        self.barrier().await?;
        if self.leads() {
            let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            let tasks: Vec<_> = (0..self.size)
                .map(|first| {
                    let (later, peer, stop) = (later.clone(), self.peer, stop.clone());
                    tokio::spawn(async move {
                        let mut wait = first as u64;
                        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                            later.call(peer, 3 + wait % 5).await?;
                            wait += 1;
                        }
                        Result::<()>::Ok(())
                    })
                })
                .collect();
            let mut ticker = tokio::time::interval(Duration::from_millis(1));
            let mut late = Vec::new();
            let start = ticker.tick().await;
            // The 99th percentile of fewer would be one of a few.
            let ticks = (self.time.as_secs_f64() * 1000.0).max(1000.0) as u32;
            for tick in 1..=ticks {
                ticker.tick().await;
                let due = start + Duration::from_millis(1) * tick;
                late.push(tokio::time::Instant::now().saturating_duration_since(due).as_secs_f64() * 1e6);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            for task in tasks {
                task.await.map_err(std::io::Error::other)??;
            }
            late.sort_by(f64::total_cmp);
            figure(late[late.len() * 99 / 100]);
        }
        self.barrier().await
    }

    /// More ranks than cores: each sends 1,000 messages to every other.
    pub(super) async fn oversubscribed(&self) -> Result<()> {
        let (message, arrived, _) = self.counting("flood")?;
        self.barrier().await?;
        let start = Instant::now();
        let others: Vec<Rank> = self.job.ranks().filter(|rank| *rank != self.me).collect();
        let payload = vec![7u8; self.size];
        for _ in 0..1000 {
            for &rank in &others {
                message.send(rank, &payload[..]).await?;
            }
        }
        arrived.reach_on(&self.face, 1000 * others.len() as u64).await;
        self.barrier().await?;
        if self.leads() {
            figure(start.elapsed().as_secs_f64());
        }
        Ok(())
    }
}
