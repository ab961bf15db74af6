//! Starting the processes that a row needs.

use super::{Args, Device, Plan};
use posthaste::launcher::{self, Launch, Output};
use std::process::Command;
use std::time::Duration;

/// The first and the last of the cores this process may use: two different ones where there are two.
pub fn cores() -> [usize; 2] {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return [0, 0] };
    let allowed: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    [allowed.first().copied().unwrap_or(0), allowed.last().copied().unwrap_or(0)]
}

/// Measures a limit in a process of its own.
pub fn limit(name: &str, size: usize, seconds: f64) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program)
        .args(["limit", name, "--size", &size.to_string(), "--seconds", &seconds.max(0.1).to_string()])
        .output()
        .map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = text.split_whitespace().next().and_then(|word| word.parse().ok());
    value.filter(|_| output.status.success()).ok_or_else(|| {
        format!("the limit {name} could not be measured: {}", String::from_utf8_lossy(&output.stderr).trim())
    })
}

/// Runs a row; its figure.
pub fn run(args: &Args, plan: Plan) -> Result<f64, String> {
    let bench = plan.bench;
    let ranks = args.ranks.filter(|_| bench.ranks > 2).unwrap_or(bench.ranks);
    if bench.name == "memory_silent" {
        // Per peer that is merely there: against the same program in a job of two.
        let few = run_ranks(args, plan, 2)?;
        return Ok(((run_ranks(args, plan, ranks)? - few) / f64::from(ranks.max(3) - 2)).max(0.0));
    }
    run_ranks(args, plan, ranks)
}

/// Standard output and standard error of a rank.
type Said = (Vec<u8>, Vec<u8>);

/// Runs the ranks of a row; the figure that one of them prints.
fn run_ranks(args: &Args, plan: Plan, ranks: u32) -> Result<f64, String> {
    let bench = plan.bench;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let launch = Launch::program(program).args([
        "perf-rank".to_owned(),
        bench.program.unwrap_or(bench.name).to_owned(),
        format!("--size={}", plan.size),
        format!("--seconds={}", args.seconds),
        format!("--face={}", plan.face.name()),
        format!("--runtime={}", plan.runtime.name()),
    ]);
    let mut launch = launcher::prepare(launch, ranks, 1, 1).map_err(|error| error.to_string())?;
    if bench.device == Device::Tcp {
        launch = launch.env("POSTHASTE_DEVICE", "tcp");
    }
    for (name, value) in bench.env {
        launch = launch.env(name, value);
    }
    let job = launch
        .bind(ranks == 2 && plan.runtime == super::Runtime::CurrentThread)
        .stdout(Output::Capture)
        .stderr(Output::Capture)
        .forward_signals(true)
        .spawn()
        .map_err(|error| error.to_string())?;
    let limit = Duration::from_secs_f64(args.seconds * 20.0 + 120.0);
    let Some(outcome) = job.wait_timeout(limit) else {
        return Err(format!("the ranks did not finish within {} s", limit.as_secs()));
    };
    let said = |pick: fn(Said) -> Vec<u8>| {
        (0..ranks)
            .map(|rank| String::from_utf8_lossy(&pick(job.output(rank))).into_owned())
            .collect::<String>()
    };
    if !outcome.success() {
        return Err(format!("{outcome}\n{}", said(|(_, stderr)| stderr)));
    }
    let text = said(|(stdout, _)| stdout);
    let figure = text.lines().find_map(|line| line.strip_prefix("figure "));
    figure
        .and_then(|figure| figure.trim().parse().ok())
        .ok_or_else(|| format!("no figure was printed: {text}"))
}
