//! Those who disturb a meeting, and connections that end anywhere.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::cut::Cut;
use common::meeting::{key, meet, ranks, serve, within};
use common::watchdog;
use posthaste_launch::{Meeting, MeetingError};

/// The answers to those who speak another version, and who have another key.
const OTHER_VERSION: u8 = 2;
const OTHER_KEY: u8 = 3;

#[test]
fn garbage_is_dropped_and_ranks_meet_meanwhile() {
    let _dog = watchdog();
    // The name and the version that a rank says, and nothing that proves a key.
    let mut head = recorded_visit();
    head.truncate(24);
    assert!(head.starts_with(b"posthaste rendezvous"));
    head.resize(88, 0xa5);
    let mut other_version = head.clone();
    other_version[20] ^= 0x40;
    let place = serve(2);
    let connect = || TcpStream::connect(place.address()).unwrap();
    for (garbage, told) in [
        (&[0xff; 88][..], None),
        (&[0; 5000], None),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", None),
        (&head, Some(OTHER_KEY)),
        (&other_version, Some(OTHER_VERSION)),
    ] {
        let mut socket = connect();
        // It may be turned away before it has said everything.
        let _ = socket.write_all(garbage).and_then(|()| socket.shutdown(Shutdown::Write));
        let mut heard = Vec::new();
        // A reset is as good an end as any; an answer says no more than why there is none.
        let _ = socket.read_to_end(&mut heard);
        let answer = told.map(|why| [&[why][..], &[0; 48]].concat());
        assert_eq!(heard, answer.unwrap_or_default());
    }
    drop(connect());
    ranks(&place, &[0, 1], 2, |_, mut seat| seat.all_gather(b"", within(20_000)).unwrap());
}

/// What a rank says until it has its seat.
fn recorded_visit() -> Vec<u8> {
    let place = serve(2);
    let cut = Cut::new(place.address(), usize::MAX, usize::MAX);
    drop(meet(&cut.address.to_string(), 1, 2, &key(7), 20_000).unwrap());
    cut.forwarded()
}

#[test]
fn a_recorded_visit_claims_nothing() {
    let _dog = watchdog();
    let recorded = recorded_visit();
    assert_eq!(recorded.len(), 88 + 34);
    // Its seat is gone with it, so that a fresh place shows whether the recording counts.
    let place = serve(2);
    let mut replay = TcpStream::connect(place.address()).unwrap();
    replay.write_all(&recorded).unwrap();
    let mut heard = Vec::new();
    let _ = replay.read_to_end(&mut heard);
    assert!(heard.len() <= 49, "an answer that proves the key, and nothing behind it");
    ranks(&place, &[0, 1], 2, |_, mut seat| seat.all_gather(b"", within(20_000)).unwrap());
}

#[test]
fn a_genuine_rank_gets_in_past_a_thousand_slow_sockets() {
    let _dog = watchdog();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.current.is_some_and(|limit| limit < 3000) {
        let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    }
    assert!(
        (0..5).any(|_| gets_in_past_slow_sockets()),
        "it takes longer than a moment, whenever it is tried"
    );
}

/// Whether it was a matter of a moment. This process may be kept from its core for longer than that.
fn gets_in_past_slow_sockets() -> bool {
    let place = serve(1);
    let before = Instant::now();
    let slow: Vec<TcpStream> = (0..1000)
        .map(|at| {
            let mut socket = TcpStream::connect(place.address()).unwrap();
            // Some say nothing, some begin well.
            socket.write_all(&b"posthaste rendezvous"[..at % 21]).unwrap();
            socket
        })
        .collect();
    let began = Instant::now();
    let mut seat = meet(&place.address().to_string(), 0, 1, &key(7), 20_000).unwrap();
    seat.all_gather(b"", within(20_000)).unwrap();
    // A few milliseconds are needed.
    if began.elapsed() > Duration::from_secs(2) {
        return false;
    }
    // The oldest had to go; those that may stay lose their place in time.
    let open = |socket: &&TcpStream| {
        socket.set_nonblocking(true).unwrap();
        let mut socket: &TcpStream = socket;
        socket.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    let left = slow.iter().filter(open).count();
    if before.elapsed() > Duration::from_millis(4500) {
        return false;
    }
    assert!((200..=256).contains(&left), "{left} are left");
    common::eventually("the slow are gone", || slow.iter().filter(open).count() == 0);
    assert!(before.elapsed() >= Duration::from_secs(5));
    true
}

#[test]
fn a_session_may_be_cut_at_any_byte() {
    let _dog = watchdog();
    // What each side of a session of one round says: see the lengths in the protocol's description.
    let (up, down) = (88 + 34 + (18 + 16 + 3) + 34, 49 + (18 + 36) + 18 + 2 * (16 + 3));
    let cases: Vec<(usize, usize)> =
        (0..=up).map(|at| (at, usize::MAX)).chain((0..=down).map(|at| (usize::MAX, at))).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some((up_to, down_to)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    cut_session(*up_to, *down_to, up, down);
                }
            });
        }
    });
}

fn cut_session(up_to: usize, down_to: usize, up: usize, down: usize) {
    let at = format!("cut after {up_to} up, {down_to} down");
    let place = serve(2);
    let cut = Cut::new(place.address(), up_to, down_to);
    let direct = place.address().to_string();
    let (zero, one) = std::thread::scope(|scope| {
        let zero = scope.spawn(|| meet(&direct, 0, 2, &key(7), 20_000)?.all_gather(b"abc", within(20_000)));
        let one = meet(&cut.address.to_string(), 1, 2, &key(7), 20_000)
            .and_then(|mut seat| seat.all_gather(b"xyz", within(20_000)));
        // It may have been told to wait for nobody; but nobody waits for ever.
        (zero.join().unwrap(), one)
    });
    let whole = |parts: &Result<Vec<Vec<u8>>, MeetingError>| match parts {
        Ok(parts) => {
            assert_eq!(parts, &[b"abc", b"xyz"], "{at}");
            true
        }
        Err(_) => false,
    };
    let (zero_met, one_met) = (whole(&zero), whole(&one));
    let (seat, part) = (88 + 34, up - 34);
    match (up_to, down_to) {
        // Before the seat was given the rank comes again, and by then the way is whole.
        (up_to, usize::MAX) if up_to < seat => assert!(zero_met && one_met, "{at}: {zero:?} {one:?}"),
        (usize::MAX, down_to) if down_to < 49 => assert!(zero_met && one_met, "{at}: {zero:?} {one:?}"),
        // Its part was not given.
        (up_to, usize::MAX) if up_to < part => {
            assert!(!zero_met && !one_met, "{at}: {zero:?} {one:?}");
            let error = zero.unwrap_err();
            assert!(matches!(error, MeetingError::Ended { rank: 1, .. }), "{at}: {error}");
        }
        // Its part was given, so that the other one has all, unless it came when the rank was gone.
        (up_to, usize::MAX) => assert!(zero_met || up_to == part, "{at}: {zero:?} {one:?}"),
        // The cut races with the proof that the rank sends upon the answer.
        (_, down_to) if down_to < 49 + 54 => assert_eq!(zero_met, one_met, "{at}: {zero:?} {one:?}"),
        (_, down_to) => {
            assert_eq!(one_met, down_to >= down, "{at}: {zero:?} {one:?}");
            assert!(zero_met || down_to == 49 + 54, "{at}: {zero:?} {one:?}");
        }
    }
}
