//! The faults again, between ranks that reach each other over sockets only.

#[path = "../support/mod.rs"]
mod support;

const TRANSPORT: support::Transport = support::Transport::Tcp;

#[path = "../faults/callbacks.rs"]
mod callbacks;
#[path = "../faults/collectives.rs"]
mod collectives;
#[path = "../faults/futures.rs"]
mod futures;
#[path = "../faults/killed.rs"]
mod killed;
#[path = "../faults/leaving.rs"]
mod leaving;
#[path = "../faults/restarted.rs"]
mod restarted;
#[path = "../faults/stopped.rs"]
mod stopped;
mod unmet;
#[path = "../faults/windows.rs"]
mod windows;
