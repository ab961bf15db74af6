//! The arena: one sparse memfd per host and job, mapped once by everyone.
#![allow(unsafe_code)]

mod commit;
mod process;

pub(crate) use process::{Life, Process};

use crate::layout::{Layout, MAGIC, PAGE, RANK_BYTES};
use commit::Patience;
use memmap2::MmapOptions;
use posthaste_core::memory::{HUGE_PAGE, SharedSlice};
use posthaste_core::sync::Mutex;
use posthaste_core::{ClientId, DeviceError, Rank, Sysdep};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What a rank's entry in the table says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Not started, or still starting.
    Absent,
    /// In the job.
    Joined,
    /// Left in order.
    Left,
}

/// The mapped arena. It stays mapped until the process ends (V05).
pub struct Arena {
    fd: OwnedFd,
    memory: SharedSlice,
    layout: Layout,
    limit: Option<u64>,
    sysdep: Arc<dyn Sysdep>,
    /// Bytes committed since the last look at what the system has left.
    unseen: AtomicU64,
    /// How much longer commits may wait for those of others.
    patience: Mutex<Patience>,
    /// This rank's entry, once it has one.
    own: OnceLock<SharedSlice>,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena")
            .field("layout", &self.layout)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// Offsets of the words in the header page, in bytes.
const FINGERPRINT: usize = 8;
const FENCES: usize = 16;
/// How often a client of any rank has left.
const LEAVES: usize = 24;
const COMMITTED: usize = 64;
/// From here to its end: a bit for each of the first pages of the arena at which something begins that several ranks commit,
/// set once that counts as committed.
const COUNTED: usize = 128;
const COUNTED_BITS: u64 = (PAGE - COUNTED as u64) * 8;
/// Offsets of the words in a rank's entry, in bytes.
const PRESENCE: usize = 0;
const PROCESS: usize = 8;
const STARTED: usize = 16;
const PID_NAMESPACE: usize = 24;
const TIME_NAMESPACE: usize = 32;
/// Bytes that the rank is about to commit.
const PENDING: usize = 40;
/// Bytes that it has counted as committed and does not have yet.
const COUNTING: usize = 48;

/// Who fences between what a sender writes and its look at whether the receiver sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fences {
    /// Whoever falls asleep, on behalf of the senders.
    Sleepers,
    /// Both.
    Both,
    /// The others leave it to whoever falls asleep, which this process cannot do: it must look by itself now and then.
    NotThisSleeper,
}

impl Arena {
    /// Maps the arena and checks that it is that of this job.
    ///
    /// # Errors
    /// If the kernel refuses, or the arena was laid out by somebody with other settings.
    pub fn map(
        fd: OwnedFd,
        layout: Layout,
        limit: Option<u64>,
        sysdep: Arc<dyn Sysdep>,
    ) -> Result<Arena, DeviceError> {
        let os = |what: &'static str| move |source: std::io::Error| DeviceError::Os { what, source };
        let stat = rustix::fs::fstat(&fd).map_err(|e| os("cannot look at the arena")(e.into()))?;
        if (stat.st_size as u64) < layout.total() {
            return Err(DeviceError::Mismatch {
                subject: "the arena",
                problem: format!(
                    "it has {} bytes and this job needs {}: all ranks and the launcher must have the same POSTHASTE_ settings",
                    stat.st_size,
                    layout.total()
                ),
            });
        }
        let len = usize::try_from(layout.total()).map_err(|_| DeviceError::Mismatch {
            subject: "the arena",
            problem: "it is larger than the address space: lower POSTHASTE_SEGMENT".into(),
        })?;
        let base = map_where_huge_pages_begin(&fd, len).map_err(os(
            "cannot map the arena (lower POSTHASTE_SEGMENT for all ranks, or raise what limits the addresses of a process: ulimit -v)",
        ))?;
        // A forked child must not keep the memory of a dead rank reachable, and a core dump must not be terabytes.
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: the whole mapping, which was just made; neither advice changes what is stored there.
            unsafe { madvise(base.cast(), len, advice) }
                .map_err(|e| os("cannot advise the kernel on the arena")(e.into()))?;
        }
        // Kept mapped for ever: leases and windows point into it from anywhere.
        // SAFETY: the mapping is writable, `len` bytes long and never unmapped; it is reached through this slice only.
        let memory = unsafe { SharedSlice::from_raw(base, len) };
        let (unseen, patience, own) = (AtomicU64::new(0), Mutex::new(Patience::default()), OnceLock::new());
        let arena = Arena { fd, memory, layout, limit, sysdep, unseen, patience, own };
        // What counts lies in the first page: it is there before that is looked at.
        let mut first = arena.claim(PAGE)?;
        arena.allocate(0, PAGE, &mut [&mut first])?;
        drop(first);
        for (table, len) in [(0, PAGE), layout.rank_table(), layout.clients_left()] {
            arena.commit_common(table, len)?;
        }
        arena.greet()?;
        Ok(arena)
    }

    fn greet(&self) -> Result<(), DeviceError> {
        let mine = [MAGIC, self.layout.fingerprint()];
        for (offset, value) in [(0, mine[0]), (FINGERPRINT, mine[1])] {
            let word = self.memory.atomic(offset);
            if let Err(seen) = word.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire)
                && seen != value
            {
                return Err(DeviceError::Mismatch {
                    subject: "the arena",
                    problem: "another rank laid it out differently: all ranks must have the same POSTHASTE_ settings and version"
                        .into(),
                });
            }
        }
        Ok(())
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A part of the arena, as the layout names it.
    ///
    /// # Panics
    /// If the part is not inside, which no part of the layout is.
    #[must_use]
    pub fn part(&self, (offset, len): (u64, u64)) -> SharedSlice {
        match self.memory.slice(offset, len) {
            Some(slice) => slice,
            None => panic!("part {offset}+{len} is outside the arena"),
        }
    }

    fn entry(&self, rank: Rank) -> SharedSlice {
        self.part((self.layout.rank(rank).0, RANK_BYTES))
    }

    /// Agrees with the other ranks on who fences before a look at whether somebody sleeps; whoever comes first decides.
    /// `asymmetric`: whether this process can fence on behalf of the others when it falls asleep.
    pub(crate) fn agree_on_fences(&self, asymmetric: bool) -> Fences {
        const LIGHT: u64 = 1;
        const FULL: u64 = 2;
        let mine = if asymmetric { LIGHT } else { FULL };
        let agreed = self.memory.atomic(FENCES).compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst);
        match (asymmetric, agreed) {
            (true, Ok(_) | Err(LIGHT)) => Fences::Sleepers,
            (true, Err(_)) | (false, Ok(_) | Err(FULL)) => Fences::Both,
            (false, Err(_)) => Fences::NotThisSleeper,
        }
    }

    /// Enters this process into the table.
    ///
    /// # Errors
    /// If another living process has entered itself under the rank.
    pub fn enter(&self, rank: Rank) -> Result<(), DeviceError> {
        let entry = self.entry(rank);
        let process = u64::from(std::process::id());
        if let Err(other) =
            entry.atomic(PROCESS).compare_exchange(0, process, Ordering::AcqRel, Ordering::Acquire)
            && other != process
        {
            return Err(DeviceError::Mismatch {
                subject: "the rank table",
                problem: format!(
                    "rank {rank} was already claimed by process {other}: a job has one program for each rank, so start the next \
                     program as a job of its own"
                ),
            });
        }
        let this = Process::this();
        entry.write_u64(STARTED, this.started);
        entry.write_u64(PID_NAMESPACE, this.pid_namespace);
        entry.write_u64(TIME_NAMESPACE, this.time_namespace);
        entry.write_u64(PENDING, 0);
        entry.write_u64(COUNTING, 0);
        // A process enters one rank, once.
        let _ = self.own.set(entry);
        // Release: whoever sees the rank joined sees its process.
        entry.atomic(PRESENCE).store(1, Ordering::Release);
        Ok(())
    }

    /// Notes that a client of a rank has left in order, though the process may live on.
    pub(crate) fn client_leaves(&self, rank: Rank, client: ClientId) {
        let (word, bit) = self.layout.client_left(rank, client);
        self.memory.atomic(word as usize).fetch_or(bit, Ordering::Relaxed);
        // Release pairs with the acquire in `leaves`: whoever sees the count sees the bit, and in the lanes what the client sent.
        self.memory.atomic(LEAVES).fetch_add(1, Ordering::Release);
    }

    /// How often a client of any rank has left.
    #[inline]
    pub(crate) fn leaves(&self) -> u64 {
        self.memory.atomic(LEAVES).load(Ordering::Acquire)
    }

    /// Whether a client of a rank has left in order.
    pub(crate) fn has_left(&self, rank: Rank, client: ClientId) -> bool {
        let (word, bit) = self.layout.client_left(rank, client);
        self.memory.atomic(word as usize).load(Ordering::Relaxed) & bit != 0
    }

    /// Notes that this rank has left in order.
    pub fn leave(&self, rank: Rank) {
        self.entry(rank).atomic(PRESENCE).store(2, Ordering::SeqCst);
    }

    /// Notes that this rank is in the job again, if it had left: another of its clients has been opened.
    pub fn stays(&self, rank: Rank) {
        let _was_there =
            self.entry(rank).atomic(PRESENCE).compare_exchange(2, 1, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// What the table says of a rank.
    #[must_use]
    pub fn presence(&self, rank: Rank) -> Presence {
        match self.entry(rank).atomic(PRESENCE).load(Ordering::Acquire) {
            1 => Presence::Joined,
            2 => Presence::Left,
            _ => Presence::Absent,
        }
    }

    /// The process of a rank that has joined, whether or not it still runs.
    #[must_use]
    pub(crate) fn process(&self, rank: Rank) -> Option<Process> {
        if self.presence(rank) == Presence::Absent {
            return None;
        }
        let entry = self.entry(rank);
        Some(Process {
            id: u32::try_from(entry.read_u64(PROCESS)).ok()?,
            started: entry.read_u64(STARTED),
            pid_namespace: entry.read_u64(PID_NAMESPACE),
            time_namespace: entry.read_u64(TIME_NAMESPACE),
        })
    }
}

/// Maps all of the file for the rest of the process, so that huge pages begin at the same places in both.
fn map_where_huge_pages_begin(fd: &OwnedFd, len: usize) -> std::io::Result<*mut u8> {
    let huge = HUGE_PAGE as usize;
    let room = len.checked_add(huge).ok_or(std::io::ErrorKind::OutOfMemory)?;
    // Addresses that nobody else gets meanwhile; those that are not used are given back below, or with it. They are of the
    // file, beyond whose end nobody looks: memory of this process alone would count against what it, or the system, may have.
    let reserved = MmapOptions::new().len(room).map_raw(fd)?;
    let all = reserved.as_mut_ptr();
    let before = all.align_offset(huge);
    // SAFETY: it replaces a part of the mapping above, which nobody uses and which has room: `before` is less than a huge page.
    let base = unsafe {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        mmap(all.add(before).cast(), len, ProtFlags::READ | ProtFlags::WRITE, flags, fd, 0)?
    };
    std::mem::forget(reserved);
    let end = (before + len).next_multiple_of(rustix::param::page_size());
    for (at, len) in [(0, before), (end, room.saturating_sub(end))] {
        if len > 0 {
            // SAFETY: a part of the mapping above that was not replaced.
            let given = unsafe { munmap(all.add(at).cast(), len) };
            given.unwrap_or_else(|error| tracing::debug!(%error, "addresses stay reserved"));
        }
    }
    Ok(base.cast())
}

#[cfg(all(test, not(posthaste_loom)))]
pub(crate) mod tests {
    use super::*;
    use crate::layout::Sizes;
    use posthaste_core::{JobShape, LinuxSysdep, Personality};
    use rustix::fs::MemfdFlags;

    pub(crate) fn arena() -> Arena {
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let sizes = Sizes { lane: 1024, pool: HUGE_PAGE, segment: 64 << 20 };
        let layout = Layout::new(shape, sizes).expect("a layout");
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&fd, layout.total()).expect("its size");
        let sysdep = Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None));
        Arena::map(fd, layout, None, sysdep).expect("an arena")
    }

    #[test]
    fn who_comes_first_decides_who_fences() {
        use Fences::{Both, NotThisSleeper, Sleepers};
        let first = arena();
        let agreed = [true, false, true].map(|asymmetric| first.agree_on_fences(asymmetric));
        assert_eq!(agreed, [Sleepers, NotThisSleeper, Sleepers]);
        let first = arena();
        let agreed = [false, true, false].map(|asymmetric| first.agree_on_fences(asymmetric));
        assert_eq!(agreed, [Both; 3]);
        // What a corrupt peer may have written there.
        first.memory.atomic(FENCES).store(7, Ordering::SeqCst);
        let agreed = [true, false].map(|asymmetric| first.agree_on_fences(asymmetric));
        assert_eq!(agreed, [Both, NotThisSleeper]);
    }
}
