//! Answers that are not written yet, so that a peer which asks and does not read is bounded.

use crate::frame::HEADER;
use crate::link::GET_COST;
use std::collections::VecDeque;

/// The answers that wait for one peer.
#[derive(Debug, Default)]
pub(crate) struct Answering {
    /// Where each ends in the stream, and what it counts for.
    ends: VecDeque<(u64, u64)>,
    bytes: u64,
}

impl Answering {
    /// So many bytes have left: the answers that end there are written.
    pub fn passed(&mut self, bytes: u64) {
        while let Some(&(_, cost)) = self.ends.front().filter(|(end, _)| *end <= bytes) {
            self.bytes -= cost;
            self.ends.pop_front();
        }
    }

    /// Counts an answer of so many bytes. False: the peer asks for more than a correct one has room for.
    pub fn counts(&mut self, len: u64, window: u64) -> bool {
        // A correct peer has had all of what was written, so that what is not even that is less than its window.
        let fits = self.bytes.saturating_add(len).saturating_add(GET_COST) <= window;
        if fits {
            self.bytes += len + GET_COST;
        }
        fits
    }

    /// Answers that were counted are on their way, one behind the other: of each what was asked for and what it brings, and
    /// where the last one ends. What is gone already ends where the stream is, or before.
    pub fn end_at(&mut self, end: u64, answers: impl Iterator<Item = (u64, usize)> + Clone) {
        let frame = |brings: usize| (HEADER + brings) as u64;
        let mut behind: u64 = answers.clone().map(|(_, brings)| frame(brings)).sum();
        for (asked, brings) in answers {
            behind -= frame(brings);
            self.ends.push_back((end.saturating_sub(behind), asked + GET_COST));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_may_ask_again_as_soon_as_its_answer_has_left() {
        let mut answering = Answering::default();
        let window = 3 * GET_COST + 600;
        // Three together, of which the memory of one is not there: all that waits.
        let asked = [(100, 100), (200, 0), (300, 300)];
        assert!(asked.iter().all(|(len, _)| answering.counts(*len, window)));
        assert!(!answering.counts(0, window) && !answering.counts(u64::MAX, window));
        let frames = (3 * HEADER + 400) as u64;
        answering.end_at(1000 + frames, asked.into_iter());
        let ends = [HEADER + 100, 2 * HEADER + 100, 3 * HEADER + 400].map(|end| 1000 + end as u64);
        for (end, (len, _)) in ends.into_iter().zip(asked) {
            answering.passed(end - 1);
            assert!(!answering.counts(len, window), "before its answer has left");
            answering.passed(end);
            assert!(answering.counts(len, window));
            answering.end_at(u64::MAX, [(len, 0)].into_iter());
        }
        // Of a run, the kernel took all but the last 10 bytes at once.
        let mut answering = Answering::default();
        assert!([400, 200].into_iter().all(|len| answering.counts(len, 2 * GET_COST + 600)));
        answering.end_at(1010, [(400, 400), (200, 200)].into_iter());
        answering.passed(1000);
        assert!(answering.counts(400, 2 * GET_COST + 600) && !answering.counts(0, 2 * GET_COST + 600));
    }
}
