//! The thread that serves a meeting.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::bounded_log::BoundedLog;
use crate::key::{JobId, JobKey};
use crate::rendezvous::absent::Absent;
use crate::rendezvous::bulletin::{Bulletin, Notice};
use crate::rendezvous::gathering::{Gathering, gives_up};
use crate::rendezvous::handover::Handover;
use crate::rendezvous::member::{Member, Over, Said, State};
use crate::rendezvous::silence::notice_silence;
use crate::rendezvous::standing::{Reclaim, Standing};
use crate::rendezvous::stranger::{Proven, Step, Stranger};
use crate::rendezvous::wire::{Failure, NO_RANK, who};

/// How long a connection has to prove the key.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections that have proven nothing; past it the oldest is closed, so that whoever is quick gets in.
const MOST_STRANGERS: usize = 256;
/// Connections that have proven the key and have no seat here: who looks who serves, or was refused.
const MOST_WITHOUT_SEAT: usize = 256;
/// Connections accepted in a row before the others get their turn.
const ACCEPTS: usize = 64;
/// How long to leave the listener alone when there is no descriptor to spare.
const BREATHE: Duration = Duration::from_millis(50);
/// How long a connection that was told to go may stay, and how long the end of the server waits for those that have yet
/// to take what they are due.
const LINGER: Duration = Duration::from_secs(5);

pub(crate) struct Server {
    listener: TcpListener,
    pub(crate) stop: Arc<Stop>,
    job: JobId,
    key: JobKey,
    pub(crate) gathering: Gathering,
    /// After how much of it a host is lost.
    pub(crate) silence: Duration,
    strangers: VecDeque<Stranger>,
    pub(crate) members: Vec<Member>,
    /// It does not serve yet.
    pub(crate) standing: Option<Standing>,
    /// Tells what comes to nobody's ears here: the server that passed the news on to this one, until its end.
    pub(crate) predecessor: Option<Bulletin>,
    /// How often the news have changed hands.
    pub(crate) generation: u32,
    /// Who is to serve next, in this order.
    pub(crate) standbys: Vec<(u32, SocketAddr)>,
    /// Those who have not come since this one took over.
    pub(crate) absent: Option<Absent>,
    /// Where the ranks met in the first place, if that was served by another.
    pub(crate) reclaim: Option<Reclaim>,
    log: BoundedLog,
    /// The listener is left alone until then.
    closed_until: Option<Instant>,
    /// It has been told to end.
    pub(crate) stopping: bool,
    /// When to end even if somebody has not taken what it is due.
    pub(crate) ending: Option<Instant>,
    /// Or how far the ranks that go on are on their way to another server.
    pub(crate) handover: Option<Handover>,
}

/// What a server is told by others of its process.
#[derive(Debug)]
pub(crate) struct Stop {
    /// Can be read from when there is something.
    pub(crate) bell: OwnedFd,
    /// It is to end.
    pub(crate) stopping: AtomicBool,
    /// Processes of ranks, by rank and number, that were seen to end.
    pub(crate) ended: Mutex<Vec<(u32, u32)>>,
    /// The rank that serves, so that another is to serve the news from then on; or [`NO_RANK`].
    pub(crate) served_by: AtomicU32,
    /// What befalls the process that it is of.
    #[cfg(test)]
    pub(crate) fate: Mutex<Option<Fate>>,
}

/// What befalls a process.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fate {
    Vanishes,
    Stops(Duration),
}

impl Stop {
    /// There is something.
    pub(crate) fn ring(&self) {
        // It cannot be full: nobody rings 2^64 times.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
impl Stop {
    /// Whether its process has ended, which may be stopped before.
    fn befalls(&self) -> bool {
        loop {
            let fate = self.fate.lock().unwrap().take();
            match fate {
                Some(Fate::Vanishes) => return true,
                Some(Fate::Stops(time)) => std::thread::sleep(time),
                None => return false,
            }
        }
    }
}

/// What a sleep has found.
struct Found {
    rung: bool,
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
        silence: Duration,
        standing: Option<Standing>,
    ) -> Self {
        Self {
            listener,
            stop,
            job,
            key,
            gathering,
            silence,
            strangers: VecDeque::new(),
            members: Vec::new(),
            standing,
            predecessor: None,
            generation: 0,
            standbys: Vec::new(),
            absent: None,
            reclaim: None,
            log: BoundedLog::new(Instant::now()),
            closed_until: None,
            stopping: false,
            ending: None,
            handover: None,
        }
    }

    pub(crate) fn run(mut self) {
        let now = Instant::now();
        if let Some(standing) = &mut self.standing {
            standing.announce();
        }
        // Something may have come behind the duty.
        if self.standing.is_some() && self.stand(true, now) {
            return;
        }
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
            #[cfg(test)]
            if self.stop.befalls() {
                return;
            }
            let now = Instant::now();
            // What has been said before the end counts: whoever serves may have left a moment ago.
            self.serve_members(&found.members, now);
            let stopping = found.rung && self.answer_bell(now);
            self.stopping |= stopping;
            let stop = stopping && self.standing.is_none();
            if self.standing.is_some() {
                if self.stand(found.predecessor, now) {
                    return;
                }
            } else if found.predecessor {
                self.hear_predecessor();
            }
            if stop && self.gathering.is_over() && self.served_by().is_some() && !self.is_ending() {
                self.handover = Some(Handover::new(now));
            }
            let over = self.hand_over(now);
            if over || (stop && !self.is_ending()) {
                self.handover = None;
                self.ending = Some(now + LINGER);
                self.strangers.clear();
                self.gathering.fail(Failure::called_off());
                // Those who wait for the others hear why in vain.
                self.close();
            }
            if self.lets_in() {
                self.serve_strangers(&found.strangers, now);
                if found.connecting {
                    self.accept(now);
                }
            } else {
                // Nobody would hear what they say, of which the next sleep would be told again and again.
                self.strangers.clear();
            }
            self.look_for_absent(now);
            self.appoint();
            self.gathering.tick(now);
            self.tell_failure(now);
            self.flush();
            let settled = || self.members.iter().all(Member::is_settled);
            if self.ending.is_some_and(|ending| ending <= now || settled()) {
                return;
            }
        }
    }

    /// Tells all but those who wait for others that they will hear nothing more.
    fn close(&mut self) {
        let there = |member: &Member| {
            member.rank.is_some() && member.closing.is_none() && member.state != State::Waiting
        };
        for at in 0..self.members.len() {
            if !there(&self.members[at]) {
                continue;
            }
            if self.members[at].state != State::Watching && self.gathering.is_over() {
                // It has not listened yet, and is to know whom it can listen to then.
                self.tell_who_serves(at);
            }
            self.members[at].tell_closed();
        }
    }

    /// Whether the server is to end.
    fn answer_bell(&mut self, now: Instant) -> bool {
        // It counts what was written; whoever writes after this is seen the next time.
        let _ = rustix::io::read(&self.stop.bell, &mut [0; 8]);
        let ended = std::mem::take(&mut *self.stop.ended.lock().unwrap_or_else(PoisonError::into_inner));
        for (rank, pid) in ended {
            self.died(rank, pid, now);
        }
        self.stop.stopping.load(Ordering::Acquire)
    }

    /// A process was seen to end: if it was that of a member, its connection is over, though another may hold it open.
    fn died(&mut self, rank: u32, pid: u32, now: Instant) {
        let Some(at) = self.members.iter().position(|member| member.is(rank, pid)) else { return };
        // What it has said before its end counts.
        let mut said = Vec::new();
        let read = self.members[at].read(&mut said);
        let heard = said.into_iter().try_for_each(|said| self.hear(at, said, now));
        self.members[at].died = true;
        let over = read.and(heard).err().unwrap_or(Over::Ended);
        self.remove(vec![(at, over)]);
        self.tell_failure(now);
    }

    fn sleep(&mut self) -> io::Result<Found> {
        let now = Instant::now();
        if self.closed_until.is_some_and(|until| until <= now) {
            self.closed_until = None;
        }
        let open = self.closed_until.is_none() && self.lets_in();
        let ends = self.is_ending();
        if let Some(reclaim) = self.reclaim.as_mut().filter(|_| !ends) {
            let gone = self.gathering.gone();
            reclaim.tick(gone.filter(|(_, said)| !said).map(|(rank, _)| rank), now);
        }
        let stop = if self.stopping { PollFlags::empty() } else { PollFlags::IN };
        let listener = if open { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(&self.stop.bell, stop), PollFd::new(&self.listener, listener)];
        fds.extend(self.strangers.iter().map(|stranger| PollFd::new(stranger.stream(), PollFlags::IN)));
        fds.extend(self.members.iter().map(|member| {
            let output = if member.has_output() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(member.stream(), PollFlags::IN | output)
        }));
        let reclaimed = self.reclaim.as_ref().and_then(Reclaim::listener);
        fds.extend(reclaimed.map(|place| PollFd::new(place, listener)));
        let before = self.predecessor.as_ref().or(self.standing.as_ref().and_then(Standing::before));
        fds.extend(before.map(|before| PollFd::new(before.stream(), PollFlags::IN)));
        let places = usize::from(reclaimed.is_some());
        let next = self
            .strangers
            .front()
            .map(|stranger| stranger.deadline)
            .into_iter()
            .chain(self.gathering.deadline())
            .chain(self.members.iter().filter_map(|member| member.closing))
            .chain(self.members.iter().filter_map(|member| member.is_awaited(now)))
            .chain(self.closed_until)
            .chain(self.ending)
            .chain(self.handover.as_ref().map(|handover| handover.deadline(now)))
            .chain(self.standing.as_ref().and_then(|standing| standing.deadline(now)))
            .chain(self.reclaim.as_ref().filter(|_| !ends).and_then(Reclaim::deadline))
            .chain(self.absent.as_ref().filter(|_| self.is_looking()).map(|absent| absent.deadline(now)))
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
        let (members, rest) = rest.split_at(self.members.len());
        let (reclaimed, predecessor) = rest.split_at(places);
        let (strangers, members) = (strangers.to_vec(), members.to_vec());
        let connecting = (ready[1] || reclaimed.contains(&true)) && open;
        let predecessor = predecessor.contains(&true);
        Ok(Found { rung: ready[0], connecting, predecessor, strangers, members })
    }

    /// The rank that serves, if one does.
    pub(crate) fn served_by(&self) -> Option<u32> {
        // Relaxed: it is set before the bell is rung, or by this thread.
        Some(self.stop.served_by.load(Ordering::Relaxed)).filter(|rank| *rank != NO_RANK)
    }

    /// Whether it is about to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.is_some() || self.handover.is_some()
    }

    /// Whether somebody may still come.
    fn lets_in(&self) -> bool {
        self.ending.is_none() && (self.handover.is_none() || self.gathering.is_expecting())
    }

    /// Passes on what the server before this one tells of those who have not come here.
    fn hear_predecessor(&mut self) {
        let Some(before) = &mut self.predecessor else { return };
        let server = before.server();
        let (news, lost) = match before.read() {
            Ok(news) => (news, false),
            Err(_) => (Vec::new(), true),
        };
        if lost || news.contains(&Notice::Closed) {
            self.predecessor = None;
        }
        news.into_iter().for_each(|notice| self.heard(notice));
        // If it has not left before.
        self.ended_unheard(server.filter(|_| lost));
    }

    /// Whether somebody may have ended who would have come here.
    fn is_looking(&self) -> bool {
        self.predecessor.is_none() && !self.is_ending() && self.gathering.is_expecting()
    }

    /// Looks for those who have not come since this server took over.
    fn look_for_absent(&mut self, now: Instant) {
        if !self.is_looking() {
            return;
        }
        let Some(absent) = &mut self.absent else { return };
        for (rank, left) in absent.look(self.gathering.expected(), now) {
            tracing::debug!(rank, left, "has not come, and has ended");
            self.heard(if left { Notice::Left(rank) } else { Notice::Ended(rank) });
        }
    }

    fn accept(&mut self, now: Instant) {
        self.accept_at(None, now);
        // Taken for the time being, as it goes on with the rest.
        if let Some(reclaim) = self.reclaim.take() {
            self.accept_at(reclaim.listener(), now);
            self.reclaim = Some(reclaim);
        }
    }

    /// Accepts those who have come there, or to its own listener.
    fn accept_at(&mut self, place: Option<&TcpListener>, now: Instant) {
        for _ in 0..ACCEPTS {
            match place.unwrap_or(&self.listener).accept() {
                Ok((stream, address)) => {
                    let prepared = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
                    if prepared.and_then(|()| notice_silence(&stream, self.silence)).is_err() {
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
        let again = |member: &Member| member.moving && member.is(hello.rank, hello.pid);
        // It was not answered in time, and the end of its first connection is still to be noticed.
        if hello.moves.is_some()
            && let Some(at) = self.members.iter().position(again)
        {
            self.members.swap_remove(at);
            self.gathering.unseat(hello.rank);
        }
        let own = |standing: &Standing| standing.rank() == hello.rank && hello.moves.is_some();
        let refusal = self.standing.as_ref().filter(|standing| !own(standing)).map(|standing| {
            if standing.is_cut_off() {
                Failure::Refused("this rank was cut off from the others".into())
            } else {
                Failure::Later { hears: standing.hears() }
            }
        });
        // Those who move have met before; here nobody has.
        if hello.moves.is_some() && !self.gathering.is_over() {
            let mut visitor = Member::visitor(stream, channel, hello);
            if hello.size == self.gathering.size() {
                visitor.welcome(self.job.as_bytes(), 0, self.generation, self.served_by());
            } else {
                let other = Failure::Refused("ranks of another job meet here".into());
                visitor.dismiss(&other, now + LINGER);
            }
            self.members.push(visitor);
            self.keep_few_without_seat();
            return;
        }
        let joined = refusal.map_or_else(|| self.gathering.join(hello, &who), Err);
        let member = match joined.map_err(|failure| self.without_hope(failure)) {
            Ok(incarnation) => {
                tracing::debug!(rank = hello.rank, who, incarnation, "came to the rendezvous");
                let mut member = Member::new(stream, channel, Some(hello.rank), hello);
                member.welcome(self.job.as_bytes(), incarnation, self.generation, self.served_by());
                if let Some((incarnations, parts)) = self.gathering.roster().filter(|_| incarnation > 0) {
                    member.welcome_back(incarnations, parts);
                }
                member
            }
            Err(failure) => {
                match failure {
                    // It will come again, or go to another.
                    Failure::Later { .. } => tracing::debug!(rank = hello.rank, who, "came too early"),
                    // It looks who serves here, or its end is still to be noticed.
                    _ if hello.moves.is_some() => {
                        tracing::debug!(rank = hello.rank, who, ?failure, "has no seat here");
                    }
                    _ => self.tell_refused(hello.rank, &who, &failure),
                }
                let mut member = Member::new(stream, channel, None, hello);
                member.dismiss(&failure, now + LINGER);
                member
            }
        };
        self.members.push(member);
        self.keep_few_without_seat();
    }

    /// Whoever has left waits for the end of the job where a rank serves, as the next one of the same ranks may meet there then; a
    /// launcher serves one job.
    fn without_hope(&self, failure: Failure) -> Failure {
        match failure {
            Failure::LeftBefore { rank, first } if self.served_by().is_none() => Failure::Refused(format!(
                "rank {rank} was here as {first} and has left the job in order, so that no other process can be it: start \
                 one program per `posthaste run`"
            )),
            failure => failure,
        }
    }

    fn tell_refused(&mut self, rank: u32, who: &str, failure: &Failure) {
        if let Some(left_out) = self.log.line(Instant::now()) {
            tracing::warn!(rank, who, ?failure, left_out, "the rendezvous refused a rank");
        }
    }

    /// A rank that asks again and again is told once; its last attempts are not of more use than the others' descriptors.
    fn keep_few_without_seat(&mut self) {
        let without = || self.members.iter().enumerate().filter(|(_, member)| !member.has_seat());
        if without().count() > MOST_WITHOUT_SEAT
            && let Some((at, _)) = without().next()
        {
            self.members.remove(at);
        }
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
        if member.visits {
            // Not if somebody is here who is not dead there: the next job of the same ranks meets.
            if let Said::Elsewhere { place, died } = said
                && !self.gathering.is_over()
                && self.gathering.taken().all(|rank| died.contains(&rank))
            {
                tracing::debug!(%place, "these ranks have met before");
                self.gathering.fail(Failure::Elsewhere(place));
            }
            return Ok(());
        }
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
                self.tell_who_serves(at);
                Ok(())
            }
            (Said::Return { part }, State::Returning) => {
                let incarnation = self.gathering.give_again(rank, part.clone());
                tracing::info!(rank, incarnation, "a rank was started again");
                self.watching().for_each(|other| other.tell_arrived(rank, incarnation, &part));
                let member = &mut self.members[at];
                member.state = State::Watching;
                // It waits for that: of a server that ends before it nobody may have heard of this rank.
                member.tell_arrived(rank, incarnation, &[]);
                for (other, incarnation, part) in
                    self.gathering.returned().filter(|(other, ..)| *other != rank)
                {
                    member.tell_arrived(other, incarnation, part);
                }
                for (rank, said) in self.gathering.gone() {
                    member.tell_gone(rank, said);
                }
                self.tell_who_serves(at);
                Ok(())
            }
            (Said::Serving { place }, State::Watching) => {
                self.stands_by(at, place);
                Ok(())
            }
            (Said::Moved, State::Watching) if member.may_move => {
                member.moved = true;
                Ok(())
            }
            (Said::Leave, State::Watching) => {
                member.left = true;
                if let Some(standing) = &mut self.standing {
                    standing.leave();
                }
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
            let Some(rank) = member.rank else { continue };
            if member.has_not_moved() || (member.moved && !self.is_ending()) {
                // It lives, and may come.
                self.gathering.unseat(rank);
            } else if !member.moved {
                self.gathering.leave(rank, member.left);
                // Behind the word that there is nothing more to hear, an end is only that of a connection.
                if self.ending.is_none() {
                    self.watching().for_each(|other| other.tell_way(rank, member.way()));
                }
                self.no_standby(rank);
            }
        }
        any
    }

    /// The ranks that hear who is gone.
    pub(crate) fn watching(&mut self) -> impl Iterator<Item = &mut Member> {
        self.members.iter_mut().filter(|member| member.state == State::Watching)
    }

    fn turn_away(&mut self, reason: &'static str) {
        if let Some(left_out) = self.log.line(Instant::now()) {
            tracing::warn!(reason, left_out, "the rendezvous turned a connection away");
        }
    }
}
