//! The doorbell of a context: readiness of its sockets while it sleeps, and what other tasks have for it at any time.

use crate::watch::Alarm;
use atomic_waker::AtomicWaker;
use posthaste_core::device::Doorbell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

/// Wakes the driver of one context.
#[derive(Debug)]
pub(crate) struct Bell {
    alarm: Alarm,
    rung: AtomicBool,
    sleeper: AtomicWaker,
}

impl Bell {
    pub fn new(alarm: Alarm) -> Bell {
        Bell { alarm, rung: AtomicBool::new(false), sleeper: AtomicWaker::new() }
    }

    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Rings, whether the port sleeps or not. From any thread.
    pub fn ring(&self) {
        // Release pairs with the swap of `poll_ring`.
        self.rung.store(true, Ordering::Release);
        self.sleeper.wake();
    }
}

impl Doorbell for Bell {
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.sleeper.register(cx.waker());
        if self.rung.swap(false, Ordering::AcqRel) {
            return Poll::Ready(Ok(()));
        }
        self.alarm.poll(cx)
    }
}
