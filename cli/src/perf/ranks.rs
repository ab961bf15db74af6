//! The ranks' side of the benchmarks: what a user's program would do.

use super::{Face, Runtime};
use clap::Args;
use futures::stream::{FuturesOrdered, StreamExt};
use posthaste::components::core::Face as ContextFace;
use posthaste::{
    ActiveMessage, Buffer, Bytes, ContextId, Counter, Job, Message, Rank, Result, Scope, TrySendError,
};
use std::time::{Duration, Instant};

/// What one rank of a row is told.
#[derive(Args, Clone, Debug)]
pub struct RankArgs {
    bench: String,
    #[arg(long)]
    size: usize,
    #[arg(long)]
    seconds: f64,
    #[arg(long)]
    face: Face,
    #[arg(long)]
    runtime: Runtime,
}

/// Runs one rank; the exit code.
pub fn rank_main(args: &RankArgs) -> i32 {
    let result = match args.runtime {
        Runtime::CurrentThread => tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map(|rt| rt.block_on(run(args))),
        Runtime::MultiThread => tokio::runtime::Runtime::new().map(|rt| {
            let args = args.clone();
            rt.block_on(async move {
                let task = tokio::spawn(async move { run_handle(&args).await });
                task.await.unwrap_or_else(|error| Err(std::io::Error::other(error).into()))
            })
        }),
    };
    match result {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("{error}");
            1
        }
        Err(error) => {
            eprintln!("{error}");
            1
        }
    }
}

fn figure(value: f64) {
    println!("figure {value}");
}

/// A rank of a benchmark.
struct Bench<F> {
    job: Job,
    face: F,
    me: Rank,
    peer: Rank,
    size: usize,
    time: Duration,
}

async fn run(args: &RankArgs) -> Result<()> {
    if args.face == Face::Handle {
        return run_handle(args).await;
    }
    let job = posthaste::join().await?;
    let context =
        job.own_context(ContextId(0)).ok_or_else(|| std::io::Error::other("the context is owned"))?;
    run_owned(args, &job, &context).await?;
    drop(context);
    job.leave().await
}

async fn run_handle(args: &RankArgs) -> Result<()> {
    let job = posthaste::join().await?;
    let me = job.rank();
    let bench = Bench {
        me,
        peer: me.next(job.size()),
        size: args.size,
        time: Duration::from_secs_f64(args.seconds),
        job: job.clone(),
        face: job.handle().clone(),
    };
    bench.run(&args.bench).await?;
    job.leave().await
}

/// The same with the owned context; it is not `Sync`, so this future stays on its thread.
async fn run_owned(args: &RankArgs, job: &Job, context: &posthaste::Context) -> Result<()> {
    let me = job.rank();
    let time = Duration::from_secs_f64(args.seconds);
    let bench =
        Bench { me, peer: me.next(job.size()), size: args.size, time, job: job.clone(), face: context };
    bench.run(&args.bench).await
}

/// Puts or gets that are under way at once where they take time, as in a program that wants the bandwidth.
const IN_FLIGHT: usize = 8;
/// A message that means "stop".
const STOP: u64 = u64::MAX;

impl<F: ContextFace> Bench<F> {
    async fn run(&self, name: &str) -> Result<()> {
        match name {
            "am_latency" => self.am_latency().await,
            "call_latency" => self.call_latency().await,
            "am_rate" => self.am_rate(false).await,
            "am_rate_awaited" => self.am_rate(true).await,
            "am_bandwidth" => self.am_bandwidth().await,
            "loan_latency" => self.loan_latency().await,
            "put_latency" => self.put_latency().await,
            "put_rate" => self.put_rate().await,
            "get_rate" => self.get_rate().await,
            "put_bandwidth" => self.put_bandwidth().await,
            "get_bandwidth" => self.get_bandwidth().await,
            "replay" => self.replay().await,
            "wakeup_latency" => self.wakeup_latency().await,
            "neighbour_delay" => self.neighbour_delay().await,
            "idle_cpu" => self.idle_cpu().await,
            "oversubscribed" => self.oversubscribed().await,
            "join" => self.joined().await,
            "memory_silent" => self.memory(false).await,
            "memory_talking" => self.memory(true).await,
            _ => Err(std::io::Error::other("no such benchmark").into()),
        }
    }

    /// Awaits what works through the shared handle; an owned context is driven meanwhile.
    async fn drive<T>(&self, future: impl Future<Output = T>) -> T {
        posthaste::components::core::context::drive(&self.face, future).await
    }

    async fn barrier(&self) -> Result<()> {
        self.drive(self.job.barrier()).await
    }

    /// Whether puts and gets of the peer's memory are done at once, so that it would gain nothing to start several.
    fn maps(&self) -> bool {
        self.job.caps_of(self.peer).mappable
    }

    fn leads(&self) -> bool {
        self.me == Rank(0)
    }

    /// A message whose handler counts, and stores the last word it saw.
    fn counting(
        &self,
        name: &str,
    ) -> Result<(ActiveMessage<&F>, Counter, std::sync::Arc<std::sync::atomic::AtomicU64>)> {
        let counter = self.job.counter();
        let last = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let (count, seen) = (counter.clone(), last.clone());
        let message = self.job.register(name, move |m: Message, _: &mut Scope| {
            if let Some(word) = m.read::<u64>(0) {
                seen.store(word, std::sync::atomic::Ordering::Relaxed);
            }
            count.add(1);
        })?;
        Ok((message.with_face(&self.face), counter, last))
    }

    /// Half the round trip of an awaited message from task to task.
    async fn am_latency(&self) -> Result<()> {
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

    /// The full round trip of a request and its reply.
    async fn call_latency(&self) -> Result<()> {
        let echo =
            self.job.service_inline("echo", |m: Message, _: &mut Scope| Ok(Buffer::copy(&m.bytes())))?;
        let echo = echo.with_face(&self.face);
        self.barrier().await?;
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            let mut round = 0u64;
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..1000 {
                    round += 1;
                    let answer = echo.call_bytes(self.peer, round.to_ne_bytes()).await?;
                    assert_eq!(answer.as_bytes(), round.to_ne_bytes(), "the echo is not what was sent");
                }
                batches.push(batch.elapsed().as_secs_f64() / 1000.0 * 1e6);
            }
            figure(median(&mut batches));
        }
        self.barrier().await
    }

    /// One-way messages per second, from the first send to the last handler's end.
    async fn am_rate(&self, awaited: bool) -> Result<()> {
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

    /// Payload bytes per second, every word summed by the handler.
    async fn am_bandwidth(&self) -> Result<()> {
        let sums = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let into = sums.clone();
        let message = self.job.register("bulk", move |m: Message, _: &mut Scope| {
            into.fetch_add(m.sum_words(), std::sync::atomic::Ordering::Relaxed);
        })?;
        let message = message.with_face(&self.face);
        let (total, told, sent) = self.counting("total")?;
        self.barrier().await?;
        let data: Vec<u8> = (0..self.size).map(|i| (i * 7) as u8).collect();
        let one: u64 = data.chunks_exact(8).fold(0, |sum, word| {
            u64::wrapping_add(sum, u64::from_ne_bytes(word.try_into().unwrap_or_default()))
        });
        if self.leads() {
            let data = Bytes::from(data);
            let start = Instant::now();
            let mut count = 0u64;
            while start.elapsed() < self.time {
                for _ in 0..16 {
                    count += 1;
                    message.send(self.peer, data.clone()).await?;
                }
            }
            total.send(self.peer, count.to_ne_bytes()).await?;
            told.reach_on(&self.face, 1).await;
            figure(count as f64 * self.size as f64 / start.elapsed().as_secs_f64() / 1e9);
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
    async fn loan_latency(&self) -> Result<()> {
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
                loan.memory.write_u64(0, word);
                loan.memory.write_u64(self.size - 8, word);
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

    /// Half the round trip of puts, each side watching its own window.
    async fn put_latency(&self) -> Result<()> {
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
                    window.put(self.peer, 0, round).await?;
                    window.wait_until(0, |value| value == round).await?;
                }
                batches.push(batch.elapsed().as_secs_f64() / 1000.0 / 2.0 * 1e6);
            }
            window.put(self.peer, 0, STOP).await?;
            figure(median(&mut batches));
        } else {
            loop {
                round += 1;
                let seen = window.wait_until(0, |value| value >= round).await?;
                if seen == STOP {
                    break;
                }
                window.put(self.peer, 0, round).await?;
            }
        }
        self.barrier().await?;
        Ok(self.drive(window.free()).await?)
    }

    async fn put_rate(&self) -> Result<()> {
        let window = self.job.shmalloc::<u64>(1024).await?;
        self.barrier().await?;
        if self.leads() {
            let start = Instant::now();
            let mut count = 0u64;
            while start.elapsed() < self.time {
                for index in 0..10_000usize {
                    count += 1;
                    window.put(self.peer, index % 1024, count).await?;
                }
            }
            figure(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
        self.barrier().await
    }

    async fn get_rate(&self) -> Result<()> {
        let window = self.job.shmalloc::<u64>(1024).await?;
        for index in 0..1024 {
            window.store(index, index as u64);
        }
        self.barrier().await?;
        if self.leads() {
            let start = Instant::now();
            let (mut count, mut sum) = (0u64, 0u64);
            while start.elapsed() < self.time {
                for index in 0..10_240usize {
                    count += 1;
                    sum = sum.wrapping_add(window.get(self.peer, index % 1024).await?);
                }
            }
            assert_eq!(sum, count / 1024 * (1023 * 1024 / 2), "gets brought wrong values");
            figure(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
        self.barrier().await
    }

    async fn put_bandwidth(&self) -> Result<()> {
        let window = self.job.shmalloc::<u8>(self.size).await?;
        self.barrier().await?;
        if self.leads() {
            let data = Bytes::from((0..self.size).map(|i| (i * 5) as u8).collect::<Vec<u8>>());
            let start = Instant::now();
            let mut count = 0u64;
            if self.maps() {
                while start.elapsed() < self.time {
                    for _ in 0..16 {
                        count += 1;
                        window.put_bytes(self.peer, 0, data.clone()).await?;
                    }
                }
            } else {
                let more = std::iter::from_fn(|| (start.elapsed() < self.time).then(|| data.clone()));
                let puts = more.map(|data| window.put_bytes(self.peer, 0, data));
                let mut puts = futures::stream::iter(puts).buffered(IN_FLIGHT);
                while let Some(put) = puts.next().await {
                    put?;
                    count += 1;
                }
            }
            figure(count as f64 * self.size as f64 / start.elapsed().as_secs_f64() / 1e9);
            assert_eq!(window.get_slice(self.peer, 0, self.size).await?, data, "puts were damaged");
        }
        self.barrier().await
    }

    async fn get_bandwidth(&self) -> Result<()> {
        let window = self.job.shmalloc::<u8>(self.size).await?;
        for at in 0..self.size {
            window.store(at, (at * 5) as u8);
        }
        self.barrier().await?;
        if self.leads() {
            let mut buffer = vec![0u8; self.size];
            let start = Instant::now();
            let mut count = 0u64;
            if self.maps() {
                while start.elapsed() < self.time {
                    for _ in 0..16 {
                        count += 1;
                        buffer = window.get_into(self.peer, 0, buffer).await?;
                    }
                }
            } else {
                let mut gets = FuturesOrdered::new();
                for _ in 0..IN_FLIGHT {
                    gets.push_back(window.get_into(self.peer, 0, vec![0u8; self.size]));
                }
                while let Some(got) = gets.next().await {
                    buffer = got?;
                    count += 1;
                    if start.elapsed() < self.time {
                        gets.push_back(window.get_into(self.peer, 0, std::mem::take(&mut buffer)));
                    }
                }
            }
            figure(count as f64 * self.size as f64 / start.elapsed().as_secs_f64() / 1e9);
            assert!(buffer.iter().enumerate().all(|(at, byte)| *byte == (at * 5) as u8), "gets were damaged");
        }
        self.barrier().await
    }

    /// A recorded pattern of 1,000 puts, per replay.
    async fn replay(&self) -> Result<()> {
        const COUNT: usize = 1000;
        let window = self.drive(self.job.shmalloc::<u8>(self.size * COUNT)).await?;
        let source = self.drive(self.job.region(self.size * COUNT)).await?;
        let size = self.size as u64;
        let recording = self.job.record(|r| {
            for index in 0..COUNT {
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

    /// From the send to the waking of a task that had slept for 200 µs.
    async fn wakeup_latency(&self) -> Result<()> {
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

    /// How late a ticker is beside tasks that await calls.
    async fn neighbour_delay(&self) -> Result<()> {
        let echo =
            self.job.service_inline("echo", |m: Message, _: &mut Scope| Ok(Buffer::copy(&m.bytes())))?;
        self.barrier().await?;
        if self.leads() {
            let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            let tasks: Vec<_> = (0..self.size)
                .map(|_| {
                    let (echo, peer, stop) = (echo.clone(), self.peer, stop.clone());
                    tokio::spawn(async move {
                        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                            echo.call_bytes(peer, [0u8; 8]).await?;
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                        Result::<()>::Ok(())
                    })
                })
                .collect();
            let mut ticker = tokio::time::interval(Duration::from_millis(1));
            let mut late = Vec::new();
            let start = ticker.tick().await;
            let ticks = (self.time.as_secs_f64() * 1000.0).max(200.0) as u32;
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

    /// Processor time of idle ranks, in percent of one core, all together.
    async fn idle_cpu(&self) -> Result<()> {
        self.barrier().await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = cpu_seconds();
        let time = self.time.max(Duration::from_secs(1));
        tokio::time::sleep(time).await;
        let used = (cpu_seconds() - before) / time.as_secs_f64() * 100.0;
        let all = self.job.all_gather(&used.to_ne_bytes()).await?;
        if self.leads() {
            figure(all.iter().map(|blob| f64::from_ne_bytes(blob[..8].try_into().unwrap_or_default())).sum());
        }
        self.barrier().await
    }

    /// More ranks than cores: each sends 1,000 messages to every other.
    async fn oversubscribed(&self) -> Result<()> {
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

    /// All ranks are there.
    async fn joined(&self) -> Result<()> {
        self.barrier().await?;
        if self.leads() {
            figure(self.job.size() as f64);
        }
        Ok(())
    }

    /// Resident bytes per peer that is merely there, or that rank 0 talks with in both directions.
    async fn memory(&self, talking: bool) -> Result<()> {
        let (message, arrived, _) = self.counting("touch")?;
        let others = self.job.size() as f64 - 1.0;
        // A rank of a job of two, otherwise the same, is what a silent peer is compared with.
        let before = resident_kib();
        if talking {
            if self.leads() {
                for rank in self.job.ranks().skip(1) {
                    for _ in 0..2000 {
                        message.send(rank, 1u64.to_ne_bytes()).await?;
                    }
                }
                arrived.reach_on(&self.face, 2000 * others as u64).await;
                figure((resident_kib() - before) / others);
            } else {
                arrived.reach_on(&self.face, 2000).await;
                for _ in 0..2000 {
                    message.send(Rank(0), 1u64.to_ne_bytes()).await?;
                }
            }
        } else if self.leads() {
            // The parent runs this with two ranks, too, and divides the difference.
            figure(before);
        }
        self.barrier().await
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Resident memory that is the process's own or shared with its peers. Pages of the program file are left out: how many of
/// those are mapped depends on the kernel's cache and varies by more than all peers cost.
fn resident_kib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let counted = status.lines().filter(|line| line.starts_with("RssAnon:") || line.starts_with("RssShmem:"));
    let kib = |line: &str| line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok());
    counted.filter_map(kib).sum()
}
