//! Replays: runs go to the device as they lie in the buffer; what it has no room for waits as a `Jump`.

use super::super::oversend::cut;
use super::super::{FifoId, Scope, State};
use super::store::{FIXED_INFO, info_slots, read_info};
use super::{PatternError, ReplayStart};
use crate::descriptor::{Descriptor, Info, MAX_INFO, Op};
use crate::device::{Sources, Stop};
use crate::error::Fault;
use crate::ids::PatternId;
use crate::slot::{Outcome, Ticket, Value};
use crate::wire;

/// How far a run got.
enum Progress {
    /// All is at its target.
    Ended,
    /// All is with the device, which reports the end.
    Injected,
    Full,
    Fault(Fault),
}

/// A place in a run, between two operations or in a long message.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    slot: u32,
    /// As in [`Scope::stream_parts`].
    inside: u64,
}

impl Scope<'_> {
    /// Carries a recorded pattern out once more: no protocol work, no allocation, no completion per operation.
    ///
    /// # Errors
    /// If the pattern does not exist, or all of its targets that are not done are gone.
    #[inline]
    pub fn replay(&mut self, id: PatternId) -> Result<ReplayStart, PatternError> {
        self.replay_with(id, None, None)
    }

    /// The same; `info` replaces the message info of all sends but those of many-to-many, and it may go through a FIFO of
    /// its own, ordered with nothing but what goes through that one.
    ///
    /// # Errors
    /// As for [`replay`](Self::replay), and if the FIFO takes nothing.
    #[inline]
    pub fn replay_with(
        &mut self,
        id: PatternId,
        info: Option<&Info>,
        fifo: Option<FifoId>,
    ) -> Result<ReplayStart, PatternError> {
        let Some(section) = self.state.patterns.section(id).filter(|_| !self.state.departed) else {
            // The end of the context has cleared the sections.
            return Err(if self.state.departed || self.state.closed {
                Fault::Shutdown.into()
            } else {
                self.state.patterns.unusable(id)
            });
        };
        let (key, count) = (id.index(), section.runs.len());
        self.state.stats.replays += 1;
        if let Some(fifo) = fifo {
            self.check_fifo(fifo)?;
        }
        let as_recorded = info.is_none() && fifo.is_none();
        let mut replay = None;
        for run in 0..count {
            let mut cursor = Cursor::default();
            if !as_recorded || !self.replay_at_once(key, run, &mut cursor) {
                self.replay_slowly(key, run, cursor, info, fifo, &mut replay)?;
            }
        }
        if fifo.is_some() {
            self.pump_fifos();
        }
        match replay {
            None => Ok(ReplayStart::Done),
            Some(replay) => Ok(match self.state.replay_begun(replay)? {
                None => ReplayStart::Done,
                Some((ticket, replay)) => ReplayStart::Queued { ticket, replay },
            }),
        }
    }

    /// As a rule nothing stands in the way, and the device takes a run as it is and is done with it. False: it did not get
    /// further than the cursor.
    #[inline]
    fn replay_at_once(&mut self, key: usize, run: usize, cursor: &mut Cursor) -> bool {
        let State { patterns, peers, table, routes, over_send, stats, .. } = &mut *self.state;
        let section = &patterns.sections[key];
        let run = &section.runs[run];
        let Some(Some(peer)) = peers.get_mut(run.index) else { return false };
        let clear = run.plain
            && peer.fault.is_none()
            && peer.lets_past()
            && peer.parked.is_empty()
            && routes.of(peer.endpoint.rank).mappable
            && !(run.accesses && over_send[run.index])
            && (!run.atomics || routes.of(peer.endpoint.rank).native_atomics)
            && run.needs.iter().all(|need| peer.is_open(need.protocol));
        if !clear {
            return false;
        }
        let descriptors = &patterns.buffer[section.start..][run.start as usize..run.end as usize];
        let sources = Sources::of(table);
        let injected = self.inject.inject(descriptors, &sources);
        if !run.needs.is_empty() && injected.taken > 0 {
            peer.unflushed = true;
            for need in &run.needs {
                stats.messages_sent += u64::from(need.messages);
                stats.bytes_sent += need.bytes;
            }
        }
        cursor.slot = injected.taken as u32;
        injected.stop == Stop::Done && injected.complete
    }

    #[cold]
    #[inline(never)]
    fn replay_slowly(
        &mut self,
        key: usize,
        run: usize,
        cursor: Cursor,
        info: Option<&Info>,
        fifo: Option<FifoId>,
        replay: &mut Option<usize>,
    ) -> Result<(), Fault> {
        let began = match *replay {
            Some(began) => began,
            None => *replay.insert(self.state.begin_replay(key, info, fifo)?),
        };
        if let Err(fault) = self.start_run(key, run, cursor, info, began) {
            self.state.spoil_replay(began, fault);
        }
        Ok(())
    }

    fn start_run(
        &mut self,
        key: usize,
        run: usize,
        mut cursor: Cursor,
        info: Option<&Info>,
        replay: usize,
    ) -> Result<(), Fault> {
        let section = &self.state.patterns.sections[key];
        let (index, start) = (section.runs[run].index, section.runs[run].start);
        let fresh = cursor.slot == 0;
        cursor.slot += start;
        if let Some(fault) = self.state.peer(index).fault {
            return Err(fault);
        }
        self.state.peer(index).unflushed = true;
        // Before the first operation only: a run that was begun had all it needs.
        if fresh {
            let way = self.state.way_of(key, replay);
            let behind = self.state.peer(index).parked.iter().any(|line| line.way == way);
            let admitted = !behind && self.admit_run(key, run)?;
            for need in &self.state.patterns.sections[key].runs[run].needs {
                self.state.stats.messages_sent += u64::from(need.messages);
                self.state.stats.bytes_sent += need.bytes;
            }
            if !admitted {
                let part = self.state.begin_part(replay, run);
                self.park(index, way, jump(self.state.shape.endpoint(index), part, cursor));
                return Ok(());
            }
        }
        let part = self.state.begin_part(replay, run);
        let over_send = self.state.run_goes_over_send(key, run);
        let long = self.state.patterns.sections[key].runs[run].long;
        let peer = self.state.peer(index);
        let clear = peer.lets_past() && !over_send && !(long && peer.turn.is_some());
        if clear && self.state.fifo_of(part.to_word()).is_none() {
            match self.inject_run(key, run, &mut cursor, part.to_word(), info, &mut { u64::MAX }) {
                Progress::Ended => self.state.end_part(part, None),
                Progress::Injected => self.state.part_injected(part.to_word(), false),
                Progress::Fault(fault) => {
                    self.return_run_credit(index, (key, run), cursor.slot, fault);
                    self.state.end_part(part, Some(fault));
                }
                Progress::Full => {
                    self.queue_jump(index, &jump(self.state.shape.endpoint(index), part, cursor));
                }
            }
            return Ok(());
        }
        self.place_jump(index, &jump(self.state.shape.endpoint(index), part, cursor));
        Ok(())
    }

    /// A run takes its place: in the FIFO that its replay goes through, or in that of its target.
    pub(super) fn place_jump(&mut self, index: usize, jump: &Descriptor) {
        let ticket = Ticket::from_word(jump.ticket);
        if let Some(fifo) = self.state.fifo_of(jump.ticket) {
            // Whoever flushes goes by what waits outside of the targets' FIFOs.
            if let Some(ticket) = ticket {
                self.state.part_waits(ticket, true);
            }
            if self.queue_in_fifo(fifo, jump) {
                return;
            }
            // It was closed meanwhile.
        }
        if let Some(ticket) = ticket {
            self.state.part_waits(ticket, false);
        }
        self.queue_jump(index, jump);
    }

    /// A run takes its place in the FIFO of its target.
    fn queue_jump(&mut self, index: usize, jump: &Descriptor) {
        // It has no longer a row than it ends: what waits for room goes before it.
        self.state.let_in_all(index);
        self.state.gates.queued(jump.rank, 1);
        self.state.stats.queued += 1;
        let peer = self.state.peer(index);
        peer.unflushed = true;
        peer.queued_rma += 1;
        let first = peer.queue_is_empty();
        peer.push(jump, &[]);
        self.state.mark_busy(index);
        if first {
            self.pump_peer(index);
        }
    }

    /// Injects a run from the cursor on. Where the device reports ends, its last operation carries the ticket.
    fn inject_run(
        &mut self,
        key: usize,
        run: usize,
        cursor: &mut Cursor,
        ticket: u64,
        info: Option<&Info>,
        budget: &mut u64,
    ) -> Progress {
        let State { patterns, table, routes, .. } = &mut *self.state;
        let section = &patterns.sections[key];
        let run = &section.runs[run];
        let caps = routes.of(patterns.buffer[section.start + run.start as usize].rank);
        let mappable = caps.mappable;
        let limited = *budget < u64::MAX;
        if !run.plain || info.is_some() || limited || (run.atomics && !caps.native_atomics) {
            let (start, last) = (section.start, run.last);
            let ticket = if mappable { 0 } else { ticket };
            return self.inject_singly(start, last, cursor, ticket, info, budget);
        }
        let recorded = &patterns.buffer[section.start..section.start + section.len];
        let part_of = if mappable { 0 } else { ticket };
        let sources = Sources { part_of, ..Sources::of(table) };
        let together = if mappable { run.end } else { run.last };
        if cursor.slot < together {
            let injected = self.inject.inject(&recorded[cursor.slot as usize..together as usize], &sources);
            cursor.slot += injected.taken as u32;
            match injected.stop {
                Stop::Done if mappable => return Progress::Ended,
                Stop::Done => {}
                Stop::Full => return Progress::Full,
                Stop::Fault(fault) => return Progress::Fault(fault),
            }
        }
        if mappable {
            return Progress::Ended;
        }
        let last = Descriptor { ticket, ..recorded[run.last as usize] };
        let injected = self.inject.inject(std::slice::from_ref(&last), &sources);
        match injected.stop {
            Stop::Done if injected.complete => Progress::Ended,
            Stop::Done => Progress::Injected,
            Stop::Full => Progress::Full,
            Stop::Fault(fault) => Progress::Fault(fault),
        }
    }

    fn inject_singly(
        &mut self,
        start: usize,
        last: u32,
        cursor: &mut Cursor,
        ticket: u64,
        info: Option<&Info>,
        budget: &mut u64,
    ) -> Progress {
        loop {
            if *budget == 0 {
                return Progress::Full;
            }
            let place = start + cursor.slot as usize;
            let recorded = self.state.patterns.buffer[place];
            let ends = cursor.slot >= last;
            let (part_of, ticket) = (ticket, if ends { ticket } else { 0 });
            let before = cursor.inside;
            let (stop, complete) = match recorded.op {
                Op::Nop => (Stop::Done, true),
                Op::Put | Op::Get if recorded.len > *budget || before > 0 => {
                    let access = Descriptor { ticket, ..recorded };
                    self.inject_part(&access, part_of, &mut cursor.inside, budget)
                }
                // Of this rank's own memory; that of others would go over sends.
                Op::Atomic if !self.caps_of(recorded.rank).native_atomics => {
                    (self.atomic_here(&recorded).err().map_or(Stop::Done, Stop::Fault), true)
                }
                Op::Send => self.inject_send(place, &mut cursor.inside, ticket, info, budget),
                _ => {
                    let table = &self.state.table;
                    let sources = Sources { part_of, ..Sources::of(table) };
                    let access = Descriptor { ticket, ..recorded };
                    let injected = self.inject.inject(std::slice::from_ref(&access), &sources);
                    (injected.stop, injected.complete)
                }
            };
            match stop {
                Stop::Done if ends && (complete || ticket == 0) => return Progress::Ended,
                Stop::Done if ends => return Progress::Injected,
                Stop::Done => cursor.slot += 1 + info_slots(usize::from(recorded.info_len)) as u32,
                Stop::Full => return Progress::Full,
                Stop::Fault(fault) => return Progress::Fault(fault),
            }
            let rest = recorded.len.saturating_sub(before).max(64);
            if *budget < u64::MAX && recorded.op != Op::Nop {
                *budget = budget.saturating_sub(rest);
            }
            cursor.inside = 0;
        }
    }

    /// Injects the next bytes of a long put or get, as far as the budget goes; it is done with the last one.
    fn inject_part(
        &mut self,
        access: &Descriptor,
        part_of: u64,
        inside: &mut u64,
        budget: &mut u64,
    ) -> (Stop, bool) {
        let left = access.len - *inside;
        let offset = access.offset + *inside;
        let len = if left <= *budget { left } else { cut(offset, left, (*budget & !63).max(64)) };
        let part = Descriptor {
            len,
            offset,
            source: [access.source[0], access.source[1] + *inside],
            ticket: if len == left { access.ticket } else { 0 },
            ..*access
        };
        let sources = Sources { part_of, ..Sources::of(&self.state.table) };
        let injected = self.inject.inject(std::slice::from_ref(&part), &sources);
        if injected.stop == Stop::Done && len < left {
            (*inside, *budget) = (*inside + len, 0);
            return (Stop::Full, false);
        }
        (injected.stop, injected.complete)
    }

    /// Injects a recorded send with its info, or with that of the replay; a long one as a stream.
    fn inject_send(
        &mut self,
        place: usize,
        inside: &mut u64,
        ticket: u64,
        new: Option<&Info>,
        budget: &mut u64,
    ) -> (Stop, bool) {
        let State { patterns, table, eager, .. } = &mut *self.state;
        let recorded = patterns.buffer[place];
        let mut info = [0; MAX_INFO];
        let len = match new {
            Some(new) if recorded.offset != FIXED_INFO => {
                info[..new.as_bytes().len()].copy_from_slice(new.as_bytes());
                new.as_bytes().len()
            }
            _ => read_info(&patterns.buffer[place + 1..], usize::from(recorded.info_len), &mut info),
        };
        let send = Descriptor { info_len: len as u8, offset: 0, ticket, ..recorded };
        if send.len > *eager as u64 {
            return self.stream_parts(&send, &info[..len], inside, budget);
        }
        let sources = Sources { info: &info[..len], ..Sources::of(table) };
        let injected = self.inject.inject(std::slice::from_ref(&send), &sources);
        (injected.stop, injected.complete)
    }

    /// The same for a run whose puts and gets go over sends.
    pub(in super::super) fn step_send(&mut self, front: &Descriptor, inside: &mut u64) -> Stop {
        let Some(part) = self.state.part_of(front.ticket) else { return Stop::Done };
        let Some((place, _)) = self.state.patterns.recorded(part.section, front.offset) else {
            return Stop::Done;
        };
        let info = self.state.info_of(part.replay);
        self.inject_send(place, inside, 0, info.as_ref(), &mut { u64::MAX }).0
    }

    /// Goes on with a replay at the head of a target's FIFO. `None`: no room. `Some(None)`: injected, the device reports.
    pub(in super::super) fn step_replay(
        &mut self,
        index: usize,
        mut front: Descriptor,
    ) -> Option<Option<Outcome>> {
        let done = self.step_jump(index, &mut front, &mut { u64::MAX });
        if done.is_none()
            && let Some(fifo) = self.state.peer(index).fifo.as_mut()
        {
            fifo.set_front(&front);
        }
        done
    }

    /// Goes on with a replay, by so many bytes. What it is left at is in the descriptor.
    pub(in super::super) fn step_jump(
        &mut self,
        index: usize,
        front: &mut Descriptor,
        budget: &mut u64,
    ) -> Option<Option<Outcome>> {
        let Some(part) = self.state.part_of(front.ticket) else { return Some(Some(Ok(Value::Unit))) };
        if self.state.run_goes_over_send(part.section, part.run) {
            let end = self.state.patterns.sections[part.section].runs[part.run].end;
            let done = self.step_run(index, front, part.section, u64::from(end));
            if let Some(Some(Err(fault))) = done {
                self.return_run_credit(index, (part.section, part.run), front.offset as u32, fault);
            }
            return done;
        }
        let info = self.state.info_of(part.replay);
        let mut cursor = Cursor { slot: front.offset as u32, inside: front.cookie };
        let (section, run) = (part.section, part.run);
        let progress = self.inject_run(section, run, &mut cursor, front.ticket, info.as_ref(), budget);
        (front.offset, front.cookie) = (u64::from(cursor.slot), cursor.inside);
        match progress {
            Progress::Ended => Some(Some(Ok(Value::Unit))),
            Progress::Injected => {
                self.state.part_injected(front.ticket, false);
                Some(None)
            }
            Progress::Fault(fault) => {
                self.return_run_credit(index, (section, run), cursor.slot, fault);
                Some(Some(Err(fault)))
            }
            Progress::Full => None,
        }
    }

    /// A run has failed at that operation. If its peer lives, which owes nothing for what it never gets, the credit of the messages
    /// from there on is others' again.
    #[cold]
    fn return_run_credit(&mut self, index: usize, (section, run): (usize, usize), from: u32, fault: Fault) {
        if fault == Fault::Shutdown || self.state.peer(index).fault.is_some() {
            return;
        }
        let (mut at, end) = (u64::from(from), u64::from(self.state.patterns.sections[section].runs[run].end));
        while at < end
            && let Some((_, recorded)) = self.state.patterns.recorded(section, at)
        {
            if let (Op::Send, Some(number)) = (recorded.op, recorded.protocol.0.checked_sub(wire::FIRST_USER))
            {
                self.uncount(recorded.len);
                self.state.give_credit(index, usize::from(number), 1, recorded.len);
            }
            at += 1 + info_slots(usize::from(recorded.info_len)) as u64;
        }
    }
}

impl State {
    /// Whether the run of a jump takes packets that cannot be mixed with others of their kind.
    pub(in super::super) fn run_is_long(&self, jump: &Descriptor) -> bool {
        let Some(part) = self.part_of(jump.ticket) else { return false };
        self.patterns.sections[part.section].runs[part.run].long
            || self.run_goes_over_send(part.section, part.run)
    }

    /// Whether the peer hears of all protocols of a jump's run before it.
    pub(in super::super) fn run_is_announced(&mut self, index: usize, jump: &Descriptor) -> bool {
        let Some(part) = self.part_of(jump.ticket) else { return true };
        let State { patterns, peers, .. } = self;
        let needs = &patterns.sections[part.section].runs[part.run].needs;
        let peer = peers.get(index).and_then(Option::as_ref);
        peer.is_some_and(|peer| needs.iter().all(|need| peer.is_announced(need.protocol)))
    }

    /// The same of what an entry of a FIFO goes on with.
    pub(in super::super) fn jump_goes_over_send(&self, jump: &Descriptor) -> bool {
        self.part_of(jump.ticket).is_some_and(|part| self.run_goes_over_send(part.section, part.run))
    }

    /// Whether the puts, gets and atomic operations of a run are packets: all of them, if the device lacks one kind, so
    /// that they have one end.
    fn run_goes_over_send(&self, key: usize, run: usize) -> bool {
        let run = &self.patterns.sections[key].runs[run];
        let own = self.shape.endpoint(run.index).rank == self.me.rank;
        (run.accesses && self.goes_over_send(run.index))
            || (run.atomics && !own && self.has_no_atomics(run.index))
    }
}

/// An entry of a FIFO that goes on with a run from the cursor on.
fn jump(target: crate::ids::Endpoint, part: Ticket, cursor: Cursor) -> Descriptor {
    Descriptor {
        op: Op::Jump,
        rank: target.rank,
        context: target.context,
        offset: u64::from(cursor.slot),
        cookie: cursor.inside,
        ticket: part.to_word(),
        ..Descriptor::default()
    }
}
