//! What a hostile peer, or a wrong environment, can make of the bytes that it controls: functions of any bytes, for a
//! fuzzer and for property tests. Each ends in a panic if something is not as it must be, and else returns.

mod datatype;
mod environment;
mod lane;
mod packets;
mod records;
mod tcp;

pub use datatype::program;
pub use environment::environment;
pub use lane::{lane_reader, lane_writer};
pub use packets::packets;
pub use records::records;
pub use tcp::{tcp_handshake, tcp_header, tcp_session};

/// Takes numbers off the front of some bytes; zeros when these are used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        let mut word = [0; 8];
        let taken = self.take(8);
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }
}
