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
    let ticket = pool.alloc(None).expect("free");
    assert!(completer.complete(ticket, Ok(Value::Unit)));
    assert!(pool.take(ticket).is_some());
    (pool, completer)
}

/// Both slots of the first chunk are free, and nothing else is: a slot freed twice or never would show.
fn settle(pool: &SlotPool) {
    let tickets: Vec<_> = (0..3).map(|_| pool.alloc(None).expect("free").to_word() as u32).collect();
    let mut sorted = tickets.clone();
    sorted.sort_unstable();
    // The third comes from the second chunk.
    assert_eq!(sorted, [1, 2, 65], "a slot was freed twice or is lost");
}

/// The owner polls while the operation ends: it has the outcome, or it will be woken and has it then.
#[test]
fn a_completion_wakes_its_owner() {
    model(|| {
        let (pool, mut completer) = pool();
        let (dropped, woken) = (Count::default(), Count::default());
        let ticket = pool.alloc(Some(Rank(1))).expect("free");
        let engine = {
            let dropped = dropped.clone();
            thread::spawn(move || assert!(completer.complete(ticket, outcome(&dropped))))
        };
        let first = poll(&pool, ticket, &woken);
        engine.join().expect("no panic");
        let outcome = match first {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => {
                assert!(woken.get() > 0, "lost wake-up");
                pool.take(ticket).expect("ended")
            }
        };
        assert_eq!(outcome.expect("value").as_bytes(), b"outcome");
        assert_eq!(dropped.get(), 1);
        settle(&pool);
    });
}

/// The owner polls twice, with different wakers: the last one counts.
#[test]
fn the_last_waker_counts() {
    model(|| {
        let (pool, mut completer) = pool();
        let ticket = pool.alloc(None).expect("free");
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
/// the slot, once.
#[test]
fn a_detached_slot_is_freed_once() {
    model(|| {
        let (pool, mut completer) = pool();
        let dropped = Count::default();
        let ticket = pool.alloc(None).expect("free");
        let engine = {
            let dropped = dropped.clone();
            thread::spawn(move || {
                assert!(completer.complete(ticket, outcome(&dropped)), "it was pending");
                assert!(!completer.complete(ticket, Ok(Value::Unit)), "ended twice");
            })
        };
        pool.detach(ticket);
        engine.join().expect("no panic");
        assert_eq!(dropped.get(), 1, "the outcome is dropped once");
        settle(&pool);
    });
}

/// Two threads take and free slots: no slot is owned twice, whatever the stack looked like when a thread last read it
/// (ABA), and none is lost.
#[test]
fn two_threads_never_own_one_slot() {
    model(|| {
        let (pool, mut completer) = pool();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || {
                let first = pool.alloc(None).expect("free");
                let second = pool.alloc(None).expect("free");
                assert!(completer.complete(first, Ok(Value::Unit)));
                assert!(pool.take(first).is_some());
                (second, completer)
            })
        };
        let mine = pool.alloc(None).expect("free");
        let (theirs, _completer) = other.join().expect("no panic");
        let more = [pool.alloc(None).expect("free"), pool.alloc(None).expect("free")];
        let mut owned = [mine, theirs, more[0], more[1]].map(|ticket| ticket.to_word() as u32);
        owned.sort_unstable();
        assert!(owned.windows(2).all(|pair| pair[0] != pair[1]), "owned twice: {owned:?}");
    });
}

/// Two threads find the pool empty and grow it: each gets a slot of its own.
#[test]
fn two_threads_grow_the_pool() {
    model(|| {
        let (pool, _completer) = SlotPool::new();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.alloc(None).expect("free"))
        };
        let mine = pool.alloc(None).expect("free");
        assert_ne!(mine, other.join().expect("no panic"));
    });
}

/// A ticket of an earlier life ends nothing while the slot is being taken for a later one, and the later operation
/// ends as it should.
#[test]
fn a_stale_ticket_ends_nothing() {
    model(|| {
        let (pool, mut completer) = pool();
        let stale = pool.alloc(Some(Rank(1))).expect("free");
        assert!(completer.complete(stale, Ok(Value::Unit)));
        let engine = thread::spawn(move || {
            assert!(!completer.complete(stale, Err(Fault::Shutdown)), "ended by a stale ticket");
            assert!(!completer.complete_from(Rank(1), stale, Err(Fault::Shutdown)));
            completer
        });
        assert!(pool.take(stale).is_some());
        let ticket = pool.alloc(Some(Rank(2))).expect("free");
        assert_eq!(ticket.to_word() as u32, stale.to_word() as u32, "the same slot");
        assert!(pool.take(ticket).is_none());
        let mut completer = engine.join().expect("no panic");
        assert!(completer.complete_from(Rank(2), ticket, Ok(Value::Unit)));
        assert!(matches!(pool.take(ticket), Some(Ok(_))));
    });
}

/// A peer that guesses the ticket of an operation which depends on another peer does not end it, not even if the slot
/// served an operation of its own just before.
#[test]
fn a_peer_cannot_end_what_was_asked_of_another() {
    model(|| {
        let (pool, mut completer) = pool();
        let own = pool.alloc(Some(Rank(1))).expect("free");
        assert!(completer.complete(own, Ok(Value::Unit)));
        let guess = Ticket::from_word(own.to_word() + (1 << 32)).expect("a ticket");
        let engine = thread::spawn(move || {
            assert!(!completer.complete_from(Rank(1), guess, Err(Fault::Shutdown)), "ended by a stranger");
        });
        assert!(pool.take(own).is_some());
        let ticket = pool.alloc(Some(Rank(2))).expect("free");
        assert_eq!(ticket, guess);
        engine.join().expect("no panic");
        assert!(pool.take(ticket).is_none());
    });
}

/// A peer is lost while its operation is begun, polled and dropped: it is failed and its owner woken, or it was begun
/// too late for that and is still pending.
#[test]
fn failing_all_wakes_all() {
    model(|| {
        let (pool, mut completer) = pool();
        let woken = Count::default();
        let engine = thread::spawn(move || (completer.fail(Some(Rank(1)), Fault::Shutdown), completer));
        let ticket = pool.alloc(Some(Rank(1))).expect("free");
        let first = poll(&pool, ticket, &woken);
        let (failed, mut completer) = engine.join().expect("no panic");
        if let Poll::Ready(outcome) = first {
            assert!(outcome.is_err() && failed == 1);
        } else if failed == 1 {
            assert!(woken.get() > 0, "lost wake-up");
            assert!(matches!(pool.take(ticket), Some(Err(Fault::Shutdown))));
        } else {
            assert!(completer.complete(ticket, Ok(Value::Unit)));
            assert!(matches!(pool.take(ticket), Some(Ok(_))));
        }
        settle(&pool);
    });
}
