//! The 2D heat equation with a halo exchange that is recorded once and replayed at every step.
//!
//! Each rank owns some rows of a square plate. At every step it needs the last row of the rank above and the first one
//! of the rank below; both put them into its window. These puts are a recorded pattern.

mod common;

use clap::Parser;
use common::{Result, share};
use posthaste::{Job, Pattern, Rank, Region, Window};
use std::path::{Path, PathBuf};
use std::time::Instant;
use zerocopy::IntoBytes;

/// Solves the 2D heat equation on several ranks, checks the result against a sequential run and writes it as a PNG.
#[derive(Parser)]
#[command(name = "heat")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Points of the plate in each direction
    #[arg(long, value_name = "POINTS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=8192))]
    size: u32,
    /// Steps in time
    #[arg(long, value_name = "STEPS", default_value_t = 1000)]
    steps: u64,
    /// Where the picture goes
    #[arg(long, value_name = "FILE", default_value = "heat.png")]
    png: PathBuf,
}

/// The share of the difference to its neighbours that a point takes over in a step; stable up to 0.25.
const DIFFUSION: f64 = 0.2;

fn main() -> std::process::ExitCode {
    common::run(solve)
}

#[tokio::main(flavor = "current_thread")]
async fn solve(arguments: Arguments) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    let (me, width, steps) = (job.rank(), arguments.size as usize, arguments.steps);
    if job.size() > width {
        return Err(format!("{} ranks cannot share {width} rows: raise --size", job.size()).into());
    }
    let rows = share(width, job.size(), me.index());

    // The own rows, and one more on either side for what the neighbours tell.
    let mut field = vec![0.0; (rows.len() + 2) * width];
    field[width..][..rows.len() * width].copy_from_slice(&plate(width)[rows.start * width..rows.end * width]);
    let mut next = field.clone();
    let halo = Halo::new(&job, width).await?;

    job.barrier().await?;
    let start = Instant::now();
    for step in 1..=steps {
        halo.exchange(step, &mut field, rows.len()).await?;
        advance(&field, &mut next, width);
        std::mem::swap(&mut field, &mut next);
    }
    let time = start.elapsed();

    // Rank 0 fetches all rows from a window and compares them with what one process computes alone.
    let result = job.shmalloc::<f64>(rows.len() * width).await?;
    result.store_slice(0, &field[width..][..rows.len() * width])?;
    job.barrier().await?;
    if me == Rank(0) {
        let mut whole = Vec::new();
        for rank in job.ranks() {
            whole.extend(result.get_slice(rank, 0, result.len(rank)).await?);
        }
        write_png(&arguments.png, width, &whole)?;
        if whole != sequential(width, steps) {
            return Err("the field differs from the sequential run".into());
        }
        let us = time.as_secs_f64() * 1e6 / steps.max(1) as f64;
        common::say!("{width} x {width} points, {} ranks: {us:.1} us a step", job.size());
        common::say!("picture: {}", arguments.png.display());
        common::say!("{steps} steps: the field is that of the sequential run");
    }
    job.barrier().await?; // nobody leaves while rank 0 reads its rows
    Ok(job.leave().await?)
}

/// The exchange of rows with the ranks above and below.
struct Halo {
    width: usize,
    /// Who is above and who is below.
    neighbours: [Option<Rank>; 2],
    /// Rows from above and below, each for odd and even steps: a neighbour may be one step ahead, but not two.
    rows: Window<f64>,
    /// How many rows the rank above, and that below, has put here.
    arrived: Window<u64>,
    /// The own first and last row, which the patterns read.
    source: Region,
    /// One for odd and one for even steps; none if there are no neighbours.
    patterns: Vec<Pattern>,
}

impl Halo {
    /// Collective.
    async fn new(job: &Job, width: usize) -> Result<Halo> {
        let (me, n) = (job.rank().0, job.size() as u32);
        let neighbours = [me.checked_sub(1).map(Rank), (me + 1 < n).then_some(Rank(me + 1))];
        let rows = job.shmalloc(4 * width).await?;
        let arrived = job.shmalloc(2).await?;
        let source = job.region(2 * width * 8).await?;
        let mut patterns = Vec::new();
        for parity in 0..if n > 1 { 2 } else { 0 } {
            let record = job.record(|r| {
                for (side, neighbour) in neighbours.iter().enumerate() {
                    let Some(neighbour) = *neighbour else { continue };
                    let own = source.slice(side * 8 * width..(side + 1) * 8 * width);
                    // The rank above knows this one as the rank below, and the other way round.
                    let there = 1 - side;
                    let place = (2 * there + parity) * width;
                    r.put_signal(&rows, neighbour, place, own, arrived.signal_add(there, 1))?;
                }
                Ok(())
            });
            patterns.push(record.await?);
        }
        Ok(Halo { width, neighbours, rows, arrived, source, patterns })
    }

    /// Gives the neighbours this rank's outermost rows of this step and fills the rows outside of them with theirs.
    async fn exchange(&self, step: u64, field: &mut [f64], height: usize) -> Result<()> {
        let (width, parity) = (self.width, (step % 2) as usize);
        let Some(pattern) = self.patterns.get(parity) else { return Ok(()) };
        self.source.write(0, field[width..][..width].as_bytes())?;
        self.source.write(8 * width, field[height * width..][..width].as_bytes())?;
        pattern.replay().await?;
        for (side, outside) in [(0, 0), (1, (height + 1) * width)] {
            if self.neighbours[side].is_some() {
                self.arrived.wait_until(side, |rows| rows >= step).await?;
                self.rows.load_slice((2 * side + parity) * width, &mut field[outside..][..width])?;
            }
        }
        Ok(())
    }
}

/// The plate at the beginning: a hot disc in the cold, beside the middle.
fn plate(width: usize) -> Vec<f64> {
    let inside = |row: usize, column: usize| {
        let (y, x) = (row as f64 / width as f64 - 0.4, column as f64 / width as f64 - 0.55);
        x * x + y * y < 0.04
    };
    (0..width * width).map(|at| if inside(at / width, at % width) { 1.0 } else { 0.0 }).collect()
}

/// One step for all rows but the outermost two, which are not the rank's own. No heat crosses the left and right edge.
fn advance(field: &[f64], next: &mut [f64], width: usize) {
    for row in 1..field.len() / width - 1 {
        for column in 0..width {
            let at = row * width + column;
            let left = field[if column > 0 { at - 1 } else { at }];
            let right = field[if column + 1 < width { at + 1 } else { at }];
            let around = field[at - width] + field[at + width] + left + right;
            next[at] = field[at] + DIFFUSION * (around - 4.0 * field[at]);
        }
    }
}

/// What one process computes alone. Above the first and below the last row it is cold.
fn sequential(width: usize, steps: u64) -> Vec<f64> {
    let mut field = vec![0.0; (width + 2) * width];
    field[width..][..width * width].copy_from_slice(&plate(width));
    let mut next = field.clone();
    for _ in 0..steps {
        advance(&field, &mut next, width);
        std::mem::swap(&mut field, &mut next);
    }
    field[width..][..width * width].to_vec()
}

/// From black over red and yellow to white.
fn write_png(file: &Path, width: usize, field: &[f64]) -> Result<()> {
    let hottest = field.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let colours: Vec<u8> = field
        .iter()
        .flat_map(|heat| [0.0, 1.0, 2.0].map(|first| ((3.0 * heat / hottest - first) * 255.0) as u8))
        .collect();
    let opened = std::fs::File::create(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut encoder = png::Encoder::new(std::io::BufWriter::new(opened), width as u32, width as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header()?.write_image_data(&colours)?;
    Ok(())
}
