//! The payload of a packet: lent to whoever handles it, who takes what it keeps.

use crate::lease::{Lease, LeaseOwner};
use crate::memory::{LeasedPage, SharedSlice, Source};
use bytes::Bytes;
use std::cell::Cell;
use std::sync::Arc;

/// The payload of a packet, lent for the call. There is nothing to be dropped with it, so that a handler which has looked at a
/// short payload, as most do, is done.
#[derive(Debug)]
pub enum Body<'a> {
    /// A private copy that is valid during the call.
    Short(&'a [u8]),
    /// Page memory of the sender: during the call, or for as long as the lease which can be taken of it.
    Lease(Lent<'a>),
    /// Bytes to be shared.
    Owned(&'a Bytes),
}

impl<'a> Body<'a> {
    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Body::Short(bytes) => bytes.len(),
            Body::Lease(lent) => lent.memory.len(),
            Body::Owned(bytes) => bytes.len(),
        }
    }

    /// Whether there is none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is, for copying out of it during the call: behind it a page may have become another message's.
    #[inline]
    #[must_use]
    pub fn source(&self) -> Source<'_> {
        match self {
            Body::Short(bytes) => Source::Private(bytes),
            Body::Lease(lent) => lent.memory().into(),
            Body::Owned(bytes) => Source::Private(bytes),
        }
    }

    /// Keeps it beyond the call: a short payload is copied, a lease is taken.
    #[must_use]
    pub fn keep(self) -> Kept {
        match self {
            Body::Short(bytes) => Kept::Bytes(Bytes::copy_from_slice(bytes)),
            Body::Lease(lent) => Kept::Lease(lent.take()),
            Body::Owned(bytes) => Kept::Bytes(bytes.clone()),
        }
    }

    /// Its bytes, copied unless they can be shared.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match self {
            Body::Short(bytes) => Bytes::copy_from_slice(bytes),
            Body::Lease(lent) => Bytes::from(lent.memory.to_vec()),
            Body::Owned(bytes) => Bytes::clone(bytes),
        }
    }
}

/// A page that a device lends for a call. Unless its lease is taken, the device gives it back behind the call.
#[derive(Debug)]
pub struct Lent<'a> {
    memory: SharedSlice,
    place: &'a LentPage<'a>,
}

impl Lent<'_> {
    /// The memory, for copying out of it and for folding over its words.
    #[inline]
    #[must_use]
    pub fn memory(&self) -> LeasedPage<'_> {
        LeasedPage::of(self.memory, self)
    }

    /// The right to read the page beyond the call.
    #[must_use]
    pub fn take(self) -> Lease {
        self.place.taken.set(true);
        Lease::new(self.memory, self.place.owner.clone(), self.place.grant)
    }
}

/// A page while it is lent.
pub struct LentPage<'a> {
    owner: &'a Arc<dyn LeaseOwner>,
    grant: u64,
    taken: Cell<bool>,
}

impl std::fmt::Debug for LentPage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentPage")
            .field("grant", &self.grant)
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}

impl<'a> LentPage<'a> {
    /// A page that `owner` knows under the number `grant`.
    #[inline]
    #[must_use]
    pub fn new(owner: &'a Arc<dyn LeaseOwner>, grant: u64) -> Self {
        Self { owner, grant, taken: Cell::new(false) }
    }

    /// Its memory as a payload. Lent to one call after the other, and to none any more once its lease was taken.
    #[inline]
    #[must_use]
    pub fn lend(&'a self, memory: SharedSlice) -> Body<'a> {
        Body::Lease(Lent { memory, place: self })
    }

    /// Whether the lease was taken, which gives the page back when it is dropped.
    #[inline]
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.taken.get()
    }

    /// Gives the page back unless its lease was taken.
    #[inline]
    pub fn end(self) {
        if !self.taken.get() {
            self.owner.release(self.grant);
        }
    }
}

/// A payload that was kept.
#[derive(Debug)]
pub enum Kept {
    /// Bytes of one's own.
    Bytes(Bytes),
    /// Page memory of the sender.
    Lease(Lease),
}

impl Kept {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Kept::Bytes(bytes) => bytes.len(),
            Kept::Lease(lease) => lease.len(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is, for copying out of it.
    #[must_use]
    pub fn source(&self) -> Source<'_> {
        match self {
            Kept::Bytes(bytes) => Source::Private(bytes),
            Kept::Lease(lease) => lease.memory().into(),
        }
    }

    /// Lends it to a call, behind which it is dropped unless it was taken.
    pub fn lend<R>(self, call: impl FnOnce(Body<'_>) -> R) -> R {
        match self {
            Kept::Bytes(bytes) => call(Body::Owned(&bytes)),
            Kept::Lease(lease) => lease.lend(call),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Body, Kept, LentPage};
    use crate::lease::{Lease, LeaseOwner};
    use crate::memory::SharedSlice;
    use bytes::Bytes;
    use std::sync::{Arc, Mutex};

    #[derive(Default)]
    struct Owner(Mutex<Vec<u64>>);

    impl LeaseOwner for Owner {
        fn release(&self, grant: u64) {
            self.0.lock().unwrap().push(grant);
        }
    }

    #[test]
    fn a_page_is_given_back_behind_the_call_or_by_the_lease_that_was_taken() {
        let owner = Arc::new(Owner::default());
        let home: Arc<dyn LeaseOwner> = owner.clone();
        let given_back = || std::mem::take(&mut *owner.0.lock().unwrap());
        let page = LentPage::new(&home, 1);
        // Looked at twice, as one that was to be offered again.
        for _ in 0..2 {
            assert!(page.lend(SharedSlice::EMPTY).is_empty());
        }
        assert_eq!(given_back(), []);
        page.end();
        assert_eq!(given_back(), [1]);

        let page = LentPage::new(&home, 2);
        let kept = page.lend(SharedSlice::EMPTY).keep();
        assert!(page.is_taken());
        page.end();
        assert_eq!(given_back(), [], "the lease has it");
        // Lent again, and kept again: still one lease.
        let kept = kept.lend(|body| body.keep());
        assert_eq!(given_back(), []);
        kept.lend(|body| assert!(body.is_empty()));
        assert_eq!(given_back(), [2]);

        drop(Kept::Lease(Lease::new(SharedSlice::EMPTY, home.clone(), 3)));
        assert_eq!(given_back(), [3]);
        drop(home);
        // Whoever had it has dropped it.
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn bytes_are_shared_and_short_ones_copied() {
        let bytes = Bytes::from(vec![7; 100]);
        let Kept::Bytes(kept) = Body::Owned(&bytes).keep() else { panic!("a lease of no page") };
        assert_eq!(kept.as_ptr(), bytes.as_ptr());
        let Kept::Bytes(copy) = Body::Short(&bytes).keep() else { panic!("a lease of no page") };
        assert_eq!((copy.as_ptr() == bytes.as_ptr(), copy), (false, bytes));
    }
}
