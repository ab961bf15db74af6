//! Programs as bytes: portable, versioned, and checked before anything is run.
//!
//! ```text
//!   "DGSP" | version | lower bound | extent | size | low | high | chunks | elements | kind | hash, 16 bytes | code
//!   code     1 COPY offset len | 2 MCOPY n (offset len)… | 3 GOSUB routine offset | 4 ITERATE count stride | 5 CONTROL
//! ```
//!
//! Numbers are variable-length, seven bits a byte and the lowest first, at most 10 bytes; signed ones alternate (0, -1,
//! 1, -2, …). The hash is little-endian. What the header says of the code is compared with what the code does.

use super::body::{Block, Facts, MAX_SPAN};
use super::element::ElementKind;
use super::error::{DatatypeError, ProgramError};
use super::program::{Instruction, check};
use super::signature::{Signature, is_residue};
use super::{Bounds, Datatype};

const MAGIC: [u8; 4] = *b"DGSP";
/// Of the format.
pub(super) const VERSION: u8 = 1;

const COPY: u64 = 1;
const MULTI_COPY: u64 = 2;
const GOSUB: u64 = 3;
const ITERATE: u64 = 4;
const CONTROL: u64 = 5;

/// Appends a number of variable length.
pub(super) fn write_number(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

/// Takes a number of variable length from the beginning; `None` if there is none.
pub(super) fn read_number(from: &mut &[u8]) -> Option<u64> {
    let mut reader = Reader { bytes: from, at: 0 };
    let number = reader.number().ok()?;
    *from = from.get(reader.at..)?;
    Some(number)
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) {
        write_number(&mut self.0, number);
    }

    fn signed(&mut self, number: i64) {
        self.number((number << 1 ^ number >> 63) as u64);
    }

    fn block(&mut self, block: &Block) {
        self.signed(block.offset);
        self.number(block.len);
    }

    fn instruction(&mut self, instruction: &Instruction) {
        match instruction {
            Instruction::Copy(block) => {
                self.number(COPY);
                self.block(block);
            }
            Instruction::MultiCopy(blocks) => {
                self.number(MULTI_COPY);
                self.number(blocks.len() as u64);
                blocks.iter().for_each(|block| self.block(block));
            }
            Instruction::Gosub { routine, offset } => {
                self.number(GOSUB);
                self.number(u64::from(*routine));
                self.signed(*offset);
            }
            Instruction::Iterate { count, stride } => {
                self.number(ITERATE);
                self.number(*count);
                self.signed(*stride);
            }
            Instruction::Control => self.number(CONTROL),
        }
    }
}

pub(super) fn encode(datatype: &Datatype, program: &[Instruction]) -> Vec<u8> {
    let mut out = Writer(Vec::with_capacity(64 + 8 * program.len()));
    out.0.extend(MAGIC);
    out.0.push(VERSION);
    let (bounds, facts, signature) = (datatype.bounds(), datatype.facts(), datatype.signature());
    out.signed(bounds.lower);
    out.signed(bounds.extent);
    out.number(facts.size);
    out.signed(facts.low);
    out.signed(facts.high);
    out.number(facts.chunks);
    out.number(signature.elements);
    out.number(signature.kind.map_or(0, |kind| kind as u64));
    signature.hash.iter().for_each(|part| out.0.extend(part.to_le_bytes()));
    program.iter().for_each(|instruction| out.instruction(instruction));
    out.0
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    fn take(&mut self, len: usize) -> Result<&'b [u8], ProgramError> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..len)).ok_or(ProgramError::Length)?;
        self.at += len;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, ProgramError> {
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

    fn instruction(&mut self) -> Result<Instruction, ProgramError> {
        let start = self.at;
        Ok(match self.number()? {
            COPY => Instruction::Copy(self.block()?),
            MULTI_COPY => {
                let count = self.count(1)? as usize;
                // A block has two bytes at least: no more memory than in proportion to the bytes.
                if count > (self.bytes.len() - self.at) / 2 {
                    return Err(ProgramError::Number(start));
                }
                Instruction::MultiCopy((0..count).map(|_| self.block()).collect::<Result<_, _>>()?)
            }
            GOSUB => {
                let at = self.at;
                let routine = u32::try_from(self.number()?).map_err(|_| ProgramError::Number(at))?;
                Instruction::Gosub { routine, offset: self.signed()? }
            }
            ITERATE => Instruction::Iterate { count: self.count(2)?, stride: self.signed()? },
            CONTROL => Instruction::Control,
            _ => return Err(ProgramError::Instruction(start)),
        })
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<Datatype, ProgramError> {
    let mut reader = Reader { bytes, at: 0 };
    if reader.take(4)? != MAGIC || reader.take(1)? != [VERSION] {
        return Err(ProgramError::Version);
    }
    let bounds = Bounds { lower: reader.signed()?, extent: reader.signed()? };
    if bounds.lower.unsigned_abs().max(bounds.extent.unsigned_abs()) > MAX_SPAN as u64 {
        return Err(DatatypeError::TooLarge.into());
    }
    let mut declared = Facts {
        size: reader.number()?,
        low: reader.signed()?,
        high: reader.signed()?,
        chunks: reader.number()?,
        depth: 0,
    };
    let elements = reader.number()?;
    let at = reader.at;
    let kind = match reader.number()? {
        0 => None,
        number => Some(ElementKind::from_number(number).ok_or(ProgramError::Number(at))?),
    };
    let hash = [reader.word()?, reader.word()?];
    let signature = Signature { elements, bytes: declared.size, kind, hash };
    let mut program = Vec::new();
    while reader.at < bytes.len() {
        program.push(reader.instruction()?);
    }
    let body = check(&program)?;
    declared.depth = body.facts.depth;
    if body.facts != declared {
        return Err(ProgramError::Declared("size, bounds or number of chunks"));
    }
    let plausible = match kind {
        Some(kind) => elements.checked_mul(kind.size()) == Some(declared.size),
        None => elements <= declared.size && (elements == 0) == (declared.size == 0),
    };
    if !plausible {
        return Err(ProgramError::Declared("number of elements"));
    }
    Ok(Datatype::from_parts(body, bounds, signature))
}
