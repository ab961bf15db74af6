//! What becomes of what ranks print.

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::{assigned, job_of_shell, process_of, watchdog};
use posthaste_launch::Output;

#[test]
fn role() {
    match assigned().as_deref() {
        None => return,
        Some("label") => {
            let script = "printf 'out %s\\n\\nlast' $POSTHASTE_RANK; printf 'err\\n' >&2";
            let outcome = job_of_shell(script).ranks(2).label(true).spawn().unwrap().wait();
            assert!(outcome.success(), "{outcome}");
        }
        Some("closed") => {
            // More than a pipe holds: a launcher that stopped reading would hang its ranks.
            let script = "dd if=/dev/zero bs=1000 count=500 2>/dev/null | tr '\\0' 'x'; exit 6";
            let job = job_of_shell(script).label(true).spawn().unwrap();
            std::process::exit(job.wait().exit_code());
        }
        Some("plain") => assert!(job_of_shell("echo plain; cat").ranks(2).spawn().unwrap().wait().success()),
        Some(other) => panic!("no role {other}"),
    }
    std::process::exit(0);
}

#[test]
fn lines_get_labels_and_streams_stay_apart() {
    let _dog = watchdog();
    let out = process_of("label").output().unwrap();
    assert!(out.status.success());
    let lines = |bytes: &[u8]| {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let mut lines: Vec<String> =
            text.lines().filter(|line| line.starts_with('[')).map(String::from).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines(&out.stdout), ["[0] ", "[0] last", "[0] out 0", "[1] ", "[1] last", "[1] out 1"]);
    assert_eq!(lines(&out.stderr), ["[0] err", "[1] err"]);
}

#[test]
fn ranks_go_on_when_nobody_reads_the_launcher() {
    let _dog = watchdog();
    let mut child = process_of("closed").stdout(Stdio::piped()).spawn().unwrap();
    // The harness of the role needs its output until the role begins.
    let mut seen = Vec::new();
    let mut out = child.stdout.take().unwrap();
    while !seen.ends_with(b"[0] ") {
        let mut byte = [0];
        std::io::Read::read_exact(&mut out, &mut byte).unwrap();
        seen.push(byte[0]);
    }
    drop(out);
    assert_eq!(child.wait().unwrap().code(), Some(6));
}

#[test]
fn streams_are_inherited_and_input_goes_to_rank_0() {
    let _dog = watchdog();
    let mut child = process_of("plain").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"typed\n").unwrap();
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(text.lines().filter(|line| *line == "plain").count(), 2, "{text}");
    assert_eq!(text.lines().filter(|line| *line == "typed").count(), 1, "{text}");
}

#[test]
fn captured_output_is_whole_and_separate() {
    let _dog = watchdog();
    let script = "dd if=/dev/zero bs=1000 count=300 2>/dev/null; echo $POSTHASTE_RANK >&2";
    let job = job_of_shell(script)
        .ranks(2)
        .label(true)
        .stdout(Output::Capture)
        .stderr(Output::Capture)
        .spawn()
        .unwrap();
    assert!(job.wait().success());
    assert_eq!(job.output(0), (vec![0; 300_000], b"0\n".to_vec()));
    assert_eq!(job.output(1), (vec![0; 300_000], b"1\n".to_vec()));
    assert_eq!(job.output(2), (Vec::new(), Vec::new()));
}

#[test]
fn a_process_left_behind_does_not_hold_the_job() {
    // Nor does one that says something now and then, or again and again.
    for does in
        ["sleep 100", "(while :; do echo here; sleep 0.5; done)", "(while :; do echo here; sleep 0.01; done)"]
    {
        left_behind(does);
    }
}

fn left_behind(does: &str) {
    let _dog = watchdog();
    let job = job_of_shell(&format!("{does} & echo $!; exit 0"))
        .stdout(Output::Capture)
        .grace(Duration::from_millis(100))
        .spawn()
        .unwrap();
    let outcome = job.wait();
    let left = String::from_utf8(job.output(0).0).unwrap();
    let number = left.lines().find(|line| *line != "here").expect("its number");
    let pid = rustix::process::Pid::from_raw(number.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, posthaste_launch::Signal::KILL).unwrap();
    assert!(outcome.success());
}
