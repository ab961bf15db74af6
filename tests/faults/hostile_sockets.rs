//! A rank that has proven who it is, and then writes into its connections what no rank sends.

use crate::hostile::{Traffic, is_cut_off_amid};
use crate::sockets::Before;
use crate::support::{Random, barrier_before_death, case, options, others, run, soon, unseal, until};
use posthaste::{Fault, Message, Rank, Scope};
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Header of a frame: bytes of the payload, kind, word.
fn frame(len: u32, kind: u8, word: u64) -> Vec<u8> {
    [&len.to_le_bytes()[..], &[kind, 0, 0, 0], &word.to_le_bytes()].concat()
}

/// What it writes, and how its connections are protected.
const CASES: [(&str, &str); 6] = [
    ("anything", "handshake-only"),
    ("anything", "encrypted"),
    ("anything", "insecure"),
    ("an unknown kind", "handshake-only"),
    ("a message without end", "handshake-only"),
    ("an answer to nothing", "insecure"),
];

fn bytes_of(case: &str) -> Vec<u8> {
    match case {
        "an unknown kind" => frame(0, 0xfe, 0),
        "a message without end" => frame(u32::MAX, 0, 0),
        "an answer to nothing" => [frame(8, 0xf4, 0), vec![0; 8]].concat(),
        _ => {
            let mut random = Random(7);
            (0..512).flat_map(|_| random.next().to_le_bytes()).collect()
        }
    }
}

/// Rank 2 says it to both others, over the connections that they have with it.
async fn says(connections: Vec<TcpStream>, bytes: &[u8]) {
    for mut connection in connections {
        // It shares the flags of the library's own descriptor, and has room for so little.
        connection.write_all(bytes).unwrap();
    }
}

case!(fault_a_peer_that_writes_garbage_into_its_connections_is_cut_off);
fn fault_a_peer_that_writes_garbage_into_its_connections_is_cut_off() {
    for (case, mode) in CASES {
        let options =
            options().body_leaves().env("POSTHASTE_TCP_MODE", mode).env("POSTHASTE_TEST_CASE", case);
        let printed = run(3, options, async |job| {
            let before = Before::of(&job);
            let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
            let faults = told.clone();
            job.on_error(move |fault| faults.lock().unwrap().push(fault));
            let received: Arc<AtomicU64> = Arc::default();
            let count = received.clone();
            let own = job.register("own", move |m: Message, _: &mut Scope| {
                assert_ne!(m.source(), Rank(2), "it never sends one");
                assert!(unseal(&m.bytes()).is_some(), "corrupt bytes from an honest rank");
                count.fetch_add(1, Ordering::Relaxed);
            });
            let own = own.unwrap();
            let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
            let echo = job.service("echo", |word: u64| async move { word }).unwrap();
            for to in others(&job) {
                assert_eq!(echo.call(to, 7).await.unwrap(), 7);
            }
            barrier_before_death(&job, Rank(2)).await;
            if job.rank() == Rank(2) {
                let case = std::env::var("POSTHASTE_TEST_CASE").unwrap();
                // Two who dial each other at once have two until they have agreed on one.
                until("one connection with each", || before.connections().len() == 2).await;
                says(before.connections(), &bytes_of(&case)).await;
                // They close their ends.
                until("both ends", || told.lock().unwrap().len() >= 2).await;
                let mut ends = told.lock().unwrap().clone();
                ends.sort_by_key(|fault| fault.peer());
                assert_eq!(ends, [Fault::PeerLost(Rank(0)), Fault::PeerLost(Rank(1))]);
                // Goes without a word.
                std::process::exit(0);
            }
            let other = Rank(1 - job.rank().0);
            let traffic = Traffic { messages: 2000, long: 50_000, pause: 1 };
            is_cut_off_amid(traffic, other, &own, &never, &received, &told).await;
            assert_eq!((job.stats().panics, told.lock().unwrap().len()), (0, 1));
            // One of them leaves only when the other has got everything.
            let pair = job.collectives().subset(&[Rank(0), Rank(1)]).await.unwrap();
            soon("a barrier of the honest", pair.barrier()).await.unwrap();
            job.leave().await.unwrap();
        });
        for text in printed {
            assert!(!text.contains("panicked at"), "{case}, {mode}: {text}");
        }
    }
}
