//! Descriptions of datatypes, what they mean byte by byte, and random ones.

use posthaste_core::Rank;
use posthaste_core::inprocess::Arena;
use posthaste_core::memory::SharedSlice;
use posthaste_protocols::datatype::{Datatype, DatatypeError, ElementKind, Layout, Signature};
use proptest::collection::vec;
use proptest::prelude::*;
use std::cell::Cell;

/// A description. Leaves are elements, or the fields of a record: kind and offset each.
#[derive(Clone, Debug)]
pub enum Shape {
    Leaf,
    Contiguous(u64, Box<Shape>),
    Vector(u64, u64, i64, Box<Shape>),
    Hvector(u64, u64, i64, Box<Shape>),
    Indexed(Vec<(i64, u64)>, Box<Shape>),
    Hindexed(Vec<(i64, u64)>, Box<Shape>),
    Struct(Vec<(i64, u64, Shape)>),
    Subarray(Vec<(u64, u64, u64)>, Box<Shape>),
    Resized(i64, i64, Box<Shape>),
}

/// What the leaves of a shape are.
pub type Record = Vec<(ElementKind, i64)>;

/// What a shape means: the places of its elements in order, its lower and its upper bound.
#[derive(Clone, Debug)]
pub struct Meaning {
    pub elements: Vec<(ElementKind, i64)>,
    pub lower: i64,
    pub upper: i64,
}

impl Meaning {
    fn nothing() -> Meaning {
        Meaning { elements: Vec::new(), lower: 0, upper: 0 }
    }

    fn extent(&self) -> i64 {
        self.upper - self.lower
    }

    /// Copies of one meaning at several places.
    fn placed(parts: &[(i64, &Meaning)]) -> Meaning {
        let mut all = Meaning::nothing();
        all.lower = parts.iter().map(|(offset, part)| offset + part.lower).min().unwrap_or(0);
        all.upper = parts.iter().map(|(offset, part)| offset + part.upper).max().unwrap_or(0);
        for (offset, part) in parts {
            all.elements.extend(part.elements.iter().map(|(kind, place)| (*kind, place + offset)));
        }
        all
    }

    /// The offsets of all bytes in order.
    pub fn bytes(&self) -> Vec<i64> {
        self.elements.iter().flat_map(|(kind, place)| *place..*place + kind.size() as i64).collect()
    }

    pub fn kinds(&self) -> Vec<ElementKind> {
        self.elements.iter().map(|(kind, _)| *kind).collect()
    }
}

fn blocks(starts: impl IntoIterator<Item = (i64, u64)>, inner: &Meaning) -> Vec<(i64, &Meaning)> {
    let elements =
        |(start, count)| (0..count as i64).map(move |index| (start + index * inner.extent(), inner));
    starts.into_iter().flat_map(elements).collect()
}

impl Shape {
    pub fn meaning(&self, record: &Record) -> Meaning {
        let regular = |count: u64, block: u64, stride: i64, inner: &Meaning| {
            Meaning::placed(&blocks((0..count as i64).map(|index| (index * stride, block)), inner))
        };
        match self {
            Shape::Leaf => {
                let lower = record.iter().map(|(_, offset)| *offset).min().unwrap_or(0);
                let upper = record.iter().map(|(kind, offset)| offset + kind.size() as i64).max();
                Meaning { elements: record.clone(), lower, upper: upper.unwrap_or(0) }
            }
            Shape::Contiguous(count, inner) => {
                let inner = inner.meaning(record);
                regular(*count, 1, inner.extent(), &inner)
            }
            Shape::Vector(count, block, stride, inner) => {
                let inner = inner.meaning(record);
                regular(*count, *block, stride * inner.extent(), &inner)
            }
            Shape::Hvector(count, block, stride, inner) => {
                regular(*count, *block, *stride, &inner.meaning(record))
            }
            Shape::Indexed(list, inner) => {
                let inner = inner.meaning(record);
                let extent = inner.extent();
                let list = list.iter().map(|(displacement, count)| (displacement * extent, *count));
                Meaning::placed(&blocks(list, &inner))
            }
            Shape::Hindexed(list, inner) => {
                Meaning::placed(&blocks(list.iter().copied(), &inner.meaning(record)))
            }
            Shape::Struct(fields) => {
                let inner: Vec<Meaning> = fields.iter().map(|(_, _, shape)| shape.meaning(record)).collect();
                let fields = fields.iter().zip(&inner);
                let all: Vec<_> = fields
                    .flat_map(|((offset, count, _), inner)| blocks([(*offset, *count)], inner))
                    .collect();
                Meaning::placed(&all)
            }
            Shape::Subarray(dimensions, inner) => {
                let inner = inner.meaning(record);
                let mut places = vec![0];
                let mut whole = 1;
                for (len, count, start) in dimensions {
                    let of = |place: i64| (0..*count).map(move |i| place * *len as i64 + (start + i) as i64);
                    places = places.into_iter().flat_map(of).collect();
                    whole *= *len as i64;
                }
                let extent = inner.extent();
                let parts = places.into_iter().map(|place| (place * extent, 1));
                Meaning { lower: 0, upper: whole * extent, ..Meaning::placed(&blocks(parts, &inner)) }
            }
            Shape::Resized(lower, extent, inner) => {
                Meaning { lower: *lower, upper: lower + extent, ..inner.meaning(record) }
            }
        }
    }

    pub fn datatype(&self, record: &Record) -> Result<Datatype, DatatypeError> {
        match self {
            Shape::Leaf => {
                let fields: Vec<_> =
                    record.iter().map(|(kind, offset)| (*offset, 1, element(*kind))).collect();
                Datatype::structure(&fields)
            }
            Shape::Contiguous(count, inner) => inner.datatype(record)?.contiguous(*count),
            Shape::Vector(count, block, stride, inner) => {
                inner.datatype(record)?.vector(*count, *block, *stride)
            }
            Shape::Hvector(count, block, stride, inner) => {
                inner.datatype(record)?.hvector(*count, *block, *stride)
            }
            Shape::Indexed(list, inner) => inner.datatype(record)?.indexed(list),
            Shape::Hindexed(list, inner) => inner.datatype(record)?.hindexed(list),
            Shape::Struct(fields) => {
                let fields: Result<Vec<_>, _> = fields
                    .iter()
                    .map(|(offset, count, shape)| Ok((*offset, *count, shape.datatype(record)?)))
                    .collect();
                Datatype::structure(&fields?)
            }
            Shape::Subarray(dimensions, inner) => {
                let part =
                    |pick: fn(&(u64, u64, u64)) -> u64| dimensions.iter().map(pick).collect::<Vec<_>>();
                inner.datatype(record)?.subarray(&part(|d| d.0), &part(|d| d.1), &part(|d| d.2))
            }
            Shape::Resized(lower, extent, inner) => inner.datatype(record)?.resized(*lower, *extent),
        }
    }
}

pub fn element(kind: ElementKind) -> Datatype {
    match kind {
        ElementKind::U8 => Datatype::of::<u8>(),
        ElementKind::I8 => Datatype::of::<i8>(),
        ElementKind::U16 => Datatype::of::<u16>(),
        ElementKind::I16 => Datatype::of::<i16>(),
        ElementKind::U32 => Datatype::of::<u32>(),
        ElementKind::I32 => Datatype::of::<i32>(),
        ElementKind::U64 => Datatype::of::<u64>(),
        ElementKind::I64 => Datatype::of::<i64>(),
        ElementKind::U128 => Datatype::of::<u128>(),
        ElementKind::I128 => Datatype::of::<i128>(),
        ElementKind::F32 => Datatype::of::<f32>(),
        ElementKind::F64 => Datatype::of::<f64>(),
        other => panic!("no type for {other:?}"),
    }
}

/// The signature of a sequence, element by element.
pub fn signature(kinds: &[ElementKind]) -> Signature {
    kinds.iter().fold(Signature::EMPTY, |all, kind| all.then(&Signature::of(*kind)).expect("short"))
}

/// Random shapes of a few levels. Blocks may overlap each other and come in any order.
pub fn shapes() -> impl Strategy<Value = Shape> {
    Just(Shape::Leaf).prop_recursive(4, 12, 3, |inner| {
        let boxed = inner.clone().prop_map(Box::new).boxed();
        prop_oneof![
            (0..4u64, boxed.clone()).prop_map(|(count, inner)| Shape::Contiguous(count, inner)),
            (0..4u64, 0..4u64, -3..6i64, boxed.clone())
                .prop_map(|(count, block, stride, inner)| { Shape::Vector(count, block, stride, inner) }),
            (1..5u64, 1..3u64, -20..60i64, boxed.clone())
                .prop_map(|(count, block, stride, inner)| { Shape::Hvector(count, block, stride, inner) }),
            (vec((-4..9i64, 0..3u64), 0..6), boxed.clone())
                .prop_map(|(list, inner)| Shape::Indexed(list, inner)),
            (vec((-20..60i64, 1..3u64), 1..6), boxed.clone())
                .prop_map(|(list, inner)| Shape::Hindexed(list, inner)),
            vec((-10..80i64, 0..3u64, inner), 1..4).prop_map(Shape::Struct),
            (vec((1..5u64, 0..5u64, 0..5u64), 1..4), boxed.clone()).prop_map(|(dimensions, inner)| {
                let inside = |(len, count, start): (u64, u64, u64)| {
                    let count = count.min(len);
                    (len, count, start.min(len - count))
                };
                Shape::Subarray(dimensions.into_iter().map(inside).collect(), inner)
            }),
            (-9..9i64, 0..70i64, boxed)
                .prop_map(|(lower, extent, inner)| Shape::Resized(lower, extent, inner)),
        ]
    })
}

pub fn kinds() -> impl Strategy<Value = ElementKind> {
    (0..ElementKind::ALL.len()).prop_map(|index| ElementKind::ALL[index])
}

/// One to three fields of any kind, in any order, with gaps; they do not overlap.
pub fn records() -> impl Strategy<Value = Record> {
    (vec(kinds(), 1..4), Just(()), 0..5i64, any::<bool>()).prop_map(|(kinds, (), gap, backwards)| {
        let mut place = 0;
        let mut record: Record = Vec::new();
        for kind in kinds {
            record.push((kind, place));
            place += kind.size() as i64 + gap;
        }
        if backwards {
            let places: Vec<i64> = record.iter().map(|(kind, at)| place - at - kind.size() as i64).collect();
            record.iter_mut().zip(places).for_each(|(field, place)| field.1 = place);
        }
        record
    })
}

/// The offsets of all bytes of several elements.
pub fn all_bytes(meaning: &Meaning, count: u64, base: i64) -> Vec<i64> {
    let one = meaning.bytes();
    let at = |index: u64| base + index as i64 * meaning.extent();
    (0..count).flat_map(|index| one.iter().map(move |offset| offset + at(index))).collect()
}

/// Whether no byte is named twice.
pub fn distinct(offsets: &[i64]) -> bool {
    let mut sorted = offsets.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).all(|pair| pair[0] != pair[1])
}

/// A layout that fits into a memory that begins so far before its first byte; and the length of the memory.
pub fn placed(datatype: &Datatype, count: u64) -> (Layout<'_>, usize) {
    let (low, high) = datatype.span(count);
    // Some bytes around it, which nobody is to touch.
    let base = 5 - low.min(0);
    (Layout::new(datatype, count).at(base as u64), (high.max(0) + base + 7) as usize)
}

/// Bytes that are all different from their neighbours.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 7 + index / 251 + 1) as u8).collect()
}

/// Length of a piece of shared memory.
const PIECE: u64 = 256 << 10;
/// Pieces of a thread; the oldest one is used again.
const PIECES: u64 = 16;

thread_local! {
    static MEMORY: (Arena, Cell<u64>) = (Arena::new(1, PIECE * PIECES), Cell::new(0));
}

/// Shared memory with these bytes.
pub fn shared(bytes: &[u8]) -> SharedSlice {
    let (len, piece) = (bytes.len() as u64, MEMORY.with(|(_, next)| next.replace(next.get() + 1)));
    assert!(len <= PIECE);
    let slice = MEMORY.with(|(arena, _)| arena.slice(Rank(0), piece % PIECES * PIECE, len));
    let slice = slice.expect("every piece is inside");
    slice.write(bytes);
    slice
}
