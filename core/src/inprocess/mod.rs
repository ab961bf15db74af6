//! The in-process device: all ranks of a job inside one process, for tests, solo jobs and documentation.
//!
//! It is made to be right and simple, not fast: one mutex per receiving endpoint guards its lanes.
//!
//! ```text
//!   rank 0, context 0 --lane--+
//!   rank 1, context 0 --lane--+--> Inbox of rank 2, context 0 --advance--> Sink
//!   rank 2, context 0 --lane--+        |
//!                                      +-- armed: senders ring the Bell
//! ```
//! Puts and gets act at once on one arena per client, whose memory is handed out by [`Heap`](crate::heap::Heap) and is never unmapped.

mod arena;
mod net;
mod port;

pub use arena::Arena;

use net::{Inbox, Life, Net};
use port::InProcessPort;

use crate::caps::Caps;
use crate::device::{Allocation, Device, Doorbell, PeerEvent, PeerNews, Port, Rouse};
use crate::error::{DeviceError, MemoryError};
use crate::ids::{ClientId, ContextId, Endpoint, JobShape, Rank};
use crate::memory::SharedSlice;
use async_trait::async_trait;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The least that [`Limits::max_inline`] may be, in bytes: the messager's own records must fit into one packet.
pub const MIN_INLINE: usize = 80;

/// Sizes of an in-process device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Packets that one endpoint may have on their way to another.
    pub packets_per_pair: usize,
    /// Longest payload in bytes that is delivered as a short body; at least [`MIN_INLINE`].
    pub max_inline: usize,
    /// Longest payload in bytes of one packet; at least `max_inline`.
    pub max_eager: usize,
    /// Fragment length in bytes of streamed messages; 1 to `max_eager`.
    pub fragment: usize,
    /// Memory of each rank that peers can reach, in bytes.
    pub segment: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            packets_per_pair: 256,
            max_inline: 256,
            max_eager: 64 << 10,
            fragment: 64 << 10,
            segment: 16 << 20,
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks panics, so that poisoning carries no meaning.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All ranks of a job inside this process; makes their devices.
pub struct Fabric {
    nets: Vec<Arc<Net>>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric").field("clients", &self.nets.len()).finish_non_exhaustive()
    }
}

/// Makes fabrics.
///
/// ```
/// use posthaste_core::inprocess::InProcessFabric;
/// use posthaste_core::{ClientId, JobShape, Rank};
///
/// let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
/// let device = fabric.device(ClientId(0), Rank(1));
/// assert!(device.reaches(Rank(0)));
/// ```
#[derive(Debug)]
pub struct InProcessFabric;

impl InProcessFabric {
    /// A fabric of the usual sizes.
    #[allow(clippy::new_ret_no_self, reason = "a fabric is shared by the devices it makes")]
    #[must_use]
    pub fn new(shape: JobShape) -> Arc<Fabric> {
        Self::with_limits(shape, Limits::default())
    }

    /// A fabric of these sizes; what is out of range is brought into range.
    #[must_use]
    pub fn with_limits(shape: JobShape, limits: Limits) -> Arc<Fabric> {
        let max_inline = limits.max_inline.max(MIN_INLINE);
        let max_eager = limits.max_eager.max(max_inline);
        let limits = Limits {
            packets_per_pair: limits.packets_per_pair.max(1),
            max_inline,
            max_eager,
            fragment: limits.fragment.clamp(1, max_eager),
            ..limits
        };
        let net = || {
            Arc::new(Net {
                shape,
                limits,
                arena: Arena::new(shape.ranks, limits.segment),
                inboxes: (0..shape.endpoints()).map(|_| Inbox::default()).collect(),
                lives: (0..shape.ranks).map(|_| AtomicU32::new(0)).collect(),
                incarnations: (0..shape.ranks).map(|_| AtomicU32::new(0)).collect(),
                departures: AtomicU64::new(0),
                watchers: (0..shape.ranks).map(|_| Mutex::default()).collect(),
            })
        };
        Arc::new(Fabric { nets: (0..shape.clients).map(|_| net()).collect() })
    }
}

impl Fabric {
    /// The device of one client of one rank.
    ///
    /// # Panics
    /// If the job has no such client or rank.
    #[must_use]
    pub fn device(&self, client: ClientId, rank: Rank) -> Arc<dyn Device> {
        let net = self.nets[client.index()].clone();
        assert!(
            rank.0 < net.shape.ranks,
            "rank {rank} does not exist: the job has {} ranks",
            net.shape.ranks
        );
        let limits = net.limits;
        let caps = Caps {
            max_eager: limits.max_eager,
            fragment: limits.fragment,
            native_put: true,
            native_get: true,
            native_atomics: true,
            mappable: true,
            cost: 1,
            ..Caps::send_only("in-process", limits.max_inline)
        };
        let incarnation = net.incarnation(rank);
        Arc::new(InProcessDevice { net, rank, incarnation, caps })
    }

    /// Simulates a crash of the rank, all clients of it: what it sent before is still delivered, then the others are
    /// told that it is lost. Nothing that the rank does from now on has any effect.
    ///
    /// # Examples
    /// ```
    /// use posthaste_core::descriptor::Op;
    /// use posthaste_core::device::{SourceTable, Sources, Stop};
    /// use posthaste_core::inprocess::InProcessFabric;
    /// use posthaste_core::{ClientId, ContextId, Descriptor, Fault, JobShape, Rank};
    ///
    /// let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
    /// let mut port = fabric.device(ClientId(0), Rank(0)).port(ContextId(0))?;
    /// fabric.kill(Rank(0));
    /// // The dead do not send.
    /// let send = Descriptor { op: Op::Send, rank: Rank(1), ..Descriptor::default() };
    /// let table = SourceTable::default();
    /// let sources = Sources::of(&table);
    /// assert_eq!(port.inject(&[send], &sources).stop, Stop::Fault(Fault::Shutdown));
    /// # Ok::<(), posthaste_core::DeviceError>(())
    /// ```
    pub fn kill(&self, rank: Rank) {
        for net in &self.nets {
            net.depart(rank, Life::Dead);
        }
    }

    /// Simulates that a rank which was killed is started again: the others are told, and devices made from now on are those
    /// of its next incarnation. What is still on its way to or from the old one goes nowhere.
    pub fn restart(&self, rank: Rank) {
        for net in &self.nets {
            net.restart(rank);
        }
    }
}

/// The device of one client of one rank; see [`Fabric::device`].
pub struct InProcessDevice {
    net: Arc<Net>,
    rank: Rank,
    incarnation: u32,
    caps: Caps,
}

impl std::fmt::Debug for InProcessDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcessDevice").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[async_trait]
impl Device for InProcessDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reaches(&self, rank: Rank) -> bool {
        rank.0 < self.net.shape.ranks
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        if context.0 >= self.net.shape.contexts {
            let problem = format!("{context} does not exist: the job has {}", self.net.shape.contexts);
            return Err(DeviceError::Mismatch { subject: "in-process device", problem });
        }
        Ok(Box::new(InProcessPort {
            net: self.net.clone(),
            me: Endpoint::new(self.rank, context),
            index: self.net.shape.index(Endpoint::new(self.rank, context)),
            incarnation: self.incarnation,
            known: vec![0; self.net.shape.ranks as usize].into(),
            ended: VecDeque::new(),
            departures_told: 0,
            next_lane: 0,
        }))
    }

    fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
        self.net.inboxes[self.net.shape.index(Endpoint::new(self.rank, context))].bell.clone()
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        self.net.arena.allocate(self.rank, len)
    }

    fn free(&self, allocation: Allocation) {
        self.net.arena.free(self.rank, &allocation);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        self.net.arena.slice(rank, offset, len)
    }

    fn rouser(&self, target: Endpoint) -> Option<Arc<dyn Rouse>> {
        let index = self.net.shape.index(target);
        (index < self.net.inboxes.len())
            .then(|| Arc::new(InProcessRouser { net: self.net.clone(), index }) as _)
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        locked(&self.net.watchers[self.rank.index()]).news = Some(news.clone());
        for rank in (0..self.net.shape.ranks).map(Rank).filter(|rank| *rank != self.rank) {
            let incarnation = self.net.incarnation(rank);
            if incarnation > 0 {
                news(rank, PeerEvent::Up { incarnation });
            }
        }
        Ok(())
    }

    async fn close(&self) {
        if self.net.incarnation(self.rank) == self.incarnation {
            self.net.depart(self.rank, Life::Left);
            // Whom it was told to leads back to the ports, which keep this alive.
            let news = locked(&self.net.watchers[self.rank.index()]).news.take();
            drop(news);
        }
    }
}

/// Rouses one endpoint.
struct InProcessRouser {
    net: Arc<Net>,
    index: usize,
}

impl Rouse for InProcessRouser {
    fn rouse(&self) {
        self.net.inboxes[self.index].rouse();
    }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::*;
    use crate::descriptor::{Descriptor, Op};
    use crate::device::{Inject, Packet, Sink, Sources, Stop, Verdict};
    use crate::error::Fault;
    use crate::slot::{Outcome, Ticket};
    use std::task::Context;

    #[test]
    fn a_port_rings_only_while_it_is_armed_and_stays_awake_for_what_came_before() {
        let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
        let devices = [0, 1].map(|rank| fabric.device(ClientId(0), Rank(rank)));
        let mut ports = devices.each_ref().map(|device| device.port(ContextId(0)).expect("a port"));
        let bell = devices[1].doorbell(ContextId(0));
        let rung = || bell.poll_ring(&mut Context::from_waker(std::task::Waker::noop())).is_ready();
        let send = Descriptor { op: Op::Send, rank: Rank(1), ..Descriptor::default() };
        let table = crate::device::SourceTable::default();
        let sources = Sources::of(&table);
        let [sender, receiver] = &mut ports;
        assert_eq!(sender.inject(&[send], &sources).stop, Stop::Done);
        assert!(!rung(), "nobody sleeps");
        assert!(!receiver.arm(false), "something has come in");
        let mut seen = Seen { packets: 0, verdict: Verdict::Hold };
        assert_eq!(receiver.advance(10, &mut seen), 0);
        assert_eq!(seen.packets, 1);
        assert!(receiver.arm(false), "what is held does not keep it awake");
        seen.verdict = Verdict::Taken;
        assert_eq!(receiver.advance(10, &mut seen), 1);
        assert_eq!(sender.inject(&[send, send], &sources).taken, 2);
        assert!(rung() && !rung(), "once is enough");
        assert_eq!(sender.inject(&[send], &sources).taken, 1);
        assert!(rung(), "a ring in vain does not disarm");
        receiver.disarm();
        assert_eq!(receiver.advance(10, &mut seen), 3);
        fabric.kill(Rank(0));
        assert!(!receiver.arm(false), "a death keeps it awake until it is told");
        assert_eq!(
            sender.inject(&[send], &sources).stop,
            Stop::Fault(Fault::Shutdown),
            "the dead do not send"
        );
    }

    #[test]
    fn a_death_is_told_after_what_the_dead_had_sent() {
        use futures::FutureExt;
        let fabric = InProcessFabric::new(JobShape { ranks: 2, clients: 1, contexts: 1 });
        let devices = [0, 1].map(|rank| fabric.device(ClientId(0), Rank(rank)));
        let mut ports = devices.each_ref().map(|device| device.port(ContextId(0)).expect("a port"));
        let told = Arc::new(Mutex::new(Vec::new()));
        let errors = told.clone();
        let opened = devices[1].open(Arc::new(move |rank, fault| locked(&errors).push((rank, fault))));
        opened.now_or_never().expect("at once").expect("it opens");
        let send = Descriptor { op: Op::Send, rank: Rank(1), ..Descriptor::default() };
        let table = crate::device::SourceTable::default();
        let sources = Sources::of(&table);
        assert_eq!(ports[0].inject(&[send, send], &sources).taken, 2);
        fabric.kill(Rank(0));
        let mut seen = Seen { packets: 0, verdict: Verdict::Taken };
        assert_eq!(ports[1].advance(1, &mut seen), 1);
        assert!(locked(&told).is_empty(), "a packet is still to come");
        assert_eq!(ports[1].advance(10, &mut seen), 2);
        assert_eq!(
            (seen.packets, locked(&told).clone()),
            (2, vec![(Rank(0), PeerEvent::down(Fault::PeerLost(Rank(0))))])
        );
        assert_eq!(ports[1].advance(10, &mut seen), 0);
        assert!(ports[1].arm(true));
    }

    struct Seen {
        packets: usize,
        verdict: Verdict,
    }

    impl Sink for Seen {
        fn packet(&mut self, _inject: &mut dyn Inject, _packet: &mut Packet<'_>) -> Verdict {
            self.packets += 1;
            self.verdict
        }

        fn complete(&mut self, _ticket: Ticket, _outcome: Outcome) {}

        fn corrupt(&mut self, _rank: Rank) {}
    }
}
