//! Ranks that were started by somebody else than this library find each other, and become one job.
//!
//! Each test starts its own executable some times over, with the environment that a launcher would set, or through a
//! launcher where one is installed; in those processes the test is the body of a rank.

#[allow(dead_code, reason = "other tests cut more")]
#[path = "../../launch/tests/common/cut.rs"]
mod cut;
#[path = "../support/fork.rs"]
mod fork;
mod hosts;
mod kubernetes;
mod sequels;
#[path = "../../launch/tests/slurm/mod.rs"]
mod slurm;
mod succession;

use posthaste::{Job, Rank};
use std::ffi::OsStr;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Set in the processes that are ranks.
const ROLE: &str = "POSTHASTE_TEST_ROLE";
const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// Whether this process is a rank; then it is one, and does not come back.
fn be_a_rank() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ended = match std::env::var(ROLE).as_deref() {
        Ok("forsaken") => runtime.block_on(forsaken_rank()),
        Ok("orphan") => runtime.block_on(orphan_rank()),
        Ok("deaf") => runtime.block_on(deaf_rank()),
        Ok("stopped") => runtime.block_on(succession::stopped_rank()),
        Ok("parent") => runtime.block_on(parent_rank()),
        Ok("mortal") => runtime.block_on(succession::mortal_rank()),
        Ok("revenant") => runtime.block_on(succession::revenant_rank()),
        Ok("returning") => runtime.block_on(succession::returning_rank()),
        // Not like others: nothing but the end of its input may end it.
        Ok("agent") => std::process::exit(posthaste_launch::run_agent()),
        Ok("late") => hosts::late(),
        Ok("first") => runtime.block_on(sequels::first_rank()),
        Ok("hasty") => sequels::hasty_rank(&runtime),
        Ok("twin") => runtime.block_on(sequels::twin_rank()),
        Ok("leaver") => runtime.block_on(sequels::leaver_rank()),
        Ok("keeper") => runtime.block_on(sequels::keeper_rank()),
        Ok("moved") => moved_rank(runtime),
        Ok("head") => hosts::head(),
        Ok("wanderer") => runtime.block_on(hosts::wanderer_rank()),
        Ok("phoenix") => runtime.block_on(phoenix_rank()),
        _ => runtime.block_on(rank()),
    };
    match ended {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            println!("not joined: {error}");
            std::process::exit(3);
        }
    }
}

/// A little of everything: messages around the ring, puts, gets, calls, and who is reached how.
async fn rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    let (me, n) = (job.rank(), job.size());
    let twice = job.service("twice", |number: u64| async move { 2 * number })?;
    let window = job.shmalloc::<u64>(n).await?;
    job.barrier().await?;
    for to in job.ranks() {
        assert_eq!(twice.call(to, u64::from(to.0)).await?, 2 * u64::from(to.0));
        window.put(to, me.index(), u64::from(me.0) + 1).await?;
    }
    job.barrier().await?;
    assert_eq!(window.to_vec(), (1..=n as u64).collect::<Vec<_>>());
    assert_eq!(window.get(me.next(n), 0).await?, 1);
    println!("rank {me} of {n} by {}", ways(&job));
    job.barrier().await?;
    window.free().await?;
    job.leave().await
}

/// Rank 0, which serves the meeting, leaves at once; the others, which nobody talks to, hear of it.
async fn forsaken_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    let mut heard = Heard::of(&job);
    if job.rank() != Rank(0) {
        heard.next(40).await;
    }
    job.leave().await
}

/// The ranks that serve the news leave one after the other; the others, which have never met each other, go on being told.
async fn orphan_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    let mut heard = Heard::of(&job);
    let me = job.rank();
    // Rank 0 leaves at once; 1 when it has heard that, and 2 then; 3 dies when all of them have left.
    let leave_before = if me.0 < 3 {
        me.0
    } else if me == Rank(3) {
        3
    } else {
        4
    };
    for _ in 0..leave_before {
        heard.next(60).await;
    }
    // So that whoever left has not served the others only because they left together.
    tokio::time::sleep(Duration::from_millis(500)).await;
    if me == Rank(3) {
        // Without a word to anybody.
        std::process::exit(0);
    }
    job.leave().await
}

/// What a rank hears of the others.
struct Heard {
    me: Rank,
    faults: tokio::sync::mpsc::UnboundedReceiver<posthaste::Fault>,
}

impl Heard {
    fn of(job: &posthaste::Job) -> Heard {
        let (sender, faults) = tokio::sync::mpsc::unbounded_channel();
        job.on_error(move |fault| {
            // Whoever has heard enough listens no more.
            let _ = sender.send(fault);
        });
        Heard { me: job.rank(), faults }
    }

    /// The next that it hears, in so many seconds at most.
    async fn next(&mut self, within: u64) -> posthaste::Fault {
        let heard = tokio::time::timeout(Duration::from_secs(within), self.faults.recv()).await;
        let fault = heard.expect("news").expect("a fault");
        println!("rank {} heard {fault:?}", self.me);
        fault
    }
}

/// Rank 0, which serves the news, leaves while rank 4 is busy for longer than it waits for anybody; rank 3 dies then.
async fn deaf_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    let mut heard = Heard::of(&job);
    match job.rank().0 {
        0 => return job.leave().await,
        3 => {
            tokio::time::sleep(Duration::from_secs(13)).await;
            std::process::exit(0);
        }
        4 => std::thread::sleep(Duration::from_millis(11_500)),
        _ => {}
    }
    // Others may leave before they are heard to have heard it.
    let (mut closed, mut lost) = (false, false);
    while !(closed && lost) {
        let fault = heard.next(60).await;
        closed |= fault == posthaste::Fault::PeerClosed(Rank(0));
        lost |= fault == posthaste::Fault::PeerLost(Rank(3));
    }
    job.leave().await
}

/// Leaves in another runtime than that in which it has joined, which has ended by then.
fn moved_rank(runtime: tokio::runtime::Runtime) -> posthaste::Result<()> {
    let job = runtime.block_on(async {
        let job = posthaste::join().await?;
        job.barrier().await?;
        Ok::<_, posthaste::Error>(job)
    })?;
    drop(runtime);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let left = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(30), job.leave()).await });
    println!("left: {}", left.is_ok());
    Ok(())
}

/// Starts a program that joins, too, as any program of this library may be.
async fn parent_rank() -> posthaste::Result<()> {
    let job = posthaste::join().await?;
    job.barrier().await?;
    let own = std::env::current_exe().unwrap();
    let child = Command::new(own).args(std::env::args().skip(1)).env(ROLE, "rank").output().unwrap();
    println!("rank {} of pid {} has a child: {}", job.rank(), std::process::id(), text(&child));
    job.barrier().await?;
    job.leave().await
}

/// Rank 1 dies and comes again; the others go on until the file is there that says so.
async fn phoenix_rank() -> posthaste::Result<()> {
    const ONE: Rank = Rank(1);
    let job = posthaste::join().await?;
    let mine = job.incarnation();
    let who = job.service("who", move |()| async move { mine })?;
    let past = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = past.clone();
    let tell = job.register("past", move |_: posthaste::Message, _: &mut posthaste::Scope| {
        count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    })?;
    if mine == 0 {
        job.barrier().await?;
        if job.rank() == ONE {
            // The others' barrier must not end with its death.
            while past.load(std::sync::atomic::Ordering::SeqCst) < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            println!("rank {ONE} is there");
            std::future::pending::<()>().await;
        }
        tell.send(ONE, "").await?;
        assert_eq!(job.peer_restarted(ONE, 0).await?, 1);
        // Known of, which the connection is not.
        while who.call(ONE, ()).await? != 1 {}
    }
    for to in job.ranks() {
        assert_eq!(who.call(to, ()).await?, u32::from(to == ONE));
    }
    let ranks: Vec<Rank> = job.ranks().collect();
    let group = job.collectives().subset(&ranks).await?;
    group.barrier().await?;
    println!("rank {} of incarnation {mine} has met all", job.rank());
    let go = std::env::var(GO).unwrap();
    while !std::path::Path::new(&go).exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    group.barrier().await?;
    job.leave().await
}

/// Names a file.
const GO: &str = "POSTHASTE_TEST_GO";

/// By which device each rank is reached, in order.
fn ways(job: &Job) -> String {
    job.ranks().map(|rank| job.caps_of(rank).name).collect::<Vec<_>>().join(",")
}

/// The command that is a rank; `test` is the path of the test function.
fn command(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, "rank").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // What this machine's launchers might have set for the tests themselves.
    for (name, _) in std::env::vars() {
        let own = ["POSTHASTE_", "PMI", "OMPI_", "SLURM_", "MASTER_"].iter().any(|own| name.starts_with(own));
        if own || ["RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX"].contains(&&*name) {
            command.env_remove(name);
        }
    }
    command.env(ROLE, "rank");
    command
}

/// A rank's command behind that of a program which starts it.
fn started_by<A: AsRef<OsStr>>(program: &str, arguments: &[A], rank: &Command) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).arg(rank.get_program()).args(rank.get_args());
    for (name, value) in rank.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A port that is free, and so is the next one, which torchrun's variables lead to: below those that the system gives to
/// whoever asks for any, and apart from those of tests in other processes.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed) * 2;
        let place = (std::process::id() as u64 * 37 * 2 + u64::from(step)) % 20_000;
        let port = 10_000 + place as u16;
        if [port, port + 1].iter().all(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()) {
            return port;
        }
    }
}

/// A rank with torchrun's variables.
fn torch(test: &str, rank: u32, size: u32, port: u16) -> Command {
    let mut command = command(test);
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("POSTHASTE_KEY", KEY);
    command
}

/// Waits for the processes, no longer than a test may take.
fn ended(children: Vec<Child>) -> Vec<Output> {
    let until = Instant::now() + Duration::from_secs(90);
    let end = |mut child: Child| {
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > until {
                let _ = child.kill();
                let output = child.wait_with_output().unwrap();
                panic!("a rank does not end:\n{}", text(&output));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    };
    children.into_iter().map(end).collect()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// All ranks of a job with these changes to their commands.
fn job(test: &str, size: u32, change: impl Fn(u32, &mut Command)) -> Vec<Output> {
    let port = port();
    // Rank 0 last: the others wait for who serves.
    let children = (0..size).rev().map(|rank| {
        let mut command = torch(test, rank, size, port);
        change(rank, &mut command);
        command.spawn().unwrap()
    });
    let mut outputs = ended(children.collect());
    outputs.reverse();
    outputs
}

/// All have joined, and reach each other by these ways.
fn all_joined(outputs: &[Output], ways: &[&str]) {
    for (rank, output) in outputs.iter().enumerate() {
        let expected = format!("rank {rank} of {} by {}", outputs.len(), ways[rank]);
        assert!(output.status.success() && text(output).contains(&expected), "{expected}:\n{}", text(output));
    }
}

#[test]
fn torchruns_variables_lead_to_a_job_that_shares_memory() {
    be_a_rank();
    let outputs = job("torchruns_variables_lead_to_a_job_that_shares_memory", 4, |_, _| {});
    all_joined(&outputs, &["shm,shm,shm,shm"; 4]);
}

#[test]
fn torchruns_variables_lead_to_a_job_over_sockets() {
    be_a_rank();
    let outputs = job("torchruns_variables_lead_to_a_job_over_sockets", 3, |_, command| {
        command.env("POSTHASTE_DEVICE", "tcp").env("POSTHASTE_TCP_MODE", "encrypted");
    });
    all_joined(&outputs, &["shm,tcp,tcp", "tcp,shm,tcp", "tcp,tcp,shm"]);
}

#[test]
fn fault_the_leave_of_the_rank_that_serves_the_meeting_is_told() {
    be_a_rank();
    let outputs = job("fault_the_leave_of_the_rank_that_serves_the_meeting_is_told", 3, |_, command| {
        command.env(ROLE, "forsaken").env("POSTHASTE_DEVICE", "tcp");
    });
    for (rank, output) in outputs.iter().enumerate().skip(1) {
        let expected = format!("rank {rank} heard PeerClosed(Rank(0))");
        assert!(output.status.success() && text(output).contains(&expected), "{}", text(output));
    }
}

#[test]
fn fault_news_go_on_when_the_ranks_that_serve_them_leave() {
    be_a_rank();
    let outputs = job("fault_news_go_on_when_the_ranks_that_serve_them_leave", 6, |_, command| {
        command.env(ROLE, "orphan").env("POSTHASTE_DEVICE", "tcp");
    });
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}:\n{}", text(output));
        let left = (0..rank.min(3)).map(|other| format!("rank {rank} heard PeerClosed(Rank({other}))"));
        let died = (rank > 3).then(|| format!("rank {rank} heard PeerLost(Rank(3))"));
        for expected in left.chain(died) {
            assert!(text(output).contains(&expected), "{expected}:\n{}", text(output));
        }
    }
}

#[test]
fn fault_news_go_on_for_a_rank_that_was_busy_when_the_one_that_serves_them_left() {
    be_a_rank();
    let test = "fault_news_go_on_for_a_rank_that_was_busy_when_the_one_that_serves_them_left";
    let outputs = job(test, 5, |_, command| {
        command.env(ROLE, "deaf").env("POSTHASTE_DEVICE", "tcp");
    });
    for rank in [1, 2, 4] {
        for expected in ["PeerClosed(Rank(0))", "PeerLost(Rank(3))"] {
            let expected = format!("rank {rank} heard {expected}");
            let output = &outputs[rank];
            assert!(
                output.status.success() && text(output).contains(&expected),
                "{expected}:\n{}",
                text(output)
            );
        }
    }
}

#[test]
fn fault_a_job_is_left_though_the_runtime_that_drove_it_has_ended() {
    be_a_rank();
    let outputs = job("fault_a_job_is_left_though_the_runtime_that_drove_it_has_ended", 2, |_, command| {
        command.env(ROLE, "moved").env("POSTHASTE_DEVICE", "tcp");
    });
    for output in outputs {
        assert!(output.status.success() && text(&output).contains("left: true"), "{}", text(&output));
    }
}

#[test]
fn fault_a_rank_of_another_launcher_comes_again_and_once_only() {
    be_a_rank();
    let test = "fault_a_rank_of_another_launcher_comes_again_and_once_only";
    let port = port();
    let go = std::env::temp_dir().join(format!("restart-go-{}", std::process::id()));
    let start = |rank| {
        let mut command = torch(test, rank, 3, port);
        command.env(ROLE, "phoenix").env(GO, &go).env("POSTHASTE_DEVICE", "tcp");
        command.spawn().unwrap()
    };
    let mut one = start(1);
    let others = [start(2), start(0)];
    let until = Instant::now() + Duration::from_secs(60);
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains("rank 1 is there") {
        assert!(Instant::now() < until && one.try_wait().unwrap().is_none(), "it does not join");
        let mut piece = [0; 512];
        let count = std::io::Read::read(one.stdout.as_mut().unwrap(), &mut piece).unwrap();
        said.extend_from_slice(&piece[..count]);
    }
    one.kill().unwrap();
    one.wait().unwrap();
    // Two at once: one of them is the rank, the other is told.
    let mut doubles = vec![start(1), start(1)];
    one_is_refused(&mut doubles);
    std::fs::write(&go, "go").unwrap();
    let outputs = ended(others.into_iter().chain(doubles).collect());
    std::fs::remove_file(&go).unwrap();
    for (output, (rank, incarnation)) in outputs.iter().zip([(2, 0), (0, 0), (1, 1)]) {
        let expected = format!("rank {rank} of incarnation {incarnation} has met all");
        assert!(output.status.success() && text(output).contains(&expected), "{expected}:\n{}", text(output));
    }
}

/// Of two processes that come as rank 1, one is told so, whichever came first; the other is left.
fn one_is_refused(doubles: &mut Vec<Child>) {
    let until = Instant::now() + Duration::from_secs(60);
    let refused = loop {
        if let Some(at) = doubles.iter_mut().position(|double| double.try_wait().unwrap().is_some()) {
            break ended(vec![doubles.remove(at)]).remove(0);
        }
        assert!(Instant::now() < until, "neither is refused");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused));
    assert!(text(&refused).contains("rank 1 is claimed twice"), "{}", text(&refused));
}

#[test]
fn a_rank_that_cannot_serve_so_many_is_told_of_the_limit() {
    be_a_rank();
    let rank = torch("a_rank_that_cannot_serve_so_many_is_told_of_the_limit", 0, 64, port());
    let mut limited = started_by("/bin/sh", &["-c", "ulimit -n 60; exec \"$0\" \"$@\""], &rank);
    let output = ended(vec![limited.spawn().unwrap()]).remove(0);
    assert!(text(&output).contains("RLIMIT_NOFILE is 60"), "{}", text(&output));
}

/// A job of three, of which rank 1 has namespaces of its own, as a container has.
fn one_in_other_namespaces(test: &str, apart: &[&str]) {
    let allowed = Command::new("unshare").args(apart).arg("true").stderr(Stdio::null()).status();
    if !allowed.is_ok_and(|status| status.success()) {
        slurm::skipped(test, "this machine lets nobody make such namespaces");
        return;
    }
    let port = port();
    let children = (0..3).rev().map(|rank| {
        let mut command = torch(test, rank, 3, port);
        if rank == 1 {
            command = started_by("unshare", apart, &command);
        }
        command.spawn().unwrap()
    });
    let mut outputs = ended(children.collect());
    outputs.reverse();
    all_joined(&outputs, &["shm,tcp,shm", "tcp,shm,tcp", "shm,tcp,shm"]);
}

#[test]
fn m_d03_a_rank_in_other_namespaces_is_reached_over_sockets() {
    be_a_rank();
    one_in_other_namespaces("m_d03_a_rank_in_other_namespaces_is_reached_over_sockets", &["--mount"]);
}

#[test]
fn m_d03_a_rank_that_numbers_processes_by_itself_is_reached_over_sockets() {
    be_a_rank();
    let test = "m_d03_a_rank_that_numbers_processes_by_itself_is_reached_over_sockets";
    // Of a process number that is another one here nobody may take a descriptor, or the end for a death.
    one_in_other_namespaces(test, &["--pid", "--fork", "--mount-proc"]);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    be_a_rank();
    let port = port();
    let children = [0, 2].map(|rank| {
        let mut command = torch("a_rank_that_does_not_come_is_named", rank, 4, port);
        command.env("POSTHASTE_JOIN_TIMEOUT", "6").spawn().unwrap()
    });
    for output in ended(children.into()) {
        let text = text(&output);
        assert_eq!(output.status.code(), Some(3), "{text}");
        assert!(text.contains("2 of 4 ranks") && text.contains("ranks 1, 3"), "{text}");
    }
}

#[test]
fn a_rank_that_comes_twice_is_told_and_the_job_goes_on() {
    be_a_rank();
    let test = "a_rank_that_comes_twice_is_told_and_the_job_goes_on";
    let port = port();
    let start = |rank| torch(test, rank, 3, port).spawn().unwrap();
    let (zero, mut doubles) = (start(0), vec![start(1), start(1)]);
    // The last rank comes when that has been told.
    one_is_refused(&mut doubles);
    let all = [zero].into_iter().chain(doubles).chain([start(2)]);
    all_joined(&ended(all.collect()), &["shm,shm,shm"; 3]);
}

#[test]
fn ranks_need_a_key_and_the_same_one() {
    be_a_rank();
    let test = "ranks_need_a_key_and_the_same_one";
    let none = ended(vec![torch(test, 0, 2, port()).env_remove("POSTHASTE_KEY").spawn().unwrap()]).remove(0);
    assert!(text(&none).contains("POSTHASTE_KEY_FILE"), "{}", text(&none));
    let outputs = job(test, 2, |rank, command| {
        command.env("POSTHASTE_JOIN_TIMEOUT", "6");
        if rank == 1 {
            command.env("POSTHASTE_KEY", KEY.replace('0', "1"));
        }
    });
    assert!(text(&outputs[1]).contains("another key"), "{}", text(&outputs[1]));
    assert!(text(&outputs[0]).contains("rank 1"), "the other hears who is missing: {}", text(&outputs[0]));
}

#[test]
fn ranks_that_count_credit_otherwise_are_told_so() {
    be_a_rank();
    for device in ["shm", "tcp"] {
        let outputs = job("ranks_that_count_credit_otherwise_are_told_so", 3, |rank, command| {
            command.env("POSTHASTE_DEVICE", device);
            if rank == 1 {
                command.env("POSTHASTE_CREDIT_BYTES", "64K");
            }
        });
        let other = |rank, said: u64, own: u64| {
            format!("not joined: rank {rank} has POSTHASTE_CREDIT_BYTES={said}, this rank {own}")
        };
        let (most, one) = (16 << 20, 64 << 10);
        let expected = [other(1, one, most), other(0, most, one), other(1, one, most)];
        for (output, expected) in outputs.iter().zip(expected) {
            assert!(text(output).contains(&expected), "{expected}:\n{}", text(output));
            assert_eq!(output.status.code(), Some(3));
        }
    }
}

#[test]
fn shared_memory_alone_does_not_reach_everywhere() {
    be_a_rank();
    let test = "shared_memory_alone_does_not_reach_everywhere";
    let rooms = Command::new("unshare").args(["--mount", "true"]).stderr(Stdio::null()).status();
    if !rooms.is_ok_and(|status| status.success()) {
        slurm::skipped(test, "this machine lets nobody make namespaces");
        return;
    }
    let port = port();
    let near = torch(test, 0, 2, port).env("POSTHASTE_DEVICE", "shm").spawn().unwrap();
    let mut apart = started_by("unshare", &["--mount"], &torch(test, 1, 2, port));
    apart.env("POSTHASTE_DEVICE", "shm");
    for output in ended(vec![near, apart.spawn().unwrap()]) {
        assert!(text(&output).contains("POSTHASTE_DEVICE=shm"), "{}", text(&output));
    }
}

/// Runs ranks under a launcher that may not be installed.
fn under(launcher: &str, arguments: &[&str], test: &str, ranks: usize) {
    if let Some(output) = told_under(launcher, arguments, command(test)) {
        for rank in 0..ranks {
            let expected = format!("rank {rank} of {ranks} by {}", vec!["shm"; ranks].join(","));
            assert!(output.status.success() && text(&output).contains(&expected), "{}", text(&output));
        }
    }
}

/// What ranks say under a launcher; none if it is not installed.
fn told_under(launcher: &str, arguments: &[&str], rank: Command) -> Option<Output> {
    if Command::new(launcher).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        let test = rank.get_args().next().and_then(OsStr::to_str).unwrap_or_default();
        slurm::skipped(test, &format!("{launcher} is not installed"));
        return None;
    }
    Some(ended(vec![started_by(launcher, arguments, &rank).spawn().unwrap()]).remove(0))
}

/// Ranks whose launcher tells nobody's end hear of it all the same.
fn hear_under(launcher: &str, arguments: &[&str], test: &str) {
    let mut rank = command(test);
    rank.env(ROLE, "forsaken").env("POSTHASTE_DEVICE", "tcp");
    let Some(output) = told_under(launcher, arguments, rank) else { return };
    for rank in 1..4 {
        let expected = format!("rank {rank} heard PeerClosed(Rank(0))");
        assert!(output.status.success() && text(&output).contains(&expected), "{}", text(&output));
    }
}

#[test]
fn fault_a_leave_is_told_under_open_mpi() {
    be_a_rank();
    let arguments = ["--allow-run-as-root", "--oversubscribe", "-n", "4"];
    hear_under("mpirun.openmpi", &arguments, "fault_a_leave_is_told_under_open_mpi");
}

#[test]
fn fault_a_leave_is_told_under_mpich() {
    be_a_rank();
    hear_under("mpiexec.hydra", &["-n", "4"], "fault_a_leave_is_told_under_mpich");
}

#[test]
fn mpirun_of_open_mpi_starts_a_job() {
    be_a_rank();
    let arguments = ["--allow-run-as-root", "--oversubscribe", "-n", "4"];
    under("mpirun.openmpi", &arguments, "mpirun_of_open_mpi_starts_a_job", 4);
}

/// What a rank starts is told that it is none.
fn parents_under(launcher: &str, arguments: &[&str], test: &str, why: impl Fn(u32, &str) -> String) {
    let mut rank = command(test);
    rank.env(ROLE, "parent").env("POSTHASTE_JOIN_TIMEOUT", "20");
    let Some(output) = told_under(launcher, arguments, rank) else { return };
    let all = text(&output);
    for rank in 0..2 {
        let start = format!("rank {rank} of pid ");
        let said = all.split_once(&start).unwrap_or_else(|| panic!("{all}")).1;
        let pid = said.split_once(' ').unwrap().0;
        assert!(output.status.success() && all.contains(&why(rank, pid)), "{}:\n{all}", why(rank, pid));
    }
}

#[test]
fn a_process_that_a_rank_of_open_mpi_starts_is_told_whose_place_it_is() {
    be_a_rank();
    let arguments = ["--allow-run-as-root", "--oversubscribe", "-n", "2"];
    let test = "a_process_that_a_rank_of_open_mpi_starts_is_told_whose_place_it_is";
    parents_under("mpirun.openmpi", &arguments, test, |rank, pid| {
        format!("not joined: rank {rank} is already claimed by pid {pid}")
    });
}

#[test]
fn a_process_that_a_rank_of_mpich_starts_is_told_that_it_is_none() {
    be_a_rank();
    let test = "a_process_that_a_rank_of_mpich_starts_is_told_that_it_is_none";
    parents_under("mpiexec.hydra", &["-n", "2"], test, |_, _| "not joined: PMI_FD is ".to_owned());
}

#[test]
fn mpiexec_of_mpich_starts_a_job() {
    be_a_rank();
    under("mpiexec.hydra", &["-n", "4"], "mpiexec_of_mpich_starts_a_job", 4);
}

#[test]
fn srun_of_slurm_starts_a_job() {
    be_a_rank();
    let test = "srun_of_slurm_starts_a_job";
    let Some(cluster) = slurm::Cluster::start(test) else { return };
    let config = cluster.config();
    for kind in ["none", "pmi2", "pmix"] {
        if kind != "none" && !cluster.offers(kind, test) {
            continue;
        }
        let mut rank = command(test);
        rank.env("SLURM_CONF", &config);
        // Its own tasks have no key but what is given to all of them.
        rank.env("POSTHASTE_KEY", KEY);
        let arguments = [&format!("--mpi={kind}"), "-n", "4"];
        let output = told_under(cluster.srun.to_str().unwrap(), &arguments, rank).unwrap();
        for rank in 0..4 {
            let expected = format!("rank {rank} of 4 by shm,shm,shm,shm");
            assert!(
                output.status.success() && text(&output).contains(&expected),
                "{kind}: {}",
                text(&output)
            );
        }
    }
}

#[test]
fn a_process_that_nobody_started_for_a_job_is_told_so() {
    be_a_rank();
    let alone = command("a_process_that_nobody_started_for_a_job_is_told_so").spawn().unwrap();
    let output = ended(vec![alone]).remove(0);
    assert!(text(&output).contains("not part of a job"), "{}", text(&output));
}
