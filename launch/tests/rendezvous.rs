//! Ranks that meet over the network.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::cut::Cut;
use common::meeting::{SILENCE, key, meet, nowhere, ranks, serve, within};
use common::{assigned, process_of, watchdog};
use posthaste_launch::{JobId, Meeting, MeetingError, Rendezvous};

#[test]
fn role() {
    match assigned().as_deref() {
        None => return,
        Some("meet") => {
            let var = |name: &str| std::env::var(format!("POSTHASTE_TEST_{name}")).unwrap();
            let (rank, size) = (var("RANK").parse().unwrap(), var("SIZE").parse().unwrap());
            let mut seat = meet(&var("PLACE"), rank, size, &key(7), 20_000).unwrap();
            println!("SEATED");
            if var("THEN") == "stall" {
                std::thread::sleep(Duration::from_secs(100));
            }
            let parts = seat.all_gather(format!("process of {rank}").as_bytes(), within(20_000));
            println!("PARTS {parts:?}");
        }
        Some(other) => panic!("no role {other}"),
    }
    std::process::exit(0);
}

fn process(place: &Rendezvous, rank: u32, size: u32, then: &str) -> Child {
    process_of("meet")
        .env("POSTHASTE_TEST_PLACE", place.address().to_string())
        .env("POSTHASTE_TEST_RANK", rank.to_string())
        .env("POSTHASTE_TEST_SIZE", size.to_string())
        .env("POSTHASTE_TEST_THEN", then)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn all_get_what_all_gave_in_every_round() {
    let _dog = watchdog();
    let place = serve(7);
    // The largest blobs there may be, none at all, and some of lengths around a record's.
    let blob = |rank: u32, round: u32| {
        let length = [65_536, 0, 1, 16_384, 16_383, 16_369, 40_000][((rank + round) % 7) as usize];
        vec![(rank * 16 + round) as u8; length]
    };
    ranks(&place, &[0, 1, 2, 3, 4, 5, 6], 7, |rank, mut seat| {
        assert_eq!((seat.rank(), seat.size()), (rank, 7));
        let (job, told) = seat.identity().unwrap();
        assert_eq!((job, told.as_bytes()), (place.job(), key(7).as_bytes()));
        for round in 0..9 {
            let parts = seat.all_gather(&blob(rank, round), within(20_000)).unwrap();
            let wanted: Vec<Vec<u8>> = (0..7).map(|rank| blob(rank, round)).collect();
            assert!(parts == wanted, "round {round} at rank {rank}");
        }
    });
}

#[test]
fn the_job_has_the_identity_that_was_given() {
    let _dog = watchdog();
    let job = JobId::from_bytes([9; 16]);
    let place = Rendezvous::bind("[::1]:0".parse().unwrap(), 1, key(7), Some(job), SILENCE).unwrap();
    let mut seat = meet(&place.address().to_string(), 0, 1, &key(7), 20_000).unwrap();
    assert_eq!(seat.identity().unwrap().0, job);
    assert_eq!(seat.all_gather(b"alone", within(5000)).unwrap(), [b"alone"]);
    let error = seat.all_gather(&[0; 65_537], within(5000)).unwrap_err();
    assert!(matches!(error, MeetingError::TooLong { bytes: 65_537 }), "{error}");
    assert_eq!(seat.all_gather(b"", within(5000)).unwrap(), [b""], "what is too long was not sent");
}

#[test]
fn whoever_serves_may_start_later_and_has_a_name() {
    let _dog = watchdog();
    // A port that nobody has, and that the system gives to nobody who asks for any.
    let ports = (0..1000).map(|step| 8000 + (std::process::id() * 37 + step) as u16 % 1000);
    let port = ports.into_iter().find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap();
    let early = std::thread::spawn(move || {
        let places = ["no-such-host.invalid:1".to_owned(), format!("localhost:{port}")];
        let mut seat = Rendezvous::meet(&places, 1, 2, &key(7), within(30_000), SILENCE)?;
        seat.all_gather(b"one", within(20_000))
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!early.is_finished());
    let place = Rendezvous::bind(SocketAddr::from(([127, 0, 0, 1], port)), 2, key(7), None, SILENCE).unwrap();
    let mut seat = meet(&place.address().to_string(), 0, 2, &key(7), 20_000).unwrap();
    assert_eq!(seat.all_gather(b"zero", within(20_000)).unwrap(), [&b"zero"[..], b"one"]);
    assert_eq!(early.join().unwrap().unwrap(), [&b"zero"[..], b"one"]);
}

#[test]
fn nobody_serves_until_the_deadline() {
    let _dog = watchdog();
    let (_kept, place) = nowhere();
    let port = place.port();
    let began = Instant::now();
    let error = meet(&format!("127.0.0.1:{port}"), 0, 2, &key(7), 300).unwrap_err();
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(matches!(error, MeetingError::Refused { .. }));
    let text = error.to_string();
    assert!(text.contains("refused") && text.contains(&port.to_string()), "{text}");
    let error = meet("no-such-host.invalid:80", 0, 2, &key(7), 100).unwrap_err();
    assert!(error.to_string().contains("no-such-host.invalid"), "{error}");
    // Something that accepts and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = meet(&silent.local_addr().unwrap().to_string(), 0, 2, &key(7), 200).unwrap_err();
    assert!(error.to_string().contains("does not go on with the handshake"), "{error}");
}

#[test]
fn another_key_is_told_at_once_whichever_side_has_it() {
    let _dog = watchdog();
    let place = serve(2);
    let began = Instant::now();
    let error = meet(&place.address().to_string(), 0, 2, &key(8), 60_000).unwrap_err();
    assert!(matches!(error, MeetingError::WrongKey { rank: 0, .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(30), "there was nothing to wait for");
    // A server that answers something, without the key.
    let forger = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = forger.local_addr().unwrap().to_string();
    for (first, told) in [(1, "has another key"), (2, "another version"), (b'H', "something else listens")] {
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut socket, _) = forger.accept().unwrap();
                socket.read_exact(&mut [0; 88]).unwrap();
                let mut answer = [5; 49];
                answer[0] = first;
                socket.write_all(&answer).unwrap();
                let _ = socket.read(&mut [0; 1]);
            });
            meet(&address, 0, 2, &key(7), 60_000).unwrap_err()
        });
        assert!(error.to_string().contains(told), "{error}");
    }
    // The place is as it was.
    ranks(&place, &[0, 1], 2, |_, mut seat| seat.all_gather(b"", within(20_000)).unwrap());
}

#[test]
fn a_number_claimed_twice_stays_with_the_first() {
    let _dog = watchdog();
    let place = serve(2);
    let address = place.address().to_string();
    let mut first = meet(&address, 1, 2, &key(7), 20_000).unwrap();
    match meet(&address, 1, 2, &key(7), 60_000).unwrap_err() {
        MeetingError::ClaimedTwice { rank: 1, place: at, first, second } => {
            let pid = format!("(pid {})", std::process::id());
            assert!(first.starts_with("127.0.0.1:") && first.ends_with(&pid), "{first}");
            assert!(
                second.starts_with("127.0.0.1:") && second.ends_with(&pid) && second != first,
                "{second}"
            );
            assert_eq!(at, address);
        }
        other => panic!("{other}"),
    }
    let mut zero = meet(&address, 0, 2, &key(7), 20_000).unwrap();
    std::thread::scope(|scope| {
        let one = scope.spawn(|| first.all_gather(b"one", within(20_000)).unwrap());
        assert_eq!(zero.all_gather(b"zero", within(20_000)).unwrap(), [&b"zero"[..], b"one"]);
        assert_eq!(one.join().unwrap(), [&b"zero"[..], b"one"]);
    });
}

#[test]
fn sizes_that_differ_end_the_meeting_for_all() {
    let _dog = watchdog();
    let place = serve(2);
    let address = place.address().to_string();
    let mut zero = meet(&address, 0, 2, &key(7), 20_000).unwrap();
    let waits = std::thread::spawn(move || zero.all_gather(b"", within(60_000)).unwrap_err());
    let error = meet(&address, 1, 3, &key(7), 60_000).unwrap_err();
    assert!(matches!(error, MeetingError::Size { rank: 1, size: 2, said: 3 }), "{error}");
    let error = waits.join().unwrap();
    assert!(matches!(error, MeetingError::Size { rank: 1, size: 2, said: 3 }), "{error}");
    // Whoever comes later is told what happened.
    let error = meet(&address, 1, 2, &key(7), 60_000).unwrap_err();
    assert!(error.to_string().contains("saying that the job has 3"), "{error}");
    let error = meet(&address, 2, 2, &key(7), 60_000).unwrap_err();
    assert!(matches!(error, MeetingError::Size { rank: 2, size: 2, said: 2 }), "{error}");
}

#[test]
fn all_are_told_who_is_missing() {
    let _dog = watchdog();
    let place = serve(12);
    let there: Vec<u32> = vec![0, 4, 11];
    let seated = std::sync::Barrier::new(there.len());
    let errors = ranks(&place, &there, 12, |rank, mut seat| {
        seated.wait();
        let patience = if rank == 4 { 5_000 } else { 60_000 };
        seat.all_gather(b"", within(patience)).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        let MeetingError::Missing { size: 12, missing, seconds: 1..60, .. } = error else { panic!("{text}") };
        assert_eq!(missing, [1, 2, 3, 5, 6, 7, 8, 9, 10]);
        assert!(text.contains("9 of 12 ranks") && text.contains("ranks 1, 2, 3, 5, 6, 7, 8, 9, …"), "{text}");
    }
    let error = meet(&place.address().to_string(), 1, 12, &key(7), 60_000).unwrap_err();
    assert!(error.to_string().contains("the meeting has failed before"), "{error}");
}

#[test]
fn processes_meet_and_a_killed_one_is_named() {
    let _dog = watchdog();
    let place = serve(3);
    let mut children = [process(&place, 1, 3, "gather"), process(&place, 2, 3, "gather")];
    ranks(&place, &[0], 3, |_, mut seat| {
        let parts = seat.all_gather(b"thread", within(20_000)).unwrap();
        assert_eq!(parts, [&b"thread"[..], b"process of 1", b"process of 2"]);
    });
    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));

    let place = serve(3);
    let mut stalls = process(&place, 2, 3, "stall");
    let mut lines = std::io::BufReader::new(stalls.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("SEATED") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut lines, &mut line).unwrap() > 0);
    }
    let pid = stalls.id();
    let mut stalls = Some(stalls);
    let seated = std::sync::Barrier::new(3);
    let errors = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            ranks(&place, &[0, 1], 3, |_, mut seat| {
                seated.wait();
                seat.all_gather(b"", within(60_000)).unwrap_err()
            })
        });
        seated.wait();
        std::thread::sleep(Duration::from_millis(100));
        let mut child = stalls.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        waiting.join().unwrap()
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, MeetingError::Ended { rank: 2, .. }), "{text}");
        assert!(text.contains(&format!("(pid {pid})")), "{text}");
    }
}

#[test]
fn a_server_that_ends_is_told() {
    let _dog = watchdog();
    // To who waits for the others, and to who comes to that later.
    for waits in [true, false] {
        let place = serve(2);
        let mut seat = meet(&place.address().to_string(), 0, 2, &key(7), 20_000).unwrap();
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let waits = std::thread::spawn(move || {
            if !waits {
                gone.recv().unwrap();
            }
            let first = seat.all_gather(b"", within(60_000)).unwrap_err();
            (first, seat.all_gather(b"", within(60_000)).unwrap_err())
        });
        std::thread::sleep(Duration::from_millis(100));
        drop(place);
        let _ = go.send(());
        let (first, second) = waits.join().unwrap();
        assert!(first.to_string().contains("called it off"), "{first}");
        assert!(matches!(second, MeetingError::ServerGone { .. }), "{second}");
    }
    // One that does not even say that: the end of its process closes the sockets.
    let place = serve(2);
    let cut = Cut::new(place.address(), usize::MAX, usize::MAX);
    let mut seat = meet(&cut.address.to_string(), 0, 2, &key(7), 20_000).unwrap();
    let waits = std::thread::spawn(move || seat.all_gather(b"", within(60_000)).unwrap_err());
    std::thread::sleep(Duration::from_millis(100));
    cut.now();
    let error = waits.join().unwrap();
    assert!(matches!(error, MeetingError::ServerGone { .. }), "{error}");
}

#[test]
fn the_server_stays_until_all_have_taken_the_last_answer() {
    let _dog = watchdog();
    // More than the kernel buffers, and one rank that does not read until rank 0 has everything and ends its place.
    const RANKS: u32 = 24;
    let large = vec![3; 65_536];
    let place = serve(RANKS);
    let address = place.address().to_string();
    let slow = Cut::new(place.address(), usize::MAX, usize::MAX);
    let gather = |address: &str, rank: u32| {
        let mut seat = meet(address, rank, RANKS, &key(7), 20_000).unwrap();
        move |blob: &[u8]| seat.all_gather(blob, within(20_000)).unwrap()
    };
    std::thread::scope(|scope| {
        let mut late = gather(&slow.address.to_string(), 1);
        let held = slow.seen.way_back.lock().unwrap();
        let blob = &large;
        let late = scope.spawn(move || late(blob));
        for rank in 2..RANKS {
            let address = &address;
            scope.spawn(move || gather(address, rank)(blob));
        }
        gather(&address, 0)(&large);
        let ends = scope.spawn(|| drop(place));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!ends.is_finished(), "somebody has not taken its answer");
        drop(held);
        let parts = late.join().unwrap();
        assert!(parts.len() == RANKS as usize && parts.iter().all(|part| *part == large));
    });
}

#[test]
fn both_sides_of_a_connection_look_for_a_silent_host_as_is_set() {
    /// The timers of both ends of the connections to a port: their kind, and when each is due, in seconds.
    fn timers(port: u16) -> Vec<(String, u64)> {
        let (port, mut timers) = (format!(":{port:04X}"), Vec::new());
        for line in std::fs::read_to_string("/proc/self/net/tcp").unwrap().lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_its = fields[1].ends_with(&port) || fields[2].ends_with(&port);
            // It is established.
            if is_its && fields[3] == "01" {
                let (kind, due) = fields[5].split_once(':').unwrap();
                timers.push((kind.to_owned(), u64::from_str_radix(due, 16).unwrap() / 100));
            }
        }
        timers
    }
    let _dog = watchdog();
    // Idle for two fifths of it; where it is never over, for as long as kernels allow.
    for (silence, due) in [(0, 32_767), (60, 24)] {
        let silence = Duration::from_secs(silence);
        let place = Rendezvous::bind("127.0.0.1:0".parse().unwrap(), 1, key(7), None, silence).unwrap();
        let address = place.address();
        let seat = Rendezvous::meet(&[address.to_string()], 0, 1, &key(7), within(5000), silence).unwrap();
        // What acknowledges the last message has a timer of its own.
        let ends = loop {
            let ends = timers(address.port());
            // The table is read in pieces, of which one may be missed while others open and close sockets.
            if ends.len() == 2 && ends.iter().all(|(kind, _)| kind == "02") {
                break ends;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(ends.iter().all(|(_, at)| *at <= due && *at + 12 >= due), "{ends:?} for {silence:?}");
        drop((seat, place));
    }
}

#[test]
fn serving_more_ranks_than_there_are_descriptors_is_told_before() {
    let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    Rendezvous::check_room(2).unwrap();
    let size = u32::try_from(soft).unwrap_or(u32::MAX);
    if size < u32::MAX {
        let error = Rendezvous::check_room(size).unwrap_err();
        assert!(matches!(error, MeetingError::DescriptorLimit { limit, .. } if limit == soft), "{error}");
        assert!(
            error.to_string().contains("RLIMIT_NOFILE") && error.to_string().contains("ulimit -n"),
            "{error}"
        );
    }
}
