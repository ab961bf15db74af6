//! The faults again, between ranks on two nodes: over shared memory within, over sockets between them.

#[path = "../support/mod.rs"]
mod support;

const TRANSPORT: support::Transport = support::Transport::Nodes;

#[path = "../faults/callbacks.rs"]
mod callbacks;
#[path = "../faults/clients.rs"]
mod clients;
#[path = "../faults/collectives.rs"]
mod collectives;
mod devices;
#[path = "../faults/futures.rs"]
mod futures;
#[path = "../faults/groups.rs"]
mod groups;
#[path = "../faults/killed.rs"]
mod killed;
#[path = "../faults/leaving.rs"]
mod leaving;
#[path = "../faults/processes.rs"]
mod processes;
#[path = "../faults/rendezvous.rs"]
mod rendezvous;
#[path = "../faults/replays.rs"]
mod replays;
#[path = "../faults/restarted.rs"]
mod restarted;
#[path = "../faults/stopped.rs"]
mod stopped;
#[path = "../faults/windows.rs"]
mod windows;
