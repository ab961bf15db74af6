//! Two processes and one TCP connection over the loopback interface, with blocking calls and `TCP_NODELAY`:
//! `tcp_pingpong` is half a round trip, `tcp_stream` the bytes per second in one direction, and `tcp_aead_stream` the
//! same where each record is sealed by the one and opened by the other side.
//!
//! The stream is of messages of one size, each written and read in whole; what has been read is not looked at. The sealed
//! stream tries several lengths of records, and both ciphers that are fast somewhere.

use super::contest::contest;
use super::process::{Peer, now_ns};
use super::{LimitArgs, LimitError, Measurement};
use ring::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// Round trips per batch.
const ROUNDS: u64 = 500;
/// Bytes per batch of a stream, as a rule: long against the acknowledgement at its end.
const BATCH: usize = 32 << 20;
/// Messages per batch of a stream, at most: short ones are as many calls.
const CALLS: usize = 20_000;
/// Lengths of sealed records.
const RECORDS: [usize; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
const TAG: usize = 16;

/// What the first side says before each batch: what to do, and how often.
type Order = [u8; 16];

fn order(way: u64, count: u64) -> Order {
    let mut order = [0; 16];
    order[..8].copy_from_slice(&way.to_le_bytes());
    order[8..].copy_from_slice(&count.to_le_bytes());
    order
}

fn read_order(from: &mut TcpStream) -> Result<(u64, u64), LimitError> {
    let mut order = [0; 16];
    from.read_exact(&mut order).map_err(system("read"))?;
    let word = |at: usize| u64::from_le_bytes(order[at..at + 8].try_into().unwrap_or_default());
    Ok((word(0), word(8)))
}

const END: u64 = u64::MAX;

/// Both ends of a connection.
fn connect() -> Result<(TcpStream, TcpStream), LimitError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(system("bind"))?;
    let address = listener.local_addr().map_err(system("getsockname"))?;
    let near = TcpStream::connect(address).map_err(system("connect"))?;
    let (far, _) = listener.accept().map_err(system("accept"))?;
    for end in [&near, &far] {
        end.set_nodelay(true).map_err(system("setsockopt"))?;
        // What the device does within a host: congestion control that sets timers, such as BBR, costs half the bandwidth.
        // A system without it is measured with what it has.
        let _ = rustix::net::sockopt::set_tcp_congestion(end, "reno");
        // The other side may have died while this process holds a copy of its end.
        end.set_read_timeout(Some(Duration::from_secs(10))).map_err(system("setsockopt"))?;
        end.set_write_timeout(Some(Duration::from_secs(10))).map_err(system("setsockopt"))?;
    }
    Ok((near, far))
}

fn system(call: &'static str) -> impl Fn(io::Error) -> LimitError {
    move |error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => LimitError::TimedOut,
        io::ErrorKind::UnexpectedEof => LimitError::PeerDied,
        _ => LimitError::System(
            call,
            rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO),
        ),
    }
}

/// `tcp_pingpong`.
pub(super) fn pingpong(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let size = args.size.max(1);
    let (mut near, mut far) = connect()?;
    let (mut mine, mut theirs) = (vec![0; size], vec![0; size]);
    let peer = Peer::start(args.cores, args.seconds, |_| {
        loop {
            let (way, rounds) = read_order(&mut far)?;
            if way == END {
                return Ok(());
            }
            for _ in 0..rounds {
                far.read_exact(&mut theirs).map_err(system("read"))?;
                far.write_all(&theirs).map_err(system("write"))?;
            }
        }
    })?;
    let winner = contest(&[()], args.seconds, |()| {
        near.write_all(&order(0, ROUNDS)).map_err(system("write"))?;
        let start = now_ns();
        for round in 0..ROUNDS {
            mine[0] = round as u8;
            near.write_all(&mine).map_err(system("write"))?;
            near.read_exact(&mut mine).map_err(system("read"))?;
            if mine[0] != round as u8 {
                return Err(LimitError::WrongData);
            }
        }
        Ok(2.0 * ROUNDS as f64 * 1e3 / (now_ns() - start) as f64)
    })?;
    near.write_all(&order(END, 0)).map_err(system("write"))?;
    peer.finish()?;
    let detail = format!("blocking reads and writes of {size} bytes");
    Ok(Measurement { value: 1.0 / winner.median, unit: "us", detail })
}

/// `tcp_stream`.
pub(super) fn stream(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let size = args.size.max(1);
    let (mut near, mut far) = connect()?;
    let (mine, mut theirs) = (pattern(size), vec![0; size]);
    let peer = Peer::start(args.cores, args.seconds, |_| {
        loop {
            let (way, count) = read_order(&mut far)?;
            if way == END {
                return Ok(());
            }
            for _ in 0..count {
                far.read_exact(&mut theirs).map_err(system("read"))?;
            }
            // The last byte shows that the last message has come.
            far.write_all(&theirs[size - 1..]).map_err(system("write"))?;
        }
    })?;
    let count = (BATCH / size).clamp(4, CALLS);
    let winner = contest(&[()], args.seconds, |()| {
        let start = now_ns();
        near.write_all(&order(0, count as u64)).map_err(system("write"))?;
        for _ in 0..count {
            near.write_all(&mine).map_err(system("write"))?;
        }
        acknowledged(&mut near, mine[size - 1])?;
        Ok((count * size) as f64 / (now_ns() - start) as f64)
    })?;
    near.write_all(&order(END, 0)).map_err(system("write"))?;
    peer.finish()?;
    let detail = format!("{count} writes of {size} bytes per batch");
    Ok(Measurement { value: winner.median, unit: "GB/s", detail })
}

/// `tcp_aead_stream`.
pub(super) fn sealed(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let (mut near, mut far) = connect()?;
    let keys = || -> Result<[LessSafeKey; 2], LimitError> {
        let of = |algorithm| UnboundKey::new(algorithm, &[7; 32]).map(LessSafeKey::new);
        match (of(&AES_256_GCM), of(&CHACHA20_POLY1305)) {
            (Ok(aes), Ok(chacha)) => Ok([aes, chacha]),
            _ => Err(LimitError::Argument("no cipher to be had")),
        }
    };
    let (near_keys, far_keys) = (keys()?, keys()?);
    let plain = pattern(RECORDS[RECORDS.len() - 1]);
    let (mut mine, mut theirs) = (plain.clone(), plain.clone());
    mine.resize(plain.len() + TAG, 0);
    theirs.resize(plain.len() + TAG, 0);
    let ways: Vec<usize> = (0..RECORDS.len() * 2).collect();
    let peer = Peer::start(args.cores, args.seconds, |_| {
        let mut nonce = 0u64;
        loop {
            let (way, count) = read_order(&mut far)?;
            if way == END {
                return Ok(());
            }
            let len = RECORDS[way as usize / 2];
            let mut last = 0;
            for _ in 0..count {
                let record = &mut theirs[..len + TAG];
                far.read_exact(record).map_err(system("read"))?;
                nonce += 1;
                let opened = far_keys[way as usize % 2].open_in_place(nonce_of(nonce), Aad::empty(), record);
                last = opened.map_err(|_| LimitError::WrongData)?[len - 1];
            }
            far.write_all(&[last]).map_err(system("write"))?;
        }
    })?;
    let mut nonce = 0u64;
    let winner = contest(&ways, args.seconds, |way| {
        let (len, key) = (RECORDS[way / 2], &near_keys[way % 2]);
        let count = BATCH / len;
        let start = now_ns();
        near.write_all(&order(way as u64, count as u64)).map_err(system("write"))?;
        for _ in 0..count {
            // The plaintext is copied, as whoever keeps a message has to.
            let record = &mut mine[..len + TAG];
            record[..len].copy_from_slice(&plain[..len]);
            nonce += 1;
            let tag = key
                .seal_in_place_separate_tag(nonce_of(nonce), Aad::empty(), &mut record[..len])
                .map_err(|_| LimitError::WrongData)?;
            record[len..].copy_from_slice(tag.as_ref());
            near.write_all(record).map_err(system("write"))?;
        }
        acknowledged(&mut near, plain[len - 1])?;
        Ok((count * len) as f64 / (now_ns() - start) as f64)
    })?;
    near.write_all(&order(END, 0)).map_err(system("write"))?;
    peer.finish()?;
    let cipher = ["AES-256-GCM", "ChaCha20-Poly1305"][winner.way % 2];
    let detail = format!("{cipher}, records of {} bytes", RECORDS[winner.way / 2]);
    Ok(Measurement { value: winner.median, unit: "GB/s", detail })
}

fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 7 + 1) as u8).collect()
}

fn acknowledged(near: &mut TcpStream, expected: u8) -> Result<(), LimitError> {
    let mut seen = [0];
    near.read_exact(&mut seen).map_err(system("read"))?;
    if seen == [expected] { Ok(()) } else { Err(LimitError::WrongData) }
}

fn nonce_of(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}
