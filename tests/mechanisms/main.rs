//! A test for each mechanism, named after it, between real processes; and a test for each error that a user can
//! cause.

#[path = "../support/mod.rs"]
mod support;

mod atomics;
mod calls;
mod collectives;
mod collectives2;
mod components;
mod contexts;
mod datatypes;
mod early;
mod errors;
mod fifos;
mod memory;
mod multisend;
mod one_host;
mod order;
mod pages;
mod recorded;
mod reductions;
mod replay;
mod sends;
mod shims;
mod streams;
mod windows;

const TRANSPORT: support::Transport = support::Transport::Shm;
