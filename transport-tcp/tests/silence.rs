//! Peers that say nothing: a host that has vanished is noticed, a process that only reads nothing is not lost.

mod support;

use posthaste_core::{Client, Fault, JobShape, LossCause, Messager, Rank};
use posthaste_tcp::{AddressBook, Limits, Mode, TcpDevice};
use posthaste_testkit::conformance::{Log, Probe};
use posthaste_testkit::sim::open_without_driver;
use posthaste_testkit::watchdog::Watchdog;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::config;
use support::job::{LOG, Member, SILENT, job_with};

const CHILD: &str = "POSTHASTE_TEST_SILENCE_CHILD";

/// Both ranks are in a network namespace of their own, whose only interface is switched off: nothing passes any more,
/// and nobody is told.
#[cfg_attr(feature = "portable", ignore = "the kernel decides by itself, in its own time")]
#[test]
fn a_vanished_host_is_noticed() {
    if std::env::var_os(CHILD).is_some() {
        return vanish();
    }
    in_a_namespace("a_vanished_host_is_noticed");
}

/// The same of one that has no room: nothing is sent to it, and its kernel is asked now and then whether there is some again.
#[cfg_attr(feature = "portable", ignore = "the kernel decides by itself, in its own time")]
#[test]
fn a_host_that_vanishes_while_it_has_no_room_is_noticed() {
    if std::env::var_os(CHILD).is_some() {
        return vanish_without_room(|| {});
    }
    in_a_namespace("a_host_that_vanishes_while_it_has_no_room_is_noticed");
}

/// The same where its kernel is asked ever more rarely, as before Linux 6.15: its own probes come no more.
#[cfg(all(target_os = "linux", not(feature = "portable")))]
#[test]
fn a_host_that_vanishes_while_it_has_no_room_is_noticed_by_a_kernel_that_asks_rarely() {
    if std::env::var_os(CHILD).is_some() {
        return vanish_without_room(ask_rarely);
    }
    in_a_namespace("a_host_that_vanishes_while_it_has_no_room_is_noticed_by_a_kernel_that_asks_rarely");
}

/// Has all connections of this process ask at the pace of a kernel that is left alone.
#[cfg(all(target_os = "linux", not(feature = "portable")))]
fn ask_rarely() {
    use rustix::net::sockopt::socket_type;
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let this = pidfd_open(getpid(), PidfdFlags::empty()).expect("it lives");
    let open = std::fs::read_dir("/proc/self/fd").expect("it is mounted");
    let mut asking = 0;
    for name in open.map(|entry| entry.expect("it is readable").file_name()) {
        let number = name.to_str().and_then(|name| name.parse().ok()).expect("they are numbers");
        // That of the list itself is closed by now.
        let Ok(fd) = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()) else { continue };
        if socket_type(&fd).is_ok() {
            posthaste_core::reactor::look_at_least(&fd, Duration::from_secs(120));
            asking += 1;
        }
    }
    assert!(asking > 0, "no connection was found");
}

/// Runs a test once more in a network namespace of its own.
fn in_a_namespace(test: &str) {
    let possible = Command::new("unshare").args(["-n", "ip", "link", "set", "lo", "up"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {test}: no network namespace can be made here");
        return;
    }
    let program = std::env::current_exe().expect("tests know their program");
    let run = Command::new("unshare")
        .args(["-n", "sh", "-c", "ip link set lo up && exec \"$0\" --exact \"$1\""])
        .args([program.as_os_str(), test.as_ref()])
        .env(CHILD, "1")
        .output()
        .expect("it was possible before");
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
}

fn vanish() {
    let _dog = Watchdog::start("vanish", Duration::from_secs(60), || "nobody noticed".to_owned());
    support::runtime().block_on(async {
        // Ranks 1 and 2 have a connection with rank 0 that is idle, and one with something under way.
        let silence = Duration::from_secs(2);
        let (members, _log) = job_with(3, |rank, shape| {
            let mut config = config(rank, shape, Mode::HandshakeOnly, Limits::default());
            config.times.silence = silence;
            config
        })
        .await;
        for to in [1, 2] {
            members[0].call(to, b"hello").await.expect("it lives");
        }
        // Answers keep coming while nobody says anything.
        tokio::time::sleep(2 * silence).await;
        assert!(members.iter().all(|member| member.errors().is_empty()));
        let down = Command::new("ip").args(["link", "set", "lo", "down"]).status();
        assert!(down.is_ok_and(|status| status.success()));
        let start = Instant::now();
        let _waits = members[0].send(2, SILENT, &[], b"into the void", true).await;
        let mut errors = members[0].told(2).await;
        let took = start.elapsed();
        eprintln!("noticed after {took:?}");
        errors.sort_by_key(|fault| fault.peer());
        assert_eq!(errors, [Fault::PeerLost(Rank(1)), Fault::PeerLost(Rank(2))]);
        let causes = [1, 2].map(|rank| members[0].client.loss_of(Rank(rank)));
        assert_eq!(causes, [Some(LossCause::Silent); 2]);
        assert!(took > silence / 2, "a moment without an answer is no silence: {took:?}");
    });
}

/// Rank 1, which records what comes and is driven by nobody, and rank 0 to be.
fn beside_one_that_reads_nothing(
    runtime: &tokio::runtime::Runtime,
    silence: Duration,
    log: &Log,
) -> (Arc<Client>, impl Future<Output = Member> + use<>) {
    let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
    let book = Arc::new(AddressBook::new(2));
    let of = move |rank: u32| {
        let mut config = config(Rank(rank), shape, Mode::HandshakeOnly, Limits::default());
        config.times.silence = silence;
        config
    };
    let _inside = runtime.enter();
    let device = Arc::new(TcpDevice::new(of(1), book.clone()).expect("a free port"));
    let stopped = support::client(device, Rank(1), shape, Default::default());
    for name in ["echo", "log", "silent"] {
        stopped.register(Arc::new(Probe::recording(name, log))).expect("the name is free");
    }
    open_without_driver(&stopped);
    (stopped, async move { Member::open(of(0), book, &Log::default()).await })
}

/// `ask` is called when there is no room any more.
fn vanish_without_room(ask: fn()) {
    let _dog =
        Watchdog::start("vanish without room", Duration::from_secs(90), || "nobody noticed".to_owned());
    let runtime = support::runtime();
    let (_stopped, first) = beside_one_that_reads_nothing(&runtime, Duration::from_secs(2), &Log::default());
    runtime.block_on(async {
        let zero = first.await;
        // By then a kernel that is left alone asks every 13 seconds, and ever more rarely.
        let until = tokio::time::Instant::now() + Duration::from_secs(14);
        loop {
            let send = zero.send(1, LOG, &[], &[5; 100_000], false);
            match tokio::time::timeout_at(until, send).await {
                Ok(outcome) => drop(outcome.expect("it lives")),
                Err(_) => break,
            }
        }
        ask();
        // The next time it is asked is far away by then. Meanwhile it lives.
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert!(zero.errors().is_empty(), "{:?}", zero.errors());
        let down = Command::new("ip").args(["link", "set", "lo", "down"]).status();
        assert!(down.is_ok_and(|status| status.success()));
        let start = Instant::now();
        // A watchdog: it is due after two to five seconds, and a kernel that asks rarely would take two minutes.
        let told = tokio::time::timeout(Duration::from_secs(40), zero.told(1)).await;
        eprintln!("noticed after {:?}", start.elapsed());
        assert_eq!(told.expect("it is noticed"), [Fault::PeerLost(Rank(1))]);
        assert_eq!(zero.client.loss_of(Rank(1)), Some(LossCause::Silent));
    });
}

/// A rank that does not advance for far longer than silence lasts: its sender waits, and then everything arrives.
#[test]
fn a_rank_that_reads_nothing_is_not_lost() {
    let _dog = Watchdog::start("reads nothing", Duration::from_secs(60), || "it hangs".to_owned());
    let runtime = support::runtime();
    let log = Log::default();
    let (stopped, first) = beside_one_that_reads_nothing(&runtime, Duration::from_millis(600), &log);
    runtime.block_on(async {
        let zero = first.await;
        let payload = vec![5; 100_000];
        let mut sent = 0;
        let limit = Instant::now() + Duration::from_millis(2500);
        loop {
            let send = zero.send(1, LOG, &[], &payload, false);
            match tokio::time::timeout_at(limit.into(), send).await {
                Ok(outcome) => outcome.expect("it lives"),
                Err(_) => break,
            };
            sent += 1;
        }
        assert!(zero.errors().is_empty(), "{:?}", zero.errors());
        while log.len() < sent {
            stopped.advance();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(log.all().iter().all(|message| message.bytes == payload));
        assert!(zero.errors().is_empty(), "{:?}", zero.errors());
    });
}
