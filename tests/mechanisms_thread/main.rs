//! The mechanisms again, and what faults have to do with the driver, where a thread of its own drives the contexts
//! (`POSTHASTE_DRIVER=thread`): the name of this test program ends in `_thread`.

#[path = "../support/mod.rs"]
mod support;

const TRANSPORT: support::Transport = support::Transport::Shm;

#[path = "../mechanisms/atomics.rs"]
mod atomics;
#[path = "../mechanisms/calls.rs"]
mod calls;
#[path = "../mechanisms/collectives.rs"]
mod collectives;
#[path = "../mechanisms/collectives2.rs"]
mod collectives2;
#[path = "../mechanisms/contexts.rs"]
mod contexts;
#[path = "../mechanisms/datatypes.rs"]
mod datatypes;
#[path = "../mechanisms/errors.rs"]
mod errors;
#[path = "../faults/callbacks.rs"]
mod fault_callbacks;
#[path = "../faults/collectives.rs"]
mod fault_collectives;
#[path = "../faults/futures.rs"]
mod fault_futures;
#[path = "../faults/leaving.rs"]
mod fault_leaving;
#[path = "../faults/stopped.rs"]
mod fault_stopped;
#[path = "../faults/windows.rs"]
mod fault_windows;
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
