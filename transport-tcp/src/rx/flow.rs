//! Whether long messages come as a stream: one behind the other, and nobody waits for an answer to any of them.

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

#[cfg(test)]
mod tests {
    use super::*;

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
