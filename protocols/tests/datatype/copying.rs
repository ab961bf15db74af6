//! Gather and scatter, in one go and in pieces of every length (G02).

use crate::oracle::{all_bytes, distinct, pattern, placed, records, shapes, shared};
use posthaste_protocols::datatype::{Datatype, Layout, Machine, Side, TransferError};
use proptest::prelude::*;

/// Gathers in activations of the lengths that `next` tells.
fn gather_in(layout: &Layout<'_>, memory: &[u8], mut next: impl FnMut() -> usize) -> Vec<u8> {
    let mut machine = Machine::new(layout).expect("countable");
    let mut all = Vec::new();
    while machine.remaining() > 0 {
        let mut staging = vec![0xaa; next()];
        let count = machine.gather(memory, &mut staging).expect("inside") as usize;
        assert!(staging[count..].iter().all(|byte| *byte == 0xaa));
        assert!(count == staging.len() || machine.remaining() == 0);
        all.extend(&staging[..count]);
    }
    assert_eq!(machine.gather(memory, &mut [0; 9]).expect("inside"), 0);
    all
}

fn scatter_in(layout: &Layout<'_>, memory: &mut [u8], data: &[u8], mut next: impl FnMut() -> usize) {
    let mut machine = Machine::new(layout).expect("countable");
    let mut rest = data;
    while machine.remaining() > 0 {
        let (now, later) = rest.split_at(next().min(rest.len()));
        assert_eq!(machine.scatter(&mut *memory, now).expect("inside"), now.len() as u64);
        rest = later;
    }
    assert!(rest.is_empty());
    assert_eq!(machine.scatter(&mut *memory, &[1, 2, 3]).expect("inside"), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, max_global_rejects: 100_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_is_gathered_and_scattered_in_pieces_of_every_length(
        (shape, record, count) in (shapes(), records(), 0..7u64),
        lengths in proptest::collection::vec(1..40usize, 1..8),
    ) {
        let meaning = shape.meaning(&record);
        let datatype = shape.datatype(&record).expect("small");
        let (layout, len) = placed(&datatype, count);
        let bytes = all_bytes(&meaning, count, layout.base as i64);
        prop_assume!(bytes.len() <= 3000);
        let memory = pattern(len);
        let packed: Vec<u8> = bytes.iter().map(|at| memory[*at as usize]).collect();
        let distinct = distinct(&bytes);
        let clean = vec![0xee; len];
        let mut scattered = clean.clone();
        bytes.iter().zip(&packed).for_each(|(at, byte)| scattered[*at as usize] = *byte);
        let every = if bytes.len() <= 300 { 1..bytes.len().max(1) + 2 } else { bytes.len()..bytes.len() + 1 };
        for piece in every {
            prop_assert_eq!(&gather_in(&layout, &memory, || piece), &packed, "in pieces of {}", piece);
            if distinct {
                let mut target = clean.clone();
                scatter_in(&layout, &mut target, &packed, || piece);
                prop_assert_eq!(&target, &scattered, "in pieces of {}", piece);
            }
        }
        let mut cycle = lengths.iter().copied().cycle();
        prop_assert_eq!(&gather_in(&layout, &memory, || cycle.next().unwrap_or(1)), &packed);
        // From and to memory that others may write.
        let mut out = vec![0; packed.len()];
        Machine::new(&layout).expect("countable").gather(shared(&memory), &mut out).expect("inside");
        prop_assert_eq!(&out, &packed);
        if distinct {
            let target = shared(&clean);
            Machine::new(&layout).expect("countable").scatter(target, &packed).expect("inside");
            prop_assert_eq!(&target.to_vec(), &scattered);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, max_global_rejects: 100_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_skipped_is_all_that_is_missing(
        (shape, record, count) in (shapes(), records(), 0..9u64),
        before in 0..30usize,
    ) {
        let datatype = shape.datatype(&record).expect("small");
        let (layout, len) = placed(&datatype, count);
        let bytes = all_bytes(&shape.meaning(&record), count, layout.base as i64);
        prop_assume!(bytes.len() <= 2000);
        let memory = pattern(len);
        let packed: Vec<u8> = bytes.iter().map(|at| memory[*at as usize]).collect();
        let before = before.min(packed.len());
        for skipped in 0..=packed.len() {
            // From the beginning, and from amid of it.
            for gathered in [0, before.min(packed.len() - skipped)] {
                let mut machine = Machine::new(&layout).expect("countable");
                let mut out = vec![0; packed.len()];
                prop_assert_eq!(machine.gather(&memory, &mut out[..gathered]), Ok(gathered as u64));
                prop_assert_eq!(machine.skip(skipped as u64), skipped as u64);
                let rest = &packed[gathered + skipped..];
                prop_assert_eq!(machine.remaining(), rest.len() as u64);
                prop_assert_eq!(machine.gather(&memory, &mut out[gathered..]), Ok(rest.len() as u64));
                prop_assert_eq!(&out[..gathered], &packed[..gathered]);
                prop_assert_eq!(&out[gathered..gathered + rest.len()], rest, "{} skipped behind {}", skipped, gathered);
                prop_assert_eq!(machine.skip(1), 0);
            }
        }
    }
}

#[test]
fn long_regular_layouts_are_copied_whole() {
    // Loops around loops, of blocks that are longer than any register.
    for block in [1usize, 3, 8, 16, 24, 64, 65, 200, 5000] {
        let inner = Datatype::of::<u8>().contiguous(block as u64).expect("small");
        let rows = inner.hvector(9, 1, block as i64 + 3).expect("small");
        let planes = rows.hvector(5, 1, 20 * (block as i64 + 3)).expect("small");
        let (layout, len) = placed(&planes, 3);
        let memory = pattern(len);
        let mut packed = Vec::new();
        for element in 0..3 {
            for plane in 0..5 {
                for row in 0..9 {
                    let at = layout.base as usize
                        + element * planes.extent() as usize
                        + plane * 20 * (block + 3)
                        + row * (block + 3);
                    packed.extend(&memory[at..at + block]);
                }
            }
        }
        for piece in [1000, 777, 64, 4096, packed.len()] {
            assert_eq!(gather_in(&layout, &memory, || piece), packed, "blocks of {block} in {piece}");
            let mut target = vec![0; len];
            scatter_in(&layout, &mut target, &packed, || piece);
            assert_eq!(gather_in(&layout, &target, || piece), packed, "blocks of {block} in {piece}");
        }
    }
}

#[test]
fn a_layout_that_is_not_inside_moves_nothing() {
    let pair = Datatype::of::<u32>().hvector(2, 1, 8).expect("small");
    let mut memory = [7u8; 12];
    for (layout, low, high) in [
        (Layout::new(&pair, 1).at(1), 1, 13),
        (Layout::new(&pair, 2), 0, 24),
        (Layout::new(&pair, 1).at(1 << 40), 1 << 40, (1 << 40) + 12),
    ] {
        let mut machine = Machine::new(&layout).expect("countable");
        let mut out = [0; 16];
        let error = TransferError::OutOfBounds { side: Side::Source, low, high, len: 12 };
        assert_eq!(machine.gather(&memory, &mut out), Err(error));
        let error = TransferError::OutOfBounds { side: Side::Target, low, high, len: 12 };
        assert_eq!(machine.scatter(&mut memory, &[1; 8]), Err(error));
        assert_eq!((out, memory), ([0; 16], [7; 12]));
    }
    let before = pair.resized(0, -40).expect("small");
    let error = Machine::new(&Layout::new(&before, 2).at(39)).expect_err("it begins before any memory");
    let len = i64::MAX as u64;
    assert_eq!(error, TransferError::OutOfBounds { side: Side::Source, low: -1, high: 51, len });
    let mut machine = Machine::new(&Layout::new(&before, 2).at(40)).expect("countable");
    assert_eq!(machine.gather(&[0; 100], &mut [0; 16]), Ok(16));
    let error = Machine::new(&Layout::new(&pair, u64::MAX)).expect_err("no memory is so long");
    assert_eq!(error, TransferError::Count { side: Side::Source, count: u64::MAX });
    assert!(Machine::new(&Layout::new(&pair, 1).at(u64::MAX)).is_err());
}
