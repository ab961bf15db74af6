//! Data gather/scatter programs (DGSP): what a datatype compiles to (G01).

use super::body::{Block, Body, Item, Loop};
use std::collections::HashMap;
use std::sync::Arc;

/// An instruction. Offsets are relative to the base of the routine that it is in, in bytes.
///
/// A program is a sequence of routines. Each ends with [`Iterate`](Instruction::Iterate) or
/// [`Control`](Instruction::Control) and calls only later ones, so that every run ends. The first one is the program's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// Moves one block.
    Copy(Block),
    /// Moves several blocks, in this order.
    MultiCopy(Vec<Block>),
    /// Runs a routine, by number, at another base.
    Gosub {
        /// Counted from 0; later than the caller's.
        routine: u32,
        /// Of the base of the routine.
        offset: i64,
    },
    /// Ends a routine: runs it again from its start, `count` times in all, the base moving on by `stride` each time.
    Iterate {
        /// At least 2.
        count: u64,
        /// In bytes.
        stride: i64,
    },
    /// Ends a routine that runs once: back to the caller, or, in the first one, the end of the program.
    Control,
}

/// What the routines of a body and the bodies below it are, in the order of calls.
struct Compiler {
    routines: Vec<Vec<Instruction>>,
    /// Numbers from the end, of loops that are compiled already.
    known: HashMap<(usize, u64, i64), usize>,
}

/// Compiles a body. Bodies that are used several times become one routine.
pub(super) fn compile(body: &Arc<Body>) -> Vec<Instruction> {
    let mut compiler = Compiler { routines: Vec::new(), known: HashMap::new() };
    compiler.routine(body, 1, 0);
    let last = compiler.routines.len() - 1;
    let mut program: Vec<Instruction> = compiler.routines.into_iter().rev().flatten().collect();
    for instruction in &mut program {
        if let Instruction::Gosub { routine, .. } = instruction {
            // Callees were numbered first; now they come last.
            *routine = last as u32 - *routine;
        }
    }
    program
}

impl Compiler {
    /// Compiles a loop over a body; returns its number.
    fn routine(&mut self, body: &Arc<Body>, count: u64, stride: i64) -> usize {
        let key = (Arc::as_ptr(body) as usize, count, stride);
        if let Some(number) = self.known.get(&key) {
            return *number;
        }
        let mut code = Vec::new();
        let mut blocks: Vec<Block> = Vec::new();
        for item in &body.items {
            match item {
                Item::Block(block) => blocks.push(*block),
                Item::Loop(Loop { offset, count, stride, body }) => {
                    flush(&mut blocks, &mut code);
                    let routine = self.routine(body, *count, *stride) as u32;
                    code.push(Instruction::Gosub { routine, offset: *offset });
                }
            }
        }
        flush(&mut blocks, &mut code);
        code.push(if count == 1 { Instruction::Control } else { Instruction::Iterate { count, stride } });
        self.routines.push(code);
        let number = self.routines.len() - 1;
        self.known.insert(key, number);
        number
    }
}

fn flush(blocks: &mut Vec<Block>, code: &mut Vec<Instruction>) {
    match blocks.len() {
        0 => {}
        1 => code.push(Instruction::Copy(blocks[0])),
        _ => code.push(Instruction::MultiCopy(std::mem::take(blocks))),
    }
    blocks.clear();
}
