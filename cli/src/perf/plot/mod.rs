//! `--plot`: sweeps over the message size as pictures.

mod svg;

use super::benches::{BENCHES, Bench, check_size};
use super::rivals::Rivals;
use super::{Args, Device, Face, Plan, Runtime, jobs};
use crate::say::{complain, say};
use indicatif::ProgressBar;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use svg::{Chart, Series};

const K: usize = 1 << 10;
const M: usize = 1 << 20;

/// A picture.
struct Sweep {
    file: &'static str,
    title: &'static str,
    device: Device,
    unit: &'static str,
    across: &'static str,
    sizes: &'static [usize],
    lines: &'static [Line],
    /// The row whose counterparts rivals have, if they have one.
    rivals: Option<&'static str>,
}

/// A line of a picture, and how it comes to its points.
#[derive(Clone, Copy)]
struct Line {
    label: &'static str,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    /// Ranks that run a program.
    Ours(&'static str),
    /// A loop without the library.
    Limit(&'static str),
    /// The same, which does not depend on the size: measured with so many bytes.
    Level(&'static str, usize),
}

const fn ours(label: &'static str, program: &'static str) -> Line {
    Line { label, what: What::Ours(program) }
}

const fn limit(label: &'static str, name: &'static str) -> Line {
    Line { label, what: What::Limit(name) }
}

#[rustfmt::skip]
const SWEEPS: &[Sweep] = &[
    Sweep {
        file: "latency_shm.svg", title: "Half round trip over shared memory", device: Device::Shm, unit: "µs",
        across: "message", sizes: &[8, 64, 512, 4 * K, 32 * K, 256 * K, 2 * M], rivals: Some("am_latency"),
        lines: &[
            ours("Posthaste, active message", "am_latency"),
            Line { label: "limit: two cache lines", what: What::Level("pingpong_two_lines", 8) },
        ],
    },
    Sweep {
        file: "bandwidth_shm.svg", title: "Messages one way over shared memory, every word read", device: Device::Shm,
        unit: "GB/s", across: "message", sizes: &[4 * K, 16 * K, 64 * K, 256 * K, M, 4 * M], rivals: Some("am_bandwidth"),
        lines: &[
            ours("Posthaste, active message", "am_bandwidth"),
            limit("limit: copied in and out", "two_copy_pipeline"),
        ],
    },
    Sweep {
        file: "put_bandwidth_shm.svg", title: "Puts over shared memory", device: Device::Shm, unit: "GB/s",
        across: "put", sizes: &[64, 512, 4 * K, 32 * K, 256 * K, 2 * M, 16 * M], rivals: Some("put_bandwidth"),
        lines: &[ours("Posthaste, put", "put_bandwidth"), limit("limit: memcpy", "memcpy_to_shared")],
    },
    Sweep {
        file: "layouts_shm.svg", title: "Puts from blocks to blocks of half the length, 256 KiB in all",
        device: Device::Shm, unit: "GB/s", across: "block", sizes: &[8, 32, 128, 512, 2 * K, 8 * K, 64 * K], rivals: None,
        lines: &[ours("direct", "typed_direct"), ours("staged", "typed_staged")],
    },
    Sweep {
        file: "latency_tcp.svg", title: "Half round trip over TCP, loopback", device: Device::Tcp, unit: "µs",
        across: "message", sizes: &[8, 64, 512, 4 * K, 32 * K, 256 * K], rivals: Some("am_latency"),
        lines: &[
            ours("Posthaste, active message", "am_latency"),
            limit("limit: blocking calls", "tcp_pingpong"),
        ],
    },
    Sweep {
        file: "bandwidth_tcp.svg", title: "Messages one way over TCP, loopback", device: Device::Tcp, unit: "GB/s",
        across: "message", sizes: &[4 * K, 32 * K, 256 * K, M, 4 * M], rivals: Some("am_bandwidth"),
        lines: &[ours("Posthaste, active message", "am_bandwidth"), limit("limit: blocking calls", "tcp_stream")],
    },
];

/// Measures the sweeps of a device and writes the pictures, each of which is named when it is there.
///
/// # Errors
/// What could not be measured or written.
pub fn write(
    args: &Args,
    (device, folder): (Device, &Path),
    rivals: Option<&Rivals>,
    interrupted: &AtomicBool,
) -> Result<(), String> {
    let progress = if args.json { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
    for sweep in sweeps_of(device) {
        progress.set_message(sweep.file);
        let go_on = || {
            progress.tick();
            if interrupted.load(Ordering::Relaxed) { Err("interrupted".to_owned()) } else { Ok(()) }
        };
        let chart = Chart {
            title: sweep.title.to_owned(),
            across: format!("{} size", sweep.across),
            up: sweep.unit.to_owned(),
            series: series(args, sweep, rivals, interrupted, &go_on)?,
        };
        let path = folder.join(sweep.file);
        std::fs::write(&path, chart.draw()).map_err(|error| format!("{}: {error}", path.display()))?;
        progress.suspend(|| say(path.display()));
    }
    progress.finish_and_clear();
    Ok(())
}

/// Makes the folder, for what can be asked for.
///
/// # Errors
/// If a program that is run cannot have one of the sizes, or there can be no such folder.
pub fn prepare(args: &Args, device: Device, folder: &Path) -> Result<(), String> {
    for line in sweeps_of(device).flat_map(|sweep| sweep.lines) {
        if let What::Ours(program) = line.what {
            args.sizes.iter().try_for_each(|size| check_size(program, program, *size))?;
        }
    }
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))
}

fn sweeps_of(device: Device) -> impl Iterator<Item = &'static Sweep> {
    SWEEPS.iter().filter(move |sweep| sweep.device == device)
}

fn series(
    args: &Args,
    sweep: &Sweep,
    rivals: Option<&Rivals>,
    interrupted: &AtomicBool,
    go_on: &dyn Fn() -> Result<(), String>,
) -> Result<Vec<Series>, String> {
    let limit = |name, size| {
        let limited = jobs::Limited { name, size, count: 1000, seconds: args.seconds };
        jobs::limit(&limited, interrupted).map(|(value, _)| value)
    };
    let sizes = if args.sizes.is_empty() { sweep.sizes } else { &args.sizes };
    let mut all = Vec::new();
    for line in sweep.lines {
        let mut points = Vec::new();
        let mut level = None;
        for &size in sizes {
            go_on()?;
            let value = match (line.what, level) {
                (What::Ours(program), _) => {
                    jobs::run_program(args, plan(sweep, size, program)?, program, &[])?
                }
                (What::Limit(name), _) => limit(name, size)?,
                (What::Level(..), Some(value)) => value,
                (What::Level(name, size), None) => limit(name, size)?,
            };
            level = Some(value);
            points.push((size as f64, value));
        }
        let dashed = !matches!(line.what, What::Ours(_));
        all.push(Series { label: line.label.to_owned(), points, dashed });
    }
    if let Some((rivals, bench)) = rivals.zip(sweep.rivals) {
        all.extend(theirs(args, sweep, (rivals, bench), sizes, go_on)?);
    }
    Ok(all)
}

fn theirs(
    args: &Args,
    sweep: &Sweep,
    (rivals, bench): (&Rivals, &str),
    sizes: &[usize],
    go_on: &dyn Fn() -> Result<(), String>,
) -> Result<Vec<Series>, String> {
    let series = |name: &&str| Series { label: (*name).to_owned(), points: Vec::new(), dashed: false };
    let mut all: Vec<Series> = rivals.names().iter().map(series).collect();
    for &size in sizes {
        go_on()?;
        let (figures, wrong) = rivals.measure(args, plan(sweep, size, bench)?);
        for why in wrong {
            complain(format_args!("perf: {} {size}: {why}", sweep.file));
        }
        for series in &mut all {
            series.points.extend(figures.get(&series.label).map(|figure| (size as f64, *figure)));
        }
    }
    all.retain(|series| !series.points.is_empty());
    Ok(all)
}

/// Two ranks that run this program through the handle, on a current-thread runtime.
fn plan(sweep: &Sweep, size: usize, program: &str) -> Result<Plan, String> {
    let runs = |bench: &&'static Bench| {
        bench.device == sweep.device && bench.env.is_empty() && bench.program() == program
    };
    // What is only measured for another row has the shape of any of two ranks.
    let plain = |bench: &&'static Bench| bench.device == sweep.device && bench.name == "am_latency";
    let bench = BENCHES.iter().find(runs).or_else(|| BENCHES.iter().find(plain));
    let bench = bench.ok_or_else(|| format!("no benchmark runs {program}"))?;
    Ok(Plan { bench, size, ranks: 2, face: Face::Handle, runtime: Runtime::CurrentThread })
}
