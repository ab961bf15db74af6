//! How jobs end, and that nothing outlives them.

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{assigned, eventually, job_of_shell, process_of, runs, watchdog};
use posthaste_launch::{Cause, Launch, LaunchError, Output, RankEnd, RunningJob, Signal};
use rustix::process::{Pid, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// Does nothing for longer than any test lasts.
const SLEEP: &str = "exec sleep 100";

#[test]
fn role() {
    let Some(role) = assigned() else { return };
    let dir = std::env::var("POSTHASTE_TEST_DIR").unwrap_or_default();
    let ready = |pids: Vec<Option<u32>>| {
        let pids: Vec<String> = pids.into_iter().flatten().map(|pid| pid.to_string()).collect();
        std::fs::write(format!("{dir}/pids.new"), pids.join(" ")).unwrap();
        std::fs::rename(format!("{dir}/pids.new"), format!("{dir}/pids")).unwrap();
    };
    let wait = |launch: Launch| -> ! {
        let job = launch.spawn().unwrap();
        eventually("the ranks are ready", || (0..job.size()).all(|rank| job.output(rank).0 == b"ready\n"));
        ready(job.pids());
        let outcome = job.wait();
        drop(job);
        eprintln!("OUTCOME {outcome}");
        std::process::exit(outcome.exit_code())
    };
    let prepared = |script: &str| {
        job_of_shell(script).ranks(2).forward_signals(true).keep_going(true).stdout(Output::Capture)
    };
    match role.as_str() {
        "launcher" => wait(prepared("echo ready; exec sleep 100").forward_signals(false)),
        "forward" => {
            wait(prepared("trap 'exit 9' TERM; trap 'exit 7' USR1; echo ready; while :; do sleep 0.02; done"))
        }
        // Each rank notes what it gets, and only one of them is in the launcher's process group.
        "terminal" => {
            let note = format!("for s in INT HUP; do trap \"echo $s >> {dir}/$POSTHASTE_RANK\" $s; done");
            let script = format!("{note}; trap 'exit 0' USR1; echo ready; while :; do sleep 0.02; done");
            let own =
                format!("[ $POSTHASTE_RANK = 0 ] || exec setsid sh -c '{}'", script.replace('\'', "'\\''"));
            wait(prepared(&format!("{own}; {script}")).grace(Duration::from_secs(100)))
        }
        // As every child of a process that has handlers.
        "unborn" => {
            let job = job_of_shell(SLEEP).forward_signals(true).spawn().unwrap();
            for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2] {
                let mut child = Command::new("true");
                let tell = move || Ok(kill_process(rustix::process::getpid(), signal)?);
                // SAFETY: two system calls.
                unsafe { child.pre_exec(tell) };
                assert_eq!(child.status().unwrap().signal(), Some(signal.as_raw()));
            }
            drop(job);
            std::process::exit(0);
        }
        "gentle" => {
            let script = "trap 'echo told; sleep 0.5; exit 7' TERM; echo ready; while :; do sleep 0.02; done";
            let ended = |first: &dyn Fn(&RunningJob)| {
                let job = prepared(script).ranks(1).grace(Duration::from_secs(100)).spawn().unwrap();
                eventually("the rank is ready", || job.output(0).0 == b"ready\n");
                first(&job);
                for _ in 0..2 {
                    std::thread::sleep(Duration::from_millis(150));
                    job.end();
                }
                assert_eq!(job.wait().ranks, [RankEnd::Exit(7)]);
                job.output(0).0
            };
            assert_eq!(ended(&RunningJob::end), b"ready\ntold\n");
            ended(&|_| kill_process(rustix::process::getpid(), Signal::TERM).unwrap());
            std::process::exit(0);
        }
        "forgetful" => {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
            let ignored = u64::from_str_radix(ignored, 16).unwrap();
            assert!(ignored & (1 << (Signal::CHILD.as_raw() - 1)) != 0, "the kernel is not told to reap");
            // One job each: of a job of both, the failure of the one might end the other before it has exited.
            for code in [0, 3] {
                let outcome = job_of_shell(&format!("exit {code}")).spawn().unwrap().wait();
                assert_eq!(outcome.ranks, [RankEnd::Exit(code)]);
            }
            std::process::exit(0);
        }
        "stubborn" => {
            wait(prepared("trap '' TERM; echo ready; exec sleep 100").grace(Duration::from_secs(1000)))
        }
        "patient" => {
            wait(prepared("trap '' TERM; echo ready; exec sleep 100").grace(Duration::from_millis(100)))
        }
        "after" => {
            let job = job_of_shell("exit 0").forward_signals(true).spawn().unwrap();
            assert!(job.wait().success());
            ready(vec![Some(0)]);
            std::thread::sleep(Duration::from_secs(30));
        }
        "no-pidfd" => {
            let job =
                job_of_shell("[ $POSTHASTE_RANK = 0 ] && exec sleep 100; exit 5").ranks(2).spawn().unwrap();
            std::process::exit(job.wait().exit_code());
        }
        "idle" => {
            let used = || {
                let usage = std::fs::read_to_string("/proc/self/stat").unwrap();
                let fields: Vec<&str> = usage.rsplit(')').next().unwrap().split_whitespace().collect();
                fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
            };
            let job = job_of_shell("exec sleep 1").ranks(4).forward_signals(true).spawn().unwrap();
            let before = used();
            assert!(job.wait().success());
            // In ticks of 10 ms: one thread that polls all the time would use about a hundred.
            assert!(used() - before < 20, "{} ticks", used() - before);
            std::process::exit(0);
        }
        other => panic!("no role {other}"),
    }
}

/// A launcher in a process of its own, and the processes of its ranks.
fn launcher(role: &str, dir: &Path) -> (Child, Vec<u32>) {
    started(process_of(role), dir)
}

#[test]
fn a_launcher_that_is_told_to_end_says_so() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let mut launcher = process_of("patient");
    launcher.env("POSTHASTE_TEST_DIR", dir.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = launcher.spawn().unwrap();
    eventually("the launcher is ready", || dir.path().join("pids").exists());
    send(&child, Signal::TERM);
    let said = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    // The ranks do not end by it, and are killed.
    let told = said.split_once("OUTCOME told to end by signal 15 (SIGTERM): rank ").expect(&said).1;
    assert!(told.contains(" was killed by signal 9 (SIGKILL) after "), "{said}");
}

fn started(mut launcher: Command, dir: &Path) -> (Child, Vec<u32>) {
    let child =
        launcher.env("POSTHASTE_TEST_DIR", dir).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("the launcher is ready", || dir.join("pids").exists());
    let pids = std::fs::read_to_string(dir.join("pids")).unwrap();
    (child, pids.split(' ').map(|pid| pid.parse().unwrap()).collect())
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn all_gone(pids: &[u32]) {
    eventually("no rank is left", || !pids.iter().any(|pid| runs(*pid)));
}

#[test]
fn a_failing_rank_ends_the_job_with_its_code() {
    let _dog = watchdog();
    let job = job_of_shell("[ $POSTHASTE_RANK = 1 ] && exit 7; exec sleep 100").ranks(3).spawn().unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.ranks, [RankEnd::Signal(15), RankEnd::Exit(7), RankEnd::Signal(15)]);
    assert_eq!(outcome.exit_code(), 7);
    let failure = outcome.first_failure.as_ref().unwrap();
    assert_eq!((failure.rank, &failure.cause, failure.pid), (1, &Cause::Exit(7), job.pid(1)));
    let text = outcome.to_string();
    assert!(text.starts_with("rank 1 (pid ") && text.contains("exited with code 7"), "{text}");
    assert!(text.ends_with("the other ranks were ended") && !text.contains('\n'), "{text}");
}

#[test]
fn a_signal_gives_128_and_its_number() {
    let _dog = watchdog();
    let job = job_of_shell(SLEEP).ranks(2).spawn().unwrap();
    assert_eq!(job.try_wait(0), None);
    assert!(job.wait_timeout(Duration::from_millis(20)).is_none());
    job.kill(1).unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.exit_code(), 137);
    assert_eq!(job.try_wait(1), Some(RankEnd::Signal(9)));
    assert_eq!(job.wait_timeout(Duration::ZERO), Some(outcome.clone()));
    assert!(outcome.to_string().contains("killed by signal 9 (SIGKILL)"), "{outcome}");
    assert!(job.kill(1).is_err() && job.signal(2, Signal::TERM).is_err());
    let job = job_of_shell(SLEEP).spawn().unwrap();
    job.signal(0, Signal::USR1).unwrap();
    assert_eq!(job.wait().exit_code(), 128 + 10);
}

#[test]
fn whoever_ignores_the_request_is_killed_after_the_grace() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let ready = dir.path().join("ready");
    let ready = ready.display();
    let script = format!(
        "trap '' TERM; [ $POSTHASTE_RANK = 1 ] && {{ until [ -e {ready} ]; do sleep 0.05; done; exit 3; }};
         : >{ready}; exec sleep 100"
    );
    let job = job_of_shell(&script).ranks(2).grace(Duration::from_millis(100)).spawn().unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.ranks, [RankEnd::Signal(9), RankEnd::Exit(3)]);
    assert_eq!(outcome.exit_code(), 3);
}

#[test]
fn the_others_go_on_if_told_so() {
    let _dog = watchdog();
    let script = "[ $POSTHASTE_RANK = 0 ] || { sleep 0.3; exit 0; }; exit 4";
    let outcome = job_of_shell(script).ranks(3).keep_going(true).spawn().unwrap().wait();
    assert_eq!(outcome.ranks, [RankEnd::Exit(4), RankEnd::Exit(0), RankEnd::Exit(0)]);
    assert_eq!(outcome.exit_code(), 4);
    assert!(outcome.to_string().ends_with("no other rank failed"), "{outcome}");
}

#[test]
fn a_rank_starts_later() {
    let _dog = watchdog();
    let began = Instant::now();
    let before = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    // A process knows when it began, and a shell later what time it is.
    let job = job_of_shell("date +%s%N; cut -d' ' -f22 /proc/$$/stat")
        .ranks(2)
        .delay(0, Duration::from_millis(400))
        .stdout(Output::Capture)
        .spawn()
        .unwrap();
    assert!(job.wait().success() && began.elapsed() >= Duration::from_millis(400));
    let times = [0, 1].map(|rank| {
        let said = String::from_utf8(job.output(rank).0).unwrap();
        said.lines().map(|line| line.parse::<u128>().unwrap()).collect::<Vec<_>>()
    });
    let since = times[0][0].saturating_sub(before.as_nanos());
    assert!(since >= 400_000_000, "rank 0 started after {since} ns");
    assert!(times[1][1] <= times[0][1], "ticks at which they began: {times:?}");
}

#[test]
fn a_rank_whose_time_never_came() {
    let _dog = watchdog();
    let job = job_of_shell("exit 1").ranks(2).delay(1, Duration::from_secs(1000)).spawn().unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.ranks, [RankEnd::Exit(1), RankEnd::NotStarted]);
    assert_eq!(job.pids()[1], None);
}

#[test]
fn a_job_that_is_ended_before_all_ranks_have_begun_has_failed() {
    let _dog = watchdog();
    // None runs, or the one that does ends well.
    let none = job_of_shell("exit 0").ranks(1).delay(0, Duration::from_secs(1000)).spawn().unwrap();
    let one = job_of_shell("trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done").ranks(2);
    let one = one.delay(1, Duration::from_secs(1000)).stdout(Output::Capture).spawn().unwrap();
    eventually("it handles signals", || one.output(0).0 == b"ready\n");
    for (job, first) in [(none, 0), (one, 1)] {
        job.end();
        let outcome = job.wait();
        let failure = outcome.first_failure.as_ref().expect("it was ended");
        assert_eq!((failure.rank, &failure.cause), (first, &Cause::Signal(15)), "{failure}");
        assert_eq!((outcome.exit_code(), outcome.ended_early), (143, true), "{outcome}");
    }
}

#[test]
fn never_may_be_said_of_a_time() {
    let _dog = watchdog();
    let job = job_of_shell("exit 3").ranks(2).delay(1, Duration::MAX).grace(Duration::MAX);
    let outcome = job.spawn().unwrap().wait();
    let failure = outcome.first_failure.as_ref().expect("a rank has failed");
    assert_eq!((failure.rank, outcome.exit_code()), (0, 3), "{failure}");
}

#[test]
fn a_program_that_does_not_exist() {
    let _dog = watchdog();
    let error = Launch::program("/nonexistent/program").arena_bytes(4096).ranks(2).spawn().unwrap_err();
    assert!(matches!(error, LaunchError::Spawn { rank: 0, .. }), "{error}");
    let job = Launch::program("/nonexistent/program").arena_bytes(4096);
    let outcome = job.delay(0, Duration::from_millis(10)).spawn().unwrap().wait();
    assert_eq!((outcome.exit_code(), &outcome.ranks[..]), (127, &[RankEnd::NotStarted][..]));
    assert!(outcome.to_string().contains("could not be started"), "{outcome}");
}

#[test]
fn a_wrong_description_is_refused() {
    let job = || job_of_shell("exit 0");
    for launch in [
        job().ranks(0),
        job().ranks(4097),
        job().contexts(0),
        job().clients(5000),
        job().delay(1, Duration::ZERO),
        job().broker_rank(1),
        job().broker_rank(0).delay(0, Duration::ZERO),
        Launch::program("/bin/sh"),
    ] {
        assert!(matches!(launch.spawn(), Err(LaunchError::Invalid(_))));
    }
}

#[test]
fn dropping_a_job_leaves_no_rank() {
    let _dog = watchdog();
    let job = job_of_shell("trap '' TERM; exec sleep 100").ranks(3).spawn().unwrap();
    let pids: Vec<u32> = job.pids().into_iter().flatten().collect();
    assert!(pids.len() == 3 && pids.iter().all(|pid| runs(*pid)));
    drop(job);
    for pid in pids {
        assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap(), "not even a zombie");
    }
}

#[test]
fn the_thread_that_started_a_job_may_end() {
    let _dog = watchdog();
    let job = std::thread::spawn(|| job_of_shell(SLEEP).spawn().unwrap()).join().unwrap();
    assert_eq!(job.wait_timeout(Duration::from_millis(200)), None);
}

#[test]
fn ranks_are_pinned_to_their_cores() {
    let _dog = watchdog();
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let allowed: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let script = "grep Cpus_allowed_list /proc/self/status";
    let job = job_of_shell(script).ranks(3).bind(true).stdout(Output::Capture).spawn().unwrap();
    assert!(job.wait().success());
    for rank in 0..3 {
        let wanted = format!("Cpus_allowed_list:\t{}\n", allowed[rank as usize % allowed.len()]);
        assert_eq!(String::from_utf8(job.output(rank).0).unwrap(), wanted);
    }
}

#[test]
fn a_killed_launcher_leaves_no_rank() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, pids) = launcher("launcher", dir.path());
    assert!(pids.len() == 2 && pids.iter().all(|pid| runs(*pid)));
    send(&child, Signal::KILL);
    child.wait().unwrap();
    all_gone(&pids);
}

#[test]
fn signals_reach_the_ranks_through_the_launcher() {
    let _dog = watchdog();
    for (signal, code) in [(Signal::TERM, 9), (Signal::USR1, 7)] {
        let dir = tempfile::tempdir().unwrap();
        let (mut child, pids) = launcher("forward", dir.path());
        send(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        all_gone(&pids);
    }
}

/// A launcher that leads the session of a terminal, whose other end this is.
fn on_a_terminal(dir: &Path) -> (Child, Vec<u32>, OwnedFd) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap();
    let inner = std::fs::OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let role = process_of("terminal");
    let mut launcher = Command::new("setsid");
    launcher
        .arg("--ctty")
        .arg(role.get_program())
        .args(role.get_args())
        .env("POSTHASTE_TEST_ROLE", "terminal");
    launcher.stdin(inner);
    let (child, pids) = started(launcher, dir);
    (child, pids, terminal)
}

#[test]
fn what_the_terminal_sends_reaches_every_rank_once_and_so_does_its_end() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, pids, terminal) = on_a_terminal(dir.path());
    let noted = |rank: u32| std::fs::read_to_string(dir.path().join(rank.to_string())).unwrap_or_default();
    rustix::io::write(&terminal, b"\x03").unwrap();
    eventually("both get Ctrl-C", || (0..2).all(|rank| noted(rank) == "INT\n"));
    // Within the tenth of a second in which a second request is the same one.
    drop(terminal);
    eventually("both hear of the terminal's end", || (0..2).all(|rank| noted(rank) == "INT\nHUP\n"));
    send(&child, Signal::USR1);
    child.wait().unwrap();
    all_gone(&pids);
}

#[test]
fn a_signal_is_not_lost_to_a_child_that_has_yet_to_become_its_program() {
    let _dog = watchdog();
    assert!(process_of("unborn").stdout(Stdio::null()).status().unwrap().success());
}

#[test]
fn a_launcher_that_was_told_to_forget_its_children_sees_how_ranks_end() {
    let _dog = watchdog();
    let role = process_of("forgetful");
    // Shells have a mind of their own about this signal.
    let mut launcher = Command::new("env");
    launcher.arg("--ignore-signal=CHLD").arg(role.get_program()).args(role.get_args());
    launcher.env("POSTHASTE_TEST_ROLE", "forgetful").stdout(Stdio::null());
    assert!(launcher.status().unwrap().success());
}

#[test]
fn a_second_request_kills_and_so_does_the_end_of_the_grace() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, pids) = launcher("stubborn", dir.path());
    send(&child, Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    assert!(pids.iter().all(|pid| runs(*pid)), "one request is not enough");
    // Another one, however late the first one was taken.
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None => send(&child, Signal::TERM),
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(status.code(), Some(137));
    all_gone(&pids);

    let dir = tempfile::tempdir().unwrap();
    let (mut child, pids) = launcher("patient", dir.path());
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(137));
    all_gone(&pids);
}

#[test]
fn whoever_ends_a_job_twice_or_after_a_signal_leaves_the_ranks_their_grace() {
    let _dog = watchdog();
    assert!(process_of("gentle").stdout(Stdio::null()).status().unwrap().success());
}

#[test]
fn after_the_job_signals_act_as_ever() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let (mut child, _) = launcher("after", dir.path());
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().signal(), Some(15));
}

#[test]
fn without_pidfds_ends_are_seen_too() {
    let _dog = watchdog();
    let status = process_of("no-pidfd").env("POSTHASTE_TEST_NO_PIDFD", "1").stdout(Stdio::null()).status();
    assert_eq!(status.unwrap().code(), Some(5));
}

#[test]
fn waiting_costs_nothing() {
    let _dog = watchdog();
    assert!(process_of("idle").stdout(Stdio::null()).status().unwrap().success());
}

#[test]
fn a_rank_that_fails_is_started_again_so_often_and_no_oftener() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    // Rank 1 fails for good, which ends the job, only when rank 0 has been seen to end.
    let script = format!(
        "echo $POSTHASTE_RANK $POSTHASTE_RESTART ${{POSTHASTE_FDS:+inherits}}
         if [ $POSTHASTE_RANK = 0 ]; then echo $$ > '{0}.new'; mv '{0}.new' '{0}'; exit 0; fi
         until [ -e '{0}' ] && ! kill -0 $(cat '{0}') 2>/dev/null; do sleep 0.01; done
         exit 4",
        pid.display()
    );
    let job = job_of_shell(&script).ranks(2).restart(2).stdout(Output::Capture).spawn().unwrap();
    let outcome = job.wait();
    assert_eq!((job.restarts(0), job.restarts(1)), (0, 2));
    let printed = |rank| String::from_utf8(job.output(rank).0).unwrap();
    assert_eq!(printed(0), "0 1 inherits\n");
    // What its predecessor had is not for it: the memory of the node, and its doorbell.
    assert_eq!(printed(1), "1 1 inherits\n1 1\n1 1\n");
    assert_eq!(outcome.ranks, [RankEnd::Exit(0), RankEnd::Exit(4)]);
    assert_eq!(outcome.first_failure.map(|failure| (failure.rank, failure.cause)), Some((1, Cause::Exit(4))));

    // A failure that was made good counts for nothing.
    let script = "[ -n \"$POSTHASTE_FDS\" ] && [ $POSTHASTE_RANK = 1 ] && kill -9 $$; exit 0";
    let job = job_of_shell(script).ranks(2).restart(1).spawn().unwrap();
    let outcome = job.wait();
    assert!(outcome.success() && job.restarts(1) == 1, "{outcome}");

    // Nobody is started again once the job ends.
    let job = job_of_shell(SLEEP).ranks(2).restart(9).spawn().unwrap();
    job.end();
    let outcome = job.wait();
    assert_eq!((job.restarts(0), job.restarts(1)), (0, 0), "{outcome}");
}

#[test]
fn what_cannot_be_started_again_is_refused() {
    let refused = |launch: Launch| match launch.spawn() {
        Err(LaunchError::Invalid(why)) => why,
        other => panic!("{other:?}"),
    };
    let why = refused(job_of_shell(SLEEP).restart(1).env("POSTHASTE_DEVICE", "shm"));
    assert!(why.contains("sockets"), "{why}");
}
