//! The environment of a process.

use super::Input;
use posthaste_launch::{JobEnv, Settings};

/// What there is to be set, with and without an error in the name.
const NAMES: [&str; 31] = [
    "POSTHASTE_JOB",
    "POSTHASTE_RANK",
    "POSTHASTE_SIZE",
    "POSTHASTE_CONTEXTS",
    "POSTHASTE_CLIENTS",
    "POSTHASTE_KEY",
    "POSTHASTE_FDS",
    "POSTHASTE_BROKER",
    "POSTHASTE_NODES",
    "POSTHASTE_RENDEZVOUS",
    "POSTHASTE_RESTART",
    "POSTHASTE_LIFELINE",
    "POSTHASTE_LANE_BYTES",
    "POSTHASTE_CREDITS",
    "POSTHASTE_SPIN_US",
    "POSTHASTE_MEMORY_LIMIT",
    "POSTHASTE_SEGMENT",
    "POSTHASTE_DRIVER",
    "POSTHASTE_CORES",
    "POSTHASTE_DEVICE",
    "POSTHASTE_TCP_MODE",
    "POSTHASTE_TCP_INTERFACE",
    "POSTHASTE_TCP_PORTS",
    "POSTHASTE_TCP_TIMEOUT",
    "POSTHASTE_JOIN_TIMEOUT",
    "POSTHASTE_OVERSEND",
    "POSTHASTE_RENDEZVOUS_BYTES",
    "POSTHASTE_PATTERN_SLOTS",
    "POSTHASTE_TEST_ANY",
    "POSTHASTE_CREDIT",
    "PATH",
];
const HEX: &str = "0123456789abcdef0123456789abcdef";

/// Values that suit one variable or another.
const VALUES: [&str; 13] = [
    "auto",
    "always",
    "never",
    "shm",
    "tcp",
    "encrypted",
    "insecure",
    "eth0",
    "::1",
    "[::1]:80",
    "host:1",
    "0.5",
    "0x2:1x2",
];

/// A key, which no error may show.
const SECRET: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";

/// Any environment is read or refused, an error says which, and what was read can be handed on.
pub fn environment(data: &[u8]) {
    let mut input = Input(data);
    let mut variables = Vec::new();
    // Often a whole job, of which single variables change below: most of what is wrong would else be "incomplete".
    if input.byte() % 4 != 0 {
        let (rank, size) = (input.byte() % 6, 1 + input.byte() % 5);
        let whole = [
            ("POSTHASTE_JOB", HEX.to_owned()),
            ("POSTHASTE_RANK", rank.to_string()),
            ("POSTHASTE_SIZE", size.to_string()),
            ("POSTHASTE_KEY", SECRET.to_owned()),
            ("POSTHASTE_FDS", descriptors(size)),
        ];
        variables.extend(whole.map(|(name, value)| (name.to_owned(), value)));
    }
    while !input.is_empty() && variables.len() < 40 {
        let name = NAMES[usize::from(input.byte()) % NAMES.len()];
        // A value that may be right, so that the ones behind it are looked at, or any text.
        let value = match input.byte() % 10 {
            0 => HEX.to_owned(),
            1 if name == "POSTHASTE_KEY" => SECRET.to_owned(),
            1 => format!("{HEX}{HEX}"),
            2 => u64::from(input.byte()).to_string(),
            3 => {
                (1u64 << (input.byte() % 64)).to_string() + ["", "K", "M", "G"][usize::from(input.byte()) % 4]
            }
            4 => descriptors(input.byte() % 8),
            5 => VALUES[usize::from(input.byte()) % VALUES.len()].to_owned(),
            6 => {
                let nodes: Vec<String> =
                    (0..1 + input.byte() % 4).map(|_| (input.byte() % 3).to_string()).collect();
                nodes.join(["x", ":", "-"][usize::from(input.byte()) % 3])
            }
            7 => ["task", "thread", "", "-1", "+1", " 1"][usize::from(input.byte()) % 6].to_owned(),
            _ => {
                let len = input.byte();
                String::from_utf8_lossy(input.take(usize::from(len))).into_owned()
            }
        };
        // The key itself under another name would be shown, and rightly so.
        if name == "POSTHASTE_KEY" || !value.contains("fedcba9876543210") {
            variables.push((name.to_owned(), value));
        }
    }
    match Settings::parse(variables.clone()) {
        Ok(settings) => {
            assert!(settings.lane_bytes.is_power_of_two() && (1024..=1 << 20).contains(&settings.lane_bytes));
            assert!((1..=65536).contains(&settings.credits));
            assert!(settings.memory_limit != Some(0) && settings.segment != Some(0));
            assert!(!settings.join_timeout.is_zero() && settings.rendezvous_bytes != Some(0));
            assert!(settings.tcp_ports.is_none_or(|ports| !ports.is_empty() && !ports.contains(&0)));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match JobEnv::parse(variables) {
        Ok(Some(env)) => {
            assert!(env.rank < env.size && env.size <= posthaste_launch::MAX_RANKS);
            if let Some(fds) = &env.fds {
                assert_eq!(fds.ring().len(), env.node_ranks().len());
            }
            assert!(env.nodes.len() == env.size as usize && env.node_ranks().contains(&env.rank));
            let handed: Vec<(String, String)> =
                env.to_variables().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let again = JobEnv::parse(handed).expect("what was written is read").expect("a job");
            assert_eq!((again.rank, again.size, again.contexts), (env.rank, env.size, env.contexts));
            assert_eq!((again.clients, again.fds, again.broker), (env.clients, env.fds, env.broker));
            assert_eq!((again.nodes, again.rendezvous), (env.nodes, env.rendezvous));
            assert_eq!((again.restart, again.lifeline), (env.restart, env.lifeline));
        }
        Ok(None) => {}
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains(SECRET), "{text}");
        }
    }
}

fn descriptors(size: u8) -> String {
    let ring: Vec<String> = (0..size).map(|at| (5 + at).to_string()).collect();
    format!("arena=3,bell=4,ring={}", ring.join(":"))
}
