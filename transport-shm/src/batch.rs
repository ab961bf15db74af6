//! A batch: messages of one protocol and one length that lie one behind the other in a page, named by one record.
//!
//! ```text
//!  record  | header, length of each | page | grant | how many |
//!  page    | payload, padded | payload, padded | ...
//! ```
//! The ring of a lane holds a few messages of middle length. A run of them goes through it in lockstep with the reader;
//! through pages, each side copies at its own pace.

use posthaste_core::memory::SharedSlice;

/// Bytes of a batch, at most: enough that its page and its record cost little for each message, and so few that the reader
/// starts soon.
pub const MOST_BYTES: u64 = 16 << 10;

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Messages; at least one.
    count: u64,
    /// Length of each in bytes; at least one.
    len: u64,
}

impl Batch {
    /// So many messages of that length; `None` if that is more than a batch has, or nothing.
    #[must_use]
    pub fn new(count: u64, len: u64) -> Option<Batch> {
        let fits =
            (1..=MOST_BYTES).contains(&len) && (1..=MOST_BYTES / len.next_multiple_of(8)).contains(&count);
        fits.then_some(Batch { count, len })
    }

    /// The most messages of that length, which is at least 1, that are a batch.
    #[must_use]
    pub fn most(len: u64) -> u64 {
        MOST_BYTES / len.max(1).next_multiple_of(8)
    }

    /// Messages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Bytes from one payload to the next.
    #[must_use]
    pub fn stride(&self) -> u64 {
        self.len.next_multiple_of(8)
    }

    /// Bytes of all, at most [`MOST_BYTES`].
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.count * self.stride()
    }

    /// Where in the memory of the batch a payload is; `None` if there is no such message.
    #[inline]
    #[must_use]
    pub fn payload(&self, memory: &SharedSlice, number: u64) -> Option<SharedSlice> {
        if number < self.count { memory.slice(number * self.stride(), self.len) } else { None }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_never_larger_than_it_may_be() {
        for len in
            [0, 1, 7, 8, 9, 1000, 2048, MOST_BYTES - 1, MOST_BYTES, MOST_BYTES + 1, u64::MAX - 8, u64::MAX]
        {
            for count in [0, 1, 2, 7, 8, 15, 16, 17, 2047, 2048, 2049, u64::MAX / 8, u64::MAX] {
                let Some(batch) = Batch::new(count, len) else { continue };
                assert!(count > 0 && len > 0 && batch.bytes() <= MOST_BYTES, "{batch:?}");
                assert!(batch.stride() >= len && count <= Batch::most(len), "{batch:?}");
            }
        }
        assert_eq!(Batch::new(16, 1024).map(|batch| batch.bytes()), Some(MOST_BYTES));
        assert_eq!(Batch::new(17, 1024), None);
        assert_eq!((Batch::new(0, 8), Batch::new(1, 0)), (None, None));
    }
}
