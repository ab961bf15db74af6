//! Becoming part of a job.

mod foreign;
mod meet;
mod network;

use crate::error::JoinError;
use crate::job::Job;
use crate::place::{Place, layout_of, sizes_of};
use crate::{Error, launcher};
#[cfg(test)]
pub(crate) use meet::alone;
use meet::{Given, blocking, join_given};
pub(crate) use meet::{Party, listens};
use network::Whereabouts;
use posthaste_core::{JobShape, Rank};
use posthaste_launch::{
    BrokerError, DeviceChoice, HostFds, InheritedFds, JobEnv, MeetingError, Rendezvous, Settings,
};
use std::cell::Cell;
use std::io::Write;
use std::sync::Once;
use std::time::Instant;

/// Joins the job that this process was started for: by a launcher of this library, or by one of those that it knows:
/// Open MPI and other PMIx launchers, MPICH and other PMI-1 launchers, Slurm, Kubernetes' indexed jobs, and whatever
/// sets torchrun's variables.
///
/// Ranks that other launchers started find out who is on their host, and share memory with those. Under launchers that
/// have no key-value space rank 0 serves the place where they meet, and all need `POSTHASTE_KEY_FILE` or
/// `POSTHASTE_KEY`.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// use posthaste::{Error, JoinError};
/// // A program that is a job of one rank if nobody started it as a part of a larger one.
/// let job = match posthaste::join().await {
///     Err(Error::Join(JoinError::NoJob)) => posthaste::solo().await?,
///     joined => joined?,
/// };
/// assert!(job.rank().index() < job.size());
/// job.leave().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`JoinError::NoJob`] if it was started for none: each process would think that it is alone. Otherwise what was seen
/// in the environment, or who did not come within `POSTHASTE_JOIN_TIMEOUT` (60 s).
///
/// # Progress
/// Messages, calls and most collective operations move while a task awaits one of them, or when the runtime that joined runs the
/// context's driver. A rank that computes without awaiting answers nobody: see [*Progress*](crate::guide#progress-who-moves-messages). When that runtime
/// ends, all operations end with [`Fault::Shutdown`](crate::Fault::Shutdown).
///
/// The first job of a process wraps its panic hook once, to look in silence what the runtime has: a hook of one's own is set
/// afterwards.
///
/// # Cancel safety
/// Not cancel safe: what the launcher handed over can be taken once.
pub async fn join() -> Result<Job, Error> {
    match place().await? {
        Some(place) => Ok(Job::open(place).await?),
        None => Err(JoinError::NoJob.into()),
    }
}

/// Joins the job that this process was started for; started for none, it starts `ranks` ranks of its own program with
/// its own arguments, waits for them, and ends with their exit code. So the call returns only in a rank.
///
/// Call it first in `main`: what comes before is done by the process that starts the ranks as well. That one forwards signals, no
/// longer ignores SIGCHLD if it did, and ends by [`std::process::exit`], without destructors.
///
/// Not in a `#[test]`: it would start the whole test program as ranks. A test is a job of one by [`solo`], or starts itself:
/// ```no_run
/// use posthaste::launcher::{self, Launch};
///
/// // #[test]
/// fn ring() {
///     if std::env::var_os("POSTHASTE_JOB").is_none() {
///         let own = Launch::program(std::env::current_exe().unwrap());
///         let ranks = own.args(["ring", "--exact", "--nocapture"]);
///         let outcome = launcher::prepare(ranks, 4, 1, 1).unwrap().spawn().unwrap().wait();
///         return assert!(outcome.success(), "{outcome}");
///     }
///     let runtime = tokio::runtime::Runtime::new().unwrap();
///     runtime.block_on(async {
///         let job = posthaste::join().await.unwrap();
///         // The test, on each of four ranks.
///         job.leave().await.unwrap();
///     });
/// }
/// ```
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::join_or_local(2).await?; // two processes go on from here
/// let ranks = job.world().all_gather(&[job.rank().0]).await?;
/// assert!(ranks.into_iter().eq(0..job.size() as u32));
/// # job.leave().await
/// # }
/// ```
///
/// # Errors
/// If the job cannot be joined or the ranks cannot be started.
///
/// # Cancel safety
/// Not cancel safe: what the launcher handed over can be taken once.
pub async fn join_or_local(ranks: u32) -> Result<Job, Error> {
    join_or_local_with(JobShape { ranks, clients: 1, contexts: 1 }, |launch| launch).await
}

/// As [`join_or_local`], for a job of that shape, started as `with` changes the launch: `restart`, `keep_going`, `bind`, `env` and
/// the like, but not its shape. Only who starts the ranks calls it.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// use posthaste::{ContextId, JobShape};
/// // Two ranks of two contexts each, one of them for what must not wait.
/// let shape = JobShape { ranks: 2, clients: 1, contexts: 2 };
/// let job = posthaste::join_or_local_with(shape, |launch| launch.label(true)).await?;
/// let urgent = job.context_handle(ContextId(1)).expect("there are two");
/// assert_eq!(urgent.me().rank, job.rank());
/// # job.leave().await
/// # }
/// ```
///
/// # Errors
/// As for [`join_or_local`].
///
/// # Cancel safety
/// Not cancel safe: what the launcher handed over can be taken once.
pub async fn join_or_local_with(
    shape: JobShape,
    with: impl FnOnce(launcher::Launch) -> launcher::Launch,
) -> Result<Job, Error> {
    if let Some(place) = place().await? {
        return Ok(Job::open(place).await?);
    }
    let JobShape { ranks, clients, contexts } = shape;
    let launch = with(launcher::prepare(launcher::Launch::current_program(), ranks, clients, contexts)?);
    let job = launch.forward_signals(true).spawn().map_err(JoinError::from)?;
    let outcome = tokio::task::spawn_blocking(move || job.wait())
        .await
        .map_err(|_| JoinError::Runtime("the runtime was shut down while the ranks were running"))?;
    if !outcome.success() {
        // Nobody may read it any more.
        let _ = writeln!(std::io::stderr(), "{outcome}");
    }
    std::process::exit(outcome.exit_code());
}

/// A job of one rank, in this process alone: for tests and for programs that may run without peers.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let window = job.shmalloc::<u64>(job.size()).await?;
/// window.put(job.rank(), 0, 42).await?;
/// job.barrier().await?;
/// assert_eq!((job.size(), window.load(0)), (1, Some(42)));
/// # job.leave().await
/// # }
/// ```
///
/// # Errors
/// If memory or descriptors cannot be had.
///
/// # Cancel safety
/// Dropped before it is ready, no job was made.
pub async fn solo() -> Result<Job, Error> {
    solo_with(1, 1).await
}

/// A job of one rank with several clients and contexts.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo_with(2, 3).await?;
/// let shape = job.shape();
/// assert_eq!((shape.ranks, shape.clients, shape.contexts), (1, 2, 3));
/// // What there is none of cannot be had.
/// assert!(job.context_handle(posthaste::ContextId(3)).is_none());
/// # job.leave().await
/// # }
/// ```
///
/// # Errors
/// If memory or descriptors cannot be had.
///
/// # Cancel safety
/// Dropped before it is ready, no job was made.
pub async fn solo_with(clients: u16, contexts: u16) -> Result<Job, Error> {
    let settings = Settings::from_process().map_err(JoinError::from)?;
    let shape = JobShape { ranks: 1, clients, contexts };
    let sizes = sizes_of(&settings, shape);
    let bytes = layout_of(shape, sizes).map_err(JoinError::from)?.total();
    let mut fds = HostFds::new(1, bytes).map_err(JoinError::from)?;
    let fds = fds.local(0).map_err(Error::from)?;
    check_runtime()?;
    let place = Place::new(Rank(0), shape, vec![0], fds, 1, settings, 0)?;
    Ok(Job::open(place).await?)
}

/// This process's place in the job that it was started for; none if it was started for none.
async fn place() -> Result<Option<Place>, JoinError> {
    if let Some(env) = JobEnv::from_process()? {
        check_runtime()?;
        return place_of(env).await.map(Some);
    }
    let Some(launcher) = posthaste_launch::detect(&|name| std::env::var(name).ok())? else { return Ok(None) };
    check_runtime()?;
    foreign::place_of(launcher).await.map(Some)
}

/// A place that a launcher of ours gave.
async fn place_of(env: JobEnv) -> Result<Place, JoinError> {
    // The launcher has started it again: what its predecessor inherited it cannot.
    let again = env.restart && env.fds.is_none() && env.broker.is_none();
    let fds = if env.fds.is_some() {
        Some(InheritedFds::obtain(&env)?)
    } else if env.broker.is_some() {
        // Asking the broker blocks for a moment.
        let asked = env.clone();
        Some(blocking(move || Ok(InheritedFds::obtain(&asked)?)).await?)
    } else {
        None
    };
    env.hold_lifeline().map_err(BrokerError::from)?;
    let (clients, contexts) = (part("clients", env.clients)?, part("contexts", env.contexts)?);
    let shape = JobShape { ranks: env.size, clients, contexts };
    let settings = env.settings.clone();
    let one_node = env.nodes.windows(2).all(|pair| pair[0] == pair[1]);
    let fds = match fds {
        Some(fds) if one_node && !env.restart && settings.device != DeviceChoice::Tcp => {
            return Place::new(Rank(env.rank), shape, env.nodes, fds, env.size as usize, settings, 0);
        }
        // Given up where sockets are asked for: nobody must believe that this rank can be reached over memory.
        fds => fds.filter(|_| settings.device != DeviceChoice::Tcp),
    };
    let place = env.rendezvous.ok_or(JoinError::NoRendezvous)?;
    let (key, until) = (env.key.clone(), Instant::now() + settings.join_timeout);
    let silence = settings.tcp_timeout;
    let (meeting, met_at) = blocking(move || {
        let meet = if again { Rendezvous::meet_again } else { Rendezvous::meet };
        let meeting = meet(&[place], env.rank, env.size, &key, until, silence)?;
        let met_at = meeting.address();
        let lost = |source| JoinError::System { what: "tell where the ranks meet", source };
        Ok((meeting, met_at.map_err(lost)?))
    })
    .await?;
    let given = Given {
        job: env.job,
        key: env.key,
        shape,
        nodes: env.nodes,
        fds,
        whereabouts: Whereabouts::Beyond(met_at),
        restart: env.restart,
        settings: settings.clone(),
    };
    let sockets = one_node && given.settings.device == DeviceChoice::Tcp;
    match join_given(given, Party::new(Box::new(meeting), until)).await {
        Err(JoinError::Meeting(missing @ MeetingError::Missing { .. })) if sockets => {
            Err(JoinError::OtherDevice(missing))
        }
        joined => joined,
    }
}

fn part(what: &'static str, number: u32) -> Result<u16, JoinError> {
    u16::try_from(number).map_err(|_| JoinError::TooMany { what, number })
}

/// The doorbell needs the runtime's I/O driver, deadlines its timer.
pub(crate) fn check_runtime() -> Result<(), JoinError> {
    tokio::runtime::Handle::try_current().map_err(|_| {
        JoinError::Runtime(
            "a job needs a Tokio runtime: join, and ask for clients, in an async fn run by one",
        )
    })?;
    // Tokio tells a missing driver only by a panic.
    let io = is_quiet(|| {
        let _ = tokio::net::UnixDatagram::unbound();
    });
    let time = is_quiet(|| drop(tokio::time::sleep(std::time::Duration::ZERO)));
    match (io, time) {
        (true, true) => Ok(()),
        (false, _) => Err(JoinError::Runtime(
            "the Tokio runtime has no I/O driver: build it with enable_io() or enable_all()",
        )),
        (_, false) => Err(JoinError::Runtime(
            "the Tokio runtime has no timer: build it with enable_time() or enable_all()",
        )),
    }
}

thread_local! {
    /// A panic of this thread is expected.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Whether nothing panics; a panic ends as a typed error, and prints no message besides.
fn is_quiet(probe: fn()) -> bool {
    static HOOK: Once = Once::new();
    // Once and for good: others may set hooks of their own at any time, and panics of other threads are theirs. Where nothing
    // catches a panic its message is all that there will be.
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if cfg!(panic = "abort") || !EXPECTED.try_with(Cell::get).unwrap_or(false) {
                usual(panic);
            }
        }));
    });
    EXPECTED.set(true);
    let quiet = std::panic::catch_unwind(probe).is_ok();
    EXPECTED.set(false);
    quiet
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn looking_at_runtimes_keeps_no_panic_of_others_from_being_told() {
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.payload().downcast_ref() == Some(&"expected by this test") {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }));
        // From here on there is a hook that knows which panics are expected.
        assert!(is_quiet(|| {}));
        let looking: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    let bare = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                    let whole = tokio::runtime::Builder::new_current_thread().enable_all().build();
                    let whole = whole.expect("a runtime");
                    for _ in 0..200 {
                        assert!(bare.block_on(async { check_runtime() }).is_err());
                        assert!(whole.block_on(async { check_runtime() }).is_ok());
                    }
                })
            })
            .collect();
        for _ in 0..200 {
            assert!(std::panic::catch_unwind(|| panic!("expected by this test")).is_err());
        }
        looking.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert!(std::panic::catch_unwind(|| panic!("expected by this test")).is_err());
        assert_eq!(told.load(Ordering::Relaxed), 201);
        let _ours = std::panic::take_hook();
    }

    #[test]
    fn numbers_of_parts_are_not_cut_off() {
        assert_eq!(part("clients", 65_535).ok(), Some(65_535));
        let error = part("clients", 65_537).unwrap_err();
        assert_eq!(error.to_string(), "a rank has at most 65535 clients, not 65537");
    }

    #[tokio::test]
    async fn a_solo_job_of_an_impossible_shape_is_refused() {
        for (clients, contexts) in [(0, 1), (1, 0), (u16::MAX, u16::MAX), (1, u16::MAX)] {
            let error = solo_with(clients, contexts).await.unwrap_err();
            assert!(matches!(error, Error::Join(JoinError::Shape(_))), "{error}");
        }
    }
}
