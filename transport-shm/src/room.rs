//! What the writer of a lane that took no more remembers, so that it knows when to try again: its half of the handshake with
//! those who make room.
//!
//! Generic over the memory, so that loom runs this code.

use crate::lane::Producer;
use posthaste_core::memory::Words;

/// Whether a lane took no more when it was last tried, and what was known then.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    wanting: bool,
    /// How far the reader was known to have read: looks at what it returned may show more, and leave nothing to be seen.
    head: u64,
    /// How often pages had come back: they may be of another lane's reader, and be found by whoever looks for another lane.
    returns: u64,
}

impl Room {
    /// The lane took no more; pages had come back so many times.
    #[inline]
    pub fn miss<W: Words>(&mut self, producer: &Producer<W>, returns: u64) {
        *self = Self { wanting: true, head: producer.known(), returns };
    }

    /// Whether the reader has moved since.
    #[inline]
    pub fn reader_moved<W: Words>(&self, producer: &mut Producer<W>) -> bool {
        producer.known() > self.head || producer.reader_moved()
    }

    /// Whether it is worth while to try again, which is said once: whoever asks is going to. Nothing else may take back that
    /// there was no room, least of all the end of a sleep, which may have been for nothing.
    pub fn may_go_on<W: Words>(&mut self, producer: &mut Producer<W>, returns: u64) -> bool {
        let may = self.wanting && (self.returns != returns || self.reader_moved(producer));
        if may {
            // Before the next try, which need not look itself: a writer that waits for a page and not for room would be told of one
            // and the same move again and again.
            producer.consumed();
            self.wanting = false;
        }
        may
    }
}
