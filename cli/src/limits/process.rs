//! The second process of a limit, the memory the two share and the clock they agree on.

use super::LimitError;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getppid, kill_process, set_parent_process_death_signal,
    waitid, waitpid,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

// SAFETY: both are in every C library Rust's standard library links on Linux, with these signatures.
unsafe extern "C" {
    fn fork() -> i32;
    #[link_name = "madvise"]
    fn advise(address: *mut u8, len: usize, advice: i32) -> i32;
    fn _exit(status: i32) -> !;
}

/// How many polls a spin loop makes between two looks at the clock and at the other process.
const SPINS_PER_CHECK: u32 = 1 << 16;

/// Nanoseconds of `CLOCK_MONOTONIC`, which is the same in every process.
#[inline]
pub(super) fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// A zeroed anonymous mapping, unmapped when dropped.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Memory that a process forked later has in common with this one, in huge pages where the kernel has some. Every page
    /// is touched.
    pub(super) fn shared(len: usize) -> Result<Self, LimitError> {
        let mapping = Self::map(len, MapFlags::SHARED)?;
        if mapping.len >= HUGE {
            // SAFETY: the whole mapping, and the advice changes no contents. A kernel that cannot refuses, which only costs
            // speed.
            let _ = unsafe { advise(mapping.base.as_ptr(), mapping.len, COLLAPSE) };
        }
        Ok(mapping)
    }

    /// Memory of this process alone, in huge pages where the kernel gives them. Every page is touched.
    pub(super) fn private(len: usize) -> Result<Self, LimitError> {
        Self::map(len, MapFlags::PRIVATE)
    }

    fn map(len: usize, flags: MapFlags) -> Result<Self, LimitError> {
        // Whole 2 MiB pages for anything big, so that huge pages are possible at all.
        let len = if len >= HUGE { len.next_multiple_of(HUGE) } else { len.next_multiple_of(PAGE) };
        // A huge page begins where the address is a multiple of its size.
        let spare = if len >= HUGE { HUGE } else { 0 };
        // SAFETY: no address is asked for, so the new mapping replaces nothing.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len + spare, ProtFlags::empty(), MapFlags::PRIVATE)
        }
        .map_err(|e| LimitError::System("mmap", e))?;
        let before = if spare > 0 { base.cast::<u8>().align_offset(HUGE) } else { 0 };
        // SAFETY: `before <= spare`, so that all of it is inside the mapping just made, which nobody uses.
        let base = unsafe {
            let aligned = base.cast::<u8>().add(before).cast();
            if spare > 0 {
                let _ = munmap(base, before);
                let _ = munmap(base.cast::<u8>().add(before + len).cast(), spare - before);
            }
            mmap_anonymous(aligned, len, ProtFlags::READ | ProtFlags::WRITE, flags | MapFlags::FIXED)
        }
        .map_err(|e| LimitError::System("mmap", e))?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or(LimitError::System("mmap", rustix::io::Errno::NOMEM))?;
        let mapping = Self { base, len };
        if len >= HUGE {
            // SAFETY: the range is the mapping just made, and the advice changes no contents.
            // A kernel without huge pages refuses, which only costs speed.
            let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        }
        mapping.touch();
        Ok(mapping)
    }

    /// Writes a zero to every page, so that no page fault is left for the measured loop.
    fn touch(&self) {
        for offset in (0..self.len).step_by(PAGE) {
            // SAFETY: `offset` is inside the mapping, which is writable and used by nobody else yet.
            unsafe { self.base.as_ptr().add(offset).write_volatile(0) };
        }
    }

    /// Reads every page, so that this process has it in its page table too.
    pub(super) fn fault_in(&self) {
        for offset in (0..self.len).step_by(PAGE) {
            // SAFETY: `offset` is inside the mapping; a volatile read of a byte has no other needs.
            unsafe { self.base.as_ptr().add(offset).read_volatile() };
        }
    }

    /// The word at the beginning of the cache line pair `index`, 128 bytes from the next.
    #[inline(always)]
    pub(super) fn line(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len / LINE_PAIR);
        // SAFETY: inside the mapping and aligned; both processes use these words by atomics only.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index * LINE_PAIR).cast()) }
    }

    /// Writes `len` bytes of words that all differ, so that a wrong copy has a wrong sum.
    pub(super) fn fill(&self, len: usize) {
        for i in 0..len.min(self.len) / 8 {
            let word = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // SAFETY: inside the mapping, which only this process uses until it says that it is filled.
            unsafe { self.base.as_ptr().cast::<u64>().add(i).write(word) };
        }
    }

    /// `len` bytes from `offset`, as words. Both are multiples of 8.
    ///
    /// # Safety
    ///
    /// Nobody writes the range while the slice is used.
    #[inline(always)]
    pub(super) unsafe fn words(&self, offset: usize, len: usize) -> &[u64] {
        debug_assert!(offset.is_multiple_of(8) && len.is_multiple_of(8) && offset + len <= self.len);
        // SAFETY: inside the mapping and aligned, and the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), len / 8) }
    }

    /// The first byte. Page aligned.
    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping this value owns; nothing refers to it after the owner.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Adjacent cache lines are fetched in pairs, so what must not disturb each other is 128 bytes apart.
const LINE_PAIR: usize = 128;
const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;
/// `MADV_COLLAPSE`: into huge pages now.
const COLLAPSE: i32 = 25;

/// Ties the calling thread to one core.
pub(super) fn pin(core: usize) -> Result<(), LimitError> {
    if core >= CpuSet::MAX_CPU {
        return Err(LimitError::Argument("no such core"));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|e| LimitError::System("sched_setaffinity", e))
}

/// Gives the calling thread its cores back when dropped.
pub(super) struct RestoreAffinity(CpuSet);

impl RestoreAffinity {
    pub(super) fn save() -> Result<Self, LimitError> {
        sched_getaffinity(None).map(Self).map_err(|e| LimitError::System("sched_getaffinity", e))
    }
}

impl Drop for RestoreAffinity {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// What a spin loop looks at from time to time, so that it ends although the other process does not answer.
pub(super) struct Watch {
    deadline_ns: u64,
    /// The child to look after, in the parent only: the child dies with its parent by a signal.
    child: Option<Pid>,
}

impl Watch {
    /// Returns as soon as `ready` does, or with the reason why it never will.
    #[inline(always)]
    pub(super) fn spin(&self, mut ready: impl FnMut() -> bool) -> Result<(), LimitError> {
        loop {
            for _ in 0..SPINS_PER_CHECK {
                if ready() {
                    return Ok(());
                }
            }
            self.check()?;
        }
    }

    /// Fails when the deadline is over or the child is gone.
    #[cold]
    #[inline(never)]
    pub(super) fn check(&self) -> Result<(), LimitError> {
        if now_ns() > self.deadline_ns {
            return Err(LimitError::TimedOut);
        }
        // Whoever else wants this core has it now, and not when the time slice is over: that may be the other side.
        std::thread::yield_now();
        match self.child {
            // Only looks: the child is left to be reaped by `Peer`, so that its id stays its own.
            Some(pid) => match waitid(
                WaitId::Pid(pid),
                WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT,
            ) {
                Ok(None) => Ok(()),
                _ => Err(LimitError::PeerDied),
            },
            None => Ok(()),
        }
    }
}

/// The second process. Killed and reaped when dropped.
pub(super) struct Peer {
    pid: Pid,
    watch: Watch,
    reaped: bool,
}

impl Peer {
    /// Pins this thread to `cores[0]`, forks, and runs `body` in the child on `cores[1]`.
    ///
    /// Both have all of `seconds` and some time more, then their spin loops give up. The child never returns
    /// from here. It is forked without exec, so `body` must not allocate or take locks when the caller
    /// is not the only thread: the bodies of this module only touch memory and make system calls.
    pub(super) fn start(
        cores: [usize; 2],
        seconds: f64,
        body: impl FnOnce(&Watch) -> Result<(), LimitError>,
    ) -> Result<Self, LimitError> {
        Self::start_within(cores, (seconds * 2e9) as u64 + 30_000_000_000, body)
    }

    /// As [`Self::start`], with a time after which both sides give up.
    pub(super) fn start_within(
        cores: [usize; 2],
        patience_ns: u64,
        body: impl FnOnce(&Watch) -> Result<(), LimitError>,
    ) -> Result<Self, LimitError> {
        pin(cores[0])?;
        let deadline_ns = now_ns() + patience_ns;
        let parent = rustix::process::getpid();
        // SAFETY: the child runs `body`, which keeps to memory and system calls (see above), and leaves
        // by `_exit`, so it neither depends on a lock another thread held nor runs destructors twice.
        match unsafe { fork() } {
            0 => {
                // Whatever happens in the child, a panic included, ends in `_exit`.
                let _end = ExitOnDrop;
                let _ = set_parent_process_death_signal(Some(Signal::KILL));
                let status = if getppid() != Some(parent) || pin(cores[1]).is_err() {
                    2
                } else {
                    i32::from(body(&Watch { deadline_ns, child: None }).is_err())
                };
                // SAFETY: ends the child here; nothing it leaves behind needs a destructor.
                unsafe { _exit(status) }
            }
            pid if pid > 0 => {
                let pid = Pid::from_raw(pid).ok_or(LimitError::PeerDied)?;
                Ok(Self { pid, watch: Watch { deadline_ns, child: Some(pid) }, reaped: false })
            }
            _ => Err(LimitError::System("fork", rustix::io::Errno::AGAIN)),
        }
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Waits until the child has ended, and says whether it was content.
    pub(super) fn finish(mut self) -> Result<(), LimitError> {
        loop {
            match waitpid(Some(self.pid), WaitOptions::NOHANG) {
                Ok(Some((_, status))) => {
                    self.reaped = true;
                    return match status.exit_status() {
                        Some(0) => Ok(()),
                        _ => Err(LimitError::PeerDied),
                    };
                }
                Ok(None) => {}
                Err(e) => return Err(LimitError::System("waitpid", e)),
            }
            if now_ns() > self.watch.deadline_ns {
                return Err(LimitError::TimedOut);
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // A child that is not reaped keeps its id, so the signal cannot reach anybody else.
        if !self.reaped {
            let _ = kill_process(self.pid, Signal::KILL);
            let _ = waitpid(Some(self.pid), WaitOptions::empty());
        }
    }
}

struct ExitOnDrop;

impl Drop for ExitOnDrop {
    fn drop(&mut self) {
        // SAFETY: only reached in the child and only by a panic; the process must end before the
        // unwinding enters the parent's frames, which the child has a copy of.
        unsafe { _exit(3) }
    }
}
