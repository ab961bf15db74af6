//! The rank that serves the news of the others is killed, and another serves them from then on.

use super::cut::Cut;
use super::{GO, Heard, ROLE, be_a_rank, command, ended, port, text, told_under, torch};
use posthaste::{Fault, Rank};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How many ranks are killed while they serve the news, one after the other.
const DEATHS: &str = "POSTHASTE_TEST_DEATHS";

/// For how many seconds the rank is stopped that is the next to serve the news.
const STOPPED: &str = "POSTHASTE_TEST_STOPPED";

/// What this rank logs: it is printed, and it is killed when it has said enough.
#[derive(Clone, Copy)]
struct Log;

/// Ranks that stand by, as the one that serves has logged.
static STANDBYS: AtomicU32 = AtomicU32::new(0);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let line = String::from_utf8_lossy(bytes);
        let deaths: u32 = std::env::var(DEATHS).map_or(0, |deaths| deaths.parse().unwrap());
        if std::env::var(STOPPED).is_ok() {
            // The first that is asked, and not one that a later server asks.
            if let Some((_, rank)) = line.split_once("stands by to serve the news rank=")
                && let go = std::env::var(GO).unwrap()
                && !std::path::Path::new(&go).exists()
            {
                std::fs::write(go, rank.split_whitespace().next().unwrap()).unwrap();
            }
        } else if line.contains("stands by to serve the news rank=") && deaths > 0 {
            // The first server, once its successors are known.
            if STANDBYS.fetch_add(1, Ordering::SeqCst) == 2 {
                is_killed();
            }
        } else if let Some((_, generation)) = line.split_once("from here on rank=") {
            print!("{line}");
            let generation = generation.split_once("generation=").unwrap().1.trim().parse::<u32>().unwrap();
            if generation < deaths {
                is_killed();
            }
        } else if ["where the ranks met", "have met before", "stands by to serve the news"]
            .iter()
            .any(|words| line.contains(words))
        {
            print!("{line}");
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Kills this process, in a moment: what it was about to say is said.
fn is_killed() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(200));
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    });
}

fn log() {
    let shown = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
    shown.with_writer(|| Log).init();
}

/// Those that serve the news are killed; then the last of those that live is, and the others, which never met it, are told.
pub async fn mortal_rank() -> posthaste::Result<()> {
    log();
    let job = posthaste::join().await?;
    let mut heard = Heard::of(&job);
    let word = job.register("word", |_, _| {})?;
    let (me, size) = (job.rank(), job.size() as u32);
    let deaths: usize = std::env::var(DEATHS).unwrap().parse().unwrap();
    let mut dead = BTreeSet::new();
    while dead.len() < deaths {
        match heard.next(30).await {
            Fault::PeerLost(rank) => dead.insert(rank.0),
            other => panic!("nobody leaves: {other:?}"),
        };
    }
    let last = Rank((0..size).rev().find(|rank| !dead.contains(rank)).unwrap());
    if me == last {
        is_killed();
        std::future::pending::<()>().await;
    }
    // Others that have heard it may leave meanwhile.
    while heard.next(30).await != Fault::PeerLost(last) {}
    let sent = tokio::time::timeout(Duration::from_secs(20), word.send(last, "late")).await;
    let error = sent.expect("it is known to be dead").unwrap_err();
    println!("rank {me} cannot send: {}", error == Fault::PeerLost(last).into());
    job.leave().await
}

/// The next to serve the news is stopped when rank 0 leaves; all hear of the end of one that they never met.
pub async fn stopped_rank() -> posthaste::Result<()> {
    log();
    let job = posthaste::join().await?;
    let mut heard = Heard::of(&job);
    // The file is written in the moment in which one stands by.
    let go = std::env::var(GO).unwrap();
    let next: u32 = loop {
        match std::fs::read_to_string(&go).unwrap_or_default().parse() {
            Ok(next) => break next,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (me, stopped) = (job.rank(), std::env::var(STOPPED).unwrap());
    let dies = Rank(if next == 5 { 4 } else { 5 });
    if me == Rank(0) {
        tokio::time::sleep(Duration::from_millis(500)).await;
        return job.leave().await;
    }
    if me == Rank(next) {
        let go_on = format!("sleep {stopped}; kill -CONT {}", std::process::id());
        let mut other = Command::new("sh").args(["-c", &go_on]).spawn().unwrap();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP).unwrap();
        other.wait().unwrap();
    }
    if me == dies {
        // Behind the end of rank 0, which waits for ten seconds.
        tokio::time::sleep(Duration::from_secs(14)).await;
        std::process::exit(0);
    }
    while heard.next(30).await != Fault::PeerLost(dies) {}
    // All have heard it before any of them leaves: who serves the news, too.
    std::fs::write(format!("{go}.{}", me.0), "").unwrap();
    for rank in (1..6).filter(|rank| *rank != dies.0) {
        while !std::path::Path::new(&format!("{go}.{rank}")).exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    job.leave().await
}

/// What survivors of such a job say; those killed say nothing of it.
fn all_told(outputs: &str, size: u32, deaths: u32) {
    let told = (0..size).filter(|rank| outputs.contains(&format!("rank {rank} cannot send: true")));
    let told = told.count() as u32;
    assert_eq!(told, size - deaths - 1, "{outputs}");
    let serving = format!("generation={deaths}");
    assert!(outputs.contains(&serving), "the last server is of {serving}:\n{outputs}");
}

fn mortals(test: &str, size: u32, deaths: u32) {
    let outputs = super::job(test, size, |_, command| {
        command.env(ROLE, "mortal").env("POSTHASTE_DEVICE", "tcp").env(DEATHS, deaths.to_string());
    });
    let killed = outputs.iter().filter(|output| output.status.code().is_none()).count() as u32;
    let all: String = outputs.iter().map(text).collect();
    assert_eq!(killed, deaths + 1, "{all}");
    all_told(&all, size, deaths);
}

#[test]
fn fault_news_go_on_when_the_rank_that_serves_them_is_killed() {
    be_a_rank();
    mortals("succession::fault_news_go_on_when_the_rank_that_serves_them_is_killed", 6, 1);
}

#[test]
fn fault_news_go_on_when_two_that_serve_them_are_killed_one_after_the_other() {
    be_a_rank();
    mortals("succession::fault_news_go_on_when_two_that_serve_them_are_killed_one_after_the_other", 7, 2);
}

/// The same under a launcher that goes on when a rank is killed, if it is installed. That of MPICH ends the others then.
fn mortals_under(launcher: &str, arguments: &[&str], mut rank: Command) {
    rank.env(ROLE, "mortal").env("POSTHASTE_DEVICE", "tcp").env(DEATHS, "1");
    if let Some(output) = told_under(launcher, arguments, rank) {
        all_told(&text(&output), 6, 1);
    }
}

#[test]
fn fault_news_go_on_under_open_mpi() {
    be_a_rank();
    let arguments = ["--allow-run-as-root", "--oversubscribe", "--enable-recovery", "-n", "6"];
    mortals_under("mpirun.openmpi", &arguments, command("succession::fault_news_go_on_under_open_mpi"));
}

/// Ranks 0, which serves, and 4 are killed and started again; the others go on until the file is there that says so.
pub async fn revenant_rank() -> posthaste::Result<()> {
    log();
    let job = posthaste::join().await?;
    let mine = job.incarnation();
    let who = job.service("who", move |()| async move { mine })?;
    println!("rank {} of incarnation {mine} is there", job.rank());
    let again = |rank: Rank| u32::from([0, 4].contains(&rank.0));
    for to in job.ranks().filter(|rank| again(*rank) > 0 && (mine == 0 || *rank != job.rank())) {
        if mine == 0 && again(job.rank()) > 0 {
            // It is to be killed.
            std::future::pending::<()>().await;
        }
        if mine == 0 {
            assert_eq!(job.peer_restarted(to, 0).await?, 1);
        }
    }
    // Those that are started again may not know of each other yet, nor be known.
    for to in job.ranks() {
        let until = Instant::now() + Duration::from_secs(30);
        while !matches!(who.call(to, ()).await, Ok(incarnation) if incarnation == again(to)) {
            assert!(Instant::now() < until, "rank {to} does not answer as it should");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    println!("rank {} of incarnation {mine} has met all", job.rank());
    let go = std::env::var(GO).unwrap();
    while !std::path::Path::new(&go).exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    job.leave().await
}

/// A rank whose words are read as they come.
struct Watched {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Watched {
    fn start(mut command: Command, of_all: Arc<Mutex<String>>) -> Self {
        let mut child = command.stderr(Stdio::inherit()).spawn().unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let (mut words, all) = (child.stdout.take().unwrap(), said.clone());
        std::thread::spawn(move || {
            let mut piece = [0; 512];
            while let Ok(count @ 1..) = words.read(&mut piece) {
                let piece = String::from_utf8_lossy(&piece[..count]);
                all.lock().unwrap().push_str(&piece);
                of_all.lock().unwrap().push_str(&piece);
            }
        });
        Self { child, said }
    }

    fn has_said(&self, what: &str) -> bool {
        self.said.lock().unwrap().contains(what)
    }
}

#[test]
fn fault_ranks_come_again_when_another_serves_the_news() {
    be_a_rank();
    revenants("succession::fault_ranks_come_again_when_another_serves_the_news", false);
}

/// As it also is where whoever serves the news in its place is on another host, and can never have the place.
#[test]
fn fault_rank_0_comes_again_and_serves_the_place_before_another_has_it() {
    be_a_rank();
    revenants("succession::fault_rank_0_comes_again_and_serves_the_place_before_another_has_it", true);
}

/// Whether the next process of rank 0 is there before the others know that the one before is gone.
fn revenants(test: &str, early: bool) {
    let port = port();
    let go = std::env::temp_dir().join(format!("revenant-go-{early}-{}", std::process::id()));
    let words = Arc::new(Mutex::new(String::new()));
    let started = Mutex::new(Vec::new());
    let start = |rank| {
        let mut command = torch(test, rank, 5, port);
        command.env(ROLE, "revenant").env(GO, &go).env("POSTHASTE_DEVICE", "tcp");
        let watched = Watched::start(command, words.clone());
        started.lock().unwrap().push(rustix::process::Pid::from_child(&watched.child));
        watched
    };
    let mut ranks: Vec<Watched> = (0..5).map(start).collect();
    let said = || words.lock().unwrap().clone();
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let end = Instant::now() + Duration::from_secs(60);
        while !holds() {
            if Instant::now() >= end {
                // Also those that are stopped. Their numbers are theirs: nobody has waited for them.
                for pid in &started.lock().unwrap()[..] {
                    let _ = rustix::process::kill_process(*pid, rustix::process::Signal::KILL);
                }
                panic!("never: {what}\n{}", said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    until("all are there", &|| ranks.iter().all(|rank| rank.has_said("is there")));
    until("three stand by", &|| said().matches("stands by to serve the news rank=").count() >= 3);
    // And know of each other.
    std::thread::sleep(Duration::from_secs(2));
    let survivors = |ranks: &[Watched], signal| {
        for rank in &ranks[1..4] {
            let pid = rustix::process::Pid::from_child(&rank.child);
            rustix::process::kill_process(pid, signal).unwrap();
        }
    };
    if early {
        survivors(&ranks, rustix::process::Signal::STOP);
    }
    let kill = |rank: &mut Watched| {
        rank.child.kill().unwrap();
        started.lock().unwrap().retain(|pid| *pid != rustix::process::Pid::from_child(&rank.child));
        rank.child.wait().unwrap();
    };
    for killed in [0, 4] {
        kill(&mut ranks[killed]);
    }
    if early {
        ranks[0] = start(0);
        until("rank 0 serves", &|| std::net::TcpStream::connect(("127.0.0.1", port + 1)).is_ok());
        survivors(&ranks, rustix::process::Signal::CONT);
        until("it hears of the others", &|| ranks[0].has_said("the other ranks have met before"));
    } else {
        let reclaimed = "serves the news where the ranks met";
        until("another serves", &|| ranks.iter().any(|rank| rank.has_said(reclaimed)));
        ranks[0] = start(0);
    }
    ranks[4] = start(4);
    until("all have met", &|| ranks.iter().all(|rank| rank.has_said("has met all")));
    if early {
        // Those that came again are the last that are left, and serve where all have met in the first place.
        ranks[1..4].iter_mut().for_each(kill);
        let there = format!("place=127.0.0.1:{}", port + 1);
        until("one serves there", &|| [0, 4].iter().any(|rank| ranks[*rank].has_said(&there)));
    }
    std::fs::write(&go, "go").unwrap();
    let said: Vec<_> = ranks.iter().map(|rank| rank.said.clone()).collect();
    let outputs: Vec<Output> = ended(ranks.into_iter().map(|rank| rank.child).collect());
    std::fs::remove_file(&go).unwrap();
    for (rank, (output, said)) in outputs.iter().zip(said).enumerate() {
        if early && (1..4).contains(&rank) {
            continue;
        }
        let incarnation = u32::from([0, 4].contains(&rank));
        let expected = format!("rank {rank} of incarnation {incarnation} has met all");
        let said = said.lock().unwrap();
        assert!(output.status.success() && said.contains(&expected), "{expected}:\n{said}{}", text(output));
    }
}

/// The last rank is killed and started again, and says nothing to the others: they hear of it where the news are served, and call it.
pub async fn returning_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    let (mine, asked) = (job.incarnation(), job.counter());
    let count = asked.clone();
    let who = job.service("who", move |()| {
        count.add(1);
        async move { mine }
    })?;
    let last = Rank(job.size() as u32 - 1);
    println!("rank {} of incarnation {mine} is there", job.rank());
    if job.rank() != last {
        let incarnation = job.peer_restarted(last, 0).await?;
        assert_eq!(who.call(last, ()).await?, incarnation);
    } else {
        // The first is to be killed.
        asked.reach(job.size() as u64 - 1).await;
    }
    println!("rank {} has met all", job.rank());
    // All have, before any leaves.
    let go = std::env::var(GO).unwrap();
    while !std::path::Path::new(&go).exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    job.leave().await
}

/// The connection ends in which a rank says that it is there again, as if whoever serves the news had ended before it heard that.
#[test]
fn fault_a_rank_that_nobody_heard_come_again_comes_once_more() {
    be_a_rank();
    let (test, port) = ("succession::fault_a_rank_that_nobody_heard_come_again_comes_once_more", port());
    let go = std::env::temp_dir().join(format!("returning-go-{}", std::process::id()));
    let words = Arc::new(Mutex::new(String::new()));
    let start = |rank, place: Option<std::net::SocketAddr>| {
        let mut command = torch(test, rank, 3, port);
        command.env(ROLE, "returning").env(GO, &go).env("POSTHASTE_DEVICE", "tcp");
        command.envs(place.map(|place| ("POSTHASTE_RENDEZVOUS", place.to_string())));
        Watched::start(command, words.clone())
    };
    let mut ranks: Vec<Watched> = (0..3).map(|rank| start(rank, None)).collect();
    let all_say = |ranks: &mut [Watched], what: &str| {
        let end = Instant::now() + Duration::from_secs(30);
        while !ranks.iter().all(|rank| rank.has_said(what)) {
            if Instant::now() >= end {
                ranks.iter_mut().for_each(|rank| rank.child.kill().unwrap());
                panic!("not all say {what}: {}", words.lock().unwrap());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    all_say(&mut ranks, "is there");
    ranks[2].child.kill().unwrap();
    ranks[2].child.wait().unwrap();
    // Its first message and its proof of the key, and the first byte of what it says behind them.
    let cut = Cut::new(([127, 0, 0, 1], port + 1).into(), 123, usize::MAX);
    ranks[2] = start(2, Some(cut.address));
    all_say(&mut ranks, "has met all");
    std::fs::write(&go, "go").unwrap();
    let outputs = ended(ranks.into_iter().map(|rank| rank.child).collect());
    std::fs::remove_file(&go).unwrap();
    for output in outputs {
        assert!(output.status.success(), "{}{}", words.lock().unwrap(), text(&output));
    }
}

fn stopped(test: &str, seconds: u64) {
    let go = std::env::temp_dir().join(format!("stopped-{seconds}-{}", std::process::id()));
    let outputs = super::job(test, 6, |_, command| {
        command.env(ROLE, "stopped").env("POSTHASTE_DEVICE", "tcp");
        command.env(STOPPED, seconds.to_string()).env(GO, &go);
    });
    let next: u32 = std::fs::read_to_string(&go).unwrap().parse().unwrap();
    std::fs::remove_file(&go).unwrap();
    for rank in 1..6 {
        let _heard = std::fs::remove_file(format!("{}.{rank}", go.display()));
    }
    let dies = if next == 5 { 4 } else { 5 };
    for rank in (1..6).filter(|rank| *rank != dies) {
        let (expected, output) =
            (format!("rank {rank} heard PeerLost(Rank({dies}))"), text(&outputs[rank as usize]));
        assert!(
            outputs[rank as usize].status.success() && output.contains(&expected),
            "{expected}:\n{output}"
        );
        for living in (1..6).filter(|living| *living != dies) {
            assert!(!output.contains(&format!("PeerLost(Rank({living}))")), "it lives:\n{output}");
        }
    }
}

#[test]
fn fault_news_go_on_when_whoever_is_to_serve_them_next_is_stopped() {
    be_a_rank();
    stopped("succession::fault_news_go_on_when_whoever_is_to_serve_them_next_is_stopped", 4);
}

#[test]
fn fault_news_go_on_without_whoever_was_to_serve_them_next() {
    be_a_rank();
    stopped("succession::fault_news_go_on_without_whoever_was_to_serve_them_next", 20);
}
