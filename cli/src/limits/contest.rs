//! Finding the fastest of several ways.

use super::{LimitError, median, process::now_ns};

/// How many of the ways are measured in earnest.
const FINALISTS: usize = 4;

/// Seconds after which a contest that is slower than planned takes what it has: others are using the cores.
const OVERLOADED: f64 = 1.0;

/// The winner of a [`contest`].
pub(super) struct Winner<W> {
    /// The way itself.
    pub way: W,
    /// Median of its measured batches.
    pub median: f64,
    /// The best batch of every way, from the first part.
    pub tried: Vec<(W, f64)>,
}

/// Measures `ways` by turns for about `seconds` with `batch`, which returns a speed: higher is better.
///
/// The first part, less than half of the time, takes the best batch of each way. The second part measures the
/// best [`FINALISTS`] by turns, so that all see the same disturbances, and the one with the best median wins:
/// the median is made of new batches only, so a lucky one cannot win. On cores that others use too, where a batch may take
/// any time, fewer ways are tried and fewer batches measured.
pub(super) fn contest<W: Copy>(
    ways: &[W],
    seconds: f64,
    mut batch: impl FnMut(W) -> Result<f64, LimitError>,
) -> Result<Winner<W>, LimitError> {
    let start = now_ns();
    let spent = || (now_ns() - start) as f64 * 1e-9 / seconds;
    let overloaded = || spent() * seconds > OVERLOADED.max(4.0 * seconds);
    let mut tried: Vec<(W, f64)> = ways.iter().map(|way| (*way, 0.0)).collect();
    for pass in 0..3 {
        for (at, (way, best)) in tried.iter_mut().enumerate() {
            if overloaded() && (pass > 0 || at > 0) {
                break;
            }
            *best = best.max(batch(*way)?);
        }
        if spent() > 0.2 {
            break;
        }
    }
    let mut order: Vec<(W, f64)> = tried.clone();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let several = if overloaded() { 1 } else { FINALISTS };
    let mut finalists: Vec<(W, Vec<f64>)> =
        order.into_iter().take(several).map(|(way, _)| (way, Vec::new())).collect();
    let mut rounds = 0;
    while (rounds < 3 || spent() < 1.0) && !(rounds > 0 && overloaded()) {
        for (way, speeds) in &mut finalists {
            speeds.push(batch(*way)?);
        }
        rounds += 1;
    }
    finalists
        .into_iter()
        .map(|(way, mut speeds)| (way, median(&mut speeds)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|(way, median)| Winner { way, median, tried })
        .ok_or(LimitError::Argument("nothing to try"))
}
