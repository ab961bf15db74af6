//! From layout to layout (G03, G05, G07), straight and staged, and segment by segment (G04).

use crate::oracle::{all_bytes, distinct, kinds, pattern, placed, records, shapes, shared};
use posthaste_core::Rank;
use posthaste_protocols::RegionKey;
use posthaste_protocols::datatype::{
    Datatype, ElementKind, Export, Layout, Method, Segments, Side, SlicedMemory, Thresholds, TransferError,
    pull, push, redistribute, redistribute_staged, redistribute_with,
};
use proptest::prelude::*;

/// Checks all ways from one layout to another; the offsets of all bytes of either are known.
fn check(
    to: &Layout<'_>,
    to_bytes: &[i64],
    to_len: usize,
    from: &Layout<'_>,
    from_bytes: &[i64],
    from_len: usize,
) {
    let source = pattern(from_len);
    let clean = vec![0xee; to_len];
    let mut want = clean.clone();
    for (at, from) in to_bytes.iter().zip(from_bytes) {
        want[*at as usize] = source[*from as usize];
    }
    let total = to_bytes.len() as u64;
    let mut target = clean.clone();
    assert_eq!(redistribute(&mut target, to, &source, from), Ok(total));
    assert!(target == want, "private memory");
    for (target, from_shared) in [(shared(&clean), false), (shared(&clean), true)] {
        match from_shared {
            true => redistribute(target, to, shared(&source), from),
            false => redistribute(target, to, &source, from),
        }
        .expect("as before");
        assert!(target.to_vec() == want, "shared target");
    }
    for staging in [1, 7, 64, 10_000] {
        let mut target = clean.clone();
        assert_eq!(redistribute_staged(&mut target, to, &source, from, &mut vec![0; staging]), Ok(total));
        assert!(target == want, "staged in {staging} bytes");
    }
    for size in [1, 3, 16, 100, 100_000] {
        let handle = RegionKey { rank: Rank(0), offset: 0, len: from_len as u64, incarnation: 0 };
        let export = Export { handle, base: from.base, count: from.count, datatype: from.datatype.clone() };
        let export = Export::from_bytes(&export.to_bytes()).expect("as it was");
        let mut segments = SlicedMemory::new(shared(&source), size);
        let mut target = clean.clone();
        assert_eq!(pull(&mut target, to, &mut segments, &export), Ok(total));
        assert!(target == want, "pulled from segments of {size}");

        let handle = RegionKey { rank: Rank(0), offset: 0, len: to_len as u64, incarnation: 0 };
        let export = Export { handle, base: to.base, count: to.count, datatype: to.datatype.clone() };
        let memory = shared(&clean);
        let mut segments = SlicedMemory::new(memory, size);
        assert_eq!(push(&mut segments, &export, &source, from), Ok(total));
        assert!(memory.to_vec() == want, "pushed to segments of {size}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, max_global_rejects: 100_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn layouts_of_one_kind_match_by_the_number_of_elements(
        (one, two, kind) in (shapes(), shapes(), kinds()),
        times in 1..4u64,
    ) {
        let record = vec![(kind, 0)];
        let (from, to) = (one.meaning(&record), two.meaning(&record));
        let (from_type, to_type) = (one.datatype(&record).expect("small"), two.datatype(&record).expect("small"));
        // So many of each that both have equally many elements.
        let (from_count, to_count) = match (from.elements.len() as u64, to.elements.len() as u64) {
            (0, 0) => (times, 3),
            (0, _) | (_, 0) => (0, 0),
            (a, b) => {
                let common = (1..=a.min(b)).rev().find(|c| a % c == 0 && b % c == 0).unwrap_or(1);
                (b / common * times, a / common * times)
            }
        };
        prop_assume!(from_count * from_type.size() <= 4000);
        let ((from_layout, from_len), (to_layout, to_len)) =
            (placed(&from_type, from_count), placed(&to_type, to_count));
        let from_bytes = all_bytes(&from, from_count, from_layout.base as i64);
        let to_bytes = all_bytes(&to, to_count, to_layout.base as i64);
        prop_assume!(distinct(&to_bytes));
        check(&to_layout, &to_bytes, to_len, &from_layout, &from_bytes, from_len);
    }

    #[test]
    fn records_match_whatever_their_padding_is(
        shape in shapes(),
        (record, other, count) in (records(), records(), 0..9u64),
        packed in any::<bool>(),
    ) {
        // The same kinds at other places.
        let mut moved = record.clone();
        let mut place = 3;
        for (index, field) in moved.iter_mut().enumerate() {
            field.1 = place;
            place += field.0.size() as i64 + other.get(index).map_or(0, |(kind, _)| kind.size() as i64);
        }
        let (from, from_type) = (shape.meaning(&record), shape.datatype(&record).expect("small"));
        let (to, to_type) = match packed {
            // The same number of records in sequence.
            true => {
                let records = (from.elements.len() / record.len()) as u64;
                let one = crate::oracle::Shape::Contiguous(records, Box::new(crate::oracle::Shape::Leaf));
                (one.meaning(&moved), one.datatype(&moved).expect("small"))
            }
            false => (shape.meaning(&moved), shape.datatype(&moved).expect("small")),
        };
        prop_assume!(count * from_type.size() <= 4000);
        let ((from_layout, from_len), (to_layout, to_len)) = (placed(&from_type, count), placed(&to_type, count));
        let from_bytes = all_bytes(&from, count, from_layout.base as i64);
        let to_bytes = all_bytes(&to, count, to_layout.base as i64);
        prop_assume!(distinct(&to_bytes));
        check(&to_layout, &to_bytes, to_len, &from_layout, &from_bytes, from_len);
    }

    #[test]
    fn layouts_with_other_elements_move_nothing(
        (one, two) in (shapes(), shapes()),
        (record, other) in (records(), records()),
        (count, other_count) in (0..5u64, 0..5u64),
    ) {
        let (from, to) = (one.meaning(&record), two.meaning(&other));
        let (from_type, to_type) = (one.datatype(&record).expect("small"), two.datatype(&other).expect("small"));
        let sequence = |kinds: Vec<ElementKind>, count: u64| kinds.repeat(count as usize);
        let same = sequence(from.kinds(), count) == sequence(to.kinds(), other_count);
        let ((from_layout, from_len), (to_layout, to_len)) =
            (placed(&from_type, count), placed(&to_type, other_count));
        let mut target = vec![0xee; to_len];
        let source = pattern(from_len);
        prop_assert_eq!(from_layout.matches(&to_layout), same);
        match redistribute(&mut target, &to_layout, &source, &from_layout) {
            Ok(_) => prop_assert!(same),
            Err(error) => {
                prop_assert!(!same);
                let is_signature = matches!(error, TransferError::Signature { .. });
                prop_assert!(is_signature, "{}", error);
                prop_assert!(target.iter().all(|byte| *byte == 0xee));
            }
        }
    }
}

/// The source document's example: a matrix of 10 × 10 numbers of 4 bytes, the elements of a column adjacent.
#[test]
fn rows_and_columns_of_a_matrix_of_10_by_10() {
    let column = Datatype::of::<i32>().contiguous(10).expect("small");
    let row = Datatype::of::<i32>().vector(10, 1, 10).expect("small");
    assert_eq!((column.signature(), column.mean_chunk(), row.mean_chunk()), (row.signature(), 40, 4));
    let numbers: Vec<i32> = (0..100).collect();
    let matrix: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    let number = |bytes: &[u8], index: usize| {
        i32::from_ne_bytes(bytes[index * 4..index * 4 + 4].try_into().expect("four bytes"))
    };
    for which in 0..10 {
        // One program serves all rows: only the base differs.
        let mut target = vec![0; 400];
        let from = Layout::new(&row, 1).at(4 * which as u64);
        redistribute(&mut target, &Layout::new(&column, 1).at(40 * which as u64), &matrix, &from)
            .expect("alike");
        for index in 0..100 {
            let want = if index / 10 == which { (which + 10 * (index % 10)) as i32 } else { 0 };
            assert_eq!(number(&target, index), want);
        }
    }
    // All rows become columns: the transposed matrix, in one go; rows begin one element apart.
    let rows = row.resized(0, 4).expect("small");
    let mut target = vec![0; 400];
    redistribute(&mut target, &Layout::new(&column, 10), &matrix, &Layout::new(&rows, 10)).expect("alike");
    let mut back = vec![0; 400];
    redistribute(&mut back, &Layout::new(&rows, 10), &target, &Layout::new(&column, 10)).expect("alike");
    for index in 0..100 {
        assert_eq!(number(&target, index), (index / 10 + 10 * (index % 10)) as i32);
        assert_eq!(number(&back, index), index as i32);
    }
}

#[test]
fn one_segment_is_attached_at_a_time_and_in_order() {
    /// Tells which segments were attached.
    struct Told(SlicedMemory, Vec<u64>);
    impl Segments for Told {
        fn segment_size(&self) -> u64 {
            self.0.segment_size()
        }
        fn attach(&mut self, segment: u64) -> Option<posthaste_core::memory::SharedSlice> {
            self.1.push(segment);
            (segment != 9).then(|| self.0.attach(segment)).flatten()
        }
    }
    let source = pattern(1200);
    // Blocks of 24 bytes every 32, in segments of 100: some cross, two segments are not needed.
    let blocks =
        Datatype::of::<u64>().hindexed(&[(0, 3), (32, 3), (80, 3), (190, 3), (500, 3)]).expect("small");
    let local = Datatype::of::<u64>().contiguous(15).expect("small");
    let handle = RegionKey { rank: Rank(3), offset: 4096, len: 1200, incarnation: 0 };
    let export = Export { handle, base: 10, count: 1, datatype: blocks };
    let mut told = Told(SlicedMemory::new(shared(&source), 100), Vec::new());
    let mut out = vec![0; 120];
    pull(&mut out, &Layout::new(&local, 1), &mut told, &export).expect("inside");
    assert_eq!(told.1, [0, 1, 2, 5]);
    let want: Vec<u8> = [10, 42, 90, 200, 510].iter().flat_map(|at| source[*at..*at + 24].to_vec()).collect();
    assert_eq!(out, want);
    // What cannot be attached is told, and so is what lies outside of the export.
    let far = Export { base: 450, ..export.clone() };
    assert_eq!(pull(&mut out, &Layout::new(&local, 1), &mut told, &far), Err(TransferError::Segment(9)));
    let outside = Export { base: 677, ..export };
    let error = TransferError::OutOfBounds { side: Side::Target, low: 677, high: 1201, len: 1200 };
    assert_eq!(push(&mut told, &outside, &out, &Layout::new(&local, 1)), Err(error));
}

#[test]
fn the_thresholds_choose_the_method() {
    let fine = Datatype::of::<u8>().vector(100, 1, 3).expect("small");
    let coarse = Datatype::of::<u8>().vector(10, 10, 13).expect("small");
    let flat = Datatype::of::<u8>().contiguous(100).expect("small");
    let method = |granularity, size, to: &Datatype, from: &Datatype| {
        let thresholds = Thresholds { granularity, size, staging: 32 };
        let (to, from) = (Layout::new(to, 1), Layout::new(from, 1));
        let mut target = vec![0; 400];
        let source = pattern(400);
        let method = redistribute_with(&thresholds, &mut target, &to, &source, &from).expect("alike");
        let mut other = vec![0; 400];
        redistribute(&mut other, &to, &source, &from).expect("alike");
        assert_eq!(target, other);
        method
    };
    assert_eq!(method(1, 0, &fine, &coarse), Method::Staged);
    assert_eq!(method(0, 0, &fine, &coarse), Method::Direct);
    assert_eq!(method(9, 0, &coarse, &coarse), Method::Direct);
    assert_eq!(method(10, 0, &coarse, &coarse), Method::Staged);
    assert_eq!(method(0, 100, &coarse, &coarse), Method::Direct);
    assert_eq!(method(0, 101, &coarse, &coarse), Method::Staged);
    assert_eq!(method(100, 1000, &coarse, &flat), Method::Direct, "a single copy is all it takes");
}

#[test]
fn what_is_not_inside_is_refused_before_there_is_staging_memory() {
    let pair = Datatype::of::<u8>().vector(2, 1, 3).expect("small");
    let thresholds = Thresholds { granularity: 8, size: 0, staging: usize::MAX };
    let (many, mut target) = (Layout::new(&pair, 1 << 44), [0; 16]);
    let refused = redistribute_with(&thresholds, &mut target, &many, &[1; 16], &many);
    assert!(matches!(refused, Err(TransferError::OutOfBounds { .. })), "{refused:?}");
    let few = Layout::new(&pair, 3);
    assert_eq!(redistribute_with(&thresholds, &mut target, &few, &[1; 16], &few), Ok(Method::Staged));
    assert_eq!(target[..12], [1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1]);
}

#[test]
fn elements_that_cannot_be_counted_are_refused_and_match_nothing() {
    // All of them in one place, so that they are inside of any memory, and as regular as can be.
    let here = Datatype::of::<u64>().resized(0, 0).expect("small");
    let fields = [(0, 1, Datatype::of::<u64>()), (8, 1, Datatype::of::<u8>())];
    let mixed = Datatype::structure(&fields).expect("small").resized(0, 0).expect("small");
    for (datatype, count) in [(&here, 1 << 61), (&here, u64::MAX), (&mixed, 1 << 61), (&mixed, u64::MAX)] {
        let layout = Layout::new(datatype, count);
        assert!(!layout.matches(&layout) && !layout.matches(&Layout::new(datatype, count - 1)));
        let refused = TransferError::Count { side: Side::Source, count };
        let (mut target, source) = ([1; 16], [2; 16]);
        assert_eq!(redistribute(&mut target, &layout, &source, &layout), Err(refused.clone()));
        let staged = redistribute_staged(&mut target, &layout, &source, &layout, &mut [0; 8]);
        assert_eq!(staged, Err(refused));
        assert_eq!(target, [1; 16]);
    }
    assert!(!Layout::new(&here, u64::MAX).matches(&Layout::new(&mixed, u64::MAX)));
}

#[test]
fn an_export_at_the_end_of_all_places_is_refused() {
    let pairs = Datatype::of::<u8>().vector(2, 4, 8).expect("small");
    let handle = RegionKey { rank: Rank(0), offset: 0, len: u64::MAX, incarnation: 0 };
    let mut segments = SlicedMemory::new(shared(&[0; 64]), 16);
    let byte = Datatype::of::<u8>();
    let local = Layout::new(&byte, 8);
    for base in [i64::MAX as u64 - 11, i64::MAX as u64, 1 << 63, u64::MAX - 12, u64::MAX] {
        let export = Export { handle, base, count: 1, datatype: pairs.clone() };
        let export = Export::from_bytes(&export.to_bytes()).expect("its program is good");
        let refused = |side| {
            let (low, high) = (i128::from(base), i128::from(base) + 12);
            Err(TransferError::OutOfBounds { side, low, high, len: i64::MAX as u64 })
        };
        assert_eq!(pull(&mut [0; 8], &local, &mut segments, &export), refused(Side::Source));
        assert_eq!(push(&mut segments, &export, &[0; 8], &local), refused(Side::Target));
        assert_eq!(segments.attached(), 0);
    }
    // What might be there, but is not attached.
    let last = Export { handle, base: i64::MAX as u64 - 12, count: 1, datatype: pairs };
    let missing = TransferError::Segment((i64::MAX as u64 - 12) / 16);
    assert_eq!(pull(&mut [0; 8], &local, &mut segments, &last), Err(missing));
}
