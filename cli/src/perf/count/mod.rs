//! `posthaste perf --instructions`: what an operation costs in instructions, whatever the machine is busy with.
//!
//! A rank has itself traced by a process of its own, which lets it go on instruction by instruction while it carries out an
//! operation so many times. What is counted is all that the rank's thread executes between two marks, but for what the
//! kernel does; where an operation has to wait for another process, there is no count that would be the same twice, so
//! that a message and a call go to the rank itself, over the same rings as to another.

mod ranks;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod tracer;

use super::INTERRUPTED;
use super::setup::{Changed, warn_of};
use crate::say::{complain, say};
use comfy_table::{CellAlignment, Table, presets};
use posthaste::launcher::{self, Launch, Output};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use ranks::rank_main;

/// An operation whose instructions are counted.
struct Operation {
    name: &'static str,
    what: &'static str,
    ranks: u32,
    /// The most instructions that an optimised build may take: what it takes, and a fifth more for the next compiler's.
    most: f64,
}

const fn operation(name: &'static str, ranks: u32, most: f64, what: &'static str) -> Operation {
    Operation { name, what, ranks, most }
}

const OPERATIONS: [Operation; 12] = [
    operation("put", 2, 230.0, "8 bytes into a window, awaited"),
    operation("get", 2, 235.0, "8 bytes from a window, awaited"),
    operation("fetch_add", 2, 300.0, "a word of a window, awaited"),
    operation("send", 2, 460.0, "8 bytes to another rank, awaited"),
    operation("send_1k", 2, 1100.0, "1 KiB to another rank, awaited"),
    operation("message", 1, 1050.0, "8 bytes sent, handled, and awaited as a count"),
    operation("message_1k", 1, 2400.0, "1 KiB sent, handled, and awaited as a count"),
    operation("call", 1, 2000.0, "8 bytes to a service and back, awaited"),
    operation("multicast", 8, 1150.0, "8 bytes to seven ranks, awaited"),
    operation("many_to_many", 8, 2700.0, "8 bytes of its own to each of seven ranks, awaited"),
    operation("replayed_put", 2, 36.0, "one of 64 recorded puts of 8 bytes, replayed"),
    operation("replayed_send", 2, 24.0, "one of 64 recorded sends of 8 bytes, replayed"),
];

/// What was counted; per operation, once it is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Count {
    instructions: f64,
    /// Of these, those that lock their memory, or order all of it.
    locked: f64,
    /// Of these, those that enter the kernel.
    system_calls: f64,
}

/// One row, as `--json` prints it.
#[derive(Serialize)]
struct Row<'s> {
    count: &'static str,
    ranks: u32,
    #[serde(flatten)]
    counted: Count,
    #[serde(skip_serializing_if = "Changed::is_empty")]
    settings: &'s Changed,
}

/// Counts them all, or those named; the exit code.
pub fn main(
    wanted: &[String],
    json: bool,
    settings: &Changed,
    interrupted: &AtomicBool,
) -> Result<i32, String> {
    let known = || OPERATIONS.map(|operation| operation.name).join(", ");
    if let Some(name) = wanted.iter().find(|name| OPERATIONS.iter().all(|operation| operation.name != **name))
    {
        return Err(format!("no operation is called `{name}`; instructions are counted of {}", known()));
    }
    warn_of(settings);
    let mut rows = Vec::new();
    let mut failed = false;
    let named = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    for operation in OPERATIONS.iter().filter(|operation| named(operation.name)) {
        let counted = count(operation);
        if interrupted.load(Ordering::Relaxed) {
            break;
        }
        let counted = match counted {
            Ok(counted) => counted,
            Err(problem) => {
                complain(format_args!("perf: {problem}"));
                failed = true;
                break;
            }
        };
        let row = Row { count: operation.name, ranks: operation.ranks, counted, settings };
        if json {
            say(serde_json::to_string(&row).map_err(|error| error.to_string())?);
        }
        rows.push((operation, counted));
    }
    if !json && !rows.is_empty() {
        say(render(&rows));
    }
    if interrupted.load(Ordering::Relaxed) {
        return Ok(INTERRUPTED);
    }
    // A build that is not optimised takes many times as many.
    let over = rows.iter().any(|(operation, counted)| counted.instructions > operation.most);
    Ok(i32::from(failed || over && !cfg!(debug_assertions)))
}

fn render(rows: &[(&Operation, Count)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["operation", "ranks", "instructions", "at most", "locked", "system calls", ""]);
    for (operation, counted) in rows {
        table.add_row([
            operation.name.to_owned(),
            operation.ranks.to_string(),
            format!("{:.0}", counted.instructions),
            format!("{:.0}", operation.most),
            format!("{:.2}", counted.locked),
            format!("{:.2}", counted.system_calls),
            operation.what.to_owned(),
        ]);
    }
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Runs the ranks of an operation; what rank 0 counted.
fn count(operation: &Operation) -> Result<Count, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let launch = Launch::program(program).args(["count-rank", operation.name]);
    let launch = launcher::prepare(launch, operation.ranks, 1, 1).map_err(|error| error.to_string())?;
    let launch = launch.stdout(Output::Capture).stderr(Output::Capture).forward_signals(true);
    let job = launch.spawn().map_err(|error| error.to_string())?;
    let said = |printed: bool| {
        let of = |(stdout, stderr)| if printed { stdout } else { stderr };
        let said: Vec<Vec<u8>> = (0..operation.ranks).map(|rank| of(job.output(rank))).collect();
        String::from_utf8_lossy(&said.concat()).trim().to_owned()
    };
    let Some(outcome) = job.wait_timeout(Duration::from_secs(120)) else {
        return Err(format!("{}: the ranks did not finish within 120 s", operation.name));
    };
    if !outcome.success() {
        return Err(format!("{}: {outcome}\n{}", operation.name, said(false)));
    }
    let said = said(true);
    serde_json::from_str(&said).map_err(|error| format!("{}: {error} in {said:?}", operation.name))
}

/// The hidden command that follows another process; the exit code.
pub fn tracer_main(process: i32) -> i32 {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    let followed = tracer::follow(process);
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    let followed = Err(format!("process {process} cannot be followed: that is for Linux on x86-64"));
    match followed {
        Ok(()) => 0,
        Err(problem) => {
            eprintln!("{problem}");
            1
        }
    }
}
