//! Programs as bytes: portable and versioned. What is made of them is in [`decode`](super::decode).
//!
//! ```text
//!   "DGSP" | version | lower bound | extent | size | low | high | chunks | elements | kind | hash, 16 bytes | code
//!   code     1 COPY offset len | 2 MCOPY n (offset len)… | 3 GOSUB routine offset | 4 ITERATE count stride | 5 CONTROL
//! ```
//!
//! Numbers are variable-length, seven bits a byte and the lowest first, at most 10 bytes; signed ones alternate (0, -1,
//! 1, -2, …). The hash is little-endian. What the header says of the code is compared with what the code does.

use super::Datatype;
use super::body::Block;
use super::decode::Reader;
use super::program::Instruction;

pub(super) const MAGIC: [u8; 4] = *b"DGSP";
/// Of the format.
pub(super) const VERSION: u8 = 1;

pub(super) const COPY: u64 = 1;
pub(super) const MULTI_COPY: u64 = 2;
pub(super) const GOSUB: u64 = 3;
pub(super) const ITERATE: u64 = 4;
pub(super) const CONTROL: u64 = 5;

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
    let mut reader = Reader::new(from);
    let number = reader.number().ok()?;
    *from = reader.rest();
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
