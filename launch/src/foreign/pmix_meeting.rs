//! Launchers that speak PMIx: Open MPI's `mpirun`, `prterun`, and `srun --mpi=pmix`.
//!
//! | variable | value |
//! |---|---|
//! | `PMIX_NAMESPACE`, `PMIX_RANK` | the job and this rank; the server's address is in others, which only the library reads |
//! | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | the same rank, and the size, from Open MPI |
//!
//! The library's calls block for as long as other ranks do not come. So a thread makes them, from joining to dropping
//! the meeting, and who waits for it can give up at a deadline; the thread is then left behind in its call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::claim::{self, Claimed};
use super::error::ForeignError;
use super::pmi1::MAX_BLOB;
use super::pmix::{CallError, Client, OpenError};
use super::values::{Claim, Env, Reader, shortened};
use crate::env::MAX_RANKS;
use crate::key::{JobId, JobKey};
use crate::meeting::{Meeting, MeetingError};

pub(super) const LAUNCHER: &str = "Open MPI or another PMIx launcher";
const NAMESPACE: &str = "PMIX_NAMESPACE";
const RANK: &str = "PMIX_RANK";
const RANK_OF_MPI: &str = "OMPI_COMM_WORLD_RANK";
const SIZE_OF_MPI: &str = "OMPI_COMM_WORLD_SIZE";
const PLACE: &str = "the launcher's PMIx server";
/// How long the end may take, which tells nothing.
const FAREWELL: Duration = Duration::from_secs(5);

/// The all-gathers of this process so far: a later one must not find an earlier one's values.
static ROUNDS: AtomicU64 = AtomicU64::new(0);

/// What the variables say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) namespace: String,
    pub(super) rank: u32,
    /// Said by Open MPI only.
    pub(super) size: Option<u32>,
}

pub(super) fn detect(env: Env<'_>) -> Result<Option<Told>, ForeignError> {
    let remedy = "start the program with mpirun, which sets both, or unset the PMIX_ and OMPI_ variables to run \
                  without a job";
    let reader = Reader { env, launcher: LAUNCHER, remedy };
    let Some(present) = reader.first_set(&[NAMESPACE, RANK, RANK_OF_MPI]) else { return Ok(None) };
    let namespace = reader.get(NAMESPACE).ok_or_else(|| reader.partial(&present, NAMESPACE))?;
    let rank = reader.rank(RANK)?.ok_or_else(|| reader.partial(&present, RANK))?;
    let (of_mpi, size) = (reader.rank(RANK_OF_MPI)?, reader.size(SIZE_OF_MPI)?);
    if let Some(of_mpi) = of_mpi.filter(|of_mpi| *of_mpi != rank) {
        return Err(ForeignError::Contradiction {
            first: format!("{RANK} is {rank}"),
            second: format!("{RANK_OF_MPI} is {of_mpi}"),
        });
    }
    match size {
        Some(size) => drop(reader.in_range(rank, RANK, size, SIZE_OF_MPI)?),
        None if rank >= MAX_RANKS => {
            return Err(reader.invalid(RANK, &rank.to_string(), "a rank below 4096"));
        }
        None => {}
    }
    Ok(Some(Told { namespace, rank, size }))
}

/// A blob to give, and where to put the answer.
type Blob = Zeroizing<Vec<u8>>;
type Gathered = Result<Vec<Vec<u8>>, CallError>;

/// The ranks of one PMIx job.
pub(super) struct Pmix {
    claim: Claim,
    _claimed: Claimed,
    /// None once a call failed or was given up.
    thread: Option<Caller>,
}

/// The thread that calls the library. It ends, with a farewell to the server, when the blobs end.
struct Caller {
    blobs: Sender<Blob>,
    gathered: Receiver<Gathered>,
    ended: Receiver<()>,
}

impl Pmix {
    pub(super) fn connect(told: &Told, until: Instant) -> Result<Self, ForeignError> {
        let claimed = claim::claim(LAUNCHER, &told.namespace, told.rank)?;
        let (say, opened) = channel();
        let (blobs, to_give) = channel::<Blob>();
        let (give, gathered) = channel();
        let (end, ended) = channel();
        let call = move || {
            let client = match Client::open() {
                Ok(client) => client,
                Err(error) => return drop(say.send(Err(error))),
            };
            let size = client.job_size();
            let size_known = size.as_ref().ok().copied();
            let heard = say.send(Ok((client.namespace(), client.rank(), size))).is_ok();
            if let Some(size) = size_known.filter(|_| heard) {
                serve(&client, size, &to_give, &give);
            }
            drop(client);
            // Whoever waits for this may have given up.
            let _ = end.send(());
        };
        thread::Builder::new()
            .name("posthaste-pmix".into())
            .spawn(call)
            .map_err(|source| MeetingError::System { what: "start the thread that calls PMIx", source })?;
        let (namespace, rank, size) = match opened.recv_timeout(left(until)) {
            Ok(Ok(opened)) => opened,
            Ok(Err(OpenError::Library(reason))) => return Err(ForeignError::NoLibrary { reason }),
            Ok(Err(OpenError::Call(error))) => return Err(failed(error).into()),
            Err(_) => return Err(refused("no answer to PMIx_Init at the deadline".into()).into()),
        };
        let thread = Some(Caller { blobs, gathered, ended });
        let size = size.map_err(failed)?;
        // Dropped on an error below, it says farewell.
        let meeting = Self { claim: Claim { rank, size }, _claimed: claimed, thread };
        told.agrees(&namespace, meeting.claim)?;
        Ok(meeting)
    }
}

impl Told {
    /// Whether `srun` says this: its namespaces are named after job and step.
    pub(super) fn of_slurm(&self) -> bool {
        self.namespace.starts_with("slurm.pmix.")
    }

    /// A server that does not know this process may take it for a job of its own.
    fn agrees(&self, namespace: &str, server: Claim) -> Result<(), ForeignError> {
        let size = self.size.unwrap_or(server.size);
        if self.namespace == namespace && self.rank == server.rank && size == server.size {
            if server.rank < server.size && server.size <= MAX_RANKS {
                return Ok(());
            }
            return Err(MeetingError::Size { rank: server.rank, size: MAX_RANKS, said: server.size }.into());
        }
        let of = self.size.map_or(String::new(), |size| format!(" of {size}"));
        Err(ForeignError::Contradiction {
            first: format!(
                "the environment says rank {}{of} in namespace {}",
                self.rank,
                shortened(&self.namespace)
            ),
            second: format!(
                "the PMIx server says rank {} of {} in namespace {}",
                server.rank,
                server.size,
                shortened(namespace)
            ),
        })
    }
}

/// Gathers until there are no more blobs.
fn serve(client: &Client, size: u32, blobs: &Receiver<Blob>, give: &Sender<Gathered>) {
    while let Ok(mut blob) = blobs.recv() {
        let result = gather(client, size, &mut blob);
        let go_on = result.is_ok();
        if give.send(result).is_err() || !go_on {
            return;
        }
    }
}

fn gather(client: &Client, size: u32, blob: &mut [u8]) -> Gathered {
    // Relaxed: only the number counts, and calls of one process are made in an order by its owner.
    let key = format!("posthaste.{}", ROUNDS.fetch_add(1, Ordering::Relaxed));
    client.put(&key, blob)?;
    client.commit()?;
    client.fence()?;
    (0..size).map(|rank| client.get(rank, &key, MAX_BLOB)).collect()
}

impl Meeting for Pmix {
    fn rank(&self) -> u32 {
        self.claim.rank
    }

    fn size(&self) -> u32 {
        self.claim.size
    }

    fn identity(&self) -> Option<(JobId, JobKey)> {
        None
    }

    fn all_gather(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, MeetingError> {
        if blob.len() > MAX_BLOB {
            return Err(refused(format!("a blob of {} bytes is too long: 65536 are possible", blob.len())));
        }
        let thread = self.thread.take().ok_or_else(|| refused("an earlier exchange failed".into()))?;
        if thread.blobs.send(Zeroizing::new(blob.to_vec())).is_err() {
            return Err(refused("the thread that calls PMIx has ended".into()));
        }
        match thread.gathered.recv_timeout(left(deadline)) {
            Ok(Ok(blobs)) => {
                self.thread = Some(thread);
                Ok(blobs)
            }
            Ok(Err(error)) => Err(failed(error)),
            Err(RecvTimeoutError::Timeout) => Err(refused(
                "no answer to PMIx_Fence at the deadline: not all ranks have come; start them, or raise \
                 POSTHASTE_JOIN_TIMEOUT"
                    .into(),
            )),
            Err(RecvTimeoutError::Disconnected) => {
                Err(refused("the thread that calls PMIx has ended".into()))
            }
        }
    }
}

impl Drop for Pmix {
    /// Without a farewell the launcher takes the end of this process for a crash, and ends the others.
    fn drop(&mut self) {
        if let Some(Caller { blobs, ended, .. }) = self.thread.take() {
            drop(blobs);
            if ended.recv_timeout(FAREWELL) == Err(RecvTimeoutError::Timeout) {
                tracing::debug!("the PMIx server does not answer our farewell");
            }
        }
    }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

fn failed(error: CallError) -> MeetingError {
    refused(format!("{} failed: {}; the job is being ended, or was already", error.call, error.reason))
}

fn refused(problem: String) -> MeetingError {
    MeetingError::Refused { place: PLACE.into(), problem }
}
