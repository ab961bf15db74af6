//! The fuzz targets, driven for a moment by random bytes; `fuzz/` drives them for longer and by coverage.

use posthaste_testkit::fuzz::{environment, lane_reader, lane_writer, packets, program, records};
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

proptest! {
    // Each is a job of three ranks.
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_member_says_anything(data in vec(any::<u8>(), 0..300)) {
        records(&data);
    }
}

/// What libFuzzer found and random bytes do not.
#[test]
fn what_was_found_before_stays_mended() {
    // A record of words may be longer than one with a payload of any kind: this judged it by that.
    lane_reader(&[0, 0, 1, 0, 0, 5, 0, 0, 1, 208, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 2, 8]);
}
