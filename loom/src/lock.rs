//! The lock that is made of a progress token.

use crate::bounded;
use loom::sync::atomic::{Ordering, fence};
use loom::thread;
use posthaste_core::lock::BiasedLock;
use std::sync::Arc;

/// The value lies in a cell of loom's: two at once, or one who does not see what the last one did, fail the model.
fn take_turns(lock: BiasedLock<u32>, times: u32) {
    let lock = Arc::new(lock);
    let add = |times: u32| {
        let lock = lock.clone();
        move || (0..times).for_each(|_| *lock.lock() += 1)
    };
    let other = thread::spawn(add(1));
    add(times)();
    other.join().expect("no panic");
    assert_eq!(*lock.lock(), times + 1);
}

#[test]
fn two_threads_take_turns() {
    bounded(3, || take_turns(BiasedLock::new(0, None), 2));
}

#[test]
fn the_owner_of_the_bias_and_another_take_turns() {
    bounded(3, || take_turns(BiasedLock::biased_after(0, 1, Box::new(|| fence(Ordering::SeqCst))), 3));
}
