//! A rank that has no descriptor left to connect with.
#![cfg(target_os = "linux")]

mod support;

use posthaste_core::{Fault, LossCause, Rank};
use posthaste_tcp::{Limits, Mode};
use posthaste_testkit::watchdog::Watchdog;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::time::Duration;
use support::config;
use support::job::{LOG, job_with};

/// No file can be opened below these three.
const LIMIT: u64 = 3;

fn allow(files: Option<u64>) {
    let limit = Rlimit { current: files, ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("it is not above the hard one");
}

/// The limit is the process's: nothing else runs in this one.
#[tokio::test]
async fn a_loss_for_want_of_descriptors_names_the_limit_and_room_within_time_is_used() {
    let _watchdog = Watchdog::start("descriptors", Duration::from_secs(60), || "it hangs".to_owned());
    let (members, _log) = job_with(3, |rank, shape| {
        let mut config = config(rank, shape, Mode::HandshakeOnly, Limits::default());
        config.times.connect = Duration::from_millis(if rank == Rank(0) { 300 } else { 60_000 });
        config
    })
    .await;
    let usual = getrlimit(Resource::Nofile).current;
    allow(Some(LIMIT));
    members[0].send(1, LOG, &[], b"nobody hears it", false).await.expect("it waits for its connection");
    assert_eq!(members[0].told(1).await, [Fault::PeerLost(Rank(1))]);
    let cause = members[0].client.loss_of(Rank(1)).expect("it is lost");
    assert_eq!(cause, LossCause::NoDescriptor(Some(LIMIT)));
    let told = cause.to_string();
    assert!(told.contains("may open 3 files") && told.contains("RLIMIT_NOFILE"), "{told}");
    // Who has the time goes on trying.
    let call = members[2].call(1, b"hello");
    let relief = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        allow(usual);
    };
    let (answer, ()) = tokio::join!(call, relief);
    assert_eq!(answer.expect("it is connected at last"), b"hello");
    assert_eq!(members[2].errors(), []);
}
