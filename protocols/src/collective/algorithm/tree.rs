//! Binomial trees, over all ranks of a group or a team of them.
//!
//! A member's number within the team, counted from the root, tells its place: the lowest bit that is set is the distance
//! to its parent, and what it stands for are the members from itself up to that distance.

use super::super::schedule::{Action, Blocks, Kind, Place, Program, Route};
use super::blocks_of;

/// Some ranks of a group that form a tree of their own.
pub(super) struct Team<'t> {
    /// The ranks, as the group counts.
    pub members: &'t [usize],
    /// This rank among them.
    pub me: usize,
    /// The root among them.
    pub root: usize,
}

/// Phases of a tree over so many members.
pub(super) fn depth(size: usize) -> usize {
    size.next_power_of_two().trailing_zeros() as usize
}

impl Team<'_> {
    /// The number of this rank, counted from the root.
    fn own(&self) -> usize {
        (self.me + self.members.len() - self.root) % self.members.len()
    }

    /// The rank with a number that is counted from the root.
    fn rank(&self, number: usize) -> usize {
        self.members[(self.root + number) % self.members.len()]
    }

    /// The ranks that the one with that number stands for, if it is `span` away from its parent.
    fn branch(&self, number: usize, span: usize) -> impl Iterator<Item = usize> + '_ {
        (number..(number + span).min(self.members.len())).map(|number| self.rank(number))
    }

    /// From the leaves to the root, in phases from `first` on. `blocks`: what those ranks have to send.
    pub fn up(
        &self,
        route: &mut Route,
        first: usize,
        action: Action,
        blocks: impl Fn(&mut dyn Iterator<Item = usize>) -> Blocks,
    ) {
        let own = self.own();
        for phase in 0..depth(self.members.len()) {
            let span = 1 << phase;
            if own % (2 * span) == span {
                let blocks = blocks(&mut self.branch(own, span));
                route.send(first + phase, self.rank(own - span), blocks);
                return;
            }
            let child = own + span;
            if child < self.members.len() {
                let blocks = blocks(&mut self.branch(child, span));
                route.receive(first + phase, self.rank(child), blocks, action);
            }
        }
    }

    /// From the root to the leaves, in phases from `first` on. `blocks`: what those ranks are to get.
    pub fn down(
        &self,
        route: &mut Route,
        first: usize,
        action: Action,
        blocks: impl Fn(&mut dyn Iterator<Item = usize>) -> Blocks,
    ) {
        let own = self.own();
        let depth = depth(self.members.len());
        for phase in 0..depth {
            let span = 1 << (depth - 1 - phase);
            if own % (2 * span) == span {
                let blocks = blocks(&mut self.branch(own, span));
                route.receive(first + phase, self.rank(own - span), blocks, action);
            } else if own.is_multiple_of(2 * span) && own + span < self.members.len() {
                let child = own + span;
                let blocks = blocks(&mut self.branch(child, span));
                route.send(first + phase, self.rank(child), blocks);
            }
        }
    }
}

/// Every message has all the blocks.
pub(super) fn all_of(blocks: usize) -> impl Fn(&mut dyn Iterator<Item = usize>) -> Blocks {
    move |_| Blocks::run(0, blocks)
}

/// Every message has the blocks of those ranks.
pub(super) fn theirs(ranks: &mut dyn Iterator<Item = usize>) -> Blocks {
    ranks.collect()
}

pub(super) fn program(kind: Kind, place: &Place<'_>) -> Option<Program> {
    let members: Vec<usize> = (0..place.size).collect();
    let team = Team { members: &members, me: place.rank, root: place.root };
    let blocks = blocks_of(kind, place.size);
    let depth = depth(place.size);
    let mut route = Route::default();
    match kind {
        Kind::Broadcast => team.down(&mut route, 0, Action::Store, all_of(blocks)),
        Kind::Reduce => team.up(&mut route, 0, Action::Append, all_of(blocks)),
        Kind::Gather => team.up(&mut route, 0, Action::Store, theirs),
        Kind::Scatter => team.down(&mut route, 0, Action::Store, theirs),
        Kind::Barrier | Kind::AllReduce => {
            team.up(&mut route, 0, Action::Append, all_of(blocks));
            team.down(&mut route, depth, Action::Store, all_of(blocks));
        }
        Kind::AllGather => {
            team.up(&mut route, 0, Action::Store, theirs);
            team.down(&mut route, depth, Action::Store, all_of(blocks));
        }
        Kind::ReduceScatter => {
            team.up(&mut route, 0, Action::Append, all_of(blocks));
            team.down(&mut route, depth, Action::Store, theirs);
        }
        Kind::AllToAll => return None,
    }
    Some(Program::new(blocks, route))
}
