//! What is made of a program takes memory in proportion to its length, whatever it is.
//!
//! In a binary of its own because it replaces the allocator.
#![allow(unsafe_code, reason = "an allocator that counts has to be one")]

use posthaste_protocols::datatype::{Datatype, Layout, MAX_PROGRAM, Machine, ProgramError};
use std::alloc::{GlobalAlloc, Layout as Allocation, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Bytes that the thread has, and the most that it had.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn held(change: isize) {
    // Threads that end free what they had when this is gone.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + change, most.max(now + change)));
    });
}

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract; counting touches no
// memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Allocation) -> *mut u8 {
        held(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Allocation) {
        held(-(layout.size() as isize));
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    // Growing is what the trait has for it: allocate, copy, free, so that both are counted while both are there.
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes that were held at a time beyond what was held before.
fn most_in<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.with(|held| {
        let (now, _) = held.get();
        held.set((now, now));
        now
    });
    let result = run();
    (result, HELD.with(|held| held.get().1 - before) as usize)
}

fn number(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

/// A program of single bytes with an honest header, all within the first 64 bytes.
fn headed(size: u64, high: u64, code: &[u8]) -> Vec<u8> {
    let mut bytes = b"DGSP\x01".to_vec();
    for part in [0, high * 2, size, 0, high * 2, size, size, 1] {
        number(&mut bytes, part);
    }
    bytes.extend([0; 16]);
    bytes.extend(code);
    bytes
}

const LENGTH: usize = 1 << 20;

/// So many routines, each of which the first one calls.
fn called(routines: u64, routine: &[u8]) -> Vec<u8> {
    let mut code = Vec::new();
    for callee in 1..=routines {
        code.push(3);
        number(&mut code, callee);
        code.push(0);
    }
    code.push(5);
    (0..routines).for_each(|_| code.extend(routine));
    code
}

/// Programs of about 1 MiB, accepted or not: so few bytes for so much to be made as is possible.
fn hostile() -> Vec<(&'static str, Vec<u8>, bool)> {
    let empty = vec![5; LENGTH];
    let unused = [1, 0, 1, 5].repeat(LENGTH / 4);
    let copies = [[1, 0, 1].repeat(LENGTH / 3), vec![5]].concat();
    let mut listed = vec![2];
    number(&mut listed, LENGTH as u64 / 2);
    listed.extend([0, 1].repeat(LENGTH / 2));
    listed.push(5);
    let pairs = [[2, 2, 0, 1, 2, 1].repeat(LENGTH / 6), vec![5]].concat();
    let ended = |mut code: Vec<u8>| {
        code.push(5);
        code
    };
    let same = [ended([3, 1, 0].repeat(LENGTH / 3)), vec![1, 0, 1, 5]].concat();
    // The same one again and again.
    let (again, calls) = (LENGTH as u64 / 3, ended([3, 1, 0].repeat(LENGTH / 3)));
    let once = LENGTH as u64 / 9;
    let twice = LENGTH as u64 / 11;
    vec![
        ("empty", headed(1, 1, &empty), false),
        ("unused", headed(1, 1, &unused), false),
        ("iterating", headed(1, 1, &[4, 2, 0].repeat(LENGTH / 3)), false),
        ("cut short", headed(1, 1, &[1, 0, 1].repeat(LENGTH / 3)), false),
        ("copies", headed(LENGTH as u64 / 3, 1, &copies), true),
        ("listed", headed(LENGTH as u64 / 2, 1, &listed), true),
        ("pairs", headed(2 * (LENGTH as u64 / 6), 2, &pairs), true),
        ("calls", headed(LENGTH as u64 / 3, 1, &same), true),
        ("called", headed(once, 1, &called(once, &[1, 0, 1, 5])), true),
        ("loops", headed(2 * twice, 3, &called(twice, &[1, 0, 1, 4, 2, 4])), true),
        ("one loop", headed(8 * again, 1, &[calls.clone(), vec![1, 0, 1, 4, 8, 0]].concat()), true),
        (
            "loop in loop",
            headed(272 * again, 1, &[calls, vec![3, 2, 0, 4, 17, 0, 1, 0, 1, 4, 16, 0]].concat()),
            true,
        ),
    ]
}

#[test]
fn a_hostile_program_takes_some_30_times_its_length() {
    for (what, program, accepted) in hostile() {
        let (read, most) = most_in(|| Datatype::from_bytes(&program));
        assert!(most <= 30 * program.len(), "{what}: {most} of {}", program.len());
        assert_eq!(read.is_ok(), accepted, "{what}: {read:?}");
        let Ok(datatype) = read else { continue };
        // Its owner runs it, for which it becomes a plan.
        let (machine, more) = most_in(|| Machine::new(&Layout::new(&datatype, 1)));
        assert!(machine.is_ok(), "{what}");
        assert!(more <= 36 * program.len(), "{what}: {more} more of {}", program.len());
    }
}

#[test]
fn what_is_refused_for_its_shape_takes_next_to_nothing() {
    let endless = [1, 0, 1, 5].repeat(LENGTH / 4);
    let (read, most) = most_in(|| Datatype::from_bytes(&headed(1, 1, &endless)));
    assert_eq!(read.err(), Some(ProgramError::Declared("a routine is never called")));
    // The program itself, and where its routines are.
    assert!(most <= 6 * LENGTH, "{most}");
    let long = headed(1, 1, &vec![5; MAX_PROGRAM]);
    let (read, most) = most_in(|| Datatype::from_bytes(&long));
    let error = read.expect_err("it is too long");
    assert_eq!((&error, most), (&ProgramError::TooLong { len: long.len() as u64 }, 0));
    assert!(error.to_string().contains(&MAX_PROGRAM.to_string()), "{error}");
}

/// Blocks that are neither equal nor at equal distances, and runs of some that are.
#[test]
fn a_million_blocks_go_round_through_bytes() {
    let irregular = |block: i64| (3 * block + block * block % 2, 1 + block as u64 % 2);
    let in_runs = |block: i64| (2 * block + block / 5 % 7, 1);
    for list in [(0..1_000_000).map(irregular).collect::<Vec<_>>(), (0..1_000_000).map(in_runs).collect()] {
        let datatype = Datatype::of::<u8>().indexed(&list).expect("small enough");
        let bytes = datatype.to_bytes();
        let read = Datatype::from_bytes(&bytes).expect("honest");
        assert_eq!((read.chunks(), read.signature()), (datatype.chunks(), datatype.signature()));
        assert_eq!(read.program(), datatype.program());
        let memory: Vec<u8> = (0..read.true_bounds().1).map(|at| (at % 251) as u8).collect();
        let (mut one, mut two) = (vec![0; read.size() as usize], vec![0; read.size() as usize]);
        Machine::new(&Layout::new(&read, 1))
            .and_then(|mut run| run.gather(&memory, &mut one))
            .expect("inside");
        Machine::new(&Layout::new(&datatype, 1))
            .and_then(|mut run| run.gather(&memory, &mut two))
            .expect("inside");
        assert_eq!(one, two);
    }
}
