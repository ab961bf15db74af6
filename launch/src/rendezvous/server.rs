//! The thread that serves a meeting.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::bounded_log::BoundedLog;
use crate::key::{JobId, JobKey};
use crate::rendezvous::bulletin::{Bulletin, Notice};
use crate::rendezvous::gathering::{Gathering, gives_up};
use crate::rendezvous::handover::Handover;
use crate::rendezvous::member::{Member, Over, Said, State};
use crate::rendezvous::silence::notice_silence;
use crate::rendezvous::stranger::{Proven, Step, Stranger};
use crate::rendezvous::wire::{Failure, who};

/// How long a connection has to prove the key.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that have proven nothing; past it the oldest is closed, so that whoever is quick gets in.
const MOST_STRANGERS: usize = 256;
/// Connections accepted in a row before the others get their turn.
const ACCEPTS: usize = 64;
/// How long to leave the listener alone when there is no descriptor to spare.
const BREATHE: Duration = Duration::from_millis(50);
/// How long a connection that was told to go may stay, and how long the end of the server waits for those that have yet
/// to take what they are due.
const LINGER: Duration = Duration::from_secs(5);

pub(crate) struct Server {
    listener: TcpListener,
    stop: Arc<Stop>,
    job: JobId,
    key: JobKey,
    pub(crate) gathering: Gathering,
    strangers: VecDeque<Stranger>,
    pub(crate) members: Vec<Member>,
    /// Tells what comes to nobody's ears here: the server that this one follows, until its end.
    predecessor: Option<Bulletin>,
    log: BoundedLog,
    /// The listener is left alone until then.
    closed_until: Option<Instant>,
    /// When to end even if somebody has not taken what it is due.
    ending: Option<Instant>,
    /// Or how far the ranks that go on are on their way to another server.
    pub(crate) handover: Option<Handover>,
}

/// How a server is told to end.
#[derive(Debug)]
pub(crate) struct Stop {
    /// Can be read from when it is to end.
    pub(crate) bell: OwnedFd,
    /// Whether another rank is to serve the news from then on.
    pub(crate) pass_on: AtomicBool,
}

/// What a sleep has found.
struct Found {
    stop: bool,
    connecting: bool,
    predecessor: bool,
    strangers: Vec<bool>,
    members: Vec<bool>,
}

impl Server {
    pub(crate) fn new(
        listener: TcpListener,
        stop: Arc<Stop>,
        job: JobId,
        key: JobKey,
        gathering: Gathering,
        predecessor: Option<Bulletin>,
    ) -> Self {
        Self {
            listener,
            stop,
            job,
            key,
            gathering,
            strangers: VecDeque::new(),
            members: Vec::new(),
            predecessor,
            log: BoundedLog::new(Instant::now()),
            closed_until: None,
            ending: None,
            handover: None,
        }
    }

    pub(crate) fn run(mut self) {
        loop {
            let found = match self.sleep() {
                Ok(found) => found,
                Err(error) => {
                    // Out of memory at worst; do not turn that into a busy loop.
                    tracing::error!(%error, "the rendezvous cannot poll");
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            let now = Instant::now();
            // What has been said before the end counts: whoever serves may have left a moment ago.
            self.serve_members(&found.members, now);
            if found.predecessor {
                self.hear_predecessor();
            }
            // Relaxed: the bell, which was rung behind it, orders it.
            let pass_on = found.stop && self.gathering.is_over() && self.stop.pass_on.load(Ordering::Relaxed);
            if pass_on && !self.is_ending() {
                self.handover = Some(Handover::new(now));
            }
            let over = self.hand_over(now);
            if over || (found.stop && !self.is_ending()) {
                self.handover = None;
                self.ending = Some(now + LINGER);
                self.strangers.clear();
                self.gathering.fail(Failure::Refused("whoever served the meeting has called it off".into()));
                // Those who wait for the others hear why in vain.
                let there = |member: &&mut Member| {
                    member.rank.is_some() && member.closing.is_none() && member.state != State::Waiting
                };
                self.members.iter_mut().filter(there).for_each(Member::tell_closed);
            }
            if self.lets_in() {
                self.serve_strangers(&found.strangers, now);
                if found.connecting {
                    self.accept(now);
                }
            }
            self.gathering.tick(now);
            self.tell_failure(now);
            self.flush();
            let settled = || self.members.iter().all(Member::is_settled);
            if self.ending.is_some_and(|ending| ending <= now || settled()) {
                return;
            }
        }
    }

    fn sleep(&mut self) -> io::Result<Found> {
        let now = Instant::now();
        if self.closed_until.is_some_and(|until| until <= now) {
            self.closed_until = None;
        }
        let open = self.closed_until.is_none() && self.lets_in();
        let stop = if self.is_ending() { PollFlags::empty() } else { PollFlags::IN };
        let listener = if open { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(&self.stop.bell, stop), PollFd::new(&self.listener, listener)];
        fds.extend(self.strangers.iter().map(|stranger| PollFd::new(stranger.stream(), PollFlags::IN)));
        fds.extend(self.members.iter().map(|member| {
            let output = if member.has_output() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(member.stream(), PollFlags::IN | output)
        }));
        fds.extend(self.predecessor.as_ref().map(|before| PollFd::new(before.stream(), PollFlags::IN)));
        let next = self
            .strangers
            .front()
            .map(|stranger| stranger.deadline)
            .into_iter()
            .chain(self.gathering.deadline())
            .chain(self.members.iter().filter_map(|member| member.closing))
            .chain(self.closed_until)
            .chain(self.ending)
            .chain(self.handover.as_ref().map(Handover::deadline))
            .min();
        let timeout = next.map(|next| {
            let left = next.saturating_duration_since(now);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (strangers, rest) = ready[2..].split_at(self.strangers.len());
        let (members, predecessor) = rest.split_at(self.members.len());
        let (strangers, members) = (strangers.to_vec(), members.to_vec());
        let (connecting, predecessor) = (ready[1] && open, predecessor.contains(&true));
        Ok(Found { stop: ready[0], connecting, predecessor, strangers, members })
    }

    /// Whether it has been told to end.
    fn is_ending(&self) -> bool {
        self.ending.is_some() || self.handover.is_some()
    }

    /// Whether somebody may still come.
    fn lets_in(&self) -> bool {
        self.ending.is_none() && (self.handover.is_none() || self.gathering.is_expecting())
    }

    /// Passes on what the server before this one tells of those who have not come here.
    fn hear_predecessor(&mut self) {
        let Some(before) = &mut self.predecessor else { return };
        let news = before.read().unwrap_or_else(|_| vec![Notice::Closed]);
        for notice in news {
            let (rank, said) = match notice {
                Notice::Ended(rank) => (rank, false),
                Notice::Left(rank) => (rank, true),
                Notice::Closed => {
                    self.predecessor = None;
                    continue;
                }
                _ => continue,
            };
            if self.gathering.told_gone(rank, said) {
                self.watching().for_each(|other| other.tell_gone(rank, said));
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, address)) => {
                    let prepared = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
                    if prepared.and_then(|()| notice_silence(&stream)).is_err() {
                        self.turn_away("its connection broke");
                        continue;
                    }
                    if self.strangers.len() >= MOST_STRANGERS {
                        self.strangers.pop_front();
                        self.turn_away("there were too many, and it was the oldest");
                    }
                    self.strangers.push_back(Stranger::new(stream, address, now + HANDSHAKE));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // Out of descriptors: those that have proven nothing are the first to go.
                    tracing::error!(%error, "the rendezvous cannot accept");
                    self.strangers.pop_front();
                    self.closed_until = Some(now + BREATHE);
                    return;
                }
            }
        }
    }

    fn serve_strangers(&mut self, ready: &[bool], now: Instant) {
        let strangers = std::mem::take(&mut self.strangers);
        for (at, mut stranger) in strangers.into_iter().enumerate() {
            let step = if stranger.deadline <= now {
                Step::Away("it took too long to prove anything")
            } else if ready.get(at).copied().unwrap_or(false) {
                stranger.step(&self.key)
            } else {
                Step::Wait
            };
            match step {
                Step::Wait => self.strangers.push_back(stranger),
                Step::Proven(claim) => self.let_in(stranger.into_proven(*claim), now),
                Step::Away(reason) => self.turn_away(reason),
            }
        }
    }

    /// Gives a rank its seat, or tells it why it gets none.
    fn let_in(&mut self, proven: Proven, now: Instant) {
        let Proven { stream, address, hello, channel } = proven;
        let who = who(address, hello.pid);
        let member = match self.gathering.join(hello, &who) {
            Ok(incarnation) => {
                tracing::debug!(rank = hello.rank, who, incarnation, "came to the rendezvous");
                let mut member = Member::new(stream, channel, Some(hello.rank));
                member.welcome(self.job.as_bytes(), incarnation);
                if let Some((incarnations, parts)) = self.gathering.roster().filter(|_| incarnation > 0) {
                    member.welcome_back(incarnations, parts);
                }
                member
            }
            Err(failure) => {
                tracing::warn!(rank = hello.rank, who, ?failure, "the rendezvous refused a rank");
                let mut member = Member::new(stream, channel, None);
                member.dismiss(&failure, now + LINGER);
                member
            }
        };
        self.members.push(member);
    }

    fn serve_members(&mut self, ready: &[bool], now: Instant) {
        let mut said = Vec::new();
        let mut gone = Vec::new();
        for (at, ready) in ready.iter().enumerate() {
            let late = self.members[at].closing.is_some_and(|closing| closing <= now);
            let read = match ready {
                _ if late => Err(Over::Ended),
                true => self.members[at].read(&mut said),
                false => Ok(()),
            };
            let heard = said.drain(..).try_for_each(|said| self.hear(at, said, now));
            if let Err(over) = read.and(heard) {
                gone.push((at, over));
            }
        }
        self.remove(gone);
    }

    /// Does what a rank says.
    fn hear(&mut self, at: usize, said: Said, now: Instant) -> Result<(), Over> {
        let member = &mut self.members[at];
        let Some(rank) = member.rank.filter(|_| member.closing.is_none()) else { return Ok(()) };
        match (said, member.state) {
            (Said::Blob { round, milliseconds, blob }, State::Idle) => {
                match self.gathering.give(rank, round, blob, gives_up(now, milliseconds)) {
                    Ok(None) => member.state = State::Waiting,
                    Ok(Some(parts)) => {
                        member.state = State::Waiting;
                        let waiting = |member: &&mut Member| member.state == State::Waiting;
                        self.members
                            .iter_mut()
                            .filter(waiting)
                            .for_each(|member| member.give(round, parts.clone()));
                    }
                    Err(failure) => member.dismiss(&failure, now + LINGER),
                }
                Ok(())
            }
            (Said::Taken { round }, State::Taking(given)) if round == given && !member.has_output() => {
                member.state = State::Idle;
                Ok(())
            }
            (Said::Watch, State::Idle) => {
                member.state = State::Watching;
                self.gathering.watch();
                for (rank, incarnation, part) in self.gathering.returned() {
                    member.tell_arrived(rank, incarnation, part);
                }
                for (rank, said) in self.gathering.gone() {
                    member.tell_gone(rank, said);
                }
                Ok(())
            }
            (Said::Return { part }, State::Returning) => {
                let incarnation = self.gathering.give_again(rank, part.clone());
                tracing::info!(rank, incarnation, "a rank was started again");
                self.watching().for_each(|other| other.tell_arrived(rank, incarnation, &part));
                let member = &mut self.members[at];
                member.state = State::Watching;
                for (other, incarnation, part) in
                    self.gathering.returned().filter(|(other, ..)| *other != rank)
                {
                    member.tell_arrived(other, incarnation, part);
                }
                for (rank, said) in self.gathering.gone() {
                    member.tell_gone(rank, said);
                }
                Ok(())
            }
            (Said::Serving { place }, State::Watching) => {
                self.serving(rank, place);
                Ok(())
            }
            (Said::Moved, State::Watching) if member.told_to_move => {
                member.moved = true;
                Ok(())
            }
            (Said::Leave, State::Watching) => {
                member.left = true;
                Ok(())
            }
            _ => Err(Over::Garbage("a message that was not its turn")),
        }
    }

    /// Tells everybody who waits that there is nothing to wait for.
    fn tell_failure(&mut self, now: Instant) {
        let Some(failure) = self.gathering.failure() else { return };
        for member in self.members.iter_mut().filter(|member| member.state == State::Waiting) {
            member.dismiss(failure, now + LINGER);
        }
    }

    fn flush(&mut self) {
        let (mut gone, mut said) = (Vec::new(), Vec::new());
        for (at, member) in self.members.iter_mut().enumerate() {
            if member.has_output()
                && let Err(over) = member.write()
            {
                // It may have said why it goes before it went.
                if matches!(over, Over::Ended) && member.read(&mut said).is_ok() {
                    member.read(&mut said).ok();
                }
                for said in said.drain(..) {
                    member.left |= matches!(said, Said::Leave);
                    member.moved |= matches!(said, Said::Moved);
                }
                gone.push((at, over));
            }
        }
        if self.remove(gone) {
            self.tell_failure(Instant::now());
        }
    }

    /// Gives up connections that are over; whether there were any.
    fn remove(&mut self, gone: Vec<(usize, Over)>) -> bool {
        let any = !gone.is_empty();
        for (at, over) in gone.into_iter().rev() {
            let member = self.members.swap_remove(at);
            if let Over::Garbage(what) = over {
                tracing::warn!(rank = member.rank, what, "a rank broke the rules of the rendezvous");
            }
            if let Some(rank) = member.rank.filter(|_| !member.moved) {
                self.gathering.leave(rank, member.left);
                self.watching().for_each(|other| other.tell_gone(rank, member.left));
            }
        }
        any
    }

    /// The ranks that hear who is gone.
    fn watching(&mut self) -> impl Iterator<Item = &mut Member> {
        self.members.iter_mut().filter(|member| member.state == State::Watching)
    }

    fn turn_away(&mut self, reason: &'static str) {
        if let Some(left_out) = self.log.line(Instant::now()) {
            tracing::warn!(reason, left_out, "the rendezvous turned a connection away");
        }
    }
}
