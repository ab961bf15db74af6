//! A proxy for TCP connections that splits, coalesces, delays, changes and cuts what passes through it, at any byte.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How a connection is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// In order, as if both sides had closed.
    Close,
    /// By a reset to both sides.
    Reset,
    /// Nothing passes any more, and nobody is told.
    Stall,
}

/// What happens to the bytes of one direction.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// Most bytes passed on at a time.
    pub split: Option<usize>,
    /// Wait so long before each part, so that what comes meanwhile is passed on together.
    pub delay: Option<Duration>,
    /// After so many bytes the connection is ended like this.
    pub cut: Option<(u64, Cut)>,
    /// The byte at this place is combined with this pattern by exclusive or.
    pub flip: Option<(u64, u8)>,
}

/// What happens to one connection.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// From the side that connects.
    pub up: Course,
    /// To it.
    pub down: Course,
}

/// What has passed through one connection.
#[derive(Debug, Default)]
pub struct Passed {
    /// From the side that connects.
    pub up: Mutex<Vec<u8>>,
    /// To it.
    pub down: Mutex<Vec<u8>>,
}

/// Listens on a port of its own and passes connections on.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    passed: Arc<Mutex<Vec<Arc<Passed>>>>,
    cuts: Arc<AtomicU64>,
}

impl Proxy {
    /// Passes connections on to `target`; the plan of each follows from its number, counted from 0.
    ///
    /// # Panics
    /// If the loopback interface has no free port.
    pub fn start(target: SocketAddr, plan: impl Fn(u64) -> Plan + Send + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let ended = Arc::new(AtomicBool::new(false));
        let passed = Arc::new(Mutex::new(Vec::new()));
        let cuts = Arc::new(AtomicU64::new(0));
        let (stop, seen, counted) = (ended.clone(), passed.clone(), cuts.clone());
        std::thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(target)) else { continue };
                let record = Arc::new(Passed::default());
                seen.lock().expect("no panic under this lock").push(record.clone());
                pass(client, server, plan(number as u64), record, &counted);
            }
        });
        Proxy { address, ended, passed, cuts }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How often a connection was ended because its plan said so.
    #[must_use]
    pub fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Relaxed)
    }

    /// What has passed so far, by connection.
    ///
    /// # Panics
    /// Never, but for a panic of the proxy itself.
    #[must_use]
    pub fn passed(&self) -> Vec<Arc<Passed>> {
        self.passed.lock().expect("no panic under this lock").clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // So that it looks at the flag; if that fails it is past looking already.
        let _ = TcpStream::connect(self.address);
    }
}

fn pass(client: TcpStream, server: TcpStream, plan: Plan, record: Arc<Passed>, cuts: &Arc<AtomicU64>) {
    let ends = Arc::new((client, server));
    for stream in [&ends.0, &ends.1] {
        // Small parts are to travel as such; a stream that is broken already needs no option.
        let _ = stream.set_nodelay(true);
    }
    let (theirs, up) = (ends.clone(), record.clone());
    let (their_cuts, cuts) = (cuts.clone(), cuts.clone());
    std::thread::spawn(move || follow(&theirs, true, &plan.up, &up.up, &their_cuts));
    std::thread::spawn(move || follow(&ends, false, &plan.down, &record.down, &cuts));
}

/// Ends both sides of a connection.
fn end(ends: &(TcpStream, TcpStream), cut: Cut) {
    for stream in [&ends.0, &ends.1] {
        // A side that is gone already needs no ending. To make a connected socket one that is connected to nothing is
        // to reset its connection, also while another thread reads from it.
        let _ = match cut {
            Cut::Reset => rustix::net::connect_unspec(stream).map_err(std::io::Error::from),
            Cut::Close | Cut::Stall => stream.shutdown(Shutdown::Both),
        };
    }
}

fn follow(
    ends: &(TcpStream, TcpStream),
    up: bool,
    course: &Course,
    record: &Mutex<Vec<u8>>,
    cuts: &AtomicU64,
) {
    let (mut from, mut to) = if up { (&ends.0, &ends.1) } else { (&ends.1, &ends.0) };
    let mut passed = 0u64;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let mut most = course.split.unwrap_or(buffer.len()).clamp(1, buffer.len());
        if let Some((at, cut)) = course.cut {
            if passed >= at {
                cuts.fetch_add(1, Ordering::Relaxed);
                if cut == Cut::Stall {
                    return;
                }
                return end(ends, cut);
            }
            most = most.min((at - passed) as usize);
        }
        if let Some(delay) = course.delay {
            std::thread::sleep(delay);
        }
        let count = match from.read(&mut buffer[..most]) {
            Ok(0) => {
                // The other direction goes on.
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return end(ends, Cut::Reset),
        };
        if let Some((at, pattern)) = course.flip
            && (passed..passed + count as u64).contains(&at)
        {
            buffer[(at - passed) as usize] ^= pattern;
        }
        record.lock().expect("no panic under this lock").extend_from_slice(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            return end(ends, Cut::Reset);
        }
        passed += count as u64;
    }
}
