//! The transpose of a distributed matrix by typed puts: nobody packs or unpacks anything.
//!
//! Each rank owns some rows of a square matrix and, in a window, as many of its transpose. To every rank it puts a block,
//! described as columns here and as a part of its rows there.

mod common;

use clap::Parser;
use common::{Result, share};
use futures::future::try_join_all;
use posthaste::datatype::{Datatype, Layout};
use posthaste::{Job, Rank, Reduce, Window};
use std::time::Instant;

/// Transposes a distributed matrix by typed puts, checks every element and tells the bandwidth.
#[derive(Parser)]
#[command(name = "transpose")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Rows and columns of the matrix
    #[arg(long, value_name = "ROWS", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=16384))]
    size: u32,
    /// How often to transpose it
    #[arg(long, value_name = "TIMES", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
}

fn main() -> std::process::ExitCode {
    common::run(transpose)
}

#[tokio::main(flavor = "current_thread")]
async fn transpose(arguments: Arguments) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    let n = arguments.size as usize;
    let rows = share(n, job.size(), job.rank().index());
    let transposed = job.shmalloc::<f64>(rows.len() * n).await?;
    let blocks = job.ranks().map(|rank| Block::new(&job, n, rank)).collect::<Result<Vec<_>>>()?;

    let (mut seconds, mut wrong) = (0.0, 0);
    for iteration in 0..arguments.iterations {
        // Another matrix each time, so that an old result is not taken for a new one.
        let value = |row: usize, column: usize| (row * n + column) as f64 + f64::from(iteration) / 1024.0;
        let matrix: Vec<f64> =
            rows.clone().flat_map(|row| (0..n).map(move |column| value(row, column))).collect();
        job.barrier().await?;
        let start = Instant::now();
        try_join_all(blocks.iter().map(|block| block.put(&transposed, &matrix))).await?;
        job.barrier().await?; // each awaited its own puts, so all are there
        seconds += start.elapsed().as_secs_f64();

        let there = transposed.to_vec();
        let expected = rows.clone().flat_map(|column| (0..n).map(move |row| value(row, column)));
        wrong += there.iter().zip(expected).filter(|(there, expected)| *there != expected).count() as u64;
    }

    let wrong = job.world().all_reduce_one(wrong, &Reduce::sum()).await?;
    if wrong > 0 {
        return Err(format!("{wrong} elements are not where they belong").into());
    }
    if job.rank() == Rank(0) {
        let bytes = 8.0 * (n * n) as f64 * f64::from(arguments.iterations);
        common::say!("{n} x {n}, {} ranks: {:.2} GB/s", job.size(), bytes / seconds / 1e9);
        common::say!("{} transposes: every element is where it belongs", arguments.iterations);
    }
    Ok(job.leave().await?)
}

/// What goes from this rank to another one: its rows, of which the other owns some columns.
struct Block {
    to: Rank,
    /// The columns one after the other, and how many, from the first one's place in bytes on.
    column: Datatype,
    columns: u64,
    first: u64,
    /// A rectangle of the rows of the transpose there.
    rectangle: Datatype,
}

impl Block {
    fn new(job: &Job, n: usize, to: Rank) -> Result<Block> {
        let [rows, columns] = [job.rank(), to].map(|rank| share(n, job.size(), rank.index()));
        let [n, height, width] = [n, rows.len(), columns.len()].map(|count| count as u64);
        let number = Datatype::of::<f64>();
        Ok(Block {
            to,
            // The next column begins one number further, and not behind the end of this one.
            column: number.vector(height, 1, n as i64)?.resized(0, 8)?,
            columns: width,
            first: 8 * columns.start as u64,
            rectangle: number.subarray(&[width, n], &[width, height], &[0, rows.start as u64])?,
        })
    }

    async fn put(&self, transposed: &Window<f64>, matrix: &[f64]) -> Result<()> {
        let from = Layout::new(&self.column, self.columns).at(self.first);
        Ok(transposed.put_typed(self.to, &Layout::new(&self.rectangle, 1), matrix, &from).await?)
    }
}
