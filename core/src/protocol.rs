//! What a protocol is to the messager, and the table in which a client registers its protocols.

use crate::device::{Body, Packet};
use crate::engine::Scope;
use crate::error::{Fault, RegisterError};
use crate::ids::{ContextId, Endpoint, ProtocolId, Rank};
use crate::memory::SharedSlice;
use crate::sync::{Mutex, lock};
use bytes::BytesMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Longest protocol name in bytes.
pub const MAX_NAME: usize = 64;
/// Most protocols a client can register.
pub const MAX_PROTOCOLS: usize = 4096;

/// How a protocol's messages are kept from piling up at the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Flow {
    /// The handler runs at once, inside `advance`: lane space is all the credit there is.
    Inline = 0,
    /// Messages are kept until a consumer takes them, which gives credit back.
    Credited = 1,
    /// Every message is answered; the answer gives the credit back.
    Replied = 2,
}

impl Flow {
    pub(crate) fn from_byte(byte: u8) -> Option<Flow> {
        [Flow::Inline, Flow::Credited, Flow::Replied].into_iter().find(|flow| *flow as u8 == byte)
    }
}

/// A message in the hands of its protocol.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// Who sent it.
    pub source: Endpoint,
    /// Message info, 0 to 112 bytes.
    pub info: &'a [u8],
    /// The payload.
    pub body: Body<'a>,
    /// The protocol as the sender counts it.
    pub protocol: ProtocolId,
    /// The low bits of the sender's incarnation; the engine fills them in.
    pub life: u16,
    /// The sender's name for the request, or 0 if it waits for no answer.
    pub cookie: u64,
}

impl Incoming<'_> {
    /// Whom to answer, if the sender waits for an answer.
    #[inline]
    #[must_use]
    pub fn reply(&self) -> Option<ReplyTo> {
        (self.cookie != 0).then_some(ReplyTo::new(self.source, self.life, self.cookie))
    }

    /// What to hand to [`Scope::consumed`] when a [`Flow::Credited`] message has been consumed. To be asked for while the
    /// body is still there.
    #[inline]
    #[must_use]
    pub fn credit(&self) -> Credit {
        Credit {
            endpoint: self.source,
            protocol: self.protocol,
            life: self.life,
            bytes: self.body.len() as u64,
        }
    }
}

/// A message of one word without info, as it comes out of a record.
///
/// Protocol and life, which are stored one after the other, do not lie side by side: they would be loaded together, and that
/// waits for both stores.
#[derive(Debug)]
#[repr(C)]
pub struct ArrivedWord {
    pub(crate) payload: [u8; 8],
    pub(crate) source: Endpoint,
    pub(crate) protocol: ProtocolId,
    pub(crate) cookie: u64,
    pub(crate) life: u16,
}

impl ArrivedWord {
    /// What a device found in a record; a cookie that is 0 is none.
    #[inline(always)]
    #[must_use]
    pub fn new(source: Endpoint, protocol: ProtocolId, cookie: u64, payload: u64) -> Self {
        // The sender's life is known to whoever hands it to the protocol.
        Self { payload: payload.to_ne_bytes(), source, protocol, life: 0, cookie }
    }

    /// Whom to answer, if the sender waits for an answer.
    #[inline]
    #[must_use]
    pub fn reply(&self) -> Option<ReplyTo> {
        (self.cookie != 0).then_some(ReplyTo::new(self.source, self.life, self.cookie))
    }

    /// As a packet, for whoever has no shorter way.
    pub(crate) fn packet(&self) -> Packet<'_> {
        Packet::plain(self.source, self.protocol, self.cookie, Body::Short(&self.payload))
    }

    /// The message. To be made where it is looked at: one that is moved has to wait for its own stores.
    #[inline(always)]
    #[must_use]
    pub fn message(&self) -> Incoming<'_> {
        let ArrivedWord { payload, source, protocol, cookie, life } = self;
        let (source, protocol, life, cookie) = (*source, *protocol, *life, *cookie);
        Incoming { source, info: &[], body: Body::Short(payload), protocol, life, cookie }
    }
}

/// Messages of one word each, of one protocol and one sender, without info and cookies.
#[derive(Debug)]
pub struct ArrivedWords<'a> {
    /// Those that were not handed out yet.
    pub(crate) payloads: std::slice::Iter<'a, u64>,
    pub(crate) source: Endpoint,
    pub(crate) protocol: ProtocolId,
    pub(crate) life: u16,
    /// What [`Scope::interruptions`] said at the first of them.
    pub(crate) interruptions: u64,
}

impl ArrivedWords<'_> {
    /// The payload of the next message; `None` at their end, and if a peer has ended meanwhile, or this side has left: whoever
    /// hands them out looks then whether there is to be more, and hands out the rest.
    #[inline]
    pub fn next(&mut self, scope: &Scope<'_>) -> Option<[u8; 8]> {
        if scope.interruptions() != self.interruptions {
            return None;
        }
        self.payloads.next().map(|payload| payload.to_ne_bytes())
    }

    /// The message with that payload.
    #[inline(always)]
    #[must_use]
    pub fn message<'p>(&self, payload: &'p [u8; 8]) -> Incoming<'p> {
        let ArrivedWords { source, protocol, life, .. } = *self;
        Incoming { source, info: &[], body: Body::Short(payload), protocol, life, cookie: 0 }
    }
}

/// Names the caller of a request; answer it exactly once. A later incarnation of the caller never gets the answer.
///
/// # Examples
/// ```
/// # use posthaste_core::inprocess::InProcessFabric;
/// # use posthaste_core::messager::ClientParts;
/// # use posthaste_core::sysdep::Personality;
/// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
/// use posthaste_core::context::{Face, poll_ticket};
/// use posthaste_core::engine::{Payload, SendArgs, Wait};
/// use posthaste_core::{Flow, Protocol, Scope, protocol::Incoming};
/// use std::future::poll_fn;
///
/// struct Echo;
/// impl Protocol for Echo {
///     fn name(&self) -> &str {
///         "echo"
///     }
///     fn flow(&self) -> Flow {
///         Flow::Replied
///     }
///     fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
///         if let Some(to) = message.reply() {
///             scope.reply(to, Ok(Payload::Borrowed(message.info)));
///         }
///     }
/// }
///
/// let (protocol, context) = (client.register(Arc::new(Echo))?, &client.contexts()[0]);
/// let asked = context.enter(|engine| {
///     let mut scope = engine.scope();
///     let ticket = scope.operation(Some(Rank(0))).ok()?;
///     let target = scope.me();
///     let args = SendArgs { target, protocol, cookie: ticket.to_word(), info: b"hello", relaxed: false };
///     scope.send(&args, Payload::Borrowed(&[]), Wait::Never).ok()?;
///     Some(ticket)
/// });
/// let ticket = asked.ok().flatten().expect("nothing stands in the way");
/// let answer = poll_fn(|cx| poll_ticket(context, cx, ticket)).await?;
/// assert_eq!(answer.as_bytes(), b"hello");
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    // Two words: it is handed over in registers.
    rank: Rank,
    context: ContextId,
    pub(crate) life: u16,
    /// The caller's own name for the request.
    pub(crate) cookie: u64,
}

impl ReplyTo {
    #[inline]
    pub(crate) const fn new(endpoint: Endpoint, life: u16, cookie: u64) -> Self {
        Self { rank: endpoint.rank, context: endpoint.context, life, cookie }
    }

    /// The caller.
    #[inline]
    #[must_use]
    pub const fn endpoint(&self) -> Endpoint {
        Endpoint::new(self.rank, self.context)
    }
}

/// One message's worth of credit, to be given back when the message was consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Who gets it back.
    pub endpoint: Endpoint,
    /// The protocol as the sender counts it.
    pub protocol: ProtocolId,
    /// The low bits of the incarnation that gets it back; another one does not.
    pub life: u16,
    /// Payload bytes of the message.
    pub bytes: u64,
}

/// What a protocol knows when the first packet of a message has arrived.
#[derive(Clone, Copy, Debug)]
pub struct FirstPacket<'a> {
    /// Who sends.
    pub source: Endpoint,
    /// Message info, 0 to 112 bytes.
    pub info: &'a [u8],
    /// Length of the whole message in bytes.
    pub total: u64,
}

/// What a handler runs when its buffer is filled.
pub type FilledFn = Box<dyn FnOnce(&mut Scope<'_>, BytesMut) + Send>;

/// Where a message is to go.
pub enum Accept {
    /// To [`Protocol::on_message`], whole.
    Whole,
    /// Into this buffer, up to `limit` bytes; the rest is dropped without an error at the sender. Then `done` runs.
    Fill {
        /// Bytes are appended to it.
        buffer: BytesMut,
        /// Most bytes to append.
        limit: usize,
        /// Runs once, inside `advance`.
        done: FilledFn,
    },
    /// Nowhere.
    Discard,
}

impl std::fmt::Debug for Accept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Accept::Whole => f.write_str("Whole"),
            Accept::Fill { limit, .. } => {
                f.debug_struct("Fill").field("limit", limit).finish_non_exhaustive()
            }
            Accept::Discard => f.write_str("Discard"),
        }
    }
}

/// A protocol: what a message means on this rank. Called by the progress engine, inside `advance`.
///
/// Handlers must be short and must not block; a panic is caught and told to the sender.
///
/// # Examples
/// ```
/// # use posthaste_core::inprocess::InProcessFabric;
/// # use posthaste_core::messager::ClientParts;
/// # use posthaste_core::sysdep::Personality;
/// # use posthaste_core::{Client, ClientId, JobShape, LinuxSysdep, Messager, Rank};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
/// use posthaste_core::{ContextId, Endpoint, Protocol, Scope, protocol::Incoming};
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// Counts the bytes that come.
/// struct Meter(AtomicU64);
///
/// impl Protocol for Meter {
///     fn name(&self) -> &str {
///         "meter"
///     }
///
///     fn on_message(&self, _scope: &mut Scope<'_>, message: Incoming<'_>) {
///         self.0.fetch_add(message.body.len() as u64, Ordering::Relaxed);
///     }
/// }
///
/// let meter = Arc::new(Meter(AtomicU64::new(0)));
/// let id = client.register(meter.clone())?;
/// let here = Endpoint::new(Rank(0), ContextId(0));
/// assert!(client.inject(ContextId(0), here, id, b"thirteen here")?, "there is room");
/// while meter.0.load(Ordering::Relaxed) == 0 {
///     client.advance();
/// }
/// assert_eq!(meter.0.load(Ordering::Relaxed), 13);
/// # client.close().await;
/// # Ok(())
/// # }
/// ```
pub trait Protocol: Send + Sync {
    /// The name by which ranks agree on what is meant.
    fn name(&self) -> &str;

    /// A hash of the message type, 0 for bytes. Checked when a peer first sends.
    fn schema(&self) -> u64 {
        0
    }

    /// How its messages are kept from piling up.
    fn flow(&self) -> Flow {
        Flow::Inline
    }

    /// Whether [`accept`](Self::accept) is to be asked for each message.
    fn chooses_buffer(&self) -> bool {
        false
    }

    /// Whether its messages get past those that wait for a protocol which is not registered yet. For protocols of the
    /// library's own, which are registered before anything can come.
    fn overtakes_held(&self) -> bool {
        false
    }

    /// Whether its messages with a cookie are requests, which end with an answer. False: the cookie is the protocol's own, and
    /// nothing is answered in its stead.
    fn takes_requests(&self) -> bool {
        true
    }

    /// Whether a request may be answered by [`Fault::Busy`] in this protocol's stead, without being carried out, as long as too many
    /// answers wait for who asks. False for what is answered by next to nothing, and must not be left out.
    fn may_be_refused(&self, _message: &Incoming<'_>) -> bool {
        true
    }

    /// The first packet of a message has arrived: where is the message to go?
    fn accept(&self, _scope: &mut Scope<'_>, _first: &FirstPacket<'_>) -> Accept {
        Accept::Whole
    }

    /// A long message of one packet begins to arrive, and nothing stands before it: the memory that its payload goes to, in
    /// order, as many bytes as it has. `None`: to [`on_message`](Self::on_message), as any other.
    fn place(&self, _first: &FirstPacket<'_>) -> Option<Vec<SharedSlice>> {
        None
    }

    /// The payload of a message is where [`place`](Self::place) wanted it; the message has none any more. It comes in the
    /// place of [`on_message`](Self::on_message).
    fn on_placed(&self, _scope: &mut Scope<'_>, _message: Incoming<'_>) {}

    /// A whole message has arrived.
    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>);

    /// A message of one word without info has arrived: the most frequent one. It means what it would mean to
    /// [`on_message`](Self::on_message); a protocol that hands messages on to another one hands this on as well.
    #[inline]
    fn on_word(&self, scope: &mut Scope<'_>, word: &ArrivedWord) {
        self.on_message(scope, word.message());
    }

    /// Messages of one word each have arrived together. Takes them one after the other, as
    /// [`on_message`](Self::on_message) would; a protocol for which the way from one to the next counts does so itself.
    fn on_words(&self, scope: &mut Scope<'_>, words: &mut ArrivedWords<'_>) {
        while let Some(word) = words.next(scope) {
            self.on_message(scope, words.message(&word));
        }
    }

    /// A rank is gone, or has left.
    fn on_peer_down(&self, _rank: Rank, _fault: Fault) {}

    /// That context takes nothing in any more of what this incarnation of a rank, or an earlier one, has sent, and is done with
    /// what it took in. Each context comes to that by itself, behind its own lanes and connections, and one that is owned when
    /// its owner looks: memory which the rank could write through any of them is another's only when all have. May be said
    /// more than once.
    fn on_peer_drained(&self, _context: ContextId, _rank: Rank, _incarnation: u32) {}

    /// A rank that was gone was started again, and this context can reach it: called once per context. What was known of
    /// earlier incarnations does not hold for this one.
    fn on_peer_up(&self, _scope: &mut Scope<'_>, _rank: Rank, _incarnation: u32) {}

    /// The client closes: drop what waits.
    fn on_close(&self) {}
}

/// The protocols of one client, shared by its contexts.
///
/// # Examples
/// ```
/// use posthaste_core::protocol::{Incoming, Registry};
/// use posthaste_core::{Protocol, Scope};
/// use std::sync::Arc;
///
/// struct Quiet;
/// impl Protocol for Quiet {
///     fn name(&self) -> &str {
///         "quiet"
///     }
///     fn on_message(&self, _scope: &mut Scope<'_>, _message: Incoming<'_>) {}
/// }
///
/// let registry = Registry::default();
/// let id = registry.register(Arc::new(Quiet))?;
/// assert_eq!(registry.find("quiet").map(|(found, _)| found), Some(id));
/// assert!(registry.find("loud").is_none());
/// # Ok::<(), posthaste_core::RegisterError>(())
/// ```
#[derive(Default)]
pub struct Registry {
    entries: Mutex<Vec<Arc<dyn Protocol>>>,
    version: AtomicU64,
    /// Contexts that are not closed.
    contexts: AtomicUsize,
    closed: AtomicBool,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Registry {
    /// Registers a protocol.
    ///
    /// # Errors
    /// If the name is taken, empty or too long, or the table is full.
    pub fn register(&self, protocol: Arc<dyn Protocol>) -> Result<ProtocolId, RegisterError> {
        let name = protocol.name();
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(RegisterError::BadName(name.to_owned()));
        }
        let mut entries = lock(&self.entries);
        if self.closed.load(Ordering::Relaxed) {
            return Err(RegisterError::Closed);
        }
        if entries.iter().any(|entry| entry.name() == name) {
            return Err(RegisterError::Taken(name.to_owned()));
        }
        if entries.len() >= MAX_PROTOCOLS {
            return Err(RegisterError::TooMany(MAX_PROTOCOLS));
        }
        let id = ProtocolId(entries.len() as u16);
        tracing::debug!(name, %id, "protocol registered");
        entries.push(protocol);
        // Release pairs with the acquire of `version`: whoever sees the new version finds the entry.
        self.version.store(entries.len() as u64, Ordering::Release);
        Ok(id)
    }

    /// One more context dispatches to what is registered.
    pub(crate) fn enter(&self) {
        self.contexts.fetch_add(1, Ordering::Relaxed);
    }

    /// A context is closed. With the last one all protocols go, which may lead back to the contexts: whoever closes drops them
    /// where nothing is held. Nothing can be registered from here on.
    #[must_use]
    pub(crate) fn leave(&self) -> Vec<Arc<dyn Protocol>> {
        if self.contexts.fetch_sub(1, Ordering::AcqRel) > 1 {
            return Vec::new();
        }
        let mut entries = lock(&self.entries);
        self.closed.store(true, Ordering::Relaxed);
        std::mem::take(&mut entries)
    }

    /// Grows with every registration.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The protocol with that id.
    #[must_use]
    pub fn get(&self, id: ProtocolId) -> Option<Arc<dyn Protocol>> {
        lock(&self.entries).get(id.index()).cloned()
    }

    /// The protocol with that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(ProtocolId, Arc<dyn Protocol>)> {
        let entries = lock(&self.entries);
        let at = entries.iter().position(|entry| entry.name() == name)?;
        Some((ProtocolId(at as u16), entries[at].clone()))
    }

    /// All protocols, by id.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Arc<dyn Protocol>> {
        lock(&self.entries).clone()
    }
}
