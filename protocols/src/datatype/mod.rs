//! Non-contiguous data: datatypes, the programs that they compile to, and the machines that run them.
//!
//! A [`Datatype`] says where the elements of one object lie, relative to its base. It compiles to a data gather/scatter
//! program ([DGSP](program), G01), which is small, portable and checked before it is run, so that one program serves
//! many objects and may come from a peer. A [`Machine`] (DGSM, G02) runs it over a buffer and packs into, or unpacks
//! from, staging memory, as many bytes at a time as the caller likes. [`redistribute`] (DGS-RM, G03) runs two of them
//! against each other and copies straight between two layouts, which need the same elements and not the same shape
//! (G07).
//!
//! ```text
//!   builder ─▶ body, the normal form ─▶ program ─▶ bytes ─▶ a peer: checked ─┐
//!                                          │                                 │
//!                                          └──────▶ plan ◀───────────────────┘
//!                                                    │ cursor: where in it
//!                            gather, scatter ◀── machine, pair ──▶ layout to layout
//! ```
//!
//! # Examples
//! ```
//! use posthaste_protocols::datatype::{Datatype, Layout, redistribute};
//!
//! let matrix: Vec<u8> = (0..100).collect(); // 10 × 10, row by row
//! let column = Datatype::of::<u8>().vector(10, 1, 10)?;
//! let row = Datatype::of::<u8>().contiguous(10)?;
//! let mut out = vec![0; 100];
//! // Column 3 becomes row 5.
//! redistribute(&mut out, &Layout::new(&row, 1).at(50), &matrix, &Layout::new(&column, 1).at(3))?;
//! assert_eq!(out[50..60], [3, 13, 23, 33, 43, 53, 63, 73, 83, 93]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod body;
mod builder;
mod cursor;
mod decode;
mod element;
mod encode;
mod error;
mod heuristic;
mod machine;
mod pair;
mod plan;
pub mod program;
mod redistribute;
mod segments;
mod send;
mod signature;

pub use access::LayoutAccess;
pub(crate) use access::{Request, chunk, put_chunk};
pub use body::{Block, MAX_DEPTH};
pub use decode::MAX_PROGRAM;
pub use element::{ElementKind, Elementary};
pub use error::{DatatypeError, ProgramError, Side, TransferError, TypedError};
pub use heuristic::{Method, Thresholds};
pub use machine::Machine;
pub use posthaste_core::memory::{Source, Target};
pub(crate) use redistribute::checked;
pub use redistribute::{Layout, redistribute, redistribute_staged, redistribute_with};
pub use segments::{Export, Segments, SlicedMemory, pull, push};
pub(crate) use send::pack;
pub use signature::Signature;

use body::{Body, Facts};
use plan::Plan;
use program::Instruction;
use std::sync::{Arc, OnceLock};

/// Where an element of a datatype is said to begin and how far the next one is away, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Of an element, from its base.
    pub lower: i64,
    /// From one element to the next.
    pub extent: i64,
}

/// Where the elements of an object lie in memory, and which they are. Cheap to clone; never changes.
///
/// All offsets are relative to the base of an object. See the [module](self) for what can be done with it.
///
/// # Examples
/// ```
/// use posthaste_protocols::datatype::Datatype;
///
/// // Built from the inside out: a word, every second one of three, and two of those rows.
/// let word = Datatype::of::<u32>();
/// let row = word.vector(3, 1, 2)?;
/// let rows = row.resized(0, 32)?.contiguous(2)?;
/// assert_eq!((rows.size(), rows.extent(), rows.chunks()), (24, 64, 6));
/// assert!(!rows.is_contiguous());
/// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
/// ```
#[derive(Clone)]
pub struct Datatype(Arc<Inner>);

struct Inner {
    body: Arc<Body>,
    bounds: Bounds,
    signature: Signature,
    program: OnceLock<Vec<Instruction>>,
    plan: OnceLock<Plan>,
}

impl Datatype {
    fn from_parts(body: Arc<Body>, bounds: Bounds, signature: Signature) -> Datatype {
        let (program, plan) = (OnceLock::new(), OnceLock::new());
        Datatype(Arc::new(Inner { body, bounds, signature, program, plan }))
    }

    /// Reads a program that [`to_bytes`](Self::to_bytes) wrote, perhaps of a peer. Nothing in it is believed: what it
    /// does is derived from its instructions and compared with what it declares. What is made of it takes some 30 times
    /// its length at most.
    ///
    /// # Errors
    /// If it is not a program of this version, longer than [`MAX_PROGRAM`], or one that could not have been compiled.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    ///
    /// let column = Datatype::of::<f64>().vector(100, 1, 100)?;
    /// let bytes = column.to_bytes(); // short, however many elements there are
    /// assert!(bytes.len() < 200);
    /// let same = Datatype::from_bytes(&bytes)?;
    /// assert_eq!((same.size(), same.signature()), (column.size(), column.signature()));
    /// // What no compiler has written is refused before anything of it is run.
    /// assert!(Datatype::from_bytes(&bytes[1..]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> Result<Datatype, ProgramError> {
        decode::decode(bytes)
    }

    /// The program in a portable form: a few bytes for each of its blocks, routines and calls. If it is longer than
    /// [`MAX_PROGRAM`], [`from_bytes`](Self::from_bytes) refuses it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        encode::encode(self, self.program())
    }

    /// The program.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::{Block, Datatype, program::Instruction};
    ///
    /// let column = Datatype::of::<u8>().vector(10, 1, 10)?;
    /// // One block, ten times, ten bytes apart.
    /// let expected = [
    ///     Instruction::Copy(Block { offset: 0, len: 1 }),
    ///     Instruction::Iterate { count: 10, stride: 10 },
    /// ];
    /// assert!(column.program().ends_with(&expected[..]), "{:?}", column.program());
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    #[must_use]
    pub fn program(&self) -> &[Instruction] {
        self.0.program.get_or_init(|| program::compile(&self.0.body))
    }

    /// Bytes of an element that belong to it.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.body.facts.size
    }

    /// Distance from one element to the next, in bytes.
    #[must_use]
    pub fn extent(&self) -> i64 {
        self.0.bounds.extent
    }

    /// Lower bound and extent.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        self.0.bounds
    }

    /// First byte of an element, and the one behind its last, from its base.
    ///
    /// # Examples
    /// ```
    /// use posthaste_protocols::datatype::Datatype;
    ///
    /// // Columns 3 to 5 of a row of 8: the extent is that of the row, the bytes are fewer.
    /// let part = Datatype::of::<u16>().subarray(&[8], &[3], &[3])?;
    /// assert_eq!((part.bounds().lower, part.extent()), (0, 16));
    /// assert_eq!(part.true_bounds(), (6, 12));
    /// # Ok::<(), posthaste_protocols::datatype::DatatypeError>(())
    /// ```
    #[must_use]
    pub fn true_bounds(&self) -> (i64, i64) {
        (self.0.body.facts.low, self.0.body.facts.high)
    }

    /// Which elements it has.
    #[must_use]
    pub fn signature(&self) -> Signature {
        self.0.signature
    }

    /// Contiguous chunks of an element.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.0.body.facts.chunks
    }

    /// Mean length of a contiguous chunk in bytes, rounded down; 0 if there are none.
    #[must_use]
    pub fn mean_chunk(&self) -> u64 {
        self.size().checked_div(self.chunks()).unwrap_or(0)
    }

    /// Whether elements in sequence are one run of bytes.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let Facts { size, low, chunks, .. } = self.0.body.facts;
        size == 0 || (chunks == 1 && low == 0 && self.extent() == size as i64)
    }

    /// First byte of `count` elements, and the one behind the last, from the base of the first.
    #[must_use]
    pub fn span(&self, count: u64) -> (i128, i128) {
        if count == 0 || self.size() == 0 {
            return (0, 0);
        }
        let (low, high) = self.true_bounds();
        let last = i128::from(self.extent()) * (i128::from(count) - 1);
        (i128::from(low) + last.min(0), i128::from(high) + last.max(0))
    }

    fn body(&self) -> &Arc<Body> {
        &self.0.body
    }

    fn facts(&self) -> Facts {
        self.0.body.facts
    }

    fn plan(&self) -> &Plan {
        self.0.plan.get_or_init(|| Plan::new(&self.0.body))
    }
}

impl std::fmt::Debug for Datatype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Datatype")
            .field("size", &self.size())
            .field("bounds", &self.bounds())
            .field("chunks", &self.chunks())
            .field("signature", &format_args!("{}", self.signature()))
            .finish_non_exhaustive()
    }
}
