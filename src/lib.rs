//! Asynchronous active messages, one-sided memory access and replayable communication for Tokio.
//!
//! Ranks (processes) of a job send each other messages that name their handler, put into and get from each other's
//! memory, and call each other's services; every operation is a future. The [`guide`] says what they promise: order, progress,
//! credit, what happens when something fails, where ranks run, and all settings.
//!
//! ```no_run
//! # async fn run() -> posthaste::Result<()> {
//! let job = posthaste::join_or_local(4).await?;
//! let me = job.rank();
//! let hello = job.register("hello", move |m: posthaste::Message, _: &mut posthaste::Scope| println!("{me}: {}", m.text()))?;
//! hello.send(me.next(job.size()), format!("greetings from {me}")).await?;
//! job.barrier().await?;
//! job.leave().await
//! # }
//! ```

#![forbid(unsafe_code)]

mod error;
#[doc = include_str!("../docs/guide.md")]
pub mod guide {}
mod herald;
mod job;
mod join;
pub mod launcher;
mod place;
#[cfg(test)]
mod tests;

pub use bytes::Bytes;
pub use error::{Error, JoinError, Result};
pub use job::Job;
pub use join::{join, join_or_local, join_or_local_with, solo, solo_with};
/// Page memory of a peer that a message lies in: read in place, given back when dropped.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (page, mut pages) = job.stream("page")?;
/// page.send(job.rank(), vec![3; 100_000]).await?;
/// let message = pages.recv().await.expect("the job goes on");
/// let lease: posthaste::Lease = message.into_lease().expect("longer messages lie in a page");
/// let sum = u64::from_ne_bytes([3; 8]).wrapping_mul(100_000 / 8);
/// assert_eq!((lease.len(), lease.memory().sum_words()), (100_000, sum));
/// # job.leave().await
/// # }
/// ```
pub use posthaste_core::Lease;
/// Page memory to be filled in place and sent without a copy.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let (page, mut pages) = job.stream("page")?;
/// let loan: posthaste::Loan = page.loan(100_000).expect("pages are free");
/// loan.memory().write(&[7; 100_000]);
/// page.send(job.rank(), loan).await?;
/// let message = pages.recv().await.expect("the job goes on");
/// assert!(message.into_bytes().iter().all(|byte| *byte == 7));
/// # job.leave().await
/// # }
/// ```
pub use posthaste_core::Loan;
pub use posthaste_core::engine::{FifoError, FifoOptions, FifoStatus, PatternError};
pub use posthaste_core::memory::{LeasedPage, LoanedPage};
pub use posthaste_core::{
    CallError, Caps, ClientId, Collective, ConnectionId, Context, ContextId, Device, Endpoint, Face, Fault,
    Handle, JobShape, LossCause, MemoryError, Messager, Protocol, Rank, RegisterError, RmaError, Scope,
    SendError, Stats, Sysdep, TrySendError,
};
pub use posthaste_protocols::{
    ActiveMessage, Algorithm, AtomicFetch, AtomicUpdate, BadMembers, Buffer, Call, CollectiveError,
    Collectives, Connection, ConnectionManager, Control, Counter, Element, EncodedMessage, FetchEach, Fifo,
    Fill, First, Get, GetInto, GetTo, GetTyped, Group, InFlight, Liveness, ManyToMany, Message,
    MessageStream, Multisend, MultisendError, Namespace, One, OwnedMessage, OwnedRegion, Part, Pattern, Put,
    PutCopy, PutElement, PutSignal, PutSlice, PutTyped, Received, Recorder, Reduce, Region, RegionKey,
    RegionSlice, RemoteRegion, Replay, SendMessage, SendSlice, SendSliceWith, Service, ServiceOptions,
    Signal, TypedMessage, UpdateEach, Window, Within, Word, WordIndex, WordUpdate, Words, within,
};

/// What schedules of one's own, and other types than numbers, need of the collective operations.
pub use posthaste_protocols::collective;
pub use posthaste_protocols::multisend::{ManyError, ReceiveMany, RestartableSend, SendMany};

/// Flush and fence of any context; those of the job's first one are [`Job::flush`] and [`Job::fence`].
pub use posthaste_protocols::flush;

/// Collectives that are recorded once and replayed.
pub use posthaste_protocols::persistent;

pub use posthaste_protocols::datatype::{self, Datatype};
/// The datatype of a `#[repr(C)]` struct, from its fields.
///
/// ```
/// use posthaste::structure;
/// #[repr(C)]
/// struct Cell {
///     kind: u8,
///     values: [f64; 2],
/// }
/// let cell = structure!(Cell { kind: u8, values: [f64; 2] })?;
/// assert_eq!((cell.size(), cell.extent()), (17, 24));
/// # Ok::<(), posthaste::datatype::DatatypeError>(())
/// ```
pub use posthaste_protocols::structure;

/// The parts beneath, for those who replace one of them.
pub mod components {
    pub use posthaste_core as core;
    pub use posthaste_protocols as protocols;
    pub use posthaste_shm as shm;
    pub use posthaste_tcp as tcp;
}
