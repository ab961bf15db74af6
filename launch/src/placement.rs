//! Which rank is on which node, and which of them this launcher starts.

use crate::env::MAX_RANKS;
use crate::key::{JobId, JobKey};

/// One node's part of a job that somebody else describes; see [`Launch::part`](crate::Launch::part).
#[derive(Debug, Clone)]
pub struct Part {
    /// The job's identity.
    pub job: JobId,
    /// The job's secret.
    pub key: JobKey,
    /// The node of each rank of the job.
    pub nodes: Vec<u32>,
    /// The node whose ranks are to be started.
    pub node: u32,
    /// Where the ranks of the job meet, as `host:port`.
    pub rendezvous: String,
}

/// Ranks and their nodes.
#[derive(Debug)]
pub(crate) struct Placement {
    nodes: Vec<u32>,
    /// The only node to start, where others start the others.
    part: Option<u32>,
    started: Vec<u32>,
}

impl Placement {
    /// Ranks in blocks over so many nodes, as even as can be, the longer blocks first.
    pub(crate) fn blocks(ranks: u32, nodes: u32) -> Result<Self, String> {
        if !(1..=ranks).contains(&nodes) {
            return Err(format!("{ranks} ranks can be spread over 1 to {ranks} nodes, not over {nodes}"));
        }
        let (each, longer) = (ranks / nodes, ranks % nodes);
        let count = |node| each + u32::from(node < longer);
        let nodes = (0..nodes).flat_map(|node| (0..count(node)).map(move |_| node)).collect();
        Ok(Self { nodes, part: None, started: (0..ranks).collect() })
    }

    /// The ranks of a part.
    pub(crate) fn of_part(part: &Part) -> Result<Self, String> {
        if let Some(node) = part.nodes.iter().find(|node| **node >= MAX_RANKS) {
            return Err(format!("node {node} is out of range: nodes have numbers below {MAX_RANKS}"));
        }
        let here = |rank: &u32| part.nodes[*rank as usize] == part.node;
        let started: Vec<u32> = (0..part.nodes.len() as u32).filter(here).collect();
        if started.is_empty() {
            return Err(format!("no rank is on node {}", part.node));
        }
        Ok(Self { nodes: part.nodes.clone(), part: Some(part.node), started })
    }

    /// The node of each rank.
    pub(crate) fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// Whether the job has ranks on more than one node.
    pub(crate) fn has_many_nodes(&self) -> bool {
        self.nodes.windows(2).any(|pair| pair[0] != pair[1])
    }

    /// Whether others start some of the ranks.
    pub(crate) fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The ranks to start, in ascending order.
    pub(crate) fn started(&self) -> &[u32] {
        &self.started
    }

    /// Whether a rank is to be started here.
    pub(crate) fn starts(&self, rank: u32) -> bool {
        self.started.binary_search(&rank).is_ok()
    }

    /// A rank's place among those that are started here.
    pub(crate) fn index(&self, rank: u32) -> usize {
        self.started.binary_search(&rank).unwrap_or_default()
    }

    /// The nodes to start, and how many ranks each has.
    pub(crate) fn counts(&self) -> Vec<(u32, u32)> {
        let mut counts = std::collections::BTreeMap::new();
        for rank in &self.started {
            *counts.entry(self.nodes[*rank as usize]).or_insert(0) += 1;
        }
        counts.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_even_and_in_order() {
        let nodes = |ranks, nodes| Placement::blocks(ranks, nodes).unwrap().nodes;
        assert_eq!(nodes(4, 2), [0, 0, 1, 1]);
        assert_eq!(nodes(5, 3), [0, 0, 1, 1, 2]);
        assert_eq!(nodes(3, 3), [0, 1, 2]);
        assert_eq!(Placement::blocks(5, 2).unwrap().counts(), [(0, 3), (1, 2)]);
        for wrong in [0, 4] {
            assert!(Placement::blocks(3, wrong).is_err());
        }
    }

    #[test]
    fn a_part_is_one_nodes_ranks() {
        let part = |node| Part {
            job: JobId::from_bytes([1; 16]),
            key: JobKey::from_bytes([2; 32]),
            nodes: vec![5, 7, 5, 7, 7],
            node,
            rendezvous: "host:1".into(),
        };
        let placement = Placement::of_part(&part(7)).unwrap();
        assert_eq!(placement.started(), [1, 3, 4]);
        assert_eq!((placement.counts(), placement.index(4)), (vec![(7, 3)], 2));
        assert!(placement.has_many_nodes() && placement.is_part() && !placement.starts(2));
        assert!(Placement::of_part(&part(6)).is_err());
    }
}
