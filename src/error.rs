//! The errors of the facade.

use posthaste_core::engine::{FifoError, PatternError};
use posthaste_core::{
    CallError, DeviceError, Fault, MemoryError, RegisterError, RmaError, SendError, TrySendError,
};
use posthaste_protocols::CollectiveError;
use posthaste_protocols::datatype::{DatatypeError, ProgramError, TransferError, TypedError};
use posthaste_protocols::multisend::ManyError;
use posthaste_protocols::persistent::PersistentError;
use std::fmt;
use thiserror::Error;

/// Why this process could not become part of a job.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// use posthaste::{Error, JoinError};
/// // There are not as many contexts in a job.
/// match posthaste::solo_with(1, u16::MAX).await {
///     Err(Error::Join(JoinError::Shape(why))) => assert!(!why.to_string().is_empty()),
///     other => panic!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// There is no job to join.
    #[error(
        "this process is not part of a job: no POSTHASTE_JOB in its environment. Start it with `posthaste run -n N -- PROGRAM`, \
         or ask for a local job with `posthaste::join_or_local(n)`, or for a job of one with `posthaste::solo()`"
    )]
    NoJob,
    /// The environment is missing parts or contradicts itself.
    #[error(transparent)]
    Environment(#[from] posthaste_launch::EnvError),
    /// What the launcher should have handed over was not there.
    #[error(transparent)]
    Descriptors(#[from] posthaste_launch::BrokerError),
    /// The descriptors of a local job could not be made.
    #[error(transparent)]
    Host(#[from] posthaste_launch::HostFdsError),
    /// The device could not be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The ranks could not be started.
    #[error(transparent)]
    Launch(#[from] posthaste_launch::LaunchError),
    /// There is no Tokio runtime, or it lacks what is needed.
    #[error("{0}")]
    Runtime(&'static str),
    /// The clients of the process are taken, or there are not as many.
    #[error(
        "client {wanted} is not there to be had: the job has {clients} client(s) and each is handed out once"
    )]
    Client {
        /// Which one.
        wanted: u16,
        /// How many the job has.
        clients: u16,
    },
    /// There is no arena for a job of that shape.
    #[error(transparent)]
    Shape(#[from] posthaste_shm::LayoutError),
    /// A number of the environment is larger than a job's may be.
    #[error("a rank has at most 65535 {what}, not {number}")]
    TooMany {
        /// Clients or contexts.
        what: &'static str,
        /// How many.
        number: u32,
    },
    /// The ranks did not find each other.
    #[error(transparent)]
    Meeting(#[from] posthaste_launch::MeetingError),
    /// The launcher that started this process could not be understood or reached.
    #[error(transparent)]
    Launcher(#[from] posthaste_launch::ForeignError),
    /// The ranks meet over the network, and nothing proves that they belong together.
    #[error(
        "the ranks that {launcher} started meet over the network and need a secret in common: write 64 hexadecimal \
         digits to a file of mode 0600 (`openssl rand -hex 32`) and name it in POSTHASTE_KEY_FILE on every rank, or \
         set POSTHASTE_KEY to them"
    )]
    NoKey {
        /// The launcher.
        launcher: &'static str,
    },
    /// This rank cannot listen for connections.
    #[error("{source}; {advice}")]
    Listen {
        /// What was tried, and what the system said.
        source: DeviceError,
        /// What to set otherwise.
        advice: &'static str,
    },
    /// An address to listen on could not be found.
    #[error("cannot listen on {wanted}: {problem}")]
    Interface {
        /// What was asked for, or what should be reached.
        wanted: String,
        /// What was seen, and what to do.
        problem: String,
    },
    /// Ranks are on several nodes and may use shared memory only.
    #[error(
        "POSTHASTE_DEVICE=shm, but not all ranks share this rank's memory: unset it, or start all ranks on one host"
    )]
    Unreachable,
    /// This rank was part of the job before, and died; it cannot come again.
    #[error(
        "rank {rank} was part of this job before, but the others do not listen for it to come again: start the job with \
         `posthaste run --restart`"
    )]
    Alone {
        /// This rank.
        rank: u32,
    },
    /// Sockets are to be used, but nobody tells the ranks of each other.
    #[error(
        "this rank is to talk over sockets, but its launcher was not told so, and POSTHASTE_RENDEZVOUS is not set: use \
         `posthaste run --device tcp`, or set POSTHASTE_DEVICE=tcp for the launcher, which hands it on"
    )]
    NoRendezvous,
    /// Ranks of this host have not come to where those meet that talk over sockets.
    #[error(
        "{0}. This rank has POSTHASTE_DEVICE=tcp: whichever rank of the host lacks it shares memory and does not come; \
         `posthaste run --device tcp` sets it for all"
    )]
    OtherDevice(#[source] posthaste_launch::MeetingError),
    /// Another rank said something that is not understood.
    #[error(
        "rank {rank} did not say {what} in a way that this version understands: all ranks need the same version"
    )]
    Stranger {
        /// Which rank.
        rank: u32,
        /// What it should have said.
        what: &'static str,
    },
    /// Another rank runs another version.
    #[error(
        "rank {rank} joins by version {said} of the protocol, this rank by {own}: build both from one source"
    )]
    Version {
        /// Which rank.
        rank: u32,
        /// Its version.
        said: u32,
        /// This rank's version.
        own: u32,
    },
    /// Another rank wants another number of clients or contexts.
    #[error(
        "rank {rank} has {} client(s) of {} context(s), this rank {} of {}: all ranks of a job have the same",
        said.clients, said.contexts, own.clients, own.contexts
    )]
    Disagree {
        /// Which rank.
        rank: u32,
        /// What it said.
        said: posthaste_core::JobShape,
        /// What this rank has.
        own: posthaste_core::JobShape,
    },
    /// Another rank gives, and expects, credit for other numbers of bytes.
    #[error(
        "rank {rank} has POSTHASTE_CREDIT_BYTES={said}, this rank {own}: set it to the same for all ranks of a job"
    )]
    CreditBytes {
        /// Which rank.
        rank: u32,
        /// What it said, in bytes.
        said: u64,
        /// What this rank has, in bytes.
        own: u64,
    },
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A protocol of the library's own could not be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

/// Any error of this library: what `main` returns.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// use posthaste::{Error, Fault, RmaError};
/// let window = job.shmalloc::<u32>(8).await?;
/// // Any error of the library becomes this one by `?`.
/// let write = async |index| Ok::<(), Error>(window.put(job.rank(), index, 1).await?);
/// write(7).await?;
/// match write(8).await {
///     Err(Error::Rma(RmaError::OutOfRange { len, .. })) => assert_eq!(len, 32), // in bytes
///     Err(Error::Rma(RmaError::Fault(Fault::PeerLost(rank)))) => panic!("rank {rank} died meanwhile"),
///     other => panic!("{other:?}"),
/// }
/// # job.leave().await
/// # }
/// ```
///
/// What a `main` returns is printed by its `Debug`: so that is the text, as `Display` gives it; `{:#?}` shows the parts.
#[derive(Error)]
#[non_exhaustive]
pub enum Error {
    /// See [`JoinError`].
    #[error(transparent)]
    Join(#[from] JoinError),
    /// See [`RegisterError`].
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// See [`SendError`].
    #[error(transparent)]
    Send(#[from] SendError),
    /// See [`CallError`].
    #[error(transparent)]
    Call(#[from] CallError),
    /// See [`RmaError`].
    #[error(transparent)]
    Rma(#[from] RmaError),
    /// See [`PatternError`](crate::PatternError).
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// See [`FifoError`](crate::FifoError).
    #[error(transparent)]
    Fifo(#[from] FifoError),
    /// There was no room for what was to be sent at once: see [`TrySendError::Full`](crate::TrySendError::Full).
    #[error("no room towards the peer at the moment: await the send, or try it again later")]
    Full,
    /// See [`MemoryError`].
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// See [`CollectiveError`](crate::CollectiveError).
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// See [`PersistentError`](crate::persistent::PersistentError).
    #[error(transparent)]
    Persistent(#[from] PersistentError),
    /// See [`MultisendError`](crate::MultisendError).
    #[error(transparent)]
    Multisend(#[from] posthaste_protocols::MultisendError),
    /// See [`ManyError`](crate::ManyError).
    #[error(transparent)]
    Many(#[from] ManyError),
    /// See [`Fault`].
    #[error(transparent)]
    Fault(#[from] Fault),
    /// See [`DatatypeError`].
    #[error(transparent)]
    Datatype(#[from] DatatypeError),
    /// See [`ProgramError`].
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// See [`TransferError`].
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// See [`TypedError`].
    #[error(transparent)]
    Typed(#[from] TypedError),
    /// Input or output failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        let error: &dyn fmt::Debug = match self {
            Error::Join(error) => error,
            Error::Register(error) => error,
            Error::Send(error) => error,
            Error::Call(error) => error,
            Error::Rma(error) => error,
            Error::Pattern(error) => error,
            Error::Fifo(error) => error,
            Error::Full => return f.write_str("Full"),
            Error::Memory(error) => error,
            Error::Collective(error) => error,
            Error::Persistent(error) => error,
            Error::Multisend(error) => error,
            Error::Many(error) => error,
            Error::Fault(error) => error,
            Error::Datatype(error) => error,
            Error::Program(error) => error,
            Error::Transfer(error) => error,
            Error::Typed(error) => error,
            Error::Io(error) => error,
        };
        error.fmt(f)
    }
}

impl Error {
    /// The fault that ended the operation, whichever kind of operation it was; `None` if it was something else. Of a multisend,
    /// the first one. [`Fault::peer`] says which rank it is about.
    ///
    /// # Examples
    /// ```
    /// use posthaste::{Error, Fault, Rank, RmaError, SendError};
    /// let lost = Fault::PeerLost(Rank(3));
    /// for error in [Error::from(RmaError::from(lost)), Error::from(SendError::from(lost))] {
    ///     assert_eq!(error.fault(), Some(lost));
    ///     assert_eq!(error.fault().and_then(|fault| fault.peer()), Some(Rank(3)));
    /// }
    /// assert_eq!(Error::from(SendError::UnknownRank { rank: Rank(9), size: 4 }).fault(), None);
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        let fault = |error: &dyn Faulty| error.fault();
        match self {
            Error::Send(error) => fault(error),
            Error::Call(error) => fault(error),
            Error::Rma(error) => fault(error),
            Error::Pattern(error) => fault(error),
            Error::Collective(error) => fault(error),
            Error::Persistent(error) => fault(error),
            Error::Multisend(error) => error.failed.iter().find_map(|(_, error)| fault(error)),
            Error::Many(ManyError::Fault(fault) | ManyError::Missing { fault, .. }) => Some(*fault),
            Error::Fault(fault) => Some(*fault),
            Error::Typed(TypedError::Rma(error)) => fault(error),
            _ => None,
        }
    }
}

/// What was to be sent is dropped.
impl<T> From<TrySendError<T>> for Error {
    fn from(error: TrySendError<T>) -> Error {
        match error {
            TrySendError::Failed { error, .. } => error.into(),
            _ => Error::Full,
        }
    }
}

impl From<posthaste_launch::LaunchError> for Error {
    fn from(error: posthaste_launch::LaunchError) -> Error {
        JoinError::from(error).into()
    }
}

impl From<posthaste_launch::EnvError> for Error {
    fn from(error: posthaste_launch::EnvError) -> Error {
        JoinError::from(error).into()
    }
}

/// An error of which one kind is a fault.
trait Faulty {
    fn fault(&self) -> Option<Fault>;
}

macro_rules! faulty {
    ($($error:ident),*) => {$(
        impl Faulty for $error {
            fn fault(&self) -> Option<Fault> {
                if let $error::Fault(fault) = self { Some(*fault) } else { None }
            }
        }
    )*};
}

faulty!(SendError, CallError, RmaError, PatternError, CollectiveError);

impl Faulty for PersistentError {
    fn fault(&self) -> Option<Fault> {
        match self {
            PersistentError::Fault(fault) => Some(*fault),
            PersistentError::Collective(error) => error.fault(),
            PersistentError::Pattern(error) => error.fault(),
            _ => None,
        }
    }
}

/// The result of most calls.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// async fn total(job: &posthaste::Job, mine: u64) -> posthaste::Result<u64> {
///     Ok(job.world().all_reduce_one(mine, &posthaste::Reduce::sum()).await?)
/// }
/// let job = posthaste::solo().await?;
/// assert_eq!(total(&job, 5).await?, 5);
/// # job.leave().await
/// # }
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::Rank;
    use posthaste_protocols::MultisendError;

    #[test]
    fn what_main_returns_is_printed_as_text() {
        let error = Error::from(SendError::UnknownRank { rank: Rank(3), size: 2 });
        assert_eq!(format!("{error:?}"), "rank 3 does not exist: the job has ranks 0 to 1");
        assert!(format!("{error:#?}").starts_with("UnknownRank {"));
    }

    #[test]
    fn a_fault_is_found_in_the_error_of_any_operation() {
        let lost = Fault::PeerLost(Rank(2));
        let failed = vec![
            (Rank(1), SendError::UnknownRank { rank: Rank(1), size: 1 }),
            (Rank(2), SendError::Fault(lost)),
        ];
        let errors: [Error; 16] = [
            lost.into(),
            SendError::Fault(lost).into(),
            CallError::Fault(lost).into(),
            RmaError::Fault(lost).into(),
            PatternError::Fault(lost).into(),
            PatternError::from(SendError::Fault(lost)).into(),
            PatternError::from(RmaError::Fault(lost)).into(),
            CollectiveError::Fault(lost).into(),
            PersistentError::Fault(lost).into(),
            PersistentError::Collective(lost.into()).into(),
            PersistentError::Pattern(lost.into()).into(),
            MultisendError { failed, total: 3 }.into(),
            ManyError::Fault(lost).into(),
            ManyError::Missing { rank: Rank(2), fault: lost }.into(),
            TypedError::from(lost).into(),
            TypedError::Rma(lost.into()).into(),
        ];
        for error in errors {
            assert_eq!(error.fault(), Some(lost), "{error:?}");
        }
        for error in [Error::Pattern(PatternError::Empty), std::io::Error::other("no").into()] {
            assert_eq!(error.fault(), None, "{error:?}");
        }
    }

    #[test]
    fn every_error_of_the_library_becomes_this_one() {
        let full: Error = TrySendError::Full("what was not sent").into();
        assert!(matches!(full, Error::Full) && full.to_string().contains("try it again"), "{full}");
        let unknown = SendError::UnknownRank { rank: Rank(3), size: 2 };
        let failed: Error = TrySendError::Failed { error: unknown.clone(), payload: [0; 8] }.into();
        assert!(matches!(failed, Error::Send(error) if error == unknown));
        assert!(matches!(Error::from(FifoError::Closed), Error::Fifo(FifoError::Closed)));
        let unnamed = crate::launcher::program("true", 0, 1, 1).map(drop).map_err(Error::from);
        assert!(matches!(unnamed, Err(Error::Join(_))), "{unnamed:?}");
    }
}
