//! Where this thread wrote last in memory of others.
//!
//! Who waits for another rank answers as a rule where it answered before. So it asks for that line as soon as it sees what it waited
//! for, and has it when the answer is made: the way from the wait's end to the answer is not behind the line's way, but beside it.

use super::SharedSlice;
use std::cell::Cell;
use std::ptr;

thread_local! {
    /// The last one, and the one before it: data, and the word that tells of it.
    static RECENT: Cell<[*const u8; 2]> = const { Cell::new([ptr::null(); 2]) };
}

impl SharedSlice {
    /// Remembers that this thread wrote there.
    #[inline(always)]
    pub fn note_written(self) {
        RECENT.with(|recent| recent.set([self.base, recent.get()[0]]));
    }
}

/// Asks for the lines that this thread wrote last, to be written again. A hint.
#[inline(always)]
pub fn fetch_recent() {
    #[cfg(target_arch = "x86_64")]
    RECENT.with(|recent| {
        // What is not mapped would be looked for each time.
        for at in recent.get().into_iter().rev().filter(|at| !at.is_null()) {
            super::x86::prefetch_write(at);
        }
    });
}
