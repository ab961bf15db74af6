//! What strangers and members can send over TCP.

use crate::conformance::{Log, Probe};
use crate::sim::open_without_driver;
use posthaste_core::inprocess::{InProcessFabric, Limits as InProcessLimits};
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Client, ClientId, ContextId, Device, Endpoint, Fault, JobShape, LinuxSysdep, Messager, Rank,
};
use posthaste_tcp::frame::{HEADER, Header};
use posthaste_tcp::handshake::{
    ANSWER_LEN, FINISH_LEN, HELLO_LEN, Identity, Initiator, VERDICT_LEN, respond,
};
use posthaste_tcp::{AddressBook, JobKey, Limits, Memory, Mode, TcpConfig, TcpDevice};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };

fn at(rank: u32) -> Endpoint {
    Endpoint::new(Rank(rank), ContextId(0))
}

fn config(rank: u32, mode: Mode, limits: Limits) -> TcpConfig {
    let mut config =
        TcpConfig::new(Rank(rank), SHAPE, *b"a job of a test.", JobKey::new([42; 32])).mode(mode);
    config.limits = limits;
    config.memory = Memory::Of(memory());
    config
}

/// Memory that is never given back to the system, and so is the same in each run.
fn memory() -> Arc<dyn Device> {
    static MEMORY: OnceLock<Arc<dyn Device>> = OnceLock::new();
    let limits = InProcessLimits { segment: 1 << 20, ..InProcessLimits::default() };
    let make = || InProcessFabric::with_limits(SHAPE, limits).device(ClientId(0), Rank(0));
    MEMORY.get_or_init(make).clone()
}

fn identity(rank: u32, mode: Mode) -> Identity {
    Identity::new(&config(rank, mode, Limits::default()))
}

/// Any bytes as a frame's header.
pub fn tcp_header(bytes: &[u8]) {
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
pub fn tcp_handshake(bytes: &[u8]) {
    for mode in [Mode::HandshakeOnly, Mode::Encrypted] {
        let me = identity(1, mode);
        let mut hello = [0; HELLO_LEN];
        let len = bytes.len().min(HELLO_LEN);
        hello[..len].copy_from_slice(&bytes[..len]);
        assert!(respond(&me, &hello).is_err());
        // A good beginning, and then the bytes in its place.
        let (initiator, good) =
            Initiator::hello(&identity(0, mode), ContextId(0), at(1), 1, false).expect("random");
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
pub fn tcp_session(bytes: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let inside = runtime.enter();
    let book = Arc::new(AddressBook::new(2));
    let limits = Limits { max_eager: 64 << 10, ..Limits::default() };
    let own = config(0, Mode::Insecure, limits);
    let device = Arc::new(TcpDevice::new(own, book.clone()).expect("a free port"));
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: vec![device.clone()],
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), SHAPE), None)),
        config: Default::default(),
        spin: Some(Duration::ZERO),
        driver_thread: false,
    });
    let client = client.expect("the device makes its ports");
    let log = Log::default();
    client.register(Arc::new(Probe::recording("log", &log))).expect("the name is free");
    let errors: Arc<Mutex<Vec<Fault>>> = Arc::default();
    let told = errors.clone();
    client.on_error(move |fault| told.lock().expect("no panic").push(fault));
    open_without_driver(&client);
    drop(inside);
    let me = Identity::new(&config(1, Mode::Insecure, limits));
    let (initiator, hello) = Initiator::hello(&me, ContextId(0), at(0), 1, false).expect("random numbers");
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
