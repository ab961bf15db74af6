//! What the members of a group call for, and that they call for the same.

use super::PersistentError;
use crate::collective::CollectiveError;
use crate::group::Group;
use posthaste_core::Fault;
use std::sync::atomic::{AtomicU64, Ordering};

/// What members have to agree upon.
///
/// # Examples
/// ```
/// use posthaste::persistent::{PersistentCall, PersistentKind};
/// let call = PersistentCall { kind: PersistentKind::Broadcast, root: 2, bytes: 24 };
/// assert_eq!(call.to_string(), "a broadcast of 24 bytes from member 2");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentCall {
    /// Which collective.
    pub kind: PersistentKind,
    /// Where it begins, by rank in the group; 0 for those that begin everywhere.
    pub root: usize,
    /// Bytes of the values that each member gives, or gets from each other.
    pub bytes: usize,
}

/// Which persistent collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PersistentKind {
    /// [`Persistent::all_reduce`](super::Persistent::all_reduce).
    AllReduce,
    /// [`Persistent::broadcast`](super::Persistent::broadcast).
    Broadcast,
    /// [`Persistent::barrier`](super::Persistent::barrier).
    Barrier,
    /// [`Persistent::all_to_all`](super::Persistent::all_to_all).
    AllToAll,
    /// One of another version.
    Unknown,
}

impl std::fmt::Display for PersistentCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PersistentCall { kind, root, bytes } = self;
        match kind {
            PersistentKind::AllReduce => write!(f, "a reduction of {bytes} bytes"),
            PersistentKind::Broadcast => write!(f, "a broadcast of {bytes} bytes from member {root}"),
            PersistentKind::Barrier => f.write_str("a barrier"),
            PersistentKind::AllToAll => write!(f, "an exchange of {bytes} bytes with each other member"),
            PersistentKind::Unknown => write!(f, "something unknown of {bytes} bytes"),
        }
    }
}

impl PersistentCall {
    /// `mark`: of the operation by which values are combined, and of their type.
    fn to_words(self, mark: u32) -> [u64; WORDS] {
        let kind = match self.kind {
            PersistentKind::AllReduce => 1,
            PersistentKind::Broadcast => 2,
            PersistentKind::Barrier => 3,
            PersistentKind::AllToAll => 4,
            PersistentKind::Unknown => 0,
        };
        [kind, self.root as u64, self.bytes as u64, mark.into()]
    }

    fn from_words([kind, root, bytes, _]: [u64; WORDS]) -> PersistentCall {
        let kind = match kind {
            1 => PersistentKind::AllReduce,
            2 => PersistentKind::Broadcast,
            3 => PersistentKind::Barrier,
            4 => PersistentKind::AllToAll,
            _ => PersistentKind::Unknown,
        };
        PersistentCall { kind, root: root as usize, bytes: bytes as usize }
    }
}

/// Words of what a member tells.
const WORDS: usize = 4;
/// What a member tells in place of a call that no memory is enough for.
const COULD_NOT: [u64; WORDS] = [u64::MAX; WORDS];

/// Bytes of so many values.
pub(super) fn bytes_of<T>(len: usize) -> Result<usize, Fault> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes.ok_or(Fault::OutOfMemory("no memory has so many bytes as the values of this persistent collective"))
}

/// Makes the persistent collectives of a group: one after the other, since members have to agree on each more than once, and
/// two that are made at once would get each other's words.
#[derive(Debug, Default)]
pub(crate) struct Making {
    /// Held by whoever makes one; who comes first has it first.
    pub(super) turn: tokio::sync::Mutex<()>,
    /// Above the names of all that were made or are being made.
    next: AtomicU64,
}

impl Making {
    /// Whether one of this name may have been made.
    pub(super) fn knows(&self, name: u64) -> bool {
        name < self.next.load(Ordering::Acquire)
    }

    /// Ends when all members have come here with the same call; `None`: this one cannot make what it called for. The name of
    /// what is made is the number of the operation in which they met.
    pub(super) async fn meet(
        &self,
        group: &Group,
        ours: Option<(PersistentCall, u32)>,
    ) -> Result<u64, PersistentError> {
        let own = ours.map_or(COULD_NOT, |(call, mark)| call.to_words(mark));
        let (name, meeting) = group.numbered_all_gather(&own);
        let words = meeting.await?;
        // Before anybody can have met here once more, and sends.
        self.next.fetch_max(name.saturating_add(1), Ordering::AcqRel);
        let Some((ours, _)) = ours else { return Ok(name) };
        let (calls, _) = words.as_chunks::<WORDS>();
        if calls.contains(&COULD_NOT) {
            return Err(not_ready());
        }
        match group.members().iter().zip(calls).find(|(_, theirs)| **theirs != own) {
            None => Ok(name),
            Some((&rank, theirs)) => {
                let theirs = PersistentCall::from_words(*theirs);
                Err(PersistentError::Mismatch { rank, theirs, ours })
            }
        }
    }
}

/// Ends when all members are ready for what comes of a persistent collective, or one is not.
pub(super) async fn all_ready(group: &Group, ready: bool) -> Result<(), PersistentError> {
    let all = group.all_gather(&[u8::from(ready)]).await?;
    if all.contains(&0) { Err(not_ready()) } else { Ok(()) }
}

fn not_ready() -> PersistentError {
    let fault = Fault::OutOfMemory("another member could not make its part of a persistent collective");
    CollectiveError::Fault(fault).into()
}
