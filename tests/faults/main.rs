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
mod futures;
mod groups;
mod hostile;
mod killed;
mod leaving;
mod limits;
mod near_clients;
mod processes;
mod rendezvous;
mod replays;
mod restarted;
mod stopped;
mod windows;

const TRANSPORT: support::Transport = support::Transport::Shm;
