//! Ranks that are not the launcher's own children: a script stands between, which may end alone.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use common::{ROLE_ARGS, assigned, eventually, process_of, runs, watchdog};
use posthaste_launch::{AdoptError, JobEnv, Launch, RankEnd, Signal};
use rustix::process::{Pid, kill_process};

#[test]
fn role() {
    let Some(role) = assigned() else { return };
    let launch = |script: &str| wrapped(script, &dir(), "rank");
    match role.as_str() {
        "rank" => {
            let env = as_orphan();
            env.hold_lifeline().unwrap();
            env.hold_lifeline().expect("a rank may come here twice, if its meeting fails");
            tell(&format!("rank{}", env.rank), std::process::id());
            std::thread::sleep(Duration::from_secs(100));
        }
        "brief" => {
            let env = as_orphan();
            env.hold_lifeline().unwrap();
            tell("began", std::process::id());
            std::thread::sleep(Duration::from_millis(500));
            tell("ended", "");
        }
        "late" => {
            let env = as_orphan();
            tell("began", std::process::id());
            eventually("the launcher has ended", || told("go").is_some());
            tell("refused", env.hold_lifeline().unwrap_err());
        }
        "stranger" => {
            let env = as_orphan();
            let error = env.hold_lifeline().unwrap_err();
            assert!(matches!(error, AdoptError::Lifeline { .. }), "{error}");
            tell("refused", error);
        }
        "launcher" => drop(launch(PATIENT).spawn().unwrap().wait()),
        "launcher of one that is late" => drop(wrapped(PATIENT, &dir(), "late").spawn().unwrap().wait()),
        other => panic!("no role {other}"),
    }
    std::process::exit(0);
}

/// A script that waits for its rank.
const PATIENT: &str = "\"$0\" \"$@\"; exit $?";
/// One that does not.
const HASTY: &str = "\"$0\" \"$@\" & exit 0";

/// Not ended with the process that started it, as programs are not.
fn as_orphan() -> JobEnv {
    rustix::process::set_parent_process_death_signal(None).unwrap();
    JobEnv::from_process().unwrap().unwrap()
}

/// One rank, which a script starts: this binary in a role.
fn wrapped(script: &str, dir: &Path, role: &str) -> Launch {
    Launch::program("/bin/sh")
        .args(["-c", script])
        .args([std::env::current_exe().unwrap()])
        .args(ROLE_ARGS)
        .env("POSTHASTE_TEST_ROLE", role)
        .env("POSTHASTE_TEST_DIR", dir)
        .arena_bytes(1 << 20)
        .stdout(posthaste_launch::Output::Null)
}

fn dir() -> PathBuf {
    std::env::var_os("POSTHASTE_TEST_DIR").unwrap().into()
}

fn tell(name: &str, text: impl ToString) {
    std::fs::write(dir().join(format!("{name}.new")), text.to_string()).unwrap();
    std::fs::rename(dir().join(format!("{name}.new")), dir().join(name)).unwrap();
}

fn told(name: &str) -> Option<String> {
    std::fs::read_to_string(dir().join(name)).ok()
}

/// What a process has told in that directory, once it has.
fn awaited(dir: &Path, name: &str) -> String {
    eventually(name, || dir.join(name).exists());
    std::fs::read_to_string(dir.join(name)).unwrap()
}

fn launcher(role: &str, dir: &Path) -> Child {
    process_of(role).env("POSTHASTE_TEST_DIR", dir).stdout(Stdio::null()).spawn().unwrap()
}

fn kill(process: &mut Child) {
    kill_process(Pid::from_child(process), Signal::KILL).unwrap();
    process.wait().unwrap();
}

#[test]
fn a_killed_launcher_leaves_no_rank_behind_a_script() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let mut launcher = launcher("launcher", dir.path());
    let rank = awaited(dir.path(), "rank0").parse().unwrap();
    assert!(runs(rank));
    kill(&mut launcher);
    eventually("the rank is gone", || !runs(rank));
}

#[test]
fn no_rank_outlives_a_job_though_its_script_was_ended_alone() {
    let _dog = watchdog();
    // By the failure of another, and by its holder.
    for fails in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let other = format!(
            "[ $POSTHASTE_RANK = 0 ] || {{ until [ -e {}/go ]; do sleep 0.02; done; exit 3; }}",
            dir.path().display()
        );
        let job = wrapped(&format!("{other}; {PATIENT}"), dir.path(), "rank").ranks(2);
        let job = job.grace(Duration::from_millis(300)).spawn().unwrap();
        let rank = awaited(dir.path(), "rank0").parse().unwrap();
        assert_ne!(job.pid(0), Some(rank), "no script stands between");
        if fails {
            std::fs::write(dir.path().join("go"), "").unwrap();
            let outcome = job.wait();
            assert_eq!(outcome.ranks, [RankEnd::Signal(Signal::TERM.as_raw()), RankEnd::Exit(3)]);
        }
        assert!(fails != runs(rank), "whoever waits for a job finds nothing of it");
        drop(job);
        assert!(!runs(rank), "whoever drops a job finds nothing of it");
    }
}

#[test]
fn a_rank_whose_script_has_ended_has_the_grace_to_end() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let job = wrapped(HASTY, dir.path(), "brief").grace(Duration::from_secs(100)).spawn().unwrap();
    assert!(job.wait().success());
    assert!(dir.path().join("ended").exists(), "the job has ended before its rank");
}

#[test]
fn what_a_script_starts_besides_its_rank_is_left_alone() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let script = format!("sleep 100 2> /dev/null & echo $! > '{}/besides'; exit 0", dir.path().display());
    let job = wrapped(&script, dir.path(), "rank").grace(Duration::from_millis(100)).spawn().unwrap();
    let outcome = job.wait();
    drop(job);
    let besides: i32 = awaited(dir.path(), "besides").trim().parse().unwrap();
    let ran = runs(besides as u32);
    kill_process(Pid::from_raw(besides).unwrap(), Signal::KILL).unwrap();
    assert!(outcome.success() && ran, "{outcome}");
}

#[test]
fn who_comes_when_the_launcher_has_gone_is_told() {
    let _dog = watchdog();
    let dir = tempfile::tempdir().unwrap();
    let mut launcher = launcher("launcher of one that is late", dir.path());
    let rank = awaited(dir.path(), "began").parse().unwrap();
    kill(&mut launcher);
    assert!(runs(rank), "it holds on to nothing yet");
    std::fs::write(dir.path().join("go"), "").unwrap();
    assert_eq!(awaited(dir.path(), "refused"), AdoptError::LauncherGone.to_string());
}

#[test]
fn a_number_that_is_not_the_launchers_is_refused_and_left_alone() {
    let _dog = watchdog();
    // Closed, something else, and the end of a pipe that is not for reading.
    let writes = "rm -f \"$POSTHASTE_TEST_DIR/fifo\"; mkfifo \"$POSTHASTE_TEST_DIR/fifo\"; exec 9<> \"$POSTHASTE_TEST_DIR/fifo\"";
    for (script, problem) in [
        ("exec 9<&-", "is not open"),
        ("exec 9< /dev/null", "is no read end of a pipe"),
        (writes, "is no read end of a pipe"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let script = format!("{script}; export POSTHASTE_LIFELINE=9; {PATIENT}");
        let job = wrapped(&script, dir.path(), "stranger").spawn().unwrap();
        let outcome = job.wait();
        let refused = awaited(dir.path(), "refused");
        assert!(
            refused.contains("descriptor 9 named in POSTHASTE_LIFELINE") && refused.contains(problem),
            "{refused}"
        );
        assert!(outcome.success(), "{outcome}");
    }
}
