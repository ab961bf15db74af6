//! Messages that wait with the engine, for room or for credit: nothing passes them, and whoever gave them may take them back.

use super::flow::{Keeper, fill, try_send, with_a_full_lane, with_keeper};
use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use posthaste_core::context::Face;
use posthaste_core::engine::{Deposit, Given, Payload, ReplayStart, Rma, SendArgs, Whole};
use posthaste_core::protocol::Flow;
use posthaste_core::{ContextId, Fault, ProtocolId, Rank, Ticket};

/// What the engine keeps.
type KeptMessage = (Ticket, Deposit);

/// Rank 0 gives a message. What is queued is not looked after any more.
fn give<H: Harness>(world: &World<H>, message: &Message) -> Option<KeptMessage> {
    let args = SendArgs {
        target: message.target,
        protocol: message.protocol,
        cookie: 0,
        info: &message.info,
        relaxed: false,
    };
    world.enter(at(Rank(0)), |scope| {
        let payload = Payload::Owned(message.payload.clone().into());
        match scope.give(&args, payload).expect("the peer lives") {
            Given::Done => None,
            Given::Queued(ticket) => {
                scope.detach(ticket);
                None
            }
            Given::Kept(ticket, deposit) => Some((ticket, deposit)),
        }
    })
}

/// Gives messages to a rank that does nothing until so many are kept. Those that have no room are of every kind.
fn keep<H: Harness>(
    world: &World<H>,
    protocol: ProtocolId,
    sent: &mut Vec<Message>,
    count: usize,
) -> Vec<KeptMessage> {
    let long = world.caps().max_eager * 2 + 30;
    let mut kept = Vec::new();
    while kept.len() < count {
        let (number, len) = (sent.len(), [8, 40, 0, long][sent.len() % 4]);
        assert!(number < 200_000, "no end of room");
        let message = Message::filled(at(Rank(0)), at(Rank(1)), protocol, number, number % 113, len);
        kept.extend(give(world, &message));
        sent.push(message);
    }
    kept
}

fn has_ended<H: Harness>(world: &World<H>, kept: &KeptMessage) -> bool {
    world.handle(at(Rank(0))).slots().is_done(kept.0)
}

/// What is tried, in whichever way, goes behind what waits or not at all, and what is given later is kept behind it; as room
/// comes, all of that is sent in its order, though nobody looks after it.
pub fn nothing_passes_what_is_kept_for_want_of_room<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| setup.config.fifo_slots = 1);
    let log = Log::default();
    let protocol = world.record("row", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let known: Vec<_> = [1, 2].map(|rank| Message::new(Rank(rank), protocol, *b"known by")).into();
    let mut sent = vec![known[0].clone()];
    world.send_all(&mut [Outbox::new(from, known)]);
    world.until("both know the protocol", |_| log.len() == 2);
    world.pause(Rank(1));
    fill(&mut world, protocol, &mut sent);
    let kept = keep(&world, protocol, &mut sent, 30);
    let long = vec![1; world.caps().max_eager * 2];
    let most = sent.len() + 30;
    let memory = world.memory(4096);
    memory.write(Rank(0), 0, &[9; 40]);
    let recorded = memory.recorded_send(Rank(1), protocol, 0, 40);
    let pattern =
        world.enter(from, |scope| scope.store_pattern(vec![recorded], Box::new(()))).expect("one send");
    let passes = |world: &mut World<H>, sent: &mut Vec<Message>| {
        if has_ended(world, &kept[29]) {
            return;
        }
        for len in [8, 40, long.len()] {
            assert!(!try_send(world, Rank(1), protocol, &long[..len]), "{len} bytes went before it");
        }
        world.enter(from, |scope| {
            assert!(!scope.send_word(to, protocol, 1), "a word went before it");
            assert!(!scope.send_packet(to, protocol, Whole::Bytes(&[1; 40])), "a packet went before it");
            let mut ranks = [Rank(1), Rank(2)];
            let left = scope.multicast_word(&mut ranks, ContextId(0), protocol, 1);
            assert!(ranks[..left].contains(&Rank(1)), "a multicast went before it");
        });
        // Puts empty the queue where they go over sends, and replays have what waits go before them.
        let put = world.access(&memory, Rank(0), Rank(1), 0, Rma::Put(Payload::Borrowed(&[1; 8])));
        if let Some(ticket) = put {
            world.enter(from, |scope| scope.detach(ticket));
        }
        if has_ended(world, &kept[29]) {
            return;
        }
        assert!(
            !try_send(world, Rank(1), protocol, &long[..8]),
            "a word went before what waits behind a put"
        );
        if sent.len() == most - 10 {
            match world.enter(from, |scope| scope.replay(pattern)).expect("the peer lives") {
                ReplayStart::Queued { ticket, .. } => world.enter(from, |scope| scope.detach(ticket)),
                other => panic!("it passed what waits: {other:?}"),
            }
            sent.push(Message::new(Rank(1), protocol, [9; 40]));
        }
        if sent.len() < most {
            let message = Message::filled(from, to, protocol, sent.len(), 0, 40);
            let behind = give(world, &message).expect("what waits is not passed");
            // Forgotten, it is sent nevertheless.
            std::mem::forget(behind);
            sent.push(message);
        }
    };
    passes(&mut world, &mut sent);
    world.resume(Rank(1));
    world.until("all were sent", |world| {
        passes(world, &mut sent);
        has_ended(world, &kept[29])
    });
    for (ticket, deposit) in kept {
        world.outcome(from, ticket).expect("both live");
        assert!(deposit.withdraw().is_none(), "it was sent");
    }
    world.until("all arrive", |_| log.of(from, to).len() >= sent.len());
    // All is as before once nobody waits.
    let last = 7u64.to_ne_bytes();
    world.until("who tries has success", |world| try_send(world, Rank(1), protocol, &last));
    sent.push(Message::new(Rank(1), protocol, last));
    world.until("the last arrives", |_| log.of(from, to).len() >= sent.len());
    world.a_while();
    log.check(from, to, &sent);
}

/// With one credit all go one after the other, in their order, though nobody looks after them; who tries is refused meanwhile,
/// and another protocol goes on.
pub fn nothing_of_its_protocol_passes_what_is_kept_for_want_of_credit<H: Harness>(harness: H) {
    let (mut world, log, keeper) = with_keeper(harness, 2, |setup| setup.config.credits = 1);
    let free_log = Log::default();
    let free = world.record("free", &free_log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let mut sent = Vec::new();
    let kept = keep(&world, ProtocolId(0), &mut sent, 20);
    assert_eq!(sent.len(), 21, "one has its credit");
    world.send_all(&mut [Outbox::new(from, [Message::new(Rank(1), free, *b"goes on")])]);
    world.until("the other protocol goes on", |_| free_log.len() == 1);
    for (round, next) in kept.iter().enumerate() {
        world.until("the next arrives", |_| log.len() == round + 1);
        assert!(!has_ended(&world, next), "one credit, one message");
        assert!(!try_send(&world, Rank(1), ProtocolId(0), b"no credit"));
        keeper.consume_all(&mut world, to);
        if round % 2 == 0 {
            // There is credit again, which is for the next that waits.
            world.until("it is sent", |world| has_ended(world, next));
            assert!(!try_send(&world, Rank(1), ProtocolId(0), b"not for who tries"));
        }
    }
    for (ticket, _deposit) in kept {
        world.outcome(from, ticket).expect("both live");
    }
    world.until("the last arrives", |_| log.len() == sent.len());
    keeper.consume_all(&mut world, to);
    world.until("the credit comes back", |world| try_send(world, Rank(1), ProtocolId(0), b"credit"));
    sent.push(Message::new(Rank(1), ProtocolId(0), *b"credit"));
    world.until("it arrives", |_| log.len() == sent.len());
    log.check(from, to, &sent);
}

/// Whoever sleeps until there is room somewhere is rung for that, and for nothing else: what is given meanwhile and has to ask for
/// credit wakes it.
pub fn whoever_sleeps_for_room_is_woken_to_ask_for_credit<H: Harness>(harness: H) {
    const CREDITS: usize = 8;
    let (mut world, log, keeper) = with_keeper(harness, 3, |setup| setup.config.credits = CREDITS as u32);
    let free_log = Log::default();
    let free = world.record("free", &free_log);
    let from = at(Rank(0));
    let given = |world: &World<H>| give(world, &Message::new(Rank(2), ProtocolId(0), *b"credited"));
    for _ in 0..CREDITS {
        assert!(given(&world).is_none(), "there is credit");
    }
    world.until("those with credit arrive", |_| log.len() == CREDITS);
    world.pause(Rank(1));
    let mut sent = Vec::new();
    fill(&mut world, free, &mut sent);
    let one_more = Message::filled(from, at(Rank(1)), free, sent.len(), 0, 40);
    let _queued = give(&world, &one_more);
    sent.push(one_more);
    let is_asleep = (0..2000).any(|_| {
        world.step();
        matches!(world.handle(from).enter(|engine| engine.arm(0)), Ok(true))
    });
    if !is_asleep {
        assert_eq!(world.caps().name, "simulated", "it never sleeps");
        return;
    }
    let kept = given(&world).expect("there is no credit");
    let sleeps = world.handle(from).enter(|engine| engine.is_armed());
    assert!(matches!(sleeps, Ok(false)), "nobody asks for credit");
    world.until("it is asked for", |world| {
        keeper.consume_all(world, at(Rank(2)));
        has_ended(world, &kept)
    });
    world.resume(Rank(1));
    world.until("all arrive", |_| free_log.len() == sent.len());
}

/// Some of those that wait are taken back, with their payload, or dropped: the others go on without them, and neither credit nor
/// slots are lost with them, also of those that wait for room with their credit, and of requests.
pub fn what_is_taken_back_is_never_sent_and_costs_nothing<H: Harness>(harness: H) {
    const CREDITS: usize = 6;
    let mut world = World::with(harness, 2, |setup| {
        setup.config.credits = CREDITS as u32;
        setup.config.fifo_slots = 1;
    });
    let (log, keeper) = (Log::default(), Keeper::default());
    for rank in world.ranks() {
        world.register(rank, Probe::recording("inline", &log));
        world.register(rank, keeper.probe("credited", &log));
        let answers = log.clone();
        let replied = Probe::new("replied", move |scope, message| {
            answers.arrived(scope.me(), "replied", &message);
            if let Some(to) = message.reply() {
                scope.reply(to, Ok(Payload::Borrowed(b"answer")));
            }
        });
        world.register(rank, replied.flow(Flow::Replied));
    }
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let mut sent = Vec::new();
    for round in 0..20 {
        world.pause(Rank(1));
        let before = sent.len();
        let mut expected = Vec::new();
        fill(&mut world, ProtocolId(0), &mut expected);
        let mut waiting = Vec::new();
        let mut asked = Vec::new();
        // Beyond the credit there is, so that some wait for that and some for room.
        for number in 0..3 * 2 * CREDITS {
            let protocol = ProtocolId((number % 3) as u16);
            let name = expected.len() + before;
            let message = Message::filled(from, to, protocol, name, number % 100, number % 50);
            let request = (protocol == ProtocolId(2)).then(|| {
                world.enter(from, |scope| {
                    let ticket = scope.operation(Some(Rank(1))).expect("it lives");
                    scope.note_request(ticket, protocol, message.payload.len());
                    ticket
                })
            });
            let args = SendArgs {
                target: to,
                protocol,
                cookie: request.map_or(0, Ticket::to_word),
                info: &message.info,
                relaxed: false,
            };
            let payload = Payload::Owned(message.payload.clone().into());
            let given = world.enter(from, |scope| scope.give(&args, payload)).expect("it lives");
            let goes = match given {
                Given::Kept(ticket, deposit) if (number + round) % 5 < 2 => {
                    if number % 2 == 0 {
                        let back = deposit.withdraw().expect("nothing was sent");
                        assert_eq!(back.bytes_of(), message.payload);
                        assert!(deposit.withdraw().is_none(), "once");
                    }
                    drop(deposit);
                    world.enter(from, |scope| scope.detach(ticket));
                    false
                }
                Given::Kept(ticket, deposit) => {
                    waiting.push((ticket, deposit));
                    true
                }
                Given::Queued(ticket) => {
                    world.enter(from, |scope| scope.detach(ticket));
                    true
                }
                Given::Done => true,
            };
            match request {
                Some(ticket) if goes => asked.push(ticket),
                Some(ticket) => world.enter(from, |scope| scope.detach(ticket)),
                None => {}
            }
            if goes {
                expected.push(message);
            }
        }
        assert!(waiting.len() > CREDITS, "{} wait", waiting.len());
        sent.extend(expected);
        world.resume(Rank(1));
        world.until("all that were not taken back arrive", |world| {
            if world.random.chance(3) {
                keeper.consume_all(world, to);
            }
            log.len() == sent.len()
        });
        for (ticket, _deposit) in waiting {
            world.outcome(from, ticket).expect("both live");
        }
        for ticket in asked {
            assert_eq!(world.outcome(from, ticket).expect("both live").as_bytes(), b"answer");
        }
        keeper.consume_all(&mut world, to);
        let free = world.first_free_slot(from);
        assert!(free < 300, "slot {free} is the first that is free");
    }
    world.a_while();
    for number in 0..3 {
        let of = |protocol: ProtocolId| protocol == ProtocolId(number);
        let names = ["inline", "credited", "replied"];
        let expected = sent.iter().filter(|message| of(message.protocol)).map(|message| &message.payload);
        let arrived = log.all();
        let arrived = arrived.iter().filter(|got| got.protocol == names[usize::from(number)]);
        assert!(arrived.map(|got| &got.bytes).eq(expected), "{}", names[usize::from(number)]);
    }
    // All of the credit is there: so many arrive, though nothing is consumed or answered.
    for protocol in [1, 2].map(ProtocolId) {
        let had = log.len();
        for _ in 0..CREDITS {
            std::mem::forget(give(&world, &Message::new(Rank(1), protocol, *b"credit")));
        }
        world.until("as many arrive as there is credit", |_| log.len() >= had + CREDITS);
    }
}

/// With a peer end those that wait for it, and what they were to send is there.
pub fn what_is_kept_for_a_lost_peer_can_be_taken_back<H: Harness>(harness: H) {
    let (mut world, _log, mut sent) = with_a_full_lane(harness, 1);
    let from = at(Rank(0));
    // The last of each are kept, of those that are given.
    let kept = [0, 1].map(|protocol| {
        let kept = keep(&world, ProtocolId(protocol), &mut sent, 10);
        kept.into_iter().zip(sent[sent.len() - 10..].to_vec())
    });
    world.kill(Rank(1));
    let mut queued = 0;
    for ((ticket, deposit), message) in kept.into_iter().flatten() {
        let fault = world.outcome(from, ticket).expect_err("nobody was there");
        assert_eq!(fault, Fault::PeerLost(Rank(1)));
        match deposit.withdraw() {
            Some(back) => assert_eq!(back.bytes_of(), message.payload),
            // It had a place before the loss was known, and its device refused it.
            None => queued += 1,
        }
    }
    assert!(queued <= 12, "{queued} had a place, and there was credit for one of the last ten");
}

/// A replay waits for credit, and a message of the same protocol behind it: both get theirs at once, and stay in their order.
pub fn what_is_kept_behind_a_replay_stays_behind_it<H: Harness>(harness: H) {
    let (mut world, log, keeper) = with_keeper(harness, 2, |setup| setup.config.credits = 2);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let memory = world.memory(4096);
    memory.write(Rank(0), 0, b"replayed");
    let recorded = memory.recorded_send(Rank(1), ProtocolId(0), 0, 8);
    let pattern =
        world.enter(from, |scope| scope.store_pattern(vec![recorded], Box::new(()))).expect("one send");
    let mut sent = Vec::new();
    for number in 0..20 {
        let message = |name: &str| Message::new(Rank(1), ProtocolId(0), format!("{name} {number}"));
        let first = [message("one"), message("two")];
        world.send_all(&mut [Outbox::new(from, first.clone())]);
        sent.extend(first);
        let replay = world.enter(from, |scope| scope.replay(pattern)).expect("the peer lives");
        let ReplayStart::Queued { ticket, .. } = replay else { panic!("there is no credit: {replay:?}") };
        world.a_while();
        let behind = message("behind it");
        let kept = give(&world, &behind).expect("there is no credit");
        sent.extend([Message::new(Rank(1), ProtocolId(0), *b"replayed"), behind]);
        world.until("both arrive", |_| log.len() == sent.len() - 2);
        keeper.consume_all(&mut world, to);
        world.until("all arrive", |_| log.len() == sent.len());
        world.outcome(from, ticket).expect("both live");
        world.outcome(from, kept.0).expect("both live");
        keeper.consume_all(&mut world, to);
    }
    log.check(from, to, &sent);
}

/// A replay passes nothing that is kept for want of room: all of that is queued before it.
pub fn a_replay_passes_nothing_that_is_kept<H: Harness>(harness: H) {
    let mut world = World::with(harness, 2, |setup| setup.config.fifo_slots = 1);
    let log = Log::default();
    let protocol = world.record("row", &log);
    let (from, to) = (at(Rank(0)), at(Rank(1)));
    let mut sent = vec![Message::new(Rank(1), protocol, *b"known by")];
    world.send_all(&mut [Outbox::new(from, sent.clone())]);
    world.until("it knows the protocol", |_| log.len() == 1);
    let memory = world.memory(4096);
    memory.write(Rank(0), 0, &[9; 40]);
    let recorded = memory.recorded_send(Rank(1), protocol, 0, 40);
    let pattern =
        world.enter(from, |scope| scope.store_pattern(vec![recorded], Box::new(()))).expect("one send");
    world.pause(Rank(1));
    fill(&mut world, protocol, &mut sent);
    let kept = keep(&world, protocol, &mut sent, 4);
    match world.enter(from, |scope| scope.replay(pattern)).expect("the peer lives") {
        ReplayStart::Queued { ticket, .. } => world.enter(from, |scope| scope.detach(ticket)),
        other => panic!("it passed what waits: {other:?}"),
    }
    sent.push(Message::new(Rank(1), protocol, [9; 40]));
    assert!(kept.iter().all(|(_, deposit)| deposit.withdraw().is_none()), "it went before what is kept");
    world.resume(Rank(1));
    world.until("all arrive", |_| log.len() == sent.len());
    log.check(from, to, &sent);
}
