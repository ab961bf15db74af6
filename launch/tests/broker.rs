//! Ranks that get their descriptors from the broker, and those who should not.

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use common::{assigned, eventually, job_of, job_of_shell, process_of, watchdog};
use posthaste_launch::{BrokerError, InheritedFds, JobEnv, Output, RankEnd, RunningJob, fetch_from_broker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn role() {
    match assigned().as_deref() {
        None => return,
        Some("inherits") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            let fds = InheritedFds::obtain(&env).unwrap();
            assert!(!dies(&fds.ring[1], Duration::ZERO), "a rank yet to join lives");
            // A token goes from rank 1, which joins over the broker, to here and back; then rank 1 dies.
            assert!(is_readable(&fds.bell));
            assert_eq!(rustix::io::read(&fds.bell, &mut [0; 8]).unwrap(), 3);
            rustix::io::write(&fds.ring[1], b"back").unwrap();
            assert!(dies(&fds.ring[1], Duration::from_secs(20)), "nobody else holds the doorbell");
        }
        Some("joins") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            assert!(env.fds.is_none());
            let fds = InheritedFds::obtain(&env).unwrap();
            rustix::io::write(&fds.ring[0], b"its").unwrap();
            assert!(is_readable(&fds.bell));
            assert_eq!(rustix::io::read(&fds.bell, &mut [0; 8]).unwrap(), 4);
        }
        Some("low-limit") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            let maximum = getrlimit(Resource::Nofile).maximum;
            setrlimit(Resource::Nofile, Rlimit { current: Some(30), maximum }).unwrap();
            let error = fetch_from_broker(&env).unwrap_err();
            assert!(matches!(error, BrokerError::DescriptorLimit { limit: 30, .. }), "{error}");
        }
        Some("other-user") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            let error = fetch_from_broker(&env).unwrap_err();
            assert!(matches!(error, BrokerError::WrongUser { found: 0, own: 65534 }), "{error}");
            // And one that does not look at its peer gets not even a challenge.
            let socket = stranger(env.broker.as_deref().unwrap());
            assert!(hears(&socket).is_empty());
        }
        Some(other) => panic!("no role {other}"),
    }
    std::process::exit(0);
}

fn is_readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap() == 1
}

fn dies(fd: &OwnedFd, within: Duration) -> bool {
    let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::empty())];
    poll(&mut fds, Some(&timeout)).unwrap();
    fds[0].revents().contains(PollFlags::ERR)
}

/// A connection to the broker that follows no rules.
fn stranger(name: &str) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    socket
}

/// The next packet; empty if the broker has closed the connection.
fn hears(socket: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    let count = recv(socket, &mut bytes[..], RecvFlags::empty()).map_or(0, |(count, _)| count);
    bytes.truncate(count);
    bytes
}

/// The answer of rank `rank` to a challenge.
fn answer(env: &JobEnv, rank: u32, challenge: &[u8]) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new_keyed(env.key.as_bytes());
    hasher.update(&challenge[32..64]).update(env.job.as_bytes()).update(&rank.to_le_bytes());
    let proof = hasher.update(b"posthaste join").finalize();
    let mut frame = b"PHbroke1\x02\0\0\0".to_vec();
    frame.extend_from_slice(&rank.to_le_bytes());
    frame.extend_from_slice(env.job.as_bytes());
    frame.extend_from_slice(&[5; 32]);
    frame.extend_from_slice(proof.as_bytes());
    frame
}

/// A job whose ranks are all left to the broker, except rank 0.
fn job(ranks: u32) -> RunningJob {
    let launch = job_of_shell("exec sleep 100").ranks(ranks);
    (1..ranks).fold(launch, |launch, rank| launch.broker_rank(rank)).spawn().unwrap()
}

fn env(job: &RunningJob, rank: u32) -> JobEnv {
    JobEnv::parse(job.join_env(rank).unwrap()).unwrap().unwrap()
}

#[test]
fn a_rank_joins_talks_and_dies() {
    let _dog = watchdog();
    let job = job_of("inherits").ranks(2).broker_rank(1).stdout(Output::Null).spawn().unwrap();
    assert!(job.join_env(0).is_none() && job.join_env(2).is_none());
    assert_eq!(job.pids()[1], None);
    let joined = process_of("joins").envs(job.join_env(1).unwrap()).status().unwrap();
    assert!(joined.success());
    let outcome = job.wait();
    assert_eq!(outcome.ranks, [RankEnd::Exit(0), RankEnd::External], "{outcome}");
}

#[test]
fn a_large_job_comes_in_several_parcels() {
    let _dog = watchdog();
    let job = job(700);
    for rank in [699, 1] {
        let fds = fetch_from_broker(&env(&job, rank)).unwrap();
        assert_eq!(fds.ring.len(), 700);
        assert_eq!(rustix::fs::fstat(&fds.arena).unwrap().st_size, 1 << 20);
        rustix::io::write(&fds.ring[rank as usize], b"own").unwrap();
        assert_eq!(rustix::io::read(&fds.bell, &mut [0; 8]).unwrap(), 3);
        assert!(fds.ring.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
    }
}

#[test]
fn a_rank_is_given_once() {
    let _dog = watchdog();
    let job = job(3);
    let first = fetch_from_broker(&env(&job, 1)).unwrap();
    for rank in [1, 0] {
        let mut env = env(&job, 2);
        env.rank = rank;
        let error = fetch_from_broker(&env).unwrap_err();
        assert!(matches!(error, BrokerError::RankTaken { rank: named } if named == rank), "{error}");
    }
    let second = fetch_from_broker(&env(&job, 2)).unwrap();
    // All are given, so nothing is left of the launcher's copies; the answer stays the same.
    assert!(!dies(&second.ring[1], Duration::ZERO));
    drop(first);
    eventually("the death of rank 1 shows", || dies(&second.ring[1], Duration::ZERO));
    assert!(matches!(fetch_from_broker(&env(&job, 1)), Err(BrokerError::RankTaken { rank: 1 })));
}

#[test]
fn without_the_key_there_is_nothing() {
    let _dog = watchdog();
    let job = job(2);
    let other = self::job(2);
    for wrong in ["POSTHASTE_KEY", "POSTHASTE_JOB"] {
        let mut mixed = job.join_env(1).unwrap();
        let stolen = other.join_env(1).unwrap().into_iter().find(|(name, _)| name == wrong).unwrap();
        mixed.retain(|(name, _)| name != wrong);
        mixed.push(stolen);
        let error = fetch_from_broker(&JobEnv::parse(mixed).unwrap().unwrap()).unwrap_err();
        assert!(matches!(error, BrokerError::Refused), "{error}");
    }
    fetch_from_broker(&env(&job, 1)).unwrap();
}

#[test]
fn a_proof_is_good_for_one_challenge_and_one_rank() {
    let _dog = watchdog();
    let job = job(3);
    let env1 = env(&job, 1);
    let name = env1.broker.as_deref().unwrap();
    let (one, two, three) = (stranger(name), stranger(name), stranger(name));
    let challenges = [hears(&one), hears(&two), hears(&three)];
    assert_ne!(challenges[0], challenges[1]);
    // An answer to the first challenge, replayed to the second.
    let good = answer(&env1, 1, &challenges[0]);
    send(&two, &good, SendFlags::NOSIGNAL).unwrap();
    let refusal = hears(&two);
    assert_eq!((refusal[8], refusal[9]), (5, 2));
    assert!(hears(&two).is_empty());
    // An answer for rank 1 that claims to be for rank 2.
    let mut moved = answer(&env1, 1, &challenges[2]);
    moved[12] = 2;
    send(&three, &moved, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(hears(&three)[8..10], [5, 2]);
    // The same answer where it belongs: the broker proves that it knows the key too, then gives.
    send(&one, &good, SendFlags::NOSIGNAL).unwrap();
    assert_eq!((hears(&one)[8], hears(&one)[8]), (3, 4));
    // The connection and what came over it are gone, and so is rank 1; rank 2 is not.
    drop(one);
    assert!(matches!(fetch_from_broker(&env1), Err(BrokerError::RankTaken { rank: 1 })));
    let fds = fetch_from_broker(&env(&job, 2)).unwrap();
    eventually("the death of rank 1 shows", || dies(&fds.ring[1], Duration::ZERO));
}

#[test]
fn garbage_is_dropped_and_a_genuine_rank_joins_meanwhile() {
    let _dog = watchdog();
    let job = job(2);
    let env = env(&job, 1);
    let name = env.broker.as_deref().unwrap();
    let keep_quiet: Vec<OwnedFd> = (0..10).map(|_| stranger(name)).collect();
    for garbage in [&b""[..], b"x", &[0xff; 96], &[0; 97], &[0; 1024], &[0xa5; 60_000]] {
        let socket = stranger(name);
        let challenge = hears(&socket);
        assert_eq!(challenge.len(), 96);
        // An empty packet reads as an end.
        send(&socket, garbage, SendFlags::NOSIGNAL).unwrap();
        assert!(hears(&socket).is_empty(), "no answer to {} bytes", garbage.len());
        // The challenge sent back: a reflection.
        let socket = stranger(name);
        let challenge = hears(&socket);
        send(&socket, &challenge, SendFlags::NOSIGNAL).unwrap();
        assert!(hears(&socket).is_empty());
    }
    fetch_from_broker(&env).unwrap();
    drop(keep_quiet);
}

#[test]
fn the_slow_lose_their_place() {
    let _dog = watchdog();
    let job = job(2);
    let env = env(&job, 1);
    let name = env.broker.as_deref().unwrap();
    // Where this process gets no core for so long, the first are gone when the last one comes.
    let (began, slow, refusal) = (0..5)
        .find_map(|_| {
            let began = Instant::now();
            let slow: Vec<OwnedFd> = (0..16).map(|_| stranger(name)).collect();
            let are_asked = slow.iter().all(|socket| hears(socket).len() == 96);
            // The seventeenth is told that there is no place.
            let refusal = hears(&stranger(name));
            let in_time = began.elapsed() < Duration::from_millis(4500);
            assert!(are_asked || !in_time);
            in_time.then_some((began, slow, refusal))
        })
        .expect("this process is let run now and then");
    assert_eq!((refusal[8], refusal[9]), (5, 1));
    // A genuine rank tries again until the slow are gone.
    fetch_from_broker(&env).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(4900));
    assert!(slow.iter().all(|socket| hears(socket).is_empty()));
}

#[test]
fn a_low_limit_is_named_and_the_rank_stays_free() {
    let _dog = watchdog();
    let job = job(40);
    assert!(process_of("low-limit").envs(job.join_env(1).unwrap()).status().unwrap().success());
    fetch_from_broker(&env(&job, 1)).unwrap();
}

#[test]
fn another_user_gets_nothing() {
    let _dog = watchdog();
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let job = job(2);
    // The test binary may lie where another user cannot reach it.
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let all = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    std::fs::set_permissions(dir.path(), all.clone()).unwrap();
    std::fs::set_permissions(&program, all).unwrap();
    // A child that another test forks holds the copy open for writing until it runs its own program.
    eventually("nobody writes to the program", || {
        let tried =
            std::process::Command::new(&program).arg("--list").stdout(std::process::Stdio::null()).status();
        !tried.is_err_and(|error| error.kind() == std::io::ErrorKind::ExecutableFileBusy)
    });
    let status = std::process::Command::new(program)
        .args(common::ROLE_ARGS)
        .env("POSTHASTE_TEST_ROLE", "other-user")
        .envs(job.join_env(1).unwrap())
        .current_dir("/")
        .uid(65534)
        .gid(65534)
        .status()
        .unwrap();
    assert!(status.success());
    fetch_from_broker(&env(&job, 1)).unwrap();
}

#[test]
fn nothing_named_is_left() {
    let _dog = watchdog();
    let job = job(2);
    let env = env(&job, 1);
    let name = env.broker.clone().unwrap();
    let known = || std::fs::read_to_string("/proc/net/unix").unwrap().contains(&name);
    assert!(known());
    drop(job);
    // A process that another test has forked holds it until it runs its own program.
    eventually("it is gone", || !known());
    let error = fetch_from_broker(&env).unwrap_err();
    assert!(matches!(error, BrokerError::Unreachable { .. }), "{error}");
}
