//! What the contexts of a device and its tasks share: which connection is in which stage, who is gone, and the doors
//! through which settled connections reach their ports.

use crate::bell::Bell;
use crate::book::AddressBook;
use crate::config::{Limits, TcpConfig, Times};
use crate::handshake::{Channel, Claim, Identity, Verdict};
use crate::memory::Home;
use crate::throttle::Throttle;
use posthaste_core::device::PeerDown;
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{ContextId, Endpoint, Fault, JobShape, Rank};
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
    /// This side is connecting.
    Dialing,
    /// Settled.
    Open,
    /// It is over, for good.
    Over,
}

/// A connection that both sides agree on.
#[derive(Debug)]
pub(crate) struct Settled {
    pub peer: Endpoint,
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
    /// The port has flushed and ended all its connections.
    closed: AtomicBool,
}

impl Door {
    pub fn new(bell: Arc<Bell>) -> Door {
        Door {
            bell,
            inbox: Mutex::default(),
            knocked: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
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
}

#[derive(Debug, Default)]
struct Table {
    stages: HashMap<(ContextId, usize), Stage>,
    ranks: Vec<Known>,
    /// The connections that were ever settled, by a number of their own.
    streams: Vec<(u64, Weak<TcpStream>)>,
    settled: u64,
    tasks: Vec<AbortHandle>,
    /// Ranks that are gone, which has yet to be reported.
    gone: Vec<(Rank, Fault)>,
}

impl Table {
    fn has_met(&self, rank: Rank, shape: JobShape) -> bool {
        let met = |(&(_, index), stage): (&(ContextId, usize), &Stage)| {
            shape.endpoint(index).rank == rank && *stage != Stage::Dialing
        };
        self.stages.iter().any(met)
    }

    fn keep(&mut self, stream: &Arc<TcpStream>) {
        self.streams.retain(|(_, stream)| stream.strong_count() > 0);
        self.settled += 1;
        self.streams.push((self.settled, Arc::downgrade(stream)));
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
    doors: Box<[Arc<Door>]>,
    table: Mutex<Table>,
    /// Whom to tell of lost peers. It leads back to the ports, so that it has to go when the device ends.
    peer_down: Mutex<Option<PeerDown>>,
    runtime: OnceLock<Handle>,
    closing: AtomicBool,
    given_up: AtomicBool,
    moved: Notify,
    connected: Notify,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Hub {
    pub fn new(config: &TcpConfig, book: Arc<AddressBook>, doors: Box<[Arc<Door>]>) -> Hub {
        let table = Table { ranks: vec![Known::default(); config.shape.ranks as usize], ..Table::default() };
        Hub {
            identity: Identity::new(config),
            me: config.rank,
            shape: config.shape,
            limits: config.limits.checked(),
            times: config.times,
            book,
            home: Home::new(config),
            log: Throttle::default(),
            doors,
            table: Mutex::new(table),
            peer_down: Mutex::new(None),
            runtime: OnceLock::new(),
            closing: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            moved: Notify::new(),
            connected: Notify::new(),
        }
    }

    pub fn door(&self, context: ContextId) -> &Arc<Door> {
        &self.doors[context.index()]
    }

    /// From now on there is a runtime, and somebody who wants to know of lost peers.
    pub fn open(self: &Arc<Self>, runtime: Handle, peer_down: PeerDown) {
        *lock(&self.peer_down) = Some(peer_down);
        let _opened_once = self.runtime.set(runtime);
        let gone = std::mem::take(&mut lock(&self.table).gone);
        for (rank, fault) in gone {
            self.tell(rank, fault);
        }
        let waiting: Vec<_> = {
            let table = lock(&self.table);
            let dialing = table.stages.iter().filter(|(_, stage)| **stage == Stage::Dialing);
            dialing.map(|(&key, _)| key).collect()
        };
        for (context, index) in waiting {
            self.spawn(crate::dial::dial(self.clone(), context, self.shape.endpoint(index)));
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

    /// A port has something for a peer it has no connection with. `Err`: it never will.
    pub fn want(self: &Arc<Self>, context: ContextId, peer: Endpoint) -> Result<(), Fault> {
        {
            let mut table = lock(&self.table);
            let known = table.ranks[peer.rank.index()];
            if known.left {
                return Err(Fault::PeerClosed(peer.rank));
            }
            if known.told {
                return Err(Fault::PeerLost(peer.rank));
            }
            let key = (context, self.shape.index(peer));
            match table.stages.get(&key) {
                None => {}
                Some(Stage::Over) => return Err(Fault::PeerLost(peer.rank)),
                // The other side was first: its connection is on its way through the door.
                Some(Stage::Dialing | Stage::Open) => return Ok(()),
            }
            table.stages.insert(key, Stage::Dialing);
        }
        self.spawn(crate::dial::dial(self.clone(), context, peer));
        Ok(())
    }

    pub fn is_dialing(&self, context: ContextId, peer: Endpoint) -> bool {
        lock(&self.table).stages.get(&(context, self.shape.index(peer))) == Some(&Stage::Dialing)
    }

    /// Judges a proven connection of a peer. Of two that connect to each other at once, that of the lower endpoint
    /// wins: the lower one refuses while it is connecting, the higher one gives its own attempt up. A connection that
    /// is accepted is the pair's connection from here on.
    pub fn judge(&self, claim: &Claim) -> Verdict {
        let mut table = lock(&self.table);
        let known = table.ranks[claim.from.rank.index()];
        if known.left || known.told {
            return Verdict::Spent;
        }
        let key = (claim.to, self.shape.index(claim.from));
        match table.stages.get(&key) {
            None if self.is_closing() => return Verdict::Leaving,
            None => {}
            Some(Stage::Dialing) if claim.from < Endpoint::new(self.me, claim.to) => {}
            Some(Stage::Dialing) => return Verdict::Yield,
            Some(Stage::Open | Stage::Over) => return Verdict::Spent,
        }
        table.stages.insert(key, Stage::Open);
        table.ranks[claim.from.rank.index()].open += 1;
        Verdict::Accept
    }

    /// The other side has accepted this side's connection. False: it is not wanted any more.
    pub fn accepted(&self, context: ContextId, peer: Endpoint) -> bool {
        let mut table = lock(&self.table);
        match table.stages.get_mut(&(context, self.shape.index(peer))) {
            Some(stage) if *stage == Stage::Dialing => *stage = Stage::Open,
            _ => return false,
        }
        table.ranks[peer.rank.index()].open += 1;
        true
    }

    /// Hands a settled connection to its port.
    pub fn deliver(&self, context: ContextId, settled: Settled) {
        lock(&self.table).keep(&settled.stream);
        self.connected.notify_waiters();
        let door = self.door(context);
        lock(&door.inbox).push(settled);
        door.knock();
    }

    /// A pair's connection has ended, or was never made. Its rank is gone with it: at once if it is lost, and when all
    /// its connections have ended if it has left.
    pub fn ended(&self, context: ContextId, peer: Endpoint, fault: Fault) {
        let told = {
            let mut table = lock(&self.table);
            let was = table.stages.insert((context, self.shape.index(peer)), Stage::Over);
            let known = &mut table.ranks[peer.rank.index()];
            if was == Some(Stage::Open) {
                known.open -= 1;
            }
            let left = matches!(fault, Fault::PeerClosed(_));
            known.left |= left;
            if peer.rank == self.me || known.told || (left && known.open > 0) {
                false
            } else {
                known.told = true;
                true
            }
        };
        self.moved.notify_waiters();
        if told && !self.is_closing() {
            tracing::debug!(me = %self.me, peer = %peer.rank, %fault, "peer gone");
            self.tell(peer.rank, fault);
        }
    }

    fn tell(&self, rank: Rank, fault: Fault) {
        let peer_down = lock(&self.peer_down).clone();
        if let Some(peer_down) = peer_down {
            peer_down(rank, fault);
        }
    }

    /// Somebody else knows that the rank is gone. With whom there is a connection, that tells it, and when.
    pub fn gone(&self, rank: Rank, fault: Fault) {
        if rank == self.me {
            return;
        }
        {
            let mut table = lock(&self.table);
            if table.has_met(rank, self.shape) {
                return;
            }
            let Some(known) = table.ranks.get_mut(rank.index()) else { return };
            known.left |= matches!(fault, Fault::PeerClosed(_));
            if std::mem::replace(&mut known.told, true) {
                return;
            }
            if lock(&self.peer_down).is_none() {
                // Nobody wants to know yet.
                table.gone.push((rank, fault));
                return;
            }
        }
        self.tell(rank, fault);
    }

    /// The engine has given a rank up: nothing of it is taken any more.
    pub fn fence(&self, rank: Rank) {
        let mut table = lock(&self.table);
        table.ranks[rank.index()].told = true;
        let shape = self.shape;
        for ((_, index), stage) in &mut table.stages {
            if shape.endpoint(*index).rank == rank && *stage == Stage::Dialing {
                *stage = Stage::Over;
            }
        }
    }

    /// Whether a connection with the rank is being made, by any context.
    pub fn is_connecting_to(&self, rank: Rank) -> bool {
        let table = lock(&self.table);
        let shape = self.shape;
        let to_rank = |index: usize| shape.endpoint(index).rank == rank;
        table.stages.iter().any(|((_, index), stage)| *stage == Stage::Dialing && to_rank(*index))
    }

    /// Whether there is, or was, a connection with the rank.
    pub fn has_met(&self, rank: Rank) -> bool {
        lock(&self.table).has_met(rank, self.shape)
    }

    /// The connections there are, with a number for each.
    #[cfg(all(unix, not(feature = "portable")))]
    pub fn connections(&self) -> Vec<(u64, Arc<TcpStream>)> {
        let table = lock(&self.table);
        table.streams.iter().filter_map(|(number, stream)| Some((*number, stream.upgrade()?))).collect()
    }

    /// Waits until there is a connection.
    #[cfg(all(unix, not(feature = "portable")))]
    pub async fn has_connections(&self) {
        loop {
            let connected = self.connected.notified();
            let mut connected = std::pin::pin!(connected);
            connected.as_mut().enable();
            if lock(&self.table).streams.iter().any(|(_, stream)| stream.strong_count() > 0) {
                return;
            }
            connected.await;
        }
    }

    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// A port has nothing to flush and no connection left.
    pub fn port_closed(&self, context: ContextId) {
        if !self.door(context).closed.swap(true, Ordering::AcqRel) {
            self.moved.notify_waiters();
        }
    }

    /// Asks the ports to end their connections in order and waits until they have, or until the time is up.
    pub async fn close(self: &Arc<Self>) {
        let Some(runtime) = self.runtime.get() else {
            self.closing.store(true, Ordering::Release);
            return;
        };
        self.closing.store(true, Ordering::Release);
        for door in &self.doors {
            door.knock();
        }
        let (hub, linger) = (self.clone(), self.times.linger);
        let timer = runtime.spawn(async move {
            tokio::time::sleep(linger).await;
            hub.given_up.store(true, Ordering::Release);
            hub.moved.notify_waiters();
        });
        loop {
            let moved = self.moved.notified();
            let mut moved = std::pin::pin!(moved);
            moved.as_mut().enable();
            let closed = self.doors.iter().all(|door| door.closed.load(Ordering::Acquire));
            if closed || self.given_up.load(Ordering::Acquire) {
                break;
            }
            moved.await;
        }
        timer.abort();
        self.abort();
    }

    /// Ends all tasks and all connections at once, as the end of the process would.
    pub fn abort(&self) {
        self.closing.store(true, Ordering::Release);
        let (streams, tasks) = {
            let mut table = lock(&self.table);
            (std::mem::take(&mut table.streams), std::mem::take(&mut table.tasks))
        };
        for task in tasks {
            task.abort();
        }
        let peer_down = lock(&self.peer_down).take();
        drop(peer_down);
        for stream in streams.iter().filter_map(|(_, stream)| stream.upgrade()) {
            // One that is broken already needs no ending.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
