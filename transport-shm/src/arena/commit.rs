//! What of the arena is committed: counted against the job's limit, and checked against what the system has left.
#![forbid(unsafe_code)]

use super::{Arena, COMMITTED, COUNTED, COUNTED_BITS, PENDING};
use crate::layout::PAGE;
use posthaste_core::memory::SharedSlice;
use posthaste_core::{MemoryError, Rank};
use rustix::fs::{FallocateFlags, fallocate};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes that a rank may commit without a look at what the system has left, which takes some 50 µs.
const UNSEEN: u64 = 256 << 10;
/// Bytes that are left alone besides: for what the ranks allocate themselves.
const RESERVE: u64 = 8 << 20;
/// How often and how long a rank waits for commits of others that may or may not leave it enough.
const WAITS: u32 = 300;
const WAIT: Duration = Duration::from_millis(1);

impl Arena {
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

    pub(super) fn allocate(&self, offset: u64, len: u64) -> Result<(), MemoryError> {
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
    pub(super) fn claim(&self, len: u64) -> Result<Option<Pending<'_>>, MemoryError> {
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
                self.vain.store(false, Ordering::Relaxed);
                return Ok(pending);
            }
            // Part of what others are taking is counted twice until they have it, so that is no reason to refuse. But a
            // rank that is stopped, or lies, says so for ever: it is waited for once, not by each commit.
            if len <= left && waits < WAITS && !self.vain.load(Ordering::Relaxed) {
                waits += 1;
                std::thread::sleep(WAIT);
                continue;
            }
            if waits == WAITS {
                self.vain.store(true, Ordering::Relaxed);
            }
            return Err(match cgroup {
                Some(left) if left < host => {
                    MemoryError::Cgroup { wanted: len, left: left.saturating_sub(others) }
                }
                _ => MemoryError::Host { wanted: len, available: host.saturating_sub(others) },
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
}

/// Bytes that this rank is about to commit.
pub(super) struct Pending<'a> {
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

/// Where in the header page it says that what begins at this offset counts as committed: a word, if it has one, and its bit.
fn counted(offset: u64) -> (Option<usize>, u64) {
    let at = offset / PAGE;
    let word = (at < COUNTED_BITS).then_some(COUNTED + (at / 64 * 8) as usize);
    (word, 1 << (at % 64))
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::super::tests::arena;
    use super::*;
    use posthaste_core::ClientId;
    use posthaste_core::memory::HUGE_PAGE;

    const HUGE: u64 = HUGE_PAGE;

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

    /// A system that counts how often it is asked what it has left.
    struct Counting(posthaste_core::LinuxSysdep, std::sync::atomic::AtomicU64);

    impl posthaste_core::Sysdep for Counting {
        fn headroom(&self) -> posthaste_core::sysdep::Headroom {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.headroom()
        }
        fn now(&self) -> Duration {
            self.0.now()
        }
        fn personality(&self) -> &posthaste_core::Personality {
            self.0.personality()
        }
        fn cores(&self) -> usize {
            self.0.cores()
        }
        fn spawn(
            &self,
            name: &str,
            core: Option<usize>,
            main: posthaste_core::sysdep::ThreadMain,
        ) -> std::io::Result<()> {
            self.0.spawn(name, core, main)
        }
        fn yield_now(&self) {
            self.0.yield_now();
        }
        fn heavy_fence(&self) {
            self.0.heavy_fence();
        }
        fn fence_is_asymmetric(&self) -> bool {
            self.0.fence_is_asymmetric()
        }
        fn random(&self, bytes: &mut [u8]) {
            self.0.random(bytes);
        }
    }

    #[test]
    fn who_is_about_to_take_memory_for_ever_is_waited_for_once() {
        let arena = arena();
        let kernel = posthaste_core::LinuxSysdep::new(arena.sysdep.personality().clone(), None);
        let system = std::sync::Arc::new(Counting(kernel, 0.into()));
        let arena = Arena { sysdep: system.clone(), ..arena };
        let (at, _) = arena.layout.segment(ClientId(0), Rank(0));
        // What each of several commits looked at, with the sleeps between.
        let looks = || {
            [(); 3].map(|()| {
                let before = system.1.load(Ordering::Relaxed);
                let refused = arena.commit(at, 2 * UNSEEN);
                let Err(MemoryError::Host { available: 0, .. } | MemoryError::Cgroup { left: 0, .. }) =
                    refused
                else {
                    panic!("{refused:?}")
                };
                system.1.load(Ordering::Relaxed) - before
            })
        };
        let others = arena.entry(Rank(0));
        for _ in 0..2 {
            others.atomic(PENDING).store(u64::MAX / 2, Ordering::SeqCst);
            assert_eq!(looks(), [u64::from(WAITS) + 1, 1, 1]);
            arena.forget_pending(Rank(0));
            assert_eq!(arena.commit(at, 2 * UNSEEN), Ok(()), "nobody takes anything");
        }
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
}
