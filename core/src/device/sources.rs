//! Where the payloads of descriptors are.

use super::Loan;
use crate::descriptor::{Descriptor, MAX_DESCRIPTOR_INLINE, SourceKind};
use crate::ids::Rank;
use crate::memory::SharedSlice;
use bytes::Bytes;
use slab::Slab;

/// What the payload fields of descriptors point into, lent to the device for one `inject`.
#[derive(Debug)]
pub struct Sources<'a> {
    /// Message info of a run that is one send.
    pub info: &'a [u8],
    /// What [`SourceKind::Borrowed`] means.
    pub borrowed: &'a [u8],
    /// The same as memory that the device may keep instead of copying it, if it is such.
    pub owned: Option<&'a Bytes>,
    /// The context's tables.
    pub table: &'a SourceTable,
    /// The ticket of the operation that puts and gets without one of their own are part of, as a word, and 0 for none. A device
    /// that tells only later how they have ended ends that operation with a fault if one of them does.
    pub part_of: u64,
}

impl<'a> Sources<'a> {
    /// Those of descriptors whose payloads are in them, or in these tables: nothing is lent.
    #[inline]
    #[must_use]
    pub const fn of(table: &'a SourceTable) -> Sources<'a> {
        Sources { info: &[], borrowed: &[], owned: None, table, part_of: 0 }
    }
}

/// The payload of a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Private memory.
    Private(&'a [u8]),
    /// Shared memory.
    Shared(SharedSlice),
    /// A loan of the device: its key, and the number of bytes.
    Loan(u64, u64),
}

/// What a context keeps alive for its queued and recorded descriptors.
#[derive(Debug, Default)]
pub struct SourceTable {
    /// Payloads of queued descriptors.
    pub held: Slab<Bytes>,
    /// Loans of queued descriptors.
    pub loans: Slab<Loan>,
    /// Memory of this rank that recorded descriptors read or write.
    pub local: Slab<SharedSlice>,
    /// Memory of peers that descriptors read or write.
    pub remote: Slab<RemoteMemory>,
}

/// A range of a rank's memory.
#[derive(Clone, Copy, Debug)]
pub struct RemoteMemory {
    /// Whose.
    pub rank: Rank,
    /// First byte as the owner names it.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// As mapped here, if it is.
    pub mapped: Option<SharedSlice>,
    /// Which incarnation of the rank has it; no other one is ever written to or read from in its place.
    pub incarnation: u32,
}

impl Sources<'_> {
    /// Finds the payload of a descriptor; `None` if its key or range names nothing (a defect of the caller).
    #[inline]
    #[must_use]
    pub fn resolve<'b>(&'b self, descriptor: &'b Descriptor) -> Option<Source<'b>> {
        let len = descriptor.len;
        match descriptor.source_kind {
            SourceKind::Inline if len <= MAX_DESCRIPTOR_INLINE as u64 => {
                Some(Source::Private(descriptor.inline_bytes()))
            }
            SourceKind::Inline => None,
            SourceKind::Borrowed => self.borrowed.get(..len as usize).map(Source::Private),
            SourceKind::Held => {
                let bytes = self.table.held.get(descriptor.source[0] as usize)?;
                let first = descriptor.source[1] as usize;
                bytes.get(first..first.checked_add(len as usize)?).map(Source::Private)
            }
            SourceKind::Region => {
                let region = self.table.local.get(descriptor.source[0] as usize)?;
                region.slice(descriptor.source[1], len).map(Source::Shared)
            }
            SourceKind::Loan => Some(Source::Loan(descriptor.source[0], len)),
        }
    }
}
