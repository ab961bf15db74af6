//! One thread is amid an access to memory that another one takes back.

use crate::model;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use posthaste_core::passage::Seat;
use posthaste_core::sync::{Arc, LightFence};

struct World {
    seat: Seat,
    closed: AtomicU32,
    memory: UnsafeCell<u32>,
}

/// loom complains of an access to the memory that is not ordered with the one that takes it back.
fn access_and_take_back(heavy: fn(), wait: bool) {
    model(move || {
        let world =
            Arc::new(World { seat: Seat::new(), closed: AtomicU32::new(0), memory: UnsafeCell::new(0) });
        let access = {
            let world = world.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    let _sitting = world.seat.take(LightFence::Compiler);
                    if world.closed.load(Ordering::Relaxed) == 0 {
                        // SAFETY: that nobody else is at it is what the model is about.
                        world.memory.with_mut(|memory| unsafe { *memory += 1 });
                    }
                }
            })
        };
        world.closed.store(1, Ordering::Relaxed);
        heavy();
        if wait && let Some(turn) = world.seat.turn() {
            while world.seat.is_amid(turn) {
                thread::yield_now();
            }
        }
        // SAFETY: as above.
        world.memory.with_mut(|memory| unsafe { *memory = 7 });
        access.join().expect("no panic");
        // SAFETY: the other thread has ended.
        assert_eq!(world.memory.with(|memory| unsafe { *memory }), 7, "written after it was taken back");
    });
}

#[test]
fn memory_is_taken_back_when_nobody_is_amid_an_access() {
    access_and_take_back(|| fence(Ordering::SeqCst), true);
}

#[test]
#[should_panic]
fn without_the_heavy_fence_an_access_is_missed() {
    access_and_take_back(|| {}, true);
}

#[test]
#[should_panic]
fn without_waiting_an_access_is_cut_short() {
    access_and_take_back(|| fence(Ordering::SeqCst), false);
}
