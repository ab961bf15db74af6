//! Each fault that is promised to be survived, caused between real processes.
//!
//! `POSTHASTE_TEST_SOAK=1` kills at 200 random times instead of a few, and all ranks 50 times; with `--nocapture` the
//! tests print how long it took to notice. What chance decided is printed as a seed, and `POSTHASTE_TEST_SEED=n` repeats
//! it.

#[path = "../support/mod.rs"]
mod support;

mod callbacks;
mod cgroup;
mod clients;
mod clocks;
mod collectives;
mod futures;
mod groups;
mod hostile;
mod killed;
mod leaving;
mod limits;
mod processes;
mod rendezvous;
mod replays;
mod restarted;
mod stopped;
mod windows;

const TRANSPORT: support::Transport = support::Transport::Shm;
