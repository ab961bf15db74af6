//! `--rivals`: what others get on the same cores in the same run.
//!
//! MPI programs are one program of ours, built for each MPI that is there; UCX brings its own. Each runs as a job of our
//! launcher, which ends it in time, and with this program however that ends.

mod mpi;
mod ucx;

use super::{Args, Device, Face, Plan, Runtime};
use posthaste::launcher::{self, Launch, Output};
use std::collections::BTreeMap;
use std::time::Duration;

/// What rivals came to, by their names.
pub type Figures = BTreeMap<String, f64>;

/// The rivals that are installed.
#[derive(Debug)]
pub struct Rivals {
    mpi: Vec<mpi::Mpi>,
    ucx: Option<ucx::Ucx>,
    /// What is not there, and what it would take.
    pub missing: Vec<String>,
}

impl Rivals {
    /// Looks for them, and builds what they run.
    pub fn find() -> Rivals {
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for kind in mpi::KINDS {
            match mpi::Mpi::find(kind) {
                Ok(mpi) => found.push(mpi),
                Err(why) => missing.push(format!("{}: {why}", kind.name)),
            }
        }
        let ucx = ucx::Ucx::find().map_err(|why| missing.push(format!("UCX: {why}"))).ok();
        Rivals { mpi: found, ucx, missing }
    }

    /// The names of those that are there, as columns.
    pub fn names(&self) -> Vec<&str> {
        let mpi = self.mpi.iter().map(|mpi| mpi.name.as_str());
        mpi.chain(self.ucx.as_ref().map(|ucx| ucx.name.as_str())).collect()
    }

    /// What they come to where a row has a counterpart, and what went wrong.
    pub fn measure(&self, args: &Args, plan: Plan) -> (Figures, Vec<String>) {
        let (mut figures, mut wrong) = (Figures::new(), Vec::new());
        if plan.face != Face::Handle || plan.runtime != Runtime::CurrentThread {
            return (figures, wrong);
        }
        let mut add = |name: &str, outcome: Option<Result<f64, String>>| match outcome {
            Some(Ok(figure)) => drop(figures.insert(name.to_owned(), figure)),
            Some(Err(why)) => wrong.push(format!("{name}: {why}")),
            None => {}
        };
        for mpi in &self.mpi {
            add(&mpi.name, mpi.measure(args, plan));
        }
        if let Some(ucx) = &self.ucx {
            add(&ucx.name, ucx.measure(args, plan));
        }
        (figures, wrong)
    }
}

/// What a program prints that is run as so many ranks, joined.
fn output(launch: Launch, ranks: u32, limit: Duration) -> Result<String, String> {
    let launch = launcher::prepare(launch, ranks, 1, 1).map_err(|error| error.to_string())?;
    let launch = launch.stdout(Output::Capture).stderr(Output::Capture).forward_signals(true);
    let job = launch.spawn().map_err(|error| error.to_string())?;
    let Some(outcome) = job.wait_timeout(limit) else {
        job.end();
        // Its ranks have a moment to end by themselves: a launcher that is killed leaves some behind.
        let _ended = job.wait_timeout(Duration::from_secs(10));
        return Err(format!("it did not end within {} s", limit.as_secs()));
    };
    let (mut printed, mut complaints) = (String::new(), String::new());
    for rank in 0..ranks {
        let (stdout, stderr) = job.output(rank);
        printed.push_str(&String::from_utf8_lossy(&stdout));
        complaints.push_str(&String::from_utf8_lossy(&stderr));
    }
    if outcome.success() {
        return Ok(printed);
    }
    // Some complain on standard output.
    let said = complaints.lines().chain(printed.lines()).map(str::trim);
    let reason: Vec<&str> =
        said.filter(|line| !line.is_empty() && !line.starts_with("---")).take(4).collect();
    Err(format!("{outcome}: {}", reason.join(" / ")))
}

/// How long a rival may take that measures for so many seconds.
fn patience(args: &Args) -> Duration {
    Duration::from_secs_f64(args.seconds * 4.0 + 60.0)
}

/// The first number with dots in a text, such as a version.
fn version(text: &str) -> String {
    let words = text.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_ascii_digit()));
    words.into_iter().find(|word| word.contains('.')).unwrap_or("").to_owned()
}

/// What a command prints, if it can be started.
fn says(program: &str, argument: &str) -> Option<String> {
    let output = std::process::Command::new(program).arg(argument).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The name of what both devices have in common, for a row.
fn subject(plan: Plan) -> &'static str {
    plan.bench.program()
}

fn is_tcp(plan: Plan) -> bool {
    plan.bench.device == Device::Tcp
}
