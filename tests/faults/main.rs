//! Each fault that is promised to be survived, caused between real processes.
//!
//! Over shared memory ranks are killed as often as is promised: 200 times at random, all of them 50 times, one 1,000 times
//! with a successor; over sockets a tenth of that, unless `POSTHASTE_TEST_SOAK=1` (`.ci/run --soak`) asks for all. With
//! `--nocapture` the tests print how long it took to notice. What chance decided is printed as a seed, and
//! `POSTHASTE_TEST_SEED=n` repeats it.

#[path = "../support/mod.rs"]
mod support;

mod callbacks;
mod cgroup;
mod clients;
mod clocks;
mod collectives;
mod devices;
mod futures;
mod groups;
mod hostile;
mod hostile_sockets;
mod killed;
mod leaving;
mod limits;
mod listening;
mod near_clients;
mod processes;
mod rendezvous;
mod replays;
mod restarted;
mod sockets;
mod stopped;
mod unmet;
mod windows;

use support::cases::{self, EVERY_WAY, EVERYWHERE, Setting};

fn main() -> std::process::ExitCode {
    cases::main(&[
        ("callbacks", EVERYWHERE),
        ("cgroup", &[Setting::Shm]),
        ("clients", EVERY_WAY),
        ("clocks", &[Setting::Shm, Setting::Tcp]),
        ("collectives", EVERYWHERE),
        ("devices", &[Setting::Nodes]),
        ("futures", EVERYWHERE),
        ("groups", EVERY_WAY),
        ("hostile", &[Setting::Shm]),
        ("hostile_sockets", &[Setting::Tcp]),
        ("killed", EVERY_WAY),
        ("leaving", EVERYWHERE),
        ("limits", &[Setting::Shm, Setting::Tcp]),
        ("listening", &[Setting::Tcp]),
        ("near_clients", &[Setting::Shm]),
        ("processes", EVERY_WAY),
        ("rendezvous", EVERY_WAY),
        ("replays", EVERY_WAY),
        ("restarted", EVERY_WAY),
        ("stopped", EVERYWHERE),
        ("unmet", &[Setting::Tcp]),
        ("windows", EVERYWHERE),
    ])
}
