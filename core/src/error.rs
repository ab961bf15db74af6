//! What can go wrong, one enum per kind of operation.

use crate::ids::{ContextId, ProtocolId, Rank, WindowId};
use thiserror::Error;

/// A collective operation as a rank called it: what all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// A barrier.
    Barrier,
    /// The gathering of a blob of this many bytes from each rank.
    AllGather(u32),
    /// The making of a window.
    Shmalloc,
    /// The freeing of that window.
    Free(WindowId),
    /// A broadcast of a vector of so many bytes.
    Broadcast(u32),
    /// A reduction, at one rank, of vectors of so many bytes.
    Reduce(u32),
    /// A reduction, on all ranks, of vectors of so many bytes.
    AllReduce(u32),
    /// The gathering, at one rank, of a block of this many bytes from each rank.
    Gather(u32),
    /// The scattering of a block of this many bytes to each rank.
    Scatter(u32),
    /// An all-to-all exchange of blocks of this many bytes; 0 if they differ.
    AllToAll(u32),
    /// A reduction of which each rank gets a block of this many bytes.
    ReduceScatter(u32),
}

impl std::fmt::Display for Collective {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Collective::Barrier => f.write_str("barrier"),
            Collective::AllGather(bytes) => write!(f, "all_gather of {bytes} bytes"),
            Collective::Shmalloc => f.write_str("shmalloc"),
            Collective::Free(window) => write!(f, "free of {window}"),
            Collective::Broadcast(bytes) => write!(f, "broadcast of {bytes} bytes"),
            Collective::Reduce(bytes) => write!(f, "reduce of {bytes} bytes"),
            Collective::AllReduce(bytes) => write!(f, "allreduce of {bytes} bytes"),
            Collective::Gather(bytes) => write!(f, "gather of {bytes} bytes"),
            Collective::Scatter(bytes) => write!(f, "scatter of {bytes} bytes"),
            Collective::AllToAll(bytes) => write!(f, "alltoall of {bytes} bytes"),
            Collective::ReduceScatter(bytes) => write!(f, "reduce_scatter of {bytes} bytes"),
        }
    }
}

/// Why a rank counts as lost ([`Fault::PeerLost`]), as far as this rank can know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossCause {
    /// Its process has ended: the kernel, or whoever had started it, said so.
    Exited,
    /// Its connection ended without a goodbye, as connections of a process that dies do.
    Disconnected,
    /// Its connection broke with this error of the system, such as a reset.
    Broken(std::io::ErrorKind),
    /// Its host has not answered for as long as the settings allow.
    Silent,
    /// It could not be connected to in time, or had given this rank up before.
    Unreachable,
    /// This side had no descriptor left to connect with: its process had as many files open as it may (`RLIMIT_NOFILE`), so
    /// many; without a number, the system had.
    NoDescriptor(Option<u64>),
    /// Another rank of the job, or its launcher, told so.
    Told,
}

impl std::fmt::Display for LossCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LossCause::Exited => f.write_str("its process has ended"),
            LossCause::Disconnected => f.write_str("its connection ended without a goodbye"),
            LossCause::Broken(kind) => write!(f, "its connection broke: {kind}"),
            LossCause::Silent => f.write_str("its host does not answer any more"),
            LossCause::Unreachable => f.write_str(
                "it could not be connected to in time, or had given this rank up before, as its log says: if it lives, see whether a firewall, POSTHASTE_TCP_INTERFACE or POSTHASTE_TCP_PORTS is in the way",
            ),
            LossCause::NoDescriptor(Some(limit)) => write!(
                f,
                "this side may open {limit} files and had no descriptor left to connect with: raise RLIMIT_NOFILE (`ulimit -n`)"
            ),
            LossCause::NoDescriptor(None) => f.write_str(
                "the system had no descriptor left to connect with: raise its limit of open files (`fs.file-max`)",
            ),
            LossCause::Told => f.write_str("the others say so"),
        }
    }
}

/// Why a started operation ended without a value. Every started operation ends exactly once, with its value
/// or with one of these.
///
/// # Examples
/// ```
/// use posthaste_core::{Fault, Rank};
///
/// // Whose fault it is tells whether others can go on.
/// assert_eq!(Fault::PeerLost(Rank(3)).peer(), Some(Rank(3)));
/// assert_eq!(Fault::DeadlineExceeded.peer(), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// The peer's process exited without leaving the job, or its connection is gone.
    #[error("peer {0} is lost: its process ended without leaving the job, or its connection is gone")]
    PeerLost(Rank),
    /// The peer left the job in order.
    #[error("peer {0} has left the job")]
    PeerClosed(Rank),
    /// The peer wrote something impossible, sent without credit, or asked without end and took no answers, and was cut off.
    #[error("peer {0} is corrupt: it sent what no rank of a job sends, and was cut off")]
    PeerCorrupt(Rank),
    /// The operation's own deadline passed; it may still take effect.
    #[error("the operation's deadline passed")]
    DeadlineExceeded,
    /// This side of the job was closed, or its runtime shut down.
    #[error("the job is closed on this rank")]
    Shutdown,
    /// The target is ready and has no protocol of that name.
    #[error("peer {0} has no protocol of that name: register it there before its first barrier")]
    NoSuchProtocol(Rank),
    /// The target registered the name with another message type.
    #[error("peer {0} registered that name with a different message type")]
    SchemaMismatch(Rank),
    /// The handler on the target panicked; the target goes on.
    #[error("the handler on peer {0} panicked")]
    RemotePanicked(Rank),
    /// The target runs as many handlers of that protocol as it allows, or has as many bytes of answers for this rank waiting as it
    /// allows (`POSTHASTE_ANSWER_BYTES`); try again later.
    #[error(
        "peer {0} is busy: it runs as many handlers as it may, or too many of its answers to this rank wait"
    )]
    Busy(Rank),
    /// The target could not decode the request.
    #[error("peer {0} could not decode the message")]
    Undecodable(Rank),
    /// The target carried the request out and could not encode its answer.
    #[error("rank {0} could not encode its answer, as its log says")]
    Unencodable(Rank),
    /// Memory for the operation could not be had.
    #[error("out of memory: {0}")]
    OutOfMemory(&'static str),
    /// A put or a get of memory that the target does not have.
    #[error("peer {0} has no such memory: it was freed, or the key is not one that the peer told")]
    NoSuchMemory(Rank),
    /// The answer to a request is longer than a message may be: it was not sent.
    #[error("the answer of rank {0} is longer than a message may be: let it send it in parts")]
    AnswerTooLong(Rank),
    /// What was asked for belongs to an earlier incarnation of a rank, which died; the rank was started again since, and
    /// the new incarnation has nothing of it.
    #[error(
        "the handle belongs to incarnation {held} of rank {rank}, which is incarnation {now} by now: have that one make \
         another"
    )]
    StaleHandle {
        /// The rank.
        rank: Rank,
        /// The incarnation that the handle is of; the first one is 0.
        held: u32,
        /// The rank's incarnation now.
        now: u32,
    },
    /// Two ranks called different collective operations where both should have called the same.
    #[error("collective calls do not match: {}", mismatch(*.ranks, *.calls))]
    CollectiveMismatch {
        /// The two ranks.
        ranks: [Rank; 2],
        /// What each of them called.
        calls: [Collective; 2],
    },
    /// A rank called a collective operation with values that it cannot be carried out with, and takes no part in it.
    #[error("rank {rank} called {call} with values of a length that does not fit, and takes no part in it")]
    CollectiveRefused {
        /// The rank.
        rank: Rank,
        /// What it called.
        call: Collective,
    },
    /// A rank could not carry a collective operation out, as the executor that its group was given panicked, or gave a turn that
    /// there is not, or not yet, or no more.
    #[error(
        "rank {rank} could not carry out {call}: its group's executor failed, as the log of that rank says"
    )]
    ExecutorFailed {
        /// The rank.
        rank: Rank,
        /// What was called.
        call: Collective,
    },
    /// A member of a group dropped it, or a persistent collective of it, before an operation that others called.
    #[error(
        "rank {0} has dropped the group, or a persistent collective of it: all members call its operations, and drop it after the same one"
    )]
    GroupLeft(Rank),
}

impl Fault {
    /// The peer the fault is about, if it is about one.
    #[must_use]
    pub fn peer(&self) -> Option<Rank> {
        match *self {
            Fault::PeerLost(rank)
            | Fault::PeerClosed(rank)
            | Fault::PeerCorrupt(rank)
            | Fault::NoSuchProtocol(rank)
            | Fault::SchemaMismatch(rank)
            | Fault::RemotePanicked(rank)
            | Fault::Busy(rank)
            | Fault::Undecodable(rank)
            | Fault::Unencodable(rank)
            | Fault::NoSuchMemory(rank)
            | Fault::AnswerTooLong(rank)
            | Fault::CollectiveRefused { rank, .. }
            | Fault::ExecutorFailed { rank, .. }
            | Fault::GroupLeft(rank)
            | Fault::StaleHandle { rank, .. } => Some(rank),
            _ => None,
        }
    }
}

/// Why a send was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendError {
    /// The job has no such rank.
    #[error("rank {rank} does not exist: the job has ranks 0 to {last}", last = .size - 1)]
    UnknownRank {
        /// The rank that was named.
        rank: Rank,
        /// Number of ranks of the job.
        size: u32,
    },
    /// The ranks of the job have no such context.
    #[error("context {context} does not exist: each rank of the job has contexts 0 to {last}", last = .contexts - 1)]
    UnknownContext {
        /// The context that was named.
        context: ContextId,
        /// Number of contexts of each client.
        contexts: u16,
    },
    /// Message info is limited to 7 quads, 112 bytes.
    #[error("message info of {len} bytes is too long: at most {max} bytes (7 quads)", max = crate::descriptor::MAX_INFO)]
    InfoTooLong {
        /// Length that was given, in bytes.
        len: usize,
    },
    /// The message is longer than a message may be.
    #[error("message of {len} bytes is too long: at most {max} bytes")]
    TooLong {
        /// Length that was given, in bytes.
        len: u64,
        /// Limit in bytes.
        max: u64,
    },
    /// The protocol was not registered on this messager.
    #[error("{0} is not registered here")]
    Unregistered(ProtocolId),
    /// The send was started and ended with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Why a try was refused; the payload comes back.
///
/// # Examples
/// ```
/// use posthaste_core::TrySendError;
///
/// // Whatever went wrong, the payload is not lost.
/// let refused = TrySendError::Full(vec![1, 2, 3]);
/// assert!(matches!(refused, TrySendError::Full(_)));
/// assert_eq!(refused.into_payload(), [1, 2, 3]);
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrySendError<T> {
    /// There is no room now; nothing was sent.
    #[error("no room towards the peer at the moment")]
    Full(T),
    /// The send cannot succeed.
    #[error("{error}")]
    Failed {
        /// Why.
        error: SendError,
        /// What was to be sent.
        payload: T,
    },
}

impl<T> TrySendError<T> {
    /// The payload that was to be sent.
    pub fn into_payload(self) -> T {
        match self {
            TrySendError::Full(payload) | TrySendError::Failed { payload, .. } => payload,
        }
    }

    /// Why the send cannot succeed; `None`: there is no room now.
    pub fn into_error(self) -> Option<SendError> {
        match self {
            TrySendError::Full(_) => None,
            TrySendError::Failed { error, .. } => Some(error),
        }
    }
}

/// Why a put, a get or a window operation was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RmaError {
    /// There is no such rank: in the job, or in the group that owns the window.
    #[error("rank {rank} does not exist here: there are ranks 0 to {last}", last = .size - 1)]
    UnknownRank {
        /// The rank that was named, as the window counts.
        rank: Rank,
        /// Number of ranks of the job, or of the group.
        size: u32,
    },
    /// The members of the group could not agree upon it, for this reason.
    #[error("the members of the group cannot agree upon it: {0}")]
    Refused(String),
    /// The access does not lie within the target's part.
    #[error("bytes {offset}..{end} are outside the part of rank {rank}, which has {len} bytes", end = (*.offset as u128) + (*.count as u128))]
    OutOfRange {
        /// The rank whose memory was named.
        rank: Rank,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        count: u64,
        /// Length of the part in bytes.
        len: u64,
    },
    /// A slice of a region ends before it begins.
    #[error("bytes {first}..{end} of a region end before they begin")]
    Backwards {
        /// First byte.
        first: u64,
        /// Behind the last byte.
        end: u64,
    },
    /// An atomic operation works on words that lie at multiples of their length.
    #[error(
        "byte {offset} of the part of rank {rank} is no multiple of {len}: a word of {len} bytes cannot be there"
    )]
    Misaligned {
        /// The rank whose memory was named.
        rank: Rank,
        /// First byte.
        offset: u64,
        /// Length of the word in bytes.
        len: u64,
    },
    /// The data of a put and its signal would go to different ranks: a rank's number is one in the group of each window.
    #[error(
        "the data goes to rank {data} of the job and its signal to rank {signal}: name a word of the same rank, as windows \
         of one group do by the same number"
    )]
    SignalElsewhere {
        /// Where the data goes.
        data: Rank,
        /// Where the signal goes.
        signal: Rank,
    },
    /// A region is memory of one rank.
    #[error("the region is memory of rank {owner}, and not of rank {rank}")]
    NotTheOwner {
        /// The rank that was named.
        rank: Rank,
        /// Whose memory it is.
        owner: Rank,
    },
    /// The window was freed or never made.
    #[error("{0} does not exist (any more)")]
    NoSuchWindow(WindowId),
    /// A context of another client was named.
    #[error(
        "the memory belongs to another client of this process than the context: use a context of the client that made it"
    )]
    OtherClient,
    /// The region's device cannot be reached from here.
    #[error("memory of rank {0} cannot be reached from here")]
    Unreachable(Rank),
    /// The operation was started and ended with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why memory could not be had. Told before the memory is touched.
///
/// # Examples
/// ```
/// use posthaste_core::inprocess::{InProcessFabric, Limits};
/// use posthaste_core::{ClientId, JobShape, MemoryError, Rank};
///
/// let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
/// let fabric = InProcessFabric::with_limits(shape, Limits { segment: 1 << 20, ..Limits::default() });
/// let device = fabric.device(ClientId(0), Rank(0));
/// // The error says which limit was met, and what can be done about it.
/// let error = device.allocate(1 << 21).unwrap_err();
/// assert!(matches!(error, MemoryError::Segment { segment: 0x10_0000, .. }));
/// assert!(error.limit().contains("POSTHASTE_SEGMENT"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The rank's part of the arena is used up.
    #[error("{wanted} bytes do not fit into this rank's segment of {segment} bytes: raise POSTHASTE_SEGMENT")]
    Segment {
        /// Bytes asked for.
        wanted: u64,
        /// Length of the segment in bytes.
        segment: u64,
    },
    /// The job's own limit.
    #[error(
        "{wanted} bytes exceed the job's limit of {limit} bytes ({used} in use): raise POSTHASTE_MEMORY_LIMIT"
    )]
    JobLimit {
        /// Bytes asked for.
        wanted: u64,
        /// Limit in bytes.
        limit: u64,
        /// Bytes in use.
        used: u64,
    },
    /// The control group's limit.
    #[error("{wanted} bytes exceed what the memory cgroup has left ({left} bytes): raise memory.max")]
    Cgroup {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes left.
        left: u64,
    },
    /// The machine's memory.
    #[error("{wanted} bytes exceed the memory available on this host ({available} bytes)")]
    Host {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes available.
        available: u64,
    },
    /// The kernel refused.
    #[error("the kernel refused to commit {wanted} bytes of shared memory: {reason}")]
    Refused {
        /// Bytes asked for.
        wanted: u64,
        /// What the kernel said.
        reason: std::io::ErrorKind,
    },
}

impl MemoryError {
    /// The limit that was met, and what to do: for errors that have no room for figures.
    #[must_use]
    pub fn limit(&self) -> &'static str {
        match self {
            MemoryError::Segment { .. } => "this rank's segment is used up: raise POSTHASTE_SEGMENT",
            MemoryError::JobLimit { .. } => "the job's limit is met: raise POSTHASTE_MEMORY_LIMIT",
            MemoryError::Cgroup { .. } => "the memory cgroup has too little left: raise memory.max",
            MemoryError::Host { .. } => "the host has too little available: start fewer or smaller programs",
            MemoryError::Refused { .. } => {
                "the kernel refused to commit shared memory; the log has its reason"
            }
        }
    }
}

/// Why a `call` failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CallError {
    /// The request could not be sent.
    #[error(transparent)]
    Send(SendError),
    /// The request was sent and ended with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The request or the reply does not encode or decode as its type.
    #[error("cannot {what} the message: {reason}")]
    Codec {
        /// `encode` or `decode`.
        what: &'static str,
        /// What the codec said.
        reason: String,
    },
}

impl From<SendError> for CallError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Fault(fault) => CallError::Fault(fault),
            other => CallError::Send(other),
        }
    }
}

/// Why a protocol could not be registered.
///
/// # Examples
/// ```
/// use posthaste_core::{Protocol, RegisterError, Scope, protocol::Incoming, protocol::Registry};
/// use std::sync::Arc;
///
/// struct Named(&'static str);
/// impl Protocol for Named {
///     fn name(&self) -> &str {
///         self.0
///     }
///     fn on_message(&self, _scope: &mut Scope<'_>, _message: Incoming<'_>) {}
/// }
///
/// let registry = Registry::default();
/// assert!(registry.register(Arc::new(Named("sum"))).is_ok());
/// assert_eq!(registry.register(Arc::new(Named("sum"))), Err(RegisterError::Taken("sum".into())));
/// assert!(matches!(registry.register(Arc::new(Named(""))), Err(RegisterError::BadName(_))));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The name is taken.
    #[error("a protocol named {0:?} is already registered with this client")]
    Taken(String),
    /// The name is empty or too long.
    #[error("protocol name {0:?} must have 1 to 64 bytes")]
    BadName(String),
    /// Too many protocols.
    #[error("a client can register at most {0} protocols")]
    TooMany(usize),
    /// The client is closed.
    #[error("the job is closed on this rank")]
    Closed,
}

/// Why a device could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// What was found is not what was expected.
    #[error("{subject}: {problem}")]
    Mismatch {
        /// What was looked at.
        subject: &'static str,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

fn mismatch([one, other]: [Rank; 2], [its, others]: [Collective; 2]) -> String {
    if its == others {
        return format!("ranks {one} and {other} both called {its}, with different arguments");
    }
    format!("rank {one} called {its} where rank {other} called {others}")
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_fault_stays_small() {
        // It is part of every outcome and every error.
        assert!(size_of::<Fault>() <= 32, "{}", size_of::<Fault>());
    }

    #[test]
    fn a_mismatch_names_both_ranks_and_both_calls() {
        let calls = [Collective::Barrier, Collective::Free(WindowId(7))];
        let fault = Fault::CollectiveMismatch { ranks: [Rank(3), Rank(0)], calls };
        let text =
            "collective calls do not match: rank 3 called barrier where rank 0 called free of window 7";
        assert_eq!(fault.to_string(), text);
        let alike = [Collective::AllReduce(8); 2];
        let fault = Fault::CollectiveMismatch { ranks: [Rank(3), Rank(0)], calls: alike };
        let text = format!(
            "collective calls do not match: ranks 3 and 0 both called {}, with different arguments",
            alike[0]
        );
        assert_eq!(fault.to_string(), text);
    }
}
