//! Ranks of one job that are told to use different devices.

use crate::support::{case, options, run, soon};
use posthaste::{Algorithm, Reduce};

case!(fault_a_rank_that_is_to_use_sockets_is_reached_by_them_from_its_own_node_too);
fn fault_a_rank_that_is_to_use_sockets_is_reached_by_them_from_its_own_node_too() {
    let over_sockets = "test $POSTHASTE_RANK != 1 || export POSTHASTE_DEVICE=tcp";
    run(6, options().after_shell_command(over_sockets), async |job| {
        let nodes = job.messager().sysdep().personality().nodes.clone();
        let sharers = |rank: usize| nodes.iter().filter(|node| **node == nodes[rank]).count();
        let counts: Vec<usize> = (0..6).map(sharers).collect();
        assert_eq!(counts, [2, 1, 2, 3, 3, 3], "{nodes:?}");
        let who = job.service("who", {
            let me = job.rank().0;
            move |()| async move { me }
        });
        let who = who.unwrap();
        soon("the barrier", job.barrier()).await.unwrap();
        for to in job.ranks() {
            assert_eq!(soon("the answer", who.call(to, ())).await.unwrap(), to.0);
        }
        // All have the same idea of who shares a node.
        let sum = job.world().schedule(Algorithm::TwoLevel).all_reduce(&[1_u32], &Reduce::sum());
        assert_eq!(soon("the sum", sum).await.unwrap(), [6]);
        // Memory of each is put to by all.
        let window = soon("the window", job.shmalloc::<u32>(6)).await.unwrap();
        for to in job.ranks() {
            let mine = 10 * to.0 + job.rank().0;
            soon("the put", window.put(to, job.rank().index(), mine)).await.unwrap();
        }
        soon("the barrier", job.barrier()).await.unwrap();
        for of in job.ranks() {
            for from in 0..6 {
                let word = soon("the get", window.get(of, from)).await.unwrap();
                assert_eq!(word, 10 * of.0 + from as u32);
            }
        }
        // Who has left is asked no more.
        soon("the end", job.barrier()).await.unwrap();
    });
}
