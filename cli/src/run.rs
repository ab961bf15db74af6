//! `posthaste run`: starts a program as the ranks of a job, on this host or on several.

use crate::say::complain;
use clap::value_parser;
use posthaste::launcher::{JobOutcome, Launch, LaunchError, prepare};
use posthaste_launch::Hosts;
use std::error::Error;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::PathBuf;

/// The arguments of `posthaste run`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of ranks; with `--hosts`, as many as there are slots by default.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = value_parser!(u32).range(1..=4096),
          required_unless_present = "hosts")]
    ranks: Option<u32>,
    /// Contexts of each client.
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=64))]
    contexts: u16,
    /// Clients of each rank.
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = value_parser!(u16).range(1..=32))]
    clients: u16,
    /// Spread the ranks over so many nodes, which share no memory, as if they were hosts.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = value_parser!(u32).range(1..=4096))]
    nodes: u32,
    /// How ranks reach each other: `auto` is over shared memory on one node and over sockets else.
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Run on other hosts, over ssh: a file of lines `host [slots=N]`.
    #[arg(long, value_name = "FILE", conflicts_with = "nodes")]
    hosts: Option<PathBuf>,
    /// How to reach a host: a command to which its name and the agent's command are added. By default `ssh -T -o
    /// BatchMode=yes -o ServerAliveInterval=1 -o ServerAliveCountMax=4`, with an interval of a fifth of POSTHASTE_TCP_TIMEOUT.
    #[arg(long, value_name = "COMMAND", requires = "hosts")]
    ssh: Option<String>,
    /// The command of the agent on the hosts.
    #[arg(long, value_name = "COMMAND", requires = "hosts", default_value = "posthaste agent")]
    agent: String,
    /// The interface of this host, by name or address, at which the others reach it.
    #[arg(long, value_name = "INTERFACE", requires = "hosts")]
    interface: Option<String>,
    /// Set a variable in the environment of all ranks; without a value, to that of this program. May be given several times.
    #[arg(long = "env", value_name = "NAME[=VALUE]")]
    variables: Vec<String>,
    /// Pin each rank to one core.
    #[arg(long)]
    bind: bool,
    /// Put `[rank] ` before each line of output.
    #[arg(long)]
    label: bool,
    /// Let the other ranks go on when one fails.
    #[arg(long)]
    keep_going: bool,
    /// Start a rank that fails again under its number and on its host, up to so many times.
    #[arg(long, value_name = "TIMES", default_value_t = 0)]
    restart: u32,
    /// The program, looked for in PATH unless it contains a slash, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// Over shared memory on one node, over sockets else.
    Auto,
    /// Over shared memory only.
    Shm,
    /// Over sockets only.
    Tcp,
}

impl Device {
    /// The value of `POSTHASTE_DEVICE`.
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// Exit code for what the caller has to correct.
const USAGE: i32 = 2;

/// Starts the ranks and waits for them; returns the exit code: that of the first failure, 128 + n for signal n, 126
/// for a program that cannot be run, 127 for one that is not there, or that a listed host cannot run, and 255 for a lost host.
pub fn main(args: &Args) -> i32 {
    let Some((program, arguments)) = args.command.split_first() else { return USAGE };
    if let Some(option) = program.to_str().filter(|program| program.starts_with('-')) {
        complain(format_args!(
            "there is no option {option}; `posthaste run --help` lists them, and a program of that name is started as ./{option}"
        ));
        return USAGE;
    }
    if args.device == Some(Device::Shm) && args.nodes > 1 {
        complain(format_args!(
            "--device shm reaches no rank of another node, and --nodes {} makes several: leave one of the two out",
            args.nodes
        ));
        return USAGE;
    }
    if args.device == Some(Device::Shm) && args.restart > 0 {
        complain(
            "a rank that is started again is reached over sockets: leave --device shm out, or --restart",
        );
        return USAGE;
    }
    let hosts = match args.hosts.as_ref().map(|_| args.listed()).transpose() {
        Ok(hosts) => hosts,
        Err(error) => return fail(&error, USAGE),
    };
    let ranks = args.ranks.or(hosts.as_ref().map(Hosts::slots)).unwrap_or(1);
    if !(1..=4096).contains(&ranks) {
        complain(format!(
            "a job has 1 to 4096 ranks, and the hosts of the list have {ranks} slots: choose with -n"
        ));
        return USAGE;
    }
    let launch = match prepare(Launch::program(program), ranks, args.clients, args.contexts) {
        Ok(launch) => launch,
        Err(error) => return fail(&error, USAGE),
    };
    let launch = match args.device {
        Some(device) => launch.env("POSTHASTE_DEVICE", device.name()).tcp(device == Device::Tcp),
        None => launch,
    };
    let variables = match args.variables() {
        Ok(variables) => variables,
        Err(error) => {
            complain(error);
            return USAGE;
        }
    };
    let launch = variables.into_iter().fold(launch, |launch, (name, value)| launch.env(name, value));
    let launch = launch
        .nodes(args.nodes)
        .args(arguments)
        .bind(args.bind)
        .label(args.label)
        .keep_going(args.keep_going)
        .restart(args.restart)
        .forward_signals(true);
    let outcome: Result<JobOutcome, LaunchError> = match &hosts {
        Some(hosts) => launch.run_on(hosts),
        None => launch.spawn().map(|job| job.wait()),
    };
    match outcome {
        Ok(outcome) => {
            if !outcome.success() {
                complain(outcome.to_string());
            }
            outcome.exit_code()
        }
        Err(error) => {
            let code = code_of(&error);
            fail(&error, code)
        }
    }
}

impl Args {
    /// The variables that the ranks are to have, or what is wrong with one.
    fn variables(&self) -> Result<Vec<(String, OsString)>, String> {
        let variable = |given: &String| -> Result<(String, OsString), String> {
            let (name, value) = match given.split_once('=') {
                Some((name, value)) => (name, Some(value.into())),
                None => (&given[..], std::env::var_os(given)),
            };
            if name.is_empty() {
                return Err(format!("--env {given} names no variable: NAME or NAME=VALUE"));
            }
            if name.starts_with("POSTHASTE_") {
                return Err(format!(
                    "--env {given}: the ranks have the settings of this program: {name}=VALUE posthaste run ..."
                ));
            }
            let value = value.ok_or_else(|| {
                format!("--env {given}: there is no such variable here; {name}=VALUE gives it a value")
            })?;
            Ok((name.to_owned(), value))
        };
        self.variables.iter().map(variable).collect()
    }

    /// The hosts to run on.
    fn listed(&self) -> Result<Hosts, LaunchError> {
        let hosts = Hosts::read(self.hosts.as_deref().unwrap_or("".as_ref()))?;
        let mut hosts = hosts.agent(self.agent.split_ascii_whitespace());
        if let Some(command) = &self.ssh {
            hosts = hosts.remote_shell(command.split_ascii_whitespace());
        }
        if let Some(interface) = &self.interface {
            hosts = hosts.interface(interface);
        }
        Ok(hosts)
    }
}

fn code_of(error: &LaunchError) -> i32 {
    match error {
        LaunchError::Spawn { source, .. } => match source.kind() {
            ErrorKind::NotFound => 127,
            // It is there, and no program, or may not be run.
            ErrorKind::PermissionDenied | ErrorKind::NotADirectory => 126,
            _ if source.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => 126,
            _ => 1,
        },
        LaunchError::Invalid(_) | LaunchError::Env(_) => USAGE,
        _ => 1,
    }
}

/// Prints an error with its causes in one line. Errors of the library tell their causes themselves.
pub fn fail(error: &dyn Error, code: i32) -> i32 {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    complain(line);
    code
}
