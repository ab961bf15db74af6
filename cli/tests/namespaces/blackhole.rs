//! A route that swallows all packets in the midst of traffic, one way or both: every operation ends with the loss of the
//! peer, on both sides, when its host has been silent for as long as the settings say.

use crate::Namespaces;
use posthaste::{CallError, Fault, Message, Rank, Result, RmaError, Scope, SendError};
use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What is moved at a time: more than the system holds for a connection.
const LONG: usize = 16 << 20;
/// What is moved before the route is cut.
const ROUNDS: u32 = 5;
const SILENCE_MS: u64 = 2000;

/// Milliseconds of the clock that all processes share.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// One of two ranks, each on a host of its own. Rank 0 makes the traffic, or both do.
pub async fn rank(traffic: &str) -> Result<()> {
    let job = posthaste::join().await?;
    let (me, other) = (job.rank(), Rank(1 - job.rank().0));
    let sink = job.register("sink", |_: Message<'_>, _: &mut Scope<'_>| {})?;
    let echo = job.service_inline("echo", |message, _| Ok(message.to_bytes().into()))?;
    let never = job.service("never", |()| std::future::pending::<()>())?;
    let window = job.shmalloc::<u8>(LONG).await?;
    job.barrier().await?;

    let does = |what: &str| traffic == "all" || (traffic == what && me == Rank(0));
    let rounds = Cell::new(0u32);
    let awaited =
        ROUNDS * ["puts", "gets", "messages", "calls"].iter().filter(|what| does(what)).count() as u32;
    let round = || {
        rounds.set(rounds.get() + 1);
        if rounds.get() == awaited {
            println!("rank {me} is going");
        }
    };
    if awaited == 0 {
        println!("rank {me} is going");
    }
    let end = |fault: Fault| {
        assert_eq!(fault, Fault::PeerLost(other));
        println!("rank {me} was told at {} ms", now_ms());
    };
    let bytes = vec![7u8; LONG];
    let puts = async {
        while does("puts") {
            match window.put_slice(other, 0, &bytes).await {
                Ok(()) => round(),
                Err(RmaError::Fault(fault)) => return end(fault),
                Err(error) => panic!("{error}"),
            }
        }
    };
    let gets = async {
        while does("gets") {
            match window.get_slice(other, 0, LONG).await {
                Ok(_) => round(),
                Err(RmaError::Fault(fault)) => return end(fault),
                Err(error) => panic!("{error}"),
            }
        }
    };
    let messages = async {
        while does("messages") {
            match sink.send(other, bytes.clone()).await {
                Ok(()) => round(),
                Err(SendError::Fault(fault)) => return end(fault),
                Err(error) => panic!("{error}"),
            }
        }
    };
    let calls = async {
        while does("calls") {
            match echo.call_bytes(other, &bytes[..100]).await {
                Ok(_) => round(),
                Err(CallError::Fault(fault)) => return end(fault),
                Err(error) => panic!("{error}"),
            }
        }
    };
    let waits = async {
        match never.call(other, ()).await {
            Err(CallError::Fault(fault)) => end(fault),
            other => panic!("{other:?}"),
        }
    };
    tokio::join!(puts, gets, messages, calls, waits);
    job.leave().await
}

/// A launcher, which goes with this value, and its ranks with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            let pid = rustix::process::Pid::from_child(&self.0);
            // It may have ended in this moment.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = self.0.wait();
        }
    }
}

/// The ranks' traffic, and which of them cannot be heard from some moment on.
fn cut(test: &str, traffic: &str, silenced: &[usize]) {
    let Some(namespaces) = Namespaces::new(test, 1) else { return };
    let mut command = namespaces.job(&format!("cut {traffic}"));
    command.env("POSTHASTE_TCP_TIMEOUT", format!("{}", SILENCE_MS / 1000)).stdout(Stdio::piped());
    let mut job = Running(command.spawn().unwrap());
    let mut lines = BufReader::new(job.0.stdout.take().unwrap()).lines();
    let mut next = || lines.next().map(|line| line.unwrap());
    let mut going = 0;
    while going < 2 {
        let line = next().expect("the ranks get going");
        going += u32::from(line.ends_with(" is going"));
    }
    let start = now_ms();
    // Somewhere in the midst of it.
    std::thread::sleep(Duration::from_millis(start % 100));
    let at = now_ms();
    silenced.iter().for_each(|from| namespaces.swallow(*from));
    let mut told = [Vec::new(), Vec::new()];
    while let Some(line) = next() {
        let Some((who, when)) = line.split_once(" was told at ") else { continue };
        let when: u64 = when.trim_end_matches(" ms").parse().unwrap();
        told[usize::from(who.ends_with('1'))].push(when.saturating_sub(at));
    }
    let ended = job.0.wait().unwrap();
    assert!(ended.success(), "{ended}: it fails, or did not end in time");
    println!("{traffic}, {silenced:?} unheard: told after {told:?} ms");
    for (rank, told) in told.iter().enumerate() {
        let all = match traffic {
            "all" => 5,
            "nothing" => 1,
            _ => 2 - rank,
        };
        assert_eq!(told.len(), all, "rank {rank}: every operation ends once");
        // A moment without an answer is no silence. How soon it is told is reported, not asserted.
        assert!(told.iter().all(|time| *time > SILENCE_MS / 2), "rank {rank}: {told:?}");
    }
}

#[test]
fn fault_a_blackhole_amid_all_traffic_is_a_loss_on_both_sides() {
    cut("fault_a_blackhole_amid_all_traffic_is_a_loss_on_both_sides", "all", &[0, 1]);
}

#[test]
fn fault_a_blackhole_amid_long_puts_is_a_loss_on_both_sides() {
    let test = "fault_a_blackhole_amid_long_puts_is_a_loss_on_both_sides";
    cut(test, "puts", &[0]);
    cut(test, "puts", &[1]);
}

#[test]
fn fault_a_blackhole_amid_long_gets_is_a_loss_on_both_sides() {
    let test = "fault_a_blackhole_amid_long_gets_is_a_loss_on_both_sides";
    cut(test, "gets", &[0]);
    cut(test, "gets", &[1]);
}

#[test]
fn fault_a_blackhole_amid_long_messages_is_a_loss_on_both_sides() {
    let test = "fault_a_blackhole_amid_long_messages_is_a_loss_on_both_sides";
    cut(test, "messages", &[0]);
    cut(test, "messages", &[0, 1]);
}

#[test]
fn fault_a_blackhole_amid_calls_is_a_loss_on_both_sides() {
    let test = "fault_a_blackhole_amid_calls_is_a_loss_on_both_sides";
    cut(test, "calls", &[1]);
    cut(test, "nothing", &[0, 1]);
}
