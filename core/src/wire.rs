//! What messagers say to each other besides users' messages: little-endian records with fixed layout, read from
//! private copies by `zerocopy`.

use crate::error::Fault;
use crate::ids::Rank;
use crate::memory::{AtomicOp, WordLen, WordOp};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of everything in this module and of the devices' record layouts.
pub const WIRE_VERSION: u16 = 1;

/// Protocol numbers below this belong to the messager.
pub const FIRST_USER: u16 = 16;
/// "What I call protocol N has this name, type and flow."
pub const DECLARE: u16 = 0;
/// Credit for a protocol, or a sender's word that it waits for some.
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
/// Bytes for the target's memory; the cookie is the place of the first one. With message info it is an atomic operation on a
/// word there, and the body has operand and expected value: see [`word_op`].
pub const PUT: u16 = 8;
/// So many [`PUT`]s have been handled, as the cookie says. Without a body all since the last such record are in memory;
/// otherwise it is why they are not, a number of [`code_of`] in two bytes.
pub const PUT_DONE: u16 = 9;
/// "Send me memory": the cookie is the place of the first byte, the body a length of 8 bytes. With message info it is an atomic
/// operation, as a [`PUT`] with one, and its old value is to be sent.
pub const GET: u16 = 10;
/// The next bytes for the oldest [`GET`] that is not answered yet. If there is message info, there are none and will be
/// none for that one: it is why, a number of [`code_of`] in two bytes.
pub const GET_DATA: u16 = 11;

/// An atomic operation as message info and body of a [`PUT`] or a [`GET`].
#[must_use]
pub fn from_word_op(op: &WordOp) -> ([u8; 2], [u8; 16]) {
    let mut body = [0; 16];
    body[..8].copy_from_slice(&op.operand.to_le_bytes());
    body[8..].copy_from_slice(&op.expected.to_le_bytes());
    ([op.op as u8, op.len.bytes() as u8], body)
}

/// The atomic operation of a [`PUT`] or a [`GET`] with message info; `None` if no correct peer sends that.
#[must_use]
pub fn word_op(info: &[u8], body: &[u8]) -> Option<WordOp> {
    let [op, len] = *<&[u8; 2]>::try_from(info).ok()?;
    let (operand, expected) = <&[u8; 16]>::try_from(body).ok()?.split_first_chunk::<8>()?;
    Some(WordOp {
        op: AtomicOp::from_number(op)?,
        len: WordLen::from_bytes(len.into())?,
        operand: u64::from_le_bytes(*operand),
        expected: u64::from_le_bytes(expected.try_into().ok()?),
    })
}

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
    /// 0. From the protocol's sender, who grants nothing: 1, it waits for credit, and is to be paid what it is owed.
    pub asks: U16,
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

/// A control: the cookie is its name's hash, the body its 16 bytes. In no order with other records.
pub const CONTROL: u16 = 12;

/// A message that wants to go straight to its place: as [`STREAM_BEGIN`].
pub const REQUEST_TO_SEND: u16 = 13;
/// The answer to that: the place, 8 bytes, to which the message is to be put; without a body it is to be streamed. With a
/// [`ClearAhead`] it answers no request that has come, but one of the next if that fits.
pub const CLEAR_TO_SEND: u16 = 14;
/// All of the message is at its place.
pub const SENT: u16 = 15;

/// Body of a [`CLEAR_TO_SEND`] that is ahead of its request: each is for one of the next messages that ask, in order. That one is
/// put there without another answer, if it is of that protocol and no longer; if it is not, nothing will be put there.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ClearAhead {
    /// The place of the first byte.
    pub place: U64,
    /// Length of the longest message that fits, in bytes.
    pub len: U64,
    /// The protocol, as the sender of the messages counts it.
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
        Fault::AnswerTooLong(_) => 8,
        Fault::Unencodable(_) => 9,
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
        8 => Fault::AnswerTooLong(peer),
        9 => Fault::Unencodable(peer),
        _ => Fault::PeerClosed(peer),
    }
}
