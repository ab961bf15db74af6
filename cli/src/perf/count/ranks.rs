//! The ranks' side: what is counted, and what else must be there for it.

use super::Count;
use crate::say::say;
use posthaste::{
    ActiveMessage, Buffer, Bytes, ConnectionManager, ContextId, Counter, Job, Message, Part, Rank, Result,
    Scope,
};
use rustix::process::{PTracer, Pid, Signal, getpid, kill_process, set_ptracer};
use std::future::Future;
use std::hint::black_box;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// How often an operation is carried out before it is counted, and while it is.
const WARM: usize = 2_000;
const COUNTED: usize = 64;
/// Operations of a recorded pattern.
const RECORDED: usize = 64;

/// Runs one rank; the exit code.
pub fn rank_main(name: &str) -> i32 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.map(|runtime| runtime.block_on(run(name))) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("{error}");
            1
        }
        Err(error) => {
            eprintln!("{error}");
            1
        }
    }
}

async fn run(name: &str) -> Result<()> {
    let job = posthaste::join().await?;
    operation(&job, name).await?;
    job.leave().await
}

async fn operation(job: &Job, name: &str) -> Result<()> {
    let peer = job.rank().next(job.size());
    let window = job.shmalloc::<u64>(2 * RECORDED).await?;
    let arrived = job.counter();
    let count = arrived.clone();
    let message = job.register("message", move |m: Message, _: &mut Scope| {
        black_box(m.sum_words());
        count.add(1);
    })?;
    let all_done = job.counter();
    let count = all_done.clone();
    let done = job.register("done", move |_: Message, _: &mut Scope| count.add(1))?;
    let echo = job.service_inline("echo", |m: Message, _: &mut Scope| Ok(Buffer::copy(&m.bytes())))?;
    let source = job.region(RECORDED * 8).await?;
    // No two lie side by side: those would be one.
    let puts = job.record(|r| {
        (0..RECORDED).try_for_each(|at| window.record_put_from(r, peer, 2 * at, &source, at as u64 * 8, 8))
    });
    let puts = puts.await?;
    let sends = job.record(|r| {
        (0..RECORDED).try_for_each(|at| r.send(&message, peer, source.slice(at * 8..at * 8 + 8)))
    });
    let sends = sends.await?;
    let long = Bytes::from(vec![1; 1024]);
    let connection = ConnectionManager::new(1).open().await;
    let id = connection.id();
    let parts = [Part { source: Rank(0), offset: 0, len: 8 }];
    let word = 7u64.to_ne_bytes();
    let others: Vec<Rank> = job.ranks().filter(|rank| *rank != job.rank()).collect();
    job.barrier().await?;
    if job.rank() == Rank(0) {
        let mut tracer = Tracer::start()?;
        let counted = match name {
            "put" => tracer.count(1, || async { Ok(window.put(peer, 1, 7).await?) }).await?,
            "get" => {
                tracer.count(1, || async { Ok(black_box(window.get(peer, 1).await).map(drop)?) }).await?
            }
            "fetch_add" => {
                tracer
                    .count(1, || async { Ok(black_box(window.fetch_add(peer, 1, 1).await).map(drop)?) })
                    .await?
            }
            "send" => tracer.count(1, || async { Ok(message.send(peer, word).await?) }).await?,
            "send_1k" => tracer.count(1, || async { Ok(message.send(peer, long.clone()).await?) }).await?,
            "message" => tracer.count(1, || handled(&message, &arrived, peer, word)).await?,
            "message_1k" => tracer.count(1, || handled(&message, &arrived, peer, long.clone())).await?,
            "call" => tracer.count(1, || async { Ok(echo.call_bytes(peer, word).await.map(drop)?) }).await?,
            "multicast" => {
                let multicast = || async { Ok(message.multicast(others.iter().copied(), word).await?) };
                tracer.count(1, multicast).await?
            }
            "many_to_many" => {
                let own: Vec<_> = others.iter().map(|to| (*to, Bytes::copy_from_slice(&word))).collect();
                let many = || async { Ok(job.many_to_many().send(id, own.iter().cloned()).await?) };
                tracer.count(1, many).await?
            }
            "replayed_put" => tracer.count(RECORDED, || async { Ok(puts.replay().await?) }).await?,
            "replayed_send" => tracer.count(RECORDED, || async { Ok(sends.replay().await?) }).await?,
            _ => return Err(io::Error::other("no such operation").into()),
        };
        say(serde_json::to_string(&counted).map_err(io::Error::other)?);
        done.multicast(others.iter().copied(), word).await?;
    } else {
        // A peer that slept between two messages, which take a thousand times as long as usual, would have to be woken.
        let context =
            job.own_context(ContextId(0)).ok_or_else(|| io::Error::other("the context is owned"))?;
        let receives = (0..WARM + COUNTED).map(|_| job.many_to_many().receive(id, 8, &parts));
        let _receives: Vec<_> = receives.collect::<std::result::Result<_, _>>()?;
        while all_done.value() == 0 {
            context.advance();
        }
    }
    job.barrier().await?;
    window.free().await?;
    Ok(())
}

/// Sends a message, and waits until its handler has counted it.
async fn handled(
    message: &ActiveMessage,
    arrived: &Counter,
    to: Rank,
    payload: impl Into<Buffer>,
) -> Result<()> {
    let before = arrived.value();
    message.send(to, payload).await?;
    arrived.reach(before + 1).await;
    Ok(())
}

/// The process that counts this one's instructions.
struct Tracer {
    process: Child,
    said: BufReader<ChildStdout>,
}

impl Tracer {
    fn start() -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("count-tracer").arg(getpid().as_raw_nonzero().to_string());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        // Where only ancestors may look at a process, this one allows it; elsewhere there is no such thing.
        let _ = set_ptracer(PTracer::ProcessID(Pid::from_child(&process)));
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (mut input, output) = pipes.ok_or_else(|| io::Error::other("a pipe is missing"))?;
        input.write_all(b"\n")?;
        let mut tracer = Self { process, said: BufReader::new(output) };
        match tracer.hear()?.as_str() {
            "ready" => Ok(tracer),
            _ => {
                let ended = tracer.process.wait()?;
                Err(io::Error::other(format!(
                    "instructions cannot be counted here: the tracer ended with {ended}"
                )))
            }
        }
    }

    fn hear(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn mark() -> io::Result<()> {
        Ok(kill_process(getpid(), Signal::URG)?)
    }

    /// What is executed until the next mark.
    fn counted(&mut self) -> io::Result<Count> {
        serde_json::from_str(&self.hear()?).map_err(io::Error::other)
    }

    /// Counts what carrying out an operation costs, of which each does `parts` things.
    async fn count<O: Future<Output = Result<()>>>(
        &mut self,
        parts: usize,
        operation: impl Fn() -> O,
    ) -> Result<Count> {
        for _ in 0..WARM {
            operation().await?;
        }
        // A turn of the task that ended between the marks would be counted as a part of the operations.
        tokio::task::yield_now().await;
        Self::mark()?;
        Self::mark()?;
        let marks = self.counted()?;
        Self::mark()?;
        for _ in 0..COUNTED {
            operation().await?;
        }
        Self::mark()?;
        let counted = self.counted()?;
        let each = |all: f64, marks: f64| (all - marks) / (COUNTED * parts) as f64;
        Ok(Count {
            instructions: each(counted.instructions, marks.instructions),
            locked: each(counted.locked, marks.locked),
            system_calls: each(counted.system_calls, marks.system_calls),
        })
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // It would follow this process to its end, and nothing is counted any more.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
