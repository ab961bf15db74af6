//! What travels between those who meet: lengths, messages, and why a meeting fails.
//!
//! ```text
//! rank                                          server
//!   │ ── clear part, psk, e ────────────────────▶ │
//!   │ ◀─ status, e, ee ────────────────────────── │  the server has proven that it has the key
//!   │ ── record: Join ──────────────────────────▶ │  the rank has, now and not in a recording
//!   │ ◀─ Welcome(job, who serves) ─────────────── │  its number is its own from here on
//!   │ ── Blob(round, time left) ────────────────▶ │
//!   │ ◀─ Part(round, rank) × size  |  Failed ──── │
//!   │ ── Taken(round) ──────────────────────────▶ │
//!   │ ── Watch ─────────────────────────────────▶ │  once the rank is part of the job, for the rest of its life
//!   │ ◀─ Gone(rank, how) … ────────────────────── │
//!   │ ◀─ Arrived(rank, incarnation, its part) … ─ │  a rank that was gone was started again
//!   │ ── Leave ─────────────────────────────────▶ │
//!   │ ◀─ Closed ───────────────────────────────── │  the server ends, and nobody's end will be told any more
//! ```
//! A rank that serves has some of the others stand by, and tells all who does; see `standing`:
//! ```text
//!   │ ◀─ StandBy(who is gone), Part × size ────── │  to some ranks, which go on listening
//!   │ ── Serving(where), or nowhere ────────────▶ │  where it would serve
//!   │ ◀─ Standbys(generation, who, where) ─────── │  to all
//! ```
//! If it leaves it passes the news on to the first of them:
//! ```text
//!   │ ◀─ Move(who serves, where) ──────────────── │  to all
//!   │ ── Moved ─────────────────────────────────▶ │  they have a seat there; their end here is no news
//! ```
//! If rank 0 has died and serves a new meeting at the old place, as one that knows of none before, whoever serves the news of
//! that one goes there, like a rank that moves:
//! ```text
//!   │ ◀─ Welcome(job, who serves) ─────────────── │
//!   │ ── Elsewhere(where, who has died) ────────▶ │  if all who have come here are among these: they are to come there, again
//! ```
//! A rank that comes again after the meeting, because its process had died, is told so, and who is there:
//! ```text
//!   │ ◀─ Welcome(job, incarnation) ────────────── │
//!   │ ◀─ Part(incarnation, rank) × size ───────── │  of the last round; its own is its predecessor's
//!   │ ── Return(its part) ──────────────────────▶ │  the others hear of it
//!   │ ◀─ Arrived(itself) ──────────────────────── │  it is part of the job, and hears who is gone from here on
//! ```
//! Behind the handshake everything travels in records: two bytes of length, little-endian, and so many bytes of a Noise
//! transport message. What they hold, put together, is a sequence of messages: a header of 16 bytes, and a body.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::env::MAX_RANKS;
use crate::key::JobId;
use crate::meeting::MeetingError;

/// Bytes of a blob at most.
pub(crate) const MAX_BLOB: usize = 64 << 10;
/// Bytes of a record's content at most.
pub(crate) const MAX_RECORD: usize = 16 << 10;
/// Bytes that the cipher adds to a record's content.
pub(crate) const TAG: usize = 16;
/// An ephemeral key and a tag.
pub(crate) const PROOF: usize = 32 + TAG;
/// Bytes of the clear part of a rank's first message.
pub(crate) const CLEAR: usize = 40;
/// Bytes of a rank's first message.
pub(crate) const HELLO: usize = CLEAR + PROOF;
/// Bytes of the answer to it.
pub(crate) const ANSWER: usize = 1 + PROOF;
/// Bytes of a message's header.
pub(crate) const HEADER: usize = 16;
/// Bytes of the record with which a rank proves that it is there now.
pub(crate) const FINISH: usize = 2 + HEADER + TAG;

const MAGIC: [u8; 20] = *b"posthaste rendezvous";
const VERSION: u16 = 5;
/// The longest description of a failure: the list of all ranks of the largest job.
const MAX_FAILURE: usize = 32 << 10;
/// Bytes of what a rank is told first: the job, and the rank that serves.
pub(crate) const WELCOME: usize = 16 + 4;
/// The longest address: IPv6 with a scope, and a port.
const MAX_ADDRESS: usize = 64;
/// The launcher serves, or nobody yet.
pub(crate) const NO_RANK: u32 = u32::MAX;
/// The most ranks that stand by to serve the news.
pub(crate) const STANDBYS: usize = 3;
/// The longest text in one.
const MAX_TEXT: usize = 400;

/// Who a rank says it is, bound by the proof of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) pid: u32,
    /// It is part of the job already, as this incarnation, and moves its seat here; none: it comes to meet the others.
    pub(crate) moves: Option<u32>,
}

impl Hello {
    pub(crate) fn encode(self) -> [u8; CLEAR] {
        let mut bytes = [0; CLEAR];
        bytes[..20].copy_from_slice(&MAGIC);
        bytes[20..22].copy_from_slice(&VERSION.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.size.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.rank.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.pid.to_le_bytes());
        let moves = self.moves.map_or(0, |incarnation| incarnation.saturating_add(1));
        bytes[36..].copy_from_slice(&moves.to_le_bytes());
        bytes
    }

    /// None for what is no rank's first message; otherwise whether it speaks our version.
    pub(crate) fn decode(bytes: &[u8; CLEAR]) -> Option<Result<Self, Status>> {
        if bytes[..20] != MAGIC {
            return None;
        }
        if bytes[20..24] != [VERSION.to_le_bytes()[0], VERSION.to_le_bytes()[1], 0, 0] {
            return Some(Err(Status::Version));
        }
        let moves = word(bytes, 36).checked_sub(1);
        Some(Ok(Self { size: word(bytes, 24), rank: word(bytes, 28), pid: word(bytes, 32), moves }))
    }
}

/// The first byte of the answer; all but `Proceed` end the connection. Nothing vouches for it: whoever can change it
/// could as well have cut the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Proceed = 1,
    Version = 2,
    Key = 3,
}

impl Status {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Proceed, Self::Version, Self::Key].into_iter().find(|status| *status as u8 == byte)
    }
}

/// What a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Join = 1,
    Welcome = 2,
    Blob = 3,
    Part = 4,
    Taken = 5,
    Failed = 6,
    Watch = 7,
    Leave = 8,
    Gone = 9,
    Closed = 10,
    Return = 11,
    Arrived = 12,
    StandBy = 13,
    Serving = 14,
    Move = 15,
    Moved = 16,
    Standbys = 17,
    Elsewhere = 18,
}

/// The header of a message; what a kind does not use is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// The round, the kind of failure, who is gone, who is there again, who serves, an incarnation, or whether parts follow.
    pub(crate) first: u32,
    /// Milliseconds left, the rank of a part, how who is gone has gone, an incarnation, or a generation.
    pub(crate) second: u32,
    /// Bytes of the body.
    pub(crate) length: u32,
}

impl Header {
    pub(crate) fn new(kind: Kind, first: u32, second: u32, length: usize) -> Self {
        Self { kind, first, second, length: length as u32 }
    }

    pub(crate) fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.first.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.second.to_le_bytes());
        bytes[12..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// None for an unknown kind, or a body longer than its kind may have.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let (kind, most) = match bytes[0] {
            1 => (Kind::Join, 0),
            2 => (Kind::Welcome, WELCOME),
            3 => (Kind::Blob, MAX_BLOB),
            4 => (Kind::Part, MAX_BLOB),
            5 => (Kind::Taken, 0),
            6 => (Kind::Failed, MAX_FAILURE),
            7 => (Kind::Watch, 0),
            8 => (Kind::Leave, 0),
            9 => (Kind::Gone, 0),
            10 => (Kind::Closed, 0),
            11 => (Kind::Return, MAX_BLOB),
            12 => (Kind::Arrived, MAX_BLOB),
            13 => (Kind::StandBy, 8 * MAX_RANKS as usize),
            14 => (Kind::Serving, MAX_ADDRESS),
            15 => (Kind::Move, MAX_ADDRESS),
            16 => (Kind::Moved, 0),
            17 => (Kind::Standbys, STANDBYS * (8 + MAX_ADDRESS)),
            18 => (Kind::Elsewhere, 4 + MAX_ADDRESS + 4 * MAX_RANKS as usize),
            _ => return None,
        };
        let header = Self { kind, first: word(bytes, 4), second: word(bytes, 8), length: word(bytes, 12) };
        (bytes[1..4] == [0; 3] && header.length as usize <= most).then_some(header)
    }
}

/// How a rank has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Way {
    /// Its connection has ended without a word.
    Ended = 0,
    /// In order, as it has said.
    Left = 1,
    /// Whoever started its process has seen that end; connections may live on in others that it has forked.
    Died = 2,
}

/// A message as it travels.
pub(crate) fn message(kind: Kind, first: u32, second: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend_from_slice(&Header::new(kind, first, second, body.len()).encode());
    bytes.extend_from_slice(body);
    bytes
}

/// Why a meeting fails, or somebody is not let in; what the server knows of a [`MeetingError`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    Missing(Vec<u32>),
    ClaimedTwice {
        rank: u32,
        first: String,
        second: String,
    },
    Size {
        rank: u32,
        size: u32,
        said: u32,
    },
    Ended {
        rank: u32,
        who: String,
    },
    Refused(String),
    /// It has left the job in order, which goes on.
    LeftBefore {
        rank: u32,
        first: String,
    },
    /// Nobody serves here yet. Whoever stands by here may still hear the server.
    Later {
        hears: bool,
    },
    /// These ranks have met before, and their news are served there: this rank is one that comes again.
    Elsewhere(SocketAddr),
}

impl Failure {
    /// Whoever serves the meeting ends before it is over.
    pub(crate) fn called_off() -> Failure {
        Failure::Refused("whoever served the meeting has called it off".into())
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let code = match self {
            Self::Missing(ranks) => {
                ranks.iter().for_each(|rank| body.extend_from_slice(&rank.to_le_bytes()));
                1
            }
            Self::ClaimedTwice { rank, first, second } => {
                body.extend_from_slice(&rank.to_le_bytes());
                put_text(&mut body, first);
                put_text(&mut body, second);
                2
            }
            Self::Size { rank, size, said } => {
                [rank, size, said].iter().for_each(|word| body.extend_from_slice(&word.to_le_bytes()));
                3
            }
            Self::Ended { rank, who } => {
                body.extend_from_slice(&rank.to_le_bytes());
                put_text(&mut body, who);
                4
            }
            Self::Refused(problem) => {
                put_text(&mut body, problem);
                5
            }
            Self::Later { hears } => {
                body.extend_from_slice(&u32::from(*hears).to_le_bytes());
                6
            }
            Self::LeftBefore { rank, first } => {
                body.extend_from_slice(&rank.to_le_bytes());
                put_text(&mut body, first);
                7
            }
            Self::Elsewhere(place) => {
                put_text(&mut body, &place.to_string());
                8
            }
        };
        message(Kind::Failed, code, 0, &body)
    }

    pub(crate) fn decode(code: u32, body: &[u8]) -> Option<Self> {
        let mut rest = body;
        let failure = match code {
            1 => {
                let ranks = rest.chunks_exact(4).map(|bytes| word(bytes, 0)).collect();
                rest = rest.chunks_exact(4).remainder();
                Self::Missing(ranks)
            }
            2 => Self::ClaimedTwice {
                rank: take_word(&mut rest)?,
                first: take_text(&mut rest)?,
                second: take_text(&mut rest)?,
            },
            3 => Self::Size {
                rank: take_word(&mut rest)?,
                size: take_word(&mut rest)?,
                said: take_word(&mut rest)?,
            },
            4 => Self::Ended { rank: take_word(&mut rest)?, who: take_text(&mut rest)? },
            5 => Self::Refused(take_text(&mut rest)?),
            6 => Self::Later { hears: take_word(&mut rest)? != 0 },
            7 => Self::LeftBefore { rank: take_word(&mut rest)?, first: take_text(&mut rest)? },
            8 => Self::Elsewhere(take_text(&mut rest)?.parse().ok()?),
            _ => return None,
        };
        rest.is_empty().then_some(failure)
    }

    /// The error of a rank that came to `place` for a job of `size` ranks and waited so long.
    pub(crate) fn into_error(self, place: &str, size: u32, seconds: u64) -> MeetingError {
        let place = place.to_owned();
        match self {
            Self::Missing(missing) => MeetingError::Missing { place, size, seconds, missing },
            Self::ClaimedTwice { rank, first, second } => {
                MeetingError::ClaimedTwice { rank, place, first, second }
            }
            Self::Size { rank, size, said } => MeetingError::Size { rank, size, said },
            Self::Ended { rank, who } => MeetingError::Ended { rank, who, place },
            Self::Refused(problem) => MeetingError::Refused { place, problem },
            Self::LeftBefore { rank, first } => MeetingError::LeftBefore { rank, place, first },
            Self::Elsewhere(served_at) => MeetingError::Elsewhere { place, served_at },
            Self::Later { .. } => {
                MeetingError::Refused { place, problem: "it does not serve the meeting yet".into() }
            }
        }
    }
}

/// Who is gone, and whether it has said so, as a body.
pub(crate) fn put_gone(gone: impl Iterator<Item = (u32, bool)>) -> Vec<u8> {
    gone.flat_map(|(rank, said)| [rank, u32::from(said)]).flat_map(u32::to_le_bytes).collect()
}

/// What [`put_gone`] has written; none if it is not that.
pub(crate) fn take_gone(body: &[u8]) -> Option<Vec<(u32, bool)>> {
    let (pairs, []) = body.as_chunks::<8>() else { return None };
    Some(pairs.iter().map(|pair| (word(pair, 0), word(pair, 4) != 0)).collect())
}

/// Who stands by, and where, as a body.
pub(crate) fn put_standbys(standbys: &[(u32, SocketAddr)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (rank, place) in standbys {
        body.extend_from_slice(&rank.to_le_bytes());
        put_text(&mut body, &place.to_string());
    }
    body
}

/// What [`put_standbys`] has written; none if it is not that.
pub(crate) fn take_standbys(mut body: &[u8]) -> Option<Vec<(u32, SocketAddr)>> {
    let mut standbys = Vec::new();
    while !body.is_empty() {
        standbys.push((take_word(&mut body)?, take_text(&mut body)?.parse().ok()?));
    }
    Some(standbys)
}

/// Where the news of a job are served, and which of its ranks have died, as a body.
pub(crate) fn put_elsewhere(place: SocketAddr, died: &[u32]) -> Vec<u8> {
    let mut body = Vec::new();
    put_text(&mut body, &place.to_string());
    body.extend(died.iter().flat_map(|rank| rank.to_le_bytes()));
    body
}

/// What [`put_elsewhere`] has written; none if it is not that.
pub(crate) fn take_elsewhere(mut body: &[u8]) -> Option<(SocketAddr, BTreeSet<u32>)> {
    let place = take_text(&mut body)?.parse().ok()?;
    let (ranks, []) = body.as_chunks::<4>() else { return None };
    Some((place, ranks.iter().map(|rank| u32::from_le_bytes(*rank)).collect()))
}

/// What a rank is told first, as a body: the job, and the rank that serves, if one does.
pub(crate) fn put_welcome(job: &[u8; 16], server: Option<u32>) -> [u8; WELCOME] {
    let mut body = [0; WELCOME];
    body[..16].copy_from_slice(job);
    body[16..].copy_from_slice(&server.unwrap_or(NO_RANK).to_le_bytes());
    body
}

/// What [`put_welcome`] has written; none if it is not that.
pub(crate) fn take_welcome(body: &[u8]) -> Option<(JobId, Option<u32>)> {
    let (job, server) = body.split_first_chunk()?;
    let server = u32::from_le_bytes(server.try_into().ok()?);
    Some((JobId::from_bytes(*job), Some(server).filter(|server| *server != NO_RANK)))
}

/// An address as a body; none if it is not one.
pub(crate) fn take_address(body: &[u8]) -> Option<SocketAddr> {
    std::str::from_utf8(body).ok()?.parse().ok()
}

/// A process as others are told of it.
pub(crate) fn who(address: SocketAddr, pid: u32) -> String {
    format!("{address} (pid {pid})")
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn take_word(rest: &mut &[u8]) -> Option<u32> {
    let (bytes, behind) = rest.split_at_checked(4)?;
    *rest = behind;
    Some(word(bytes, 0))
}

fn put_text(body: &mut Vec<u8>, text: &str) {
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    body.extend_from_slice(&(end as u32).to_le_bytes());
    body.extend_from_slice(&text.as_bytes()[..end]);
}

/// A text; what would disturb a terminal or a log is escaped.
fn take_text(rest: &mut &[u8]) -> Option<String> {
    let length = take_word(rest)? as usize;
    let (bytes, behind) = rest.split_at_checked(length).filter(|_| length <= MAX_TEXT)?;
    *rest = behind;
    let text = String::from_utf8_lossy(bytes);
    Some(text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_message_goes_round_and_nothing_else_is_one() {
        let hello = Hello { rank: 3, size: 4, pid: 77, moves: None };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(Ok(hello)));
        let moves = Hello { moves: Some(5), ..hello };
        assert_eq!(Hello::decode(&moves.encode()), Some(Ok(moves)));
        for at in 0..24 {
            let mut broken = bytes;
            broken[at] ^= 0x40;
            let wanted = if at < 20 { None } else { Some(Err(Status::Version)) };
            assert_eq!(Hello::decode(&broken), wanted, "byte {at}");
        }
    }

    #[test]
    fn no_header_announces_more_than_its_kind_may_have() {
        for (kind, most) in
            [(Kind::Join, 0), (Kind::Welcome, WELCOME), (Kind::Blob, MAX_BLOB), (Kind::Taken, 0)]
        {
            let header = Header::new(kind, 1, 2, most);
            assert_eq!(Header::decode(&header.encode()), Some(header));
            assert_eq!(Header::decode(&Header::new(kind, 1, 2, most + 1).encode()), None);
            assert_eq!(Header::decode(&Header::new(kind, 1, 2, u32::MAX as usize).encode()), None);
        }
        for kind in [0, 19, 255] {
            let mut bytes = [0; HEADER];
            bytes[0] = kind;
            assert_eq!(Header::decode(&bytes), None);
        }
    }

    #[test]
    fn failures_go_round_and_pieces_of_them_are_none() {
        for failure in [
            Failure::Missing((0..4096).collect()),
            Failure::ClaimedTwice { rank: 1, first: "a".into(), second: "é".repeat(1000) },
            Failure::Size { rank: 1, size: 2, said: 3 },
            Failure::Ended { rank: 7, who: String::new() },
            Failure::Refused("no".into()),
            Failure::Later { hears: true },
            Failure::LeftBefore { rank: 7, first: "p7".into() },
            Failure::Elsewhere(([127, 0, 0, 1], 7).into()),
            Failure::Elsewhere("[fe80::1%3]:65535".parse().unwrap()),
        ] {
            let bytes = failure.encode();
            let (header, body) = bytes.split_at(HEADER);
            let header = Header::decode(header.try_into().unwrap()).unwrap();
            assert_eq!((header.kind, header.length as usize), (Kind::Failed, body.len()));
            let mut wanted = failure.clone();
            if let Failure::ClaimedTwice { second, .. } = &mut wanted {
                second.truncate(MAX_TEXT);
            }
            assert_eq!(Failure::decode(header.first, body), Some(wanted));
            if !matches!(failure, Failure::Missing(_)) {
                for cut in 0..body.len() {
                    assert_eq!(Failure::decode(header.first, &body[..cut]), None, "cut at {cut}");
                }
            }
            for code in [0, 9, u32::MAX] {
                assert_eq!(Failure::decode(code, body), None);
            }
        }
        let standbys: Vec<(u32, SocketAddr)> =
            vec![(2, "[fe80::1%3]:65535".parse().unwrap()), (7, "127.0.0.1:1".parse().unwrap())];
        let bytes = put_standbys(&standbys);
        assert_eq!(take_standbys(&bytes), Some(standbys));
        assert!((1..bytes.len()).all(|cut| cut == 25 || take_standbys(&bytes[..cut]).is_none()), "{bytes:?}");
        let place: SocketAddr = "127.0.0.1:77".parse().unwrap();
        for died in [&[][..], &[0], &[0, 7, 4095]] {
            let body = put_elsewhere(place, died);
            assert_eq!(take_elsewhere(&body), Some((place, died.iter().copied().collect())));
            let whole = |cut: usize| cut >= 16 && cut.is_multiple_of(4);
            assert!((0..body.len()).all(|cut| whole(cut) == take_elsewhere(&body[..cut]).is_some()));
        }
        for server in [None, Some(0), Some(4095)] {
            let body = put_welcome(&[9; 16], server);
            assert_eq!(take_welcome(&body), Some((JobId::from_bytes([9; 16]), server)));
            assert!((0..body.len()).all(|cut| take_welcome(&body[..cut]).is_none()));
        }
        assert_eq!(take_welcome(&[0; WELCOME + 1]), None);
        let hostile = Failure::Refused("a\n\u{1b}[2Jb".into()).encode();
        let read = Failure::decode(5, &hostile[HEADER..]).unwrap();
        assert_eq!(read, Failure::Refused("a\u{fffd}\u{fffd}[2Jb".into()));
    }
}
