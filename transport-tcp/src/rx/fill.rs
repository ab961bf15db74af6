//! A payload on its way from a socket to where it belongs.

use crate::frame::Header;
use posthaste_core::descriptor::Info;
use posthaste_core::memory::SharedSlice;

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
}
