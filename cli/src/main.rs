//! The command-line program `posthaste`.

#![deny(unsafe_code)]

mod info;
#[allow(unsafe_code)]
mod limits;
mod perf;
mod routes;
mod run;
mod say;

use clap::{Parser, Subcommand};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Start, measure and inspect Posthaste jobs.
#[derive(Parser)]
#[command(name = "posthaste", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a program as the ranks of a job, on this host or on several.
    Run(run::Args),
    /// What `posthaste run --hosts` starts on each host.
    #[command(hide = true)]
    Agent,
    /// Show devices, limits, settings, and what of this host stands in the way.
    Info(info::Args),
    /// Measure latency, rates and bandwidth between real processes, beside the machine's limits.
    Perf(perf::Args),
    /// One rank of a benchmark.
    #[command(hide = true)]
    PerfRank(perf::RankArgs),
    /// One rank of an operation whose instructions are counted.
    #[command(hide = true)]
    CountRank {
        /// Which.
        operation: String,
    },
    /// What counts them.
    #[command(hide = true)]
    CountTracer {
        /// The rank's process.
        process: i32,
    },
    /// One limit of the machine.
    #[command(hide = true)]
    Limit {
        /// Which.
        name: String,
        /// Bytes.
        #[arg(long)]
        size: usize,
        /// Descriptors, blocks or lanes.
        #[arg(long, default_value_t = 1000)]
        count: usize,
        /// How long.
        #[arg(long)]
        seconds: f64,
    },
}

/// Shows what the library warns of, unless `RUST_LOG` asks for more or less.
fn show_warnings() {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy();
    let shown = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let colours = std::io::stderr().is_terminal();
    // Nobody may read them any more.
    let shown = shown.log_internal_errors(false);
    shown.with_ansi(colours).without_time().with_target(false).compact().init();
}

fn main() {
    let command = Cli::parse().command;
    // A benchmark's own processes are as a user's program would be.
    if !matches!(command, Command::PerfRank(_) | Command::CountRank { .. } | Command::Limit { .. }) {
        show_warnings();
    }
    let code = match command {
        Command::Run(args) => run::main(&args),
        Command::Agent => posthaste_launch::run_agent(),
        Command::Info(args) => info::main(&args),
        Command::Perf(args) => perf::main(&args),
        Command::PerfRank(args) => perf::rank_main(&args),
        Command::CountRank { operation } => perf::count_rank_main(&operation),
        Command::CountTracer { process } => perf::tracer_main(process),
        Command::Limit { name, size, count, seconds } => perf::limit_main(&name, size, count, seconds),
    };
    std::process::exit(code);
}
