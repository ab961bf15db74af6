//! One context's part of the device: its writing ends, its reading ends, its page pool.

mod rx;
mod tx;

use crate::link::ClientLink;
use posthaste_core::device::{Inject, Injected, Sink, Sources};
use posthaste_core::{Descriptor, Loan, MemoryError, Port, ProtocolId, Rank};
use rx::{Lingered, Rx};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use tx::Tx;

/// Packets that are taken of a lane before others have their turn, whatever the budget: a budget for all lanes is not for the
/// only one whose writer goes on writing.
const MOST_OF_A_LANE: usize = 1 << 13;
/// Lanes polled at once as a rule; beyond that, quiet ones wait for their bits.
const POLLED_LANES: usize = 8;
/// A heavy fence that costs as much is not made for every sleep.
const DEAR: Duration = Duration::from_micros(50);
/// A sleep is settled after so many times the cost of that, and within these bounds: fences take a small part of the time, and
/// a message of which nobody told comes late by no more.
const PUT_OFF: u32 = 16;
const SETTLED_WITHIN: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(100));
/// Quiet lanes are dropped after so many times the cost: the fence holds up those that are not quiet.
const BETWEEN_DEMOTIONS: u32 = 256;
/// In a page record's second word: the receiver should copy at once and give the page back.
const COPY_FLAG: u64 = 1 << 63;

pub(crate) struct ShmPort {
    tx: Tx,
    rx: Rx,
    /// Tasks wait on memory.
    watching: bool,
    /// The sleep has begun without a heavy fence; whether it waits for room, too.
    unsettled: Option<bool>,
    /// Where fences are dear: when quiet lanes may be dropped again.
    demotes_from: Duration,
}

impl ShmPort {
    pub fn new(home: Arc<ClientLink>) -> Result<ShmPort, MemoryError> {
        let block = home.link.arena.layout().block(home.client, home.me);
        home.link.arena.commit_common(block.0, block.1)?;
        let (tx, rx) = (Tx::new(home.clone()), Rx::new(home));
        Ok(ShmPort { tx, rx, watching: false, unsettled: None, demotes_from: Duration::ZERO })
    }

    fn fence_cost(&self) -> Duration {
        self.rx.home.link.sysdep.heavy_fence_cost()
    }
}

impl Inject for ShmPort {
    #[inline]
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        self.tx.inject(run, sources)
    }

    fn loan(&mut self, len: usize) -> Option<Loan> {
        self.tx.loan(len)
    }

    #[inline]
    fn word(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: u64) -> bool {
        self.tx.word(target, protocol, cookie, payload)
    }

    #[inline]
    fn word_to_each(&mut self, targets: &mut [usize], protocol: ProtocolId, payload: u64) -> usize {
        self.tx.word_to_each(targets, protocol, payload)
    }

    #[inline]
    fn plain(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: &[u8]) -> bool {
        self.tx.plain(target, protocol, cookie, payload)
    }

    fn multicast(&mut self, begins: bool) {
        self.tx.multicast(begins);
    }
}

impl Port for ShmPort {
    #[inline]
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let ShmPort { tx, rx, demotes_from, .. } = self;
        if rx.inbox.is_announced() {
            rx.collect();
        }
        let mut events = 0;
        if let [only] = *rx.inbox.polled() {
            events += rx.drain(only, budget.min(MOST_OF_A_LANE), tx, sink);
        } else if !rx.inbox.polled().is_empty() {
            // Every lane gets an equal share, and another one is first each time.
            let lanes = rx.inbox.polled().len();
            let share = (budget / lanes).clamp(8, MOST_OF_A_LANE);
            rx.next = (rx.next + 1) % lanes;
            for at in 0..lanes {
                let source = rx.inbox.polled()[(rx.next + at) % lanes];
                events += rx.drain_one(source, share, tx, sink);
            }
            if lanes > POLLED_LANES && events == 0 {
                let sysdep = &rx.home.link.sysdep;
                let cost = sysdep.heavy_fence_cost();
                let is_time = cost < DEAR || sysdep.now() >= *demotes_from;
                if is_time && rx.inbox.demote(|| sysdep.heavy_fence()) {
                    *demotes_from = sysdep.now() + cost * BETWEEN_DEMOTIONS;
                }
            }
        }
        if !tx.ended.is_empty() {
            for (ticket, value) in std::mem::take(&mut tx.ended) {
                sink.complete(ticket, Ok(value));
                events += 1;
            }
        }
        if rx.is_told_of_leaves() {
            events += rx.hear_of_leaves(sink);
        }
        events
    }

    #[inline]
    fn glance(&mut self, looks: u32) -> bool {
        let ShmPort { tx, rx, .. } = self;
        if !tx.ended.is_empty() {
            return true;
        }
        if !tx.is_blocked() {
            return rx.inbox.glance(looks);
        }
        // What waits for room in a lane goes on as soon as its reader has moved.
        (0..looks).any(|_| rx.inbox.glance(1) || tx.reader_moved())
    }

    #[inline]
    fn linger(&mut self, looks: u32, budget: usize, sink: &mut dyn Sink) -> Option<usize> {
        let ShmPort { tx, rx, .. } = self;
        // One lane as a rule: what is seen in it is drained then and there.
        if let [only] = *rx.inbox.polled()
            && tx.ended.is_empty()
            && !tx.is_blocked()
        {
            match rx.linger(only, looks, budget, tx, sink) {
                Lingered::Drained(count) => return Some(count),
                Lingered::InVain => return rx.inbox.is_announced().then(|| self.advance(budget, sink)),
                Lingered::Blind => {}
            }
        }
        self.glance(looks).then(|| self.advance(budget, sink))
    }

    fn arm(&mut self, waiting_for_room: bool) -> bool {
        let dear = self.fence_cost() >= DEAR;
        let ShmPort { tx, rx, watching, unsettled, .. } = self;
        if waiting_for_room {
            tx.set_waiting(true);
        }
        // Where nobody else writes to the arena, no other thread has a light fence to pair with, but for leases that are
        // returned, and puts to memory that tasks wait on.
        let alone = rx.alone && !waiting_for_room && !*watching;
        let leaves = rx.leaves_heard();
        let link = &rx.home.link;
        let busy = || tx.ends_a_sleep(waiting_for_room) || leaves != link.arena.leaves();
        let put_off = dear && !alone;
        let armed = if put_off {
            rx.inbox.arm_unsettled(|| fence(Ordering::SeqCst), busy)
        } else {
            let heavy_fence = || {
                if !alone {
                    link.sysdep.heavy_fence();
                }
            };
            rx.inbox.arm(heavy_fence, busy)
        };
        *unsettled = (armed && put_off).then_some(waiting_for_room);
        if !armed && waiting_for_room {
            tx.set_waiting(false);
        }
        armed
    }

    fn settles_within(&self) -> Option<Duration> {
        let (least, most) = SETTLED_WITHIN;
        self.unsettled.map(|_| (self.fence_cost() * PUT_OFF).clamp(least, most))
    }

    fn settle(&mut self) -> bool {
        let ShmPort { tx, rx, unsettled, .. } = self;
        let Some(waiting_for_room) = unsettled.take() else { return true };
        let leaves = rx.leaves_heard();
        let link = &rx.home.link;
        let busy = || tx.ends_a_sleep(waiting_for_room) || leaves != link.arena.leaves();
        let asleep = rx.inbox.settle(|| link.sysdep.heavy_fence(), busy);
        if !asleep && waiting_for_room {
            tx.set_waiting(false);
        }
        asleep
    }

    fn watch(&mut self, watching: bool) {
        self.watching = watching;
        self.rx.inbox.watch(watching);
    }

    fn disarm(&mut self) {
        self.unsettled = None;
        self.rx.inbox.disarm();
        self.tx.set_waiting(false);
    }

    fn has_packets_of(&self, rank: Rank) -> bool {
        let ShmPort { tx, rx, .. } = self;
        (0..tx.lanes.len()).any(|index| tx.home.endpoint(index).rank == rank && rx.inbox.has_any(index))
    }

    fn peer_down(&mut self, rank: Rank) {
        let ShmPort { tx, rx, .. } = self;
        for index in 0..tx.lanes.len() {
            if tx.home.endpoint(index).rank == rank {
                tx.kill(index);
                rx.inbox.kill(index);
            }
        }
    }

    fn leave(&mut self) {
        self.tx.home.link.context_leaves(self.tx.home.client);
    }
}
