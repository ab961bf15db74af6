//! The descriptors that ranks inherit.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use common::{assigned, eventually, job_of, job_of_shell, process_of, watchdog};
use posthaste_launch::{
    AdoptError, ArenaKind, HostFds, HostFdsError, InheritedFds, JobEnv, LaunchError, Output, RankEnd,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn role() {
    match assigned().as_deref() {
        None => return,
        Some("adopt") => adopt_and_look(),
        Some("gone") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            let error = InheritedFds::adopt(&env).unwrap_err();
            assert!(matches!(error, AdoptError::Gone { .. }), "{error}");
            assert!(error.to_string().contains("unset the POSTHASTE_ variables"));
        }
        Some("wrong") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            for _ in 0..2 {
                let error = InheritedFds::adopt(&env).unwrap_err();
                assert!(matches!(error, AdoptError::WrongKind { .. }), "{error}");
            }
            assert!(std::fs::exists("/proc/self/fd/3").unwrap(), "a stranger's descriptor was closed");
        }
        Some("peers") => watch_peer(),
        Some("low-limit") => {
            let maximum = getrlimit(Resource::Nofile).maximum;
            setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum }).unwrap();
            let error = job_of_shell("exit 0").ranks(100).spawn().unwrap_err();
            let LaunchError::HostFds(error @ HostFdsError::DescriptorLimit { ranks: 100, limit: 64, .. }) =
                error
            else {
                panic!("{error}")
            };
            assert!(error.to_string().contains("RLIMIT_NOFILE is 64"), "{error}");
            assert!(error.to_string().contains("ulimit -n"), "{error}");
        }
        Some("no-memfd") => {
            let fds = HostFds::new(2, 12345).unwrap();
            assert_eq!(*fds.kind(), ArenaKind::UnlinkedFile("/dev/shm".into()));
            let stat = rustix::fs::fstat(fds.arena()).unwrap();
            assert_eq!((stat.st_nlink, stat.st_size, stat.st_blocks), (0, 12345, 0));
            let job = job_of("adopt").ranks(2).spawn().unwrap();
            assert!(matches!(job.arena_kind(), ArenaKind::UnlinkedFile(_)));
            let outcome = job.wait();
            assert!(outcome.success(), "{outcome}");
        }
        Some(other) => panic!("no role {other}"),
    }
    std::process::exit(0);
}

fn adopt_and_look() {
    let env = JobEnv::from_process().unwrap().unwrap();
    let numbers = env.fds.clone().unwrap();
    let link = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
    let own: Vec<i32> =
        [numbers.arena(), numbers.bell()].into_iter().chain(numbers.ring().to_vec()).collect();
    let job: Vec<_> = own.iter().map(|fd| link(*fd).expect("every number is open")).collect();
    // The test may itself have been started with descriptors that it passes on; those are none of the job's.
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let fd: i32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
        assert!(own.contains(&fd) || !job.contains(&link(fd).unwrap()), "{fd} belongs to another rank");
    }

    let fds = InheritedFds::adopt(&env).unwrap();
    for fd in fds.ring.iter().chain([&fds.arena, &fds.bell]) {
        assert!(fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
    }
    assert!(matches!(InheritedFds::adopt(&env), Err(AdoptError::AlreadyAdopted)));
    // A program that this rank starts finds the environment, but no descriptors.
    assert!(process_of("gone").status().unwrap().success());

    assert_eq!(rustix::fs::fstat(&fds.arena).unwrap().st_size, 1 << 20);
    rustix::io::write(&fds.ring[env.rank as usize], b"x").unwrap();
    assert_eq!(rustix::io::read(&fds.bell, &mut [0; 8]).unwrap(), 1);
    assert_eq!(rustix::io::read(&fds.bell, &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
}

fn watch_peer() {
    let env = JobEnv::from_process().unwrap().unwrap();
    let fds = InheritedFds::adopt(&env).unwrap();
    if env.rank == 1 {
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    // Rank 2 has a delay of 300 ms: to its peers it lives even before it starts, and after.
    for fd in [&fds.ring[1], &fds.ring[2]] {
        assert!(!dies(fd, Duration::from_millis(if env.rank == 0 { 500 } else { 1 })));
    }
    std::fs::write(format!("{}/{}", std::env::var("POSTHASTE_TEST_DIR").unwrap(), env.rank), "").unwrap();
    assert!(dies(&fds.ring[1], Duration::from_secs(20)), "no POLLERR after the death of rank 1");
    assert!(!dies(&fds.ring[env.rank as usize], Duration::ZERO), "POLLERR for the living");
}

/// Whether the last read end of a doorbell closes within that time.
fn dies(fd: &OwnedFd, within: Duration) -> bool {
    let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::empty())];
    poll(&mut fds, Some(&timeout)).unwrap();
    fds[0].revents().contains(PollFlags::ERR)
}

#[test]
fn ranks_inherit_their_own_descriptors_and_pass_none_on() {
    let _dog = watchdog();
    let job = job_of("adopt").ranks(3).stdout(Output::Null).spawn().unwrap();
    assert_eq!(*job.arena_kind(), ArenaKind::Memfd);
    let outcome = job.wait();
    assert!(outcome.success(), "{outcome}");
}

#[test]
fn the_death_of_a_rank_shows_on_its_doorbell() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let job = job_of("peers")
        .ranks(3)
        .env("POSTHASTE_TEST_DIR", dir.path())
        .delay(2, Duration::from_millis(300))
        .keep_going(true)
        .stdout(Output::Null)
        .spawn()
        .unwrap();
    eventually("both peers look", || dir.path().join("0").exists() && dir.path().join("2").exists());
    job.kill(1).unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.ranks, [RankEnd::Exit(0), RankEnd::Signal(9), RankEnd::Exit(0)], "{outcome}");
}

#[test]
fn the_arena_is_sparse_and_keeps_its_size() {
    let fds = HostFds::new(1, 1 << 40).unwrap();
    let stat = rustix::fs::fstat(fds.arena()).unwrap();
    assert_eq!((stat.st_size, stat.st_blocks), (1 << 40, 0));
    assert!(rustix::fs::ftruncate(fds.arena(), 1).is_err());
    assert!(rustix::fs::ftruncate(fds.arena(), 1 << 41).is_err());
    assert!(matches!(HostFds::new(1, 0), Err(HostFdsError::ArenaBytes(0))));
    assert!(matches!(HostFds::new(1, u64::MAX), Err(HostFdsError::ArenaBytes(_))));
    assert!(matches!(HostFds::new(0, 1), Err(HostFdsError::Ranks(0))));
    assert!(matches!(HostFds::new(4097, 1), Err(HostFdsError::Ranks(4097))));
}

#[test]
fn ranks_in_one_process_get_theirs_too() {
    let mut fds = HostFds::new(2, 4096).unwrap();
    let (zero, one) = (fds.local(0).unwrap(), fds.local(1).unwrap());
    assert!(fds.local(1).is_err() && fds.local(2).is_err());
    rustix::io::write(&zero.ring[1], b"ab").unwrap();
    assert_eq!(rustix::io::read(&one.bell, &mut [0; 8]).unwrap(), 2);
    for fd in zero.ring.iter().chain([&zero.arena, &zero.bell]) {
        assert!(fcntl_getfd(fd.as_fd()).unwrap().contains(FdFlags::CLOEXEC));
    }
    drop(one);
    // A process that another test has forked holds it until it runs its own program.
    eventually("its end shows", || dies(&zero.ring[1], Duration::ZERO));
}

#[test]
fn numbers_that_something_else_has_taken_are_left_alone() {
    let program = std::env::current_exe().unwrap();
    let script = "exec 3</dev/null 4</dev/null 5</dev/null; exec \"$@\"";
    let status = Command::new("/bin/sh")
        .args(["-c", script, "sh"])
        .arg(program)
        .args(common::ROLE_ARGS)
        .env("POSTHASTE_TEST_ROLE", "wrong")
        .env("POSTHASTE_JOB", "00".repeat(16))
        .env("POSTHASTE_KEY", "00".repeat(32))
        .env("POSTHASTE_RANK", "0")
        .env("POSTHASTE_SIZE", "1")
        .env("POSTHASTE_FDS", "arena=3,bell=4,ring=5")
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn numbers_read_from_elsewhere_are_never_adopted() {
    let env = [
        ("POSTHASTE_JOB", "00".repeat(16)),
        ("POSTHASTE_KEY", "00".repeat(32)),
        ("POSTHASTE_RANK", "0".into()),
        ("POSTHASTE_SIZE", "1".into()),
        ("POSTHASTE_FDS", "arena=3,bell=4,ring=5".into()),
    ];
    let env = JobEnv::parse(env.map(|(name, value)| (name.to_owned(), value))).unwrap().unwrap();
    assert!(matches!(InheritedFds::adopt(&env), Err(AdoptError::NotInherited)));
}

#[test]
fn a_low_limit_is_named_before_anything_starts() {
    assert!(process_of("low-limit").status().unwrap().success());
}

#[test]
fn without_memfd_the_arena_is_a_file_without_a_name() {
    let _dog = watchdog();
    let status = process_of("no-memfd").env("POSTHASTE_TEST_NO_MEMFD", "1").status();
    assert!(status.unwrap().success());
    let left = std::fs::read_dir("/dev/shm").unwrap().filter_map(Result::ok).find(|entry| {
        entry.file_name().to_string_lossy().starts_with("posthaste-")
            && entry.metadata().is_ok_and(|metadata| metadata.size() == 12345)
    });
    assert!(left.is_none(), "{left:?}");
}
