//! Everything at once, chosen at random, against a model.

use super::world::at;
use super::{Harness, Log, Memory, Message, Outbox, Probe, World};
use bytes::Bytes;
use posthaste_core::engine::{Payload, Rma};
use posthaste_core::protocol::Flow;
use posthaste_core::{Endpoint, ProtocolId, Rank, Ticket};
use std::collections::BTreeMap;

/// Bytes of each rank's memory that belong to one other rank.
const SHARE: usize = 4096;

/// Puts and gets of one ordered pair, with what the memory must hold in program order.
struct Accesses {
    model: BTreeMap<(Rank, Rank), Vec<u8>>,
    open: Vec<(Rank, Ticket, Option<Vec<u8>>)>,
}

impl Accesses {
    fn one<H: Harness>(&mut self, world: &mut World<H>, memory: &Memory, from: Rank, to: Rank) {
        let len = [1, 7, 8, 9, 16, 17, 63, 64, 65, 500][world.random.below(10)];
        let offset = world.random.below(SHARE - len + 1);
        let place = (from.index() * SHARE + offset) as u64;
        let model = self.model.entry((from, to)).or_insert_with(|| vec![0; SHARE]);
        if world.random.chance(50) {
            let bytes = world.random.bytes(len);
            model[offset..offset + len].copy_from_slice(&bytes);
            let ticket = world.access(memory, from, to, place, Rma::Put(Payload::Owned(Bytes::from(bytes))));
            self.open.extend(ticket.map(|ticket| (from, ticket, None)));
        } else {
            let expected = model[offset..offset + len].to_vec();
            let ticket = world.access(memory, from, to, place, Rma::Get(len as u64));
            self.open.extend(ticket.map(|ticket| (from, ticket, Some(expected))));
        }
    }

    fn check<H: Harness>(&mut self, world: &World<H>) {
        self.open.retain(|(from, ticket, expected)| match world.handle(at(*from)).slots().take(*ticket) {
            None => true,
            Some(outcome) => {
                let value = outcome.expect("nobody is lost");
                if let Some(expected) = expected {
                    assert!(value.as_bytes() == expected, "a get of rank {from} saw something else");
                }
                false
            }
        });
    }
}

fn protocols<H: Harness>(world: &World<H>, log: &Log) {
    for rank in world.ranks() {
        world.register(rank, Probe::recording("inline", log));
        for (name, flow) in [("credited", Flow::Credited), ("replied", Flow::Replied)] {
            let log = log.clone();
            let probe = Probe::new(name, move |scope, message| {
                let bytes = log.arrived(scope.me(), name, &message);
                match message.reply() {
                    Some(to) => scope.reply(to, Ok(Payload::Borrowed(&bytes))),
                    None => scope.consumed(message.credit()),
                }
            });
            world.register(rank, probe.flow(flow));
        }
    }
}

/// Sends of three protocols, requests, puts, gets, flushes and pauses between all pairs.
pub fn everything_at_once<H: Harness>(harness: H) {
    let mut world = World::with(harness, 3, |setup| {
        setup.config.credits = setup.config.credits.min(3);
        setup.config.fifo_slots = 6;
    });
    let log = Log::default();
    protocols(&world, &log);
    let memory = world.memory(SHARE as u64 * 3);
    let sizes = world.sizes();
    let mut accesses = Accesses { model: BTreeMap::new(), open: Vec::new() };
    // One outbox per pair: the order of a pair is that of its outbox.
    let mut outboxes: BTreeMap<(Rank, Rank), (Outbox, Vec<Message>)> = BTreeMap::new();
    let mut flushes: Vec<(Endpoint, Endpoint, Ticket, usize)> = Vec::new();
    for round in 0..1500 {
        let (from, to) = (Rank(world.random.below(3) as u32), Rank(world.random.below(3) as u32));
        let (outbox, sent) =
            outboxes.entry((from, to)).or_insert_with(|| (Outbox::new(at(from), []), Vec::new()));
        match world.random.below(10) {
            0..4 => {
                let protocol = ProtocolId(world.random.below(3) as u16);
                let len = sizes[world.random.below(sizes.len())];
                let mut message = Message::filled(at(from), at(to), protocol, sent.len(), round % 113, len);
                message.request = protocol == ProtocolId(2);
                sent.push(message.clone());
                outbox.queue.push_back(message);
            }
            4..6 => {
                accesses.one(&mut world, &memory, from, to);
            }
            6 => {
                outbox.pump(&world);
                let handed_over = sent.len() - outbox.queue.len();
                let flush = world.enter(at(from), |scope| scope.flush(at(to))).expect("nobody is lost");
                flushes.extend(flush.map(|ticket| (at(from), at(to), ticket, handed_over)));
            }
            7 if round < 1400 => {
                if world.random.chance(50) {
                    world.pause(to);
                } else {
                    world.resume(to);
                }
            }
            _ => {
                for _ in 0..world.random.below(30) {
                    world.step();
                }
            }
        }
        outboxes.values_mut().for_each(|(outbox, _)| outbox.pump(&world));
        accesses.check(&world);
        flushes.retain(|&(from, to, ticket, sent)| match world.handle(from).slots().take(ticket) {
            None => true,
            Some(outcome) => {
                assert!(outcome.is_ok());
                assert!(log.of(from, to).len() >= sent, "a flush from {from} to {to} came back too early");
                false
            }
        });
    }
    for rank in world.ranks().collect::<Vec<_>>() {
        world.resume(rank);
    }
    let total: usize = outboxes.values().map(|(_, sent)| sent.len()).sum();
    world.until("everything ends", |world| {
        outboxes.values_mut().for_each(|(outbox, _)| outbox.pump(world));
        accesses.check(world);
        flushes.retain(|&(from, _, ticket, _)| world.handle(from).slots().take(ticket).is_none());
        outboxes.values().all(|(outbox, _)| outbox.is_done())
            && accesses.open.is_empty()
            && flushes.is_empty()
            && log.len() >= total
    });
    world.a_while();
    for ((from, to), (outbox, sent)) in &outboxes {
        assert!(outbox.failed.is_empty(), "{:?}", outbox.failed);
        log.check(at(*from), at(*to), sent);
        for (n, answer) in &outbox.answers {
            assert!(answer.as_ref().expect("answered").as_bytes() == sent[*n].payload, "answer {n}");
        }
    }
    for ((from, to), model) in &accesses.model {
        let place = (from.index() * SHARE) as u64;
        assert!(memory.bytes(*to, place, SHARE) == *model, "what rank {from} put to rank {to}");
    }
    for rank in world.ranks() {
        assert!(world.errors(rank).is_empty(), "{:?}", world.errors(rank));
    }
}
