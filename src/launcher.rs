//! Starting ranks from a program: what `join_or_local`, the command line and tests stand on.

use crate::error::JoinError;
use crate::place::{layout_of, sizes_of};
use posthaste_core::JobShape;
pub use posthaste_launch::{
    Cause, Failure, JobOutcome, Launch, LaunchError, Output, RankEnd, RunningJob, Settings, Signal,
};

/// A launch of `ranks` ranks of the current program with its own arguments, with an arena of the right size for the
/// settings in the environment.
///
/// # Errors
/// If a `POSTHASTE_` setting is wrong, or there is no arena for a job of that shape.
pub fn current_program(ranks: u32) -> Result<Launch, JoinError> {
    prepare(Launch::current_program(), ranks, 1, 1)
}

/// A launch of another program.
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

/// Gives a launch its shape and an arena of the size that the shape needs.
///
/// # Errors
/// If a `POSTHASTE_` setting is wrong, or there is no arena for a job of that shape.
pub fn prepare(launch: Launch, ranks: u32, clients: u16, contexts: u16) -> Result<Launch, JoinError> {
    prepare_with(launch, JobShape { ranks, clients, contexts }, &Settings::from_process()?)
}

/// As [`prepare`], for settings that differ from the environment's (and that the caller sets in the launch).
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
