//! A job as its ranks see it.

mod messages;
mod operations;

use crate::error::{Error, JoinError};
use crate::place::Place;
use posthaste_core::Face;
use posthaste_core::engine::EngineConfig;
use posthaste_core::messager::ClientParts;
use posthaste_core::{
    Caps, Client, ClientId, Context, ContextId, Device, Fault, Handle, JobShape, LossCause, Messager, Rank,
    RegisterError, Stats,
};
use posthaste_protocols::{
    Collectives, Counter, Exchange, LayoutAccess, Liveness, ManyToMany, Persistent, Pulse, persistent,
};
use std::sync::Arc;

/// This rank's part in a job, for one client of the process. Cheap to clone.
///
/// Dropping it leaves nothing: only [`leave`](Job::leave) does. A process that ends without it, even with exit code 0, has
/// died for the others: they get [`Fault::PeerLost`], and the collective operations of the world are broken.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// assert_eq!((job.rank(), job.size()), (posthaste::Rank(0), 1));
/// let twice = job.service("twice", |number: u64| async move { 2 * number })?;
/// job.barrier().await?;
/// let right = job.rank().next(job.size());
/// assert_eq!(twice.call(right, 21).await?, 42);
/// # job.leave().await
/// # }
/// ```
#[derive(Clone)]
pub struct Job {
    place: Arc<Place>,
    client: Arc<Client>,
    exchange: Exchange,
    layouts: LayoutAccess,
    collectives: Collectives,
    persistent: Persistent,
    many: ManyToMany,
    pulse: Pulse,
    handle: Handle,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("rank", &self.rank()).field("size", &self.size()).finish_non_exhaustive()
    }
}

impl Job {
    pub(crate) async fn open(place: Place) -> Result<Job, JoinError> {
        Job::with_client(Arc::new(place), ClientId(0)).await
    }

    async fn with_client(place: Arc<Place>, id: ClientId) -> Result<Job, JoinError> {
        let devices = place.take_client(id)?;
        let opened = Job::open_client(place.clone(), id, devices).await;
        if opened.is_err() && place.give_back(id) {
            let ended = tokio::task::spawn_blocking(move || place.end()).await;
            ended.map_err(|_| JoinError::Runtime("the runtime was shut down while leaving"))?;
        }
        opened
    }

    async fn open_client(
        place: Arc<Place>,
        id: ClientId,
        devices: Vec<Arc<dyn Device>>,
    ) -> Result<Job, JoinError> {
        let settings = &place.settings;
        let client = Client::new(ClientParts {
            id,
            devices,
            sysdep: place.sysdep.clone(),
            config: EngineConfig {
                credits: settings.credits,
                credit_bytes: settings.credit_bytes,
                answer_bytes: settings.answer_bytes,
                oversend: settings.oversend,
                rendezvous_bytes: settings.rendezvous_bytes,
                pattern_slots: settings.pattern_slots,
                ..EngineConfig::default()
            },
            spin: settings.spin,
            driver_thread: settings.driver == posthaste_launch::Driver::Thread,
        })?;
        let exchange = Exchange::new(&client)?;
        let layouts = LayoutAccess::new(&client)?;
        let many = ManyToMany::new(&client)?;
        let pulse = Pulse::new(&client)?;
        let collectives = Collectives::new(&client, place.hosts())?;
        let collectives = collectives.with_windows(&client, &exchange, &layouts)?;
        let collectives = collectives.with_stage_bytes(settings.stage_bytes);
        let persistent = persistent::Registration::new(&client)?;
        let incarnation = place.incarnation();
        if incarnation > 0 {
            // The others' operations have counted without it.
            let rank = place.rank();
            let stale = Fault::StaleHandle { rank, held: incarnation - 1, now: incarnation };
            exchange.outlive(stale);
            collectives.outlive(incarnation, stale);
        }
        client.open().await?;
        let handle = client.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        tracing::debug!(rank = %handle.me().rank, client = id.0, "joined");
        let client = Arc::new(client);
        let persistent = persistent.with(client.clone());
        Ok(Job { place, client, exchange, layouts, collectives, persistent, many, pulse, handle })
    }

    /// Another client of the process: its messages, protocols and contexts are its own. The job fixes how many
    /// there are; each is handed out once.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo_with(2, 1).await?;
    /// // Two libraries of one process that do not see each other's messages.
    /// let other = job.client(1).await?;
    /// let (a, mut ones) = job.stream("note")?;
    /// let (_, mut others) = other.stream("note")?;
    /// a.send(job.rank(), "for the first client").await?;
    /// assert!(ones.recv().await.is_some());
    /// assert!(others.try_recv().is_none());
    /// assert!(job.client(1).await.is_err(), "it was handed out");
    /// other.leave().await?;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If there is no such client or it was handed out before, if this is not a Tokio runtime with I/O and time, or if the
    /// client cannot be opened. It may be asked for again then, unless a device over sockets was about to be opened.
    ///
    /// # Cancel safety
    /// Not cancel safe where a thread drives the contexts (`POSTHASTE_DRIVER=thread`): given up half-way, the number
    /// stays taken and the client is never closed, so that the others may see a lost rank. Elsewhere it waits for
    /// nothing unless it fails.
    pub async fn client(&self, number: u16) -> Result<Job, Error> {
        if self.place.settings.driver != posthaste_launch::Driver::Thread {
            crate::join::check_runtime()?;
        }
        Ok(Job::with_client(self.place.clone(), ClientId(number)).await?)
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.handle.me().rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.shape().ranks as usize
    }

    /// Ranks, clients and contexts.
    #[must_use]
    pub fn shape(&self) -> JobShape {
        self.client.peers()
    }

    /// All ranks, in order.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (news, mut all) = job.stream("news")?;
    /// for rank in job.ranks().filter(|rank| *rank != job.rank()) {
    ///     news.send(rank, "to all others").await?;
    /// }
    /// assert_eq!(job.ranks().count(), job.size());
    /// assert!(all.try_recv().is_none(), "there are no others");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.shape().ranks).map(Rank)
    }

    /// The face of context 0 that works from anywhere.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::components::protocols::flush;
    /// // What works on any context is given one by its handle.
    /// assert_eq!(job.handle().me().rank, job.rank());
    /// flush::fence(job.handle()).await?;
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The face of another context that works from anywhere.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo_with(1, 2).await?;
    /// use posthaste::ContextId;
    /// let (page, mut pages) = job.stream("page")?;
    /// // Messages that go through different contexts do not wait for each other.
    /// for context in [ContextId(0), ContextId(1)] {
    ///     let handle = job.context_handle(context).expect("there are two");
    ///     page.through(handle).send(job.rank(), vec![0; 100_000]).await?;
    /// }
    /// assert!(pages.recv().await.is_some() && pages.recv().await.is_some());
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn context_handle(&self, context: ContextId) -> Option<&Handle> {
        self.client.contexts().get(context.index())
    }

    /// Takes a context for one task or thread alone: its operations need no locked instruction. `None` if there is no
    /// such context or somebody owns it, or a handler of it asks. It blocks the thread while another one is at the context, for
    /// ten seconds at most; `None` after that, too.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{ContextId, Message, Scope};
    /// let arrived = job.counter();
    /// let count = arrived.clone();
    /// let hello = job.register("hello", move |_: Message, _: &mut Scope| count.add(1))?;
    /// let context = job.own_context(ContextId(0)).expect("nobody else owns it");
    /// hello.on(&context).send(job.rank(), "from the owner").await?;
    /// arrived.reach_on(&context, 1).await;
    /// // What goes through a handle gets on only while the owner drives the context.
    /// job.drive(&context, job.barrier()).await?;
    /// drop(context);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn own_context(&self, context: ContextId) -> Option<Context> {
        Context::new(self.context_handle(context)?)
    }

    /// The messager beneath.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Messager;
    /// use posthaste::components::protocols::Namespace;
    /// // What a library is given that registers messages of its own, under its own prefix.
    /// let library = Namespace::new(&**job.messager(), "library");
    /// assert_eq!((library.peers(), library.contexts().len()), (job.shape(), 1));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn messager(&self) -> &Arc<Client> {
        &self.client
    }

    /// What can be done with every rank.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let caps = job.caps();
    /// // Memory is mapped where all ranks are on one host: puts are then done by who calls them.
    /// assert!(caps.mappable && caps.ordered);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn caps(&self) -> Caps {
        *self.client.caps().common()
    }

    /// What can be done with that rank: that of the device which reaches it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let caps = job.caps_of(job.rank());
    /// assert_eq!(caps.name, "shm");
    /// // Up to so many bytes a message is one packet.
    /// assert!(caps.max_eager >= caps.max_inline);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn caps_of(&self, rank: Rank) -> Caps {
        *self.client.caps().of(rank)
    }

    /// What context 0 has done so far. It may block the thread: where another one is at the context, it waits for that one for
    /// up to a second, and tells zeros then. Whoever owns the context asks [`Context::stats`], and a handler [`Scope::stats`](crate::Scope::stats).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (note, mut notes) = job.stream("note")?;
    /// let before = job.stats();
    /// note.send(job.rank(), "ten bytes!").await?;
    /// assert!(notes.recv().await.is_some());
    /// let after = job.stats();
    /// assert_eq!(after.messages_sent - before.messages_sent, 1);
    /// assert_eq!(after.bytes_received - before.bytes_received, 10);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.handle.stats()
    }

    /// Sets who is told of errors that no future waits for: lost peers, refused messages. A rank that dies is told
    /// once, as [`Fault::PeerLost`], and one that leaves as [`Fault::PeerClosed`], whether or not anything was under way
    /// with it. The handler runs inside `advance`: keep it short. It replaces the one that was set before: a library leaves this
    /// to the program, and learns of its own peers by its operations.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// job.on_error(|fault| eprintln!("job: {fault}"));
    /// # job.leave().await
    /// # }
    /// ```
    pub fn on_error(&self, handler: impl Fn(Fault) + Send + Sync + 'static) {
        self.client.on_error(handler);
    }

    /// The node of a rank: ranks of one node share memory. Numbers are those of the job, the same on all ranks; `None` for a rank
    /// that there is not. [`Group::split_by_node`](crate::Group::split_by_node) makes a group of each node's.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let here = job.node_of(job.rank());
    /// let beside = job.ranks().filter(|rank| job.node_of(*rank) == here);
    /// assert!(beside.count() >= 1); // this rank at least
    /// assert_eq!(job.node_of(posthaste::Rank(1000)), None);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn node_of(&self, rank: Rank) -> Option<u32> {
        (rank.index() < self.size()).then(|| self.place.node_of(rank))
    }

    /// Which *incarnation* of its rank this process is: 0, or how often the rank died and was started again
    /// ([`Launch::restart`](crate::launcher::Launch::restart), or another launcher that starts a process anew).
    ///
    /// A rank that was started again has nothing of its predecessor: no messages, no memory, no part in windows and groups.
    /// The collective operations of the world, [`barrier`](Job::barrier) and [`shmalloc`](Job::shmalloc) among them, stay
    /// broken for all ranks of a job that has lost one; on this rank they end with [`Fault::StaleHandle`] at once. What all
    /// ranks that live do together from then on they do in a new [`Group`](crate::Group)
    /// ([`subset`](Collectives::subset) or [`on_the_fly`](Collectives::on_the_fly) of [`collectives`](Job::collectives)),
    /// and memory is shared by [`region`](Job::region) and [`remote_region`](Job::remote_region).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// if job.incarnation() == 0 {
    ///     job.barrier().await?; // nobody waits here for a rank that comes again
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn incarnation(&self) -> u32 {
        self.place.incarnation()
    }

    /// The latest incarnation of a rank that this one can reach, or could until it died; 0 is the first one.
    #[must_use]
    pub fn incarnation_of(&self, rank: Rank) -> u32 {
        self.client.incarnation_of(rank)
    }

    /// Why a rank counts as lost ([`Fault::PeerLost`]): of the latest of its incarnations that does. `None` while all of them
    /// live, and after a clean leave. To be asked where an operation, or the handler of errors, was told of the loss. Where another
    /// rank was first to tell of it, as in an operation of a group, it is `None` until this one has found out by itself.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// for rank in job.ranks() {
    ///     if let Err(error) = job.flush(rank).await {
    ///         match job.loss_of(rank) {
    ///             Some(cause) => println!("rank {rank} is lost: {cause}"),
    ///             None => return Err(error.into()),
    ///         }
    ///     }
    /// }
    /// assert_eq!(job.loss_of(job.rank()), None);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn loss_of(&self, rank: Rank) -> Option<LossCause> {
        self.client.loss_of(rank)
    }

    /// Waits until a later incarnation of the rank than `after` can be reached, and returns its number. Until then all
    /// that is asked of a rank that died ends with [`Fault::PeerLost`]; from then on messages, calls and regions reach the
    /// new incarnation, and what belongs to an earlier one (windows, regions, patterns) ends with [`Fault::StaleHandle`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Error, Fault, Rank};
    /// use std::time::Duration;
    /// let lost = Rank(0);
    /// let held = job.incarnation_of(lost);
    /// // As one waits for a rank that the launcher starts again; this one has not died.
    /// let again = job.within(Duration::from_millis(5), job.peer_restarted(lost, held)).await;
    /// assert!(matches!(again, Err(Error::Fault(Fault::DeadlineExceeded))));
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the job is left meanwhile.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn peer_restarted(&self, rank: Rank, after: u32) -> Result<u32, Error> {
        Ok(self.client.restarted(rank, after).await?)
    }

    /// Sets who is told, inside `advance`, of ranks that were started again: the rank, and which incarnation of it can be
    /// reached now. It replaces the handler that was set before.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// let again = Arc::new(AtomicU32::new(0));
    /// let count = again.clone();
    /// job.on_peer_restarted(move |rank, incarnation| {
    ///     eprintln!("rank {rank} is back, as incarnation {incarnation}");
    ///     count.fetch_add(1, Ordering::Relaxed);
    /// });
    /// job.barrier().await?;
    /// assert_eq!(again.load(Ordering::Relaxed), 0, "nobody died");
    /// # job.leave().await
    /// # }
    /// ```
    pub fn on_peer_restarted(&self, handler: impl Fn(Rank, u32) + Send + Sync + 'static) {
        self.client.on_restart(handler);
    }

    /// Sets who is told of peers that something waits for and that do not answer for so long: stopped, or held up by a task
    /// that never yields, or not joined yet; and of those that get on again. Such a peer lives: what waits for it goes on to
    /// wait, or meets its own deadline ([`within`](Job::within)), and no memory is reused. While nothing waits nothing is
    /// sent. Told once each, by a task of the runtime in which the job was joined; a rank that is lost is told to
    /// [`on_error`](Job::on_error) alone.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Liveness;
    /// job.on_peer_stalled(std::time::Duration::from_secs(1), |event| match event {
    ///     Liveness::PeerStalled(rank) => eprintln!("rank {rank} does not answer"),
    ///     Liveness::PeerResumed(rank) => eprintln!("rank {rank} is back"),
    ///     _ => {}
    /// });
    /// # job.leave().await
    /// # }
    /// ```
    pub fn on_peer_stalled(
        &self,
        after: std::time::Duration,
        handler: impl Fn(Liveness) + Send + Sync + 'static,
    ) {
        self.pulse.watch(after, handler);
    }

    /// A counter that handlers add to and tasks wait for.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let replies = job.counter();
    /// let count = replies.clone();
    /// let reply = job.register("reply", move |_: Message, _: &mut Scope| count.add(1))?;
    /// for _ in 0..3 {
    ///     reply.send(job.rank(), "").await?;
    /// }
    /// replies.reach(3).await;
    /// assert_eq!(replies.value(), 3);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn counter(&self) -> Counter {
        Counter::new(self.handle.clone())
    }

    /// Leaves the job in order: what was sent is on its way, peers see a clean leave. So it takes as long as a peer takes that
    /// has to make room first, for instance one that is stopped. What waits for a receiver to consume something ends with
    /// [`Fault::Shutdown`]: who leaves waits for nobody's consumer, which might itself wait for one here. What others send under
    /// names that nobody has here is refused from now on, as after [`ready`](Job::ready).
    ///
    /// What others ask of this rank afterwards (puts, gets, calls) ends with [`Fault::PeerClosed`]: let all meet in a
    /// [`barrier`](Job::barrier) first.
    ///
    /// A [`Context`] that is still owned has to be polled by its owner meanwhile, or be dropped before: what waits there
    /// is given up after a second otherwise, with a warning.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (note, mut notes) = job.stream("note")?;
    /// job.clone().leave().await?;
    /// // Clones are still there, and what they start ends with an error.
    /// assert!(note.send(job.rank(), "too late").await.is_err());
    /// assert!(notes.recv().await.is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the runtime is shut down meanwhile; what cannot be delivered any more was reported to its own future.
    ///
    /// # Cancel safety
    /// Not cancel safe: given up half-way, the others may see a lost rank.
    pub async fn leave(self) -> Result<(), Error> {
        // Whoever leaves registers nothing more. What others send under names that nobody has here would stay in front of what
        // they send besides, and keep a peer from leaving that leaves as well.
        self.ready();
        // Everything queued is delivered first: a peer that died meanwhile ends its part with an error.
        for context in self.client.contexts() {
            empty(context).await;
        }
        self.pulse.stop();
        self.client.close().await;
        tracing::debug!(rank = %self.handle.me().rank, client = self.client.id().0, "left");
        if self.place.client_left(self.client.id()) {
            let place = self.place.clone();
            let ended = tokio::task::spawn_blocking(move || place.end()).await;
            ended.map_err(|_| JoinError::Runtime("the runtime was shut down while leaving"))?;
        }
        Ok(())
    }
}

/// Turns of other tasks between two looks whether a queue is empty, before the looks are a millisecond apart.
const PROMPT_LOOKS: u64 = 256;
/// How long the owner of a context is waited for.
const OWNER: std::time::Duration = std::time::Duration::from_secs(1);

/// Waits until nothing is queued in a context any more.
async fn empty(context: &Handle) {
    for look in 0u64.. {
        let posted = context.post(|scope| scope.has_queued());
        let answer = std::future::poll_fn(|cx| posted.poll(cx));
        let queued = if context.is_owned() {
            let Ok(queued) = tokio::time::timeout(OWNER, answer).await else {
                let context = context.me();
                tracing::warn!(%context, "its owner does not poll it: what is queued there is given up");
                return;
            };
            queued
        } else {
            answer.await
        };
        if !queued {
            return;
        }
        context.advance();
        if look < PROMPT_LOOKS {
            tokio::task::yield_now().await;
        } else {
            // The peer is slow, or stopped: it is not worth a processor.
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}
