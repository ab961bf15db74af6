//! Two machines against each other: what they copy, in runs of equal blocks that are as long as possible.
//!
//! The *master* tells a chunk, the *worker* as many chunks as the master's holds, or the other way round. Where both are
//! in regular loops, several chunks are copied in one go, and since every byte goes to its own place whatever the order,
//! loops over a few blocks become a few loops over single blocks.

use super::body::Block;
use super::cursor::Machine;
use posthaste_core::memory::{Blocks, Piece, Rows};

/// Most pieces into which an iteration of two leaves is divided.
const PIECES_MAX: usize = 32;
/// Fewest iterations that are taken at a time.
const TILE_ITERATIONS: u64 = 32;

/// What does the copying.
pub(super) trait Mover {
    /// Whether chunks must come in the order of the programs.
    const IN_ORDER: bool;
    /// Bytes that are passed over several times, once for each piece: they are to stay in the first cache.
    const TILE: u64 = 8 << 10;
    /// Why it can fail.
    type Error;
    /// Copies blocks; all of them lie in the bounds that were checked.
    fn copy(&mut self, blocks: &Blocks) -> Result<(), Self::Error>;

    /// Copies rows of blocks, in any order.
    fn copy_rows(&mut self, rows: &Rows) -> Result<(), Self::Error> {
        for at in 0..rows.count as i64 {
            let Blocks { target, source, .. } = rows.row;
            let (target, source) = (target + at * rows.target_pitch, source + at * rows.source_pitch);
            self.copy(&Blocks { target, source, ..rows.row })?;
        }
        Ok(())
    }

    /// Copies single blocks.
    fn copy_pieces(&mut self, pieces: &[Piece]) -> Result<(), Self::Error> {
        for Piece { target, source, len } in pieces.iter().copied() {
            self.copy(&Blocks { target, target_stride: 0, source, source_stride: 0, len, count: 1 })?;
        }
        Ok(())
    }
}

/// Copies `bytes` from where one machine is to where the other is; both have as many left at least.
pub(super) fn run<M: Mover>(
    target: &mut Machine<'_>,
    source: &mut Machine<'_>,
    mut bytes: u64,
    mover: &mut M,
) -> Result<(), M::Error> {
    while bytes > 0 && !target.is_done() && !source.is_done() {
        bytes -= step(target, source, bytes, mover)?;
    }
    Ok(())
}

/// Copies what both are in the middle of; returns the number of bytes.
#[inline]
fn step<M: Mover>(
    target: &mut Machine<'_>,
    source: &mut Machine<'_>,
    bytes: u64,
    mover: &mut M,
) -> Result<u64, M::Error> {
    let ((to, to_rest), (from, from_rest)) = (target.chunk(), source.chunk());
    let (to_width, from_width) = (target.width(), source.width());
    let (to_flat, from_flat) = (target.is_flat(), source.is_flat());
    if !(to_flat || from_flat) && to_width == from_width && to_rest == to_width && from_rest == from_width {
        // Equal blocks on both sides.
        let count = target.left().min(source.left()).min(bytes / to_width);
        if count > 0 {
            let (target_stride, source_stride) = (target.stride(), source.stride());
            let blocks =
                Blocks { target: to, target_stride, source: from, source_stride, len: to_width, count };
            mover.copy(&blocks)?;
            target.pass_iterations(count);
            source.pass_iterations(count);
            return Ok(count * to_width);
        }
    }
    // Iterations of the one within the chunk of the other.
    let whole = |machine: &Machine<'_>, flat: bool, width: u64, rest: u64| match flat || !machine.at_start() {
        true => 0,
        false => machine.left().min(rest.min(bytes) / width),
    };
    let scattered = whole(target, to_flat, to_width, from_rest);
    let gathered = whole(source, from_flat, from_width, to_rest);
    if !(to_flat || from_flat) && target.at_start() && source.at_start() {
        let both = Both::new(target, source, bytes);
        if both.count > scattered.max(gathered) && (!M::IN_ORDER || both.is_simple()) {
            return both.copy(target, source, mover);
        }
    }
    if scattered.max(gathered) <= 1 {
        return single(target, source, bytes, mover);
    }
    if scattered >= gathered {
        let (base, stride, width) = (target.base(), target.stride(), to_width as i64);
        if !M::IN_ORDER
            && let (Some(pitch), [block, ..]) = (target.pitch(), target.blocks())
        {
            let row = Blocks {
                target: base + block.offset,
                target_stride: stride,
                source: from,
                source_stride: width,
                len: block.len,
                count: scattered,
            };
            let (count, source_pitch) = (target.blocks().len() as u64, block.len as i64);
            grid(&Rows { row, count, target_pitch: pitch, source_pitch }, to_width, mover)?;
            target.pass_iterations(scattered);
            source.pass(scattered * to_width);
            return Ok(scattered * to_width);
        }
        tiled::<M>(target.blocks(), to_width, scattered, |block, done, before, count| {
            mover.copy(&Blocks {
                target: base + done * stride + block.offset,
                target_stride: stride,
                source: from + done * width + before,
                source_stride: width,
                len: block.len,
                count,
            })
        })?;
        target.pass_iterations(scattered);
        source.pass(scattered * to_width);
        return Ok(scattered * to_width);
    }
    let (base, stride, width) = (source.base(), source.stride(), from_width as i64);
    if !M::IN_ORDER
        && let (Some(pitch), [block, ..]) = (source.pitch(), source.blocks())
    {
        let row = Blocks {
            target: to,
            target_stride: width,
            source: base + block.offset,
            source_stride: stride,
            len: block.len,
            count: gathered,
        };
        let (count, target_pitch) = (source.blocks().len() as u64, block.len as i64);
        grid(&Rows { row, count, target_pitch, source_pitch: pitch }, from_width, mover)?;
        source.pass_iterations(gathered);
        target.pass(gathered * from_width);
        return Ok(gathered * from_width);
    }
    tiled::<M>(source.blocks(), from_width, gathered, |block, done, before, count| {
        mover.copy(&Blocks {
            target: to + done * width + before,
            target_stride: width,
            source: base + done * stride + block.offset,
            source_stride: stride,
            len: block.len,
            count,
        })
    })?;
    source.pass_iterations(gathered);
    target.pass(gathered * from_width);
    Ok(gathered * from_width)
}

/// Copies what is contiguous on both sides, up to the end of an iteration of either, where there is no regularity.
fn single<M: Mover>(
    target: &mut Machine<'_>,
    source: &mut Machine<'_>,
    bytes: u64,
    mover: &mut M,
) -> Result<u64, M::Error> {
    let mut pieces = [Piece::default(); PIECES_MAX];
    let (mut to, mut from) = (Chunks::new(target), Chunks::new(source));
    let (mut used, mut done) = (0, 0);
    loop {
        let (listed, passed) = along(&mut to, &mut from, bytes - done, &mut pieces[used..PIECES_MAX - 1]);
        (used, done) = (used + listed, done + passed);
        let len = to.rest.min(from.rest).min(bytes - done);
        pieces[used] = Piece { target: to.place, source: from.place, len };
        used += 1;
        done += len;
        let ended = to.pass(len) | from.pass(len) | (done == bytes);
        if ended || used == PIECES_MAX {
            mover.copy_pieces(&pieces[..used])?;
            used = 0;
        }
        if ended {
            to.settle(target, done);
            from.settle(source, done);
            return Ok(done);
        }
    }
}

/// Lists blocks of one side as long as they are whole, not the last ones, and lie within a run of bytes of the other side.
/// Returns how many, and their bytes.
#[inline]
fn along(to: &mut Chunks<'_>, from: &mut Chunks<'_>, bytes: u64, pieces: &mut [Piece]) -> (usize, u64) {
    match (to.block, from.block) {
        (Some(_), None) => to.list(from, bytes, pieces, |target, source, len| Piece { target, source, len }),
        (None, Some(_)) => from.list(to, bytes, pieces, |source, target, len| Piece { target, source, len }),
        _ => (0, 0),
    }
}

/// The chunks of an iteration that are left.
struct Chunks<'p> {
    blocks: &'p [Block],
    base: i64,
    /// Of the current chunk; none if it is the only one.
    block: Option<usize>,
    place: i64,
    rest: u64,
}

impl<'p> Chunks<'p> {
    #[inline]
    fn new(machine: &Machine<'p>) -> Self {
        let (place, rest) = machine.chunk();
        Chunks { blocks: machine.blocks(), base: machine.base(), block: machine.block(), place, rest }
    }

    /// As [`along`], for the side with the blocks.
    #[inline]
    fn list(
        &mut self,
        run: &mut Chunks<'_>,
        bytes: u64,
        pieces: &mut [Piece],
        piece: impl Fn(i64, i64, u64) -> Piece,
    ) -> (usize, u64) {
        let Some(first) = self.block else { return (0, 0) };
        let behind = self.blocks.get(first + 1..).unwrap_or_default();
        // Of the run something has to be left as well: who comes to its end looks where it goes on.
        let most = bytes.min(run.rest);
        let (mut used, mut passed) = (0, 0);
        for (next, place) in behind.iter().zip(pieces) {
            if passed + self.rest >= most {
                break;
            }
            *place = piece(self.place, run.place + passed as i64, self.rest);
            used += 1;
            passed += self.rest;
            (self.place, self.rest) = (self.base + next.offset, next.len);
        }
        self.block = Some(first + used);
        (run.place, run.rest) = (run.place + passed as i64, run.rest - passed);
        (used, passed)
    }

    /// Passes over bytes of the chunk; tells whether it was the last one.
    #[inline]
    fn pass(&mut self, bytes: u64) -> bool {
        self.place += bytes as i64;
        self.rest -= bytes;
        if self.rest > 0 {
            return false;
        }
        let Some(block) = &mut self.block else { return true };
        *block += 1;
        match self.blocks.get(*block) {
            Some(next) => {
                (self.place, self.rest) = (self.base + next.offset, next.len);
                false
            }
            None => true,
        }
    }

    /// Brings the machine to where this is, so many bytes on.
    #[inline]
    fn settle(&self, machine: &mut Machine<'_>, bytes: u64) {
        match self.block {
            None => machine.pass(bytes),
            Some(block) => {
                let within = self.blocks.get(block).map_or(0, |current| current.len - self.rest);
                machine.settle(block, within);
            }
        }
    }
}

/// Calls `copy` for each block and for as many iterations as possible: with the block, the iterations done before, the
/// bytes of the iteration before the block, and the number of iterations.
#[inline]
fn tiled<M: Mover>(
    blocks: &[Block],
    width: u64,
    iterations: u64,
    mut copy: impl FnMut(&Block, i64, i64, u64) -> Result<(), M::Error>,
) -> Result<(), M::Error> {
    let tile = match blocks {
        [_] => iterations,
        _ if M::IN_ORDER => 1,
        _ => (M::TILE / width).max(TILE_ITERATIONS),
    };
    let mut done = 0;
    while done < iterations {
        let count = tile.min(iterations - done);
        let mut before = 0;
        for block in blocks {
            copy(block, done as i64, before, count)?;
            before += block.len as i64;
        }
        done += count;
    }
    Ok(())
}

/// Copies iterations of equal blocks at equal distances: a row for each block, as long as the first cache has room for.
#[inline]
fn grid<M: Mover>(all: &Rows, width: u64, mover: &mut M) -> Result<(), M::Error> {
    let tile = (M::TILE / width).max(TILE_ITERATIONS);
    let mut done = 0;
    while done < all.row.count {
        let count = tile.min(all.row.count - done);
        let target = all.row.target + done as i64 * all.row.target_stride;
        let source = all.row.source + done as i64 * all.row.source_stride;
        mover.copy_rows(&Rows { row: Blocks { target, source, count, ..all.row }, ..*all })?;
        done += count;
    }
    Ok(())
}

/// Two leaves whose iterations, so many of the one and so many of the other, have the same number of bytes.
struct Both {
    pieces: [Piece; PIECES_MAX],
    used: usize,
    /// Iterations of each side that belong together.
    to_each: u64,
    from_each: u64,
    /// How many such groups there are; 0 if this is not the way to copy them.
    count: u64,
    bytes: u64,
}

impl Both {
    fn new(target: &Machine<'_>, source: &Machine<'_>, limit: u64) -> Both {
        let (to_width, from_width) = (target.width(), source.width());
        let common = if to_width == from_width { to_width } else { gcd(to_width, from_width) };
        let (to_each, from_each) = (from_width / common, to_width / common);
        let mut both =
            Both { pieces: [Piece::default(); PIECES_MAX], used: 0, to_each, from_each, count: 0, bytes: 0 };
        let blocks = |each: u64, machine: &Machine<'_>| each.saturating_mul(machine.blocks().len() as u64);
        if blocks(to_each, target).saturating_add(blocks(from_each, source)) > PIECES_MAX as u64 {
            return both;
        }
        both.bytes = to_each * to_width;
        both.count = (target.left() / to_each).min(source.left() / from_each).min(limit / both.bytes);
        if both.count > 0 {
            both.divide(target, source);
        }
        both
    }

    /// Divides what belongs together into pieces.
    fn divide(&mut self, target: &Machine<'_>, source: &Machine<'_>) {
        let mut to = Walk::new(target);
        let mut from = Walk::new(source);
        let mut left = self.bytes;
        while left > 0 {
            let len = to.rest().min(from.rest());
            self.pieces[self.used] = Piece { target: to.place(), source: from.place(), len };
            self.used += 1;
            to.pass(len);
            from.pass(len);
            left -= len;
        }
    }

    fn is_simple(&self) -> bool {
        self.used == 1
    }

    fn copy<M: Mover>(
        &self,
        target: &mut Machine<'_>,
        source: &mut Machine<'_>,
        mover: &mut M,
    ) -> Result<u64, M::Error> {
        let target_stride = target.stride() * self.to_each as i64;
        let source_stride = source.stride() * self.from_each as i64;
        let tile = if self.used == 1 { self.count } else { (M::TILE / self.bytes).max(TILE_ITERATIONS) };
        let mut done = 0;
        while done < self.count {
            let count = tile.min(self.count - done);
            for piece in &self.pieces[..self.used] {
                mover.copy(&Blocks {
                    target: piece.target + done as i64 * target_stride,
                    target_stride,
                    source: piece.source + done as i64 * source_stride,
                    source_stride,
                    len: piece.len,
                    count,
                })?;
            }
            done += count;
        }
        target.pass_iterations(self.count * self.to_each);
        source.pass_iterations(self.count * self.from_each);
        Ok(self.count * self.bytes)
    }
}

/// Goes through the blocks of a leaf without moving its machine.
struct Walk<'p> {
    blocks: &'p [Block],
    base: i64,
    stride: i64,
    block: usize,
    within: u64,
}

impl<'p> Walk<'p> {
    fn new(machine: &Machine<'p>) -> Self {
        let (blocks, base, stride) = (machine.blocks(), machine.base(), machine.stride());
        Walk { blocks, base, stride, block: 0, within: 0 }
    }

    fn rest(&self) -> u64 {
        self.blocks[self.block].len - self.within
    }

    fn place(&self) -> i64 {
        self.base + self.blocks[self.block].offset + self.within as i64
    }

    fn pass(&mut self, bytes: u64) {
        self.within += bytes;
        if self.within == self.blocks[self.block].len {
            (self.block, self.within) = (self.block + 1, 0);
            if self.block == self.blocks.len() {
                (self.block, self.base) = (0, self.base + self.stride);
            }
        }
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
