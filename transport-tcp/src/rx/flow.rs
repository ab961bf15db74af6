//! Whether long messages come as a stream: one behind the other, and nobody waits for an answer to any of them. How fast long
//! payloads come.

use std::time::{Duration, Instant};

/// Long messages in a row, to none of which anything was said, from which on more are expected at once.
const ENOUGH: u32 = 8;

/// The long messages of one peer.
#[derive(Debug, Default)]
pub(super) struct Flow {
    row: u32,
    /// Bytes that had been said to the peer when the last one came.
    said: u64,
}

impl Flow {
    /// One more begins, when so many bytes had been said to its sender in all. True: more are expected, so that whoever has read
    /// all of it may rest before it looks again.
    pub fn goes_on(&mut self, said: u64) -> bool {
        self.row = if said == self.said { self.row.saturating_add(1) } else { 0 };
        self.said = said;
        self.row >= ENOUGH
    }

    /// Nothing came during a rest: it has to be earned anew.
    pub fn dries(&mut self) {
        self.row = 0;
    }
}

/// The longest rest.
const MOST: Duration = Duration::from_micros(20);
/// Payloads that take longer do not come in one row.
const PAUSE: Duration = Duration::from_micros(200);

/// How long a connection is left alone that brings a row of long payloads faster than they are sent: about as long as one of them
/// takes to come. Each look on its own costs both sides a good part of what a payload does; and while nobody looks, the sender has
/// only so much left to send. Twice as long was measured to cost gets of 64 KiB a fifth of their bandwidth, and those of 16 KiB,
/// for which it is ten times as long as for one of them, a third.
#[derive(Debug)]
pub(super) struct Pace {
    /// When the last rest began, and how many have come since.
    last: Option<Instant>,
    came: u32,
    /// How long one takes, by those of late.
    each: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { last: None, came: 0, each: MOST / 4 }
    }
}

impl Pace {
    /// So many have come.
    pub fn come(&mut self, count: usize) {
        self.came = self.came.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Nothing comes for now.
    pub fn pause(&mut self) {
        (self.last, self.came) = (None, 0);
    }

    /// Until when to rest.
    pub fn rest(&mut self, now: Instant) -> Instant {
        let came = std::mem::take(&mut self.came).max(1);
        if let Some(last) = self.last.replace(now) {
            let took = now.saturating_duration_since(last) / came;
            if took < PAUSE {
                self.each = (self.each * 7 + took) / 8;
            }
        }
        now + self.each.min(MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_is_as_long_as_a_payload_takes() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        let first = pace.rest(now);
        assert!(first > now && first <= now + MOST);
        for micros in [2, 9, 16, 3, 60] {
            let each = Duration::from_micros(micros);
            for came in [1, 2, 5].into_iter().cycle().take(60) {
                // Between rows there may be any time.
                now += Duration::from_millis(3);
                pace.come(1);
                pace.rest(now);
                // By several looks, behind the last of which is a rest.
                now += each * came;
                (0..came).for_each(|_| pace.come(1));
                pace.rest(now);
            }
            pace.come(1);
            let rest = pace.rest(now + each) - (now + each);
            let expected = each.min(MOST);
            assert!(
                rest >= expected.mul_f64(0.99) && rest <= expected.mul_f64(1.01),
                "{rest:?}, not {expected:?}"
            );
        }
    }

    #[test]
    fn who_is_answered_or_slow_is_not_left_alone() {
        let mut flow = Flow::default();
        // Each message is answered.
        assert!((0..100).all(|round| !flow.goes_on(round * 16)));
        // One behind the other, none answered.
        let rests: Vec<bool> = (0..12).map(|_| flow.goes_on(99 * 16)).collect();
        assert_eq!(rests.iter().position(|rest| *rest), Some(ENOUGH as usize - 1));
        assert!(rests[ENOUGH as usize..].iter().all(|rest| *rest));
        // They come so slowly that the rest was in vain: one in so many rests at most.
        let mut rested = 0;
        for _ in 0..90 {
            if flow.goes_on(99 * 16) {
                rested += 1;
                flow.dries();
            }
        }
        assert!(rested <= 90 / ENOUGH as usize + 1, "{rested}");
        // An answer in their midst ends it.
        (0..20).for_each(|_| {
            flow.goes_on(99 * 16);
        });
        assert!(!flow.goes_on(100 * 16));
    }
}
