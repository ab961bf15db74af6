//! Collective operations, in the layers of the Component Collective Messaging Interface: a language adaptor calls the
//! [`Group`](crate::Group) API, which starts an *executor* per operation, which runs a [`Schedule`], whose messages are
//! multisends.

mod algorithm;
mod layout;
mod plan;
mod reduce;
mod run;
mod schedule;
#[cfg(test)]
mod simulation;

pub use algorithm::Algorithm;
pub use reduce::{Arithmetic, Bits, Datum, Located, Reduce};
pub use schedule::{Action, Blocks, Kind, Phase, Place, Program, Route, Schedule, Source, Transfer};
