//! Logging at a bounded rate: strangers must not fill disks.

use posthaste_core::sync::{Mutex, lock};
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_secs(1);

/// Lets one event per second through and counts the others.
#[derive(Debug, Default)]
pub(crate) struct Throttle(Mutex<(Option<Instant>, u64)>);

impl Throttle {
    /// `Some`: it may be told, and so many were not told before it.
    pub fn pass(&self) -> Option<u64> {
        let mut state = lock(&self.0);
        let now = Instant::now();
        if state.0.is_some_and(|last| now < last + PERIOD) {
            state.1 += 1;
            return None;
        }
        state.0 = Some(now);
        Some(std::mem::take(&mut state.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_told_once() {
        let throttle = Throttle::default();
        assert_eq!((throttle.pass(), throttle.pass(), throttle.pass()), (Some(0), None, None));
        lock(&throttle.0).0 = Instant::now().checked_sub(PERIOD);
        assert_eq!(throttle.pass(), Some(2));
    }
}
