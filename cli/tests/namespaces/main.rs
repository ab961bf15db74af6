//! Jobs on two hosts that are network namespaces, joined by nothing but a pair of virtual interfaces.

mod blackhole;
mod two_hosts;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

const PROGRAM: &str = env!("CARGO_BIN_EXE_posthaste");
/// Set in the processes that are ranks, to what they do.
const ROLE: &str = "POSTHASTE_TEST_ROLE";

#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match role.split_once(' ') {
        Some((_, traffic)) => runtime.block_on(blackhole::rank(traffic)).unwrap(),
        None => runtime.block_on(two_hosts::rank()).unwrap(),
    }
    std::process::exit(0);
}

/// Two namespaces, which go with this value, and a list of them as hosts.
struct Namespaces {
    names: [String; 2],
    list: PathBuf,
}

impl Namespaces {
    /// With so many ranks on each. None, and says so, where this machine makes none.
    fn new(test: &str, ranks: u32) -> Option<Self> {
        match Self::make(ranks) {
            Ok(made) => Some(made),
            Err(why) => {
                eprintln!("skipped: {test}: this machine makes no network namespaces: {why}");
                None
            }
        }
    }

    fn make(ranks: u32) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = format!("{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let names = ["a", "b"].map(|end| format!("pht{number}{end}"));
        let list = std::env::temp_dir().join(format!("posthaste-namespaces-{number}"));
        let made = Self { names, list };
        let [a, b] = &made.names;
        for line in [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
            format!("-n {a} link add {a} type veth peer name {b} netns {b}"),
            format!("-n {a} address add 10.213.7.1/24 dev {a}"),
            format!("-n {b} address add 10.213.7.2/24 dev {b}"),
            format!("-n {a} link set {a} up"),
            format!("-n {b} link set {b} up"),
        ] {
            ip(&line)?;
        }
        std::fs::write(&made.list, format!("{a} slots={ranks}\n{b} slots={ranks}\n"))
            .map_err(|error| error.to_string())?;
        Ok(made)
    }

    /// A command in the first, which is ended if it takes too long.
    fn inside(&self, command: &[&str]) -> Command {
        let mut inside = Command::new("timeout");
        inside.args(["-k", "5", "60", "ip", "netns", "exec", &self.names[0]]).args(command);
        inside
    }

    fn run(&self, command: &[&str]) -> Output {
        self.inside(command).output().unwrap()
    }

    /// A job over both, whose ranks are this program in a role.
    fn job(&self, role: &str) -> Command {
        let rank = std::env::current_exe().unwrap();
        let mut job = self.job_of(&[rank.to_str().unwrap(), "--exact", "role", "--nocapture"]);
        job.env(ROLE, role);
        job
    }

    /// A job over both, whose ranks are a program with its arguments.
    fn job_of(&self, program: &[&str]) -> Command {
        let agent = format!("{PROGRAM} agent");
        let mut job = self.inside(&[
            PROGRAM,
            "run",
            "--hosts",
            self.list.to_str().unwrap(),
            "--ssh",
            "ip netns exec",
            "--agent",
            &agent,
            "--interface",
            &self.names[0],
            "--label",
            "--",
        ]);
        job.args(program);
        job
    }

    /// Bytes that have come to the first from the second.
    fn received(&self) -> usize {
        let path = format!("/sys/class/net/{}/statistics/rx_bytes", self.names[0]);
        String::from_utf8(self.run(&["cat", &path]).stdout).unwrap().trim().parse().unwrap()
    }

    /// From now on nothing that this one sends arrives, and nobody is told.
    fn swallow(&self, from: usize) {
        let name = &self.names[from];
        // Its neighbour has moved to where nobody is.
        let other = ["10.213.7.2", "10.213.7.1"][from];
        ip(&format!("-n {name} neighbour replace {other} lladdr 02:00:00:00:00:01 nud permanent dev {name}"))
            .unwrap();
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            // It may not have come to be.
            let _ = Command::new("ip").args(["netns", "delete", name]).output();
        }
        // Nor may this.
        let _ = std::fs::remove_file(&self.list);
    }
}

fn ip(line: &str) -> Result<(), String> {
    let out = Command::new("ip").args(line.split(' ')).output();
    let out = out.map_err(|error| format!("there is no program `ip`: {error}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("`ip {line}`: {}", String::from_utf8_lossy(&out.stderr).trim()))
}
