//! Type signatures: which elements a layout has, in order, whatever its shape (G07).

use super::element::ElementKind;

/// Length in bytes of a signature in message info.
const SIGNATURE_BYTES: usize = 40;
/// Its beginning; the last byte is the kind.
const MAGIC: &[u8; 8] = b"posthas\0";

/// 2^61 - 1, prime.
const MODULUS: u64 = (1 << 61) - 1;
/// Two numbers without a pattern below the modulus.
const BASES: [u64; 2] = [0x0b1d_7ac3_51e9_6f27, 0x1643_9e0f_d82a_c5b1];

/// The sequence of element kinds of a layout, as its length and a hash.
///
/// The hash is a polynomial in two bases modulo 2^61 - 1 over the expanded sequence, so that it can be put together from
/// those of the parts: equal sequences have equal signatures, however they were described. Different ones agree with a
/// chance of 2^-100 or so. It protects from mistakes: a peer may lie about it, and gains nothing but elements of other
/// kinds, for sizes and bounds are checked apart from it.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::Datatype;
///
/// // A column and a row of ten numbers have other shapes and the same elements.
/// let number = Datatype::of::<f64>();
/// let (column, row) = (number.vector(10, 1, 10)?, number.contiguous(10)?);
/// assert_eq!(column.signature(), row.signature());
/// assert_ne!(column.signature(), Datatype::of::<u64>().contiguous(10)?.signature());
/// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signature {
    /// Number of elements.
    pub elements: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The kind of all of them, if there is only one.
    pub kind: Option<ElementKind>,
    pub(super) hash: [u64; 2],
}

impl Signature {
    /// Of nothing.
    pub const EMPTY: Signature = Signature { elements: 0, bytes: 0, kind: None, hash: [0; 2] };

    /// Of one element.
    #[must_use]
    pub fn of(kind: ElementKind) -> Signature {
        Signature { elements: 1, bytes: kind.size(), kind: Some(kind), hash: [kind as u64; 2] }
    }

    /// As bytes, little-endian, for message info.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; SIGNATURE_BYTES] {
        let mut bytes = [0; SIGNATURE_BYTES];
        let words = [self.elements, self.bytes, self.hash[0], self.hash[1]];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[7] = self.kind.map_or(0, |kind| kind as u8);
        for (into, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `None` if it is something else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Signature> {
        let bytes: &[u8; SIGNATURE_BYTES] = bytes.try_into().ok()?;
        let (head, words) = bytes.split_at(8);
        let kind = match u64::from(head[7]) {
            0 => None,
            number => Some(ElementKind::from_number(number)?),
        };
        let word = |at: usize| u64::from_le_bytes(words[at * 8..at * 8 + 8].try_into().unwrap_or_default());
        let hash = [word(2), word(3)];
        let known = head[..7] == MAGIC[..7] && hash.into_iter().all(is_residue);
        known.then(|| Signature { elements: word(0), bytes: word(1), kind, hash })
    }

    /// Of this sequence and then another; `None` if their lengths do not fit 64 bits.
    #[must_use]
    pub fn then(&self, next: &Signature) -> Option<Signature> {
        if self.elements == 0 || next.elements == 0 {
            return Some(if self.elements == 0 { *next } else { *self });
        }
        let mut hash = [0; 2];
        for (lane, base) in BASES.into_iter().enumerate() {
            let shifted = multiply(self.hash[lane], power(base, next.elements));
            hash[lane] = add(shifted, next.hash[lane]);
        }
        Some(Signature {
            elements: self.elements.checked_add(next.elements)?,
            bytes: self.bytes.checked_add(next.bytes)?,
            kind: if self.kind == next.kind { self.kind } else { None },
            hash,
        })
    }

    /// Of this sequence `count` times; `None` if its length does not fit 64 bits.
    #[must_use]
    pub fn repeat(&self, count: u64) -> Option<Signature> {
        if count == 1 {
            return Some(*self);
        }
        if count == 0 || self.elements == 0 {
            return Some(Signature::EMPTY);
        }
        let elements = self.elements.checked_mul(count)?;
        let bytes = self.bytes.checked_mul(count)?;
        let mut hash = [0; 2];
        for (lane, base) in BASES.into_iter().enumerate() {
            hash[lane] = multiply(self.hash[lane], geometric(power(base, self.elements), count));
        }
        Some(Signature { elements, bytes, kind: self.kind, hash })
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Signature { elements, bytes, .. } = self;
        match self.kind {
            Some(kind) => write!(f, "{elements} elements of {kind:?} ({bytes} bytes)"),
            None if *elements == 0 => f.write_str("no elements"),
            None => write!(f, "{elements} elements of several kinds ({bytes} bytes, {:016x})", self.hash[0]),
        }
    }
}

/// Whether a number can be a part of a hash.
pub(super) fn is_residue(number: u64) -> bool {
    number < MODULUS
}

fn add(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= MODULUS { sum - MODULUS } else { sum }
}

fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    add(product as u64 & MODULUS, (product >> 61) as u64)
}

fn power(mut base: u64, mut exponent: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    result
}

/// 1 + q + … + q^(count - 1), by doubling.
fn geometric(q: u64, count: u64) -> u64 {
    let (mut sum, mut factor) = (0, 1);
    for bit in (0..u64::BITS - count.leading_zeros()).rev() {
        sum = add(sum, multiply(sum, factor));
        factor = multiply(factor, factor);
        if count >> bit & 1 == 1 {
            sum = add(multiply(sum, q), 1);
            factor = multiply(factor, q);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(kinds: &[ElementKind]) -> Signature {
        kinds.iter().fold(Signature::EMPTY, |all, kind| all.then(&Signature::of(*kind)).expect("short"))
    }

    #[test]
    fn equal_sequences_have_equal_signatures_however_they_are_put_together() {
        use ElementKind::*;
        let pair = expanded(&[F64, I32]);
        for count in 0..40 {
            let mut long = Vec::new();
            (0..count).for_each(|_| long.extend([F64, I32]));
            let by_repetition = pair.repeat(count).expect("short");
            assert_eq!(by_repetition, expanded(&long));
            let (front, back) = long.split_at(long.len() / 3);
            assert_eq!(expanded(front).then(&expanded(back)), Some(by_repetition));
        }
        let million = pair.repeat(1_000_000).expect("fits");
        assert_eq!(million, pair.repeat(1000).and_then(|part| part.repeat(1000)).expect("fits"));
        assert_eq!((million.elements, million.bytes, million.kind), (2_000_000, 12_000_000, None));
        assert_eq!(Signature::of(U8).repeat(9).expect("short").kind, Some(U8));
        for signature in [million, pair, Signature::of(F32), Signature::EMPTY] {
            let bytes = signature.to_bytes();
            assert_eq!(Signature::from_bytes(&bytes), Some(signature));
            assert_eq!(Signature::from_bytes(&bytes[1..]), None);
            for at in 0..8 {
                let mut changed = bytes;
                changed[at] ^= 0x40;
                assert_eq!(Signature::from_bytes(&changed), None);
            }
        }
    }

    #[test]
    fn other_sequences_have_other_signatures() {
        use ElementKind::*;
        let sequences: [&[ElementKind]; 9] =
            [&[], &[F64], &[U64], &[F64, I32], &[I32, F64], &[F64, F64], &[F64, U32], &[U8; 12], &[U16; 6]];
        for (index, one) in sequences.iter().enumerate() {
            for other in &sequences[..index] {
                assert_ne!(expanded(one), expanded(other));
                assert_ne!(expanded(one).repeat(7), expanded(other).repeat(7));
            }
        }
    }

    #[test]
    fn lengths_beyond_64_bits_are_refused() {
        let long = Signature::of(ElementKind::U8).repeat(u64::MAX).expect("fits just so");
        assert_eq!(long.repeat(2), None);
        assert_eq!(long.then(&Signature::of(ElementKind::U8)), None);
        assert_eq!(Signature::of(ElementKind::U16).repeat(u64::MAX), None);
    }
}
