//! The boards of a whole job under a seeded schedule: ranks die, leave and call the wrong thing at any moment, and
//! messages of different pairs arrive in any order.

use super::board::{Board, Effects};
use super::record::Record;
use bytes::Bytes;
use posthaste_core::{Collective, ContextId, Fault, JobShape, Rank, WindowId};
use std::collections::{BTreeSet, VecDeque};

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Barrier,
    Gather,
    Make,
    /// The oldest window.
    Free,
}

/// An operation under way.
#[derive(Debug)]
struct Current {
    number: u64,
    call: Collective,
    round: u32,
    sent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Life {
    Alive,
    Dead,
    Left,
}

struct Node {
    board: Board,
    script: VecDeque<Step>,
    current: Option<Current>,
    /// Windows that it has and has not released.
    held: BTreeSet<u64>,
    life: Life,
    failed: Option<Fault>,
    finished: bool,
}

struct World {
    random: Random,
    size: u32,
    nodes: Vec<Node>,
    /// By sender, then by receiver.
    lanes: Vec<Vec<VecDeque<Bytes>>>,
    /// Whether the receiver knows that the sender is gone.
    told: Vec<Vec<bool>>,
    /// Whether the receiver's second context is done with what the sender, who is gone, has put through it.
    drained: Vec<Vec<bool>>,
}

impl World {
    fn new(seed: u64, size: u32, script: &[Step]) -> World {
        let shape = JobShape { ranks: size, clients: 1, contexts: 2 };
        let node = |rank| Node {
            board: Board::new(Rank(rank), shape),
            script: script.iter().copied().collect(),
            current: None,
            held: BTreeSet::new(),
            life: Life::Alive,
            failed: None,
            finished: false,
        };
        let n = size as usize;
        World {
            random: Random(seed),
            size,
            nodes: (0..size).map(node).collect(),
            lanes: vec![vec![VecDeque::new(); n]; n],
            told: vec![vec![false; n]; n],
            drained: vec![vec![false; n]; n],
        }
    }

    fn send(&mut self, from: usize, to: Rank, record: Bytes) {
        self.lanes[from][to.index()].push_back(record);
    }

    fn send_all(&mut self, from: usize, record: &Bytes) {
        for to in self.nodes[from].board.others() {
            self.send(from, to, record.clone());
        }
    }

    fn apply(&mut self, at: usize, effects: &Effects) {
        assert!(!effects.corrupt, "honest ranks break no rules");
        for to in &effects.relay {
            let record = self.nodes[at].board.broken_record().expect("a broken board");
            self.send(at, *to, record);
        }
    }

    /// Lets a rank go one step; false if it waits or is done.
    fn step(&mut self, at: usize) -> bool {
        let node = &mut self.nodes[at];
        if node.life != Life::Alive || node.finished {
            return false;
        }
        if node.current.is_some() {
            return self.go_on(at);
        }
        let mut effects = Effects::default();
        let step = match node.script.pop_front() {
            Some(step) if node.failed.is_none() => step,
            // Done, or given up: what is held is freed.
            _ if !node.held.is_empty() => Step::Free,
            _ => {
                node.finished = true;
                return true;
            }
        };
        let window = node.held.first().copied();
        let call = match (step, window) {
            (Step::Barrier, _) => Collective::Barrier,
            (Step::Gather, _) => Collective::AllGather(3),
            (Step::Make, _) => Collective::Shmalloc,
            (Step::Free, Some(window)) => Collective::Free(WindowId(window as u32)),
            (Step::Free, None) => return true,
        };
        let begun = node.board.begin(call, &mut effects);
        if let (Step::Free, Some(window)) = (step, window) {
            node.held.remove(&window);
            node.board.release(window, begun.is_ok(), &mut effects);
            let record = match begun {
                Ok(number) => Record::part(call, number, 0, &[]),
                Err(_) => Record::release(window),
            };
            self.send_all(at, &record.freeze());
        }
        let node = &mut self.nodes[at];
        match begun {
            Ok(number) => {
                if step == Step::Make {
                    node.board.track(number, None);
                }
                node.current = Some(Current { number, call, round: 0, sent: false });
            }
            Err(fault) => {
                node.failed.get_or_insert(fault);
            }
        }
        self.apply(at, &effects);
        true
    }

    /// The rounds of [`Operation`](super::Operation), one at a time.
    fn go_on(&mut self, at: usize) -> bool {
        let (me, size) = (at as u32, self.size);
        let node = &mut self.nodes[at];
        let Some(current) = &mut node.current else { return false };
        if let Collective::Free(window) = current.call {
            let done = node.board.is_released(window.0.into());
            return match (done, node.board.failure(current.number)) {
                (true, _) => self.end(at, Ok(())),
                (false, Some(fault)) => self.end(at, Err(fault)),
                (false, None) => false,
            };
        }
        let distance = 1 << current.round;
        if distance >= size {
            return self.end(at, Ok(()));
        }
        let after = Rank((me + distance) % size);
        let before = Rank((me + size - distance) % size);
        let (to, from, bytes) = match current.call {
            Collective::Barrier => (after, before, 0),
            Collective::Shmalloc => (before, after, super::PART_BYTES),
            _ => (before, after, 3),
        };
        if !current.sent {
            current.sent = true;
            let blob = vec![0; bytes * distance.min(size - distance) as usize];
            let record = Record::part(current.call, current.number, current.round, &blob);
            self.send(at, to, record.freeze());
            return true;
        }
        match node.board.take(current.number, current.round, from) {
            None => false,
            Some(Err(fault)) => self.end(at, Err(fault)),
            Some(Ok(_)) => {
                (current.round, current.sent) = (current.round + 1, false);
                true
            }
        }
    }

    fn end(&mut self, at: usize, result: Result<(), Fault>) -> bool {
        let node = &mut self.nodes[at];
        let Some(Current { number, call, .. }) = node.current.take() else { return false };
        let mut effects = Effects::default();
        if let Collective::Free(window) = call {
            node.board.release(window.0.into(), false, &mut effects);
        }
        match result {
            Ok(()) if call == Collective::Shmalloc => {
                node.held.insert(number);
            }
            Ok(()) => {}
            Err(fault) => {
                node.failed.get_or_insert(fault);
                node.board.break_from(number, u64::MAX, fault, &mut effects);
                let mismatch = matches!(fault, Fault::CollectiveMismatch { .. });
                if call == Collective::Shmalloc {
                    node.board.release(number, false, &mut effects);
                }
                if call == Collective::Shmalloc || mismatch {
                    self.send_all(at, &Record::release(number).freeze());
                }
            }
        }
        assert!(self.nodes[at].board.end(number).is_none(), "no task waits here");
        self.apply(at, &effects);
        true
    }

    /// Delivers the next record of a lane, or the news of its sender's end.
    fn deliver(&mut self, from: usize, to: usize) -> bool {
        if self.nodes[to].life != Life::Alive || from == to {
            return false;
        }
        let mut effects = Effects::default();
        if let Some(record) = self.lanes[from][to].pop_front() {
            let record = Record::parse(&record, || record.clone()).expect("a record");
            self.nodes[to].board.on_record(Rank(from as u32), record, &mut effects);
        } else if self.nodes[from].life != Life::Alive && !self.told[from][to] {
            self.told[from][to] = true;
            let rank = Rank(from as u32);
            let fault = match self.nodes[from].life {
                Life::Left => Fault::PeerClosed(rank),
                _ => Fault::PeerLost(rank),
            };
            self.nodes[to].board.drained(ContextId(0), rank, 0, &mut effects);
            self.nodes[to].board.peer_down(rank, fault, &mut effects);
        } else {
            return false;
        }
        self.apply(to, &effects);
        true
    }

    /// The second context of a rank comes to the end of another one, before or behind the first.
    fn drain(&mut self, from: usize, to: usize) -> bool {
        let ends = self.nodes[from].life != Life::Alive && self.nodes[to].life == Life::Alive && from != to;
        if !ends || std::mem::replace(&mut self.drained[from][to], true) {
            return false;
        }
        let mut effects = Effects::default();
        self.nodes[to].board.drained(ContextId(1), Rank(from as u32), 0, &mut effects);
        self.apply(to, &effects);
        true
    }

    /// I10: what one rank may still write to, or has written to before its end, no other takes for unused.
    fn check(&self) {
        for (from, holder) in self.nodes.iter().enumerate() {
            for window in &holder.held {
                for (rank, owner) in self.nodes.iter().enumerate() {
                    let reaches = holder.life == Life::Alive || from != rank && !self.drained[from][rank];
                    let reused = owner.life == Life::Alive && owner.board.is_unused(*window);
                    assert!(!(reaches && reused), "rank {rank} reuses its part of window {window} of {from}");
                }
            }
        }
    }

    /// A random thing happens; false if none could.
    fn turn(&mut self) -> bool {
        let n = self.size as usize;
        // Steps and deliveries, from a random place on until one of them changes something.
        let all = n + 2 * n * n;
        let start = self.random.below(all);
        (0..all).any(|more| match (start + more) % all {
            at if at < n => self.step(at),
            pair if pair < n + n * n => self.deliver((pair - n) / n, (pair - n) % n),
            pair => self.drain((pair - n) / n - n, (pair - n) % n),
        })
    }

    /// Nobody waits, everybody has got the same number of things done or knows why not, and no memory stays taken.
    fn check_end(&self, seed: u64) {
        for (rank, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.life == Life::Alive) {
            let (current, failed) = (&node.current, node.failed);
            assert!(node.finished, "seed {seed}: rank {rank} waits for ever: {current:?}, {failed:?}");
            assert!(node.held.is_empty());
            assert_eq!(node.board.tracked(), 0, "seed {seed}: rank {rank} keeps memory, {failed:?}");
        }
    }
}

fn script(random: &mut Random) -> Vec<Step> {
    let steps = [Step::Barrier, Step::Gather, Step::Make, Step::Make, Step::Free];
    (0..8).map(|_| steps[random.below(steps.len())]).collect()
}

#[test]
fn without_failures_everything_ends_well() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let size = 1 + random.below(9) as u32;
        let mut world = World::new(seed, size, &script(&mut random));
        while world.turn() {
            world.check();
        }
        world.check_end(seed);
        assert!(world.nodes.iter().all(|node| node.failed.is_none()), "seed {seed}");
    }
}

#[test]
fn whoever_dies_or_leaves_at_any_moment_nobody_waits_for_ever_and_i10_holds() {
    for seed in 0..3000 {
        let mut random = Random(seed);
        let size = 2 + random.below(8) as u32;
        let mut world = World::new(seed, size, &script(&mut random));
        let victims = 1 + random.below(3);
        let mut ends: Vec<(usize, usize, Life)> = (0..victims)
            .map(|_| {
                let life = if random.below(2) == 0 { Life::Dead } else { Life::Left };
                (random.below(400), random.below(size as usize), life)
            })
            .collect();
        let mut turn = 0;
        loop {
            let due = |end: &(usize, usize, Life)| end.0 <= turn;
            while let Some(at) = ends.iter().position(due) {
                let (_, victim, life) = ends.swap_remove(at);
                if world.nodes[victim].life == Life::Alive {
                    world.nodes[victim].life = life;
                }
            }
            world.check();
            if !world.turn() && ends.is_empty() {
                break;
            }
            turn += 1;
        }
        world.check_end(seed);
    }
}

#[test]
fn a_rank_that_calls_something_else_is_told_to_all_and_taken_for_no_other_fault() {
    for seed in 0..1000 {
        let mut random = Random(seed);
        let size = 2 + random.below(8) as u32;
        let common = vec![Step::Make, Step::Make, Step::Barrier, Step::Barrier];
        let mut world = World::new(seed, size, &common);
        let odd = random.below(size as usize);
        world.nodes[odd].script[2] = [Step::Gather, Step::Make, Step::Free][random.below(3)];
        while world.turn() {
            world.check();
        }
        world.check_end(seed);
        for node in &world.nodes {
            let Some(Fault::CollectiveMismatch { ranks, .. }) = node.failed else {
                panic!("seed {seed}: {:?}", node.failed)
            };
            assert!(ranks.contains(&Rank(odd as u32)), "seed {seed}: {ranks:?}, not {odd}");
        }
    }
}

#[test]
fn ranks_that_are_ahead_and_call_different_things_are_told_apart() {
    let mut board = Board::new(Rank(0), JobShape { ranks: 4, clients: 1, contexts: 1 });
    let mut effects = Effects::default();
    let (ours, theirs) = (Collective::AllGather(4), Collective::AllGather(8));
    for (source, call, round, len) in [(Rank(1), ours, 0, 4), (Rank(2), theirs, 1, 16)] {
        let record = Record::part(call, 0, round, &vec![0; len]).freeze();
        board.on_record(source, Record::parse(&record, || record.clone()).expect("a record"), &mut effects);
    }
    let mismatch = Fault::CollectiveMismatch { ranks: [Rank(1), Rank(2)], calls: [ours, theirs] };
    assert_eq!(board.begin(ours, &mut effects), Err(mismatch));
    assert!(!effects.relay.is_empty() && !effects.corrupt);
}

#[test]
fn a_rank_that_was_started_again_tells_nobody_of_what_it_has_missed() {
    let shape = JobShape { ranks: 8, clients: 1, contexts: 1 };
    let (mut board, mut effects) = (Board::new(Rank(3), shape), Effects::default());
    board.outlive(Fault::StaleHandle { rank: Rank(3), held: 0, now: 1 });
    for rank in [7, 2, 4, 0] {
        board.drained(ContextId(0), Rank(rank), 0, &mut effects);
        let fault = if rank == 0 { Fault::PeerLost(Rank(0)) } else { Fault::PeerClosed(Rank(rank)) };
        board.peer_down(Rank(rank), fault, &mut effects);
    }
    assert!(board.begin(Collective::Barrier, &mut effects).is_err());
    assert_eq!(effects.relay, [], "the windows of the others are as they were");
}

#[test]
fn the_news_gets_past_ranks_that_have_left() {
    for seed in 0..2000 {
        let mut world = World::new(seed, 8, &[Step::Make]);
        for node in &mut world.nodes {
            node.script.push_back(Step::Barrier);
        }
        world.nodes[0].script[1] = Step::Free;
        while world.nodes.iter().any(|node| node.held.is_empty()) {
            assert!(world.turn());
            for node in world.nodes.iter_mut().filter(|node| !node.held.is_empty()) {
                // Nobody goes on before all have the window.
                node.finished = true;
            }
        }
        // All neighbours of rank 0 leave; the two others fail, and neither frees the window nor leaves.
        for node in [1, 2, 4, 6, 7] {
            world.nodes[node].life = Life::Left;
        }
        for node in [0, 3, 5] {
            world.nodes[node].finished = false;
        }
        for node in [3, 5] {
            world.nodes[node].held.clear();
        }
        while world.turn() {}
        assert!(world.nodes[0].finished, "seed {seed}: rank 0 waits for ever");
        assert!(world.nodes[0].failed.is_some(), "seed {seed}");
    }
}

#[test]
fn records_of_any_content_cause_no_panic_and_fill_no_memory() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let size = 1 + random.below(9) as u32;
        let mut board = Board::new(Rank(0), JobShape { ranks: size, clients: 1, contexts: 1 });
        let mut effects = Effects::default();
        let made = board.begin(Collective::Shmalloc, &mut effects).expect("the first operation");
        board.track(made, None);
        for _ in 0..20_000 {
            let mut word = || match random.below(4) {
                0 => random.below(8) as u64,
                1 => 1 << random.below(64),
                2 => u64::MAX - random.below(3) as u64,
                _ => random.below(usize::MAX) as u64,
            };
            let mut bytes = Vec::new();
            bytes.extend_from_slice(&(word() as u32).to_le_bytes());
            bytes.extend_from_slice(&(word() as u32).to_le_bytes());
            bytes.extend_from_slice(&word().to_le_bytes());
            bytes.extend_from_slice(&word().to_le_bytes());
            for _ in 0..word() % 29 {
                bytes.push(word() as u8);
            }
            let source = Rank(random.below(size as usize) as u32);
            let bytes = Bytes::from(bytes);
            if let Some(record) = Record::parse(&bytes, || bytes.clone()) {
                board.on_record(source, record, &mut Effects::default());
            }
        }
        assert!(board.waiting() <= 20_000);
        assert_eq!(board.tracked(), 1, "this rank has not released its window");
    }
    // However far ahead a rank claims to be, what is kept for it is bounded.
    let mut board = Board::new(Rank(0), JobShape { ranks: 2, clients: 1, contexts: 1 });
    let mut corrupt = 0;
    for operation in 0..200_000 {
        for record in [
            Record::part(Collective::Barrier, operation, 0, &[]),
            Record::part(Collective::Free(WindowId(operation as u32)), operation, 0, &[]),
            Record::release(operation),
        ] {
            let mut effects = Effects::default();
            let record = record.freeze();
            let record = Record::parse(&record, || record.clone()).expect("a record");
            board.on_record(Rank(1), record, &mut effects);
            corrupt += usize::from(effects.corrupt);
        }
    }
    assert!(corrupt > 0);
    assert!(board.waiting() <= 3 << 16, "{}", board.waiting());
}
