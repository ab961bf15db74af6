//! Completion slots: an operation ends once, its owner is woken, and its slot is freed once.

use crate::model;
use bytes::Bytes;
use loom::thread;
use posthaste_core::Rank;
use posthaste_core::error::Fault;
use posthaste_core::slot::{Completer, Outcome, SlotPool, Ticket, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Counts, out of loom's sight.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Count {
    fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
    fn up(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Counts how often it is dropped.
struct Counted(Count);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        b"outcome"
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.up();
    }
}

fn outcome(dropped: &Count) -> Outcome {
    Ok(Value::Bytes(Bytes::from_owner(Counted(dropped.clone()))))
}

struct Woken(Count);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.up();
    }
}

fn poll(pool: &SlotPool, ticket: Ticket, woken: &Count) -> Poll<Outcome> {
    let waker = Waker::from(Arc::new(Woken(woken.clone())));
    pool.poll(ticket, &mut Context::from_waker(&waker))
}

/// A pool whose first slots exist and are free, so that the models do not spend their time on growing.
fn pool() -> (Arc<SlotPool>, Completer) {
    let (pool, mut completer) = SlotPool::new();
    let ticket = completer.alloc(None).expect("free");
    assert!(completer.complete(ticket, Ok(Value::Unit)));
    assert!(completer.take(ticket).is_some());
    (pool, completer)
}

/// Both slots of the first chunk are free, and nothing else is: a slot freed twice or never would show.
fn settle(completer: &mut Completer) {
    let mut taken: Vec<_> = (0..3).map(|_| completer.alloc(None).expect("free").to_word() as u32).collect();
    taken.sort_unstable();
    // The third comes from the second chunk.
    assert_eq!(taken, [1, 2, 65], "a slot was freed twice or is lost");
}

/// The owner polls while the operation ends: it has the outcome, or it will be woken and has it then.
#[test]
fn a_completion_wakes_its_owner() {
    model(|| {
        let (pool, mut completer) = pool();
        let (dropped, woken) = (Count::default(), Count::default());
        let ticket = completer.alloc(Some(Rank(1))).expect("free");
        let engine = {
            let dropped = dropped.clone();
            thread::spawn(move || {
                assert!(completer.complete(ticket, outcome(&dropped)));
                completer
            })
        };
        let first = poll(&pool, ticket, &woken);
        let mut completer = engine.join().expect("no panic");
        let outcome = match first {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => {
                assert!(woken.get() > 0, "lost wake-up");
                pool.take(ticket).expect("ended")
            }
        };
        assert_eq!(outcome.expect("value").as_bytes(), b"outcome");
        assert_eq!(dropped.get(), 1);
        settle(&mut completer);
    });
}

/// The owner polls twice, with different wakers: the last one counts.
#[test]
fn the_last_waker_counts() {
    model(|| {
        let (pool, mut completer) = pool();
        let ticket = completer.alloc(None).expect("free");
        let engine = thread::spawn(move || assert!(completer.complete(ticket, Ok(Value::Unit))));
        let (old, new) = (Count::default(), Count::default());
        let mut ended = poll(&pool, ticket, &old).is_ready();
        if !ended {
            ended = poll(&pool, ticket, &new).is_ready();
        }
        engine.join().expect("no panic");
        assert!(ended || new.get() > 0, "lost wake-up");
    });
}

/// The owner's future is dropped while the operation ends: one of the two sees the other, drops the outcome and frees
/// the slot, once. So it is when a waker was registered before.
#[test]
fn a_detached_slot_is_freed_once() {
    for polled in [false, true] {
        model(move || {
            let (pool, mut completer) = pool();
            let (dropped, woken) = (Count::default(), Count::default());
            let ticket = completer.alloc(None).expect("free");
            if polled {
                assert!(poll(&pool, ticket, &woken).is_pending());
            }
            let engine = {
                let dropped = dropped.clone();
                thread::spawn(move || {
                    assert!(completer.complete(ticket, outcome(&dropped)), "it was pending");
                    assert!(!completer.complete(ticket, Ok(Value::Unit)), "ended twice");
                    completer
                })
            };
            pool.detach(ticket);
            let mut completer = engine.join().expect("no panic");
            assert_eq!(dropped.get(), 1, "the outcome is dropped once");
            settle(&mut completer);
        });
    }
}

/// Two futures return their slots while the engine takes new ones: no slot is owned twice, and none is lost.
#[test]
fn returned_slots_are_taken_once() {
    model(|| {
        let (pool, mut completer) = pool();
        let tickets = [(); 2].map(|()| completer.alloc(None).expect("free"));
        for ticket in tickets {
            assert!(completer.complete(ticket, Ok(Value::Unit)));
        }
        let futures = tickets.map(|ticket| {
            let pool = pool.clone();
            thread::spawn(move || assert!(pool.take(ticket).is_some()))
        });
        let first = completer.alloc(None).expect("free");
        for future in futures {
            future.join().expect("no panic");
        }
        let rest = [(); 3].map(|()| completer.alloc(None).expect("free"));
        let mut owned: Vec<u32> = [first].iter().chain(&rest).map(|ticket| ticket.to_word() as u32).collect();
        owned.sort_unstable();
        assert!(owned.windows(2).all(|pair| pair[0] != pair[1]), "owned twice: {owned:?}");
        // The first chunk's two and the second chunk's two: nothing was lost on the way.
        assert_eq!(owned, [1, 2, 65, 66]);
    });
}

/// A ticket of an earlier life ends nothing while its slot is returned and taken for a later one, and the later
/// operation ends as it should.
#[test]
fn a_stale_ticket_ends_nothing() {
    model(|| {
        let (pool, mut completer) = pool();
        let other = completer.alloc(None).expect("free");
        let stale = completer.alloc(Some(Rank(1))).expect("free");
        assert!(completer.complete(stale, Ok(Value::Unit)));
        let owner = {
            let pool = pool.clone();
            thread::spawn(move || assert!(pool.take(stale).is_some()))
        };
        assert!(!completer.complete(stale, Err(Fault::Shutdown)), "ended by a stale ticket");
        assert_eq!(completer.complete_from(Rank(1), stale, Err(Fault::Shutdown)), None);
        let ticket = completer.alloc(Some(Rank(2))).expect("free");
        assert!(!completer.complete(stale, Err(Fault::Shutdown)), "ended by a stale ticket");
        assert!(pool.take(ticket).is_none());
        owner.join().expect("no panic");
        assert_eq!(completer.complete_from(Rank(2), ticket, Ok(Value::Unit)), Some(0));
        assert!(matches!(pool.take(ticket), Some(Ok(_))));
        assert!(!pool.detach(other));
        assert!(completer.complete(other, Ok(Value::Unit)));
    });
}

/// A peer that guesses the next ticket of a slot does not end the operation of another peer in it.
#[test]
fn a_peer_cannot_end_what_was_asked_of_another() {
    model(|| {
        let (pool, mut completer) = SlotPool::new();
        let own = completer.alloc(Some(Rank(1))).expect("free");
        assert!(completer.complete(own, Ok(Value::Unit)));
        assert!(completer.take(own).is_some());
        let guess = Ticket::from_word(own.to_word() + (1 << 32)).expect("a ticket");
        assert_eq!(completer.alloc(Some(Rank(2))), Some(guess));
        assert_eq!(
            completer.complete_from(Rank(1), guess, Err(Fault::Shutdown)),
            None,
            "ended by a stranger"
        );
        assert!(pool.take(guess).is_none());
    });
}

/// A peer is lost while an operation that depends on it is polled: it ends, and its owner is woken.
#[test]
fn failing_all_wakes_all() {
    model(|| {
        let (pool, mut completer) = pool();
        let woken = Count::default();
        let ticket = completer.alloc(Some(Rank(1))).expect("free");
        let engine = thread::spawn(move || {
            assert_eq!(completer.fail(Some(Rank(1)), Fault::Shutdown), 1);
            completer
        });
        let first = poll(&pool, ticket, &woken);
        let mut completer = engine.join().expect("no panic");
        match first {
            Poll::Ready(outcome) => assert!(outcome.is_err()),
            Poll::Pending => {
                assert!(woken.get() > 0, "lost wake-up");
                assert!(matches!(pool.take(ticket), Some(Err(Fault::Shutdown))));
            }
        }
        settle(&mut completer);
    });
}
