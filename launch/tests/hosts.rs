//! Jobs on several hosts, which are this one under several names: the remote shell is a script that runs the agent here.

mod common;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{ROLE_ARGS, assigned, eventually, process_of, runs, watchdog};
use posthaste_launch::{
    Cause, Hosts, JobEnv, JobOutcome, Launch, LaunchError, Meeting, RankEnd, Rendezvous, run_agent,
};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn role() {
    let dir = || PathBuf::from(std::env::var("POSTHASTE_TEST_DIR").unwrap());
    // Not like other processes of a test: nothing but the end of its input may end it.
    if std::env::var("POSTHASTE_TEST_ROLE").is_ok_and(|role| role == "agent") {
        std::process::exit(run_agent());
    }
    match assigned().as_deref() {
        None => return,
        // A head in a process of its own: its output and its death are looked at.
        Some("head") => {
            let script = std::env::var("POSTHASTE_TEST_SCRIPT").unwrap();
            let label = std::env::var_os("POSTHASTE_TEST_LABEL").is_some();
            let job = shell(&script).ranks(4).label(label).forward_signals(true);
            let mut list = hosts(&dir(), TWO);
            if std::env::var_os("POSTHASTE_TEST_NEVER").is_some() {
                let touch = format!("touch {}/asked; exec sleep 100", dir().display());
                list = list.remote_shell(["/bin/sh", "-c", &touch]);
            }
            let outcome = job.grace(Duration::from_millis(300)).run_on(&list);
            let outcome = outcome.unwrap();
            eprintln!("OUTCOME {outcome}");
            std::process::exit(outcome.exit_code());
        }
        Some("rank") => rank(&dir()),
        Some(other) => panic!("no role {other}"),
    }
    std::process::exit(0);
}

const TWO: &str = "localhost slots=2\n127.0.0.1 slots=3 # another name\n";

/// The hosts of a list, reached by a script in this directory.
fn hosts(dir: &Path, list: &str) -> Hosts {
    let shell = dir.join("shell");
    if !shell.exists() {
        let script = "#!/bin/sh\necho \"Welcome to $1\"\nHOST=$1; export HOST; shift; exec \"$@\"\n";
        std::fs::write(dir.join("new"), script).unwrap();
        std::fs::set_permissions(dir.join("new"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(dir.join("new"), &shell).unwrap();
    }
    std::fs::write(dir.join("hosts"), list).unwrap();
    let program = std::env::current_exe().unwrap().into_os_string();
    let agent = ["env".into(), "POSTHASTE_TEST_ROLE=agent".into(), program]
        .into_iter()
        .chain(ROLE_ARGS.map(OsString::from));
    Hosts::read(&dir.join("hosts"))
        .unwrap()
        .remote_shell(["/bin/sh".into(), shell.into_os_string()])
        .agent(agent)
}

fn shell(script: &str) -> Launch {
    Launch::program("/bin/sh").args(["-c", script]).arena_bytes(1 << 20)
}

/// A rank that looks around, meets the others, and leaves what it saw.
fn rank(dir: &Path) {
    let env = JobEnv::from_process().unwrap().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let place = env.rendezvous.clone().unwrap();
    let mut seat =
        Rendezvous::meet(&[place], env.rank, env.size, &env.key, until, Duration::from_secs(5)).unwrap();
    // While all are there, no process of this host shows the key to others.
    seat.all_gather(b"", until).unwrap();
    let key = std::env::var("POSTHASTE_KEY").unwrap();
    for process in std::fs::read_dir("/proc").unwrap() {
        let arguments = std::fs::read(process.unwrap().path().join("cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&arguments).contains(&key), "the key is in an argument list");
    }
    let parts = seat.all_gather(&[env.rank as u8], until).unwrap();
    assert_eq!(parts.len(), env.size as usize);
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    let ring = env.fds.as_ref().unwrap().ring().len();
    let line = format!(
        "{} {:?} {ring} {} {} {}",
        var("HOST"),
        env.nodes,
        env.settings.credits,
        var("POSTHASTE_TEST_EXTRA"),
        std::env::current_dir().unwrap() == dir.canonicalize().unwrap(),
    );
    std::fs::write(dir.join(env.rank.to_string()), line).unwrap();
    // The agent's standard input is the head's to write to.
    assert_eq!(std::io::Read::read(&mut std::io::stdin(), &mut [0; 1]).unwrap(), 0);
}

/// What a job did whose ranks run a script on two hosts; a head that finds a test's mistake is not this process.
/// Enough for whoever is asked to end to get a core.
const LONG: Duration = Duration::from_secs(5);

fn run(script: &str, ranks: u32) -> JobOutcome {
    run_behind(":", script, ranks, LONG)
}

/// The same, where each rank does something before the others can know that it runs.
fn run_behind(first: &str, script: &str, ranks: u32, grace: Duration) -> JobOutcome {
    let job = || {
        let dir = tempfile::tempdir().unwrap();
        // Whoever has to wait for the others to run calls `all`.
        let here = dir.path().display();
        let all = format!("all() {{ until [ $(ls {here} | grep -c ^r) = {ranks} ]; do sleep 0.02; done; }}");
        let script = format!("HERE={here}; {first}; touch {here}/r$POSTHASTE_RANK; {all}; {script}");
        shell(&script).ranks(ranks).grace(grace).run_on(&hosts(dir.path(), TWO)).unwrap()
    };
    // A host that is ended before it has said that its ranks run, however long ago they began, tells that they never did.
    let mut outcome = job();
    for _ in 0..2 {
        if !outcome.ranks.contains(&RankEnd::NotStarted) {
            break;
        }
        outcome = job();
    }
    outcome
}

fn head(dir: &Path, script: &str) -> Command {
    let mut command = process_of("head");
    command.env("POSTHASTE_TEST_DIR", dir).env("POSTHASTE_TEST_SCRIPT", script);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn ranks_of_all_hosts_are_one_job() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    // The directory of the head is that of the ranks: it is a process of its own.
    let list = hosts(dir.path(), TWO);
    let job = Launch::program(program)
        .args(ROLE_ARGS)
        .ranks(4)
        .arena_bytes(1 << 20)
        .env("POSTHASTE_TEST_ROLE", "rank")
        .env("POSTHASTE_TEST_DIR", dir.path())
        .env("POSTHASTE_TEST_EXTRA", "two words")
        .env("POSTHASTE_CREDITS", "77");
    let outcome = job.run_on(&list).unwrap();
    assert!(outcome.success(), "{outcome}");
    assert_eq!(outcome.ranks, [RankEnd::Exit(0); 4]);
    for (rank, host, ring) in
        [(0, "localhost", 2), (1, "localhost", 2), (2, "127.0.0.1", 2), (3, "127.0.0.1", 2)]
    {
        let saw = std::fs::read_to_string(dir.path().join(rank.to_string())).unwrap();
        assert_eq!(saw, format!("{host} [0, 0, 1, 1] {ring} 77 two words false"));
    }
}

#[test]
fn output_comes_through_labelled_or_as_it_is() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let script =
        "echo out $POSTHASTE_RANK; echo err $POSTHASTE_RANK >&2; printf last; pwd | grep -q . && exit 0";
    for label in [false, true] {
        let mut command = head(dir.path(), script);
        if label {
            command.env("POSTHASTE_TEST_LABEL", "1");
        }
        let output = command.current_dir("/tmp").output().unwrap();
        let (out, err) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{err}");
        assert!(!out.contains("Welcome") && err.contains("OUTCOME 4 of 4 ranks ended well"), "{out}{err}");
        for rank in 0..4 {
            let prefix = if label { format!("[{rank}] ") } else { String::new() };
            assert!(out.contains(&format!("{prefix}out {rank}\n")), "{out}");
            assert!(err.contains(&format!("{prefix}err {rank}\n")), "{err}");
            assert!(!label || out.contains(&format!("[{rank}] last\n")), "{out}");
        }
        assert_eq!(out.matches("last").count(), 4);
    }
}

#[test]
fn a_failure_anywhere_ends_the_job_everywhere() {
    let _dog = watchdog();
    for failing in [0, 3] {
        // A moment later: a host that is ended before it has said that its ranks run tells that they never did.
        let fail = "{ all; sleep 0.5; exit 7; }";
        let outcome = run(&format!("[ $POSTHASTE_RANK = {failing} ] && {fail}; exec sleep 100"), 4);
        let failure = outcome.first_failure.clone().unwrap();
        assert_eq!((failure.rank, &failure.cause, outcome.exit_code()), (failing, &Cause::Exit(7), 7));
        assert!(failure.pid.is_some() && outcome.ended_early, "{outcome}");
        let ended = |rank: u32| if rank == failing { RankEnd::Exit(7) } else { RankEnd::Signal(15) };
        assert_eq!(outcome.ranks, (0..4).map(ended).collect::<Vec<_>>());
    }
    // Whoever ignores the request is killed after the grace; a signal counts as 128 and its number.
    let outcome = run_behind(
        "trap '' TERM",
        "[ $POSTHASTE_RANK = 1 ] && { all; sleep 0.5; kill -11 $$; }; while :; do sleep 0.1; done",
        4,
        Duration::from_millis(300),
    );
    assert_eq!((outcome.exit_code(), outcome.ranks[3]), (139, RankEnd::Signal(9)));
    // Or the others go on.
    let dir = tempfile::tempdir().unwrap();
    let script = "[ $POSTHASTE_RANK = 0 ] && exit 4; sleep 0.3";
    let outcome = shell(script).ranks(4).keep_going(true).run_on(&hosts(dir.path(), TWO)).unwrap();
    let well = RankEnd::Exit(0);
    assert_eq!((outcome.exit_code(), &outcome.ranks[..]), (4, &[RankEnd::Exit(4), well, well, well][..]));
}

#[test]
fn a_host_may_be_an_address_in_brackets_which_the_remote_shell_does_not_see() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let script = format!("echo $HOST > {}/$POSTHASTE_RANK", dir.path().display());
    let outcome = shell(&script).ranks(2).run_on(&hosts(dir.path(), "[::1]\nme@[::1]\n")).unwrap();
    assert!(outcome.success(), "{outcome}");
    let told = |rank: u32| std::fs::read_to_string(dir.path().join(rank.to_string())).unwrap();
    assert_eq!((&*told(0), &*told(1)), ("::1\n", "me@::1\n"));
}

#[test]
fn a_host_that_cannot_be_used_is_named() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let list = hosts(dir.path(), TWO);
    let job = |program: &str| Launch::program(program).arena_bytes(4096).ranks(4);
    let told = |outcome: JobOutcome, code: i32, told: &str| {
        let text = outcome.to_string();
        assert_eq!(outcome.exit_code(), code, "{text}");
        assert!(text.contains(told), "{text}");
        // Whichever is heard first.
        assert!(text.contains("host localhost: ") || text.contains("host 127.0.0.1: "), "{text}");
    };
    told(job("/nonexistent/program").run_on(&list).unwrap(), 127, "/nonexistent/program");
    // A remote shell that fails, one that is none, and an agent that is of another time.
    let silent = list.clone().remote_shell(["/bin/sh", "-c", "exit 255"]);
    told(job("/bin/true").run_on(&silent).unwrap(), 127, ": its agent, or the remote shell, has ended");
    told(job("/bin/true").run_on(&silent).unwrap(), 127, "exit status: 255");
    let missing = list.clone().remote_shell(["/nonexistent/ssh"]);
    assert!(matches!(job("/bin/true").run_on(&missing), Err(LaunchError::System { .. })));
    let old = list.clone().remote_shell(["/bin/sh", "-c", "echo posthaste-agent 0.0.1; cat >&2"]);
    told(job("/bin/true").run_on(&old).unwrap(), 127, "of version 0.0.1 and this launcher of");
    let never = list.clone().remote_shell(["/bin/sh", "-c", "exec sleep 100"]);
    let outcome = job("/bin/true").env("POSTHASTE_JOIN_TIMEOUT", "0.2").run_on(&never).unwrap();
    told(outcome, 127, "no agent has started ranks");
    let garbage =
        list.clone().remote_shell(["/bin/sh", "-c", "echo posthaste-agent $1; echo garbage and more"]);
    let garbage = garbage.agent([env!("CARGO_PKG_VERSION")]);
    told(job("/bin/true").run_on(&garbage).unwrap(), 127, "a frame of no known kind");
    for (launch, why) in [
        (job("/bin/true").ranks(6), "6 ranks do not fit on 2 hosts with 5 slots"),
        (job("/bin/true").nodes(2), "each host is a node"),
        (job("/bin/true").env("POSTHASTE_DEVICE", "shm"), "shared memory does not reach across"),
    ] {
        let error = launch.run_on(&list).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    let error = job("/bin/true").run_on(&list.clone().interface("no-such-0")).unwrap_err();
    assert!(error.to_string().contains("no-such-0"), "{error}");
    let elsewhere = |name, value| job("/bin/true").env(name, value).run_on(&list).unwrap_err().to_string();
    let error = elsewhere("POSTHASTE_TCP_INTERFACE", "no-such-1");
    assert!(error.contains("no-such-1") && error.contains("POSTHASTE_TCP_INTERFACE"), "{error}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = elsewhere("POSTHASTE_TCP_PORTS", &format!("{port}-{port}"));
    assert!(error.contains(&port) && error.contains("POSTHASTE_TCP_PORTS"), "{error}");
}

#[test]
fn an_agent_that_is_killed_loses_its_host() {
    let _dog = watchdog();
    let script = "[ $POSTHASTE_RANK = 2 ] && { all; sleep 0.5; kill -9 $PPID; }; exec sleep 100";
    let outcome = run(script, 4);
    let failure = outcome.first_failure.clone().unwrap();
    assert!(matches!(&failure.cause, Cause::HostLost(why) if why.contains("127.0.0.1")), "{outcome}");
    assert_eq!((failure.rank, outcome.exit_code()), (2, 255));
    assert_eq!(outcome.ranks, [RankEnd::Signal(15), RankEnd::Signal(15), RankEnd::Lost, RankEnd::Lost]);
}

/// A head whose ranks sleep, and their processes.
fn sleeping(dir: &Path, prepare: &str) -> (std::process::Child, Vec<u32>) {
    let script = format!(
        "{prepare} echo $$ > {0}/t$$; mv {0}/t$$ {0}/pid$POSTHASTE_RANK; exec sleep 100",
        dir.display()
    );
    let child = head(dir, &script).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = |rank: u32| std::fs::read_to_string(dir.join(format!("pid{rank}"))).ok()?.trim().parse().ok();
    eventually("all ranks run", || (0..4).all(|rank| pid(rank).is_some()));
    (child, (0..4).filter_map(pid).collect())
}

#[test]
fn no_rank_outlives_the_head() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, pids) = sleeping(dir.path(), "trap '' TERM HUP INT;");
    assert!(pids.iter().all(|pid| runs(*pid)));
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("no rank is left", || !pids.iter().any(|pid| runs(*pid)));
}

#[test]
fn signals_reach_the_ranks_of_all_hosts() {
    let _dog = watchdog();
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::USR1, 138)] {
        let dir = tempfile::tempdir().unwrap();
        let (mut child, pids) = sleeping(dir.path(), "");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        eventually("no rank is left", || !pids.iter().any(|pid| runs(*pid)));
    }
}

#[test]
fn a_failure_ends_the_ranks_of_its_host_though_nobody_reads_what_they_print() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let note = format!("echo $$ > {0}/t$$; mv {0}/t$$ {0}/pid$POSTHASTE_RANK", dir.path().display());
    // Rank 1 fails when its own agent has been waiting for a reader for a while.
    let script = format!(
        "{note}; case $POSTHASTE_RANK in 0) exec yes;; 1) until [ -e {}/stalled ]; do sleep 0.02; done; exit 7;; \
         *) exec sleep 100;; esac",
        dir.path().display()
    );
    let mut child = head(dir.path(), &script).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let pid =
        |rank: u32| std::fs::read_to_string(dir.path().join(format!("pid{rank}"))).ok()?.trim().parse().ok();
    eventually("all ranks run", || (0..4).all(|rank| pid(rank).is_some()));
    let written = |pid: u32| {
        let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        io.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse::<u64>().ok())
    };
    let printing = pid(0).unwrap();
    let mut before = None;
    eventually("rank 0 waits for a reader", || {
        std::thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut before, written(printing)) == before && before.is_some_and(|bytes| bytes > 0)
    });
    std::fs::write(dir.path().join("stalled"), "").unwrap();
    eventually("rank 0 is ended", || !runs(printing));
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("no rank is left", || (0..4).filter_map(pid).all(|pid: u32| !runs(pid)));
}

#[test]
fn a_rank_that_fails_when_all_others_have_ended_has_ended_none() {
    let _dog = watchdog();
    // The others have been waited for when there are no more processes of theirs; the head hears of that a moment later.
    let outcome = run_behind(
        "echo $$ > $HERE/p$POSTHASTE_RANK",
        "all; [ $POSTHASTE_RANK = 3 ] || exit 0
         for rank in 0 1 2; do while kill -0 $(cat $HERE/p$rank) 2>/dev/null; do sleep 0.02; done; done; sleep 5; exit 3",
        4,
        LONG,
    );
    assert_eq!((outcome.exit_code(), outcome.ended_early), (3, false), "{outcome}");
}

#[test]
fn a_job_that_has_not_begun_can_be_ended_too() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let mut command = head(dir.path(), "exit 0");
    let mut child = command.env("POSTHASTE_TEST_NEVER", "1").stderr(Stdio::null()).spawn().unwrap();
    eventually("the remote shells were asked", || dir.path().join("asked").exists());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}
