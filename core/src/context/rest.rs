//! When the driver of a runtime with several threads leaves the looking to others.
//!
//! On such a runtime a driver that is polled again and again takes a core from the tasks that wait and look themselves. While
//! they do, it rests for a millisecond at a time, and no peer rings meanwhile. So whoever ceases to look has to hand the
//! looking over: what comes in then would else be seen when the rest is over.

use super::Shared;
use std::sync::atomic::{AtomicU8, Ordering};

/// Waits that others have ended meanwhile, for it to be likely that they go on and on.
const MANY: u32 = 8;
/// So often in a row that was seen before waits that end well end no rest any more.
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

    /// The driver rests no more. Returns whether somebody has handed the looking over to it.
    pub fn end(&self) -> bool {
        self.0.swap(Rest::None as u8, Ordering::Relaxed) == Rest::None as u8
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
    /// Others were found to look at its last look. Who did may be through: if not, that is seen at the next one, too.
    once: bool,
    /// How often in a row others ended many waits while it rested.
    trust: u32,
    /// Rests behind each other without a look.
    unseen: u32,
}

impl Attendance {
    pub fn new() -> Attendance {
        Attendance { seen: 0, rest: Rest::None, once: false, trust: 0, unseen: 0 }
    }

    /// The driver is awake. Returns whether it can go on resting without a look, because others still look.
    pub fn awake(&mut self, resting: &Resting, attended: u32) -> bool {
        let rested = std::mem::replace(&mut self.rest, Rest::None);
        if rested == Rest::None {
            return false;
        }
        let handed_over = resting.end();
        let many = attended.wrapping_sub(self.seen) >= MANY;
        self.trust = if many { self.trust.saturating_add(1) } else { 0 };
        self.once = !handed_over;
        let goes_on = many && !handed_over && self.unseen < UNSEEN;
        self.unseen = if goes_on { self.unseen + 1 } else { 0 };
        if goes_on {
            self.seen = attended;
        }
        goes_on
    }

    /// Whether others look, given the count of their waits, and whether the driver itself has moved anything; not, if others
    /// were at the context.
    pub fn others_look(&mut self, attended: u32, moved: Option<bool>) -> bool {
        let attend = std::mem::replace(&mut self.seen, attended) != attended;
        match moved {
            Some(true) => {
                self.once = false;
                false
            }
            Some(false) if !attend => {
                self.trust = 0;
                self.once = false;
                false
            }
            _ => std::mem::replace(&mut self.once, true),
        }
    }

    /// The driver rests now.
    pub fn rest(&mut self, resting: &Resting) {
        self.rest = if self.trust >= TRUSTING { Rest::UntilIdle } else { Rest::UntilAttended };
        resting.begin(self.rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver, the count of the waits of others, and who rests.
    struct Driver {
        attendance: Attendance,
        resting: Resting,
        attended: u32,
    }

    impl Driver {
        fn new() -> Driver {
            Driver { attendance: Attendance::new(), resting: Resting::default(), attended: 0 }
        }

        /// A round behind so many waits of others: whether it rests behind it.
        fn round(&mut self, waits: u32, moved: Option<bool>) -> bool {
            self.attended += waits;
            let rests = self.attendance.awake(&self.resting, self.attended)
                || self.attendance.others_look(self.attended, moved);
            if rests {
                self.attendance.rest(&self.resting);
            }
            rests
        }

        /// What [`Shared::hand_over`] does; whether the driver is woken.
        fn hand_over(&self, why: Rest) -> bool {
            self.resting.0.load(Ordering::Relaxed) >= why as u8 && !self.resting.end()
        }
    }

    #[test]
    fn it_rests_once_others_have_been_seen_to_look_twice() {
        let mut driver = Driver::new();
        assert!(!driver.round(1, Some(false)), "that task may be through");
        assert!(!driver.round(0, Some(false)), "it was");
        assert!(!driver.round(1, Some(true)), "it has moved something itself");
        assert!(!driver.round(1, Some(false)));
        assert!(driver.round(1, Some(false)), "others go on looking");
        let mut driver = Driver::new();
        assert!(!driver.round(0, None), "who is there may not wait");
        assert!(driver.round(0, None));
    }

    #[test]
    fn who_ceases_to_look_ends_the_rest() {
        let mut driver = Driver::new();
        assert!(!driver.hand_over(Rest::UntilIdle), "it does not rest");
        for why in [Rest::UntilIdle, Rest::UntilAttended] {
            driver.round(1, None);
            assert!(driver.round(1, None));
            assert!(driver.hand_over(why) && !driver.hand_over(why), "it is woken once");
            assert!(!driver.round(1, Some(false)), "who has handed over may be through");
            assert!(!driver.round(0, Some(false)), "and was");
        }
    }

    #[test]
    fn who_goes_on_and_on_is_asked_no_more() {
        let mut driver = Driver::new();
        driver.round(1, None);
        assert!(driver.round(1, None));
        for _ in 0..TRUSTING {
            assert!(driver.hand_over(Rest::UntilAttended));
            assert!(!driver.round(MANY, None), "it asks once more");
            assert!(driver.round(1, None));
        }
        assert!(!driver.hand_over(Rest::UntilAttended), "the next wait will follow");
        for _ in 0..UNSEEN {
            assert!(driver.round(MANY, None), "without a look");
        }
        assert_eq!(driver.attendance.unseen, UNSEEN);
        assert!(driver.round(MANY, Some(false)), "with one");
        assert_eq!(driver.attendance.unseen, 0);
        assert!(driver.hand_over(Rest::UntilIdle), "who goes to sleep hands over in any case");
        // Few waits in a rest are no reason to trust those who wait.
        driver.round(1, None);
        assert!(driver.round(1, None) && driver.hand_over(Rest::UntilAttended));
        // Nor do they replace a look.
        let mut driver = Driver::new();
        driver.round(1, None);
        assert!(driver.round(1, None));
        driver.attended += MANY - 1;
        assert!(!driver.attendance.awake(&driver.resting, driver.attended));
    }
}
