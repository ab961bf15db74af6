//! What a send takes: an owned buffer, short ones in place.

use bytes::{Bytes, BytesMut};
use posthaste_core::engine::Whole;
use posthaste_core::{Loan, Payload};
use zerocopy::FromBytes;

/// Longest payload in bytes that is kept in place.
pub const INLINE: usize = 31;

/// An owned payload. `Bytes`, vectors and strings convert into it without a copy; arrays and borrowed bytes are copied, and up to
/// 31 of them kept in place.
///
/// # Examples
/// ```
/// use posthaste_protocols::Buffer;
///
/// // Whatever owns bytes becomes a payload without a copy.
/// let long: Buffer = vec![7; 1000].into();
/// let text: Buffer = String::from("text").into();
/// // Up to 31 borrowed bytes are kept in place, so that they cost no allocation.
/// let short: Buffer = (&[1, 2, 3]).into();
/// assert_eq!((long.len(), text.len(), short.len()), (1000, 4, 3));
/// assert_eq!(text.into_bytes(), "text");
/// ```
#[derive(Debug)]
pub struct Buffer(pub(crate) Kind);

#[derive(Debug)]
pub(crate) enum Kind {
    Inline(Short),
    Bytes(Bytes),
    Loan(Loan),
}

/// Bytes that are kept in place: as words, so that those which are one word are written and read as one.
#[derive(Clone, Copy, Debug, FromBytes)]
#[repr(C, align(8))]
pub(crate) struct Short {
    bytes: [u8; INLINE],
    len: u8,
}

impl Short {
    /// Copies up to [`INLINE`] bytes.
    #[inline(always)]
    fn copy(source: &[u8]) -> Self {
        if let Ok(&word) = <&[u8; 8]>::try_from(source) {
            return Self::of_word(u64::from_ne_bytes(word));
        }
        let mut short = Short { bytes: [0; INLINE], len: source.len() as u8 };
        short.bytes[..source.len()].copy_from_slice(source);
        short
    }

    /// The same of one word. The length is stored with the zeros before it: whoever moves this loads them together, and would
    /// wait for two stores.
    #[inline(always)]
    fn of_word(word: u64) -> Self {
        const LAST: u64 = u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 8]);
        zerocopy::transmute!([word, 0, 0, LAST])
    }

    #[inline(always)]
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len).min(INLINE)]
    }

    #[inline(always)]
    fn word(&self) -> Option<u64> {
        let word = self.bytes.first_chunk().copied().map(u64::from_ne_bytes);
        word.filter(|_| self.len == 8)
    }
}

impl Buffer {
    /// Copies the bytes.
    #[inline]
    #[must_use]
    pub fn copy(source: &[u8]) -> Self {
        if source.len() <= INLINE {
            Self(Kind::Inline(Short::copy(source)))
        } else {
            Self(Kind::Bytes(Bytes::copy_from_slice(source)))
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Inline(short) => usize::from(short.len),
            Kind::Bytes(bytes) => bytes.len(),
            Kind::Loan(loan) => loan.len(),
        }
    }

    /// The payload, if it is one word that is kept in place.
    #[inline(always)]
    pub(crate) fn inline_word(&self) -> Option<u64> {
        match &self.0 {
            Kind::Inline(short) => short.word(),
            _ => None,
        }
    }

    /// The payload, if it is one word.
    #[inline(always)]
    pub(crate) fn word(&self) -> Option<u64> {
        match &self.0 {
            Kind::Inline(short) => short.word(),
            Kind::Bytes(bytes) => <[u8; 8]>::try_from(&bytes[..]).ok().map(u64::from_ne_bytes),
            _ => None,
        }
    }

    /// The payload as one packet.
    #[inline]
    pub(crate) fn whole(&self) -> Whole<'_> {
        match &self.0 {
            Kind::Inline(short) => Whole::Bytes(short.as_slice()),
            Kind::Bytes(bytes) => Whole::Owned(bytes),
            Kind::Loan(loan) => Whole::Loan(loan),
        }
    }

    /// The payload was sent: a loan belongs to its device again.
    #[inline]
    pub(crate) fn sent(&mut self) {
        if let Kind::Loan(loan) = &mut self.0 {
            loan.sent();
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is page memory of a device.
    pub(crate) fn is_loan(&self) -> bool {
        matches!(self.0, Kind::Loan(_))
    }

    /// The bytes as a `Bytes`; those of a loan are copied.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self.0 {
            Kind::Inline(short) => Bytes::copy_from_slice(short.as_slice()),
            Kind::Bytes(bytes) => bytes,
            Kind::Loan(loan) => Bytes::from(loan.memory().to_vec()),
        }
    }

    /// Hands the payload to `f`; what comes back as not sent becomes a buffer again.
    #[inline]
    pub(crate) fn lend<R>(self, f: impl FnOnce(Payload<'_>) -> (R, Option<Unsent>)) -> (R, Option<Buffer>) {
        match self.0 {
            Kind::Inline(short) => {
                let (result, unsent) = f(Payload::Borrowed(short.as_slice()));
                (result, unsent.map(|_| Buffer(Kind::Inline(short))))
            }
            Kind::Bytes(bytes) => {
                let (result, unsent) = f(Payload::Owned(bytes));
                (result, unsent.and_then(Unsent::into_buffer))
            }
            Kind::Loan(loan) => {
                let (result, unsent) = f(Payload::Loan(loan));
                (result, unsent.and_then(Unsent::into_buffer))
            }
        }
    }
}

/// A payload that was not sent, without its lifetime.
pub(crate) enum Unsent {
    Borrowed,
    Bytes(Bytes),
    Loan(Loan),
}

impl Unsent {
    pub fn new(payload: Payload<'_>) -> Self {
        match payload {
            Payload::Borrowed(_) => Unsent::Borrowed,
            Payload::Owned(bytes) => Unsent::Bytes(bytes),
            Payload::Loan(loan) => Unsent::Loan(loan),
        }
    }

    fn into_buffer(self) -> Option<Buffer> {
        match self {
            Unsent::Borrowed => None,
            Unsent::Bytes(bytes) => Some(Buffer(Kind::Bytes(bytes))),
            Unsent::Loan(loan) => Some(Buffer(Kind::Loan(loan))),
        }
    }
}

impl From<Payload<'static>> for Buffer {
    fn from(payload: Payload<'static>) -> Self {
        match payload {
            Payload::Borrowed(bytes) => Self::copy(bytes),
            Payload::Owned(bytes) => Self(Kind::Bytes(bytes)),
            Payload::Loan(loan) => Self(Kind::Loan(loan)),
        }
    }
}

impl From<Bytes> for Buffer {
    fn from(bytes: Bytes) -> Self {
        Self(Kind::Bytes(bytes))
    }
}

impl From<BytesMut> for Buffer {
    fn from(bytes: BytesMut) -> Self {
        Self(Kind::Bytes(bytes.freeze()))
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Kind::Bytes(Bytes::from(bytes)))
    }
}

impl From<String> for Buffer {
    fn from(text: String) -> Self {
        Self(Kind::Bytes(Bytes::from(text)))
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        Self::copy(bytes)
    }
}

impl<const N: usize> From<&[u8; N]> for Buffer {
    #[inline]
    fn from(bytes: &[u8; N]) -> Self {
        Self::copy(bytes)
    }
}

impl<const N: usize> From<[u8; N]> for Buffer {
    #[inline]
    fn from(bytes: [u8; N]) -> Self {
        Self::copy(&bytes)
    }
}

impl From<&str> for Buffer {
    fn from(text: &str) -> Self {
        Self::copy(text.as_bytes())
    }
}

impl From<Loan> for Buffer {
    fn from(loan: Loan) -> Self {
        Self(Kind::Loan(loan))
    }
}
