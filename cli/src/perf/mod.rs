//! `posthaste perf`: what a user's program gets, beside what the machine could do, in one run.
//!
//! Every row runs ranks of this very program in processes of their own, one to a core, through the public API: Tokio,
//! futures awaited, handlers run. The limit beside it is measured right before and after it, by a loop without the library.
//! The clocks of both start when all memory of a bandwidth of messages has been used once.

mod benches;
mod count;
mod jobs;
mod plot;
mod ranks;
mod rivals;
mod setup;
mod table;

use crate::limits::{self, LimitArgs};
use crate::say::{self, complain, say};
use benches::{Bench, Limit};
use clap::{Args as ClapArgs, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use rivals::{Figures, Rivals};
use serde::{Deserialize, Serialize};
use setup::{Changed, Setup, warn_of};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

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
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(posthaste_launch::MAX_RANKS)))]
    ranks: Option<u32>,
    /// Seconds to measure each row (idle_cpu takes 5 at least, and neighbour_delay 1,000 ticks of a millisecond).
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The benchmarks of this device, with its ranks reaching each other through it (default: POSTHASTE_DEVICE, or shm).
    #[arg(long)]
    device: Option<Device>,
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
    /// Measure beside what is installed of Open MPI, MPICH and UCX, where it has a counterpart.
    #[arg(long)]
    rivals: bool,
    /// Count the instructions of operations instead (or of those that `--bench` names), whatever the machine is busy with.
    #[arg(long, conflicts_with_all = ["sizes", "ranks", "face", "runtime", "list", "no_limits", "rivals", "plot"])]
    instructions: bool,
    /// Write sweeps over the size as pictures (SVG) to this folder, instead of the report.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["bench", "face", "runtime", "ranks", "list", "no_limits"])]
    plot: Option<PathBuf>,
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

impl Device {
    fn name(self) -> &'static str {
        match self {
            Device::Shm => "shm",
            Device::Tcp => "tcp",
        }
    }
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
    /// Ranks that took part.
    pub ranks: u32,
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
    /// What the limit is, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<&'static str>,
    /// How the limit came about: the best way of those that were tried, and the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_detail: Option<String>,
    /// Value over limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// What rivals came to, in the same unit.
    #[serde(skip_serializing_if = "Figures::is_empty")]
    pub rivals: Figures,
    /// What the ranks had of the environment that is not the default.
    #[serde(skip_serializing_if = "Changed::is_empty")]
    pub settings: Changed,
    /// Whether more is better.
    pub higher_is_better: bool,
    /// What the project asks of the ratio, or of the value of a benchmark without a limit.
    #[serde(skip)]
    pub bar: Option<f64>,
}

/// One row to be measured.
#[derive(Clone, Copy)]
struct Plan {
    bench: &'static Bench,
    size: usize,
    ranks: u32,
    face: Face,
    runtime: Runtime,
}

/// Runs the command; the exit code.
pub fn main(args: &Args) -> i32 {
    match carry_out(args) {
        Ok(code) => code,
        Err(problem) => {
            complain(format_args!("perf: {problem}"));
            2
        }
    }
}

/// Exit code of a program that was interrupted.
const INTERRUPTED: i32 = 130;

fn carry_out(args: &Args) -> Result<i32, String> {
    let setup = Setup::of(args.device)?;
    if args.list {
        names(setup.device).iter().for_each(say);
        return Ok(0);
    }
    if args.instructions {
        let interrupted = setup::interruption()?;
        return count::main(&args.bench, args.json, &setup.inherited(), &interrupted);
    }
    measure_all(args, &setup)
}

fn measure_all(args: &Args, setup: &Setup) -> Result<i32, String> {
    let plans = plan(args, setup.device)?;
    if args.seconds.is_nan() || !(0.05..=600.0).contains(&args.seconds) {
        return Err("--seconds must be from 0.05 to 600".to_owned());
    }
    let interrupted = setup::interruption()?;
    warn_of(&setup.settings);
    let rivals = if args.rivals { Some(find_rivals()?) } else { None };
    if interrupted.load(Ordering::Relaxed) {
        return Ok(INTERRUPTED);
    }
    if let Some(folder) = &args.plot {
        plot::prepare(args, setup.device, folder)?;
        let written = plot::write(args, (setup.device, folder), rivals.as_ref(), &interrupted);
        if interrupted.load(Ordering::Relaxed) {
            return Ok(INTERRUPTED);
        }
        return Ok(match written {
            Ok(()) => 0,
            Err(problem) => {
                complain(format_args!("perf: {problem}"));
                1
            }
        });
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let progress = if args.json {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(plans.len() as u64).with_style(style)
    };
    let complain = |plan: &Plan, problem: &str| {
        progress
            .suspend(|| say::complain(format_args!("perf: {} {}: {problem}", plan.bench.name, plan.size)));
    };
    let mut rows = Vec::new();
    let mut failed = 0;
    for plan in plans {
        progress.set_message(format!("{} {} {}", plan.bench.name, plan.size, plan.face.name()));
        let measured = measure(args, plan, &interrupted);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
        match measured {
            Ok(mut row) => {
                row.settings = setup.settings.clone();
                if let Some(rivals) = &rivals {
                    let (figures, wrong) = rivals.measure(args, plan);
                    row.rivals = figures;
                    wrong.iter().for_each(|why| complain(&plan, why));
                }
                if args.json {
                    say(serde_json::to_string(&row).map_err(|error| error.to_string())?);
                }
                rows.push(row);
            }
            Err(problem) => {
                failed += 1;
                complain(&plan, &problem);
            }
        }
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if !args.json {
        say(table::render(&rows, &rivals.as_ref().map(Rivals::names).unwrap_or_default()));
        for note in table::notes(&rows) {
            say(note);
        }
    }
    Ok(if interrupted.load(Ordering::Relaxed) { INTERRUPTED } else { i32::from(failed > 0) })
}

/// The installed rivals; tells which are not.
fn find_rivals() -> Result<Rivals, String> {
    let rivals = Rivals::find();
    if rivals.names().is_empty() {
        return Err(format!("--rivals: none is installed. {}", rivals.missing.join("; ")));
    }
    for why in &rivals.missing {
        complain(format_args!("perf: without {why}"));
    }
    Ok(rivals)
}

fn plan(args: &Args, device: Device) -> Result<Vec<Plan>, String> {
    let mut chosen: Vec<&'static Bench> = Vec::new();
    for name in &args.bench {
        let before = chosen.len();
        chosen.extend(Bench::of(device).filter(|bench| bench.name == name));
        if chosen.len() == before {
            let known = names(device).join(", ");
            return Err(format!("no benchmark is called `{name}`; there are {known}"));
        }
    }
    if chosen.is_empty() {
        chosen.extend(Bench::of(device));
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
        let wanted = args.ranks.filter(|_| bench.takes_ranks());
        let varies = |name| Bench::of(device).any(|bench| bench.name == name && bench.takes_ranks());
        if let (Some(asked), [own]) = (args.ranks, bench.ranks)
            && asked != *own
            && !args.bench.is_empty()
            && !varies(bench.name)
        {
            let s = if *own == 1 { "" } else { "s" };
            complain(format_args!("perf: {} is of {own} rank{s}, whatever --ranks says", bench.name));
        }
        let ranks = wanted.as_ref().map_or(bench.ranks, std::slice::from_ref);
        let fits = sizes
            .iter()
            .try_for_each(|size| bench.check_size(*size))
            .and_then(|()| ranks.iter().try_for_each(|ranks| bench.check_ranks(*ranks)));
        match fits {
            Ok(()) => {}
            // Where nobody has asked for this one.
            Err(_) if args.bench.is_empty() => continue,
            Err(problem) => return Err(problem),
        }
        for &size in sizes {
            for &ranks in ranks {
                for &(face, runtime) in &variants {
                    plans.push(Plan { bench, size, ranks, face, runtime });
                }
            }
        }
    }
    Ok(plans)
}

/// The benchmarks of a device, each once.
fn names(device: Device) -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for bench in Bench::of(device) {
        if !names.contains(&bench.name) {
            names.push(bench.name);
        }
    }
    names
}

fn measure(args: &Args, plan: Plan, interrupted: &AtomicBool) -> Result<Row, String> {
    let Plan { bench, size, ranks, face, runtime } = plan;
    // Half of the limit's time before and half after: a machine that changes its pace shows in both.
    let limited = bench.limit.filter(|_| !args.no_limits);
    let mut detail = None;
    let mut side = |seconds: f64| match limited {
        Some(Limit::Native) => jobs::run_natively(args, plan).map(Some),
        Some(Limit::Started) => jobs::start_processes(plan).map(Some),
        Some(Limit::Instead(program)) => jobs::run_program(args, plan, program, &[]).map(Some),
        Some(Limit::Bare(name, factor)) => {
            let limited = jobs::Limited { name, size, count: bench.count(ranks), seconds };
            let (value, told) = jobs::limit(&limited, interrupted)?;
            detail = Some(told);
            Ok(Some(value * factor))
        }
        None => Ok(None),
    };
    // A signal that came amid one of them has ended that one; the next would not hear of it.
    let go_on = || if interrupted.load(Ordering::Relaxed) { Err("interrupted") } else { Ok(()) };
    let before = side(args.seconds / 2.0)?;
    go_on()?;
    let value = jobs::run(args, plan)?;
    go_on()?;
    let after = side(args.seconds / 2.0)?;
    let limit = before.zip(after).map(|(a, b)| (a + b) / 2.0);
    Ok(Row {
        bench: bench.name,
        device: bench.device,
        size,
        ranks,
        face: face.name(),
        runtime: runtime.name(),
        value,
        unit: bench.unit,
        limit,
        against: limited.map(Limit::name),
        limit_detail: detail,
        ratio: limit.map(|limit| value / limit),
        rivals: Figures::new(),
        settings: Changed::new(),
        higher_is_better: bench.higher_is_better,
        // A bar for the ratio says nothing of a value whose limit was not measured.
        bar: bench.bar.filter(|_| bench.limit.is_some() == limit.is_some()),
    })
}

/// The hidden command that measures a limit in a process of its own and prints the figure, and in a second line how it came about.
pub fn limit_main(name: &str, size: usize, count: usize, seconds: f64) -> i32 {
    let cores = jobs::cores();
    match limits::run(name, &LimitArgs { size, count, seconds, cores }) {
        Ok(measured) => {
            say(format_args!("{} {}", measured.value, measured.unit));
            say(measured.detail);
            0
        }
        Err(error) => {
            eprintln!("{error}");
            1
        }
    }
}

pub use count::{rank_main as count_rank_main, tracer_main};
pub use ranks::{RankArgs, rank_main};
