//! The device: one network's hardware and software resources, behind two traits.
//!
//! A [`Device`] is shared by all contexts and answers questions; a [`Port`] is one context's own part of it and
//! moves bytes. Ports are owned by the progress engine, so none of them needs a lock.

mod sources;

use crate::caps::Caps;
use crate::descriptor::Descriptor;
use crate::error::{DeviceError, Fault, LossCause, MemoryError};
use crate::ids::{ContextId, Endpoint, ProtocolId, Rank};
use crate::memory::{LoanedPage, SharedSlice};
use crate::protocol::{ArrivedWord, Incoming};
use crate::slot::{Outcome, Ticket};
use async_trait::async_trait;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

pub use crate::body::{Body, Kept, Lent};
pub use crate::lease::{Lease, LeaseOwner};
pub use sources::{RemoteMemory, Source, SourceTable, Sources};

/// What a device knows of a peer's life. A rank that died may be started again under its number: that is another
/// *incarnation* of it, with a higher number; the first one is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// It is gone.
    Down {
        /// How.
        fault: Fault,
        /// Which of its incarnations; what is said of an earlier one than the latest does not count.
        incarnation: u32,
        /// Why it counts as lost, if it is lost and that is known.
        cause: Option<LossCause>,
    },
    /// It was started again and can be reached through this device; what is on its way to or from earlier incarnations
    /// goes nowhere.
    Up {
        /// Which of its incarnations it is now.
        incarnation: u32,
    },
}

impl PeerEvent {
    /// The end of a rank that a device knows one incarnation of.
    #[must_use]
    pub fn down(fault: Fault) -> PeerEvent {
        PeerEvent::Down { fault, incarnation: 0, cause: None }
    }
}

/// Called by a device, from any thread, when a peer is known to be gone, or to be there again.
///
/// Of this rank itself a device says [`Shutdown`](Fault::Shutdown) where the runtime ends that has its tasks, before peers can see
/// anything of that: whatever is pending ends with it then, and not with what peers do because of it.
pub type PeerNews = Arc<dyn Fn(Rank, PeerEvent) + Send + Sync>;

/// One network of a process.
///
/// The control-plane methods are async and may wait; everything else returns at once.
///
/// # Examples
/// A device that is another one, and counts the memory that it gives:
/// ```
/// use async_trait::async_trait;
/// use posthaste_core::device::{Allocation, Doorbell, PeerNews};
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::memory::SharedSlice;
/// use posthaste_core::{Caps, ClientId, ContextId, Device, DeviceError, JobShape, MemoryError, Port, Rank};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// struct Metered(Arc<dyn Device>, AtomicU64);
///
/// #[async_trait]
/// impl Device for Metered {
///     fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
///         self.0.allocate(len).inspect(|own| _ = self.1.fetch_add(own.len, Ordering::Relaxed))
///     }
///     fn free(&self, own: Allocation) {
///         self.1.fetch_sub(own.len, Ordering::Relaxed);
///         self.0.free(own);
///     }
///     fn caps(&self) -> &Caps {
///         self.0.caps()
///     }
///     fn reaches(&self, rank: Rank) -> bool {
///         self.0.reaches(rank)
///     }
///     fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
///         self.0.port(context)
///     }
///     fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
///         self.0.doorbell(context)
///     }
///     fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
///         self.0.map(rank, offset, len)
///     }
///     async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
///         self.0.open(news).await
///     }
///     async fn close(&self) {
///         self.0.close().await;
///     }
/// }
///
/// let fabric = InProcessFabric::new(JobShape { ranks: 1, clients: 1, contexts: 1 });
/// let device = Metered(fabric.device(ClientId(0), Rank(0)), AtomicU64::new(0));
/// let own = device.allocate(8192)?;
/// assert_eq!(device.1.load(Ordering::Relaxed), 8192);
/// device.free(own);
/// assert_eq!(device.1.load(Ordering::Relaxed), 0);
/// # Ok::<(), MemoryError>(())
/// ```
#[async_trait]
pub trait Device: Send + Sync {
    /// What the device can do. Constant.
    fn caps(&self) -> &Caps;

    /// Whether messages to that rank can go through this device.
    fn reaches(&self, rank: Rank) -> bool;

    /// Makes the port of one context; called once per context by the messager, before any traffic.
    ///
    /// # Errors
    /// If the operating system refuses what the port needs.
    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError>;

    /// What a sleeping driver of that context waits on.
    fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell>;

    /// Takes memory of this rank that peers can reach. The memory is zero.
    ///
    /// # Errors
    /// A limit was met; it is named. Nothing has been touched then.
    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError>;

    /// Gives memory back. Called only when no peer can reach it any more (invariant I10).
    fn free(&self, allocation: Allocation);

    /// The memory of a rank as mapped here, if the device can map it.
    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice>;

    /// For whoever writes to the memory of an endpoint's rank at once: how to rouse those that wait there for what is
    /// written. `None` if nobody but the rank itself writes to it without the device.
    fn rouser(&self, target: Endpoint) -> Option<Arc<dyn Rouse>> {
        let _ = target;
        None
    }

    /// Starts what watches over the peers. Called once, inside a Tokio runtime, after all ports were made.
    ///
    /// # Errors
    /// If the runtime lacks what the device needs, or the system refuses.
    ///
    /// # Cancel safety
    /// Not cancel safe: what was opened stays open until [`close`](Self::close).
    async fn open(&self, news: PeerNews) -> Result<(), DeviceError>;

    /// Says goodbye: peers see a clean leave. After it, peers are told nothing but that.
    ///
    /// # Cancel safety
    /// Not cancel safe: given up half-way, peers may see a rank that is lost. Called again, it goes on.
    async fn close(&self);
}

/// Memory of this rank that peers can reach: a range of what the rank shares.
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation {
    /// First byte, as peers name it.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The memory of a client's devices, for the engines: what peers put to and get from where no device does it for them, and
/// where long messages land.
pub trait Memory: Send + Sync {
    /// A rank's memory as mapped here, as [`Device::map`] says.
    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice>;

    /// Takes memory of this rank.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError>;

    /// Gives it back; as [`Device::free`].
    fn free(&self, allocation: Allocation);
}

/// Rouses an endpoint that sleeps, because its memory was written past its engine.
pub trait Rouse: Send + Sync {
    /// Memory of the endpoint was written: whoever sleeps there because of it is to look at it. While nobody does, this is
    /// a look at one word.
    fn rouse(&self);

    /// That word, if a compiler fence is all that has to stand between the write and the look at it: whoever finds it 0
    /// behind one need not call [`rouse`](Self::rouse).
    fn sign(&self) -> Option<SharedSlice> {
        None
    }
}

/// Wakes the driver of one context.
pub trait Doorbell: Send + Sync {
    /// Ready once after the bell was rung while the port was armed.
    ///
    /// # Errors
    /// If the bell is broken; the driver then falls back to polling.
    fn poll_ring(&self, cx: &mut Context<'_>) -> Poll<std::io::Result<()>>;
}

/// Why a port took no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Everything was taken.
    Done,
    /// No room now; try again after `advance`.
    Full,
    /// The next descriptor cannot succeed.
    Fault(Fault),
}

/// What became of a run of descriptors.
#[derive(Clone, Copy, Debug)]
pub struct Injected {
    /// How many were taken, from the front.
    pub taken: usize,
    /// Why not more.
    pub stop: Stop,
    /// All that were taken are complete (source reusable; puts are at the target, gets are here): no completion
    /// will be reported for them. Otherwise those with a ticket are reported through [`Sink::complete`].
    pub complete: bool,
}

/// The sending half of a port.
pub trait Inject {
    /// Takes as many descriptors from the front of the run as there is room for. Never waits. In a run of several, which are
    /// recorded ones, a device may go by their [`followers`](Descriptor::followers).
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected;

    /// Lends page memory to be filled; `None` if there is none now or the device lends none.
    fn loan(&mut self, len: usize) -> Option<Loan>;

    /// Takes a message of one word without info: the descriptor of the most frequent operation, handed over in
    /// registers. `target` is the endpoint's index in the job. True means what `complete` does. False, which is all that
    /// a device need say: nothing was done, and [`inject`](Self::inject) knows why.
    #[inline]
    fn word(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: u64) -> bool {
        let _ = (target, protocol, cookie, payload);
        false
    }

    /// Takes a message without info whose payload is these bytes, copied before this returns; as [`word`](Self::word) takes one
    /// of 8 bytes.
    #[inline]
    fn plain(&mut self, target: usize, protocol: ProtocolId, cookie: u64, payload: &[u8]) -> bool {
        let _ = (target, protocol, cookie, payload);
        false
    }

    /// The same word for each of these endpoints, as [`word`](Self::word) takes it for one. Those for which nothing was done
    /// are the first of `targets` afterwards; returns how many.
    fn word_to_each(&mut self, targets: &mut [usize], protocol: ProtocolId, payload: u64) -> usize {
        let mut left = 0;
        for at in 0..targets.len() {
            let target = targets[at];
            if !self.word(target, protocol, 0, payload) {
                targets[left] = target;
                left += 1;
            }
        }
        left
    }

    /// Begins and ends a multicast. In between, payloads of one address and length are the same bytes, so that one copy
    /// of them may serve all who are sent it (V03). A device that copies each may ignore it.
    fn multicast(&mut self, begins: bool) {
        let _ = begins;
    }
}

/// One context's part of a device.
///
/// # Examples
/// A message from one port to another, past all engines:
/// ```
/// use posthaste_core::descriptor::Op;
/// use posthaste_core::device::{Inject, Packet, Sink, SourceTable, Sources, Stop, Verdict};
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::slot::Outcome;
/// use posthaste_core::{ClientId, ContextId, Descriptor, JobShape, Rank, Ticket};
///
/// /// Takes what comes.
/// #[derive(Default)]
/// struct Basket(Vec<(Rank, usize)>);
///
/// impl Sink for Basket {
///     fn packet(&mut self, _inject: &mut dyn Inject, packet: &mut Packet<'_>) -> Verdict {
///         self.0.push((packet.source.rank, packet.body.len()));
///         Verdict::Taken
///     }
///     fn complete(&mut self, _ticket: Ticket, _outcome: Outcome) {}
///     fn corrupt(&mut self, rank: Rank) {
///         panic!("rank {rank} broke the rules");
///     }
/// }
///
/// let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
/// let port = |rank| fabric.device(ClientId(0), rank).port(ContextId(0));
/// let (mut sender, mut receiver) = (port(Rank(0))?, port(Rank(1))?);
/// let mut send = Descriptor { op: Op::Send, rank: Rank(1), ..Descriptor::default() };
/// send.set_inline(b"a payload");
/// let table = SourceTable::default();
/// let sources = Sources::of(&table);
/// assert_eq!(sender.inject(&[send], &sources).stop, Stop::Done);
/// let mut basket = Basket::default();
/// assert_eq!(receiver.advance(16, &mut basket), 1);
/// assert_eq!(basket.0, [(Rank(0), 9)]);
/// # Ok::<(), posthaste_core::DeviceError>(())
/// ```
pub trait Port: Inject + Send {
    /// Drains up to `budget` packets into the sink and moves what waits inside the device. Returns the number of
    /// events; 0 means idle. Never waits.
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize;

    /// Looks up to `looks` times whether [`advance`](Self::advance) would find something, with a pause between two looks:
    /// the inside of a spin loop. A device that cannot tell says yes.
    fn glance(&mut self, looks: u32) -> bool {
        let _ = looks;
        crate::sync::spin_loop();
        true
    }

    /// Both in one, for whoever waits for what is about to come: looks up to `looks` times, and drains at once what it
    /// finds, which need not be all that [`advance`](Self::advance) would. Returns the number of events, or `None` if all
    /// looks were in vain.
    fn linger(&mut self, looks: u32, budget: usize, sink: &mut dyn Sink) -> Option<usize> {
        self.glance(looks).then(|| self.advance(budget, sink))
    }

    /// Prepares for sleep: from now on peers ring the bell. Returns false, and stays awake, if something came in
    /// meanwhile. `waiting_for_room`: ring also when a peer makes room.
    fn arm(&mut self, waiting_for_room: bool) -> bool;

    /// A device whose peers can be sure to ring only behind something dear (a barrier that interrupts other cores, say) may
    /// put that off: then this is how soon [`settle`](Self::settle) is to be called behind an [`arm`](Self::arm) that returned
    /// true, unless the sleep ends before. `None`, as by default: there is nothing to settle.
    fn settles_within(&self) -> Option<Duration> {
        None
    }

    /// Does what `arm` has put off. Returns false, and is awake, if something came in of which nobody told.
    fn settle(&mut self) -> bool {
        true
    }

    /// Whether from the next sleep on those who write this rank's memory past the engine are to ring, too.
    fn watch(&mut self, watching: bool) {
        let _ = watching;
    }

    /// Back from sleep.
    fn disarm(&mut self);

    /// Whether packets of the rank have come that [`advance`](Self::advance) would deliver. A device that keeps no more than a
    /// few thousand of an endpoint, and delivers all of them in one `advance` that may, need not tell.
    fn has_packets_of(&self, rank: Rank) -> bool {
        let _ = rank;
        false
    }

    /// A peer is gone for good: give back what it held, take nothing from it any more.
    fn peer_down(&mut self, rank: Rank);

    /// The engine has found that a peer breaks the rules, and takes nothing from it any more: a device that can ends what connects
    /// them, so that the peer hears of it, and tells its client, so that other contexts do ([`PeerEvent::Down`]).
    fn cut_off(&mut self, rank: Rank) {
        let _ = rank;
    }

    /// A peer that is gone was started again, and its device has said so: from now on this context talks to that
    /// incarnation, about which it knows nothing. Called after [`peer_down`](Self::peer_down). A device that never says so
    /// need not do anything.
    fn peer_up(&mut self, rank: Rank, incarnation: u32) {
        let _ = (rank, incarnation);
    }

    /// This context has said goodbye to every peer that it knows, and has shut down: it sends and writes nothing more. A device
    /// that has a way to tell the peers that it never met tells them once all contexts of the client have
    /// ([`Sink::left`]).
    fn leave(&mut self) {}
}

/// Where a port puts what it finds.
pub trait Sink {
    /// An endpoint's connection has ended, and packets of it are still here of which one was held: what can be kept of them is to
    /// be taken now. They are offered again behind this.
    fn ends(&mut self, source: Endpoint) {
        let _ = source;
    }

    /// A packet has arrived; `inject` is the same port's sending half.
    fn packet(&mut self, inject: &mut dyn Inject, packet: &mut Packet<'_>) -> Verdict;

    /// A packet of one word without info: the most frequent one, made once where its record is read.
    #[inline]
    fn word(&mut self, inject: &mut dyn Inject, word: &mut ArrivedWord) -> Verdict {
        self.packet(inject, &mut word.packet())
    }

    /// A packet without info.
    #[inline]
    fn plain(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        cookie: u64,
        body: Body<'_>,
    ) -> Verdict {
        self.packet(inject, &mut Packet::plain(source, protocol, cookie, body))
    }

    /// Packets of one word each, of one protocol and without cookies. Returns how many were taken; the next one is to be
    /// kept, with everything behind it, and offered again later.
    fn words(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        payloads: &[u64],
    ) -> usize {
        let mut taken = payloads.iter().take_while(|payload| {
            self.word(inject, &mut ArrivedWord::new(source, protocol, 0, **payload)) == Verdict::Taken
        });
        taken.by_ref().count()
    }

    /// Packets of one length, of one protocol, without info and cookies. Those that it took from `payloads` are done with; if
    /// there are more, the next one is to be kept, with everything behind it, and offered again later.
    fn batch(
        &mut self,
        inject: &mut dyn Inject,
        source: Endpoint,
        protocol: ProtocolId,
        payloads: &mut dyn Payloads,
    ) {
        while let Some(bytes) = payloads.next() {
            let mut packet = Packet::plain(source, protocol, 0, Body::Short(bytes));
            if self.packet(inject, &mut packet) == Verdict::Hold {
                return payloads.put_back();
            }
        }
    }

    /// A long packet is on its way in, of which the payload has not been read yet: the memory that it goes to, in order, of
    /// as many bytes as the payload. `None`: the payload is kept and offered whole.
    fn place(&mut self, first: &PacketHead<'_>) -> Option<Vec<SharedSlice>> {
        let _ = first;
        None
    }

    /// The payload of a packet that [`place`](Self::place) was asked for is where it belongs.
    fn placed(&mut self, inject: &mut dyn Inject, head: &PacketHead<'_>) {
        let _ = (inject, head);
    }

    /// An operation with a ticket has ended.
    fn complete(&mut self, ticket: Ticket, outcome: Outcome);

    /// A peer broke the rules and was cut off.
    fn corrupt(&mut self, rank: Rank);

    /// The client of that incarnation of a rank has left in order, though its process may live on, and perhaps without a
    /// goodbye to this context. What it sent before that has come and is yet to be delivered.
    fn left(&mut self, rank: Rank, incarnation: u32) {
        let _ = (rank, incarnation);
    }
}

/// The payloads of a batch of packets, of which one at a time is in private memory.
pub trait Payloads {
    /// Takes the next one; `None` at their end.
    fn next(&mut self) -> Option<&[u8]>;

    /// The one that was taken last is not taken.
    fn put_back(&mut self);
}

/// What is to become of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is done with.
    Taken,
    /// Keep it, and everything behind it, and offer it again later.
    Hold,
}

/// A packet without its payload.
#[derive(Clone, Copy, Debug)]
pub struct PacketHead<'a> {
    /// Who sent it.
    pub source: Endpoint,
    /// The protocol, as the sender counts it.
    pub protocol: ProtocolId,
    /// As in the descriptor.
    pub cookie: u64,
    /// Message info, 0 to 112 bytes.
    pub info: &'a [u8],
    /// Length of the payload in bytes.
    pub len: usize,
}

/// A packet as the device found it.
#[derive(Debug)]
pub struct Packet<'a> {
    /// Who sent it.
    pub source: Endpoint,
    /// The protocol, as the sender counts it.
    pub protocol: ProtocolId,
    /// As in the descriptor.
    pub kind: u8,
    /// As in the descriptor.
    pub cookie: u64,
    /// Message info, 0 to 112 bytes.
    pub info: &'a [u8],
    /// The payload.
    pub body: Body<'a>,
}

impl<'a> Packet<'a> {
    /// A packet without info.
    #[inline]
    #[must_use]
    pub fn plain(source: Endpoint, protocol: ProtocolId, cookie: u64, body: Body<'a>) -> Self {
        Self { source, protocol, kind: 0, cookie, info: &[], body }
    }

    /// The packet as its protocol sees it; its payload is gone from here then.
    #[must_use]
    pub fn take(&mut self) -> Incoming<'a> {
        Incoming {
            source: self.source,
            info: self.info,
            body: std::mem::replace(&mut self.body, Body::Short(&[])),
            protocol: self.protocol,
            life: 0,
            cookie: self.cookie,
        }
    }
}

/// Page memory that a caller fills and then sends: the payload is never copied.
///
/// Dropped unsent, it goes back to its device. The context that lent it sends it without a copy; any other may send it, too, and
/// copies it.
pub struct Loan {
    memory: SharedSlice,
    key: u64,
    owner: Option<Arc<dyn LeaseOwner>>,
}

impl Loan {
    /// A loan of `memory`, whose length is what was asked for. `key` is the device's name for the page; `owner` takes it back
    /// under that name if the loan is dropped unsent.
    #[must_use]
    pub fn new(memory: SharedSlice, key: u64, owner: Arc<dyn LeaseOwner>) -> Self {
        Self { memory, key, owner: Some(owner) }
    }

    /// The memory, to be filled.
    #[inline]
    #[must_use]
    pub fn memory(&self) -> LoanedPage<'_> {
        LoanedPage::of(self.memory, self)
    }

    /// Its length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has no bytes.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// The device's name for the page.
    #[inline]
    #[must_use]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// What tells whoever lent it from all others, as long as this loan or the lender is there.
    #[must_use]
    pub(crate) fn lender(&self) -> usize {
        self.owner.as_ref().map_or(0, |owner| Arc::as_ptr(owner).cast::<()>() as usize)
    }

    /// It was sent: nobody takes it back when it is dropped.
    #[inline]
    pub fn sent(&mut self) {
        self.owner = None;
    }
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loan").field("len", &self.memory.len()).field("key", &self.key).finish()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(owner) = &self.owner {
            owner.release(self.key);
        }
    }
}
