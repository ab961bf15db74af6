//! The arena: one sparse memfd per host and job, mapped once by everyone.
#![allow(unsafe_code)]

use crate::layout::{Layout, MAGIC, PAGE, RANK_BYTES};
use memmap2::MmapOptions;
use posthaste_core::memory::{HUGE_PAGE, SharedSlice};
use posthaste_core::{ClientId, DeviceError, MemoryError, Rank, Sysdep};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

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
const PENDING: usize = 40;

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

/// Bytes that a rank may commit without a look at what the system has left, which takes some 50 µs.
const UNSEEN: u64 = 256 << 10;
/// Bytes that are left alone besides: for what the ranks allocate themselves.
const RESERVE: u64 = 8 << 20;
/// How often and how long a rank waits for commits of others that may or may not leave it enough.
const WAITS: u32 = 300;
const WAIT: Duration = Duration::from_millis(1);

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
        let (unseen, own) = (AtomicU64::new(0), OnceLock::new());
        let arena = Arena { fd, memory, layout, limit, sysdep, unseen, own };
        // What counts lies in the first page: it is there before that is looked at.
        let first = arena.claim(PAGE)?;
        arena.allocate(0, PAGE)?;
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

    /// Commits a range that others commit as well, as [`commit`](Self::commit) does; it counts once, whoever does it, and as often
    /// as it is done.
    ///
    /// # Errors
    /// As for `commit`.
    pub fn commit_common(&self, offset: u64, len: u64) -> Result<(), MemoryError> {
        let (Some(word), bit) = counted(offset) else { return self.commit(offset, len) };
        let word = self.memory.atomic(word);
        // The bit first: it is never counted twice, be it for a moment, in which another commit would be refused.
        if word.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            let _pending = self.claim(len)?;
            return self.allocate(offset, len);
        }
        let committed = self.commit(offset, len);
        if committed.is_err() {
            word.fetch_and(!bit, Ordering::AcqRel);
        }
        committed
    }

    /// Commits a range before it is touched: after a check against every limit, so that our own size never ends
    /// in a SIGBUS or at the hands of the OOM killer. Committing twice does no harm, but that it counts twice.
    ///
    /// # Errors
    /// The limit that was met. Nothing has been touched then.
    pub fn commit(&self, offset: u64, len: u64) -> Result<(), MemoryError> {
        self.commit_with(offset, len, || {})
    }

    /// Commits a range as [`commit`](Self::commit) does that nobody has committed before or since it was given back; in huge
    /// pages as far as there are any.
    ///
    /// # Errors
    /// As for `commit`.
    pub fn commit_fresh(&self, offset: u64, len: u64) -> Result<(), MemoryError> {
        let settle = || self.part((offset, len)).settle_in_huge_pages();
        let committed = self.commit_with(offset, len, settle);
        if let Err(MemoryError::Refused { .. }) = committed
            && let Err(error) = self.punch(offset, len)
        {
            tracing::debug!(%error, "huge pages of a range that was refused stay taken");
        }
        committed
    }

    /// Commits a range, of which `begin` may have committed some, after the checks.
    fn commit_with(&self, offset: u64, len: u64, begin: impl FnOnce()) -> Result<(), MemoryError> {
        let _pending = self.claim(len)?;
        self.count(len)?;
        begin();
        let allocated = self.allocate(offset, len);
        if allocated.is_err() && self.limit.is_some() {
            self.memory.atomic(COMMITTED).fetch_sub(len, Ordering::AcqRel);
        }
        allocated
    }

    /// Counts so many bytes against the limit, if they fit. There are never more than that, be it for a moment: others would be
    /// refused, and for good if this process ended then.
    fn count(&self, len: u64) -> Result<(), MemoryError> {
        let Some(limit) = self.limit else { return Ok(()) };
        let add = |used: u64| used.checked_add(len).filter(|sum| *sum <= limit);
        let counted = self.memory.atomic(COMMITTED).fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        counted.map(|_| ()).map_err(|used| MemoryError::JobLimit { wanted: len, limit, used })
    }

    fn allocate(&self, offset: u64, len: u64) -> Result<(), MemoryError> {
        loop {
            match fallocate(&self.fd, FallocateFlags::empty(), offset, len) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let reason = std::io::Error::from(error).kind();
                    return Err(MemoryError::Refused { wanted: len, reason });
                }
            }
        }
    }

    /// Checks that the system has so much left. All ranks see until the result is dropped that it is being taken: two
    /// that look at the same time would both find the last bytes, and the kernel's own answer is to kill.
    fn claim(&self, len: u64) -> Result<Option<Pending<'_>>, MemoryError> {
        if self.unseen.fetch_add(len, Ordering::Relaxed) + len <= UNSEEN {
            return Ok(None);
        }
        // Until a look finds enough, every commit has to look.
        self.unseen.store(UNSEEN, Ordering::Relaxed);
        let pending = self.own.get().map(|entry| Pending::new(entry, len));
        let reserve = RESERVE + UNSEEN * u64::from(self.layout.shape.ranks);
        let mut waits = 0;
        loop {
            // In this order: what another rank took before the look is seen in one of the two.
            let others = self.pending().saturating_sub(pending.as_ref().map_or(0, |pending| pending.len));
            let headroom = self.sysdep.headroom();
            let host = headroom.host.saturating_sub(reserve);
            let cgroup = headroom.cgroup.map(|left| left.saturating_sub(reserve));
            let left = host.min(cgroup.unwrap_or(u64::MAX));
            if len.saturating_add(others) <= left {
                self.unseen.store(0, Ordering::Relaxed);
                return Ok(pending);
            }
            // Part of what others are taking is counted twice until they have it, so that is no reason to refuse.
            if len <= left && waits < WAITS {
                waits += 1;
                std::thread::sleep(WAIT);
                continue;
            }
            return Err(match cgroup {
                Some(left) if left < host => MemoryError::Cgroup { wanted: len, left },
                _ => MemoryError::Host { wanted: len, available: host },
            });
        }
    }

    /// What all ranks together are about to commit.
    fn pending(&self) -> u64 {
        let ranks = (0..self.layout.shape.ranks).map(Rank);
        let pending = ranks.map(|rank| self.entry(rank).atomic(PENDING).load(Ordering::SeqCst));
        pending.fold(0, u64::saturating_add)
    }

    /// What a rank that has ended was about to commit, it will not.
    pub(crate) fn forget_pending(&self, rank: Rank) {
        self.entry(rank).atomic(PENDING).store(0, Ordering::SeqCst);
    }

    /// Gives the memory of a range back to the kernel; it reads as zero afterwards and has to be committed again.
    pub fn decommit(&self, offset: u64, len: u64) {
        if self.punch(offset, len).is_err() {
            // Where holes cannot be punched the memory stays and must read as zero all the same.
            let part = self.part((offset, len));
            for at in (0..len as usize).step_by(8) {
                part.write_u64(at, 0);
            }
        }
        if self.limit.is_some() {
            self.memory.atomic(COMMITTED).fetch_sub(len, Ordering::AcqRel);
        }
    }

    fn punch(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
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
                problem: format!("rank {rank} was already claimed by process {other}"),
            });
        }
        let this = Process::this();
        entry.write_u64(STARTED, this.started);
        entry.write_u64(PID_NAMESPACE, this.pid_namespace);
        entry.write_u64(TIME_NAMESPACE, this.time_namespace);
        entry.write_u64(PENDING, 0);
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

/// Bytes that this rank is about to commit.
struct Pending<'a> {
    entry: &'a SharedSlice,
    len: u64,
}

impl<'a> Pending<'a> {
    fn new(entry: &'a SharedSlice, len: u64) -> Self {
        entry.atomic(PENDING).fetch_add(len, Ordering::SeqCst);
        Self { entry, len }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.entry.atomic(PENDING).fetch_sub(self.len, Ordering::SeqCst);
    }
}

/// A process as its rank's entry names it. A number alone names one process in one namespace and at one time only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    id: u32,
    /// In clock ticks since boot, as the process itself sees it; 0 if unknown, as are the namespaces.
    started: u64,
    pid_namespace: u64,
    time_namespace: u64,
}

/// What can be known of another process.
#[derive(Debug)]
pub(crate) enum Life {
    /// It has not ended; the descriptor becomes readable when it does.
    Watched(OwnedFd),
    /// It has ended.
    Ended,
    /// It cannot be told here.
    Unknown,
}

impl Process {
    fn this() -> Process {
        let (pid_namespace, time_namespace) = namespaces();
        let started = start_time(std::process::id()).unwrap_or(0);
        Process { id: std::process::id(), started, pid_namespace, time_namespace }
    }

    /// Looks at the process, from another one. A process that nobody has waited for has ended all the same.
    pub(crate) fn look(&self) -> Life {
        // In another namespace the number belongs to somebody else or to nobody.
        let (pid_namespace, time_namespace) = namespaces();
        if self.pid_namespace == 0 || self.pid_namespace != pid_namespace {
            return Life::Unknown;
        }
        let Some(pid) = i32::try_from(self.id).ok().and_then(rustix::process::Pid::from_raw) else {
            return Life::Unknown;
        };
        let pidfd = match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Life::Ended,
            Err(error) => {
                tracing::debug!(%pid, %error, "no pidfd");
                return Life::Unknown;
            }
        };
        // Clocks since boot can be compared within one time namespace only.
        let comparable = self.started != 0 && self.time_namespace == time_namespace;
        match start_time(self.id) {
            Some(seen) if comparable && seen != self.started => Life::Ended,
            _ => Life::Watched(pidfd),
        }
    }
}

/// When a process started, in clock ticks since boot; `None` if there is no such process.
fn start_time(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program stands in parentheses and may hold anything; fields are counted behind it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The namespaces of this process for process numbers and for clocks; 0 where one cannot be had.
fn namespaces() -> (u64, u64) {
    static OWN: OnceLock<(u64, u64)> = OnceLock::new();
    let inode = |path: &str| rustix::fs::stat(path).map_or(0, |stat| stat.st_ino);
    *OWN.get_or_init(|| (inode("/proc/self/ns/pid"), inode("/proc/self/ns/time")))
}

/// Where in the header page it says that what begins at this offset counts as committed: a word, if it has one, and its bit.
fn counted(offset: u64) -> (Option<usize>, u64) {
    let at = offset / PAGE;
    let word = (at < COUNTED_BITS).then_some(COUNTED + (at / 64 * 8) as usize);
    (word, 1 << (at % 64))
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::layout::Sizes;
    use posthaste_core::{ClientId, JobShape, LinuxSysdep, Personality};
    use rustix::fs::MemfdFlags;
    use std::process::{Command, Stdio};

    const HUGE: u64 = HUGE_PAGE;

    fn arena() -> Arena {
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let sizes = Sizes { lane: 1024, pool: HUGE, segment: 64 << 20 };
        let layout = Layout::new(shape, sizes).expect("a layout");
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&fd, layout.total()).expect("its size");
        let sysdep = Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None));
        Arena::map(fd, layout, None, sysdep).expect("an arena")
    }

    fn bytes_of(arena: &Arena) -> u64 {
        rustix::fs::fstat(&arena.fd).expect("a file").st_blocks as u64 * 512
    }

    /// Bytes of a mapping that this process reaches by entries for huge pages.
    fn huge_bytes(part: &SharedSlice) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("its mappings");
        let at = part.as_ptr() as usize;
        let mut inside = false;
        let mut kib = 0;
        for line in smaps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            if let Some((first, end)) = range
                && let (Ok(first), Ok(end)) =
                    (usize::from_str_radix(first, 16), usize::from_str_radix(end, 16))
            {
                inside = (first..end).contains(&at);
            } else if inside && let Some(rest) = line.strip_prefix("ShmemPmdMapped:") {
                kib += rest.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
            }
        }
        kib << 10
    }

    /// Whether this kernel can make huge pages of memory of files that are not on a disk.
    fn makes_huge_pages() -> bool {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        version >= (6, 1) && setting.is_ok_and(|setting| !setting.contains("[deny]"))
    }

    #[test]
    fn long_ranges_lie_in_huge_pages_and_all_of_them_goes_back() {
        let arena = arena();
        let (segment, _) = arena.layout.segment(ClientId(0), Rank(0));
        assert!(segment.is_multiple_of(HUGE), "the pools before it have been laid out so");
        let before = bytes_of(&arena);
        // It begins and ends within a huge page.
        let (at, len) = (segment + HUGE - PAGE, 16 * HUGE + 2 * PAGE);
        for round in 0..2 {
            arena.commit_fresh(at, len).expect("there is memory");
            assert_eq!(bytes_of(&arena) - before, len, "no more is taken than was asked for");
            let part = arena.part((at, len));
            for word in (0..len as usize).step_by(PAGE as usize) {
                assert_eq!(part.read_u64(word), 0, "round {round}");
                part.write_u64(word, u64::MAX);
            }
            if makes_huge_pages() {
                assert!(huge_bytes(&part) >= HUGE, "not one of 16");
            } else {
                eprintln!("skipped in part: this kernel makes no huge pages of shared memory");
            }
            arena.decommit(at, len);
            assert_eq!(bytes_of(&arena), before);
        }
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

    #[test]
    fn what_all_commit_counts_once() {
        let arena = Arena { limit: Some(64 << 20), ..arena() };
        let used = || arena.memory.atomic(COMMITTED).load(Ordering::Relaxed);
        let block = arena
            .layout
            .block(ClientId(0), posthaste_core::Endpoint::new(Rank(0), posthaste_core::ContextId(0)));
        for (offset, len) in [block, (block.0 + 64 * PAGE, PAGE), (block.0 + 65 * PAGE, 2 * PAGE)] {
            let before = used();
            for _ in 0..3 {
                arena.commit_common(offset, len).expect("there is memory");
                assert_eq!(used() - before, len);
            }
        }
        let before = used();
        for (at, len) in [(0, PAGE), arena.layout.rank_table(), arena.layout.clients_left()] {
            arena.commit_common(at, len).expect("there is memory");
        }
        assert_eq!(used(), before, "they were counted when the arena was mapped");
    }

    #[test]
    fn what_several_commit_at_once_needs_to_fit_once_only() {
        let mut arena = Arena { limit: Some(u64::MAX), ..arena() };
        let (first, _) = arena.layout.segment(ClientId(0), Rank(0));
        for offset in (0..4000).map(|page| first + page * PAGE) {
            arena.limit = Some(arena.memory.atomic(COMMITTED).load(Ordering::Relaxed) + PAGE);
            let (arena, start) = (&arena, &std::sync::Barrier::new(2));
            let commit = || {
                start.wait();
                arena.commit_common(offset, PAGE)
            };
            std::thread::scope(|scope| {
                let other = scope.spawn(commit);
                assert_eq!((commit(), other.join().expect("no panic")), (Ok(()), Ok(())));
            });
            let full = arena.commit_common(first + 4000 * PAGE, PAGE);
            assert!(matches!(full, Err(MemoryError::JobLimit { .. })), "{full:?}");
        }
        arena.limit = None;
        let (word, bit) = counted(first + 4000 * PAGE);
        let counts = arena.memory.atomic(word.expect("it is among those that are counted once"));
        assert_eq!(counts.load(Ordering::Relaxed) & bit, 0, "what was refused is not counted");
    }

    #[test]
    fn what_is_refused_has_nothing_else_refused() {
        let arena = Arena { limit: Some(PAGE), ..arena() };
        let used = arena.memory.atomic(COMMITTED);
        let ends = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let refused = arena.count(2 * PAGE);
                    assert!(matches!(refused, Err(MemoryError::JobLimit { .. })), "{refused:?}");
                }
            });
            let all = (0..1_000_000).try_for_each(|_| {
                arena.count(PAGE)?;
                used.fetch_sub(PAGE, Ordering::AcqRel);
                Ok::<(), MemoryError>(())
            });
            ends.store(true, Ordering::Relaxed);
            assert_eq!(all, Ok(()));
        });
    }

    #[test]
    fn a_number_is_a_process_only_at_its_time_and_in_its_namespace() {
        let mut child = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().expect("sleep");
        let this = Process::this();
        let started = start_time(child.id()).expect("a running process");
        let process = Process { id: child.id(), started, ..this };
        assert!(matches!(process.look(), Life::Watched(_)));
        // A later process has taken over the number.
        let other = Process { started: started - 1, ..process };
        assert!(matches!(other.look(), Life::Ended));
        let elsewhere = Process { pid_namespace: this.pid_namespace + 1, ..other };
        assert!(matches!(elsewhere.look(), Life::Unknown));
        // Its clock runs apart, so the start says nothing.
        let apart = Process { time_namespace: this.time_namespace + 1, ..other };
        assert!(matches!(apart.look(), Life::Watched(_)));
        child.kill().expect("kill");
        let zombie = process.look();
        assert!(matches!(zombie, Life::Watched(_)), "its descriptor is readable: {zombie:?}");
        child.wait().expect("wait");
        assert!(matches!(process.look(), Life::Ended));
    }
}
