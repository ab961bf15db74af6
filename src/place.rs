//! What a process has of its job: who it is, and its devices.

use crate::error::JoinError;
use crate::herald::{Herald, HeraldParts, Serving};
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{ClientId, Device, JobShape, LinuxSysdep, Personality, Rank, Sysdep};
use posthaste_launch::{Bulletin, InheritedFds, Meeting, Rendezvous, Settings};
use posthaste_shm::{Host, HostResources, Layout, LayoutError, Sizes};
use posthaste_tcp::TcpDevice;
use std::collections::BTreeSet;
use std::sync::Arc;

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
    far: Vec<Arc<TcpDevice>>,
    /// Hears which ranks are gone; they may never have been met.
    herald: Mutex<Option<Herald>>,
    /// Serves the news, if this rank does so in the place of one that has left.
    serving: Serving,
    /// What the ranks met through, where its service wants to hear of the end.
    meeting: Mutex<Option<Box<dyn Meeting>>>,
    /// The node of each rank as all ranks count them, also one that has come again since.
    hosts: Vec<u32>,
    clients: Mutex<Clients>,
}

/// The clients that were handed out, and those that have left.
#[derive(Default)]
struct Clients {
    taken: BTreeSet<ClientId>,
    left: BTreeSet<ClientId>,
}

impl Place {
    /// The place of a rank on one of several nodes; `fds` are its parts of the node's arena. `neighbours` are the ranks
    /// that share its processors, itself among them, though they may be nodes of their own; `incarnation` is how often the
    /// rank was started before.
    pub fn new(
        rank: Rank,
        shape: JobShape,
        nodes: Vec<u32>,
        fds: InheritedFds,
        neighbours: usize,
        settings: Settings,
        incarnation: u32,
    ) -> Result<Place, JoinError> {
        let hosts = nodes.clone();
        let mut personality = Personality::on_nodes(rank, shape, nodes);
        (personality.neighbours, personality.incarnation) = (neighbours, incarnation);
        let sysdep: Arc<dyn Sysdep> = Arc::new(LinuxSysdep::new(personality, settings.cores));
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
            herald: Mutex::new(None),
            serving: Serving::default(),
            meeting: Mutex::new(None),
            hosts,
            clients: Mutex::default(),
        })
    }

    pub fn rank(&self) -> Rank {
        self.sysdep.personality().rank
    }

    pub fn shape(&self) -> JobShape {
        self.sysdep.personality().shape
    }

    /// This rank was part of the job before: on which node the others count each rank.
    pub fn come_again(&mut self, hosts: Vec<u32>) {
        self.hosts = hosts;
    }

    /// How often this rank was started before.
    pub fn incarnation(&self) -> u32 {
        self.sysdep.personality().incarnation
    }

    /// The node of each rank, the same on all ranks.
    pub fn hosts(&self) -> &[u32] {
        &self.hosts
    }

    /// The node of a rank.
    pub fn node_of(&self, rank: Rank) -> u32 {
        self.hosts.get(rank.index()).copied().unwrap_or(rank.0)
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
    pub fn add_network(&mut self, devices: Vec<Arc<TcpDevice>>) {
        if devices.len() > 1 {
            devices.iter().for_each(|device| device.tell_latecomers());
        }
        self.far = devices;
    }

    /// Listens, in a task of this runtime, to who is gone.
    pub fn listen(&self, bulletin: Bulletin, server: Option<Rank>) -> Result<(), JoinError> {
        let herald = Herald::start(HeraldParts {
            bulletin,
            server,
            devices: self.far.clone(),
            shape: self.shape(),
            ports: self.settings.tcp_ports.clone(),
            serving: self.serving.clone(),
        });
        let herald = herald.map_err(|source| JoinError::System { what: "listen to who is gone", source })?;
        *lock(&self.herald) = Some(herald);
        Ok(())
    }

    /// Serves the news of the others until this rank leaves.
    pub fn serve(&self, server: Rendezvous) {
        *lock(&self.serving) = Some(server);
    }

    /// Keeps the meeting, and listens to what it tells of the others.
    pub fn attend(&self, mut meeting: Box<dyn Meeting>, served_by: Option<Rank>) -> Result<(), JoinError> {
        // A bulletin is asked for in a few bytes that the server's socket has room for.
        if let Some(bulletin) = meeting.bulletin() {
            self.listen(bulletin, served_by)?;
        }
        self.keep(meeting);
        Ok(())
    }

    /// Keeps the meeting until the rank leaves: some launchers take its end for the end of the process.
    pub fn keep(&self, meeting: Box<dyn Meeting>) {
        *lock(&self.meeting) = Some(meeting);
    }

    /// The last client has left: the others are told, and the meeting is over. Blocks for a moment.
    pub fn end(&self) {
        self.far.iter().for_each(|device| device.shut_gate());
        if let Some(herald) = lock(&self.herald).take() {
            herald.leave();
        }
        // If this rank serves it, it ends when all have what they are due, or another rank serves them.
        let (serving, meeting) = (lock(&self.serving).take(), lock(&self.meeting).take());
        drop((serving, meeting));
    }

    /// A client has left, or could not be opened; whether it was the last one of those that were handed out. Says so once.
    pub fn client_left(&self, id: ClientId) -> bool {
        let mut clients = lock(&self.clients);
        clients.left.insert(id) && clients.left == clients.taken
    }

    /// A client could not be opened: it may be tried again. Whether all others that were handed out have left meanwhile, of which
    /// nobody could tell before.
    pub fn give_back(&self, id: ClientId) -> bool {
        let mut clients = lock(&self.clients);
        clients.taken.remove(&id) && !clients.left.is_empty() && clients.left == clients.taken
    }

    /// The devices of a client that nobody has taken yet.
    pub fn take_client(&self, id: ClientId) -> Result<Vec<Arc<dyn Device>>, JoinError> {
        let clients = self.shape().clients;
        if id.0 >= clients || !lock(&self.clients).taken.insert(id) {
            return Err(JoinError::Client { wanted: id.0, clients });
        }
        let near = self.near.get(id.index()).cloned();
        let far = self.far.get(id.index()).map(|device| device.clone() as Arc<dyn Device>);
        Ok(near.into_iter().chain(far).collect())
    }
}

impl Drop for Place {
    /// Nobody has left the job, but nobody takes part any more. The end of a meeting may have to wait for the others: not in a
    /// task, where other tasks would wait with it. The runtime waits for that as it ends, as the end of the process did.
    fn drop(&mut self) {
        let ended = (lock(&self.serving).take(), lock(&self.meeting).take());
        if (ended.0.is_some() || ended.1.is_some())
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let _ended_later = runtime.spawn_blocking(move || drop(ended));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_launch::{JobId, JobKey, MeetingError};
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;
    use std::time::{Duration, Instant};

    /// Tells where it ends.
    struct Told(Sender<ThreadId>);

    impl Meeting for Told {
        fn rank(&self) -> u32 {
            0
        }

        fn size(&self) -> u32 {
            1
        }

        fn identity(&self) -> Option<(JobId, JobKey)> {
            None
        }

        fn all_gather(&mut self, blob: &[u8], _: Instant) -> Result<Vec<Vec<u8>>, MeetingError> {
            Ok(vec![blob.to_vec()])
        }
    }

    impl Drop for Told {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).expect("somebody waits for it");
        }
    }

    /// A place with a meeting.
    fn place(told: Sender<ThreadId>) -> Place {
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let settings = Settings::parse([]).expect("nothing is set");
        let fds = crate::join::alone(shape, &settings).expect("there is memory");
        let place = Place::new(Rank(0), shape, vec![0], fds, 1, settings, 0).expect("it is mapped");
        place.keep(Box::new(Told(told)));
        place
    }

    #[test]
    fn a_place_that_is_dropped_in_a_task_ends_its_meeting_elsewhere() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (told, ended) = channel();
        runtime.block_on(async { drop(place(told)) });
        drop(runtime);
        let thread = ended.recv_timeout(Duration::from_secs(60)).expect("it ends");
        assert_ne!(thread, std::thread::current().id());
        // Where nobody else waits, it ends at once.
        let (told, ended) = channel();
        drop(place(told));
        assert_eq!(ended.try_recv(), Ok(std::thread::current().id()));
    }

    #[test]
    fn a_meeting_ends_elsewhere_if_joining_fails_in_a_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (told, ended) = channel();
        let deadline = Instant::now() + Duration::from_secs(60);
        runtime.block_on(async { drop(crate::join::Party::new(Box::new(Told(told)), deadline)) });
        drop(runtime);
        let thread = ended.recv_timeout(Duration::from_secs(60)).expect("it ends");
        assert_ne!(thread, std::thread::current().id());
    }

    #[test]
    fn a_client_that_is_asked_for_in_a_runtime_without_io_may_be_asked_for_elsewhere() {
        let whole = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let job = whole.block_on(crate::solo_with(2, 1)).expect("as many as are asked for");
        let lame = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let refused = lame.block_on(job.client(1)).expect_err("it has no I/O");
        assert!(refused.to_string().contains("no I/O driver"), "{refused}");
        let refused = futures::executor::block_on(job.client(1)).expect_err("there is none");
        assert!(refused.to_string().contains("a Tokio runtime"), "{refused}");
        whole.block_on(async {
            let client = job.client(1).await.expect("nobody has it");
            client.leave().await.expect("it leaves");
            job.leave().await.expect("it leaves");
        });
    }

    #[tokio::test]
    async fn every_client_of_a_shape_is_handed_out_once() {
        let job = crate::solo_with(40, 1).await.expect("as many as are asked for");
        let client = job.client(39).await.expect("the last one of them");
        assert!(job.client(39).await.is_err(), "it was handed out before");
        assert!(job.client(40).await.is_err(), "there is none");
        client.leave().await.expect("it leaves");
        job.leave().await.expect("it leaves");
    }
}
