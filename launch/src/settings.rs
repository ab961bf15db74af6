//! What a user may tune through the environment.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::EnvError;
use crate::values::{bytes, interface, number, ports, read, seconds};
use crate::vars::{
    ANSWER_BYTES, CORES, CREDIT_BYTES, CREDITS, DEVICE, DRIVER, JOIN_TIMEOUT, KEY_FILE, LANE_BYTES,
    MEMORY_LIMIT, OVERSEND, PATTERN_SLOTS, RENDEZVOUS_BYTES, SEGMENT, SPIN_US, STAGE_BYTES, TCP_INTERFACE,
    TCP_MODE, TCP_PORTS, TCP_TIMEOUT, Vars,
};

/// Who waits for the doorbell while no future is being polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Driver {
    /// A task of the runtime (`task`).
    #[default]
    Task,
    /// A thread of its own (`thread`).
    Thread,
}

/// How ranks reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// Ranks of one node over shared memory, others over sockets (`auto`).
    #[default]
    Auto,
    /// Over shared memory (`shm`); a rank of another node is not reached.
    Shm,
    /// Over sockets (`tcp`), also on one node.
    Tcp,
}

/// How connections between ranks are protected; SECURITY.md tells what each mode withstands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TcpMode {
    /// Both sides prove that they have the job's key, and all that follows is encrypted (`encrypted`).
    Encrypted,
    /// Both sides prove that they have the job's key; what follows is as it is (`handshake-only`).
    HandshakeOnly,
    /// Whoever reaches the port is believed (`insecure`).
    Insecure,
}

/// What a user may tune; every variable is optional.
///
/// | variable | values | default |
/// |---|---|---|
/// | `POSTHASTE_LANE_BYTES` | a power of two, 1024 to 1048576 | 16384 |
/// | `POSTHASTE_CREDITS` | 1 to 65536 | 1024 |
/// | `POSTHASTE_CREDIT_BYTES` | bytes, at least 64K, with K, M or G for powers of 1024 | 16M |
/// | `POSTHASTE_ANSWER_BYTES` | as above | 256M |
/// | `POSTHASTE_SPIN_US` | 0 to 10000 microseconds | the library decides |
/// | `POSTHASTE_MEMORY_LIMIT` | bytes, at least 1, with K, M or G for powers of 1024 | none |
/// | `POSTHASTE_SEGMENT` | virtual bytes per rank, as above | the library decides |
/// | `POSTHASTE_DRIVER` | `task` or `thread` | `task` |
/// | `POSTHASTE_CORES` | 1 to 65536 cores that the ranks of a node share; set by a launcher that binds, or makes several nodes of one host | what the process may use |
/// | `POSTHASTE_DEVICE` | `auto`, `shm` or `tcp` | `auto` |
/// | `POSTHASTE_TCP_MODE` | `encrypted`, `handshake-only` or `insecure` | the library decides |
/// | `POSTHASTE_TCP_INTERFACE` | the name of an interface, or one of its addresses | the library decides |
/// | `POSTHASTE_TCP_PORTS` | `A-B`, ports to listen on | any |
/// | `POSTHASTE_TCP_TIMEOUT` | seconds of a host's silence, up to three decimals; 0 for ever | 5 |
/// | `POSTHASTE_JOIN_TIMEOUT` | seconds to wait for all ranks, at least 0.001 | 60 |
/// | `POSTHASTE_OVERSEND` | `auto` or `always` | `auto` |
/// | `POSTHASTE_RENDEZVOUS_BYTES` | bytes, at least 1, with K, M or G, or `never` | the library decides |
/// | `POSTHASTE_STAGE_BYTES` | bytes per group and rank, at least 1, with K, M or G, or `never` | 32M |
/// | `POSTHASTE_PATTERN_SLOTS` | slots for recorded operations per context, 1 to 16777216 | 262144 |
/// | `POSTHASTE_KEY_FILE` | a file of 64 hexadecimal digits that only its owner, this user, may read | none |
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Bytes of one lane (`POSTHASTE_LANE_BYTES`).
    pub lane_bytes: usize,
    /// Messages that may be under way per sender and protocol that takes credit (`POSTHASTE_CREDITS`).
    pub credits: u32,
    /// Payload bytes of those (`POSTHASTE_CREDIT_BYTES`).
    pub credit_bytes: u64,
    /// Bytes of answers that may wait for one peer before it is told `Busy` (`POSTHASTE_ANSWER_BYTES`).
    pub answer_bytes: u64,
    /// How long a poll may spin (`POSTHASTE_SPIN_US`); none: the library decides.
    pub spin: Option<Duration>,
    /// Bytes that the job may commit on this host (`POSTHASTE_MEMORY_LIMIT`).
    pub memory_limit: Option<u64>,
    /// Virtual bytes of a rank's part of the arena (`POSTHASTE_SEGMENT`).
    pub segment: Option<u64>,
    /// Who waits for the doorbell (`POSTHASTE_DRIVER`).
    pub driver: Driver,
    /// Cores that the ranks of this host share (`POSTHASTE_CORES`); none: those that the process may use.
    pub cores: Option<usize>,
    /// How ranks reach each other (`POSTHASTE_DEVICE`).
    pub device: DeviceChoice,
    /// How connections are protected (`POSTHASTE_TCP_MODE`); none: the library decides.
    pub tcp_mode: Option<TcpMode>,
    /// The interface to listen on, by name or address (`POSTHASTE_TCP_INTERFACE`); none: the library decides.
    pub tcp_interface: Option<String>,
    /// The ports to listen on (`POSTHASTE_TCP_PORTS`); none: any.
    pub tcp_ports: Option<RangeInclusive<u16>>,
    /// After how much silence a host counts as lost (`POSTHASTE_TCP_TIMEOUT`); zero: never.
    pub tcp_timeout: Duration,
    /// How long to wait until all ranks have come (`POSTHASTE_JOIN_TIMEOUT`).
    pub join_timeout: Duration,
    /// Whether puts and gets are made of sends although the device has its own (`POSTHASTE_OVERSEND`).
    pub oversend: bool,
    /// From how many bytes on a send asks the receiver where to (`POSTHASTE_RENDEZVOUS_BYTES`); `u64::MAX` for never,
    /// none: the library decides.
    pub rendezvous_bytes: Option<u64>,
    /// Bytes of a rank's memory that a group's stages may take, where members that share memory lay what they give to each
    /// other in collective operations (`POSTHASTE_STAGE_BYTES`); 0 for never: it goes as messages.
    pub stage_bytes: u64,
    /// Slots of 64 bytes that a context has for recorded operations: one for each, two for a put with a signal, and up to three more
    /// for message info (`POSTHASTE_PATTERN_SLOTS`).
    pub pattern_slots: usize,
    /// A file with the job's secret (`POSTHASTE_KEY_FILE`), for jobs whose launcher sets none;
    /// [`JobKey::from_file`](crate::JobKey::from_file) reads it.
    pub key_file: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lane_bytes: 16384,
            credits: 1024,
            credit_bytes: 16 << 20,
            answer_bytes: 256 << 20,
            spin: None,
            memory_limit: None,
            segment: None,
            driver: Driver::Task,
            cores: None,
            device: DeviceChoice::Auto,
            tcp_mode: None,
            tcp_interface: None,
            tcp_ports: None,
            tcp_timeout: Duration::from_secs(5),
            join_timeout: Duration::from_secs(60),
            oversend: false,
            rendezvous_bytes: None,
            stage_bytes: 32 << 20,
            pattern_slots: 262_144,
            key_file: None,
        }
    }
}

impl Settings {
    /// Reads the settings of this process; they need no job.
    ///
    /// # Errors
    /// A setting has a value it cannot have, or a variable that starts with `POSTHASTE_` is unknown.
    pub fn from_process() -> Result<Self, EnvError> {
        Self::take(&mut Vars::of_process()?)
    }

    /// Reads the settings out of any environment.
    ///
    /// # Errors
    /// As [`from_process`](Self::from_process).
    pub fn parse(env: impl IntoIterator<Item = (String, String)>) -> Result<Self, EnvError> {
        Self::take(&mut Vars::collect(env)?)
    }

    pub(crate) fn take(vars: &mut Vars) -> Result<Self, EnvError> {
        let default = Self::default();
        let size = "a number of bytes, at least 1, optionally with the suffix K, M or G";
        let large = "a number of bytes, at least 64K, optionally with the suffix K, M or G";
        let many = |text: &str| bytes(text).filter(|bytes| *bytes >= 64 << 10);
        Ok(Self {
            lane_bytes: read(vars, LANE_BYTES, "a power of two from 1024 to 1048576", |text| {
                number(text, 1024, 1 << 20)
                    .filter(|bytes| bytes.is_power_of_two())
                    .map(|bytes| bytes as usize)
            })?
            .unwrap_or(default.lane_bytes),
            credits: read(vars, CREDITS, "a number from 1 to 65536", |text| {
                number(text, 1, 65536).map(|credits| credits as u32)
            })?
            .unwrap_or(default.credits),
            credit_bytes: read(vars, CREDIT_BYTES, large, many)?.unwrap_or(default.credit_bytes),
            answer_bytes: read(vars, ANSWER_BYTES, large, many)?.unwrap_or(default.answer_bytes),
            spin: read(vars, SPIN_US, "a number of microseconds from 0 to 10000", |text| {
                number(text, 0, 10_000).map(Duration::from_micros)
            })?,
            memory_limit: read(vars, MEMORY_LIMIT, size, bytes)?,
            segment: read(vars, SEGMENT, size, bytes)?,
            driver: read(vars, DRIVER, "`task` or `thread`", |text| match text {
                "task" => Some(Driver::Task),
                "thread" => Some(Driver::Thread),
                _ => None,
            })?
            .unwrap_or_default(),
            cores: read(vars, CORES, "a number from 1 to 65536", |text| {
                number(text, 1, 65536).map(|cores| cores as usize)
            })?,
            ..Self::take_transport(vars, default)?
        })
    }

    /// Those that tell how ranks find and reach each other.
    fn take_transport(vars: &mut Vars, default: Self) -> Result<Self, EnvError> {
        Ok(Self {
            device: read(vars, DEVICE, "`auto`, `shm` or `tcp`", |text| match text {
                "auto" => Some(DeviceChoice::Auto),
                "shm" => Some(DeviceChoice::Shm),
                "tcp" => Some(DeviceChoice::Tcp),
                _ => None,
            })?
            .unwrap_or_default(),
            tcp_mode: read(
                vars,
                TCP_MODE,
                "`encrypted`, `handshake-only` or `insecure`",
                |text| match text {
                    "encrypted" => Some(TcpMode::Encrypted),
                    "handshake-only" => Some(TcpMode::HandshakeOnly),
                    "insecure" => Some(TcpMode::Insecure),
                    _ => None,
                },
            )?,
            tcp_interface: read(vars, TCP_INTERFACE, "an interface's name or an IP address", interface)?,
            tcp_ports: read(vars, TCP_PORTS, "two ports from 1 to 65535, as in `5000-5999`", ports)?,
            tcp_timeout: read(
                vars,
                TCP_TIMEOUT,
                "seconds from 0 (never) to 86400, up to three decimals",
                seconds,
            )?
            .unwrap_or(default.tcp_timeout),
            join_timeout: read(
                vars,
                JOIN_TIMEOUT,
                "seconds from 0.001 to 86400, up to three decimals",
                |text| seconds(text).filter(|time| !time.is_zero()),
            )?
            .unwrap_or(default.join_timeout),
            oversend: read(vars, OVERSEND, "`auto` or `always`", |text| match text {
                "auto" => Some(false),
                "always" => Some(true),
                _ => None,
            })?
            .unwrap_or(default.oversend),
            rendezvous_bytes: read(
                vars,
                RENDEZVOUS_BYTES,
                "`never`, or a number of bytes, at least 1, optionally with the suffix K, M or G",
                |text| if text == "never" { Some(u64::MAX) } else { bytes(text) },
            )?,
            stage_bytes: read(
                vars,
                STAGE_BYTES,
                "`never`, or a number of bytes, at least 1, optionally with the suffix K, M or G",
                |text| if text == "never" { Some(0) } else { bytes(text) },
            )?
            .unwrap_or(default.stage_bytes),
            pattern_slots: read(vars, PATTERN_SLOTS, "a number from 1 to 16777216", |text| {
                number(text, 1, 16 << 20).map(|slots| slots as usize)
            })?
            .unwrap_or(default.pattern_slots),
            key_file: read(vars, KEY_FILE, "the path of a file", |text| {
                (!text.is_empty()).then(|| PathBuf::from(text))
            })?,
            ..default
        })
    }
}
