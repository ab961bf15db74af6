//! Who waits for room in a queue stands in a row, which nothing passes.

use super::flow::{fill, try_send};
use super::world::at;
use super::{Harness, Log, Message, Outbox, World};
use posthaste_core::engine::{Payload, SendArgs, Sent, Wait, Whole};
use posthaste_core::{ContextId, ProtocolId, Rank, Ticket};

/// A send of rank 0 to rank 1.
enum Step {
    OnItsWay,
    Waits(Ticket, Wait),
}

fn send<H: Harness>(world: &World<H>, message: &Message, wait: Wait) -> Step {
    let args =
        SendArgs { target: message.target, protocol: message.protocol, cookie: 0, info: &[], relaxed: false };
    world.enter(at(Rank(0)), |scope| match scope.send(&args, Payload::Borrowed(&message.payload), wait) {
        Ok(Sent::Done) => Step::OnItsWay,
        Ok(Sent::Queued(ticket)) => {
            scope.detach(ticket);
            Step::OnItsWay
        }
        Ok(Sent::Later(ticket, wait, _)) => Step::Waits(ticket, wait),
        other => panic!("{other:?}"),
    })
}

/// Sends to a rank that does nothing until a send has to wait for a place. Returns its ticket.
fn wait_behind_others<H: Harness>(
    world: &mut World<H>,
    protocol: ProtocolId,
    sent: &mut Vec<Message>,
    len: usize,
) -> (Ticket, Wait) {
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    world.pause(Rank(1));
    fill(world, protocol, sent);
    loop {
        assert!(sent.len() < 200_000, "no end of room");
        sent.push(Message::filled(from, to, protocol, sent.len(), 0, len));
        if let Step::Waits(ticket, wait) = send(world, &sent[sent.len() - 1], Wait::Await) {
            return (ticket, wait);
        }
    }
}

/// A long message has waited for room, and there is some, and nothing else waits: yet nothing that is sent later goes before
/// it, in whichever way. What has waited behind it goes next.
pub fn nothing_passes_who_was_promised_a_place<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| setup.config.fifo_slots = 1);
    let log = Log::default();
    let protocol = world.record("row", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let known: Vec<_> = [1, 2].map(|rank| Message::new(Rank(rank), protocol, *b"known by")).into();
    let mut sent = vec![known[0].clone()];
    world.send_all(&mut [Outbox::new(from, known)]);
    world.until("both know the protocol", |_| log.len() == 2);
    let len = world.caps().max_eager * 2 + 30;
    let (first, place) = wait_behind_others(&mut world, protocol, &mut sent, len);
    world.resume(Rank(1));
    // With one slot it is promised when nothing at all is queued.
    world.until("there is a place", |world| world.handle(from).slots().is_done(first));
    for len in [8, 40, len] {
        assert!(!try_send(&world, Rank(1), protocol, &vec![1; len]), "{len} bytes went before it");
    }
    world.enter(from, |scope| {
        assert!(!scope.send_word(to, protocol, 1), "a word went before it");
        assert!(!scope.send_packet(to, protocol, Whole::Bytes(&[1; 40])), "a packet went before it");
        let mut ranks = [Rank(1), Rank(2)];
        let left = scope.multicast_word(&mut ranks, ContextId(0), protocol, 1);
        assert!(ranks[..left].contains(&Rank(1)), "a multicast went before it");
    });
    let word = Message::filled(from, to, protocol, sent.len(), 0, 8);
    let Step::Waits(second, behind) = send(&world, &word, Wait::Await) else {
        panic!("who awaits went before it")
    };
    world.until("the first ends", |world| world.handle(from).slots().take(first).is_some());
    assert!(matches!(send(&world, &sent[sent.len() - 1], place), Step::OnItsWay), "the place was for it");
    world.outcome(from, second).expect("both live");
    sent.push(word);
    assert!(matches!(send(&world, &sent[sent.len() - 1], behind), Step::OnItsWay), "the place was for it");
    // All is as before once nobody waits.
    let last = 7u64.to_ne_bytes();
    world.until("who tries has success", |world| try_send(world, Rank(1), protocol, &last));
    sent.push(Message::new(Rank(1), protocol, last));
    world.until("all arrive", |_| log.of(from, to).len() >= sent.len());
    let arrived = log.of(from, to).into_iter().map(|received| received.bytes);
    assert!(arrived.eq(sent.into_iter().map(|message| message.payload)), "out of order");
}
