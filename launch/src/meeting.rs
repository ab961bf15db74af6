//! How ranks that inherited nothing find each other: whatever started them lets all of them exchange blobs.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use crate::key::{JobId, JobKey};
use crate::rendezvous::Bulletin;

/// What some launcher offers for ranks to meet: a key-value space, or a rank that serves an address.
///
/// All calls block; call them where blocking is allowed. Every rank makes the same calls in the same order.
pub trait Meeting: Send {
    /// This rank.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn size(&self) -> u32;

    /// The job's identity and secret, if the launcher or whoever serves the meeting says them. Otherwise rank 0 draws
    /// both and tells them in the first blob, which only a launcher's own key-value space may carry.
    fn identity(&self) -> Option<(JobId, JobKey)>;

    /// Gives this rank's blob, of at most 64 KiB, and gets those of all ranks, by rank.
    ///
    /// # Errors
    /// Ranks are missing at the deadline, two claim one number, or the launcher's service failed.
    fn all_gather(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, MeetingError>;

    /// Which incarnation of its rank this process is: 0 unless the rank was part of the job before, and died.
    fn incarnation(&self) -> u32 {
        0
    }

    /// In place of all rounds, where [`incarnation`](Self::incarnation) is not 0: what the ranks gave in the last round, or
    /// when they came again, and as which incarnations; for this one, what its predecessor gave.
    ///
    /// # Errors
    /// The launcher's service failed, or knows no such thing.
    fn roster(&mut self, deadline: Instant) -> Result<Vec<(u32, Vec<u8>)>, MeetingError> {
        let _ = deadline;
        Err(MeetingError::Garbled { service: "the meeting", said: "a later incarnation".into() })
    }

    /// After that: gives this rank's part of the last round anew, and waits until the others are told. What is left is the
    /// [`bulletin`](Self::bulletin).
    ///
    /// # Errors
    /// The launcher's service failed; [`MeetingError::ServerGone`] if it ended before it had answered. The rank may come anew then.
    fn come_again(&mut self, blob: &[u8], deadline: Instant) -> Result<(), MeetingError> {
        let _ = (blob, deadline);
        Err(MeetingError::Garbled { service: "the meeting", said: "a later incarnation".into() })
    }

    /// Ends the meeting, and gives what tells this rank who of the others is gone from now on, and them of this rank.
    /// None where nobody tells.
    fn bulletin(&mut self) -> Option<Bulletin> {
        None
    }
}

/// Why ranks did not find each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeetingError {
    /// Ranks had not come at the deadline.
    #[error("{} of {size} ranks have not come to {place} within {seconds} s: {}; \
             start them, or raise POSTHASTE_JOIN_TIMEOUT", missing.len(), listed(missing))]
    Missing {
        /// Where they were expected.
        place: String,
        /// The number of ranks.
        size: u32,
        /// How long they were waited for.
        seconds: u64,
        /// Which they are.
        missing: Vec<u32>,
    },
    /// Another process has this rank's number.
    #[error(
        "rank {rank} is claimed twice at {place}: by {first} and by {second}; give every process a rank of its own"
    )]
    ClaimedTwice {
        /// The number.
        rank: u32,
        /// Where.
        place: String,
        /// Who came first.
        first: String,
        /// Who came second.
        second: String,
    },
    /// A rank is not below the size, or ranks disagree about the size.
    #[error(
        "rank {rank} came to a job of {size} ranks saying that the job has {said}: ranks count from 0, and all have to \
         be told the same size"
    )]
    Size {
        /// The rank that came.
        rank: u32,
        /// The size.
        size: u32,
        /// What it said.
        said: u32,
    },
    /// Whoever serves the meeting cannot be reached, or refused this rank.
    #[error("cannot meet the other ranks at {place}: {problem}")]
    Refused {
        /// Where.
        place: String,
        /// What was seen, and what to do.
        problem: String,
    },
    /// The rank was part of the job, which goes on, and has left it in order.
    #[error(
        "rank {rank} was at {place} as {first} and has left the job in order; only a rank that died may come again: give \
         the next job a place of its own, or let the ranks of this one end"
    )]
    LeftBefore {
        /// The rank.
        rank: u32,
        /// Where.
        place: String,
        /// Who it was before.
        first: String,
    },
    /// The ranks have met before, and this one is to come to those that go on.
    #[error(
        "the ranks that meet at {place} have met before, and the job goes on: whoever comes again is let in at {served_at}; \
         name that in POSTHASTE_RENDEZVOUS"
    )]
    Elsewhere {
        /// Where it came to.
        place: String,
        /// Where it is to come.
        served_at: SocketAddr,
    },
    /// Whoever serves the meeting, or whoever came to it, has another key than this rank.
    #[error(
        "whoever serves the meeting at {place} has another key than rank {rank}: all ranks of a job need one key, and each \
         job a place of its own"
    )]
    WrongKey {
        /// Where.
        place: String,
        /// This rank.
        rank: u32,
    },
    /// A rank that had come ended while others were waiting for it.
    #[error(
        "rank {rank}, {who}, has ended while the others were meeting at {place}: see what it has printed"
    )]
    Ended {
        /// The rank.
        rank: u32,
        /// Its address and process.
        who: String,
        /// Where.
        place: String,
    },
    /// Whoever served the meeting has ended, or does not answer any more.
    #[error("whoever served the meeting at {place} is gone: {problem}")]
    ServerGone {
        /// Where.
        place: String,
        /// What was seen.
        problem: String,
    },
    /// The limit on open files is too low to serve a meeting of this size.
    #[error(
        "serving the meeting of {size} ranks takes {needed} descriptors in this process but RLIMIT_NOFILE is {limit}: raise \
         it (`ulimit -n {needed}`)"
    )]
    DescriptorLimit {
        /// The number of ranks.
        size: u32,
        /// How many descriptors the process would hold, those already open included.
        needed: u64,
        /// The soft limit.
        limit: u64,
    },
    /// A rank may not give that much.
    #[error("a rank gave {bytes} bytes to the others of the meeting, which takes at most 65536")]
    TooLong {
        /// How much it gave.
        bytes: usize,
    },
    /// The launcher's service broke its own rules.
    #[error("{service} said `{said}`, which is not understood")]
    Garbled {
        /// Which service.
        service: &'static str,
        /// What it said, shortened.
        said: String,
    },
    /// The operating system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The first of many ranks.
fn listed(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(u32::to_string).collect();
    let rest = if ranks.len() > 8 { ", …" } else { "" };
    format!("{} {}{rest}", if ranks.len() == 1 { "rank" } else { "ranks" }, shown.join(", "))
}
