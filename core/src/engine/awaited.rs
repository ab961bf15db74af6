//! Whom the tasks of a context wait for.

use super::Scope;
use crate::ids::{Endpoint, Rank};

impl Scope<'_> {
    /// Tells of each operation that somebody awaits whose loss would end it, if anybody's would.
    pub fn each_awaited(&self, tell: impl FnMut(Option<Rank>)) {
        self.state.completer.awaited(tell);
    }

    /// The other ranks that something waits for here: operations that somebody awaits, and what waits for room. Where an
    /// operation, or a task that waits on memory, names nobody, all that share memory or that this context had to do with.
    /// Ascending; looks at every completion slot.
    #[must_use]
    pub fn awaited(&self) -> Vec<Rank> {
        let me = self.state.me.rank;
        let mut ranks = vec![false; self.state.shape.ranks as usize];
        let mut all = !self.state.watches.is_empty();
        self.each_awaited(|peer| match peer.and_then(|rank| ranks.get_mut(rank.index())) {
            Some(awaited) => *awaited = true,
            None => all = true,
        });
        for &index in self.state.busy.iter().filter(|&&index| index < self.state.peers.len()) {
            ranks[self.state.shape.endpoint(index).rank.index()] = true;
        }
        // Whoever was never met need not be met for this.
        let is_near = |rank: Rank| {
            let index = self.state.shape.index(Endpoint::new(rank, self.state.me.context));
            self.state.peers[index].is_some() || self.state.routes.of(rank).mappable
        };
        let ranks = (0..).map(Rank).zip(ranks);
        let awaited = |&(rank, awaited): &(Rank, bool)| rank != me && (awaited || (all && is_near(rank)));
        ranks.filter(awaited).map(|(rank, _)| rank).collect()
    }
}
