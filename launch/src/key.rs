//! The identity and the secret of a job.

use std::fmt;
use std::io;

use zeroize::{Zeroize, Zeroizing};

/// The random 128-bit identity of a job; not secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobId([u8; 16]);

impl JobId {
    /// Takes an identity from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Draws a new identity.
    ///
    /// # Errors
    /// The kernel's random source failed.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        fill_random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The identity's bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        decode_hex(text, &mut bytes).then_some(Self(bytes))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({self})")
    }
}

/// The job's 32-byte secret: wiped when dropped, never printed.
#[derive(Clone)]
pub struct JobKey(Box<[u8; 32]>);

impl JobKey {
    /// Takes a key from its bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        let bytes = Zeroizing::new(bytes);
        Self(Box::new(*bytes))
    }

    /// Draws a new key.
    ///
    /// # Errors
    /// The kernel's random source failed.
    pub fn random() -> io::Result<Self> {
        let mut key = Self(Box::new([0; 32]));
        fill_random(key.0.as_mut())?;
        Ok(key)
    }

    /// The key's bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let mut key = Self(Box::new([0; 32]));
        decode_hex(text, key.0.as_mut()).then_some(key)
    }

    pub(crate) fn to_hex(&self) -> Zeroizing<String> {
        // Reserved in full, so that no partial copy is left behind by growth.
        let mut text = Zeroizing::new(String::with_capacity(64));
        for byte in self.0.iter() {
            for digit in [byte >> 4, byte & 15] {
                text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
            }
        }
        text
    }
}

impl Drop for JobKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(hidden)")
    }
}

/// Fills `bytes` from the kernel's random source.
pub(crate) fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    Ok(getrandom::fill(bytes)?)
}

/// Decodes exactly `out.len()` bytes; false if the text has another length or another character.
fn decode_hex(text: &str, out: &mut [u8]) -> bool {
    let text = text.as_bytes();
    if text.len() != out.len() * 2 {
        return false;
    }
    for (pair, byte) in text.chunks_exact(2).zip(out) {
        let digit = |character: u8| char::from(character).to_digit(16);
        let (Some(high), Some(low)) = (digit(pair[0]), digit(pair[1])) else { return false };
        *byte = (high << 4 | low) as u8;
    }
    true
}
