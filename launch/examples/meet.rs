//! Meets the other ranks of whatever launcher started this process, and tells what it saw:
//! `mpirun -n 4 meet`, `mpiexec.hydra -n 4 meet`, `srun -n 4 meet`.
//!
//! `--seconds N` limits the time (default 30), `--absent R` lets rank R stay away.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use posthaste_launch::{Foreign, Meeting, detect};

/// A key-value space has to cut a blob of this many bytes into parts.
const BLOB: usize = 40 << 10;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("meet: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let (seconds, absent) = (option("--seconds")?.unwrap_or(30), option("--absent")?);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let detected = detect(&|name| std::env::var(name).ok())?
        .ok_or("no launcher started this process; start it with mpirun, mpiexec.hydra or srun")?;
    let launcher = detected.launcher();
    match detected.connect(deadline)? {
        Foreign::Rendezvous(at) => {
            println!(
                "rank {} of {} by {launcher}: meet at {}, serve: {}",
                at.rank, at.size, at.place, at.serve
            );
        }
        Foreign::KeyValue(mut meeting) => {
            let (rank, size) = (meeting.rank(), meeting.size());
            if absent == Some(u64::from(rank)) {
                // Until the others have given up.
                std::thread::sleep(Duration::from_secs(seconds) + Duration::from_secs(10));
                return Ok(());
            }
            for round in 0..2 {
                gather(meeting.as_mut(), round, deadline)?;
            }
            println!("rank {rank} of {size} by {launcher}: gathered 2 blobs of each");
        }
    }
    Ok(())
}

/// Gives a blob that only this rank gives, and checks everyone's.
fn gather(
    meeting: &mut dyn Meeting,
    round: u32,
    deadline: Instant,
) -> Result<(), Box<dyn std::error::Error>> {
    let blobs = meeting.all_gather(&blob(meeting.rank(), round), deadline)?;
    if blobs.len() != meeting.size() as usize {
        return Err(format!("{} blobs came from {} ranks", blobs.len(), meeting.size()).into());
    }
    for (rank, got) in (0..).zip(&blobs) {
        if *got != blob(rank, round) {
            return Err(format!("the blob of rank {rank} in round {round} is wrong").into());
        }
    }
    Ok(())
}

/// Bytes of all values, of a length that is no multiple of anything.
fn blob(rank: u32, round: u32) -> Vec<u8> {
    let start = rank * 7 + round * 3;
    (0..BLOB as u32 + rank).map(|at| (start + at + at / 251) as u8).collect()
}

fn option(name: &str) -> Result<Option<u64>, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip_while(|argument| argument != name).skip(1);
    Ok(arguments.next().map(|value| value.parse()).transpose()?)
}
