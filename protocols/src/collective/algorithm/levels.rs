//! Two levels: inside each host, and between one leader per host.

use super::super::schedule::{Action, Blocks, Kind, Place, Program, Route};
use super::tree::{Team, all_of, depth, theirs};
use super::{blocks_of, doubling};

/// The hosts of a group. The first of a host's ranks leads it, but where the root is, the root does.
struct Hosts {
    /// The ranks of each host.
    members: Vec<Vec<usize>>,
    leaders: Vec<usize>,
    /// The host of this rank.
    mine: usize,
    /// The host of the root.
    roots: usize,
}

impl Hosts {
    fn new(place: &Place<'_>) -> Self {
        let node = |rank: usize| place.nodes.get(rank).copied().unwrap_or(0);
        let mut numbers: Vec<u32> = Vec::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        for rank in 0..place.size {
            match numbers.iter().position(|number| *number == node(rank)) {
                Some(host) => members[host].push(rank),
                None => {
                    numbers.push(node(rank));
                    members.push(vec![rank]);
                }
            }
        }
        let host_of = |rank| numbers.iter().position(|number| *number == node(rank)).unwrap_or(0);
        let (mine, roots) = (host_of(place.rank), host_of(place.root));
        let leaders = members
            .iter()
            .enumerate()
            .map(|(host, ranks)| if host == roots { place.root } else { ranks[0] })
            .collect();
        Self { members, leaders, mine, roots }
    }

    fn local(&self, rank: usize) -> Team<'_> {
        let members = &self.members[self.mine];
        let at = |wanted| members.iter().position(|rank| *rank == wanted).unwrap_or(0);
        Team { members, me: at(rank), root: at(self.leaders[self.mine]) }
    }

    /// The leaders, if this rank is one.
    fn leading(&self, rank: usize) -> Option<Team<'_>> {
        let leads = self.leaders[self.mine] == rank;
        leads.then_some(Team { members: &self.leaders, me: self.mine, root: self.roots })
    }

    /// Phases of a tree inside any host.
    fn local_depth(&self) -> usize {
        self.members.iter().map(|ranks| depth(ranks.len())).max().unwrap_or(0)
    }

    /// All blocks of the hosts that these ranks lead.
    fn blocks_of_hosts(&self, leaders: &mut dyn Iterator<Item = usize>) -> Blocks {
        let host = |leader| self.leaders.iter().position(|other| *other == leader);
        leaders.filter_map(host).flat_map(|host| self.members[host].iter().copied()).collect()
    }
}

pub(super) fn program(kind: Kind, place: &Place<'_>) -> Option<Program> {
    let hosts = Hosts::new(place);
    let rank = place.rank;
    let (local, leading) = (hosts.local(rank), hosts.leading(rank));
    let blocks = blocks_of(kind, place.size);
    let mut route = Route::default();
    let (inside, between) = (hosts.local_depth(), depth(hosts.leaders.len()));
    let wide = |ranks: &mut dyn Iterator<Item = usize>| hosts.blocks_of_hosts(ranks);
    match kind {
        Kind::Broadcast => {
            if let Some(leaders) = &leading {
                leaders.down(&mut route, 0, Action::Store, all_of(blocks));
            }
            local.down(&mut route, between, Action::Store, all_of(blocks));
        }
        Kind::Reduce => {
            local.up(&mut route, 0, Action::Append, all_of(blocks));
            if let Some(leaders) = &leading {
                leaders.up(&mut route, inside, Action::Append, all_of(blocks));
            }
        }
        Kind::Gather => {
            local.up(&mut route, 0, Action::Store, theirs);
            if let Some(leaders) = &leading {
                leaders.up(&mut route, inside, Action::Store, wide);
            }
        }
        Kind::Scatter => {
            if let Some(leaders) = &leading {
                leaders.down(&mut route, 0, Action::Store, wide);
            }
            local.down(&mut route, between, Action::Store, theirs);
        }
        Kind::Barrier | Kind::AllReduce => {
            local.up(&mut route, 0, Action::Append, all_of(blocks));
            let mut middle = between + 2;
            if let Some(leaders) = &leading {
                middle = match kind {
                    Kind::Barrier => doubling::barrier(&mut route, inside, leaders.members, leaders.me),
                    _ => doubling::all_reduce(&mut route, inside, leaders.members, leaders.me, blocks),
                };
            }
            debug_assert!(middle <= between + 2);
            local.down(&mut route, inside + between + 2, Action::Store, all_of(blocks));
        }
        Kind::AllGather => {
            local.up(&mut route, 0, Action::Store, theirs);
            if let Some(leaders) = &leading {
                for other in leaders.members.iter().copied().filter(|other| *other != rank) {
                    route.send(inside, other, wide(&mut std::iter::once(rank)));
                    let blocks = wide(&mut std::iter::once(other));
                    route.receive(inside, other, blocks, Action::Store);
                }
            }
            local.down(&mut route, inside + 1, Action::Store, all_of(blocks));
        }
        Kind::ReduceScatter => {
            local.up(&mut route, 0, Action::Append, all_of(blocks));
            if let Some(leaders) = &leading {
                leaders.up(&mut route, inside, Action::Append, all_of(blocks));
                leaders.down(&mut route, inside + between, Action::Store, wide);
            }
            local.down(&mut route, inside + 2 * between, Action::Store, theirs);
        }
        Kind::AllToAll => return None,
    }
    Some(Program::new(blocks, route))
}
