//! `posthaste perf`: what a user's program gets, beside what the machine could do, in one run.
//!
//! Every row runs ranks of this very program in processes of their own, one to a core, through the public API: Tokio,
//! futures awaited, handlers run. The limit beside it is measured right before and after it, by a loop without the library.

mod jobs;
mod ranks;
mod table;

use crate::limits::{self, LimitArgs};
use clap::{Args as ClapArgs, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

/// Measure latency, rates and bandwidth between real processes, beside the machine's limits.
#[derive(ClapArgs, Clone, Debug)]
pub struct Args {
    /// Only these benchmarks, separated by commas (default: all).
    #[arg(long, value_delimiter = ',')]
    bench: Vec<String>,
    /// Payload sizes in bytes, separated by commas (default: those of the benchmark).
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Ranks of the benchmarks that can have more than two.
    #[arg(long)]
    ranks: Option<u32>,
    /// Seconds to measure each row.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The benchmarks of this device, with its ranks reaching each other through it.
    #[arg(long, default_value = "shm")]
    device: Device,
    /// Only this face of a context (default: both).
    #[arg(long)]
    face: Option<Face>,
    /// Only this Tokio runtime (default: both for the handle face).
    #[arg(long)]
    runtime: Option<Runtime>,
    /// One JSON object per line instead of a table.
    #[arg(long)]
    json: bool,
    /// List the benchmarks.
    #[arg(long)]
    list: bool,
    /// Measure without the limits beside.
    #[arg(long)]
    no_limits: bool,
}

/// How the ranks of a benchmark reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// Shared memory.
    Shm,
    /// Sockets, over the loopback interface.
    Tcp,
}

/// Which face of a context the operations go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Face {
    /// The shared handle.
    Handle,
    /// The owned context.
    Context,
}

/// Which Tokio runtime the program runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Runtime {
    /// `#[tokio::main(flavor = "current_thread")]`.
    CurrentThread,
    /// `#[tokio::main]`, operations in a spawned task.
    MultiThread,
}

impl Face {
    fn name(self) -> &'static str {
        match self {
            Face::Handle => "handle",
            Face::Context => "context",
        }
    }
}

impl Runtime {
    fn name(self) -> &'static str {
        match self {
            Runtime::CurrentThread => "current_thread",
            Runtime::MultiThread => "multi_thread",
        }
    }
}

/// One row of the report, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The benchmark.
    pub bench: &'static str,
    /// What it goes through.
    pub device: Device,
    /// Payload bytes, or what the benchmark counts.
    pub size: usize,
    /// `handle` or `context`.
    pub face: &'static str,
    /// `current_thread` or `multi_thread`.
    pub runtime: &'static str,
    /// The figure.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What the machine could do, in the same unit, measured in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// Value over limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Whether more is better.
    pub higher_is_better: bool,
    /// What the project asks of the ratio, or of the value where there is no limit.
    #[serde(skip)]
    pub bar: Option<f64>,
}

/// A benchmark: what it is called, measured with, compared to, and asked for.
pub struct Bench {
    name: &'static str,
    sizes: &'static [usize],
    unit: &'static str,
    higher_is_better: bool,
    /// The limit's name and the factor from its figure to this benchmark's.
    limit: Option<(&'static str, f64)>,
    bar: Option<f64>,
    faces: bool,
    ranks: u32,
    device: Device,
    /// What its ranks run, where that is called otherwise.
    program: Option<&'static str>,
    /// What its ranks are told besides.
    env: &'static [(&'static str, &'static str)],
}

const K: usize = 1024;
const M: usize = 1024 * K;

const fn bench(name: &'static str, sizes: &'static [usize], unit: &'static str) -> Bench {
    Bench {
        name,
        sizes,
        unit,
        higher_is_better: false,
        limit: None,
        bar: None,
        faces: true,
        ranks: 2,
        device: Device::Shm,
        program: None,
        env: &[],
    }
}

const fn tcp(bench: Bench) -> Bench {
    Bench { device: Device::Tcp, ..bench }
}

const fn fast(name: &'static str, sizes: &'static [usize], unit: &'static str) -> Bench {
    Bench { higher_is_better: true, ..bench(name, sizes, unit) }
}

/// Puts and gets as messages, though the device has its own.
const OVER_SEND: &[(&str, &str)] = &[("POSTHASTE_OVERSEND", "always")];

/// All benchmarks, in the order of the report.
#[rustfmt::skip]
pub const BENCHES: &[Bench] = &[
    Bench { limit: Some(("pingpong_two_lines", 1.0)), bar: Some(1.35), ..bench("am_latency", &[8], "us") },
    Bench { limit: Some(("pingpong_two_lines", 2.0)), bar: Some(1.5), ..bench("call_latency", &[8], "us") },
    Bench { higher_is_better: true, bar: Some(25.0), ..bench("am_rate", &[8], "M/s") },
    Bench { higher_is_better: true, bar: Some(15.0), ..bench("am_rate_awaited", &[8], "M/s") },
    Bench { higher_is_better: true, limit: Some(("two_copy_pipeline", 1.0)), bar: Some(0.95),
            ..bench("am_bandwidth", &[4 * K, 64 * K, M, 4 * M], "GB/s") },
    Bench { limit: Some(("pingpong_two_lines", 1.0)), bar: Some(4.0), ..bench("loan_latency", &[M], "us") },
    Bench { limit: Some(("pingpong_two_lines", 1.0)), bar: Some(1.2), ..bench("put_latency", &[8], "us") },
    Bench { higher_is_better: true, bar: Some(60.0), faces: false, ..bench("put_rate", &[8], "M/s") },
    Bench { higher_is_better: true, bar: Some(60.0), faces: false, ..bench("get_rate", &[8], "M/s") },
    Bench { higher_is_better: true, limit: Some(("memcpy_to_shared", 1.0)), bar: Some(0.95), faces: false,
            ..bench("put_bandwidth", &[4 * K, 64 * K, M, 16 * M], "GB/s") },
    Bench { higher_is_better: true, limit: Some(("memcpy_from_shared", 1.0)), bar: Some(0.95), faces: false,
            ..bench("get_bandwidth", &[4 * K, 64 * K, M, 16 * M], "GB/s") },
    Bench { limit: Some(("descriptor_loop", 1.0)), bar: Some(2.0), ..bench("replay", &[8, K], "us") },
    Bench { limit: Some(("two_copy_pipeline", 1.0)), bar: Some(1.0), faces: false, program: Some("am_bandwidth"),
            ..fast("rendezvous_bandwidth", &[M, 4 * M, 16 * M, 64 * M], "GB/s") },
    Bench { limit: Some(("memcpy_to_shared", 1.0)), faces: false, program: Some("put_bandwidth"), env: OVER_SEND,
            ..fast("put_bandwidth_over_send", &[4 * K, 64 * K, M], "GB/s") },
    Bench { limit: Some(("memcpy_from_shared", 1.0)), faces: false, program: Some("get_bandwidth"), env: OVER_SEND,
            ..fast("get_bandwidth_over_send", &[4 * K, 64 * K, M], "GB/s") },
    Bench { limit: Some(("eventfd_asyncfd_wake", 1.0)), bar: Some(1.25), ..bench("wakeup_latency", &[8], "us") },
    Bench { limit: Some(("ticker_alone", 1.0)), faces: false, ..bench("neighbour_delay", &[1, 1000], "us") },
    Bench { bar: Some(1.0), faces: false, ranks: 8, ..bench("idle_cpu", &[0], "%") },
    Bench { faces: false, ranks: 16, ..bench("oversubscribed", &[64], "s") },
    Bench { bar: Some(1.0), faces: false, ranks: 33, ..bench("memory_silent", &[0], "KiB") },
    Bench { bar: Some(64.0), faces: false, ranks: 33, ..bench("memory_talking", &[0], "KiB") },
    tcp(Bench { limit: Some(("tcp_pingpong", 1.0)), bar: Some(1.0), ..bench("am_latency", &[8], "us") }),
    tcp(Bench { limit: Some(("tcp_pingpong", 2.0)), bar: Some(1.1), ..bench("call_latency", &[8], "us") }),
    tcp(Bench { bar: Some(4.0), ..fast("am_rate", &[8], "M/s") }),
    tcp(Bench { limit: Some(("tcp_stream", 1.0)), bar: Some(0.95), ..fast("am_bandwidth", &[64 * K, M, 4 * M], "GB/s") }),
    tcp(Bench { limit: Some(("tcp_stream", 1.0)), bar: Some(0.95), faces: false,
                ..fast("put_bandwidth", &[64 * K, M, 4 * M], "GB/s") }),
    tcp(Bench { limit: Some(("tcp_stream", 1.0)), bar: Some(0.95), faces: false,
                ..fast("get_bandwidth", &[64 * K, M, 4 * M], "GB/s") }),
    tcp(Bench { limit: Some(("tcp_aead_stream", 1.0)), bar: Some(0.9), program: Some("am_bandwidth"),
                env: &[("POSTHASTE_TCP_MODE", "encrypted")], ..fast("encrypted_am_bandwidth", &[M], "GB/s") }),
    tcp(Bench { ..bench("replay", &[8, K], "us") }),
    tcp(Bench { bar: Some(1.0), faces: false, ranks: 8, ..bench("idle_cpu", &[0], "%") }),
];

impl Bench {
    fn of(device: Device) -> impl Iterator<Item = &'static Bench> {
        BENCHES.iter().filter(move |bench| bench.device == device)
    }
}

/// One row to be measured.
#[derive(Clone, Copy)]
struct Plan {
    bench: &'static Bench,
    size: usize,
    face: Face,
    runtime: Runtime,
}

/// Runs the command; the exit code.
pub fn main(args: &Args) -> i32 {
    if args.list {
        for bench in Bench::of(args.device) {
            println!("{}", bench.name);
        }
        return 0;
    }
    let plans = match plan(args) {
        Ok(plans) => plans,
        Err(problem) => {
            eprintln!("posthaste perf: {problem}");
            return 2;
        }
    };
    if args.seconds.is_nan() || !(0.05..=600.0).contains(&args.seconds) {
        eprintln!("posthaste perf: --seconds must be from 0.05 to 600");
        return 2;
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let progress = if args.json {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(plans.len() as u64).with_style(style)
    };
    let mut rows = Vec::new();
    let mut failed = 0;
    for plan in plans {
        progress.set_message(format!("{} {} {}", plan.bench.name, plan.size, plan.face.name()));
        match measure(args, plan) {
            Ok(row) => {
                if args.json {
                    match serde_json::to_string(&row) {
                        Ok(line) => println!("{line}"),
                        Err(error) => eprintln!("posthaste perf: {error}"),
                    }
                }
                rows.push(row);
            }
            Err(problem) => {
                failed += 1;
                progress
                    .suspend(|| eprintln!("posthaste perf: {} {}: {problem}", plan.bench.name, plan.size));
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if !args.json {
        println!("{}", table::render(&rows));
    }
    i32::from(failed > 0)
}

fn plan(args: &Args) -> Result<Vec<Plan>, String> {
    let mut chosen: Vec<&'static Bench> = Vec::new();
    for name in &args.bench {
        let known = || Bench::of(args.device).map(|bench| bench.name).collect::<Vec<_>>().join(", ");
        let found = Bench::of(args.device).find(|bench| bench.name == name);
        chosen.push(found.ok_or_else(|| format!("no benchmark is called `{name}`; there are {}", known()))?);
    }
    if chosen.is_empty() {
        chosen.extend(Bench::of(args.device));
    }
    let mut plans = Vec::new();
    for bench in chosen {
        let mut variants = vec![(Face::Handle, Runtime::CurrentThread)];
        if bench.faces {
            variants.push((Face::Context, Runtime::CurrentThread));
            variants.push((Face::Handle, Runtime::MultiThread));
        }
        variants.retain(|(face, runtime)| {
            args.face.is_none_or(|wanted| wanted == *face)
                && args.runtime.is_none_or(|wanted| wanted == *runtime)
        });
        let sizes = if args.sizes.is_empty() { bench.sizes } else { &args.sizes };
        for &size in sizes {
            for &(face, runtime) in &variants {
                plans.push(Plan { bench, size, face, runtime });
            }
        }
    }
    Ok(plans)
}

fn measure(args: &Args, plan: Plan) -> Result<Row, String> {
    let Plan { bench, size, face, runtime } = plan;
    // Half of the limit's time before and half after: a machine that changes its pace shows in both.
    let limited = bench.limit.filter(|_| !args.no_limits);
    let side = |seconds: f64| match limited {
        Some((name, factor)) => jobs::limit(name, size, seconds).map(|value| Some(value * factor)),
        None => Ok(None),
    };
    let before = side(args.seconds / 2.0)?;
    let value = jobs::run(args, plan)?;
    let after = side(args.seconds / 2.0)?;
    let limit = before.zip(after).map(|(a, b)| (a + b) / 2.0);
    Ok(Row {
        bench: bench.name,
        device: bench.device,
        size,
        face: face.name(),
        runtime: runtime.name(),
        value,
        unit: bench.unit,
        limit,
        ratio: limit.map(|limit| value / limit),
        higher_is_better: bench.higher_is_better,
        bar: bench.bar,
    })
}

/// The hidden command that measures a limit in a process of its own and prints the figure.
pub fn limit_main(name: &str, size: usize, seconds: f64) -> i32 {
    let cores = jobs::cores();
    match limits::run(name, &LimitArgs { size, count: 1000, seconds, cores }) {
        Ok(measured) => {
            println!("{} {}", measured.value, measured.unit);
            eprintln!("{}", measured.detail);
            0
        }
        Err(error) => {
            eprintln!("{error}");
            1
        }
    }
}

pub use ranks::{RankArgs, rank_main};
