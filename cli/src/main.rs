//! The command-line program `posthaste`.

mod info;
mod limits;
mod perf;
mod routes;
mod run;

use clap::{Parser, Subcommand};

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

fn main() {
    let code = match Cli::parse().command {
        Command::Run(args) => run::main(&args),
        Command::Agent => posthaste_launch::run_agent(),
        Command::Info(args) => info::main(&args),
        Command::Perf(args) => perf::main(&args),
        Command::PerfRank(args) => perf::rank_main(&args),
        Command::Limit { name, size, count, seconds } => perf::limit_main(&name, size, count, seconds),
    };
    std::process::exit(code);
}
