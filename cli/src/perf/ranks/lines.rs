//! Memory of a row that begins with a line of the cache, as that of the limits does: what an allocator gives begins 16 bytes
//! behind one if it is large, and by chance otherwise, so that rows of one size would be compared with limits of another kind.

use posthaste::Bytes;
use std::ops::{Deref, DerefMut};

/// Bytes of a line.
const LINE: usize = 64;

/// Bytes from the beginning of a line on.
pub(super) struct Lines {
    memory: Vec<u8>,
    at: usize,
    len: usize,
}

impl Lines {
    pub fn zeroed(len: usize) -> Lines {
        let memory = vec![0; len + LINE];
        let at = memory.as_ptr().align_offset(LINE);
        Lines { memory, at, len }
    }

    /// Each byte from its place.
    pub fn filled(len: usize, byte: impl Fn(usize) -> u8) -> Lines {
        let mut lines = Lines::zeroed(len);
        lines.iter_mut().enumerate().for_each(|(at, place)| *place = byte(at));
        lines
    }

    pub fn into_bytes(self) -> Bytes {
        Bytes::from(self.memory).slice(self.at..self.at + self.len)
    }
}

impl Deref for Lines {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.at..][..self.len]
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.at..][..self.len]
    }
}
