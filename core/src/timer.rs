//! The timer wheel: one per context, for all deadlines.
//!
//! A hashed wheel (Varghese and Lauck 1987, scheme 6) of 512 slots of one millisecond; entries further ahead
//! than a turn wait for further turns in their slot. Setting costs O(1), and so does moving on by a tick, but for what expires
//! and for what shares its slot. Who is no longer waited for is taken out of all at once (`retain`).

use crate::slot::Ticket;
use slab::Slab;

const SLOTS: usize = 512;
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Entry {
    tick: u64,
    ticket: Ticket,
    previous: u32,
    next: u32,
}

/// Deadlines in milliseconds of the context's clock.
///
/// # Examples
/// ```
/// use posthaste_core::{slot::SlotPool, timer::TimerWheel};
///
/// let (_pool, mut completer) = SlotPool::new();
/// let mut wheel = TimerWheel::new(1000); // milliseconds
/// let [soon, late] = [1020, 9000].map(|at| {
///     let ticket = completer.alloc(None).expect("slots are free");
///     wheel.set(at, ticket);
///     ticket
/// });
/// let mut expired = Vec::new();
/// wheel.advance(1500, |ticket| expired.push(ticket));
/// assert_eq!((expired, wheel.len()), (vec![soon], 1));
/// wheel.retain(|ticket| ticket != late); // nobody waits for it any more
/// assert!(wheel.is_empty());
/// ```
#[derive(Debug)]
pub struct TimerWheel {
    heads: Box<[u32]>,
    entries: Slab<Entry>,
    now: u64,
    /// No entry expires before this tick; something may have been due then that was taken out.
    earliest: u64,
}

impl TimerWheel {
    /// An empty wheel that stands at `now` milliseconds.
    #[must_use]
    pub fn new(now: u64) -> Self {
        Self { heads: vec![NONE; SLOTS].into_boxed_slice(), entries: Slab::new(), now, earliest: u64::MAX }
    }

    /// Whether no timer is set.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Timers that are set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// When to look next, in milliseconds: no timer expires before.
    #[must_use]
    pub fn next_expiry(&self) -> Option<u64> {
        (!self.is_empty()).then_some(self.earliest.max(self.now))
    }

    /// Sets a timer for the tick `at` (in milliseconds); the past means the next tick.
    pub fn set(&mut self, at: u64, ticket: Ticket) {
        let tick = at.max(self.now + 1);
        let slot = tick as usize % SLOTS;
        let next = self.heads[slot];
        let index = self.entries.insert(Entry { tick, ticket, previous: NONE, next }) as u32;
        if let Some(entry) = self.entries.get_mut(next as usize) {
            entry.previous = index;
        }
        self.heads[slot] = index;
        self.earliest = self.earliest.min(tick);
    }

    /// Sets a timer for so many milliseconds after the time at which the wheel stands.
    pub(crate) fn set_in(&mut self, after: u64, ticket: Ticket) {
        self.set(self.now + after, ticket);
    }

    fn unlink(&mut self, index: u32) -> Option<Entry> {
        let entry = self.entries.try_remove(index as usize)?;
        match self.entries.get_mut(entry.previous as usize) {
            Some(previous) => previous.next = entry.next,
            None => self.heads[entry.tick as usize % SLOTS] = entry.next,
        }
        if let Some(next) = self.entries.get_mut(entry.next as usize) {
            next.previous = entry.previous;
        }
        Some(entry)
    }

    /// Moves on to `now` milliseconds and hands out the tickets whose time has come.
    pub fn advance(&mut self, now: u64, mut expired: impl FnMut(Ticket)) {
        if now <= self.now {
            return;
        }
        if self.is_empty() || now < self.earliest {
            self.now = now;
            return;
        }
        let first = self.earliest.max(self.now);
        let turns = (now - first + 1).min(SLOTS as u64);
        for step in 0..turns {
            let mut at = self.heads[(first + step) as usize % SLOTS];
            while let Some(entry) = self.entries.get(at as usize) {
                let next = entry.next;
                if entry.tick <= now
                    && let Some(entry) = self.unlink(at)
                {
                    expired(entry.ticket);
                }
                at = next;
            }
        }
        self.now = now;
        self.look_ahead();
    }

    /// Finds the next tick at which something expires, a turn ahead at most: what is due later is looked for then.
    fn look_ahead(&mut self) {
        if self.is_empty() {
            self.earliest = u64::MAX;
            return;
        }
        let turn = self.now + 1..=self.now + SLOTS as u64;
        self.earliest = turn.clone().find(|&tick| self.is_due(tick)).unwrap_or(*turn.end());
    }

    fn is_due(&self, tick: u64) -> bool {
        let mut at = self.heads[tick as usize % SLOTS];
        while let Some(entry) = self.entries.get(at as usize) {
            if entry.tick == tick {
                return true;
            }
            at = entry.next;
        }
        false
    }

    /// Takes out the timers of all tickets that nobody waits for any more.
    pub fn retain(&mut self, mut wanted: impl FnMut(Ticket) -> bool) {
        let over: Vec<u32> = self
            .entries
            .iter()
            .filter(|(_, entry)| !wanted(entry.ticket))
            .map(|(index, _)| index as u32)
            .collect();
        for index in over {
            self.unlink(index);
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn ticket(n: u64) -> Ticket {
        Ticket::from_word(n + 1).expect("not zero")
    }

    #[test]
    fn agrees_with_a_sorted_map() {
        let mut wheel = TimerWheel::new(0);
        let mut model: BTreeSet<(u64, u64)> = BTreeSet::new();
        let mut seed = 0x2545_f491_4f6c_dd1du64;
        let mut random = |n: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % n
        };
        let mut now = 0;
        for step in 0..20_000u64 {
            match random(4) {
                0 | 1 => {
                    let at = now + random(2000);
                    wheel.set(at, ticket(step));
                    model.insert((at.max(now + 1), step));
                }
                2 if random(50) == 0 => {
                    let odd = |ticket: Ticket| !(ticket.to_word() - 1).is_multiple_of(2);
                    wheel.retain(odd);
                    model.retain(|&(_, id)| !id.is_multiple_of(2));
                    assert_eq!(wheel.len(), model.len());
                }
                2 => {
                    let chosen = random(model.len().max(1) as u64) as usize;
                    if let Some(&(at, id)) = model.iter().nth(chosen) {
                        model.remove(&(at, id));
                        wheel.retain(|other| other != ticket(id));
                    }
                }
                _ => {
                    now += random(40);
                    let mut seen = Vec::new();
                    wheel.advance(now, |t| seen.push(t.to_word() - 1));
                    let rest = model.split_off(&(now + 1, 0));
                    let mut expected: Vec<u64> = model.iter().map(|&(_, id)| id).collect();
                    model = rest;
                    seen.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(seen, expected, "at {now}");
                    assert!(wheel.next_expiry().is_none() == model.is_empty());
                    if let (Some(next), Some((first, _))) = (wheel.next_expiry(), model.first()) {
                        assert!(now < next && next <= *first, "{next} for {first} at {now}");
                    }
                }
            }
        }
    }
}
