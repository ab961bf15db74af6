//! A key-value service that goes on when one of its ranks is killed.
//!
//! Every rank owns the keys that hash to it, and runs clients that call the owners, with a deadline for each call. The
//! ranks stop in order when all clients have finished, or at Ctrl-C: nobody leaves while others may still call.

#[path = "../common/mod.rs"]
mod common;
mod members;

use clap::Parser;
use common::Result;
use members::{Counts, Members};
use posthaste::launcher::{self, RankEnd};
use posthaste::{CallError, Error, Fault, Job, JoinError, Rank, Service};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

/// Serves keys on several ranks to clients on all of them, and checks that no acknowledged write is lost with the living.
#[derive(Parser, Clone)]
#[command(name = "kv_service")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Clients on each rank
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    clients: u32,
    /// Operations of each client
    #[arg(long, value_name = "COUNT", default_value_t = 5000)]
    operations: u64,
    /// How long a client waits for an answer
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    deadline: u64,
    /// A rank that is killed when it is half-way through; a launcher must let the others go on
    #[arg(long, value_name = "RANK")]
    kill: Option<u32>,
}

#[derive(Serialize, Deserialize)]
enum Request {
    Put(String, Vec<u8>),
    Get(String),
    Remove(String),
}

/// What the key had before, or has.
type Reply = Option<Vec<u8>>;

/// As clients see it.
type Kv = Service<Request, Reply>;

fn main() -> std::process::ExitCode {
    common::run(|arguments: Arguments| match arguments.kill {
        Some(rank) if rank >= arguments.ranks => {
            Err(format!("--kill {rank}: there are ranks 0 to {} only", arguments.ranks - 1).into())
        }
        _ => serve(arguments),
    })
}

#[tokio::main(flavor = "current_thread")]
async fn serve(arguments: Arguments) -> Result<()> {
    let job = match posthaste::join().await {
        Err(Error::Join(JoinError::NoJob)) => return start_ranks(arguments).await,
        joined => joined?,
    };
    let shard = Arc::new(Mutex::new(HashMap::new()));
    let served = shard.clone();
    let kv: Kv = job.service("kv", move |request| {
        let reply = handle(&mut served.lock().unwrap(), request);
        async move { reply }
    })?;
    let members = Members::new(&job)?;
    let stop = Arc::new(AtomicBool::new(false));
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    job.barrier().await?; // the last thing that all ranks must live for
    if job.rank() == Rank(0) {
        common::say!("{} ranks serve {} clients each", job.size(), arguments.clients);
    }
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        stopping.store(true, Ordering::Relaxed);
    });

    let mut clients = JoinSet::new();
    for number in 0..arguments.clients {
        clients.spawn(client(job.clone(), kv.clone(), number, arguments.clone(), stop.clone()));
    }
    let mut total = Counts::default();
    while let Some(counts) = clients.join_next().await {
        let counts = counts??;
        total.answered += counts.answered;
        total.late += counts.late;
        total.lost += counts.lost;
        total.verified += counts.verified;
    }
    total.keys = shard.lock().unwrap().len() as u64;
    let all = members.finish(&job, total).await?;
    if all.iter().position(Option::is_some) == Some(job.rank().index()) {
        report(&all, stop.load(Ordering::Relaxed));
    }
    Ok(job.leave().await?)
}

/// Does what a request asks of a shard.
fn handle(shard: &mut HashMap<String, Vec<u8>>, request: Request) -> Reply {
    match request {
        Request::Put(key, value) => shard.insert(key, value),
        Request::Get(key) => shard.get(&key).cloned(),
        Request::Remove(key) => shard.remove(&key),
    }
}

/// Started by no launcher, this process is one: the ranks go on when one of them is killed.
async fn start_ranks(arguments: Arguments) -> Result<()> {
    let running = launcher::current_program(arguments.ranks)?
        .keep_going(true)
        .forward_signals(true)
        .grace(Duration::from_secs(30)) // to finish after Ctrl-C
        .spawn()?;
    let outcome = tokio::task::spawn_blocking(move || running.wait()).await?;
    let as_wanted = |(rank, end): (usize, &RankEnd)| match *end {
        RankEnd::Exit(0) => true,
        RankEnd::Signal(9) => arguments.kill == Some(rank as u32),
        _ => false,
    };
    if outcome.ranks.iter().enumerate().all(as_wanted) { Ok(()) } else { Err(outcome.to_string().into()) }
}

/// One client: puts, gets and removes keys of its own, knows what each must have, and reads all of them at the end.
async fn client(
    job: Job,
    kv: Kv,
    number: u32,
    arguments: Arguments,
    stop: Arc<AtomicBool>,
) -> Result<Counts, String> {
    let (me, mut counts) = (job.rank(), Counts::default());
    let deadline = Duration::from_millis(arguments.deadline);
    // What was acknowledged; a key is not here while nobody knows what it has.
    let mut known: HashMap<String, Reply> = HashMap::new();
    for at in 0..arguments.operations {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        if arguments.kill == Some(me.0) && at == arguments.operations / 2 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .map_err(|error| error.to_string())?;
        }
        let key = format!("{me}/{number}/{}", at * 7 % 101);
        let (request, after) = match at % 4 {
            0 | 1 => (Request::Put(key.clone(), at.to_le_bytes().to_vec()), Some(at.to_le_bytes().to_vec())),
            2 => (Request::Get(key.clone()), known.get(&key).cloned().flatten()),
            _ => (Request::Remove(key.clone()), None),
        };
        let before = known.remove(&key);
        if let Some(reply) =
            outcome(kv.call_within(owner(&key, job.size()), request, deadline).await, &mut counts)?
        {
            // A key that was never written has nothing; one that nobody knows may have anything.
            if before.is_some_and(|before| before != reply) {
                return Err(format!("{key} is not what was written last"));
            }
            known.insert(key, if at % 4 == 2 { reply } else { after });
        }
    }
    for (key, expected) in known {
        let request = Request::Get(key.clone());
        if let Some(reply) =
            outcome(kv.call_within(owner(&key, job.size()), request, deadline).await, &mut counts)?
        {
            if reply != expected {
                return Err(format!("{key} has lost what was acknowledged"));
            }
            counts.verified += 1;
        }
    }
    Ok(counts)
}

/// Counts how a call ended. A late answer and a lost owner are part of a client's life; all else is an error.
fn outcome(called: Result<Reply, CallError>, counts: &mut Counts) -> Result<Option<Reply>, String> {
    match called {
        Ok(reply) => {
            counts.answered += 1;
            return Ok(Some(reply));
        }
        Err(CallError::Fault(Fault::DeadlineExceeded)) => counts.late += 1,
        Err(CallError::Fault(Fault::PeerLost(_))) => counts.lost += 1,
        Err(error) => return Err(error.to_string()),
    }
    Ok(None)
}

/// The rank that has a key.
fn owner(key: &str, ranks: usize) -> Rank {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    Rank((hasher.finish() % ranks as u64) as u32)
}

fn report(all: &[Option<Counts>], stopped: bool) {
    common::say!(
        "{:>4} {:>10} {:>6} {:>6} {:>10} {:>8}",
        "rank",
        "answered",
        "late",
        "lost",
        "verified",
        "keys"
    );
    for (rank, counts) in all.iter().enumerate() {
        match counts {
            Some(Counts { answered, late, lost, verified, keys }) => {
                common::say!("{rank:>4} {answered:>10} {late:>6} {lost:>6} {verified:>10} {keys:>8}");
            }
            None => common::say!("{rank:>4} was killed"),
        }
    }
    let verified: u64 = all.iter().flatten().map(|counts| counts.verified).sum();
    let how = if stopped { "stopped in order" } else { "finished" };
    common::say!("{how}: all {verified} keys that can be reached have what was acknowledged last");
}
