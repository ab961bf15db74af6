//! Memory of a peer that is attached a segment at a time (G04).

use super::cursor::{Cursor, Machine};
use super::error::{ProgramError, TransferError};
use super::pair::{self, Mover};
use super::redistribute::{Layout, checked};
use super::{Datatype, Source, Target};
use crate::window::RegionKey;
use posthaste_core::Rank;
use posthaste_core::memory::{Blocks, SharedSlice};

/// What an exporter publishes of an object: a handle to its memory, where the object is in it, and its program.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste_protocols::datatype::{Datatype, Export, Layout, pull};
/// // The exporter tells where an object is, and how it lies there.
/// let region = job.region(100).await?;
/// region.write(0, &(0..100).collect::<Vec<u8>>())?;
/// let column = Datatype::of::<u8>().vector(10, 1, 10)?;
/// let told = Export { handle: region.key(), base: 3, count: 1, datatype: column }.to_bytes();
/// // A peer pulls it into a row of its own.
/// let export = Export::from_bytes(&told)?;
/// let remote = job.remote_region(export.handle).await?;
/// let mut segments = remote.segments(32).expect("the memory is mapped here");
/// let (byte, mut row) = (Datatype::of::<u8>(), [0; 10]);
/// pull(&mut row, &Layout::new(&byte, 10), &mut segments, &export)?;
/// assert_eq!(row, [3, 13, 23, 33, 43, 53, 63, 73, 83, 93]);
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Export {
    /// Names the memory.
    pub handle: RegionKey,
    /// Of the first element, from the beginning of the memory, in bytes.
    pub base: u64,
    /// Number of elements.
    pub count: u64,
    /// Of an element.
    pub datatype: Datatype,
}

/// Bytes before the program.
const HEAD: usize = 40;

impl Export {
    /// As bytes, to be published in shared memory or told in a message.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let RegionKey { rank, offset, len, incarnation } = self.handle;
        let mut bytes = Vec::new();
        for word in [u64::from(incarnation) << 32 | u64::from(rank.0), offset, len, self.base, self.count] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.datatype.to_bytes());
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; a private copy, not memory that a peer may go on writing.
    ///
    /// # Errors
    /// If the program is refused.
    pub fn from_bytes(bytes: &[u8]) -> Result<Export, ProgramError> {
        let (head, program) = bytes.split_at_checked(HEAD).ok_or(ProgramError::Length)?;
        let mut words =
            head.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let mut word = || words.next().unwrap_or_default();
        let of = word();
        let (rank, incarnation) = (Rank(of as u32), (of >> 32) as u32);
        let handle = RegionKey { rank, offset: word(), len: word(), incarnation };
        let (base, count) = (word(), word());
        Ok(Export { handle, base, count, datatype: Datatype::from_bytes(program)? })
    }

    /// Whose memory it is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.handle.rank
    }

    fn layout(&self) -> Layout<'_> {
        Layout::new(&self.datatype, self.count).at(self.base)
    }

    /// Bytes of the memory, of which a peer may say anything: those that places are counted in, which are signed.
    fn len(&self) -> u64 {
        self.handle.len.min(i64::MAX as u64)
    }
}

/// How segments of an exported memory are attached. One is attached at any time.
pub trait Segments {
    /// Length of all segments but the last one, in bytes; never changes.
    fn segment_size(&self) -> u64;

    /// Attaches the segment with this number, counted from the beginning of the exported memory, and says where it is
    /// now; `None` if it cannot be attached. The one before is not used any more.
    fn attach(&mut self, segment: u64) -> Option<SharedSlice>;
}

/// A memory that is mapped as a whole, in segments.
#[derive(Clone, Copy, Debug)]
pub struct SlicedMemory {
    memory: SharedSlice,
    size: u64,
    attached: u64,
}

impl SlicedMemory {
    /// Segments of `size` bytes (1 at least).
    #[must_use]
    pub fn new(memory: SharedSlice, size: u64) -> Self {
        Self { memory, size: size.max(1), attached: 0 }
    }

    /// How many segments have been attached.
    #[must_use]
    pub fn attached(&self) -> u64 {
        self.attached
    }
}

impl Segments for SlicedMemory {
    fn segment_size(&self) -> u64 {
        self.size
    }

    fn attach(&mut self, segment: u64) -> Option<SharedSlice> {
        let first = segment.checked_mul(self.size)?;
        let left = (self.memory.len() as u64).checked_sub(first)?;
        self.attached += 1;
        self.memory.slice(first, left.min(self.size))
    }
}

/// Pulls an exported object into local memory: the master machine runs the exporter's program.
///
/// # Errors
/// If the two have different elements, or are not inside of their memories: nothing was copied then. If a segment cannot
/// be attached.
pub fn pull<'t>(
    target: impl Into<Target<'t>>,
    to: &Layout<'_>,
    segments: &mut impl Segments,
    export: &Export,
) -> Result<u64, TransferError> {
    let (target, from) = (target.into(), export.layout());
    let bytes = checked((to, target.len() as u64), (&from, export.len()))?;
    let mut mover = Segmented { local: Local::Target(target), segments, attached: None };
    transfer(to, &from, bytes, &mut mover)
}

/// Pushes local memory into an exported object: the master machine runs the exporter's program.
///
/// # Errors
/// As [`pull`].
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste_protocols::datatype::{Datatype, Export, Layout, push};
/// let region = job.region(16).await?;
/// let every_fourth = Datatype::of::<u8>().vector(4, 1, 4)?;
/// let export = Export { handle: region.key(), base: 1, count: 1, datatype: every_fourth };
/// let mut segments = job.remote_region(export.handle).await?.segments(8).expect("the memory is mapped here");
/// push(&mut segments, &export, b"word", &Layout::new(&Datatype::of::<u8>(), 4))?;
/// let mut bytes = [0; 16];
/// region.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"\0w\0\0\0o\0\0\0r\0\0\0d\0\0");
/// # job.leave().await
/// # }
/// ```
pub fn push<'s>(
    segments: &mut impl Segments,
    export: &Export,
    source: impl Into<Source<'s>>,
    from: &Layout<'_>,
) -> Result<u64, TransferError> {
    let (source, to) = (source.into(), export.layout());
    let bytes = checked((&to, export.len()), (from, source.len() as u64))?;
    let mut mover = Segmented { local: Local::Source(source), segments, attached: None };
    transfer(&to, from, bytes, &mut mover)
}

fn transfer<S: Segments>(
    to: &Layout<'_>,
    from: &Layout<'_>,
    bytes: u64,
    mover: &mut Segmented<'_, S>,
) -> Result<u64, TransferError> {
    let (mut to_cursor, mut from_cursor) = (Cursor::of_bytes(0, 0), Cursor::of_bytes(0, 0));
    to.start(&mut to_cursor);
    from.start(&mut from_cursor);
    let mut target = Machine { plan: to.datatype.plan(), at: &mut to_cursor };
    let mut source = Machine { plan: from.datatype.plan(), at: &mut from_cursor };
    pair::run(&mut target, &mut source, bytes, mover)?;
    Ok(bytes)
}

enum Local<'m> {
    Source(Source<'m>),
    Target(Target<'m>),
}

/// Copies between local memory and segments.
struct Segmented<'m, S> {
    local: Local<'m>,
    segments: &'m mut S,
    /// Which one is attached, and where.
    attached: Option<(u64, SharedSlice)>,
}

impl<S: Segments> Mover for Segmented<'_, S> {
    // One segment at a time: going back and forth would attach each of them many times.
    const IN_ORDER: bool = true;
    type Error = TransferError;

    fn copy(&mut self, blocks: &Blocks) -> Result<(), TransferError> {
        let size = self.segments.segment_size();
        let (first, stride) = match self.local {
            Local::Source(_) => (blocks.target, blocks.target_stride),
            Local::Target(_) => (blocks.source, blocks.source_stride),
        };
        let mut done = 0;
        while done < blocks.count {
            let at = (first + done as i64 * stride) as u64;
            let (segment, inside) = (at / size, at % size);
            if blocks.len > size - inside {
                self.split(blocks, done)?;
                done += 1;
                continue;
            }
            // As many blocks as lie in this segment.
            let fit = match stride {
                0 => u64::MAX,
                1.. => (size - inside - blocks.len) / stride as u64 + 1,
                _ => inside / stride.unsigned_abs() + 1,
            };
            let count = fit.min(blocks.count - done);
            self.part(segment, blocks, done, 0, blocks.len, count)?;
            done += count;
        }
        Ok(())
    }
}

impl<S: Segments> Segmented<'_, S> {
    /// Copies a block that crosses the end of a segment, fragment by fragment.
    fn split(&mut self, blocks: &Blocks, index: u64) -> Result<(), TransferError> {
        let size = self.segments.segment_size();
        let (first, stride) = match self.local {
            Local::Source(_) => (blocks.target, blocks.target_stride),
            Local::Target(_) => (blocks.source, blocks.source_stride),
        };
        let at = (first + index as i64 * stride) as u64;
        let mut done = 0;
        while done < blocks.len {
            let (segment, inside) = ((at + done) / size, (at + done) % size);
            let len = (size - inside).min(blocks.len - done);
            self.part(segment, blocks, index, done, len, 1)?;
            done += len;
        }
        Ok(())
    }

    /// Copies `len` bytes from `within` on of `count` blocks from `index` on, all of which lie in one segment.
    fn part(
        &mut self,
        segment: u64,
        blocks: &Blocks,
        index: u64,
        within: u64,
        len: u64,
        count: u64,
    ) -> Result<(), TransferError> {
        let attached = match self.attached {
            Some((current, slice)) if current == segment => slice,
            _ => {
                let slice = self.segments.attach(segment).ok_or(TransferError::Segment(segment))?;
                self.attached = Some((segment, slice));
                slice
            }
        };
        // What an offset in the exporter's memory becomes in the segment's.
        let relocation = -((segment * self.segments.segment_size()) as i64);
        let skip = within as i64;
        let mut part = Blocks {
            target: blocks.target + index as i64 * blocks.target_stride + skip,
            source: blocks.source + index as i64 * blocks.source_stride + skip,
            len,
            count,
            ..*blocks
        };
        let copied = match &mut self.local {
            Local::Source(source) => {
                part.target += relocation;
                Target::from(attached).copy_blocks(source, &part)
            }
            Local::Target(target) => {
                part.source += relocation;
                target.copy_blocks(&Source::from(attached), &part)
            }
        };
        if copied { Ok(()) } else { Err(TransferError::Segment(segment)) }
    }
}
