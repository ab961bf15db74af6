//! A job as its ranks see it.

use crate::error::{Error, JoinError};
use crate::place::Place;
use bytes::Bytes;
use posthaste_core::engine::{EngineConfig, FifoOptions, PatternError};
use posthaste_core::messager::ClientParts;
use posthaste_core::{
    Caps, Client, ClientId, Context, ContextId, Device, Fault, Handle, JobShape, Messager, Rank,
    RegisterError, Scope, Stats,
};
use posthaste_protocols::{
    ActiveMessage, Buffer, Collectives, Control, Counter, Element, Exchange, Fifo, Fill, First, Group,
    LayoutAccess, ManyToMany, Message, MessageStream, OwnedMessage, Pattern, Persistent, Recorder, Region,
    RegionKey, RemoteRegion, Service, ServiceOptions, Window, codec, flush, handler, pattern, persistent,
    service, stream,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// This rank's part in a job, for one client of the process. Cheap to clone; the last clone does not leave the job:
/// [`leave`](Job::leave) does, and so does the end of the process.
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
        if opened.is_err() {
            place.give_back(id);
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
                oversend: settings.oversend,
                rendezvous_bytes: settings.rendezvous_bytes,
                ..EngineConfig::default()
            },
            spin: settings.spin,
            driver_thread: settings.driver == posthaste_launch::Driver::Thread,
        })?;
        let exchange = Exchange::new(&client)?;
        let layouts = LayoutAccess::new(&client)?;
        let many = ManyToMany::new(&client)?;
        let collectives = Collectives::new(&client, place.hosts())?;
        let collectives = collectives.with_windows(&client, &exchange, &layouts)?;
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
        Ok(Job { place, client, exchange, layouts, collectives, persistent, many, handle })
    }

    /// Another client of the process (P04): its messages, protocols and contexts are its own. The job fixes how many
    /// there are; each is handed out once.
    ///
    /// # Errors
    /// If there is no such client or it was handed out before.
    pub async fn client(&self, number: u16) -> Result<Job, Error> {
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
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.shape().ranks).map(Rank)
    }

    /// The face of context 0 that works from anywhere.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The face of another context that works from anywhere.
    #[must_use]
    pub fn context_handle(&self, context: ContextId) -> Option<&Handle> {
        self.client.contexts().get(context.index())
    }

    /// Takes a context for one task or thread alone: its operations need no locked instruction. `None` if there is no
    /// such context or somebody owns it.
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
    #[must_use]
    pub fn messager(&self) -> &Arc<Client> {
        &self.client
    }

    /// What can be done with every rank.
    #[must_use]
    pub fn caps(&self) -> Caps {
        *self.client.caps().common()
    }

    /// What can be done with that rank: that of the device which reaches it.
    #[must_use]
    pub fn caps_of(&self, rank: Rank) -> Caps {
        *self.client.caps().of(rank)
    }

    /// What context 0 has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.handle.stats()
    }

    /// Sets who is told of errors that no future waits for (D17): lost peers, refused messages. A rank that dies is told
    /// once, as [`Fault::PeerLost`], and one that leaves as [`Fault::PeerClosed`], whether or not anything was under way
    /// with it. The handler runs inside `advance`: keep it short.
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

    /// Which *incarnation* of its rank this process is: 0, or how often the rank died and was started again
    /// ([`Launch::restart`](crate::launcher::Launch::restart), or another launcher that starts a process anew).
    ///
    /// A rank that was started again has nothing of its predecessor: no messages, no memory, no part in windows and groups.
    /// The collective operations of the world, [`barrier`](Job::barrier) and [`shmalloc`](Job::shmalloc) among them, stay
    /// broken for all ranks of a job that has lost one; on this rank they end with [`Fault::StaleHandle`] at once. What all
    /// ranks that live do together from then on they do in a new [`Group`]
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

    /// Waits until a later incarnation of the rank than `after` can be reached, and returns its number. Until then all
    /// that is asked of a rank that died ends with [`Fault::PeerLost`]; from then on messages, calls and regions reach the
    /// new incarnation, and what belongs to an earlier one (windows, regions, patterns) ends with [`Fault::StaleHandle`].
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
    /// reached now.
    pub fn on_peer_restarted(&self, handler: impl Fn(Rank, u32) + Send + Sync + 'static) {
        self.client.on_restart(handler);
    }

    /// A counter that handlers add to and tasks wait for.
    #[must_use]
    pub fn counter(&self) -> Counter {
        Counter::new(self.handle.clone())
    }

    /// Registers a message whose handler runs inside `advance`, for each message, in order. It must be short.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Message, Scope};
    /// let words = job.counter();
    /// let count = words.clone();
    /// let text = job.register("text", move |message: Message, _: &mut Scope| {
    ///     count.add(message.text().split(' ').count() as u64);
    /// })?;
    /// text.send(job.rank(), "three short words").await?;
    /// text.send(job.rank(), "and info").info(b"up to 112 bytes").await?;
    /// words.reach(5).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register<H>(&self, name: &str, handler: H) -> Result<ActiveMessage, RegisterError>
    where
        H: Fn(Message<'_>, &mut Scope<'_>) + Send + Sync + 'static,
    {
        handler::register(&*self.client, self.handle.clone(), name, 0, handler)
    }

    /// Registers a control (D14): sixteen bytes that get past messages, puts and gets, and are ordered only among
    /// themselves. The handler runs inside `advance`, with the rank that sent it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let stops = job.counter();
    /// let count = stops.clone();
    /// let stop = job.register_control("stop", move |_from, payload: [u8; 16], _| count.add(u64::from(payload[0])))?;
    /// stop.send(job.rank(), [1; 16]).await?;
    /// stops.reach(1).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible.
    pub fn register_control<H>(&self, name: &str, handler: H) -> Result<Control, RegisterError>
    where
        H: Fn(Rank, [u8; 16], &mut Scope<'_>) + Send + Sync + 'static,
    {
        posthaste_protocols::control::register(&*self.client, self.handle.clone(), name, handler)
    }

    /// Registers a message of one plain-old-data type; ranks that registered another type under the name refuse it.
    /// Send it with [`TypedMessage::send`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let sum = job.counter();
    /// let total = sum.clone();
    /// let add = job.register_typed("add", move |pair: [u32; 2], _source, _scope: &mut posthaste::Scope| {
    ///     total.add(u64::from(pair[0]) + u64::from(pair[1]));
    /// })?;
    /// add.send(job.rank(), &[40, 2]).await?;
    /// sum.reach(42).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register_typed<T, H>(&self, name: &str, handler: H) -> Result<TypedMessage<T>, RegisterError>
    where
        T: FromBytes + IntoBytes + Immutable + 'static,
        H: Fn(T, Rank, &mut Scope<'_>) + Send + Sync + 'static,
    {
        let schema = codec::schema_of::<T>("plain");
        let typed = move |message: Message<'_>, scope: &mut Scope<'_>| match message.read::<T>(0) {
            Some(value) if message.len() == size_of::<T>() => handler(value, message.source(), scope),
            _ => tracing::warn!(source = %message.source(), "message of the wrong length for its type"),
        };
        let message = handler::register(&*self.client, self.handle.clone(), name, schema, typed)?;
        Ok(TypedMessage { message, element: std::marker::PhantomData })
    }

    /// Registers a message whose handler runs at the first packet and chooses the buffer (D09).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Fill, First};
    /// let heads = job.counter();
    /// let count = heads.clone();
    /// let head = job.register_first_packet("head", move |first: First<'_>, _: &mut posthaste::Scope| {
    ///     let count = count.clone();
    ///     // The first four bytes are enough; the rest goes nowhere.
    ///     let buffer = bytes::BytesMut::with_capacity(first.total.min(4) as usize);
    ///     Fill::Into { buffer, limit: 4, done: Box::new(move |_, head| count.add(head.len() as u64)) }
    /// })?;
    /// head.send(job.rank(), vec![7; 100_000]).await?;
    /// heads.reach(4).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register_first_packet<H>(&self, name: &str, handler: H) -> Result<ActiveMessage, RegisterError>
    where
        H: Fn(First<'_>, &mut Scope<'_>) -> Fill + Send + Sync + 'static,
    {
        handler::register_first_packet(&*self.client, self.handle.clone(), name, handler)
    }

    /// Registers a message that is delivered to a stream; a slow consumer slows its senders.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (number, mut numbers) = job.stream("number")?;
    /// for n in 1..=3u64 {
    ///     number.send(job.rank(), n.to_le_bytes()).await?;
    /// }
    /// for n in 1..=3u64 {
    ///     let message = numbers.recv().await.expect("the job goes on");
    ///     assert_eq!(message.read::<u64>(0), Some(n));
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn stream(&self, name: &str) -> Result<(ActiveMessage, MessageStream), RegisterError> {
        stream::register_stream(&*self.client, self.handle.clone(), name)
    }

    /// Registers a message whose async handler runs in a task of its own, at most `limit` at once.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let done = job.counter();
    /// let count = done.clone();
    /// let work = job.register_spawned("work", 2, move |message: posthaste::OwnedMessage| {
    ///     let count = count.clone();
    ///     async move {
    ///         tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    ///         count.add(message.len() as u64);
    ///     }
    /// })?;
    /// work.send(job.rank(), "twelve bytes").await?;
    /// done.reach(12).await;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn register_spawned<H, T>(
        &self,
        name: &str,
        limit: usize,
        handler: H,
    ) -> Result<ActiveMessage, RegisterError>
    where
        H: Fn(OwnedMessage) -> T + Clone + Send + Sync + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        stream::register_spawned(&*self.client, self.handle.clone(), name, limit, handler)
    }

    /// Registers a service: an async handler from request to reply, each in a task of its own.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use std::time::Duration;
    /// let sum = job.service("sum", |numbers: Vec<u64>| async move { numbers.iter().sum::<u64>() })?;
    /// job.barrier().await?;
    /// assert_eq!(sum.call(job.rank(), vec![1, 2, 3]).await?, 6);
    /// assert_eq!(sum.call_within(job.rank(), vec![], Duration::from_secs(5)).await?, 0);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn service<H, Q, A, T>(&self, name: &str, handler: H) -> Result<Service<Q, A>, RegisterError>
    where
        H: Fn(Q) -> T + Clone + Send + Sync + 'static,
        T: Future<Output = A> + Send + 'static,
        Q: Serialize + DeserializeOwned + Send + 'static,
        A: Serialize + DeserializeOwned + Send + 'static,
    {
        self.service_with(name, ServiceOptions::default(), move |request, _| handler(request))
    }

    /// As [`service`](Job::service), with options, and told who asks.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::{Rank, ServiceOptions};
    /// let who = job.service_with("who", ServiceOptions::default(), |_: (), from: Rank| async move { from.0 })?;
    /// assert_eq!(who.call(job.rank(), ()).await?, 0);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn service_with<H, Q, A, T>(
        &self,
        name: &str,
        options: ServiceOptions,
        handler: H,
    ) -> Result<Service<Q, A>, RegisterError>
    where
        H: Fn(Q, Rank) -> T + Clone + Send + Sync + 'static,
        T: Future<Output = A> + Send + 'static,
        Q: Serialize + DeserializeOwned + Send + 'static,
        A: Serialize + DeserializeOwned + Send + 'static,
    {
        service::register_async(&*self.client, self.handle.clone(), name, options, handler)
    }

    /// Registers a service of bytes whose handler answers at once, inside `advance`.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let echo = job.service_inline("echo", |request, _| Ok(request.to_bytes().into()))?;
    /// let reply = echo.call_bytes(job.rank(), "hello").await?;
    /// assert_eq!(reply.as_bytes(), b"hello");
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the name is taken or impossible, or the job was left.
    pub fn service_inline<H>(&self, name: &str, handler: H) -> Result<Service<Bytes, Bytes>, RegisterError>
    where
        H: Fn(Message<'_>, &mut Scope<'_>) -> Result<Buffer, Fault> + Send + Sync + 'static,
    {
        service::register_inline(&*self.client, self.handle.clone(), name, handler)
    }

    /// Makes a window over all ranks (W01): collective, `len` elements on this rank, 0 allowed. The memory is zero.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let window = job.shmalloc::<u64>(job.size()).await?;
    /// let (me, right) = (job.rank(), job.rank().next(job.size()));
    /// window.put(right, me.index(), 42).await?;
    /// job.barrier().await?;
    /// assert_eq!(window.load(0), Some(42));
    /// window.free().await?;
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// If memory cannot be had here or on another rank, or as for [`barrier`](Job::barrier). Where a rank is lost
    /// meanwhile, some survivors may have the window and others not.
    ///
    /// # Cancel safety
    /// Not cancel safe: the other ranks wait until this one leaves.
    pub async fn shmalloc<T: Element>(&self, len: usize) -> Result<Window<T>, Error> {
        Ok(Window::allocate(&self.client, &self.exchange, &self.layouts, len).await?)
    }

    /// Allocates a region of `len` bytes on this rank, zeroed.
    ///
    /// # Errors
    /// If memory cannot be had.
    pub async fn region(&self, len: usize) -> Result<Region, Error> {
        Ok(Region::allocate(&self.client, len).await?)
    }

    /// A region of a peer, by the key that the peer told.
    ///
    /// # Errors
    /// If the key names nothing that the peer shares.
    pub async fn remote_region(&self, key: RegionKey) -> Result<RemoteRegion, Error> {
        Ok(RemoteRegion::open(&self.client, key).await?)
    }

    /// Records operations, to be replayed at almost no cost; nothing is carried out. See [`Pattern`].
    ///
    /// # Errors
    /// If the closure fails, or records nothing.
    pub async fn record(
        &self,
        recording: impl FnOnce(&mut Recorder) -> Result<(), PatternError>,
    ) -> Result<Pattern, Error> {
        Ok(pattern::record(&self.handle, recording).await?)
    }

    /// Makes an injection FIFO: messages and patterns that go through it wait for, and delay, nothing that goes another way.
    /// See [`Fifo`].
    ///
    /// # Errors
    /// If the job was left.
    pub async fn fifo(&self, options: FifoOptions) -> Result<Fifo, Error> {
        Ok(Fifo::open(&self.handle, options).await.map_err(PatternError::from)?)
    }

    /// Declares that all protocols of this client are registered: messages for unknown ones, held until now, are
    /// refused from now on. The first [`barrier`](Job::barrier) implies it; other collective calls do not, so that a
    /// handler can capture a window that was made before.
    pub fn ready(&self) {
        for context in self.client.contexts() {
            context.post_run(|scope| scope.declare_ready());
        }
    }

    /// Waits until everything this context did towards a rank has taken effect there.
    ///
    /// # Errors
    /// If the rank is unknown or gone.
    pub async fn flush(&self, rank: Rank) -> Result<(), Error> {
        Ok(flush::flush(&self.handle, rank).await?)
    }

    /// The same towards all ranks.
    ///
    /// # Errors
    /// If a rank is gone.
    pub async fn fence(&self) -> Result<(), Error> {
        Ok(flush::fence(&self.handle).await?)
    }

    /// Waits until every rank has got here, and implies [`ready`](Job::ready).
    ///
    /// # Errors
    /// If a rank is lost or has left, or calls another collective operation
    /// ([`Fault::CollectiveMismatch`]). From then on every collective operation ends so, on all ranks.
    ///
    /// # Cancel safety
    /// Not cancel safe: a rank that gives up leaves the others waiting until it leaves the job.
    pub async fn barrier(&self) -> Result<(), Error> {
        self.ready();
        Ok(self.exchange.barrier().await?)
    }

    /// Awaits any future of this job while driving an owned context, which nobody else can.
    ///
    /// # Cancel safety
    /// That of the future.
    pub async fn drive<T>(&self, context: &Context, future: impl Future<Output = T>) -> T {
        posthaste_core::context::drive(context, future).await
    }

    /// Gathers a blob of the same length from every rank, by rank. Collective. Typed values go through
    /// [`Group::all_gather`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let blobs = job.all_gather(&job.rank().0.to_le_bytes()).await?;
    /// assert_eq!(blobs.len(), job.size());
    /// assert_eq!(*blobs[0], [0; 4]);
    /// # job.leave().await
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`barrier`](Job::barrier); a blob of another length is another operation.
    pub async fn all_gather(&self, blob: &[u8]) -> Result<Vec<Bytes>, Error> {
        Ok(self.exchange.all_gather(blob).await?)
    }

    /// The group of all ranks; its operations are those of [`Group`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::Reduce;
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// let total = world.all_reduce(&[1.5, 2.5], &Reduce::sum()).await?;
    /// assert_eq!(total, [1.5, 2.5]);
    /// let half = world.split(Some(job.rank().0 % 2), 0).await?.expect("every rank has a colour");
    /// half.barrier().await?;
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn world(&self) -> Group {
        self.collectives.world()
    }

    /// Makes collectives that are recorded once and replayed each time (D29).
    #[must_use]
    pub fn persistent(&self) -> &Persistent {
        &self.persistent
    }

    /// Makes groups of listed ranks, also such as the other members do not know of yet.
    #[must_use]
    pub fn collectives(&self) -> &Collectives {
        &self.collectives
    }

    /// Sends many ranks a buffer each in one call, and receives from many into one buffer (D19).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// use posthaste::{ConnectionManager, Part};
    /// let job = posthaste::solo().await?;
    /// let manager = ConnectionManager::new(8);
    /// let connection = manager.open().await;
    /// let parts = [Part { source: job.rank(), offset: 2, len: 3 }];
    /// let receive = job.many_to_many().receive(connection.id(), 8, &parts)?;
    /// job.many_to_many().send(connection.id(), [(job.rank(), "abc".into())]).await?;
    /// assert_eq!(receive.await?.buffer, *b"\0\0abc\0\0\0");
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn many_to_many(&self) -> &ManyToMany {
        &self.many
    }

    /// Leaves the job in order: what was sent is on its way, peers see a clean leave.
    ///
    /// # Errors
    /// If the runtime is shut down meanwhile; what cannot be delivered any more was reported to its own future.
    ///
    /// # Cancel safety
    /// Not cancel safe: given up half-way, the others may see a lost rank.
    pub async fn leave(self) -> Result<(), Error> {
        // Everything queued is delivered first: a peer that died meanwhile ends its part with an error.
        for context in self.client.contexts() {
            loop {
                let posted = {
                    use posthaste_core::Face;
                    context.post(|scope| scope.has_queued())
                };
                if !std::future::poll_fn(|cx| posted.poll(cx)).await {
                    break;
                }
                context.advance();
                tokio::task::yield_now().await;
            }
        }
        self.client.close().await;
        if self.place.client_left(self.client.id()) {
            let place = self.place.clone();
            let ended = tokio::task::spawn_blocking(move || place.end()).await;
            ended.map_err(|_| JoinError::Runtime("the runtime was shut down while leaving"))?;
        }
        Ok(())
    }
}

/// A registered message of one plain-old-data type.
#[derive(Debug)]
pub struct TypedMessage<T> {
    message: ActiveMessage,
    element: std::marker::PhantomData<fn(T)>,
}

impl<T> Clone for TypedMessage<T> {
    fn clone(&self) -> Self {
        Self { message: self.message.clone(), element: std::marker::PhantomData }
    }
}

impl<T: IntoBytes + Immutable> TypedMessage<T> {
    /// Sends a value.
    ///
    /// # Cancel safety
    /// See [`SendMessage`](crate::SendMessage).
    pub fn send(&self, target: Rank, value: &T) -> posthaste_protocols::SendMessage<'_, Handle> {
        self.message.send(target, Buffer::copy(value.as_bytes()))
    }
}
