//! What a rank learns from its environment.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use zeroize::Zeroize;

use crate::error::{AdoptError, EnvError};
use crate::fds::SharedFds;
use crate::key::{JobId, JobKey};
use crate::lifeline;
use crate::settings::Settings;
use crate::values::{host_and_port, nodes, nodes_text, number, read};
use crate::vars::{
    BROKER, CLIENTS, CONTEXTS, FDS, JOB, KEY, LIFELINE, NODES, RANK, RENDEZVOUS, RESTART, SIZE, Vars,
};

/// The most ranks that a job may have.
pub const MAX_RANKS: u32 = 4096;
/// The most contexts, or clients, that a rank may have.
const MAX_PARTS: u64 = 4096;
/// An abstract name fits a socket address of 108 bytes, whose first is zero.
const MAX_BROKER_NAME: usize = 107;

/// The numbers of the descriptors that a rank inherits (`POSTHASTE_FDS`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FdNumbers {
    pub(crate) arena: RawFd,
    pub(crate) bell: RawFd,
    pub(crate) ring: Vec<RawFd>,
    /// Whether they were read from the environment of this very process: only those may be adopted.
    pub(crate) of_process: bool,
}

impl FdNumbers {
    /// The arena.
    pub fn arena(&self) -> RawFd {
        self.arena
    }

    /// The read end of this rank's doorbell.
    pub fn bell(&self) -> RawFd {
        self.bell
    }

    /// The write ends of the doorbells of the node's ranks, in ascending order of ranks.
    pub fn ring(&self) -> &[RawFd] {
        &self.ring
    }
}

/// The number of the descriptor by which a rank is ended with its launcher (`POSTHASTE_LIFELINE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LifelineFd {
    number: RawFd,
    /// As that of [`FdNumbers`].
    pub(crate) of_process: bool,
}

impl LifelineFd {
    pub(crate) const fn of_other(number: RawFd) -> Self {
        Self { number, of_process: false }
    }

    /// The number.
    pub const fn number(self) -> RawFd {
        self.number
    }
}

/// A rank's place in its job.
///
/// | variable | value |
/// |---|---|
/// | `POSTHASTE_JOB` | the job's identity, 32 hexadecimal digits |
/// | `POSTHASTE_RANK` | this rank, below the size |
/// | `POSTHASTE_SIZE` | the number of ranks, 1 to 4096 |
/// | `POSTHASTE_CONTEXTS` | contexts per client, 1 to 4096, default 1 |
/// | `POSTHASTE_CLIENTS` | clients, 1 to 4096, default 1 |
/// | `POSTHASTE_KEY` | the job's secret, 64 hexadecimal digits; if not set, it is read from `POSTHASTE_KEY_FILE` |
/// | `POSTHASTE_FDS` | `arena=3,bell=4,ring=5:6:7:8`, the ring for the ranks of this rank's node |
/// | `POSTHASTE_BROKER` | abstract name of the socket that hands descriptors out, where none are inherited |
/// | `POSTHASTE_NODES` | the node of each rank, `0:0:1:1` or `0x2:1x2`, default node 0 for all |
/// | `POSTHASTE_RENDEZVOUS` | `host:port` where the ranks meet that reach each other over sockets |
/// | `POSTHASTE_RESTART` | `1` if ranks that die may be started again: all ranks meet and listen then |
/// | `POSTHASTE_LIFELINE` | number of the descriptor by which the rank is ended with its launcher |
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JobEnv {
    /// The job's identity.
    pub job: JobId,
    /// This rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// Contexts per client.
    pub contexts: u32,
    /// Clients.
    pub clients: u32,
    /// The job's secret.
    pub key: JobKey,
    /// What was inherited, if anything.
    pub fds: Option<FdNumbers>,
    /// Who hands descriptors out, if anybody.
    pub broker: Option<String>,
    /// The node of each rank; ranks of one node share memory. As long as the job has ranks.
    pub nodes: Vec<u32>,
    /// Where ranks meet that reach each other over sockets, as `host:port`; the host may be a name.
    pub rendezvous: Option<String>,
    /// Whether ranks that die may be started again, so that all ranks meet and listen, though they share memory.
    pub restart: bool,
    /// By what the rank is ended with its launcher, if by more than being its child.
    pub lifeline: Option<LifelineFd>,
    /// What the user tuned.
    pub settings: Settings,
}

impl JobEnv {
    /// Reads this process's place in a job; none if no variable of a job is set.
    ///
    /// # Errors
    /// The variables contradict each other, are incomplete, have values they cannot have, or one that starts with
    /// `POSTHASTE_` is unknown. A process that should be a rank never silently believes that it is alone.
    pub fn from_process() -> Result<Option<Self>, EnvError> {
        let mut env = Self::take(Vars::of_process()?)?;
        if let Some(env) = &mut env {
            env.fds.iter_mut().for_each(|fds| fds.of_process = true);
            env.lifeline.iter_mut().for_each(|lifeline| lifeline.of_process = true);
        }
        Ok(env)
    }

    /// Reads a place in a job out of any environment; a pure function, unless the secret is in a file.
    ///
    /// Descriptor numbers read in this way cannot be adopted: they need not be those of this process.
    ///
    /// # Errors
    /// As [`from_process`](Self::from_process).
    pub fn parse(env: impl IntoIterator<Item = (String, String)>) -> Result<Option<Self>, EnvError> {
        Self::take(Vars::collect(env)?)
    }

    /// Has this process killed when its launcher ends, or ends the job, also if it is not the launcher's own child: for the life of
    /// the process, whether it leaves the job or not. Does nothing if the launcher offers nothing for it.
    ///
    /// # Errors
    /// The launcher has ended the job already, or what is open under the number is not what it passed on, as in a process that
    /// a rank has started. Where the kernel refuses, there is a warning in the log only.
    pub fn hold_lifeline(&self) -> Result<(), AdoptError> {
        self.lifeline.map_or(Ok(()), lifeline::hold)
    }

    /// The variables that say all this, settings excepted; the key is among them.
    pub fn to_variables(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            (JOB, self.job.to_string()),
            (RANK, self.rank.to_string()),
            (SIZE, self.size.to_string()),
            (CONTEXTS, self.contexts.to_string()),
            (CLIENTS, self.clients.to_string()),
            (KEY, self.key.to_hex().to_string()),
        ];
        if let Some(fds) = &self.fds {
            variables.push((FDS, fds.to_text()));
        }
        if let Some(broker) = &self.broker {
            variables.push((BROKER, broker.clone()));
        }
        if self.nodes.iter().any(|node| *node != 0) {
            variables.push((NODES, nodes_text(&self.nodes)));
        }
        if let Some(rendezvous) = &self.rendezvous {
            variables.push((RENDEZVOUS, rendezvous.clone()));
        }
        if self.restart {
            variables.push((RESTART, "1".to_owned()));
        }
        if let Some(lifeline) = self.lifeline {
            variables.push((LIFELINE, lifeline.number.to_string()));
        }
        variables
    }

    /// This rank's node.
    pub fn node(&self) -> u32 {
        self.nodes.get(self.rank as usize).copied().unwrap_or_default()
    }

    /// The ranks of this rank's node, this one among them, in ascending order: the order of the ring.
    pub fn node_ranks(&self) -> Vec<u32> {
        let node = self.node();
        (0..self.size)
            .filter(|rank| self.nodes.get(*rank as usize).copied().unwrap_or_default() == node)
            .collect()
    }

    /// This rank's place among those of its node.
    pub(crate) fn place_on_node(&self) -> u32 {
        self.node_ranks().iter().position(|rank| *rank == self.rank).unwrap_or_default() as u32
    }

    fn take(mut vars: Vars) -> Result<Option<Self>, EnvError> {
        let settings = Settings::take(&mut vars)?;
        let Some(present) = vars.any_of_job() else { return Ok(None) };
        let needed = |missing| EnvError::Partial { missing, present };

        let job = read(&mut vars, JOB, "32 hexadecimal digits, set by the launcher", JobId::from_hex)?
            .ok_or(needed(JOB))?;
        let size = read(&mut vars, SIZE, "a number of ranks from 1 to 4096", |text| {
            number(text, 1, u64::from(MAX_RANKS))
        })?
        .ok_or(needed(SIZE))? as u32;
        let rank = read(&mut vars, RANK, "a rank, from 0 to one less than POSTHASTE_SIZE", |text| {
            number(text, 0, u64::from(u32::MAX))
        })?
        .ok_or(needed(RANK))? as u32;
        if rank >= size {
            return Err(EnvError::RankOutOfRange { rank, size });
        }
        let LooseEnv { key, clients, contexts, rendezvous, settings } = LooseEnv::take(&mut vars, settings)?;
        let key = key.ok_or(needed(KEY))?;
        let nodes = read(
            &mut vars,
            NODES,
            "the node of each rank, as in `0:0:1:1` or `0x2:1x2`, set by the launcher",
            |text| nodes(text, MAX_RANKS),
        )?
        .unwrap_or_else(|| vec![0; size as usize]);
        if nodes.len() != size as usize {
            return Err(EnvError::NodesSize { seen: nodes.len(), size });
        }
        let fds = read(
            &mut vars,
            FDS,
            "`arena=A,bell=B,ring=R0:R1:...` with distinct descriptor numbers from 3 on, set by the launcher",
            FdNumbers::parse,
        )?;
        let on_node = nodes.iter().filter(|node| **node == nodes[rank as usize]).count();
        if let Some(fds) = &fds
            && fds.ring.len() != on_node
        {
            return Err(EnvError::RingSize { seen: fds.ring.len(), on_node, size });
        }
        let broker = read(&mut vars, BROKER, "1 to 107 letters, digits, dots or dashes", broker_name)?;
        if fds.is_none() && broker.is_none() && rendezvous.is_none() {
            return Err(needed(FDS));
        }
        let restart =
            read(&mut vars, RESTART, "1, or not set", |text| (text == "1").then_some(()))?.is_some();
        if restart && rendezvous.is_none() {
            return Err(EnvError::Partial { missing: RENDEZVOUS, present: RESTART });
        }
        let lifeline =
            read(&mut vars, LIFELINE, "a descriptor number from 3 on, set by the launcher", descriptor)?
                .map(LifelineFd::of_other);
        Ok(Some(Self {
            job,
            rank,
            size,
            contexts,
            clients,
            key,
            fds,
            broker,
            nodes,
            rendezvous,
            restart,
            lifeline,
            settings,
        }))
    }
}

impl FdNumbers {
    /// The numbers of what the launcher holds, which are those that a child finds.
    pub(crate) fn of(shared: &SharedFds, bell: &OwnedFd) -> Self {
        Self {
            arena: shared.arena.as_raw_fd(),
            bell: bell.as_raw_fd(),
            ring: shared.ring.iter().map(OwnedFd::as_raw_fd).collect(),
            of_process: false,
        }
    }

    pub(crate) fn to_text(&self) -> String {
        let ring: Vec<String> = self.ring.iter().map(RawFd::to_string).collect();
        format!("arena={},bell={},ring={}", self.arena, self.bell, ring.join(":"))
    }

    fn parse(text: &str) -> Option<Self> {
        // 4096 numbers of ten digits fit in less.
        if text.len() > 64 << 10 {
            return None;
        }
        let mut fields = text.split(',');
        let arena = descriptor(fields.next()?.strip_prefix("arena=")?)?;
        let bell = descriptor(fields.next()?.strip_prefix("bell=")?)?;
        let ring: Vec<RawFd> =
            fields.next()?.strip_prefix("ring=")?.split(':').map(descriptor).collect::<Option<_>>()?;
        if fields.next().is_some() || ring.len() > MAX_RANKS as usize {
            return None;
        }
        let mut all: Vec<RawFd> = ring.iter().copied().chain([arena, bell]).collect();
        all.sort_unstable();
        all.windows(2).all(|pair| pair[0] != pair[1]).then_some(Self { arena, bell, ring, of_process: false })
    }
}

/// What is set for the ranks of a job that another launcher starts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LooseEnv {
    /// The job's secret, out of `POSTHASTE_KEY` or the file that `POSTHASTE_KEY_FILE` names.
    pub key: Option<JobKey>,
    /// Clients per rank (`POSTHASTE_CLIENTS`).
    pub clients: u32,
    /// Contexts per client (`POSTHASTE_CONTEXTS`).
    pub contexts: u32,
    /// Where the ranks meet (`POSTHASTE_RENDEZVOUS`), rather than where their launcher's variables say.
    pub rendezvous: Option<String>,
    /// What the user tuned.
    pub settings: Settings,
}

impl LooseEnv {
    /// Reads what is set for this process.
    ///
    /// # Errors
    /// A value cannot be had, the file of the key cannot be used, or a variable that starts with `POSTHASTE_` is
    /// unknown.
    pub fn from_process() -> Result<Self, EnvError> {
        let mut vars = Vars::of_process()?;
        let settings = Settings::take(&mut vars)?;
        Self::take(&mut vars, settings)
    }

    fn take(vars: &mut Vars, settings: Settings) -> Result<Self, EnvError> {
        let mut parts = |name| read(vars, name, "a number from 1 to 4096", |text| number(text, 1, MAX_PARTS));
        let contexts = parts(CONTEXTS)?.unwrap_or(1) as u32;
        let clients = parts(CLIENTS)?.unwrap_or(1) as u32;
        let key = match (take_key(vars)?, &settings.key_file) {
            (Some(key), _) => Some(key),
            (None, Some(path)) => Some(JobKey::from_file(path)?),
            (None, None) => None,
        };
        let rendezvous = read(
            vars,
            RENDEZVOUS,
            "a host, by name or address (IPv6 in brackets), a colon and a port",
            host_and_port,
        )?;
        Ok(Self { key, clients, contexts, rendezvous, settings })
    }
}

/// Reads the key without ever showing it, and wipes the text.
fn take_key(vars: &mut Vars) -> Result<Option<JobKey>, EnvError> {
    let Some(mut text) = vars.take(KEY) else { return Ok(None) };
    let key = JobKey::from_hex(&text);
    let seen = format!("hidden, {} bytes", text.len());
    text.zeroize();
    let expected = "64 hexadecimal digits, set by the launcher";
    key.map(Some).ok_or(EnvError::Invalid { name: KEY, seen, expected })
}

/// The number of a descriptor that is none of the standard streams.
fn descriptor(text: &str) -> Option<RawFd> {
    number(text, 3, i32::MAX as u64).map(|fd| fd as RawFd)
}

fn broker_name(text: &str) -> Option<String> {
    let fits = (1..=MAX_BROKER_NAME).contains(&text.len());
    let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    (fits && plain).then(|| text.to_owned())
}
