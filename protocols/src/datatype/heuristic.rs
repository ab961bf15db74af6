//! Whether data goes straight or over staging memory (G06).

use super::redistribute::Layout;

/// How a transfer between two layouts is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Each byte is copied once, from layout to layout.
    Direct,
    /// Each byte is copied twice, through contiguous memory.
    Staged,
}

/// When a transfer is done which way: staged, if the mean chunk is at most `granularity` or all of it is less than
/// `size`, and else direct.
///
/// By default everything goes straight. Where the source document's machines called a worker for each chunk, these copy
/// runs of chunks in one loop, so that staging is a second pass over the bytes and seldom saves anything: measured on
/// mapped memory (blocks of 8 B to 1 KiB, regular and irregular, 2 to 1,000 KiB in all) direct was 1.1 to 3 times as fast,
/// but for blocks of 24 B against blocks of 40 B, where it had 0.9 of the speed. Thresholds are for memory that costs more
/// to attach or to reach.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, Method, Thresholds};
///
/// let column = Datatype::of::<u64>().vector(100, 1, 100)?;
/// let layout = Layout::new(&column, 1);
/// assert_eq!(Thresholds::default().method(&layout, &layout), Method::Direct);
/// let staged = Thresholds { granularity: 8, size: 0, staging: 4096 };
/// assert_eq!(staged.method(&layout, &layout), Method::Staged);
/// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Of the mean contiguous chunk, in bytes.
    pub granularity: u64,
    /// Of all bytes of the transfer.
    pub size: u64,
    /// Staging memory in bytes, no more than all of the transfer or the longer memory; it is filled and drained as often as it takes.
    pub staging: usize,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { granularity: 0, size: 0, staging: 16 << 10 }
    }
}

impl Thresholds {
    /// How data gets from one layout to another. The finer one of the two counts; contiguous data on either side is
    /// always direct, because a single copy is all it takes.
    #[must_use]
    pub fn method(&self, to: &Layout<'_>, from: &Layout<'_>) -> Method {
        if self.granularity == 0 && self.size == 0 {
            return Method::Direct;
        }
        let contiguous = |layout: &Layout<'_>| layout.datatype.is_contiguous();
        if contiguous(to) || contiguous(from) {
            return Method::Direct;
        }
        let mean = to.datatype.mean_chunk().min(from.datatype.mean_chunk());
        let total = from.size().unwrap_or(u64::MAX);
        if mean <= self.granularity || total < self.size { Method::Staged } else { Method::Direct }
    }
}
