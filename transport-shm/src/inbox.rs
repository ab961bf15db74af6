//! The lanes that one endpoint reads: which of them it polls, and how it falls asleep.
//!
//! Generic over the memory, so that loom runs this code; what is done with the records is the port's business.

use crate::lane::{Consumer, Peek, is_open};
use crate::ready::ReadySet;
use bytes::Bytes;
use posthaste_core::memory::Words;
use posthaste_core::sync::spin_loop;

/// Empty looks at a lane after which it may be dropped from the polled ones.
const QUIET: u32 = 4096;
/// Looks at a lane of who falls asleep without a heavy fence: longer than a store of a sender takes to be seen, unless it is held up.
#[cfg(not(posthaste_loom))]
const UNSETTLED_LOOKS: usize = 64;
#[cfg(posthaste_loom)]
const UNSETTLED_LOOKS: usize = 1;
/// However many lanes there are: those that are looked at first have just been asked.
#[cfg(not(posthaste_loom))]
const LEAST_LOOKS: usize = 2;
#[cfg(posthaste_loom)]
const LEAST_LOOKS: usize = 1;

/// One lane that is read, with what the port keeps for it.
#[derive(Debug)]
pub struct Reading<W, X> {
    /// The reading end.
    pub consumer: Consumer<W>,
    /// What the port keeps for the lane.
    pub with: X,
    /// Not read any more.
    pub dead: bool,
    /// Its next record could not be delivered yet.
    pub held: bool,
    /// Empty looks in a row.
    pub quiet: u32,
    /// Words to be taken one by one before it is tried once more whether many lie there together.
    pub singles: u32,
    /// Messages that were taken of the several which its next record has or names.
    pub batched: u64,
    /// A copy of the page that a held record names, where it is to be copied: it is not made anew at each look.
    pub copy: Option<Bytes>,
    polled: bool,
}

/// The lanes that one endpoint reads.
#[derive(Debug)]
pub struct Inbox<W, X> {
    ready: ReadySet<W>,
    lanes: Vec<Option<Box<Reading<W, X>>>>,
    polled: Vec<usize>,
    /// Senders may not see that a lane is no longer polled: all that were met stay so.
    keeps: bool,
    /// How often it has gone to sleep.
    sleeps: u64,
}

impl<W: Words, X> Inbox<W, X> {
    /// No lanes yet; they are found through the block of the endpoint.
    pub fn new(ready: ReadySet<W>, sources: usize) -> Self {
        Self {
            ready,
            lanes: (0..sources).map(|_| None).collect(),
            polled: Vec::new(),
            keeps: false,
            sleeps: 0,
        }
    }

    /// From now on every lane that was met is looked at whenever this endpoint is awake: the fences of this process are not
    /// enough for senders to see for certain that they are to tell it.
    pub fn keep_all(&mut self) {
        self.keeps = true;
    }

    /// The sources whose lanes are polled.
    #[inline]
    #[must_use]
    pub fn polled(&self) -> &[usize] {
        &self.polled
    }

    /// A lane that was found.
    #[inline]
    pub fn lane(&mut self, source: usize) -> Option<&mut Reading<W, X>> {
        self.lanes.get_mut(source)?.as_deref_mut()
    }

    /// Whether a lane that was found has a record to be taken.
    #[must_use]
    pub fn has_any(&self, source: usize) -> bool {
        let lane = self.lanes.get(source).and_then(Option::as_deref);
        lane.is_some_and(|lane| !lane.dead && !lane.held && lane.consumer.has_any())
    }

    /// Whether a lane that was found has a record, be it one that has to wait.
    #[must_use]
    pub fn is_unread(&self, source: usize) -> bool {
        let lane = self.lanes.get(source).and_then(Option::as_deref);
        lane.is_some_and(|lane| !lane.dead && lane.consumer.has_any())
    }

    /// Whether a sender has set a bit.
    #[inline]
    #[must_use]
    pub fn is_announced(&self) -> bool {
        self.ready.has_any()
    }

    /// Takes the bits that senders set: their lanes are polled from now on. `memory` gives control pages, ring and what
    /// to keep for a lane that is met for the first time.
    #[inline]
    pub fn collect(&mut self, mut memory: impl FnMut(usize) -> (W, W, X)) {
        let Inbox { ready, lanes, polled, keeps, .. } = self;
        ready.collect(|source| promote(lanes, polled, source, *keeps, &mut memory));
    }

    /// Drops the quiet lanes from the polled ones; true if there were any, and the fence was made.
    #[cold]
    pub fn demote(&mut self, heavy_fence: impl FnOnce()) -> bool {
        if self.keeps {
            return false;
        }
        let lanes = &mut self.lanes;
        let mut any = false;
        for &source in &self.polled {
            if let Some(lane) = &lanes[source]
                && lane.quiet > QUIET
            {
                lane.consumer.set_notify(true);
                any = true;
            }
        }
        if !any {
            return false;
        }
        // Partner: the light fence of the sender between its record and its look at `notify`.
        heavy_fence();
        self.polled.retain(|&source| match &mut lanes[source] {
            Some(lane) if lane.quiet > QUIET => {
                lane.polled = lane.consumer.peek() != Peek::Empty;
                if lane.polled {
                    lane.consumer.set_notify(false);
                    lane.quiet = 0;
                }
                lane.polled
            }
            lane => lane.is_some(),
        });
        true
    }

    /// Falls asleep unless something came in: from now on senders tell and ring. False: stay awake. What else could
    /// end the sleep is shown to the peers before this call, and `busy` looks at it again behind the fence.
    pub fn arm(&mut self, heavy_fence: impl FnOnce(), busy: impl FnOnce() -> bool) -> bool {
        self.ask_for_rings();
        // Partner: the light fence of every sender between its record and its look at `notify`, and of every reader
        // between its credit and its look at `waiting`.
        heavy_fence();
        if self.is_busy(busy) {
            self.stay_awake();
            return false;
        }
        self.poll_no_more();
        true
    }

    /// As [`arm`](Self::arm) where the heavy fence is too dear to be made for every sleep: a sender that is amid its record
    /// may ring or not. Unless the sleep ends before, it has to be [settled](Self::settle), and until then lanes stay among
    /// the polled. `fence` is one for this thread alone: nothing relies on it, but rarely is anything missed behind it.
    pub fn arm_unsettled(&mut self, fence: impl FnOnce(), mut busy: impl FnMut() -> bool) -> bool {
        self.ask_for_rings();
        fence();
        for _ in 0..(UNSETTLED_LOOKS / self.polled.len().max(1)).max(LEAST_LOOKS) {
            if self.is_busy(&mut busy) {
                self.stay_awake();
                return false;
            }
            spin_loop();
        }
        true
    }

    /// Makes the heavy fence of a sleep that began without: false if something came in of which nobody told, and this end
    /// is awake. Senders are asked for notice once more: somebody who looked meanwhile may have taken the bit that one had set
    /// before the sleep, and found nothing, and with that has told the sender that its lane is polled.
    pub fn settle(&mut self, heavy_fence: impl FnOnce(), busy: impl FnOnce() -> bool) -> bool {
        self.ask_for_notice();
        // Partners: as in `arm`.
        heavy_fence();
        // Whoever takes the promise away rings: there is something to look for.
        if !self.ready.is_armed() || self.is_busy(busy) {
            self.stay_awake();
            return false;
        }
        self.poll_no_more();
        true
    }

    fn ask_for_rings(&mut self) {
        self.ask_for_notice();
        self.sleeps += 1;
        self.ready.arm(self.sleeps);
    }

    fn ask_for_notice(&self) {
        for &source in &self.polled {
            if let Some(lane) = &self.lanes[source] {
                lane.consumer.set_notify(true);
            }
        }
    }

    /// The last look before a sleep.
    fn is_busy(&mut self, busy: impl FnOnce() -> bool) -> bool {
        let mut busy = self.ready.has_any() || busy();
        for &source in &self.polled {
            if let Some(lane) = &mut self.lanes[source] {
                busy |= !lane.held && !lane.dead && lane.consumer.peek() != Peek::Empty;
            }
        }
        busy
    }

    fn stay_awake(&self) {
        self.ready.disarm();
        for &source in &self.polled {
            if let Some(lane) = &self.lanes[source] {
                lane.consumer.set_notify(false);
            }
        }
    }

    /// From now on senders set a bit for all that they send.
    fn poll_no_more(&mut self) {
        if self.keeps {
            return;
        }
        // A held lane stays among the polled: it is looked at again when something is registered.
        let lanes = &mut self.lanes;
        self.polled.retain(|&source| match &mut lanes[source] {
            Some(lane) if lane.held => true,
            Some(lane) => {
                lane.polled = false;
                false
            }
            None => false,
        });
    }

    /// Looks up to `looks` times whether anything has come in through one lane; `None` if its next record is held, or it is
    /// read no more, and a look would tell nothing.
    #[inline]
    fn look_at(&self, source: usize, looks: u32) -> Option<bool> {
        let lane = self.lanes.get(source)?.as_deref().filter(|lane| !lane.held && !lane.dead)?;
        for _ in 0..looks {
            if lane.consumer.has_any() {
                return Some(true);
            }
            spin_loop();
        }
        Some(false)
    }

    /// Looks up to `looks` times whether anything has come in.
    #[inline]
    pub fn glance(&self, looks: u32) -> bool {
        if let [only] = *self.polled
            && let Some(seen) = self.look_at(only, looks)
        {
            return seen || self.ready.has_any();
        }
        for _ in 0..looks {
            let some = |source: &usize| self.has_any(*source);
            if self.ready.has_any() || self.polled.iter().any(some) {
                return true;
            }
            spin_loop();
        }
        false
    }

    /// Whether writers of this rank's memory are to end the next sleep.
    pub fn watch(&self, watching: bool) {
        self.ready.watch(watching);
    }

    /// Awake again.
    pub fn disarm(&self) {
        self.ready.disarm();
    }

    /// Reads a lane no more.
    pub fn kill(&mut self, source: usize) {
        if let Some(lane) = self.lane(source) {
            lane.dead = true;
            lane.polled = false;
            lane.copy = None;
            self.polled.retain(|&polled| polled != source);
        }
    }
}

/// A lane's bit was set: it is polled from now on.
#[cold]
fn promote<W: Words, X>(
    lanes: &mut [Option<Box<Reading<W, X>>>],
    polled: &mut Vec<usize>,
    source: usize,
    keeps: bool,
    memory: &mut impl FnMut(usize) -> (W, W, X),
) {
    let Some(place) = lanes.get_mut(source) else { return };
    if place.is_none() {
        let (control, ring, with) = memory(source);
        if !is_open(&control) {
            // Somebody set a bit for a lane that does not exist: a hint is only a hint.
            return;
        }
        let consumer = Consumer::new(control, ring);
        *place = Some(Box::new(Reading {
            consumer,
            with,
            dead: false,
            held: false,
            quiet: 0,
            singles: 0,
            batched: 0,
            copy: None,
            polled: false,
        }));
    }
    if let Some(lane) = place
        && !lane.dead
    {
        // Also of a lane that has stayed among the polled in a sleep that was not settled; not where all do for want of a fence:
        // who sets a bit has made one.
        if !lane.polled || !keeps {
            lane.consumer.set_notify(false);
        }
        if !lane.polled {
            lane.polled = true;
            lane.quiet = 0;
            polled.push(source);
        }
    }
}
