//! How FIFOs are served: in each round those with priority first, until they are empty or blocked, and then each of the others
//! in turn, as far as its service quantum goes. A long message is cut into parts, so that it delays nobody for longer than
//! that.
//!
//! Two long messages for the same target cannot be mixed, nor two runs of packets that have one end: who is in the middle
//! of one has the peer's *turn*, and the other waits.

use super::super::{Scope, State};
use super::{Extra, FIFOS};
use crate::descriptor::{Descriptor, MAX_INFO, Op};
use crate::device::{Sources, Stop};
use crate::error::Fault;
use crate::ids::ProtocolId;
use crate::slot::{Outcome, Value};
use crate::wire;

/// What a descriptor counts for in a service quantum besides its bytes.
const COST: u64 = 64;

/// Why the service of a FIFO ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Served {
    Empty,
    Blocked,
    Quantum,
}

impl Scope<'_> {
    /// A round: those with priority, and when these have nothing that can go, everybody else once, those with priority in
    /// between again.
    pub(in crate::engine) fn pump_fifos(&mut self) -> usize {
        self.state.fifos.more = false;
        let (mut moved, mut urgent) = self.pump_urgent();
        let count = self.state.fifos.others.len();
        let (first, mut turns) = (self.state.fifos.next, 0);
        while turns < count && !urgent {
            // One that was closed and empty is not in the list any more.
            let others = &self.state.fifos.others;
            let key = others.get((first + turns) % count).copied();
            turns += 1;
            let Some(key) = key else { continue };
            let quantum = self.state.fifos.all[key].options.quantum;
            let (some, served) = self.serve(key, quantum);
            moved += some;
            self.state.fifos.more |= served == Served::Quantum;
            let (some, waits) = self.pump_urgent();
            moved += some;
            urgent = waits;
        }
        // Who has had no turn is the first in the next round; if all have, another one than in this.
        let ahead = if turns == count { 1 } else { turns };
        self.state.fifos.next = (first + ahead).checked_rem(count).unwrap_or(0);
        moved
    }

    /// Serves each of those with priority once; whether one of them could go on.
    fn pump_urgent(&mut self) -> (usize, bool) {
        let (mut moved, mut waits) = (0, false);
        for at in 0..self.state.fifos.urgent.len() {
            let Some(&key) = self.state.fifos.urgent.get(at) else { continue };
            let quantum = self.state.fifos.all[key].options.quantum;
            let (some, served) = self.serve(key, quantum);
            moved += some;
            waits |= served == Served::Quantum;
        }
        self.state.fifos.more |= waits;
        (moved, waits)
    }

    /// Injects from a FIFO, so many bytes at most.
    fn serve(&mut self, key: usize, quantum: u64) -> (usize, Served) {
        let (mut moved, mut budget) = (0, quantum);
        loop {
            let extra = &self.state.fifos.all[key];
            let front = extra.fifo.front();
            // What waits for a rank that is gone ends, be the FIFO served or not: others may wait for that. It costs no budget, for
            // which nobody would come back to a FIFO that is not served.
            let is_gone = front.as_ref().is_some_and(|front| self.state.is_gone(front));
            let Some(mut front) = front.filter(|_| is_gone || extra.is_served()) else {
                if extra.closing && extra.fifo.is_empty() {
                    self.state.remove_fifo(key);
                }
                return (moved, Served::Empty);
            };
            if budget == 0 {
                return (moved.max(1), Served::Quantum);
            }
            let before = budget;
            match self.step_extra(key, &mut front, &mut budget) {
                None => {
                    self.state.fifos.all[key].fifo.set_front(&front);
                    if budget == 0 {
                        return (moved.max(1), Served::Quantum);
                    }
                    return (moved + usize::from(budget < before), Served::Blocked);
                }
                Some(outcome) => {
                    moved += 1;
                    budget = budget.saturating_sub(if is_gone { 0 } else { COST });
                    self.left_fifo(key);
                    if let Some(outcome) = outcome {
                        if let Err(fault) = outcome {
                            let index = self.state.shape.index(front.target());
                            self.not_sent(index, &front, fault);
                        }
                        self.state.finish_descriptor(&front, outcome);
                    }
                }
            }
        }
    }

    /// Goes on with the head of a FIFO. `None`: no room, or nothing is left of the budget.
    fn step_extra(
        &mut self,
        key: usize,
        front: &mut Descriptor,
        budget: &mut u64,
    ) -> Option<Option<Outcome>> {
        let index = self.state.shape.index(front.target());
        if let Some(fault) = self.state.peer(index).fault {
            self.state.give_turn(index, key);
            return Some(Some(Err(fault)));
        }
        if front.op == Op::Send && front.region != u32::from(self.state.peer(index).life) {
            // The rank was started again while it waited here.
            return Some(Some(Err(Fault::PeerLost(front.rank))));
        }
        if front.op == Op::Jump && self.state.departed {
            // What was recorded may write into memory that others take back when they hear of this side's leave.
            self.state.give_turn(index, key);
            return Some(Some(Err(Fault::Shutdown)));
        }
        if !self.state.is_announced(index, front) {
            return None;
        }
        let own_turn = self.state.peer(index).turn == Some(key);
        if self.state.peer(index).torn && !own_turn && self.state.cannot_be_mixed(index, front) {
            return Some(Some(Err(Fault::Shutdown)));
        }
        // It goes out now: a flush that was asked for meanwhile, as what lay before it in the FIFO was out, is ahead of it.
        self.state.peer(index).unflushed = true;
        if front.op == Op::Jump {
            if self.state.cannot_be_mixed(index, front) && !self.state.take_turn(index, key) {
                return None;
            }
            let done = self.step_jump(index, front, budget)?;
            self.state.give_turn(index, key);
            return Some(done);
        }
        let mut info = [0; MAX_INFO];
        let len = self.state.fifos.all[key].fifo.front_info(&mut info);
        let message = Descriptor { ticket: 0, offset: 0, region: 0, ..*front };
        let stop = if message.len > self.state.eager as u64 {
            if !self.state.take_turn(index, key) {
                return None;
            }
            self.stream_parts(&message, &info[..len], &mut front.offset, budget).0
        } else {
            let sources = Sources { info: &info[..len], ..Sources::of(&self.state.table) };
            let stop = self.inject.inject(std::slice::from_ref(&message), &sources).stop;
            // What finds no room is no progress.
            if stop != Stop::Full {
                *budget = budget.saturating_sub(message.len);
            }
            stop
        };
        let outcome = match stop {
            Stop::Full => return None,
            Stop::Done => Ok(Value::Unit),
            Stop::Fault(fault) => Err(fault),
        };
        self.state.give_turn(index, key);
        Some(Some(outcome))
    }

    /// The head of a FIFO is out: whoever waits for that is told.
    fn left_fifo(&mut self, key: usize) {
        let State { fifos, completer, .. } = &mut *self.state;
        let extra = &mut fifos.all[key];
        if let Some(front) = extra.fifo.pop().filter(|front| front.op != Op::Jump) {
            extra.messages -= front.slots();
        }
        extra.begun = false;
        let Extra { fifo, crossing, drains, .. } = extra;
        if fifo.was_crossed() {
            for ticket in crossing.drain(..) {
                completer.complete(ticket, Ok(Value::Unit));
            }
        }
        while drains.front().is_some_and(|&(until, _)| until <= fifo.head()) {
            if let Some((_, ticket)) = drains.pop_front() {
                completer.complete(ticket, Ok(Value::Unit));
            }
        }
        self.state.fill_fifo(key, false);
    }
}

impl State {
    /// A FIFO is closed and empty. Nobody is left who would wait for something of it, but for its slot.
    pub(super) fn remove_fifo(&mut self, key: usize) {
        let mut gone = self.fifos.remove(key);
        let drains = gone.drains.drain(..).map(|(_, ticket)| ticket);
        for ticket in gone.crossing.drain(..).chain(drains) {
            self.completer.complete(ticket, Err(Fault::Shutdown));
        }
    }

    pub(in crate::engine) fn mark_fifos_busy(&mut self) {
        if !std::mem::replace(&mut self.fifos.listed, true) {
            self.busy.push(FIFOS);
        }
    }

    /// Whether a descriptor is for a rank that is gone.
    fn is_gone(&self, descriptor: &Descriptor) -> bool {
        let index = self.shape.index(descriptor.target());
        self.peers[index].as_ref().is_some_and(|peer| peer.fault.is_some())
    }

    /// Whether a descriptor takes packets that cannot be mixed with others of their kind.
    pub(in crate::engine) fn cannot_be_mixed(&self, index: usize, descriptor: &Descriptor) -> bool {
        match descriptor.op {
            Op::Jump => self.run_is_long(descriptor),
            Op::Put | Op::Get | Op::Atomic => self.accesses_over_send(index, descriptor),
            Op::Send => descriptor.len > self.eager as u64,
            Op::Nop | Op::Local => false,
        }
    }

    /// Whether the peer hears of a descriptor's protocols before it: what tells of them may still wait in the peer's FIFO.
    fn is_announced(&mut self, index: usize, front: &Descriptor) -> bool {
        if front.op == Op::Jump {
            return self.run_is_announced(index, front);
        }
        let protocol = ProtocolId(front.protocol.0.saturating_sub(wire::FIRST_USER));
        self.peer(index).is_announced(protocol)
    }

    /// Whether a FIFO may begin, or go on with, what cannot be mixed with others of its kind for that peer.
    fn take_turn(&mut self, index: usize, key: usize) -> bool {
        let peer = self.peer(index);
        match peer.turn {
            Some(other) => other == key,
            None if peer.is_in_the_middle => false,
            None => {
                peer.turn = Some(key);
                self.fifos.all[key].begun = true;
                true
            }
        }
    }

    fn give_turn(&mut self, index: usize, key: usize) {
        let peer = self.peer(index);
        if peer.turn == Some(key) {
            peer.turn = None;
            // The peer's own FIFO may have waited for it.
            self.mark_busy(index);
        }
    }
}
