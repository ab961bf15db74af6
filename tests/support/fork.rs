//! A process that was forked and is nothing else.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a process that was forked stays if nobody ends it.
const LIFETIME: Duration = Duration::from_secs(60);

/// Forks a process that never executes a program: it has all that this one has, and sleeps. Returns its number.
#[allow(unsafe_code, reason = "a fork is to be seen, and there is no safe way to it")]
pub fn fork() -> u32 {
    std::thread::spawn(|| {
        let mut command = Command::new("never executed");
        // SAFETY: the closure runs in the child of a process with many threads; it does nothing but sleep, which takes no
        // lock and allocates nothing, and gives up the child afterwards.
        unsafe {
            command.pre_exec(|| {
                std::thread::sleep(LIFETIME);
                Err(std::io::ErrorKind::TimedOut.into())
            });
        }
        // Does not return while the child sleeps.
        command.spawn().map(drop)
    });
    let end = Instant::now() + Duration::from_secs(20);
    while Instant::now() < end {
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            if let Some(child) = children.split_whitespace().next() {
                return child.parse().unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("there is no forked process");
}
