//! What a collective call gives: its values, where they go, and how its result is put together.

use super::buffers::Buffers;
use super::layout::Layout;
use super::part::{Part, combine, pieces};
use super::plan::Plan;
use super::reduce::{Combiner, Datum, has_bytes};
use super::run::Input;
use super::schedule::Kind;
use super::stage::{
    Area, Exchanged, LEAST_BROADCAST, LEAST_LENT, LEAST_OF_TWO, LENT_CHUNK, Lent, MOST_BROADCAST,
    MOST_COMBINED, Outcome, Sink,
};
use super::staged::Exchange;
use bytes::Bytes;
use posthaste_core::Collective;
use posthaste_core::memory::SharedSlice;
use std::any::Any;
use zerocopy::{FromBytes, IntoBytes};

/// Where blocks lie, and behind the last.
pub(super) type Places = Box<[usize]>;

/// What a call gives, but for its schedule.
pub(super) struct Spec<'v> {
    pub kind: Kind,
    pub root: usize,
    pub name: fn(u32) -> Collective,
    /// Bytes of the vector or of each block; what all must agree on.
    pub bytes: usize,
    pub element: usize,
    pub input: Given<'v>,
    pub combiner: Option<Combiner>,
    /// The counts of what goes out and of what comes in, if they differ by rank.
    pub tables: Option<[Places; 2]>,
    /// Makes a place for so many values of the result, where it is a row of them.
    sink: Option<fn(usize) -> Box<dyn Sink>>,
    /// Makes one in which such a row is combined out of those of all members.
    total: Option<fn(Combiner) -> Box<dyn Sink>>,
}

/// What goes into an operation.
pub(super) enum Given<'v> {
    /// The caller's values, which are copied: into a buffer that is kept, or into a new one.
    Kept(&'v [u8]),
    New(&'v [u8]),
    Owned(Bytes),
}

impl Given<'_> {
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Given::Kept(bytes) | Given::New(bytes) => bytes,
            Given::Owned(bytes) => bytes,
        }
    }

    pub fn into_bytes(self, buffers: &Buffers) -> Bytes {
        match self {
            Given::Kept(bytes) => buffers.copy(bytes),
            Given::New(bytes) => Bytes::copy_from_slice(bytes),
            Given::Owned(bytes) => bytes,
        }
    }
}

impl<'v> Spec<'v> {
    pub fn new(kind: Kind, name: fn(u32) -> Collective) -> Self {
        let (combiner, tables, sink, total) = (None, None, None, None);
        let input = Given::Owned(Bytes::new());
        Self { kind, root: 0, name, bytes: 0, element: 1, input, combiner, tables, sink, total }
    }

    /// For operations of values of a type.
    pub fn of<T: Datum>(kind: Kind, name: fn(u32) -> Collective) -> Self {
        let (sink, total) = (Some(Values::<T>::sink as _), Some(Total::<T>::sink as _));
        Self { element: size_of::<T>(), sink, total, ..Self::new(kind, name) }
    }

    /// What members of a group of so many give to each other, and where its result is put together, if they are to lay it
    /// into their stages for each other and to tell of that on their boards; the same on all members.
    pub fn exchange(&self, size: usize) -> Option<(Exchange, Box<dyn Sink>)> {
        let block = self.bytes;
        if self.tables.is_some() || !(1..=LENT_CHUNK).contains(&block) {
            return None;
        }
        let (kind, bytes) = match self.kind {
            Kind::AllToAll | Kind::ReduceScatter => (Kind::AllToAll, block.checked_mul(size)?),
            Kind::AllGather | Kind::AllReduce => (Kind::AllGather, block),
            _ => return None,
        };
        let sink = match &self.combiner {
            None => self.sink?(size * block / self.element.max(1)),
            // Each combines what is for it out of all stages: no more than that is faster than to share that work.
            Some(combiner) if !combiner.is_users() && size * block <= MOST_COMBINED => {
                self.total?(combiner.clone())
            }
            Some(_) => return None,
        };
        Some((Exchange { kind, block, bytes }, sink))
    }

    /// Bytes of all values that a rank gives to such an operation, if its members are to lend them to each other: where it
    /// is one in which everybody has something for everybody, or one has the same for all.
    pub fn lends(&self, size: usize) -> Option<usize> {
        let bytes = match self.kind {
            Kind::Broadcast => {
                return (LEAST_BROADCAST..=MOST_BROADCAST).contains(&self.bytes).then_some(self.bytes);
            }
            Kind::AllReduce | Kind::AllGather => self.bytes,
            Kind::ReduceScatter | Kind::AllToAll => self.bytes.checked_mul(size)?,
            _ => return None,
        };
        // Two have half of the vector each to combine, and twice as many steps as if each combined all of it.
        let least = if self.kind == Kind::AllReduce && size == 2 { LEAST_OF_TWO } else { LEAST_LENT };
        (self.tables.is_none() && self.sink.is_some() && bytes >= least).then_some(bytes)
    }

    /// Lays what is given into the area.
    pub fn lend(&self, area: Area, plan: &Plan, layout: &Layout, outcome: &Outcome) -> Option<Input> {
        let (given, sink) = (self.input.as_bytes(), self.sink?);
        let own = layout.place(plan, plan.rank, true)?;
        let values = match self.kind {
            Kind::ReduceScatter => own.len(),
            _ => layout.total(plan),
        };
        let own = match self.kind {
            Kind::AllGather => {
                area.memory.write(given);
                Vec::new()
            }
            _ => {
                area.memory.write(&given[..own.start]);
                let behind = given.get(own.end..)?;
                area.memory.slice(own.end as u64, behind.len() as u64)?.write(behind);
                given[own].to_vec()
            }
        };
        let sink = sink(values / self.element.max(1));
        let exchange = Some(Exchanged { own, sink, outcome: outcome.clone() });
        let lent = Some(Lent { area, exchange });
        Some(Input { bytes: Bytes::new(), outgoing: None, lent })
    }
}

/// A result that is put together.
struct Values<T> {
    values: Vec<T>,
    /// How many there will be.
    count: usize,
}

impl<T: Datum> Values<T> {
    fn sink(count: usize) -> Box<dyn Sink> {
        Box::new(Self { values: Vec::new(), count })
    }

    fn room(&mut self) -> &mut Vec<T> {
        // Not before there is something to put there.
        if self.values.capacity() == 0 {
            self.values.reserve_exact(self.count);
        }
        &mut self.values
    }
}

impl<T: Datum> Sink for Values<T> {
    fn shared(&mut self, part: SharedSlice) {
        part.append_values(self.room());
    }

    fn private(&mut self, part: &[u8]) {
        match <[T]>::ref_from_bytes(part) {
            Ok(values) => self.room().extend_from_slice(values),
            Err(_) => self.room().extend(values_in::<T>(part)),
        }
    }

    fn finish(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.values)
    }
}

/// A result that is combined, in the order of what comes.
struct Total<T> {
    combiner: Combiner,
    /// What came first, until it is known what it is combined with: both are read together, piece by piece.
    first: Option<SharedSlice>,
    total: Vec<T>,
}

impl<T: Datum> Total<T> {
    fn sink(combiner: Combiner) -> Box<dyn Sink> {
        Box::new(Self { combiner, first: None, total: Vec::new() })
    }
}

impl<T: Datum> Sink for Total<T> {
    fn shared(&mut self, part: SharedSlice) {
        let Total { combiner, first, total } = self;
        let Some(first) = first.take() else {
            match total.is_empty() {
                true => self.first = Some(part),
                false => combine(combiner, false, &Part::Lent(part), 0, total.as_mut_slice().as_mut_bytes()),
            }
            return;
        };
        total.reserve_exact(first.len() / size_of::<T>().max(1));
        let mut second = Vec::new();
        for piece in pieces(first.len(), size_of::<T>()) {
            let of = |whole: SharedSlice| whole.slice(piece.start as u64, piece.len() as u64);
            if let (Some(first), Some(part)) = (of(first), of(part)) {
                first.append_values(total);
                second.clear();
                part.append_to(&mut second);
                combiner.run(&mut total.as_mut_slice().as_mut_bytes()[piece], &second, false);
            }
        }
    }

    fn private(&mut self, part: &[u8]) {
        if let Some(first) = self.first.take() {
            first.append_values(&mut self.total);
        }
        match self.total.is_empty() {
            true => self.total.extend(values_in::<T>(part)),
            false => self.combiner.run(self.total.as_mut_slice().as_mut_bytes(), part, false),
        }
    }

    fn finish(mut self: Box<Self>) -> Box<dyn Any + Send> {
        if let Some(first) = self.first.take() {
            first.append_values(&mut self.total);
        }
        Box::new(self.total)
    }
}

pub(super) fn put_together<T: Datum>(result: Box<dyn Any + Send>) -> Vec<T> {
    result.downcast().map_or_else(|_| Vec::new(), |values| *values)
}

pub(super) fn first_of<T: Datum>(result: Box<dyn Any + Send>) -> T {
    put_together(result).first().copied().unwrap_or_else(T::new_zeroed)
}

pub(super) fn values_in<T: Datum>(bytes: &[u8]) -> impl Iterator<Item = T> + '_ {
    let read = |bytes: &[u8]| T::read_from_bytes(bytes).unwrap_or_else(|_| T::new_zeroed());
    const { has_bytes::<T>() };
    bytes.chunks_exact(size_of::<T>()).map(read)
}

/// The places of blocks of these counts, in bytes, and behind the last.
pub(super) fn places(counts: &[usize], element: usize) -> Places {
    let ends = counts.iter().scan(0, |end, count| {
        *end += count * element;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}
