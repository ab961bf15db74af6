//! The device: what the traits of the core ask for.

use crate::bell::Bell;
use crate::book::{AddressBook, PeerAddress};
use crate::config::{Limits, Mode, TcpConfig};
use crate::gate::Gate;
use crate::hub::{Door, Hub};
use crate::link::KEEPS;
use crate::port::TcpPort;
use crate::socket;
use crate::watch::{Alarm, Watch};
use async_trait::async_trait;
use posthaste_core::device::{Allocation, Doorbell, PeerNews};
use posthaste_core::memory::SharedSlice;
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{Caps, ContextId, Device, DeviceError, Fault, LossCause, MemoryError, Port, Rank};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

/// Connections that may wait to be accepted; the system may allow fewer.
const BACKLOG: i32 = 4096;

/// The device over TCP, for one client of one rank.
pub struct TcpDevice {
    hub: Arc<Hub>,
    caps: Caps,
    address: SocketAddr,
    watches: Mutex<Vec<Option<Watch>>>,
    gate: Mutex<Option<Gate>>,
}

impl std::fmt::Debug for TcpDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpDevice")
            .field("rank", &self.hub.me)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl TcpDevice {
    /// Binds the listener, so that the address is known, and that peers can connect before this rank is ready for them:
    /// their handshakes are answered once the device is open. Enters itself in the book.
    ///
    /// # Errors
    /// If the address cannot be bound, or the system refuses what the ports need.
    pub fn new(config: TcpConfig, book: Arc<AddressBook>) -> Result<TcpDevice, DeviceError> {
        let os = |what: &'static str| move |source: io::Error| DeviceError::Os { what, source };
        if config.rank.0 >= config.shape.ranks {
            return Err(DeviceError::Mismatch {
                subject: "the rank",
                problem: format!("{} of a job of {}", config.rank, config.shape.ranks),
            });
        }
        let listener = bind(&config).map_err(os("cannot listen for connections"))?;
        let address = listener.local_addr().map_err(os("cannot listen for connections"))?;
        if config.mode == Mode::Insecure && !address.ip().is_loopback() {
            tracing::warn!(%address, "connections are accepted from anybody: the mode is insecure");
        }
        let (mut watches, mut doors) = (Vec::new(), Vec::new());
        for _ in 0..config.shape.contexts {
            let watch = Watch::new().map_err(os("cannot watch sockets"))?;
            let alarm = Alarm::new(&watch).map_err(os("cannot watch sockets"))?;
            watches.push(Some(watch));
            doors.push(Arc::new(Door::new(Arc::new(Bell::new(alarm)))));
        }
        book.set(config.rank, PeerAddress { address, incarnation: config.incarnation });
        let hub = Arc::new(Hub::new(&config, book, doors.into()));
        let gate = Gate::new(hub.clone(), listener).map_err(os("cannot watch the listener"))?;
        let limits = hub.limits;
        let mut caps = Caps::send_only("tcp", limits.max_inline);
        caps.max_eager = limits.max_eager;
        caps.fragment = limits.fragment;
        caps.native_put = true;
        caps.native_get = true;
        caps.tells_leave = true;
        caps.held_gets = true;
        caps.keeps = KEEPS;
        // Measured: below it, a pipe that is never empty is worth more than a copy saved. So it is where records are opened
        // first, whose bytes go to the place from there.
        caps.rendezvous = 32 << 20;
        caps.cost = 100;
        Ok(TcpDevice { hub, caps, address, watches: Mutex::new(watches), gate: Mutex::new(Some(gate)) })
    }

    /// Where this rank listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the ranks listen.
    #[must_use]
    pub fn book(&self) -> &Arc<AddressBook> {
        &self.hub.book
    }

    /// Whether there is, or was, a connection with the rank: whether its end is noticed without asking for it.
    #[must_use]
    pub fn has_met(&self, rank: Rank) -> bool {
        self.hub.has_met(rank)
    }

    /// Whether a rank has said to this one that it leaves, or others have told so.
    #[must_use]
    pub fn has_left(&self, rank: Rank) -> bool {
        self.hub.has_left(rank)
    }

    /// What somebody else says of a rank: that it is gone. Connections tell of the end of ranks that there are or were
    /// any with, and whatever such a rank has sent counts; contexts that have none hear of its leave at once. With a rank that has
    /// left, or that there was none with, none is made any more.
    pub fn gone(&self, rank: Rank, fault: Fault) {
        self.hub.gone(rank, fault, LossCause::Told);
    }

    /// What somebody says who has seen the rank's process end: connections with it that live on in processes which it forked
    /// are ended, too, once what it had sent is in.
    pub fn died(&self, rank: Rank) {
        self.hub.died(rank);
    }

    /// Where the latest incarnation of a rank that is known of listens.
    #[must_use]
    pub fn peer_address(&self, rank: Rank) -> Option<SocketAddr> {
        self.hub.book.get(rank).map(|peer| peer.address)
    }

    /// What somebody else says of a rank: that it died and was started again, and where that incarnation of it listens.
    /// Connections with it are made anew; those of earlier incarnations are over, and so is whatever is on its way through
    /// them. Nothing happens if that incarnation, or a later one, is known.
    pub fn restarted(&self, rank: Rank, address: crate::PeerAddress) {
        self.hub.restarted(rank, address);
    }

    /// From now on whoever comes here later than [`close`](Device::close) is told that this client has left in order, until
    /// [`shut_gate`](Self::shut_gate): it is one of several of a process that may go on without it.
    pub fn tell_latecomers(&self) {
        self.hub.tell_latecomers();
    }

    /// The last client of the process has left, of which others tell: nobody listens here any more.
    pub fn shut_gate(&self) {
        self.hub.shut_gate();
        // That of a client which was never opened.
        *lock(&self.gate) = None;
    }

    /// Whoever tells the others that this rank lives ends with its runtime: before the others hear of that, all operations that are
    /// pending end with [`Shutdown`](posthaste_core::Fault::Shutdown). Nothing happens if the device was closed before.
    pub fn runtime_ends(&self) {
        self.hub.runtime_ends();
    }

    /// Ends everything at once, as the end of the process would: peers see a lost rank.
    pub fn abort(&self) {
        self.hub.abort();
        *lock(&self.gate) = None;
    }
}

impl Drop for TcpDevice {
    fn drop(&mut self) {
        self.hub.abort();
    }
}

fn bind(config: &TcpConfig) -> io::Result<TcpListener> {
    let ports = match &config.ports {
        Some(ports) if config.bind.port() == 0 => ports.clone(),
        _ => config.bind.port()..=config.bind.port(),
    };
    let (first, end, address) = (*ports.start(), *ports.end(), config.bind.ip());
    let mut last = io::Error::new(io::ErrorKind::AddrInUse, "the range is empty");
    for port in ports {
        match listen(SocketAddr::new(address, port), &config.limits) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    let which =
        if first == end { format!("port {first}") } else { format!("any of the ports {first}-{end}") };
    Err(io::Error::new(last.kind(), format!("cannot listen on {which} of {address}: {last}")))
}

/// As the standard library does it, but for a queue that is long enough for a flood: connections that do not fit into it
/// are tried again by their kernels a second later only.
fn listen(address: SocketAddr, limits: &Limits) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    // Before it listens: what it accepts is born with it.
    socket::unpaced((&socket).into(), address.ip());
    socket::fitted((&socket).into(), limits);
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[async_trait]
impl Device for TcpDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reaches(&self, rank: Rank) -> bool {
        rank.0 < self.hub.shape.ranks
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        let watch = lock(&self.watches).get_mut(context.index()).and_then(Option::take);
        let Some(watch) = watch else {
            let problem = format!("{context} does not exist or has its port already");
            return Err(DeviceError::Mismatch { subject: "the device over TCP", problem });
        };
        Ok(Box::new(TcpPort::new(self.hub.clone(), context, watch)))
    }

    fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
        self.hub.door(context).bell.clone()
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        self.hub.home.allocate(len)
    }

    fn free(&self, allocation: Allocation) {
        self.hub.home.free(allocation);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        if rank == self.hub.me { self.hub.home.slice(offset, len) } else { None }
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        let os = |what: &'static str| move |source: io::Error| DeviceError::Os { what, source };
        let refused = os("cannot wait for sockets in this Tokio runtime");
        let runtime =
            tokio::runtime::Handle::try_current().map_err(|error| refused(io::Error::other(error)))?;
        posthaste_core::reactor::outlive_broken_pipes();
        for context in 0..self.hub.shape.contexts {
            self.hub.door(ContextId(context)).bell.alarm().start().map_err(&refused)?;
        }
        let mut gate = lock(&self.gate);
        if let Some(gate) = gate.as_mut() {
            gate.start().map_err(&refused)?;
        }
        self.hub.open(runtime, news);
        if let Some(gate) = gate.take() {
            self.hub.spawn_gate(gate.run());
            #[cfg(all(unix, not(feature = "portable")))]
            self.hub.spawn(crate::vigil::keep(self.hub.clone()));
        }
        Ok(())
    }

    async fn close(&self) {
        self.hub.close().await;
    }
}
