//! Rings and chains: everybody talks to two neighbours only.

use super::super::schedule::{Action, Blocks, Kind, Place, Program, Route};
use super::MOST_IN_RING;

/// A ring seen by one of its ranks, forwards or backwards.
struct Ring {
    rank: usize,
    size: usize,
    backwards: bool,
}

impl Ring {
    /// The rank that is so many places further.
    fn after(&self, places: usize) -> usize {
        let places = places % self.size;
        match self.backwards {
            false => (self.rank + places) % self.size,
            true => (self.rank + self.size - places) % self.size,
        }
    }

    /// The rank that is so many places back.
    fn before(&self, places: usize) -> usize {
        self.after(self.size - places % self.size)
    }

    /// How many places this rank is behind another.
    fn behind(&self, other: usize) -> usize {
        match self.backwards {
            false => (self.rank + self.size - other) % self.size,
            true => (other + self.size - self.rank) % self.size,
        }
    }

    /// Each block goes round and is combined on its way until it is with its own rank.
    fn reduce_scatter(&self, route: &mut Route) {
        for phase in 0..self.size - 1 {
            route.send(phase, self.after(1), Blocks::one(self.before(phase + 1)));
            let block = Blocks::one(self.before(phase + 2));
            route.receive(phase, self.before(1), block, Action::Prepend);
        }
    }

    /// Each block goes from its own rank to all others.
    fn all_gather(&self, route: &mut Route, first: usize) {
        for phase in 0..self.size - 1 {
            route.send(first + phase, self.after(1), Blocks::one(self.before(phase)));
            let block = Blocks::one(self.before(phase + 1));
            route.receive(first + phase, self.before(1), block, Action::Store);
        }
    }

    /// From the root along the chain.
    fn broadcast(&self, route: &mut Route, root: usize) {
        let place = self.behind(root);
        if place > 0 {
            route.receive(place - 1, self.before(1), Blocks::one(0), Action::Store);
        }
        if place + 1 < self.size {
            route.send(place, self.after(1), Blocks::one(0));
        }
    }

    /// Along the chain to the root.
    fn reduce(&self, route: &mut Route, root: usize) {
        let place = self.behind(root);
        let last = self.size - 1;
        if place < last {
            route.receive(last - place - 1, self.after(1), Blocks::one(0), Action::Append);
        }
        if place > 0 {
            route.send(last - place, self.before(1), Blocks::one(0));
        }
    }
}

pub(super) fn program(kind: Kind, place: &Place<'_>, both_ways: bool) -> Option<Program> {
    let Place { rank, size, root, .. } = *place;
    if size > MOST_IN_RING {
        return None;
    }
    let route = |backwards| {
        let ring = Ring { rank, size, backwards };
        let mut route = Route::default();
        match kind {
            Kind::Broadcast => ring.broadcast(&mut route, root),
            // Both directions would combine in different orders: one vector, one order.
            Kind::Reduce if !both_ways => ring.reduce(&mut route, root),
            Kind::ReduceScatter => ring.reduce_scatter(&mut route),
            Kind::AllGather => ring.all_gather(&mut route, 0),
            Kind::AllReduce => {
                ring.reduce_scatter(&mut route);
                ring.all_gather(&mut route, size - 1);
            }
            _ => return None,
        }
        Some(route)
    };
    let blocks = if matches!(kind, Kind::Broadcast | Kind::Reduce) { 1 } else { size };
    let mut routes = vec![route(false)?];
    if both_ways {
        routes.push(route(true)?);
    }
    Some(Program { blocks, routes })
}
