//! Proof of the key, and the encryption of what follows: Noise `NNpsk0` (25519, ChaCha20-Poly1305, BLAKE2s).
//!
//! The prologue is the clear part of a rank's first message: role, version, size, rank and process. Whoever changes any
//! of it breaks the proof. The roles differ in Noise itself, so that a message sent back proves nothing.

use snow::{Builder, HandshakeState, TransportState};

use crate::key::JobKey;
use crate::rendezvous::wire::{
    ANSWER, CLEAR, FINISH, HELLO, Hello, Kind, MAX_RECORD, PROOF, Status, TAG, message,
};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

fn state(key: &JobKey, prologue: &[u8; CLEAR], initiator: bool) -> Result<HandshakeState, snow::Error> {
    let builder = Builder::new(PATTERN.parse()?).psk(0, key.as_bytes())?.prologue(prologue)?;
    if initiator { builder.build_initiator() } else { builder.build_responder() }
}

/// The rank's side, between its first message and the answer.
pub(crate) struct Initiator(HandshakeState);

/// Begins a handshake; also gives the first message. None if the system has no random numbers.
pub(crate) fn hello(key: &JobKey, hello: Hello) -> Option<(Initiator, [u8; HELLO])> {
    let clear = hello.encode();
    let mut noise = state(key, &clear, true).ok()?;
    let mut bytes = [0; HELLO];
    bytes[..CLEAR].copy_from_slice(&clear);
    let written = noise.write_message(&[], &mut bytes[CLEAR..]);
    (written == Ok(PROOF)).then_some((Initiator(noise), bytes))
}

impl Initiator {
    /// Reads the proof in an answer; none if the server does not have the key.
    pub(crate) fn answered(mut self, answer: &[u8; ANSWER]) -> Option<Channel> {
        let proven = self.0.read_message(&answer[1..], &mut []) == Ok(0);
        if proven { Some(Channel(self.0.into_transport_mode().ok()?)) } else { None }
    }
}

/// Checks a first message whose clear part has been read, and answers it.
///
/// Nothing is kept if the proof is wrong.
pub(crate) fn answer(key: &JobKey, hello: &[u8; HELLO]) -> Result<(Channel, [u8; ANSWER]), Status> {
    let mut clear = [0; CLEAR];
    clear.copy_from_slice(&hello[..CLEAR]);
    let mut noise = state(key, &clear, false).map_err(|_| Status::Key)?;
    if noise.read_message(&hello[CLEAR..], &mut []) != Ok(0) {
        return Err(Status::Key);
    }
    let mut bytes = [0; ANSWER];
    bytes[0] = Status::Proceed as u8;
    if noise.write_message(&[], &mut bytes[1..]) != Ok(PROOF) {
        return Err(Status::Key);
    }
    let channel = Channel(noise.into_transport_mode().map_err(|_| Status::Key)?);
    Ok((channel, bytes))
}

/// Both directions of a connection whose handshake is done.
pub(crate) struct Channel(TransportState);

impl Channel {
    /// Adds records with `content` to `out`. False if the cipher's numbers have run out, which a life is too short for.
    #[must_use]
    pub(crate) fn seal(&mut self, content: &[u8], out: &mut Vec<u8>) -> bool {
        content.chunks(MAX_RECORD).all(|piece| {
            let length = piece.len() + TAG;
            out.extend_from_slice(&(length as u16).to_le_bytes());
            let start = out.len();
            out.resize(start + length, 0);
            self.0.write_message(piece, &mut out[start..]) == Ok(length)
        })
    }

    /// Adds to `out` what the record behind a length holds; false if it is not genuine.
    #[must_use]
    pub(crate) fn open(&mut self, record: &[u8], out: &mut Vec<u8>) -> bool {
        let Some(length) = record.len().checked_sub(TAG) else { return false };
        let start = out.len();
        out.resize(start + length, 0);
        let genuine = self.0.read_message(record, &mut out[start..]) == Ok(length);
        if !genuine {
            out.truncate(start);
        }
        genuine
    }

    /// The record with which a rank shows that it is there now.
    pub(crate) fn finish(&mut self) -> Option<Vec<u8>> {
        let mut record = Vec::with_capacity(FINISH);
        self.seal(&message(Kind::Join, 0, 0, &[]), &mut record).then_some(record)
    }

    /// Whether that is what came.
    pub(crate) fn finished(&mut self, record: &[u8; FINISH]) -> bool {
        let mut content = Vec::new();
        let length = u16::from_le_bytes([record[0], record[1]]);
        usize::from(length) == FINISH - 2
            && self.open(&record[2..], &mut content)
            && content == message(Kind::Join, 0, 0, &[])
    }
}

/// The length of a record's cipher text, if it is one that a record may have.
pub(crate) fn record_length(bytes: [u8; 2]) -> Option<usize> {
    let length = usize::from(u16::from_le_bytes(bytes));
    (TAG + 1..=MAX_RECORD + TAG).contains(&length).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> JobKey {
        JobKey::from_bytes([byte; 32])
    }

    const WHO: Hello = Hello { rank: 1, size: 2, pid: 3, moves: None };

    #[test]
    fn both_sides_prove_the_key_and_then_talk() {
        let (initiator, first) = hello(&key(1), WHO).unwrap();
        let (mut server, answer) = answer(&key(1), &first).unwrap();
        let mut rank = initiator.answered(&answer).unwrap();
        let finish: [u8; FINISH] = rank.finish().unwrap().try_into().unwrap();
        assert!(server.finished(&finish));
        assert!(!server.finished(&finish), "a record counts once");
        let content = vec![7; 3 * MAX_RECORD + 5];
        let mut wire = Vec::new();
        assert!(rank.seal(&content, &mut wire));
        let (mut read, mut rest) = (Vec::new(), &wire[..]);
        while let Some((length, behind)) = rest.split_first_chunk() {
            let (record, behind) = behind.split_at(record_length(*length).unwrap());
            assert!(server.open(record, &mut read));
            rest = behind;
        }
        assert_eq!(read, content);
    }

    #[test]
    fn another_key_a_changed_byte_and_a_reflection_prove_nothing() {
        let (_, first) = hello(&key(1), WHO).unwrap();
        assert_eq!(answer(&key(2), &first).err(), Some(Status::Key));
        for at in 0..HELLO {
            let mut broken = first;
            broken[at] ^= 1;
            assert!(answer(&key(1), &broken).is_err(), "byte {at}");
        }
        for at in 1..ANSWER {
            let (initiator, first) = hello(&key(1), WHO).unwrap();
            let (_, mut answer) = answer(&key(1), &first).unwrap();
            answer[at] ^= 1;
            assert!(initiator.answered(&answer).is_none(), "byte {at}");
        }
        let (initiator, first) = hello(&key(1), WHO).unwrap();
        let mut reflected = [Status::Proceed as u8; ANSWER];
        reflected[1..].copy_from_slice(&first[CLEAR..]);
        assert!(initiator.answered(&reflected).is_none());
    }

    #[test]
    fn a_replayed_rank_gets_no_further_than_its_first_message() {
        let (initiator, first) = hello(&key(1), WHO).unwrap();
        let (_, genuine) = answer(&key(1), &first).unwrap();
        let finish: [u8; FINISH] =
            initiator.answered(&genuine).unwrap().finish().unwrap().try_into().unwrap();
        let (mut again, _) = answer(&key(1), &first).unwrap();
        assert!(!again.finished(&finish));
    }
}
