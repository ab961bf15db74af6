//! A thin communicator in the manner of MPI over the public API (`communicator.rs`), and a program that uses it.

#[path = "../common/mod.rs"]
mod common;
mod communicator;

use clap::Parser;
use common::{Result, share};
use communicator::{ANY_SOURCE, ANY_TAG, Communicator};
use posthaste::Reduce;

/// A program in the manner of MPI: passes messages by tag, splits, reduces, and checks what comes out.
#[derive(Parser)]
#[command(name = "communicator")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Intervals for the area of the circle
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    intervals: u32,
}

/// Tags of messages.
const TOKEN: u32 = 1;
const GREETING: u32 = 2;
const LAST: u32 = 3;

fn main() -> std::process::ExitCode {
    common::run(talk)
}

#[tokio::main(flavor = "current_thread")]
async fn talk(arguments: Arguments) -> Result<()> {
    let job = posthaste::join_or_local(arguments.ranks).await?;
    let world = Communicator::world(&job)?;
    job.barrier().await?;

    let token = ring(&world).await?;
    let order = by_tag(&world).await?;
    let area = pi(&world, u64::from(arguments.intervals)).await?;
    let halves = halves(&world).await?;

    world.barrier().await?;
    if world.rank() == 0 {
        common::say!("the token went round {} ranks and is {token}", world.size());
        common::say!("rank 0 received {order} greetings, the last one first");
        common::say!("pi is {area:.10}");
        common::say!("even and odd ranks add up to {} and {}", halves[0], halves[1]);
        common::say!("all of it is as expected");
    }
    Ok(job.leave().await?)
}

fn check(what: &str, is: bool) -> Result<()> {
    if is { Ok(()) } else { Err(format!("{what}: not as expected").into()) }
}

/// A token goes round; every rank adds its own number.
async fn ring(comm: &Communicator) -> Result<u64> {
    let (me, n) = (comm.rank(), comm.size());
    let (right, left) = ((me + 1) % n, (me + n - 1) % n);
    let mut token = vec![me as u64];
    for _ in 1..n {
        token = comm.sendrecv((right, &token), left, TOKEN).await?;
        token[0] += me as u64;
    }
    check("the token", token == [(n * (n - 1) / 2) as u64])?;
    Ok(token[0])
}

/// Everybody greets rank 0 and then says which message is the last. Rank 0 takes the last ones first.
async fn by_tag(comm: &Communicator) -> Result<usize> {
    let me = comm.rank() as u64;
    comm.send(0, GREETING, &[me; 3]).await?;
    comm.send::<u64>(0, LAST, &[]).await?;
    if me != 0 {
        return Ok(0);
    }
    for source in (0..comm.size()).rev() {
        let last = comm.recv::<u64>(Some(source), Some(LAST)).await?;
        check("a message without values", last.values.is_empty())?;
    }
    let mut seen = vec![false; comm.size()];
    for _ in 0..comm.size() {
        let greeting = comm.recv::<u64>(ANY_SOURCE, ANY_TAG).await?;
        check("a greeting", greeting.tag == GREETING && greeting.values == [greeting.source as u64; 3])?;
        seen[greeting.source] = true;
    }
    check("the greetings", seen.iter().all(|seen| *seen))?;
    Ok(seen.len())
}

/// The area of a circle by the midpoint rule, of which every rank adds up a part.
async fn pi(comm: &Communicator, intervals: u64) -> Result<f64> {
    // Rank 0 alone knows how many.
    let mut count = [if comm.rank() == 0 { intervals } else { 0 }];
    comm.bcast(0, &mut count).await?;
    let width = 1.0 / count[0] as f64;
    let area = |at: usize| 4.0 / (1.0 + ((at as f64 + 0.5) * width).powi(2)) * width;
    let part = share(count[0] as usize, comm.size(), comm.rank()).map(area).sum();
    let pi = comm.sum::<f64>(part).await?;
    // The error of the midpoint rule, and of the sum.
    check("pi", (pi - std::f64::consts::PI).abs() < width * width + 1e-9)?;
    Ok(pi)
}

/// Even and odd ranks add up their numbers apart from each other; all tell the other half through rank 0 of the whole.
async fn halves(comm: &Communicator) -> Result<Vec<u64>> {
    let me = comm.rank();
    let parity = me % 2;
    let Some(half) = comm.split(Some(parity as u32), (comm.size() - me) as u32).await? else {
        return Err("every rank named a colour".into());
    };
    // By the key, the last rank is the first.
    let first = (0..comm.size()).rfind(|rank| rank % 2 == parity).is_some_and(|last| last == me);
    check("the order of a half", (half.rank() == 0) == first)?;
    let sum = half.sum(me as u64).await?;
    // A message of the half is not received by the whole, whatever its tag.
    half.send(0, TOKEN, &[me as u64]).await?;
    if half.rank() == 0 {
        let mut senders = 0;
        for _ in 0..half.size() {
            senders += half.recv::<u64>(ANY_SOURCE, Some(TOKEN)).await?.values[0];
        }
        check("the messages of a half", senders == sum)?;
    }
    let mut sums = [0, 0];
    sums[parity] = sum;
    let sums = comm.allreduce(&sums, &Reduce::max()).await?;
    let expected = |parity: usize| (0..comm.size()).filter(|rank| rank % 2 == parity).sum::<usize>() as u64;
    check("the sums", sums == [expected(0), expected(1)])?;
    Ok(sums)
}
