//! Open MPI and MPICH.

use super::{is_tcp, output, patience, says, subject, version};
use crate::perf::{Args, Plan, jobs};
use posthaste::launcher::Launch;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

const SOURCE: &str = include_str!("mpi.c");
const BUILD_LIMIT: Duration = Duration::from_secs(60);

/// Arguments, and what the environment says besides.
type CommandLine = (Vec<String>, Vec<(&'static str, &'static str)>);

/// An implementation that can be installed.
#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    /// What starts programs and what builds them, with the names of the distributions first.
    commands: &'static [(&'static str, &'static str)],
    /// What its version says.
    mark: &'static str,
    /// The packages of Debian.
    packages: &'static str,
    command_line: fn(&Case) -> CommandLine,
}

pub const KINDS: &[Kind] = &[
    Kind {
        name: "Open MPI",
        commands: &[("mpirun.openmpi", "mpicc.openmpi"), ("mpirun", "mpicc")],
        mark: "Open",
        packages: "openmpi-bin libopenmpi-dev",
        command_line: open_mpi,
    },
    Kind {
        name: "MPICH",
        commands: &[("mpiexec.hydra", "mpicc.mpich"), ("mpiexec.hydra", "mpicc")],
        mark: "HYDRA",
        packages: "mpich libmpich-dev",
        command_line: mpich,
    },
];

/// How a program is started.
#[derive(Debug)]
struct Case {
    ranks: u32,
    tcp: bool,
}

fn open_mpi(case: &Case) -> CommandLine {
    let mut line = vec!["-n".to_owned(), case.ranks.to_string()];
    line.extend(
        ["--oversubscribe", "--bind-to", "none", "--mca", "oob_tcp_if_include", "lo"].map(str::to_owned),
    );
    if rustix::process::geteuid().is_root() {
        line.push("--allow-run-as-root".to_owned());
    }
    if case.tcp {
        let only = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"];
        line.extend(only.map(str::to_owned));
    }
    (line, Vec::new())
}

fn mpich(case: &Case) -> CommandLine {
    let line = vec!["-n".to_owned(), case.ranks.to_string()];
    let env = if case.tcp {
        vec![("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "lo"), ("MPIR_CVAR_NOLOCAL", "1")]
    } else {
        vec![("UCX_TLS", "posix,sysv,cma,self")]
    };
    (line, env)
}

/// One that is installed.
#[derive(Debug)]
pub struct Mpi {
    pub name: String,
    kind: &'static Kind,
    starter: &'static str,
    /// Our program, built. Its file has no name any more, so that nothing is left however this process ends.
    program: File,
}

impl Mpi {
    /// Finds it and builds the program.
    pub fn find(kind: &'static Kind) -> Result<Mpi, String> {
        for (starter, compiler) in kind.commands {
            let Some(told) = says(starter, "--version").filter(|told| told.contains(kind.mark)) else {
                continue;
            };
            if says(compiler, "--version").is_none() {
                continue;
            }
            let name = format!("{} {}", kind.name, version(&told)).trim_end().to_owned();
            let program = build(compiler).map_err(|why| {
                format!("its program could not be built by {compiler} (Debian: {}): {why}", kind.packages)
            })?;
            return Ok(Mpi { name, kind, starter, program });
        }
        let (starter, compiler) = kind.commands[0];
        Err(format!("there is no `{starter}` with a `{compiler}` (Debian: {})", kind.packages))
    }

    /// What it comes to for a row, if it has a counterpart.
    pub fn measure(&self, args: &Args, plan: Plan) -> Option<Result<f64, String>> {
        let (bench, count) = counterpart(plan)?;
        let (mut line, env) = (self.kind.command_line)(&Case { ranks: plan.ranks, tcp: is_tcp(plan) });
        line.push(format!("/proc/{}/fd/{}", std::process::id(), self.program.as_raw_fd()));
        line.extend([bench.to_owned(), plan.size.to_string(), count.to_string(), args.seconds.to_string()]);
        if plan.ranks == 2 {
            line.extend(jobs::cores().map(|core| core.to_string()));
        }
        let launch = Launch::program(self.starter).args(line);
        let launch = env.into_iter().fold(launch, |launch, (name, value)| launch.env(name, value));
        Some(output(launch, 1, patience(args)).and_then(|text| {
            let figure = text.lines().find_map(|line| line.strip_prefix("figure "));
            figure
                .and_then(|text| text.trim().parse().ok())
                .ok_or_else(|| format!("no figure was printed: {text}"))
        }))
    }
}

/// What the program calls a row, and how many operations make a batch of it.
fn counterpart(plan: Plan) -> Option<(&'static str, usize)> {
    if !plan.bench.has_counterparts() {
        return None;
    }
    let several = (8 << 20) / plan.size.max(1);
    Some(match subject(plan) {
        "am_latency" => ("latency", 1),
        "am_rate" => ("rate", 1000),
        "am_bandwidth" | "long_bandwidth" => ("bandwidth", several.clamp(8, 256)),
        "put_rate" => ("put_rate", 1000),
        "get_rate" => ("get_rate", 1000),
        "put_bandwidth" => ("put_bandwidth", several.clamp(4, 64)),
        "get_bandwidth" => ("get_bandwidth", several.clamp(4, 64)),
        "replay" | "replay_sends_acked" => ("persistent", plan.bench.count),
        "barrier" => ("barrier", 1),
        "all_reduce" => ("all_reduce", 1),
        "all_reduce_bandwidth" => ("all_reduce_bandwidth", 1),
        "all_to_all" => ("all_to_all", 1),
        "broadcast_bandwidth" => ("broadcast", 8),
        _ => return None,
    })
}

/// Builds the program in a folder that is gone when this returns.
fn build(compiler: &str) -> Result<File, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let (source, program) = (folder.path().join("mpi.c"), folder.path().join("mpi"));
    std::fs::write(&source, SOURCE).map_err(|error| error.to_string())?;
    let line = [
        "-O3".to_owned(),
        "-w".to_owned(),
        "-o".to_owned(),
        program.display().to_string(),
        source.display().to_string(),
    ];
    output(Launch::program(compiler).args(line), 1, BUILD_LIMIT)?;
    File::open(&program).map_err(|error| error.to_string())
}
