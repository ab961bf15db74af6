//! What the tests of operations whose parts lie in stages have in common.

use super::near::{Check, Start, wait, warm};
use super::support::{Member, Random, Setup, run};

/// So many operations where one member has no memory left, not even for pieces of the last of the lengths.
pub fn without_memory(lens: &[u64], operations: u64, start: Start) {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let device = member.client.device_for(member.rank).unwrap().clone();
        let mut taken = Vec::new();
        if member.rank.0 == 2 {
            for len in lens {
                while let Ok(allocation) = device.allocate(*len) {
                    taken.push(allocation);
                }
            }
        }
        for number in 0..operations {
            start(&world, number).await;
        }
        taken.into_iter().for_each(|taken| device.free(taken));
    });
}

/// Several at once, awaited the other way round and later by some than by others: whoever is late reads what was laid out for
/// it before the others went on.
pub fn late_readers(turns: u64, numbers: fn(turn: u64) -> Vec<u64>, start: Start, then: fn(&Member)) {
    run(4, Setup::new(), async |member| {
        let world = member.collectives.world();
        warm(&world).await;
        let mut random = Random(7 + u64::from(member.rank.0));
        for turn in 0..turns {
            let mut several: Vec<Check> =
                numbers(turn).into_iter().map(|number| start(&world, number)).collect();
            wait(random.below(60)).await;
            while let Some(next) = several.pop() {
                next.await;
            }
        }
        then(&member);
    });
}
