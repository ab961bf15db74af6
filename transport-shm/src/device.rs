//! The device: what the traits of the core ask for, over an arena.

use crate::arena::Arena;
use crate::bell::{OwnBell, SharedBell, pass_on};
use crate::lane::{MIN_RING, max_short};
use crate::layout::{Layout, Sizes};
use crate::link::{ClientLink, Link, Rouser};
use crate::port::ShmPort;
use async_trait::async_trait;
use posthaste_core::device::{Allocation, Doorbell, PeerNews, Rouse};
use posthaste_core::heap::Heap;
use posthaste_core::memory::SharedSlice;
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{
    Caps, ClientId, ContextId, Device, DeviceError, Endpoint, MemoryError, Port, Rank, Sysdep,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a rank was given to take part: the arena, the read end of its own doorbell, the write ends of those of its node.
#[derive(Debug)]
pub struct HostResources {
    /// The arena's file.
    pub arena: OwnedFd,
    /// The read end of this rank's doorbell pipe, not blocking.
    pub bell: OwnedFd,
    /// The write ends of the doorbell pipes of this node's ranks, in the order of their ranks, not blocking.
    pub ring: Vec<OwnedFd>,
    /// Limit on the committed bytes of the whole job.
    pub memory_limit: Option<u64>,
}

/// A process's place in a job on one host; its clients' devices are made from it.
pub struct Host {
    link: Arc<Link>,
    bells: Vec<Arc<SharedBell>>,
    open: AtomicUsize,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("rank", &self.link.me)
            .field("arena", &self.link.arena)
            .finish_non_exhaustive()
    }
}

impl Host {
    /// Maps the arena and enters the rank table.
    ///
    /// # Errors
    /// If the system refuses, the arena is not that of this job, or the rank is taken.
    pub fn new(
        resources: HostResources,
        sizes: Sizes,
        sysdep: Arc<dyn Sysdep>,
    ) -> Result<Arc<Host>, DeviceError> {
        let personality = sysdep.personality().clone();
        let shape = personality.shape;
        if !sizes.lane.is_power_of_two() || sizes.lane < MIN_RING {
            return Err(DeviceError::Mismatch {
                subject: "POSTHASTE_LANE_BYTES",
                problem: format!("{} is not a power of two of at least {MIN_RING}", sizes.lane),
            });
        }
        let local = personality.local_size();
        if resources.ring.len() != local {
            return Err(DeviceError::Mismatch {
                subject: "the inherited descriptors",
                problem: format!("{} doorbells for {local} ranks of this node", resources.ring.len()),
            });
        }
        let layout = Layout::new(shape, sizes)?;
        let arena = Arena::map(resources.arena, layout, resources.memory_limit, sysdep.clone())?;
        arena.enter(personality.rank)?;
        let link = Link::new(arena, resources.bell, resources.ring, sysdep)?;
        let endpoints = usize::from(shape.clients) * usize::from(shape.contexts);
        let bells = if endpoints > 1 {
            (0..endpoints).map(|_| Arc::new(SharedBell::default())).collect()
        } else {
            Vec::new()
        };
        Ok(Arc::new(Host { link: Arc::new(link), bells, open: AtomicUsize::new(0) }))
    }

    /// The device of one client.
    #[must_use]
    pub fn device(self: &Arc<Self>, client: ClientId) -> Arc<dyn Device> {
        let layout = self.link.arena.layout();
        let (segment_at, segment_len) = layout.segment(client, self.link.me);
        let max_page = layout.sizes.pool / 4;
        let max_short = max_short(layout.sizes.lane);
        let mut caps = Caps::send_only("shm", max_short);
        caps.max_eager = (4usize << 20).min(max_page as usize).max(max_short);
        caps.fragment = (256usize << 10).min(caps.max_eager);
        caps.native_put = true;
        caps.native_get = true;
        caps.native_atomics = true;
        caps.mappable = true;
        caps.loans = true;
        // Measured: whatever is too long for one page is faster with one copy than with two, whose target is fresh memory.
        caps.rendezvous = (4 << 20) + 1;
        caps.cost = 10;
        Arc::new(ShmDevice {
            host: self.clone(),
            client,
            caps,
            segment_at,
            heap: Mutex::new(Heap::new(segment_at, segment_len)),
            open: AtomicBool::new(false),
            tasks: Mutex::default(),
        })
    }

    /// What the arena says of the peers, for reports.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.link.arena
    }
}

/// The device over shared memory, for one client.
pub struct ShmDevice {
    host: Arc<Host>,
    client: ClientId,
    caps: Caps,
    segment_at: u64,
    heap: Mutex<Heap>,
    /// Its client is one of those that are open.
    open: AtomicBool,
    /// Who passes rings on and notices ends, in the runtime in which it was opened: the runtimes of other clients may end.
    tasks: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

impl std::fmt::Debug for ShmDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmDevice")
            .field("client", &self.client)
            .field("caps", &self.caps)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Device for ShmDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reaches(&self, rank: Rank) -> bool {
        self.host.link.is_local(rank)
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        let me = Endpoint::new(self.host.link.me, context);
        let home = ClientLink::new(self.host.link.clone(), self.client, me);
        Ok(Box::new(ShmPort::new(Arc::new(home))?))
    }

    fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
        let contexts = usize::from(self.host.link.arena.layout().shape.contexts);
        match self.host.bells.get(self.client.index() * contexts + context.index()) {
            Some(bell) => bell.clone(),
            None => Arc::new(OwnBell(self.host.link.bell.clone())),
        }
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        let mut heap = lock(&self.heap);
        let segment = heap.size();
        let (offset, len) = heap.take(len).ok_or(MemoryError::Segment { wanted: len, segment })?;
        if let Err(error) = self.host.link.arena.commit_fresh(self.segment_at + offset, len) {
            heap.give_back(offset, len);
            return Err(error);
        }
        posthaste_core::failpoint!("window.allocated");
        Ok(Allocation { offset, len })
    }

    fn free(&self, allocation: Allocation) {
        posthaste_core::failpoint!("window.free.before");
        self.host.link.arena.decommit(self.segment_at + allocation.offset, allocation.len);
        posthaste_core::failpoint!("window.free.punched");
        lock(&self.heap).give_back(allocation.offset, allocation.len);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        // Pages of this rank that were not committed must not be touched, whoever asks for it.
        let own = rank == self.host.link.me;
        if !self.reaches(rank) || (own && !lock(&self.heap).holds(offset, len)) {
            return None;
        }
        let segment = self.host.link.arena.layout().segment(self.client, rank);
        self.host.link.arena.part(segment).slice(offset, len)
    }

    fn rouser(&self, target: Endpoint) -> Option<Arc<dyn Rouse>> {
        let link = &self.host.link;
        let shape = link.arena.layout().shape;
        if !self.reaches(target.rank) || target.context.0 >= shape.contexts {
            return None;
        }
        // Whose memory is known has committed its block. A rank that invents memory must not have others touch what is
        // not there.
        let (offset, len) = link.arena.layout().block(self.client, target);
        link.arena.commit_common(offset, len).ok()?;
        Some(Arc::new(Rouser::new(link.clone(), self.client, target)))
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        let os =
            |source| DeviceError::Os { what: "cannot wait for the doorbell in this Tokio runtime", source };
        // A bell may be rung whose owner has just ended.
        posthaste_core::reactor::outlive_broken_pipes();
        let link = &self.host.link;
        let ear = match self.host.bells.is_empty() {
            true => link.bell.start().map(|()| None),
            false => link.bell.listen().map(Some),
        };
        let ear = ear.map_err(os)?;
        let poll = link.ear().map_err(os)?;
        if self.host.open.fetch_add(1, Ordering::SeqCst) == 0 {
            link.arena.stays(link.me);
        }
        link.listen(self.client, news);
        let mut tasks = lock(&self.tasks);
        tasks.push(tokio::spawn(link.clone().watch_all(poll)));
        if link.may_miss_rings {
            tasks.push(tokio::spawn(link.clone().ring_now_and_then()));
        }
        if let Some(ear) = ear {
            tasks.push(tokio::spawn(pass_on(ear, self.host.bells.clone())));
        }
        self.open.store(true, Ordering::Release);
        Ok(())
    }

    async fn close(&self) {
        // The listener leads back to the ports, which keep this alive.
        self.host.link.forget(self.client);
        // Others may be open: each counts once.
        if !self.open.swap(false, Ordering::AcqRel) {
            return;
        }
        lock(&self.tasks).drain(..).for_each(|task| task.abort());
        if self.host.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            let link = &self.host.link;
            link.arena.leave(link.me);
            // Another may have been opened meanwhile: of the two, the second to look finds what the first has written.
            if self.host.open.load(Ordering::SeqCst) > 0 {
                link.arena.stays(link.me);
            }
        }
    }
}
