//! Kernel services that contexts and clients have in common, behind a trait (D04): the clock, who this process is,
//! cores, threads and giving the core away, the heavy fence, how much memory is left, and random bytes.
//!
//! What belongs to one place alone asks the kernel there: the device over shared memory for its mapping, pipes and
//! pidfds; the one over TCP for its sockets, their watch and its own time limits; `memory` for advice on huge pages,
//! and for reads and writes of descriptors that go straight to shared memory; `reactor` for descriptors in the runtime
//! and for when a host was last heard of; the in-process device for pages that it gives back.

mod linux;
mod torus;

pub use linux::LinuxSysdep;
pub use torus::Torus;

use crate::ids::{JobShape, Rank};
use std::time::Duration;

/// Who this process is in the job.
///
/// # Examples
/// ```
/// use posthaste_core::sysdep::Personality;
/// use posthaste_core::{JobShape, Rank};
///
/// let shape = JobShape { ranks: 4, clients: 1, contexts: 1 };
/// let mine = Personality::on_nodes(Rank(3), shape, vec![0, 0, 1, 1]);
/// assert_eq!((mine.local_rank, mine.local_size()), (1, 2));
/// assert!(mine.is_local(Rank(2)) && !mine.is_local(Rank(0)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Personality {
    /// This rank.
    pub rank: Rank,
    /// The job.
    pub shape: JobShape,
    /// Position among the ranks of this host.
    pub local_rank: u32,
    /// Node of each rank, by rank.
    pub nodes: Vec<u32>,
    /// Ranks that share this rank's processors, itself among them; they may be nodes of their own.
    pub neighbours: usize,
    /// How often this rank was started before: a rank that died may be started again under its number.
    pub incarnation: u32,
}

impl Personality {
    /// All ranks on one node.
    #[must_use]
    pub fn one_node(rank: Rank, shape: JobShape) -> Self {
        Self::on_nodes(rank, shape, vec![0; shape.ranks as usize])
    }

    /// Ranks on the nodes of that number each, by rank.
    #[must_use]
    pub fn on_nodes(rank: Rank, shape: JobShape, nodes: Vec<u32>) -> Self {
        let mine = nodes.get(rank.index()).copied();
        let before = nodes.iter().take(rank.index()).filter(|&&node| Some(node) == mine).count();
        let neighbours = nodes.iter().filter(|&&node| Some(node) == mine).count();
        Self { rank, shape, local_rank: before as u32, nodes, neighbours, incarnation: 0 }
    }

    /// Whether the rank is on this rank's node.
    #[must_use]
    pub fn is_local(&self, rank: Rank) -> bool {
        let node = |rank: Rank| self.nodes.get(rank.index());
        node(rank).is_some() && node(rank) == node(self.rank)
    }

    /// The job's ranks as a torus of so many dimensions, as nearly equal as their number can be divided: what a network that
    /// is one would tell. Neighbours along the last dimension are on one node as a rule.
    #[must_use]
    pub fn torus(&self, dimensions: usize) -> Torus {
        Torus::balanced(self.shape.ranks, dimensions)
    }

    /// Number of ranks on this rank's node.
    #[must_use]
    pub fn local_size(&self) -> usize {
        let mine = self.nodes.get(self.rank.index()).copied().unwrap_or(0);
        self.nodes.iter().filter(|&&node| node == mine).count()
    }
}

/// How much memory can still be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headroom {
    /// Bytes that the host has available.
    pub host: u64,
    /// Bytes that the control group has left, if it has a limit.
    pub cgroup: Option<u64>,
}

/// Work for a thread.
pub type ThreadMain = Box<dyn FnOnce() + Send>;

/// The kernel, or something that behaves like one.
///
/// # Examples
/// A kernel whose clock a test moves by hand:
/// ```
/// use posthaste_core::sysdep::{Headroom, Personality, ThreadMain};
/// use posthaste_core::{JobShape, LinuxSysdep, Rank, Sysdep};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use std::time::Duration;
///
/// struct Clockwork {
///     kernel: LinuxSysdep,
///     millis: AtomicU64,
/// }
///
/// impl Sysdep for Clockwork {
///     fn now(&self) -> Duration {
///         Duration::from_millis(self.millis.load(Ordering::Relaxed))
///     }
///     fn cores(&self) -> usize {
///         1
///     }
///     // All else is the kernel's.
///     fn personality(&self) -> &Personality {
///         self.kernel.personality()
///     }
///     fn spawn(&self, name: &str, core: Option<usize>, main: ThreadMain) -> std::io::Result<()> {
///         self.kernel.spawn(name, core, main)
///     }
///     fn yield_now(&self) {
///         self.kernel.yield_now();
///     }
///     fn heavy_fence(&self) {
///         self.kernel.heavy_fence();
///     }
///     fn fence_is_asymmetric(&self) -> bool {
///         self.kernel.fence_is_asymmetric()
///     }
///     fn headroom(&self) -> Headroom {
///         self.kernel.headroom()
///     }
///     fn random(&self, bytes: &mut [u8]) {
///         self.kernel.random(bytes);
///     }
/// }
///
/// let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
/// let kernel = LinuxSysdep::new(Personality::one_node(Rank(0), shape), None);
/// let clock = Clockwork { kernel, millis: AtomicU64::new(0) };
/// let before = clock.now();
/// clock.millis.fetch_add(500, Ordering::Relaxed);
/// assert_eq!(clock.now() - before, Duration::from_millis(500));
/// ```
pub trait Sysdep: Send + Sync {
    /// A clock that never goes back and that wall-clock jumps do not touch.
    fn now(&self) -> Duration;

    /// Who this process is.
    fn personality(&self) -> &Personality;

    /// Processor cores that this process may use.
    fn cores(&self) -> usize;

    /// Starts a thread, bound to the given core if there is one.
    ///
    /// # Errors
    /// If the system refuses the thread; failing to bind it is only traced.
    fn spawn(&self, name: &str, core: Option<usize>, main: ThreadMain) -> std::io::Result<()>;

    /// Lets another thread or process run.
    fn yield_now(&self);

    /// The heavy side of an asymmetric fence: orders this thread's earlier stores before its later loads as all
    /// threads of all processes of the job see them, so that their side needs no fence.
    fn heavy_fence(&self);

    /// What a [`heavy_fence`](Self::heavy_fence) costs by those that were made lately, in the time of a processor: it is as
    /// dear as the interrupts of other cores are, a microsecond on most machines and a tick of the clock, some milliseconds,
    /// in virtual machines that have none to send. A dear one is not made for every sleep (see
    /// [`Port::settles_within`](crate::Port::settles_within)). Zero, as by default: cheap, or not known.
    fn heavy_fence_cost(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether [`heavy_fence`](Self::heavy_fence) covers other processes. If not, the light side needs a real fence.
    fn fence_is_asymmetric(&self) -> bool;

    /// How much memory can still be had.
    fn headroom(&self) -> Headroom;

    /// Fills the buffer with random bytes.
    fn random(&self, bytes: &mut [u8]);
}
