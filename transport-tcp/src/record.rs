//! Encrypted records: what the bytes of a connection are wrapped in when it is encrypted.
//!
//! ```text
//!   +--------------+--------------------------+-----------+
//!   | length, u16  | ciphertext, that length  | tag, 16   |    the length is authenticated, too
//!   +--------------+--------------------------+-----------+
//! ```
//! Records are numbered from 0 in each direction, and the number is the nonce: a record that is lost, repeated or out
//! of place is not genuine. After [`RECORDS_PER_KEY`] records the key is replaced by one made of it, so that no key
//! encrypts more than it may.

use crate::frame::Malformed;
use ring::aead::{AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use std::ops::Range;
use zeroize::Zeroizing;

/// Longest plaintext of a record in bytes.
pub(crate) const MAX_PLAIN: usize = u16::MAX as usize;
/// What a record adds to its plaintext, in bytes.
pub(crate) const OVERHEAD: usize = 2 + TAG;
/// Length of the authentication tag in bytes.
pub(crate) const TAG: usize = 16;
/// Records after which the key is replaced: at most 2^36 bytes.
const RECORDS_PER_KEY: u64 = 1 << 20;

/// The cipher of a connection's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Suite {
    /// ChaCha20-Poly1305, which is fast everywhere.
    ChaCha = 1,
    /// AES-256-GCM, for two hosts that have instructions for it.
    Aes = 2,
}

impl Suite {
    /// What this host is good at, as a set of bits.
    pub fn offered() -> u8 {
        if has_aes() { Suite::ChaCha as u8 | Suite::Aes as u8 } else { Suite::ChaCha as u8 }
    }

    /// The best of what both offer.
    pub fn choose(theirs: u8) -> Suite {
        if theirs & Suite::offered() & Suite::Aes as u8 != 0 { Suite::Aes } else { Suite::ChaCha }
    }

    pub fn from_byte(byte: u8) -> Option<Suite> {
        match byte {
            1 => Some(Suite::ChaCha),
            2 if has_aes() => Some(Suite::Aes),
            _ => None,
        }
    }

    fn algorithm(self) -> &'static Algorithm {
        match self {
            Suite::ChaCha => &CHACHA20_POLY1305,
            Suite::Aes => &AES_256_GCM,
        }
    }
}

fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq")
    }
    #[cfg(target_arch = "aarch64")]
    {
        std::arch::is_aarch64_feature_detected!("aes")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        false
    }
}

/// One direction of a connection.
pub(crate) struct RecordKey {
    suite: Suite,
    key: LessSafeKey,
    number: u64,
}

impl RecordKey {
    pub fn new(suite: Suite, key: &[u8; 32]) -> Option<RecordKey> {
        let unbound = UnboundKey::new(suite.algorithm(), key).ok()?;
        Some(RecordKey { suite, key: LessSafeKey::new(unbound), number: 0 })
    }

    fn nonce(number: u64) -> Nonce {
        let mut bytes = [0; 12];
        bytes[4..].copy_from_slice(&number.to_be_bytes());
        Nonce::assume_unique_for_key(bytes)
    }

    /// The nonce of the next record; the key is a fresh one when its predecessor has done its share.
    fn next(&mut self) -> Option<Nonce> {
        if self.number == RECORDS_PER_KEY {
            let mut next = Zeroizing::new([0u8; 32]);
            // As Noise does it (section 4.2 of its specification): the key encrypts zeros under the last nonce.
            let last = Self::nonce(u64::MAX);
            let _tag = self.key.seal_in_place_separate_tag(last, Aad::empty(), next.as_mut_slice()).ok()?;
            *self = RecordKey::new(self.suite, &next)?;
        }
        let nonce = Self::nonce(self.number);
        self.number += 1;
        Some(nonce)
    }

    /// Makes a record of `buffer[at + 2..]`, whose two bytes before it are free: at most [`MAX_PLAIN`] bytes.
    pub fn seal(&mut self, buffer: &mut Vec<u8>, at: usize) -> Option<()> {
        let len = (u16::try_from(buffer.len() - at - 2).ok()?).to_le_bytes();
        buffer[at..at + 2].copy_from_slice(&len);
        let nonce = self.next()?;
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(len), &mut buffer[at + 2..]).ok()?;
        buffer.extend_from_slice(tag.as_ref());
        Some(())
    }

    /// Opens the record at the start of the bytes, in place. `Ok(None)`: it is not all there. Otherwise where its
    /// plaintext is, and the record's length.
    pub fn open(&mut self, bytes: &mut [u8]) -> Result<Option<(Range<usize>, usize)>, Malformed> {
        let Some((len, _)) = bytes.split_first_chunk::<2>() else { return Ok(None) };
        let len = *len;
        let plain = usize::from(u16::from_le_bytes(len));
        let total = plain + OVERHEAD;
        let Some(sealed) = bytes.get_mut(2..total) else { return Ok(None) };
        let nonce = self.next().ok_or(Malformed::Record)?;
        self.key.open_in_place(nonce, Aad::from(len), sealed).map_err(|_| Malformed::Record)?;
        Ok(Some((2..2 + plain, total)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(suite: Suite) -> (RecordKey, RecordKey) {
        let key = [7; 32];
        (RecordKey::new(suite, &key).expect("32 bytes"), RecordKey::new(suite, &key).expect("32 bytes"))
    }

    fn sealed(key: &mut RecordKey, plain: &[u8]) -> Vec<u8> {
        let mut record = vec![0; 2];
        record.extend_from_slice(plain);
        key.seal(&mut record, 0).expect("short enough");
        record
    }

    #[test]
    fn records_open_once_in_order_and_unchanged_only() {
        for suite in [Suite::ChaCha, Suite::choose(Suite::offered())] {
            let (mut tx, mut rx) = pair(suite);
            let records: Vec<_> =
                [&b""[..], b"one", &[3; MAX_PLAIN]].map(|plain| sealed(&mut tx, plain)).into();
            let mut second = records[1].clone();
            assert_eq!(rx.open(&mut second), Err(Malformed::Record), "out of order");
            let (_, mut rx) = pair(suite);
            for (record, plain) in records.iter().zip([&b""[..], b"one", &[3; MAX_PLAIN]]) {
                let mut bytes = record.clone();
                assert_eq!(rx.open(&mut bytes[..record.len() - 1]), Ok(None), "not all there");
                let (range, total) = rx.open(&mut bytes).expect("genuine").expect("whole");
                assert_eq!((&bytes[range], total), (plain, record.len()));
            }
            let mut again = records[2].clone();
            assert_eq!(rx.open(&mut again), Err(Malformed::Record), "repeated");
            for at in 0..records[0].len() {
                let (_, mut rx) = pair(suite);
                let mut bytes = records[0].clone();
                bytes[at] ^= 1;
                bytes.extend_from_slice(&[0; 300]);
                assert_eq!(rx.open(&mut bytes[..]).unwrap_or(None), None, "byte {at} was changed");
            }
        }
    }

    #[test]
    fn keys_are_replaced_on_both_sides_alike() {
        let (mut tx, mut rx) = pair(Suite::ChaCha);
        (tx.number, rx.number) = (RECORDS_PER_KEY - 1, RECORDS_PER_KEY - 1);
        for number in 0..3u8 {
            let mut record = sealed(&mut tx, &[number]);
            let (range, _) = rx.open(&mut record).expect("genuine").expect("whole");
            assert_eq!(record[range], [number]);
        }
        assert_eq!(tx.number, 2, "counted anew");
    }
}
