//! The software queue of replays (D27): a run with messages that take credit takes its place in its target's FIFO when it
//! has all of it, and the replays behind it to that target do after it, if they go the same way. So the FIFO, through which
//! credit and answers go the other way, never waits for credit.

use super::super::peer::Waiter;
use super::super::{FifoId, Scope, State};
use super::PatternError;
use super::store::Need;
use crate::descriptor::Descriptor;
use crate::error::{Fault, SendError};
use crate::ids::PatternId;
use crate::protocol::Flow;
use crate::slot::Ticket;
use std::collections::VecDeque;

/// How a run gets to its target: runs are in an order only with those that go the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Through the FIFO of the target.
    Target,
    /// Through one of the user's.
    Fifo(FifoId),
    /// Through that of the target, and in no order with those of other sections.
    Apart,
}

/// The runs for one target that wait for their turn on one way.
#[derive(Debug)]
pub(crate) struct Line {
    pub(super) way: Way,
    runs: VecDeque<Parked>,
}

/// A run that waits for its turn.
#[derive(Clone, Copy, Debug)]
struct Parked {
    jump: Descriptor,
    /// The protocol that it waits for the credit of, among those of the run; it has that of those before.
    need: usize,
    /// Its place among the senders that wait.
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

    pub(super) fn park(&mut self, index: usize, way: Way, jump: Descriptor) {
        if let Some(ticket) = Ticket::from_word(jump.ticket) {
            self.state.part_waits(ticket, true);
        }
        self.state.stats.queued += 1;
        let lines = &mut self.state.peer(index).parked;
        let parked = Parked { jump, need: 0, waiter: None };
        match lines.iter_mut().find(|line| line.way == way) {
            Some(line) => line.runs.push_back(parked),
            None => lines.push(Line { way, runs: VecDeque::from([parked]) }),
        }
        self.state.mark_busy(index);
        // Nobody rings for what has asked for nothing yet.
        self.state.restless = true;
    }

    /// Lets the runs that wait for a peer take their places, on each way as far as they have their credit.
    pub(in super::super) fn pump_parked(&mut self, index: usize) -> usize {
        let (mut moved, mut at) = (0, 0);
        while let Some(line) = self.parked_line(index, at) {
            let Some(mut front) = line.runs.front().copied() else {
                self.state.peer(index).parked.remove(at);
                continue;
            };
            let collected = self.collect(index, &mut front);
            let Some(line) = self.parked_line(index, at) else { break };
            if let Ok(false) = collected {
                line.runs.front_mut().into_iter().for_each(|waiting| *waiting = front);
                at += 1;
                continue;
            }
            line.runs.pop_front();
            match collected {
                Ok(_) => self.place_jump(index, &front.jump),
                Err(fault) => {
                    self.give_back(index, &front);
                    self.state.finish_descriptor(&front.jump, Err(fault));
                }
            }
            moved += 1;
        }
        // Whoever was woken has been looked at, and those behind it may follow.
        let count = self.state.peers[index].as_ref().map_or(0, |peer| peer.outgoing.len());
        for number in 0..count {
            if std::mem::take(&mut self.state.peer(index).outgoing[number].a_run_is_next) {
                self.state.hand_out_credit(index, number);
            }
        }
        moved
    }

    fn parked_line(&mut self, index: usize, at: usize) -> Option<&mut Line> {
        self.state.peers[index].as_mut()?.parked.get_mut(at)
    }

    /// The credit that a run has which cannot go on is others' again.
    fn give_back(&mut self, index: usize, parked: &Parked) {
        if let Some(waiter) = parked.waiter {
            // Of a protocol that was refused it has ended, and nobody takes its end.
            self.state.slots.detach(waiter);
        }
        let Some(part) = self.state.part_of(parked.jump.ticket) else { return };
        let needs = self.state.patterns.sections[part.section].runs[part.run].needs.clone();
        for need in needs.iter().take(parked.need) {
            self.state.give_credit(index, need.protocol.index(), need.messages, need.bytes);
        }
    }

    /// Whether the run has all its credit now.
    fn collect(&mut self, index: usize, parked: &mut Parked) -> Result<bool, Fault> {
        let Some(part) = self.state.part_of(parked.jump.ticket) else { return Ok(true) };
        loop {
            let needs = &self.state.patterns.sections[part.section].runs[part.run].needs;
            let Some(&need) = needs.get(parked.need) else { return Ok(true) };
            self.introduce(index, need.protocol)?;
            let peer = self.state.peer(index);
            let (rank, out) = (peer.endpoint.rank, &mut peer.outgoing[need.protocol.index()]);
            if let Some(waiter) = parked.waiter {
                let Some(outcome) = self.state.completer.take(waiter) else { return Ok(false) };
                parked.waiter = None;
                outcome?;
            } else if out.flow == Flow::Inline {
                out.open = true;
            } else if out.credits >= need.messages && out.bytes > 0 && out.waiters.is_empty() {
                out.credits -= need.messages;
                out.bytes -= need.bytes as i64;
            } else {
                let ticket = match self.operation(Some(rank)) {
                    // What it has so far is its own: it waits on until there is a place to wait in.
                    Err(Fault::OutOfMemory(_)) => return Ok(false),
                    ticket => ticket?,
                };
                let waiter = Waiter { ticket, messages: need.messages, bytes: need.bytes, kept: None };
                self.state.wait_for_credit(index, need.protocol.index(), waiter);
                parked.waiter = Some(ticket);
                continue;
            }
            parked.need += 1;
        }
    }
}

impl State {
    /// The way that the runs of a replay go.
    pub(super) fn way_of(&self, section: usize, replay: usize) -> Way {
        if self.patterns.sections[section].apart {
            return Way::Apart;
        }
        self.fifo_of_replay(replay).map_or(Way::Target, Way::Fifo)
    }

    /// The peer is gone.
    pub(in super::super) fn drop_parked(&mut self, index: usize, fault: Fault) {
        let Some(peer) = self.peers[index].as_mut() else { return };
        for parked in std::mem::take(&mut peer.parked).into_iter().flat_map(|line| line.runs) {
            if let Some(waiter) = parked.waiter {
                self.slots.detach(waiter);
            }
            self.finish_descriptor(&parked.jump, Err(fault));
        }
    }
}
