//! Ranks of several hosts, which are this one under several names: the remote shell is a script that runs the agent here.

use super::fork::fork;
use super::{GO, ROLE, be_a_rank, command, ended, text};
use posthaste::launcher::{self, Launch};
use posthaste::{Message, Rank, Scope};
use posthaste_launch::Hosts;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

const TEST: &str = "hosts::fault_a_rank_on_another_host_is_started_again_there";

/// The launcher, in a process of its own: what it prints is looked at.
pub fn head() -> posthaste::Result<()> {
    let dir = PathBuf::from(std::env::var_os(GO).unwrap());
    std::fs::write(dir.join("hosts"), "localhost slots=2\n127.0.0.1 slots=2\n").unwrap();
    let own = command(TEST);
    let program = [own.get_program()].into_iter().chain(own.get_args()).map(OsString::from);
    let program: Vec<OsString> = program.collect();
    // What an agent says comes late: a successor is there before the head knows that it needs one.
    let late: Vec<String> = program.iter().map(|part| format!("'{}'", part.to_str().unwrap())).collect();
    let shell = format!("HOST=$1; export HOST; shift; \"$@\" | {ROLE}=late {}\n", late.join(" "));
    std::fs::write(dir.join("shell"), shell).unwrap();
    let agent = ["env".into(), format!("{ROLE}=agent").into()].into_iter().chain(program.clone());
    let hosts = Hosts::read(&dir.join("hosts")).unwrap();
    let hosts = hosts.remote_shell(["/bin/sh".into(), dir.join("shell").into_os_string()]).agent(agent);
    let launch = Launch::program(&program[0]).args(&program[1..]).env(ROLE, "wanderer").env(GO, &dir);
    let launch = launcher::prepare(launch, 4, 1, 1)?.label(true).restart(1);
    let outcome = launch.run_on(&hosts).unwrap();
    println!("OUTCOME {outcome}");
    Ok(())
}

/// Passes on what comes, a little later.
pub fn late() -> ! {
    let mut piece = [0; 4096];
    loop {
        let count = std::io::stdin().read(&mut piece).unwrap();
        if count == 0 {
            std::process::exit(0);
        }
        std::thread::sleep(Duration::from_millis(200));
        let mut out = std::io::stdout();
        out.write_all(&piece[..count]).and_then(|()| out.flush()).unwrap();
    }
}

/// Rank 3, on the second host, dies and leaves a process behind that holds its connections; its successor ends that.
pub async fn wanderer_rank() -> posthaste::Result<()> {
    const LAST: Rank = Rank(3);
    let job = posthaste::join().await?;
    let (me, mine) = (job.rank(), job.incarnation());
    let who = job.service("who", move |()| async move { mine })?;
    let heard = job.counter();
    let count = heard.clone();
    let tell = job.register("tell", move |_: Message, _: &mut Scope| count.add(1))?;
    let left = PathBuf::from(std::env::var_os(GO).unwrap()).join("forked");
    job.ready();
    if me == LAST && mine == 0 {
        // All have a connection with it.
        heard.reach(3).await;
        std::fs::write(&left, fork().to_string()).unwrap();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    if me != LAST {
        tell.send(LAST, "").await?;
        assert_eq!(job.peer_restarted(LAST, 0).await?, 1);
    }
    for to in job.ranks() {
        assert_eq!(who.call(to, ()).await?, u32::from(to == LAST));
    }
    let ranks: Vec<Rank> = job.ranks().collect();
    let group = job.collectives().subset(&ranks).await?;
    group.barrier().await?;
    println!("rank {me} of incarnation {mine} on {} has met all", std::env::var("HOST").unwrap());
    if me == LAST {
        let pid: i32 = std::fs::read_to_string(&left).unwrap().parse().unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it lives");
    }
    group.barrier().await?;
    tokio::time::timeout(Duration::from_secs(30), job.leave()).await.expect("all leave")
}

#[test]
fn fault_a_rank_on_another_host_is_started_again_there() {
    be_a_rank();
    let dir = tempfile::tempdir().unwrap();
    let mut head = command(TEST);
    head.env(ROLE, "head").env(GO, dir.path());
    let output = ended(vec![head.spawn().unwrap()]).remove(0);
    let said = text(&output);
    assert!(output.status.success() && said.contains("OUTCOME"), "{said}");
    for (rank, host, incarnation) in
        [(0, "localhost", 0), (1, "localhost", 0), (2, "127.0.0.1", 0), (3, "127.0.0.1", 1)]
    {
        let line = format!("rank {rank} of incarnation {incarnation} on {host} has met all");
        assert!(said.contains(&line), "{line}:\n{said}");
    }
}
