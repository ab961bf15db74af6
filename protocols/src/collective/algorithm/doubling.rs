//! Partners at doubling distances.

use super::super::schedule::{Action, Blocks, Kind, Place, Program, Route};
use super::blocks_of;

/// A power of two of positions, onto which the ranks of any size are folded: of the first `2 * surplus` ranks, each odd
/// one is represented by its left neighbour.
pub(super) struct Fold {
    /// A power of two.
    pub positions: usize,
    surplus: usize,
}

impl Fold {
    pub fn new(size: usize) -> Self {
        let positions = 1 << size.ilog2();
        Self { positions, surplus: size - positions }
    }

    /// The first rank that a position stands for. Positions stand for ranks in order.
    pub fn rank(&self, position: usize) -> usize {
        position + position.min(self.surplus)
    }

    /// The position of a rank; `None` if its left neighbour stands for it.
    fn position(&self, rank: usize) -> Option<usize> {
        match rank < 2 * self.surplus {
            true if rank.is_multiple_of(2) => Some(rank / 2),
            true => None,
            false => Some(rank - self.surplus),
        }
    }

    /// The rank that stands in front of this one, or that this one stands in front of.
    fn partner(&self, rank: usize) -> Option<usize> {
        (rank < 2 * self.surplus).then_some(rank ^ 1)
    }
}

/// Recursive doubling over `members`, of which this rank is `me`; returns the phases it takes. What is exchanged are all
/// `blocks`, which are combined.
pub(super) fn all_reduce(
    route: &mut Route,
    first: usize,
    members: &[usize],
    me: usize,
    blocks: usize,
) -> usize {
    let fold = Fold::new(members.len());
    let rounds = fold.positions.trailing_zeros() as usize;
    let all = || Blocks::run(0, blocks);
    let Some(position) = fold.position(me) else {
        let partner = members[me ^ 1];
        route.send(first, partner, all());
        route.receive(first + rounds + 1, partner, all(), Action::Store);
        return rounds + 2;
    };
    if let Some(partner) = fold.partner(me) {
        route.receive(first, members[partner], all(), Action::Append);
        route.send(first + rounds + 1, members[partner], all());
    }
    for round in 0..rounds {
        let other = position ^ (1 << round);
        let partner = members[fold.rank(other)];
        let action = if other < position { Action::Prepend } else { Action::Append };
        route.send(first + 1 + round, partner, all());
        route.receive(first + 1 + round, partner, all(), action);
    }
    rounds + 2
}

fn all_gather(route: &mut Route, place: &Place<'_>) {
    let Place { rank, size, .. } = *place;
    let fold = Fold::new(size);
    let rounds = fold.positions.trailing_zeros() as usize;
    let Some(position) = fold.position(rank) else {
        route.send(0, rank - 1, Blocks::one(rank));
        route.receive(rounds + 1, rank - 1, Blocks::run(0, size), Action::Store);
        return;
    };
    if let Some(partner) = fold.partner(rank) {
        route.receive(0, partner, Blocks::one(partner), Action::Store);
        route.send(rounds + 1, partner, Blocks::run(0, size));
    }
    // What a group of positions has together before the round in which its width is `width`.
    let held = |position: usize, width: usize| {
        let start = fold.rank(position / width * width);
        let end = match position / width * width + width {
            end if end >= fold.positions => size,
            end => fold.rank(end),
        };
        Blocks::run(start, end - start)
    };
    for round in 0..rounds {
        let width = 1 << round;
        let other = position ^ width;
        route.send(1 + round, fold.rank(other), held(position, width));
        route.receive(1 + round, fold.rank(other), held(other, width), Action::Store);
    }
}

/// Recursive doubling.
pub(super) fn recursive(kind: Kind, place: &Place<'_>) -> Option<Program> {
    let mut route = Route::default();
    match kind {
        Kind::Barrier | Kind::AllReduce => {
            let members: Vec<usize> = (0..place.size).collect();
            all_reduce(&mut route, 0, &members, place.rank, 1);
        }
        Kind::AllGather => all_gather(&mut route, place),
        _ => return None,
    }
    Some(Program::new(blocks_of(kind, place.size), route))
}

/// A barrier over `members`, of which this rank is `me`; returns the phases it takes.
pub(super) fn barrier(route: &mut Route, first: usize, members: &[usize], me: usize) -> usize {
    let size = members.len();
    let (mut phase, mut distance) = (first, 1);
    while distance < size {
        route.send(phase, members[(me + distance) % size], Blocks::one(0));
        let from = members[(me + size - distance) % size];
        route.receive(phase, from, Blocks::one(0), Action::Append);
        (phase, distance) = (phase + 1, distance * 2);
    }
    phase - first
}

/// Dissemination.
pub(super) fn dissemination(kind: Kind, place: &Place<'_>) -> Option<Program> {
    let Place { rank, size, .. } = *place;
    let mut route = Route::default();
    match kind {
        Kind::Barrier => {
            let members: Vec<usize> = (0..size).collect();
            barrier(&mut route, 0, &members, rank);
        }
        Kind::AllGather => {
            let (mut phase, mut distance) = (0, 1);
            while distance < size {
                let count = distance.min(size - distance);
                let (to, from) = ((rank + size - distance) % size, (rank + distance) % size);
                route.send(phase, to, Blocks::wrapped(rank, count, size));
                route.receive(phase, from, Blocks::wrapped(from, count, size), Action::Store);
                (phase, distance) = (phase + 1, distance * 2);
            }
        }
        _ => return None,
    }
    Some(Program::new(blocks_of(kind, size), route))
}
