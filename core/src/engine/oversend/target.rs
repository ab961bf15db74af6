//! What peers put to and get from this rank's memory.

use super::super::{Scope, State};
use super::{Answer, PART_COST, RUNS, SCRATCH};
use crate::descriptor::{Descriptor, Op, SourceKind};
use crate::device::{Body, Sources, Stop, Verdict};
use crate::error::Fault;
use crate::exposed::is_exposed;
use crate::ids::ProtocolId;
use crate::memory::{SharedSlice, Source};
use crate::wire;
use bytes::Bytes;

impl Scope<'_> {
    /// Bytes for this rank's memory. They are there when this returns: before anything that the peer sent behind them.
    pub(in super::super) fn put_arrived(
        &mut self,
        index: usize,
        place: u64,
        body: &Body<'_>,
    ) -> Option<Verdict> {
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        let there = if is_exposed(place) {
            self.state.exposed.write(place, &body.source())
        } else {
            let memory = self.state.memory.map(self.state.me.rank, place, body.len() as u64);
            if let Some(memory) = memory {
                match body.source() {
                    Source::Private(bytes) => memory.write(bytes),
                    Source::Shared(page) => page.copy_to(memory),
                }
            }
            memory.is_some()
        };
        self.handled(index, there);
        Some(Verdict::Taken)
    }

    /// One more of the peer's puts was handled: whether there was memory for it.
    pub(super) fn handled(&mut self, index: usize, there: bool) {
        let over = self.state.peer(index).over();
        over.arrived += 1;
        let runs = over.handled.len();
        match over.handled.back_mut() {
            Some((upto, good)) if *good == there => *upto = over.arrived,
            Some((upto, good)) if runs == RUNS => (*upto, *good) = (over.arrived, false),
            _ => over.handled.push_back((over.arrived, there)),
        }
        self.state.mark_busy(index);
    }

    /// The peer asks for memory. It is copied now, so that nothing behind the question can change the answer. `None`: the
    /// peer asks for more than may be asked for.
    pub(in super::super) fn get_asked(&mut self, index: usize, place: u64, len: &[u8]) -> Option<Verdict> {
        let len = u64::from_le_bytes(len.try_into().ok()?);
        let (longest, window) = self.state.get_limits();
        let peer = self.state.peer(index);
        if peer.fault.is_some() {
            return Some(Verdict::Taken);
        }
        let over = peer.over();
        if len > longest || over.answering + len + PART_COST > window {
            return None;
        }
        let idle = over.answers.is_empty();
        let bytes = if is_exposed(place) {
            self.state.exposed.read(place, len as usize)
        } else {
            match self.state.memory.map(self.state.me.rank, place, len) {
                Some(memory) if idle && self.answer_now(index, memory) => return Some(Verdict::Taken),
                memory => memory.map(|memory| memory.to_vec()),
            }
        };
        let answer = match bytes {
            Some(bytes) if idle && self.answer_short(index, &bytes) => return Some(Verdict::Taken),
            Some(bytes) => {
                let key = self.state.table.held.insert(Bytes::from(bytes));
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

    /// Answers with one packet, if it is one and there is room.
    fn answer_now(&mut self, index: usize, memory: SharedSlice) -> bool {
        let State { table, scratch, routes, shape, .. } = &mut *self.state;
        let caps = routes.of(shape.endpoint(index).rank);
        if memory.len() > caps.max_eager {
            return false;
        }
        if memory.len() <= caps.max_inline.min(SCRATCH) {
            scratch.resize(memory.len(), 0);
            memory.read(scratch);
            let bytes = std::mem::take(scratch);
            let done = self.answer_short(index, &bytes);
            self.state.scratch = bytes;
            return done;
        }
        let key = table.local.insert(memory);
        let data = Descriptor {
            source_kind: SourceKind::Region,
            source: [key as u64, 0],
            len: memory.len() as u64,
            ..self.packet(index, wire::GET_DATA)
        };
        let sources = Sources::of(&self.state.table);
        let stop = self.inject.inject(std::slice::from_ref(&data), &sources).stop;
        self.state.table.local.remove(key);
        stop == Stop::Done
    }

    /// Answers with these bytes, if they go into a packet as they are and there is room.
    fn answer_short(&mut self, index: usize, bytes: &[u8]) -> bool {
        let caps = self.state.routes.of(self.state.shape.endpoint(index).rank);
        bytes.len() <= caps.max_inline.min(SCRATCH)
            && self.aside_of_queue(index, wire::GET_DATA, 0, &[], bytes) == Stop::Done
    }

    fn packet(&self, index: usize, protocol: u16) -> Descriptor {
        let target = self.state.shape.endpoint(index);
        let (rank, context) = (target.rank, target.context);
        Descriptor { op: Op::Send, rank, context, protocol: ProtocolId(protocol), ..Descriptor::default() }
    }

    /// Sends a record of the messager's own past everything that is queued.
    pub(in super::super) fn aside_of_queue(
        &mut self,
        index: usize,
        protocol: u16,
        cookie: u64,
        info: &[u8],
        bytes: &[u8],
    ) -> Stop {
        let record = Descriptor {
            source_kind: SourceKind::Borrowed,
            info_len: info.len() as u8,
            len: bytes.len() as u64,
            cookie,
            ..self.packet(index, protocol)
        };
        let sources = Sources { info, borrowed: bytes, ..Sources::of(&self.state.table) };
        let stop = self.inject.inject(std::slice::from_ref(&record), &sources).stop;
        if matches!(stop, Stop::Fault(Fault::OutOfMemory(_))) {
            self.state.wait_for_memory();
        }
        stop
    }

    /// Sends acknowledgements and answers that are owed, as far as there is room. Returns how many.
    pub(in super::super) fn pump_over(&mut self, index: usize) -> usize {
        let mut moved = 0;
        while let Some(handled) = self.over_owed(index, |over| over.handled.front().copied()) {
            let (count, good) = handled;
            let code = wire::code_of(Fault::NoSuchMemory(self.state.me.rank)).to_le_bytes();
            let why: &[u8] = if good { &[] } else { &code };
            if self.aside_of_queue(index, wire::PUT_DONE, count, &[], why) != Stop::Done {
                return moved;
            }
            self.state.peer(index).over().handled.pop_front();
            moved += 1;
        }
        while let Some(answer) = self.over_owed(index, |over| over.answers.front().copied()) {
            if !self.send_answer(index, answer) {
                return moved;
            }
            let over = self.state.peer(index).over();
            over.answering -= answer.cost();
            over.answers.pop_front();
            moved += 1;
        }
        moved
    }

    fn over_owed<T>(&self, index: usize, what: impl Fn(&super::OverSend) -> Option<T>) -> Option<T> {
        let peer = self.state.peers[index].as_ref()?;
        peer.over.as_ref().and_then(|over| what(over)).filter(|_| peer.fault.is_none())
    }

    /// Sends what is left of an answer; true if that was all.
    fn send_answer(&mut self, index: usize, answer: Answer) -> bool {
        let Answer::Data { key, len, mut sent } = answer else {
            let code = wire::code_of(Fault::NoSuchMemory(self.state.me.rank)).to_le_bytes();
            return self.aside_of_queue(index, wire::GET_DATA, 0, &code, &[]) == Stop::Done;
        };
        let caps = self.state.routes.of(self.state.shape.endpoint(index).rank);
        let (mut fragment, mut eager) = (caps.fragment as u64, caps.max_eager as u64);
        let short = caps.max_inline as u64;
        loop {
            let left = len - sent;
            let part = if left <= eager { left } else { fragment };
            let data = Descriptor {
                source_kind: SourceKind::Held,
                source: [key as u64, sent],
                len: part,
                ..self.packet(index, wire::GET_DATA)
            };
            let sources = Sources::of(&self.state.table);
            let stop = self.inject.inject(std::slice::from_ref(&data), &sources).stop;
            if stop != Stop::Done {
                if matches!(stop, Stop::Fault(Fault::OutOfMemory(_))) {
                    if part > short && short > 0 {
                        // Without a page: whoever asked waits for it, and for all that it asked for behind it.
                        (fragment, eager) = (short, short);
                        continue;
                    }
                    self.state.wait_for_memory();
                }
                if let Some(front) = self.state.peer(index).over().answers.front_mut() {
                    *front = Answer::Data { key, len, sent };
                }
                return false;
            }
            sent += part;
            if sent >= len {
                self.state.table.held.try_remove(key);
                return true;
            }
        }
    }
}
