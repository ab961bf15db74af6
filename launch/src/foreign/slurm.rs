//! Tasks of a Slurm step, started by `srun` without a key-value space (`--mpi=none`).
//!
//! | variable | value |
//! |---|---|
//! | `SLURM_STEP_ID` | shows that this is a task of a step; batch scripts and shells in an allocation are none |
//! | `SLURM_PROCID` | the rank |
//! | `SLURM_STEP_NUM_TASKS`, else `SLURM_NTASKS` | the number of ranks |
//! | `SLURM_STEP_NODELIST` | the nodes, of which the first runs rank 0 |
//! | `SLURM_STEP_RESV_PORTS` | ports that Slurm reserved for the step; the ranks meet at the first |
//! | `SLURM_JOB_ID` | without reserved ports: they meet at 15000 + (16 × job + step) mod 15000 |
//!
//! Ranks of one node meet over the loopback device. `POSTHASTE_RENDEZVOUS` names another place.

use super::Appointment;
use super::error::ForeignError;
use super::hostlist::first_host;
use super::torchrun::overridden;
use super::values::{Env, Reader, decimal, host_port};

const LAUNCHER: &str = "Slurm";
const STEP: &str = "SLURM_STEP_ID";
const RANK: &str = "SLURM_PROCID";
const SIZE: &str = "SLURM_STEP_NUM_TASKS";
const SIZE_OF_JOB: &str = "SLURM_NTASKS";
const NODES: &str = "SLURM_STEP_NODELIST";
const NODE_COUNT: &str = "SLURM_STEP_NUM_NODES";
const DISTRIBUTION: &str = "SLURM_DISTRIBUTION";
const PORTS: &str = "SLURM_STEP_RESV_PORTS";
const JOB: &str = "SLURM_JOB_ID";

/// From here on steps are none of tasks: the shell of an allocation, its batch script, a container's prolog (`slurm/slurm.h`).
const NO_STEPS: u32 = 0xffff_fff0;
/// Below the ports that kernels give out by themselves, and above those of well-known services.
const FIRST_PORT: u64 = 15_000;
const PORT_COUNT: u64 = 15_000;

pub(super) fn detect(env: Env<'_>) -> Result<Option<Appointment>, ForeignError> {
    let remedy = "start the program with srun, which sets both, or unset SLURM_STEP_ID to run without a job";
    let reader = Reader { env, launcher: LAUNCHER, remedy };
    let Some(present) = reader.first_set(&[STEP]) else { return Ok(None) };
    if reader.get(STEP).and_then(|step| step.parse::<u32>().ok()).is_some_and(|step| step >= NO_STEPS) {
        return Ok(None);
    }
    let size_name = if reader.is_set(SIZE) || !reader.is_set(SIZE_OF_JOB) { SIZE } else { SIZE_OF_JOB };
    let claim = reader.claim(RANK, size_name, &present)?;
    let place = match overridden(&reader)? {
        Some(place) => place,
        None => host_port(&host(&reader, &present)?, port(&reader, &present)?),
    };
    Ok(Some(Appointment::new(LAUNCHER, claim, place)))
}

fn host(reader: &Reader<'_>, present: &str) -> Result<String, ForeignError> {
    let nodes = reader.get(NODES).ok_or_else(|| reader.partial(present, NODES))?;
    let first = first_host(&nodes)
        .ok_or_else(|| reader.invalid(NODES, &nodes, "a list of hosts such as `node[1-3,7],login`"))?;
    if reader.number(NODE_COUNT, 1, u64::from(u32::MAX), "the number of nodes")? == Some(1) {
        return Ok("127.0.0.1".into());
    }
    if reader.get(DISTRIBUTION).is_some_and(|how| how.contains("arbitrary")) {
        return Err(ForeignError::NoPlace {
            launcher: LAUNCHER,
            problem:
                "with --distribution=arbitrary rank 0 may run on any node; choose another distribution, \
                      or set POSTHASTE_RENDEZVOUS to rank 0's host and a free port"
                    .into(),
        });
    }
    Ok(first)
}

fn port(reader: &Reader<'_>, present: &str) -> Result<u16, ForeignError> {
    if let Some(ports) = reader.get(PORTS) {
        let first = ports.split(['-', ',']).next().and_then(decimal);
        return first
            .and_then(|port| u16::try_from(port).ok())
            .filter(|port| *port != 0)
            .ok_or_else(|| reader.invalid(PORTS, &ports, "ports such as `12000-12003`"));
    }
    let id = |name| {
        let number = reader.number(name, 0, u64::from(u32::MAX), "a number below 2^32, set by Slurm")?;
        number.ok_or_else(|| reader.partial(present, name))
    };
    Ok((FIRST_PORT + (16 * id(JOB)? + id(STEP)?) % PORT_COUNT) as u16)
}
