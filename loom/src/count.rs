//! Handlers count without a locked instruction, and tasks wait for the count.

use crate::bounded;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use posthaste_core::count::Count;
use posthaste_core::token::TokenCell;
use std::sync::Arc;

/// The token of the context, whose posted work is to look at the count.
type Cell = TokenCell<(), ()>;

#[derive(Clone)]
struct Parts {
    cell: Arc<Cell>,
    count: Arc<Count>,
    woken: Arc<AtomicU32>,
}

impl Parts {
    fn new(cell: Cell) -> Parts {
        let woken = Arc::new(AtomicU32::new(0));
        Parts { cell: Arc::new(cell), count: Arc::new(Count::default()), woken }
    }

    fn wake(&self) {
        if self.count.value() > 0 {
            self.woken.store(1, Ordering::Relaxed);
        }
    }

    fn finish(&self, guard: posthaste_core::token::Guard<'_, (), ()>) {
        guard.finish(|(), ()| self.wake());
    }

    /// A handler that counts, if its thread gets the token.
    fn handle(&self) -> bool {
        let Some(guard) = self.cell.try_take() else { return false };
        if self.count.add_inside(1) {
            self.wake();
        }
        self.finish(guard);
        true
    }

    /// What a `Counter` does for who begins to wait.
    fn pass_through(&self) {
        match self.cell.try_take() {
            Some(guard) => self.finish(guard),
            None => {
                if let Some(guard) = self.cell.post(()) {
                    self.finish(guard);
                }
            }
        }
    }

    /// Begins to wait; whether what it waits for is there already.
    fn wait(&self, passes_through: bool) -> bool {
        self.count.set_least(Some(1));
        if passes_through {
            self.pass_through();
        }
        self.count.value() > 0
    }
}

fn count_and_wait(cell: impl Fn() -> Cell + Send + Sync + 'static, passes_through: bool) {
    bounded(4, move || {
        let parts = Parts::new(cell());
        let adder = {
            let parts = parts.clone();
            thread::spawn(move || parts.handle())
        };
        let seen = parts.wait(passes_through);
        let added = adder.join().expect("no panic");
        assert!(!added || seen || parts.woken.load(Ordering::Relaxed) == 1, "lost wake-up");
    });
}

fn biased() -> Cell {
    TokenCell::biased((), 1, Box::new(|| fence(Ordering::SeqCst)))
}

#[test]
fn who_waits_sees_what_a_handler_counts_or_is_woken() {
    count_and_wait(|| Cell::new(()), true);
}

#[test]
fn who_waits_takes_the_bias_away_and_sees_the_count() {
    count_and_wait(biased, true);
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn who_does_not_come_behind_the_handler_misses_what_it_counts() {
    count_and_wait(|| Cell::new(()), false);
}

/// The same with a handler that has run before, so that its thread has the bias.
#[test]
fn a_handler_with_the_bias_is_not_missed() {
    bounded(3, || {
        let parts = Parts::new(biased());
        let waiter = {
            let parts = parts.clone();
            thread::spawn(move || parts.wait(true))
        };
        let mut added = 0;
        for _ in 0..3 {
            added += u64::from(parts.handle());
        }
        let seen = waiter.join().expect("no panic");
        assert_eq!(parts.count.value(), added, "nothing is lost of what is counted");
        assert!(added == 0 || seen || parts.woken.load(Ordering::Relaxed) == 1, "lost wake-up");
    });
}

/// Who adds from anywhere, under a fence.
#[test]
fn who_waits_sees_what_is_added_from_outside_or_is_woken() {
    bounded(4, || {
        let parts = Parts::new(Cell::new(()));
        let adder = {
            let parts = parts.clone();
            thread::spawn(move || {
                if parts.count.add(1) {
                    parts.wake();
                }
            })
        };
        let seen = parts.wait(false);
        adder.join().expect("no panic");
        assert!(seen || parts.woken.load(Ordering::Relaxed) == 1, "lost wake-up");
    });
}

/// Two add at once, a handler and another thread, and a task waits for what both make. The other one is the first to add from
/// outside, and comes behind the handler or not; or, if nothing is said of that, it is not the first.
fn two_add(looks_under_the_lock: bool, passes_through: Option<bool>) {
    bounded(3, move || {
        let parts = Parts::new(Cell::new(()));
        let waiter = Arc::new(loom::sync::Mutex::new(false));
        let wake = {
            let (parts, waiter) = (parts.clone(), waiter.clone());
            Arc::new(move || {
                let before = parts.count.value();
                let waits = waiter.lock().expect("nobody panics with it");
                let value = if looks_under_the_lock { parts.count.value() } else { before };
                if *waits && value == 2 {
                    parts.woken.store(1, Ordering::Relaxed);
                }
            })
        };
        // It waits before they begin.
        *waiter.lock().expect("nobody panics with it") = true;
        if passes_through.is_none() {
            parts.count.mix();
        }
        parts.count.set_least(Some(2));
        let inside = {
            let (parts, wake) = (parts.clone(), wake.clone());
            thread::spawn(move || {
                let Some(guard) = parts.cell.try_take() else {
                    // Its message is dispatched later, by who has the token.
                    return false;
                };
                if parts.count.add_inside(1) {
                    wake();
                }
                guard.finish(|(), ()| wake());
                true
            })
        };
        // As `Counter` has it.
        let somebody_waits = parts.count.add(1);
        assert!(somebody_waits && parts.count.is_mixed() == passes_through.is_none());
        if passes_through.is_some() {
            let waits = waiter.lock().expect("nobody panics with it");
            parts.count.mix();
            parts.count.set_least(waits.then_some(2));
        }
        if passes_through == Some(true) {
            match parts.cell.try_take() {
                Some(guard) => guard.finish(|(), ()| wake()),
                None => {
                    if let Some(guard) = parts.cell.post(()) {
                        guard.finish(|(), ()| wake());
                    }
                }
            }
        }
        wake();
        if inside.join().expect("no panic") {
            assert_eq!(parts.woken.load(Ordering::Relaxed), 1, "lost wake-up");
        }
    });
}

#[test]
fn of_two_who_add_at_once_the_second_wakes() {
    two_add(true, None);
    two_add(true, Some(true));
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn of_two_who_look_at_the_value_too_early_none_wakes() {
    two_add(false, None);
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn who_mixes_the_count_and_does_not_come_behind_the_handler_misses_what_it_adds() {
    two_add(true, Some(false));
}

/// A second one adds from outside while the first has not come behind the handler yet.
#[test]
fn who_relies_on_another_to_come_behind_the_handler_is_not_missed() {
    bounded(3, || {
        let parts = Parts::new(Cell::new(()));
        let waiters = Arc::new(loom::sync::Mutex::new(()));
        parts.count.set_least(Some(3));
        let wake = {
            let (parts, waiters) = (parts.clone(), waiters.clone());
            Arc::new(move || {
                let _lock = waiters.lock().expect("nobody panics with it");
                if parts.count.value() == 3 {
                    parts.woken.store(1, Ordering::Relaxed);
                }
            })
        };
        let add = {
            let (parts, wake) = (parts.clone(), wake.clone());
            Arc::new(move || {
                let somebody_waits = parts.count.add(1);
                let mut passes = false;
                if !parts.count.is_mixed() {
                    let _lock = waiters.lock().expect("nobody panics with it");
                    if !parts.count.is_mixed() {
                        parts.count.mix();
                        parts.count.set_least(Some(3));
                        passes = true;
                    }
                }
                if passes {
                    match parts.cell.try_take() {
                        Some(guard) => guard.finish(|(), ()| wake()),
                        None => {
                            if let Some(guard) = parts.cell.post(()) {
                                guard.finish(|(), ()| wake());
                            }
                        }
                    }
                }
                assert!(somebody_waits);
                wake();
            })
        };
        let inside = {
            let (parts, wake) = (parts.clone(), wake.clone());
            thread::spawn(move || {
                let Some(guard) = parts.cell.try_take() else { return false };
                if parts.count.add_inside(1) {
                    wake();
                }
                guard.finish(|(), ()| wake());
                true
            })
        };
        let other = {
            let add = add.clone();
            thread::spawn(move || add())
        };
        add();
        other.join().expect("no panic");
        if inside.join().expect("no panic") {
            assert_eq!(parts.woken.load(Ordering::Relaxed), 1, "lost wake-up");
        }
    });
}
