//! The elements that datatypes are made of.

use crate::window::Element;

/// What an element is, for signatures: the sequence of the kinds of two layouts must agree, not their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum ElementKind {
    /// `u8`, also bytes without a meaning.
    U8 = 1,
    /// `i8`.
    I8 = 2,
    /// `u16`.
    U16 = 3,
    /// `i16`.
    I16 = 4,
    /// `u32`.
    U32 = 5,
    /// `i32`.
    I32 = 6,
    /// `u64`, and `usize`.
    U64 = 7,
    /// `i64`, and `isize`.
    I64 = 8,
    /// `u128`.
    U128 = 9,
    /// `i128`.
    I128 = 10,
    /// `f32`.
    F32 = 11,
    /// `f64`.
    F64 = 12,
}

impl ElementKind {
    /// All kinds.
    pub const ALL: [ElementKind; 12] = {
        use ElementKind::*;
        [U8, I8, U16, I16, U32, I32, U64, I64, U128, I128, F32, F64]
    };

    /// Length in bytes.
    #[must_use]
    pub const fn size(self) -> u64 {
        use ElementKind::*;
        match self {
            U8 | I8 => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 => 8,
            U128 | I128 => 16,
        }
    }

    /// Its number in programs; 0 is none.
    pub(super) fn from_number(number: u64) -> Option<ElementKind> {
        Self::ALL.into_iter().find(|kind| *kind as u64 == number)
    }
}

/// Types that are one element of a datatype.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, ElementKind, Elementary};
///
/// fn row_of<T: Elementary>(row: &[T]) -> Datatype {
///     Datatype::of::<T>().contiguous(row.len() as u64).expect("it is not too large")
/// }
///
/// assert_eq!(row_of(&[1.5, 2.5]).size(), 16);
/// assert_eq!(<u16 as Elementary>::KIND, ElementKind::U16);
/// ```
pub trait Elementary: Element {
    /// What the type is in signatures.
    const KIND: ElementKind;
}

macro_rules! elementary {
    ($($type:ty => $kind:ident),* $(,)?) => {
        $(impl Elementary for $type {
            const KIND: ElementKind = ElementKind::$kind;
        })*
    };
}

elementary! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    u128 => U128, i128 => I128, f32 => F32, f64 => F64,
}

#[cfg(target_pointer_width = "64")]
elementary! { usize => U64, isize => I64 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_size_of_their_types_and_a_number_of_their_own() {
        fn size_agrees<T: Elementary>() -> bool {
            size_of::<T>() as u64 == T::KIND.size()
        }
        assert!(
            size_agrees::<u8>() && size_agrees::<i16>() && size_agrees::<f32>() && size_agrees::<usize>()
        );
        assert!(size_agrees::<f64>() && size_agrees::<i128>() && size_agrees::<u64>());
        for kind in ElementKind::ALL {
            assert_eq!(ElementKind::from_number(kind as u64), Some(kind));
        }
        assert_eq!(ElementKind::from_number(0), None);
        assert_eq!(ElementKind::from_number(13), None);
    }
}
