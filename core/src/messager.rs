//! The messager: owns the devices that are present and the contexts of one client, and moves all of them.

mod opening;

use self::opening::{OpenedIn, Opening};
use crate::context::Face as _;
use crate::context::{Driver, Handle, Kin, Shared, Spin};
use crate::control::{ControlHandler, Controls};
use crate::device::Device;
use crate::engine::{Engine, EngineConfig, EngineParts, ErrorHandler, Gates};
use crate::error::{DeviceError, Fault, LossCause, RegisterError, SendError};
use crate::exposed::{Exposed, ExposedMemory};
use crate::ids::{ClientId, ContextId, ControlId, Endpoint, JobShape, ProtocolId, Rank};
use crate::protocol::{Protocol, Registry};
use crate::route::{RouteCaps, Routes};
use crate::sync::{LightFence, Mutex, lock};
use crate::sysdep::Sysdep;
use async_trait::async_trait;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// One client's view of the network (P04): its devices, its contexts, its protocols.
#[async_trait]
pub trait Messager: Send + Sync {
    /// Sends one message of a registered protocol without waiting; `false`: no room now.
    ///
    /// # Errors
    /// If it cannot succeed.
    fn inject(
        &self,
        context: ContextId,
        target: Endpoint,
        protocol: ProtocolId,
        payload: &[u8],
    ) -> Result<bool, SendError>;

    /// Moves all devices of all contexts; returns the number of events. Never waits.
    fn advance(&self) -> usize;

    /// The contexts, by their number.
    fn contexts(&self) -> &[Handle];

    /// The ranks of the job.
    fn peers(&self) -> JobShape;

    /// The devices that are present.
    fn devices(&self) -> &[Arc<dyn Device>];

    /// Registers a protocol for all contexts.
    ///
    /// # Errors
    /// If the name is taken or impossible, or the messager is closed.
    fn register(&self, protocol: Arc<dyn Protocol>) -> Result<ProtocolId, RegisterError>;

    /// Registers a control for all contexts: what a control of that name means on this rank.
    ///
    /// # Errors
    /// If the name is taken or impossible, or the messager is closed.
    fn register_control(&self, name: &str, handler: ControlHandler) -> Result<ControlId, RegisterError>;

    /// Leaves the job: peers see a clean leave, and what is pending ends.
    ///
    /// # Cancel safety
    /// Not cancel safe: given up half-way, peers may see a rank that is lost. Called again, it goes on.
    async fn close(&self);
}

/// What a [`Client`] is made of.
pub struct ClientParts {
    /// Which client of the process.
    pub id: ClientId,
    /// The devices that carry its traffic; each rank is reached through the cheapest that can.
    pub devices: Vec<Arc<dyn Device>>,
    /// The kernel.
    pub sysdep: Arc<dyn Sysdep>,
    /// Settings of the engines.
    pub config: EngineConfig,
    /// How long waiting futures spin; `None`: 100 µs (twice what a wake-up takes, or two ranks that both sleep would never come to spin again) where every local rank has a core of its own.
    pub spin: Option<Duration>,
    /// Drive the contexts from a thread of their own instead of from tasks of the user's runtime.
    pub driver_thread: bool,
}

impl std::fmt::Debug for ClientParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientParts").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The messager over one device per peer.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use posthaste_core::engine::EngineConfig;
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::messager::ClientParts;
/// use posthaste_core::sysdep::Personality;
/// use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
/// use std::sync::Arc;
///
/// // Two ranks inside one process, as tests have them.
/// let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
/// let fabric = InProcessFabric::new(shape);
/// let mut clients = Vec::new();
/// for rank in [Rank(0), Rank(1)] {
///     let client = Client::new(ClientParts {
///         id: ClientId(0),
///         devices: vec![fabric.device(ClientId(0), rank)],
///         sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(rank, shape), None)),
///         config: EngineConfig::default(),
///         spin: None,
///         driver_thread: false,
///     })?;
///     client.open().await?;
///     clients.push(client);
/// }
/// assert_eq!((clients[1].peers(), clients[1].contexts()[0].me().rank), (shape, Rank(1)));
/// for client in clients {
///     client.close().await;
/// }
/// # Ok(())
/// # }
/// ```
pub struct Client {
    id: ClientId,
    routes: Routes,
    caps: RouteCaps,
    sysdep: Arc<dyn Sysdep>,
    registry: crate::sync::Arc<Registry>,
    controls: Arc<Controls>,
    gates: crate::sync::Arc<Gates>,
    exposed: Arc<Exposed>,
    contexts: Vec<Handle>,
    errors: crate::sync::Arc<Mutex<Option<ErrorHandler>>>,
    restarts: Arc<Restarts>,
    losses: Arc<Losses>,
    driver_thread: bool,
    /// Whether it is closed: of several who close it one does, and the others wait for that.
    closed: tokio::sync::Mutex<bool>,
}

/// Why ranks count as lost, with the incarnation that was.
#[derive(Default)]
struct Losses(Mutex<HashMap<Rank, (u32, LossCause)>>);

impl Losses {
    /// What was said first of an incarnation counts.
    fn note(&self, rank: Rank, fault: Fault, incarnation: u32, cause: Option<LossCause>) {
        let Some(cause) = cause.filter(|_| matches!(fault, Fault::PeerLost(_))) else { return };
        tracing::debug!(%rank, incarnation, %cause, "rank lost");
        let mut losses = lock(&self.0);
        let known = losses.entry(rank).or_insert((incarnation, cause));
        if known.0 < incarnation {
            *known = (incarnation, cause);
        }
    }
}

/// Called with a rank and its incarnation when a rank that died was started again and can be reached.
pub type RestartHandler = Arc<dyn Fn(Rank, u32) + Send + Sync>;

/// Who wants to know of ranks that were started again.
struct Restarts {
    handler: Mutex<Option<RestartHandler>>,
    /// The contexts' own.
    changed: Arc<tokio::sync::Notify>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("id", &self.id)
            .field("contexts", &self.contexts)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Makes the contexts; no driver runs yet.
    ///
    /// # Errors
    /// If no device reaches a rank, or one cannot make its ports.
    pub fn new(parts: ClientParts) -> Result<Client, DeviceError> {
        let ClientParts { id, devices, sysdep, config, spin, driver_thread } = parts;
        let personality = sysdep.personality();
        let shape = personality.shape;
        let spin = match spin {
            Some(time) if !time.is_zero() => Spin::For(time),
            Some(_) => Spin::Yield,
            None if personality.neighbours * usize::from(shape.contexts) <= sysdep.cores() => {
                Spin::For(Duration::from_micros(100))
            }
            None => Spin::Yield,
        };
        let routes = Routes::new(devices, shape.ranks)?;
        let caps = routes.caps();
        let registry = crate::sync::Arc::new(Registry::default());
        let (controls, exposed) = (Arc::new(Controls::default()), Arc::new(Exposed::default()));
        let light = LightFence::beside(&*sysdep);
        let gates = crate::sync::Arc::new(Gates::new(shape.ranks as usize, light));
        gates.restarted(personality.rank, personality.incarnation);
        let errors: crate::sync::Arc<Mutex<Option<ErrorHandler>>> = crate::sync::Arc::new(Mutex::new(None));
        let mut contexts = Vec::new();
        let kin = Kin::new(shape.contexts, &*sysdep);
        for number in 0..shape.contexts {
            let context = ContextId(number);
            let me = Endpoint::new(personality.rank, context);
            let told = errors.clone();
            let (engine, slots) = Engine::new(
                routes.port(context, shape)?,
                EngineParts {
                    me,
                    shape,
                    caps: caps.clone(),
                    config,
                    registry: registry.clone(),
                    controls: controls.clone(),
                    gates: gates.clone(),
                    memory: Arc::new(routes.memory(me.rank)),
                    exposed: exposed.clone(),
                    errors: Some(crate::sync::Arc::new(move |fault| {
                        let handler = lock(&told).clone();
                        if let Some(handler) = handler {
                            handler(fault);
                        }
                    })),
                    now: sysdep.now().as_millis() as u64,
                },
            );
            let shared =
                Shared::new(engine, slots, me, routes.doorbell(context), sysdep.clone(), spin, kin.clone());
            contexts.push(Handle::new(shared));
        }
        kin.meet(contexts.iter().map(Handle::shared_state));
        let restarts = Arc::new(Restarts { handler: Mutex::default(), changed: kin.news().clone() });
        Ok(Client {
            id,
            routes,
            caps,
            sysdep,
            registry,
            controls,
            gates,
            exposed,
            contexts,
            errors,
            restarts,
            losses: Arc::default(),
            driver_thread,
            closed: tokio::sync::Mutex::new(false),
        })
    }

    /// Starts the watch over the peers and the drivers of the contexts: tasks of the current runtime, or a thread with
    /// a runtime of its own. When the current runtime ends, so does in either case everything that is pending.
    ///
    /// # Errors
    /// If a device cannot be opened. Those that were opened before it are closed, and the contexts with them.
    ///
    /// # Cancel safety
    /// Not cancel safe: what was opened stays open until the client is [closed](Messager::close). A driver's thread
    /// goes on without its caller, and nobody is told whether it could open the devices.
    pub async fn open(&self) -> Result<(), DeviceError> {
        let (contexts, opening) = (self.contexts.clone(), self.opening());
        // Who is in none is told so by the device, or where a task is started.
        if let (Some(context), Ok(runtime)) = (contexts.first(), tokio::runtime::Handle::try_current()) {
            context.opened_in(&runtime);
        }
        if !self.driver_thread {
            opening.open().await?;
            for context in &contexts {
                tokio::spawn(Driver::new(context).run());
            }
            return Ok(());
        }
        let os = |what: &'static str| move |source: std::io::Error| DeviceError::Os { what, source };
        let (opened, open) = tokio::sync::oneshot::channel();
        let (driving, driven) = tokio::sync::oneshot::channel::<()>();
        let opened_here = contexts.clone();
        let main = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let result = runtime.map_err(os("cannot make the driver's runtime")).and_then(|runtime| {
                runtime.block_on(opening.open())?;
                Ok(runtime)
            });
            match result {
                Ok(runtime) => {
                    // The opener may have given up; the drivers end when the client is closed.
                    let _ = opened.send(Ok(()));
                    let drivers = async { contexts.iter().map(Driver::new).collect::<Vec<_>>() };
                    runtime.block_on(async {
                        futures::future::join_all(drivers.await.into_iter().map(Driver::run)).await
                    });
                    drop(driving);
                }
                Err(error) => {
                    let _ = opened.send(Err(error));
                }
            }
        };
        self.sysdep
            .spawn("posthaste-driver", None, Box::new(main))
            .map_err(os("cannot start the driver's thread"))?;
        open.await.unwrap_or_else(|_| {
            Err(DeviceError::Mismatch { subject: "the driver's thread", problem: "it ended at once".into() })
        })?;
        let of_runtime = OpenedIn { contexts: opened_here };
        tokio::spawn(async move {
            // Nothing is ever sent: it ends with the drivers.
            let _ended = driven.await;
            drop(of_runtime);
        });
        Ok(())
    }

    /// Starts the watch over the peers alone, for a caller that drives the contexts itself; [`open`](Self::open) does
    /// both.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    /// Not cancel safe: devices that were opened before stay open until the client is [closed](Messager::close).
    pub async fn open_devices(&self) -> Result<(), DeviceError> {
        self.opening().open().await
    }

    fn opening(&self) -> Opening {
        let Client { contexts, routes, gates, restarts, losses, .. } = self;
        Opening {
            contexts: contexts.clone(),
            routes: routes.clone(),
            gates: gates.clone(),
            restarts: restarts.clone(),
            losses: losses.clone(),
        }
    }

    /// Which client of the process this is.
    #[must_use]
    pub fn id(&self) -> ClientId {
        self.id
    }

    /// The kernel.
    #[must_use]
    pub fn sysdep(&self) -> &Arc<dyn Sysdep> {
        &self.sysdep
    }

    /// The gates of inline puts and gets.
    #[must_use]
    pub fn gates(&self) -> &crate::sync::Arc<Gates> {
        &self.gates
    }

    /// The device that reaches the rank at the lowest cost.
    #[must_use]
    pub fn device_for(&self, rank: Rank) -> Option<&Arc<dyn Device>> {
        self.routes.device_for(rank)
    }

    /// What can be done with each rank.
    #[must_use]
    pub fn caps(&self) -> &RouteCaps {
        &self.caps
    }

    /// The latest incarnation of a rank that all contexts of this client can reach, or could while it lived; 0 is the
    /// first one. This rank's own is how often it was started before.
    #[must_use]
    pub fn incarnation_of(&self, rank: Rank) -> u32 {
        self.gates.incarnation_of(rank)
    }

    /// Why a rank counts as lost: of the latest of its incarnations that does. `None` while all of them live, after a clean
    /// leave, and where nobody has said why.
    #[must_use]
    pub fn loss_of(&self, rank: Rank) -> Option<LossCause> {
        lock(&self.losses.0).get(&rank).map(|(_, cause)| *cause)
    }

    /// The memory of a rank as mapped here, if the device that reaches the rank maps it.
    #[must_use]
    pub fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<crate::memory::SharedSlice> {
        self.routes.device_for(rank)?.map(rank, offset, len)
    }

    /// The memory of all ranks, without keeping a device alive.
    #[must_use]
    pub fn memory(&self, me: Rank) -> crate::route::RouteMemory {
        self.routes.memory(me)
    }

    /// Exposes memory that the caller owns to the peers, who name it by its [place](ExposedMemory::place): what they put
    /// there, get from there and do to its words is carried out by this client's engine, whatever the devices can.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use posthaste_core::inprocess::InProcessFabric;
    /// # use posthaste_core::messager::ClientParts;
    /// # use posthaste_core::sysdep::Personality;
    /// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
    /// # use std::sync::Arc;
    /// # let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
    /// # let client = Client::new(ClientParts {
    /// #     id: ClientId(0),
    /// #     devices: vec![InProcessFabric::new(shape).device(ClientId(0), Rank(0))],
    /// #     sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
    /// #     config: Default::default(),
    /// #     spin: None,
    /// #     driver_thread: false,
    /// # })?;
    /// # client.open().await?;
    /// let exposed = client.expose(vec![7_u8; 100]);
    /// assert_eq!((exposed.len(), exposed.with(|bytes| bytes[99])), (100, 7));
    /// assert_eq!(exposed.into_inner(), [7; 100]);
    /// # client.close().await;
    /// # Ok(())
    /// # }
    /// ```
    pub fn expose<T: AsMut<[u8]> + Send + 'static>(&self, memory: T) -> ExposedMemory<T> {
        self.exposed.add(memory)
    }

    /// All that was [exposed](Self::expose), for protocols that carry out accesses of their own.
    #[must_use]
    pub fn exposed(&self) -> &Arc<Exposed> {
        &self.exposed
    }

    /// Waits until a later incarnation of the rank than `after` can be reached by all contexts, and returns which it is.
    ///
    /// # Errors
    /// If this client is closed meanwhile.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn restarted(&self, rank: Rank, after: u32) -> Result<u32, Fault> {
        loop {
            let changed = self.restarts.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            let now = self.incarnation_of(rank);
            if now > after {
                return Ok(now);
            }
            if self.contexts.iter().any(Handle::is_closed) {
                return Err(Fault::Shutdown);
            }
            changed.await;
        }
    }

    /// Sets who is told of ranks that were started again, once all contexts can reach them.
    pub fn on_restart(&self, handler: impl Fn(Rank, u32) + Send + Sync + 'static) {
        let before = lock(&self.restarts.handler).replace(Arc::new(handler));
        // Not under the lock: what goes along with it may set another.
        drop(before);
    }

    /// Sets who is told of errors that no future waits for (D17).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use posthaste_core::inprocess::InProcessFabric;
    /// # use posthaste_core::messager::ClientParts;
    /// # use posthaste_core::sysdep::Personality;
    /// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep};
    /// use posthaste_core::{Fault, Messager, Rank};
    /// use std::sync::{Arc, Mutex};
    /// # let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
    /// # let fabric = InProcessFabric::new(shape);
    /// # let client = Client::new(ClientParts {
    /// #     id: ClientId(0),
    /// #     devices: vec![fabric.device(ClientId(0), Rank(0))],
    /// #     sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), shape), None)),
    /// #     config: Default::default(),
    /// #     spin: None,
    /// #     driver_thread: false,
    /// # })?;
    /// # client.open().await?;
    /// let seen = Arc::new(Mutex::new(Vec::new()));
    /// let faults = seen.clone();
    /// client.on_error(move |fault| faults.lock().expect("nobody panics").push(fault));
    /// fabric.kill(Rank(1)); // the in-process device can simulate a crash
    /// while seen.lock().expect("nobody panics").is_empty() {
    ///     client.advance();
    ///     tokio::task::yield_now().await;
    /// }
    /// assert_eq!(seen.lock().expect("nobody panics")[0], Fault::PeerLost(Rank(1)));
    /// # client.close().await;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_error(&self, handler: impl Fn(Fault) + Send + Sync + 'static) {
        let before = lock(&self.errors).replace(crate::sync::Arc::new(handler));
        // As in `on_restart`.
        drop(before);
    }
}

#[async_trait]
impl Messager for Client {
    fn inject(
        &self,
        context: ContextId,
        target: Endpoint,
        protocol: ProtocolId,
        payload: &[u8],
    ) -> Result<bool, SendError> {
        use crate::context::Face;
        use crate::engine::{SendArgs, Sent, Wait};
        let Some(handle) = self.contexts.get(context.index()) else {
            return Err(SendError::UnknownContext { context, contexts: self.contexts.len() as u16 });
        };
        let args = SendArgs { target, protocol, cookie: 0, info: &[], relaxed: false };
        let sent = handle.enter(|engine| {
            match engine.scope().send(&args, crate::engine::Payload::Borrowed(payload), Wait::Never) {
                Ok(Sent::Done) => Ok(true),
                Ok(_) => Ok(false),
                Err((error, _)) => Err(error),
            }
        });
        sent.unwrap_or(Ok(false))
    }

    fn advance(&self) -> usize {
        self.contexts.iter().map(Handle::advance).sum()
    }

    fn contexts(&self) -> &[Handle] {
        &self.contexts
    }

    fn peers(&self) -> JobShape {
        self.sysdep.personality().shape
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        self.routes.devices()
    }

    fn register(&self, protocol: Arc<dyn Protocol>) -> Result<ProtocolId, RegisterError> {
        if self.contexts.iter().any(Handle::is_closed) {
            return Err(RegisterError::Closed);
        }
        let id = self.registry.register(protocol)?;
        // Messages that came before it may be held for it.
        for context in &self.contexts {
            context.post_run(|_| {});
        }
        Ok(id)
    }

    fn register_control(&self, name: &str, handler: ControlHandler) -> Result<ControlId, RegisterError> {
        if self.contexts.iter().any(Handle::is_closed) {
            return Err(RegisterError::Closed);
        }
        let id = self.controls.register(name, handler)?;
        for context in &self.contexts {
            context.post_run(|_| {});
        }
        Ok(id)
    }

    async fn close(&self) {
        let mut closed = self.closed.lock().await;
        if *closed {
            return;
        }
        // Before all else: contexts that are owned and idle depart when their owners look.
        self.gates.close_all();
        // Nobody is told of the leave, and so takes memory back that this side may have reached, as long as anything of this
        // side may still write there.
        let departures: Vec<_> =
            self.contexts.iter().map(|context| (context, context.post(|scope| scope.depart()))).collect();
        for (context, departed) in departures {
            context.done_or_idle(departed).await;
        }
        if let Some(context) = self.contexts.first() {
            context.vacate_gates().await;
        }
        for context in &self.contexts {
            context.post_run(|scope| scope.goodbye());
        }
        // The devices that others bring their memory to come last.
        for device in self.routes.devices().iter().rev() {
            device.close().await;
        }
        for context in &self.contexts {
            context.shut_down();
        }
        // What is told of nothing any more, and may lead back to here.
        self.contexts.iter().for_each(Handle::retire);
        let told = (lock(&self.errors).take(), lock(&self.restarts.handler).take());
        drop((told, self.controls.retire()));
        *closed = true;
    }
}
