//! The data gather/scatter machine (DGSM): between a layout and contiguous memory, some bytes at a time (G02).

use super::cursor::{Cursor, Machine as Running};
use super::error::{Side, TransferError};
use super::pair;
use super::redistribute::{Direct, Layout};
use super::{Datatype, Source, Target};
use posthaste_core::memory::{Blocks, SharedSlice};

/// Of so many bytes at least there may be one place. A list of places takes a quarter of that, so that a header which a peer
/// has made up costs no more memory than the bytes it announces would.
const PER_PLACE: u64 = 64;

/// Runs the program of a layout in steps: each activation is told how many bytes to process, and where the contiguous
/// ones are now; the next one goes on where it stopped.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, Machine};
///
/// let every_other = Datatype::of::<u16>().vector(4, 1, 2)?;
/// let mut machine = Machine::new(&Layout::new(&every_other, 1))?;
/// let object: Vec<u8> = (0..14).collect();
/// let mut staging = [0; 5];
/// assert_eq!(machine.gather(&object, &mut staging)?, 5);
/// assert_eq!(staging, [0, 1, 4, 5, 8]);
/// assert_eq!(machine.gather(&object, &mut staging)?, 3); // the rest
/// assert_eq!(staging[..3], [9, 12, 13]);
/// assert_eq!(machine.remaining(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Machine {
    datatype: Datatype,
    count: u64,
    base: u64,
    cursor: Cursor,
    remaining: u64,
}

impl Machine {
    /// A machine at the first byte of a layout.
    ///
    /// # Errors
    /// If the bytes of the layout cannot be counted, or its base is beyond any memory.
    pub fn new(layout: &Layout<'_>) -> Result<Machine, TransferError> {
        let Layout { datatype, count, base } = *layout;
        let remaining = layout.check(Side::Source, i64::MAX as u64)?;
        let mut cursor = Cursor::of_bytes(0, 0);
        layout.start(&mut cursor);
        Ok(Machine { datatype: datatype.clone(), count, base, cursor, remaining })
    }

    /// Bytes that are left.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Whether all of the layout lies in a memory; a machine is given the same memory at each activation.
    fn check(&self, side: Side, len: usize) -> Result<(), TransferError> {
        Layout::new(&self.datatype, self.count).at(self.base).check(side, len as u64).map(|_| ())
    }

    /// Packs the next bytes of the layout into `out`, as many as there are and fit; returns how many.
    ///
    /// # Errors
    /// If the layout is not inside of the memory. Nothing was copied then.
    pub fn gather<'m, 'o>(
        &mut self,
        memory: impl Into<Source<'m>>,
        out: impl Into<Target<'o>>,
    ) -> Result<u64, TransferError> {
        let (memory, out) = (memory.into(), out.into());
        self.check(Side::Source, memory.len())?;
        let bytes = self.remaining.min(out.len() as u64);
        let mut contiguous = Cursor::of_bytes(0, bytes);
        let mut mover = Direct { target: out, source: memory };
        let mut own = Running { plan: self.datatype.plan(), at: &mut self.cursor };
        let moved = pair::run(&mut Running::of_bytes(&mut contiguous), &mut own, bytes, &mut mover);
        self.passed(Side::Source, memory.len(), bytes, moved.is_ok())
    }

    /// Unpacks `data` into the next bytes of the layout, as many as there are; returns how many.
    ///
    /// # Errors
    /// If the layout is not inside of the memory. Nothing was copied then.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::{Datatype, Layout, Machine};
    ///
    /// let column = Datatype::of::<u8>().vector(4, 1, 4)?; // of a matrix of 4 × 4
    /// let mut machine = Machine::new(&Layout::new(&column, 1).at(2))?;
    /// let mut matrix = [0; 16];
    /// // What comes in pieces goes to its places one after the other.
    /// for piece in [&[1, 2, 3][..], &[4]] {
    ///     machine.scatter(&mut matrix, piece)?;
    /// }
    /// assert_eq!([matrix[2], matrix[6], matrix[10], matrix[14]], [1, 2, 3, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scatter<'m, 'd>(
        &mut self,
        memory: impl Into<Target<'m>>,
        data: impl Into<Source<'d>>,
    ) -> Result<u64, TransferError> {
        let (memory, data) = (memory.into(), data.into());
        let len = memory.len();
        self.check(Side::Target, len)?;
        let bytes = self.remaining.min(data.len() as u64);
        let mut contiguous = Cursor::of_bytes(0, bytes);
        let mut mover = Direct { target: memory, source: data };
        let mut own = Running { plan: self.datatype.plan(), at: &mut self.cursor };
        let moved = pair::run(&mut own, &mut Running::of_bytes(&mut contiguous), bytes, &mut mover);
        self.passed(Side::Target, len, bytes, moved.is_ok())
    }

    /// Passes over the next bytes of the layout, as many as there are, without moving them; returns how many. Whole elements
    /// and loops are passed over at once: it takes no longer for many bytes than for few.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::{Datatype, Layout, Machine};
    ///
    /// let every_other = Datatype::of::<u8>().vector(5, 1, 2)?;
    /// let mut machine = Machine::new(&Layout::new(&every_other, 1))?;
    /// assert_eq!(machine.skip(3), 3);
    /// let (object, mut rest) = ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0; 8]);
    /// assert_eq!(machine.gather(&object, &mut rest)?, 2);
    /// assert_eq!(rest[..2], [6, 8]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn skip(&mut self, bytes: u64) -> u64 {
        let bytes = self.remaining.min(bytes);
        if bytes > 0 {
            Running { plan: self.datatype.plan(), at: &mut self.cursor }.skip(bytes);
        }
        self.remaining -= bytes;
        bytes
    }

    /// Bytes of a block, in the mean.
    pub(crate) fn mean_chunk(&self) -> u64 {
        self.datatype.mean_chunk()
    }

    /// Where the next bytes of the layout are in a memory, as many as there are, in order. `None` if that is not inside of it,
    /// or if these bytes lie in so many places that it is not worth listing them.
    pub(crate) fn places(&mut self, memory: SharedSlice, bytes: u64) -> Option<Vec<SharedSlice>> {
        self.check(Side::Target, memory.len()).ok()?;
        let bytes = self.remaining.min(bytes);
        let mut contiguous = Cursor::of_bytes(0, bytes);
        // The first and the last one may be parts of blocks.
        let mut places = Places { memory, found: Vec::new(), most: 2 + bytes / PER_PLACE };
        let mut own = Running { plan: self.datatype.plan(), at: &mut self.cursor };
        pair::run(&mut own, &mut Running::of_bytes(&mut contiguous), bytes, &mut places).ok()?;
        self.remaining -= bytes;
        Some(places.found)
    }

    fn passed(&mut self, side: Side, len: usize, bytes: u64, moved: bool) -> Result<u64, TransferError> {
        if !moved {
            // Not reached: the bounds of the whole layout were checked.
            let (low, high) = self.datatype.span(self.count);
            return Err(TransferError::OutOfBounds { side, low, high, len: len as u64 });
        }
        self.remaining -= bytes;
        Ok(bytes)
    }
}

/// Notes where blocks would go, and copies nothing.
struct Places {
    memory: SharedSlice,
    found: Vec<SharedSlice>,
    /// So many may be found.
    most: u64,
}

/// There are too many places, or they are not inside of the memory.
struct Unplaceable;

impl pair::Mover for Places {
    const IN_ORDER: bool = true;
    type Error = Unplaceable;

    fn copy(&mut self, blocks: &Blocks) -> Result<(), Unplaceable> {
        if blocks.count > self.most - self.found.len() as u64 {
            return Err(Unplaceable);
        }
        for number in 0..blocks.count as i64 {
            // Within the bounds that were checked.
            let offset = blocks.target + number * blocks.target_stride;
            let offset = u64::try_from(offset).map_err(|_| Unplaceable)?;
            self.found.push(self.memory.slice(offset, blocks.len).ok_or(Unplaceable)?);
        }
        Ok(())
    }
}
