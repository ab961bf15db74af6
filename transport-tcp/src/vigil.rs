//! Noticing that a peer's host has vanished: no packet of it, not even a refusal.
//!
//! The kernel probes idle connections (keep-alive) and repeats what was not acknowledged; this task asks it now and then
//! whether the other host still answers. Not `TCP_USER_TIMEOUT`: that also ends connections whose peer answers and only
//! has no room, which would turn a slow receiver, or a process that is stopped for a while, into a lost one.

use crate::hub::Hub;
use posthaste_core::LossCause;
use posthaste_core::reactor;
use socket2::SockRef;
use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks per time of silence.
const LOOKS: u32 = 6;
const SHORTEST: Duration = Duration::from_millis(20);
/// How long an answer may take. Kernels answer at once, but those of one kind not more than twice a second.
const ANSWER: Duration = Duration::from_secs(1);

/// Watches over all connections of a device, for ever.
pub(crate) async fn keep(hub: Arc<Hub>) {
    let silence = hub.times.silence;
    if silence.is_zero() {
        return;
    }
    let pause = (silence / LOOKS).max(SHORTEST);
    // The connections that wait for an answer, and since when they have been seen to.
    let mut waiting = HashMap::new();
    loop {
        hub.has_connections().await;
        let began = Instant::now();
        tokio::time::sleep(pause).await;
        if began.elapsed() > pause + silence {
            // The whole machine stood still, or this process did: that is no silence of others.
            waiting.clear();
        }
        waiting = look(&hub, &waiting);
    }
}

/// Ends what has been silent for too long; returns what waits for an answer now.
fn look(hub: &Hub, before: &HashMap<u64, Instant>) -> HashMap<u64, Instant> {
    let now = Instant::now();
    let mut waiting = HashMap::new();
    for (number, stream) in hub.connections() {
        let Some(hearing) = reactor::hear(&*stream).filter(|hearing| hearing.unanswered) else { continue };
        // What was answered meanwhile waits for another answer now.
        let since = before.get(&number).copied().filter(|since| now - *since <= hearing.last).unwrap_or(now);
        if hearing.last >= hub.times.silence && now - since >= ANSWER {
            tracing::warn!(me = %hub.me, peer = ?stream.peer_addr(), "a host has vanished");
            hub.blame(number, LossCause::Silent);
            // Its port reads the end of the stream when it is moved next, and closes it with a reset: where only one direction
            // is cut, that reaches the other side then. A mere end would wait behind what is not acknowledged, longer each
            // time that is sent again.
            let _ = SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
            let _ = stream.shutdown(Shutdown::Both);
            continue;
        }
        waiting.insert(number, since);
    }
    waiting
}
