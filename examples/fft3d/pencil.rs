//! Who owns which part of the cube.

use crate::common::share;
use std::ops::Range;

/// Rows and columns of the grid of ranks, as square as can be.
pub fn grid(ranks: usize) -> [usize; 2] {
    let rows =
        (1..=ranks).filter(|rows| ranks.is_multiple_of(*rows) && rows * rows <= ranks).max().unwrap_or(1);
    [rows, ranks / rows]
}

/// Part of the cube that a rank owns: what it has of each axis, x, y and z, and the axes from the slowest to the fastest
/// in memory.
#[derive(Clone)]
pub struct Pencil {
    part: [Range<usize>; 3],
    order: [usize; 3],
}

impl Pencil {
    /// With all of `whole`; of the first other axis the share of the grid's row, of the second that of its column.
    pub fn new(size: usize, ranks: usize, rank: usize, [by_row, by_column, whole]: [usize; 3]) -> Pencil {
        let [rows, columns] = grid(ranks);
        let mut part = [0..size, 0..size, 0..size];
        part[by_row] = share(size, rows, rank / columns);
        part[by_column] = share(size, columns, rank % columns);
        Pencil { part, order: [by_row, by_column, whole] }
    }

    pub fn len(&self) -> usize {
        points(&self.part)
    }

    /// The coordinates of its points, in the order of memory.
    pub fn coordinates(&self) -> impl Iterator<Item = [usize; 3]> {
        let [a, b, c] = self.order;
        let [outer, middle, inner] = self.order.map(|axis| self.part[axis].clone());
        outer.flat_map(move |i| {
            let inner = inner.clone();
            middle.clone().flat_map(move |j| {
                inner.clone().map(move |k| {
                    let mut at = [0; 3];
                    (at[a], at[b], at[c]) = (i, j, k);
                    at
                })
            })
        })
    }

    /// What it has in common with another one.
    pub fn common(&self, other: &Pencil) -> [Range<usize>; 3] {
        [0, 1, 2].map(|axis| {
            let (a, b) = (&self.part[axis], &other.part[axis]);
            let start = a.start.max(b.start);
            start..a.end.min(b.end).max(start)
        })
    }

    /// Where the points of a part of it lie, in an order that does not depend on the pencil.
    pub fn places(&self, part: &[Range<usize>; 3]) -> impl Iterator<Item = usize> + use<> {
        let (mut stride, mut steps, mut first) = ([0; 3], 1, 0);
        for axis in self.order.into_iter().rev() {
            stride[axis] = steps;
            steps *= self.part[axis].len();
            first += stride[axis] * part[axis].start.saturating_sub(self.part[axis].start);
        }
        let [x, y, z] = [0, 1, 2].map(|axis| (0..part[axis].len()).map(move |at| at * stride[axis]));
        x.flat_map(move |x| {
            let z = z.clone();
            y.clone().flat_map(move |y| z.clone().map(move |z| first + x + y + z))
        })
    }
}

/// How many points a part has.
pub fn points(part: &[Range<usize>; 3]) -> usize {
    part.iter().map(Range::len).product()
}
