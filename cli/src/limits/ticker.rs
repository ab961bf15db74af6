//! `ticker_alone`: how late a 1 ms ticker is that has a Tokio runtime to itself: the 99th percentile, in
//! microseconds.
//!
//! Nothing else runs in the current_thread runtime, so the lateness is Tokio's timer, which counts in whole
//! milliseconds, and the kernel's. A ticker beside other work in the same runtime cannot be more punctual. A
//! tick's lateness is counted from when [`tokio::time::interval`] had planned it, and the interval catches up with
//! ticks it missed, which is its default.

use super::process::pin;
use super::{LimitArgs, LimitError, Measurement, quantile};
use std::time::Duration;
use tokio::time::{Instant, interval};

const PERIOD: Duration = Duration::from_millis(1);
/// The 99th percentile of fewer ticks would be one of a few.
const LEAST: usize = 1000;

pub(super) fn run(args: &LimitArgs) -> Result<Measurement, LimitError> {
    pin(args.cores[0])?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(|_| LimitError::Argument("Tokio has no runtime for ticker_alone"))?;
    let ticks = ((args.seconds / PERIOD.as_secs_f64()) as usize).max(LEAST);
    let mut lateness = Vec::with_capacity(ticks);
    runtime.block_on(async {
        let mut ticker = interval(PERIOD);
        // The first tick is immediate and tells nothing.
        ticker.tick().await;
        for _ in 0..ticks {
            let planned = ticker.tick().await;
            lateness.push(Instant::now().duration_since(planned).as_secs_f64() * 1e6);
        }
    });
    let p50 = quantile(&mut lateness, 0.5);
    let max = quantile(&mut lateness, 1.0);
    Ok(Measurement {
        value: quantile(&mut lateness, 0.99),
        unit: "us",
        detail: format!("p99 of {ticks} ticks of 1 ms; median {p50:.0}, maximum {max:.0}"),
    })
}
