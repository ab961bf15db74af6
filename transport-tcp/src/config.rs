//! What a device is made of: identity, key, mode, addresses, limits and times.

use crate::link::GET_COST;
use posthaste_core::{ClientId, Device, JobShape, Rank};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// Length of a job key in bytes.
pub const KEY_LEN: usize = 32;

/// The secret that all ranks of a job share. It is wiped from memory when the last clone is dropped, and is never
/// printed.
#[derive(Clone)]
pub struct JobKey(Arc<Zeroizing<[u8; KEY_LEN]>>);

impl JobKey {
    /// The key of these bytes.
    #[must_use]
    pub fn new(bytes: [u8; KEY_LEN]) -> Self {
        Self(Arc::new(Zeroizing::new(bytes)))
    }

    pub(crate) fn bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

/// How connections are protected. All ranks of a job use the same mode; one that asks for another is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Nothing is checked: whoever reaches the port is believed. Never chosen by itself.
    Insecure = 0,
    /// Both sides prove that they have the job key; then bytes go as they are. Whoever can change packets on the way
    /// can change messages.
    HandshakeOnly = 1,
    /// Both sides prove that they have the job key, and everything after it is encrypted and authenticated under keys
    /// made for this connection.
    Encrypted = 2,
}

impl Mode {
    /// The mode to use when nothing was asked for: [`HandshakeOnly`](Mode::HandshakeOnly) where packets cannot leave
    /// the host, else [`Encrypted`](Mode::Encrypted).
    ///
    /// ```
    /// use posthaste_tcp::Mode;
    /// assert_eq!(Mode::default_for("127.0.0.1:0".parse().unwrap()), Mode::HandshakeOnly);
    /// assert_eq!(Mode::default_for("192.0.2.7:0".parse().unwrap()), Mode::Encrypted);
    /// ```
    #[must_use]
    pub fn default_for(bind: SocketAddr) -> Mode {
        if bind.ip().is_loopback() { Mode::HandshakeOnly } else { Mode::Encrypted }
    }
}

/// Which memory peers put to and get from.
#[derive(Clone)]
pub enum Memory {
    /// Memory of this device's own, of so many bytes at most; private to the process and taken page by page. Peers reach all of
    /// it: that what they name was taken is not checked.
    Own(u64),
    /// The memory of another device of this rank, so that one window is reached through both: by ranks of this host
    /// through that device, by others through this one.
    Of(Arc<dyn Device>),
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Own(bytes) => f.debug_tuple("Own").field(bytes).finish(),
            Memory::Of(device) => f.debug_tuple("Of").field(&device.caps().name).finish(),
        }
    }
}

/// Sizes of a device, in bytes where nothing else is said. Ranks of one job use the same [`max_eager`](Self::max_eager),
/// [`get_chunk`](Self::get_chunk) and [`get_window`](Self::get_window); others are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest payload that is delivered as a short body, out of the read buffer; at least 80.
    pub max_inline: usize,
    /// Longest payload of one packet; at least `max_inline`, at most 1 GiB.
    pub max_eager: usize,
    /// Length of the fragments in which longer messages are streamed.
    pub fragment: usize,
    /// What may wait in a connection's out-buffer before senders are told to wait. A frame is taken whole if the
    /// buffer is empty.
    pub outgoing: usize,
    /// Length of a connection's read buffer; at least `max_inline` and 256 bytes for its frame.
    pub read_buffer: usize,
    /// Longest part in which a get is answered.
    pub get_chunk: usize,
    /// What may be asked for on a connection and not be here yet, counting 64 bytes more for each part. The other side keeps as
    /// much for it, where the kernel does not take it. Of a get that had to wait for it, more is asked for when half of it is
    /// free.
    pub get_window: usize,
    /// Sockets that may be open before they have proven anything; past it the oldest is closed.
    pub unproven: usize,
    /// Kernel's send and receive buffers of a connection; `None` leaves them to the kernel, which sizes them by need.
    pub socket_buffers: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_inline: 2048,
            max_eager: 4 << 20,
            fragment: 256 << 10,
            outgoing: 256 << 10,
            read_buffer: 128 << 10,
            get_chunk: 2 << 20,
            // Three parts, and what each counts for beyond its bytes.
            get_window: 3 * ((2 << 20) + GET_COST as usize),
            unproven: 256,
            socket_buffers: None,
        }
    }
}

impl Limits {
    /// What is out of range, brought into range.
    pub(crate) fn checked(self) -> Limits {
        let max_inline = self.max_inline.clamp(80, 64 << 10);
        let max_eager = self.max_eager.clamp(max_inline, 1 << 30);
        let get_chunk = self.get_chunk.clamp(64, 1 << 30);
        Limits {
            max_inline,
            max_eager,
            fragment: self.fragment.clamp(1, max_eager),
            outgoing: self.outgoing.max(1),
            read_buffer: self.read_buffer.max(max_inline + 256),
            get_chunk,
            get_window: self.get_window.max(get_chunk + GET_COST as usize),
            unproven: self.unproven.max(1),
            ..self
        }
    }
}

/// Times of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// How long a peer that does not answer is tried before it is lost: it may not have started yet.
    pub connect: Duration,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// After so much silence of the peer's *host* a connection is lost. Idle connections are probed by the kernel after a
    /// third of it (keep-alive, in whole seconds). Hosts answer for their processes, so that a rank that computes, is
    /// stopped for a while, or has no room is not taken for dead. Zero: never. Where the system does not tell when the
    /// other host was last heard of, its own keep-alive decides.
    pub silence: Duration,
    /// How long [`Device::close`] waits for peers to end their side once all of this one's is with their hosts. Until then it waits
    /// as long as a peer takes that has no room, one that is stopped, for instance; a host that has vanished ends that by its
    /// [`silence`](Self::silence). It waits so long, or for a second, for a port that nobody moves.
    pub linger: Duration,
}

/// As good as never, and times of a clock can still be told.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

impl Times {
    /// What is out of range, brought into range.
    pub(crate) fn checked(self) -> Times {
        let Times { connect, handshake, silence, linger } = self;
        let [connect, handshake, silence, linger] =
            [connect, handshake, silence, linger].map(|time| time.min(LONGEST));
        Times { connect, handshake, silence, linger }
    }
}

impl Default for Times {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(60),
            handshake: Duration::from_secs(5),
            silence: Duration::from_secs(5),
            linger: Duration::from_secs(5),
        }
    }
}

/// Everything that [`TcpDevice::new`](crate::TcpDevice::new) has to know.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// This rank.
    pub rank: Rank,
    /// The job.
    pub shape: JobShape,
    /// The client whose traffic the device carries.
    pub client: ClientId,
    /// Which life of this rank this is; a later one has a higher number.
    pub incarnation: u64,
    /// Tells jobs apart that might share a key or a port by mistake.
    pub job: [u8; 16],
    /// The job key. Not used by [`Mode::Insecure`].
    pub key: JobKey,
    /// How connections are protected.
    pub mode: Mode,
    /// Where to listen. Port 0 takes any, or one of [`ports`](Self::ports).
    pub bind: SocketAddr,
    /// Ports to try in this order if [`bind`](Self::bind) names port 0.
    pub ports: Option<RangeInclusive<u16>>,
    /// Memory that peers can reach.
    pub memory: Memory,
    /// Sizes.
    pub limits: Limits,
    /// Times.
    pub times: Times,
}

impl TcpConfig {
    /// A rank of a job on the loopback interface, with the usual sizes and times.
    #[must_use]
    pub fn new(rank: Rank, shape: JobShape, job: [u8; 16], key: JobKey) -> Self {
        let bind = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        Self {
            rank,
            shape,
            client: ClientId(0),
            incarnation: 1,
            job,
            key,
            mode: Mode::default_for(bind),
            bind,
            ports: None,
            memory: Memory::Own(1 << 30),
            limits: Limits::default(),
            times: Times::default(),
        }
    }

    /// Listens there instead, in the mode that suits the address.
    #[must_use]
    pub fn bind(mut self, bind: SocketAddr) -> Self {
        self.bind = bind;
        self.mode = Mode::default_for(bind);
        self
    }

    /// In that mode.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }
}
