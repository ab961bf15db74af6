//! Puts and gets over sends (D13): for devices that have no puts and gets of their own, and wherever the settings say so.
//!
//! ```text
//!   source                                      target
//!   put in the FIFO --PUT, PUT, ..------------> copied to its memory, counted
//!   ends <-----------------------PUT_DONE n---- once per advance
//!
//!   get in the FIFO --GET, GET, ..------------> copied out of its memory at once
//!   its value <------------GET_DATA, GET_DATA-- at once, or as there is room
//! ```
//! Atomic operations go the same way wherever a device has none: as puts of a word, or as gets of its old value.
//!
//! All of it are packets of the pair's lane, in the order of its FIFO, so that the order of puts, gets and sends is that of
//! the lane. A put is acknowledged by a count and a get is answered in its turn: a peer names none of this side's
//! operations, and can end none but its own.
//!
//! Memory that is no device's, as [exposed](crate::exposed) one, is reached so as well where the rest of the peer's is mapped.
//! The latter is reached past the lane, and so not while anything of the former is under way: the gate is held until that is
//! acknowledged or answered.
//!
//! A get asks for parts within a window ([`EngineConfig::get_window`](super::EngineConfig::get_window)), which bounds what
//! the target keeps for it. Whoever cannot ask for more lets nothing behind it pass; answers and acknowledgements wait for
//! nobody, so that two ranks that get from each other cannot wait for each other.

mod atomic;
mod source;
mod target;

use super::State;
use super::peer::Peer;
use crate::device::Stop;
use crate::error::Fault;
use crate::memory::SharedSlice;
use crate::slot::{Ticket, Value};
use std::collections::VecDeque;

/// What a part of a get counts for besides its bytes.
const PART_COST: u64 = 64;
/// Longest part of a get in bytes.
const LONGEST_PART: u64 = 1 << 20;
/// Runs of packets with the same end that are kept until they are acknowledged. What is beyond that is told to have failed:
/// it takes a peer as many puts of memory that is not there, between others, before it has heard of the first.
const RUNS: usize = 4096;
/// Payloads out of shared memory up to this length are copied into the packet rather than into a page of their own.
const SCRATCH: usize = 2048;

/// What goes over sends between this endpoint and one other.
#[derive(Debug, Default)]
pub(crate) struct OverSend {
    /// Packets of puts that were sent, ever.
    puts: u64,
    /// As many of them were handled.
    puts_done: u64,
    /// Gets that were begun, ever.
    gets_begun: u64,
    /// As many of them have ended.
    gets_ended: u64,
    /// What was asked for and is not all here, oldest first.
    gets: VecDeque<OpenGet>,
    /// The parts that were asked for: length, and what is missing of it.
    parts: VecDeque<(u64, u64)>,
    /// What they count for.
    asked: u64,
    /// Operations that end when what they consist of has been handled.
    ends: VecDeque<End>,
    /// The operation whose packets are being sent.
    begun: Option<End>,
    /// Packets of the peer's puts that were handled, and not acknowledged yet: up to which number, and whether their bytes
    /// are in memory.
    handled: VecDeque<(u64, bool)>,
    /// Packets of the peer's puts, ever.
    arrived: u64,
    /// Answers to the peer's gets that found no room yet.
    answers: VecDeque<Answer>,
    /// What they count for.
    answering: u64,
    /// Memory of the peer is reached past its lane as well: not while this is set, and the gate is held.
    holds_gate: bool,
}

/// Parts of operations of this side: the numbers of the first packet and get, and those behind the last.
#[derive(Clone, Copy, Debug)]
struct End {
    puts: (u64, u64),
    gets: (u64, u64),
    ticket: u64,
    fault: Option<Fault>,
}

#[derive(Debug)]
struct OpenGet {
    ticket: Option<Ticket>,
    len: u64,
    asked: u64,
    received: u64,
    fault: Option<Fault>,
    into: Landing,
}

/// Where the bytes of a get go.
#[derive(Debug)]
enum Landing {
    Value(Vec<u8>),
    /// The value came in one piece.
    Whole(Value),
    Region(SharedSlice),
    /// Nobody waits for them any more.
    Nowhere,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Bytes held under a key: how many, and how many of them were sent.
    Data { key: usize, len: u64, sent: u64 },
    /// There is no such memory; so many bytes were asked for.
    Refused { len: u64 },
}

impl Answer {
    fn cost(self) -> u64 {
        match self {
            Answer::Data { len, .. } | Answer::Refused { len } => len + PART_COST,
        }
    }
}

impl OverSend {
    /// Ends what has been handled: the tickets, and how.
    fn ended(&mut self) -> Option<End> {
        let front = self.ends.front()?;
        let over = front.puts.1 <= self.puts_done && front.gets.1 <= self.gets_ended;
        if over { self.ends.pop_front() } else { None }
    }

    /// Whether any operation is under way.
    fn is_under_way(&self) -> bool {
        self.begun.is_some() || !self.ends.is_empty() || !self.gets.is_empty()
    }

    /// The get that was begun last could not be asked for: no answer is going to end it. Of one that was asked for in part, the
    /// peer has ended.
    fn never_asked(&mut self, stop: Stop) {
        if matches!(stop, Stop::Fault(_)) && self.gets.back().is_some_and(|get| get.asked == 0) {
            self.gets.pop_back();
            self.gets_begun -= 1;
        }
    }

    /// The operation whose packets are sent now.
    fn begin(&mut self, ticket: u64) -> &mut End {
        let (put, get) = (self.puts, self.gets_begun);
        self.begun.get_or_insert(End { puts: (put, put), gets: (get, get), ticket, fault: None })
    }

    /// All packets of that operation are sent.
    fn sent(&mut self) {
        if let Some(mut end) = self.begun.take() {
            end.puts.1 = self.puts;
            end.gets.1 = self.gets_begun;
            self.ends.push_back(end);
        }
    }

    /// That operation is not sent to its end, and fails. What it has asked for comes nevertheless: not to memory that its owner may
    /// have back.
    fn give_up(&mut self) {
        let Some(end) = self.begun.take() else { return };
        let before = end.gets.0.saturating_sub(self.gets_ended) as usize;
        self.gets.iter_mut().skip(before).for_each(|get| get.into = Landing::Nowhere);
    }

    /// Whoever has one of these packets or gets ends with a fault.
    fn blame(&mut self, fault: Fault, concerns: impl Fn(&End) -> bool) {
        let (puts, gets) = (self.puts, self.gets_begun);
        if let Some(begun) = &mut self.begun {
            (begun.puts.1, begun.gets.1) = (puts, gets);
        }
        for end in self.ends.iter_mut().chain(&mut self.begun).filter(|end| concerns(end)) {
            end.fault.get_or_insert(fault);
        }
    }
}

impl Peer {
    pub(super) fn over(&mut self) -> &mut OverSend {
        self.over.get_or_insert_default()
    }

    /// Whether nothing that is queued, or on its way to memory that only the peer reaches, precedes an access to memory that is
    /// reached past the lane.
    #[inline]
    pub fn lets_past(&self) -> bool {
        self.queue_is_empty() && !self.holds_gate()
    }

    #[inline]
    pub fn holds_gate(&self) -> bool {
        self.over.as_ref().is_some_and(|over| over.holds_gate)
    }

    /// Whether the peer is owed acknowledgements or answers.
    pub fn owes_over(&self) -> bool {
        self.over.as_ref().is_some_and(|over| !over.handled.is_empty() || !over.answers.is_empty())
    }
}

impl State {
    /// Whether puts and gets of that endpoint's memory go over sends.
    #[inline]
    pub(super) fn goes_over_send(&self, index: usize) -> bool {
        self.over_send.get(index).copied().unwrap_or(true)
    }

    /// Finds out which endpoints that are. What is put or got over sends is never done inline, which would overtake what
    /// is on its way.
    pub(super) fn choose_over_send(&mut self) {
        let chosen = (0..self.shape.endpoints()).map(|index| {
            let rank = self.shape.endpoint(index).rank;
            let over_send = self.needs_over_send(rank);
            if over_send {
                self.gates.close_over_send(rank);
            }
            over_send
        });
        self.over_send = chosen.collect();
    }

    /// Whether puts and gets of that rank's memory go over sends.
    pub(super) fn needs_over_send(&self, rank: crate::ids::Rank) -> bool {
        let caps = self.routes.of(rank);
        self.config.oversend || !(caps.native_put && caps.native_get)
    }

    /// Longest part of a get, and what may be asked for at a time.
    fn get_limits(&self) -> (u64, u64) {
        let window = self.config.get_window.max(2 * PART_COST);
        let part = ((window / 4) & !7).clamp(8, LONGEST_PART);
        (part, window)
    }

    /// Completes what has been handled of this side's operations.
    fn settle_over(&mut self, index: usize) {
        while let Some(over) = self.peers[index].as_mut().and_then(|peer| peer.over.as_mut())
            && let Some(end) = over.ended()
        {
            if let Some(ticket) = Ticket::from_word(end.ticket) {
                self.end(ticket, end.fault.map_or(Ok(Value::Unit), Err));
            }
        }
        self.hold_gate(index);
    }

    /// What is being sent is not sent to its end.
    pub(super) fn give_up_begun(&mut self, index: usize) {
        self.peer(index).over().give_up();
        self.hold_gate(index);
    }

    /// Of a peer some of whose memory is mapped and some is not, nothing done to the one kind passes what is done to the
    /// other: keeps the gate closed while anything of the latter is under way.
    pub(super) fn hold_gate(&mut self, index: usize) {
        let Some(peer) = self.peers[index].as_ref() else { return };
        let (rank, Some(over)) = (peer.endpoint.rank, peer.over.as_ref()) else { return };
        let held = over.is_under_way() && self.routes.of(rank).mappable && !self.goes_over_send(index);
        if held == over.holds_gate {
            return;
        }
        self.gates.queued(rank, if held { 1 } else { -1 });
        let peer = self.peer(index);
        peer.over().holds_gate = held;
        if !held {
            peer.stuck = false;
            self.mark_busy(index);
        }
    }

    /// This side leaves, and its operations have ended. What the peer has been asked for it will answer nevertheless, and it is
    /// owed what it has asked for.
    pub(super) fn end_own_over(&mut self, index: usize) {
        let Some(over) = self.peers[index].as_mut().and_then(|peer| peer.over.as_mut()) else { return };
        over.begun = None;
        // What comes is for nobody, and nothing of it goes to memory that its owner may have back.
        over.gets.iter_mut().for_each(|get| get.into = Landing::Nowhere);
        self.hold_gate(index);
    }

    /// The peer is gone: its operations have ended or will, and it gets no answers.
    pub(super) fn drop_over(&mut self, index: usize) {
        let Some(peer) = self.peers[index].as_mut() else { return };
        peer.stuck = false;
        let Some(over) = peer.over.take() else { return };
        if over.holds_gate {
            self.gates.queued(peer.endpoint.rank, -1);
        }
        for answer in over.answers {
            if let Answer::Data { key, .. } = answer {
                self.table.held.try_remove(key);
            }
        }
    }
}

/// The length of the next part: at most `most`, and so that no word of the memory lies in two parts, if that is possible.
pub(super) fn cut(offset: u64, left: u64, most: u64) -> u64 {
    if left <= most {
        return left;
    }
    let odd = (offset + most) % 8;
    if most > odd { most - odd } else { most }
}

#[cfg(all(test, not(posthaste_loom)))]
mod tests {
    use super::{Landing, OpenGet, OverSend, cut};
    use crate::memory::SharedSlice;

    /// What a run that fails has asked for lands nowhere: gets that were begun before it are other operations'.
    #[test]
    fn gets_of_a_run_that_is_given_up_land_nowhere() {
        let mut over = OverSend::default();
        let get = || OpenGet {
            ticket: None,
            len: 8,
            asked: 8,
            received: 0,
            fault: None,
            into: Landing::Region(SharedSlice::EMPTY),
        };
        // Three were begun, of which the first has ended.
        (over.gets_begun, over.gets_ended) = (3, 1);
        over.gets.extend([get(), get()]);
        over.begin(7);
        over.gets.extend([get(), get()]);
        over.gets_begun += 2;
        over.give_up();
        let nowhere: Vec<bool> = over.gets.iter().map(|get| matches!(get.into, Landing::Nowhere)).collect();
        assert_eq!(nowhere, [false, false, true, true]);
        assert!(over.begun.is_none());
        over.give_up();
        assert!(matches!(over.gets[0].into, Landing::Region(_)));
    }

    #[test]
    fn parts_end_where_words_end() {
        assert_eq!(cut(3, 10, 10), 10);
        assert_eq!(cut(0, 100, 33), 32);
        assert_eq!(cut(3, 100, 33), 29);
        assert_eq!(cut(1, 100, 5), 5, "shorter than a word");
        for offset in 0..16 {
            let (mut at, mut left) = (offset, 1000);
            while left > 0 {
                let len = cut(at, left, 17);
                assert!(len > 0 && len <= 17);
                (at, left) = (at + len, left - len);
                assert!(left == 0 || at % 8 == 0);
            }
            assert_eq!(at, offset + 1000);
        }
    }
}
