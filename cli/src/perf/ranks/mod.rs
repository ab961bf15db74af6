//! The ranks' side of the benchmarks: what a user's program would do.

mod atomics;
mod collectives;
mod layouts;
mod lines;
mod memory;
mod messages;
mod patterns;
mod processes;

use super::{Face, Runtime};
use crate::say::say;
use clap::Args;
use futures::stream::{FuturesOrdered, StreamExt};
use lines::Lines;
use patterns::Sends;
use posthaste::components::core::{Face as ContextFace, context};
use posthaste::datatype::Thresholds;
use posthaste::{
    ActiveMessage, Buffer, Bytes, ContextId, Counter, Job, Message, Rank, Result, Scope, Service,
    ServiceOptions, TrySendError,
};
use std::time::{Duration, Instant};

/// What one rank of a row is told.
#[derive(Args, Clone, Debug)]
pub struct RankArgs {
    bench: String,
    #[arg(long)]
    size: usize,
    #[arg(long)]
    count: usize,
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
    say(format_args!("figure {value}"));
}

/// A message, how often it has come, and the last word.
type Counting<'f, F> = (ActiveMessage<&'f F>, Counter, std::sync::Arc<std::sync::atomic::AtomicU64>);

/// A rank of a benchmark.
struct Bench<F> {
    job: Job,
    face: F,
    me: Rank,
    peer: Rank,
    size: usize,
    /// Operations of a batch, or blocks of a layout.
    count: usize,
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
        count: args.count,
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
    let (size, count) = (args.size, args.count);
    let bench = Bench { me, peer: me.next(job.size()), size, count, time, job: job.clone(), face: context };
    bench.run(&args.bench).await
}

/// Puts or gets of so many bytes that are under way at once where they take time, as in a program that wants the bandwidth:
/// enough to be asked for before others are through, and no more memory than that.
fn in_flight(size: usize) -> usize {
    ((2 << 20) / size.max(1)).clamp(2, 8)
}

/// Every transfer between layouts goes through staging memory.
const ALWAYS_STAGED: Thresholds = Thresholds { granularity: u64::MAX, size: 0, staging: 16 << 10 };
/// A message that means "stop".
const STOP: u64 = u64::MAX;

/// Batches of so many operations, one after the other until the time is over.
struct Batches {
    operations: u32,
    time: Duration,
    start: Instant,
    begun: Option<Instant>,
    samples: Vec<f64>,
}

impl Batches {
    /// The batch before this one has ended; whether there is to be one.
    fn go_on(&mut self) -> bool {
        let now = Instant::now();
        if let Some(begun) = self.begun.replace(now) {
            self.samples.push((now - begun).as_secs_f64() / f64::from(self.operations) * 1e6);
        }
        now - self.start < self.time
    }

    /// What an operation took, by the median of the batches.
    fn microseconds(mut self) -> f64 {
        median(&mut self.samples)
    }
}

impl<F: ContextFace> Bench<F> {
    /// Begins the time of a row.
    fn batches(&self, operations: u32) -> Batches {
        Batches { operations, time: self.time, start: Instant::now(), begun: None, samples: Vec::new() }
    }

    async fn run(&self, name: &str) -> Result<()> {
        match name {
            "am_latency" if self.size == 8 => self.am_latency().await,
            "am_latency" => self.am_latency_of_bytes().await,
            "call_latency" => self.call_latency().await,
            "call_typed_latency" => self.call_typed_latency().await,
            "calls_joined" => self.calls_joined().await,
            "am_rate" => self.am_rate(false).await,
            "am_rate_awaited" => self.am_rate(true).await,
            "am_bandwidth" => self.am_bandwidth(false).await,
            "long_bandwidth" => self.am_bandwidth(true).await,
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
            "replay_sends" => self.sends(Sends::Replayed, 50).await,
            "replay_sends_acked" => self.sends(Sends::Replayed, 1).await,
            "sends_awaited" => self.sends(Sends::Awaited, 1).await,
            "sends_joined" => self.sends(Sends::Joined, 1).await,
            "puts_awaited" => self.puts(false).await,
            "puts_joined" => self.puts(true).await,
            "multicast" => self.multicast().await,
            "many_to_many" => self.many_to_many().await,
            "barrier" => self.group_barrier().await,
            "all_reduce" => self.all_reduce(false).await,
            "all_reduce_bandwidth" => self.all_reduce(true).await,
            "all_to_all" => self.all_to_all().await,
            "broadcast_bandwidth" => self.broadcast().await,
            "strided_put" => self.strided_put(false).await,
            "strided_packed" => self.strided_packed(false).await,
            "strided_both" => self.strided_put(true).await,
            "strided_both_packed" => self.strided_packed(true).await,
            "typed_put_bandwidth" => self.typed_put_bandwidth().await,
            "typed_direct" => self.typed_between(Thresholds::default()).await,
            "typed_staged" => self.typed_between(ALWAYS_STAGED).await,
            "layout_strided" => self.layout_strided().await,
            "layout_irregular" => self.layout_irregular().await,
            "layout_transpose" => self.layout_transpose().await,
            "fetch_add" => self.fetch_add().await,
            "gups" => self.updates().await,
            "put_signal" => self.put_signal().await,
            "loss" => self.loss().await,
            "loss_busy" => self.loss_busy().await,
            _ => Err(std::io::Error::other("no such benchmark").into()),
        }
    }

    /// Awaits what works through the shared handle; an owned context is driven meanwhile.
    fn drive<T: Future>(&self, future: T) -> context::Drive<'_, F, T> {
        context::drive(&self.face, future)
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

    /// A message whose handler reads every word, counts, and stores the first word of the last message.
    fn reading(&self, name: &str) -> Result<Counting<'_, F>> {
        let counter = self.job.counter();
        let last = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let (count, seen) = (counter.clone(), last.clone());
        let message = self.job.register(name, move |m: Message, _: &mut Scope| {
            std::hint::black_box(m.sum_words());
            seen.store(m.read::<u64>(0).unwrap_or(0), std::sync::atomic::Ordering::Relaxed);
            count.add(1);
        })?;
        Ok((message.with_face(&self.face), counter, last))
    }

    /// A message whose handler counts, and stores the last word it saw.
    fn counting(&self, name: &str) -> Result<Counting<'_, F>> {
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
}

/// An error of some other type.
fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> posthaste::Error {
    std::io::Error::other(error).into()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
