//! loom models of the lock-free protocols: lane, sleep and wake-up, page grants, progress token, completion slots,
//! boards, counts.
//!
//! The models run the code of `posthaste-core` and `posthaste-shm` itself, compiled against loom's atomics:
//!
//! ```text
//! RUSTFLAGS="--cfg posthaste_loom" CARGO_TARGET_DIR=target/loom cargo test -p posthaste-loom --release
//! ```
//! Without the cfg this package is empty. Three rules of loom shape the models: a thread must come to an end, so
//! whoever waits for something gives up after a few looks and the model's end looks at what is left; a lost wake-up is
//! found by asking, once all threads are through, whether somebody sleeps with work before him and no ring behind
//! him; and sequential consistency exists for fences only (see `memory.rs`).

#[cfg(all(test, posthaste_loom))]
mod board;
#[cfg(all(test, posthaste_loom))]
mod count;
#[cfg(all(test, posthaste_loom))]
mod grant;
#[cfg(all(test, posthaste_loom))]
mod kin;
#[cfg(all(test, posthaste_loom))]
mod lane;
#[cfg(posthaste_loom)]
pub mod memory;
#[cfg(all(test, posthaste_loom))]
mod passage;
#[cfg(all(test, posthaste_loom))]
mod sleep;
#[cfg(all(test, posthaste_loom))]
mod slot;
#[cfg(all(test, posthaste_loom))]
mod token;

/// Checks a model over all executions, and all values that a load may see in them.
#[cfg(posthaste_loom)]
pub fn model(check: impl Fn() + Send + Sync + 'static) {
    explore(None, check);
}

/// Checks a model over the executions with at most so many preemptions: for those with too many executions.
#[cfg(posthaste_loom)]
pub fn bounded(preemptions: usize, check: impl Fn() + Send + Sync + 'static) {
    explore(Some(preemptions), check);
}

#[cfg(posthaste_loom)]
fn explore(preemptions: Option<usize>, check: impl Fn() + Send + Sync + 'static) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 20_000;
    let executions = std::sync::Arc::new(AtomicUsize::new(0));
    let counter = executions.clone();
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        check();
    });
    println!("{} executions", executions.load(Ordering::Relaxed));
}
