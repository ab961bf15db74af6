//! Atomic operations on memory whose device has none: carried out by its owner, in the order of the pair's lane.

use super::super::{Scope, State};
use super::source::{defect, part_of, place_of};
use super::{Answer, Landing, OpenGet, PART_COST};
use crate::descriptor::Descriptor;
use crate::device::{Sources, Stop, Verdict};
use crate::exposed::is_exposed;
use crate::slot::{Outcome, Ticket, Value};
use crate::wire;
use bytes::Bytes;

impl Scope<'_> {
    /// As [`step_put`](Self::step_put), for an atomic operation.
    pub(in super::super) fn step_atomic(
        &mut self,
        index: usize,
        mut front: Descriptor,
    ) -> Option<Option<Outcome>> {
        let is_own = front.rank == self.state.me.rank && !self.state.goes_over_send(index);
        if is_own && !self.state.aims_at_exposed(&front) {
            // Its own puts and gets are done as they are injected: packets to itself would come later.
            return Some(Some(self.atomic_here(&front)));
        }
        let (atomic, ticket) = (front, front.ticket);
        let fetch = matches!(front.word_op(), Some((_, true)));
        if !fetch {
            self.state.peer(index).over().begin(ticket);
        }
        match self.atomic_part(index, &atomic, &mut front.cookie, Ticket::from_word(ticket)) {
            Stop::Done if fetch => Some(None),
            Stop::Done => {
                self.state.peer(index).over().sent();
                self.state.settle_over(index);
                Some(None)
            }
            stop => self.interrupted(index, &front, stop),
        }
    }

    pub(in super::super) fn atomic_here(&self, atomic: &Descriptor) -> Outcome {
        let State { table, memory, .. } = &*self.state;
        let word = place_of(atomic, table).and_then(|place| memory.map(atomic.rank, place, atomic.len));
        let missing = crate::Fault::NoSuchMemory(atomic.rank);
        let (op, fetch) = atomic.word_op().ok_or(missing)?;
        let old = word.and_then(|word| word.apply(&op)).ok_or(missing)?;
        Ok(if fetch { op.len.value(old) } else { Value::Unit })
    }

    /// Sends an atomic operation. A cursor that is not 0 says that its answer has a place already, among those of gets.
    pub(super) fn atomic_part(
        &mut self,
        index: usize,
        atomic: &Descriptor,
        cursor: &mut u64,
        ticket: Option<Ticket>,
    ) -> Stop {
        let (_, window) = self.state.get_limits();
        let Some((op, fetch)) = atomic.word_op() else { return defect(atomic) };
        self.state.peer(index).over();
        let State { peers, table, .. } = &mut *self.state;
        let Some(peer) = peers[index].as_mut() else { return defect(atomic) };
        let (Some(place), Some(over)) = (place_of(atomic, table), peer.over.as_mut()) else {
            return defect(atomic);
        };
        let len = atomic.len;
        if fetch {
            peer.stuck = false;
            if *cursor == 0 {
                let into = Landing::Value(Vec::new());
                over.gets.push_back(OpenGet { ticket, len, asked: 0, received: 0, fault: None, into });
                over.gets_begun += 1;
                *cursor = 1;
            }
            if over.asked + len + PART_COST > window {
                peer.stuck = true;
                return Stop::Full;
            }
        }
        let (info, body) = wire::from_word_op(&op);
        let mut part = part_of(atomic, if fetch { wire::GET } else { wire::PUT }, place, 0);
        part.set_inline(&body);
        part.info_len = info.len() as u8;
        let sources = Sources { info: &info, ..Sources::of(table) };
        match self.inject.inject(std::slice::from_ref(&part), &sources).stop {
            Stop::Done => {}
            stop => {
                if fetch {
                    over.never_asked(stop);
                }
                return stop;
            }
        }
        if !fetch {
            over.puts += 1;
            return Stop::Done;
        }
        over.asked += len + PART_COST;
        over.parts.push_back((len, len));
        if let Some(open) = over.gets.back_mut() {
            open.asked = len;
        }
        Stop::Done
    }

    /// The peer asks for an atomic operation on this rank's memory. It is carried out now: in the order in which it came.
    /// `None`: no correct peer asks for that.
    pub(in super::super) fn atomic_asked(
        &mut self,
        index: usize,
        place: u64,
        info: &[u8],
        body: &[u8],
        fetch: bool,
    ) -> Option<Verdict> {
        let op = wire::word_op(info, body)?;
        let len = op.len.bytes();
        if !place.is_multiple_of(len) {
            return None;
        }
        let (_, window) = self.state.get_limits();
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        if fetch && peer.over().answering + len + PART_COST > window {
            return None;
        }
        let old = if is_exposed(place) {
            self.state.exposed.apply(place, &op)
        } else {
            self.state.memory.map(self.state.me.rank, place, len).and_then(|word| word.apply(&op))
        };
        if !fetch {
            self.handled(index, old.is_some());
            return Some(Verdict::Taken);
        }
        let idle = self.state.peer(index).over().answers.is_empty();
        let answer = match old {
            Some(old) => {
                let bytes = &old.to_le_bytes()[..len as usize];
                if idle && self.aside_of_queue(index, wire::GET_DATA, 0, &[], bytes) == Stop::Done {
                    return Some(Verdict::Taken);
                }
                let key = self.state.table.held.insert(Bytes::copy_from_slice(bytes));
                Answer::Data { key, len, sent: 0 }
            }
            None => Answer::Refused { len },
        };
        let over = self.state.peer(index).over();
        over.answering += answer.cost();
        over.answers.push_back(answer);
        self.state.mark_busy(index);
        Some(Verdict::Taken)
    }
}
