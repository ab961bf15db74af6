//! What the contexts of a device and its tasks share: which connection is in which stage, who is gone, and the doors
//! through which settled connections reach their ports.

mod closing;
mod ranks;

pub(crate) use closing::Progress;

use crate::bell::Bell;
use crate::book::AddressBook;
use crate::config::{Limits, TcpConfig, Times};
use crate::handshake::{Channel, Claim, Identity, Verdict};
use crate::memory::Home;
use crate::throttle::Throttle;
use posthaste_core::device::{PeerEvent, PeerNews};
use posthaste_core::reactor::run_unless_dropped;
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{ContextId, Endpoint, Fault, JobShape, LossCause, Rank};
use std::cmp::Ordering as Compared;
use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// How far the one connection of a pair of endpoints has come. What is not in the table was never wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// This side is connecting, in its attempt of that number.
    Dialing(u64),
    /// The same, and it has shown the other side who it is: that one may have accepted it.
    Proving(u64),
    /// Settled.
    Open,
    /// It is over, for good.
    Over,
}

impl Stage {
    /// The attempt in which this side is connecting.
    fn attempt(self) -> Option<u64> {
        match self {
            Stage::Dialing(attempt) | Stage::Proving(attempt) => Some(attempt),
            Stage::Open | Stage::Over => None,
        }
    }

    /// Whether this side is connecting in that attempt.
    fn is(self, attempt: u64) -> bool {
        self.attempt() == Some(attempt)
    }
}

/// A connection that both sides agree on.
#[derive(Debug)]
pub(crate) struct Settled {
    pub peer: Endpoint,
    /// Which incarnation of the peer's rank it is with.
    pub incarnation: u64,
    pub stream: Arc<TcpStream>,
    pub channel: Channel,
}

/// The way to one port.
#[derive(Debug)]
pub(crate) struct Door {
    pub bell: Arc<Bell>,
    inbox: Mutex<Vec<Settled>>,
    /// Something is in the inbox, or the device closes.
    knocked: AtomicBool,
    /// How far the port has come with its end, as it told when it was moved last.
    progress: Mutex<Progress>,
}

impl Door {
    pub fn new(bell: Arc<Bell>) -> Door {
        Door { bell, inbox: Mutex::default(), knocked: AtomicBool::new(false), progress: Mutex::default() }
    }

    /// Whether somebody has knocked: the one load that an idle port pays.
    #[inline]
    pub fn is_knocked(&self) -> bool {
        // Acquire pairs with the release of `knock`.
        self.knocked.load(Ordering::Acquire)
    }

    pub fn take(&self) -> Vec<Settled> {
        self.knocked.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.inbox))
    }

    fn knock(&self) {
        self.knocked.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// What is known of a rank's connections.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    open: usize,
    /// It has said that it leaves.
    left: bool,
    /// Its end was reported.
    told: bool,
    /// Why a connection with it was ended on this side.
    blamed: Option<LossCause>,
    /// The incarnation that it was started again as, if it was; all of this is about that one.
    restarted: Option<u64>,
}

/// A rank as it was told to whoever opens the device.
fn told_incarnation(incarnation: u64) -> u32 {
    u32::try_from(incarnation).unwrap_or(u32::MAX)
}

/// A connection that was settled.
#[derive(Debug)]
struct Kept {
    /// Of its own.
    #[cfg_attr(
        any(not(unix), feature = "portable"),
        expect(dead_code, reason = "only the vigil asks for it")
    )]
    number: u64,
    /// The rank at its other end, and which incarnation of that.
    peer: (Rank, u64),
    stream: Weak<TcpStream>,
}

#[derive(Debug, Default)]
struct Table {
    stages: HashMap<(ContextId, usize), Stage>,
    ranks: Vec<Known>,
    /// The connections that were ever settled.
    streams: Vec<Kept>,
    settled: u64,
    tasks: Vec<AbortHandle>,
    gate: Option<AbortHandle>,
    /// Whoever comes to the gate later than the close is told that this client has left.
    tells_latecomers: bool,
    /// What has yet to be reported.
    news: Vec<(Rank, PeerEvent)>,
    /// Which incarnation of a rank that was started again a context talks to.
    admitted: HashMap<(ContextId, Rank), u64>,
    /// Contexts that are yet to hear that a rank has left, while another one has not come to the end of what it sent.
    unaware: Vec<(ContextId, Rank)>,
    attempts: u64,
    /// There is a runtime: whoever wants a connection has it made. Before that, who opens the device does.
    opened: bool,
}

impl Table {
    fn has_met(&self, rank: Rank, shape: JobShape) -> bool {
        let met = |(&(_, index), stage): (&(ContextId, usize), &Stage)| {
            shape.endpoint(index).rank == rank && stage.attempt().is_none()
        };
        self.stages.iter().any(met)
    }

    /// Whether a connection with the rank is being made.
    fn is_connecting_to(&self, rank: Rank, shape: JobShape) -> bool {
        let to_rank = |index: usize| shape.endpoint(index).rank == rank;
        self.stages.iter().any(|((_, index), stage)| stage.attempt().is_some() && to_rank(*index))
    }

    /// Whether a context may talk to what is known as the rank: of a rank that was started again its port has to know.
    fn admits(&self, context: ContextId, rank: Rank) -> bool {
        match self.ranks.get(rank.index()).and_then(|known| known.restarted) {
            None => true,
            restarted => self.admitted.get(&(context, rank)).copied() == restarted,
        }
    }

    /// Whether a context has a connection with the rank of which the end has not come, or may have one yet.
    fn expects(&self, context: ContextId, rank: Rank, shape: JobShape) -> bool {
        let with_it = |&(of, index): &(ContextId, usize)| of == context && shape.endpoint(index).rank == rank;
        self.stages.iter().any(|(key, stage)| with_it(key) && *stage != Stage::Over)
    }

    fn keep(&mut self, settled: &Settled) {
        self.streams.retain(|kept| kept.stream.strong_count() > 0);
        self.settled += 1;
        self.streams.push(Kept {
            number: self.settled,
            peer: (settled.peer.rank, settled.incarnation),
            stream: Arc::downgrade(&settled.stream),
        });
    }
}

pub(crate) struct Hub {
    pub identity: Identity,
    pub me: Rank,
    pub shape: JobShape,
    pub limits: Limits,
    pub times: Times,
    pub book: Arc<AddressBook>,
    pub home: Home,
    pub log: Throttle,
    /// And of those about descriptors that lack where a peer is connected to.
    pub lacking: Throttle,
    doors: Box<[Arc<Door>]>,
    table: Mutex<Table>,
    /// Whom to tell of lost peers. It leads back to the ports, so that it has to go when the device ends.
    news: Mutex<Option<PeerNews>>,
    runtime: OnceLock<Handle>,
    closing: AtomicBool,
    /// It ends as by a crash: no port says goodbye, whichever thread moves it meanwhile.
    aborted: AtomicBool,
    moved: Notify,
    connected: Notify,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("me", &self.me).finish_non_exhaustive()
    }
}

/// How a pair's connection came to its end.
struct Ending {
    incarnation: u64,
    fault: Fault,
    cause: LossCause,
}

impl Hub {
    pub fn new(config: &TcpConfig, book: Arc<AddressBook>, doors: Box<[Arc<Door>]>) -> Hub {
        let table = Table { ranks: vec![Known::default(); config.shape.ranks as usize], ..Table::default() };
        Hub {
            identity: Identity::new(config),
            me: config.rank,
            shape: config.shape,
            limits: config.limits.checked(),
            times: config.times.checked(),
            book,
            home: Home::new(config),
            log: Throttle::default(),
            lacking: Throttle::default(),
            doors,
            table: Mutex::new(table),
            news: Mutex::new(None),
            runtime: OnceLock::new(),
            closing: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            moved: Notify::new(),
            connected: Notify::new(),
        }
    }

    pub fn door(&self, context: ContextId) -> &Arc<Door> {
        &self.doors[context.index()]
    }

    /// From now on there is a runtime, and somebody who wants to know of lost peers.
    pub fn open(self: &Arc<Self>, runtime: Handle, news: PeerNews) {
        *lock(&self.news) = Some(news);
        let _opened_once = self.runtime.set(runtime);
        let news = std::mem::take(&mut lock(&self.table).news);
        for (rank, event) in news {
            self.tell(rank, event);
        }
        let waiting: Vec<_> = {
            let mut table = lock(&self.table);
            table.opened = true;
            let dialing = table.stages.iter().filter_map(|(&key, stage)| Some((key, stage.attempt()?)));
            dialing.collect()
        };
        for ((context, index), attempt) in waiting {
            self.spawn(crate::dial::dial(self.clone(), context, self.shape.endpoint(index), attempt));
        }
    }

    /// Runs a task until the device is closed.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime.get() {
            let task = runtime.spawn(task).abort_handle();
            let mut table = lock(&self.table);
            table.tasks.retain(|task| !task.is_finished());
            table.tasks.push(task);
        }
    }

    /// Runs the task that lets peers in: until the device is closed, or for as long as latecomers are to be told of that.
    pub fn spawn_gate(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime.get() {
            let hub = self.clone();
            let task = run_unless_dropped(task, move || hub.runtime_ends());
            lock(&self.table).gate = Some(runtime.spawn(task).abort_handle());
        }
    }

    /// The runtime ends, and with it what peers see of this side: what is pending ends before, unless the device is closed.
    pub fn runtime_ends(&self) {
        if !self.is_closing() {
            self.tell(self.me, PeerEvent::down(Fault::Shutdown));
        }
    }

    /// From now on the gate outlasts a close: a client has left in order while its process goes on, and whoever comes to it for the
    /// first time is to be told so (I3). A port that is closed proves nothing as long as the process may listen there later.
    pub fn tell_latecomers(&self) {
        lock(&self.table).tells_latecomers = true;
    }

    /// That is over: whoever comes now is told by others.
    pub fn shut_gate(&self) {
        lock(&self.table).tells_latecomers = false;
        if self.aborted.load(Ordering::Acquire) {
            self.end_gate();
        }
    }

    fn end_gate(&self) {
        let gate = lock(&self.table).gate.take();
        if let Some(gate) = gate {
            gate.abort();
        }
    }

    /// A port has something for a peer it has no connection with. `Err`: it never will.
    pub fn want(self: &Arc<Self>, context: ContextId, peer: Endpoint) -> Result<(), Fault> {
        let (attempt, opened) = {
            let mut table = lock(&self.table);
            let known = table.ranks[peer.rank.index()];
            if known.left {
                return Err(Fault::PeerClosed(peer.rank));
            }
            if known.told || !table.admits(context, peer.rank) {
                return Err(Fault::PeerLost(peer.rank));
            }
            let key = (context, self.shape.index(peer));
            match table.stages.get(&key) {
                None => {}
                Some(Stage::Over) => return Err(Fault::PeerLost(peer.rank)),
                // The other side was first: its connection is on its way through the door.
                Some(Stage::Dialing(_) | Stage::Proving(_) | Stage::Open) => return Ok(()),
            }
            table.attempts += 1;
            let attempt = table.attempts;
            table.stages.insert(key, Stage::Dialing(attempt));
            (attempt, table.opened)
        };
        if opened {
            self.spawn(crate::dial::dial(self.clone(), context, peer, attempt));
        }
        Ok(())
    }

    pub fn is_dialing(&self, context: ContextId, peer: Endpoint, attempt: u64) -> bool {
        lock(&self.table)
            .stages
            .get(&(context, self.shape.index(peer)))
            .is_some_and(|stage| stage.is(attempt))
    }

    /// An attempt is about to show the peer who this is, which may accept it from then on. False: it is not wanted any more.
    pub fn proves(&self, context: ContextId, peer: Endpoint, attempt: u64) -> bool {
        self.advances(context, peer, attempt, Stage::Proving(attempt))
    }

    /// The peer has not accepted the attempt, which begins anew.
    pub fn yielded(&self, context: ContextId, peer: Endpoint, attempt: u64) {
        // One that is not wanted any more finds that out by itself.
        let _ = self.advances(context, peer, attempt, Stage::Dialing(attempt));
    }

    /// Moves an attempt on. False: it is not wanted any more.
    fn advances(&self, context: ContextId, peer: Endpoint, attempt: u64, to: Stage) -> bool {
        match lock(&self.table).stages.get_mut(&(context, self.shape.index(peer))) {
            Some(stage) if stage.is(attempt) => *stage = to,
            _ => return false,
        }
        true
    }

    /// Judges a proven connection of a peer. Of two that connect to each other at once, that of the lower endpoint
    /// wins: the lower one refuses once the higher one may have accepted its own, the higher one gives its own attempt up. Before
    /// that whoever is first wins: the lower one may not be able to reach the other at all. A connection that is accepted is the
    /// pair's connection from here on.
    pub fn judge(&self, claim: &Claim) -> Verdict {
        let mut table = lock(&self.table);
        let known = table.ranks[claim.from.rank.index()];
        let latest = known.restarted.or_else(|| Some(self.book.get(claim.from.rank)?.incarnation));
        match latest.map(|latest| claim.incarnation.cmp(&latest)) {
            Some(Compared::Less) => return Verdict::Spent,
            // Nobody moves the ports any more: whoever was started again would be told to try again for ever.
            _ if self.aborted.load(Ordering::Acquire) => return Verdict::Leaving,
            // Whoever tells of restarts is still to tell this side, or its port: it tries again.
            Some(Compared::Greater) => return Verdict::Yield,
            _ if !known.told && !known.left && !table.admits(claim.to, claim.from.rank) => {
                return Verdict::Wait;
            }
            _ => {}
        }
        if known.left || known.told {
            return Verdict::Spent;
        }
        let key = (claim.to, self.shape.index(claim.from));
        match table.stages.get(&key) {
            // Another context still has something for it, which it would not take any more: it asks again. Of two that leave at
            // once and have something for each other only the lower one says so, or neither would come to an end.
            None if self.is_closing()
                && (self.me < claim.from.rank || !claim.leaves)
                && table.is_connecting_to(claim.from.rank, self.shape) =>
            {
                return Verdict::Wait;
            }
            None if self.is_closing() => return Verdict::Leaving,
            None | Some(Stage::Dialing(_)) => {}
            Some(Stage::Proving(_)) if claim.from < Endpoint::new(self.me, claim.to) => {}
            Some(Stage::Proving(_)) => return Verdict::Yield,
            Some(Stage::Open | Stage::Over) => return Verdict::Spent,
        }
        table.stages.insert(key, Stage::Open);
        table.ranks[claim.from.rank.index()].open += 1;
        Verdict::Accept
    }

    /// The other side has accepted this side's connection. False: it is not wanted any more.
    pub fn accepted(&self, context: ContextId, peer: Endpoint, attempt: u64) -> bool {
        let mut table = lock(&self.table);
        match table.stages.get_mut(&(context, self.shape.index(peer))) {
            Some(stage) if stage.is(attempt) => *stage = Stage::Open,
            _ => return false,
        }
        table.ranks[peer.rank.index()].open += 1;
        true
    }

    /// Hands a settled connection to its port.
    pub fn deliver(&self, context: ContextId, settled: Settled) {
        let aborted = {
            let mut table = lock(&self.table);
            table.keep(&settled);
            // `end` says so before it takes what is kept.
            self.aborted.load(Ordering::Acquire)
        };
        if aborted {
            // One that is broken already needs no ending.
            let _ = settled.stream.shutdown(std::net::Shutdown::Both);
        }
        self.connected.notify_waiters();
        let door = self.door(context);
        lock(&door.inbox).push(settled);
        door.knock();
        self.attempt_ended();
    }

    /// A rank may not be connected to any more: ports that close wait for that.
    fn attempt_ended(&self) {
        if self.is_closing() {
            self.doors.iter().for_each(|door| door.knock());
        }
    }

    /// A pair's connection with that incarnation, or with the first one, has ended, or was never made. Its rank is gone
    /// with it: at once if it is lost, and when all its connections have ended if it has left. A context that has come to the end of
    /// its own before that hears it from its port ([`departed`](Self::departed)).
    pub fn ended(
        &self,
        context: ContextId,
        peer: Endpoint,
        incarnation: u64,
        fault: Fault,
        cause: LossCause,
    ) {
        self.over(context, peer, None, Ending { incarnation, fault, cause });
    }

    /// An attempt to connect has come to nothing. The peer's own may have been accepted meanwhile: that is the pair's
    /// connection then.
    pub fn attempt_failed(
        &self,
        context: ContextId,
        peer: Endpoint,
        attempt: u64,
        fault: Fault,
        cause: LossCause,
    ) {
        let incarnation = self.incarnation_of(peer.rank);
        let fault = if self.has_left(peer.rank) { Fault::PeerClosed(peer.rank) } else { fault };
        self.over(context, peer, Some(attempt), Ending { incarnation, fault, cause });
    }

    /// A pair is at its end; if an attempt is named, unless the pair is past that.
    fn over(&self, context: ContextId, peer: Endpoint, attempt: Option<u64>, ending: Ending) {
        let Ending { incarnation, fault, cause } = ending;
        let mut cause = Some(cause).filter(|_| matches!(fault, Fault::PeerLost(_)));
        let told = {
            let mut table = lock(&self.table);
            let stage = table.stages.get(&(context, self.shape.index(peer)));
            if attempt.is_some_and(|attempt| !stage.is_some_and(|stage| stage.is(attempt))) {
                return;
            }
            if table.ranks[peer.rank.index()].restarted.is_some_and(|restarted| restarted != incarnation) {
                // It is gone already, and another in its place.
                return;
            }
            let was = table.stages.insert((context, self.shape.index(peer)), Stage::Over);
            // The other side may have accepted such a one, and what it has sent there counts: it comes to its own end.
            let is_connecting = table.is_connecting_to(peer.rank, self.shape);
            let known = &mut table.ranks[peer.rank.index()];
            if was == Some(Stage::Open) {
                known.open -= 1;
            }
            let left = matches!(fault, Fault::PeerClosed(_));
            let is_first = left && !known.left;
            known.left |= left;
            // Who ended the connection knows better than who saw its end.
            cause = cause.map(|cause| known.blamed.unwrap_or(cause));
            let waits = left && (known.open > 0 || is_connecting);
            let told = peer.rank != self.me && !known.told && !waits;
            known.told |= told;
            if told {
                table.unaware.retain(|(_, rank)| *rank != peer.rank);
            } else if is_first && waits {
                table.unaware.extend((0..self.shape.contexts).map(|of| (ContextId(of), peer.rank)));
            }
            told
        };
        self.moved.notify_waiters();
        self.attempt_ended();
        if !told {
            self.knock_unaware(peer.rank);
        }
        if told && !self.is_closing() {
            tracing::debug!(me = %self.me, peer = %peer.rank, %fault, "peer gone");
            let incarnation = told_incarnation(incarnation);
            self.tell(peer.rank, PeerEvent::Down { fault, incarnation, cause });
        }
    }

    /// Wakes the contexts that can hear now that the rank has left.
    fn knock_unaware(&self, rank: Rank) {
        let waiting: Vec<ContextId> = {
            let table = lock(&self.table);
            let unaware = table
                .unaware
                .iter()
                .filter(|(context, left)| *left == rank && !table.expects(*context, rank, self.shape));
            unaware.map(|(context, _)| *context).collect()
        };
        waiting.into_iter().for_each(|context| self.door(context).knock());
    }

    /// The ranks, with their incarnations as they are told, that have left and of which this context has all there will ever be,
    /// while others have not: each is named once.
    pub fn departed(&self, context: ContextId) -> Vec<(Rank, u32)> {
        let mut table = lock(&self.table);
        if table.unaware.is_empty() || self.is_closing() {
            return Vec::new();
        }
        let unaware = std::mem::take(&mut table.unaware);
        let (ready, waiting) = unaware.into_iter().partition(|(of, rank): &(ContextId, Rank)| {
            *of == context && !table.expects(context, *rank, self.shape) && table.admits(context, *rank)
        });
        table.unaware = waiting;
        let number = |(_, rank): (ContextId, Rank)| {
            (rank, told_incarnation(table.ranks[rank.index()].restarted.unwrap_or(0)))
        };
        Vec::into_iter(ready).map(number).collect()
    }

    fn tell(&self, rank: Rank, event: PeerEvent) {
        let news = lock(&self.news).clone();
        if let Some(news) = news {
            news(rank, event);
        }
    }

    /// Whether the context has a connection, if only one that is settled and on its way through the door.
    pub fn has_open(&self, context: ContextId) -> bool {
        lock(&self.table).stages.iter().any(|((of, _), stage)| *of == context && *stage == Stage::Open)
    }

    /// Whether a connection with that endpoint is being made, or is settled.
    pub fn is_coming(&self, context: ContextId, peer: Endpoint) -> bool {
        let stage = lock(&self.table).stages.get(&(context, self.shape.index(peer))).copied();
        stage.is_some_and(|stage| stage != Stage::Over)
    }

    /// Whether a connection with the rank is being made, by any context.
    pub fn is_connecting_to(&self, rank: Rank) -> bool {
        lock(&self.table).is_connecting_to(rank, self.shape)
    }

    /// Whether there is, or was, a connection with the rank.
    pub fn has_met(&self, rank: Rank) -> bool {
        lock(&self.table).has_met(rank, self.shape)
    }

    /// Whether it is known of a rank that it has left in order.
    pub fn has_left(&self, rank: Rank) -> bool {
        lock(&self.table).ranks.get(rank.index()).is_some_and(|known| known.left)
    }

    /// The connections there are, with a number for each.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn connections(&self) -> Vec<(u64, Arc<TcpStream>)> {
        let table = lock(&self.table);
        table.streams.iter().filter_map(|kept| Some((kept.number, kept.stream.upgrade()?))).collect()
    }

    /// Waits until there is a connection.
    #[cfg(all(unix, not(feature = "portable")))]
    pub async fn has_connections(&self) {
        loop {
            let connected = self.connected.notified();
            let mut connected = std::pin::pin!(connected);
            connected.as_mut().enable();
            if lock(&self.table).streams.iter().any(|kept| kept.stream.strong_count() > 0) {
                return;
            }
            connected.await;
        }
    }

    /// Whether ports say goodbye.
    pub fn is_leaving(&self) -> bool {
        self.is_closing() && !self.aborted.load(Ordering::Acquire)
    }

    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Ends all tasks and all connections at once, as the end of the process would.
    pub fn abort(&self) {
        self.end();
        self.end_gate();
    }

    /// The end of an orderly close: of the gate only if nobody is to be told any more.
    fn end_in_order(&self) {
        self.end();
        // `shut_gate` looks the other way round.
        let stays = lock(&self.table).tells_latecomers;
        if !stays {
            self.end_gate();
        }
    }

    fn end(&self) {
        self.aborted.store(true, Ordering::Release);
        self.closing.store(true, Ordering::Release);
        self.moved.notify_waiters();
        let (streams, tasks) = {
            let mut table = lock(&self.table);
            (std::mem::take(&mut table.streams), std::mem::take(&mut table.tasks))
        };
        for task in tasks {
            task.abort();
        }
        let news = lock(&self.news).take();
        drop(news);
        for stream in streams.iter().filter_map(|kept| kept.stream.upgrade()) {
            // One that is broken already needs no ending.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
