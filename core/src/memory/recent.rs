//! Where this thread wrote last in memory of others, and whether it writes an answer.
//!
//! Who waits for another rank answers as a rule where it answered before. So it asks for that line as soon as it sees what it waited
//! for, and has it when the answer is made: the way from the wait's end to the answer is not behind the line's way, but beside it.
//! The first line of the answer, which the other side looks for, is pushed out of this processor's own caches at once: it is found
//! in the shared one, and need not be fetched from here. In a stream that would be in vain, and the next write to the line would wait for it.

use super::SharedSlice;
use std::cell::Cell;
use std::ptr;

struct Recent {
    /// The last place, and the one before it: data, and the word that tells of it.
    written: Cell<[*const u8; 2]>,
    /// A wait has ended, and no put or signal was done at once since.
    answers: Cell<bool>,
}

thread_local! {
    static RECENT: Recent = const { Recent { written: Cell::new([ptr::null(); 2]), answers: Cell::new(false) } };
}

impl Recent {
    #[inline(always)]
    fn push_out(&self, at: *const u8) {
        if self.answers.get() {
            self.answers.set(false);
            #[cfg(target_arch = "x86_64")]
            super::x86::demote(at);
            #[cfg(not(target_arch = "x86_64"))]
            let _ = at;
        }
    }
}

impl SharedSlice {
    /// Remembers that this thread wrote there, and pushes its first line out if that is what follows a wait.
    #[inline(always)]
    pub fn note_written(self) {
        RECENT.with(|recent| {
            recent.push_out(self.base);
            recent.written.set([self.base, recent.written.get()[0]]);
        });
    }

    /// Pushes the first line out if what this thread wrote there follows a wait. A hint.
    #[inline(always)]
    pub fn push_answer_out(self) {
        RECENT.with(|recent| recent.push_out(self.base));
    }
}

/// Asks for the lines that this thread wrote last, to be written again. A hint.
#[inline(always)]
pub fn fetch_recent() {
    RECENT.with(|recent| {
        recent.answers.set(true);
        // What is not mapped would be looked for each time.
        #[cfg(target_arch = "x86_64")]
        for at in recent.written.get().into_iter().rev().filter(|at| !at.is_null()) {
            super::x86::prefetch_write(at);
        }
    });
}
