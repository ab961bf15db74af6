//! Page memory as it is lent to users: only for as long as the right to it lasts.

use super::{SharedSlice, Source, Target};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use zerocopy::FromBytes;

/// Page memory of a sender, or other shared memory, to be read for as long as the [`Lease`](crate::Lease) on it lives.
///
/// The sender promised not to write the page meanwhile, but it could: nothing here makes a `&[u8]` of it. Every access copies, or
/// is a relaxed atomic load.
///
/// # Examples
/// A view does not outlive what it is a view of: the page may be another message's then.
/// ```compile_fail,E0505
/// fn sum(lease: posthaste_core::Lease) -> u64 {
///     let page = lease.memory();
///     drop(lease);
///     page.sum_words()
/// }
/// ```
#[derive(Clone, Copy)]
pub struct LeasedPage<'a> {
    slice: SharedSlice,
    right: PhantomData<&'a ()>,
}

impl fmt::Debug for LeasedPage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasedPage").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<'a> LeasedPage<'a> {
    /// A view of the slice for as long as that right lasts.
    #[inline]
    pub(crate) fn of<R: ?Sized>(slice: SharedSlice, _right: &'a R) -> Self {
        Self { slice, right: PhantomData }
    }

    /// A view of what stays there: a right to it is needed no longer than somebody wants.
    #[inline]
    pub(super) fn lasting(slice: SharedSlice) -> Self {
        Self { slice, right: PhantomData }
    }

    #[inline]
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.slice.as_ptr()
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has no bytes.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// A part of it; `None` if that is not inside.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: u64, len: u64) -> Option<LeasedPage<'a>> {
        Some(Self { slice: self.slice.slice(offset, len)?, right: PhantomData })
    }

    /// Copies its start to a buffer.
    ///
    /// # Panics
    /// If the buffer is longer than the page.
    #[inline]
    pub fn read(&self, into: &mut [u8]) {
        self.slice.read(into);
    }

    /// Reads an aligned 64-bit word. The offset is in bytes.
    ///
    /// # Panics
    /// If the word is not inside or not aligned to 8.
    #[inline]
    #[must_use]
    pub fn read_u64(&self, offset: usize) -> u64 {
        self.slice.read_u64(offset)
    }

    /// The same; `None` if the word is not inside or not aligned.
    #[inline]
    #[must_use]
    pub fn try_read_u64(&self, offset: u64) -> Option<u64> {
        self.slice.try_read_u64(offset)
    }

    /// Copies all of it to a new vector.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.slice.to_vec()
    }

    /// Appends all of it to a vector.
    pub fn append_to(&self, bytes: &mut Vec<u8>) {
        self.slice.append_to(bytes);
    }

    /// Appends it to a vector of plain values; bytes at its end that are less than a value are left out.
    pub fn append_values<T: FromBytes>(&self, values: &mut Vec<T>) {
        self.slice.append_values(values);
    }

    /// Copies all of it to memory that is shared, too, such as a window's.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, target: SharedSlice) {
        target.copy_from(self.slice);
    }

    /// Folds all whole 64-bit words, then the last 0 to 7 bytes as one word filled up with zeros. A page starts at a
    /// multiple of 8; a part of it need not.
    ///
    /// # Panics
    /// If it does not start at a multiple of 8.
    pub fn fold_words<A>(&self, init: A, f: impl FnMut(A, u64) -> A) -> A {
        self.slice.fold_words(init, f)
    }

    /// Sums all whole 64-bit words, wrapping.
    ///
    /// # Panics
    /// If it does not start at a multiple of 8.
    #[must_use]
    pub fn sum_words(&self) -> u64 {
        self.slice.sum_words()
    }

    /// Asks for the first bytes, up to `len` of them, to be fetched into this processor's cache. A hint.
    #[inline]
    pub fn prefetch(&self, len: usize) {
        self.slice.prefetch(len);
    }
}

/// Page memory of one's own, to be filled for as long as the [`Loan`](crate::Loan) is not sent, or other shared memory. What it has to begin with is
/// not said: zeros, or what an earlier message of this rank left there.
///
/// # Examples
/// ```compile_fail,E0505
/// fn write_behind(loan: posthaste_core::Loan, send: impl FnOnce(posthaste_core::Loan)) {
///     let page = loan.memory();
///     send(loan);
///     page.write(b"the receiver may be reading it");
/// }
/// ```
#[derive(Clone, Copy)]
pub struct LoanedPage<'a>(LeasedPage<'a>);

impl fmt::Debug for LoanedPage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoanedPage").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<'a> Deref for LoanedPage<'a> {
    type Target = LeasedPage<'a>;

    #[inline]
    fn deref(&self) -> &LeasedPage<'a> {
        &self.0
    }
}

impl<'a> LoanedPage<'a> {
    /// A view of the slice for as long as that right lasts.
    #[inline]
    pub(crate) fn of<R: ?Sized>(slice: SharedSlice, right: &'a R) -> Self {
        Self(LeasedPage::of(slice, right))
    }

    /// A view of what stays there and may be written at any time.
    #[inline]
    pub(super) fn lasting(slice: SharedSlice) -> Self {
        Self(LeasedPage::lasting(slice))
    }

    /// A part of it to be filled; `None` if that is not inside.
    #[inline]
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Option<LoanedPage<'a>> {
        Some(Self(self.0.slice(offset, len)?))
    }

    /// Copies bytes to its start.
    ///
    /// # Panics
    /// If there are more bytes than it has.
    #[inline]
    pub fn write(&self, bytes: &[u8]) {
        self.0.slice.write(bytes);
    }

    /// Writes an aligned 64-bit word. The offset is in bytes.
    ///
    /// # Panics
    /// If the word is not inside or not aligned to 8.
    #[inline]
    pub fn write_u64(&self, offset: usize, value: u64) {
        self.0.slice.write_u64(offset, value);
    }
}

impl<'a> From<LeasedPage<'a>> for Source<'a> {
    fn from(page: LeasedPage<'a>) -> Self {
        Source::Shared(page)
    }
}

impl<'a> From<LoanedPage<'a>> for Target<'a> {
    fn from(page: LoanedPage<'a>) -> Self {
        Target::Shared(page)
    }
}
