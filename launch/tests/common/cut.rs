//! A proxy that ends connections at any byte, or holds up what comes back.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A way to a place, the first of whose connections ends after so many bytes in either direction.
pub struct Cut {
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
}

/// What it has seen, and what a test does to it.
#[derive(Default)]
pub struct Seen {
    /// What has gone to the place.
    up: Mutex<Vec<u8>>,
    sockets: Mutex<Vec<TcpStream>>,
    /// Whoever holds this keeps what comes from the place.
    pub way_back: Mutex<()>,
}

impl Cut {
    pub fn new(to: SocketAddr, up_to: usize, down_to: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let all = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut limits = [up_to, down_to];
            while let Ok((near, _)) = listener.accept() {
                let far = TcpStream::connect(to).unwrap();
                all.sockets.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                let [up, down] = std::mem::replace(&mut limits, [usize::MAX; 2]);
                let ways = [(near.try_clone().unwrap(), far.try_clone().unwrap(), up), (far, near, down)];
                for (at, (from, to, most)) in ways.into_iter().enumerate() {
                    let all = Arc::clone(&all);
                    std::thread::spawn(move || {
                        pass(&from, &to, most, |bytes| match at {
                            0 => all.up.lock().unwrap().extend_from_slice(bytes),
                            _ => drop(all.way_back.lock().unwrap()),
                        });
                    });
                }
            }
        });
        Self { address, seen }
    }

    /// What has gone to the server.
    pub fn forwarded(&self) -> Vec<u8> {
        self.seen.up.lock().unwrap().clone()
    }

    /// Ends all connections.
    pub fn now(&self) {
        for socket in self.seen.sockets.lock().unwrap().iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, most: usize, seen: impl Fn(&[u8])) {
    let mut left = most;
    let mut buffer = [0; 4096];
    while left > 0 {
        let wanted = left.min(buffer.len());
        let count = match from.read(&mut buffer[..wanted]) {
            Ok(count) if count > 0 => count,
            _ => break,
        };
        seen(&buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
        left -= count;
    }
    if most == usize::MAX {
        let _ = to.shutdown(Shutdown::Write);
    } else {
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }
}
