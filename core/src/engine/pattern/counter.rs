//! One completion per replay (D31): the runs that are under way are counted, in messages and bytes, and the replay ends
//! when nothing is left. A run's descriptor carries a ticket that names its part of a replay and no completion slot.

use super::super::{FifoId, Scope, State};
use crate::descriptor::Info;
use crate::error::Fault;
use crate::ids::Rank;
use crate::row::{Row, Waits};
use crate::slot::{Completer, Outcome, Ticket, Value};
use slab::Slab;

/// Names a replay as long as it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayId {
    key: u32,
    generation: u32,
}

#[derive(Debug)]
struct Replaying {
    generation: u32,
    section: usize,
    ticket: Ticket,
    /// Ends when all payloads have been read.
    local: Option<Ticket>,
    /// Operations and bytes of the runs that have not ended.
    messages: u64,
    bytes: u64,
    /// Runs whose payloads are still to be read.
    unread: u32,
    /// More runs may come.
    starting: bool,
    fault: Option<Fault>,
    info: Option<Info>,
    /// It does not go through the FIFOs of its targets.
    fifo: Option<FifoId>,
}

/// A run that is under way.
#[derive(Debug)]
struct Part {
    generation: u32,
    replay: usize,
    run: usize,
    read: bool,
    /// It waits outside of its target's FIFO.
    waits: bool,
}

/// Who waits until nothing waits any more outside of its target's FIFO.
#[derive(Debug)]
struct Settling {
    ticket: Ticket,
    /// Of the replays up to that one.
    until: u32,
    /// Towards one rank only.
    towards: Option<Rank>,
}

impl Waits for Settling {
    fn still_waits(&self, completer: &mut Completer) -> bool {
        completer.is_still_wanted(self.ticket)
    }
}

/// All replays that are under way.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    parts: Slab<Part>,
    replays: Slab<Replaying>,
    /// Counts parts and replays; later ones have higher numbers until it wraps.
    generation: u32,
    /// Tickets that end when no part waits that is older than this.
    settling: Row<Settling>,
}

impl Replays {
    fn part(&self, ticket: Ticket) -> Option<(usize, &Part)> {
        let (key, generation) = ticket.as_counted()?;
        let part = self.parts.get(key as usize)?;
        (part.generation == generation).then_some((key as usize, part))
    }

    fn next(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        self.generation
    }
}

/// What a part of a replay is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartOf {
    pub section: usize,
    pub run: usize,
    pub replay: usize,
}

impl State {
    /// An operation has ended: one of a future, or a part of what is counted.
    #[inline]
    pub(crate) fn end(&mut self, ticket: Ticket, outcome: Outcome) {
        if ticket.as_counted().is_some() {
            self.end_part(ticket, outcome.err());
        } else {
            self.completer.complete(ticket, outcome);
        }
    }

    pub(super) fn begin_replay(
        &mut self,
        section: usize,
        info: Option<&Info>,
        fifo: Option<FifoId>,
    ) -> Result<usize, Fault> {
        if self.closed {
            return Err(Fault::Shutdown);
        }
        let full = Fault::OutOfMemory("all completion slots are in use");
        let ticket = self.completer.alloc(None).ok_or(full)?;
        let generation = self.replaying.next();
        self.patterns.sections[section].active += 1;
        Ok(self.replaying.replays.insert(Replaying {
            generation,
            section,
            ticket,
            local: None,
            messages: 0,
            bytes: 0,
            unread: 0,
            starting: true,
            fault: None,
            info: info.copied(),
            fifo,
        }))
    }

    pub(super) fn begin_part(&mut self, replay: usize, run: usize) -> Ticket {
        let generation = self.replaying.next();
        let replaying = &mut self.replaying.replays[replay];
        let recorded = &self.patterns.sections[replaying.section].runs[run];
        replaying.messages += recorded.messages;
        replaying.bytes += recorded.bytes;
        replaying.unread += 1;
        let key = self.replaying.parts.insert(Part { generation, replay, run, read: false, waits: false });
        Ticket::counted(key as u32, generation)
    }

    /// All parts have begun. `None`: they have ended, too.
    pub(super) fn replay_begun(&mut self, replay: usize) -> Result<Option<(Ticket, ReplayId)>, Fault> {
        let replaying = &mut self.replaying.replays[replay];
        replaying.starting = false;
        if replaying.messages > 0 {
            let name = ReplayId { key: replay as u32, generation: replaying.generation };
            return Ok(Some((replaying.ticket, name)));
        }
        let replaying = self.replaying.replays.remove(replay);
        self.completer.give_up(replaying.ticket);
        self.leave_section(replaying.section);
        replaying.fault.map_or(Ok(None), Err)
    }

    /// The replay ends with that fault once the rest of it has ended.
    pub(super) fn spoil_replay(&mut self, replay: usize, fault: Fault) {
        self.replaying.replays[replay].fault.get_or_insert(fault);
    }

    pub(super) fn part_of(&self, ticket: u64) -> Option<PartOf> {
        let (_, part) = self.replaying.part(Ticket::from_word(ticket)?)?;
        let section = self.replaying.replays.get(part.replay)?.section;
        Some(PartOf { section, run: part.run, replay: part.replay })
    }

    /// What the replay's messages carry instead of what was recorded.
    pub(super) fn info_of(&self, replay: usize) -> Option<Info> {
        self.replaying.replays.get(replay)?.info
    }

    /// The FIFO that a part goes through, if it is not that of its target.
    pub(super) fn fifo_of(&self, ticket: u64) -> Option<FifoId> {
        self.fifo_of_replay(self.part_of(ticket)?.replay)
    }

    pub(super) fn fifo_of_replay(&self, replay: usize) -> Option<FifoId> {
        self.replaying.replays.get(replay)?.fifo
    }

    /// All is with the device. It may go on reading a put's source until the end where it reports one.
    pub(in super::super) fn part_injected(&mut self, ticket: u64, over_send: bool) {
        let Some(ticket) = Ticket::from_word(ticket) else { return };
        let Some((key, part)) = self.replaying.part(ticket) else { return };
        let (replay, run) = (part.replay, part.run);
        if part.waits {
            self.part_waits(ticket, false);
        }
        let Some(replaying) = self.replaying.replays.get(replay) else { return };
        let accesses = self.patterns.sections.get(replaying.section).is_some_and(|s| s.runs[run].accesses);
        if !accesses || over_send {
            self.part_read(key);
        }
    }

    fn part_read(&mut self, key: usize) {
        let part = &mut self.replaying.parts[key];
        if std::mem::replace(&mut part.read, true) {
            return;
        }
        let replaying = &mut self.replaying.replays[part.replay];
        replaying.unread -= 1;
        if replaying.unread == 0
            && !replaying.starting
            && let Some(local) = replaying.local.take()
        {
            self.completer.complete(local, replaying.fault.map_or(Ok(Value::Unit), Err));
        }
    }

    pub(super) fn end_part(&mut self, ticket: Ticket, fault: Option<Fault>) {
        let Some((key, part)) = self.replaying.part(ticket) else { return };
        let (replay, run, waits) = (part.replay, part.run, part.waits);
        if let Some(fault) = fault {
            // Whoever waits for the earlier stage is told, too.
            self.replaying.replays[replay].fault.get_or_insert(fault);
        }
        self.part_read(key);
        if waits {
            self.part_waits(ticket, false);
        }
        self.replaying.parts.remove(key);
        let replaying = &mut self.replaying.replays[replay];
        let recorded = &self.patterns.sections[replaying.section].runs[run];
        replaying.messages -= recorded.messages;
        replaying.bytes -= recorded.bytes;
        if replaying.messages > 0 || replaying.starting {
            return;
        }
        let replaying = self.replaying.replays.remove(replay);
        let outcome = replaying.fault.map_or(Ok(Value::Unit), Err);
        self.completer.complete(replaying.ticket, outcome);
        self.leave_section(replaying.section);
    }

    fn leave_section(&mut self, key: usize) {
        if let Some(section) = self.patterns.sections.get_mut(key) {
            section.active -= 1;
        }
        self.patterns.release_if_idle(key);
    }

    /// A peer is gone: what is with the device for it has ended.
    pub(in super::super) fn fail_parts(&mut self, index: usize, fault: Fault) {
        let concerned = |part: &Part| {
            let section = self.replaying.replays.get(part.replay)?.section;
            let run = self.patterns.sections.get(section)?.runs.get(part.run)?;
            (run.index == index).then_some(())
        };
        let parts = self.replaying.parts.iter();
        let tickets: Vec<Ticket> = parts
            .filter(|(_, part)| concerned(part).is_some())
            .map(|(key, part)| Ticket::counted(key as u32, part.generation))
            .collect();
        for ticket in tickets {
            self.end_part(ticket, Some(fault));
        }
    }

    /// This side leaves: the futures are told otherwise, and nothing is kept for them any more.
    pub(in super::super) fn drop_replays(&mut self) {
        self.replaying.parts.clear();
        self.replaying.replays.clear();
        self.replaying.settling.clear();
        self.patterns.clear();
    }

    /// A part waits outside of its target's FIFO, or does so no longer.
    pub(in super::super) fn part_waits(&mut self, ticket: Ticket, waits: bool) {
        let Some((key, _)) = self.replaying.part(ticket) else { return };
        self.replaying.parts[key].waits = waits;
        if waits || self.replaying.settling.is_empty() {
            return;
        }
        let mut settling = std::mem::take(&mut self.replaying.settling);
        settling.retain(|one| {
            let waits = self.replaying.parts.iter().any(|(_, part)| self.is_waited_for(part, one));
            if !waits {
                self.completer.complete(one.ticket, Ok(Value::Unit));
            }
            waits
        });
        self.replaying.settling = settling;
    }

    fn is_waited_for(&self, part: &Part, settling: &Settling) -> bool {
        let older = settling.until.wrapping_sub(part.generation) < 1 << 31;
        part.waits && older && settling.towards.is_none_or(|rank| self.rank_of(part) == Some(rank))
    }

    fn rank_of(&self, part: &Part) -> Option<Rank> {
        let section = self.replaying.replays.get(part.replay)?.section;
        let run = self.patterns.sections.get(section)?.runs.get(part.run)?;
        Some(self.shape.endpoint(run.index).rank)
    }
}

impl Scope<'_> {
    /// A ticket that ends when the payloads of a replay have been read, or with what some of them could not be for; `None` if they
    /// have, or if the whole replay has ended: its own ticket tells how.
    ///
    /// # Errors
    /// If some of them could not be read; if all completion slots are in use, or the context is closed.
    pub fn replay_read(&mut self, replay: ReplayId) -> Result<Option<Ticket>, Fault> {
        let Some(replaying) = self.state.replaying.replays.get(replay.key as usize) else { return Ok(None) };
        if replaying.generation != replay.generation {
            return Ok(None);
        }
        if replaying.unread == 0 {
            return replaying.fault.map_or(Ok(None), Err);
        }
        let ticket = self.operation(None)?;
        let replaying = &mut self.state.replaying.replays[replay.key as usize];
        let before = replaying.local.replace(ticket);
        if let Some(before) = before {
            self.state.completer.complete(before, Ok(Value::Unit));
        }
        Ok(Some(ticket))
    }

    /// A ticket that ends when nothing of a replay that was begun before this, towards that rank or any, waits outside of its
    /// targets' FIFOs any more; `None` if nothing does. What is in a FIFO is reached by a [`flush`](Scope::flush).
    ///
    /// # Errors
    /// If all completion slots are in use, or the context is closed.
    pub fn settle_replays(&mut self, towards: Option<Rank>) -> Result<Option<Ticket>, Fault> {
        let waits =
            |part: &Part| part.waits && towards.is_none_or(|rank| self.state.rank_of(part) == Some(rank));
        if !self.state.replaying.parts.iter().any(|(_, part)| waits(part)) {
            return Ok(None);
        }
        let ticket = self.operation(None)?;
        let until = self.state.replaying.generation;
        let State { replaying, completer, .. } = &mut *self.state;
        replaying.settling.push_back(Settling { ticket, until, towards }, completer);
        Ok(Some(ticket))
    }
}
