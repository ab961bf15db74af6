//! Tracing: an event for every packet, in a span that names both ends, for whoever asks; see also `steady.rs`, which
//! counts what a message costs when nobody does.

use posthaste::{Message, Scope};
use std::io::Write;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "current_thread")]
async fn packets_leave_a_trace_with_rank_and_peer() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);

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

    let text = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("text");
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
