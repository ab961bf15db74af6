//! A job on several hosts: one launcher starts an agent on each, over ssh or something like it, and the agents start the
//! ranks.
//!
//! ```text
//!  head                                     each host
//!  ┌───────────────────────────┐   stdin    ┌─────────────────────────────────┐
//!  │ Launch::run_on(&Hosts)    │ ─ order ─▶ │ ssh HOST posthaste agent        │
//!  │   ├ Rendezvous            │ ─ signals ▶│   Launch::part (its arena)      │
//!  │   ├ a reader for each ────│ ◀─ stdout ─│   ├ rank: output, in frames     │
//!  │   └ the loop              │ ◀─ ends ───│   └ rank                        │
//!  └───────────────────────────┘            └─────────────────────────────────┘
//! ```
//!
//! The order (`order`) has the key in it, so that it goes to whoever has said that it is an agent of this version, and to
//! nobody's argument list or environment on the way. An agent whose standard input ends, ends its ranks.

mod agent;
mod file;
mod head;
mod link;
mod order;
mod wire;

pub use agent::run_agent;
pub use file::{Hosts, REMOTE_SHELL};
