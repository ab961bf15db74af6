//! A wave on a string: every element becomes a function of itself and its neighbours.

use crate::array::GlobalArray;
use crate::common::Result;
use posthaste::Job;

/// The same for the array and for the check.
fn next(before: f64, [left, here, right]: [f64; 3]) -> f64 {
    2.0 * here - before + 0.25 * (left - 2.0 * here + right)
}

/// A hump in the left half.
fn hump(index: usize, points: usize) -> f64 {
    let x = 4.0 * index as f64 / points as f64 - 1.0;
    if x.abs() < 1.0 { (1.0 - x * x).powi(2) } else { 0.0 }
}

/// Lets the wave run and compares it with a sequential run; the sum of all elements.
pub async fn run(job: &Job, points: usize, steps: usize) -> Result<f64> {
    let mut before = GlobalArray::<f64>::new(job, points).await?;
    let mut now = GlobalArray::<f64>::new(job, points).await?;
    before.update_local(|index, _| hump(index, points))?;
    now.update_local(|index, _| hump(index, points))?;
    now.barrier().await?;
    for _ in 0..steps {
        // The own elements and one more on each side; the ends of the string are held.
        let own = now.local_range();
        let around = own.start.saturating_sub(1)..(own.end + 1).min(points);
        let first = around.start;
        let old = now.slice(around).get().await?;
        // Into the array of the step before last, which nobody else reads.
        before.update_local(|index, before| {
            if index == 0 || index + 1 == points {
                return 0.0;
            }
            let at = index - first;
            next(before, [old[at - 1], old[at], old[at + 1]])
        })?;
        std::mem::swap(&mut before, &mut now);
        // All have written before anybody reads, and have read before anybody writes again.
        now.barrier().await?;
    }
    let alone = sequential(points, steps);
    let wrong = now.local().any(|(index, value)| value != alone[index]);
    let sum = now.sum().await?;
    before.free().await?;
    now.free().await?;
    if wrong { Err("the wave differs from the sequential run".into()) } else { Ok(sum) }
}

fn sequential(points: usize, steps: usize) -> Vec<f64> {
    let mut before: Vec<f64> = (0..points).map(|index| hump(index, points)).collect();
    let mut now = before.clone();
    for _ in 0..steps {
        for (index, value) in before.iter_mut().enumerate() {
            let end = index == 0 || index + 1 == points;
            *value = if end { 0.0 } else { next(*value, [now[index - 1], now[index], now[index + 1]]) };
        }
        std::mem::swap(&mut before, &mut now);
    }
    now
}
