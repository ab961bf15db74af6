//! Members that have the key and break the rules.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::key::JobKey;
use crate::meeting::{Meeting, MeetingError};
use crate::rendezvous::noise::{Channel, hello, record_length};
use crate::rendezvous::wire::{
    ANSWER, HEADER, HELLO, Header, Hello, Kind, MAX_BLOB, MAX_RECORD, TAG, message,
};
use crate::rendezvous::{Rendezvous, RendezvousClient};

fn key() -> JobKey {
    JobKey::from_bytes([7; 32])
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn serve(size: u32) -> Rendezvous {
    Rendezvous::bind(SocketAddr::from(([127, 0, 0, 1], 0)), size, key(), None).unwrap()
}

fn meet(place: &Rendezvous, rank: u32, size: u32) -> RendezvousClient {
    Rendezvous::meet(&[place.address().to_string()], rank, size, &key(), soon()).unwrap()
}

/// A rank that says whatever it likes.
struct Rogue {
    stream: TcpStream,
    channel: Channel,
}

impl Rogue {
    fn join(place: &Rendezvous, rank: u32, size: u32) -> Self {
        let mut stream = TcpStream::connect(place.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let (initiator, first) = hello(&key(), Hello { rank, size, pid: 1, moves: None }).unwrap();
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
        message(Kind::Welcome, 0, 0, &[0; 16]),
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
