//! A deadline for tests that might hang.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Aborts the process if it is not dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropping it is the sign of life.
    _alive: Sender<()>,
}

impl Watchdog {
    /// From now on there is `limit` time; past it the report is printed and the process is aborted.
    ///
    /// The report is made on a thread of its own while the test hangs: it must not wait for a lock that the test may
    /// hold.
    #[must_use = "a watchdog that is dropped at once watches nothing"]
    pub fn start(name: &str, limit: Duration, report: impl Fn() -> String + Send + 'static) -> Self {
        let (alive, gone) = channel::<()>();
        let subject = name.to_owned();
        let watch = move || {
            if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                // Not by a macro: its output would be captured with that of the test and be lost with it.
                let text = format!("watchdog: {subject} has not ended after {limit:?}\n{}\n", report());
                let _unwritable = std::io::stderr().write_all(text.as_bytes());
                std::process::abort();
            }
        };
        // A machine that cannot start a thread fails the test by itself.
        let _started = std::thread::Builder::new().name(format!("watch {name}")).spawn(watch);
        Self { _alive: alive }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHILD: &str = "POSTHASTE_TEST_WATCHDOG_CHILD";

    #[test]
    fn a_test_that_ends_in_time_lives() {
        let dog = Watchdog::start("quick", Duration::from_secs(2), || "never seen".to_owned());
        drop(dog);
        std::thread::sleep(Duration::from_millis(2200));
    }

    #[test]
    fn a_test_that_hangs_is_aborted_with_its_report() {
        if std::env::var_os(CHILD).is_some() {
            let _dog = Watchdog::start("sleeper", Duration::from_millis(20), || "state: 42".to_owned());
            std::thread::sleep(Duration::from_secs(20));
            return;
        }
        let program = std::env::current_exe().expect("tests know their program");
        let output = std::process::Command::new(program)
            .args(["--exact", "watchdog::tests::a_test_that_hangs_is_aborted_with_its_report"])
            .env(CHILD, "1")
            .output()
            .expect("the test program can be run again");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "the child lived");
        assert!(text.contains("sleeper") && text.contains("state: 42"), "{text}");
    }
}
