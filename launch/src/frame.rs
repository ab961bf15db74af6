//! The frames between broker and rank: one size, no lengths, and the proofs in them.
//!
//! ```text
//! broker                                   rank
//!   │ ── Challenge(nonce) ─────────────────▶ │
//!   │ ◀─ Answer(job, rank, own nonce, proof) │
//!   │ ── Welcome(proof) | Refusal(why) ────▶ │
//!   │ ── Parcel(first, count) + SCM_RIGHTS ▶ │  until all size + 2 descriptors are there
//! ```

use crate::key::{JobId, JobKey};

/// Bytes of every frame.
pub(crate) const FRAME_BYTES: usize = 96;
/// Descriptors in one parcel; the kernel takes 253 at most.
pub(crate) const PARCEL: usize = 250;

const MAGIC: [u8; 8] = *b"PHbroke1";
const JOIN: &[u8] = b"posthaste join";
const WELCOME: &[u8] = b"posthaste welcome";

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Challenge = 1,
    Answer = 2,
    Welcome = 3,
    Parcel = 4,
    Refusal = 5,
}

/// Why the broker gives nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Why {
    Busy = 1,
    Proof = 2,
    Taken = 3,
}

/// One frame; what a kind does not use is zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    /// Descriptors in this parcel, or why nothing is given.
    pub(crate) code: u8,
    /// The rank, or the index of a parcel's first descriptor.
    pub(crate) number: u32,
    pub(crate) job: [u8; 16],
    pub(crate) nonce: [u8; 32],
    pub(crate) proof: [u8; 32],
}

impl Frame {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, code: 0, number: 0, job: [0; 16], nonce: [0; 32], proof: [0; 32] }
    }

    pub(crate) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self.kind as u8;
        bytes[9] = self.code;
        bytes[12..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.job);
        bytes[32..64].copy_from_slice(&self.nonce);
        bytes[64..].copy_from_slice(&self.proof);
        bytes
    }

    /// None for anything but exactly one frame.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; FRAME_BYTES] = bytes.try_into().ok()?;
        if bytes[..8] != MAGIC || bytes[10..12] != [0, 0] {
            return None;
        }
        let kind = match bytes[8] {
            1 => Kind::Challenge,
            2 => Kind::Answer,
            3 => Kind::Welcome,
            4 => Kind::Parcel,
            5 => Kind::Refusal,
            _ => return None,
        };
        Some(Self {
            kind,
            code: bytes[9],
            number: u32::from_le_bytes(bytes[12..16].try_into().ok()?),
            job: bytes[16..32].try_into().ok()?,
            nonce: bytes[32..64].try_into().ok()?,
            proof: bytes[64..].try_into().ok()?,
        })
    }
}

/// A rank's proof that it knows the key: for this challenge, this job and this rank only.
///
/// The hash compares in constant time.
pub(crate) fn join_proof(key: &JobKey, nonce: &[u8; 32], job: JobId, rank: u32) -> blake3::Hash {
    keyed(key, &[nonce, job.as_bytes(), &rank.to_le_bytes(), JOIN])
}

/// The broker's proof that it knows the key too, so that nobody who took over its name can pass descriptors off.
pub(crate) fn welcome_proof(
    key: &JobKey,
    rank_nonce: &[u8; 32],
    nonce: &[u8; 32],
    job: JobId,
    rank: u32,
) -> blake3::Hash {
    keyed(key, &[rank_nonce, nonce, job.as_bytes(), &rank.to_le_bytes(), WELCOME])
}

fn keyed(key: &JobKey, parts: &[&[u8]]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key.as_bytes());
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_way_and_nothing_else_is_a_frame() {
        let frame = Frame {
            kind: Kind::Answer,
            code: 7,
            number: 0x0102_0304,
            job: [1; 16],
            nonce: [2; 32],
            proof: [3; 32],
        };
        let bytes = frame.encode();
        assert_eq!(Frame::decode(&bytes), Some(frame));
        for length in 0..FRAME_BYTES {
            assert_eq!(Frame::decode(&bytes[..length]), None);
        }
        for at in 0..12 {
            let mut broken = bytes;
            broken[at] ^= 0x80;
            assert!(at == 9 || Frame::decode(&broken).is_none(), "byte {at}");
        }
    }

    #[test]
    fn a_proof_fits_one_challenge_job_rank_key_and_direction() {
        let key = JobKey::from_bytes([1; 32]);
        let job = JobId::from_bytes([2; 16]);
        let proof = join_proof(&key, &[3; 32], job, 4);
        assert_eq!(proof, join_proof(&key, &[3; 32], job, 4));
        assert_ne!(proof, join_proof(&key, &[0; 32], job, 4));
        assert_ne!(proof, join_proof(&key, &[3; 32], JobId::from_bytes([0; 16]), 4));
        assert_ne!(proof, join_proof(&key, &[3; 32], job, 0));
        assert_ne!(proof, join_proof(&JobKey::from_bytes([0; 32]), &[3; 32], job, 4));
        assert_ne!(proof, welcome_proof(&key, &[3; 32], &[3; 32], job, 4));
    }
}
