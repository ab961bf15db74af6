//! The protocols of Posthaste, over any device: active messages in all their deliveries, requests and replies,
//! puts and gets on windows and regions, recorded patterns, and the collective exchange beneath windows and barriers.
//!
//! Messages, services, controls, multicasts, replays and waits are generic over the [`Face`](posthaste_core::Face) of a context: a
//! `Handle` that works from anywhere, or an owned `Context` that pays for no lock. Windows, regions, groups, many-to-many and FIFOs
//! go by a handle, which gets on while the owner of its context drives ([`Drive`](posthaste_core::context::Drive)).

#![forbid(unsafe_code)]

pub mod buffer;
mod cause;
pub mod codec;
pub mod collective;
pub mod control;
pub mod counter;
pub mod datatype;
mod detach;
mod ends;
pub mod exchange;
pub mod fifo;
#[cfg(test)]
mod fixture;
pub mod flush;
pub mod group;
pub mod handler;
pub mod message;
pub mod multisend;
pub mod namespace;
mod nearest;
mod operation;
pub mod pattern;
pub mod persistent;
pub mod pulse;
pub mod send;
pub mod service;
pub mod stream;
pub mod typed;
pub mod window;
pub mod within;

pub use buffer::Buffer;
pub use collective::{Algorithm, BadMembers, CollectiveError, InFlight, Reduce};
pub use control::Control;
pub use counter::Counter;
pub use datatype::{Datatype, Layout, LayoutAccess};
pub use exchange::Exchange;
pub use fifo::Fifo;
pub use group::{Collectives, Group};
pub use handler::{ActiveMessage, Fill, First};
pub use message::{Message, OwnedMessage};
pub use multisend::{Connection, ConnectionManager, ManyToMany, Multisend, MultisendError, Part, Received};
pub use namespace::Namespace;
pub use pattern::{Pattern, Recorder, Replay};
pub use persistent::Persistent;
pub use pulse::{Liveness, Pulse};
pub use send::{SendMessage, SendSlice, SendSliceWith};
pub use service::{Call, Service, ServiceOptions};
pub use stream::MessageStream;
pub use typed::{EncodedMessage, TypedMessage};
pub use window::{
    AtomicFetch, AtomicUpdate, Element, FetchEach, Get, GetInto, GetTo, GetTyped, One, OwnedRegion, Put,
    PutCopy, PutElement, PutSignal, PutSlice, PutTyped, Region, RegionKey, RegionSlice, RemoteRegion, Signal,
    UpdateEach, Window, Word, WordIndex, WordUpdate, Words,
};
pub use within::{Within, within};
