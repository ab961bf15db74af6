//! The software queue of replays (D27): a run with messages that take credit takes its place in its target's FIFO when it
//! has all of it, and the replays behind it to that target do after it. So the FIFO, through which credit and answers go
//! the other way, never waits for credit.

use super::super::peer::Waiter;
use super::super::{Scope, State};
use super::PatternError;
use super::store::Need;
use crate::descriptor::Descriptor;
use crate::error::{Fault, SendError};
use crate::ids::PatternId;
use crate::protocol::Flow;
use crate::slot::Ticket;

/// A run that waits for its turn.
#[derive(Debug)]
pub(crate) struct Parked {
    jump: Descriptor,
    /// The protocol that it collects credit of, among those of the run.
    need: usize,
    /// Credits of that protocol that it has.
    got: u32,
    /// Its place among the senders that wait for one.
    waiter: Option<Ticket>,
}

impl Scope<'_> {
    pub(super) fn check_credit(&self, id: PatternId) -> Result<(), PatternError> {
        let Some(section) = self.state.patterns.section(id) else { return Ok(()) };
        let config = self.state.config;
        for run in &section.runs {
            for need in &run.needs {
                let protocol = self.state.registry.get(need.protocol);
                let Some(protocol) = protocol else {
                    return Err(SendError::Unregistered(need.protocol).into());
                };
                let much =
                    need.messages > config.credits || (need.messages > 1 && need.bytes > config.credit_bytes);
                if protocol.flow() != Flow::Inline && much {
                    return Err(PatternError::TooMuchCredit {
                        rank: self.state.shape.endpoint(run.index).rank,
                        messages: need.messages,
                        bytes: need.bytes,
                        credits: config.credits,
                        credit_bytes: config.credit_bytes,
                    });
                }
            }
        }
        Ok(())
    }

    /// Has the peer hear of a run's protocols, and takes all the credit that the run needs. False: there is not enough
    /// now, and nothing was taken.
    #[cold]
    pub(super) fn admit_run(&mut self, key: usize, run: usize) -> Result<bool, Fault> {
        let index = self.state.patterns.sections[key].runs[run].index;
        for at in 0..self.state.patterns.sections[key].runs[run].needs.len() {
            let need = self.state.patterns.sections[key].runs[run].needs[at];
            self.introduce(index, need.protocol)?;
        }
        let State { patterns, peers, .. } = &mut *self.state;
        let needs = &patterns.sections[key].runs[run].needs;
        let Some(peer) = peers[index].as_mut() else { return Ok(false) };
        let enough = |need: &Need| {
            let out = &peer.outgoing[need.protocol.index()];
            out.flow == Flow::Inline
                || (out.credits >= need.messages && out.bytes > 0 && out.waiters.is_empty())
        };
        if !needs.iter().all(enough) {
            return Ok(false);
        }
        for need in needs {
            let out = &mut peer.outgoing[need.protocol.index()];
            if out.flow == Flow::Inline {
                out.open = true;
            } else {
                out.credits -= need.messages;
                out.bytes -= need.bytes as i64;
            }
        }
        Ok(true)
    }

    pub(super) fn park(&mut self, index: usize, jump: Descriptor) {
        if let Some(ticket) = Ticket::from_word(jump.ticket) {
            self.state.part_waits(ticket, true);
        }
        self.state.stats.queued += 1;
        self.state.peer(index).parked.push_back(Parked { jump, need: 0, got: 0, waiter: None });
        self.state.mark_busy(index);
    }

    /// Lets the runs that wait for a peer take their places, as far as they have their credit.
    pub(in super::super) fn pump_parked(&mut self, index: usize) -> usize {
        let mut moved = 0;
        while let Some(peer) = self.state.peers[index].as_mut()
            && let Some(mut front) = peer.parked.pop_front()
        {
            match self.collect(index, &mut front) {
                Ok(false) => {
                    self.state.peer(index).parked.push_front(front);
                    return moved;
                }
                Ok(true) => self.place_jump(index, &front.jump),
                Err(fault) => {
                    self.give_back(index, &front);
                    self.state.finish_descriptor(&front.jump, Err(fault));
                }
            }
            moved += 1;
        }
        moved
    }

    /// The credit that a run has which cannot go on is others' again.
    fn give_back(&mut self, index: usize, parked: &Parked) {
        let Some(part) = self.state.part_of(parked.jump.ticket) else { return };
        let needs = self.state.patterns.sections[part.section].runs[part.run].needs.clone();
        for (at, need) in needs.iter().enumerate().take(parked.need + 1) {
            let messages = if at < parked.need { need.messages } else { parked.got };
            let Some(out) = self.state.peer(index).outgoing.get_mut(need.protocol.index()) else { continue };
            if out.flow == Flow::Inline || messages == 0 {
                continue;
            }
            out.credits += messages;
            out.bytes += need.bytes as i64;
            self.state.hand_out_credit(index, need.protocol.index());
        }
    }

    /// Whether the run has all its credit now.
    fn collect(&mut self, index: usize, parked: &mut Parked) -> Result<bool, Fault> {
        let Some(part) = self.state.part_of(parked.jump.ticket) else { return Ok(true) };
        loop {
            let needs = &self.state.patterns.sections[part.section].runs[part.run].needs;
            let Some(&need) = needs.get(parked.need) else { return Ok(true) };
            self.introduce(index, need.protocol)?;
            let rank = self.state.peer(index).endpoint.rank;
            if self.state.peer(index).outgoing[need.protocol.index()].flow == Flow::Inline {
                parked.need += 1;
                continue;
            }
            while parked.got < need.messages {
                // All bytes go with the first message's credit.
                let bytes = if parked.got == 0 { need.bytes } else { 0 };
                if let Some(waiter) = parked.waiter {
                    let Some(outcome) = self.state.completer.take(waiter) else { return Ok(false) };
                    parked.waiter = None;
                    outcome?;
                    let out = &mut self.state.peer(index).outgoing[need.protocol.index()];
                    out.granted = out.granted.saturating_sub(1);
                    parked.got += 1;
                    continue;
                }
                let out = &mut self.state.peer(index).outgoing[need.protocol.index()];
                let has_bytes = parked.got > 0;
                // A run that has its bytes goes on before those who may wait for them.
                if out.credits > 0 && (has_bytes || out.bytes > 0 && out.waiters.is_empty()) {
                    out.credits -= 1;
                    out.bytes -= bytes as i64;
                    parked.got += 1;
                    continue;
                }
                let ticket = match self.operation(Some(rank)) {
                    // What it has so far is its own: it waits on until there is a place to wait in.
                    Err(Fault::OutOfMemory(_)) => return Ok(false),
                    ticket => ticket?,
                };
                let waiter = Waiter { ticket, bytes, has_bytes };
                self.state.wait_for_credit(index, need.protocol.index(), waiter);
                parked.waiter = Some(ticket);
            }
            (parked.need, parked.got) = (parked.need + 1, 0);
        }
    }
}

impl State {
    /// The peer is gone.
    pub(in super::super) fn drop_parked(&mut self, index: usize, fault: Fault) {
        let Some(peer) = self.peers[index].as_mut() else { return };
        for parked in std::mem::take(&mut peer.parked) {
            if let Some(waiter) = parked.waiter {
                self.slots.detach(waiter);
            }
            self.finish_descriptor(&parked.jump, Err(fault));
        }
    }
}
