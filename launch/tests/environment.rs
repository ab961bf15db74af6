//! What ranks learn from their environment, and what they refuse.

mod common;

use std::time::Duration;

use common::{assigned, job_of, process_of, watchdog};
use posthaste_launch::{DeviceChoice, Driver, EnvError, JobEnv, LaunchError, Output, Settings, TcpMode};

#[test]
fn role() {
    match assigned().as_deref() {
        None => {}
        Some("show") => {
            let env = JobEnv::from_process().unwrap().unwrap();
            let key = blake3::hash(env.key.as_bytes());
            let fds = env.fds.as_ref().unwrap();
            println!(
                "SHOW {} {} {} {} {} {key} {}",
                env.job,
                env.rank,
                env.size,
                env.contexts,
                env.clients,
                fds.ring().len()
            );
            let secret = std::env::var("POSTHASTE_KEY").unwrap();
            let args = String::from_utf8_lossy(&std::fs::read("/proc/self/cmdline").unwrap()).into_owned();
            assert!(!args.contains(&secret));
            assert!(!format!("{env:?}").contains(&secret));
            std::process::exit(0);
        }
        Some("refuse") => {
            eprintln!("REFUSED {}", JobEnv::from_process().unwrap_err());
            std::process::exit(0);
        }
        Some(other) => panic!("no role {other}"),
    }
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn good() -> Vec<(String, String)> {
    variables(&[
        ("POSTHASTE_JOB", "000102030405060708090a0b0c0d0e0f"),
        ("POSTHASTE_RANK", "1"),
        ("POSTHASTE_SIZE", "2"),
        ("POSTHASTE_KEY", &"ab".repeat(32)),
        ("POSTHASTE_FDS", "arena=3,bell=4,ring=5:6"),
        ("PATH", "/bin"),
    ])
}

fn with(name: &str, value: &str) -> Result<Option<JobEnv>, EnvError> {
    let mut env = good();
    env.retain(|(other, _)| other != name);
    env.push((name.to_owned(), value.to_owned()));
    JobEnv::parse(env)
}

#[test]
fn children_learn_their_place() {
    let _dog = watchdog();
    let job = job_of("show").ranks(3).contexts(2).clients(5).stdout(Output::Capture).spawn().unwrap();
    let outcome = job.wait();
    assert!(outcome.success(), "{outcome}");
    let mut keys = Vec::new();
    for rank in 0..3 {
        let out = String::from_utf8(job.output(rank).0).unwrap();
        let line = out.lines().find(|line| line.starts_with("SHOW")).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(words[1], job.id().to_string());
        assert_eq!(words[2..6], [&rank.to_string(), "3", "2", "5"]);
        assert_eq!(words[7], "3");
        keys.push(words[6].to_owned());
    }
    assert!(keys.windows(2).all(|pair| pair[0] == pair[1]), "one key for all ranks");
}

#[test]
fn variables_go_round() {
    let env = JobEnv::parse(good()).unwrap().unwrap();
    assert_eq!((env.rank, env.size, env.contexts, env.clients), (1, 2, 1, 1));
    assert_eq!(env.key.as_bytes(), &[0xab; 32]);
    let fds = env.fds.as_ref().unwrap();
    assert_eq!((fds.arena(), fds.bell(), fds.ring()), (3, 4, &[5, 6][..]));
    let again = env.to_variables().into_iter().map(|(name, value)| (name.to_owned(), value));
    let again = JobEnv::parse(again).unwrap().unwrap();
    assert_eq!(format!("{again:?}"), format!("{env:?}"));
    assert_eq!(again.key.as_bytes(), env.key.as_bytes());
}

#[test]
fn a_rank_knows_its_node_and_where_to_meet() {
    let mut env = good();
    env.retain(|(name, _)| name != "POSTHASTE_FDS" && name != "POSTHASTE_SIZE");
    env.extend(variables(&[
        ("POSTHASTE_SIZE", "5"),
        ("POSTHASTE_NODES", "0:2:0x2:2"),
        ("POSTHASTE_FDS", "arena=3,bell=4,ring=5:6"),
        ("POSTHASTE_RENDEZVOUS", "[::1]:4000"),
        ("POSTHASTE_LIFELINE", "17"),
    ]));
    let read = JobEnv::parse(env.clone()).unwrap().unwrap();
    assert_eq!(read.nodes, [0, 2, 0, 0, 2]);
    assert_eq!((read.node(), read.node_ranks()), (2, vec![1, 4]));
    assert_eq!(read.rendezvous.as_deref(), Some("[::1]:4000"));
    assert_eq!(read.lifeline.map(|lifeline| lifeline.number()), Some(17));
    let again = read.to_variables().into_iter().map(|(name, value)| (name.to_owned(), value));
    assert_eq!(format!("{:?}", JobEnv::parse(again).unwrap().unwrap()), format!("{read:?}"));
    // Who meets others may have inherited nothing.
    env.retain(|(name, _)| name != "POSTHASTE_FDS");
    assert!(JobEnv::parse(env).unwrap().unwrap().fds.is_none());
    assert_eq!(JobEnv::parse(good()).unwrap().unwrap().nodes, [0, 0]);
}

#[test]
fn the_key_may_be_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    let mut env = good();
    env.push(("POSTHASTE_KEY_FILE".into(), path.to_str().unwrap().into()));
    // What the launcher sets comes first, and then nobody looks at the file.
    assert_eq!(JobEnv::parse(env.clone()).unwrap().unwrap().key.as_bytes(), &[0xab; 32]);
    env.retain(|(name, _)| name != "POSTHASTE_KEY");
    assert!(matches!(JobEnv::parse(env.clone()), Err(EnvError::KeyFile { .. })));
    std::fs::write(&path, "cd".repeat(32)).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!(JobEnv::parse(env).unwrap().unwrap().key.as_bytes(), &[0xcd; 32]);
    // A file alone makes no job.
    let alone = ("POSTHASTE_KEY_FILE".to_owned(), path.to_str().unwrap().to_owned());
    assert!(JobEnv::parse([alone]).unwrap().is_none());
}

#[test]
fn without_a_job_there_is_none() {
    assert!(JobEnv::parse(variables(&[("HOME", "/"), ("POSTHASTE_SPIN_US", "5")])).unwrap().is_none());
    assert!(JobEnv::parse(variables(&[("POSTHASTE_TEST_ROLE", "x")])).unwrap().is_none());
}

#[test]
fn an_unknown_variable_suggests_the_nearest() {
    for (typo, nearest) in [
        ("POSTHASTE_RNK", "POSTHASTE_RANK"),
        ("POSTHASTE_LANEBYTES", "POSTHASTE_LANE_BYTES"),
        ("POSTHASTE_SPIN", "POSTHASTE_SPIN_US"),
        ("POSTHASTE_CREDIT", "POSTHASTE_CREDITS"),
        ("POSTHASTE_NODE", "POSTHASTE_NODES"),
        ("POSTHASTE_DEVICES", "POSTHASTE_DEVICE"),
        ("POSTHASTE_TCPMODE", "POSTHASTE_TCP_MODE"),
        ("POSTHASTE_TCP_PORT", "POSTHASTE_TCP_PORTS"),
        ("POSTHASTE_JOINTIMEOUT", "POSTHASTE_JOIN_TIMEOUT"),
        ("POSTHASTE_KEYFILE", "POSTHASTE_KEY_FILE"),
        ("POSTHASTE_RENDEZVOUS_BYTE", "POSTHASTE_RENDEZVOUS_BYTES"),
    ] {
        let error = Settings::parse(variables(&[(typo, "1")])).unwrap_err();
        assert_eq!(error, EnvError::Unknown { name: typo.into(), nearest });
        assert!(error.to_string().contains(typo) && error.to_string().contains(nearest));
    }
    let out = process_of("refuse").env("POSTHASTE_RNK", "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("REFUSED") && text.contains("did you mean POSTHASTE_RANK"), "{text}");
}

#[test]
fn a_launcher_refuses_what_its_ranks_would() {
    let error = job_of("show").env("POSTHASTE_CREDITTS", "1").spawn().unwrap_err();
    assert!(matches!(error, LaunchError::Env(EnvError::Unknown { nearest: "POSTHASTE_CREDITS", .. })));
    let error = job_of("show").env("POSTHASTE_RANK", "1").spawn().unwrap_err();
    assert!(matches!(error, LaunchError::Invalid(_)));
}

#[test]
fn a_partial_set_is_refused_and_never_means_alone() {
    for missing in ["JOB", "RANK", "SIZE", "KEY", "FDS"].map(|name| format!("POSTHASTE_{name}")) {
        let mut env = good();
        env.retain(|(name, _)| *name != missing);
        match JobEnv::parse(env).unwrap_err() {
            EnvError::Partial { missing: named, present } => {
                assert_eq!(named, missing);
                assert_ne!(present, missing);
            }
            other => panic!("{missing}: {other}"),
        }
    }
    for alone in good().into_iter().filter(|(name, _)| name.starts_with("POSTHASTE")) {
        // A key is also given to ranks that another launcher starts.
        let key = alone.0 == "POSTHASTE_KEY";
        match JobEnv::parse([alone]) {
            Ok(None) => assert!(key),
            other => assert!(!key && matches!(other, Err(EnvError::Partial { .. })), "{other:?}"),
        }
    }
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    for (name, value) in [
        ("POSTHASTE_JOB", "00"),
        ("POSTHASTE_JOB", "000102030405060708090a0b0c0d0e0g"),
        ("POSTHASTE_RANK", "-1"),
        ("POSTHASTE_RANK", "+1"),
        ("POSTHASTE_RANK", "one"),
        ("POSTHASTE_RANK", ""),
        ("POSTHASTE_SIZE", "0"),
        ("POSTHASTE_SIZE", "4097"),
        ("POSTHASTE_CONTEXTS", "0"),
        ("POSTHASTE_CLIENTS", "99999999999999999999"),
        ("POSTHASTE_FDS", "arena=3,bell=4"),
        ("POSTHASTE_FDS", "arena=3,bell=3,ring=5:6"),
        ("POSTHASTE_FDS", "arena=1,bell=4,ring=5:6"),
        ("POSTHASTE_FDS", "arena=3,bell=4,ring=5:6,more=7"),
        ("POSTHASTE_FDS", "arena=3,bell=4,ring=5:99999999999"),
        ("POSTHASTE_BROKER", ""),
        ("POSTHASTE_BROKER", "a/b"),
        ("POSTHASTE_LANE_BYTES", "511"),
        ("POSTHASTE_LANE_BYTES", "1000"),
        ("POSTHASTE_LANE_BYTES", "2097152"),
        ("POSTHASTE_CREDITS", "0"),
        ("POSTHASTE_CREDITS", "65537"),
        ("POSTHASTE_CREDIT_BYTES", "65535"),
        ("POSTHASTE_CREDIT_BYTES", "63K"),
        ("POSTHASTE_ANSWER_BYTES", "0"),
        ("POSTHASTE_ANSWER_BYTES", "much"),
        ("POSTHASTE_SPIN_US", "10001"),
        ("POSTHASTE_MEMORY_LIMIT", "0"),
        ("POSTHASTE_MEMORY_LIMIT", "1T"),
        ("POSTHASTE_MEMORY_LIMIT", "K"),
        ("POSTHASTE_MEMORY_LIMIT", "99999999999999999G"),
        ("POSTHASTE_SEGMENT", "é"),
        ("POSTHASTE_DRIVER", "Task"),
        ("POSTHASTE_CORES", "0"),
        ("POSTHASTE_NODES", ""),
        ("POSTHASTE_NODES", "0x0"),
        ("POSTHASTE_NODES", "0:4096"),
        ("POSTHASTE_NODES", "0x4294967297"),
        ("POSTHASTE_LIFELINE", "2"),
        ("POSTHASTE_LIFELINE", "4294967299"),
        ("POSTHASTE_RENDEZVOUS", "host"),
        ("POSTHASTE_RENDEZVOUS", ":80"),
        ("POSTHASTE_RENDEZVOUS", "host:0"),
        ("POSTHASTE_RENDEZVOUS", "host:65536"),
        ("POSTHASTE_RENDEZVOUS", "::1:80"),
        ("POSTHASTE_RENDEZVOUS", "[::1:80"),
        ("POSTHASTE_RENDEZVOUS", "ho st:80"),
        ("POSTHASTE_DEVICE", "TCP"),
        ("POSTHASTE_TCP_MODE", "none"),
        ("POSTHASTE_TCP_INTERFACE", ""),
        ("POSTHASTE_TCP_INTERFACE", "a name with blanks"),
        ("POSTHASTE_TCP_PORTS", "5000"),
        ("POSTHASTE_TCP_PORTS", "5001-5000"),
        ("POSTHASTE_TCP_PORTS", "0-5"),
        ("POSTHASTE_TCP_PORTS", "1-65536"),
        ("POSTHASTE_TCP_TIMEOUT", "-1"),
        ("POSTHASTE_TCP_TIMEOUT", "0.0001"),
        ("POSTHASTE_JOIN_TIMEOUT", "0"),
        ("POSTHASTE_JOIN_TIMEOUT", "1e3"),
        ("POSTHASTE_OVERSEND", "never"),
        ("POSTHASTE_RENDEZVOUS_BYTES", "0"),
        ("POSTHASTE_RENDEZVOUS_BYTES", "always"),
        ("POSTHASTE_STAGE_BYTES", "0"),
        ("POSTHASTE_STAGE_BYTES", "much"),
        ("POSTHASTE_PATTERN_SLOTS", "0"),
        ("POSTHASTE_PATTERN_SLOTS", "16777217"),
        ("POSTHASTE_KEY_FILE", ""),
    ] {
        match with(name, value).unwrap_err() {
            EnvError::Invalid { name: named, seen, .. } => assert_eq!((named, &*seen), (name, value)),
            other => panic!("{name}={value}: {other}"),
        }
    }
    assert_eq!(with("POSTHASTE_RANK", "2").unwrap_err(), EnvError::RankOutOfRange { rank: 2, size: 2 });
    assert_eq!(with("POSTHASTE_SIZE", "3").unwrap_err(), EnvError::RingSize { seen: 2, on_node: 3, size: 3 });
    let nodes = |text| with("POSTHASTE_NODES", text).unwrap_err();
    assert_eq!(nodes("0:0:0"), EnvError::NodesSize { seen: 3, size: 2 });
    assert_eq!(nodes("0"), EnvError::NodesSize { seen: 1, size: 2 });
    assert_eq!(nodes("0:1"), EnvError::RingSize { seen: 2, on_node: 1, size: 2 });
    let twice = good().into_iter().chain(good());
    assert!(matches!(JobEnv::parse(twice), Err(EnvError::Repeated { .. })));
}

#[test]
fn no_message_shows_the_key() {
    let almost = "5ec2e7".repeat(10);
    let error = with("POSTHASTE_KEY", &almost).unwrap_err();
    assert!(error.to_string().contains("POSTHASTE_KEY"));
    assert!(!error.to_string().contains("5ec2e7") && !format!("{error:?}").contains("5ec2e7"));
    let env = with("POSTHASTE_KEY", &"5ec2e7ff".repeat(8)).unwrap().unwrap();
    assert!(!format!("{env:?}").to_lowercase().contains("5ec2e7"));
    assert!(!format!("{env:?}").contains("94, 194, 231"));
}

#[test]
fn settings_need_no_job() {
    let read = Settings::parse(variables(&[
        ("POSTHASTE_LANE_BYTES", "1024"),
        ("POSTHASTE_CREDITS", "65536"),
        ("POSTHASTE_CREDIT_BYTES", "64K"),
        ("POSTHASTE_ANSWER_BYTES", "3M"),
        ("POSTHASTE_SPIN_US", "0"),
        ("POSTHASTE_MEMORY_LIMIT", "3G"),
        ("POSTHASTE_SEGMENT", "64k"),
        ("POSTHASTE_DRIVER", "thread"),
        ("POSTHASTE_CORES", "7"),
        ("POSTHASTE_DEVICE", "tcp"),
        ("POSTHASTE_TCP_MODE", "handshake-only"),
        ("POSTHASTE_TCP_INTERFACE", "fe80::1"),
        ("POSTHASTE_TCP_PORTS", "5000-5009"),
        ("POSTHASTE_TCP_TIMEOUT", "0.25"),
        ("POSTHASTE_JOIN_TIMEOUT", "90"),
        ("POSTHASTE_OVERSEND", "always"),
        ("POSTHASTE_RENDEZVOUS_BYTES", "256K"),
        ("POSTHASTE_STAGE_BYTES", "8M"),
        ("POSTHASTE_PATTERN_SLOTS", "16777216"),
        ("POSTHASTE_KEY_FILE", "/run/secrets/key"),
    ]))
    .unwrap();
    assert_eq!(read.stage_bytes, 8 << 20);
    assert_eq!((read.credit_bytes, read.answer_bytes), (64 << 10, 3 << 20));
    assert_eq!((read.lane_bytes, read.credits), (1024, 65536));
    assert_eq!((read.spin, read.cores), (Some(Duration::ZERO), Some(7)));
    assert_eq!((read.memory_limit, read.segment), (Some(3 << 30), Some(64 << 10)));
    assert_eq!(read.driver, Driver::Thread);
    assert_eq!((read.device, read.tcp_mode), (DeviceChoice::Tcp, Some(TcpMode::HandshakeOnly)));
    assert_eq!((read.tcp_interface.as_deref(), read.tcp_ports), (Some("fe80::1"), Some(5000..=5009)));
    assert_eq!((read.tcp_timeout, read.join_timeout), (Duration::from_millis(250), Duration::from_secs(90)));
    assert_eq!((read.oversend, read.rendezvous_bytes), (true, Some(256 << 10)));
    assert_eq!(read.pattern_slots, 16 << 20);
    assert_eq!(read.key_file, Some("/run/secrets/key".into()));
    let never = Settings::parse(variables(&[("POSTHASTE_RENDEZVOUS_BYTES", "never")])).unwrap();
    assert_eq!(never.rendezvous_bytes, Some(u64::MAX));
    assert_eq!(Settings::parse(variables(&[("POSTHASTE_STAGE_BYTES", "never")])).unwrap().stage_bytes, 0);
    let default = Settings::default();
    assert_eq!((default.tcp_timeout.as_secs(), default.join_timeout.as_secs()), (5, 60));
    assert_eq!(Settings::parse([]).unwrap(), Settings::default());
}

/// Plain function, so that a fuzzer can drive it too: any bytes as an environment.
fn parse_bytes(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let env = text.split('\n').filter_map(|line| line.split_once('='));
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
    if let Ok(Some(env)) = JobEnv::parse(env) {
        assert!(env.rank < env.size && (1..=4096).contains(&env.size));
        assert!(env.fds.is_some() || env.broker.is_some() || env.rendezvous.is_some());
        let on_node = env.node_ranks().len();
        assert!(env.fds.is_none_or(|fds| fds.ring().len() == on_node));
    }
}

#[test]
fn any_environment_is_read_without_panic() {
    let good: Vec<u8> =
        good().iter().flat_map(|(name, value)| format!("{name}={value}\n").into_bytes()).collect();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as usize % below
    };
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes[at] = b"0123456789:,=\nKMG_"[random(18)],
                2 => drop(bytes.drain(at..(at + random(40)).min(bytes.len() - 1).max(at))),
                _ => bytes.insert(at, bytes[random(bytes.len())]),
            }
        }
        parse_bytes(&bytes);
    }
}
