//! Tracing: an event for every object that is made or goes, and one for every packet, in a span that names both ends, for
//! whoever asks; see also `steady.rs`, which
//! counts what a message costs when nobody does.

mod support;

use posthaste::{ContextId, FifoOptions, Message, Rank, Scope};
use support::lines::Lines;
use support::{options, run, soon, until};

#[tokio::test(flavor = "current_thread")]
async fn packets_leave_a_trace_with_rank_and_peer() {
    let (lines, _guard) = Lines::of_this_thread();

    let job = posthaste::solo().await.expect("a job of one rank");
    let arrived = job.counter();
    let count = arrived.clone();
    let message = job.register("traced", move |_: Message, _: &mut Scope| count.add(1)).expect("a new name");
    job.barrier().await.expect("a barrier");
    // A word, a record and a page.
    for (at, len) in [8, 100, 10_000].into_iter().enumerate() {
        message.send(job.rank(), vec![7; len]).await.expect("sent");
        arrived.reach(at as u64 + 1).await;
    }
    let echo =
        job.service_inline("echo", |m: Message, _: &mut Scope| Ok(m.to_bytes().into())).expect("a new name");
    echo.call_bytes(job.rank(), [1; 8]).await.expect("an answer");
    job.leave().await.expect("left");

    let text = lines.take();
    for len in [8, 100, 10_000] {
        let of = |what: &str| {
            text.lines().any(|line| line.contains(what) && line.contains(&format!("bytes={len}")))
        };
        assert!(of("packet sent") && of("packet received"), "{len} bytes:\n{text}");
    }
    assert!(text.contains("reply received"), "{text}");
    let received = text.lines().find(|line| line.contains("packet received")).expect("an event");
    assert!(received.contains("rank=") && received.contains("peer="), "{received}");
    assert!(text.contains("protocol registered") && text.contains("lane opened"), "objects:\n{text}");
}

#[tokio::test(flavor = "current_thread")]
async fn objects_leave_a_trace_when_they_are_made_and_when_they_go() {
    let (lines, _guard) = Lines::of_this_thread();

    let job = posthaste::solo().await.expect("a job of one rank");
    let window = job.shmalloc::<u64>(8).await.expect("memory");
    let region = job.region(64).await.expect("memory");
    let pattern = job.record(|r| r.put(&window, job.rank(), 0, &region)).await.expect("recorded");
    let fifo = job.fifo(FifoOptions::default()).await.expect("open");
    let team = job.world().split(Some(0), 0).await.expect("all take part").expect("of that colour");
    let sum = job.persistent().all_reduce::<u64>(&team, 1, &posthaste::Reduce::sum()).await.expect("made");
    drop((sum, team, fifo, pattern, region));
    window.free().await.expect("freed");
    drop(job.own_context(ContextId(0)).expect("nobody else owns it"));
    job.barrier().await.expect("a barrier");
    job.leave().await.expect("left");

    let text = lines.take();
    let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what:?} in\n{text}"));
    for [made, gone] in [
        ["joined", "left"],
        ["window made", "window freed"],
        ["region made", "region released"],
        ["pattern recorded", "pattern unregistered"],
        ["fifo opened", "fifo closed"],
        ["group made", "group dropped"],
        ["persistent collective made", "persistent collective dropped"],
        ["context owned", "context given back"],
    ] {
        assert!(place(made) < place(gone), "{made:?} and {gone:?}:\n{text}");
    }
}

/// Whether a line has all of these.
fn has(text: &str, parts: &[&str]) -> bool {
    text.lines().any(|line| parts.iter().all(|part| line.contains(part)))
}

#[test]
fn connections_packets_and_accesses_leave_a_trace_over_sockets_too() {
    run(2, options().over_tcp().body_leaves(), async |job| {
        let (lines, _guard) = Lines::of_this_thread();
        let me = job.rank();
        let peer = Rank(1 - me.0);
        let (rank, at_peer) = (format!("rank=rank {me} "), format!("peer=rank {peer} "));
        let (rank, at_peer) = (rank.as_str(), at_peer.as_str());
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("traced", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let window = job.shmalloc::<u8>(300_000).await.unwrap();
        job.barrier().await.unwrap();
        for len in [8, 100, 10_000, 200_000] {
            message.send(peer, vec![7; len]).await.unwrap();
        }
        soon("the messages", arrived.reach(4)).await;
        for len in [24, 250_000] {
            window.put_slice(peer, 0, &vec![1; len]).await.unwrap();
            assert_eq!(window.get_slice(peer, 0, len).await.unwrap(), vec![1; len]);
        }
        job.barrier().await.unwrap();
        let mut text = lines.take();
        for len in [8, 100, 10_000, 200_000] {
            let bytes = format!("bytes={len}");
            assert!(has(&text, &["TRACE", "packet sent", rank, at_peer, &bytes]), "{len} sent:\n{text}");
            // In the span of the message.
            let received = ["TRACE", "message{", "packet received", rank, at_peer, &bytes];
            assert!(has(&text, &received), "{len} received:\n{text}");
        }
        for len in [24, 250_000] {
            let bytes = format!("bytes={len}");
            for op in ["op=Put", "op=Get"] {
                let begun = ["TRACE", "access begun", rank, at_peer, op, &bytes];
                assert!(has(&text, &begun), "{op} of {len}:\n{text}");
            }
        }
        // Longer ones are several frames.
        for what in ["put received", "get received", "answer received"] {
            assert!(has(&text, &["TRACE", what, rank, at_peer, "bytes=24"]), "{what}:\n{text}");
        }
        assert!(has(&text, &["DEBUG", "connected", "me=", at_peer]), "{text}");
        if me == Rank(0) {
            until("the end of the connection", || {
                text += &lines.take();
                has(&text, &["DEBUG", "connection closed", "me=", at_peer])
            })
            .await;
        }
        job.leave().await.unwrap();
    });
}
