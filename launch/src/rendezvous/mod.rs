//! Where ranks meet that cannot, or need not, inherit anything: a place on the network that proves the job's key, and
//! has it proven, before anything is said.
//!
//! ```text
//!  launcher, or rank 0                             every rank
//!  ┌──────────────────────────────┐                ┌──────────────────────────────┐
//!  │ Rendezvous::serve            │ ◀── address ── │ Rendezvous::meet             │
//!  │   one thread: `server`       │                │   blocks: `client`           │
//!  │   ├ strangers   (no proof)   │                │                              │
//!  │   ├ members     (proof)      │ ══ encrypted ═ │ Meeting::all_gather(blob)    │
//!  │   └ gathering   (who, what)  │                │   ▶ the blobs of all ranks   │
//!  └──────────────────────────────┘                └──────────────────────────────┘
//! ```

mod absent;
mod appoint;
mod bulletin;
mod client;
mod gathering;
mod handover;
mod member;
mod noise;
#[cfg(test)]
mod orders;
mod place;
mod seek;
mod server;
mod silence;
mod standing;
mod stranger;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::env::MAX_RANKS;
use crate::fds::room_for;
use crate::key::{JobId, JobKey};
use crate::meeting::MeetingError;
use client::Comes;
use gathering::Gathering;
use server::{Server, Stop};
use standing::Standing;
use wire::NO_RANK;

pub use absent::{Whereabout, Whereabouts};
pub use bulletin::{Bulletin, Duty, NotServed, Notice, Succession};
pub use client::RendezvousClient;
pub(crate) use handover::listen;
pub use place::loopback;

/// What serving a meeting takes besides a connection per rank: its listener, and visitors that have proven nothing.
const SPARE_DESCRIPTORS: u64 = 32;

/// Connections that the kernel may hold until they are accepted.
const BACKLOG: i32 = 4096;

/// A place where the ranks of a job meet, served by a thread of this process.
///
/// Dropping it ends the meeting for those who still wait, and waits up to five seconds until every rank has taken what
/// it was due: a rank that serves the place may drop it as soon as it has met the others itself. Drop it where blocking
/// is allowed.
#[derive(Debug)]
pub struct Rendezvous {
    address: SocketAddr,
    job: JobId,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Rendezvous {
    /// Serves a meeting of `size` ranks that have `key`, on a listener of the caller's choice.
    ///
    /// `job` is what the ranks are told to be their job's identity; if none is given, one is drawn. A host that is silent for
    /// longer than `silence`, and than five seconds, is lost, with its ranks; zero: never
    /// ([`Settings::tcp_timeout`](crate::Settings::tcp_timeout)).
    ///
    /// # Errors
    /// The size is none that a job can have, or the system refuses a thread, a descriptor or random numbers.
    pub fn serve(
        listener: TcpListener,
        size: u32,
        key: JobKey,
        job: Option<JobId>,
        silence: Duration,
    ) -> io::Result<Self> {
        if !(1..=MAX_RANKS).contains(&size) {
            let text = format!("a job has 1 to {MAX_RANKS} ranks, not {size}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let job = job.map_or_else(JobId::random, Ok)?;
        Self::start(listener, key, job, Gathering::new(size), silence, None).map_err(|(error, _)| error)
    }

    fn start(
        listener: TcpListener,
        key: JobKey,
        job: JobId,
        gathering: Gathering,
        silence: Duration,
        standing: Option<Box<Standing>>,
    ) -> Result<Self, (io::Error, Option<Box<Standing>>)> {
        let silence = silence::borne(silence);
        let prepared = listener.set_nonblocking(true).and_then(|()| {
            // Again, with room for all ranks at once: the standard library asks for less.
            rustix::net::listen(&listener, BACKLOG)?;
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            Ok((listener.local_addr()?, bell))
        });
        let (address, bell) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err((error, standing)),
        };
        let stop = Arc::new(Stop {
            bell,
            stopping: AtomicBool::new(false),
            ended: Mutex::default(),
            served_by: AtomicU32::new(NO_RANK),
            #[cfg(test)]
            fate: Mutex::default(),
        });
        let (other, (give, take)) = (Arc::clone(&stop), std::sync::mpsc::channel::<Option<Box<Standing>>>());
        let run = move || {
            if let Ok(standing) = take.recv() {
                let standing = standing.map(|standing| *standing);
                Server::new(listener, other, job, key, gathering, silence, standing).run();
            }
        };
        // What it stands by with is given to a thread that is there, and back where there is none.
        let thread = match std::thread::Builder::new().name("rendezvous".into()).spawn(run) {
            Ok(thread) => thread,
            Err(error) => return Err((error, standing)),
        };
        match give.send(standing) {
            Ok(()) => Ok(Self { address, job, stop, thread: Some(thread) }),
            Err(unsent) => Err((io::ErrorKind::BrokenPipe.into(), unsent.0)),
        }
    }

    /// As [`serve`](Self::serve), on that address; port 0 takes any.
    ///
    /// # Errors
    /// As [`serve`](Self::serve), and the address cannot be had.
    pub fn bind(
        address: SocketAddr,
        size: u32,
        key: JobKey,
        job: Option<JobId>,
        silence: Duration,
    ) -> io::Result<Self> {
        Self::serve(TcpListener::bind(address)?, size, key, job, silence)
    }

    /// As rank 0, serves the [`Bulletin`] of ranks that have met elsewhere, on a port of that address, one of those given if any
    /// are; it [passes the news on](Self::pass_on).
    ///
    /// # Errors
    /// There is no port, descriptor or thread to be had.
    pub fn tell(
        address: IpAddr,
        ports: Option<RangeInclusive<u16>>,
        size: u32,
        key: &JobKey,
        job: JobId,
        silence: Duration,
    ) -> io::Result<Self> {
        Self::check_room(size).map_err(io::Error::other)?;
        let listener = handover::listen(address, ports)?;
        let gathering = Gathering::taken_over(size, &[], None);
        let told = Self::start(listener, key.clone(), job, gathering, silence, None);
        let told = told.map_err(|(error, _)| error)?;
        told.pass_on(0);
        Ok(told)
    }

    /// From here on its end is not that of the news: the ranks know who serves, and some of them stand by to serve the others,
    /// whether it leaves or ends without a word. For a rank that serves the place.
    ///
    /// Dropping it then takes as long as they need to move, ten seconds at most: they have a fifth of a second to leave
    /// together with whoever serves, and then one of them serves.
    pub fn pass_on(&self, rank: u32) {
        // Relaxed: the server looks at it whenever something comes, and after the bell has been rung.
        self.stop.served_by.store(rank, Ordering::Relaxed);
    }

    /// Whether this process may open as many descriptors as a meeting of `size` ranks takes.
    ///
    /// # Errors
    /// [`MeetingError::DescriptorLimit`], which names the limit.
    pub fn check_room(size: u32) -> Result<(), MeetingError> {
        Self::check_room_beside(size, 0)
    }

    /// As [`check_room`](Self::check_room), beside so many others.
    pub(crate) fn check_room_beside(size: u32, others: u64) -> Result<(), MeetingError> {
        let more = u64::from(size) + others + SPARE_DESCRIPTORS;
        room_for(more).map_err(|(needed, limit)| MeetingError::DescriptorLimit { size, needed, limit })
    }

    /// By which whoever starts the ranks tells of their ends.
    pub(crate) fn obituary(&self) -> Obituary {
        Obituary(Arc::clone(&self.stop))
    }

    /// Ends as with its process: without a word, and with whatever it was about to do.
    #[cfg(test)]
    fn vanish(self) {
        *self.stop.fate.lock().unwrap() = Some(server::Fate::Vanishes);
        drop(self);
    }

    /// Does nothing for so long.
    #[cfg(test)]
    fn is_stopped_for(&self, time: Duration) {
        *self.stop.fate.lock().unwrap() = Some(server::Fate::Stops(time));
        self.stop.ring();
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The job's identity, as the ranks are told.
    pub fn job(&self) -> JobId {
        self.job
    }

    /// Goes to a meeting as one rank of so many; blocks until this rank has its seat.
    ///
    /// `places` are tried in turn, each a `host:port` whose host may be a name. Whoever serves it may start later:
    /// names that do not resolve, refused, unreachable and broken connections are tried again until the deadline. `silence`
    /// is as for [`serve`](Self::serve), and goes with the seat.
    ///
    /// # Errors
    /// Nobody serves the meeting until the deadline ([`MeetingError::Refused`]); at once: whoever serves it has another
    /// key or counts another number of ranks, the rank does not fit or is claimed by another process, or the meeting
    /// has failed already.
    pub fn meet(
        places: &[String],
        rank: u32,
        size: u32,
        key: &JobKey,
        deadline: Instant,
        silence: Duration,
    ) -> Result<RendezvousClient, MeetingError> {
        client::meet(places, rank, size, key, deadline, silence, Comes::First)
    }

    /// As [`meet`](Self::meet), for a rank whose predecessor was seen to end by whoever started both: where that is not known
    /// yet and the number still seems to be taken, it tries for some seconds more.
    ///
    /// # Errors
    /// As those of [`meet`](Self::meet).
    pub fn meet_again(
        places: &[String],
        rank: u32,
        size: u32,
        key: &JobKey,
        deadline: Instant,
        silence: Duration,
    ) -> Result<RendezvousClient, MeetingError> {
        client::meet(places, rank, size, key, deadline, silence, Comes::Again)
    }
}

/// Tells a [`Rendezvous`] of processes that were seen to end.
#[derive(Debug)]
pub(crate) struct Obituary(Arc<Stop>);

impl Obituary {
    /// The process of that number has ended. If it was the rank's own, the others hear of it even if processes that it forked
    /// hold its connections open; of one that only started the rank nothing follows.
    pub(crate) fn ended(&self, rank: u32, pid: u32) {
        self.0.ended.lock().unwrap_or_else(PoisonError::into_inner).push((rank, pid));
        self.0.ring();
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.stop.stopping.store(true, Ordering::Release);
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
