//! Collective operations, in layers each of which can be replaced: a language adaptor calls the operations of a
//! [`Group`](crate::Group) (`api`), which start an operation (`executor`, `run`); an [`Executor`] decides when which message of
//! the program goes out and is taken in that a [`Schedule`] gives. The library's own executor is part of `run`.
//!
//! ```text
//!   Group::all_reduce --> Call --> Hub::start --> Run: what is ready is sent      tag: group, operation, phase, call
//!                                    ^  |
//!      on_message of a part ---------+  +--> InFlight, a completion slot
//! ```
//! The executor is a state machine that the handlers of parts drive inside `advance`: an operation needs no task, and one
//! of a word costs no more messages than its schedule has.

mod algorithm;
mod api;
mod arrival;
mod buffers;
mod call;
mod execution;
mod executor;
mod flat;
mod foreign;
mod group_state;
mod layout;
mod lend;
mod membership;
mod near;
mod outlet;
mod part;
mod patience;
mod plan;
mod progress;
mod records;
mod reduce;
mod run;
mod schedule;
#[cfg(test)]
mod simulation;
mod spec;
mod stage;
mod staged;
mod state;
mod trouble;
mod unboarded;
pub(crate) mod wire;

pub use algorithm::Algorithm;
pub(crate) use call::check_members;
pub use call::{BadMembers, CollectiveError, InFlight};
pub use execution::{Execution, Executor, PhaseByPhase, Step, Turn};
pub use reduce::{Arithmetic, Bits, Datum, Located, Reduce};
pub use schedule::{Action, Blocks, Kind, Phase, Place, Program, Route, Schedule, Source, Transfer};

pub(crate) use executor::Hub;
pub(crate) use group_state::{Choice, Membership};
pub(crate) use near::{GroupBoard, MOST_NEAR};
pub(crate) use wire::Origin;
