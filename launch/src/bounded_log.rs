//! Logging of what strangers cause, at a rate that they cannot raise.

use std::time::{Duration, Instant};

/// At most this many lines in each second.
const LINES_PER_SECOND: u32 = 5;

/// Counts lines per second, and those that were left out.
#[derive(Debug)]
pub(crate) struct BoundedLog {
    second: Instant,
    lines: u32,
    left_out: u64,
}

impl BoundedLog {
    pub(crate) fn new(now: Instant) -> Self {
        Self { second: now, lines: 0, left_out: 0 }
    }

    /// Whether to write a line now, and then how many were left out before it.
    pub(crate) fn line(&mut self, now: Instant) -> Option<u64> {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.lines = 0;
        }
        if self.lines == LINES_PER_SECOND {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_not_written() {
        let start = Instant::now();
        let mut log = BoundedLog::new(start);
        let written = (0..1000).filter(|_| log.line(start).is_some()).count();
        assert_eq!(written, 5);
        assert_eq!(log.line(start + Duration::from_secs(1)), Some(995));
        assert_eq!(log.line(start + Duration::from_secs(1)), Some(0));
    }
}
