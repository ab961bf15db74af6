//! The thread that starts the ranks, watches them and ends them.
//!
//! It starts them itself because the kernel sends a child its parent-death signal when the *thread* that started it
//! ends: this one lives as long as any rank.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use rustix::thread::CpuSet;

use crate::child::{self, Inherited};
use crate::env::{FdNumbers, JobEnv, LifelineFd};
use crate::error::LaunchError;
use crate::falls::{Falls, TOGETHER};
use crate::fds::HostFds;
use crate::job::{Shared, Slot, State, lock};
use crate::lifeline::Lifeline;
use crate::outcome::{Cause, Failure, RankEnd};
use crate::output::{Hurry, Output, Readers, Stream};
use crate::placement::Placement;
use crate::signals::{By, moment};
use crate::spawn::Launch;
use crate::vars::JOB_VARIABLES;
use crate::watch::Watch;

/// Who is told of every process that was a rank and has ended: the rank, and the process's number. It must not wait: the
/// supervisor tells it.
pub(crate) struct Reaped(pub(crate) Arc<dyn Fn(u32, u32) + Send + Sync>);

impl fmt::Debug for Reaped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reaped")
    }
}

/// All that the supervisor needs to do its work.
pub(crate) struct Supervisor {
    pub(crate) launch: Launch,
    pub(crate) env: JobEnv,
    /// By node; kept until the last rank has been started.
    pub(crate) fds: BTreeMap<u32, HostFds>,
    pub(crate) placement: Placement,
    pub(crate) cpus: Vec<usize>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) readers: Arc<Readers>,
    pub(crate) watches: Vec<Option<Watch>>,
    pub(crate) lifeline: Option<Lifeline>,
    /// When it was cut.
    pub(crate) cut: Option<Instant>,
    /// Until when processes of ranks are waited for whose launcher's children have all ended.
    pub(crate) rest: Option<Instant>,
    pub(crate) falls: Falls,
    /// Failures of which it is not clear yet which was the first.
    pub(crate) suspects: Option<Suspects>,
    /// Hears of the ends of the ranks, if others meet them.
    pub(crate) reaped: Option<Reaped>,
    /// How often each rank was started again.
    pub(crate) restarts: Vec<u32>,
    pub(crate) began: Instant,
    /// When the ranks that still run get SIGKILL.
    pub(crate) deadline: Option<Instant>,
    /// When the launcher was first told to end.
    pub(crate) interrupted: Option<Instant>,
}

/// Ranks that have failed, since the first of them was seen.
#[derive(Debug)]
pub(crate) struct Suspects {
    failures: Vec<Failure>,
    since: Instant,
}

/// How long a rank that is lost to its peers may take to end: it may still be amid a panic, or give memory back.
const END_OF_FALLEN: Duration = Duration::from_millis(500);

/// How long a process may take to end that was killed.
const KILLED: Duration = Duration::from_millis(200);

/// The signals by which a launcher is told to end.
const ENDING: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];
/// Two of them within that time are one request.
const AT_ONCE: Duration = Duration::from_millis(100);

impl Supervisor {
    /// Starts the ranks, reports that, and stays until all have ended.
    pub(crate) fn run(mut self, started: mpsc::Sender<Result<(), LaunchError>>) {
        let done = Done(Arc::clone(&self.shared));
        match self.start_first() {
            Ok(()) => {
                // The caller waits for this, so it is there.
                let _ = started.send(Ok(()));
                self.supervise();
                self.finish_output();
            }
            Err(error) => {
                self.kill_all();
                self.end_waiting(None);
                self.supervise();
                let _ = started.send(Err(error));
            }
        }
        drop(done);
    }

    /// Waits for what ranks have printed; not for long if the launcher is told to end meanwhile, as it is on other hosts when a
    /// rank has failed.
    fn finish_output(&self) {
        let hurry = || {
            let state = lock(&self.shared.state);
            let told = state.forwarded.iter().filter(|forwarded| ENDING.contains(&forwarded.signal)).count();
            match (state.abort, told) {
                (false, 0) => Hurry::None,
                (false, 1) => Hurry::Some,
                _ => Hurry::Great,
            }
        };
        // What held on to the lifeline has had its time.
        let grace = if self.rest.is_some() { Duration::ZERO } else { self.launch.grace };
        self.readers.wait(grace.max(Duration::from_millis(100)), hurry);
    }

    /// Starts the ranks that have no delay.
    fn start_first(&mut self) -> Result<(), LaunchError> {
        for rank in 0..self.env.size {
            // A Ctrl-C gives up those that are left.
            self.take_requests();
            if self.waits(rank) && !self.launch.delays.contains_key(&rank) {
                self.start(rank).map_err(|source| LaunchError::Spawn {
                    rank,
                    program: self.launch.program.clone(),
                    source,
                })?;
            }
        }
        Ok(())
    }

    fn supervise(&mut self) {
        loop {
            self.take_requests();
            self.start_due();
            self.judge();
            let now = Instant::now();
            if self.deadline.is_some_and(|deadline| deadline <= now) {
                self.deadline = None;
                self.kill_all();
            }
            if !Self::others_left(&lock(&self.shared.state)) && !self.ranks_left() {
                return;
            }
            self.sleep();
            self.reap();
        }
    }

    fn kill_all(&mut self) {
        lock(&self.shared.state).signal_all(Signal::KILL);
        if let (Some(lifeline), None) = (&self.lifeline, self.cut) {
            lifeline.cut();
            self.cut = Some(Instant::now());
        }
    }

    /// Whether to wait for processes that hold on to the lifeline though all that the launcher itself has started have ended: ranks
    /// whose script was ended and not they. They have the grace, as others have, and are killed.
    fn ranks_left(&mut self) -> bool {
        if !self.lifeline.as_ref().is_some_and(Lifeline::is_held) {
            return false;
        }
        let now = Instant::now();
        let until = *self.rest.get_or_insert_with(|| self.deadline.unwrap_or(now + self.launch.grace));
        if self.cut.is_none() && until <= now {
            self.kill_all();
        }
        // What is still there then is no rank: a script's other process, or what a rank has forked.
        self.cut.is_none_or(|cut| cut.elapsed() < KILLED)
    }

    /// Does what the job's holder and the signal thread have asked for.
    fn take_requests(&mut self) {
        let mut state = lock(&self.shared.state);
        let mut ending = state.abort;
        let mut kill = state.abort;
        let mut told = None;
        for forwarded in std::mem::take(&mut state.forwarded) {
            let signal = forwarded.signal;
            state.pass_on(forwarded);
            if !ENDING.contains(&signal) {
                continue;
            }
            ending = true;
            told.get_or_insert(signal);
            if forwarded.by != By::Holder && self.suspects.is_none() && state.first_failure.is_none() {
                state.told.get_or_insert(signal.as_raw());
            }
            // Some send it to a process and then to its group: that is one request.
            let again = self.interrupted.is_some_and(|first| first.elapsed() > AT_ONCE);
            kill |= again && signal != Signal::HUP && forwarded.by != By::Holder;
            self.interrupted.get_or_insert_with(Instant::now);
        }
        drop(state);
        if kill {
            self.kill_all();
        }
        if ending {
            self.end_waiting(told);
            self.deadline.get_or_insert_with(|| Instant::now() + self.launch.grace);
        }
    }

    /// Starts the delayed ranks whose time has come.
    fn start_due(&mut self) {
        let elapsed = self.began.elapsed();
        let due: Vec<u32> = self
            .launch
            .delays
            .iter()
            .filter(|(_, delay)| **delay <= elapsed)
            .map(|(rank, _)| *rank)
            .filter(|rank| self.waits(*rank))
            .collect();
        for rank in due {
            // A failure of an earlier one may have ended the job meanwhile.
            if !self.waits(rank) {
                continue;
            }
            if let Err(error) = self.start(rank) {
                let program = self.launch.program.display();
                let cause = Cause::NotStarted(format!("{program}: {error}"));
                lock(&self.shared.state).slots[rank as usize] = Slot::Ended(RankEnd::NotStarted);
                self.fail(rank, cause);
            }
        }
    }

    fn waits(&self, rank: u32) -> bool {
        matches!(lock(&self.shared.state).slots[rank as usize], Slot::Waiting)
    }

    fn start(&mut self, rank: u32) -> io::Result<()> {
        let mut command = self.command(rank)?;
        let spawned = command.spawn();
        // With the command goes the launcher's copy of the doorbell's read end: from here on its peers see it die.
        drop(command);
        let mut child = spawned?;
        let watch = Watch::new(Pid::from_child(&child)).and_then(|watch| {
            self.attach(rank, &mut child)?;
            Ok(watch)
        });
        let watch = match watch {
            Ok(watch) => watch,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        tracing::debug!(rank, pid = child.id(), "started");
        self.watches[rank as usize] = Some(watch);
        let mut state = lock(&self.shared.state);
        state.pids[rank as usize] = Some(child.id());
        state.since[rank as usize] = moment();
        state.restarts[rank as usize] = self.restarts[rank as usize];
        state.slots[rank as usize] = Slot::Running(child);
        if !state.slots.iter().any(|slot| matches!(slot, Slot::Waiting)) {
            drop(state);
            self.fds.clear();
        }
        Ok(())
    }

    fn command(&mut self, rank: u32) -> io::Result<Command> {
        let gone = || io::Error::other("the job's descriptors are gone");
        let mut env = JobEnv { rank, broker: None, ..self.env.clone() };
        let mut inherited = Inherited::default();
        if self.restarts[rank as usize] == 0 {
            let fds = self.fds.get_mut(&env.node()).ok_or_else(gone)?;
            let bell = fds.take_bell(env.place_on_node()).ok_or_else(gone)?;
            let shared = Arc::clone(fds.shared());
            env.fds = Some(FdNumbers::of(&shared, &bell));
            self.falls.watch(rank, &shared, env.place_on_node());
            inherited.fds = Some((shared, bell));
        }
        inherited.lifeline = self.lifeline.as_ref().map(Lifeline::end).transpose()?;
        env.lifeline = inherited.lifeline.as_ref().map(|end| LifelineFd::of_other(end.as_raw_fd()));

        let mut command = Command::new(&self.launch.program);
        self.launch.configure(&mut command);
        for name in JOB_VARIABLES {
            command.env_remove(name);
        }
        command.envs(env.to_variables());
        let reads = rank == 0 && !self.placement.is_part();
        command.stdin(if reads { Stdio::inherit() } else { Stdio::null() });
        command.stdout(self.stdio(self.launch.stdout)).stderr(self.stdio(self.launch.stderr));
        let cpu = (!self.cpus.is_empty()).then(|| {
            let mut set = CpuSet::new();
            set.set(self.cpus[self.placement.index(rank) % self.cpus.len()]);
            set
        });
        child::prepare(&mut command, inherited, cpu);
        Ok(command)
    }

    fn stdio(&self, output: Output) -> Stdio {
        match output {
            Output::Inherit if self.launch.is_piped(output) => Stdio::piped(),
            Output::Inherit => Stdio::inherit(),
            Output::Capture => Stdio::piped(),
            Output::Null => Stdio::null(),
        }
    }

    /// Gives the child's piped streams their readers.
    fn attach(&self, rank: u32, child: &mut Child) -> io::Result<()> {
        if let Some(stream) = child.stdout.take() {
            self.attach_stream(rank, Stream::Out, self.launch.stdout, stream)?;
        }
        if let Some(stream) = child.stderr.take() {
            self.attach_stream(rank, Stream::Err, self.launch.stderr, stream)?;
        }
        Ok(())
    }

    fn attach_stream(
        &self,
        rank: u32,
        stream: Stream,
        output: Output,
        from: impl Read + Send + 'static,
    ) -> io::Result<()> {
        match (output, &self.launch.relay) {
            (Output::Capture, _) => self.readers.capture(rank, stream, from),
            (_, Some(relay)) => self.readers.relay(rank, stream, from, relay.clone()),
            (_, None) => self.readers.label(rank, stream, from),
        }
    }

    /// Sleeps until a rank exits, somebody asks for something, or the next deadline.
    fn sleep(&self) {
        let mut fds = vec![PollFd::new(&self.shared.bell, PollFlags::IN)];
        fds.extend(self.watches.iter().flatten().map(|watch| PollFd::new(watch, PollFlags::IN)));
        let falls = self.falls.as_fd();
        fds.extend(falls.as_ref().map(|falls| PollFd::new(falls, PollFlags::IN)));
        let next_start = self
            .launch
            .delays
            .iter()
            .filter(|(rank, _)| self.waits(**rank))
            .map(|(_, delay)| self.began + *delay)
            .min();
        let judgement = self.suspects.as_ref().map(|Suspects { since, .. }| {
            *since + if since.elapsed() < TOGETHER { TOGETHER } else { END_OF_FALLEN }
        });
        // None of the launcher's children is left then.
        let rest = self.rest.map(|until| self.cut.map_or(until, |cut| cut + KILLED));
        let held = self.rest.is_some().then_some(self.lifeline.as_ref()).flatten();
        fds.extend(held.map(|lifeline| PollFd::new(lifeline, PollFlags::empty())));
        let until = [next_start, self.deadline, judgement, rest].into_iter().flatten().min();
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                // Out of memory at worst; do not turn that into a busy loop.
                tracing::error!(%error, "the supervisor cannot poll");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
    }

    /// Takes the status of every rank that has exited.
    fn reap(&mut self) {
        let (mut ends, mut reaped) = (Vec::new(), Vec::new());
        let mut state = lock(&self.shared.state);
        for (rank, slot) in state.slots.iter_mut().enumerate() {
            let Slot::Running(child) = slot else { continue };
            let end = match child.try_wait() {
                Ok(None) => continue,
                Ok(Some(status)) => RankEnd::of(status),
                Err(error) => {
                    tracing::error!(rank, %error, "a rank's status is lost");
                    RankEnd::Exit(-1)
                }
            };
            let pid = child.id();
            *slot = Slot::Ended(end);
            self.watches[rank] = None;
            ends.push((rank as u32, end));
            reaped.push((rank as u32, pid));
        }
        drop(state);
        // Without the lock: whoever is told may have one of its own.
        if let Some(told) = &self.reaped {
            reaped.iter().for_each(|(rank, pid)| (told.0)(*rank, *pid));
        }
        self.shared.changed.notify_all();
        // Who is seen to have ended has fallen.
        self.falls.look();
        for (rank, end) in ends {
            let cause = match end {
                RankEnd::Exit(code) if code != 0 => Cause::Exit(code),
                RankEnd::Signal(signal) => Cause::Signal(signal),
                _ => continue,
            };
            if !self.start_again(rank, &cause) {
                self.fail(rank, cause);
            }
        }
    }

    /// Starts a rank that has failed again, if it may; whether it does not count as a failure.
    fn start_again(&mut self, rank: u32, cause: &Cause) -> bool {
        let most = self.launch.restarts.unwrap_or(0);
        {
            let mut state = lock(&self.shared.state);
            let ending =
                self.deadline.is_some() || self.interrupted.is_some() || state.abort || state.ended_early;
            if ending || self.restarts[rank as usize] >= most {
                return false;
            }
            self.restarts[rank as usize] += 1;
            self.falls.forget(rank);
            state.slots[rank as usize] = Slot::Waiting;
        }
        tracing::info!(rank, ?cause, "a rank has failed and is started again");
        if let Err(error) = self.start(rank) {
            let program = self.launch.program.display();
            lock(&self.shared.state).slots[rank as usize] = Slot::Ended(RankEnd::NotStarted);
            self.fail(rank, Cause::NotStarted(format!("{program}: {error}")));
        }
        true
    }

    /// Notes a failure. It ends the job if it is the first, once that is [clear](Self::judge).
    fn fail(&mut self, rank: u32, cause: Cause) {
        let state = lock(&self.shared.state);
        if state.first_failure.is_some() {
            return;
        }
        let pid = state.pids[rank as usize];
        let failure = Failure { rank, pid, cause, after: self.began.elapsed(), quit_before: None };
        drop(state);
        if matches!(failure.cause, Cause::NotStarted(_)) {
            return self.end_by(failure);
        }
        let since = Instant::now();
        self.suspects.get_or_insert_with(|| Suspects { failures: Vec::new(), since }).failures.push(failure);
    }

    /// Which failure was the first is clear when nobody runs who fell before, or with, the rank that failed first as far as is
    /// known.
    fn judge(&mut self) {
        let Some(Suspects { failures, since }) = &mut self.suspects else { return };
        let by_sockets = self.env.rendezvous.is_some();
        let Some(first) = self.falls.first_of(failures, by_sockets) else { return };
        let state = lock(&self.shared.state);
        let runs = |rank: u32| matches!(state.slots.get(rank as usize), Some(Slot::Running(_)));
        let waits = self.deadline.is_none()
            && (0..state.slots.len() as u32).any(runs)
            && (by_sockets && since.elapsed() < TOGETHER
                || since.elapsed() < END_OF_FALLEN
                    && self.falls.may_precede(failures[first].rank, by_sockets).any(runs));
        drop(state);
        if !waits {
            let failure = failures.swap_remove(first);
            self.suspects = None;
            self.end_by(failure);
        }
    }

    /// Ends the job by its first failure.
    fn end_by(&mut self, mut failure: Failure) {
        let mut state = lock(&self.shared.state);
        let ended_well =
            |rank: &u32| matches!(state.slots.get(*rank as usize), Some(Slot::Ended(RankEnd::Exit(0))));
        failure.quit_before =
            self.falls.shortly_before(failure.rank, self.env.rendezvous.is_some()).find(ended_well);
        tracing::debug!(%failure, "first failure");
        state.first_failure = Some(failure);
        // Who waits for it may have looked since the rank's end was told.
        self.shared.changed.notify_all();
        if self.launch.keep_going {
            return;
        }
        state.signal_all(Signal::TERM);
        state.ended_early |= Self::others_left(&state);
        drop(state);
        self.end_waiting(None);
        self.deadline.get_or_insert_with(|| Instant::now() + self.launch.grace);
    }

    fn others_left(state: &State) -> bool {
        state.slots.iter().any(|slot| matches!(slot, Slot::Waiting | Slot::Running(_)))
    }

    /// Gives up the ranks that have yet to start. By a signal: they cannot tell that it ended them, as those do that run.
    fn end_waiting(&mut self, signal: Option<Signal>) {
        let mut state = lock(&self.shared.state);
        state.ended_early |= Self::others_left(&state);
        let mut first = None;
        for (rank, slot) in state.slots.iter_mut().enumerate() {
            if matches!(slot, Slot::Waiting) {
                *slot = Slot::Ended(RankEnd::NotStarted);
                first.get_or_insert(rank as u32);
            }
        }
        if let Some((rank, signal)) = first.zip(signal) {
            let (cause, after) = (Cause::Signal(signal.as_raw()), self.began.elapsed());
            let failure = Failure { rank, pid: None, cause, after, quit_before: None };
            state.first_failure.get_or_insert(failure);
            self.shared.changed.notify_all();
        }
        drop(state);
        self.fds.clear();
    }
}

/// Tells those who wait that there is nothing left to wait for, however the supervisor ends.
struct Done(Arc<Shared>);

impl Drop for Done {
    fn drop(&mut self) {
        lock(&self.0.state).done = true;
        self.0.changed.notify_all();
    }
}
