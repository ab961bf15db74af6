//! Starting the processes that a row needs.

use super::{Args, Device, Plan};
use posthaste::launcher::{self, Launch, Output, RankEnd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two looks whether a limit is measured.
const LOOK: Duration = Duration::from_millis(5);

/// The first two of the cores this process may use, which are those that the launcher binds the ranks to: what is measured and its limit
/// are of the same pair. One of them twice where there is one.
pub fn cores() -> [usize; 2] {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return [0, 0] };
    let allowed: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    first_two(&allowed)
}

fn first_two(allowed: &[usize]) -> [usize; 2] {
    let first = allowed.first().copied().unwrap_or(0);
    [first, allowed.get(1).copied().unwrap_or(first)]
}

/// What a limit is measured of.
pub struct Limited<'n> {
    pub name: &'n str,
    pub size: usize,
    pub count: usize,
    pub seconds: f64,
}

/// Measures a limit in a process of its own; the figure, and how it came about. That process ends when this one is interrupted.
pub fn limit(limited: &Limited<'_>, interrupted: &AtomicBool) -> Result<(f64, String), String> {
    let Limited { name, size, count, seconds } = limited;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut process = Command::new(program)
        .args(["limit", name, "--size", &size.to_string(), "--count", &count.to_string()])
        .args(["--seconds", &seconds.max(0.02).to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    // It says less than a pipe holds.
    while process.try_wait().map_err(|error| error.to_string())?.is_none() {
        if interrupted.load(Ordering::Relaxed) {
            // It may have ended by itself.
            let _killed = process.kill();
            let ended = process.wait();
            return Err(ended.map_or_else(|error| error.to_string(), |_| "interrupted".to_owned()));
        }
        std::thread::sleep(LOOK);
    }
    let output = process.wait_with_output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = text.split_whitespace().next().and_then(|word| word.parse().ok());
    match value.filter(|_| output.status.success()) {
        Some(value) => Ok((value, text.lines().nth(1).unwrap_or_default().to_owned())),
        None => {
            let why = String::from_utf8_lossy(&output.stderr);
            Err(format!("the limit {name} could not be measured: {}", why.trim()))
        }
    }
}

/// Runs a row; its figure.
pub fn run(args: &Args, plan: Plan) -> Result<f64, String> {
    let Plan { bench, ranks, .. } = plan;
    if bench.name == "memory_silent" {
        // Per peer that is merely there: against the same program in a job of two.
        let few = run_ranks(args, Plan { ranks: 2, ..plan })?;
        return Ok(((run_ranks(args, plan)? - few) / f64::from(ranks.max(3) - 2)).max(0.0));
    }
    if bench.name == "join" {
        // From the start of the first to the end of the last: all have met by then.
        let start = Instant::now();
        run_ranks(args, plan)?;
        return Ok(start.elapsed().as_secs_f64());
    }
    run_ranks(args, plan)
}

/// The same row without what its ranks are told besides; its figure.
pub fn run_natively(args: &Args, plan: Plan) -> Result<f64, String> {
    run_program(args, plan, plan.bench.program(), &[])
}

/// Starts as many processes of this program as the row has ranks, and waits for them; the seconds.
pub fn start_processes(plan: Plan) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let started: Result<Vec<_>, _> = (0..plan.ranks)
        .map(|_| Command::new(&program).arg("--version").stdout(Stdio::null()).spawn())
        .collect();
    for mut process in started.map_err(|error| error.to_string())? {
        process.wait().map_err(|error| error.to_string())?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// The benchmarks whose ranks are killed, all but the first.
const DYING: &[&str] = &["loss", "loss_busy"];

/// Standard output and standard error of a rank.
type Said = (Vec<u8>, Vec<u8>);

fn run_ranks(args: &Args, plan: Plan) -> Result<f64, String> {
    run_program(args, plan, plan.bench.program(), plan.bench.env)
}

/// Runs the ranks of a row, or of another program of its size; the figure that one of them prints.
pub fn run_program(args: &Args, plan: Plan, name: &str, env: &[(&str, &str)]) -> Result<f64, String> {
    let Plan { bench, ranks, .. } = plan;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let launch = Launch::program(program).args([
        "perf-rank".to_owned(),
        name.to_owned(),
        format!("--size={}", plan.size),
        format!("--count={}", bench.count),
        format!("--seconds={}", args.seconds),
        format!("--face={}", plan.face.name()),
        format!("--runtime={}", plan.runtime.name()),
    ]);
    let mut launch = launcher::prepare(launch, ranks, 1, 1).map_err(|error| error.to_string())?;
    if bench.device == Device::Tcp {
        launch = launch.tcp(true).env("POSTHASTE_DEVICE", "tcp");
    }
    for (name, value) in env {
        launch = launch.env(name, value);
    }
    let job = launch
        .bind(ranks <= 2 && plan.runtime == super::Runtime::CurrentThread)
        .stdout(Output::Capture)
        .stderr(Output::Capture)
        .forward_signals(true)
        .keep_going(DYING.contains(&name))
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
    let ended_well = if DYING.contains(&name) {
        outcome.ranks.first() == Some(&RankEnd::Exit(0))
    } else {
        outcome.success()
    };
    if !ended_well {
        return Err(format!("{outcome}\n{}", said(|(_, stderr)| stderr)));
    }
    let text = said(|(stdout, _)| stdout);
    let figure = text.lines().find_map(|line| line.strip_prefix("figure "));
    figure
        .and_then(|figure| figure.trim().parse().ok())
        .ok_or_else(|| format!("no figure was printed: {text}"))
}

#[cfg(test)]
mod tests {
    use super::first_two;

    #[test]
    fn limits_are_measured_on_the_cores_of_ranks_0_and_1() {
        assert_eq!(first_two(&[2, 3, 8, 9]), [2, 3]);
        assert_eq!((first_two(&[5]), first_two(&[])), ([5, 5], [0, 0]));
    }
}
