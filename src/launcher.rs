//! Starting ranks from a program: what `join_or_local`, the command line and tests stand on.

use crate::error::JoinError;
use crate::place::{layout_of, sizes_of};
use posthaste_core::JobShape;
pub use posthaste_launch::{
    BrokerError, Cause, EnvError, Failure, ForeignError, HostFdsError, Hosts, JobOutcome, Launch,
    LaunchError, MeetingError, Output, RankEnd, RunningJob, Settings, Signal,
};

/// A launch of `ranks` ranks of the current program with its own arguments, with an arena of the right size for the
/// settings in the environment. Of one client and one context each: [`prepare`] makes others.
///
/// # Errors
/// If a `POSTHASTE_` setting is wrong, or there is no arena for a job of that shape.
pub fn current_program(ranks: u32) -> Result<Launch, JoinError> {
    prepare(Launch::current_program(), ranks, 1, 1)
}

/// A launch of another program.
///
/// # Examples
/// ```
/// use posthaste::launcher;
/// let outcome = launcher::program("/bin/true", 2, 1, 1)?.spawn()?.wait();
/// assert!(outcome.success());
/// let outcome = launcher::program("/bin/false", 2, 1, 1)?.spawn()?.wait();
/// assert_eq!((outcome.exit_code(), outcome.ranks.len()), (1, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a `POSTHASTE_` setting is wrong, or there is no arena for a job of that shape.
pub fn program(
    path: impl AsRef<std::path::Path>,
    ranks: u32,
    clients: u16,
    contexts: u16,
) -> Result<Launch, JoinError> {
    prepare(Launch::program(path), ranks, clients, contexts)
}

/// Gives a launch its shape and an arena of the size that the shape needs. The shape is settled by that: do not change the
/// ranks, contexts or clients of the result.
///
/// # Examples
/// ```
/// use posthaste::launcher::{self, Launch, Output};
/// // Ranks with arguments and a variable of their own, whose output is kept.
/// let launch = Launch::program("/bin/sh").args(["-c", "echo $GREETING"]).env("GREETING", "hello");
/// let job = launcher::prepare(launch.stdout(Output::Capture), 2, 1, 1)?.spawn()?;
/// assert!(job.wait().success());
/// assert_eq!(job.output(1).0, b"hello\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a `POSTHASTE_` setting is wrong, or there is no arena for a job of that shape.
pub fn prepare(launch: Launch, ranks: u32, clients: u16, contexts: u16) -> Result<Launch, JoinError> {
    prepare_with(launch, JobShape { ranks, clients, contexts }, &Settings::from_process()?)
}

/// As [`prepare`], for settings that differ from the environment's (and that the caller sets in the launch).
///
/// # Examples
/// ```
/// use posthaste::launcher::{self, Launch, Settings};
/// use posthaste::JobShape;
/// // Two clients of three contexts for each of the four ranks.
/// let shape = JobShape { ranks: 4, clients: 2, contexts: 3 };
/// let launch = launcher::prepare_with(Launch::program("/bin/true"), shape, &Settings::from_process()?)?;
/// assert_eq!(launch.spawn()?.wait().ranks.len(), 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If there is no arena for a job of that shape.
pub fn prepare_with(launch: Launch, shape: JobShape, settings: &Settings) -> Result<Launch, JoinError> {
    let bytes = layout_of(shape, sizes_of(settings, shape))?.total();
    Ok(launch
        .ranks(shape.ranks)
        .clients(u32::from(shape.clients))
        .contexts(u32::from(shape.contexts))
        .arena_bytes(bytes))
}
