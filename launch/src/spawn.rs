//! Describing and starting a job.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{env, io};

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::broker::Broker;
use crate::env::{JobEnv, MAX_RANKS};
use crate::error::LaunchError;
use crate::falls::Falls;
use crate::fds::HostFds;
use crate::job::{RunningJob, Shared, Slot};
use crate::key::{JobId, JobKey};
use crate::lifeline::Lifeline;
use crate::output::{Output, Readers, Relay};
use crate::placement::{Part, Placement};
use crate::rendezvous::Rendezvous;
use crate::settings::{DeviceChoice, Settings};
use crate::signals;
use crate::supervisor::{Reaped, Supervisor};
use crate::vars::{JOB_VARIABLES, TEST_PREFIX, process_variables};

/// As good as never, and times of a clock can still be told.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// A job to be started on this host.
///
/// The ranks share the launcher's process group, so that the terminal's Ctrl-C reaches them; rank 0 shares its standard
/// input, the others read nothing. They die with the launcher, however it ends, also behind a script that has started them.
#[derive(Debug)]
#[must_use = "a job starts with `spawn`"]
pub struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) arg0: Option<OsString>,
    pub(crate) args: Vec<OsString>,
    pub(crate) envs: Vec<(OsString, OsString)>,
    pub(crate) ranks: u32,
    pub(crate) contexts: u32,
    pub(crate) clients: u32,
    arena_bytes: Option<u64>,
    pub(crate) bind: bool,
    pub(crate) label: bool,
    pub(crate) keep_going: bool,
    pub(crate) forward_signals: bool,
    pub(crate) delays: BTreeMap<u32, Duration>,
    broker_ranks: BTreeSet<u32>,
    pub(crate) grace: Duration,
    pub(crate) stdout: Output,
    pub(crate) stderr: Output,
    no_program: Option<io::Error>,
    pub(crate) nodes: u32,
    tcp: bool,
    /// How often each rank may be started again; none: ranks that die stay dead.
    pub(crate) restarts: Option<u32>,
    pub(crate) part: Option<Part>,
    pub(crate) relay: Option<Relay>,
    pub(crate) reaped: Option<Reaped>,
    forget_settings: bool,
}

impl Launch {
    /// A job of one rank of this program, looked for in `PATH` unless it contains a slash.
    pub fn program(program: impl AsRef<Path>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arg0: None,
            args: Vec::new(),
            envs: Vec::new(),
            ranks: 1,
            contexts: 1,
            clients: 1,
            arena_bytes: None,
            bind: false,
            label: false,
            keep_going: false,
            forward_signals: false,
            delays: BTreeMap::new(),
            broker_ranks: BTreeSet::new(),
            grace: Duration::from_secs(2),
            stdout: Output::Inherit,
            stderr: Output::Inherit,
            no_program: None,
            nodes: 1,
            tcp: false,
            restarts: None,
            part: None,
            relay: None,
            reaped: None,
            forget_settings: false,
        }
    }

    /// A job of one rank of the program that is running now, with its arguments.
    pub fn current_program() -> Self {
        let (program, no_program) = match env::current_exe() {
            Ok(program) => (program, None),
            Err(error) => (PathBuf::new(), Some(error)),
        };
        let mut args = env::args_os();
        let arg0 = args.next();
        Self { arg0, no_program, ..Self::program(program).args(args) }
    }

    /// The number of ranks, 1 to 4096; 1 by default.
    pub fn ranks(mut self, ranks: u32) -> Self {
        self.ranks = ranks;
        self
    }

    /// Spreads the ranks in blocks over so many nodes, 1 by default: ranks of different nodes share no memory, as if they
    /// were on different hosts, and the ranks meet as with [`tcp`](Self::tcp).
    pub fn nodes(mut self, nodes: u32) -> Self {
        self.nodes = nodes;
        self
    }

    /// Whether to serve a place on the loopback interface, for the life of the job, where ranks meet that reach each
    /// other over sockets. It is served in any case if there are several nodes, or if `POSTHASTE_DEVICE` is `tcp`; on one
    /// node all ranks need that setting to come there.
    pub fn tcp(mut self, tcp: bool) -> Self {
        self.tcp = tcp;
        self
    }

    /// Starts a rank that fails again under its number, up to so many times each; beyond that its failure counts. By
    /// default, and with 0, no rank is started again.
    ///
    /// A rank that is started again is a new *incarnation*: it has nothing of its predecessor, shares no memory with the
    /// others and is reached over sockets, on which all ranks listen therefore. On listed hosts ([`run_on`](Self::run_on)) it
    /// comes again on the host on which it was; the ranks of a host that is lost do not. A rank that has come to the first
    /// meeting and dies before all others have ends the meeting, and so the job.
    pub fn restart(mut self, times: u32) -> Self {
        self.restarts = (times > 0).then_some(times);
        self
    }

    /// Starts one node's ranks of a job whose other ranks are started by others: whoever starts them all says what the
    /// job is, and serves the place where they meet. The number of ranks is the part's; rank 0 reads nothing.
    pub fn part(mut self, part: Part) -> Self {
        self.ranks = part.nodes.len() as u32;
        self.part = Some(part);
        self
    }

    /// Gives what ranks print to inherited streams to somebody else than the launcher's own streams.
    pub(crate) fn relay(mut self, relay: Relay) -> Self {
        self.relay = Some(relay);
        self
    }

    /// Whom to tell of every process that was a rank and has ended.
    pub(crate) fn reaped(mut self, reaped: Reaped) -> Self {
        self.reaped = Some(reaped);
        self
    }

    /// Keeps settings in this process's environment from the ranks: they get those of another host's launcher.
    pub(crate) fn forget_settings(mut self) -> Self {
        self.forget_settings = true;
        self
    }

    /// Adds arguments; every rank gets the same.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable for every rank, besides those that they inherit from the launcher.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.envs.push((name.into(), value.into()));
        self
    }

    /// Contexts per client, 1 by default.
    pub fn contexts(mut self, contexts: u32) -> Self {
        self.contexts = contexts;
        self
    }

    /// Clients per rank, 1 by default.
    pub fn clients(mut self, clients: u32) -> Self {
        self.clients = clients;
        self
    }

    /// The virtual size of the arena that all ranks of a node share; has no default. Nothing of it is committed.
    pub fn arena_bytes(mut self, bytes: u64) -> Self {
        self.arena_bytes = Some(bytes);
        self
    }

    /// Whether to pin each rank to one core: rank r to the r-th, modulo their number, of those the launcher may use.
    pub fn bind(mut self, bind: bool) -> Self {
        self.bind = bind;
        self
    }

    /// Whether to put `[rank] ` before each line that a rank prints to an inherited stream.
    pub fn label(mut self, label: bool) -> Self {
        self.label = label;
        self
    }

    /// Whether the other ranks go on when one has failed; by default they get SIGTERM, and SIGKILL after the grace.
    pub fn keep_going(mut self, keep_going: bool) -> Self {
        self.keep_going = keep_going;
        self
    }

    /// Whether to forward SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 from the launcher to all ranks.
    ///
    /// The first three end the job: ranks that outlive the grace, or a second SIGINT or SIGTERM, get SIGKILL. A signal
    /// that the terminal sends to the whole process group reaches each rank once, not twice, also one that is in another group.
    /// After the job the
    /// signals act on the launcher as they do by default.
    pub fn forward_signals(mut self, forward: bool) -> Self {
        self.forward_signals = forward;
        self
    }

    /// Starts one rank later than the others.
    pub fn delay(mut self, rank: u32, delay: Duration) -> Self {
        self.delays.insert(rank, delay.min(LONGEST));
        self
    }

    /// Leaves one rank to a process that someone else starts, with [`RunningJob::join_env`].
    pub fn broker_rank(mut self, rank: u32) -> Self {
        self.broker_ranks.insert(rank);
        self
    }

    /// How long ranks have between SIGTERM and SIGKILL; 2 s by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace.min(LONGEST);
        self
    }

    /// Where the ranks' standard output goes.
    pub fn stdout(mut self, output: Output) -> Self {
        self.stdout = output;
        self
    }

    /// Where the ranks' standard error goes.
    pub fn stderr(mut self, output: Output) -> Self {
        self.stderr = output;
        self
    }

    /// Starts the job; returns when all ranks that have no delay run their program.
    ///
    /// A process that ignores SIGCHLD stops doing so, since it could not tell how ranks end.
    ///
    /// # Errors
    /// The description is wrong, a variable that the ranks would inherit would be refused by them, the system's limits
    /// are too low, or a rank cannot be started; then none is left.
    pub fn spawn(mut self) -> Result<RunningJob, LaunchError> {
        let placement = match &self.part {
            Some(part) => Placement::of_part(part),
            None => Placement::blocks(self.ranks, self.nodes),
        };
        let Checked { arena_bytes, placement, tcp, settings } = self.check(placement)?;
        signals::remember_children().map_err(system("see how ranks end"))?;
        let (bind, several) = (self.bind, self.nodes > 1 && self.part.is_none());
        let mut cpus = if bind || several { allowed_cpus()? } else { Vec::new() };
        let told = self.envs.iter().any(|(name, _)| name == crate::vars::CORES)
            || std::env::var_os(crate::vars::CORES).is_some();
        if (bind || several) && !told {
            // A bound rank sees one core and could not tell that the others have theirs; ranks of one of several nodes on
            // this host could not tell that they have a part of them only.
            let share = (cpus.len() / self.nodes as usize).max(1);
            self.envs.push((crate::vars::CORES.into(), share.to_string().into()));
        }
        if !bind {
            cpus.clear();
        }
        let piped = [self.stdout, self.stderr].iter().filter(|output| self.is_piped(**output)).count() as u64;
        // A pidfd takes the place of each doorbell's read end; the rest is for starting a rank, and the broker. A rank
        // that meets others holds a connection to here.
        let each = piped + u64::from(tcp);
        let headroom = placement.started().len() as u64 * each + 48;
        let (nodes, counts): (Vec<u32>, Vec<u32>) = placement.counts().into_iter().unzip();
        let mut fds = HostFds::of_nodes(&counts, arena_bytes, headroom)?;
        let kind = fds[0].kind().clone();
        let mut env = self.describe(&placement)?;
        let rendezvous = if tcp { Some(serve(&mut env, settings.tcp_timeout)?) } else { None };
        let broker = self.start_broker(&mut fds[0], &mut env)?;
        let slots = (0..self.ranks).map(|rank| match placement.starts(rank) {
            true if self.broker_ranks.contains(&rank) => Slot::External,
            true => Slot::Waiting,
            false => Slot::Elsewhere,
        });
        let shared =
            Arc::new(Shared::new(slots.collect()).map_err(system("make the supervisor's doorbell"))?);
        if self.forward_signals {
            let target: Arc<dyn signals::Target> = shared.clone();
            signals::forward_to(Arc::downgrade(&target)).map_err(system("take over the signals"))?;
        }
        let readers = Readers::new(self.ranks as usize);
        let obituary = rendezvous.as_ref().map(Rendezvous::obituary);
        let reaped = self.reaped.take();
        let reaped =
            reaped.or(obituary.map(|obituary| Reaped(Arc::new(move |rank, pid| obituary.ended(rank, pid)))));
        let mut job = RunningJob {
            shared: Arc::clone(&shared),
            supervisor: None,
            readers: Arc::clone(&readers),
            join: broker.as_ref().map(|_| env.clone()),
            broker,
            rendezvous,
            broker_ranks: self.broker_ranks.iter().copied().collect(),
            job: env.job,
            kind,
        };
        let supervisor = Supervisor {
            watches: (0..self.ranks).map(|_| None).collect(),
            lifeline: Lifeline::new(),
            cut: None,
            rest: None,
            falls: Falls::new(),
            suspects: None,
            reaped,
            restarts: vec![0; self.ranks as usize],
            launch: self,
            env,
            fds: nodes.into_iter().zip(fds).collect(),
            placement,
            cpus,
            shared,
            readers,
            began: Instant::now(),
            deadline: None,
            interrupted: None,
        };
        let (sender, started) = mpsc::channel();
        let thread = std::thread::Builder::new().name("supervisor".into());
        let thread = thread.spawn(move || supervisor.run(sender)).map_err(system("start the supervisor"))?;
        job.supervisor = Some(thread);
        let ended = || Err(system("hear from the supervisor")(io::Error::other("it has ended")));
        started.recv().unwrap_or_else(|_| ended())?;
        Ok(job)
    }

    /// Whether a stream of the ranks goes through this process.
    pub(crate) fn is_piped(&self, output: Output) -> bool {
        match output {
            Output::Inherit => self.label || self.relay.is_some(),
            Output::Capture => true,
            Output::Null => false,
        }
    }

    /// What every rank is told, but for its number.
    fn describe(&self, placement: &Placement) -> Result<JobEnv, LaunchError> {
        let (job, key, rendezvous) = match &self.part {
            Some(part) => (part.job, part.key.clone(), Some(part.rendezvous.clone())),
            None => (
                JobId::random().map_err(system("draw the job's identity"))?,
                JobKey::random().map_err(system("draw the job's key"))?,
                None,
            ),
        };
        Ok(JobEnv {
            job,
            rank: 0,
            size: self.ranks,
            contexts: self.contexts,
            clients: self.clients,
            key,
            fds: None,
            broker: None,
            nodes: placement.nodes().to_vec(),
            rendezvous,
            restart: self.restarts.is_some(),
            lifeline: None,
            settings: Settings::default(),
        })
    }

    /// Gives a command what is the same for all ranks.
    pub(crate) fn configure(&self, command: &mut Command) {
        if let Some(arg0) = &self.arg0 {
            command.arg0(arg0);
        }
        if self.forget_settings {
            let settings = process_variables().filter(|(name, _)| !name.starts_with(TEST_PREFIX));
            for (name, _) in settings {
                command.env_remove(name);
            }
        }
        command.args(&self.args).envs(self.envs.iter().map(|(name, value)| (name, value)));
    }

    /// Checks the description, and where the ranks are to be.
    pub(crate) fn check(&mut self, placement: Result<Placement, String>) -> Result<Checked, LaunchError> {
        if let Some(error) = self.no_program.take() {
            return Err(LaunchError::CurrentProgram(error));
        }
        let invalid = |text: String| Err(LaunchError::Invalid(text));
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            return invalid(format!("a job has 1 to {MAX_RANKS} ranks, not {}", self.ranks));
        }
        for (what, parts) in [("contexts", self.contexts), ("clients", self.clients)] {
            if !(1..=4096).contains(&parts) {
                return invalid(format!("a rank has 1 to 4096 {what}, not {parts}"));
            }
        }
        let placement = placement.map_err(LaunchError::Invalid)?;
        let is_whole = placement.counts().len() == 1 && (0..self.ranks).all(|rank| placement.starts(rank));
        if !is_whole && !self.broker_ranks.is_empty() {
            return invalid(
                "the broker hands descriptors out on one node only, to ranks of a whole job".into(),
            );
        }
        let out_of_range = |rank: &&u32| **rank >= self.ranks || !placement.starts(**rank);
        if let Some(rank) = self.delays.keys().chain(&self.broker_ranks).find(out_of_range) {
            return invalid(format!(
                "rank {rank} is not one that is started of a job of {} ranks",
                self.ranks
            ));
        }
        if let Some(rank) = self.broker_ranks.iter().find(|rank| self.delays.contains_key(rank)) {
            return invalid(format!(
                "rank {rank} has a delay but is left to the broker, which starts nothing"
            ));
        }
        let text = |(name, value): &(OsString, OsString)| {
            (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
        };
        let own: BTreeMap<String, String> = self.envs.iter().map(text).collect();
        if let Some(name) = JOB_VARIABLES.into_iter().find(|name| own.contains_key(*name)) {
            return invalid(format!("{name} is set by the launcher itself"));
        }
        // Better one message here than the same from every rank.
        let inherited = self.inherited_settings().filter(|(name, _)| !own.contains_key(name));
        let settings = Settings::parse(inherited.chain(own.clone()))?;
        let device = settings.device;
        if device == DeviceChoice::Shm && placement.has_many_nodes() {
            return invalid(
                "the ranks are on several nodes, which shared memory does not reach across: leave out \
                 POSTHASTE_DEVICE (--device) or name `tcp`, or use one node"
                    .into(),
            );
        }
        let arena_bytes = self.arena_bytes;
        let arena_bytes =
            arena_bytes.ok_or_else(|| LaunchError::Invalid("the arena's size is not given".into()))?;
        if self.restarts.is_some() {
            if device == DeviceChoice::Shm {
                return invalid(
                    "a rank that is started again is reached over sockets: leave out POSTHASTE_DEVICE or name `tcp`, \
                     or start no rank again"
                        .into(),
                );
            }
            if self.part.is_some() && self.reaped.is_none() {
                return invalid(
                    "whoever starts all ranks starts them again, not who starts one node's: leave `restart` out".into(),
                );
            }
        }
        let wanted =
            self.tcp || self.restarts.is_some() || device == DeviceChoice::Tcp || placement.has_many_nodes();
        Ok(Checked { arena_bytes, placement, tcp: wanted && self.part.is_none(), settings })
    }

    /// The settings, hooks of tests among them, that the ranks get from this process's environment.
    pub(crate) fn inherited_settings(&self) -> impl Iterator<Item = (String, String)> {
        let forget = self.forget_settings;
        process_variables()
            .filter(|(name, _)| !JOB_VARIABLES.contains(&name.as_str()))
            .filter(move |(name, _)| !forget || name.starts_with(TEST_PREFIX))
    }

    fn start_broker(&self, fds: &mut HostFds, env: &mut JobEnv) -> Result<Option<Broker>, LaunchError> {
        if self.broker_ranks.is_empty() {
            return Ok(None);
        }
        let offers =
            self.broker_ranks.iter().filter_map(|rank| Some((*rank, fds.take_bell(*rank)?))).collect();
        let broker =
            Broker::start(env, Arc::clone(fds.shared()), offers).map_err(system("start the broker"))?;
        env.broker = Some(broker.name().to_owned());
        Ok(Some(broker))
    }
}

/// A description that was found to be right.
pub(crate) struct Checked {
    pub(crate) arena_bytes: u64,
    pub(crate) placement: Placement,
    /// Whether to serve a place where the ranks meet.
    tcp: bool,
    /// What the ranks will find set.
    pub(crate) settings: Settings,
}

/// Serves a place where the ranks meet, and says so to them.
fn serve(env: &mut JobEnv, silence: Duration) -> Result<Rendezvous, LaunchError> {
    let bind = |address: IpAddr| {
        Rendezvous::bind(SocketAddr::new(address, 0), env.size, env.key.clone(), Some(env.job), silence)
    };
    // Some hosts have only one of the two.
    let served = bind(Ipv4Addr::LOCALHOST.into()).or_else(|_| bind(Ipv6Addr::LOCALHOST.into()));
    let served = served.map_err(system("serve a place on the loopback interface where the ranks meet"))?;
    env.rendezvous = Some(served.address().to_string());
    Ok(served)
}

/// The cores that this process may use.
fn allowed_cpus() -> Result<Vec<usize>, LaunchError> {
    let set = sched_getaffinity(None).map_err(|errno| system("read the allowed cores")(errno.into()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> LaunchError {
    move |source| LaunchError::System { what, source }
}
