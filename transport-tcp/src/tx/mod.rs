//! The sending half of a port: what waits for each peer, and what was asked of it.

mod answering;
mod answers;
mod closing;
mod local;
mod rma;
mod send;

pub(crate) use answering::Answering;
pub(crate) use answers::{AnswerPart, Destination};
pub(crate) use local::Transit;

use crate::hub::Hub;
use crate::link::{Leave, Payload, TxLink};
use crate::record::RecordKey;
use posthaste_core::descriptor::{Op, SourceKind};
use posthaste_core::device::{Inject, Injected, Source, Sources, Stop};
use posthaste_core::slot::{Outcome, Value};
use posthaste_core::{Descriptor, Endpoint, Fault, JobShape, Loan, Ticket};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;

/// Waiting bytes, of those that may wait, that are worth a system call before the next `advance`, which writes in any case. So
/// many, because a burst of long payloads then goes in few calls: with one for each, the end of each becomes a segment of its
/// own, and puts of 64 KiB were carried at 0.88 times the speed of a bare stream and not at its own.
const fn worth_writing(outgoing: usize) -> usize {
    outgoing / 4 * 3
}
/// Bytes that were asked for and are not here, with which a further get is in no hurry.
const ASKED: u64 = 256 << 10;
/// Pieces of a long put that follow each other before others have their turn.
const PIECES: usize = 16;

/// The sending half.
pub(crate) struct Tx {
    pub hub: Arc<Hub>,
    pub me: Endpoint,
    index: usize,
    pub shape: JobShape,
    pub links: Vec<Option<Box<TxLink>>>,
    /// Packets to this endpoint itself.
    pub local: VecDeque<Transit>,
    local_bytes: usize,
    /// Ends that are reported at the next `advance`.
    pub ended: Vec<(Ticket, Outcome)>,
    /// Links with something to do at the next `advance`.
    touched: Vec<usize>,
    /// Inside `advance`, which writes at its end.
    pub advancing: bool,
    /// The driver was woken since the last `advance` to write what was left.
    pub rung: bool,
}

/// A descriptor that no correct caller injects.
#[cold]
fn defect(descriptor: &Descriptor) -> Stop {
    debug_assert!(false, "impossible descriptor: {descriptor:?}");
    Stop::Fault(Fault::PeerLost(descriptor.rank))
}

fn payload<'a>(descriptor: &'a Descriptor, sources: &'a Sources<'_>) -> Result<Payload<'a>, Stop> {
    if descriptor.source_kind == SourceKind::Held {
        let held = sources.table.held.get(descriptor.source[0] as usize);
        let first = descriptor.source[1] as usize;
        let end = first.checked_add(descriptor.len as usize);
        return match (held, end) {
            (Some(bytes), Some(end)) if end <= bytes.len() => Ok(Payload::Held(bytes.slice(first..end))),
            _ => Err(defect(descriptor)),
        };
    }
    match sources.resolve(descriptor) {
        Some(Source::Private(bytes)) => Ok(Payload::Private(bytes)),
        Some(Source::Shared(slice)) => Ok(Payload::Shared(slice)),
        Some(Source::Loan(..)) | None => Err(defect(descriptor)),
    }
}

impl Tx {
    pub fn new(hub: Arc<Hub>, me: Endpoint) -> Tx {
        let shape = hub.shape;
        Tx {
            index: shape.index(me),
            links: (0..shape.endpoints()).map(|_| None).collect(),
            shape,
            me,
            hub,
            local: VecDeque::new(),
            local_bytes: 0,
            ended: Vec::new(),
            touched: Vec::new(),
            advancing: false,
            rung: false,
        }
    }

    /// Whether nothing is sent to the peer any more.
    pub fn is_dead(&self, index: usize) -> bool {
        self.links[index].as_ref().is_some_and(|link| link.dead.is_some())
    }

    /// A connection was settled with a peer that is not dead.
    pub fn settle(&mut self, index: usize, stream: Arc<TcpStream>, key: Option<RecordKey>) {
        let peer = self.shape.endpoint(index);
        let link = self.links[index].get_or_insert_with(|| Box::new(TxLink::new(peer)));
        link.stream = Some(stream);
        link.key = key;
        self.touch(index);
    }

    /// A peer's connection has ended, or its rank is gone: nothing is sent to it any more.
    pub fn kill(&mut self, index: usize, fault: Fault) {
        let peer = self.shape.endpoint(index);
        let link = self.links[index].get_or_insert_with(|| Box::new(TxLink::new(peer)));
        let fault = link.dead.unwrap_or(fault);
        // The engine ends the operations.
        **link = TxLink { dead: Some(fault), touched: link.touched, ..TxLink::new(peer) };
    }

    /// The peer was started again: nothing is known of it.
    pub fn forget(&mut self, index: usize) {
        self.links[index] = None;
        self.touched.retain(|&touched| touched != index);
    }

    pub fn touch(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index]
            && !link.touched
        {
            link.touched = true;
            self.touched.push(index);
        }
    }

    /// The link to a peer, asking for a connection at the first time.
    #[inline]
    fn link(&mut self, index: usize, descriptor: &Descriptor) -> Result<&mut TxLink, Stop> {
        if self.links.get(index).is_none_or(Option::is_none) {
            self.open_link(index, descriptor)?;
        }
        match &mut self.links[index] {
            Some(link) => match link.dead {
                None if link.leave == Leave::No => {
                    link.quiet = 0;
                    Ok(link)
                }
                // Nothing follows the last frame.
                None => Err(Stop::Fault(Fault::Shutdown)),
                Some(fault) => Err(Stop::Fault(fault)),
            },
            None => Err(Stop::Full),
        }
    }

    #[cold]
    fn open_link(&mut self, index: usize, descriptor: &Descriptor) -> Result<(), Stop> {
        if index >= self.links.len() {
            return Err(defect(descriptor));
        }
        let peer = self.shape.endpoint(index);
        self.hub.want(self.me.context, peer).map_err(Stop::Fault)?;
        tracing::debug!(me = %self.me, %peer, "connecting");
        self.links[index] = Some(Box::new(TxLink::new(peer)));
        Ok(())
    }

    /// `Ok(true)`: complete. `Ok(false)`: its end will be reported, if it has a ticket.
    #[inline]
    fn one(&mut self, descriptor: &Descriptor, sources: &Sources<'_>, alone: bool) -> Result<bool, Stop> {
        match descriptor.op {
            Op::Send => self.send(descriptor, sources, alone),
            Op::Nop => Ok(true),
            Op::Put if descriptor.rank == self.me.rank => self.put_here(descriptor, sources),
            Op::Get if descriptor.rank == self.me.rank => self.get_here(descriptor, sources),
            Op::Put => self.put(descriptor, sources).map(|()| false),
            Op::Get => self.get(descriptor, sources).map(|()| false),
            Op::Atomic | Op::Jump | Op::Local => Err(defect(descriptor)),
        }
    }

    /// Writes what waits, and goes on with what is too long for one go. Returns whether anything moved.
    pub fn flush_touched(&mut self) -> usize {
        let mut moved = 0;
        let limits = self.hub.limits;
        let mut at = 0;
        while at < self.touched.len() {
            let index = self.touched[at];
            let Some(link) = &mut self.links[index] else {
                self.touched.swap_remove(at);
                continue;
            };
            let before = link.out.len();
            let worked = link.work(limits.outgoing, limits.get_chunk as u64, limits.get_window as u64);
            if !link.is_flushed() {
                link.flush();
            }
            // A long put goes on as soon as there is room for its next piece.
            let mut again = worked;
            for _ in 0..PIECES {
                if !again || link.blocked || !link.can_write() {
                    break;
                }
                again = link.work(limits.outgoing, limits.get_chunk as u64, limits.get_window as u64);
                if !link.is_flushed() {
                    link.flush();
                }
            }
            // Nobody sleeps meanwhile, and others have their turn.
            moved += usize::from(again && !link.blocked && link.can_write());
            let room = link.out.len() < before || worked;
            if room && std::mem::take(&mut link.wanted) {
                moved += 1;
            }
            link.written = false;
            if link.owes() && link.dead.is_none() {
                at += 1;
            } else {
                link.touched = false;
                self.touched.swap_remove(at);
            }
        }
        moved
    }

    /// Whether something waits that could be written if it were tried: of a long put, which no event of the kernel's would wake
    /// anybody for as long as it has room, the rest.
    pub fn could_write(&self) -> bool {
        self.touched
            .iter()
            .filter_map(|&index| self.links[index].as_ref())
            .any(|link| link.owes() && link.can_write() && !link.blocked)
    }

    /// The kernel has room again.
    pub fn unblocked(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index]
            && link.blocked
        {
            link.blocked = false;
            self.touch(index);
        }
    }

    /// Whether the kernel has no room for what waits for a peer.
    pub fn is_blocked(&self, index: usize) -> bool {
        self.links[index].as_ref().is_some_and(|link| link.blocked)
    }

    /// Whether somebody who was refused would not be refused now. Said once.
    pub fn takes_again(&mut self) -> bool {
        let limit = self.hub.limits.outgoing;
        let mut takes = false;
        for link in self.links.iter_mut().flatten() {
            if link.wanted
                && link.job.is_none()
                // What waits for its connection is no less than it was.
                && (link.out.is_empty() || (link.can_write() && link.out.len() < limit))
                && !link.blocked
            {
                link.wanted = false;
                takes = true;
            }
        }
        takes
    }

    /// Writes at once if the socket has nothing to do; a burst is left to the next `advance`, for which the driver is
    /// woken.
    #[inline]
    fn after(&mut self, index: usize, can_wait: bool) {
        let advancing = self.advancing;
        let own = !self.local.is_empty() || !self.ended.is_empty();
        if own && !advancing && !self.rung {
            self.rung = true;
            self.hub.door(self.me.context).bell.ring();
        }
        let most = self.hub.limits.outgoing;
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        if !link.owes() || !link.can_write() {
            return;
        }
        let worth = link.out.len() >= worth_writing(most);
        if !link.blocked && (worth || (!advancing && !link.written && !can_wait)) {
            link.written = true;
            link.flush();
        }
        self.touch(index);
        if !advancing && !self.rung {
            let idle = self.links[index].as_ref().is_none_or(|link| link.blocked || !link.owes());
            if !idle {
                self.rung = true;
                self.hub.door(self.me.context).bell.ring();
            }
        }
    }
}

impl Inject for Tx {
    #[inline]
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        let mut complete = true;
        let mut stop = Stop::Done;
        let mut taken = 0;
        let reported = self.ended.len();
        // What was asked for before keeps both sides busy until the next `advance`, which asks for more in one go.
        let can_wait = run.iter().all(|descriptor| descriptor.op == Op::Get)
            && run.first().is_some_and(|first| self.asked(self.shape.index(first.target())) >= ASKED);
        for descriptor in run {
            match self.one(descriptor, sources, run.len() == 1) {
                Ok(ended) => complete &= ended,
                Err(why) => {
                    stop = why;
                    break;
                }
            }
            taken += 1;
        }
        if let Some(first) = run.first() {
            let index = self.shape.index(first.target());
            if let Some(Some(link)) = self.links.get_mut(index) {
                link.refused = stop == Stop::Full;
            }
            self.after(index, can_wait);
            if !complete && first.rank == self.me.rank {
                // Nobody will take the others for complete now: each ticket has to be reported.
                for descriptor in &run[..taken] {
                    if let Some(ticket) = Ticket::from_word(descriptor.ticket)
                        && !self.ended.iter().skip(reported).any(|(ended, _)| *ended == ticket)
                    {
                        self.ended.push((ticket, Ok(Value::Unit)));
                    }
                }
            }
        }
        Injected { taken, stop, complete }
    }

    fn loan(&mut self, _len: usize) -> Option<Loan> {
        None
    }
}
