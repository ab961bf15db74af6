//! The fuzz targets, driven for a moment by random bytes; `fuzz/` drives them for longer and by coverage.

use posthaste_testkit::fuzz::{environment, lane_reader, lane_writer, packets, program};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any, proptest};

proptest! {
    // What fails is printed; no file of it is kept in the tree.
    #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_lane_says_anything_to_its_reader(data in vec(any::<u8>(), 0..2000)) {
        lane_reader(&data);
    }

    #[test]
    fn a_lane_says_anything_to_its_writer(data in vec(any::<u8>(), 0..1000)) {
        lane_writer(&data);
    }

    #[test]
    fn packets_are_of_any_kind(data in vec(any::<u8>(), 0..2000)) {
        packets(&data);
    }

    #[test]
    fn programs_of_datatypes_are_of_any_kind(data in vec(any::<u8>(), 0..300)) {
        program(&data);
        program(&[&[0], &data[..]].concat());
    }

    #[test]
    fn the_environment_says_anything(data in vec(any::<u8>(), 0..300)) {
        environment(&data);
    }
}
