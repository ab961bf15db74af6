//! Data-parallel training: a linear model is fitted to a CSV file by stochastic gradient descent.
//!
//! Each rank owns some of the rows. At every step each computes the gradient over a few of its own, all add theirs up
//! with an allreduce that is recorded once, and take the same step. The data that comes along is `power = 2 speed - 3 load + 0.5 wind + 1`,
//! and some noise.

#[path = "../common/mod.rs"]
mod common;
mod model;

use clap::Parser;
use common::Result;
use model::{Descent, Table, least_squares};
use posthaste::{Rank, Reduce};
use std::path::PathBuf;
use std::time::Instant;

/// Fits a linear model to a CSV file on several ranks, and checks it against a sequential fit.
#[derive(Parser)]
#[command(name = "allreduce_sgd")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// The data: a line of names, then lines of numbers, of which the last is to be predicted
    #[arg(long, value_name = "FILE", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/allreduce_sgd/data.csv"))]
    csv: PathBuf,
    /// Steps of the descent
    #[arg(long, value_name = "STEPS", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Rows that each rank looks at in a step
    #[arg(long, value_name = "ROWS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
}

fn main() -> std::process::ExitCode {
    common::run(|arguments: Arguments| {
        let table = Table::read(&arguments.csv)?; // an unreadable file is told once, before any rank is started
        fit(arguments, table)
    })
}

#[tokio::main(flavor = "current_thread")]
async fn fit(arguments: Arguments, table: Table) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    let (me, ranks, world) = (job.rank().index(), job.size(), job.world());
    if ranks > table.rows.len() {
        return Err(format!("{ranks} ranks cannot share {} rows", table.rows.len()).into());
    }
    let mut total = job.persistent().all_reduce::<f64>(&world, table.names.len(), &Reduce::sum()).await?;

    job.barrier().await?;
    let start = Instant::now();
    let mut descent = Descent::new(&table, ranks, arguments.batch);
    for step in 0..arguments.steps {
        let mut gradient = descent.gradient(step, me);
        total.run(&mut gradient).await?;
        descent.advance(step, &gradient);
    }
    let time = start.elapsed();

    // The same once more, by calls of an allreduce that is not recorded.
    job.barrier().await?;
    let start = Instant::now();
    let mut called = Descent::new(&table, ranks, arguments.batch);
    for step in 0..arguments.steps {
        let gradient = called.gradient(step, me);
        called.advance(step, &world.all_reduce(&gradient, &Reduce::sum()).await?);
    }
    let called_time = start.elapsed();

    // All ranks have the same weights, to the last bit.
    let both = descent.weights.iter().chain(&called.weights);
    let bits: Vec<u64> = both.map(|weight| weight.to_bits()).collect();
    let all = world.all_gather(&bits).await?;
    if all.chunks(bits.len()).any(|others| *others != bits) {
        return Err("the ranks do not have the same weights".into());
    }
    if job.rank() == Rank(0) {
        let [us, called_us] =
            [time, called_time].map(|time| time.as_secs_f64() * 1e6 / arguments.steps as f64);
        common::say!(
            "{} rows, {ranks} ranks: {us:.1} us a step; {called_us:.1} us by calls",
            table.rows.len()
        );
        let best = least_squares(&table.rows);
        common::say!("{:>12} {:>10} {:>14}", "", "weight", "least squares");
        for (name, (weight, best)) in table.names.iter().zip(descent.weights.iter().zip(&best)) {
            common::say!("{name:>12} {weight:>10.4} {best:>14.4}");
        }
        let alone = sequential(&table, ranks, &arguments);
        if !close(&descent.weights, &alone, 1e-9) || !close(&called.weights, &alone, 1e-9) {
            return Err("the weights are not those of the sequential run".into());
        }
        if !close(&descent.weights, &best, 0.02) {
            return Err("the descent has not converged: raise --steps".into());
        }
        common::say!("{} steps: converged, the weights are those of the sequential run", arguments.steps);
    }
    Ok(job.leave().await?)
}

/// Whether all weights differ by less than `by`, of weights above 1 in proportion.
fn close(left: &[f64], right: &[f64], by: f64) -> bool {
    left.iter().zip(right).all(|(a, b)| (a - b).abs() < by * b.abs().max(1.0))
}

/// The same descent in one process.
fn sequential(table: &Table, ranks: usize, arguments: &Arguments) -> Vec<f64> {
    let mut descent = Descent::new(table, ranks, arguments.batch);
    for step in 0..arguments.steps {
        let mut total = vec![0.0; descent.weights.len()];
        for rank in 0..ranks {
            let gradient = descent.gradient(step, rank);
            total.iter_mut().zip(gradient).for_each(|(sum, slope)| *sum += slope);
        }
        descent.advance(step, &total);
    }
    descent.weights
}
