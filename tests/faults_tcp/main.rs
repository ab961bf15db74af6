//! The faults again, between ranks that reach each other over sockets only.

#[path = "../support/mod.rs"]
mod support;

const TRANSPORT: support::Transport = support::Transport::Tcp;

#[path = "../faults/callbacks.rs"]
mod callbacks;
#[path = "../faults/clients.rs"]
mod clients;
#[path = "../faults/clocks.rs"]
mod clocks;
#[path = "../faults/collectives.rs"]
mod collectives;
#[path = "../faults/futures.rs"]
mod futures;
#[path = "../faults/groups.rs"]
mod groups;
mod hostile;
#[path = "../faults/killed.rs"]
mod killed;
#[path = "../faults/leaving.rs"]
mod leaving;
#[path = "../faults/limits.rs"]
mod limits;
mod listening;
#[path = "../faults/processes.rs"]
mod processes;
#[path = "../faults/rendezvous.rs"]
mod rendezvous;
#[path = "../faults/replays.rs"]
mod replays;
#[path = "../faults/restarted.rs"]
mod restarted;
mod sockets;
#[path = "../faults/stopped.rs"]
mod stopped;
mod unmet;
#[path = "../faults/windows.rs"]
mod windows;
