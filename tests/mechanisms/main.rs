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
mod levels;
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

use support::cases::{self, EVERY_WAY, EVERYWHERE, Setting};

fn main() -> std::process::ExitCode {
    cases::main(&[
        ("atomics", EVERYWHERE),
        ("calls", EVERYWHERE),
        ("collectives", EVERYWHERE),
        ("collectives2", EVERYWHERE),
        ("components", EVERY_WAY),
        ("contexts", EVERYWHERE),
        ("datatypes", EVERYWHERE),
        ("early", &[Setting::Shm]),
        ("errors", EVERYWHERE),
        ("fifos", EVERYWHERE),
        ("levels", &[Setting::Nodes]),
        ("memory", EVERYWHERE),
        ("multisend", EVERYWHERE),
        ("one_host", &[Setting::Shm]),
        ("order", EVERYWHERE),
        ("pages", &[Setting::Shm]),
        ("recorded", EVERYWHERE),
        ("reductions", EVERY_WAY),
        ("replay", EVERYWHERE),
        ("sends", EVERYWHERE),
        ("shims", EVERYWHERE),
        ("streams", EVERYWHERE),
        ("windows", EVERYWHERE),
    ])
}
