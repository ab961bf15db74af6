//! When the driver of a runtime with several threads leaves the looking to others.
//!
//! On such a runtime a driver that is polled again and again takes a core from the tasks that wait and look themselves. While
//! they do, it rests for a millisecond at a time, and no peer rings meanwhile. So whoever ceases to look has to hand the
//! looking over: what comes in then would else be seen when the rest is over.

use super::Shared;
use std::sync::atomic::{AtomicU8, Ordering};

/// Rests behind each other after which waits that end well do not end them any more: their tasks go on and on.
const TRUSTING: u32 = 3;
/// Rests behind each other after which the driver looks in any case.
const UNSEEN: u32 = 8;

/// What ends a rest of the driver early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Rest {
    /// It does not rest.
    None = 0,
    /// A task that ceases to look before its wait is over.
    UntilIdle = 1,
    /// That, or the end of a wait: nobody can tell whether there will be another.
    UntilAttended = 2,
}

/// Whether the driver rests.
#[derive(Debug, Default)]
pub(super) struct Resting(AtomicU8);

impl Resting {
    /// The driver rests.
    pub fn begin(&self, rest: Rest) {
        self.0.store(rest as u8, Ordering::Relaxed);
    }

    /// The driver is awake. Returns whether somebody has handed the looking over to it.
    pub fn end(&self, rested: Rest) -> bool {
        rested != Rest::None && self.0.swap(Rest::None as u8, Ordering::Relaxed) == Rest::None as u8
    }
}

impl Shared {
    /// A wait goes on looking, or has looked until it was over. What two threads count at once may be counted once.
    #[inline(always)]
    pub(super) fn attend(&self) {
        self.attended.store(self.attended().wrapping_add(1), Ordering::Relaxed);
    }

    /// How often [`attend`](Self::attend) was called, roughly.
    #[inline(always)]
    pub(super) fn attended(&self) -> u32 {
        self.attended.load(Ordering::Relaxed)
    }

    /// Whoever looked ceases to, for that reason.
    #[inline(always)]
    pub(super) fn hand_over(&self, why: Rest) {
        if self.resting.0.load(Ordering::Relaxed) >= why as u8 {
            self.end_rest();
        }
    }

    #[cold]
    #[inline(never)]
    fn end_rest(&self) {
        if self.resting.0.swap(Rest::None as u8, Ordering::Relaxed) != Rest::None as u8 {
            self.driver.wake();
        }
    }
}

/// Who looks, as the driver has seen it.
#[derive(Debug)]
pub(super) struct Attendance {
    /// What it had counted of their waits when it looked last.
    seen: u32,
    rest: Rest,
    asked: Asked,
    /// Rests since nobody was found to look who had handed over.
    rests: u32,
    /// Rests behind each other without a look.
    unseen: u32,
}

/// How far the driver is with finding out whether who has handed over is through: if not, another of its waits ends before
/// the driver looks for the second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    No,
    First,
    Second,
}

impl Attendance {
    pub fn new() -> Attendance {
        Attendance { seen: 0, rest: Rest::None, asked: Asked::No, rests: 0, unseen: 0 }
    }

    /// The driver is awake. Returns whether it can go on resting without a look, because others still look.
    pub fn awake(&mut self, resting: &Resting, attended: u32) -> bool {
        let rested = std::mem::replace(&mut self.rest, Rest::None);
        let handed_over = resting.end(rested);
        if rested != Rest::None && !handed_over && attended != self.seen && self.unseen < UNSEEN {
            self.seen = attended;
            self.unseen += 1;
            return true;
        }
        self.unseen = 0;
        self.asked = match self.asked {
            _ if handed_over => Asked::First,
            Asked::First => Asked::Second,
            _ => Asked::No,
        };
        false
    }

    /// Whether others look, given the count of their waits and whether the driver itself has moved anything.
    pub fn others_look(&mut self, attended: u32, moved: bool) -> bool {
        let ended = std::mem::replace(&mut self.seen, attended) != attended;
        if self.asked == Asked::Second && !ended {
            self.rests = 0;
        }
        ended && !moved && self.asked != Asked::First
    }

    /// The driver rests now.
    pub fn rest(&mut self, resting: &Resting) {
        self.rests = self.rests.saturating_add(1);
        self.rest = if self.rests > TRUSTING { Rest::UntilIdle } else { Rest::UntilAttended };
        resting.begin(self.rest);
    }
}
