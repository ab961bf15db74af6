//! What a process has of its job: who it is, and its devices.

use crate::error::JoinError;
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{ClientId, Device, JobShape, LinuxSysdep, Personality, Rank, Sysdep};
use posthaste_launch::{InheritedFds, Meeting, Settings};
use posthaste_shm::{Host, HostResources, Layout, LayoutError, Sizes};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The sizes of a job's arena.
pub(crate) fn sizes_of(settings: &Settings, shape: JobShape) -> Sizes {
    let default = Sizes::default();
    // The address space has 47 bits; half of it is plenty for all segments together.
    let fair = (1u64 << 46) / u64::from(shape.ranks.max(1));
    Sizes {
        lane: settings.lane_bytes as u64,
        pool: default.pool,
        segment: settings.segment.unwrap_or(default.segment.min(fair)),
    }
}

pub(crate) fn layout_of(shape: JobShape, sizes: Sizes) -> Result<Layout, LayoutError> {
    Layout::new(shape, sizes)
}

/// A process's place in a job; its clients are opened from it.
pub(crate) struct Place {
    pub sysdep: Arc<dyn Sysdep>,
    pub settings: Settings,
    /// Over shared memory, by client: for the ranks of this node, and for this rank itself.
    near: Vec<Arc<dyn Device>>,
    /// Over sockets, by client; none if all ranks share memory.
    far: Vec<Arc<dyn Device>>,
    /// What the ranks met through, where its service wants to hear of the end.
    meeting: Mutex<Option<Box<dyn Meeting>>>,
    /// A bit per client that was handed out.
    clients: AtomicU32,
}

impl Place {
    /// The place of a rank on one of several nodes; `fds` are its parts of the node's arena. `neighbours` are the ranks
    /// that share its processors, itself among them, though they may be nodes of their own.
    pub fn new(
        rank: Rank,
        shape: JobShape,
        nodes: Vec<u32>,
        fds: InheritedFds,
        neighbours: usize,
        settings: Settings,
    ) -> Result<Place, JoinError> {
        let personality = Personality::on_nodes(rank, shape, nodes);
        let cores = match (settings.cores, personality.local_size()) {
            (cores, local) if local == neighbours => cores,
            (cores, local) => {
                let all = cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into));
                Some(all * local / neighbours.max(1))
            }
        };
        let sysdep: Arc<dyn Sysdep> = Arc::new(LinuxSysdep::new(personality, cores));
        let resources = HostResources {
            arena: fds.arena,
            bell: fds.bell,
            ring: fds.ring,
            memory_limit: settings.memory_limit,
        };
        let host = Host::new(resources, sizes_of(&settings, shape), sysdep.clone())?;
        let near = (0..shape.clients).map(|client| host.device(ClientId(client))).collect();
        Ok(Place {
            sysdep,
            settings,
            near,
            far: Vec::new(),
            meeting: Mutex::new(None),
            clients: AtomicU32::new(0),
        })
    }

    pub fn rank(&self) -> Rank {
        self.sysdep.personality().rank
    }

    pub fn shape(&self) -> JobShape {
        self.sysdep.personality().shape
    }

    /// Whether all ranks share one arena.
    pub fn is_one_node(&self) -> bool {
        let personality = self.sysdep.personality();
        personality.local_size() == personality.shape.ranks as usize
    }

    /// The devices over shared memory, by client.
    pub fn near_devices(&self) -> &[Arc<dyn Device>] {
        &self.near
    }

    /// The devices over sockets, by client.
    pub fn add_network(&mut self, devices: Vec<Arc<dyn Device>>) {
        self.far = devices;
    }

    /// Keeps the meeting until the rank leaves: some launchers take its end for the end of the process.
    pub fn keep(&self, meeting: Box<dyn Meeting>) {
        *lock(&self.meeting) = Some(meeting);
    }

    /// The last client has left.
    pub fn end_meeting(&self) -> Option<Box<dyn Meeting>> {
        lock(&self.meeting).take()
    }

    /// The devices of a client that nobody has taken yet.
    pub fn take_client(&self, id: ClientId) -> Result<Vec<Arc<dyn Device>>, JoinError> {
        let clients = self.shape().clients;
        let bit = 1u32.checked_shl(u32::from(id.0)).filter(|_| id.0 < clients);
        let taken = bit.is_none_or(|bit| self.clients.fetch_or(bit, Ordering::AcqRel) & bit != 0);
        if taken {
            return Err(JoinError::Client { wanted: id.0, clients });
        }
        let of = |devices: &[Arc<dyn Device>]| devices.get(id.index()).cloned();
        Ok(of(&self.near).into_iter().chain(of(&self.far)).collect())
    }
}
