//! The mechanisms again, between ranks that reach each other over sockets only.

#[path = "../support/mod.rs"]
mod support;

const TRANSPORT: support::Transport = support::Transport::Tcp;

#[path = "../mechanisms/atomics.rs"]
mod atomics;
#[path = "../mechanisms/calls.rs"]
mod calls;
#[path = "../mechanisms/collectives.rs"]
mod collectives;
#[path = "../mechanisms/collectives2.rs"]
mod collectives2;
#[path = "../mechanisms/components.rs"]
mod components;
#[path = "../mechanisms/contexts.rs"]
mod contexts;
#[path = "../mechanisms/datatypes.rs"]
mod datatypes;
#[path = "../mechanisms/errors.rs"]
mod errors;
#[path = "../mechanisms/fifos.rs"]
mod fifos;
#[path = "../mechanisms/memory.rs"]
mod memory;
#[path = "../mechanisms/multisend.rs"]
mod multisend;
#[path = "../mechanisms/order.rs"]
mod order;
#[path = "../mechanisms/recorded.rs"]
mod recorded;
#[path = "../mechanisms/reductions.rs"]
mod reductions;
#[path = "../mechanisms/replay.rs"]
mod replay;
#[path = "../mechanisms/sends.rs"]
mod sends;
#[path = "../mechanisms/shims.rs"]
mod shims;
#[path = "../mechanisms/streams.rs"]
mod streams;
#[path = "../mechanisms/windows.rs"]
mod windows;
