//! The progress token: one holder at a time, and no posted work is stranded.

use crate::{bounded, model};
use loom::thread;
use posthaste_core::token::TokenCell;
use std::sync::Arc;

/// What the token guards: the numbers of the work done. The cell inside the token is loom's, so that two holders at
/// once, or a holder that does not see what the last one did, fail the model.
type Cell = TokenCell<Vec<u32>, u32>;

fn post(cell: &Cell, work: u32) {
    if let Some(mut guard) = cell.post(work) {
        guard.get().push(0);
        guard.finish(|done, work| done.push(work));
    }
}

/// Does something itself if it gets the token, as a poll does.
fn advance(cell: &Cell) {
    if let Some(mut guard) = cell.try_take() {
        guard.get().push(0);
        guard.finish(|done, work| done.push(work));
    }
}

/// At the end the token is free, no work waits, and all of it was done once.
fn settle(cell: &Cell, posted: &[u32]) {
    assert!(!cell.has_work(), "stranded work");
    let mut guard = cell.try_take().expect("nobody holds the token any more");
    let mut done: Vec<u32> = guard.get().iter().copied().filter(|&work| work != 0).collect();
    done.sort_unstable();
    assert_eq!(done, posted, "stranded work");
}

/// One polls, one posts: whoever loses the race for the token, the work is done.
#[test]
fn work_posted_to_a_holder_is_done() {
    model(|| {
        let cell = Arc::new(Cell::new(Vec::new()));
        let poller = {
            let cell = cell.clone();
            thread::spawn(move || {
                advance(&cell);
                advance(&cell);
            })
        };
        post(&cell, 1);
        post(&cell, 2);
        poller.join().expect("no panic");
        settle(&cell, &[1, 2]);
    });
}

/// Two post and one polls.
#[test]
fn three_threads_strand_nothing() {
    bounded(5, || {
        let cell = Arc::new(Cell::new(Vec::new()));
        let threads: Vec<_> = (1..=2)
            .map(|work| {
                let cell = cell.clone();
                thread::spawn(move || post(&cell, work))
            })
            .collect();
        advance(&cell);
        for thread in threads {
            thread.join().expect("no panic");
        }
        settle(&cell, &[1, 2]);
    });
}

/// A holder that unwinds drops its guard without finishing: the work that was posted meanwhile waits for the next
/// holder, who does it.
#[test]
fn a_dropped_guard_hands_its_work_on() {
    model(|| {
        let cell = Arc::new(Cell::new(Vec::new()));
        let unwinding = {
            let cell = cell.clone();
            thread::spawn(move || {
                if let Some(mut guard) = cell.try_take() {
                    guard.get().push(0);
                }
            })
        };
        post(&cell, 1);
        unwinding.join().expect("no panic");
        advance(&cell);
        settle(&cell, &[1]);
    });
}

/// A token that the first thread to take it once gets for its own. loom models both sides of the handshake with fences.
fn biased() -> Cell {
    Cell::biased(Vec::new(), 1, Box::new(|| {}))
}

/// The owner of the bias comes and goes while another thread takes the token away from it.
#[test]
fn a_bias_is_revoked_without_two_holders() {
    bounded(4, || {
        let cell = Arc::new(biased());
        // This thread becomes the owner.
        advance(&cell);
        let other = {
            let cell = cell.clone();
            thread::spawn(move || {
                advance(&cell);
                advance(&cell);
            })
        };
        advance(&cell);
        advance(&cell);
        other.join().expect("no panic");
        settle(&cell, &[]);
    });
}

/// Work that others post to a biased token is done, whether its owner is inside, comes, goes, or never comes again.
#[test]
fn work_posted_to_a_biased_token_is_done() {
    bounded(4, || {
        let cell = Arc::new(biased());
        advance(&cell);
        let other = {
            let cell = cell.clone();
            thread::spawn(move || {
                post(&cell, 1);
                post(&cell, 2);
            })
        };
        advance(&cell);
        advance(&cell);
        other.join().expect("no panic");
        settle(&cell, &[1, 2]);
    });
}

/// The bias is given while work is posted: the poster sees the bias or the owner sees the work.
#[test]
fn work_posted_while_the_bias_is_given_is_done() {
    bounded(4, || {
        let cell = Arc::new(biased());
        let other = {
            let cell = cell.clone();
            thread::spawn(move || post(&cell, 1))
        };
        advance(&cell);
        other.join().expect("no panic");
        settle(&cell, &[1]);
    });
}

/// Two threads at once take the bias away, and one posts.
#[test]
fn two_revokers_and_an_owner() {
    bounded(3, || {
        let cell = Arc::new(biased());
        advance(&cell);
        let others: Vec<_> = [true, false]
            .map(|posts| {
                let cell = cell.clone();
                thread::spawn(move || if posts { post(&cell, 1) } else { advance(&cell) })
            })
            .into();
        advance(&cell);
        for other in others {
            other.join().expect("no panic");
        }
        settle(&cell, &[1]);
    });
}
