//! A 3D FFT, forward and backward, whose four transposes are four recorded patterns.
//!
//! The ranks form a grid, and each owns a pencil: all of one axis, a share of the two others. Between the transforms
//! along z, y and x the cube is redistributed among the ranks of a row or of a column of the grid.

#[path = "../common/mod.rs"]
mod common;
mod pencil;
mod transpose;

use clap::Parser;
use common::Result;
use pencil::{Pencil, grid};
use posthaste::{Job, Rank, Reduce};
use rustfft::{Fft, FftPlanner};
use std::sync::Arc;
use std::time::Instant;
use transpose::{Number, Transpose, Way};

/// Transforms a cube forward and backward on several ranks, with replayed transposes and with plain sends.
#[derive(Parser)]
#[command(name = "fft3d")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Points of the cube in each direction
    #[arg(long, value_name = "POINTS", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    size: u32,
    /// Forward and backward transforms, each way
    #[arg(long, value_name = "TIMES", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
}

/// Points in each direction up to which every rank transforms the whole cube by itself, too: twice 32 MiB.
const MOST_ALONE: usize = 128;

fn main() -> std::process::ExitCode {
    common::run(transform)
}

#[tokio::main(flavor = "current_thread")]
async fn transform(arguments: Arguments) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    let size = arguments.size as usize;
    let mut small = Cube::new(&job, "small", 6).await?;
    let mut cube = Cube::new(&job, "large", size).await?;
    let first = cube.input();
    // Each rank's frequencies as one process computes them from the whole cube, which is too much for a large one.
    let alone = (size <= MOST_ALONE).then(|| cube.alone());

    for way in [Way::Replay, Way::Sends] {
        let mut data = first.clone();
        job.barrier().await?;
        let start = Instant::now();
        for _ in 0..arguments.iterations {
            data = cube.forward(data, way).await?;
            data = cube.backward(data, way).await?;
        }
        job.barrier().await?;
        let ms = start.elapsed().as_secs_f64() * 1e3 / f64::from(arguments.iterations);

        // Sums of the differences, in which nothing that is not a number can hide.
        let there_and_back = difference(&data, &first);
        let sequential = match &alone {
            Some(alone) => difference(&cube.forward(first.clone(), way).await?, alone),
            None => 0.0,
        };
        let errors = [there_and_back, small.off_by(way).await?, sequential];
        let errors = job.world().all_reduce(&errors, &Reduce::sum()).await?;
        let allowed = 1e-10 * (size as f64).powi(3).max(216.0);
        let checks = ["the input", "the definition", "the sequential transform"];
        for (error, check) in errors.into_iter().zip(checks) {
            if error.is_nan() || error >= allowed {
                return Err(format!("{way:?}: off by {error:e} from {check}").into());
            }
        }
        if job.rank() == Rank(0) {
            common::say!("{way:?}: {ms:.3} ms for forward and backward");
        }
    }
    if job.rank() == Rank(0) {
        let [rows, columns] = grid(job.size());
        let same = if alone.is_some() { "the sequential ones" } else { "as defined for 6^3 points" };
        common::say!(
            "{size}^3 points on {rows} x {columns} ranks: the frequencies are {same}, and the inverse gives the input back"
        );
    }
    Ok(job.leave().await?)
}

/// A cube, and what its transforms need.
struct Cube {
    size: usize,
    /// This rank's pencils along z, y and x.
    pencils: [Pencil; 3],
    /// From z to y, to x, and back to y and z: the four persistent ids.
    transposes: [Transpose; 4],
    transforms: [Arc<dyn Fft<f64>>; 2],
}

impl Cube {
    /// Collective.
    async fn new(job: &Job, name: &str, size: usize) -> Result<Cube> {
        let axes @ [along_z, along_y, along_x] = [[0, 1, 2], [0, 2, 1], [1, 2, 0]];
        let pencils = axes.map(|axes| Pencil::new(size, job.size(), job.rank().index(), axes));
        let transposes = [
            Transpose::new(job, &format!("{name} z to y"), size, along_z, along_y).await?,
            Transpose::new(job, &format!("{name} y to x"), size, along_y, along_x).await?,
            Transpose::new(job, &format!("{name} x to y"), size, along_x, along_y).await?,
            Transpose::new(job, &format!("{name} y to z"), size, along_y, along_z).await?,
        ];
        let mut planner = FftPlanner::new();
        let transforms = [planner.plan_fft_forward(size), planner.plan_fft_inverse(size)];
        Ok(Cube { size, pencils, transposes, transforms })
    }

    /// From points in pencils along z to frequencies in pencils along x.
    async fn forward(&mut self, mut data: Vec<Number>, way: Way) -> Result<Vec<Number>> {
        self.transforms[0].process(&mut data);
        for transpose in &mut self.transposes[..2] {
            data = transpose.run(&data, way).await?;
            self.transforms[0].process(&mut data);
        }
        Ok(data)
    }

    /// And back.
    async fn backward(&mut self, mut data: Vec<Number>, way: Way) -> Result<Vec<Number>> {
        self.transforms[1].process(&mut data);
        for transpose in &mut self.transposes[2..] {
            data = transpose.run(&data, way).await?;
            self.transforms[1].process(&mut data);
        }
        let scale = (self.size as f64).powi(-3);
        data.iter_mut().for_each(|number| *number *= scale);
        Ok(data)
    }

    /// This rank's part of the input.
    fn input(&self) -> Vec<Number> {
        self.pencils[0].coordinates().map(input).collect()
    }

    /// This rank's frequencies, from a transform of the whole cube by this process alone.
    fn alone(&self) -> Vec<Number> {
        let (size, all) = (self.size, Pencil::new(self.size, 1, 0, [0, 1, 2]));
        let mut whole: Vec<Number> = all.coordinates().map(input).collect();
        for _ in 0..3 {
            self.transforms[0].process(&mut whole);
            // Now the fastest axis is the slowest, and the next one the fastest: after three turns all are where they were.
            let (plane, old) = (size * size, whole);
            whole = (0..old.len()).map(|at| old[at % plane * size + at / plane]).collect();
        }
        self.pencils[2].coordinates().map(|[u, v, w]| whole[(u * size + v) * size + w]).collect()
    }

    /// Transforms the input and compares every frequency with the sum that defines it; the sum of the
    /// differences.
    async fn off_by(&mut self, way: Way) -> Result<f64> {
        let result = self.forward(self.input(), way).await?;
        let all = Pencil::new(self.size, 1, 0, [0, 1, 2]);
        let turn = -std::f64::consts::TAU / self.size as f64;
        let difference = |(number, [u, v, w]): (&Number, [usize; 3])| {
            let term =
                |at: [usize; 3]| input(at) * Number::cis(turn * (u * at[0] + v * at[1] + w * at[2]) as f64);
            (number - all.coordinates().map(term).sum::<Number>()).norm()
        };
        Ok(result.iter().zip(self.pencils[2].coordinates()).map(difference).sum())
    }
}

/// The sum of the differences.
fn difference(left: &[Number], right: &[Number]) -> f64 {
    left.iter().zip(right).map(|(a, b)| (a - b).norm()).sum()
}

/// The value at a point: anything without a pattern.
fn input([x, y, z]: [usize; 3]) -> Number {
    let at = (1 + x * 7919 + y * 104_729 + z * 1_299_709) as f64;
    Number::new((at * 0.37).sin(), (at * 0.11).cos())
}
