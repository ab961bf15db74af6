//! Programs of a peer that means harm.

use crate::oracle::{records, shapes};
use posthaste_protocols::datatype::{Datatype, Layout, Machine, ProgramError};
use proptest::prelude::*;

/// Whatever the bytes are: refused, or a program that keeps to what it says.
fn judge(bytes: &[u8]) -> Option<Datatype> {
    let datatype = Datatype::from_bytes(bytes).ok()?;
    let (low, high) = datatype.span(1);
    assert!(low <= high);
    assert!(datatype.mean_chunk() <= datatype.size());
    // It is never run for longer than its size, nor outside of its bounds: a buffer that is too small is refused, one
    // that is just large enough is enough.
    if datatype.size() <= 1 << 16 && high - low <= 1 << 16 && low.unsigned_abs() <= 1 << 40 {
        let base = (-low.min(0)) as u64;
        let len = (high.max(0) + i128::from(base)) as usize;
        if len > 1 << 17 {
            return Some(datatype);
        }
        let layout = Layout::new(&datatype, 1).at(base);
        let memory = vec![1; len];
        let mut machine = Machine::new(&layout).expect("countable");
        let mut out = vec![0; datatype.size() as usize + 8];
        assert_eq!(machine.gather(&memory, &mut out), Ok(datatype.size()));
        assert!(out[..datatype.size() as usize].iter().all(|byte| *byte == 1));
        if high > 0 && len > 0 {
            let mut machine = Machine::new(&layout).expect("countable");
            assert!(machine.gather(&memory[..len - 1], &mut out).is_err());
        }
    }
    Some(datatype)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_refused_or_kept_to(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        judge(&bytes);
        let mut headed = b"DGSP\x01".to_vec();
        headed.extend(&bytes);
        judge(&headed);
    }

    #[test]
    fn a_program_that_was_changed_is_refused_or_kept_to(
        (shape, record) in (shapes(), records()),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..4),
    ) {
        let mut bytes = shape.datatype(&record).expect("small").to_bytes();
        for (index, value, how) in changes {
            let at = index.index(bytes.len());
            match how {
                0 => bytes[at] = value,
                1 => bytes.insert(at, value),
                _ => { bytes.remove(at); }
            }
        }
        judge(&bytes);
    }

    #[test]
    fn no_prefix_of_a_program_is_one((shape, record) in (shapes(), records())) {
        let bytes = shape.datatype(&record).expect("small").to_bytes();
        for len in 0..bytes.len() {
            prop_assert!(Datatype::from_bytes(&bytes[..len]).is_err(), "{} of {} bytes", len, bytes.len());
        }
        for more in 0..=255 {
            let longer: Vec<u8> = bytes.iter().copied().chain([more]).collect();
            prop_assert!(Datatype::from_bytes(&longer).is_err(), "{} behind the end", more);
        }
    }
}

/// A program with an honest header for a size, and code of one's own.
fn forged(size: u8, high: u8, chunks: u8, code: &[u8]) -> Vec<u8> {
    // Signed numbers are doubled; so many single bytes as elements.
    let mut bytes = b"DGSP\x01".to_vec();
    bytes.extend([0, high * 2, size, 0, high * 2, chunks, size, 1]);
    bytes.extend([0; 16]);
    bytes.extend(code);
    bytes
}

#[test]
fn forged_programs_are_refused() {
    let declared = |what| Err::<(), _>(ProgramError::Declared(what));
    let facts = "size, bounds or number of chunks";
    let outcome = |bytes: &[u8]| Datatype::from_bytes(bytes).map(|_| ());
    // COPY 0 4, CONTROL, as it should be.
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 0, 4, 5])), Ok(()));
    // It moves more, reaches farther, or does less than it says.
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 0, 5, 5])), declared(facts));
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 2, 4, 5])), declared(facts));
    assert_eq!(outcome(&forged(4, 4, 1, &[5])), declared(facts));
    assert_eq!(outcome(&forged(4, 4, 2, &[1, 0, 4, 5])), declared(facts));
    // A routine calls itself, the one before it, or none.
    assert_eq!(outcome(&forged(4, 4, 1, &[3, 0, 0, 5])), Err(ProgramError::Call { routine: 0, called: 0 }));
    let backwards = [3, 1, 0, 5, 3, 0, 0, 5];
    assert_eq!(outcome(&forged(4, 4, 1, &backwards)), Err(ProgramError::Call { routine: 1, called: 0 }));
    assert_eq!(outcome(&forged(4, 4, 1, &[3, 9, 0, 5])), Err(ProgramError::Call { routine: 0, called: 9 }));
    // Nothing is moved, again and again.
    assert_eq!(outcome(&forged(0, 0, 0, &[3, 1, 0, 5, 5])), declared("a routine moves nothing"));
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 0, 4, 5, 5])), declared("a routine moves nothing"));
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 0, 4, 5, 1, 0, 4, 5])), declared("a routine is never called"));
    let one_of_two = [3, 2, 0, 5, 1, 0, 4, 5, 1, 0, 4, 5];
    assert_eq!(outcome(&forged(4, 4, 1, &one_of_two)), declared("a routine is never called"));
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 0, 4])), declared("its last routine has no end"));
    assert_eq!(outcome(&forged(8, 4, 2, &[1, 0, 4, 4, 2, 0])), declared("its first routine iterates"));
    // Counts and lengths of nothing, and numbers that no memory has.
    assert_eq!(outcome(&forged(4, 4, 1, &[1, 0, 0, 5])), Err(ProgramError::Number(31)));
    assert_eq!(outcome(&forged(4, 4, 1, &[3, 1, 0, 5, 1, 0, 4, 4, 1, 0])), Err(ProgramError::Number(37)));
    let endless = [1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 4, 5];
    assert_eq!(outcome(&forged(4, 4, 1, &endless)), Err(ProgramError::Number(30)));
    // A list that is longer than the bytes that are left.
    assert_eq!(outcome(&forged(4, 4, 1, &[2, 0xff, 0xff, 0x7f, 0, 4, 5])), Err(ProgramError::Number(29)));
    assert_eq!(outcome(&forged(4, 4, 1, &[6])), Err(ProgramError::Instruction(29)));
    assert_eq!(outcome(b"DGSP\x02"), Err(ProgramError::Version));
    assert_eq!(outcome(b"DGS"), Err(ProgramError::Length));
}

/// 2^60 steps in 200 bytes would be possible, and are refused for their size before anything is run.
#[test]
fn routines_that_multiply_are_refused_by_their_size() {
    let mut code = Vec::new();
    for routine in 1..60u8 {
        // Twice the next one, twice.
        code.extend([3, routine, 0, if routine == 1 { 5 } else { 4 }]);
        if routine > 1 {
            code.extend([2, 0]);
        }
    }
    code.extend([1, 0, 1, 4, 2, 0]);
    let error = Datatype::from_bytes(&forged(1, 1, 1, &code)).expect_err("far too much");
    assert!(matches!(error, ProgramError::Datatype(_)), "{error}");
}
