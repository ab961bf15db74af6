//! What of the arena is committed: counted against the job's limit, and checked against what the system has left.
#![forbid(unsafe_code)]

use super::{Arena, COMMITTED, COUNTED, COUNTED_BITS, COUNTING, PENDING};
use crate::layout::PAGE;
use posthaste_core::memory::SharedSlice;
use posthaste_core::sync::lock;
use posthaste_core::{MemoryError, Rank};
use rustix::fs::{FallocateFlags, fallocate};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes that a rank may commit without a look at what the system has left, which takes some 50 µs.
const UNSEEN: u64 = 256 << 10;
/// Bytes that are left alone besides: for what the ranks allocate themselves.
const RESERVE: u64 = 8 << 20;
/// How often and how long a rank waits for commits of others that may or may not leave it enough: so often at once, and then
/// for this part of its time. Others may be stopped amid a commit, or lie.
const WAITS: u32 = 300;
const WAIT: Duration = Duration::from_millis(1);
const PART: u32 = 10;
/// Bytes that are taken from the system by one call: one that a signal interrupts may have to begin anew.
const AT_ONCE: u64 = 4 << 20;

/// Waits that are left; they come back with time.
#[derive(Debug)]
pub(super) struct Patience {
    waits: u32,
    /// Up to when they have come back.
    until: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { waits: WAITS, until: Duration::ZERO }
    }
}

impl Patience {
    /// One wait more, if any is left.
    fn take(&mut self, now: Duration) -> bool {
        let back = now.saturating_sub(self.until).as_nanos() / (WAIT * PART).as_nanos();
        if back > 0 {
            self.waits = self.waits.saturating_add(u32::try_from(back).unwrap_or(WAITS)).min(WAITS);
            self.until = now;
        }
        let left = self.waits.checked_sub(1);
        self.waits = left.unwrap_or(0);
        left.is_some()
    }
}

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
            let mut pending = self.claim(len)?;
            return self.allocate(offset, len, &mut [&mut pending]);
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
        let mut pending = self.claim(len)?;
        let mut counting = self.count(len)?;
        begin();
        let allocated = self.allocate(offset, len, &mut [&mut pending, &mut counting]);
        if allocated.is_err() && self.limit.is_some() {
            self.memory.atomic(COMMITTED).fetch_sub(len, Ordering::AcqRel);
        }
        allocated
    }

    /// Counts so many bytes against the limit, if they fit. There are never more than that, be it for a moment: others would be
    /// refused, and for good if this process ended then.
    ///
    /// Until the result is dropped the others know that nothing has been taken for it: if this process ends, it counts no more.
    fn count(&self, len: u64) -> Result<Option<Noted<'_>>, MemoryError> {
        let Some(limit) = self.limit else { return Ok(None) };
        let add = |used: u64| used.checked_add(len).filter(|sum| *sum <= limit);
        let counted = self.memory.atomic(COMMITTED).fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        counted.map_err(|used| MemoryError::JobLimit { wanted: len, limit, used })?;
        Ok(self.own.get().map(|entry| Noted::new(entry, COUNTING, len)))
    }

    /// Takes a range from the system. What was noted of it becomes less with each piece.
    pub(super) fn allocate(
        &self,
        offset: u64,
        len: u64,
        noted: &mut [&mut Option<Noted<'_>>],
    ) -> Result<(), MemoryError> {
        let mut taken = 0;
        while taken < len {
            let some = (len - taken).min(AT_ONCE);
            match fallocate(&self.fd, FallocateFlags::empty(), offset + taken, some) {
                Ok(()) => {
                    taken += some;
                    noted.iter_mut().filter_map(|noted| noted.as_mut()).for_each(|noted| noted.less(some));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let reason = std::io::Error::from(error).kind();
                    return Err(MemoryError::Refused { wanted: len, reason });
                }
            }
        }
        Ok(())
    }

    /// Checks that the system has so much left. All ranks see until the result is dropped that it is being taken: two
    /// that look at the same time would both find the last bytes, and the kernel's own answer is to kill.
    pub(super) fn claim(&self, len: u64) -> Result<Option<Noted<'_>>, MemoryError> {
        if self.unseen.fetch_add(len, Ordering::Relaxed) + len <= UNSEEN {
            return Ok(None);
        }
        // Until a look finds enough, every commit has to look.
        self.unseen.store(UNSEEN, Ordering::Relaxed);
        let reserve = RESERVE + UNSEEN * u64::from(self.layout.shape.ranks);
        loop {
            // In this order: what another rank took before the look is seen in one of the two.
            let pending = self.own.get().map(|entry| Noted::new(entry, PENDING, len));
            let others = self.pending().saturating_sub(pending.as_ref().map_or(0, |pending| pending.len));
            let headroom = self.sysdep.headroom();
            let host = headroom.host.saturating_sub(reserve);
            let cgroup = headroom.cgroup.map(|left| left.saturating_sub(reserve));
            let left = host.min(cgroup.unwrap_or(u64::MAX));
            if len.saturating_add(others) <= left {
                self.unseen.store(0, Ordering::Relaxed);
                return Ok(pending);
            }
            // Two that wait for each other would both wait in vain.
            drop(pending);
            // Part of what others are taking is counted twice until they have it, so that is no reason to refuse.
            if len <= left && lock(&self.patience).take(self.sysdep.now()) {
                std::thread::sleep(WAIT);
                continue;
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
        // Nobody commits more than there is of the arena.
        let pending = pending.filter(|bytes| *bytes <= self.layout.total());
        pending.fold(0, u64::saturating_add)
    }

    /// What a rank that has ended was about to commit, it will not.
    pub(crate) fn forget_pending(&self, rank: Rank) {
        let entry = self.entry(rank);
        entry.atomic(PENDING).store(0, Ordering::SeqCst);
        // Whoever finds it first.
        let counted = entry.atomic(COUNTING).swap(0, Ordering::AcqRel);
        if counted > 0 && self.limit.is_some() {
            let less = |used: u64| Some(used.saturating_sub(counted));
            let _ = self.memory.atomic(COMMITTED).fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        }
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

/// Bytes that a word of this rank's entry names, for so long.
pub(super) struct Noted<'a> {
    entry: &'a SharedSlice,
    word: usize,
    len: u64,
}

impl<'a> Noted<'a> {
    fn new(entry: &'a SharedSlice, word: usize, len: u64) -> Self {
        entry.atomic(word).fetch_add(len, Ordering::SeqCst);
        Self { entry, word, len }
    }

    fn less(&mut self, bytes: u64) {
        let bytes = bytes.min(self.len);
        self.len -= bytes;
        self.entry.atomic(self.word).fetch_sub(bytes, Ordering::SeqCst);
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        self.entry.atomic(self.word).fetch_sub(self.len, Ordering::SeqCst);
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

    /// A system that counts how often it is asked what it has left, and has a clock that is moved by hand.
    struct Counting {
        kernel: posthaste_core::LinuxSysdep,
        looks: std::sync::atomic::AtomicU64,
        seconds: std::sync::atomic::AtomicU64,
        /// Bytes that it has left, if that is not the kernel's to say.
        host: Option<u64>,
        /// Until then its clock goes on with each look at it, so that nobody runs out of patience.
        patient: std::sync::OnceLock<std::time::Instant>,
    }

    impl Counting {
        fn over(arena: Arena, host: Option<u64>) -> (Arena, std::sync::Arc<Counting>) {
            let kernel = posthaste_core::LinuxSysdep::new(arena.sysdep.personality().clone(), None);
            let (looks, seconds, patient) = (0.into(), 0.into(), std::sync::OnceLock::new());
            let system = std::sync::Arc::new(Counting { kernel, looks, seconds, host, patient });
            (Arena { sysdep: system.clone(), ..arena }, system)
        }
    }

    impl posthaste_core::Sysdep for Counting {
        fn headroom(&self) -> posthaste_core::sysdep::Headroom {
            self.looks.fetch_add(1, Ordering::Relaxed);
            match self.host {
                Some(host) => posthaste_core::sysdep::Headroom { host, cgroup: None },
                None => self.kernel.headroom(),
            }
        }
        fn now(&self) -> Duration {
            if self.patient.get().is_some_and(|until| std::time::Instant::now() < *until) {
                self.seconds.fetch_add(30, Ordering::Relaxed);
            }
            Duration::from_secs(self.seconds.load(Ordering::Relaxed))
        }
        fn personality(&self) -> &posthaste_core::Personality {
            self.kernel.personality()
        }
        fn cores(&self) -> usize {
            self.kernel.cores()
        }
        fn spawn(
            &self,
            name: &str,
            core: Option<usize>,
            main: posthaste_core::sysdep::ThreadMain,
        ) -> std::io::Result<()> {
            self.kernel.spawn(name, core, main)
        }
        fn yield_now(&self) {
            self.kernel.yield_now();
        }
        fn heavy_fence(&self) {
            self.kernel.heavy_fence();
        }
        fn fence_is_asymmetric(&self) -> bool {
            self.kernel.fence_is_asymmetric()
        }
        fn random(&self, bytes: &mut [u8]) {
            self.kernel.random(bytes);
        }
    }

    #[test]
    fn who_is_about_to_take_memory_for_ever_is_not_waited_for_by_each_commit() {
        let host = RESERVE + UNSEEN + (8 << 20);
        let (arena, system) = Counting::over(arena(), Some(host));
        let (at, _) = arena.layout.segment(ClientId(0), Rank(0));
        // What each of several commits looked at, with the sleeps between.
        let looks = || {
            [(); 3].map(|()| {
                let before = system.looks.load(Ordering::Relaxed);
                let refused = arena.commit(at, 2 * UNSEEN);
                let Err(MemoryError::Host { available, .. }) = refused else { panic!("{refused:?}") };
                assert!(available < UNSEEN, "{available}");
                system.looks.load(Ordering::Relaxed) - before
            })
        };
        let others = arena.entry(Rank(0));
        for _ in 0..2 {
            others.atomic(PENDING).store(8 << 20, Ordering::SeqCst);
            assert_eq!(looks(), [u64::from(WAITS) + 1, 1, 1]);
            // What fits meanwhile gives no new patience.
            others.atomic(PENDING).store(7 << 20, Ordering::SeqCst);
            assert_eq!(arena.commit(at, 2 * UNSEEN), Ok(()));
            others.atomic(PENDING).store(8 << 20, Ordering::SeqCst);
            assert_eq!(looks(), [1; 3]);
            // Time does.
            system.seconds.fetch_add(1, Ordering::Relaxed);
            assert_eq!(looks(), [u64::from(1000 / PART) + 1, 1, 1]);
            system.seconds.fetch_add(100, Ordering::Relaxed);
        }
        // More than there can be is nobody's.
        others.atomic(PENDING).store(u64::MAX / 2, Ordering::SeqCst);
        assert_eq!(arena.commit(at, 2 * UNSEEN), Ok(()));
    }

    #[test]
    fn two_that_commit_at_once_do_not_wait_for_each_other() {
        let both = std::sync::Barrier::new(2);
        let host = RESERVE + UNSEEN + (6 << 20);
        let (arena, system) = Counting::over(arena(), Some(host));
        arena.enter(Rank(0)).expect("nobody else has it");
        let (at, _) = arena.layout.segment(ClientId(0), Rank(0));
        // Whoever is amid its commit may be kept from its core for longer than anybody has patience.
        system.patient.set(std::time::Instant::now() + Duration::from_secs(40)).expect("once");
        // Either fits, and not both.
        let commit = |at| {
            both.wait();
            (0..20).try_for_each(|_| arena.commit(at, 4 << 20))
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| commit(at + (8 << 20)));
            assert_eq!((commit(at), other.join().expect("no panic")), (Ok(()), Ok(())));
        });
    }

    #[test]
    fn what_a_rank_counted_and_never_had_counts_no_more_when_it_has_ended() {
        let arena = Arena { limit: Some(64 << 20), ..arena() };
        arena.enter(Rank(0)).expect("nobody else has it");
        let used = || arena.memory.atomic(COMMITTED).load(Ordering::Relaxed);
        let before = used();
        let (at, _) = arena.layout.segment(ClientId(0), Rank(0));
        arena.commit(at, PAGE).expect("there is memory");
        arena.forget_pending(Rank(0));
        assert_eq!(used(), before + PAGE, "it has that");
        // It ends between the two.
        std::mem::forget(arena.count(5 * PAGE));
        assert_eq!(used(), before + 6 * PAGE);
        (0..2).for_each(|_| arena.forget_pending(Rank(0)));
        assert_eq!(used(), before + PAGE);
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
                    let refused = arena.count(2 * PAGE).map(drop);
                    assert!(matches!(refused, Err(MemoryError::JobLimit { .. })), "{refused:?}");
                }
            });
            let all = (0..1_000_000).try_for_each(|_| {
                drop(arena.count(PAGE)?);
                used.fetch_sub(PAGE, Ordering::AcqRel);
                Ok::<(), MemoryError>(())
            });
            ends.store(true, Ordering::Relaxed);
            assert_eq!(all, Ok(()));
        });
    }
}
