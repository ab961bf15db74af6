//! What messagers say to each other besides users' messages: little-endian records with fixed layout, read from
//! private copies by `zerocopy`.

use crate::error::Fault;
use crate::ids::Rank;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of everything in this module and of the devices' record layouts.
pub const WIRE_VERSION: u16 = 1;

/// Protocol numbers below this belong to the messager.
pub const FIRST_USER: u16 = 16;
/// "What I call protocol N has this name, type and flow."
pub const DECLARE: u16 = 0;
/// Credit for a protocol.
pub const GRANT: u16 = 1;
/// The answer to a request; the cookie says which.
pub const REPLY: u16 = 2;
/// A request or a protocol was refused.
pub const REFUSE: u16 = 3;
/// A message longer than `max_eager` begins.
pub const STREAM_BEGIN: u16 = 4;
/// The next bytes of that message.
pub const STREAM_DATA: u16 = 5;
/// "Answer when you have handled everything before this."
pub const FLUSH: u16 = 6;
/// "I leave; nothing follows."
pub const GOODBYE: u16 = 7;
/// Bytes for the target's memory; the cookie is the place of the first one.
pub const PUT: u16 = 8;
/// So many [`PUT`]s have been handled, as the cookie says. Without a body all since the last such record are in memory;
/// otherwise it is why they are not, a number of [`code_of`] in two bytes.
pub const PUT_DONE: u16 = 9;
/// "Send me memory": the cookie is the place of the first byte, the body a length of 8 bytes.
pub const GET: u16 = 10;
/// The next bytes for the oldest [`GET`] that is not answered yet. If there is message info, there are none and will be
/// none for that one: it is why, a number of [`code_of`] in two bytes.
pub const GET_DATA: u16 = 11;

/// Body of [`DECLARE`]; the name follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Declare {
    /// Type hash.
    pub schema: U64,
    /// The sender's number of the protocol.
    pub index: U16,
    /// [`crate::protocol::Flow`].
    pub flow: u8,
    /// Always 0.
    pub reserved: u8,
}

/// Body of [`GRANT`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Grant {
    /// Payload bytes.
    pub bytes: U64,
    /// Messages.
    pub messages: U32,
    /// The protocol, as its sender counts it.
    pub index: U16,
    /// Always 0.
    pub reserved: U16,
}

/// Body of [`REFUSE`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refuse {
    /// The protocol, as its sender counts it.
    pub index: U16,
    /// Why: see [`code_of`].
    pub code: U16,
}

/// Body of [`STREAM_BEGIN`]; the message info travels as the packet's info.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct StreamBegin {
    /// Length of the message in bytes.
    pub total: U64,
    /// The message's own cookie.
    pub cookie: U64,
    /// The message's own protocol number.
    pub protocol: U16,
    /// Always 0.
    pub reserved: [u8; 6],
}

/// The number under which a fault travels.
#[must_use]
pub fn code_of(fault: Fault) -> u16 {
    match fault {
        Fault::NoSuchProtocol(_) => 1,
        Fault::SchemaMismatch(_) => 2,
        Fault::RemotePanicked(_) => 3,
        Fault::Busy(_) => 4,
        Fault::Undecodable(_) => 5,
        Fault::OutOfMemory(_) => 6,
        Fault::NoSuchMemory(_) => 7,
        _ => 0,
    }
}

/// The fault that a peer reports under a number; unknown numbers mean that the peer closes.
#[must_use]
pub fn fault_of(code: u16, peer: Rank) -> Fault {
    match code {
        1 => Fault::NoSuchProtocol(peer),
        2 => Fault::SchemaMismatch(peer),
        3 => Fault::RemotePanicked(peer),
        4 => Fault::Busy(peer),
        5 => Fault::Undecodable(peer),
        6 => Fault::OutOfMemory("on the peer"),
        7 => Fault::NoSuchMemory(peer),
        _ => Fault::PeerClosed(peer),
    }
}
