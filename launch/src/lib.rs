//! Starts, equips and supervises the ranks of a Posthaste job, and reads in a rank what it was given.
//!
//! ```text
//!  launcher process                                    rank r
//!  ┌────────────────────────────────┐   environment    ┌───────────────────────────────┐
//!  │ Launch ── HostFds (arena,bells)│ ───────────────▶ │ JobEnv::from_process          │
//!  │   │                            │   descriptors    │ InheritedFds::adopt           │
//!  │   ├─ supervisor thread ────────│ ───────────────▶ │   arena, own bell, ring of n  │
//!  │   └─ Broker (abstract socket)  │ ◀── key proof ── │ fetch_from_broker             │
//!  └────────────────────────────────┘ ─── SCM_RIGHTS ▶ └───────────────────────────────┘
//! ```
//!
//! A **doorbell** is a pipe. Its rank holds the only read end, every rank holds the write end; so the kernel itself tells
//! all peers of a death (`POLLERR` on the write end), provided that nobody else keeps the read end. The launcher
//! therefore gives up its copy as soon as the rank has it.
//!
//! Ranks of one **node** share an arena and ring each other's doorbells. A host is a node, unless [`Launch::nodes`] makes
//! several of one, and [`Launch::run_on`] takes as many hosts as a list names. Ranks of different nodes find each other
//! at a [`Rendezvous`], which the launcher serves, or at whatever [`Meeting`] the launcher of somebody else offers.
//!
//! ```no_run
//! use posthaste_launch::Launch;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let job = Launch::program("./halo").ranks(4).arena_bytes(64 << 20).label(true).spawn()?;
//! let outcome = job.wait();
//! println!("{outcome}");
//! std::process::exit(outcome.exit_code());
//! # }
//! ```
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod adopt;
mod arena;
mod bounded_log;
mod broker;
mod broker_client;
#[allow(unsafe_code)]
mod child;
mod env;
mod error;
mod falls;
mod fds;
mod foreign;
mod frame;
mod host_broker;
mod hosts;
mod inherited;
mod interface;
mod job;
mod key;
mod key_file;
#[allow(unsafe_code)]
mod lifeline;
mod meeting;
mod outcome;
mod output;
mod placement;
mod rendezvous;
mod settings;
mod shown;
mod signals;
mod spawn;
mod supervisor;
mod values;
mod vars;
mod watch;

pub use arena::ArenaKind;
pub use broker_client::fetch_from_broker;
pub use env::{FdNumbers, JobEnv, LifelineFd, LooseEnv, MAX_RANKS};
pub use error::{AdoptError, BrokerError, EnvError, HostFdsError, LaunchError};
pub use fds::HostFds;
pub use foreign::{Appointment, Detected, Foreign, ForeignError, detect};
pub use host_broker::{HostBroker, host_identity};
pub use hosts::{Hosts, REMOTE_SHELL, run_agent};
pub use inherited::InheritedFds;
pub use interface::{InterfaceError, address_facing, address_of};
pub use job::RunningJob;
pub use key::{JobId, JobKey};
pub use meeting::{Meeting, MeetingError};
pub use outcome::{Cause, Failure, JobOutcome, RankEnd};
pub use output::Output;
pub use placement::Part;
pub use rendezvous::{
    Bulletin, Duty, NotServed, Notice, Rendezvous, RendezvousClient, Succession, Whereabout, Whereabouts,
    loopback,
};
/// A signal, as [`RunningJob::signal`] takes it.
pub use rustix::process::Signal;
pub use settings::{DeviceChoice, Driver, Settings, TcpMode};
pub use signals::{is_ignored, remember_children};
pub use spawn::Launch;
