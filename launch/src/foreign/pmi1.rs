//! PMI-1, by which MPICH's `hydra`, Slurm's `--mpi=pmi2` and others let their processes share keys and values.
//!
//! | variable | value |
//! |---|---|
//! | `PMI_FD` | the number of an inherited socket to the process manager |
//! | `PMI_RANK`, `PMI_SIZE` | this rank, and the number of ranks |
//! | `PMI_PORT`, `PMI_ID` | instead: where the process manager listens, `host:port`, and who this process is |
//!
//! ```text
//!  rank                                      process manager
//!   │ ─ cmd=initack pmiid=3 ───────────────▶ │   with PMI_PORT only; then it says size and rank
//!   │ ─ cmd=init pmi_version=1 … ──────────▶ │
//!   │ ─ cmd=get_maxes ─────────────────────▶ │   how long a value may be
//!   │ ─ cmd=get_my_kvsname ────────────────▶ │
//!   │ ─ cmd=put kvsname=… key=… value=… ───▶ │ ╮
//!   │ ─ cmd=barrier_in ────────────────────▶ │ │ each all-gather: a blob is base64, in as many
//!   │ ◀───────────────── cmd=barrier_out ─── │ │ values as it needs
//!   │ ─ cmd=get kvsname=… key=… ───────────▶ │ ╯
//!   │ ─ cmd=finalize ──────────────────────▶ │   when the meeting is dropped
//! ```

use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use zeroize::Zeroizing;

use super::claim::{self, Claimed};
use super::error::ForeignError;
use super::pmi1_wire::{Line, Wire, refused};
use super::values::{Claim, Env, Reader, host_port, split_host_port};
use crate::adopt;
use crate::key::{JobId, JobKey};
use crate::meeting::{Meeting, MeetingError};

pub(super) const LAUNCHER: &str = "MPICH or another PMI-1 launcher";
const RANK: &str = "PMI_RANK";
const SIZE: &str = "PMI_SIZE";
const FD: &str = "PMI_FD";
const PORT: &str = "PMI_PORT";
const ID: &str = "PMI_ID";
const JOB: &str = "PMI_JOBID";

/// The most bytes of a blob.
pub(super) const MAX_BLOB: usize = 64 << 10;
/// What is used of longer values: enough for few round trips.
const MAX_VALUE: u64 = 8 << 10;
/// The length of a whole blob, in front of its first part, and a dot.
const HEADER: usize = 8;
/// How long the end may take, whose answer tells nothing.
const FAREWELL: Duration = Duration::from_secs(1);

/// How to reach the process manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Door {
    way: Way,
    /// What the variables say; with a port, the process manager says it too.
    claim: Option<Claim>,
    of_slurm: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    Descriptor(i32, Claim),
    Port { host: String, port: u16, id: u64 },
}

impl Door {
    pub(super) fn claim(&self) -> Option<Claim> {
        self.claim
    }

    /// Whether `srun` says this: others do not name the job.
    pub(super) fn of_slurm(&self) -> bool {
        self.of_slurm
    }
}

pub(super) fn detect(env: Env<'_>) -> Result<Option<Door>, ForeignError> {
    let reader = reader(env);
    let Some(present) = reader.first_set(&[FD, PORT]) else { return Ok(None) };
    let of_slurm = reader.is_set(JOB);
    if let Some(fd) = reader.number(FD, 3, i32::MAX as u64, "the number of an open socket, from 3 on")? {
        let claim = reader.claim(RANK, SIZE, &present)?;
        return Ok(Some(Door { way: Way::Descriptor(fd as i32, claim), claim: Some(claim), of_slurm }));
    }
    let text = reader.get(PORT).unwrap_or_default();
    let (host, port) =
        split_host_port(&text).ok_or_else(|| reader.invalid(PORT, &text, "a host, a colon and a port"))?;
    let id = reader
        .number(ID, 0, u64::from(u32::MAX), "a number, set by the launcher")?
        .ok_or_else(|| reader.partial(&present, ID))?;
    let said = reader.is_set(RANK) || reader.is_set(SIZE);
    let claim = if said { Some(reader.claim(RANK, SIZE, &present)?) } else { None };
    Ok(Some(Door { way: Way::Port { host: host.to_owned(), port, id }, claim, of_slurm }))
}

/// A rank and a size with no way to reach whoever set them.
pub(super) fn detect_without_door(env: Env<'_>) -> Result<(), ForeignError> {
    let reader = reader(env);
    match reader.first_set(&[RANK]) {
        Some(present) if reader.is_set(SIZE) => Err(reader.partial(&present, FD)),
        _ => Ok(()),
    }
}

fn reader(env: Env<'_>) -> Reader<'_> {
    let remedy =
        "start the program with mpiexec, which sets both, or unset the PMI_ variables to run without a job";
    Reader { env, launcher: LAUNCHER, remedy }
}

/// The ranks that one process manager started.
pub(super) struct Pmi1 {
    wire: Wire,
    claim: Claim,
    /// Where the process manager is reached by its port; an inherited socket can be taken once.
    _claimed: Option<Claimed>,
    kvs: String,
    /// The most bytes of a value.
    value: usize,
    /// The all-gathers so far: values of one key cannot be put twice.
    rounds: u64,
    /// Whether a call failed, after which question and answer no longer fit.
    broken: bool,
}

impl Pmi1 {
    pub(super) fn connect(door: &Door, until: Instant) -> Result<Self, ForeignError> {
        match &door.way {
            Way::Descriptor(fd, claim) => {
                let socket = adopt::adopt_socket(*fd)?;
                Ok(Self::open(Wire::new(socket), *claim, None, until)?)
            }
            Way::Port { host, port, id } => {
                let claimed = claim::claim(LAUNCHER, &format!("{host}:{port}"), *id as u32)?;
                let mut wire = Wire::new(dial(host, *port, until)?);
                let told = introduce(&mut wire, *id, until)?;
                if let Some(claim) = door.claim.filter(|claim| *claim != told) {
                    return Err(contradiction(claim, told));
                }
                Ok(Self::open(wire, told, Some(claimed), until)?)
            }
        }
    }

    fn open(
        mut wire: Wire,
        claim: Claim,
        claimed: Option<Claimed>,
        until: Instant,
    ) -> Result<Self, MeetingError> {
        wire.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", until)?;
        let maxes = wire.ask("cmd=get_maxes", "maxes", until)?;
        let (key, value) = (maxes.number("keylen_max")?, maxes.number("vallen_max")?);
        // The longest key is `ph-` and three numbers; and each value has to bring the transfer forward.
        if key < 40 || value < 64 {
            return Err(refused(format!(
                "its keys have at most {key} bytes and its values {value}: 40 and 64 are needed"
            )));
        }
        let kvs = wire.ask("cmd=get_my_kvsname", "my_kvsname", until)?.need("kvsname")?.to_owned();
        if kvs.len() > 1024 {
            return Err(refused(format!("its key-value space has a name of {} bytes", kvs.len())));
        }
        let value = room(value.min(MAX_VALUE) as usize, &kvs);
        Ok(Self { wire, claim, _claimed: claimed, kvs, value, rounds: 0, broken: false })
    }

    fn gather(&mut self, blob: &[u8], until: Instant) -> Result<Vec<Vec<u8>>, MeetingError> {
        let round = self.rounds;
        self.rounds += 1;
        let length = base64::encoded_len(blob.len(), false).unwrap_or_default();
        // With room for all, so that no unwiped copy is left behind by growth.
        let mut text = Zeroizing::new(String::with_capacity(HEADER + length));
        text.push_str(&format!("{length:0width$}.", width = HEADER - 1));
        URL_SAFE_NO_PAD.encode_string(blob, &mut text);
        let mut rest = text.as_str();
        for index in 0.. {
            let (value, behind) = rest.split_at(rest.len().min(self.value));
            let mut put = Zeroizing::new(String::with_capacity(self.kvs.len() + self.value + 100));
            let key = key(round, self.claim.rank, index);
            put.push_str(&format!("cmd=put kvsname={} key={key} value=", self.kvs));
            put.push_str(value);
            self.wire.ask(&put, "put_result", until)?;
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        self.wire.ask("cmd=barrier_in", "barrier_out", until)?;
        (0..self.claim.size).map(|rank| self.fetch(round, rank, until)).collect()
    }

    fn fetch(&mut self, round: u64, rank: u32, until: Instant) -> Result<Vec<u8>, MeetingError> {
        let first = self.get(&key(round, rank, 0), until)?;
        let value = first.need("value")?;
        let (length, start) = value.split_once('.').ok_or_else(|| first.garbled())?;
        let length = super::values::decimal(length)
            .filter(|length| *length <= (MAX_BLOB as u64 * 4).div_ceil(3))
            .ok_or_else(|| first.garbled())? as usize;
        let mut text = Zeroizing::new(String::with_capacity(length + 2 * MAX_VALUE as usize));
        text.push_str(start);
        let mut index = 0;
        while text.len() < length {
            index += 1;
            let next = self.get(&key(round, rank, index), until)?;
            text.push_str(next.need("value")?);
        }
        let blob = (text.len() == length).then(|| URL_SAFE_NO_PAD.decode(text.as_bytes()).ok()).flatten();
        blob.ok_or_else(|| refused(format!("the blob of rank {rank} came back damaged")))
    }

    fn get(&mut self, key: &str, until: Instant) -> Result<Line, MeetingError> {
        self.wire.ask(&format!("cmd=get kvsname={} key={key}", self.kvs), "get_result", until)
    }
}

impl Meeting for Pmi1 {
    fn rank(&self) -> u32 {
        self.claim.rank
    }

    fn size(&self) -> u32 {
        self.claim.size
    }

    fn identity(&self) -> Option<(JobId, JobKey)> {
        None
    }

    fn all_gather(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, MeetingError> {
        if self.broken {
            return Err(refused("an earlier exchange failed".into()));
        }
        if blob.len() > MAX_BLOB {
            return Err(refused(format!("a blob of {} bytes is too long: 65536 are possible", blob.len())));
        }
        let result = self.gather(blob, deadline);
        self.broken = result.is_err();
        result
    }
}

impl Drop for Pmi1 {
    /// Without a farewell the process manager takes the end of this process for a crash, and ends the others.
    fn drop(&mut self) {
        if self.broken {
            return;
        }
        if let Err(error) = self.wire.farewell(Instant::now() + FAREWELL) {
            tracing::debug!(%error, "the process manager did not hear our farewell");
        }
    }
}

fn key(round: u64, rank: u32, index: usize) -> String {
    format!("ph-{round}-{rank}-{index}")
}

/// How long values are made: some process managers limit a whole line as they say that they limit a value.
fn room(value: usize, kvs: &str) -> usize {
    let rest = "cmd=put kvsname= key= value=\n".len() + kvs.len() + 40;
    value.saturating_sub(rest).max(value / 2)
}

fn dial(host: &str, port: u16, until: Instant) -> Result<OwnedFd, MeetingError> {
    let place = host_port(host, port);
    let refused = |problem: String| MeetingError::Refused { place: place.clone(), problem };
    let addresses =
        (host, port).to_socket_addrs().map_err(|error| refused(format!("PMI_PORT's host: {error}")))?;
    let mut last = refused("PMI_PORT's host has no address".into());
    for address in addresses {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                // Questions are short and each waits for its answer.
                stream
                    .set_nodelay(true)
                    .map_err(|source| MeetingError::System { what: "set TCP_NODELAY", source })?;
                return Ok(stream.into());
            }
            Err(error) => last = refused(format!("{error}; the launcher named by PMI_PORT has ended")),
        }
    }
    Err(last)
}

/// Says who we are, and hears which rank that is.
fn introduce(wire: &mut Wire, id: u64, until: Instant) -> Result<Claim, ForeignError> {
    let ask = format!("cmd=initack pmiid={id}");
    wire.ask(&ask, "initack", until)?;
    let mut told = |what| {
        let line = wire.hear(&ask, until)?;
        if line.get("cmd") != Some("set") { Err(line.garbled()) } else { line.number(what) }
    };
    let (size, rank) = (told("size")?, told("rank")?);
    told("debug")?;
    let reader = reader(&|_| None);
    let number = |name, number: u64, max| {
        u32::try_from(number).ok().filter(|number| (*number).le(&max)).ok_or_else(|| {
            reader.invalid(name, &number.to_string(), "a number that a job of 1 to 4096 ranks can have")
        })
    };
    let size = number(SIZE, size, crate::env::MAX_RANKS)?;
    reader.in_range(number(RANK, rank, u32::MAX)?, RANK, size, SIZE)
}

fn contradiction(variables: Claim, told: Claim) -> ForeignError {
    ForeignError::Contradiction {
        first: format!("PMI_RANK and PMI_SIZE say rank {} of {}", variables.rank, variables.size),
        second: format!("the process manager at PMI_PORT says rank {} of {}", told.rank, told.size),
    }
}
