//! What all clients and contexts of a process share: the arena, the bells of the peers, and who is gone.

use crate::arena::{Arena, Fences, Life, Presence};
use crate::bell::{Bell, Ear, ring};
use crate::lane::{CONTROL_BYTES, GRANT_COUNT, LightFence, return_grant};
use crate::pages::Page;
use crate::ready::{self, ReadySet};
use posthaste_core::device::{LeaseOwner, PeerEvent, PeerNews, Rouse};
use posthaste_core::memory::{SharedSlice, SharedWords};
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{ClientId, ContextId, DeviceError, Endpoint, Fault, LossCause, Rank, Sysdep};
use rustix::event::epoll;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// How long after the first look for ranks that have yet to join the next one is; each further one is twice as late.
const FIRST_LOOK: Duration = Duration::from_millis(10);
/// The longest time between two such looks.
const LATER_LOOKS: Duration = Duration::from_secs(1);

/// Milliseconds between two looks for dead peers by those who ring.
const GLANCE: u64 = 2;

/// How long a message may wait for a sleeper whose peers may not see that it sleeps.
const UNRUNG: Duration = Duration::from_millis(2);

/// A pidfd is told from a bell's pipe by this bit of the epoll data.
const PIDFD: u64 = 1 << 63;

/// The same end of a pipe in a description of its own: whether it waits is a flag of the description, which is common to all
/// who inherited it. Where there is no `/proc`, or nobody reads any more, it stays as it is.
fn described_anew(pipe: OwnedFd, access: OFlags) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    rustix::fs::open(path, access | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).unwrap_or(pipe)
}

/// The process's part in the arena.
pub(crate) struct Link {
    pub arena: Arena,
    pub me: Rank,
    pub bell: Arc<Bell>,
    /// By rank; none for ranks of other nodes.
    ring: Vec<Option<OwnedFd>>,
    pub sysdep: Arc<dyn Sysdep>,
    pub fence: LightFence,
    /// Peers may not see that it sleeps.
    pub may_miss_rings: bool,
    gone: Vec<AtomicBool>,
    /// Set when the peer's process has been looked for and need not be looked for again.
    watched: Vec<AtomicBool>,
    pidfds: Mutex<Vec<OwnedFd>>,
    /// Ranks that were found to have ended by others than the task that tells it.
    ended: Mutex<Vec<Rank>>,
    news: tokio::sync::Notify,
    /// The millisecond of the last look by somebody who rang.
    glanced: AtomicU64,
    poll: OwnedFd,
    listeners: Mutex<Vec<(ClientId, PeerNews)>>,
    /// How many contexts of each client have left.
    left: Vec<AtomicU32>,
}

impl Link {
    /// `ring`: of the ranks of this node, in their order.
    pub fn new(
        arena: Arena,
        bell: OwnedFd,
        ring: Vec<OwnedFd>,
        sysdep: Arc<dyn Sysdep>,
    ) -> Result<Link, DeviceError> {
        let personality = sysdep.personality();
        let me = personality.rank;
        let bell = described_anew(bell, OFlags::RDONLY);
        let mut ring = ring.into_iter().map(|pipe| described_anew(pipe, OFlags::WRONLY));
        let ranks = (0..personality.shape.ranks).map(Rank);
        let ring: Vec<Option<OwnedFd>> =
            ranks.map(|rank| if personality.is_local(rank) { ring.next() } else { None }).collect();
        let os = |what: &'static str| move |e: rustix::io::Errno| DeviceError::Os { what, source: e.into() };
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os("cannot make an epoll instance"))?;
        for (rank, pipe) in ring.iter().enumerate() {
            if let (Some(pipe), true) = (pipe, rank != me.index()) {
                // Errors are reported without being asked for: a pipe whose last read end was closed.
                let data = epoll::EventData::new_u64(rank as u64);
                epoll::add(&poll, pipe, data, epoll::EventFlags::ET).map_err(os("cannot watch a peer"))?;
            }
        }
        let fences = arena.agree_on_fences(sysdep.fence_is_asymmetric());
        let fence = if fences == Fences::Sleepers { LightFence::Compiler } else { LightFence::Full };
        let flags = || (0..ring.len()).map(|_| AtomicBool::new(false)).collect();
        let left = (0..personality.shape.clients).map(|_| AtomicU32::new(0)).collect();
        Ok(Link {
            arena,
            me,
            bell: Arc::new(Bell::new(bell)),
            gone: flags(),
            watched: flags(),
            ring,
            sysdep,
            fence,
            may_miss_rings: fences == Fences::NotThisSleeper,
            pidfds: Mutex::new(Vec::new()),
            ended: Mutex::new(Vec::new()),
            news: tokio::sync::Notify::new(),
            glanced: AtomicU64::new(0),
            poll,
            listeners: Mutex::new(Vec::new()),
            left,
        })
    }

    /// Whether the rank is on this node.
    pub fn is_local(&self, rank: Rank) -> bool {
        self.ring.get(rank.index()).is_some_and(Option::is_some)
    }

    /// Rings a rank's bell.
    pub fn ring(&self, rank: Rank) {
        tracing::trace!(%rank, "bell rung");
        if let Some(Some(pipe)) = self.ring.get(rank.index()) {
            ring(pipe);
        }
        self.glance();
    }

    /// Looks for dead peers now and then while this rank is busy. A runtime that always has tasks to run looks at its
    /// descriptors only after so many of them, which takes long where each gives its core away; who rings is in the
    /// kernel anyway. The task that tells is woken through the queue of the runtime and not through a descriptor.
    fn glance(&self) {
        let now = self.sysdep.now().as_millis() as u64;
        if now < self.glanced.load(Ordering::Relaxed) + GLANCE {
            return;
        }
        self.glanced.store(now, Ordering::Relaxed);
        let mut found = false;
        self.events(|rank| {
            lock(&self.ended).push(rank);
            found = true;
        });
        if found {
            self.news.notify_waiters();
        }
    }

    pub fn is_gone(&self, rank: Rank) -> bool {
        self.gone.get(rank.index()).is_some_and(|gone| gone.load(Ordering::Acquire))
    }

    /// A client is told of ends from now on, and of those that were told before it listened.
    pub fn listen(&self, client: ClientId, listener: PeerNews) {
        lock(&self.listeners).push((client, listener.clone()));
        // Behind it: of an end that is told meanwhile at least one of the two tells. Told twice it does no harm.
        for rank in (0..self.gone.len() as u32).map(Rank).filter(|rank| self.is_gone(*rank)) {
            self.tell(rank, client, &listener);
        }
    }

    /// How a rank has ended that is gone, as far as a client is concerned.
    #[cold]
    pub fn end_of(&self, rank: Rank, client: ClientId) -> Fault {
        let left = self.arena.presence(rank) == Presence::Left || self.arena.has_left(rank, client);
        if left { Fault::PeerClosed(rank) } else { Fault::PeerLost(rank) }
    }

    fn tell(&self, rank: Rank, client: ClientId, listener: &PeerNews) {
        let fault = self.end_of(rank, client);
        let cause = matches!(fault, Fault::PeerLost(_)).then_some(LossCause::Exited);
        listener(rank, PeerEvent::Down { fault, incarnation: 0, cause });
    }

    /// A client is told nothing any more.
    pub fn forget(&self, client: ClientId) {
        let of_client = |(of, _): &mut (ClientId, PeerNews)| *of == client;
        let forgotten: Vec<_> = lock(&self.listeners).extract_if(.., of_client).collect();
        // Not under the lock: listeners lead to ports, whose end may ring, and whoever rings looks around.
        drop(forgotten);
    }

    /// A context of a client has left. With the last one of them the other ranks of this node are told that the client has:
    /// whoever is awake looks at the arena, and a rank that has yet to start finds its bell rung.
    #[cold]
    pub fn context_leaves(&self, client: ClientId) {
        let contexts = u32::from(self.arena.layout().shape.contexts);
        let Some(left) = self.left.get(client.index()) else { return };
        if left.fetch_add(1, Ordering::AcqRel) + 1 != contexts {
            return;
        }
        self.arena.client_leaves(self.me, client);
        (0..self.ring.len() as u32)
            .map(Rank)
            .filter(|rank| *rank != self.me)
            .for_each(|rank| self.ring(rank));
    }

    /// Watches a peer's process besides its pipe: the read end of the pipe can outlive it in a process that it forked.
    /// Returns whether the peer need not be looked for again: one that has not joined yet is looked for at each
    /// contact and now and then.
    pub fn watch(&self, rank: Rank) -> bool {
        if rank == self.me || !self.is_local(rank) || self.watched[rank.index()].load(Ordering::Relaxed) {
            return true;
        }
        let Some(process) = self.arena.process(rank) else { return false };
        if self.watched[rank.index()].swap(true, Ordering::AcqRel) {
            return true;
        }
        match process.look() {
            Life::Watched(pidfd) => {
                let data = epoll::EventData::new_u64(u64::from(rank.0) | PIDFD);
                let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                if epoll::add(&self.poll, &pidfd, data, flags).is_err() {
                    return self.watch_later(rank);
                }
                lock(&self.pidfds).push(pidfd);
            }
            Life::Later => return self.watch_later(rank),
            // The caller may hold the progress token, under which the listeners must not be called.
            Life::Ended => {
                lock(&self.ended).push(rank);
                self.news.notify_waiters();
            }
            // The pipe is all there is.
            Life::Unknown => {}
        }
        true
    }

    /// It could not be watched: it is looked for again.
    fn watch_later(&self, rank: Rank) -> bool {
        self.watched[rank.index()].store(false, Ordering::Release);
        false
    }

    /// What tells of ends, on the current runtime.
    pub fn ear(&self) -> std::io::Result<Ear> {
        self.poll.try_clone().and_then(posthaste_core::reactor::register)
    }

    /// Waits for peers to go and tells the listeners, for ever. Every open client has one who does; an end is told by whichever
    /// of them is first.
    pub async fn watch_all(self: Arc<Self>, poll: Ear) {
        let mut pause = FIRST_LOOK;
        loop {
            // Also those that this rank never talks to: it may be waiting to hear from them.
            let mut all = true;
            for rank in 0..self.ring.len() {
                all &= self.watch(Rank(rank as u32));
            }
            let mut news = std::pin::pin!(self.news.notified());
            // What is found from here on wakes this one; what was found before is told here.
            news.as_mut().enable();
            self.take_events();
            let event = async {
                tokio::select! {
                    ready = poll.readable() => ready.map(|mut ready| ready.clear_ready()),
                    () = news => Ok(()),
                }
            };
            let event = match all {
                true => event.await,
                false => match tokio::time::timeout(pause, event).await {
                    Ok(event) => event,
                    Err(_) => {
                        pause = (pause * 2).min(LATER_LOOKS);
                        continue;
                    }
                },
            };
            if event.is_err() {
                return;
            }
            self.take_events();
        }
    }

    /// Rings this rank's own bell again and again, for ever: peers may not see that it sleeps. Whoever is woken looks at all
    /// lanes ([`Inbox::keep_all`](crate::inbox::Inbox::keep_all)).
    pub async fn ring_now_and_then(self: Arc<Self>) {
        tracing::warn!(
            me = %self.me,
            every = ?UNRUNG,
            "this process is refused the system call membarrier, which others of its job rely on: it wakes up now and then"
        );
        loop {
            tokio::time::sleep(UNRUNG).await;
            if let Some(Some(pipe)) = self.ring.get(self.me.index()) {
                ring(pipe);
            }
        }
    }

    fn take_events(&self) {
        // Not under the lock: telling it may run a context's work, which may find the next.
        let ended = std::mem::take(&mut *lock(&self.ended));
        for rank in ended {
            self.gone(rank);
        }
        self.events(|rank| self.gone(rank));
    }

    /// The ranks whose pipe or process has ended since the last look at these.
    fn events(&self, mut ended: impl FnMut(Rank)) {
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        loop {
            let none = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            let found = epoll::wait(&self.poll, &mut events, Some(&none)).unwrap_or(0);
            if found == 0 {
                return;
            }
            for event in &events[..found] {
                ended(Rank((event.data.u64() & !PIDFD) as u32));
            }
        }
    }

    fn gone(&self, rank: Rank) {
        if self.gone[rank.index()].swap(true, Ordering::AcqRel) {
            return;
        }
        self.arena.forget_pending(rank);
        tracing::debug!(me = %self.me, %rank, presence = ?self.arena.presence(rank), "process ended");
        // Not under the lock: what a listener leads to may be a user's, who closes or opens a client.
        let listeners = lock(&self.listeners).clone();
        for (client, listener) in listeners {
            self.tell(rank, client, &listener);
        }
    }
}

/// One client's part of a link: what leases and loans find their way home through.
pub(crate) struct ClientLink {
    pub link: Arc<Link>,
    pub client: ClientId,
    pub me: Endpoint,
    /// Loans that were dropped unsent, as words of their pages.
    returned_loans: Mutex<Vec<u64>>,
    /// Whether there may be any.
    pub any_loans_returned: AtomicBool,
    /// Whether the endpoint sleeps until there is room, which they make.
    pub waits_for_room: AtomicBool,
}

impl ClientLink {
    pub fn new(link: Arc<Link>, client: ClientId, me: Endpoint) -> ClientLink {
        ClientLink {
            link,
            client,
            me,
            returned_loans: Mutex::default(),
            any_loans_returned: AtomicBool::new(false),
            waits_for_room: AtomicBool::new(false),
        }
    }

    /// The loans that were dropped unsent, each once. Whoever goes to sleep looks here last: from then on the one that returns a
    /// loan, which takes the same lock, sees that it waits.
    pub fn returned_loans(&self) -> Vec<u64> {
        let mut returned = lock(&self.returned_loans);
        self.any_loans_returned.store(false, Ordering::Relaxed);
        std::mem::take(&mut *returned)
    }

    /// How a rank has ended that is gone, or whose client is.
    #[cold]
    pub fn end_of(&self, rank: Rank) -> Fault {
        self.link.end_of(rank, self.client)
    }

    pub fn endpoints(&self) -> usize {
        self.link.arena.layout().shape.endpoints()
    }

    pub fn endpoint(&self, index: usize) -> Endpoint {
        self.link.arena.layout().shape.endpoint(index)
    }

    /// Control pages and ring of a lane.
    pub fn lane(&self, from: Endpoint, to: Endpoint) -> (SharedWords, SharedWords) {
        let layout = self.link.arena.layout();
        let (offset, _) = layout.lane(self.client, from, to);
        (
            SharedWords::new(self.link.arena.part((offset, CONTROL_BYTES))),
            SharedWords::new(self.link.arena.part((offset + CONTROL_BYTES, layout.sizes.lane))),
        )
    }

    pub fn ready_set(&self, of: Endpoint) -> ReadySet<SharedWords> {
        let block = self.link.arena.layout().block(self.client, of);
        ReadySet::new(SharedWords::new(self.link.arena.part(block)), self.endpoints())
    }

    /// Rings the contexts of a rank that sleep while their tasks wait on memory, some of which was written. Whoever names the
    /// rank's memory has committed the blocks of all of them ([`Rouser`]).
    pub fn ring_for_memory(&self, rank: Rank) {
        for context in 0..self.link.arena.layout().shape.contexts {
            self.ready_set(Endpoint::new(rank, ContextId(context))).ring_for_memory(|| self.link.ring(rank));
        }
    }

    /// Rings the endpoint if it sleeps.
    pub fn ring_if_asleep(&self, endpoint: Endpoint) {
        self.ready_set(endpoint).ring_if_asleep(|| self.link.ring(endpoint.rank));
    }
}

/// Rouses one endpoint whose memory this process writes at once.
pub(crate) struct Rouser {
    link: Arc<Link>,
    block: ReadySet<SharedWords>,
    sign: Option<SharedSlice>,
    rank: Rank,
}

impl Rouser {
    pub fn new(link: Arc<Link>, client: ClientId, of: Endpoint) -> Rouser {
        let layout = link.arena.layout();
        let block = link.arena.part(layout.block(client, of));
        let sign = if link.fence == LightFence::Compiler { ready::watching(block) } else { None };
        let block = ReadySet::new(SharedWords::new(block), layout.shape.endpoints());
        Rouser { block, sign, rank: of.rank, link }
    }
}

impl Rouse for Rouser {
    fn rouse(&self) {
        // Between the write and the look at *armed*; partner: the heavy fence of the endpoint that goes to sleep.
        self.link.fence.issue();
        self.block.ring_for_memory(|| self.link.ring(self.rank));
    }

    fn sign(&self) -> Option<SharedSlice> {
        self.sign
    }
}

/// A grant as one word: the life in the low 40 bits, then the grant's number.
pub(crate) fn grant_word(grant: usize, life: u64) -> u64 {
    (life & LIFE_MASK) | (grant as u64) << 40
}

/// The grant's number out of such a word, whatever else that says; a peer may name one beyond those that a lane has.
pub(crate) fn grant_number(word: u64) -> usize {
    (word >> 40) as usize & (GRANT_COUNT.next_power_of_two() - 1)
}

/// Lives of a grant are counted in 40 bits.
pub(crate) const LIFE_MASK: u64 = (1 << 40) - 1;

/// A lease's way home: into the sender's lane.
pub(crate) struct LaneHome {
    pub link: Arc<ClientLink>,
    pub from: Endpoint,
    pub control: SharedWords,
}

impl LeaseOwner for LaneHome {
    fn release(&self, word: u64) {
        let (grant, life) = (grant_number(word), word & LIFE_MASK);
        posthaste_core::failpoint!("grant.return.before");
        if return_grant(&self.control, grant, life, self.link.link.fence) {
            self.link.ring_if_asleep(self.from);
        }
        posthaste_core::failpoint!("grant.return.after");
    }
}

/// A loan's way home, if it was not sent.
pub(crate) struct LoanHome(pub Arc<ClientLink>);

impl LeaseOwner for LoanHome {
    fn release(&self, word: u64) {
        debug_assert!(Page::from_word(word).class > 0);
        let mut returned = lock(&self.0.returned_loans);
        returned.push(word);
        self.0.any_loans_returned.store(true, Ordering::Relaxed);
        drop(returned);
        if self.0.waits_for_room.load(Ordering::Relaxed) {
            self.0.ring_if_asleep(self.0.me);
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.poll.as_fd()
    }
}

#[cfg(all(test, not(posthaste_loom)))]
pub(crate) mod tests {
    use super::*;
    use crate::layout::{Layout, Sizes};
    use posthaste_core::{JobShape, LinuxSysdep, Personality};
    use rustix::fs::MemfdFlags;
    use rustix::pipe::PipeFlags;
    use std::sync::mpsc;

    /// Rank 0's link to ranks whose pipes are broken already.
    pub(crate) fn link_to_the_dead(ranks: u32) -> Link {
        let shape = JobShape { ranks, clients: 1, contexts: 1 };
        let layout =
            Layout::new(shape, Sizes { lane: 1024, pool: 1 << 20, segment: 1 << 20 }).expect("a layout");
        let arena = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&arena, layout.total()).expect("its size");
        let sysdep: Arc<dyn Sysdep> = Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None));
        let arena = Arena::map(arena, layout, None, sysdep.clone()).expect("an arena");
        arena.enter(Rank(0)).expect("an entry");
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
        let (bell, own) = pipe();
        let ring = std::iter::once(own).chain((1..ranks).map(|_| pipe().1)).collect();
        Link::new(arena, bell, ring, sysdep).expect("a link")
    }

    /// A rank's process is found to have ended.
    pub(crate) fn end(link: &Link, rank: Rank) {
        link.gone(rank);
    }

    #[test]
    fn a_bell_never_waits_though_whoever_shares_its_description_says_so() {
        let (bell, own) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
        let common = own.try_clone().expect("a descriptor");
        let own = described_anew(own, OFlags::WRONLY);
        rustix::io::ioctl_fionbio(&common, false).expect("its flag is cleared");
        // Far more than fits.
        for _ in 0..200_000 {
            ring(&own);
        }
        drop((bell, common));
        // What nobody reads any more stays as it is.
        let broken = described_anew(own, OFlags::WRONLY);
        ring(&broken);
    }

    #[test]
    fn who_listens_late_is_told_of_those_who_ended_before() {
        let link = link_to_the_dead(4);
        link.arena.leave(Rank(2));
        (1..4).for_each(|rank| end(&link, Rank(rank)));
        let (sender, told) = mpsc::channel();
        link.listen(
            ClientId(0),
            Arc::new(move |rank, event| sender.send((rank, event)).expect("the test waits")),
        );
        let lost = |rank| (Fault::PeerLost(rank), Some(LossCause::Exited));
        let ends = [lost(Rank(1)), (Fault::PeerClosed(Rank(2)), None), lost(Rank(3))];
        for (rank, (fault, cause)) in (1..4).map(Rank).zip(ends) {
            assert_eq!(told.try_recv(), Ok((rank, PeerEvent::Down { fault, incarnation: 0, cause })));
        }
    }

    #[test]
    fn telling_of_one_death_may_find_the_next() {
        let link = Arc::new(link_to_the_dead(4));
        let (sender, told) = mpsc::channel();
        let seeing = Arc::downgrade(&link);
        link.listen(
            ClientId(0),
            Arc::new(move |rank, event| {
                sender.send((rank, event)).expect("the test waits");
                // Another client may be closed meanwhile, and be waited for.
                if let Some(link) = seeing.upgrade() {
                    std::thread::spawn(move || link.forget(ClientId(9))).join().expect("no panic");
                }
                // What a context that is told does: it rings others, and whoever rings looks around.
                if let Some(link) = seeing.upgrade() {
                    link.glanced.store(0, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(GLANCE));
                    link.ring(Rank(3));
                }
            }),
        );
        lock(&link.ended).push(Rank(2));
        let telling = link.clone();
        std::thread::spawn(move || {
            telling.take_events();
            telling.take_events();
        });
        let mut ranks: Vec<u32> = Vec::new();
        for _ in 1..4 {
            // Only a watchdog: telling waits for nothing.
            let (rank, event) = told.recv_timeout(Duration::from_secs(30)).expect("told of all");
            let cause = Some(LossCause::Exited);
            assert_eq!(event, PeerEvent::Down { fault: Fault::PeerLost(rank), incarnation: 0, cause });
            ranks.push(rank.0);
        }
        assert_eq!(ranks[0], 2);
        ranks.sort_unstable();
        assert_eq!(ranks, [1, 2, 3], "each once");
        assert!((1..4).all(|rank| link.is_gone(Rank(rank))) && !link.is_gone(Rank(0)));
    }
}
