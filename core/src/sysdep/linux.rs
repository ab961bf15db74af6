//! The services of the Linux kernel, and of others as far as they have them: elsewhere both sides of a handshake fence,
//! threads are not bound, and memory is not known to be short.
#![allow(unsafe_code)]

use super::{Headroom, Personality, Sysdep, ThreadMain};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// [`Sysdep`] over Linux.
///
/// # Examples
/// ```
/// use posthaste_core::sysdep::Personality;
/// use posthaste_core::{JobShape, LinuxSysdep, Rank, Sysdep};
///
/// let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
/// let kernel = LinuxSysdep::new(Personality::one_node(Rank(0), shape), Some(4));
/// let before = kernel.now();
/// kernel.yield_now();
/// assert!(kernel.now() >= before && kernel.cores() == 4 && kernel.headroom().host > 0);
/// ```
#[derive(Debug)]
pub struct LinuxSysdep {
    personality: Personality,
    cores: usize,
    asymmetric: bool,
    start: Instant,
    fences: FenceCost,
    /// By how much heavy fences are dearer than they have to be, as a test has it.
    dearer: Duration,
}

/// A fence that took longer shall be measured again, by a clock that stands still while others run.
const SUSPICIOUS: Duration = Duration::from_micros(50);

/// What a heavy fence costs, in nanoseconds: an average that rises by a quarter of the difference and falls by a 64th, because
/// a fence is cheap wherever the other cores happen to be idle.
#[derive(Debug, Default)]
struct FenceCost {
    average: AtomicU64,
    suspected: AtomicBool,
}

impl FenceCost {
    fn measure(&self, fence: impl FnOnce()) {
        if self.suspected.load(Ordering::Relaxed) || self.average() >= SUSPICIOUS {
            let before = thread_time();
            fence();
            let took = thread_time().saturating_sub(before);
            self.suspected.store(false, Ordering::Relaxed);
            self.took(took);
        } else {
            let before = Instant::now();
            fence();
            let took = before.elapsed();
            if took >= SUSPICIOUS {
                // Dear, or this thread had to wait for its core meanwhile.
                self.suspected.store(true, Ordering::Relaxed);
            }
        }
    }

    fn average(&self) -> Duration {
        Duration::from_nanos(self.average.load(Ordering::Relaxed))
    }

    /// What two threads count at once may be counted once.
    fn took(&self, took: Duration) {
        let (took, before) = (took.as_nanos() as u64, self.average.load(Ordering::Relaxed));
        let after = if took > before { before + (took - before) / 4 } else { before - (before - took) / 64 };
        self.average.store(after, Ordering::Relaxed);
    }
}

/// What this thread has had of a processor.
#[cfg(target_os = "linux")]
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Never asked: elsewhere there is no heavy fence.
#[cfg(not(target_os = "linux"))]
fn thread_time() -> Duration {
    Duration::ZERO
}

impl LinuxSysdep {
    /// For a process with that personality. Registers it for expedited global memory barriers.
    ///
    /// `cores`: those that the ranks of this host share, if that is known better than from this process's affinity.
    #[must_use]
    pub fn new(personality: Personality, cores: Option<usize>) -> Self {
        static REGISTERED: OnceLock<bool> = OnceLock::new();
        let asymmetric = *REGISTERED.get_or_init(|| {
            std::env::var_os("POSTHASTE_TEST_NO_MEMBARRIER").is_none() && membarrier::register()
        });
        let dearer =
            std::env::var("POSTHASTE_TEST_DEAR_FENCE_US").ok().and_then(|micros| micros.parse().ok());
        let dearer = dearer.map_or(Duration::ZERO, Duration::from_micros);
        let cores = cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        Self { personality, cores, asymmetric, start: Instant::now(), fences: FenceCost::default(), dearer }
    }
}

impl Sysdep for LinuxSysdep {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn personality(&self) -> &Personality {
        &self.personality
    }

    fn cores(&self) -> usize {
        self.cores
    }

    fn spawn(&self, name: &str, core: Option<usize>, main: ThreadMain) -> std::io::Result<()> {
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            if let Some(core) = core {
                bind(core);
            }
            main();
        })?;
        Ok(())
    }

    fn yield_now(&self) {
        std::thread::yield_now();
    }

    fn heavy_fence(&self) {
        if self.asymmetric {
            self.fences.measure(|| {
                if !membarrier::global_expedited() {
                    // It worked when this process joined. Who relies on it makes no fence of his own: nothing that follows
                    // would be sound.
                    tracing::error!(
                        "membarrier is refused now, as by a filter that was installed after joining a job"
                    );
                    std::process::abort();
                }
                if self.dearer > Duration::ZERO {
                    let since = Instant::now();
                    while since.elapsed() < self.dearer {
                        std::hint::spin_loop();
                    }
                }
            });
        }
        fence(Ordering::SeqCst);
    }

    fn heavy_fence_cost(&self) -> Duration {
        self.fences.average()
    }

    fn fence_is_asymmetric(&self) -> bool {
        self.asymmetric
    }

    fn headroom(&self) -> Headroom {
        Headroom { host: available_memory().unwrap_or(u64::MAX), cgroup: cgroup_left() }
    }

    fn random(&self, bytes: &mut [u8]) {
        if let Err(error) = getrandom::fill(bytes) {
            panic!("the kernel has no random bytes: {error}");
        }
    }
}

/// Has the calling thread run on that core only.
#[cfg(target_os = "linux")]
fn bind(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(core, %error, "thread not bound");
    }
}

#[cfg(not(target_os = "linux"))]
fn bind(core: usize) {
    tracing::warn!(core, "thread not bound: that is done on Linux only");
}

fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// What the process's own memory control group, and those above it, have left. File pages that the kernel would drop
/// first do not count as used: a group whose programs read files is otherwise always full.
fn cgroup_left() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines().filter_map(group_left).min()
}

/// Version 1 says "no limit" by the largest number of pages, in bytes.
const UNLIMITED: u64 = 1 << 62;

/// By one line of `/proc/self/cgroup`, `number:controllers:path`: version 2 has number 0 and no controllers.
fn group_left(line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let (root, max, current, dropped) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
        _ if controllers.split(',').any(|name| name == "memory") => (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file ",
        ),
        _ => return None,
    };
    let mut left: Option<u64> = None;
    let mut folder = std::path::PathBuf::from(root);
    folder.push(path.trim_start_matches('/'));
    loop {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let limit = number(max).filter(|max| *max < UNLIMITED);
        if let (Some(max), Some(current)) = (limit, number(current)) {
            let stat = read("memory.stat").unwrap_or_default();
            let droppable = stat.lines().find_map(|line| line.strip_prefix(dropped)?.parse::<u64>().ok());
            let here = max.saturating_sub(current.saturating_sub(droppable.unwrap_or(0)));
            left = Some(left.map_or(here, |other| other.min(here)));
        }
        if folder.as_os_str() == root || !folder.pop() {
            return left;
        }
    }
}

/// The membarrier system call, which rustix does not offer in its global form.
mod membarrier {
    const GLOBAL_EXPEDITED: i64 = 1 << 1;
    const REGISTER_GLOBAL_EXPEDITED: i64 = 1 << 2;

    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    fn call(command: i64) -> i64 {
        const SYS_MEMBARRIER: i64 = 324;
        let result: i64;
        // SAFETY: membarrier takes three integers, touches no memory of ours and fails with an error number.
        unsafe {
            std::arch::asm!(
                "syscall",
                inlateout("rax") SYS_MEMBARRIER => result,
                in("rdi") command,
                in("rsi") 0,
                in("rdx") 0,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack)
            );
        }
        result
    }

    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    fn call(_command: i64) -> i64 {
        -1
    }

    pub fn register() -> bool {
        call(REGISTER_GLOBAL_EXPEDITED) == 0
    }

    pub fn global_expedited() -> bool {
        call(GLOBAL_EXPEDITED) == 0
    }
}
