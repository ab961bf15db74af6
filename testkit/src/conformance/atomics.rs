//! Atomic operations: what they do, against a model of it; their order; that they are atomic in whatever way they go.

use super::world::at;
use super::{Harness, Log, Message, Outbox, Probe, World};
use crate::random::Random;
use posthaste_core::device::RemoteMemory;
use posthaste_core::engine::{Payload, Rma};
use posthaste_core::memory::{AtomicOp, SharedSlice, WordLen, WordOp};
use posthaste_core::{Fault, Rank, RmaError, Ticket};
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

const OPS: [AtomicOp; 8] = [
    AtomicOp::Load,
    AtomicOp::Store,
    AtomicOp::Swap,
    AtomicOp::Add,
    AtomicOp::And,
    AtomicOp::Or,
    AtomicOp::Xor,
    AtomicOp::CompareSwap,
];

const ADD: WordOp = WordOp { op: AtomicOp::Add, len: WordLen::Eight, operand: 1, expected: 0 };

/// What an operation makes of a word, written down once more.
fn model(op: &WordOp, bytes: &mut [u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let old = u64::from_ne_bytes(word);
    let mask = if bytes.len() == 4 { u64::from(u32::MAX) } else { u64::MAX };
    let (operand, expected) = (op.operand & mask, op.expected & mask);
    let new = match op.op {
        AtomicOp::Load => old,
        AtomicOp::Store | AtomicOp::Swap => operand,
        AtomicOp::Add => old.wrapping_add(operand) & mask,
        AtomicOp::And => old & operand,
        AtomicOp::Or => old | operand,
        AtomicOp::Xor => old ^ operand,
        AtomicOp::CompareSwap if old == expected => operand,
        AtomicOp::CompareSwap => old,
    };
    bytes.copy_from_slice(&new.to_ne_bytes()[..bytes.len()]);
    old
}

fn value(op: &WordOp, bytes: &[u8]) -> u64 {
    assert_eq!(bytes.len() as u64, op.len.bytes(), "an old value is as long as its word");
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

fn any(random: &mut Random) -> WordOp {
    let len = if random.chance(50) { WordLen::Four } else { WordLen::Eight };
    // Small numbers as well, so that a compare-and-swap succeeds now and then.
    let mut number = || if random.chance(70) { random.below(3) as u64 } else { random.next_word() };
    let (operand, expected) = (number(), number());
    WordOp { op: OPS[random.below(OPS.len())], len, operand, expected }
}

/// What is started, and what it has to end with: an operation's word, a get's bytes.
type Started = (Option<Ticket>, Option<(WordOp, u64)>, Vec<u8>);

/// Operations, puts and gets of one rank take effect in program order, each as it is defined, and leave the bytes around
/// them alone.
pub fn operations_do_what_they_say_in_program_order<H: Harness>(harness: H) {
    const LEN: usize = 64;
    let mut world = World::new(harness, 2);
    let memory = world.memory(4096);
    for (from, to) in [(Rank(0), Rank(1)), (Rank(1), Rank(1))] {
        let mut oracle = memory.bytes(to, 0, LEN);
        let mut open: Vec<Started> = Vec::new();
        for step in 0..400 {
            match world.random.below(8) {
                0 => {
                    let first = world.random.below(LEN - 20);
                    let count = world.random.below(20);
                    let bytes = world.random.bytes(count);
                    oracle[first..][..bytes.len()].copy_from_slice(&bytes);
                    let put = Rma::Put(Payload::Borrowed(&bytes));
                    open.push((world.access(&memory, from, to, first as u64, put), None, Vec::new()));
                }
                1 => {
                    let (first, len) = (world.random.below(LEN - 20), 1 + world.random.below(20));
                    let get = world.access(&memory, from, to, first as u64, Rma::Get(len as u64));
                    open.push((get, None, oracle[first..][..len].to_vec()));
                }
                _ => {
                    let op = any(&mut world.random);
                    let len = op.len.bytes() as usize;
                    let first = world.random.below(LEN / len) * len;
                    let old = model(&op, &mut oracle[first..][..len]);
                    let fetch = op.op != AtomicOp::Store && world.random.chance(50);
                    let rma = if fetch { Rma::Fetch(op) } else { Rma::Update(op) };
                    let ticket = world.access(&memory, from, to, first as u64, rma);
                    assert!(ticket.is_some() || !fetch, "an old value has to be waited for");
                    open.push((ticket, fetch.then_some((op, old)), Vec::new()));
                }
            }
            if world.random.chance(20) {
                world.step();
            }
            if step % 50 == 49 {
                for (ticket, old, bytes) in open.drain(..) {
                    let got = world.access_ends(from, ticket);
                    match old {
                        Some((op, old)) => assert_eq!(value(&op, &got), old, "{op:?}"),
                        None => assert_eq!(got, bytes),
                    }
                }
                assert_eq!(memory.bytes(to, 0, LEN), oracle, "after step {step}");
            }
        }
    }
}

/// Ranks add to one word, and its owner does so, too: nothing is lost, and no two get the same old value.
pub fn nothing_is_lost_between_ranks_and_the_owner<H: Harness>(harness: H) {
    const EACH: usize = 60;
    let mut world = World::new(harness, 3);
    let memory = world.memory(4096);
    let owner = Rank(1);
    let word = memory.slices[1].slice(8, 8).expect("inside");
    let mut left = [EACH; 3];
    let mut open = Vec::new();
    let mut old = BTreeSet::new();
    while left.iter().any(|left| *left > 0) {
        let rank = Rank(world.random.below(3) as u32);
        if left[rank.index()] == 0 {
            continue;
        }
        left[rank.index()] -= 1;
        if rank == owner && world.random.chance(50) {
            old.insert(word.apply(&ADD).expect("a word"));
        } else {
            open.push((rank, world.access(&memory, rank, owner, 8, Rma::Fetch(ADD))));
        }
        if world.random.chance(40) {
            world.step();
        }
    }
    for (rank, ticket) in open {
        assert!(old.insert(value(&ADD, &world.access_ends(rank, ticket))), "the same old value twice");
    }
    assert_eq!(old, (0..3 * EACH as u64).collect());
    assert_eq!(word.read_u64(0), 3 * EACH as u64);
}

/// When a handler runs, the operations that precede its message are done.
pub fn they_are_done_before_what_is_sent_behind_them<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let log = Log::default();
    let here: Arc<OnceLock<SharedSlice>> = Arc::default();
    for rank in world.ranks() {
        let (here, log) = (here.clone(), log.clone());
        world.register(
            rank,
            Probe::new("look", move |scope, message| {
                let memory = here.get().expect("set before anything is sent");
                let (at, source, info) = (scope.me(), message.source, message.info.to_vec());
                let bytes = memory.slice(0, 8).expect("inside").to_vec();
                log.push(super::Received { at, source, protocol: String::new(), info, bytes });
            }),
        );
    }
    let memory = world.memory(4096);
    here.set(memory.slices[1]).expect("set once");
    let mut outbox = Outbox::new(at(Rank(0)), []);
    let mut tickets = Vec::new();
    for number in 1..=100u64 {
        let rma = if number % 3 == 0 { Rma::Fetch(ADD) } else { Rma::Update(ADD) };
        tickets.push(world.access(&memory, Rank(0), Rank(1), 0, rma));
        let message = Message::new(Rank(1), posthaste_core::ProtocolId(0), vec![]);
        outbox.queue.push_back(message.info(number.to_le_bytes()));
        outbox.pump(&world);
        if world.random.chance(30) {
            world.step();
        }
    }
    world.send_all(&mut [outbox]);
    world.until("everything arrives", |_| log.len() == 100);
    for received in log.all() {
        let sent = u64::from_le_bytes(received.info.try_into().expect("eight bytes"));
        let there = u64::from_ne_bytes(received.bytes.try_into().expect("eight bytes"));
        assert!(there >= sent, "{there} of {sent} operations were there");
    }
    for ticket in tickets {
        world.access_ends(Rank(0), ticket);
    }
    assert_eq!(memory.slices[1].read_u64(0), 100);
}

/// What cannot be is refused at once; memory that its owner has not got is told by the owner.
pub fn impossible_ones_are_refused<H: Harness>(harness: H) {
    let mut world = World::new(harness, 2);
    let memory = world.memory(4096);
    let (from, to) = (Rank(0), Rank(1));
    let key = memory.remote[0][1];
    let refused = |world: &World<H>, rank: Rank, key: usize, offset: u64, op: WordOp| {
        world
            .enter(at(from), |scope| scope.rma(at(rank), key, offset, Rma::Fetch(op)))
            .expect_err("impossible")
    };
    let half = WordOp { len: WordLen::Four, ..ADD };
    let misaligned = |offset, len| RmaError::Misaligned { rank: to, offset, len };
    assert_eq!(refused(&world, to, key, 4, ADD), misaligned(4, 8));
    assert_eq!(refused(&world, to, key, 4087, ADD), misaligned(4087, 8));
    assert_eq!(refused(&world, to, key, 2, half), misaligned(2, 4));
    let outside = |offset, count| RmaError::OutOfRange { rank: to, offset, count, len: 4096 };
    assert_eq!(refused(&world, to, key, 4092, ADD), outside(4092, 8));
    assert_eq!(refused(&world, to, key, u64::MAX - 3, half), outside(u64::MAX - 3, 4));
    assert_eq!(refused(&world, Rank(7), key, 0, ADD), RmaError::UnknownRank { rank: Rank(7), size: 2 });
    assert_eq!(refused(&world, to, 999, 0, ADD), RmaError::Unreachable(to));
    if !world.caps().native_atomics || world.goes_over_send() {
        let absent = RemoteMemory { rank: to, offset: 1 << 40, len: 1 << 20, mapped: None, incarnation: 0 };
        let absent = world.enter(at(from), |scope| scope.table().remote.insert(absent));
        for round in 0..3 {
            let operations = [
                (absent, Rma::Fetch(ADD)),
                (key, Rma::Update(ADD)),
                (absent, Rma::Update(ADD)),
                (key, Rma::Fetch(ADD)),
            ];
            let tickets = operations.map(|(key, rma)| {
                let started = world.enter(at(from), |scope| scope.rma(at(to), key, 64, rma));
                (key, started.expect("in range").expect("nobody has answered"))
            });
            for (of, ticket) in tickets {
                let outcome = world.outcome(at(from), ticket);
                if of == absent {
                    assert_eq!(outcome.expect_err("there is no memory"), Fault::NoSuchMemory(to));
                } else {
                    outcome.expect("this is well");
                }
            }
            assert_eq!(memory.slices[1].read_u64(64), 2 * (round + 1));
        }
        assert!(world.errors(from).is_empty() && world.errors(to).is_empty(), "nobody was cut off");
    }
}

/// Operations on a lost peer end once, each well or with that, and no other ends so.
pub fn a_lost_target_ends_them<H: Harness>(harness: H) {
    let mut world = World::new(harness, 3);
    let memory = world.memory(4096);
    let (from, lost) = (Rank(0), Rank(1));
    let mut open = Vec::new();
    for _ in 0..40 {
        for to in [lost, Rank(2)] {
            for rma in [Rma::Fetch(ADD), Rma::Update(ADD)] {
                open.push((to, world.access(&memory, from, to, 0, rma)));
            }
        }
        if world.random.chance(30) {
            world.step();
        }
    }
    world.kill(lost);
    for (to, ticket) in open {
        let Some(ticket) = ticket else { continue };
        match world.outcome(at(from), ticket) {
            Ok(_) => {}
            Err(fault) => assert_eq!((to, fault), (lost, Fault::PeerLost(lost))),
        }
    }
    assert_eq!(memory.slices[2].read_u64(0), 80, "rank 2 lives");
    world.until("it is told", |world| !world.errors(from).is_empty());
    let key = memory.remote[0][1];
    let refused = world.enter(at(from), |scope| scope.rma(at(lost), key, 0, Rma::Update(ADD)));
    assert_eq!(refused.expect_err("it is gone"), RmaError::Fault(Fault::PeerLost(lost)));
}
