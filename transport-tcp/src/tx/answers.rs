//! Answers to gets, this rank's own and its peers', and what peers have put here.

use super::Tx;
use crate::frame::{DATA, Header, Malformed, NONE};
use crate::link::{GET_COST, Get, Landing, Leave, RUN};
use bytes::Bytes;
use posthaste_core::device::Sink;
use posthaste_core::memory::SharedSlice;
use posthaste_core::slot::Value;

/// Runs of puts of memory that is not there, of which a peer is still to be told.
const MOST_ABSENT: usize = 16 << 10;

/// Where the bytes of an answer go.
pub(crate) enum Destination {
    /// All of the answer, and short: it is handed to [`Tx::answered`] where it is.
    Short,
    /// To be appended to these, which hold what has come before, and handed to [`Tx::answered`].
    Bytes(Vec<u8>),
    /// There.
    Region(SharedSlice),
}

/// A part of an answer.
pub(crate) enum AnswerPart<'a> {
    /// All of it, in the read buffer.
    Short(&'a [u8]),
    /// What has come so far, this part at its end.
    Long(Vec<u8>),
    /// So many bytes, already where they belong.
    InPlace(usize),
}

impl Tx {
    /// The peer asks for memory, of up to [`RUN`] places with their lengths: it is written or copied now, so that a put behind
    /// cannot change the answers.
    pub fn answer(&mut self, index: usize, places: &[(u64, u64)]) -> Result<(), Malformed> {
        let limits = self.hub.limits;
        posthaste_core::failpoint!("tcp.get.asked");
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        if link.leave != Leave::No {
            // The peer is on the point of reading that this rank leaves, which ends its gets.
            return Ok(());
        }
        link.answering.passed(link.out.passed());
        if !link.absent.is_empty() {
            // Whoever waits for the answer goes by it for the puts that precede it, too.
            link.confirm();
        }
        let mut answers = [(Header::control(NONE, 0, 0), SharedSlice::EMPTY); RUN];
        let answers = &mut answers[..places.len()];
        for ((offset, len), answer) in places.iter().zip(&mut *answers) {
            if *len > limits.get_chunk as u64 || !link.answering.counts(*len, limits.get_window as u64) {
                return Err(Malformed::Window);
            }
            *answer = match self.hub.home.slice(*offset, *len) {
                Some(memory) => (Header::control(DATA, memory.len(), link.answers), memory),
                None => (Header::control(NONE, 0, link.answers), SharedSlice::EMPTY),
            };
            link.answers += 1;
        }
        link.push_memory(answers);
        posthaste_core::failpoint!("tcp.get.answered");
        let brought = places.iter().zip(&*answers).map(|((_, len), (_, memory))| (*len, memory.len()));
        link.answering.end_at(link.out.passed() + link.out.len() as u64, brought);
        self.touch(index);
        Ok(())
    }

    /// The next part of an answer is coming: where it goes.
    pub fn expect(&mut self, index: usize, part: u64, len: u64) -> Result<Destination, Malformed> {
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        let Some(get) = link.gets.front_mut() else { return Err(Malformed::Unasked) };
        let expected = (get.len - get.received).min(self.hub.limits.get_chunk as u64);
        if part != link.parts || len != expected || link.asked < len + GET_COST {
            return Err(Malformed::Unasked);
        }
        get.into.settle();
        Ok(match &mut get.into {
            // It was settled.
            Landing::Given(_) => return Err(Malformed::Unasked),
            Landing::Value(_) if len == get.len && len <= self.hub.limits.max_inline as u64 => {
                Destination::Short
            }
            Landing::Value(so_far) => {
                so_far.reserve_exact((get.len as usize).saturating_sub(so_far.len()));
                Destination::Bytes(std::mem::take(so_far))
            }
            Landing::Region(slice) => match slice.slice(get.received, len) {
                Some(slice) => Destination::Region(slice),
                None => return Err(Malformed::Unasked),
            },
        })
    }

    /// Gets that are not answered in full.
    pub fn outstanding(&self, index: usize) -> usize {
        self.links[index].as_ref().map_or(0, |link| link.gets.len())
    }

    /// Bytes of a get that are to come behind the part of its answer that is coming now.
    pub fn behind_part(&self, index: usize) -> usize {
        let chunk = self.hub.limits.get_chunk as u64;
        let get = self.links[index].as_ref().and_then(|link| link.gets.front());
        get.map_or(0, |get| (get.len - get.received).saturating_sub(chunk) as usize)
    }

    /// That part has come. Returns what has ended with it.
    pub fn answered(&mut self, index: usize, part: AnswerPart<'_>, sink: &mut dyn Sink) {
        let Some(link) = &mut self.links[index] else { return };
        let Some(get) = link.gets.front_mut() else { return };
        let len = match &part {
            AnswerPart::Short(bytes) => bytes.len() as u64,
            AnswerPart::Long(bytes) => bytes.len() as u64 - get.received,
            AnswerPart::InPlace(len) => *len as u64,
        };
        link.parts += 1;
        link.asked -= len + GET_COST;
        get.received += len;
        let whole = get.received == get.len;
        let value = match part {
            AnswerPart::Short(bytes) => Value::copy(bytes),
            AnswerPart::Long(bytes) if whole => Value::Bytes(Bytes::from(bytes)),
            AnswerPart::Long(bytes) => {
                get.into = Landing::Value(bytes);
                Value::Unit
            }
            AnswerPart::InPlace(_) => Value::Unit,
        };
        if whole {
            self.got(index, value, sink);
        }
        // There is room in the window.
        self.touch(index);
    }

    /// The oldest get is answered in full.
    fn got(&mut self, index: usize, value: Value, sink: &mut dyn Sink) {
        let Some(link) = &mut self.links[index] else { return };
        let Some(Get { ticket, owner, absent, .. }) = link.gets.pop_front() else { return };
        link.ledger.got(owner, absent);
        if let Some(ticket) = ticket {
            sink.complete(ticket, link.ledger.outcome(ticket, value));
        }
        self.settle_markers(index);
    }

    /// The peer has not got the memory of the next part of an answer.
    pub fn unanswered(&mut self, index: usize, part: u64, sink: &mut dyn Sink) -> Result<(), Malformed> {
        let chunk = self.hub.limits.get_chunk as u64;
        let Some(link) = &mut self.links[index] else { return Err(Malformed::Unasked) };
        let Some(get) = link.gets.front_mut() else { return Err(Malformed::Unasked) };
        let len = (get.len - get.received).min(chunk);
        if part != link.parts || link.asked < len + GET_COST {
            return Err(Malformed::Unasked);
        }
        link.parts += 1;
        link.asked -= len + GET_COST;
        get.received += len;
        get.absent = true;
        get.into.settle();
        if let Landing::Value(so_far) = &mut get.into {
            // What follows goes behind it.
            so_far.resize(get.received as usize, 0);
        }
        if get.received == get.len {
            self.got(index, Value::Unit, sink);
        }
        self.touch(index);
        Ok(())
    }

    /// Whether one more put of memory that is not there can be borne: a peer that does not listen is not told for ever.
    pub fn bears_absent(&mut self, index: usize) -> bool {
        self.links[index].as_mut().is_some_and(|link| link.untold() < MOST_ABSENT)
    }

    /// A put of memory that is not there is over.
    pub fn absent(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index] {
            match link.absent.last_mut() {
                Some((first, count)) if *first + *count == link.applied => *count += 1,
                _ => link.absent.push((link.applied, 1)),
            }
            link.applied += 1;
        }
        self.touch(index);
    }

    /// Bytes that were said to a peer, or are going to be.
    pub fn said(&self, index: usize) -> u64 {
        let link = self.links[index].as_ref();
        link.map_or(0, |link| link.direct + link.out.passed() + link.out.len() as u64)
    }

    /// Bytes that were asked of a peer and are not here.
    pub fn asked(&self, index: usize) -> u64 {
        self.links.get(index).and_then(Option::as_ref).map_or(0, |link| link.asked)
    }

    /// The peer's memory has taken one more put.
    pub fn applied(&mut self, index: usize) {
        if let Some(link) = &mut self.links[index] {
            link.applied += 1;
        }
        self.touch(index);
    }
}
