//! Ranks of several nodes on one host, and parts of a job that several launchers start.

mod common;

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use common::{assigned, eventually, job_of, job_of_shell, watchdog};
use posthaste_launch::{
    InheritedFds, JobEnv, JobId, JobKey, Launch, LaunchError, Meeting, Output, Part, RankEnd, Rendezvous,
    RunningJob,
};

#[test]
fn role() {
    match assigned().as_deref() {
        None => return,
        Some("look") => look(),
        Some(other) => panic!("no role {other}"),
    }
    std::process::exit(0);
}

/// What all ranks say, by rank.
fn meet(env: &JobEnv, say: &str) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(20);
    let place = env.rendezvous.clone().unwrap();
    let mut seat =
        Rendezvous::meet(&[place], env.rank, env.size, &env.key, until, Duration::from_secs(5)).unwrap();
    assert_eq!(seat.identity().unwrap().0, env.job);
    let say = format!("{}:{say}", env.rank);
    let all = seat.all_gather(say.as_bytes(), until).unwrap();
    all.into_iter().map(|said| String::from_utf8(said).unwrap()).collect()
}

/// Checks what this rank has of its node and of the others'.
fn look() {
    let env = JobEnv::from_process().unwrap().unwrap();
    let fds = InheritedFds::adopt(&env).unwrap();
    let neighbours = env.node_ranks();
    assert_eq!(fds.ring.len(), neighbours.len());
    let arena = rustix::fs::fstat(&fds.arena).unwrap().st_ino;
    let bells: Vec<String> =
        fds.ring.iter().map(|fd| rustix::fs::fstat(fd).unwrap().st_ino.to_string()).collect();
    let own = rustix::fs::fstat(&fds.bell).unwrap().st_ino.to_string();
    let inodes: BTreeSet<u64> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::metadata(entry.unwrap().path()).ok())
        .map(|file| file.ino())
        .collect();
    let all = meet(&env, &format!("{arena}:{own}"));
    for (rank, said) in (0..).zip(all) {
        let said: Vec<&str> = said.split(':').collect();
        let same_node = neighbours.contains(&rank);
        assert_eq!(said[1] == arena.to_string(), same_node, "an arena for each node");
        // The ring is in the order of ranks; nothing else leads to another node.
        if same_node {
            let at = neighbours.iter().position(|other| *other == rank).unwrap();
            assert_eq!(said[2], bells[at]);
        } else {
            assert!(!inodes.contains(&said[1].parse().unwrap()), "the arena of rank {rank}");
            assert!(!inodes.contains(&said[2].parse().unwrap()), "the doorbell of rank {rank}");
        }
    }
}

#[test]
fn each_node_has_an_arena_and_doorbells_of_its_own() {
    let _dog = watchdog();
    for (ranks, nodes) in [(4, 2), (5, 3), (3, 3), (2, 1)] {
        let job = job_of("look").ranks(ranks).nodes(nodes).tcp(true).stdout(Output::Null).spawn().unwrap();
        let outcome = job.wait();
        assert!(outcome.success(), "{ranks} over {nodes}: {outcome}");
    }
}

/// What a job's ranks printed, each in one line.
fn lines(job: &RunningJob) -> Vec<String> {
    (0..job.size()).map(|rank| String::from_utf8(job.output(rank).0).unwrap().trim().to_owned()).collect()
}

#[test]
fn a_place_to_meet_is_served_where_sockets_are_needed() {
    let _dog = watchdog();
    let script = "echo $POSTHASTE_NODES $POSTHASTE_RENDEZVOUS";
    let job = || job_of_shell(script).ranks(3).stdout(Output::Capture);
    let plain = job().spawn().unwrap();
    assert!(plain.wait().success() && plain.rendezvous().is_none());
    assert_eq!(lines(&plain), ["", "", ""]);
    for (launch, nodes) in
        [(job().tcp(true), ""), (job().nodes(2), "0x2:1 "), (job().env("POSTHASTE_DEVICE", "tcp"), "")]
    {
        let job = launch.spawn().unwrap();
        assert!(job.wait().success());
        let address = job.rendezvous().unwrap();
        assert!(address.ip().is_loopback());
        assert_eq!(lines(&job), vec![format!("{nodes}{address}"); 3]);
        TcpStream::connect(address).unwrap();
        drop(job);
        // A child that another test of this process is starting may have its socket until it is the program it is to be.
        eventually("the place ends with the job", || TcpStream::connect(address).is_err());
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let _dog = watchdog();
    let job = || job_of_shell("exit 0").ranks(4);
    for (launch, told) in [
        (job().nodes(0), "over 1 to 4 nodes"),
        (job().nodes(5), "over 1 to 4 nodes, not over 5"),
        (job().nodes(2).broker_rank(1), "on one node only"),
        (job().nodes(2).env("POSTHASTE_DEVICE", "shm"), "shared memory does not reach across"),
        (job().part(part(9, "127.0.0.1:1")), "no rank is on node 9"),
        (job().part(part(1, "127.0.0.1:1")).delay(0, Duration::ZERO), "rank 0 is not one that is started"),
    ] {
        match launch.spawn() {
            Err(LaunchError::Invalid(text)) => assert!(text.contains(told), "{text}"),
            other => panic!("{told}: {other:?}"),
        }
    }
}

fn part(node: u32, rendezvous: &str) -> Part {
    Part {
        job: JobId::from_bytes([3; 16]),
        key: JobKey::from_bytes([4; 32]),
        nodes: vec![0, 1, 1, 0, 1],
        node,
        rendezvous: rendezvous.to_owned(),
    }
}

#[test]
fn two_launchers_start_one_job() {
    let _dog = watchdog();
    let whole = part(0, "");
    let place = Rendezvous::bind(
        "127.0.0.1:0".parse().unwrap(),
        5,
        whole.key,
        Some(whole.job),
        Duration::from_secs(5),
    )
    .unwrap();
    let launch = |role, node| -> Launch {
        job_of(role).part(part(node, &place.address().to_string())).stdout(Output::Capture)
    };
    let (first, second) = (launch("look", 0).spawn().unwrap(), launch("look", 1).spawn().unwrap());
    let (first, second) = (first.wait(), second.wait());
    assert!(first.success() && second.success(), "{first}; {second}");
    let (here, elsewhere) = (RankEnd::Exit(0), RankEnd::Elsewhere);
    assert_eq!(first.ranks, [here, elsewhere, elsewhere, here, elsewhere]);
    assert_eq!(second.ranks, [elsewhere, here, here, elsewhere, here]);
}

#[test]
fn the_first_failure_is_told_whenever_one_looks() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..200 {
        let _dog = watchdog();
        let ready = dir.path().join(round.to_string());
        let ready = ready.display();
        let script = format!(
            "[ $POSTHASTE_RANK = 1 ] && {{ until [ -e {ready} ]; do sleep 0.001; done; exit 6; }}; \
             trap '' TERM; : >{ready}; exec sleep 100"
        );
        let job = job_of_shell(&script).ranks(2).grace(Duration::from_secs(50)).spawn().unwrap();
        assert_eq!(job.wait_failure().unwrap().rank, 1);
        assert_eq!(job.try_wait(0), None, "it was not told before rank 0 had ended");
        job.kill(0).unwrap();
        job.wait();
    }
}

#[test]
fn the_first_failure_is_told_before_the_others_have_ended() {
    let _dog = watchdog();
    let script = "[ $POSTHASTE_RANK = 1 ] && exit 6; trap '' TERM; exec sleep 100";
    let job = job_of_shell(script).ranks(2).grace(Duration::from_secs(50)).spawn().unwrap();
    let failure = job.wait_failure().unwrap();
    assert_eq!(failure.rank, 1);
    // As a rule it has set no trap yet, and has ended.
    if let Err(error) = job.kill(0) {
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
    drop(job);
    let job = job_of_shell("exit 0").ranks(2).spawn().unwrap();
    assert_eq!(job.wait_failure(), None);
    let job = job_of_shell("exec sleep 100").ranks(2).spawn().unwrap();
    job.end();
    assert_eq!(job.wait().exit_code(), 128 + 15);
}
