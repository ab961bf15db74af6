//! A payload on its way from a socket to where it belongs.

#[cfg(all(unix, not(feature = "portable")))]
use crate::frame::HEADER;
use crate::frame::Header;
use posthaste_core::descriptor::Info;
use posthaste_core::memory::SharedSlice;
#[cfg(all(unix, not(feature = "portable")))]
use posthaste_core::memory::{MOST_PARTS, read_behind, read_scattered};
use std::io;
use std::net::TcpStream;

/// A rest of a payload from this length on is read straight to where it belongs; so are slices of this mean length.
const DIRECT: usize = 4 << 10;

/// A payload that arrives piece by piece.
pub(super) enum Fill {
    /// A message, into memory of its own.
    Message { header: Header, info: Info, bytes: Vec<u8>, len: usize },
    /// A put or an answer, into this rank's memory.
    Memory { memory: SharedSlice, at: usize, put: bool },
    /// The next part of an answer, behind those that have come.
    Answer { bytes: Vec<u8>, len: usize },
    /// A put of memory that is not there.
    Absent { left: usize },
    /// A message, into memory that its protocol has named, of which so many slices are full, and so many bytes are missing.
    Placed { header: Header, info: Info, slices: Vec<SharedSlice>, full: usize, missing: usize },
}

impl Fill {
    pub fn missing(&self) -> usize {
        match self {
            Fill::Message { bytes, len, .. } | Fill::Answer { bytes, len } => len - bytes.len(),
            Fill::Memory { memory, at, .. } => memory.len() - at,
            Fill::Absent { left } => *left,
            Fill::Placed { missing, .. } => *missing,
        }
    }

    /// Takes as much as it misses; returns how much.
    pub fn take(&mut self, data: &[u8]) -> usize {
        let mut count = self.missing().min(data.len());
        match self {
            Fill::Message { bytes, .. } | Fill::Answer { bytes, .. } => {
                bytes.extend_from_slice(&data[..count]);
            }
            Fill::Memory { memory, at, .. } => {
                if count < memory.len() - *at {
                    // Words are kept whole: what is shown of a word is all of it.
                    let odd = (memory.as_ptr() as usize + *at + count) % 8;
                    count -= odd.min(count);
                }
                if let Some(part) = memory.slice(*at as u64, count as u64) {
                    part.write(&data[..count]);
                }
                *at += count;
            }
            Fill::Absent { left } => *left -= count,
            Fill::Placed { slices, full, .. } => {
                let mut rest = &data[..count];
                for slice in &slices[*full..] {
                    let now = slice.len().min(rest.len());
                    slice.write(&rest[..now]);
                    rest = &rest[now..];
                    if rest.is_empty() {
                        break;
                    }
                }
                self.came(count);
            }
        }
        count
    }

    /// So many bytes are in the slices that a protocol has named.
    pub fn came(&mut self, mut count: usize) {
        let Fill::Placed { slices, full, missing, .. } = self else { return };
        *missing -= count;
        while let Some(slice) = slices.get_mut(*full) {
            let now = slice.len().min(count);
            count -= now;
            match slice.slice(now as u64, (slice.len() - now) as u64) {
                Some(rest) if !rest.is_empty() => {
                    *slice = rest;
                    return;
                }
                _ => *full += 1,
            }
        }
    }
    /// How much [`read`](Self::read) would read of the payload, and how much behind it, if that is worth a system call of
    /// its own. Behind it is what precedes the payload of another frame of its kind, so that this one can be read straight
    /// to where it belongs, too.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn direct(&self) -> Option<(usize, usize)> {
        let missing = self.missing();
        let (asked, behind, worth) = match self {
            Fill::Message { bytes, info, .. } => {
                let room = bytes.capacity() - bytes.len();
                let behind = if room < missing { 0 } else { HEADER + info.as_bytes().len() };
                (room.min(missing), behind, missing >= DIRECT)
            }
            Fill::Answer { bytes, .. } => {
                let room = bytes.capacity() - bytes.len();
                (room.min(missing), if room < missing { 0 } else { HEADER }, missing >= DIRECT)
            }
            Fill::Memory { .. } => (missing, HEADER, missing >= DIRECT),
            Fill::Absent { .. } => return None,
            Fill::Placed { info, slices, full, .. } => {
                let left = &slices[*full..];
                let (asked, behind) = match left.get(..MOST_PARTS + 1) {
                    None => (missing, HEADER + info.as_bytes().len()),
                    Some(most) => (most[..MOST_PARTS].iter().map(SharedSlice::len).sum(), 0),
                };
                (asked, behind, missing >= DIRECT * left.len())
            }
        };
        worth.then_some((asked, behind))
    }

    /// The same where memory of others cannot be read to, and a vector has to be filled before it is.
    #[cfg(not(all(unix, not(feature = "portable"))))]
    pub fn direct(&self) -> Option<(usize, usize)> {
        let missing = self.missing();
        match self {
            Fill::Message { .. } | Fill::Answer { .. } if missing >= DIRECT => Some((missing, 0)),
            _ => None,
        }
    }

    /// Reads once, straight to where the payload belongs, and what there is beyond it into `behind`, both as long as
    /// [`direct`](Self::direct) says. Returns the number of bytes of both.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn read(&mut self, behind: &mut [u8], stream: &TcpStream) -> io::Result<usize> {
        match self {
            Fill::Message { bytes, len, .. } | Fill::Answer { bytes, len } => {
                let asked = *len - bytes.len();
                read_behind(bytes, asked, behind, stream)
            }
            Fill::Memory { memory, at, .. } => {
                let left = memory.len() - *at;
                let Some(rest) = memory.slice(*at as u64, left as u64) else { return Ok(0) };
                let count = rest.read_from(behind, stream)?;
                *at += count.min(left);
                Ok(count)
            }
            Fill::Placed { slices, full, missing, .. } => {
                let most = *missing;
                let count = read_scattered(&slices[*full..], behind, stream)?;
                self.came(count.min(most));
                Ok(count)
            }
            Fill::Absent { .. } => Ok(0),
        }
    }

    /// The same there.
    #[cfg(not(all(unix, not(feature = "portable"))))]
    pub fn read(&mut self, _behind: &mut [u8], mut stream: &TcpStream) -> io::Result<usize> {
        use std::io::Read;
        let (Fill::Message { bytes, len, .. } | Fill::Answer { bytes, len }) = self else { return Ok(0) };
        let had = bytes.len();
        bytes.resize(*len, 0);
        let read = stream.read(&mut bytes[had..]);
        bytes.truncate(had + *read.as_ref().unwrap_or(&0));
        read
    }
}
