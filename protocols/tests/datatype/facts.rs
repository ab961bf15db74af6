//! What is known about a datatype without running it, and its program.

use crate::oracle::{records, shapes, signature};
use posthaste_protocols::datatype::program::Instruction;
use posthaste_protocols::datatype::{Bounds, Datatype, DatatypeError, ElementKind};
use posthaste_protocols::structure;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn size_bounds_and_signature_are_those_of_the_bytes((shape, record) in (shapes(), records())) {
        let meaning = shape.meaning(&record);
        let datatype = shape.datatype(&record).expect("small");
        let bytes = meaning.bytes();
        prop_assert_eq!(datatype.size(), bytes.len() as u64);
        prop_assert_eq!(datatype.extent(), meaning.upper - meaning.lower);
        prop_assert_eq!(datatype.bounds().lower, meaning.lower);
        let true_bounds = match (bytes.iter().min(), bytes.iter().max()) {
            (Some(low), Some(high)) => (*low, high + 1),
            _ => (0, 0),
        };
        prop_assert_eq!(datatype.true_bounds(), true_bounds);
        prop_assert_eq!(datatype.signature(), signature(&meaning.kinds()));
        // Chunks are at most one for each element, and at least one for each gap.
        let gaps = bytes.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() as u64;
        prop_assert!(datatype.chunks() <= meaning.elements.len() as u64);
        prop_assert!(datatype.chunks() > gaps || bytes.is_empty());
    }

    #[test]
    fn a_program_is_the_same_after_a_journey((shape, record) in (shapes(), records())) {
        let datatype = shape.datatype(&record).expect("small");
        let bytes = datatype.to_bytes();
        let back = Datatype::from_bytes(&bytes).expect("a program of our own");
        prop_assert_eq!(back.program(), datatype.program());
        prop_assert_eq!(back.signature(), datatype.signature());
        prop_assert_eq!(back.bounds(), datatype.bounds());
        prop_assert_eq!(back.true_bounds(), datatype.true_bounds());
        prop_assert_eq!((back.size(), back.chunks()), (datatype.size(), datatype.chunks()));
        prop_assert_eq!(back.to_bytes(), bytes);
        // It is as good for further ones as the original.
        let twice = back.vector(2, 1, 3).expect("small");
        prop_assert_eq!(twice.to_bytes(), datatype.vector(2, 1, 3).expect("small").to_bytes());
    }
}

#[test]
fn a_million_elements_are_a_few_instructions() {
    let vector = Datatype::of::<f64>().vector(1_000_000, 1, 3).expect("it fits");
    assert_eq!(vector.program().len(), 4, "{:?}", vector.program());
    assert!(vector.to_bytes().len() < 64, "{} bytes", vector.to_bytes().len());
    assert_eq!((vector.size(), vector.mean_chunk(), vector.chunks()), (8_000_000, 8, 1_000_000));
    // Irregular descriptions of regular data become regular.
    let places: Vec<(i64, u64)> = (0..10_000).map(|index| (index * 5, 2)).collect();
    let indexed = Datatype::of::<u32>().indexed(&places).expect("it fits");
    assert_eq!(indexed.program(), Datatype::of::<u32>().vector(10_000, 2, 5).expect("it fits").program());
    // And what is contiguous is one block, however it was described.
    let cube = Datatype::of::<u16>().subarray(&[4, 5, 6], &[4, 5, 6], &[0, 0, 0]).expect("it fits");
    assert!(matches!(cube.program(), [Instruction::Copy(block), Instruction::Control] if block.len == 240));
    assert!(cube.is_contiguous() && cube.mean_chunk() == 240);
    // Loops that continue each other are one.
    let planes =
        Datatype::of::<u8>().hvector(10, 1, 4).and_then(|row| row.hvector(7, 1, 40)).expect("it fits");
    assert_eq!(planes.program(), Datatype::of::<u8>().hvector(70, 1, 4).expect("it fits").program());
    // A body that is used many times is in the program once.
    let odd: Vec<(i64, u64)> = (0..50).map(|index| (index * index, 1)).collect();
    let odd = Datatype::of::<u8>().indexed(&odd).expect("it fits");
    let places: Vec<(i64, u64)> = (0..40).map(|index| (index * index + 1, 1)).collect();
    let many = odd.indexed(&places).expect("it fits");
    assert_eq!(many.size(), 2000);
    assert!(many.to_bytes().len() < 2 * odd.to_bytes().len() + 40 * 8, "{}", many.to_bytes().len());
}

#[test]
fn structs_are_described_by_their_fields() {
    #[repr(C)]
    #[allow(dead_code, reason = "only its layout matters")]
    struct Inner {
        flag: u8,
        value: i64,
    }
    #[repr(C)]
    #[allow(dead_code, reason = "only its layout matters")]
    struct Outer {
        id: u16,
        inner: Inner,
        place: [f32; 3],
        ignored: u64,
        end: u8,
    }
    let inner = structure!(Inner { flag: u8, value: i64 }).expect("small");
    let outer = structure!(Outer { id: u16, inner = inner, place: [f32; 3], end: u8, }).expect("small");
    assert_eq!(outer.size(), 2 + 9 + 12 + 1);
    assert_eq!(outer.bounds(), Bounds { lower: 0, extent: size_of::<Outer>() as i64 });
    use ElementKind::*;
    assert_eq!(outer.signature(), signature(&[U16, U8, I64, F32, F32, F32, U8]));
    assert_eq!(outer.true_bounds(), (0, std::mem::offset_of!(Outer, end) as i64 + 1));
}

#[test]
fn what_is_too_large_or_impossible_is_refused() {
    let byte = Datatype::of::<u8>();
    assert_eq!(byte.contiguous(u64::MAX).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.vector(u64::MAX, u64::MAX, 1).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.hvector(2, 1, i64::MAX).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.hvector(3, 1, i64::MIN).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.indexed(&[(i64::MIN, 1)]).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.indexed(&[(0, u64::MAX)]).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.hindexed(&[(i64::MAX, 1)]).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.resized(i64::MIN, 0).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.resized(0, i64::MAX).unwrap_err(), DatatypeError::TooLarge);
    assert_eq!(byte.subarray(&[1 << 40, 1 << 40], &[1, 1], &[0, 0]).unwrap_err(), DatatypeError::TooLarge);
    let outside = DatatypeError::Subarray { dimension: 1, start: 3, count: 2, len: 4 };
    assert_eq!(byte.subarray(&[4, 4], &[1, 2], &[0, 3]).unwrap_err(), outside);
    let error = byte.subarray(&[4], &[1, 2], &[0, 3]).unwrap_err();
    assert_eq!(error, DatatypeError::Dimensions { sizes: 1, counts: 2, starts: 2 });
    // 32 levels are possible, and no more.
    let mut nested = byte;
    let mut levels = 0;
    let error = loop {
        match nested.hvector(2, 1, 1 + (3 << levels)) {
            Ok(deeper) => nested = deeper,
            Err(error) => break error,
        }
        levels += 1;
    };
    assert_eq!((levels, error), (32, DatatypeError::TooDeep { depth: 33 }));
    assert_eq!(nested.size(), 1 << 32);
    assert!(nested.to_bytes().len() < 500);
    Datatype::from_bytes(&nested.to_bytes()).expect("as deep as is possible");
}
