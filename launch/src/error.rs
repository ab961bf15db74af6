//! What can go wrong, one enum per kind of operation.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why the environment of this process was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EnvError {
    /// A variable starts with `POSTHASTE_` but is none that is known.
    #[error("unknown variable {name}: did you mean {nearest}? unset it or correct its name")]
    Unknown {
        /// The variable that was found.
        name: String,
        /// The known variable whose name is nearest.
        nearest: &'static str,
    },
    /// A variable occurs twice in the environment.
    #[error("variable {name} is set twice: keep one of the two")]
    Repeated {
        /// The variable that was found twice.
        name: String,
    },
    /// A part of the job's variables is set and another part is not.
    #[error(
        "{missing} is not set although {present} is: start this program under the launcher, which sets \
         both, or unset every POSTHASTE_ variable to run alone"
    )]
    Partial {
        /// The variable that is missing.
        missing: &'static str,
        /// A variable that shows that a job was meant.
        present: &'static str,
    },
    /// A variable has a value that it cannot have.
    #[error("{name} is `{seen}`: expected {expected}")]
    Invalid {
        /// The variable.
        name: &'static str,
        /// What was seen; never the job's key.
        seen: String,
        /// What would be right, and what to do.
        expected: &'static str,
    },
    /// The rank is not below the size of the job.
    #[error(
        "POSTHASTE_RANK is `{rank}` but POSTHASTE_SIZE is `{size}`: ranks count from 0 to one less than the size"
    )]
    RankOutOfRange {
        /// The rank that was seen.
        rank: u32,
        /// The size that was seen.
        size: u32,
    },
    /// The descriptors listed do not fit the job.
    #[error(
        "POSTHASTE_FDS lists {seen} doorbells but of the {size} ranks of POSTHASTE_SIZE {on_node} are on this \
         node: the launcher sets them, and POSTHASTE_NODES if there are several nodes"
    )]
    RingSize {
        /// How many doorbells are listed.
        seen: usize,
        /// How many ranks are on this rank's node.
        on_node: usize,
        /// The size of the job.
        size: u32,
    },
    /// The nodes listed do not fit the job.
    #[error(
        "POSTHASTE_NODES tells the node of {seen} ranks but POSTHASTE_SIZE is {size}: both are set by the launcher"
    )]
    NodesSize {
        /// How many ranks are listed.
        seen: usize,
        /// The size of the job.
        size: u32,
    },
    /// The file with the job's secret cannot be used.
    #[error("the key file {} (POSTHASTE_KEY_FILE) cannot be used: {problem}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// Why, and what to do; never what is in it.
        problem: String,
    },
}

/// Why the launcher could not make the job's shared descriptors.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostFdsError {
    /// The limit on open files is too low for a job of this size.
    #[error(
        "a job of {ranks} ranks needs {needed} descriptors in the launcher but RLIMIT_NOFILE is {limit}: \
         raise it (`ulimit -n {needed}`) or start fewer ranks"
    )]
    DescriptorLimit {
        /// How many ranks were asked for.
        ranks: u32,
        /// How many descriptors the launcher would hold at its peak, those already open included.
        needed: u64,
        /// The soft limit.
        limit: u64,
    },
    /// A size that no job can have.
    #[error("a job has 1 to 4096 ranks, not {0}")]
    Ranks(u32),
    /// The arena has no size, or one that no file can have.
    #[error("the arena has {0} bytes: it needs at least 1 and at most 2^63 - 1")]
    ArenaBytes(u64),
    /// The kernel refused the arena, both as a memfd and as an unlinked file.
    #[error(
        "the arena of {bytes} bytes could not be made ({memfd}), nor an unlinked file in {dir}: {source}"
    )]
    Arena {
        /// Bytes asked for.
        bytes: u64,
        /// Why there is no memfd.
        memfd: String,
        /// The directory tried last.
        dir: PathBuf,
        /// Why there is no file.
        #[source]
        source: io::Error,
    },
    /// The kernel refused something else.
    #[error("could not {what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// Why the descriptors that the environment promises could not be adopted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// They were adopted before; a descriptor has one owner.
    #[error("this process has joined its job already: join once, and share the handle")]
    AlreadyAdopted,
    /// The environment of this process names none for this rank.
    #[error(
        "POSTHASTE_FDS names no descriptors for this process: a rank without any gets them from the broker"
    )]
    NotInherited,
    /// A number is not open here.
    #[error(
        "descriptor {fd} ({role}) named in POSTHASTE_FDS is not open: a process started by a rank inherits \
         the environment but not the place in the job; unset the POSTHASTE_ variables for it, and let \
         wrappers of a rank pass descriptors on"
    )]
    Gone {
        /// The number.
        fd: i32,
        /// What it should be.
        role: &'static str,
    },
    /// A number is open but is something else.
    #[error(
        "descriptor {fd} named in POSTHASTE_FDS is not {role}: something between the launcher and this \
         process has reused the number; unset the POSTHASTE_ variables if this process is no rank"
    )]
    WrongKind {
        /// The number.
        fd: i32,
        /// What it should be.
        role: &'static str,
    },
    /// What should end this rank with its launcher is not here.
    #[error(
        "descriptor {fd} named in POSTHASTE_LIFELINE {problem}: a process started by a rank inherits the environment \
         but not the place in the job; unset the POSTHASTE_ variables for it, and let wrappers of a rank pass \
         descriptors on"
    )]
    Lifeline {
        /// The number.
        fd: i32,
        /// What is the matter with it.
        problem: &'static str,
    },
    /// The job was ended before this rank had joined it.
    #[error("the launcher has ended the job that this process is to join: start the job again")]
    LauncherGone,
    /// The kernel refused to change or inspect a descriptor.
    #[error("could not inspect descriptor {fd} ({role}): {source}")]
    System {
        /// The number.
        fd: i32,
        /// What it should be.
        role: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// Why a job could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// What was asked for contradicts itself.
    #[error("{0}")]
    Invalid(String),
    /// The program of the launcher itself is unknown.
    #[error("the path of the current program is unknown: {0}")]
    CurrentProgram(#[source] io::Error),
    /// The ranks would refuse their environment.
    #[error("the ranks would refuse their environment: {0}")]
    Env(#[from] EnvError),
    /// The shared descriptors could not be made.
    #[error("the job's descriptors could not be made: {0}")]
    HostFds(#[from] HostFdsError),
    /// A rank could not be started; those already running were ended.
    #[error("rank {rank} could not be started as {program}: {source}")]
    Spawn {
        /// The rank.
        rank: u32,
        /// The program.
        program: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The kernel refused something else.
    #[error("could not {what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// Why a rank got no descriptors from the launcher's broker.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// The environment names no broker.
    #[error("POSTHASTE_BROKER is not set: this rank inherits its descriptors")]
    NoBroker,
    /// Nobody listens under that name.
    #[error(
        "the broker {name} does not answer ({source}): the launcher has ended, or runs in another network namespace"
    )]
    Unreachable {
        /// The abstract socket's name.
        name: String,
        /// Why the connection failed.
        #[source]
        source: io::Error,
    },
    /// Whoever listens under that name belongs to another user.
    #[error("the broker runs as user {found}, this process as {own}: join as the user who started the job")]
    WrongUser {
        /// The broker's user.
        found: u32,
        /// Our user.
        own: u32,
    },
    /// The broker did not accept our proof, or we not its.
    #[error("the proof of the job's key was refused: POSTHASTE_KEY and POSTHASTE_JOB belong to another job")]
    Refused,
    /// The rank was started by the launcher or was handed out before.
    #[error("rank {rank} is taken: it was started by the launcher, or another process has joined as it")]
    RankTaken {
        /// The rank asked for.
        rank: u32,
    },
    /// The broker kept too many others busy for as long as we waited.
    #[error("the broker was busy with other clients until the deadline")]
    Busy,
    /// The broker sent something that is no answer.
    #[error("the broker broke the protocol: {0}")]
    Protocol(&'static str),
    /// This process may not hold as many descriptors.
    #[error(
        "{needed} descriptors do not fit under RLIMIT_NOFILE, which is {limit}: raise it (`ulimit -n`) in this process"
    )]
    DescriptorLimit {
        /// How many it would hold.
        needed: u64,
        /// The soft limit.
        limit: u64,
    },
    /// An arena or doorbells for this host could not be made.
    #[error(transparent)]
    Host(#[from] HostFdsError),
    /// What came is not what a rank needs.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// The kernel refused something else.
    #[error("could not {what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> io::Error {
        io::Error::other("the reason")
    }

    #[test]
    fn every_error_tells_its_cause() {
        let system = || HostFdsError::System { what: "make a pipe", source: refused() };
        let adopt = || AdoptError::System { fd: 3, role: "the arena", source: refused() };
        let texts = [
            system().to_string(),
            HostFdsError::Arena { bytes: 1, memfd: "no".into(), dir: "/".into(), source: refused() }
                .to_string(),
            adopt().to_string(),
            LaunchError::CurrentProgram(refused()).to_string(),
            LaunchError::HostFds(system()).to_string(),
            LaunchError::Spawn { rank: 3, program: "p".into(), source: refused() }.to_string(),
            LaunchError::System { what: "wait", source: refused() }.to_string(),
            BrokerError::Unreachable { name: "n".into(), source: refused() }.to_string(),
            BrokerError::Adopt(adopt()).to_string(),
            BrokerError::System { what: "connect", source: refused() }.to_string(),
        ];
        for text in texts {
            assert_eq!(text.matches("the reason").count(), 1, "{text}");
        }
        let env = EnvError::Repeated { name: "POSTHASTE_X".into() };
        assert!(LaunchError::Env(env.clone()).to_string().ends_with(&env.to_string()));
    }
}
