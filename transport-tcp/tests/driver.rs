//! Real drivers over TCP: nothing is lost while everybody sleeps, connects at once, closes or dies.

mod support;

use posthaste_core::{Fault, Messager, Rank};
use posthaste_tcp::{Limits, Mode};
use posthaste_testkit::conformance::Log;
use posthaste_testkit::watchdog::Watchdog;
use std::time::Duration;
use support::job::{Access, LOG, Member, SILENT, at, job};

fn watched(name: &str) -> Watchdog {
    // Where nobody is told, whoever sleeps looks every millisecond: a thousand steps take seconds.
    let patience = if cfg!(feature = "portable") { 300 } else { 60 };
    Watchdog::start(name, Duration::from_secs(patience), || "a wake-up was lost".to_owned())
}

fn tiny() -> Limits {
    Limits {
        max_inline: 100,
        max_eager: 200,
        fragment: 50,
        outgoing: 1,
        get_chunk: 64,
        get_window: 100,
        socket_buffers: Some(64 << 10),
        ..Limits::default()
    }
}

async fn arrived(log: &Log, count: usize) {
    while log.len() < count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn calls_and_floods(mode: Mode, limits: Limits) {
    let (members, log) = job(3, mode, limits).await;
    for round in 0..200u32 {
        // Long pauses let everybody fall asleep; then a call has to wake the other side, and its answer this one.
        if round % 30 == 0 {
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let answer = members[0].call(1 + round % 2, &round.to_le_bytes()).await.expect("it is answered");
        assert_eq!(answer, round.to_le_bytes());
    }
    let long = vec![9; 70_000];
    assert_eq!(members[2].call(1, &long).await.expect("it is answered"), long);
    for number in 0..200u32 {
        let payload = vec![number as u8; (number as usize * 3) % 400];
        members[0].send(1, LOG, &number.to_le_bytes(), &payload, false).await.expect("it lives");
        members[2].send(1, LOG, &number.to_le_bytes(), &[], false).await.expect("it lives");
    }
    arrived(&log, 400).await;
    for source in [0, 2] {
        let got: Vec<_> = log.of(at(source), at(1)).into_iter().map(|received| received.info).collect();
        assert_eq!(got, (0..200u32).map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>());
    }
    for (number, received) in log.of(at(0), at(1)).iter().enumerate() {
        assert_eq!(received.bytes, vec![number as u8; number * 3 % 400]);
    }
    for number in 0..20u64 {
        tokio::time::sleep(Duration::from_millis(number % 3)).await;
        let bytes = vec![number as u8 + 1; 1 + number as usize * 5000];
        members[0].access(&members[1], 1, number, Access::Put(&bytes)).await.expect("it lives");
        assert_eq!(members[1].memory(1)[number as usize..][..bytes.len()], bytes, "it is there");
        let got = members[2].access(&members[1], 1, number, Access::Get(bytes.len() as u64)).await;
        assert!(got.expect("it lives").as_bytes() == bytes);
    }
}

/// Messages that nobody waits for are written although their sender never comes back to the device.
async fn a_burst_is_written_without_its_sender(mode: Mode) {
    let (members, log) = job(2, mode, Limits::default()).await;
    members[0].call(1, b"hello").await.expect("it lives");
    for round in 0..10 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        for _ in 0..3 {
            members[0].send(1, LOG, &[], b"burst", false).await.expect("it lives");
        }
        arrived(&log, 3 * (round + 1)).await;
    }
}

async fn a_crash_wakes_who_waits(mode: Mode) {
    let (members, _log) = job(3, mode, Limits::default()).await;
    let ticket = members[0].send(1, SILENT, &[], &[], true).await.expect("it lives").expect("a request");
    members[0].call(1, b"it is connected").await.expect("it lives");
    tokio::time::sleep(Duration::from_millis(20)).await;
    members[1].device.abort();
    assert_eq!(members[0].ends(ticket).await.expect_err("it is lost"), Fault::PeerLost(Rank(1)));
    assert_eq!(members[0].told(1).await, [Fault::PeerLost(Rank(1))], "told once");
    assert!(members[0].call(1, b"hello?").await.is_err());
    let ticket = members[0].send(2, SILENT, &[], &[], true).await.expect("it lives").expect("a request");
    members[0].call(2, b"it is connected").await.expect("it lives");
    tokio::time::sleep(Duration::from_millis(20)).await;
    members[2].client.close().await;
    assert_eq!(members[0].ends(ticket).await.expect_err("it left"), Fault::PeerClosed(Rank(2)));
    assert_eq!(members[0].told(2).await, [Fault::PeerLost(Rank(1)), Fault::PeerClosed(Rank(2))]);
}

/// What was sent before a close arrives, however much of it waits when the device closes.
async fn a_close_loses_nothing(mode: Mode) {
    for count in [1u32, 50, 1000] {
        let (members, log) =
            job(2, mode, Limits { socket_buffers: Some(128 << 10), ..Limits::default() }).await;
        let payload = vec![7u8; 3000];
        for number in 0..count {
            members[0].send(1, LOG, &number.to_le_bytes(), &payload, false).await.expect("it lives");
        }
        members[0].client.close().await;
        arrived(&log, count as usize).await;
        let got = log.of(at(0), at(1));
        assert!(got.iter().enumerate().all(|(n, message)| message.info == (n as u32).to_le_bytes()));
        assert_eq!(members[1].told(1).await, [Fault::PeerClosed(Rank(0))]);
    }
}

/// Who goes on to put, get and call while a rank leaves hears that it left, and is told no lie about how: what comes late
/// is not answered behind the last frame.
async fn accesses_while_a_rank_leaves_end_as_such(mode: Mode) {
    for round in 0..30u32 {
        let (members, _log) = job(2, mode, Limits::default()).await;
        members[1].call(0, b"it is connected").await.expect("it lives");
        let (leaver, other) = (&members[0], &members[1]);
        let accesses = async {
            loop {
                for access in [Access::Put(&[1; 2000]), Access::Get(100), Access::Put(&[2; 8])] {
                    if let Err(fault) = other.access(leaver, 0, 64, access).await {
                        return fault;
                    }
                }
            }
        };
        let leave = async {
            tokio::time::sleep(Duration::from_micros(u64::from(round * 37 % 400))).await;
            leaver.client.close().await;
        };
        let (fault, ()) = tokio::join!(accesses, leave);
        assert_eq!(fault, Fault::PeerClosed(Rank(0)), "round {round}");
        assert_eq!(other.told(1).await, [Fault::PeerClosed(Rank(0))]);
    }
}

/// All ranks begin to talk to all others at the same moment, again and again: one connection per pair comes of it, and
/// nothing that was sent meanwhile is lost or doubled.
async fn everybody_connects_at_once(mode: Mode) {
    const RANKS: u32 = 5;
    for _ in 0..6 {
        let (members, log) = job(RANKS, mode, Limits::default()).await;
        let talk = |from: u32, to: u32| {
            let member: &Member = &members[from as usize];
            async move {
                for number in 0..10u8 {
                    member.send(to, LOG, &[number], &[], false).await.expect("it lives");
                }
                assert_eq!(member.call(to, &[from as u8]).await.expect("it lives"), [from as u8]);
            }
        };
        let pairs = (0..RANKS).flat_map(|from| (0..RANKS).map(move |to| (from, to)));
        futures_of(pairs.clone().filter(|(from, to)| from != to).map(|(from, to)| talk(from, to))).await;
        arrived(&log, (RANKS * (RANKS - 1) * 10) as usize).await;
        for (from, to) in pairs.filter(|(from, to)| from != to) {
            let got: Vec<u8> = log.of(at(from), at(to)).iter().map(|message| message.info[0]).collect();
            assert_eq!(got, (0..10).collect::<Vec<u8>>(), "{from} to {to}");
        }
        assert!(members.iter().all(|member| member.errors().is_empty()));
    }
}

/// Polls all of them together.
async fn futures_of(futures: impl Iterator<Item = impl Future<Output = ()>>) {
    let mut futures: Vec<_> = futures.map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        futures.retain_mut(|future| future.as_mut().poll(cx).is_pending());
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// A rank that is sent to before it has started, and one whose address is not known yet.
async fn a_rank_may_start_late(mode: Mode) {
    use posthaste_core::JobShape;
    use posthaste_tcp::{AddressBook, PeerAddress};
    use std::sync::Arc;
    let shape = JobShape { ranks: 3, clients: 1, contexts: 1 };
    let book = Arc::new(AddressBook::new(3));
    let log = Log::default();
    // A port that nobody listens on now, and rank 1 will: until then it is kept from others.
    let kept = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    kept.set_reuse_address(true).expect("a flag of a socket");
    kept.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
    let address = kept.local_addr().expect("it is bound").as_socket().expect("of this kind");
    book.set(Rank(1), PeerAddress { address, incarnation: 1 });
    let open = |rank: u32| {
        let mut config = support::config(Rank(rank), shape, mode, Limits::default());
        if rank == 1 {
            config.bind = address;
        }
        Member::open(config, book.clone(), &log)
    };
    let first = open(0).await;
    for to in [1, 2] {
        first.send(to, LOG, &[], b"early", false).await.expect("it will live");
    }
    tokio::time::sleep(Duration::from_millis(30)).await;
    let _others = [open(1).await, open(2).await];
    drop(kept);
    arrived(&log, 2).await;
    assert_eq!(first.call(2, b"hello").await.expect("it lives"), b"hello");
}

async fn all(mode: Mode) {
    calls_and_floods(mode, Limits::default()).await;
    calls_and_floods(mode, tiny()).await;
    a_burst_is_written_without_its_sender(mode).await;
    a_crash_wakes_who_waits(mode).await;
    a_close_loses_nothing(mode).await;
    accesses_while_a_rank_leaves_end_as_such(mode).await;
    everybody_connects_at_once(mode).await;
    a_rank_may_start_late(mode).await;
}

/// Contexts have connections of their own, and their drivers move them side by side.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contexts_have_their_own_connections() {
    use posthaste_core::{ContextId, Endpoint, JobShape};
    use posthaste_tcp::AddressBook;
    use std::sync::Arc;
    let _dog = watched("contexts");
    let shape = JobShape { ranks: 2, clients: 1, contexts: 3 };
    let (book, log) = (Arc::new(AddressBook::new(2)), Log::default());
    let open = |rank| {
        let config = support::config(Rank(rank), shape, Mode::Encrypted, Limits::default());
        Member::open(config, book.clone(), &log)
    };
    let members = [open(0).await, open(1).await];
    let endpoints: Vec<_> =
        (0..2).flat_map(|rank| (0..3).map(move |n| Endpoint::new(Rank(rank), ContextId(n)))).collect();
    let talk = |from: Endpoint, to: Endpoint| {
        let member = &members[from.rank.index()];
        async move {
            for number in 0..50u8 {
                let payload = vec![number; usize::from(number) * 100];
                let sent = member.send_from(from.context.index(), to, LOG, &[number], &payload, false).await;
                sent.expect("it lives");
            }
        }
    };
    let pairs = endpoints.iter().flat_map(|from| endpoints.iter().map(move |to| (*from, *to)));
    futures_of(pairs.clone().map(|(from, to)| talk(from, to))).await;
    arrived(&log, 36 * 50).await;
    for (from, to) in pairs {
        let got = log.of(from, to);
        assert_eq!(got.len(), 50, "{from} to {to}");
        for (number, message) in got.iter().enumerate() {
            assert_eq!(message.info, [number as u8]);
            assert_eq!(message.bytes, vec![number as u8; number * 100]);
        }
    }
    assert!(members.iter().all(|member| member.errors().is_empty()));
}

/// Ranks 0 and 1, whose second contexts are connected and no others, and the owner of that of rank 0, which does not look.
async fn an_idle_owner() -> (Member, Member, posthaste_core::Context) {
    use posthaste_core::{Context, ContextId, Endpoint, JobShape};
    use posthaste_tcp::AddressBook;
    use std::sync::Arc;
    let shape = JobShape { ranks: 2, clients: 1, contexts: 2 };
    let (book, log) = (Arc::new(AddressBook::new(2)), Log::default());
    let open = |rank| {
        let mut config = support::config(Rank(rank), shape, Mode::HandshakeOnly, Limits::default());
        config.times.linger = Duration::from_millis(200);
        Member::open(config, book.clone(), &log)
    };
    let (zero, one) = (open(0).await, open(1).await);
    let second = Endpoint::new(Rank(1), ContextId(1));
    zero.send_from(1, second, LOG, &[], b"it is connected", false).await.expect("it lives");
    arrived(&log, 1).await;
    let idle = Context::new(&zero.client.contexts()[1]).expect("nobody owns it");
    (zero, one, idle)
}

/// What waits in one context for a rank that leaves ends, although the owner of another one does not look.
#[tokio::test]
async fn a_leave_waits_for_no_other_contexts_owner() {
    let _dog = watched("an idle owner");
    let (zero, one, idle) = an_idle_owner().await;
    let ticket = zero.send(1, SILENT, &[], &[], true).await.expect("it lives").expect("a request");
    zero.call(1, b"it has come").await.expect("it lives");
    let (ended, ()) = tokio::join!(zero.ends(ticket), one.client.close());
    assert_eq!(ended.expect_err("it has left"), Fault::PeerClosed(Rank(1)));
    assert_eq!(zero.told(1).await, [Fault::PeerClosed(Rank(1))]);
    drop(idle);
    assert_eq!(zero.told(2).await, [Fault::PeerClosed(Rank(1)); 2], "each context tells once");
}

/// Nor is what somebody else says of the leave lost, although the only context that has a connection with it does not look.
#[tokio::test]
async fn a_leave_that_is_told_waits_for_no_other_contexts_owner() {
    let _dog = watched("an idle owner of the only connection");
    let (zero, one, idle) = an_idle_owner().await;
    one.client.close().await;
    zero.device.gone(Rank(1), Fault::PeerClosed(Rank(1)));
    assert_eq!(zero.told(1).await, [Fault::PeerClosed(Rank(1))]);
    drop(idle);
    assert_eq!(zero.told(2).await, [Fault::PeerClosed(Rank(1)); 2], "each context tells once");
}

/// A rank that is known to be dead is lost to all contexts, although the only one that has a connection with it does not look.
#[tokio::test]
async fn a_death_waits_for_no_other_contexts_owner() {
    let _dog = watched("an idle owner of a dead rank's connection");
    let (zero, one, idle) = an_idle_owner().await;
    one.device.abort();
    zero.device.died(Rank(1));
    assert_eq!(zero.told(1).await, [Fault::PeerLost(Rank(1))]);
    drop(idle);
    assert_eq!(zero.told(2).await, [Fault::PeerLost(Rank(1)); 2], "each context tells once");
}

#[tokio::test(flavor = "current_thread")]
async fn nothing_is_lost_in_one_thread() {
    let _dog = watched("one thread");
    all(Mode::HandshakeOnly).await;
}

#[tokio::test(flavor = "current_thread")]
async fn nothing_is_lost_encrypted() {
    let _dog = watched("encrypted");
    all(Mode::Encrypted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_threads() {
    let _dog = watched("two threads");
    all(Mode::Insecure).await;
}
