//! What travels on a settled connection: frames with a fixed header, checked before anything is done with them.
//!
//! ```text
//!  byte 0          4       5       6          8                       16
//!      +----------+-------+-------+----------+-----------------------+------- ... ---+---- ... ----+
//!      | payload  | kind  | info  | protocol | word: cookie, offset  | message info  | payload     |
//!      | bytes    |       | bytes |          | or count              |               |             |
//!      +----------+-------+-------+----------+-----------------------+------- ... ---+---- ... ----+
//! ```
//! All numbers are little-endian. Kinds below [`CONTROL`] are messages, and the kind is the descriptor's.

use crate::config::Limits;
use posthaste_core::MAX_INFO;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the frames and of the handshake.
pub const VERSION: u16 = 3;
/// Length of a frame's header in bytes.
pub const HEADER: usize = size_of::<Header>();
/// Longest payload of a [`PUT`]; longer puts are several.
pub const MAX_PUT: u32 = 1 << 30;
/// Kinds from here on are the device's own.
pub const CONTROL: u8 = 0xf0;
/// Bytes for the target's memory; the word is the first byte's offset. In place of the protocol is how many puts of this
/// connection precede it of which the sender has not heard yet that they are done.
pub const PUT: u8 = 0xf1;
/// So many puts of this connection are done; the word counts them from the beginning.
pub const DONE: u8 = 0xf2;
/// "Send me memory": the word is the offset, the payload a length of 8 bytes.
pub const GET: u8 = 0xf3;
/// The answer to the oldest [`GET`] that is not answered yet; the word counts answers from 0.
pub const DATA: u8 = 0xf4;
/// Puts of this connection that name memory which the target has not got, and are done with: the word is the number of the
/// first one, counted from 0, the payload, of 8 bytes, how many. A [`DONE`] that counts them follows.
pub const ABSENT: u8 = 0xf6;
/// In place of [`DATA`]: that part of the get names memory which the target has not got.
pub const NONE: u8 = 0xf7;
/// "I leave": nothing but the end of the stream follows.
pub const LEAVE: u8 = 0xf5;

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Payload length in bytes.
    pub len: U32,
    /// What it is.
    pub kind: u8,
    /// Length of the message info in bytes.
    pub info: u8,
    /// The protocol, as the sender counts it. Of a [`PUT`] what it says there, and otherwise 0 if it is not a message.
    pub protocol: U16,
    /// Cookie of a message, offset in memory, or count.
    pub word: U64,
}

/// Why a frame cannot have been sent by a correct peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The kind is unknown.
    #[error("unknown frame kind {0:#x}")]
    Kind(u8),
    /// More message info than there can be, or info where none belongs.
    #[error("{0} bytes of message info")]
    Info(u8),
    /// More payload than this kind may have, or less.
    #[error("a payload of {0} bytes")]
    Length(u32),
    /// A field that must be zero is not.
    #[error("a reserved field is not zero")]
    Reserved,
    /// More puts and gets than are bearable name memory that does not exist.
    #[error("too much that names memory which does not exist")]
    Memory,
    /// It answers, or confirms, what was not asked for.
    #[error("an answer to nothing")]
    Unasked,
    /// More was asked for than may be asked for at a time.
    #[error("more gets than are allowed at a time")]
    Window,
    /// Something follows what was to be the last frame.
    #[error("bytes after the end")]
    AfterEnd,
    /// An encrypted record is not genuine.
    #[error("a record that is not genuine")]
    Record,
}

impl Header {
    /// A frame of the device's own.
    pub(crate) fn control(kind: u8, len: usize, word: u64) -> Header {
        Header { len: (len as u32).into(), kind, info: 0, protocol: 0.into(), word: word.into() }
    }

    /// A [`PUT`] behind so many that are not confirmed.
    pub(crate) fn put(len: usize, offset: u64, unconfirmed: u64) -> Header {
        let unconfirmed = u16::try_from(unconfirmed).unwrap_or(u16::MAX);
        Header { protocol: unconfirmed.into(), ..Header::control(PUT, len, offset) }
    }

    /// Checks everything that can be checked without knowing the connection's state. Nothing has been allocated for
    /// the frame then.
    ///
    /// # Errors
    /// If no correct peer with these limits sends such a frame.
    pub fn check(&self, limits: &Limits) -> Result<(), Malformed> {
        let len = self.len.get();
        if self.kind < CONTROL {
            if usize::from(self.info) > MAX_INFO {
                return Err(Malformed::Info(self.info));
            }
            if len as usize > limits.max_eager {
                return Err(Malformed::Length(len));
            }
            return Ok(());
        }
        if self.info != 0 {
            return Err(Malformed::Info(self.info));
        }
        if self.protocol.get() != 0 && self.kind != PUT {
            return Err(Malformed::Reserved);
        }
        let fits = match self.kind {
            PUT if self.word.get().checked_add(u64::from(len)).is_none() => return Err(Malformed::Memory),
            PUT => len <= MAX_PUT,
            GET => len == 8,
            DATA => len as usize <= limits.get_chunk,
            DONE | NONE => len == 0,
            ABSENT => len == 8,
            LEAVE if self.word.get() != 0 => return Err(Malformed::Reserved),
            LEAVE => len == 0,
            kind => return Err(Malformed::Kind(kind)),
        };
        if fits { Ok(()) } else { Err(Malformed::Length(len)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_laid_out_as_drawn() {
        let header =
            Header { len: 0x0403_0201.into(), kind: 5, info: 6, protocol: 0x0807.into(), word: 9.into() };
        assert_eq!(header.as_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(HEADER, 16);
    }

    #[test]
    fn impossible_frames_are_refused() {
        let limits = Limits::default();
        let message = Header { len: 5.into(), kind: 0, info: 112, protocol: 17.into(), word: 1.into() };
        assert_eq!(message.check(&limits), Ok(()));
        assert_eq!(Header { info: 113, ..message }.check(&limits), Err(Malformed::Info(113)));
        let long = limits.max_eager as u32 + 1;
        assert_eq!(Header { len: long.into(), ..message }.check(&limits), Err(Malformed::Length(long)));
        let huge = Header { len: u32::MAX.into(), ..message };
        assert_eq!(huge.check(&limits), Err(Malformed::Length(u32::MAX)));
        assert_eq!(Header::control(0xff, 0, 0).check(&limits), Err(Malformed::Kind(0xff)));
        assert_eq!(Header::control(GET, 7, 0).check(&limits), Err(Malformed::Length(7)));
        assert_eq!(Header::control(DONE, 1, 0).check(&limits), Err(Malformed::Length(1)));
        assert_eq!(Header::control(LEAVE, 0, 1).check(&limits), Err(Malformed::Reserved));
        let protocol = Header { protocol: 1.into(), ..Header::control(GET, 8, 0) };
        assert_eq!(protocol.check(&limits), Err(Malformed::Reserved));
        let last = Header::put(8, 0, 1 << 20);
        assert_eq!((last.protocol.get(), last.check(&limits)), (u16::MAX, Ok(())));
        let info = Header { info: 1, ..Header::control(PUT, 8, 0) };
        assert_eq!(info.check(&limits), Err(Malformed::Info(1)));
    }

    #[test]
    fn each_kind_has_the_lengths_that_it_may_have_and_no_others() {
        let limits = Limits::default();
        let (eager, chunk) = (limits.max_eager as u32, limits.get_chunk as u32);
        // Of each kind the longest and the shortest payload.
        let message = CONTROL - 1;
        let all = [
            (message, 0, eager),
            (PUT, 0, MAX_PUT),
            (GET, 8, 8),
            (DATA, 0, chunk),
            (DONE, 0, 0),
            (NONE, 0, 0),
            (ABSENT, 8, 8),
            (LEAVE, 0, 0),
        ];
        for (kind, least, most) in all {
            for len in [0, 1, 7, 8, 9, eager, eager + 1, chunk, chunk + 1, MAX_PUT, MAX_PUT + 1, u32::MAX] {
                let checked = Header::control(kind, len as usize, 0).check(&limits);
                let expected =
                    if (least..=most).contains(&len) { Ok(()) } else { Err(Malformed::Length(len)) };
                assert_eq!(checked, expected, "{len} bytes of kind {kind:#x}");
            }
        }
        for unknown in [CONTROL, 0xf8] {
            assert_eq!(Header::control(unknown, 0, 0).check(&limits), Err(Malformed::Kind(unknown)));
        }
        // A put ends within the numbers that memory can have.
        assert_eq!(Header::control(PUT, 8, u64::MAX - 8).check(&limits), Ok(()));
        assert_eq!(Header::control(PUT, 8, u64::MAX - 7).check(&limits), Err(Malformed::Memory));
    }
}
