//! The command `posthaste info`, as a user types it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_posthaste");

fn info() -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg("info").env_remove("RUST_LOG");
    command
}

#[test]
fn all_devices_limits_checks_and_settings_are_told() {
    let out = info().output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for told in
        ["Devices", "shm", "tcp", "Limits", "This host", "membarrier", "Settings", "POSTHASTE_SPIN_US"]
    {
        assert!(text.contains(told), "{told:?} is not in {text}");
    }
    let cores = std::thread::available_parallelism().unwrap().get();
    let told = text.contains("barrier on a busy core");
    assert!(told || cores < 2 || text.contains("refused"), "{text}");

    let out = info().arg("--json").env("POSTHASTE_CREDITS", "77").output().unwrap();
    let all: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let names: Vec<&str> =
        all["devices"].as_array().unwrap().iter().map(|caps| caps["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["shm", "tcp"]);
    assert!(all["devices"].as_array().unwrap().iter().all(|caps| caps["native_put"] == true));
    assert_eq!(all["settings"]["POSTHASTE_CREDITS"], "77");
    assert!(all["checks"].as_array().unwrap().len() >= 8);
}

#[test]
fn a_wrong_setting_is_told_in_one_line() {
    let out = info().env("POSTHASTE_CREDITS", "many").output().unwrap();
    let err = String::from_utf8(out.stderr).unwrap();
    assert_eq!((out.status.code(), err.lines().count()), (Some(2), 1), "{err}");
    assert!(err.contains("POSTHASTE_CREDITS") && err.contains("many"), "{err}");
}

#[test]
fn whoever_reads_the_first_line_only_is_no_reason_to_panic() {
    let mut child = info().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::with_capacity(16, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("posthaste "), "{line}");
    let out = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stderr), "");
    // It may have written all of it before the pipe was closed.
    assert!(matches!(out.status.code(), Some(0 | 141)), "{}", out.status);
}
