//! Whatever arrives, from strangers and from members: no panic, no memory for what was only announced, and nothing but
//! what was sent reaches a handler. Plain functions of bytes, driven by proptest here and by a fuzzer elsewhere.

mod support;

use posthaste_core::{ContextId, Fault, JobShape, Messager, Rank};
use posthaste_tcp::frame::{HEADER, Header};
use posthaste_tcp::handshake::{
    ANSWER_LEN, FINISH_LEN, HELLO_LEN, Identity, Initiator, VERDICT_LEN, respond,
};
use posthaste_tcp::{AddressBook, Limits, Mode, TcpDevice};
use posthaste_testkit::conformance::{Log, Probe};
use posthaste_testkit::sim::open_without_driver;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::job::at;
use support::{client, config, runtime};
use zerocopy::FromBytes;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };

fn identity(rank: u32, mode: Mode) -> Identity {
    Identity::new(&config(Rank(rank), SHAPE, mode, Limits::default()))
}

/// Any bytes as a frame's header.
fn header(bytes: &[u8]) {
    let Ok((header, _)) = Header::read_from_prefix(bytes) else {
        assert!(bytes.len() < HEADER);
        return;
    };
    let limits = Limits::default();
    if header.check(&limits).is_ok() {
        let len = header.len.get() as usize;
        assert!(header.kind >= 0xf0 || (len <= limits.max_eager && header.info <= 112));
    }
}

/// Any bytes as a hello, an answer, a finish and a verdict. Without the key nothing is ever accepted.
fn handshake(bytes: &[u8]) {
    for mode in [Mode::HandshakeOnly, Mode::Encrypted] {
        let me = identity(1, mode);
        let mut hello = [0; HELLO_LEN];
        let len = bytes.len().min(HELLO_LEN);
        hello[..len].copy_from_slice(&bytes[..len]);
        assert!(respond(&me, &hello).is_err());
        // A good beginning, and then the bytes in its place.
        let (initiator, good) = Initiator::hello(&identity(0, mode), ContextId(0), at(1), 1).expect("random");
        let mut changed = good;
        for (at, byte) in bytes.iter().enumerate() {
            changed[at % HELLO_LEN] ^= byte;
        }
        assert_eq!(respond(&me, &changed).is_ok(), changed == good);
        let (_, responder, answer) = respond(&me, &good).expect("the same key");
        let mut finish = [0; FINISH_LEN];
        let len = bytes.len().min(FINISH_LEN);
        finish[..len].copy_from_slice(&bytes[..len]);
        assert!(responder.finished(&finish).is_err());
        let mut changed = answer;
        for (at, byte) in bytes.iter().enumerate() {
            changed[at % ANSWER_LEN] ^= byte;
        }
        let same = changed == answer;
        match initiator.answered(&changed) {
            Err(_) => assert!(!same),
            Ok((mut channel, _)) => {
                assert!(same);
                let mut verdict = [0; VERDICT_LEN];
                let len = bytes.len().min(VERDICT_LEN);
                verdict[..len].copy_from_slice(&bytes[..len]);
                assert!(channel.heard(&verdict).is_err());
            }
        }
    }
}

/// Any bytes as all that a member ever sends after its handshake: it ends as lost, left or corrupt.
fn session(bytes: &[u8]) {
    let runtime = runtime();
    let inside = runtime.enter();
    let book = Arc::new(AddressBook::new(2));
    let limits = Limits { max_eager: 64 << 10, ..Limits::default() };
    let own = config(Rank(0), SHAPE, Mode::Insecure, limits);
    let device = Arc::new(TcpDevice::new(own, book.clone()).expect("a free port"));
    let client = client(device.clone(), Rank(0), SHAPE, Default::default());
    let log = Log::default();
    client.register(Arc::new(Probe::recording("log", &log))).expect("the name is free");
    let errors: Arc<Mutex<Vec<Fault>>> = Arc::default();
    let told = errors.clone();
    client.on_error(move |fault| told.lock().expect("no panic").push(fault));
    open_without_driver(&client);
    drop(inside);
    let me = Identity::new(&config(Rank(1), SHAPE, Mode::Insecure, limits));
    let (initiator, hello) = Initiator::hello(&me, ContextId(0), at(0), 1).expect("random numbers");
    let mut stream = TcpStream::connect(device.address()).expect("it listens");
    let mut step = |millis: u64| {
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(millis)).await });
        client.advance();
    };
    stream.write_all(&hello).expect("a small write");
    let mut answer = [0; ANSWER_LEN];
    stream.set_nonblocking(true).expect("it can be");
    read(&mut stream, &mut answer, &mut step);
    let (_, finish) = initiator.answered(&answer).expect("there is no key");
    stream.write_all(&finish).expect("a small write");
    read(&mut stream, &mut [0; VERDICT_LEN], &mut step);
    let mut rest = bytes;
    let start = Instant::now();
    while errors.lock().expect("no panic").is_empty() {
        match stream.write(rest) {
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => rest = &[],
        }
        if rest.is_empty() {
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        step(0);
        assert!(start.elapsed() < Duration::from_secs(20), "the end is not noticed");
    }
    let errors = errors.lock().expect("no panic").clone();
    let ends = [Fault::PeerLost(Rank(1)), Fault::PeerClosed(Rank(1)), Fault::PeerCorrupt(Rank(1))];
    assert!(errors.iter().any(|fault| ends.contains(fault)), "{errors:?}");
    assert!(log.len() <= bytes.len() / HEADER);
}

fn read(stream: &mut TcpStream, into: &mut [u8], step: &mut impl FnMut(u64)) {
    let mut had = 0;
    while had < into.len() {
        match stream.read(&mut into[had..]) {
            Ok(0) => panic!("the handshake was refused"),
            Ok(count) => had += count,
            Err(_) => step(1),
        }
    }
}

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
        header(&bytes);
    }

    #[test]
    fn any_handshake_without_the_key_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        handshake(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_member_ends_in_order(bytes in frames()) {
        session(&bytes);
    }

    #[test]
    fn any_member_of_random_bytes_ends_in_order(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        session(&bytes);
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
