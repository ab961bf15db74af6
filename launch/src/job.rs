//! A job that runs, as its starter holds it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Pid, Signal, kill_process};

use crate::arena::ArenaKind;
use crate::broker::Broker;
use crate::env::JobEnv;
use crate::key::JobId;
use crate::outcome::{Failure, JobOutcome, RankEnd};
use crate::output::{Readers, Stream};
use crate::rendezvous::Rendezvous;
use crate::signals::{By, Forwarded, Target};

/// A running job: its ranks live no longer than this value.
///
/// Dropping it kills all ranks that still run and waits until they are gone; so does the end of the launcher, however
/// it ends, except that then nobody waits.
#[derive(Debug)]
pub struct RunningJob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) supervisor: Option<JoinHandle<()>>,
    pub(crate) readers: Arc<Readers>,
    pub(crate) broker: Option<Broker>,
    /// Where the ranks meet, if they reach each other over sockets.
    pub(crate) rendezvous: Option<Rendezvous>,
    /// What ranks left to the broker need to know; the rank is filled in.
    pub(crate) join: Option<JobEnv>,
    pub(crate) broker_ranks: Vec<u32>,
    pub(crate) job: JobId,
    pub(crate) kind: ArenaKind,
}

impl RunningJob {
    /// The job's identity.
    pub fn id(&self) -> JobId {
        self.job
    }

    /// The number of ranks, those left to the broker included.
    pub fn size(&self) -> u32 {
        lock(&self.shared.state).slots.len() as u32
    }

    /// What the arena is made of, or the arenas of several nodes.
    pub fn arena_kind(&self) -> &ArenaKind {
        &self.kind
    }

    /// The process of a rank; none if the launcher has not started it.
    ///
    /// After the rank's end the number may belong to another process: use [`signal`](Self::signal) to reach a rank.
    pub fn pid(&self, rank: u32) -> Option<u32> {
        lock(&self.shared.state).pids.get(rank as usize).copied().flatten()
    }

    /// The processes of all ranks, in order, as [`pid`](Self::pid).
    pub fn pids(&self) -> Vec<Option<u32>> {
        lock(&self.shared.state).pids.clone()
    }

    /// How often a rank was started again after a failure; 0 if it does not exist.
    pub fn restarts(&self, rank: u32) -> u32 {
        lock(&self.shared.state).restarts.get(rank as usize).copied().unwrap_or(0)
    }

    /// Sends a signal to a rank; never to a process that has taken over its number.
    ///
    /// # Errors
    /// `NotFound` if the rank is not running under this launcher, else what the kernel says.
    pub fn signal(&self, rank: u32, signal: Signal) -> io::Result<()> {
        lock(&self.shared.state).signal(rank, signal)
    }

    /// Kills a rank with SIGKILL; that counts as the rank's failure.
    ///
    /// # Errors
    /// As [`signal`](Self::signal).
    pub fn kill(&self, rank: u32) -> io::Result<()> {
        self.signal(rank, Signal::KILL)
    }

    /// Waits until all ranks that the launcher starts have ended; sleeps meanwhile.
    pub fn wait(&self) -> JobOutcome {
        let state = lock(&self.shared.state);
        let state = self
            .shared
            .changed
            .wait_while(state, |state| !state.done)
            .unwrap_or_else(PoisonError::into_inner);
        state.outcome()
    }

    /// As [`wait`](Self::wait), for at most `timeout`; none if a rank still runs then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<JobOutcome> {
        let state = lock(&self.shared.state);
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, timeout, |state| !state.done)
            .unwrap_or_else(PoisonError::into_inner);
        state.done.then(|| state.outcome())
    }

    /// Waits for the first failure, or until all ranks have ended without one: then none. Ends, with the failure, also if
    /// the other ranks go on.
    pub fn wait_failure(&self) -> Option<Failure> {
        let state = lock(&self.shared.state);
        let state = self
            .shared
            .changed
            .wait_while(state, |state| !state.done && state.first_failure.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        state.first_failure.clone()
    }

    /// Ends the job: the ranks that run get SIGTERM, and SIGKILL after the grace. Does not wait; once is enough.
    pub fn end(&self) {
        if std::mem::replace(&mut lock(&self.shared.state).end_asked, true) {
            return;
        }
        // If it has ended, there is nothing to do.
        self.shared.forward(Forwarded { signal: Signal::TERM, by: By::Holder });
    }

    /// Where the ranks meet, if this launcher serves such a place.
    pub fn rendezvous(&self) -> Option<SocketAddr> {
        self.rendezvous.as_ref().map(Rendezvous::address)
    }

    /// How a rank ended; none while it runs, has yet to start, or does not exist. Never waits.
    pub fn try_wait(&self, rank: u32) -> Option<RankEnd> {
        match lock(&self.shared.state).slots.get(rank as usize)? {
            Slot::Ended(end) => Some(*end),
            Slot::Waiting | Slot::Running(_) => None,
            Slot::External => Some(RankEnd::External),
            Slot::Elsewhere => Some(RankEnd::Elsewhere),
        }
    }

    /// What a rank has printed so far on its two streams; empty where they are not captured.
    ///
    /// Complete once [`wait`](Self::wait) has returned, unless the rank left processes behind that hold its streams.
    pub fn output(&self, rank: u32) -> (Vec<u8>, Vec<u8>) {
        (self.readers.captured(rank, Stream::Out), self.readers.captured(rank, Stream::Err))
    }

    /// The environment with which a process that anyone of this user starts joins as `rank`, secret included.
    ///
    /// None unless the rank was left to the broker.
    pub fn join_env(&self, rank: u32) -> Option<Vec<(String, String)>> {
        self.broker_ranks.contains(&rank).then_some(())?;
        let mut env = self.join.clone()?;
        env.rank = rank;
        Some(env.to_variables().into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        self.shared.abort();
        if let Some(supervisor) = self.supervisor.take() {
            let _ = supervisor.join();
        }
        self.broker = None;
        self.rendezvous = None;
    }
}

/// What the holder of a job, its supervisor and the signal thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
    /// Ends the supervisor's sleep.
    pub(crate) bell: OwnedFd,
}

/// What is known of the ranks.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) slots: Vec<Slot>,
    pub(crate) pids: Vec<Option<u32>>,
    /// Since when each of them is there.
    pub(crate) since: Vec<Duration>,
    /// How often each rank was started again.
    pub(crate) restarts: Vec<u32>,
    pub(crate) first_failure: Option<Failure>,
    pub(crate) ended_early: bool,
    /// The launcher was told to end before a rank had failed.
    pub(crate) told: Option<i32>,
    pub(crate) forwarded: Vec<Forwarded>,
    /// Its holder has ended it.
    pub(crate) end_asked: bool,
    pub(crate) abort: bool,
    pub(crate) done: bool,
}

/// What is known of one rank.
#[derive(Debug)]
pub(crate) enum Slot {
    Waiting,
    /// Reaped only under the lock, so that a signal sent under the lock cannot reach a stranger.
    Running(Child),
    Ended(RankEnd),
    External,
    Elsewhere,
}

impl Shared {
    pub(crate) fn new(slots: Vec<Slot>) -> io::Result<Self> {
        let state = State {
            pids: vec![None; slots.len()],
            since: vec![Duration::ZERO; slots.len()],
            restarts: vec![0; slots.len()],
            slots,
            first_failure: None,
            ended_early: false,
            told: None,
            forwarded: Vec::new(),
            end_asked: false,
            abort: false,
            done: false,
        };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Mutex::new(state), changed: Condvar::new(), bell })
    }

    /// Kills all ranks; does not wait.
    pub(crate) fn abort(&self) {
        lock(&self.state).abort = true;
        self.wake();
    }

    /// Makes the supervisor look at the state.
    pub(crate) fn wake(&self) {
        // The counter can only be full if the supervisor has been woken already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

impl Target for Shared {
    /// Leaves a signal for the supervisor.
    fn forward(&self, signal: Forwarded) -> bool {
        let mut state = lock(&self.state);
        if state.done {
            return false;
        }
        state.forwarded.push(signal);
        drop(state);
        self.wake();
        true
    }
}

impl State {
    pub(crate) fn signal(&self, rank: u32, signal: Signal) -> io::Result<()> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, format!("rank {rank} is not running"));
        let Some(Slot::Running(child)) = self.slots.get(rank as usize) else { return Err(gone()) };
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// Sends a signal to all ranks that run.
    pub(crate) fn signal_all(&self, signal: Signal) {
        for rank in 0..self.slots.len() as u32 {
            let _ = self.signal(rank, signal);
        }
    }

    /// Sends a signal that came to the launcher to all ranks that run and do not have it already.
    pub(crate) fn pass_on(&self, forwarded: Forwarded) {
        for (rank, (slot, since)) in (0..).zip(self.slots.iter().zip(&self.since)) {
            if matches!(slot, Slot::Running(child) if !forwarded.has_it(Pid::from_child(child), *since)) {
                let _ = self.signal(rank, forwarded.signal);
            }
        }
    }

    fn outcome(&self) -> JobOutcome {
        let ranks = self.slots.iter().map(|slot| match slot {
            Slot::Ended(end) => *end,
            Slot::External => RankEnd::External,
            Slot::Elsewhere => RankEnd::Elsewhere,
            Slot::Waiting | Slot::Running(_) => RankEnd::NotStarted,
        });
        JobOutcome {
            ranks: ranks.collect(),
            first_failure: self.first_failure.clone(),
            ended_early: self.ended_early,
            told: self.told,
        }
    }
}

/// Locks, also after a panic of another holder: every change under our locks is complete at any point.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
