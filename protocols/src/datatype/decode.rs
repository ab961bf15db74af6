//! Programs of peers: checked before anything is run, and looked through before anything is made of them.
//!
//! A peer pays for what it makes others do: what is made of a program takes no more than some 30 times its length, and its
//! plan about as much again; the work is linear in that, and there is a limit to it. So the code is read twice: first for its shape, which takes next to
//! nothing, and then, from its end, routine by routine.

use super::body::{Block, Body, Facts, Item, Loop, MAX_SPAN};
use super::element::ElementKind;
use super::encode::{CONTROL, COPY, GOSUB, ITERATE, MAGIC, MULTI_COPY, VERSION};
use super::error::{DatatypeError, ProgramError};
use super::signature::{Signature, is_residue};
use super::{Bounds, Datatype};
use std::sync::Arc;

/// Longest program in bytes that is read, be it a peer's or one's own.
///
/// A block of irregular data takes 16 bytes at most, and mostly 3 to 8: four million blocks fit whatever they are.
pub const MAX_PROGRAM: usize = 64 << 20;

/// A piece of code.
enum Part {
    Block(Block),
    Call {
        routine: u32,
        offset: i64,
    },
    /// Of a routine.
    End {
        count: u64,
        stride: i64,
    },
}

#[derive(Clone, Copy)]
pub(super) struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
    /// Blocks that are still to come of a list.
    listed: u64,
}

impl<'b> Reader<'b> {
    pub fn new(bytes: &'b [u8]) -> Reader<'b> {
        Reader { bytes, at: 0, listed: 0 }
    }

    /// What was not read.
    pub fn rest(&self) -> &'b [u8] {
        &self.bytes[self.at..]
    }

    fn is_done(&self) -> bool {
        self.at == self.bytes.len() && self.listed == 0
    }

    fn take(&mut self, len: usize) -> Result<&'b [u8], ProgramError> {
        let taken = self.rest().get(..len).ok_or(ProgramError::Length)?;
        self.at += len;
        Ok(taken)
    }

    pub fn number(&mut self) -> Result<u64, ProgramError> {
        let start = self.at;
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(ProgramError::Number(start))
    }

    /// A number of bytes that is possible for offsets, bounds and strides.
    fn signed(&mut self) -> Result<i64, ProgramError> {
        let start = self.at;
        let number = self.number()?;
        let signed = (number >> 1) as i64 ^ -((number & 1) as i64);
        // Between two ends of a span there may be twice its length.
        if signed.unsigned_abs() > 2 * MAX_SPAN as u64 {
            return Err(ProgramError::Number(start));
        }
        Ok(signed)
    }

    fn count(&mut self, least: u64) -> Result<u64, ProgramError> {
        let start = self.at;
        let number = self.number()?;
        if number < least || number > MAX_SPAN as u64 {
            return Err(ProgramError::Number(start));
        }
        Ok(number)
    }

    fn word(&mut self) -> Result<u64, ProgramError> {
        let start = self.at;
        let word = u64::from_le_bytes(self.take(8)?.try_into().unwrap_or_default());
        if is_residue(word) { Ok(word) } else { Err(ProgramError::Number(start)) }
    }

    fn block(&mut self) -> Result<Block, ProgramError> {
        Ok(Block { offset: self.signed()?, len: self.count(1)? })
    }

    /// What comes next; of a list its blocks, one by one.
    fn part(&mut self) -> Result<Part, ProgramError> {
        if self.listed > 0 {
            self.listed -= 1;
            return self.block().map(Part::Block);
        }
        let start = self.at;
        match self.number()? {
            COPY => self.block().map(Part::Block),
            MULTI_COPY => {
                let count = self.count(1)?;
                // A block has two bytes at least.
                if count > self.rest().len() as u64 / 2 {
                    return Err(ProgramError::Number(start));
                }
                self.listed = count - 1;
                self.block().map(Part::Block)
            }
            GOSUB => {
                let at = self.at;
                let routine = u32::try_from(self.number()?).map_err(|_| ProgramError::Number(at))?;
                Ok(Part::Call { routine, offset: self.signed()? })
            }
            ITERATE => Ok(Part::End { count: self.count(2)?, stride: self.signed()? }),
            CONTROL => Ok(Part::End { count: 1, stride: 0 }),
            _ => Err(ProgramError::Instruction(start)),
        }
    }

    fn header(&mut self) -> Result<Header, ProgramError> {
        if self.take(4)? != MAGIC || self.take(1)? != [VERSION] {
            return Err(ProgramError::Version);
        }
        let bounds = Bounds { lower: self.signed()?, extent: self.signed()? };
        if bounds.lower.unsigned_abs().max(bounds.extent.unsigned_abs()) > MAX_SPAN as u64 {
            return Err(DatatypeError::TooLarge.into());
        }
        let facts = Facts {
            size: self.number()?,
            low: self.signed()?,
            high: self.signed()?,
            chunks: self.number()?,
            depth: 0,
        };
        let elements = self.number()?;
        let at = self.at;
        let kind = match self.number()? {
            0 => None,
            number => Some(ElementKind::from_number(number).ok_or(ProgramError::Number(at))?),
        };
        let hash = [self.word()?, self.word()?];
        Ok(Header { bounds, facts, signature: Signature { elements, bytes: facts.size, kind, hash } })
    }
}

/// What a program says of itself. The depth of its loops is not among that.
struct Header {
    bounds: Bounds,
    facts: Facts,
    signature: Signature,
}

pub(super) fn decode(bytes: &[u8]) -> Result<Datatype, ProgramError> {
    if bytes.len() > MAX_PROGRAM {
        return Err(ProgramError::TooLong { len: bytes.len() as u64 });
    }
    let mut reader = Reader::new(bytes);
    let Header { bounds, facts, signature } = reader.header()?;
    let body = Routines::look(reader)?.body()?;
    if body.facts != (Facts { depth: body.facts.depth, ..facts }) {
        return Err(ProgramError::Declared("size, bounds or number of chunks"));
    }
    let Signature { elements, kind, .. } = signature;
    let plausible = match kind {
        Some(kind) => elements.checked_mul(kind.size()) == Some(facts.size),
        None => elements <= facts.size && (elements == 0) == (facts.size == 0),
    };
    if !plausible {
        return Err(ProgramError::Declared("number of elements"));
    }
    Ok(Datatype::from_parts(body, bounds, signature))
}

/// The routines of a program whose shape is in order.
struct Routines<'b> {
    bytes: &'b [u8],
    places: Vec<Place>,
}

/// A routine that was not made yet.
struct Place {
    /// From the beginning of the program, in bytes.
    start: u32,
    /// Its blocks and calls.
    items: u32,
}

/// A routine that was made.
#[derive(Clone)]
struct Routine {
    body: Arc<Body>,
    count: u64,
    stride: i64,
}

impl<'b> Routines<'b> {
    /// Checks the shape of the code: calls go to later routines only, every routine is used and moves something, and
    /// counts and lengths are at least what they must be.
    fn look(mut code: Reader<'b>) -> Result<Routines<'b>, ProgramError> {
        let bytes = code.bytes;
        let (mut places, mut called) = (Vec::new(), Called::default());
        loop {
            let (number, start) = (places.len() as u32, code.at as u32);
            let (items, count) = called.by(number, &mut code)?;
            places.push(Place { start, items });
            if items == 0 && !(number == 0 && code.is_done()) {
                return Err(ProgramError::Declared("a routine moves nothing"));
            }
            if number == 0 && count > 1 {
                return Err(ProgramError::Declared("its first routine iterates"));
            }
            if code.is_done() {
                break;
            }
        }
        called.check(places.len())?;
        Ok(Routines { bytes, places })
    }

    /// What the first routine is.
    fn body(&self) -> Result<Arc<Body>, ProgramError> {
        // From the end: `made` has the last one first.
        let mut made: Vec<Routine> = Vec::with_capacity(self.places.len());
        for place in self.places.iter().rev() {
            made.push(self.routine(place, &made)?);
        }
        made.pop().map(|first| first.body).ok_or(ProgramError::Length)
    }

    /// Makes one routine, for which the later ones must be there.
    fn routine(&self, place: &Place, made: &[Routine]) -> Result<Routine, ProgramError> {
        let mut code = Reader { bytes: self.bytes, at: place.start as usize, listed: 0 };
        let mut items = Vec::with_capacity(place.items as usize);
        loop {
            items.push(match code.part()? {
                Part::Block(block) => Item::Block(block),
                Part::Call { routine, offset } => {
                    let from_end = self.places.len() - 1 - routine as usize;
                    let Routine { body, count, stride } = made[from_end].clone();
                    Item::Loop(Loop { offset, count, stride, body })
                }
                Part::End { count, stride } => {
                    return Ok(Routine { body: Arc::new(Body::new(items)?), count, stride });
                }
            });
        }
    }
}

/// Which routines are called.
#[derive(Default)]
struct Called {
    /// By number; as long as the farthest call takes.
    routines: Vec<bool>,
    /// Who makes that.
    farthest_by: u32,
}

impl Called {
    /// Notes the calls of a routine; tells how many blocks and calls it has, and how often it runs.
    fn by(&mut self, number: u32, code: &mut Reader<'_>) -> Result<(u32, u64), ProgramError> {
        let mut items = 0;
        loop {
            if code.is_done() {
                return Err(ProgramError::Declared("its last routine has no end"));
            }
            match code.part()? {
                Part::Block(_) => {}
                // A routine has a byte at least.
                Part::Call { routine, .. } if routine <= number || routine as usize > code.bytes.len() => {
                    return Err(ProgramError::Call { routine: number, called: routine });
                }
                Part::Call { routine, .. } => self.note(number, routine as usize),
                Part::End { count, .. } => return Ok((items, count)),
            }
            items += 1;
        }
    }

    fn note(&mut self, number: u32, routine: usize) {
        if routine >= self.routines.len() {
            self.routines.resize(routine + 1, false);
            self.farthest_by = number;
        }
        self.routines[routine] = true;
    }

    /// Whether all that are called are there, and all that are there are called.
    fn check(&self, routines: usize) -> Result<(), ProgramError> {
        let reach = self.routines.len().max(1);
        if reach > routines {
            return Err(ProgramError::Call { routine: self.farthest_by, called: reach as u32 - 1 });
        }
        if reach < routines || self.routines.iter().skip(1).any(|called| !called) {
            return Err(ProgramError::Declared("a routine is never called"));
        }
        Ok(())
    }
}
