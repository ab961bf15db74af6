//! What waits to be written to a connection: one stream of bytes, most of them copied, long payloads by reference.
//!
//! ```text
//!   small   | frame | frame | header |            | frame | frame |
//!                                    |            |
//!   long                             +- Bytes ----+   goes after so many small bytes
//! ```

use bytes::Bytes;
use std::collections::VecDeque;
use std::io::IoSlice;

/// Slices given to the kernel at once.
pub(crate) const GATHER: usize = 32;
/// Written bytes at the front of the small buffer that are worth moving the rest for.
const COMPACT: usize = 32 << 10;
/// An empty buffer keeps so much memory.
const KEEP: usize = 256 << 10;

/// A stream of bytes that waits.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    small: Vec<u8>,
    /// Bytes of `small` that are written already.
    head: usize,
    /// Long parts: how many small bytes go before them, counted from the stream's beginning.
    long: VecDeque<(u64, Bytes)>,
    /// Small bytes written since the stream's beginning.
    written: u64,
    long_bytes: usize,
    /// All bytes that have left since the stream's beginning.
    passed: u64,
}

impl Outgoing {
    /// Bytes that wait.
    #[inline]
    pub fn len(&self) -> usize {
        self.small.len() - self.head + self.long_bytes
    }

    /// Bytes that have left since the stream's beginning.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where small bytes are appended. Nothing but appending is allowed.
    #[inline]
    pub fn small(&mut self) -> &mut Vec<u8> {
        &mut self.small
    }

    /// Appends a long part without copying it.
    pub fn push_long(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        self.long_bytes += bytes.len();
        let before = self.written + (self.small.len() - self.head) as u64;
        self.long.push_back((before, bytes));
    }

    /// Shows what comes first to `each`, part by part, until it returns false.
    fn parts<'a>(&'a self, mut each: impl FnMut(&'a [u8]) -> bool) {
        let mut at = self.head;
        for (before, bytes) in &self.long {
            let until = self.head + (before - self.written) as usize;
            if until > at && !each(&self.small[at..until]) {
                return;
            }
            at = until;
            if !each(bytes) {
                return;
            }
        }
        if self.small.len() > at {
            each(&self.small[at..]);
        }
    }

    /// What comes first, as slices for the kernel, and `last` after everything if there is a place for it. Returns how
    /// many of them are used.
    pub fn gather<'a>(&'a self, last: &'a [u8], slices: &mut [IoSlice<'a>; GATHER]) -> usize {
        let mut count = 0;
        self.parts(|part| {
            slices[count] = IoSlice::new(part);
            count += 1;
            count < GATHER
        });
        if count < GATHER && !last.is_empty() {
            slices[count] = IoSlice::new(last);
            count += 1;
        }
        count
    }

    /// Appends what comes first to `to`, at most `limit` bytes; they are gone from here then.
    pub fn take(&mut self, to: &mut Vec<u8>, limit: usize) {
        let mut taken = 0;
        self.parts(|part| {
            let part = &part[..part.len().min(limit - taken)];
            to.extend_from_slice(part);
            taken += part.len();
            taken < limit
        });
        self.consume(taken);
    }

    /// So many bytes were written.
    pub fn consume(&mut self, mut count: usize) {
        self.passed += count as u64;
        while count > 0 {
            let small = match self.long.front() {
                Some((before, _)) => (before - self.written) as usize,
                None => self.small.len() - self.head,
            };
            let now = small.min(count);
            self.head += now;
            self.written += now as u64;
            count -= now;
            if count > 0 {
                let Some((_, bytes)) = self.long.front_mut() else { break };
                let now = bytes.len().min(count);
                self.long_bytes -= now;
                count -= now;
                if now == bytes.len() {
                    self.long.pop_front();
                } else {
                    bytes::Buf::advance(bytes, now);
                }
            }
        }
        if self.head == self.small.len() {
            self.head = 0;
            if self.small.capacity() > KEEP {
                self.small = Vec::new();
            }
            self.small.clear();
        } else if self.head > COMPACT && self.head > self.small.len() / 2 {
            self.small.drain(..self.head);
            self.head = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_keep_their_places() {
        let mut out = Outgoing::default();
        out.small().extend_from_slice(b"ab");
        out.push_long(Bytes::from_static(b"LONG"));
        out.push_long(Bytes::from_static(b"ER"));
        out.small().extend_from_slice(b"cd");
        let mut slices = [IoSlice::new(&[]); GATHER];
        assert_eq!(out.gather(b"last", &mut slices), 5);
        let all: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
        assert_eq!(all, b"abLONGERcdlast");
        out.consume(3);
        let mut rest = Vec::new();
        out.take(&mut rest, 4);
        assert_eq!((rest.as_slice(), out.len()), (&b"ONGE"[..], 3));
        out.take(&mut rest, 100);
        assert_eq!((rest.as_slice(), out.is_empty()), (&b"ONGERcd"[..], true));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn whatever_is_pushed_comes_out_in_order(
            steps in proptest::collection::vec((0..3u8, 0..3000usize), 0..60)
        ) {
            let (mut out, mut pushed, mut got) = (Outgoing::default(), Vec::new(), Vec::new());
            for (number, (what, len)) in steps.into_iter().enumerate() {
                let bytes = vec![number as u8; len];
                match what {
                    0 => out.small().extend_from_slice(&bytes),
                    1 => out.push_long(Bytes::from(bytes.clone())),
                    _ => {
                        out.take(&mut got, len);
                        continue;
                    }
                }
                pushed.extend_from_slice(&bytes);
                prop_assert_eq!(out.len(), pushed.len() - got.len());
            }
            out.take(&mut got, usize::MAX);
            prop_assert!(got == pushed && out.is_empty());
        }
    }
}
