//! A task of one context goes to sleep while what it waits for comes in through another.

use crate::model;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use posthaste_core::context::Watchers;
use posthaste_core::sync::{Arc, LightFence};

fn sleep_and_write(heavy: fn()) {
    model(move || {
        let watchers = Arc::new(Watchers::new(LightFence::Compiler));
        let (memory, rung) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let writer = {
            let (watchers, memory, rung) = (watchers.clone(), memory.clone(), rung.clone());
            thread::spawn(move || {
                memory.store(1, Ordering::Relaxed);
                if watchers.are_more_than(0) {
                    rung.store(1, Ordering::Relaxed);
                }
            })
        };
        watchers.begin(heavy);
        let seen = memory.load(Ordering::Relaxed);
        writer.join().expect("no panic");
        assert!(seen == 1 || rung.load(Ordering::Relaxed) == 1, "lost wake-up");
        watchers.end();
        assert!(!watchers.are_more_than(0));
    });
}

#[test]
fn who_waits_on_memory_sees_it_or_is_rung_for() {
    sleep_and_write(|| fence(Ordering::SeqCst));
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn without_the_heavy_fence_what_another_context_brings_in_is_missed() {
    sleep_and_write(|| {});
}
