//! Memory of this rank that tasks wait on: others write it past the engine, so that no event tells of it.
//!
//! A task that goes to sleep leaves what it has seen. The memory is compared with that whenever the driver has a round, and
//! once more when the doorbell has been armed, or its sleep settled: a writer that comes later finds it armed and rings.
//! What is written without a look at the doorbell, as by the rank itself to its own part of a window, is found when time has passed: soon at first,
//! then at most [`LONGEST`] later.

use super::Engine;
use crate::memory::SharedSlice;
use crate::sync::{Mutex, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

/// Milliseconds between two looks at memory that may be written without a ring.
const LONGEST: u64 = 8;
/// Memory that a task waits on. The engine forgets it when it has changed, or when its task has.
#[derive(Debug)]
pub struct Watched {
    memory: SharedSlice,
    state: Mutex<Seen>,
    /// In the engine's list.
    listed: AtomicBool,
}

#[derive(Debug)]
struct Seen {
    bytes: Vec<u8>,
    waker: Waker,
}

impl Watched {
    /// Watches memory on behalf of a task.
    #[must_use]
    pub fn new(memory: SharedSlice, waker: &Waker) -> Arc<Watched> {
        let seen = Seen { bytes: memory.to_vec(), waker: waker.clone() };
        Arc::new(Watched { memory, state: Mutex::new(seen), listed: AtomicBool::new(false) })
    }

    /// What the memory is now is known to the task: from here on it is woken for changes. Who calls this looks once more.
    pub fn renew(&self, waker: &Waker) {
        let mut seen = lock(&self.state);
        self.memory.read(&mut seen.bytes);
        if !seen.waker.will_wake(waker) {
            let before = std::mem::replace(&mut seen.waker, waker.clone());
            drop(seen);
            // Not under the lock, as of `replace_waker`.
            drop(before);
        }
    }

    /// Whether it is in the engine's list; it is to be put there if it was not.
    pub fn list(&self) -> bool {
        self.listed.swap(true, Ordering::AcqRel)
    }

    fn has_changed(&self) -> bool {
        let mut seen = lock(&self.state);
        let Seen { bytes, .. } = &mut *seen;
        let mut now = [0; 64];
        match now.get_mut(..bytes.len()) {
            Some(now) => {
                self.memory.read(now);
                now != &bytes[..]
            }
            None => self.memory.to_vec() != *bytes,
        }
    }

    fn wake(&self) {
        self.listed.store(false, Ordering::Release);
        // Nor is anybody woken under it: who is may be polled there and then.
        let waker = lock(&self.state).waker.clone();
        waker.wake();
    }
}

/// All that is waited on, and when to look next though nobody rings.
#[derive(Debug, Default)]
pub(super) struct Watches {
    list: Vec<Arc<Watched>>,
    next: u64,
    pause: u64,
}

impl Watches {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Wakes those whose memory has changed; whether there are any.
    pub(super) fn look(&mut self, all: bool) -> bool {
        let mut changed = false;
        self.list.retain(|watched| {
            let forgotten = Arc::strong_count(watched) == 1;
            let wake = !forgotten && (all || watched.has_changed());
            if wake {
                watched.wake();
            }
            changed |= wake;
            !forgotten && !wake
        });
        changed
    }
}

impl Engine {
    /// From now on a task is woken when its memory changes. `now` in milliseconds.
    pub fn watch(&mut self, watched: Arc<Watched>, now: u64) {
        if watched.has_changed() {
            return watched.wake();
        }
        let watches = &mut self.state.watches;
        watches.list.push(watched);
        (watches.next, watches.pause) = (now + 1, 1);
        // Who sleeps has not told the peers that memory is waited on: it is woken and falls asleep once more.
        self.disarm();
    }

    /// Tells the peers before the next sleep whether memory is waited on.
    pub(super) fn show_watching(&mut self) {
        if self.watching != self.is_watching() {
            self.watching = !self.watching;
            self.port.watch(self.watching);
        }
    }

    /// Something has come in, though it was no event: a task has found its memory changed.
    pub(crate) fn found_memory_changed(&mut self) {
        self.state.stats.events += 1;
    }

    /// Whether tasks wait on memory.
    #[inline]
    #[must_use]
    pub fn is_watching(&self) -> bool {
        !self.state.watches.list.is_empty()
    }

    /// Wakes the tasks whose memory has changed, and says whether there were any.
    #[inline]
    pub fn look_at_memory(&mut self) -> bool {
        self.is_watching() && self.state.watches.look(false)
    }

    /// When memory is to be looked at next though nobody rings, in milliseconds.
    pub(super) fn next_look(&self) -> Option<u64> {
        let watches = &self.state.watches;
        (!watches.list.is_empty()).then_some(watches.next)
    }

    /// The time has come to look at memory.
    pub(super) fn look_in_time(&mut self, now: u64) {
        let watches = &mut self.state.watches;
        if watches.list.is_empty() || now < watches.next {
            return;
        }
        watches.look(false);
        watches.pause = (watches.pause * 2).min(LONGEST);
        watches.next = now + watches.pause;
    }
}

impl super::Scope<'_> {
    /// Wakes all tasks that wait on memory: what they wait for may be over otherwise.
    pub fn wake_watchers(&mut self) {
        self.state.watches.look(true);
    }
}
