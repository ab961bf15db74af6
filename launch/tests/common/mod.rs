//! What the tests share: programs that are this test binary in another role, watchdogs, and a look at processes.
#![allow(dead_code)]

pub mod cut;
pub mod meeting;

use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use posthaste_launch::Launch;

/// The part that this process plays, if it is not the test itself; then it dies with the thread that started it, so
/// that a test that fails leaves nothing behind either.
pub fn assigned() -> Option<String> {
    let role = std::env::var("POSTHASTE_TEST_ROLE").ok()?;
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    Some(role)
}

/// The arguments with which the test binary does nothing but play its role.
pub const ROLE_ARGS: [&str; 3] = ["--exact", "role", "--nocapture"];

/// A job whose ranks are this test binary in a role.
pub fn job_of(role: &str) -> Launch {
    let program = std::env::current_exe().unwrap();
    Launch::program(program).args(ROLE_ARGS).env("POSTHASTE_TEST_ROLE", role).arena_bytes(1 << 20)
}

/// A job whose ranks run a shell script.
pub fn job_of_shell(script: &str) -> Launch {
    Launch::program("/bin/sh").args(["-c", script]).arena_bytes(1 << 20)
}

/// This test binary in a role, as a plain process.
pub fn process_of(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ROLE_ARGS).env("POSTHASTE_TEST_ROLE", role);
    command
}

/// Ends the process if a test hangs; its ranks die with it.
pub fn watchdog() -> Sender<()> {
    let (sender, receiver) = channel::<()>();
    std::thread::spawn(move || {
        if receiver.recv_timeout(Duration::from_secs(60)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("watchdog: a test hangs");
            std::process::abort();
        }
    });
    sender
}

/// Waits until a condition holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process runs, zombies excluded.
pub fn runs(pid: u32) -> bool {
    match std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")) {
        Ok(stat) => !stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']),
        Err(_) => false,
    }
}
