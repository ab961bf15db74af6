//! A small PGAS library on the public API (`array.rs`), and two programs on top of it: a stencil and a histogram.

mod array;
#[path = "../common/mod.rs"]
mod common;
mod histogram;
mod stencil;

use array::GlobalArray;
use clap::Parser;
use common::Result;
use posthaste::{Job, Rank};
use std::time::Instant;

/// Runs a stencil and a histogram on a distributed array, and checks both against sequential runs.
#[derive(Parser)]
#[command(name = "pgas_array")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Elements of the stencil's arrays
    #[arg(long, value_name = "COUNT", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..))]
    points: u32,
    /// Steps of the stencil
    #[arg(long, value_name = "STEPS", default_value_t = 200)]
    steps: u32,
    /// Numbers that each rank counts in the histogram
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    samples: u32,
}

fn main() -> std::process::ExitCode {
    common::run(programs)
}

#[tokio::main(flavor = "current_thread")]
async fn programs(arguments: Arguments) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    job.barrier().await?;
    first_steps(&job).await?;
    let start = Instant::now();
    let sum = stencil::run(&job, arguments.points as usize, arguments.steps as usize).await?;
    let middle = Instant::now();
    let fullest = histogram::run(&job, arguments.samples as usize).await?;
    if job.rank() == Rank(0) {
        let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        common::say!("stencil: {:.1} ms, the elements add up to {sum:.6}", ms(start, middle));
        common::say!("histogram: {:.1} ms, the fullest bin has {fullest}", ms(middle, Instant::now()));
        common::say!("both are as their sequential runs");
    }
    Ok(job.leave().await?)
}

/// What one does with an array: every rank writes elements that others have, and reads what others wrote.
async fn first_steps(job: &Job) -> Result<()> {
    let square = |index: usize| (index * index) as u64;
    let squares = GlobalArray::<u64>::new(job, 10 * job.size()).await?;
    // The last half of a rank's block and the first half of the next one's; the last rank has a half to write only.
    let start = 10 * job.rank().index() + 5;
    let end = (start + 10).min(squares.len());
    squares.slice(start..end).put(&(start..end).map(square).collect::<Vec<_>>()).await?;
    if end == squares.len() {
        for index in 0..5 {
            squares.put(index, square(index)).await?;
        }
    }
    squares.barrier().await?;
    let [third, half] = [3, 2].map(|parts| squares.len() / parts);
    let part = squares.slice(0..half).slice(third..half).get().await?;
    let same = part.into_iter().eq((third..half).map(square)) && squares.get(half).await? == square(half);
    let largest = squares.reduce(0, Ord::max).await?;
    squares.free().await?;
    if same && largest == square(10 * job.size() - 1) {
        Ok(())
    } else {
        Err("an element is not what was written".into())
    }
}
