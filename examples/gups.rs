//! Random access: every rank updates words all over a table that is spread over all ranks, by remote atomics.
//!
//! It is the benchmark that counts giga-updates per second (GUPS), but exact: an atomic update is never lost. Each update
//! turns bits of a word around, so that doing all of them again must give the first table back.

mod common;

use clap::Parser;
use common::{Result, share};
use posthaste::{Rank, Reduce, Window, WordUpdate};
use std::ops::Range;
use std::time::Instant;

/// Updates random words of a distributed table by remote atomics, checks the table and tells the rate.
#[derive(Parser)]
#[command(name = "gups")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Words of the table on each rank, as a power of two
    #[arg(long, value_name = "EXPONENT", default_value_t = 18, value_parser = clap::value_parser!(u32).range(0..=26))]
    table: u32,
    /// Updates by all ranks together, for each word of the table
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    updates: u32,
}

fn main() -> std::process::ExitCode {
    common::run(update)
}

#[tokio::main(flavor = "current_thread")]
async fn update(arguments: Arguments) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    let (me, n) = (job.rank(), job.size());
    let words = 1 << arguments.table;
    let table = job.shmalloc::<u64>(words).await?;
    let first: Vec<u64> = (0..words as u64).map(|at| at + me.index() as u64 * words as u64).collect();
    table.store_slice(0, &first)?;
    let all = words * n * arguments.updates as usize;
    let own = share(all, n, me.index());

    job.barrier().await?;
    let start = Instant::now();
    run(&table, n, own.clone()).await?;
    job.barrier().await?; // each awaited its own updates, so all are done
    let seconds = start.elapsed().as_secs_f64();
    let changed = table.to_vec();
    job.barrier().await?;

    // What one process alone makes of this rank's part, and what is left after the same updates once more.
    let mut alone = first.clone();
    for (rank, at, bits) in (0..all).map(|number| target(number, n, words)) {
        if rank == me {
            alone[at] ^= bits;
        }
    }
    run(&table, n, own).await?;
    job.barrier().await?;
    let wrong = [changed.iter().zip(&alone), table.to_vec().iter().zip(&first)]
        .map(|pairs| pairs.filter(|(there, expected)| there != expected).count() as u64);
    let wrong = job.world().all_reduce(&wrong, &Reduce::sum()).await?;
    if wrong != [0, 0] {
        return Err(format!("{} words are wrong, and {} after doing all twice", wrong[0], wrong[1]).into());
    }
    if me == Rank(0) {
        common::say!("{words} words on each of {n} ranks: {:.4} GUPS", all as f64 / seconds / 1e9);
        common::say!("{all} updates: every word is right, and doing all twice gives the first table back");
    }
    Ok(job.leave().await?)
}

/// Does the updates of these numbers.
async fn run(table: &Window<u64>, ranks: usize, numbers: Range<usize>) -> Result<()> {
    let words = table.len(Rank(0));
    let updates = numbers.map(|number| target(number, ranks, words));
    Ok(table.update_each(WordUpdate::Xor, updates).await?)
}

/// The word that an update changes, and the bits that it turns around: anything without a pattern (splitmix64).
fn target(number: usize, ranks: usize, words: usize) -> (Rank, usize, u64) {
    let mut bits = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (Rank((bits >> 32) as u32 % ranks as u32), bits as usize % words, bits)
}
