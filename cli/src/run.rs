//! `posthaste run`: starts a program as the ranks of a job on this host.

use clap::value_parser;
use posthaste::launcher::{Launch, LaunchError, prepare};
use std::error::Error;
use std::ffi::OsString;
use std::io::ErrorKind;

/// The arguments of `posthaste run`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of ranks.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = value_parser!(u32).range(1..=4096))]
    ranks: u32,
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
    /// Pin each rank to one core.
    #[arg(long)]
    bind: bool,
    /// Put `[rank] ` before each line of output.
    #[arg(long)]
    label: bool,
    /// Let the other ranks go on when one fails.
    #[arg(long)]
    keep_going: bool,
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
/// for a program that cannot be run, 127 for one that is not there.
pub fn main(args: &Args) -> i32 {
    let Some((program, arguments)) = args.command.split_first() else { return USAGE };
    if args.device == Some(Device::Shm) && args.nodes > 1 {
        eprintln!(
            "posthaste: --device shm reaches no rank of another node, and --nodes {} makes several: leave one of the two out",
            args.nodes
        );
        return USAGE;
    }
    let launch = prepare(Launch::program(program), args.ranks, args.clients, args.contexts);
    let launch = match launch {
        Ok(launch) => launch,
        Err(error) => return fail(&error, USAGE),
    };
    let launch = match args.device {
        Some(device) => launch.env("POSTHASTE_DEVICE", device.name()).tcp(device == Device::Tcp),
        None => launch,
    };
    let launch = launch
        .nodes(args.nodes)
        .args(arguments)
        .bind(args.bind)
        .label(args.label)
        .keep_going(args.keep_going)
        .forward_signals(true);
    match launch.spawn() {
        Ok(job) => {
            let outcome = job.wait();
            if !outcome.success() {
                eprintln!("posthaste: {outcome}");
            }
            outcome.exit_code()
        }
        Err(error) => {
            let code = code_of(&error);
            fail(&error, code)
        }
    }
}

fn code_of(error: &LaunchError) -> i32 {
    match error {
        LaunchError::Spawn { source, .. } => match source.kind() {
            ErrorKind::NotFound => 127,
            ErrorKind::PermissionDenied => 126,
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
    eprintln!("posthaste: {line}");
    code
}
