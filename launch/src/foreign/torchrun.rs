//! The variables of torchrun, which many other launchers and scripts set too.
//!
//! | variable | value |
//! |---|---|
//! | `RANK`, `WORLD_SIZE` | this rank, and the number of ranks |
//! | `MASTER_ADDR` | the host of rank 0 |
//! | `MASTER_PORT` | a port there, which is **not** used: the ranks meet at the one after it |
//!
//! `MASTER_PORT` is taken: torchrun's agent serves its store there, or rank 0 does so as soon as it makes a process
//! group. `POSTHASTE_RENDEZVOUS` names another place.
//!
//! All these names are common. `RANK` alone, `WORLD_SIZE` alone, or where a master would be, make no job; `RANK` or
//! `WORLD_SIZE` and any other of the four do, and then all four must be there.

use super::Appointment;
use super::error::ForeignError;
use super::values::{Claim, Env, Reader, host_port, is_host, split_host_port};

pub(super) const LAUNCHER: &str = "torchrun";
const RANK: &str = "RANK";
pub(super) const SIZE: &str = "WORLD_SIZE";
const HOST: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
/// Set by torchrun's agent for its workers, and by nothing else.
const AGENT: &str = "TORCHELASTIC_RUN_ID";
/// Where the ranks meet, whatever the launcher says.
const OVERRIDE: &str = "POSTHASTE_RENDEZVOUS";

/// A worker of torchrun's agent: that one is commonly started by another launcher, once per node, whose variables the
/// worker inherits and which know nothing of it.
pub(super) fn detect_worker(env: Env<'_>) -> Result<Option<Appointment>, ForeignError> {
    if reader(env).is_set(AGENT) { detect(env) } else { Ok(None) }
}

pub(super) fn detect(env: Env<'_>) -> Result<Option<Appointment>, ForeignError> {
    let reader = reader(env);
    let set = [RANK, SIZE, HOST, PORT].into_iter().filter(|name| reader.is_set(name)).count();
    let Some(present) = reader.first_set(&[RANK, SIZE]).filter(|_| set > 1) else { return Ok(None) };
    let claim = reader.claim(RANK, SIZE, &present)?;
    let place = match overridden(&reader)? {
        Some(place) => place,
        None => master(&reader, None)?.ok_or_else(|| reader.partial(&present, HOST))?,
    };
    Ok(Some(Appointment::new(LAUNCHER, claim, place)))
}

/// What these variables say about this process, if they say all that they should.
pub(super) fn claim(env: Env<'_>) -> Option<Claim> {
    reader(env).claim(RANK, SIZE, RANK).ok()
}

/// `POSTHASTE_RENDEZVOUS`, if it is set.
pub(super) fn overridden(reader: &Reader<'_>) -> Result<Option<String>, ForeignError> {
    let Some(place) = reader.get(OVERRIDE) else { return Ok(None) };
    match split_host_port(&place) {
        Some((host, port)) => Ok(Some(host_port(host, port))),
        None => Err(reader.invalid(
            OVERRIDE,
            &place,
            "a host, by name or address (IPv6 in brackets), a colon and a port",
        )),
    }
}

/// The port after the master's, on its host; `default` is the port if none is said. None if no host is said.
pub(super) fn master(reader: &Reader<'_>, default: Option<u16>) -> Result<Option<String>, ForeignError> {
    let Some(host) = reader.get(HOST) else { return Ok(None) };
    if !is_host(&host) {
        return Err(reader.invalid(HOST, &host, "the name or address of the host of rank 0"));
    }
    let expected = "a port from 1 to 65534: the ranks meet at the one after it";
    let port = match (reader.number(PORT, 1, 65534, expected)?, default) {
        (Some(port), _) => port as u16 + 1,
        (None, Some(default)) => default,
        (None, None) => return Err(reader.partial(&format!("{HOST}={host}"), PORT)),
    };
    Ok(Some(host_port(&host, port)))
}

fn reader(env: Env<'_>) -> Reader<'_> {
    let remedy = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank, or unset them all to run \
                  without a job";
    Reader { env, launcher: LAUNCHER, remedy }
}
