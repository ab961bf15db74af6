//! What somebody costs who has proven nothing: under 512 bytes, whatever it says and however many there are; looking at a proof
//! takes some more for that moment, once and not for each of them.
//!
//! In a binary of its own because it replaces the allocator.
#![allow(unsafe_code, reason = "an allocator that counts has to be one")]

mod support;

use posthaste_core::{ContextId, Endpoint, JobShape, Rank};
use posthaste_tcp::handshake::{ANSWER_LEN, FINISH_LEN, HELLO_LEN, Identity, Initiator};
use posthaste_tcp::{AddressBook, JobKey, Limits, Mode, TcpConfig};
use posthaste_testkit::conformance::Log;
use posthaste_testkit::random::Random;
use posthaste_testkit::watchdog::Watchdog;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};
use support::config;
use support::job::Member;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 1 };
/// What one of them may cost.
const MOST: i64 = 512;
/// What looking at one proof takes meanwhile: it is one at a time, however many there are.
const LOOK: i64 = 1024;

thread_local! {
    /// Whether this is the thread of the rank that is visited.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Bytes that the thread has, and the most that it had since it was asked last.
static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);

/// One test at a time: the counts are of the process.
static ALONE: Mutex<()> = Mutex::new(());

struct Counting;

fn count(bytes: i64) {
    // A thread that ends has no such thing any more, and is not the one.
    if COUNTED.try_with(Cell::get).unwrap_or(false) {
        let live = LIVE.fetch_add(bytes, Ordering::SeqCst) + bytes;
        PEAK.fetch_max(live, Ordering::SeqCst);
    }
}

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract; counting touches no
// memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there for a moment.
        count(size as i64);
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Rank 0, on a thread of its own with nothing to do but to look after its door.
struct Victim {
    address: SocketAddr,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Victim {
    fn open(config: TcpConfig) -> Victim {
        let (tell, told) = mpsc::channel();
        let (end, ends) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            support::runtime().block_on(async {
                let log = Log::default();
                let member = Member::open(config, Arc::new(AddressBook::new(2)), &log).await;
                COUNTED.set(true);
                tell.send(member.device.address()).expect("somebody waits for it");
                ends.await.expect("it is told");
                COUNTED.set(false);
                assert!(log.is_empty() && member.errors().is_empty(), "a stranger got through");
            });
        });
        let victim = Victim { address: told.recv().expect("it opens"), end: Some(end), thread: Some(thread) };
        // What the first visit leaves for all later ones.
        for _ in 0..3 {
            victim.is_turned_away(&[7; HELLO_LEN]);
        }
        victim
    }

    fn visit(&self, says: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time that is not zero");
        // It may be turned away before it has said all.
        let _ = stream.write_all(says);
        stream
    }

    fn is_turned_away(&self, says: &[u8]) {
        assert_eq!(ends(self.visit(says)), 0, "the stranger was answered");
    }

    /// Bytes that are there.
    fn has(&self) -> i64 {
        PEAK.store(LIVE.load(Ordering::SeqCst), Ordering::SeqCst);
        LIVE.load(Ordering::SeqCst)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let told = self.end.take().is_some_and(|end| end.send(()).is_ok());
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        if !std::thread::panicking() {
            assert!(told && ended.is_some_and(|ended| ended.is_ok()), "the rank has panicked");
        }
    }
}

/// It is closed at the other end; returns how many bytes came before.
fn ends(mut stream: TcpStream) -> usize {
    let mut came = 0;
    loop {
        match stream.read(&mut [0; 64]) {
            Ok(0) => return came,
            Ok(count) => came += count,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return came,
            Err(error) => panic!("it is not turned away: {error}"),
        }
    }
}

fn of(rank: u32, mode: Mode) -> TcpConfig {
    config(Rank(rank), SHAPE, mode, Limits::default())
}

/// Rank 1's hello to rank 0, with that key.
fn hello(mode: Mode, key: u8) -> (Initiator, [u8; HELLO_LEN]) {
    let mut config = of(1, mode);
    config.key = JobKey::new([key; 32]);
    let to = Endpoint::new(Rank(0), ContextId(0));
    Initiator::hello(&Identity::new(&config), ContextId(0), to, 1, false).expect("random numbers")
}

const KEY: u8 = 42;

/// One after the other: while it is there none costs more than that, and nothing is left of it.
#[test]
fn a_visit_costs_under_512_bytes_and_leaves_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let _dog = Watchdog::start("visits", Duration::from_secs(100), || "it hangs".to_owned());
    let mut random = Random::new(3);
    for mode in [Mode::HandshakeOnly, Mode::Encrypted, Mode::Insecure] {
        let victim = Victim::open(of(0, mode));
        let genuine = hello(mode, KEY).1;
        let mut cases = vec![
            ("a scan", Vec::new(), MOST),
            ("a few bytes", b"posthast".to_vec(), MOST),
            ("another protocol", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), MOST),
            ("anything", random.bytes(HELLO_LEN), MOST),
            ("a lot of it", random.bytes(64 << 10), MOST),
            ("half a hello", genuine[..HELLO_LEN / 2].to_vec(), MOST),
            ("a length without end", [&[0xff; 8], &genuine[8..]].concat(), MOST),
        ];
        // A good hello but for one field.
        for (field, at) in [("version", 8), ("mode", 10), ("rank", 12), ("addressee", 16), ("job", 40)] {
            let mut wrong = genuine;
            wrong[at] ^= 0x40;
            cases.push((field, wrong.to_vec(), MOST));
        }
        if mode != Mode::Insecure {
            cases.push(("another key", hello(mode, KEY + 1).1.to_vec(), LOOK));
            cases.push(("a wrong finish", [&genuine[..], &[9; FINISH_LEN]].concat(), LOOK));
        }
        for (what, says, most) in cases {
            let before = victim.has();
            for _ in 0..50 {
                let stream = victim.visit(&says);
                // What waits for more is told that there is none.
                let _ = stream.shutdown(std::net::Shutdown::Write);
                // Nobody but who has the key is answered, and who shows a recording of it is not for long.
                let answered = if what == "a wrong finish" { ANSWER_LEN } else { 0 };
                assert!([0, answered].contains(&ends(stream)), "{mode:?}, {what}");
            }
            let peak = PEAK.load(Ordering::SeqCst) - before;
            println!("{mode:?}, {what}: {peak} bytes at most");
            // It has come so far that its proof was looked at.
            assert!(peak > 0 || most == MOST, "{mode:?}, {what}");
            assert!(peak < most, "{mode:?}, {what}: {peak} bytes");
            // Its socket is closed first.
            let until = Instant::now() + Duration::from_secs(10);
            while victim.has() > before {
                let left = victim.has() - before;
                assert!(Instant::now() < until, "{mode:?}, {what}: {left} bytes are left");
                std::thread::yield_now();
            }
        }
    }
}

/// At once: each costs no more than that, and one that has the key gets in meanwhile.
#[test]
fn sockets_that_wait_cost_under_512_bytes_each() {
    const MANY: usize = 200;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let _dog = Watchdog::start("many", Duration::from_secs(100), || "it hangs".to_owned());
    for mode in [Mode::HandshakeOnly, Mode::Encrypted] {
        for what in ["nothing", "half a hello", "a hello"] {
            let mut config = of(0, mode);
            config.times.handshake = Duration::from_secs(60);
            let victim = Victim::open(config);
            let before = victim.has();
            let mut waiting = Vec::new();
            for _ in 0..MANY {
                let hello = hello(mode, KEY).1;
                let says = match what {
                    "nothing" => &[][..],
                    "half a hello" => &hello[..HELLO_LEN / 2],
                    _ => &hello[..],
                };
                let mut stream = victim.visit(says);
                if what == "a hello" {
                    // It is answered, and kept until it shows that it is no recording.
                    stream.read_exact(&mut [0; ANSWER_LEN]).expect("an answer");
                }
                waiting.push(stream);
            }
            // The last one, so that all before have been looked at.
            victim.is_turned_away(&[7; HELLO_LEN]);
            let (live, peak) = (LIVE.load(Ordering::SeqCst) - before, PEAK.load(Ordering::SeqCst) - before);
            println!("{mode:?}, {what}: {live} bytes of {MANY} sockets, {peak} at most");
            assert!(live > 0, "they are there");
            assert!(live < MOST * MANY as i64, "{mode:?}, {what}: {live} bytes of {MANY} sockets");
            assert!(peak < MOST * MANY as i64 + LOOK, "{mode:?}, {what}: {peak} bytes of {MANY} sockets");
            for stream in waiting {
                let _ = stream.shutdown(std::net::Shutdown::Write);
                ends(stream);
            }
        }
    }
}
