//! What is learnt from, and how.

use crate::common::{Result, share};
use std::path::Path;

/// Of the first step; later ones are shorter.
const RATE: f64 = 0.1;

/// The data: in each row the input, a one for the constant term, and the number to be predicted.
pub struct Table {
    /// Of the weights.
    pub names: Vec<String>,
    pub rows: Vec<Vec<f64>>,
}

impl Table {
    pub fn read(file: &Path) -> Result<Table> {
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
pub struct Descent<'t> {
    table: &'t Table,
    ranks: usize,
    batch: u32,
    pub weights: Vec<f64>,
}

impl<'t> Descent<'t> {
    pub fn new(table: &'t Table, ranks: usize, batch: u32) -> Self {
        Descent { table, ranks, batch, weights: vec![0.0; table.names.len()] }
    }

    /// The gradient of the mean squared error, over the rows that a rank draws at a step.
    pub fn gradient(&self, step: u64, rank: usize) -> Vec<f64> {
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
    pub fn advance(&mut self, step: u64, total: &[f64]) {
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

/// The best weights there are: solves the normal equations by Gauss-Jordan elimination.
pub fn least_squares(rows: &[Vec<f64>]) -> Vec<f64> {
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
