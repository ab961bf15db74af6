//! Who is amid an access to memory of others, so that whoever forbids further ones can wait for the last.
//!
//! An access to mapped memory goes past locks and counters that threads share: its thread marks its own [`Seat`] and then
//! looks whether it may go on. Whoever forbids it says so first and looks at the seats then. With a fence between the two on
//! either side one of them sees the other (Dekker's handshake); the side of the access has a barrier made on its behalf
//! where the system can. Waiting is that for a grace period of read-copy-update: an access that begins later is none of
//! those that are waited for.

use crate::sync::{AtomicU64, LightFence, Ordering};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whether one thread is amid something: odd then. Only that thread changes it.
#[derive(Debug)]
#[repr(align(128))]
pub struct Seat {
    turns: AtomicU64,
}

impl Default for Seat {
    fn default() -> Self {
        Self::new()
    }
}

impl Seat {
    /// Nobody is amid anything.
    #[must_use]
    pub fn new() -> Seat {
        Seat { turns: AtomicU64::new(0) }
    }

    /// From here on until the [`Sitting`] is dropped somebody is. Only one thread at a time may call this.
    #[inline(always)]
    pub fn take(&self, light: LightFence) -> Sitting<'_> {
        let turn = self.turns.load(Ordering::Relaxed);
        // Within another access nothing is to be said, nor at its end.
        let outer = turn & 1 == 1;
        if !outer {
            // Release: whoever waited for the access before this one may see this one first.
            self.turns.store(turn + 1, Ordering::Release);
            light.issue();
        }
        Sitting { seat: self, end: if outer { turn } else { turn + 2 }, thread: PhantomData }
    }

    /// The turn that somebody is amid. Behind a heavy fence behind what forbids another one: who is not seen here sees that.
    #[must_use]
    pub fn turn(&self) -> Option<u64> {
        // Acquire pairs with the release at the end of an access: what it wrote is written.
        let turn = self.turns.load(Ordering::Acquire);
        (turn & 1 == 1).then_some(turn)
    }

    /// Whether that turn goes on.
    #[must_use]
    pub fn is_amid(&self, turn: u64) -> bool {
        self.turns.load(Ordering::Acquire) == turn
    }
}

/// For as long as a thread is amid an access. It stays on its thread.
#[derive(Debug)]
pub struct Sitting<'a> {
    seat: &'a Seat,
    end: u64,
    thread: PhantomData<*const ()>,
}

impl Drop for Sitting<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.seat.turns.store(self.end, Ordering::Release);
    }
}

/// The seats of all threads that ever made such an access, and those whose threads have ended.
struct Seats {
    all: Vec<&'static Seat>,
    free: Vec<&'static Seat>,
}

static SEATS: Mutex<Seats> = Mutex::new(Seats { all: Vec::new(), free: Vec::new() });

fn seats() -> MutexGuard<'static, Seats> {
    // Nobody panics while it is locked.
    SEATS.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static MINE: Cell<Option<&'static Seat>> = const { Cell::new(None) };
    static LEAVING: Leaving = const { Leaving };
}

/// Gives the thread's seat to the next one.
struct Leaving;

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(seat) = MINE.take() {
            seats().free.push(seat);
        }
    }
}

#[cold]
fn find_seat() -> &'static Seat {
    let mut seats = seats();
    let seat = seats.free.pop().unwrap_or_else(|| {
        // It is never freed: there are as many as there were threads at a time.
        let seat: &'static Seat = Box::leak(Box::default());
        seats.all.push(seat);
        seat
    });
    drop(seats);
    MINE.set(Some(seat));
    // A thread that ends at this moment keeps its seat for good.
    let _ = LEAVING.try_with(|_| ());
    seat
}

/// The calling thread is amid an access to memory of others until this is dropped.
#[inline(always)]
#[must_use]
pub fn enter(light: LightFence) -> Sitting<'static> {
    let seat = match MINE.get() {
        Some(seat) => seat,
        None => find_seat(),
    };
    seat.take(light)
}

/// Waits until every thread is past the access that it is amid now. Whoever calls this has said before, to whomever is to
/// begin none any more, that he may not, and made a heavy fence since.
pub async fn vacated() {
    let amid: Vec<_> = seats().all.iter().filter_map(|seat| Some((*seat, seat.turn()?))).collect();
    for (seat, turn) in amid {
        while seat.is_amid(turn) {
            // It copies: it will not be long.
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[tokio::test]
    async fn accesses_that_have_begun_are_waited_for_and_others_are_not() {
        let (begun, is_begun) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let outer = enter(LightFence::Full);
            drop(enter(LightFence::Full));
            begun.send(()).expect("it is waited for");
            ends.recv().expect("it is told");
            drop(outer);
            // Another one: nobody waits for it.
            let _next = enter(LightFence::Full);
            begun.send(()).expect("it is waited for");
            ends.recv().expect("it is told");
        });
        is_begun.recv().expect("the thread lives");
        let mut vacant = std::pin::pin!(vacated());
        assert!(
            tokio::time::timeout(Duration::from_millis(20), &mut vacant).await.is_err(),
            "it is amid one"
        );
        end.send(()).expect("the thread lives");
        is_begun.recv().expect("the thread lives");
        vacant.await;
        end.send(()).expect("the thread lives");
        thread.join().expect("no panic");
        vacated().await;
    }

    #[test]
    fn seats_of_threads_that_ended_are_taken_again() {
        let seat_of_a_thread = || {
            let thread = std::thread::spawn(|| {
                drop(enter(LightFence::Full));
                std::ptr::from_ref(MINE.get().expect("it sat")) as usize
            });
            thread.join().expect("no panic")
        };
        // Other tests' threads may come in between, and stay.
        let mut seen = std::collections::HashSet::new();
        assert!((0..100).any(|_| !seen.insert(seat_of_a_thread())));
    }
}
