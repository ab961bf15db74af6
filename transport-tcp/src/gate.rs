//! The listener, and the sockets that have not proven anything yet.
//!
//! One task has all of them. A socket costs one entry of a table until it has sent a whole hello, with room for that: nothing is
//! looked at before all of it is there. When the table is full the oldest entry goes, so that whoever is quick gets in however
//! many are slow.

use crate::handshake::{Channel, Claim, FINISH_LEN, HELLO_LEN, HandshakeError, Responder, Verdict, respond};
use crate::hub::{Hub, Settled};
use crate::socket;
use crate::watch::{Alarm, Watch};
use posthaste_core::{Fault, LossCause};
use slab::Slab;
use std::future::poll_fn;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

const LISTENER: u64 = u64::MAX;
/// Connections accepted in a row before the others get their turn.
const ACCEPTS: usize = 64;
/// Looks at what is ready before others have their turn: a flood may bring more at each of them.
const TURNS: usize = 4;
/// How long to leave the listener alone when the system has no descriptor to spare.
const BREATHE: Duration = Duration::from_millis(50);

/// The longer one of what it says.
const LONGEST: usize = if HELLO_LEN > FINISH_LEN { HELLO_LEN } else { FINISH_LEN };

/// Why a socket was turned away.
#[derive(Debug, Error)]
enum TurnedAway {
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    #[error("it ended, or said too much, before it had proven anything")]
    Ended,
    #[error("it took too long")]
    Late,
    #[error("there were too many, and it was the oldest")]
    Crowded,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A socket that has not proven anything.
struct Unproven {
    stream: TcpStream,
    deadline: Instant,
    number: u64,
    /// So many bytes have come of a message.
    bytes: [u8; LONGEST],
    come: usize,
    /// What it claims, once its hello was good; it still has to show that it is no recording.
    claim: Option<Box<(Claim, Responder)>>,
}

/// What one of them costs at most, its entry and what its good hello left.
const COST: usize = size_of::<Unproven>() + size_of::<(Claim, Responder)>();
const _: () = assert!(COST < 512 - 64, "what has proven nothing costs nearly nothing");

pub(crate) struct Gate {
    hub: Arc<Hub>,
    listener: TcpListener,
    watch: Watch,
    alarm: Alarm,
    waiting: Slab<Unproven>,
    /// What a look has found.
    ready: Vec<(u64, bool)>,
    accepted: u64,
    /// The listener is left alone until then.
    closed_until: Option<Instant>,
    /// The system did not let the alarm be set: the gate looks by itself until it does.
    unset: bool,
}

impl Gate {
    /// Around a bound listener.
    pub fn new(hub: Arc<Hub>, listener: TcpListener) -> io::Result<Gate> {
        listener.set_nonblocking(true)?;
        let watch = Watch::new()?;
        watch.add_listener(&listener, LISTENER)?;
        let alarm = Alarm::new(&watch)?;
        Ok(Gate {
            hub,
            listener,
            watch,
            alarm,
            waiting: Slab::new(),
            ready: Vec::new(),
            accepted: 0,
            closed_until: None,
            unset: false,
        })
    }

    /// Begins to wait in the runtime that this is called in.
    ///
    /// # Errors
    /// If it cannot.
    pub fn start(&mut self) -> io::Result<()> {
        self.alarm.start()?;
        self.alarm.set()
    }

    /// Lets peers in, for ever. It has [started](Self::start).
    pub async fn run(mut self) {
        loop {
            if let Some(until) = self.closed_until {
                tokio::time::sleep_until(until.into()).await;
            }
            if self.unset {
                tokio::time::sleep(BREATHE).await;
                self.turn();
                continue;
            }
            let next = self.next_deadline();
            let rung = poll_fn(|cx| self.alarm.poll(cx));
            match next {
                Some(at) => {
                    // That the time came first is as good a reason to look.
                    let _ = tokio::time::timeout_at(at.into(), rung).await;
                }
                None => drop(rung.await),
            }
            self.turn();
            // A flood at the gate must not keep the runtime from the ports.
            tokio::task::yield_now().await;
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.waiting.iter().map(|(_, unproven)| unproven.deadline).min()
    }

    fn turn(&mut self) {
        let now = Instant::now();
        if self.closed_until.is_some_and(|until| until <= now) {
            self.closed_until = None;
        }
        // A flood may bring as much meanwhile, again and again.
        for _ in 0..TURNS {
            let mut ready = std::mem::take(&mut self.ready);
            let more = self.watch.look(|found| ready.push((found.key, found.ended)));
            let mut knocks = false;
            for (key, ended) in ready.drain(..) {
                match key {
                    LISTENER => knocks = true,
                    key => self.read(key as usize, ended),
                }
            }
            self.ready = ready;
            // Last: whoever comes in may get the key of one that makes room, and is not to be taken for it.
            if knocks {
                self.accept();
            }
            if !more {
                break;
            }
        }
        // Not edge after edge: the alarm is told anew of what is still there.
        self.alarm.clear();
        let set = self.alarm.set();
        if let Err(error) = &set
            && !self.unset
        {
            tracing::error!(me = %self.hub.me, %error, "cannot wait for connections");
        }
        self.unset = set.is_err();
        let late: Vec<usize> = self
            .waiting
            .iter()
            .filter(|(_, unproven)| unproven.deadline <= now)
            .map(|(key, _)| key)
            .collect();
        for key in late {
            self.turn_away(key, &TurnedAway::Late);
        }
    }

    fn accept(&mut self) {
        if self.closed_until.is_some() {
            return;
        }
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Err(error) = self.admit(stream) {
                        self.tell(&TurnedAway::Io(error));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors: those that wait here are the first to go.
                    self.tell(&TurnedAway::Io(error));
                    self.drop_oldest();
                    self.closed_until = Some(Instant::now() + BREATHE);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        if self.waiting.len() >= self.hub.limits.unproven {
            self.drop_oldest();
        }
        self.accepted += 1;
        let deadline = Instant::now() + self.hub.times.handshake;
        let (number, bytes) = (self.accepted, [0; LONGEST]);
        let unproven = Unproven { stream, deadline, number, bytes, come: 0, claim: None };
        let key = self.waiting.insert(unproven);
        self.watch.add(&self.waiting[key].stream, key as u64)?;
        self.read(key, false);
        Ok(())
    }

    fn drop_oldest(&mut self) {
        let oldest = self.waiting.iter().min_by_key(|(_, unproven)| unproven.number).map(|(key, _)| key);
        if let Some(key) = oldest {
            self.turn_away(key, &TurnedAway::Crowded);
        }
    }

    fn turn_away(&mut self, key: usize, why: &TurnedAway) {
        self.drop_unproven(key);
        self.tell(why);
    }

    /// A socket that has proven nothing is given up: also one that a process which was forked meanwhile holds open, with the
    /// watch for it. What came of it would be taken for news of who gets its key next.
    fn drop_unproven(&mut self, key: usize) {
        let unproven = self.waiting.remove(key);
        // One that has failed already is watched and connected no more.
        let _unwatched = self.watch.remove(&unproven.stream, key as u64);
        let _ended = unproven.stream.shutdown(std::net::Shutdown::Both);
    }

    fn tell(&self, why: &TurnedAway) {
        if let Some(more) = self.hub.log.pass() {
            tracing::warn!(me = %self.hub.me, %why, more, "a connection was turned away");
        }
    }

    /// Looks at what a socket has sent so far.
    fn read(&mut self, key: usize, ended: bool) {
        let Some(unproven) = self.waiting.get_mut(key) else { return };
        match unproven.step(&self.hub) {
            Ok(Step::Wait) if ended => self.turn_away(key, &TurnedAway::Ended),
            Ok(Step::Wait) => {}
            // Of two that connect to each other at once, one gives its attempt up.
            Err(TurnedAway::Ended) if unproven.claim.is_some() => {
                self.drop_unproven(key);
                tracing::debug!(me = %self.hub.me, "a connection was given up before it had proven anything");
            }
            Ok(Step::Proven(claim, channel)) => {
                let proven = self.waiting.remove(key);
                // What comes for its port is not to wake this task, nor to be taken for news of who gets its key next.
                let left = self.watch.remove(&proven.stream, key as u64).map_err(TurnedAway::Io);
                if let Err(why) = left.and_then(|()| self.settle(proven.stream, claim, *channel)) {
                    self.tell(&why);
                }
            }
            Err(why) => self.turn_away(key, &why),
        }
    }

    /// The peer is who it says it is: the connection is judged, and handed to its port if it counts.
    fn settle(&self, stream: TcpStream, claim: Claim, mut channel: Channel) -> Result<(), TurnedAway> {
        // Before it is judged: whoever is accepted counts from then on, whatever fails.
        socket::prepare(&stream, &self.hub.times, &self.hub.limits)?;
        let verdict = self.hub.judge(&claim);
        let accepted = verdict == Verdict::Accept;
        posthaste_core::failpoint!("tcp.gate.judged");
        let last = match channel.verdict(verdict) {
            Ok(last) => last,
            Err(error) => {
                if accepted {
                    let fault = Fault::PeerLost(claim.from.rank);
                    let cause = LossCause::Disconnected;
                    self.hub.ended(claim.to, claim.from, claim.incarnation, fault, cause);
                }
                return Err(error.into());
            }
        };
        // An empty buffer has room for so little, or the connection is broken, which its port will see.
        let _ = (&stream).write(&last);
        posthaste_core::failpoint!("tcp.gate.told");
        if accepted {
            let channel = channel.settled(self.hub.identity.mode());
            self.hub.deliver(
                claim.to,
                Settled {
                    peer: claim.from,
                    incarnation: claim.incarnation,
                    stream: Arc::new(stream),
                    channel,
                },
            );
        }
        Ok(())
    }
}

enum Step {
    Wait,
    Proven(Claim, Box<Channel>),
}

impl Unproven {
    fn step(&mut self, hub: &Hub) -> Result<Step, TurnedAway> {
        if self.claim.is_none() {
            let Some(hello) = self.whole::<HELLO_LEN>()? else { return Ok(Step::Wait) };
            let (claim, responder, answer) = respond(&hub.identity, &hello)?;
            if (&self.stream).write(&answer)? != answer.len() {
                return Err(TurnedAway::Ended);
            }
            self.claim = Some(Box::new((claim, responder)));
            posthaste_core::failpoint!("tcp.gate.answered");
        }
        let Some(finish) = self.whole::<FINISH_LEN>()? else { return Ok(Step::Wait) };
        let Some(claim) = &self.claim else { return Ok(Step::Wait) };
        let channel = Box::new(claim.1.finished(&finish)?);
        // Whoever has given up since tries again, and is not to find that its one connection was made and has ended. Nothing but
        // that can follow before the verdict.
        match self.stream.peek(&mut [0]) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(Step::Proven(claim.0, channel))
            }
            Ok(_) => Err(TurnedAway::Ended),
            Err(error) => Err(error.into()),
        }
    }

    /// A message, once all of it is there. What has come of it is taken off the socket: behind what is left there nobody would see
    /// that the other side has ended.
    fn whole<const N: usize>(&mut self) -> Result<Option<[u8; N]>, TurnedAway> {
        let mut message = [0; N];
        while self.come < N {
            match (&self.stream).read(&mut self.bytes[self.come..N]) {
                Ok(0) => return Err(TurnedAway::Ended),
                Ok(count) => self.come += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        message.copy_from_slice(&self.bytes[..N]);
        self.come = 0;
        Ok(Some(message))
    }
}
