//! What crosses between nodes.

use crate::support::{case, options, run, soon, until};
use posthaste::{Algorithm, Group, Rank, Reduce};
use std::collections::HashSet;

/// Connections over TCP that this process has: there is one per pair of ranks that talk over sockets, made when they first do.
fn connections() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let own: HashSet<String> = links
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(std::fs::read_to_string);
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    lines
        .filter(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // Established, and of this process.
            fields[3] == "01" && own.contains(fields[9])
        })
        .count()
}

/// Everything that is done in two levels, from the first rank of the group.
async fn all_kinds(group: &Group) {
    let (me, size) = (group.rank() as u64, group.size());
    let sum = Reduce::sum();
    let total = (0..size as u64).sum::<u64>();
    group.barrier().await.unwrap();
    assert_eq!(group.broadcast(0, &[me + 7]).await.unwrap(), [7]);
    assert_eq!(group.reduce(0, &[me], &sum).await.unwrap(), (me == 0).then(|| vec![total]));
    assert_eq!(group.all_reduce(&[me], &sum).await.unwrap(), [total]);
    let everybody: Vec<u64> = (0..size as u64).collect();
    assert_eq!(group.gather(0, &[me]).await.unwrap(), (me == 0).then(|| everybody.clone()));
    assert_eq!(group.all_gather(&[me]).await.unwrap(), everybody);
    let given = if me == 0 { everybody.clone() } else { Vec::new() };
    assert_eq!(group.scatter(0, &given, 1).await.unwrap(), [me]);
    assert_eq!(group.reduce_scatter(&everybody, &sum).await.unwrap(), [me * size as u64]);
}

case!(m_d22_in_two_levels_only_leaders_talk_to_other_nodes);
fn m_d22_in_two_levels_only_leaders_talk_to_other_nodes() {
    run(6, options(), async |job| {
        let nodes = job.messager().sysdep().personality().nodes.clone();
        let me = job.rank();
        let leads = nodes.iter().position(|node| *node == nodes[me.index()]) == Some(me.index());
        let elsewhere = |rank: &Rank| nodes[rank.index()] != nodes[me.index()];
        let others = job.ranks().filter(elsewhere).count();
        assert!(others == 3, "{nodes:?}");
        let before = connections();
        let world = job.world();
        let levels = world.schedule(Algorithm::TwoLevel);
        for _ in 0..3 {
            // Short operations of ranks that share nodes are done so without being asked.
            for group in [&levels, &world] {
                soon("all kinds", all_kinds(group)).await;
            }
        }
        // Two who dial each other at once have two connections until they have agreed on one.
        let expected = before + usize::from(leads);
        until("one leader talks to the other", || connections() == expected).await;
        // Nobody who does otherwise comes before all have counted.
        soon("a barrier", levels.barrier()).await.unwrap();
        let all = world.schedule(Algorithm::Pairwise).barrier();
        soon("a barrier of everybody with everybody", all).await.unwrap();
        until("everybody talks to everybody", || connections() == before + others).await;
        soon("a barrier", levels.barrier()).await.unwrap();
    });
}
