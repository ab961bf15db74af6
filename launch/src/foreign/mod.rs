//! Jobs that another launcher started.
//!
//! | launcher | known by | the ranks meet |
//! |---|---|---|
//! | torchrun's agent | `TORCHELASTIC_RUN_ID` and `RANK`, … | as with torchrun's variables, below |
//! | Open MPI and PMIx launchers | `PMIX_NAMESPACE`, `PMIX_RANK`, `OMPI_COMM_WORLD_RANK` | in its key-value space |
//! | MPICH and PMI-1 launchers | `PMI_FD` or `PMI_PORT` | in its key-value space |
//! | Slurm | `SLURM_STEP_ID` | at a port of the step's first node |
//! | Kubernetes | `JOB_COMPLETION_INDEX` | at index 0's name under the headless service |
//! | torchrun's variables | `RANK` or `WORLD_SIZE` with another of the four | at the port after `MASTER_PORT` |
//!
//! The first that is known counts, in this order. Where PMIx and PMI-1 are both there, one launcher was started in the
//! other; if one of them is Slurm, the other counts, else it is an error. What shows a launcher and is not complete is an error and never
//! passed over: a rank must not believe that it is alone, nor that it is another.

mod claim;
mod error;
mod hostlist;
mod kubernetes;
mod pmi1;
mod pmi1_wire;
#[allow(unsafe_code)]
mod pmix;
mod pmix_meeting;
mod slurm;
mod torchrun;
mod values;

use std::time::Instant;

use crate::meeting::{Meeting, MeetingError};

pub use error::ForeignError;
use values::{Claim, Env};

/// How the ranks of another launcher's job meet.
pub enum Foreign {
    /// In the launcher's own key-value space, which only the job's processes and their user can read.
    KeyValue(Box<dyn Meeting>),
    /// At a place where rank 0 serves; it proves the job's key to the others, and they to it.
    Rendezvous(Appointment),
}

/// Where ranks meet whose launcher offers them nothing but numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Appointment {
    /// The launcher, for messages.
    pub launcher: &'static str,
    /// This rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// `host:port` where rank 0 serves and the others come; the host is a name or an address, IPv6 in brackets.
    ///
    /// Rank 0's own resolver may take the name for a loopback address: so unless the host *is* a loopback address,
    /// rank 0 listens on all interfaces.
    pub place: String,
    /// Whether this rank serves, as rank 0 does.
    pub serve: bool,
}

impl Appointment {
    fn new(launcher: &'static str, claim: Claim, place: String) -> Self {
        Self { launcher, rank: claim.rank, size: claim.size, place, serve: claim.rank == 0 }
    }
}

/// A launcher that the environment shows, not yet spoken to.
#[derive(Debug)]
pub struct Detected(Door);

/// What has to be done to get there.
#[derive(Debug)]
enum Door {
    Pmix(pmix_meeting::Told),
    Pmi1(pmi1::Door),
    Known(Appointment),
    Pod { claim: Claim, hostname: String },
}

/// Finds the launcher that started this process, from variables only; `env` looks one up.
///
/// None if there is none: no launcher, a batch script or a shell in an allocation of Slurm, or nothing but names that
/// mean many things, such as `RANK` alone.
///
/// # Errors
/// Variables are missing that the others call for, have values they cannot have, or contradict each other.
pub fn detect(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<Detected>, ForeignError> {
    if let Some(appointment) = torchrun::detect_worker(env)? {
        return Ok(Some(Detected(Door::Known(appointment))));
    }
    let door = match (pmix_meeting::detect(env)?, pmi1::detect(env)?) {
        (Some(pmix), Some(pmi1)) => Some(inner(pmix, pmi1)?),
        (Some(pmix), None) => Some(Door::Pmix(pmix)),
        (None, Some(pmi1)) => Some(Door::Pmi1(pmi1)),
        (None, None) => with_appointment(env)?,
    };
    if door.is_none() {
        pmi1::detect_without_door(env)?;
    }
    Ok(door.map(Detected))
}

/// The launchers that leave meeting to the ranks.
fn with_appointment(env: Env<'_>) -> Result<Option<Door>, ForeignError> {
    let door = match slurm::detect(env)? {
        Some(appointment) => Some(Door::Known(appointment)),
        None => kubernetes::detect(env)?.map(|found| match found {
            kubernetes::Found::Place(appointment) => Door::Known(appointment),
            kubernetes::Found::Pod { claim, hostname } => Door::Pod { claim, hostname },
        }),
    };
    let Some(door) = door else { return Ok(torchrun::detect(env)?.map(Door::Known)) };
    // Scripts derive torchrun's variables from the launcher's; other numbers are those of somebody else.
    match (door.claim(), torchrun::claim(env)) {
        (Some(own), Some(other)) if own != other => {
            Err(contradiction(door.launcher(), own, torchrun::LAUNCHER, other))
        }
        _ => Ok(Some(door)),
    }
}

/// Of two launchers with key-value spaces, the one that was started by the other. Only if one of the two is Slurm can
/// that be told: a task of it may well be another launcher, or a part of one on its node.
fn inner(pmix: pmix_meeting::Told, pmi1: pmi1::Door) -> Result<Door, ForeignError> {
    match (pmix.of_slurm(), pmi1.of_slurm()) {
        (true, false) => Ok(Door::Pmi1(pmi1)),
        (false, true) => Ok(Door::Pmix(pmix)),
        _ => Err(ForeignError::Contradiction {
            first: match pmix.size {
                Some(size) => format!("the PMIX_ variables say rank {} of {size}", pmix.rank),
                None => format!("the PMIX_ variables say rank {}", pmix.rank),
            },
            second: match pmi1.claim() {
                Some(other) => format!("the PMI_ variables say rank {} of {}", other.rank, other.size),
                None => "PMI_PORT names another launcher".to_owned(),
            },
        }),
    }
}

fn contradiction(first: &str, own: Claim, second: &str, other: Claim) -> ForeignError {
    let said =
        |who, claim: Claim| format!("the variables of {who} say rank {} of {}", claim.rank, claim.size);
    ForeignError::Contradiction { first: said(first, own), second: said(second, other) }
}

impl Door {
    fn launcher(&self) -> &'static str {
        match self {
            Self::Pmix(_) => pmix_meeting::LAUNCHER,
            Self::Pmi1(_) => pmi1::LAUNCHER,
            Self::Known(appointment) => appointment.launcher,
            Self::Pod { .. } => kubernetes::LAUNCHER,
        }
    }

    /// What the launcher's variables say, where it leaves meeting to the ranks.
    fn claim(&self) -> Option<Claim> {
        match self {
            Self::Pmix(_) | Self::Pmi1(_) => None,
            Self::Known(appointment) => Some(Claim { rank: appointment.rank, size: appointment.size }),
            Self::Pod { claim, .. } => Some(*claim),
        }
    }
}

impl Detected {
    /// The launcher's name, for messages.
    pub fn launcher(&self) -> &'static str {
        self.0.launcher()
    }

    /// Takes this process's place in the launcher's job; once per process. Blocks, at most until the deadline but for
    /// the resolver of names.
    ///
    /// The meeting says farewell to the launcher when it is dropped, without which the launcher takes the end of this
    /// process for a crash.
    ///
    /// # Errors
    /// The launcher cannot be reached, knows this process as another, or breaks its own rules.
    pub fn connect(self, deadline: Instant) -> Result<Foreign, ForeignError> {
        Ok(match self.0 {
            Door::Pmix(told) => Foreign::KeyValue(Box::new(pmix_meeting::Pmix::connect(&told, deadline)?)),
            Door::Pmi1(door) => Foreign::KeyValue(Box::new(pmi1::Pmi1::connect(&door, deadline)?)),
            Door::Known(appointment) => Foreign::Rendezvous(appointment),
            Door::Pod { claim, hostname } => {
                let hosts = std::fs::read_to_string("/etc/hosts")
                    .map_err(|source| MeetingError::System { what: "read /etc/hosts", source })?;
                Foreign::Rendezvous(kubernetes::appointment(claim, &hostname, &hosts)?)
            }
        })
    }
}

impl std::fmt::Debug for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::KeyValue(meeting) => {
                write!(f, "KeyValue(rank {} of {})", meeting.rank(), meeting.size())
            }
            Self::Rendezvous(appointment) => f.debug_tuple("Rendezvous").field(appointment).finish(),
        }
    }
}
