//! What can be wrong with a datatype, a program or a transfer.

use super::signature::Signature;
use posthaste_core::{Fault, RmaError};
use thiserror::Error;

/// Why a datatype cannot be made.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, DatatypeError};
///
/// let byte = Datatype::of::<u8>();
/// let beyond = byte.subarray(&[10, 10], &[2, 2], &[0, 9]).unwrap_err();
/// assert!(matches!(beyond, DatatypeError::Subarray { dimension: 1, .. }));
/// assert!(byte.contiguous(u64::MAX).is_err(), "no memory is as large");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DatatypeError {
    /// Too long, or too far from its base.
    #[error("the datatype would span more than 2^52 bytes, or more elements than 64 bits count")]
    TooLarge,
    /// Too many levels.
    #[error("the datatype would nest {depth} loops, and at most {limit} are possible: describe it in fewer levels", limit = super::MAX_DEPTH)]
    TooDeep {
        /// Levels asked for.
        depth: u32,
    },
    /// A subarray that is not within its array.
    #[error("dimension {dimension}: {count} elements from {start} on are not within {len}")]
    Subarray {
        /// Which dimension, from 0.
        dimension: usize,
        /// First element.
        start: u64,
        /// Number of elements.
        count: u64,
        /// Elements of the array.
        len: u64,
    },
    /// The parameters of a subarray are of different lengths.
    #[error(
        "a subarray needs as many counts and starts as its array has dimensions: {sizes}, not {counts} and {starts}"
    )]
    Dimensions {
        /// Number of sizes.
        sizes: usize,
        /// Number of counts.
        counts: usize,
        /// Number of starts.
        starts: usize,
    },
}

/// Why the bytes of a program are refused. Told before anything of it is run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// These are not a program, or one of another version.
    #[error("not a program of version {version}", version = super::encode::VERSION)]
    Version,
    /// The bytes end within the program, or go on behind it.
    #[error("the program does not end where its bytes end")]
    Length,
    /// It is longer than [`MAX_PROGRAM`](super::MAX_PROGRAM) bytes.
    #[error("a program of {len} bytes, and at most {limit} are read: describe it in fewer blocks", limit = super::MAX_PROGRAM)]
    TooLong {
        /// Of the program, in bytes.
        len: u64,
    },
    /// A number that is not possible there.
    #[error("byte {0} of the program: an impossible number")]
    Number(usize),
    /// An instruction that does not exist.
    #[error("byte {0} of the program: no instruction")]
    Instruction(usize),
    /// A call of a routine that does not come later: programs have no recursion.
    #[error("routine {routine} of the program calls routine {called}")]
    Call {
        /// Who calls.
        routine: u32,
        /// Who is called.
        called: u32,
    },
    /// What the program does is not what its header declares.
    #[error("the program does not do what its header declares: {0}")]
    Declared(&'static str),
    /// It is too large or too deep.
    #[error(transparent)]
    Datatype(#[from] DatatypeError),
}

/// Why a transfer between layouts is refused. No byte was moved.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::{Datatype, Layout, TransferError, redistribute};
///
/// let (words, bytes) = (Datatype::of::<u32>(), Datatype::of::<u8>());
/// let (source, mut target) = ([1; 8], [0; 8]);
/// // Two words are not eight bytes, though they are as long.
/// let refused = redistribute(&mut target, &Layout::new(&words, 2), &source, &Layout::new(&bytes, 8));
/// assert!(matches!(refused, Err(TransferError::Signature { .. })));
/// let refused = redistribute(&mut target, &Layout::new(&bytes, 8), &source, &Layout::new(&bytes, 8).at(1));
/// assert!(matches!(refused, Err(TransferError::OutOfBounds { .. })));
/// assert_eq!(target, [0; 8]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The layouts have different elements.
    #[error(
        "the source has {source_signature}, the target {target_signature}: describe the same elements on both sides"
    )]
    Signature {
        /// Of the source.
        source_signature: Box<Signature>,
        /// Of the target.
        target_signature: Box<Signature>,
    },
    /// A layout reaches out of its memory.
    #[error("the layout of the {side} covers bytes {low}..{high} of a memory of {len} bytes")]
    OutOfBounds {
        /// Which layout.
        side: Side,
        /// First byte.
        low: i128,
        /// Behind the last byte.
        high: i128,
        /// Length of the memory in bytes.
        len: u64,
    },
    /// So many of them are not possible.
    #[error("{count} elements of the {side}'s datatype are more than 64 bits count")]
    Count {
        /// Which layout.
        side: Side,
        /// How many.
        count: u64,
    },
    /// A layout names more bytes than its rank's part of the window, or its region, has, and so some of them several times.
    #[error("the layout names {size} bytes of a memory of {len} bytes: elements must not overlap there")]
    Overlapping {
        /// Bytes of the layout.
        size: u64,
        /// Of the memory.
        len: u64,
    },
    /// Its owner would refuse the program of a layout, for it is longer than [`MAX_PROGRAM`](super::MAX_PROGRAM) bytes.
    #[error("the layout takes a program of {len} bytes, and owners read at most {limit}: use several layouts of fewer blocks", limit = super::MAX_PROGRAM)]
    Program {
        /// Of the program, in bytes.
        len: u64,
    },
    /// The payload is not as long as the layout.
    #[error("a payload of {len} bytes does not fill a layout of {size} bytes")]
    Length {
        /// Of the payload, in bytes.
        len: u64,
        /// Of the layout, in bytes.
        size: u64,
    },
    /// A message that was not sent with a layout.
    #[error("the message does not say which elements it has: send it with `send_typed`")]
    Untyped,
    /// A segment of an exported memory could not be attached. What lies before it may have been moved.
    #[error("segment {0} of the exported memory cannot be attached")]
    Segment(u64),
}

/// Why a put or a get between layouts was refused or failed.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::RmaError;
/// use posthaste::datatype::{Datatype, Layout, TypedError};
/// let window = job.shmalloc::<u8>(8).await?;
/// let byte = Datatype::of::<u8>();
/// let layout = Layout::new(&byte, 4);
/// let nobody = posthaste::Rank(1000);
/// // What was wrong with the layouts, or what became of the put.
/// match window.put_typed(nobody, &layout, &[1_u8; 4], &layout).await {
///     Err(TypedError::Rma(RmaError::UnknownRank { rank, .. })) => assert_eq!(rank, nobody),
///     other => panic!("{other:?}"),
/// }
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TypedError {
    /// The layouts do not match, or not their memories. No byte was moved.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// As for other puts and gets.
    #[error(transparent)]
    Rma(#[from] RmaError),
}

impl From<Fault> for TypedError {
    fn from(fault: Fault) -> Self {
        TypedError::Rma(fault.into())
    }
}

/// One of the layouts of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Where the data comes from.
    Source,
    /// Where it goes to.
    Target,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Source => "source",
            Side::Target => "target",
        })
    }
}
