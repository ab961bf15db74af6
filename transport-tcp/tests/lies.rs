//! What becomes of a peer that has proven who it is and then breaks the rules: it is cut off, and hears of that.

mod support;

use posthaste_core::device::Body;
use posthaste_core::engine::{EngineConfig, Payload};
use posthaste_core::protocol::Flow;
use posthaste_core::{ContextId, Fault, JobShape, Messager, Rank};
use posthaste_tcp::handshake::{ANSWER_LEN, Identity, Initiator, VERDICT_LEN, Verdict};
use posthaste_tcp::{AddressBook, Limits, Mode, PeerAddress, TcpDevice};
use posthaste_testkit::conformance::{Log, Probe};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::config;
use support::job::{Member, at};

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };
/// As long as any test may wait for what is to happen at once.
const PATIENCE: Duration = Duration::from_secs(60);

/// A frame: its kind, protocol and word, and so many bytes behind it.
fn frame(out: &mut Vec<u8>, (kind, protocol): (u8, u16), word: u64, behind: &[u8]) {
    out.extend_from_slice(&(behind.len() as u32).to_le_bytes());
    out.extend_from_slice(&[kind, 0]);
    out.extend_from_slice(&protocol.to_le_bytes());
    out.extend_from_slice(&word.to_le_bytes());
    out.extend_from_slice(behind);
}

/// Rank 0, and a connection with it that says whatever it likes in the name of rank 1.
async fn liar() -> (Member, TcpStream) {
    let of = |rank| config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default());
    let book = Arc::new(AddressBook::new(2));
    book.set(Rank(1), PeerAddress { address: "127.0.0.1:1".parse().unwrap(), incarnation: 1 });
    let victim = Member::open(of(0), book, &Log::default()).await;
    let address = victim.device.address();
    let (initiator, hello) = Initiator::hello(&Identity::new(&of(1)), ContextId(0), at(0), 1, false).unwrap();
    let connect = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&hello).unwrap();
        let mut answer = [0; ANSWER_LEN];
        stream.read_exact(&mut answer).unwrap();
        let (mut channel, finish) = initiator.answered(&answer).unwrap();
        stream.write_all(&finish).unwrap();
        let mut verdict = [0; VERDICT_LEN];
        stream.read_exact(&mut verdict).unwrap();
        assert_eq!(channel.heard(&verdict).unwrap(), Verdict::Accept);
        stream
    };
    let stream = tokio::task::spawn_blocking(connect).await.unwrap();
    (victim, stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_peer_is_to_be_told_of_absent_memory_is_bounded_though_it_gets() {
    let (victim, mut stream) = liar().await;
    let mut burst = Vec::new();
    for _ in 0..15_000 {
        // A put of memory that is not there, and one that is, so that there is a word for each.
        frame(&mut burst, (0xf1, 0), 1 << 40, &[]);
        frame(&mut burst, (0xf1, 0), 0, &[]);
    }
    // A get of nothing, whose answer says that they are over.
    frame(&mut burst, (0xf3, 0), 0, &0u64.to_le_bytes());
    let lie = move || (0..1000).position(|_| stream.write_all(&burst).is_err());
    // What the kernels take does not wait here; a burst has 360 KB of words.
    let round = tokio::task::spawn_blocking(lie).await.unwrap();
    assert!(round.is_some_and(|round| round < 100), "cut off in round {round:?}");
    assert_eq!(victim.errors(), [Fault::PeerCorrupt(Rank(1))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_sends_what_no_engine_does_is_hung_up_on() {
    // Nothing, and too short a record for what it says it is.
    for protocol in [1, 9] {
        let (victim, mut stream) = liar().await;
        let mut bad = Vec::new();
        frame(&mut bad, (0, protocol), 7, b"bad");
        let lie = move || {
            stream.write_all(&bad).unwrap();
            match stream.read_to_end(&mut Vec::new()) {
                Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
                Ok(_) => true,
            }
        };
        assert!(tokio::task::spawn_blocking(lie).await.unwrap(), "the connection is still there");
        assert_eq!(victim.errors(), [Fault::PeerCorrupt(Rank(1))]);
    }
}

/// A rank whose peers may have so many bytes under way to it without its leave.
async fn believes_in(rank: u32, book: Arc<AddressBook>, credit_bytes: u64) -> Member {
    let settings = config(Rank(rank), SHAPE, Mode::HandshakeOnly, Limits::default());
    let device = Arc::new(TcpDevice::new(settings, book).unwrap());
    let settings = EngineConfig { credit_bytes, ..EngineConfig::default() };
    let client = support::client(device.clone(), Rank(rank), SHAPE, settings);
    let echo = Probe::new("echo", |scope, message| {
        let to = message.reply().expect("a request");
        let Body::Short(bytes) = message.body else { panic!("a short one") };
        scope.reply(to, Ok(Payload::Borrowed(bytes)));
    });
    client.register(Arc::new(echo.flow(Flow::Replied))).unwrap();
    client.register(Arc::new(Probe::new("keeps", |_, _| {}).flow(Flow::Credited))).unwrap();
    let errors = Arc::new(Mutex::new(Vec::new()));
    let told = errors.clone();
    client.on_error(move |fault| told.lock().unwrap().push(fault));
    client.open().await.unwrap();
    Member { device, client, errors, memory: 0 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_is_cut_off_for_what_it_believed_hears_of_it() {
    let book = Arc::new(AddressBook::new(2));
    let (zero, one) = (believes_in(0, book.clone(), 64 << 10).await, believes_in(1, book, 16 << 20).await);
    assert_eq!(one.call(0, b"hello").await.unwrap(), b"hello");
    for _ in 0..40 {
        if one.send(0, 1, &[], &[1; 10_000], false).await.is_err() {
            break;
        }
    }
    let call = tokio::time::timeout(PATIENCE, one.call(0, b"still there?")).await.expect("it ends");
    assert!(call.is_err(), "{call:?}");
    assert_eq!(zero.errors(), [Fault::PeerCorrupt(Rank(1))]);
    assert_eq!(one.errors(), [Fault::PeerLost(Rank(0))]);
}
