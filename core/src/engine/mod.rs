//! The progress engine of one context: everything that happens under its progress token.
//!
//! ```text
//!   protocol call --> Scope::send / put / get --> descriptor --> Port::inject
//!                                                     |  (no room: the target's InjectionFifo)
//!   advance <-- Port::advance --> dispatch --> Protocol::on_message --> Scope again
//! ```
//! An [`Engine`] is a [`Port`] and a [`State`], side by side, so that a handler which runs inside
//! `Port::advance` can inject: the port lends its sending half, the engine lends its state, and a [`Scope`] is both.

mod aside;
mod at_once;
mod awaited;
mod config;
mod control;
mod credit;
mod dispatch;
mod ending;
mod fifos;
mod gates;
mod kept;
mod oversend;
mod pattern;
mod peer;
mod queue;
mod records;
mod rendezvous;
mod restart;
mod rma;
mod scope;
mod send;
mod state;
mod streamed;
mod watch;

pub use at_once::Whole;
pub use config::{EngineConfig, MOST_CREDITS};
pub use control::ControlSent;
pub use fifos::{FifoError, FifoId, FifoOptions, FifoStatus};
pub use gates::{Gates, Held};
pub use kept::Deposit;
pub use pattern::{PatternError, ReplayId, ReplayStart, record_info};
pub use rma::{Rma, Turn};
pub use scope::Scope;
pub use send::{Given, Payload, SendArgs, Sent, Wait};
pub use state::State;
pub use watch::Watched;

use crate::control::Controls;
use crate::device::{Memory, PeerEvent, Port, SourceTable};
use crate::error::Fault;
use crate::exposed::Exposed;
use crate::ids::{Endpoint, JobShape, Rank};
use crate::protocol::{Credit, Protocol, Registry};
use crate::route::RouteCaps;
use crate::slot::{Outcome, SlotPool, Ticket};
use crate::stats::Stats;
use crate::sync::Arc;
use crate::timer::TimerWheel;
use dispatch::Dispatcher;
use slab::Slab;

/// More packets than most devices keep of one endpoint.
const PACKETS_OF_A_LANE: usize = 1 << 13;
/// Times that so many are taken from every lane, before a peer that still has packets is no further waited for.
const DRAINS: usize = 256;
/// Rounds in which something moved, and in which nothing did, after which senders that wait are paid small debts, too: so many
/// that a stream whose sender always waits takes no record a message.
const ROUNDS_UNPAID: u32 = 1024;
const IDLE_ROUNDS_UNPAID: u32 = 64;

/// Something another thread wants done under the token.
pub enum Work {
    /// Run it.
    Run(Box<dyn FnOnce(&mut Scope<'_>) + Send>),
    /// Run it on the engine itself.
    Enter(Box<dyn FnOnce(&mut Engine) + Send>),
    /// A credited message was consumed.
    Consumed(Credit),
    /// A device has news of a peer.
    Peer(Rank, PeerEvent),
    /// End everything that is pending.
    Shutdown,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Work::Run(_) | Work::Enter(_) => "Run",
            Work::Consumed(_) => "Consumed",
            Work::Peer(..) => "Peer",
            Work::Shutdown => "Shutdown",
        })
    }
}

/// Called with every asynchronous error that no future waits for (D17).
pub type ErrorHandler = Arc<dyn Fn(Fault) + Send + Sync>;

/// A port and the state around it.
pub struct Engine {
    port: Box<dyn Port>,
    state: State,
    /// Beside the state, so that a handler which runs can have that.
    handlers: Vec<Arc<dyn Protocol>>,
    /// It is closed, and dispatches to nobody any more.
    retired: bool,
    armed: bool,
    /// Peers ring also when they make room.
    armed_for_room: bool,
    /// When to settle the sleep that was armed, in milliseconds.
    settle_at: Option<u64>,
    /// Peers ring also when they have written memory at once.
    watching: bool,
    /// How many tasks handlers had started when that was asked last.
    starts_told: u32,
    /// Rounds in which senders waited for credit and were not paid all that they are owed.
    unpaid_rounds: u32,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("state", &self.state)
            .field("armed", &self.armed)
            .finish_non_exhaustive()
    }
}

/// What an engine is made of.
pub struct EngineParts {
    /// This endpoint.
    pub me: Endpoint,
    /// The job.
    pub shape: JobShape,
    /// What can be done with each rank.
    pub caps: RouteCaps,
    /// Settings.
    pub config: EngineConfig,
    /// The client's protocols.
    pub registry: Arc<Registry>,
    /// The client's controls.
    pub controls: std::sync::Arc<Controls>,
    /// The client's gates.
    pub gates: Arc<Gates>,
    /// The memory of this rank and of its peers.
    pub memory: std::sync::Arc<dyn Memory>,
    /// Memory of this rank that no device has.
    pub exposed: std::sync::Arc<Exposed>,
    /// Told of errors nobody waits for.
    pub errors: Option<ErrorHandler>,
    /// Milliseconds of the context's clock.
    pub now: u64,
}

impl std::fmt::Debug for EngineParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineParts").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine around a port, and the pool of its completion slots.
    #[must_use]
    pub fn new(port: Box<dyn Port>, parts: EngineParts) -> (Engine, Arc<SlotPool>) {
        let (slots, completer) = SlotPool::new();
        let endpoints = parts.shape.endpoints();
        parts.registry.enter();
        let mut state = State {
            me: parts.me,
            shape: parts.shape,
            caps: *parts.caps.common(),
            routes: parts.caps,
            // Messages of a word are not measured.
            config: EngineConfig { max_message: parts.config.max_message.max(8), ..parts.config },
            over_send: Box::new([]),
            peers: (0..endpoints).map(|_| None).collect(),
            incarnations: (0..parts.shape.ranks).map(|rank| parts.gates.incarnation_of(Rank(rank))).collect(),
            busy: Vec::new(),
            leaving: Vec::new(),
            cut_off: Vec::new(),
            registry: parts.registry,
            known_protocols: 0,
            ready: false,
            wanting: Vec::new(),
            aside: Vec::new(),
            aside_seen: None,
            controls: parts.controls,
            table: SourceTable::default(),
            lender: 0,
            patterns: pattern::PatternStore::default(),
            replaying: pattern::Replays::default(),
            fifos: fifos::Fifos::default(),
            slots: slots.clone(),
            completer,
            timers: TimerWheel::new(parts.now),
            timers_wanted: 0,
            stats: Stats::default(),
            gates: parts.gates,
            landings: std::sync::Arc::new(rendezvous::Landings::new(
                parts.me.rank,
                parts.memory.clone(),
                parts.config.landing_bytes,
            )),
            landings_seen: None,
            waits_for_memory: false,
            retired: Vec::new(),
            memory: parts.memory,
            exposed: parts.exposed,
            turns: Slab::new(),
            eager: 0,
            scratch: Vec::new(),
            watches: watch::Watches::default(),
            closed: false,
            departed: false,
            restless: false,
            starts: 0,
            interruptions: 0,
            straight: dispatch::Straight::NONE,
            errors: parts.errors,
        };
        state.choose_over_send();
        state.choose_rendezvous();
        let engine = Engine {
            port,
            state,
            handlers: Vec::new(),
            retired: false,
            armed: false,
            armed_for_room: false,
            settle_at: None,
            watching: false,
            starts_told: 0,
            unpaid_rounds: 0,
        };
        (engine, slots)
    }

    /// Both halves as one.
    #[inline]
    pub fn scope(&mut self) -> Scope<'_> {
        Scope { inject: &mut *self.port, state: &mut self.state }
    }

    /// Moves everything that can move: drains up to `budget` packets, then what is queued. Returns the number of
    /// events. Never waits.
    #[inline]
    pub fn advance(&mut self, budget: usize) -> usize {
        let (port, mut sink) = self.port_and_sink();
        let events = port.advance(budget, &mut sink);
        self.moved(events)
    }

    /// Looks up to `looks` times for something to drain, and moves what can move then. `None`: all looks were in vain, and
    /// nothing was moved. The inside of a spin loop.
    #[inline]
    pub fn linger(&mut self, looks: u32, budget: usize) -> Option<usize> {
        let (port, mut sink) = self.port_and_sink();
        let events = port.linger(looks, budget, &mut sink)?;
        Some(self.moved(events))
    }

    #[inline(always)]
    fn port_and_sink(&mut self) -> (&mut dyn Port, Dispatcher<'_>) {
        if self.handlers.len() as u64 != self.state.registry.version() {
            self.refresh_handlers();
        }
        let Engine { port, state, handlers, .. } = self;
        (&mut **port, Dispatcher { state, handlers })
    }

    /// The device has told of so many events; what else can move does.
    #[inline(always)]
    fn moved(&mut self, mut events: usize) -> usize {
        if !self.state.aside.is_empty() {
            events += self.scope().retry_aside();
        }
        if !self.state.busy.is_empty() {
            events += self.scope().pump();
            // Whoever says goodbye is among the busy ones.
            if !self.state.leaving.is_empty() || !self.state.cut_off.is_empty() {
                self.take_goodbyes();
            }
        }
        if !self.state.wanting.is_empty() {
            events += self.pay_now_and_then(events == 0);
        }
        self.state.stats.events += events as u64;
        events
    }

    /// Who sleeps pays before that what senders wait for; who never does, as one that only calls `advance`, or is kept busy by
    /// others, every so many rounds. Returns the number of records that took.
    #[cold]
    fn pay_now_and_then(&mut self, is_idle: bool) -> usize {
        self.unpaid_rounds += 1;
        if self.unpaid_rounds < if is_idle { IDLE_ROUNDS_UNPAID } else { ROUNDS_UNPAID } {
            return 0;
        }
        self.unpaid_rounds = 0;
        self.scope().pay_who_waits()
    }

    #[cold]
    fn refresh_handlers(&mut self) {
        if self.retired {
            return;
        }
        self.handlers = self.state.registry.snapshot();
        self.state.known_protocols = self.handlers.len() as u64;
    }

    /// Looks up to `looks` times whether [`advance`](Self::advance) would find something. The inside of a spin loop.
    #[inline]
    pub fn glance(&mut self, looks: u32) -> bool {
        self.port.glance(looks)
    }

    /// Takes the outcome of an operation if it has ended; the ticket is spent then. Only the ticket's owner calls this.
    #[inline]
    pub fn take(&mut self, ticket: Ticket) -> Option<Outcome> {
        self.state.completer.take(ticket)
    }

    /// Whether handlers have started tasks since this was asked last: see [`Scope::started_task`].
    #[inline(always)]
    pub(crate) fn take_started(&mut self) -> bool {
        let starts = self.state.starts;
        std::mem::replace(&mut self.starts_told, starts) != starts
    }

    /// How often they have said so.
    pub(crate) fn starts(&self) -> u32 {
        self.state.starts
    }

    /// Runs something that is an event. Whatever it is, the work behind it is done, and the engine goes on.
    pub(crate) fn run_once(&mut self, run: impl FnOnce(&mut Scope<'_>)) {
        caught("work that was posted", || run(&mut self.scope()));
        self.state.stats.events += 1;
    }

    /// Runs what another thread posted.
    pub fn run(&mut self, work: Work) {
        match work {
            Work::Run(run) => return self.run_once(run),
            Work::Enter(run) => caught("work that was posted", || run(self)),
            Work::Consumed(credit) => self.scope().consumed(credit),
            Work::Peer(rank, PeerEvent::Down { fault, incarnation, .. }) => {
                // What is said of an incarnation comes late if there is a later one.
                if incarnation >= self.state.incarnation_of(rank) {
                    self.peer_down(rank, fault);
                }
            }
            Work::Peer(rank, PeerEvent::Up { incarnation }) => self.peer_up(rank, incarnation),
            Work::Shutdown => {
                self.state.shut_down();
                // Not who was never asked to leave: its runtime has ended, and peers see that its process does.
                if std::mem::take(&mut self.state.departed) {
                    self.port.leave();
                }
            }
        }
        self.state.stats.events += 1;
    }

    #[cold]
    fn take_goodbyes(&mut self) {
        while let Some(rank) = self.state.cut_off.pop() {
            self.port.cut_off(rank);
        }
        while let Some(&rank) = self.state.leaving.first() {
            // It is on the list meanwhile: what it repeats is not heard.
            self.drain(rank);
            self.state.leaving.retain(|leaving| *leaving != rank);
            // All of its contexts had departed before one of them said so.
            self.state.drained(rank, self.state.incarnation_of(rank));
            self.state.peer_down(rank, Fault::PeerClosed(rank));
        }
    }

    /// Takes all that a rank has sent so far.
    #[cold]
    fn drain(&mut self, rank: Rank) {
        self.refresh_handlers();
        let Engine { port, state, handlers, .. } = self;
        // Every lane has its share of the budget, whatever peers go on to send meanwhile.
        let budget = PACKETS_OF_A_LANE * state.shape.endpoints();
        for round in 0..DRAINS {
            port.advance(budget, &mut Dispatcher { state, handlers });
            if round > 0 && !port.has_packets_of(rank) {
                break;
            }
        }
    }

    fn peer_down(&mut self, rank: Rank, fault: Fault) {
        // What the peer sent while it lived is delivered first.
        self.drain(rank);
        if matches!(fault, Fault::PeerClosed(_)) && self.state.ends(rank) {
            // It left in order: what it sent counts, also what the device holds for a name that is not registered yet.
            self.drain(rank);
        }
        self.port.peer_down(rank);
        // Before protocols are told of the end, and also if its fault is known already: more could come then.
        self.state.drained(rank, self.state.incarnation_of(rank));
        self.state.peer_down(rank, fault);
    }

    /// Prepares for sleep; false if there is something to do after all. `now` in milliseconds.
    pub fn arm(&mut self, now: u64) -> bool {
        if self.state.fifos.more || std::mem::take(&mut self.state.restless) {
            // Nobody rings for what waits for its turn only.
            return false;
        }
        if !self.state.leaving.is_empty() || !self.state.cut_off.is_empty() {
            // Nor for what was found behind the last look.
            return false;
        }
        if !self.state.wanting.is_empty() && self.scope().pay_who_waits() > 0 {
            // It has to be on its way first.
            return false;
        }
        let waiting = !self.state.busy.is_empty();
        self.show_watching();
        self.armed = self.port.arm(waiting);
        self.armed_for_room = self.armed && waiting;
        let within = self.armed.then(|| self.port.settles_within()).flatten();
        self.settle_at = within.map(|within| now + 1 + within.as_millis() as u64);
        // Behind the fence of the port: who writes after this look finds the bell armed, or is found when the sleep is settled.
        if self.armed && self.look_at_memory() {
            self.disarm();
        }
        self.armed
    }

    /// Back from sleep, or progress was made in spite of it. Returns whether the engine was armed.
    pub fn disarm(&mut self) -> bool {
        if self.armed {
            self.armed = false;
            self.settle_at = None;
            self.port.disarm();
            return true;
        }
        false
    }

    /// Does what the port has put off when it was armed: a sleep that lasts is one that nobody's message is lost in.
    #[cold]
    fn settle(&mut self) {
        self.settle_at = None;
        if !self.port.settle() || self.look_at_memory() {
            self.disarm();
        }
    }

    /// Whether somebody sleeps on the doorbell and is rung for everything that is waited for.
    #[inline]
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.armed && !self.sleeps_too_deep()
    }

    /// Whether something has come to wait for room after the sleeper has asked to be rung for messages only, or is to be done
    /// for which nobody rings.
    #[inline]
    #[must_use]
    pub fn sleeps_too_deep(&self) -> bool {
        self.armed && (self.state.restless || !self.armed_for_room && !self.state.busy.is_empty())
    }

    /// Wakes operations whose deadline has passed: their futures end them. Settles a sleep that has lasted. `now` in
    /// milliseconds.
    pub fn expire(&mut self, now: u64) {
        if self.settle_at.is_some_and(|at| at <= now) {
            self.settle();
        }
        let State { timers, completer, .. } = &mut self.state;
        let (mut landings, mut memory) = (false, false);
        timers.advance(now, |ticket| match ticket {
            rendezvous::LANDINGS => landings = true,
            queue::MEMORY => memory = true,
            ticket => {
                completer.nudge(ticket);
            }
        });
        if memory {
            // What waits for some tries again with the next advance, and says so if there is none. That is to come before a sleep:
            // nobody rings when others give memory back.
            self.state.waits_for_memory = false;
            self.state.restless |= !self.state.busy.is_empty();
        }
        if landings {
            self.state.landings_in_time(now);
        }
        self.look_in_time(now);
    }

    /// When to call [`expire`](Self::expire) next, in milliseconds.
    #[must_use]
    pub fn next_expiry(&self) -> Option<u64> {
        let (timer, look) = (self.state.timers.next_expiry(), self.next_look());
        timer.into_iter().chain(look).chain(self.settle_at).min()
    }

    /// Counters of this context.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.state.stats
    }
}

/// Runs something of the user's that is no handler of a message; if it panics, that is told and nothing else ends.
fn caught(what: &str, run: impl FnOnce()) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
        tracing::error!("{what} panicked");
    }
}
