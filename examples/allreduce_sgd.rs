//! Data-parallel training: a linear model is fitted to a CSV file by stochastic gradient descent.
//!
//! Each rank owns some of the rows. At every step each computes the gradient over a few of its own, all add theirs up
//! with an allreduce, and take the same step. The data that comes along is `power = 2 speed - 3 load + 0.5 wind + 1`,
//! and some noise.

mod common;

use clap::Parser;
use common::{Result, share};
use posthaste::{Rank, Reduce};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Fits a linear model to a CSV file on several ranks, and checks it against a sequential fit.
#[derive(Parser)]
#[command(name = "allreduce_sgd")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// The data: a line of names, then lines of numbers, of which the last is to be predicted
    #[arg(long, value_name = "FILE", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/allreduce_sgd.csv"))]
    csv: PathBuf,
    /// Steps of the descent
    #[arg(long, value_name = "STEPS", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Rows that each rank looks at in a step
    #[arg(long, value_name = "ROWS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
}

/// Of the first step; later ones are shorter.
const RATE: f64 = 0.1;

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
    let mut descent = Descent::new(&table, ranks, arguments.batch);
    let sum = Reduce::sum();

    job.barrier().await?;
    let start = Instant::now();
    for step in 0..arguments.steps {
        let gradient = descent.gradient(step, me);
        let total = world.all_reduce(&gradient, &sum).await?;
        descent.advance(step, &total);
    }
    let time = start.elapsed();

    // All ranks have the same weights, to the last bit.
    let bits: Vec<u64> = descent.weights.iter().map(|weight| weight.to_bits()).collect();
    let all = world.all_gather(&bits).await?;
    if all.chunks(bits.len()).any(|others| *others != bits) {
        return Err("the ranks do not have the same weights".into());
    }
    if job.rank() == Rank(0) {
        let us = time.as_secs_f64() * 1e6 / arguments.steps as f64;
        println!("{} rows, {ranks} ranks: {us:.1} us a step", table.rows.len());
        let best = least_squares(&table.rows);
        println!("{:>12} {:>10} {:>14}", "", "weight", "least squares");
        for (name, (weight, best)) in table.names.iter().zip(descent.weights.iter().zip(&best)) {
            println!("{name:>12} {weight:>10.4} {best:>14.4}");
        }
        let alone = sequential(&table, ranks, &arguments);
        if !close(&descent.weights, &alone, 1e-9) {
            return Err("the weights are not those of the sequential run".into());
        }
        if !close(&descent.weights, &best, 0.02) {
            return Err("the descent has not converged: raise --steps".into());
        }
        println!("{} steps: converged, the weights are those of the sequential run", arguments.steps);
    }
    Ok(job.leave().await?)
}

/// Whether all weights differ by less than `by`, of weights above 1 in proportion.
fn close(left: &[f64], right: &[f64], by: f64) -> bool {
    left.iter().zip(right).all(|(a, b)| (a - b).abs() < by * b.abs().max(1.0))
}

/// The data: in each row the input, a one for the constant term, and the number to be predicted.
struct Table {
    /// Of the weights.
    names: Vec<String>,
    rows: Vec<Vec<f64>>,
}

impl Table {
    fn read(file: &Path) -> Result<Table> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let (_, head) = lines.next().ok_or_else(|| format!("{} is empty", file.display()))?;
        let mut names: Vec<String> = head.split(',').map(|name| name.trim().to_owned()).collect();
        let width = names.len();
        if let Some(last) = names.last_mut() {
            *last = "constant".to_owned();
        }
        let row = |(at, line): (usize, &str)| {
            let row: Vec<f64> = line.split(',').map(|cell| cell.trim().parse().unwrap_or(f64::NAN)).collect();
            if row.len() != width || !row.iter().all(|number| number.is_finite()) {
                return Err(format!("{}, line {}: not {width} numbers", file.display(), at + 1));
            }
            let (input, wanted) = row.split_at(width - 1);
            Ok([input, &[1.0], wanted].concat())
        };
        let rows = lines.map(row).collect::<Result<Vec<_>, String>>()?;
        if rows.is_empty() {
            Err(format!("{} has no rows", file.display()).into())
        } else {
            Ok(Table { names, rows })
        }
    }
}

/// The descent, as every rank sees it.
struct Descent<'t> {
    table: &'t Table,
    ranks: usize,
    batch: u32,
    weights: Vec<f64>,
}

impl<'t> Descent<'t> {
    fn new(table: &'t Table, ranks: usize, batch: u32) -> Self {
        Descent { table, ranks, batch, weights: vec![0.0; table.names.len()] }
    }

    /// The gradient of the mean squared error, over the rows that a rank draws at a step.
    fn gradient(&self, step: u64, rank: usize) -> Vec<f64> {
        let own = &self.table.rows[share(self.table.rows.len(), self.ranks, rank)];
        let mut random = (step << 16) + rank as u64 + 1;
        let mut gradient = vec![0.0; self.weights.len()];
        for _ in 0..self.batch {
            let (input, wanted) =
                own[(next(&mut random) % own.len() as u64) as usize].split_at(self.weights.len());
            let error =
                input.iter().zip(&self.weights).map(|(x, weight)| x * weight).sum::<f64>() - wanted[0];
            gradient.iter_mut().zip(input).for_each(|(sum, x)| *sum += 2.0 * error * x);
        }
        gradient
    }

    /// A step against the sum of all ranks' gradients.
    fn advance(&mut self, step: u64, total: &[f64]) {
        let rows = f64::from(self.batch) * self.ranks as f64;
        let rate = RATE / (1.0 + step as f64 / 500.0) / rows;
        self.weights.iter_mut().zip(total).for_each(|(weight, slope)| *weight -= rate * slope);
    }
}

/// The next number of a row without a pattern (splitmix64).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
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

/// The best weights there are: solves the normal equations by Gauss-Jordan elimination.
fn least_squares(rows: &[Vec<f64>]) -> Vec<f64> {
    let n = rows[0].len() - 1;
    let product = |i: usize, j: usize| rows.iter().map(|row| row[i] * row[j]).sum::<f64>();
    let mut system: Vec<Vec<f64>> = (0..n).map(|i| (0..=n).map(|j| product(i, j)).collect()).collect();
    for at in 0..n {
        let pivot =
            (at..n).max_by(|a, b| system[*a][at].abs().total_cmp(&system[*b][at].abs())).unwrap_or(at);
        system.swap(at, pivot);
        let first: Vec<f64> = system[at].iter().map(|value| value / system[at][at]).collect();
        for (i, row) in system.iter_mut().enumerate() {
            let factor = if i == at { 0.0 } else { row[at] };
            row.iter_mut().zip(&first).for_each(|(value, other)| *value -= factor * other);
        }
        system[at] = first;
    }
    system.into_iter().map(|row| row[n]).collect()
}
