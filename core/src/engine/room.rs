//! Room in the FIFO of a target: those who wait for it, and the places that are promised to them.

use super::peer::Peer;
use super::{State, Ticket};
use crate::row::Row;
use crate::slot::Completer;

/// Milliseconds in which of the places that are promised at least one has to be taken, or all are given to others.
const PATIENCE: u64 = 50;
/// The timer for that: no operation has this ticket.
pub(super) const PLACES: Ticket = match Ticket::from_word(u64::MAX - 2) {
    Some(ticket) => ticket,
    None => unreachable!(),
};
/// Slots of the longest descriptor: a place is promised only where there is room for that.
const LONGEST: usize = 3;

/// Who waits for room in the FIFO of a peer. [`Peer::in_row`] tells whether anybody does, or has yet to take a place.
#[derive(Default)]
pub(crate) struct Room {
    /// Sends that wait, in order.
    waiters: Row<Ticket>,
    /// Places promised to waiters that were woken.
    promised: usize,
    /// None of them was taken since the timer expired last.
    untaken: bool,
}

impl Peer {
    /// Slots that awaited sends may still take.
    pub fn room(&self, capacity: usize) -> usize {
        let used = self.fifo.as_ref().map_or(0, |fifo| fifo.len());
        capacity.saturating_sub(used + self.room.promised)
    }

    /// Whether somebody waits who was promised nothing yet.
    pub fn is_waited_for_room(&self) -> bool {
        !self.room.waiters.is_empty()
    }

    /// Somebody has come back for the place that was promised, or gives it up.
    pub fn take_place(&mut self) {
        self.room.promised = self.room.promised.saturating_sub(1);
        self.room.untaken = false;
        self.note_row();
    }

    /// Nobody gets a place any more. Returns who waited.
    pub fn drain_row(&mut self) -> Vec<Ticket> {
        let waiters = self.room.waiters.drain(..).collect();
        self.note_row();
        waiters
    }

    /// Wakes those who wait, as far as there are places. Returns whether any was promised.
    fn promise_places(&mut self, capacity: usize, completer: &mut Completer) -> bool {
        let before = self.room.promised;
        while self.room(capacity) >= LONGEST || (self.queue_is_empty() && self.room.promised == 0) {
            let Some(ticket) = self.room.waiters.pop_front() else { break };
            if completer.complete_if_wanted(ticket) {
                self.room.untaken &= self.room.promised > 0;
                self.room.promised += 1;
            }
        }
        self.note_row();
        self.room.promised > before
    }

    /// A while has passed. Places of which none was taken meanwhile are promised to nobody any more; returns whether there
    /// were such.
    fn look_at_promises(&mut self) -> bool {
        let lapse = self.room.promised > 0 && std::mem::replace(&mut self.room.untaken, true);
        if lapse {
            self.room.promised = 0;
            self.note_row();
        }
        lapse
    }

    fn note_row(&mut self) {
        self.in_row = self.room.promised > 0 || !self.room.waiters.is_empty();
    }
}

impl State {
    /// Puts somebody behind those who wait for a place.
    pub(super) fn wait_for_room(&mut self, index: usize, ticket: Ticket) {
        let State { peers, completer, .. } = self;
        if let Some(peer) = peers[index].as_mut() {
            peer.room.waiters.push_back(ticket, completer);
            peer.note_row();
        }
        self.mark_busy(index);
    }

    /// Wakes senders that wait for a place, as far as there are places.
    pub(super) fn hand_out_room(&mut self, index: usize) {
        let capacity = self.config.fifo_slots;
        let State { peers, completer, .. } = self;
        let Some(peer) = peers[index].as_mut() else { return };
        if peer.is_waited_for_room() && peer.promise_places(capacity, completer) {
            self.watch_promises();
        }
    }

    /// Nothing that comes later passes whoever was promised a place. But a future that is kept and not polled any more, or
    /// forgotten, never takes it: so that it does not hold up everybody else, there is a time for that.
    fn watch_promises(&mut self) {
        if !std::mem::replace(&mut self.watches_promises, true) {
            self.timers.set_in(PATIENCE, PLACES);
            // Whoever sleeps is to see when to wake up for that.
            self.restless = true;
        }
    }

    /// The timer has expired.
    #[cold]
    pub(super) fn promises_in_time(&mut self) {
        self.watches_promises = false;
        for index in 0..self.peers.len() {
            let Some(peer) = self.peers[index].as_mut() else { continue };
            if peer.look_at_promises() {
                self.hand_out_room(index);
            }
            if self.peers[index].as_ref().is_some_and(|peer| peer.room.promised > 0) {
                self.watch_promises();
            }
        }
    }
}
