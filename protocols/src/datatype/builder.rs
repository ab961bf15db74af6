//! How datatypes are described.

use super::body::{Body, MAX_SPAN};
use super::element::Elementary;
use super::error::DatatypeError;
use super::signature::Signature;
use super::{Bounds, Datatype};
use std::sync::Arc;

/// Datatypes at byte offsets, one behind the other, while they are put together.
struct Parts {
    bodies: Vec<(i64, Arc<Body>)>,
    bounds: Option<(i64, i64)>,
    signature: Signature,
}

impl Parts {
    fn new() -> Self {
        Self { bodies: Vec::new(), bounds: None, signature: Signature::EMPTY }
    }

    /// Adds consecutive elements of a datatype at an offset in bytes.
    fn add(&mut self, offset: i64, count: u64, datatype: &Datatype) -> Result<(), DatatypeError> {
        if count == 0 {
            return Ok(());
        }
        let repeated = datatype.hvector(count, 1, datatype.extent())?;
        let Bounds { lower, extent } = repeated.bounds();
        let low = within(i128::from(lower) + i128::from(offset))?;
        let high = within(i128::from(low) + i128::from(extent))?;
        let (lowest, highest) = self.bounds.unwrap_or((low, high));
        self.bounds = Some((lowest.min(low), highest.max(high)));
        self.signature = self.signature.then(&repeated.signature()).ok_or(DatatypeError::TooLarge)?;
        self.bodies.push((offset, repeated.body().clone()));
        Ok(())
    }

    fn build(self) -> Result<Datatype, DatatypeError> {
        let (low, high) = self.bounds.unwrap_or((0, 0));
        let bounds = Bounds { lower: low, extent: within(i128::from(high) - i128::from(low))? };
        Ok(Datatype::from_parts(Body::concat(self.bodies)?, bounds, self.signature))
    }
}

fn within(value: i128) -> Result<i64, DatatypeError> {
    if value.abs() > i128::from(MAX_SPAN) { Err(DatatypeError::TooLarge) } else { Ok(value as i64) }
}

fn product(a: i64, b: i64) -> Result<i64, DatatypeError> {
    within(i128::from(a) * i128::from(b))
}

impl Datatype {
    /// One element.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// assert_eq!(Datatype::of::<f64>().size(), 8);
    /// ```
    #[must_use]
    pub fn of<T: Elementary>() -> Datatype {
        let size = T::KIND.size();
        let body = Body::block(0, size).map(Arc::new).unwrap_or_default();
        Datatype::from_parts(body, Bounds { lower: 0, extent: size as i64 }, Signature::of(T::KIND))
    }

    /// `count` of them, one after the other.
    ///
    /// # Errors
    /// If it would be too large.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// let row = Datatype::of::<f32>().contiguous(10)?;
    /// assert_eq!((row.size(), row.extent(), row.is_contiguous()), (40, 40, true));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn contiguous(&self, count: u64) -> Result<Datatype, DatatypeError> {
        self.hvector(count, 1, self.extent())
    }

    /// `count` blocks of `block` elements, whose starts are `stride` extents apart.
    ///
    /// # Errors
    /// If it would be too large or too deep.
    ///
    /// # Examples
    /// A column of a matrix of 10 × 10 stored row by row:
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// let column = Datatype::of::<i32>().vector(10, 1, 10)?;
    /// assert_eq!((column.size(), column.extent()), (40, 364));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn vector(&self, count: u64, block: u64, stride: i64) -> Result<Datatype, DatatypeError> {
        self.hvector(count, block, product(stride, self.extent())?)
    }

    /// `count` blocks of `block` elements, whose starts are `stride` bytes apart.
    ///
    /// # Errors
    /// If it would be too large or too deep.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// // The first number of each record of 20 bytes, which is no multiple of its size.
    /// let field = Datatype::of::<u64>().hvector(3, 1, 20)?;
    /// assert_eq!((field.size(), field.extent()), (24, 48));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn hvector(&self, count: u64, block: u64, stride: i64) -> Result<Datatype, DatatypeError> {
        let total = count.checked_mul(block).ok_or(DatatypeError::TooLarge)?;
        let signature = self.signature().repeat(total).ok_or(DatatypeError::TooLarge)?;
        if total == 0 {
            return Ok(Datatype::from_parts(Arc::default(), Bounds::default(), signature));
        }
        let Bounds { lower, extent } = self.bounds();
        // Bounds of the elements of a block, then of the blocks.
        let mut low = i128::from(lower);
        let mut high = low + i128::from(extent);
        for (times, step) in [(block, extent), (count, stride)] {
            let last = i128::from(step).checked_mul(i128::from(times) - 1).ok_or(DatatypeError::TooLarge)?;
            (low, high) = (low + last.min(0), high + last.max(0));
        }
        let low = within(low)?;
        let bounds = Bounds { lower: low, extent: within(high - i128::from(low))? };
        let body = self.body().repeat(block, extent)?.repeat(count, stride)?;
        Ok(Datatype::from_parts(body, bounds, signature))
    }

    /// Blocks of elements: displacement in extents, and number of elements, each.
    ///
    /// # Errors
    /// If it would be too large or too deep.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::{Datatype, Layout, redistribute};
    /// // Elements 5 and 6, and then element 1: the order is that of the list.
    /// let picked = Datatype::of::<u8>().indexed(&[(5, 2), (1, 1)])?;
    /// let (source, mut out) = ([0, 10, 20, 30, 40, 50, 60], [0; 3]);
    /// redistribute(&mut out, &Layout::new(&Datatype::of::<u8>(), 3), &source, &Layout::new(&picked, 1))?;
    /// assert_eq!(out, [50, 60, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn indexed(&self, blocks: &[(i64, u64)]) -> Result<Datatype, DatatypeError> {
        let mut parts = Parts::new();
        for (displacement, count) in blocks {
            parts.add(product(*displacement, self.extent())?, *count, self)?;
        }
        parts.build()
    }

    /// Blocks of elements: displacement in bytes, and number of elements, each.
    ///
    /// # Errors
    /// If it would be too large or too deep.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// // Two words at byte 3, and one at byte 100.
    /// let words = Datatype::of::<u32>().hindexed(&[(3, 2), (100, 1)])?;
    /// assert_eq!((words.size(), words.true_bounds()), (12, (3, 104)));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn hindexed(&self, blocks: &[(i64, u64)]) -> Result<Datatype, DatatypeError> {
        let mut parts = Parts::new();
        for (displacement, count) in blocks {
            parts.add(*displacement, *count, self)?;
        }
        parts.build()
    }

    /// Fields: offset in bytes, number of elements, and datatype, each. The extent ends behind the last field; see
    /// [`resized`](Self::resized) for padding, and [`structure!`](crate::structure) for `#[repr(C)]` structs.
    ///
    /// # Errors
    /// If it would be too large or too deep.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// // A record of a file: a byte, and then two numbers without padding between them.
    /// let record = Datatype::structure(&[(0, 1, Datatype::of::<u8>()), (1, 2, Datatype::of::<f64>())])?;
    /// assert_eq!((record.size(), record.extent()), (17, 17));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn structure(fields: &[(i64, u64, Datatype)]) -> Result<Datatype, DatatypeError> {
        let mut parts = Parts::new();
        for (offset, count, datatype) in fields {
            parts.add(*offset, *count, datatype)?;
        }
        parts.build()
    }

    /// A part of an array of several dimensions, the last one of which is contiguous: elements of the array, elements
    /// of the part and first element of the part, by dimension. Its extent is that of the array.
    ///
    /// # Errors
    /// If the part is not within the array, or it would be too large or too deep.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// // Rows 1 and 2, columns 3 to 5, of 4 rows of 8 columns.
    /// let part = Datatype::of::<u16>().subarray(&[4, 8], &[2, 3], &[1, 3])?;
    /// assert_eq!((part.size(), part.extent()), (12, 64));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn subarray(&self, sizes: &[u64], counts: &[u64], starts: &[u64]) -> Result<Datatype, DatatypeError> {
        if sizes.len() != counts.len() || sizes.len() != starts.len() {
            let (sizes, counts, starts) = (sizes.len(), counts.len(), starts.len());
            return Err(DatatypeError::Dimensions { sizes, counts, starts });
        }
        // From the last dimension to the first, the stride of which is what the later ones take.
        let mut part = self.clone();
        let (mut stride, mut first) = (self.extent(), 0i64);
        for dimension in (0..sizes.len()).rev() {
            let (len, count, start) = (sizes[dimension], counts[dimension], starts[dimension]);
            if start > len || count > len - start {
                return Err(DatatypeError::Subarray { dimension, start, count, len });
            }
            let signed = |value: u64| i64::try_from(value).map_err(|_| DatatypeError::TooLarge);
            first = within(i128::from(first) + i128::from(product(stride, signed(start)?)?))?;
            part = part.hvector(count, 1, stride)?;
            stride = product(stride, signed(len)?)?;
        }
        let body = Body::concat([(first, part.body().clone())])?;
        Ok(Datatype::from_parts(body, Bounds { lower: 0, extent: stride }, part.signature()))
    }

    /// The same elements with another lower bound and extent, in bytes: where the next one begins.
    ///
    /// # Errors
    /// If the bounds would be too large.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    /// let column = Datatype::of::<i32>().vector(10, 1, 10)?;
    /// // The next column begins one element further on, so that several of them are a part of the matrix.
    /// let columns = column.resized(0, 4)?.contiguous(3)?;
    /// assert_eq!((columns.size(), columns.true_bounds()), (120, (0, 9 * 40 + 12)));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    pub fn resized(&self, lower: i64, extent: i64) -> Result<Datatype, DatatypeError> {
        let bounds = Bounds { lower: within(lower.into())?, extent: within(extent.into())? };
        Ok(Datatype::from_parts(self.body().clone(), bounds, self.signature()))
    }
}

/// The datatype of a `#[repr(C)]` struct: each field that is named, with its datatype, and the size of the struct as the
/// extent. An array of elements is `[T; N]`; what is not an element is given as `field = datatype`.
///
/// # Examples
/// ```
/// use posthaste_protocols::structure;
///
/// #[repr(C)]
/// struct Particle {
///     id: u32,
///     position: [f64; 3],
///     charge: i8,
/// }
///
/// let particle = structure!(Particle { id: u32, position: [f64; 3], charge: i8 })?;
/// assert_eq!(particle.size(), 4 + 24 + 1);
/// assert_eq!(particle.extent() as usize, size_of::<Particle>());
///
/// #[repr(C)]
/// struct Pair {
///     left: Particle,
///     weight: f32,
/// }
/// let pair = structure!(Pair { left = particle, weight: f32 })?;
/// assert_eq!(pair.size(), 33);
/// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
/// ```
#[macro_export]
macro_rules! structure {
    ($type:ty { $($fields:tt)* }) => {{
        let mut fields: ::std::vec::Vec<(i64, u64, $crate::datatype::Datatype)> = ::std::vec::Vec::new();
        $crate::structure!(@field $type, fields, $($fields)*);
        $crate::datatype::Datatype::structure(&fields)
            .and_then(|fields| fields.resized(0, ::std::mem::size_of::<$type>() as i64))
    }};
    (@field $type:ty, $list:ident $(,)?) => {};
    (@field $type:ty, $list:ident, $field:ident : [$element:ty; $count:expr] $(, $($rest:tt)*)?) => {
        let _: fn(&$type) -> &[$element; $count] = |whole| &whole.$field;
        let offset = ::std::mem::offset_of!($type, $field) as i64;
        $list.push((offset, $count as u64, $crate::datatype::Datatype::of::<$element>()));
        $crate::structure!(@field $type, $list, $($($rest)*)?);
    };
    (@field $type:ty, $list:ident, $field:ident : $element:ty $(, $($rest:tt)*)?) => {
        let _: fn(&$type) -> &$element = |whole| &whole.$field;
        let offset = ::std::mem::offset_of!($type, $field) as i64;
        $list.push((offset, 1, $crate::datatype::Datatype::of::<$element>()));
        $crate::structure!(@field $type, $list, $($($rest)*)?);
    };
    (@field $type:ty, $list:ident, $field:ident = $datatype:expr $(, $($rest:tt)*)?) => {
        let offset = ::std::mem::offset_of!($type, $field) as i64;
        $list.push((offset, 1, ::std::clone::Clone::clone(&$datatype)));
        $crate::structure!(@field $type, $list, $($($rest)*)?);
    };
}
