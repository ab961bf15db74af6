//! Tokio's cooperative budget, spent in proportion to time.
//!
//! A task may do 128 things before Tokio has it let others run, and a thing is meant to be about a microsecond's work, such as a
//! read of a socket. An operation on shared memory takes a hundredth of that, and letting others run takes as long as fifty of
//! them; a copy of some MiB takes hundreds of times as long. So what is done is added up, and a unit of the budget is spent for
//! each microsecond of it: before the next thing is begun, because only then can its task be told to wait.

use std::cell::Cell;
use std::task::{Context, Poll, ready};
use tokio::task::coop::poll_proceed;

/// What a unit of the budget is worth: about a microsecond, in nanoseconds or nearly so, as are the others.
pub const UNIT: u32 = 1024;
/// An access to a word of mapped memory.
pub const ACCESS: u32 = 64;
/// A message given to the device, and the like.
pub const MESSAGE: u32 = 128;
/// A wait that ended while it was looked for the first time.
pub const QUICK_WAIT: u32 = 256;
/// Any other wait.
pub const WAIT: u32 = UNIT;

/// Bytes that are copied in one of these.
const BYTES: usize = 32;
/// A quarter of what a task has. What else was done is not held against the next operation, which may be another task's.
const MOST: u32 = 32 * UNIT;

thread_local! {
    /// What was done on this thread and has not been paid for. Tasks that take turns may pay for each other.
    static DEBT: Cell<u32> = const { Cell::new(0) };
}

/// Whether the task may go on; if not, it is polled again once others have had their turn. To be asked before each operation.
#[inline(always)]
pub fn proceed(cx: &mut Context<'_>) -> Poll<()> {
    if is_solvent() { Poll::Ready(()) } else { pay(cx) }
}

/// Whether [`proceed`] has nothing to pay for.
#[inline(always)]
#[must_use]
pub fn is_solvent() -> bool {
    DEBT.get() < UNIT
}

#[cold]
#[inline(never)]
fn pay(cx: &mut Context<'_>) -> Poll<()> {
    while let Some(less) = DEBT.get().checked_sub(UNIT) {
        // The debt stays where there is nothing to pay it with: whatever is polled behind this in the same turn must not be
        // begun before it.
        ready!(poll_proceed(cx)).made_progress();
        DEBT.set(less);
    }
    Poll::Ready(())
}

/// Something was done that takes about so long, in nanoseconds.
#[inline(always)]
pub fn spend(time: u32) {
    // `LocalKey::set` is not inlined, and this is in the way of every access.
    DEBT.with(|debt| debt.set((debt.get() + time).min(MOST)));
}

/// The same, and so many bytes were copied.
#[inline(always)]
pub fn spend_on(time: u32, bytes: usize) {
    spend(time + (bytes / BYTES).min(MOST as usize) as u32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    /// How many of these operations a task does in one turn.
    fn in_one_turn(operation: impl Fn()) -> usize {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        DEBT.set(0);
        runtime.block_on(poll_fn(|cx| {
            let mut done = 0;
            while proceed(cx).is_ready() {
                operation();
                done += 1;
            }
            assert!(proceed(cx).is_pending(), "nor may what follows in this turn be begun");
            Poll::Ready(done)
        }))
    }

    #[test]
    fn a_turn_takes_as_long_whatever_is_done_in_it() {
        assert_eq!(in_one_turn(|| spend(WAIT)), 129);
        assert_eq!(in_one_turn(|| spend(ACCESS)), 129 * 16);
        assert_eq!(in_one_turn(|| spend_on(ACCESS, 8)), 129 * 16);
        assert_eq!(in_one_turn(|| spend_on(ACCESS, 1 << 20)), 5);
        assert_eq!(in_one_turn(|| spend_on(ACCESS, 1 << 30)), 5, "a part of a turn");
        assert!(DEBT.get() <= MOST, "whoever comes next owes a part of a turn");
    }
}
