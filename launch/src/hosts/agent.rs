//! What runs on each host: starts its ranks as it is told, and tells what they print and how they end.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::process::Signal;
use zeroize::Zeroize;

use crate::hosts::order::{Order, encode_end, encode_failure, encode_pid};
use crate::hosts::wire::{GREETING, Kind, VERSION, read_frame, write_frame};
use crate::job::{RunningJob, Shared};
use crate::outcome::RankEnd;
use crate::output::{Relay, Stream, print};
use crate::signals::{By, Forwarded, Target};
use crate::spawn::Launch;
use crate::supervisor::Reaped;

/// Does what a launcher on another host asks for over this process's standard input and output; returns the exit code.
///
/// It is what `posthaste agent` does, and for a process of its own: it changes the working directory. It ends its ranks
/// when its standard input ends, so that no rank outlives the launcher.
pub fn run_agent() -> i32 {
    match serve() {
        Ok(()) => 0,
        Err(error) => {
            print(Stream::Err, format!("posthaste agent: {error}\n").as_bytes());
            1
        }
    }
}

fn serve() -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(&[b"\n", GREETING, VERSION.as_bytes(), b"\n"].concat())?;
    out.flush()?;
    let mut input = io::stdin().lock();
    let Some(order) = read_order(&mut input)? else { return Ok(()) };
    drop(input);
    let node = order.part.node;
    let nodes = order.part.nodes.clone();
    let obituary = Obituary::new()?;
    let job = match start(order, &obituary) {
        Ok(job) => job,
        Err(problem) => return write_frame(&mut out, Kind::Refused, node, problem.as_bytes()),
    };
    write_frame(&mut out, Kind::Started, node, &[])?;
    let shared = Arc::clone(&job.shared);
    std::thread::Builder::new().name("head".into()).spawn(move || listen(&shared))?;
    if let Some(failure) = job.wait_failure() {
        let body = encode_failure(&failure.cause, failure.pid);
        write_frame(&mut out, Kind::Failed, failure.rank, &body)?;
    }
    let outcome = job.wait();
    obituary.finish();
    for (rank, end) in (0..).zip(outcome.ranks).filter(|(rank, _)| nodes[*rank as usize] == node) {
        if end != RankEnd::Elsewhere {
            write_frame(&mut out, Kind::Ended, rank, &encode_end(end))?;
        }
    }
    write_frame(&mut out, Kind::Done, node, &[outcome.ended_early.into()])
}

/// Tells the head of every process that has ended, in a thread of its own: what the ranks print may stop at a reader that does
/// not go on, and the supervisor has to go on then.
struct Obituary {
    told: Sender<(u32, u32)>,
    thread: JoinHandle<()>,
}

impl Obituary {
    fn new() -> io::Result<Self> {
        let (told, ended) = channel();
        let thread = std::thread::Builder::new().name("obituary".into()).spawn(move || {
            for (rank, pid) in ended {
                // If the head is gone, so is our standard input, and with it the job.
                let _ = write_frame(&mut io::stdout().lock(), Kind::Reaped, rank, &encode_pid(pid));
            }
        })?;
        Ok(Self { told, thread })
    }

    fn reaped(&self) -> Reaped {
        let told = self.told.clone();
        Reaped(Arc::new(move |rank, pid| {
            // The thread ends when nobody can tell it anything, and not before.
            let _ = told.send((rank, pid));
        }))
    }

    /// Waits until all has been told: the job is over.
    fn finish(self) {
        drop(self.told);
        let _ = self.thread.join();
    }
}

/// The first frame; none if there is none.
fn read_order(input: &mut impl Read) -> io::Result<Option<Order>> {
    let Some(mut frame) = read_frame(input)? else { return Ok(None) };
    let order = if frame.kind == Kind::Order { Order::decode(&frame.body) } else { None };
    frame.body.zeroize();
    let what = "this is for `posthaste run --hosts` to start, which tells it what to do";
    order.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, what))
}

fn start(order: Order, obituary: &Obituary) -> Result<RunningJob, String> {
    let directory = order.directory.display();
    std::env::set_current_dir(&order.directory)
        .map_err(|error| format!("the directory {directory} is not there: {error}"))?;
    let relay = Relay(Arc::new(|rank, stream, bytes: &[u8]| {
        let kind = if stream == Stream::Out { Kind::Out } else { Kind::Err };
        // If the head is gone, so is our standard input, and with it the job.
        let _ = write_frame(&mut io::stdout().lock(), kind, rank, bytes);
    }));
    let launch = Launch::program(&order.program)
        .args(order.args)
        .contexts(order.contexts)
        .clients(order.clients)
        .arena_bytes(order.arena_bytes)
        .bind(order.bind)
        .keep_going(order.keep_going)
        .grace(order.grace)
        .forward_signals(true)
        .restart(order.restarts)
        .part(order.part)
        .relay(relay)
        .reaped(obituary.reaped())
        .forget_settings();
    let launch = order.envs.into_iter().fold(launch, |launch, (name, value)| launch.env(name, value));
    launch.spawn().map_err(|error| error.to_string())
}

/// Takes the head's signals, until it is gone or has heard all.
fn listen(shared: &Shared) {
    let mut input = io::stdin().lock();
    while let Ok(Some(frame)) = read_frame(&mut input) {
        let signal = i32::try_from(frame.number).ok().and_then(Signal::from_named_raw);
        match signal.filter(|_| frame.kind == Kind::Signal) {
            Some(signal) => drop(shared.forward(Forwarded { signal, by: By::Process })),
            None => break,
        }
    }
    shared.abort();
}
