//! Whatever arrives, from strangers and from members: no panic, no memory for what was only announced, and nothing but
//! what was sent reaches a handler. The targets are the testkit's; `fuzz/` drives them for longer and by coverage.

use posthaste_tcp::Limits;
use posthaste_tcp::frame::Header;
use posthaste_testkit::fuzz::{tcp_handshake, tcp_header, tcp_session};
use proptest::prelude::*;

/// Bytes that are nearly frames, so that more than the first check is reached.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![Just(0u8), Just(1), 0xf0..=0xf6u8, any::<u8>()];
    let len = prop_oneof![0..40u32, Just(8u32), 2000..2100u32, 65_000..66_000u32, any::<u32>()];
    let info = prop_oneof![4 => Just(0u8), 1 => 0..=112u8, 1 => any::<u8>()];
    let protocol = prop_oneof![3 => 0..20u16, 1 => any::<u16>()];
    let word = prop_oneof![3 => 0..70_000u64, 1 => any::<u64>()];
    let frame = (kind, len, info, protocol, word, any::<u8>(), 0..10u8).prop_map(
        |(kind, len, info, protocol, word, fill, short)| {
            let mut bytes = len.to_le_bytes().to_vec();
            bytes.extend([kind, info]);
            bytes.extend(protocol.to_le_bytes());
            bytes.extend(word.to_le_bytes());
            let body = (len as usize + usize::from(info)).min(70_000);
            bytes.resize(bytes.len() + body.saturating_sub(usize::from(short == 0)), fill);
            bytes
        },
    );
    proptest::collection::vec(frame, 0..12).prop_map(|frames| frames.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_header_is_accepted_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        tcp_header(&bytes);
    }

    #[test]
    fn any_handshake_without_the_key_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        tcp_handshake(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_member_ends_in_order(bytes in frames()) {
        tcp_session(&bytes);
    }

    #[test]
    fn any_member_of_random_bytes_ends_in_order(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        tcp_session(&bytes);
    }
}

/// A frame that is announced and does not come costs its own length at most, and one past the limit nothing.
#[test]
fn what_is_only_announced_is_bounded() {
    let limits = Limits::default();
    let announced =
        |len: u32| Header { len: len.into(), kind: 0, info: 0, protocol: 17.into(), word: 0.into() };
    assert!(announced(limits.max_eager as u32).check(&limits).is_ok());
    for len in [limits.max_eager as u32 + 1, 1 << 31, u32::MAX] {
        assert!(announced(len).check(&limits).is_err());
    }
}
