//! Members that have the key and break the rules.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use tracing::span::{Attributes, Id, Record};

use crate::key::JobKey;
use crate::meeting::{Meeting, MeetingError};
use crate::rendezvous::gathering::Gathering;
use crate::rendezvous::noise::{Channel, hello, record_length};
use crate::rendezvous::server::{Server, Stop};
use crate::rendezvous::wire::{
    ANSWER, HEADER, HELLO, Header, Hello, Kind, MAX_BLOB, MAX_RECORD, NO_RANK, TAG, message,
};
use crate::rendezvous::{Bulletin, Notice, Rendezvous, RendezvousClient, Succession};

const SILENCE: Duration = Duration::from_secs(5);

fn key() -> JobKey {
    JobKey::from_bytes([7; 32])
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn serve(size: u32) -> Rendezvous {
    Rendezvous::bind(SocketAddr::from(([127, 0, 0, 1], 0)), size, key(), None, SILENCE).unwrap()
}

fn meet(place: &Rendezvous, rank: u32, size: u32) -> RendezvousClient {
    Rendezvous::meet(&[place.address().to_string()], rank, size, &key(), soon(), SILENCE).unwrap()
}

/// A rank that says whatever it likes.
struct Rogue {
    stream: TcpStream,
    channel: Channel,
}

impl Rogue {
    fn join(place: &Rendezvous, rank: u32, size: u32) -> Self {
        Self::come(place, Hello { rank, size, pid: 1, moves: None })
    }

    fn come(place: &Rendezvous, who: Hello) -> Self {
        let mut stream = TcpStream::connect(place.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let (initiator, first) = hello(&key(), who).unwrap();
        stream.write_all(&first).unwrap();
        let mut answer = [0; ANSWER];
        stream.read_exact(&mut answer).unwrap();
        let mut channel = initiator.answered(&answer).unwrap();
        stream.write_all(&channel.finish().unwrap()).unwrap();
        let mut rogue = Self { stream, channel };
        assert_eq!(rogue.hear().unwrap().0.kind, Kind::Welcome);
        rogue
    }

    fn say(&mut self, content: &[u8]) {
        let mut records = Vec::new();
        assert!(self.channel.seal(content, &mut records));
        self.put(&records);
    }

    /// Bytes as they are; the server may have hung up half way.
    fn put(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// The next message, if it comes in one record; none at the end of the connection.
    fn hear(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut length = [0; 2];
        self.stream.read_exact(&mut length).ok()?;
        let mut record = vec![0; record_length(length)?];
        self.stream.read_exact(&mut record).ok()?;
        let mut content = Vec::new();
        assert!(self.channel.open(&record, &mut content));
        let (header, body) = content.split_first_chunk::<HEADER>().unwrap();
        Some((Header::decode(header).unwrap(), body.to_vec()))
    }
}

#[test]
fn what_breaks_the_rules_ends_that_rank_and_is_told_to_those_who_wait() {
    let blob = |round, body: &[u8]| message(Kind::Blob, round, 60_000, body);
    let mut huge = blob(0, b"");
    huge[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut longer = blob(0, b"");
    longer[12..16].copy_from_slice(&(MAX_BLOB as u32 + 1).to_le_bytes());
    let twice = [blob(0, b"one"), blob(0, b"two")].concat();
    let ahead = [blob(0, b"one"), blob(1, b"two")].concat();
    let said: Vec<Vec<u8>> = vec![
        huge,
        longer,
        twice,
        ahead,
        message(Kind::Taken, 0, 0, b""),
        message(Kind::Welcome, 0, 0, &[0; 20]),
        message(Kind::Part, 0, 0, b"part"),
        message(Kind::Failed, 1, 0, b""),
        message(Kind::Join, 0, 0, b""),
        message(Kind::Leave, 0, 0, b""),
        message(Kind::Gone, 1, 0, b""),
        [blob(0, b"one"), message(Kind::Watch, 0, 0, b"")].concat(),
        vec![0xff; HEADER],
        vec![0; 3 * MAX_RECORD],
    ];
    for (case, said) in said.iter().enumerate() {
        let place = serve(3);
        let mut rogue = Rogue::join(&place, 2, 3);
        let (mut zero, mut one) = (meet(&place, 0, 3), meet(&place, 1, 3));
        let errors = std::thread::scope(|scope| {
            let zero = scope.spawn(|| zero.all_gather(b"zero", soon()).unwrap_err());
            rogue.say(said);
            assert!(rogue.hear().is_none(), "case {case}: the connection ends");
            // Whoever comes to the round later hears of it, too.
            [zero.join().unwrap(), one.all_gather(b"one", soon()).unwrap_err()]
        });
        for error in errors {
            assert!(matches!(error, MeetingError::Ended { rank: 2, .. }), "case {case}: {error}");
        }
    }
}

#[test]
fn a_part_out_of_turn_is_refused_and_costs_nobody_else_anything() {
    let place = serve(2);
    let mut rogue = Rogue::join(&place, 1, 2);
    rogue.say(&message(Kind::Blob, 7, 60_000, b"another round"));
    let (header, _) = rogue.hear().unwrap();
    assert_eq!((header.kind, header.first), (Kind::Failed, 5));
    assert!(rogue.hear().is_none());
}

#[test]
fn records_that_are_none_end_the_connection() {
    for bytes in [
        vec![0, 0],
        vec![TAG as u8, 0],
        u16::to_le_bytes((MAX_RECORD + TAG + 1) as u16).to_vec(),
        vec![0xff; 5],
        [vec![40, 0], vec![0xa5; 40]].concat(),
    ] {
        let place = serve(2);
        let mut rogue = Rogue::join(&place, 1, 2);
        rogue.put(&bytes);
        assert!(rogue.hear().is_none(), "{bytes:?}");
    }
}

#[test]
fn a_member_that_reads_nothing_holds_up_nobody() {
    // More than the kernel takes for it, in many rounds.
    let place = serve(2);
    let large = vec![9; MAX_BLOB];
    let mut rogue = Rogue::join(&place, 1, 2);
    let mut zero = meet(&place, 0, 2);
    for round in 0..3 {
        rogue.say(&message(Kind::Blob, round, 60_000, &large));
        if round > 0 {
            // It has not said that it took the last answer: that is the end of it.
            let error = zero.all_gather(&large, soon()).unwrap_err();
            assert!(matches!(error, MeetingError::Ended { rank: 1, .. }), "{error}");
            break;
        }
        assert_eq!(zero.all_gather(&large, soon()).unwrap().len(), 2);
    }
    // Nor does the server wait for it for ever.
    let began = Instant::now();
    drop(place);
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// Counts the lines that would be logged.
struct Lines(Arc<AtomicU32>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn whoever_comes_in_vain_again_and_again_fills_no_log() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let place = listener.local_addr().unwrap();
    let stop = Arc::new(Stop {
        bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
        stopping: AtomicBool::new(false),
        ended: Mutex::default(),
        served_by: AtomicU32::new(NO_RANK),
        fate: Mutex::default(),
    });
    let lines = Arc::new(AtomicU32::new(0));
    let (began, refused) = (Instant::now(), 100);
    std::thread::scope(|scope| {
        let (stopped, counted) = (Arc::clone(&stop), Lines(Arc::clone(&lines)));
        scope.spawn(move || {
            let job = crate::JobId::random().unwrap();
            let server = Server::new(listener, stopped, job, key(), Gathering::new(2), SILENCE, None);
            tracing::subscriber::with_default(counted, || server.run());
        });
        let come = |rank| Rendezvous::meet(&[place.to_string()], rank, 2, &key(), soon(), SILENCE);
        let zero = come(0);
        let again = (0..refused).filter(|_| matches!(come(0), Err(MeetingError::ClaimedTwice { .. })));
        assert_eq!(again.count(), refused);
        stop.stopping.store(true, Ordering::Release);
        stop.ring();
        drop(zero);
    });
    let (lines, most) = (u64::from(lines.load(Ordering::Relaxed)), 5 * (began.elapsed().as_secs() + 2));
    assert!((1..=most).contains(&lines), "{lines} lines");
}

#[test]
fn any_bytes_after_the_proof_are_survived() {
    let place = serve(1);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as usize % below
    };
    // A first message with a changed byte, or cut, or followed by anything.
    for _ in 0..300 {
        let mut stream = TcpStream::connect(place.address()).unwrap();
        let (_, first) = hello(&key(), Hello { rank: 0, size: 1, pid: 1, moves: None }).unwrap();
        let mut bytes = first.to_vec();
        match random(3) {
            0 => bytes[random(HELLO)] ^= 1 << random(8),
            1 => bytes.truncate(random(HELLO)),
            _ => bytes.extend((0..random(200)).map(|_| random(256) as u8)),
        }
        let _ = stream.write_all(&bytes);
    }
    let mut only = meet(&place, 0, 1);
    assert_eq!(only.all_gather(b"there", soon()).unwrap(), [b"there"]);
}

fn knows(bulletin: &mut Bulletin, what: &str, known: impl Fn(&Bulletin, &[Notice]) -> bool) -> Vec<Notice> {
    let (mut heard, until) = (Vec::new(), soon());
    while !known(bulletin, &heard) {
        assert!(Instant::now() < until, "never: {what}, but {heard:?}");
        heard.extend(bulletin.read().unwrap());
        std::thread::sleep(Duration::from_millis(2));
    }
    heard
}

#[test]
fn whoever_gives_up_its_seat_at_a_successor_has_not_ended() {
    let job = crate::JobId::random().unwrap();
    let place = Rendezvous::tell([127, 0, 0, 1].into(), None, 3, &key(), job, SILENCE).unwrap();
    let moving = |rank, pid| Rogue::come(&place, Hello { rank, size: 3, pid, moves: Some(0) });
    let mut zero = moving(0, 1);
    zero.say(&message(Kind::Watch, 0, 0, b""));
    assert_eq!(zero.hear().unwrap().0.kind, Kind::Standbys);
    // The server was slow, and the rank is not there any more when it is answered; or does not know that yet.
    drop(moving(1, 5));
    let first = moving(1, 5);
    let mut one = moving(1, 5);
    drop(first);
    // It may find that it is not to stay here.
    one.say(&[message(Kind::Watch, 0, 0, b""), message(Kind::Moved, 0, 0, b"")].concat());
    one.hear();
    drop(one);
    // What comes next is that somebody else is there, and ends.
    let mut two = moving(2, 6);
    two.say(&message(Kind::Watch, 0, 0, b""));
    two.hear().unwrap();
    drop(two);
    let gone = std::iter::from_fn(|| zero.hear()).find(|(header, _)| header.kind == Kind::Gone).unwrap();
    assert_eq!(gone.0.first, 2);
}

#[test]
fn what_the_server_said_before_its_end_is_known_to_one_that_could_not_answer_it() {
    let here = [127, 0, 0, 1].into();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let open = listener.local_addr().unwrap();
    let alive: crate::Whereabouts = std::sync::Arc::new(move |_| crate::Whereabout::Listens(vec![open]));
    let place = serve(5);
    place.pass_on(0);
    let mut seats: Vec<_> = (0..5).map(|rank| meet(&place, rank, 5)).collect();
    std::thread::scope(|scope| {
        seats.iter_mut().for_each(|seat| drop(scope.spawn(|| seat.all_gather(b"", soon()).unwrap())));
    });
    let mut one = seats[1].bulletin().unwrap();
    let duty = |notice: Option<&Notice>| match notice {
        Some(Notice::StandBy(duty)) => Some(duty.clone()),
        _ => None,
    };
    let asked = |bulletin: &mut Bulletin| {
        let heard = knows(bulletin, "it is asked", |_, heard| duty(heard.last()).is_some());
        duty(heard.last()).unwrap()
    };
    let duty_of_one = asked(&mut one);
    let mut others: Vec<_> = seats[2..4]
        .iter_mut()
        .map(|seat| {
            let mut bulletin = seat.bulletin().unwrap();
            let duty = asked(&mut bulletin);
            bulletin.stand_by(duty, here, None, alive.clone()).unwrap()
        })
        .collect();
    let mut four = seats[4].bulletin().unwrap();
    knows(&mut four, "two stand by", |bulletin, _| bulletin.standbys().len() == 2);
    // It ends with something unread, so that its kernel breaks the connection.
    place.is_stopped_for(Duration::from_secs(2));
    std::thread::sleep(Duration::from_millis(100));
    one.moved();
    place.vanish();
    let two = &mut others[0].1;
    knows(two, "two serves", |bulletin, _| bulletin.server() == Some(2));
    let (standing, mut own) = one.stand_by(duty_of_one, here, None, alive).unwrap();
    knows(&mut own, "the server has ended", |_, heard| heard.contains(&Notice::Ended(0)));
    assert_eq!(
        standing.stop.served_by.load(std::sync::atomic::Ordering::Relaxed),
        crate::rendezvous::wire::NO_RANK
    );
}

/// A rank that has moved there, of a job whose ranks met at that place.
fn moved_to(place: &Rendezvous, rank: u32, met_at: SocketAddr) -> Bulletin {
    use crate::rendezvous::client::{Comes, meet};
    use crate::rendezvous::place::MetAt;
    let places = [place.address().to_string()];
    let mut seat = meet(&places, rank, 3, &key(), soon(), SILENCE, Comes::Moving(0)).unwrap();
    seat.bulletin_of_job_met_at(MetAt::new(&met_at.to_string(), met_at)).unwrap()
}

#[test]
fn whoever_ended_before_it_said_a_word_is_followed_by_another_of_its_generation() {
    let (here, job) = ([127, 0, 0, 1].into(), crate::JobId::random().unwrap());
    let [first, second] = [0, 1].map(|rank| {
        let place = Rendezvous::tell(here, None, 3, &key(), job, SILENCE).unwrap();
        place.pass_on(rank);
        place
    });
    // It reads nothing: all that it knows of that server is what it was told when it came.
    let two = moved_to(&first, 2, second.address());
    first.vanish();
    let Succession::Found(mut found) = two.find_successor() else { panic!("one serves where they met") };
    knows(&mut found, "one serves", |bulletin, _| bulletin.server() == Some(1));
    second.vanish();
}

#[test]
fn whoever_follows_knows_who_stood_by_until_it_hears_otherwise() {
    let (here, job) = ([127, 0, 0, 1].into(), crate::JobId::random().unwrap());
    let [zero, next] = [0, 1].map(|_| Rendezvous::tell(here, None, 3, &key(), job, SILENCE).unwrap());
    let mut one = moved_to(&zero, 1, zero.address());
    let heard = knows(&mut one, "it is asked", |_, heard| matches!(heard.last(), Some(Notice::StandBy(_))));
    let Some(Notice::StandBy(duty)) = heard.into_iter().last() else { unreachable!() };
    let nowhere: crate::Whereabouts = std::sync::Arc::new(|_| crate::Whereabout::Listens(Vec::new()));
    let (standing, _one) = one.stand_by(duty, here, None, nowhere).unwrap();
    let mut two = moved_to(&zero, 2, zero.address());
    knows(&mut two, "one stands by", |bulletin, _| bulletin.has_successors());
    let two = two.follow(next.address()).unwrap();
    assert!(two.has_successors());
    [zero, next, standing].into_iter().for_each(Rendezvous::vanish);
}

#[test]
fn whoever_comes_again_while_the_server_ends_is_told_so_and_comes_to_the_next() {
    let here = [127, 0, 0, 1].into();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let open = listener.local_addr().unwrap();
    let alive: crate::Whereabouts = std::sync::Arc::new(move |_| crate::Whereabout::Listens(vec![open]));
    let place = serve(3);
    place.pass_on(0);
    let mut seats: Vec<_> = (0..3).map(|rank| meet(&place, rank, 3)).collect();
    std::thread::scope(|scope| {
        seats.iter_mut().for_each(|seat| drop(scope.spawn(|| seat.all_gather(b"", soon()).unwrap())));
    });
    drop(seats.pop());
    let mut one = seats[1].bulletin().unwrap();
    let heard = knows(&mut one, "it is asked", |_, heard| matches!(heard.last(), Some(Notice::StandBy(_))));
    let Some(Notice::StandBy(duty)) = heard.into_iter().last() else { unreachable!() };
    let (next, mut one) = one.stand_by(duty, here, None, alive).unwrap();
    knows(&mut one, "a rank has died", |_, heard| heard.contains(&Notice::Ended(2)));
    let mut zero = seats[0].bulletin().unwrap();
    knows(&mut zero, "one stands by", |bulletin, _| bulletin.standbys().len() == 1);
    let mut two = meet(&place, 2, 3);
    assert_eq!((two.incarnation(), two.roster(soon()).unwrap().len()), (1, 3));
    // The server has its word, and does nothing about it any more.
    place.is_stopped_for(Duration::from_secs(2));
    std::thread::sleep(Duration::from_millis(100));
    let comes = std::thread::spawn(move || two.come_again(b"again", soon()));
    std::thread::sleep(Duration::from_millis(50));
    place.vanish();
    let error = comes.join().unwrap().unwrap_err();
    assert!(matches!(error, MeetingError::ServerGone { .. }), "{error}");
    let mut two = meet(&next, 2, 3);
    assert_eq!((two.incarnation(), two.roster(soon()).unwrap().len()), (1, 3));
    two.come_again(b"again", soon()).unwrap();
    let arrived = Notice::Arrived { rank: 2, incarnation: 1, part: b"again".to_vec() };
    knows(&mut one, "it is there again", |_, heard| heard.contains(&arrived));
    next.vanish();
}
