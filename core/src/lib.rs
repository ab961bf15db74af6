//! The core of Posthaste: vocabulary, the component traits, and the progress engine.
//!
//! Four components, each a trait (D01): a [`Device`] moves bytes to peers it reaches, a [`Protocol`] gives messages
//! their meaning, a [`Messager`] owns the devices and contexts of one client, and a [`Sysdep`] is the kernel.
//! Descriptors are the one currency between them. See ARCHITECTURE.md for the data flow.

#![deny(unsafe_code)]

pub mod blackboard;
pub mod body;
pub mod budget;
pub mod caps;
pub mod context;
pub mod control;
pub mod count;
pub mod descriptor;
pub mod device;
pub mod engine;
pub mod error;
pub mod exposed;
pub mod failpoint;
pub mod fifo;
pub mod heap;
pub mod ids;
pub mod inprocess;
mod lease;
pub mod memory;
pub mod messager;
pub mod passage;
pub mod protocol;
#[cfg(unix)]
pub mod reactor;
pub mod route;
mod row;
pub mod slot;
pub mod stats;
pub mod sync;
pub mod sysdep;
pub mod timer;
pub mod token;
pub mod wire;

pub use caps::Caps;
pub use context::{Context, Driver, Face, Handle};
pub use descriptor::{Descriptor, MAX_INFO};
pub use device::{Device, Lease, Loan, Port};
pub use engine::{Engine, Payload, Scope};
pub use error::{
    CallError, Collective, DeviceError, Fault, LossCause, MemoryError, RegisterError, RmaError, SendError,
    TrySendError,
};
pub use fifo::InjectionFifo;
pub use ids::{
    ClientId, ConnectionId, ContextId, ControlId, Endpoint, JobShape, PatternId, ProtocolId, Rank, RegionId,
    WindowId,
};
pub use messager::{Client, Messager};
pub use protocol::{Flow, Protocol};
pub use slot::{Ticket, Value};
pub use stats::Stats;
pub use sysdep::{LinuxSysdep, Personality, Sysdep};
