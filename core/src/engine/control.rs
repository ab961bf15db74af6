//! Controls over sends: packets that wait in no FIFO but in a short queue of their own, which sends do not wait for.

use super::peer::Peer;
use super::{Scope, State};
use crate::control::CONTROL_BYTES;
use crate::descriptor::{Descriptor, Op};
use crate::device::{Sources, Stop, Verdict};
use crate::error::{Fault, SendError};
use crate::ids::{ControlId, Endpoint, ProtocolId};
use crate::row::Row;
use crate::slot::Ticket;
use crate::wire;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zerocopy::IntoBytes;

/// Controls that wait for room, per peer.
const QUEUE: usize = 64;
/// Controls that wait to be registered, per peer; what comes behind them stays with the device.
const UNKNOWN: usize = 256;

type Payload = [u8; CONTROL_BYTES];

/// Controls to and from one endpoint that wait.
#[derive(Debug, Default)]
pub(crate) struct PeerControls {
    queue: VecDeque<(ControlId, Payload)>,
    /// What waits for a place in the queue, which it keeps: whoever was told that it has one might come too late for it.
    waiters: Row<((ControlId, Payload), Ticket)>,
    /// What has come and is not registered here yet.
    unknown: VecDeque<(ControlId, Payload)>,
    /// What became of a control of the peer's that did not go well; the latest, if it cannot be told at once.
    refusal: Option<Fault>,
}

/// How far a control got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlSent {
    /// It is on its way.
    Done,
    /// It waits for room, behind those that do. Once the ticket has ended well it is on its way; if it is given up before, it is
    /// not sent.
    Later(Ticket),
    /// Nothing was sent and nothing will be.
    Full,
}

impl Peer {
    /// Whether controls, or what became of the peer's, wait for room.
    pub fn has_controls(&self) -> bool {
        self.controls.as_ref().is_some_and(|controls| {
            !controls.queue.is_empty() || !controls.waiters.is_empty() || controls.refusal.is_some()
        })
    }

    /// Whether controls wait to be registered.
    pub fn has_unknown_controls(&self) -> bool {
        self.controls.as_ref().is_some_and(|controls| !controls.unknown.is_empty())
    }
}

impl Scope<'_> {
    /// Sends a control past everything that is queued but other controls. `wait`: whether the caller would wait for room.
    ///
    /// # Errors
    /// If the target is unknown or gone; nothing was sent.
    pub fn control(
        &mut self,
        target: Endpoint,
        control: ControlId,
        payload: [u8; CONTROL_BYTES],
        wait: bool,
    ) -> Result<ControlSent, SendError> {
        if self.state.closed {
            return Err(Fault::Shutdown.into());
        }
        let index = self.state.index_of(target)?;
        let peer = self.state.peer(index);
        if let Some(fault) = peer.fault {
            return Err(fault.into());
        }
        let is_first = |controls: &PeerControls| controls.queue.is_empty() && controls.waiters.is_empty();
        if peer.controls.as_deref().is_none_or(is_first) {
            match self.inject_control(index, control, &payload) {
                Stop::Done => return Ok(ControlSent::Done),
                Stop::Fault(fault) => return Err(fault.into()),
                Stop::Full => {}
            }
        }
        let controls = self.state.peer(index).controls.get_or_insert_default();
        if controls.queue.len() < QUEUE && controls.waiters.is_empty() {
            controls.queue.push_back((control, payload));
            self.state.mark_busy(index);
            return Ok(ControlSent::Done);
        }
        if !wait {
            return Ok(ControlSent::Full);
        }
        let ticket = self.operation(Some(target.rank))?;
        let State { peers, completer, .. } = &mut *self.state;
        if let Some(peer) = peers[index].as_mut() {
            let waiters = &mut peer.controls.get_or_insert_default().waiters;
            waiters.push_back(((control, payload), ticket), completer);
        }
        self.state.mark_busy(index);
        Ok(ControlSent::Later(ticket))
    }

    fn inject_control(&mut self, index: usize, control: ControlId, payload: &Payload) -> Stop {
        let target = self.state.shape.endpoint(index);
        let mut packet = Descriptor {
            op: Op::Send,
            rank: target.rank,
            context: target.context,
            protocol: ProtocolId(wire::CONTROL),
            cookie: control.0,
            ..Descriptor::default()
        };
        packet.set_inline(payload);
        let sources = Sources::of(&self.state.table);
        self.inject.inject(std::slice::from_ref(&packet), &sources).stop
    }

    /// Sends controls that waited, and gives their places to those behind them. Returns how many were sent.
    pub(super) fn pump_controls(&mut self, index: usize) -> usize {
        let mut moved = 0;
        loop {
            let peer = self.state.peers[index].as_ref().filter(|peer| peer.fault.is_none());
            let front = peer.and_then(|peer| peer.controls.as_ref()?.queue.front().copied());
            let Some((control, payload)) = front else { break };
            if self.inject_control(index, control, &payload) != Stop::Done {
                break;
            }
            moved += 1;
            let State { peers, completer, .. } = &mut *self.state;
            let Some(controls) = peers[index].as_mut().and_then(|peer| peer.controls.as_mut()) else { break };
            controls.queue.pop_front();
            // Whoever is not interested any more leaves its place to the next.
            while controls.queue.len() < QUEUE
                && let Some((waiting, ticket)) = controls.waiters.pop_front()
            {
                if completer.complete_if_wanted(ticket) {
                    controls.queue.push_back(waiting);
                }
            }
        }
        let controls = self.state.peers[index].as_ref().and_then(|peer| peer.controls.as_ref());
        if let Some(why) = controls.and_then(|controls| controls.refusal) {
            let body = wire::Refuse { index: u16::MAX.into(), code: wire::code_of(why).into() };
            if self.try_system(index, wire::REFUSE, body.as_bytes()) {
                self.state.peer(index).controls.get_or_insert_default().refusal = None;
                moved += 1;
            }
        }
        moved
    }

    /// A control has come. `None`: it is not one.
    pub(super) fn control_arrived(&mut self, index: usize, control: u64, bytes: &[u8]) -> Option<Verdict> {
        let payload: Payload = bytes.try_into().ok()?;
        let (control, peer) = (ControlId(control), self.state.peer(index));
        if peer.has_unknown_controls() || !self.run_control(index, control, payload) {
            let peer = self.state.peer(index);
            // Of a sender that has ended nothing more comes than what the device has already.
            let is_bounded = !peer.ends;
            let controls = peer.controls.get_or_insert_default();
            if is_bounded && controls.unknown.len() >= UNKNOWN {
                return Some(Verdict::Hold);
            }
            controls.unknown.push_back((control, payload));
            if controls.unknown.len() == 1 && !peer.has_aside() {
                self.state.aside.push(index);
            }
        }
        Some(Verdict::Taken)
    }

    /// Runs a control's handler; false if it may still be registered.
    fn run_control(&mut self, index: usize, control: ControlId, payload: Payload) -> bool {
        let source = self.state.shape.endpoint(index);
        let me = self.state.me.rank;
        let Some(handler) = self.state.controls.find(control) else {
            if self.state.ready {
                self.refuse_control(index, Fault::NoSuchProtocol(me));
            }
            return self.state.ready;
        };
        if catch_unwind(AssertUnwindSafe(|| handler(self, source, payload))).is_err() {
            self.state.stats.panics += 1;
            tracing::error!(%source, "a control's handler panicked");
            self.refuse_control(index, Fault::RemotePanicked(me));
        }
        true
    }

    fn refuse_control(&mut self, index: usize, why: Fault) {
        self.state.peer(index).controls.get_or_insert_default().refusal = Some(why);
        self.state.mark_busy(index);
    }

    /// Runs what waited to be registered, as far as it is by now. Returns the number of controls.
    #[cold]
    pub(super) fn retry_controls(&mut self, index: usize) -> usize {
        let mut taken = 0;
        while let Some((control, payload)) = self.first_unknown(index) {
            if !self.run_control(index, control, payload) {
                break;
            }
            taken += 1;
            if let Some(controls) = &mut self.state.peer(index).controls {
                controls.unknown.pop_front();
            }
        }
        taken
    }

    fn first_unknown(&self, index: usize) -> Option<(ControlId, Payload)> {
        self.state.peers[index].as_ref()?.controls.as_ref()?.unknown.front().copied()
    }
}

impl State {
    /// The peer is gone: nothing is sent to it, and what it sent to nobody yet is dropped.
    pub(super) fn drop_controls(&mut self, index: usize, fault: Fault) {
        let State { peers, completer, .. } = self;
        let Some(controls) = peers[index].as_mut().and_then(|peer| peer.controls.as_mut()) else { return };
        controls.queue.clear();
        controls.refusal = None;
        for (_, ticket) in controls.waiters.drain(..) {
            completer.complete(ticket, Err(fault));
        }
        // What one that left in order has sent counts, also for a name that is yet to be registered.
        if !matches!(fault, Fault::PeerClosed(_)) && !controls.unknown.is_empty() {
            controls.unknown.clear();
            if self.peers[index].as_ref().is_some_and(|peer| !peer.has_aside()) {
                self.aside.retain(|other| *other != index);
            }
        }
    }
}
