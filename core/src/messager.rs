//! The messager: owns the devices that are present and the contexts of one client, and moves all of them.

use crate::context::{Driver, Handle, Shared, Spin};
use crate::control::{ControlHandler, Controls};
use crate::device::Device;
use crate::engine::{Engine, EngineConfig, EngineParts, ErrorHandler, Gates, Work};
use crate::error::{DeviceError, Fault, RegisterError, SendError};
use crate::ids::{ClientId, ContextId, ControlId, Endpoint, JobShape, ProtocolId, Rank};
use crate::protocol::{Protocol, Registry};
use crate::route::{RouteCaps, Routes};
use crate::sync::{Mutex, lock};
use crate::sysdep::Sysdep;
use async_trait::async_trait;
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
pub struct Client {
    id: ClientId,
    routes: Routes,
    caps: RouteCaps,
    sysdep: Arc<dyn Sysdep>,
    registry: crate::sync::Arc<Registry>,
    controls: Arc<Controls>,
    gates: crate::sync::Arc<Gates>,
    contexts: Vec<Handle>,
    errors: crate::sync::Arc<Mutex<Option<ErrorHandler>>>,
    driver_thread: bool,
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
        let controls = Arc::new(Controls::default());
        let gates = crate::sync::Arc::new(Gates::new(shape.ranks as usize));
        let errors: crate::sync::Arc<Mutex<Option<ErrorHandler>>> = crate::sync::Arc::new(Mutex::new(None));
        let mut contexts = Vec::new();
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
                    errors: Some(crate::sync::Arc::new(move |fault| {
                        let handler = lock(&told).clone();
                        if let Some(handler) = handler {
                            handler(fault);
                        }
                    })),
                    now: sysdep.now().as_millis() as u64,
                },
            );
            let shared = Shared::new(engine, slots, me, routes.doorbell(context), sysdep.clone(), spin);
            contexts.push(Handle::new(shared));
        }
        Ok(Client { id, routes, caps, sysdep, registry, controls, gates, contexts, errors, driver_thread })
    }

    /// Starts the watch over the peers and the drivers of the contexts: tasks of the current runtime, or a thread with
    /// a runtime of its own.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub async fn open(&self) -> Result<(), DeviceError> {
        let (contexts, routes) = (self.contexts.clone(), self.routes.clone());
        if !self.driver_thread {
            open_devices(&contexts, &routes).await?;
            for context in &contexts {
                tokio::spawn(Driver::new(context).run());
            }
            return Ok(());
        }
        let os = |what: &'static str| move |source: std::io::Error| DeviceError::Os { what, source };
        let (opened, open) = tokio::sync::oneshot::channel();
        let main = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let result = runtime.map_err(os("cannot make the driver's runtime")).and_then(|runtime| {
                runtime.block_on(open_devices(&contexts, &routes))?;
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
        })
    }

    /// Starts the watch over the peers alone, for a caller that drives the contexts itself; [`open`](Self::open) does
    /// both.
    ///
    /// # Errors
    /// If a device cannot be opened.
    pub async fn open_devices(&self) -> Result<(), DeviceError> {
        open_devices(&self.contexts, &self.routes).await
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

    /// Sets who is told of errors that no future waits for (D17).
    pub fn on_error(&self, handler: impl Fn(Fault) + Send + Sync + 'static) {
        *lock(&self.errors) = Some(crate::sync::Arc::new(handler));
    }
}

async fn open_devices(contexts: &[Handle], routes: &Routes) -> Result<(), DeviceError> {
    for (at, device) in routes.devices().iter().enumerate() {
        let (contexts, leads_through) = (contexts.to_vec(), routes.leading_through(at));
        let down = move |rank: Rank, fault: Fault| {
            // What the others know of the rank says nothing about what is still on its way through this one.
            if leads_through(rank) {
                for context in &contexts {
                    context.post_work(Work::PeerDown(rank, fault));
                }
            }
        };
        device.open(Arc::new(down)).await?;
    }
    Ok(())
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
            return Err(SendError::UnknownRank { rank: target.rank, size: self.peers().ranks });
        };
        let args = SendArgs { target, protocol, cookie: 0, info: &[], relaxed: false };
        let sent = handle.enter(|engine| {
            match engine.scope().send(&args, crate::engine::Payload::Borrowed(payload), Wait::Never) {
                Ok(Sent::Done | Sent::Queued(_)) => Ok(true),
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
    }
}
