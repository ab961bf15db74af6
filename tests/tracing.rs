//! Tracing: an event for every packet, in a span that names both ends, for whoever asks; see also `steady.rs`, which
//! counts what a message costs when nobody does.

#[path = "support/lines.rs"]
mod lines;

use lines::Lines;
use posthaste::{Message, Scope};

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
