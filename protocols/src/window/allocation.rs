//! Where a rank's part of a window lies in the memory that its device hands out.

use posthaste_core::device::Allocation;
use posthaste_core::{Device, MemoryError};
use std::sync::Arc;

/// Bytes from which on a part is long, and too long for the caches of a core.
const LONG_PART: u64 = 64 << 10;
const VERY_LONG_PART: u64 = 8 << 20;

/// Where in its allocation a part of so many bytes begins.
///
/// Long copies take up to half as long again where the target lies up to a line ahead of the source modulo 4 KiB: the
/// processor takes its loads for ones that depend on the stores before them. Long pieces of the common allocator's memory, and
/// so most of what is got into, begin 16 bytes behind a page's start. Off that by a quarter of a page neither direction is
/// slower. Of copies that fit no cache of a core's own puts would be, by a tenth.
const fn set_off(len: u64) -> u64 {
    match len {
        LONG_PART..VERY_LONG_PART => 3072,
        _ => 0,
    }
}

/// Memory for a part of so many bytes, and where that begins: [`set_off`] behind the start, if there is room for that. No bytes
/// take no memory; `None` is a length that overflowed.
pub(super) fn allocate_part(
    device: &Arc<dyn Device>,
    len: Option<u64>,
) -> Result<(Allocation, u64), MemoryError> {
    // There is no memory so long: the device says how much it has.
    let len = len.unwrap_or(u64::MAX);
    if len == 0 {
        return Ok((Allocation { offset: 0, len: 0 }, 0));
    }
    let off = set_off(len);
    if off > 0
        && let Ok(own) = device.allocate(len + off)
    {
        let start = own.offset + off;
        return Ok((own, start));
    }
    let own = device.allocate(len)?;
    let start = own.offset;
    Ok((own, start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::inprocess::{InProcessFabric, Limits};
    use posthaste_core::{ClientId, JobShape, Rank};

    fn device(segment: u64) -> Arc<dyn Device> {
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        InProcessFabric::with_limits(shape, Limits { segment, ..Limits::default() })
            .device(ClientId(0), Rank(0))
    }

    #[test]
    fn long_parts_begin_off_a_page_if_there_is_room() {
        let device = device(4 << 20);
        for (len, off) in [(1, 0), ((64 << 10) - 1, 0), (64 << 10, 3072), (1 << 20, 3072)] {
            let (own, start) = allocate_part(&device, Some(len)).expect("there is room");
            assert_eq!(start - own.offset, off, "{len} bytes");
            assert!(start + len <= own.offset + own.len, "{len} bytes");
            device.free(own);
        }
    }

    #[test]
    fn a_part_that_fills_its_segment_begins_where_that_does() {
        let device = device(1 << 20);
        let (own, start) = allocate_part(&device, Some(1 << 20)).expect("it is exactly that much");
        assert_eq!((own.offset, own.len), (start, 1 << 20));
        assert!(allocate_part(&device, Some(1 << 20)).is_err());
        let impossible = allocate_part(&device, None).map(drop);
        assert_eq!(impossible, Err(MemoryError::Segment { wanted: u64::MAX, segment: 1 << 20 }));
        assert_eq!(allocate_part(&device, Some(0)).expect("none").0.len, 0);
    }
}
