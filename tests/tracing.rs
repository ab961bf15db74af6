//! Tracing: an event for every object that is made or goes, and one for every packet, in a span that names both ends, for
//! whoever asks; see also `steady.rs`, which
//! counts what a message costs when nobody does.

#[path = "support/lines.rs"]
mod lines;

use lines::Lines;
use posthaste::{ContextId, FifoOptions, Message, Scope};

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
