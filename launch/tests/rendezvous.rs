//! Ranks that meet over the network, and those who disturb them.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::cut::Cut;
use common::{assigned, process_of, watchdog};
use posthaste_launch::{
    Bulletin, JobId, JobKey, Meeting, MeetingError, Notice, Rendezvous, RendezvousClient,
};

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

fn key(byte: u8) -> JobKey {
    JobKey::from_bytes([byte; 32])
}

fn within(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

fn serve(size: u32) -> Rendezvous {
    Rendezvous::bind("127.0.0.1:0".parse().unwrap(), size, key(7), None).unwrap()
}

fn meet(
    place: &str,
    rank: u32,
    size: u32,
    key: &JobKey,
    milliseconds: u64,
) -> Result<RendezvousClient, MeetingError> {
    Rendezvous::meet(&[place.to_owned()], rank, size, key, within(milliseconds))
}

/// Ranks as threads: each meets and does what it is told.
fn ranks<T: Send>(
    place: &Rendezvous,
    ranks: &[u32],
    size: u32,
    act: impl Fn(u32, RendezvousClient) -> T + Sync,
) -> Vec<T> {
    let place = place.address().to_string();
    std::thread::scope(|scope| {
        let all: Vec<_> = ranks
            .iter()
            .map(|rank| {
                let (place, act) = (&place, &act);
                scope.spawn(move || act(*rank, meet(place, *rank, size, &key(7), 20_000).unwrap()))
            })
            .collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
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
    let place = Rendezvous::bind("[::1]:0".parse().unwrap(), 1, key(7), Some(job)).unwrap();
    let mut seat = meet(&place.address().to_string(), 0, 1, &key(7), 5000).unwrap();
    assert_eq!(seat.identity().unwrap().0, job);
    assert_eq!(seat.all_gather(b"alone", within(5000)).unwrap(), [b"alone"]);
    let error = seat.all_gather(&[0; 65_537], within(5000)).unwrap_err();
    assert!(matches!(error, MeetingError::TooLong { bytes: 65_537 }), "{error}");
    assert_eq!(seat.all_gather(b"", within(5000)).unwrap(), [b""], "what is too long was not sent");
}

#[test]
fn whoever_serves_may_start_later_and_has_a_name() {
    let _dog = watchdog();
    // A port that nobody has; that it may be taken meanwhile is found out below.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let early = std::thread::spawn(move || {
        let places = ["no-such-host.invalid:1".to_owned(), format!("localhost:{port}")];
        let mut seat = Rendezvous::meet(&places, 1, 2, &key(7), within(30_000))?;
        seat.all_gather(b"one", within(20_000))
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!early.is_finished());
    let place = Rendezvous::bind(SocketAddr::from(([127, 0, 0, 1], port)), 2, key(7), None).unwrap();
    let mut seat = meet(&place.address().to_string(), 0, 2, &key(7), 5000).unwrap();
    assert_eq!(seat.all_gather(b"zero", within(20_000)).unwrap(), [&b"zero"[..], b"one"]);
    assert_eq!(early.join().unwrap().unwrap(), [&b"zero"[..], b"one"]);
}

#[test]
fn nobody_serves_until_the_deadline() {
    let _dog = watchdog();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
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
                socket.read_exact(&mut [0; 84]).unwrap();
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
    let mut first = meet(&address, 1, 2, &key(7), 5000).unwrap();
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
    let mut zero = meet(&address, 0, 2, &key(7), 5000).unwrap();
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
    let mut zero = meet(&address, 0, 2, &key(7), 5000).unwrap();
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
    let errors = ranks(&place, &there, 12, |rank, mut seat| {
        let patience = if rank == 4 { 400 } else { 60_000 };
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
    let errors = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            ranks(&place, &[0, 1], 3, |_, mut seat| seat.all_gather(b"", within(60_000)).unwrap_err())
        });
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
    let place = serve(2);
    let mut seat = meet(&place.address().to_string(), 0, 2, &key(7), 5000).unwrap();
    let waits = std::thread::spawn(move || {
        let first = seat.all_gather(b"", within(60_000)).unwrap_err();
        (first, seat.all_gather(b"", within(60_000)).unwrap_err())
    });
    std::thread::sleep(Duration::from_millis(100));
    drop(place);
    let (first, second) = waits.join().unwrap();
    assert!(first.to_string().contains("called it off"), "{first}");
    assert!(matches!(second, MeetingError::ServerGone { .. }), "{second}");
    // One that does not even say that: the end of its process closes the sockets.
    let place = serve(2);
    let cut = Cut::new(place.address(), usize::MAX, usize::MAX);
    let mut seat = meet(&cut.address.to_string(), 0, 2, &key(7), 5000).unwrap();
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

/// The next news of a bulletin.
fn news(bulletin: &mut Bulletin) -> Vec<Notice> {
    let mut heard = Vec::new();
    common::eventually("there are news", || {
        heard = bulletin.read().unwrap();
        !heard.is_empty()
    });
    heard
}

#[test]
fn after_the_meeting_ranks_hear_who_is_gone() {
    let _dog = watchdog();
    let place = serve(4);
    let mut seats = ranks(&place, &[0, 1, 2, 3], 4, |_, mut seat| {
        seat.all_gather(b"", within(20_000)).unwrap();
        seat
    });
    let mut zero = seats.remove(0).bulletin().unwrap();
    let one = seats.remove(0).bulletin().unwrap();
    let two = seats.remove(0).bulletin().unwrap();
    assert!(zero.read().unwrap().is_empty());
    drop(one);
    assert_eq!(news(&mut zero), [Notice::Ended(1)]);
    two.leave().unwrap();
    assert_eq!(news(&mut zero), [Notice::Left(2)]);
    // Whoever asks later hears of those who went before.
    let mut three = seats.remove(0);
    let mut late = three.bulletin().unwrap();
    assert!(three.bulletin().is_none() && three.all_gather(b"", within(5000)).is_err());
    let mut heard = news(&mut late);
    while heard.len() < 2 {
        heard.extend(news(&mut late));
    }
    assert_eq!(heard, [Notice::Ended(1), Notice::Left(2)]);
    drop(place);
    assert_eq!((news(&mut zero), news(&mut late)), (vec![Notice::Closed], vec![Notice::Closed]));
    common::eventually("the connection ends", || zero.read().is_err());
}

/// So many news, in as many pieces as they come.
fn heard(bulletin: &mut Bulletin, count: usize) -> Vec<Notice> {
    let mut heard = news(bulletin);
    while heard.len() < count {
        heard.extend(news(bulletin));
    }
    heard
}

#[test]
fn whoever_serves_passes_the_news_on_and_none_is_lost() {
    let _dog = watchdog();
    let place = serve(5);
    place.pass_on();
    let mut bulletins = ranks(&place, &[0, 1, 2, 3, 4], 5, |_, mut seat| {
        seat.all_gather(b"", within(20_000)).unwrap();
        seat.bulletin().unwrap()
    });
    let [mut four, mut three, mut two, mut one, zero] =
        std::array::from_fn(|_| bulletins.pop().expect("one of each"));
    let left = |rank| Notice::Left(rank);
    zero.leave().unwrap();
    assert_eq!(news(&mut one), [left(0)]);
    let first = std::thread::spawn(move || drop(place));
    // The first that is asked ends, the second serves; what ends meanwhile it hears from the first server.
    assert_eq!(news(&mut one), [Notice::Serve { gone: vec![(0, true)] }]);
    drop(one);
    let gone = vec![(0, true), (1, false)];
    assert_eq!(heard(&mut two, 3), [left(0), Notice::Ended(1), Notice::Serve { gone: gone.clone() }]);
    let (second, mut two) = two.serve(&gone, [127, 0, 0, 1].into(), None).unwrap();
    let to_second = Notice::Move { rank: 2, place: second.address() };
    for other in [&mut three, &mut four] {
        assert_eq!(heard(other, 3), [left(0), Notice::Ended(1), to_second.clone()]);
    }
    let mut three = three.follow(second.address()).unwrap();
    assert!(!first.is_finished(), "one has not moved");
    assert_eq!(heard(&mut three, 2), [left(0), Notice::Ended(1)]);
    drop(four);
    first.join().unwrap();
    assert_eq!(news(&mut three), [Notice::Ended(4)]);
    assert_eq!(heard(&mut two, 3), [left(0), Notice::Ended(1), Notice::Ended(4)]);
    // Alone, a rank needs no news.
    two.leave().unwrap();
    assert_eq!(news(&mut three), [left(2)]);
    drop(second);
    assert_eq!(news(&mut three), [Notice::Closed]);
}

#[test]
fn who_cannot_serve_says_so_and_another_is_asked() {
    let _dog = watchdog();
    let place = serve(3);
    place.pass_on();
    let mut bulletins = ranks(&place, &[0, 1, 2], 3, |_, mut seat| {
        seat.all_gather(b"", within(20_000)).unwrap();
        seat.bulletin().unwrap()
    });
    let [mut two, one, zero] = std::array::from_fn(|_| bulletins.pop().expect("one of each"));
    zero.leave().unwrap();
    let first = std::thread::spawn(move || drop(place));
    let mut one = one;
    let gone = vec![(0, true)];
    assert_eq!(heard(&mut one, 2), [Notice::Left(0), Notice::Serve { gone: gone.clone() }]);
    // No interface of this machine.
    let (_, one) = one.serve(&gone, [192, 0, 2, 1].into(), None).unwrap_err();
    let mut one = *one.expect("it goes on listening");
    assert_eq!(heard(&mut two, 2), [Notice::Left(0), Notice::Serve { gone: gone.clone() }]);
    let (second, mut two) = two.serve(&gone, [127, 0, 0, 1].into(), None).unwrap();
    assert_eq!(news(&mut one), [Notice::Move { rank: 2, place: second.address() }]);
    let one = one.follow(second.address()).unwrap();
    first.join().unwrap();
    one.leave().unwrap();
    assert_eq!(heard(&mut two, 2), [Notice::Left(0), Notice::Left(1)]);
    drop(second);
}

#[test]
fn after_the_meeting_a_rank_that_died_comes_again_and_the_others_hear_of_it() {
    let _dog = watchdog();
    let place = serve(3);
    let address = place.address().to_string();
    let mut seats = ranks(&place, &[0, 1, 2], 3, |rank, mut seat| {
        assert_eq!(seat.incarnation(), 0);
        seat.all_gather(format!("part {rank}").as_bytes(), within(20_000)).unwrap();
        seat
    });
    let mut zero = seats.remove(0).bulletin().unwrap();
    assert!(zero.read().unwrap().is_empty());
    let one = seats.remove(0).bulletin().unwrap();
    // Whoever lives keeps its number.
    let twice = meet(&address, 1, 3, &key(7), 5000).unwrap_err();
    assert!(matches!(twice, MeetingError::ClaimedTwice { rank: 1, .. }), "{twice}");
    drop(one);
    assert_eq!(news(&mut zero), [Notice::Ended(1)]);
    for incarnation in 1..4 {
        let mut again = meet(&address, 1, 3, &key(7), 20_000).unwrap();
        assert_eq!(again.incarnation(), incarnation);
        let twice = meet(&address, 1, 3, &key(7), 5000).unwrap_err();
        assert!(matches!(twice, MeetingError::ClaimedTwice { rank: 1, .. }), "{twice}");
        // The roster: what all gave last, with its own predecessor's part.
        let before =
            if incarnation == 1 { "part 1".into() } else { format!("part 1, again {}", incarnation - 1) };
        let roster = again.roster(within(20_000)).unwrap();
        let expected = [(0, "part 0".into()), (incarnation, before), (0, "part 2".into())];
        assert_eq!(
            roster,
            expected.map(|(incarnation, part): (u32, String)| (incarnation, part.into_bytes()))
        );
        let part = format!("part 1, again {incarnation}").into_bytes();
        again.come_again(&part, within(20_000)).unwrap();
        let mut listening = again.bulletin().unwrap();
        assert_eq!(news(&mut zero), [Notice::Arrived { rank: 1, incarnation, part }]);
        assert!(listening.read().unwrap().is_empty());
        drop(listening);
        assert_eq!(news(&mut zero), [Notice::Ended(1)]);
    }
    // One that dies before it has said where it is has never been there.
    drop(meet(&address, 1, 3, &key(7), 20_000).unwrap());
    let last = {
        common::eventually("its seat is free", || match meet(&address, 1, 3, &key(7), 20_000) {
            Ok(mut again) => {
                again.roster(within(20_000)).unwrap();
                again.come_again(b"the last", within(20_000)).unwrap();
                std::mem::forget(again.bulletin().unwrap());
                true
            }
            Err(MeetingError::ClaimedTwice { .. }) => false,
            Err(other) => panic!("{other}"),
        });
        let mut heard = Vec::new();
        while !heard.iter().any(|notice| matches!(notice, Notice::Arrived { .. })) {
            heard.extend(news(&mut zero));
        }
        heard.pop()
    };
    let expected = Notice::Arrived { rank: 1, incarnation: 5, part: b"the last".to_vec() };
    assert_eq!(last.as_ref(), Some(&expected));
    // Whoever asks later hears the same.
    let mut late = seats.remove(0).bulletin().unwrap();
    assert_eq!(news(&mut late), [expected]);
    // Who has left in order does not come again.
    late.leave().unwrap();
    assert_eq!(news(&mut zero), [Notice::Left(2)]);
    let left = meet(&address, 2, 3, &key(7), 5000).unwrap_err().to_string();
    assert!(left.contains("has left the job in order"), "{left}");
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

#[test]
fn garbage_is_dropped_and_ranks_meet_meanwhile() {
    let _dog = watchdog();
    let place = serve(2);
    let connect = || TcpStream::connect(place.address()).unwrap();
    let mut head = b"posthaste rendezvous\x01\0\0\0".to_vec();
    head.resize(84, 0xa5);
    let mut other_version = head.clone();
    other_version[20] = 9;
    for garbage in [&[0xff; 84][..], &[0; 5000], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &head, &other_version]
    {
        let mut socket = connect();
        // It may be turned away before it has said everything.
        let _ = socket.write_all(garbage).and_then(|()| socket.shutdown(Shutdown::Write));
        let mut heard = Vec::new();
        // A reset is as good an end as any; an answer says no more than that there is none.
        let _ = socket.read_to_end(&mut heard);
        assert!(heard.is_empty() || heard.len() == 49 && heard[1..] == [0; 48], "{heard:?}");
    }
    drop(connect());
    ranks(&place, &[0, 1], 2, |_, mut seat| seat.all_gather(b"", within(20_000)).unwrap());
}

#[test]
fn a_recorded_visit_claims_nothing() {
    let _dog = watchdog();
    let place = serve(2);
    let cut = Cut::new(place.address(), usize::MAX, usize::MAX);
    drop(meet(&cut.address.to_string(), 1, 2, &key(7), 5000).unwrap());
    let recorded = cut.forwarded();
    assert_eq!(recorded.len(), 84 + 34);
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
    let place = serve(1);
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
    // The watchdog of this promise: a few milliseconds are needed.
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    // The oldest had to go; those that may stay lose their place in time.
    let open = |socket: &&TcpStream| {
        socket.set_nonblocking(true).unwrap();
        let mut socket: &TcpStream = socket;
        socket.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    let left = slow.iter().filter(open).count();
    assert!((200..=256).contains(&left), "{left} are left");
    assert!(began.elapsed() < Duration::from_millis(4500), "this machine is too slow to tell");
    common::eventually("the slow are gone", || slow.iter().filter(open).count() == 0);
    assert!(began.elapsed() > Duration::from_millis(4500));
}

#[test]
fn a_session_may_be_cut_at_any_byte() {
    let _dog = watchdog();
    // What each side of a session of one round says: see the lengths in the protocol's description.
    let (up, down) = (84 + 34 + (18 + 16 + 3) + 34, 49 + (18 + 32) + 18 + 2 * (16 + 3));
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

/// One session whose second rank comes by a way that ends once so many bytes have passed.
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
    let (seat, part) = (84 + 34, up - 34);
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
        (_, down_to) if down_to < 49 + 50 => assert_eq!(zero_met, one_met, "{at}: {zero:?} {one:?}"),
        (_, down_to) => {
            assert_eq!(one_met, down_to >= down, "{at}: {zero:?} {one:?}");
            assert!(zero_met || down_to == 49 + 50, "{at}: {zero:?} {one:?}");
        }
    }
}
