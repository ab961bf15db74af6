//! Boards: whoever stops looking either finds what was written or is sent a message, and a slot is written anew only when
//! nobody reads in it any more.

use crate::memory::Memory;
use crate::model;
use loom::thread;
use posthaste_core::blackboard::{Blackboard, Entry, Ledger};
use posthaste_core::memory::Words;
use posthaste_core::sync::{Arc, Mutex, Ordering};

/// The words that a board of one slot uses: *told*, *ended*, the stamp, and one of payload.
const BOARD: [usize; 4] = [0, 8, 16, 17];

/// The boards of two members, as each of them has them.
fn pair() -> [Blackboard<Memory>; 2] {
    let boards = [Memory::sparse(24, &BOARD), Memory::sparse(24, &BOARD)];
    [0, 1].map(|me| Blackboard::new(Box::new(boards.clone()), me).expect("boards of one slot"))
}

fn entry(operation: u64) -> Entry {
    Entry { mark: 7 + operation as u32, len: 8 }
}

fn write(board: &Blackboard<Memory>, operation: u64) -> bool {
    board.write(operation, entry(operation).mark, &(!operation).to_ne_bytes());
    board.wanting() != 0
}

/// Whether the other member has written its part, which is whole then.
fn look(board: &Blackboard<Memory>, operation: u64) -> bool {
    let Some(found) = board.look(1 - board.me(), operation) else { return false };
    assert_eq!(found, entry(operation), "what was written for another operation");
    let mut payload = [0; 8];
    board.read(1 - board.me(), operation, &mut payload);
    assert_eq!(payload, (!operation).to_ne_bytes(), "torn payload");
    true
}

#[test]
fn whoever_stops_looking_has_seen_it_or_is_sent_a_message() {
    model(|| {
        let [writer, sleeper] = pair();
        let writing = thread::spawn(move || write(&writer, 0));
        sleeper.ask();
        let seen = look(&sleeper, 0);
        assert!(writing.join().expect("it ends") || seen, "a lost wake-up");
    });
}

#[test]
fn both_may_stop_looking() {
    model(|| {
        let [one, other] = pair();
        let sides = [one, other].map(|board| {
            thread::spawn(move || {
                let tells = write(&board, 0);
                board.ask();
                (tells, look(&board, 0))
            })
        });
        let [(one_tells, one_saw), (other_tells, other_saw)] =
            sides.map(|side| side.join().expect("it ends"));
        assert!(one_tells || other_saw, "a lost wake-up");
        assert!(other_tells || one_saw, "a lost wake-up");
    });
}

#[test]
fn who_looks_again_and_stops_again_loses_nothing() {
    model(|| {
        let [writer, sleeper] = pair();
        sleeper.ask();
        sleeper.unask();
        let writing = thread::spawn(move || write(&writer, 0));
        sleeper.ask();
        let seen = look(&sleeper, 0);
        assert!(writing.join().expect("it ends") || seen, "a lost wake-up");
    });
}

#[test]
fn a_slot_is_written_anew_only_when_nobody_reads_in_it() {
    model(|| {
        let [writer, reader] = pair();
        let writing = thread::spawn(move || {
            let mut next = 0;
            for _ in 0..4 {
                if next < 3 && next < writer.room() {
                    let _told = write(&writer, next);
                    next += 1;
                    writer.end(next);
                } else {
                    thread::yield_now();
                }
            }
            next
        });
        let mut next = 0;
        for _ in 0..3 {
            if look(&reader, next) {
                next += 1;
                reader.end(next);
            } else {
                thread::yield_now();
            }
        }
        let written = writing.join().expect("it ends");
        // Nothing is lost: what is written and not yet ended is still there.
        for operation in next..written {
            assert!(look(&reader, operation), "overwritten before it was read");
            reader.end(operation + 1);
        }
    });
}

/// A word of a stage that is used for one operation after the other, each as soon as the one before has ended for all.
#[test]
fn what_is_laid_out_stays_until_all_have_read_it() {
    const BOARD: [usize; 8] = [0, 8, 16, 17, 18, 24, 25, 26];
    model(|| {
        let boards = [Memory::sparse(32, &BOARD), Memory::sparse(32, &BOARD)];
        let [writer, reader] =
            [0, 1].map(|me| Blackboard::new(Box::new(boards.clone()), me).expect("boards of two slots"));
        let stage = Memory::sparse(1, &[0]);
        let laid_out = stage.clone();
        let writing = thread::spawn(move || {
            let mut next = 0;
            for _ in 0..3 {
                if next < 2 && writer.ended_by_all() >= next {
                    laid_out.store(0, 100 + next, Ordering::Relaxed);
                    writer.refer(next, 7, 64 * next, 8);
                    next += 1;
                    writer.end(next);
                } else {
                    thread::yield_now();
                }
            }
        });
        let mut next = 0;
        for _ in 0..3 {
            match reader.look(0, next) {
                Some(entry) => {
                    assert_eq!(entry, Entry { mark: 7, len: Entry::ELSEWHERE });
                    assert_eq!(reader.reference(0, next), (64 * next, 8));
                    assert_eq!(
                        stage.load(0, Ordering::Relaxed),
                        100 + next,
                        "laid out anew before it was read"
                    );
                    next += 1;
                    reader.end(next);
                }
                None => thread::yield_now(),
            }
        }
        writing.join().expect("it ends");
    });
}

/// What the books say of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    OnBoard,
    Ended,
    Elsewhere,
}

struct Group {
    ledger: Ledger,
    books: Mutex<[Place; 2]>,
}

impl Group {
    fn lock(&self) -> impl std::ops::DerefMut<Target = [Place; 2]> {
        self.books.lock().expect("nobody panics with it")
    }

    fn new() -> Arc<Self> {
        Arc::new(Group { ledger: Ledger::new(0), books: Mutex::new([Place::OnBoard; 2]) })
    }

    /// The books learn what was finished, and the ledger what they know.
    fn settle(&self, books: &mut [Place; 2]) {
        for place in &mut books[..self.ledger.ended(0) as usize] {
            assert_ne!(
                *place,
                Place::Elsewhere,
                "a caller has the result of an operation that goes on elsewhere"
            );
            *place = Place::Ended;
        }
        self.ledger.advance(books.iter().take_while(|place| **place == Place::Ended).count() as u64);
    }

    /// What they say once they have learned.
    fn settled(&self) -> [Place; 2] {
        let mut books = self.lock();
        self.settle(&mut books);
        *books
    }

    /// Whether the result counts that the caller of an operation has.
    fn finish(&self, operation: usize, upsets: u32) -> bool {
        if self.ledger.finish(operation as u64, upsets) {
            return true;
        }
        let mut books = self.lock();
        let on_board = books[operation] == Place::OnBoard;
        if on_board {
            books[operation] = Place::Ended;
            self.settle(&mut books);
        }
        on_board
    }

    fn move_away(&self, operation: usize) {
        let mut books = self.lock();
        self.ledger.upset();
        self.settle(&mut books);
        if books[operation] == Place::OnBoard {
            books[operation] = Place::Elsewhere;
        }
    }
}

#[test]
fn what_its_caller_has_finished_goes_nowhere_else() {
    model(|| {
        let group = Group::new();
        let upsets = group.ledger.upsets();
        let mover = group.clone();
        let moving = thread::spawn(move || mover.move_away(0));
        let counts = group.finish(0, upsets);
        moving.join().expect("it ends");
        assert_eq!(group.settled()[0], if counts { Place::Ended } else { Place::Elsewhere });
    });
}

#[test]
fn two_callers_finish_in_any_order() {
    model(|| {
        let group = Group::new();
        let upsets = group.ledger.upsets();
        let other = group.clone();
        let finishing = thread::spawn(move || other.finish(1, upsets));
        let counts = [group.finish(0, upsets), finishing.join().expect("it ends")];
        assert_eq!((counts, group.settled()), ([true; 2], [Place::Ended; 2]));
        assert_eq!(group.ledger.ended(0), 2, "it has heard of both");
    });
}

#[test]
fn two_callers_finish_while_one_operation_moves() {
    model(|| {
        let group = Group::new();
        let upsets = group.ledger.upsets();
        let [mover, other] = [group.clone(), group.clone()];
        let moving = thread::spawn(move || mover.move_away(0));
        let finishing = thread::spawn(move || other.finish(1, upsets));
        let counts = [group.finish(0, upsets), finishing.join().expect("it ends")];
        moving.join().expect("it ends");
        let books = group.settled();
        assert_eq!(books[0], if counts[0] { Place::Ended } else { Place::Elsewhere });
        assert_eq!((counts[1], books[1]), (true, Place::Ended));
    });
}
