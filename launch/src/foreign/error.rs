//! What can go wrong under a launcher that is not ours.

use thiserror::Error;

use crate::meeting::MeetingError;

/// Why the place that some launcher gave this process could not be taken.
///
/// A process that shows signs of having been launched never believes that it is alone.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// A part of the launcher's variables is set and another part is not.
    #[error("{launcher}: {present} is set but {missing} is not; {remedy}")]
    Partial {
        /// The launcher that the variables belong to.
        launcher: &'static str,
        /// The variable that shows that a job was meant.
        present: String,
        /// The variable that is missing.
        missing: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A variable has a value that it cannot have.
    #[error("{launcher}: {name} is `{seen}`; expected {expected}")]
    Invalid {
        /// The launcher that the variable belongs to.
        launcher: &'static str,
        /// The variable.
        name: &'static str,
        /// What was seen, shortened.
        seen: String,
        /// What would be right.
        expected: &'static str,
    },
    /// The rank is not below the size of the job.
    #[error(
        "{launcher}: the rank is {rank} ({rank_name}) but the size is {size} ({size_name}); \
         ranks count from 0 to one less than the size"
    )]
    RankOutOfRange {
        /// The launcher.
        launcher: &'static str,
        /// The rank that was seen.
        rank: u32,
        /// Where it was seen.
        rank_name: &'static str,
        /// The size that was seen.
        size: u32,
        /// Where it was seen.
        size_name: &'static str,
    },
    /// Two launchers, or a launcher and its variables, say different things about this process.
    #[error(
        "{first}, but {second}; only one of them started this process: unset the variables of the other \
         before this program starts"
    )]
    Contradiction {
        /// Who says what.
        first: String,
        /// Who says otherwise.
        second: String,
    },
    /// The launcher cannot say where the ranks are to meet.
    #[error("{launcher}: where the ranks should meet is not known: {problem}")]
    NoPlace {
        /// The launcher.
        launcher: &'static str,
        /// What was seen, and what to do.
        problem: String,
    },
    /// The descriptor that the launcher named is not its own any more.
    #[error(
        "PMI_FD is {fd}, which {problem}; a process started by a rank inherits the environment but not the place \
         in the job: unset the PMI_ variables for it, and let wrappers of a rank pass descriptors on"
    )]
    NotInherited {
        /// The number.
        fd: i32,
        /// What was found.
        problem: &'static str,
    },
    /// Another process has taken this rank's place, as a rank does that starts programs which join, too.
    #[error(
        "rank {rank} is already claimed by pid {pid}: {launcher} gave one process that place, and what it starts inherits \
         the variables but not the place; unset them for that program, or let the launcher start it as a rank of its own"
    )]
    Claimed {
        /// The launcher.
        launcher: &'static str,
        /// The rank.
        rank: u32,
        /// The process that has the place.
        pid: i32,
    },
    /// The launcher is reached by a library that is not there.
    #[error(
        "the job was started by a PMIx launcher but libpmix.so.2 cannot be loaded ({reason}); install it \
         (package libpmix2, or libpmix2t64, in Debian and Ubuntu; pmix elsewhere), or name its directory in LD_LIBRARY_PATH"
    )]
    NoLibrary {
        /// What the dynamic linker said.
        reason: String,
    },
    /// The launcher did not answer as it must, or not in time.
    #[error(transparent)]
    Meeting(#[from] MeetingError),
}
