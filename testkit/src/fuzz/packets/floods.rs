//! Peers that send more than they may, and take nothing of what they are answered.

use super::*;
use posthaste_core::engine::MOST_CREDITS;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Keeps what it is given, or answers it at length.
struct Keeper {
    flow: Flow,
    handled: Arc<AtomicUsize>,
}

impl Protocol for Keeper {
    fn name(&self) -> &str {
        "a"
    }

    fn flow(&self) -> Flow {
        self.flow
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        self.handled.fetch_add(1, Ordering::Relaxed);
        if let Some(to) = message.reply() {
            scope.reply(to, Ok(Payload::Borrowed(&[7; 100])));
        }
    }
}

/// What came of many packets: messages handled, answers that had to wait, and faults.
#[derive(Debug, PartialEq)]
struct Came {
    handled: usize,
    queued: u64,
    told: Vec<Fault>,
}

/// Rank 1 declares the protocol `name` with the flow, and sends the packet so many times; the port takes a few answers.
fn flooded(name: u8, flow: Flow, times: usize, (protocol, cookie, body): (u16, u64, &[u8])) -> Came {
    let handled = Arc::new(AtomicUsize::new(0));
    let keeper = Keeper { flow, handled: handled.clone() };
    let config = EngineConfig { credit_bytes: 1 << 20, answer_bytes: 1000, ..EngineConfig::default() };
    let mut scene = Scene::new(2, 4, [Arc::new(keeper) as _], config);
    scene.engine.scope().declare_ready();
    scene.say(1, wire::DECLARE, 0, &declaration(0, flow as u8, &[name]));
    (0..times).for_each(|_| scene.say(1, protocol, cookie, body));
    Came { handled: handled.load(Ordering::Relaxed), queued: scene.engine.stats().queued, told: scene.told() }
}

const CUT_OFF: [Fault; 1] = [Fault::PeerCorrupt(Rank(1))];

#[test]
fn who_sends_without_credit_is_cut_off() {
    let most = MOST_CREDITS as usize;
    let long = [1; 256];
    let message = |len: usize| (wire::FIRST_USER, 0, &long[..len]);
    let came = flooded(b'a', Flow::Credited, most, message(8));
    assert_eq!((came.handled, came.told), (most, vec![]), "any rank may give its senders so much");
    let came = flooded(b'a', Flow::Credited, most + 1, message(8));
    assert_eq!((came.handled, came.told), (most, CUT_OFF.to_vec()));
    // Twice the bytes that there are.
    let came = flooded(b'a', Flow::Credited, 9000, message(256));
    assert_eq!((came.handled, came.told), (8192, CUT_OFF.to_vec()));
    // What is handled at once takes no credit.
    let came = flooded(b'a', Flow::Inline, most + 1, message(8));
    assert_eq!((came.handled, came.told), (most + 1, vec![]));
}

#[test]
fn who_takes_no_answers_is_not_served_for_ever() {
    let came = flooded(b'a', Flow::Replied, 1000, (wire::FIRST_USER, 5, &[1; 8]));
    // Four went out, and eleven that wait are more than 1000 bytes; the others are told `Busy`.
    assert_eq!((came.handled, came.told), (15, vec![]));
    assert_eq!(came.queued, 1000 - 4);
}

#[test]
fn who_asks_for_more_than_it_can_have_under_way_is_cut_off() {
    let most = 64 * ((1 << 15) - 1);
    let came = flooded(b'a', Flow::Inline, most + 10, (wire::FLUSH, 5, &[]));
    assert_eq!((came.queued, came.told), (most as u64, CUT_OFF.to_vec()));
}

#[test]
fn who_sends_to_nobody_is_told_once() {
    let came = flooded(b'b', Flow::Inline, 1000, (wire::FIRST_USER, 0, &[1; 8]));
    assert_eq!(came, Came { handled: 0, queued: 0, told: vec![] });
    let came = flooded(b'b', Flow::Replied, 1000, (wire::FIRST_USER, 5, &[1; 8]));
    assert_eq!(came, Came { handled: 0, queued: 1000 - 4, told: vec![] }, "each request is answered");
}
