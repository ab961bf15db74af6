//! Noticing that a peer's host has vanished: no packet of it, not even a refusal.
//!
//! The kernel probes idle connections (keep-alive) and repeats what was not acknowledged; this task asks it now and then
//! whether the other host still answers. Not `TCP_USER_TIMEOUT`: that also ends connections whose peer answers and only
//! has no room, which would turn a slow receiver, or a process that is stopped for a while, into a lost one.
//!
//! While the other side has no room the kernel asks only whether there is some, and before Linux 6.15 ever more rarely. That host
//! has nothing to send then, and probes this one by keep-alive: where its probes have come in a steady row and come no more, it has
//! vanished. Of one whose probes were not seen nothing is concluded.

use crate::hub::Hub;
use posthaste_core::LossCause;
use posthaste_core::reactor::{self, Hearing};
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
/// Probes of a living host that may be lost in a row, and the one after that.
const MISSED: u32 = 3;
/// Times between two probes that make a row: one whose answer was lost is repeated sooner than the next is due.
const ROW: u32 = 3;

/// What was seen of a connection.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// It waits for an answer, and since when it has been seen to.
    waiting: Option<Instant>,
    /// It waits for room.
    pulse: Option<Pulse>,
}

/// How a look came, as against when it was due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    InTime,
    /// This side was held up for a moment: what came meanwhile may have come at any time of it.
    Delayed,
    /// This side stood still for as long as others may be silent: the time since the last look tells nothing.
    Late,
}

/// How the other host's own probes come on a connection.
#[derive(Clone, Copy, Debug)]
struct Pulse {
    /// What had come when something was last seen to have, and when that was.
    segments: u32,
    at: Instant,
    /// That was a probe and nothing else.
    probed: bool,
    /// How many of them came behind another, and the longest time between two.
    row: u32,
    apart: Duration,
}

impl Pulse {
    /// What is to be seen now. `unread`: something waits to be read, so that the other host may wait for room, too, and probe
    /// ever more rarely.
    fn felt(before: Option<Pulse>, hearing: &Hearing, unread: bool, came: Came, now: Instant) -> Pulse {
        let first =
            Pulse { segments: hearing.segments, at: now, probed: false, row: 0, apart: Duration::ZERO };
        let Some(mut pulse) = before.filter(|_| !unread) else { return first };
        let (time, changed) = (now - pulse.at, hearing.segments != pulse.segments);
        if changed && hearing.said <= time {
            // It had something to send, and may have more.
            return first;
        }
        if came == Came::Late {
            // The silence begins anew. But the row counts: a host that has vanished in the meantime will make no other.
            return Pulse { row: pulse.row, apart: pulse.apart, ..first };
        }
        if !changed {
            return pulse;
        }
        // An answer to what this side asked comes when it was asked.
        let probed = hearing.last > time;
        if probed && pulse.probed && came == Came::InTime {
            pulse.row += 1;
            pulse.apart = pulse.apart.max(time);
        }
        Pulse { probed, row: pulse.row, apart: pulse.apart, ..first }
    }

    /// Whether there would have been a probe of a living host for so long.
    fn has_stopped(&self, silence: Duration, now: Instant) -> bool {
        self.row >= ROW && now - self.at >= silence.max(self.apart * MISSED)
    }
}

/// Watches over all connections of a device, for ever.
pub(crate) async fn keep(hub: Arc<Hub>) {
    let silence = hub.times.silence;
    if silence.is_zero() {
        return;
    }
    let pause = (silence / LOOKS).max(SHORTEST);
    let mut seen = HashMap::new();
    loop {
        hub.has_connections().await;
        let began = Instant::now();
        tokio::time::sleep(pause).await;
        // The whole machine stood still, or this process did: that is no silence of others.
        let came = match began.elapsed() {
            elapsed if elapsed > pause + silence => Came::Late,
            elapsed if elapsed > 2 * pause => Came::Delayed,
            _ => Came::InTime,
        };
        seen = look(&hub, &seen, came);
    }
}

/// Ends what has been silent for too long; returns what was seen of the others.
fn look(hub: &Hub, before: &HashMap<u64, Seen>, came: Came) -> HashMap<u64, Seen> {
    let now = Instant::now();
    let silence = hub.times.silence;
    let mut seen = HashMap::new();
    for (number, stream) in hub.connections() {
        let Some(hearing) = reactor::hear(&*stream) else { continue };
        let before = before.get(&number);
        // What was answered meanwhile waits for another answer now.
        let waited = before.and_then(|seen| seen.waiting);
        let waited = waited.filter(|since| came != Came::Late && now - *since <= hearing.last);
        let waiting = hearing.unanswered.then(|| waited.unwrap_or(now));
        let pulse = hearing.waits.then(|| {
            let unread = !matches!(rustix::io::ioctl_fionread(&*stream), Ok(0));
            Pulse::felt(before.and_then(|seen| seen.pulse), &hearing, unread, came, now)
        });
        let unanswered = |since| hearing.last >= silence && now - since >= ANSWER;
        if waiting.is_some_and(unanswered) || pulse.is_some_and(|pulse| pulse.has_stopped(silence, now)) {
            tracing::warn!(me = %hub.me, peer = ?stream.peer_addr(), "a host has vanished");
            hub.blame(number, LossCause::Silent);
            // Its port reads the end of the stream when it is moved next, and closes it with a reset: where only one direction
            // is cut, that reaches the other side then. A mere end would wait behind what is not acknowledged, longer each
            // time that is sent again.
            let _ = SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
            let _ = stream.shutdown(Shutdown::Both);
            continue;
        }
        seen.insert(number, Seen { waiting, pulse });
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// What is known after looks every second at which so many segments had come, the last acknowledgement and data were so many
    /// seconds ago, and something was unread; and the time of the last.
    fn after(looks: impl IntoIterator<Item = (u32, u64, u64, bool)>) -> (Pulse, Instant) {
        let began = Instant::now();
        let mut felt = (None, began);
        for (at, (segments, last, said, unread)) in (0..).zip(looks) {
            let ago = |seconds| Duration::from_millis(seconds * 1000 + 500);
            let hearing =
                Hearing { unanswered: false, last: ago(last), said: ago(said), segments, waits: true };
            let now = began + SECOND * at;
            felt = (Some(Pulse::felt(felt.0, &hearing, unread, Came::InTime, now)), now);
        }
        (felt.0.expect("there are looks"), felt.1)
    }

    #[test]
    fn probes_that_came_in_a_row_and_come_no_more_are_missed_and_no_others() {
        let silence = SECOND * 5;
        let stops = |(pulse, last): (Pulse, Instant)| {
            (0..1000).find(|later| pulse.has_stopped(silence, last + SECOND * *later))
        };
        let steady = |at: u32| (at, 100, 100, false);
        assert_eq!(stops(after((0..9).map(steady))), Some(5));
        // Of one that probes more rarely than that, more is waited for.
        assert_eq!(stops(after((0..40).map(|at| steady(at / 4)))), Some(9));
        // Nor is one that is repeated, because its answer was lost, a row: the next may be due much later.
        assert_eq!(stops(after((0..22).map(|at| steady(at / 20 + at / 21)))), None);
        // Three times between two of them make a row, and no fewer.
        assert_eq!(stops(after((0..4).map(steady))), None);
        assert_eq!(stops(after((0..5).map(steady))), Some(5));
        // One alone tells nothing, nor do answers to this side's own probes.
        assert_eq!(stops(after([0, 1].map(steady))), None);
        assert_eq!(stops(after((0..9).map(|at| (at, 0, 100, false)))), None);
        assert_eq!(stops(after((0..9).map(|at| (at, u64::from(at % 2), 100, false)))), None);
        // One that says something may have more to say, and finds no room for that while something is unread.
        assert_eq!(stops(after((0..9).map(steady).chain([(9, 0, 0, false)]))), None);
        assert_eq!(stops(after((0..9).map(|at| (at, 100, 100, at == 8)))), None);
        // The machine before Linux 4.2.
        assert_eq!(stops(after([(0, 100, 100, false); 9])), None);
    }

    #[test]
    fn probes_that_were_looked_at_late_say_nothing_of_how_far_apart_they_come() {
        let silence = SECOND * 5;
        let (mut pulse, last) = after((0..9).map(|at| (at, 100, 100, false)));
        let mut now = last + SECOND * 4;
        let hearing = |segments| Hearing {
            unanswered: false,
            last: SECOND * 100,
            said: SECOND * 100,
            segments,
            waits: true,
        };
        pulse = Pulse::felt(Some(pulse), &hearing(12), false, Came::Delayed, now);
        assert!(!pulse.has_stopped(silence, now + SECOND * 4));
        assert!(pulse.has_stopped(silence, now + SECOND * 5), "three times four seconds are not waited for");
        // In time they would be.
        now += SECOND * 4;
        pulse = Pulse::felt(Some(pulse), &hearing(13), false, Came::InTime, now);
        assert!(
            !pulse.has_stopped(silence, now + SECOND * 11) && pulse.has_stopped(silence, now + SECOND * 12)
        );
    }

    #[test]
    fn a_standstill_of_this_side_is_no_silence_and_makes_no_row_forgotten() {
        let silence = SECOND * 5;
        let (pulse, last) = after((0..9).map(|at| (at, 100, 100, false)));
        let back = last + SECOND * 60;
        let seen = |segments, said| {
            let ago = SECOND * 100;
            let hearing = Hearing { unanswered: false, last: ago, said, segments, waits: true };
            Pulse::felt(Some(pulse), &hearing, false, Came::Late, back)
        };
        // Whether probes came while it stood still or none did, a living host's come again soon, and none of one that vanished.
        for segments in [8, 40] {
            let after = seen(segments, SECOND * 100);
            assert!(!after.has_stopped(silence, back + SECOND * 4), "{segments}: the time begins anew");
            assert!(after.has_stopped(silence, back + SECOND * 5), "{segments}: the row counts");
        }
        // It has said something meanwhile, and may have more to say.
        assert!(!seen(40, SECOND * 30).has_stopped(silence, back + SECOND * 1000));
    }
}
