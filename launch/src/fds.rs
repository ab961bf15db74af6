//! The descriptors that the launcher makes for a node of a job: one arena, one doorbell per rank.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource, getrlimit};

use crate::arena::{self, ArenaKind};
use crate::env::MAX_RANKS;
use crate::error::HostFdsError;
use crate::inherited::InheritedFds;

/// The descriptors of all ranks of one node, as their maker holds them; they are counted from 0 on here.
///
/// All are close-on-exec, and both ends of each doorbell are non-blocking.
#[derive(Debug)]
pub struct HostFds {
    shared: Arc<SharedFds>,
    bells: Vec<Option<OwnedFd>>,
    kind: ArenaKind,
}

/// What every rank gets alike.
#[derive(Debug)]
pub(crate) struct SharedFds {
    pub(crate) arena: OwnedFd,
    pub(crate) ring: Vec<OwnedFd>,
}

impl HostFds {
    /// Makes an arena of `arena_bytes`, sparse and of fixed size, and `ranks` doorbells.
    ///
    /// # Errors
    /// The limit on open files is too low (checked before anything is made), a size is out of range, or the kernel
    /// refuses the arena both as a memfd and as an unlinked file.
    pub fn new(ranks: u32, arena_bytes: u64) -> Result<Self, HostFdsError> {
        Self::with_headroom(ranks, arena_bytes, 8)
    }

    /// As [`new`](Self::new), and makes sure that `headroom` further descriptors could be opened at that time.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_headroom(ranks: u32, arena_bytes: u64, headroom: u64) -> Result<Self, HostFdsError> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(HostFdsError::Ranks(ranks));
        }
        check_limit(&[ranks], headroom)?;
        Self::make(ranks, arena_bytes)
    }

    /// An arena of `arena_bytes` and the doorbells for each of several nodes, given how many ranks each has.
    pub(crate) fn of_nodes(
        counts: &[u32],
        arena_bytes: u64,
        headroom: u64,
    ) -> Result<Vec<Self>, HostFdsError> {
        check_limit(counts, headroom)?;
        counts.iter().map(|ranks| Self::make(*ranks, arena_bytes)).collect()
    }

    fn make(ranks: u32, arena_bytes: u64) -> Result<Self, HostFdsError> {
        let (arena, kind) = arena::create(arena_bytes)?;
        let arena = above_stdio(arena).map_err(system("move the arena's descriptor"))?;
        let mut bells = Vec::with_capacity(ranks as usize);
        let mut ring = Vec::with_capacity(ranks as usize);
        for _ in 0..ranks {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
                .map_err(io::Error::from)
                .map_err(system("make a doorbell"))?;
            bells.push(Some(above_stdio(read).map_err(system("move a doorbell's descriptor"))?));
            ring.push(above_stdio(write).map_err(system("move a doorbell's descriptor"))?);
        }
        Ok(Self { shared: Arc::new(SharedFds { arena, ring }), bells, kind })
    }

    /// What the arena is made of.
    pub fn kind(&self) -> &ArenaKind {
        &self.kind
    }

    /// The arena.
    pub fn arena(&self) -> BorrowedFd<'_> {
        self.shared.arena.as_fd()
    }

    /// The write ends of the doorbells of all ranks, in order.
    pub fn ring(&self) -> &[OwnedFd] {
        &self.shared.ring
    }

    /// Takes the read end of a rank's doorbell; none if it was taken before or the rank does not exist.
    ///
    /// Whoever holds it is what the peers take for the life of that rank.
    pub fn take_bell(&mut self, rank: u32) -> Option<OwnedFd> {
        self.bells.get_mut(rank as usize)?.take()
    }

    /// The descriptors of one rank, for a rank that lives in this process.
    ///
    /// # Errors
    /// The rank does not exist, its doorbell was taken before, or the limit on open files is reached.
    pub fn local(&mut self, rank: u32) -> io::Result<InheritedFds> {
        let arena = self.shared.arena.try_clone()?;
        let ring = self.shared.ring.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        let bell = self.take_bell(rank).ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("rank {rank} has no doorbell left"))
        })?;
        Ok(InheritedFds { arena, bell, ring })
    }

    pub(crate) fn shared(&self) -> &Arc<SharedFds> {
        &self.shared
    }
}

/// Refuses a job that would meet the limit half way.
fn check_limit(counts: &[u32], headroom: u64) -> Result<(), HostFdsError> {
    let ranks = counts.iter().sum();
    let needed = counts.len() as u64 + 2 * u64::from(ranks) + headroom;
    match room_for(needed) {
        Ok(()) => Ok(()),
        Err((needed, limit)) => Err(HostFdsError::DescriptorLimit { ranks, needed, limit }),
    }
}

/// Whether that many more descriptors fit under the limit; if not, how many there would be, and the limit.
pub(crate) fn room_for(more: u64) -> Result<(), (u64, u64)> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // Without /proc, assume the three standard streams.
    let open = std::fs::read_dir("/proc/self/fd").map_or(3, |entries| entries.count() as u64);
    let needed = open.saturating_add(more);
    if needed > limit { Err((needed, limit)) } else { Ok(()) }
}

/// Numbers 0 to 2 belong to the standard streams, even where a process was started without them.
fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > 2 { Ok(fd) } else { Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?) }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> HostFdsError {
    move |source| HostFdsError::System { what, source }
}
