//! Where ranks listen: the settings say it, and what they say may not be there.

use crate::sockets::{Before, sockets};
use crate::support::cases::name_of;
use crate::support::{case, here, options, options as again, others, run, run_as, run_unjoined, soon};
use posthaste::Job;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

/// Consecutive ports that are free, below those that the system gives to whoever asks for any, and apart from those of tests in
/// other processes.
fn free_ports(count: u16) -> (u16, u16) {
    // And from those of tests in this one, which may ask for them before these have bound theirs.
    static ASKED: AtomicU16 = AtomicU16::new(0);
    let asked = ASKED.fetch_add(count, Ordering::Relaxed);
    let mut first = 11_000 + (std::process::id() % 200) as u16 * 100 + asked;
    loop {
        let last = first + count - 1;
        if (first..=last).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return (first, last);
        }
        first = if first > 31_500 { 11_000 } else { first + count };
    }
}

/// A little of everything, with everybody; then the way to each of them goes by the address that was wanted.
async fn all_is_there(job: Job) {
    let before = Before::of(&job);
    let (me, n) = (job.rank(), job.size());
    let wanted: Option<IpAddr> = std::env::var("POSTHASTE_TEST_ADDRESS").ok().map(|at| at.parse().unwrap());
    let twice = job.service("twice", |number: u64| async move { 2 * number }).unwrap();
    let window = job.shmalloc::<u64>(n).await.unwrap();
    job.barrier().await.unwrap();
    for to in others(&job) {
        assert_eq!(soon("a call", twice.call(to, u64::from(to.0))).await.unwrap(), 2 * u64::from(to.0));
        soon("a put", window.put(to, me.index(), u64::from(me.0) + 1)).await.unwrap();
    }
    job.barrier().await.unwrap();
    for at in others(&job).map(|rank| rank.index()) {
        assert_eq!(window.to_vec()[at], at as u64 + 1);
    }
    // Not that with the launcher, whose meeting is where it was before the settings were read.
    let connections = before.connections();
    assert!(connections.len() >= n - 1, "{connections:?}");
    let listening = sockets().into_iter().filter(|socket| socket.peer.is_none());
    let listening: Vec<SocketAddr> = listening.map(|socket| socket.local).collect();
    assert!(!listening.is_empty());
    // Where whoever connects comes from, the system decides.
    let called = connections.iter().map(|stream| {
        let own = stream.local_addr().unwrap();
        if listening.contains(&own) { own } else { stream.peer_addr().unwrap() }
    });
    let mut all = called.chain(listening.iter().copied());
    let elsewhere = all.find(|end| wanted.is_some_and(|wanted| end.ip() != wanted));
    assert_eq!(elsewhere, None, "{connections:?} {listening:?}");
    let listens: Vec<u16> = listening.iter().map(SocketAddr::port).collect();
    if let Some((first, last)) = std::env::var("POSTHASTE_TCP_PORTS").ok().as_deref().and_then(|ports| {
        let (first, last) = ports.split_once('-')?;
        Some((first.parse::<u16>().ok()?, last.parse::<u16>().ok()?))
    }) {
        assert!(listens.iter().all(|port| (first..=last).contains(port)), "{listens:?} of {first}-{last}");
    }
    job.barrier().await.unwrap();
    println!("at {}", listening[0].ip());
}

case!(ranks_listen_at_the_interface_or_address_of_the_settings_and_reach_each_other_there);
fn ranks_listen_at_the_interface_or_address_of_the_settings_and_reach_each_other_there() {
    for (wanted, address) in [("::1", "::1"), ("lo", "127.0.0.1"), ("127.0.0.7", "127.0.0.7")] {
        let options = options().env("POSTHASTE_TCP_INTERFACE", wanted).env("POSTHASTE_TEST_ADDRESS", address);
        let printed = run(3, options, async |job| all_is_there(job).await);
        assert!(printed.iter().all(|text| text.contains(&format!("at {address}\n"))), "{printed:?}");
    }
}

case!(ranks_listen_at_ports_of_the_range_and_at_no_others);
fn ranks_listen_at_ports_of_the_range_and_at_no_others() {
    // One for each client of each rank, and one where the news of the others are told.
    let (first, last) = free_ports(7);
    for interface in ["lo", "::1"] {
        let options = options()
            .clients(2)
            .env("POSTHASTE_TCP_INTERFACE", interface)
            .env("POSTHASTE_TCP_PORTS", &format!("{first}-{last}"));
        run(3, options, async |job| all_is_there(job).await);
    }
}

case!(an_interface_is_found_by_its_name);
/// In a network of its own, where an interface has one address of version 4 and one of version 6, and another one only the latter.
fn an_interface_is_found_by_its_name() {
    const MARK: &str = "POSTHASTE_TEST_NETWORK";
    const NETWORK: &str = "ip link set lo up && ip link add ph-a type veth peer name ph-b \
        && ip addr add 10.213.0.1/24 dev ph-a && ip addr add fd00:213::1/64 dev ph-a nodad \
        && ip addr add fd00:214::2/64 dev ph-b nodad && ip link set ph-a up && ip link set ph-b up";
    let test = here!();
    let is_rank = std::env::var_os("POSTHASTE_JOB").is_some();
    if std::env::var_os(MARK).is_none() && !is_rank {
        let possible =
            Command::new("unshare").args(["-n", "sh", "-c", NETWORK]).stderr(Stdio::null()).status();
        if !possible.is_ok_and(|status| status.success()) {
            eprintln!("skipped: {test}: no network with interfaces of its own can be made here");
            return;
        }
        let status = Command::new("unshare")
            .args(["-n", "sh", "-c", &format!("{NETWORK} && exec \"$0\" \"$@\"")])
            .arg(std::env::current_exe().unwrap())
            .args([&name_of(test), "--exact", "--nocapture"])
            .env(MARK, "1")
            .status()
            .unwrap();
        return assert!(status.success(), "{status}");
    }
    for (wanted, address) in [("ph-a", "10.213.0.1"), ("ph-b", "fd00:214::2")] {
        let options = options().env("POSTHASTE_TCP_INTERFACE", wanted).env("POSTHASTE_TEST_ADDRESS", address);
        let printed = run_as(test, 3, options, all_is_there);
        assert!(printed.iter().all(|text| text.contains(&format!("at {address}\n"))), "{printed:?}");
    }
}

/// Joins and leaves, or tells why it cannot.
fn joins() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match soon("an end of joining", posthaste::join()).await {
            Ok(_) => println!("it has joined"),
            Err(error) => println!("it says: {error}."),
        }
    });
}

/// What each rank says why it has not joined: one line.
fn reasons(printed: &[String]) -> Vec<&str> {
    let line = |text| -> &str {
        let (_, rest) = str::split_once(text, "it says: ").unwrap_or_else(|| panic!("no reason in {text}"));
        rest.lines()
            .next()
            .unwrap_or_default()
            .strip_suffix('.')
            .unwrap_or_else(|| panic!("more lines: {text}"))
    };
    printed.iter().map(|text| line(text)).collect()
}

case!(fault_ports_that_are_used_up_are_told_with_the_setting_by_whom_there_is_none_left_for);
fn fault_ports_that_are_used_up_are_told_with_the_setting_by_whom_there_is_none_left_for() {
    let (first, last) = free_ports(2);
    let range = format!("{first}-{last}");
    let options = options().any_end().env("POSTHASTE_TCP_PORTS", &range).env("POSTHASTE_JOIN_TIMEOUT", "20");
    let printed = run_unjoined(3, options, || {
        joins();
    });
    let reasons = reasons(&printed);
    let own = |reason: &&&str| reason.contains("POSTHASTE_TCP_PORTS");
    let without: Vec<_> = reasons.iter().filter(own).collect();
    assert_eq!(without.len(), 1, "there are two of three: {reasons:#?}");
    let reason = without[0];
    assert!(reason.contains(&format!("any of the ports {range} of 127.0.0.1")), "{reason}");
    assert!(reason.contains("in use"), "{reason}");
    // The others hear that one of them has not joined, and which.
    let missing = printed.iter().position(|text| text.contains("POSTHASTE_TCP_PORTS")).unwrap();
    for reason in reasons.iter().filter(|reason| !own(reason)) {
        assert!(reason.contains(&format!("rank {missing}")), "{reason}");
    }
}

case!(fault_an_interface_that_does_not_exist_is_told_with_those_that_do);
fn fault_an_interface_that_does_not_exist_is_told_with_those_that_do() {
    let options = options().any_end().env("POSTHASTE_TCP_INTERFACE", "no-such-0");
    let printed = run_unjoined(3, options, || {
        joins();
    });
    for reason in reasons(&printed) {
        for part in ["no-such-0", "there are ", "lo", "POSTHASTE_TCP_INTERFACE"] {
            assert!(reason.contains(part), "{part:?} in {reason}");
        }
    }
    // An address that is nobody's.
    let options = again().any_end().env("POSTHASTE_TCP_INTERFACE", "192.0.2.77");
    let printed = run_unjoined(3, options, || {
        joins();
    });
    for reason in reasons(&printed) {
        for part in ["192.0.2.77", "POSTHASTE_TCP_INTERFACE"] {
            assert!(reason.contains(part), "{part:?} in {reason}");
        }
    }
}
